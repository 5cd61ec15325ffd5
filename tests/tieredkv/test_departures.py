"""An operator moves chosen blocks down, or drops the copies of one tier."""

import random
import time

import pytest

from tests.fake_store import Rig, chain_of
from tests.waiting import HANG_S
from tieredkv.cache import departures
from tieredkv.types import Tier

pytestmark = pytest.mark.usefixtures("each_tier")


def test_blocks_go_to_host_and_from_there_to_disk_and_come_back() -> None:
    rig = Rig()
    assert rig.run("a", 4) == 4
    assert rig.run("b", 2) == 2
    rig.cache._departures.send(chain_of("a", 4), Tier.HOST)
    rig.turn(5)
    assert (rig.on_device("a", 4), rig.on_host("a", 4)) == ([], [0, 1, 2, 3])
    assert rig.on_device("b", 2) == [0, 1]
    rig.cache._departures.send([*chain_of("a", 4), *chain_of("b", 2)], Tier.DISK)
    rig.turn(20)
    for name, length in (("a", 4), ("b", 2)):
        assert rig.on_disk(name, length) == [*range(length)]
        assert (rig.on_device(name, length), rig.on_host(name, length)) == ([], [])
    assert not rig.cache._departures
    assert rig.tiers.counters.lost_blocks == {}
    assert rig.run("a", 4) == 0
    rig.check_nothing_is_held()


def test_a_block_in_use_goes_down_and_its_request_ends_as_before() -> None:
    rig = Rig()
    first = rig.start("a", 4)
    rig.compute(first)
    rig.cache._departures.send(chain_of("a", 4), Tier.HOST)
    rig.turn(5)
    assert rig.on_device("a", 4) == []
    rig.finish(first)
    assert rig.run("a", 4) == 0
    rig.check_nothing_is_held()


def test_a_block_whose_write_fails_stays_where_it_is() -> None:
    rig = Rig()
    rig.run("a", 2)
    rig.store.is_held = True
    rig.cache._departures.send(chain_of("a", 2), Tier.DISK)
    rig.turn(5)
    while rig.store.jobs:
        rig.store.complete(0, reason="full")
        rig.turn()
    rig.turn(5)
    assert not rig.cache._departures
    assert rig.on_disk("a", 2) == [] and rig.on_host("a", 2) == [0, 1]


def test_a_block_that_cannot_go_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.run("a", 2, "in_memory")
    rig.cache._departures.send(chain_of("a", 2), Tier.DISK)
    rig.turn(5)
    assert len(rig.cache._departures) == 2
    monkeypatch.setattr(departures, "PATIENCE_S", -1.0)
    rig.cache._departures.send(chain_of("a", 2), Tier.DISK)
    rig.turn()
    assert not rig.cache._departures
    assert rig.on_disk("a", 2) == []
    assert rig.run("a", 2, "in_memory") == 0


@pytest.mark.parametrize("to", [Tier.HOST, Tier.DISK])
def test_more_blocks_than_a_step_examines_go_through_a_full_arena(
    monkeypatch: pytest.MonkeyPatch, to: Tier
) -> None:
    monkeypatch.setattr(departures, "MAX_LOOKS", 2)
    rig = Rig(num_pages=8)
    rig.run("old", 8)
    rig.cache.flush(Tier.HOST, deadline=time.monotonic() + HANG_S)
    rig.run("new", 6)
    assert (rig.on_device("new", 6), rig.on_host("old", 8)) == ([*range(6)], [*range(8)])
    rig.cache._departures.send(chain_of("new", 6), to)
    rig.turn(20)
    assert not rig.cache._departures
    assert rig.on_device("new", 6) == []
    arrived = rig.on_host("new", 6) if to is Tier.HOST else rig.on_disk("new", 6)
    assert arrived == [*range(6)]
    rig.check_nothing_is_held()


@pytest.mark.parametrize("seed", range(5))
def test_copies_dropped_at_random_leave_every_invariant(seed: int) -> None:
    rig, choose = Rig(num_blocks=12, num_pages=8), random.Random(seed)
    for _ in range(60):
        name, length = choose.choice("abc"), choose.randint(1, 5)
        rig.run(name, length)
        block_hash = choose.choice(chain_of(choose.choice("abc"), 5))
        match choose.randrange(4):
            case 0:
                rig.tiers.drop_copy(Tier.DEVICE, block_hash)
            case 1:
                rig.tiers.drop_copy(Tier.HOST, block_hash)
            case 2:
                rig.cache._departures.send([block_hash], Tier.HOST)
            case _:
                rig.cache._departures.send([block_hash], Tier.DISK)
        rig.cache._demoter.note_change()
        rig.turn()
        rig.check()
    rig.check_nothing_is_held()
