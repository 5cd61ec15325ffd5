"""The messages and tools of OpenAI's chat, which its Responses become, too.

They have the form that the API gives them; `for_template` returns the one that chat templates know.
"""

import contextlib
import itertools
import json
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from pydantic import (
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from tieredkv.cache_fields import CONTROL, Controlled, Lifetime, Marked
from tieredkv.fields import PARTS, Object, decode_json, is_too_deep, names_of, shape_of
from tieredkv.server.asked import AUDIO_NOTE, DOCUMENT_NOTE, IMAGE_NOTE, Text
from tieredkv.server.hosted import Note, note
from tieredkv.server.ignored import unknown
from tieredkv.server.known_fields import CHAT_MESSAGE, UNMARKED

MAX_ARGUMENT_CONTAINERS = 4096
"""Arguments with more arrays and objects are shown as text."""

MAX_TOOLS = 1024
FAIL_FAST = FailFast()
CUSTOM_INPUT = "input"
"""The one parameter of the function that a custom tool becomes."""

UNREAD = "arguments"
"""The one parameter of a call whose arguments are no JSON object."""

_NOTES = {
    "image_url": IMAGE_NOTE,
    "input_image": IMAGE_NOTE,
    "file": DOCUMENT_NOTE,
    "input_file": DOCUMENT_NOTE,
    "input_audio": AUDIO_NOTE,
}
"""What stands in the prompt for the types of parts that are no text."""


_CHAT_PARTS = ("text", "refusal", "image_url", "file", "input_audio")


class ContentPart(Marked):
    """One part of a message: a text, or a picture or the like, for which a note stands."""

    known_besides = names_of("image_url file input_audio")
    needed: ClassVar[tuple[str, ...]] = ("text.text", "refusal.refusal")

    type: Literal["text", "refusal", "image_url", "file", "input_audio"]
    text: str = ""
    refusal: str = ""

    @property
    def is_picture(self) -> bool:
        """Whether it is an image, a file or a recording."""
        return self.type in _NOTES

    def __str__(self) -> str:
        return _NOTES.get(self.type) or (self.refusal if self.type == "refusal" else self.text)


class NotePart(ContentPart):
    """A text that stands for another part or item."""

    def __str__(self) -> str:
        return Note(self.text)


class UnknownPart(ContentPart):
    """A part of a type that this server does not know, for which a text stands."""

    model_config = ConfigDict(extra="allow")
    takes_any = True
    needed: ClassVar[tuple[str, ...]] = ()

    type: Text  # type: ignore[assignment]
    text: Any = ""
    refusal: Any = ""

    def __str__(self) -> str:
        return note(self.model_dump(exclude_unset=True, warnings=False))


def part_reader(
    kind: type[ContentPart], known: Container[str], unknown: type[UnknownPart]
) -> BeforeValidator:
    """Return what reads a part as one of an unknown type, if it is none of the known ones.

    Args:
        kind: of the parts whose types are known.
        known: these types.
        unknown: the class of other parts.
    """

    def read_part(value: Any, info: ValidationInfo) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str) or kind in known or not kind:
            return value
        return unknown.model_validate(value, context=info.context)

    return BeforeValidator(read_part, json_schema_input_type=kind | unknown)


ChatPart = Annotated[ContentPart, part_reader(ContentPart, _CHAT_PARTS, UnknownPart)]


def unknown_parts(path: str, parts: Sequence[ContentPart]) -> list[str]:
    """Return how an answer names the parts whose types are not known.

    Args:
        path: of the list of parts in the body.
        parts: as the client sent them.
    """
    return [
        told
        for i, part in enumerate(parts)
        if isinstance(part, UnknownPart)
        for told in unknown(f"{path}[{i}].type", part.type, ())
    ]


class Function(Controlled):
    """A function that may be called."""

    name: Text
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


def as_object(arguments: Any) -> dict[str, Any]:
    """Return the arguments of a call as the object whose members chat templates print.

    Clients send them as JSON text. What is no JSON object, because the answer was cut or for
    another reason, and what is too large to be decoded becomes the one member of an object.
    """
    value = arguments
    if isinstance(arguments, str):
        if _has_few_containers(arguments):
            with contextlib.suppress(msgspec.DecodeError, UnicodeError, RecursionError):
                value = decode_json(arguments)
        if is_too_deep([value]):
            value = arguments
    if value is None or value == "":
        return {}
    return value if isinstance(value, dict) else {UNREAD: value}


Arguments = Annotated[dict[str, Any], BeforeValidator(as_object, json_schema_input_type=Any)]


def _has_few_containers(text: str) -> bool:
    if sum(map(text.count, "[{")) <= MAX_ARGUMENT_CONTAINERS:
        return True
    return shape_of(text.encode("utf-8", "replace")).num_containers <= MAX_ARGUMENT_CONTAINERS


class CalledFunction(Object):
    """The name of a function, and the arguments that the model called it with.

    A model may have written a call without a name, which its client sends again.
    """

    name: str
    arguments: Any = Field(default_factory=dict)

    _parse = field_validator("arguments")(as_object)


class ToolCall(Object):
    """A call that the assistant made; one of a custom tool becomes a function's."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    @model_validator(mode="before")
    @classmethod
    def _as_function(cls, value: Any) -> Any:
        custom = value.get("custom") if isinstance(value, dict) else None
        if not isinstance(custom, dict) or value.get("type") != "custom":
            return value
        function = {"name": custom.get("name"), "arguments": {CUSTOM_INPUT: custom.get("input")}}
        return {"id": value.get("id"), "function": function}


class UnknownCall(ToolCall):
    """A call of a type that this server does not know, for which a text stands."""

    model_config = ConfigDict(extra="allow")
    takes_any = True

    id: Any = None
    type: Text  # type: ignore[assignment]
    function: Any = None

    def __str__(self) -> str:
        return note(self.model_dump(exclude_unset=True))


def _read_call(value: Any, info: ValidationInfo) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind in ("function", "custom", ""):
        return value
    return UnknownCall.model_validate(value, context=info.context)


Call = Annotated[
    ToolCall, BeforeValidator(_read_call, json_schema_input_type=ToolCall | UnknownCall)
]


class Message(Controlled):
    """One message of a conversation."""

    known_besides = names_of("annotations reasoning_details")
    refused = CHAT_MESSAGE
    needed = ("system.content", "developer.content", "user.content", "tool.content")

    roles: ClassVar[Container[str]] = ("system", "developer", "user", "assistant", "tool")
    """The roles that are known; a message of another one is the user's."""

    role: Text
    content: Annotated[list[ChatPart], FAIL_FAST, PARTS] = Field([])
    tool_calls: Annotated[list[Call], FAIL_FAST] = Field([])
    name: str | None = None
    refusal: str | None = None
    tool_call_id: str | None = None
    reasoning_content: Any = None
    reasoning: Any = None

    @property
    def can_be_continued(self) -> bool:
        """Whether it is of the assistant and ends with a text, behind which no calls come."""
        last = self.content[-1] if self.content else None
        is_text = last is not None and not last.is_picture and bool(str(last).strip())
        return self.role == "assistant" and is_text and not self.tool_calls

    @property
    def ends_with_text(self) -> bool:
        """Whether nothing stands behind its last part."""
        return bool(self.content) and not self.tool_calls

    def lifetimes(self, path: str) -> Iterator[tuple[int, Lifetime]]:
        """Yield each breakpoint with the index of its part; -1 for the end of the message.

        Args:
            path: the path of the parts in the body.
        """
        for j, part in enumerate(self.content):
            if at := part.lifetime(f"{path}[{j}]"):
                yield j, at
        if at := self.lifetime(path.removesuffix(".content").removesuffix(".output")):
            yield len(self.content) - 1 if self.ends_with_text else -1, at

    @property
    def thoughts(self) -> str:
        """What the model thought before it wrote this, if the client sends it back."""
        given = (self.reasoning_content, self.reasoning)
        return next((it for it in given if isinstance(it, str)), "")

    def ignored(self, path: str) -> list[str]:
        """Return how an answer names what of the message is not known.

        Args:
            path: of the message in the body.
        """
        calls = [(i, it) for i, it in enumerate(self.tool_calls) if isinstance(it, UnknownCall)]
        return [
            *unknown(f"{path}.role", self.role, self.roles),
            *unknown_parts(f"{path}.content", self.content),
            *(
                told
                for i, it in calls
                for told in unknown(f"{path}.tool_calls[{i}].type", it.type, ())
            ),
        ]

    def for_template(self) -> dict[str, Any]:
        """Return the form that chat templates know."""
        role = self.role if self.role in self.roles else "user"
        role = "system" if role == "developer" else role
        message: dict[str, Any] = {"role": role, "content": list(map(str, self.content))}
        if self.thoughts and role == "assistant":
            message["reasoning_content"] = self.thoughts
        if self.tool_calls and role == "assistant":
            calls = [it for it in self.tool_calls if not isinstance(it, UnknownCall)]
            message["content"] += [str(it) for it in self.tool_calls if isinstance(it, UnknownCall)]
            if calls:
                message["tool_calls"] = [call.model_dump() for call in calls]
        return message | self.model_dump(include={"name", "tool_call_id"}, exclude_none=True)


class ChatMessage(Message):
    """A message of chat completions, which may be as it was before there were tools."""

    function_call: CalledFunction | None = None
    audio: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_result(cls, value: Any) -> Any:
        """Return what a function gave as the result of a tool of its name.

        A message of an unknown role that has no content becomes a text, as a part does.
        """
        role = value.get("role") if isinstance(value, dict) else None
        if role in cls.roles or not isinstance(role, str):
            return value
        if role != "function":
            if value.get("content") is None:
                rest = {name: each for name, each in value.items() if name != "role"}
                return {"role": role, "content": note({**rest, "type": role})}
            return value
        if (name := value.get("name")) is None:
            raise PydanticCustomError("missing", "nothing", {"name": "name"})
        content = value.get("content")
        told = {"role": "tool", "content": "" if content is None else content}
        return {**value, **told, "tool_call_id": name}

    @model_validator(mode="after")
    def _as_call(self) -> Self:
        """Return the message with a call of a function as one of a tool of its name.

        A recording of the assistant, which is named by its id only, becomes a part without a text.
        """
        made: dict[str, Any] = {}
        if (function := self.function_call) is not None and not self.tool_calls:
            made["tool_calls"] = [ToolCall.model_construct(id=function.name, function=function)]
        if self.role == "assistant" and self.audio and not any(map(str, self.content)):
            made["content"] = [ContentPart(type="input_audio")]
        return self.model_copy(update=made) if made else self


Messages = Annotated[list[ChatMessage], FAIL_FAST, Field(max_length=16_384)]


def ignored_messages(messages: Sequence[Message]) -> list[str]:
    """Return how an answer names what of `messages` is not known."""
    return [told for i, it in enumerate(messages) for told in it.ignored(f"messages[{i}]")]


def whole_turns(turns: Sequence[tuple[str, Message]]) -> Sequence[tuple[str, Message]]:
    """Return messages in which all that the assistant wrote in one turn is one message.

    Some clients send each call by itself, or the text of a turn between its calls and their
    results. Two texts are two turns.

    Args:
        turns: messages, each with the path of its parts in the body.
    """
    whole: list[list[tuple[str, Message]]] = []
    for turn, following in itertools.zip_longest(turns, turns[1:]):
        next_role = following[1].role if following else None
        if whole and _goes_on(whole[-1][-1][1], turn[1], next_role):
            whole[-1].append(turn)
        else:
            whole.append([turn])
    return [_joined(parts) if len(parts) > 1 else parts[0] for parts in whole]


def _goes_on(before: Message, message: Message, next_role: str | None) -> bool:
    """Return whether a message belongs to the turn of the one before it."""
    if not before.role == message.role == "assistant":
        return False
    if message.tool_calls:
        return not any(map(str, message.content))
    return bool(before.tool_calls) and next_role == "tool"


def _joined(parts: Sequence[tuple[str, Message]]) -> tuple[str, Message]:
    messages = [message for _, message in parts]
    content, own = list[ContentPart](), None
    for message in messages:
        content += message.content
        if message.cache_control is not None and message.ends_with_text:
            content[-1] = content[-1].model_copy(update={"cache_control": message.cache_control})
        else:
            own = message.cache_control or own
    made: dict[str, Any] = {
        "content": [part for part in content if str(part) or part.lifetime("")],
        "cache_control": own,
        "tool_calls": [call for message in messages for call in message.tool_calls],
        "reasoning_content": "".join(message.thoughts for message in messages),
    }
    path = next((path for path, message in parts if message.content), "")
    return path, messages[0].model_copy(update=made)


class FunctionType(Controlled):
    """The one type of tool."""

    type: Literal["function"]


class Tool(FunctionType):
    """A tool that may be called."""

    function: Function


class ChatCustomFunction(Object):
    """A function that takes a text; its grammar is told to the model, and not enforced."""

    name: Text
    description: str = ""
    format: dict[str, Any] = Field({})


class ChatCustomTool(Controlled):
    """A tool that takes a text."""

    type: Literal["custom"]
    custom: ChatCustomFunction


class HostedTool(Controlled):
    """A tool that runs on a provider's servers, or of a type that is not known."""

    model_config = ConfigDict(extra="allow")
    takes_any = True
    refused = UNMARKED

    type: Text


class _Typed(Object):
    """The type of a tool, which decides how the tool is read."""

    type: Text


ChatTool = Tool | ChatCustomTool | HostedTool
_KINDS: dict[str, type[Any]] = {"function": Tool, "custom": ChatCustomTool}


def _read_tool(value: Any, info: ValidationInfo) -> ChatTool:
    kind = _KINDS.get(_Typed.model_validate(value).type, HostedTool)
    tool: ChatTool = kind.model_validate(value, context=info.context)
    return tool


_TOOLS = TypeAdapter(
    Annotated[list[Annotated[ChatTool, BeforeValidator(_read_tool)]], Field(max_length=MAX_TOOLS)]
)
_FUNCTIONS = TypeAdapter(Annotated[list[Function], Field(max_length=MAX_TOOLS)])


def _unchanged(adapter: TypeAdapter[Any]) -> Callable[[Any, ValidationInfo], Any]:
    """Return what checks a value and returns it unchanged, because the template prints it."""

    def check(value: Any, info: ValidationInfo) -> Any:
        adapter.validate_python(value, strict=True, context=info.context)
        return value

    return check


Tools = Annotated[
    list[dict[str, Any]], PlainValidator(_unchanged(_TOOLS), json_schema_input_type=list[ChatTool])
]
Functions = Annotated[
    list[dict[str, Any]],
    PlainValidator(_unchanged(_FUNCTIONS), json_schema_input_type=list[Function]),
]


def custom_names(tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Return the names of the tools that take a text."""
    return frozenset(tool["custom"]["name"] for tool in tools if tool["type"] == "custom")


def offered(
    tools: Sequence[dict[str, Any]], functions: Sequence[dict[str, Any]]
) -> Sequence[dict[str, Any]]:
    """Return the tools of a request that the client runs; functions are an older form of them."""
    known = [tool for tool in tools if tool["type"] in _KINDS]
    return known or [{"type": "function", "function": each} for each in functions]


def left_out(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the types of the tools that the model is not told of."""
    return sorted({tool["type"] for tool in tools} - _KINDS.keys())


def lifetimes(
    tools: Sequence[dict[str, Any]], functions: Sequence[dict[str, Any]]
) -> Iterator[tuple[int, Lifetime]]:
    """Yield the breakpoints of tools, each with its tool's index among those that are `offered`.

    A tool that is left out has its breakpoint at the end of the one before it.
    """
    index = -1
    for i, tool in enumerate(tools):
        index += tool["type"] in _KINDS
        given = {f"tools[{i}]": tool}
        if tool["type"] == "function":
            given[f"tools[{i}].function"] = tool["function"]
        for place, each in given.items():
            if (at := Controlled.model_validate(each).lifetime(place)) and index >= 0:
                yield index, at
    if index < 0:
        for i, function in enumerate(functions):
            if at := Controlled.model_validate(function).lifetime(f"functions[{i}]"):
                yield i, at


def for_template(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return tools as chat templates know them; breakpoints are no part of the prompt."""
    return [
        {"type": "function", "function": _function_of(**tool["custom"])}
        if tool["type"] == "custom"
        else {**_unmarked(tool), "function": _unmarked(tool["function"])}
        for tool in tools
    ]


def _unmarked(given: dict[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in given.items() if name != CONTROL}


def custom_text(arguments: str) -> str | None:
    """Return the text that a custom tool is called with; None if the model wrote none."""
    text = json.loads(arguments).get(CUSTOM_INPUT)
    return text if isinstance(text, str) else None


def _function_of(name: str, description: Any = "", format: Any = None, **_: Any) -> Any:
    return function_of(name, description or "", format or {})


def function_of(name: str, description: str, format: Mapping[str, Any]) -> dict[str, Any]:
    """Return the function that a custom tool becomes; it has one text.

    Args:
        name: of the tool.
        description: of the tool.
        format: of the text, of which a grammar is told.
    """
    grammar = format.get("grammar", format)
    if isinstance(grammar, dict) and isinstance(grammar.get("definition"), str):
        what = f"The text follows this {grammar.get('syntax')} grammar:\n{grammar['definition']}"
        description = f"{description}\n{what}".strip()
    parameters = {
        "type": "object",
        "properties": {CUSTOM_INPUT: {"type": "string"}},
        "required": [CUSTOM_INPUT],
    }
    return {"name": name, "description": description, "parameters": parameters}
