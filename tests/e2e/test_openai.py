"""OpenAI's Responses API, cache options and errors, by its client and as raw bodies."""

import json
from collections.abc import Iterator
from typing import Any, get_args

import httpx
import openai
import pytest
from openai.types import responses as types
from pydantic import TypeAdapter

from tests import http
from tests.golden import told
from tests.serving import Server, running
from tests.waiting import HANG_S

MODEL = "tiny-random"
TEXT = "A prefix that is worth to be kept. " * 8
SHORT: dict[str, Any] = {"model": MODEL, "max_output_tokens": 6, "temperature": 0}
TOOL = {
    "type": "function",
    "name": "weather",
    "description": "Tell the weather",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
}
EVENT = TypeAdapter[Any](types.ResponseStreamEvent)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server for the tests of this file."""
    with running(tmp_path_factory.mktemp("openai"), "--default-retention", "in_memory") as server:
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.log, server.log


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    """Return a client of the server."""
    with server.client() as client:
        yield client


def post(server: Server, path: str, **fields: Any) -> httpx.Response:
    """Send a body and return the response."""
    return http.post(f"{server.url}/{path}", json={"model": MODEL, **fields})


def respond(server: Server, **fields: Any) -> types.Response:
    """Send a request; return its answer, checked against the client's own types."""
    answer = post(server, "responses", **SHORT | fields)
    assert answer.status_code == 200, answer.text
    return types.Response.model_validate(answer.json())


def cached(usage: types.ResponseUsage | None) -> int:
    """Return how many of a prompt's tokens were cached."""
    assert usage is not None
    return usage.input_tokens_details.cached_tokens


def test_a_response_has_every_field_and_says_what_was_asked(server: Server) -> None:
    answer = respond(
        server,
        input=TEXT,
        instructions="Be short.",
        metadata={"route": "a"},
        store=True,
        tools=[TOOL],
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        prompt_cache_options={"ttl": "12h"},
        text={"format": {"type": "text"}},
    )
    assert (answer.status, answer.object) == ("incomplete", "response")
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert len(answer.output_text) == 6
    (message,) = answer.output
    assert isinstance(message, types.ResponseOutputMessage)
    assert (message.role, message.status) == ("assistant", "incomplete")
    assert (answer.instructions, answer.metadata) == ("Be short.", {"route": "a"})
    assert (answer.prompt_cache_key, answer.prompt_cache_retention) == ("k", "24h")
    assert answer.prompt_cache_options is not None
    assert (answer.prompt_cache_options.mode, answer.prompt_cache_options.ttl) == (
        "implicit",
        "12h",
    )
    assert answer.tools[0].type == "function"
    usage = answer.usage
    assert usage is not None
    assert usage.total_tokens == usage.input_tokens + 6 == usage.input_tokens + usage.output_tokens
    written = usage.input_tokens // 16 * 16
    details = usage.input_tokens_details.model_dump()
    assert details["cached_tokens"] == 0
    assert details["cache_write_tokens"] == written
    assert details["cache_write_tokens_details"] == {"ttl_30m_tokens": 0, "ttl_12h_tokens": written}
    ours = usage.model_dump()["tieredkv"]
    assert ours.pop("miss") == {"reason": "never_seen", "at_token": 0, "detail": None}
    assert ours == {"device": 0, "host": 0, "disk": 0, "recomputed": 0}


def test_the_older_spelling_of_a_retention_is_told_as_the_newer_one(server: Server) -> None:
    assert respond(
        server, input="a", prompt_cache_retention="in-memory"
    ).prompt_cache_retention == ("in_memory")


def test_a_stream_has_the_events_of_the_protocol_in_order(client: openai.OpenAI) -> None:
    events = list(client.responses.create(**SHORT, input=f"stream {TEXT}", stream=True))
    for event in events:
        EVENT.validate_python(event.model_dump(), strict=False)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    ending = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert kinds[-4:] == ending
    text = "".join(e.delta for e in events if isinstance(e, types.ResponseTextDeltaEvent))
    last = events[-1]
    assert isinstance(last, types.ResponseIncompleteEvent)
    assert last.response.output_text == text
    assert {e.response.id for e in events if hasattr(e, "response")} == {last.response.id}
    again = client.responses.create(**SHORT, input=f"stream {TEXT}")
    assert again.output_text == text
    assert cached(again.usage) == cached(last.response.usage) + len(TEXT) // 16 * 16 + 16 * 2


def test_the_events_are_named_and_nothing_follows_the_last(server: Server) -> None:
    lines = post(server, "responses", **SHORT, input="a", stream=True).text.split("\n\n")
    assert lines.pop() == ""
    for line in lines:
        head, data = line.split("\n")
        assert head == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert lines[-1].startswith("event: response.incomplete\n")


def test_the_clients_helper_follows_a_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(**SHORT, input="help") as stream:
        text = "".join(
            event.delta for event in stream if event.type == "response.output_text.delta"
        )
    assert len(text) == 6


def test_the_items_of_a_conversation_render_as_those_of_a_chat(
    server: Server, client: openai.OpenAI
) -> None:
    items = [
        {"role": "developer", "content": f"items {TEXT}"},
        {"role": "user", "content": [{"type": "input_text", "text": "Weather in Bonn?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "thoughts"},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"town":1}'},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "sun"}],
        },
    ]
    first = respond(server, input=items, tools=[TOOL])
    calls = [
        {"id": id, "type": "function", "function": {"name": "weather", "arguments": arguments}}
        for id, arguments in (("c1", '{"town":1}'), ("c2", "{}"))
    ]
    function = {name: value for name, value in TOOL.items() if name != "type"}
    chat = client.chat.completions.create(
        model=MODEL,
        max_tokens=6,
        temperature=0,
        messages=[
            {"role": "developer", "content": f"items {TEXT}"},
            {"role": "user", "content": "Weather in Bonn?"},
            {"role": "assistant", "content": "I look.", "tool_calls": calls},  # type: ignore
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
            {"role": "tool", "tool_call_id": "c2", "content": "sun"},
        ],
        tools=[{"type": "function", "function": function}],  # type: ignore
    )
    assert first.usage is not None and chat.usage is not None
    assert chat.usage.prompt_tokens == first.usage.input_tokens
    details = chat.usage.prompt_tokens_details
    assert details is not None
    assert details.cached_tokens == chat.usage.prompt_tokens // 16 * 16
    assert chat.choices[0].message.content == first.output_text


def test_an_answer_can_be_sent_back_as_it_came(client: openai.OpenAI) -> None:
    first = client.responses.create(**SHORT, input=f"turn {TEXT}")
    items: list[Any] = [{"role": "user", "content": f"turn {TEXT}"}]
    items += [item.model_dump() for item in first.output]
    second = client.responses.create(**SHORT, input=[*items, {"role": "user", "content": "more"}])
    assert cached(second.usage) >= len(TEXT)


def test_a_prewarmed_prompt_makes_nothing_and_is_found(
    server: Server, client: openai.OpenAI
) -> None:
    prompt = f"warmed {TEXT}"
    warmed = respond(server, input=prompt, prompt_cache_options={"prewarm": True})
    assert (warmed.status, warmed.output) == ("completed", [])
    assert warmed.usage is not None
    assert (warmed.usage.output_tokens, cached(warmed.usage)) == (0, 0)
    told: Any = {"input": prompt, "prompt_cache_options": {"prewarm": True}, "stream": True}
    with client.responses.create(**SHORT, **told) as events:
        kinds = [event.type for event in events]
    assert kinds == ["response.created", "response.in_progress", "response.completed"]
    assert cached(respond(server, input=prompt).usage) == warmed.usage.input_tokens // 16 * 16


def test_cache_options_and_breakpoints_are_taken_by_the_client(client: openai.OpenAI) -> None:
    part: Any = {"type": "text", "text": TEXT, "prompt_cache_breakpoint": {"mode": "explicit"}}
    for role in ("system", "user"):
        answer = client.chat.completions.create(
            model=MODEL,
            max_tokens=2,
            messages=[{"role": role, "content": [part]}, {"role": "user", "content": "b"}],  # type: ignore
            prompt_cache_options={"mode": "explicit", "ttl": "30m"},
        )
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None


def counted(server: Server, text: str, mark: dict[str, Any] | None, **fields: Any) -> Any:
    """Send a prefix with `mark` as its breakpoint, and a text; return the usage of the input."""
    prefix = {"type": "input_text", "text": text, "prompt_cache_breakpoint": mark}
    parts = [prefix, {"type": "input_text", "text": f"and then {TEXT}"}]
    usage = respond(server, input=[{"role": "user", "content": parts}], **fields).usage
    assert usage is not None
    return usage.input_tokens_details.model_dump()


def test_without_a_mark_nothing_is_cached_in_explicit_mode(server: Server) -> None:
    for _ in range(2):
        told = counted(server, f"none {TEXT}", None, prompt_cache_options={"mode": "explicit"})
        assert (told["cached_tokens"], told["cache_write_tokens"]) == (0, 0)


def test_in_explicit_mode_a_prefix_is_cached_up_to_its_mark(server: Server) -> None:
    text, options = f"mark {TEXT}", {"mode": "explicit"}
    first = counted(server, text, {"mode": "explicit"}, prompt_cache_options=options)
    again = counted(server, text, {"mode": "explicit"}, prompt_cache_options=options)
    assert first["cached_tokens"] == again["cache_write_tokens"] == 0
    assert first["cache_write_tokens"] == again["cached_tokens"]
    assert len(text) - 16 < again["cached_tokens"] < len(text) + 32


def test_written_tokens_are_told_by_the_lifetime_of_their_prefix(server: Server) -> None:
    text = f"long {TEXT}"
    told = counted(server, text, {"mode": "explicit", "ttl": "12h"})
    by_ttl = told["cache_write_tokens_details"]
    assert sum(by_ttl.values()) == told["cache_write_tokens"]
    assert len(text) <= by_ttl["ttl_12h_tokens"] < len(text) + 32
    assert by_ttl["ttl_30m_tokens"] > len(TEXT) - 32


INPUT = {"input": "a"}
CHAT = {"messages": [{"role": "user", "content": "a"}]}
TEXT_PART = {"type": "text", "text": "a"}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("responses", {}, "input"),
    ("responses", {"input": 5}, "input"),
    (
        "responses",
        {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
        "input[0].call_id",
    ),
    (
        "responses",
        {"input": [{"type": "function_call_output", "call_id": "c", "output": 5}]},
        "input[0].output",
    ),
    ("responses", {**INPUT, "conversation": "conv_1"}, "conversation"),
    (
        "responses",
        {
            **INPUT,
            "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "b"}}},
        },
        "text.format",
    ),
    (
        "responses",
        {**INPUT, "prompt_cache_options": {"ttl": "forever"}},
        "prompt_cache_options.ttl",
    ),
    (
        "chat/completions",
        {**CHAT, "prompt_cache_options": {"ttl": "48h"}},
        "prompt_cache_options.ttl",
    ),
    (
        "chat/completions",
        {**CHAT, "prompt_cache_options": {"mode": "bogus"}},
        "prompt_cache_options.mode",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{**TEXT_PART, "prompt_cache_breakpoint": {}}]}]},
        "messages[0].content[0].prompt_cache_breakpoint.mode",
    ),
    (
        "chat/completions",
        {"messages": [{**CHAT["messages"][0], "prompt_cache_breakpoint": {"mode": "explicit"}}]},
        "messages[0].prompt_cache_breakpoint",
    ),
    (
        "completions",
        {"prompt": "a", "prompt_cache_breakpoint": {"mode": "explicit"}},
        "prompt_cache_breakpoint",
    ),
    ("chat/completions", {**CHAT, "metadata": 5}, "metadata"),
    ("chat/completions", {**CHAT, "user": 5}, "user"),
    ("chat/completions", {**CHAT, "service_tier": 5}, "service_tier"),
    ("chat/completions", {**CHAT, "parallel_tool_calls": "x"}, "parallel_tool_calls"),
]


@pytest.mark.parametrize(("path", "fields", "param"), REFUSED)
def test_a_wrong_field_is_refused_in_the_words_of_openai(
    server: Server, path: str, fields: dict[str, Any], param: str
) -> None:
    answer = post(server, path, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    told(error["message"])
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}


def nested(depth: int) -> Any:
    """Return objects nested to a depth."""
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize("depth", [70, 700, 5000])
def test_deep_nesting_is_refused_and_the_server_goes_on(server: Server, depth: int) -> None:
    arguments = '{"a":' * depth + "1" + "}" * depth
    deep = arguments.encode()
    body = b'{"model":"tiny-random","messages":[{"role":"user","content":"a"}],"tools":[{"type":'
    body += b'"function","function":{"name":"f","parameters":' + deep + b"}}]}"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    with httpx.Client(base_url=server.root, timeout=HANG_S) as http:
        refused = http.post("/v1/chat/completions", content=body)
        assert (refused.status_code, refused.json()["error"]["type"]) == (
            400,
            "invalid_request_error",
        )
        told = {"model": MODEL, "messages": messages, "max_tokens": 1}
        answer = http.post("/v1/chat/completions", json=told)
        # Arguments that are too deep to be decoded may be passed on as text.
        assert answer.status_code in (200, 400), answer.text
        assert http.get("/health").status_code == 200


def test_the_errors_of_messages_have_anthropics_form(server: Server) -> None:
    answer = http.get(f"{server.url}/messages/none")
    body = answer.json()
    assert (answer.status_code, body["type"], body["error"]["type"]) == (
        404,
        "error",
        "not_found_error",
    )
    assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]


def test_every_event_type_that_is_sent_is_one_of_the_clients() -> None:
    known = {each.__name__ for each in get_args(get_args(types.ResponseStreamEvent)[0])}
    assert {"ResponseTextDeltaEvent", "ResponseFailedEvent", "ResponseIncompleteEvent"} <= known
