"""What a request asks for and how it is answered, in a form that all APIs share.

Each API has a request type, whose `ask` method turns a checked body into `Asked`, and a `Shape`
that writes the answer. The code that runs the request does not know which API it came through.
"""

import dataclasses
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar, Protocol, Self

from msgspec.structs import replace
from pydantic import Field

from tieredkv.cache_fields import Allowed
from tieredkv.config import Settings
from tieredkv.engine.engine_messages import EngineInfo, EngineRequest, RequestUsage
from tieredkv.engine.prompt import pack_prompt
from tieredkv.errors import RequestError
from tieredkv.fields import Object
from tieredkv.retention import RetentionPolicies, RetentionPolicy
from tieredkv.server.chat import Tokenization
from tieredkv.server.diagnosis import NONE, Diagnosis, PromptPart, Seen
from tieredkv.server.generation import Piece
from tieredkv.server.ignored import printable
from tieredkv.server.reply import Reading, Reply
from tieredkv.server.stored_responses import Turn
from tieredkv.types import Tier
from tieredkv.units import parse_duration

logger = logging.getLogger(__name__)

MAX_SEED = 2**63
WHOLE = 2**31 - 1
"""The end of a prompt of any length; as a limit of tokens, all the room that the prompt leaves."""

Json = dict[str, Any]
Text = Annotated[str, Field(min_length=1)]


IMAGE_NOTE = "[An image was here. This model reads text only.]"
DOCUMENT_NOTE = "[A document was here. This model reads text only.]"
AUDIO_NOTE = "[A recording was here. This model reads text only.]"
ERROR_NOTE = "[The tool has failed.]"
"""They stand in the prompt for what a conversation has beside texts."""

TOOL_NAME = "[a-zA-Z0-9_-]+"
"""The names of tools that OpenAI's API allows; Anthropic's has the same letters."""


@dataclass(frozen=True)
class Rules:
    """The rules for requests that use one API key.

    Attributes:
        settings: the settings of the server.
        is_strict: whether unknown fields and alternative spellings are refused.
        max_retention: the longest policy that this key may name; None for the server's limit.
    """

    settings: Settings
    is_strict: bool = False
    max_retention: str | None = None

    @cached_property
    def of_server(self) -> RetentionPolicies:
        """The retention policies that the server allows to a key without a limit of its own."""
        return self.settings.retention_policies().up_to(self.settings.max_retention)

    @cached_property
    def policies(self) -> RetentionPolicies:
        """The retention policies that a request with this key may name."""
        return self.of_server.up_to(self.max_retention)

    @cached_property
    def default(self) -> RetentionPolicy:
        """The policy of a request that names none."""
        name = self.settings.default_retention
        known = self.settings.retention_policies().up_to(self.max_retention)
        return known.get(name if name in known.names else self.max_retention or name, is_any=True)

    def refuses(self, name: str) -> bool:
        """Whether an unknown field of this name is refused.

        Two fields are refused on every server. If a breakpoint were ignored, its prefix would not
        be kept. If `prewarm` were ignored, a whole answer would be generated.
        """
        return self.is_strict or name in ("prompt_cache_breakpoint", "prewarm")

    def check_image(self, path: str) -> None:
        """Refuse an image or the like at a path of the body, unless a note stands in the prompt.

        Raises:
            RequestError: images are refused.
        """
        if self.is_strict or self.settings.images == "refuse":
            text = "Images and other files are not supported: this model reads text only."
            raise RequestError(text, param=path, code="unsupported_parameter")

    def check_name(self, name: str, path: str) -> None:
        """Refuse a name of a tool that OpenAI's API does not allow, if the server is strict.

        Raises:
            RequestError: the name is refused.
        """
        if self.is_strict and not re.fullmatch(TOOL_NAME, name):
            allowed = f"a string that matches the pattern '^{TOOL_NAME}$'"
            text = f"Invalid '{path}': string does not match pattern. Expected {allowed}."
            raise RequestError(text, param=path, code="invalid_value")

    @cached_property
    def allowed(self) -> Allowed:
        """What a request may ask of the cache."""
        return Allowed(
            policies=self.policies,
            default=self.default,
            withheld=self.of_server.names - self.policies.names,
            has_disk=self.settings.disk_dir is not None,
            is_strict=self.is_strict,
        )


def tell_left_out(kinds: Iterable[str]) -> None:
    """Say in the log, once for each, which types of tools are left out of prompts."""
    for kind in set(kinds) - _left_out:
        if len(_left_out) == MAX_LEFT_OUT:
            return
        logger.info("tools of the type `%s` are not offered by this server", printable(kind))
        _left_out.add(kind)


MAX_LEFT_OUT = 64
"""So many types are told of; clients choose their names."""

_left_out = set[str]()


class Shape(Protocol):
    """One answer in the form of its API.

    Attributes:
        id: the id of the answer.
        created: when the answer was begun, in whole seconds.
        diagnosis: the comparison of the request with earlier ones.
        request_id: the id in the header of the answer.
        keep: takes the body of a finished answer, before its end is sent; None if nobody wants it.
        left_out: the types of the tools that the model was not told of.
        ignored: the values of the request that this server does not know.
        names_events: whether an `event:` line with its type precedes each event of a stream; if
            so, the stream does not end with `[DONE]`.
    """

    id: str
    created: int
    id_prefix: ClassVar[str]
    names_events: ClassVar[bool] = False
    diagnosis: Diagnosis = NONE
    request_id: str | None = None
    keep: Callable[[Json], None] | None = None
    left_out: Sequence[str] = ()
    ignored: Sequence[str] = ()

    def __init__(self) -> None:
        self.id, self.created = f"{self.id_prefix}{uuid.uuid4().hex}", int(time.time())

    def whole(self, answers: Sequence[Reply]) -> Json:
        """Return the whole body of a finished answer."""

    def events(self, answers: Sequence[Reply], pieces: AsyncIterator[Piece]) -> AsyncIterator[Json]:
        """Yield the events of a stream, at least one for every piece."""

    @property
    def not_done(self) -> Json:
        """The field of an answer that names what of the request had no effect; {} without any."""
        told = {"left_out_tools": [*self.left_out], "ignored": [*self.ignored]}
        told = {name: each for name, each in told.items() if each}
        return {"tieredkv": told} if told else {}

    def waiting(self) -> Sequence[Json]:
        """Return the events that keep a stream alive before its first piece, if the API has any."""
        return ()

    def failure(self, error: RequestError) -> Sequence[Json]:
        """Return the events that end a stream that failed."""

    def written_for(self, answer: Reply, lifetime: str) -> int:
        """Return how many prompt tokens were written to be kept for at least this lifetime."""
        claims, usage, lifetime_s = answer.request.claims, answer.usage, parse_duration(lifetime)
        end = max((claim.end_token for claim in claims if claim.pin_s >= lifetime_s), default=0)
        return min(max(end - usage.cached_tokens, 0), usage.written_tokens)

    def caching(self, prompts: Sequence[RequestUsage]) -> Json:
        """Return the details of the prompts' tokens in `usage`.

        `cached_tokens_by_tier` is an extension of this server.
        """
        by_tier = cached_by_tier(prompts)
        return {
            "cached_tokens": sum(by_tier.values()),
            "cache_write_tokens": sum(usage.written_tokens for usage in prompts),
            "cached_tokens_by_tier": by_tier,
        }

    def receipt(self, prompts: Sequence[RequestUsage]) -> Json:
        """Return the extension `tieredkv` of `usage`.

        `miss` describes the first prompt that has a miss reason, and `plan` the first of which a
        part was loaded.
        """
        ours: Json = {
            **cached_by_tier(prompts),
            "recomputed": sum(usage.recomputed_tokens for usage in prompts),
        }
        if missed := [usage for usage in prompts if usage.miss_reason is not None]:
            ours["miss"] = self.diagnosis.miss(missed[0])
        if split := [usage for usage in prompts if usage.split_token is not None]:
            ours["plan"] = {
                "split_token": split[0].split_token,
                "predicted_ms": _ms(split[0].predicted_s),
                "actual_ms": _ms(split[0].actual_s),
            }
        return ours


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a request asks for: prompts to continue, and how.

    Attributes:
        prompts: the token ids of each prompt; each prompt is answered `n` times.
        plan: the engine request of every answer, without the prompt.
        shape: writes the answer in the form of the API, whole or as a stream.
        prompt_field: the field of the body that holds the prompt.
        labels: labels that metrics may give to the request.
        parts: the parts of the prompt.
        settings: other fields whose change can explain a miss.
        template: what the chat template was given beside messages and tools, by what it is.
        compared_id: the id of an earlier answer to compare this request with.
        reading: how the answers are read as messages; None for plain texts.
        continues_text: whether the answers go on with the text of the last message.
        turn: the conversation so far, if the answer is to be stored with it.
    """

    prompts: list[list[int]]
    plan: EngineRequest
    shape: Shape
    n: int = 1
    stream: bool = False
    prompt_field: str = "messages"
    labels: dict[str, str] = field(default_factory=dict)
    parts: Sequence[PromptPart] = ()
    settings: Json = field(default_factory=dict)
    template: Mapping[str, Any] = field(default_factory=dict)
    compared_id: str | None = None
    reading: Reading | None = None
    continues_text: bool = False
    turn: Turn | None = None

    def seen(self, isolate_by: str) -> Seen:
        """Return the digests that are kept of this request for later diagnoses."""
        salt = self.plan.cache_salt if isolate_by in ("salt", "prompt_cache_key") else None
        key = self.plan.prompt_cache_key if isolate_by == "prompt_cache_key" else None
        settings = {**self.settings, "namespace": (salt, key)}
        size = sum(map(len, self.prompts))
        return Seen.of(self.parts, size, settings, self.template)

    def engine_requests(self, info: EngineInfo, tenant: str, rules: Rules) -> list[EngineRequest]:
        """Return one engine request for each answer.

        Request `i * n + j` is for the j-th answer to the i-th prompt. The j-th answer is sampled
        with `seed + j`, so that equal seeds give equal answers in the same order.

        Raises:
            RequestError: the request does not fit this model, or asks for too many answers.
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
        if self.reading is not None and not params.ignore_eos:
            ends = [id for id in self.reading.ends if id < info.vocab_size]
            params = dataclasses.replace(params, stop_token_ids=(*params.stop_token_ids, *ends))
        for prompt in self.prompts:
            limits = info.max_model_len, info.vocab_size
            pack_prompt(prompt, *limits, max_tokens=params.max_tokens, field=self.prompt_field)
            request = replace(fitted(self.plan, prompt, info.block_size, rules), tenant=tenant)
            for j in range(self.n):
                seed = None if params.seed is None else (params.seed + j) % MAX_SEED
                how = dataclasses.replace(params, seed=seed)
                requests.append(replace(request, request_id=uuid.uuid4().hex, params=how))
        return requests


def fitted(plan: EngineRequest, prompt: list[int], block_size: int, rules: Rules) -> EngineRequest:
    """Return the plan for one prompt, with the ends of its claims rounded down to full blocks.

    A prefix that is shorter than the server's minimum is not cached.
    """
    cacheable = plan.cacheable_tokens
    ends = [claim.end_token // block_size * block_size for claim in plan.claims]
    claims = [replace(it, end_token=end) for it, end in zip(plan.claims, ends, strict=True)]
    longest = len(prompt) if cacheable is None else min(len(prompt), cacheable)
    if longest < rules.settings.min_cache_tokens:
        cacheable, claims = 0, []
    caching = {"claims": claims, "cacheable_tokens": cacheable}
    retention = plan.retention or rules.default.name
    return replace(plan, prompt_token_ids=prompt, retention=retention, **caching)


class ApiRequest(Object):
    """The body of a request for an answer; each API adds its own fields.

    Attributes:
        without_effect: fields that are accepted and have no effect; the log names each of them
            once.
    """

    without_effect: ClassVar[frozenset[str]] = frozenset()

    model: Text

    def cleaned(self, _rules: Rules) -> Self:
        """Return the body without what a client adds for another service than this."""
        return self

    def check(self, rules: Rules) -> None:
        """Refuse fields that contradict each other or that this server does not support."""

    def ask(self, tokenization: Tokenization, rules: Rules) -> Asked:
        """Render and encode the prompts of a checked body."""
        raise NotImplementedError

    @property
    def ignored(self) -> list[str]:
        """How an answer names the values of the request that this server does not know."""
        return []

    @property
    def refused_stream(self) -> Shape | None:
        """What writes the stream that refuses a prompt that is too long; None for an error."""
        return None


class PlainRequest(ApiRequest):
    """The body of a request that needs no engine."""

    model: Text = ""  # If left out, it is the model of this server.

    def tell(self, tokenization: Tokenization, info: EngineInfo) -> Json:
        """Return the body of the answer."""
        raise NotImplementedError


def cached_by_tier(prompts: Sequence[RequestUsage]) -> dict[str, int]:
    """Return how many tokens of the prompts each tier had."""
    return {str(t): sum(usage.cached_tokens_by_tier[t] for usage in prompts) for t in Tier}


def _ms(seconds: float | None) -> float | None:
    """Return seconds in milliseconds, to the microsecond."""
    return None if seconds is None else round(1000 * seconds, 3)
