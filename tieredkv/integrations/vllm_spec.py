"""What a vLLM engine tells about itself to a tier, as plain values; it is read without vLLM.

Attributes that a version of vLLM does not have count as not told.
"""

import os
from collections.abc import Sequence
from typing import Any

from tieredkv.errors import ConfigError

_VARIABLES = ("PYTHONHASHSEED", "VLLM_KV_CACHE_LAYOUT", "VLLM_USE_V2_MODEL_RUNNER")
"""Environment that decides hashes or the layout where the config does not tell them."""

_PARALLEL_SIZES = ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
_LAYOUTS = ("kv_cache_layout", "replicated_layout", "canonical_layout", "worker_kv_bytes_per_block")


def facts_of(
    config: Any, *, version: str, weights: str, row_bytes: int, specs: Sequence[str] | None
) -> dict[str, Any]:
    """Return all that is known to decide the bytes of a chunk with a given key.

    Args:
        config: vLLM's `OffloadingConfig`.
        version: of vLLM.
        weights: what identifies the weights.
        row_bytes: bytes of a chunk of all ranks, padding included.
        specs: what the KV cache of each group is, where that is told.
    """
    groups = [
        {"tokens_per_block": group.tokens_per_block, "layer_names": [*group.layer_names]}
        for group in config.groups
    ]
    return {
        "vllm": version,
        "weights": weights,
        "dtype": config.model.dtype,
        "groups": groups,
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "row_bytes": row_bytes,
        **{name: getattr(config, name, None) for name in _LAYOUTS},
        **{name: getattr(config.parallel, name, None) for name in _PARALLEL_SIZES},
        **{name: os.environ.get(name) for name in _VARIABLES},
        **({} if specs is None else {"specs": [*specs]}),
    }


def folder_of(disk_dir: str, parallel: Any) -> str:
    """Return the folder of one data-parallel rank: a store has one writer.

    Raises:
        ConfigError: this version of vLLM does not tell how many ranks there are.
    """
    rank, size = parallel.data_parallel_index, getattr(parallel, "data_parallel_size", None)
    if size is None and rank > 0:
        raise ConfigError(
            f"data-parallel rank {rank} needs a folder of its own, which this version of vLLM does "
            "not let tieredkv choose: take vLLM 0.33 or newer, or one process for each rank"
        )
    return disk_dir if size in (None, 1) else folders_of(disk_dir, size)[rank]


def folders_of(disk_dir: str, size: int) -> list[str]:
    """Return the folders of all data-parallel ranks."""
    return [disk_dir] if size == 1 else [os.path.join(disk_dir, f"dp{it}") for it in range(size)]


def check_rows(config: Any, version: str, *, tells_parts: bool) -> None:
    """Refuse a model of whose rows it is not known what a chunk has written.

    A row has room for a chunk of any group of layers. vLLM copies into it what the chunk's own
    group has, or a whole block of the device with what other groups have left there. A chunk of a
    sliding window may also lack its first blocks. The rest of the row is what was there before,
    such as keys and values of another tenant, or of a request that must not reach the disk. With
    one group, and no window over several blocks, each chunk fills its row.

    Args:
        config: vLLM's `OffloadingConfig`.
        version: of vLLM.
        tells_parts: whether vLLM's workers tell which bytes of a row each group writes.

    Raises:
        ConfigError: it is not known, or not since when a chunk is there.
    """
    windows = group_windows(config)
    why = "so that keys and values of other requests could reach the disk with it"
    if (len(config.groups) > 1 or 0 not in windows) and not tells_parts:
        raise ConfigError(
            f"vLLM {version} keeps the KV cache of this model's layers in several groups and does "
            f"not tell which bytes of a row a chunk of one group has written, {why}: in vLLM 0.33 "
            "or newer, take `TieredKVConnector` as `kv_connector` and "
            "`tieredkv.integrations.vllm_connector` as `kv_connector_module_path`; or start vLLM "
            "with `--disable-hybrid-kv-cache-manager`, which makes one group of layers that only "
            "differ in their attention windows; or leave the tier of tieredkv out"
        )
    tells_windows = all(hasattr(it, "sliding_window_size_in_chunks") for it in config.groups)
    if config.cache.blocks_per_chunk > 1 and not tells_windows:
        raise ConfigError(
            f"vLLM {version} does not tell whether this model has sliding windows, of which it "
            f"writes only the blocks of a chunk that are still needed, {why}: leave "
            "`blocks_per_chunk` and `block_size` out of `kv_connector_extra_config`, so that a "
            "chunk is one block, or take vLLM 0.33 or newer"
        )
    is_windowed = any(window is not None for window in windows.values())
    if is_windowed and config.cache.blocks_per_chunk > 1:
        raise ConfigError(
            f"vLLM {version} writes only the blocks of a chunk that a sliding window or a state of "
            f"this model still needs, {why}: leave `blocks_per_chunk` and `block_size` out of "
            "`kv_connector_extra_config`, so that a chunk is one block"
        )
    if len(windows) > 1 and getattr(config, "canonical_layout", False):
        raise ConfigError(
            "with `canonical_layout`, vLLM does not tell which bytes of a row a chunk of one of "
            f"this model's groups of layers has written, {why}: leave `canonical_layout` out of "
            "`kv_connector_extra_config`"
        )
    tokens = [group.tokens_per_block for group in config.groups]
    if 1 in windows.values() and config.cache.tokens_per_hash < min(tokens):
        raise ConfigError(
            "with `--prefix-match-unit`, vLLM goes on from states within a block, so that nobody "
            "knows since when the first tokens of that block are there, and they could not expire "
            "in time: leave `--prefix-match-unit` out"
        )
    if 1 in windows.values() and None not in windows.values():
        raise ConfigError(
            "this model has recurrent layers, or windows of one block, and no layer of full "
            "attention, so that nobody knows since when the prompts are there that its chunks "
            "hold, and none could expire in time: leave the tier of tieredkv out"
        )


def group_windows(config: Any) -> dict[int, int | None]:
    """Return of how many chunks the sliding window of each group is; None if it has none.

    What a version of vLLM does not tell counts as none.
    """
    return {
        getattr(group, "group_id", number): getattr(group, "sliding_window_size_in_chunks", None)
        for number, group in enumerate(config.groups)
    }


def group_spans(config: Any) -> dict[int, int]:
    """Return how many tokens a chunk of each group has, by the group's number in a key."""
    return {
        getattr(group, "group_id", number): group.tokens_per_block * config.cache.blocks_per_chunk
        for number, group in enumerate(config.groups)
    }
