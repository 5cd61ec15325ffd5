"""Grammars of answers: what a model is made to write is read as what was asked for."""

import json
import random
from typing import Any

import pytest
from jsonschema import Draft202012Validator, FormatChecker

from tests.golden import refused
from tests.tieredkv.written import NotEndedError, compiler, written
from tieredkv.engine.grammars import Matcher
from tieredkv.errors import RequestError
from tieredkv.server.message_parser import Call, Delta, Family, MessageParser, families
from tieredkv.server.reply import Reading
from tieredkv.server.structure import Structure, json_format

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 5},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "deep": {
            "type": "object",
            "properties": {"k": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
            "required": ["k"],
            "additionalProperties": False,
        },
    },
    "required": ["city", "days", "deep"],
    "additionalProperties": False,
}
ANSWER = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
    "additionalProperties": False,
}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": WEATHER, **more}}


TOOLS = [tool("get_weather"), tool("ping_2")]
WRITERS = [family for family in families().values() if family.writes]
of_families = pytest.mark.parametrize("family", WRITERS, ids=lambda family: family.name)


def begun(family: Family) -> str:
    """Return what answers continue: the thoughts are over, so that none are written at random."""
    return family.start + "".join(family.thinks)


def messages(family: Family, structure: Structure, prompt: str, count: int = 12) -> Any:
    """Yield texts that the structure allows, and what they are read as."""
    reading = Reading(family, None, prompt, structure.tools)
    grammar = structure.grammar(reading)
    assert grammar is not None
    for seed in range(count):
        try:
            text = written(grammar, random.Random(seed))
        except NotEndedError:
            continue
        tools = () if structure.choice == "none" else structure.tools
        parser = MessageParser(family, prompt, tools)
        yield text, [*parser.feed(text), *parser.finish()]


def calls_of(deltas: list[Delta]) -> list[Call]:
    return [delta.call for delta in deltas if delta.call is not None]


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def check_fits(call: Call, family: Family) -> None:
    arguments = json.loads(call.arguments)
    assert arguments.keys() == WEATHER["properties"].keys()
    assert 1 <= arguments["days"] <= 9
    # In tags, what would be escaped in JSON counts once.
    assert len(arguments["city"]) <= 5 or family.body == "tags"
    assert all(type(it) is bool for it in arguments["deep"]["k"])


@of_families
def test_required_calls_are_read_and_fit_their_tools(family: Family) -> None:
    counts = set()
    for text, deltas in messages(family, Structure(tools=TOOLS, choice="required"), begun(family)):
        calls = calls_of(deltas)
        counts.add(len(calls))
        assert calls and not text_of(deltas), text
        for call in calls:
            assert call.name in ("get_weather", "ping_2")
            check_fits(call, family)
    assert counts and (counts == {1} or family.between is not None)


BOUNDED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "enum": {"enum": ["x", "y"]},
        "const": {"const": "z"},
        "of_reference": {"$ref": "#/$defs/word"},
        "pattern": {"type": "string", "pattern": "^[a-c]{1,3}$"},
        "bare_pattern": {"pattern": "^[a-c]$"},
        "format": {"type": "string", "format": "uuid"},
        "short": {"type": ["string", "null"], "maxLength": 3},
        "either": {"anyOf": [{"type": "integer"}, {"const": "a"}]},
        "object": {
            "type": "object",
            "properties": {"k": {"const": 1}},
            "required": ["k"],
            "additionalProperties": False,
        },
        "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "additionalProperties": False,
    "$defs": {"word": {"enum": ["p"]}},
}
BOUNDED["required"] = [*BOUNDED["properties"]]


@of_families
def test_arguments_of_a_strict_tool_are_valid_by_its_schema(family: Family) -> None:
    function = {"name": "f", "parameters": BOUNDED, "strict": True}
    tools = [{"type": "function", "function": function}]
    strict = Structure(tools=tools, choice="required", is_parallel=False)
    told = [*messages(family, strict, begun(family), count=24)]
    assert told
    for _, deltas in told:
        [call] = calls_of(deltas)
        Draft202012Validator(BOUNDED, format_checker=FormatChecker()).validate(
            json.loads(call.arguments)
        )


@of_families
def test_one_call_is_one(family: Family) -> None:
    one = Structure(tools=TOOLS[:1], choice="required", is_parallel=False)
    told = [*messages(family, one, begun(family))]
    for text, deltas in told:
        [call] = calls_of(deltas)
        assert call.name == "get_weather" and not text_of(deltas), text
        check_fits(call, family)
    assert told


@of_families
def test_an_answer_follows_its_schema_and_a_call_may_come_instead(family: Family) -> None:
    for tools in ((), [tool("get_weather", strict=True)]):
        structure = Structure(text=json_format(ANSWER), tools=tools)
        told = [*messages(family, structure, begun(family))]
        assert told
        for text, deltas in told:
            if not calls_of(deltas):
                assert type(json.loads(text_of(deltas))["sum"]) is int, text


@of_families
def test_no_call_is_written_where_none_may_be(family: Family) -> None:
    """The text of a call would be an answer, and a client would see it."""
    for text, deltas in messages(family, Structure(tools=TOOLS, choice="none"), begun(family)):
        assert family.opens not in text.removeprefix(family.answers)
        assert not calls_of(deltas)


@of_families
def test_at_most_one_call_follows_free_text(family: Family) -> None:
    for _, deltas in messages(family, Structure(tools=TOOLS, is_parallel=False), begun(family)):
        assert len(calls_of(deltas)) <= 1


@pytest.mark.parametrize("family", [it for it in WRITERS if it.thinks], ids=lambda it: it.name)
def test_thoughts_stay_free_until_they_end(family: Family) -> None:
    opens, closes = family.thinks
    structure = Structure(text=json_format(ANSWER))
    for prompt, before in ((family.start, f"{opens}So {{ be it"), (family.start + opens, "So")):
        reading = Reading(family, None, prompt)
        text = before + closes + family.answers + '{"sum": 3}'
        assert follows(structure.grammar(reading), text)
        assert not follows(structure.grammar(reading), before + closes + family.answers + "three")
    closed = Reading(family, None, begun(family))
    assert follows(structure.grammar(closed), family.answers + '{"sum": 3}')
    again = follows(structure.grammar(closed), opens + closes + family.answers + '{"sum": 3}')
    assert again == (family.name == "gpt-oss")  # which may think in several messages


def follows(grammar: str | None, text: str) -> bool:
    """Return whether a whole text follows a grammar."""
    assert grammar is not None
    within = Matcher(compiler().compile(grammar)).within
    return bool(within.accept_string(text) and within.is_completed())


@pytest.mark.parametrize(
    "structure",
    [
        Structure(),
        Structure(tools=TOOLS),
        Structure(is_parallel=False),
        Structure(tools=[tool("f", strict=False)]),
    ],
)
def test_what_asks_for_nothing_has_no_grammar(structure: Structure) -> None:
    family = families()["hermes"]
    assert structure.grammar(Reading(family, None, begun(family))) is None


def test_a_strict_tool_is_followed_where_it_is_called() -> None:
    family = families()["hermes"]
    grammar = Structure(tools=[tool("f", strict=True)]).grammar(Reading(family, None, family.start))
    call = '<tool_call>\n{{"name": "f", "arguments": {}}}\n</tool_call>'
    right = {"city": "Rome", "days": 2, "deep": {"k": []}}
    assert follows(grammar, "I look. " + call.format(json.dumps(right)))
    assert not follows(grammar, "I look. " + call.format("{}"))
    assert follows(grammar, "No need to.")


def test_a_strict_tool_must_have_a_schema_that_can_be_enforced() -> None:
    family = families()["hermes"]
    reading = Reading(family, None, family.start)
    bad: dict[str, Any] = {"type": "object", "not": {}}
    strict = Structure(tools=[tool("f", strict=True, parameters=bad)])
    with refused(RequestError, param="tools[0].function.parameters", code="invalid_json_schema"):
        strict.grammar(reading)
    free = Structure(tools=[tool("f", parameters={"type": "banana"})], choice="required")
    assert free.grammar(reading) is not None  # its arguments are any object


def test_strict_tools_do_not_hold_a_model_that_calls_in_unknown_ways() -> None:
    reading = Reading(families()["think"], None, "")
    assert Structure(tools=[tool("f", strict=True)]).grammar(reading) is None
    assert Structure(tools=TOOLS, is_parallel=False).grammar(reading) is None


@pytest.mark.parametrize("name", ['say "hi"', "<|im_end|>", "a\\b", "ü"])
def test_odd_names_are_written_as_they_are(name: str) -> None:
    family = families()["hermes"]
    structure = Structure(tools=[tool(name)], choice="required", is_parallel=False)
    for _, deltas in messages(family, structure, begun(family), 3):
        assert [call.name for call in calls_of(deltas)] == [name]


@pytest.mark.parametrize("reading", [None, Reading(families()["think"], None, "")])
def test_a_model_that_calls_in_unknown_ways_cannot_be_made_to(reading: Reading | None) -> None:
    with refused(RequestError, param="tool_choice", code="unsupported_parameter"):
        Structure(tools=TOOLS, choice="required").grammar(reading)
