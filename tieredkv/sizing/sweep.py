"""Replays a trace with other sizes, one tier at a time, and tells what more of each would find."""

import dataclasses
import multiprocessing
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, NamedTuple

from tieredkv.sizing.replay import UNLIMITED, Json, Sizes, replay
from tieredkv.traces import Trace
from tieredkv.types import Progress, ignore_progress
from tieredkv.units import format_bytes, format_duration

GIB = 1 << 30
FACTORS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, UNLIMITED)
"""Sizes to try, in units of the size that is given."""

RETENTIONS_S = (60.0, 300.0, 600.0, 1800.0, 3600.0, 86_400.0)
STEP = 0.1
"""How much more of a tier is tried, as a share of it, to see what a little more would find."""

LEAST_STEP_BYTES = 10 * GIB
"""The least step, so that it is not one of a few blocks."""

SMALL_BYTES = 64 * GIB
"""Where a tier has no size to start from, sizes in units of this are tried."""

TIERS = {"vram": "device", "host": "host", "disk": "disk"}
"""The tiers by their options, and the fields of `Sizes`."""

NAMES = {"vram": "VRAM", "host": "host memory", "disk": "disk"}


class Case(NamedTuple):
    """One replay of a sweep.

    Attributes:
        swept: what differs from the sizes that were given: a tier, `retention`, or nothing.
        sizes: of this replay.
        is_step: whether it is the one that shows what a little more of the tier would find.
    """

    swept: str
    sizes: Sizes
    is_step: bool = False


class Sweep(NamedTuple):
    """What a sweep has found.

    Attributes:
        rows: the figures of each case.
        gains: what the next GiB of each tier would buy.
        sentence: the same for people.
        is_interrupted: whether some cases were left out.
    """

    rows: list[Json]
    gains: list[Json]
    sentence: str
    is_interrupted: bool


def cases(sizes: Sizes) -> list[Case]:
    """Return the replays of a sweep around some sizes."""
    made = [Case("", sizes)]

    def other(field: str, size: float) -> Sizes:
        changed: dict[str, Any] = {field: size}
        return dataclasses.replace(sizes, **changed)

    for option, field in TIERS.items():
        size = getattr(sizes, field)
        unit = size if 0 < size < UNLIMITED else SMALL_BYTES
        tried = dict.fromkeys(unit * each if each else 0.0 for each in FACTORS)
        made += [Case(option, other(field, each)) for each in tried if each != size]
        if size < UNLIMITED:
            more = size + max(STEP * size, LEAST_STEP_BYTES)
            made.append(Case(option, other(field, more), is_step=True))
    for seconds in RETENTIONS_S:
        if sizes.policies or seconds != sizes.retention_s:
            idle_s = min(sizes.idle_s, seconds)
            kept = dataclasses.replace(sizes, retention_s=seconds, idle_s=idle_s, policies=())
            made.append(Case("retention", kept))
    return made


def sweep(trace: Trace, sizes: Sizes, progress: Progress, *, num_jobs: int = 1) -> Sweep:
    """Replay all cases; if that is interrupted, the rows are those of the cases that have ended."""
    if all(request.retention is None for request in trace.requests):
        sizes = dataclasses.replace(sizes, policies=())
    made = cases(sizes)
    found: dict[int, Json] = {}
    is_interrupted = False
    progress("replaying", 0, len(made))
    try:
        for number, document in _replayed(trace, made, num_jobs):
            if document["interrupted"]:
                raise KeyboardInterrupt
            found[number] = document
            progress("replaying", len(found), len(made))
    except KeyboardInterrupt:
        is_interrupted = True
    finally:
        progress("replaying", 1, 1)
    rows = [_row(made[number], found[number]) for number in sorted(found)]
    gains = _gains(rows)
    told = sentence(gains)
    if not any(case.is_step for case in made):
        told = "No tier has a limit, so that more of it would buy nothing."
    return Sweep(rows, gains, told, is_interrupted)


def _replayed(trace: Trace, made: Sequence[Case], num_jobs: int) -> Iterable[tuple[int, Json]]:
    """Yield each case's number and figures, in any order."""
    if num_jobs == 1:
        for number, case in enumerate(made):
            yield number, replay(trace, case.sizes, ignore_progress)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_jobs, spawn, _begin, (trace,)) as pool:
        futures = {pool.submit(_replay, case.sizes): i for i, case in enumerate(made)}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)


_given: list[Trace] = []  # the trace of a process of a sweep


def _begin(trace: Trace) -> None:
    _given[:] = [trace]


def _replay(sizes: Sizes) -> Json:
    return replay(_given[0], sizes, ignore_progress)


def _row(case: Case, document: Json) -> Json:
    """Return the figures of one case, with what differs first."""
    size = {
        **{option: document[f"{option}_bytes"] for option in TIERS},
        "retention": document["retention_s"],
    }.get(case.swept)
    by_tier = document["by_tier"]
    total = document["prompt_tokens"] or 1
    hours = document["span_s"] / 3600
    return {
        "swept": case.swept or "given",
        "value": size,
        "is_step": case.is_step,
        "hit_rate": document["hit_rate"],
        "cached_tokens": document["cached_tokens"],
        **{f"{tier}_rate": round(count / total, 6) for tier, count in by_tier.items()},
        "prefilled_tokens": document["prefilled_tokens"],
        "cached_tokens_per_hour": round(document["cached_tokens"] / hours) if hours else None,
        "wear_bytes_per_day": document["wear_bytes_per_day"],
        "age_at_eviction_p50_s": document["age_at_eviction_s"]["p50"],
        **{f"{option}_bytes": document[f"{option}_bytes"] for option in TIERS},
        "retention_s": document["retention_s"],
        "requests_by_retention": document["requests_by_retention"],
    }


def _gains(rows: Sequence[Json]) -> list[Json]:
    """Return what a GiB more of each tier would save."""
    base = next((row for row in rows if row["swept"] == "given"), None)
    gains = list[Json]()
    for row in rows:
        if not row["is_step"] or base is None or base["cached_tokens_per_hour"] is None:
            continue
        option = row["swept"]
        added_GiB = (row[f"{option}_bytes"] - base[f"{option}_bytes"]) / GIB
        per_hour = (row["cached_tokens_per_hour"] - base["cached_tokens_per_hour"]) / added_GiB
        points = 100 * (row["hit_rate"] - base["hit_rate"]) / added_GiB
        ram_rates = [each["device_rate"] + each["host_rate"] for each in (row, base)]
        gains.append(
            {
                "tier": option,
                "measured_over_GiB": added_GiB,
                "tokens_per_hour_per_GiB": round(per_hour),
                "points_per_GiB": round(points, 4),
                "ram_points_per_GiB": round(100 * (ram_rates[0] - ram_rates[1]) / added_GiB, 4),
            }
        )
    return gains


def sentence(gains: Sequence[Json]) -> str:
    """Say what the next GiB of each tier would buy."""
    if not gains:
        return "What the next GiB would buy is not known."
    parts = []
    for each in gains:
        what = f"{each['points_per_GiB']:.3g} percentage points"
        if each["points_per_GiB"] < each["ram_points_per_GiB"]:
            what += f", and {each['ram_points_per_GiB']:.3g} found in RAM rather than on disk"
        tokens = f"{each['tokens_per_hour_per_GiB']:,} tokens of computing an hour"
        parts.append(f"{NAMES[each['tier']]} {tokens} ({what})")
    *rest, last = parts
    joined = f"{', of '.join(rest)}, and of {last}" if rest else last
    return f"The next GiB would save, of {joined}."


def table(rows: Sequence[Json]) -> list[dict[str, object]]:
    """Return the rows for people, without the steps."""
    return [
        {
            "swept": row["swept"],
            "value": _value(row),
            "hit_%": f"{100 * row['hit_rate']:.2f}",
            **{name: f"{100 * row[f'{tier}_rate']:.2f}" for name, tier in TIERS.items()},
        }
        for row in rows
        if not row["is_step"]
    ]


def _value(row: Json) -> str:
    if row["swept"] == "given":
        return "-"
    value = row["value"]
    if value is None:
        return "unlimited"
    if row["swept"] == "retention":
        return format_duration(value)
    return format_bytes(int(value))


def curves(rows: Sequence[Json]) -> tuple[list[Json], list[Json]]:
    """Return the points of the plot over the tiers' sizes, and of the one over retentions.

    Sizes are told as multiples of the given one, so that all tiers share an axis.
    """
    base = next((row for row in rows if row["swept"] == "given"), None)
    by_size, by_time = list[Json](), list[Json]()
    if base is None:
        return by_size, by_time
    for row in rows:
        if row["hit_rate"] is None or row["is_step"]:
            continue
        percent = {
            "found_percent": round(100 * row["hit_rate"], 4),
            "found_in_RAM_percent": round(100 * (row["device_rate"] + row["host_rate"]), 4),
        }
        for option in TIERS if row is base else {row["swept"]} & TIERS.keys():
            size, unit = row[f"{option}_bytes"], base[f"{option}_bytes"] or SMALL_BYTES
            if size:  # the axis is logarithmic
                name = f"{NAMES[option]} (1 is {format_bytes(int(unit))})"
                by_size.append({"tier": name, "times_its_size": size / unit, **percent})
        has_one = row["retention_s"] and not row["requests_by_retention"]
        if row["swept"] in ("given", "retention") and has_one:
            minutes = round(row["retention_s"] / 60, 2)
            by_time.append({"tier": "all tiers", "retention_in_minutes": minutes, **percent})
    by_size.sort(key=lambda each: each["times_its_size"])
    by_time.sort(key=lambda each: each["retention_in_minutes"])
    return by_size, by_time


PANELS = (("found_percent",), ("found_in_RAM_percent",))
"""What both plots show."""
