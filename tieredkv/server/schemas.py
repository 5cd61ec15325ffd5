"""Check JSON schemas that answers must follow, and bring them into a form that can be enforced.

A few keywords cannot be enforced while an answer is written, since what they allow depends on
all of it. Here each of them is found, and everything else is left to xgrammar, which compiles it.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from tieredkv.errors import RequestError
from tieredkv.fields import names_of

logger = logging.getLogger(__name__)

Schema = Any
"""A JSON schema: an object, or a boolean."""

MAX_SCHEMA_BYTES = 128 << 10
"""The longest schema, written as JSON; longer ones would take seconds to check."""

MAX_SCHEMA_DEPTH = 32
MAX_BRANCHES = 64
"""Branches of a `oneOf` that are compared with each other."""

MAX_PASSES = 64
"""Of the search for what can be written to its end: references may be chained about as often."""

_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SINGLES = ("items", "additionalProperties", "propertyNames", "unevaluatedProperties")

_OF_THE_WHOLE = names_of("""
    not if then else dependentRequired dependentSchemas contains minContains maxContains
    unevaluatedItems
""")
"""Keywords that are not enforced."""

_BOUNDED = '^(?:[^\\x00-\\x1f"\\\\]|\\\\["\\\\/bfnrt]){%s,%s}$'
"""The written form of a string of bounded length, without `\\u` escapes."""

_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = f"^(?:{_OCTET}\\.){{3}}{_OCTET}$"


def enforceable(schema: Schema, field: str, *, name: str = "", is_strict: bool = False) -> Schema:
    """Return a schema as it can be enforced.

    Args:
        schema: what the client sent.
        field: path of the schema in the body.
        name: that the client gave it; shown in errors.
        is_strict: whether keywords that cannot be enforced are refused.

    Raises:
        RequestError: it is no JSON schema, no value can follow it, it is too long or nested too
            deeply, or it is strict and has such a keyword.
    """
    what = f"Invalid schema for {field} '{name}'" if name else f"Invalid schema for '{field}'"

    def refuse(why: str) -> RequestError:
        return RequestError(f"{what}: {why}", param=field, code="invalid_json_schema")

    num_bytes = len(msgspec.json.encode(schema))
    if num_bytes > MAX_SCHEMA_BYTES:
        raise refuse(f"it has {num_bytes} bytes, and at most {MAX_SCHEMA_BYTES} are allowed.")
    _check_is_schema(schema, refuse)
    if is_strict and (left := next(iter(_unenforced(schema)), None)):
        raise refuse(f"'{left}' cannot be enforced. Leave it out, or leave out 'strict'.")
    _check_ends(schema, refuse)
    for keyword in {*_unenforced(schema)} - _told:
        logger.info("`%s` in schemas is not enforced; answers need not follow it", keyword)
        _told.add(keyword)
    return _written(schema)


_told = set[str]()
"""Keywords that the log has named."""


def unenforced(schema: Schema) -> list[str]:
    """Return the keywords of a schema that answers need not follow."""
    return sorted({*_unenforced(schema)})


def _check_is_schema(schema: Schema, refuse: Any) -> None:
    # Imported here, as few requests have a schema.
    from jsonschema import Draft202012Validator, SchemaError

    depth = _depth(schema)
    if depth > MAX_SCHEMA_DEPTH:
        raise refuse(f"it is nested more than {MAX_SCHEMA_DEPTH} levels deep.")
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        at = "".join(f"[{step!r}]" for step in error.absolute_path)
        raise refuse(f"{error.message[:300]}{f' at {at}' if at else ''}") from None
    for part in _parts(schema):
        if "$ref" in part and _target(schema, part["$ref"]) is None:
            raise refuse(f"'$ref' names nothing in this schema: {str(part['$ref'])[:200]!r}.")
        if part.get("enum") == []:
            raise refuse("'enum' is empty.")


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


def _target(whole: Schema, ref: Any) -> Schema | None:
    """Return what a reference within the whole schema names; None if it names nothing there."""
    if not (isinstance(ref, str) and ref.startswith("#")):
        return None
    found = whole
    for step in filter(None, ref[1:].split("/")):
        step = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or step not in found:
            return None
        found = found[step]
    return found if isinstance(found, dict | bool) else None


# --- What cannot be enforced


def _unenforced(schema: Schema) -> Iterator[str]:
    for part in _parts(schema):
        yield from sorted(_OF_THE_WHOLE & part.keys())
        if part.get("uniqueItems"):
            yield "uniqueItems"
        if len(part.get("allOf", ())) > 1:
            yield "allOf"
        if not _is_disjoint(part.get("oneOf", ())):
            yield "oneOf"
        if "patternProperties" in part and _undeclared(part):
            yield "required beside patternProperties"
        if {"pattern", "format"} & part.keys() and {"minLength", "maxLength"} & part.keys():
            yield "minLength and maxLength beside pattern and format"


def _is_disjoint(branches: Any) -> bool:
    """Whether no value fits two of the branches, as far as types and constants tell."""
    return len(branches) <= MAX_BRANCHES and not any(
        _may_overlap(one, other) for i, one in enumerate(branches) for other in branches[:i]
    )


def _may_overlap(one: Schema, other: Schema) -> bool:
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return True
    types, others = _types(one), _types(other)
    if types and others and not types & others:
        return False
    values, other_values = _values(one), _values(other)
    if values is not None and other_values is not None:
        return bool(values & other_values)
    both = {*one.get("required", ())} & {*other.get("required", ())}
    for key in both:
        tags = _values(one.get("properties", {}).get(key, {}))
        other_tags = _values(other.get("properties", {}).get(key, {}))
        if tags is not None and other_tags is not None and not tags & other_tags:
            return False
    return True


def _types(schema: Mapping[str, Any]) -> set[str]:
    given = schema.get("type", [])
    types = {given} if isinstance(given, str) else {*given}
    return types | {"integer"} if "number" in types else types


def _values(schema: Schema) -> set[bytes] | None:
    """Return the values that a schema lists, as JSON; None if it lists none."""
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return None if values is None else {msgspec.json.encode(value) for value in values}


# --- What no answer can follow


def _check_ends(whole: Schema, refuse: Any) -> None:
    """Refuse a schema of which some part can never be written to its end.

    A part can be once all that it must have can be; what depends on itself alone never can.
    """
    parts = [*_parts(whole)]
    ending, left = set[int](), parts[::-1]  # most parts end once those within them do
    for _ in range(MAX_PASSES):
        before, left = len(left), [part for part in left if not _note_end(part, whole, ending)]
        if len(left) == before:
            break
    if left or whole is False:
        raise refuse("no value can follow it: a part of it contains itself without end.")


def _note_end(part: dict[str, Any], whole: Schema, ending: set[int]) -> bool:
    """Note whether a part ends, given which others are known to."""
    if does_end := _ends(part, whole, ending):
        ending.add(id(part))
    return does_end


def _ends(part: dict[str, Any], whole: Schema, ending: set[int]) -> bool:
    def ends(each: Schema) -> bool:
        return each is True or id(each) in ending

    needed: list[Schema] = [*part.get("allOf", ())]
    if "$ref" in part:
        needed.append(_target(whole, part["$ref"]))
    properties = part.get("properties", {})
    needed += [properties[name] for name in part.get("required", ()) if name in properties]
    if part.get("minItems", 0) > 0:
        needed += [part[key] for key in ("items",) if key in part and not part.get("prefixItems")]
        needed += part.get("prefixItems", [])[: part["minItems"]]
    choices = [part[key] for key in ("anyOf", "oneOf") if part.get(key)]
    return all(map(ends, needed)) and all(any(map(ends, options)) for options in choices)


# --- What xgrammar enforces when it is written otherwise


def _written(schema: Schema) -> Schema:
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for key in _MAPS:
        if key in made:
            made[key] = {name: _written(each) for name, each in made[key].items()}
    for key in _LISTS:
        if key in made:
            made[key] = [_written(each) for each in made[key]]
    for key in _SINGLES:
        if key in made:
            made[key] = _written(made[key])
    _declare_required(made)
    types = _types(made)
    if types and "enum" in made:
        made["enum"] = [it for it in made["enum"] if _type_of(it) & types] or made["enum"]
    if made.get("format") == "ipv4" and "pattern" not in made:  # xgrammar allows leading zeros
        del made["format"]
        made["pattern"] = _IPV4
    is_free = not made.keys() & {"pattern", "format", "enum", "const"}
    if is_free and made.keys() & {"minLength", "maxLength"}:
        made["pattern"] = _BOUNDED % (made.pop("minLength", 0), made.pop("maxLength", ""))
    return made


def _declare_required(made: dict[str, Any]) -> None:
    """Give each required property a schema; xgrammar does not write those that have none."""
    properties, others = made.get("properties", {}), made.get("additionalProperties", True)
    missing = _undeclared(made)
    if missing and others is not False and "patternProperties" not in made:
        made["properties"] = {**properties, **dict.fromkeys(missing, others)}


def _undeclared(part: dict[str, Any]) -> list[str]:
    properties = part.get("properties", {})
    return [name for name in part.get("required", ()) if name not in properties]


def _type_of(value: Any) -> set[str]:
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case str():
            return {"string"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number", "integer"} if value.is_integer() else {"number"}
        case list():
            return {"array"}
    return {"object"}
