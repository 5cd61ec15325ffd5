"""Check JSON schemas that answers must follow, and bring them into a form that can be enforced.

A few keywords cannot be enforced while an answer is written, since what they allow depends on
all of it. Here a schema is checked; `schema_writer` finds those keywords and rewrites the rest.
"""

import logging
import re
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

import msgspec

from tieredkv.errors import RequestError
from tieredkv.server.schema_drafts import modern
from tieredkv.server.schema_merge import EmptyError, Schema
from tieredkv.server.schema_writer import FORMATS, TooLargeError, rewritten

logger = logging.getLogger(__name__)

MAX_SCHEMA_BYTES = 128 << 10
"""The longest schema, written as JSON; longer ones would take seconds to check."""

MAX_SCHEMA_DEPTH = 32
MAX_PASSES = 64
"""Of the search for what can be written to its end: references may be chained about as often."""

_JSON_TYPES: dict[str, Any] = {
    "boolean": bool,
    "integer": int,
    "number": float,
    "string": str,
    "array": list,
    "object": dict,
    "null": type(None),
}

_OF_TEXTS = frozenset({"pattern", "format", "maxLength", "enum", "const"})
"""Keywords that say which texts are allowed."""

Refuse = Callable[[str], RequestError]

_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SINGLES = ("items", "additionalProperties", "propertyNames", "unevaluatedProperties")


Raw = Literal["none", "properties", "all"]
"""Which texts are written as they are, without escapes: those between tags, or all of them."""


def enforceable(
    schema: Schema, field: str, *, name: str = "", is_strict: bool = False, raw: Raw = "none"
) -> Schema:
    """Return a schema as it can be enforced.

    Args:
        schema: what the client sent.
        field: path of the schema in the body.
        name: that the client gave it; shown in errors.
        is_strict: whether keywords that cannot be enforced are refused.
        raw: which of its texts are not escaped.

    Raises:
        RequestError: it is no JSON schema, no value can follow it, it is too long or nested too
            deeply, or it is strict and has such a keyword.
    """
    what = f"Invalid schema for {field} '{name}'" if name else f"Invalid schema for '{field}'"

    def refuse(why: str) -> RequestError:
        return RequestError(f"{what}: {why}", param=field, code="invalid_json_schema")

    made, left = _rewritten(schema, refuse)
    if raw == "properties":
        made = _unescaped(made, left)
    elif raw == "all":
        made = _all_unescaped(made, left)
    if is_strict and left:
        raise refuse(f"'{min(left)}' cannot be enforced. Leave it out, or leave out 'strict'.")
    for keyword in left - _told:
        logger.info("`%s` in schemas is not enforced; answers need not follow it", keyword)
        _told.add(keyword)
    return made


_told = set[str]()
"""Keywords that the log has named."""


def unenforced(schema: Schema) -> list[str]:
    """Return the keywords of a schema that answers need not follow."""
    return sorted(_rewritten(schema, RequestError)[1])


def _rewritten(schema: Schema, refuse: Refuse) -> tuple[Schema, set[str]]:
    try:
        num_bytes = len(msgspec.json.encode(schema))
    except (UnicodeEncodeError, OverflowError) as error:
        raise refuse(f"it has a text or a number that JSON cannot hold: {error}.") from None
    if num_bytes > MAX_SCHEMA_BYTES:
        raise refuse(f"it has {num_bytes} bytes, and at most {MAX_SCHEMA_BYTES} are allowed.")
    try:
        schema = modern(schema)
    except RecursionError:
        raise refuse("it is nested too deeply.") from None
    _check_is_schema(schema, refuse)
    try:
        made, left = rewritten(schema, lambda ref: _target(schema, ref))
    except EmptyError:
        raise refuse("no value can follow it.") from None
    except TooLargeError:
        raise refuse("it has too many parts once its 'allOf' and 'anyOf' are merged.") from None
    except RecursionError:
        raise refuse("its references are nested too deeply.") from None
    _check_ends(made, refuse)
    return made, left


def _unescaped(made: Schema, left: set[str]) -> Schema:
    """Return a schema without patterns of properties that may escape characters."""
    properties = {name: _raw(part, left) for name, part in made.get("properties", {}).items()}
    return made | {"properties": properties} if properties else made


def _all_unescaped(made: Schema, left: set[str]) -> Schema:
    """Return a schema without patterns that may escape characters, however deep they stand."""
    if not isinstance(made, dict):
        return made
    part = dict(_raw(made, left))
    for key in part.keys() & {*_LISTS}:
        part[key] = [_all_unescaped(it, left) for it in part[key]]
    for key in part.keys() & {*_MAPS}:
        part[key] = {name: _all_unescaped(it, left) for name, it in part[key].items()}
    for key in part.keys() & {*_SINGLES}:
        part[key] = _all_unescaped(part[key], left)
    return part


def _raw(part: Any, left: set[str]) -> Any:
    """Return a part of a schema without its pattern, if that may escape characters."""
    if not isinstance(part, dict) or "\\\\" not in part.get("pattern", ""):
        return part
    left.add("pattern and minLength in texts without escapes")
    return {key: value for key, value in part.items() if key != "pattern"}


def has_bare_names(schema: Schema) -> bool:
    """Whether the names of all properties can be read where nothing stands around them."""
    for part in _parts(schema):
        if part.keys() & {"patternProperties", "propertyNames"}:
            return False
        if not all(_BARE_NAME.fullmatch(name) for name in part.get("properties", ())):
            return False
    return True


_BARE_NAME = re.compile(r"[\w$./-]+")


def _check_is_schema(schema: Schema, refuse: Refuse) -> None:
    # Imported here, as few requests have a schema.
    from jsonschema import Draft202012Validator, SchemaError

    left, seen = [schema], set[int]()
    while left:
        part = left.pop()
        if id(part) in seen:
            continue
        if _depth(part) > MAX_SCHEMA_DEPTH:
            raise refuse(f"it is nested more than {MAX_SCHEMA_DEPTH} levels deep.")
        try:
            Draft202012Validator.check_schema(part)
        except SchemaError as error:
            at = "".join(f"[{step!r}]" for step in error.absolute_path)
            raise refuse(f"{error.message[:300]}{f' at {at}' if at else ''}") from None
        for each in _parts(part):
            seen.add(id(each))
            if each.get("enum") == []:
                raise refuse("'enum' is empty.")
            if "$ref" in each:
                target = _target(schema, each["$ref"])
                if target is None:
                    told = str(each["$ref"])[:200]
                    raise refuse(f"'$ref' names nothing in this schema: {told!r}.")
                left += [target] if isinstance(target, dict) else []


def _depth(schema: Schema) -> int:
    depth, level = 0, [schema]
    while level:
        depth, level = depth + 1, [part for each in level for part in _children(each)]
        if depth > MAX_SCHEMA_DEPTH:
            break
    return depth


def _children(schema: Schema) -> Iterator[Schema]:
    if not isinstance(schema, dict):
        return
    for key in _MAPS:
        if isinstance(schema.get(key), dict):
            yield from schema[key].values()
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            yield from schema[key]
    yield from (schema[key] for key in _SINGLES if key in schema)


def _parts(schema: Schema) -> Iterator[dict[str, Any]]:
    """Yield a schema and all within it, but for booleans."""
    if isinstance(schema, dict):
        yield schema
        for each in _children(schema):
            yield from _parts(each)


class Property(NamedTuple):
    """A property of an object, as far as a text that is written for it can be read by it.

    Attributes:
        types: that its value may have.
        parts: the schemas that describe its value.
    """

    types: list[str]
    parts: list[dict[str, Any]]

    def trimmed(self, text: str) -> str:
        """Return a text without the white space at its ends that the property does not allow."""
        bare, listed = text.strip(), [it for part in self.parts for it in _constants(part)]
        if bare in listed:
            return text if text in listed else bare
        for part in self.parts:
            types, is_bounded = [*_types(part)], bool(part.keys() & _OF_TEXTS)
            if "string" not in types and (types or not is_bounded):
                continue
            if not is_bounded:
                return text
            pattern, most = str(part.get("pattern")), part.get("maxLength")
            text = text.lstrip() if pattern.startswith("^") else text
            text = text.rstrip() if pattern.endswith("$") else text
            if str(part.get("format")) in FORMATS or (isinstance(most, int) and len(text) > most):
                text = bare
        return text


def properties_of(schema: Schema) -> dict[str, Property]:
    """Return the properties of an object, through references and choices.

    The schema need not be valid: what is no schema has no types.
    """
    properties = dict[str, Schema]()
    for part in _same_value(schema, schema):
        if isinstance(found := part.get("properties"), dict):
            properties |= found
    made = dict[str, Property]()
    for name, property in properties.items():
        parts = [*_same_value(property, schema)]
        types = [*dict.fromkeys(kind for part in parts for kind in _types(part))]
        made[name] = Property(types, parts)
    return made


def _same_value(part: Schema, whole: Schema) -> Iterator[dict[str, Any]]:
    """Yield a schema and all others by which it describes the same value, each once."""
    left, seen = deque([part]), set[int]()
    while left:
        part = left.popleft()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        left.append(_target(whole, part.get("$ref")))
        for key in ("allOf", "anyOf", "oneOf"):
            left.extend(part[key] if isinstance(part.get(key), list) else ())


def _types(part: dict[str, Any]) -> Iterator[str]:
    """Yield the types that a schema names, or those of its constants."""
    given = part.get("type")
    yield from (it for it in (given if isinstance(given, list) else [given]) if isinstance(it, str))
    if part.get("nullable") is True:
        yield "null"
    if given is None:
        yield from map(_type_of, _constants(part))


def _constants(part: dict[str, Any]) -> list[Any]:
    values = part.get("enum", [part["const"]] if "const" in part else [])
    return values if isinstance(values, list) else []


def _type_of(value: Any) -> str:
    return next(name for name, kind in _JSON_TYPES.items() if isinstance(value, kind))


def _target(whole: Schema, ref: Any) -> Schema | None:
    """Return what a reference within the whole schema names; None if it names nothing there."""
    if not isinstance(ref, str) or ref[:2] not in ("#", "#/"):
        return None
    found = whole
    for step in ref[2:].split("/") if len(ref) > 1 else ():
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        elif isinstance(found, dict) and step in found:
            found = found[step]
        else:
            return None
    return found if isinstance(found, dict | bool) else None


# --- What no answer can follow


def _check_ends(whole: Schema, refuse: Refuse) -> None:
    """Refuse a schema, as it is enforced, of which some part can never be written to its end.

    A part can be once all that it must have can be; what depends on itself alone never can.
    """
    parts = [*_parts(whole)]
    ending, left = set[int](), parts[::-1]  # most parts end once those within them do
    for _ in range(MAX_PASSES):
        before, left = len(left), [part for part in left if not _note_end(part, whole, ending)]
        if len(left) == before:
            break
    if left:
        raise refuse("no value can follow it: a part of it contains itself without end.")


def _note_end(part: dict[str, Any], whole: Schema, ending: set[int]) -> bool:
    """Note whether a part ends, given which others are known to."""
    if does_end := _ends(part, whole, ending):
        ending.add(id(part))
    return does_end


def _ends(part: dict[str, Any], whole: Schema, ending: set[int]) -> bool:
    properties, heads = part.get("properties", {}), part.get("prefixItems", [])
    least = part.get("minItems", 0)
    needed = [properties[name] for name in part.get("required", ())] + heads[:least]
    if least > len(heads):
        needed.append(part["items"])
    if "$ref" in part:
        needed.append(_target(whole, part["$ref"]))
    choices = part.get("anyOf")
    is_open = choices is None or any(id(each) in ending for each in choices)
    return is_open and all(id(each) in ending for each in needed)
