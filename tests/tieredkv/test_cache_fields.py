"""The caching fields of all dialects: what they ask for, and that each reader reads the same."""

from dataclasses import replace
from typing import Any

import pytest

from tests.golden import refused
from tieredkv.cache_fields import breakpoints_of
from tieredkv.config import Settings
from tieredkv.errors import RequestError
from tieredkv.fields import parse_body, read
from tieredkv.retention import IN_MEMORY, TWENTY_FOUR_HOURS, RetentionPolicy
from tieredkv.server.anthropic_api import MessagesRequest
from tieredkv.server.asked import WHOLE, ApiRequest, Asked, Rules
from tieredkv.server.chat import Tokenization
from tieredkv.server.openai_api import ChatRequest, CompletionRequest
from tieredkv.server.responses_api import ResponsesRequest
from tieredkv.types import Tier

Json = dict[str, Any]
DISK, NO_DISK = Rules(Settings(disk_dir="kv")), Rules(Settings())
USER: Json = {"role": "user", "content": "hello"}
BODIES: dict[type[ApiRequest], Json] = {
    ChatRequest: {"messages": [USER]},
    CompletionRequest: {"prompt": "hello"},
    ResponsesRequest: {"input": "hello"},
    MessagesRequest: {"messages": [USER], "max_tokens": 4},
}
OPENAI = [kind for kind in BODIES if kind is not MessagesRequest]


def ask(
    kind: type[ApiRequest], tokenization: Tokenization, rules: Rules = DISK, **fields: Any
) -> Asked:
    """Return what a body asks for."""
    request = read(kind, {"model": "m", **BODIES[kind], **fields}, rules.refuses).cleaned(rules)
    request.check(rules)
    return request.ask(tokenization, rules)


def claims(asked: Asked) -> list[tuple[str, float]]:
    """Return the policy and the pin of each claim, in the order of their ends."""
    made = sorted(asked.plan.claims, key=lambda claim: claim.end_token)
    return [(claim.retention, claim.pin_s) for claim in made]


def control(ttl: str | None = None) -> Json:
    """Return a breakpoint as Anthropic's API has it."""
    return {"cache_control": {"type": "ephemeral", **({"ttl": ttl} if ttl else {})}}


def text(words: str, ttl: str | None = None, kind: str = "text") -> Json:
    """Return a part with such a breakpoint."""
    return {"type": kind, "text": words, **control(ttl)}


# --- durations ----------------------------------------------------------------------------------

DURATIONS = [
    ("5m", "in_memory", 300),
    ("30m", "in_memory", 1800),
    ("1h", "in_memory", 3600),
    ("60 min", None, None),
    ("90s", "in_memory", 90),
    ("61m", "24h", 3660),
    ("12h", "24h", 43200),
    ("24h", "24h", 86400),
    ("1d", "24h", 86400),
    ("25h", None, None),
]


@pytest.mark.parametrize("kind", OPENAI)
@pytest.mark.parametrize(("ttl", "policy", "pin_s"), DURATIONS)
def test_the_options_take_any_duration_that_a_policy_covers(
    tokenization: Tokenization,
    kind: type[ApiRequest],
    ttl: str,
    policy: str | None,
    pin_s: float | None,
) -> None:
    for fields in ({"prompt_cache_options": {"ttl": ttl}}, control(ttl)):
        if policy is None:
            with pytest.raises(RequestError) as caught:
                ask(kind, tokenization, **fields)
            assert caught.value.param == f"{next(iter(fields))}.ttl"
            assert caught.value.code == "invalid_value"
            continue
        asked = ask(kind, tokenization, **fields)
        assert [(it.end_token, it.retention, it.pin_s) for it in asked.plan.claims] == [
            (WHOLE, policy, pin_s)
        ]
        assert asked.plan.cacheable_tokens is None


@pytest.mark.parametrize(
    ("ttl", "policy"), [("5m", "5m"), ("1h", "1h"), ("30m", "5m"), ("2h", "24h"), ("24h", "24h")]
)
def test_messages_take_the_policy_that_a_duration_names_or_the_shortest_that_covers_it(
    tokenization: Tokenization, ttl: str, policy: str
) -> None:
    for fields in (control(ttl), {"system": [text("Help.", ttl)]}):
        assert [it for it, _ in claims(ask(MessagesRequest, tokenization, **fields))] == [policy]


def test_the_requests_own_policy_counts_where_it_lasts_long_enough(
    tokenization: Tokenization,
) -> None:
    part: Json = {"messages": [{**USER, "content": [text("a")]}]}
    for retention, expected in (("24h", "24h"), ("in_memory", "in_memory"), (None, "in_memory")):
        asked = ask(ChatRequest, tokenization, prompt_cache_retention=retention, **part)
        assert claims(asked) == [(expected, 300.0)]
    stored = Rules(Settings(disk_dir="kv", default_retention="24h"))
    assert claims(ask(ChatRequest, tokenization, stored, **part)) == [("24h", 300.0)]


def test_of_the_policies_that_last_long_enough_the_shortest_counts(
    tokenization: Tokenization,
) -> None:
    all_tiers = frozenset(Tier)
    week = RetentionPolicy(name="week", idle_s=86400.0, absolute_s=7 * 86400.0, tiers=all_tiers)
    policies = (week, IN_MEMORY, TWENTY_FOUR_HOURS)
    rules = Rules(Settings(disk_dir="kv", policies=policies))
    for ttl, policy in (("2h", "24h"), ("3d", "week"), ("1w", "week")):
        asked = ask(ChatRequest, tokenization, rules, prompt_cache_options={"ttl": ttl})
        assert [it for it, _ in claims(asked)] == [policy]


@pytest.mark.parametrize("kind", [ChatRequest, ResponsesRequest, MessagesRequest])
def test_what_no_policy_covers_is_refused_with_those_that_may_be_used(
    tokenization: Tokenization, kind: type[ApiRequest]
) -> None:
    limited = Rules(Settings(disk_dir="kv"), max_retention="in_memory")
    for rules in (NO_DISK, limited):
        with refused(RequestError, param="cache_control.ttl", code="invalid_value"):
            ask(kind, tokenization, rules, **control("12h"))
    with refused(RequestError, param="cache_control.ttl", code="invalid_value"):
        ask(kind, tokenization, **control("25h"))


GARBAGE: list[Any] = [300, 5.0, True, [], {}, {"ttl": "5m"}, "", " ", "forever", "-5m", "0s", "0h"]
GARBAGE += [
    "5",
    "m",
    "1e3s",
    "5m 3s",
    "\u0665m",
    "nan",
    "infs",
    "9" * 30 + "w",
    "9" * 9999 + "s",
    "5y",
]


@pytest.mark.parametrize("value", GARBAGE, ids=lambda it: repr(it)[:20])
def test_what_is_no_duration_is_refused_wherever_it_stands(
    tokenization: Tokenization, value: Any
) -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": value}}
    at = {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": value}}
    part, tool = {"type": "text", "text": "a"}, {"type": "function", "function": {"name": "f"}}
    bodies: list[tuple[type[ApiRequest], Json, str]] = [
        (ChatRequest, {"prompt_cache_options": {"ttl": value}}, "prompt_cache_options"),
        (CompletionRequest, {"prompt_cache_options": {"ttl": value}}, "prompt_cache_options"),
        (ChatRequest, mark, "cache_control"),
        (ChatRequest, {"messages": [{**USER, **mark}]}, "messages[0].cache_control"),
        (ChatRequest, {"tools": [{**tool, **mark}]}, "tools[0].cache_control"),
        (MessagesRequest, mark, "cache_control"),
        (ResponsesRequest, {"input": [{**USER, **mark}]}, "input[0].cache_control"),
    ]
    for field, each in (("cache_control", mark), ("prompt_cache_breakpoint", at)):
        held = {"messages": [{**USER, "content": [part, {**part, **each}]}]}
        bodies.append((ChatRequest, held, f"messages[0].content[1].{field}"))
    for kind, fields, path in bodies:
        with pytest.raises(RequestError) as caught:
            ask(kind, tokenization, **fields)
        assert (caught.value.status, caught.value.param) == (400, f"{path}.ttl")
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize("mark", ["ephemeral", 5, True, [], {}, {"type": "forever"}, {"ttl": "5m"}])
def test_a_breakpoint_that_is_none_is_refused(tokenization: Tokenization, mark: Any) -> None:
    part = {"type": "text", "text": "a", "cache_control": mark}
    for kind in (ChatRequest, MessagesRequest):
        with pytest.raises(RequestError) as caught:
            ask(kind, tokenization, messages=[{**USER, "content": [part]}])
        assert str(caught.value.param).startswith("messages[0].content[0].cache_control")
        with pytest.raises(RequestError):
            [*breakpoints_of({"messages": [{**USER, "content": [part]}]})]


# --- places -------------------------------------------------------------------------------------


def head(tokenization: Tokenization, asked: Asked, index: int = 0) -> str:
    """Return the text up to the end of a claim."""
    ends = sorted(claim.end_token for claim in asked.plan.claims)
    return str(tokenization.tokenizer.decode(asked.prompts[0][: ends[index]]))


FUNCTIONS = [{"name": name, "parameters": {"type": "object"}} for name in ("look", "find")]
CALL: Json = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
RESULT: Json = {"type": "function_call_output", "call_id": "c", "output": "seen"}
CALLED: Json = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CALLING: Json = {"role": "assistant", "tool_calls": [CALLED]}
PLACES: dict[str, tuple[type[ApiRequest], Json, str]] = {
    "a part": (ChatRequest, {"messages": [{**USER, "content": [text("one"), "two"]}]}, "one"),
    "a message": (ChatRequest, {"messages": [{**USER, **control()}, USER]}, "hello"),
    "a system message": (
        ChatRequest,
        {"messages": [{"role": "system", "content": "Help.", **control()}, USER]},
        "Help.",
    ),
    "an answer": (
        ChatRequest,
        {"messages": [USER, {"role": "assistant", "content": "well", **control()}, USER]},
        "well",
    ),
    "calls": (ChatRequest, {"messages": [USER, {**CALLING, **control()}, USER]}, "look"),
    "a result": (
        ChatRequest,
        {
            "messages": [
                USER,
                CALLING,
                {"role": "tool", "tool_call_id": "c", "content": "seen", **control()},
                USER,
            ]
        },
        "seen",
    ),
    "an item": (ResponsesRequest, {"input": [{**USER, **control()}, USER]}, "hello"),
    "a part of an item": (
        ResponsesRequest,
        {"input": [{**USER, "content": [text("one", kind="input_text")]}, USER]},
        "one",
    ),
    "a part of an answer": (
        ResponsesRequest,
        {
            "input": [
                USER,
                {"role": "assistant", "content": [text("well", kind="output_text")]},
                USER,
            ]
        },
        "well",
    ),
    "an item of a call": (ResponsesRequest, {"input": [USER, {**CALL, **control()}]}, "look"),
    "an item of a result": (
        ResponsesRequest,
        {"input": [USER, CALL, {**RESULT, **control()}, USER]},
        "seen",
    ),
    "a part of a result": (
        ResponsesRequest,
        {"input": [USER, CALL, {**RESULT, "output": [text("seen", kind="input_text")]}, USER]},
        "seen",
    ),
    "an item of a provider": (
        ResponsesRequest,
        {"input": [USER, {"type": "web_search_call", "id": "w", **control()}, USER]},
        "web_search_call",
    ),
}
for _part in PLACES["a part"][1]["messages"]:
    _part["content"][1] = {"type": "text", "text": "two"}


def unmarked(value: Any) -> Any:
    """Return a body without its breakpoints."""
    if isinstance(value, dict):
        return {name: unmarked(it) for name, it in value.items() if name != "cache_control"}
    return [*map(unmarked, value)] if isinstance(value, list) else value


@pytest.mark.parametrize("name", PLACES)
def test_cache_control_is_a_breakpoint_and_no_part_of_the_prompt(
    tokenization: Tokenization, name: str
) -> None:
    kind, fields, last_word = PLACES[name]
    asked = ask(kind, tokenization, **fields)
    assert claims(asked) == [("in_memory", 300.0)]
    kept = head(tokenization, asked)
    assert last_word in kept[-60:], kept
    assert 0 < asked.plan.claims[0].end_token < len(asked.prompts[0])
    assert asked.plan.cacheable_tokens is None, "the rest is kept as without it"
    plain = ask(kind, tokenization, **unmarked(fields))
    assert (asked.prompts, plain.plan.claims) == (plain.prompts, [])
    only = ask(kind, tokenization, prompt_cache_options={"mode": "explicit"}, **fields)
    assert only.plan.cacheable_tokens == asked.plan.claims[0].end_token


CHAT_TOOLS: list[Json] = [{"type": "function", "function": it} for it in FUNCTIONS]
TOOLS: dict[str, tuple[type[ApiRequest], Json]] = {
    "chat": (ChatRequest, {"tools": [{**CHAT_TOOLS[0], **control("1h")}, CHAT_TOOLS[1]]}),
    "chat, inside": (
        ChatRequest,
        {
            "tools": [
                {"type": "function", "function": {**FUNCTIONS[0], **control("1h")}},
                CHAT_TOOLS[1],
            ]
        },
    ),
    "chat, left out": (
        ChatRequest,
        {"tools": [CHAT_TOOLS[0], {"type": "web_search", **control("1h")}, CHAT_TOOLS[1]]},
    ),
    "functions": (ChatRequest, {"functions": [{**FUNCTIONS[0], **control("1h")}, FUNCTIONS[1]]}),
    "responses": (
        ResponsesRequest,
        {
            "tools": [
                {"type": "function", **FUNCTIONS[0], **control("1h")},
                {"type": "function", **FUNCTIONS[1]},
            ]
        },
    ),
    "responses, in a namespace": (
        ResponsesRequest,
        {
            "tools": [
                {
                    "type": "namespace",
                    "name": "files",
                    "tools": [
                        {"type": "function", **FUNCTIONS[0], **control("1h")},
                        {"type": "function", **FUNCTIONS[1]},
                    ],
                }
            ]
        },
    ),
    "responses, of a namespace": (
        ResponsesRequest,
        {
            "tools": [
                {
                    "type": "namespace",
                    "name": "files",
                    "tools": [{"type": "function", **FUNCTIONS[0]}],
                    **control("1h"),
                },
                {"type": "function", **FUNCTIONS[1]},
            ]
        },
    ),
    "responses, left out": (
        ResponsesRequest,
        {
            "tools": [
                {"type": "function", **FUNCTIONS[0]},
                {"type": "web_search", **control("1h")},
                {"type": "function", **FUNCTIONS[1]},
            ]
        },
    ),
    "messages": (
        MessagesRequest,
        {
            "tools": [
                {"name": "look", "input_schema": {"type": "object"}, **control("1h")},
                {"name": "find", "input_schema": {"type": "object"}},
            ]
        },
    ),
}


@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_may_have_a_breakpoint(tokenization: Tokenization, name: str) -> None:
    kind, fields = TOOLS[name]
    asked = ask(kind, tokenization, **fields)
    assert claims(asked) == [("1h" if kind is MessagesRequest else "in_memory", 3600.0)]
    kept = head(tokenization, asked)
    assert "look" in kept and "find" not in kept
    assert asked.prompts == ask(kind, tokenization, **unmarked(fields)).prompts


def test_the_last_four_breakpoints_count_and_tools_come_first(tokenization: Tokenization) -> None:
    tools = [{**CHAT_TOOLS[0], **control("1h")}, CHAT_TOOLS[1]]
    for num_parts, expected in ((3, [3600.0, 300.0, 300.0, 300.0]), (4, [300.0] * 4)):
        parts = [text(f"part {i}") for i in range(num_parts)]
        messages = [{**USER, "content": parts}]
        asked = ask(ChatRequest, tokenization, messages=messages, tools=tools)
        assert [pin_s for _, pin_s in claims(asked)] == expected


def test_where_a_part_has_a_breakpoint_of_each_api_openais_counts(
    tokenization: Tokenization,
) -> None:
    part = {**text("one", "5m"), "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"}}
    asked = ask(ChatRequest, tokenization, messages=[{**USER, "content": [part]}])
    assert claims(asked) == [("24h", 43200.0)]


def test_a_strict_server_takes_all_dialects(tokenization: Tokenization) -> None:
    strict = replace(DISK, is_strict=True)
    for kind, fields, _ in PLACES.values():
        if "web_search_call" not in str(fields):
            assert claims(ask(kind, tokenization, strict, **fields)) == [("in_memory", 300.0)]


# --- one reader ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [it[1] for it in PLACES.values()], ids=[*PLACES])
def test_a_body_without_a_type_has_the_breakpoints_that_the_server_finds(fields: Json) -> None:
    kind = ResponsesRequest if "input" in fields else ChatRequest
    request = read(kind, {"model": "m", **fields})
    assert [at for _, at in request.marks] == [*breakpoints_of(fields)]


@pytest.mark.parametrize("name", TOOLS)
def test_so_it_is_with_tools(name: str) -> None:
    [found] = breakpoints_of(TOOLS[name][1])
    assert found.ttl == "1h"
    assert found.place.startswith("functions[0]" if name == "functions" else "tools[")


def test_what_a_client_calls_so_in_arguments_and_schemas_is_no_breakpoint(
    tokenization: Tokenization,
) -> None:
    named = {"cache_control": "no-store", "prompt_cache_breakpoint": 1}
    schema = {"type": "object", "properties": {"cache_control": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "look", "parameters": schema}}]
    function = {"name": "look", "arguments": named}
    messages = [USER, {"role": "assistant", "tool_calls": [{**CALLED, "function": function}]}, USER]
    assert ask(ChatRequest, tokenization, tools=tools, messages=messages).plan.claims == []
    body = {"tools": tools, "messages": messages}
    assert [*breakpoints_of(body)] == []
    use = {"type": "tool_use", "id": "c", "name": "look", "input": named}
    assert [*breakpoints_of({"messages": [{"role": "assistant", "content": [use]}]})] == []


def test_a_body_that_is_nested_too_deeply_is_refused() -> None:
    body = b'{"input":' + b'[{"content":' * 90 + b"1" + b"}]" * 90 + b"}"
    with refused(RequestError):
        parse_body(body)
    held: Any = 1
    for _ in range(90):
        held = [{"content": held}]
    with refused(RequestError):
        [*breakpoints_of({"input": held})]
