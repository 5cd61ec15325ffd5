"""The arguments of a tier inside vLLM, and what they must fit; it is read without vLLM."""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from tieredkv.config import Settings, load_settings
from tieredkv.errors import ConfigError
from tieredkv.integrations.vllm_plugin import TIER_TYPE
from tieredkv.storage.extents.space import minimum_budget_bytes
from tieredkv.units import format_bytes

logger = logging.getLogger(__name__)

TRIED = ("0.26", "0.33")
"""The versions of vLLM that the tests run with."""

_SETTINGS = (
    *("disk_dir", "disk_size", "disk_sync", "disk_compression", "disk_write_limit"),
    *("disk_encryption", "disk_key_dir", "disk_master_key", "disk_master_key_command"),
    *("sweep_interval", "load_timeout", "drain_timeout", "default_retention", "fingerprint"),
    *("restore", "kv_events_namespaces"),
)
"""The settings of tieredkv that mean something here."""

_OWN = ("config_file", "weights", "weights_id", "prefill_seconds", "locality")


def load(config: Mapping[str, Any]) -> Settings:
    """Return the settings in the arguments of a tier, and warn of those that are not known.

    Raises:
        ConfigError: one of them is malformed, or there is no folder.
    """
    known = {*_SETTINGS, *_OWN}
    if others := sorted(config.keys() - known):
        text = "arguments of the tier that tieredkv does not know are ignored: %s"
        logger.warning(text, ", ".join(others))
    return settings_in(config)


def settings_in(config: Mapping[str, Any]) -> Settings:
    """Return the settings in the arguments of a tier; what is not known is left out.

    Raises:
        ConfigError: one of them is malformed, or there is no folder.
    """
    arguments = {name: config[name] for name in _SETTINGS if name in config}
    file = config.get("config_file")
    settings = load_settings(arguments=arguments, config_path=file).settings
    if settings.disk_dir is None:
        raise ConfigError("the tier needs `disk_dir`, the folder of its store on disk")
    return settings


def tiers_in(config: Any) -> list[Mapping[str, Any]]:
    """Return the arguments of our tiers in vLLM's `kv_transfer_config`, which may be None."""
    return [*_tiers(config if isinstance(config, Mapping) else getattr(config, "__dict__", {}))]


def _tiers(config: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the arguments of our tiers, however deep they stand among those of connectors."""
    if isinstance(config, Mapping):
        if config.get("type") == TIER_TYPE:
            yield config
        config = list(config.values())
    if isinstance(config, list | tuple):
        for each in config:
            yield from _tiers(each)


def warn_if_untried(version: str) -> None:
    """Warn of a version of vLLM that the tests do not run with."""
    if ".".join(version.split(".")[:2]) not in TRIED:
        text = "tieredkv was not tried with vLLM %s; it was tried with %s"
        logger.warning(text, version, " and ".join(TRIED))


def shape_of(view: memoryview) -> tuple[int, int]:
    """Return the number of rows and the bytes of each.

    Raises:
        ConfigError: there is not even one.
    """
    num_rows, row_bytes = view.shape if view.ndim == 2 and view.shape else (0, 0)
    if not num_rows or not row_bytes:
        what = "`cpu_bytes_to_use` does not hold one chunk of vLLM's KV cache"
        raise ConfigError(f"{what}; make it larger, or `blocks_per_chunk` smaller")
    return num_rows, row_bytes


def check_budget(size_bytes: int, row_bytes: int) -> None:
    """Refuse a budget in which no chunk can be stored and replaced.

    Raises:
        ConfigError: it is too small.
    """
    if size_bytes < (least := minimum_budget_bytes(row_bytes)):
        what = f"`disk_size` = {format_bytes(size_bytes)} is too small for chunks of "
        least_text = f"it must be at least {format_bytes(least)}"
        raise ConfigError(f"{what}{format_bytes(row_bytes)}; {least_text}")
