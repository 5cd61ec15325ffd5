"""OpenAI's responses: results to JSON, whole or in chunks.

It knows shapes, no sockets and no engine.
"""

import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from tieredkv.engine.answer import Answer
from tieredkv.engine.messages import RequestUsage, TokenLogprob
from tieredkv.errors import RequestError
from tieredkv.server.asked import Json, Shape
from tieredkv.server.diagnosis import NONE, Diagnosis, told_of
from tieredkv.server.error_bodies import openai_body
from tieredkv.server.generation import Piece
from tieredkv.types import Tier

TokenText = Callable[[int], str]
"""Gives the text of one token id."""

LEAST_LOGPROB = -9999.0
"""Stands for a token that could not have been chosen; JSON has no infinity."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def usage_body(
    prompt_usages: Sequence[RequestUsage], num_completion_tokens: int, diagnosis: Diagnosis = NONE
) -> Json:
    """Return a `usage` object; each prompt counts once, whatever the number of its answers."""
    num_prompt_tokens = sum(usage.prompt_tokens for usage in prompt_usages)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": caching_body(prompt_usages, diagnosis),
    }


def caching_body(prompt_usages: Sequence[RequestUsage], diagnosis: Diagnosis) -> Json:
    """Return what is said of cached tokens; `tieredkv` and what is by tier are ours."""
    by_tier = {t: sum(usage.cached_tokens_by_tier[t] for usage in prompt_usages) for t in Tier}
    return {
        "cached_tokens": sum(by_tier.values()),
        "cache_write_tokens": sum(usage.written_tokens for usage in prompt_usages),
        "cached_tokens_by_tier": by_tier,
        "tieredkv": told_of(prompt_usages, diagnosis),
    }


class ChoicesShape(Shape):
    """What both endpoints have in common; all chunks of an answer share id, time and model.

    Args:
        choices: the form of one answer.
        model: the model's name.
        n: answers to each prompt.
        echoes: the prompts, where they are part of the answers.
        wants_usage: whether a stream ends with its usage.

    Attributes:
        is_silent: answers are nothing but the echoes; the one token that is made is left out.
    """

    is_silent = False

    def __init__(
        self,
        choices: "CompletionChoices | ChatChoices",
        model: str,
        n: int,
        echoes: Sequence[str] = (),
        *,
        wants_usage: bool,
    ) -> None:
        self._choices, self._n, self._wants_usage = choices, n, wants_usage
        self.id, now = f"{choices.id_prefix}{uuid.uuid4().hex}", int(time.time())
        self._head = {"id": self.id, "object": choices.object, "created": now, "model": model}
        self._echoes = [text for text in echoes for _ in range(n)]

    def whole(self, answers: Sequence[Answer]) -> Json:
        """Return a choice for each answer, and the usage of all."""
        choices = []
        for i, (echo, answer) in enumerate(zip(self._starts(answers), answers, strict=True)):
            assert answer.finish_reason is not None, answer.request.request_id
            has_logprobs = answer.request.params.logprobs is not None
            said, tokens, reason = answer.text, answer.logprobs, answer.finish_reason
            if self.is_silent:
                said, tokens, reason = "", tokens[:-1], "length"
            logprobs = self._choices.logprobs(tokens, len(echo)) if has_logprobs else None
            choices.append(self._choices.choice(i, echo + said, logprobs, reason))
        return {**self._head, "choices": choices, "usage": self._usage(answers)}

    async def events(
        self, answers: Sequence[Answer], pieces: AsyncIterator[Piece]
    ) -> AsyncIterator[Json]:
        """Yield chunks of one choice; where usage is wanted, it is None in all but the last one."""
        head = {**self._head, "object": self._choices.chunk_object}
        no_usage = {"usage": None} if self._wants_usage else {}
        offsets = []
        for i, echo in enumerate(self._starts(answers)):
            offsets.append(len(echo))
            for choice in self._choices.opening(i, echo):
                yield {**head, "choices": [choice], **no_usage}
        async for piece in pieces:
            i, text, tokens, reason = piece.index, piece.text, piece.logprobs, piece.finish_reason
            if self.is_silent:
                text, tokens, reason = "", (tokens or [])[:-1], "length"
            logprobs = self._choices.logprobs(tokens, offsets[i]) if tokens else None
            offsets[i] += len(text)
            for choice in self._choices.delta(i, text, logprobs, reason):
                yield {**head, "choices": [choice], **no_usage}
        if self._wants_usage:
            yield {**head, "choices": [], "usage": self._usage(answers)}

    def failure(self, error: RequestError) -> Json:
        """Return the error as answers have it."""
        return openai_body(error)

    def _starts(self, answers: Sequence[Answer]) -> Sequence[str]:
        return self._echoes or [""] * len(answers)

    def _usage(self, answers: Sequence[Answer]) -> Json:
        of_prompts = [answer.usage for answer in answers[:: self._n]]  # as the first found it
        num_tokens = sum(len(answer.token_ids) for answer in answers)
        return usage_body(of_prompts, 0 if self.is_silent else num_tokens, self.diagnosis)


@dataclass(frozen=True)
class CompletionChoices:
    """`/v1/completions`."""

    token_text: TokenText

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
        """Return parallel lists, as the older endpoint has them; those of an echo come first."""
        text_offset = 0 if tokens and tokens[0].logprob is None else text_offset
        texts = [self.token_text(token.token_id) for token in tokens]
        both = [[*token.top, (token.token_id, token.logprob)] for token in tokens]
        tops: list[Json | None] = [
            {self.token_text(id): _finite(each) for id, each in top if each is not None} or None
            for top in both
        ]
        return {
            "tokens": texts,
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": tops,
            "text_offset": list(accumulate(map(len, texts), initial=text_offset))[:-1],
        }


@dataclass(frozen=True)
class ChatChoices:
    """`/v1/chat/completions`."""

    token_text: TokenText

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

    def _token(self, token_id: int, logprob: float | None) -> Json:
        text = self.token_text(token_id)
        encoded = None if _REPLACEMENT in text else list(text.encode())
        return {"token": text, "logprob": _finite(logprob), "bytes": encoded}


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST_LOGPROB)
