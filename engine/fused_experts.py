"""The second half of a fused layer: one gated MLP, or a router with experts.

Both take their weights from transformers' modules and know nothing of attention. A fused model
adds them to its residual stream. Of some families whose layers are not fused as a whole, the blocks
with experts are; all else then stays transformers'.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from tieredkv.engine.experts import find_experts
from tieredkv.engine.merged_weights import Linear, merge_linears, merge_parameters
from tieredkv.kernels import experts, layers
from tieredkv.kernels.checks import NormStyle
from tieredkv.kernels.expert_layout import Experts, GateKind, RoutingRule, SharedExpert

logger = logging.getLogger(__name__)

_ROUTER_ROWS = 8
"""A router's rows are a multiple of this many if a gate is merged into it, as products like it."""

_WITH_SHARED_EXPERTS = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
"""Families whose router chooses by sigmoids, and whose blocks have an MLP for all tokens too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseMLP:
    """One gated MLP, for all tokens.

    Attributes:
        gate_up: both matrices, the gate's on top.
        kind: of the gate.
    """

    gate_up: Linear
    down: Linear
    kind: GateKind = "silu"

    @classmethod
    def from_module(cls, mlp: Any, kind: GateKind = "silu") -> "DenseMLP":
        """Merge the matrices of transformers' module, whose parameters become views."""
        gate_up = merge_linears(mlp.gate_proj, mlp.up_proj)
        return cls(gate_up=gate_up, down=merge_linears(mlp.down_proj), kind=kind)

    def compute(self, normed: Tensor, residual: Tensor | None = None) -> Tensor:
        """Compute the MLP of the normed rows, and add it to the residual stream if there is one."""
        gated = layers.gate_mul(layers.linear(normed, *self.gate_up), self.kind)
        return layers.linear(gated, *self.down, residual=residual)

    def add_and_norm(
        self, normed: Tensor, residual: Tensor, norm: Tensor, style: NormStyle
    ) -> Tensor:
        """Add the MLP to the residual stream, in place, and norm that for what comes next."""
        self.compute(normed, residual)
        return layers.add_and_norm(residual, None, norm[None], style)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseMLP:
    """A router, and the experts of which it chooses some for each token.

    Attributes:
        num_chosen: experts of a token.
        router: has a row for each expert, then one for the gate of `shared`, if it has one; rows
            behind these are zero.
        rule: how they are chosen and weighed.
        shared: an MLP that is added for all tokens, or None.
        is_gated: whether `shared` has a gate.
    """

    router: tuple[Tensor, Tensor | None]
    experts: Experts
    num_chosen: int
    rule: RoutingRule
    shared: DenseMLP | None = None
    is_gated: bool = False

    @classmethod
    def from_module(cls, mlp: Any) -> "SparseMLP":
        """Take the weights of a block of Qwen, gpt-oss, GLM or DeepSeek V3.

        Nothing is copied but the matrices of shared experts and their gate, which are merged.
        """
        router = mlp.router if hasattr(mlp, "router") else mlp.gate
        found = find_experts(mlp.experts)
        assert found is not None, f"{mlp.experts} is not known to the kernels"
        bias, correction = getattr(router, "bias", None), None
        if is_sigmoid := hasattr(router, "e_score_correction_bias"):
            correction = router.e_score_correction_bias.data
        shared = getattr(mlp, "shared_experts", getattr(mlp, "shared_expert", None))
        weight = router.weight.data
        if is_gated := hasattr(mlp, "shared_expert_gate"):
            gate = mlp.shared_expert_gate.weight
            rest = weight.new_zeros(-(len(weight) + len(gate)) % _ROUTER_ROWS, weight.shape[1])
            weight = merge_parameters([router.weight, gate, rest])
        return cls(
            router=(weight, None if bias is None else bias.data),
            experts=found,
            num_chosen=router.top_k,
            rule=RoutingRule(
                is_sigmoid=is_sigmoid,
                is_normalised=getattr(router, "norm_topk_prob", True),
                scale=float(getattr(router, "routed_scaling_factor", 1.0)),
                bias=correction,
            ),
            shared=None if shared is None else DenseMLP.from_module(shared),
            is_gated=is_gated,
        )

    def score(self, normed: Tensor) -> Tensor:
        """Return the router's logits for the normed rows, [num_tokens, rows of the router]."""
        weight, bias = self.router  # some families have a router in float32
        return layers.linear(normed.to(weight.dtype), weight, bias)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids and weights of the experts that logits choose."""
        num_experts = self.experts.down.shape[0]
        return experts.route(logits[:, :num_experts], self.num_chosen, self.rule)

    def compute(self, normed: Tensor) -> Tensor:
        """Compute the experts of the normed rows, [num_tokens, hidden_size]."""
        logits = self.score(normed)
        out = experts.compute_experts(
            normed, *self.choose(logits), self.experts, shared=self._gated(normed, logits)
        )
        if self.shared is not None and not self.is_gated:
            self.shared.compute(normed, out)
        return out

    def _gated(self, normed: Tensor, logits: Tensor) -> SharedExpert | None:
        """Compute the shared expert, if it has a gate."""
        if self.shared is None or not self.is_gated:
            return None
        return SharedExpert(self.shared.compute(normed), logits[:, self.experts.down.shape[0]])

    def add_and_norm(
        self, normed: Tensor, residual: Tensor, norm: Tensor, style: NormStyle
    ) -> Tensor:
        """Add the experts to the residual stream, in place, and norm that for what comes next."""
        if self.shared is not None and not self.is_gated:
            self.shared.compute(normed, residual)
        logits = self.score(normed)
        return experts.add_experts(
            normed,
            *self.choose(logits),
            self.experts,
            residual=residual,
            norm=norm,
            style=style,
            shared=self._gated(normed, logits),
        )


@torch.no_grad()
def fuse_experts(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Replace the forward passes of blocks with experts in known families.

    The parameters keep names, shapes and values. Call it once all weights are loaded.
    """
    if config.model_type not in _WITH_SHARED_EXPERTS or config.hidden_act != "silu":
        return
    blocks: list[Any] = [each for each in model.modules() if hasattr(each, "shared_experts")]
    if any(block.gate.num_group != block.gate.topk_group for block in blocks):
        return  # the kernel chooses among all experts
    for block in blocks:
        block.forward = _FusedBlock(SparseMLP.from_module(block))
    logger.info("%d blocks with experts of `%s` run fused", len(blocks), config.model_type)


class _FusedBlock:
    """The forward pass of a block with experts, as transformers' decoder layers call it."""

    def __init__(self, mlp: SparseMLP) -> None:
        self._mlp = mlp

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """Compute a step's tokens, [1, num_tokens, hidden_size]."""
        return self._mlp.compute(hidden_states[0])[None]
