"""Answers that are held to a form, through each API of a real server on the small model."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.serving import Server, running

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}
NAMED = {"name": "answer", "schema": SCHEMA, "strict": True}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g")
]
ASKED: dict[str, Any] = {
    "model": "tiny-random",
    "messages": [{"role": "user", "content": "Tell me."}],
    "max_tokens": 300,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("structured")
    with running(folder, "--tool-parser", "hermes", "--grammar-timeout", "30s") as server:
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.log, server.log


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


def check_fits(text: str | None) -> None:
    answer = json.loads(text or "")
    assert answer.keys() == {"n", "ok"}
    assert 0 <= answer["n"] <= 9 and type(answer["ok"]) is bool


def test_chat_answers_follow_a_schema(client: openai.OpenAI) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": NAMED}
    answer = client.chat.completions.create(**ASKED, response_format=wanted, n=3, seed=1)
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 3
    for choice in answer.choices:
        check_fits(choice.message.content)
    stream = client.chat.completions.create(**ASKED, response_format=wanted, seed=1, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == answer.choices[0].message.content


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"guided_choice": ["yes", "no"]}, ("yes", "no")),
        ({"guided_regex": "a{3}"}, ("aaa",)),
        ({"guided_grammar": 'root ::= "b" | "c"'}, ("b", "c")),
        ({"structured_outputs": {"choice": ["x"]}}, ("x",)),
        ({"guided_json": json.dumps({"const": 7})}, ("7",)),
        ({"structured_outputs": {"json": {"enum": [True]}}}, ("true",)),
    ],
)
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_the_forms_of_vllm_are_known(
    server: Server, path: str, fields: dict[str, Any], allowed: tuple[str, ...]
) -> None:
    asked = ASKED if path.startswith("chat") else {"model": "tiny-random", "prompt": "x"}
    answer = httpx.post(f"{server.url}/{path}", json={**asked, **fields}, timeout=60).json()
    [choice] = answer["choices"]
    assert (choice.get("text") or choice["message"]["content"]) in allowed, answer


def test_any_json_object_is_one(client: openai.OpenAI) -> None:
    for seed in range(3):
        answer = client.chat.completions.create(
            **ASKED, response_format={"type": "json_object"}, seed=seed
        )
        if answer.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


@pytest.mark.parametrize(
    ("tool_choice", "names"),
    [
        ("required", {"f", "g"}),
        ({"type": "function", "function": {"name": "g"}}, {"g"}),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "f"}}],
                },
            },
            {"f"},
        ),
    ],
)
def test_a_call_that_must_come_comes(
    client: openai.OpenAI, tool_choice: Any, names: set[str]
) -> None:
    for seed in range(3):
        message = client.chat.completions.create(
            **ASKED, tools=TOOLS, tool_choice=tool_choice, parallel_tool_calls=False, seed=seed
        )
        [choice] = message.choices
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        assert choice.message.tool_calls is not None
        [call] = choice.message.tool_calls
        assert call.type == "function" and call.function.name in names
        check_fits(call.function.arguments)


def test_responses_have_a_form_and_calls_that_must_come(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny-random", "input": "Tell me.", "max_output_tokens": 300}
    form: Any = {"format": {"type": "json_schema", **NAMED}}
    answer = client.responses.create(**asked, text=form)
    check_fits(answer.output_text)
    assert answer.text is not None and answer.text.format is not None
    assert answer.text.format.to_dict() == {"type": "json_schema", **NAMED}
    tools: Any = [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}]
    choices: list[Any] = ["required", {"type": "function", "name": "f"}]
    for tool_choice in choices:
        called = client.responses.create(
            **asked, tools=tools, tool_choice=tool_choice, parallel_tool_calls=False
        )
        [item] = called.output
        assert item.type == "function_call" and item.name == "f"
        check_fits(item.arguments)


def test_messages_have_a_form_and_calls_that_must_come(server: Server) -> None:
    asked = ASKED
    with anthropic.Anthropic(base_url=server.url.removesuffix("/v1"), api_key="x") as client:
        form: Any = {"type": "json_schema", "schema": SCHEMA}
        # Older versions of Anthropic's package, such as 0.74, send the second one.
        for fields in ({"output_config": {"format": form}}, {"output_format": form}):
            [block] = client.messages.create(**asked, extra_body=fields).content
            assert block.type == "text"
            check_fits(block.text)
        tools: Any = [{"name": "f", "input_schema": SCHEMA}]
        for choice in ({"type": "any"}, {"type": "tool", "name": "f"}):
            chosen: Any = {**choice, "disable_parallel_tool_use": True}
            answer = client.messages.create(**asked, tools=tools, tool_choice=chosen)
            [called] = answer.content
            assert answer.stop_reason == "tool_use" and called.type == "tool_use"
            check_fits(json.dumps(called.input))


REFUSED = [
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
        "response_format",
    ),
    ({"guided_regex": "("}, None),
    ({"guided_grammar": 'start: "a"'}, "guided_grammar"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}},
        "tool_choice",
    ),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "mcp"}}, "tool_choice"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_what_cannot_be_followed_is_refused(
    server: Server, fields: dict[str, Any], param: str | None
) -> None:
    answer = httpx.post(f"{server.url}/chat/completions", json=ASKED | fields, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert httpx.get(f"{server.url.removesuffix('/v1')}/health").json()["status"] == "ok"
