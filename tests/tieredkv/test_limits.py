"""Limits of a real HTTP server on endless connections and on bodies held in memory."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.responses import JSONResponse, Response

from tests.waiting import HANG_S, wait_until
from tieredkv.server import connections, limits
from tieredkv.server.connections import Connections
from tieredkv.server.limits import Limits

seen: list[str] = []


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Return the size of a body, or send without end until the client is gone."""
    if scope["path"] == "/count":
        size, more = 0, True
        while more:
            message = await receive()
            size, more = size + len(message["body"]), message.get("more_body", False)
        await JSONResponse(size)(scope, receive, send)
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await receive()  # the empty body
    gone = asyncio.ensure_future(receive())
    while not gone.done():
        await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        await asyncio.sleep(0)
    seen.append(gone.result()["type"])


async def refuse(_request: Any, error: Exception) -> Response:
    """Refuse a request as the server does."""
    return JSONResponse({"error": str(error)}, getattr(error, "status", 500))


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Serve with short timeouts and small limits; yield the port."""
    monkeypatch.setattr(connections, "HEADERS_TIMEOUT_S", 0.3)
    monkeypatch.setattr(connections, "WRITE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(limits, "MAX_BODIES_BYTES", 1000)
    seen.clear()
    limited = Limits(app, 2, refuse, lambda headers: headers.get("x-api-key", ""))
    wiring: Any = Connections(8)
    config = uvicorn.Config(limited, http=wiring, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            wait_until(lambda: server.started, "no server")
            yield sock.getsockname()[1]
        finally:
            server.force_exit = server.should_exit = True
            thread.join()


def is_closed(sock: socket.socket) -> bool:
    """Wait for data or the end of a connection; return whether it has ended."""
    sock.settimeout(HANG_S)
    with contextlib.suppress(ConnectionResetError):
        return sock.recv(1) == b""
    return True


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\nX: "])
def test_headers_that_do_not_end_are_not_waited_for(port: int, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(sent)
        assert is_closed(sock)


def test_a_half_request_on_a_kept_connection_is_not_waited_for(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as sock:
        whole = b"POST /count HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nab"
        sock.sendall(whole)
        answer = b""
        while not answer.endswith(b"\r\n\r\n2"):
            answer += sock.recv(1000)
        sock.sendall(b"POST /cou")
        assert is_closed(sock)


def test_a_client_that_does_not_read_is_let_go(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(b"GET /stuck HTTP/1.1\r\nHost: x\r\n\r\n")
        wait_until(lambda: seen == ["http.disconnect"], "it is waited for")


def test_bodies_in_hand_are_bounded_in_all_and_given_back(port: int) -> None:
    url = f"http://127.0.0.1:{port}/count"

    def chunks() -> Iterator[bytes]:
        yield from [b"x" * 400] * 3

    for content in (b"x" * 1001, chunks()):
        assert httpx.post(url, content=content, timeout=HANG_S).status_code == 429
    for _ in range(3):
        assert httpx.post(url, content=b"x" * 900, timeout=HANG_S).json() == 900


def test_a_tenant_that_takes_every_place_costs_others_none(port: int) -> None:
    def ask(key: str) -> int:
        headers = {"x-api-key": key}
        url = f"http://127.0.0.1:{port}/count"
        return httpx.post(url, headers=headers, content=b"x", timeout=HANG_S).status_code

    head = b"POST /count HTTP/1.1\r\nHost: x\r\nx-api-key: a\r\nContent-Length: 9\r\n\r\n"
    stuck = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
    for sock in stuck:
        sock.sendall(head)
    wait_until(lambda: ask("a") == 429, "nobody is refused")
    assert [ask("b") for _ in range(3)] == [200] * 3
    for sock in stuck:
        sock.close()
    wait_until(lambda: ask("a") == 200, "the places are not free again")


def test_a_tenant_that_holds_nearly_all_bytes_leaves_room_for_large_bodies_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_BODIES_BYTES", 1000)
    statuses = list[int]()

    async def run() -> None:
        wait = asyncio.Event()

        async def hold(scope: Any, receive: Any, send: Any) -> None:
            for size in map(int, scope["query_string"].split(b",")):
                scope["hold"](size)
            await JSONResponse("held")(scope, receive, send)
            await wait.wait()

        async def note(message: Any) -> None:
            statuses.append(message["status"]) if "status" in message else None

        limited = Limits(hold, 99, refuse, lambda headers: headers["x-api-key"])
        tasks = list[Any]()

        async def ask(key: str, sizes: str) -> int:
            headers = [(b"x-api-key", key.encode())]
            scope: Any = {"type": "http", "method": "POST", "path": "/", "headers": headers}
            scope["query_string"] = sizes.encode()
            tasks.append(asyncio.create_task(limited(scope, None, note)))  # type: ignore[arg-type]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            return statuses[-1]

        for sizes in ("900,90", "990"):
            assert await ask("a", sizes) == (200 if sizes == "900,90" else 429)
        for i in range(20):
            assert await ask(f"small {i}", "1") == 200
        assert await ask("large", "60") == 200
        assert await ask("large, then short", "60,-50") == 200
        assert await ask("a", "1") == 429
        wait.set()
        await asyncio.gather(*tasks)
        assert await ask("a", "1000") == 200

    asyncio.run(run())


def test_a_refusal_says_when_a_place_may_be_free(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "query_string": b""}
    moments = iter([0.0, 40.0, *[41.0] * 9])
    monkeypatch.setattr("tieredkv.server.limits.time.perf_counter", lambda: next(moments))

    async def note(_request: Any, error: Any) -> Response:
        told.append((error.status, error.retry_after_s))
        return Response()

    async def run() -> None:
        wait, silent = asyncio.Event(), asyncio.sleep

        async def held(scope: Any, _receive: Any, _send: Any) -> None:
            if not scope["query_string"]:
                await wait.wait()
            if scope["query_string"] == b"good":
                scope["is_answered"] = True

        async def send(_message: Any) -> None:
            await silent(0)

        limited = Limits(held, 1, note)
        for kind in (b"good", b"refused by the app"):
            await limited({**scope, "query_string": kind}, None, send)  # type: ignore[arg-type]
        stuck = asyncio.create_task(limited(dict(scope), None, send))  # type: ignore[arg-type]
        await silent(0)
        await limited(dict(scope), None, send)  # type: ignore[arg-type]
        wait.set()
        await stuck

    asyncio.run(run())
    assert told == [(429, 21)]  # the last answer took 40 s, and two requests share the time


def test_bytes_that_are_not_http_are_refused_with_a_request_id(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"nonsense\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(1000), b"")).lower()
    assert answer.startswith(b"http/1.1 400 ") and b"invalid http request" in answer
    assert b"\nx-request-id: req_" in answer and b"\nrequest-id: req_" in answer
