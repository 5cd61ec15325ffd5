"""The GPU of an engine of vLLM that has none, and a model whose bytes everybody knows.

`Device` has the blocks of one rank. Computing a token writes bytes that follow from all tokens up
to it, from the salt, the group and the rank. So whatever a step attends to is compared with what it
must be, whether it was computed or loaded. Copies between the device and vLLM's memory are made as
late as vLLM can bear it, at the end of their jobs.
"""

import copy
import dataclasses
import hashlib
import importlib.metadata
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

TOKENS = 16
"""Tokens of a block."""

SLOT_BYTES = 256
"""Bytes of a token in one group of one rank."""

BLOCK_BYTES = TOKENS * SLOT_BYTES
VOCABULARY = 1000

IS_OLDER = tuple(map(int, importlib.metadata.version("vllm").split(".")[:2])) < (0, 33)
"""Whether it is vLLM 0.26."""


# --- what is right ------------------------------------------------------------------------------


class Text:
    """Tokens of a request, and the state of a model that has read them."""

    def __init__(self, tokens: Sequence[int], salt: str | None) -> None:
        self.salt = salt
        self.tokens = list[int]()
        self._states = list[bytes]()
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        before = self._states[-1] if self._states else (self.salt or "").encode()
        self._states.append(hashlib.blake2b(before + token.to_bytes(4), digest_size=32).digest())
        self.tokens.append(token)

    def slots(self, begin: int, end: int, group: int, rank: int) -> np.ndarray:
        """Return the right bytes of tokens, [end - begin, SLOT_BYTES]."""
        states = np.frombuffer(b"".join(self._states[begin:end]), np.uint8).reshape(-1, 32)
        return np.tile(states, SLOT_BYTES // 32) ^ np.uint8(16 * group + rank)

    def next_token(self, length: int) -> int:
        """Return what the model says after the first tokens."""
        return int.from_bytes(self._states[length - 1][:4]) % VOCABULARY


def answer_to(prompt: Sequence[int], length: int, salt: str | None = None) -> list[int]:
    """Return the right answer."""
    text = Text(prompt, salt)
    for _ in range(length):
        text.append(text.next_token(len(text.tokens)))
    return text.tokens[len(prompt) :]


# --- the GPU ------------------------------------------------------------------------------------


class Device(OffloadingWorker):  # type: ignore[misc]
    """The blocks of one rank, and its copies to and from vLLM's memory.

    Args:
        rank: number of the rank.
        num_blocks: blocks.
        rows: vLLM's memory, [chunks, bytes of a chunk of all ranks].
        blocks_per_chunk: blocks of a chunk.
        delay: tells for how many steps a copy takes.
    """

    def __init__(
        self,
        rank: int,
        num_blocks: int,
        rows: np.ndarray,
        blocks_per_chunk: int,
        delay: Callable[[], int],
    ) -> None:
        self.rank = rank
        self.blocks = np.zeros((num_blocks, TOKENS, SLOT_BYTES), np.uint8)
        width = BLOCK_BYTES * blocks_per_chunk
        part = rows[:, rank * width : (rank + 1) * width]
        self._chunks = [
            part[:, at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES] for at in range(blocks_per_chunk)
        ]
        self._delay = delay
        self._jobs = deque[tuple[int, bool, Any, Any]]()
        self._ended = list[TransferResult]()
        self._wait = 0
        self.num_loaded = self.num_stored = 0

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._submit(job_id, False, src_spec, dst_spec)
        return True

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        self._submit(job_id, True, dst_spec, src_spec)
        return True

    def _submit(self, id: int, is_load: bool, device: Any, host: Any) -> None:
        if not self._jobs:
            self._wait = self._delay()
        self._jobs.append((id, is_load, device, host))

    def get_finished(self) -> list[TransferResult]:
        while self._jobs and self._wait <= 0:
            self._end_first()
        self._wait -= 1
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        while any(job[0] in job_ids for job in self._jobs):
            self._end_first()

    def forget(self) -> None:
        """Have all memory of the device hold what nobody asked for."""
        self.blocks[:] = 255

    def shutdown(self) -> None:
        """Give vLLM's memory back."""
        self._chunks.clear()

    def _end_first(self) -> None:
        id, is_load, device, host = self._jobs.popleft()
        pairs = self._pairs(device, [*map(int, host.block_ids)])
        for block, (chunk, part) in pairs:
            here, there = self.blocks[block].reshape(-1), self._chunks[part][chunk]
            if is_load:
                here[:] = there
            else:
                there[:] = here
        self.num_loaded += is_load * len(pairs)
        self.num_stored += (not is_load) * len(pairs)
        self._ended.append(TransferResult(id, True, len(pairs) * BLOCK_BYTES, 1e-3))
        self._wait = self._delay()

    def _pairs(self, device: Any, chunks: list[int]) -> list[tuple[int, tuple[int, int]]]:
        """Return which block of the device is which part of a chunk."""
        pairs, span, begin = list[tuple[int, tuple[int, int]]](), len(self._chunks), 0
        blocks = iter(map(int, device.block_ids))
        for size, first in zip(device.group_sizes, device.block_indices, strict=True):
            if not size:
                continue
            skipped = first % span
            places = range(skipped, skipped + size)
            pairs += [(next(blocks), (chunks[begin + at // span], at % span)) for at in places]
            begin += -(-(skipped + size) // span)
        assert begin == len(chunks)
        return pairs


@dataclasses.dataclass(slots=True)
class _Running:
    """What a worker knows of a request."""

    id: str
    text: Text
    tables: list[list[int]]


class Worker:
    """Carries out what the scheduler decides, on all ranks.

    Args:
        connectors: the worker's half of the connector of each rank.
        devices: of each rank.
        windows: how many tokens each group attends to; None for all.

    Attributes:
        num_checked: tokens of which the bytes were compared.
        pace: how many seconds it takes to compute tokens, by the first one and the one behind them;
            None for as fast as it goes.
    """

    def __init__(
        self, connectors: list[Any], devices: list[Device], windows: Sequence[int | None]
    ) -> None:
        self._connectors, self._devices, self._windows = connectors, devices, windows
        self._aggregator = KVOutputAggregator(len(devices))
        self._running = dict[str, _Running]()
        self.num_checked = 0
        self.pace: Callable[[int, int], float] | None = None

    def execute(self, scheduled: Any) -> Any:
        """Execute one step."""
        for each in self._connectors:
            told = copy.deepcopy(scheduled.kv_connector_metadata)  # each rank changes its own
            each.handle_preemptions(told)
            each.bind_connector_metadata(told)
        is_sync = getattr(scheduled, "has_sync_kv_loads", False)
        if is_sync or IS_OLDER:
            self._start_copies()
        ids, tokens = self._compute(scheduled)
        if not (is_sync or IS_OLDER):
            self._start_copies()
        outputs = list[Any]()
        for each in self._connectors:
            each.wait_for_save()
            _, received = each.get_finished(scheduled.finished_req_ids)
            output = KVConnectorOutput(
                finished_recving=received,
                kv_connector_worker_meta=each.build_connector_worker_meta(),
            )
            each.clear_connector_metadata()
            places = {id: at for at, id in enumerate(ids)}
            outputs.append(
                ModelRunnerOutput(
                    req_ids=ids,
                    req_id_to_index=places,
                    sampled_token_ids=tokens,
                    kv_connector_output=output,
                )
            )
        return self._aggregator.aggregate(outputs)

    def _start_copies(self) -> None:
        for each in self._connectors:
            each.start_load_kv(None)

    def _compute(self, scheduled: Any) -> tuple[list[str], list[list[int]]]:
        for id in scheduled.finished_req_ids:
            self._running.pop(id, None)
        begins = dict[str, int]()
        for new in scheduled.scheduled_new_reqs:
            salt = (new.sampling_params.extra_args or {}).get("test_salt")
            tables = [[*table] for table in new.block_ids]
            text = Text(new.prompt_token_ids, salt)
            self._running[new.req_id] = _Running(new.req_id, text, tables)
            begins[new.req_id] = new.num_computed_tokens
        told = scheduled.scheduled_cached_reqs
        for id, blocks, begin in zip(
            told.req_ids, told.new_block_ids, told.num_computed_tokens, strict=True
        ):
            running, begins[id] = self._running[id], begin
            if id in told.resumed_req_ids:
                # What was sampled in a step whose output vLLM has dropped is sampled again.
                running.text = Text(told.all_token_ids[id], running.text.salt)
                running.tables = [[*table] for table in blocks]
                continue
            for table, added in zip(running.tables, blocks or (), strict=bool(blocks)):
                table += added
        spans = {
            id: (begin, begin + scheduled.num_scheduled_tokens[id]) for id, begin in begins.items()
        }
        self._before(scheduled)
        # In a step all new tokens are written first: another request of it may share their blocks.
        for id, span in spans.items():
            self._write(self._running[id], *span)
        if self.pace is not None:
            time.sleep(sum(self.pace(*span) for span in spans.values()))
        sampled = list[list[int]]()
        for id, (begin, end) in spans.items():
            running = self._running[id]
            self._check(running, begin)
            sampled.append([])
            if end == len(running.text.tokens):
                sampled[-1].append(running.text.next_token(end))
                running.text.append(sampled[-1][0])
        return [*begins], sampled

    def _before(self, scheduled: Any) -> None:
        """Do what the scheduler has the device do before it computes."""

    def _write(self, running: _Running, begin: int, end: int) -> None:
        assert begin < end <= len(running.text.tokens)
        at = np.arange(begin, end)
        for group, table in enumerate(map(np.array, running.tables)):
            for device in self._devices:
                new = running.text.slots(begin, end, group, device.rank)
                device.blocks[table[at // TOKENS], at % TOKENS] = new

    def _check(self, running: _Running, end: int) -> None:
        """Compare all that is attended to, before a token, with what it must be."""
        for group, table in enumerate(map(np.array, running.tables)):
            window = self._windows[group]
            first = 0 if window is None else max(0, end + 1 - window)
            if first >= end:
                continue
            at = np.arange(first, end)
            for device in self._devices:
                right = running.text.slots(first, end, group, device.rank)
                is_wrong = (device.blocks[table[at // TOKENS], at % TOKENS] != right).any(1)
                wrong = [*map(int, at[is_wrong])]
                assert not wrong, f"wrong bytes at tokens {wrong}, group {group}"
                self.num_checked += len(at)
