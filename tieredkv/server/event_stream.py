"""An answer as a stream of server-sent events."""

from collections.abc import AsyncIterator, Callable

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from tieredkv.errors import RequestError
from tieredkv.server.asked import Json, Shape
from tieredkv.server.generation import ClientGoneError, Generation

PING_S = 10.0
"""Seconds between the pings of a stream that waits for its first token.

The headers of such a stream are sent with the first ping.
"""


class EventStream(StreamingResponse):
    """A stream of server-sent events, with pings until the first event.

    Args:
        generation: produces the answer; its `RequestError` becomes the last event.
        shape: the form of the answer.
        on_end: called when the stream ends for any reason.
    """

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, shape: Shape, *, on_end: Callable[[], None]) -> None:
        super().__init__(_event_lines(generation, shape), headers={"Cache-Control": "no-cache"})
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; a client that disconnects is not an error."""
        try:
            await self.stream_response(send)
        except (ClientGoneError, OSError):
            pass
        finally:
            self._on_end()


async def _event_lines(generation: Generation, shape: Shape) -> AsyncIterator[bytes]:
    def line(event: Json) -> bytes:
        head = f"event: {event['type']}\n".encode() if shape.names_events else b""
        return head + b"data: " + msgspec.json.encode(event) + b"\n\n"

    try:
        while not await generation.has_begun(PING_S):
            # No comment, since some clients that read lines would parse it as JSON.
            yield b"".join(map(line, shape.waiting())) or b"\n\n"
        async for event in shape.events(generation.answers, generation.pieces()):
            yield line(event)
    except RequestError as error:
        yield line(shape.failure(error))
    else:
        if not shape.names_events:
            yield b"data: [DONE]\n\n"
