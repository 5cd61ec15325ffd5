"""The fields by which OpenAI's clients ask for structured answers and choose tools.

They become a `Structure`. Anthropic's API has fields of its own.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec
from pydantic import Field, PlainValidator, ValidationInfo

from tieredkv.errors import RequestError
from tieredkv.fields import Object, decode_json, names_of
from tieredkv.server.asked import Json, Text
from tieredkv.server.message_parser import Tools
from tieredkv.server.patterns import looks_around
from tieredkv.server.schemas import enforceable
from tieredkv.server.structure import (
    ANY_OBJECT,
    MAX_CHOICES,
    Format,
    Structure,
    choice_format,
    json_format,
)

MAX_PATTERN_CHARACTERS = 65_536


class NamedSchema(Object):
    """A JSON schema with a name."""

    known_besides = names_of("schema")

    name: Text | None = None
    description: str | None = None
    of: Any = Field(default=None, alias="schema")
    strict: bool = False

    def format_at(self, field: str, kind: str = "json_schema") -> Format | None:
        """Return the format of a text of this kind; None for any text.

        Raises:
            RequestError: the schema cannot be enforced.
        """
        if kind == "text":
            return None
        if kind == "json_object" or self.of is None:
            return json_format(ANY_OBJECT)
        name = self.name or ""
        return json_format(enforceable(self.of, field, name=name, is_strict=self.strict))


FormatType = Literal["text", "json_object", "json_schema"]


class ResponseFormat(Object):
    """The form of an answer, as `/v1/chat/completions` has it."""

    needed: ClassVar[tuple[str, ...]] = ("json_schema.json_schema",)

    type: FormatType
    json_schema: NamedSchema = NamedSchema()


class TextFormat(NamedSchema):
    """The form of an answer, as `/v1/responses` has it."""

    needed: ClassVar[tuple[str, ...]] = ("json_schema.name", "json_schema.schema")

    type: FormatType


def _check_text_format(value: Any, info: ValidationInfo) -> Any:
    """Check a form and return it unchanged, because the answer repeats it."""
    TextFormat.model_validate(value, context=info.context)
    return value


TEXT_FORMAT = PlainValidator(_check_text_format, json_schema_input_type=TextFormat)


class StructuredOutputs(Object):
    """The form of an answer, as vLLM's clients ask for it; one of the fields."""

    known_besides = names_of("""
        json disable_any_whitespace disable_additional_properties whitespace_pattern
    """)

    schema_: Any = Field(default=None, alias="json")
    regex: Text | None = Field(default=None, max_length=MAX_PATTERN_CHARACTERS)
    choice: list[Text] | None = Field(default=None, min_length=1, max_length=MAX_CHOICES)
    grammar: Text | None = Field(default=None, max_length=MAX_PATTERN_CHARACTERS)
    json_object: bool = False

    def formats(self, field: str, separator: str = ".") -> list[Format]:
        """Return the formats that it asks for, at most one of which can be followed.

        Args:
            field: where it stands in the body.
            separator: between this and the names of its fields.

        Raises:
            RequestError: a schema or a regular expression cannot be enforced, or a grammar is not
                in EBNF.
        """
        formats: list[Format] = []
        if self.schema_ is not None:
            formats.append(json_format(_schema_of(self.schema_, f"{field}{separator}json")))
        if self.json_object:
            formats.append(json_format(ANY_OBJECT))
        if self.regex is not None:
            if looks_around(self.regex):
                path = f"{field}{separator}regex"
                text = f"'{path}' has a look around such as `(?!…)`, which cannot be enforced."
                raise RequestError(text, param=path, code="invalid_value")
            formats.append({"type": "regex", "pattern": self.regex})
        if self.choice is not None:
            formats.append(choice_format(self.choice))
        if self.grammar is not None:
            if "::=" not in self.grammar:
                path = f"{field}{separator}grammar"
                text = f'\'{path}\' must be in EBNF, with rules such as `root ::= "yes" | "no"`.'
                raise RequestError(text, param=path, code="invalid_value")
            formats.append({"type": "grammar", "grammar": self.grammar})
        return formats


def _schema_of(given: Any, field: str) -> Any:
    """Return a schema that is given as JSON or as its text."""
    if not isinstance(given, str):
        return enforceable(given, field)
    try:
        return enforceable(decode_json(given), field)
    except (msgspec.DecodeError, RecursionError) as error:
        text = f"Invalid schema for '{field}': it is no JSON: {error}."
        raise RequestError(text, param=field, code="invalid_json_schema") from None


def only_one(formats: Sequence[Format | None]) -> Format | None:
    """Return the one format that is asked for; None if there is none.

    Raises:
        RequestError: there are several.
    """
    asked = [each for each in formats if each is not None]
    if len(asked) > 1:
        fields = "'response_format', 'structured_outputs' and 'guided_…'"
        text = f"An answer can have one form only, but {fields} ask for {len(asked)}."
        raise RequestError(text, param="response_format", code="invalid_value")
    return asked[0] if asked else None


_MODES = ("auto", "any", "none", "required")


def choose_tools(
    tool_choice: Any,
    tools: Tools,
    names: Sequence[str],
    *,
    is_parallel: bool,
    text: Format | None,
    left_out: Collection[str] = (),
) -> Structure:
    """Return what answers must be, by the tools and the choice among them.

    Where only tools that are left out may be called, no tool is called. Where all are left out and
    some tool must be called, the answer is free.

    Args:
        tool_choice: as the client sent it.
        tools: as chat templates take them.
        names: of the tools, as the client knows them.
        is_parallel: whether several calls may be made at once.
        text: the format of an answer in text; None for any.
        left_out: the types of tools that the model is not told of.

    Raises:
        RequestError: the choice names no tool that is there, or demands one that is left out.
    """
    if isinstance(tool_choice, dict) and tool_choice.get("type") in _MODES:
        tool_choice = tool_choice["type"]  # as Anthropic's API writes it
    how: Json = {"tools": tools, "is_parallel": is_parallel, "text": text}
    by_name = dict(zip(reversed(names), reversed(tools), strict=True))  # the first of a name wins
    match tool_choice:
        case None | "auto":
            return Structure(**how)
        case "none":
            return Structure(**how, choice="none")
        case "required" | "any" if not tools and left_out:
            return Structure(**how)
        case "required" | "any":
            if not tools:
                what = "'tool_choice' is only allowed when 'tools' are specified."
                raise RequestError(what, param="tool_choice", code="invalid_value")
            return Structure(**how, choice="required")
        case {"type": "allowed_tools"}:
            given = tool_choice.get("allowed_tools")
            inner = tool_choice if given is None else given
            if not isinstance(inner, dict):
                raise _invalid("'allowed_tools' is no object")
            mode, allowed = inner.get("mode", "auto"), inner.get("tools", [])
            if mode not in ("auto", "required") or not isinstance(allowed, list):
                raise _invalid("'mode' is 'auto' or 'required', and 'tools' are a list")
            if not allowed:
                raise _invalid("'tools' is empty")
            here = [each for each in allowed if not _is_left_out(each, left_out)]
            if not here and mode == "required":
                raise _left_out(allowed[0]["type"])
            if not here:
                return Structure(**how, choice="none")
            how["tools"] = [by_name[it] for it in dict.fromkeys(_name(it, by_name) for it in here)]
            return Structure(**how, choice=mode, is_limited=True)
        case {"type": "function" | "custom" | "tool"}:
            how |= {"tools": [by_name[_name(tool_choice, by_name)]], "is_parallel": False}
            return Structure(**how, choice="required")
        case {"type": str() as kind} if kind in by_name:  # a tool that the API knows by its type
            how |= {"tools": [by_name[kind]], "is_parallel": False}
            return Structure(**how, choice="required")
        case {"type": str() as kind} if kind in left_out:
            raise _left_out(kind)
        case {"type": str() as kind}:
            raise _invalid(f"'{kind[:64]}' tools are not offered by this server")
    raise _invalid("it is 'none', 'auto', 'required', or an object that names a tool")


def _is_left_out(chosen: Any, left_out: Collection[str]) -> bool:
    kind = chosen.get("type") if isinstance(chosen, dict) else None
    return isinstance(kind, str) and kind in left_out


def _name(chosen: Any, by_name: Mapping[str, Any]) -> str:
    """Return the name of a chosen tool, which must be one of those."""
    given = chosen if isinstance(chosen, dict) else {}
    function = given.get("function", given.get("custom", given))
    # A tool that the API knows by its type has no other name.
    name = function.get("name", given.get("type")) if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in by_name:
        raise _invalid(f"there is no tool {str(name)[:64]!r} in 'tools'")
    return name


def _left_out(kind: str) -> RequestError:
    hint = "Choose a tool that the client runs, or 'auto'"
    return _invalid(
        f"'{kind[:64]}' tools are left out, since this server does not run them. {hint}"
    )


def _invalid(why: str) -> RequestError:
    return RequestError(f"Invalid 'tool_choice': {why}.", param="tool_choice", code="invalid_value")
