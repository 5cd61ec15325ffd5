"""Check the JSON bodies of requests and report faults in OpenAI's words.

This module knows types and ranges, not what any field is for. A field that is `null` counts as
absent.
"""

import contextlib
import functools
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any, ClassVar, NamedTuple, TypeVar

import msgspec
import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from tieredkv.errors import MAX_TOLD_CHARACTERS, RequestError, invalid_value

MAX_DEPTH = 64
MAX_CONTAINERS = 65_536
MAX_KEYS = 131_072
MAX_VALUES = 262_144
"""The most values a body may hold, beside the token ids of one prompt.

No other thread runs while a body is decoded; these bounds keep that below about 50 ms."""

_SCAN_BYTES = 1 << 20

_NAMES = {
    "a string": "str string_type literal_error",
    "a boolean": "bool bool_type",
    "an integer": "int int_type",
    "a decimal": "float float_type",
    "a finite decimal": "finite_number",
    "an array": "list tuple list_type tuple_type",
    "an object": "dict dict_type model_type",
    "null": "NoneType",
}
_CALLED = {name: called for called, names in _NAMES.items() for name in names.split()}
"""Names used in errors, by Python type or pydantic error; unlisted errors bring their own."""

_OF_NAMES = {
    "unknown": ("Unknown parameter: '{}'.", "unknown_parameter"),
    "missing": ("Missing required parameter: '{}'.", "missing_required_parameter"),
    "unsupported": ("'{}' is not supported.{way_out}", "unsupported_parameter"),
}
_OF_BOUNDS = {
    "ge": ("{}_below_min_value", "{} below minimum value", "a value >= {bound}"),
    "gt": ("{}_below_min_value", "{} below minimum value", "a value > {bound}"),
    "le": ("{}_above_max_value", "{} above maximum value", "a value <= {bound}"),
    "min_length": ("empty_{}", "empty {}", "{a_kind} with minimum length {bound}"),
    "max_length": ("{}_above_max_length", "{} too long", "{a_kind} with maximum length {bound}"),
}
"""Error code, fault and expected value for each bound of pydantic; `{}` is the kind of value."""


def nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a field that may be left out, and may be null, too."""
    told = {name: each for name, each in schema.items() if (name, each) != ("default", None)}
    if not ({"type", "enum", "const", "$ref", "anyOf"} & told.keys()):  # any value
        return told
    if {"type": "null"} in told.get("anyOf", ()):
        return told
    about: dict[str, Any] = {
        name: told.pop(name) for name in ("default", "title", "description") if name in told
    }
    return {"anyOf": [*told.pop("anyOf", [told] if told else []), {"type": "null"}], **about}


def names_of(text: str) -> frozenset[str]:
    """Return the words of a text as names."""
    return frozenset(text.split())


class Refusal(NamedTuple):
    """How a known but unsupported field is refused.

    Attributes:
        way_out: complete sentences that tell what to do instead; may be empty.
        asks_nothing: whether a value asks for nothing and is accepted; `null` always is.
        is_lenient: whether the field is only refused where unknown fields are, too.
    """

    way_out: str
    asks_nothing: Callable[[Any], bool]
    is_lenient: bool = False


def refusals(
    names: str,
    way_out: str = "",
    *,
    unless: Callable[[Any], bool] = operator.not_,
    is_lenient: bool = False,
) -> dict[str, Refusal]:
    """Return the refusal of each of these fields.

    Args:
        names: separated by blanks; `type.name` is refused only in objects of that type.
        way_out: complete sentences that tell what to do instead.
        unless: whether a value asks for nothing; by default false, zero and empty values do.
        is_lenient: whether they are only refused where unknown fields are, too.
    """
    return dict.fromkeys(names.split(), Refusal(way_out, unless, is_lenient))


class Object(BaseModel):
    """A JSON object with known fields; other fields are ignored unless `read` refuses them.

    Attributes:
        known_besides: names that are known although they are no fields.
        refused: names that are known, but refused if their value asks for something; `type.name`
            is refused only in objects of that type.
        needed: fields that must be present if `type` or `role` has a value, as `value.field`.
        takes_any: whether fields of any name are known, as in what only a provider's servers serve.
    """

    model_config = ConfigDict(strict=True, frozen=True)
    known_besides: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[Mapping[str, Refusal]] = {}
    needed: ClassVar[tuple[str, ...]] = ()
    takes_any: ClassVar[bool] = False

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, describe: Any) -> Any:
        """Describe what `read` takes: nulls, what a type needs, and nothing that is refused."""
        described = describe(schema)
        own = describe.resolve_ref_schema(described)
        required, properties = own.get("required", []), own.get("properties", {})
        for name, told in [*properties.items()]:
            if name in cls.refused and not cls.refused[name].is_lenient:
                del properties[name]
            elif name not in required:
                properties[name] = nullable(told)
        key = "role" if "role" in properties else "type"
        if rules := [each.split(".") for each in cls.needed]:
            own["allOf"] = [
                {
                    "if": {"properties": {key: {"const": value}}, "required": [key]},
                    "then": {"required": [name], "properties": {name: {"not": {"type": "null"}}}},
                }
                for value, name in rules
            ]
        return described

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict):
            return value
        if None in value.values():
            value = {name: each for name, each in value.items() if each is not None}
        names = _names_of(cls)
        if not value.keys() <= names.plain:
            for name in value:
                if name not in names.plain:
                    cls._check_name(name, value, info)
        for kind in ("type", "role"):
            of_kind = value.get(kind)
            for name in names.needed.get(of_kind, ()) if isinstance(of_kind, str) else ():
                if name not in value:
                    raise PydanticCustomError("missing", "nothing", {"name": name})
        return value

    @classmethod
    def _check_name(cls, name: str, value: dict[str, Any], info: ValidationInfo) -> None:
        """Refuse a field that is unknown, or whose value asks for what is not served."""
        is_strict = bool(info.context and info.context(name))
        refusal = cls.refused.get(name) or cls.refused.get(f"{value.get('type')}.{name}")
        if refusal and not refusal.asks_nothing(value[name]) and refusal.is_lenient <= is_strict:
            facts = {"name": name, "way_out": f" {refusal.way_out}".rstrip()}
            raise PydanticCustomError("unsupported", "nothing", facts)
        if is_strict and not cls.takes_any and name not in _names_of(cls).known:
            raise PydanticCustomError("unknown", "nothing", {"name": name})


class _Names(NamedTuple):
    """The names that a class of objects knows.

    Attributes:
        known: names that are not unknown.
        plain: those of them that are refused in no object.
        needed: the names of fields that must be present, by the type or role that needs them.
    """

    known: frozenset[str]
    plain: frozenset[str]
    needed: Mapping[str, Sequence[str]]


@functools.cache
def _names_of(kind: type[Object]) -> _Names:
    needed = dict[str, list[str]]()
    for each in kind.needed:
        value, name = each.split(".")
        needed.setdefault(value, []).append(name)
    known = frozenset(kind.model_fields.keys() | kind.known_besides | kind.refused.keys())
    return _Names(known, known - {name.rpartition(".")[2] for name in kind.refused}, needed)


Body = TypeVar("Body", bound=Object)


class TextOr(BeforeValidator):
    """Lets a field take a string as well, and adds this to the description of the API."""

    def __get_pydantic_json_schema__(self, schema: Any, describe: Callable[[Any], Any]) -> Any:
        return {"anyOf": [{"type": "string"}, describe(schema)]}


def list_of(make: Callable[[str], Any]) -> TextOr:
    """Return a validator that takes a list, or a string in place of a list with one item."""

    def listed(value: Any) -> Any:
        if isinstance(value, str):
            return [make(value)]
        if not isinstance(value, list):
            raise PydanticCustomError("texts", "a string or an array")
        return value

    return TextOr(listed)


PARTS = list_of(lambda text: {"type": "text", "text": text})
"""Takes a string in place of a list with one text part."""


class JsonShape(NamedTuple):
    """How much a JSON text holds, counted by its punctuation.

    Attributes:
        depth: levels of nested arrays and objects.
        num_containers: number of arrays and objects.
        num_keys: number of members of objects.
        num_values: at least the number of strings, numbers and literals that are not keys.
    """

    depth: int
    num_containers: int
    num_keys: int
    num_values: int


def shape_of(body: bytes) -> JsonShape:
    """Count the arrays, objects, keys and values of a JSON text without decoding it.

    This is faster than decoding, needs less memory, and releases the interpreter lock most of the
    time. If the text is not valid JSON, the counts cover at least the part before its first fault.
    """
    if b"\\" in body:  # now the only quotes left are those at the ends of strings
        body = body.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    is_inside, depth, deepest, counts = False, 0, 0, np.zeros(3, np.int64)
    for start in range(0, len(body), _SCAN_BYTES):
        part = np.frombuffer(body, np.uint8, min(_SCAN_BYTES, len(body) - start), start)
        inside = np.logical_xor.accumulate(part == ord('"'))
        if is_inside:
            inside = ~inside
        is_inside = bool(inside[-1])
        outside = part[~inside]
        opens = (outside == ord("[")) | (outside == ord("{"))
        closes = (outside == ord("]")) | (outside == ord("}"))
        if outside.size:
            depths = depth + np.cumsum(opens.astype(np.int8) - closes, dtype=np.int64)
            deepest, depth = max(deepest, int(depths.max())), int(depths[-1])
        marks = (opens, outside == ord(":"), outside == ord(","))
        counts += [np.count_nonzero(each) for each in marks]
    num_containers, num_keys, num_commas = map(int, counts)
    return JsonShape(deepest, num_containers, num_keys, num_commas + 1)


def parse_body(
    body: bytes, max_values: int = MAX_VALUES, *, what: str = "The JSON body of your request"
) -> dict[str, Any]:
    """Decode a request's body, which must be a JSON object.

    Args:
        body: the bytes that were sent.
        max_values: how many values it may hold.
        what: what errors call it.

    Raises:
        RequestError: the body is not a JSON object, or has too many values or levels.
    """
    # Most bodies have so little punctuation, strings included, that they need not be counted.
    needs_counting = (
        sum(map(body.count, b"[{")) > MAX_DEPTH
        or body.count(b":") > MAX_KEYS
        or body.count(b",") >= max_values
    )
    if needs_counting:
        shape = shape_of(body)
        if shape.depth > MAX_DEPTH:
            raise RequestError(f"{what} is nested more than {MAX_DEPTH} levels deep.")
        for held, most, of_what in (
            (shape.num_containers, MAX_CONTAINERS, "arrays and objects"),
            (shape.num_keys, MAX_KEYS, "members of objects"),
            (shape.num_values, max_values, "values"),
        ):
            if held > most:
                raise RequestError(f"{what} has {held} {of_what}; at most {most} are allowed.")
    try:
        parsed = decode_json(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise RequestError(f"We could not parse {what[0].lower()}{what[1:]}.") from None
    if not isinstance(parsed, dict):
        raise RequestError(wrong_type("body", "an object", parsed), code="invalid_type")
    return parsed


_ESCAPES = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
"""An escape in JSON: two halves of a surrogate pair, one half alone, or any other."""


def decode_json(text: bytes | str) -> Any:
    """Return a JSON value; half of a surrogate pair becomes U+FFFD.

    Clients that cut texts to a length in UTF-16 leave such halves, and send them again with each
    turn of a session.

    Raises:
        msgspec.DecodeError, UnicodeError, RecursionError: the text is no JSON.
    """
    with contextlib.suppress(msgspec.DecodeError, UnicodeError):
        return msgspec.json.decode(text)
    whole = whole_characters(
        text if isinstance(text, str) else text.decode("utf-8", "surrogatepass")
    )
    repaired = _ESCAPES.sub(lambda found: rb"\ufffd" if found[1] else found[0], whole.encode())
    return msgspec.json.decode(repaired)


def whole_characters(text: str) -> str:
    """Return a text that UTF-8 can hold: half of a surrogate pair becomes U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def is_too_deep(value: Any) -> bool:
    """Return whether a parsed JSON value has more than `MAX_DEPTH` nested arrays and objects."""
    level = [value]
    for _ in range(MAX_DEPTH):
        if not level:
            return False
        inner = [each.values() if isinstance(each, dict) else each for each in level]
        level = [each for one in inner for each in one if isinstance(each, dict | list)]
    return bool(level)


def read(
    kind: type[Body],
    body: dict[str, Any],
    refuses: Callable[[str], bool] | None = None,
    at: Sequence[str | int] = (),
) -> Body:
    """Return a body with each of its fields checked.

    Args:
        kind: the class that declares the fields.
        body: the JSON object that was sent.
        refuses: whether an unknown field of this name is refused, at any depth of the body.
        at: the path of this object, where it is a part of the body.

    Raises:
        RequestError: a field is invalid; the first such field is named, in OpenAI's words.
    """
    try:
        return kind.model_validate(body, context=refuses)
    except ValidationError as error:
        raise in_openai_words(error, at) from None


def path_of(keys: Iterable[str | int]) -> str:
    """Return a path in a body as OpenAI writes it: `messages[0].content`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)[1:]


def out_of_bounds(path: str, name: str, bound: float, value: Any) -> RequestError:
    """Return the error for a value, or a length, beyond a bound that pydantic calls `name`."""
    is_sized = isinstance(value, Sized)
    a_kind, got = _CALLED[type(value if is_sized else bound).__name__], value
    kind = a_kind.split()[1]
    if is_sized:
        got = f"{a_kind} with length {len(value)}" if value else f"an empty {kind}"
    told = {"a_kind": a_kind, "bound": int(bound)}
    code, what, allowed = (part.format(kind, **told) for part in _OF_BOUNDS[name])
    text = f"Invalid '{path}': {what}. Expected {allowed}, but got {got} instead."
    return RequestError(text, param=path, code=code)


def wrong_type(path: str, expected: str, value: object) -> str:
    """Return what an error says of a value that is not of the expected type."""
    got = _CALLED.get(type(value).__name__, "something else")
    return f"Invalid type for '{path}': expected {expected}, but got {got} instead."


def in_openai_words(errors: ValidationError, at: Sequence[str | int] = ()) -> RequestError:
    """Return the first of pydantic's errors in OpenAI's words, naming the field."""
    error: Any = errors.errors(include_url=False)[0]
    fault, facts = error["type"], error.get("ctx", {})
    value = facts.get("value", error["input"])
    keys = (*at, *error["loc"], *([facts["name"]] if "name" in facts else ()))
    keys = tuple(key[:MAX_TOLD_CHARACTERS] if isinstance(key, str) else key for key in keys)
    if "name" in facts:
        facts = {**facts, "name": keys[-1]}
    if keys[-1] == "[key]":
        what = "You should only be submitting non-negative integers."
        if "max_length" in facts:
            what = f"It may have at most {facts['max_length']} characters."
        text = f"Invalid key in '{keys[0]}': {value!r:.80}. {what}"
        return RequestError(text, param=keys[0], code="invalid_value")
    path = path_of(keys)
    expected = _CALLED.get(fault, error["msg"])
    is_plain_item = isinstance(keys[-1], int) and expected != "an object"
    param = path.partition("[")[0] if is_plain_item else path  # name the array, not its item
    if fault in _OF_NAMES:
        text, code = _OF_NAMES[fault]
        return RequestError(text.format(path, **facts), param=path, code=code)
    if fault == "literal_error" and isinstance(value, str):
        return invalid_value(param, value, facts["expected"].replace(" or ", " and "))
    if names := facts.keys() & _OF_BOUNDS:
        name = names.pop()
        return out_of_bounds(path, name, facts[name], value)
    return RequestError(wrong_type(path, expected, value), param=param, code="invalid_type")
