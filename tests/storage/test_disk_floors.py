"""No tenant is pushed below its share of the disk."""

from pathlib import Path

import pytest

from tests.storage.blocks import make_record, open_store, put, stored_hashes
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
        num_quiet = len(flood) * 2 // 5  # the index takes some of the rest as it grows
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
