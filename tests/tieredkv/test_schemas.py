"""Which JSON schemas can be enforced, and that what is then written follows them."""

import contextlib
import json
import random
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from jsonschema import (
    Draft4Validator,
    Draft7Validator,
    Draft202012Validator,
    FormatChecker,
    ValidationError,
)

from tests.golden import refused
from tests.tieredkv.written import NotEndedError, written
from tieredkv.errors import RequestError
from tieredkv.server.schemas import MAX_SCHEMA_BYTES, enforceable, unenforced
from tieredkv.server.structure import as_grammar, json_format

NODE = {"type": "object", "required": ["next"], "additionalProperties": False}

FOLLOWED: dict[str, Any] = {
    "a string": {"type": "string"},
    "short": {"type": "string", "maxLength": 6},
    "long": {"type": "string", "minLength": 3, "maxLength": 9},
    "short or null": {"type": ["string", "null"], "maxLength": 4},
    "pattern": {"type": "string", "pattern": "^[a-z]{2,4}$"},
    "date-time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "integers": {"type": "integer", "minimum": -5, "maximum": 300},
    "open ends": {"type": "integer", "exclusiveMinimum": 2, "exclusiveMaximum": 9},
    "numbers": {"type": "number", "minimum": 0.5, "maximum": 10.25},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "enum": {"enum": ["a", 1, None, {"x": [1]}]},
    "enum of a type": {"type": "integer", "enum": [1, "a"]},
    "const": {"const": {"a": 'b"c'}},
    "list": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "string"}, {"type": "null"}],
        "items": False,
    },
    "object": {"type": "object"},
    "properties": {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "integer"}},
        "required": ["b"],
    },
    "further properties": {"type": "object", "additionalProperties": {"type": "integer"}},
    "a required property without a schema": {"type": "object", "required": ["z"]},
    "anyOf": {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]},
    "tagged oneOf": {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": kind}}, "required": ["k"]}
            for kind in ("a", "b")
        ]
    },
    "recursion": {
        "$defs": {
            "n": NODE
            | {"properties": {"next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}}
        },
        "$ref": "#/$defs/n",
    },
    "definitions": {"definitions": {"n": {"type": "null"}}, "items": {"$ref": "#/definitions/n"}},
    "anything": {},
}


OLDER: dict[str, tuple[Any, Any]] = {
    # As zod writes tuples: the draft is 7, and what was written before is referred to by its path.
    "a tuple": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "array",
            "minItems": 2,
            "maxItems": 2,
            "items": [{"type": "integer", "maximum": 9}, {"$ref": "#/items/0"}],
        },
        Draft7Validator,
    ),
    "a closed tuple": (
        {"items": [{"type": "null"}], "additionalItems": False, "minItems": 1},
        Draft7Validator,
    ),
    "further items": (
        {
            "type": "array",
            "items": [{"const": "a"}],
            "additionalItems": {"type": "boolean"},
            "maxItems": 3,
        },
        Draft7Validator,
    ),
    "no first items": (
        {"type": "array", "items": [], "additionalItems": {"type": "null"}, "maxItems": 3},
        Draft7Validator,
    ),
    "names that are keywords": (
        {
            "properties": {"items": {"items": [{"type": "null"}]}, "exclusiveMinimum": True},
            "required": ["items"],
            "additionalProperties": False,
        },
        Draft7Validator,
    ),
    "ids that are fragments": (
        {"$id": "#root", "properties": {"a": {"$id": "#/properties/a", "type": "null"}}},
        Draft7Validator,
    ),
    "exclusive bounds": (
        {
            "type": "integer",
            "minimum": 1,
            "exclusiveMinimum": True,
            "maximum": 3,
            "exclusiveMaximum": False,
        },
        Draft4Validator,
    ),
}
"""Schemas of older drafts, and what checks these."""


@pytest.mark.parametrize("name", OLDER)
def test_schemas_of_older_drafts_are_followed(name: str) -> None:
    schema, validator = OLDER[name]
    assert unenforced(schema) == []
    form = json_format(enforceable(schema, "schema", is_strict=True))
    for seed in range(20):
        with contextlib.suppress(NotEndedError):
            text = written(as_grammar(form), random.Random(seed))
            validator(schema).validate(json.loads(text))


def test_dependencies_of_older_drafts_are_named_as_not_enforced() -> None:
    schema = {"type": "object", "dependencies": {"a": ["b"]}}
    assert unenforced(schema) == ["dependencies"]
    with refused(RequestError, param="schema", code="invalid_json_schema"):
        enforceable(schema, "schema", is_strict=True)


def check_followed(schema: Any, seed: int) -> None:
    form = json_format(enforceable(schema, "schema"))
    try:
        text = written(as_grammar(form), random.Random(seed))
    except NotEndedError:
        return
    Draft202012Validator(schema, format_checker=FormatChecker()).validate(json.loads(text))


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_is_written_follows_the_schema(name: str) -> None:
    assert unenforced(FOLLOWED[name]) == []
    for seed in range(25):
        check_followed(FOLLOWED[name], seed)


def test_the_check_can_fail() -> None:
    with pytest.raises(ValidationError):
        for seed in range(50):
            check_followed({"not": {"type": "string"}}, seed)


_LEAVES = st.sampled_from(
    [FOLLOWED[name] for name in ("short", "integers", "boolean", "null", "enum", "numbers")]
)


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from(["a", "b", "ü", 'q"'])
    objects = st.dictionaries(names, inner, max_size=3).flatmap(
        lambda properties: st.sets(st.sampled_from([*properties] or ["a"])).map(
            lambda required: {
                "type": "object",
                "properties": properties,
                "required": sorted(required & properties.keys()),
                "additionalProperties": False,
            }
        )
    )
    lists = inner.map(lambda items: {"type": "array", "items": items, "maxItems": 2})
    return objects | lists | st.lists(inner, min_size=1, max_size=3).map(lambda of: {"anyOf": of})


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(schema=st.recursive(_LEAVES, _nested, max_leaves=8), seed=st.integers(0, 99))
def test_what_is_written_follows_random_schemas(schema: Any, seed: int) -> None:
    check_followed(schema, seed)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "banana"},
        {"$ref": "#/$defs/none"},
        {"$ref": "http://localhost/schema"},
        {"enum": []},
        {"a": "b" * MAX_SCHEMA_BYTES},
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        NODE | {"properties": {"next": {"$ref": "#"}}},
        False,
        [1],
    ],
)
def test_what_no_answer_can_follow_is_refused(schema: Any) -> None:
    with refused(RequestError, param="response_format"):
        enforceable(schema, "response_format", name="weather")


def test_a_schema_nested_too_deeply_is_refused() -> None:
    schema: Any = {"type": "null"}
    for _ in range(40):
        schema = {"type": "array", "items": schema}
    with refused(RequestError, param="schema", code="invalid_json_schema"):
        enforceable(schema, "schema")


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("not", {"not": {"type": "string"}}),
        ("if", {"if": {}, "then": {}}),
        ("contains", {"type": "array", "contains": {"type": "string"}}),
        ("dependentRequired", {"dependentRequired": {"a": ["b"]}}),
        ("uniqueItems", {"type": "object", "properties": {"a": {"uniqueItems": True}}}),
        (
            "required beside patternProperties",
            {"type": "object", "patternProperties": {"(x+)+$": {}}, "required": ["x" * 40 + "y"]},
        ),
        ("allOf", {"allOf": [{"pattern": "^a"}, {"pattern": "b$"}]}),
        ("oneOf", {"oneOf": [{"type": "integer"}, {"type": "number"}]}),
    ],
)
def test_a_strict_schema_may_have_only_what_is_enforced(keyword: str, schema: Any) -> None:
    assert keyword in unenforced(schema)
    enforceable(schema, "schema")
    with refused(RequestError, param="schema", code="invalid_json_schema"):
        enforceable(schema, "schema", is_strict=True)
