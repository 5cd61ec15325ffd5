"""tieredkv: a tiered KV cache for LLM serving, with retention as a contract."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tieredkv.engine.llm import LLM as LLM
    from tieredkv.engine.sampling_params import SamplingParams as SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> object:
    """Hand out the public names lazily, so that `import tieredkv` does not load torch."""
    if name == "LLM":
        from tieredkv.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from tieredkv.engine.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module `tieredkv` has no attribute `{name}`")
