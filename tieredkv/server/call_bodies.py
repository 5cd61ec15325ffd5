"""Follow the body of a call of a tool as a model writes it, up to what ends the call.

A body is JSON, or arguments between tags. Its end mark may also stand in a text of the JSON or in
the value of a tag, and what opens a call may stand in prose. So a body is followed from its first
character on: what cannot go on as a body is none, which is known at once, and what ends a call is
looked for only where it can end. This module knows neither families of models nor messages.
"""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import regex  # type: ignore[import-untyped]

VALUE = "(?P<value>.*?)"
"""Stands for the value in the pattern of a tag."""

_IN_STRING = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)
_IN_SCALAR = re.compile(r"[\w.+-]*")
_SCALAR = re.compile(r"true|false|null|None|NaN|-?Infinity|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_BARE_KEY = re.compile(r'[^{}\[\],:"<]*')
_BARE = re.compile(r'"(?:[^"\\]|\\.)*"|(?<=[{,])([^{}\[\],:"<]+):|\bNone\b', re.DOTALL)
"""A text of JSON, a bare key, or what templates in Jinja write for `null`."""

_SCALAR_STARTS = "-0123456789tfnNI"


class NoCallError(Exception):
    """What was taken for the body of a call is none."""


class End(NamedTuple):
    """The end of a body.

    Attributes:
        written: the body and the mark behind it, as the model wrote them.
        body: without the mark.
        rest: what follows.
        arguments: the texts of the arguments, if they stand in tags.
    """

    written: str
    body: str
    rest: str
    arguments: dict[str, str] | None = None


class Body(Protocol):
    """A body of a call so far.

    Attributes:
        taken: all texts that were taken, in order.
    """

    taken: list[str]

    def take(self, text: str, *, is_end: bool = False) -> End | None:
        """Take more text; return the end of the body once it is known.

        Args:
            text: what follows.
            is_end: whether nothing follows it any more; then the result is an end.

        Raises:
            NoCallError: this is no body of a call.
        """


class JsonBody:
    """A body of JSON values, with commas, semicolons or nothing between them.

    Whether it is valid JSON is only known as far as it tells where the body ends.

    Args:
        ends: the marks of which one closes the call; without any, the end of the message does.
        following: what the next call begins with, where nothing closes this one.
        quote: what may stand around texts, in which nothing is escaped, in place of `"`. Then keys
            may stand bare; see `as_json`.
    """

    def __init__(self, ends: Sequence[str], following: str = "", quote: str = "") -> None:
        self.taken: list[str] = []
        self._ends = [*dict.fromkeys(end.strip() for end in ends)]
        self._following, self._quote = following, quote
        self._rest = ""  # what is taken, but not read yet
        self._num_read = 0
        self._brackets: list[str] = []  # those that are to come
        self._state = "between"
        self._is_key = False
        self._scalar = ""

    def take(self, text: str, *, is_end: bool = False) -> End | None:
        """Take more text; see `Body.take`."""
        self.taken.append(text)
        text, at = self._rest + text, 0
        while at < len(text):
            if self._state == "between" and (mark := self._mark_at(text, at, is_end)) is not None:
                if mark.is_partial:
                    break
                return self._end(text, at, at + mark.length)
            before = at, self._state
            at = self._read(text, at)
            if (at, self._state) == before:  # it goes on with what follows
                break
        self._num_read += at
        self._rest = text[at:]
        if not is_end:
            return None
        if self._state == "scalar":
            self._end_scalar()
        if self._state != "between" or self._rest:
            raise NoCallError
        return self._end("", 0, 0)

    def _mark_at(self, text: str, at: int, is_end: bool) -> "_Mark | None":
        """Return the mark that stands, or may stand, at a place between values."""
        for mark in self._ends:
            if text.startswith(mark, at):
                return _Mark(len(mark))
        if self._following and text.startswith(self._following, at):
            return _Mark(0)
        marks = [*self._ends, self._following]
        if not is_end and any(mark.startswith(text[at : at + len(mark)]) for mark in marks if mark):
            return _Mark(0, is_partial=True)
        return None

    def _end(self, text: str, at: int, behind: int) -> End:
        num_body, num_written = self._num_read + at, self._num_read + behind
        whole = "".join(self.taken)
        return End(whole[:num_written], whole[:num_body], whole[num_written:])

    def _read(self, text: str, at: int) -> int:
        """Return the place behind what was read at a place; the same if more must come first."""
        state = self._state
        if state == "string":
            return self._read_string(text, at)
        if state == "quoted":
            return self._read_quoted(text, at)
        if state == "scalar":
            found = _IN_SCALAR.match(text, at)
            assert found is not None, "it matches anything"
            self._scalar += found[0]
            if found.end() < len(text):
                self._end_scalar()
            return found.end()
        if state == "bare key":
            found = _BARE_KEY.match(text, at)
            assert found is not None, "it matches anything"
            if found.end() < len(text):
                self._state = "colon"
            return found.end()
        if self._quote and self._quote.startswith(text[at : at + len(self._quote)]):
            return self._begin_quoted(text, at)
        each = text[at]
        if each.isspace() or (state == "between" and each in ",;"):
            return at + 1
        if state in ("key", "key or bracket") and each == '"':
            self._state, self._is_key = "string", True
        elif self._quote and state in ("key", "key or bracket") and _BARE_KEY.fullmatch(each):
            self._state = "bare key"
        elif state in ("after", "key or bracket", "value or bracket") and (
            self._brackets[-1] == each
        ):
            self._brackets.pop()
            self._end_value()
        elif state == "after" and each == ",":
            self._state = "key" if self._brackets[-1] == "}" else "value"
        elif state == "colon" and each == ":":
            self._state = "value"
        elif state in ("between", "value", "value or bracket"):
            self._begin_value(each)
        else:
            raise NoCallError
        return at + 1

    def _read_string(self, text: str, at: int) -> int:
        found = _IN_STRING.match(text, at)
        assert found is not None, "it matches anything"
        at = found.end()
        if text[at : at + 1] != '"':  # the text ends, or behind it a backslash waits for its letter
            return at
        self._end_string()
        return at + 1

    def _begin_quoted(self, text: str, at: int) -> int:
        behind = at + len(self._quote)
        if self._state not in ("key", "key or bracket", "between", "value", "value or bracket"):
            raise NoCallError
        if behind > len(text):  # the rest of the quote may follow
            return at
        self._is_key, self._state = self._state.startswith("key"), "quoted"
        return behind

    def _read_quoted(self, text: str, at: int) -> int:
        end = text.find(self._quote, at)
        if end < 0:
            return max(at, len(text) - len(self._quote) + 1)
        self._end_string()
        return end + len(self._quote)

    def _end_string(self) -> None:
        if self._is_key:
            self._state, self._is_key = "colon", False
        else:
            self._end_value()

    def _begin_value(self, first: str) -> None:
        if first == "{":
            self._brackets.append("}")
            self._state = "key or bracket"
        elif first == "[":
            self._brackets.append("]")
            self._state = "value or bracket"
        elif first == '"':
            self._state = "string"
        elif first in _SCALAR_STARTS:
            self._state, self._scalar = "scalar", first
        else:
            raise NoCallError

    def _end_scalar(self) -> None:
        if not _SCALAR.fullmatch(self._scalar):
            raise NoCallError
        self._end_value()

    def _end_value(self) -> None:
        self._state = "after" if self._brackets else "between"


def as_json(body: str, quote: str) -> str:
    """Return a body with this quote, as `JsonBody` has read it, as JSON."""

    def plain(found: re.Match[str]) -> str:
        if found[1] is not None:
            return json.dumps(found[1].strip(), ensure_ascii=False) + ":"
        return "null" if found[0] == "None" else found[0]

    parts = body.split(quote)
    parts[::2] = [_BARE.sub(plain, part) for part in parts[::2]]
    parts[1::2] = [json.dumps(part, ensure_ascii=False) for part in parts[1::2]]
    return "".join(parts)


class _Mark(NamedTuple):
    """A mark at a place, of which more may have to come."""

    length: int
    is_partial: bool = False


class TagBody:
    """A body of arguments, each with a tag before its value and one behind it.

    A value ends at a closing tag that another argument or the end of the call follows. It may hold
    such tags itself, as a page about calls does: those of a whole call, and those of an end that
    `around` does not follow. If the message ends before the value does, these tags were no part of
    the value.

    Args:
        tag: the pattern of one argument, with `key` and `VALUE`.
        ends: the marks of which one closes the call; a closing tag may stand before it.
        call: the pattern of what opens a call.
        around: what follows the last call where something stood before the first; may be empty.
        nests: whether a value may hold tags of calls.
        can_close: whether a value can still end; otherwise a body with one is none.

    Attributes:
        nests: whether values were read as if they may hold tags of calls.
        is_unclosed: whether a value did not end before the message did.
    """

    def __init__(
        self,
        tag: str,
        ends: Sequence[str],
        call: str,
        around: str = "",
        *,
        nests: bool = True,
        can_close: bool = True,
    ) -> None:
        self.taken: list[str] = []
        self.nests, self.is_unclosed = nests, False
        self._tag, self._ends, self._call, self._around = tag, tuple(ends), call, around
        self._can_close = can_close
        self._begin()

    def _begin(self) -> None:
        around = self._around if self.nests else ""
        self._marks = _marks_of(self._tag, self._ends, self._call, around)
        self._rest = ""  # what is taken, but not read yet
        self._num_read = 0
        self._arguments = dict[str, str]()
        self._key: str | None = None
        self._value: list[str] = []
        self._num_counted = 0  # how many parts of the value were searched for calls
        self._num_open = 0  # calls in the value

    def take(self, text: str, *, is_end: bool = False) -> End | None:
        """Take more text; see `Body.take`."""
        self.taken.append(text)
        self._rest += text
        if (end := self._read(is_end)) is not None or not is_end:
            return end
        if self.nests:
            self.nests, whole = False, "".join(self.taken)
            self.taken = []
            self._begin()
            return self.take(whole, is_end=True)
        self.is_unclosed = True
        raise NoCallError

    def _read(self, is_end: bool) -> End | None:
        """Read what is certain; at the end, return None if a value does not end."""
        while True:
            if self._key is None:
                found = self._marks.following.match(self._rest, partial=not is_end)
                if found is None and is_end and not self._rest.strip():
                    return self._end(len(self._rest), len(self._rest))
                if found is None:
                    raise NoCallError
                if found.partial:
                    return None
                if found["end"] is not None:
                    return self._end(found.start("end"), found.end())
                if found.end() == len(self._rest) and not is_end:  # its white space may go on
                    return None
                if not self._can_close:
                    raise NoCallError
                self._skip(found.end())
                self._key, self._value = found["key"], []
                self._num_counted = self._num_open = 0
            else:
                closing = self._marks.last_closing if is_end else self._marks.closing
                found = closing.search(self._rest, partial=not is_end)
                if found is None or found.partial:
                    at = len(self._rest) if found is None else found.start()
                    self._value.append(self._skip(at))
                    return None
                self._value.append(self._skip(found.start()))
                closed = self._skip(found.end() - found.start())
                if self.nests and self._is_in_call():
                    self._value.append(closed)
                    continue
                self._arguments[self._key] = "".join(self._value)
                self._key = None

    def _is_in_call(self) -> bool:
        """Return whether a call is open in the value so far."""
        new = "".join(self._value[self._num_counted :])
        self._num_counted = len(self._value)
        for each in self._marks.calls.finditer(new):
            self._num_open = max(0, self._num_open - 1) if each["end"] else self._num_open + 1
        return self._num_open > 0

    def _skip(self, length: int) -> str:
        skipped, self._rest = self._rest[:length], self._rest[length:]
        self._num_read += length
        return skipped

    def _end(self, at: int, behind: int) -> End:
        num_body, num_written = self._num_read + at, self._num_read + behind
        whole = "".join(self.taken)
        return End(whole[:num_written], whole[:num_body], whole[num_written:], self._arguments)


class _Marks(NamedTuple):
    """What stands between the values of a call in tags.

    Attributes:
        following: what follows a name or a value: another argument, or the `end` of the call.
        closing: what closes a value.
        last_closing: the same where the message ends.
        calls: what opens a call, or the `end` of one.
    """

    following: Any
    closing: Any
    last_closing: Any
    calls: Any


@lru_cache(64)
def _marks_of(tag: str, ends: tuple[str, ...], call: str, around: str) -> _Marks:
    opening, closing = tag.split(VALUE)
    end = f"(?P<end>{'|'.join(map(re.escape, ends)) or '(?!)'})"
    last = rf"(?:</[\w-]{{1,32}}>\s{{0,16}})?{end}"
    # What has come so far may end anywhere: only at the end of the message does \Z say anything.
    behind = rf"(?=\s{{0,16}}(?:{re.escape(around)}|{call}))" if around else ""
    last_behind = rf"(?=\s{{0,16}}(?:{re.escape(around)}|{call}|\Z))" if around else ""
    patterns = (
        rf"\s{{0,16}}(?:{opening}|{last})",
        rf"{closing}(?=\s{{0,16}}(?:{opening}|{last}{behind}))",
        rf"{closing}(?=\s{{0,16}}(?:{opening}|{last}{last_behind})|\s*\Z)",
        f"{call}|{end}",
    )
    return _Marks(*(regex.compile(pattern, regex.DOTALL) for pattern in patterns))
