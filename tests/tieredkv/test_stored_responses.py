"""Responses are stored for their tenant alone, for an hour and within a bound, and continued."""

import asyncio
import gc
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.golden import refused
from tests.tieredkv.test_tool_calls import CODEX_TOOLS, CODEX_WRITTEN, Engine, api_of, openai_of
from tieredkv.config import Settings
from tieredkv.errors import RequestError
from tieredkv.operate.calls import EvictFilter
from tieredkv.server.keys import Keys
from tieredkv.server.metrics import Metrics
from tieredkv.server.stored_responses import (
    ENTRY_BYTES,
    LIFETIME_S,
    StoredResponse,
    StoredResponses,
    Turn,
)

SIZE = ENTRY_BYTES + 100
"""What a response of `made` takes without a conversation before it."""


class Time:
    """A clock that stands still until it is turned."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def made(before: Turn | None = None, namespace: bytes = b"\xab" * 32) -> StoredResponse:
    return StoredResponse(b"b" * 60, Turn(b"i" * 40, before), namespace)


def ids(stored: StoredResponses, tenant: str = "a", names: str = "123456789") -> str:
    """Return the ids of the tenant's responses that are there."""
    found = ""
    for id in names:
        try:
            stored.get(tenant, id)
        except RequestError:
            continue
        found += id
    stored.check()
    return found


# --- What is kept


def test_the_oldest_response_goes_where_there_is_no_room() -> None:
    stored = StoredResponses(3 * SIZE, Time())
    for id in "1234":
        stored.add("a", id, made())
    assert ids(stored) == "234"
    stored.add("a", "5", StoredResponse(b"b" * 3 * SIZE, Turn(b"i"), b""))
    assert ids(stored) == "", "it leaves no room for others, and does not fit by itself"
    stored.add("a", "6", made())
    assert ids(stored) == "6"


def test_a_tenant_with_less_than_an_equal_share_loses_nothing_to_others() -> None:
    stored = StoredResponses(4 * SIZE, Time())
    stored.add("b", "1", made())
    for id in "123456789":
        stored.add("a", id, made())
    assert (ids(stored, "a"), ids(stored, "b")) == ("789", "1")


def test_a_response_is_gone_after_an_hour_however_often_it_was_asked_for() -> None:
    now = Time()
    stored = StoredResponses(9 * SIZE, now)
    stored.add("a", "1", made())
    now.now_s += LIFETIME_S - 1
    stored.add("a", "2", made())
    assert ids(stored) == "12"
    now.now_s += 1
    assert ids(stored) == "2"
    now.now_s += LIFETIME_S
    stored.expire()
    assert stored.figures == (0, 0)


def test_a_conversation_is_held_once_and_as_long_as_a_response_continues_it() -> None:
    stored = StoredResponses(99 * SIZE, Time())
    first = made()
    second, third = made(first.turn), made(first.turn)
    for id, response in zip("123", (first, second, third), strict=True):
        stored.add("a", id, response)
    assert stored.num_bytes("a") == 3 * SIZE
    stored.delete("a", "1")
    assert stored.num_bytes("a") == 3 * SIZE - ENTRY_BYTES - 60
    assert stored.get("a", "2").turn.conversation() == b"[" + b"i" * 40 + b"," + b"i" * 40 + b"]"
    stored.delete("a", "2")
    stored.delete("a", "3")
    assert stored.num_bytes("a") == 0
    stored.add("a", "4", made(third.turn))
    assert stored.num_bytes("a") == SIZE + 80, "its request was read before the others went"
    stored.check()


def test_a_long_conversation_is_let_go_at_once() -> None:
    stored = StoredResponses(1 << 30, Time())
    response = made()
    for _ in range(100_000):
        response = made(response.turn)
    assert response.turn.num_bytes == 40 * 100_001
    stored.add("a", "1", response)
    del response
    stored.delete("a", "1")
    gc.collect()
    assert stored.figures == (0, 0)


STEPS = st.tuples(
    st.sampled_from(["add", "add", "add", "delete", "wait", "evict"]),
    st.sampled_from("ab"),
    st.integers(0, 9),
    st.integers(0, 9),
)


@given(st.lists(STEPS, max_size=60))
def test_bytes_and_holders_stay_right_whatever_comes(
    steps: list[tuple[str, str, int, int]],
) -> None:
    now = Time()
    stored, turns = StoredResponses(5 * SIZE, now), dict[tuple[str, int], Turn]()
    for step, tenant, number, other in steps:
        id = str(number)
        is_there = id in ids(stored, tenant, id)
        match step:
            case "add" if not is_there:
                response = made(turns.get((tenant, other)), bytes([number]) * 32)
                turns[tenant, number] = response.turn
                stored.add(tenant, id, response)
            case "delete" if is_there:
                stored.delete(tenant, id)
                assert not ids(stored, tenant, id)
            case "wait":
                now.now_s += LIFETIME_S / 4
            case "evict":
                stored.evict(EvictFilter(namespace_prefix=f"0{number}"))
                assert not ids(stored, tenant, id)
        stored.check()


def test_an_operator_evicts_by_age_and_namespace_and_ids_name_no_response() -> None:
    now = Time()
    stored = StoredResponses(99 * SIZE, now)
    stored.add("a", "1", made(namespace=b"\x12" * 32))
    stored.add("b", "1", made(namespace=b"\x34" * 32))
    now.now_s += 100
    stored.add("a", "2", made(namespace=b"\x12" * 32))
    assert stored.evict(EvictFilter(ids=("12345678",), all=True)) == 0
    assert stored.evict(EvictFilter(all=True, dry_run=True)) == 3
    assert (ids(stored, "a", "2"), ids(stored, "b", "")) == ("2", "")
    assert stored.evict(EvictFilter(older_than_s=50, namespace_prefix="34")) == 1
    assert (ids(stored, "a", "12"), ids(stored, "b")) == ("12", "")
    now.now_s += 60
    stored.get("a", "1")
    assert stored.evict(EvictFilter(older_than_s=50)) == 1, "the other one was just used"
    assert stored.evict(EvictFilter(all=True)) == 1
    assert stored.figures == (0, 0)


# --- What clients see


USER: Any = {"role": "user", "content": "What is the weather?"}


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_conversation_goes_on_as_if_all_of_it_had_been_sent(is_stream: bool) -> None:
    tools: Any = CODEX_TOOLS

    async def run() -> None:
        engine = Engine(CODEX_WRITTEN)
        responses = openai_of(engine).responses

        async def ask(**how: Any) -> Any:
            if not is_stream:
                return await responses.create(model="m", tools=tools, **how)
            async with responses.stream(model="m", tools=tools, **how) as stream:
                return await stream.get_final_response()

        first = await ask(input="Go.", instructions="Be short.")
        assert (first.model_extra["store"], first.previous_response_id) == (True, None)
        results: Any = [
            {
                "type": f"{call.type.removesuffix('_call')}_call_output",
                "call_id": call.call_id,
                "output": "done",
            }
            for call in first.output
        ]
        second = await ask(
            input=results, previous_response_id=first.id, instructions="Be kind.", store=True
        )
        assert second.previous_response_id == first.id
        third = await ask(input="Thanks.", previous_response_id=second.id, store=False)
        assert third.model_extra["store"] is False
        items: Any = [{"role": "user", "content": "Go."}]
        items += [it.model_dump(exclude_none=True) for it in first.output]
        await ask(input=[*items, *results], instructions="Be kind.", store=False)
        items += [*results, *(it.model_dump(exclude_none=True) for it in second.output)]
        await ask(input=[*items, {"role": "user", "content": "Thanks."}])
        assert engine.prompts[1:3] == engine.prompts[3:]
        assert "Be short." in engine.prompts[0] and "Be short." not in engine.prompts[1]
        kept = await responses.retrieve(first.id)
        assert [it.id for it in kept.output] == [it.id for it in first.output]
        without = {"output": None}  # to which the client adds parsed arguments
        assert kept.to_dict() | without == first.to_dict() | without
        with pytest.raises(openai.NotFoundError):
            await responses.retrieve(third.id)

    asyncio.run(run())


def test_a_conversation_may_part_and_an_answer_that_was_cut_is_stored_too() -> None:
    async def run() -> None:
        engine = Engine("It is", "length")
        responses = openai_of(engine).responses
        first = await responses.create(model="m", input=[USER])
        assert first.status == "incomplete"
        for more in ("Go on.", "Stop."):
            await responses.create(model="m", input=more, previous_response_id=first.id)
        both = [prompt.removeprefix(engine.prompts[0]) for prompt in engine.prompts[1:]]
        assert [prompt.count("Go on.") for prompt in both] == [1, 0]
        assert all(prompt.startswith("It is<|im_end|>") for prompt in both)
        assert (await responses.retrieve(first.id)).status == "incomplete"

    asyncio.run(run())


def test_arguments_of_calls_are_kept_as_they_were_sent() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f"}
    texts = ['{"b": 1, "a": "\\"1\\""}', '"1"', "not {", "{}"]
    items: Any = [USER, *({**call, "arguments": text} for text in texts)]

    async def run() -> None:
        engine = Engine("Hm.")
        responses = openai_of(engine).responses
        first = await responses.create(model="m", input=items)
        await responses.create(model="m", input="a", previous_response_id=first.id)
        assert engine.prompts[1].startswith(engine.prompts[0])

    asyncio.run(run())


def test_an_unknown_response_is_a_404_that_says_why() -> None:
    async def run() -> None:
        responses = openai_of(Engine("Hm.")).responses
        kept = (await responses.create(model="m", input="a")).id
        await responses.delete(kept)
        for asked in (responses.retrieve(kept), responses.delete(kept)):
            with refused(openai.NotFoundError, hide={kept: "ID"}, code=None):
                await asked
        code, param = "previous_response_not_found", "previous_response_id"
        with refused(openai.NotFoundError, hide={kept: "ID"}, code=code, param=param):
            await responses.create(model="m", input="a", previous_response_id=kept)

    asyncio.run(run())


def test_a_deleted_response_is_answered_as_openai_does() -> None:
    async def run() -> None:
        responses = openai_of(Engine("Hm.")).responses
        kept = (await responses.create(model="m", input="a")).id
        deleted = await responses.with_raw_response.delete(kept)
        body = json.loads(await deleted.http_response.aread())
        assert body == {"id": kept, "object": "response", "deleted": True}

    asyncio.run(run())


def test_a_stored_response_is_not_streamed_again() -> None:
    async def run() -> None:
        responses = openai_of(Engine("Hm.")).responses
        kept = (await responses.create(model="m", input="a")).id
        with refused(openai.BadRequestError, param="stream", code="unsupported_parameter"):
            await responses.retrieve(kept, stream=True)

    asyncio.run(run())


def test_a_server_that_stores_nothing_says_so() -> None:
    async def run() -> None:
        responses = openai_of(api_of(Engine("Hm."), Settings(stored_responses_size=0))).responses
        answer = await responses.create(model="m", input="a", store=True)
        assert answer.model_extra and answer.model_extra["store"] is False
        with refused(openai.NotFoundError, hide={answer.id: "ID"}):
            await responses.retrieve(answer.id)

    asyncio.run(run())


async def is_there(client: openai.AsyncOpenAI, id: str) -> bool:
    try:
        await client.responses.retrieve(id)
    except openai.NotFoundError:
        return False
    return True


def test_a_tenant_sees_only_its_own_responses_and_they_go_with_its_key(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.touch(0o600)
    file.write_text('[a]\nkey = "sk-a"\n[b]\nkey = "sk-b"')
    settings = Settings(api_keys_file=str(file))
    keys = Keys(settings=settings, is_strict=False, is_local=True)

    async def run() -> None:
        engine = Engine("Hm.")
        api = api_of(engine, settings, keys)
        a, b = (openai_of(api, key) for key in ("sk-a", "sk-b"))
        ids = [(await each.responses.create(model="m", input="x")).id for each in (a, b)]
        assert [await is_there(a, id) for id in ids] == [True, False]
        for other in (b.responses.delete(ids[0]), continued(b, ids[0])):
            with pytest.raises(openai.NotFoundError):
                await other
        assert await is_there(a, ids[0])
        begun = asyncio.create_task(a.responses.create(model="m", input="x"))
        while len(engine.prompts) < 3:
            await asyncio.sleep(0)
        assert not begun.done()
        file.write_text('[b]\nkey = "sk-b"')
        keys.adopt(keys.read())
        last = (await begun).id
        with pytest.raises(openai.AuthenticationError):
            await a.responses.retrieve(ids[0])
        file.write_text('[a]\nkey = "sk-a"\n[b]\nkey = "sk-b"')
        keys.adopt(keys.read())
        assert [await is_there(a, id) for id in (ids[0], last)] == [False, False]
        assert await is_there(b, ids[1])

    asyncio.run(run())


async def continued(client: openai.AsyncOpenAI, id: str, **how: Any) -> Any:
    return await client.responses.create(
        model="m", input="more", previous_response_id=id, extra_body=how
    )


def references(*ids: str) -> Any:
    return [{"type": "item_reference", "id": id} for id in ids]


def test_an_item_of_a_stored_response_may_be_named_by_its_id() -> None:
    tools: Any = CODEX_TOOLS

    async def run() -> None:
        engine = Engine(f"Let me see.{CODEX_WRITTEN}")
        responses = openai_of(engine).responses
        output = (await responses.create(model="m", input=[USER], tools=tools)).output
        ids = [item.id or "" for item in output]
        assert len({*ids}) == len(ids) == 5
        whole: Any = [item.model_dump(exclude_none=True) for item in output]
        for items in (whole, references(*ids), [*references(ids[0]), *whole[1:]]):
            last = await responses.create(model="m", input=[USER, *items], tools=tools)
            again: Any = references(*ids[:2])
            await responses.create(
                model="m", input=again, tools=tools, previous_response_id=last.id, store=False
            )
        assert engine.prompts[1:3] == engine.prompts[3:5] == engine.prompts[5:7]
        assert "mcp__docs__find" in engine.prompts[1]

    asyncio.run(run())


def test_only_the_tenant_s_own_items_are_found_and_within_the_bound_of_a_body(
    tmp_path: Path,
) -> None:
    file = tmp_path / "keys.toml"
    file.touch(0o600)
    file.write_text('[a]\nkey = "sk-a"\n[b]\nkey = "sk-b"')
    settings = Settings(api_keys_file=str(file), max_body_size=2000)
    keys = Keys(settings=settings, is_strict=False, is_local=True)

    async def run() -> None:
        api = api_of(Engine("Hm."), settings, keys)
        a, b = (openai_of(api, key).responses for key in ("sk-a", "sk-b"))
        kept = await a.create(model="m", input="x")
        id = kept.output[0].id or ""
        for client, asked in ((b, id), (a, f"{id}0"), (a, "msg"), (a, "msg_1_2")):
            with refused(openai.NotFoundError, hide={id: "ID"}, code=None):
                await client.create(model="m", input=references(asked))
        await a.create(model="m", input=[USER, *references(id)])
        with refused(openai.APIStatusError, code="request_too_large", status_code=413):
            await a.create(model="m", input=[USER, *references(*[id] * 12)])
        await a.delete(kept.id)
        with pytest.raises(openai.NotFoundError):
            await a.create(model="m", input=[USER, *references(id)])

    asyncio.run(run())


def test_an_eviction_drops_responses_and_the_command_line_s_does_so_too() -> None:
    class Evicting(Engine):
        on_evict: Any = None

        async def operate(self, wanted: EvictFilter) -> list[dict[str, Any]]:
            return [{"evicted_blocks": 1, "dry": wanted.dry_run}]

    async def run() -> None:
        engine = Evicting("Hm.")
        api = api_of(engine, Settings())
        client = openai_of(api)

        async def stored() -> str:
            return (await client.responses.create(model="m", input="x")).id

        async def evict(**body: Any) -> Any:
            return (await client._client.post("/admin/cache/evict", json=body)).json()

        first = await stored()
        assert await evict(all=True, dry_run=True) == {
            "evicted_blocks": 1,
            "dry": True,
            "evicted_responses": 1,
            "evicted_answers": 0,
        }
        assert (await evict(older_than_s=60))["evicted_responses"] == 0
        assert await is_there(client, first)
        assert (await evict(all=True))["evicted_responses"] == 1
        assert not await is_there(client, first)
        second = await stored()
        engine.on_evict(EvictFilter(all=True))
        assert not await is_there(client, second)

    asyncio.run(run())


def test_a_conversation_that_has_become_too_long_is_refused_before_it_is_read() -> None:
    settings = Settings(max_body_size=2000)

    async def run() -> None:
        client = openai_of(api_of(Engine("Hm."), settings))
        last = (await client.responses.create(model="m", input="x" * 1500)).id
        with refused(openai.APIStatusError, status_code=413):
            await continued(client, last, user="u" * 300)
        assert (await continued(client, last)).previous_response_id == last

    asyncio.run(run())


def test_a_conversation_has_no_more_items_and_values_than_a_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tieredkv.server.responses_api.MAX_ITEMS", 4)
    monkeypatch.setattr("tieredkv.fields.MAX_CONTAINERS", 100)

    async def run() -> None:
        client = openai_of(Engine("Hm."))
        last = (await client.responses.create(model="m", input=[USER] * 3)).id
        with refused(openai.BadRequestError, param="input", code="array_above_max_length"):
            await continued(client, last)
        text = [{"type": "input_text", "text": "a"}] * 90
        items: Any = [{**USER, "content": text}]
        last = (await client.responses.create(model="m", input=items)).id
        last = (await continued(client, last)).id
        with refused(openai.BadRequestError):
            monkeypatch.setattr("tieredkv.fields.MAX_CONTAINERS", 90)
            await continued(client, last)

    asyncio.run(run())


def test_what_is_held_is_told_by_metrics() -> None:
    stored = StoredResponses(99 * SIZE, Time())
    stored.add("a", "1", made())
    text = Metrics(Settings(), Engine("Hm."), stored).text().decode()  # type: ignore[arg-type]
    assert "\ntieredkv_stored_responses 1.0\n" in text
    assert f"\ntieredkv_stored_response_bytes {SIZE:.1f}\n" in text


def test_conversations_that_are_continued_count_as_bodies_in_hand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        client = openai_of(Engine("Hm."))
        last = (await client.responses.create(model="m", input="x" * 1500)).id
        monkeypatch.setattr("tieredkv.server.limits.MAX_BODIES_BYTES", 1000)
        client.max_retries = 0
        with refused(openai.RateLimitError, code="queue_full"):
            await continued(client, last)
        monkeypatch.setattr("tieredkv.server.limits.MAX_BODIES_BYTES", 2000)
        for _ in range(3):  # they are given back
            assert (await continued(client, last)).previous_response_id == last

    asyncio.run(run())


def test_the_items_that_a_response_answers_are_listed_in_pages() -> None:
    async def run() -> None:
        client = openai_of(Engine("Fine."))
        first = await client.responses.create(model="m", input="One.")
        more: Any = [{"role": "user", "content": "Two."}]
        how: Any = {"model": "m", "previous_response_id": first.id}
        second = await client.responses.create(input=more, **how)
        page = await client.responses.input_items.list(second.id, order="asc")
        items: list[Any] = [item async for item in page]
        assert [item.type for item in items] == ["message"] * 3
        texts = [item.content[0].text for item in items]
        assert texts == ["One.", "Fine.", "Two."]
        assert len({item.id for item in items}) == 3
        assert items[1].id == first.output[0].id
        page = await client.responses.input_items.list(second.id, limit=1)
        assert ([it.id for it in page.data], page.has_more) == ([items[2].id], True)
        assert [it.id async for it in page] == [it.id for it in items[::-1]]
        wrong: list[dict[str, Any]] = [{"after": "x"}, {"limit": 0}, {"limit": 101}]
        for query in [*wrong, {"order": "up"}]:
            with pytest.raises(openai.BadRequestError) as error:
                await client.responses.input_items.list(second.id, **query)
            assert error.value.param == next(iter(query))
        with pytest.raises(openai.NotFoundError):
            await client.responses.input_items.list("resp_x")

    asyncio.run(run())
