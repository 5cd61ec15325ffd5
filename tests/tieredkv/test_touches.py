"""Chains are refreshed after their use, some blocks a step."""

import pytest

from tests.fake_store import Rig


def test_long_chains_are_refreshed_some_blocks_a_step_and_the_rest_at_the_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(num_blocks=32, num_pages=32)
    for name in "ab":
        rig.run(name, 6, "in_memory")
    prefixes = [rig.start(name, 6) for name in "ab"]
    for prefix in prefixes:
        rig.cache.touches.begin(prefix)
    entries = {name: [rig.entry(name, position) for position in range(6)] for name in "ab"}

    def num_claimed(name: str) -> int:
        are_claimed = ["24h" in entry.claims for entry in entries[name]]
        assert are_claimed == sorted(are_claimed, reverse=True), "the head comes first"
        return sum(are_claimed)

    assert (num_claimed("a"), num_claimed("b")) == (0, 0)
    monkeypatch.setattr("tieredkv.cache.touches.MAX_TOUCHED", 4)
    seen = []
    for _ in range(2):
        rig.cache.touches.go_on()
        seen.append((num_claimed("a"), num_claimed("b")))
    assert seen == [(4, 0), (6, 2)]
    rig.end(prefixes[0])
    rig.cache.release(prefixes[1])
    assert num_claimed("b") == 6, "what a request claims is noted before its blocks are free"
    assert {entry.hits for entry in entries["b"]} == {2}
    rig.check_nothing_is_held()
