"""The Python API: a model with its tiered cache in the caller's own process."""

import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tieredkv.config import load_settings
from tieredkv.engine.core import EngineCore
from tieredkv.engine.detokenizer import Detokenizer
from tieredkv.engine.messages import EngineRequest, RequestUsage, TokenLogprob, TokenOutput
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.errors import RequestError
from tieredkv.types import Progress, Tier, ignore_progress

Prompt = str | Sequence[int]

IDLE_WAIT_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one request, and where its prompt's keys and values came from."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cached_tokens_by_tier: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What a prompt became.

    Attributes:
        finish_reason: "stop" or "length".
        ttft_s: seconds from submission to the first token.
    """

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    usage: Usage
    ttft_s: float
    logprobs: list[TokenLogprob] | None = None


class _Generation:
    """One request while it runs: tokens so far, text so far, the clock."""

    def __init__(self, request: EngineRequest, detokenizer: Detokenizer) -> None:
        self.request = request
        self.detokenizer = detokenizer
        self.submitted_at = time.perf_counter()
        self.first_token_at: float | None = None
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.usage: RequestUsage | None = None
        self.finish_reason: str | None = None

    def take(self, output: TokenOutput) -> None:
        """Take in one step's output."""
        if output.token_ids and self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        self.usage = output.usage or self.usage
        if self.finish_reason is None:
            self.token_ids.extend(output.token_ids)
            self.logprobs.extend(output.logprobs or ())
            _, ended = self.detokenizer.take(output.token_ids, output.finish_reason)
            self.finish_reason = ended

    def result(self) -> RequestOutput:
        """Return the finished output."""
        assert self.usage is not None and self.first_token_at is not None, self.request.request_id
        usage = self.usage
        return RequestOutput(
            request_id=self.request.request_id,
            prompt_token_ids=self.request.prompt_token_ids,
            token_ids=self.token_ids,
            text=self.detokenizer.text,
            finish_reason=self.finish_reason or "stop",
            usage=Usage(
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=len(self.token_ids),
                cached_tokens=usage.cached_tokens,
                cached_tokens_by_tier={tier.value: getattr(usage, tier) for tier in Tier},
            ),
            ttft_s=self.first_token_at - self.submitted_at,
            logprobs=self.logprobs if self.request.params.logprobs is not None else None,
        )


class LLM:
    """A model that keeps its prompt cache in VRAM, host memory and on disk.

    Args:
        model: a folder with a Hugging Face checkpoint, a hub id, `tiny-random`, or `random:SHAPE`.
        retention: default retention of prompts, `in_memory` or `24h`.
        config: path of a TOML file with further settings.
        progress: told about loading, pinning and draining.
        settings: any field of `tieredkv.config.Settings`, such as `disk_dir`, `disk_size="20GiB"`,
            `host_size`, `device_size`, `block_size`.

    Raises:
        ConfigError, ModelError, StorageError: see their texts; nothing stored is lost.

    Example:
        with LLM("tiny-random", retention="24h", disk_dir="/tmp/kv") as llm:
            [output] = llm.generate("Once upon a time", SamplingParams(max_tokens=8))

    Not safe for use by several threads at once. Moves between the tiers go on while `generate` or
    `demote` runs, and in `close`.
    """

    def __init__(
        self,
        model: str,
        *,
        retention: str | None = None,
        config: str | os.PathLike[str] | None = None,
        progress: Progress | None = None,
        **settings: object,
    ) -> None:
        arguments: dict[str, object] = {"model": model, **settings}
        if retention is not None:
            arguments["default_retention"] = retention
        loaded = load_settings(arguments=arguments, config_path=config)
        self.core = EngineCore(loaded.settings, progress=progress or ignore_progress)
        self.tokenizer = self.core.model.tokenizer
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        retention: str | None = None,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts, all of them together, and return the outputs in their order.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            sampling_params: for all of the prompts; 16 sampled tokens by default.
            retention: how long the prompts' prefixes may be kept; the default of this LLM if None.
            cache_salt: only requests with the same salt share cached blocks.

        Raises:
            RequestError: a prompt is empty or too long, or a parameter is out of range.
        """
        params = sampling_params or SamplingParams()
        generations = []
        for prompt in _as_list(prompts):
            text = Detokenizer(self.tokenizer, stop=params.stop, min_tokens=params.min_tokens)
            asked = self.make_request(prompt, params, retention=retention, cache_salt=cache_salt)
            generations.append(_Generation(asked, text))
        by_id = {g.request.request_id: g for g in generations}
        try:
            for generation in generations:
                generation.submitted_at = time.perf_counter()
                self.core.add_request(generation.request)
            self._run(by_id)
        except BaseException:
            for request_id in by_id:
                self.core.abort(request_id)
            self.core.step()
            raise
        return [generation.result() for generation in generations]

    def make_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        retention: str | None = None,
        cache_salt: str | None = None,
    ) -> EngineRequest:
        """Return what the engine is asked for a prompt; texts are tokenised here."""
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return EngineRequest(
            request_id=f"llm-{next(self._ids)}",
            prompt_token_ids=token_ids,
            params=params,
            retention=retention,
            cache_salt=cache_salt,
        )

    def demote(self, to: str, *, timeout_s: float = 60.0) -> bool:
        """Move everything that no request uses down to `"host"` or `"disk"`.

        Returns:
            Whether all of it has gone; False when the time was up first.
        """
        return self.core.demote(Tier(to), timeout_s=timeout_s)

    def tier_stats(self) -> dict[str, object]:
        """Return blocks and bytes of each tier, and the cache's counters."""
        return self.core.tier_stats()

    def close(self, *, drain_timeout_s: float | None = None) -> None:
        """Write what `24h` promised and release everything; calling it twice is fine."""
        self.core.close(drain_timeout_s=drain_timeout_s)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(self, by_id: dict[str, _Generation]) -> None:
        """Step the engine until these requests have finished."""
        unfinished = set(by_id)
        while unfinished:
            for output in self.core.step():
                generation = by_id.get(output.request_id)
                if generation is None:
                    continue
                generation.take(output)
                if output.finish_reason is not None:
                    unfinished.discard(output.request_id)
                elif generation.finish_reason is not None:
                    self.core.abort(output.request_id)  # a stop string ended it
            if unfinished:
                self.core.wait(IDLE_WAIT_S)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts: a text and a flat list of token ids are one prompt each."""
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]  # type: ignore[list-item]
    if not items or any(isinstance(item, int) for item in items):
        why = "Prompts and token ids cannot be mixed" if items else "The prompt is empty"
        raise RequestError(why, param="prompt", code="invalid_value")
    return items  # type: ignore[return-value]
