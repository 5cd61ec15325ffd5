"""The tools of OpenAI's Responses API: what a model is told of them, and what its calls become.

Functions are told as they are. A namespace is taken apart into its tools, and a custom tool, which
takes a text, is a function with one text. Tools that the API knows by their type and that the
client runs, such as `shell`, are functions that `response_tools.toml` describes. A search for tools
that the client runs is a function that the client describes. Hosted tools, such as the search of
the web, run on OpenAI's servers; here they are left out.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Annotated, Any, Literal, NamedTuple, get_args

import pydantic
from pydantic import BeforeValidator, Field, ValidationInfo

from tieredkv.cache_fields import CONTROL, Controlled
from tieredkv.errors import RequestError
from tieredkv.fields import Object, names_of
from tieredkv.server.asked import Json, Text
from tieredkv.server.known_fields import UNMARKED
from tieredkv.server.openai_messages import (
    Function,
    FunctionType,
    HostedTool,
    custom_text,
    function_of,
)

SEARCH = "tool_search"
"""The type of a search for tools, and the name by which the model knows one of the client."""

ClientRun = Literal["apply_patch", "local_shell", "shell"]
"""The types of tools that the client runs."""

Hosted = Literal[
    "code_interpreter",
    "computer",
    "computer_use_preview",
    "file_search",
    "image_generation",
    "mcp",
    "programmatic_tool_calling",
    "tool_search",
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
]
HOSTED_CHOICES = frozenset({*get_args(Hosted), "computer_use"})
"""The types by which `tool_choice` names hosted tools; some are not those of the tools."""


class _Known(Controlled):
    """Fields of tools that have no effect."""

    known_besides = names_of("async allowed_callers defer_loading output_schema")


class FunctionTool(Function, FunctionType, _Known):
    """A function that may be called."""


class TextTool(_Known):
    """A tool that takes a text; the grammar of the text is told to the model, and not enforced."""

    type: Literal["custom"]
    name: Text
    description: str = ""
    format: Json = Field({"type": "text"})


class _Typed(Object):
    """The type of a tool, which decides how the tool is read."""

    type: Text


InnerTool = FunctionTool | TextTool | HostedTool
_INNER_KINDS: dict[str, type[Any]] = {"function": FunctionTool, "custom": TextTool}


def _read_inner(value: Any, info: ValidationInfo) -> InnerTool:
    kind = _INNER_KINDS.get(_Typed.model_validate(value).type, HostedTool)
    tool: InnerTool = kind.model_validate(value, context=info.context)
    return tool


class NamespaceTool(_Known):
    """Tools that are grouped under one name."""

    type: Literal["namespace"]
    name: Text
    description: str = ""
    tools: list[Annotated[InnerTool, BeforeValidator(_read_inner)]] = Field(max_length=1024)


class ClientTool(Controlled):
    """A tool that the client runs, if its `environment` is not one of OpenAI's."""

    model_config = pydantic.ConfigDict(extra="allow")
    takes_any = True
    refused = UNMARKED

    type: ClientRun
    environment: Json = Field({"type": "local"})


class SearchTool(Controlled):
    """A search for tools that the client runs."""

    type: Literal["tool_search"]
    execution: Literal["client"]
    description: str = "Find tools that are not listed here. Those that are found may be called."
    parameters: Json = Field({"type": "object"})


Tool = FunctionTool | TextTool | NamespaceTool | ClientTool | SearchTool | HostedTool


_KINDS: dict[str, type[Any]] = {
    "function": FunctionTool,
    "custom": TextTool,
    "namespace": NamespaceTool,
    **dict.fromkeys(get_args(ClientRun), ClientTool),
}


def read_tool(value: Any, info: ValidationInfo) -> Tool:
    """Return a tool of a request; hosted ones are read as they are.

    Raises:
        ValidationError: it has a fault.
    """
    kind = _KINDS.get(_Typed.model_validate(value).type, HostedTool)
    if value["type"] == SEARCH and value.get("execution") == "client":
        kind = SearchTool
    tool: Tool = kind.model_validate(value, context=info.context)
    return tool


class Offered(NamedTuple):
    """A tool as the model knows it.

    Attributes:
        name: by which the client knows it.
        namespace: that it belongs to; None for none.
        kind: `function`, `custom` for one that takes a text, or the type of one that the API knows.
        function: as chat templates print it; its name is the model's.
    """

    name: str
    namespace: str | None
    kind: str
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
                given = tool.model_dump(exclude={"type", CONTROL}, exclude_unset=True)
                given["name"] = name_for_model(tool.name, namespace)
                yield Offered(tool.name, namespace, "function", given)
            case TextTool():
                model_name = name_for_model(tool.name, namespace)
                given = function_of(model_name, tool.description, tool.format)
                yield Offered(tool.name, namespace, "custom", given)
            case SearchTool(description=description, parameters=parameters):
                given = {"name": SEARCH, "description": description, "parameters": parameters}
                yield Offered(SEARCH, None, SEARCH, given)
            case ClientTool() if not _is_hosted(tool):
                told = client_tools()[tool.type]
                parameters = {"type": "object", "properties": told["properties"]}
                parameters["required"] = told["required"]
                given = {"name": tool.type, "description": told["description"]}
                yield Offered(tool.type, None, tool.type, {**given, "parameters": parameters})


def for_template(tools: Mapping[str, Offered]) -> list[Json]:
    """Return tools as chat templates know them."""
    return [{"type": "function", "function": tool.function} for tool in tools.values()]


def left_out(tools: Sequence[Tool]) -> list[str]:
    """Return the types of the tools that the model is not told of."""
    inner = (it for tool in tools if isinstance(tool, NamespaceTool) for it in tool.tools)
    return sorted({tool.type for tool in (*tools, *inner) if _is_hosted(tool)})


def _is_hosted(tool: Tool | InnerTool) -> bool:
    is_elsewhere = isinstance(tool, ClientTool) and tool.environment.get("type") != "local"
    return is_elsewhere or isinstance(tool, HostedTool)


@cache
def client_tools() -> Json:
    """Return what is known of the tools that clients run, by their types."""
    text = resources.files(__package__).joinpath("response_tools.toml").read_text("utf-8")
    return tomllib.loads(text)


def item_of_call(name: str, arguments: str, offered: Mapping[str, Offered]) -> tuple[str, Json]:
    """Return the type of the item of a call, and its fields beside ids and status.

    A call whose arguments do not fit the tool is a function's, and passed on as the model wrote it.

    Args:
        name: by which the model knows the tool.
        arguments: a JSON object, as text.
        offered: the tools that the model was told of.
    """
    tool = offered.get(name) or Offered(name, None, "function", {})
    named = {"name": tool.name, **({"namespace": tool.namespace} if tool.namespace else {})}
    if tool.kind == "custom" and (text := custom_text(arguments)) is not None:
        return "custom_tool_call", {**named, "input": text}
    if tool.kind == SEARCH:
        return "tool_search_call", {"arguments": json.loads(arguments), "execution": "client"}
    if (known := client_tools().get(tool.kind)) is not None:
        given = {name: it for name, it in json.loads(arguments).items() if it is not None}
        if _validator(tool.kind).is_valid(given):
            return f"{tool.kind}_call", {known["field"]: {**known.get("constants", {}), **given}}
    return "function_call", {**named, "arguments": arguments}


@cache
def _validator(kind: str) -> Any:
    """Return what tells whether the arguments of a call fit a tool that clients run."""
    from jsonschema import Draft202012Validator  # imported here, as few requests have such tools

    known = client_tools()[kind]
    return Draft202012Validator({it: known[it] for it in ("properties", "required")})


def called_with(kind: str, item: Json) -> Json:
    """Return the arguments of a call that a client sends back as an item."""
    known = client_tools()[kind]
    given: Json = item.get(known["field"], {})
    return {
        name: value
        for name, value in given.items()
        if name in known["properties"] and value is not None
    }
