"""Functions, as clients of chat completions gave and called them before there were tools."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError

from tests.golden import refused
from tests.tieredkv.test_tool_calls import (
    ASKED,
    TOKENIZER,
    TOOLS,
    WRITTEN,
    Engine,
    api_of,
    openai_of,
)
from tieredkv.config import Settings
from tieredkv.server.app import Api

FUNCTIONS: Any = [tool["function"] for tool in TOOLS]
CALL = ("get_weather", {"city": "Zürich"})


@pytest.fixture
def engine() -> Engine:
    return Engine(WRITTEN)


@pytest.fixture
def api(engine: Engine) -> Iterator[Api]:
    made = api_of(engine, Settings(model="tiny-random"))
    yield made
    made.close()


def create(api: Api, **fields: Any) -> Any:
    """Return the answer to a body, or its chunks."""

    async def run() -> Any:
        chat = openai_of(api).chat.completions
        answer: Any = await chat.create(**{"model": "m", "messages": ASKED, **fields})
        return [it async for it in answer] if fields.get("stream") else answer

    return asyncio.run(run())


def test_a_function_is_called_and_its_result_is_taken(api: Api, engine: Engine) -> None:
    answer = create(api, functions=FUNCTIONS)
    [choice] = answer.choices
    message, call = choice.message, choice.message.function_call
    assert (choice.finish_reason, message.content) == ("function_call", "Let me see.")
    assert (call.name, json.loads(call.arguments)) == CALL
    assert message.tool_calls is None, "one call at most, in the older form"
    result = {"role": "function", "name": call.name, "content": "12 degrees"}
    turns = [*ASKED, message.model_dump(exclude_none=True), result]
    create(api, messages=turns, functions=FUNCTIONS)
    first, second = engine.prompts
    assert second.startswith(first + "Let me see.")
    assert '"city": "Zürich"' in second and "12 degrees" in second


def test_a_message_has_no_field_that_came_later(api: Api) -> None:
    [choice] = create(api, functions=FUNCTIONS).choices
    # marvin 1.5.6 refuses a message that has another field.
    assert choice.message.model_fields_set == {"role", "content", "function_call"}
    [choice] = create(api, tools=TOOLS).choices
    assert "refusal" in choice.message.model_fields_set


def test_a_stream_has_one_call(api: Api) -> None:
    chunks = create(api, functions=FUNCTIONS, function_call="auto", stream=True)
    calls = [it for chunk in chunks if (it := chunk.choices[0].delta.function_call)]
    assert [(it.name, json.loads(it.arguments)) for it in calls] == [CALL]
    assert not any(chunk.choices[0].delta.tool_calls for chunk in chunks)
    assert [it.choices[0].finish_reason for it in chunks if it.choices[0].finish_reason] == [
        "function_call"
    ]
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(texts) == "Let me see."


def test_the_prompt_is_the_one_of_tools(api: Api, engine: Engine) -> None:
    create(api, functions=FUNCTIONS, function_call={"name": "now"})
    create(api, tools=TOOLS)
    functions, tools = engine.prompts
    assert functions == tools and "get_weather" in tools

    async def tokenize() -> Any:
        body = {"model": "m", "messages": ASKED, "functions": FUNCTIONS}
        return (await openai_of(api)._client.post("/tokenize", json=body)).json()["tokens"]

    assert TOKENIZER.decode(asyncio.run(tokenize())) == tools


def test_no_function_is_called_where_none_may_be(api: Api) -> None:
    [choice] = create(api, functions=FUNCTIONS, function_call="none").choices
    assert choice.message.function_call is None and choice.finish_reason == "stop"


@pytest.mark.parametrize("call", ["auto", "none"])
def test_a_choice_without_functions_changes_nothing(call: str, api: Api) -> None:
    [choice] = create(api, tools=TOOLS, function_call=call).choices
    assert choice.finish_reason == "tool_calls" and len(choice.message.tool_calls) == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": FUNCTIONS, "tools": TOOLS}, "functions"),
        ({"function_call": {"name": "now"}}, "function_call"),
        ({"functions": FUNCTIONS, "function_call": {"name": "f"}}, "function_call"),
        ({"functions": FUNCTIONS, "function_call": {}}, "function_call"),
        ({"functions": FUNCTIONS, "function_call": "required"}, "function_call"),
        ({"functions": FUNCTIONS, "function_call": 5}, "function_call"),
        ({"functions": {}}, "functions"),
        ({"functions": [{}]}, "functions[0].name"),
        ({"functions": [{"name": 5}]}, "functions[0].name"),
        ({"functions": [{"name": "f", "parameters": 5}]}, "functions[0].parameters"),
    ],
)
def test_what_cannot_be_called_is_refused(
    fields: dict[str, Any], param: str, api: Api, engine: Engine
) -> None:
    with refused(BadRequestError, param=param):
        create(api, **fields)
    assert not engine.prompts
