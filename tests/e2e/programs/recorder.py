"""Stands between programs and a server, and records what they say to each other.

It is also the proxy of the programs' environment (`HTTPS_PROXY`). As such it refuses every other
host and records its name, so that a test can tell which hosts a program wants to reach.
"""

import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import httpx

from tests.waiting import HANG_S

API_PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
NOT_FORWARDED = {"host", "content-length", "transfer-encoding", "connection", "accept-encoding"}


class Usage(NamedTuple):
    """Tokens of one answer and its prompt; `cached` is the part of the prompt that was found."""

    prompt: int
    cached: int
    answer: int


@dataclass(frozen=True)
class Exchange:
    """One request and its answer."""

    method: str
    path: str
    headers: Mapping[str, str]
    request: bytes
    status: int
    answer: bytes

    @property
    def is_generation(self) -> bool:
        """Whether the request asked for an answer of the model."""
        return self.method == "POST" and self.path.partition("?")[0] in API_PATHS

    @cached_property
    def body(self) -> Any:
        """The request's JSON."""
        return json.loads(self.request)

    @property
    def asks_for_form(self) -> bool:
        """Whether the answer is held to a form while it is written."""
        tools = [tool.get("function", tool) for tool in self.body.get("tools", ())]
        forms = [self.body.get("response_format"), self.body.get("text", {}).get("format")]
        is_chosen = self.body.get("tool_choice", "auto") not in ("auto", "none", {"type": "auto"})
        is_single = self.body.get("parallel_tool_calls") is False
        return any(forms) or is_chosen or is_single or any(tool.get("strict") for tool in tools)

    @cached_property
    def usage(self) -> Usage:
        """What the answer tells of its tokens, in the words of any of the APIs."""
        said = dict[str, Any]()
        for event in self._events():
            for holder in (event, event.get("response"), event.get("message")):
                said |= (holder or {}).get("usage") or {}
        if "prompt_tokens" in said:
            cached = said["prompt_tokens_details"]["cached_tokens"]
            return Usage(said["prompt_tokens"], cached, said["completion_tokens"])
        if "input_tokens_details" in said:
            cached = said["input_tokens_details"]["cached_tokens"]
            return Usage(said["input_tokens"], cached, said["output_tokens"])
        read, written = said["cache_read_input_tokens"], said["cache_creation_input_tokens"]
        return Usage(said["input_tokens"] + read + written, read, said["output_tokens"])

    def _events(self) -> Iterator[dict[str, Any]]:
        text = self.answer.decode()
        if text.startswith("{"):
            yield json.loads(text)
            return
        for line in text.splitlines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


class Recorder:
    """Forwards requests to a server; a context, in which its thread runs.

    Args:
        root: URL of the server, without `/v1`.

    Attributes:
        added: headers that all answers get.
        exchanges: all requests so far, in the order in which their answers ended.
        refused: the other hosts that programs asked for.
    """

    def __init__(self, root: str) -> None:
        self.added: dict[str, str] = {}
        self.exchanges: list[Exchange] = []
        self.refused: list[str] = []
        self._client = httpx.Client(base_url=root, timeout=HANG_S, trust_env=False)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.root = f"http://127.0.0.1:{self._server.server_port}"
        self.url = f"{self.root}/v1"

    def __enter__(self) -> "Recorder":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._client.close()

    def stop(self) -> None:
        """Refuse connections from now on."""
        self._server.shutdown()
        self._server.server_close()

    def take(self) -> list[Exchange]:
        """Return the answers of the model since the last call, and forget them."""
        taken, self.exchanges = self.exchanges, []
        return [it for it in taken if it.is_generation]

    def take_refused(self) -> set[str]:
        """Return the hosts that were refused since the last call, and forget them."""
        taken, self.refused = self.refused, []
        return set(taken)

    def _handler(recorder: "Recorder") -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_CONNECT(self) -> None:
                if self.path == recorder.root.removeprefix("http://"):
                    self.send_response_only(200)  # what follows on this connection is forwarded
                    self.end_headers()
                    self.close_connection = False
                    return
                recorder.refused.append(self.path)
                self.send_error(403, "no other hosts in tests")

            def forward(self) -> None:
                if not self.path.startswith("/"):  # as a proxy is asked
                    recorder.refused.append(self.path)
                    self.send_error(403, "no other hosts in tests")
                    return
                request = self.rfile.read(int(self.headers.get("content-length", 0)))
                headers = {k: v for k, v in self.headers.items() if k.lower() not in NOT_FORWARDED}
                asked = recorder._client.stream(
                    self.command, self.path, content=request, headers=headers
                )
                with asked as answer:
                    pieces = [*self._pass_on(answer)]
                recorder.exchanges.append(
                    Exchange(
                        self.command,
                        self.path,
                        dict(self.headers),
                        request,
                        answer.status_code,
                        b"".join(pieces),
                    )
                )

            def _pass_on(self, answer: httpx.Response) -> Iterator[bytes]:
                self.send_response_only(answer.status_code)
                for name, value in [*answer.headers.items(), *recorder.added.items()]:
                    if name not in NOT_FORWARDED:
                        self.send_header(name, value)
                self.send_header("connection", "close")
                self.end_headers()
                for piece in answer.iter_raw():
                    yield piece
                    self.wfile.write(piece)
                    self.wfile.flush()
                self.close_connection = True

            do_GET = do_POST = do_HEAD = do_DELETE = do_OPTIONS = forward

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing."""

        return Handler
