"""Block hashes, roots and namespaces are equal only if all their ingredients are."""

import hashlib
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TypedDict

import numpy as np
import pytest
import xxhash
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.golden import refused
from tieredkv.errors import RequestError
from tieredkv.hashing import chain_hashes, model_root, namespace_digest
from tieredkv.types import BlockHash, HashAlgo, KVSpec, LayerKV

ALGOS: list[HashAlgo] = ["sha256", "xxh3_128"]
PLAIN: dict[HashAlgo, Callable[[bytes], bytes]] = {
    "sha256": lambda data: hashlib.sha256(data).digest(),
    "xxh3_128": xxhash.xxh3_128_digest,
}


class Root(TypedDict):
    fingerprint: bytes
    kv_dtype: str
    layout: str
    block_size: int
    namespace: bytes


def make_root(namespace: bytes = b"\x02" * 32) -> Root:
    return Root(
        fingerprint=b"\x01" * 32,
        kv_dtype="bfloat16",
        layout="block-first",
        block_size=16,
        namespace=namespace,
    )


def root_of(root: Root, algo: HashAlgo = "sha256") -> BlockHash:
    spec = KVSpec(layers=[LayerKV(1, 1)], dtype=root["kv_dtype"], block_size=root["block_size"])
    given = root["fingerprint"], spec, root["namespace"]
    return model_root(*given, layout=root["layout"], algo=algo)


ROOT = root_of(make_root())
token_ids = st.integers(0, 2**32 - 1)
texts = st.text(max_size=6)
namespaces = st.tuples(
    texts, st.none() | st.text(min_size=1, max_size=6), st.none() | st.text(max_size=6)
)
roots = st.builds(
    Root,
    fingerprint=st.binary(max_size=4),
    kv_dtype=texts,
    layout=texts,
    block_size=st.integers(0, 2**64 - 1),
    namespace=st.binary(max_size=4),
)


def field(tag: int, value: bytes) -> bytes:
    return bytes([tag]) + struct.pack("<I", len(value)) + value


# Golden values


@pytest.mark.parametrize(
    ("algo", "namespace", "root", "hashes"),
    [
        (
            "sha256",
            "04fe707e1cdba61a93f0645acc5a9ac5107244f082329d344c73beb7b4ecfd72",
            "8b7a0d05858c5d29751c07fd28f18f9ec153287ddca1eeeb09654cf393b7785e",
            [
                "7ffe0a356e0453518e6295d7b99b2c0e34e6dbac308655e133b7ae01b28d5e6e",
                "83447fe4b28b4fc0bb3077bed6bb31a3fcef812eb139508dd15a98cf3e8e06c4",
            ],
        ),
        (
            "xxh3_128",
            "04b502201e2d97349b4a4cd6a75655b816fe6691979d6f280000000000000000",
            "4d405b5a0c122d3696ff3372a985c32d",
            ["6cbfa93a64f6d7e17b3ec62491e177b1", "4817797e9dcbb21a2838185d09372487"],
        ),
    ],
)
def test_hashes_that_name_blocks_on_disk_stay_what_they_are(
    algo: HashAlgo, namespace: str, root: str, hashes: list[str]
) -> None:
    digest = namespace_digest("tenant", "salt", "key", algo=algo)
    parent = root_of(make_root(digest), algo)
    chain = chain_hashes(parent, range(40), 16, algo=algo)
    assert (digest.hex(), parent.hex(), [h.hex() for h in chain]) == (namespace, root, hashes)


@pytest.mark.parametrize("algo", ALGOS)
def test_what_is_hashed_is_each_field_with_its_tag_and_length(algo: HashAlgo) -> None:
    tenant = field(0x01, b"tieredkv/1") + field(0x02, b"namespace") + field(0x30, b"tenant")
    namespace = tenant + field(0x31, b"salt") + field(0x32, "schlüssel".encode())
    digest = PLAIN[algo](tenant)[:8] + PLAIN[algo](namespace)[:24]
    padded = digest.ljust(32, b"\0")
    assert namespace_digest("tenant", "salt", "schlüssel", algo=algo) == padded
    root = (
        field(0x01, b"tieredkv/1")
        + field(0x02, b"root")
        + field(0x10, b"\x01" * 32)
        + field(0x11, b"bfloat16")
        + field(0x12, b"block-first")
        + field(0x13, struct.pack("<Q", 16))
        + field(0x14, struct.pack("<Q", 0))
        + field(0x15, struct.pack("<Q", 1))
        + field(0x16, b"\x02" * 32)
    )
    assert root_of(make_root(), algo) == PLAIN[algo](root)
    tokens = [0, 1, 256, 2**32 - 1]
    block = field(0x20, ROOT) + field(0x21, struct.pack("<4I", *tokens))
    assert chain_hashes(ROOT, tokens, 4, algo=algo) == [PLAIN[algo](block)]


def test_hashes_are_equal_in_a_process_with_another_hash_seed() -> None:
    code = (
        "from tieredkv.hashing import *\n"
        "for algo in ('sha256', 'xxh3_128'):\n"
        "    ns = namespace_digest('t', 's', 'k', algo=algo)\n"
        "    root = model_root(b'f', KVSpec(layers=(), dtype='d', block_size=16), ns, algo=algo)\n"
        "    print(chain_hashes(root, range(64), 16, algo=algo)[-1].hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-P", "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    expected = ""
    for algo in ALGOS:
        spec = KVSpec(layers=[LayerKV(1, 1)], dtype="d", block_size=16)
        root = model_root(b"f", spec, namespace_digest("t", "s", "k", algo=algo), algo=algo)
        expected += chain_hashes(root, range(64), 16, algo=algo)[-1].hex()
        expected += "\n"
    assert outputs == {expected}


# Any other ingredient is another hash


@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": b"\x01" * 31 + b"\x00"},
        {"fingerprint": b""},
        {"kv_dtype": "float16"},
        {"layout": "layer-first"},
        {"block_size": 32},
        {"namespace": b"\x03" * 32},
    ],
    ids=str,
)
def test_a_root_of_another_model_layout_or_namespace_differs(
    algo: HashAlgo, change: dict[str, Any]
) -> None:
    changed: Any = {**make_root(), **change}
    assert root_of(changed, algo) != root_of(make_root(), algo)


@pytest.mark.parametrize("algo", ALGOS)
@given(roots, roots)
def test_two_roots_are_equal_only_if_all_their_ingredients_are(
    algo: HashAlgo, a: Root, b: Root
) -> None:
    assert (root_of(a, algo) == root_of(b, algo)) == (a == b)


@given(texts)
def test_text_cannot_move_from_one_field_of_a_root_to_the_next(text: str) -> None:
    hashes = set()
    for cut in range(len(text) + 1):
        root = make_root()
        root["kv_dtype"], root["layout"] = text[:cut], text[cut:]
        hashes.add(root_of(root))
    assert len(hashes) == len(text) + 1


@pytest.mark.parametrize("algo", ALGOS)
@given(namespaces, namespaces)
def test_two_namespaces_are_equal_only_if_tenant_salt_and_key_are(
    algo: HashAlgo, a: tuple[str, str | None, str | None], b: tuple[str, str | None, str | None]
) -> None:
    assert (namespace_digest(*a, algo=algo) == namespace_digest(*b, algo=algo)) == (a == b)


@given(st.text(min_size=2, max_size=8), st.data())
def test_text_cannot_move_between_tenant_salt_and_key(text: str, data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(text) - 1))
    head, tail = text[:cut], text[cut:]
    variants: list[tuple[str, str | None, str | None]] = [
        (text, None, None),
        ("", text, None),
        ("", None, text),
        (head, tail, None),
        (head, None, tail),
        ("", head, tail),
        (head, tail, ""),
    ]
    assert len({namespace_digest(*variant) for variant in variants}) == len(variants)


def test_names_that_only_look_alike_are_apart() -> None:
    names = ["acme", "Acme", " acme", "acme ", "acme\n", "acme\x00", "acm\u0435", "é", "e\u0301"]
    assert len({namespace_digest(tenant) for tenant in names}) == len(names)
    assert len({namespace_digest("t", salt) for salt in names}) == len(names)
    assert len({namespace_digest("t", None, key) for key in names}) == len(names)


@pytest.mark.parametrize("algo", ALGOS)
def test_all_namespaces_of_a_tenant_begin_alike(algo: HashAlgo) -> None:
    some = [("a", None, None), ("a", "b", None), ("a", "b", "c"), ("a", None, "c")]
    assert len({namespace_digest(*each, algo=algo)[:8] for each in some}) == 1
    assert len({namespace_digest(*each, algo=algo) for each in some}) == 4
    assert namespace_digest("b", algo=algo)[:8] != namespace_digest("a", algo=algo)[:8]


def test_a_salt_narrows_its_tenant_and_reaches_no_other() -> None:
    others = {namespace_digest("bob"), namespace_digest("bob", "alice"), namespace_digest("")}
    for salt in ("bob", "alice", "\x00", "alice\x31\x03\x00\x00\x00bob"):
        salted = namespace_digest("alice", salt)
        assert salted != namespace_digest("alice")
        assert salted not in others


@pytest.mark.parametrize("algo", ALGOS)
@given(
    a=st.tuples(st.binary(max_size=4), st.lists(token_ids, min_size=1, max_size=4)),
    b=st.tuples(st.binary(max_size=4), st.lists(token_ids, min_size=1, max_size=4)),
)
def test_two_blocks_are_equal_only_if_parent_and_tokens_are(
    algo: HashAlgo, a: tuple[bytes, list[int]], b: tuple[bytes, list[int]]
) -> None:
    hashes = [
        chain_hashes(BlockHash(parent), tokens, len(tokens), algo=algo) for parent, tokens in (a, b)
    ]
    assert (hashes[0] == hashes[1]) == (a == b)


@pytest.mark.parametrize("algo", ALGOS)
@given(
    tokens=st.lists(token_ids, min_size=8, max_size=8), position=st.integers(0, 7), other=token_ids
)
def test_another_token_changes_its_block_and_all_after_it_and_none_before(
    algo: HashAlgo, tokens: list[int], position: int, other: int
) -> None:
    assume(tokens[position] != other)
    changed = [*tokens[:position], other, *tokens[position + 1 :]]
    before = chain_hashes(ROOT, tokens, 2, algo=algo)
    after = chain_hashes(ROOT, changed, 2, algo=algo)
    equal = [a == b for a, b in zip(before, after, strict=True)]
    assert equal == [index < position // 2 for index in range(4)]


def test_the_order_of_blocks_and_of_tokens_counts() -> None:
    chains = {
        chain_hashes(ROOT, tokens, 2)[-1]
        for tokens in ([1, 2, 3, 4], [3, 4, 1, 2], [2, 1, 3, 4], [1, 2, 4, 3])
    }
    assert len(chains) == 4


# Chains


@pytest.mark.parametrize("algo", ALGOS)
@given(tokens=st.lists(token_ids, max_size=20), block_size=st.sampled_from([1, 2, 4, 16]))
def test_a_chain_is_its_blocks_hashed_one_by_one_and_a_tail_is_left_out(
    algo: HashAlgo, tokens: list[int], block_size: int
) -> None:
    expected: list[BlockHash] = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = expected[-1] if expected else ROOT
        block = tokens[start : start + block_size]
        expected += chain_hashes(parent, block, block_size, algo=algo)
    assert chain_hashes(ROOT, tokens, block_size, algo=algo) == expected


@given(st.lists(token_ids, min_size=6, max_size=12), st.integers(0, 3))
def test_a_chain_can_be_continued_from_any_of_its_blocks(tokens: list[int], known: int) -> None:
    whole = chain_hashes(ROOT, tokens, 2)
    parent = whole[known - 1] if known else ROOT
    assert whole[:known] + chain_hashes(parent, tokens[2 * known :], 2) == whole


def test_a_prompt_shorter_than_a_block_has_no_hash() -> None:
    assert chain_hashes(ROOT, [], 16) == chain_hashes(ROOT, range(15), 16) == []


def test_hashes_have_the_length_of_their_algorithm_and_namespaces_have_32_bytes() -> None:
    for algo, length in zip(ALGOS, (32, 16), strict=True):
        assert len(namespace_digest("t", algo=algo)) == 32
        assert {len(h) for h in chain_hashes(ROOT, range(8), 2, algo=algo)} == {length}


@pytest.mark.parametrize(
    "make",
    [list, tuple, np.array, lambda ids: np.array(ids, dtype=np.uint8), bytes, bytearray],
    ids=["list", "tuple", "int64 array", "uint8 array", "bytes", "bytearray"],
)
def test_token_ids_hash_alike_in_any_sequence(make: Callable[[range], Any]) -> None:
    assert chain_hashes(ROOT, make(range(64)), 16) == chain_hashes(ROOT, range(64), 16)


# What is refused


@pytest.mark.parametrize("salt", ["", "x" * 129])
def test_a_salt_that_is_empty_or_too_long_is_refused(salt: str) -> None:
    with refused(RequestError, param="cache_salt", code="invalid_value") as error:
        namespace_digest("tenant", salt)
    assert (error.value.param, error.value.code) == ("cache_salt", "invalid_value")


@pytest.mark.parametrize("salt", ["s", "x" * 128, "\x00", "🔑" * 128, "\ud800"], ids=ascii)
def test_any_other_text_is_a_salt(salt: str) -> None:
    assert namespace_digest("tenant", salt) != namespace_digest("tenant")


def test_text_that_json_may_hold_and_utf8_may_not_is_hashed_and_told_apart() -> None:
    variants = ["\ud800", "\udc00", "\ud83d\udd11", "🔑", "?", "\ufffd"]
    assert len({namespace_digest(text) for text in variants}) == len(variants)
    assert len({namespace_digest("t", None, text) for text in variants}) == len(variants)
