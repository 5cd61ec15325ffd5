"""What a client sends with each turn ends no session, even if the server does not know it."""

import json
import logging
from typing import Any

import httpx
import pytest

from tests.golden import told
from tests.tieredkv.test_documented_examples import Served, served
from tests.tieredkv.test_histories import TEMPLATES
from tests.tieredkv.test_remembered import made_tokenizer
from tests.tieredkv.test_special_tokens import FAMILIES, tokenizer_of
from tieredkv.config import Settings
from tieredkv.errors import RequestError
from tieredkv.fields import read
from tieredkv.server.anthropic_api import CountTokensRequest, MessagesRequest
from tieredkv.server.asked import ApiRequest, Rules
from tieredkv.server.chat import Tokenization
from tieredkv.server.hosted import MAX_UNKNOWN_BYTES
from tieredkv.server.ignored import MAX_TOLD
from tieredkv.server.openai_api import ChatRequest
from tieredkv.server.responses_api import ResponsesRequest

__all__ = ["served"]

USER: Any = {"role": "user", "content": "hi"}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
RULES = Rules(Settings())

# --- Arguments that are no JSON object

CUT = '{"value": "'
ARGUMENTS: list[tuple[Any, dict[str, Any]]] = [
    (CUT, {"arguments": CUT}),
    ("", {}),
    (None, {}),
    ("null", {}),
    ("NaN", {"arguments": "NaN"}),
    ('{"value": NaN}', {"arguments": '{"value": NaN}'}),
    ("[1, 2]", {"arguments": [1, 2]}),
    ("5", {"arguments": 5}),
    ([1, 2], {"arguments": [1, 2]}),
    (0, {"arguments": 0}),
    ('"a"', {"arguments": "a"}),
    ("rm -rf", {"arguments": "rm -rf"}),
    ('{"value": 1} {"value": 2}', {"arguments": '{"value": 1} {"value": 2}'}),
    ("[" * 99 + "]" * 99, {"arguments": "[" * 99 + "]" * 99}),
    ('{"a": "\\ud83d"}', {"a": "\N{REPLACEMENT CHARACTER}"}),
    ('{"value": 1}', {"value": 1}),
]


def requests_of(arguments: Any) -> list[tuple[type[ApiRequest], dict[str, Any]]]:
    """Return a conversation with a call in the form of each API."""
    function = {"name": "look", "arguments": arguments}
    call = {"id": "call_1", "type": "function", "function": function}
    chat = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    chat.append({"role": "tool", "tool_call_id": "call_1", "content": "seen"})
    items = [USER, {"type": "function_call", "call_id": "call_1", **function}]
    items.append({"type": "function_call_output", "call_id": "call_1", "output": "seen"})
    use = {"type": "tool_use", "id": "call_1", "name": "look", "input": arguments}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "seen"}
    turns = [USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return [
        (ChatRequest, {"messages": chat}),
        (ResponsesRequest, {"input": items}),
        (MessagesRequest, {"messages": turns, "max_tokens": 1}),
        (CountTokensRequest, {"messages": turns}),
    ]


def prompt_of(tokenization: Tokenization, kind: type[ApiRequest], body: dict[str, Any]) -> str:
    request: Any = read(kind, {"model": "m", **body}, RULES.refuses).cleaned(RULES)
    request.check(RULES)
    if isinstance(request, CountTokensRequest):
        return request.encode(tokenization, is_bounded=False).text
    return str(tokenization.tokenizer.decode(request.ask(tokenization, RULES).prompts[0]))


@pytest.mark.parametrize("name", ["as Qwen3-Coder", "as DeepSeek-V3.1", "as Qwen3"])
@pytest.mark.parametrize(("arguments", "shown"), ARGUMENTS, ids=range(len(ARGUMENTS)))
def test_arguments_that_are_no_object_are_shown_alike_by_all_apis(
    arguments: Any, shown: dict[str, Any], name: str
) -> None:
    tokenization = Tokenization(made_tokenizer(TEMPLATES[name][0]))
    prompts = {prompt_of(tokenization, *it) for it in requests_of(arguments)}
    expected = {prompt_of(tokenization, *it) for it in requests_of(json.dumps(shown))[:2]}
    assert prompts == expected and len(prompts) == 1


def test_a_call_of_responses_that_is_continued_is_shown_as_before() -> None:
    made = Served()
    call = {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": CUT}
    output = {"type": "function_call_output", "call_id": "call_1", "output": "seen"}
    first = made.ask(RESPONSES, {"input": [USER, call, output]})
    prompt = made.prompt
    made.ask(RESPONSES, {"input": "On.", "previous_response_id": first["id"]})
    assert made.prompt.startswith(prompt)
    made.api.close()


def test_a_call_with_an_empty_name_or_id_goes_on(served: Served) -> None:
    function = {"name": "", "arguments": "{}"}
    call = {"id": "", "type": "function", "function": function}
    chat = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    served.ask(CHAT, {"messages": [*chat, {"role": "tool", "tool_call_id": "", "content": "a"}]})
    items = [USER, {"type": "function_call", "call_id": "c", **function}, USER]
    served.ask(RESPONSES, {"input": items})


@pytest.mark.parametrize(
    ("given", "told"), [("start", "start"), ({"b": [1]}, '{"b":[1]}'), (None, ""), (5, "5")]
)
def test_the_text_of_a_custom_call_may_be_any_value(served: Served, given: Any, told: str) -> None:
    call = {"type": "custom_tool_call", "call_id": "c", "name": "run", "input": given}
    served.ask(RESPONSES, {"input": [USER, call, USER]})
    assert json.dumps({"input": told}) in served.prompt


# --- Types that are not known

PART = {"type": "future_part", "beta": [1, {"d": 4, "c": 3}], "alpha": "<|im_end|>"}
TOLD = '[future_part] {"alpha":"<|im_end|>","beta":[1,{"c":3,"d":4}]}'
CALL = {**PART, "type": "future_call", "id": "x_1"}
CALL_TOLD = TOLD.replace("_part", "_call")


def turn(role: str, *content: Any) -> dict[str, Any]:
    return {"role": role, "content": [*content]}


def result(*content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t", "content": [*content]}


USE = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
TEXT = {"type": "text", "text": "hi"}
DOCUMENT = {"type": "document", "source": {"type": "content", "content": [PART]}}
CALLED = {"role": "assistant", "content": "a", "tool_calls": [CALL]}
UNKNOWN: list[tuple[str, dict[str, Any], str, list[str]]] = [
    (CHAT, {"messages": [turn("user", PART)]}, TOLD, ["messages[0].content[0].type=future_part"]),
    (
        CHAT,
        {"messages": [USER, turn("assistant", TEXT, PART), USER]},
        TOLD,
        ["messages[1].content[1].type=future_part"],
    ),
    (CHAT, {"messages": [USER, CALLED]}, CALL_TOLD, ["messages[1].tool_calls[0].type=future_call"]),
    (CHAT, {"messages": [turn("critic", TEXT)]}, "hi", ["messages[0].role=critic"]),
    (
        CHAT,
        {"messages": [USER, {"role": "finder", "beta": [2], "alpha": 1}]},
        '[finder] {"alpha":1,"beta":[2]}',
        ["messages[1].role=finder"],
    ),
    (RESPONSES, {"input": [USER, CALL, USER]}, CALL_TOLD, ["input[1].type=future_call"]),
    (RESPONSES, {"input": [turn("user", PART)]}, TOLD, ["input[0].content[0].type=future_part"]),
    (
        RESPONSES,
        {
            "input": [
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": [PART]},
            ]
        },
        TOLD,
        ["input[1].output[0].type=future_part"],
    ),
    (
        RESPONSES,
        {"input": [turn("tool", PART)]},
        TOLD,
        ["input[0].role=tool", "input[0].content[0].type=future_part"],
    ),
    (
        MESSAGES,
        {"messages": [turn("user", PART)]},
        TOLD,
        ["messages[0].content[0].type=future_part"],
    ),
    (
        MESSAGES,
        {"messages": [USER, turn("assistant", PART, USE), turn("user", result(PART))]},
        TOLD,
        ["messages[1].content[0].type=future_part",
         "messages[2].content[0].content[0].type=future_part"],
    ),
    (MESSAGES, {"messages": [USER], "system": [PART]}, TOLD, ["system[0].type=future_part"]),
    (
        MESSAGES,
        {"messages": [turn("user", DOCUMENT)]},
        TOLD,
        ["messages[0].content[0].source.content[0].type=future_part"],
    ),
    (
        MESSAGES,
        {"messages": [turn("user", {"type": "document", "source": {"type": "future"}})]},
        "[A document was here.",
        ["messages[0].content[0].source.type=future"],
    ),
    (MESSAGES, {"messages": [turn("critic", TEXT)]}, "hi", ["messages[0].role=critic"]),
    (CHAT, {"messages": [USER], "service_tier": "future"}, "hi", ["service_tier=future"]),
    (CHAT, {"messages": [USER], "verbosity": "future"}, "hi", ["verbosity=future"]),
    (CHAT, {"messages": [USER], "reasoning_effort": "x"}, "hi", ["reasoning_effort=x"]),
    (RESPONSES, {"input": "hi", "reasoning": {"effort": "x"}}, "hi", ["reasoning.effort=x"]),
    (RESPONSES, {"input": "hi", "text": {"verbosity": "x"}}, "hi", ["text.verbosity=x"]),
    (RESPONSES, {"input": "hi", "truncation": "x"}, "hi", ["truncation=x"]),
    (MESSAGES, {"messages": [USER], "thinking": {"type": "auto"}}, "hi", ["thinking.type=auto"]),
    (
        MESSAGES,
        {"messages": [USER], "output_config": {"effort": "x"}},
        "hi",
        ["output_config.effort=x"],
    ),
    ("/v1/completions", {"prompt": "hi", "service_tier": "x"}, "hi", ["service_tier=x"]),
]  # fmt: skip


def body_of(path: str, body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "max_tokens": 9} if path == MESSAGES else body


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize(
    ("path", "body", "shown", "named"), UNKNOWN, ids=[f"{it[0]}-{it[3][0]}" for it in UNKNOWN]
)
def test_what_is_not_known_is_told_in_a_text_and_named_in_the_answer(
    served: Served, path: str, body: dict[str, Any], shown: str, named: list[str]
) -> None:
    answer = served.ask(path, body_of(path, body))
    assert answer["tieredkv"] == {"ignored": named}
    prompt = served.prompt
    assert shown in prompt
    *_, last = events_of(served.send(path, {**body_of(path, body), "stream": True}))
    assert served.prompt == prompt
    assert last.get("response", last)["tieredkv"] == {"ignored": named}
    if path == CHAT:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *_, last = events_of(served.send(path, {**body, **options}))
        assert last["usage"] and last["tieredkv"] == {"ignored": named}


@pytest.mark.parametrize(("body", "named"), [(it[1], it[3]) for it in UNKNOWN if it[0] == MESSAGES])
def test_the_prompt_of_messages_is_counted_as_it_is_answered(
    served: Served, body: dict[str, Any], named: list[str]
) -> None:
    usage = served.ask(MESSAGES, body_of(MESSAGES, body))["usage"]
    counted = served.ask(f"{MESSAGES}/count_tokens", body)
    assert counted == {"input_tokens": usage["input_tokens"], "tieredkv": {"ignored": named}}


def test_an_answer_without_unknown_values_names_none(served: Served) -> None:
    for path, body in ((CHAT, {"messages": [USER]}), (RESPONSES, {"input": [USER]})):
        assert "tieredkv" not in served.ask(path, body)
    assert "tieredkv" not in served.ask(MESSAGES, {"messages": [USER], "max_tokens": 9})


def test_a_conversation_goes_on_with_what_is_not_known() -> None:
    made = Served()
    first = made.ask(RESPONSES, {"input": [turn("user", PART), CALL, turn("user", PART)]})
    prompt = made.prompt
    assert (prompt.count(TOLD), prompt.count(CALL_TOLD)) == (2, 1)
    answer = made.ask(RESPONSES, {"input": "On.", "previous_response_id": first["id"]})
    assert made.prompt.startswith(prompt)
    assert "tieredkv" not in answer, "this request has nothing that is not known"
    listed = made.send(f"{RESPONSES}/{first['id']}/input_items?order=asc", method="GET").json()
    assert [item["type"] for item in listed["data"]] == ["message", "future_call", "message"]
    assert {**CALL, **listed["data"][1]} == listed["data"][1]
    assert listed["data"][0]["content"] == [PART]
    made.api.close()


def test_a_long_note_is_cut_and_is_the_same_for_each_order_of_keys() -> None:
    tokenization = Tokenization(made_tokenizer("{{ messages[0].content }}"))
    long = {"type": "future_part", "z": 1, "b": "\N{GRINNING FACE}" * 3000, "a": 1}
    prompts = []
    for part in (long, dict(reversed(long.items()))):
        prompts.append(prompt_of(tokenization, ChatRequest, {"messages": [turn("user", part)]}))
    assert prompts[0] == prompts[1]
    assert prompts[0].startswith('[future_part] {"a":1,"b":"')
    assert MAX_UNKNOWN_BYTES - 4 < len(prompts[0].encode()) <= MAX_UNKNOWN_BYTES


def test_so_many_values_are_named_and_no_more(served: Served) -> None:
    parts = [{"type": "x" * 1000}] + [{"type": "x"}] * (MAX_TOLD + 9)
    first, *others = served.ask(CHAT, {"messages": [turn("user", *parts)]})["tieredkv"]["ignored"]
    assert first == f"messages[0].content[0].type={'x' * 200}"
    assert others == [f"messages[0].content[{i}].type=x" for i in range(1, MAX_TOLD)]


def test_the_log_names_each_kind_once_and_on_one_line(caplog: pytest.LogCaptureFixture) -> None:
    made = Served()
    with caplog.at_level(logging.INFO, "tieredkv.server.ignored"):
        for _ in range(2):
            made.ask(CHAT, {"messages": [turn("user", PART, {"type": "a\nb\x1b"}, PART)]})
    assert len(caplog.messages) == 2
    for line in caplog.messages:
        told(line)
    made.api.close()


@pytest.mark.parametrize("is_strict", [False, True])
def test_a_strict_server_takes_unknown_values_and_no_unknown_field(is_strict: bool) -> None:
    rules = Rules(Settings(), is_strict=is_strict)
    body = {"model": "m", "messages": [turn("user", PART)], "service_tier": "future"}
    read(ChatRequest, body, rules.refuses).check(rules)
    turns = {"model": "m", "max_tokens": 1, "messages": [turn("user", PART)]}
    read(MessagesRequest, turns, rules.refuses).check(rules)
    for kind, fields in ((ChatRequest, body), (MessagesRequest, turns)):
        if is_strict:
            with pytest.raises(RequestError) as error:
                read(kind, {**fields, "future": 1}, rules.refuses)
            assert (error.value.code, error.value.param) == ("unknown_parameter", "future")
        else:
            read(kind, {**fields, "future": 1}, rules.refuses)


# --- Special tokens in notes are text

HOSTED = {"type": "mcp_call", "name": "look", "output": "<|im_end|></think>seen"}


@pytest.mark.parametrize("family", ["chatml", "deepseek", "harmony"])
@pytest.mark.parametrize("item", [{**HOSTED, "type": "future_call"}, HOSTED])
def test_special_tokens_in_a_note_are_text_and_templates_do_not_find_them(
    item: dict[str, Any], family: str
) -> None:
    tokenizer = tokenizer_of(FAMILIES[family])
    special = FAMILIES[family].special
    tokens = "".join(special[1:]) + "</think><|channel|>analysis<|message|>"
    item = {**item, "output": f"a{tokens}seen"}
    tokenization = Tokenization(tokenizer)
    request = read(ResponsesRequest, {"model": "m", "input": [USER, item, USER]})
    plain = read(ResponsesRequest, {"model": "m", "input": [USER, {"type": item["type"]}, USER]})
    ids, plain_ids = (it.ask(tokenization, RULES).prompts[0] for it in (request, plain))
    assert f'"output":"a{tokens}seen"' in tokenizer.decode(ids)
    special_ids = {tokenizer.convert_tokens_to_ids(it) for it in special}

    def controls(told: list[int]) -> list[int]:
        return [each for each in told if each in special_ids]

    assert controls(ids) == controls(plain_ids)


def test_special_tokens_in_arguments_that_are_no_json_are_text() -> None:
    template = """{% for m in messages %}<|im_start|>{{ m.content.split('<|im_end|>')[-1] }}
{%- for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"""
    tokenizer = made_tokenizer(template)
    tokenization = Tokenization(tokenizer)
    special = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for kind, body in requests_of('{"value": "<|im_end|>')[:2]:
        request: Any = read(kind, {"model": "m", **body})
        ids = request.ask(tokenization, RULES).prompts[0]
        assert special not in ids
        assert "<|im_end|>" in tokenizer.decode(ids)


# --- Efforts

EFFORTS = [
    ("very_high", "high"), ("ultrahigh", "high"), ("maximum", "high"), ("minimum", "low"),
    ("hihg", "high"), ("lowest", "low"), ("medium", "medium"), ("whatever", None),
]  # fmt: skip


@pytest.mark.parametrize(("given", "told"), EFFORTS)
def test_an_unknown_effort_becomes_the_nearest(given: str, told: str | None) -> None:
    template = "{{ messages[0].content }}|{{ reasoning_effort }}|{{ enable_thinking }}"
    tokenization = Tokenization(made_tokenizer(template))
    effort = {"effort": given}
    bodies: list[tuple[type[ApiRequest], dict[str, Any]]] = [
        (ChatRequest, {"messages": [USER], "reasoning_effort": given}),
        (ResponsesRequest, {"input": [USER], "reasoning": effort}),
        (CountTokensRequest, {"messages": [USER], "output_config": effort}),
    ]
    for kind, body in bodies:
        prompt = prompt_of(tokenization, kind, body)
        assert prompt.split("|")[1] == (told or "")
    thoughts = prompt_of(tokenization, *bodies[0]).split("|")[2]
    assert thoughts == ("True" if told else "")


@pytest.mark.parametrize(
    ("thinking", "told"),
    [("auto", ""), ("enabled", "True"), ("disabled", "False"), ("adaptive", "True")],
)
def test_an_unknown_type_of_thinking_leaves_it_to_the_model(thinking: str, told: str) -> None:
    tokenization = Tokenization(made_tokenizer("{{ messages[0].content }}|{{ enable_thinking }}"))
    body = {"messages": [USER], "thinking": {"type": thinking}}
    assert prompt_of(tokenization, CountTokensRequest, body) == f"hi|{told}"


# --- What is still refused

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [USER], "lora": "a"}, "lora"),
    (CHAT, {"messages": [USER], "prompt_embeds": "a"}, "prompt_embeds"),
    (CHAT, {"messages": [USER], "response_format": {"type": "future"}}, "response_format.type"),
    (CHAT, {"messages": [USER], "tool_choice": {"type": "future"}}, "tool_choice"),
    (CHAT, {"messages": [USER], "prompt_cache_retention": "8d"}, "prompt_cache_retention"),
    (CHAT, {"messages": [turn("user", {"type": 5})]}, "messages[0].content[0].type"),
    (CHAT, {"messages": [turn("user", {"text": "a"})]}, "messages[0].content[0].type"),
    (CHAT, {"messages": [{"role": "", "content": "a"}]}, "messages[0].role"),
    (RESPONSES, {"input": [{"type": "", "x": 1}]}, "input[0].type"),
    (RESPONSES, {"input": [5]}, "input[0]"),
]


@pytest.mark.parametrize(("path", "body", "param"), REFUSED)
def test_what_would_give_a_wrong_answer_is_refused(
    served: Served, path: str, body: dict[str, Any], param: str
) -> None:
    answer = served.send(path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_tool_of_an_unknown_type_in_a_namespace_is_left_out(served: Served) -> None:
    tools = [{"type": "future_tool"}, {"type": "function", "name": "look"}]
    space = {"type": "namespace", "name": "n", "tools": tools}
    answer = served.ask(RESPONSES, {"input": "hi", "tools": [space]})
    assert answer["tieredkv"] == {"left_out_tools": ["future_tool"]}
    assert "n__look" in served.prompt and "future_tool" not in served.prompt
