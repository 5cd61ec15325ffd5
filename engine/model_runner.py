"""Runs one step of a batch through the model over the paged cache, and sizes that cache.

It is handed token ids and block tables and gives back logits. It knows neither requests nor
sampling, and of blocks only their ids.
"""

import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tieredkv.engine.attention import CONTEXT_ARGUMENT, AttentionContext, StepMetadata
from tieredkv.engine.loader import LoadedModel
from tieredkv.engine.suitability import TESTED_MODEL_TYPES
from tieredkv.errors import ConfigError, ModelError
from tieredkv.kernels.launch import Span
from tieredkv.types import KVSpec

logger = logging.getLogger(__name__)

_ALIGNMENT_BYTES = 16
_MAX_PAGING_ERROR = 0.1
"""Of the logits' spread: far above what rounding does in bfloat16, far below a wrong context."""

_SLACK_BYTES = 256 << 20
"""Kept free beside the measured peak, for fragments and what libraries allocate later."""


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One request's share of a step.

    Attributes:
        token_ids: the tokens of positions [start, start + len); `array("i")` is read fastest.
        start: position of the first of them; everything before it is in the cache.
        block_table: ids of the blocks that hold positions from 0 on, as far as the last token or
            further; `array("i")` is read fastest.
        write_from: keys and values of positions below it are there already and are not written.
        needs_logits: give logits of the last token.
        all_logits: give logits of every token.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    write_from: int = 0
    needs_logits: bool = True
    all_logits: bool = False

    @property
    def context_len(self) -> int:
        """Tokens that the last of the row's tokens sees, itself included."""
        return self.start + len(self.token_ids)


def make_kv_pool(kv_spec: KVSpec, num_blocks: int, device: torch.device) -> Tensor:
    """Allocate a device pool, `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`.

    On the CPU it is zeroed, which also makes the operating system hand out its pages.
    """
    make = torch.zeros if device.type == "cpu" else torch.empty
    return make(
        num_blocks,
        kv_spec.num_layers,
        2,
        kv_spec.block_size,
        kv_spec.num_kv_heads,
        kv_spec.head_dim,
        dtype=getattr(torch, kv_spec.dtype),
        device=device,
    )


class ModelRunner:
    """Forward passes of one model over one pool; one thread calls it.

    The pool belongs to the caller. Steps are issued in order on the current stream, and nothing
    waits for the device, except for the upload of the step before.
    """

    def __init__(self, loaded: LoadedModel, kv_pool: Tensor, kv_spec: KVSpec) -> None:
        self._loaded = loaded
        self._kv_spec = kv_spec
        self._device = loaded.device
        self._block_size = kv_spec.block_size
        self._context = AttentionContext(kv_pool)
        self._upload = _Upload(self._device)

    @torch.inference_mode()
    def execute(self, rows: Sequence[BatchRow]) -> Tensor:
        """Compute the rows' tokens, write their keys and values, and give the logits asked for.

        Rows of one token go through decode attention, others through prefill attention; rows may
        come in any order and mix.

        Args:
            rows: at least one, each with at least one token.

        Returns:
            [num_logits, vocab_size] float32 on the device, in the order of the rows: one for a row
            with `needs_logits`, one per token for a row with `all_logits`, none for others.
        """
        tokens, positions, kept, step = self._prepare(rows)
        self._context.step = step
        try:
            if self._loaded.fused is not None:
                return self._loaded.fused.forward(tokens, positions, kept, self._context).float()
            output = self._loaded.model(
                input_ids=tokens[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=kept,
                **{CONTEXT_ARGUMENT: self._context.handle},
            )
        finally:
            self._context.step = None
        logits: Tensor = output.logits[0]
        return logits.float()

    def _prepare(self, rows: Sequence[BatchRow]) -> tuple[Tensor, Tensor, Tensor, StepMetadata]:
        """Lay a step out, decode rows first, and upload it in one copy.

        Returns:
            Token ids and positions [num_tokens], the indices of the tokens whose logits are wanted,
            and where everything stands in the cache.
        """
        for row in rows:
            assert len(row.token_ids) > 0, "a row without tokens"
            assert len(row.block_table) * self._block_size >= row.context_len, (
                f"{len(row.block_table)} blocks for {row.context_len} tokens"
            )
        decodes = [row for row in rows if len(row.token_ids) == 1]
        prefills = [row for row in rows if len(row.token_ids) > 1]
        decode_tables, decode_lens = self._tables(decodes)
        prefill_tables, prefill_lens = self._tables(prefills)
        lengths = np.array([len(row.token_ids) for row in prefills], dtype=np.int32)
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        tokens, positions, slots = self._flatten(decodes, prefills, decode_tables, prefill_tables)
        assert 0 <= tokens.min() <= tokens.max() < self._loaded.vocab_size, "unknown token ids"
        uploaded = self._upload(
            tokens,
            positions,
            slots,
            _kept_indices(rows, len(decodes), starts),
            decode_tables,
            decode_lens,
            prefill_tables,
            prefill_lens,
            starts,
        )
        step = StepMetadata(
            slot_mapping=uploaded[2],
            num_decodes=len(decodes),
            decode_block_tables=uploaded[4],
            decode_context_lens=uploaded[5],
            max_decode_context_len=int(decode_lens.max(initial=0)),
            prefill_block_tables=uploaded[6],
            prefill_context_lens=uploaded[7],
            query_start_lens=uploaded[8],
            spans=[Span(len(row.token_ids), row.context_len) for row in prefills],
        )
        return uploaded[0], uploaded[1], uploaded[3], step

    def _tables(self, rows: Sequence[BatchRow]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Pad the rows' block tables to one width; the padding is never read."""
        lens = np.array([row.context_len for row in rows], dtype=np.int32)
        widths = -(-lens // self._block_size)
        tables = np.zeros((len(rows), int(widths.max(initial=1))), dtype=np.int32)
        for table, row, width in zip(tables, rows, widths.tolist(), strict=True):
            table[:width] = row.block_table[:width]
        return tables, lens

    def _flatten(
        self,
        decodes: Sequence[BatchRow],
        prefills: Sequence[BatchRow],
        decode_tables: NDArray[np.int32],
        prefill_tables: NDArray[np.int32],
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Give token ids, positions and slots of all tokens; decode rows without a loop each."""
        starts = np.array([row.start for row in decodes], dtype=np.int64)
        write_from = np.array([row.write_from for row in decodes], dtype=np.int64)
        blocks = decode_tables[np.arange(len(decodes)), starts // self._block_size]
        tokens = [np.array([row.token_ids[0] for row in decodes], dtype=np.int64)]
        positions = [starts]
        slots = [self._slots(blocks, starts, write_from)]
        for row, table in zip(prefills, prefill_tables, strict=True):
            at = np.arange(row.start, row.context_len, dtype=np.int64)
            tokens.append(np.asarray(row.token_ids, dtype=np.int64))
            positions.append(at)
            slots.append(self._slots(table[at // self._block_size], at, row.write_from))
        return np.concatenate(tokens), np.concatenate(positions), np.concatenate(slots)

    def _slots(
        self,
        blocks: NDArray[np.int32],
        positions: NDArray[np.int64],
        write_from: NDArray[np.int64] | int,
    ) -> NDArray[np.int64]:
        slots = blocks.astype(np.int64) * self._block_size + positions % self._block_size
        return np.where(positions < write_from, -1, slots)

    def warm_up(
        self,
        *,
        max_num_batched_tokens: int,
        max_context_len: int,
        progress: Callable[[str, float], None] | None = None,
    ) -> None:
        """Compile and load what a first request would wait for; writes nothing to the pool.

        Args:
            max_num_batched_tokens: tokens of the largest step.
            max_context_len: the longest context that will be served.
            progress: told what is being done and how far it is.

        Raises:
            ModelError: the model's type is not among the tested ones and fails `check_paging`.
        """
        if self._loaded.config.model_type not in TESTED_MODEL_TYPES:
            check_paging(self._loaded, self._kv_spec)
        chunk = min(max_num_batched_tokens, max_context_len)
        far = max_context_len - 1
        steps = [[self.idle_row(2, 0), self.idle_row(1, 0)]]
        if self._device.type == "cuda":
            steps += [[self.idle_row(1, start)] for start in {min(n, far) for n in (15, 1023, far)}]
            steps += [[self.idle_row(1, min(100, far))] * n for n in (2, 16, 64)]
            sizes = {min(1 << n, chunk) for n in range(4, 17)} - {1}
            steps += [[self.idle_row(size, 0)] for size in sizes]
            steps += [[self.idle_row(size, max_context_len - size)] for size in sizes]
        for i, step in enumerate(steps):
            if progress is not None:
                progress("warming up", i / len(steps))
            self.execute(step)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if progress is not None:
            progress("warming up", 1.0)

    def idle_row(self, num_tokens: int, start: int) -> BatchRow:
        """Make a row that computes something of this size over block 0 and writes nothing."""
        end = start + num_tokens
        table = array("i", bytes(4 * -(-end // self._block_size)))
        return BatchRow([0] * num_tokens, start, table, write_from=end)


def check_paging(loaded: LoadedModel, kv_spec: KVSpec) -> None:
    """See that a prompt in pieces, beside another one, gives the logits of the prompt as a whole.

    It does not where tokens meet outside of attention: in a convolution, a token shift, or
    positions that are counted instead of read.

    Raises:
        ModelError: it does not.
    """
    num_tokens, num_blocks = 24, -(-24 // kv_spec.block_size)
    pool = make_kv_pool(kv_spec, 2 * num_blocks, loaded.device).zero_()
    runner = ModelRunner(loaded, pool, kv_spec)
    draw = np.random.default_rng(0)
    ids, other = draw.integers(0, loaded.vocab_size, (2, num_tokens)).tolist()
    table, beside = list(range(num_blocks)), list(range(num_blocks, 2 * num_blocks))
    whole = runner.execute([BatchRow(ids, 0, table, all_logits=True)])
    pool.zero_()
    parts = [
        runner.execute(
            [
                BatchRow(other[start:end], start, beside, needs_logits=False),
                BatchRow(ids[start:end], start, table, all_logits=True),
            ]
        )
        for start, end in ((0, 11), (11, 12), (12, num_tokens))
    ]
    error = (torch.cat(parts) - whole).abs().mean() / whole.std()
    if not error < _MAX_PAGING_ERROR:
        raise ModelError(
            f"model `{loaded.name}` cannot be served: in pieces a prompt gives other logits than "
            f"as a whole, so `{loaded.config.model_type}` mixes tokens outside of attention"
        )


def _kept_indices(
    rows: Sequence[BatchRow], num_decodes: int, prefill_starts: NDArray[np.int32]
) -> NDArray[np.int64]:
    """Find where in the flattened step the tokens stand whose logits are wanted, rows in order."""
    next_decode, next_prefill = 0, 0
    kept: list[int] = []
    for row in rows:
        length = len(row.token_ids)
        if length == 1:
            first = next_decode
            next_decode += 1
        else:
            first = num_decodes + int(prefill_starts[next_prefill])
            next_prefill += 1
        if row.all_logits:
            kept.extend(range(first, first + length))
        elif row.needs_logits:
            kept.append(first + length - 1)
    return np.array(kept, dtype=np.int64)


class _Upload:
    """Copies a step's arrays to the device in one piece, through pinned memory.

    The device buffer keeps its address until a larger step comes, as CUDA graphs need it. The
    stream's order protects it; an event protects the pinned side from the next step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = torch.empty(0, dtype=torch.uint8)
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def __call__(self, *parts: NDArray[np.int32] | NDArray[np.int64]) -> list[Tensor]:
        """Give each array as a tensor on the device; valid until the next call."""
        if self._copied is None:
            return [torch.from_numpy(part) for part in parts]
        starts, end = [], 0
        for part in parts:
            starts.append(end)
            end += -(-part.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._copied.synchronize()
        if end > self._pinned.numel():
            capacity = 1 << (end - 1).bit_length()
            self._pinned = torch.empty(capacity, dtype=torch.uint8, pin_memory=True)
            self._buffer = torch.empty(capacity, dtype=torch.uint8, device=self._device)
        host = self._pinned.numpy()
        for part, start in zip(parts, starts, strict=True):
            host[start : start + part.nbytes] = np.ascontiguousarray(part).view(np.uint8).ravel()
        self._buffer[:end].copy_(self._pinned[:end], non_blocking=True)
        self._copied.record()
        return [
            self._buffer[start : start + part.nbytes]
            .view(torch.int32 if part.dtype == np.int32 else torch.int64)
            .view(part.shape)
            for part, start in zip(parts, starts, strict=True)
        ]


def profile_peak_bytes(
    loaded: LoadedModel, kv_spec: KVSpec, *, max_num_batched_tokens: int, max_num_seqs: int
) -> int:
    """Measure the device memory that the largest steps take beside weights and pool.

    Two steps are run over a pool of one block: many requests with logits each, and one chunk at
    the end of the longest context.
    """
    runner = ModelRunner(loaded, make_kv_pool(kv_spec, 1, loaded.device), kv_spec)
    num_rows = min(max_num_seqs, max_num_batched_tokens)
    share = min(max_num_batched_tokens // num_rows, loaded.max_model_len)
    chunk = min(max_num_batched_tokens, loaded.max_model_len)
    steps = (
        [runner.idle_row(share, 0)] * num_rows,
        [runner.idle_row(chunk, loaded.max_model_len - chunk)],
    )
    runner.execute([runner.idle_row(1, 0)])
    torch.cuda.synchronize(loaded.device)
    torch.cuda.reset_peak_memory_stats(loaded.device)
    before_bytes = torch.cuda.memory_allocated(loaded.device)
    for step in steps:
        runner.execute(step)
    torch.cuda.synchronize(loaded.device)
    return torch.cuda.max_memory_allocated(loaded.device) - before_bytes


def num_device_blocks(
    loaded: LoadedModel,
    kv_spec: KVSpec,
    *,
    gpu_memory_utilization: float,
    max_num_batched_tokens: int,
    max_num_seqs: int,
) -> int:
    """Count the blocks that fit on the device beside weights, activations and other processes.

    Raises:
        ConfigError: not even one fits.
    """
    peak_bytes = profile_peak_bytes(
        loaded, kv_spec, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs
    )
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(loaded.device)
    used_bytes = total_bytes - free_bytes
    spare_bytes = int(total_bytes * gpu_memory_utilization) - used_bytes
    num_blocks = (spare_bytes - peak_bytes - _SLACK_BYTES) // kv_spec.block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"gpu_memory_utilization {gpu_memory_utilization} of {total_bytes >> 20} MiB leaves no "
            f"room for KV blocks: {used_bytes >> 20} MiB are in use and a step takes "
            f"{peak_bytes >> 20} MiB\nhint: raise it, or lower max_num_batched_tokens"
        )
    return num_blocks
