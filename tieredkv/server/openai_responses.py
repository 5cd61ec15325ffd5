"""OpenAI's responses: results to JSON, whole or in chunks.

It knows shapes, no sockets and no engine.
"""

import time
import uuid
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from tieredkv.engine.messages import RequestUsage, TokenLogprob
from tieredkv.errors import RequestError
from tieredkv.types import Tier

Json = dict[str, Any]
TokenText = Callable[[int], str]
"""Gives the text of one token id."""

LEAST_LOGPROB = -9999.0
"""Stands for a token that could not have been chosen; JSON has no infinity."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def error_body(error: RequestError) -> Json:
    """Return the body of every answer that is an error; its `type` goes with the status."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    if error.status == 429:
        kind = "rate_limit_error"
    told = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    return {"error": told}


def usage_body(prompt_usages: Sequence[RequestUsage], num_completion_tokens: int) -> Json:
    """Return a `usage` object; each prompt counts once, whatever the number of its answers.

    `cached_tokens_by_tier` is an addition of ours, beside OpenAI's fields.
    """
    num_prompt_tokens = sum(usage.prompt_tokens for usage in prompt_usages)
    by_tier = {t: sum(usage.cached_tokens_by_tier[t] for usage in prompt_usages) for t in Tier}
    written = sum(usage.written_tokens for usage in prompt_usages)
    details = {"cached_tokens": sum(by_tier.values()), "cache_write_tokens": written}
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {**details, "cached_tokens_by_tier": by_tier},
    }


class _Shape:
    """What both endpoints have in common; all chunks of an answer share id, time and model."""

    id_prefix: str
    object: str
    chunk_object: str

    def __init__(self, model: str, token_text: TokenText) -> None:
        self.id = f"{self.id_prefix}{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._token_text = token_text

    def response(self, choices: list[Json], usage: Json) -> Json:
        """Return the whole answer."""
        return {**self._envelope(self.object), "choices": choices, "usage": usage}

    def chunk(self, *choices: Json, **usage: Json | None) -> Json:
        """Return one chunk; where `usage` is wanted, it is None in all but the last one."""
        return {**self._envelope(self.chunk_object), "choices": choices, **usage}

    def _envelope(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model}


class CompletionShape(_Shape):
    """`/v1/completions`."""

    id_prefix = "cmpl-"
    object = chunk_object = "text_completion"

    def opening(self, index: int, echo: str) -> list[Json]:
        """Return the choice with the prompt, where that is wanted; else text begins at once."""
        return self.delta(index, echo, None, None) if echo else []

    def delta(self, index: int, text: str, logprobs: Json | None, reason: str | None) -> list[Json]:
        """Return one choice."""
        return [{"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}]

    def choice(self, index: int, text: str, logprobs: Json | None, reason: str) -> Json:
        """Return one answer in whole."""
        return self.delta(index, text, logprobs, reason)[0]

    def logprobs(self, tokens: Sequence[TokenLogprob], text_offset: int) -> Json:
        """Return parallel lists, as the older endpoint has them."""
        texts = [self._token_text(token.token_id) for token in tokens]
        tops = [{self._token_text(id): _finite(each) for id, each in t.top} for t in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": tops,
            "text_offset": list(accumulate(map(len, texts), initial=text_offset))[:-1],
        }


class ChatShape(_Shape):
    """`/v1/chat/completions`."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int, _echo: str) -> list[Json]:
        """Return the choice that names the role."""
        return [self._chunk_choice(index, {"role": "assistant", "content": ""})]

    def delta(self, index: int, text: str, logprobs: Json | None, reason: str | None) -> list[Json]:
        """Return the text's choice and, at the end, one with an empty delta."""
        has_text = text or logprobs or reason is None
        choices = [self._chunk_choice(index, {"content": text}, logprobs)] if has_text else []
        return choices + ([self._chunk_choice(index, {}, None, reason)] if reason else [])

    def choice(self, index: int, text: str, logprobs: Json | None, reason: str) -> Json:
        """Return one answer in whole."""
        message = {"role": "assistant", "content": text, "refusal": None}
        how = {"logprobs": logprobs, "finish_reason": reason}
        return {"index": index, "message": message, **how}

    def logprobs(self, tokens: Sequence[TokenLogprob], text_offset: int) -> Json:
        """Return one object a token."""
        content = []
        for token in tokens:
            top = [self._token(*alternative) for alternative in token.top]
            content.append({**self._token(token.token_id, token.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _chunk_choice(
        self, index: int, delta: Json, logprobs: Json | None = None, reason: str | None = None
    ) -> Json:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _token(self, token_id: int, logprob: float) -> Json:
        text = self._token_text(token_id)
        encoded = None if _REPLACEMENT in text else list(text.encode())
        return {"token": text, "logprob": _finite(logprob), "bytes": encoded}


Shape = CompletionShape | ChatShape
"""The shapes of one endpoint's answer: whole, in chunks, and its log-probabilities."""


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
