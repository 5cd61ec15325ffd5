"""What has changed between two requests of one tenant, so that a cached prefix was of no use.

Of what requests say only digests are kept.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from tieredkv.engine.engine_messages import RequestUsage

MAX_REQUESTS = 256
MAX_TENANTS = 256
MAX_SEGMENTS = 128
MASKED_CHARACTERS = 4096
MAX_TAILS = 32

_PASSING = re.compile(  # what begins with a digit; long words with one; names of days and months
    r"(?<![\w:.+-])(?:(?=[\w:.+-]{6})(?:(?!\d)[\w:.+-])*+)?\d[\w:.+-]*+"
    r"|\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun|Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
)
_KINDS = ("tools", "system", "messages", "input")


Part = tuple[str, Any, str]
"""A part of a prompt, as long as it is known: its kind, its text or JSON value, and its name."""


def digest(text: str) -> int:
    encoded = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little")


def tails_of(parts: Sequence[Part]) -> frozenset[bytes]:
    """Return digests of the first text or message from each of its first words on.

    Two that share one differ near the top and nowhere else, whatever was put in or left out there.
    """
    text = next((_text(value) for kind, value, _ in parts if kind != "tools"), "")
    words = re.finditer(r"\S+", text[: len(text) // 2])
    places = [word.start() for word in itertools.islice(words, MAX_TAILS)]
    found, hashed, end = [], hashlib.blake2b(digest_size=8), len(text)
    for place in reversed(places):  # backwards, so that each goes on from the one behind it
        hashed.update(text[place:end][::-1].encode("utf-8", "surrogatepass"))
        found.append(hashed.digest())
        end = place
    return frozenset(found)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


class Segment(NamedTuple):
    """A part of a prompt: its length in characters, and digests of it.

    Attributes:
        canonical: whatever the order of its JSON's keys.
        masked: whatever the numbers, ids and times near its top.
        name: for messages; not kept.
    """

    kind: str
    size: int
    raw: int
    canonical: int
    masked: int
    name: str = ""

    @classmethod
    def of(cls, kind: str, value: Any, name: str) -> "Segment":
        """Return what is kept of a text or a JSON value."""
        text = _text(value)
        ordered = text if isinstance(value, str) else json.dumps(value, sort_keys=True)
        masked = _PASSING.sub("#", text[:MASKED_CHARACTERS]) + text[MASKED_CHARACTERS:]
        return cls(kind, len(text), digest(text), digest(ordered), digest(masked), name)


def parts_of(
    tools: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]
) -> list[Part]:
    """Return the parts of a conversation in the order of its prompt."""
    parts: list[Part] = [("tools", tool, f"tool `{tool['function']['name']}`") for tool in tools]
    for i, message in enumerate(messages):
        kind = "system" if message["role"] == "system" else "messages"
        parts.append((kind, message, f"message {i}"))
    return parts


class Seen(NamedTuple):
    """What is kept of a request.

    Attributes:
        settings: digests of what else may be changed, by name; `namespace` is what its blocks are
            kept apart by, beside the tenant.
        tails: of its first text or message.
        tools: digests of its tools, whatever the order of their keys.
    """

    segments: Sequence[Segment] = ()
    num_tokens: int = 0
    settings: Mapping[str, int] = MappingProxyType({})
    tails: frozenset[bytes] = frozenset()
    tools: frozenset[int] = frozenset()

    @classmethod
    def of(cls, parts: Sequence[Part], num_tokens: int, settings: Mapping[str, Any]) -> "Seen":
        """Return what is kept of a prompt's parts, the late ones as one, and of what else may."""
        first, rest = parts[:MAX_SEGMENTS], [value for _, value, _ in parts[MAX_SEGMENTS:]]
        segments = [Segment.of(*part) for part in first]
        if rest:
            segments.append(Segment.of(first[-1][0], rest, "a later part"))
        digests = {name: digest(str(value)) for name, value in settings.items()}
        tools = frozenset(each.canonical for each in segments if each.kind == "tools")
        return cls(segments, num_tokens, digests, tails_of(parts), tools)

    def change_from(self, other: "Seen", index: int) -> tuple[str, bool]:
        """Return what has changed at a segment, and whether the rest is nearly the same."""
        now, before = self.segments[index], other.segments[index]
        has_moved = now.kind == "tools" and now.canonical in other.tools
        is_kept = before.kind == "tools" and before.canonical in self.tools
        is_first = now.kind != "tools" and (not index or self.segments[index - 1].kind == "tools")
        is_alike = bool(self.tails & other.tails)
        if now.canonical == before.canonical:
            return f"{now.name} changed: another order of JSON keys", True
        if now.masked == before.masked:
            return f"{now.name} changed: a request id, number or time near the top", True
        if has_moved and is_kept:
            return "the tools are in another order", True
        if before.kind == "tools" and (has_moved or now.kind != "tools"):
            return "a tool was removed", has_moved or is_alike
        if now.kind == "tools" and (is_kept or before.kind != "tools"):
            return f"{now.name} was added", is_kept or is_alike
        if is_first and is_alike:
            return f"{now.name} changed: something near the top, and nothing behind it", True
        return f"{now.name} changed", False

    def num_common(self, other: "Seen") -> int:
        """Return how many segments at the top are the same."""
        both = zip(self.segments, other.segments, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0].raw == pair[1].raw, both))

    def tokens_before(self, index: int) -> int:
        """Return about how many tokens lie before a segment."""
        sizes = [segment.size for segment in self.segments]
        return self.num_tokens * sum(sizes[:index]) // max(1, sum(sizes))


class Change(NamedTuple):
    """The first difference: its kind, where it is, and in words."""

    kind: str
    at_token: int
    detail: str | None = None


def change(old: Seen, new: Seen) -> Change | None:
    """Return what has changed in a prompt and its place; None if the one goes on from the other."""
    for name, kind in (("model", "model"), ("namespace", "prompt_cache_key")):
        if old.settings.get(name) != new.settings.get(name):
            return Change(kind, 0)
    index = old.num_common(new)
    if index == min(len(old.segments), len(new.segments)):
        return None
    before, now = old.segments[index], new.segments[index]
    kind, place = min(before.kind, now.kind, key=_KINDS.index), old.tokens_before(index)
    what, _ = new.change_from(old, index)
    return Change(kind, place, f"{what} (segment {index}, about token {place})")


class Diagnosis(NamedTuple):
    """One request beside earlier ones of its tenant.

    Attributes:
        compared_id: of the answer that the client wants it compared with.
        compared: the request behind that, where it is known.
    """

    seen: Seen = Seen()
    earlier: Sequence[Seen] = ()
    compared_id: str | None = None
    compared: Seen | None = None

    def miss(self, usage: RequestUsage) -> dict[str, Any]:
        """Return the reason of a miss, beside the latest of the requests that are most like it."""
        reason, detail = usage.miss_reason, None
        if reason == "never_seen" and (like := max(self.earlier, key=self._rank, default=None)):
            found = change(like, self.seen) if self._likeness(like) else None
            detail = found and found.detail
            if found and not detail:
                place = like.tokens_before(like.num_common(self.seen))
                names = {"model": "other_model", "prompt_cache_key": "other_namespace"}
                reason = names[found.kind] if place > usage.miss_token else reason
        return {"reason": reason, "at_token": usage.miss_token, "detail": detail}

    def compare(self, usage: RequestUsage) -> Change | None:
        """Return what has kept the request from the prefix of the one it is compared with.

        None if no comparison is wanted. The kind is `not_found` where the other is not known, `hit`
        where nothing has, `unavailable` where nothing has changed and nothing was found either.
        """
        if self.compared is None:
            return None if self.compared_id is None else Change("not_found", 0)
        found, is_new = change(self.compared, self.seen), usage.miss_reason == "never_seen"
        if usage.cached_tokens and (usage.miss_reason is None or (found is None and is_new)):
            return Change("hit", 0)
        if found and found.kind in _KINDS:  # what was reused of it is beyond doubt
            num_reused = min(usage.cached_tokens, self.compared.num_tokens - 1)
            return found._replace(at_token=max(found.at_token, num_reused))
        settings = dict(self.compared.settings.items() - self.seen.settings.items())
        return found or Change(min(settings, default="unavailable"), 0)

    def _likeness(self, other: Seen) -> float:
        index = other.num_common(self.seen)
        if index == min(len(self.seen.segments), len(other.segments)):
            return index
        return index + self.seen.change_from(other, index)[1] / 2

    def _rank(self, other: Seen) -> tuple[float, bool]:
        """Return what to compare with first: of two alike, the one whose blocks could be used."""
        namespaces = [each.settings.get("namespace") for each in (self.seen, other)]
        return self._likeness(other), namespaces[0] == namespaces[1]


NONE = Diagnosis()


class Diagnoses:
    """The latest requests of each tenant, by the ids of their answers."""

    def __init__(self) -> None:
        self._of: dict[str, dict[str, Seen]] = {}

    def add(self, tenant: str, id: str, seen: Seen, compared_id: str | None) -> Diagnosis:
        """Keep a request, and return it beside those before it, the latest first."""
        known = self._of[tenant] = self._of.pop(tenant, {})
        compared = known.get(compared_id or "")
        made = Diagnosis(seen, [*reversed(known.values())], compared_id, compared)
        known[id] = seen._replace(segments=[it._replace(name="") for it in seen.segments])
        if len(known) > MAX_REQUESTS:
            del known[next(iter(known))]
        if len(self._of) > MAX_TENANTS:
            del self._of[next(iter(self._of))]
        return made
