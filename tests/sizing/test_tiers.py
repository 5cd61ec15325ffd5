"""The tiers of a replay use their disk by the protocol of a tier alone."""

from collections.abc import Sequence

import pytest

from tests.fake_tier import FakeTier
from tieredkv.retention import RetentionPolicies, RetentionPolicy
from tieredkv.sizing.disk import SimulatedClock, SimulatedDisk
from tieredkv.sizing.tiers import Capacity, SimulatedTiers
from tieredkv.tier import BackingTier, Event, Gone, Lent, Loaded, Stored, TouchItem
from tieredkv.types import BlockHash, Tier

CLAIMS = frozenset({"any"})
FIRST, SECOND = ([BlockHash(bytes([each])) for each in some] for some in (b"ab", b"cd"))


class FaultyDisk(FakeTier):
    """Takes what it is given, or not, and loses it.

    Attributes:
        asked: the calls so far, each with the blocks and when they will expire.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__()
        self.asked = list[tuple[str, list[tuple[bytes, float | None]]]]()
        self._reason, self._events = reason, list[Event]()

    def lookup(self, hashes: Sequence[bytes]) -> int:
        raise AssertionError("a replay knows what its disk has told")

    def load(self, lent: Sequence[Lent]) -> None:
        self.asked.append(("load", [(each.block_hash, None) for each in lent]))
        self._events += [Loaded(each.page_id, "checksum") for each in lent]

    def store(self, lent: Sequence[Lent]) -> None:
        times = [(each.block_hash, each.record.expires_at) for each in lent]
        self.asked.append(("store", [*times]))
        self._events += [Stored(each.page_id, self._reason) for each in lent]

    def touch(self, items: Sequence[TouchItem]) -> None:
        self.asked.append(("touch", [(each.block_hash, each.expires_at) for each in items]))

    def poll(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def lose(self, hashes: Sequence[bytes]) -> None:
        """Tell that blocks are gone."""
        self._events.append(Gone([*hashes], "damaged", len(hashes)))


def tiers_of(disk: BackingTier, clock: SimulatedClock, idle_s: float = 50.0) -> SimulatedTiers:
    """Return tiers with VRAM for two blocks and a disk."""
    policy = RetentionPolicy(name="any", idle_s=idle_s, absolute_s=1e3, tiers=frozenset(Tier))
    capacity = Capacity(device=2, disk=10)
    policies = RetentionPolicies([policy])
    return SimulatedTiers(capacity, policies, disk, clock, num_distinct=4, most_blocks=2, until=1e3)


def test_blocks_are_stored_touched_and_loaded_with_their_times() -> None:
    clock = SimulatedClock()
    tiers = tiers_of(disk := FaultyDisk(), clock)
    assert tiers.serve(FIRST, 1.0, CLAIMS) == [None, None]
    tiers.serve(FIRST, 2.0, CLAIMS)
    assert disk.asked == [
        ("store", [(each, 51.0) for each in FIRST]),
        ("touch", [(each, 52.0) for each in FIRST]),
    ]
    assert clock.moment == 2.0


def test_a_block_that_cannot_be_loaded_is_computed_and_owed_again() -> None:
    tiers = tiers_of(disk := FaultyDisk(), SimulatedClock())
    for now, hashes in (1.0, FIRST), (2.0, SECOND):
        tiers.serve(hashes, now, CLAIMS)
    del disk.asked[:]
    assert tiers.serve(FIRST, 3.0, CLAIMS) == [None, None]
    assert disk.asked == [
        ("load", [(each, None) for each in FIRST]),
        ("store", [(each, 53.0) for each in FIRST]),
    ]
    assert tiers.moved["disk_host"] == 0
    disk.lose(FIRST)
    disk.lose(FIRST)  # which nobody has any more
    assert tiers.serve(SECOND, 4.0, CLAIMS) == [None, None]
    tiers.check()


@pytest.mark.parametrize("is_told", [False, True], ids=["refused", "gone"])
def test_what_the_disk_does_not_have_is_forgotten_once_it_has_left_memory(is_told: bool) -> None:
    tiers = tiers_of(disk := FaultyDisk("" if is_told else "full"), SimulatedClock())
    for now, hashes in (1.0, FIRST), (2.0, SECOND):
        tiers.serve(hashes, now, CLAIMS)
    if is_told:
        disk.lose([*FIRST, *SECOND])
    del disk.asked[:]
    assert tiers.serve(FIRST, 3.0, CLAIMS) == [None, None]
    assert "load" not in dict(disk.asked)
    tiers.check()


def test_a_copy_that_has_expired_on_disk_is_written_again_once_a_claim_allows_it() -> None:
    clock = SimulatedClock()
    short = RetentionPolicy(name="short", idle_s=5.0, absolute_s=1e3, tiers=frozenset(Tier))
    memory = frozenset({Tier.DEVICE, Tier.HOST})
    in_memory = RetentionPolicy(name="memory", idle_s=50.0, absolute_s=1e3, tiers=memory)
    disk = SimulatedDisk(10, clock)
    policies = RetentionPolicies([short, in_memory])
    tiers = SimulatedTiers(
        Capacity(device=2, disk=10), policies, disk, clock, num_distinct=4, most_blocks=2, until=1e3
    )
    tiers.serve(FIRST, 0.0, frozenset({"short"}))
    tiers.serve(FIRST, 1.0, frozenset({"memory"}))
    assert disk.stats().num_stored == 2
    sources = tiers.serve(FIRST, 7.0, frozenset({"short"}))  # before the next sweep
    assert sources == [Tier.DEVICE, Tier.DEVICE]
    assert disk.stats().num_stored == 4
    tiers.check()
    disk.check()
