"""Over each API, every turn of an agent finds what the turn before it computed, its answer too."""

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from typing import Any, cast

import pytest

from tests.tieredkv.test_remembered import END, TOKENIZER, sampled
from tests.tieredkv.test_tool_calls import Engine, anthropic_of, openai_of
from tieredkv.config import Settings
from tieredkv.engine.engine_messages import EngineInfo, EngineRequest, RequestUsage, TokenOutput
from tieredkv.operate.calls import EvictFilter
from tieredkv.server.app import Api
from tieredkv.server.chat import Tokenization
from tieredkv.server.keys import Keys
from tieredkv.server.message_parser import families
from tieredkv.types import Tier

BLOCK = 16
NUM_TURNS = 10
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
RESULT = "It is 12 degrees in Zürich, and it rains."


class CachingEngine(Engine):
    """Writes a call in each turn, as no template would, and tells which blocks it has computed."""

    info = EngineInfo(
        model="m", max_model_len=9999, vocab_size=1024, block_size=16, worker_pid=None
    )

    def __init__(self) -> None:
        super().__init__("")
        self.requests: list[list[int]] = []
        self._blocks = set[tuple[int, ...]]()

    def submit(self, request: EngineRequest, take: Callable[[TokenOutput], None]) -> None:
        prompt, turn = request.prompt_token_ids, len(self.requests)
        self.requests.append(prompt)
        cached = 0
        while tuple(prompt[: cached + BLOCK]) in self._blocks and cached + BLOCK < len(prompt):
            cached += BLOCK
        usage = RequestUsage(
            prompt_tokens=len(prompt),
            cached_tokens_by_tier={**dict.fromkeys(Tier, 0), Tier.DEVICE: cached},
        )
        text = f"<think>Turn {turn}.</think>Let me see.\n\n\n<tool_call>"
        text += (
            f'{{"arguments" : {{"city":"Z\\u00fcrich","days":[{turn},2]}},"name" : "get_weather"}}'
        )
        ids = [*sampled(text + "</tool_call>", turn), END]
        whole = [*prompt, *ids[:-1]]  # The last token of an answer is not computed.
        self._blocks |= {tuple(whole[:end]) for end in range(BLOCK, len(whole) + 1, BLOCK)}

        def write() -> None:
            for i in range(0, len(ids), 7):
                reason = "stop" if i + 7 >= len(ids) else None
                output = TokenOutput(
                    request_id=request.request_id,
                    token_ids=ids[i : i + 7],
                    finish_reason=reason,
                    usage=usage,
                )
                take(output)

        asyncio.get_running_loop().call_soon(write)

    async def operate(self, _call: object) -> list[dict[str, Any]]:
        return [{}]


def api_of(engine: Engine, settings: Settings | None = None) -> Api:
    settings = settings or Settings()
    keys = Keys(settings=settings, is_strict=False, is_local=True)
    tokenization = Tokenization(TOKENIZER, family=families()["hermes"])
    return Api(settings, cast(Any, engine), tokenization, keys)


async def chat_turns(api: Api, is_stream: bool) -> AsyncIterator[tuple[int, int, int]]:
    """Yield how many tokens each turn has, has cached and has written."""
    chat = openai_of(api).chat.completions
    function = {"name": "get_weather", "parameters": SCHEMA}
    messages: Any = [{"role": "user", "content": "What is the weather?"}]
    how: Any = {"model": "m", "tools": [{"type": "function", "function": function}]}
    for _ in range(NUM_TURNS):
        if is_stream:
            how["stream_options"] = {"include_usage": True}
            async with chat.stream(messages=messages, **how) as stream:
                answer: Any = await stream.get_final_completion()
        else:
            answer = await chat.create(messages=messages, **how)
        message, usage = answer.choices[0].message, answer.usage
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": RESULT})
        cached = usage.prompt_tokens_details.cached_tokens
        yield usage.prompt_tokens, cached, usage.completion_tokens


async def response_turns(
    api: Api, is_stream: bool, is_stored: bool = False
) -> AsyncIterator[tuple[int, int, int]]:
    """Yield the same over `/v1/responses`."""
    responses = openai_of(api).responses
    items: Any = [{"role": "user", "content": "What is the weather?"}]
    tools = [{"type": "function", "name": "get_weather", "parameters": SCHEMA}]
    how: Any = {"model": "m", "tools": tools}
    for _ in range(NUM_TURNS):
        if is_stream:
            async with responses.stream(input=items, **how) as stream:
                response: Any = await stream.get_final_response()
        else:
            response = await responses.create(input=items, **how)
        if is_stored:
            how["previous_response_id"], items = response.id, []
        else:
            items += [it.model_dump(exclude_none=True) for it in response.output]
        for item in response.output:
            if item.type == "function_call":
                kind = "function_call_output"
                items.append({"type": kind, "call_id": item.call_id, "output": RESULT})
        usage = response.usage
        cached = usage.input_tokens_details.cached_tokens
        yield usage.input_tokens, cached, usage.output_tokens


async def message_turns(api: Api, is_stream: bool) -> AsyncIterator[tuple[int, int, int]]:
    """Yield the same over `/v1/messages`; `count_tokens` must tell the same length."""
    messages = anthropic_of(cast(Any, api)).messages
    turns: Any = [{"role": "user", "content": "What is the weather?"}]
    how: Any = {"model": "m", "tools": [{"name": "get_weather", "input_schema": SCHEMA}]}
    for _ in range(NUM_TURNS):
        counted = (await messages.count_tokens(messages=turns, **how)).input_tokens
        if is_stream:
            async with messages.stream(messages=turns, max_tokens=500, **how) as stream:
                message: Any = await stream.get_final_message()
        else:
            message = await messages.create(messages=turns, max_tokens=500, **how)
        turns.append({"role": "assistant", "content": message.content})
        used = [it.id for it in message.content if it.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": id, "content": RESULT} for id in used]
        turns.append({"role": "user", "content": results})
        usage = message.usage
        cached = usage.cache_read_input_tokens
        prompt = cached + usage.cache_creation_input_tokens + usage.input_tokens
        assert prompt == counted
        yield prompt, cached, usage.output_tokens


async def stored_turns(api: Api, is_stream: bool) -> AsyncIterator[tuple[int, int, int]]:
    """Yield the same where `previous_response_id` names the conversation."""
    async for turn in response_turns(api, is_stream, is_stored=True):
        yield turn


Turns = Callable[[Api, bool], AsyncIterator[tuple[int, int, int]]]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("turns", [chat_turns, response_turns, stored_turns, message_turns])
def test_a_turn_computes_what_is_new_and_less_than_a_block(turns: Turns, is_stream: bool) -> None:
    async def run() -> None:
        engine = CachingEngine()
        told = [turn async for turn in turns(api_of(engine), is_stream)]
        assert len(told) == len(engine.requests) == NUM_TURNS
        for (before, _, written), (prompt, cached, _) in pairwise(told):
            num_new = prompt - before - written
            # The token that ended the answer was not computed; it is in the part of a block.
            assert 0 < num_new < 99 and prompt - cached <= num_new + BLOCK
        for i, (one, other) in enumerate(pairwise(engine.requests)):
            text = str(TOKENIZER.decode(other[len(one) :]))
            assert other[: len(one)] == one
            assert text.startswith(f"<think>Turn {i}.</think>Let me see.") and RESULT in text

    asyncio.run(run())


def test_without_a_bound_nothing_is_remembered() -> None:
    async def run() -> None:
        engine = CachingEngine()
        api = api_of(engine, Settings(remembered_answers_size=0))
        told = [turn async for turn in chat_turns(api, False)]
        for (before, *_), (prompt, cached, _) in pairwise(told):
            assert cached < before + BLOCK, "no block of the answer is found"
            assert prompt > before
        assert "\\u00fc" not in str(TOKENIZER.decode(engine.requests[-1]))

    asyncio.run(run())


def test_any_of_several_answers_can_be_continued() -> None:
    async def run() -> None:
        engine = CachingEngine()
        chat = openai_of(api_of(engine)).chat.completions
        function = {"name": "get_weather", "parameters": SCHEMA}
        how: Any = {"model": "m", "tools": [{"type": "function", "function": function}]}
        asked: Any = [{"role": "user", "content": "What is the weather?"}]
        answer = await chat.create(messages=asked, n=3, **how)
        for i, choice in enumerate(answer.choices):
            message: Any = choice.message.model_dump(exclude_none=True)
            [call] = message["tool_calls"]
            result: Any = {"role": "tool", "tool_call_id": call["id"], "content": RESULT}
            again = await chat.create(messages=[*asked, message, result], **how)
            details = again.usage and again.usage.prompt_tokens_details
            assert details and details.cached_tokens and details.cached_tokens > 150
            assert f"<think>Turn {i}.</think>Let" in str(TOKENIZER.decode(engine.requests[-1]))

    asyncio.run(run())


def test_an_eviction_drops_answers_and_metrics_tell_what_is_held() -> None:
    async def run() -> None:
        engine = CachingEngine()
        api = api_of(engine)
        client = openai_of(api)._client

        async def evict(**body: Any) -> Any:
            return (await client.post("/admin/cache/evict", json=body)).json()

        async def held() -> list[float]:
            text = (await client.get("http://localhost/metrics")).text
            values = dict(it.rsplit(" ", 1) for it in text.splitlines() if it[0] != "#")
            names = ("tieredkv_remembered_answers", "tieredkv_remembered_answer_bytes")
            return [float(values[name]) for name in names]

        async for _ in chat_turns(api, False):
            pass
        num_answers, num_bytes = await held()
        assert num_answers == NUM_TURNS and num_bytes > 1000 * NUM_TURNS
        assert (await evict(all=True, dry_run=True))["evicted_answers"] == NUM_TURNS
        assert (await evict(all=True))["evicted_answers"] == NUM_TURNS
        assert await held() == [0, 0]
        async for _ in chat_turns(api, False):
            break
        cast(Any, engine).on_evict(EvictFilter(all=True))
        assert await held() == [0, 0]

    asyncio.run(run())
