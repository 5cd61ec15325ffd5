"""The Python API: a model with its tiered cache in the caller's own process."""

import itertools
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

from tieredkv.config import load_settings
from tieredkv.engine.answer import Answer
from tieredkv.engine.core import EngineCore
from tieredkv.engine.engine_messages import EngineRequest
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.errors import BlocksLostError, RequestError
from tieredkv.fields import whole_characters
from tieredkv.types import Progress, Tier, ignore_progress

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]

IDLE_WAIT_S = 0.05


class LLM:
    """A model that keeps its prompt cache in VRAM, host memory and on disk.

    Args:
        model: a folder with a Hugging Face checkpoint, a hub id, `tiny-random`, or `random:SHAPE`.
        retention: default retention of prompts, `in_memory` or `24h`.
        config: path of a TOML file with further settings.
        progress: called with what is being done while loading, pinning and draining.
        settings: any field of `tieredkv.config.Settings`, such as `disk_dir`, `disk_size="20GiB"`,
            `host_size`, `device_size`, `block_size`.

    Raises:
        ConfigError: a setting is malformed or out of range.
        ModelError: the model cannot be found, read or served.
        StorageError: the disk tier's folder cannot be used; nothing stored in it is lost.

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
        progress: Progress = ignore_progress,
        **settings: object,
    ) -> None:
        arguments = {"model": model, "default_retention": retention, **settings}
        loaded = load_settings(arguments=arguments, config_path=config)
        self.core = EngineCore(loaded.settings, progress=progress)
        self.tokenizer = self.core.model.tokenizer
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        retention: str | None = None,
        cache_salt: str | None = None,
    ) -> list[Answer]:
        """Continue prompts, all of them together, and return the answers in their order.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            sampling_params: how to answer each of the prompts. By default an answer has 16 tokens,
                chosen as the model's generation_config.json recommends.
            retention: how long the chains of the prompts may be kept; None for the default of
                this LLM.
            cache_salt: only requests with the same salt share cached blocks.

        Raises:
            RequestError: a prompt is empty or too long, or a parameter is out of range.
        """
        asked = {"retention": retention, "cache_salt": cache_salt}
        params = sampling_params or SamplingParams()
        return self.serve([self.make_request(each, params, **asked) for each in _as_list(prompts)])

    def make_request(self, prompt: Prompt, params: SamplingParams, **asked: Any) -> EngineRequest:
        """Return the engine's request for a prompt; a text is tokenised here.

        Args:
            prompt: a text or token ids.
            params: how to choose tokens, and when to stop.
            asked: further fields of `EngineRequest`.
        """
        if isinstance(prompt, str):
            token_ids = self.tokenizer.encode(whole_characters(prompt))
        else:
            token_ids = list(prompt)
        name = f"llm-{next(self._ids)}"
        return EngineRequest(request_id=name, prompt_token_ids=token_ids, params=params, **asked)

    def serve(self, requests: Sequence[EngineRequest]) -> list[Answer]:
        """Answer requests, all of them together, and return the answers in their order.

        Raises:
            RequestError: one of the requests cannot be served; then none of them is.
        """
        answers = {each.request_id: Answer(each, self.tokenizer) for each in requests}
        unfinished = dict(answers)
        try:
            for request in requests:
                self.core.add_request(request)
            while unfinished:
                for output in self.core.step():
                    answer = unfinished.get(output.request_id)
                    if answer is None:  # a stop string had ended it already
                        continue
                    answer.take(output)
                    if answer.finish_reason is not None:
                        del unfinished[output.request_id]
                        if output.finish_reason is None:
                            self.core.abort(output.request_id)
                if unfinished:
                    self.core.wait(IDLE_WAIT_S)
        finally:
            for request_id in unfinished:
                self.core.abort(request_id)
            self.core.step()  # which releases what they held
        return list(answers.values())

    def demote(self, to: str, *, timeout_s: float = 60.0) -> bool:
        """Move all blocks that no request uses down to `"host"` or `"disk"`.

        Returns:
            Whether all of them were moved in time.
        """
        core = self.core
        if to not in (Tier.HOST, Tier.DISK):
            raise RequestError("`to` must be `host` or `disk`.", param="to")
        if to == Tier.DISK and core.operations.disk is None:
            raise RequestError("There is no disk tier, since `disk_dir` is not set.", param="to")
        return core.cache.flush(Tier(to), deadline=time.monotonic() + timeout_s)

    def tier_stats(self) -> dict[str, object]:
        """Return the blocks and bytes of each tier, and the counters of the cache."""
        return self.core.tier_stats.read()

    def close(self) -> None:
        """Write the blocks that `24h` promises to keep, and release everything.

        Calling it twice is fine.

        Raises:
            BlocksLostError: blocks that `24h` promises to keep are lost because the store failed.
                Everything is released nevertheless.
        """
        self.core.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        """Close; a loss is logged instead of raised if the block ends with an error of its own."""
        try:
            self.close()
        except BlocksLostError as lost:
            if error is None:
                raise
            logger.error("%s", lost)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts: a text and a flat list of token ids are one prompt each."""
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if all(isinstance(item, int) for item in items):
        return [items]  # type: ignore[list-item]
    if any(isinstance(item, int) for item in items):
        raise RequestError("Prompts and token ids cannot be mixed in one list.", param="prompt")
    return items  # type: ignore[return-value]
