"""Entry points for mixture-of-experts layers: choose each token's experts, and compute them.

As in `tieredkv.kernels.layers`, tensors are checked on the host, then the Triton kernels or the
torch reference run. No function reads a device tensor on the host, so that calls can be captured
in CUDA graphs. This module knows no requests, tiers or models.

A token's result depends on its own row and, through the choice of a tiling, on how many tokens are
computed with it, as that of a matrix product does. It does not depend on what those tokens are nor
on their experts: no tile has rows of two experts, and every sum has a fixed order.
"""

import torch
from torch import Tensor

from tieredkv.errors import ShapeError
from tieredkv.kernels import checks, layers, reference
from tieredkv.kernels.checks import NormStyle, describe, triton_module
from tieredkv.kernels.expert_layout import Experts, RoutingRule, SharedExpert
from tieredkv.kernels.quantized import check_quantized, describe_weight, format_of


def route(logits: Tensor, num_chosen: int, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token: those with the largest scores, in descending order.

    Args:
        logits: [num_tokens, num_experts], contiguous in num_experts.
        num_chosen: experts of a token.
        rule: how they are chosen and weighed.

    Returns:
        Ids, [num_tokens, num_chosen] int32, and weights of the same shape in float32.

    Raises:
        ShapeError: the arguments disagree; checked on the host before launch.
    """
    if logits.ndim != 2 or logits.dtype not in checks.KERNEL_DTYPES:
        raise ShapeError(f"logits {describe(logits)} is not a matrix of a supported dtype")
    checks.check_last_dim("logits", logits)
    if not 1 <= num_chosen <= logits.shape[1]:
        raise ShapeError(f"{num_chosen} experts cannot be chosen by logits {describe(logits)}")
    for name, each in (("bias", rule.bias), ("expert_scales", rule.expert_scales)):
        if each is not None and (
            each.shape != logits.shape[1:] or each.stride(0) != 1 or each.device != logits.device
        ):
            raise ShapeError(f"{name} {describe(each)} does not fit logits {describe(logits)}")
    if not len(logits):
        ids = torch.empty(0, num_chosen, dtype=torch.int32, device=logits.device)
        return ids, ids.float()
    if not checks.use_triton(logits.device):
        return reference.route(logits, num_chosen, rule)
    chosen: tuple[Tensor, Tensor] = triton_module("routing").top_k(logits, num_chosen, rule)
    return chosen


def compute_experts(
    x: Tensor, ids: Tensor, weights: Tensor, experts: Experts, *, shared: SharedExpert | None = None
) -> Tensor:
    """Compute the chosen experts of each token, and add them up by their weights.

    Gate and up values are float32 until their product, which is rounded. The weighted result of
    each expert is rounded, and then the sum is. What a shared expert adds to that is not rounded
    before it is added, but the sigmoid of its gate is.

    Args:
        x: [num_tokens, hidden_size], contiguous in hidden_size.
        ids: [num_tokens, top_k] int32 or int64, contiguous, in the layer; they are not checked.
        weights: [num_tokens, top_k], a float dtype, contiguous.
        experts: of the layer, x's dtype. By weights in FP8, rows of x and inner values are
            multiplied in FP8 (see `fp8.quantise_rows`); weights in MXFP4 are rounded to x's dtype,
            which changes none of them in bfloat16.
        shared: what is added to the sums, or None.

    Returns:
        [num_tokens, hidden_size] in x's dtype, contiguous.

    Raises:
        ShapeError: the tensors disagree; checked on the host before launch.

    Source: Mixtral, Jiang et al. 2024; blocks of rows of one expert: MegaBlocks, Gale et al. 2022.
    """
    _check(x, ids, weights, experts, shared)
    if not len(x):
        return x.new_empty(x.shape)
    if not checks.use_triton(x.device):
        return reference.compute_experts(x, ids, weights, experts, shared).to(x.dtype)
    out: Tensor = triton_module("expert_products").compute_experts(x, ids, weights, experts, shared)
    return out


def add_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: Experts,
    *,
    residual: Tensor,
    norm: Tensor,
    style: NormStyle,
    shared: SharedExpert | None = None,
) -> Tensor:
    """Add the chosen experts to the residual stream, in place, and norm that for the next layer.

    Args:
        x: as in `compute_experts`, and so are the next three.
        ids: as well.
        weights: as well.
        experts: as well.
        residual: of x's shape and dtype, contiguous.
        norm: [hidden_size], x's dtype, the weights of the norm.
        style: of the norm.
        shared: as in `compute_experts`; with it, the sum is rounded before it is added.

    Returns:
        The normed residual stream, of x's shape and dtype, contiguous.

    Raises:
        ShapeError: the tensors disagree; checked on the host before launch.
    """
    _check(x, ids, weights, experts, shared)
    if residual.shape != x.shape or residual.dtype != x.dtype or not residual.is_contiguous():
        what = f"residual {describe(residual)} must be contiguous"
        raise ShapeError(f"{what} and have the shape and dtype of x {describe(x)}")
    layers.check_like("norm", norm, x, x.shape[1:])
    if not len(x):
        return x.new_empty(x.shape)
    if not checks.use_triton(x.device):
        residual += reference.compute_experts(x, ids, weights, experts, shared)
        return reference.add_and_norm(residual, None, norm[None], style)[0]
    normed: Tensor = triton_module("expert_products").add_experts(
        x, ids, weights, experts, shared, residual, norm, style
    )
    return normed


def _check(
    x: Tensor, ids: Tensor, weights: Tensor, experts: Experts, shared: SharedExpert | None
) -> None:
    gate_up, down = experts.gate_up, experts.down
    if x.ndim != 2 or x.dtype not in checks.KERNEL_DTYPES:
        raise ShapeError(f"x {describe(x)} is not a matrix of a supported dtype")
    checks.check_last_dim("x", x)
    if x.shape[1] > layers.MAX_HIDDEN_SIZE:
        most = f"the kernels support at most {layers.MAX_HIDDEN_SIZE}"
        raise ShapeError(f"hidden_size {x.shape[1]} is too large; {most}")
    num_dims = {len(weight.shape) for weight in (gate_up, down)}
    if num_dims != {3} or gate_up.shape[1] % 2 or gate_up.shape[2] != x.shape[1]:
        raise ShapeError(f"gate_up {describe_weight(gate_up)} does not fit x {describe(x)}")
    num_experts, num_outputs, hidden_size = gate_up.shape
    is_alike = format_of(gate_up) == format_of(down)
    if not is_alike or down.shape != (num_experts, hidden_size, num_outputs // 2):
        what = f"down {describe_weight(down)} does not fit gate_up {describe_weight(gate_up)}"
        raise ShapeError(what)
    for name, weight in (("gate_up", gate_up), ("down", down)):
        if not isinstance(weight, Tensor):
            check_quantized(name, weight, x)
        elif 1 not in weight.stride()[1:]:
            raise ShapeError(f"{name} {describe(weight)} is contiguous in none of its dimensions")
    for name, bias, like in (
        ("gate_up_bias", experts.gate_up_bias, gate_up),
        ("down_bias", experts.down_bias, down),
    ):
        if bias is not None and (bias.shape != like.shape[:2] or not bias.is_contiguous()):
            what = f"{name} {describe(bias)} does not fit a weight {describe_weight(like)}"
            raise ShapeError(what)
    for tensor in (gate_up, down, experts.gate_up_bias, experts.down_bias):
        if not isinstance(tensor, Tensor):
            continue
        if tensor.dtype != x.dtype or tensor.device != x.device:
            what = f"a weight of the experts, {describe(tensor)}"
            raise ShapeError(f"{what}, has not the dtype and device of x {describe(x)}")
    if ids.ndim != 2 or len(ids) != len(x) or weights.shape != ids.shape:
        what = f"ids {describe(ids)} and weights {describe(weights)}"
        raise ShapeError(f"{what} must have one row for each row of x {describe(x)}")
    for name, tensor, dtypes in (
        ("ids", ids, (torch.int32, torch.int64)),
        ("weights", weights, checks.KERNEL_DTYPES),
    ):
        if tensor.dtype not in dtypes or tensor.device != x.device or not tensor.is_contiguous():
            what = f"{name} {describe(tensor)} is not contiguous"
            raise ShapeError(f"{what}, or has not a supported dtype on {x.device}")
    if shared is None:
        return
    rows, gate = shared
    layers.check_like("rows of a shared expert", rows, x, x.shape)
    if gate.shape != x.shape[:1] or gate.dtype not in checks.KERNEL_DTYPES:
        raise ShapeError(
            f"the gate of a shared expert, {describe(gate)}, does not fit {describe(x)}"
        )
