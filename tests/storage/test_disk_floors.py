"""No tenant is pushed below its share of the disk."""

from pathlib import Path

import pytest

from tests.storage.blocks import BLOCK_BYTES, make_record, open_store, put, stored_hashes
from tieredkv.storage.extents.space import headroom_bytes
from tieredkv.storage.format.record import extent_bytes_for
from tieredkv.types import BlockRecord

QUIET, FLOOD = b"quiet...", b"flood..."


@pytest.mark.parametrize("salt", [b"", b"salted"])
def test_a_flood_leaves_another_tenant_its_share_of_the_disk(tmp_path: Path, salt: bytes) -> None:
    with open_store(tmp_path / "s", budget_bytes=2 << 20) as store:
        flood: list[BlockRecord] = []
        while store.stats().num_evicted == 0:
            flood.append(make_record(f"first{len(flood)}", namespace=FLOOD))
            put(store, flood[-1])
        store.keep_shares({QUIET: 0.5, FLOOD: 0.5})
        later = flood[0].last_used + 1
        num_quiet = len(flood) * 2 // 5  # less than half, because the growing index takes room, too
        quiet = [make_record(f"quiet{i}", namespace=QUIET + salt) for i in range(num_quiet)]
        put(store, *quiet)
        for index in range(10 * len(flood)):
            put(store, make_record(f"more{index}", namespace=FLOOD, last_used=later))
        assert len(stored_hashes(store, quiet)) == len(quiet)
        store.keep_shares({})
        for index in range(len(flood)):
            put(store, make_record(f"last{index}", namespace=FLOOD, last_used=later))
        assert not stored_hashes(store, quiet)
        store.check()


def test_where_only_shares_are_left_the_longest_unused_gives_way(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", budget_bytes=2 << 20) as store:
        store.keep_shares({QUIET: 1.0})
        quiet: list[BlockRecord] = []
        while store.stats().num_evicted == 0:
            quiet.append(make_record(f"quiet{len(quiet)}", namespace=QUIET))
            put(store, quiet[-1])
        put(store, new := make_record("new", namespace=FLOOD))
        assert stored_hashes(store, [new, quiet[-1]]) == {new.block_hash, quiet[-1].block_hash}
        store.check()


def test_ten_tenants_keep_their_floors_while_an_eleventh_floods_the_disk(tmp_path: Path) -> None:
    tenants = [b"tenant%02d" % number for number in range(10)]
    with open_store(tmp_path / "s", budget_bytes=8 << 20) as store:
        num_full = 0
        while store.stats().num_evicted == 0:
            put(store, *(make_record(f"first{num_full}/{i}", namespace=FLOOD) for i in range(8)))
            num_full += 8
        store.keep_shares(dict.fromkeys(tenants, 0.08))
        own = {
            tenant: [
                make_record(f"{tenant!r}/{i}", namespace=tenant + b"salt%d" % (i % 3))
                for i in range(num_full // 6)
            ]
            for tenant in tenants
        }
        for some in zip(*own.values(), strict=True):
            put(store, *some)
        for number in range(4 * num_full // 8):
            later = store.clock.now() + 1 + number
            put(
                store,
                *(
                    make_record(f"more{number}/{i}", namespace=FLOOD, last_used=later)
                    for i in range(8)
                ),
            )
            assert store.stats().bytes_files <= 8 << 20
        index_bytes = store.stats().bytes_index
        for_blocks = (8 << 20) - index_bytes - headroom_bytes(index_bytes)
        share = 0.08 * for_blocks / extent_bytes_for(BLOCK_BYTES)
        kept = {tenant: len(stored_hashes(store, records)) for tenant, records in own.items()}
        assert all(int(share) <= num <= share + 2 * 8 for num in kept.values()), (share, kept)
        store.check()


def test_a_tenant_below_its_share_grows_at_the_expense_of_those_without_one(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", budget_bytes=2 << 20) as store:
        num_full = 0
        later = store.clock.now() + 1
        while store.stats().num_evicted == 0:
            put(store, make_record(f"first{num_full}", namespace=FLOOD, last_used=later))
            num_full += 1
        store.keep_shares({QUIET: 0.4})
        quiet = [make_record(f"quiet{i}", namespace=QUIET) for i in range(num_full // 4)]
        for record in quiet:  # each was used before the blocks of the flood
            put(store, record)
        assert len(stored_hashes(store, quiet)) == len(quiet)
        store.check()
