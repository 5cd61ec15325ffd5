"""A checkpoint's own response template is used where it can be, and costs no more than ours."""

import contextlib
import copy
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.golden import refused
from tests.tieredkv.test_message_parser import GIVEN, JSON, TOOLS, WRITTEN, cut
from tests.tieredkv.test_remembered import made_tokenizer
from tieredkv.engine.checkpoint import load_tokenizer
from tieredkv.errors import RequestError
from tieredkv.server.message_parser import OWN, Delta, Family, MessageParser, choose, families
from tieredkv.server.reply import Reading
from tieredkv.server.response_templates import InexpressibleError, family_of
from tieredkv.server.structure import Structure

CALL = {"function": {"name": "{tool}", "arguments": "{content}"}}
JSON_CALLS: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|me|>",
    "fields": {
        "reasoning_content": {"open": "<musing>", "close_pattern": r"</musing>\s*"},
        "tool_calls": {
            "open_pattern": r"\s*<do>",
            "close_pattern": r"</do>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|(?:end|over)\|>\s*|$"},
    },
}
NAMED_CALLS: dict[str, Any] = {
    "start_anchor": ["<|me|>"],
    "fields": {
        "thinking": {"open": ["<musing>", "<m>"], "close": "</musing>"},
        "tool_calls": {
            "open_pattern": r"<do>\s*(?P<tool>[\w.-]+?)\s*(?:<as>json)?<with>",
            "close": "</do>",
            "repeats": True,
            "content": "json",
            "content_args": {"allow_non_json": True},
            "transform": CALL,
        },
        "content": {"open": "<say>", "close": "</say>"},
    },
}
TAGGED_CALLS: dict[str, Any] = {
    "start_anchor_pattern": r"<\|me\|>",
    "fields": {
        "reasoning_content": {"open": "<musing>", "close": "</musing>"},
        "tool_calls": {
            "open_pattern": r"<do>\s*<fn=(?P<tool>[^>\n]+)>",
            "close_pattern": r"</fn>\s*</do>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<arg=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</arg>",
                "value_parser": {"name": "json", "args": {"allow_non_json": True}},
            },
            "transform": CALL,
        },
        "content": {},
    },
}
QUOTED_CALLS: dict[str, Any] = {
    "start_anchor": ["<|me|>", "<|told|>"],
    "fields": {
        "reasoning_content": {"open": "<musing>", "close": "</musing>"},
        "tool_calls": {
            "open_pattern": r"<do>(?P<tool>\w+)",
            "close": "</do>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [["<q>", "<q>"]]},
            "transform": CALL,
        },
        "content": {"close": ["<|end|>", "<|over|>"]},
    },
}
OWN_WRITTEN = {
    "json": (
        JSON_CALLS,
        f'<musing>\nHmm.\n</musing>\n\nLet me see.\n<do>{{"name": "get_weather", "arguments": '
        f'{JSON}}}</do>\n<do>{{"name": "now", "arguments": {{}}}}</do>\n<|over|>',
    ),
    "named": (
        NAMED_CALLS,
        f"<m>Hmm.</musing><say>Let me see.</say><do>get_weather <as>json<with>{JSON}</do><do>\nnow"
        "<with>{}</do>",
    ),
    "quoted": (
        QUOTED_CALLS,
        '<musing>Hmm.</musing>Let me see.<do>get_weather{city:<q>Zürich "x" </b><q>,days:3}</do>'
        "<do>now{}</do><|end|>",
    ),
    "tagged": (
        TAGGED_CALLS,
        '<musing>Hmm.</musing>Let me see.\n<do>\n<fn=get_weather>\n<arg=city>\nZürich "x" </b>\n'
        "</arg>\n<arg=days>3</arg>\n</fn>\n</do>\n<do><fn=now></fn></do>",
    ),
}
"""What models write by templates of their own: the same thoughts, text and calls."""


def read(family: Family, pieces: list[str], prompt: str = "<|me|>") -> Any:
    parser, deltas = MessageParser(family, prompt, TOOLS), list[Delta]()
    for piece in pieces:
        deltas += parser.feed(piece)
    deltas += parser.finish()
    calls = [(it.call.name, json.loads(it.call.arguments)) for it in deltas if it.call]
    return "".join(it.thoughts for it in deltas), "".join(it.text for it in deltas), calls


def chosen(template: Any, chat_template: str = "", **named: str) -> Family | None:
    named = {"tool_parser": "auto", "reasoning_parser": "auto", **named}
    return choose(chat_template, template, **named)


@pytest.mark.parametrize("form", OWN_WRITTEN)
def test_a_saved_checkpoint_brings_its_own_form(form: str, tmp_path: Path) -> None:
    template, written = OWN_WRITTEN[form]
    tokenizer = made_tokenizer()
    tokenizer.response_template = template
    tokenizer.save_pretrained(tmp_path)
    family = chosen(load_tokenizer(str(tmp_path)).response_template)
    assert family is not None and family.name == OWN
    expected = ("Hmm.", "Let me see.", [("get_weather", GIVEN), ("now", {})])
    assert read(family, [written]) == read(family, list(written)) == expected
    at = written.index("Hmm.")
    assert read(family, [written[at:]], "<|me|>" + written[:at]) == expected


@pytest.mark.parametrize("form", OWN_WRITTEN)
@given(places=st.lists(st.integers(0, 300)))
def test_its_messages_are_the_same_in_whatever_pieces_they_come(
    form: str, places: list[int]
) -> None:
    template, written = OWN_WRITTEN[form]
    family = Family(name=OWN, **family_of(template))
    assert read(family, cut(written, places)) == read(family, [written])


@pytest.mark.parametrize(
    ("form", "text"),
    [
        *(("json", each) for each in ("plain <do", "<do>{oops</do> b", '<do>{"name": 1}</do>')),
        *(("named", each) for each in ("<do>now", "<do>now<with>[1]</do>", "<do>now<with>{")),
        *(
            ("tagged", each)
            for each in ("<do><fn=now><arg=a>1", "<do><fn=now>a<arg=a>1</arg></fn>")
        ),
    ],
)
def test_what_it_cannot_read_is_text(form: str, text: str) -> None:
    family = Family(name=OWN, **family_of(OWN_WRITTEN[form][0]))
    assert read(family, list(text)) == read(family, [text]) == ("", text, [])


def test_special_tokens_in_its_alternatives_are_known() -> None:
    family = Family(name=OWN, **family_of(JSON_CALLS))
    assert family.names("<|end|>") and family.names("<|over|>") and not family.names("<|me|>")


@pytest.mark.parametrize("form", ["json", "named", "quoted"])
def test_calls_can_be_forced_in_its_form(form: str) -> None:
    family = Family(name=OWN, **family_of(OWN_WRITTEN[form][0]))
    reading = Reading(family, None, "<|me|>", TOOLS)
    grammar = Structure(tools=TOOLS, choice="required").grammar(reading)
    assert grammar and "<do>" in grammar
    call = family.writes.replace("{name}", "now").replace("{arguments}", "{}")
    assert read(family, [call + call]) == ("", "", [("now", {})] * 2)


def test_calls_in_tags_of_its_own_cannot_be_forced() -> None:
    reading = Reading(Family(name=OWN, **family_of(TAGGED_CALLS)), None, "<|me|>", TOOLS)
    with refused(RequestError, param="tool_choice", code="unsupported_parameter"):
        Structure(tools=TOOLS, choice="required").grammar(reading)


def test_a_known_family_that_reads_the_same_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    text = json.dumps(JSON_CALLS).replace("<do>", "<tool_call>").replace("</do>", "</tool_call>")
    same = json.loads(text.replace("musing>", "think>"))
    kept = chosen(same, "<tool_call>")
    assert kept == families()["hermes"] and not caplog.records
    assert read(kept, [WRITTEN["hermes"]]) == read(families()["hermes"], [WRITTEN["hermes"]])
    other = chosen(JSON_CALLS, "<tool_call>")
    assert other is not None and other.name == OWN, "the checkpoint knows better than its template"


def test_an_answer_goes_on_behind_any_text_that_begins_one() -> None:
    family = Family(name=OWN, **family_of(QUOTED_CALLS))
    for prompt in ("<|me|>A.<|told|>", "<|told|>A.<|me|>"):
        assert read(family, ["Hmm.</musing>Yes."], prompt + "<musing>") == ("Hmm.", "Yes.", [])
        assert read(family, ["Yes."], prompt) == ("", "Yes.", [])


def test_parsers_chosen_by_hand_take_precedence() -> None:
    by_hand = chosen(JSON_CALLS, tool_parser="hermes")
    assert by_hand is not None and (by_hand.name, by_hand.call) == ("hermes", "<tool_call>")
    assert by_hand.thoughts == family_of(JSON_CALLS)["thoughts"]
    assert chosen(JSON_CALLS, tool_parser="none", reasoning_parser="none") is None


# --- What cannot be expressed


def changed(template: Any, path: str, value: Any) -> Any:
    """Return a template with another value at a path; None takes it out."""
    made = copy.deepcopy(template)
    *heads, last = path.split("/")
    at = made
    for head in heads:
        at = at[head]
    at.pop(last, None)
    if value is not None:
        at[last] = value
    return made


CALLS, THOUGHTS = "fields/tool_calls", "fields/reasoning_content"
NONSENSE: list[Any] = ["x", 7, [], {}, [[]]]
INEXPRESSIBLE: list[Any] = [
    *NONSENSE,
    {"version": 1, "fields": {}},
    changed(JSON_CALLS, "version", 2),
    changed(JSON_CALLS, "fields", ["content"]),
    changed(JSON_CALLS, "fields/mood", {"open": "<mood>"}),
    changed(JSON_CALLS, "start_anchor", None),
    changed(JSON_CALLS, "fields/reasoning_content/open", None),
    changed(JSON_CALLS, f"{CALLS}/content", "python-call-list"),
    changed(JSON_CALLS, f"{CALLS}/content_args", {"unquoted_keys": True}),
    changed(QUOTED_CALLS, f"{CALLS}/content_args/string_delims", [["<", ">"]]),
    changed(NAMED_CALLS, f"{CALLS}/transform", {"name": "{tool}"}),
    changed(NAMED_CALLS, f"{CALLS}/open_pattern", "<do>"),
    changed(TAGGED_CALLS, f"{CALLS}/content_args", {}),
    changed(TAGGED_CALLS, f"{CALLS}/content_args/tag_pattern", "(?P<key>a)=(?P<value>.*?)"),
]
HOSTILE = [
    *(r"(a+)+$", r"<do>(a|a)*b", r"(?=[\s\S]*?</do>)", r"<do>(?:x*)*y", r"<do>(.*)<(.*)>"),
    *(r"<do>\s*\s*\s*y", r"\s*(?:<a>)?\s*<do>", r"(a)\1", r"(?i)<do>", r"<do>(?>a*)", r"\bdo"),
    *(r".*<do>", r"\s*", "", r"(", r"<do>[^x]{500}", r"<do>.+\s*x", "<do>" * 500,),
    *(r"<do>(?i:a)", r"(?P<a>x)(?(a)y)", r"<do>\w+\d+x", r"<do>(?:a\s*|\s*b)\s*c"),
]  # fmt: skip


@pytest.mark.parametrize("template", INEXPRESSIBLE)
def test_what_cannot_be_expressed_is_told_and_left_to_the_table(
    template: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with refused(InexpressibleError):
        family_of(template)
    caplog.set_level(logging.WARNING)
    assert chosen(template, "<tool_call>") == families()["hermes"]
    assert chosen(template, "{{ messages }}") is None
    assert {each.name for each in caplog.records} == {"tieredkv.server.message_parser"}


@pytest.mark.parametrize(
    "path", [f"{CALLS}/open", f"{CALLS}/close", "fields/content/close", f"{THOUGHTS}/open"]
)
def test_expressions_that_may_take_long_are_not_used(path: str) -> None:
    used = []
    for pattern in HOSTILE:
        template = changed(changed(JSON_CALLS, path, None), f"{path}_pattern", pattern)
        with contextlib.suppress(InexpressibleError):
            used.append((pattern, family_of(template)))
        assert chosen(template, "<tool_call>") == families()["hermes"], pattern
    assert not used


TEXTS = st.text(st.sampled_from("ab <>|\n"), min_size=1, max_size=3).map(re.escape)
RUNS = st.sampled_from([r"\s*", r"\s+", r"\n?", r"[^>\n]+", r"[\w-]*", r"\S+?", r"[ \n]{1,3}", "."])
PATTERNS = st.recursive(
    TEXTS | RUNS,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map("".join)
        | st.lists(inner, min_size=1, max_size=3).map(lambda them: f"(?:{'|'.join(them)})")
        | inner.map(lambda it: f"(?:{it})?")
    ),
    max_leaves=8,
)


@given(pattern=PATTERNS, texts=st.lists(st.text("ab <>|\n", max_size=9), max_size=9))
def test_an_expression_that_is_written_again_matches_the_same_in_bounded_time(
    pattern: str, texts: list[str]
) -> None:
    template = changed(changed(JSON_CALLS, f"{CALLS}/open_pattern", f"<do>{pattern}"), "version", 1)
    try:
        made = family_of(template)
    except InexpressibleError:
        return
    # Runs have a bound, and groups are not repeated.
    assert not re.search(r"(?<!\\)[*+]|\{\d*,\}|\)(?:\{|[*+])", made["call"])
    for text in (f"<do>{each}" for each in [*texts, ""]):
        theirs, ours = (re.match(it, text, re.DOTALL) for it in (f"<do>{pattern}", made["call"]))
        assert (theirs and theirs.span()) == (ours and ours.span())
    assert (
        re.match(made["call"], made["opens"])
        or "\\S" in pattern
        or "[" in pattern
        or "." in pattern
    )
