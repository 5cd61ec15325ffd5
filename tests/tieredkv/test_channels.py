"""Models that write in channels, gpt-oss and Gemma 4: their answers, prompts and grammars."""

import asyncio
import json
import re
import time
from datetime import datetime
from typing import Any

import pytest
import torch

from tests.tieredkv.channels import GEMMA_4, GPT_OSS, SPECIAL
from tests.tieredkv.test_histories import HISTORIES, told
from tests.tieredkv.test_message_parser import read
from tests.tieredkv.test_remembered import made_tokenizer
from tests.tieredkv.test_tool_calls import Engine, anthropic_of, called, close_apis, openai_of
from tieredkv.config import Settings
from tieredkv.engine.engine_messages import EngineRequest, TokenOutput
from tieredkv.engine.grammars import Compiler, Matcher, allowed_tokens
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.fields import read as read_body
from tieredkv.server.asked import Rules
from tieredkv.server.chat import Tokenization
from tieredkv.server.histories import Form
from tieredkv.server.message_parser import MessageParser, choose, detect, families
from tieredkv.server.openai_api import ChatRequest
from tieredkv.server.remembered import Memory, RememberedAnswers
from tieredkv.server.reply import Reply
from tieredkv.server.structure import Structure
from tieredkv.server.template_clock import TemplateClock

__all__ = ["close_apis"]

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
    "a header that is none": (
        "<|channel|>, <|start|>a! <|constrain|>b<|message|>Hi.<|return|>",
        ("", ", a! bHi.", []),
    ),
    "a header cut in a token": (f"{THOUGHT}{END}{START}<|channel|>final<|mess", ("Hmm.", "", [])),
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
    "a channel without a name": ("<|channel>So, it is.<|channel>", ("", "So, it is.", [])),
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


# --- Prompts

TEMPLATES = {"gpt-oss": GPT_OSS, "gemma-4": GEMMA_4}
TOKENIZERS = {name: made_tokenizer(it, SPECIAL[name]) for name, it in TEMPLATES.items()}
FORMS = {
    "gpt-oss": Form(splits_calls=True, joins_systems=True, system="user", thoughts="thinking"),
    "gemma-4": Form(splits_text=True),
}
RENDERED = {
    "gpt-oss": (
        "<|start|>system<|message|>A model.\nDate: 2026-11-29\nReasoning: high<|end|>"
        "<|start|>developer<|message|>Be brief.\n// now<|end|><|start|>user<|message|>When?<|end|>"
        '<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{"at": ["\\"", 1]}'
        "<|call|><|start|>functions.now to=assistant<|channel|>commentary<|message|>"
        '"12"<|end|><|start|>assistant<|channel|>final<|message|>At 12.<|end|>'
        "<|start|>user<|message|>And now?<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Hmm.<|end|>"
        '<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{"at": ["\\"", 1]}'
        "<|call|><|start|>functions.now to=assistant<|channel|>commentary<|message|>"
        '"12"<|end|><|start|>assistant'
    ),
    "gemma-4": (
        "<|turn>system\n<|think|>\nBe brief.<|tool>declaration:now{}<tool|><turn|>\n"
        "<|turn>user\nWhen?<turn|>\n<|turn>model\n"
        '<|tool_call>call:now{at:[<|"|>"<|"|>,1]}<tool_call|>'
        '<|tool_response>response:now{value:<|"|>12<|"|>}<tool_response|>At 12.<turn|>\n'
        "<|turn>user\nAnd now?<turn|>\n<|turn>model\n<|channel>thought\nHmm.\n<channel|>"
        '<|tool_call>call:now{at:[<|"|>"<|"|>,1]}<tool_call|>'
        '<|tool_response>response:now{value:<|"|>12<|"|>}<tool_response|>'
    ),
}
NEXT = {
    "gpt-oss": (
        f"{THOUGHT}{END}{START}{CALL}<|start|>functions.now to=assistant<|channel|>commentary"
        f'<|message|>"12"{END}{START}'
    ),
    "gemma-4": (
        f'{GEMMA_THOUGHT}{GEMMA_CALL}<|tool_response>response:now{{value:<|"|>12<|"|>}}'
        "<tool_response|>"
    ),
}
"""What stands behind the first prompt in the second one."""

TOOLS: Any = [{"type": "function", "function": {"name": "now"}}]
ASKED: Any = [{"role": "user", "content": "When?"}]


def tokenization_of(name: str) -> Tokenization:
    clock = TemplateClock(fixed=datetime(2026, 11, 29))
    return Tokenization(TOKENIZERS[name], family=families()[name], clock=clock)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_templates_are_known_and_lose_nothing(name: str) -> None:
    family = detect(TEMPLATES[name])
    assert family is not None and family.name == name
    assert tokenization_of(name).form({}) == FORMS[name]
    for history in HISTORIES.values():
        text = tokenization_of(name).encode_chat(history, {}).text
        assert [each for each in told(history) if each not in text] == []


@pytest.mark.parametrize(("name", "text"), [*RENDERED.items()])
def test_turns_stand_in_a_prompt_as_models_write_them(name: str, text: str) -> None:
    call = {"id": "call_1", "function": {"name": "now", "arguments": {"at": ['"', 1]}}}
    result = {"role": "tool", "tool_call_id": "call_1", "content": ["12"]}
    beside = {"reasoning_content": "Hmm.", "tool_calls": [call]}
    turns: list[dict[str, Any]] = [
        {"role": "system", "content": ["Be brief."]},
        {"role": "user", "content": ["When?"]},
        {"role": "assistant", "content": [], **beside},
        result,
        {"role": "assistant", "content": ["At 12."], "reasoning_content": "So."},
        {"role": "user", "content": ["And now?"]},
        {"role": "assistant", "content": [], **beside},
        result,
    ]
    how = {"reasoning_effort": "high", "enable_thinking": True, "tools": TOOLS}
    assert tokenization_of(name).encode_chat(turns, how).text == text


def test_a_text_beside_a_call_of_gemma_stands_before_it() -> None:
    """Behind the result, the model could not go on with its turn."""
    call = {"id": "call_1", "function": {"name": "now", "arguments": {}}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": ["When?"]},
        {
            "role": "assistant",
            "content": ["I look."],
            "reasoning_content": "Hmm.",
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": ["12"]},
    ]
    text = tokenization_of("gemma-4").encode_chat(turns, {"enable_thinking": True}).text
    assert text.endswith(f"<|turn>model\nI look.<turn|>\n{NEXT['gemma-4']}")


@pytest.mark.parametrize("effort", [None, "none", "high"])
def test_the_effort_decides_how_a_prompt_begins_and_ends(effort: str | None) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    if effort:
        body["reasoning_effort"] = effort
    rules = Rules(Settings(), is_strict=True)
    asked = {
        name: read_body(ChatRequest, body, rules.refuses).ask(tokenization_of(name), rules)
        for name in TEMPLATES
    }
    prompts = {name: str(TOKENIZERS[name].decode(it.prompts[0])) for name, it in asked.items()}
    told = {None: "medium", "none": "low"}.get(effort, effort)
    assert f"\nReasoning: {told}<|end|>" in prompts["gpt-oss"]
    thinks = effort == "high"
    assert ("<|think|>" in prompts["gemma-4"]) == thinks
    assert prompts["gemma-4"].endswith("<channel|>") == (not thinks)


def test_the_own_response_template_of_a_checkpoint_says_the_same_of_gemma() -> None:
    call = {"function": {"name": "{tool}", "arguments": "{content}"}}
    quote = {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]}
    calls = {
        "open_pattern": r"<\|tool_call>call:(?P<tool>\w+)",
        "close": "<tool_call|>",
        "repeats": True,
        "content": "json",
        "content_args": quote,
        "transform": call,
    }
    own = {
        "start_anchor": ["<|turn>model\n", "<tool_response|>"],
        "fields": {
            "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>"},
            "tool_calls": calls,
            "content": {"close": ["<turn|>", "<|tool_response>", "<eos>"]},
        },
    }
    chosen = choose(GEMMA_4, own, tool_parser="auto", reasoning_parser="auto")
    assert chosen == families()["gemma-4"]
    alone = choose("", own, tool_parser="auto", reasoning_parser="auto")
    assert alone is not None and alone.quote == '<|"|>'
    written, told = GEMMA["all kinds of values"]
    parser = MessageParser(alone, "", TOOLS)
    [delta] = [*parser.feed(written), *parser.finish()]
    assert delta.call and [(delta.call.name, json.loads(delta.call.arguments))] == told[2]


# --- Answers through each API

ANSWERS = {
    "gpt-oss": f"{THOUGHT}{END}{START}{CALL}",
    "gemma-4": f"{GEMMA_THOUGHT}{GEMMA_CALL}<|tool_response>",
}
BESIDE = {
    "gpt-oss": f"{THOUGHT}{END}{START}<|channel|>commentary<|message|>I look.{END}{START}{CALL}",
    "gemma-4": f"{GEMMA_THOUGHT}I look.{GEMMA_CALL}<|tool_response>",
}


def engine_of(name: str, text: str) -> Engine:
    return Engine(text, tokenizer=TOKENIZERS[name], family=name)


async def by_chat(engine: Engine, is_stream: bool) -> tuple[str, str, list[Any]]:
    """Return the thoughts, the text and the calls of an answer, whose results are then sent."""
    chat = openai_of(engine).chat.completions
    how: Any = {"model": "m", "tools": TOOLS, "reasoning_effort": "high"}
    if is_stream:
        async with chat.stream(messages=ASKED, **how) as stream:
            answer: Any = await stream.get_final_completion()
    else:
        answer = await chat.create(messages=ASKED, **how)
    [choice] = answer.choices
    turn = choice.message.model_dump(exclude_none=True, exclude={"parsed"})
    [call] = choice.message.tool_calls
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "12"}
    await chat.create(messages=[*ASKED, turn, result], **how)
    assert choice.finish_reason == "tool_calls"
    return turn["reasoning_content"], turn.get("content", ""), called([call])


async def by_responses(engine: Engine, is_stream: bool) -> tuple[str, str, list[Any]]:
    responses = openai_of(engine).responses
    tools: Any = [{"type": "function", **it["function"]} for it in TOOLS]
    how: Any = {"model": "m", "tools": tools, "reasoning": {"effort": "high"}}
    if is_stream:
        async with responses.stream(input=ASKED, **how) as stream:
            response: Any = await stream.get_final_response()
    else:
        response = await responses.create(input=ASKED, **how)
    thoughts, *_, call = response.output
    items: Any = [it.model_dump(exclude_none=True) for it in response.output]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "12"}
    await responses.create(input=[*ASKED, *items, result], **how)
    calls = [(call.name, json.loads(call.arguments))]
    return thoughts.content[0].text, response.output_text, calls


async def by_messages(engine: Engine, is_stream: bool) -> tuple[str, str, list[Any]]:
    messages = anthropic_of(engine).messages
    tools: Any = [{"name": "now", "input_schema": {"type": "object"}}]
    how: Any = {"model": "m", "max_tokens": 99, "tools": tools}
    how |= {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}
    if is_stream:
        async with messages.stream(messages=ASKED, **how) as stream:
            message: Any = await stream.get_final_message()
    else:
        message = await messages.create(messages=ASKED, **how)
    thoughts, *texts, call = message.content
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "12"}
    turn = {"role": "assistant", "content": message.content}
    again: Any = [*ASKED, turn, {"role": "user", "content": [result]}]
    await messages.create(messages=again, **how)
    assert message.stop_reason == "tool_use"
    return thoughts.thinking, "".join(it.text for it in texts), [(call.name, call.input)]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("by", [by_chat, by_responses, by_messages])
@pytest.mark.parametrize("name", TEMPLATES)
def test_each_api_has_the_parts_of_an_answer_and_takes_the_result(
    name: str, by: Any, is_stream: bool
) -> None:
    engine = engine_of(name, ANSWERS[name])
    assert asyncio.run(by(engine, is_stream)) == ("Hmm.", "", NOW)
    first, second = engine.prompts
    assert second == first + NEXT[name]
    beside = engine_of(name, BESIDE[name])
    assert asyncio.run(by(beside, is_stream)) == ("Hmm.", "I look.", NOW)
    first, second = beside.prompts
    assert second.startswith(first) and "I look." in second


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_tokens_that_end_an_answer_are_known_without_the_checkpoint(name: str) -> None:
    vocabulary = TOKENIZERS[name].get_vocab()
    ends = {vocabulary[it] for it in families()[name].ends}

    async def run(engine: Engine, **how: Any) -> set[int]:
        await openai_of(engine).chat.completions.create(model="m", messages=ASKED, **how)
        return {*engine.submitted[-1].params.stop_token_ids}

    engine = engine_of(name, ANSWERS[name])
    assert asyncio.run(run(engine)) == ends and len(ends) == 2
    assert asyncio.run(run(engine, extra_body={"stop_token_ids": [7]})) == {7, *ends}
    assert asyncio.run(run(engine, extra_body={"ignore_eos": True})) == set()


def test_special_tokens_within_a_call_are_read() -> None:
    written, told = GEMMA["all kinds of values"]
    tokenization = tokenization_of("gemma-4")
    prompt = tokenization.encode_chat([{"role": "user", "content": ["When?"]}], {})
    reading = tokenization.reading(prompt, TOOLS)
    reply = Reply(EngineRequest(params=SamplingParams()), TOKENIZERS["gemma-4"], reading)
    for token_id in TOKENIZERS["gemma-4"].encode(written, add_special_tokens=False):
        reply.read(TokenOutput(request_id="", token_ids=[token_id]))
    reply.read(TokenOutput(request_id="", token_ids=[], finish_reason="stop"))
    calls = [(it.name, json.loads(it.arguments)) for it in reply.calls]
    assert (reply.thoughts, reply.content, calls) == told


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_that_comes_back_has_the_tokens_that_were_sampled(name: str) -> None:
    answers = RememberedAnswers(1 << 20, time.time)
    memory = Memory(answers, ("tenant", None, None), b"")
    tokenization = tokenization_of(name).of("", None, memory)
    asked = [{"role": "user", "content": ["When?"]}]
    how = {"tools": TOOLS, "enable_thinking": True}
    prompt = tokenization.encode_chat(asked, how)
    reply = Reply(
        EngineRequest(params=SamplingParams()),
        TOKENIZERS[name],
        tokenization.reading(prompt, TOOLS),
    )
    ids = TOKENIZERS[name].encode(ANSWERS[name], add_special_tokens=False)
    reply.read(TokenOutput(request_id="", token_ids=ids, finish_reason="stop"))
    [call] = reply.calls
    function = {"name": call.name, "arguments": json.loads(call.arguments)}
    turn = {
        "role": "assistant",
        "content": [],
        "reasoning_content": reply.thoughts,
        "tool_calls": [{"id": "call_1", "function": function}],
    }
    result = {"role": "tool", "tool_call_id": "call_1", "content": ["12"]}
    again = tokenization.encode_chat([*asked, turn, result], how).token_ids
    assert again[: len(prompt.token_ids) + len(ids)] == [*prompt.token_ids, *ids]


# --- Grammars

STRICT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "array", "items": {"enum": ["Mon", 2]}},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


def forced(name: str, **function: Any) -> Matcher:
    """Return what holds a model to a call; the checkpoint names an end token of its own only."""
    tools = [{"type": "function", "function": {"name": "now", "parameters": STRICT} | function}]
    tokenization, tokenizer = tokenization_of(name), TOKENIZERS[name]
    prompt = tokenization.encode_chat([{"role": "user", "content": ["When?"]}], {})
    structure = Structure(tools=tools, choice="required", is_parallel=False)
    grammar = structure.grammar(tokenization.reading(prompt, tools))
    assert grammar is not None
    vocabulary = tokenizer.get_vocab()
    ends = {vocabulary["<eos>" if name == "gemma-4" else "<|return|>"]}
    return Matcher(Compiler(tokenizer, len(tokenizer), ends).compile(grammar))


def allowed(matcher: Matcher, name: str) -> set[str]:
    """Return the special tokens that may come next."""
    tokenizer = TOKENIZERS[name]
    mask = allowed_tokens([matcher], [()], len(tokenizer), torch.device("cpu"))[0]
    return {it for it in SPECIAL[name] if mask[tokenizer.get_vocab()[it]]}


def follow(matcher: Matcher, name: str, text: str) -> None:
    for token_id in TOKENIZERS[name].encode(text, add_special_tokens=False):
        matcher.accept(token_id)
        assert not matcher.fault, text


def test_a_forced_call_of_gemma_has_its_own_quotes() -> None:
    matcher = forced("gemma-4")
    assert allowed(matcher, "gemma-4") == {"<|tool_call>"}
    follow(matcher, "gemma-4", "<|tool_call>call:now{city:")
    assert allowed(matcher, "gemma-4") == {'<|"|>'}
    follow(matcher, "gemma-4", '<|"|>Say "Zürich"\n<|"|>,days:[')
    assert allowed(matcher, "gemma-4") == {'<|"|>'}
    follow(matcher, "gemma-4", '<|"|>Mon<|"|>,2]}')
    assert allowed(matcher, "gemma-4") == {"<tool_call|>"}
    follow(matcher, "gemma-4", "<tool_call|>")
    assert allowed(matcher, "gemma-4") == {"<eos>", "<turn|>", "<|tool_response>"}
    follow(matcher, "gemma-4", "<|tool_response>")


@pytest.mark.parametrize(
    "changes",
    [
        {"parameters": STRICT | {"properties": {"a, b:": {"type": "null"}}, "required": []}},
        {
            "parameters": STRICT | {"properties": {"a": {"minLength": 1}}, "required": ["a"]},
            "strict": True,
        },
    ],
)
def test_a_forced_call_of_gemma_is_json_where_only_that_fits_the_schema(
    changes: dict[str, Any],
) -> None:
    matcher = forced("gemma-4", **changes)
    follow(matcher, "gemma-4", '<|tool_call>call:now{"')
    assert '<|"|>' not in allowed(matcher, "gemma-4")


def test_a_constrained_answer_of_gpt_oss_ends_at_its_own_tokens() -> None:
    matcher = forced("gpt-oss")
    call = (
        '<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"city":"B","days":[]'
    )
    follow(matcher, "gpt-oss", call)
    assert allowed(matcher, "gpt-oss") == set()
    follow(matcher, "gpt-oss", "}")
    assert allowed(matcher, "gpt-oss") == {"<|call|>", "<|return|>"}
