"""The scripts and arrivals of the crowd benches, and the figures that they report."""

import itertools
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from tests.golden import refused
from tieredkv.bench import crowd, crowd_figures, returns, sessions
from tieredkv.bench.crowd import Answer, Ask, Crowd, Outcome, WatchedReads
from tieredkv.bench.returns import Capacity, capacity, compared
from tieredkv.bench.sessions import Shape, replay, sessions_of, write_script
from tieredkv.errors import ConfigError
from tieredkv.traces import Request, Trace
from tieredkv.types import KVSpec, LayerKV, Tier, ignore_progress

SHAPE = Shape(turns=15, scale=10, trace=None)
RETURNS = returns.Shape(
    sessions=8, shortest=200, longest=600, new_tokens=5, answers=2000, answer_tokens=3, seed=7
)
SPEC = KVSpec(layers=[LayerKV(1, 8)], dtype="float32", block_size=16)


def test_a_session_is_the_same_in_each_process_and_differs_from_the_others() -> None:
    script = write_script(3, 1, SHAPE, 250)
    assert script == write_script(3, 1, SHAPE, 250)
    first = script[0].prompt
    assert first != write_script(3, 2, SHAPE, 250)[0].prompt
    assert first != write_script(4, 1, SHAPE, 250)[0].prompt


def test_the_lengths_of_sessions_are_those_that_are_promised() -> None:
    scripts = [write_script(0, session, SHAPE, 2) for session in range(400)]
    firsts = [len(script[0].prompt) for script in scripts]
    assert 800 <= min(firsts) <= max(firsts) <= 6000
    assert statistics.median(firsts) == pytest.approx(1800, rel=0.12)
    assert max(len(turn.prompt) for script in scripts for turn in script) < 7200
    assert {turn.answer_tokens for script in scripts for turn in script} == {12}
    thinks = [turn.think_s for script in scripts for turn in script[1:]]
    assert statistics.mean(thinks) == pytest.approx(1.0, rel=0.05)
    assert 5.9 < max(thinks) <= 6
    assert {script[0].think_s for script in scripts} == {0.0}


def test_most_turns_only_add_and_one_in_eight_replaces_the_last_third() -> None:
    added, kept_shares = list[int](), list[float]()
    num_turns = 0
    for session in range(200):
        script = write_script(0, session, SHAPE, 1 << 30)
        for before, turn in itertools.pairwise(script):
            num_turns += 1
            if turn.prompt[: len(before.prompt)] == before.prompt:
                added.append(len(turn.prompt) - len(before.prompt) - before.answer_tokens)
            elif len(turn.prompt) > len(before.prompt):
                same = map(int.__eq__, turn.prompt, before.prompt)
                kept = next(index for index, is_same in enumerate(same) if not is_same)
                kept_shares.append(kept / (len(before.prompt) + before.answer_tokens))
    assert statistics.median(added) == pytest.approx(60, rel=0.1)
    assert sorted(added)[int(0.9 * len(added))] == pytest.approx(600, rel=0.25)
    assert len(kept_shares) / num_turns == pytest.approx(1 / 8, rel=0.2)
    assert all(share == pytest.approx(2 / 3, abs=0.01) for share in kept_shares)


def test_sessions_can_be_longer_add_less_and_replace_nothing() -> None:
    shape = SHAPE._replace(turns=4, first_tokens=30_000, added_p90_tokens=3_000, replaced_share=0)
    scripts = [write_script(0, session, shape, 1 << 30) for session in range(100)]
    firsts = [len(script[0].prompt) for script in scripts]
    assert statistics.median(firsts) == pytest.approx(3000, rel=0.12)
    pairs = [pair for script in scripts for pair in itertools.pairwise(script)]
    growing = [(one.prompt, other.prompt) for one, other in pairs if len(one.prompt) < 4000]
    grown = [(one, other) for one, other in growing if other[: len(one)] == one]
    assert len(grown) >= 0.98 * len(growing), "few turns add more than there is room for"
    added = sorted(len(other) - len(one) - 12 for one, other in grown)
    assert added[int(0.9 * len(added))] == pytest.approx(300, rel=0.2)


def test_sessions_can_begin_with_the_same_tokens() -> None:
    shape = SHAPE._replace(turns=3, shared_tokens=12_000)
    scripts = [write_script(0, session, shape, 1 << 30) for session in range(50)]
    firsts = [script[0].prompt for script in scripts]
    assert {tuple(prompt[:1200]) for prompt in firsts} == {tuple(firsts[0][:1200])}
    assert len({prompt[1200] for prompt in firsts}) == len(firsts), "each goes on in its own way"
    others = [write_script(0, session, SHAPE, 1 << 30)[0].prompt for session in range(50)]
    assert [len(one) for one in firsts] == [max(len(other), 1201) for other in others]
    assert any(len(other) < 1200 for other in others)
    assert write_script(1, 0, shape, 1 << 30)[0].prompt[:1200] != firsts[0][:1200]


@pytest.mark.parametrize("until", ["first", "last"])
def test_a_run_ends_with_the_first_or_the_last_session(until: str) -> None:
    shape = SHAPE._replace(turns=3)
    scripts = [write_script(0, session, shape, 250) for session in range(3)]
    served: list[tuple[int, int]] = []

    def serve_in_turn(
        asks: list[Ask], follow: Callable[[Any], Ask | None], is_over: Callable[[Any], bool]
    ) -> Outcome:
        for ask in asks:
            served.append((ask.client, ask.turn))
            answer = SimpleNamespace(client=ask.client, turn=ask.turn, ended_s=0.0)
            if (after := follow(answer)) is not None:
                asks.append(after)
            if is_over(answer):
                break
        return cast(Outcome, None)

    it = cast(Crowd, SimpleNamespace(serve=serve_in_turn))
    sessions.serve(it, scripts, ignore_progress, "", until)
    every = [(client, turn) for turn in range(3) for client in range(3)]
    assert served == (every if until == "last" else every[:7])


def test_returns_come_in_turn_at_the_rate_that_was_asked_for() -> None:
    arrivals = RETURNS.arrivals(4.0)
    assert arrivals == RETURNS.arrivals(4.0) == sorted(arrivals)
    gaps = [after - before for before, after in itertools.pairwise(arrivals)]
    assert statistics.mean(gaps) == pytest.approx(1 / 4, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 4, rel=0.1), "as of a Poisson process"
    assert [2 * at for at in arrivals] == pytest.approx(RETURNS.arrivals(2.0))
    assert sorted(RETURNS.lengths)[:: len(RETURNS.lengths) - 1] == [200, 600]
    prefixes = [[session] * length for session, length in enumerate(RETURNS.lengths)]
    asks = RETURNS.returns(4.0, prefixes, 250)
    assert [ask.client for ask in asks[:9]] == [*range(8), 0]
    assert [len(ask.prompt) for ask in asks[:8]] == [length + 5 for length in RETURNS.lengths]
    assert list(asks[8].prompt[:-5]) == prefixes[0]
    assert asks[0].prompt[-5:] != asks[8].prompt[-5:]
    assert asks == RETURNS.returns(4.0, prefixes, 250)
    assert asks[0].prompt != RETURNS.returns(2.0, prefixes, 250)[0].prompt


def request(
    at_s: float, ids: list[int], tokens: int = 0, answer: int = 500, **more: Any
) -> Request:
    return Request(
        timestamp=1000 * at_s,
        input_length=tokens or 512 * len(ids),
        output_length=answer,
        hash_ids=ids,
        **more,
    )


def test_a_traces_requests_are_told_apart_by_what_they_repeat() -> None:
    long = [0, *range(10, 14)]
    trace = [
        request(0, long),
        request(1, [0, 20, 21, 22]),  # shares only the system prompt
        request(20, [*long, 14]),
        request(21, [0, 20, 21, 22, 23], 2100, 7),
        request(22, [0, *range(10, 14), 15]),  # another branch of the first session
    ]
    found = list(sessions_of(Trace("", trace), 2, 1 << 20))
    assert found == [[trace[0], trace[2]], [trace[1], trace[3]]]
    assert list(sessions_of(Trace("", trace), 3, 1 << 20)) == [[trace[0], trace[2], trace[4]]]
    assert list(sessions_of(Trace("", trace), 2, 2500)) == [[trace[1], trace[3]]], "too long"


def test_a_trace_may_name_its_sessions() -> None:
    named = [request(at, [0, at], session=at % 2) for at in range(1, 5)]
    found = list(sessions_of(Trace("", [*named, request(5, [0, 4])]), 2, 1 << 20))
    assert found == [[named[0], named[2]], [named[1], named[3]]]


def test_a_replayed_session_repeats_tokens_as_the_trace_repeats_ids() -> None:
    recorded = [request(0, [0, 1, 2]), request(20, [0, 1, 3, 4], 1600, 70), request(999, [0, 5])]
    script = replay(recorded, 0, Shape(3, 4, None), 1000)
    assert [turn.think_s for turn in script] == [0.0, 2.0, 6.0]
    assert [len(turn.prompt) for turn in script] == [384, 400, 256]
    assert [turn.answer_tokens for turn in script] == [30, 17, 30]
    first, second, third = (turn.prompt for turn in script)
    assert first[:256] == second[:256]
    assert first[:128] == third[:128]
    assert first[256:] != second[256:384]
    assert script == replay(recorded, 0, Shape(3, 4, None), 1000)
    assert replay(recorded, 1, Shape(3, 4, None), 1000)[0].prompt != first


def test_a_session_that_a_server_recorded_has_prompts_of_the_recorded_lengths() -> None:
    first = request(0, [1, 2], 40, block_tokens=16)
    script = replay([first, request(9, [1, 2, 3], 50, block_tokens=16)], 0, Shape(2, 1, None), 1000)
    assert [len(turn.prompt) for turn in script] == [40, 50]
    assert script[0].prompt[:32] == script[1].prompt[:32]
    assert script[0].prompt[32:40] != script[1].prompt[32:40]


def test_a_trace_with_too_few_sessions_is_refused(tmp_path: Path) -> None:
    lines = [msgspec.json.encode(request(0, [each])) + b"\n" for each in (1, 2)]
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(lines))
    shape = Shape(turns=1, scale=1, trace=path)
    assert len(sessions.recorded_sessions(2, 0, shape, 512)) == 2
    with refused(ConfigError):
        sessions.recorded_sessions(2, 1, shape, 512)


def rows(arm: str, *points: tuple[float, float, float]) -> list[dict[str, Any]]:
    return [
        {"arm": arm, "rate": rate, "ttft_ms": {"p50": p50_ms, "p90": p90_ms}}
        for rate, p50_ms, p90_ms in points
    ]


def test_the_capacity_of_an_arm_is_interpolated_and_says_how_it_is_known() -> None:
    held, failed = (1.0, 100.0, 2000.0), (2.0, 900.0, 6000.0)
    assert capacity(rows("a", held, failed), 4000) == (1.5, "interpolated")
    assert capacity(rows("a", held), 4000) == (1.0, "at least")
    assert capacity(rows("a", failed), 4000) == (None, "below the lowest rate")


def test_planned_is_compared_with_the_better_of_the_other_arms() -> None:
    none = rows("no_disk", (1.0, 100.0, 2000.0), (2.0, 900.0, 6000.0))
    load = rows("load", (1.0, 300.0, 5000.0))
    planned = rows("planned", (1.0, 80.0, 500.0), (2.0, 160.0, 3000.0), (4.0, 900.0, 5000.0))
    known = {rows[0]["arm"]: capacity(rows, 4000) for rows in (none, load, planned)}
    told = compared([*none, *load, *planned], known)
    assert told["capacity"] == {"no_disk": 1.5, "load": None, "planned": pytest.approx(3.0)}
    assert told["capacity_is"]["planned"] == "interpolated"
    assert told["better_arm"] == "no_disk", "`load` held at no rate"
    assert told["capacity_over_better"] == pytest.approx(3.0 / 1.5)
    assert told["p50_over_better"] == pytest.approx((80 + 0.05 * 80) / (100 + 0.05 * 800))
    known["no_disk"] = Capacity(2.0, "at least")
    assert compared([*none, *load, *planned], known)["capacity_over_better"] is None
    alone = compared(none, {"no_disk": known["no_disk"]})
    assert alone == {"capacity": {"no_disk": 2.0}, "capacity_is": {"no_disk": "at least"}}


def answer(turn: int, by_tier: dict[Tier, int], ttft_ms: float, *ids: int) -> Answer:
    return Answer(0, turn, 1.0, ttft_ms, [2.0] * (len(ids) - 1), [*ids], 100, by_tier)


def test_a_hit_found_something_and_has_few_tokens_to_compute() -> None:
    found = {Tier.DEVICE: 0, Tier.HOST: 1024, Tier.DISK: 2048}
    few = answer(0, found, 10.0, 1)._replace(prompt_tokens=3072 + crowd.HIT_TOKENS - 1)
    many = few._replace(prompt_tokens=few.prompt_tokens + 1, ttft_ms=500.0)
    cold = answer(0, dict.fromkeys(Tier, 0), 400.0, 1)
    assert [each.is_hit for each in (few, many, cold)] == [True, False, False]
    answers = [
        few._replace(prediction_error=0.2, forecast_kind="restored"),
        many,
        cold._replace(prediction_error=0.1, forecast_kind="issued"),
    ]
    told = crowd_figures.figures([Outcome(answers, 1.0, {}, 0.0)], SPEC, None)
    assert (told["num_hits"], told["hit_ttft_ms"]) == (1, {"p50": 10.0, "p90": 10.0})
    assert told["prediction_error"] == pytest.approx(0.15)
    assert told["prediction_errors"] == {
        "restored": {"answers": 1, "p50": 0.2},
        "issued": {"answers": 1, "p50": 0.1},
    }
    none = crowd_figures.figures([Outcome([cold], 1.0, {}, 0.0)], SPEC, None)
    assert none["hit_ttft_ms"]["p50"] is none["prediction_error"] is None


def test_the_figures_of_several_runs_are_pooled() -> None:
    some = {Tier.DEVICE: 16, Tier.HOST: 0, Tier.DISK: 64}
    counts = {"move_seconds.disk,host.0": 5, "overtaken_blocks": 1, "used_reads": 4}
    counts["demoted_disk_blocks"] = 3
    outcomes = [
        Outcome(
            [answer(0, some, 10.0, 1, 2), answer(1, some, 30.0, 3, 4)],
            2.0,
            counts,
            0.5,
            num_ahead=2,
        ),
        Outcome(
            [answer(0, dict.fromkeys(Tier, 0), 20.0, 5, 6)], 1.0, {"lost_blocks.too_slow": 4}, 0
        ),
    ]
    told = crowd_figures.figures(outcomes, SPEC, raw_GBps=1e-4)
    assert (told["answers"], told["answers_per_s"]) == (3, 1.0)
    assert (told["ttft_ms"]["p50"], told["itl_ms"]["p99"]) == (20.0, 2.0)
    assert told["hit_rate"] == pytest.approx(160 / 300)
    assert told["by_tier"] == {Tier.DEVICE: 32, Tier.HOST: 0, Tier.DISK: 128}
    assert told["computed_tokens"] == 300 - 160 + 6
    assert told["bytes_read"] == 5 * SPEC.block_bytes
    assert told["bytes_useful"] == (4 + 2) * SPEC.block_bytes
    assert told["bytes_read_ahead"] == 2 * SPEC.block_bytes
    assert told["disk_useful"] == pytest.approx((4 + 2) * SPEC.block_bytes / 0.5 / 1e5)
    assert told["overtaken"] == 1 / 5
    assert told["written_bytes_per_computed_token"] == 3 * SPEC.block_bytes / 146
    assert (told["dropped"], told["lost_blocks"]) == (4, {"lost_blocks.too_slow": 4})
    assert crowd_figures.figures(outcomes, SPEC, None)["disk_useful"] is None
    assert told["bytes_from_disk"] is told["page_cache"] is None


def read_from_disk(
    num_blocks: int, page_cache: str | None, *bytes_from_disk: int | None, **counts: int
) -> dict[str, Any]:
    """Return the figures of runs that each read some blocks."""
    told = {"move_seconds.disk,host.0": num_blocks, **counts}
    answers = [answer(0, dict.fromkeys(Tier, 0), 1.0, 1)]
    outcomes = [Outcome(answers, 1.0, told, 0.5, each, page_cache) for each in bytes_from_disk]
    return crowd_figures.figures(outcomes, SPEC, None)


def test_reads_that_the_disk_did_not_give_are_a_problem() -> None:
    size = SPEC.block_bytes
    plan = crowd.Plan(cast(Any, None), SPEC, {}, 0)
    row = read_from_disk(10, "bypassed", 10 * size, 10 * size)
    assert (row["bytes_from_disk"], row["bytes_read"]) == (20 * size, 20 * size)
    assert row["page_cache"] == "bypassed"
    assert crowd_figures.bytes_problem(row, plan) == ""
    half = read_from_disk(10, "bypassed", 10 * size, 0)
    told = "the disk gave 0.5 bytes for each byte loaded; the others came from memory"
    assert crowd_figures.bytes_problem(half, plan) == told
    assert crowd_figures.bytes_problem(read_from_disk(10, "bypassed", 40 * size), plan) == ""
    assert crowd_figures.bytes_problem(read_from_disk(10, "warm", 0), plan) == ""
    assert crowd_figures.bytes_problem(read_from_disk(0, "bypassed", 0), plan) == ""
    assert crowd_figures.bytes_problem(read_from_disk(0, None, 0), plan) == ""
    failed = read_from_disk(10, "bypassed", 8 * size, **{"load_failures.missing": 2})
    assert crowd_figures.bytes_problem(failed, plan) == "", "a missing block has no bytes"
    unknown = read_from_disk(10, "bypassed", 10 * size, None)
    assert (unknown["bytes_from_disk"], crowd_figures.bytes_problem(unknown, plan)) == (None, "")
    compressed = plan._replace(settings={"disk_compression": "on"})
    assert crowd_figures.bytes_problem(half, compressed) == ""


def test_arms_are_compared_over_the_requests_that_all_have_answered() -> None:
    tiers = dict.fromkeys(Tier, 0)

    def outcome(*ttft_ms: float) -> Outcome:
        answers = [answer(turn, tiers, each, 1, 2) for turn, each in enumerate(ttft_ms)]
        return Outcome(answers, 1.0, {}, 0.0)

    fast = [outcome(10.0, 20.0, 900.0), outcome(30.0, 800.0)]
    slow = [outcome(12.0, 22.0), outcome(32.0)]
    common = crowd_figures.common_answers({"fast": fast, "slow": slow})
    told = {arm: crowd_figures.common_figures(answers) for arm, answers in common.items()}
    assert {arm: row["common"]["answers"] for arm, row in told.items()} == {"fast": 3, "slow": 3}
    assert [told[arm]["common"]["ttft_ms"]["p50"] for arm in ("fast", "slow")] == [20, 22]
    assert told["fast"]["common"]["itl_ms"]["p50"] == 2.0
    assert told["fast"]["tokens_digest"] == told["slow"]["tokens_digest"]
    slow[1].answers[0].token_ids[0] = 9
    other = crowd_figures.common_figures(
        crowd_figures.common_answers({"fast": fast, "slow": slow})["slow"]
    )
    assert other["tokens_digest"] != told["fast"]["tokens_digest"]
    nothing = crowd_figures.common_answers({"fast": [outcome(1.0)], "slow": [outcome()]})
    assert nothing["fast"] == nothing["slow"] == []
    assert crowd_figures.common_figures([])["common"]["ttft_ms"]["p50"] is None


def test_a_run_is_told_when_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    answers = [answer(0, {}, ttft_ms, 1) for ttft_ms in (100.0, 200.0, 700.0)]
    crowd.tell("planned: 8 sessions, seed 0", Outcome(answers, 2.0, {}, 0.0))
    told = "planned: 8 sessions, seed 0: 3 answers, 1.50 a second, TTFT p50 200 ms, p90 600 ms\n"
    assert capsys.readouterr() == ("", told)


def test_answers_of_two_arms_are_compared_where_both_gave_one() -> None:
    tiers = dict.fromkeys(Tier, 0)
    ours = Outcome([answer(0, tiers, 1.0, 1, 2), answer(1, tiers, 1.0, 3, 4)], 1.0, {}, 0.0)
    other = Outcome([answer(0, tiers, 1.0, 1, 2), answer(1, tiers, 1.0, 3, 5)], 1.0, {}, 0.0)
    less = Outcome([answer(1, tiers, 1.0, 3, 4)], 1.0, {}, 0.0)
    assert crowd_figures.equal_share([ours], [other]) == 0.5
    assert crowd_figures.equal_share([ours], [less]) == 1.0
    assert crowd_figures.equal_share([ours], [Outcome([], 1.0, {}, 0.0)]) is None


def test_the_time_of_reads_counts_once_where_they_overlap() -> None:
    reads = WatchedReads(1e9, math.inf, -math.inf)
    reads.begin(10, 1.0)
    reads.begin(10, 1.5)
    reads.end(10, 2.0)
    reads.end(10, 3.0, teaches=False)
    reads.begin(10, 7.0)
    reads.end(10, 7.25)
    assert reads.reading_s == pytest.approx(2.25)
    assert reads.num_bytes == 0
