"""Serves crowds on a modelled machine, to see what a policy does before a GPU is asked.

    python -m tests.stress.modelled_crowd sessions --sessions 4,8,16
    python -m tests.stress.modelled_crowd returns --rates 0.4,0.6,0.9,1.2
    python -m tests.stress.modelled_crowd compare OLD.json NEW.json

The requests are those of `bench sessions` and `bench returns`. The engine's scheduler, planner,
pools and queues serve them on the machine of `tests.modelled`, where only time is computed.

A row also says which share of the prompt tokens was found, and which share ideal pools would have
found for the same requests, in the order in which they were first admitted. Ideal pools hold
nothing back for running requests or for copies, and have no disk:

    measured    what the engine found, also on disk, and did not compute all the same
    inclusive   VRAM and host memory are two LRU pools, and a block that returns to VRAM stays below
    one_pool    one LRU pool as large as both
    unbounded   nothing is ever evicted

A row also says which share of the pages of a full tier hold windows or recurrent states
(`tail_shares`), and which share are those of them that sessions have gone on past.

Each row lists its seeds as well, so that reports of two commits can be compared seed by seed. Runs
with the same digest have the same plans and the same times, to the last digit.
"""

import functools
import itertools
import json
import multiprocessing
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import click
import numpy as np
import torch
import xxhash

from tests.modelled import H200_8B, Machine, ModelledCore, VirtualTime
from tieredkv.bench import crowd, crowd_figures, raw, returns
from tieredkv.bench.crowd import Answer, Ask, Outcome
from tieredkv.bench.progress import bench_progress
from tieredkv.bench.sessions import ANSWER_TOKENS, Shape, make_scripts, serve
from tieredkv.bench.ttft import SUFFIX_TOKENS, look_up, make_prompt
from tieredkv.cache.plan import Demand, Planner, Split
from tieredkv.cli.bench_options import (
    COUNT,
    CROWD_ARMS,
    NUMBER,
    SESSIONS,
    arms,
    several,
    shortest_to_longest,
    with_options,
)
from tieredkv.cli.settings import settings_options
from tieredkv.config import LoadedSettings, load_settings
from tieredkv.engine.core import EngineCore
from tieredkv.engine.request import Request
from tieredkv.errors import ConfigError, TieredKVError
from tieredkv.types import BlockHash, KVSpec, Tier, ignore_progress

MODEL = "random:llama-3.1-8b"
SESSIONS_SIZES = {"device_size": "24GiB", "host_size": "16GiB", "disk_size": "40GiB"}
RETURNS_SIZES = {"device_size": "14GiB", "host_size": "8GiB", "disk_size": "60GiB"}
SET_BY_ARM = ("disk_dir", "restore", "default_retention")
DEMOTE_TIMEOUT_S = 600.0
RATES = {
    "step_s": "Least seconds of a step.",
    "token_s": "Seconds for each token of a prompt.",
    "pair_s": "Seconds for each pair of a prompt's token and a token before it.",
    "decode_s": "Seconds for each token before one that is generated.",
    "up_GBps": "Rate of copies from host memory.",
    "down_GBps": "Rate of copies to host memory.",
    "read_GBps": "Rate of the disk, which reads and writes share.",
    "read_s": "Latency of a read in seconds.",
    "lookup_s": "Seconds until the disk has answered a lookup.",
    "issue_s": "Seconds for which issuing a step keeps the engine's thread.",
    "issue_long_s": "Seconds for which it is kept beyond that by a step that no graph holds.",
    "issue_token_s": "The same for each token of a prompt.",
    "block_s": "Seconds for which it is kept by a block that comes, and by one that is admitted.",
}

COMPARED = {"ttft_ms": (50, 90, 99), "hit_ttft_ms": (50, 90), "itl_ms": (50, 90, 99)}
NUM_DRAWN = 200

LEAST_ANSWERS = 0.99
"""The least ratio of answers per second with which `compare` is content."""

MOST_TTFT = 1.03
"""The greatest ratio of TTFT p50 and p90 with which it is, unless the interval contains 1."""

Row = dict[str, Any]
Chains = Sequence[tuple[Sequence[BlockHash], int]]
"""The hashes of each request's prompt and answer, and the number of tokens of the prompt."""


class Case(NamedTuple):
    """One run.

    Attributes:
        number: of sessions, or the rate of returns.
        settings: of the engine, but for those in which the arms differ.
        shape: what the sessions look like.
    """

    arm: str
    number: float
    seed: int
    settings: Row
    machine: Machine
    shape: Any


class Run(NamedTuple):
    """What a case gave.

    Attributes:
        busy_s, prefill_s: for which the device computed steps, and steps that have prompt tokens.
        prompt_tokens: of the requests whose prefill ended.
        found: the tokens of these that the engine and ideal pools found.
        tail_pages: see `tail_pages`; one each time that a request was first admitted.
        plans: digest of how all plans divided requests.
    """

    outcome: Outcome
    busy_s: float
    prefill_s: float
    prompt_tokens: int
    found: Counter[str]
    tail_pages: list[dict[str, float]]
    plans: str

    @property
    def digest(self) -> str:
        """What runs have in common that have the same plans and the same times."""
        times = [
            (it.client, it.turn, it.ended_s, it.ttft_ms, it.gaps_ms, sorted(it.by_tier.items()))
            for it in self.outcome.answers
        ]
        return xxhash.xxh3_64_hexdigest(repr((self.plans, self.outcome.wall_s, times)).encode())


class ModelledCrowd(crowd.Crowd):
    """A crowd on a modelled machine, which notes in which order requests are first admitted."""

    def __init__(self, core: ModelledCore) -> None:
        super().__init__(SimpleNamespace(core=core), None)  # type: ignore[arg-type]
        self.modelled = core
        self._order: dict[Request, None] = {}
        self._tail_pages = list[dict[str, float]]()
        take = core.scheduler.waiting.take

        def note(request: Request) -> None:
            if request not in self._order:
                self._order[request] = None
                self._tail_pages.append(tail_pages(core))
            take(request)

        core.scheduler.waiting.take = note  # type: ignore[method-assign]

    def run(self, serve: Callable[[], Outcome]) -> Run:
        """Serve requests, and return what became of them."""
        device, tiers = self.modelled.device, self.modelled.parts.tiers
        busy_s, prefill_s = device.busy_s, device.prefill_s
        self._order.clear()
        self._tail_pages.clear()
        with digest_of_plans() as plans:
            outcome = serve()
        chains, found = [], Counter[str]()
        for request in self._order:
            if request.usage is not None:
                chains.append((request.chain.hashes, request.num_prompt_tokens))
                found["measured"] += sum(request.usage.cached_tokens_by_tier.values())
        sizes, block_size = (tiers.device.num_blocks, tiers.host.num_blocks), tiers.block_size
        found["inclusive"] = inclusive(chains, *sizes, block_size)
        found["one_pool"] = one_pool(chains, sum(sizes), block_size)
        found["unbounded"] = one_pool(chains, sum(len(some) for some, _ in chains), block_size)
        times = device.busy_s - busy_s, device.prefill_s - prefill_s
        num_tokens = sum(count for _, count in chains)
        pages = [*self._tail_pages]
        return Run(outcome, *times, num_tokens, found, pages, plans.hexdigest())


def tail_pages(core: ModelledCore) -> dict[str, float]:
    """Return which shares of the pages of host memory and of the disk hold windows or states.

    A tier that is not full is left out. `host_superseded` is the share of those in host memory
    that sessions have gone on past, which are evicted first.
    """
    tiers, disk, found = core.parts.tiers, core.disk, dict[str, float]()
    host, catalog = tiers.host, tiers.catalog
    if not host.num_empty:
        entries = [catalog.get(block_hash) for block_hash in host.hashes]
        tails = [entry.block_hash for entry in entries if entry is not None and entry.kind]
        found["host"] = len(tails) / host.num_blocks
        num_superseded = sum(it in catalog.superseded for it in tails)
        found["host_superseded"] = num_superseded / host.num_blocks
    if disk is not None and disk.is_full:
        found["disk"] = sum(bool(it.kind) for it in disk.records.values()) / len(disk.records)
    return found


@contextmanager
def digest_of_plans() -> Iterator[xxhash.xxh3_64]:
    """Digest how each plan divides a request."""
    digest, split = xxhash.xxh3_64(), Planner.split

    def noted(planner: Planner, demand: Demand) -> Split:
        found = split(planner, demand)
        digest.update(repr(found).encode())
        return found

    with mock.patch.object(Planner, "split", noted):
        yield digest


def one_pool(chains: Chains, num_blocks: int, block_size: int) -> int:
    """Return how many prompt tokens one LRU pool finds."""
    return inclusive(chains, num_blocks, 0, block_size)


def inclusive(chains: Chains, device_blocks: int, host_blocks: int, block_size: int) -> int:
    """Return how many prompt tokens two LRU pools find; the second keeps what the first reads."""
    device: OrderedDict[BlockHash, None] = OrderedDict()
    host: OrderedDict[BlockHash, None] = OrderedDict()
    num_found = 0
    for hashes, num_prompt_tokens in chains:
        prompt = hashes[: (num_prompt_tokens - 1) // block_size]
        found = itertools.takewhile(lambda each: each in device or each in host, prompt)
        num_found += block_size * sum(1 for _ in found)
        for block_hash in reversed(hashes):  # the head is evicted last
            if block_hash in host:
                host.move_to_end(block_hash)
            device[block_hash] = None
            device.move_to_end(block_hash)
        while len(device) > device_blocks:
            block_hash, _ = device.popitem(last=False)
            host[block_hash] = None
            host.move_to_end(block_hash)
        while len(host) > host_blocks:
            host.popitem(last=False)
    return num_found


@contextmanager
def engine(case: Case) -> Iterator[ModelledCrowd]:
    """Run an engine on the modelled machine, in whose time everything happens meanwhile."""
    torch.set_num_threads(1)
    time_ = VirtualTime()
    with time_.patched():
        told = case.settings | crowd.arm_settings(
            case.arm, None if case.arm == "no_disk" else "modelled"
        )
        core = ModelledCore(load_settings(arguments=told).settings, case.machine, time_)
        try:
            yield ModelledCrowd(core)
        finally:
            core.abort_all()
            core.verbs.evict()
            core.close()


def run_sessions(case: Case) -> Run:
    """Run sessions from empty tiers, as `bench sessions` does."""
    with engine(case) as it:
        info = it.core.info
        shape: Shape = case.shape
        answer_tokens = shape.scaled(ANSWER_TOKENS)
        most_tokens = int((info.max_model_len - answer_tokens) * shape.scale)
        asked = int(case.number), case.seed, shape, most_tokens, info.vocab_size
        scripts = make_scripts(*asked)
        return it.run(lambda: serve(it, scripts, ignore_progress, "", shape.until))


def run_returns(case: Case) -> Run:
    """Put the prefixes on disk, and run their returns at one rate, as `bench returns` does."""
    shape: returns.Shape = case.shape
    with engine(case) as it:
        llm = it.llm
        prefixes = [
            make_prompt(llm, length, shape.seed * shape.sessions + session)[:-SUFFIX_TOKENS]
            for session, length in enumerate(shape.lengths)
        ]
        # The first prefixes are served again, from disk, and so the rate of reads is learnt.
        again = prefixes[: returns.NUM_CHECKED]
        for prefix in [*prefixes, *again] if case.arm != "no_disk" else ():
            it.serve([Ask(0.0, 0, 0, prefix, shape.answer_tokens)], _nothing)
            demote_all(it.core)
        it.core.verbs.evict()
        asks = shape.returns(case.number, prefixes, it.core.info.vocab_size)
        return it.run(lambda: it.serve(asks, _nothing))


def demote_all(core: EngineCore) -> None:
    """Move all blocks to disk."""
    if not core.cache.flush(Tier.DISK, deadline=time.monotonic() + DEMOTE_TIMEOUT_S):
        raise TieredKVError("not every block could be demoted to disk")


def _nothing(_: Answer) -> None:
    return None


def run_all(
    work: Callable[[Case], Run], cases: Sequence[Case], num_jobs: int
) -> dict[tuple[str, float], list[Run]]:
    """Run cases in parallel processes; return their runs by arm and number, by ascending seeds."""
    progress, done = bench_progress(), itertools.count(1)
    progress("cases", 0, len(cases))
    with ProcessPoolExecutor(num_jobs, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(work, case) for case in cases]
        for _ in as_completed(futures):
            progress("cases", next(done), len(cases))
    found: dict[tuple[str, float], list[Run]] = {}
    for case, future in zip(cases, futures, strict=True):
        found.setdefault((case.arm, case.number), []).append(future.result())
    return found


def figures(runs: Sequence[Run], spec: KVSpec, machine: Machine) -> Row:
    """Return the figures of some runs, pooled: the bench's own, and those that only a model has."""
    row = crowd_figures.figures([run.outcome for run in runs], spec, machine.read_GBps)
    prompt_tokens = sum(run.prompt_tokens for run in runs)
    found = {name: sum(run.found[name] for run in runs) for name in runs[0].found}
    row["hit_rates"] = {name: round(count / prompt_tokens, 4) for name, count in found.items()}
    pages = [each for run in runs for each in run.tail_pages]
    names = sorted({name for each in pages for name in each})
    row["tail_shares"] = {
        name: round(float(np.mean([each[name] for each in pages if name in each])), 4)
        for name in names
    }
    row["device_busy_share"] = sum(run.busy_s for run in runs) / row["wall_s"]
    row["prefill_share"] = sum(run.prefill_s for run in runs) / row["wall_s"]
    return row


def by_seed(runs: Sequence[Run], seeds: Sequence[int]) -> list[Row]:
    """Return the figures of each run that `compare` compares, and its digest."""
    rows = list[Row]()
    for seed, run in zip(seeds, runs, strict=True):
        found = {name: round(value, 6) for name, value in _pooled([_seen(run.outcome)]).items()}
        hit_rate = round(run.found["measured"] / run.prompt_tokens, 6)
        rows.append({"seed": seed, "digest": run.digest, **found, "hit_rate": hit_rate})
    return rows


def compared(outcomes: Mapping[str, Sequence[Outcome]]) -> Row:
    """Compare the planned arm with the better of the others, figure by figure.

    A millisecond decides who comes first, and all that follows, so that a figure of one seed says
    little. Each ratio has the range in which nine of ten lie if other seeds had been drawn.

    Args:
        outcomes: of each arm, by the same seeds.

    Returns:
        The ratio and its range for each figure; nothing without the planned arm and another one.
    """
    others, generator = sorted({*outcomes} - {"planned"}), np.random.default_rng(0)
    if "planned" not in outcomes or not others:
        return {}
    seen = {arm: [_seen(outcome) for outcome in some] for arm, some in outcomes.items()}
    num_seeds = len(seen["planned"])

    def ratios(chosen: Sequence[int]) -> dict[str, float]:
        by_arm = {arm: _pooled([some[each] for each in chosen]) for arm, some in seen.items()}
        planned = by_arm["planned"]
        return {
            name: value
            / (max if name == "answers_per_s" else min)(by_arm[arm][name] for arm in others)
            for name, value in planned.items()
        }

    drawn = [ratios(generator.choice(num_seeds, num_seeds).tolist()) for _ in range(NUM_DRAWN)]
    return {
        name: {
            "ratio": round(ratio, 4),
            "p5_p95": np.percentile([each[name] for each in drawn], (5, 95)).round(4).tolist(),
        }
        for name, ratio in ratios(range(num_seeds)).items()
    }


def paired(old: Sequence[Row], new: Sequence[Row]) -> Row:
    """Compare the runs of two commits by the same seeds.

    Args:
        old: the figures of one commit, see `by_seed`.
        new: the figures of the other one.

    Returns:
        How many runs are the same, and for each figure the geometric mean of its ratios (new to
        old) and the range in which 95 % of such means lie if other seeds had been drawn.

    Raises:
        ValueError: they have other seeds.
    """
    if [row["seed"] for row in old] != [row["seed"] for row in new]:
        raise ValueError("the reports have other seeds")
    generator = np.random.default_rng(0)
    found: Row = {"same": sum(a["digest"] == b["digest"] for a, b in zip(old, new, strict=True))}
    for name in old[0].keys() - {"seed", "digest"}:
        values = np.array([[row[name] for row in rows] for rows in (old, new)], float)
        if not (values > 0).all():
            continue  # nothing was found on disk, for example
        logs = np.log(values[1] / values[0])
        drawn = generator.choice(logs, (10 * NUM_DRAWN, len(logs))).mean(axis=1)
        low, high = np.exp(np.percentile(drawn, (2.5, 97.5))).round(4).tolist()
        found[name] = {"ratio": round(float(np.exp(logs.mean())), 4), "p2_p97": [low, high]}
    return found


def is_worse(row: Row) -> bool:
    """Return whether what `paired` tells misses a bar."""
    late = [row[name] for name in ("ttft_ms.p50", "ttft_ms.p90")]
    is_late = any(it["ratio"] > MOST_TTFT and it["p2_p97"][0] > 1 for it in late)
    return is_late or row["answers_per_s"]["ratio"] < LEAST_ANSWERS


class _Seen(NamedTuple):
    """What the clients of one run saw."""

    num_answers: int
    wall_s: float
    ttft_ms: Any
    hit_ttft_ms: Any
    itl_ms: Any


def _seen(outcome: Outcome) -> _Seen:
    answers = outcome.answers
    return _Seen(
        len(answers),
        outcome.wall_s,
        np.array([each.ttft_ms for each in answers]),
        np.array([each.ttft_ms for each in answers if each.is_hit]),
        np.concatenate([each.gaps_ms for each in answers]),
    )


def _pooled(runs: Sequence[_Seen]) -> dict[str, float]:
    found = {"answers_per_s": sum(it.num_answers for it in runs) / sum(it.wall_s for it in runs)}
    for name, points in COMPARED.items():
        pooled = np.concatenate([getattr(it, name) for it in runs])
        values = np.percentile(pooled, points)
        found |= {f"{name}.p{point}": float(it) for point, it in zip(points, values, strict=True)}
    return found


def plan(loaded: LoadedSettings, sizes: Row) -> crowd.Plan:
    """Return the settings of all arms, and how many tokens the tiers have room for."""
    given = sizes | loaded.given()
    found, spec = look_up(given | {"device": "cpu", "dtype": "bfloat16"})
    names = ("device_size", "host_size", "disk_size")
    checked = load_settings(arguments=given).settings
    return crowd.Plan(found, spec, given | {name: getattr(checked, name) for name in names}, 0)


def tell(made: crowd.Plan, machine: Machine, commit: str | None, found: Row) -> None:
    """Print a report as JSON."""
    head = raw.head(commit, "python -m tests.stress.modelled_crowd")
    facts = {"times": "computed, not measured", "machine": machine._asdict(), **made.facts}
    click.echo(json.dumps(head | facts | found))


@click.group()
def main() -> None:
    """Serve crowds on a modelled machine, to see what a policy does before a GPU is asked.

    The engine's scheduler, planner, pools and queues are the real ones. Steps, copies and the disk
    take the time that they would at the rates of the machine; nothing is really computed or moved.
    So all times in the report are computed, not measured: they compare policies with each other,
    and only a GPU can confirm them. The default rates are roughly those of one H200 with
    Llama-3.1-8B shapes. The same command always gives the same figures.

    A row has the figures of `tieredkv bench sessions` or `returns`, and further:

    \b
    hit_rates           share of the prompt tokens that was found, and that ideal pools find for
                        the same requests in the same order: `inclusive` (VRAM and host memory, each
                        LRU, a block in both stays in both), `one_pool` (one LRU pool as large as
                        both), `unbounded`. Ideal pools have no disk.
    tail_shares         share of the pages of full tiers that hold windows or states, the mean of
                        the moments at which requests are first admitted; `host_superseded` is that
                        of those that sessions have gone on past
    device_busy_share   of the time, in which a step was computed
    prefill_share       of the time, in which a step with prompt tokens was computed

    `planned_over_better` compares `planned` with the better other arm, figure by figure, and says
    in which range nine of ten such ratios lie if other seeds are drawn.
    """


def crowd_options(command: Any) -> Any:
    """Add the options of all commands: arms, settings of the engine, and rates of the machine.

    The command gets the parameter `machine` in place of the rates.
    """

    @functools.wraps(command)
    def with_machine(**options: Any) -> None:
        rates = {name: options.pop(name) for name in RATES}
        try:
            command(machine=H200_8B._replace(**rates), **options)
        except ConfigError as error:
            raise click.ClickException(str(error)) from error

    which = arms(CROWD_ARMS, "Arms to run, with commas between.")
    jobs = click.option("--jobs", type=COUNT, default=os.cpu_count(), help="Parallel processes.")
    commit = click.option("--commit", help="Commit to report, for a tree without its history.")
    told = "Model whose keys and values move; the rates tell how long it computes."
    model = click.option("--model", default=MODEL, help=told)
    rates = [
        click.option(
            f"--{name.replace('_', '-').lower()}",
            name,
            type=NUMBER,
            default=getattr(H200_8B, name),
            help=told,
        )
        for name, told in RATES.items()
    ]
    engine = settings_options("cache", "scheduler", without=SET_BY_ARM)
    return with_options([which, jobs, model, *rates, commit, engine])(with_machine)


@main.command(context_settings={"show_default": True})
@several("--sessions", COUNT, default="4,8,16", help="Sessions at once, with commas between.")
@several("--seed", int, name="seeds", default="0,1,2", help="Seeds; their runs are pooled.")
@with_options(SESSIONS)
@crowd_options
def sessions(
    *,
    loaded: LoadedSettings,
    machine: Machine,
    sessions: list[int],
    seeds: list[int],
    arms: list[str],
    jobs: int,
    commit: str | None,
    **options: Any,
) -> None:
    """Run the agents of `tieredkv bench sessions`.

    Unless their sizes are given, tiers have 24 GiB of VRAM, 16 GiB of host memory and 40 GiB of
    disk.
    """
    made = plan(loaded, SESSIONS_SIZES)
    shape = Shape(**options)
    cases = [
        Case(arm, count, each, made.settings, machine, shape)
        for count in sorted(sessions, reverse=True)  # the longest runs come first
        for each in seeds
        for arm in arms
    ]
    runs = run_all(run_sessions, cases, jobs)
    rows, comparisons = list[Row](), list[Row]()
    for count in sessions:
        outcomes = {arm: [run.outcome for run in runs[arm, count]] for arm in arms}
        common = crowd_figures.common_answers(outcomes)
        for arm in arms:
            row = figures(runs[arm, count], made.kv_spec, machine)
            row |= crowd_figures.common_figures(common[arm])
            row["by_seed"] = by_seed(runs[arm, count], seeds)
            rows.append({"arm": arm, "sessions": count, **row})
        comparisons.append({"sessions": count, **compared(outcomes)})
    found = {"planned_over_better": comparisons, "rows": rows}
    tell(made, machine, commit, {"workload": shape.workload | {"seeds": seeds}, **found})


@main.command("returns", context_settings={"show_default": True})
@several(
    "--rates", NUMBER, default="0.3,0.4,0.5,0.6,0.8,1,1.2", help="Returns per second, ascending."
)
@click.option("--ttft-limit", type=NUMBER, default=4.0, help="Seconds that TTFT p90 must hold.")
@click.option("--sessions", type=COUNT, default=11, help="Sessions that return in turn.")
@shortest_to_longest("--prefix-tokens", "20000-60000", "Lengths of the prefixes in tokens.")
@click.option("--new-tokens", type=COUNT, default=500, help="Tokens that each return adds.")
@click.option("--answers", type=COUNT, default=120, help="Returns at each rate.")
@click.option(
    "--answer-tokens", type=click.IntRange(min=2), default=120, help="Tokens of each answer."
)
@several(
    "--seed",
    int,
    name="seeds",
    default="0",
    help="Seeds of arrivals, lengths and tokens; their runs are pooled.",
)
@crowd_options
def returns_command(
    *,
    loaded: LoadedSettings,
    machine: Machine,
    rates: list[float],
    ttft_limit: float,
    sessions: int,
    prefix_tokens: tuple[int, int],
    seeds: list[int],
    arms: list[str],
    jobs: int,
    commit: str | None,
    **options: int,
) -> None:
    """Run the returns of `tieredkv bench returns`, at all rates in all arms.

    Unless their sizes are given, tiers have 14 GiB of VRAM, 8 GiB of host memory and 60 GiB of
    disk. The report has each arm's capacity and compares `planned` with the better other arm, as
    the bench does.
    """
    made = plan(loaded, RETURNS_SIZES)
    shapes = {seed: returns.Shape(sessions, *prefix_tokens, seed=seed, **options) for seed in seeds}
    for shape in shapes.values():
        returns.check(made, shape)
    rates, limit_ms = sorted(rates), 1e3 * ttft_limit
    cases = [
        Case(arm, rate, seed, made.settings, machine, shape)
        for rate in rates
        for seed, shape in shapes.items()
        for arm in arms
    ]
    runs = run_all(run_returns, cases, jobs)
    rows, capacities = list[Row](), dict[str, returns.Capacity]()
    for arm in arms:
        of_arm: list[Row] = [
            {"arm": arm, "rate": rate}
            | figures(runs[arm, rate], made.kv_spec, machine)
            | {"by_seed": by_seed(runs[arm, rate], seeds)}
            for rate in rates
        ]
        is_held = [row["ttft_ms"]["p90"] <= limit_ms for row in of_arm]
        num_held = is_held.index(False) if False in is_held else len(rates)
        capacities[arm] = returns.capacity(of_arm[: num_held + 1], limit_ms)
        rows += of_arm
    compared = returns.compared(rows, capacities)
    workload = next(iter(shapes.values()))._asdict() | {"ttft_limit_s": ttft_limit}
    workload |= {"seed": seeds}
    tell(made, machine, commit, {"workload": workload, **compared, "rows": rows})


@main.command()
@click.argument("old", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("new", type=click.Path(path_type=Path, exists=True, dir_okay=False))
def compare(old: Path, new: Path) -> None:
    """Compare the reports OLD and NEW of two commits, seed by seed.

    Each line tells how many of the seeds have the same plans and times, and for each figure the
    mean of the ratios (NEW to OLD) with its 95 % interval. The exit code is 1 if answers per second
    fall below 0.99, or if TTFT p50 or p90 rises above 1.03 and the interval does not contain 1.
    """
    reports = [json.loads(path.read_text()) for path in (old, new)]
    rows = [{(row["arm"], *_case_of(row)): row["by_seed"] for row in it["rows"]} for it in reports]
    if rows[0].keys() != rows[1].keys():
        raise click.ClickException("the reports have other arms, sessions or rates")
    has_failed = False
    for case, of_case in rows[0].items():
        try:
            found = paired(of_case, rows[1][case])
        except ValueError as error:
            raise click.ClickException(str(error)) from error
        has_failed |= is_worse(found)
        arm, name, number = case
        told = {"arm": arm, name: number, "seeds": len(of_case), "worse": is_worse(found)}
        click.echo(json.dumps(told | found))
    raise SystemExit(has_failed)


def _case_of(row: Row) -> tuple[str, float]:
    name = "sessions" if "sessions" in row else "rate"
    return name, row[name]


if __name__ == "__main__":
    main()
