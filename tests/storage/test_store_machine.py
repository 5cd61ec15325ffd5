"""Compares a store with a dict over random operations: its blocks, their bytes and their expiry."""

import errno
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.fakes import FakeClock
from tests.storage.blocks import (
    CheckedStore,
    commit,
    evict,
    load,
    make_record,
    occupied_bytes,
    open_store,
    page_with,
    payload_of,
    refuse,
    sweep,
    verify,
)
from tieredkv.operate.calls import EvictFilter
from tieredkv.storage.extents import files
from tieredkv.storage.folder import filesystem
from tieredkv.tier import TouchItem
from tieredkv.types import BlockRecord

CHAINS = ["a", "b", "c"]
SIZES = {"a": 32_768, "b": 32_000, "c": 65_536}  # these need two extent sizes
CHAIN_BLOCKS = 12
BUDGETS = [1 << 20, 3 << 19, 16 << 20]  # the first two are too small for all blocks
LIVES_S = [5.0, 3600.0, 86_400.0]

chains = st.sampled_from(CHAINS)
positions = st.integers(0, CHAIN_BLOCKS - 1)
picks = st.lists(st.tuples(chains, positions), min_size=1, max_size=8, unique=True)


def hash_of(chain: str, position: int) -> bytes:
    return make_record(chain, position).block_hash


def used_until(record: BlockRecord) -> tuple[float, int]:
    """Return the key by which blocks are ordered for eviction; the smallest goes first."""
    return max(record.last_used, record.pinned_until), -record.position


class StoreMachine(RuleBasedStateMachine):
    """A store, and in `model` the blocks that it must have unless it evicted them.

    A store with room evicts nothing. In a small store a block may be gone, but never wrong. A block
    that is gone was not used later than one that is stored, and of blocks used at the same time it
    was not nearer to the head of its chain.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="tieredkv-machine-"))
        self.clock = FakeClock()
        self.model: dict[bytes, BlockRecord] = {}
        self.num_evicted = 0
        self.patch = pytest.MonkeyPatch()

    @initialize(
        budget=st.sampled_from(BUDGETS),
        encryption=st.sampled_from(["off", "on"]),
        has_holes=st.booleans(),
    )
    def make(self, budget: int, encryption: str, has_holes: bool) -> None:
        self.budget = budget
        self.encryption = encryption
        self.has_holes = has_holes
        if not has_holes:
            for module in (filesystem, files):
                self.patch.setattr(module, "punch_hole", refuse(errno.EOPNOTSUPP))
        self.store = self.open(budget)

    def open(self, budget: int | None) -> CheckedStore:
        options: dict[str, Any] = {"encryption": self.encryption}
        options |= {"key_dir": str(self.folder / "keys"), "disk_retentions": ("24h", "long")}
        return open_store(self.folder / "store", self.clock, budget_bytes=budget, **options)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        self.patch.undo()
        shutil.rmtree(self.folder)

    # --- rules --------------------------------------------------------------------------------

    @rule(
        chain=chains,
        start=positions,
        count=st.integers(1, CHAIN_BLOCKS),
        life_s=st.sampled_from(LIVES_S),
    )
    def put(self, chain: str, start: int, count: int, life_s: float) -> None:
        self._advance(0.001)  # these blocks are used later than all before them
        now = self.clock.now()
        records = [
            make_record(chain, position, now=now, size_bytes=SIZES[chain], expires_at=now + life_s)
            for position in range(start, min(start + count, CHAIN_BLOCKS))
        ]
        extents = self.store.reserve(records)
        writes = []
        for extent, record in zip(extents, records, strict=True):
            if extent is not None:
                page = page_with(payload_of(record))
                writes.append(self.store.write(extent, record, page))
        assert writes if self.budget < BUDGETS[-1] else len(writes) == len(records)
        assert commit(self.store, writes) == [True] * len(writes)
        fresh = {each.record.block_hash: each.record for each in writes}
        for block_hash, record in fresh.items():
            old = self.model.get(block_hash)
            if old is not None and record.computed_at <= old.computed_at:
                record = self._refreshed(old, now, record.expires_at, hits=old.hits)
            self.model[block_hash] = record
        self._forget_evicted(fresh)

    @rule(
        picked=picks,
        longer_s=st.sampled_from([None, 1.0, 600.0]),
        pin_s=st.sampled_from([0.0, 30.0]),
        hits=st.sampled_from([None, 0, 2]),
    )
    def touch(
        self, picked: list[tuple[str, int]], longer_s: float | None, pin_s: float, hits: int | None
    ) -> None:
        now = self.clock.now()
        expires_at = None if longer_s is None else now + longer_s
        hashes = [hash_of(*each) for each in picked]
        there = [block_hash for block_hash in hashes if block_hash in self.model]
        until = now + pin_s if pin_s else 0.0
        touched = [TouchItem(each, now, expires_at, "long", until, hits) for each in hashes]
        self.store.touch(touched)
        for block_hash in there:
            self.model[block_hash] = self._refreshed(
                self.model[block_hash], now, expires_at, "long", until, hits
            )
        self._forget_evicted()

    def _refreshed(
        self,
        old: BlockRecord,
        now: float,
        expires_at: float | None,
        retention: str = "24h",
        pinned_until: float = 0.0,
        hits: int | None = None,
    ) -> BlockRecord:
        later = max(old.expires_at, expires_at or 0.0)
        return msgspec.structs.replace(
            old,
            expires_at=later,
            last_used=now,
            pinned_until=max(old.pinned_until, pinned_until),
            hits=old.hits + 1 if hits is None else max(old.hits, hits),
            retention=retention if later > old.expires_at else old.retention,
        )

    @rule(picked=picks)
    def lookup(self, picked: list[tuple[str, int]]) -> None:
        hashes = [hash_of(*each) for each in picked]
        assert self.store.lookup(hashes) == [self.model.get(each) for each in hashes]

    @rule(chain=chains, position=positions)
    def load(self, chain: str, position: int) -> None:
        asked = make_record(chain, position, size_bytes=SIZES[chain])
        known = self.model.get(asked.block_hash)
        assert load(self.store, asked) == (None if known is None else payload_of(known))

    @rule(picked=picks)
    def delete(self, picked: list[tuple[str, int]]) -> None:
        hashes = [hash_of(*each) for each in picked]
        there = {each for each in hashes if each in self.model}
        assert len(self.store.drop(hashes, "request")) >= len(there)  # expired ones count, too
        for block_hash in there:
            del self.model[block_hash]

    @rule(unused_s=st.sampled_from([0.0, 2.0, 100.0]))
    def evict(self, unused_s: float) -> None:
        leaves = {record.block_hash for record in self.model.values()}
        leaves -= {record.parent_hash for record in self.model.values()}
        which = EvictFilter(older_than_s=unused_s)
        foreseen = evict(self.store, msgspec.structs.replace(which, dry_run=True))
        num_unswept = self.store.stats().blocks - len(self.model)
        done = evict(self.store, which)
        assert done[:3] == foreseen[:3]  # the others are keys that were erased or kept
        before = set(self.model)
        self._keep_stored()
        gone = before - set(self.model)
        assert done.evicted_blocks - num_unswept <= len(gone) <= done.evicted_blocks
        if unused_s == 0.0:
            assert not self.model
        if gone:
            assert gone & leaves, "the head of a chain went before its tail"

    @rule()
    def sweep(self) -> None:
        sweep(self.store)
        stats = self.store.stats()
        assert stats.blocks == len(self.model)
        assert stats.bytes_live == sum(each.size_bytes for each in self.model.values())
        assert stats.bytes_pending == 0

    @rule(seconds=st.sampled_from([0.5, 1.0, 5.0, 59.0, 4000.0]))
    def wait(self, seconds: float) -> None:
        self._advance(seconds)

    def _advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        now = self.clock.now()
        self.model = {key: each for key, each in self.model.items() if each.expires_at > now}

    @rule(is_without_budget=st.booleans())
    def reopen(self, is_without_budget: bool) -> None:
        self.store.close()
        budget = None if is_without_budget else self.budget
        self.store = self.open(budget)
        self.num_evicted = 0
        self._forget_evicted()

    @precondition(lambda self: self.model)
    @rule(budget=st.sampled_from(BUDGETS))
    def reopen_with_another_budget(self, budget: int) -> None:
        self.budget = budget
        self.reopen(False)

    @rule()
    def verify(self) -> None:
        result = verify(self.store)
        assert (result.checked, result.bad) == (len(self.model), 0)

    # --- what holds after each rule -----------------------------------------------------------

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "store"):
            return
        self.store.check()
        assert occupied_bytes(self.folder / "store") <= self.budget
        assert self.store.stats().faults == {}

    def _keep_stored(self) -> None:
        found = self.store.lookup(list(self.model))
        self.model = {each.block_hash: each for each in found if each is not None}

    def _forget_evicted(self, fresh: Mapping[bytes, BlockRecord] | None = None) -> None:
        """Drop evicted blocks from the model, and check the order in which they were evicted.

        None of them may have been used or pinned later than one that stayed, unless no holes can be
        punched: then a block's place may count. A block that was
        stored again may have been evicted just before. Its record is then that of `fresh`.
        """
        num_evicted = self.store.stats().num_evicted
        before = dict(self.model)
        for key, record in zip(before, self.store.lookup(list(before)), strict=True):
            assert record in (None, before[key], (fresh or {}).get(key))
        self._keep_stored()
        gone = [record for key, record in before.items() if key not in self.model]
        assert len(gone) <= num_evicted - self.num_evicted
        if gone and self.model and self.has_holes:
            assert max(map(used_until, gone)) <= min(map(used_until, self.model.values()))
        self.num_evicted = num_evicted


LIMITS = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


class TestStore(StoreMachine.TestCase):  # type: ignore[misc,valid-type]
    """As `make test` tries it."""

    settings = LIMITS


@pytest.mark.slow
class TestStoreForLonger(StoreMachine.TestCase):  # type: ignore[misc,valid-type]
    """As `make test-full` tries it."""

    settings = settings(LIMITS, max_examples=100)
