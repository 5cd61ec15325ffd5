"""An answer as a stream of server-sent events."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable

import msgspec
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tieredkv.errors import RequestError
from tieredkv.server.asked import Json, Shape
from tieredkv.server.generation import ClientGoneError, Generation

PING_S = 10.0
"""Seconds between the pings of a stream that waits for its grammar or its first token.

The headers of such a stream are sent with the first ping.
"""

_HEADERS = {"Cache-Control": "no-cache"}


class EventStream(StreamingResponse):
    """A stream of server-sent events, with pings until the first event.

    Args:
        starting: results in what produces the answer; a `RequestError` of either becomes the last
            event.
        shape: the form of the answer.
        on_end: called when the stream ends for any reason.
    """

    media_type = "text/event-stream"

    def __init__(
        self, starting: asyncio.Future[Generation], shape: Shape, *, on_end: Callable[[], None]
    ) -> None:
        super().__init__(_event_lines(starting, shape), headers=_HEADERS)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; a client that disconnects is not an error."""
        try:
            await self.stream_response(send)
        except (ClientGoneError, OSError):
            pass
        finally:
            self._on_end()


def failed_stream(shape: Shape, error: RequestError) -> Response:
    """Return a whole stream of server-sent events that says why there is no answer."""
    content = _lines(shape, shape.failure(error))
    return Response(content, media_type=EventStream.media_type, headers=_HEADERS)


async def has_begun(starting: asyncio.Future[Generation], timeout_s: float | None) -> bool:
    """Wait for the first piece of an answer and return whether it came in time.

    Args:
        starting: results in what produces the answer.
        timeout_s: how long to wait; None for as long as it takes.

    Raises:
        RequestError, ClientGoneError: as it raises, or as `Generation.has_begun` does.
    """
    loop = asyncio.get_running_loop()
    began_at = loop.time()
    await asyncio.wait([starting], timeout=timeout_s)
    if not starting.done():
        return False
    waited_s = loop.time() - began_at
    left_s = None if timeout_s is None else max(0.0, timeout_s - waited_s)
    return await starting.result().has_begun(left_s)


def _lines(shape: Shape, events: Iterable[Json]) -> bytes:
    lines = []
    for event in events:
        head = f"event: {event['type']}\n".encode() if shape.names_events else b""
        lines.append(head + b"data: " + msgspec.json.encode(event) + b"\n\n")
    return b"".join(lines)


async def _event_lines(starting: asyncio.Future[Generation], shape: Shape) -> AsyncIterator[bytes]:
    try:
        while not await has_begun(starting, PING_S):
            # No comment, since some clients that read lines would parse it as JSON.
            yield _lines(shape, shape.waiting()) or b"\n\n"
        generation = starting.result()
        async for event in shape.events(generation.answers, generation.pieces()):
            yield _lines(shape, [event])
    except RequestError as error:
        yield _lines(shape, shape.failure(error))
    else:
        if not shape.names_events:
            yield b"data: [DONE]\n\n"
