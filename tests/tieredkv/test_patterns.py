"""Patterns, as they are rewritten: what is written is a JSON string that matches the pattern."""

import json
import random
import re

import pytest

from tests.golden import refused
from tests.tieredkv.written import NotEndedError, written
from tieredkv.server.patterns import PatternError, looks_around, of_length, written_in_json
from tieredkv.server.structure import as_grammar, json_format

PATTERNS = [
    *("", "^$", "[a-y]", "^x-", "^a|b$", "ab+", "^https?://", "^\\S+@\\S+$", "^\\d{3}-\\d{2,4}$"),
    *("^[a-z]{1,255}$", "^[^a]{2}$", "^[^\u00fc]{2}$", "^.{3}$", "^[\\s\\S]{3}$", "\\d{2,}?"),
    *(
        '^a"b$',
        '^["a]+$',
        "^\\\\+$",
        "^\\t\\n?$",
        "^\\n+$",
        "^\\0$",
        "^\\u0041\\x42$",
        "^\\W\\D\\S$",
    ),
    *("(^a|b)$", "^(a$|b$)", "^(?:a|b)(c)*$", "^\\^\\-$", "^[\\^]$", "^[\\^a]$", "^[\\]\\[-]$"),
    *(
        "^{x}$",
        "^\\{x\\}$",
        "^a\\/b$",
        "^(\\([0-9]{3}\\))?[0-9]{4}$",
        "^[+-]?(\\d\\d)?$",
        "^[^\\s]$",
    ),
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_is_written_matches_the_pattern(pattern: str) -> None:
    grammar = as_grammar(json_format({"type": "string", "pattern": written_in_json(pattern)}))
    told = 0
    for seed in range(12):
        try:
            text = json.loads(written(grammar, random.Random(seed)))
        except NotEndedError:
            continue
        told += 1
        assert re.search(pattern, text), text
    assert told


@pytest.mark.parametrize(
    "pattern",
    [
        "^(?!x)",
        "(?<=a)b",
        "(?i)a",
        "(a)\\1",
        "\\bword",
        "\\p{L}",
        "a$b",
        "a^b",
        "(^a)*",
        "a{,3}",
        "a**",
        "a{3,2}",
        "[z-a]",
        "[\\d-x]",
        "[]a]",
        "[a",
        "(a",
        "a)",
        "[^\\s\\S]",
        "(" * 99 + ")" * 99,
        "\\",
    ],
)
def test_a_pattern_that_cannot_be_rewritten_is_an_error(pattern: str) -> None:
    with refused(PatternError):
        written_in_json(pattern)


@pytest.mark.parametrize(("least", "most"), [(0, 3), (2, None), (0, None), (1, 300), (4, 4)])
def test_strings_have_as_many_characters_as_asked_for(least: int, most: int | None) -> None:
    grammar = as_grammar(json_format({"type": "string", "pattern": of_length(least, most)}))
    told = 0
    for seed in range(12):
        try:
            text = json.loads(written(grammar, random.Random(seed)))
        except NotEndedError:
            continue
        told += 1
        assert least <= len(text) <= (len(text) if most is None else most)
    assert told


def test_only_what_looks_around_is_told_as_such() -> None:
    assert all(map(looks_around, ["(?=a)", "a(?!b)", "(?<=a)b", "[(](?<!a)"]))
    assert not any(map(looks_around, ["(?:a)", "\\(?=a", "[(?=a)]", "(?<name>a)", "[\\](?=]"]))
