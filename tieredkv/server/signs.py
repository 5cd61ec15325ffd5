"""Put signs into texts before a chat template is rendered, and find them again after it.

This module knows texts and special tokens, but no templates.
"""

import itertools
import re
import secrets
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from tieredkv.fields import names_of
from tieredkv.server.pieces import Trie

_WORDS = names_of("""
    role content reasoning_content thinking tool_calls tool_call_id type id function name arguments
    description parameters strict properties required items enum default format title anyOf oneOf
    additionalProperties
""")
"""Keys of messages and tools, also of JSON schemas, that chat templates look for."""


class Signs:
    """Random numbers that are put into texts before rendering and found again after it.

    Digits survive whatever a template does to a text: changing its case, stripping it, or printing
    it as JSON.

    Attributes:
        guard: the number put into spellings of special tokens.
    """

    def __init__(self) -> None:
        self.guard, self._mark = (str(10**19 + secrets.randbelow(9 * 10**19)) for _ in "ab")
        self._marks = re.compile(self._mark + r"(\d{6})")

    def mark(self, index: int) -> str:
        """Return the sign of the mark with this index."""
        return f"{self._mark}{index:06d}"

    def take_out(self, text: str) -> "Taken":
        """Return a rendered text without guards and signs, and where they were."""
        first, *others = self._marks.split(text)
        parts, places, place = [first], dict[int, int](), len(first)
        for index, part in zip(others[::2], others[1::2], strict=True):
            places[int(index)] = place
            parts.append(part)
            place += len(part)
        parts = "".join(parts).split(self.guard)
        guards = [*itertools.accumulate(map(len, parts[:-1]))]
        taken = Taken("".join(parts), guards, {}, len(self.guard))
        return taken._replace(marks={index: taken.place(it) for index, it in places.items()})


class Taken(NamedTuple):
    """A rendered text without guards and signs.

    Attributes:
        text: what is left.
        guards: where each guard was in it.
        marks: where the sign of each mark was in it, the last time that it was there.
        guard_length: of one guard.
    """

    text: str
    guards: list[int]
    marks: dict[int, int]
    guard_length: int

    def place(self, place: int) -> int:
        """Return where a place of the text with guards is in the text without them."""
        before = bisect_left(
            range(len(self.guards)), place, key=lambda i: self.guards[i] + i * self.guard_length
        )
        return place - before * self.guard_length


def guarding(special: Trie, guard: str) -> Callable[[str], str]:
    """Return a function that puts a guard after the first letter of each special token."""

    def put(text: str) -> str:
        starts = [start + 1 for start, _ in special.find(text)]
        spans = itertools.pairwise([0, *starts, len(text)])
        return guard.join(text[a:b] for a, b in spans) if starts else text

    return put


def fencing(special: Collection[str], guard: str) -> Callable[[str], str]:
    """Return a function that puts guards around a text that can be a part of a special token.

    The guards are put inside of white space around the text, which templates often strip.
    """
    heads = tuple({token[:end] for token in special for end in range(1, len(token))})
    tails = tuple({token[start:] for token in special for start in range(1, len(token))})

    def put(text: str) -> str:
        core = text.strip()
        is_part = core and any(core in token for token in special)
        if not (is_part or core.startswith(tails) or core.endswith(heads)):
            return text
        before, after = text.split(core, 1)
        return f"{before}{guard}{core}{guard}{after}"

    return put


def mapped(put: Callable[[str], str], value: Any, words: Collection[str] = _WORDS) -> Any:
    """Return a JSON value with every text replaced by what `put` makes of it.

    Keys that are words of messages and tools stay, since templates look for them, but not those of
    a call's arguments.
    """
    match value:
        case str():
            return put(value)
        case Mapping():
            return {
                key if key in words else put(key): mapped(
                    put, each, () if key == "arguments" else words
                )
                for key, each in value.items()
            }
        case list() | tuple():
            return [mapped(put, each, words) for each in value]
    return value


def with_signs(value: Any, sign: str, key: str = "") -> Any:
    """Return a JSON value with a sign at the end of each text that is not a `type`.

    Templates compare types, so that a sign there would change what they write.
    """
    match value:
        case str() if key != "type":
            return with_sign(value, sign)
        case Mapping():
            return {name: with_signs(each, sign, name) for name, each in value.items()}
        case list() | tuple():
            return [with_signs(each, sign) for each in value]
    return value


def with_sign(part: str, sign: str) -> str:
    """Return a part with a sign after its last character other than white space."""
    length = len(part.rstrip())
    return part[:length] + sign + part[length:] if length else part
