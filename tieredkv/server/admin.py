"""The verbs of the command line over HTTP, for operators.

The answers are the JSON that the command line prints; that of `evict` also tells how many stored
responses and remembered answers were dropped. The caller must have checked the admin key.
"""

from collections.abc import Callable

import msgspec
from msgspec.structs import replace
from starlette.responses import JSONResponse, Response, StreamingResponse

from tieredkv.config import Settings
from tieredkv.errors import (
    ConfigError,
    RequestError,
    StoreUnreachableError,
    TieredKVError,
    UnknownIdError,
)
from tieredkv.operate.calls import VERBS, Call, EvictFilter, Inspect, Ls
from tieredkv.operate.infos import NOTHING_EVICTED
from tieredkv.operate.jobs import Job
from tieredkv.server.asked import Json
from tieredkv.server.engine_client import EngineClient
from tieredkv.server.verb_process import VerbProcess

_VERBS = {name: kind for name, kind in VERBS.items() if not kind.is_local}
Forget = Callable[[EvictFilter], Json]
"""Drops what else is kept of requests, and returns how much of each kind."""


async def respond(
    verb: str, body: Json, settings: Settings, engine: EngineClient, forget: Forget
) -> Response:
    """Return the HTTP response to a verb.

    A list is streamed, because as a whole it could fill the memory.

    Raises:
        RequestError: the verb or a field is unknown, or the store cannot be asked.
    """
    call = _read(verb, body)
    if settings.disk_dir is None and call.needs_disk:
        text = f"`{verb}` needs the disk tier, and there is none, since `disk_dir` is not set."
        rest = ", ".join(f"`{name}`" for name, kind in _VERBS.items() if not kind().needs_disk)
        text = f"{text} These verbs do without: {rest}."
        raise RequestError(text, code="no_disk_tier", status=409)
    # First of all, so that it is gone even if the tiers do not answer.
    forgotten = forget(call) if isinstance(call, EvictFilter) else {}
    if settings.disk_dir is None:
        return await _respond_without_disk(call, engine, forgotten)
    job = Job(call=call, path=settings.disk_dir, clock_offset_file=settings.clock_offset_file)
    return await _carried_out(job, forgotten)


async def _respond_without_disk(call: Call, engine: EngineClient, forgotten: Json) -> Response:
    if call.listed_as:
        told = await engine.operate(call)
        has_blocks = any(part.get("blocks") for part in told)
        if isinstance(call, Inspect) and call.id and not (call.following or has_blocks):
            told = await engine.operate(replace(call, following=True))
        return await _carried_out(Job(call=call, told=told))
    if isinstance(call, EvictFilter) and call.needs_list:
        ids = await _ids_of(call, await engine.operate(Ls()))
        if not ids:
            return JSONResponse({**NOTHING_EVICTED, **forgotten})
        call = replace(call, filter="", model="", ids=ids)
    *_, answer = await engine.operate(call)
    if "refused" in answer:
        raise _refused(ConfigError(answer["refused"]))
    return JSONResponse({**answer, **forgotten})


async def _carried_out(job: Job, more: Json | None = None) -> Response:
    """Have a verb carried out, and return its answer; `more` is added where that is no list."""
    try:
        verb = await VerbProcess.start(job)
        if not job.call.listed_as:
            return JSONResponse({**await verb.answer(), **(more or {})})
    except TieredKVError as error:
        raise _refused(error) from None
    return StreamingResponse(verb.text(), media_type="application/json")


async def _ids_of(call: EvictFilter, told: list[Json]) -> tuple[str, ...]:
    """Return the ids of the chains in VRAM and host memory that an eviction is about."""
    try:
        verb = await VerbProcess.start(Job(call=call, told=told))
        return tuple((await verb.answer())["ids"])
    except TieredKVError as error:
        raise _refused(error) from None


def _read(verb: str, body: Json) -> Call:
    """Return the call that a body asks for.

    Raises:
        RequestError: the verb is unknown, a field is unknown or wrong, or nothing says which blocks
            to evict.
    """
    if (kind := _VERBS.get(verb)) is None:
        *some, last = _VERBS
        text = f"There is no verb `{verb}`; the verbs are {', '.join(some)} and {last}."
        raise RequestError(text, code="unknown_url", status=404)
    try:
        call: Call = msgspec.convert(body, kind)
        call.check()
    except (msgspec.ValidationError, ConfigError) as error:
        raise _refused(error) from None
    return call


def _refused(error: Exception) -> RequestError:
    """Return what an error of a verb is to a client."""
    if isinstance(error, UnknownIdError):
        return RequestError(str(error), code="unknown_id", status=404)
    if isinstance(error, StoreUnreachableError):
        return RequestError(str(error), code="store_unreachable", status=503)
    status = 400 if isinstance(error, ValueError) else 503
    return RequestError(str(error), code="store", status=status)
