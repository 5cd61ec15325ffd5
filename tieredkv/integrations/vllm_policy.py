"""Eviction from vLLM's memory that respects pins: a `CachePolicy` for vLLM 0.33.

    "eviction_policy": "RetentionCachePolicy",
    "cache_policy_module_path": "tieredkv.integrations.vllm_policy"

beside `cpu_bytes_to_use` in `kv_connector_extra_config`. A request pins its chunks by
`kv_transfer_params.tieredkv`: for `pin_s` seconds from its start, as the middleware has it from
`cache_control`, or for as long as a retention `5m` or `1h` says. Pinned chunks are evicted last.
As in tieredkv's own memory, at most half of all chunks is pinned, and no other retention pins:
what `24h` asked for is on disk when it is evicted here.

Apart from pins, the order is that of vLLM's own `lru` policy: least recently used first, and of one
request the tail of the prompt before its head.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

try:
    from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, order_request_keys
except ImportError as problem:
    raise ImportError(
        "tieredkv.integrations.vllm_policy needs vLLM 0.33 or newer, whose memory takes policies "
        f"from outside: leave out `cache_policy_module_path`, or upgrade `vllm` ({problem})"
    ) from problem

from tieredkv.integrations.pinned_order import PinnedOrder, Rank

_Base: Any = CachePolicy

_PINNED_SHARE = 2  # at most this part of the chunks is pinned
_MAX_PIN_S = 86400.0
_PINS_S = {"5m": 300.0, "1h": 3600.0}
"""The retention that pins by itself, as `cache_control` does on tieredkv's own server."""


@dataclass(slots=True)
class _Use:
    """What the policy knows of one request, kept in vLLM's context of it.

    Attributes:
        owner: the policy, and which of its lives between two resets it was.
        pinned_until: until when the request pins its chunks; 0 if it does not.
        rank: the place of its chunks until it has finished; 0 before its first one.
    """

    owner: tuple[object, int]
    pinned_until: float
    rank: int = 0


class RetentionCachePolicy(_Base):  # type: ignore[misc]
    """Evicts the least recently used chunks, and pinned ones last.

    Args:
        cache_capacity: the number of chunks in vLLM's memory.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._chunks: dict[Any, Any] = {}  # vLLM's status of each, by key
        self._order = PinnedOrder[Any](cache_capacity // _PINNED_SHARE)
        self._last_rank = self._num_resets = 0

    @property
    def num_pinned(self) -> int:
        """How many chunks are pinned."""
        return self._order.num_pinned

    def check(self) -> None:
        """Prove that the order holds what vLLM does.

        Raises:
            IntegrityError: it does not.
        """
        self._order.check()
        assert len(self._order) == len(self._chunks), "chunks without a place"

    def get(self, key: Any) -> Any:
        """Return the status of a chunk, or None."""
        return self._chunks.get(key)

    def insert(self, key: Any, chunk: Any, req_context: Any) -> None:
        """Add a chunk that a request computed or loaded."""
        use = self._use(req_context)
        position = req_context.get_offload_key_position(key)
        self._chunks[key] = chunk
        self._order.add(key, self._next() if position is None else self._place(use, position))
        if chunk.ref_cnt == 0:
            self._order.set_idle(key, is_idle=True)
        self._pin([key], use)

    def remove(self, key: Any) -> None:
        """Take out a chunk whose store failed."""
        del self._chunks[key]
        self._order.remove(key)

    def touch(self, keys: Iterable[Any], req_context: Any) -> None:
        """Make chunks the most recently used, the first of them last to go."""
        held = [key for key in keys if key in self._chunks]
        for key in reversed(held):
            self._order.move(key, self._next())
        self._pin(held, self._use(req_context))

    def on_request_access(self, keys: Iterable[Any], req_context: Any) -> None:
        """Move chunks to the place of the request that uses them."""
        use, held = self._use(req_context), [key for key in keys if key in self._chunks]
        for key in held:
            if (position := req_context.get_offload_key_position(key)) is not None:
                self._order.move(key, max(self._order.rank(key), self._place(use, position)))
        self._pin(held, use)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[Any]],
        insertion_only_keys: set[Any],
        reused_keys: set[Any],
        req_context: Any,
    ) -> None:
        """Make all chunks of a request the most recently used, its head last to go."""
        self.touch(order_request_keys(key_groups, req_context), req_context)

    def evict(self, n: int, protected: set[Any]) -> list[tuple[Any, Any]] | None:
        """Take out exactly `n` chunks that no transfer uses; None, with no change, if it cannot."""
        keys = self._order.evict(n, protected, time.monotonic())
        return None if keys is None else [(key, self._chunks.pop(key)) for key in keys]

    def clear(self) -> None:
        """Forget all chunks, whoever uses them."""
        self._chunks.clear()
        self._order.clear()
        self._num_resets += 1

    def mark_evictable(self, key: Any) -> None:
        """Note that no transfer uses a chunk any more."""
        self._order.set_idle(key, is_idle=True)

    def mark_non_evictable(self, key: Any) -> None:
        """Note that a transfer uses a chunk."""
        self._order.set_idle(key, is_idle=False)

    def _next(self) -> Rank:
        self._last_rank += 1
        return self._last_rank, 0

    def _use(self, req_context: Any) -> _Use:
        owner = (self, self._num_resets)
        use: _Use | None = req_context.get_state(_Use)
        if use is None or use.owner != owner:
            pin_s = _pin_s(req_context.kv_transfer_params)
            pinned_until = time.monotonic() + pin_s if pin_s else 0.0
            use = _Use(owner, pinned_until)
            req_context.set_state(use)
        return use

    def _place(self, use: _Use, position: int) -> Rank:
        """Return the place of a chunk among those of its request, whose tail goes first."""
        use.rank = use.rank or self._next()[0]
        return use.rank, -position

    def _pin(self, keys: Iterable[Any], use: _Use) -> None:
        if use.pinned_until:
            now = time.monotonic()
            for key in keys:
                self._order.pin(key, use.pinned_until, now)


def _pin_s(params: Any) -> float:
    """Return how long a request pins its chunks; what cannot be understood pins nothing."""
    told = params.get("tieredkv") if isinstance(params, Mapping) else None
    if not isinstance(told, Mapping):
        return 0.0
    pin_s, retention = told.get("pin_s"), told.get("retention")
    if pin_s is None:
        return _PINS_S.get(retention, 0.0) if isinstance(retention, str) else 0.0
    is_number = isinstance(pin_s, int | float) and not isinstance(pin_s, bool)
    return min(float(pin_s), _MAX_PIN_S) if is_number and pin_s > 0 else 0.0
