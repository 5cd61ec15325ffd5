"""Verbs ask a server on this machine directly, and any other through the environment's proxy."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.golden import refused, told
from tests.serving import tieredkv
from tieredkv.errors import ConfigError
from tieredkv.http_clients import http_client, is_loopback


class Listener(NamedTuple):
    """An HTTP server that answers everything with an empty list of models.

    Attributes:
        url: where it listens.
        asked: the targets of the requests that it got.
    """

    url: str
    asked: list[str]


@pytest.fixture
def listen() -> Iterator[Callable[[], Listener]]:
    """Return a function that starts a listener."""
    servers = list[ThreadingHTTPServer]()

    def start() -> Listener:
        asked = list[str]()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path)
                self.rfile.read(int(self.headers.get("Content-Length", "0")))
                body = json.dumps({"data": [{"id": "m"}]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        return Listener(f"http://127.0.0.1:{server.server_port}", asked)

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.mark.parametrize("verb", ["top --once", "warm PROMPTS", "bench serve --duration 0.01"])
@pytest.mark.parametrize("value", ["PROXY", "no url", "socks4://x", "http://[::1"])
def test_a_server_on_this_machine_is_asked_directly(
    listen: Callable[[], Listener], tmp_path: Path, verb: str, value: str
) -> None:
    server, proxy = listen(), listen()
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"a"\n')
    words = [str(prompts) if word == "PROMPTS" else word for word in verb.split()]
    value = proxy.url if value == "PROXY" else value
    variables = {"HTTP_PROXY": value, "all_proxy": value, "NO_PROXY": "[::1],http://[,fe80::/10"}
    tieredkv(*words, "--url", server.url.replace("127.0.0.1", "LocalHost"), **variables)
    assert server.asked and not proxy.asked


def test_other_machines_are_asked_through_the_proxy(
    listen: Callable[[], Listener], monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = listen()
    monkeypatch.setenv("http_proxy", proxy.url.removeprefix("http://"))
    monkeypatch.setenv("no_proxy", "[::1],http://[,direct.invalid")
    with http_client("http://gpu1.invalid:8000") as http:
        assert http.get("/v1/models").status_code == 200
    assert proxy.asked == ["http://gpu1.invalid:8000/v1/models"]
    with http_client("http://direct.invalid") as http, pytest.raises(httpx.ConnectError):
        http.get("/v1/models")
    assert len(proxy.asked) == 1


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
@pytest.mark.parametrize(
    "value",
    ["no url", "http://", "http://proxy:port", "http://proxy:99999", "ftp://proxy", "proxy/path"],
)
def test_a_proxy_that_is_no_url_is_named_with_its_variable(name: str, value: str) -> None:
    done = tieredkv("top", "--once", "--url", "http://gpu1.invalid:8000", **{name: value})
    assert done.returncode == 2
    told(done.stderr, hide={f"`{name}`": "`NAME`", f"`{value}`": "`VALUE`"})


def test_the_password_of_a_proxy_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://me:secret@proxy:port")
    with refused(ConfigError) as caught:
        http_client("https://gpu1.invalid")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "is_this_machine"),
    [
        *((it, True) for it in ("localhost", "LOCALHOST.", "kv.localhost", "127.0.0.1", "127.1")),
        *((it, True) for it in ("::1", "::ffff:127.0.0.1", "0.0.0.0", "::")),
        *((it, False) for it in ("", "gpu1", "localhost.example.com", "10.0.0.1", "fe80::1")),
    ],
)
def test_loopback_is_told_by_name_and_address(host: str, is_this_machine: bool) -> None:
    assert is_loopback(host) == is_this_machine
