"""Measures how much a tenant that floods the server delays a tenant that sends few requests.

\b
    python -m tests.stress.flood --model random:llama-3.1-8b --quiet-tokens 4096 --flood-tokens 6000

The quiet tenant sends the same prompt again and again; its blocks are cached in VRAM. The flood is
several clients of another tenant. They send new prompts without a pause and ask for one token each.
All clients use plain sockets, and those of the flood run in a process of their own. Parts:

\b
    alone    only the flood, before the first request of the quiet tenant: prompts per second
    quiet    only the quiet tenant: TTFT in ms
    beside   both at once: TTFT of the quiet tenant, prompts per second of the flood

The parts `quiet` and `beside` alternate.
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
VOCABULARY = 256  # every model has at least as many tokens


def flood(url: str, model: str, length: int, num_clients: int, until: float, seed: int) -> int:
    """Send prompts until a moment; return how many were answered before it."""

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

    return asyncio.run(send()) - num_clients  # each client's last prompt ends after that moment


@click.command(help=__doc__)
@click.option("--model", default="tiny-random", show_default=True, help="As for `serve`.")
@click.option("--quiet-tokens", default=1024, show_default=True, help="Tokens of the quiet prompt.")
@click.option("--flood-tokens", default=1532, show_default=True, help="Tokens of a flood prompt.")
@click.option("--clients", default=4, show_default=True, help="Clients of the flood.")
@click.option("--seconds", default=10.0, show_default=True, help="Length of a part.")
@click.option("--rounds", default=3, show_default=True, help="Rounds of `quiet` and `beside`.")
@click.option(
    "--think-ms", default=0.0, show_default=True, help="Pause of the quiet tenant after an answer."
)
@click.option("--block-size", default=16, show_default=True, help="Tokens of a block.")
@click.option("--commit", help="Commit to report, if the source tree has no git history.")
def main(model: str, block_size: int, commit: str | None, **told: Any) -> None:
    length, think_s = told["quiet_tokens"], told["think_ms"] / 1e3
    flags = ("--api-key", QUIET, "--api-key", FLOOD, "--block-size", str(block_size))
    rows: list[dict[str, Any]] = []
    with (
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool,
        serving(model, *flags) as url,
    ):
        pool.submit(abs, 0).result()  # start the process before the measurement
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
