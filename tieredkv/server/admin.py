"""The verbs of the command line over HTTP, for operators.

It knows verbs and the JSON that the command line prints; the caller has checked the admin key.
"""

import asyncio

import msgspec

from tieredkv.config import Settings
from tieredkv.errors import RequestError, TieredKVError
from tieredkv.server.asked import Json
from tieredkv.server.engine_client import EngineClient
from tieredkv.storage.control import StoreControl
from tieredkv.storage.results import EvictFilter


class WantedBlocks(EvictFilter, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The filter of `evict`. Unknown fields are refused: they could have meant fewer blocks."""


async def carry_out(verb: str, body: Json, settings: Settings, engine: EngineClient) -> Json:
    """Return what a verb answers.

    Raises:
        RequestError: the verb or a field is unknown, or the store cannot be asked.
    """
    if verb not in ("df", "ls", "evict", "verify"):
        raise RequestError(f"There is no verb `{verb}`", code="unknown_url", status=404)
    if settings.disk_dir is None:
        if verb == "df":
            return {**engine.stats, "writer_pid": None}
        text = f"`{verb}` is for the disk tier, and there is none: `disk_dir` is not set."
        hint = "`df` tells what VRAM and host memory hold; a restart empties them."
        raise RequestError(f"{text} {hint}", code="no_disk_tier", status=409)
    store = StoreControl(settings.disk_dir, clock_offset_file=settings.clock_offset_file)
    try:
        if verb == "evict":
            return await asyncio.to_thread(store.evict, msgspec.convert(body, WantedBlocks))
        how = {"repair": body.get("repair") is not False} if verb == "verify" else {}
        return await asyncio.to_thread(getattr(store, verb), **how)
    except (msgspec.ValidationError, TieredKVError) as error:
        status = 400 if isinstance(error, ValueError) else 503
        raise RequestError(str(error), code="store", status=status) from None
