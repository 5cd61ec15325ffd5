"""Random sequences of requests, and of what operators, tenants and the disk do meanwhile.

See `test_tiered_cache_model`, whose sequences these contain.
"""

import math
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from tests.fake_store import DAY_S, chain_of, root_of
from tests.operated_rig import MOST_BLOCKS, KeepingStore, OperatedRig
from tests.tieredkv.test_events import Follower
from tests.tieredkv.test_tiered_cache_model import CHAINS, LIMITS, TieredCacheMachine
from tieredkv.cache import (
    catalog,
    demotion,
    departures,
    expiry,
    free_list,
    promotion,
    room,
    touches,
)
from tieredkv.cache.chain import BlockClaim, Chain
from tieredkv.cache.disk_link import Read
from tieredkv.cache.orders import ORDERS
from tieredkv.pieces import whole
from tieredkv.retention import IN_MEMORY, TWENTY_FOUR_HOURS, RetentionPolicy
from tieredkv.tier import OPERATOR, Held
from tieredkv.types import BlockHash, Tier

AMPLE_S = 0.3
"""For how long a drain may write here, so that it writes everything."""

NAMES = "abc"
RAM_LONGER = RetentionPolicy(
    name="ram", idle_s=DAY_S, absolute_s=DAY_S, tiers=frozenset({Tier.DEVICE, Tier.HOST})
)
VRAM_ONLY = RetentionPolicy(
    name="vram", idle_s=600.0, absolute_s=DAY_S, tiers=frozenset({Tier.DEVICE})
)
DISK_BRIEFLY = RetentionPolicy(name="brief", idle_s=300.0, absolute_s=3600.0, tiers=frozenset(Tier))
POLICIES = IN_MEMORY, TWENTY_FOUR_HOURS, RAM_LONGER, VRAM_ONLY, DISK_BRIEFLY
RETENTIONS = st.frozensets(
    st.sampled_from([each.name for each in POLICIES]), min_size=1, max_size=2
)
PINNED_S = st.sampled_from([0.0, 0.0, 30.0, 700.0, 2 * DAY_S])
TIERS = st.sampled_from([[Tier.DEVICE], [Tier.HOST], None])
FEW = (
    *((room, name) for name in ("FEW_BLOCKS", "MAX_AHEAD", "MIN_SLICE")),
    *((demotion, name) for name in ("MAX_MOVES", "LOOKS_PER_MOVE")),
    (catalog, "PIECE_BLOCKS"),
    (departures, "MAX_LOOKS"),
    (expiry, "MAX_EXPIRED"),
    (free_list, "PARTIAL_LOOKS"),
    (promotion, "MAX_READS"),
    (touches, "MAX_TOUCHED"),
)
"""Bounds of the work of one step; with 1, much is left to later steps."""


class OperatedCacheMachine(TieredCacheMachine):
    """The same, and whatever else may happen to blocks at any moment.

    Operators evict in one tier or in all, bit by bit, send blocks down, flush, and delete on disk.
    The disk evicts, and its worker restarts. Tenants have shares. Requests claim blocks by several
    policies, may read only up to some ends, generate, and are preempted. The wall clock is set
    back. A follower of the tiers knows what they hold. The engine stops.
    """

    store: KeepingStore

    @initialize(
        num_blocks=st.integers(5, 10),
        num_pages=st.integers(1, 20),
        has_store=st.sampled_from([True, True, False]),
        is_write_behind=st.booleans(),
        most_owed=st.sampled_from([0, 3, 1_000_000]),
        has_timeout=st.booleans(),
        is_patient=st.booleans(),
        restore=st.sampled_from(["auto", "auto", "load", "compute"]),
        told=st.sampled_from(["nothing", "some", "all"]),
        order=st.sampled_from(["lru", *ORDERS]),
        has_tenants=st.booleans(),
        is_bounded=st.booleans(),
        is_followed=st.booleans(),
    )
    def build(
        self,
        *,
        told: str,
        order: str,
        has_tenants: bool,
        has_timeout: bool,
        is_patient: bool,
        is_bounded: bool,
        is_followed: bool,
        **options: Any,
    ) -> None:
        room.PATIENCE_S = 1e9 if is_patient else 0.0
        self.bounds = ExitStack()
        self.bounds.enter_context(mock.patch.object(time, "sleep", self.wait))
        for module, name in FEW if is_bounded else ():
            self.bounds.enter_context(mock.patch.object(module, name, 1))
        self.rig = OperatedRig(
            policies=POLICIES,
            eviction_order=order,
            load_timeout_s=0.0 if has_timeout else 1e9,
            **options,
        )
        self.store = self.rig.store
        self.store.is_held = self.rig.transfer.is_held = True
        self.rig.tenants = {"c": b"other"} if has_tenants else {}
        self.follower = Follower(self.rig) if is_followed else None
        self.under_way: list[Iterator[None]] = []
        if told != "nothing":
            self.store.tell_all(is_whole=told == "all")

    @staticmethod
    def hashes_of(chain: Chain) -> list[BlockHash]:
        """Return the hashes of the longest chain that begins like this one."""
        (name,) = (each for each in NAMES if root_of(each) == chain.root)
        return chain_of(name, MOST_BLOCKS)

    # Requests

    @rule(
        chain=CHAINS,
        first=st.integers(1, MOST_BLOCKS),
        retentions=st.tuples(RETENTIONS, RETENTIONS),
        pinned_s=st.tuples(PINNED_S, PINNED_S),
        ends=st.none() | st.none() | st.sets(st.integers(0, MOST_BLOCKS)),
    )
    def arrive(
        self,
        chain: tuple[str, int],
        first: int,
        retentions: tuple[frozenset[str], frozenset[str]],
        pinned_s: tuple[float, float],
        ends: set[int] | None,
    ) -> None:
        name, length = chain
        prefix = self.rig.chain(name, length)
        now = self.rig.clock.now()
        until = [now + each if each else 0.0 for each in pinned_s]
        prefix.claims = [
            BlockClaim(first, retentions[0], until[0]),
            BlockClaim(sys.maxsize, retentions[1], until[1]),
        ]
        if ends is not None:
            prefix.read_ends = sorted(each for each in ends if each <= length)
        self.rig.cache.arrive(prefix)
        self.waiting.append(prefix)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), num_private=st.integers(0, 2), makes_room=st.booleans())
    def admit(self, data: st.DataObject, num_private: int, makes_room: bool) -> None:
        index = data.draw(st.integers(0, len(self.waiting) - 1))
        prefix = self.waiting[index]
        num_blocks = min(len(prefix.hashes) + num_private, self.rig.tiers.device.num_blocks)
        if self.rig.admit(prefix, num_blocks, is_alone=not self.running, makes_room=makes_room):
            self.running.append(self.waiting.pop(index))
            self.check_found(prefix)

    def check_found(self, prefix: Chain) -> None:
        now = self.rig.clock.now()
        for block in prefix.blocks:
            if block.is_ready and block.block_hash is not None:
                entry = self.rig.tiers.catalog.get(block.block_hash)
                assert entry is not None, "a block without an entry was found"
                assert not self.rig.tiers.catalog.is_expired(entry, now), "expired"
                assert now < self.store.newest[block.block_hash] + DAY_S, "too old"

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), num_private=st.integers(0, 2))
    def make_room(self, data: st.DataObject, num_private: int) -> None:
        prefix = data.draw(st.sampled_from(self.waiting))
        if self.rig.cache.is_settled(prefix):
            num_blocks = len(prefix.hashes) + num_private
            self.rig.cache.make_room(prefix, num_blocks, is_alone=not self.running)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def generate(self, data: st.DataObject) -> None:
        prefix = data.draw(st.sampled_from(self.running))
        num_hashed = len(prefix.hashes)
        is_computed = all(block.is_ready for block in prefix.blocks[:num_hashed])
        if is_computed and num_hashed < min(MOST_BLOCKS, len(prefix.blocks)):
            self.rig.seal(prefix, self.hashes_of(prefix)[num_hashed])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        prefix = data.draw(st.sampled_from(self.running))
        self.running.remove(prefix)
        num_blocks, num_ready = len(prefix.blocks), self.rig._num_ready(prefix)
        if prefix.read_ends is not None:
            prefix.read_ends.append(num_ready)
        self.rig.cache.release(prefix)
        prefix.hashes.extend(self.hashes_of(prefix)[len(prefix.hashes) : num_blocks])
        self.waiting.append(prefix)
        self.rig.cache.arrive(prefix)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 3))
    def begin_compute(self, data: st.DataObject, count: int) -> None:
        """Plan a step that computes blocks, and do not run it."""
        prefix = data.draw(st.sampled_from(self.running))
        first = last = self.rig._num_ready(prefix)
        for block in prefix.blocks[first : min(first + count, len(prefix.hashes))]:
            if block.is_ready or not self.rig.may_compute(prefix, last):
                break
            last += 1
        self.rig.cache.begin_compute(prefix, first, last)

    @rule(chain=CHAINS, is_sent_down=st.booleans())
    def begin_early(self, chain: tuple[str, int], is_sent_down: bool) -> None:
        """Admit a request whose blocks are read from disk, and copy their first layers to VRAM.

        An operator may then evict their pages, and send the blocks down again.
        """
        self.begin_to_load(chain)
        while self.store.jobs:
            self.store.complete(0)
        self.rig.turn()
        while self.rig.transfer.can_begin:
            self.rig.transfer.begin()
        self.rig.cache.poll(may_start_early=True)
        if is_sent_down:
            operations, is_wanted = self.rig.cache.operations, self.chosen(chain[0], 0)
            whole(operations.evict(is_wanted, [Tier.HOST]))
            whole(operations.send_down(is_wanted, Tier.HOST))

    @rule(seconds=st.sampled_from([1.0, 60.0, 3600.0]))
    def set_clock_back(self, seconds: float) -> None:
        self.rig.clock.moment -= seconds

    @rule()
    def refresh(self) -> None:
        self.rig.cache.refresh()

    # Operators and tenants

    @staticmethod
    def chosen(name: str, first: int) -> Callable[[Any], bool]:
        """Return what chooses the blocks of a chain from this one on."""

        def is_wanted(block: object) -> bool:
            each: Any = block.lent if isinstance(block, Read) else block
            return bool(each.root == root_of(name) and each.position >= first)

        return is_wanted

    def has(self, tier: Tier) -> bool:
        """Return whether there is this slower tier; else the callers refuse."""
        return tier is Tier.HOST or self.rig.tiers.store is not None

    @rule(name=st.sampled_from(NAMES), first=st.integers(0, 2), only=TIERS)
    def begin_to_evict(self, name: str, first: int, only: Collection[Tier] | None) -> None:
        is_wanted = self.chosen(name, first)
        self.under_way.append(iter(self.rig.cache.operations.evict(is_wanted, only)))

    @rule(
        name=st.sampled_from(NAMES),
        first=st.integers(0, 2),
        to=st.sampled_from([Tier.HOST, Tier.DISK]),
    )
    def begin_to_send_down(self, name: str, first: int, to: Tier) -> None:
        if self.has(to):
            is_wanted = self.chosen(name, first)
            self.under_way.append(iter(self.rig.cache.operations.send_down(is_wanted, to)))

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), is_last=st.booleans())
    def go_on(self, data: st.DataObject, is_last: bool) -> None:
        pieces = data.draw(st.sampled_from(self.under_way))
        for _ in pieces:
            if not is_last:
                return
        self.under_way.remove(pieces)

    @rule(to=st.sampled_from([Tier.HOST, Tier.DISK]))
    def flush(self, to: Tier) -> None:
        if self.has(to):
            self.rig.cache.flush(to, deadline=self.moment)

    @rule(of_other=st.sampled_from([0.0, 0.3, 0.8]), is_set=st.booleans())
    def share(self, of_other: float, is_set: bool) -> None:
        shares = {b"other": of_other, b"ns": 0.2} if is_set else {}
        self.rig.cache.operations.set_shares(shares)

    # The stop

    @rule(
        data=st.data(),
        is_stop=st.booleans(),
        disk=st.sampled_from(["hangs", "writes", "full"]),
        timeout_s=st.sampled_from([0.0, 0.003, AMPLE_S]),
        passed_s=st.sampled_from([0.0, 0.0, 0.1, 400.0]),
    )
    def drain(
        self, data: st.DataObject, is_stop: bool, disk: str, timeout_s: float, passed_s: float
    ) -> None:
        """Drain the tiers, at a stop after all requests were aborted."""
        while is_stop and self.waiting + self.running:
            self.cancel(data)

        def meanwhile() -> None:
            self.rig.clock.moment += passed_s
            self.rig.transfer.complete()
            if self.store.jobs and disk != "hangs":
                self.store.complete(0, reason="full" if disk == "full" else "")
            if self.under_way and next(self.under_way[0], self) is self:
                self.under_way.pop(0)

        self.check_drain(timeout_s, meanwhile, must_end=is_stop and disk != "hangs")

    def check_drain(
        self, timeout_s: float, meanwhile: Callable[[], None], *, must_end: bool
    ) -> None:
        """Drain the tiers, and verify that what it has left is told."""
        tiers, deadline = self.rig.tiers, self.moment + timeout_s
        lost = self.rig.cache.drain(timeout_s, meanwhile=meanwhile)
        num_left = sum(map(tiers.is_promised, tiers.catalog.entries()))
        assert lost.num_late + lost.num_refused == num_left, "a loss is not told"
        assert self.moment < deadline + 0.001, "it goes on after its deadline"
        if self.moment < deadline or (must_end and timeout_s == AMPLE_S):
            assert not lost.num_late, "a block was not written"
        written = {it.block_hash for it in tiers.catalog.entries() if it.is_on_disk and it.claims}
        assert written <= self.store.blocks.keys() | self.store.lost, "a block is not on disk"

    # The disk

    @rule(chain=CHAINS, reason=st.sampled_from(["capacity", OPERATOR]))
    def lose_on_disk(self, chain: tuple[str, int], reason: str) -> None:
        self.store.lose(chain_of(*chain), reason)

    @rule()
    def expire_on_disk(self) -> None:
        now, blocks = self.rig.clock.now(), self.store.blocks
        self.store.lose([it for it in blocks if blocks[it][0].expires_at <= now], "expired")

    @rule(is_empty=st.booleans())
    def restart_worker(self, is_empty: bool) -> None:
        self.store.restart(is_empty=is_empty)

    @rule(chain=CHAINS)
    def place_untold(self, chain: tuple[str, int]) -> None:
        """Have the disk have blocks of which it has yet to tell."""
        store = self.store
        if store.tells_held and not (self.rig.tiers.presence.is_whole or store.told or store.jobs):
            store.tells_held = False
            store.put(*chain)
            store.tells_held = True

    @rule(is_whole=st.booleans(), length=st.integers(1, MOST_BLOCKS))
    def tell_blocks(self, is_whole: bool, length: int) -> None:
        if not self.store.tells_held:
            return
        for name in NAMES:
            self.store.tell_some(chain_of(name, MOST_BLOCKS if is_whole else length))
        if is_whole:
            self.store.told.append(Held(is_whole=True))

    # What holds

    @invariant()
    def no_block_is_unknown(self) -> None:
        if hasattr(self, "rig"):
            for pool, _ in self.rig.memories:
                for block_hash in pool.hashes:
                    assert self.rig.tiers.catalog.get(block_hash), "a block has no entry"

    @invariant()
    def follower_knows(self) -> None:
        if hasattr(self, "rig") and self.follower is not None:
            self.follower.lost = self.store.lost
            self.follower.check()

    @invariant()
    def presence_is_right(self) -> None:
        if not hasattr(self, "rig") or self.store.told or not self.store.tells_held:
            return
        presence, blocks = self.rig.tiers.presence, self.store.blocks
        hashes = [each for name in NAMES for each in chain_of(name, MOST_BLOCKS)]
        for block_hash, until in zip(hashes, presence.until(hashes).tolist(), strict=True):
            assert not until or block_hash in blocks, "a block that has gone counts as being there"
            if presence.is_whole and block_hash in blocks:
                assert until == math.ceil(blocks[block_hash][0].expires_at), "a block is overlooked"

    def complete_all(self) -> None:
        if not hasattr(self, "rig"):
            return
        try:
            for pieces in self.under_way:
                for _ in pieces:
                    pass
            super().complete_all()
            self.check_nothing_is_left()
            self.check_drain(AMPLE_S, lambda: None, must_end=True)
            self.follower_knows()
        finally:
            self.bounds.close()

    def check_nothing_is_left(self) -> None:
        tiers, cache = self.rig.tiers, self.rig.cache
        assert self.rig.cache.num_free == tiers.device.num_blocks, "device blocks leaked"
        assert not tiers.prefetched, "a prefetched block is kept for nobody"
        assert not tiers.num_promoting, "a copy never ends"
        assert not cache._recalls.chains, "a recall is left"
        assert not cache._touches._begun, "a chain is refreshed for ever"
        assert not cache._lookups._questions and not cache._lookups._asked, "a question is left"
        assert not cache._lookups._num_overdue, "the disk counts as not answering"
        assert not cache._room._waits and not cache._room._refused, "a wait is left"


class TestOperatedCache(OperatedCacheMachine.TestCase):  # type: ignore[misc,valid-type]
    """As `make test` tries it."""

    settings = LIMITS


@pytest.mark.slow
class TestOperatedCacheForLonger(OperatedCacheMachine.TestCase):  # type: ignore[misc,valid-type]
    """As `make test-full` tries it."""

    settings = settings(LIMITS, max_examples=200)
