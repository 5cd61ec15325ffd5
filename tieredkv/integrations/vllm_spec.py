"""What a vLLM engine tells about itself to a tier, as plain values; it is read without vLLM.

Attributes that a version of vLLM does not have count as not told.
"""

import os
from typing import Any

from tieredkv.errors import ConfigError

_VARIABLES = ("PYTHONHASHSEED", "VLLM_KV_CACHE_LAYOUT", "VLLM_USE_V2_MODEL_RUNNER")
"""Environment that decides hashes or the layout where the config does not tell them."""

_PARALLEL_SIZES = ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
_LAYOUTS = ("kv_cache_layout", "replicated_layout", "canonical_layout", "worker_kv_bytes_per_block")


def facts_of(config: Any, *, version: str, weights: str, row_bytes: int) -> dict[str, Any]:
    """Return all that is known to decide the bytes of a chunk with a given key.

    Args:
        config: vLLM's `OffloadingConfig`.
        version: of vLLM.
        weights: what identifies the weights.
        row_bytes: bytes of a chunk of all ranks, padding included.
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


def check_rows(config: Any, version: str) -> None:
    """Refuse a model whose chunks do not fill the rows of vLLM's memory.

    A row has room for a chunk of any group of layers. vLLM copies into it what the chunk's own
    group has, or a whole block of the device with what other groups have left there, and tells
    neither. A chunk of a sliding window may also lack its first blocks. The rest of the row is
    what was there before, such as keys and values of another tenant, or of a request that must not
    reach the disk. With one group, and no window over several blocks, each chunk fills its row.

    Args:
        config: vLLM's `OffloadingConfig`.
        version: of vLLM.

    Raises:
        ConfigError: chunks of this model may leave a part of their rows as it was.
    """
    windows = group_windows(config)
    why = "so that keys and values of other requests could reach the disk with it"
    if len(config.groups) > 1 or 0 not in windows:
        raise ConfigError(
            f"vLLM {version} keeps the KV cache of this model's layers in several groups and does "
            f"not tell which bytes of a row a chunk of one group has written, {why}: start vLLM "
            "with `--disable-hybrid-kv-cache-manager`, which makes one group of layers that only "
            "differ in their attention windows, or leave the tier of tieredkv out"
        )
    if windows[0] is not None and config.cache.blocks_per_chunk > 1:
        raise ConfigError(
            f"vLLM {version} writes only the blocks of a chunk that this model's sliding window "
            f"still needs, {why}: leave `blocks_per_chunk` and `block_size` out of "
            "`kv_connector_extra_config`, so that a chunk is one block"
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
