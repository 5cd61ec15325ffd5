"""A replay finds what the whole `TieredCache` finds for the same requests."""

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.levels import few
from tests.sizing.traces import random_lines, write
from tests.sizing.whole_cache import WholeCache
from tieredkv.retention import RetentionPolicies, RetentionPolicy
from tieredkv.sizing.disk import SimulatedClock, SimulatedDisk
from tieredkv.sizing.tiers import Capacity, SimulatedTiers, Source
from tieredkv.traces import Trace, read_trace
from tieredkv.types import BlockHash, Tier, ignore_progress


def policy(name: str, capacity: Capacity, idle_s: float, *tiers: Tier) -> RetentionPolicy:
    """Return a policy for those of the tiers that there are."""
    sizes = {Tier.DEVICE: capacity.device, Tier.HOST: capacity.host, Tier.DISK: capacity.disk}
    there = frozenset(tier for tier in tiers if sizes[tier])
    return RetentionPolicy(name=name, idle_s=idle_s, absolute_s=1e5, tiers=there)


def both(
    trace: Trace, capacity: Capacity, some: list[RetentionPolicy]
) -> tuple[Counter[Source], Counter[Source]]:
    """Return how many blocks a replay found in each tier, and how many the whole cache did.

    Each request has one of the policies, by chance.
    """
    generator, policies = random.Random(1), RetentionPolicies(some)
    sizes = {"num_distinct": trace.num_distinct, "most_blocks": trace.most_blocks}
    clock = SimulatedClock()
    disk = SimulatedDisk(capacity.disk, clock)
    tiers = SimulatedTiers(
        capacity, policies, disk if capacity.disk else None, clock, **sizes, until=trace.span_s
    )
    whole = WholeCache(capacity, policies, enough=sum(sizes.values()))
    ours, theirs = Counter[Source](), Counter[Source]()
    for request in trace.requests:
        now = request.timestamp / 1e3
        hashes = [BlockHash(each) for each in request.hash_ids]  # type: ignore[arg-type]
        claims = frozenset([generator.choice(some).name])
        ours.update(tiers.serve(hashes, now, claims))
        theirs.update(whole.serve(request.hash_ids, now, claims))
        tiers.check()
        disk.check()
    whole.cache.check()
    return ours, theirs


NEAR = 0.02
"""Of the blocks. A whole cache gives a request its room in turns and copies ahead of need, which
makes a difference where a request takes a fifth of a tier, as here.
"""


SEEDS = pytest.mark.parametrize("seed", few(range(3)))


IN_VRAM = Capacity(device=60), 0.0
ALL_THAT_IS_NEEDED = Capacity(device=2000, host=1000, disk=1000), 0.0
IN_VRAM_AND_HOST = Capacity(device=150, host=120, reserve=8), NEAR
IN_ALL_TIERS = Capacity(device=150, host=120, disk=400, reserve=8, most_owed=20), NEAR


@SEEDS
@pytest.mark.parametrize(
    ("capacity", "near", "idle_s"),
    few(
        [
            *((*each, 60.0) for each in (IN_VRAM, ALL_THAT_IS_NEEDED, IN_ALL_TIERS)),
            *((*each, 1e5) for each in (IN_VRAM_AND_HOST, IN_ALL_TIERS)),
            *((*each, 1e5) for each in (IN_VRAM, ALL_THAT_IS_NEEDED)),
            (*IN_VRAM_AND_HOST, 60.0),
        ],
        5,
    ),
)
def test_as_much_is_found(
    capacity: Capacity, near: float, seed: int, idle_s: float, tmp_path: Path
) -> None:
    lines = random_lines(seed, sessions=40, requests=400)
    trace = read_trace(write(tmp_path / "trace.jsonl", lines), ignore_progress)
    ours, theirs = both(trace, capacity, [policy("any", capacity, idle_s, *Tier)])
    check_near(ours, theirs, near)


@SEEDS
@pytest.mark.parametrize(
    ("capacity", "near"),
    few([IN_ALL_TIERS, ALL_THAT_IS_NEEDED]),
    ids=["all-tiers", "all-that-is-needed"],
)
@pytest.mark.parametrize("idle_s", [(60.0, 1e5), (1e5, 60.0)], ids=["ram-shorter", "disk-shorter"])
def test_as_much_is_found_where_requests_have_different_policies(
    capacity: Capacity, near: float, seed: int, idle_s: tuple[float, float], tmp_path: Path
) -> None:
    lines = random_lines(seed, sessions=40, requests=400)
    trace = read_trace(write(tmp_path / "trace.jsonl", lines), ignore_progress)
    some = [
        policy("in_memory", capacity, idle_s[0], Tier.DEVICE, Tier.HOST),
        policy("on_disk", capacity, idle_s[1], *Tier),
    ]
    check_near(*both(trace, capacity, some), near)


def check_near(ours: Counter[Source], theirs: Counter[Source], near: float) -> None:
    """Check that a replay has found what the whole cache has, but for a share of the blocks."""
    most = near * ours.total()
    assert abs(ours[None] - theirs[None]) <= most, (ours, theirs)
    for tier in Tier:
        assert abs(ours[tier] - theirs[tier]) <= 2 * most, (ours, theirs)
