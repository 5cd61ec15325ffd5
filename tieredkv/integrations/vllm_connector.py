"""vLLM's offloading connector, which also tells our tier which bytes of a row a chunk writes.

    "kv_connector": "TieredKVConnector",
    "kv_connector_module_path": "tieredkv.integrations.vllm_connector"

Models whose layers are in several groups need it: vLLM's own connector tells a tier nothing of the
bytes of a group. Each worker knows them once it has its KV cache. vLLM passes what the workers
know on to the scheduler, as it does for connectors between engines, before the first request.
"""

import dataclasses
from typing import Any

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorHandshakeMetadata,
        KVConnectorRole,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
        get_offloading_group_ids,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
        OffloadingConnectorWorker,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
        OffloadingConnector,
    )
    from vllm.v1.kv_cache_interface import MambaSpec, iter_layer_specs

    _Connector: Any = OffloadingConnector
    _Worker: Any = OffloadingConnectorWorker
    _Metadata: Any = KVConnectorHandshakeMetadata
except ImportError as problem:
    raise ImportError(
        "`TieredKVConnector` needs vLLM 0.33 or newer: take `OffloadingConnector` as "
        f"`kv_connector` and leave `kv_connector_module_path` out ({problem})"
    ) from problem

from tieredkv.errors import ConfigError
from tieredkv.integrations.row_parts import Parts, parts_of_rank, telling_parts
from tieredkv.integrations.vllm import TieredKVTier


@dataclasses.dataclass
class RowParts(_Metadata):  # type: ignore[misc]
    """What one worker writes into a row, for a chunk of each group."""

    parts: Parts


class _NotingWorker(_Worker):  # type: ignore[misc]
    """vLLM's half of the connector in a worker, which notes what it copies."""

    parts: Parts | None = None

    def _init_worker(self, kv_caches: Any) -> None:
        config, spec = self.kv_cache_config, self.spec
        ids = get_offloading_group_ids(config)
        copies = zip(ids, kv_caches.group_data_refs, strict=True)
        rank = 0 if spec.replicated_layout else spec.config.parallel.rank
        self.parts = parts_of_rank(
            [tensor.page_size_bytes for tensor in kv_caches.tensors],
            {id: [(ref.tensor_idx, ref.page_size_bytes) for ref in refs] for id, refs in copies},
            {id: _layer_bytes(config.kv_cache_groups[id]) for id in ids},
            begin=rank * spec.cpu_page_size_per_worker,
            blocks_per_chunk=spec.blocks_per_chunk,
        )
        super()._init_worker(kv_caches)


class TieredKVConnector(_Connector):  # type: ignore[misc]
    """vLLM's `OffloadingConnector`; everything but what it tells our tiers is vLLM's own.

    Raises:
        ConfigError: the chunks of this model cannot be told from what else is in their rows.
    """

    connector_worker: Any

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        groups = [kv_cache_config.kv_cache_groups[id] for id in _ids(kv_cache_config)]
        if role == KVConnectorRole.SCHEDULER:
            for group in groups:
                _check_states(group)
        specs = tuple(repr(group.kv_cache_spec) for group in groups)
        with telling_parts(specs):
            super().__init__(vllm_config, role, kv_cache_config)
        if self.connector_worker is not None:
            spec = self.connector_worker.spec
            self.connector_worker = _NotingWorker(spec, vllm_config, kv_cache_config)

    def get_handshake_metadata(self) -> RowParts | None:
        """Return what this worker writes into rows."""
        worker = self.connector_worker
        return None if worker is None or worker.parts is None else RowParts(worker.parts)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], RowParts]
    ) -> None:
        """Tell our tiers what all workers write into rows.

        Raises:
            ConfigError: the parts of some group are not known.
        """
        assert self.connector_scheduler is not None
        told = [each.parts for each in metadata.values()]
        for tier in getattr(self.connector_scheduler.manager, "secondary_tiers", ()):
            if isinstance(tier, TieredKVTier):
                tier.set_parts(told)


def _ids(kv_cache_config: Any) -> tuple[int, ...]:
    ids: tuple[int, ...] = get_offloading_group_ids(kv_cache_config)
    return ids


def _layer_bytes(group: Any) -> list[int]:
    """Return the bytes that each layer of a group has in a block, without padding."""
    specs = [*iter_layer_specs(group.kv_cache_spec)]
    if len(specs) != len(group.layer_names):
        specs = specs * len(group.layer_names)
    return [
        dataclasses.replace(spec, page_size_padded=None).page_size_bytes
        if isinstance(spec, MambaSpec)
        else spec.unpadded_page_size_bytes
        for spec in specs
    ]


def _check_states(group: Any) -> None:
    """Refuse states that have room for draft tokens: not every state fills it.

    Raises:
        ConfigError: there are some.
    """
    for spec in iter_layer_specs(group.kv_cache_spec):
        if getattr(spec, "num_speculative_blocks", 0):
            raise ConfigError(
                "with speculative decoding, vLLM keeps room for draft tokens in the states of "
                "recurrent layers, and does not tell which states have written it, so that states "
                "of other requests could reach the disk: leave `--speculative-config` out, or the "
                "tier of tieredkv"
            )
