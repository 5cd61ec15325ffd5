"""What clients of a vLLM server ask for, and what its tier is told.

`make test-vllm` runs this in front of the applications of both versions of vLLM.
"""

import asyncio
import hashlib
import hmac
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests import golden
from tests.integrations import apps
from tests.integrations.apps import TIER, Served, make, stand_in
from tests.integrations.engines import HAS_VLLM, RealEngine
from tieredkv.hashing import namespace_digest
from tieredkv.integrations import vllm_middleware
from tieredkv.integrations.vllm_middleware import RetentionMiddleware

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
TEXTS: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "hello"}]},
    "/v1/completions": {"model": "m", "prompt": "hello"},
    "/v1/responses": {"model": "m", "input": "hello"},
    MESSAGES: {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]},
}
OPENAI = [path for path in TEXTS if path != MESSAGES]
KEY, OTHER = "sk-alice", "sk-bob"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def post(
    served: Any, path: str, body: Any = None, key: str | None = KEY, **headers: str
) -> httpx.Response:
    """Send a body, or fields beside a prompt, with a key."""
    if isinstance(body, dict) and path in TEXTS:
        body = {**TEXTS[path], **body}
    sent = body if isinstance(body, bytes) else json.dumps(body or TEXTS[path]).encode()
    told = {"content-type": "application/json", **headers}
    if key:
        told["authorization"] = f"Bearer {key}"

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(getattr(served, "app", served))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(path, content=sent, headers=told)

    return asyncio.run(send())


def told(served: Served) -> dict[str, Any]:
    """Return what the tier is told of the only request."""
    params: dict[str, Any] = served.only.kv_transfer_params["tieredkv"]
    return params


# --- retention ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", OPENAI)
@pytest.mark.parametrize(
    ("word", "name"), [("24h", "24h"), ("in_memory", "in_memory"), ("in-memory", "in_memory")]
)
def test_the_tier_is_told_the_retention_and_the_tenant(path: str, word: str, name: str) -> None:
    served = make()
    assert post(served, path, {"prompt_cache_retention": word}).status_code == 200
    assert told(served) == {"tenant": digest(KEY), "retention": name}


@pytest.mark.parametrize("path", OPENAI)
@pytest.mark.parametrize("value", [{}, {"prompt_cache_retention": None}], ids=str)
def test_without_a_word_the_tier_decides(path: str, value: dict[str, Any]) -> None:
    served = make()
    assert post(served, path, value).status_code == 200
    assert told(served) == {"tenant": digest(KEY)}


def test_what_clients_say_to_the_tier_themselves_is_overwritten() -> None:
    served = make()
    params = {"tieredkv": {"tenant": "boss", "retention": "24h"}, "do_remote_decode": True}
    sent = {"kv_transfer_params": params, "cache_salt": "mine"}
    assert post(served, CHAT, sent).status_code == 200
    held = served.only.kv_transfer_params
    assert held == {"do_remote_decode": True, "tieredkv": {"tenant": digest(KEY)}}
    assert "mine" not in served.only.cache_salt


@pytest.mark.parametrize("path", OPENAI)
@pytest.mark.parametrize("word", ["48h", "5m", ""])
def test_a_word_that_does_not_exist_is_refused_as_vllm_does_it(path: str, word: str) -> None:
    served = make()
    answer = post(served, path, {"prompt_cache_retention": word})
    assert answer.status_code == 400
    error = answer.json()["error"]
    golden.told(error["message"], hide={f"'{word}'": "WORD"})
    assert error == {
        "message": error["message"],
        "type": "BadRequestError",
        "param": "prompt_cache_retention",
        "code": 400,
    }
    assert not served.requests
    if HAS_VLLM:  # it has the same members in the same form
        theirs = post(served, path, {"temperature": "hot"}).json()["error"]
        assert {name: type(theirs[name]) for name in error} == {
            name: type(value) for name, value in error.items()
        }


def test_a_word_that_is_no_text_is_refused() -> None:
    answer = post(make(), CHAT, {"prompt_cache_retention": 24})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt_cache_retention"


@pytest.mark.parametrize("path", OPENAI)
def test_policies_of_the_tiers_config_file_can_be_named(path: str, tmp_path: Path) -> None:
    file = tmp_path / "kv.toml"
    file.write_text('[retention.week]\nidle="1d"\nabsolute="7d"\ntiers=["device","host","disk"]\n')
    served = make({**TIER, "config_file": str(file)})
    assert post(served, path, {"prompt_cache_retention": "week"}).status_code == 200
    assert told(served)["retention"] == "week"


def marked(*ttls: str | None) -> dict[str, Any]:
    """Return messages with a breakpoint of each ttl, which may be left out."""
    marks = [{"type": "ephemeral", **({"ttl": ttl} if ttl else {})} for ttl in ttls]
    blocks = [{"type": "text", "text": "hello", "cache_control": mark} for mark in marks]
    return {"messages": [{"role": "user", "content": blocks}]}


def test_a_breakpoint_pins_and_keeps_at_least_as_long_as_the_default() -> None:
    for body, default, expected in (
        (marked(None), None, {"retention": "in_memory", "pin_s": 300.0}),
        (marked("5m"), None, {"retention": "in_memory", "pin_s": 300.0}),
        (marked("1h"), None, {"retention": "1h", "pin_s": 3600.0}),
        (marked("1h", "5m"), None, {"retention": "1h", "pin_s": 3600.0}),
        (marked("5m"), "24h", {"retention": "24h", "pin_s": 300.0}),
        ({}, "24h", {}),
    ):
        served = make({**TIER, "default_retention": default} if default else TIER, (KEY,))
        assert post(served, MESSAGES, body).status_code == 200
        assert told(served) == {"tenant": digest(KEY), **expected}


def test_breakpoints_count_wherever_they_may_be() -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    tool = {"name": "t", "description": "d", "input_schema": {"type": "object"}}
    for body in (
        {"tools": [{**tool, **mark}]},
        {"system": [{"type": "text", "text": "s", **mark}]},
        mark,
    ):
        served = make(keys=(KEY,))
        assert post(served, MESSAGES, body).status_code == 200
        assert told(served)["pin_s"] == 3600.0


def test_a_ttl_that_does_not_exist_is_refused_in_anthropics_form() -> None:
    served = make(keys=(KEY,))
    answer = post(served, MESSAGES, marked("5m", "48h"))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (answer.json()["type"], error["type"]) == ("error", "invalid_request_error")
    golden.told(error["message"])
    assert not served.requests


PART = {"type": "text", "text": "hello"}
CONTROL = {"cache_control": {"type": "ephemeral"}}
LOOK = {"name": "look", "parameters": {"type": "object"}}
TOLD: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # The endpoint, the fields, and what the tier is told.
    *(
        (path, {"prompt_cache_options": {"ttl": ttl}}, {"retention": retention, "pin_s": pin_s})
        for path in OPENAI
        for ttl, retention, pin_s in (
            ("5m", "in_memory", 300.0),
            ("30m", "in_memory", 1800.0),
            ("1h", "in_memory", 3600.0),
            ("12h", "24h", 43200.0),
            ("24h", "24h", 86400.0),
        )
    ),
    *(
        (path, {"prompt_cache_options": {}}, {"retention": "in_memory", "pin_s": 1800.0})
        for path in OPENAI
    ),
    *((path, CONTROL, {"retention": "in_memory", "pin_s": 300.0}) for path in OPENAI),
    (
        CHAT,
        {"prompt_cache_options": {"ttl": "5m"}, "prompt_cache_retention": "24h"},
        {"retention": "24h", "pin_s": 300.0},
    ),
    (CHAT, {"prompt_cache_options": {"mode": "explicit"}}, {"retention": "in_memory"}),
    (
        CHAT,
        {
            "prompt_cache_options": {"mode": "explicit", "ttl": "12h"},
            "messages": [
                {
                    "role": "user",
                    "content": [{**PART, "prompt_cache_breakpoint": {"mode": "explicit"}}],
                }
            ],
        },
        {"retention": "24h", "pin_s": 43200.0},
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{**PART, **CONTROL}]}]},
        {"retention": "in_memory", "pin_s": 300.0},
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "hello", **CONTROL}]},
        {"retention": "in_memory", "pin_s": 300.0},
    ),
    (
        CHAT,
        {"tools": [{"type": "function", "function": LOOK, **CONTROL}]},
        {"retention": "in_memory", "pin_s": 300.0},
    ),
    (
        "/v1/responses",
        {
            "input": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "input_text",
                            "text": "hello",
                            "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"},
                        }
                    ],
                }
            ]
        },
        {"retention": "24h", "pin_s": 43200.0},
    ),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": "hello", **CONTROL}]},
        {"retention": "in_memory", "pin_s": 300.0},
    ),
    (MESSAGES, marked("2h"), {"retention": "24h", "pin_s": 7200.0}),
    (MESSAGES, {"prompt_cache_retention": "24h"}, {}),
]


@pytest.mark.parametrize(("path", "fields", "expected"), TOLD)
def test_the_fields_of_all_dialects_are_told_and_vllm_takes_what_is_left(
    path: str, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    served = make(keys=(KEY,))
    answer = post(served, path, fields)
    assert answer.status_code == 200, answer.text
    assert told(served) == {"tenant": digest(KEY), **expected}


@pytest.mark.parametrize("ttl", [300, True, [], {}, "forever", "-5m", "0s", "48h", ""])
def test_a_duration_that_makes_no_sense_is_refused_with_its_path(ttl: Any) -> None:
    served = make(keys=(KEY,))
    mark = {"cache_control": {"type": "ephemeral", "ttl": ttl}}
    at = {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": ttl}}
    for fields, param in (
        ({"prompt_cache_options": {"ttl": ttl}}, "prompt_cache_options.ttl"),
        (mark, "cache_control.ttl"),
        (
            {"messages": [{"role": "user", "content": [{**PART, **mark}]}]},
            "messages[0].content[0].cache_control.ttl",
        ),
        (
            {"messages": [{"role": "user", "content": [{**PART, **at}]}]},
            "messages[0].content[0].prompt_cache_breakpoint.ttl",
        ),
    ):
        answer = post(served, CHAT, fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
    assert not served.requests


@pytest.mark.parametrize("options", [5, True, [], "30m", {"mode": "bogus"}, {"ttl": {"a": 1}}])
def test_options_that_make_no_sense_are_refused(options: Any) -> None:
    served = make(keys=(KEY,))
    answer = post(served, CHAT, {"prompt_cache_options": options})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("prompt_cache_options")
    assert not served.requests


# --- tenants ------------------------------------------------------------------------------------


def salt(served: Served, body: dict[str, Any] | None = None, key: str | None = KEY) -> Any:
    """Return the salt with which a request reaches vLLM."""
    served.requests.clear()
    assert post(served, CHAT, body or {}, key).status_code == 200
    return served.only.cache_salt


def test_salts_keep_tenants_apart_and_stay_the_same_after_a_restart() -> None:
    served = make()
    alice, bob = salt(served), salt(served, key=OTHER)
    assert len(alice) == 64 and alice != bob
    assert salt(make()) == alice
    # This value must never change, or nothing on disk is found after an upgrade; the digest of the
    # key, which others may see, does not suffice to compute it.
    made = hmac.new(KEY.encode(), namespace_digest(digest(KEY)), hashlib.sha256)
    assert alice == made.hexdigest()
    assert salt(served, key=None) is None
    assert served.only.kv_transfer_params == {"tieredkv": {}}


def test_a_clients_salt_narrows_its_tenant_and_reaches_nobody_else() -> None:
    served = make()
    bob = salt(served, key=OTHER)
    found = {salt(served, {"cache_salt": value}) for value in ("a", "b", bob)}
    found |= {salt(served, {"cache_salt": value}, None) for value in ("a", bob)}
    found |= {salt(served), bob}
    assert len(found) == 7


@pytest.mark.parametrize("value", ["", 7, "x" * 129], ids=["empty", "number", "long"])
def test_a_salt_that_makes_no_sense_is_refused(value: Any) -> None:
    answer = post(make(), CHAT, {"cache_salt": value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "cache_salt"


def test_the_key_may_be_in_either_header() -> None:
    served = make()
    alice = salt(served)
    served.requests.clear()
    assert post(served, CHAT, key=None, **{"x-api-key": KEY}).status_code == 200
    assert served.only.cache_salt == alice


def test_an_operator_may_want_all_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIEREDKV_ISOLATE_BY", "none")
    served = make()
    assert salt(served) is salt(served, {"cache_salt": "a"}, OTHER) is None
    assert told(served) == {}


def test_prompt_cache_key_narrows_where_the_operator_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = {"prompt_cache_key": "a"}
    served = make()
    assert salt(served, body) == salt(served)
    monkeypatch.setenv("TIEREDKV_ISOLATE_BY", "prompt_cache_key")
    served = make()
    assert len({salt(served, body), salt(served), salt(served, {"prompt_cache_key": "b"})}) == 3


@pytest.fixture
def keys_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'[alice]\nkey="{KEY}"\n[bob]\nkey="{OTHER}"\nretention="in_memory"\n')
    file.chmod(0o600)
    monkeypatch.setenv("TIEREDKV_API_KEYS_FILE", str(file))


@pytest.mark.usefixtures("keys_file")
def test_a_file_of_keys_says_who_may_ask_for_what() -> None:
    served = make({**TIER, "default_retention": "24h"})
    assert post(served, CHAT, {"prompt_cache_retention": "24h"}).status_code == 200
    refused = post(served, CHAT, {"prompt_cache_retention": "24h"}, OTHER)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "prompt_cache_retention"
    golden.told(error["message"])
    served.requests.clear()
    assert post(served, CHAT, {}, OTHER).status_code == 200
    assert told(served) == {"tenant": digest(OTHER), "retention": "in_memory"}


@pytest.mark.usefixtures("keys_file")
@pytest.mark.parametrize("key", [None, "sk-eve"])
def test_with_a_file_of_keys_others_are_refused(key: str | None) -> None:
    served = make()
    answer = post(served, CHAT, {}, key)
    assert answer.status_code == 401
    assert answer.json()["error"]["type"] == "Unauthorized"
    answer = post(served, MESSAGES, {}, key)
    assert answer.json()["error"]["type"] == "authentication_error"
    assert not served.requests


@pytest.mark.parametrize("path", TEXTS)
def test_vllms_own_check_of_keys_comes_before_the_body_is_read(path: str) -> None:
    served = make(keys=(KEY, OTHER))
    headers = [(b"authorization", b"Bearer sk-eve"), (b"content-type", b"application/json")]
    sent = drive(served.app, [], path, headers)  # who asked for a message would wait for ever
    assert sent[0]["status"] == 401


IS_UNSALTED = HAS_VLLM and RealEngine.is_older
"""Whether vLLM's own messages take no salt."""


@pytest.mark.parametrize(
    ("keys", "isolate_by", "status"),
    [((), "salt", 400), ((KEY, OTHER), "salt", 400), ((KEY,), "salt", 200), ((), "none", 200)],
)
def test_an_endpoint_without_a_salt_serves_one_tenant_only(
    keys: tuple[str, ...], isolate_by: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIEREDKV_ISOLATE_BY", isolate_by)
    served = make(keys=keys) if IS_UNSALTED else stand_in(keys=keys, is_older=True)
    answer = post(served, MESSAGES, {})
    assert answer.status_code == status
    if status == 400:
        golden.told(answer.json()["error"]["message"])


@pytest.mark.skipif(IS_UNSALTED, reason="vLLM 0.26 takes no salt there")
def test_messages_are_salted() -> None:
    served = make()
    alice = salt(served)
    served.requests.clear()
    assert post(served, MESSAGES, {}).status_code == 200
    assert served.only.cache_salt == alice


# --- bodies -------------------------------------------------------------------------------------


def test_without_the_tier_nothing_is_told_but_tenants_are_apart(
    caplog: pytest.LogCaptureFixture,
) -> None:
    served = make(None)
    body = {"kv_transfer_params": {"tieredkv": {"retention": "24h"}}}
    assert salt(served, body) == salt(make())
    served.requests.clear()
    post(served, CHAT, body)
    assert served.only.kv_transfer_params is None
    (warning,) = golden.warnings_of(caplog, vllm_middleware.__name__)
    golden.told(warning)


def test_other_fields_stay_as_they_are_byte_for_byte() -> None:
    served = stand_in()
    message = b'[ {"x":1e400, "y":0.10,"z":123456789012345678901}]'
    given = b'{"model":"m" ,"messages" :%b,"a":"\xc3\xa9"}' % message
    assert post(served, CHAT, given).status_code == 200
    ((_, headers, body),) = served.raw
    assert message in body
    assert '"a":"é"'.encode() in body
    assert headers["content-length"] == str(len(body))


@pytest.mark.parametrize("value", [b"NaN", b'"\\ud800"', b'"a","cache_salt":"b"'], ids=repr)
def test_no_way_of_writing_json_gets_around_the_salt(value: bytes) -> None:
    served = stand_in()
    given = b'{"model":"m","messages":[],"cache_salt":"mine","x":%b}' % value
    answer = post(served, CHAT, given)
    assert answer.status_code == 200
    assert len(served.only.cache_salt) == 64


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"a"', b"\xff", b"null"], ids=repr)
def test_what_is_no_object_is_left_to_vllm(body: bytes) -> None:
    served = stand_in()
    assert post(served, CHAT, body).status_code == 400
    assert served.raw[0][2] == body


def test_what_is_too_deep_to_be_read_is_refused() -> None:
    served = stand_in()
    body = b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert post(served, CHAT, body).status_code == 400
    assert not served.raw


def test_params_that_are_no_object_are_left_to_vllm() -> None:
    assert post(make(), CHAT, {"kv_transfer_params": "all"}).status_code == 400


def test_endpoints_that_compute_nothing_are_left_alone() -> None:
    served = stand_in()
    given = b'{"model":"m", "cache_salt":"mine"}'
    assert post(served, f"{CHAT}/render", given).status_code == 200
    assert served.raw[0][2] == given


def test_a_body_of_any_api_is_mapped_where_vllm_takes_several() -> None:
    served = stand_in()
    assert post(served, "/invocations", TEXTS[CHAT]).status_code == 200
    assert told(served) == {"tenant": digest(KEY)}
    served.requests.clear()
    assert post(served, "/invocations", {"model": "m", "input": "embed"}).status_code == 200
    assert served.only.kv_transfer_params is served.only.cache_salt is None


@pytest.mark.parametrize("is_told", [True, False], ids=["told", "counted"])
def test_a_body_that_is_too_long_is_refused(is_told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIEREDKV_MAX_BODY_SIZE", "1KiB")
    served = stand_in()
    length = [(b"content-length", b"2000")] if is_told else []
    parts = [{"type": "http.request", "body": bytes(600), "more_body": True}] * 9
    left = [] if is_told else parts
    sent = drive(served.app, left, CHAT, length)
    assert sent[0]["status"] == 413
    golden.told(json.loads(sent[1]["body"])["error"]["message"])
    assert is_told or len(left) == 7


# --- streams ------------------------------------------------------------------------------------


def drive(
    app: Any,
    messages: list[dict[str, Any]],
    path: str = CHAT,
    headers: list[tuple[bytes, bytes]] | None = None,
    on_send: Callable[[dict[str, Any]], Awaitable[None]] | None = None,
) -> list[dict[str, Any]]:
    """Run an application on messages; return what it sends."""
    sent: list[dict[str, Any]] = []
    told = [(b"content-type", b"application/json")] if headers is None else headers
    scope = {"type": "http", "method": "POST", "path": path, "headers": told, "query_string": b""}
    scope |= {"root_path": "", "http_version": "1.1", "scheme": "http", "server": ("h", 80)}

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)
        if on_send:
            await on_send(message)

    asyncio.run(asyncio.wait_for(app(scope, receive, send), 30))
    return sent


def test_a_body_in_pieces_arrives_whole_with_its_length() -> None:
    served = stand_in()
    body = json.dumps(TEXTS[CHAT]).encode()
    parts = [
        {"type": "http.request", "body": body[i : i + 7], "more_body": True}
        for i in range(0, len(body), 7)
    ]
    headers = [(b"transfer-encoding", b"chunked"), (b"content-type", b"application/json")]
    sent = drive(served.app, [*parts, {"type": "http.request"}], headers=headers)
    assert sent[0]["status"] == 200
    ((_, seen, raw),) = served.raw
    assert "transfer-encoding" not in seen
    assert seen["content-length"] == str(len(raw))


def inner(handle: Callable[..., Any]) -> Any:
    """Return the middleware in front of an ASGI function, in an application like vLLM's."""
    middleware, app = RetentionMiddleware(handle), stand_in().app

    async def served(scope: Any, receive: Any, send: Any) -> None:
        scope["app"] = app
        await middleware(scope, receive, send)

    return served


def test_a_client_that_leaves_is_told_of() -> None:
    seen: list[Any] = []

    async def handle(_scope: Any, receive: Any, send: Any) -> None:
        seen.extend([await receive(), await receive()])
        await send({"type": "http.response.start", "status": 200})

    gone = {"type": "http.disconnect"}
    half = {"type": "http.request", "body": b"{", "more_body": True}
    drive(inner(handle), [half, gone])
    assert seen == [half, gone]
    drive(inner(handle), [{"type": "http.request", "body": b"[]"}, gone])
    assert seen[2]["body"] == b"[]"
    assert seen[3] is gone


def test_an_answer_is_not_held_back() -> None:
    async def handle(_scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200})
        for body in (b"1", b"2"):
            await send({"type": "http.response.body", "body": body, "more_body": body == b"1"})
            assert passed[-1]["body"] == body, "the answer was held back"

    passed: list[dict[str, Any]] = []

    async def on_send(message: dict[str, Any]) -> None:
        passed.append(message)

    drive(inner(handle), [{"type": "http.request", "body": b"{}"}], on_send=on_send)
    assert len(passed) == 3


def test_a_stream_of_vllm_arrives_whole() -> None:
    assert post(make(), CHAT, {"stream": True}).text == "".join(apps.CHUNKS)


# --- servers ------------------------------------------------------------------------------------


def lifespan(app: Any) -> list[dict[str, Any]]:
    """Start an application and stop it, as a server does; return what it says."""
    messages = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app({"type": "lifespan", "asgi": {}, "state": {}}, receive, send))
    return sent


def test_it_starts_and_stops_with_vllm() -> None:
    sent = lifespan(make().app)
    assert [each["type"] for each in sent] == [
        "lifespan.startup.complete",
        "lifespan.shutdown.complete",
    ]


def test_a_wrong_setting_is_told_before_vllm_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("TIEREDKV_ISOLATE_BY", "tenant"),
        ("TIEREDKV_API_KEYS_FILE", "/nowhere/keys.toml"),
        ("TIEREDKV_HASH_ALGO", "xxh3_128"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            (sent,) = lifespan(make().app)
        assert sent["type"] == "lifespan.startup.failed"
        golden.told(sent["message"])


def test_a_config_file_of_the_tier_that_is_missing_is_told() -> None:
    (sent,) = lifespan(make({**TIER, "config_file": "/nowhere/kv.toml"}).app)
    assert sent["type"] == "lifespan.startup.failed"
    golden.told(sent["message"])


def test_a_vllm_whose_endpoints_cannot_be_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apps, "ChatBody", BaseModel)
    (sent,) = lifespan(stand_in().app)
    assert sent["type"] == "lifespan.startup.failed"
    golden.told(sent["message"])
    served = stand_in()
    served.app.router.routes.clear()
    (sent,) = lifespan(served.app)
    assert sent["type"] == "lifespan.startup.failed"
    golden.told(sent["message"])


@pytest.mark.parametrize("setting", ["salt", "nonsense"])
def test_another_server_is_not_changed_and_told_once(
    setting: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TIEREDKV_ISOLATE_BY", setting)

    async def echo(request: Request) -> JSONResponse:
        return JSONResponse((await request.body()).decode())

    caplog.set_level(logging.ERROR)
    app = Starlette(routes=[Route(CHAT, echo, methods=["POST"])])
    app.add_middleware(RetentionMiddleware)
    lifespan(app)
    given = b'{"cache_salt": "mine", "prompt_cache_retention": "48h"}'
    for _ in range(2):
        answer = post(app, CHAT, given)
        assert answer.status_code == 200
        assert answer.json() == given.decode()
    (warning,) = golden.warnings_of(caplog, vllm_middleware.__name__)
    golden.told(warning)
