"""The routes of `/v1/responses` beside its answers: lists of items, token counts, cancelling."""

import asyncio
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseItemList

from tests.golden import refused, told
from tests.tieredkv.documented_openai import CALL, RESPONSES, RESULT, SEARCH, WEATHER, Example
from tests.tieredkv.test_documented_examples import Served, of
from tests.tieredkv.test_documented_examples import served as served
from tests.tieredkv.test_tool_calls import openai_of
from tieredkv.fields import read
from tieredkv.server.responses_api import ResponsesRequest

STORED = [each for each in RESPONSES if each.body.get("store", True)]
KEPT = [
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Found."}]},
    CALL,
    RESULT,
]


def get(served: Served, path: str, method: str = "GET") -> Any:
    return served.send(path, method=method).json()


@of(STORED)
def test_the_items_of_an_example_are_listed_as_the_client_knows_them(
    example: Example, served: Served
) -> None:
    response = served.ask("/v1/responses", example.body)
    path = f"/v1/responses/{response['id']}"
    assert get(served, path) == response
    listed = get(served, f"{path}/input_items?order=asc&limit=100")
    page = ResponseItemList.model_validate(listed)
    given = example.body["input"]
    kinds = [item.get("type", "message") for item in given if isinstance(item, dict)]
    kinds = [kind for kind in kinds or ["message"] if kind != "compaction_trigger"]
    assert [item.type for item in page.data] == kinds
    assert len({item.id for item in page.data}) == len(kinds)


def test_items_that_are_sent_twice_are_listed_under_two_ids(served: Served) -> None:
    item = {"type": "message", "role": "user", "content": "Again.", "id": "msg_1"}
    response = served.ask("/v1/responses", {"input": [item, item, {**item, "id": 5}]})
    path = f"/v1/responses/{response['id']}/input_items"
    seen, after = list[str](), ""
    for _ in range(3):
        page = get(served, f"{path}?order=asc&limit=1&after={after}")
        seen.append(after := page["last_id"])
    assert not page["has_more"] and seen[0] == "msg_1" and len(set(seen)) == 3


def test_bytes_of_pictures_and_files_are_not_stored(served: Served) -> None:
    parts = [
        {"type": "input_image", "image_url": "data:image/png;base64,aGk="},
        {"type": "input_image", "image_url": "https://example.com/a.png"},
        {"type": "input_file", "filename": "a.pdf", "file_data": "JVBERi0="},
    ]
    response = served.ask("/v1/responses", {"input": [{"role": "user", "content": parts}]})
    [item] = get(served, f"/v1/responses/{response['id']}/input_items")["data"]
    assert item["content"] == [
        {"type": "input_image", "detail": "auto"},
        {"type": "input_image", "detail": "auto", "image_url": "https://example.com/a.png"},
        {"type": "input_file", "filename": "a.pdf"},
    ]


def test_an_item_is_named_by_its_id_alone(served: Served) -> None:
    first = served.ask("/v1/responses", {"input": "One."})
    before = served.prompt
    items = [{"id": first["output"][0]["id"]}, {"role": "user", "content": "Two."}]
    served.ask("/v1/responses", {"input": [{"role": "user", "content": "One."}, *items]})
    assert served.prompt.startswith(before) and "Fine." in served.prompt
    answer = served.send("/v1/responses", {"input": [{"id": "msg_unknown"}]})
    assert answer.status_code == 404
    told(answer.json()["error"]["message"])


def test_thoughts_whose_text_is_hidden_are_told_by_their_summary() -> None:
    def thoughts(**fields: Any) -> Any:
        item = {"type": "reasoning", "id": "rs_1", "summary": [], **fields}
        body = {"model": "m", "input": [{"role": "user", "content": "a"}, item, CALL, RESULT]}
        _, calling, _ = read(ResponsesRequest, body).turns
        return calling[1].for_template().get("reasoning_content")

    summary = [{"type": "summary_text", "text": text} for text in ("First.", "Then.")]
    content = [{"type": "reasoning_text", "text": "Hm."}]
    assert thoughts(summary=summary) == "First.\nThen."
    assert thoughts(summary=summary, content=content) == "Hm."
    assert thoughts(encrypted_content="gAAA") is None


def test_tokens_are_counted_as_an_answer_would_count_them(served: Served) -> None:
    async def run() -> None:
        client = openai_of(served.api)
        given: Any = [{"role": "user", "content": "How is Bern?"}, *KEPT]
        how: Any = {"model": "m", "tools": [WEATHER, SEARCH], "instructions": "Be brief."}
        how["reasoning"] = {"effort": "low"}
        first = await client.responses.create(input=given, **how)
        count = await client.responses.input_tokens.count(input=given, **how)
        assert (count.object, count.input_tokens) == (
            "response.input_tokens",
            first.usage and first.usage.input_tokens,
        )
        del how["model"]
        then: Any = {"input": "And Rome?", "previous_response_id": first.id, **how}
        second = await client.responses.create(model="m", **then)
        count = await client.responses.input_tokens.count(**then, personality="pragmatic")
        assert count.input_tokens == (second.usage and second.usage.input_tokens)
        alone: Any = {"previous_response_id": first.id}
        assert (await client.responses.input_tokens.count(**alone)).input_tokens > 0
        wrong: list[tuple[dict[str, Any], str]] = [({}, "input"), ({"input": 5}, "input")]
        for fields, param in [*wrong, ({"conversation": "conv_1"}, "conversation")]:
            with pytest.raises(openai.BadRequestError) as error:
                await client.responses.input_tokens.count(**fields)
            assert error.value.param == param
        with pytest.raises(openai.NotFoundError):
            await client.responses.input_tokens.count(previous_response_id="resp_x", input="a")

    asyncio.run(run())


def test_a_response_that_was_answered_at_once_cannot_be_cancelled(served: Served) -> None:
    async def run() -> None:
        client = openai_of(served.api)
        response = await client.responses.create(model="m", input="One.", background=True)
        assert (response.status, response.background) == ("completed", False)
        with refused(openai.BadRequestError, param="response_id"):
            await client.responses.cancel(response.id)
        with refused(openai.NotFoundError):
            await client.responses.cancel("resp_x")

    asyncio.run(run())
