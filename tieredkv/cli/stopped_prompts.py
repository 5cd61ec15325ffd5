"""Tells what a stopped store has of a prompt: tokenized here, looked up by its blocks' names."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from tieredkv.cache.compute_rate import ComputeRate
from tieredkv.cache.disk_link import READ_LATENCY_S
from tieredkv.cache.plan import HOST_LINK, LinkState, Planner
from tieredkv.cache.prompt_report import MakePlanner, report
from tieredkv.cache.rate_file import Machine, disk_name, read_rates
from tieredkv.clock import Clock
from tieredkv.config import Settings
from tieredkv.engine.chains import Chains
from tieredkv.engine.checkpoint import load_tokenizer
from tieredkv.engine.engine_messages import EngineInfo
from tieredkv.engine.loader import FoundModel, model_of
from tieredkv.engine.store_options import guard_names_key
from tieredkv.operate.ask import StoreControl
from tieredkv.operate.calls import Inspect, NamesKey
from tieredkv.pieces import Pieces, whole
from tieredkv.server.inspected import planned
from tieredkv.server.keys import Keys
from tieredkv.server.threads import Cancellation
from tieredkv.server.tokenizations import make_tokenization
from tieredkv.storage.keys.names import Names
from tieredkv.types import BlockHash, KVSpec, Tier

ASKED_BLOCKS = 8192  # in one call


def inspect(
    call: Inspect, settings: Settings, store: StoreControl, api_key: str | None
) -> dict[str, Any]:
    """Return the report on a prompt that a server would give, as far as the store can tell.

    Why a block is missing is known to a server only, which remembers what has left its tiers.

    Raises:
        ModelError: the model cannot be found or read.
        RequestError: a request with this prompt would be refused.
    """
    settings = replace(settings, api_keys=(api_key,) if api_key else (), api_keys_file=None)
    found = model_of(settings)
    fingerprint = found.find_fingerprint(fingerprint=settings.fingerprint)
    spec, tokenizer = found.kv_spec(settings.block_size), load_tokenizer(settings.model)
    tokenization = make_tokenization(tokenizer, settings, found.max_model_len)
    info = EngineInfo(
        model=found.name,
        max_model_len=found.max_model_len,
        vocab_size=found.vocab_size,
        block_size=spec.block_size,
        worker_pid=None,
    )
    keys = Keys(settings=settings, is_strict=False, is_local=True)
    request = planned(call, tokenization.of, info, keys, Cancellation())
    prefixes = Chains(settings, spec, fingerprint, Clock(settings.clock_offset_file))
    prefix = prefixes.make(request, request.prompt_token_ids)
    guard_names_key(settings)
    names = Names(store.answer(NamesKey())["names_key"])
    pages = [] if prefix.tail is None else prefix.tail.hashes
    stored, roots, needs = _look_up(store, [*prefix.hashes, *pages], names)
    others = whole(prefixes.elsewhere(prefix, request.prompt_token_ids, roots))
    elsewhere = _look_up(store, [*others], names)[0] if others else set[BlockHash]()

    def why_missed(index: int) -> Pieces[str]:
        yield
        kinds = [] if index else [others[block_hash] for block_hash in elsewhere]
        return next(iter(kinds), "not_stored")

    def sources(hashes: Iterable[BlockHash]) -> list[Tier | None]:
        return [Tier.DISK if block_hash in stored else None for block_hash in hashes]

    planners = _planners(settings, found, spec, fingerprint)
    told = len(request.prompt_token_ids), spec.block_size, sources(prefix.hashes)
    if (tail := prefix.tail) is None:
        reporting = report(*told, why_missed, planners, prefix.read_ends)
    else:
        ends = whole(tail.ends(stored.__contains__))

        def pages_at(end: int) -> list[Tier | None]:
            return sources(tail.hashes[index] for index in tail.needed(end))

        reporting = report(*told, why_missed, planners, ends, "no_anchor", pages_at)
    return {**msgspec.to_builtins(whole(reporting)), "needs": needs}


def _look_up(
    store: StoreControl, hashes: Sequence[BlockHash], names: Names
) -> tuple[set[BlockHash], dict[BlockHash, bytes], list[Any]]:
    """Return which blocks are stored, and what the store needs.

    If the first block is not stored, all roots are returned with their namespaces, too.
    """
    stored, roots, needs = set[BlockHash](), dict[BlockHash, bytes](), list[Any]()
    for start in range(0, len(hashes), ASKED_BLOCKS):
        some = hashes[start : start + ASKED_BLOCKS]
        by_name = dict(zip(names.hide(some), some, strict=True))
        pages = store.pages(Inspect(names=tuple(by_name)))
        try:
            while True:
                stored.update(by_name[bytes.fromhex(info.block_hash)] for info in next(pages))
        except StopIteration as ending:
            roots.update(ending.value.get("roots", {}))
            needs = ending.value.get("needs", needs)
    return stored, roots, needs


def _planners(
    settings: Settings, found: FoundModel, spec: KVSpec, fingerprint: bytes
) -> MakePlanner:
    """Return what makes planners with the rates that a server of this model has left here."""
    folder = str(settings.disk_dir)
    try:
        saved, disk = read_rates(folder), disk_name(folder)
    except (OSError, ValueError):  # the next server measures them again
        return lambda: None
    machine = Machine(
        device=found.device_name,
        disk=disk,
        model=found.name,
        fingerprint=fingerprint.hex(),
        block_bytes=spec.block_bytes,
    )
    if saved is None or saved.machine != machine or not saved.up_bytes_per_s:
        return lambda: None
    compute = ComputeRate(settings.resolve_max_num_alone_tokens(found.device.type))
    compute.assume(saved.known_steps)
    links = [LinkState(saved.up_bytes_per_s, spec.block_bytes, is_steady=True)]
    if saved.read_bytes_per_s:
        rate = min(saved.read_bytes_per_s, settings.disk_read_limit or math.inf)
        links.append(LinkState(rate, spec.block_bytes, latency_s=READ_LATENCY_S, through=HOST_LINK))

    def make() -> Planner:
        return Planner(
            links,
            compute.prompt_times,
            block_size=spec.block_size,
            least_tokens=compute.least_tokens,
            is_cpu=found.device.type == "cpu",
        )

    return make
