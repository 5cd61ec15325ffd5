"""ASGI middleware for vLLM, so that clients choose retention by the fields that they know.

    vllm serve MODEL … --middleware tieredkv.integrations.vllm_middleware.RetentionMiddleware

It maps OpenAI's `prompt_cache_retention`, Anthropic's `cache_control` and the tenant of the API key
to what the tier understands, and salts each tenant's prompts so that tenants share no blocks in
vLLM's memory either. `vllm_bodies` has the mapping, `vllm_app` reads what the server is.

vLLM gives a middleware no arguments: the tier's arguments are read from vLLM's own, and tieredkv's
settings from the environment (`TIEREDKV_API_KEYS_FILE`, `TIEREDKV_ISOLATE_BY` and others).

Answers pass through untouched. Of requests, only bodies of endpoints that take these fields are
read, and only after vLLM's own check of API keys.
"""

import hashlib
import logging
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tieredkv.errors import ConfigError, RequestError
from tieredkv.integrations.vllm_app import endpoints_of, guard_of, settings_of
from tieredkv.integrations.vllm_bodies import SALT, Endpoint, Rewriter, Tenant
from tieredkv.integrations.vllm_logging import join_log
from tieredkv.server.anthropic_answers import anthropic_body
from tieredkv.server.keys import Keys, presented_key
from tieredkv.server.limits import check_size

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 256 << 20
"""How long a body may be where `max_body_size` does not say so; pictures are long."""


@dataclass(frozen=True)
class _Plan:
    """How the requests of one server are treated.

    Attributes:
        app: what gets a request whose body is to be rewritten: vLLM's check of keys, then this
            middleware's own work.
        endpoints: by path.
        keys: tieredkv's own keys, if there are any.
        rewriter: maps the fields.
        max_body_bytes: the bound on a body.
        has_one_tenant: whether there is one key only, so that nobody else's blocks can be shared.
    """

    app: ASGIApp
    endpoints: dict[str, Endpoint]
    keys: Keys
    rewriter: Rewriter
    max_body_bytes: int
    has_one_tenant: bool

    def tenant(self, headers: Headers) -> tuple[str, Tenant]:
        """Return the digest of the request's key, and the tenant.

        Raises:
            RequestError: tieredkv has keys and the request has none of them.
        """
        key = presented_key(headers)
        digest = self.keys.tenant(headers) or (hashlib.sha256(key).hexdigest() if key else "")
        is_apart = self.rewriter.settings.isolate_by != "none"
        return digest, Tenant(digest, key) if is_apart else Tenant("", b"")


class RetentionMiddleware:
    """Maps what clients of a vLLM server ask for to what the tier understands.

    In front of another server it says so once in the log and changes nothing.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._plan: _Plan | None = None
        self._is_planned = False
        self._problem: ConfigError | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, rewritten if it is one for an answer of the model."""
        if not self._is_planned:
            self._prepare(scope)
        if scope["type"] == "lifespan" and self._problem is not None:
            await receive()
            await send({"type": "lifespan.startup.failed", "message": str(self._problem)})
            return
        plan = self._plan
        if scope["type"] == "http" and self._problem is not None:  # no startup was asked for
            raise self._problem
        if plan is None or scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
        elif _path(scope) in plan.endpoints:
            await plan.app(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _prepare(self, scope: Scope) -> None:
        """Find out what the server is, with its first message."""
        self._is_planned = True
        join_log()
        app = scope.get("app")
        try:
            if (endpoints := endpoints_of(app)) is None:
                logger.error(
                    "%s is in front of a server that is not vLLM (`%s`), so it changes nothing: "
                    "take it out of that server's middleware",
                    type(self).__name__,
                    type(app).__module__ if app is not None else "unknown",
                )
                return
            settings, has_tier = settings_of(app)
            keys, guard = Keys(settings=settings, is_strict=False, is_local=True), guard_of(app)
        except ConfigError as error:
            text = f"{type(self).__name__} cannot work as configured: {error}"
            self._problem = ConfigError(text)
            return
        num_keys = keys.num_keys or (guard.num_keys if guard else 0)
        self._plan = _Plan(
            app=guard.before(self._rewrite) if guard else self._rewrite,
            endpoints=endpoints,
            keys=keys,
            rewriter=Rewriter(settings, has_tier),
            max_body_bytes=settings.max_body_size or MAX_BODY_BYTES,
            has_one_tenant=num_keys == 1 or settings.isolate_by == "none",
        )
        if not has_tier:
            logger.warning("vLLM has no tier of tieredkv: requests are salted, but nothing else")

    async def _rewrite(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request whose key vLLM accepts."""
        assert self._plan is not None, "there is a plan for each request that comes here"
        plan, endpoint = self._plan, self._plan.endpoints[_path(scope)]
        headers = Headers(scope=scope)
        try:
            digest, tenant = plan.tenant(headers)
            if SALT not in endpoint.fields and tenant.name and not plan.has_one_tenant:
                raise _unsalted(_path(scope))
            messages = await _read(headers, receive, plan.max_body_bytes)
            if messages[-1]["type"] == "http.request":
                content = b"".join(each.get("body", b"") for each in messages)
                rules = plan.keys.rules(digest)
                rewritten = plan.rewriter.rewrite(content, endpoint, tenant, rules)
                scope = _with_length(scope, len(rewritten))
                messages = [{"type": "http.request", "body": rewritten, "more_body": False}]
        except RequestError as error:
            await _refusal(error, endpoint)(scope, receive, send)
            return
        waiting = iter(messages)

        async def replay() -> Message:
            return next(waiting, None) or await receive()

        await self._app(scope, replay, send)


async def _read(headers: Headers, receive: Receive, most: int) -> list[Message]:
    """Return the messages up to the end of the body, or to the client's leaving.

    Raises:
        RequestError: the body is longer than it may be.
    """
    if (told := headers.get("content-length", "")).isdecimal():
        check_size(int(told), most)
    messages, size = list[Message](), 0
    while True:
        messages.append(message := await receive())
        size += len(message.get("body", b""))
        check_size(size, most)
        if message["type"] != "http.request" or not message.get("more_body", False):
            return messages


def _with_length(scope: Scope, size: int) -> Scope:
    """Return a scope whose headers tell the length of the body that vLLM gets."""
    changed = dict(scope, headers=[*scope["headers"]])
    headers = MutableHeaders(scope=changed)
    del headers["transfer-encoding"]
    headers["content-length"] = str(size)
    return changed


def _path(scope: Scope) -> str:
    """Return the path that routes are matched with."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    is_below = root and path.startswith(root) and path[len(root) :][:1] in ("", "/")
    return path[len(root) :] if is_below else path


def _unsalted(path: str) -> RequestError:
    text = (
        f"This version of vLLM takes no `{SALT}` on {path}, so that the blocks of several API keys "
        "cannot be kept apart there. Use /v1/chat/completions, or have the operator upgrade vLLM, "
        "or set TIEREDKV_ISOLATE_BY=none if all keys may share blocks."
    )
    return RequestError(text, code="unsupported_endpoint")


def _refusal(error: RequestError, endpoint: Endpoint) -> JSONResponse:
    """Return an error in the form that vLLM has on this endpoint."""
    if endpoint.is_anthropic:
        body: dict[str, Any] = anthropic_body(error, None)
        del body["request_id"]
        return JSONResponse(body, error.status)
    kind = "BadRequestError" if error.status == 400 else HTTPStatus(error.status).phrase
    told = {"message": str(error), "type": kind, "param": error.param, "code": error.status}
    return JSONResponse({"error": told}, error.status)
