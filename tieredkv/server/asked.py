"""What a request asks for and how it is answered, whichever API it came through.

An API is a request type, whose `ask` turns a checked body into `Asked`, and a `Shape`. Nothing
behind them knows which API spoke.
"""

import dataclasses
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar, Protocol

from msgspec.structs import replace
from pydantic import Field

from tieredkv.config import Settings
from tieredkv.engine.answer import Answer
from tieredkv.engine.engine_messages import Claim, EngineInfo, EngineRequest, RequestUsage
from tieredkv.engine.request import pack_prompt
from tieredkv.errors import RequestError
from tieredkv.fields import Object, invalid_value
from tieredkv.retention import TWENTY_FOUR_HOURS, RetentionPolicies, RetentionPolicy
from tieredkv.server.chat import Tokenization
from tieredkv.server.diagnosis import NONE, Diagnosis, Part, Seen
from tieredkv.server.generation import Piece
from tieredkv.types import Tier
from tieredkv.units import parse_duration

MAX_SEED = 2**63
WHOLE = 2**31 - 1
"""Stands for the end of a prompt of any length, and for all the room that it leaves."""

Json = dict[str, Any]
Text = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True)
class Rules:
    """What this server lets the requests of one key say.

    Attributes:
        settings: the server's.
        is_strict: refuse unknown fields and other spellings, too.
        max_retention: the longest policy that this key may name; None for the server's.
    """

    settings: Settings
    is_strict: bool = False
    max_retention: str | None = None

    @cached_property
    def of_server(self) -> RetentionPolicies:
        """What retention a request may name with some key."""
        return self.settings.retention_policies().up_to(self.settings.max_retention)

    @cached_property
    def policies(self) -> RetentionPolicies:
        """What retention a request may name with this key."""
        return self.of_server.up_to(self.max_retention)

    @cached_property
    def default(self) -> RetentionPolicy:
        """The policy of requests that name none."""
        name = self.settings.default_retention
        known = self.settings.retention_policies().up_to(self.max_retention)
        return known.get(name if name in known.names else self.max_retention or name, is_any=True)

    def refuses(self, name: str) -> bool:
        """Whether a field of this name is refused where it is unknown.

        A breakpoint is nothing to leave out silently, as its prefix would not be kept; nor is
        `prewarm`, as a whole answer would be made.
        """
        return self.is_strict or name in ("prompt_cache_breakpoint", "prewarm")

    def check_retention(self, name: str) -> None:
        """Refuse a retention that does not exist, or that only other keys may name.

        Raises:
            RequestError: it is one of these.
        """
        if name in self.of_server.names - self.policies.names:
            text = f"This API key does not allow '{name}' prompt caching."
            raise RequestError(text, param="prompt_cache_retention", code="invalid_parameter")
        self.policies.get(name, is_strict=self.is_strict)

    def claim(self, end_token: int, retention: str | None, lifetime: str, path: str) -> Claim:
        """Return what keeps a prefix for a lifetime at least; a long one raises it to the disk's.

        Args:
            end_token: of the prefix.
            retention: the policy that the request names.
            lifetime: as the field of this path has it.
            path: of that field.

        Raises:
            RequestError: no retention is so long.
        """
        lifetime_s, day = parse_duration(lifetime), TWENTY_FOUR_HOURS.name
        policy = self.policies.get(retention) if retention else self.default
        raised = self.policies.get(day) if day in self.policies.names else policy
        if lifetime_s > policy.absolute_s and self.settings.disk_dir and raised.may_use_disk:
            policy = raised
        if lifetime_s > policy.absolute_s:
            raise invalid_value(path, lifetime, "'30m'")
        return Claim(end_token=end_token, retention=policy.name, pin_s=lifetime_s)


class Shape(Protocol):
    """One answer in the form of its API.

    Attributes:
        id: of the answer.
        created: when it was begun, in whole seconds.
        diagnosis: the request beside earlier ones.
        request_id: that of the answer's header.
        names_events: each event of a stream is headed by its `type`, and no `[DONE]` ends them.
        ping: keeps a stream alive. No comment, as some clients that read lines take it for JSON.
    """

    id: str
    created: int
    id_prefix: ClassVar[str]
    names_events: ClassVar[bool] = False
    ping: ClassVar[bytes] = b"\n\n"
    diagnosis: Diagnosis = NONE
    request_id: str | None = None

    def __init__(self) -> None:
        self.id, self.created = f"{self.id_prefix}{uuid.uuid4().hex}", int(time.time())

    def whole(self, answers: Sequence[Answer]) -> Json:
        """Return the answer in one piece, once all is there."""

    def events(
        self, answers: Sequence[Answer], pieces: AsyncIterator[Piece]
    ) -> AsyncIterator[Json]:
        """Yield the events of a stream; one at least for every piece."""

    def failure(self, error: RequestError) -> Json:
        """Return the last event of a stream that has failed."""

    def written_for(self, answer: Answer, lifetime: str) -> int:
        """Return how many of a prompt's tokens were written to be kept for so long at least."""
        claims, usage, lifetime_s = answer.request.claims, answer.usage, parse_duration(lifetime)
        end = max((claim.end_token for claim in claims if claim.pin_s >= lifetime_s), default=0)
        return min(max(end - usage.cached_tokens, 0), usage.written_tokens)

    def caching(self, prompts: Sequence[RequestUsage]) -> Json:
        """Return what is said of cached tokens; `tieredkv` and what is by tier are ours.

        `miss` is that of the first prompt that was not wholly in the cache.
        """
        by_tier = {str(t): sum(usage.cached_tokens_by_tier[t] for usage in prompts) for t in Tier}
        ours: Json = {**by_tier, "recomputed": sum(usage.recomputed_tokens for usage in prompts)}
        if missed := [usage for usage in prompts if usage.miss_reason is not None]:
            ours["miss"] = self.diagnosis.miss(missed[0])
        return {
            "cached_tokens": sum(by_tier.values()),
            "cache_write_tokens": sum(usage.written_tokens for usage in prompts),
            "cached_tokens_by_tier": by_tier,
            "tieredkv": ours,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Prompts to continue.

    Attributes:
        prompts: token ids; each is answered `n` times.
        plan: what every answer's request is like, but for its prompt.
        shape: how it is answered, whole or as a stream.
        prompt_field: which field of the body holds the prompt.
        labels: what metrics may tell the request by.
        parts: of the prompt.
        settings: what may be changed beside it.
        compared_id: of an earlier answer, to be told what has changed since.
    """

    prompts: list[list[int]]
    plan: EngineRequest
    shape: Shape
    n: int = 1
    stream: bool = False
    prompt_field: str = "messages"
    labels: dict[str, str] = field(default_factory=dict)
    parts: Sequence[Part] = ()
    settings: Json = field(default_factory=dict)
    compared_id: str | None = None

    def seen(self, isolate_by: str) -> Seen:
        """Return what is kept of it."""
        salt = self.plan.cache_salt if isolate_by in ("salt", "prompt_cache_key") else None
        key = self.plan.prompt_cache_key if isolate_by == "prompt_cache_key" else None
        settings = {**self.settings, "namespace": (salt, key)}
        return Seen.of(self.parts, sum(map(len, self.prompts)), settings)

    def engine_requests(self, info: EngineInfo, tenant: str, rules: Rules) -> list[EngineRequest]:
        """Return a request for each answer; `i * n + j` is the j-th to the i-th prompt.

        Equal seeds give equal answers, in their order.

        Raises:
            RequestError: it does not fit this model, or is more than this server takes.
        """
        self.plan.params.check_vocabulary(info.vocab_size)
        max_answers = rules.settings.max_num_seqs + rules.settings.max_num_queued_reqs
        if (num_answers := len(self.prompts) * self.n) > max_answers:
            text = (
                f"{len(self.prompts)} prompts with n = {self.n} are {num_answers} answers; "
                f"this server takes at most {max_answers} at once."
            )
            raise RequestError(text, param="n", code="invalid_value")
        requests, params = [], self.plan.params
        for prompt in self.prompts:
            limits = info.max_model_len, info.vocab_size
            pack_prompt(prompt, *limits, max_tokens=params.max_tokens, field=self.prompt_field)
            request = replace(fitted(self.plan, prompt, rules), tenant=tenant)
            for j in range(self.n):
                seed = None if params.seed is None else (params.seed + j) % MAX_SEED
                how = dataclasses.replace(params, seed=seed)
                requests.append(replace(request, request_id=uuid.uuid4().hex, params=how))
        return requests


def fitted(plan: EngineRequest, prompt: list[int], rules: Rules) -> EngineRequest:
    """Return the plan for a prompt: claims end where blocks do.

    A prefix that is shorter than the server's minimum is not cached.
    """
    block_size, cacheable = rules.settings.block_size, plan.cacheable_tokens
    ends = [claim.end_token // block_size * block_size for claim in plan.claims]
    claims = [replace(it, end_token=end) for it, end in zip(plan.claims, ends, strict=True)]
    longest = len(prompt) if cacheable is None else min(len(prompt), cacheable)
    if longest < rules.settings.min_cache_tokens:
        cacheable, claims = 0, []
    caching = {"claims": claims, "cacheable_tokens": cacheable}
    retention = plan.retention or rules.default.name
    return replace(plan, prompt_token_ids=prompt, retention=retention, **caching)


class ApiRequest(Object):
    """The body of a request for an answer; what its fields are is its API's business.

    Attributes:
        without_effect: fields that are taken and change nothing; the log tells of each once.
    """

    without_effect: ClassVar[frozenset[str]] = frozenset()

    model: Text

    def check(self, rules: Rules) -> None:
        """Refuse what the fields cannot mean together, or on this server."""

    def ask(self, tokenization: Tokenization, rules: Rules) -> Asked:
        """Render and encode the prompts of a body that was checked."""
        raise NotImplementedError


class PlainRequest(ApiRequest):
    """The body of a request that needs no engine."""

    model: Text = ""  # the server's one

    def tell(self, tokenization: Tokenization, info: EngineInfo) -> Json:
        """Return the body of the answer."""
        raise NotImplementedError
