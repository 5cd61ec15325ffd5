"""Turn what a model writes into the parts of a message: text, thoughts and calls of tools.

Families of models write them in different ways, which `response_templates.toml` or a checkpoint's
own response template describes; the texts are taken apart by transformers' `ResponseParser`. A call
is given out once it is complete. One that is malformed is text, with all that the model wrote
around it. This module knows neither APIs nor tokens.
"""

import contextlib
import json
import logging
import re
import tomllib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib import resources
from typing import Any, Literal, NamedTuple

from transformers.utils.chat_parsing import ResponseParser

from tieredkv.errors import ConfigError
from tieredkv.server.response_templates import VALUE, family_of
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
    "qwen_xml": "<parameter=at>\nx\n</parameter>",
    "minimax_xml": '<parameter name="at">x</parameter>',
    "glm_xml": "\n<arg_key>at</arg_key>\n<arg_value>x</arg_value>",
}
"""The same arguments in each style."""

Event = Mapping[str, Any]
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
    tag: str = ""
    is_bare: bool = False
    skip: str = ""
    opens: str = ""
    writes: str = ""
    style: Literal["json", "qwen_xml", "minimax_xml", "glm_xml"] = "json"
    around: Sequence[str] = ("", "")
    between: str | None = None
    thinks: Sequence[str] = ()
    call_ids: str = ""
    answers: str = ""

    def names(self, special: str) -> bool:
        """Return whether a special token takes a part in how messages are written."""
        patterns = [*self.thoughts, self.call, *self.call_end, self.skip]
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

    @property
    def _calls(self) -> dict[str, Any]:
        name, id = (f"{{{it}}}" if f"(?P<{it}>" in self.call else "" for it in ("name", "id"))
        field: dict[str, Any] = {
            "open_pattern": rf"(?P<opened>\s{{0,16}}(?:{self.call}))",
            "repeats": True,
            "content": "text",
            "transform": {"opened": "{opened}", "name": name, "id": id},
        }
        if self.call_end:
            field["close"] = list(self.call_end)
        elif self.next:
            field["close_pattern"] = f"(?={self.next})"
        return field


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


@lru_cache(16)
def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    """Return what matches any of several texts, the first that fits."""
    return re.compile("|".join(map(re.escape, texts)))


class _Held:
    """A call in JSON so far, if marks of its end stand in its texts.

    Args:
        ends: the marks.

    Attributes:
        parts: of the call, each with the mark behind it.
        mark: with which what is read now ends.
        refused: what was held for a call that is none, and is to be read again.
        is_off: whether nothing is held.
    """

    def __init__(self, ends: Sequence[str]) -> None:
        self.parts: list[str] = []
        self.refused = ""
        self.is_off, self._is_in_text = False, False
        self._ends, self._tail, self.mark = _any_of(ends), "", ""
        self._lasts = {end[-1] for end in ends}
        self._num_kept = max(map(len, ends))

    def cut(self, text: str) -> list[tuple[str, str]]:
        """Return the pieces of a text, and with which mark each ends; the last one has none."""
        whole, at, pieces = self._tail + text, len(self._tail), list[tuple[str, str]]()
        self._tail = whole[-self._num_kept :]
        for found in self._ends.finditer(whole):
            if found.end() > at:
                pieces.append((whole[at : found.end()], found[0]))
                at = found.end()
        return [*pieces, (whole[at:], "")]

    def passes(self, text: str) -> bool:
        """Return whether no mark can end in a text, so that it need not be cut."""
        if not self._lasts.isdisjoint(text):
            return False
        self._tail = (self._tail + text)[-self._num_kept :]
        return True

    def takes(self, body: str, mark: str) -> bool:
        """Take a part of a call and the mark behind it, if the mark stands in a text of the JSON.

        Args:
            body: of the call, since the part before it.
            mark: empty at the end of the message.
        """
        num_quotes = re.sub(r"\\.", "", body, flags=re.DOTALL).count('"')
        self._is_in_text ^= bool(num_quotes % 2)
        if self.is_off or not mark or not self._is_in_text:
            return False
        self.parts.append(body + mark)
        return True

    def end(self, refused: str) -> None:
        """Forget the call; `refused` is to be read again."""
        self.parts, self.refused, self._is_in_text = [], refused, False


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
        self._template = template = family.template(has_tools=bool(tools))
        begun = family.begun(prompt).removeprefix(family.start)
        self._parser = ResponseParser(template, begun)
        self._body: list[str] = []
        is_held = bool(family.call_end) and family.body != "tags"
        self._held = _Held(tuple(family.call_end)) if is_held else None
        self._blank = ""  # white space that counts only if something follows
        self._before = ""  # white space before a call that counts only if the call is malformed
        self._is_beside = False  # whether thoughts or a call stand just before
        self._num_old = 0  # characters of the prompt that the parser gives out with the answer's
        if begun:
            _, held = ResponseParser(template, begun).finalize()
            self._go_on(self._parser.initial_events, held)

    def _go_on(self, events: Sequence[Event], held: Sequence[Event]) -> None:
        """Take up what the prompt has of the message.

        Text and thoughts in the prompt are no part of the answer; a call that begins there is.

        Args:
            events: of the prompt.
            held: events that would follow if the message ended with the prompt.
        """
        written = ""  # of the text or the thoughts that have begun
        for event in events:
            match event["field"], event["type"]:
                case (("text" | "thoughts"), "region_chunk"):
                    written += event["text"]
                case "calls", "region_chunk":
                    self._body.append(event["text"])
                case (("thoughts" | "calls"), _):
                    written, self._body, self._is_beside = "", [], True
        self._is_beside = self._is_beside and not written.strip()
        self._num_old = sum(len(event.get("text", "")) for event in held)

    def feed(self, text: str) -> list[Delta]:
        """Take more text and return what is certain now."""
        if self._held is None or self._held.passes(text):
            return [*self._read(self._parser.feed(text))]
        deltas = list[Delta]()
        for piece, mark in self._held.cut(text):  # so that no event lies behind the end of a call
            self._held.mark = mark
            deltas += self._read(self._parser.feed(piece))
            if self._held.refused:
                deltas += self._refused(self._held)
        return deltas

    def finish(self) -> list[Delta]:
        """End the message and return the rest."""
        _, events = self._parser.finalize()
        deltas = [*self._read(events, is_end=True)]
        if self._held and self._held.refused:
            return deltas + self._refused(self._held) + self.finish()
        if self._blank and not self._is_beside:
            deltas.append(Delta(self._blank))
        return deltas

    def _read(self, events: Sequence[Event], *, is_end: bool = False) -> Iterator[Delta]:
        for event in events:
            match event["field"], event["type"]:
                case ("calls", "region_open") | ("thoughts", "region_open" | "region_close"):
                    self._begin()
                case "calls", "region_close":
                    yield from self._close_call(event["value"], is_end)
                case "calls", "region_chunk":
                    self._body.append(event["text"])
                case "thoughts", "region_chunk":
                    new = self._new(event["text"])
                    yield from (Delta(thoughts=text) for text in self._kept(new))
                case "text", "region_chunk":
                    new = self._new(event["text"])
                    yield from (Delta(text) for text in self._kept(new))

    def _begin(self) -> None:
        """Begin a part of the message, or go back to its text."""
        self._body, self._before, self._blank = [], self._blank, ""
        self._is_beside, self._num_old = True, 0

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

    def _close_call(self, value: Mapping[str, Any], is_end: bool) -> Iterator[Delta]:
        body, name, before = "".join(self._body), value["name"].strip(), self._before
        held = self._held
        mark = held.mark if held is not None and not is_end else ""
        if held is not None and held.takes(body, mark):
            self._parser, self._blank = ResponseParser(self._template, value["opened"]), before
            return
        closed = mark or (self._family.call_end[0] if self._family.call_end and not is_end else "")
        parts = [*held.parts, body] if held is not None else [body]
        first, rest = parts[0], "".join(parts[1:])
        calls = _calls_in(self._family, name, first + rest, self._typed)
        self._begin()
        if held is not None:
            held.end(refused=rest + closed if len(parts) > 1 and not calls else "")
        if calls:
            for name, arguments in calls:
                id = value["id"] or uuid.uuid4().hex[:24]
                yield Delta(call=Call(id, name, arguments))
            return
        self._is_beside = False
        text = before + value["opened"] + first + (closed if len(parts) == 1 else "")
        yield from (Delta(each) for each in self._kept(text))

    def _refused(self, held: _Held) -> list[Delta]:
        """Read again what was held for a call that is none, behind the first mark of its end."""
        text, held.refused, held.is_off = held.refused, "", True
        self._parser = ResponseParser(self._template, "")
        deltas = self.feed(text)
        held.is_off = False
        return deltas

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
                _dumped(value)
                typed[key] = value
        return typed


def _calls_in(
    family: Family, name: str, body: str, typed: Callable[[str, dict[str, str]], Any]
) -> list[tuple[str, str]]:
    """Return the names and arguments of the calls between one pair of delimiters.

    Args:
        family: how the model writes.
        name: of the tool, if it stands outside.
        body: what stands between.
        typed: gives the arguments of a tool their types, if they stand in tags.

    Returns:
        Nothing if they are malformed.
    """
    if family.body == "tags":
        arguments = _tags_in(family.tag, body)
        return [(name, _dumped(typed(name, arguments)))] if name and arguments is not None else []
    try:
        values = [*_json_values(body)]
        if name:
            [arguments] = values or [{}]
            return [(name, _arguments_of(arguments))]
        return [_call_of(value, is_bare=family.is_bare) for value in values]
    except (ValueError, RecursionError):
        return []


def _tags_in(tag: str, body: str) -> dict[str, str] | None:
    """Return the keys and values of the tags in a text; None if there is anything else.

    Their closing tag, such as `</function>`, may follow them. This takes linear time: where nothing
    closes a value, nothing closes a later one either.
    """
    opening, closing = _tag_patterns(tag)
    arguments, rest, at = dict[str, str](), "", 0
    while (opened := opening.search(body, at)) is not None:
        closed = closing.search(body, opened.end())
        if closed is None:
            return None
        arguments[opened["key"]] = body[opened.end() : closed.start()]
        rest += body[at : opened.start()]
        at = closed.end()
    rest = (rest + body[at:]).strip()
    return arguments if not rest or re.fullmatch(r"</[\w-]{1,32}>", rest) else None


@lru_cache(64)
def _tag_patterns(tag: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return what opens the value of a tag and what closes it."""
    opening, closing = tag.split(VALUE)
    return re.compile(opening, re.DOTALL), re.compile(closing, re.DOTALL)


def _json_values(text: str) -> Iterator[Any]:
    """Yield the JSON values of a text, of which several are joined or stand in a list.

    Raises:
        ValueError: there is something else.
    """
    decoder, at = json.JSONDecoder(), 0
    while (at := _past_separators(text, at)) < len(text):
        value, at = decoder.raw_decode(text, at)
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
        value = json.loads(value)  # some models write them as text
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
