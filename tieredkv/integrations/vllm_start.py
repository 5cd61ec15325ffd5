"""Refuses the store of a tier where vLLM builds its configuration, before weights are loaded.

vLLM makes a tier only once the model is loaded, and has no earlier call to one. So the plug-in has
this check made by what every start of vLLM calls to build its configuration.
"""

import functools
import multiprocessing
import os
from contextlib import suppress
from typing import Any

from tieredkv.engine.store_options import store_options
from tieredkv.errors import StoreBusyError
from tieredkv.integrations.vllm_settings import settings_in, tiers_in
from tieredkv.integrations.vllm_spec import folders_of
from tieredkv.storage.starts import check_start


def check_early(engine_args: Any) -> None:
    """Have vLLM's `EngineArgs` check the tiers of the configurations that it builds; once only."""
    build = engine_args.create_engine_config
    if getattr(build, "checks_tiers", False):
        return

    @functools.wraps(build)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = build(self, *args, **kwargs)
        # The API servers of a running engine are children of the process that started it.
        if multiprocessing.parent_process() is None:
            check_tiers(config)
        return config

    vars(create_engine_config)["checks_tiers"] = True
    engine_args.create_engine_config = create_engine_config


def check_tiers(config: Any) -> None:
    """Refuse a store that a tier in vLLM's configuration could not serve as its arguments say.

    Raises:
        ConfigError: an argument is malformed, or setting and store disagree.
        MissingKeyError: the keys are not there, or the folder is a copy.
        StorageError: the folder is not safe, or its format has another version.
    """
    parallel = config.parallel_config
    if getattr(parallel, "node_rank", 0):
        return  # the tier is on the first node
    for tier in tiers_in(config.kv_transfer_config):
        settings = settings_in(tier)
        assert settings.disk_dir is not None, "it was checked"
        folders = folders_of(settings.disk_dir, parallel.data_parallel_size)
        if len(folders) > 1:  # some may be another node's
            folders = [each for each in folders if os.path.exists(each)]
        for folder in folders:
            with suppress(StoreBusyError):  # the tier waits for another writer to go
                check_start(store_options(folder, settings), patience_s=0.0)
