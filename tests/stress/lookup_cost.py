"""Measures what looking up a prompt costs, of models with and without recurrent states or windows.

    python -m tests.stress.lookup_cost --model random:qwen3.6-35b-a3b-fp8

The cache is the real one, on the modelled machine, where no bytes move: a request arrives, is
admitted once its lookups have ended, and ends. A prompt is found nowhere, in VRAM, in
host memory or on disk; the disk has told all that it has, or answers what it is asked. The same is
measured of a model whose prompt has as many blocks and no further pages. Times are processor time
of the thread, the least of so many: of hashing the prompt's blocks, and from its arrival until it
has its blocks. The prompt has 32,768 tokens and one to be computed. Bar: both together take at most
1.2 times as long.
"""

import json
import random
import time
from collections.abc import Iterator
from typing import Any

import click

from tests.modelled import H200_8B, ModelledCore, VirtualTime
from tieredkv.bench import raw
from tieredkv.config import load_settings
from tieredkv.engine.engine_messages import EngineRequest
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.types import Tier

PLAIN = "random:llama-3.1-8b"
PARAMS = SamplingParams(max_tokens=1, temperature=0.0)
PLACES = ("nowhere", "device", "host", "disk")
BAR = 1.2

Row = dict[str, Any]

SIZES = {"device_size": "16GiB", "host_size": "16GiB", "disk_size": "32GiB"}
"""With room for the prompt's blocks of either model."""


def open_core(model: str, block_size: int, time_: VirtualTime) -> ModelledCore:
    """Return an engine on a modelled machine."""
    told = {"model": model, "block_size": block_size, "default_retention": "24h"}
    settings = load_settings(arguments=told | SIZES | {"disk_dir": "modelled"}).settings
    return ModelledCore(settings, H200_8B, time_)


def serve(core: ModelledCore, prompt: list[int]) -> None:
    """Answer a prompt."""
    core.add_request(EngineRequest(request_id="first", prompt_token_ids=prompt, params=PARAMS))
    while core.has_work:
        core.step()
        core.wait(1.0)


def look_up(core: ModelledCore, prompt: list[int]) -> tuple[float, float, int]:
    """Look up a prompt as a new request does.

    Returns:
        The processor time of hashing its blocks, that from its arrival until it is admitted, and
        how many blocks were found.
    """
    cache, asked = core.cache, EngineRequest(prompt_token_ids=prompt, params=PARAMS)
    hashed_s = -time.thread_time()
    chain = core._chains.make(asked, prompt)
    hashed_s += time.thread_time()
    spent_s = -time.thread_time()
    cache.arrive(chain)
    while not cache.is_settled(chain):
        spent_s += time.thread_time()
        cache.pump()  # as a step does: without it the engine does not wait after a change
        core.wait(1.0)
        spent_s -= time.thread_time()
        cache.poll()
    assert cache.admit(chain, len(chain.hashes) + 1, is_alone=True)
    spent_s += time.thread_time()
    num_found = chain.num_expected
    cache.release(chain)
    return hashed_s, spent_s, num_found


def measure(model: str, num_tokens: int, block_size: int, repeats: int) -> Iterator[Row]:
    """Yield the least time of each case."""
    tokens = random.Random(0).choices(range(1000), k=num_tokens)
    time_ = VirtualTime()
    with time_.patched():
        core = open_core(model, block_size, time_)
        presence = core.parts.tiers.presence
        core.step()
        for place in PLACES:
            if place == "device":
                serve(core, tokens)
            for has_told in (True, False):
                presence.is_whole = has_told
                found = list[tuple[float, float, int]]()
                for _ in range(repeats):
                    demote(core, place)
                    found.append(look_up(core, tokens))
                hashed_s, spent_s, nums_found = zip(*found, strict=True)
                row = {"place": place, "has_told": has_told, "num_found": nums_found[-1]}
                hash_us, us = (round(1e6 * min(it), 1) for it in (hashed_s, spent_s))
                yield row | {"hash_us": hash_us, "us": us}
        core.close()


def demote(core: ModelledCore, place: str) -> None:
    """Move all blocks to where a lookup is to find them."""
    if place in ("host", "disk"):
        assert core.cache.flush(Tier(place), deadline=time.monotonic() + 600)


@click.command(help=__doc__)
@click.option("--model", default="random:qwen3.6-35b-a3b-fp8", show_default=True)
@click.option("--tokens", default=32_769, show_default=True, help="Of the prompt.")
@click.option("--block-size", default=64, show_default=True)
@click.option("--repeats", default=20, show_default=True)
@click.option("--commit", help="Commit to report, for a tree without its history.")
def main(commit: str | None, model: str, tokens: int, block_size: int, repeats: int) -> None:
    """Print one JSON report."""
    rows = list[Row]()
    found = [[*measure(it, tokens, block_size, repeats)] for it in (model, PLAIN)]
    for row, plain in zip(*found, strict=True):
        both, plain_both = (it["hash_us"] + it["us"] for it in (row, plain))
        ratios = {"ratio": round(both / plain_both, 3), "is_met": both <= BAR * plain_both}
        rows.append(row | {"plain_hash_us": plain["hash_us"], "plain_us": plain["us"]} | ratios)
    head = raw.head(commit, "python -m tests.stress.lookup_cost")
    click.echo(json.dumps(head | {"model": model, "plain": PLAIN, "bar": BAR, "rows": rows}))


if __name__ == "__main__":
    main()
