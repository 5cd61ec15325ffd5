"""Compares the times to first token that `tieredkv replay` estimates with those of a real server.

    python -m tests.stress.replay_beside_serve --model random:llama-3.1-8b --disk-dir /nvme/kv

`tieredkv serve --record` serves conversations, which are sent as token ids. They begin at random
moments at a given rate, whether or not the server keeps up. Between two turns a client thinks, for
`--think` seconds in the mean and at most six times as long, so that some prompts are still in VRAM,
others have gone to host memory, and others to disk. When the server has stopped, its recording is
replayed with the sizes that it had and the rates that it has left in the store's folder.

`measured` is what clients saw, `estimated` is what the replay tells, and `estimated_over_measured`
divides the one by the other. A request counts for the slowest tier that it used. `cached_tokens`
leaves out the `recomputed_tokens`, which a slower tier had and which were computed nevertheless;
`found_rate` is the share of both. `by_tier` of `estimated` has the recomputed tokens too.
`answers` has each request with its receipt.

The exit code is 1 if the p50 of all requests differs by more than `--tolerance`, a request failed
or was not recorded, or no request used one of the tiers.
"""

import asyncio
import json
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import httpx

from tests.stress.client import served_by, serving
from tests.stress.sessions_by_url import ANSWER_TIMEOUT_S, Answer, ask, body_of
from tieredkv.bench import raw
from tieredkv.bench.progress import terminal_progress
from tieredkv.bench.sessions import Script, Shape, write_script
from tieredkv.cache.rate_file import read_rates
from tieredkv.errors import ConfigError, TieredKVError
from tieredkv.http_clients import async_http_client
from tieredkv.operate.ask import StoreControl
from tieredkv.operate.calls import Df, EvictFilter
from tieredkv.sizing import replay as replaying
from tieredkv.sizing.estimate import COLD, SOURCES, ttft_ms
from tieredkv.traces import read_trace
from tieredkv.types import Tier

WARM_UPS = 3
Row = dict[str, Any]


class Workload(NamedTuple):
    """What the clients do.

    Attributes:
        duration: seconds in which turns begin.
        rate: conversations that begin in a second.
        think: mean seconds between an answer and the next turn.
        shape: what a conversation looks like.
        vocab_size: token ids are below it.
        seed: of all that is random.
    """

    duration: float
    rate: float
    think: float
    shape: Shape
    vocab_size: int
    seed: int

    def conversations(self) -> list[tuple[float, Script]]:
        """Return when each conversation begins, in seconds, and what is asked in it."""
        generator, at_s, found = random.Random(self.seed), 0.0, list[tuple[float, Script]]()
        while (at_s := at_s + generator.expovariate(self.rate)) < self.duration:
            script = write_script(self.seed, len(found), self.shape, self.vocab_size)
            found.append((at_s, script))
        return found


class Crowd:
    """Clients of a server that has just started.

    Attributes:
        answers: when they asked, in seconds after the first could, and what they were answered.
        problems: what failed.
        began_ms: when the first conversation could begin, in ms since the epoch.
    """

    def __init__(self, url: str, workload: Workload) -> None:
        self.answers, self.problems = list[tuple[float, Answer]](), list[str]()
        self.began_ms = 0.0
        self._url, self._model, self._workload = url, served_by(url), workload

    async def run(self, store: StoreControl) -> None:
        """Warm the server up, empty its tiers, and hold all conversations."""
        options: Row = {"timeout": ANSWER_TIMEOUT_S, "limits": httpx.Limits(max_connections=None)}
        told = [(at_s, self._bodies(each)) for at_s, each in self._workload.conversations()]
        async with async_http_client(self._url, **options) as http:
            shape, vocab_size = self._workload.shape, self._workload.vocab_size
            for number in range(WARM_UPS):
                for _, body in self._bodies(write_script(-1, number, shape, vocab_size)):
                    await ask(http, body)
            store.answer(EvictFilter(all=True))
            self.began_ms, start = 1e3 * time.time(), time.monotonic()
            async with asyncio.TaskGroup() as group:
                for at_s, turns in told:
                    group.create_task(self._hold(http, start, at_s, turns))

    def _bodies(self, script: Script) -> list[tuple[float, bytes]]:
        return [
            (turn.think_s, body_of(self._model, turn.prompt, turn.answer_tokens)) for turn in script
        ]

    async def _hold(
        self, http: httpx.AsyncClient, start: float, at_s: float, turns: list[tuple[float, bytes]]
    ) -> None:
        """Hold one conversation, until the time is over."""
        await asyncio.sleep(start + at_s - time.monotonic())
        for think_s, body in turns:
            await asyncio.sleep(think_s * self._workload.think)
            asked_s = time.monotonic() - start
            if asked_s > self._workload.duration:
                return
            try:
                self.answers.append((asked_s, await ask(http, body)))
            except httpx.HTTPError as error:
                self.problems.append(f"{type(error).__name__}: {error}")
                return


def measured(answers: Sequence[Answer]) -> Row:
    """Return what the clients saw, as `estimated` does."""
    times_s = defaultdict[str, list[float]](list)
    for answer in answers:
        source = next((str(it) for it in reversed(Tier) if answer.receipt[it]), COLD)
        times_s[source].append(answer.times_s[0])
    by_tier = {str(tier): sum(each.receipt[tier] for each in answers) for tier in Tier}
    return _row(
        len(answers),
        sum(each.prompt_tokens for each in answers),
        sum(by_tier.values()),
        sum(each.receipt["recomputed"] for each in answers),
    ) | {"by_tier": by_tier, "ttft_ms": ttft_ms(times_s)}


def estimated(recording: Path, began_ms: float, df: Row, store: Path) -> Row:
    """Return what a replay of the requests since `began_ms` tells.

    Args:
        recording: what the server has recorded.
        began_ms: in ms since the epoch.
        df: what the server has told of its sizes.
        store: folder of its store.

    Raises:
        ConfigError: the server has left no rates, or not all of them.
    """
    progress = terminal_progress(lambda line: click.echo(line, err=True))
    trace = read_trace(recording, progress)
    trace = trace._replace(requests=[it for it in trace.requests if it.timestamp >= began_ms])
    device, host, disk = (df[str(tier)]["bytes_budget"] for tier in Tier)
    token_bytes = df["block_bytes"] // trace.block_tokens
    sizes = replaying.Sizes(device=device, host=host, disk=disk, token_bytes=token_bytes)
    if (rates := read_rates(str(store))) is None:
        raise ConfigError(f"the server has left no rates in `{store}`")
    found = replaying.replay(trace, sizes, progress, rates=rates)
    sooner = found["computed_sooner_tokens"]
    row = _row(found["requests"], found["prompt_tokens"], found["cached_tokens"] - sooner, sooner)
    return row | {key: found[key] for key in ("by_tier", "ttft_ms", "device_load")}


def _row(requests: int, prompt: int, cached: int, recomputed: int) -> Row:
    row: Row = {"requests": requests, "prompt_tokens": prompt, "cached_tokens": cached}
    rates = {"found_rate": (cached + recomputed) / prompt, "hit_rate": cached / prompt}
    return row | {"recomputed_tokens": recomputed} | rates


def ratios(one: Row, other: Row) -> Row:
    """Return times of one divided by those of the other, in all and by source."""
    found: Row = {name: one[name] / other[name] for name in ("p50", "p90")}
    if "by_source" in one:
        known = [it for it in SOURCES if it in one["by_source"] and it in other["by_source"]]
        by_source = {it: ratios(one["by_source"][it], other["by_source"][it]) for it in known}
        found["by_source"] = by_source
    return found


@click.command(help=__doc__)
@click.option("--model", default="random:llama-3.1-8b", show_default=True, help="As for `serve`.")
@click.option("--vocab-size", default=128_000, show_default=True, help="Token ids are below it.")
@click.option("--device-size", default="8GiB", show_default=True, help="KV budget of VRAM.")
@click.option("--host-size", default="8GiB", show_default=True, help="KV budget of host memory.")
@click.option("--disk-size", default="40GiB", show_default=True, help="Budget of the store.")
@click.option(
    "--disk-dir",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Folder in which the store's folder is made. It is removed at the end.",
)
@click.option("--duration", default=180.0, show_default=True, help="Seconds in which turns begin.")
@click.option("--rate", default=0.2, show_default=True, help="Conversations that begin a second.")
@click.option("--think", default=20.0, show_default=True, help="Mean seconds between turns.")
@click.option("--turns", default=5, show_default=True, help="Requests of a conversation.")
@click.option(
    "--scale",
    default=2.0,
    show_default=True,
    help="Prompts are shorter by it than those of `tieredkv bench sessions`.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of all that is random.")
@click.option(
    "--recording",
    type=click.Path(dir_okay=False, path_type=Path),
    help="New file in which the recording is kept. By default it is removed.",
)
@click.option("--tolerance", default=0.2, show_default=True, help="See above.")
@click.option("--commit", help="Commit to report, if the source tree has no git history.")
def main(
    model: str,
    device_size: str,
    host_size: str,
    disk_size: str,
    disk_dir: Path,
    turns: int,
    scale: float,
    recording: Path | None,
    tolerance: float,
    commit: str | None,
    **options: Any,
) -> None:
    workload = Workload(**options, shape=Shape(turns=turns, scale=scale, trace=None))
    disk_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=disk_dir) as made:
        store, recording = Path(made, "store"), recording or Path(made, "recording.jsonl")
        flags = ["--device-size", device_size, "--host-size", host_size, "--disk-size", disk_size]
        flags += ["--disk-dir", str(store), "--record", str(recording)]
        with serving(model, *flags, "--default-retention", "24h") as url:
            crowd, control = Crowd(url, workload), StoreControl(str(store))
            asyncio.run(crowd.run(control))
            df = control.answer(Df())
        if not crowd.answers:
            raise click.ClickException(f"no request was answered: {crowd.problems}")
        was = measured([answer for _, answer in crowd.answers])
        try:
            told = estimated(recording, crowd.began_ms, df, store)
        except TieredKVError as error:
            raise click.ClickException(str(error)) from error
        rates = json.loads((store / "rates.json").read_text())
    over = ratios(told["ttft_ms"], was["ttft_ms"])
    problems = crowd.problems
    if told["requests"] != was["requests"]:
        problems.append(f"{was['requests']} requests were answered, {told['requests']} recorded")
    missing = [it for it in SOURCES if it not in was["ttft_ms"]["by_source"]]
    problems += [f"no request was {it}" if it == COLD else f"none used {it}" for it in missing]
    if abs(over["p50"] - 1) > tolerance:
        problems.append(f"the estimated p50 is {over['p50']:.2f} times the measured one")
    for name, row in ("measured", was), ("estimated", told):
        for line in _described(name, row):
            click.echo(line, err=True)
    report = raw.head(commit, "python -m tests.stress.replay_beside_serve")
    sizes = {str(tier): df[str(tier)]["bytes_budget"] for tier in Tier}
    report |= {"model": model, "bytes": sizes | {"a block": df["block_bytes"]}, "rates": rates}
    report |= {"workload": workload._asdict() | {"shape": workload.shape.workload}}
    report |= {"measured": was, "estimated": told, "estimated_over_measured": over}
    report["answers"] = [
        {"asked_s": asked_s, "prompt_tokens": it.prompt_tokens, "ttft_ms": it.ttft_ms} | it.receipt
        for asked_s, it in sorted(crowd.answers, key=lambda told: told[0])
    ]
    click.echo(json.dumps(report | {"problems": problems}))
    sys.exit(1 if problems else 0)


def _described(name: str, row: Row) -> list[str]:
    """Return lines for people."""
    ttft = row["ttft_ms"]
    all_of_them = {"requests": row["requests"], "p50": ttft["p50"], "p90": ttft["p90"]}
    return [
        f"{name:<10} {source:<7} {each['requests']:>5} requests, "
        f"TTFT p50 {each['p50']:8.1f} ms, p90 {each['p90']:8.1f} ms"
        for source, each in {"all": all_of_them, **ttft["by_source"]}.items()
    ]


if __name__ == "__main__":
    main()
