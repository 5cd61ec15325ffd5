"""A GPU that has the layers of a model, laid out as vLLM lays them out.

vLLM itself groups the layers, places them in the device's memory and says which bytes of a row each
group copies; here they are only copied. Attention layers hold the bytes of each token, recurrent
ones the state behind the last one, as `vllm_device` has them. What nobody has written is a mark.
"""

import hashlib
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from tests.integrations.vllm_device import TOKENS, Device, Text, Worker

MARK = b"of another tenant"
_SHAPE: Any = {"block_size": TOKENS, "num_kv_heads": 4, "head_size": 16, "dtype": torch.bfloat16}


class Layers(NamedTuple):
    """The layers of a kind of model, in their order, and what vLLM is told besides.

    Attributes:
        names: of each layer what it is: `full`, `window`, `state` or `latent`.
        window: tokens that a window has.
        match_unit: `--prefix-match-unit`.
        is_hybrid_off: `--disable-hybrid-kv-cache-manager`.
        layout: of the device's memory.
        draft_tokens: for which states have room.
        state_dtype: of the larger part of a state.
    """

    names: str
    window: int = 40
    match_unit: int | None = None
    is_hybrid_off: bool = False
    layout: str = "LBHNC"
    draft_tokens: int = 0
    state_dtype: str = "float32"

    def specs(self) -> dict[str, Any]:
        """Return what vLLM knows of each layer."""
        attention = FullAttentionSpec(**_SHAPE)
        state = MambaSpec(
            block_size=TOKENS,
            shapes=((3, 64), (2, 16, 16)),
            dtypes=(torch.bfloat16, getattr(torch, self.state_dtype)),
            page_size_padded=attention.page_size_bytes,
            mamba_cache_mode="align",
            num_speculative_blocks=self.draft_tokens,
        )
        kinds = {
            "full": attention,
            "window": SlidingWindowSpec(**_SHAPE, sliding_window=self.window),
            "state": state,
            "latent": MLAAttentionSpec(
                **{**_SHAPE, "num_kv_heads": 1, "head_size": 128}, max_tp_shards=1
            ),
        }
        return {f"layers.{at}": kinds[name] for at, name in enumerate(self.names.split())}

    def prepare(self, config: Any) -> None:
        """Tell vLLM's config of the layers."""
        cache: dict[str, Any] = {
            "kv_cache_layout": self.layout,
            "prefix_match_unit": self.match_unit,
        }
        if "state" in self.names:
            cache |= {"mamba_cache_mode": "align", "mamba_block_size": TOKENS}
        for name, value in cache.items():
            setattr(config.cache_config, name, value)
        config.scheduler_config.disable_hybrid_kv_cache_manager = self.is_hybrid_off

    def plan(self, config: Any, num_blocks: int) -> Any:
        """Return vLLM's plan of a device's memory with so many blocks."""
        planning = importlib.import_module("vllm.v1.core.kv_cache_planning")
        groups = planning.get_kv_cache_groups(config, self.specs())
        layout = config.cache_config.get_resolved_kv_cache_layout()
        num_bytes = num_blocks * planning._get_kv_cache_bytes_per_block(groups, layout)
        cache = planning.get_kv_cache_config_from_groups(config, groups, num_bytes)
        ranks = config.parallel_config.tensor_parallel_size
        cache.kv_tp_replicas = planning.kv_cache_groups_tp_replicas(groups, ranks, 1)
        return cache


def connect(half: Any, cache: Any, rank: int, delay: Callable[[], int]) -> "LayeredDevice":
    """Give a worker's half of the connector a device with the memory that vLLM has planned."""
    memory = torch.zeros(cache.kv_cache_tensors[0].size, dtype=torch.int8)
    fill(memory.numpy().view(np.uint8))
    views = dict[str, Any]()
    specs = _specs_of(cache)
    for tensor in cache.kv_cache_tensors:
        for at, name in enumerate(tensor.layers):
            first = tensor.offset + at * tensor.layer_stride
            shape = (cache.num_blocks, specs[name].page_size_bytes)
            views[name] = memory.as_strided(shape, (tensor.block_stride, 1), first)
    spec = half.connector_worker.spec
    names = vars(importlib.import_module(type(spec).__module__))
    kind, names["CPUOffloadingWorker"] = names["CPUOffloadingWorker"], LayeredDevice
    spec.get_worker = spec.create_worker  # that checks for a GPU first
    try:
        half.register_kv_caches(views)
    finally:
        names["CPUOffloadingWorker"] = kind
    device: LayeredDevice = half.connector_worker.worker
    device.rank, device.memory, device._delay = rank, memory, delay
    device.layers = {name: view.numpy().view(np.uint8) for name, view in views.items()}
    return device


def _specs_of(cache: Any) -> dict[str, Any]:
    return {
        name: group.kv_cache_spec for group in cache.kv_cache_groups for name in group.layer_names
    }


def fill(memory: np.ndarray) -> None:
    """Fill bytes with the mark."""
    memory[:] = np.resize(np.frombuffer(MARK, np.uint8), memory.size)


class LayeredDevice(Device):
    """The layers of one rank; it is made where vLLM makes the worker that copies.

    Attributes:
        layers: the pages of each layer, [blocks, bytes].
        copied: digests of what each group has copied to rows, with which loads are compared;
            devices may share them.
    """

    layers: dict[str, np.ndarray]
    memory: torch.Tensor

    def __init__(
        self,
        kv_caches: Any,
        blocks_per_chunk: int,
        num_cpu_chunks: int,
        mmap_region: Any,
        canonical_layout: bool,
    ) -> None:
        super().__init__(0, 1, np.zeros((1, 1), np.uint8), 1, lambda: 0)
        assert not canonical_layout
        self._region, self._span = mmap_region, blocks_per_chunk
        self._refs = kv_caches.group_data_refs
        self._pages = [it.tensor.numpy().view(np.uint8) for it in kv_caches.tensors]
        self._cells = [
            mmap_region.create_next_worker_view(it.page_size_bytes * blocks_per_chunk)
            .numpy()
            .view(np.uint8)
            for it in kv_caches.tensors
        ]
        self.copied = set[tuple[int, bytes]]()

    def forget(self) -> None:
        """Have all memory of the device hold the mark."""
        fill(self.memory.numpy().view(np.uint8))

    def _end_first(self) -> None:
        id, is_load, device, host = self._jobs.popleft()
        chunks, blocks = [*map(int, host.block_ids)], iter(map(int, device.block_ids))
        begin = num = 0
        for group, (size, first) in enumerate(
            zip(device.group_sizes, device.block_indices, strict=True)
        ):
            skipped = first % self._span
            for at in range(skipped, skipped + size) if size else ():
                self._copy(group, next(blocks), chunks[begin + at // self._span], at, is_load)
                num += 1
            begin += -(-(skipped + size) // self._span) if size else 0
        assert begin == len(chunks) and next(blocks, None) is None
        self.num_loaded += is_load * num
        self.num_stored += (not is_load) * num
        self._ended.append(_result(id, num))
        self._wait = self._delay()

    def _copy(self, group: int, block: int, chunk: int, at: int, is_load: bool) -> None:
        digest = hashlib.blake2b()
        for ref in self._refs[group]:
            page, cells = self._pages[ref.tensor_idx], self._cells[ref.tensor_idx]
            first = at % self._span * (cells.shape[1] // self._span)
            cell = cells[chunk, first : first + ref.page_size_bytes]
            here = page[block, : ref.page_size_bytes]
            if is_load:
                here[:] = cell
            else:
                cell[:] = here
            digest.update(cell.tobytes())
        copy = group, digest.digest()
        if is_load:
            assert copy in self.copied, f"group {group} loads what it has never stored"
        else:
            self.copied.add(copy)

    def shutdown(self) -> None:
        self._cells.clear()
        self._region.cleanup()


def _result(id: int, num: int) -> Any:
    result = importlib.import_module("vllm.v1.kv_offload.base").TransferResult
    return result(id, True, num, 1e-3)


class LayeredWorker(Worker):
    """Computes layers as vLLM's model runners do, states in mode `align` among them."""

    def __init__(self, connectors: list[Any], devices: Sequence[LayeredDevice], cache: Any) -> None:
        groups = [(group.layer_names, group.kv_cache_spec) for group in cache.kv_cache_groups]
        super().__init__(connectors, [*devices], [None] * len(groups))
        self._groups = groups
        self._numbers = {name: at for at, name in enumerate(sorted(_specs_of(cache)))}
        self._state_at = dict[str, int]()  # by request: the place of the block with its state

    def execute(self, scheduled: Any) -> Any:
        for id in {*scheduled.finished_req_ids, *(scheduled.preempted_req_ids or ())}:
            self._state_at.pop(id, None)
        return super().execute(scheduled)

    def _before(self, scheduled: Any) -> None:
        for copy in scheduled.kv_cache_block_copies or ():
            for device in self._devices:
                for pages in device.layers.values():
                    pages[copy.dst_block_id] = pages[copy.src_block_id]

    def _right(self, text: Text, name: str, spec: Any, begin: int, end: int, rank: int) -> Any:
        """Return what a layer must hold of tokens, or of the state behind the last of them."""
        number = self._numbers[name]
        rank = 0 if isinstance(spec, MLAAttentionSpec) else rank  # it is the same on all
        if not isinstance(spec, MambaSpec):
            return text.slots(begin, end, number, rank)
        size = sum(
            int(np.prod(shape)) * dtype.itemsize
            for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
        )
        return np.resize(text.slots(end - 1, end, number, rank), size)

    def _write(self, running: Any, begin: int, end: int) -> None:
        assert begin < end <= len(running.text.tokens)
        at, id = np.arange(begin, end), running.id
        last, now = self._state_at.get(id, (begin - 1) // TOKENS), (end - 1) // TOKENS
        self._state_at[id] = now
        for table, (names, spec) in zip(running.tables, self._groups, strict=True):
            blocks = np.array(table)
            for device in self._devices:
                for name in names:
                    pages = device.layers[name]
                    new = self._right(running.text, name, spec, begin, end, device.rank)
                    if not isinstance(spec, MambaSpec):
                        slots = pages.reshape(len(pages), TOKENS, -1)
                        slots[blocks[at // TOKENS], at % TOKENS] = new
                        continue
                    if begin:
                        state = self._right(running.text, name, spec, 0, begin, device.rank)
                        held = pages[blocks[last], : len(state)]
                        assert (held == state).all(), f"wrong state before token {begin} of {name}"
                        self.num_checked += 1
                    assert blocks[now] != 0
                    pages[blocks[now], : len(new)] = new

    def _check(self, running: Any, end: int) -> None:
        for table, (names, spec) in zip(running.tables, self._groups, strict=True):
            if isinstance(spec, MambaSpec):
                continue  # it was looked at where it was continued
            window = getattr(spec, "sliding_window", None)
            first = 0 if window is None else max(0, end + 1 - window)
            blocks, at = np.array(table), np.arange(first, end)
            for device in self._devices if first < end else ():
                for name in names:
                    right = self._right(running.text, name, spec, first, end, device.rank)
                    pages = device.layers[name]
                    slots = pages.reshape(len(pages), TOKENS, -1)
                    is_wrong = (slots[blocks[at // TOKENS], at % TOKENS] != right).any(1)
                    wrong = [*map(int, at[is_wrong])]
                    assert not wrong, f"wrong bytes at tokens {wrong} of {name}"
                    self.num_checked += len(at)
