"""`bench returns`: sessions that come back after a pause that RAM did not outlast (open loop).

Every session has a long prefix, and the sessions return in turn. A return is the session's prefix
and some new tokens; it comes at a random moment (Poisson arrivals from a seed), whether or not the
engine keeps up. All prefixes are on disk before the first return, and they are more than VRAM and
host memory hold together: each is out of both before its turn comes again. The report shows by tier
that nothing was found there, and complains if a rate was held otherwise. Of a return, only the
prefix is on disk, since the new tokens differ between rates. To show that the page cache served
nothing, the report complains if `bytes_from_disk`, the bytes that the kernel read from storage for
the worker, are less than 0.95 times `bytes_read`, unless `page_cache` is `warm`.

The arms are `no_disk` (a prefix is computed), `load` and `planned` (`restore = "load"`
and `"auto"`). Each has a process and a store of its own, and gets the same returns. In the arms
with a disk, some prefixes are served twice beforehand, computed and from disk, and the tokens must
be equal.

The capacity of an arm is the arrival rate up to which the 90th percentile of TTFT stays within the
limit. It is interpolated between the last rate that held and the first one that did not; an arm is
not run at rates above that one.
"""

import itertools
import random
from array import array
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tieredkv.bench import crowd, crowd_figures, raw
from tieredkv.bench.crowd import Answer, Ask, Outcome
from tieredkv.bench.progress import bench_progress
from tieredkv.bench.ttft import (
    OUTPUT_TOKENS,
    SUFFIX_TOKENS,
    compare,
    demote_all,
    make_prompt,
    serve_once,
)
from tieredkv.errors import ConfigError
from tieredkv.types import Progress, Tier, tracked

NUM_CHECKED = 2
MAX_RAM_SHARE = 0.02
"""Share of the prompt tokens that may come from RAM at a rate that was held: a request that was
preempted finds there what was loaded for it before.
"""

SHARE_OF_CAPACITY = 0.7
"""Of the better other arm's capacity: the rate at which the median TTFT is compared."""

COLUMNS: tuple[str, ...] = ("arm", "rate", *crowd_figures.COLUMNS)
PLOTTED = crowd_figures.PLOTTED

Row = dict[str, Any]


class Shape(NamedTuple):
    """What the returns look like.

    Attributes:
        sessions: number of sessions.
        shortest, longest: lengths of prefixes in tokens; those of the sessions lie evenly between.
        new_tokens: that a return adds to the prefix.
        answers: number of returns at a rate.
        answer_tokens: length of an answer.
        seed: of arrivals, lengths and tokens.
    """

    sessions: int
    shortest: int
    longest: int
    new_tokens: int
    answers: int
    answer_tokens: int
    seed: int

    @property
    def lengths(self) -> list[int]:
        """Lengths of the prefixes, in the order of the sessions' turns."""
        lengths = [round(it) for it in np.linspace(self.shortest, self.longest, self.sessions)]
        random.Random(self.seed).shuffle(lengths)
        return lengths

    def arrivals(self, rate: float) -> list[float]:
        """Return when the returns come, in seconds; at another rate, the same times stretched."""
        generator = random.Random(f"{self.seed}/arrivals")
        gaps = (generator.expovariate(1.0) / rate for _ in range(self.answers))
        return list(itertools.accumulate(gaps))

    def returns(self, rate: float, prefixes: list[list[int]], vocab_size: int) -> list[Ask]:
        """Return the requests at a rate; what they add to the prefixes differs between rates."""
        asks = list[Ask]()
        for index, at_s in enumerate(self.arrivals(rate)):
            generator = random.Random(f"{self.seed}/{rate}/{index}")
            new = generator.choices(range(vocab_size), k=self.new_tokens)
            turn, session = divmod(index, self.sessions)
            prompt = array("I", prefixes[session] + new)
            asks.append(Ask(at_s, session, turn, prompt, self.answer_tokens))
        return asks


class Capacity(NamedTuple):
    """The rate up to which an arm holds the limit of TTFT p90.

    Attributes:
        rate: in returns per second; None if no rate held.
        known: how it is known: `interpolated`, `at least` (every rate held) or `below the lowest
            rate`.
    """

    rate: float | None
    known: str


def measure(
    settings: Row, arm: str, folder: Path, shape: Shape, rates: list[float], limit_ms: float
) -> tuple[list[Outcome], list[str]]:
    """Run one arm at each rate up to the first that does not hold the limit, in this process.

    Also return what was wrong with the tokens that were served from disk.
    """
    progress, outcomes, problems = bench_progress(), list[Outcome](), list[str]()
    with crowd.engine(settings, arm, folder, progress) as it:
        llm, core = it.llm, it.core
        prompts = [
            make_prompt(llm, length, shape.seed * shape.sessions + session)
            for session, length in enumerate(shape.lengths)
        ]
        prefixes = [prompt[:-SUFFIX_TOKENS] for prompt in prompts]
        serve_once(llm, make_prompt(llm, shape.longest, -1))  # warm-up
        it.empty()
        if arm != "no_disk":
            problems = _fill(it, prompts, progress, arm)
        for rate in rates:
            demote_all(llm, "disk" if arm != "no_disk" else None)
            core.verbs.evict()
            stage = f"{arm}: {rate:g} returns/s"
            asks = shape.returns(rate, prefixes, core.info.vocab_size)
            answered = itertools.count(1)

            def follow(_: Answer) -> None:
                progress(stage, next(answered), shape.answers)  # noqa: B023 - called in this round

            progress(stage, 0, shape.answers)
            outcomes.append(it.serve(asks, follow))
            crowd.tell(stage, outcomes[-1])
            if _p90_ms(outcomes[-1]) > limit_ms:
                break
    return outcomes, problems


def _fill(it: crowd.Crowd, prompts: list[list[int]], progress: Progress, arm: str) -> list[str]:
    """Compute all prefixes and move them to disk; compare some answers with those from there."""
    problems = list[str]()
    for session, prompt in tracked(progress, f"{arm}: computing prefixes", [*enumerate(prompts)]):
        cold = serve_once(it.llm, prompt)
        demote_all(it.llm, "disk")
        if session < NUM_CHECKED:
            it.core.verbs.evict()
            again = serve_once(it.llm, prompt)
            length = len(prompt) - SUFFIX_TOKENS
            if not again.by_tier[Tier.DISK] and arm == "load":
                problems.append(f"{arm}: nothing of a prefix of {length} tokens came from disk")
            if not compare(again, cold)[1]:
                text = "the tokens from disk differ from the computed ones"
                problems.append(f"{arm}: at {length} tokens {text}")
            demote_all(it.llm, "disk")
    return problems


def _p90_ms(outcome: Outcome) -> float:
    return float(np.percentile([answer.ttft_ms for answer in outcome.answers], 90))


def run(
    _progress: Progress,
    *,
    settings: Row,
    rates: list[float],
    arms: list[str],
    ttft_limit: float,
    sessions: int,
    prefix_tokens: tuple[int, int],
    shape_seed: int,
    **options: Any,
) -> Row:
    """Run each arm in a process of its own, which draws its progress itself.

    Raises:
        ConfigError: the prompts do not fit the model, RAM holds prefixes for too long, or the disk
            does not hold them all.
        TieredKVError: a process failed.
    """
    shape = Shape(sessions, *prefix_tokens, seed=shape_seed, **options)
    answer_tokens = max(shape.answer_tokens, OUTPUT_TOKENS)
    longest = shape.longest + max(shape.new_tokens, SUFFIX_TOKENS) + answer_tokens
    tokens: dict[Tier, float] = {Tier.DEVICE: 2 * longest, Tier.HOST: shape.longest}
    tokens[Tier.DISK] = 1.5 * sum(shape.lengths)
    plan = crowd.plan(settings, tokens, longest, "give shorter `--prefix-tokens`")
    check(plan, shape)
    rates, limit_ms = sorted(rates), 1e3 * ttft_limit
    results, problems = crowd.run_arms(plan.settings, arms, measure, shape, rates, limit_ms)
    raw_GBps = crowd_figures.raw_rate(
        itertools.chain(*(outcomes for outcomes, _ in results.values()))
    )
    rows = list[Row]()
    problems += [text for _, some in results.values() for text in some]
    first = results[arms[0]][0]
    for arm in results:
        for rate, outcome, other in itertools.zip_longest(rates, results[arm][0], first):
            if outcome is None:
                break
            figures = crowd_figures.figures([outcome], plan.kv_spec, outcome.raw_GBps)
            equal = crowd_figures.equal_share([outcome], [other]) if other is not None else None
            row = {"arm": arm, "rate": rate, **figures, f"equal_to_{arms[0]}": equal}
            row["is_held"] = figures["ttft_ms"]["p90"] <= limit_ms
            rows.append(row)
            if problem := crowd_figures.bytes_problem(row, plan):
                problems.append(f"{arm} at {rate:g}/s: {problem}")
            by_tier = figures["by_tier"]
            in_ram_share = (by_tier[Tier.DEVICE] + by_tier[Tier.HOST]) / figures["prompt_tokens"]
            if row["is_held"] and in_ram_share > MAX_RAM_SHARE:
                text = f"{in_ram_share:.1%} of the prompt tokens were found in RAM"
                problems.append(f"{arm} at {rate:g}/s: {text}; give more `--sessions`")
    workload = shape._asdict() | {"ttft_limit_s": ttft_limit}
    capacities = {
        arm: capacity([row for row in rows if row["arm"] == arm], limit_ms) for arm in results
    }
    facts = {**plan.facts, "workload": workload}
    limits = {"disk_read_GBps": raw_GBps, "h2d_GBps": raw.h2d_GBps()}
    return {
        **facts,
        **compared(rows, capacities),
        "raw": limits,
        "rows": rows,
        "problems": problems,
    }


def check(plan: crowd.Plan, shape: Shape) -> None:
    """Check that returns can come from the disk, and from there alone.

    Raises:
        ConfigError: RAM holds prefixes for too long, or the disk does not hold them all.
    """
    num_tokens = sum(shape.lengths)
    between = num_tokens - shape.longest
    if (in_ram := sum(map(plan.num_tokens, (Tier.DEVICE, Tier.HOST)))) >= between:
        what = f"VRAM and host memory hold {in_ram} tokens, as many as the {between} between"
        hint = "give more `--sessions`, or smaller `--device-size` and `--host-size`"
        raise ConfigError(f"{what} two turns of a session\nhint: {hint}")
    if (on_disk := plan.num_tokens(Tier.DISK)) < 1.1 * num_tokens:
        what = f"`disk_size` holds {on_disk} tokens; the prefixes have {num_tokens}"
        raise ConfigError(f"{what}, and a tenth more is needed")


def capacity(rows: list[Row], limit_ms: float) -> Capacity:
    """Return the rate up to which an arm holds the limit of TTFT p90, interpolated linearly.

    Args:
        rows: of one arm, by ascending rate; at most the last one does not hold the limit.
        limit_ms: of TTFT p90.
    """
    last = rows[-1]
    if last["ttft_ms"]["p90"] <= limit_ms:
        return Capacity(last["rate"], "at least")
    if len(rows) == 1:
        return Capacity(None, "below the lowest rate")
    some = rows[-2:]
    p90s, rates = [row["ttft_ms"]["p90"] for row in some], [row["rate"] for row in some]
    return Capacity(float(np.interp(limit_ms, p90s, rates)), "interpolated")


def compared(rows: list[Row], capacities: dict[str, Capacity]) -> Row:
    """Return each arm's capacity, and how `planned` compares with the better other arm.

    Returns:
        `capacity` and `capacity_is`, by arm; if `planned` and another arm were run, also
        `capacity_over_better`, the ratio of the capacities, and `p50_over_better`, the ratio of the
        median TTFT at 0.7 of the better arm's capacity, interpolated linearly between rates. That
        is None if one of them was not run at rates on both sides of it. A ratio is given only where
        the better arm's capacity is exact; `planned`'s may be larger than is known.
    """
    told: Row = {"capacity": {arm: each.rate for arm, each in capacities.items()}}
    told["capacity_is"] = {arm: each.known for arm, each in capacities.items()}
    others = [arm for arm in capacities if arm != "planned"]
    if "planned" not in capacities or not others:
        return told
    better = max(others, key=lambda arm: capacities[arm].rate or 0.0)
    ours, theirs = capacities["planned"].rate, capacities[better].rate
    p50s, over_better = list[float](), None
    if ours and theirs and capacities[better].known == "interpolated":
        at_rate, over_better = SHARE_OF_CAPACITY * theirs, ours / theirs
        for arm in ("planned", better):
            of_arm = [row for row in rows if row["arm"] == arm]
            rates, medians = zip(
                *((it["rate"], it["ttft_ms"]["p50"]) for it in of_arm), strict=True
            )
            if rates[0] <= at_rate <= rates[-1]:
                p50s.append(float(np.interp(at_rate, rates, medians)))
    told |= {"better_arm": better, "capacity_over_better": over_better}
    return told | {"p50_over_better": p50s[0] / p50s[1] if len(p50s) == 2 else None}
