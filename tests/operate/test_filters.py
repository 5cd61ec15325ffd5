"""Filters of chains, as people write them, and the lists that they leave."""

from pathlib import Path

import numpy as np
import pytest

from tests.golden import refused
from tests.storage.blocks import make_record, open_store, put
from tieredkv.clock import Clock
from tieredkv.errors import ConfigError
from tieredkv.operate.ask import StoreControl
from tieredkv.operate.calls import Ls
from tieredkv.operate.chains import Chains
from tieredkv.operate.columns import ChainColumns
from tieredkv.operate.filters import FIELDS, parse_filter, parse_order
from tieredkv.operate.models import NAME, KnownModel, KnownModels, note_model, read_models
from tieredkv.operate.table import BLOCK, TIER_BITS, BlockKind, BlockTable
from tieredkv.types import Tier

NOW = 1_000_000.0
SIZE = (2 << 30) // 10
NAMESPACE = bytes.fromhex("c0ffee")


def columns(model: KnownModel | None) -> ChainColumns:
    """Return one chain of ten blocks, some of which are in host memory, too."""
    root, table = model.root(NAMESPACE) if model else b"d", np.zeros(10, BLOCK)
    table["key"], table["parent_key"], table["position"] = range(1, 11), range(10), range(10)
    table["size_bytes"], table["payload_bytes"] = SIZE, SIZE // 2
    table["size_bytes"][0] += (2 << 30) - 10 * SIZE
    table["computed_at"], table["expires_at"] = NOW - 7000, NOW + 900
    table["computed_at"][0], table["expires_at"][0] = NOW - 7200, NOW + 600
    table["last_used"], table["hits"] = NOW - 60, 3
    table["tiers"] = TIER_BITS[Tier.DISK]
    table["tiers"][:4] |= TIER_BITS[Tier.HOST]
    chains = Chains(BlockTable(table, [BlockKind(root, NAMESPACE, "24h")]))
    return ChainColumns(chains, KnownModels([model] if model else []))


def model(name: str) -> KnownModel:
    fingerprint = name.encode().hex()
    return KnownModel(
        name=name, fingerprint=fingerprint, dtype="f", block_size=16, hash_algo="sha256"
    )


CHAINS = columns(model("m"))


@pytest.mark.parametrize(
    ("text", "is_match"),
    [
        ("", True),
        ("tier=disk", True),
        ("tier=HOST", True),
        ("tier=device", False),
        ("tier!=device", True),
        ("idle>59s, idle<2m", True),
        ("idle>1h", False),
        ("age>=2h", True),
        ("expires<10m", False),
        ("expires<=10m", True),
        ("size>1GB", True),
        ("size>2GiB", False),
        ("size=2GiB", True),
        ("size!=2GiB", False),
        ("tokens>100,blocks=10,hits<4", True),
        ("ns=c0f", True),
        ("ns=C0F", True),
        ("ns=0f", False),
        ("model=m", True),
        ("model!=m", False),
        ("retention=24h", True),
        ("retention=24", False),
        ("tier=disk,idle>1h", False),
    ],
)
def test_all_conditions_have_to_hold(text: str, is_match: bool) -> None:
    assert CHAINS.matching(parse_filter(text), NOW).tolist() == [is_match]


def test_what_is_not_known_matches_no_number() -> None:
    unknown = columns(None)
    assert not unknown.matching(parse_filter("tokens>0"), NOW).any()
    assert not unknown.matching(parse_filter("tokens!=5"), NOW).any()
    assert unknown.matching(parse_filter("model!=m"), NOW).all()


@pytest.mark.parametrize(
    "text",
    [
        "sze>1GB",
        "namespace=a",
        "idle",
        "idle>",
        "idle>1h,,size>1",
        "idle>1 parsec",
        "size>big",
        "hits>x",
        "tier>disk",
        "tier=ssd",
        "ns=0x1f",
        " ",
    ],
)
def test_a_mistake_is_named(text: str) -> None:
    with refused(ConfigError):
        parse_filter(text)


def test_every_field_sorts_and_a_minus_reverses() -> None:
    for name in FIELDS:
        assert CHAINS.places(parse_order(f"-{name}"), NOW).tolist() == [0]
    models = [model("m"), None, model("a")]
    kinds = [BlockKind(it.root(NAMESPACE) if it else b"d", NAMESPACE, "24h") for it in models]
    table = np.zeros(5, BLOCK)
    table["key"], table["parent_key"] = range(1, 6), [0, 0, 0, 3, 0]
    table["position"], table["last_used"] = [0, 0, 0, 1, 0], [4, 3, 2, 2, 1]
    table["kind"], table["tiers"] = [1, 0, 0, 0, 2], TIER_BITS[Tier.DISK]
    table["tiers"][2] |= TIER_BITS[Tier.HOST]
    three = ChainColumns(Chains(BlockTable(table, kinds)), KnownModels([it for it in models if it]))
    assert three.places(parse_order("tokens"), NOW).tolist() == [1, 3, 2, 0]
    assert three.places(parse_order("-tokens"), NOW).tolist() == [2, 1, 3, 0]
    assert three.places(parse_order("model"), NOW).tolist() == [0, 3, 1, 2]
    assert three.places(parse_order("-tier"), NOW).tolist() == [2, 0, 1, 3]
    with refused(ConfigError):
        parse_order("sizes")


def fill(folder: Path) -> KnownModel:
    """Make a store with five chains of 1 to 5 blocks; return the model of three of them."""
    model = KnownModel(
        name="m", fingerprint="ab" * 32, dtype="float32", block_size=16, hash_algo="sha256"
    )
    namespace, now = b"n" * 32, Clock().now()
    with open_store(folder, Clock(), budget_bytes=64 << 20) as store:
        for length in range(1, 6):
            root = model.root(namespace) if length < 4 else b"o" * 32
            records = [
                make_record(
                    f"{length}",
                    position,
                    now=now,
                    size_bytes=100,
                    root=root,
                    namespace=namespace,
                    last_used=now - 100 * length,
                )
                for position in range(length)
            ]
            put(store, *records)
    note_model(folder, model)
    return model


def blocks(folder: Path, **how: object) -> list[int]:
    """Return the lengths of the chains that `ls` lists."""
    call = Ls(**how)  # type: ignore[arg-type]
    return [chain.blocks for page in StoreControl(folder).pages(call) for chain in page]


def test_a_list_is_filtered_sorted_and_cut(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    fill(folder)
    [page] = StoreControl(folder).pages(Ls())
    assert [(it.blocks, it.model, it.tokens) for it in page] == [
        *((1, "m", 16), (2, "m", 32), (3, "m", 48)),
        *((4, None, None), (5, None, None)),
    ]
    assert page[0].blocks_by_tier == {Tier.DEVICE: 0, Tier.HOST: 0, Tier.DISK: 1}
    assert blocks(folder, filter="model=m", limit=2) == [1, 2]
    assert blocks(folder, filter="idle>250s,tier=disk") == [3, 4, 5]
    assert blocks(folder, sort="-size", limit=2) == [5, 4]
    assert blocks(folder, sort="idle") == [1, 2, 3, 4, 5]
    assert blocks(folder, sort="-tokens") == [3, 2, 1, *blocks(folder, sort="-tokens")[3:]]
    assert blocks(folder, filter="hits>0") == []
    with refused(ConfigError):
        blocks(folder, limit=0)


def test_models_are_noted_once_and_a_damaged_file_is_none(tmp_path: Path) -> None:
    model = KnownModel(
        name="m", fingerprint="ab", dtype="float32", block_size=16, hash_algo="sha256"
    )
    other = KnownModel(
        name="o", fingerprint="cd", dtype="float32", block_size=16, hash_algo="sha256"
    )
    for each in (model, other, model):
        note_model(tmp_path, each)
    assert read_models(tmp_path) == [other, model]
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600
    for damaged in (b"{", b'[{"name": "\xff"}]', b'[{"x": ' + b"[" * 100_000):
        (tmp_path / NAME).write_bytes(damaged)
        assert read_models(tmp_path) == []
    note_model(tmp_path, model)
    assert read_models(tmp_path) == [model]
