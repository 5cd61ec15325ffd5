"""Models that write in channels, gpt-oss and Gemma 4: their answers, prompts and grammars."""

import re
import time
from typing import Any

import pytest

from tests.tieredkv.test_message_parser import read

START, END = "<|start|>assistant", "<|end|>"
THOUGHT = "<|channel|>analysis<|message|>Hmm."
FINAL = "<|channel|>final<|message|>Hi."
CALL = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>"
NOW: list[Any] = [("now", {})]

HARMONY = {
    "an answer": (f"{THOUGHT}{END}{START}{FINAL}<|return|>", ("Hmm.", "Hi.", [])),
    "thoughts in several messages": (
        f"{THOUGHT}{END}{START}{THOUGHT}{END}{START}{FINAL}<|return|>",
        ("Hmm.Hmm.", "Hi.", []),
    ),
    "thoughts alone": (f"{THOUGHT}<|return|>", ("Hmm.", "", [])),
    "thoughts that do not end": (f"{THOUGHT}{START}{FINAL}", ("Hmm.", "Hi.", [])),
    "thoughts without a new message": (f"{THOUGHT}{FINAL}<|return|>", ("Hmm.", "Hi.", [])),
    "thoughts that go over into a call": (f"{THOUGHT}{START}{CALL}", ("Hmm.", "", NOW)),
    "thoughts with a type": (
        f"<|channel|>analysis text<|message|>Hmm.{END}{START}{FINAL}",
        ("Hmm.", "Hi.", []),
    ),
    "a preamble": (
        f"{THOUGHT}{END}{START}<|channel|>commentary<|message|>I look.{END}{START}{CALL}",
        ("Hmm.", "I look.", NOW),
    ),
    "several calls": (f"{THOUGHT}{END}{START}{CALL}{START}{CALL}", ("Hmm.", "", NOW * 2)),
    "a call in the role": (
        f"{THOUGHT}{END}{START} to=functions.now<|channel|>commentary json<|message|>{{}}<|call|>",
        ("Hmm.", "", NOW),
    ),
    "a call among thoughts": (
        "<|channel|>analysis to=functions.now code<|message|>{}<|call|>",
        ("", "", NOW),
    ),
    "a channel that is named twice": (
        "<|channel|>commentary to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
        ("", "", NOW),
    ),
    "a call of no namespace": (
        "<|channel|>commentary to=now <|constrain|>json<|message|>{}<|call|>",
        ("", "", NOW),
    ),
    "a call of another namespace": (
        '<|channel|>commentary to=browser.search code<|message|>{"q": 1}<|call|>',
        ("", "", [("browser.search", {"q": 1})]),
    ),
    "a call without arguments": (
        "<|channel|>commentary to=functions.now<|message|><|call|>",
        ("", "", NOW),
    ),
    "a call that is no JSON": (
        f"{START} to=python<|channel|>analysis code<|message|>print(1)<|call|>",
        ("", "print(1)", []),
    ),
    "a call that is cut": (CALL.removesuffix("}<|call|>"), ("", "{", [])),
    "the type of an answer": (
        '<|channel|>final <|constrain|>json<|message|>{"a": 1}<|return|>',
        ("", '{"a": 1}', []),
    ),
    "an unknown channel": ("<|channel|>other<|message|>Hi.<|return|>", ("", "Hi.", [])),
    "no channel": ("<|message|>Hi.<|return|>", ("", "Hi.", [])),
    "no header": ("Hi.<|return|>", ("", "Hi.", [])),
    "a header that is cut": (f"{THOUGHT}{END}{START}<|channel|>fin", ("Hmm.", "", [])),
    "a message of the user": (f"{FINAL}{END}<|start|>user<|message|>", ("", "Hi.", [])),
    "a result": (
        f'{CALL}<|start|>functions.now to=assistant<|channel|>commentary<|message|>"9"{END}',
        ("", '"9"', NOW),
    ),
}
"""What gpt-oss may write, and what it is read as: thoughts, text and calls."""


GEMMA_THOUGHT = "<|channel>thought\nHmm.\n<channel|>"
GEMMA_CALL = "<|tool_call>call:now{}<tool_call|>"
DEEP = {"d-e": "", "$ref": '{a}, \\ "b":', "<": {}}
GEMMA = {
    "an answer": (f"{GEMMA_THOUGHT}Hi.<turn|>", ("Hmm.", "Hi.", [])),
    "no thoughts": ("<|channel>thought\n<channel|>Hi.<turn|>", ("", "Hi.", [])),
    "thoughts alone": ("<|channel>thought\nHmm.<turn|>", ("Hmm.", "", [])),
    "thoughts that are cut": ("<|channel>thought\nHmm", ("Hmm", "", [])),
    "thoughts that go over into a call": (
        f"<|channel>thought\nHmm. {GEMMA_CALL}<|tool_response>",
        ("Hmm.", "", NOW),
    ),
    "a call behind thoughts without its token": (
        f"{GEMMA_THOUGHT}call:now{{}}<tool_call|><|tool_response>",
        ("Hmm.", "", NOW),
    ),
    "such a text elsewhere": (f"{GEMMA_THOUGHT}a call:now{{}}", ("Hmm.", "a call:now{}", [])),
    "an unknown channel": ("<|channel>final\nHi.<turn|>", ("", "Hi.", [])),
    "a channel that is cut": ("<|channel>", ("", "", [])),
    "a channel that did not begin": ("Hi.<channel|> More.<turn|>", ("", "Hi. More.", [])),
    "a text beside calls": (
        f"{GEMMA_THOUGHT}I look.{GEMMA_CALL}{GEMMA_CALL}<|tool_response>",
        ("Hmm.", "I look.", NOW * 2),
    ),
    "all kinds of values": (
        '<|tool_call>call:f{a:<|"|>x, {y}:\n"z"<|"|>,b:[1,-2.5,true,null,None,<|"|>None<|"|>,[]],'
        'c:{d-e:<|"|><|"|>,$ref:<|"|>{a}, \\ "b":<|"|>,<|"|><<|"|>:{}}}<tool_call|>',
        (
            "",
            "",
            [("f", {"a": 'x, {y}:\n"z"', "b": [1, -2.5, True, None, None, "None", []], "c": DEEP})],
        ),
    ),
    "white space": (
        '<|tool_call>call:f{ a : <|"|> x<|"|> ,\n b c: 1 }<tool_call|>',
        ("", "", [("f", {"a": " x", "b c": 1})]),
    ),
    "plain JSON": (
        '<|tool_call>call:f{"a": "\\"{b:", "c": {"d": 1}}<tool_call|>',
        ("", "", [("f", {"a": '"{b:', "c": {"d": 1}})]),
    ),
    "marks in a text": (
        '<|tool_call>call:f{a:<|"|><tool_call|><|tool_call>call:now{}<|"|>}<tool_call|>',
        ("", "", [("f", {"a": "<tool_call|><|tool_call>call:now{}"})]),
    ),
    "a call that the end token closes": ("<|tool_call>call:now{}<|tool_response>", ("", "", NOW)),
    "a call that nothing closes": ("<|tool_call>call:now{}", ("", "", NOW)),
    "a call that is cut": ('<|tool_call>call:f{a:<|"|>b', ("", "call:f{a:b", [])),
    "a text without its quote": (
        "<|tool_call>call:f{a:Paris}<tool_call|>",
        ("", "call:f{a:Paris}", []),
    ),
    "no object": ("<|tool_call>call:f[1]<tool_call|>", ("", "call:f[1]", [])),
}
"""What Gemma 4 may write, and what it is read as."""

CASES = [
    (family, *case)
    for family, cases in (("gpt-oss", HARMONY), ("gemma-4", GEMMA))
    for case in cases.values()
]
IDS = [
    f"{family}: {name}" for family, it in (("gpt-oss", HARMONY), ("gemma-4", GEMMA)) for name in it
]


@pytest.mark.parametrize(("family", "written", "told"), CASES, ids=IDS)
def test_messages_are_read_wherever_they_are_cut(family: str, written: str, told: Any) -> None:
    assert read(family, list(written)) == told
    for at in range(len(written)):
        assert read(family, [written[:at], written[at:]]) == told


@pytest.mark.parametrize(("family", "written", "told"), CASES, ids=IDS)
def test_no_special_token_is_text(family: str, written: str, told: Any) -> None:
    for tools in ([], [{"function": {"name": "now"}}]):
        thoughts, text, _ = read(family, [written], tools=tools)
        assert not re.search(r"<\||\|>", thoughts + text)


def test_long_runs_in_calls_of_gemma_are_read_in_linear_time() -> None:
    blank, quote = " " * 100_000, '<|"|>'
    for body in (
        f"{{a:[1,{blank}2]}}",
        f"{{{blank}a{blank}:1}}",
        f"{{a:{quote}{'<|' * 100_000}{quote}}}",
        "{" + "a" * 300_000,
    ):
        began_at = time.process_time()
        read("gemma-4", [f"<|tool_call>call:f{body}<tool_call|>"])
        assert time.process_time() - began_at < 5
