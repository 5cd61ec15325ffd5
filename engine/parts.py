"""The parts of an engine, made from the settings: model, memory, links, tiers, scheduler.

Budgets are checked before anything is allocated.
"""

import contextlib
import logging
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tieredkv.cache.catalog import Catalog
from tieredkv.cache.compute_rate import ComputeRate
from tieredkv.cache.device_link import DeviceLink, time_link
from tieredkv.cache.pool import BlockPool
from tieredkv.cache.rate_file import Machine, RateFile, disk_name
from tieredkv.cache.requests import TieredCache
from tieredkv.cache.settings import CacheSettings
from tieredkv.cache.tail import anchor_pages, tail_kinds
from tieredkv.cache.tiers import Tiers
from tieredkv.clock import Clock
from tieredkv.config import Settings
from tieredkv.engine.attention import early_bytes
from tieredkv.engine.disk_tier import DISK, TierKind
from tieredkv.engine.event_publisher import EventPublisher
from tieredkv.engine.loader import FoundModel, LoadedModel, model_of
from tieredkv.engine.profile import count_fitting_blocks, time_steps, warm_up
from tieredkv.engine.runner import ModelRunner, StepLimits, make_kv_pool
from tieredkv.engine.sampling_params import TokenChoice
from tieredkv.engine.scheduler import Scheduler
from tieredkv.engine.step_plan import longest_chunk
from tieredkv.engine.step_timer import StepTimer
from tieredkv.errors import ConfigError
from tieredkv.hashing import layout_of
from tieredkv.kernels.copies import BlockCopier, register_pinned
from tieredkv.operate.models import KnownModel
from tieredkv.tier import BackingTier
from tieredkv.types import KVSpec, Progress
from tieredkv.units import format_bytes
from tieredkv.wire.arena import HostArena

logger = logging.getLogger(__name__)

CPU_DEVICE_BYTES = 256 << 20
"""Memory for blocks where there is no GPU and the settings name no size."""

CHUNK_SHARE = 1 / 8
"""The most of VRAM that the pages of layers with windows take of the tokens of one step."""

TIER: TierKind = DISK
"""What backs host memory where `disk_dir` is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What an engine is made of.

    Attributes:
        model: the model that it runs.
        spec: how the model's keys and values lie in blocks.
        choice: how tokens are chosen where a request does not say.
        max_model_len: tokens of the longest context, by the model and by VRAM.
        device_blocks: uint8 [num_blocks, block_bytes], the blocks in VRAM.
        runner: computes steps.
        timer: learns how long steps take.
        tiers: where blocks lie.
        cache: the tiers, as requests use them.
        scheduler: decides on each step.
        rate_file: keeps what is learnt for the next start; None if no tier keeps it.
    """

    model: LoadedModel
    spec: KVSpec
    choice: TokenChoice
    max_model_len: int
    device_blocks: torch.Tensor
    runner: ModelRunner
    timer: StepTimer
    tiers: Tiers
    cache: TieredCache
    scheduler: Scheduler
    rate_file: RateFile | None


Build = Callable[..., Parts]
"""Makes the parts of an engine, with the arguments of `build_parts`."""


def build_parts(
    settings: Settings, stack: contextlib.ExitStack, *, progress: Progress, wake: Callable[[], None]
) -> Parts:
    """Load the model, take the memory, open the disk tier, and join them.

    Args:
        settings: sizes, tiers, retention, scheduling.
        stack: releases the parts when it is closed.
        progress: told about loading, profiling and pinning.
        wake: called by another thread when the store has something for the engine.

    Raises:
        ConfigError: a budget is smaller than one block, or a setting does not fit the model.
        ModelError: the model cannot be loaded or is not supported.
        StorageError: the disk tier's folder is not usable; nothing in it was changed.
    """
    if settings.disk_dir is not None:
        TIER.check(settings)
    found = model_of(settings)
    device, spec = found.device, found.kv_spec(settings.block_size)
    if spec.states and not spec.page_pieces:
        raise _small_pages(spec)
    if spec.states:
        told = spec.state_pages, format_bytes(spec.state_pages * spec.block_bytes)
        logger.info("a recurrent state takes %d pages of a block, %s", *told)
    if (unused := spec.unused_share) > 0:
        what = "layers with windows take %d further pages a block; %.0f %% of all pages are empty"
        logger.info(what, len(spec.page_kinds) - 1, 100 * unused)
    num_pages, num_blocks = _count_blocks(settings, spec, device.type)
    report = partial(progress, "taking host memory")
    arena = HostArena(num_pages, spec.page_bytes, progress=report)
    stack.callback(arena.close)
    opened = None
    if settings.disk_dir is not None:
        opened = TIER.open(settings, spec, arena, wake)
        stack.callback(opened.tier.close)
    model = found.load(progress=progress, fingerprint=settings.fingerprint)
    choice = _sampling_defaults(settings, found)
    num_alone_tokens = settings.resolve_max_num_alone_tokens(device.type)
    most_tokens = longest_chunk(num_alone_tokens)
    limits = StepLimits(settings.max_num_seqs, most_tokens, model.max_model_len)
    if num_blocks is None:
        progress("profiling", 0, 1)
        share = settings.gpu_memory_utilization
        num_blocks = count_fitting_blocks(model, spec, limits, share)
        progress("profiling", 1, 1)
    pool = make_kv_pool(spec, num_blocks, device)
    most_chunk, num_for_chains = share_blocks(spec, num_blocks)
    max_model_len = min(model.max_model_len, num_for_chains * spec.block_size)
    runner = ModelRunner(model, pool, spec, limits._replace(max_context_len=max_model_len))
    device_blocks = pool.view(torch.uint8).view(num_blocks, spec.block_bytes)
    link = _make_link(spec, device_blocks, arena, stack, progress)
    store = None if opened is None else opened.tier
    tiers = make_tiers(settings, spec, link, store, num_blocks, num_pages, device.type)
    if settings.kv_events == "on":
        publisher = EventPublisher(settings, spec.block_size)
        stack.callback(publisher.close)
        tiers.events.publish_to(publisher.publish)
    cache = TieredCache(tiers)
    scheduler = make_scheduler(settings, cache, spec.block_size, device.type, most_chunk)
    timer = StepTimer(tiers.compute_rate, device)
    warm_up(runner, progress)
    time_steps(
        runner,
        timer,
        most_tokens=num_alone_tokens,
        max_model_len=max_model_len,
        is_cpu=device.type == "cpu",
    )
    time_link(link, min(num_blocks, num_pages), spec.block_bytes)
    rate_file = None
    if opened is not None:
        if opened.rates_in is not None:
            rate_file = _open_rate_file(*opened.rates_in, tiers, model)
        opened.note_model(known_model(settings, model, spec))
    if rate_file is not None:
        stack.callback(rate_file.close)
    return Parts(
        model=model,
        spec=spec,
        choice=choice,
        max_model_len=max_model_len,
        device_blocks=device_blocks,
        runner=runner,
        timer=timer,
        tiers=tiers,
        cache=cache,
        scheduler=scheduler,
        rate_file=rate_file,
    )


def _small_pages(spec: KVSpec) -> ConfigError:
    """Return the error of blocks in whose pages not even one head's state fits."""
    piece_bytes = 4 * spec.states[0].piece_elements
    least = 1 << (-(-piece_bytes // spec.token_bytes) - 1).bit_length()
    what = f"a page of a block of {spec.block_size} tokens, {format_bytes(spec.block_bytes)}"
    rest = f"cannot hold the recurrent state of one head, {format_bytes(piece_bytes)}"
    return ConfigError(f"{what}, {rest}; set `block_size` to {least}")


def known_model(settings: Settings, model: LoadedModel, spec: KVSpec) -> KnownModel:
    """Return what lists of chains need to know of the model that runs."""
    return KnownModel(
        name=next(iter(settings.served_names), model.name),
        fingerprint=model.fingerprint.hex(),
        dtype=spec.dtype,
        block_size=spec.block_size,
        hash_algo=settings.hash_algo,
        layout=layout_of(spec),
    )


def make_tiers(
    settings: Settings,
    spec: KVSpec,
    link: DeviceLink[Any],
    store: BackingTier | None,
    num_blocks: int,
    num_pages: int,
    device_type: str,
) -> Tiers:
    """Make the tiers of this link and this store."""
    num_batched_tokens = settings.resolve_max_num_batched_tokens(device_type)
    tiers = Tiers(
        device=BlockPool(num_blocks, settings.eviction_order),
        host=BlockPool(num_pages, settings.eviction_order),
        catalog=Catalog(settings.retention_policies()),
        store=store,
        device_link=link,
        clock=Clock(settings.clock_offset_file),
        vram_bytes=spec.block_bytes,
        payload_bytes=spec.block_bytes,
        block_size=spec.block_size,
        is_cpu=device_type == "cpu",
        settings=CacheSettings(
            restore=settings.restore,
            is_write_behind=settings.disk_write == "write_behind",
            drain_timeout_s=settings.drain_timeout,
            device_reserve_blocks=2 * num_batched_tokens // spec.block_size,
            load_timeout_s=settings.load_timeout,
        ),
        compute_rate=ComputeRate(settings.resolve_max_num_alone_tokens(device_type)),
    )
    tiers.disk_link.read_rate.limit = settings.disk_read_limit or math.inf
    tiers.disk_link.write_rate.limit = settings.disk_write_limit or math.inf
    return tiers


def make_scheduler(
    settings: Settings,
    cache: TieredCache,
    block_size: int,
    device_type: str,
    most_chunk: int = sys.maxsize,
) -> Scheduler:
    """Make the scheduler over this cache, for steps of at most `most_chunk` tokens of prompts."""
    num_batched_tokens = settings.resolve_max_num_batched_tokens(device_type)
    num_alone_tokens = settings.resolve_max_num_alone_tokens(device_type)
    return Scheduler(
        cache=cache,
        block_size=block_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=min(num_batched_tokens, most_chunk),
        max_num_alone_tokens=min(num_alone_tokens, most_chunk),
        hash_algo=settings.hash_algo,
    )


def share_blocks(spec: KVSpec, num_blocks: int) -> tuple[int, int]:
    """Share VRAM between the blocks of a chain and the pages of layers with windows.

    Returns:
        The most tokens of a step, and of how many blocks the longest chain is.

    Raises:
        ConfigError: not even a chain of one block fits.
    """
    if not (num_kinds := len(tail_kinds(spec))):
        return sys.maxsize, num_blocks
    if spec.states:
        num_held = 2 * spec.state_pages  # the state itself, and the one that it goes on from
        _check_room(spec, num_blocks, num_held, "a request's recurrent state and a copy of it")
        return sys.maxsize, num_blocks - num_held
    most_chunk = max(1, int(num_blocks * CHUNK_SHARE) // num_kinds)
    num_held = _num_held(spec, most_chunk)
    _check_room(spec, num_blocks, num_held, "a request's pages of layers with windows")
    return most_chunk * spec.block_size, num_blocks - num_held


def _check_room(spec: KVSpec, num_blocks: int, num_held: int, what: str) -> None:
    """Refuse a VRAM in which one request would have no room for a block beside its pages.

    Raises:
        ConfigError: says what they take, and how much there is.
    """
    if num_blocks <= num_held:
        least, has = (num_held + 1) * spec.block_bytes, num_blocks * spec.block_bytes
        takes = f"{what} take {format_bytes(least)} of VRAM"
        raise ConfigError(f"{takes}, and there are {format_bytes(has)}; raise `device_size`")


def vram_for(spec: KVSpec, num_tokens: int, most_chunk: int, num_requests: int = 1) -> int:
    """Return bytes of VRAM with room for so many tokens of requests, and steps of `most_chunk`."""
    num_blocks = -(-num_tokens // spec.block_size)
    if spec.states:
        num_blocks += 2 * num_requests * spec.state_pages
    elif num_kinds := len(tail_kinds(spec)):
        chunk = -(-most_chunk // spec.block_size)
        for_tokens = (num_blocks + num_requests * _num_held(spec, 0)) / (1 - CHUNK_SHARE)
        num_blocks = math.ceil(max(for_tokens, chunk * num_kinds / CHUNK_SHARE))
    return num_blocks * spec.block_bytes


def _num_held(spec: KVSpec, most_chunk: int) -> int:
    """Return how many pages of layers with windows a request holds at most, by blocks of a step."""
    return anchor_pages(spec) + len(tail_kinds(spec)) * (most_chunk + 2)


def _open_rate_file(folder: str, mark: str, tiers: Tiers, model: LoadedModel) -> RateFile | None:
    """Take the rates of an earlier run from the tier's folder; they will be kept there.

    Returns:
        None if the folder is gone already, which `disk_trouble` tells.
    """
    try:
        disk = disk_name(folder)
    except OSError:
        return None
    machine = Machine(
        device=model.device_name,
        disk=disk,
        model=model.name,
        fingerprint=model.fingerprint.hex(),
        block_bytes=tiers.payload_bytes,
    )
    return RateFile(
        folder,
        machine,
        mark=mark,
        read=tiers.disk_link.read_rate,
        write=tiers.disk_link.write_rate,
        up=tiers.device_link.up_rate,
        compute=tiers.compute_rate,
    )


def _count_blocks(settings: Settings, spec: KVSpec, device_type: str) -> tuple[int, int | None]:
    """Return the pages of host memory and the blocks of VRAM; None for as many as fit there.

    Raises:
        ConfigError: a budget is too small.
    """
    num_pages = _num_blocks("host_size", settings.host_size, spec.page_bytes, least=4)
    num_blocks = None
    device_size = settings.device_size or (None if device_type == "cuda" else CPU_DEVICE_BYTES)
    if device_size is not None:
        num_blocks = _num_blocks("device_size", device_size, spec.block_bytes, least=2)
    if settings.disk_dir is not None:
        least_bytes = TIER.least_bytes(spec.block_bytes)
        few = f"no block of {format_bytes(spec.block_bytes)}"
        _check_budget("disk_size", settings.disk_size, least_bytes, few)
    return num_pages, num_blocks


def _num_blocks(field: str, size_bytes: int, block_bytes: int, *, least: int) -> int:
    """Return how many blocks fit into a budget; fewer than `least` are refused."""
    few = f"fewer than {least} blocks of {format_bytes(block_bytes)}"
    _check_budget(field, size_bytes, least * block_bytes, few)
    return size_bytes // block_bytes


def _check_budget(field: str, size_bytes: int, least_bytes: int, holds: str) -> None:
    """Refuse a budget that is too small.

    Raises:
        ConfigError: names the budget, what it holds, and how large it must be.
    """
    if size_bytes < least_bytes:
        size, least = format_bytes(size_bytes), format_bytes(least_bytes)
        raise ConfigError(f"`{field}` = {size} holds {holds}; it must be at least {least}")


def _sampling_defaults(settings: Settings, found: FoundModel) -> TokenChoice:
    is_recommended = settings.generation_config == "auto"
    choice = found.generation.choice if is_recommended else TokenChoice()
    if choice != TokenChoice():
        logger.info("sampling defaults of the model's generation_config.json: %s", choice)
    return choice


def _make_link(
    spec: KVSpec,
    device_blocks: torch.Tensor,
    arena: HostArena,
    stack: contextlib.ExitStack,
    progress: Progress,
) -> DeviceLink[Any]:
    """Join the blocks in VRAM and the pages of the arena, which is pinned for a GPU."""
    arena_bytes = torch.frombuffer(arena.buffer, dtype=torch.uint8)
    if device_blocks.is_cuda:
        address, size = arena_bytes.data_ptr(), arena.size_bytes
        report = partial(progress, "pinning host memory")
        pinned = register_pinned(address, size, page_bytes=spec.page_bytes, progress=report)
        stack.callback(pinned.close)
    copier = BlockCopier(device_blocks, arena_bytes.view(-1, spec.page_bytes))
    return DeviceLink[Any](copier, early_bytes=early_bytes(spec))
