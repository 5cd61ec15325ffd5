"""One request: its tokens, how many of them are computed, and its blocks in the cache."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from tieredkv.cache.chain import Chain
from tieredkv.engine.engine_messages import EngineRequest, RequestUsage, TokenLogprob
from tieredkv.engine.sampler import SamplerState, Scores
from tieredkv.engine.step_buffers import pending
from tieredkv.types import BlockHash, Tier


@dataclass(slots=True, eq=False)
class Request:
    """A prompt that is being continued.

    The state of each token, for `num_computed_tokens = c` and `n = len(token_ids)`:

        [0, c)      keys and values are in VRAM
        [c, n)      to be computed, but for full blocks of the chain that become ready meanwhile
        n - 1       the newest token; its logits give the next one

    The last `num_pending_tokens` were sampled on the device and have not been seen here yet.

    Attributes:
        asked: the request as it was sent.
        max_output_tokens: the most tokens that it may generate. At least 1: with `max_tokens=0` one
            token is sampled and not returned.
        token_ids: prompt and generated tokens; `pending(request_index)` for tokens that
            the device has not returned yet.
        request_index: index among the running requests; -1 while it is not running.
        num_uncached_tokens: tokens to compute when it was last admitted; before that, all.
        table_key: unique key of its current or last block table; 0 before the first.
        num_passes: requests admitted before it while it was the oldest of the tenant in turn.
        added_at, admitted_at: when it was queued, and when it first left the queue.
        touched_at: when its chain was last refreshed in every tier; 0.0 if not since its last
            admission.
        prompt_scores: scores of the prompt's tokens except the first, chunk by chunk.
        own_hashes: blocks that it computed before it was preempted; finding them is no hit.
        overlaps: how many tokens it computed of blocks that another request completed first, by the
            index of the block; they are not counted as cached.
        usage: where the prompt's tokens came from; set when its prefill has ended.
    """

    asked: EngineRequest
    chain: Chain
    sampler: SamplerState
    max_output_tokens: int
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    request_index: int = -1
    num_uncached_tokens: int = field(init=False)
    table_key: int = 0
    num_pending_tokens: int = 0
    num_computed_tokens: int = 0
    num_passes: int = 0
    added_at: float = field(default_factory=time.monotonic)
    admitted_at: float = 0.0
    touched_at: float = 0.0
    prompt_scores: list[Scores] = field(default_factory=list)
    own_hashes: set[BlockHash] = field(default_factory=set)
    overlaps: dict[int, int] = field(default_factory=dict)
    usage: RequestUsage | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.asked.prompt_token_ids)
        self.num_prompt_tokens = self.num_uncached_tokens = len(self.token_ids)

    @property
    def request_id(self) -> str:
        """The id, unique among the requests in flight."""
        return self.asked.request_id

    @property
    def is_running(self) -> bool:
        """Whether it has an index and a block table; if not, it waits or has finished."""
        return self.request_index >= 0

    @property
    def num_tokens(self) -> int:
        """The number of prompt and generated tokens."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """The number of generated tokens that the host has seen."""
        return self.num_tokens - self.num_prompt_tokens - self.num_pending_tokens

    @property
    def is_prefilling(self) -> bool:
        """Whether more than the newest token is still to be computed."""
        num_tokens = self.num_tokens
        return num_tokens == self.num_prompt_tokens or num_tokens - self.num_computed_tokens > 1

    @property
    def is_long_enough(self) -> bool:
        """Whether its last token has been sampled, even if the host has not seen it."""
        return self.num_tokens - self.num_prompt_tokens >= self.max_output_tokens

    @property
    def num_unscored_tokens(self) -> int:
        """How many of the next tokens have logits that score the prompt's own tokens."""
        if self.asked.prompt_logprobs is None or self.usage is not None:
            return 0
        return self.num_prompt_tokens - 1 - self.num_computed_tokens

    def expect_token(self) -> None:
        """Add a token that is being sampled on the device."""
        self.token_ids.append(pending(self.request_index))
        self.num_pending_tokens += 1

    def take_scores(self) -> list[TokenLogprob]:
        """Return the log-probabilities of the prompt's tokens if the request wants them."""
        if self.asked.prompt_logprobs is None:
            return []
        scores, self.prompt_scores = self.prompt_scores, []
        first = TokenLogprob(token_id=self.token_ids[0], logprob=None)
        return [first, *(token for chunk in scores for token in chunk.logprobs())]

    def append(self, token_id: int) -> None:
        """Replace the first pending token by the token that was sampled."""
        self.token_ids[-self.num_pending_tokens] = token_id
        self.num_pending_tokens -= 1

    def measure_usage(
        self, block_size: int, num_recomputed_tokens: int, why_missed: Callable[[Chain, int], str]
    ) -> RequestUsage:
        """Count the prompt's tokens by the tier that they were found in.

        Args:
            block_size: tokens a block.
            num_recomputed_tokens: cached tokens at the end of a wholly cached prompt that were
                computed again; they are not counted as cached.
            why_missed: returns the reason why a block of the chain was not found.
        """
        chain = self.chain
        sources = chain.origins()[: self.num_prompt_tokens // block_size]
        if self.own_hashes:
            sources = [
                None if block_hash in self.own_hashes else source
                for source, block_hash in zip(sources, chain.hashes, strict=False)
            ]
        counts = {tier: block_size * sources.count(tier) for tier in Tier}
        for index, num_tokens in self.overlaps.items():
            if index < len(sources) and (source := sources[index]) is not None:
                counts[source] -= num_tokens
        missed = [index for index, source in enumerate(sources) if source is None]
        overtaken = chain.computed_sooner(missed)
        loaded = [it for it, source in enumerate(sources) if source in (Tier.HOST, Tier.DISK)]
        split = overtaken[-1] + 1 if overtaken else loaded[0] if loaded else None
        first = min(set(missed).difference(overtaken) or missed, default=None)
        written = block_size * (len(missed) - len(overtaken))
        last = sources[-1] if sources else None
        if last is not None:
            counts[last] -= num_recomputed_tokens
        return RequestUsage(
            prompt_tokens=self.num_prompt_tokens,
            cached_tokens_by_tier=counts,
            written_tokens=written,
            recomputed_tokens=block_size * len(sources) - sum(counts.values()) - written,
            queue_s=self.admitted_at - self.added_at,
            miss_token=block_size * (len(sources) if first is None else first),
            miss_reason=None if first is None else why_missed(chain, first),
            split_token=None if split is None else block_size * split,
        )

    def note_first_token(self, outcome: tuple[float, float, str] | None) -> None:
        """Note in the usage when the first token has come, if that was predicted.

        Args:
            outcome: after how many seconds it was expected, after how many it came, and what the
                request waited for; None if it was not predicted.
        """
        if outcome is not None and self.usage is not None:
            predicted_s, actual_s, kind = outcome
            self.usage = msgspec.structs.replace(
                self.usage, predicted_s=predicted_s, actual_s=actual_s, forecast_kind=kind
            )
