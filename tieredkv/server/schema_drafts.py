"""Bring JSON schemas of older drafts into the form of draft 2020-12.

Many programs still write draft 7 or 4, often without `$schema`. What is rewritten here is no valid
schema in 2020-12, so that it need not be told which draft is meant. This module does not check
schemas.
"""

import re
from typing import Any

from tieredkv.fields import names_of
from tieredkv.server.schema_merge import Schema

_MAPS = names_of("properties patternProperties $defs definitions dependentSchemas")
"""Keywords whose objects have schemas by names that are no keywords."""

_VALUES = names_of("enum const default examples")
"""Keywords whose values are no schemas."""

_BOUNDS = (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))


def modern(schema: Schema) -> Schema:
    """Return a schema in the form of draft 2020-12.

    - A list of `items` becomes `prefixItems`, and `additionalItems` beside it `items`.
    - `exclusiveMinimum: true` makes `minimum` exclusive, and likewise for `maximum`.
    - An `$id` that is a fragment is left out, since references here are paths.

    Raises:
        RecursionError: it is nested too deeply.
    """
    if isinstance(schema, list):
        return [modern(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _within(key, value) for key, value in schema.items()}
    if isinstance(heads := made.get("items"), list):
        rest = {"items": made["additionalItems"]} if "additionalItems" in made else {}
        made = {key: made[key] for key in made if key not in ("items", "additionalItems")}
        made |= {"prefixItems": heads, **rest} if heads else rest
    for bound, exclusive in _BOUNDS:
        if isinstance(is_exclusive := made.get(exclusive), bool):
            del made[exclusive]
            if is_exclusive and bound in made:
                made[exclusive] = made.pop(bound)
    if isinstance(id := made.get("$id"), str) and "#" in id[:-1]:
        del made["$id"]
    return made


def _within(key: str, value: Any) -> Any:
    if key in _VALUES:
        return value
    if key in _MAPS and isinstance(value, dict):
        return {name: modern(each) for name, each in value.items()}
    if key == "$ref" and isinstance(value, str):
        return re.sub(r"/items/(?=\d+(?:/|$))", "/prefixItems/", value)
    return modern(value)
