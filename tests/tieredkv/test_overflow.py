"""A prompt that is too long is refused in the words and events that each API's clients look for."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.golden import told
from tests.tieredkv.test_app import Engine, answered
from tieredkv.config import Settings
from tieredkv.engine.checkpoint import load_tokenizer
from tieredkv.engine.engine_messages import EngineInfo
from tieredkv.server.app import Api, build_app
from tieredkv.server.chat import Tokenization
from tieredkv.server.keys import Keys

MAX_LEN = 128
TOKENIZER = load_tokenizer("tiny-random")  # a token for each byte
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {},
    "/v1/completions": {},
    "/v1/responses": {},
    "/v1/messages": {"max_tokens": 4},
}


class ShortEngine(Engine):
    """An engine whose context is short."""

    info = EngineInfo(
        model="m", max_model_len=MAX_LEN, vocab_size=1024, block_size=16, worker_pid=None
    )


def ask(path: str, body: dict[str, Any]) -> httpx.Response:
    settings = Settings()
    keys = Keys(settings=settings, is_strict=False, is_local=True)
    tokenization: Any = Tokenization(TOKENIZER, max_model_len=MAX_LEN)
    engine: Any = ShortEngine(0.0, answered)
    api = Api(settings, engine, tokenization, keys)

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(build_app(api))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.post(path, json={"model": "m", **body})

    try:
        return asyncio.run(send())
    finally:
        api.close()


def body_of(path: str, text: str, **fields: Any) -> dict[str, Any]:
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
    if "messages" not in path and "chat" not in path:
        prompt = {"input" if "responses" in path else "prompt": text}
    return {**BODIES.get(path, {}), **prompt, **fields}


def text_for(path: str, num_tokens: int) -> str:
    """Return a text whose prompt has so many tokens."""
    if path == "/v1/completions":
        return "a" * (num_tokens - len(TOKENIZER.encode("")))
    asked = {"messages": [{"role": "user", "content": "a"}]}
    counted: dict[str, int] = ask("/v1/messages/count_tokens", asked).json()
    return "a" * (num_tokens - counted["input_tokens"] + 1)


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


# A prompt that fills the context leaves no room for the first token of an answer.
@pytest.mark.parametrize("num_tokens", [MAX_LEN, MAX_LEN + 1, 50 * MAX_LEN])
@pytest.mark.parametrize("is_stream", [False, True])
def test_messages_tell_the_length_in_the_words_of_anthropic(
    num_tokens: int, is_stream: bool
) -> None:
    path = "/v1/messages"
    answer = ask(path, body_of(path, text_for(path, num_tokens), stream=is_stream))
    most = min(MAX_LEN, num_tokens - 1)
    text = f"prompt is too long: {num_tokens} tokens > {most} maximum"
    assert answer.status_code == 400
    assert answer.json()["error"] == {"type": "invalid_request_error", "message": text}
    messages = {"messages": body_of(path, text_for(path, num_tokens))["messages"]}
    assert ask(f"{path}/count_tokens", messages).json() == {"input_tokens": num_tokens}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("num_tokens", [MAX_LEN, MAX_LEN + 1, 50 * MAX_LEN])
def test_an_answer_that_is_not_streamed_is_a_400_with_the_code(path: str, num_tokens: int) -> None:
    answer = ask(path, body_of(path, text_for(path, num_tokens)))
    assert answer.status_code == 400
    if path != "/v1/messages":
        field = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path, "messages")
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", field)
        assert error["type"] == "invalid_request_error"
        if path != "/v1/completions":
            told(error["message"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_of_chunks_is_a_400_too(path: str) -> None:
    answer = ask(path, body_of(path, text_for(path, MAX_LEN + 1), stream=True))
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("num_tokens", [MAX_LEN, MAX_LEN + 1, 50 * MAX_LEN])
def test_a_stream_of_responses_says_it_in_its_last_event(num_tokens: int) -> None:
    path = "/v1/responses"
    body = body_of(path, text_for(path, num_tokens), stream=True, instructions=None, store=True)
    answer = ask(path, body)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    created, in_progress, failed = events_of(answer)
    kinds = [event["type"] for event in (created, in_progress, failed)]
    assert kinds == ["response.created", "response.in_progress", "response.failed"]
    assert [event["sequence_number"] for event in (created, in_progress, failed)] == [0, 1, 2]
    response = failed["response"]
    assert response["id"] == created["response"]["id"]
    assert (response["status"], response["output"], response["store"]) == ("failed", [], False)
    assert response["error"]["code"] == "context_length_exceeded"
    told(response["error"]["message"])
    assert created["response"]["error"] is None
    assert "event: response.failed\n" in answer.text


def test_another_fault_of_a_stream_of_responses_is_a_status_of_its_own() -> None:
    answer = ask("/v1/responses", {"input": 5, "stream": True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")


@pytest.mark.parametrize("path", BODIES)
def test_a_prompt_that_leaves_room_for_one_token_is_answered(path: str) -> None:
    text = text_for(path, MAX_LEN - 1)
    limit = {"max_tokens": 4} if "responses" not in path else {"max_output_tokens": 4}
    assert ask(path, body_of(path, text, **limit)).status_code == 200


def test_the_cache_is_filled_with_a_prompt_that_fills_the_context() -> None:
    path = "/v1/messages"
    for num_tokens, status in ((MAX_LEN, 200), (MAX_LEN + 1, 400)):
        body = body_of(path, text_for(path, num_tokens), max_tokens=0)
        assert ask(path, body).status_code == status
