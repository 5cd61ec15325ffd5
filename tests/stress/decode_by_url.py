"""Measures how fast any server with OpenAI's completions API generates, alone and for many.

\b
    python -m tests.stress.decode_by_url --url http://localhost:8000 --server 'vLLM 0.33'

The server must already run; it may be tieredkv, vLLM or another one. A workload `32x2048+256` sends
32 prompts of 2,048 random token ids at once and asks each for 256 tokens. Its figures are tokens a
second, from the first request to the last token, and the times between the tokens of an answer. A
server may send several tokens in one event: `tokens_per_event` says how many.
"""

import asyncio
import json
from time import perf_counter
from typing import Any

import click
import httpx
import numpy as np

from tests.stress.client import Prompt, measures_a_server, prompts_of, served_by
from tests.stress.sessions_by_url import ANSWER_TIMEOUT_S, ask, body_of
from tieredkv.bench import raw
from tieredkv.bench.decode import parse_workload
from tieredkv.http_clients import async_http_client


async def measure(url: str, model: str, prompts: list[Prompt], num_tokens: int) -> dict[str, Any]:
    """Send prompts at once; return the figures of their answers, times in ms."""
    bodies = [body_of(model, prompt, num_tokens) for prompt in prompts]
    options: dict[str, Any] = {"timeout": ANSWER_TIMEOUT_S}
    async with async_http_client(url, **options, limits=httpx.Limits()) as http:
        start = perf_counter()
        answers = await asyncio.gather(*(ask(http, body) for body in bodies))
        took_s = perf_counter() - start
    gaps_ms = np.concatenate([answer.gaps_ms for answer in answers])
    num_events = sum(len(answer.times_s) for answer in answers)
    return {
        "tokens_per_s": len(prompts) * num_tokens / took_s,
        "itl_ms": {f"p{it}": float(np.percentile(gaps_ms, it)) for it in (50, 90, 99)},
        "ttft_ms": {"p50": float(np.median([answer.ttft_ms for answer in answers]))},
        "tokens_per_event": len(prompts) * num_tokens / num_events,
    }


@click.command(help=__doc__)
@measures_a_server
@click.option("--workloads", default="1x2048+256,32x2048+256", show_default=True, help="See above.")
@click.option("--repeats", default=3, show_default=True, help="Runs of each workload.")
def main(
    url: str, name: str, workloads: str, vocab_size: int, repeats: int, commit: str | None
) -> None:
    model, rows = served_by(url), list[dict[str, Any]]()
    for each in map(parse_workload, workloads.split(",")):
        for repeat in range(-1, repeats):
            told = f"{each.requests}x{each.given}+{each.made}"
            asked = each.requests, each.given, vocab_size, (told, repeat)
            row = asyncio.run(measure(url, model, prompts_of(*asked), each.made))
            if repeat < 0:  # the first may compile kernels
                continue
            rows.append({"workload": told, "repeat": repeat, **row})
            rate, itl_ms = row["tokens_per_s"], row["itl_ms"]["p50"]
            click.echo(f"{told}: {rate:.0f} tokens/s, ITL p50 {itl_ms:.2f} ms", err=True)
    report = raw.head(commit, "python -m tests.stress.decode_by_url") | {"server": name}
    click.echo(json.dumps(report | {"model": model, "rows": rows}))


if __name__ == "__main__":
    main()
