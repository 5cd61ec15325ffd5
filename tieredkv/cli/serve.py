"""`tieredkv serve`."""

import sys
from typing import Any

import click

from tieredkv.bench.progress import terminal_progress
from tieredkv.cli.output import json_option, print_json, set_up_logging, usage_error
from tieredkv.cli.settings_options import settings_options
from tieredkv.config import CLOCK_OFFSET_VARIABLE, LoadedSettings

LEVELS = click.Choice(("DEBUG", "INFO", "WARNING", "ERROR"), case_sensitive=False)


@click.command()
@click.argument("model", required=False)
@settings_options("model", "cache", "scheduler", "server")
@click.option(
    "--strict-params", "is_strict", is_flag=True, help="Refuse request fields that are unknown."
)
@click.option(
    *("--allow-open-access", "allows_open_access"),
    is_flag=True,
    help="Let others reach it without an API key.",
)
@click.option("--log-level", type=LEVELS, default="INFO", help="Never prompts.")
@json_option
def serve(loaded: LoadedSettings, log_level: str, as_json: bool, **options: Any) -> int:
    """Serve MODEL over HTTP, in OpenAI's shapes.

    MODEL is a folder with a Hugging Face checkpoint, a hub id, `tiny-random`, or `random:SHAPE`.

    \b
    Examples:
      tieredkv serve tiny-random --disk-dir ./kv --default-retention 24h
      tieredkv serve ./Llama-3.1-8B-Instruct --host-size 64GiB --disk-dir /nvme/kv
      tieredkv serve Qwen/Qwen3-8B --config configs/24h.toml --api-key sk-team-a
    """
    if not loaded.settings.model:
        raise usage_error("Missing argument 'MODEL'.")
    set_up_logging(log_level)
    if loaded.settings.clock_offset_file:
        turned = f"the clock is turned by `{loaded.settings.clock_offset_file}`, for tests only"
        click.echo(f"WARNING: {CLOCK_OFFSET_VARIABLE} is set: {turned}", err=True)
    from tieredkv.engine.messages import EngineInfo
    from tieredkv.server.serve import Server

    def on_ready(url: str, info: EngineInfo) -> None:
        click.echo(f"tieredkv: serving `{info.model}` at {url}/v1", err=True)
        if as_json:
            print_json({"url": url, "model": info.model, "max_model_len": info.max_model_len})
            sys.stdout.flush()

    options |= {"on_progress": terminal_progress(), "on_ready": on_ready, "log_level": log_level}
    return Server(settings=loaded.settings, **options).serve()
