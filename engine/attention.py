"""Paged attention as transformers' modelling code calls it: one opaque op that is told its layer.

The op finds its metadata in an `AttentionContext` by an integer handle, so that CUDA graphs and
`torch.compile` see tensors and ints only. A forward pass holds all tokens of a step in one
sequence. The module knows neither requests nor where blocks come from.
"""

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from tieredkv.engine.latent import expansion, has_latents, latent_dims
from tieredkv.errors import ModelError
from tieredkv.kernels import latents, launch, prefill_dense, states
from tieredkv.kernels.checks import LayerCache
from tieredkv.kernels.partition import Batch, Heads, Latent
from tieredkv.kernels.state_layout import LayerState, StateRows
from tieredkv.types import DTYPE_BYTES, KVSpec, LayerKV, PageKind, StateShape

ATTENTION_NAME = "tieredkv"
CONTEXT_ARGUMENT = "paged_context"
"""The keyword under which a forward pass carries its context's handle to the attention layers."""


class AttentionLayer(NamedTuple):
    """One attention layer of a model.

    Attributes:
        source: the layer whose keys and values it attends to: an earlier one, or itself.
        window: how many tokens a token attends to, itself included; None for all before it.
        latent: of a layer with latent attention, where one KV head has what is stored for a token.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    source: int
    window: int | None = None
    latent: Latent | None = None

    @property
    def stored(self) -> LayerKV:
        """What is stored for a token, if the layer has keys and values of its own."""
        is_latent = self.latent is not None
        return LayerKV(self.num_kv_heads, self.head_dim, self.window, values_in_keys=is_latent)

    @property
    def pair_flops(self) -> int:
        """Operations of attention for a token of a prompt and a token that it attends to."""
        if self.latent is None:
            return 4 * self.num_heads * self.head_dim
        return 2 * self.num_heads * self.latent.pair_products(is_expanded=True)

    def num_seen(self, context_len: int) -> int:
        """Return to how many tokens of a context its last one attends."""
        return context_len if self.window is None else min(context_len, self.window)


class AttentionKind(NamedTuple):
    """What layers have in common that attend to the same pages, with their work shared out alike.

    Attributes:
        page: index of the kind of page that has their keys and values.
    """

    heads: Heads
    window: int | None
    page: int

    def is_dense(self, context_len: int) -> bool:
        """Return whether chunks that end there may be attended over gathered keys and values."""
        is_whole = self.window is None or self.window >= context_len
        return is_whole and prefill_dense.is_available(self.heads)

    def has_products(self) -> bool:
        """Return whether queries behind a long context may be attended as two products."""
        return self.heads.latent is not None and prefill_dense.is_available(self.heads)


ModelLayer = AttentionLayer | StateShape
"""What one layer of a model keeps of the tokens before."""


def attention_layers(layers: Sequence[ModelLayer]) -> dict[int, AttentionLayer]:
    """Return the layers that have attention, by their index."""
    return {i: layer for i, layer in enumerate(layers) if isinstance(layer, AttentionLayer)}


def own_layers(layers: Sequence[ModelLayer]) -> list[LayerKV]:
    """Return the shapes of those layers that have keys and values of their own."""
    found = attention_layers(layers)
    return [layer.stored for index, layer in found.items() if layer.source == index]


class StepStates(NamedTuple):
    """Where the recurrent states are that a step changes.

    Attributes:
        tables: see `BlockTables.states`.
        rows: of the step.
    """

    tables: Tensor
    rows: StateRows


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """The slots and attention spans of one step's tokens.

    Attributes:
        slots: [num_page_kinds, num_tokens] on the device; -1 for a token whose keys and values are
            not written.
        states: whose recurrent state each token changes; None of a model without such layers.
        batches: for each kind of layer their requests, contexts, and how attention's work is shared
            out.
        last: the tokens whose logits are wanted, by themselves; None where all are attended.
    """

    slots: Tensor
    batches: Sequence[Batch]
    last: Sequence[Batch] | None = None
    states: StepStates | None = None


def late_layer(num_layers: int) -> int:
    """Return the first of the layers whose keys and values may arrive while others compute.

    An eighth of them: as long as its bytes take, the layers before compute a short chunk.
    """
    return num_layers - max(1, num_layers // 8)


def early_bytes(spec: KVSpec) -> int:
    """Return how many bytes of a page lie before those of its first late layer."""
    first, *_ = spec.page_kinds
    num_elements = spec.first_element(first, late_layer(len(first.layers)))
    return num_elements * DTYPE_BYTES[spec.dtype]


class AttentionContext:
    """The paged cache of one runner, layer by layer, and the step that is being computed.

    One thread runs forward passes over a context. The pool belongs to the caller.

    Args:
        kv_pool: [num_pages, elements of a page], as `spec` says.
        spec: how keys and values lie in pages.
        layers: of the model.

    Attributes:
        kinds: of the layers with attention, each once.
        caches: keys and values that each of these layers attends to.
        step: what is being computed.
        handle: stands for the context in calls of the op.
    """

    def __init__(self, kv_pool: Tensor, spec: KVSpec, layers: Sequence[ModelLayer]) -> None:
        attending = attention_layers(layers)
        own = [index for index, layer in attending.items() if layer.source == index]
        caches, pages = dict[int, LayerCache](), dict[int, int]()
        self._rests = _unused_rests(kv_pool, spec)
        for page, kind in enumerate(spec.page_kinds):
            for number, cache in enumerate(_layer_caches(kv_pool, spec, kind)):
                source = own[kind.layers[number]]
                caches[source], pages[source] = cache, page
        self.caches = {index: caches[layer.source] for index, layer in attending.items()}
        place = kv_pool.dtype, kv_pool.device
        kinds = {
            index: AttentionKind(Heads(*it[:3], *place, it.latent), it.window, pages[it.source])
            for index, it in attending.items()
        }
        self.kinds = list(dict.fromkeys(kinds.values()))
        self._kind_of = {index: self.kinds.index(kind) for index, kind in kinds.items()}
        recurrent = {i: it for i, it in enumerate(layers) if isinstance(it, StateShape)}
        ends = itertools.accumulate(it.layer_pieces for it in recurrent.values())
        self._states = {
            index: (shape, end - shape.layer_pieces)
            for (index, shape), end in zip(recurrent.items(), ends, strict=True)
        }
        self._floats = kv_pool.view(torch.float32) if recurrent else kv_pool
        self.step: StepMetadata | None = None
        first = spec.page_kinds[0].layers
        self._layers, self._late_layer = attending, own[first[late_layer(len(first))]]
        self._gate: torch.cuda.Event | None = None
        if kv_pool.is_cuda:
            self._gate = torch.cuda.Event(external=True)
            self._gate_stream = torch.cuda.Stream(kv_pool.device)
            self._gate.record(self._gate_stream)
        self.handle = next(_handles)
        _contexts[self.handle] = self

    def hold_late_layers(self, event: torch.cuda.Event) -> None:
        """Have the next step's layers from `late_layer` on wait for an event, on a GPU."""
        if self._gate is not None:
            # A captured graph always waits for the same event, which is recorded here.
            self._gate_stream.wait_event(event)
            self._gate.record(self._gate_stream)

    def clear_rests(self) -> None:
        """Write zeros where no layer writes anything for the step's tokens.

        A page may have held the keys of another request, which must not go where this one goes.
        """
        assert self.step is not None, "a forward pass ran outside of ModelRunner.launch"
        for page, rest, zeros in self._rests:
            slots = self.step.slots[page]
            nothing = zeros.expand(len(slots), -1, -1)
            launch.store_kv(nothing, nothing, rest, slots)

    def store(self, key: Tensor, value: Tensor, layer: int) -> None:
        """Write the step's keys and values of one layer into the pool."""
        if self._layers[layer].source == layer:
            launch.store_kv(key, value, self.caches[layer], self.slots(layer))

    def slots(self, layer: int) -> Tensor:
        """Return where the step's keys and values of a layer are written; see `StepMetadata`."""
        assert self.step is not None, "a forward pass ran outside of ModelRunner.launch"
        return self.step.slots[self.kinds[self._kind_of[layer]].page]

    def attend(
        self,
        query: Tensor,
        scale: float,
        layer: int,
        kept: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend the step's queries, or only the `kept` ones, to the pool with the step's keys."""
        step, cache, kind = self._await_layer(layer), self.caches[layer], self._kind_of[layer]
        attend = partial(launch.paged_attention, window=self.kinds[kind].window, sinks=sinks)
        if kept is not None and step.last is not None:
            return attend(query[kept], cache, step.last[kind], scale)
        attended = attend(query, cache, step.batches[kind], scale)
        return attended if kept is None else attended[kept]

    def store_latents(self, latent: Tensor, rotated: Tensor, layer: int) -> None:
        """Write the step's latents and rotated parts of one layer into the pool."""
        latents.store_latents(latent, rotated, self.latents(layer), self.slots(layer))

    def attend_latents(
        self, plain: Tensor, rotated: Tensor, matrix: Tensor, scale: float, layer: int
    ) -> Tensor:
        """Attend the step's queries of one layer, in two parts, to the pool with its latents."""
        step, kind = self._await_layer(layer), self._kind_of[layer]
        rest = self.latents(layer), matrix, step.batches[kind], scale, self.kinds[kind].heads
        return latents.latent_attention(plain, rotated, *rest)

    def recur(
        self,
        mixed: Tensor,
        update: Tensor,
        decay: Tensor,
        conv: tuple[Tensor, Tensor | None],
        rates: tuple[Tensor, Tensor],
        *,
        layer: int,
        update_scale: float,
    ) -> Tensor:
        """Run the convolution and the recurrence of a layer over the step's tokens.

        Args:
            mixed: [num_tokens, num_channels], queries, keys and values.
            update: [num_tokens, num_heads], before the sigmoid.
            decay: [num_tokens, num_heads], before the softplus.
            conv: weight and bias of the convolution.
            rates: the logarithm of each head's decay, and what is added to `decay`.
            layer: index of the layer in the model.
            update_scale: factor on how much a token changes the state.

        Returns:
            [num_tokens, num_heads, value_dim].
        """
        assert self.step is not None, "a forward pass ran outside of ModelRunner.launch"
        assert self.step.states is not None, "the step has no states"
        tables, rows = self.step.states
        state = LayerState(self._floats, tables, *self._states[layer])
        turned = states.short_conv(mixed, *conv, state, rows)
        return states.delta_rule(
            turned, decay, update, *rates, state, rows, beta_scale=update_scale
        )

    def latents(self, layer: int) -> Tensor:
        """Return what a layer with latent attention stores, `[num_blocks, block_size, ...]`."""
        return self.caches[layer].k[:, :, 0]

    def heads(self, layer: int) -> Heads:
        """Return the heads of a layer."""
        return self.kinds[self._kind_of[layer]].heads

    def _await_layer(self, layer: int) -> StepMetadata:
        """Return the step, once what a layer attends to has arrived, by the stream's order."""
        assert self.step is not None, "a forward pass ran outside of ModelRunner.launch"
        if self._gate is not None and layer == self._late_layer:
            self._gate.wait(torch.cuda.current_stream(self._gate_stream.device))
        return self.step


def _unused_rests(kv_pool: Tensor, spec: KVSpec) -> list[tuple[int, LayerCache, Tensor]]:
    """Return what no layer fills of pages: the kind's index, the rest, and zeros for one token.

    The rest is as if it were that of a layer.
    """
    rests = []
    for page, kind in enumerate(spec.page_kinds):
        unused = kv_pool[:, spec.first_element(kind, len(kind.layers)) :]
        if dim := unused.shape[1] // (2 * spec.block_size):
            rest = LayerCache(*unused.unflatten(1, (2, spec.block_size, 1, dim)).unbind(1))
            rests.append((page, rest, kv_pool.new_zeros(1, 1, dim)))
    return rests


def _layer_caches(kv_pool: Tensor, spec: KVSpec, kind: PageKind) -> list[LayerCache]:
    """Return the keys and values of each layer of one kind of page, as views of the pool.

    Both are the same where the values lie in the keys.
    """
    caches = []
    for number, index in enumerate(kind.layers):
        layer = spec.layers[index]
        part = kv_pool[:, spec.first_element(kind, number) : spec.first_element(kind, number + 1)]
        num_parts = 1 if layer.values_in_keys else 2
        parts = part.unflatten(1, (num_parts, spec.block_size, *layer[:2]))
        caches.append(LayerCache(parts[:, 0], parts[:, -1]))
    return caches


_handles = itertools.count(1)
_contexts: weakref.WeakValueDictionary[int, AttentionContext] = weakref.WeakValueDictionary()


def context_of(handle: int) -> AttentionContext:
    """Return the context that a handle stands for."""
    return _contexts[handle]


if hasattr(torch.ops.tieredkv, "paged_attention"):
    # NOTE: torch would replace the op silently, and the runners of the first import would then
    # look their contexts up in the second import's registry.
    raise ImportError("`tieredkv.engine.attention` was imported twice, under two names")


@torch.library.custom_op("tieredkv::paged_attention", mutates_args=())
def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    scale: float,
    layer: int,
    context: int,
) -> Tensor:
    """Attend over the paged cache of a context; torch does not know that this writes to the pool.

    Args:
        query: [num_tokens, num_heads, head_dim].
        key: [num_tokens, num_kv_heads, head_dim], rotated.
        value: as key.
        sinks: [num_heads], of a layer that has them.
        scale: factor on the scores.
        layer: index of the layer in the model.
        context: handle of the `AttentionContext`.

    Returns:
        [num_tokens, num_heads, head_dim].
    """
    _contexts[context].store(key, value, layer)
    return _contexts[context].attend(query, scale, layer, sinks=sinks)


@paged_attention.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    scale: float,
    layer: int,
    context: int,
) -> Tensor:
    return query.new_empty(query.shape)


@torch.library.custom_op("tieredkv::latent_attention", mutates_args=())
def latent_attention(
    query: Tensor,
    latent: Tensor,
    rotated: Tensor,
    matrix: Tensor,
    scale: float,
    layer: int,
    context: int,
) -> Tensor:
    """Attend over the paged latents of a context; torch does not know that this writes to the pool.

    Args:
        query: [num_tokens, num_heads, query_dim], the last rope_dim of them rotated.
        latent: [num_tokens, rank], normed.
        rotated: [num_tokens, rope_dim].
        matrix: [num_heads * (key_dim + value_dim), rank], which makes keys and values of latents.
        scale: factor on the scores.
        layer: index of the layer in the model.
        context: handle of the `AttentionContext`.

    Returns:
        [num_tokens, num_heads, value_dim].
    """
    found, rope_dim = _contexts[context], rotated.shape[1]
    found.store_latents(latent, rotated, layer)
    plain, rest = query[..., :-rope_dim], query[..., -rope_dim:]
    return found.attend_latents(plain, rest, matrix, scale, layer)


@latent_attention.register_fake
def _(
    query: Tensor,
    latent: Tensor,
    rotated: Tensor,
    matrix: Tensor,
    scale: float,
    layer: int,
    context: int,
) -> Tensor:
    num_tokens, num_heads, query_dim = query.shape
    value_dim = len(matrix) // num_heads - query_dim + rotated.shape[1]
    return query.new_empty(num_tokens, num_heads, value_dim)


class StateCall(NamedTuple):
    """One call of a recurrent layer, as recorded in place of an `AttentionCall`."""

    layer: int
    shape: StateShape
    activation: str


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's call of the attention interface, as recorded.

    A list of calls stands in for a context's handle in a forward pass without weights.

    Attributes:
        key: the keys, by which layers are found that attend to those of another layer.
        latent: dims of a layer that gives latents in place of keys.
    """

    layer: int
    query_shape: tuple[int, ...]
    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    key: Tensor
    is_causal: bool
    options: dict[str, object]
    latent: Latent | None = None


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: object,
) -> tuple[Tensor, None]:
    """Serve transformers' attention interface; tensors come as [1, heads, num_tokens, head_dim].

    No mask is used: causality and windows follow from the positions in the cache. Other options
    that change the result, such as soft caps, were refused when the model was loaded. See
    `keep_latents` for what a module with latent attention gives in place of keys and values.
    """
    context = options.pop(CONTEXT_ARGUMENT, None)
    layer = module.layer_idx
    assert isinstance(layer, int), f"layer index is `{layer}`"
    if isinstance(context, list):
        shapes = tuple(query.shape), tuple(key.shape), tuple(value.shape)
        is_causal = bool(getattr(module, "is_causal", True))
        options["attention_mask"] = attention_mask
        latent = latent_dims(module, query, key, value) if has_latents(module) else None
        context.append(AttentionCall(layer, *shapes, key, is_causal, options, latent))
        dim = query.shape[-1] if latent is None else latent.value_dim
        return query.new_empty(*query.shape[:-1], dim).transpose(1, 2), None
    if not isinstance(context, int):
        raise ModelError("its layers do not pass keyword arguments on to the attention interface")
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if has_latents(module):
        rest = k[:, 0], v[:, 0], expansion(module), scale, layer, context
        return torch.ops.tieredkv.latent_attention(q, *rest)[None], None
    sinks = options.get("s_aux")
    return torch.ops.tieredkv.paged_attention(q, k, v, sinks, scale, layer, context)[None], None


# NOTE: no mask function is registered. For an implementation without one transformers builds no
# mask at all; with one it would first search the positions for packed sequences on the device.
AttentionInterface.register(ATTENTION_NAME, attention_forward)
