"""OpenAI's Responses API.

Input items are converted to chat messages, so that both endpoints render the same tokens. A request
may continue a stored response: then the items of that conversation come before its own. It may also
name single items of stored responses by their ids.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Literal, Self

import msgspec
from pydantic import BeforeValidator, Field, PrivateAttr

from tieredkv.cache_fields import CONTROL, CacheOptions, Controlled, Lifetime
from tieredkv.engine.engine_messages import EngineInfo
from tieredkv.errors import MAX_TOLD_CHARACTERS, RequestError
from tieredkv.fields import Object, names_of, out_of_bounds, parse_body, read
from tieredkv.retention import ALIASES
from tieredkv.server import openai_api as openai
from tieredkv.server.asked import Asked, Json, PlainRequest, Rules, Text, tell_left_out
from tieredkv.server.chat import Tokenization
from tieredkv.server.chat_template import EFFORTS
from tieredkv.server.ignored import unknown
from tieredkv.server.known_fields import RESPONSES
from tieredkv.server.openai_messages import ContentPart, Message, NotePart, ToolCall, whole_turns
from tieredkv.server.response_answers import ResponseShape
from tieredkv.server.response_items import (
    MAX_ITEMS,
    AdditionalTools,
    ClientCall,
    ClientOutput,
    Conversation,
    CustomCall,
    FunctionCall,
    FunctionOutput,
    HostedItem,
    Input,
    InputMessage,
    Item,
    Reference,
    SearchCall,
    SearchOutput,
    Thoughts,
    ignored_items,
)
from tieredkv.server.response_tools import (
    HOSTED_CHOICES,
    FunctionTool,
    NamespaceTool,
    Offered,
    TextTool,
    Tool,
    for_template,
    left_out,
    offered,
    read_tool,
)
from tieredkv.server.stored_responses import Turn
from tieredkv.server.structure import Format
from tieredkv.server.structure_fields import TEXT_FORMAT, TextFormat, only_one


class TextOptions(Object):
    """The form of the answer's text."""

    format: Annotated[Json, TEXT_FORMAT] = Field(default={"type": "text"})
    verbosity: Text | None = None


class Reasoning(Object):
    """How much the model should think."""

    known_besides = names_of("context mode")

    effort: Text | None = None
    summary: str | None = None
    generate_summary: str | None = None


class Options(CacheOptions):
    """Cache options, including those that only this endpoint has."""

    prewarm: bool = False
    comparison_response_id: str | None = None


class ResponsesRequest(openai.ConversationRequest):
    """The body of `POST /v1/responses`."""

    without_effect = RESPONSES.without_effect
    known_besides = openai.SAMPLING_FIELDS | without_effect
    refused = RESPONSES.refused
    prompt_field = "input"

    input: Input
    previous_response_id: Text | None = None
    store: bool = True
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    text: TextOptions = TextOptions()
    tools: list[Annotated[Tool, BeforeValidator(read_tool)]] = Field([], max_length=1024)
    prompt_cache_options: Options | None = None

    reasoning: Reasoning | None = None

    # These are checked and have no effect.
    truncation: Text = "disabled"
    include: list[str] = Field([])
    max_tool_calls: int | None = None

    _before: Turn | None = PrivateAttr(None)
    _earlier: Sequence[Item] = PrivateAttr(())

    @property
    def references(self) -> list[str]:
        """The ids of the stored items that `input` refers to, as often as it does."""
        return [item.id for item in self.input if isinstance(item, Reference)]

    def resolved(self, items: Mapping[str, bytes], max_values: int) -> Self:
        """Return the request with the stored items in place of the references to them.

        Args:
            items: the stored items as JSON, by their ids.
            max_values: how many JSON values they may hold.

        Raises:
            RequestError: they hold more.
        """
        what = "The array of items that 'input' refers to"
        parsed = parse_body(b'{"input":[%b]}' % b",".join(items.values()), max_values, what=what)
        found = dict(zip(items, read(Conversation, parsed).input, strict=True))
        given = [found[it.id] if isinstance(it, Reference) else it for it in self.input]
        return self.model_copy(update={"input": given})

    def continuing(self, before: Turn, max_values: int) -> Self:
        """Return the request with the conversation that it continues.

        Args:
            before: the last turn of the conversation.
            max_values: how many JSON values the conversation may hold.

        Raises:
            RequestError: the conversation has become too long.
        """
        what = "The conversation that 'previous_response_id' continues"
        parsed = parse_body(b'{"input":%b}' % before.conversation(), max_values, what=what)
        earlier = read(Conversation, parsed).input
        if len(earlier) + len(self.input) > MAX_ITEMS:
            raise out_of_bounds("input", "max_length", MAX_ITEMS, [*earlier, *self.input])
        request = self.model_copy()
        request._before, request._earlier = before, earlier
        return request

    def turn(self) -> Turn:
        """Return the conversation with the items of this request."""
        # Fields of unknown parts may have other types than those of parts that are known.
        how: Json = {"mode": "json", "exclude_unset": True, "warnings": False}
        items = [item.model_dump(**how) for item in self.input]
        return Turn(joined(items), self._before)

    @property
    def limit(self) -> int | None:
        """The longest answer that the client asks for, in tokens; None if it names no limit."""
        return 0 if self.is_prewarm else self.max_output_tokens

    @property
    def settings(self) -> Json:
        """The fields other than the prompt whose change can explain a cache miss."""
        told = {"reasoning_effort": self.reasoning and self.reasoning.effort}
        return {**super().settings, **told, "verbosity": self.text.verbosity}

    @property
    def is_prewarm(self) -> bool:
        """Whether the request only fills the cache and wants no answer."""
        return self.prompt_cache_options is not None and self.prompt_cache_options.prewarm

    @cached_property
    def turns(self) -> Sequence[tuple[str, Message]]:
        """All messages; thoughts become part of the message after them."""
        turns: list[tuple[str, Message]] = []
        thoughts = ""
        if self.instructions:
            part = ContentPart(type="text", text=self.instructions)
            turns.append(("instructions", Message(role="system", content=[part], tool_calls=[])))
        for i, item in enumerate(self.items, -len(self._earlier)):
            path = f"input[{i}]" if i >= 0 else "previous_response_id"
            match item:
                case FunctionCall() | CustomCall() | ClientCall() | SearchCall():
                    call = ToolCall(id=item.call_id, function=item.function)
                    calling = Message.model_construct(
                        role="assistant", tool_calls=[call], cache_control=item.cache_control
                    )
                    turns.append((path, _with(calling, thoughts)))
                case FunctionOutput(call_id=id, output=parts):
                    turns.append((f"{path}.output", _result(item, id, parts)))
                case ClientOutput():
                    turns.append((path, _result(item, item.call_id or item.id, item.parts)))
                case SearchOutput(call_id=id, parts=parts):
                    turns.append((path, _result(item, id, parts)))
                case InputMessage():
                    turns.append((f"{path}.content", _with(item, thoughts)))
                case HostedItem():
                    part = NotePart(type="text", text=str(item))
                    message = Message(role="assistant", content=[part], tool_calls=[])
                    message = message.model_copy(update={"cache_control": item.cache_control})
                    turns.append((path, _with(message, thoughts)))
            thoughts = str(item) if isinstance(item, Thoughts) else ""
        return whole_turns(turns)

    @property
    def tool_names(self) -> Sequence[str]:
        """The names of the tools that may be called, as the client knows them."""
        return [tool.name for tool in (*self.offered.values(), *self.found.values())]

    @cached_property
    def text_format(self) -> Format | None:
        """The format of the answer's text; None for any text.

        Raises:
            RequestError: it cannot be enforced, or there are several.
        """
        wanted = TextFormat.model_validate(self.text.format)
        return only_one([wanted.format_at("text.format", wanted.type), super().text_format])

    @property
    def items(self) -> Sequence[Item]:
        """The items of the conversation, those of earlier responses first."""
        return [*self._earlier, *self.input]

    @cached_property
    def left_out_tools(self) -> Sequence[str]:
        """The types of the tools that the model is not told of."""
        return left_out(self.all_tools)

    @property
    def left_out_kinds(self) -> Collection[str]:
        """The types of tools that the model is not told of, and of the choices that name them."""
        return {*self.left_out_tools, *HOSTED_CHOICES} if self.left_out_tools else ()

    @property
    def marked_tools(self) -> Iterable[tuple[int, Lifetime]]:
        """The breakpoints of tools, each with the index of its tool for the chat template."""
        index = -1  # a tool that is left out has its breakpoint at the end of the one before it
        for place, tool in _each(self.all_tools, "tools", len(self.tools)):
            index += not (isinstance(tool, NamespaceTool) or left_out([tool]))
            if index >= 0 and (at := tool.lifetime(place)):
                yield index, at

    @cached_property
    def offered(self) -> dict[str, Offered]:
        """The tools that the model is told of before the conversation, by their names for it.

        Raises:
            RequestError: two of them have one name.
        """
        return offered(self.all_tools)

    @cached_property
    def found(self) -> dict[str, Offered]:
        """The other tools that searches have found, by the names that the model knows them by."""
        searches = (it for it in self.items if isinstance(it, SearchOutput))
        found = {name: tool for it in searches for name, tool in it.offered.items()}
        return {name: tool for name, tool in found.items() if name not in self.offered}

    @cached_property
    def all_tools(self) -> Sequence[Tool]:
        """The tools of the request, and those that its items bring."""
        items = (it for it in self.items if isinstance(it, AdditionalTools))
        return [*self.tools, *itertools.chain.from_iterable(it.tools for it in items)]

    @property
    def ignored(self) -> list[str]:
        """How an answer names the values of the request that this server does not know."""
        effort = self.reasoning.effort if self.reasoning else None
        return [
            *ignored_items(self.input),
            *unknown("reasoning.effort", effort, EFFORTS),
            *unknown("text.verbosity", self.text.verbosity, openai.VERBOSITIES),
            *unknown("truncation", self.truncation, ("auto", "disabled")),
            *super().ignored,
        ]

    def check(self, rules: Rules) -> None:
        """Refuse fields that contradict each other or that this server does not support."""
        if rules.is_strict and (kinds := self.left_out_tools):
            what = f"'{kinds[0]}' tools are not supported. Only tools that the client runs are."
            raise RequestError(what, param="tools", code="unsupported_parameter")
        _ = self.offered  # refuses two tools of one name
        for i, tool in enumerate(self.tools):
            if isinstance(tool, FunctionTool | NamespaceTool | TextTool):
                rules.check_name(tool.name, f"tools[{i}].name")
        super().check(rules)

    @property
    def arguments(self) -> Json:
        """The arguments of the chat template, without those that the client names."""
        effort = self.reasoning.effort if self.reasoning else None
        return {"tools": for_template(self.offered) or None, **openai.thinking_of(effort)}

    def ask(self, tokenization: Tokenization, rules: Rules) -> Asked:
        """Render the conversation."""
        tell_left_out(self.left_out_tools)
        options = self.prompt_cache_options
        compared_id = options.comparison_response_id if options else None
        is_stored = self.store and rules.settings.stored_responses_size > 0
        known = {**self.offered, **self.found}
        return self.render(
            tokenization,
            rules,
            self.arguments,
            found_tools=for_template(self.found),
            compared_id=compared_id,
            shape=self._shape(known, is_stored=is_stored),
            turn=self.turn() if is_stored else None,
        )

    @property
    def refused_stream(self) -> ResponseShape | None:
        """What writes the stream that refuses a prompt that is too long; None for an error."""
        return self._shape({}, is_stored=False) if self.stream else None

    def _shape(self, known: Mapping[str, Offered], *, is_stored: bool) -> ResponseShape:
        echo, left_out = {**self.echo(), "store": is_stored}, self.left_out_tools
        return ResponseShape(echo, known, is_prewarm=self.is_prewarm, left_out=left_out)

    def echo(self) -> Json:
        """Return the fields of the answer that repeat those of the request."""
        names = "max_output_tokens max_tool_calls metadata model parallel_tool_calls reasoning text"
        names += " instructions tools truncation temperature top_p prompt_cache_key user"
        names += " prompt_cache_options prompt_cache_retention safety_identifier"
        names += " previous_response_id"
        without = {"tools": {"__all__": {CONTROL}}}
        told = self.model_dump(mode="json", include=set(names.split()), exclude=without)
        kept = self.prompt_cache_retention
        told["prompt_cache_retention"] = kept and ALIASES.get(kept, kept)
        return {**told, "tool_choice": self.tool_choice or "auto"}


class InputTokensRequest(ResponsesRequest, PlainRequest):
    """The body of `POST /v1/responses/input_tokens`."""

    known_besides = ResponsesRequest.known_besides | {"personality"}

    model: Text = ""
    input: Input = Field([], validate_default=False)

    def tell(self, tokenization: Tokenization, info: EngineInfo) -> Json:
        """Return the length in tokens of the prompt of such a response.

        Raises:
            RequestError: there is nothing to count.
        """
        if not self.turns:
            what = "Missing required parameter: 'input'."
            raise RequestError(what, param="input", code="missing_required_parameter")
        messages = [message.for_template() for _, message in self.turns]
        how: Json = {"is_bounded": False, "field": self.prompt_field}
        how["client_arguments"] = self.chat_template_kwargs
        encoded = tokenization.encode_chat(messages, self.arguments, **how)
        return {"object": "response.input_tokens", "input_tokens": len(encoded.token_ids)}


def _each(tools: Sequence[Tool], path: str, num: int) -> Iterator[tuple[str, Tool]]:
    """Yield tools, and those of a namespace before it, with their paths in the body.

    Args:
        tools: of the request, then those that its items bring.
        path: of the list of tools.
        num: how many are the request's.
    """
    for i, tool in enumerate(tools):
        place = f"{path}[{i}]" if i < num else "input"
        if isinstance(tool, NamespaceTool):
            yield from _each(tool.tools, f"{place}.tools", len(tool.tools))
        yield place, tool


def joined(items: Sequence[Json]) -> bytes:
    """Return items as JSON, with commas between them."""
    return b",".join(map(msgspec.json.encode, items))


def _result(item: Controlled, call_id: str | None, parts: Sequence[ContentPart]) -> Message:
    """Return the message of an item that is what came of a call."""
    return Message.model_construct(
        role="tool", content=[*parts], tool_call_id=call_id, cache_control=item.cache_control
    )


def _with(message: Message, thoughts: str) -> Message:
    """Return a message with the thoughts before it."""
    return message.model_copy(update={"reasoning_content": thoughts}) if thoughts else message


class Page(Object):
    """The query of `GET /v1/responses/ID/input_items`."""

    known_besides = names_of("include include[]")

    limit: Annotated[int, Field(strict=False)] = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"
    after: str = ""

    def of(self, items: Sequence[Json]) -> Json:
        """Return the page of a list that begins behind the item `after`.

        Raises:
            RequestError: there is no such item.
        """
        ordered = [*items] if self.order == "asc" else [*items][::-1]
        ids = [item["id"] for item in ordered]
        if self.after and self.after not in ids:
            what = f"No item has the id '{self.after[:MAX_TOLD_CHARACTERS]}'."
            raise RequestError(what, param="after", code="invalid_value")
        start = ids.index(self.after) + 1 if self.after else 0
        some, end = ordered[start : start + self.limit], start + self.limit
        told = {"first_id": ids[start], "last_id": ids[start:end][-1]} if some else {}
        return {"object": "list", "data": some, **told, "has_more": end < len(ids)}
