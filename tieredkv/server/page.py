"""The page at `/ui` for operators, and the history of the last hours that it shows.

The page is three static files, which hold no figures and need no key. It asks the operator for the
admin key and sends it in a header with each question to `/admin`: here and for the verbs `df`, `ls`
and `evict`. It uses nothing of other servers, and no other page may show it in a frame.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tieredkv.config import Settings
from tieredkv.errors import ConfigError, RequestError
from tieredkv.hashing import tenant_digest
from tieredkv.server.asked import Json
from tieredkv.server.engine_client import EngineClient
from tieredkv.server.history import History, TenantUse
from tieredkv.server.keys import Keys
from tieredkv.units import parse_duration

MAX_TENANTS = 1000

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_FILES = {path.name: path.read_bytes() for path in Path(__file__).with_name("ui").iterdir()}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""Sent with each file of the page."""


@dataclass
class OperatorPage:
    """The routes of the page."""

    _settings: Settings
    _keys: Keys
    _engine: EngineClient
    _history: History

    @property
    def routes(self) -> list[Route]:
        """The page's files, and the history."""
        return [
            Route("/ui", self.file),
            Route("/ui/{name}", self.file),
            Route("/admin/history", self.history),
        ]

    async def file(self, request: Request) -> Response:
        """Return a file of the page."""
        name = request.path_params.get("name", "index.html")
        if name not in _FILES:
            raise HTTPException(404)
        media_type = f"{_TYPES[Path(name).suffix]}; charset=utf-8"
        return Response(_FILES[name], headers={**HEADERS, "Content-Type": media_type})

    async def history(self, request: Request) -> Response:
        """Return the last hours, or the time in `last`, and what each tenant asked for.

        Raises:
            RequestError: no admin key came with the request, or `last` is no duration.
        """
        self._keys.check_operator(request.headers)
        last = request.query_params.get("last")
        try:
            last_s = None if last is None else parse_duration(last)
        except ConfigError as error:
            raise RequestError(f"`last`: {error}", param="last") from None
        told = {"model": self._engine.info.model, "tenants": self._tenants()}
        body = {**self._history.document(last_s), **told}
        for each in body["slowest"]:
            each["tenant"] = self._keys.name_of(each["tenant"])
        return JSONResponse(body, headers={"Cache-Control": "no-store"})

    def _tenants(self) -> list[Json]:
        """Return the tenants with a share and those who asked for anything, the largest first."""
        keys, uses, algo = self._keys, self._history.tenants, self._settings.hash_algo
        shown = sorted(
            {*uses, *keys.shares},
            key=lambda tenant: -uses[tenant].prompt_tokens if tenant in uses else 0,
        )
        return [
            {
                "name": keys.name_of(tenant),
                "id": tenant_digest(tenant, algo=algo).hex(),
                "share": keys.shares.get(tenant, 0.0),
                **msgspec.to_builtins(uses.get(tenant, TenantUse())),
            }
            for tenant in shown[:MAX_TENANTS]
        ]
