"""Traps of JSON schemas: what is written follows each of them, or the keyword is named.

Each is a small schema of our own for what went wrong with one of a public corpus: the suite of the
JSON Schema organisation, MaskBench, or xgrammar's tests. `ENFORCED` holds those of which all is
enforced, and `LEFT` those of which a keyword is not. Random ones combine all keywords.
"""

import json
import random
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tests.golden import refused
from tests.tieredkv.written import NotEndedError, compiler, written
from tieredkv.engine.grammars import Matcher
from tieredkv.errors import RequestError
from tieredkv.server.schemas import enforceable, unenforced
from tieredkv.server.structure import as_grammar, json_format

Schema = Any

OBJECT: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = OBJECT | {"additionalProperties": False}


def tree(**more: Schema) -> dict[str, Schema]:
    """Return a schema of trees."""
    children = {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}
    return {"type": "object", "properties": {"children": children}, **more}


def tagged(kind: str, **more: Schema) -> dict[str, Schema]:
    """Return a schema of objects that are told apart by a constant."""
    return {"properties": {"kind": {"const": kind}}, "required": ["kind"], **more}


ENFORCED: dict[str, Schema] = {
    # The suite: keywords without a type, which xgrammar ignores.
    "minimum alone": {"minimum": 5, "maximum": 50},
    "maxLength alone": {"maxLength": 3},
    "required alone": {"required": ["a"]},
    "minItems alone": {"minItems": 2, "maxItems": 3},
    "integer bounds with fractions": {"type": "integer", "minimum": 0.5, "exclusiveMaximum": 9.5},
    "bounds beyond 64 bits": {"type": "integer", "minimum": -1e30, "maximum": 1e30},
    "a narrow range": {"type": "number", "minimum": 1e-9, "maximum": 2e-9},
    "multiples in a range": {"type": "integer", "minimum": 5, "multipleOf": 7, "maximum": 60},
    "multiples that are numbers": {"type": "number", "multipleOf": 3},
    "multiples of a half": {"type": "integer", "multipleOf": 0.5},
    "true in a tuple": {"type": "array", "prefixItems": [True, {"type": "null"}], "items": False},
    "a tuple cut by maxItems": {
        "type": "array",
        "prefixItems": [{"type": "null"}] * 3,
        "maxItems": 2,
    },
    "no third item": {"type": "array", "prefixItems": [{"type": "null"}, True, False]},
    "a closed tuple with a least length": {
        "prefixItems": [True] * 3,
        "items": False,
        "minItems": 2,
    },
    "constants beside references": {
        "$defs": {"n": {"type": "integer"}},
        "prefixItems": [{"$ref": "#/$defs/n", "const": i} for i in range(3)],
        "items": False,
        "minItems": 3,
    },
    "unevaluatedItems": {"prefixItems": [{"type": "null"}], "unevaluatedItems": False},
    "one unique item": {"type": "array", "uniqueItems": True, "maxItems": 1},
    "counts as floats": {"type": "array", "minItems": 1.0, "maxItems": 2.0},
    # The suite: what stands beside `$ref`, `enum`, `anyOf` and `allOf`.
    "beside a reference": {"$ref": "#/$defs/s", "maxLength": 3, "$defs": {"s": {"type": "string"}}},
    "a reference with escapes": {
        "$defs": {"a/b": {"~x": {"const": 1}}},
        "$ref": "#/$defs/a~1b/%7E0x",
    },
    "a reference into a list": {
        "anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/anyOf/0"}}]
    },
    "a reference to elsewhere": {
        "$ref": "#/x/y",
        "x": {"y": {"items": {"$ref": "#/x/z"}}, "z": {"type": "null"}},
    },
    "enum beside a bound": {"enum": [1, 5, 9, "a"], "minimum": 4, "type": ["integer", "string"]},
    "large floats": {"oneOf": [{"const": 1e30}, {"enum": [-1e30, 0.0]}]},
    "const beside enum": {"const": 2, "enum": [1, 2.0]},
    "anyOf beside properties": CLOSED | {"anyOf": [{"required": ["a"]}, {"maxProperties": 0}]},
    "two choices": {
        "anyOf": [{"minimum": 1}, {"type": "null"}],
        "oneOf": [{"type": "null"}, {"type": "number", "maximum": 4}],
    },
    "allOf": {
        "allOf": [
            OBJECT | {"required": ["a"]},
            {"properties": {"a": {"maximum": 9}, "b": {"const": "x"}}, "required": ["b"]},
        ]
    },
    "allOf with a closed one": {"allOf": [CLOSED, {"properties": {"b": True}, "required": ["a"]}]},
    "allOf of trees": {
        "allOf": [{"$ref": "#/$defs/tree"}, {"properties": {"size": {"type": "null"}}}],
        "$defs": {"tree": tree(), "other": {"allOf": [tree(), tree(required=["children"])]}},
    },
    "oneOf by references": {
        "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
        "$defs": {name: tagged(name) for name in "ab"},
    },
    "unevaluatedProperties": {
        "allOf": [OBJECT],
        "anyOf": [OBJECT, {"properties": {"b": {"const": 1}}}],
        "unevaluatedProperties": False,
    },
    # The suite and MaskBench: names of properties.
    "a property that may not be": {"type": "object", "properties": {"a": False, "b": {"const": 1}}},
    "names of a few": {
        "propertyNames": {"enum": ["x", "y"]},
        "additionalProperties": {"type": "null"},
    },
    "names of a few that a pattern describes": {
        "propertyNames": {"enum": ["x", "y"]},
        "patternProperties": {".*": {"type": "null"}},
    },
    "names of a pattern": {
        "propertyNames": {"pattern": "^k[0-9]"},
        "additionalProperties": {"type": "null"},
    },
    "patternProperties": {
        "patternProperties": {"^x-": {"type": "null"}},
        "properties": {"a": {"const": 1}},
    },
    "no name of a pattern": {"patternProperties": {"^[a-z]": False}, "required": []},
    "at least two of three": {
        "properties": {name: {"const": 1} for name in "abc"},
        "minProperties": 2,
        "additionalProperties": False,
    },
    "at most one": OBJECT | {"maxProperties": 1},
    # xgrammar 0.2.8 tells schemas apart without `title`, also where it is a property.
    "properties named as annotations": {
        "anyOf": [
            {
                "properties": {"title": {"type": "null"}},
                "required": ["title"],
                "additionalProperties": False,
            },
            {
                "type": "array",
                "items": {
                    "properties": {"title": {"type": "boolean"}},
                    "required": ["title"],
                    "additionalProperties": False,
                },
                "minItems": 1,
                "maxItems": 2,
            },
        ]
    },
    "constants named as annotations": {
        "type": "array",
        "prefixItems": [{"const": {"title": 1}}, {"const": {"title": 2}}],
        "items": False,
    },
    # MaskBench and the suite: patterns, of which xgrammar wrote what is no JSON.
    "an open pattern": {"pattern": "b+"},
    "a quotation mark": {"pattern": '^a"b$'},
    "a backslash": {"pattern": "^\\\\[\\\\x]$"},
    "control characters": {"pattern": "^\\t[^a-z]\\n$"},
    "not a letter": {"pattern": "^[^\u00fc]{3}$"},
    "anchors in groups": {"pattern": "(^a|b$)"},
    "many repetitions": {
        "additionalProperties": False,
        "patternProperties": {"^[a-z]{1,255}$": {}},
    },
    "a long string": {"type": "string", "minLength": 2, "maxLength": 500},
    "a date": {"format": "date"},
    "a time": {"format": "time"},
    "an address": {"format": "idn-email"},
    "a format beside what is more precise": {
        "properties": {
            "a": {"format": "date", "pattern": "^20[0-9]{2}-01-01$"},
            "b": {"format": "date", "enum": ["2025-01-01"]},
        },
        "additionalProperties": False,
    },
    "the length of a format": {"format": "uuid", "maxLength": 36},
}

LEFT: dict[str, tuple[str, Schema]] = {
    "look around": ("pattern", {"pattern": "^(?!a)[ab]$"}),
    "a boundary": ("pattern", {"pattern": "\\ba"}),
    "an anchor amid a pattern": ("pattern", {"pattern": "a$b"}),
    "two patterns": ("allOf", {"pattern": "^a", "allOf": [{"pattern": "b$"}]}),
    "length beside a pattern": (
        "minLength and maxLength beside pattern and format",
        {"pattern": "^a*$", "minLength": 2},
    ),
    "a regex": ("format", {"type": "string", "format": "regex"}),
    "multiples of a fraction": ("multipleOf", {"type": "number", "multipleOf": 0.3}),
    "multiples from a bound on": ("multipleOf", {"type": "integer", "minimum": 5, "multipleOf": 3}),
    "a bound beyond 64 bits": ("minimum", {"type": "integer", "minimum": 1e30}),
    "large constants": ("enum of large numbers", {"const": 10**19}),
    "patterns that overlap": ("patternProperties", {"patternProperties": {"a": {}, "b": {}}}),
    "patterns beside others": (
        "patternProperties",
        {"patternProperties": {"^a": {"const": 1}}, "additionalProperties": {"const": 2}},
    ),
    "two further properties": ("minProperties", {"type": "object", "minProperties": 2}),
    "names beside properties": ("propertyNames", OBJECT | {"propertyNames": {"maxLength": 3}}),
    "names beside patterns": (
        "propertyNames",
        {"propertyNames": {"enum": ["x"]}, "patternProperties": {"^x": {}}},
    ),
    "dynamic references": ("$dynamicRef", {"$dynamicRef": "#x"}),
    "oneOf that null fits twice": (
        "oneOf",
        {"oneOf": [tagged("a", type=["object", "null"]), tagged("b", type=["object", "null"])]},
    ),
    "oneOf of equal numbers": ("oneOf", {"oneOf": [{"const": 1}, {"const": 1.0}]}),
}

EMPTY: dict[str, Schema] = {
    "a required property that may not be": {"required": ["a"], "additionalProperties": False},
    "a required property that is false": {"properties": {"a": False}, "required": ["a"]},
    "no common type": {"allOf": [{"type": "string"}, {"type": "null"}]},
    "no branch": {"anyOf": [False, {"type": "string", "minLength": 3, "maxLength": 2}]},
    "an empty range": {"type": "number", "minimum": 2, "exclusiveMaximum": 2},
    "no multiple": {"type": "integer", "minimum": 4, "maximum": 5, "multipleOf": 3},
    "enum of another type": {"enum": ["a"], "type": "integer"},
    "a closed tuple that is too short": {"prefixItems": [True], "items": False, "minItems": 2},
    "more properties than there are": CLOSED | {"minProperties": 2},
    "more items than any answer has": {"type": "array", "minItems": 10**15},
    "required beside a limit": {"required": ["a", "b"], "maxProperties": 1},
}


def answers(schema: Schema, count: int) -> Iterator[Any]:
    """Yield values that are written at random."""
    grammar = as_grammar(json_format(enforceable(schema, "schema")))
    for seed in range(count):
        try:
            yield json.loads(written(grammar, random.Random(seed)))
        except NotEndedError:
            continue


def check(schema: Schema, count: int) -> int:
    formats = Draft202012Validator.FORMAT_CHECKER
    validator, told = Draft202012Validator(schema, format_checker=formats), 0
    for value in answers(schema, count):
        validator.validate(value)
        told += 1
    return told


@pytest.mark.parametrize("name", ENFORCED)
def test_each_trap_is_followed(name: str) -> None:
    assert unenforced(ENFORCED[name]) == []
    enforceable(ENFORCED[name], "schema", is_strict=True)
    assert check(ENFORCED[name], 20) > 2


@pytest.mark.parametrize(
    "name",
    [
        *(
            "date",
            "time",
            "date-time",
            "duration",
            "email",
            "idn-email",
            "hostname",
            "idn-hostname",
        ),
        *("ipv4", "ipv6", "uuid", "uri", "iri", "uri-reference", "iri-reference", "uri-template"),
        *("json-pointer", "relative-json-pointer"),
    ],
)
def test_each_format_is_followed(name: str) -> None:
    assert unenforced({"format": name}) == []
    assert check({"format": name}, 30) > 2


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_is_named_and_refused_if_strict(name: str) -> None:
    keyword, schema = LEFT[name]
    assert unenforced(schema) == [keyword]
    assert [*answers(schema, 3)]
    with refused(RequestError, param="schema", code="invalid_json_schema"):
        enforceable(schema, "schema", is_strict=True)


@pytest.mark.parametrize("name", EMPTY)
def test_what_no_value_can_follow_is_refused(name: str) -> None:
    with refused(RequestError, param="schema", code="invalid_json_schema"):
        enforceable(EMPTY[name], "schema")


@pytest.mark.parametrize(
    "schema",
    [
        {"const": "\ud800"},
        {"$ref": "#anchor", "$defs": {"a": {"$anchor": "anchor"}}},
        {"$ref": "#/x", "x": {"type": "banana"}},
        {"type": "array", "items": 5},
    ],
)
def test_a_bad_schema_is_refused_with_the_reason(schema: Schema) -> None:
    with refused(RequestError):
        enforceable(schema, "schema")


def test_chains_of_references_and_products_of_choices_end() -> None:
    chain: dict[str, Schema] = {
        f"n{i}": {"allOf": [{"$ref": f"#/$defs/n{i + 1}"}]} for i in range(900)
    }
    chain["n900"] = {"type": "null"}
    with refused(RequestError, param="schema", code="invalid_json_schema"):
        enforceable({"$ref": "#/$defs/n0", "$defs": chain}, "schema")
    wide: Schema = {"properties": {f"p{i}": {"type": "null"} for i in range(200)}}
    choices = [{"anyOf": [{"required": [f"p{i}"]}, {"required": [f"p{i + 1}"]}]} for i in range(9)]
    assert unenforced({**wide, "allOf": choices}) == ["anyOf"]


def test_texts_in_tags_are_not_escaped() -> None:
    texts: dict[str, Schema] = {
        "one": {"minLength": 1},
        "few": {"maxLength": 3},
        "any": {"pattern": "a"},
    }
    schema = {"properties": {name: {"type": "string", **it} for name, it in texts.items()}}
    made = enforceable(schema, "schema", raw="properties")["properties"]
    assert made["one"] == made["any"] == {"type": "string"} and "pattern" in made["few"]
    with refused(RequestError, param="schema", code="invalid_json_schema"):
        enforceable(schema, "schema", raw="properties", is_strict=True)


def test_texts_without_escapes_have_no_pattern_with_escapes_at_any_depth() -> None:
    text: Schema = {"type": "string", "minLength": 1}
    schema: Schema = {
        "type": "object",
        "properties": {"list": {"type": "array", "items": text}, "one": {"$ref": "#/$defs/text"}},
        "additionalProperties": {"anyOf": [text, {"type": "null"}]},
        "$defs": {"text": text},
    }
    assert "pattern" in json.dumps(enforceable(schema, "schema", raw="properties"))
    assert "pattern" not in json.dumps(enforceable(schema, "schema", raw="all"))


def test_a_property_is_not_mistaken_for_another_of_the_same_name() -> None:
    schema = ENFORCED["properties named as annotations"]
    grammar = as_grammar(json_format(enforceable(schema, "schema")))
    for text, is_right in (('[{"title":true}]', True), ('[{"title":null}]', False)):
        within = Matcher(compiler().compile(grammar)).within
        assert (within.accept_string(text) and within.is_completed()) == is_right


# --- Random schemas

_VALUES = st.sampled_from([None, True, 0, 1, -3, 2.5, "", "ab", "b", [], [1], {}, {"a": 1}])
_SMALL = st.integers(0, 3)
_NUMBER = st.sampled_from([-7, -1.5, 0, 0.25, 3, 12])
_NAMES = st.sampled_from(["a", "b", "title", 'q"', "x-y", "\u00fc"])
_WORDS: dict[str, st.SearchStrategy[Any]] = {
    "type": st.sampled_from(
        ["string", "integer", "number", "boolean", "null", "array", "object", ["string", "null"]]
    ),
    "enum": st.lists(_VALUES, min_size=1, max_size=4),
    "const": _VALUES,
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _SMALL),
    **dict.fromkeys(("minProperties", "maxProperties"), _SMALL),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _NUMBER),
    "multipleOf": st.sampled_from([1, 2, 0.5, 7]),
    "pattern": st.sampled_from(["^[a-c]*$", "b", '^."$', "^a|b$", "^(?=a)"]),
    "format": st.just("unknown"),  # one beside a pattern or an enum demands nothing
    "uniqueItems": st.booleans(),
    "required": st.lists(_NAMES, max_size=2, unique=True),
}


def _holding(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    several = st.lists(inner, min_size=1, max_size=2)
    schemas: dict[str, st.SearchStrategy[Any]] = {
        **dict.fromkeys(("items", "additionalProperties", "unevaluatedProperties"), inner),
        "properties": st.dictionaries(_NAMES, inner, max_size=3),
        "patternProperties": st.dictionaries(st.sampled_from(["^x-", "a"]), inner, max_size=1),
        "propertyNames": st.sampled_from(
            [{"maxLength": 2}, {"enum": ["a", "b"]}, {"pattern": "^b"}]
        ),
        **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), several),
        "not": inner,
    }
    words = _WORDS | schemas
    return st.one_of(_some(words), *(_some({it: words[it] for it in each}) for each in _BESIDE))


_BESIDE = [
    ("prefixItems", "items", "minItems", "maxItems"),
    ("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
    ("properties", "patternProperties", "propertyNames", "additionalProperties", "required"),
    ("allOf", "anyOf", "properties", "unevaluatedProperties", "const"),
]
"""Keywords that change each other."""


def _some(words: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Schema]:
    """Return a strategy of schemas with up to four of these keywords."""
    names = st.lists(st.sampled_from(sorted(words)), max_size=4, unique=True)
    return names.flatmap(lambda some: st.fixed_dictionaries({name: words[name] for name in some}))


_REFERENCES = st.sampled_from([{"$ref": "#/$defs/s"}, {"$ref": "#/$defs/t"}, True, False])
_SCHEMAS = st.recursive(_some(_WORDS) | _REFERENCES, _holding, max_leaves=8)


@hypothesis.settings(max_examples=120, deadline=None)
@hypothesis.given(schema=_SCHEMAS)
def test_random_schemas_are_followed_or_refused(schema: Schema) -> None:
    if isinstance(schema, dict):
        string = {"type": ["string", "null"]}
        schema = schema | {"$defs": {"s": string, "t": tree(), "tree": tree()}}
    try:
        left = unenforced(schema)
    except RequestError as error:
        hypothesis.event(f"refused: {str(error)[:60]}")
        return
    hypothesis.event("partly" if left else "enforced")
    if left:
        assert len([*answers(schema, 1)]) <= 1  # it compiles, and what is written is JSON
    else:
        check(schema, 3)
