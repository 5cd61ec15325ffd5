"""OpenAI's answers: chat and completions as JSON, whole or in chunks, and errors.

This module only builds the JSON; it does not use sockets, requests or the engine.
"""

from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any, Literal

from tieredkv.engine.detokenizer import Detokenizer
from tieredkv.engine.engine_messages import TokenLogprob
from tieredkv.errors import RequestError
from tieredkv.server.asked import Json, Shape
from tieredkv.server.chat import Tokenization
from tieredkv.server.generation import Piece
from tieredkv.server.message_parser import Call, Delta
from tieredkv.server.openai_messages import custom_text
from tieredkv.server.reply import Reply

LEAST_LOGPROB = -9999.0
"""The log-probability of a token that could not have been chosen, as JSON has no infinity."""

Echo = tuple[str, Sequence[int]]
"""The text of a prompt, and where each of its tokens begins if log-probabilities are wanted."""

NO_ECHO: Echo = ("", ())


class CompletionShape(Shape):
    """Answers of `/v1/completions`; all chunks of an answer share id, time and model.

    Args:
        model: the name of the model.
        tokenization: decodes token ids.
        echoes: for each prompt, the text that its answers begin with.
        n: the number of answers to each prompt.
        usage_in: the chunks of a stream that have a `usage` object: none; one additional chunk at
            the end; or all chunks, each with the counts so far.
    """

    id_prefix = "cmpl-"
    object = chunk_object = "text_completion"

    def __init__(
        self,
        model: str,
        tokenization: Tokenization,
        echoes: Sequence[Echo] = (NO_ECHO,),
        *,
        n: int = 1,
        usage_in: Literal["none", "last", "all"] = "none",
    ) -> None:
        super().__init__()
        self._n, self._usage_in, self._token_of = n, usage_in, tokenization.token
        self._echoes = [echo for echo in echoes for _ in range(n)]
        self._ends = [len(text) for text, _ in self._echoes]
        self._detokenizers = [Detokenizer(tokenization.tokenizer) for _ in self._echoes]
        self._head: Json = {"id": self.id, "object": self.object}
        self._head |= {"created": self.created, "model": model}

    def whole(self, answers: Sequence[Reply]) -> Json:
        """Return a choice for each answer, and one usage of all answers."""
        choices, num_tokens = [], sum(len(answer.token_ids) for answer in answers)
        for i, ((echo, _), answer) in enumerate(zip(self._echoes, answers, strict=True)):
            logprobs = self._logprobs(i, answer.logprobs)
            choices.append(self.choice(i, echo, answer, logprobs))
        usage = self._usage(answers, num_tokens)
        return {**self._head, "choices": choices, "usage": usage, **self.not_done}

    async def events(
        self, answers: Sequence[Reply], pieces: AsyncIterator[Piece]
    ) -> AsyncIterator[Json]:
        """Yield chunks of one choice each, with the usage in those chunks where it is wanted."""
        head = {**self._head, "object": self.chunk_object}
        num_tokens = [0] * len(answers)

        def usage() -> Json:
            if self._usage_in == "none":
                return {}
            is_told = self._usage_in == "all"
            return {"usage": self._usage(answers, sum(num_tokens)) if is_told else None}

        for i, (echo, _) in enumerate(self._echoes):
            for choice in self.opening(i, echo):
                yield {**head, "choices": [choice], **usage()}
        async for piece in pieces:
            num_tokens[piece.index] = piece.num_tokens
            logprobs = self._logprobs(piece.index, piece.logprobs)
            for choice in self.delta(answers[piece.index], piece, logprobs):
                told = self.not_done if choice["finish_reason"] else {}
                yield {**head, "choices": [choice], **usage(), **told}
        if self._usage_in != "none":
            told = {"usage": self._usage(answers, sum(num_tokens)), **self.not_done}
            yield {**head, "choices": [], **told}

    def failure(self, error: RequestError) -> Sequence[Json]:
        """Return the event that ends a stream that failed."""
        return [openai_body(error)]

    def opening(self, index: int, echo: str) -> list[Json]:
        """Return a choice with the echoed prompt, or no choice if the prompt is not echoed."""
        return [self._text(index, echo, None, None)] if echo else []

    def delta(self, _answer: Reply, piece: Piece, logprobs: Json | None) -> list[Json]:
        """Return the choices of a stream for one piece of an answer."""
        return [self._text(piece.index, piece.text, logprobs, piece.finish_reason)]

    def choice(self, index: int, echo: str, answer: Reply, logprobs: Json | None) -> Json:
        """Return the choice for a whole answer."""
        return self._text(index, echo + answer.text, logprobs, answer.finish_reason)

    def _text(self, index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, tokens: Sequence[TokenLogprob], index: int) -> Json:
        """Return the log-probabilities as parallel lists; tokens of an echoed prompt come first."""
        offsets = list(self._echoes[index][1]) if tokens[0].logprob is None else []
        for token in tokens[len(offsets) :]:
            offsets.append(self._ends[index])
            self._ends[index] += len(self._detokenizers[index].feed([token.token_id]))
        return {
            "tokens": [self._token_of(token.token_id).label for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [self._top(token) or None for token in tokens],
            "text_offset": offsets,
        }

    def _top(self, token: TokenLogprob) -> Json:
        """Return the likeliest tokens and the chosen one, by label.

        If another token has the same label as the chosen one, the chosen one is reported.
        """
        top = {self._token_of(id).label: _finite(each) for id, each in token.top}
        own = {self._token_of(token.token_id).label: _finite(token.logprob)}
        return top | own if token.logprob is not None else {}

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprob] | None) -> Json | None:
        return self.logprobs(tokens, index) if tokens else None

    def _usage(self, answers: Sequence[Reply], num_tokens: int) -> Json:
        """Return a `usage` object, in which each prompt counts once for all its answers."""
        prompts = [answer.usage for answer in answers[:: self._n]]  # the first answer's
        num_prompt_tokens = sum(usage.prompt_tokens for usage in prompts)
        num_thoughts = sum(answer.num_thought_tokens for answer in answers)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
            "prompt_tokens_details": self.caching(prompts),
            "completion_tokens_details": {"reasoning_tokens": num_thoughts},
            "tieredkv": self.receipt(prompts),
        }


class ChatShape(CompletionShape):
    """Answers of `/v1/chat/completions`, which differ in their choices.

    Args:
        model, tokenization, form: as for `CompletionShape`.
        custom: names of the tools that take a text.
        has_functions: whether a call has the form that it had before there were tools.
        left_out: the types of the tools that the model was not told of.
    """

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        model: str,
        tokenization: Tokenization,
        *,
        custom: frozenset[str] = frozenset(),
        has_functions: bool = False,
        left_out: Collection[str] = (),
        **form: Any,
    ) -> None:
        super().__init__(model, tokenization, **form)
        self.left_out = [*left_out]
        self._custom, self._has_functions = custom, has_functions
        self._num_calls = Counter[int]()  # of each answer, so far

    def opening(self, index: int, echo: str) -> list[Json]:
        """Return the first choice of a stream, which names the role."""
        return [self._chunk(index, {"role": "assistant", "content": ""}, None, None)]

    def delta(self, answer: Reply, piece: Piece, logprobs: Json | None) -> list[Json]:
        """Return a choice for each delta and, at the end of the answer, one with an empty delta."""
        reason = piece.finish_reason
        deltas = [told for it in piece.deltas if any(it) and (told := self._delta(piece.index, it))]
        if not deltas and (logprobs or reason is None):
            deltas.append({"content": ""})
        choices = [self._chunk(piece.index, delta, None, None) for delta in deltas]
        if choices:
            choices[0]["logprobs"] = logprobs
        return choices + (
            [self._chunk(piece.index, {}, None, self._reason(answer))] if reason else []
        )

    def _delta(self, index: int, delta: Delta) -> Json:
        if delta.call is not None:
            number = self._num_calls[index] = self._num_calls[index] + 1
            if self._has_functions:
                return _function_call(delta.call) if number == 1 else {}
            return {"tool_calls": [{"index": number - 1, **self._call(delta.call)}]}
        return {"reasoning_content": delta.thoughts} if delta.thoughts else {"content": delta.text}

    def choice(self, index: int, echo: str, answer: Reply, logprobs: Json | None) -> Json:
        """Return the choice for a whole answer."""
        message: Json = {"role": "assistant", "content": answer.content}
        if not self._has_functions:  # which are older than it, as clients are that refuse it
            message["refusal"] = None
        if answer.calls:
            message["content"] = answer.content or None
            if self._has_functions:
                message |= _function_call(answer.calls[0])
            else:
                message["tool_calls"] = [self._call(call) for call in answer.calls]
        if answer.thoughts:
            message["reasoning_content"] = answer.thoughts
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self._reason(answer),
        }

    def logprobs(self, tokens: Sequence[TokenLogprob], index: int) -> Json:
        """Return the log-probabilities as one object for each token."""
        content = []
        for token in tokens:
            top = [self._token(*alternative) for alternative in token.top]
            content.append({**self._token(token.token_id, token.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _call(self, call: Call) -> Json:
        kind, told = "function", {"name": call.name, "arguments": call.arguments}
        if call.name in self._custom and (text := custom_text(call.arguments)) is not None:
            kind, told = "custom", {"name": call.name, "input": text}
        return {"id": f"call_{call.id}", "type": kind, kind: told}

    def _reason(self, answer: Reply) -> str | None:
        if not answer.ends_with_calls:
            return answer.finish_reason
        return "function_call" if self._has_functions else "tool_calls"

    def _chunk(self, index: int, delta: Json, logprobs: Json | None, reason: str | None) -> Json:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _token(self, token_id: int, logprob: float | None) -> Json:
        text, encoded = self._token_of(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(encoded)}


def _function_call(call: Call) -> Json:
    """Return a call in the form that it had before there were tools."""
    return {"function_call": {"name": call.name, "arguments": call.arguments}}


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST_LOGPROB)


def openai_body(error: RequestError) -> Json:
    """Return an error in OpenAI's form; its `type` depends on the status."""
    other = "server_error" if error.status >= 500 else "invalid_request_error"
    kind = "rate_limit_error" if error.status == 429 else other
    told = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    return {"error": told}
