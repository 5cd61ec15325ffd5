"""Identity of a block: a chained digest over everything that its keys and values depend on.

    namespace  = H(tenant, cache salt, prompt cache key)
    root       = H(model fingerprint, KV dtype, layout, block size, TP rank, TP size, namespace)
    block_hash = H(parent hash, tokens, extra)

Knows digests and their canonical bytes; does not know where a block is, nor who asks. Nothing here
depends on a process, a machine, a time or a random seed. What is hashed is a sequence of fields,
each `tag length (1 byte), tag, value length (8 bytes, little-endian), value`, of which the first
is the format and the second what is hashed; so two different inputs never have the same bytes.
"""

import hashlib
import operator
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import SupportsIndex

import xxhash

from tieredkv.errors import RequestError
from tieredkv.types import BlockHash, HashAlgo

FORMAT = b"tieredkv/1"
MAX_CACHE_SALT_CHARS = 128
_TOKEN_BYTES = 4


def model_root(
    fingerprint: bytes,
    kv_dtype: str,
    layout: str,
    block_size: int,
    tp_rank: int,
    tp_size: int,
    namespace: bytes,
    algo: HashAlgo = "sha256",
) -> BlockHash:
    """Return the parent of every first block: what all blocks of a chain have in common."""
    fields = (
        ("model", fingerprint),
        ("dtype", _text(kv_dtype)),
        ("layout", _text(layout)),
        ("block_size", _integer(block_size)),
        ("tp_rank", _integer(tp_rank)),
        ("tp_size", _integer(tp_size)),
        ("namespace", namespace),
    )
    return BlockHash(_DIGESTS[algo](_encode("root", fields)))


def namespace_digest(
    tenant: str,
    cache_salt: str | None = None,
    prompt_cache_key: str | None = None,
    algo: HashAlgo = "sha256",
) -> bytes:
    """Return the namespace within which blocks are shared.

    The tenant is a field of its own, so a salt or key narrows a tenant's namespace and never
    reaches another's. None is not the empty string.

    Raises:
        RequestError: the salt is not one; see `check_cache_salt`.
    """
    fields = [("tenant", _text(tenant))]
    if (salt := check_cache_salt(cache_salt)) is not None:
        fields.append(("salt", _text(salt)))
    if prompt_cache_key is not None:
        fields.append(("key", _text(prompt_cache_key)))
    return _DIGESTS[algo](_encode("namespace", fields))


def check_cache_salt(cache_salt: object) -> str | None:
    """Return a request's `cache_salt` if it is one.

    Raises:
        RequestError: neither None nor a string of 1 to 128 characters.
    """
    if cache_salt is None:
        return None
    if not isinstance(cache_salt, str):
        raise RequestError("`cache_salt` must be a string", param="cache_salt", code="invalid_type")
    if not 1 <= len(cache_salt) <= MAX_CACHE_SALT_CHARS:
        raise RequestError(
            f"`cache_salt` has {len(cache_salt)} characters; "
            f"allowed: 1 to {MAX_CACHE_SALT_CHARS}, or no salt at all",
            param="cache_salt",
            code="invalid_value",
        )
    return cache_salt


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Return token ids as packed uint32, little-endian.

    Raises:
        RequestError: an id is not an integer from 0 to 2^32 - 1.
    """
    tokens = list(token_ids)
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError):
        wrong = next(t for t in tokens if not _is_token_id(t))
        raise RequestError(
            f"token id {wrong!r} is not an integer from 0 to {(1 << 32) - 1}",
            param="prompt",
            code="invalid_value",
        ) from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def block_hash(
    parent: bytes,
    tokens: bytes,
    extra: Sequence[tuple[str, bytes]] = (),
    algo: HashAlgo = "sha256",
) -> BlockHash:
    """Return the hash of one full block.

    Args:
        parent: hash of the block before it, or the root.
        tokens: its token ids, from `pack_tokens`.
        extra: what else its keys and values depend on: (kind, id) pairs, such as an adapter's
            name or an image's digest. Their order counts.
        algo: the same for a whole chain.
    """
    head, middle, tail = _block_frame(len(parent), len(tokens), extra)
    return BlockHash(_DIGESTS[algo](b"".join((head, parent, middle, tokens, tail))))


def chain_hashes(
    root: BlockHash,
    token_ids: Sequence[int],
    block_size: int,
    extra: Sequence[tuple[str, bytes]] = (),
    algo: HashAlgo = "sha256",
    prev: Sequence[BlockHash] | None = None,
) -> list[BlockHash]:
    """Return the hashes of all full blocks of a prompt, first block first.

    Equal to `block_hash` block by block, of which it is the fast form.

    Args:
        root: the chain's `model_root`.
        token_ids: the whole prompt; an unfilled last block is left out.
        block_size: tokens a block.
        extra: given to every block that is hashed here.
        algo: the same for a whole chain.
        prev: hashes of the leading blocks, if known: they are taken as they are.
    """
    hashes = list(prev or ())
    parent = hashes[-1] if hashes else root
    packed = memoryview(pack_tokens(token_ids[len(hashes) * block_size :]))
    block_bytes = block_size * _TOKEN_BYTES
    digest, join = _DIGESTS[algo], b"".join
    parent_bytes = -1
    for end in range(block_bytes, len(packed) + 1, block_bytes):
        if len(parent) != parent_bytes:
            parent_bytes = len(parent)
            head, middle, tail = _block_frame(parent_bytes, block_bytes, extra)
        tokens = packed[end - block_bytes : end]
        parent = BlockHash(digest(join((head, parent, middle, tokens, tail))))
        hashes.append(parent)
    return hashes


def _block_frame(
    parent_bytes: int, tokens_bytes: int, extra: Sequence[tuple[str, bytes]]
) -> tuple[bytes, bytes, bytes]:
    """Return what stands before, between and after a block's parent hash and its tokens."""
    head = _encode("block", ()) + _header("parent", parent_bytes)
    tail = b"".join(_field("kind", _text(kind)) + _field("id", value) for kind, value in extra)
    return head, _header("tokens", tokens_bytes), tail


def _encode(what: str, fields: Iterable[tuple[str, bytes]]) -> bytes:
    opening = (("format", FORMAT), ("what", _text(what)))
    return b"".join(_field(tag, value) for tag, value in (*opening, *fields))


def _field(tag: str, value: bytes) -> bytes:
    return _header(tag, len(value)) + value


def _header(tag: str, value_bytes: int) -> bytes:
    return bytes((len(tag),)) + tag.encode("ascii") + value_bytes.to_bytes(8, "little")


def _text(value: str) -> bytes:
    # JSON may carry lone surrogates; they are text of their own like any other.
    return value.encode("utf-8", "surrogatepass")


def _integer(value: int) -> bytes:
    return value.to_bytes(8, "little")


def _is_token_id(value: object) -> bool:
    return isinstance(value, SupportsIndex) and 0 <= operator.index(value) < 1 << 32


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


_DIGESTS: dict[HashAlgo, Callable[[bytes], bytes]] = {
    "sha256": _sha256,
    "xxh3_128": xxhash.xxh3_128_digest,
}
