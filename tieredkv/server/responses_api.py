"""OpenAI's Responses API, without the features that store anything between requests.

Input items are converted to chat messages, so that both endpoints render the same tokens.
"""

import itertools
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo

from tieredkv.engine.answer import Answer
from tieredkv.engine.engine_messages import RequestUsage
from tieredkv.errors import RequestError
from tieredkv.fields import Object, list_of, names_of
from tieredkv.retention import ALIASES
from tieredkv.server import openai_api as openai
from tieredkv.server.asked import Asked, Json, Rules, Shape, Text
from tieredkv.server.chat import Tokenization
from tieredkv.server.generation import Piece
from tieredkv.server.known_fields import RESPONSE_PART, RESPONSES, TEXT_FORMAT
from tieredkv.server.openai_api import FAIL_FAST, CalledFunction, ContentPart, Message, ToolCall


class _Known(Object):
    """Fields of items and parts that have no effect; some come from answers that are sent back."""

    known_besides = names_of("""
        id status phase annotations logprobs async caller namespace name
        allowed_callers defer_loading output_schema context mode
    """)


class InputPart(ContentPart, _Known):
    """One part of an item's text."""

    needed = ("input_text.text", "output_text.text", "refusal.refusal")
    refused = RESPONSE_PART

    type: Literal["input_text", "output_text", "refusal"]  # type: ignore[assignment]


Texts = Annotated[
    list[InputPart], FAIL_FAST, list_of(lambda text: {"type": "input_text", "text": text})
]


class InputMessage(_Known, Message):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Texts = Field([])  # type: ignore[assignment]


class FunctionCall(CalledFunction, _Known):
    """A call that the assistant made."""

    type: Literal["function_call"]
    call_id: Text


class FunctionOutput(_Known):
    """The output of a function call."""

    type: Literal["function_call_output"]
    call_id: Text | None = None
    output: Texts


class Thoughts(_Known):
    """What a model thought before it answered; the prompt leaves it out."""

    known_besides = _Known.known_besides | names_of("summary content encrypted_content")

    type: Literal["reasoning"]


class _Typed(Object):
    """The type of an input item, which decides how the item is read."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"


Item = InputMessage | FunctionCall | FunctionOutput | Thoughts
_ITEMS: dict[str, type[Item]] = {
    "message": InputMessage,
    "function_call": FunctionCall,
    "function_call_output": FunctionOutput,
    "reasoning": Thoughts,
}


def _read_item(value: Any, info: ValidationInfo) -> Item:
    kind = _ITEMS[_Typed.model_validate(value).type]
    return kind.model_validate(value, context=info.context)


Input = Annotated[
    list[Annotated[Item, BeforeValidator(_read_item)]],
    Field(min_length=1, max_length=16_384),
    list_of(lambda text: {"role": "user", "content": text}),
]


class FunctionTool(openai.Function, openai.FunctionType, _Known):
    """A function that may be called."""


class TextOptions(Object):
    """The form of the answer's text."""

    refused = TEXT_FORMAT

    format: Json = Field(default={"type": "text"})
    verbosity: openai.Verbosity | None = None


class Reasoning(_Known):
    """How much the model should think; it has no effect."""

    effort: openai.Effort | None = None
    summary: str | None = None
    generate_summary: str | None = None


class Options(openai.CacheOptions):
    """Cache options, including those that only this endpoint has."""

    ttl: openai.Ttl = "30m"  # type: ignore[assignment]
    prewarm: bool = False
    comparison_response_id: str | None = None


class ResponsesRequest(openai.ConversationRequest):
    """The body of `POST /v1/responses`."""

    without_effect = RESPONSES.without_effect
    known_besides = openai.SAMPLING_FIELDS | without_effect
    refused = RESPONSES.refused
    prompt_field = "input"

    input: Input
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    text: TextOptions = TextOptions()
    tools: list[FunctionTool] = Field([], max_length=1024)
    prompt_cache_options: Options | None = None
    temperature: float | None = None

    # These are checked and have no effect.
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    include: list[str] = Field([])
    max_tool_calls: int | None = None

    @property
    def limit(self) -> int | None:
        """The longest answer that the client asks for, in tokens; None if it names no limit."""
        return 0 if self.is_prewarm else self.max_output_tokens

    @property
    def settings(self) -> Json:
        """The fields other than the prompt whose change can explain a cache miss."""
        told = {"reasoning_effort": self.reasoning and self.reasoning.effort}
        return {**super().settings, **told, "verbosity": self.text.verbosity}

    @property
    def is_prewarm(self) -> bool:
        """Whether the request only fills the cache and wants no answer."""
        return self.prompt_cache_options is not None and self.prompt_cache_options.prewarm

    @cached_property
    def turns(self) -> Sequence[tuple[str, Message]]:
        """All messages; a function call becomes part of the assistant's message before it."""
        turns: list[tuple[str, Message]] = []
        called: Message | None = None
        if self.instructions:
            part = ContentPart(type="text", text=self.instructions)
            turns.append(("instructions", Message(role="system", content=[part], tool_calls=[])))
        for i, item in enumerate(self.input):
            match item:
                case FunctionCall():
                    if not (turns and turns[-1][1].role == "assistant"):
                        turns.append(("", Message(role="assistant", content=[], tool_calls=[])))
                    path, last = turns[-1]
                    if last is not called:  # Do not change the client's item.
                        called = last.model_copy(update={"tool_calls": [*last.tool_calls]})
                        turns[-1] = path, called
                    called.tool_calls.append(ToolCall(id=item.call_id, function=item))
                case FunctionOutput(call_id=id, output=parts):
                    tool = Message.model_construct(role="tool", content=parts, tool_call_id=id)
                    turns.append((f"input[{i}].output", tool))
                case InputMessage():
                    turns.append((f"input[{i}].content", item))
        return turns

    def ask(self, tokenization: Tokenization, rules: Rules) -> Asked:
        """Render the conversation."""
        functions = [tool.model_dump(exclude={"type"}, exclude_unset=True) for tool in self.tools]
        arguments = {"tools": [{"type": "function", "function": it} for it in functions] or None}
        options = self.prompt_cache_options
        compared_id = options.comparison_response_id if options else None
        how = {"shape": ResponseShape(self), "compared_id": compared_id}
        return self.render(tokenization, rules, arguments, **how)

    def echo(self) -> Json:
        """Return the fields of the answer that repeat those of the request."""
        names = "max_output_tokens max_tool_calls metadata model parallel_tool_calls reasoning text"
        names += " instructions tools truncation temperature top_p prompt_cache_key user"
        names += " prompt_cache_options prompt_cache_retention safety_identifier"
        told = self.model_dump(mode="json", include=set(names.split()))
        kept = self.prompt_cache_retention
        told["prompt_cache_retention"] = kept and ALIASES.get(kept, kept)
        return {**told, "tool_choice": self.tool_choice or "auto"}


_COMPARED = {
    "not_found": "comparison_response_not_found",
    "hit": "cache_hit",
    "unavailable": "unavailable",
}
"""The diagnosis type for each comparison that found no change."""


class ResponseShape(Shape):
    """Answers of `/v1/responses`."""

    id_prefix = "resp_"
    names_events = True

    def __init__(self, asked: ResponsesRequest) -> None:
        super().__init__()
        self._asked, self._item_id = asked, f"msg_{uuid.uuid4().hex}"
        self._echo = asked.echo()  # Several events of a stream repeat it.
        self._numbers = itertools.count()

    def whole(self, answers: Sequence[Answer]) -> Json:
        """Return the answer with its one message."""
        (answer,) = answers
        is_cut = answer.finish_reason == "length" and not self._asked.is_prewarm
        status = "incomplete" if is_cut else "completed"
        output = [] if self._asked.is_prewarm else [self._item(status, answer.text)]
        return {
            **self._response(status, output),
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": self._usage(answer),
            **self._diagnostics(answer.usage),
        }

    async def events(
        self, answers: Sequence[Answer], pieces: AsyncIterator[Piece]
    ) -> AsyncIterator[Json]:
        """Yield the events of the response, its message, and the one part of the message.

        The events of the part lie between those of the message, and these between those of the
        response.
        """
        for name in ("created", "in_progress"):
            yield self._event(name, response=self._response("in_progress", []))
        where = {"output_index": 0}
        part = {"item_id": self._item_id, **where, "content_index": 0}
        is_shown = not self._asked.is_prewarm
        if is_shown:
            yield self._event("output_item.added", **where, item=self._item("in_progress"))
            yield self._event("content_part.added", **part, part=_part(""))
        async for piece in pieces:
            if is_shown and piece.text:
                yield self._event("output_text.delta", **part, delta=piece.text, logprobs=[])
        response = self.whole(answers)
        if is_shown:
            (item,) = response["output"]
            text = answers[0].text
            yield self._event("output_text.done", **part, text=text, logprobs=[])
            yield self._event("content_part.done", **part, part=_part(text))
            yield self._event("output_item.done", **where, item=item)
        yield self._event(response["status"], response=response)

    def failure(self, error: RequestError) -> Json:
        """Return the last event of a stream that failed."""
        told = {"code": error.code, "message": str(error), "param": error.param}
        return {"type": "error", **told, "sequence_number": next(self._numbers)}

    def _event(self, name: str, **fields: Any) -> Json:
        return {"type": f"response.{name}", "sequence_number": next(self._numbers), **fields}

    def _item(self, status: str, text: str | None = None) -> Json:
        content = [] if text is None else [_part(text)]
        how = {"status": status, "role": "assistant", "content": content}
        return {"id": self._item_id, "type": "message", **how}

    def _response(self, status: str, output: list[Json]) -> Json:
        nothing = dict.fromkeys(("error", "incomplete_details", "previous_response_id", "usage"))
        head = {"id": self.id, "object": "response", "created_at": self.created}
        how = {"status": status, "output": output, "background": False, "store": False}
        return {**head, **self._echo, **nothing, **how}

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

    def _usage(self, answer: Answer) -> Json:
        usage, num_long = answer.usage, self.written_for(answer, "12h")
        num_short = usage.written_tokens - num_long
        by_ttl = {"ttl_30m_tokens": num_short, "ttl_12h_tokens": num_long}
        num_output = len(answer.token_ids)
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {**self.caching([usage]), "cache_write_tokens_details": by_ttl},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + num_output,
        }


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
