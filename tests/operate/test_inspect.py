"""`inspect` shows a chain block by block, from whatever tiers have parts of it."""

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.golden import refused
from tests.operate.test_ask import engine_that_says
from tests.storage.blocks import make_record, open_store, put, told_by_engine
from tests.storage.conftest import Harness, Mailbox, make_chain
from tieredkv.cli.inspect import tree_labels
from tieredkv.clock import Clock
from tieredkv.errors import ConfigError, StoreUnreachableError, UnknownIdError
from tieredkv.operate.ask import StoreControl
from tieredkv.operate.calls import Inspect
from tieredkv.operate.chain_ids import chain_id
from tieredkv.operate.infos import BlockInfo
from tieredkv.types import BlockRecord, Tier

NOW = time.time()
TRUNK = [make_record("trunk", i, now=NOW, size_bytes=100) for i in range(100)]
BRANCHES = [
    [
        make_record(
            name,
            i,
            now=NOW,
            size_bytes=100,
            parent_hash=(TRUNK[-1] if i == 100 else make_record(name, i - 1)).block_hash,
        )
        for i in range(100, 103)
    ]
    for name in ("one", "two")
]
ONE, TWO = BRANCHES
ID = chain_id(ONE[0].block_hash, ONE[-1].block_hash)


def shown(folder: Path, id_: str, *, following: bool = False) -> list[BlockInfo]:
    """Return what `inspect` answers."""
    call = Inspect(id=id_, following=following)
    return [block for page in StoreControl(folder).pages(call) for block in page]


def hashes(blocks: Sequence[BlockRecord]) -> list[str]:
    return [block.block_hash.hex() for block in blocks]


def of(blocks: Sequence[BlockInfo]) -> list[str]:
    return [block.block_hash for block in blocks]


def fill(folder: Path, records: Sequence[BlockRecord]) -> None:
    with open_store(folder, Clock(), budget_bytes=64 << 20) as store:
        for start in range(0, len(records), 50):
            put(store, *records[start : start + 50])


def test_a_chain_is_shown_from_its_first_block_to_the_named_one(tmp_path: Path) -> None:
    fill(tmp_path / "s", [*TRUNK, *ONE, *TWO])
    for id_ in (ID, ONE[-1].block_hash.hex()[:8]):
        chain = shown(tmp_path / "s", id_)
        assert of(chain) == hashes([*TRUNK, *ONE])
        assert [block.position for block in chain] == list(range(103))
    one = ONE[-1]
    assert chain[-1] == BlockInfo(
        block_hash=one.block_hash.hex(),
        parent_hash=one.parent_hash.hex(),
        root=one.root.hex(),
        namespace=one.namespace.hex(),
        position=102,
        tiers=[Tier.DISK],
        size_bytes=100,
        stored_bytes=100,
        codec="raw",
        retention="24h",
        computed_at=one.computed_at,
        last_used=one.last_used,
        expires_at=one.expires_at,
        hits=0,
    )


def test_blocks_behind_the_named_one_are_shown_branch_by_branch(tmp_path: Path) -> None:
    fill(tmp_path / "s", [*TRUNK, *ONE, *TWO])
    tree = shown(tmp_path / "s", TRUNK[98].block_hash.hex(), following=True)
    first, second = sorted(BRANCHES, key=lambda each: each[0].block_hash, reverse=True)
    assert of(tree) == hashes([*TRUNK, *first, *second])
    assert [*tree_labels(tree)][98:] == [
        *("98", "99", "├─ 100", "│  101", "│  102"),
        *("└─ 100", "   101", "   102"),
    ]


def test_what_is_left_is_shown_where_the_last_block_has_gone(tmp_path: Path) -> None:
    fill(tmp_path / "s", [*TRUNK, ONE[0], ONE[1], *TWO])
    assert of(shown(tmp_path / "s", ID)) == hashes([*TRUNK, *ONE[:2]])


def test_an_expired_block_is_not_shown_nor_what_only_it_leads_to(tmp_path: Path) -> None:
    old = replace(TRUNK[50], expires_at=NOW + 1)
    fill(tmp_path / "s", [*TRUNK[:50], old, *TRUNK[51:], *ONE])
    offset = tmp_path / "offset"
    offset.write_text("5")
    control = StoreControl(tmp_path / "s", clock_offset_file=str(offset))
    [chain] = control.pages(Inspect(id=ID))
    assert of(chain) == hashes([*TRUNK[51:], *ONE])


@pytest.mark.parametrize("is_live", [True, False])
def test_an_id_that_names_nothing_is_refused(harness: Harness, is_live: bool) -> None:
    client = harness.open()
    Mailbox(client).store(make_chain("a", 1))
    if not is_live:
        client.close()
    with engine_that_says(client, {}):
        for id_ in ("0" * 12, f"{'0' * 12}-{'1' * 12}"):
            with refused(UnknownIdError):
                shown(harness.folder, id_)
        with refused(ConfigError):
            shown(harness.folder, "abc")


def in_ram(record: BlockRecord, tier: Tier) -> tuple[BlockRecord, list[Tier]]:
    """Return what an engine says of a block."""
    told = replace(
        record,
        retention="in_memory",
        computed_at=record.computed_at + 5,
        last_used=record.last_used + 5,
        expires_at=record.expires_at - 5,
        pinned_until=record.last_used + 9,
        hits=7,
    )
    return told, [tier]


def test_each_tier_is_asked_for_what_the_others_lack(harness: Harness) -> None:
    chain = make_chain("a", 6)
    client = harness.open()
    Mailbox(client).store([*chain[:2], *chain[3:5]])
    ram = [in_ram(chain[i], tier) for i, tier in ((2, Tier.HOST), (4, Tier.DEVICE), (5, Tier.HOST))]
    with engine_that_says(client, told_by_engine(*ram)):
        found = shown(harness.folder, chain[5].block_hash.hex())
    assert of(found) == hashes(chain)
    assert [block.tiers for block in found] == [
        *([Tier.DISK], [Tier.DISK], [Tier.HOST]),
        *([Tier.DISK], [Tier.DEVICE, Tier.DISK], [Tier.HOST]),
    ]
    both = found[4]
    assert (both.hits, both.codec, both.retention) == (7, "raw", "24h")
    assert both.computed_at == chain[4].computed_at
    assert both.last_used == chain[4].last_used + 5
    assert both.expires_at == chain[4].expires_at
    last = chain[5]
    assert found[5] == BlockInfo(
        block_hash=last.block_hash.hex(),
        parent_hash=last.parent_hash.hex(),
        root=last.root.hex(),
        namespace=last.namespace.hex(),
        position=5,
        tiers=[Tier.HOST],
        size_bytes=last.size_bytes,
        retention="in_memory",
        computed_at=last.computed_at + 5,
        last_used=last.last_used + 5,
        expires_at=last.expires_at - 5,
        pinned_until=last.last_used + 9,
        hits=7,
    )


def test_a_prompt_that_is_too_long_for_the_worker_is_refused_at_once(tmp_path: Path) -> None:
    with refused(ConfigError):
        StoreControl(tmp_path).answer(Inspect(prompt="x" * 2_000_000))


def test_a_silent_engine_is_reported(harness: Harness) -> None:
    client = harness.open()
    Mailbox(client).store(make_chain("a", 2))
    with refused(StoreUnreachableError):
        shown(harness.folder, make_chain("a", 2)[-1].block_hash.hex())
