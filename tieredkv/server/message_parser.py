"""Turn what a model writes into the parts of a message: text, thoughts and calls of tools.

Families of models write them in different ways, which `response_templates.toml` or a checkpoint's
own response template describes. transformers' `ResponseParser` finds thoughts and where calls open,
and `call_bodies` where they end. A call is given out once it is complete. What opens a call and is
followed by something else is text; what follows it is read as any text is, so that it may have
another call. A call in JSON that is complete, but names no tool, is text as a whole. This module
knows neither APIs nor tokens.
"""

import contextlib
import json
import logging
import re
import tomllib
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, Literal, NamedTuple

from transformers.utils.chat_parsing import ResponseParser

from tieredkv.errors import ConfigError
from tieredkv.server.call_bodies import Body, End, JsonBody, NoCallError, TagBody, as_json
from tieredkv.server.response_templates import family_of
from tieredkv.server.schemas import properties_of

logger = logging.getLogger(__name__)

MAX_BEGUN_CHARACTERS = 1024
"""How much is read of a message that an answer continues, beside the opening of its thoughts."""

OWN = "response_template"
"""The name of the family that a checkpoint's own response template describes."""

_NO_FIELDS: Any = {"start_anchor": "x", "fields": {"text": {"content": "text"}}}
"""A response template for a parser that only gives arguments their types."""

_SAMPLE_TOOLS: Any = [{"type": "function", "function": {"name": "look"}}]
_SAMPLE_ARGUMENTS = {
    "json": '{"at": "x"}',
    "gemma": '{at:<|"|>x<|"|>}',
    "qwen_xml": "<parameter=at>\nx\n</parameter>",
    "minimax_xml": '<parameter name="at">x</parameter>',
    "glm_xml": "\n<arg_key>at</arg_key>\n<arg_value>x</arg_value>",
}
"""The same arguments in each style."""

_LENIENT = json.JSONDecoder(strict=False)
"""Reads JSON whose strings may hold line feeds, which models forget to escape."""

SLICE_CHARACTERS = 4096
ParserEvent = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
Field = Literal["text", "thoughts", "calls"]


class Call(NamedTuple):
    """A call of a tool.

    Attributes:
        id: by which its result refers to it: the model's own, or a random one. Each API puts a word
            of its own before it.
        name: of the tool, as the model wrote it.
        arguments: a JSON object, as text.
    """

    id: str
    name: str
    arguments: str


class Delta(NamedTuple):
    """What was added to a message: a piece of its text, a piece of its thoughts, or a call."""

    text: str = ""
    thoughts: str = ""
    call: Call | None = None

    def continues(self, part: "Delta") -> bool:
        """Return whether it goes on with a part of a message, so that it begins no new one."""
        is_call = self.call is not None or part.call is not None
        return not is_call and bool(self.thoughts) == bool(part.thoughts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a family of models writes messages; see `response_templates.toml`."""

    name: str
    start: str
    resumes: Sequence[str] = ()
    detect: Sequence[str] = ()
    thoughts: Sequence[str] = ()
    call: str = ""
    call_end: Sequence[str] = ()
    next: str = ""
    body: Literal["calls", "arguments", "tags"] = "calls"
    quote: str = ""
    tag: str = ""
    is_bare: bool = False
    skip: str = ""
    ends: Sequence[str] = ()
    opens: str = ""
    writes: str = ""
    style: Literal["json", "gemma", "qwen_xml", "minimax_xml", "glm_xml"] = "json"
    around: Sequence[str] = ("", "")
    between: str | None = None
    thinks: Sequence[str] = ()
    call_ids: str = ""
    answers: str = ""

    def names(self, special: str) -> bool:
        """Return whether a special token takes a part in how messages are written."""
        patterns = [*self.thoughts, self.call, *self.call_end, self.skip, self.quote]
        return any(special in pattern.replace("\\", "") for pattern in patterns)

    def begun(self, prompt: str) -> str:
        """Return the end of a prompt, as far as it tells how the message that it begins is read.

        Long white space is shortened, because looking through it takes long.
        """
        starts = (self.start, *self.resumes)
        place = max((prompt.rfind(it) + len(it) for it in starts if it in prompt), default=None)
        if place is None:
            return ""
        begun = re.sub(r"(\s{16})\s+", r"\1", prompt[place:])
        at, opened = len(begun) - MAX_BEGUN_CHARACTERS, ""
        if at > 0 and self.thoughts:
            opening, closing = self.thoughts
            for found in re.finditer(f"(?P<opened>{opening})|{closing}", begun):
                if found.start() < at:
                    at, opened = max(at, found.end()), found["opened"] or ""
        return self.start + opened + begun[max(at, 0) :]

    def template(self, *, has_tools: bool) -> dict[str, Any]:
        """Return the response template, as transformers takes it; without tools it has no calls."""
        text: dict[str, Any] = {"content": "text"}
        if self.skip:
            text["close_pattern"] = self.skip
        fields: dict[Field, dict[str, Any]] = {"text": text}
        if self.thoughts:
            begin, end = self.thoughts
            fields["thoughts"] = {"open_pattern": begin, "close_pattern": end, "content": "text"}
        if self.call and has_tools:
            fields["calls"] = self._calls
        return {"start_anchor": self.start, "fields": fields}

    def around_of(self, opened: str) -> str:
        """Return what closes the tag that stands before calls; empty if there is none.

        Args:
            opened: what the model wrote to open a call.
        """
        found = re.match(r"\s*<([\w:-]{1,64})>", opened)
        closing = f"</{found[1]}>" if found else ""
        return closing if closing in self.skip else ""

    @property
    def _calls(self) -> dict[str, Any]:
        name, id = (f"{{{it}}}" if f"(?P<{it}>" in self.call else "" for it in ("name", "id"))
        field: dict[str, Any] = {
            "open_pattern": rf"(?P<opened>\s{{0,16}}(?:{self.call}))",
            "repeats": True,
            "content": "text",
            "transform": {"opened": "{opened}", "name": name, "id": id},
        }
        return field  # without an end: `MessageParser` finds that by itself


@cache
def families() -> Mapping[str, Family]:
    """Return all families by name, in the order in which they are tried."""
    text = resources.files(__package__).joinpath("response_templates.toml").read_text("utf-8")
    return {name: Family(name=name, **table) for name, table in tomllib.loads(text).items()}


def detect(chat_template: str) -> Family | None:
    """Return the family that a chat template is written for; None if none is known."""
    for family in families().values():
        if all(text in chat_template for text in family.detect):
            return family
    return None


def choose(
    chat_template: str, response_template: Any = None, *, tool_parser: str, reasoning_parser: str
) -> Family | None:
    """Return how a model writes messages.

    Args:
        chat_template: of the model.
        response_template: the checkpoint's own description of what the model writes; None if it
            has none. It counts only where a name is `auto`.
        tool_parser: name of the family that tells how calls are written, `none`, or `auto`.
        reasoning_parser: the same for thoughts.

    Returns:
        None if neither calls nor thoughts are to be told from text.

    Raises:
        ConfigError: a name is not known.
    """
    found = _of_checkpoint(response_template, detect(chat_template))
    of_calls = _named("tool_parser", tool_parser, found)
    of_thoughts = _named("reasoning_parser", reasoning_parser, found)
    if of_calls is None:
        return of_thoughts and replace(of_thoughts, call="")
    thoughts, thinks = (of_thoughts.thoughts, of_thoughts.thinks) if of_thoughts else ((), ())
    return replace(of_calls, thoughts=thoughts, thinks=thinks)


def _of_checkpoint(response_template: Any, detected: Family | None) -> Family | None:
    """Return the family that a checkpoint's own response template describes.

    Returns:
        The detected family if it reads what the template describes in the same way, since more is
        known about it; or if there is no template, or one that a family cannot express, which the
        log says.
    """
    if response_template is None:
        return detected
    try:
        family = Family(name=OWN, **family_of(response_template))
        MessageParser(family, "", _SAMPLE_TOOLS)
    except ValueError as error:
        logger.warning("the checkpoint's response template is not used: %s", error)
        return detected
    samples = [*_samples(family if family.writes else detected)] if detected else []
    if detected and all(_read(family, text) == _read(detected, text) for text in samples):
        return detected
    return family


def _samples(family: Family) -> Iterator[str]:
    """Yield messages as a family writes them: with thoughts, text and calls, if it has them."""
    opens, closes = family.thinks or ("", "")
    thoughts = f"{opens}Hmm.{closes}" if opens else ""
    yield f"{thoughts}{family.answers}Let me see."
    if family.writes:
        arguments = _SAMPLE_ARGUMENTS[family.style]
        call = family.writes.replace("{name}", "look").replace("{arguments}", arguments)
        yield thoughts + family.around[0] + call + family.around[1]


def _read(family: Family, text: str) -> Any:
    parser = MessageParser(family, "", _SAMPLE_TOOLS)
    deltas = [*parser.feed(text), *parser.finish()]
    calls = [it.call[1:] for it in deltas if it.call]
    return "".join(it.thoughts for it in deltas), "".join(it.text for it in deltas), calls


def _named(field: str, name: str, found: Family | None) -> Family | None:
    if name in ("auto", "none"):
        return found if name == "auto" else None
    if name not in families():
        known = ", ".join(f"`{each}`" for each in ("auto", "none", *families()))
        raise ConfigError(f"{field} is `{name}`, but it must be one of {known}")
    return families()[name]


class _Opened(NamedTuple):
    """A call that has begun: what the model wrote for that, what this tells, and its body."""

    written: str
    name: str
    id: str
    body: Body


class MessageParser:
    """Takes one message apart as its text comes; not shared between threads.

    White space next to thoughts and calls is no part of the text; any other is.

    Args:
        family: how the model writes.
        prompt: what the message continues; only what follows the family's `start` matters.
        tools: that may be called, as the client gave them; without any, nothing is a call.
    """

    def __init__(self, family: Family, prompt: str, tools: Tools = ()) -> None:
        self._family, self._tools = family, tools
        self._template = family.template(has_tools=bool(tools))
        self._call: _Opened | None = None
        self._nests, self._can_close = True, True  # as `TagBody` has them
        self._blank = ""  # white space that counts only if something follows
        self._is_beside = False  # whether thoughts or a call stand just before
        self._num_old = 0  # characters of the prompt that are given out with the answer's
        self._start(family.begun(prompt).removeprefix(family.start))

    def _start(self, begun: str) -> None:
        """Take up what the prompt has of the message.

        Text and thoughts in the prompt are no part of the answer; a call that begins there is.
        """
        while True:
            self._parser = ResponseParser(self._template, begun)
            events = self._parser.initial_events
            if (at := _place_of_call(events)) is None:
                held = ResponseParser(self._template, begun).finalize()[1] if begun else []
                self._go_on(events, held)
                return
            self._go_on(events[:at], [])
            begun = self._open(events[at:])
            assert self._call is not None, "it has just begun"
            try:
                end = self._call.body.take(begun)
            except NoCallError:
                self._is_beside = False
            else:
                if end is None:
                    self._num_old = len(self._call.written) + len(begun)
                    return
                begun, self._is_beside = end.rest, True
            self._call = None

    def _go_on(self, events: Sequence[ParserEvent], held: Sequence[ParserEvent]) -> None:
        """Take note of what stands at the end of the prompt.

        Args:
            events: of the prompt.
            held: events that would follow if the message ended with the prompt.
        """
        written = ""  # of the text or the thoughts that have begun
        for event in events:
            if event["type"] == "region_chunk":
                written += event["text"]
            elif event["field"] == "thoughts":
                written, self._is_beside = "", True
        self._is_beside = self._is_beside and not written.strip()
        self._num_old = sum(len(event.get("text", "")) for event in held)

    def feed(self, text: str) -> list[Delta]:
        """Take more text and return what is certain now."""
        return [*self._take(text)]

    def finish(self) -> list[Delta]:
        """End the message and return the rest."""
        deltas = [*self._take("", is_end=True)]
        if self._blank and not self._is_beside:
            deltas.append(Delta(self._blank))
        return deltas

    def _take(self, text: str, *, is_end: bool = False) -> Iterator[Delta]:
        waiting = deque(_slices(text))
        while True:
            text = waiting.popleft() if waiting else ""
            is_last = is_end and not waiting
            if self._call is None:
                events = self._parser.feed(text)
                if is_last:
                    events += self._parser.finalize()[1]
                at = _place_of_call(events)
                yield from self._read(events[:at])
                if at is not None:
                    waiting.appendleft(self._open(events[at:]))
                elif is_last or not waiting:
                    return
                continue
            try:
                end = self._call.body.take(text, is_end=is_last)
            except NoCallError:
                waiting.extendleft(reversed([*_slices("".join(self._call.body.taken))]))
                yield from self._refuse(self._call)
            else:
                if end is None and not waiting:
                    return
                if end is not None:
                    waiting.extendleft(reversed([*_slices(end.rest)]))
                    yield from self._close(self._call, end)

    def _open(self, events: Sequence[ParserEvent]) -> str:
        """Begin with a call and return what follows its opening.

        Args:
            events: from the one that opens it on.
        """
        rest = "".join(event.get("text", "") for event in events)
        closed = events[-1] if "value" in events[-1] else self._parser.finalize()[1][-1]
        value, family = closed["value"], self._family
        body: Body
        if family.body == "tags":
            how = {"nests": self._nests, "can_close": self._can_close}
            around = family.around_of(value["opened"])
            body = TagBody(family.tag, family.call_end, family.call, around, **how)
        else:
            body = JsonBody(family.call_end, family.next, family.quote)
        self._call = _Opened(value["opened"], value["name"].strip(), value["id"], body)
        return rest

    def _refuse(self, call: _Opened) -> Iterator[Delta]:
        """Give out what has opened a call as text; what follows it is read again."""
        if isinstance(call.body, TagBody):
            self._nests = self._nests and call.body.nests
            self._can_close = self._can_close and not call.body.is_unclosed
        self._go_on_with_text()
        yield from self._as_text(call.written)

    def _close(self, call: _Opened, end: End) -> Iterator[Delta]:
        """Give out a call, or as text what is none."""
        if isinstance(call.body, TagBody):
            self._nests = self._nests and call.body.nests
        self._go_on_with_text()
        calls = _calls_in(self._family, call.name, end, self._typed)
        if not calls:
            yield from self._as_text(call.written + end.written)
            return
        self._begin()
        for name, arguments in calls:
            yield Delta(call=Call(call.id or uuid.uuid4().hex[:24], name, arguments))

    def _as_text(self, written: str) -> Iterator[Delta]:
        """Give out as text what is no call, without what is no part of a text."""
        new, skip = self._new(written), self._family.skip
        text = re.sub(skip, "", new) if skip else new
        yield from (Delta(each) for each in self._kept(text))

    def _go_on_with_text(self) -> None:
        # Something stands before, so that nothing is taken for the beginning of the message.
        self._call, self._parser = None, ResponseParser(self._template, "\0")

    def _read(self, events: Sequence[ParserEvent]) -> Iterator[Delta]:
        for event in events:
            match event["field"], event["type"]:
                case "thoughts", "region_open" | "region_close":
                    self._begin()
                case "thoughts", "region_chunk":
                    new = self._new(event["text"])
                    yield from (Delta(thoughts=text) for text in self._kept(new))
                case "text", "region_chunk":
                    new = self._new(event["text"])
                    yield from (Delta(text) for text in self._kept(new))

    def _begin(self) -> None:
        """Begin a part of the message, or go back to its text."""
        self._blank, self._is_beside, self._num_old = "", True, 0

    def _new(self, text: str) -> str:
        """Return what of a piece of text or thoughts does not stand in the prompt."""
        new = text[self._num_old :]
        self._num_old -= len(text) - len(new)
        return new

    def _kept(self, text: str) -> Iterator[str]:
        """Yield what of a piece of text or thoughts counts as far as is known."""
        whole = self._blank + text
        if self._is_beside:
            whole = whole.lstrip()
        kept = whole.rstrip()
        self._blank = whole[len(kept) :]
        if kept:
            self._is_beside = False
            yield kept

    def _typed(self, name: str, arguments: dict[str, str]) -> dict[str, Any]:
        """Return arguments that stand in tags with the types of the tool's schema.

        One that is no JSON of its type stays a text.
        """
        functions = [tool.get("function", tool) for tool in self._tools]
        schema = next((it.get("parameters") for it in functions if it.get("name") == name), None)
        known = properties_of(schema)
        types = {key: {"type": it.types} for key, it in known.items()}
        tool = {"function": {"name": name, "parameters": {"properties": types}}}
        coerce = ResponseParser(_NO_FIELDS, "", tools=[tool])._coerce_tool_calls
        typed = dict[str, Any](arguments)
        for key, text in arguments.items():
            call = {"function": {"name": name, "arguments": {key: text}}}
            with contextlib.suppress(ValueError, RecursionError):
                value = coerce(call)["function"]["arguments"][key]
                is_text = isinstance(value, str) and key in known
                value = known[key].trimmed(value) if is_text else value
                if is_text and not {"object", "array"}.isdisjoint(known[key].types):
                    value = _as_container(value)
                _dumped(value)
                typed[key] = value
        return typed


def _place_of_call(events: Sequence[ParserEvent]) -> int | None:
    """Return the index of the first event that opens a call."""
    opening = ("calls", "region_open")
    return next((i for i, it in enumerate(events) if (it["field"], it["type"]) == opening), None)


def _slices(text: str) -> Iterator[str]:
    """Yield a text in slices, so that a call in a long text does not copy all that follows it."""
    return (text[at : at + SLICE_CHARACTERS] for at in range(0, len(text), SLICE_CHARACTERS))


def _as_container(text: str) -> Any:
    """Return the JSON object or array that a text is; the text if it is none."""
    with contextlib.suppress(ValueError, RecursionError):
        value = _LENIENT.decode(text)
        return value if isinstance(value, dict | list) else text
    return text


def _calls_in(
    family: Family, name: str, end: End, typed: Callable[[str, dict[str, str]], Any]
) -> list[tuple[str, str]]:
    """Return the names and arguments of the calls between one pair of delimiters.

    Args:
        family: how the model writes.
        name: of the tool, if it stands outside.
        end: what stands between.
        typed: gives the arguments of a tool their types, if they stand in tags.

    Returns:
        Nothing if they are malformed.
    """
    if end.arguments is not None:
        return [(name, _dumped(typed(name, end.arguments)))] if name else []
    try:
        body = as_json(end.body, family.quote) if family.quote else end.body
        values = [*_json_values(body)]
        if name:
            [arguments] = values or [{}]
            return [(name, _arguments_of(arguments))]
        return [_call_of(value, is_bare=family.is_bare) for value in values]
    except (ValueError, RecursionError):
        return []


def _json_values(text: str) -> Iterator[Any]:
    """Yield the JSON values of a text, of which several are joined or stand in a list.

    Raises:
        ValueError: there is something else.
    """
    at = 0
    while (at := _past_separators(text, at)) < len(text):
        value, at = _LENIENT.raw_decode(text, at)
        yield from value if isinstance(value, list) else [value]


def _past_separators(text: str, at: int) -> int:
    while at < len(text) and (text[at].isspace() or text[at] in ",;"):
        at += 1
    return at


def _call_of(value: Any, *, is_bare: bool) -> tuple[str, str]:
    if isinstance(value, dict) and value.get("type") == "function":
        value = value.get("function", value)
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name:
        raise ValueError("a call is an object with a name")
    given = [value[key] for key in ("arguments", "parameters") if key in value]
    if is_bare and not given:
        raise ValueError("it may be an answer")
    return _encodable(name), _arguments_of(given[0] if given else {})


def _arguments_of(value: Any) -> str:
    if value is None or value == "":
        value = {}  # of a tool that takes none
    if isinstance(value, str):
        value = _LENIENT.decode(value)  # some models write them as text
    if not isinstance(value, dict):
        raise ValueError("arguments are an object")
    return _dumped(value)


def _dumped(value: Any) -> str:
    """Return a value as JSON.

    Raises:
        ValueError: it has what JSON cannot hold, such as NaN.
        RecursionError: it is nested too deeply.
    """
    return _encodable(json.dumps(value, ensure_ascii=False, allow_nan=False))


def _encodable(text: str) -> str:
    """Return a text with a replacement character for each lone surrogate, which has no bytes."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)
