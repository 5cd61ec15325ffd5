"""Connections on a real socket that last too long, close too early or do not speak HTTP."""

import contextlib
import json
import logging
import random
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import uvicorn

from tests.golden import told
from tests.tieredkv.test_app import Engine, answered
from tests.waiting import wait_until
from tieredkv.config import Settings
from tieredkv.server import connections
from tieredkv.server.app import Api, build_app
from tieredkv.server.chat import Tokenization
from tieredkv.server.connections import max_connections
from tieredkv.server.keys import Keys
from tieredkv.server.run import http_config

MAX_OPEN = 8
KEY = "sk-test"
HEAD = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
BODY = b'{"model": "m", "prompt": "a", "max_tokens": 1}'
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
TIMES = {"HEADERS_TIMEOUT_S": 1.0, "WRITE_TIMEOUT_S": 1.0, "LINGER_S": 1.0}
HANG_S = 30
"""Longer than any answer takes on the busiest machine."""


@contextlib.contextmanager
def listening(tokenization: Tokenization, **settings: Any) -> Iterator[tuple[int, uvicorn.Server]]:
    """Serve the application over an engine that answers at once; yield port and server."""
    asked = Settings(api_keys=(KEY,), **settings)
    keys = Keys(settings=asked, is_strict=False, is_local=True)
    app = build_app(Api(asked, cast(Any, Engine(0.0, answered)), tokenization, keys))
    server = uvicorn.Server(http_config(app, asked, MAX_OPEN))
    with socket.create_server(("127.0.0.1", 0)) as sock:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            wait_until(lambda: server.started, "no server")
            yield sock.getsockname()[1], server
        finally:
            server.force_exit = server.should_exit = True
            thread.join()


@pytest.fixture
def port(tokenization: Tokenization, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Serve with short timeouts; yield the port."""
    for name, seconds in TIMES.items():
        monkeypatch.setattr(connections, name, seconds)
    with listening(tokenization) as (port, _):
        yield port


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=HANG_S)


def read_all(sock: socket.socket) -> bytes:
    """Return all bytes up to the orderly close of the other side."""
    return b"".join(iter(lambda: sock.recv(65536), b""))


def exchange(port: int, *sent: bytes) -> bytes:
    """Send the pieces one after the other, and return everything that comes back."""
    with connect(port) as sock:
        for piece in sent:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(piece)
        return read_all(sock)


def head_of(answer: bytes) -> tuple[int, dict[str, str]]:
    """Return the status and headers of the first answer."""
    status, *lines = answer.partition(b"\r\n\r\n")[0].decode().lower().split("\r\n")
    return int(status.split()[1]), dict(line.split(": ", 1) for line in lines)


def test_an_idle_connection_is_closed_after_the_setting(tokenization: Tokenization) -> None:
    assert Settings().idle_timeout == 75  # proxies keep connections for 60 seconds
    with listening(tokenization, idle_timeout=0.2) as (port, _), connect(port) as sock:
        sock.sendall(HEALTH)
        assert head_of(read_all(sock))[0] == 200


def is_up(port: int) -> bool:
    with connect(port) as sock:
        sock.sendall(HEALTH)
        return sock.recv(100).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n", 401),
        (b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nx-api-key: sk-test\r\n", 404),
        (b"PUT /health HTTP/1.1\r\nHost: localhost\r\n", 405),
        (HEAD.encode() + b"Content-Length: 99999999999\r\n", 413),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", 200),
        (b"POST /admin/cache/df HTTP/1.1\r\nHost: localhost\r\n", 403),
    ],
)
@pytest.mark.parametrize("begun", [b"", b"{", b"x" * 100_000])
def test_an_answer_before_the_body_has_come_closes_the_connection(
    port: int, head: bytes, status: int, begun: bytes
) -> None:
    if b"Length" not in head:
        head += b"Content-Length: 200000\r\n"
    code, headers = head_of(exchange(port, head + b"\r\n", begun))
    assert (code, headers["connection"]) == (status, "close")


def test_a_client_that_sends_all_of_its_body_first_sees_why_it_is_refused(port: int) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 20000000\r\n\r\n"
    with connect(port) as sock:
        sock.sendall(head)
        sock.sendall(b"x" * 20_000_000)
        assert head_of(read_all(sock))[0] == 401


def test_a_whole_body_leaves_the_connection_open(port: int) -> None:
    request = HEAD.replace(KEY, "wrong").encode() + b"Content-Length: 2\r\n\r\n{}"
    with connect(port) as sock:
        for _ in range(3):
            sock.sendall(request)
            answer = b""
            while b'"code":"invalid_api_key"' not in answer:
                answer += sock.recv(65536)
            assert "connection" not in head_of(answer)[1]


def test_a_byte_after_a_refusal_does_not_hold_the_connection_open(port: int) -> None:
    with connect(port) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n")
        assert b" 401 " in sock.recv(65536)
        stop = threading.Event()

        def trickle() -> None:
            with contextlib.suppress(OSError):
                while not stop.wait(0.1):
                    sock.sendall(b"x")

        trickling = threading.Thread(target=trickle)
        trickling.start()
        with contextlib.suppress(ConnectionResetError):
            assert read_all(sock) is not None
        stop.set()
        trickling.join()


@pytest.mark.parametrize(
    "sent", [b"", b"\r\n", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\nX: ", HEALTH + b"GET /hea"]
)
def test_headers_that_trickle_are_not_waited_for(port: int, sent: bytes) -> None:
    began_at, is_closed = time.monotonic(), False
    with connect(port) as sock:
        sock.settimeout(0.2)
        sock.sendall(sent)
        while not is_closed:
            assert time.monotonic() < began_at + HANG_S
            with contextlib.suppress(TimeoutError):
                try:
                    is_closed = sock.recv(1000) == b""
                except ConnectionResetError:
                    is_closed = True
            with contextlib.suppress(OSError):
                sock.sendall(b"x" if sent else b"")


def test_an_answer_that_nobody_fetches_does_not_hold_the_connection(
    tokenization: Tokenization, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in TIMES.items():
        monkeypatch.setattr(connections, name, seconds)
    with listening(tokenization) as (port, server), connect(port) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 10)
        sock.settimeout(0.5)
        request = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with contextlib.suppress(OSError):
            for _ in range(10_000):
                sock.sendall(request)
        wait_until(lambda: not server.server_state.connections, "it is held")


def test_connections_are_bounded_and_the_longest_idle_one_makes_room(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.ExitStack() as stack:
        head = f"{HEAD}Content-Length: {len(BODY)}\r\n\r\n".encode()
        busy = stack.enter_context(connect(port))
        busy.sendall(head + BODY[:9])  # this connection has a request in progress
        time.sleep(0.2)
        idle = [stack.enter_context(connect(port)) for _ in range(5 * MAX_OPEN)]
        assert is_up(port)
        num_closed = 0
        for sock in idle:
            sock.settimeout(0.02)
            with contextlib.suppress(TimeoutError):
                try:
                    num_closed += sock.recv(1) == b""
                except ConnectionResetError:
                    num_closed += 1
        assert num_closed >= 4 * MAX_OPEN
        busy.sendall(BODY[9:])
        assert b"HTTP/1.1 200 " in busy.recv(1000)
    [record] = [each for each in caplog.records if each.name == connections.__name__]
    told(record.getMessage())


def test_the_bound_leaves_descriptors_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: given.append(limits))
    for limits, most, raised in (
        ((1024, 1 << 20), 3000, [(3200, 1 << 20)]),
        ((1024, 2048), 1848, [(2048, 2048)]),
        ((1 << 20, 1 << 20), 3000, []),
    ):
        given.clear()
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        assert (max_connections(2000), given) == (most, raised)


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n"
WITH_KEY = CHUNKED + b"x-api-key: sk-test\r\n\r\n"
REFUSED = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}"
NONSENSE = {
    "noise": [b"\x00\xff" * 500],
    "one line": [b"nonsense\r\n\r\n"],
    "TLS": [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 600],
    "HTTP/2": [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"],
    "h2c upgrade": [
        b"GET /version HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\n"
        b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n"
    ],
    "websocket": [
        b"GET /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    ],
    "CONNECT": [b"CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example:443\r\n\r\n", b"abc"],
    "absolute form": [b"GET http://evil.example/health HTTP/1.1\r\nHost: evil.example\r\n\r\n"],
    "asterisk form": [b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n"],
    "a bracket as host": [b"POST /v1/completions HTTP/1.1\r\nHost: [\r\n\r\n"],
    "a bad host and no route": [b"GET /nothing/ HTTP/1.1\r\nHost: [::1\r\n\r\n"],
    "no host": [b"GET /health HTTP/1.1\r\n\r\n"],
    "two hosts": [b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"],
    "bytes as path": [b"GET /\xff\xfe HTTP/1.1\r\nHost: a\r\n\r\n"],
    "quoted bytes as path": [b"GET /v1/models/%ff%fe%00%0d%0a HTTP/1.1\r\nHost: a\r\n\r\n"],
    "bytes as header": [b"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: \xff\xfe\r\n\r\n"],
    "bytes as key": [b"GET /v1/models HTTP/1.1\r\nHost: a\r\nx-api-key: \xff\xa0\r\n\r\n"],
    "headers without end": [b"GET / HTTP/1.1\r\nHost: a\r\n", b"x: y\r\n" * 40_000],
    "one long header": [b"GET / HTTP/1.1\r\nHost: a\r\nx: ", b"y" * 300_000, b"\r\n\r\n"],
    "negative length": [b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n"],
    "two lengths": [
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab"
    ],
    "long length": [HEAD.encode() + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n"],
    "other encoding": [CHUNKED.replace(b"chunked", b"gzip, chunked") + b"\r\n"],
    "no chunk": [WITH_KEY, b"zz\r\n\r\n"],
    "no chunk at once": [WITH_KEY + b"zz\r\n\r\n"],
    "no chunk after a refusal": [CHUNKED + b"\r\n", b"zz\r\n\r\n"],
    "no chunk with a refusal": [CHUNKED + b"\r\nzz\r\n\r\n"],
    "a chunk that does not end": [WITH_KEY, b"1\r\nabc\r\n0\r\n\r\n"],
    "a long chunk size": [WITH_KEY, b"f" * 40 + b"\r\n"],
    "tiny chunks": [WITH_KEY, b"1\r\na\r\n" * 400_000],
    "noise after a refusal": [REFUSED, b"zz\r\n\r\n"],
    "noise with a refusal": [REFUSED + b"zz\r\n\r\n" * 1000],
    "noise behind the last request": [
        HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + b"zz\r\n\r\n"
    ],
    "HTTP/1.0": [b"POST /v1/completions HTTP/1.0\r\n\r\n" + b"zz"],
    "HTTP/0.9": [b"GET /\r\n\r\n"],
    "HTTP/9.9": [b"GET /health HTTP/9.9\r\nHost: a\r\n\r\n"],
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_refused_with_one_line_in_the_log_at_most(
    name: str, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with connect(port) as sock:
        for piece in NONSENSE[name]:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(piece)
            time.sleep(0.05)
        sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 "), answer
    assert is_up(port)
    told = [each for each in caplog.records if each.name != "asyncio" or each.exc_info]
    assert len(told) <= 1 and not any(each.exc_info for each in told), caplog.text


def test_no_garbled_request_leaves_a_traceback(port: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    chance = random.Random(8)
    whole = WITH_KEY + b'5\r\n{"a":\r\n2\r\n1}\r\n0\r\n\r\n' + HEALTH + REFUSED
    for _ in range(400):
        garbled = bytearray(whole * chance.choice((1, 3)))
        for _ in range(chance.choice((1, 2, 5, 30))):
            i = chance.randrange(len(garbled))
            piece = bytes(garbled[chance.randrange(len(garbled)) :][:9])
            garbled[i : i + chance.randrange(9)] = chance.choice((b"", b"\r\n", b"\xff", piece))
        with connect(port) as sock, contextlib.suppress(OSError):
            sock.settimeout(0.002)
            for i in range(0, len(garbled), step := chance.choice((7, 70, 700))):
                sock.sendall(garbled[i : i + step])
            if chance.random() < 0.5:
                sock.shutdown(socket.SHUT_WR)
            sock.recv(1000)
    assert is_up(port)
    assert not [each for each in caplog.records if each.exc_info], caplog.text


def test_requests_behind_a_refusal_are_answered_in_order(port: int) -> None:
    last = HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    answer = exchange(port, REFUSED * 3 + HEALTH + last)
    statuses = [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [401] * 3 + [200] * 2


def test_chunks_may_be_small_but_not_tiny(port: int) -> None:
    def send(size: int, num_chunks: int) -> tuple[int, dict[str, str]]:
        chunk = b"%x\r\n" % size + b" " * size + b"\r\n"
        last = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
        head = WITH_KEY.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        return head_of(exchange(port, head, chunk * num_chunks, last))

    assert send(100, 9_000)[0] == 200
    assert send(1, 400_000)[0] == 400


def test_a_refusal_before_a_request_is_parsed_has_an_id_and_a_code(port: int) -> None:
    long = b"GET / HTTP/1.1\r\nx: " + b"y" * 99_999
    for sent, status, code in ((b"zz\r\n\r\n", 400, None), (long, 431, "headers_too_large")):
        answer = exchange(port, sent)
        seen, headers = head_of(answer)
        assert seen == status and headers["x-request-id"] == headers["request-id"]
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == code


@pytest.mark.parametrize("path", ["/health/", "/v1/completions/", "/metrics/", "//evil.example/"])
def test_no_redirect_goes_where_the_host_header_says(path: str, port: int) -> None:
    for method in ("GET", "POST"):
        request = f"{method} {path} HTTP/1.0\r\nHost: evil.example\r\nx-api-key: {KEY}\r\n\r\n"
        status, headers = head_of(exchange(port, request.encode()))
        assert status in (404, 405) and "location" not in headers


def stop_while(
    tokenization: Tokenization, sent: bytes, is_there: Callable[[uvicorn.Server], bool]
) -> bytes:
    """Stop a server after a connection has sent `sent`, and return what the client receives."""
    with listening(tokenization) as (port, server), connect(port) as sock:
        sock.sendall(sent)
        wait_until(lambda: is_there(server), "it has not arrived")
        server.should_exit = True
        return read_all(sock)


def test_a_body_that_is_arriving_at_shutdown_is_refused(
    tokenization: Tokenization, caplog: pytest.LogCaptureFixture
) -> None:
    sent = HEAD.encode() + b"Content-Length: 99\r\n\r\n{"
    answer = stop_while(tokenization, sent, lambda server: bool(server.server_state.tasks))
    assert head_of(answer)[0] == 503 and b"shutting_down" in answer
    assert not [each for each in caplog.records if each.exc_info], caplog.text
