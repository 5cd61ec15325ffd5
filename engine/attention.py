"""Paged attention as transformers' modelling code calls it: one opaque op that is told its layer.

The op finds its metadata in an `AttentionContext` by an integer handle, so that CUDA graphs and
`torch.compile` see tensors and ints only. A forward pass holds all tokens of a step in one
sequence. The module knows neither requests nor where blocks come from.
"""

import itertools
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from tieredkv.errors import ModelError
from tieredkv.kernels import launch
from tieredkv.kernels.checks import LayerCache
from tieredkv.kernels.partition import Batch

ATTENTION_NAME = "tieredkv"
CONTEXT_ARGUMENT = "paged_context"
"""The keyword under which a forward pass carries its context's handle to the attention layers."""


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """The slots and attention spans of one step's tokens.

    Attributes:
        slot_mapping: [num_tokens] on the device; -1 for a token whose keys and values are not
            written.
        batch: their requests, contexts, and how attention's work is shared out.
        last: the tokens whose logits are wanted, by themselves; None where all are attended.
    """

    slot_mapping: Tensor
    batch: Batch
    last: Batch | None = None


def late_layer(num_layers: int) -> int:
    """Return the first of the layers whose keys and values may arrive while others compute.

    An eighth of them: as long as its bytes take, the layers before compute a short chunk.
    """
    return num_layers - max(1, num_layers // 8)


class AttentionContext:
    """The paged cache of one runner, layer by layer, and the step that is being computed.

    One thread runs forward passes over a context. The pool belongs to the caller.

    Attributes:
        caches: of the layers.
        step: what is being computed.
        handle: stands for the context in calls of the op.
    """

    def __init__(self, kv_pool: Tensor) -> None:
        layers = range(kv_pool.shape[1])
        self.caches = [LayerCache(kv_pool[:, i, 0], kv_pool[:, i, 1]) for i in layers]
        self.step: StepMetadata | None = None
        self._late_layer = late_layer(len(layers))
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

    def store(self, key: Tensor, value: Tensor, layer: int) -> None:
        """Write the step's keys and values of one layer into the pool."""
        step = self.step
        assert step is not None, "a forward pass ran outside of ModelRunner.launch"
        launch.store_kv(key, value, self.caches[layer], step.slot_mapping)

    def attend(self, query: Tensor, scale: float, layer: int, kept: Tensor | None = None) -> Tensor:
        """Attend the step's queries, or only the `kept` ones, to the pool with the step's keys."""
        step = self.step
        assert step is not None, "a forward pass ran outside of ModelRunner.launch"
        if self._gate is not None and layer == self._late_layer:
            self._gate.wait(torch.cuda.current_stream(query.device))
        if kept is not None and step.last is not None:
            return launch.paged_attention(query[kept], self.caches[layer], step.last, scale)
        attended = launch.paged_attention(query, self.caches[layer], step.batch, scale)
        return attended if kept is None else attended[kept]


_handles = itertools.count(1)
_contexts: weakref.WeakValueDictionary[int, AttentionContext] = weakref.WeakValueDictionary()

if hasattr(torch.ops.tieredkv, "paged_attention"):
    # NOTE: torch would replace the op silently, and the runners of the first import would then
    # look their contexts up in the second import's registry.
    raise ImportError("`tieredkv.engine.attention` was imported twice, under two names")


@torch.library.custom_op("tieredkv::paged_attention", mutates_args=())
def paged_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, layer: int, context: int
) -> Tensor:
    """Attend over the paged cache of a context; torch does not know that this writes to the pool.

    Args:
        query: [num_tokens, num_heads, head_dim].
        key: [num_tokens, num_kv_heads, head_dim], rotated.
        value: as key.
        scale: factor on the scores.
        layer: index of the layer in the pool.
        context: handle of the `AttentionContext`.

    Returns:
        [num_tokens, num_heads, head_dim].
    """
    _contexts[context].store(key, value, layer)
    return _contexts[context].attend(query, scale, layer)


@paged_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, scale: float, layer: int, context: int) -> Tensor:
    return query.new_empty(query.shape)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's call of the attention interface, as recorded.

    A list of calls stands in for a context's handle in a forward pass without weights.
    """

    layer: int
    query_shape: tuple[int, ...]
    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    is_causal: bool
    options: dict[str, object]


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

    No mask is used: causality follows from the positions in the cache. Options that change the
    result (windows, sinks, soft caps) were refused when the model was loaded.
    """
    context = options.pop(CONTEXT_ARGUMENT, None)
    layer = module.layer_idx
    assert isinstance(layer, int), f"layer index is `{layer}`"
    if isinstance(context, list):
        shapes = tuple(query.shape), tuple(key.shape), tuple(value.shape)
        is_causal = bool(getattr(module, "is_causal", True))
        options["attention_mask"] = attention_mask
        context.append(AttentionCall(layer, *shapes, is_causal, options))
        return query.transpose(1, 2), None
    if not isinstance(context, int):
        raise ModelError("its layers do not pass keyword arguments on to the attention interface")
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return torch.ops.tieredkv.paged_attention(q, k, v, scale, layer, context)[None], None


# NOTE: no mask function is registered. For an implementation without one transformers builds no
# mask at all; with one it would first search the positions for packed sequences on the device.
AttentionInterface.register(ATTENTION_NAME, attention_forward)
