"""The verbs of the command line over HTTP, for operators.

The answers are the JSON that the command line prints; that of `evict` also tells how many stored
responses and remembered answers were dropped. The caller must have checked the admin key.
"""

from collections.abc import Callable
from functools import partial

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
from tieredkv.operate.ask import StoreControl
from tieredkv.operate.calls import VERBS, Call, EvictFilter, Ls
from tieredkv.operate.evict import Chosen
from tieredkv.operate.jobs import Job
from tieredkv.server.asked import Json
from tieredkv.server.engine_client import EngineClient
from tieredkv.server.verb_process import VerbProcess, on_thread

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
    try:
        if settings.disk_dir is None:
            return await _respond_without_disk(call, engine, forgotten)
        clock = settings.clock_offset_file
        if call.is_quick:
            control = StoreControl(settings.disk_dir, clock_offset_file=clock)
            return JSONResponse(await on_thread(partial(control.answer, call)))
        job = Job(call=call, path=settings.disk_dir, clock_offset_file=clock)
        return await _carried_out(job, forgotten)
    except TieredKVError as error:
        raise error if isinstance(error, RequestError) else _refused(error) from None


async def _respond_without_disk(call: Call, engine: EngineClient, forgotten: Json) -> Response:
    if call.listed_as:
        return await _carried_out(Job(call=call, told=await engine.operate(Ls())), forgotten)
    unknown_ids = list[str]()
    if isinstance(call, EvictFilter) and call.is_of_chains:
        verb = await VerbProcess.start(Job(call=call, told=await engine.operate(Ls())))
        chosen = msgspec.convert(await verb.answer(), Chosen)
        starts, unknown_ids = tuple(chosen.starts), chosen.unknown_ids
        call = replace(call, ids=(), filter="", model="", starts=starts)
    *_, answer = await engine.operate(call)
    if "refused" in answer:
        raise ConfigError(answer["refused"])
    told = {"unknown_ids": unknown_ids} if unknown_ids else {}
    return JSONResponse({**answer, **told, **forgotten})


async def _carried_out(job: Job, more: Json) -> Response:
    """Have a verb carried out, and return its answer; `more` is added where that is no list."""
    verb = await VerbProcess.start(job)
    if not job.call.listed_as:
        return JSONResponse({**await verb.answer(), **more})
    return StreamingResponse(verb.text(), media_type="application/json")


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
