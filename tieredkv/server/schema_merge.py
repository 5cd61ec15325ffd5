"""Merge JSON schemas that must all be followed into one.

What cannot be merged is kept of one of them, and its keyword is named. This module does not know
what can be enforced.
"""

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import msgspec

Schema = Any
"""A JSON schema: an object, or a boolean."""

ObjectSchema = dict[str, Any]
"""A JSON schema that is an object."""


class EmptyError(ValueError):
    """No value follows a schema."""


_STRICTER: dict[str, Callable[..., Any]] = {
    "minimum": max,
    "exclusiveMinimum": max,
    "minLength": max,
    "minItems": max,
    "minProperties": max,
    "maximum": min,
    "exclusiveMaximum": min,
    "maxLength": min,
    "maxItems": min,
    "maxProperties": min,
    "uniqueItems": max,
    "required": lambda one, other: [*dict.fromkeys([*one, *other])],
}
"""How two values of a keyword become one that demands both."""

UNEVALUATED = "\0unevaluatedProperties"
"""Those beside other schemas: it is known only once all of these are merged what they are."""


def merged(
    leaves: list[ObjectSchema], left: set[str]
) -> tuple[ObjectSchema, list[tuple[str, list[Schema]]]]:
    """Return one schema that demands all, without its choices, and these.

    Args:
        leaves: schemas without references and `allOf`.
        left: gets the keywords of which not all is demanded.

    Raises:
        EmptyError: no value follows all of them.
    """
    base, choices = ObjectSchema(), list[tuple[str, list[Schema]]]()
    for leaf in leaves:
        choices += [(key, leaf[key]) for key in ("anyOf", "oneOf") if key in leaf]
        rest = {key: value for key, value in leaf.items() if key not in ("anyOf", "oneOf")}
        base = _both_of(base, rest, left)
    return base, choices


def _both_of(one: ObjectSchema, other: ObjectSchema, left: set[str]) -> ObjectSchema:
    if not one or not other:
        return one or other
    made = one | other
    for key in one.keys() & other.keys():
        a, b = one[key], other[key]
        if key in _STRICTER:
            made[key] = _STRICTER[key](a, b)
        elif key == "type":
            made[key] = _common_types(a, b)
        elif key == "enum":
            made[key] = common(a, b)
        elif key in ("additionalProperties", "propertyNames", UNEVALUATED):
            made[key] = _both(a, b)
        elif key == "multipleOf":
            made[key] = a if not Fraction(str(a)) % Fraction(str(b)) else b
            if Fraction(str(made[key])) % Fraction(str(a)):
                left.add("allOf")
        elif a != b and key not in ("properties", "items", "prefixItems"):
            made[key] = a
            left.add("allOf")
    if {"properties", "patternProperties"} & made.keys():
        _merge_properties(one, other, made, left)
    if "prefixItems" in made or {"items"} & one.keys() & other.keys():
        longest = max((it.get("prefixItems", []) for it in (one, other)), key=len)
        both = [_both(_item(one, i), _item(other, i)) for i in range(len(longest))]
        made["items"] = _both(one.get("items", True), other.get("items", True))
        made |= {"prefixItems": both} if both else {}
    return made


def _merge_properties(
    one: ObjectSchema, other: ObjectSchema, made: ObjectSchema, left: set[str]
) -> None:
    names = [*dict.fromkeys([*one.get("properties", ()), *other.get("properties", ())])]
    of_both = {name: _both(*(_property(it, name) for it in (one, other))) for name in names}
    for it, beside in ((one, other), (other, one)):
        is_other = it.get("patternProperties") not in (None, beside.get("patternProperties"))
        is_closed = beside.get("additionalProperties", True) not in (True, {})
        if is_other and (is_closed or any(n not in it.get("properties", ()) for n in names)):
            left.add("patternProperties")
    if of_both:
        made["properties"] = of_both


def _both(one: Schema, other: Schema) -> Schema:
    if one is False or other is False:
        return False
    if one in (True, {}) or one == other:
        return other
    return one if other in (True, {}) else {"allOf": [one, other]}


def _item(part: ObjectSchema, index: int) -> Schema:
    heads = part.get("prefixItems", [])
    return heads[index] if index < len(heads) else part.get("items", True)


def _property(part: ObjectSchema, name: str) -> Schema:
    properties = part.get("properties", {})
    if name in properties:
        return properties[name]
    return True if "patternProperties" in part else part.get("additionalProperties", True)


def types_of(part: Mapping[str, Any]) -> list[str]:
    """Return the types that a schema names; none if it names none."""
    given = part.get("type", [])
    return [given] if isinstance(given, str) else [*given]


def _common_types(one: Any, other: Any) -> list[str]:
    a, b = types_of({"type": one}), types_of({"type": other})
    kept = [it for it in a if it in b or (it == "integer" and "number" in b)]
    kept += [it for it in b if it == "integer" and "number" in a and it not in kept]
    if not kept:
        raise EmptyError
    return kept


def common(one: list[Any], other: list[Any]) -> list[Any]:
    """Return the values of one list that are in the other, too."""
    keys = {*map(key_of, other)}
    return [it for it in one if key_of(it) in keys]


def key_of(value: Any) -> bytes:
    """Return a text that is the same for equal JSON values: 1 is 1.0, and true is not 1."""
    return msgspec.json.encode(_plain(value), order="deterministic")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [*map(_plain, value)]
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53
    return int(value) if is_whole else value
