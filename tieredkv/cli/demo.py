"""`tieredkv demo`: the main job on this machine, in a minute or two."""

from typing import Any

import click

from tieredkv.cli.bench import ARMS, measure
from tieredkv.cli.output import json_option

ON_CPU = "tiny-random", 2048  # model, prefix tokens
ON_GPU = "random:qwen2.5-1.5b", 98304
REPEATS = 3


@click.command()
@json_option
def demo(as_json: bool) -> int:
    """Serve a prompt cold, then from VRAM, host memory, disk, and disk after a restart.

    Without a GPU a small random model is made on the spot and VRAM is an ordinary memory pool;
    with one, a random model of 1.5B parameters. Exit 1 if tokens or KV bytes differ, or a tier is
    not the one that the arm claims. The JSON is that of `bench ttft`.
    """
    import torch

    on_gpu = torch.cuda.is_available()
    model, length = ON_GPU if on_gpu else ON_CPU
    click.echo(
        f"Serving prompts of {length} tokens and a little more with {model} on "
        f"{'the GPU' if on_gpu else 'this CPU'}: cold, then with the prefix in each tier, then "
        "from disk in a new process.",
        err=True,
    )
    told: dict[str, Any] = {
        "settings": {"model": model},
        "prefix_tokens": [length],
        "repeats": REPEATS,
    }
    command = f"tieredkv bench ttft --model {model} --prefix-tokens {length} --repeats {REPEATS}"
    status, rows = measure("ttft", as_json=True, command=command, arms=ARMS.split(","), **told)
    p50_ms = {row["arm"]: row["TTFT_p50_ms"] for row in rows}
    if slower := [arm for arm in p50_ms if arm != "cold" and p50_ms[arm] >= p50_ms["cold"]]:
        click.echo(f"warning: not faster than cold: {', '.join(slower)}", err=True)
    return status
