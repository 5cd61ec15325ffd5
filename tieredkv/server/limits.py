"""Bounds on what clients can make the server hold: requests, bodies, headers, and time.

It knows connections and bytes, not what they mean.
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import h11
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from tieredkv.errors import RequestError

MAX_HEADER_BYTES = 64 << 10
MAX_BODIES_BYTES = 2 << 30
HEADERS_TIMEOUT_S = 20.0
WRITE_TIMEOUT_S = 60.0


@dataclass
class Limits:
    """Refuses what is too much at once, before its body is read, and notes when requests arrive.

    Attributes:
        app: takes the others; the operator's own requests are never too many.
        max_requests: that are answered at once.
        refuse: makes the answer to a request that is refused.
    """

    app: ASGIApp
    max_requests: int
    refuse: Callable[[Request, Exception], Awaitable[Response]]
    _num_requests: int = 0
    _num_bytes: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        scope["arrived_at"] = time.perf_counter()
        sizes: list[int] = []

        async def receive_counted() -> Message:
            message = await receive()
            sizes.append(len(message.get("body", b"")))
            self._num_bytes += sizes[-1]
            if self._num_bytes > MAX_BODIES_BYTES:
                raise _refused(429, "The server holds too many bytes of requests; retry later.")
            return message

        is_counted = scope.get("method") == "POST" and not scope["path"].startswith("/admin/")
        self._num_requests += is_counted
        try:
            if sum(map(len, itertools.chain(*scope["headers"]))) > MAX_HEADER_BYTES:
                raise _refused(431, f"The headers are longer than {MAX_HEADER_BYTES} bytes.")
            if is_counted and self._num_requests > self.max_requests:
                raise _refused(429, "The server has too many requests in hand; retry later.")
            await self.app(scope, receive_counted, send)
        except RequestError as error:
            await (await self.refuse(Request(scope), error))(scope, receive, send)
        finally:
            self._num_requests -= is_counted
            self._num_bytes -= sum(sizes)


def _refused(status: int, text: str) -> RequestError:
    code = "queue_full" if status == 429 else "headers_too_large"
    return RequestError(text, code=code, status=status)


class TimedConnection(H11Protocol):
    """A connection that ends when its headers do not, or when its answer is not read."""

    def connection_made(self, transport: Any) -> None:
        """Wait for the first headers, but not for ever."""
        super().connection_made(transport)
        self._reading = self._abort_in(HEADERS_TIMEOUT_S)

    def data_received(self, data: bytes) -> None:
        """Take data; headers that have begun must end."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._reading.cancel()
        elif self._reading.cancelled():
            self._reading = self._abort_in(HEADERS_TIMEOUT_S)

    def pause_writing(self) -> None:
        """Wait for a client that does not read, but not for ever."""
        super().pause_writing()
        self._writing = self._abort_in(WRITE_TIMEOUT_S)

    def resume_writing(self) -> None:
        """Go on; the client reads again."""
        super().resume_writing()
        self._writing.cancel()

    def _abort_in(self, timeout_s: float) -> asyncio.TimerHandle:
        return self.loop.call_later(timeout_s, self.transport.abort)
