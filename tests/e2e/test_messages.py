"""Anthropic's API by its own client, against a real server on the small model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from tests import golden, http
from tests.serving import Server, running
from tieredkv.config import Settings

BLOCK = 16
KEY = {"x-api-key": "secret"}
needs_claims = pytest.mark.skipif(
    "5m" not in Settings().retention_policies().names, reason="the engine does not know claims"
)
POLICIES = """[retention.5m]
idle = "5m"
absolute = "1h"
tiers = ["device", "host"]
[retention.1h]
idle = "1h"
absolute = "1h"
tiers = ["device", "host"]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("messages")
    config = folder / "config.toml"
    config.write_text(POLICIES)
    with running(folder, "--config", str(config), "--api-key", KEY["x-api-key"]) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=server.root, api_key=KEY["x-api-key"], max_retries=0
    ) as client:
        yield client


def text(words: str, ttl: str | None = None) -> dict[str, Any]:
    control = {"cache_control": {"type": "ephemeral", "ttl": ttl}} if ttl else {}
    return {"type": "text", "text": words, **control}


def user(*blocks: dict[str, Any] | str) -> dict[str, Any]:
    return {"role": "user", "content": [text(it) if isinstance(it, str) else it for it in blocks]}


def ask(client: anthropic.Anthropic, *turns: dict[str, Any], **fields: Any) -> Message:
    body: dict[str, Any] = {"model": "tiny-random", "max_tokens": 4, **fields}
    body["extra_body"] = {"temperature": 0}  # newer clients have no such argument
    create: Any = client.messages.create
    message = create(messages=turns, **body)
    assert isinstance(message, Message)
    return message


def parts(message: Message) -> tuple[int, int, int, int]:
    """Return the prompt's tokens: read, written for 1 h, written for 5 min, and the others."""
    usage = message.usage
    assert usage.cache_creation is not None
    created = usage.cache_creation
    written = (created.ephemeral_1h_input_tokens, created.ephemeral_5m_input_tokens)
    assert usage.cache_creation_input_tokens == sum(written)
    assert usage.cache_read_input_tokens is not None
    return usage.cache_read_input_tokens, *written, usage.input_tokens


def post(server: Server, path: str = "/v1/messages", **fields: Any) -> httpx.Response:
    body = {"model": "tiny-random", "max_tokens": 4, "messages": [user("hi")], **fields}
    return http.post(f"{server.root}{path}", json=body, headers=KEY)


def test_an_answer_is_a_message(client: anthropic.Anthropic) -> None:
    message = ask(client, user("Hello"), system="Be brief.")
    Message.model_validate(message.model_dump(), strict=True)
    assert message.type == "message" and message.role == "assistant"
    assert message.id.startswith("msg_") and message.model == "tiny-random"
    assert message.stop_reason == "max_tokens" and message.stop_sequence is None
    assert [block.type for block in message.content] == ["text"]
    assert message.usage.output_tokens == 4
    assert message._request_id is not None and message._request_id.startswith("req_")


def test_a_stream_says_the_same_in_events(client: anthropic.Anthropic, server: Server) -> None:
    talk = user("Tell me of rivers")
    whole = ask(client, talk, max_tokens=9)
    body = {"model": "tiny-random", "max_tokens": 9, "messages": [talk]}
    begin: Any = client.messages.stream
    with begin(**body, extra_body={"temperature": 0}) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert streamed.content[0].to_dict()["text"] == whole.content[0].to_dict()["text"]
    assert streamed.usage.output_tokens == 9 and streamed.stop_reason == "max_tokens"
    assert sum(parts(streamed)) == sum(parts(whole))
    assert events[0] == "message_start" and events[-1] == "message_stop"
    body |= {"temperature": 0, "stream": True}
    raw = http.post(f"{server.root}/v1/messages", json=body, headers=KEY).text
    heads = [line.removeprefix("event: ") for line in raw.splitlines() if line[:6] == "event:"]
    assert heads[:3] == ["message_start", "content_block_start", "ping"]
    assert heads[3:-3] == ["content_block_delta"] * 9
    assert heads[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "[DONE]" not in raw
    every = TypeAdapter(RawMessageStreamEvent)
    for line in raw.splitlines():
        if line.startswith("data: ") and '"ping"' not in line:
            every.validate_json(line.removeprefix("data: "))


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    words = ask(client, user("Go"), max_tokens=12).content[0].to_dict()["text"]
    message = ask(client, user("Go"), max_tokens=12, stop_sequences=["never said", str(words)[5:7]])
    assert message.stop_reason == "stop_sequence"
    assert message.stop_sequence == str(words)[5:7]
    assert message.content[0].to_dict()["text"] == str(words)[:5]


@needs_claims
def test_prompts_are_kept_up_to_their_breakpoints(client: anthropic.Anthropic) -> None:
    a, b, c = "A" * 200, "B" * 200, "C" * 200
    base = [text(a, "1h")]
    first = ask(client, user("x"), system=base)
    assert parts(first)[0] == 0 and parts(first)[2] == 0
    assert 200 <= parts(first)[1] < 240
    again = ask(client, user("y"), system=base)
    assert parts(again)[:3] == (parts(first)[1], 0, 0)

    mixed = ask(client, user(text(c, "5m"), "tail"), system=[text(a), text(b, "1h")])
    read, hour, five, rest = parts(mixed)
    assert read == parts(first)[1]
    assert (read + hour) // BLOCK == (len("<s>system\n") - 2 + 401) // BLOCK
    assert five and rest
    count: Any = client.messages.count_tokens
    total = count(model="tiny-random", messages=[user(text(c), "tail")], system=[text(a), text(b)])
    assert read + hour + five + rest == total.input_tokens


@needs_claims
def test_an_operator_may_want_nothing_kept_unmarked_and_hits_only_near_marks(
    tmp_path: Path,
) -> None:
    blocks = [letter * 64 for letter in "PQRST"]
    with (
        running(tmp_path, "--anthropic-implicit", "off", "--cache-lookback", "3") as server,
        anthropic.Anthropic(
            base_url=server.root, api_key=KEY["x-api-key"], max_retries=0
        ) as client,
    ):
        assert [parts(ask(client, user(*blocks)))[:3] for _ in range(2)] == [(0, 0, 0)] * 2
        head = parts(ask(client, user(text(blocks[0], "5m"), "x")))
        assert head[0] == 0 and head[2] >= 64
        near = parts(ask(client, user(*blocks[:2], text(blocks[2], "5m"), "x")))
        assert near[0] == head[2] and near[2] >= 128
        far = parts(ask(client, user(*blocks[:4], text(blocks[4], "5m"), "x")))
        assert far[0] == near[0] + near[2]
        lost = parts(
            ask(client, user(blocks[0], *(it * 32 for it in "abc"), text("y" * 64, "5m"), "x"))
        )
        assert lost[0] == 0 and lost[2] > 64


def test_both_apis_share_the_same_conversation(client: anthropic.Anthropic, server: Server) -> None:
    schema = {"type": "object", "properties": {"place": {"type": "string"}}}
    tool = {"name": "weather", "description": "Tells it", "input_schema": schema}
    call = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"place": "Oslo"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "rain " * 20}
    turns = [
        user("What is it like?"),
        {"role": "assistant", "content": [text("Let me look."), call]},
        user(result, "And now, please?"),
    ]
    message = ask(client, *turns, system="You help. " * 9, tools=[tool])
    function = {"name": "weather", "description": "Tells it", "parameters": schema}
    called = {"name": "weather", "arguments": '{"place": "Oslo"}'}
    with server.client(KEY["x-api-key"]) as openai:
        create: Any = openai.chat.completions.create
        answer = create(
            model="tiny-random",
            max_tokens=4,
            temperature=0,
            tools=[{"type": "function", "function": function}],
            messages=[
                {"role": "system", "content": "You help. " * 9},
                {"role": "user", "content": "What is it like?"},
                {
                    "role": "assistant",
                    "content": "Let me look.",
                    "tool_calls": [{"id": "t1", "type": "function", "function": called}],
                },
                {"role": "tool", "tool_call_id": "t1", "content": "rain " * 20},
                {"role": "user", "content": "And now, please?"},
            ],
        )
    usage = answer.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.prompt_tokens == sum(parts(message))
    cached = usage.prompt_tokens_details.cached_tokens
    assert cached == (usage.prompt_tokens - 1) // BLOCK * BLOCK
    assert message.content[0].to_dict()["text"] == answer.choices[0].message.content


def test_no_tokens_at_all_warm_the_cache(client: anthropic.Anthropic) -> None:
    system = [text("W" * 100, "5m")]
    warmed = ask(client, user("x"), system=system, max_tokens=0)
    assert warmed.content == [] and warmed.stop_reason == "max_tokens"
    assert warmed.usage.output_tokens == 0 and parts(warmed)[2] >= 96
    assert parts(ask(client, user("x"), system=system))[0] == parts(warmed)[2]


HI = [user("hi")]
MARK = {"type": "ephemeral"}
REFUSED: list[dict[str, Any]] = [
    {"messages": [user(*[text("x", "5m")] * 5)]},
    {"messages": [user(*[text("x", "5m")] * 4, "y")], "cache_control": MARK},
    {"messages": [user("a", "b", text("x", "5m"), "c", text("x", "1h"))]},
    {"system": [text("", "5m")]},
    {"stream": True, "max_tokens": 0},
    {"max_tokens": None},
    {"messages": [user({"type": "text"})]},
    {"tool_choice": {"type": "any"}},
    {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 0},
    {"system": [text("x", "48h")]},
]


@pytest.mark.parametrize("fields", REFUSED)
def test_what_is_refused_and_in_which_words(server: Server, fields: dict[str, Any]) -> None:
    response = post(server, **fields)
    body = response.json()
    assert response.status_code == 400
    golden.told(body["error"].pop("message"))
    assert body["error"] == {"type": "invalid_request_error"}
    assert body["type"] == "error" and body["request_id"] == response.headers["request-id"]


def test_an_unknown_model_is_not_found(client: anthropic.Anthropic) -> None:
    with golden.refused(anthropic.NotFoundError, type="not_found_error"):
        ask(client, user("hi"), model="other")


def test_all_but_the_version_needs_a_key(server: Server) -> None:
    assert http.get(f"{server.root}/version").status_code == 200
    for path in ("/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize"):
        response = http.post(f"{server.root}{path}", json={}, headers={"x-api-key": "wrong"})
        assert response.status_code == 401, path
        if "messages" in path:
            assert response.json()["error"]["type"] == "authentication_error"
            assert response.json()["request_id"] == response.headers["request-id"]


def test_texts_and_conversations_are_tokenized(server: Server) -> None:
    def tell(path: str, **body: Any) -> dict[str, Any]:
        told: dict[str, Any] = http.post(f"{server.root}{path}", json=body, headers=KEY).json()
        return told

    text = tell("/tokenize", prompt="héy", return_token_strs=True)
    assert text["tokens"] == list("héy".encode())
    assert text["count"] == 4 and text["max_model_len"] == 4096 and len(text["token_strs"]) == 4
    assert tell("/detokenize", tokens=text["tokens"]) == {"prompt": "héy"}
    talk = tell("/tokenize", messages=[{"role": "user", "content": "hi"}])
    short = tell(
        "/tokenize", messages=[{"role": "user", "content": "hi"}], add_generation_prompt=False
    )
    assert talk["tokens"][: short["count"]] == short["tokens"] and talk["count"] > short["count"]
    assert talk["token_strs"] is None
    counted = post(server, "/v1/messages/count_tokens").json()
    assert counted == {"input_tokens": talk["count"]}
    golden.told(tell("/detokenize", tokens=[999])["error"]["message"])
    golden.told(tell("/tokenize")["error"]["message"])
    flat = tell("/tokenize", messages=[{"role": "user", "content": "hi"}], tools=[{"name": "x"}])
    assert flat["error"]["param"] == "tools[0].type", flat
    golden.told(tell("/detokenize", tokens=[-1])["error"]["message"])
    assert set(http.get(f"{server.root}/version").json()) == {"version"}
