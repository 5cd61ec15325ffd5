"""The HTTP application: routes, keys, streams and errors.

This module only handles HTTP. The request types of the APIs interpret the bodies, and `generation`
produces the text.
"""

import asyncio
import contextlib
import functools
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tieredkv import __version__
from tieredkv.clock import Clock
from tieredkv.config import Settings
from tieredkv.engine.chains import namespace_of
from tieredkv.engine.engine_messages import EngineRequest
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.errors import PromptTooLongError, RequestError
from tieredkv.fields import MAX_VALUES, parse_body, read
from tieredkv.operate.calls import EvictFilter, Inspect
from tieredkv.server import event_stream
from tieredkv.server.access_log import Answering, write
from tieredkv.server.admin import respond
from tieredkv.server.asked import ApiRequest, Asked, Json, PlainRequest
from tieredkv.server.chat import Tokenization
from tieredkv.server.description import ANSWERED, description
from tieredkv.server.diagnosis import Diagnoses
from tieredkv.server.engine_client import EngineClient, disk_state
from tieredkv.server.error_responses import GONE, refuse, unknown_model
from tieredkv.server.generation import ClientGoneError, Generation
from tieredkv.server.grammar_checker import GrammarChecker, GrammarQueue
from tieredkv.server.ignored import MAX_TOLD, IgnoredLog
from tieredkv.server.inspected import planned
from tieredkv.server.keys import Keys
from tieredkv.server.limits import (
    ID_HEADERS,
    MAX_PICTURES_BYTES,
    Limits,
    check_size,
    default_body_size,
    read_body,
)
from tieredkv.server.metrics import Metrics, Observer
from tieredkv.server.page import OperatorPage
from tieredkv.server.pictures import without_pictures
from tieredkv.server.recorder import Recorder
from tieredkv.server.remembered import Memory, Namespace, RememberedAnswers
from tieredkv.server.response_items import listed
from tieredkv.server.responses_api import Page, ResponsesRequest, joined
from tieredkv.server.stored_responses import StoredResponse, StoredResponses, Turn
from tieredkv.server.threads import Cancellation, CancelledWorkError, FairThreads

logger = logging.getLogger(__name__)

JSON = "application/json"
SHORT_BYTES = 4096
"""Shorter bodies are read on the event loop, as a switch to a thread would take about as long."""

CROSS_ORIGIN_PATHS = {*ANSWERED, "/health", "/openapi.json", "/tokenizer_info", "/version"}
"""Paths outside of `/v1/` that pages of `cors_origins` may call.

Never add `/admin`, `/metrics` or `/ui`.
"""

Endpoint = Callable[[Request], Awaitable[Response]]
Result = TypeVar("Result")


class Prepared(NamedTuple):
    """What a body asks for, and the engine requests that answer it.

    Attributes:
        num_earlier_bytes: the length of the stored conversation that the request continues.
    """

    asked: Asked
    requests: Sequence[EngineRequest]
    num_earlier_bytes: int


@dataclass
class Api:
    """The routes of one server, and the objects that they share."""

    _settings: Settings
    _engine: EngineClient
    _tokenization: Tokenization
    _keys: Keys
    _recorder: Recorder | None = None

    def __post_init__(self) -> None:
        settings, info = self._settings, self._engine.info
        clock = Clock(settings.clock_offset_file)
        self._responses = StoredResponses(settings.stored_responses_size, clock.now)
        self._remembered = RememberedAnswers(settings.remembered_answers_size, clock.now)
        self._sweeping: asyncio.TimerHandle | None = None
        self._keys.on_adopt = self._forget_unknown_tenants
        self._engine.on_evict, self._engine.on_prompt = self._evict, self._plan
        self._metrics = Metrics(settings, self._engine, self._responses, self._remembered)
        self.history = self._metrics.history
        self.page = OperatorPage(settings, self._keys, self._engine, self.history)
        self._diagnoses = Diagnoses()
        self._threads = FairThreads()
        checker = GrammarChecker(settings.model, info, settings.grammar_timeout)
        self._grammars = GrammarQueue(checker)
        self._told = set[str]()  # Ignored fields that the log has named.
        self._ignored_log = IgnoredLog()
        self.tenant_of, self.check_head = self._keys.tenant, self._keys.check_host
        self.cors_origins = settings.cors_origins
        self.max_requests = settings.max_num_seqs + 2 * settings.max_num_queued_reqs
        self.max_body_bytes = settings.max_body_size or default_body_size(info.max_model_len)
        self._names = settings.served_names or (info.model,)
        self._created = int(time.time())

    def close(self) -> None:
        """Stop the work on all requests; none of them is answered any more."""
        self._threads.close()
        self._grammars.close()
        if self._sweeping is not None:
            self._sweeping.cancel()

    def log_request(self, scope: Scope, status: int) -> None:
        """Write the line of a request that has ended to the logs that want it."""
        tenant = self._keys.name_of(scope["tenant"]) if "tenant" in scope else None
        write(scope, status, tenant, is_json=self._settings.access_log == "json")

    # Routes

    async def health(self, _request: Request) -> Response:
        """Report the state of the engine and of the disk tier, and what is wrong with them.

        A server whose disk tier has failed is still healthy: its requests only miss the cache.
        """
        engine, info, trouble = self._engine, self._engine.info, self._engine.trouble
        pids = {"engine": engine.pid, "worker": info.worker_pid}
        pids = {"server": os.getpid(), **(pids if engine.is_alive else dict.fromkeys(pids))}
        body: Json = {"status": "ok", "model": info.model, "pids": pids}
        if trouble:
            body |= {"status": "stuck" if engine.is_alive else "dead", "reason": trouble}
        if self._settings.disk_dir is not None:
            status, cause = disk_state(info, engine.stats, self._settings.drain_timeout)
            body["disk"] = {"status": status} | ({"cause": cause} if cause else {})
        return JSONResponse(body, 503 if trouble else 200)

    async def version(self, _request: Request) -> Response:
        """Return the version of tieredkv."""
        return JSONResponse({"version": __version__})

    async def models(self, request: Request) -> Response:
        """List the model of this server, once for each of its names."""
        self._keys.tenant(request.headers)
        models = [self._model_body(name) for name in self._names]
        return JSONResponse({"object": "list", "data": models, "has_more": False})

    async def model(self, request: Request) -> Response:
        """Describe a model by its name."""
        self._keys.tenant(request.headers)
        if (name := request.path_params["name"]) not in self._names:
            raise unknown_model(name, self._names)
        return JSONResponse(self._model_body(name))

    async def tokenizer_info(self, request: Request) -> Response:
        """Return the special tokens and the chat template.

        lm-eval calls this route before it calls `/tokenize`.
        """
        self._keys.tenant(request.headers)
        tokenizer = self._tokenization.tokenizer
        told = {"tokenizer_class": type(tokenizer).__name__, **tokenizer.special_tokens_map}
        return JSONResponse({**told, "chat_template": tokenizer.chat_template})

    async def metrics(self, request: Request) -> Response:
        """Return the metrics for Prometheus."""
        self._keys.check_metrics(request.headers)
        return Response(self._metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def admin(self, request: Request) -> Response:
        """Carry out a command of an operator."""
        self._keys.check_operator(request.headers)
        body = parse_body(await read_body(request) or b"{}")
        verb = request.path_params["verb"]
        work = respond(verb, body, self._settings, self._engine, self._evict)
        gone = asyncio.create_task(_wait_until_gone(request))
        try:
            return await _unless_gone(work, gone)  # its process ends with it
        finally:
            gone.cancel()

    async def response(self, request: Request) -> Response:
        """Return a stored response, or delete it."""
        tenant, id = self._keys.tenant(request.headers), request.path_params["id"]
        if request.method == "DELETE":
            self._responses.delete(tenant, id)
            return JSONResponse({"id": id, "object": "response", "deleted": True})
        if request.query_params.get("stream", "false") != "false":
            text = "'stream' is not supported. A stored response is returned as a whole."
            raise RequestError(text, param="stream", code="unsupported_parameter")
        stored = self._responses.get(tenant, id)
        return Response(stored.body, media_type=JSON)

    async def input_items(self, request: Request) -> Response:
        """Return a page of the items that a stored response answers, the latest first."""
        tenant, id = self._keys.tenant(request.headers), request.path_params["id"]
        page = read(Page, dict(request.query_params))

        def made() -> Json:
            return page.of(listed(self._responses.input_items(tenant, id), id))

        return JSONResponse(await asyncio.to_thread(made))

    async def cancel(self, request: Request) -> Response:
        """Refuse to cancel a stored response, because each was answered before it was stored."""
        self._responses.get(self._keys.tenant(request.headers), request.path_params["id"])
        raise RequestError("Cannot cancel a synchronous response.", param="response_id")

    def answers(self, kind: type[ApiRequest]) -> Endpoint:
        """Return the route for requests of one type.

        The route checks the whole body before it submits anything to the engine.
        """

        async def route(request: Request) -> Response:
            body = await read_body(request, MAX_PICTURES_BYTES)
            with contextlib.ExitStack() as ending:
                gone = asyncio.create_task(_wait_until_gone(request))
                ending.callback(gone.cancel)
                size = len(body)
                if size > self.max_body_bytes:
                    max_values = MAX_VALUES + self._engine.info.max_model_len
                    lighten = functools.partial(
                        _letting_go, without_pictures, body, max_values, self.max_body_bytes
                    )
                    body = await self._run(request, gone, size, lighten)
                    del lighten  # with it, the pictures go
                    request.scope["hold"](len(body) - size)
                    size = len(body)
                read = functools.partial(self._read, kind, request.scope, body)
                if issubclass(kind, ResponsesRequest):
                    # A short one may continue a long conversation.
                    size += self._responses.num_bytes(request.scope["tenant"])
                made = await self._run(request, gone, size, read)
                if isinstance(made, Response):
                    return made
                if made.num_earlier_bytes:
                    request.scope["hold"](made.num_earlier_bytes)
                return await self._answer(request, made, gone, ending)

        return route

    def _read(
        self, kind: type[ApiRequest], scope: Scope, content: bytes, cancellation: Cancellation
    ) -> "Response | Prepared":
        """Return what a body asks for, or the answer if no engine is needed for it.

        All work that grows with the body is done here: decoding, checks, rendering, encoding.
        """
        return _letting_go(self._read_whole, kind, scope, content, cancellation)

    def _read_whole(
        self, kind: type[ApiRequest], scope: Scope, content: bytes, cancellation: Cancellation
    ) -> "Response | Prepared":
        info, tenant = self._engine.info, scope["tenant"]
        parsed = parse_body(content, MAX_VALUES + info.max_model_len)
        if parsed.get("model") is None and not kind.model_fields["model"].is_required():
            parsed["model"] = info.model
        if (model := read(ApiRequest, parsed).model) not in self._names:
            raise unknown_model(model, self._names)
        rules = self._keys.rules(tenant)
        given_body = read(kind, parsed, rules.refuses)
        ignored = given_body.ignored[:MAX_TOLD]
        self._ignored_log.add(ignored)
        body = given_body.cleaned(rules)
        cancellation.check()
        num_earlier_bytes = 0
        if isinstance(body, ResponsesRequest):
            max_values = MAX_VALUES + info.max_model_len
            if ids := body.references:
                items = self._responses.items(tenant, ids)
                num_earlier_bytes = sum(len(items[id]) for id in ids)
                what = "The request body with the items that 'input' refers to"
                check_size(len(content) + num_earlier_bytes, self.max_body_bytes, what)
                body = body.resolved(items, max_values)
                cancellation.check()
            if body.previous_response_id is not None:
                field = "previous_response_id"
                before = self._responses.get(tenant, body.previous_response_id, field=field).turn
                num_earlier_bytes += before.num_bytes
                what = f"The request body with the conversation that '{field}' continues"
                check_size(len(content) + num_earlier_bytes, self.max_body_bytes, what)
                body = body.continuing(before, max_values)
                cancellation.check()
        body.check(rules)
        given = {name for name, value in parsed.items() if value is not None}
        for name in (given & kind.without_effect) - self._told:
            logger.info("the field `%s` of %s has no effect on this server", name, scope["path"])
            self._told.add(name)
        # Requests that cannot share blocks must not share encoded pieces or answers, either.
        salt, key = (getattr(body, name, None) for name in ("cache_salt", "prompt_cache_key"))
        memory = self._memory((tenant, salt, key))
        tokenization = self._tokenization.of((tenant, salt, key), cancellation, memory)
        if isinstance(body, PlainRequest):
            told = body.tell(tokenization, info)
            told |= {"tieredkv": {"ignored": ignored}} if ignored else {}
            return Response(msgspec.json.encode(told), media_type=JSON)
        try:
            asked = body.ask(tokenization, rules)
            requests = asked.engine_requests(info, tenant, rules)
        except PromptTooLongError as error:
            if (shape := body.refused_stream) is None:
                raise
            shape.ignored = ignored
            return event_stream.failed_stream(shape, error)
        asked.shape.ignored = ignored
        return Prepared(asked, requests, num_earlier_bytes)

    async def _plan(self, call: Inspect) -> EngineRequest:
        """Return the request that a prompt is, which an operator inspects."""

        def tokenization_of(namespace: Namespace, cancellation: Cancellation) -> Tokenization:
            return self._tokenization.of(namespace, cancellation, self._memory(namespace))

        plan = functools.partial(planned, call, tokenization_of, self._engine.info, self._keys)
        return await self._threads.run(call.tenant, plan)

    def _memory(self, namespace: Namespace) -> Memory | None:
        """Return the remembered answers of a namespace; None if none are kept."""
        if not self._settings.remembered_answers_size:
            return None
        tenant, salt, key = namespace
        plan = EngineRequest(
            params=SamplingParams(), tenant=tenant, cache_salt=salt, prompt_cache_key=key
        )
        digest = namespace_of(plan, self._settings)
        return Memory(self._remembered, namespace, digest, self._keys.knows)

    def _forget_unknown_tenants(self) -> None:
        for store in (self._responses, self._remembered, self.history):
            store.keep_tenants(self._keys.knows)

    def _evict(self, wanted: EvictFilter) -> Json:
        """Drop what is kept of requests beside their blocks, and return how much, by its name."""
        return {
            "evicted_responses": self._responses.evict(wanted),
            "evicted_answers": self._remembered.evict(wanted),
        }

    def _store(self, tenant: str, namespace: bytes, asked: Turn, response: Json) -> None:
        """Store a response with its conversation, unless its key was removed meanwhile."""
        if self._keys.knows(tenant):
            turn, body = asked.answered(joined(response["output"])), msgspec.json.encode(response)
            self._responses.add(tenant, response["id"], StoredResponse(body, turn, namespace))
            if self._sweeping is None:
                self._sweep()

    def _sweep(self) -> None:
        """Drop responses whose time is over, again and again as long as there are any."""
        self._responses.expire()
        self._sweeping = None
        if self._responses.figures.entries:
            loop, pause_s = asyncio.get_running_loop(), self._settings.sweep_interval
            self._sweeping = loop.call_later(pause_s, self._sweep)

    async def _run(
        self,
        request: Request,
        gone: "asyncio.Task[None]",
        size: int,
        work: Callable[[Cancellation], Result],
    ) -> Result:
        """Do the work on a request of this size.

        The work on a long request is done in a thread and stops when the client has gone.

        Raises:
            ClientGoneError: the client had gone before the work was done.
        """
        if size < SHORT_BYTES:
            return work(Cancellation())
        return await _unless_gone(self._threads.run(request.scope["tenant"], work), gone)

    async def _answer(
        self,
        request: Request,
        prepared: "Prepared",
        gone: "asyncio.Task[None]",
        ending: contextlib.ExitStack,
    ) -> Response:
        """Return the answer of the engine, whole or as a stream.

        A refusal that comes before the headers of a stream is answered with its own status. A later
        one becomes the last event of the stream.
        """
        asked, scope = prepared.asked, request.scope
        asked.shape.request_id = scope["request_id"]
        starting = asyncio.ensure_future(
            self._start(request, prepared, gone, ending.enter_context(contextlib.ExitStack()))
        )
        starting.add_done_callback(lambda task: task.cancelled() or task.exception())
        ending.callback(starting.cancel)
        await event_stream.has_begun(starting, event_stream.PING_S if asked.stream else None)
        scope["is_answered"] = True
        if asked.stream:
            return event_stream.EventStream(starting, asked.shape, on_end=ending.pop_all().close)
        generation = starting.result()
        async for _ in generation.pieces():
            pass
        return JSONResponse(asked.shape.whole(generation.answers))

    async def _start(
        self,
        request: Request,
        prepared: "Prepared",
        gone: "asyncio.Task[None]",
        ending: contextlib.ExitStack,
    ) -> Generation:
        """Have the engine begin with an answer, once its grammar is known to be usable.

        Raises:
            RequestError: the grammar cannot be used.
            ClientGoneError: the client had gone before that was known.
        """
        asked, tenant, scope = prepared.asked, request.scope["tenant"], request.scope
        if (grammar := asked.plan.grammar) is not None:
            checking = self._grammars.check(tenant, grammar, scope["request_id"])
            await _unless_gone(checking, gone)
        shape = asked.shape
        if asked.turn is not None:
            namespace = namespace_of(replace(asked.plan, tenant=tenant), self._settings)
            shape.keep = functools.partial(self._store, tenant, namespace, asked.turn)
        observer = Observer(
            self._metrics, tenant, asked.labels, scope["arrived_at"], self._recorder
        )
        tokenizer = self._tokenization.tokenizer
        generation = Generation(
            self._engine,
            tokenizer,
            prepared.requests,
            observer,
            asked.reading,
            continues_text=asked.continues_text,
        )
        scope["answering"] = Answering(generation.answers, asked.n, observer)
        ending.callback(generation.close)
        gone.add_done_callback(lambda task: None if task.cancelled() else generation.cancel())
        # The engine already works on the requests while the digests are made.
        size, isolate_by = sum(map(len, asked.prompts)), self._settings.isolate_by
        seen = await self._run(request, gone, size, lambda _cancellation: asked.seen(isolate_by))
        diagnosis = self._diagnoses.add(tenant, shape.id, seen, asked.compared_id)
        shape.diagnosis = observer.diagnosis = diagnosis
        return generation

    def _model_body(self, name: str) -> dict[str, Any]:
        """Return the description of the model by one of its names.

        OpenAI's and Anthropic's clients use the same path, so it has the fields of both.
        """
        info, date = self._engine.info, time.strftime("%FT%TZ", time.gmtime(self._created))
        model = {"id": name, "object": "model", "created": self._created, "created_at": date}
        model |= {"type": "model", "display_name": name, "lifecycle": "active"}
        model |= {"owned_by": "tieredkv", "max_model_len": info.max_model_len}
        family = self._tokenization.family
        return {**model, "tool_parser": family.name if family and family.call else None}


def build_app(api: Api) -> ASGIApp:
    """Return the application with its routes and error handlers."""
    app = Starlette(
        routes=[
            *(Route(path, api.answers(kind), methods=["POST"]) for path, kind in ANSWERED.items()),
            Route("/", api.version),  # GET and HEAD, with which agents look for a server
            Route("/health", api.health),
            Route("/metrics", api.metrics),
            Route("/openapi.json", lambda _: Response(description(), media_type=JSON)),
            Route("/v1/responses/{id}", api.response, methods=["GET", "DELETE"]),
            Route("/v1/responses/{id}/input_items", api.input_items),
            Route("/v1/responses/{id}/cancel", api.cancel, methods=["POST"]),
            Route("/v1/models", api.models),
            Route("/v1/models/{name:path}", api.model),
            Route("/tokenizer_info", api.tokenizer_info),
            Route("/version", api.version),
            Route("/admin/cache/{verb}", api.admin, methods=["POST"]),
            *api.page.routes,
        ],
        exception_handlers=dict.fromkeys((RequestError, HTTPException, *GONE, Exception), refuse),
    )
    app.router.redirect_slashes = False  # The target of a redirect would come from the Host header.
    limited = Limits(
        app,
        api.max_requests,
        refuse,
        api.tenant_of,
        api.check_head,
        api.max_body_bytes,
        api.log_request,
    )
    if not api.cors_origins:
        return limited
    crossed = CORSMiddleware(
        limited,
        allow_origins=[origin.lower() for origin in api.cors_origins],
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        allow_private_network=True,
        expose_headers=[*ID_HEADERS, "retry-after"],
    )

    async def split(scope: Scope, receive: Receive, send: Send) -> None:
        is_api = scope["path"].startswith("/v1/") or scope["path"] in CROSS_ORIGIN_PATHS
        await (crossed if is_api else limited)(scope, receive, send)

    return split


def _letting_go(work: Callable[..., Result], *given: Any) -> Result:
    """Return what `work` returns for these arguments.

    A refusal keeps no reference to a decoded body, so that the body is freed in this thread.
    """
    try:
        return work(*given)
    except RequestError as error:
        refusal = error
    refusal.__cause__ = refusal.__context__ = None
    raise refusal.with_traceback(None)


async def _unless_gone(work: Awaitable[Result], gone: "asyncio.Task[None]") -> Result:
    """Return the result of some work, which is cancelled if the client goes meanwhile.

    Raises:
        ClientGoneError: the client had gone before the work was done.
    """
    running = asyncio.ensure_future(work)
    try:
        await asyncio.wait((running, gone), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise ClientGoneError
        return await running
    except CancelledWorkError:
        raise ClientGoneError from None
    finally:
        running.cancel()


async def _wait_until_gone(request: Request) -> None:
    """Return once the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
