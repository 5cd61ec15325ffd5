"""Anthropic's responses: one answer as a message, whole or as named events.

It knows shapes, no sockets and no engine.
"""

import uuid
from collections.abc import AsyncIterator, Sequence

from tieredkv.engine.answer import Answer
from tieredkv.errors import RequestError
from tieredkv.server.asked import Json, Shape, written_for
from tieredkv.server.diagnosis import Diagnosis, told_of
from tieredkv.server.error_bodies import anthropic_body
from tieredkv.server.generation import Piece


def usage_body(answer: Answer, num_output_tokens: int, diagnosis: Diagnosis) -> Json:
    """Return a `usage` object: read, written and other tokens of the prompt make up all of it.

    What breakpoints of an hour cover is written for an hour, all else for five minutes.
    `tieredkv` is an addition of ours.
    """
    usage, for_an_hour = answer.usage, written_for(answer, "1h")
    num_read, num_written = usage.cached_tokens, usage.written_tokens
    return {
        "input_tokens": usage.prompt_tokens - num_read - num_written,
        "cache_creation_input_tokens": num_written,
        "cache_read_input_tokens": num_read,
        "cache_creation": {
            "ephemeral_5m_input_tokens": num_written - for_an_hour,
            "ephemeral_1h_input_tokens": for_an_hour,
        },
        "output_tokens": num_output_tokens,
        "tieredkv": told_of([usage], diagnosis),
    }


class MessageShape(Shape):
    """`/v1/messages`; what is generated where no token was asked for is not told."""

    names_events = True
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, model: str, max_tokens: int) -> None:
        self.id = f"msg_{uuid.uuid4().hex}"
        self._head = {"id": self.id, "type": "message", "role": "assistant"}
        self._head["model"] = model
        self._max_tokens = max_tokens

    def whole(self, answers: Sequence[Answer]) -> Json:
        """Return the message with its text."""
        text = answers[0].text if self._max_tokens else ""
        content = [{"type": "text", "text": text}] if text else []
        body = {"content": content, **self._ending(answers[0]), "usage": self._usage(answers[0])}
        return {**self._head, **self._diagnostics(answers[0]), **body}

    async def events(
        self, answers: Sequence[Answer], pieces: AsyncIterator[Piece]
    ) -> AsyncIterator[Json]:
        """Yield the message with its usage so far, its one text in pieces, and how it ended."""
        message: Json = {**self._head, "content": [], "usage": self._usage(answers[0])}
        message |= {"stop_reason": None, "stop_sequence": None, **self._diagnostics(answers[0])}
        text = {"type": "text", "text": ""}
        yield {"type": "message_start", "message": message}
        yield {"type": "content_block_start", "index": 0, "content_block": text}
        yield {"type": "ping"}
        async for piece in pieces:
            delta = {"type": "text_delta", "text": piece.text}
            yield {"type": "content_block_delta", "index": 0, "delta": delta}
        yield {"type": "content_block_stop", "index": 0}
        ending, usage = self._ending(answers[0]), self._usage(answers[0])
        yield {"type": "message_delta", "delta": ending, "usage": usage}
        yield {"type": "message_stop"}

    def failure(self, error: RequestError) -> Json:
        """Return the error as answers have it."""
        return anthropic_body(error)

    def _ending(self, answer: Answer) -> Json:
        stopped_by = answer.stopped_by if self._max_tokens else None
        is_cut_short = len(answer.token_ids) < self._max_tokens
        reason = "model_context_window_exceeded" if is_cut_short else "max_tokens"
        if answer.finish_reason == "stop" and self._max_tokens:
            reason = "end_turn" if stopped_by is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stopped_by}

    def _usage(self, answer: Answer) -> Json:
        num_output_tokens = min(len(answer.token_ids), self._max_tokens)
        return usage_body(answer, num_output_tokens, self.diagnosis)

    def _diagnostics(self, answer: Answer) -> Json:
        diagnosis, usage = self.diagnosis, answer.usage
        if diagnosis.compared_id is None:
            return {"diagnostics": None}
        told: Json = {"type": "previous_message_not_found"}
        if diagnosis.compared is not None:
            found = diagnosis.divergence(usage)
            if found is None or not found.kind:
                return {"diagnostics": None}
            num_missed = max(0, diagnosis.compared.num_tokens - found.at_token)
            told = {"type": f"{found.kind}_changed", "cache_missed_input_tokens": num_missed}
        return {"diagnostics": {"cache_miss_reason": told}}
