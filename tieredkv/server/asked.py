"""What a request asks for and how it is answered, whichever API it came through.

An API is a request type, whose `ask` turns a checked body into `Asked`, and a `Shape`. Nothing
behind them knows which API spoke.
"""

import dataclasses
import secrets
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Protocol

from msgspec.structs import replace
from pydantic import Field

from tieredkv.config import Settings
from tieredkv.engine.answer import Answer
from tieredkv.engine.messages import Claim, EngineInfo, EngineRequest
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.errors import RequestError
from tieredkv.fields import Object
from tieredkv.retention import TWENTY_FOUR_HOURS, RetentionPolicies, RetentionPolicy
from tieredkv.server.chat import Tokenization
from tieredkv.server.diagnosis import NONE, Diagnosis, Seen, Segment, digest
from tieredkv.server.generation import Piece

MAX_SEED = 2**63

Json = dict[str, Any]
Text = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What this server lets a request say.

    Attributes:
        policies: what a request's retention may name.
        default: the policy of requests that name none.
        raised: the policy that a longer lifetime raises a prefix to, where there is one.
        is_strict: refuse unknown fields and other spellings, too.
        min_cache_tokens: a shorter prefix is neither looked up nor kept.
        max_answers: so many at most to one request.
        block_size: in tokens; what is kept are whole blocks.
        is_implicit: prompts of Anthropic's API without `cache_control` are kept, too.
        cache_lookback: a hit in that API ends at one of so many blocks of the prompt up to a
            breakpoint; 0 for anywhere.
    """

    policies: RetentionPolicies
    default: RetentionPolicy
    raised: RetentionPolicy | None = None
    is_strict: bool = False
    min_cache_tokens: int = 0
    max_answers: int = 1024
    block_size: int = 16
    is_implicit: bool = True
    cache_lookback: int = 0

    @classmethod
    def of(cls, settings: Settings, *, is_strict: bool) -> "Rules":
        """Return the rules of a server with these settings."""
        policies = settings.retention_policies().up_to(settings.max_retention)
        default = settings.retention_policies().get(settings.default_retention, is_any=True)
        has_raised = settings.disk_dir and TWENTY_FOUR_HOURS.name in policies.names
        raised = policies.get(TWENTY_FOUR_HOURS.name) if has_raised else None
        return cls(
            policies=policies,
            default=default,
            raised=raised if raised and raised.may_use_disk else None,
            is_strict=is_strict,
            min_cache_tokens=settings.min_cache_tokens,
            max_answers=settings.max_num_seqs + settings.max_num_queued_reqs,
            block_size=settings.block_size,
            is_implicit=settings.anthropic_implicit == "on",
            cache_lookback=settings.cache_lookback,
        )

    def refuses(self, name: str) -> bool:
        """Whether a field of this name is refused where it is unknown.

        A breakpoint is nothing to leave out silently, as its prefix would not be kept.
        """
        return self.is_strict or name == "prompt_cache_breakpoint"

    def claim(self, end_token: int, retention: str | None, lifetime_s: float) -> Claim | None:
        """Return what keeps a prefix for a lifetime at least; None if no retention is so long."""
        policy = self.policies.get(retention) if retention else self.default
        if lifetime_s > policy.absolute_s and self.raised:
            policy = self.raised
        if lifetime_s > policy.absolute_s:
            return None
        return Claim(end_token=end_token, retention=policy.name, protect_s=lifetime_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """How prompts may be kept and looked up; the fields are those of `EngineRequest`.

    Ends may lie behind a prompt's end.
    """

    retention: str | None = None
    claims: list[Claim] = field(default_factory=list)
    cacheable_tokens: int | None = None
    read_ends: list[int] | None = None

    def fields_of(self, num_tokens: int, rules: Rules) -> Json:
        """Return the fields for a prompt of a length."""
        cacheable, claims = self.cacheable_tokens, self.claims
        if min(num_tokens, num_tokens if cacheable is None else cacheable) < rules.min_cache_tokens:
            cacheable, claims = 0, []
        return {
            "retention": self.retention or rules.default.name,
            "claims": [replace(it, end_token=min(it.end_token, num_tokens)) for it in claims],
            "cacheable_tokens": cacheable,
            "read_ends": self.read_ends,
        }


class Shape(Protocol):
    """One answer in the form of its API.

    Attributes:
        id: of the answer.
        diagnosis: the request beside earlier ones.
        names_events: each event of a stream is headed by its `type`, and no `[DONE]` ends them.
    """

    id: str
    diagnosis: Diagnosis = NONE
    names_events: ClassVar[bool] = False

    def whole(self, answers: Sequence[Answer]) -> Json:
        """Return the answer in one piece, once all is there."""

    def events(
        self, answers: Sequence[Answer], pieces: AsyncIterator[Piece]
    ) -> AsyncIterator[Json]:
        """Yield the events of a stream; one at least for every piece."""

    def failure(self, error: RequestError) -> Json:
        """Return the last event of a stream that has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Prompts to continue.

    Attributes:
        prompts: token ids; each is answered `n` times.
        params: how to sample every answer, but for its seed and the room that is left.
        shape: how it is answered, whole or as a stream.
        limit: longest answer that the client asks for, in tokens.
        default_tokens: longest answer where there is no limit; None for all the room.
        prompt_field: which field of the body holds the prompt.
        labels: what metrics may tell the request by.
        prompt_logprobs: alternatives reported with each prompt token.
        segments: the parts of the prompt.
        settings: what may be changed beside it.
        compared_id: of an earlier answer, to be told what has changed since.
    """

    prompts: list[list[int]]
    params: SamplingParams
    shape: Shape
    n: int = 1
    stream: bool = False
    limit: int | None = None
    default_tokens: int | None = None
    prompt_field: str = "messages"
    plan: CachePlan = field(default_factory=CachePlan)
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    labels: dict[str, str] = field(default_factory=dict)
    prompt_logprobs: int | None = None
    segments: list[Segment] = field(default_factory=list)
    settings: Json = field(default_factory=dict)
    compared_id: str | None = None

    def seen(self, isolate_by: str) -> Seen:
        """Return what is kept of it."""
        salt = self.cache_salt if isolate_by in ("salt", "prompt_cache_key") else None
        key = self.prompt_cache_key if isolate_by == "prompt_cache_key" else None
        return Seen(
            self.segments,
            num_tokens=sum(map(len, self.prompts)),
            settings={name: digest(str(value)) for name, value in self.settings.items()},
            namespace=digest(repr((salt, key))),
        )

    def engine_requests(self, info: EngineInfo, tenant: str, rules: Rules) -> list[EngineRequest]:
        """Return a request for each answer; `i * n + j` is the j-th to the i-th prompt.

        Raises:
            RequestError: it does not fit this model, or is more than this server takes.
        """
        self.params.check_vocabulary(info.vocab_size)
        if (num_answers := len(self.prompts) * self.n) > rules.max_answers:
            text = (
                f"{len(self.prompts)} prompts with n = {self.n} are {num_answers} answers; "
                f"this server takes at most {rules.max_answers} at once."
            )
            raise RequestError(text, param="n", code="invalid_value")
        requests = []
        seed = secrets.randbits(62)
        for i, prompt in enumerate(self.prompts):
            check_prompt(self.prompt_field, prompt, info.max_model_len, info.vocab_size)
            caching = self.plan.fields_of(len(prompt), rules)
            room = info.max_model_len - len(prompt)
            max_tokens = min(self.limit or self.default_tokens or room, room)
            requests += [
                EngineRequest(
                    request_id=uuid.uuid4().hex,
                    prompt_token_ids=prompt,
                    params=params_of(self.params, j, max_tokens, seed + i * self.n),
                    **caching,
                    prompt_logprobs=self.prompt_logprobs,
                    tenant=tenant,
                    cache_salt=self.cache_salt,
                    prompt_cache_key=self.prompt_cache_key,
                )
                for j in range(self.n)
            ]
        return requests


class ApiRequest(Object):
    """The body of a request for an answer; what its fields are is its API's business."""

    model: Text

    def check(self, rules: Rules) -> None:
        """Refuse what the fields cannot mean together, or on this server."""

    async def ask(self, tokenization: Tokenization, rules: Rules) -> Asked:
        """Render and encode the prompts of a body that was checked."""
        raise NotImplementedError


class PlainRequest(ApiRequest):
    """The body of a request that needs no engine."""

    async def tell(self, tokenization: Tokenization, info: EngineInfo) -> Json:
        """Return the body of the answer."""
        raise NotImplementedError


def params_of(
    params: SamplingParams, choice: int, max_tokens: int, fallback_seed: int
) -> SamplingParams:
    """Return the parameters of one answer; equal seeds give equal answers, in their order."""
    seed = params.seed if params.seed is not None else fallback_seed
    min_tokens = min(params.min_tokens, max_tokens)
    seed = (seed + choice) % MAX_SEED
    return dataclasses.replace(params, max_tokens=max_tokens, seed=seed, min_tokens=min_tokens)


def check_prompt(what: str, prompt: list[int], max_model_len: int, vocab_size: int) -> None:
    """Refuse a prompt that is empty, leaves no room for an answer, or has unknown ids."""
    text, code = "", "invalid_value"
    if not prompt:
        text = f"Invalid '{what}': the prompt is empty. At least one token is needed."
    elif len(prompt) >= max_model_len:
        code = "context_length_exceeded"
        text = (
            f"This model's maximum context length is {max_model_len} tokens. However, your "
            f"{what} resulted in {len(prompt)} tokens and at least one must be generated. "
            f"Please reduce the length of the {what}."
        )
    elif bad := [id for id in (min(prompt), max(prompt)) if not 0 <= id < vocab_size]:
        vocabulary = f"the model's vocabulary of {vocab_size} tokens"
        text = f"Invalid '{what}': token id {bad[0]} is not in {vocabulary}."
    if text:
        raise RequestError(text, param=what, code=code)
