"""What clients are told about misses: in the diagnostics of both APIs, and in every `usage`."""

import copy
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import Message, RawMessageStartEvent
from openai.types.responses import Response

from tests import golden, http
from tests.serving import Server, running

MODEL = "tiny-random"
LONG = "A prefix that is worth to be kept. " * 6
ALICE, BOB = {"Authorization": "Bearer alice"}, {"Authorization": "Bearer bob"}
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "Tell the weather",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
}
OTHER_ORDER = dict(reversed(TOOL.items()))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--api-key", "alice", "--api-key", "bob", "--isolate-by", "prompt_cache_key")
    with running(tmp_path_factory.mktemp("diagnosis"), *flags) as server:
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.log, server.log


def post(server: Server, path: str, key: dict[str, str] = ALICE, **fields: Any) -> Any:
    body = {"model": MODEL, "max_tokens": 1, "temperature": 0, **fields}
    answer = http.post(f"{server.root}{path}", json=body, headers=key)
    assert answer.status_code == 200, answer.text
    return answer.json()


def miss_of(answer: Any) -> tuple[str | None, int, str | None]:
    miss = answer["usage"]["tieredkv"].get("miss")
    return tuple(miss.values()) if miss else (None, 0, None)


def respond(server: Server, compared_id: str | None = None, **fields: Any) -> Response:
    options: dict[str, Any] = {"prompt_cache_options": {"comparison_response_id": compared_id}}
    fields = {"max_output_tokens": 1, "max_tokens": None, **fields}
    body = post(server, "/v1/responses", **fields, **(options if compared_id else {}))
    return Response.model_validate(body)


def diagnosed(answer: Response) -> dict[str, Any]:
    assert answer.prompt_cache_diagnostics is not None
    return answer.prompt_cache_diagnostics.model_dump()


# --- our own field, in every endpoint: compared with the tenant's most similar request


def talk(*texts: str) -> list[dict[str, str]]:
    roles = ("system", "user", "assistant", "user")
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def test_a_changed_message_and_a_changed_time_near_the_top_are_named(server: Server) -> None:
    def chat(*texts: str) -> tuple[str | None, int, str | None]:
        return miss_of(post(server, "/v1/chat/completions", messages=talk(*texts)))

    system = f"Request 6f9619ff-8b86-d011-b42d-00cf4fc964ff at 2026-11-21T19:00:01Z. {LONG}"
    assert chat(system, "hi")[:2] == ("never_seen", 0)
    reason, at, detail = chat(system.replace("6f9619ff", "7a").replace("19:00", "20:13"), "hi")
    assert (reason, at) == ("never_seen", 16)
    golden.told(str(detail))
    assert chat(system, "hi", LONG, "go on")[0] == "never_seen", "it is new, and nothing else"
    *_, detail = chat(system, "hi", LONG, "go on")
    assert detail is None
    reason, at, detail = chat(system, "hi", "changed" + LONG, "go on")
    assert reason == "never_seen" and detail is not None
    num_tokens = detail.rpartition(" ")[2][:-1]
    assert abs(int(num_tokens) - at) < 48
    golden.told(detail, hide={f"token {num_tokens}": "token NUMBER"})


def test_completions_and_streams_report_a_miss_too(server: Server) -> None:
    text = f"complete {LONG}"
    assert miss_of(post(server, "/v1/completions", prompt=text)) == ("never_seen", 0, None)
    assert miss_of(post(server, "/v1/completions", prompt=text)) == (None, 0, None)
    with openai.OpenAI(base_url=server.url, api_key="alice") as client:
        chunks = client.completions.create(
            model=MODEL,
            max_tokens=2,
            prompt=f"17{text}",
            stream=True,
            stream_options={"include_usage": True},
        )
        usage: Any = list(chunks)[-1].usage
    miss = usage.model_dump()["tieredkv"]["miss"]
    assert (miss["reason"], miss["at_token"]) == ("never_seen", 0)


def test_a_miss_names_another_salt_of_the_tenant_but_no_other_tenant(server: Server) -> None:
    body: dict[str, Any] = {"messages": talk(f"namespace {LONG[::-1]}", "hi")}
    path = "/v1/chat/completions"
    assert miss_of(post(server, path, **body)) == ("never_seen", 0, None)
    assert miss_of(post(server, path, **body, cache_salt="s")) == ("other_namespace", 0, None)
    assert miss_of(post(server, path, **body, prompt_cache_key="k"))[0] == "other_namespace"
    assert miss_of(post(server, path, BOB, **body)) == ("never_seen", 0, None)
    assert miss_of(post(server, path, **body)) == (None, 0, None)


# --- OpenAI's: a response compared with an earlier one


def test_a_response_is_told_what_has_changed_since_another(server: Server) -> None:
    base: dict[str, Any] = {"input": "hi", "instructions": f"openai {LONG}", "tools": [TOOL]}
    first = respond(server, **base)
    assert first.prompt_cache_diagnostics is None
    assert diagnosed(respond(server, first.id, **base)) == {"type": "cache_hit"}
    assert diagnosed(respond(server, "resp_0", **base)) == {"type": "comparison_response_not_found"}
    tool = copy.deepcopy(TOOL)
    tool["parameters"]["properties"]["town"]["description"] = "Where"
    for changes, reason in (
        ({"tools": [tool]}, "tools_changed"),
        ({"tools": []}, "tools_changed"),
        ({"tools": [TOOL, tool | {"name": "other"}]}, "tools_changed"),
        ({"instructions": f"other {LONG}"}, "input_changed"),
        ({"prompt_cache_key": "another"}, "prompt_cache_key_changed"),
    ):
        answer = respond(server, first.id, **base | changes)
        told = diagnosed(answer)
        assert (told["type"], told["reason"]) == ("cache_miss", reason), changes
        assert answer.usage is not None
        assert 0 < told["cache_missed_tokens"] <= answer.usage.input_tokens
        assert 0 <= told["comparison_reusable_tokens"] <= answer.usage.input_tokens
    grown = [{"role": "user", "content": "hi"}, {"role": "user", "content": f"and {LONG}"}]
    assert diagnosed(respond(server, first.id, **base | {"input": grown})) == {"type": "cache_hit"}


def test_another_order_of_a_tools_keys_is_named_and_its_name_is_told(server: Server) -> None:
    body: dict[str, Any] = {"input": "hi", "instructions": f"order {LONG}"}
    first = respond(server, **body, tools=[TOOL])
    parameters = dict(reversed(TOOL["parameters"].items()))
    answer = post(
        server,
        "/v1/responses",
        **body,
        tools=[TOOL | {"parameters": parameters}],
        max_tokens=None,
        max_output_tokens=1,
        prompt_cache_options={"comparison_response_id": first.id},
    )
    assert answer["prompt_cache_diagnostics"]["reason"] == "tools_changed"
    *_, detail = miss_of(answer)
    golden.told(re.sub(r"token \d+", "token NUMBER", str(detail)))


def test_a_streamed_response_ends_with_its_diagnosis(server: Server) -> None:
    with openai.OpenAI(base_url=server.url, api_key="alice") as client:
        asked: Any = {"model": MODEL, "max_output_tokens": 1, "input": f"streamed {LONG}"}
        first = client.responses.create(**asked)
        asked["prompt_cache_options"] = {"comparison_response_id": first.id}
        *_, last = client.responses.create(**asked, stream=True)
    assert isinstance(last, openai.types.responses.ResponseIncompleteEvent)
    assert diagnosed(last.response) == {"type": "cache_hit"}


def test_nobody_is_told_of_another_tenants_response(server: Server) -> None:
    first = respond(server, input=f"private {LONG}")
    answer = respond(server, first.id, input=f"private {LONG}", key=BOB)
    assert diagnosed(answer) == {"type": "comparison_response_not_found"}
    assert answer.usage is not None and answer.usage.input_tokens_details.cached_tokens == 0


# --- Anthropic's: a message compared with an earlier one


def test_a_message_is_told_what_has_changed_since_another(server: Server) -> None:
    tool = {"name": "weather", "input_schema": TOOL["parameters"]}
    base: dict[str, Any] = {"system": f"anthropic {LONG}", "tools": [tool]}
    base["messages"] = [{"role": "user", "content": LONG}]
    client = anthropic.Anthropic(base_url=server.root, api_key="alice", max_retries=0)

    def ask(previous: Any, **changes: Any) -> Message:
        create: Any = client.messages.create
        message = create(
            **{"model": MODEL, "max_tokens": 1, **base, **changes},
            **({} if previous == "" else {"diagnostics": {"previous_message_id": previous}}),
        )
        assert isinstance(message, Message)
        return message

    with client:
        first = ask("")
        assert first.diagnostics is None
        assert ask(None).diagnostics is None
        assert ask(first.id).diagnostics is None
        for previous, changes, kind in (
            ("msg_0", {}, "previous_message_not_found"),
            (first.id, {"tools": [tool | {"name": "storm"}]}, "tools_changed"),
            (first.id, {"system": f"other {LONG}"}, "system_changed"),
            (first.id, {"messages": [{"role": "user", "content": "x" + LONG}]}, "messages_changed"),
        ):
            told = ask(previous, **changes).diagnostics
            assert told is not None and told.cache_miss_reason is not None, changes
            assert told.cache_miss_reason.type == kind
            missed = getattr(told.cache_miss_reason, "cache_missed_input_tokens", 1)
            assert 0 < missed <= first.usage.input_tokens + 1000
        start = next(
            iter(
                client.messages.create(
                    **{"model": MODEL, "max_tokens": 1, **base, "system": "new"},
                    diagnostics={"previous_message_id": first.id},
                    stream=True,
                )
            )
        )
        assert isinstance(start, RawMessageStartEvent)
        told = start.message.diagnostics
        assert told is not None and told.cache_miss_reason is not None
        assert told.cache_miss_reason.type == "system_changed"
