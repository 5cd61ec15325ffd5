"""Ids of requests, and the line that each request leaves in the logs."""

import asyncio
import json
import logging
from typing import Any, cast

import httpx
import pytest

from tests.golden import told
from tests.tieredkv.test_app import PATHS, Engine, overloaded
from tieredkv.cli.output import log_lines_to_stdout
from tieredkv.config import Settings
from tieredkv.engine.checkpoint import load_tokenizer
from tieredkv.engine.engine_messages import RequestUsage, TokenOutput
from tieredkv.server.app import Api, build_app
from tieredkv.server.chat import Tokenization
from tieredkv.server.keys import Keys
from tieredkv.types import Tier

TOKENIZATION = Tokenization(load_tokenizer("tiny-random"))
FIELDS = {
    "time", "id", "tenant", "method", "endpoint", "status", "prompt_tokens", "output_tokens",
    "cached_tokens_by_tier", "miss_reason", "ttft_ms", "duration_ms",
}  # fmt: skip
SECRET = "sk-very-secret"


def found(request_id: str) -> TokenOutput:
    usage = RequestUsage(
        prompt_tokens=40,
        cached_tokens_by_tier={Tier.DEVICE: 16, Tier.HOST: 0, Tier.DISK: 16},
        miss_reason="expired",
    )
    return TokenOutput(request_id=request_id, token_ids=[65], finish_reason="length", usage=usage)


def ask(
    path: str,
    body: dict[str, Any] | None = None,
    headers: dict[str, str] | None = None,
    method: str = "POST",
    engine: Engine | None = None,
    **settings: Any,
) -> httpx.Response:
    made = Settings(**settings)
    keys = Keys(settings=made, is_strict=False, is_local=True)
    served = engine or Engine(0.0, found)
    api = Api(made, cast(Any, served), TOKENIZATION, keys)

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(build_app(api))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.request(method, path, json=body, headers=headers)

    try:
        return asyncio.run(send())
    finally:
        api.close()


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    return {"model": "m", **PATHS[path], **fields}


# --- Ids


@pytest.mark.parametrize("given", ["abc-123", "x", 'a b/c;d="e"', "x" * 128])
def test_the_id_of_a_client_is_kept(given: str) -> None:
    path = "/v1/messages"
    for status, body in ((200, body_of(path)), (400, {"model": "m"})):
        answer = ask(path, body, {"x-request-id": given})
        assert answer.status_code == status
        assert answer.headers["x-request-id"] == answer.headers["request-id"] == given
        if status == 400:
            assert answer.json()["request_id"] == given


BAD_IDS = [
    "",
    " ",
    "x" * 129,
    "x" * 10_000,
    "a\nb",
    "a\r\nevil: 1",
    "a\x1b[31m",
    "a\x7f",
    "z\xfcrich",
]


@pytest.mark.parametrize("given", BAD_IDS, ids=ascii)
def test_an_id_that_could_forge_a_line_is_replaced(
    given: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The raw header is given to the application, past the checks of any HTTP parser."""
    raw = cast(Any, [(b"x-request-id", given.encode("latin-1"))])
    with caplog.at_level(logging.DEBUG, "tieredkv.server.access_log"):
        answer = ask("/v1/completions", body_of("/v1/completions"), raw)
    assert answer.status_code == 200
    request_id = answer.headers["x-request-id"]
    assert request_id.startswith("req_") and len(request_id) == 36
    [line] = caplog.messages
    assert json.loads(line.removeprefix("request "))["id"] == request_id
    assert "evil" not in line and line.isascii() and line.isprintable()


# --- Lines


def lines_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    named = [it for it in caplog.records if it.name == "tieredkv.access"]
    return [json.loads(it.getMessage()) for it in named]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_has_one_line_with_what_it_cost(
    path: str, is_stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tieredkv.access"):
        body = body_of(path, stream=is_stream)
        headers = {"x-request-id": "mine", "authorization": f"Bearer {SECRET}"}
        assert ask(path, body, headers, access_log="json", api_keys=(SECRET,)).status_code == 200
    [line] = lines_of(caplog)
    assert line.keys() == FIELDS
    assert line["tenant"].startswith("key ") and SECRET not in caplog.text
    expected = {"id": "mine", "method": "POST", "endpoint": path, "status": 200}
    expected |= {"prompt_tokens": 40, "output_tokens": 1, "miss_reason": "expired"}
    expected["cached_tokens_by_tier"] = {"device": 16, "host": 0, "disk": 16}
    assert {name: line[name] for name in expected} == expected
    assert 0 <= line["ttft_ms"] <= line["duration_ms"]
    assert "hi" not in json.dumps(line), "the prompt is never logged"


def test_each_prompt_counts_once_for_all_its_answers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tieredkv.access"):
        body = {"model": "m", "prompt": ["a", "b"], "n": 3}
        ask("/v1/completions", body, access_log="json")
    [line] = lines_of(caplog)
    assert (line["prompt_tokens"], line["output_tokens"]) == (80, 6)
    assert line["cached_tokens_by_tier"] == {"device": 32, "host": 0, "disk": 32}


@pytest.mark.parametrize(
    ("path", "method", "headers", "status"),
    [
        ("/v1/completions", "POST", {"authorization": "Bearer wrong"}, 401),
        ("/v1/completions", "POST", {"authorization": f"Bearer {SECRET}"}, 429),
        ("/health", "GET", {}, 200),
        ("/nothing/here", "GET", {}, 404),
    ],
)
def test_a_request_that_no_model_answers_has_a_line_too(
    path: str, method: str, headers: dict[str, str], status: int, caplog: pytest.LogCaptureFixture
) -> None:
    full = Engine(0.0, overloaded)
    body = body_of(path) if method == "POST" else None
    with caplog.at_level(logging.INFO, "tieredkv.access"):
        how: Any = {"access_log": "json", "api_keys": (SECRET,), "engine": full}
        assert ask(path, body, headers, method, **how).status_code == status
    [line] = lines_of(caplog)
    assert line.keys() == FIELDS
    assert (line["endpoint"], line["status"], line["ttft_ms"]) == (path, status, None)


def test_nothing_is_written_without_the_setting(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        ask("/v1/completions", body_of("/v1/completions"))
    assert lines_of(caplog) == []
    assert [it for it in caplog.messages if it.startswith("request ")] == []


def test_a_debug_log_has_one_line_for_each_request(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "tieredkv.server.access_log"):
        ask("/v1/chat/completions", body_of("/v1/chat/completions"))
    [line] = [it for it in caplog.messages if it.startswith("request ")]
    assert json.loads(line.removeprefix("request "))["prompt_tokens"] == 40


# --- Names of the model


def test_a_model_with_several_names_is_listed_and_answers_by_each() -> None:
    names: Any = {"served_model_name": "big, small,big"}
    listed = ask("/v1/models", method="GET", **names).json()["data"]
    assert [(it["id"], it["display_name"]) for it in listed] == [("big", "big"), ("small", "small")]
    assert ask("/v1/models/small", method="GET", **names).json()["id"] == "small"
    for path in PATHS:
        for name in ("big", "small"):
            answer = ask(path, {**body_of(path), "model": name}, **names)
            assert (answer.status_code, answer.json()["model"]) == (200, name)
    for wrong in ("m", "big, small", ""):
        answer = ask("/v1/completions", {"prompt": "a", "model": wrong}, **names)
        assert answer.status_code == (404 if wrong else 400)


@pytest.mark.parametrize("path", [*PATHS, "/v1/models/gpt-4o"])
def test_a_404_for_a_model_names_those_that_are_served(path: str) -> None:
    method = "GET" if "models" in path else "POST"
    body = {**body_of(path), "model": "gpt-4o"} if method == "POST" else None
    answer = ask(path, body, method=method, served_model_name="big,small")
    error = answer.json()["error"]
    assert answer.status_code == 404
    assert error["type"] == ("not_found_error" if "messages" in path else "invalid_request_error")
    told(error["message"])


# --- URLs


@pytest.mark.parametrize(
    "path",
    [
        "/v1/v1/messages",
        "/v1/v1/chat/completions",
        "/v1/v1/models",
        "/chat/completions",
        "/messages",
        "/openai/v1/responses",
        "/v1/embeddings",
        "/favicon.ico",
    ],
)
def test_an_unknown_url_says_where_base_urls_end(path: str) -> None:
    answer = ask(path, {"model": "m"})
    assert answer.status_code == 404
    told(answer.json()["error"]["message"])
    assert (answer.json().get("type") == "error") == ("/v1/messages" in path)


def test_a_long_url_is_shortened_in_its_refusal() -> None:
    answer = ask("/" + "x" * 5000 + "/messages", {"model": "m"})
    assert answer.status_code == 404 and len(answer.text) < 1000


def test_lines_go_to_stdout_and_nowhere_else(capsys: pytest.CaptureFixture[str]) -> None:
    log_lines_to_stdout("tieredkv.test_lines")
    logging.getLogger("tieredkv.test_lines").info("a line")
    assert capsys.readouterr() == ("a line\n", "")
