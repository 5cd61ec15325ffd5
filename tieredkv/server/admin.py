"""The commands `df`, `ls`, `evict` and `verify` over HTTP, for operators.

The answers are the JSON that the command line prints; that of `evict` also tells how many stored
responses and remembered answers were dropped. The caller must have checked the admin key.
"""

import asyncio
from collections.abc import Callable
from itertools import chain

import msgspec
from starlette.responses import JSONResponse, Response, StreamingResponse

from tieredkv.config import Settings
from tieredkv.errors import RequestError, TieredKVError
from tieredkv.server.asked import Json
from tieredkv.server.engine_client import EngineClient
from tieredkv.storage.control import StoreControl, chains_document
from tieredkv.storage.results import EvictFilter

Forget = Callable[[EvictFilter], Json]
"""Drops what else is kept of requests, and returns how much of each kind."""


class WantedBlocks(EvictFilter, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The filter of `evict`; unknown fields are refused, as they may be meant to spare blocks."""


async def respond(
    verb: str, body: Json, settings: Settings, engine: EngineClient, forget: Forget
) -> Response:
    """Return the HTTP response to a verb.

    The list of chains is streamed, because as a whole it could fill the memory.

    Raises:
        RequestError: as `carry_out` does.
    """
    if verb != "ls" or settings.disk_dir is None:
        return JSONResponse(await carry_out(verb, body, settings, engine, forget))
    limit = body.get("limit")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise RequestError("`limit` must be a whole number of at least 1.", param="limit")
    store = StoreControl(settings.disk_dir, clock_offset_file=settings.clock_offset_file)
    pages = store.ls(limit)
    try:
        first = await asyncio.to_thread(next, pages, None)
    except TieredKVError as error:
        raise RequestError(str(error), code="store", status=503) from None
    parts = chains_document(chain([first] if first else [], pages))
    return StreamingResponse(parts, media_type="application/json")


async def carry_out(
    verb: str, body: Json, settings: Settings, engine: EngineClient, forget: Forget
) -> Json:
    """Carry out a verb and return its result.

    An eviction first drops what else is kept, so that it is gone even if the tiers do not answer.

    Raises:
        RequestError: the verb or a field is unknown, or the store cannot be asked.
    """
    if verb not in ("df", "ls", "evict", "verify"):
        text = f"There is no verb `{verb}`; the verbs are df, ls, evict and verify."
        raise RequestError(text, code="unknown_url", status=404)
    if settings.disk_dir is None:
        if verb == "df":
            return {**engine.stats, "writer_pid": None}
        if verb == "evict":
            evicted = forget(wanted := _wanted_blocks(body))
            return {**await engine.evict(wanted), **evicted}
        text = f"`{verb}` needs the disk tier, and there is none, since `disk_dir` is not set."
        hint = "`df` shows what VRAM and host memory hold, and `evict` empties them."
        raise RequestError(f"{text} {hint}", code="no_disk_tier", status=409)
    store = StoreControl(settings.disk_dir, clock_offset_file=settings.clock_offset_file)
    try:
        if verb == "evict":
            evicted = forget(wanted := _wanted_blocks(body))
            return {**await asyncio.to_thread(store.evict, wanted), **evicted}
        how = {"repair": body.get("repair") is not False} if verb == "verify" else {}
        return await asyncio.to_thread(getattr(store, verb), **how)
    except RequestError:
        raise
    except TieredKVError as error:
        status = 400 if isinstance(error, ValueError) else 503
        raise RequestError(str(error), code="store", status=status) from None


def _wanted_blocks(body: Json) -> EvictFilter:
    """Return the filter of blocks that a body asks to evict.

    Raises:
        RequestError: a field is unknown or wrong, or nothing says which blocks.
    """
    try:
        wanted = msgspec.convert(body, WantedBlocks)
    except msgspec.ValidationError as error:
        raise RequestError(str(error), code="store") from None
    if wanted == WantedBlocks(dry_run=wanted.dry_run):
        text = "Say which blocks to evict: `ids`, `namespace_prefix`, `older_than_s` or `all`."
        raise RequestError(text, code="store")
    return wanted
