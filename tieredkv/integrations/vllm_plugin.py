"""Make the tier known to a vLLM that does not load classes by `module_path`.

vLLM calls `register` in each of its processes, as its `vllm.general_plugins`.
"""

import contextlib

TIER_TYPE = "TieredKVTier"


def register() -> None:
    """Register the tier under its own name; again, or in a vLLM without tiers, does nothing."""
    try:
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    except ImportError:
        return
    with contextlib.suppress(ValueError):  # it is registered already
        SecondaryTierFactory.register_tier(TIER_TYPE, "tieredkv.integrations.vllm", TIER_TYPE)
