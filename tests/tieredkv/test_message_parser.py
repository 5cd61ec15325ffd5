"""What families of models write becomes the same message, however it is cut into pieces."""

# ruff: noqa: RUF001
# (DeepSeek's tokens have bars of full width)

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.golden import refused
from tieredkv.errors import ConfigError
from tieredkv.server.call_bodies import JsonBody, TagBody
from tieredkv.server.message_parser import (
    MAX_BEGUN_CHARACTERS,
    SLICE_CHARACTERS,
    Delta,
    Family,
    MessageParser,
    choose,
    detect,
    families,
)

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
GIVEN = {"city": 'Zürich "x" </b>', "days": 3}
JSON = json.dumps(GIVEN, ensure_ascii=False)

WRITTEN = {
    "hermes": (
        "<think>\nHmm.\n</think>\n\nLet me see.\n"
        f'<tool_call>\n{{"name": "get_weather", "arguments": {JSON}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    ),
    "qwen3-coder": (
        "<think>\nHmm.\n</think>\n\nLet me see.\n\n<tool_call>\n<function=get_weather>\n"
        '<parameter=city>\nZürich "x" </b>\n</parameter>\n<parameter=days>\n3\n</parameter>\n'
        "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
    ),
    "glm": (
        "<think>Hmm.</think>\nLet me see.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
        '<arg_value>Zürich "x" </b></arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>'
        "\n</tool_call>\n<tool_call>now\n</tool_call>"
    ),
    "mistral": (
        f"[THINK]Hmm.[/THINK]Let me see.[TOOL_CALLS]get_weather[ARGS]{JSON}"
        "[TOOL_CALLS]now[CALL_ID]a1[ARGS]{}"
    ),
    "gpt-oss": (
        "<|channel|>analysis<|message|>Hmm.<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "Let me see.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        f"<|constrain|>json<|message|>{JSON}<|call|><|start|>assistant to=functions.now<|channel|>"
        "commentary <|constrain|>json<|message|>{}<|call|>"
    ),
    "gemma-4": (
        "<|channel>thought\nHmm.\n<channel|>Let me see."
        '<|tool_call>call:get_weather{city:<|"|>Zürich "x" </b><|"|>,days:3}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|><|tool_response>"
    ),
    "deepseek-v3": (
        "<think>Hmm.</think>Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function"
        f"<｜tool▁sep｜>get_weather\n```json\n{JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>"
        "function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek-v3.1": (
        "<think>Hmm.</think>Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather"
        f"<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{{}}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "kimi-k2": (
        "<think>Hmm.</think>Let me see.<|tool_calls_section_begin|><|tool_call_begin|>"
        f"functions.get_weather:0<|tool_call_argument_begin|>{JSON}<|tool_call_end|>"
        "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    ),
    "minimax-m2": (
        '<think>\nHmm.\n</think>\n\nLet me see.\n<minimax:tool_call>\n<invoke name="get_weather">\n'
        '<parameter name="city">Zürich "x" </b></parameter>\n<parameter name="days">3</parameter>\n'
        '</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>'
    ),
    "seed-oss": (
        "<seed:think>Hmm.</seed:think>\nLet me see.\n\n<seed:tool_call>\n<function=get_weather>\n"
        '<parameter=city>Zürich "x" </b></parameter>\n<parameter=days>3</parameter>\n</function>\n'
        "</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>"
    ),
    "llama3": (
        f'{{"name": "get_weather", "parameters": {JSON}}}; {{"name": "now", "parameters": {{}}}}'
    ),
}
"""What each family writes for the same thoughts, text and calls; Llama writes calls alone."""


def read(family: str, pieces: list[str], prompt: str = "", tools: Any = TOOLS) -> Any:
    """Return the thoughts, the text and the calls of a message that comes in pieces."""
    parser, deltas = MessageParser(families()[family], prompt, tools), list[Delta]()
    for piece in pieces:
        deltas += parser.feed(piece)
    deltas += parser.finish()
    calls = [(it.call.name, json.loads(it.call.arguments)) for it in deltas if it.call]
    return "".join(it.thoughts for it in deltas), "".join(it.text for it in deltas), calls


def cut(text: str, places: list[int]) -> list[str]:
    """Return the pieces of a text that is cut at these places, as far as it has them."""
    ends = sorted({min(place, len(text)) for place in places} | {len(text)})
    return [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("family", WRITTEN)
@given(places=st.lists(st.integers(0, 420)))
def test_a_message_is_the_same_in_whatever_pieces_it_comes(family: str, places: list[int]) -> None:
    calls = [("get_weather", GIVEN), ("now", {})]
    thoughts, text = ("", "") if family == "llama3" else ("Hmm.", "Let me see.")
    assert read(family, cut(WRITTEN[family], places)) == (thoughts, text, calls)


@pytest.mark.parametrize("family", WRITTEN)
def test_a_message_letter_by_letter_is_the_same(family: str) -> None:
    assert read(family, list(WRITTEN[family])) == read(family, [WRITTEN[family]])


@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize("text", ["", " plain \n", "a < b, {c}\n\n[d] ", "<tool", "naïve 🎉\n"])
def test_plain_text_stays_as_it_is(family: str, text: str) -> None:
    assert read(family, list(text)) == read(family, [text]) == ("", text, [])


@pytest.mark.parametrize("family", WRITTEN)
def test_without_tools_nothing_is_a_call(family: str) -> None:
    thoughts, text, calls = read(family, [WRITTEN[family]], tools=())
    assert not calls and "Zürich" in text
    assert thoughts == ("" if family == "llama3" else "Hmm.")


@pytest.mark.parametrize(
    "text",
    [
        'a <tool_call>\n{"name": oops}\n</tool_call> b',
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "now"',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        "<tool_call>",
    ],
)
def test_a_malformed_call_is_text_as_the_model_wrote_it(text: str) -> None:
    assert read("hermes", [text]) == ("", text, [])
    assert len(text) > 1000 or read("hermes", list(text)) == ("", text, [])


@pytest.mark.parametrize("family", families())
def test_patterns_bound_what_they_repeat(family: str) -> None:
    it = families()[family]
    fields = it.template(has_tools=True)["fields"].values()
    patterns = [each for field in fields for name, each in field.items() if "pattern" in name]
    tag = it.tag.replace("(?P<value>.*?)", "")
    assert not [each for each in [*patterns, tag] if re.search(r"(?<!\\)[*+]", each)]


@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize("text", ["a" + " " * 50_000 + "b", "\n" * 50_000 + "b", "a" + " " * 99])
def test_long_white_space_is_text(family: str, text: str) -> None:
    assert read(family, [text]) == ("", text, [])


@pytest.mark.parametrize("blank", [" " * 40, "\n" * 16, "\n" * 17])
def test_long_white_space_between_parts_is_left_out(blank: str) -> None:
    written = "Let me see.<tool_call>{}</tool_call>".replace("<", blank + "<", 1)
    call = '{"name": "now", "arguments": {}}'
    for pieces in ([written.format(call)], list(written.format(call))):
        assert read("hermes", pieces) == ("", "Let me see.", [("now", {})])
    for pieces in ([written.format("[1]")], list(written.format("[1]"))):
        assert read("hermes", pieces) == ("", written.format("[1]"), []), "a malformed call"


@pytest.mark.parametrize("tag", ["<parameter=a>", "<parameter=", "</parameter>", "<parameter=a>\n"])
def test_many_tags_that_are_not_closed_are_text(tag: str) -> None:
    text = f"<tool_call>\n<function=now>{tag * 50_000}</function>"
    assert read("qwen3-coder", [text]) == ("", text, [])
    glm = "<tool_call>now" + "<arg_key>a" * 50_000 + "</tool_call>"
    assert read("glm", [glm]) == ("", glm, [])


def test_calls_pass_as_they_are_even_if_no_tool_fits() -> None:
    written = '<tool_call>{"name": "other", "arguments": {"b": "1", "a": null}}</tool_call>'
    assert read("hermes", [written]) == ("", "", [("other", {"b": "1", "a": None})])
    as_text = '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert read("hermes", [as_text]) == ("", "", [("now", {"a": 1})])
    for nothing in ("null", '""'):
        none = f'<tool_call>{{"name": "now", "arguments": {nothing}}}</tool_call>'
        assert read("hermes", [none]) == ("", "", [("now", {})])


TAGGED = {
    "qwen3-coder": ("<tool_call>\n<function=make>", "\n<parameter={}>\n{}\n</parameter>",
                    "\n</function>\n</tool_call>"),
    "glm": ("<tool_call>make", "\n<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>",
            "\n</tool_call>"),
    "minimax-m2": ('<minimax:tool_call>\n<invoke name="make">',
                   '\n<parameter name="{}">{}</parameter>',
                   "\n</invoke>\n</minimax:tool_call>"),
    "seed-oss": ("<seed:tool_call>\n<function=make>", "\n<parameter={}>{}</parameter>",
                 "\n</function>\n</seed:tool_call>"),
}  # fmt: skip
"""What a call of `make` begins with in families that write tags, one argument, and its end."""


def arguments_read(family: str, schema: Any, written: dict[str, str]) -> Any:
    """Return the arguments of a call that stand in tags, by the schema of its tool."""
    tools = [{"type": "function", "function": {"name": "make", "parameters": schema}}]
    before, argument, behind = TAGGED[family]
    tags = "".join(argument.format(*it) for it in written.items())
    _, text, calls = read(family, [before + tags + behind], tools=tools)
    assert (text, [name for name, _ in calls]) == ("", ["make"])
    return calls[0][1]


@pytest.mark.parametrize("family", TAGGED)
def test_arguments_in_tags_get_the_types_that_references_and_choices_name(family: str) -> None:
    place = {"type": "object", "properties": {"zip": {"type": "string"}}}
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {
            "place": {"$ref": "#/$defs/Place"},
            "other": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]},
            "none": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]},
            "level": {"allOf": [{"$ref": "#/$defs/Level"}], "default": 1},
            "word": {"enum": ["1", "2"]},
            "one": {"const": 1},
            "tree": {"$ref": "#/$defs/Tree"},
            "free": {},
        },
        "$defs": {
            "Place": place,
            "Level": {"enum": [1, 2]},
            "Tree": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "array"}] * 9},
        },
    }
    written = {"place": '{"zip": "8001"}', "other": '{"zip": "1"}', "none": "null", "level": "2"}
    written |= {"word": "1", "one": "1", "tree": "[[]]", "free": "3"}
    given: dict[str, Any] = {
        "place": {"zip": "8001"},
        "other": {"zip": "1"},
        "none": None,
        "level": 2,
    }
    given |= {"word": "1", "one": 1, "tree": [[]], "free": "3"}
    assert arguments_read(family, schema, written) == given
    named = {"$ref": "#/definitions/Make", "definitions": {"Make": schema}, **schema["$defs"]}
    assert arguments_read(family, named, {"one": "1"}) == {"one": 1}
    odds: list[Any] = [None, True, [], {"properties": 5}, {"properties": {"one": 5}, "$ref": 5}]
    for odd in odds:
        assert arguments_read(family, odd, {"one": "1"}) == {"one": "1"}


def test_white_space_that_a_schema_does_not_allow_is_no_part_of_an_argument() -> None:
    texts: dict[str, Any] = {
        "enum": {"enum": ["x", " y"]},
        "whole": {"type": "string", "pattern": "^[a-c ]+$"},
        "begin": {"type": "string", "pattern": "^[a-c]"},
        "date": {"type": ["string", "null"], "format": "date"},
        "short": {"type": "string", "maxLength": 3},
        "free": {"type": "string"},
        "either": {"anyOf": [{"const": "x"}, {"type": "string"}]},
        "markdown": {"type": "string", "format": "markdown"},
        "odd": {"type": "string", "enum": 5, "format": [], "pattern": 5, "maxLength": "a"},
    }
    schema = {"type": "object", "properties": texts}
    written = {"enum": " x", "whole": " ab ", "begin": " a ", "date": " 2026-11-26 "}
    written |= {"short": "abc ", "free": " a ", "either": " x ", "markdown": " a ", "odd": " a "}
    given = {**written, "enum": "x", "whole": "ab", "begin": "a ", "date": "2026-11-26"}
    given |= {"short": "abc", "either": "x"}
    assert arguments_read("minimax-m2", schema, written) == given
    again = {"enum": " y", "short": "a ", "either": " z "}
    assert arguments_read("minimax-m2", schema, again) == again


@pytest.mark.parametrize("family", TAGGED)
@pytest.mark.parametrize("text", ["[NaN]", "[1e400]", "[" * 100_000, "[1"])
def test_an_argument_in_tags_that_is_no_json_stays_a_text(family: str, text: str) -> None:
    schema = {
        "type": "object",
        "properties": {"list": {"type": "array"}, "days": {"type": "integer"}},
    }
    given = {"list": text, "days": 3}
    assert arguments_read(family, schema, {"list": text, "days": "3"}) == given


def test_half_of_a_surrogate_pair_is_replaced_since_no_answer_could_hold_it() -> None:
    call = (
        r'<tool_call>{"name": "now\udc00", "arguments": {"a": "\ud83d\ude42 \ud83d"}}</tool_call>'
    )
    assert read("hermes", [call]) == ("", "", [("now\ufffd", {"a": "🙂 \ufffd"})])
    schema = {"type": "object", "properties": {"list": {"type": "array"}}}
    assert arguments_read("glm", schema, {"list": r'["\ud83d"]'}) == {"list": ["\ufffd"]}


JSON_CALLS = [it for it in families().values() if it.call_end and it.body != "tags"]


@pytest.mark.parametrize("family", JSON_CALLS, ids=lambda it: it.name)
@given(places=st.lists(st.integers(0, 420)))
def test_the_text_of_an_argument_may_hold_what_ends_a_call(
    family: Family, places: list[int]
) -> None:
    ends, (before, behind) = family.call_end, family.around
    given = {"text": f'a {ends[-1]} "b" \\ {family.opens}{ends[0]}', "n": 1}
    call = family.writes.replace("{arguments}", json.dumps(given)).replace("{name}", "now")
    ended = call if call.endswith(tuple(ends)) else call + ends[0]
    for last in (ended, call):  # a stop token may stand for the mark
        text = before + ended + (family.between or "") + last + behind
        assert read(family.name, cut(text, places)) == ("", "", [("now", given)] * 2)


@pytest.mark.parametrize("behind", ["", " b", ' "', ' " <tool_call>{"name": "now"}</tool_call>'])
@given(places=st.lists(st.integers(0, 420)))
def test_a_text_that_does_not_end_takes_no_call_behind_it(behind: str, places: list[int]) -> None:
    wrong = '<tool_call>{"name": "now}</tool_call>'
    text = wrong + ' a <tool_call>{"name": "now"}</tool_call>' + behind
    _, said, calls = read("hermes", cut(text, places))
    assert calls == [("now", {})] * text.count('"now"')
    assert said.startswith(wrong + " a") and said.count("</tool_call>") == 1


def test_many_marks_of_an_end_are_read_in_linear_time() -> None:
    for behind in ("", '"}}</tool_call>'):
        text = '<tool_call>{"name": "now", "arguments": {"a": "' + "</tool_call>" * 4000 + behind
        _, said, calls = read("hermes", [text])
        assert (said == text, len(calls)) == (not behind, bool(behind))


# --- Calls beside prose about calls, and texts with marks and line feeds

OPENING = {
    "hermes": ["<tool_call>"],
    "qwen3-coder": ["<tool_call>", "<function=now>", "<tool_call>\n<function=now>"],
    "glm": ["<tool_call>", "<tool_call>now"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS]now[ARGS]", "[TOOL_CALLS] [{"],
    "gpt-oss": ["<|channel|>", "<|channel|>commentary to=functions.now <|message|>"],
    "gemma-4": ["<|tool_call>", "<|tool_call>call:now"],
    "deepseek-v3": [
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n",
    ],
    "deepseek-v3.1": ["<｜tool▁call▁begin｜>", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>"],
    "kimi-k2": [
        "<|tool_call_begin|>",
        "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>",
    ],
    "minimax-m2": ["<minimax:tool_call>", '<invoke name="now">'],
    "seed-oss": ["<seed:tool_call>", "<function=now>"],
    "llama3": ["<|python_tag|>"],
}
"""What opens a call in each family, or a part of it, as prose about calls may mention it."""

BEHIND = [" is how a call begins, ", '`, as in "a", ', " {x} or [y", ' {"name": "no', "\n\n"]
MENTIONS = [
    (family, opening, behind)
    for family, openings in OPENING.items()
    for opening in openings
    for behind in BEHIND
]


def one_call(family: str) -> str:
    """Return a call of `get_weather`, as the family writes it where it is the only one."""
    it = families()[family]
    written = WRITTEN[family].partition("Let me see.")[2] if family != "llama3" else ""
    if not written:
        return '<|python_tag|>{"name": "get_weather", "parameters": ' + JSON + "}"
    at = written.rindex("now")
    ends = [*it.call_end, it.next]
    last = max(written.rfind(end, 0, at) + len(end) for end in ends if end in written[:at])
    return written[: last - len(it.next)] if it.next else written[:last]


@pytest.mark.parametrize(("family", "opening", "behind"), MENTIONS)
def test_prose_that_mentions_what_opens_a_call_takes_no_call_behind_it(
    family: str, opening: str, behind: str
) -> None:
    prose = f"I write {opening}{behind}and so on: "
    _, text, calls = whole = read(family, [prose + one_call(family)])
    assert calls == [("get_weather", GIVEN)]
    assert text.startswith("I write") and "and so on:" in text
    assert whole == read(family, list(prose + one_call(family)))
    twice = read(family, [prose + prose + one_call(family)])
    assert (twice[1].count("and so on:"), twice[2]) == (2, calls)


@pytest.mark.parametrize("family", OPENING)
@given(places=st.lists(st.integers(0, 600)), order=st.permutations(range(6)))
def test_prose_about_calls_is_the_same_in_whatever_pieces_it_comes(
    family: str, places: list[int], order: list[int]
) -> None:
    parts = [*(OPENING[family] * 2)[:2], *BEHIND[1:4], one_call(family)]
    written = " and ".join(parts[i] for i in order)
    assert read(family, cut(written, places)) == read(family, [written])


def test_prose_about_a_call_is_given_out_at_once() -> None:
    parser = MessageParser(families()["hermes"], "", TOOLS)
    deltas = [*parser.feed("I write <tool_call> and then"), *parser.feed(" more")]
    assert "".join(delta.text for delta in deltas) == "I write <tool_call> and then more"


@pytest.mark.parametrize("family", [it.name for it in families().values() if it.style == "json"])
@given(places=st.lists(st.integers(0, 420)))
def test_line_feeds_and_tabs_that_a_model_forgets_to_escape_are_kept(
    family: str, places: list[int]
) -> None:
    if not families()[family].call:
        return
    it, given = families()[family], {"text": "one\ntwo\r\n\tthree", "n": 1}
    arguments = json.dumps(given).replace("\\n", "\n").replace("\\r", "\r").replace("\\t", "\t")
    call = it.writes.replace("{arguments}", arguments).replace("{name}", "now")
    if it.call_end and not call.endswith(tuple(it.call_end)):
        call += it.call_end[0]
    written = it.around[0] + call + it.around[1]
    assert read(family, cut(written, places)) == ("", "", [("now", given)])


def test_arguments_as_text_and_in_tags_may_hold_line_feeds_in_their_json() -> None:
    inner = json.dumps('{"a": "b\nc"}')
    written = f'<tool_call>{{"name": "now", "arguments": {inner}}}</tool_call>'
    assert read("hermes", [written]) == ("", "", [("now", {"a": "b\nc"})])
    schema = {"type": "object", "properties": {"list": {"type": "array"}}}
    for family in TAGGED:
        assert arguments_read(family, schema, {"list": '["a\nb"]'}) == {"list": ["a\nb"]}
        assert arguments_read(family, schema, {"list": '"a\nb"'}) == {"list": '"a\nb"'}


TAG_MARKS = {
    "qwen3-coder": ["</function>", "</parameter>", "</tool_call>", "<parameter=x", "<tool_call>"],
    "seed-oss": ["</function>", "</parameter>", "</seed:tool_call>", "<parameter=x"],
    "glm": ["</tool_call>", "</arg_value>", "<arg_key>", "<arg_value>", "</arg_key>"],
    "minimax-m2": ["</invoke>", "</parameter>", "</minimax:tool_call>", "<parameter name="],
}


@pytest.mark.parametrize("family", TAG_MARKS)
@given(data=st.data())
def test_a_value_in_tags_may_hold_the_marks_of_its_family(family: str, data: Any) -> None:
    before, argument, behind = TAGGED[family]
    words = st.sampled_from([*TAG_MARKS[family], "a", " b ", "c d", '"', "<"])
    values = data.draw(st.lists(st.lists(words, min_size=1, max_size=6), min_size=1, max_size=3))
    given = {f"k{i}": "a" + " a ".join(value) + "a" for i, value in enumerate(values)}
    written = before + "".join(argument.format(*it) for it in given.items()) + behind
    for pieces in ([written], cut(written, data.draw(st.lists(st.integers(0, 300))))):
        assert read(family, pieces) == ("", "", [("make", given)])
    both = read(family, [f"See {written}\n{written}"])
    assert both == ("", "See", [("make", given)] * 2) or both[1:] == ("See", [("make", given)] * 2)


@pytest.mark.parametrize("family", TAG_MARKS)
@given(places=st.lists(st.integers(0, 600)))
def test_a_value_in_tags_may_hold_a_whole_call(family: str, places: list[int]) -> None:
    before, argument, behind = TAGGED[family]
    inner = before + argument.format("x", "1") + argument.format("y", "2") + behind
    given = {"text": f"Write this:\n{inner}\nand then stop.", "more": "3"}
    written = before + "".join(argument.format(*it) for it in given.items()) + behind
    assert read(family, cut(written, places)) == ("", "", [("make", given)])
    again = read(family, cut(f"{written}\n{written} Done.", places))
    assert again == ("", "Done.", [("make", given)] * 2)


@pytest.mark.parametrize("family", sorted(TAG_MARKS.keys() - {"glm"}))
@given(places=st.lists(st.integers(0, 600)))
def test_a_value_may_hold_the_end_of_a_call_without_what_follows_it(
    family: str, places: list[int]
) -> None:
    before, argument, behind = TAGGED[family]
    closing = argument.partition("{}")[2].rpartition("{}")[2]
    end = families()[family].call_end[0]
    given = {"text": f"It ends with {closing}\n{end}, as I said", "more": "3"}
    written = before + "".join(argument.format(*it) for it in given.items()) + behind
    assert read(family, cut(written, places)) == ("", "", [("make", given)])
    unclosed = before + argument.format("text", "a") + f"\n{end}"
    plain = written.replace(given["text"], "b")
    calls = [("make", {"text": "a"}), ("make", {"text": "b", "more": "3"})]
    assert read(family, cut(f"{unclosed} Then: {plain}", places)) == ("", "Then:", calls)
    assert read(family, cut(f"{unclosed} Then.", places)) == ("", "Then.", calls[:1])


@pytest.mark.parametrize("family", sorted(TAG_MARKS.keys() - {"glm"}))
def test_a_value_goes_on_wherever_a_part_of_it_ends(family: str) -> None:
    before, argument, behind = TAGGED[family]
    closing, end = argument.rpartition("{}")[2], families()[family].call_end[0]
    given = {"text": f"It ends with {closing}\n{end}, as I said"}
    written = before + argument.format("text", given["text"]) + behind
    for place in range(len(written)):
        parts = [written[:place], written[place:]]
        assert read(family, parts) == ("", "", [("make", given)]), place


@pytest.mark.parametrize("family", TAG_MARKS)
@given(places=st.lists(st.integers(0, 600)))
def test_a_value_may_mention_how_a_call_begins(family: str, places: list[int]) -> None:
    before, argument, behind = TAGGED[family]
    given = {"text": f"It begins with {before} and so on", "more": "3"}
    written = before + "".join(argument.format(*it) for it in given.items()) + behind
    assert read(family, cut(written, places)) == ("", "", [("make", given)])


@pytest.mark.parametrize("family", TAG_MARKS)
def test_a_call_in_tags_that_is_cut_is_text_and_takes_no_call_in_it(family: str) -> None:
    before, argument, behind = TAGGED[family]
    begun = argument.format("text", "So").partition("So")[0]
    cut_off = f"{before}{begun}So it begins, and "
    assert read(family, [cut_off]) == read(family, list(cut_off))
    assert (read(family, [cut_off])[1][-15:], read(family, [cut_off])[2]) == ("it begins, and ", [])
    none = before + behind
    _, text, calls = read(family, [cut_off + none])
    assert calls == [("make", {})] and "it begins, and" in text


TIMED = {
    **{name: opening for name, openings in OPENING.items() for opening in openings},
    "hermes": '<tool_call>{"a": "',
    "qwen3-coder": "<function=now><parameter=a>",
    "seed-oss": "<function=now><parameter=a></parameter>",
    "glm": "<tool_call>now<arg_key>a</arg_key><arg_value>",
    "minimax-m2": '<invoke name="now"><parameter name="a"></parameter></invoke',
}


@pytest.mark.parametrize("family", TIMED)
@pytest.mark.parametrize("end", ["", "x", " </tool_call>", "</function>", '"}'])
def test_many_openings_are_read_in_linear_time(family: str, end: str) -> None:
    """Each opening is looked at with the text behind it, but only once or twice."""
    num_taken = 0
    taking = {kind: kind.take for kind in (JsonBody, TagBody)}

    def counted(kind: Any) -> Any:
        def take(self: Any, text: str, **how: bool) -> Any:
            nonlocal num_taken
            num_taken += len(text)
            return taking[kind](self, text, **how)

        return take

    written = TIMED[family] * 500 + end
    with pytest.MonkeyPatch.context() as patch:
        for kind in taking:
            patch.setattr(kind, "take", counted(kind))
        _, text, calls = read(family, [written])
    assert text or calls
    assert num_taken < 6 * len(written) + 500 * SLICE_CHARACTERS


def test_both_forms_of_mistral_are_read() -> None:
    calls = (
        f'[{{"name": "get_weather", "arguments": {JSON}}}, {{"name": "now", "arguments": {{}}}}]'
    )
    assert read("mistral", list(f"[TOOL_CALLS] {calls}")) == (
        "",
        "",
        [("get_weather", GIVEN), ("now", {})],
    )


def test_the_ids_that_a_model_writes_are_kept() -> None:
    parser = MessageParser(families()["mistral"], "", TOOLS)
    deltas = [*parser.feed(WRITTEN["mistral"]), *parser.finish()]
    first, second = [it.call.id for it in deltas if it.call]
    assert second == "a1" and len(first) == 24


def test_an_answer_in_json_is_no_call() -> None:
    answer = '{"name": "Alice", "age": 3}'
    assert read("llama3", list(answer)) == ("", answer, [])
    tagged = '<|python_tag|>{"name": "now", "parameters": {}}'
    assert read("llama3", list(tagged)) == ("", "", [("now", {})])


def test_thoughts_may_begin_in_the_prompt() -> None:
    prompt = "<|im_start|>user\n<think><|im_start|>assistant\n<think>\n"
    assert read("hermes", list("Hmm.\n</think>\n\nYes."), prompt) == ("Hmm.", "Yes.", [])
    ended = prompt + "\n</think>\n\n"
    assert read("hermes", ["Yes."], ended) == ("", "Yes.", [])
    assert read("hermes", ["Hmm. I was cut"], prompt) == ("Hmm. I was cut", "", [])


@pytest.mark.parametrize("family", WRITTEN)
def test_a_message_that_the_prompt_begins_goes_on(family: str) -> None:
    written, start = WRITTEN[family], families()[family].start
    thoughts, text, calls = read(family, [written])
    for at in range(len(written) + 1):
        more = read(family, list(written[at:]), f"Hi.{start}{written[:at]}")
        assert more == read(family, [written[at:]], f"{start}{written[:at]}")
        assert thoughts.endswith(more[0]) and text.endswith(more[1])
        assert more[2] == calls[len(calls) - len(more[2]) :]
        assert more[2] or at > written.rindex("now"), "a call that was begun"


@pytest.mark.parametrize("family", [name for name, it in families().items() if it.resumes])
def test_an_answer_to_results_begins_behind_them(family: str) -> None:
    it, call = families()[family], WRITTEN.get(family, WRITTEN["mistral"])
    for resumes in it.resumes:
        prompt = f"{it.start}{call}</s>A result.{resumes}"
        assert it.begun(prompt) == it.start
        assert read(family, ["It is cold."], prompt) == ("", "It is cold.", [])
        assert read(family, list(call), prompt) == read(family, [call], it.start)


@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize("tools", [TOOLS, ()])
def test_text_that_the_prompt_begins_is_continued_to_the_letter(family: str, tools: Any) -> None:
    start, text = families()[family].start, "So, it\n\n is <b>1</b>.  And <tool"
    for at in range(len(text) + 1):
        assert read(family, list(text[at:]), start + text[:at], tools) == ("", text[at:], [])


@pytest.mark.parametrize("family", [name for name in WRITTEN if families()[name].thoughts])
@pytest.mark.parametrize("length", [0, 5000])
def test_thoughts_that_the_prompt_begins_are_continued_to_the_letter(
    family: str, length: int
) -> None:
    opened, closed = WRITTEN[family].split("Hmm.")[0], WRITTEN[family].split("Hmm.")[1]
    text = "So " + "very " * length + "cold.\n\n It  is"
    for at in range(len(text) - 10, len(text) + 1):
        prompt = families()[family].start + opened + text[:at]
        more = read(family, list(text[at:] + closed), prompt)
        assert more[:2] == (text[at:], "Let me see.") and len(more[2]) == 2


@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize("begun", [" ", "<think>", "<function=", "[TOOL_CALLS]a", "<tool_call>a"])
def test_little_is_read_of_a_long_beginning(family: str, begun: str) -> None:
    kept = families()[family].begun(families()[family].start + begun * 100_000)
    assert len(kept) < 2 * MAX_BEGUN_CHARACTERS
    assert families()[family].begun(kept) == kept


def test_the_family_is_told_by_the_chat_template() -> None:
    assert detect("{{ messages }}") is None
    for name, family in families().items():
        found = detect(" ".join(family.detect))
        assert found is not None and found.name == name


def test_parsers_can_be_chosen_by_hand() -> None:
    template = "<tool_call>"
    chosen = choose(template, tool_parser="mistral", reasoning_parser="auto")
    assert chosen is not None
    assert (chosen.name, chosen.thoughts) == ("mistral", families()["hermes"].thoughts)
    no_calls = choose(template, tool_parser="none", reasoning_parser="auto")
    assert no_calls is not None and not no_calls.call and no_calls.thoughts
    assert choose(template, tool_parser="none", reasoning_parser="none") is None
    assert choose("{{ messages }}", tool_parser="auto", reasoning_parser="auto") is None
    with refused(ConfigError):
        choose(template, tool_parser="x", reasoning_parser="auto")


def test_special_tokens_that_messages_are_written_with_are_known() -> None:
    gpt_oss = families()["gpt-oss"]
    names = ["<|channel|>", "<|message|>", "<|call|>", "<|start|>", "<|end|>", "<|constrain|>"]
    assert all(map(gpt_oss.names, names)) and not gpt_oss.names("<|endoftext|>")
    assert families()["mistral"].names("[TOOL_CALLS]")
    assert not families()["hermes"].names("<|im_end|>")
