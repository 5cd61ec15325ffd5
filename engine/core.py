"""The engine: takes requests and returns tokens, one step at a time.

It joins model, scheduler and cache, and owns what they share: the device pool, the host arena, the
store's worker. It knows no text and no HTTP. Everything runs on the thread that calls `step`; only
`wake` may be called from others.
"""

import contextlib
import gc
import logging
import math
import random
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch
import xxhash

from tieredkv.cache.catalog import Catalog, Entry
from tieredkv.cache.device_link import DeviceLink
from tieredkv.cache.pool import BlockPool
from tieredkv.cache.prefix import BlockClaim, Prefix
from tieredkv.cache.rate_file import RateFile
from tieredkv.cache.rates import ComputeRate
from tieredkv.cache.tiered import TieredCache
from tieredkv.cache.tiers import Tiers
from tieredkv.clock import Clock
from tieredkv.config import Settings
from tieredkv.engine import model_runner
from tieredkv.engine.engine_messages import EngineInfo, EngineRequest, TokenOutput
from tieredkv.engine.first_rates import open_rate_file, time_link, time_steps
from tieredkv.engine.loader import LoadedModel, find_model
from tieredkv.engine.model_runner import ModelRunner, StepOutput
from tieredkv.engine.request import Request, pack_prompt
from tieredkv.engine.sampler import SamplerState, Sampling, sample, score
from tieredkv.engine.sampling_params import TokenChoice
from tieredkv.engine.scheduler import ScheduledRow, Scheduler, longest_chunk
from tieredkv.engine.step_timer import StepTimer
from tieredkv.errors import BlocksLostError, ConfigError
from tieredkv.hashing import chain_hashes, model_root, namespace_digest, tenant_digest
from tieredkv.kernels.copies import BlockCopier, register_pinned
from tieredkv.kernels.small_copies import to_device
from tieredkv.storage.client import StoreClient
from tieredkv.storage.host import HostArena
from tieredkv.storage.lmdb_store import minimum_budget_bytes
from tieredkv.storage.results import EvictFilter
from tieredkv.storage.worker_messages import StoreOptions
from tieredkv.types import DTYPE_BYTES, BlockHash, Progress, Tier, ignore_progress
from tieredkv.units import format_bytes

logger = logging.getLogger(__name__)

TRANSFER_POLL_S = 0.00005
LINK_POLL_S = 0.0005
ISSUE_AHEAD_S = 0.015
"""While blocks are being loaded, a step is issued so long before the device has computed the last
one: later than it could be, since issuing a long step keeps the engine's thread from the links.
"""

PLAN_AGAIN_S = 0.005
TOUCH_AGAIN_S = 10.0
TOLD_POSITIONS = (0, 16_384, 65_536)
"""Positions in a prompt at which the metrics tell how fast tokens are computed."""

CPU_DEVICE_BYTES = 256 << 20
EVERYTHING = EvictFilter(all=True)


class _Launched(NamedTuple):
    """A step whose tokens the host has not seen yet; `rows` are the rows that sample a token."""

    rows: list[ScheduledRow]
    sampling: Sampling
    logits: torch.Tensor


class EngineCore:
    """One model with its scheduler and its tiered cache.

    Args:
        settings: sizes, tiers, retention, scheduling.
        progress: told about loading, profiling and pinning.

    Raises:
        ConfigError: a budget is smaller than one block, or a setting does not fit the model.
        ModelError: the model cannot be loaded or is not supported.
        StorageError: the disk tier's folder is not usable; nothing in it was changed.
    """

    def __init__(self, settings: Settings, *, progress: Progress = ignore_progress) -> None:
        self.settings = settings
        self._policies = settings.retention_policies()
        self._wake = threading.Event()
        self._requests: dict[str, Request] = {}
        self._outputs: list[TokenOutput] = []
        self._launched: _Launched | None = None
        self._seeds = random.Random(settings.seed)
        self._is_closed = False
        self._is_issued = self._is_stalled = self._is_early = False
        self.on_logits: Callable[[str, torch.Tensor], None] | None = None
        with contextlib.ExitStack() as stack:
            self._build(settings, progress, stack)
            self._stack = stack.pop_all()
        # Objects that live as long as the engine are no longer searched for garbage. There are
        # hundreds of thousands of them, and a search would delay every stream.
        gc.collect()
        gc.freeze()
        self._stack.callback(gc.unfreeze)

    def _build(self, settings: Settings, progress: Progress, stack: contextlib.ExitStack) -> None:
        found = find_model(
            settings.model,
            dtype=settings.dtype,
            device=settings.device,
            max_context_len=settings.max_model_len,
        )
        device = found.device
        spec = self.kv_spec = found.kv_spec(settings.block_size)
        num_alone_tokens = settings.resolve_max_num_alone_tokens(device.type)
        most_tokens = longest_chunk(num_alone_tokens)
        limits = {"max_num_seqs": settings.max_num_seqs, "max_num_batched_tokens": most_tokens}
        device_size = settings.device_size or (None if device.type == "cuda" else CPU_DEVICE_BYTES)
        num_pages = _num_blocks("host_size", settings.host_size, spec.page_bytes, least=4)
        if device_size is not None:
            num_blocks = _num_blocks("device_size", device_size, spec.block_bytes, least=2)
        if settings.disk_dir is not None:
            least_bytes = minimum_budget_bytes(spec.block_bytes)
            few = f"no block of {format_bytes(spec.block_bytes)}"
            _check_budget("disk_size", settings.disk_size, least_bytes, few)
        report = partial(progress, "taking host memory")
        arena = HostArena(num_pages, spec.page_bytes, progress=report)
        stack.callback(arena.close)
        store = self._open_store(arena, stack)
        self.model: LoadedModel = found.load(progress=progress, fingerprint=settings.fingerprint)
        is_recommended = settings.generation_config == "auto"
        self._choice = found.generation.choice if is_recommended else TokenChoice()
        if self._choice != TokenChoice():
            logger.info("sampling defaults of the model's generation_config.json: %s", self._choice)
        if device_size is None:
            progress("profiling", 0, 1)
            share = settings.gpu_memory_utilization
            num_blocks = model_runner.num_device_blocks(self.model, spec, share, **limits)
            progress("profiling", 1, 1)
        pool = model_runner.make_kv_pool(spec, num_blocks, device)
        self._max_model_len = min(self.model.max_model_len, num_blocks * spec.block_size)
        self._runner = ModelRunner(
            self.model, pool, spec, max_context_len=self._max_model_len, **limits
        )
        self._block_bytes = pool.view(torch.uint8).view(num_blocks, spec.block_bytes)
        arena_bytes = torch.frombuffer(arena.buffer, dtype=torch.uint8)
        if device.type == "cuda":
            address, size = arena_bytes.data_ptr(), arena.size_bytes
            report = partial(progress, "pinning host memory")
            pinned = register_pinned(address, size, page_bytes=spec.page_bytes, progress=report)
            stack.callback(pinned.close)
        copier = BlockCopier(self._block_bytes, arena_bytes.view(num_pages, spec.page_bytes))
        early_bytes = spec.block_bytes * model_runner.late_layer(spec) // spec.num_layers
        link = DeviceLink[Any](copier, early_bytes=early_bytes)
        self._connect(link, store, num_blocks, num_pages, device.type)
        self._timer = StepTimer(self.tiers.compute_rate, device)
        self._runner.warm_up(progress)
        time_steps(
            self._runner,
            self._timer,
            most_tokens=num_alone_tokens,
            max_model_len=self._max_model_len,
            is_cpu=device.type == "cpu",
        )
        time_link(self.tiers)
        self._rate_file: RateFile | None = None
        if settings.disk_dir is not None:
            self._rate_file = open_rate_file(settings.disk_dir, self.tiers, self.model)
        if self._rate_file is not None:
            stack.callback(self._rate_file.close)

    def _connect(
        self,
        link: DeviceLink[Any],
        store: StoreClient | None,
        num_blocks: int,
        num_pages: int,
        device_type: str,
    ) -> None:
        """Make the tiers of this link and this store, and the cache and the scheduler over them."""
        settings, spec = self.settings, self.kv_spec
        num_batched_tokens = settings.resolve_max_num_batched_tokens(device_type)
        num_alone_tokens = settings.resolve_max_num_alone_tokens(device_type)
        self.tiers = Tiers(
            device=BlockPool(num_blocks),
            host=BlockPool(num_pages),
            catalog=Catalog(self._policies),
            transfer=link,
            store=store,
            clock=Clock(settings.clock_offset_file),
            block_bytes=spec.block_bytes,
            block_size=spec.block_size,
            restore=settings.restore,
            compute_rate=ComputeRate(num_alone_tokens),
            is_write_behind=settings.disk_write == "write_behind",
            drain_timeout_s=settings.drain_timeout,
            device_reserve_blocks=2 * num_batched_tokens // spec.block_size,
            load_timeout_s=settings.load_timeout,
        )
        self.tiers.read_rate.limit = settings.disk_read_limit or math.inf
        self.tiers.write_rate.limit = settings.disk_write_limit or math.inf
        self.give_shares(settings.tenant_shares)
        self.cache = TieredCache(self.tiers)
        self.scheduler = Scheduler(
            cache=self.cache,
            block_size=spec.block_size,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=num_batched_tokens,
            max_num_alone_tokens=num_alone_tokens,
            hash_algo=settings.hash_algo,
        )

    @property
    def info(self) -> EngineInfo:
        """What senders of requests are told; it changes when the store's worker does."""
        store = self.tiers.store
        return EngineInfo(
            model=self.settings.served_model_name or self.model.name,
            max_model_len=self._max_model_len,
            vocab_size=self.model.vocab_size,
            worker_pid=store.pid if store else None,
            disk_trouble=(store.trouble or None) if store else None,
        )

    # Requests

    def add_request(self, asked: EngineRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: it is malformed or too long.
        """
        assert asked.request_id not in self._requests, asked.request_id
        vocab_size = self.model.vocab_size
        max_len, max_tokens = self._max_model_len, asked.params.max_tokens
        packed = pack_prompt(asked.prompt_token_ids, max_len, vocab_size, max_tokens=max_tokens)
        asked.params.check_vocabulary(vocab_size)
        sampler = SamplerState(
            asked.params,
            self._seeds.getrandbits(63),
            defaults=self._choice,
            eos_token_ids=self.model.eos_token_ids,
            prompt_token_ids=packed,
        )
        most_tokens = max(1, min(max_tokens, max_len - len(packed)))
        request = Request(asked, self._prefix(asked, packed), sampler, most_tokens)
        self._requests[asked.request_id] = request
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """Cancel a request and release what it holds; unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request)
            self._outputs.append(TokenOutput(request_id=request_id, finish_reason="abort"))

    def abort_all(self) -> None:
        """Cancel every request."""
        for request_id in list(self._requests):
            self.abort(request_id)

    @property
    def has_work(self) -> bool:
        """Whether a `step` has anything to do: requests, outputs, or blocks being moved."""
        is_busy = bool(self._requests or self._outputs) or self._launched is not None
        return is_busy or not self.cache.is_idle

    def step(self) -> list[TokenOutput]:
        """Issue one step, then return the outputs of the step before it.

        The device computes the new step while the host takes in the outputs. The list is empty
        after the first step, and while requests wait for blocks. While steps are short, no step is
        issued ahead, so that the caller can add new requests before each step.
        """
        if self._is_issued and self.scheduler.has_short_steps:
            self._is_issued = False
            self._runner.synchronize()
            self._collect()
            return self._take_outputs()
        self.cache.poll(may_start_early=self._launched is None)
        self._answer_control()
        if self._rate_file is not None:
            self._rate_file.keep()
        self.scheduler.busy_s = self._timer.busy_s()
        self._is_early = self.cache.is_restoring and self.scheduler.busy_s > ISSUE_AHEAD_S
        if self._is_early:  # what to compute next is decided when more has been loaded
            self.cache.pump()
            return self._take_outputs()
        self._await_answers()
        rows = self._launched.rows if self._launched is not None else ()
        must_see = any(row.request.sampler.needs_history for row in rows)
        if must_see or self.scheduler.is_short or self.on_logits:  # else it runs ahead
            self._collect()
        scheduled = self.scheduler.schedule(may_preempt=self._launched is None)
        launched = self._launch(scheduled) if scheduled else None
        self._collect()
        self._launched = launched
        self.cache.pump()
        self._is_issued = bool(scheduled)
        self._is_stalled = not scheduled and not self.scheduler.is_short
        return self._take_outputs()

    def _await_answers(self) -> None:
        """Wait a moment for what the disk has of new requests, so that this step may take them."""
        lookups, waiting, has_waited = self.cache.lookups, self.scheduler.waiting, False
        while (left_s := lookups.answers_until(len(waiting)) - time.monotonic()) > 0:
            self._wake.wait(left_s)
            self._wake.clear()
            self.cache.poll()
            has_waited = True
        if has_waited:
            self._wake.set()  # it may have been meant for the caller

    def wait(self, timeout_s: float) -> None:
        """Wait for a `wake`, for a copy that ends, or for the timeout; return at once if busy."""
        if self._is_early:
            self._wake.wait(LINK_POLL_S)
            self._wake.clear()
            return
        is_stepping = self._launched is not None or (not self._is_stalled and self._requests)
        if is_stepping or self.cache.has_more:
            return
        transfer, give_up_at = self.tiers.transfer, time.monotonic() + timeout_s
        give_up_at = min(give_up_at, self.scheduler.held_until or give_up_at)
        if self.cache.is_restoring:  # a link that stalls sends no event
            give_up_at = min(give_up_at, time.monotonic() + PLAN_AGAIN_S)
        while not self._wake.is_set() and (left := give_up_at - time.monotonic()) > 0:
            if transfer.has_completed:
                break
            self._wake.wait(min(left, TRANSFER_POLL_S) if transfer.has_pending else left)
        self._wake.clear()

    def wake(self) -> None:
        """End a `wait`; any thread may call it."""
        self._wake.set()

    # Tiers

    def tier_stats(self) -> dict[str, object]:
        """Return blocks and bytes of each tier, what is owed to the disk, and the counters."""
        size = self.kv_spec.block_bytes
        stats: dict[str, object] = {}
        for tier, pool in ((Tier.DEVICE, self.tiers.device), (Tier.HOST, self.tiers.host)):
            stats[tier.value] = {
                "blocks": pool.num_cached,
                "blocks_used": pool.num_used,
                "blocks_total": pool.num_blocks,
                "used_ratio": pool.num_used / pool.num_blocks,
                "bytes_live": pool.num_cached * size,
                "bytes_budget": pool.num_blocks * size,
            }
        scheduler, store = self.scheduler, self.tiers.store
        stats["counters"] = msgspec.to_builtins(self.tiers.counters) | {
            "computed_tokens": scheduler.num_computed_tokens,
            "preemptions": scheduler.num_preemptions,
            "requests_running": len(scheduler.running),
            "requests_waiting": len(scheduler.waiting),
        }
        disk = msgspec.to_builtins(store.stats()) if store else None
        if store:
            stats["owed"] = {"bytes": self.tiers.owed_bytes, "drain_s": self.tiers.drain_s}
        return stats | {"block_bytes": size, "disk": disk, "learnt": self.learnt_rates()}

    def learnt_rates(self) -> dict[str, object]:
        """Return the rates that loads and a stop are planned with.

        Those of computing are tokens a second of a step's tokens behind some positions.
        """
        tiers, now, chunk = self.tiers, time.monotonic(), self.tiers.compute_rate.chunk
        positions = [each for each in TOLD_POSITIONS if each < self._max_model_len]
        seconds = {it: tiers.compute_rate.seconds(it, it + chunk) for it in positions}
        has_disk, limit = tiers.store is not None, tiers.read_rate.limit
        return {
            "up_bytes_per_s": tiers.up_rate.effective(now),
            "read_bytes_per_s": tiers.read_rate.effective(now) if has_disk else None,
            "write_bytes_per_s": tiers.write_rate.steady if has_disk else None,
            "read_bytes_limit": limit if has_disk and limit < math.inf else None,
            "prefill_tokens_per_s": {str(it): chunk / took_s for it, took_s in seconds.items()},
        }

    def give_shares(self, shares: Mapping[str, float]) -> None:
        """Replace the tenants' shares of every tier."""
        algo = self.settings.hash_algo
        self.tiers.give_shares({tenant_digest(t, algo=algo): it for t, it in shares.items()})

    def evict(
        self,
        wanted: EvictFilter = EVERYTHING,
        following: Collection[BlockHash] = (),
        before: Collection[BlockHash] = (),
    ) -> int:
        """Drop blocks from VRAM and host memory; return how many.

        Args:
            wanted: which blocks to drop; a dry run only counts them.
            following: further blocks that `wanted` names; see `Catalog.chains`.
            before: further blocks that precede the named ones.
        """
        now = self.tiers.clock.now()
        chains = self.tiers.catalog.chains(wanted.ids, following, before)

        def is_wanted(entry: Entry) -> bool:
            is_of_chains = not wanted.ids or entry.block_hash in chains
            return is_of_chains and wanted.matches(entry.namespace, entry.last_used, now)

        if wanted.dry_run:
            return sum(map(is_wanted, self.tiers.catalog.entries()))
        return self.cache.evict(is_wanted)

    def evict_verb(
        self,
        wanted: EvictFilter,
        following: Collection[BlockHash] = (),
        before: Collection[BlockHash] = (),
    ) -> dict[str, Any]:
        """Carry out `evict` for an operator in VRAM and host memory; return its answer."""
        unknown_ids = self.tiers.catalog.unknown_ids(wanted.ids)
        evicted = self.evict(wanted, following, before)
        freed_bytes = evicted * self.kv_spec.block_bytes
        sums = {"evicted_blocks": evicted, "freed_bytes": freed_bytes}
        return {**sums, "unknown_ids": unknown_ids, "disk": None}

    def kv_digest(self, request: EngineRequest) -> str | None:
        """Return the xxh3_128 digest of the keys and values of a prompt's full blocks in VRAM.

        The bytes are read from VRAM, beginning at the head of the chain. None if a block is not
        in VRAM.
        """
        digest = xxhash.xxh3_128()
        for _, content in self._contents(request):
            if content is None:
                return None
            digest.update(content)
        return digest.hexdigest()

    def kv_digests(self, request: EngineRequest) -> dict[BlockHash, str]:
        """Return the xxh3_128 digests of a prompt's full blocks that are in VRAM, by hash."""
        return {
            block_hash: xxhash.xxh3_128_hexdigest(content)
            for block_hash, content in self._contents(request)
            if content is not None
        }

    def _contents(self, request: EngineRequest) -> Iterator[tuple[BlockHash, bytes | None]]:
        """Yield the hash and the bytes of each full block of a prompt; None if VRAM has it not."""
        hashes = self._prefix(request, request.prompt_token_ids).hashes
        for block_hash, block in zip(hashes, self.tiers.device.find(hashes), strict=True):
            if block is None or not block.is_ready:
                yield block_hash, None
            else:
                yield block_hash, self._block_bytes[block.block_id].cpu().numpy().tobytes()

    def close(self, *, progress: Progress = ignore_progress) -> None:
        """Abort requests, write blocks that are owed to the disk, and release everything.

        Calling it twice is fine.

        Raises:
            BlocksLostError: blocks that were promised to the disk are lost because the store
                failed; blocks that `drain_timeout` left no time for do not count. Everything is
                released nevertheless.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self.abort_all()
        deadline = time.monotonic() + self.settings.drain_timeout
        # What an operator evicts now is not written any more.
        left = self.cache.demoter.drain(
            deadline=deadline, progress=progress, meanwhile=self._answer_control
        )
        refusals = self.cache.demoter.refusals()
        num_lost = refusals.total()
        self.tiers.counters.lost_blocks.update(refusals)
        if (num_late := left - num_lost) > 0:
            self.tiers.counters.lost_blocks["drain_timeout"] += num_late
            text = "%d blocks were not written to disk within `drain_timeout` (%g s) and are lost"
            logger.warning(text, num_late, self.settings.drain_timeout)
        lost = None
        if num_lost and (store := self.tiers.store) is not None:
            why = store.trouble or store.stats().store_error or ", ".join(refusals)
            what = f"{num_lost} blocks that were promised to the disk are lost"
            lost = BlocksLostError(f"{what}, because storing failed: {why}")
        self.tiers.transfer.synchronize()
        self._stack.close()
        if lost is not None:
            raise lost

    # Inside

    def _prefix(self, asked: EngineRequest, token_ids: Sequence[int]) -> Prefix:
        """Hash a prompt's full blocks that may be cached, in the tenant's own namespace."""
        settings, size, algo = self.settings, self.kv_spec.block_size, self.settings.hash_algo
        # Cached blocks have no logits, which the prompt's log-probabilities need.
        most_tokens = asked.cacheable_tokens if asked.prompt_logprobs is None else 0
        max_blocks = (sys.maxsize if most_tokens is None else most_tokens) // size
        namespace = namespace_digest(
            asked.tenant if settings.isolate_by != "none" else "",
            asked.cache_salt if settings.isolate_by in ("salt", "prompt_cache_key") else None,
            asked.prompt_cache_key if settings.isolate_by == "prompt_cache_key" else None,
            algo=algo,
        )
        root = model_root(self.model.fingerprint, self.kv_spec, namespace, algo=algo)
        ends = asked.read_ends
        read_ends = None if ends is None else [end // size for end in ends]
        hashes = chain_hashes(root, token_ids[: max_blocks * size], size, algo=algo)
        return Prefix(root, namespace, hashes, self._block_claims(asked), max_blocks, read_ends)

    def _block_claims(self, asked: EngineRequest) -> list[BlockClaim]:
        """Cut a request where its claims end; of overlapping claims the longest counts.

        A pin's time begins now.
        """
        now, size, made = self.tiers.clock.now(), self.kv_spec.block_size, list[BlockClaim]()
        for end in sorted({claim.end_token // size for claim in asked.claims}):
            over = [claim for claim in asked.claims if claim.end_token // size >= end]
            names = frozenset(self._policy(claim.retention) for claim in over)
            pin_s = max(claim.pin_s for claim in over)
            made.append(BlockClaim(end, names, now + pin_s if pin_s else 0.0))
        rest = self._policy(asked.retention or self.settings.default_retention)
        return [*made, BlockClaim(sys.maxsize, frozenset({rest}))]

    def _policy(self, name: str) -> str:
        """Return the name of a policy that is given by its name or an alias."""
        return self._policies.get(name, is_any=True).name

    def _launch(self, scheduled: list[ScheduledRow]) -> _Launched | None:
        """Issue a step; while the device computes it, do the work that does not need its tokens."""
        late_event, batch = self.tiers.transfer.late_event, [row.row for row in scheduled]
        if self.cache.is_restoring:
            self.cache.read_ahead(self._timer.issue_s(batch))
        self._timer.begin()
        output = self._runner.execute(batch, late_event)
        self.cache.note_step()
        self._timer.end(batch, teaches=late_event is None)
        rows = [row for row in scheduled if row.row.needs_logits]
        if any(row.row.all_logits for row in scheduled):
            output = _score(scheduled, output)
        launched = None
        if rows:
            states = [row.request.sampler for row in rows]
            sampling = sample(output.logits, states, output.tokens)
            if sampling.token_ids is not output.tokens:
                self._runner.keep_tokens(output, sampling.token_ids)
            launched = _Launched(rows, sampling, output.logits)
        for row in scheduled:
            self.scheduler.complete(row)
        for row in rows:
            request = row.request
            if request.usage is None:
                num_recomputed = int(row.row.write_from > row.start)
                request.usage = request.measure_usage(
                    self.kv_spec.block_size, num_recomputed, self.cache.why_missed
                )
            if not request.touched_at:
                self._touch(request)
        return launched

    def _collect(self) -> None:
        """Take in the tokens of the step that was issued before, if there is one."""
        launched, self._launched = self._launched, None
        if launched is None:
            return
        for index, (row, token) in enumerate(
            zip(launched.rows, launched.sampling.tokens(), strict=True)
        ):
            request = row.request
            if not request.is_running:  # it ended while this token was computed ahead
                continue
            if self.on_logits is not None:
                self.on_logits(request.request_id, launched.logits[index])
            is_first = not request.num_output_tokens
            if is_first:
                request.note_first_token()
            request.append(token.token_id)
            self.scheduler.seal_full_blocks(request)
            finish_reason = self._finish_reason(request, token.token_id)
            logprobs = request.take_scores() if is_first else []
            if token.logprob is not None and request.asked.params.max_tokens:
                logprobs.append(token.logprob)
            output = TokenOutput(
                request_id=request.request_id,
                token_ids=[token.token_id] if request.asked.params.max_tokens else [],
                logprobs=logprobs or None,
                finish_reason=finish_reason,
                usage=request.usage if is_first or finish_reason else None,
            )
            self._outputs.append(output)
            if finish_reason is not None:
                if time.monotonic() - request.touched_at > TOUCH_AGAIN_S:
                    self._touch(request)
                self._finish(request)

    def _take_outputs(self) -> list[TokenOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def _touch(self, request: Request) -> None:
        request.touched_at = time.monotonic()
        self.cache.touch(request.prefix)

    def _finish_reason(self, request: Request, token_id: int) -> str | None:
        state, num_tokens = request.sampler, request.num_output_tokens
        if num_tokens >= state.params.min_tokens and token_id in state.end_token_ids:
            return "stop" if state.params.max_tokens else "length"
        return "length" if num_tokens >= request.max_output_tokens else None

    def _finish(self, request: Request) -> None:
        del self._requests[request.request_id]
        self.scheduler.remove(request)

    def _answer_control(self) -> None:
        """Answer an operator's requests about VRAM and host memory that the worker passed on."""
        while self.cache.control_requests:
            event = self.cache.control_requests.popleft()
            if event.call.verb == "df":
                answer = self.tier_stats()
            else:
                blocks = (map(BlockHash, each) for each in (event.following, event.before))
                answer = self.evict_verb(event.call.wanted, *map(set, blocks))
                if event.call.wanted == EVERYTHING:
                    self.tiers.catalog.note_empty_disk()
            assert self.tiers.store is not None
            self.tiers.store.reply_control(event.id, answer)

    def _open_store(self, arena: HostArena, stack: contextlib.ExitStack) -> StoreClient | None:
        settings = self.settings
        if settings.disk_dir is None:
            return None
        options = StoreOptions(
            path=settings.disk_dir,
            disk_retentions=tuple(each.name for each in settings.policies if each.may_use_disk),
            budget_bytes=settings.disk_size,
            sync=settings.disk_sync,
            write_limit=settings.disk_write_limit,
            compression=settings.disk_compression,
            element_bytes=DTYPE_BYTES[self.kv_spec.dtype],
            sweep_interval_s=settings.sweep_interval,
            clock_offset_file=settings.clock_offset_file,
        )
        store = StoreClient(options, arena, wake=self.wake)
        stack.callback(store.close)
        return store


def _score(scheduled: list[ScheduledRow], output: StepOutput) -> StepOutput:
    """Score the one prompt that is scored in a step, and return the logits of the other rows."""
    index = next(i for i, each in enumerate(scheduled) if each.row.all_logits)
    request, start, end, _ = scheduled[index]
    first = sum(each.row.needs_logits for each in scheduled[:index])
    last = first + end - start
    logits = output.logits[first:last]
    token_ids = to_device(request.token_ids[start + 1 : end + 1], torch.int64, logits.device)
    if not start:  # a preempted request starts again
        request.prompt_scores.clear()
    counts = [request.asked.prompt_logprobs or 0] * (end - start)
    request.prompt_scores.append(score(logits, token_ids, counts))
    others = [*range(first), *range(last, len(output.logits))]
    at = to_device(others, torch.int64, logits.device)
    return StepOutput(*(part[at] for part in output))


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
