"""Every kind of item, block and tool that the APIs' own clients know is taken, with all its fields.

What is wrong in one of them is a 400 in the words of the API.
"""

import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic.types.beta import (
    beta_content_block_param,
    beta_tool_result_block_param,
    beta_tool_union_param,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.chat import chat_completion_message_param
from openai.types.responses import response_input_item_param, tool_param

from tests.tieredkv.sdk_values import kinds_of, values
from tests.tieredkv.test_documented_examples import Served
from tests.tieredkv.test_documented_examples import served as served
from tieredkv.config import Settings
from tieredkv.errors import RequestError
from tieredkv.fields import read
from tieredkv.server.anthropic_api import MessagesRequest
from tieredkv.server.asked import Rules
from tieredkv.server.openai_api import ChatRequest
from tieredkv.server.responses_api import ResponsesRequest

Json = dict[str, Any]
ASKED: Json = {"role": "user", "content": "Go on."}
REFUSED_BY_STRICT = (
    "tools are not supported",
    "Images and other files are not supported",
    "content[0].content[0].cache_control' is not supported",
    "source.content[0].cache_control' is not supported",
    "messages[1].audio' is not supported",
)


def item(given: Json) -> Json:
    return {"input": [ASKED, given, ASKED]}


def message(given: Json) -> Json:
    return {"messages": [ASKED, given, ASKED]}


def tool(given: Json) -> Json:
    return {"input": "a", "tools": [given]}


def known_tool(given: Json) -> Json:
    return {"max_tokens": 9, "messages": [ASKED], "tools": [given]}


def block(given: Json) -> Json:
    turns = [ASKED, {"role": "assistant", "content": [given]}, ASKED]
    return {"max_tokens": 9, "messages": turns}


def result(given: Json) -> Json:
    content = [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [given]}]
    return {"max_tokens": 9, "messages": [ASKED, {"role": "user", "content": content}]}


PLACES: list[tuple[Any, Any, Any]] = [
    (response_input_item_param.ResponseInputItemParam, item, ResponsesRequest),
    (tool_param.ToolParam, tool, ResponsesRequest),
    (chat_completion_message_param.ChatCompletionMessageParam, message, ChatRequest),
    (beta_content_block_param.BetaContentBlockParam, block, MessagesRequest),
    (beta_tool_result_block_param.Content, result, MessagesRequest),
    (beta_tool_union_param.BetaToolUnionParam, known_tool, MessagesRequest),
]
PATHS = {
    ResponsesRequest: "/v1/responses",
    ChatRequest: "/v1/chat/completions",
    MessagesRequest: "/v1/messages",
}
KINDS = [
    pytest.param(kind, place, request, id=f"{place.__name__}-{kind.__name__}")
    for union, place, request in PLACES
    for kind in kinds_of(union)
]


def values_of(kind: Any) -> Iterator[Json]:
    """Yield values of a kind that have what they need, and others that have everything."""
    for is_full in (False, True):
        for value in values(kind, is_full=is_full):
            name_apart(value)
            yield value


def name_apart(value: Json) -> None:
    """Give the tools in an item or a tool names of their own."""
    for i, inner in enumerate(value.get("tools", ())):
        if "name" in inner:
            inner["name"] = f"word{i}"
        name_apart(inner)


def take(kind: Any, body: Json, rules: Rules) -> Any:
    """Return a body that was read and checked, and rendered as messages."""
    request = read(kind, body, rules.refuses).cleaned(rules)
    request.check(rules)
    return request.layout if kind is MessagesRequest else request.turns


@pytest.mark.parametrize(("kind", "place", "request_type"), KINDS)
def test_every_kind_of_the_clients_is_taken(kind: Any, place: Any, request_type: Any) -> None:
    for value in values_of(kind):
        body = {"model": "m", **place(value)}
        assert take(request_type, body, Rules(Settings()))
        try:
            take(request_type, body, Rules(Settings(), is_strict=True))
        except RequestError as refusal:
            assert any(it in str(refusal) for it in REFUSED_BY_STRICT), (body, refusal)


def test_there_are_as_many_kinds_as_are_known_today() -> None:
    counts = [len(kinds_of(union)) for union, *_ in PLACES]
    assert all(count >= 6 for count in counts) and sum(counts) > 110


# --- What is wrong in them

JUNK: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, -1, 2**70, 0.5, "", "word", "\0", [], [None], {}, {"type": "word"}, [[]], [{}]]
)


@functools.cache
def samples() -> list[tuple[Json, Any, str]]:
    """Return values of each kind, with the place of each, and the path that it is sent to."""
    return [
        (value, place, PATHS[request])
        for union, place, request in PLACES
        for kind in kinds_of(union)
        for value in values_of(kind)
        if value
    ]


def places_in(value: Any) -> list[tuple[Any, Any]]:
    """Return the objects and arrays in a value, each with one of its keys or indexes."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    found = list[tuple[Any, Any]]()
    for key, each in pairs:
        found.append((value, key))
        if isinstance(each, dict | list):
            found += places_in(each)
    return found


@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_a_wrong_or_missing_field_is_never_the_servers_error(data: Any, served: Served) -> None:
    given, place, path = data.draw(st.sampled_from(samples()))
    value = copy.deepcopy(given)
    for _ in range(data.draw(st.integers(1, 3))):
        if places := places_in(value):
            inside, key = data.draw(st.sampled_from(places))
            inside[key] = copy.deepcopy(data.draw(JUNK))
            if isinstance(inside, dict) and data.draw(st.booleans()):
                del inside[key]
    body = place(value)
    answer = served.send(path, body)
    assert answer.status_code in (200, 400, 404), (body, answer.text)
    if answer.status_code == 200 and path == "/v1/responses":
        listed = f"{path}/{answer.json()['id']}/input_items?limit=100"
        assert served.send(listed, method="GET").json()["data"]
    elif answer.status_code != 200:
        error = answer.json()["error"]
        assert error["message"] and error["type"] in ("invalid_request_error", "not_found_error")
