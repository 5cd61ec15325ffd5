"""OpenAI's answers on its Responses API: items as JSON, whole or in the events of a stream.

This module only builds the JSON; it does not use sockets, requests or the engine.
"""

import itertools
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from tieredkv.engine.engine_messages import RequestUsage
from tieredkv.errors import RequestError
from tieredkv.server.asked import Json, Shape
from tieredkv.server.generation import Piece
from tieredkv.server.message_parser import Call, Delta
from tieredkv.server.reply import Reply
from tieredkv.server.response_tools import Offered, item_of_call
from tieredkv.server.stored_responses import RESPONSE_ID, item_id

QUIET_S = 10.0
"""Seconds after which a stream that has nothing to show tells that it goes on.

Nothing is shown while a call is written. Clients such as Codex end a stream in which no event has
come for some minutes.
"""

_TEXTS = {
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}
"""What events of a stream are called that bring the text of a call, and the field that has it."""

_WORDS = {
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "local_shell_call": "lsh",
    "shell_call": "sh",
    "apply_patch_call": "apc",
    "tool_search_call": "tsc",
}
"""What the ids of items begin with."""

_COMPARED = {
    "not_found": "comparison_response_not_found",
    "hit": "cache_hit",
    "unavailable": "unavailable",
}
"""The diagnosis type for each comparison that found no change."""


class ResponseShape(Shape):
    """Answers of `/v1/responses`.

    Args:
        echo: fields that repeat those of the request; several events of a stream have them.
        offered: the tools that the model was told of, by the names that it knows them by.
        is_prewarm: whether no answer is wanted.
        left_out: the types of the tools that the model was not told of.
    """

    id_prefix = RESPONSE_ID
    names_events = True

    def __init__(
        self,
        echo: Json,
        offered: Mapping[str, Offered],
        *,
        is_prewarm: bool,
        left_out: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.left_out = left_out
        self._echo, self._offered, self._is_prewarm = echo, offered, is_prewarm
        self._numbers = itertools.count()
        self._is_created = False  # whether the stream has told so

    def whole(self, answers: Sequence[Reply]) -> Json:
        """Return the answer with its items."""
        (answer,) = answers
        is_cut = answer.finish_reason == "length" and not self._is_prewarm
        status = "incomplete" if is_cut else "completed"
        parts = answer.parts or [Delta()]
        if self._is_prewarm:
            parts = []
        # Only the last part can be cut, and a call is whole or none.
        whole = [part.call is not None or i < len(parts) - 1 for i, part in enumerate(parts)]
        output = [
            self._item(i, part, "completed" if whole[i] else status) for i, part in enumerate(parts)
        ]
        response = {
            **self._response(status, output),
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": self._usage(answer),
            **self._diagnostics(answer.usage),
        }
        if self.keep is not None:
            self.keep(response)
        return response

    def waiting(self) -> Sequence[Json]:
        """Return the events that say that the response is in progress."""
        names, self._is_created = ("created", "in_progress")[self._is_created :], True
        return [self._event(name, response=self._response("in_progress", [])) for name in names]

    async def events(
        self, answers: Sequence[Reply], pieces: AsyncIterator[Piece]
    ) -> AsyncIterator[Json]:
        """Yield the events of the response, its items, and the parts of these.

        The events of a part lie between those of its item, and these between those of the response.
        """
        if not self._is_created:
            for event in self.waiting():
                yield event
        (answer,), num_items, last, shown_at = answers, 0, None, time.monotonic()
        async for piece in pieces:
            deltas = [] if self._is_prewarm else [*filter(any, piece.deltas)]
            if deltas:
                shown_at = time.monotonic()
            elif time.monotonic() - shown_at >= QUIET_S:
                shown_at = time.monotonic()
                yield self._still(answer.parts[:num_items], last)
            for delta in deltas:
                if last is None or not delta.continues(last):
                    for event in self._item_end(num_items - 1, answer.parts):
                        yield event
                    for event in self._item_start(num_items, delta):
                        yield event
                    num_items, last = num_items + 1, delta
                for event in self._item_delta(num_items - 1, delta):
                    yield event
        response = self.whole(answers)
        if not num_items and response["output"]:  # a message without text
            for event in self._item_start(num_items, Delta()):
                yield event
            num_items = 1
        for event in self._item_end(num_items - 1, answer.parts, response["output"]):
            yield event
        yield self._event(response["status"], response=response)

    def failure(self, error: RequestError) -> Sequence[Json]:
        """Return the events that end a stream that failed.

        Codex compacts its conversation if the failed response has `context_length_exceeded`.
        """
        begun = () if self._is_created else self.waiting()
        told = {"code": error.code or "server_error", "message": str(error)}
        response = {**self._response("failed", []), "error": told}
        return [*begun, self._event("failed", response=response)]

    def _event(self, name: str, /, **fields: Any) -> Json:
        return {"type": f"response.{name}", "sequence_number": next(self._numbers), **fields}

    def _item_start(self, index: int, part: Delta) -> Iterator[Json]:
        item = self._item(index, part, "in_progress", is_start=True)
        yield self._event("output_item.added", output_index=index, item=item)
        if part.call is None:
            where = self._where(index, part)
            yield self._event("content_part.added", **where, part=_part(part, is_start=True))

    def _item_delta(self, index: int, delta: Delta) -> Iterator[Json]:
        where = self._where(index, delta)
        if delta.call is not None:
            kind, told = self._called(delta.call)
            if kind in _TEXTS:
                name, field = _TEXTS[kind]
                yield self._event(f"{name}.delta", **where, delta=told[field])
        elif delta.thoughts:
            yield self._event("reasoning_text.delta", **where, delta=delta.thoughts)
        else:
            yield self._event("output_text.delta", **where, delta=delta.text, logprobs=[])

    def _still(self, parts: Sequence[Delta], last: Delta | None) -> Json:
        """Return an event that adds nothing to the parts that the stream has so far.

        Clients may replace what they have by the response of an event, so that this holds nothing
        of a text that is not complete.
        """
        if last is None or last.call is not None:
            output = [self._item(i, part, "completed") for i, part in enumerate(parts)]
            return self._event("in_progress", response=self._response("in_progress", output))
        where = self._where(len(parts) - 1, last)
        if last.thoughts:
            return self._event("reasoning_text.delta", **where, delta="")
        return self._event("output_text.delta", **where, delta="", logprobs=[])

    def _item_end(
        self, index: int, parts: Sequence[Delta], output: Sequence[Json] = ()
    ) -> Iterator[Json]:
        if index < 0:
            return
        part = parts[index] if parts else Delta()
        where = self._where(index, part)
        if part.call is not None:
            kind, told = self._called(part.call)
            if kind in _TEXTS:
                name, field = _TEXTS[kind]
                named = {"name": told["name"]} if kind == "function_call" else {}
                yield self._event(f"{name}.done", **where, **named, **{field: told[field]})
        elif part.thoughts:
            yield self._event("reasoning_text.done", **where, text=part.thoughts)
        else:
            yield self._event("output_text.done", **where, text=part.text, logprobs=[])
        if part.call is None:
            yield self._event("content_part.done", **where, part=_part(part))
        item = output[index] if output else self._item(index, part, "completed")
        yield self._event("output_item.done", output_index=index, item=item)

    def _called(self, call: Call) -> tuple[str, Json]:
        return item_of_call(call.name, call.arguments, self._offered)

    def _where(self, index: int, part: Delta) -> Json:
        where = {"item_id": self._id(index, part), "output_index": index}
        return where if part.call is not None else {**where, "content_index": 0}

    def _id(self, index: int, part: Delta) -> str:
        """Return the id of an item, which holds that of the response."""
        word = "rs" if part.thoughts else "msg"
        if part.call is not None:
            word = _WORDS[self._called(part.call)[0]]
        return item_id(word, self.id, index)

    def _item(self, index: int, part: Delta, status: str, *, is_start: bool = False) -> Json:
        """Return an item of the output, or what a stream begins it with."""
        head = {"id": self._id(index, part)}
        content = [] if is_start else [_part(part)]
        if part.call is not None:
            kind, told = self._called(part.call)
            if is_start and kind in _TEXTS:
                told[_TEXTS[kind][1]] = ""
            told = {"call_id": f"call_{part.call.id}", **told}
            return {**head, "type": kind, "status": status, **told}
        if part.thoughts:
            return {**head, "type": "reasoning", "summary": [], "content": content}
        how = {"status": status, "role": "assistant", "content": content}
        return {**head, "type": "message", **how}

    def _response(self, status: str, output: list[Json]) -> Json:
        nothing = dict.fromkeys(("error", "incomplete_details", "usage"))
        head = {"id": self.id, "object": "response", "created_at": self.created}
        how = {"status": status, "output": output, "background": False}
        return {**head, **self._echo, **nothing, **how, **self.not_done}

    def _diagnostics(self, usage: RequestUsage) -> Json:
        if (found := self.diagnosis.compare(usage)) is None:
            return {}
        told: Json = {"type": _COMPARED.get(found.kind, "cache_miss")}
        if found.kind not in _COMPARED:
            reason = "input" if found.kind in ("system", "messages") else found.kind
            num_missed = usage.prompt_tokens - usage.miss_token
            told |= {"reason": f"{reason}_changed", "cache_missed_tokens": num_missed}
            told["comparison_reusable_tokens"] = found.at_token
        return {"prompt_cache_diagnostics": told}

    def _usage(self, answer: Reply) -> Json:
        usage, num_long = answer.usage, self.written_for(answer, "12h")
        num_short = usage.written_tokens - num_long
        by_ttl = {"ttl_30m_tokens": num_short, "ttl_12h_tokens": num_long}
        num_output = len(answer.token_ids)
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {**self.caching([usage]), "cache_write_tokens_details": by_ttl},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": answer.num_thought_tokens},
            "total_tokens": usage.prompt_tokens + num_output,
            "tieredkv": self.receipt([usage]),
        }


def _part(part: Delta, *, is_start: bool = False) -> Json:
    """Return the part of an item's content, or what a stream begins it with."""
    if part.thoughts:
        return {"type": "reasoning_text", "text": "" if is_start else part.thoughts}
    text = "" if is_start else part.text
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
