"""OpenAI's Responses API.

Input items are converted to chat messages, so that both endpoints render the same tokens. A request
may continue a stored response: then the items of that conversation come before its own. It may also
name single items of stored responses by their ids.
"""

import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Self, get_args

import msgspec
from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationInfo,
    field_serializer,
)

from tieredkv.errors import MAX_TOLD_CHARACTERS, RequestError
from tieredkv.fields import Object, list_of, names_of, out_of_bounds, parse_body, read
from tieredkv.retention import ALIASES
from tieredkv.server import hosted
from tieredkv.server import openai_api as openai
from tieredkv.server.asked import Asked, Json, Rules, Text, tell_left_out
from tieredkv.server.chat import Tokenization
from tieredkv.server.chat_template import Effort
from tieredkv.server.known_fields import RESPONSE_PART, RESPONSES
from tieredkv.server.openai_messages import (
    CUSTOM_INPUT,
    FAIL_FAST,
    CalledFunction,
    ContentPart,
    Message,
    ToolCall,
    Ttl,
    whole_turns,
)
from tieredkv.server.response_answers import ResponseShape
from tieredkv.server.response_tools import (
    Offered,
    Tool,
    called_with,
    left_out,
    name_for_model,
    offered,
    read_tool,
)
from tieredkv.server.stored_responses import Turn
from tieredkv.server.structure import Format
from tieredkv.server.structure_fields import TEXT_FORMAT, TextFormat, only_one

MAX_ITEMS = 16_384


class _Known(Object):
    """Fields of items and parts that have no effect; some come from answers that are sent back."""

    known_besides = names_of("""
        id status phase annotations logprobs async caller namespace name
        allowed_callers defer_loading output_schema context mode
    """)


class InputPart(ContentPart, _Known):
    """One part of an item: a text, or a picture or the like, for which a note stands."""

    known_besides = _Known.known_besides | names_of(
        "image_url file_id detail file_data file_url filename input_audio"
    )
    needed = ("input_text.text", "output_text.text", "refusal.refusal")
    refused = RESPONSE_PART

    type: Literal[
        "input_text", "output_text", "refusal", "input_image", "input_file", "input_audio"
    ]  # type: ignore[assignment]


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
    namespace: str | None = None

    @property
    def function(self) -> CalledFunction:
        """The call as the model wrote it."""
        name = name_for_model(self.name, self.namespace)
        return CalledFunction.model_construct(name=name, arguments=self.arguments)

    @field_serializer("arguments")
    def _write(self, arguments: Any) -> str:
        return msgspec.json.encode(arguments).decode()


class CustomCall(_Known):
    """A call of a tool that takes a text."""

    type: Literal["custom_tool_call"]
    call_id: Text
    name: Text
    input: str
    namespace: str | None = None

    @property
    def function(self) -> CalledFunction:
        """The call as the model wrote it."""
        name = name_for_model(self.name, self.namespace)
        return CalledFunction.model_construct(name=name, arguments={CUSTOM_INPUT: self.input})


class ClientCall(_Known):
    """A call of a tool that the API knows by its type, and that the client runs."""

    known_besides = _Known.known_besides | names_of("environment max_output_length")

    type: Literal["apply_patch_call", "local_shell_call", "shell_call"]
    call_id: Text
    action: Json = Field({})
    operation: Json = Field({})

    @property
    def function(self) -> CalledFunction:
        """The call as the model wrote it."""
        kind = self.type.removesuffix("_call")
        given = called_with(kind, {"action": self.action, "operation": self.operation})
        return CalledFunction.model_construct(name=kind, arguments=given)


class ClientOutput(_Known):
    """What came of such a call."""

    known_besides = ClientCall.known_besides

    type: Literal["apply_patch_call_output", "local_shell_call_output", "shell_call_output"]
    call_id: str = ""
    id: str = ""
    output: Any = None
    status: str = ""

    @property
    def parts(self) -> list[InputPart]:
        """The text that the model is told."""
        texts = [self.status] if self.type == "apply_patch_call_output" else []
        if isinstance(self.output, str):
            texts.append(self.output)
        elif self.output is not None:
            texts.append(hosted.readable(self.output))
        return [InputPart(type="input_text", text="\n".join(filter(None, texts)))]


class FunctionOutput(_Known):
    """The output of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Text | None = None
    output: Texts


class Thoughts(_Known):
    """What the model thought before what follows."""

    known_besides = _Known.known_besides | names_of("summary encrypted_content")

    type: Literal["reasoning"]
    content: Any = None

    def __str__(self) -> str:
        parts = self.content if isinstance(self.content, list) else []
        texts = (part.get("text") for part in parts if isinstance(part, dict))
        return "".join(text for text in texts if isinstance(text, str))


class HostedItem(Object):
    """What a provider's servers have done, or what only they could do."""

    model_config = ConfigDict(extra="allow")

    type: hosted.ItemType

    def __str__(self) -> str:
        return hosted.note(self.model_dump())


class AdditionalTools(_Known):
    """Tools that may be called beside those of the request."""

    type: Literal["additional_tools"]
    role: Literal["developer"] = "developer"
    tools: list[Annotated[Tool, BeforeValidator(read_tool)]] = Field(max_length=1024)


class Reference(Object):
    """Stands for an item of a stored response."""

    type: Literal["item_reference"]
    id: Text


class _Typed(Object):
    """The type of an input item, which decides how the item is read."""

    type: Literal[
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "apply_patch_call",
        "apply_patch_call_output",
        "local_shell_call",
        "local_shell_call_output",
        "shell_call",
        "shell_call_output",
        "reasoning",
        "item_reference",
        "additional_tools",
        hosted.ItemType,
    ] = "message"


Item = (
    InputMessage
    | FunctionCall
    | CustomCall
    | ClientCall
    | FunctionOutput
    | ClientOutput
    | Thoughts
    | Reference
    | AdditionalTools
    | HostedItem
)
_ITEMS: dict[str, type[Any]] = {
    "message": InputMessage,
    "function_call": FunctionCall,
    "function_call_output": FunctionOutput,
    "custom_tool_call": CustomCall,
    "custom_tool_call_output": FunctionOutput,
    **dict.fromkeys(get_args(ClientCall.model_fields["type"].annotation), ClientCall),
    **dict.fromkeys(get_args(ClientOutput.model_fields["type"].annotation), ClientOutput),
    "reasoning": Thoughts,
    "item_reference": Reference,
    "additional_tools": AdditionalTools,
}


def _read_item(value: Any, info: ValidationInfo) -> Item:
    kind = _ITEMS.get(_Typed.model_validate(value).type, HostedItem)
    item: Item = kind.model_validate(value, context=info.context)
    return item


Input = Annotated[
    list[Annotated[Item, BeforeValidator(_read_item)]],
    Field(min_length=1, max_length=MAX_ITEMS),
    list_of(lambda text: {"role": "user", "content": text}),
]


class _Conversation(Object):
    """The items of a stored conversation."""

    input: list[Annotated[Item, BeforeValidator(_read_item)]]


class TextOptions(Object):
    """The form of the answer's text."""

    format: Annotated[Json, TEXT_FORMAT] = Field(default={"type": "text"})
    verbosity: openai.Verbosity | None = None


class Reasoning(_Known):
    """How much the model should think."""

    effort: Effort | None = None
    summary: str | None = None
    generate_summary: str | None = None


class Options(openai.CacheOptions):
    """Cache options, including those that only this endpoint has."""

    ttl: Ttl = "30m"  # type: ignore[assignment]
    prewarm: bool = False
    comparison_response_id: str | None = None


class ResponsesRequest(openai.ConversationRequest):
    """The body of `POST /v1/responses`."""

    without_effect = RESPONSES.without_effect
    known_besides = openai.SAMPLING_FIELDS | without_effect
    refused = RESPONSES.refused
    prompt_field = "input"

    input: Input
    previous_response_id: Text | None = None
    store: bool = True
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    text: TextOptions = TextOptions()
    tools: list[Annotated[Tool, BeforeValidator(read_tool)]] = Field([], max_length=1024)
    prompt_cache_options: Options | None = None

    reasoning: Reasoning | None = None

    # These are checked and have no effect.
    truncation: Literal["auto", "disabled"] = "disabled"
    include: list[str] = Field([])
    max_tool_calls: int | None = None

    _before: Turn | None = PrivateAttr(None)
    _earlier: Sequence[Item] = PrivateAttr(())

    @property
    def references(self) -> list[str]:
        """The ids of the stored items that `input` refers to, as often as it does."""
        return [item.id for item in self.input if isinstance(item, Reference)]

    def resolved(self, items: Mapping[str, bytes], max_values: int) -> Self:
        """Return the request with the stored items in place of the references to them.

        Args:
            items: the stored items as JSON, by their ids.
            max_values: how many JSON values they may hold.

        Raises:
            RequestError: they hold more.
        """
        what = "The array of items that 'input' refers to"
        parsed = parse_body(b'{"input":[%b]}' % b",".join(items.values()), max_values, what=what)
        found = dict(zip(items, read(_Conversation, parsed).input, strict=True))
        given = [found[it.id] if isinstance(it, Reference) else it for it in self.input]
        return self.model_copy(update={"input": given})

    def continuing(self, before: Turn, max_values: int) -> Self:
        """Return the request with the conversation that it continues.

        Args:
            before: the last turn of the conversation.
            max_values: how many JSON values the conversation may hold.

        Raises:
            RequestError: the conversation has become too long.
        """
        what = "The conversation that 'previous_response_id' continues"
        parsed = parse_body(b'{"input":%b}' % before.conversation(), max_values, what=what)
        earlier = read(_Conversation, parsed).input
        if len(earlier) + len(self.input) > MAX_ITEMS:
            raise out_of_bounds("input", "max_length", MAX_ITEMS, [*earlier, *self.input])
        request = self.model_copy()
        request._before, request._earlier = before, earlier
        return request

    def turn(self) -> Turn:
        """Return the conversation with the items of this request."""
        items = [item.model_dump(mode="json", exclude_unset=True) for item in self.input]
        return Turn(joined(items), self._before)

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
        """All messages; thoughts become part of the message after them."""
        turns: list[tuple[str, Message]] = []
        thoughts = ""
        if self.instructions:
            part = ContentPart(type="text", text=self.instructions)
            turns.append(("instructions", Message(role="system", content=[part], tool_calls=[])))
        for i, item in enumerate([*self._earlier, *self.input], -len(self._earlier)):
            path = f"input[{i}]" if i >= 0 else "previous_response_id"
            match item:
                case FunctionCall() | CustomCall() | ClientCall():
                    call = ToolCall(id=item.call_id, function=item.function)
                    calling = Message.model_construct(role="assistant", tool_calls=[call])
                    turns.append(("", _with(calling, thoughts)))
                case FunctionOutput(call_id=id, output=parts):
                    tool = Message.model_construct(role="tool", content=parts, tool_call_id=id)
                    turns.append((f"{path}.output", tool))
                case ClientOutput():
                    id, parts = item.call_id or item.id, item.parts
                    tool = Message.model_construct(role="tool", content=parts, tool_call_id=id)
                    turns.append((path, tool))
                case InputMessage():
                    turns.append((f"{path}.content", _with(item, thoughts)))
                case HostedItem():
                    part = ContentPart(type="text", text=str(item))
                    message = Message(role="assistant", content=[part], tool_calls=[])
                    turns.append((path, _with(message, thoughts)))
            thoughts = str(item) if isinstance(item, Thoughts) else ""
        return whole_turns(turns)

    @property
    def tool_names(self) -> Sequence[str]:
        """The names of the tools that the model is told of, as the client knows them."""
        return [tool.name for tool in self.offered.values()]

    @cached_property
    def text_format(self) -> Format | None:
        """The format of the answer's text; None for any text.

        Raises:
            RequestError: it cannot be enforced, or there are several.
        """
        wanted = TextFormat.model_validate(self.text.format)
        return only_one([wanted.format_at("text.format", wanted.type), super().text_format])

    @cached_property
    def offered(self) -> dict[str, Offered]:
        """The tools that the model is told of, by the names that it knows them by."""
        return offered(self.all_tools)

    @cached_property
    def all_tools(self) -> Sequence[Tool]:
        """The tools of the request, and those that its items bring."""
        items = (it for it in (*self._earlier, *self.input) if isinstance(it, AdditionalTools))
        return [*self.tools, *itertools.chain.from_iterable(it.tools for it in items)]

    def check(self, rules: Rules) -> None:
        """Refuse fields that contradict each other or that this server does not support."""
        if rules.is_strict and (kinds := left_out(self.all_tools)):
            what = f"'{kinds[0]}' tools are not supported. Only tools that the client runs are."
            raise RequestError(what, param="tools", code="unsupported_parameter")
        offered(self.all_tools)  # refuses two tools of one name
        super().check(rules)

    def ask(self, tokenization: Tokenization, rules: Rules) -> Asked:
        """Render the conversation."""
        functions = [tool.function for tool in self.offered.values()]
        arguments = {"tools": [{"type": "function", "function": it} for it in functions] or None}
        arguments |= openai.thinking_of(self.reasoning.effort if self.reasoning else None)
        tell_left_out(left_out(self.all_tools))
        options = self.prompt_cache_options
        compared_id = options.comparison_response_id if options else None
        is_stored = self.store and rules.settings.stored_responses_size > 0
        echo = {**self.echo(), "store": is_stored}
        shape = ResponseShape(echo, self.offered, is_prewarm=self.is_prewarm)
        how: Json = {"shape": shape, "turn": self.turn() if is_stored else None}
        return self.render(tokenization, rules, arguments, compared_id=compared_id, **how)

    def echo(self) -> Json:
        """Return the fields of the answer that repeat those of the request."""
        names = "max_output_tokens max_tool_calls metadata model parallel_tool_calls reasoning text"
        names += " instructions tools truncation temperature top_p prompt_cache_key user"
        names += " prompt_cache_options prompt_cache_retention safety_identifier"
        names += " previous_response_id"
        told = self.model_dump(mode="json", include=set(names.split()))
        kept = self.prompt_cache_retention
        told["prompt_cache_retention"] = kept and ALIASES.get(kept, kept)
        if kinds := left_out(self.all_tools):
            told["tieredkv"] = {"left_out_tools": kinds}
        return {**told, "tool_choice": self.tool_choice or "auto"}


def joined(items: Sequence[Json]) -> bytes:
    """Return items as JSON, with commas between them."""
    return b",".join(map(msgspec.json.encode, items))


def _with(message: Message, thoughts: str) -> Message:
    """Return a message with the thoughts before it."""
    return message.model_copy(update={"reasoning_content": thoughts}) if thoughts else message


class Page(Object):
    """The query of `GET /v1/responses/ID/input_items`."""

    known_besides = names_of("include include[]")

    limit: Annotated[int, Field(strict=False)] = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"
    after: str = ""

    def of(self, items: Sequence[Json]) -> Json:
        """Return the page of a list that begins behind the item `after`.

        Raises:
            RequestError: there is no such item.
        """
        ordered = [*items] if self.order == "asc" else [*items][::-1]
        ids = [item["id"] for item in ordered]
        if self.after and self.after not in ids:
            what = f"No item has the id '{self.after[:MAX_TOLD_CHARACTERS]}'."
            raise RequestError(what, param="after", code="invalid_value")
        start = ids.index(self.after) + 1 if self.after else 0
        some, end = ordered[start : start + self.limit], start + self.limit
        told = {"first_id": ids[start], "last_id": ids[start:end][-1]} if some else {}
        return {"object": "list", "data": some, **told, "has_more": end < len(ids)}
