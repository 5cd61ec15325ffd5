"""`tieredkv serve` and `tieredkv generate`: run a model behind HTTP or in this process."""

import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import tieredkv
from tieredkv.bench.progress import ending_progress, terminal_progress
from tieredkv.cli.output import (
    as_text,
    json_option,
    log_lines_to_stdout,
    print_json,
    set_up_logging,
    usage_error,
)
from tieredkv.cli.settings import settings_options
from tieredkv.config import CLOCK_OFFSET_VARIABLE, LoadedSettings

if TYPE_CHECKING:
    from tieredkv.engine.answer import Answer

LEVELS = click.Choice(("DEBUG", "INFO", "WARNING", "ERROR"), case_sensitive=False)


@click.command()
@click.argument("model", required=False)
@settings_options("model", "cache", "scheduler", "server")
@click.option("--strict-params", "is_strict", is_flag=True, help="Refuse unknown request fields.")
@click.option(
    "--allow-open-access",
    "allows_open_access",
    is_flag=True,
    help="Listen on a non-loopback address without API keys.",
)
@click.option(
    "--record",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a trace of the requests to this new file, for `replay` and `size`: their times, "
    "lengths and hashes of their blocks under a random key that is never written, but no tokens "
    "and no text.",
)
@click.option(
    "--log-level", type=LEVELS, default="INFO", help="How much to log. Prompts are never logged."
)
@json_option
def serve(loaded: LoadedSettings, log_level: str, as_json: bool, **options: Any) -> int:
    """Serve MODEL over HTTP with OpenAI's and Anthropic's APIs.

    MODEL is a folder with a Hugging Face checkpoint, a hub id, `tiny-random` for a trial without a
    checkpoint, or `random:SHAPE` for random weights of a known shape, such as random:llama-3.1-8b.

    \b
    Examples:
      tieredkv serve tiny-random --disk-dir ./kv --default-retention 24h
      tieredkv serve ./Llama-3.1-8B-Instruct --host-size 64GiB --disk-dir /nvme/kv
      tieredkv serve Qwen/Qwen3-8B --config configs/24h.toml --api-key sk-team-a
    """
    if not loaded.settings.model:
        raise usage_error("Missing argument 'MODEL'.")
    set_up_logging(log_level)
    if loaded.settings.access_log == "json":
        log_lines_to_stdout("tieredkv.access")
    if loaded.settings.clock_offset_file:
        turned = f"`{loaded.settings.clock_offset_file}` shifts the clock, which is for tests only"
        click.echo(f"WARNING: {CLOCK_OFFSET_VARIABLE} is set: {turned}", err=True)
    gc.disable()  # what is imported stays, and is never looked through for garbage
    from tieredkv.engine.engine_messages import EngineInfo
    from tieredkv.server.run import Server

    gc.freeze()
    gc.enable()

    def on_ready(url: str, info: EngineInfo) -> None:
        click.echo(f"tieredkv: serving `{info.model}` at {url}/v1", err=True)
        if as_json:
            print_json({"url": url, "model": info.model, "max_model_len": info.max_model_len})
            sys.stdout.flush()

    options |= {"on_progress": terminal_progress(), "on_ready": on_ready, "log_level": log_level}
    with ending_progress():
        return Server(settings=loaded.settings, **options).serve()


@click.command()
@click.argument("model")
@click.argument("prompts", nargs=-1, metavar="[PROMPT]...")
@click.option("--max-tokens", type=int, default=64, help="Most tokens of an answer.")
@click.option(
    "--temperature",
    type=float,
    default=0.0,
    help="Sampling temperature. 0 always takes the likeliest token.",
)
@click.option(
    "--top-p",
    type=float,
    help="Sample from the fewest tokens that reach this probability. By default the model's own.",
)
@click.option(
    "--top-k",
    type=int,
    help="Sample from the K likeliest tokens; 0 takes all. By default the model's own.",
)
@click.option("--stop", multiple=True, help="Text that ends an answer. May be given several times.")
@click.option("--ignore-eos", is_flag=True, help="Go on after the model's end token.")
@click.option("--cache-salt", help="Share cached blocks only with prompts of the same salt.")
@settings_options("model", "cache", "scheduler")
@json_option
def generate(
    loaded: LoadedSettings, prompts: tuple[str, ...], as_json: bool, **options: Any
) -> None:
    """Continue each PROMPT with MODEL in this process, without a server.

    Without a PROMPT, the text on standard input is continued. The exit code is 1 if blocks that
    were promised to the disk could not be stored.

    \b
    Examples:
      tieredkv generate tiny-random "Once upon a time" --max-tokens 8
      cat question.txt | tieredkv generate ./Qwen3-8B --disk-dir ./kv --default-retention 24h
    """
    if not prompts:
        if sys.stdin.isatty():
            raise usage_error("Give a PROMPT, or pipe one in.")
        prompts = (sys.stdin.buffer.read().decode("utf-8", "replace"),)
    set_up_logging("WARNING")
    cache_salt = options.pop("cache_salt")
    params = tieredkv.SamplingParams(**options)
    from tieredkv.engine.store_options import guard_names_key

    guard_names_key(loaded.settings)
    with ending_progress(), tieredkv.LLM(**loaded.given(), progress=terminal_progress()) as llm:
        answers = llm.generate(list(prompts), params, cache_salt=cache_salt)
        _print_answers(answers, loaded.settings.model, as_json=as_json)  # before a long close


def _print_answers(answers: "Sequence[Answer]", model: str | None, *, as_json: bool) -> None:
    outputs: list[dict[str, Any]] = [
        {
            "text": answer.text,
            "token_ids": answer.token_ids,
            "finish_reason": answer.finish_reason,
            "ttft_ms": answer.ttft_s * 1000,
            "usage": {
                "prompt_tokens": answer.usage.prompt_tokens,
                "completion_tokens": len(answer.token_ids),
                "cached_tokens": answer.usage.cached_tokens,
                "cached_tokens_by_tier": answer.usage.cached_tokens_by_tier,
            },
        }
        for answer in answers
    ]
    if as_json:
        print_json({"model": model, "outputs": outputs})
        return
    for output in outputs:
        click.echo(output["text"])
        told = as_text(output["usage"])
        click.echo(f"[{told}, first token after {output['ttft_ms']:.0f} ms]", err=True)
