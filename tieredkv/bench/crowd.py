"""Many requests at once on one engine, at the times at which clients send them.

`bench returns` and `bench sessions` use this module. It serves requests with token-id prompts in
its own process, without HTTP, and measures what the clients see and what the tiers move. It does
not know how prompts and times are made.

What is read from disk could come from the page cache instead. `page_cache` says whether the worker
reads past it, and `bytes_from_disk` are the bytes that the kernel read from storage for the worker,
beside `bytes_read`, the engine's own count.
"""

import heapq
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from tieredkv.bench import raw, sources
from tieredkv.bench.processes import in_new_process
from tieredkv.bench.sources import WorkerReads
from tieredkv.bench.temporary_keys import temporary_folder, temporary_keys
from tieredkv.bench.ttft import look_up
from tieredkv.cache.link_rate import LinkRate
from tieredkv.config import Settings
from tieredkv.engine.engine_messages import EngineRequest
from tieredkv.engine.llm import LLM
from tieredkv.engine.loader import FoundModel
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.errors import ConfigError, TieredKVError
from tieredkv.operate.ask import StoreControl
from tieredkv.operate.calls import EvictFilter
from tieredkv.types import KVSpec, Progress, Tier
from tieredkv.units import format_bytes

POLL_S = 0.01
HIT_TOKENS = 2048
"""A request that found something and has fewer tokens to compute is a hit in `hit_ttft`."""

MIN_RAM_BYTES = 1 << 20
MIN_DISK_BYTES = 256 << 20
Row = dict[str, Any]
Result = TypeVar("Result")


class Ask(NamedTuple):
    """A request that a client sends.

    Attributes:
        at_s: when it is sent, in seconds after the start.
        client, turn: who sends it, and the how-manieth of the client's requests it is.
        prompt: token ids.
        answer_tokens: length of the answer.
    """

    at_s: float
    client: int
    turn: int
    prompt: Sequence[int]
    answer_tokens: int


class Answer(NamedTuple):
    """An answer as its client saw it.

    Attributes:
        ended_s: when its last token came, in seconds after the start.
        gaps_ms: times between its tokens.
        by_tier: prompt tokens by the tier that they came from.
        recomputed_tokens: prompt tokens that were found and computed nevertheless.
        prediction_error: by which part of the actual time the first token's time was mispredicted;
            None if it was not predicted.
        forecast_kind: what it was expected to wait for, see `cache._forecasts`.
    """

    client: int
    turn: int
    ended_s: float
    ttft_ms: float
    gaps_ms: list[float]
    token_ids: list[int]
    prompt_tokens: int
    by_tier: dict[Tier, int]
    recomputed_tokens: int = 0
    prediction_error: float | None = None
    forecast_kind: str | None = None

    @property
    def is_hit(self) -> bool:
        """Whether it found something and had few tokens to compute; see `HIT_TOKENS`."""
        num_found = sum(self.by_tier.values())
        return num_found > 0 and self.prompt_tokens - num_found < HIT_TOKENS


class Outcome(NamedTuple):
    """What one run gave.

    Attributes:
        wall_s: from the start to the last answer.
        counts: what the cache's counters have grown by; names of nested ones are joined with `.`.
        reading_s: how long a read from disk was under way.
        bytes_from_disk: see `sources.WorkerReads`.
        page_cache: see `sources.page_cache`; None without a disk.
        raw_GBps: rate of the disk, by the best of 4, 16 and 32 threads: the mean of what was
            measured before and after the run; None without O_DIRECT.
        cpu: of the machine.
        num_ahead: blocks that were read for requests that are still queued when the run ends.
        num_stretches: how often the disk began to read; it ended in between.
    """

    answers: list[Answer]
    wall_s: float
    counts: Mapping[str, float]
    reading_s: float
    bytes_from_disk: int | None = None
    page_cache: str | None = None
    raw_GBps: float | None = None
    cpu: str = ""
    num_ahead: int = 0
    num_stretches: int = 0


class WatchedReads(LinkRate):
    """The rate of reads, which also notes for how long a read was under way.

    Attributes:
        reading_s: seconds in which at least one read was under way.
        num_stretches: how often the disk began to read.
    """

    reading_s, num_stretches = 0.0, 0
    _since = 0.0

    def begin(self, num_bytes: int, now: float) -> None:
        if not self.num_bytes:
            self._since, self.num_stretches = now, self.num_stretches + 1
        super().begin(num_bytes, now)

    def end(self, num_bytes: int, now: float, *, teaches: bool = True) -> None:
        super().end(num_bytes, now, teaches=teaches)
        if not self.num_bytes:
            self.reading_s += max(0.0, now - self._since)


class Crowd:
    """One engine that serves requests at given times.

    Args:
        llm: the engine, which nothing else uses while requests are served.
        store_dir: folder of its disk tier; None without one.
        measure_raw: returns the raw rate of the disk in GB/s, or None if it is not known.
    """

    def __init__(
        self,
        llm: LLM,
        store_dir: str | None,
        measure_raw: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.llm, self.core = llm, llm.core
        self._store_dir, self._measure_raw, self._raw_GBps = store_dir, measure_raw, measure_raw()
        self._page_cache = sources.page_cache(Path(store_dir)) if store_dir else None
        link = self.core.parts.tiers.disk_link
        known = link.read_rate
        self._reads = WatchedReads(known.bytes_per_s, known.limit, known.learnt_at)
        link.read_rate = self._reads
        self._num_asked = 0

    def serve(
        self,
        asks: Sequence[Ask],
        follow: Callable[[Answer], Ask | None],
        is_over: Callable[[Answer], bool] = lambda _: False,
    ) -> Outcome:
        """Serve requests until all are answered, or until an answer ends the run.

        Requests that are then not answered are cancelled.

        Args:
            asks: the requests that do not depend on answers.
            follow: returns the request that an answer leads to, if there is one.
            is_over: returns whether an answer ends the run.

        Raises:
            TieredKVError: a request failed.
        """
        core, waiting, answers = self.core, list[tuple[float, int, Ask]](), list[Answer]()
        for ask in asks:
            heapq.heappush(waiting, (ask.at_s, ask.client, ask))
        open_asks: dict[str, Ask] = {}
        tokens: dict[str, list[int]] = {}
        times: dict[str, list[float]] = {}
        core.on_logits = None  # as those who want logits leave it
        before, reading_s = self._counts(), self._reads.reading_s
        num_stretches = self._reads.num_stretches
        worker_reads = WorkerReads(core)
        start, has_ended = time.perf_counter(), False
        while not has_ended:
            now = time.perf_counter() - start
            while waiting and waiting[0][0] <= now:
                ask = heapq.heappop(waiting)[-1]
                name = self._submit(ask)
                open_asks[name], tokens[name], times[name] = ask, [], []
            outputs, now = core.step(), time.perf_counter() - start
            for output in outputs:
                name = output.request_id
                if output.finish_reason == "error":
                    raise TieredKVError(f"a request failed: {output.error}")
                if name not in open_asks:
                    continue
                tokens[name] += output.token_ids
                times[name] += [now] * len(output.token_ids)
                if output.finish_reason is None:
                    continue
                usage = output.usage
                assert usage is not None
                ask, at = open_asks.pop(name), times.pop(name)
                answer = Answer(
                    client=ask.client,
                    turn=ask.turn,
                    ended_s=now,
                    ttft_ms=1e3 * (at[0] - ask.at_s),
                    gaps_ms=(1e3 * np.diff(at)).tolist(),
                    token_ids=tokens.pop(name),
                    prompt_tokens=usage.prompt_tokens,
                    by_tier=usage.cached_tokens_by_tier,
                    recomputed_tokens=usage.recomputed_tokens,
                    prediction_error=usage.prediction_error,
                    forecast_kind=usage.forecast_kind,
                )
                answers.append(answer)
                has_ended = has_ended or is_over(answer)
                if (following := follow(answer)) is not None:
                    heapq.heappush(waiting, (following.at_s, following.client, following))
            has_ended = has_ended or not (waiting or open_asks)
            if not has_ended:
                left_s = waiting[0][0] - now if waiting else POLL_S
                core.wait(min(POLL_S, max(0.0, left_s)))
        after = self._counts()
        counts = {name: count - before.get(name, 0) for name, count in after.items()}
        outcome = Outcome(
            answers,
            now,
            counts,
            self._reads.reading_s - reading_s,
            worker_reads.num_bytes(),
            self._page_cache,
            cpu=str(raw.hardware()["cpu"]),
            num_ahead=self._num_ahead(),
            num_stretches=self._reads.num_stretches - num_stretches,
        )
        self.settle()
        return outcome._replace(raw_GBps=self._raw_beside())

    def settle(self) -> None:
        """Cancel all requests, and step until no block moves between tiers."""
        self.core.abort_all()
        while self.core.has_work:
            self.core.step()
            self.core.wait(POLL_S)

    def empty(self) -> None:
        """Drop all blocks from all tiers.

        Raises:
            TieredKVError: the store did not carry it out.
        """
        self.settle()
        self.core.verbs.evict()
        if self._store_dir is None:
            return
        errors: list[Exception] = []

        def ask() -> None:
            try:
                StoreControl(str(self._store_dir)).answer(EvictFilter(all=True))
            except Exception as error:  # raised again below, by the thread that waits
                errors.append(error)

        # The store asks the engine too, so that the engine has to step meanwhile.
        thread = threading.Thread(target=ask, name="bench-evict", daemon=True)
        thread.start()
        while thread.is_alive():
            self.core.step()
            self.core.wait(POLL_S)
        if errors:
            raise TieredKVError(f"the store could not be emptied: {errors[0]}") from errors[0]

    def _submit(self, ask: Ask) -> str:
        name = f"bench-{self._num_asked}"
        self._num_asked += 1
        params = SamplingParams(
            max_tokens=ask.answer_tokens, temperature=0.0, repetition_penalty=1.0, ignore_eos=True
        )
        request = EngineRequest(request_id=name, prompt_token_ids=list(ask.prompt), params=params)
        self.core.add_request(request)
        return name

    def _raw_beside(self) -> float | None:
        """Measure the disk after a run; return the mean of its rate before and after."""
        before, self._raw_GBps = self._raw_GBps, self._measure_raw()
        if before is None or self._raw_GBps is None:
            return None
        return (before + self._raw_GBps) / 2

    def _num_ahead(self) -> int:
        tiers = self.core.parts.tiers
        pages = tiers.host.find(tiers.prefetched)
        return sum(1 for page in pages if page and page.is_ready and page.source is Tier.DISK)

    def _counts(self) -> dict[str, float]:
        return dict(_flat(self.core.tier_stats.read()["counters"]))


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of nested tables and lists, each with its path."""
    if isinstance(value, int | float):
        yield name, value
        return
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _flat(each, f"{name}.{key}" if name else str(key))


@contextmanager
def engine(settings: Row, arm: str, folder: Path, progress: Progress) -> Iterator[Crowd]:
    """Run an engine as an arm wants it; with a disk tier, all that it serves is kept for `24h`.

    The raw rate of the disk is measured before and after each run. What RAM holds at the end is
    dropped, since the store is removed.
    """
    with ExitStack() as stack:
        disk = raw.RawDisk(folder, _raw_bytes(), raw.BEST_THREADS)
        stack.callback(disk.close)
        store_dir = None
        if arm != "no_disk":
            store_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix=arm, dir=folder))
        told = settings | arm_settings(arm, store_dir)
        if store_dir is not None:
            told |= temporary_keys(f"{store_dir}-keys")
        llm = stack.enter_context(LLM(**told, progress=progress))
        stack.callback(llm.core.verbs.evict)
        stack.callback(llm.core.abort_all)
        yield Crowd(llm, store_dir, disk.best_GBps)


def _raw_bytes() -> int:
    return (1 << 30) if torch.cuda.is_available() else (32 << 20)


def arm_settings(arm: str, store_dir: str | None) -> Row:
    """Return the settings in which an arm differs from others; one without a disk has no folder."""
    restore = "load" if arm == "load" else "auto"
    retention = "24h" if store_dir else "in_memory"
    return {"restore": restore, "default_retention": retention, "disk_dir": store_dir}


class Plan(NamedTuple):
    """What a bench will run, checked.

    Attributes:
        settings: those given by the user, and the size of each tier.
        most_tokens: a prompt and its answer may have, by the model and by VRAM.
    """

    found: FoundModel
    kv_spec: KVSpec
    settings: Row
    most_tokens: int

    @property
    def facts(self) -> Row:
        """The report's entries about the model and the tiers."""
        facts = {"model": self.found.name, "dtype": self.found.dtype}
        names = ("device_size", "host_size", "disk_size")
        sizes = {name: self.settings[name] for name in names}
        return {**facts, "block_size": self.kv_spec.block_size, **sizes}

    def num_tokens(self, tier: Tier) -> int:
        """Return how many tokens a tier has room for."""
        size: int = self.settings[f"{tier}_size"]
        return size // self.kv_spec.token_bytes


def plan(settings: Row, tokens: Mapping[Tier, float], longest_tokens: int, hint: str) -> Plan:
    """Find the model and size the tiers, before anything is measured.

    Args:
        settings: as given by the user.
        tokens: that each tier has room for unless its size is given.
        longest_tokens: of a prompt with its answer.
        hint: how to make prompts shorter.

    Raises:
        ConfigError: `disk_dir` has too little space, a setting is out of range,
            or the longest prompt does not fit the model or VRAM.
        ConfigError: `disk_dir` is not a folder and cannot be made.
    """
    found, spec = look_up(settings, max_context_len=settings.get("max_model_len"))
    least = {Tier.DISK: MIN_DISK_BYTES}
    sizes = {
        f"{tier}_size": max(least.get(tier, MIN_RAM_BYTES), int(count) * spec.token_bytes)
        for tier, count in tokens.items()
    }
    made = Plan(found, spec, sizes | settings, 0)
    Settings(**made.settings)  # refuses what is out of range
    device_tokens = made.num_tokens(Tier.DEVICE)
    rooms = {"the model takes": found.max_model_len, "`device_size` holds": device_tokens}
    for what, room in rooms.items():
        if longest_tokens > room:
            text = f"a prompt and its answer have up to {longest_tokens} tokens, but {what} {room}"
            raise ConfigError(f"{text}\nhint: {hint}")
    where = settings.get("disk_dir") or tempfile.gettempdir()
    free_bytes = shutil.disk_usage(where).free
    if free_bytes < made.settings["disk_size"]:
        size, free = map(format_bytes, (made.settings["disk_size"], free_bytes))
        text = f"`disk_size` = {size}, but `{where}` has {free} free"
        raise ConfigError(f"{text}\nhint: give `--disk-dir` or a smaller `--disk-size`")
    return made._replace(most_tokens=min(rooms.values()))


def run_arms(
    settings: Row, arms: Sequence[str], measure: Callable[..., Result], *arguments: Any
) -> tuple[dict[str, Result], list[str]]:
    """Call `measure(settings, arm, folder, *arguments)` in a new process for each arm.

    The folder, which has the arm's store, is made under `disk_dir` and removed at the end. If one
    arm at least was measured, an interruption only leaves out the others.

    Returns:
        What the calls returned by arm, and what was left out.

    Raises:
        TieredKVError: a process failed.
    """
    results, problems = dict[str, Result](), list[str]()
    with temporary_folder(settings.get("disk_dir")) as name:
        for arm in arms:
            try:
                results[arm] = in_new_process(measure, settings, arm, Path(name), *arguments)
            except KeyboardInterrupt:
                if not results:
                    raise
                left = ", ".join(each for each in arms if each not in results)
                problems.append(f"interrupted, so that these arms were not measured: {left}")
                break
    return results, problems


def tell(stage: str, outcome: Outcome) -> None:
    """Write the main figures of a run to stderr, since the report comes only after the last run."""
    times_ms = [answer.ttft_ms for answer in outcome.answers]
    p50_ms, p90_ms = raw.percentiles(times_ms, (50, 90)).values()
    speed = f"{len(times_ms)} answers, {len(times_ms) / outcome.wall_s:.2f} a second"
    ttft = f"TTFT p50 {p50_ms:.0f} ms, p90 {p90_ms:.0f} ms"
    print(f"{stage}: {speed}, {ttft}", file=sys.stderr, flush=True)
