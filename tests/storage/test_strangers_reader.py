"""Somebody who has only docs/format.md and docs/encryption.md can read a store.

The reader is `strangers_reader`; the rest of this file checks what it says.
"""

import ast
import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from transformers import AutoModelForCausalLM

from tests.fakes import FakeClock
from tests.storage import strangers_reader
from tests.storage.blocks import (
    change_bytes,
    digest,
    flip,
    make_record,
    open_store,
    payload_of,
    put,
)
from tests.storage.strangers_reader import Block, Store
from tieredkv import LLM, SamplingParams
from tieredkv.engine.loader import find_model
from tieredkv.engine.tiny import init_tiny_weights
from tieredkv.storage.keys.names import Names
from tieredkv.storage.keys.table import KeyTable

PROMPT = "".join(chr(0x21 + number * 7 % 90) for number in range(100))
OTHER = PROMPT[:48] + "~" * 40
BLOCK_SIZE = 16


@pytest.fixture(scope="module", params=["off", "on"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A clear store with two chains that have three blocks in common."""
    folder = tmp_path_factory.mktemp("stranger") / "kv"
    settings: dict[str, Any] = {"device_size": "2MiB", "host_size": "2MiB", "disk_size": 64 << 20}
    settings |= {"disk_encryption": "off", "disk_compression": request.param}
    with LLM("tiny-random", retention="24h", disk_dir=folder, **settings) as llm:
        for prompt in (PROMPT, OTHER):
            llm.generate(prompt, SamplingParams(max_tokens=1))
    return Store(folder)


def chain_to(last: Block, blocks: dict[bytes, Block]) -> list[Block]:
    """Return the blocks of the chain that ends with a block, head first."""
    chain = [last]
    while chain[0].position:
        chain.insert(0, blocks[chain[0].parent])
    return chain


def keys_and_values(text: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Compute keys and values: [num_layers, 2, num_tokens, num_kv_heads, head_dim]."""
    auto: Any = AutoModelForCausalLM
    found = find_model("tiny-random", device="cpu")
    model = auto.from_config(found.config, dtype=torch.float32, attn_implementation="eager")
    init_tiny_weights(model)
    with torch.inference_mode():
        cache = model(torch.tensor([[*text.encode()]]), use_cache=True).past_key_values
    layers = [torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers]
    pairs: np.ndarray[Any, np.dtype[np.float32]] = torch.stack(layers).transpose(2, 3).numpy()
    return pairs


def test_the_reader_shares_no_code_with_tieredkv() -> None:
    tree = ast.parse(Path(strangers_reader.__file__).read_text())
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    roots = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
    assert roots <= {"lmdb", "xxhash", "cryptography", "zstandard"}


def test_it_finds_the_chains_and_what_they_are_kept_for(store: Store) -> None:
    blocks = {block.block: block for block in store.blocks()}
    assert len(blocks) == 6 + 5 - 3
    heads = {block.parent for block in blocks.values()}
    lasts = [block for name, block in blocks.items() if name not in heads]
    chains = sorted((chain_to(last, blocks) for last in lasts), key=len)
    assert list(map(len, chains)) == [5, 6]
    assert chains[0][:3] == chains[1][:3]
    for chain in chains:
        assert [block.position for block in chain] == list(range(len(chain)))
        assert {(block.root, block.parent) for block in chain[:1]} == {(chain[0].root,) * 2}
    for block in blocks.values():
        assert (block.kind, block.part, block.num_parts, block.page_form) == (0, 0, 1, 0)
        assert (block.retention, block.expires_at) == ("24h", block.computed_at + 86_400)
        assert block.hits == (block.block in {it.block for it in chains[0][:3]})


def test_payloads_are_keys_and_values_as_the_model_computes_them(store: Store) -> None:
    [model] = store.models
    assert (model["name"], model["dtype"]) == ("tiny-random", "float32")
    assert (model["block_size"], model["hash_algo"]) == (BLOCK_SIZE, "sha256")
    blocks = {block.block: block for block in store.blocks()}
    for text in (PROMPT, OTHER):
        [last] = (
            block
            for block in blocks.values()
            if block.position == len(text) // BLOCK_SIZE - 1
            and not any(other.parent == block.block for other in blocks.values())
        )
        wanted = keys_and_values(text)
        for block in chain_to(last, blocks):
            first = block.position * BLOCK_SIZE
            page = np.frombuffer(store.payload(block), "<f4").reshape(4, 2, BLOCK_SIZE, 2, 32)
            right = wanted[:, :, first : first + BLOCK_SIZE]
            assert np.allclose(page, right, rtol=1e-3, atol=1e-3), block.position
            assert not np.allclose(page, right[:, ::-1], rtol=1e-3, atol=1e-3)


def test_compressed_and_raw_payloads_are_told_by_their_codecs(
    store: Store, request: pytest.FixtureRequest
) -> None:
    codecs = {block.codec for block in store.blocks()}
    sizes = {block.payload_bytes < block.page_bytes for block in store.blocks()}
    assert (codecs, sizes) in (({0}, {False}), ({2}, {True}))


def test_headers_tell_of_every_stored_block_and_the_lists_which_are_none(tmp_path: Path) -> None:
    kept, gone = (
        [make_record(name, position) for position in range(4)] for name in ("kept", "gone")
    )
    with open_store(tmp_path / "kv") as made:
        put(made, *kept, *gone)
        made.drop([record.block_hash for record in gone], "operator")
    store = Store(tmp_path / "kv")
    found = {block.block: block for block in store.headers()}
    assert found.keys() == {record.block_hash for record in [*kept, *gone]}
    unused = store.unused()
    assert {found[record.block_hash].place for record in gone} <= unused
    stored = {block.block: block for block in store.blocks()}
    assert stored == {name: block for name, block in found.items() if block.place not in unused}
    for record in kept:
        assert store.payload(stored[record.block_hash]) == payload_of(record)


@pytest.mark.parametrize("at", [0, 20, 150, 230])
def test_a_flipped_byte_of_a_record_or_payload_is_seen(tmp_path: Path, at: int) -> None:
    record = make_record()
    with open_store(tmp_path / "kv") as made:
        put(made, record)
    store = Store(tmp_path / "kv")
    [block] = store.blocks()
    path, size = store.segments()[block.segment]
    data = bytearray(path.read_bytes())
    for place in (8 + at, 4096 + at):
        data[block.extent * size + place] ^= 1
        path.write_bytes(data)
        with pytest.raises(strangers_reader.DamagedError):
            store.payload(block)
        data[block.extent * size + place] ^= 1
    path.write_bytes(data)
    assert store.payload(block) == payload_of(record)


# --- encrypted stores -----------------------------------------------------------------------------

MASTER = bytes(range(32))
FOLDER_ID = bytes(range(16, 32))


def keys_of(folder: Path, key_folder: Path) -> strangers_reader.Keys:
    """Read the keys of a store from the folder of keys, where the store's id names their files."""
    id_ = json.loads((folder / "format.json").read_text())["id"]
    master_key = bytes.fromhex((key_folder / f"{id_}.master").read_text())
    return strangers_reader.Keys(key_folder / f"{id_}.keys", master_key)


def test_it_decrypts_payloads_with_the_keys_of_the_folder_of_keys(tmp_path: Path) -> None:
    records = [
        make_record("a", position, now=1_800_000_000.0 + 3600 * position) for position in range(3)
    ]
    options: dict[str, Any] = {"encryption": "on", "key_dir": str(tmp_path / "keys")}
    with open_store(tmp_path / "kv", FakeClock(1_800_010_000.0), **options) as made:
        put(made, *records)
    table = keys_of(tmp_path / "kv", tmp_path / "keys")
    keys, scopes = table.payload_keys, {record.computed_at // 3600 for record in records}
    store = Store(tmp_path / "kv", keys)
    assert {int.from_bytes(scope[32:], "big") for scope in table.deaths} == scopes
    assert {scope[:32] for scope in table.deaths} == {records[0].namespace}
    blocks = {block.block: block for block in store.blocks()}
    assert (len(keys), {block.codec for block in blocks.values()}) == (3, {3})
    for record in records:
        assert store.payload(blocks[record.block_hash]) == payload_of(record)
    first, second = (blocks[record.block_hash] for record in records[:2])
    with pytest.raises(InvalidTag):  # a payload is bound to its block
        data = store.image(first.segment, first.extent)
        nonce, tag = data[256:268], data[268:284]
        payload = data[4096 : 4096 + first.payload_bytes]
        other = strangers_reader.identity(second.record)
        AESGCM(keys[data[248:256]]).decrypt(nonce, payload + tag, other)


def test_it_reads_a_key_table(tmp_path: Path) -> None:
    path, scopes = tmp_path / "t.keys", {bytes([number]) * 36: 5e9 + number for number in range(40)}
    with closing(KeyTable.create(str(path), FOLDER_ID, lambda: MASTER, b"s" * 16)) as table:
        table.add(scopes)
        table.drop([bytes(36)])
        wanted = {key.id: key.key for key in table}
        names_key = table.names_key
    keys = strangers_reader.Keys(path, MASTER)
    assert (keys.folder_id, keys.names_key, keys.num_damaged) == (FOLDER_ID, names_key, 0)
    assert keys.payload_keys == wanted
    assert keys.deaths == {scope: death for scope, death in scopes.items() if scope != bytes(36)}
    hashes = [digest("a"), digest("b")[:16]]
    assert list(map(keys.hash_of, Names(names_key).hide(hashes))) == hashes
    with pytest.raises(strangers_reader.DamagedError):
        strangers_reader.Keys(path, bytes(32))


@pytest.mark.parametrize(("at", "num_lost"), [(60, 0), (4096 + 100, 0), (8192 + 128 * 5 + 70, 1)])
def test_a_damaged_byte_of_a_key_table_costs_it_one_key_at_most(
    tmp_path: Path, at: int, num_lost: int
) -> None:
    path = tmp_path / "t.keys"
    with closing(KeyTable.create(str(path), FOLDER_ID, lambda: MASTER, b"s" * 16)) as table:
        table.add({bytes([number]) * 36: 5e9 for number in range(10)})
    change_bytes(path, at, flip)
    keys = strangers_reader.Keys(path, MASTER)
    assert (len(keys.payload_keys), keys.num_damaged) == (10 - num_lost, num_lost)
