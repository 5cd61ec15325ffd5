"""Make the tier known to a vLLM that does not load classes by `module_path`, and check it early.

vLLM calls `register` in each of its processes, as its `vllm.general_plugins`.
"""

import contextlib
import sys

TIER_TYPE = "TieredKVTier"


def register() -> None:
    """Register the tier under its own name; again, or in a vLLM without tiers, does nothing.

    Where vLLM builds its configuration in this process, the tiers in it are checked then.
    """
    with contextlib.suppress(ImportError, ValueError):  # there are no tiers, or it is registered
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

        SecondaryTierFactory.register_tier(TIER_TYPE, "tieredkv.integrations.vllm", TIER_TYPE)
    if (building := sys.modules.get("vllm.engine.arg_utils")) is not None:
        from tieredkv.integrations.vllm_start import check_early

        check_early(building.EngineArgs)
