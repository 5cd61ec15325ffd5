"""A replay finds what the whole `TieredCache` finds for the same requests."""

from collections import Counter
from pathlib import Path

import pytest

from tests.sizing.traces import random_lines, write
from tests.sizing.whole_cache import WholeCache
from tieredkv.retention import RetentionPolicy
from tieredkv.sizing.tiers import Room, Source, Tiers
from tieredkv.traces import Trace, read_trace
from tieredkv.types import BlockHash, Tier, ignore_progress


def both(trace: Trace, room: Room, idle_s: float) -> tuple[Counter[Source], Counter[Source]]:
    """Return how many blocks a replay found in each tier, and how many the whole cache did."""
    policy = RetentionPolicy(name="any", idle_s=idle_s, absolute_s=1e5, tiers=room.tiers)
    sizes = {"num_distinct": trace.num_distinct, "most_blocks": trace.most_blocks}
    tiers = Tiers(room, policy, **sizes, until=trace.span_s)
    whole = WholeCache(room, policy, enough=sum(sizes.values()))
    ours, theirs = Counter[Source](), Counter[Source]()
    for request in trace.requests:
        now = request.timestamp / 1e3
        hashes = [BlockHash(each) for each in request.hash_ids]  # type: ignore[arg-type]
        ours.update(tiers.serve(hashes, now))
        theirs.update(whole.serve(request.hash_ids, now))
        tiers.check()
    whole.cache.check()
    return ours, theirs


NEAR = 0.02
"""Of the blocks. A whole cache gives a request its room in turns and copies ahead of need, which
makes a difference where a request takes a fifth of a tier, as here.
"""


@pytest.mark.parametrize("idle_s", [60.0, 1e5])
@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("room", "near"),
    [
        (Room(device=60), 0.0),
        (Room(device=2000, host=1000, disk=1000), 0.0),
        (Room(device=150, host=120, reserve=8), NEAR),
        (Room(device=150, host=120, disk=400, reserve=8, most_owed=20), NEAR),
    ],
    ids=["vram", "all-that-is-needed", "vram-and-host", "all-tiers"],
)
def test_as_much_is_found(
    room: Room, near: float, seed: int, idle_s: float, tmp_path: Path
) -> None:
    lines = random_lines(seed, sessions=40, requests=400)
    trace = read_trace(write(tmp_path / "trace.jsonl", lines), ignore_progress)
    ours, theirs = both(trace, room, idle_s)
    most = near * ours.total()
    assert abs(ours[None] - theirs[None]) <= most, (ours, theirs)
    for tier in Tier:
        assert abs(ours[tier] - theirs[tier]) <= 2 * most, (ours, theirs)
