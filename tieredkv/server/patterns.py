"""Rewrite the regular expressions of JSON schemas so that they match strings as JSON has them.

A `pattern` is about a string's characters, and is found anywhere in it. A grammar is about the text
between the quotation marks, where some characters are escaped, and describes all of it. xgrammar
takes a pattern as the grammar, ignores what it does not know, and so writes what is no JSON or does
not match. Here a pattern is parsed, and what cannot be rewritten is an error.

Texts of what a pattern matches in two forms are kept: a rich one with escapes, and a plain one, in
which no optional character is escaped. Only the plain one is repeated a bounded number of times,
since xgrammar then compares nearly each token of the vocabulary anew for every mask.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

Ranges = list[tuple[int, int]]
"""Characters, from the first to the last of each range."""

MAX_CHARACTER = 0x10FFFF
MAX_DEPTH = 64
_SAFE: Ranges = [(0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, MAX_CHARACTER)]
"""Characters that stand for themselves between quotation marks."""

_ESCAPED = {'"': '"', "\\": "\\\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
"""What stands behind a backslash for the others, as part of a regular expression."""

_LINE_ENDS: Ranges = [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]
_DIGITS: Ranges = [(0x30, 0x39)]
_WORD: Ranges = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_SPACE: Ranges = [(0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)]
_SPACE += [(0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)]
_MAYBE_SPACE: Ranges = [(0x1C, 0x1F), (0x85, 0x85), (0xFEFF, 0xFEFF)]
"""White space to some implementations of regular expressions and not to others."""

_SETS = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_HEX = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})")
_TIMES = re.compile(r"\{(\d{1,6})(?:(,)(\d{1,6})?)?\}")
_SPECIAL = frozenset("\\^$.*+?()[]{}|/")
_GROUP = re.compile(r"\?:|\?P?<[A-Za-z_]\w*>")

OUTSIDE_FSM = f"{chr(MAX_CHARACTER)}{{0}}"
"""An empty match with which xgrammar 0.2.8 makes rules of a pattern instead of an automaton.

Its automaton of a JSON string leaves out whatever is escaped. With more than 128 repetitions it
takes 30 ms a token for 131,072 tokens, or fails to compile (`per_rule_fsm_hashes … is false`).
"""


class PatternError(ValueError):
    """This pattern cannot be rewritten."""


class _Text(NamedTuple):
    """A part of a pattern, rewritten.

    Attributes:
        rich, plain: texts of it, with and without optional escapes.
        is_first, is_last: whether it begins or ends the string.
    """

    rich: str
    plain: str
    is_first: bool = False
    is_last: bool = False


def written_in_json(pattern: str) -> str:
    """Return a pattern for all that stands between a string's quotation marks.

    Raises:
        PatternError: it has a look around, a reference, a boundary of words or a Unicode class,
            means different things to different implementations, or is no pattern.
    """
    reader = _Reader(pattern)
    branches = reader.branches(is_first=True, depth=0)
    if reader.at < len(pattern):
        raise PatternError("unbalanced `)`")
    any_text = _star(_of_ranges(_but(_LINE_ENDS)).rich)
    whole = "|".join(
        ("" if it.is_first else any_text) + it.rich + ("" if it.is_last else any_text)
        for it in branches
    )
    return f"^(?:{whole}){OUTSIDE_FSM}$"


def of_length(least: int, most: int | None) -> str:
    """Return a pattern for strings of so many characters, none of which is escaped.

    Only beyond the least length of what has no greatest one, characters may be escaped.
    """
    rich, plain, *_ = _of_ranges([(0, MAX_CHARACTER)])
    if most is not None:
        return f"^{plain}{{{least},{most}}}$"
    return f"^{plain}{{{least}}}{_star(rich)}$" if least else f"^{_star(rich)}$"


def looks_around(pattern: str) -> bool:
    """Return whether a pattern looks ahead or behind, which xgrammar ignores."""
    plain = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "", pattern, flags=re.DOTALL)
    return re.search(r"\(\?<?[=!]", plain) is not None


class _Reader:
    def __init__(self, pattern: str) -> None:
        self.pattern, self.at = pattern, 0

    def branches(self, *, is_first: bool, depth: int) -> list[_Text]:
        """Read what is between two parentheses, or all of it."""
        if depth > MAX_DEPTH:
            raise PatternError("too deeply nested")
        found = [self._branch(is_first, depth)]
        while self._takes("|"):
            found.append(self._branch(is_first, depth))
        return found

    def _branch(self, may_begin: bool, depth: int) -> _Text:
        rich, plain, is_first, is_last = "", "", False, False
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)":
            if self._takes("^"):
                if rich or not may_begin:
                    raise PatternError("`^` amid the pattern")
                is_first = True
                continue
            if self._takes("$"):
                is_last = True
                continue
            if is_last:
                raise PatternError("`$` amid the pattern")
            part = self._term(may_begin and not rich, depth)
            rich, plain = rich + part.rich, plain + part.plain
            is_first, is_last = is_first or part.is_first, part.is_last
        return _Text(rich, plain, is_first, is_last)

    def _term(self, may_begin: bool, depth: int) -> _Text:
        atom = self._atom(may_begin, depth)
        sign = self.pattern[self.at : self.at + 1]
        times = _TIMES.match(self.pattern, self.at)
        if times is None and sign not in ("*", "+", "?"):
            return atom
        if atom.is_first or atom.is_last:
            raise PatternError("`^` or `$` within what is repeated")
        self.at += len(times[0]) if times else 1
        self._takes("?")
        if self.pattern[self.at : self.at + 1] in ("*", "+", "?") or _TIMES.match(
            self.pattern, self.at
        ):
            raise PatternError("nothing to repeat")
        if times is None:
            return _Text(atom.rich + sign, atom.plain + sign)
        if times[3] and int(times[3]) < int(times[1]):
            raise PatternError("the bounds of a repetition are reversed")
        if int(times[3] or times[1]) > 1 or (times[2] and not times[3]):
            return _Text(atom.plain + times[0], atom.plain + times[0])
        return _Text(atom.rich + times[0], atom.plain + times[0])

    def _atom(self, may_begin: bool, depth: int) -> _Text:
        if self._takes("("):
            group = _GROUP.match(self.pattern, self.at)
            if group is not None:
                self.at += len(group[0])
            elif self.pattern[self.at : self.at + 1] == "?":
                raise PatternError("a look around or a flag")
            inner = self.branches(is_first=may_begin, depth=depth + 1)
            if not self._takes(")"):
                raise PatternError("unbalanced `(`")
            rich, plain = (f"(?:{'|'.join(texts)})" for texts in list(zip(*inner, strict=True))[:2])
            starts, ends = any(it.is_first for it in inner), any(it.is_last for it in inner)
            return _Text(rich, plain, starts, ends)
        if self._takes("["):
            return self._class()
        if self._takes("."):
            return _of_ranges(_but(_LINE_ENDS))
        if self._takes("\\"):
            return _of_ranges(self._escape())
        char = self.pattern[self.at]
        if char in "*+?" or (char == "{" and re.match(r"\{\d*,?\d*\}", self.pattern[self.at :])):
            raise PatternError("nothing to repeat")
        self.at += 1
        return _of_ranges([(ord(char), ord(char))])

    def _class(self) -> _Text:
        is_negated = self._takes("^")
        ranges: Ranges = []
        if self.pattern[self.at : self.at + 1] == "]":
            raise PatternError("an empty class")
        while not self._takes("]"):
            one = self._of_class(is_negated)
            rest = self.pattern[self.at : self.at + 2]
            if rest[:1] == "-" and rest[1:] not in ("]", ""):
                self.at += 1
                other = self._of_class(is_negated)
                ends = [one[0], other[0]]
                if [len(one), len(other)] != [1, 1] or any(low != high for low, high in ends):
                    raise PatternError("a range between classes")
                if one[0][0] > other[0][0]:
                    raise PatternError("a reversed range")
                one = [(one[0][0], other[0][0])]
            ranges += one
        return _of_ranges(_but(ranges) if is_negated else ranges)

    def _of_class(self, is_negated: bool) -> Ranges:
        if self.at >= len(self.pattern):
            raise PatternError("unbalanced `[`")
        if self._takes("\\"):
            if self._takes("b"):
                return [(8, 8)]
            return self._escape(is_negated)
        char = self.pattern[self.at]
        self.at += 1
        return [(ord(char), ord(char))]

    def _escape(self, is_negated: bool = False) -> Ranges:
        """Read what stands behind a backslash."""
        name = self.pattern[self.at : self.at + 1]
        if found := _HEX.match(self.pattern, self.at):
            self.at += len(found[0])
            code = int(found[1] or found[2], 16)
            return [(code, code)]
        self.at += 1
        if name.lower() in _SETS:
            negates = name.isupper()
            ranges = _SETS[name.lower()]
            if name.lower() == "s" and negates != is_negated:
                ranges = ranges + _MAYBE_SPACE
            return _but(ranges) if negates else ranges
        if name in _CONTROLS and not self.pattern[self.at : self.at + 1].isdigit():
            return [(_CONTROLS[name], _CONTROLS[name])]
        if not name or name.isalnum():
            raise PatternError(f"`\\{name}`")
        return [(ord(name), ord(name))]

    def _takes(self, text: str) -> bool:
        if not self.pattern.startswith(text, self.at):
            return False
        self.at += len(text)
        return True


def _star(text: str) -> str:
    return f"{text}*"


def _but(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return all other characters."""
    left, begin = list[tuple[int, int]](), 0
    for low, high in sorted(ranges):
        if begin < low:
            left.append((begin, low - 1))
        begin = max(begin, high + 1)
    return [*left, (begin, MAX_CHARACTER)] if begin <= MAX_CHARACTER else left


def _of_ranges(ranges: Sequence[tuple[int, int]]) -> _Text:
    """Return the text of one of these characters."""
    both = [(max(a, c), min(b, d)) for a, b in sorted(ranges) for c, d in _SAFE]
    safe = [(low, high) for low, high in both if low <= high]
    behind = "".join(
        text for char, text in _ESCAPED.items() if any(a <= ord(char) <= b for a, b in ranges)
    )
    plain = _class_of(safe) if safe else ""
    if behind and plain:
        return _Text(f"(?:{plain}|\\\\[{behind}])", plain)
    if behind:
        return _Text(f"(?:\\\\[{behind}])", f"(?:\\\\[{behind}])")
    if not plain:
        codes = "|".join(f"\\\\u{code:04x}" for a, b in ranges for code in range(a, min(b, 31) + 1))
        if not codes:
            raise PatternError("a class without characters")
        return _Text(f"(?:{codes})", f"(?:{codes})")
    return _Text(plain, plain)


def _class_of(ranges: Ranges) -> str:
    low, high = ranges[0]
    if ranges == [(low, low)]:
        return f"\\{chr(low)}" if chr(low) in _SPECIAL else chr(low)
    if low == ord("^"):  # xgrammar negates a class that begins with it, though it is escaped
        ranges = [*([(low + 1, high)] if low < high else []), *ranges[1:], (low, low)]
    return "[" + "".join(_range(low, high) for low, high in ranges) + "]"


def _range(low: int, high: int) -> str:
    one, other = (f"\\{chr(code)}" if chr(code) in "\\]^-[" else chr(code) for code in (low, high))
    return one if low == high else f"{one}-{other}"
