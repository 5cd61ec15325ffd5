"""The report on a prompt counts tokens as a request's receipt does, and asks the planner."""

from collections.abc import Sequence

import msgspec

from tieredkv.cache.plan import LinkState, Planner, outlook
from tieredkv.cache.prompt_report import PromptReport, Source, report
from tieredkv.cache.step_times import PromptTimes, StepTimes
from tieredkv.pieces import Pieces, whole
from tieredkv.types import Tier

SIZE, BYTES = 16, 1000
DEVICE, HOST, DISK = Tier
LINKS = (LinkState(1e6, BYTES, is_steady=True), LinkState(1e5, BYTES, latency_s=0.01, through=0))


def planner(num_links: int = 2) -> Planner:
    """Return a planner for a device that computes 1000 tokens a second."""
    times = PromptTimes(StepTimes(0.0, 1e-3, 0.0, 0.0, 0.0), chunk=4096)
    return Planner(LINKS[:num_links], times, block_size=SIZE)


def missed(index: int) -> Pieces[str]:
    yield
    return f"missed {index}"


def told(
    num_tokens: int, sources: Sequence[Source], ends: Sequence[int] | None = None
) -> PromptReport:
    return whole(report(num_tokens, SIZE, sources, missed, planner, ends))


def test_each_block_counts_in_one_tier_and_the_first_hole_is_where_it_diverges() -> None:
    found = told(100, [DEVICE, DEVICE, HOST, None, DISK, None])
    assert found.by_tier == {DEVICE: 32, HOST: 16, DISK: 16}
    assert (found.diverges_at, found.reason) == (48, "missed 3")


def test_the_last_token_of_a_wholly_cached_prompt_is_computed() -> None:
    assert told(32, [DEVICE, DISK]).by_tier == {DEVICE: 16, HOST: 0, DISK: 15}
    assert told(33, [DEVICE, DISK]).by_tier == {DEVICE: 16, HOST: 0, DISK: 16}
    assert told(33, [DEVICE, DISK]).diverges_at is None


def test_a_hit_ends_where_the_request_allows_it() -> None:
    found = told(100, [DEVICE, HOST, HOST, None, DISK, DISK], ends=[1, 2, 5])
    assert found.by_tier == {DEVICE: 16, HOST: 16, DISK: 0}
    assert (found.diverges_at, found.reason) == (32, "behind_lookback")
    found = told(100, [DEVICE, HOST, None, None, DISK, DISK], ends=[2, 5])
    assert (found.diverges_at, found.reason) == (32, "missed 2")


def test_the_predictions_are_the_planners() -> None:
    sources = [DISK] * 60
    times = told(1000, sources).predicted_ttft_ms
    split, compute_s, _ = outlook(planner(1), 960, 1000)
    assert times["compute"] == round(1000 * compute_s, 3) == 1000.0
    assert times["host"] == round(1000 * split.done_s, 3)
    assert times["device"] == 40.0
    assert times["disk"] == times["planned"] and times["disk"] is not None
    assert 40.0 < times["disk"] < 1000.0


def test_pages_that_a_hit_needs_are_counted_and_loaded_before_its_blocks() -> None:
    asked = list[int]()

    def pages_at(end: int) -> Sequence[Source]:
        asked.append(end)
        return [HOST] * 3 + [DISK] * 2

    sources = [DISK] * 60
    found = whole(report(1000, SIZE, sources, missed, planner, [20, 60], "no_anchor", pages_at))
    assert asked == [60]
    assert found.anchor_pages == {DEVICE: 0, HOST: 3, DISK: 2}
    plain, times = told(1000, sources), found.predicted_ttft_ms
    assert plain.anchor_pages is msgspec.UNSET
    for name in ("compute", "device"):
        assert times[name] == plain.predicted_ttft_ms[name]
    for name, num_pages, bytes_per_s in (("host", 5, 1e6), ("disk", 5, 1e5)):
        later = (times[name] or 0.0) - (plain.predicted_ttft_ms[name] or 0.0)
        assert 0.0 < later <= 1e3 * num_pages * BYTES / bytes_per_s + 1e-6
    nothing = whole(report(1000, SIZE, sources, missed, planner, [], "no_anchor", pages_at))
    assert nothing.anchor_pages == dict.fromkeys(Tier, 0)


def test_what_is_not_known_is_not_predicted() -> None:
    def report_with(make_planner: object) -> dict[str, float | None]:
        made = whole(report(1000, SIZE, [DISK] * 60, missed, make_planner))  # type: ignore[arg-type]
        return made.predicted_ttft_ms

    assert set(report_with(lambda: None).values()) == {None}
    times = report_with(lambda: planner(1))
    assert (times["disk"], times["planned"]) == (None, None)
    assert times["host"] is not None
