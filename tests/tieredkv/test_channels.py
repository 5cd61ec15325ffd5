"""Models that write in channels, gpt-oss and Gemma 4: their answers, prompts and grammars."""

import pytest

from tests.tieredkv.test_message_parser import read

START, END = "<|start|>assistant", "<|end|>"
THOUGHT = "<|channel|>analysis<|message|>Hmm."
FINAL = "<|channel|>final<|message|>Hi."
CALL = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>"
NOW = [("now", {})]

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


@pytest.mark.parametrize("name", HARMONY)
def test_messages_of_gpt_oss_are_read_wherever_they_are_cut(name: str) -> None:
    written, told = HARMONY[name]
    assert read("gpt-oss", list(written)) == told
    for at in range(len(written)):
        assert read("gpt-oss", [written[:at], written[at:]]) == told


@pytest.mark.parametrize("name", HARMONY)
def test_no_special_token_of_gpt_oss_is_text(name: str) -> None:
    written, _ = HARMONY[name]
    for tools in ([], [{"function": {"name": "now"}}]):
        thoughts, text, _ = read("gpt-oss", [written], tools=tools)
        assert "<|" not in thoughts + text
