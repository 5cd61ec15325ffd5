"""OpenAI's chat and completions: bodies to checked requests.

This module checks all fields of a request before any other work on it begins. It does not use
sockets or the engine. Fields have the names that the API gives them.
"""

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, ClassVar

import msgspec
import pydantic
from pydantic import Field, PlainValidator, TypeAdapter

from tieredkv.cache_fields import BREAKPOINT, CacheFields, Lifetime
from tieredkv.engine.engine_messages import EngineRequest
from tieredkv.engine.sampling_params import MAX_LOGPROBS, SamplingParams, several
from tieredkv.errors import RequestError, invalid_value
from tieredkv.fields import Object, TextOr, list_of, out_of_bounds, read
from tieredkv.server.asked import WHOLE, ApiRequest, Asked, Json, Rules, Text, tell_left_out
from tieredkv.server.chat import Prompt, Tokenization
from tieredkv.server.chat_template import EFFORTS, thinking_arguments
from tieredkv.server.histories import TOOLS, Mark
from tieredkv.server.ignored import nearest, unknown
from tieredkv.server.known_fields import CHAT, COMPLETIONS
from tieredkv.server.openai_answers import ChatShape, CompletionShape
from tieredkv.server.openai_messages import (
    FAIL_FAST,
    Functions,
    Message,
    Messages,
    Tools,
    custom_names,
    for_template,
    ignored_messages,
    left_out,
    lifetimes,
    offered,
    whole_turns,
)
from tieredkv.server.structure import Format, as_grammar
from tieredkv.server.structure_fields import (
    ResponseFormat,
    StructuredOutputs,
    choose_tools,
    only_one,
)
from tieredkv.server.template_arguments import TemplateArguments

MAX_PROMPTS = 2048
MAX_WRITES = 4
"""How many prefixes one request writes at most; if more are marked, the last ones are written."""

STRICT_LOGPROBS = 20
"""How many alternatives OpenAI's API reports at most; a strict server keeps to that."""

SAMPLING_FIELDS = frozenset(SamplingParams.__annotations__) - {"max_tokens", "logprobs"}
TokenIds = Annotated[list[int], FAIL_FAST]
Stop = Annotated[tuple[str, ...], TextOr(several)]
Label = Annotated[str, Field(max_length=64)]

SERVICE_TIERS = ("auto", "default", "flex", "scale", "priority", "fast", "ultrafast")
VERBOSITIES = ("low", "medium", "high")


def thinking_of(given: str | None) -> Json:
    """Return the arguments by which a chat template knows the effort that a client wants."""
    effort = nearest(given, EFFORTS)
    return thinking_arguments(effort, None if effort is None else effort != "none")


class StreamOptions(Object):
    """Which chunks of a stream have a `usage` object: none, the last one, or all."""

    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False


class StrictLimits(Object):
    """The limits of OpenAI's API that only a strict server keeps; others have wider ones."""

    temperature: float | None = Field(None, le=2)
    stop: Stop = Field((), max_length=4)
    metadata: dict[Label, Annotated[str, Field(max_length=512)]] = Field({})


class OpenAIRequest(CacheFields, ApiRequest):
    """The fields that OpenAI's endpoints have in common.

    Requests also take the fields of `SamplingParams`, which checks them. Only those sampling fields
    are repeated here whose range or type is different in OpenAI's API.

    Attributes:
        prompt_field: the field that holds the prompt.
        default_tokens: the longest answer in tokens if the client names no limit.
    """

    model_config = pydantic.ConfigDict(extra="allow")
    prompt_field: ClassVar[str]
    default_tokens: ClassVar[int] = WHOLE

    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    n: int = Field(1, ge=1, le=128)
    best_of: int | None = Field(None, ge=1)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    cache_salt: Text | None = Field(None, max_length=128)
    prompt_cache_key: Text | None = Field(None, max_length=256)

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs = StructuredOutputs()
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    # These are checked and have no effect.
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[Label, Any] = Field({}, max_length=16)
    store: bool = False
    service_tier: Text | None = None

    temperature: float | None = None
    top_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    min_tokens: int = Field(0, ge=0)
    stop: Stop = Field(())
    stop_token_ids: TokenIds = Field([])

    @property
    def limit(self) -> int | None:
        """The longest answer that the client asks for, in tokens; None if it names no limit.

        `max_completion_tokens` takes precedence over `max_tokens`.
        """
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives are reported with each token; None for no log-probabilities."""
        return None

    @property
    def settings(self) -> dict[str, Any]:
        """The fields other than the prompt whose change can explain a cache miss."""
        names = "prompt_cache_key service_tier reasoning_effort verbosity"
        return {name: getattr(self, name, None) for name in names.split()}

    @cached_property
    def text_format(self) -> Format | None:
        """The format of the answers' text; None for any text.

        Raises:
            RequestError: it cannot be enforced, or there are several.
        """
        formats: list[Format | None] = [*self.structured_outputs.formats("structured_outputs")]
        if (wanted := self.response_format) is not None:
            formats.append(wanted.json_schema.format_at("response_format", wanted.type))
        names = ("json", "regex", "choice", "grammar")
        guided = {name: getattr(self, f"guided_{name}") for name in names}
        try:
            formats += read(StructuredOutputs, guided).formats("guided", "_")
        except RequestError as error:
            raise _of_guided(error) from None
        return only_one(formats)

    @cached_property
    def params(self) -> SamplingParams:
        """The sampling parameters of the first answer to each prompt."""
        given = {key: it for key, it in self if key in SAMPLING_FIELDS and it is not None}
        given |= {"top_p": self.top_p or None, "stop": tuple(filter(None, self.stop))}
        limit = self.limit
        given["max_tokens"] = min(self.default_tokens if limit is None else limit, WHOLE)
        if limit is None:  # The client did not set the limit that `min_tokens` exceeds.
            given["min_tokens"] = min(self.min_tokens, self.default_tokens)
        params = SamplingParams(**given, logprobs=self.num_logprobs)
        # With `top_p` of 0, only the likeliest token is left to choose from.
        return replace(params, temperature=0.0) if self.top_p == 0 else params

    def check(self, rules: Rules) -> None:
        """Refuse fields that contradict each other or that this server does not support."""
        if rules.is_strict:
            read(StrictLimits, {name: getattr(self, name) for name in StrictLimits.model_fields})
            if "stream_options" in self.model_fields_set and not self.stream:
                text = "The 'stream_options' parameter is only allowed when 'stream' is enabled."
                raise RequestError(text, param="stream_options", code="invalid_value")
        if self.best_of not in (None, self.n):
            text = "'best_of' must be equal to 'n'."
            raise RequestError(text, param="best_of", code="unsupported_parameter")
        for path, message in self.turns:
            for j, part in enumerate(message.content):
                if part.is_picture:
                    rules.check_image(f"{path}[{j}]")
        self.plan(rules, [0] * len(self.marks))  # raises for what no policy covers

    @property
    def ignored(self) -> list[str]:
        """How an answer names the values of the request that this server does not know."""
        return unknown("service_tier", self.service_tier, SERVICE_TIERS)

    @property
    def form(self) -> dict[str, Any]:
        """The arguments of the answer's `Shape` that the request sets."""
        options = self.stream_options
        usage_in = "none"
        if options.include_usage:
            usage_in = "all" if options.continuous_usage_stats else "last"
        return {"n": self.n, "usage_in": usage_in}

    @property
    def turns(self) -> Sequence[tuple[str, "Message"]]:
        """All messages of a conversation, each with the path of its parts in the body."""
        return ()

    @property
    def marked_tools(self) -> Iterable[tuple[int, Lifetime]]:
        """The breakpoints of tools, each with the index of its tool for the chat template."""
        return ()

    @cached_property
    def marks(self) -> list[tuple[Mark, Lifetime]]:
        """The last `MAX_WRITES` breakpoints of the prompt and their places."""
        found = (
            ((i, j), at)
            for i, (path, message) in reversed([*enumerate(self.turns)])
            for j, at in reversed([*message.lifetimes(path)])
        )
        tools = (((TOOLS, i), at) for i, at in reversed([*self.marked_tools]))
        return [*itertools.islice(itertools.chain(found, tools), MAX_WRITES)][::-1]

    def plan(self, rules: Rules, ends: Sequence[int]) -> EngineRequest:
        """Return the engine request without its prompt.

        Args:
            rules: the rules of the client's key.
            ends: the number of prompt tokens up to each mark.
        """
        marks = [at for _, at in self.marks]
        wanted = [*zip(ends, marks, strict=True)]
        if not self.is_explicit and any(at.field == BREAKPOINT for at in marks):
            wanted = wanted[1 - MAX_WRITES :]  # The whole prompt is one of OpenAI's writes.
        wanted += [(WHOLE, at) for at in self.of_whole]
        own = rules.allowed.named(self.prompt_cache_retention)
        claims = [
            rules.allowed.claim(at if at.ttl else self.of_options, own, end) for end, at in wanted
        ]
        cacheable = max([0, *ends, *(claim.end_token for claim in claims)])
        return EngineRequest(
            params=self.params,
            retention=self.prompt_cache_retention,
            claims=claims,
            cacheable_tokens=cacheable if self.is_explicit else None,
            cache_salt=self.cache_salt,
            prompt_cache_key=self.prompt_cache_key,
        )

    def asked(self, prompts: list[list[int]], plan: EngineRequest, **how: Any) -> Asked:
        """Return what the request asks for, given the token ids of its prompts."""
        labels = {name: each for name, each in self.metadata.items() if isinstance(each, str)}
        how |= {"settings": self.settings, "labels": labels}
        how |= {"n": self.n, "stream": self.stream, "prompt_field": self.prompt_field}
        return Asked(prompts=prompts, plan=plan, **how)


def _read_prompts(value: list[Any]) -> Sequence[Prompt]:
    """Return a list of prompts from a list of texts, a list of id lists, or one list of ids."""
    if not (value and isinstance(value[0], str | list)):
        return [_TOKEN_IDS.validate_python(value, strict=True)]
    several = _SEVERAL_TEXTS if isinstance(value[0], str) else _SEVERAL_TOKEN_IDS
    return several.validate_python(value, strict=True)


_AS_GIVEN = list[str] | list[int] | list[list[int]]
_PROMPTS = PlainValidator(_read_prompts, json_schema_input_type=_AS_GIVEN)
_TOKEN_IDS = TypeAdapter(TokenIds)
_SEVERAL_TEXTS = TypeAdapter(Annotated[list[str], Field(max_length=MAX_PROMPTS)])
_SEVERAL_TOKEN_IDS = TypeAdapter(Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS)])


class CompletionRequest(OpenAIRequest):
    """The body of `POST /v1/completions`."""

    without_effect = COMPLETIONS.without_effect
    known_besides = SAMPLING_FIELDS | without_effect
    refused = COMPLETIONS.refused
    prompt_field = "prompt"
    default_tokens = 16

    prompt: Annotated[list[Prompt], _PROMPTS, list_of(str)]
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives are reported with each token; None for no log-probabilities."""
        return self.logprobs

    def check(self, rules: Rules) -> None:
        """Refuse fields that contradict each other or that this server does not support."""
        if self.max_tokens == 0 and not self.echo:
            raise out_of_bounds("max_tokens", "ge", 1, 0)
        super().check(rules)

    def ask(self, tokenization: Tokenization, rules: Rules) -> Asked:
        """Encode the prompts, and decode those that are echoed."""
        prompts = tokenization.encode_prompts(self.prompt)
        prompt_logprobs, echoes = self.logprobs if self.echo else None, []
        for prompt, token_ids in zip(self.prompt, prompts, strict=True):
            text = tokenization.decode(prompt) if self.echo else ""
            scored = token_ids if prompt_logprobs is not None else []
            echoes.append((text, tokenization.starts(scored, text)))
        shape = CompletionShape(self.model, tokenization, echoes, **self.form)
        grammar = as_grammar(self.text_format) if self.text_format else None
        plan = msgspec.structs.replace(
            self.plan(rules, []), prompt_logprobs=prompt_logprobs, grammar=grammar
        )
        parts = [("input", prompt, "prompt") for prompt in self.prompt]
        return self.asked(prompts, plan, shape=shape, parts=parts)


class ConversationRequest(OpenAIRequest):
    """A conversation that the model continues."""

    tool_choice: Any = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: TemplateArguments = Field({})

    @property
    def tool_names(self) -> Sequence[str]:
        """The names of the tools that may be called, as the client knows them."""
        raise NotImplementedError

    @property
    def chosen_tool(self) -> Any:
        """Which tools may or must be called, as `choose_tools` takes it."""
        return self.tool_choice

    @property
    def may_call_several(self) -> bool:
        """Whether one answer may have several calls."""
        return self.parallel_tool_calls

    @property
    def left_out_kinds(self) -> Collection[str]:
        """The types of tools that the model is not told of."""
        return ()

    def render(
        self,
        tokenization: Tokenization,
        rules: Rules,
        arguments: Json,
        *,
        found_tools: Sequence[Json] = (),
        continues_text: bool = False,
        **how: Any,
    ) -> Asked:
        """Render the conversation and return what is asked for.

        Args:
            tokenization: of the model.
            rules: of the client's key.
            arguments: for the chat template; those that the client names come before them.
            found_tools: that may be called beside those of the template, whose form they have.
            continues_text: whether the answer goes on with the text of the last message.
            **how: further fields of what is asked for.
        """
        structure = choose_tools(
            self.chosen_tool,
            tools := (*(arguments.get("tools") or ()), *found_tools),
            self.tool_names,
            is_parallel=self.may_call_several,
            text=self.text_format,
            left_out=self.left_out_kinds,
        )
        messages = [message.for_template() for _, message in self.turns]
        marks = [mark for mark, _ in self.marks]
        encoded = tokenization.encode_chat(
            messages,
            arguments,
            marks,
            client_arguments=self.chat_template_kwargs,
            field=self.prompt_field,
            continues_last=continues_text,
        )
        reading = tokenization.reading(encoded, () if structure.choice == "none" else tools)
        plan = self.plan(rules, encoded.ends)
        found = {"grammar": structure.grammar(reading), "anchors": encoded.anchors}
        plan = msgspec.structs.replace(plan, **found)
        how |= {"reading": reading, "continues_text": continues_text}
        how["template"] = encoded.template
        return self.asked([encoded.token_ids], plan, parts=encoded.parts, **how)


def _of_guided(error: RequestError) -> RequestError:
    """Return an error of `StructuredOutputs` for the field `guided_…` that it is about."""
    param, text = error.param or "", str(error)
    if not param.startswith("guided_"):
        text = text.replace(f"'{param}", f"'guided_{param}")
        param = f"guided_{param}"
    return RequestError(text, param=param, code=error.code)


def check_continuing(
    messages: Sequence[Message], *, continues: bool, adds_prompt: bool | None
) -> None:
    """Refuse to continue a message that cannot be continued.

    Args:
        messages: the conversation.
        continues: whether the answer continues the last message.
        adds_prompt: whether the answer begins a new message; None if the request does not say.

    Raises:
        RequestError: the message cannot be continued, or the answer is also to begin a new one.
    """
    if continues and adds_prompt:
        text = "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
        raise RequestError(text, param="continue_final_message", code="invalid_value")
    if continues and not messages[-1].can_be_continued:
        what = "Only a message of the assistant that ends with a text can be continued."
        raise RequestError(what, param="continue_final_message", code="invalid_value")


class ChatRequest(ConversationRequest):
    """The body of `POST /v1/chat/completions`.

    The fields `functions` and `function_call` came before tools. An answer to them has one call at
    most, in the form of that time.
    """

    without_effect = CHAT.without_effect
    known_besides = SAMPLING_FIELDS | without_effect
    refused = CHAT.refused
    prompt_field = "messages"

    messages: Messages = Field(min_length=1)
    top_logprobs: int | None = Field(None, ge=0)
    logprobs: bool = False
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    tools: Tools = Field([])
    functions: Functions = Field([])
    function_call: Any = None
    reasoning_effort: Text | None = None
    verbosity: Text | None = None

    @cached_property
    def turns(self) -> Sequence[tuple[str, Message]]:
        """All messages, each with the path of its parts in the body."""
        return whole_turns(
            [(f"messages[{i}].content", message) for i, message in enumerate(self.messages)]
        )

    @property
    def ignored(self) -> list[str]:
        """How an answer names the values of the request that this server does not know."""
        return [
            *ignored_messages(self.messages),
            *unknown("reasoning_effort", self.reasoning_effort, EFFORTS),
            *unknown("verbosity", self.verbosity, VERBOSITIES),
            *super().ignored,
        ]

    @property
    def tool_names(self) -> Sequence[str]:
        """The names of the tools that the model is told of."""
        return [tool[tool["type"]]["name"] for tool in offered(self.tools, self.functions)]

    @cached_property
    def left_out_kinds(self) -> Collection[str]:
        """The types of tools that the model is not told of."""
        return left_out(self.tools)

    @property
    def marked_tools(self) -> Iterable[tuple[int, Lifetime]]:
        """The breakpoints of tools, each with the index of its tool for the chat template."""
        return lifetimes(self.tools, self.functions)

    @property
    def chosen_tool(self) -> Any:
        """Which tools may or must be called, as `choose_tools` takes it."""
        if not self.functions:
            return self.tool_choice
        call = self.function_call
        return {"type": "function", **call} if isinstance(call, dict) else call

    @property
    def may_call_several(self) -> bool:
        """Whether one answer may have several calls."""
        return self.parallel_tool_calls and not self.functions

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives are reported with each token; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self, rules: Rules) -> None:
        """Refuse fields that contradict each other or that this server does not support."""
        if self.top_logprobs is not None and not self.logprobs:
            text = "'top_logprobs' is only allowed when 'logprobs' is true."
            raise RequestError(text, param="top_logprobs", code="invalid_value")
        most = STRICT_LOGPROBS if rules.is_strict else MAX_LOGPROBS
        if (self.top_logprobs or 0) > most:
            raise out_of_bounds("top_logprobs", "le", most, self.top_logprobs)
        if rules.is_strict and self.best_of not in (None, 1):  # this endpoint does not have it
            text = "'best_of' is not supported."
            raise RequestError(text, param="best_of", code="unsupported_parameter")
        self._check_functions()
        for i, tool in enumerate(self.tools):
            if (kind := tool["type"]) not in self.left_out_kinds:
                rules.check_name(tool[kind]["name"], f"tools[{i}].{kind}.name")
            elif rules.is_strict:
                raise invalid_value(f"tools[{i}].type", kind, "'function' and 'custom'")
        for i, function in enumerate(self.functions):
            rules.check_name(function["name"], f"functions[{i}].name")
        continues, adds_prompt = self.continue_final_message, self.add_generation_prompt
        check_continuing(self.messages, continues=continues, adds_prompt=adds_prompt)
        if adds_prompt is False and not continues:
            text = "'add_generation_prompt' can only be false with 'continue_final_message'."
            raise RequestError(text, param="add_generation_prompt", code="unsupported_parameter")
        super().check(rules)

    def _check_functions(self) -> None:
        if self.functions and self.tools:
            text = "'functions' cannot be given together with 'tools'."
            raise RequestError(text, param="functions", code="invalid_value")
        call, why = self.function_call, ""
        if isinstance(call, dict):
            if (name := call.get("name")) not in self.tool_names or not self.functions:
                what = f"no function named {str(name)[:64]!r} was specified"
                why = f"{what} in the 'functions' parameter"
        elif call not in (None, "none", "auto"):
            why = "it is 'none', 'auto', or an object with the name of a function"
        if why:
            text = f"Invalid value for 'function_call': {why}."
            raise RequestError(text, param="function_call", code="invalid_value")

    def ask(self, tokenization: Tokenization, rules: Rules) -> Asked:
        """Render the conversation."""
        tell_left_out(self.left_out_kinds)
        thinking = thinking_of(self.reasoning_effort)
        tools = for_template(offered(self.tools, self.functions)) or None
        arguments = {"tools": tools, **thinking}
        shape = ChatShape(
            self.model,
            tokenization,
            custom=custom_names(self.tools),
            has_functions=bool(self.functions),
            left_out=self.left_out_kinds,
            **self.form,
        )
        continues = self.continue_final_message
        return self.render(tokenization, rules, arguments, shape=shape, continues_text=continues)
