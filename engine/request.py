"""One request: its tokens, how far they are computed, and what it holds in the cache."""

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tieredkv.cache.tiered import Prefix
from tieredkv.engine.messages import RequestUsage
from tieredkv.engine.sampler import SamplerState
from tieredkv.engine.step_buffers import pending
from tieredkv.errors import RequestError
from tieredkv.types import BlockHash, Tier


@dataclass(slots=True, eq=False)
class Request:
    """A prompt being continued.

    Which token is whose, for `num_computed_tokens = c` and `n = len(token_ids)`:

        [0, c)      keys and values are in VRAM
        [c, n)      to be computed, but for full blocks of the chain that become ready meanwhile
        n - 1       the newest token; its logits give the next one

    The last `num_pending_tokens` were sampled on the device and have not been seen here yet.

    Attributes:
        token_ids: prompt, then what was generated; `pending(slot)` for what was not seen yet.
        max_output_tokens: tokens that it may generate at most.
        tenant: whose API key it is.
        slot: its place among the running requests, -1 while it is none of them.
        table_key: unique to its present block table, or the last one; 0 before the first.
        num_passes: requests admitted before it while it was the oldest of the tenant in turn.
        added_at, admitted_at: when it was queued, and when it first left the queue.
        touched_at: when its chain was last refreshed in every tier, 0.0 since it was admitted.
        own_hashes: blocks that it computed before it was preempted; finding them is no hit.
        usage: where the prompt's tokens came from; set when its prefill has ended.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    prefix: Prefix
    sampler: SamplerState
    max_output_tokens: int
    tenant: str = ""
    slot: int = -1
    table_key: int = 0
    num_pending_tokens: int = 0
    num_computed_tokens: int = 0
    num_passes: int = 0
    added_at: float = field(default_factory=time.monotonic)
    admitted_at: float = 0.0
    touched_at: float = 0.0
    own_hashes: set[BlockHash] = field(default_factory=set)
    usage: RequestUsage | None = None

    @property
    def is_running(self) -> bool:
        """Whether it has a slot and a block table; if not, it waits or has finished."""
        return self.slot >= 0

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens that were seen here."""
        return self.num_tokens - self.num_prompt_tokens - self.num_pending_tokens

    @property
    def is_prefilling(self) -> bool:
        """Whether more than the newest token is still to be computed."""
        return (
            self.num_computed_tokens < self.num_tokens - 1
            or self.num_tokens == self.num_prompt_tokens
        )

    @property
    def is_long_enough(self) -> bool:
        """Whether its last token has been sampled, seen or not."""
        return self.num_tokens - self.num_prompt_tokens >= self.max_output_tokens

    def expect_token(self) -> None:
        """Add a token that is being sampled on the device."""
        self.token_ids.append(pending(self.slot))
        self.num_pending_tokens += 1

    def append(self, token_id: int) -> None:
        """Take in the first pending token."""
        self.token_ids[-self.num_pending_tokens] = token_id
        self.num_pending_tokens -= 1

    def measure_usage(self, block_size: int, num_recomputed_tokens: int) -> RequestUsage:
        """Count the prompt's tokens by the tier that they were found in.

        Args:
            block_size: tokens a block.
            num_recomputed_tokens: cached tokens that were computed again all the same, at the end
                of a wholly cached prompt; they are not counted as cached.
        """
        sources = self.prefix.sources[: self.num_prompt_tokens // block_size]
        if self.own_hashes:
            sources = [
                None if block_hash in self.own_hashes else source
                for source, block_hash in zip(sources, self.prefix.hashes, strict=False)
            ]
        counts = {tier: block_size * sources.count(tier) for tier in Tier}
        written = block_size * sources.count(None)
        last = sources[-1] if sources else None
        if last is not None:
            counts[last] -= num_recomputed_tokens
        return RequestUsage(
            prompt_tokens=self.num_prompt_tokens,
            cached_tokens_by_tier=counts,
            written_tokens=written,
            recomputed_tokens=block_size * len(sources) - sum(counts.values()) - written,
            queue_s=self.admitted_at - self.added_at,
        )


def check_prompt_length(num_tokens: int, max_model_len: int) -> None:
    """Refuse a prompt that cannot be served.

    Raises:
        RequestError: it is empty, or leaves no room for an answer.
    """
    if not num_tokens:
        raise _invalid("The prompt is empty")
    if num_tokens >= max_model_len:
        raise RequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt "
            f"has {num_tokens} tokens and at least one must be generated",
            param="prompt",
            code="context_length_exceeded",
        )


def pack_prompt(token_ids: Sequence[int], vocab_size: int) -> "array[int]":
    """Return a prompt, which is not empty, packed as it is hashed.

    Raises:
        RequestError: a token is no integer, or outside the vocabulary.
    """
    try:
        packed = array("I", list(token_ids))
        is_known = np.frombuffer(packed, dtype=np.uint32).max() < vocab_size
    except TypeError as error:
        raise _invalid("Token ids must be integers") from error
    except OverflowError:
        is_known = False
    if not is_known:
        lowest = min(token_ids)
        outside = max(token_ids) if lowest >= 0 else lowest
        raise _invalid(f"Token id {outside} is outside the vocabulary of {vocab_size} tokens")
    return packed


def _invalid(text: str) -> RequestError:
    return RequestError(text, param="prompt", code="invalid_value")
