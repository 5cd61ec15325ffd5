"""Measures how much the HTTP server costs over the bare engine.

\b
    python -m tests.stress.server_overhead --model random:llama-3.1-8b --requests 128

Two arms are compared. In both, the engine runs in a process of its own:

\b
    bare         this process speaks to the engine over the socket that the server uses; no text is
                 made of the tokens
    server       `tieredkv serve` runs in another process; clients in processes of their own stream
                 from it over HTTP

Two figures are measured in each arm:

\b
    ttft         time to the first token of a prompt that is cached in VRAM, one request at a time:
                 p50 in ms
    throughput   output tokens per second of many requests at once

The bare engine is measured before and after the server, so that a machine that becomes faster or
slower meanwhile affects both arms.
"""

import asyncio
import contextlib
import json
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import click

from tests.stress.client import prompts_of, request_of, served_by, serving, stream_one
from tieredkv.bench import raw
from tieredkv.config import load_settings
from tieredkv.engine.engine_messages import EngineRequest, TokenOutput
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.server.engine_client import EngineClient
from tieredkv.types import ignore_progress


async def bare_one(engine: EngineClient, prompt: list[int], num_tokens: int, name: str) -> float:
    """Serve a request to its end; return the seconds to its first token."""
    queue: asyncio.Queue[TokenOutput] = asyncio.Queue()
    start, first = time.perf_counter(), 0.0
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    engine.submit(
        EngineRequest(request_id=name, prompt_token_ids=prompt, params=params), queue.put_nowait
    )
    while True:
        output = await queue.get()
        assert output.error is None, output.error
        if output.token_ids and not first:
            first = time.perf_counter() - start
        if output.finish_reason is not None:
            return first


def http_load(url: str, requests: list[bytes]) -> tuple[float, float]:
    """Send requests at once; return when they began and ended. Runs in a process of its own."""

    async def send() -> None:
        await asyncio.gather(*(stream_one(url, [each]) for each in requests))

    begin = time.time()
    asyncio.run(send())
    return begin, time.time()


class Arms:
    """The two arms, which use the same model and settings."""

    def __init__(self, settings: dict[str, Any], told: dict[str, Any]) -> None:
        self.settings, self.told = settings, told

    async def bare(self) -> dict[str, Any]:
        told, rows = self.told, dict[str, Any]()
        settings = load_settings(arguments=self.settings).settings
        engine = EngineClient(settings, on_progress=ignore_progress)
        try:
            info = await engine.ready()
            [prompt] = prompts_of(1, told["prompt_tokens"], info.vocab_size, 1)
            await bare_one(engine, prompt, 8, "warm")
            times = [
                await bare_one(engine, prompt, 8, f"ttft-{i}") for i in range(told["repeats"] * 4)
            ]
            rows["ttft_ms"] = [1e3 * it for it in times]
            rows["tok_s"] = []
            for repeat in range(told["repeats"]):
                many = prompts_of(told["requests"], 64, info.vocab_size, 2 + repeat)
                start = time.perf_counter()
                names = [f"{repeat}-{i}" for i in range(len(many))]
                each = zip(many, names, strict=True)
                await asyncio.gather(
                    *(bare_one(engine, it, told["output_tokens"], name) for it, name in each)
                )
                took = time.perf_counter() - start
                rows["tok_s"].append(told["requests"] * told["output_tokens"] / took)
            rows["vocab_size"] = info.vocab_size
        finally:
            await engine.shutdown(1.0)
        return rows

    def server(self, vocab_size: int, pool: ProcessPoolExecutor) -> dict[str, Any]:
        told, rows = self.told, dict[str, Any](tok_s=[])
        size = str(self.settings["block_size"])
        with serving(self.settings["model"], "--block-size", size) as url:
            model = served_by(url)
            [prompt] = prompts_of(1, told["prompt_tokens"], vocab_size, 1)
            one = request_of(url, model, prompt, 8)
            firsts = asyncio.run(stream_one(url, [one] * (told["repeats"] * 4 + 1)))
            rows["ttft_ms"] = [1e3 * it for it in firsts[1:]]
            for repeat in range(told["repeats"]):
                many = prompts_of(told["requests"], 64, vocab_size, 2 + repeat)
                asked = [request_of(url, model, each, told["output_tokens"]) for each in many]
                share = [asked[i :: told["clients"]] for i in range(told["clients"])]
                futures = [pool.submit(http_load, url, each) for each in share]
                done = [future.result() for future in futures]
                took = max(end for _, end in done) - min(begin for begin, _ in done)
                rows["tok_s"].append(told["requests"] * told["output_tokens"] / took)
        return rows


@click.command(help=__doc__)
@click.option("--model", default="tiny-random", show_default=True, help="As for `serve`.")
@click.option("--prompt-tokens", default=1024, show_default=True, help="Tokens of the TTFT prompt.")
@click.option("--requests", default=128, show_default=True, help="Requests at once (throughput).")
@click.option("--output-tokens", default=256, show_default=True, help="Tokens of each request.")
@click.option("--clients", default=4, show_default=True, help="Client processes of the server arm.")
@click.option("--repeats", default=5, show_default=True, help="Runs; 4 times as many of TTFT.")
@click.option("--block-size", default=16, show_default=True, help="Tokens of a block.")
@click.option("--once", is_flag=True, help="Measure the bare engine only before the server.")
@click.option("--commit", help="Commit to report, if the source tree has no git history.")
def main(model: str, block_size: int, commit: str | None, once: bool, **told: Any) -> None:
    settings = {"model": model, "block_size": block_size, "host_size": 1 << 30}
    arms = Arms(settings, told)
    with ProcessPoolExecutor(told["clients"], mp_context=get_context("spawn")) as pool:
        list(pool.map(abs, range(told["clients"])))  # start the processes before the measurement
        bare = asyncio.run(arms.bare())
        server = arms.server(bare["vocab_size"], pool)
        if not once:
            again = asyncio.run(arms.bare())
            bare["ttft_ms"] += again["ttft_ms"]
            bare["tok_s"] += again["tok_s"]
    median = statistics.median
    overhead_ms = median(server["ttft_ms"]) - median(bare["ttft_ms"])
    ratio = median(server["tok_s"]) / median(bare["tok_s"])
    figures = {"ttft_overhead_ms": overhead_ms, "throughput_ratio": ratio}
    with contextlib.suppress(BrokenPipeError):
        click.echo(f"TTFT + {overhead_ms:.2f} ms, throughput x {ratio:.3f}")
        report = raw.head(commit, "python -m tests.stress.server_overhead") | {
            "model": model,
            "told": told,
            **figures,
        }
        click.echo(json.dumps(report | {"bare": bare, "server": server}))


if __name__ == "__main__":
    main()
