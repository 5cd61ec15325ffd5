"""Measures what dividing a request between computing and loading costs, wherever its blocks lie.

    python -m tests.stress.split_cost

Each case is one request of an 8B model, of which VRAM, host memory and the disk have blocks, and
nobody has some. Times are processor time of the thread, the least of so many: of a first plan, and
of the next ones, which find what the first one took apart. The calls that ask for the time of a
part of the prompt are counted as well. Bar: no plan takes more than 0.3 ms.
"""

import json
import random
import time
from collections.abc import Callable
from typing import Any

import click

from tieredkv.bench import raw
from tieredkv.cache.plan import Demand, LinkLoad, LinkState, Planner
from tieredkv.cache.step_times import PromptTimes, StepTimes
from tieredkv.cache.stretches import stretches

BLOCK_SIZE, BLOCK_BYTES = 16, 2 << 20
BAR_US = 300.0
LINKS = (
    LinkState(20e9, BLOCK_BYTES, busy_s=1e-3, latency_s=1e-4, is_steady=True),
    LinkState(3e9, BLOCK_BYTES, busy_s=0.01, latency_s=5e-3, through=0),
)
STEPS = StepTimes(2e-3, 2e-5, 6e-10, 1e-9, 6e-3)

Row = dict[str, Any]


def runs(*tiers: str) -> Callable[[int], str]:
    """Have each tier hold one run of blocks, all of the same length."""
    return lambda num_blocks: "".join(it * -(-num_blocks // len(tiers)) for it in tiers)


def in_turn(tiers: str) -> Callable[[int], str]:
    """Have the tiers hold one block each in turn."""
    return lambda num_blocks: tiers * -(-num_blocks // len(tiers))


def scattered(num_blocks: int) -> str:
    """Have each block anywhere."""
    return "".join(random.Random(1).choices("vhd-", k=num_blocks))


CASES: dict[str, Callable[[int], str]] = {
    "nothing to load": runs("-"),
    "on disk": runs("d"),
    "in host memory": runs("h"),
    "the head in host memory, the rest on disk": runs("h", "d"),
    "the head on disk, the rest in host memory": runs("d", "h"),
    "VRAM, host memory and disk in a row": runs("v", "h", "d"),
    "VRAM and disk in turn": in_turn("vd"),
    "host memory and disk in turn": in_turn("hd"),
    "VRAM, host memory and disk in turn": in_turn("vhd"),
    "VRAM, host memory, disk and none in turn": in_turn("vhd-"),
    "anywhere": scattered,
}


def demand(name: str, num_tokens: int, *, is_begun: bool) -> Demand:
    """Return the request of one case.

    Args:
        name: of the case.
        num_tokens: of the request.
        is_begun: whether the last blocks on disk were asked for, and a copy is under way.
    """
    where = CASES[name](num_tokens // BLOCK_SIZE)[: num_tokens // BLOCK_SIZE]
    of = {tier: [i for i, at in enumerate(where) if at == tier] for tier in "vhd"}
    num_left = max(0, len(of["d"]) - 200) if is_begun else len(of["d"])
    loads = [
        LinkLoad(0, of["h"], is_bringing=is_begun),
        LinkLoad(1, of["d"][:num_left], of["d"][num_left:]),
    ]
    loaded_to = len(where) if is_begun else 0
    return Demand(0, num_tokens + 64, loads, is_begun, loaded_to, stretches(of["v"]))


class Counted(PromptTimes):
    """Counts how often a plan asks for the time of a part."""

    num_calls = 0

    def __call__(self, begin: int, end: int) -> float:
        Counted.num_calls += 1
        return super().__call__(begin, end)


def planner(times: type[PromptTimes] = PromptTimes) -> Planner:
    """Return a planner that finds everything busy, and others that wait for the device."""
    prompt = times(STEPS, 2048)
    return Planner(LINKS, prompt, BLOCK_SIZE, 0.01, least_tokens=200)


def num_calls(asked: Demand) -> int:
    """Return how often a plan asks for the time of a part of the prompt."""
    Counted.num_calls = 0
    planner(Counted).split(asked)
    return Counted.num_calls


def measure(name: str, num_tokens: int, *, is_begun: bool, repeats: int) -> Row:
    """Measure one case."""
    first_us, next_us = list[float](), list[float]()
    for _ in range(repeats):
        asked = demand(name, num_tokens, is_begun=is_begun)
        for found in (first_us, next_us):
            planning, start = planner(), time.thread_time()
            planning.split(asked)
            found.append(1e6 * (time.thread_time() - start))
    row = {"case": name, "tokens": num_tokens, "is_begun": is_begun}
    row |= {"first_us": round(min(first_us), 1), "next_us": round(min(next_us), 1)}
    return row | {"calls": num_calls(asked)}


@click.command()
@click.option("--tokens", default="4096,65536", show_default=True)
@click.option("--repeats", default=200, show_default=True, help="Plans; the fastest counts.")
@click.option("--commit", help="Commit to report, for a tree without its history.")
def main(tokens: str, repeats: int, commit: str | None) -> None:
    """Measure what dividing a request costs; print JSON."""
    rows = [
        measure(name, int(count), is_begun=is_begun, repeats=repeats)
        for name in CASES
        for count in tokens.split(",")
        for is_begun in (False, True)
    ]
    head = raw.head(commit, "python -m tests.stress.split_cost")
    is_met = all(row["first_us"] <= BAR_US for row in rows)
    click.echo(json.dumps(head | {"bar_us": BAR_US, "is_met": is_met, "rows": rows}))


if __name__ == "__main__":
    main()
