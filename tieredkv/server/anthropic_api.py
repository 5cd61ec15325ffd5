"""Anthropic's Messages: bodies to checked requests, and `cache_control` to a plan.

This module does not use sockets or the engine. It converts conversations to the form of OpenAI's
chat messages, so that equal conversations from both APIs share blocks.
"""

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BeforeValidator, FailFast, Field, PrivateAttr

from tieredkv.cache_fields import CONTROL, Lifetime, seconds_of
from tieredkv.engine.engine_messages import EngineInfo, EngineRequest
from tieredkv.engine.sampling_params import MAX_STOP_STRINGS, SamplingParams
from tieredkv.errors import RequestError
from tieredkv.fields import names_of
from tieredkv.server.anthropic_answers import MessageShape
from tieredkv.server.anthropic_blocks import Block, Texts, Turn, ignored_in
from tieredkv.server.anthropic_tools import CustomTool, Known, Marked, Tool, read_tool
from tieredkv.server.asked import (
    TOOL_NAME,
    WHOLE,
    ApiRequest,
    Asked,
    Json,
    PlainRequest,
    Rules,
    Text,
    tell_left_out,
)
from tieredkv.server.chat import Encoded, Tokenization
from tieredkv.server.chat_template import EFFORTS, thinking_arguments
from tieredkv.server.histories import TOOLS, Mark
from tieredkv.server.ignored import nearest, unknown
from tieredkv.server.known_fields import COUNT_TOKENS, MESSAGES
from tieredkv.server.schemas import enforceable
from tieredkv.server.structure import Structure, json_format
from tieredkv.server.template_arguments import TemplateArguments

MAX_BREAKPOINTS = 4
MAX_MESSAGES = 16_384
BILLING_HEADER = "x-anthropic-billing-header:"
"""What the system block begins with that Claude Code adds for Anthropic's billing."""

_THOUGHTS = ("thinking", "redacted_thinking")
_RUNS = ("tool_use", "tool_result")
"""Several blocks of one of these types in a row count as one position."""


class ToolChoice(Known):
    """Which tools are called: those the model chooses, at least one, a certain one, or none."""

    needed = ("tool.name",)

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool = False


class OutputFormat(Known):
    """The form of the answer: JSON that follows a schema."""

    known_besides = Known.known_besides | names_of("schema name description")
    needed = ("json_schema.schema",)

    type: Literal["text", "json_schema"]
    of: Any = Field(None, alias="schema")


class OutputConfig(Known):
    """The wanted form of the answer, and how much the model is to think."""

    format: OutputFormat | None = None
    effort: Text | None = None


_THINKING = ("enabled", "disabled", "adaptive", "between_tools")


class Thinking(Known):
    """Whether the model is to think before it answers; an unknown type leaves it to the model."""

    type: Text

    @property
    def is_wanted(self) -> bool | None:
        """Whether the model is to think; None if the model chooses."""
        return self.type != "disabled" if self.type in _THINKING else None


class Place(NamedTuple):
    """The place of a block or tool in the prompt.

    Attributes:
        path: the path of the block in the body, for error texts.
        mark: marks the end of the block in the rendered conversation.
        position: the number of the block; consecutive tool calls share one number, and so do
            consecutive tool results.
        ttl: how long the prompt up to here is kept; empty without a breakpoint.
        is_empty: whether the block is an empty text.
    """

    path: str
    mark: Mark
    position: int
    ttl: str
    is_empty: bool = False

    @property
    def lifetime(self) -> Lifetime:
        """How long the prompt up to here is kept."""
        return Lifetime(self.path, CONTROL, self.ttl)


class Conversation(ApiRequest, Marked):
    """The fields that both endpoints for messages have in common."""

    without_effect = MESSAGES.without_effect
    known_besides = without_effect
    refused = MESSAGES.refused

    messages: Annotated[list[Turn], FailFast()] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: Texts = Field([])
    tools: Annotated[
        list[Annotated[Tool, BeforeValidator(read_tool)]], FailFast(), Field(max_length=1024)
    ] = Field([])
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: TemplateArguments = Field({})
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """What older clients send in place of `output_config.format`."""

    _left_out: Sequence[str] = PrivateAttr(())

    def cleaned(self, rules: Rules) -> Self:
        """Return the body without what only Anthropic's own servers have a use for.

        That is the block for their billing, unless the server keeps it, and the tools that run on
        them.

        Raises:
            RequestError: there are such tools and the server is strict, or one of them is forced.
        """
        hosted = {i: tool.type for i, tool in enumerate(self.tools) if tool.is_hosted}
        if hosted and rules.is_strict:
            (i, kind), what = min(hosted.items()), "tools are not supported on this server"
            raise RequestError(f"tools.{i}.type: '{kind}' {what}")
        tell_left_out(hosted.values())
        kept: Json = {"tools": [tool for tool in self.tools if not tool.is_hosted]}
        if hosted and (chosen := self.tool_choice) is not None:
            names = {tool.name for tool in self.tools if tool.is_hosted}
            if chosen.name in names:
                why = f"'{chosen.name}' is left out, since this server does not run it"
                raise RequestError(
                    f"tool_choice: {why}. Choose a tool that the client runs, or auto."
                )
            if chosen.type == "any" and not kept["tools"]:
                kept["tool_choice"] = chosen.model_copy(update={"type": "auto", "name": None})
        is_first = bool(self.system) and self.system[0].text.startswith(BILLING_HEADER)
        if is_first and rules.settings.drop_billing_header == "on":
            kept["system"] = self.system[1:]
        made = self.model_copy(update=kept)
        made._left_out = sorted({*hosted.values()})
        return made

    @cached_property
    def layout(self) -> tuple[list[Json], list[Place]]:
        """The messages for the chat template, and the place of each block in them.

        A breakpoint of the whole request is put on the last block that may have one.

        Raises:
            RequestError: a block is in a turn where it is not allowed, there are too many messages,
                or the last block has another breakpoint than the whole request.
        """
        messages: list[Json] = []
        places = [Place(f"tools.{i}", (TOOLS, i), i, it.ttl) for i, it in enumerate(self.tools)]
        turns: list[tuple[str, str, Sequence[Block]]] = [("system", "system", self.system)]
        for i, turn in enumerate(self.messages):
            turns.append((f"messages.{i}.content", turn.template_role, turn.content))
        for path, role, blocks in turns:
            for j, block in enumerate(blocks):
                is_result = block.type == "tool_result"
                if j == 0 or is_result or messages[-1]["role"] == "tool":
                    if len(messages) == MAX_MESSAGES:
                        text = f"at most {MAX_MESSAGES} turns and tool results are allowed"
                        raise RequestError(f"messages: {text}")
                    messages.append({"role": "tool" if is_result else role, "content": []})
                if block.type in _THOUGHTS:
                    if role != "assistant":
                        raise RequestError(
                            f"{path}.{j}: {block.type} blocks are only allowed in assistant turns"
                        )
                    if block.thinking:
                        before = messages[-1].get("reasoning_content", "")
                        messages[-1]["reasoning_content"] = before + block.thinking
                    continue
                message = messages[-1]
                message["content"] += block.texts
                if is_result:
                    message["tool_call_id"] = block.tool_use_id
                elif block.type == "tool_use":
                    call = {"name": block.name, "arguments": block.input}
                    call = {"id": block.id, "type": "function", "function": call}
                    message.setdefault("tool_calls", []).append(call)
                # The mark of a block without text is at the end of its message.
                mark = (len(messages) - 1, len(message["content"]) - 1 if block.texts else -1)
                is_in_run = j > 0 and block.type == blocks[j - 1].type and block.type in _RUNS
                position = places[-1].position + (not is_in_run) if places else 0
                is_empty = block.type == "text" and not block.text
                places.append(Place(f"{path}.{j}", mark, position, block.ttl, is_empty))
        last = max((i for i, place in enumerate(places) if not place.is_empty), default=None)
        if last is not None and self.ttl:
            if places[last].ttl not in ("", self.ttl):
                text = f"must equal the last block's cache_control.ttl, which is {places[last].ttl}"
                raise RequestError(f"cache_control.ttl: {text}")
            places[last] = places[last]._replace(ttl=self.ttl)
        return messages, places

    @cached_property
    def breakpoints(self) -> list[Place]:
        """The places that have a breakpoint.

        Raises:
            RequestError: the breakpoints break one of Anthropic's rules; the text is Anthropic's.
        """
        marked = [place for place in self.layout[1] if place.ttl]
        if len(marked) > MAX_BREAKPOINTS:
            text = "A maximum of 4 blocks with cache_control may be provided."
            raise RequestError(f"{text} Found {len(marked)}.")
        for i, place in enumerate(marked):
            if place.is_empty:
                text = "cache_control cannot be set for empty text blocks"
                raise RequestError(f"{place.path}: {text}")
            lasting = seconds_of(place.ttl) or 0.0
            briefer = [it.ttl for it in marked[:i] if (seconds_of(it.ttl) or 0.0) < lasting]
            if briefer:
                raise RequestError(
                    f"{place.path}.cache_control.ttl: a ttl='{place.ttl}' cache_control block must "
                    f"not come after a ttl='{briefer[0]}' cache_control block. Note that blocks "
                    "are processed in the following order: `tools`, `system`, `messages`."
                )
        return marked

    @property
    def ignored(self) -> list[str]:
        """How an answer names the values of the request that this server does not know."""
        told = ignored_in("system", self.system)
        for i, turn in enumerate(self.messages):
            told += turn.ignored(f"messages[{i}]")
        told += unknown("thinking.type", self.thinking.type if self.thinking else None, _THINKING)
        effort = self.output_config.effort if self.output_config else None
        return told + unknown("output_config.effort", effort, EFFORTS)

    def check(self, rules: Rules) -> None:
        """Refuse tools, breakpoints and images that break a rule or that are not supported."""
        if len({tool["function"]["name"] for tool in self.functions}) < len(self.functions):
            raise RequestError("tools: Tool names must be unique.")
        for i, tool in enumerate(self.tools if rules.is_strict else ()):
            if isinstance(tool, CustomTool) and not re.fullmatch(TOOL_NAME, tool.name):
                text = f"String should match pattern '^{TOOL_NAME}$'"
                raise RequestError(f"tools.{i}.custom.name: {text}")
        for i, turn in enumerate(self.messages):
            for j, block in enumerate(turn.content):
                if block.has_picture:
                    rules.check_image(f"messages.{i}.content.{j}")
        if at := self.lifetime(""):
            rules.allowed.claim(at)  # raises for what no policy covers
        for place in self.breakpoints:
            rules.allowed.claim(place.lifetime)

    def encode(
        self, tokenization: Tokenization, marks: Sequence[Mark] = (), *, is_bounded: bool = True
    ) -> Encoded:
        """Return the prompt's token ids, and the number of tokens up to each mark."""
        effort = nearest(self.output_config.effort if self.output_config else None, EFFORTS)
        thinks = self.thinking.is_wanted if self.thinking else None
        arguments = {"tools": self.functions or None, **thinking_arguments(effort, thinks)}
        return tokenization.encode_chat(
            self.layout[0],
            arguments,
            marks,
            client_arguments=self.chat_template_kwargs,
            is_bounded=is_bounded,
            continues_last=bool(self.prefill),
        )

    @property
    def prefill(self) -> str:
        """The text at the end that the answer continues; empty if it begins a turn of its own."""
        last = self.messages[-1].content[-1:]
        is_text = self.messages[-1].role == "assistant" and last[0].is_text
        return last[0].text if is_text and last[0].text.strip() else ""

    @cached_property
    def functions(self) -> list[Json]:
        """The tools in the form that chat templates know."""
        return [tool.for_template() for tool in self.tools]

    @property
    def structure(self) -> Structure:
        """What the answer must be.

        Raises:
            RequestError: a tool is chosen that is not there, or the wanted form of the answer
                cannot be enforced.
        """
        text = None
        field, wanted = "output_format", self.output_format
        if self.output_config is not None and self.output_config.format is not None:
            if wanted is not None:
                raise RequestError("output_format: not allowed beside output_config.format")
            field, wanted = "output_config.format", self.output_config.format
        if wanted is not None and wanted.type == "json_schema":
            text = json_format(enforceable(wanted.of, f"{field}.schema"))
        strict = {tool.name for tool in self.tools if isinstance(tool, CustomTool) and tool.strict}
        tools = [
            {**each, "function": {**each["function"], "strict": each["function"]["name"] in strict}}
            for each in self.functions
        ]
        chosen = self.tool_choice or ToolChoice(type="auto")
        named = [each for each in tools if each["function"]["name"] == chosen.name]
        if chosen.type in ("any", "tool") and not (named if chosen.type == "tool" else tools):
            what = f"Tool '{chosen.name}' not found in provided tools"
            raise RequestError(f"tool_choice: {what if chosen.name else 'there are no tools'}")
        return Structure(
            text=text,
            tools=named if chosen.type == "tool" else tools,
            choice=_CHOICES[chosen.type],
            is_parallel=not chosen.disable_parallel_tool_use and chosen.type != "tool",
        )


_CHOICES: dict[str, Literal["auto", "required", "none"]] = {
    "auto": "auto",
    "any": "required",
    "tool": "required",
    "none": "none",
}


class CountTokensRequest(Conversation, PlainRequest):
    """The body of `POST /v1/messages/count_tokens`."""

    without_effect = COUNT_TOKENS.without_effect
    known_besides = without_effect
    refused = COUNT_TOKENS.refused

    def tell(self, tokenization: Tokenization, info: EngineInfo) -> Json:
        """Return the length of the prompt in tokens."""
        return {"input_tokens": len(self.encode(tokenization, is_bounded=False).token_ids)}


class DiagnosticsOptions(Known):
    """The earlier message to compare the request with."""

    previous_message_id: str | None = None


class MessagesRequest(Conversation):
    """The body of `POST /v1/messages`; `max_tokens` of 0 only fills the cache with the prompt."""

    max_tokens: int = Field(ge=0)
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=2**31 - 1)
    stop_sequences: list[Text] = Field([], max_length=MAX_STOP_STRINGS)
    stream: bool = False
    diagnostics: DiagnosticsOptions | None = None

    def check(self, rules: Rules) -> None:
        """Refuse fields that contradict each other or that this server does not support."""
        super().check(rules)
        thinks = self.thinking is not None and self.thinking.type == "enabled"
        for what, is_there in (("stream", self.stream), ("thinking", thinks)):
            if is_there and self.max_tokens == 0:
                raise RequestError(f"max_tokens: 0 is not allowed with {what}")
        if self.messages[-1].role == "assistant" and not self.prefill:
            text = "a final assistant turn must end with a text, which the answer continues"
            raise RequestError(f"messages: {text}")
        if rules.is_strict and self.prefill[-1:].isspace():
            text = "final assistant content cannot end with trailing whitespace"
            raise RequestError(f"messages: {text}")

    def ask(self, tokenization: Tokenization, rules: Rules) -> Asked:
        """Render the conversation and find its breakpoints."""
        structure = self.structure
        marked, lookback = self.breakpoints, rules.settings.cache_lookback
        read = [
            place
            for place in self.layout[1]
            if any(0 <= it.position - place.position < lookback for it in marked)
        ]
        # If there are too many marks to look for, only the last ones are looked for.
        encoded = self.encode(tokenization, [place.mark for place in (*read, *marked)])
        caching: Json = {"anchors": encoded.anchors}
        if marked or rules.settings.anthropic_implicit == "off":
            ends = encoded.ends[len(read) :]
            caching["claims"] = [
                rules.allowed.claim(it.lifetime, end_token=end)
                for it, end in zip(marked, ends, strict=True)
            ]
            caching["cacheable_tokens"] = max([0, *ends])
            if lookback:
                read_ends = encoded.ends[: len(read)]
                if marked and len(read) > self.layout[1].index(marked[-1]):
                    read_ends.append(0)  # Every place is near enough.
                caching["read_ends"] = sorted(read_ends)
        how = self.model_dump(include={"temperature", "top_p", "top_k"}, exclude_unset=True)
        how["max_tokens"] = min(self.max_tokens, WHOLE)
        params = SamplingParams(stop=tuple(self.stop_sequences), **how)
        tools = () if structure.choice == "none" else self.functions
        reading = tokenization.reading(encoded, tools)
        caching["grammar"] = structure.grammar(reading)
        return Asked(
            prompts=[encoded.token_ids],
            plan=EngineRequest(params=params, **caching),
            shape=MessageShape(self.model, self.max_tokens, self._left_out),
            stream=self.stream,
            parts=encoded.parts,
            template=encoded.template,
            compared_id=self.diagnostics.previous_message_id if self.diagnostics else None,
            reading=reading,
            continues_text=bool(self.prefill),
        )
