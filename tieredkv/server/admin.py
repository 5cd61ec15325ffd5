"""The verbs of the command line over HTTP, for operators.

The answers are the JSON that the command line prints; that of `evict` also tells how many stored
responses and remembered answers were dropped. The caller must have checked the admin key.
"""

import asyncio
from collections.abc import Callable, Iterator

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
from tieredkv.operate.ask import Asking, Page, StoreControl, document
from tieredkv.operate.calls import VERBS, Call, EvictFilter, Inspect, Ls
from tieredkv.operate.chains import Chains
from tieredkv.operate.columns import ChainColumns
from tieredkv.operate.inspect import in_order
from tieredkv.operate.ls import listing
from tieredkv.operate.models import KnownModel, KnownModels
from tieredkv.operate.ram import RamBlocks
from tieredkv.server.asked import Json
from tieredkv.server.engine_client import EngineClient
from tieredkv.storage.results import NOTHING_EVICTED, BlockInfo, ChainInfo

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
    store = StoreControl(settings.disk_dir, clock_offset_file=settings.clock_offset_file)
    try:
        if not call.listed_as:
            return JSONResponse({**await asyncio.to_thread(store.answer, call), **forgotten})
        pages = await asyncio.to_thread(_begun, store.pages(call))
    except TieredKVError as error:
        raise _refused(error) from None
    return StreamingResponse(document(call, pages), media_type="application/json")


def _begun(pages: Asking) -> Asking:
    """Take the first page, so that errors come before the response begins; return all of them."""
    first, rest = list[Page](), Json()
    try:
        first.append(next(pages))
    except StopIteration as ending:
        rest = ending.value

    def whole() -> Asking:
        yield from first
        return (yield from pages) if first else rest

    return whole()


async def _respond_without_disk(call: Call, engine: EngineClient, forgotten: Json) -> Response:
    if isinstance(call, Ls):
        parts = document(call, await _list(call, engine))
        return StreamingResponse(parts, media_type="application/json")
    if isinstance(call, EvictFilter) and call.needs_list:
        pages = await _list(Ls(filter=call.filter), engine)
        call = await asyncio.to_thread(call.of_listed, pages)
        if not call.ids:
            return JSONResponse({**NOTHING_EVICTED, **forgotten})
    if isinstance(call, Inspect) and call.prompt is None:
        return JSONResponse({call.listed_as: await _inspect(call, engine)})
    *_, answer = await engine.operate(call)
    if "refused" in answer:
        raise _refused(ConfigError(answer["refused"]))
    return JSONResponse({**answer, **forgotten})


async def _inspect(call: Inspect, engine: EngineClient) -> list[Json]:
    """Describe a chain in VRAM and host memory block by block."""
    parts = await engine.operate(call)

    def made() -> list[Json]:
        blocks = [block for part in parts for block in part.get("blocks", ())]
        ordered: list[Json] = msgspec.to_builtins(
            in_order(msgspec.convert(blocks, list[BlockInfo]))
        )
        return ordered

    chain = await asyncio.to_thread(made)
    if chain or not call.id:
        return chain
    if call.following:
        raise _refused(UnknownIdError(f"no chain has the id `{call.id}`"))
    return await _inspect(replace(call, following=True), engine)


async def _list(call: Ls, engine: EngineClient) -> Iterator[list[ChainInfo]]:
    """List the chains in VRAM and host memory by pages."""
    first, *parts = await engine.operate(call)

    def made() -> Iterator[list[ChainInfo]]:
        now, model = first["now"], msgspec.convert(first["model"], KnownModel)
        chains = Chains(*RamBlocks.of(parts).table.unexpired(now))
        return listing(ChainColumns.of(chains, KnownModels([model])), call, now)

    return await asyncio.to_thread(made)


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
