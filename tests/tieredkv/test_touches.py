"""Chains are refreshed after their use, some blocks a step."""

import pytest

from tests.fake_store import Rig
from tieredkv.tier import TouchItem

pytestmark = pytest.mark.usefixtures("each_tier")


def test_long_chains_are_refreshed_some_blocks_a_step_and_the_rest_at_the_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(num_blocks=32, num_pages=32)
    for name in "ab":
        rig.run(name, 6, "in_memory")
    prefixes = [rig.start(name, 6) for name in "ab"]
    for prefix in prefixes:
        rig.cache.touch(prefix)
    entries = {name: [rig.entry(name, position) for position in range(6)] for name in "ab"}

    def num_claimed(name: str) -> int:
        are_claimed = ["24h" in entry.claims for entry in entries[name]]
        assert are_claimed == sorted(are_claimed, reverse=True), "the head comes first"
        return sum(are_claimed)

    assert (num_claimed("a"), num_claimed("b")) == (0, 0)
    monkeypatch.setattr("tieredkv.cache.touches.MAX_TOUCHED", 4)
    seen = []
    for _ in range(2):
        rig.cache.refresh()
        seen.append((num_claimed("a"), num_claimed("b")))
    assert seen == [(4, 0), (6, 2)]
    rig.end(prefixes[0])
    rig.cache.release(prefixes[1])
    assert num_claimed("b") == 6, "what a request claims is noted before its blocks are free"
    assert {entry.hits for entry in entries["b"]} == {1}, "computing is no hit"
    rig.check_nothing_is_held()


def test_the_disk_keeps_what_it_told_of_for_a_request_that_has_no_room_in_vram() -> None:
    rig = Rig(num_blocks=8, num_pages=8)
    for name in "ab":
        rig.store.put(name, 6, age_s=600.0)
    first = rig.queue("a", 6)
    rig.turn()
    assert rig.store.touched == [], "there is room, so that it is admitted at once"
    assert rig.admit(first)
    waiting = rig.queue("b", 6)
    rig.turn()
    now = rig.clock.now()
    assert rig.store.touched == [TouchItem(each, now, hits=0) for each in waiting.hashes]
    assert not rig.admit(waiting)
    for prefix in (first, waiting):
        rig.cache.release(prefix)
    rig.turn(2)
    rig.check_nothing_is_held()
