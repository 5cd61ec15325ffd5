"""The tools of Anthropic's Messages API, and what a model is told of them.

Tools that the API knows by their type and that the client runs, such as `bash_20250124`, are
functions that `anthropic_tools.toml` describes. Others run on Anthropic's servers.
"""

import json
import re
import tomllib
from functools import cache
from importlib import resources
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationInfo

from tieredkv.cache_fields import Controlled
from tieredkv.fields import Object, names_of
from tieredkv.server.asked import Json, Text
from tieredkv.server.known_fields import UNMARKED


class Known(Object):
    """Fields in Anthropic's objects that have no effect; a strict server accepts them, too."""

    known_besides = names_of("""
        effort display citations caller toolset_name strict output_config
        disable_parallel_tool_use allowed_callers defer_loading eager_input_streaming
        budget_tokens thinking signature data block_binding task_budget transformations clear_at
    """)


class Marked(Known, Controlled):
    """An object that may have a breakpoint at its end."""

    @property
    def ttl(self) -> str:
        """How long the prompt up to here is kept; empty without a breakpoint."""
        return self.cache_control.ttl if self.cache_control else ""


class CustomTool(Marked):
    """A tool that may be called."""

    type: Literal["custom"] = "custom"
    name: Text
    description: str | None = None
    input_schema: Json
    input_examples: list[Json] = Field([])
    strict: bool = False

    @property
    def is_hosted(self) -> bool:
        """Whether it runs on Anthropic's servers."""
        return False

    def for_template(self) -> Json:
        """Return the form that chat templates know."""
        parts = [self.description, *(f"Example: {json.dumps(it)}" for it in self.input_examples)]
        text = "\n".join(filter(None, parts))
        described = {"description": text} if text else {}
        function = {"name": self.name, **described, "parameters": self.input_schema}
        return {"type": "function", "function": function}


class KnownTool(Marked):
    """A tool of a type that Anthropic's API knows, run by the client or by Anthropic's servers."""

    model_config = ConfigDict(extra="allow")
    takes_any = True
    refused = UNMARKED

    type: Text
    name: str = ""

    @property
    def is_hosted(self) -> bool:
        """Whether it runs on Anthropic's servers, or needs more than text."""
        return self._kind not in _known_tools()

    @property
    def _kind(self) -> str:
        return self.type.rpartition("_")[0]

    def for_template(self) -> Json:
        """Return the form that chat templates know."""
        known = _known_tools()[self._kind]
        schema = {"type": "object", "properties": known["properties"]}
        schema |= {"required": known["required"]} if "required" in known else {}
        function = {"name": self.name or self._kind, "description": known["description"]}
        return {"type": "function", "function": {**function, "parameters": schema}}


@cache
def _known_tools() -> Json:
    text = resources.files(__package__).joinpath("anthropic_tools.toml").read_text("utf-8")
    return tomllib.loads(text)


_TOOL_TYPE = re.compile(r"[a-z0-9_]{1,64}_\d{8}|mcp_toolset|tool_search_tool_(bm25|regex)")
"""The types of tools that Anthropic's API knows."""


def read_tool(value: Any, info: ValidationInfo) -> "Tool":
    """Return a tool of a request; its type says of which kind it is.

    Raises:
        ValidationError: it has a fault.
    """
    named = value.get("type") if isinstance(value, dict) else None
    is_known = isinstance(named, str) and _TOOL_TYPE.fullmatch(named)
    kind: type[Any] = KnownTool if is_known else CustomTool
    tool: Tool = kind.model_validate(value, context=info.context)
    return tool


Tool = CustomTool | KnownTool
