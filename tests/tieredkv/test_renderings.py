"""One rendering finds the ends of tools and messages, and a second one those of texts.

The tokenizer has one token per byte, so the tokens before a mark are the text before it.
"""

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

from tests.tieredkv.test_anthropic_requests import SETTINGS
from tests.tieredkv.test_chat import LENGTHS, LLAMA_3, NO_EARLY_TEXT, TOOLS_BEHIND_SYSTEM
from tests.tieredkv.test_remembered import HERMES
from tests.tieredkv.test_special_tokens import FAMILIES
from tieredkv.engine.checkpoint import load_tokenizer
from tieredkv.fields import read
from tieredkv.server.anthropic_api import MessagesRequest
from tieredkv.server.asked import ApiRequest, Asked, Rules
from tieredkv.server.chat import Tokenization
from tieredkv.server.chat_template import ChatTemplate
from tieredkv.server.histories import TOOLS, Mark
from tieredkv.server.openai_api import ChatRequest
from tieredkv.server.responses_api import ResponsesRequest

TOOLS_IN_A_MACRO = """{%- macro listed(tools) %}{% for t in tools %}
{{- t.function.name + ' (' + t.function.parameters.type + '): ' + t.function.description + ';' }}
{%- endfor %}{% endmacro %}{{ listed(tools or []) }}
{%- for m in messages %}{{ '<' + m.content + '>' }}{% endfor %}"""
"""A template that writes the tools in a macro, whose output is kept in a buffer."""

TOOLS_AS_A_LIST = """{% if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}{{ '<' + m.content + '>' }}{% endfor %}"""

POPPED = """{%- set begun = messages[0].content | trim %}{{ '[' + begun + ']' }}
{%- for t in tools or [] %}{{ t | tojson }}{% endfor %}{% set rest = messages[1:] %}
{%- for m in rest %}{{ '<' + m.role + '>' + m.content | trim + '</>' }}
{%- for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}
{%- if loop.last %}.{% endif %}{% endfor %}"""
"""A template that writes the system message before its loop, and looks ahead in it."""

PLAIN = {
    "small model's": None,
    "llama": LLAMA_3,
    "hermes": HERMES,
    "popped": POPPED,
    "tools behind system": TOOLS_BEHIND_SYSTEM,
    "lengths": LENGTHS,
    "no early text": NO_EARLY_TEXT,
    **{name: family.template for name, family in FAMILIES.items()},
}
ODD = {"a macro": TOOLS_IN_A_MACRO, "a list": TOOLS_AS_A_LIST}


def tokenization_of(template: str | None) -> Tokenization:
    tokenizer = load_tokenizer("tiny-random")
    tokenizer.chat_template = template or tokenizer.chat_template
    made = Tokenization(tokenizer)
    made.try_template()
    return made


class Counted:
    """Counts renderings while it is used as a context."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num, render = 0, ChatTemplate.render

        def counted(*arguments: Any, **variables: Any) -> str:
            self.num += 1
            return render(*arguments, **variables)

        monkeypatch.setattr(ChatTemplate, "render", counted)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def tool(name: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {f"of {name}": {"type": "string"}}}
    function = {"name": name, "description": f"Tells {name}.", "parameters": schema}
    return {"type": "function", "function": function}


OFFERED = [tool(name) for name in ("one", "two", "three")]


def call(id: str) -> dict[str, Any]:
    function = {"name": "one", "arguments": {"of one": f"Argument {id}"}}
    return {"id": id, "type": "function", "function": function}


TALK: list[dict[str, Any]] = [
    {"role": "system", "content": ["You help.", "Be brief."]},
    {"role": "user", "content": ["First, look."]},
    {"role": "assistant", "content": ["Let me see."], "tool_calls": [call("call_1")]},
    {"role": "tool", "tool_call_id": "call_1", "content": ["It rains."]},
    {"role": "assistant", "content": ["So it is wet."]},
    {"role": "user", "content": ["And then?", "Tell me."]},
]
PARTS = [(i, j) for i, it in enumerate(TALK) for j in range(len(it["content"]))]
MESSAGES = [(i, -1) for i in range(len(TALK))]


def with_another(tokenization: Tokenization, index: int) -> str:
    """Return the rendered conversation with another tool in the place of one."""
    other = {"type": "function", "function": {"name": "\x7f", "description": "", "parameters": {}}}
    tools = [*OFFERED[:index], other, *OFFERED[index + 1 :]]
    return tokenization.encode_chat(TALK, {"tools": tools}).text


def heads(tokenization: Tokenization, marks: list[Mark], **arguments: Any) -> list[str]:
    encoded = tokenization.encode_chat(TALK, arguments, marks)
    assert encoded[:1] == tokenization.encode_chat(TALK, arguments)[:1]
    return [str(tokenization.tokenizer.decode(encoded.token_ids[:end])) for end in encoded.ends]


@pytest.mark.parametrize(
    "name", [*("small model's", "llama", "hermes", "tools behind system", "lengths"), "mistral"]
)
def test_messages_end_where_the_rendering_of_the_conversation_up_to_them_does(name: str) -> None:
    tokenization = tokenization_of(PLAIN[name])
    arguments = {"tools": OFFERED, "add_generation_prompt": False}
    expected = [tokenization.encode_chat(TALK[:i], arguments).text for i in range(1, 7)]
    assert heads(tokenization, [*MESSAGES], tools=OFFERED) == expected


def test_messages_end_where_the_next_begins_in_a_template_that_looks_ahead() -> None:
    found = heads(tokenization_of(POPPED), [*MESSAGES], tools=OFFERED[:0])
    assert found[:2] == ["[You help.\nBe brief.]", f"{found[0]}<user>First, look.</>"]
    assert found[-1].endswith("</>.")
    assert [len(it) for it in found] == sorted({len(it) for it in found})


@pytest.mark.parametrize("name", sorted(PLAIN.keys() - {"lengths"}))
def test_a_text_ends_behind_its_last_letter(name: str) -> None:
    tokenization = tokenization_of(PLAIN[name])
    text = tokenization.encode_chat(TALK, {"tools": OFFERED}).text
    found = heads(tokenization, PARTS, tools=OFFERED)
    for (i, j), head in zip(PARTS, found, strict=True):
        part = TALK[i]["content"][j]
        assert text.count(part) == 1 and head == text[: text.index(part) + len(part)]


@pytest.mark.parametrize("name", ODD)
def test_a_tool_that_no_loop_writes_to_the_output_ends_with_the_last_of_its_texts(
    name: str,
) -> None:
    tokenization = tokenization_of(ODD[name])
    found = heads(tokenization, [(TOOLS, i) for i in range(3)], tools=OFFERED)
    assert [it[-10:] for it in found] == ["Tells one.", "Tells two.", "lls three."]


@pytest.mark.parametrize("name", PLAIN)
def test_a_tool_ends_where_the_text_ends_that_changes_with_it(name: str) -> None:
    tokenization = tokenization_of(PLAIN[name])
    text = tokenization.encode_chat(TALK, {"tools": OFFERED}).text
    if "Tells one." not in text:
        assert heads(tokenization, [(TOOLS, 0)], tools=OFFERED)[0] in ("", text)
        return
    found = heads(tokenization, [(TOOLS, i) for i in range(3)], tools=OFFERED)
    for index, head in enumerate(found):
        other, length = with_another(tokenization, index), 0
        while other[-length - 1 :] == text[-length - 1 :]:
            length += 1
        expected = text[: len(text) - length]
        assert head.rstrip('}]"; \n') == expected.rstrip('}]"; \n')


def test_a_mark_costs_one_more_rendering_and_marks_of_tools_and_messages_none(
    counted: Counted,
) -> None:
    tokenization = tokenization_of(HERMES)
    counted.num = 0
    for marks, num_renderings in (
        ([], 1),
        ([*MESSAGES, (TOOLS, 0), (TOOLS, 2)], 1),
        ([*PARTS, *MESSAGES, (TOOLS, 0), (TOOLS, 1), (TOOLS, 2)], 2),
    ):
        before = counted.num
        tokenization.encode_chat(TALK, {"tools": OFFERED}, marks)
        assert counted.num == before + num_renderings


def test_texts_that_may_become_a_part_of_a_special_token_cost_no_third_rendering(
    counted: Counted,
) -> None:
    tokenization = tokenization_of(HERMES)
    talk = [*TALK, {"role": "user", "content": ["im_start", "> end <"]}]
    counted.num = 0
    encoded = tokenization.encode_chat(talk, {"tools": OFFERED}, [*PARTS, (6, 0), (6, 1)])
    assert counted.num == 2
    last = [str(tokenization.tokenizer.decode(encoded.token_ids[:it])) for it in encoded.ends[-2:]]
    assert [it[-9:] for it in last] == ["\nim_start", "t\n> end <"]


# --- Of requests

MARK = {"cache_control": {"type": "ephemeral"}}
BREAKPOINT = {"prompt_cache_breakpoint": {"mode": "explicit"}}


def messages_body(num_turns: int) -> dict[str, Any]:
    turns: list[dict[str, Any]] = [{"role": "user", "content": "First, look."}]
    for i in range(num_turns):
        used = {"type": "tool_use", "id": f"t{i}", "name": "one", "input": {"of one": f"In {i}"}}
        result = {"type": "tool_result", "tool_use_id": f"t{i}", "content": f"Out {i}"}
        is_marked = MARK if i >= num_turns - 2 else {}
        turns.append({"role": "assistant", "content": [used]})
        turns.append({"role": "user", "content": [{**result, **is_marked}]})
    tools: list[dict[str, Any]] = [
        {"name": f"tool{i}", "description": f"Tool {i}.", "input_schema": {"type": "object"}}
        for i in range(20)
    ]
    tools[-1] |= MARK
    system = [{"type": "text", "text": "You help.", **MARK}]
    return {"max_tokens": 4, "messages": turns, "tools": tools, "system": system}


def chat_body(num_turns: int) -> dict[str, Any]:
    parts = [{"type": "text", "text": "You help.", **BREAKPOINT}]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": parts},
        {"role": "user", "content": "First, look."},
    ]
    for i in range(num_turns):
        function = {"name": "one", "arguments": json.dumps({"of one": f"In {i}"})}
        calls = [{"id": f"t{i}", "type": "function", "function": function}]
        part = {"type": "text", "text": f"Out {i}", **(BREAKPOINT if i >= num_turns - 2 else {})}
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": f"t{i}", "content": [part]})
    return {"messages": messages, "tools": [tool(f"tool{i}") for i in range(20)]}


def responses_body(num_turns: int) -> dict[str, Any]:
    parts = [{"type": "input_text", "text": "First, look.", **BREAKPOINT}]
    items: list[dict[str, Any]] = [{"role": "user", "content": parts}]
    for i in range(num_turns):
        arguments = json.dumps({"of one": f"In {i}"})
        call = {"type": "function_call", "call_id": f"t{i}", "name": "one", "arguments": arguments}
        part: dict[str, Any] = {"type": "input_text", "text": f"Out {i}"}
        part |= BREAKPOINT if i >= num_turns - 2 else {}
        items.append(call)
        items.append({"type": "function_call_output", "call_id": f"t{i}", "output": [part]})
    tools = [{"type": "function", **tool(f"tool{i}")["function"]} for i in range(20)]
    return {"input": items, "instructions": "You help.", "tools": tools}


APIS: dict[str, tuple[type[ApiRequest], Any]] = {
    "chat": (ChatRequest, chat_body),
    "messages": (MessagesRequest, messages_body),
    "responses": (ResponsesRequest, responses_body),
}


def ask(tokenization: Tokenization, api: str, num_turns: int, lookback: int) -> Asked:
    rules = Rules(replace(SETTINGS, cache_lookback=lookback))
    kind, body = APIS[api]
    request = read(kind, {"model": "m", **body(num_turns)}, rules.refuses).cleaned(rules)
    request.check(rules)
    return request.ask(tokenization, rules)


@pytest.mark.parametrize("lookback", [0, 20])
@pytest.mark.parametrize("name", [*PLAIN, *ODD])
@pytest.mark.parametrize("api", APIS)
def test_a_request_with_many_marks_takes_two_renderings(
    counted: Counted, api: str, name: str, lookback: int
) -> None:
    tokenization = tokenization_of({**PLAIN, **ODD}[name])
    counted.num = 0
    claims = ask(tokenization, api, 30, lookback).plan.claims
    assert counted.num <= 2
    assert len(claims) >= 3


@pytest.mark.parametrize("name", ["small model's", "hermes", "chatml", "popped"])
@pytest.mark.parametrize("api", APIS)
def test_claims_end_behind_the_texts_that_are_marked(api: str, name: str) -> None:
    tokenization = tokenization_of(PLAIN[name])
    asked = ask(tokenization, api, 30, 20)
    ends = [it.end_token for it in asked.plan.claims if it.end_token < len(asked.prompts[0])]
    found = [str(tokenization.tokenizer.decode(asked.prompts[0][:end])) for end in ends]
    told = ["Out 28", "Out 29"]
    told.insert(0, "First, look." if api == "responses" else "You help.")
    marked = [it for it in found if it.endswith(tuple(told))]
    assert [it[-len(what) :] for it, what in zip(marked, told, strict=True)] == told
    assert len(found) - len(marked) == (api == "messages"), "the last tool"


def test_places_to_read_at_are_those_of_the_blocks_before_a_mark() -> None:
    tokenization = tokenization_of(None)
    asked = ask(tokenization, "messages", 30, 20)
    ends = asked.plan.read_ends
    assert ends is not None
    found = [str(tokenization.tokenizer.decode(asked.prompts[0][:end])) for end in ends]
    outs = [it[-6:] for it in found if it[-6:].startswith("Out ")]
    assert outs == [f"Out {i}" for i in range(19, 30)]
    for i, j in itertools.pairwise(ends):
        assert i < j
