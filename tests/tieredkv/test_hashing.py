import hashlib
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tieredkv.errors import RequestError
from tieredkv.hashing import (
    block_hash,
    chain_hashes,
    check_cache_salt,
    model_root,
    namespace_digest,
    pack_tokens,
)
from tieredkv.types import BlockHash, HashAlgo

ROOT_FIELDS: dict[str, Any] = {
    "fingerprint": b"\x01" * 32,
    "kv_dtype": "bfloat16",
    "layout": "block_first",
    "block_size": 16,
    "tp_rank": 0,
    "tp_size": 1,
    "namespace": b"\x02" * 32,
}
ROOT = model_root(**ROOT_FIELDS)
ALGOS: list[HashAlgo] = ["sha256", "xxh3_128"]
GOLDEN_ROOT = "31d973ec6f80c456182df437e2f20d1232b5badcf51cee4ed2190cf78066e77c"
GOLDEN_BLOCK = "0a259ac1fdce87687384ecef0dbebe0ea079c9c828c323dd50da12b295750d1a"
GOLDEN_NAMESPACE = "a69cd1e41acf55a434d67a1cec2cb5a6538d372f633ed3a16281bb890c1cabaf"
GOLDEN_FAST_ROOT = "5dbc35acab632fc2debf6af2d3ce8244"
GOLDEN_FAST_BLOCK = "60c93f65cc60acab097770cd19fe2b94"

token_ids = st.integers(0, 2**32 - 1)
extras = st.lists(st.tuples(st.text(max_size=3), st.binary(max_size=3)), max_size=3)


def field(tag: bytes, value: bytes) -> bytes:
    return bytes([len(tag)]) + tag + len(value).to_bytes(8, "little") + value


def test_the_bytes_that_are_hashed_are_tagged_and_length_prefixed() -> None:
    opening = field(b"format", b"tieredkv/1")
    root_bytes = (
        opening
        + field(b"what", b"root")
        + field(b"model", b"\x01" * 32)
        + field(b"dtype", b"bfloat16")
        + field(b"layout", b"block_first")
        + field(b"block_size", (16).to_bytes(8, "little"))
        + field(b"tp_rank", (0).to_bytes(8, "little"))
        + field(b"tp_size", (1).to_bytes(8, "little"))
        + field(b"namespace", b"\x02" * 32)
    )
    block_bytes = (
        opening
        + field(b"what", b"block")
        + field(b"parent", ROOT)
        + field(b"tokens", np.arange(16, dtype="<u4").tobytes())
        + field(b"kind", b"adapter")
        + field(b"id", b"lora-7")
    )
    namespace_bytes = (
        opening
        + field(b"what", b"namespace")
        + field(b"tenant", b"acme")
        + field(b"salt", b"s")
        + field(b"key", b"k")
    )
    extra = [("adapter", b"lora-7")]
    assert hashlib.sha256(root_bytes).digest() == ROOT
    assert block_hash(ROOT, pack_tokens(range(16)), extra) == hashlib.sha256(block_bytes).digest()
    assert namespace_digest("acme", "s", "k") == hashlib.sha256(namespace_bytes).digest()
    assert namespace_digest("acme", "s", "k", "xxh3_128") == xxhash.xxh3_128_digest(namespace_bytes)


def test_golden_values_stay_for_they_name_blocks_on_disks() -> None:
    assert ROOT.hex() == GOLDEN_ROOT
    assert chain_hashes(ROOT, range(32), 16)[1].hex() == GOLDEN_BLOCK
    assert namespace_digest("acme").hex() == GOLDEN_NAMESPACE
    fast_root = model_root(**ROOT_FIELDS, algo="xxh3_128")
    assert fast_root.hex() == GOLDEN_FAST_ROOT
    assert chain_hashes(fast_root, range(32), 16, algo="xxh3_128")[1].hex() == GOLDEN_FAST_BLOCK


@pytest.mark.parametrize("name", ROOT_FIELDS)
@pytest.mark.parametrize("algo", ALGOS)
@given(data=st.data())
def test_any_other_ingredient_is_another_root(
    algo: HashAlgo, name: str, data: st.DataObject
) -> None:
    value = ROOT_FIELDS[name]
    same_type = {bytes: st.binary(max_size=40), str: st.text(), int: st.integers(0, 2**63)}
    other = data.draw(same_type[type(value)].filter(lambda drawn: drawn != value))
    changed = ROOT_FIELDS | {name: other}
    assert model_root(**changed, algo=algo) != model_root(**ROOT_FIELDS, algo=algo)


@given(st.tuples(st.text(max_size=3), st.text(max_size=3)), st.tuples(st.text(), st.text()))
def test_bytes_cannot_move_from_one_field_to_the_next(
    a: tuple[str, str], b: tuple[str, str]
) -> None:
    roots = {model_root(**ROOT_FIELDS | {"kv_dtype": x, "layout": y}) for x, y in (a, b)}
    assert len(roots) == len({a, b})


names = st.one_of(st.none(), st.text(min_size=1, max_size=4))


@given(st.tuples(st.text(max_size=4), names, names), st.tuples(st.text(max_size=4), names, names))
def test_two_namespaces_are_equal_only_if_all_that_made_them_is(
    a: tuple[str, str | None, str | None], b: tuple[str, str | None, str | None]
) -> None:
    assert (namespace_digest(*a) == namespace_digest(*b)) == (a == b)


def test_a_salt_narrows_its_tenant_and_reaches_no_other() -> None:
    plain, salted = namespace_digest("alice"), namespace_digest("alice", "bob")
    assert plain != salted
    others = [namespace_digest("bob"), namespace_digest("bob", "alice"), namespace_digest("")]
    assert salted not in others
    assert namespace_digest("alice", prompt_cache_key="bob") not in [*others, plain, salted]


@pytest.mark.parametrize("salt", ["", "x" * 129, 7, b"salt", ["salt"], True])
def test_what_is_no_salt_is_refused_by_name(salt: Any) -> None:
    with pytest.raises(RequestError, match="cache_salt") as caught:
        check_cache_salt(salt)
    assert caught.value.param == "cache_salt"
    with pytest.raises(RequestError):
        namespace_digest("tenant", salt)


def test_any_text_up_to_128_characters_is_a_salt() -> None:
    for salt in ("s", "x" * 128, "\x00", "\ud800", "😀" * 128):
        assert check_cache_salt(salt) == salt
        assert len(namespace_digest("tenant", salt)) == 32
    assert check_cache_salt(None) is None


@given(st.lists(token_ids, max_size=20), st.sampled_from([1, 2, 4, 16]), extras)
@pytest.mark.parametrize("algo", ALGOS)
def test_a_chain_is_its_blocks_hashed_one_by_one(
    algo: HashAlgo, tokens: list[int], block_size: int, extra: list[tuple[str, bytes]]
) -> None:
    expected: list[BlockHash] = []
    parent = ROOT
    for start in range(0, len(tokens) - block_size + 1, block_size):
        packed = pack_tokens(tokens[start : start + block_size])
        parent = block_hash(parent, packed, extra, algo)
        expected.append(parent)
    assert chain_hashes(ROOT, tokens, block_size, extra, algo) == expected
    for known in range(len(expected) + 1):
        assert (
            chain_hashes(ROOT, tokens, block_size, extra, algo, prev=expected[:known]) == expected
        )


@given(st.lists(token_ids, min_size=8, max_size=8), st.integers(0, 7), token_ids)
def test_another_token_changes_its_block_and_all_after_it_and_none_before(
    tokens: list[int], position: int, token: int
) -> None:
    changed = [*tokens[:position], token, *tokens[position + 1 :]]
    same = tokens[position] == token
    pairs = zip(chain_hashes(ROOT, tokens, 2), chain_hashes(ROOT, changed, 2), strict=True)
    for index, (before, after) in enumerate(pairs):
        assert (before == after) == (same or index < position // 2)


@given(extras, extras)
def test_another_extra_is_another_block(
    a: list[tuple[str, bytes]], b: list[tuple[str, bytes]]
) -> None:
    tokens = pack_tokens([1, 2])
    assert (block_hash(ROOT, tokens, a) == block_hash(ROOT, tokens, b)) == (a == b)


def test_the_order_of_extras_counts() -> None:
    pairs = [("image", b"2"), ("image", b"1")]
    tokens = pack_tokens([1])
    assert block_hash(ROOT, tokens, pairs) != block_hash(ROOT, tokens, pairs[::-1])


def test_an_unfilled_last_block_has_no_hash() -> None:
    assert chain_hashes(ROOT, range(15), 16) == []
    assert chain_hashes(ROOT, range(16), 16) == chain_hashes(ROOT, range(31), 16)


@pytest.mark.parametrize("wrong", [-1, 2**32, 2**80, 1.0, "1", None])
def test_what_is_no_token_id_is_refused_and_shown(wrong: Any) -> None:
    with pytest.raises(RequestError) as caught:
        chain_hashes(ROOT, [1, 2, wrong, 3], 16)
    assert repr(wrong) in str(caught.value)
    assert caught.value.param == "prompt"


def test_token_ids_are_packed_alike_from_any_sequence_of_integers() -> None:
    expected = np.array([0, 1, 255, 2**32 - 1], dtype="<u4").tobytes()
    assert pack_tokens([0, 1, 255, 2**32 - 1]) == expected
    assert pack_tokens(np.array([0, 1, 255, 2**32 - 1])) == expected
    assert pack_tokens(b"\x00\x01\x02\x03") == np.arange(4, dtype="<u4").tobytes()
    with pytest.raises(RequestError, match="-1"):
        pack_tokens(np.array([5, -1]))


def test_hashes_are_equal_in_a_process_with_another_hash_seed() -> None:
    script = (
        "from tieredkv.hashing import *\n"
        "root = model_root(b'm', 'float32', 'l', 16, 0, 1, namespace_digest('t', 's'))\n"
        "print(chain_hashes(root, list(range(64)), 16, [('adapter', b'a')])[-1].hex())"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "random")
    }
    assert len(answers) == 1
