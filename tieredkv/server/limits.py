"""Bounds on what clients can make the server hold: requests, bodies, headers, and time.

It knows connections and bytes, not what they mean.
"""

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tieredkv.errors import RequestError

BODY_BYTES = 1 << 20
BODY_BYTES_PER_TOKEN = 32
"""How long a body may be where no setting says so: a prompt that fills the context fits, however
its JSON is written."""
MAX_BODIES_BYTES = 2 << 30
BODY_TIMEOUT_S = 60.0

ID_HEADERS = ("x-request-id", "request-id")
"""What OpenAI's and Anthropic's clients call the id that each answer has."""

_CODES = {408: "timeout", 413: "request_too_large", 429: "queue_full"}


@dataclass
class Limits:
    """Refuses what is too much at once, before its body is read.

    It notes in the scope when a request has arrived, its id, which the answer gets, too, and whose
    it is; `app` notes `is_answered`
    there, but for what was refused.

    Who holds less than an equal share is not refused for what others hold, so that twice as much
    is held at the very most.

    Attributes:
        app: takes the others; the operator's own requests are never too many.
        max_requests: that are answered at once.
        refuse: makes the answer to a request that is refused.
        check_head: raises a `RequestError` for what is refused by its path and headers alone.
        tenant_of: tells by its headers whose a request is.
        max_body_bytes: the longest body; noted in the scope, for `read_body`.
    """

    app: ASGIApp
    max_requests: int
    refuse: Callable[[Request, Exception], Awaitable[Response]]
    tenant_of: Callable[[Mapping[str, str]], str] = lambda _: ""
    check_head: Callable[[str, Mapping[str, str]], None] = lambda _path, _headers: None
    max_body_bytes: int = BODY_BYTES
    _requests: Counter[str] = field(default_factory=Counter)
    _bytes: Counter[str] = field(default_factory=Counter)
    _took_s: float = 0.0  # for the last request that was answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        scope["arrived_at"] = time.perf_counter()
        request_id = scope["request_id"] = f"req_{uuid.uuid4().hex}"
        scope["max_body_bytes"] = self.max_body_bytes
        tenant, held = "", Counter[str]()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(dict.fromkeys(ID_HEADERS, request_id))
            await send(message)

        async def receive_counted() -> Message:
            message = await receive()
            size = len(message.get("body", b""))
            held[tenant] += size
            self._bytes[tenant] += size
            _check_size(held[tenant], self.max_body_bytes)
            if _is_too_much(self._bytes, tenant, MAX_BODIES_BYTES):
                raise self._too_much("holds too many bytes of requests", tenant)
            return message

        is_counted = scope.get("method") == "POST" and not scope["path"].startswith("/admin/")
        counted = Counter[str]()
        try:
            self.check_head(scope["path"], Headers(scope=scope))
            if is_counted:
                tenant = scope["tenant"] = self.tenant_of(Headers(scope=scope))
                counted[tenant] = 1
                self._requests += counted
                if _is_too_much(self._requests, tenant, self.max_requests):
                    raise self._too_much("has too many requests in hand", tenant)
            await self.app(scope, receive_counted, send_with_id)
            if "is_answered" in scope:
                self._took_s = time.perf_counter() - scope["arrived_at"]
        except RequestError as error:
            await (await self.refuse(Request(scope), error))(scope, receive, send_with_id)
        finally:
            self._requests -= counted
            self._bytes -= held

    def _too_much(self, why: str, tenant: str) -> RequestError:
        """Return a refusal until about when one of the tenant's requests will be answered."""
        error = _refused(429, f"The server {why}; retry later.")
        return error.retry_in(self._took_s / max(1, self._requests[tenant]))


async def read_body(request: Request) -> bytes:
    """Return a body that is not too long, by its header to begin with, and arrives in time."""
    _check_size(int(request.headers.get("content-length", "0")), request.scope["max_body_bytes"])
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.body()
    except TimeoutError:
        raise _refused(408, "The request body did not arrive in time.") from None


def default_body_size(max_model_len: int) -> int:
    """Return how many bytes a body may have for a context of so many tokens."""
    return BODY_BYTES + BODY_BYTES_PER_TOKEN * max_model_len


def _check_size(num_bytes: int, most: int) -> None:
    if num_bytes > most:
        text = f"The request body is longer than {most} bytes, the server's `max_body_size`."
        raise _refused(413, text)


def _is_too_much(held: Counter[str], tenant: str, most: int) -> bool:
    return held.total() > most and held[tenant] > most // len(+held)


def _refused(status: int, text: str) -> RequestError:
    return RequestError(text, code=_CODES[status], status=status)
