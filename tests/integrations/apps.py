"""vLLM's HTTP application with our middleware: the real one where vLLM is, else a stand-in.

No model is behind it: what a handler gets is noted, and the answer is a short stream.
"""

import functools
import importlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from tests.integrations.engines import HAS_VLLM, RealEngine
from tieredkv.integrations.vllm_middleware import RetentionMiddleware

NAME = f"{RetentionMiddleware.__module__}.{RetentionMiddleware.__name__}"
TIER = {"type": "TieredKVTier", "disk_dir": "/nvme/kv"}
CHUNKS = ("data: 1\n\n", "data: 2\n\n")


@dataclass
class Served:
    """An application, and what its handlers got.

    Attributes:
        requests: the checked bodies.
        raw: path, headers and body of each request, where the application is the stand-in.
    """

    app: Any
    requests: list[Any] = field(default_factory=list)
    raw: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)

    @property
    def only(self) -> Any:
        (request,) = self.requests
        return request


def connectors(tier: dict[str, Any] | None) -> dict[str, Any]:
    """Return `--kv-transfer-config`, with our tier below another connector."""
    inner: dict[str, Any] = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    tiers = {"type": "fs"}, *([tier] if tier else [])
    inner["kv_connector_extra_config"] = {"secondary_tiers": tiers}
    outer = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    return {**outer, "kv_connector_extra_config": {"connectors": [inner]}}


class Options(BaseModel):
    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: Literal["30m"] = "30m"


class ChatBody(BaseModel):
    model_config = ConfigDict(extra="allow")
    model: str
    messages: list[Any] | None = None
    prompt: Any = None
    input: Any = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    prompt_cache_options: Options | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None


class MessagesBody(BaseModel):
    model: str
    messages: list[Any]
    max_tokens: int
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None


class OlderMessagesBody(BaseModel):
    """The body of vLLM 0.26, which has no salt."""

    model: str
    messages: list[Any]
    max_tokens: int
    kv_transfer_params: dict[str, Any] | None = None


class AuthenticationMiddleware:
    """vLLM's check of keys, as far as the middleware sees it."""

    def __init__(self, app: Any, tokens: Sequence[str]) -> None:
        self._app, self._tokens = app, tokens

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        token = Request(scope).headers.get("authorization", "").removeprefix("Bearer ")
        app = self._app
        if (
            scope["type"] == "http"
            and scope["path"].startswith("/v1")
            and token not in self._tokens
        ):
            app = JSONResponse({"error": "Unauthorized"}, 401)
        await app(scope, receive, send)


AuthenticationMiddleware.__module__ = "vllm.standin"


def stand_in(
    tier: dict[str, Any] | None = TIER, keys: Sequence[str] = (), *, is_older: bool = False
) -> Served:
    """Return an application like vLLM's."""
    served = Served(None)

    def route(path: str, kind: type[BaseModel]) -> Route:
        async def handle(request: BaseModel, raw_request: Request) -> Any:
            served.requests.append(request)
            return StreamingResponse(_chunks(), media_type="text/event-stream")

        handle.__annotations__["request"] = kind
        handle.__module__ = "vllm.entrypoints.standin"

        @functools.wraps(handle)
        async def endpoint(raw_request: Request) -> Any:
            body = await raw_request.body()
            served.raw.append((path, dict(raw_request.headers), body))
            try:
                request = kind.model_validate(json.loads(body))
            except ValueError as error:
                return JSONResponse({"error": {"message": str(error), "code": 400}}, 400)
            return await handle(request, raw_request)

        if path == "/invocations":
            endpoint.__module__ = "sagemaker.standin"
            del endpoint.__wrapped__
        return Route(path, endpoint, methods=["POST"])

    messages = OlderMessagesBody if is_older else MessagesBody
    paths = ("chat/completions", "completions", "responses", "chat/completions/render")
    routes = [route(f"/v1/{path}", ChatBody) for path in paths]
    routes += [route("/v1/messages", messages), route("/invocations", ChatBody)]
    middleware = [Middleware(RetentionMiddleware)]
    if keys:
        middleware.append(Middleware(AuthenticationMiddleware, tokens=keys))
    served.app = Starlette(routes=routes, middleware=middleware)
    config = SimpleNamespace(kv_connector_extra_config=connectors(tier))
    served.app.state.args = SimpleNamespace(kv_transfer_config=config)
    return served


async def _chunks() -> AsyncIterator[str]:
    for chunk in CHUNKS:
        yield chunk


def real(tier: dict[str, Any] | None = TIER, keys: Sequence[str] = ()) -> Served:
    """Return vLLM's own application, as `vllm serve --middleware` makes it."""
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    vllm.platforms._current_platform = CpuPlatform()
    older = RealEngine.is_older
    launch = "vllm.entrypoints.openai.api_server" if older else "vllm.entrypoints.launchers.app"
    parser = f"vllm.entrypoints.{'openai' if older else 'common'}.cli_args"
    made = importlib.import_module(parser).make_arg_parser(FlexibleArgumentParser())
    config = json.dumps(connectors(tier))
    told = ["--model", "m", "--middleware", NAME, "--kv-transfer-config", config]
    arguments = made.parse_args([*told, *(["--api-key", *keys] if keys else [])])
    served = Served(importlib.import_module(launch).build_app(arguments, ("generate",)))

    async def handle(request: Any, raw_request: Any) -> AsyncIterator[str]:
        served.requests.append(request)
        return _nothing() if "Responses" in type(request).__name__ else _chunks()

    names = ("create_chat_completion", "create_completion", "create_responses", "create_messages")
    handler = SimpleNamespace(**dict.fromkeys(names, handle))
    for name in ("chat", "completion", "responses"):
        setattr(served.app.state, f"openai_serving_{name}", handler)
    served.app.state.anthropic_serving_messages = handler
    served.app.state.log_stats = False
    return served


async def _nothing() -> AsyncIterator[str]:
    return
    yield


def make(tier: dict[str, Any] | None = TIER, keys: Sequence[str] = ()) -> Served:
    """Return vLLM's own application where vLLM is, else the stand-in."""
    return real(tier, keys) if HAS_VLLM else stand_in(tier, keys)
