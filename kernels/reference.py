"""The kernels in plain torch: the reference for the Triton code, and the engine's code on a CPU.

All computation is in float32, for any dtype of the cache. Every request is computed alone, so that
its result does not depend on the rest of the batch. This module knows no requests, tiers or
backends; callers go through `tieredkv.kernels.launch`, `layers` and `experts`, which check shapes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tieredkv.kernels.checks import Branch, HeadNorms, LayerCache, NormStyle, Rope
from tieredkv.kernels.expert_layout import Experts, Gate, GateKind, RoutingRule, SharedExpert
from tieredkv.kernels.partition import Batch, Latent
from tieredkv.kernels.quantized import FP8_BLOCK, FP8_MAX, Fp8Matrix, Weight


def store_kv(k: Tensor, v: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
    """Write new keys and values into the paged cache, in place; see `launch.store_kv`."""
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    block_ids, offsets = slots // cache.k.shape[1], slots % cache.k.shape[1]
    cache.k[block_ids, offsets] = k[kept]
    cache.v[block_ids, offsets] = v[kept]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise along the last dimension; see `layers.rms_norm`."""
    return _norm(x, weight, NormStyle(eps))


def _norm(x: Tensor, weight: Tensor | float, style: NormStyle) -> Tensor:
    exact = x.float()
    exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + style.eps)
    if style.is_rounded_first:
        exact = exact.to(x.dtype).float()
    return (exact * (weight + style.offset)).to(x.dtype)


def add_and_norm(
    residual: Tensor, branch: Branch | None, norms: Tensor, style: NormStyle
) -> Tensor:
    """Add a normed branch to the residual stream and norm that; see `layers.add_and_norm`."""
    if branch is not None:
        rows = branch.rows
        if branch.others is not None and branch.own_norms is not None:
            first, second = branch.own_norms.float()
            rows = _norm(rows, first, style) + _norm(branch.others, second, style)
        residual += rows if branch.norm is None else _norm(rows, branch.norm.float(), style)
        if branch.scalar is not None:
            residual *= branch.scalar
    normed = residual.new_empty(len(norms), *residual.shape)
    for out, weight in zip(normed, norms.float(), strict=True):
        out.copy_(_norm(residual, weight, style))
    return normed


def gate_mul(gate_up: Tensor, kind: GateKind) -> Tensor:
    """Multiply one half by the activation of the other; see `layers.gate_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate) if kind == "silu" else F.gelu(gate, approximate="tanh")) * up


def gate_heads(heads: Tensor, gates: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    """Multiply heads by their gates' activations; see `layers.gate_heads`."""
    if norm is None:
        return heads * torch.sigmoid(gates)
    return (rms_norm(heads, norm, eps).float() * F.silu(gates.float())).to(heads.dtype)


def route(logits: Tensor, num_chosen: int, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    """Choose the experts with the largest scores and weigh them; see `experts.route`."""
    logits = logits.float() * rule.logit_scale
    scores = logits.sigmoid() if rule.is_sigmoid else logits.softmax(dim=-1)
    choice = scores if rule.is_sigmoid else logits
    ids = (choice if rule.bias is None else choice + rule.bias).topk(num_chosen, dim=-1).indices
    weights = scores.gather(1, ids)
    if rule.is_normalised:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    weights = weights * rule.scale
    if rule.expert_scales is not None:
        weights = weights * rule.expert_scales[ids].float()
    return ids.int(), weights


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each 128 columns of a row to FP8; see `fp8.quantise_rows`."""
    groups = x.float().unflatten(1, (-1, FP8_BLOCK))
    scales = groups.abs().amax(-1).clamp(min=1e-10) / FP8_MAX
    values = (groups / scales[..., None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return values.flatten(1), scales.t().contiguous().t()


def multiply_fp8(x: Tensor, weight: Fp8Matrix, bias: Tensor | None) -> Tensor:
    """Multiply quantized rows by weights in FP8; see `fp8.multiply`.

    Returns:
        The sums in float32.
    """
    bias = None if bias is None else bias.float()
    return F.linear(_as_multiplied(x, weight), weight.dequantised(torch.float32), bias)


def _as_multiplied(x: Tensor, weight: Weight) -> Tensor:
    """Return rows in float32, as a product with the weight reads them."""
    if not isinstance(weight, Fp8Matrix):
        return x.float()
    values, scales = quantise_rows(x)
    groups = values.float().unflatten(1, (-1, FP8_BLOCK))
    rows: Tensor = groups * scales[..., None]
    return rows.flatten(1)


def _weight_of(weight: Weight, expert: int, dtype: torch.dtype) -> Tensor:
    """Return the weights of one expert in float32, as a product with rows of a dtype reads them."""
    if isinstance(weight, Tensor):
        return weight[expert].float()
    is_fp8 = isinstance(weight, Fp8Matrix)
    return weight.at(expert).dequantised(torch.float32 if is_fp8 else dtype).float()


def compute_experts(
    x: Tensor, ids: Tensor, weights: Tensor, experts: Experts, shared: SharedExpert | None = None
) -> Tensor:
    """Compute the chosen experts of each token, expert by expert; see `experts.compute_experts`.

    Returns:
        The sums in float32, or in x's dtype with a shared expert.
    """
    pairs = ids.flatten()
    parts = x.new_empty(len(pairs), x.shape[1], dtype=torch.float32)
    for expert in pairs.unique().tolist():
        own = (pairs == expert).nonzero()[:, 0]
        bias, down_bias = (
            None if each is None else each[expert].float()
            for each in (experts.gate_up_bias, experts.down_bias)
        )
        rows = _as_multiplied(x[own // ids.shape[1]], experts.gate_up)
        gate_up = _weight_of(experts.gate_up, expert, x.dtype)
        inner = gated(F.linear(rows, gate_up, bias), experts.gate).to(x.dtype)
        down = _weight_of(experts.down, expert, x.dtype)
        parts[own] = F.linear(_as_multiplied(inner, experts.down), down, down_bias)
    out = (parts.view(*ids.shape, -1) * weights.float()[..., None]).sum(dim=1)
    if shared is None:
        return out
    return out.to(x.dtype).addcmul_(shared.rows, shared.gate.sigmoid()[:, None])


def gated(gate_up: Tensor, gate: Gate) -> Tensor:
    """Multiply up values by their activated gate values; see `Gate`."""
    if gate.is_interleaved:
        x, up = gate_up[..., ::2], gate_up[..., 1::2]
    else:
        x, up = gate_up.chunk(2, dim=-1)
    if gate.kind == "clamped":
        x, up = x.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
        return x * torch.sigmoid(gate.alpha * x) * (up + 1)
    return (F.silu(x) if gate.kind == "silu" else F.gelu(x, approximate="tanh")) * up


def rotate_and_store(
    qkv: Tensor,
    num_heads: int,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cache: LayerCache,
    norms: HeadNorms | None,
    has_gates: bool,
    is_partial: bool,
) -> Tensor:
    """Rotate queries and keys, write keys and values; see `layers.rotate_and_store`."""
    num_kv_heads, head_dim = cache.k.shape[2:]
    num_first = 2 * num_heads if has_gates else num_heads
    q, *rest = qkv.unflatten(1, (-1, head_dim)).tensor_split(
        [num_first, num_first + num_kv_heads], dim=1
    )
    q = q[:, ::2] if has_gates else q
    cos, sin = cos_sin[positions][:, None].chunk(2, dim=-1)
    if not is_partial:
        unturned = head_dim // 2 - cos.shape[-1]
        cos, sin = F.pad(cos, (0, unturned), value=1.0), F.pad(sin, (0, unturned))
    k, v = rest if rest[1].shape[1] else (rest[0], rest[0])
    if norms is not None:
        weights = norms.weights.float()
        q, k = _norm(q, weights[0], norms.style), _norm(k, weights[-1], norms.style)
        if norms.has_values:
            v = _norm(v, 1.0, norms.style._replace(offset=0.0))
    if k.shape[1]:
        store_kv(_rotate(k, cos, sin), v, cache, slot_mapping)
    return _rotate(q, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2 A elements of x [n, heads, D]; cosines and sines are [n, 1, A]."""
    num_angles = cos.shape[-1]
    low, high, rest = x.float().tensor_split([num_angles, 2 * num_angles], dim=-1)
    turned = low * cos - high * sin, high * cos + low * sin
    return torch.cat([*turned, rest], dim=-1).to(x.dtype)


def paged_attention(
    q: Tensor,
    cache: LayerCache,
    batch: Batch,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend each span's queries causally to its context; see `launch.paged_attention`."""
    out = q.new_zeros(q.shape)
    for row, start, query_len, context_len in batch.spans:
        if query_len:
            first = 0 if window is None else max(0, context_len - query_len - window + 1)
            table = batch.block_tables[row]
            k, v = (gather_context(part, table, first, context_len).float() for part in cache)
            queries = q[start : start + query_len].float()
            if sinks is None:
                attended = _attend(queries, k, v, scale, window)
            else:
                attended = _attend_with_sinks(queries, k, v, scale, window, sinks)
            out[start : start + query_len] = attended.to(q.dtype)
    return out


def store_latents(latent: Tensor, rotated: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Write latents and rotated parts into the paged cache; see `latents.store_latents`."""
    whole = torch.cat([latent, rotated], dim=1)[:, None]
    store_kv(whole, whole, LayerCache(cache[:, :, None], cache[:, :, None]), slot_mapping)


def rotate_and_store_latents(
    q: Tensor,
    stored: Tensor,
    norm: Tensor,
    eps: float,
    rope: Rope,
    cache: Tensor,
    slot_mapping: Tensor,
    latent: Latent,
) -> Tensor:
    """Rotate queries, and write normed and rotated latents; see `latents.rotate_and_store`."""
    plain, rotated = stored.split([latent.rank, latent.rope_dim], dim=1)
    key = _rotate_pairs(rotated[:, None], rope)[:, 0]
    store_latents(rms_norm(plain, norm, eps), key, cache, slot_mapping)
    return _rotate_pairs(q.unflatten(1, (-1, latent.query_dim))[..., latent.key_dim :], rope)


def _rotate_pairs(x: Tensor, rope: Rope) -> Tensor:
    """Rotate x [n, heads, rope_dim]."""
    cos, sin = rope.cos.float()[:, None], rope.sin.float()[:, None]
    exact = x.float()
    low, high = (exact[..., 0::2], exact[..., 1::2]) if rope.reads_pairs else exact.chunk(2, dim=-1)
    turned = low * cos - high * sin, high * cos + low * sin
    whole = torch.stack(turned, dim=-1).flatten(-2) if rope.writes_pairs else torch.cat(turned, -1)
    return whole.to(x.dtype)


def latent_attention(
    q: Tensor, cache: Tensor, weights: Tensor, batch: Batch, scale: float, latent: Latent
) -> Tensor:
    """Attend over paged latents, by whichever way takes fewer operations.

    See `latents.latent_attention`. The weights are [num_heads, key_dim + value_dim, rank].
    """
    out = q.new_zeros(*q.shape[:2], latent.value_dim)
    for row, start, query_len, context_len in batch.spans:
        if query_len:
            table = batch.block_tables[row]
            context = gather_context(cache[:, :, None], table, 0, context_len)[:, 0].float()
            queries = q[start : start + query_len].float()
            attend = attend_expanded if latent.should_expand(query_len) else attend_absorbed
            attended = attend(queries, context, weights.float(), scale, latent)
            out[start : start + query_len] = attended.to(q.dtype)
    return out


def attend_absorbed(
    q: Tensor, context: Tensor, weights: Tensor, scale: float, latent: Latent
) -> Tensor:
    """Attend q, the last n of m positions, causally to what is stored for all m.

    Args:
        q: [n, num_heads, query_dim].
        context: [m, rank + rope_dim].
        weights: [num_heads, key_dim + value_dim, rank].
        scale: factor on the scores.
        latent: dims of the heads.

    Returns:
        [n, num_heads, value_dim].
    """
    to_key, to_value = weights.split([latent.key_dim, latent.value_dim], dim=1)
    plain, rotated = q.split([latent.key_dim, latent.rope_dim], dim=2)
    absorbed = torch.cat([torch.einsum("nhd,hdr->nhr", plain, to_key), rotated], dim=2)
    k = context[:, None]
    summed = _attend(absorbed, k, k[..., : latent.rank], scale, None)
    return torch.einsum("nhr,hdr->nhd", summed, to_value)


def attend_expanded(
    q: Tensor, context: Tensor, weights: Tensor, scale: float, latent: Latent
) -> Tensor:
    """Compute what `attend_absorbed` does from the keys and values of all heads."""
    latents, rotated = context.split([latent.rank, latent.rope_dim], dim=1)
    made = torch.einsum("mr,hdr->mhd", latents, weights)
    plain, v = made.split([latent.key_dim, latent.value_dim], dim=2)
    k = torch.cat([plain, rotated[:, None].expand(-1, plain.shape[1], -1)], dim=2)
    return _attend(q, k, v, scale, None)


def gather_context(cache: Tensor, block_table: Tensor, first: int, end: int) -> Tensor:
    """Copy the tokens [first, end) of a request out of the paged cache.

    Args:
        cache: [num_blocks, block_size, num_kv_heads, head_dim].
        block_table: [max_blocks]; only entries of blocks with these tokens are read.
        first: position of the first token to copy.
        end: position after the last one.

    Returns:
        [end - first, num_kv_heads, head_dim], a contiguous copy.
    """
    block_size = cache.shape[1]
    first_block, end_block = first // block_size, -(-end // block_size)
    blocks = cache.index_select(0, block_table[first_block:end_block])
    return blocks.flatten(0, 1)[first - first_block * block_size : end - first_block * block_size]


def _seen(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return which of the keys each of the last positions sees, [num_queries, num_keys] bool."""
    keys = torch.arange(num_keys, device=device)
    queries = keys[num_keys - num_queries :, None]
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)


def _attend_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, sinks: Tensor
) -> Tensor:
    """Attend as `_attend`, with one more score for each head, sinks [Hq], that has no value."""
    num_queries, num_heads, _ = q.shape
    num_keys, num_kv_heads, _ = k.shape
    k, v = (x.repeat_interleave(num_heads // num_kv_heads, 1).transpose(0, 1) for x in (k, v))
    scores = q.transpose(0, 1) @ k.transpose(1, 2) * scale
    scores.masked_fill_(~_seen(num_queries, num_keys, window, q.device), float("-inf"))
    sink = sinks.float()[:, None, None].expand(-1, num_queries, 1)
    weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    return (weights @ v).transpose(0, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """Attend q [n, Hq, D], the last n of m positions, causally to k and v [m, Hkv, D].

    A single query sees all of k, which begins where its window does.
    """
    num_queries, num_heads, head_dim = q.shape
    num_keys, num_kv_heads, _ = k.shape
    if num_queries == 1:  # the heads of a group become rows; no mask needed
        rows = q.reshape(1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        out = F.scaled_dot_product_attention(
            rows, k.transpose(0, 1)[None], v.transpose(0, 1)[None], scale=scale
        )
        return out.reshape(1, num_heads, -1)
    mask = None
    if num_queries < num_keys or (window is not None and window < num_keys):
        mask = _seen(num_queries, num_keys, window, q.device)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)
