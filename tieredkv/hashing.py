"""Identity: what a block is, as bytes that are equal in every process and on every machine.

    root        = H("tieredkv/1", model fingerprint, KV dtype, layout, block size, TP, namespace)
    block_hash  = H(parent hash, tokens as packed uint32 little-endian)
    namespace   = H(tenant)[:8] + H(tenant, cache salt, prompt cache key)[:24], of 32 bytes

Every field is written as a one-byte tag, a u32 length and its bytes, so that no two different
inputs have the same encoding. Python's `hash()`, pickle, time and randomness are not used.

`H` is SHA-256 or, for a single trusted tenant, xxh3_128, which is faster but not
collision-resistant.
"""

import hashlib
import re
import struct
import sys
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import msgspec
import xxhash

from tieredkv.errors import RequestError
from tieredkv.types import NAMESPACE_BYTES, TENANT_BYTES, BlockHash, HashAlgo, KVSpec

IDENTITY_VERSION = b"tieredkv/1"
LAYOUT = "block-contiguous/1"
"""How `KVSpec` lays keys and values out in a block."""

MAX_SALT_CHARS = 128

_STATE = re.compile(rf"{re.escape(LAYOUT)} states ([1-9]\d{{0,5}}) grid \d+")

_TAG_PAGE = struct.pack("<BI", 0x40, 8)
_TAG_PARENT = 0x20
_TAG_TOKENS = 0x21

_Fields = dict[int, bytes | str | int | None]


def _hasher(algo: HashAlgo) -> Callable[..., Any]:
    return hashlib.sha256 if algo == "sha256" else xxhash.xxh3_128


def _digest(algo: HashAlgo, purpose: bytes, fields: _Fields) -> bytes:
    """Return the digest of the version, the purpose and the tagged fields; None is left out."""
    digest = _hasher(algo)()
    for tag, value in ({0x01: IDENTITY_VERSION, 0x02: purpose} | fields).items():
        if isinstance(value, str):
            value = value.encode(errors="surrogatepass")  # JSON may hold a lone surrogate
        elif isinstance(value, int):
            value = struct.pack("<Q", value)
        if value is not None:
            digest.update(struct.pack("<BI", tag, len(value)) + value)
    return bytes(digest.digest())


def namespace_digest(
    tenant: str,
    cache_salt: str | None = None,
    prompt_cache_key: str | None = None,
    *,
    algo: HashAlgo = "sha256",
) -> bytes:
    """Return the digest of the namespace within which requests may share blocks.

    A salt or a key narrows the namespace of the tenant and never widens it. The digests of all
    namespaces of a tenant begin with the same `TENANT_BYTES` bytes, and all have as many bytes,
    with zeroes at the end where `algo` gives fewer.

    Raises:
        RequestError: the salt is empty or longer than 128 characters.
    """
    if cache_salt is not None and not 0 < len(cache_salt) <= MAX_SALT_CHARS:
        raise RequestError(
            f"`cache_salt` must have 1 to {MAX_SALT_CHARS} characters, but has {len(cache_salt)}.",
            param="cache_salt",
            code="invalid_value",
        )
    who: _Fields = {0x30: tenant, 0x31: cache_salt, 0x32: prompt_cache_key}
    of_tenant = _digest(algo, b"namespace", {0x30: tenant})[:TENANT_BYTES]
    return (of_tenant + _digest(algo, b"namespace", who))[:NAMESPACE_BYTES].ljust(
        NAMESPACE_BYTES, b"\0"
    )


def tenant_digest(tenant: str, *, algo: HashAlgo = "sha256") -> bytes:
    """Return the first bytes that the digests of all namespaces of a tenant have in common."""
    return namespace_digest(tenant, algo=algo)[:TENANT_BYTES]


def model_root(
    fingerprint: bytes, kv: KVSpec, namespace: bytes, *, algo: HashAlgo, layout: str | None = None
) -> BlockHash:
    """Return the root, which is the parent of every chain's first block; there is only one rank."""
    layout = layout or layout_of(kv)
    model: _Fields = {0x10: fingerprint, 0x11: kv.dtype, 0x12: layout, 0x13: kv.block_size}
    rank: _Fields = {0x14: 0, 0x15: 1}  # the rank's number, and the number of ranks
    return BlockHash(_digest(algo, b"root", {**model, **rank, 0x16: namespace}))


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What the roots of one model are made of, besides the namespace.

    Attributes:
        fingerprint: in hex.
        dtype: of keys and values.
        block_size: tokens a block.
        hash_algo: which hash names its blocks.
        layout: of its pages.
    """

    fingerprint: str
    dtype: str
    block_size: int
    hash_algo: HashAlgo
    layout: str = LAYOUT

    def root(self, namespace: bytes) -> BlockHash:
        """Return the root of this model's chains in a namespace."""
        spec = KVSpec(layers=(), dtype=self.dtype, block_size=self.block_size)
        fingerprint, algo = bytes.fromhex(self.fingerprint), self.hash_algo
        return model_root(fingerprint, spec, namespace, algo=algo, layout=self.layout)


def chain_hashes(
    parent: BlockHash, token_ids: Sequence[int], block_size: int, *, algo: HashAlgo = "sha256"
) -> list[BlockHash]:
    """Return the hashes of all full blocks of a sequence that follows `parent`, head first.

    Tokens after the last full block are left out: they are not hashed and not shared. Every token
    is a u32; an array that holds them packed already is not copied whole.
    """
    num_blocks = len(token_ids) // block_size
    packed = token_ids if isinstance(token_ids, array) else array("I", list(token_ids))
    packed = packed[: num_blocks * block_size]
    if sys.byteorder != "little":
        packed.byteswap()
    tokens = packed.tobytes()
    new, stride = _hasher(algo), 4 * block_size
    before_tokens = struct.pack("<BI", _TAG_TOKENS, stride)
    hashes: list[bytes] = []
    before_parent, before_digest = (
        struct.pack("<BI", _TAG_PARENT, size) for size in (len(parent), new().digest_size)
    )
    digest: bytes = parent
    for start in range(0, num_blocks * stride, stride):
        block = tokens[start : start + stride]
        digest = new(before_parent + digest + before_tokens + block).digest()
        before_parent = before_digest
        hashes.append(digest)
    return cast(list[BlockHash], hashes)


class PageNames:
    """Names the further pages of blocks.

    Args:
        pages: for each of a block's pages its group of layers, and which part of that it is.
        algo: which hash names blocks and pages.
    """

    def __init__(self, pages: Iterable[tuple[int, int]], algo: HashAlgo) -> None:
        self._new = _hasher(algo)
        self._head = struct.pack("<BI", _TAG_PARENT, self._new().digest_size)
        self._ends = [_TAG_PAGE + struct.pack("<II", group, part) for group, part in pages]

    def of(self, block_hash: BlockHash) -> list[BlockHash]:
        """Return the hashes of all pages of a block."""
        new, told = self._new, self._head + block_hash
        return [new(told + end).digest() for end in self._ends]

    def one_of(self, block_hash: BlockHash, number: int) -> BlockHash:
        """Return the hash of one of the pages of a block."""
        return BlockHash(self._new(self._head + block_hash + self._ends[number]).digest())

    def __len__(self) -> int:
        return len(self._ends)


def layout_of(kv: KVSpec) -> str:
    """Return how keys and values lie in pages, as far as the model itself does not decide it."""
    if kv.states:
        return f"{LAYOUT} states {kv.state_pages} grid {kv.grid_blocks}"
    windows = [kind.window for kind in kv.page_kinds[1:]]
    return f"{LAYOUT} windows {windows}" if windows else LAYOUT


def windows_of(layout: str) -> list[int]:
    """Return the windows of the further pages of a block; none of a layout that is not known.

    Of a recurrent state the last block before it is needed, as of a window of one token.
    """
    if found := _STATE.fullmatch(layout):
        return [1] * int(found[1])
    _, _, windows = layout.partition(f"{LAYOUT} windows ")
    try:
        return msgspec.json.decode(windows, type=list[int]) if windows else []
    except msgspec.MsgspecError:
        return []


def num_shared(some: Sequence[BlockHash], others: Sequence[BlockHash]) -> int:
    """Count the blocks that two chains share; equal hashes mean equal blocks before them."""
    shortest = range(min(len(some), len(others)))
    return bisect_left(shortest, True, key=lambda index: some[index] != others[index])
