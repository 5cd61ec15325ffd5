"""The HTTP application: routes, keys, streams and errors.

It knows HTTP and JSON; what a request means is in `openai_requests`, what answers look like in
`openai_responses`, and how text is made in `generation`.
"""

import asyncio
import hashlib
import hmac
import json
import logging
import os
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tieredkv.config import Settings
from tieredkv.engine.messages import EngineRequest
from tieredkv.errors import RequestError
from tieredkv.fields import parse_body, read
from tieredkv.server import openai_requests as requests
from tieredkv.server import openai_responses as responses
from tieredkv.server.chat import Tokenization
from tieredkv.server.engine_client import EngineClient
from tieredkv.server.generation import ClientGoneError, Generation, Piece
from tieredkv.server.openai_responses import ChatShape, CompletionShape, Shape, error_body

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 << 20
BODY_TIMEOUT_S = 60.0
CLIENT_CLOSED_REQUEST = 499

Asked = TypeVar("Asked", bound=requests.ApiRequest)


class Api:
    """What the routes need; one for each server."""

    def __init__(
        self, settings: Settings, engine: EngineClient, tokenization: Tokenization, is_strict: bool
    ) -> None:
        self._engine = engine
        self._policies = settings.retention_policies()
        self._is_strict = is_strict
        self._tokenization = tokenization
        self._keys = [key.encode() for key in settings.api_keys]
        self._max_answers = settings.max_num_seqs + settings.max_num_queued_reqs
        self._created = int(time.time())

    # Routes

    async def health(self, _request: Request) -> Response:
        """Say whether the engine lives, and which processes these are."""
        engine, info, is_alive = self._engine, self._engine.info, self._engine.is_alive
        pids = {"engine": engine.pid, "worker": info.worker_pid}
        pids = {"server": os.getpid(), **(pids if is_alive else dict.fromkeys(pids))}
        body = {"status": "ok" if is_alive else "dead", "model": info.model, "pids": pids}
        return JSONResponse(body, 200 if is_alive else 503)

    async def models(self, request: Request) -> Response:
        """List the one model."""
        self._tenant(request)
        return JSONResponse({"object": "list", "data": [self._model_body()]})

    async def model(self, request: Request) -> Response:
        """Describe a model by its name."""
        self._tenant(request)
        name = request.path_params["name"]
        if name != self._engine.info.model:
            raise requests.unknown_model(name)
        return JSONResponse(self._model_body())

    async def completions(self, request: Request) -> Response:
        """Continue texts."""
        tenant, asked = await self._open(request, requests.CompletionRequest)
        prompts = await self._tokenization.encode_prompts(asked.prompt)
        echoed = asked.prompt if asked.echo else ()
        echoes = [await self._tokenization.decode(prompt) for prompt in echoed]
        generation = self._generate(asked, prompts, tenant)
        shape = CompletionShape(self._engine.info.model, self._tokenization.token_text)
        return await _answer(request, asked, _Answering(generation, shape, asked, echoes))

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        tenant, asked = await self._open(request, requests.ChatRequest)
        messages = [message.for_template() for message in asked.messages]
        arguments = {"tools": asked.tools or None, **asked.chat_template_kwargs}
        prompt = await self._tokenization.encode_chat(messages, arguments)
        generation = self._generate(asked, [prompt], tenant)
        shape = ChatShape(self._engine.info.model, self._tokenization.token_text)
        return await _answer(request, asked, _Answering(generation, shape, asked))

    # Steps of a request

    async def _open(self, request: Request, kind: type[Asked]) -> tuple[str, Asked]:
        """Return whose request it is, and its body, checked in whole."""
        tenant = self._tenant(request)
        body = parse_body(await _read_body(request))
        if (model := read(requests.ModelRequest, body).model) != self._engine.info.model:
            raise requests.unknown_model(model)
        asked = read(kind, body)
        asked.check(self._policies, is_strict=self._is_strict)
        return tenant, asked

    def _tenant(self, request: Request) -> str:
        """Return whose request it is: a digest of its key, or the one tenant where no key is set.

        Raises:
            RequestError: keys are set and the request has none of them.
        """
        if not self._keys:
            return ""
        header = request.headers.get("authorization", "")
        scheme, _, given = header.partition(" ")
        if scheme.lower() != "bearer" or not given:
            given = request.headers.get("x-api-key", "")
        if not given:
            text = (
                "You didn't provide an API key. You need to provide your API key in an "
                "Authorization header using Bearer auth (i.e. Authorization: Bearer YOUR_KEY)."
            )
            raise RequestError(text, code="invalid_api_key", status=401)
        encoded = given.strip().encode("latin-1", "replace")
        # Every key is compared, so that the time tells nothing of which one is close.
        if not any([hmac.compare_digest(encoded, key) for key in self._keys]):
            raise RequestError("Incorrect API key provided.", code="invalid_api_key", status=401)
        return hashlib.sha256(encoded).hexdigest()

    def _generate(
        self, asked: requests.ApiRequest, prompts: list[list[int]], tenant: str
    ) -> Generation:
        """Hand the prompts to the engine; answer `i * n + j` is the j-th of the i-th of them."""
        info = self._engine.info
        asked.params.check_vocabulary(info.vocab_size)
        num_answers = len(prompts) * asked.n
        if num_answers > self._max_answers:
            text = (
                f"{len(prompts)} prompts with n = {asked.n} are {num_answers} answers; "
                f"this server takes at most {self._max_answers} at once."
            )
            raise RequestError(text, param="n", code="invalid_value")
        engine_requests = []
        seed = secrets.randbits(62)
        for i, prompt in enumerate(prompts):
            asked.check_prompt(prompt, info.max_model_len, info.vocab_size)
            room = info.max_model_len - len(prompt)
            max_tokens = min(asked.limit or asked.default_tokens or room, room)
            engine_requests += [
                EngineRequest(
                    request_id=uuid.uuid4().hex,
                    prompt_token_ids=prompt,
                    params=asked.params_of(j, max_tokens, seed + i * asked.n),
                    retention=asked.prompt_cache_retention,
                    tenant=tenant,
                    cache_salt=asked.cache_salt,
                    prompt_cache_key=asked.prompt_cache_key,
                )
                for j in range(asked.n)
            ]
        tokenizer = self._tokenization.tokenizer
        return Generation(self._engine, tokenizer, engine_requests)

    def _model_body(self) -> dict[str, Any]:
        info = self._engine.info
        model = {"id": info.model, "object": "model", "created": self._created}
        return {**model, "owned_by": "tieredkv", "max_model_len": info.max_model_len}


@dataclass
class _Answering:
    """Puts the pieces of a generation into the shape of its endpoint."""

    generation: Generation
    shape: Shape
    asked: requests.ApiRequest
    echoes: Sequence[str] = ()

    def __post_init__(self) -> None:
        self._pieces = self.generation.pieces()
        each = [text for text in self.echoes for _ in range(self.asked.n)]
        self._echoes = each or [""] * len(self.generation.answers)

    async def wait_for_first(self) -> None:
        self._pieces = _after(await anext(self._pieces), self._pieces)

    async def whole(self) -> dict[str, Any]:
        """Return the answer in one piece."""
        async for _ in self._pieces:
            pass
        choices = []
        is_wanted = self.asked.params.logprobs is not None
        for i, (echo, answer) in enumerate(zip(self._echoes, self.generation.answers, strict=True)):
            assert answer.finish_reason is not None, answer.request.request_id
            logprobs = self.shape.logprobs(answer.logprobs, len(echo)) if is_wanted else None
            choice = self.shape.choice(i, echo + answer.text, logprobs, answer.finish_reason)
            choices.append(choice)
        return self.shape.response(choices, self._usage())

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the chunks of a stream; one at least for every step's output."""
        offsets = [len(echo) for echo in self._echoes]
        no_usage = {"usage": None} if self.asked.wants_stream_usage else {}
        for i, echo in enumerate(self._echoes):
            for choice in self.shape.opening(i, echo):
                yield self.shape.chunk(choice, **no_usage)
        async for piece in self._pieces:
            logprobs = None
            if self.asked.params.logprobs is not None and piece.logprobs:
                logprobs = self.shape.logprobs(piece.logprobs, offsets[piece.index])
            offsets[piece.index] += len(piece.text)
            for choice in self.shape.delta(piece.index, piece.text, logprobs, piece.finish_reason):
                yield self.shape.chunk(choice, **no_usage)
        if self.asked.wants_stream_usage:
            yield self.shape.chunk(usage=self._usage())

    def _usage(self) -> dict[str, Any]:
        answers = self.generation.answers
        of_prompts = [answer.usage for answer in answers[:: self.asked.n]]  # as the first found it
        return responses.usage_body(of_prompts, sum(len(answer.token_ids) for answer in answers))


class EventStream(StreamingResponse):
    """Server-sent events, each sent as soon as it is there, and `[DONE]` at the end.

    Args:
        events: JSON objects; a `RequestError` from it becomes the last event.
        on_end: called however the stream ends.
    """

    def __init__(
        self, events: AsyncIterator[dict[str, Any]], *, on_end: Callable[[], None]
    ) -> None:
        headers = {"Cache-Control": "no-cache"}
        super().__init__(_event_lines(events), media_type="text/event-stream", headers=headers)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; a client that went away is nobody's error."""
        try:
            await self.stream_response(send)
        except (ClientGoneError, OSError):
            pass
        finally:
            self._on_end()


async def _event_lines(events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    last = "[DONE]"
    try:
        async for event in events:
            yield f"data: {_to_json(event)}\n\n"
    except RequestError as error:
        last = _to_json(error_body(error))
    yield f"data: {last}\n\n"


def build_app(api: Api) -> ASGIApp:
    """Return the application with its routes and error shapes."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_route("/health", api.health)  # GET, and with it HEAD
    app.add_route("/v1/models", api.models)
    app.add_route("/v1/models/{name:path}", api.model)
    app.add_route("/v1/completions", api.completions, methods=["POST"])
    app.add_route("/v1/chat/completions", api.chat, methods=["POST"])
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)
    app.add_exception_handler(ClientGoneError, _on_client_gone)
    app.add_exception_handler(Exception, _on_bug)
    return with_request_ids(app)


def with_request_ids(app: ASGIApp) -> ASGIApp:
    """Give every answer an `x-request-id`."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                request_id = f"req_{uuid.uuid4().hex}".encode()
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        await app(scope, receive, send_with_id if scope["type"] == "http" else send)

    return answer


async def _answer(request: Request, asked: requests.ApiRequest, answer: _Answering) -> Response:
    """Wait for the first token, so that a refusal still has its status; then answer."""
    watching = asyncio.create_task(_watch(request, answer.generation))
    is_handed_on = False

    def end() -> None:
        watching.cancel()
        answer.generation.close()

    try:
        await answer.wait_for_first()
        if asked.stream:
            is_handed_on = True
            return EventStream(answer.events(), on_end=end)
        return JSONResponse(await answer.whole())
    finally:
        if not is_handed_on:
            end()


async def _read_body(request: Request) -> bytes:
    """Return a body that is not too long and arrives in time."""
    text = f"The request body is longer than {MAX_BODY_BYTES} bytes."
    too_long = RequestError(text, code="request_too_large", status=413)
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise too_long
    except TimeoutError:
        text = "The request body did not arrive in time."
        raise RequestError(text, code="timeout", status=408) from None
    return bytes(body)


async def _after(first: Piece, others: AsyncIterator[Piece]) -> AsyncIterator[Piece]:
    yield first
    async for piece in others:
        yield piece


async def _watch(request: Request, generation: Generation) -> None:
    """Cancel the generation when the client goes away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    generation.cancel()


def _to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


async def _on_request_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    headers = {"Retry-After": str(error.retry_after_s)}
    return _refusal(error, headers if error.status in (429, 503) else None)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message, code = str(error.detail), None
    if error.status_code == 404:
        message, code = f"Unknown request URL: {request.method} {request.url.path}", "unknown_url"
    elif error.status_code == 405:
        message = f"Not allowed to {request.method} on {request.url.path}"
        code = "method_not_supported"
    return _refusal(RequestError(message, code=code, status=error.status_code), error.headers)


async def _on_client_gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_bug(_request: Request, _error: Exception) -> Response:
    """Answer without a traceback; the log has it."""
    text = "The server had an error while processing your request"
    return _refusal(RequestError(text, status=500))


def _refusal(error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse(error_body(error), error.status, headers)
