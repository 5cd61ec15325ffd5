"""Bounds on the requests and bodies that clients can make the server hold.

It knows bytes, tenants and times, not what a request means. Bounds on connections and headers are
in `connections`.
"""

import asyncio
import re
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
MAX_PICTURES_BYTES = 64 << 20
"""How much longer a body may be for the data of its pictures, files and recordings."""
MAX_BODIES_BYTES = 2 << 30
BODY_TIMEOUT_S = 60.0

ID_HEADERS = ("x-request-id", "request-id")
"""The headers with a request's id that OpenAI's and Anthropic's clients look for in an answer."""

CLIENT_CLOSED_REQUEST = 499
_CLIENTS_ID = re.compile(r"[!-~](?:[ -~]{0,126}[!-~])?")
"""An id that a client may choose: printable, so that no line of a log can be forged with it."""

_CODES = {408: "timeout", 413: "request_too_large", 429: "queue_full"}


@dataclass
class Limits:
    """Refuses requests beyond the bounds, before their bodies are read.

    It stores `arrived_at`, `request_id` and `tenant` in the scope of each request, and sends the id
    with the answer. `app` stores `is_answered` in the scope of each request that it did not refuse,
    and calls `hold` in the scope for bytes that a request needs as if they came with its body, and
    with a negative number for bytes of its body that it has dropped.

    Beyond a bound, only those tenants are refused that hold so much that the bound would not be
    kept if each of the others held at most as much. So a tenant that takes all cannot keep out
    others, whose share is what it would be if it took no more than they. Requests to `/admin` are
    not counted.

    Attributes:
        app: the application that gets the admitted requests.
        max_requests: the bound on requests in hand.
        refuse: makes the answer to a refused request.
        tenant_of: returns the tenant by the request's headers.
        check_head: raises a `RequestError` if path and headers alone are a reason to refuse.
        max_body_bytes: the bound on one body without pictures; `read_body` finds it in the scope.
        on_end: called with the scope and the status of each request that has ended.
    """

    app: ASGIApp
    max_requests: int
    refuse: Callable[[Request, Exception], Awaitable[Response]]
    tenant_of: Callable[[Mapping[str, str]], str] = lambda _: ""
    check_head: Callable[[str, Mapping[str, str]], None] = lambda _path, _headers: None
    max_body_bytes: int = BODY_BYTES
    on_end: Callable[[Scope, int], None] = lambda _scope, _status: None
    _requests: Counter[str] = field(default_factory=Counter)
    _bytes: Counter[str] = field(default_factory=Counter)
    _took_s: float = 0.0  # for the last request that was answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, or refuse it."""
        scope["arrived_at"] = time.perf_counter()
        request_id = scope["request_id"] = request_id_of(Headers(scope=scope))
        scope["max_body_bytes"] = self.max_body_bytes
        tenant, held, status = "", Counter[str](), CLIENT_CLOSED_REQUEST

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update(dict.fromkeys(ID_HEADERS, request_id))
            await send(message)

        def hold(size: int) -> None:
            held[tenant] += size
            self._bytes[tenant] += size
            if size > 0 and _is_too_much(self._bytes, tenant, MAX_BODIES_BYTES):
                raise self._too_much("holds too many bytes of unfinished requests", tenant)

        async def receive_counted() -> Message:
            message = await receive()
            hold(len(message.get("body", b"")))
            return message

        scope["hold"] = hold

        is_counted = scope.get("method") == "POST" and not scope["path"].startswith("/admin/")
        counted = Counter[str]()
        try:
            self.check_head(scope["path"], Headers(scope=scope))
            if is_counted:
                tenant = scope["tenant"] = self.tenant_of(Headers(scope=scope))
                counted[tenant] = 1
                self._requests += counted
                if _is_too_much(self._requests, tenant, self.max_requests):
                    raise self._too_much("has too many unfinished requests", tenant)
            await self.app(scope, receive_counted, send_with_id)
            if "is_answered" in scope:
                self._took_s = time.perf_counter() - scope["arrived_at"]
        except RequestError as error:
            await (await self.refuse(Request(scope), error))(scope, receive, send_with_id)
        finally:
            self._requests -= counted
            self._bytes -= held
            self.on_end(scope, status)

    def _too_much(self, why: str, tenant: str) -> RequestError:
        """Return a refusal that says when one of the tenant's requests will probably have ended."""
        error = _refused(429, f"The server {why}; retry later.")
        return error.retry_in(self._took_s / max(1, self._requests[tenant]))


def request_id_of(headers: Mapping[str, str]) -> str:
    """Return the id that a client gave its request, or a new one for none that can be kept."""
    given = headers.get(ID_HEADERS[0], "")
    return given if _CLIENTS_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"


async def read_body(request: Request, max_pictures_bytes: int = 0) -> bytes:
    """Return a request's body; the request does not keep it.

    Args:
        request: whose body was not read yet.
        max_pictures_bytes: how many bytes more it may have for the data of pictures.

    Raises:
        RequestError: the body, or the length that its header names, is above the limit, or the body
            takes too long to arrive.
    """
    most = request.scope["max_body_bytes"]
    size, chunks = int(request.headers.get("content-length", "0")), list[bytes]()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            _check_whole(size, most, max_pictures_bytes)
            size = 0
            async for chunk in request.stream():
                size += len(chunk)
                _check_whole(size, most, max_pictures_bytes)
                chunks.append(chunk)
    except TimeoutError:
        raise _refused(408, "The request body did not arrive in time.") from None
    return b"".join(chunks)


def default_body_size(max_model_len: int) -> int:
    """Return how many bytes a body may have for a context of so many tokens."""
    return BODY_BYTES + BODY_BYTES_PER_TOKEN * max_model_len


def check_size(num_bytes: int, most: int, what: str = "The request body") -> None:
    """Refuse a body that is too long, or what would be with it.

    Raises:
        RequestError: there are more bytes than allowed.
    """
    if num_bytes > most:
        text = f"{what} is longer than {most} bytes, the server's `max_body_size`."
        raise _refused(413, text)


def check_rest(num_bytes: int, most: int) -> None:
    """Refuse a body that is too long even without the data of its pictures and files.

    Raises:
        RequestError: there are more bytes than allowed.
    """
    if num_bytes > most:
        text = f"Without its pictures and files, the request body is longer than {most} bytes"
        more = f"only pictures and files may have {MAX_PICTURES_BYTES} bytes more"
        raise _refused(413, f"{text}, the server's `max_body_size`; {more}.")


def _check_whole(num_bytes: int, most: int, max_pictures_bytes: int) -> None:
    if not max_pictures_bytes:
        check_size(num_bytes, most)
    elif num_bytes > most + max_pictures_bytes:
        text = f"The request body is longer than {most + max_pictures_bytes} bytes: {most}"
        more = f"{max_pictures_bytes} for pictures and files"
        raise _refused(413, f"{text}, the server's `max_body_size`, and {more}.")


def _is_too_much(held: Counter[str], tenant: str, most: int) -> bool:
    if held.total() <= most:
        return False
    return sum(min(each, held[tenant]) for each in held.values()) > most


def _refused(status: int, text: str) -> RequestError:
    return RequestError(text, code=_CODES[status], status=status)
