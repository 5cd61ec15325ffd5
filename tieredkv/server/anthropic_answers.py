"""Anthropic's answers: messages as JSON, whole or in events, and errors.

This module only builds the JSON; it does not use sockets, requests or the engine.
"""

import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence

from tieredkv.errors import PromptTooLongError, RequestError
from tieredkv.server.asked import Json, Shape
from tieredkv.server.generation import Piece
from tieredkv.server.message_parser import Delta
from tieredkv.server.reply import Reply

PING: Json = {"type": "ping"}


class MessageShape(Shape):
    """Answers of `/v1/messages`.

    Args:
        model: that answers.
        max_tokens: the longest answer.
        left_out: the types of the tools that the model was not told of.
    """

    id_prefix = "msg_"
    names_events = True

    def __init__(self, model: str, max_tokens: int, left_out: Sequence[str] = ()) -> None:
        super().__init__()
        self._head: Json = {"id": self.id, "type": "message", "role": "assistant", "model": model}
        self.left_out = left_out
        self._max_tokens = max_tokens

    def whole(self, answers: Sequence[Reply]) -> Json:
        """Return the message with its blocks."""
        content = [_block(part) for part in answers[0].parts]
        body = {"content": content, **self._ending(answers[0]), "usage": self._usage(answers[0])}
        return {**self._head, **self._diagnostics(answers[0]), **body, **self.not_done}

    def waiting(self) -> Sequence[Json]:
        """Return an event that says nothing."""
        return [PING]

    async def events(
        self, answers: Sequence[Reply], pieces: AsyncIterator[Piece]
    ) -> AsyncIterator[Json]:
        """Yield the start of the message, its blocks in pieces, and how the message ended."""
        message: Json = {**self._head, "content": [], "usage": self._usage(answers[0])}
        message |= {"stop_reason": None, "stop_sequence": None, **self._diagnostics(answers[0])}
        message |= self.not_done
        yield {"type": "message_start", "message": message}
        num_blocks, last = 0, None
        async for piece in pieces:
            deltas = piece.deltas
            if not deltas and last is not None and Delta().continues(last):
                deltas = [Delta()]  # an event for every token
            elif not deltas:
                yield PING
            for delta in deltas:
                if last is None or not delta.continues(last):
                    for event in _block_end(last, num_blocks - 1):
                        yield event
                    start = {"type": "content_block_start", "index": num_blocks}
                    yield {**start, "content_block": _block(delta, is_start=True)}
                    if last is None:
                        yield PING
                    num_blocks, last = num_blocks + 1, delta
                yield _block_delta(num_blocks - 1, **_added(delta))
        for event in _block_end(last, num_blocks - 1):
            yield event
        ending, usage = self._ending(answers[0]), self._usage(answers[0])
        yield {"type": "message_delta", "delta": ending, "usage": usage, **self.not_done}
        yield {"type": "message_stop", **self.not_done}

    def failure(self, error: RequestError) -> Sequence[Json]:
        """Return the event that ends a stream that failed."""
        return [anthropic_body(error, self.request_id)]

    def _ending(self, answer: Reply) -> Json:
        stopped_by = answer.stopped_by
        is_cut_short = len(answer.token_ids) < self._max_tokens
        reason = "model_context_window_exceeded" if is_cut_short else "max_tokens"
        if answer.finish_reason == "stop":
            reason = "end_turn" if stopped_by is None else "stop_sequence"
        if answer.ends_with_calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": stopped_by}

    def _usage(self, answer: Reply) -> Json:
        """Return a `usage` object, whose counts of input tokens add up to the prompt's length.

        Tokens written up to the last one-hour breakpoint count as written for one hour. All other
        written tokens count as written for five minutes.
        """
        usage, for_an_hour = answer.usage, self.written_for(answer, "1h")
        num_read, num_written = usage.cached_tokens, usage.written_tokens
        return {
            "input_tokens": usage.prompt_tokens - num_read - num_written,
            "cache_creation_input_tokens": num_written,
            "cache_read_input_tokens": num_read,
            "cache_creation": {
                "ephemeral_5m_input_tokens": num_written - for_an_hour,
                "ephemeral_1h_input_tokens": for_an_hour,
            },
            "output_tokens": len(answer.token_ids),
            "output_tokens_details": {"thinking_tokens": answer.num_thought_tokens},
            "tieredkv": self.receipt([usage]),
        }

    def _diagnostics(self, answer: Reply) -> Json:
        found, compared = self.diagnosis.compare(answer.usage), self.diagnosis.compared
        if found is None or found.kind in ("hit", "unavailable"):
            return {"diagnostics": None}
        told: Json = {"type": "previous_message_not_found"}
        if compared is not None:
            num_missed = max(0, compared.num_tokens - found.at_token)
            told = {"type": f"{found.kind}_changed", "cache_missed_input_tokens": num_missed}
        return {"diagnostics": {"cache_miss_reason": told}}


_SIGNATURE = "tieredkv"
"""Thoughts come with a signature, which clients send back with them; here it says nothing."""


def _block(part: Delta, *, is_start: bool = False) -> Json:
    """Return the content block of a part of a message, or what a stream begins it with."""
    if part.call is not None:
        given = {} if is_start else json.loads(part.call.arguments)
        id = f"toolu_{part.call.id}"
        return {"type": "tool_use", "id": id, "name": part.call.name, "input": given}
    if part.thoughts:
        thoughts, signature = ("", "") if is_start else (part.thoughts, _SIGNATURE)
        return {"type": "thinking", "thinking": thoughts, "signature": signature}
    return {"type": "text", "text": "" if is_start else part.text}


def _added(delta: Delta) -> Json:
    """Return what a delta adds to its content block."""
    if delta.call is not None:
        return {"type": "input_json_delta", "partial_json": delta.call.arguments}
    if delta.thoughts:
        return {"type": "thinking_delta", "thinking": delta.thoughts}
    return {"type": "text_delta", "text": delta.text}


def _block_delta(index: int, **delta: str) -> Json:
    return {"type": "content_block_delta", "index": index, "delta": delta}


def _block_end(part: Delta | None, index: int) -> Iterator[Json]:
    """Yield the events that end the content block of a part, if there is one."""
    if part is None:
        return
    if part.thoughts:
        yield _block_delta(index, type="signature_delta", signature=_SIGNATURE)
    yield {"type": "content_block_stop", "index": index}


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Error types by status; for others, 500 and above are `api_error`, all below are the request's."""

STATUS = {408: 504, 503: 529}
"""The statuses of Anthropic's API, by those of OpenAI's where the two are different."""

_ANTHROPIC_WORDS = {
    "missing_required_parameter": "Field required",
    "unknown_parameter": "Extra inputs are not permitted",
}


def anthropic_body(error: RequestError, request_id: str | None) -> Json:
    """Return an error in Anthropic's form.

    This form has no property for the field at fault, so the message names the field, with dots in
    its path. `request_id` is the id in the header of the answer.
    """
    text, path = _ANTHROPIC_WORDS.get(error.code or "", str(error)), error.param or ""
    if isinstance(error, PromptTooLongError) and error.num_tokens:
        # Anthropic's clients look for these words, and compact the conversation then.
        text = f"prompt is too long: {error.num_tokens} tokens > {error.most_tokens} maximum"
        path = ""
    field = _dotted(path)
    if path:
        text = re.sub(rf"{re.escape(path)}[\w.\[\]]*", lambda found: _dotted(found[0]), text)
    text = text if field in text else f"{field}: {text}"
    other = "api_error" if error.status >= 500 else "invalid_request_error"
    told: Json = {"type": _ANTHROPIC_TYPES.get(error.status, other), "message": text}
    if (path, error.code) == ("thread", "unsupported_parameter"):
        # By this, Anthropic's `tool_runner` knows that it has to send whole conversations.
        told["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": told, "request_id": request_id}


def _dotted(path: str) -> str:
    return re.sub(r"\[(\d+)\]", r".\1", path)
