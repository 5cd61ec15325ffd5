"""The tools of OpenAI's Responses API: what a model is told of them, and what its calls become.

Functions are told as they are. A namespace is taken apart into its tools, and a custom tool, which
takes a text, is a function with one text. Hosted tools, such as the search of the web, run on
OpenAI's servers; here they are left out.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
from pydantic import BeforeValidator, Field, ValidationInfo

from tieredkv.errors import RequestError
from tieredkv.fields import Object, names_of
from tieredkv.server import openai_api as openai
from tieredkv.server.asked import Json, Text

CUSTOM_INPUT = "input"
"""The one parameter of the function that a custom tool becomes."""

_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string"}},
    "required": [CUSTOM_INPUT],
}

Hosted = Literal[
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer_use_preview",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "programmatic_tool_calling",
    "shell",
    "tool_search",
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
]


class _Known(Object):
    """Fields of tools that have no effect."""

    known_besides = names_of("async allowed_callers defer_loading output_schema")


class FunctionTool(openai.Function, openai.FunctionType, _Known):
    """A function that may be called."""


class TextTool(_Known):
    """A tool that takes a text; the grammar of the text is told to the model, and not enforced."""

    type: Literal["custom"]
    name: Text
    description: str = ""
    format: Json = Field({})


class _InnerTyped(Object):
    """The type of a tool in a namespace, which decides how the tool is read."""

    type: Literal["function", "custom"]


def _read_inner(value: Any, info: ValidationInfo) -> FunctionTool | TextTool:
    is_custom = _InnerTyped.model_validate(value).type == "custom"
    kind: type[Any] = TextTool if is_custom else FunctionTool
    tool: FunctionTool | TextTool = kind.model_validate(value, context=info.context)
    return tool


class NamespaceTool(_Known):
    """Tools that are grouped under one name."""

    type: Literal["namespace"]
    name: Text
    description: str = ""
    tools: list[Annotated[FunctionTool | TextTool, BeforeValidator(_read_inner)]] = Field(
        max_length=1024
    )


class HostedTool(Object):
    """A tool that runs on OpenAI's servers."""

    model_config = pydantic.ConfigDict(extra="allow")

    type: Hosted


Tool = FunctionTool | TextTool | NamespaceTool | HostedTool


class _Typed(Object):
    """The type of a tool, which decides how the tool is read."""

    type: Literal["function", "custom", "namespace", Hosted]


_KINDS: dict[str, type[Any]] = {
    "function": FunctionTool,
    "custom": TextTool,
    "namespace": NamespaceTool,
}


def read_tool(value: Any, info: ValidationInfo) -> Tool:
    """Return a tool of a request; hosted ones are read as they are.

    Raises:
        ValidationError: it has a fault.
    """
    kind = _KINDS.get(_Typed.model_validate(value).type, HostedTool)
    tool: Tool = kind.model_validate(value, context=info.context)
    return tool


class Offered(NamedTuple):
    """A tool as the model knows it.

    Attributes:
        name: by which the client knows it.
        namespace: that it belongs to; None for none.
        is_custom: whether it takes a text.
        function: as chat templates print it; its name is the model's.
    """

    name: str
    namespace: str | None
    is_custom: bool
    function: Json


def name_for_model(name: str, namespace: str | None) -> str:
    """Return by what name the model knows a tool."""
    return f"{namespace.removesuffix('__')}__{name}" if namespace else name


def offered(tools: Sequence[Tool]) -> dict[str, Offered]:
    """Return the tools that the model is told of, by the names that it knows them by.

    Raises:
        RequestError: two of them have one name.
    """
    found: dict[str, Offered] = {}
    for tool in _offered(tools, None):
        if (name := tool.function["name"]) in found:
            text = f"Tool names must be unique, but two tools are called '{name}'."
            raise RequestError(text, param="tools", code="invalid_value")
        found[name] = tool
    return found


def _offered(tools: Sequence[Any], namespace: str | None) -> Iterator[Offered]:
    for tool in tools:
        match tool:
            case NamespaceTool():
                yield from _offered(tool.tools, tool.name)
            case FunctionTool():
                given = tool.model_dump(exclude={"type"}, exclude_unset=True)
                given["name"] = name_for_model(tool.name, namespace)
                yield Offered(tool.name, namespace, False, given)
            case TextTool():
                given = {"name": name_for_model(tool.name, namespace), "description": _told(tool)}
                given["parameters"] = _CUSTOM_PARAMETERS
                yield Offered(tool.name, namespace, True, given)


def _told(tool: TextTool) -> str:
    grammar = tool.format.get("grammar", tool.format)
    if not isinstance(grammar, dict) or not isinstance(grammar.get("definition"), str):
        return tool.description
    what = f"The text follows this {grammar.get('syntax')} grammar:\n{grammar['definition']}"
    return f"{tool.description}\n{what}".strip()


def left_out(tools: Sequence[Tool]) -> list[str]:
    """Return the types of the tools that the model is not told of."""
    return sorted({tool.type for tool in tools if isinstance(tool, HostedTool)})
