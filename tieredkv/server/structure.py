"""Write the grammar that an answer must follow, from what a request asks for.

A grammar has up to three parts: the model's thoughts, which are free, then calls of tools or the
text of the answer. It is made of xgrammar's structural tags. This module knows no API: it gets
tools as chat templates do, and knows how a family of models writes.
"""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tieredkv.errors import RequestError
from tieredkv.server.message_parser import Family, Tools
from tieredkv.server.reply import Reading
from tieredkv.server.schemas import enforceable, has_bare_names

Format = dict[str, Any]
"""One of xgrammar's formats: a JSON object with a `type`."""

ANY_OBJECT: Format = {"type": "object"}
MAX_WHITE_SPACE = 32
"""White space in a row within JSON, so that a model cannot go on with it for ever."""

MAX_CHOICES = 4096
_AFTER_THOUGHTS = "\n{0,2}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """What the answers to one request must be.

    Attributes:
        text: the format of the text; None for any text.
        tools: that may be called, as chat templates take them.
        choice: whether they must be called, may be called, or may not.
        is_parallel: whether several calls may be made at once.
        is_limited: whether the model is told of further tools, which may not be called.
    """

    text: Format | None = None
    tools: Tools = ()
    choice: Literal["auto", "required", "none"] = "auto"
    is_parallel: bool = True
    is_limited: bool = False

    @property
    def is_free(self) -> bool:
        """Whether an answer may be anything that the model writes."""
        is_checked = any(_function(tool).get("strict") for tool in self.tools)
        is_limited = self.is_limited or not self.is_parallel or is_checked
        may_call_freely = not (self.tools and is_limited)
        return self.text is None and self.choice == "auto" and may_call_freely

    def grammar(self, reading: Reading | None) -> str | None:
        """Return the grammar of an answer, as `EngineRequest.grammar` has it; None for none.

        Args:
            reading: how the answer is read; None if how the model writes is not known.

        Raises:
            RequestError: a tool must be called, and how this model calls tools is not known; or a
                strict tool has a schema that cannot be enforced.
        """
        if self.is_free:
            return None
        family = reading.family if reading is not None else None
        can_call = family is not None and bool(family.writes)
        if self.choice == "required" and not can_call:
            text = (
                "This server does not know how this model writes calls of tools, so it cannot make "
                "it write one. If you know, name its family with `--tool-parser`."
            )
            raise RequestError(text, param="tool_choice", code="unsupported_parameter")
        if self.choice == "auto" and self.text is None and not can_call:
            return None
        if reading is None or family is None:
            return None if self.text is None else as_grammar(self.text)
        parts = _thoughts(family, reading.prompt.rpartition(family.start)[2])
        ends: list[Format] = [{"type": "token", "token": it} for it in reading.ends.values()]
        if ends:  # which the checkpoint may not name as its own
            ends = [{"type": "optional", "content": _one_of(*ends)}]
        return as_grammar(_sequence(*parts, self._body(family), *ends))

    def _body(self, family: Family) -> Format:
        """Return what follows the thoughts."""
        answer = _sequence(_const(family.answers), self.text or _any_text(family.opens))
        if not (family.writes and self.tools) or self.choice == "none":
            return answer
        calls = self._calls(family)
        if self.choice == "required":
            return calls
        if self.text is not None or family.answers:
            return _one_of(answer, calls)
        return _sequence(_any_text(family.opens), {"type": "optional", "content": calls})

    def _calls(self, family: Family) -> Format:
        call = _one_of(*(self._call(family, i, tool) for i, tool in enumerate(self.tools)))
        calls = call
        if self.is_parallel and family.between is not None:
            more = _sequence(_const(family.between), call)
            calls = _sequence(call, {"type": "star", "content": more})
        before, behind = family.around
        return _sequence(_const(before), calls, _const(behind))

    def _call(self, family: Family, index: int, tool: Any) -> Format:
        function = _function(tool)
        before, behind = family.writes.split("{arguments}")
        name = str(function["name"])
        if family.body == "calls" and '"{name}"' in before:
            name = json.dumps(name, ensure_ascii=False)[1:-1]
        begin = _const(before.replace("{name}", name))
        return _sequence(begin, self._arguments(family, index, function), _const(behind))

    def _arguments(self, family: Family, index: int, function: Any) -> Format:
        """Return the arguments' format: the tool's schema, where it is to be followed."""
        schema, is_strict = function.get("parameters"), bool(function.get("strict"))
        given: Format = ANY_OBJECT
        style: str = family.style
        if schema and (is_strict or self.choice == "required"):
            field, name = f"tools[{index}].function.parameters", str(function["name"])
            try:
                given, style = _followed(schema, field, style, name=name, is_strict=is_strict)
            except RequestError:
                if is_strict:
                    raise
        form = json_format(given) | {"style": style}
        return form if style == "json" else form | {"max_whitespace_cnt": 1}


def _followed(schema: Any, field: str, style: str, **how: Any) -> tuple[Any, str]:
    """Return a schema as it can be enforced, and the style in which arguments follow it.

    In Gemma's own style names have no quotes and texts no escapes. Where a name needs quotes, or a
    keyword of a strict schema is about texts with escapes, JSON is written, which is read as well.

    Raises:
        RequestError: as `enforceable`.
    """
    if style == "gemma":
        with contextlib.suppress(RequestError):
            made = enforceable(schema, field, raw="all", **how)
            if has_bare_names(made):
                return made, style
        style = "json"
    return enforceable(schema, field, raw="none" if style == "json" else "properties", **how), style


def json_format(schema: Any) -> Format:
    """Return the format of JSON that follows a schema."""
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_WHITE_SPACE}


def choice_format(choices: Sequence[str]) -> Format:
    """Return the format of one of several texts."""
    return _one_of(*map(_const, choices))


def as_grammar(form: Format) -> str:
    """Return a format as the grammar of a whole answer."""
    return json.dumps({"type": "structural_tag", "format": form}, ensure_ascii=False)


def _thoughts(family: Family, begun: str) -> list[Format]:
    """Return the format of the thoughts that may still come, given what the answer begins with."""
    if not family.thinks:
        return []
    opens, closes = family.thinks
    rest = _sequence(_any_text(closes), _const(closes), _regex(_AFTER_THOUGHTS))
    _, is_open, inside = begun.rpartition(opens)
    if is_open:
        return [] if closes in inside else [rest]
    return [{"type": "optional", "content": _sequence(_const(opens), rest)}]


def _function(tool: Any) -> Any:
    return tool["function"]


def _const(text: str) -> Format:
    return {"type": "const_string", "value": text}


def _regex(pattern: str) -> Format:
    return {"type": "regex", "pattern": pattern}


def _any_text(but: str) -> Format:
    return {"type": "any_text", "excludes": [but] if but else []}


def _sequence(*parts: Format) -> Format:
    kept = [part for part in parts if part != _const("")]
    return kept[0] if len(kept) == 1 else {"type": "sequence", "elements": kept}


def _one_of(*parts: Format) -> Format:
    return parts[0] if len(parts) == 1 else {"type": "or", "elements": [*parts]}
