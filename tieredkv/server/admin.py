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
    if settings.disk_dir is None:
        if verb != "df":
            raise RequestError("There is no disk tier: `disk_dir` is not set", code="no_disk_tier")
        return {**engine.stats, "writer_pid": None}
    store = StoreControl(settings.disk_dir, clock_offset_file=settings.clock_offset_file)
    try:
        match verb:
            case "df" | "ls":
                return await asyncio.to_thread(getattr(store, verb))
            case "evict":
                wanted = msgspec.convert(body, WantedBlocks)
                return await asyncio.to_thread(store.evict, wanted)
            case "verify":
                return await asyncio.to_thread(store.verify, repair=body.get("repair") is not False)
    except (msgspec.ValidationError, TieredKVError) as error:
        status = 400 if isinstance(error, ValueError) else 503
        raise RequestError(str(error), code="store", status=status) from None
    raise RequestError(f"There is no verb `{verb}`", code="unknown_url", status=404)
