"""vLLM's engine without a model and a GPU: scheduler, connector and our tier are the real ones.

vLLM's scheduler decides what is computed, loaded and stored, and both halves of its connector carry
that out. What is made here stands for the loop of vLLM's engine core and for its clients;
`vllm_device` stands for the GPU.
"""

import dataclasses
import importlib
import random
import time
import uuid
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import vllm.config as vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.model_executor.models.registry import ModelRegistry
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.integrations.vllm_device import (
    BLOCK_BYTES,
    IS_OLDER,
    TOKENS,
    VOCABULARY,
    Device,
    Worker,
    answer_to,
)
from tests.integrations.vllm_layers import LayeredWorker, connect, fill
from tieredkv.integrations.vllm_plugin import register

MAX_LENGTH = 4096


class _Model(torch.nn.Module):
    """What vLLM's config looks at, since it wants to know the model's class."""

    def __init__(self, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()

    def embed_input_ids(self, input_ids: Any) -> Any:
        raise NotImplementedError

    def forward(self, input_ids: Any, positions: Any) -> Any:
        raise NotImplementedError

    def compute_logits(self, hidden_states: Any) -> Any:
        raise NotImplementedError


ModelRegistry.register_model("TieredKVTestModel", _Model)
MODEL = {
    "model_type": "llama",
    "architectures": ["TieredKVTestModel"],
    "torch_dtype": "bfloat16",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "vocab_size": VOCABULARY,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": MAX_LENGTH,
}


@dataclasses.dataclass(slots=True)
class Asked:
    """A request, as a client and the worker see it.

    Attributes:
        prompt, length, salt: what is asked for.
        answer: tokens that came.
        cached: tokens that were not computed when it was first scheduled.
        loaded: those of them that were copied from vLLM's memory, if `serve` was called.
        is_over: whether it has ended.
    """

    id: str
    prompt: list[int]
    length: int
    salt: str | None
    answer: list[int] = dataclasses.field(default_factory=list)
    cached: int = -1
    loaded: int = 0
    is_over: bool = False
    is_aborted: bool = False


class VllmEngine:
    """One engine; its store survives it.

    Args:
        model: folder of the weights, with `MODEL` as its config.
        tier: arguments of the tier; None for vLLM alone, which tells whose a fault is.
        num_blocks: blocks of the device.
        num_rows: chunks that vLLM's memory holds.
        ranks: tensor-parallel ranks.
        blocks_per_chunk: blocks of a chunk.
        windows: of each group how many tokens it attends to; None for all.
        is_async: whether a step is scheduled while the one before is executed.
        layers: of the model, in memory that vLLM has planned; instead of `windows`.
        connector: `kv_connector`, of vLLM or ours.
        has_events: whether vLLM publishes its KV cache events.
        max_delay: of how many steps a copy takes at most.
        seed: of how long copies take.
        max_num_seqs: requests that are computed at once.
        step_tokens: tokens that are computed in a step at most.
        extra: more settings of the connector.
    """

    def __init__(
        self,
        model: Path,
        tier: dict[str, Any] | None,
        *,
        num_blocks: int = 64,
        num_rows: int = 64,
        ranks: int = 1,
        blocks_per_chunk: int = 1,
        windows: Sequence[int | None] = (None,),
        layers: Any = None,
        connector: str = "OffloadingConnector",
        is_async: bool = False,
        has_events: bool = False,
        max_delay: int = 0,
        seed: int = 0,
        max_num_seqs: int = 8,
        step_tokens: int = 64,
        **extra: Any,
    ) -> None:
        self.id = f"test-{uuid.uuid4().hex}"
        self.random = random.Random(seed)
        block_bytes = BLOCK_BYTES if layers is None else BLOCK_BYTES * len(layers.specs())
        row_bytes = block_bytes * ranks * blocks_per_chunk
        self._connector, self._layers, self.block_bytes = connector, layers, block_bytes
        register()
        where = {} if IS_OLDER else {"module_path": "tieredkv.integrations.vllm"}
        tiers = [] if tier is None else [{"type": "TieredKVTier", **where, **tier}]
        configs = [
            self._config(
                model,
                {
                    "spec_name": "TieringOffloadingSpec",
                    "offload_prompt_only": False,
                    "cpu_bytes_to_use": num_rows * row_bytes,
                    "blocks_per_chunk": blocks_per_chunk,
                    **extra,
                    "secondary_tiers": tiers,
                },
                (num_blocks, ranks, rank, is_async, has_events, max_num_seqs, step_tokens),
            )
            for rank in range(ranks)
        ]
        if layers is None:
            cache = _cache_config(num_blocks, windows)
        else:
            cache = layers.plan(configs[0], num_blocks)
        block_size, hash_size = kv_cache_utils.resolve_kv_cache_block_sizes(cache, configs[0])
        hash_of = get_hash_fn_by_name(configs[0].cache_config.prefix_caching_hash_algo)
        kv_cache_utils.init_none_hash(hash_of)
        self._hasher = kv_cache_utils.get_request_block_hasher(hash_size, hash_of)
        kind = AsyncScheduler if is_async else Scheduler
        self.scheduler: Any = kind(
            vllm_config=configs[0],
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(configs[0]),
            block_size=block_size,
            hash_block_size=hash_size,
            log_stats=True,
        )
        scheduling: Any = self.scheduler.connector
        self.manager = scheduling.connector_scheduler.manager
        self.tier: Any = next(iter(self.manager.secondary_tiers), None)
        view = self.manager.primary_tier.get_kv_memoryview()
        self._view = np.frombuffer(view, np.uint8)
        rows = self._view.reshape(view.shape)
        halves = list[Any]()
        self.devices = list[Device]()
        for rank, config in enumerate(configs):
            half: Any = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache)
            delay = lambda: self.random.randint(0, max_delay)  # noqa: E731
            halves.append(half)
            if layers is not None:
                self.devices.append(connect(half, cache, rank, delay))
                continue
            self.devices.append(Device(rank, num_blocks, rows, blocks_per_chunk, delay))
            half.connector_worker.worker = self.devices[-1]
        if layers is None:
            self.worker = Worker(halves, self.devices, windows)
        else:
            self.worker = LayeredWorker(halves, self.devices, cache)
            self._shake_hands(scheduling, halves)
        self.num_blocks = num_blocks
        self.events = list[Any]()
        if has_events:
            self.scheduler.kv_event_publisher.publish = lambda batch: self.events.extend(
                batch.events
            )
        self.stats = list[Any]()
        self.asked = dict[str, Asked]()
        self._depth = 2 if is_async else 1
        self._batches = deque[tuple[Any, Any]]()

    def _config(self, model: Path, extra: dict[str, Any], sizes: tuple[Any, ...]) -> Any:
        num_blocks, ranks, rank, is_async, has_events, max_num_seqs, step_tokens = sizes
        cache = vllm_config.CacheConfig(block_size=TOKENS, enable_prefix_caching=True)
        config = vllm_config.VllmConfig(
            model_config=vllm_config.ModelConfig(
                model=str(model),
                skip_tokenizer_init=True,
                dtype="bfloat16",
                max_model_len=MAX_LENGTH,
            ),
            cache_config=cache,
            scheduler_config=vllm_config.SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=step_tokens,
                max_model_len=MAX_LENGTH,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                async_scheduling=is_async,
            ),
            kv_transfer_config=vllm_config.KVTransferConfig(
                kv_connector=self._connector,
                kv_connector_module_path="tieredkv.integrations.vllm_connector"
                if self._connector == "TieredKVConnector"
                else None,
                kv_role="kv_both",
                engine_id=self.id,
                kv_connector_extra_config=extra,
            ),
            kv_events_config=vllm_config.KVEventsConfig(
                enable_kv_cache_events=has_events, publisher="null"
            ),
            parallel_config=vllm_config.ParallelConfig(
                tensor_parallel_size=ranks, distributed_executor_backend="mp"
            ),
            device_config=vllm_config.DeviceConfig("cpu"),
        )
        cache.num_gpu_blocks = num_blocks
        config.parallel_config.rank = rank
        if self._layers is not None:
            self._layers.prepare(config)
        return config

    def _shake_hands(self, connector: Any, halves: list[Any]) -> None:
        """Pass what workers tell the scheduler, as vLLM's engine core and workers do."""
        told = [(rank, half.get_handshake_metadata()) for rank, half in enumerate(halves)]
        content = {(0, rank): each for rank, each in told if each is not None}
        if content:
            connector.set_xfer_handshake_metadata_pp_aware(content)

    # --- what clients do -----------------------------------------------------------------------

    def ask(
        self,
        prompt: Sequence[int],
        retention: str | None = None,
        *,
        length: int = 1,
        salt: str | None = None,
        **params: Any,
    ) -> Asked:
        """Send a request."""
        told = {**({"retention": retention} if retention else {}), **params}
        given: dict[str, Any] = {"kv_transfer_params": {"tieredkv": told}} if told else {}
        asked = Asked(f"request-{len(self.asked)}", [*prompt], length, salt)
        request = Request(
            request_id=asked.id,
            prompt_token_ids=[*prompt],
            sampling_params=SamplingParams(
                max_tokens=length, ignore_eos=True, extra_args={**given, "test_salt": salt}
            ),
            pooling_params=None,
            cache_salt=salt,
            block_hasher=self._hasher,
        )
        self.asked[asked.id] = asked
        self.scheduler.add_request(request)
        return asked

    def abort(self, asked: Asked) -> None:
        asked.is_aborted = asked.is_over = True
        self.scheduler.finish_requests([asked.id], RequestStatus.FINISHED_ABORTED)

    def serve(
        self, prompt: Sequence[int], retention: str | None = None, *, length: int = 1, **more: Any
    ) -> Asked:
        """Send a request, and go on until everything that follows from it has ended."""
        before = self.devices[0].num_loaded
        asked = self.ask(prompt, retention, length=length, **more)
        self.settle()
        asked.loaded = TOKENS * (self.devices[0].num_loaded - before)
        assert asked.answer == answer_to(asked.prompt, length, asked.salt)
        return asked

    # --- steps ---------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._batches) or self.scheduler.has_requests()

    def step(self) -> None:
        """Do as the loop of vLLM's engine core does."""
        is_executed = False
        if self.scheduler.has_requests():
            scheduled = self.scheduler.schedule()
            self._note(scheduled)
            self._batches.append((scheduled, self.worker.execute(scheduled)))
            is_executed = scheduled.total_num_scheduled_tokens > 0
            may_go_on = is_executed or self.scheduler.has_requests()
            if len(self._batches) < self._depth and may_go_on:
                return
        if self._batches:
            outputs = self.scheduler.update_from_output(*self._batches.popleft())
            for each in outputs.values():
                self.stats.append(each.scheduler_stats)
                for told in each.outputs:
                    asked = self.asked[told.request_id]
                    asked.answer += told.new_token_ids
                    asked.is_over |= told.finish_reason is not None
        if not is_executed:
            time.sleep(0.001)

    def _note(self, scheduled: Any) -> None:
        for new in scheduled.scheduled_new_reqs:
            self.asked[new.req_id].cached = new.num_computed_tokens

    def settle(self, timeout_s: float = 60.0) -> None:
        """Go on until vLLM itself sees nothing to do any more."""
        deadline = time.monotonic() + timeout_s
        while self.has_work:
            assert time.monotonic() < deadline, f"the engine does not come to rest: {self.state()}"
            self.step()

    def state(self) -> dict[str, Any]:
        """Return what is still under way."""
        return {
            "requests": {id: each.status.name for id, each in self.scheduler.requests.items()},
            "tier": self.tier and [*self.tier._rows._jobs, *self.tier._rows._lookups],
            "connector": [*self.scheduler.connector.connector_scheduler._jobs],
        }

    def check_at_rest(self) -> None:
        """Assert that nothing is held any more: no request, no block, no row."""
        assert not self.has_work and not self.scheduler.requests
        for asked in self.asked.values():
            right = answer_to(asked.prompt, asked.length, asked.salt)
            assert asked.is_over and asked.answer == right[: len(asked.answer)]
            assert asked.is_aborted or asked.answer == right, f"{asked.id} is not complete"
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        assert free == self.num_blocks - 1, "blocks of the device are held"
        primary = self.manager.primary_tier
        held = [key for key, each in _chunks(primary._policy) if each.ref_cnt != 0]
        assert not held, f"{len(held)} rows are held"
        connector, tier = self.scheduler.connector.connector_scheduler, self.tier
        empty: list[tuple[Any, tuple[str, ...]]] = [
            (connector, ("_jobs", "_req_status", "_block_id_to_pending_jobs")),
            (self.manager, ("_transfer_jobs", "_req_state", "_pending_load_submissions")),
        ]
        if tier is not None:
            empty += [
                (tier, ("_requests", "_keys", "_asking", "_finished")),
                (tier._rows, ("_jobs", "_lent", "_unlent", "_lookups", "_num_stored_rows")),
                (tier._chooser, ("_loads",)),
                (tier._chooser.meter, ("_prompts",)),
            ]
        for whole, names in empty:
            for name in names:
                assert not getattr(whole, name), f"{name} of {type(whole).__name__} is not empty"

    # --- memories ------------------------------------------------------------------------------

    def forget_device(self) -> None:
        """Have the device's prefix cache forget all."""
        assert self.scheduler.reset_prefix_cache()
        for device in self.devices:
            device.forget()

    def forget(self) -> None:
        """Have the device and vLLM's memory forget all."""
        assert self.scheduler.reset_prefix_cache(reset_connector=True)
        self.settle()
        for device in self.devices:
            device.forget()
        fill(self._view)

    def close(self) -> None:
        """Stop, whatever is under way."""
        del self._view
        for device in self.devices:
            device.shutdown()
        self.scheduler.shutdown()
        assert not Path(f"/dev/shm/vllm_offload_{self.id}.mmap").exists()


def specs_of(windows: Sequence[int | None]) -> dict[str, Any]:
    """Return a layer for each window, or for full attention where it is None."""
    shape: Any = {"block_size": TOKENS, "num_kv_heads": 4, "head_size": 16, "dtype": torch.bfloat16}
    return {
        f"layers.{at}": FullAttentionSpec(**shape)
        if window is None
        else SlidingWindowSpec(**shape, sliding_window=window)
        for at, window in enumerate(windows)
    }


def groups_of(config: Any, specs: dict[str, Any]) -> list[Any]:
    """Return the groups that vLLM itself makes of layers."""
    name = "vllm.v1.core.kv_cache_utils" if IS_OLDER else "vllm.v1.core.kv_cache_planning"
    groups: list[Any] = importlib.import_module(name).get_kv_cache_groups(config, specs)
    return groups


def _cache_config(num_blocks: int, windows: Sequence[int | None]) -> Any:
    """Return one layer for each group; all groups share the blocks."""
    by_name = specs_of(windows)
    names, specs = [*by_name], [*by_name.values()]
    assert {each.page_size_bytes for each in specs} == {BLOCK_BYTES}
    size = num_blocks * BLOCK_BYTES
    if IS_OLDER:
        tensors = [KVCacheTensor(size=size, shared_by=names)]
    else:
        strides = {"layer_stride": size, "block_stride": BLOCK_BYTES}
        tensors = [KVCacheTensor(size=size, layers=[name], **strides) for name in names]
    groups = [KVCacheGroupSpec([name], spec) for name, spec in zip(names, specs, strict=True)]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)


def _chunks(policy: Any) -> list[tuple[Any, Any]]:
    """Return what vLLM's memory holds, by key."""
    names = [name for name in ("blocks", "chunks", "_chunks") if hasattr(policy, name)]
    return [*getattr(policy, names[0]).items()]
