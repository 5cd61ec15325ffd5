"""Web pages of other origins may use nothing except what the operator has allowed."""

import asyncio
from typing import Any, cast

import httpx
import pytest

from tests.golden import told
from tests.tieredkv.test_app import PATHS, Engine, answered
from tieredkv.config import Settings
from tieredkv.server.app import Api, build_app
from tieredkv.server.chat import Tokenization
from tieredkv.server.description import ANSWERED
from tieredkv.server.keys import Keys

PAGE = "https://chat.example.com"
OPERATORS = ("/metrics", "/admin/cache/df", "/admin/history", "/ui", "/ui/page.js")
CLOSED = (*OPERATORS, "/ui/", "/", "/v1", "/nothing")
OPEN = (*ANSWERED, "/v1/models", "/v1/models/m", "/tokenizer_info", "/version", "/health")
SENT = "authorization,x-api-key,anthropic-version,anthropic-beta,content-type,x-stainless-os"


def ask(
    tokenization: Tokenization,
    method: str,
    path: str,
    headers: dict[str, str],
    base_url: str = "http://localhost",
    **settings: Any,
) -> httpx.Response:
    asked = Settings(**settings)
    keys = Keys(settings=asked, is_strict=False, is_local=True)
    app = build_app(Api(asked, cast(Any, Engine(0.0, answered)), tokenization, keys))
    body = {"model": "m", **PATHS.get(path, {})} if method == "POST" else None

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url=base_url) as client:
            return await client.request(method, path, headers=headers, json=body)

    return asyncio.run(send())


def of_cors(answer: httpx.Response) -> dict[str, str]:
    return {name: each for name, each in answer.headers.items() if "access-control" in name}


def preflight(method: str = "POST", origin: str = PAGE) -> dict[str, str]:
    asked = {"Access-Control-Request-Method": method, "Access-Control-Request-Headers": SENT}
    return {"Origin": origin, **asked}


@pytest.mark.parametrize("path", [*OPEN, *CLOSED])
def test_no_page_is_allowed_anything_by_default(path: str, tokenization: Tokenization) -> None:
    for method, headers in (("OPTIONS", preflight()), ("GET", {"Origin": PAGE})):
        answer = ask(tokenization, method, path, headers)
        assert not of_cors(answer)
        assert method == "GET" or answer.status_code in (404, 405)


@pytest.mark.parametrize("path", OPEN)
@pytest.mark.parametrize("origins", [(PAGE, "http://a:1"), ("*",), ("HTTPS://Chat.example.com",)])
def test_a_page_that_is_allowed_may_use_the_api(
    path: str, origins: tuple[str, ...], tokenization: Tokenization
) -> None:
    allowed = "*" if origins == ("*",) else PAGE
    told = ask(tokenization, "OPTIONS", path, preflight(), cors_origins=origins)
    assert told.status_code == 200
    assert told.headers["access-control-allow-origin"] == allowed
    assert {"GET", "POST", "DELETE"} <= {*told.headers["access-control-allow-methods"].split(", ")}
    assert {*told.headers["access-control-allow-headers"].split(",")} == {*SENT.split(",")}
    answer = ask(tokenization, "POST", path, {"Origin": PAGE}, cors_origins=origins)
    assert answer.headers["access-control-allow-origin"] == allowed
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in answer.headers


def test_a_page_can_read_why_it_was_refused(tokenization: Tokenization) -> None:
    settings: dict[str, Any] = {"cors_origins": (PAGE,), "api_keys": ("k",)}
    refused = ask(tokenization, "POST", "/v1/responses", {"Origin": PAGE}, **settings)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == PAGE


@pytest.mark.parametrize("path", CLOSED)
@pytest.mark.parametrize("origins", [(PAGE,), ("*",)])
def test_no_page_may_use_the_operators_routes(
    path: str, origins: tuple[str, ...], tokenization: Tokenization
) -> None:
    for method in ("OPTIONS", "GET", "POST"):
        headers = preflight() if method == "OPTIONS" else {"Origin": PAGE}
        assert not of_cors(ask(tokenization, method, path, headers, cors_origins=origins))


@pytest.mark.parametrize("origin", ["https://evil.example", f"{PAGE}.evil.example", "null"])
def test_other_pages_stay_out(origin: str, tokenization: Tokenization) -> None:
    for method in ("OPTIONS", "POST"):
        headers = preflight(origin=origin) if method == "OPTIONS" else {"Origin": origin}
        answer = ask(tokenization, method, "/v1/completions", headers, cors_origins=(PAGE,))
        assert "access-control-allow-origin" not in answer.headers


def test_a_page_whose_name_was_rebound_to_this_machine_reads_nothing(
    tokenization: Tokenization,
) -> None:
    evil = "http://evil.example"
    for path, method in (("/v1/models", "GET"), ("/v1/messages", "POST"), ("/metrics", "GET")):
        answer = ask(tokenization, method, path, {}, evil)
        assert answer.status_code == 403 and "x-request-id" in answer.headers
    answer = ask(tokenization, "POST", "/v1/messages", {}, evil)
    assert answer.json()["error"]["type"] == "permission_error"
    told(answer.json()["error"]["message"])
    answer = ask(tokenization, "GET", "/health", {}, evil, allowed_hosts=("evil.example",))
    assert answer.status_code == 200
