"""The second half of a fused layer: what is added to the residual stream behind the attention.

It is either one gated MLP, or a router with experts. Both take their weights from transformers'
modules, and know nothing of attention.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tieredkv.engine.experts import find_experts
from tieredkv.kernels import experts, layers
from tieredkv.kernels.expert_layout import Experts

Linear = tuple[Tensor, Tensor | None]
"""A weight [outputs, inputs], and a bias or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseMLP:
    """One MLP gated by SiLU, for all tokens.

    Attributes:
        gate_up: both matrices, the gate's on top.
    """

    gate_up: Linear
    down: Linear

    def add(self, normed: Tensor, residual: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Add the MLP of the normed rows to the residual stream, in place.

        Returns:
            The residual stream, normed for what comes next.
        """
        gated = layers.silu_mul(layers.linear(normed, *self.gate_up))
        layers.linear(gated, *self.down, residual=residual)
        return layers.rms_norm(residual, norm, eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseMLP:
    """A router, and the experts of which it chooses some for each token.

    Attributes:
        num_chosen: experts of a token.
        is_normalised: whether the weights of the chosen experts add up to 1.
    """

    router: Linear
    experts: Experts
    num_chosen: int
    is_normalised: bool

    @classmethod
    def from_module(cls, mlp: Any) -> "SparseMLP":
        """Take the weights of Qwen's or gpt-oss's block, whose experts the kernels know."""
        router = mlp.router if hasattr(mlp, "router") else mlp.gate
        found = find_experts(mlp.experts)
        assert found is not None, f"{mlp.experts} is not known to the kernels"
        bias = getattr(router, "bias", None)
        return cls(
            router=(router.weight.data, None if bias is None else bias.data),
            experts=found,
            num_chosen=router.top_k,
            is_normalised=getattr(router, "norm_topk_prob", True),
        )

    def add(self, normed: Tensor, residual: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Add the chosen experts of the normed rows to the residual stream, as `DenseMLP.add`."""
        logits = layers.linear(normed, *self.router)
        chosen = experts.route(logits, self.num_chosen, is_normalised=self.is_normalised)
        return experts.add_experts(
            normed, *chosen, self.experts, residual=residual, norm=norm, eps=eps
        )
