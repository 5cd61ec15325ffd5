"""The verbs of the command line over HTTP, for operators.

It knows verbs and the JSON that the command line prints; who may ask is checked before.
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
    """What `evict` may be told; an unknown field could have meant fewer blocks."""


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
        if verb == "evict":
            return await engine.evict(_wanted_blocks(body))
        text = f"`{verb}` is for the disk tier, and there is none: `disk_dir` is not set."
        hint = "`df` tells what VRAM and host memory hold; `evict` and a restart empty them."
        raise RequestError(f"{text} {hint}", code="no_disk_tier", status=409)
    store = StoreControl(settings.disk_dir, clock_offset_file=settings.clock_offset_file)
    try:
        if verb == "evict":
            return await asyncio.to_thread(store.evict, _wanted_blocks(body))
        how = {"repair": body.get("repair") is not False} if verb == "verify" else {}
        return await asyncio.to_thread(getattr(store, verb), **how)
    except RequestError:
        raise
    except TieredKVError as error:
        status = 400 if isinstance(error, ValueError) else 503
        raise RequestError(str(error), code="store", status=status) from None


def _wanted_blocks(body: Json) -> EvictFilter:
    """Return what a body asks to evict.

    Raises:
        RequestError: a field is unknown or wrong, or nothing says which blocks.
    """
    try:
        wanted = msgspec.convert(body, WantedBlocks)
    except msgspec.ValidationError as error:
        raise RequestError(str(error), code="store") from None
    if wanted == WantedBlocks(dry_run=wanted.dry_run):
        text = "nothing says which blocks to evict; all of them must be asked for"
        raise RequestError(text, code="store")
    return wanted
