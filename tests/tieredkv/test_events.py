"""Events of the tiers: followers know what each tier holds, and nothing of silent chains."""

from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from tests.fake_store import Rig, chain_of, tokens_of
from tests.tieredkv.test_tiered_cache_model import CHAINS, LIMITS, TieredCacheMachine
from tieredkv.cache.events import Change
from tieredkv.types import BlockHash, Tier

SILENT = "c"


class Follower:
    """Follows the changes of the tiers of a rig.

    Attributes:
        held: the blocks that each tier holds, as the changes tell.
        changes: all of them.
        lost: blocks that the disk has lost; a test that puts them back tells nobody.
    """

    def __init__(self, rig: Rig) -> None:
        self.held: dict[Tier, set[BlockHash]] = {tier: set() for tier in Tier}
        self.changes: list[Change] = []
        self.lost: set[BlockHash] = set()
        self._rig = rig
        rig.tiers.events.publish_to(self.take)
        rig.announces, rig.store.tells_gone = (lambda name: name != SILENT), True

    def take(self, changes: list[Change]) -> bool:
        """Follow a batch."""
        self.changes += changes
        for tier, block_hash, content, is_anchor in changes:
            assert not is_anchor
            if content is None:
                self.held[tier].remove(block_hash)  # it was announced
                continue
            assert block_hash not in self.held[tier], "a block is announced twice"
            self.held[tier].add(block_hash)
            size = self._rig.tiers.block_size
            assert content.token_ids == tokens_of(block_hash, size).tobytes()
            assert block_hash == chain_after(content.parent_hash, block_hash)
        return True

    def check(self) -> None:
        """Verify that what it knows is what is there."""
        tiers, store = self._rig.tiers, self._rig.store
        tiers.events.flush()
        silent = set(chain_of(SILENT, 10))
        for tier, pool in tiers.pools.items():
            there = {entry.block_hash for entry in tiers.catalog.entries()} - silent
            there = {it for it in there if (block := pool.lookup(it)) and block.is_ready}
            assert self.held[tier] == there, tier
        on_disk = self.held[Tier.DISK]
        assert not on_disk & silent
        if not store.told:  # what it has not told yet nobody knows
            assert on_disk <= store.blocks.keys()
        known = {it.block_hash for it in tiers.catalog.entries() if it.is_on_disk} - silent
        assert known & store.blocks.keys() - self.lost <= on_disk


def chain_after(parent: BlockHash | None, block_hash: BlockHash) -> BlockHash | None:
    """Return the made-up block behind a block; behind none, the first one of a chain."""
    for chain in (chain_of(name, 10) for name in "abcd"):
        if parent is None and chain[0] == block_hash:
            return block_hash
        if parent in chain[:-1]:
            return chain[chain.index(parent) + 1]
    return None


class EventsMachine(TieredCacheMachine):
    """The same random requests, followed by their events; the disk also loses blocks."""

    def follower(self) -> Iterator[Follower]:
        """Yield who follows the rig, once there is one."""
        if hasattr(self, "rig"):
            if not hasattr(self, "_follower"):
                self._follower = Follower(self.rig)
            yield self._follower

    @rule(chain=CHAINS)
    def lose_on_disk(self, chain: tuple[str, int]) -> None:
        for follower in self.follower() if not self.rig.store.jobs else ():
            follower.lost.update(chain_of(*chain))
            self.rig.store.lose(chain_of(*chain))

    @rule()
    def restart_worker(self) -> None:
        if not self.rig.store.jobs and not self.rig.store.lookups:
            for follower in self.follower():
                follower.lost.update(self.rig.store.blocks)
            self.rig.store.restart_empty()

    @rule(chain=st.tuples(st.just("d"), st.integers(1, 5)))
    def arrive_announced(self, chain: tuple[str, int]) -> None:
        self.waiting.append(self.rig.queue(*chain))

    @invariant()
    def follower_knows(self) -> None:
        for follower in self.follower():
            follower.check()

    def teardown(self) -> None:
        super().teardown()
        self.follower_knows()


def test_a_block_that_leaves_the_disk_during_a_lookup_of_its_chain_is_not_announced() -> None:
    rig = Rig()
    follower = Follower(rig)
    rig.store.put("a", 2)
    rig.store.tells_held = True
    rig.store.put("a", 1)
    rig.turn()
    rig.store.is_held = True
    rig.queue("a", 2)
    rig.store.lose(chain_of("a", 1))
    rig.turn()
    rig.store.answer(0)
    rig.turn()
    follower.check()


class TestEvents(EventsMachine.TestCase):  # type: ignore[misc,valid-type]
    """As `make test` tries it."""

    settings = settings(LIMITS, max_examples=40)


@pytest.mark.slow
class TestEventsForLonger(EventsMachine.TestCase):  # type: ignore[misc,valid-type]
    """As `make test-full` tries it."""

    settings = settings(LIMITS, max_examples=200)
