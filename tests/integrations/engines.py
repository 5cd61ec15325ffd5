"""vLLM's tiering manager with our tier behind it: the real one where vLLM is, else a stand-in.

An engine here is what is left of vLLM without a model and a GPU: requests offer chunks that they
computed, the memory above the tier loses them, and later requests look them up.
"""

import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import mmap
import os
import time
import types
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integrations import vllm_standin
from tests.levels import few
from tests.waiting import wait_until

HAS_VLLM = importlib.util.find_spec("vllm") is not None
TOKENS_PER_BLOCK = 16
NUM_ROWS = 16
LAYER_NAMES = ("layers.0", "layers.1")


def _version() -> tuple[int, ...]:
    """Return the version of vLLM that is installed."""
    return tuple(int(each) for each in importlib.metadata.version("vllm").split(".")[:2])


def key_of(name: str, position: int) -> bytes:
    """Return the key of a chunk, as vLLM makes it: a digest and the group's number."""
    return f"{name}/{position}".encode().ljust(32, b"\1") + bytes(4)


def bytes_of(key: bytes, row_bytes: int) -> bytes:
    """Return the right bytes of a chunk."""
    return (key * (row_bytes // len(key) + 1))[:row_bytes]


def flip_a_bit(folder: Path, behind: bytes, offset: int) -> None:
    """Flip a bit in the files of a store, so many bytes behind the beginning of some bytes."""
    for path in folder.rglob("*.seg"):
        data = bytearray(path.read_bytes())
        if (at := data.find(behind)) >= 0:
            data[at + offset] ^= 1
            path.write_bytes(data)


def parallel_of(**changes: Any) -> dict[str, Any]:
    """Return what vLLM tells of its parallel sizes."""
    sizes = dict.fromkeys(("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size"), 1)
    told = {"rank": 0, "data_parallel_index": 0, "data_parallel_size": 1}
    more = {"data_parallel_rank_local": None, "is_parallelism_agnostic": False}
    return {**sizes, **told, **more, **changes}


class Engine:
    """One engine; its store survives it, its rows do not.

    Args:
        model: folder of the weights.
        tier: arguments of the tier.
        ranks: tensor-parallel ranks, each of which has its part of each row.
        blocks_per_chunk: blocks of vLLM in a chunk.
        changes: fields of vLLM's config that differ from the default.
    """

    def __init__(
        self,
        model: Path,
        tier: dict[str, Any],
        *,
        ranks: int = 1,
        blocks_per_chunk: int = 1,
        **changes: Any,
    ) -> None:
        self.blocks_per_chunk = blocks_per_chunk
        self.row_bytes = 8192 * ranks * blocks_per_chunk
        self.engine_id = f"test-{uuid.uuid4().hex}"
        self._contexts = 0
        plain = {
            "engine_id": self.engine_id,
            "worker_kv_bytes_per_block": 8192,
            "enable_kv_cache_events": False,
            "replicated_layout": False,
            "canonical_layout": False,
            "kv_cache_layout": "LBHNC",
            **changes,
        }
        parts = {
            "groups": [
                {
                    "tokens_per_block": TOKENS_PER_BLOCK,
                    "layer_names": plain.pop("layer_names", LAYER_NAMES),
                    "group_id": 0,
                    "sliding_window_size_in_chunks": None,
                    **group,
                }
                for group in plain.pop("groups", [{}])
            ],
            "model": {"name": str(model), "dtype": plain.pop("dtype", "bfloat16")},
            "cache": {"tokens_per_hash": TOKENS_PER_BLOCK, "blocks_per_chunk": blocks_per_chunk},
            "parallel": parallel_of(
                **{"world_size": ranks, "tp_size": ranks, **plain.pop("parallel", {})}
            ),
        }
        self._open(parts, plain, tier)

    def _open(self, parts: dict[str, Any], plain: dict[str, Any], tier: dict[str, Any]) -> None:
        raise NotImplementedError

    # --- what a request does -------------------------------------------------------------------

    def request(self, retention: str | None = None, **params: Any) -> Any:
        """Return the context of a new request."""
        self._contexts += 1
        told: dict[str, Any] = {**params, **({"retention": retention} if retention else {})}
        context = self.context(f"request-{self._contexts}", {"tieredkv": told} if told else None)
        self.manager.on_new_request(context)
        return context

    def context(self, id: str, params: dict[str, Any] | None) -> Any:
        raise NotImplementedError

    def place(self, keys: Sequence[bytes], context: Any) -> None:
        """Let vLLM tell which positions the chunks have."""
        raise NotImplementedError

    def compute(self, keys: Sequence[bytes], context: Any) -> None:
        """Offer chunks that a request has computed, all in one job."""
        raise NotImplementedError

    def chain(self, name: str, length: int) -> list[bytes]:
        return [key_of(name, position) for position in range(length)]

    def store(self, keys: Sequence[bytes], retention: str | None = "24h", **params: Any) -> None:
        """Compute chunks in a request of this retention, and wait until all jobs have ended."""
        context = self.request(retention, **params)
        self.place(keys, context)
        self.compute(keys, context)
        self.settle()
        self.manager.on_request_finished(context)

    def settle(self) -> None:
        """Go on with steps until nothing is under way."""

        def has_settled() -> bool:
            self.step()
            return not self.manager.has_pending_work()

        wait_until(has_settled, "jobs do not end")

    def load(self, keys: Sequence[bytes], retention: str | None = None, **params: Any) -> list[Any]:
        """Look chunks up in a new request until all is known; return the bytes of those found.

        Asserts that these bytes are right.
        """
        context = self.request(retention, **params)
        self.place(keys, context)
        found: list[Any] = []

        def is_known() -> bool:
            found[:] = [self.manager.lookup(key, context).name for key in keys]
            self.step()
            return not {"RETRY", "HIT_PENDING"} & {*found}

        wait_until(is_known, "lookups are not answered")
        for at, key in enumerate(keys):
            if found[at] == "HIT":
                found[at] = self.read(key, context)
                assert found[at] == bytes_of(key, self.row_bytes), "wrong bytes were served"
            else:
                found[at] = None
        self.manager.on_request_finished(context)
        return found

    def hits(
        self, keys: Sequence[bytes], retention: str | None = None, **params: Any
    ) -> list[bool]:
        """Look chunks up as `load` does; return which are found."""
        return [each is not None for each in self.load(keys, retention, **params)]

    def step(self, begun: Sequence[Any] = (), preempted: Sequence[Any] = ()) -> None:
        """End a step that schedules requests for the first time, and preempts others."""
        raise NotImplementedError

    def metrics(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """Return the tier's figures since the last call, by name and labels."""
        self.tier._told_at = float("-inf")
        values = self.tier.get_stats().data["data"]
        return {(name, labels): it for name in values for labels, it in values[name].items()}

    def read(self, key: bytes, context: Any) -> bytes:
        raise NotImplementedError

    def forget(self) -> None:
        """Let the memory above the tier lose all chunks."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    manager: Any
    tier: Any
    is_older = False
    """Whether it is vLLM 0.26, which tells less."""

    @property
    def pid(self) -> int:
        """Process id of the store worker, once there is one."""
        wait_until(lambda: self.tier._rows.pid is not None, "no worker is up")
        pid = self.tier._rows.pid
        assert isinstance(pid, int)
        return pid


class StandInEngine(Engine):
    """An engine without vLLM."""

    version: str | None = None
    """What it says that it is; None for the version that it stands for."""

    def _open(self, parts: dict[str, Any], plain: dict[str, Any], tier: dict[str, Any]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            version = self.version
            self._vllm = vllm_standin.install(patch, is_older=self.is_older, version=version)
            module = importlib.import_module("tieredkv.integrations.vllm")
        told = {
            name: types.SimpleNamespace(**parts[name]) for name in ("model", "cache", "parallel")
        }
        groups = [types.SimpleNamespace(**group) for group in parts["groups"]]
        events = types.SimpleNamespace(enable_kv_cache_events=plain["enable_kv_cache_events"])
        config = types.SimpleNamespace(**plain, **told, groups=groups)
        spec = types.SimpleNamespace(config=config, kv_events_config=events)
        if self.is_older:
            del spec.config.kv_cache_layout, told["parallel"].data_parallel_size
        fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)
        os.ftruncate(fd, NUM_ROWS * self.row_bytes)
        self._memory = mmap.mmap(fd, NUM_ROWS * self.row_bytes)
        self._fd = fd
        rows: Any = np.frombuffer(self._memory, np.int8).reshape(NUM_ROWS, self.row_bytes)
        self.view = memoryview(rows)
        del rows
        try:
            self.tier = module.TieredKVTier(
                offloading_spec=spec, primary_kv_view=self.view, tier_type="TieredKVTier", **tier
            )
        except BaseException:
            self._close_memory()
            raise
        self.manager = vllm_standin.Manager(self.tier, NUM_ROWS, is_older=self.is_older)

    def context(self, id: str, params: dict[str, Any] | None) -> Any:
        return self._vllm.ReqContext(id, params)

    def place(self, keys: Sequence[bytes], context: Any) -> None:
        if not self.is_older:
            span = TOKENS_PER_BLOCK * self.blocks_per_chunk
            context.ends.update((key, (at + 1) * span) for at, key in enumerate(keys))

    def compute(self, keys: Sequence[bytes], context: Any) -> None:
        for key in keys:
            start = self.manager.row_of(key) * self.row_bytes
            self._memory[start : start + self.row_bytes] = bytes_of(key, self.row_bytes)
        self.manager.offer(keys, context)

    def step(self, begun: Sequence[Any] = (), preempted: Sequence[Any] = ()) -> None:
        told = {"new_req_ids": begun, "preempted_req_ids": preempted}
        ids = {name: [each.req_id for each in contexts] for name, contexts in told.items()}
        self.manager.step(types.SimpleNamespace(**ids))
        time.sleep(0.001)

    def read(self, key: bytes, context: Any) -> bytes:
        start = self.manager.row_of(key) * self.row_bytes
        return self._memory[start : start + self.row_bytes]

    def forget(self) -> None:
        self.manager.clear()
        self._memory[:] = bytes(len(self._memory))

    def close(self) -> None:
        self.manager.shutdown()
        self._close_memory()

    def _close_memory(self) -> None:
        if hasattr(self, "tier"):
            del self.tier._primary_kv_view
        self.view.release()
        self._memory.close()  # raises where somebody still holds a view
        os.close(self._fd)


class OlderStandInEngine(StandInEngine):
    """An engine without vLLM that behaves as version 0.26 does."""

    is_older = True


class RealEngine(Engine):
    """vLLM's own spec, region and manager."""

    is_older = HAS_VLLM and _version() < (0, 33)

    def _open(self, parts: dict[str, Any], plain: dict[str, Any], tier: dict[str, Any]) -> None:
        import vllm.v1.kv_offload.base as base
        import vllm.v1.kv_offload.config as config
        from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

        from tieredkv.integrations.vllm_plugin import register

        self._base = base
        where = {"type": "TieredKVTier", "module_path": "tieredkv.integrations.vllm"}
        if self.is_older:
            register()
            del where["module_path"]
        extra = {
            "cpu_bytes_to_use": NUM_ROWS * self.row_bytes,
            "blocks_per_chunk": self.blocks_per_chunk,
            "secondary_tiers": [{**where, **tier}],
            **plain.pop("extra", {}),
        }
        built = config.OffloadingConfig(
            **_fitting(
                config.OffloadingConfig,
                extra_config=extra,
                groups=tuple(
                    config.OffloadingGroupConfig(**_fitting(config.OffloadingGroupConfig, **each))
                    for each in parts["groups"]
                ),
                model=config.OffloadingModelConfig(**parts["model"]),
                cache=config.OffloadingCacheConfig(**parts["cache"]),
                parallel=config.OffloadingParallelConfig(
                    **_fitting(config.OffloadingParallelConfig, **parts["parallel"])
                ),
                **plain,
            )
        )
        self.spec = TieringOffloadingSpec(built)
        self.manager = self.spec.get_manager()
        (self.tier,) = self.manager.secondary_tiers
        self._flat = self.manager.primary_tier.get_kv_memoryview().cast("B")

    def context(self, id: str, params: dict[str, Any] | None) -> Any:
        return self._base.ReqContext(req_id=id, kv_transfer_params=params)

    def place(self, keys: Sequence[bytes], context: Any) -> None:
        if hasattr(context, "set_offload_key_position"):
            span = TOKENS_PER_BLOCK * self.blocks_per_chunk
            for at, key in enumerate(keys):
                context.set_offload_key_position(key, (at + 1) * span)

    def compute(self, keys: Sequence[bytes], context: Any) -> None:
        with self._locked():
            output = self.manager.prepare_store(keys, context)
            assert output is not None, "vLLM's memory has no room"
            for key, row in zip(output.keys_to_store, _rows(output.store_spec), strict=True):
                self._row(row)[:] = bytes_of(key, self.row_bytes)
            if output.keys_to_store:
                self.manager.complete_store(output.keys_to_store, context, True)

    def step(self, begun: Sequence[Any] = (), preempted: Sequence[Any] = ()) -> None:
        ids = [[each.req_id for each in contexts] for contexts in (begun, preempted)]
        with self._locked():
            self.manager.on_schedule_end(self._base.ScheduleEndContext(*ids))
        time.sleep(0.001)

    def read(self, key: bytes, context: Any) -> bytes:
        with self._locked():
            (row,) = _rows(self.manager.prepare_load([key], context))
            held = bytes(self._row(row))
            self.manager.complete_load([key], context)
        return held

    def forget(self) -> None:
        with self._locked():
            self.manager.reset_cache()
            if hasattr(self.manager, "on_reset_flushed"):
                self.manager.on_reset_flushed()

    def close(self) -> None:
        self._flat.release()
        self.manager.shutdown()
        assert not Path(f"/dev/shm/vllm_offload_{self.engine_id}.mmap").exists()

    def _row(self, row: int) -> memoryview:
        part: memoryview = self._flat[row * self.row_bytes : (row + 1) * self.row_bytes]
        return part

    def _locked(self) -> contextlib.AbstractContextManager[Any]:
        lock: Any = getattr(self.manager, "lock", None)
        return contextlib.nullcontext() if lock is None else lock


def _rows(spec: Any) -> list[int]:
    return [int(row) for row in getattr(spec, "chunk_ids", spec.block_ids)]


def _fitting(kind: Any, **values: Any) -> dict[str, Any]:
    """Leave out what a class of another version of vLLM does not have."""
    names = {each.name for each in dataclasses.fields(kind)}
    return {name: value for name, value in values.items() if name in names}


ENGINES: list[type[Engine]] = [RealEngine] if HAS_VLLM else [StandInEngine, OlderStandInEngine]
NEWEST = pytest.mark.parametrize("setup", few(ENGINES), ids=lambda it: it.__name__, indirect=True)
"""For tests of what does not depend on vLLM's version: others are tried in the full run only."""
