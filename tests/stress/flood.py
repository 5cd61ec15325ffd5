"""Measures what a tenant that floods the server costs another, who asks little.

    python -m tests.stress.flood --model random:llama-3.1-8b --quiet-tokens 4096 --flood-tokens 6000

The quiet one asks for the same prompt, which VRAM has, again and again; the others are clients of
another tenant that send new prompts of so many tokens without end and want one token of each. All
are plain sockets, the flood's in a process of its own. Parts:

    alone    the flood, before the quiet one has asked for anything: prompts a second
    quiet    the quiet one alone: TTFT in ms
    beside   both: TTFT of the quiet one, prompts a second of the flood

The last two take turns.
"""

import asyncio
import contextlib
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import click

from tests.stress.client import prompts_of, request_of, served_by, serving, stream_one
from tieredkv.bench import raw

QUIET, FLOOD = "sk-quiet", "sk-flood"
VOCABULARY = 256  # every model has as many


def flood(url: str, model: str, length: int, num_clients: int, until: float, seed: int) -> int:
    """Send prompts until a time; return how many were answered before it."""

    def requests(client: int) -> Iterator[bytes]:
        for index in itertools.count():
            [prompt] = prompts_of(1, length, VOCABULARY, (seed, client, index))
            request = request_of(url, model, prompt, 1, FLOOD)
            if time.time() >= until:
                return
            yield request

    async def send() -> int:
        firsts = [stream_one(url, requests(client)) for client in range(num_clients)]
        return sum(len(each) for each in await asyncio.gather(*firsts))

    return asyncio.run(send()) - num_clients  # their last ones end behind it


@click.command(help=__doc__)
@click.option("--model", default="tiny-random")
@click.option("--quiet-tokens", default=1024)
@click.option("--flood-tokens", default=1532)
@click.option("--clients", default=4)
@click.option("--seconds", default=10.0, help="Of a part.")
@click.option("--rounds", default=3)
@click.option("--think-ms", default=0.0, help="Between an answer and the next request.")
@click.option("--block-size", default=16)
@click.option("--commit")
def main(model: str, block_size: int, commit: str | None, **told: Any) -> None:
    length, think_s = told["quiet_tokens"], told["think_ms"] / 1e3
    flags = ("--api-key", QUIET, "--api-key", FLOOD, "--block-size", str(block_size))
    rows: list[dict[str, Any]] = []
    with (
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool,
        serving(model, *flags) as url,
    ):
        pool.submit(abs, 0).result()  # its start is no part of a figure
        name = served_by(url, QUIET)
        [prompt] = prompts_of(1, length, VOCABULARY, "quiet")
        one = request_of(url, name, prompt, 1, QUIET)

        def requests(until: float) -> Iterator[bytes]:
            while time.time() < until:
                time.sleep(think_s)
                yield one

        def ask(until: float) -> list[float]:
            return [round(1e3 * it, 2) for it in asyncio.run(stream_one(url, requests(until)))]

        def send(seed: int) -> tuple[float, Future[int]]:
            until = time.time() + told["seconds"]
            arguments = name, told["flood_tokens"], told["clients"], until, seed
            return until, pool.submit(flood, url, *arguments)

        alone = send(0)[1].result() / told["seconds"]
        ask(time.time() + 2.0)
        for index in range(told["rounds"]):
            row: dict[str, Any] = {"quiet_ms": ask(time.time() + told["seconds"])}
            until, sent = send(1 + index)
            time.sleep(0.5)
            row["beside_ms"] = ask(until)
            row["prompts_a_second"] = sent.result() / told["seconds"]
            rows.append(row)
            for arm in ("quiet", "beside"):
                row |= raw.percentiles_ms(arm, row[f"{arm}_ms"], (50, 95))
            summary = {key: round(it, 1) for key, it in row.items() if isinstance(it, float)}
            click.echo(json.dumps(summary), err=True)
    every = {key: statistics.median(row[key] for row in rows) for key in summary}
    figures = every | {
        "alone_prompts_a_second": alone,
        "times_p50": every["beside_p50_ms"] / every["quiet_p50_ms"],
        "times_p95": every["beside_p95_ms"] / every["quiet_p95_ms"],
    }
    with contextlib.suppress(BrokenPipeError):
        text = "TTFT beside a flood x {times_p50:.2f}, p95 x {times_p95:.2f}"
        click.echo(text.format(**figures))
        head = raw.head(commit, "python -m tests.stress.flood")
        click.echo(json.dumps(head | {"model": model, "told": told, **figures, "rows": rows}))


if __name__ == "__main__":
    main()
