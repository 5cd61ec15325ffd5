"""What only a provider's servers can serve is told in the prompt, and never ends a conversation."""

import asyncio
import re
from typing import Any, cast, get_args, get_type_hints

import pytest
from anthropic.types.beta import beta_content_block_param
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import response_input_item_param

from tests.golden import refused
from tests.tieredkv.test_tool_calls import Engine, anthropic_of, close_apis, openai_of
from tieredkv.config import Settings
from tieredkv.errors import RequestError
from tieredkv.fields import read
from tieredkv.server import hosted
from tieredkv.server.anthropic_api import MessagesRequest
from tieredkv.server.asked import DOCUMENT_NOTE, Rules
from tieredkv.server.response_tools import ClientRun
from tieredkv.server.responses_api import ResponsesRequest

__all__ = ["close_apis"]

ASKED: Any = {"role": "user", "content": "Go on."}
TOOL: Any = {"type": "function", "name": "more", "parameters": {"type": "object"}}
PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}

ITEMS: list[tuple[dict[str, Any], str]] = [
    (
        {
            "type": "web_search_call",
            "id": "ws_1",
            "status": "completed",
            "action": {"type": "search", "query": "rain in Zürich"},
        },
        '[web_search_call] {"action":{"type":"search","query":"rain in Zürich"}}',
    ),
    (
        {
            "type": "file_search_call",
            "id": "fs_1",
            "status": "completed",
            "queries": ["rain"],
            "results": [{"file_id": "f", "filename": "a.md", "text": "It rains.", "score": 0.5}],
        },
        '[file_search_call] {"queries":["rain"],"results":'
        '[{"filename":"a.md","text":"It rains.","score":0.5}]}',
    ),
    (
        {
            "type": "code_interpreter_call",
            "id": "ci_1",
            "status": "failed",
            "code": "1/0",
            "container_id": "c",
            "outputs": [{"type": "logs", "logs": "ZeroDivisionError"}],
        },
        '[code_interpreter_call] {"status":"failed","code":"1/0",'
        '"outputs":[{"type":"logs","logs":"ZeroDivisionError"}]}',
    ),
    (
        {
            "type": "image_generation_call",
            "id": "ig_1",
            "status": "completed",
            "result": "iVBORw0KGgo=",
            "revised_prompt": "A cat.",
        },
        '[image_generation_call] {"revised_prompt":"A cat."}',
    ),
    (
        {
            "type": "mcp_call",
            "id": "mcp_1",
            "server_label": "dice",
            "name": "roll",
            "arguments": '{"n":2}',
            "output": "7",
            "error": None,
        },
        '[mcp_call] {"server_label":"dice","name":"roll","arguments":"{\\"n\\":2}","output":"7"}',
    ),
    (
        {
            "type": "computer_call_output",
            "call_id": "c",
            "output": {"type": "computer_screenshot", "image_url": "data:image/png;base64,aGk="},
        },
        '[computer_call_output] {"output":{"type":"computer_screenshot"}}',
    ),
    ({"type": "compaction", "id": "cmp_1", "encrypted_content": "gAAA"}, "[compaction]"),
]

BLOCKS: list[tuple[dict[str, Any], str]] = [
    (
        {
            "type": "server_tool_use",
            "id": "srvtoolu_1",
            "name": "web_search",
            "input": {"query": "rain"},
        },
        '[server_tool_use] {"name":"web_search","input":{"query":"rain"}}',
    ),
    (
        {
            "type": "web_search_tool_result",
            "tool_use_id": "srvtoolu_1",
            "content": [
                {
                    "type": "web_search_result",
                    "url": "https://example.com",
                    "title": "Rain",
                    "encrypted_content": "EqgfC",
                    "page_age": None,
                }
            ],
        },
        '[web_search_tool_result] {"content":[{"type":"web_search_result",'
        '"url":"https://example.com","title":"Rain"}]}',
    ),
    (
        {
            "type": "mcp_tool_result",
            "tool_use_id": "mcptoolu_1",
            "is_error": True,
            "content": [{"type": "text", "text": "down", "cache_control": None}],
        },
        '[mcp_tool_result] {"is_error":true,"content":[{"type":"text","text":"down"}]}',
    ),
    ({"type": "container_upload", "file_id": "file_1"}, "[container_upload]"),
    (
        {
            "type": "search_result",
            "source": "https://example.com/a",
            "title": "A",
            "content": [{"type": "text", "text": "First."}, {"type": "text", "text": "Second."}],
            "citations": {"enabled": True},
        },
        "A\nhttps://example.com/a\nFirst.\nSecond.",
    ),
    (
        {
            "type": "document",
            "title": "Notes",
            "context": "Of May.",
            "source": {"type": "content", "content": [{"type": "text", "text": "It rained."}]},
            "citations": {"enabled": True},
        },
        "Notes\nOf May.\nIt rained.",
    ),
    ({"type": "document", "source": PDF}, DOCUMENT_NOTE),
    ({"type": "document", "source": {"type": "url", "url": "https://a/b.pdf"}}, DOCUMENT_NOTE),
]


@pytest.mark.parametrize(("item", "told"), ITEMS, ids=[item["type"] for item, _ in ITEMS])
def test_an_item_of_openais_servers_is_told_as_text(item: dict[str, Any], told: str) -> None:
    engine = Engine("Fine.")

    async def run() -> None:
        client = openai_of(engine)
        given: Any = [ASKED, item, ASKED]
        first = await client.responses.create(model="m", input=given)
        then: Any = [ASKED]
        await client.responses.create(model="m", input=then, previous_response_id=first.id)

    asyncio.run(run())
    assert [prompt.count(told) for prompt in engine.prompts] == [1, 1]
    assert engine.prompts[1].startswith(engine.prompts[0])


NAMES = [f"{block['type']}-{told[-12:]}" for block, told in BLOCKS]


@pytest.mark.parametrize(("block", "told"), BLOCKS, ids=NAMES)
def test_a_block_of_anthropics_servers_is_told_as_text(block: dict[str, Any], told: str) -> None:
    engine = Engine("Fine.")
    is_result = block["type"] in ("search_result", "document")
    use = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [block]}
    marked = {**block, "cache_control": {"type": "ephemeral"}}
    turns: list[Any] = [
        {"role": "user", "content": [marked] if is_result else "Look."},
        {"role": "assistant", "content": [use] if is_result else [marked, use]},
        {"role": "user", "content": [result]},
    ]

    async def run() -> None:
        await anthropic_of(engine).messages.create(model="m", max_tokens=9, messages=turns)

    asyncio.run(run())
    assert engine.prompts[0].count(told) == 2


def test_all_types_of_the_real_apis_are_known() -> None:
    def types_in(union: Any) -> set[str]:
        kinds = [each for each in get_args(union) if isinstance(each, type)]
        hints = [str(get_type_hints(each)["type"]) for each in kinds]
        return {name for hint in hints for name in re.findall(r"'(\w+)'", hint)}

    items = types_in(response_input_item_param.ResponseInputItemParam)
    assert len(items) > 25
    ours = {*get_args(hosted.ItemType), "message", "function_call", "function_call_output"}
    ours |= {"custom_tool_call", "custom_tool_call_output", "reasoning", "additional_tools"}
    ours |= {f"{kind}_call{end}" for kind in get_args(ClientRun) for end in ("", "_output")}
    assert items - ours == {"item_reference"}
    blocks = types_in(beta_content_block_param.BetaContentBlockParam)
    assert len(blocks) > 20
    ours = {*get_args(hosted.BlockType), "text", "image", "document", "search_result"}
    assert blocks - ours == {"thinking", "redacted_thinking", "tool_use", "tool_result"}


def test_tools_that_an_item_brings_may_be_called() -> None:
    engine = Engine('<tool_call>{"name": "more", "arguments": {}}</tool_call>')
    item = {"type": "additional_tools", "role": "developer", "tools": [TOOL]}

    async def run() -> Any:
        given: Any = [ASKED, item]
        return await openai_of(engine).responses.create(model="m", input=given)

    response = asyncio.run(run())
    assert [(it.type, it.name) for it in response.output] == [("function_call", "more")]
    assert '"more"' in engine.prompts[0]


def test_a_breakpoint_is_refused_on_what_only_a_provider_serves() -> None:
    mark = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    search = {"type": "web_search_20250305", "name": "web_search"}
    asked: dict[str, Any] = {"max_tokens": 1, "messages": [ASKED]}
    marked: list[tuple[Any, dict[str, Any], str]] = [
        (ResponsesRequest, {"input": [{"type": "web_search_call", **mark}]}, "input"),
        (ResponsesRequest, {"input": "a", "tools": [{"type": "web_search", **mark}]}, "tools"),
        (ResponsesRequest, {"input": "a", "tools": [{"type": "shell", **mark}]}, "tools"),
        (MessagesRequest, {**asked, "tools": [{**search, **mark}]}, "tools"),
    ]
    for kind, fields, place in marked:
        with refused(RequestError) as error:
            read(kind, {"model": "m", **fields}, Rules(Settings()).refuses)
        assert error.value.param == f"{place}[0].prompt_cache_breakpoint"


def test_a_document_that_is_no_text_is_refused_where_images_are() -> None:
    turn = {"role": "user", "content": [{"type": "document", "source": PDF}]}
    body = read(MessagesRequest, {"model": "m", "max_tokens": 1, "messages": [turn]})
    with refused(RequestError, param="messages.0.content.0", code="unsupported_parameter") as error:
        body.check(Rules(Settings(images="refuse")))
    assert error.value.param == "messages.0.content.0"


def test_examples_of_a_tools_input_are_told_in_its_description() -> None:
    engine = Engine("Fine.")
    tool: dict[str, Any] = {"name": "look", "description": "Looks."}
    tool |= {"input_schema": {"type": "object"}, "input_examples": [{"at": "sea"}]}

    async def run() -> None:
        tools: Any = [tool]
        how: Any = {"model": "m", "max_tokens": 9, "messages": [ASKED], "tools": tools}
        await anthropic_of(engine).messages.create(**how)

    asyncio.run(run())
    assert r"Looks.\nExample: {\"at\": \"sea\"}" in engine.prompts[0]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
FIELDS = st.dictionaries(
    st.sampled_from(["action", "call_id", "content", "id", "output", "source", "text", "tools"]),
    JSON,
)


@given(kind=st.sampled_from([*get_args(hosted.ItemType), "additional_tools"]), fields=FIELDS)
def test_whatever_an_item_has_it_is_told_or_a_clear_error(
    kind: str, fields: dict[str, Any]
) -> None:
    body = {"model": "m", "input": [{**fields, "type": kind}, ASKED]}
    try:
        request = read(ResponsesRequest, body)
    except RequestError as error:
        assert kind == "additional_tools" and error.status == 400
        return
    turns = [str(part) for _, message in request.turns for part in message.content]
    assert turns[-1] == "Go on."
    assert len(turns) == 1 + (kind != "additional_tools")


@given(
    kind=st.sampled_from([*get_args(hosted.BlockType), "search_result", "document"]), fields=FIELDS
)
def test_whatever_a_block_has_it_is_told_or_a_clear_error(
    kind: str, fields: dict[str, Any]
) -> None:
    turn = {"role": "assistant", "content": [{**fields, "type": kind}]}
    body = {"model": "m", "max_tokens": 1, "messages": [cast(Any, ASKED), turn, ASKED]}
    try:
        request = read(MessagesRequest, body)
    except RequestError as error:
        assert kind in ("search_result", "document") and error.status == 400
        return
    assert len(request.layout[0]) == 3
