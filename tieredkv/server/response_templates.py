"""Turn a checkpoint's own response template into the data of a family.

transformers lets a checkpoint describe what its model writes (`tokenizer.response_template`), by
regular expressions for what opens and closes each part of a message. These come from whoever made
the checkpoint, and some regular expressions take exponential time. So none of them is used as it
is: it is taken apart and written again, and only if each place of a text is matched in a time with
a small bound. It may consist of

- texts, and alternatives or optional groups of these;
- runs of white space, which get a bound, and no two of which are next to each other;
- one run of other characters, the name of a tool or argument, which gets a bound, too. What comes
  before it begins with a text. It holds no white space where white space is next to it.

A template with anything else cannot be expressed; then the reason is told. This module knows the
form of these templates, but does not read messages.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from tieredkv.server.call_bodies import VALUE

MAX_PATTERN_CHARACTERS = 1000
MAX_SPACE = 16
"""The longest white space in one place, as in `response_templates.toml`."""

MAX_NAME = 128
MAX_ALTERNATIVES = 16

_NAMES = {
    "content": "text",
    "reasoning_content": "thoughts",
    "reasoning": "thoughts",
    "thinking": "thoughts",
    "tool_calls": "calls",
}
"""The parts of a message, by their names in a response template."""

_CLASSES = {
    "CATEGORY_SPACE": r"\s",
    "CATEGORY_NOT_SPACE": r"\S",
    "CATEGORY_WORD": r"\w",
    "CATEGORY_NOT_WORD": r"\W",
    "CATEGORY_DIGIT": r"\d",
    "CATEGORY_NOT_DIGIT": r"\D",
}
_WITH_NAMES = {"json": "arguments", "xml-inline": "tags"}
"""What a call consists of beside the tool's name, by the parser of its content."""

_ANY = r"[\s\S]"
_CALL = '{"name": "{name}", "arguments": {arguments}}'


class InexpressibleError(ValueError):
    """A response template says something that the data of a family cannot; the text says what."""


def family_of(template: Any) -> dict[str, Any]:
    """Return the fields of the family that a response template describes, without a name.

    Raises:
        InexpressibleError: it describes none, or one whose data cannot say the same.
    """
    try:
        return _family_of(template)
    except (AttributeError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise InexpressibleError(f"it is malformed ({type(error).__name__})") from None


def _family_of(template: Any) -> dict[str, Any]:
    if not isinstance(template, Mapping) or template.get("version", 1) != 1:
        raise InexpressibleError("it is not a response template of version 1")
    parts: dict[str, Any] = {}
    for name, part in template["fields"].items():
        if name not in _NAMES or _NAMES[name] in parts:
            raise InexpressibleError(f"it has the field `{name}`")
        parts[_NAMES[name]] = part
    anchor = _anchor(template, "start_anchor", "`start_anchor`")
    if anchor is None:
        raise InexpressibleError("it has no `start_anchor`")
    start, *others = anchor.texts()
    made: dict[str, Any] = {"start": start, "resumes": others}
    if "text" in parts:
        made |= _text_of(parts["text"])
    if "thoughts" in parts:
        begin = _anchor(parts["thoughts"], "open", "what opens thoughts")
        end = _anchor(parts["thoughts"], "close", "what closes thoughts")
        if begin is None or end is None:
            raise InexpressibleError("nothing opens or closes thoughts")
        made["thoughts"] = [begin.pattern, end.pattern]
        made["thinks"] = [begin.shortest, end.shortest]
    if "calls" in parts:
        made |= _calls_of(parts["calls"], made.get("skip", ""))
    return made


def _text_of(part: Mapping[str, Any]) -> dict[str, Any]:
    begin = _anchor(part, "open", "what opens the text")
    end = _anchor(part, "close", "what closes the text")
    skip = "|".join(each.pattern for each in (begin, end) if each)
    return {"skip": skip, "answers": begin.shortest if begin else ""}


def _calls_of(part: Mapping[str, Any], skip: str) -> dict[str, Any]:
    body, name = _body_of(part)
    begin = _anchor(part, "open", "what opens a call", name)
    if begin is None or (name and "(?P<name>" not in begin.pattern):
        raise InexpressibleError("nothing opens a call, or it does not name the tool")
    made: dict[str, Any] = {"call": begin.pattern, "body": body, "skip": skip}
    made["quote"] = _quote_of(part.get("content_args", {})) if body != "tags" else ""
    closing, rest = _closing(part)
    made["call_end"] = closing
    if rest is not None:
        made["skip"] = "|".join(filter(None, [skip, rest.pattern]))
    if body == "tags":
        made["tag"] = _tag_of(part.get("content_args", {}).get("tag_pattern"))
    elif closing:
        arguments = _CALL if body == "calls" else "{arguments}"
        end = closing[0] + (rest.shortest if rest else "")
        made["opens"] = begin.shortest.partition("{name}")[0]
        made["writes"] = begin.shortest + arguments + end
        made["between"] = ""
    return made


def _body_of(part: Mapping[str, Any]) -> tuple[str, str]:
    """Return what a call consists of, and the group that has the tool's name."""
    kind, transform = part.get("content", "text"), part.get("transform")
    function = transform.get("function", "") if isinstance(transform, Mapping) else transform
    if isinstance(function, Mapping):
        name = str(function.get("name"))
        group = re.fullmatch(r"\{(\w+)\}", name)
        if group and function.get("arguments") == "{content}" and kind in _WITH_NAMES:
            return _WITH_NAMES[kind], group[1]
        function = "{content}" if name == "{content.name}" else ""
    if kind == "json" and function in (None, "{content}"):
        return "calls", ""
    raise InexpressibleError(f"calls are written as `{kind}` that its `transform` rearranges")


def _quote_of(arguments: Mapping[str, Any]) -> str:
    """Return what stands around texts in JSON in place of `"`; empty if nothing else does."""
    given = {name: it for name, it in arguments.items() if name != "allow_non_json"}
    if not given:
        return ""
    match given:
        case {"unquoted_keys": True, "string_delims": [[str(begin), str(end)]]}:
            if begin and begin == end and len(given) == 2:
                return begin
    raise InexpressibleError("calls are written in a dialect of JSON")


def _closing(part: Mapping[str, Any]) -> tuple[list[str], "_Anchor | None"]:
    """Return the texts that close a call, and what else may stand behind them."""
    end = _anchor(part, "close", "what closes a call")
    if end is None:
        return [], None
    head, rest = end.head_and_rest()
    if not all(texts := [*head.texts()]):
        raise InexpressibleError("what closes a call does not begin with a text")
    return texts, rest


def _tag_of(pattern: Any) -> str:
    tag = _Anchor.of_pattern(pattern, "`tag_pattern`", {"key": "key", "value": "value"})
    begin, value, end = tag.pattern.partition(VALUE)
    if not value or "(?P<key>" not in begin or not tag.shortest.partition("{value}")[2].strip():
        raise InexpressibleError("`tag_pattern` is not a key and a value that a text closes")
    return begin + value + end


def _anchor(part: Mapping[str, Any], key: str, what: str, name: str = "") -> "_Anchor | None":
    """Return what a part has under a key, as texts or as a regular expression; None for nothing."""
    if (pattern := part.get(f"{key}_pattern")) is not None:
        return _Anchor.of_pattern(pattern, what, {name: "name"} if name else {})
    texts = part.get(key)
    if texts is None:
        return None
    texts = [texts] if isinstance(texts, str) else texts
    if not all(isinstance(each, str) and each for each in texts) or len(texts) > MAX_ALTERNATIVES:
        raise InexpressibleError(f"{what} is not a text")
    return _Anchor.of_pattern("|".join(map(re.escape, texts)), what, {})


class _Anchor:
    """A regular expression that takes a bounded time at each place of a text.

    Attributes:
        pattern: the expression.
        shortest: a short text that it matches, with `{name}` where the tool's name stands.
    """

    def __init__(self, items: Sequence[Any], what: str, groups: Mapping[int, str]) -> None:
        self._items, self._what, self._groups = items, what, groups
        made = _Made(what, groups)
        self.pattern, self.shortest = made.sequence(items)
        if not made.has_text:
            raise InexpressibleError(f"{what} may match without a text of its own")

    @classmethod
    def of_pattern(cls, pattern: Any, what: str, names: Mapping[str, str]) -> "_Anchor":
        """Read a regular expression.

        Args:
            pattern: the expression.
            what: its name in errors.
            names: the names that its groups get, by those which they have; others lose theirs.
        """
        if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN_CHARACTERS:
            raise InexpressibleError(f"{what} is not a short regular expression")
        try:
            parsed = _parser.parse(pattern, re.DOTALL)
        except (re.error, RecursionError, OverflowError):
            raise InexpressibleError(f"{what} is not a plain regular expression") from None
        if parsed.state.flags & ~(re.DOTALL | re.UNICODE):
            raise InexpressibleError(f"{what} sets flags")
        groups = {
            index: names[name] for name, index in parsed.state.groupdict.items() if name in names
        }
        return cls([*parsed], what, groups)

    def texts(self) -> Iterator[str]:
        """Yield the texts that it matches.

        Raises:
            InexpressibleError: there are more than a few, or it has runs.
        """
        found = _texts(self._items, {})
        if found is None or len(found) > MAX_ALTERNATIVES:
            raise InexpressibleError(f"{self._what} is not a text")
        yield from found

    def head_and_rest(self) -> "tuple[_Anchor, _Anchor | None]":
        """Return what stands before the first white space of variable length, and what behind it.

        White space at the end is left out: it is no part of a message.
        """
        items = self._items
        while len(items) > 1 and _is_space_run(items[-1]):
            items = items[:-1]
        at = next((i for i, item in enumerate(items) if _is_space_run(item)), len(items))
        rest = items[at:]
        head = _Anchor(items[:at], self._what, self._groups)
        return head, _Anchor(rest, self._what, self._groups) if rest else None


@dataclass
class _Made:
    """Writes a regular expression again, and checks that matching it takes a bounded time.

    Attributes:
        what: the name of the expression in errors.
        groups: the names of its groups that are kept, by their indexes.
        has_text: whether a text that is not white space must have come.
        is_space, is_name: whether white space, or a name that may hold it, can stand just before.
        num_names: how many runs of other characters than white space there are.
    """

    what: str
    groups: Mapping[int, str]
    has_text: bool = False
    is_space: bool = False
    is_name: bool = False
    num_names: int = 0
    _group: list[str] = field(default_factory=list)

    def sequence(self, items: Sequence[Any]) -> tuple[str, str]:
        """Return the expression of a sequence, and a short text that it matches."""
        made, index = list[tuple[str, str]](), 0
        while index < len(items):
            end, texts = index, [""]
            while end < len(items) and (more := _texts(items[: end + 1][index:], self.groups)):
                end, texts = end + 1, more
            if end > index:
                made.append(self._alternatives(texts))
                index = end
            else:
                made.append(self._item(str(items[index][0]), items[index][1]))
                index += 1
        return "".join(pattern for pattern, _ in made), "".join(text for _, text in made)

    def _alternatives(self, texts: Sequence[str]) -> tuple[str, str]:
        """Return the expression of some texts; each of them stands in it as it is.

        Special tokens that a model writes are found there by their names.
        """
        if not any(map(str.isspace, texts)) and all(texts):
            self.has_text, self.is_space, self.is_name = True, False, False
        pattern = "|".join(map(re.escape, texts))
        return (pattern if len(texts) == 1 else f"(?:{pattern})"), texts[0]

    def _item(self, kind: str, value: Any) -> tuple[str, str]:
        match kind:
            case "SUBPATTERN":
                index, on, off, items = value
                if on or off:
                    raise InexpressibleError(f"{self.what} sets flags")
                name = self.groups.get(index, "")
                self._group.append(name)
                pattern, text = self.sequence(items)
                self._group.pop()
                if not name:
                    return f"(?:{pattern})", text
                return f"(?P<{name}>{pattern})", f"{{{name}}}"
            case "BRANCH":
                return self._branch(value[1])
            case "MAX_REPEAT" | "MIN_REPEAT":
                return self._repeat(*value, is_lazy=kind == "MIN_REPEAT")
        raise InexpressibleError(f"{self.what} has more than texts and short runs")

    def _branch(self, alternatives: Sequence[Any]) -> tuple[str, str]:
        # The end of the answer closes everything, without being named.
        given = [[*it] for it in alternatives if [str(kind) for kind, _ in it] != ["AT"]]
        if not 0 < len(given) <= MAX_ALTERNATIVES:
            raise InexpressibleError(f"{self.what} has many alternatives")
        before = self.has_text, self.is_space, self.is_name
        made, after = [], []
        for items in given:
            self.has_text, self.is_space, self.is_name = before
            made.append(self.sequence(items))
            after.append((self.has_text, self.is_space, self.is_name))
        have, spaces, names = zip(*after, strict=True)
        self.has_text, self.is_space, self.is_name = all(have), any(spaces), any(names)
        return f"(?:{'|'.join(pattern for pattern, _ in made)})", made[0][1]

    def _repeat(self, least: int, most: int, items: Any, *, is_lazy: bool) -> tuple[str, str]:
        name = next(filter(None, reversed(self._group)), "")
        one = _one(str(items[0][0]), items[0][1]) if len(items) == 1 else None
        if one is None and (least, int(most)) == (0, 1):
            before = self.has_text, self.is_space, self.is_name
            pattern, _ = self.sequence(items)
            self.has_text = before[0]
            self.is_space, self.is_name = self.is_space or before[1], self.is_name or before[2]
            return f"(?:{pattern})?", ""
        if one is None:
            raise InexpressibleError(f"{self.what} repeats more than single characters")
        if name == "value" and one == _ANY and is_lazy:
            # What opens a value and what closes it are searched for one after the other.
            self.is_space, self.is_name = False, False
            return ".*?", ""
        holds_space = re.fullmatch(one, " ") or re.fullmatch(one, "\n")
        is_space = _is_space(str(items[0][0]), items[0][1])
        if is_space:
            if self.is_space or self.is_name:
                raise InexpressibleError(f"{self.what} has white space in a row")
            self.is_space = True
        elif int(most) > 1:
            self.num_names += 1
            if self.num_names > 1 or not self.has_text or (holds_space and self.is_space):
                raise InexpressibleError(f"{self.what} has runs that may take long to match")
            self.is_name, self.is_space = bool(holds_space), False
        limit = MAX_SPACE if is_space else MAX_NAME
        if least > limit:
            raise InexpressibleError(f"{self.what} has a long run")
        text = " " * least if is_space else ""
        return f"{one}{{{least},{min(int(most), limit)}}}" + "?" * is_lazy, text


def _one(kind: str, value: Any) -> str | None:
    """Return the expression of a single character; None for anything else."""
    match kind:
        case "LITERAL":
            return re.escape(chr(value))
        case "NOT_LITERAL":
            return f"[^{re.escape(chr(value))}]"
        case "ANY":
            return _ANY
        case "IN":
            parts = [_in_class(str(each), it) for each, it in value]
            return f"[{''.join(parts)}]"
    return None


def _in_class(kind: str, value: Any) -> str:
    match kind:
        case "NEGATE":
            return "^"
        case "LITERAL":
            return re.escape(chr(value))
        case "RANGE":
            return "-".join(re.escape(chr(each)) for each in value)
        case "CATEGORY":
            return _CLASSES[str(value)]
    raise InexpressibleError("a set of characters is not a plain one")


def _is_space(kind: str, value: Any) -> bool:
    if kind == "LITERAL":
        return chr(value).isspace()
    return kind == "IN" and all(
        str(it) == "CATEGORY_SPACE" if str(each) == "CATEGORY" else _is_space(str(each), it)
        for each, it in value
    )


def _is_space_run(item: Any) -> bool:
    kind, value = item
    if str(kind) not in ("MAX_REPEAT", "MIN_REPEAT"):
        return False
    return len(value[2]) == 1 and _is_space(str(value[2][0][0]), value[2][0][1])


def _texts(items: Sequence[Any], groups: Mapping[int, str]) -> list[str] | None:
    """Return the texts that a sequence matches.

    Returns:
        None if there are too many, or if it has runs or one of these groups.
    """
    found = [""]
    for kind, value in items:
        new: list[str] | None = None
        match str(kind):
            case "LITERAL":
                new = [chr(value)]
            case "IN" if {str(each) for each, _ in value} == {"LITERAL"}:
                new = [chr(it) for _, it in value]  # alternatives of single characters
            case "SUBPATTERN" if value[0] not in groups and not (value[1] or value[2]):
                new = _texts(value[3], groups)
            case "BRANCH":
                each = [_texts(it, groups) for it in value[1]]
                new = None if None in each else [text for it in each for text in it or ()]
        if new is None or len(found) * len(new) > MAX_ALTERNATIVES:
            return None
        found = [before + text for before in found for text in new]
    return [*dict.fromkeys(found)]
