"""The planner: numbers in, a split out."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredkv.cache.plan import SHORT_GAIN, Demand, LinkLoad, LinkState, Planner, Split, outlook
from tieredkv.cache.step_times import PromptTimes, StepTimes
from tieredkv.cache.stretches import Stretches, joined, stretches

SIZE = 16
BLOCK_BYTES = 2 << 20


ANY_LENGTH = 1 << 40

seconds = PromptTimes(StepTimes(2e-3, 2e-5, 6e-10, 0.0, 0.0), ANY_LENGTH)
"""What a GPU takes for the shapes of an 8B model, about."""

slow_seconds = PromptTimes(StepTimes(0.0, 4.7e-5, 0.0, 0.0, 0.012), ANY_LENGTH)
"""What a slower GPU takes, on which a step takes long however short it is."""


def planner(*links: LinkState, busy_s: float = 0.0, least_tokens: int = 128) -> Planner:
    return Planner(links, seconds, SIZE, busy_s, least_tokens)


def on_disk(num_blocks: int, *, first: int = 0, suffix: int = 64) -> Demand:
    """Return a request whose blocks from `first` on are on disk, with some new tokens behind."""
    end = num_blocks * SIZE + suffix
    return Demand(first * SIZE, end, (LinkLoad(0, range(first, num_blocks)),))


def time_of(demand: Demand, split: int, link: LinkState, busy_s: float = 0.0) -> float:
    """Return when the last token is computed if the blocks from `split` on are loaded."""
    (load,) = demand.loads
    last = load.indices[-1] + 1
    if split == last:
        return busy_s + seconds(demand.begin, demand.end)
    load_s = link.busy_s + (last - split) * BLOCK_BYTES / link.bytes_per_s + link.latency_s
    compute_s = busy_s + seconds(demand.begin, split * SIZE)
    return max(load_s, compute_s) + seconds(last * SIZE, demand.end)


def ready_s(split: Split) -> float:
    """Return the seconds until all blocks before the split and behind it are there."""
    return max(split.compute_s, split.load_s)


def test_no_split_that_may_be_chosen_is_better_than_the_chosen_one() -> None:
    rates = 0.001, 0.3, 1.0, 2.7, 7.0, 60.0, 1e6
    for case in itertools.product((1, 2, 8, 100, 513, 2048), rates, (0.0, 0.01, 0.5), (0.0, 0.05)):
        num_blocks, GBps, busy_s, queue_s = case
        link = LinkState(GBps * 1e9, BLOCK_BYTES, queue_s)
        demand = on_disk(num_blocks)._replace(is_begun=True)
        split = planner(link, busy_s=busy_s).split(demand)
        allowed = [0, *range(min(num_blocks, 8), num_blocks + 1)]
        best = min(time_of(demand, each, link, busy_s) for each in allowed)
        assert split.block in allowed, case
        assert time_of(demand, split.block, link, busy_s) == pytest.approx(best), case


def test_a_very_fast_link_loads_everything_and_a_very_slow_one_nothing() -> None:
    assert planner(LinkState(1e12, BLOCK_BYTES)).split(on_disk(2048)).block == 0
    assert planner(LinkState(1e5, BLOCK_BYTES)).split(on_disk(2048)).block == 2048


def test_head_and_tail_arrive_together() -> None:
    split = planner(LinkState(2.7e9, BLOCK_BYTES)).split(on_disk(2048))
    assert 0 < split.block < 2048
    assert split.compute_s == pytest.approx(split.load_s, rel=0.01)
    assert ready_s(split) < 0.6 * seconds(0, 2048 * SIZE)


@pytest.mark.parametrize("num_blocks", [16, 128, 512, 2048])
@pytest.mark.parametrize("GBps", [0.3, 1.0, 2.7, 7.0, 60.0])
def test_a_processor_that_moves_the_blocks_itself_does_not_count_on_doing_both_at_once(
    num_blocks: int, GBps: float
) -> None:
    link, demand = LinkState(GBps * 1e9, BLOCK_BYTES), on_disk(num_blocks)._replace(is_begun=True)
    cpu = Planner([link], seconds, SIZE, least_tokens=128, is_cpu=True)
    split = cpu.split(demand)
    all_s, rest_s = seconds(0, demand.end), seconds(num_blocks * SIZE, demand.end)
    block_s = BLOCK_BYTES / (GBps * 1e9)
    if split.block == num_blocks:
        assert split.done_s == pytest.approx(all_s)
    else:
        both_s = (num_blocks - split.block) * block_s + seconds(0, split.block * SIZE)
        assert split.done_s == pytest.approx(both_s + rest_s)
        assert cpu.busy_s == pytest.approx(split.done_s)
    assert split.done_s <= (1 + 1e-9) * min(all_s, num_blocks * block_s + rest_s)


def test_without_anything_to_load_all_is_computed() -> None:
    split = planner(LinkState(2e9, BLOCK_BYTES)).split(Demand(100, 1000))
    assert split == Split(7, 7, seconds(100, 112), 0.0, seconds(100, 1000))


def test_what_a_stopped_link_was_given_is_computed() -> None:
    load = LinkLoad(0, [], queued=range(2000, 2048))
    demand = Demand(2000 * SIZE, 2049 * SIZE, (load,), is_begun=True)
    assert planner(LinkState(1e9, BLOCK_BYTES, busy_s=10.0)).split(demand).block == 2048
    assert planner(LinkState(1e9, BLOCK_BYTES, busy_s=0.005)).split(demand).block == 2000


def test_what_was_loaded_already_keeps_the_device_busy_no_longer() -> None:
    whole = on_disk(2048, suffix=500)
    half = whole._replace(loads=(LinkLoad(0, range(1024)),), is_begun=True, loaded_to=2048)
    link = LinkState(2.7e9, BLOCK_BYTES)
    for demand in (half, half._replace(loads=(LinkLoad(0, []),), begin=1024 * SIZE)):
        crowd = planner(link)
        split = crowd.split(demand)
        assert crowd.busy_s == split.compute_s + seconds(2048 * SIZE, whole.end)
    assert planner(link).split(half).block < planner(link).split(whole).block


def test_what_vram_has_already_is_not_computed() -> None:
    link, whole = LinkState(2.7e9, BLOCK_BYTES), on_disk(2048, first=1024, suffix=500)
    split = planner(link).split(whole._replace(begin=0, ready=[(0, 1024)]))
    assert split == planner(link).split(whole), "its head is as good as computed"
    split = planner(link).split(on_disk(1024)._replace(end=whole.end, ready=[(1024, 2048)]))
    assert split.done_s == ready_s(split) + seconds(2048 * SIZE, whole.end)
    assert split.compute_s == pytest.approx(split.load_s, rel=0.01)


@pytest.mark.parametrize("GBps", [0.3, 2.7, 60.0])
@pytest.mark.parametrize("num_pages", [0, 100])
def test_what_vram_has_is_computed_again_where_windows_leave_out_no_token(
    GBps: float, num_pages: int
) -> None:
    link, end, head = LinkState(GBps * 1e9, BLOCK_BYTES), 2048, 512
    loads = LinkLoad(0, range(head, end)), LinkLoad(0, [end - 1] * num_pages)
    demand = Demand(0, end * SIZE + 64, loads, is_begun=True, loaded_to=end, head=head)
    split = planner(link).split(demand)

    def time_of(block: int) -> float:
        if block == end:
            return seconds(0, demand.end)
        load_s = (end - block + num_pages) * BLOCK_BYTES / link.bytes_per_s
        computed_s = seconds(0, block * SIZE) if block > head else 0.0
        return max(load_s, computed_s) + seconds(end * SIZE, demand.end)

    best_s = min(time_of(block) for block in range(head, end + 1))
    assert split.done_s == time_of(split.block)
    assert split.done_s == pytest.approx(best_s, rel=0.01)


def test_only_what_lies_between_ready_blocks_is_computed() -> None:
    demand = Demand(0, 100 * SIZE + 1, ready=[(10, 20), (30, 40)])
    stretches = (0, 10 * SIZE), (20 * SIZE, 30 * SIZE), (40 * SIZE, 100 * SIZE + 1)
    split = planner(LinkState(2e9, BLOCK_BYTES)).split(demand)
    assert split.done_s == pytest.approx(sum(seconds(*each) for each in stretches))


def test_the_last_token_is_computed_also_if_all_blocks_are_ready() -> None:
    split = planner(LinkState(2e9, BLOCK_BYTES)).split(Demand(0, 100 * SIZE, ready=[(0, 100)]))
    assert split.done_s == seconds(100 * SIZE - 1, 100 * SIZE)


def test_tokens_behind_blocks_that_are_being_copied_wait_for_them() -> None:
    link, brought = (
        LinkState(5e10, BLOCK_BYTES, busy_s=0.3, is_steady=True),
        LinkLoad(0, [], is_bringing=True),
    )
    demand = Demand(0, 2049 * SIZE, (brought,), ready=[(0, 2048)])
    assert planner(link).split(demand).done_s == 0.3 + seconds(2048 * SIZE, 2049 * SIZE)
    assert planner(link, busy_s=0.5).split(demand).done_s > 0.5


def test_blocks_that_are_under_way_come_later_by_the_latency_of_their_link() -> None:
    link = LinkState(1e9, BLOCK_BYTES, busy_s=0.004, latency_s=0.003)
    queued = LinkLoad(0, [], queued=range(2000, 2048))
    demand = Demand(2000 * SIZE, 2049 * SIZE, (queued,), is_begun=True)
    split = planner(link).split(demand)
    assert split.block == 2000
    assert split.load_s == pytest.approx(0.007)
    brought = Demand(0, 2049 * SIZE, (LinkLoad(0, [], is_bringing=True),), ready=[(0, 2048)])
    split = planner(link._replace(is_steady=True)).split(brought)
    assert split.load_s == pytest.approx(0.007)
    assert split.done_s == pytest.approx(0.007 + seconds(2048 * SIZE, 2049 * SIZE))


def test_the_head_of_what_is_being_copied_is_computed_meanwhile() -> None:
    link = LinkState(5e10, BLOCK_BYTES, busy_s=0.1, is_steady=True)
    left = on_disk(1024, suffix=1024 * SIZE + 64)._replace(is_begun=True, ready=[(1024, 2048)])
    brought = LinkLoad(0, range(1024), is_bringing=True)
    split = planner(link).split(left._replace(loads=(brought,)))
    assert split.compute_s == pytest.approx(split.load_s, rel=0.05)
    assert split.load_s > 0.1


def test_no_step_of_a_few_tokens_is_planned() -> None:
    for GBps in (1.0, 2.0, 2.5, 3.0, 4.0, 10.0, 30.0, 100.0):
        for num_blocks in (10, 50, 100):
            demand = on_disk(num_blocks)._replace(is_begun=True)
            block = planner(LinkState(GBps * 1e9, BLOCK_BYTES)).split(demand).block
            assert block == 0 or block * SIZE >= 128, (GBps, num_blocks)


def test_requests_in_a_row_find_the_device_and_the_link_busy() -> None:
    crowd = planner(LinkState(2.7e9, BLOCK_BYTES))
    splits = [crowd.split(on_disk(2560, suffix=500)) for _ in range(8)]
    for split in splits:
        assert split.compute_s == pytest.approx(split.load_s, rel=0.1)
    gaps = [ready_s(later) - ready_s(before) for before, later in itertools.pairwise(splits)]
    alone = planner(LinkState(2.7e9, BLOCK_BYTES)).split(on_disk(2560, suffix=500))
    assert max(gaps) < 1.1 * ready_s(alone), "the crowd gets no less than each would alone"
    assert sum(gaps) < 0.6 * 7 * seconds(0, 2560 * SIZE)


def test_a_request_behind_a_long_prompt_is_loaded_meanwhile() -> None:
    crowd = planner(LinkState(2.7e9, BLOCK_BYTES))
    crowd.split(Demand(0, 65_536))
    assert crowd.split(on_disk(1024)).block == 0


def test_two_links_load_what_each_has() -> None:
    loads = LinkLoad(0, range(500)), LinkLoad(1, range(500, 2048))
    demand = Demand(0, 2049 * SIZE, loads)
    links = LinkState(50e9, BLOCK_BYTES), LinkState(2.7e9, BLOCK_BYTES)
    split = Planner(links, seconds, SIZE, least_tokens=128).split(demand)
    assert split.block > 500
    assert split.compute_s == pytest.approx(split.load_s, rel=0.01)


def head_in_ram(num_host: int, num_disk: int) -> Demand:
    """Return a request of which host memory has the head, and the disk what follows it."""
    loads = LinkLoad(0, range(num_host)), LinkLoad(1, range(num_host, num_host + num_disk))
    return Demand(0, (num_host + num_disk) * SIZE + 64, loads)


@pytest.mark.parametrize("busy_s", [0.0, 0.2])
def test_bytes_from_disk_are_no_faster_than_the_link_behind_it(busy_s: float) -> None:
    host, disk = (
        LinkState(1e9, BLOCK_BYTES, busy_s, is_steady=True),
        LinkState(8e9, BLOCK_BYTES, through=0),
    )
    demand = on_disk(1024)._replace(loads=[LinkLoad(1, range(1024))])
    split = planner(host, disk).split(demand)
    alone = planner(LinkState(1e9, BLOCK_BYTES, busy_s)).split(on_disk(1024))
    assert 0 < split.block < 1024
    assert split.block == alone.block
    assert split.done_s == pytest.approx(alone.done_s)


def test_both_tiers_share_the_link_to_vram_and_so_do_requests_in_a_row() -> None:
    host, disk = LinkState(2e9, BLOCK_BYTES, is_steady=True), LinkState(8e9, BLOCK_BYTES, through=0)
    both = [LinkLoad(0, range(512)), LinkLoad(1, range(512, 1024))]
    demand = on_disk(1024)._replace(loads=both)
    asked = planner(host, disk)
    first, second = asked.split(demand), asked.split(demand)
    loaded_s = 0.0
    for split in (first, second):
        num_loaded = 512 - min(split.steady_block, 512) + 1024 - split.block
        assert 0 < num_loaded < 1024
        loaded_s += num_loaded * BLOCK_BYTES / 2e9
        assert split.load_s == pytest.approx(loaded_s, rel=0.02)


def test_blocks_that_the_disk_was_asked_for_pass_through_the_link_too() -> None:
    host, disk = (
        LinkState(1e9, BLOCK_BYTES, is_steady=True),
        LinkState(8e9, BLOCK_BYTES, busy_s=0.01, through=0),
    )
    load = LinkLoad(1, range(900), queued=range(900, 1024))
    demand = on_disk(1024)._replace(loads=[load], is_begun=True)
    split = planner(host, disk).split(demand)
    assert split.load_s == pytest.approx((1024 - split.block) * BLOCK_BYTES / 1e9, rel=0.02)


def least_of_two_splits(
    num_host: int, num_disk: int, host: LinkState, disk: LinkState, *, busy_s: float, least: int
) -> float:
    """Return the best time of `head_in_ram` if its two parts are each divided anywhere."""
    last = num_host + num_disk
    block_s, end = BLOCK_BYTES / disk.bytes_per_s, last * SIZE + 64
    rest_s, best_s = seconds(last * SIZE, end), math.inf
    for head in [0, *range(least, num_host + 1)][:: max(1, num_host // 25)]:
        before_s = busy_s + seconds(0, head * SIZE)
        if head < num_host:
            before_s = max(before_s, (num_host - head) * BLOCK_BYTES / host.bytes_per_s)
        begin = max(head, num_host) * SIZE
        best_s = min(best_s, before_s + seconds(begin, end))
        for block in (num_host, *range(num_host + least, last)):
            there_s = max(before_s + seconds(begin, block * SIZE), (last - block) * block_s)
            best_s = min(best_s, there_s + rest_s)
    return best_s


@pytest.mark.parametrize("read_GBps", [0.2, 2.0])
@pytest.mark.parametrize("busy_s", [0.0, 0.3])
def test_the_head_in_ram_is_divided_on_its_own_and_no_two_splits_are_better(
    read_GBps: float, busy_s: float
) -> None:
    for case in itertools.product((1, 20, 300, 1500), (1, 40, 700), (0.5, 5.0, 50.0)):
        num_host, num_disk, up_GBps = case
        demand = head_in_ram(num_host, num_disk)._replace(is_begun=True)
        links = (
            LinkState(up_GBps * 1e9, BLOCK_BYTES, is_steady=True),
            LinkState(read_GBps * 1e9, BLOCK_BYTES),
        )
        plan = Planner(links, seconds, SIZE, busy_s, SIZE * 8).split(demand)
        best_s = least_of_two_splits(num_host, num_disk, *links, busy_s=busy_s, least=8)
        assert plan.done_s <= 1.05 * best_s + 0.003, (case, "a step has its own cost")
        assert plan.steady_block <= plan.block, case
        if up_GBps == 50.0 and num_host >= 300:
            assert plan.steady_block <= num_host // 4, (case, "RAM is much faster than computing")


def test_what_ram_has_is_loaded_also_where_the_disk_is_not_worth_it() -> None:
    links = LinkState(50e9, BLOCK_BYTES, is_steady=True), LinkState(0.05e9, BLOCK_BYTES)
    split = Planner(links, seconds, SIZE).split(head_in_ram(600, 40))
    assert split.block == 640, "nothing is read"
    assert split.steady_block < 100


@pytest.mark.parametrize(
    ("indices", "found"),
    [([], []), ([3], [(3, 4)]), ([0, 1, 2, 5, 7, 8], [(0, 3), (5, 6), (7, 9)])],
)
def test_indices_are_told_as_stretches(indices: list[int], found: list[tuple[int, int]]) -> None:
    assert [*stretches(indices)] == found


def test_stretches_that_touch_or_overlap_are_joined() -> None:
    parts = Stretches.of([(0, 3), (7, 9)]), Stretches.of([(2, 5), (20, 21)]), Stretches.of([(5, 6)])
    assert [*joined(*parts, Stretches.of(()))] == [(0, 6), (7, 9), (20, 21)]
    assert [*joined(Stretches.of(()))] == []


@given(
    begin=st.integers(0, 40_000),
    indices=st.sets(st.integers(0, 3000), max_size=300),
    queued=st.sets(st.integers(0, 3000), max_size=50),
    suffix=st.integers(1, 5000),
    bytes_per_s=st.floats(1.0, 1e15),
    link_s=st.floats(0, 1e6),
    busy_s=st.floats(0, 1e3),
    least_tokens=st.integers(1, 10_000),
    is_begun=st.booleans(),
    edges=st.sets(st.integers(0, 3500), max_size=8),
)
def test_any_numbers_give_a_split_within_the_request(
    begin: int,
    indices: set[int],
    queued: set[int],
    suffix: int,
    bytes_per_s: float,
    link_s: float,
    busy_s: float,
    least_tokens: int,
    is_begun: bool,
    edges: set[int],
) -> None:
    first, at = -(-begin // SIZE), sorted(edges)
    load = LinkLoad(0, sorted(indices - queued), sorted(queued))
    end = max(begin, load.end * SIZE) + suffix
    ready = list(zip(at[::2], at[1::2], strict=False))
    demand = Demand(begin, end, (load,), is_begun, ready=ready)
    split = planner(
        LinkState(bytes_per_s, BLOCK_BYTES, link_s), busy_s=busy_s, least_tokens=least_tokens
    ).split(demand)
    assert first <= split.block <= max(first, load.end, *(end for _, end in ready))
    assert math.isfinite(ready_s(split)) and ready_s(split) >= 0


@pytest.mark.parametrize("GBps", [0.001, 0.5, 2.7, 60.0])
def test_the_outlook_of_a_request_is_the_plan_beside_computing_all_and_loading_all(
    GBps: float,
) -> None:
    link, demand = LinkState(GBps * 1e9, BLOCK_BYTES, latency_s=0.003), on_disk(512)
    split, compute_s, load_s = outlook(planner(link), 512 * SIZE, demand.end)
    assert split == planner(link).split(demand)
    assert split.done_s == pytest.approx(time_of(demand, split.block, link))
    assert compute_s == pytest.approx(time_of(demand, 512, link))
    assert load_s == pytest.approx(time_of(demand, 0, link))
    assert split.done_s <= min(compute_s, load_s)


def test_the_outlook_leaves_out_what_is_there_already() -> None:
    link = LinkState(2e9, BLOCK_BYTES)
    whole = outlook(planner(link), 512 * SIZE, 512 * SIZE + 64)
    rest = outlook(planner(link), 512 * SIZE, 512 * SIZE + 64, begin=256 * SIZE)
    compute = planner(link).compute
    num_tokens = 512 * SIZE + 64
    assert rest.compute_s == pytest.approx(compute(256 * SIZE, num_tokens))
    moved_s = 256 * BLOCK_BYTES / 2e9
    assert whole.load_s - rest.load_s == pytest.approx(moved_s)
    assert rest.split.block >= 256


def test_what_is_computed_in_any_case_is_no_reason_to_compute_the_prefix_too() -> None:
    demand = on_disk(1024)._replace(end=8 * 1024 * SIZE)
    for busy_s in (0.0, 100.0):
        assert planner(LinkState(50e9, BLOCK_BYTES), busy_s=busy_s).split(demand).block < 256


def test_a_steady_link_is_used_whatever_it_saves() -> None:
    demand = on_disk(4, suffix=512)
    assert planner(LinkState(50e9, BLOCK_BYTES)).split(demand).block == 4
    assert planner(LinkState(50e9, BLOCK_BYTES, is_steady=True)).split(demand).block == 0


def test_a_short_prefix_behind_slow_copies_is_computed() -> None:
    """It saves less than a step, but takes no step of its own."""
    for GBps, is_computed in ((5.0, True), (50.0, False)):
        host = LinkState(GBps * 1e9, BLOCK_BYTES, is_steady=True)
        split = Planner([host], slow_seconds, SIZE).split(on_disk(16, suffix=16))
        assert (split.block == 16) == is_computed


@pytest.mark.parametrize("num_blocks", [16, 128, 512, 2048, 8000])
@pytest.mark.parametrize("GBps", [1.0, 5.0, 20.0, 53.0])
def test_what_a_steady_link_has_is_divided_only_if_that_saves_more_than_a_step(
    num_blocks: int, GBps: float
) -> None:
    host, disk = LinkState(GBps * 1e9, BLOCK_BYTES, is_steady=True), LinkState(2e9, BLOCK_BYTES)
    demand = on_disk(num_blocks)
    none_on_disk = demand._replace(loads=(*demand.loads, LinkLoad(1, [])))
    split = planner(host, disk).split(none_on_disk)
    load_s = time_of(demand, 0, host)
    least_s = min(time_of(demand, each, host) for each in range(8, num_blocks + 1))
    all_s, step_s = seconds(0, demand.end), seconds(demand.end - 1, demand.end)
    is_worth_it = load_s - least_s > min(step_s, SHORT_GAIN * all_s)
    assert split.done_s == pytest.approx(least_s if is_worth_it else min(load_s, all_s))
    assert is_worth_it or split.block in (0, num_blocks)
    if GBps == 53.0:
        assert (split.block > 0) == (num_blocks >= 2048)


@pytest.mark.parametrize("slower", [1.0, 5.0])
def test_loading_is_begun_only_if_it_gains_enough(slower: float) -> None:
    times = StepTimes(*(slower * each for each in seconds.times))
    step_seconds = PromptTimes(times, ANY_LENGTH)
    for case in itertools.product((16, 32, 64, 128, 256, 1024), (0.5, 1.0, 2.0, 4.0, 8.0)):
        num_blocks, GBps = case
        demand, link = on_disk(num_blocks), LinkState(GBps * 1e9, BLOCK_BYTES)
        split, begun = (
            Planner([link], step_seconds, SIZE, least_tokens=128).split(each)
            for each in (demand, demand._replace(is_begun=True))
        )
        all_s, step_s = step_seconds(0, demand.end), step_seconds(demand.end - 1, demand.end)
        gain_s = all_s - begun.done_s
        is_worth_it = gain_s > min(step_s, SHORT_GAIN * all_s)
        assert split == begun if is_worth_it else split.block == num_blocks, case


def test_a_short_prefix_on_a_fast_disk_is_loaded() -> None:
    """It saves less than the step that late blocks would cost, but a fifth of the time."""
    demand = on_disk(32, suffix=16)
    asked = Planner([LinkState(7e9, BLOCK_BYTES)], slow_seconds, SIZE)
    all_s = slow_seconds(0, demand.end)
    split = asked.split(demand)
    assert 0.12 * all_s < all_s - split.done_s < slow_seconds(0, 1)
    assert split.block == 0
