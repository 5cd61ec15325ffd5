"""OpenAI's requests: a JSON body to a checked request.

It knows fields and texts, no sockets, no tokenizer and no engine. What a request asks for is
checked here in whole, before anybody works for it. Fields are called what the API calls them.
"""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Field, PlainValidator, TypeAdapter, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError, PydanticKnownError

from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.errors import RequestError
from tieredkv.fields import Object, invalid_value, unknown_parameter
from tieredkv.retention import RetentionPolicies

MAX_PROMPTS = 2048
MAX_SEED = 2**63


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_IGNORED_FIELDS = _names("user metadata store safety_identifier service_tier prompt_cache_options")
"""Fields of OpenAI's that mean nothing here, so that even a strict server takes them."""

_SAMPLING_FIELDS = {field.name for field in fields(SamplingParams)} - {"max_tokens", "logprobs"}

Prompt = str | list[int]
Text = Annotated[str, Field(min_length=1)]
_FAIL_FAST = pydantic.FailFast()
TokenIds = Annotated[list[int], _FAIL_FAST]


def _several(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class StreamOptions(Object):
    """How a stream ends."""

    include_usage: bool = False


class ModelRequest(Object):
    """What is known before anything else: which model is asked for."""

    model: Text


class ApiRequest(ModelRequest):
    """What both endpoints have in common.

    How to sample is told by the fields of `SamplingParams`, which checks them; those whose ranges
    are others in OpenAI's API are here, too.

    Attributes:
        prompt_field: which field holds the prompt.
        default_tokens: longest answer where the client names none; None for all the room.
        ignored: fields that mean nothing here.
    """

    model_config = pydantic.ConfigDict(
        extra="allow"
    )  # how to sample; `check` may refuse the others

    prompt_field: ClassVar[str]
    default_tokens: ClassVar[int | None] = None
    ignored: ClassVar[frozenset[str]] = _IGNORED_FIELDS

    max_tokens: int | None = Field(None, ge=1)
    n: int = Field(1, ge=1, le=128)
    stream: bool = False
    stream_options: StreamOptions | None = None
    prompt_cache_retention: Text | None = None
    cache_salt: Text | None = Field(None, max_length=128)
    prompt_cache_key: Text | None = Field(None, max_length=256)

    top_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-MAX_SEED, le=MAX_SEED - 1)
    min_tokens: int = Field(0, ge=0)
    stop: Annotated[list[str], pydantic.BeforeValidator(_several)] = Field([], max_length=4)
    stop_token_ids: TokenIds = Field([])

    @property
    def limit(self) -> int | None:
        """Longest answer that the client asks for."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives reported with each token; None for no log-probabilities."""
        raise NotImplementedError

    @property
    def wants_stream_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @cached_property
    def params(self) -> SamplingParams:
        """How to sample every answer, but for its seed and the room that is left."""
        given = {key: it for key, it in self if key in _SAMPLING_FIELDS and it is not None}
        given |= {"top_p": self.top_p or 1.0, "stop": tuple(filter(None, self.stop))}
        # NOTE: `min_tokens` is checked against the client's limit, and fitted to the room later.
        max_tokens = self.limit or max(16, self.min_tokens)
        params = SamplingParams(**given, max_tokens=max_tokens, logprobs=self.num_logprobs)
        # Of no probability at all, the smallest set of tokens is the likeliest one.
        return replace(params, temperature=0.0) if self.top_p == 0 else params

    def params_of(self, choice: int, max_tokens: int, fallback_seed: int) -> SamplingParams:
        """Return the parameters of one answer; equal seeds give equal answers, in their order."""
        seed = self.params.seed if self.params.seed is not None else fallback_seed
        seed = (seed + choice) % MAX_SEED
        min_tokens = min(self.params.min_tokens, max_tokens)
        return replace(self.params, max_tokens=max_tokens, seed=seed, min_tokens=min_tokens)

    def check_prompt(self, prompt: list[int], max_model_len: int, vocab_size: int) -> None:
        """Refuse a prompt that is empty, leaves no room for an answer, or has unknown ids."""
        what, text, code = self.prompt_field, "", "invalid_value"
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

    def check(self, policies: RetentionPolicies, *, is_strict: bool) -> None:
        """Refuse what the fields cannot mean together, or on this server.

        Args:
            policies: what `prompt_cache_retention` may name.
            is_strict: refuse unknown fields and other spellings, too.
        """
        if self.stream_options is not None and not self.stream:
            text = "The 'stream_options' parameter is only allowed when 'stream' is enabled."
            raise RequestError(text, param="stream_options", code="invalid_value")
        if self.prompt_cache_retention is not None:
            policies.get(self.prompt_cache_retention, is_strict=is_strict)
        _ = self.params  # refuses what it must
        known = self.ignored | _SAMPLING_FIELDS
        unknown = [name for name in self.model_extra or () if name not in known]
        if is_strict and unknown:
            raise unknown_parameter(unknown[0])


def _read_prompts(value: Any) -> Sequence[Prompt]:
    """Return a list of prompts from any of the four forms."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise PydanticCustomError("prompt", "a string or an array")
    if not value or isinstance(value[0], int):
        return [_TOKEN_IDS.validate_python(value, strict=True)]
    several = _SEVERAL_TEXTS if isinstance(value[0], str) else _SEVERAL_TOKEN_IDS
    return several.validate_python(value, strict=True)


_TOKEN_IDS = TypeAdapter(TokenIds)
_SEVERAL_TEXTS = TypeAdapter(Annotated[list[str], Field(max_length=MAX_PROMPTS)])
_SEVERAL_TOKEN_IDS = TypeAdapter(Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS)])


class CompletionRequest(ApiRequest):
    """`POST /v1/completions`."""

    prompt_field = "prompt"
    default_tokens = 16

    prompt: Annotated[list[Prompt], PlainValidator(_read_prompts)]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False
    suffix: Any = None
    best_of: int | None = Field(None, ge=1)

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives reported with each token; None for no log-probabilities."""
        return self.logprobs

    def check(self, policies: RetentionPolicies, *, is_strict: bool) -> None:
        """Refuse what is not supported, too."""
        if self.echo and self.logprobs is not None:
            raise _unsupported("'echo' together with 'logprobs' is not supported.", "echo")
        if self.suffix not in (None, ""):
            raise _unsupported("'suffix' is not supported.", "suffix")
        if self.best_of not in (None, self.n):
            raise _unsupported("'best_of' must be equal to 'n'.", "best_of")
        super().check(policies, is_strict=is_strict)


class ContentPart(Object):
    """A part of a message's text."""

    type: Literal["text", "refusal"]
    text: str | None = Field(None, validate_default=True)
    refusal: str | None = Field(None, validate_default=True)

    @field_validator("text", "refusal")
    @classmethod
    def _is_there(cls, text: str | None, info: ValidationInfo) -> str | None:
        if text is None and info.field_name == info.data.get("type"):
            raise PydanticKnownError("missing")
        return text


_PARTS = TypeAdapter(Annotated[list[ContentPart], _FAIL_FAST])


class Function(Object):
    """A function; the template knows what else is in it."""

    name: Text


class CalledFunction(Function):
    """A function, and what the model called it with."""

    arguments: Any = Field({})

    @field_validator("arguments")
    @classmethod
    def _parse(cls, arguments: Any) -> Any:
        # Templates print an object as they like; OpenAI's clients send its text.
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):
                arguments = json.loads(arguments)
        return arguments or {}


class ToolCall(Object):
    """A call that the assistant made."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Object):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str = Field(None, validate_default=True)
    tool_calls: Annotated[list[ToolCall], _FAIL_FAST] = Field([])
    name: Text | None = None
    tool_call_id: Text | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _join(cls, value: Any, info: ValidationInfo) -> str:
        """Return the text; parts of it are joined by line ends."""
        if value is None and info.data.get("role") != "assistant":
            raise PydanticKnownError("missing")
        if isinstance(value, list):
            parts = _PARTS.validate_python(value, strict=True)
            return "\n".join(getattr(part, part.type) for part in parts)
        if isinstance(value, str | None):
            return value or ""
        raise PydanticCustomError("content", "a string or an array")

    def for_template(self) -> dict[str, Any]:
        """Return the form that chat templates know."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.content}
        if self.tool_calls and role == "assistant":
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        return message | self.model_dump(include={"name", "tool_call_id"}, exclude_none=True)


class Tool(Object):
    """A tool that may be called."""

    type: Literal["function"]
    function: Function


_TOOLS = TypeAdapter(Annotated[list[Tool], Field(max_length=1024)])


def _check_tools(tools: Any) -> Any:
    """Return them as they were given, for the template prints them."""
    _TOOLS.validate_python(tools, strict=True)
    return tools


class ResponseFormat(Object):
    """Plain text, which is all that is made."""

    type: Literal["text"]


class ChatRequest(ApiRequest):
    """`POST /v1/chat/completions`."""

    prompt_field = "messages"
    ignored = _IGNORED_FIELDS | _names("parallel_tool_calls reasoning_effort verbosity")

    messages: list[Message] = Field(min_length=1, max_length=16_384)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    logprobs: bool = False
    max_completion_tokens: int | None = Field(None, ge=1)
    response_format: ResponseFormat | None = None
    modalities: list[Any] = Field([])
    chat_template_kwargs: dict[str, Any] = Field({})
    tool_choice: Any = None
    tools: Annotated[list[dict[str, Any]], PlainValidator(_check_tools)] = Field([])

    @property
    def limit(self) -> int | None:
        """Longest answer that the client asks for; the newer name goes before the older one."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives reported with each token; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self, policies: RetentionPolicies, *, is_strict: bool) -> None:
        """Refuse what is not supported, too."""
        if self.top_logprobs is not None and not self.logprobs:
            text = "'top_logprobs' is only allowed when 'logprobs' is true."
            raise RequestError(text, param="top_logprobs", code="invalid_value")
        for modality in self.modalities:
            if modality != "text":
                raise invalid_value("modalities", str(modality), "'text'")
        for name, value in self.chat_template_kwargs.items():
            is_plain = isinstance(value, str | int | float | bool)
            if name in _RESERVED_TEMPLATE_ARGUMENTS or not is_plain:
                raise unknown_parameter(f"chat_template_kwargs.{name}")
        if self.tool_choice not in (None, "none", "auto"):
            raise _unsupported("'tool_choice' can only be 'none' or 'auto'.", "tool_choice")
        super().check(policies, is_strict=is_strict)


_RESERVED_TEMPLATE_ARGUMENTS = _names(
    "messages conversation tools documents chat_template add_generation_prompt tokenize "
    "continue_final_message return_dict return_tensors padding truncation max_length"
)


def unknown_model(name: str) -> RequestError:
    """Return the error for a model that is not served."""
    text = f"The model `{name[:200]}` does not exist or you do not have access to it."
    return RequestError(text, param="model", code="model_not_found", status=404)


def _unsupported(message: str, param: str) -> RequestError:
    return RequestError(message, param=param, code="unsupported_parameter")
