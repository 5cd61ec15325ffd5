"""The items of OpenAI's Responses API: what a conversation is made of.

Each type of item is read by a class of its own. What the items of a conversation become as chat
messages is told by `responses_api`.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, get_args

import msgspec
from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_serializer,
    model_validator,
)

from tieredkv.cache_fields import Controlled
from tieredkv.fields import Object, list_of, names_of
from tieredkv.server import hosted
from tieredkv.server.asked import Json, Text
from tieredkv.server.ignored import unknown
from tieredkv.server.known_fields import RESPONSE_PART, UNMARKED
from tieredkv.server.openai_messages import (
    CUSTOM_INPUT,
    FAIL_FAST,
    Arguments,
    CalledFunction,
    ContentPart,
    Message,
    UnknownPart,
    part_reader,
    unknown_parts,
)
from tieredkv.server.response_tools import (
    SEARCH,
    Offered,
    Tool,
    called_with,
    name_for_model,
    offered,
    read_tool,
)
from tieredkv.server.stored_responses import item_id

MAX_ITEMS = 16_384


class _Known(Controlled):
    """Fields of items and parts that have no effect; some come from answers that are sent back.

    They are kept, so that a conversation is listed as it was sent.
    """

    model_config = ConfigDict(extra="allow")
    known_besides = names_of("""
        id status phase annotations logprobs async caller namespace name
        allowed_callers defer_loading output_schema
    """)


_PartType = Literal[
    "input_text", "output_text", "refusal", "input_image", "input_file", "input_audio"
]


class InputPart(ContentPart, _Known):
    """One part of an item: a text, or a picture or the like, for which a note stands."""

    known_besides = _Known.known_besides | names_of(
        "image_url file_id detail file_data file_url filename input_audio"
    )
    needed: ClassVar[tuple[str, ...]] = ("input_text.text", "output_text.text", "refusal.refusal")
    refused = RESPONSE_PART

    type: Literal[_PartType]  # type: ignore[assignment]

    @model_validator(mode="before")
    @classmethod
    def _drop_data(cls, value: Any) -> Any:
        """Drop the bytes of pictures, files and recordings, which would be stored in vain."""
        if not isinstance(value, dict):
            return value
        return {
            name: each
            for name, each in value.items()
            if name not in ("file_data", "input_audio")
            and not (isinstance(each, str) and name == "image_url" and each.startswith("data:"))
        }


class UnknownInputPart(UnknownPart, InputPart):
    """A part of a type that this server does not know, for which a text stands."""

    needed = UnknownPart.needed

    type: Text  # type: ignore[assignment]


Texts = Annotated[
    list[Annotated[InputPart, part_reader(InputPart, get_args(_PartType), UnknownInputPart)]],
    FAIL_FAST,
    list_of(lambda text: {"type": "input_text", "text": text}),
]


class InputMessage(_Known, Message):
    """A message."""

    roles = ("system", "developer", "user", "assistant")

    type: Literal["message"] = "message"
    content: Texts = Field(default_factory=list)  # type: ignore[assignment]


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


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


class CustomCall(_Known):
    """A call of a tool that takes a text."""

    type: Literal["custom_tool_call"]
    call_id: Text
    name: str
    input: Annotated[str, BeforeValidator(_as_text, json_schema_input_type=Any)] = ""
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
    action: Arguments = Field(default_factory=dict)
    operation: Arguments = Field(default_factory=dict)

    @property
    def function(self) -> CalledFunction:
        """The call as the model wrote it."""
        kind = self.type.removesuffix("_call")
        given = called_with(kind, {"action": self.action, "operation": self.operation})
        return CalledFunction.model_construct(name=kind, arguments=given)


class ClientOutput(_Known):
    """What came of a call of a tool that the client runs."""

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

    known_besides = _Known.known_besides | names_of("encrypted_content")

    type: Literal["reasoning"]
    content: Any = None
    summary: Any = None

    def __str__(self) -> str:
        """Return the thoughts or, if they are hidden, their summary."""
        return "".join(_texts_of(self.content)) or "\n".join(_texts_of(self.summary))


def _texts_of(parts: Any) -> Iterator[str]:
    for part in parts if isinstance(parts, list) else ():
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            yield part["text"]


class HostedItem(Controlled):
    """What a provider's servers have done or only they could do, or an item of an unknown type."""

    model_config = ConfigDict(extra="allow")
    takes_any = True
    refused = UNMARKED

    type: Text

    def __str__(self) -> str:
        return hosted.note(self.model_dump())


class SearchCall(_Known):
    """A search for tools that the client runs."""

    type: Literal["tool_search_call"]
    execution: Literal["client"]
    call_id: Text
    arguments: Arguments = Field(default_factory=dict)

    @property
    def function(self) -> CalledFunction:
        """The call as the model wrote it."""
        return CalledFunction.model_construct(name=SEARCH, arguments=self.arguments)


class SearchOutput(_Known):
    """The tools that a search by the client has found; from here on they may be called."""

    type: Literal["tool_search_output"]
    execution: Literal["client"]
    call_id: Text
    tools: list[Annotated[Tool, BeforeValidator(read_tool)]] = Field(max_length=1024)

    @cached_property
    def offered(self) -> dict[str, Offered]:
        """The tools that the model is told of, by the names that it knows them by.

        Raises:
            RequestError: two of them have one name.
        """
        return offered(self.tools)

    @property
    def parts(self) -> list[InputPart]:
        """The text that the model is told."""
        told = [msgspec.json.encode(each.function) for each in self.offered.values()]
        return [InputPart(type="input_text", text=b"\n".join(told).decode())]


class AdditionalTools(_Known):
    """Tools that may be called beside those of the request."""

    type: Literal["additional_tools"]
    role: Text = "developer"
    tools: list[Annotated[Tool, BeforeValidator(read_tool)]] = Field(max_length=1024)


class Reference(Object):
    """Stands for an item of a stored response."""

    type: Literal["item_reference"] = "item_reference"
    id: Text


class _Typed(Object):
    """The type of an input item, which decides how the item is read."""

    type: Text = "message"


Item = (
    InputMessage
    | FunctionCall
    | CustomCall
    | ClientCall
    | FunctionOutput
    | ClientOutput
    | SearchCall
    | SearchOutput
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
_SEARCHES: dict[str, type[Any]] = {
    "tool_search_call": SearchCall,
    "tool_search_output": SearchOutput,
}
"""Items of searches that the client runs; those of OpenAI's servers are `HostedItem`."""


def _read_item(value: Any, info: ValidationInfo) -> Item:
    name = _Typed.model_validate(value).type
    kind = _ITEMS.get(name, HostedItem)
    if value.get("execution") == "client" and value.get("call_id") is not None:
        kind = _SEARCHES.get(name, kind)
    if {key for key, each in value.items() if each is not None} == {"id"}:
        kind = Reference
    item: Item = kind.model_validate(value, context=info.context)
    return item


def ignored_items(items: Sequence[Item]) -> list[str]:
    """Return how an answer names what of the items of `input` is not known."""
    told = list[str]()
    for i, item in enumerate(items):
        path = f"input[{i}]"
        match item:
            case HostedItem():
                told += unknown(f"{path}.type", item.type, hosted.ITEM_TYPES)
            case InputMessage():
                told += item.ignored(path)
            case FunctionOutput():
                told += unknown_parts(f"{path}.output", item.output)
            case AdditionalTools():
                told += unknown(f"{path}.role", item.role, ("developer",))
    return told


Input = Annotated[
    list[Annotated[Item, BeforeValidator(_read_item)]],
    Field(min_length=1, max_length=MAX_ITEMS),
    list_of(lambda text: {"role": "user", "content": text}),
]


class Conversation(Object):
    """The items of a stored conversation."""

    input: list[Annotated[Item, BeforeValidator(_read_item)]]


_OF_PARTS: dict[str, Json] = {"output_text": {"annotations": []}, "input_image": {"detail": "auto"}}
"""Fields that parts have in lists, by the parts' types."""


def listed(items: Sequence[Json], response_id: str) -> list[Json]:
    """Return the items of a conversation with all fields that they have in lists.

    Each has an id of its own.
    """
    made, ids = list[Json](), set[str]()
    for index, item in enumerate(items):
        id, kind = item.get("id"), item.get("type", "message")
        if not isinstance(id, str) or id in ids:
            id = item_id("in", response_id, index)
        ids.add(id)
        told: Json = {"type": kind, **item, "id": id}
        if kind.endswith(("_call", "_output")) or item.get("role") == "assistant":
            told.setdefault("status", "completed")
        if kind.startswith("tool_search"):
            told.setdefault("execution", "server")
        for name in ("content", "output"):
            if isinstance(parts := item.get(name), list) and kind in _HAVE_PARTS:
                told[name] = [_listed_part(part, item.get("role")) for part in parts]
        if kind != "compaction_trigger":  # It is an order, and no part of the conversation.
            made.append(told)
    return made


_HAVE_PARTS = ("message", "function_call_output", "custom_tool_call_output")


def _listed_part(part: Json, role: str | None) -> Json:
    kind = part["type"]
    if role == "assistant" and kind == "input_text":
        kind = "output_text"
    return {**_OF_PARTS.get(kind, {}), **part, "type": kind}
