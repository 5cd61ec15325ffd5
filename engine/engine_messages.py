"""Messages between the server's process and the engine's process; token ids, no text.

Frames are a u32 little-endian length and msgpack of one tagged struct. One message a step carries
the outputs of all requests of that step.
"""

from typing import Any

import msgspec
from msgspec.structs import replace

from tieredkv.config import Settings
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.errors import RequestError
from tieredkv.operate.calls import Call, EvictFilter, Inspect
from tieredkv.types import Tier
from tieredkv.wire.process import Refused


class Start(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="start"):
    """The first message to the engine: what to load, and how much to log."""

    settings: Settings
    log_level: str = "INFO"


class Claim(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What a request wants for the blocks of a prompt's first tokens.

    Attributes:
        end_token: the claim covers the full blocks within the first `end_token` tokens.
        retention: name of the policy by which the blocks may be kept.
        pin_s: seconds from now in which the blocks are evicted only after others; 0 for no pin.
    """

    end_token: int
    retention: str
    pin_s: float = 0.0


class EngineRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="request"):
    """A prompt to continue.

    Without id and prompt it is a plan, which is completed for each answer.

    Attributes:
        request_id: unique among the requests in flight.
        prompt_token_ids: the prompt; never empty.
        params: how to sample and when to stop; stop strings are handled where text is made.
        retention: name of a retention policy, or None for the server's default; it is for what no
            claim covers, the answer's tokens too.
        claims: where several cover a block, the longest retention and pin count.
        cacheable_tokens: blocks that end behind so many tokens are neither looked up nor kept;
            None for all of the prompt and the answer.
        read_ends: lengths of chains in tokens at which a hit may end, 0 with them where none is
            kept back; None for any.
        anchors: lengths of the prompt in tokens behind which the next requests are likely to go on,
            for models that can go on only where enough is kept.
        prompt_logprobs: alternatives reported with each prompt token, all of which are then
            computed; None for no log-probabilities of the prompt.
        tenant: whose API key it is; tenants never share a block.
        cache_salt: narrows the tenant's namespace.
        prompt_cache_key: narrows it too where `isolate_by` says so.
        grammar: which the answer must follow, see `engine.grammars`; None for any answer.
    """

    request_id: str = ""
    prompt_token_ids: list[int] = []
    params: SamplingParams
    retention: str | None = None
    claims: list[Claim] = []
    cacheable_tokens: int | None = None
    read_ends: list[int] | None = None
    anchors: list[int] = []
    prompt_logprobs: int | None = None
    tenant: str = ""
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    grammar: str | None = None


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Stop a request and release what it holds; unknown ids are ignored."""

    request_id: str


class Shares(msgspec.Struct, frozen=True, array_like=True, tag="shares"):
    """The tenants' new shares of every tier; see `Settings.tenant_shares`."""

    of_tenants: dict[str, float]


class RequestUsage(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Where the tokens of a prompt came from; each of them counts once.

    `cached_tokens + written_tokens + recomputed_tokens` is the prompt's full blocks within
    `EngineRequest.cacheable_tokens`; the rest of `prompt_tokens` cannot be cached.

    Attributes:
        prompt_tokens: length of the prompt.
        cached_tokens_by_tier: prompt tokens whose keys and values came from each tier. Those that
            another request computed while this one waited came from VRAM.
        written_tokens: prompt tokens that this request computed into cached blocks, also where
            `EngineRequest.read_ends` kept it from using those that were there.
        recomputed_tokens: prompt tokens that were found and that this request computed
            nevertheless: those of blocks that it reached before they were loaded, those of a block
            that another request completed first, and, for its logits, the last one of a wholly
            cached prompt.
        queue_s: how long the request was in the queue.
        miss_token: the first token whose block was not served from the cache, or that cannot be.
            Blocks that were computed sooner count only if no other block was missed.
        miss_reason: why it was not, see `cache.miss_reasons.MissReason`. None where it cannot be.
        split_token: where computing and loading met: blocks before it were in VRAM or computed, and
            those from it on were loaded, if they were cached. None if no slower tier had any.
        predicted_s: from the first plan of what to load until the first token, as expected then;
            None without a plan.
        actual_s: the same, as it was.
        forecast_kind: what the first token was expected to wait for, see `cache.forecasts`.
    """

    prompt_tokens: int
    cached_tokens_by_tier: dict[Tier, int] = msgspec.field(
        default_factory=lambda: dict.fromkeys(Tier, 0)
    )
    written_tokens: int = 0
    recomputed_tokens: int = 0
    queue_s: float = 0.0
    miss_token: int = 0
    miss_reason: str | None = None
    split_token: int | None = None
    predicted_s: float | None = None
    actual_s: float | None = None
    forecast_kind: str | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed again."""
        return sum(self.cached_tokens_by_tier.values())

    @property
    def prediction_error(self) -> float | None:
        """By which part of the actual time the first token was mispredicted; None if it was not."""
        if self.predicted_s is None or not self.actual_s:
            return None
        return abs(self.predicted_s - self.actual_s) / self.actual_s


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One token's log-probability and its most likely alternatives, most likely first.

    `logprob` is None if it was not asked for, and of the first token of a prompt, which follows
    nothing.
    """

    token_id: int
    logprob: float | None
    top: list[tuple[int, float]] = []


class TokenOutput(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The output of one step for one request.

    Attributes:
        token_ids: the new tokens of this step, often one.
        logprobs: one entry a new token where the request asked for them; those of the prompt's
            tokens, where it asked for these, come before the first.
        finish_reason: "stop", "length", "abort" or "error" on the last output, else None.
        error: what went wrong, for "error".
        error_code: machine-readable reason, for "error".
        retry_after_s: when to ask again, for "error".
        usage: on the first output and on the last.
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    error: str | None = None
    error_code: str | None = None
    retry_after_s: int = 1
    usage: RequestUsage | None = None


def failed(request_id: str, error: RequestError) -> TokenOutput:
    """Return the last output of a request that cannot be answered."""
    output = TokenOutput(request_id=request_id, finish_reason="error", error=str(error))
    return replace(output, error_code=error.code, retry_after_s=error.retry_after_s)


class StepOutputs(msgspec.Struct, frozen=True, array_like=True, tag="outputs"):
    """All outputs of one step, about once a second with `TierStats.read`."""

    outputs: list[TokenOutput]
    stats: dict[str, Any] | None = None


class EngineInfo(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="ready"):
    """Sent by the engine when it can serve, and again when the store's worker ends or is replaced.

    Attributes:
        block_size: tokens a block.
        worker_pid: of the store's worker; None while the disk tier is off or where there is none.
        disk_trouble: why the disk tier is off; None where it is on, or where there is none.
        eos_token_ids: tokens that end an answer.
    """

    model: str
    max_model_len: int
    vocab_size: int
    block_size: int
    worker_pid: int | None
    disk_trouble: str | None = None
    eos_token_ids: list[int] = []


class ProgressReport(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """The progress of loading or draining; `total` is 0 if it is not known."""

    stage: str
    done: int
    total: int


class Operate(msgspec.Struct, frozen=True, array_like=True, tag="operate"):
    """An operator's call that concerns VRAM and host memory; answered by `Operated`."""

    id: int
    call: Call


class Operated(msgspec.Struct, frozen=True, array_like=True, tag="operated"):
    """The result of an `Operate`, or a part of it that others follow; see `Verbs.operate`."""

    id: int
    body: dict[str, Any]
    has_more: bool = False


class Tokenize(msgspec.Struct, frozen=True, array_like=True, tag="tokenize"):
    """An operator inspects a prompt, which the server has to tokenize; answered by `Tokenized`."""

    id: int
    call: Inspect


class Tokenized(msgspec.Struct, frozen=True, array_like=True, tag="tokenized"):
    """The request that a prompt is; None if it was refused, for the reason given."""

    id: int
    request: EngineRequest | None = None
    refused: str | None = None


class EvictToo(msgspec.Struct, frozen=True, array_like=True, tag="evict too"):
    """The command line has evicted blocks; what the server keeps of the same requests goes too."""

    wanted: EvictFilter


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """Sent each second once the engine can serve, by a thread that runs beside the steps.

    Attributes:
        step_s: how long ago the last step ended.
    """

    step_s: float


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """Stop: end running requests with "abort", write what `24h` promised, exit."""


ToEngine = Start | EngineRequest | Abort | Shares | Operate | Tokenized | Shutdown
ToServer = (
    StepOutputs | Beat | EngineInfo | Refused | ProgressReport | Operated | Tokenize | EvictToo
)
