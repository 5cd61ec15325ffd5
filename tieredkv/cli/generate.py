"""`tieredkv generate`."""

import sys
from collections.abc import Sequence
from typing import Any

import click

import tieredkv
from tieredkv.bench.progress import terminal_progress
from tieredkv.cli.output import json_option, print_json, set_up_logging, usage_error
from tieredkv.cli.settings_options import settings_options
from tieredkv.config import LoadedSettings, Settings


@click.command()
@click.argument("model")
@click.argument("prompts", nargs=-1, metavar="[PROMPT]...")
@click.option("--max-tokens", type=int, default=64, show_default=True, help="Longest answer.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Nucleus, e.g. 0.95.")
@click.option("--top-k", type=int, default=0, show_default=True, help="Likeliest k; 0 takes all.")
@click.option("--sampling-seed", type=int, help="Equal seeds give equal answers, e.g. 7.")
@click.option("--stop", multiple=True, help="Text that ends the answer; repeatable.")
@click.option("--ignore-eos", is_flag=True, help="Go on after the model's end token.")
@click.option("--cache-salt", help="Share cached blocks only with prompts of the same salt.")
@settings_options("model", "cache", "scheduler")
@json_option
def generate(
    loaded: LoadedSettings,
    prompts: tuple[str, ...],
    sampling_seed: int | None,
    cache_salt: str | None,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Continue each PROMPT, or what stdin holds, with MODEL in this process.

    \b
    Examples:
      tieredkv generate tiny-random "Once upon a time" --max-tokens 8
      cat question.txt | tieredkv generate ./Qwen3-8B --disk-dir ./kv --default-retention 24h
    """
    if not prompts:
        if sys.stdin.isatty():
            raise usage_error("Give a PROMPT, or pipe one in.")
        prompts = (sys.stdin.read(),)
    set_up_logging("WARNING")
    params = tieredkv.SamplingParams(seed=sampling_seed, **sampling)
    _check_prompts(prompts, loaded.settings)  # what is wrong is said before weights are loaded
    with tieredkv.LLM(**loaded.given(), progress=terminal_progress()) as llm:
        outputs = llm.generate(list(prompts), params, cache_salt=cache_salt)
    if as_json:
        documents = [
            {
                "text": output.text,
                "token_ids": output.token_ids,
                "finish_reason": output.finish_reason,
                "ttft_ms": output.ttft_s * 1000,
                "usage": {
                    "prompt_tokens": output.usage.prompt_tokens,
                    "completion_tokens": len(output.token_ids),
                    "cached_tokens": output.usage.cached_tokens,
                    "cached_tokens_by_tier": output.usage.cached_tokens_by_tier,
                },
            }
            for output in outputs
        ]
        print_json({"model": loaded.settings.model, "outputs": documents})
        return
    for output in outputs:
        click.echo(output.text)
        usage = output.usage
        counts = usage.cached_tokens_by_tier.items()
        by_tier = ", ".join(f"{count} {tier}" for tier, count in counts if count)
        click.echo(
            f"[{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} cached"
            f"{f' ({by_tier})' if by_tier else ''}, {len(output.token_ids)} made, "
            f"first after {output.ttft_s * 1000:.0f} ms]",
            err=True,
        )


def _check_prompts(prompts: Sequence[str], settings: Settings) -> None:
    """Refuse prompts that are empty or too long for the model, before anything is allocated."""
    from tieredkv.engine.loader import find_model, load_tokenizer
    from tieredkv.engine.request import pack_prompt

    found = find_model(settings.model, dtype=settings.dtype, device=settings.device)
    limit = min(settings.max_model_len or found.max_model_len, found.max_model_len)
    tokenizer = load_tokenizer(settings.model)
    for prompt in prompts:
        pack_prompt(tokenizer.encode(prompt), limit, found.vocab_size)
