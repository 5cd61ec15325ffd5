"""One HTTP connection: how long each of its phases may take, how many there are, how it ends.

It knows bytes, timers and sockets; what a request asks for is known to the application.
"""

import asyncio
import logging
import sys
import time
from collections import OrderedDict
from functools import partial
from typing import Any, cast

import h11
import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from tieredkv.errors import RequestError
from tieredkv.server.limits import ID_HEADERS, request_id_of
from tieredkv.server.openai_answers import openai_body
from tieredkv.wire.limits import raise_file_limit

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 << 10
"""Headers are refused once more bytes than this have been received without their end."""

HEADERS_TIMEOUT_S = 20.0
WRITE_TIMEOUT_S = 60.0
LINGER_S = 3.0
"""How long a connection that is being closed is still read from."""

MAX_LINGER_BYTES = 128 << 20
MAX_FRAMING_BYTES = 1 << 20
"""How many bytes the headers and the chunk sizes of one request may take, beside its body."""

RECEIVE_BYTES = 16 << 10
"""How much is read and parsed at once: parsing tiny chunks takes about 1 µs a byte, and no other
request is answered meanwhile.
"""

NUM_IDLE = 1000
NUM_OTHER_DESCRIPTORS = 200
WARNING_INTERVAL_S = 60.0

_CODES = {431: "headers_too_large", 503: "shutting_down"}


def max_connections(max_requests: int) -> int:
    """Return how many connections to hold, after raising the limit of open files to allow it."""
    wanted = max_requests + NUM_IDLE
    num_files = raise_file_limit(wanted + NUM_OTHER_DESCRIPTORS)
    return max(1, min(wanted, num_files - NUM_OTHER_DESCRIPTORS))


class Connections:
    """Makes the connections of one server, and bounds how many are open.

    Beyond the bound, each new connection closes the one that has waited longest without a request
    in hand; if all of them have one, the new connection is closed.

    Args:
        max_open: the bound.
    """

    def __init__(self, max_open: int) -> None:
        self._max_open = max_open
        self._open = set[TimedConnection]()
        self._waiting = OrderedDict[TimedConnection, None]()
        self._warned_at = -WARNING_INTERVAL_S

    def __call__(self, **wiring: Any) -> "TimedConnection":
        """Return a new connection; uvicorn calls this where it expects a class."""
        return TimedConnection(self, **wiring)

    def add(self, connection: "TimedConnection") -> None:
        """Note a new connection."""
        self._open.add(connection)
        self.wait(connection)
        if len(self._open) > self._max_open:
            now = time.monotonic()
            if now - self._warned_at >= WARNING_INTERVAL_S:
                self._warned_at = now
                text = "%d connections are open; each new one closes the one that is idle longest"
                logger.warning(text, self._max_open)
            self.remove(longest := next(iter(self._waiting)))
            longest.transport.abort()

    def remove(self, connection: "TimedConnection") -> None:
        """Forget a connection that is closed; twice is fine."""
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    def wait(self, connection: "TimedConnection") -> None:
        """Note that a connection has no request in hand."""
        self._waiting[connection] = None

    def work(self, connection: "TimedConnection") -> None:
        """Note that a connection has a request in hand."""
        self._waiting.pop(connection, None)


class TimedConnection(H11Protocol):
    """A connection with a time limit for each of its phases.

    Headers must be complete in time, and answers must be read in time; `limits.read_body` limits
    the time for bodies. A connection that is closed while the client may still be sending lingers:
    the sending side is closed, and what arrives is dropped for a short time. Closing the socket at
    once would reset the connection, and the client could lose the answer.
    """

    def __init__(self, connections: Connections, **wiring: Any) -> None:
        super().__init__(**wiring)
        self._connections = connections
        self._num_received = self._num_dropped = 0
        self._is_ending = False
        self._timers = dict[str, asyncio.TimerHandle]()
        self.app = partial(self._answer, self.app)

    # What asyncio calls

    def connection_made(self, transport: Any) -> None:
        """Wait for the first headers, but not for ever."""
        transport.max_size = RECEIVE_BYTES
        super().connection_made(_Transport(transport, self))  # type: ignore[arg-type]
        self._abort_in("headers", HEADERS_TIMEOUT_S)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of everything."""
        self._connections.remove(self)
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take data; headers that have begun must end."""
        if self._is_ending or self.conn.their_state in (h11.MUST_CLOSE, h11.CLOSED):
            self._num_dropped += len(data)
            if self._num_dropped > MAX_LINGER_BYTES:
                self.transport.abort()
            return
        self._num_received += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self.conn.their_state is not h11.IDLE:
            self._cancel("headers")
            if self._num_received - len(self.cycle.body) > MAX_FRAMING_BYTES:
                self._refuse(400, "The chunks of the request body are too small.")
        elif "headers" not in self._timers:
            self._abort_in("headers", HEADERS_TIMEOUT_S)

    def pause_writing(self) -> None:
        """Wait for a client that does not read, but not for ever."""
        super().pause_writing()
        self._abort_in("reader", WRITE_TIMEOUT_S)

    def resume_writing(self) -> None:
        """Go on; the client reads again."""
        super().resume_writing()
        self._cancel("reader")

    # What uvicorn calls

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._num_received = 0
        self._connections.wait(self)
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, with the status that the parser names."""
        status = getattr(sys.exception(), "error_status_hint", 400)
        if status == 431:
            msg = "The headers are longer than the server accepts."
        self._refuse(status, msg)

    def shutdown(self) -> None:
        """Close after the answer in progress; refuse a request whose body is still arriving."""
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        elif self.cycle.more_body:
            self._refuse(503, "The server is shutting down.")
        else:
            self.cycle.keep_alive = False

    def _should_upgrade(self) -> bool:
        """Ignore requests to upgrade, as RFC 9110 allows; only HTTP/1 is spoken."""
        return False

    async def _answer(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Have the application answer; close the connection if the body was not received whole."""
        self._connections.work(self)

        async def receive_counted() -> Message:
            message = await receive()
            self._num_received -= len(message.get("body", b""))
            return message

        async def send_or_close(message: Message) -> None:
            if message["type"] == "http.response.start" and self.conn.their_state is h11.SEND_BODY:
                headers = [*message.get("headers", ()), (b"connection", b"close")]
                message = {**message, "headers": headers}
            await send(message)

        try:
            await app(scope, receive_counted, send_or_close)
        except asyncio.CancelledError:  # the server stops and has waited for long enough
            self._give_up()
            self.transport.abort()

    def _refuse(self, status: int, text: str) -> None:
        """End the connection, with an answer in OpenAI's form if none has begun."""
        self._give_up()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error = RequestError(text, code=_CODES.get(status), status=status)
            body = msgspec.json.encode(openai_body(error))
            is_begun = self.cycle is not None and not self.cycle.response_complete
            own = Headers(scope=cast(Scope, self.scope)) if is_begun else {}
            headers = dict.fromkeys(ID_HEADERS, request_id_of(own))
            headers |= {"content-type": "application/json", "content-length": str(len(body))}
            headers |= {"connection": "close"}
            reason = STATUS_PHRASES[status]
            head = h11.Response(status_code=status, headers=[*headers.items()], reason=reason)
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        self.transport.close()

    def _give_up(self) -> None:
        """Tell the application that the request in hand, if there is one, needs no answer."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def end(self, transport: asyncio.Transport) -> None:
        """Close the transport, at once or after lingering if the client may still be sending."""
        if self._is_ending:
            return
        self._is_ending = True
        if transport.is_closing():  # the client has reset it
            return
        self._connections.wait(self)
        self._abort_in("end", WRITE_TIMEOUT_S if transport.get_write_buffer_size() else LINGER_S)
        has_ended = self.conn.their_state in (h11.IDLE, h11.DONE, h11.MUST_CLOSE, h11.CLOSED)
        if has_ended and not (self.flow.read_paused or self.conn.trailing_data[0]):
            transport.close()
        else:
            transport.resume_reading()
            if not transport.get_write_buffer_size():
                try:
                    transport.write_eof()
                except OSError:  # the client has reset it
                    transport.abort()

    @property
    def is_ending(self) -> bool:
        """Whether it is closed as far as uvicorn is concerned."""
        return self._is_ending

    def _abort_in(self, phase: str, timeout_s: float) -> None:
        self._timers[phase] = self.loop.call_later(timeout_s, self.transport.abort)

    def _cancel(self, phase: str) -> None:
        if (timer := self._timers.pop(phase, None)) is not None:
            timer.cancel()


class _Transport:
    """The transport as uvicorn sees it: its connection decides how to close."""

    def __init__(self, transport: asyncio.Transport, connection: TimedConnection) -> None:
        self._transport, self._connection = transport, connection

    def close(self) -> None:
        self._connection.end(self._transport)

    def is_closing(self) -> bool:
        return self._connection.is_ending or self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
