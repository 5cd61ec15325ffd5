"""Find what changed between two requests of one tenant and caused a cache miss.

Only digests of the requests are kept, not their texts.
"""

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import msgspec

from tieredkv.cache.miss_reasons import COMPUTED_SOONER
from tieredkv.engine.engine_messages import RequestUsage

MAX_REQUESTS = 256
MAX_TENANTS = 256
MAX_SEGMENTS = 128
MASKED_CHARACTERS = 4096
MAX_TAILS = 32

_PASSING = re.compile(  # words that begin with a digit; long words with a digit; days and months
    r"(?<![\w:.+-])(?:(?=[\w:.+-]{6})(?:(?!\d)[\w:.+-])*+)?\d[\w:.+-]*+"
    r"|\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun|Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
)
_OF_OTHERS = ("never_seen", "behind_lookback", "no_anchor")
"""The reasons that a change since an earlier request may explain: its blocks are others, so that a
hit would have to end before the change, where none may if that is too far back."""

_OF_TEMPLATES = {
    "time": "the date or time that the chat template prints is another one",
    "arguments": "the chat template was given other arguments",
}
"""Reasons and texts for differences that are no parts of a prompt."""

_KINDS = ("tools", "system", "messages", "input")


PromptPart = tuple[str, Any, str]
"""A part of a prompt before it is reduced to digests: its kind, its text or JSON, its name."""


def digest(text: str) -> int:
    encoded = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little")


def tails_of(parts: Sequence[PromptPart]) -> frozenset[bytes]:
    """Return digests of the ends of the first text or message, one from each of its first words on.

    If two texts share a digest, they differ only near the top, even if words were added or removed
    there.
    """
    text = next((_text(value) for kind, value, _ in parts if kind != "tools"), "")
    words = re.finditer(r"\S+", text[: len(text) // 2])
    places = [word.start() for word in itertools.islice(words, MAX_TAILS)]
    found, hashed, end = [], hashlib.blake2b(digest_size=8), len(text)
    for place in reversed(places):  # Backwards, so that each digest extends the one before.
        hashed.update(text[place:end][::-1].encode("utf-8", "surrogatepass"))
        found.append(hashed.digest())
        end = place
    return frozenset(found)


def _text(value: Any, *, is_ordered: bool = False) -> str:
    """Return a text as it is, or JSON with a space behind each comma and colon.

    NOTE: `json.dumps` holds the interpreter's lock for 2.4 ms for 33,000 token ids; msgspec holds
    it for 0.8 ms.
    """
    if isinstance(value, str):
        return value
    order: Literal["sorted"] | None = "sorted" if is_ordered else None
    return msgspec.json.format(msgspec.json.encode(value, order=order), indent=0).decode()


class Segment(NamedTuple):
    """The length of a part of a prompt in characters, and digests of the part.

    Attributes:
        raw: the digest of the text as it is.
        canonical: the digest with JSON keys sorted.
        masked: the digest with numbers, ids and times near the top masked.
        name: how a diagnosis calls the part; it is not kept.
    """

    kind: str
    size: int
    raw: int
    canonical: int
    masked: int
    name: str = ""

    @classmethod
    def of(cls, kind: str, value: Any, name: str) -> "Segment":
        """Return the length and digests of a text or a JSON value."""
        text = _text(value)
        ordered = _text(value, is_ordered=True)
        masked = _PASSING.sub("#", text[:MASKED_CHARACTERS]) + text[MASKED_CHARACTERS:]
        return cls(kind, len(text), digest(text), digest(ordered), digest(masked), name)


def parts_of(
    tools: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]
) -> list[PromptPart]:
    """Return the parts of a conversation in the order of its prompt."""
    parts: list[PromptPart] = [
        ("tools", tool, f"tool `{tool['function']['name']}`") for tool in tools
    ]
    for i, message in enumerate(messages):
        kind = "system" if message["role"] == "system" else "messages"
        parts.append((kind, message, f"message {i}"))
    return parts


class Seen(NamedTuple):
    """The digests and the length that are kept of a request.

    Attributes:
        settings: digests of other fields whose change can explain a miss, by name; `namespace` is
            the salt and cache key that separate its blocks from others of the same tenant.
        tails: the digests from `tails_of`.
        tools: the digests of its tools with JSON keys sorted.
        template: digests of what the chat template was given beside messages and tools, by name.
    """

    segments: Sequence[Segment] = ()
    num_tokens: int = 0
    settings: Mapping[str, int] = MappingProxyType({})
    tails: frozenset[bytes] = frozenset()
    tools: frozenset[int] = frozenset()
    template: Mapping[str, int] = MappingProxyType({})

    @classmethod
    def of(
        cls,
        parts: Sequence[PromptPart],
        num_tokens: int,
        settings: Mapping[str, Any],
        template: Mapping[str, Any] = MappingProxyType({}),
    ) -> "Seen":
        """Return the digests of a prompt's parts, of its settings and for its template.

        All parts after the first `MAX_SEGMENTS` are kept as one segment.
        """
        first, rest = parts[:MAX_SEGMENTS], [value for _, value, _ in parts[MAX_SEGMENTS:]]
        segments = [Segment.of(*part) for part in first]
        if rest:
            segments.append(Segment.of(first[-1][0], rest, "a later part"))
        digests, given = (
            {name: digest(str(value)) for name, value in each.items()}
            for each in (settings, template)
        )
        tools = frozenset(each.canonical for each in segments if each.kind == "tools")
        return cls(segments, num_tokens, digests, tails_of(parts), tools, given)

    def change_from(self, other: "Seen", index: int) -> tuple[str, bool]:
        """Return what changed at a segment, and whether the rest is nearly the same."""
        now, before = self.segments[index], other.segments[index]
        has_moved = now.kind == "tools" and now.canonical in other.tools
        is_kept = before.kind == "tools" and before.canonical in self.tools
        is_first = now.kind != "tools" and (not index or self.segments[index - 1].kind == "tools")
        is_alike = bool(self.tails & other.tails)
        if now.canonical == before.canonical:
            return f"{now.name} changed: its JSON keys are in another order", True
        if now.masked == before.masked:
            return f"{now.name} changed: an id, number or time near its start differs", True
        if has_moved and is_kept:
            return "the tools are in another order", True
        if before.kind == "tools" and (has_moved or now.kind != "tools"):
            return "a tool was removed", has_moved or is_alike
        if now.kind == "tools" and (is_kept or before.kind != "tools"):
            return f"{now.name} was added", is_kept or is_alike
        if is_first and is_alike:
            return f"{now.name} changed: only something near its start differs", True
        return f"{now.name} changed", False

    def changed_for(self, other: "Seen") -> frozenset[str]:
        """Return what their chat template was given that differs, by its name."""
        return frozenset(dict(self.template.items() ^ other.template.items()))

    def num_common(self, other: "Seen") -> int:
        """Return how many segments from the top are the same in both requests."""
        both = zip(self.segments, other.segments, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0].raw == pair[1].raw, both))

    def tokens_before(self, index: int) -> int:
        """Return an estimate of how many tokens come before a segment."""
        sizes = [segment.size for segment in self.segments]
        return self.num_tokens * sum(sizes[:index]) // max(1, sum(sizes))


class Change(NamedTuple):
    """The first difference between two requests: its kind, its place, and a text about it."""

    kind: str
    at_token: int
    detail: str | None = None


def change(old: Seen, new: Seen) -> Change | None:
    """Return the first change between two requests, or None if one prompt continues the other."""
    if old.settings.get("namespace") != new.settings.get("namespace"):
        return Change("prompt_cache_key", 0)
    index = old.num_common(new)
    if index == min(len(old.segments), len(new.segments)):
        return None
    before, now = old.segments[index], new.segments[index]
    kind, place = min(before.kind, now.kind, key=_KINDS.index), old.tokens_before(index)
    what, _ = new.change_from(old, index)
    return Change(kind, place, f"{what} (segment {index}, about token {place})")


class Diagnosis(NamedTuple):
    """The comparison of one request with earlier requests of its tenant.

    Attributes:
        seen: the request.
        earlier: the earlier requests, the latest first.
        compared_id: the id of the answer that the client wants the request compared with.
        compared: the request for that answer, if it is still known.
    """

    seen: Seen = Seen()
    earlier: Sequence[Seen] = ()
    compared_id: str | None = None
    compared: Seen | None = None

    def miss(self, usage: RequestUsage) -> dict[str, Any]:
        """Return the reason of a miss, compared with the most similar earlier request.

        Of several requests that are equally similar, the latest is used.
        """
        reason, detail = usage.miss_reason, None
        is_new = reason in _OF_OTHERS
        like = max(self.earlier, key=self._rank, default=None) if is_new else None
        if like is not None and self._likeness(like):
            found = change(like, self.seen)
            detail = found and found.detail
            is_same = like.tokens_before(like.num_common(self.seen)) > usage.miss_token
            if is_same and reason == "never_seen":  # though messages and tools are the same so far
                if found and not detail:
                    reason = "other_namespace"
                elif others := [it for it in _OF_TEMPLATES if it in like.changed_for(self.seen)]:
                    reason, detail = "template_changed", _OF_TEMPLATES[others[0]]
        return {"reason": reason, "at_token": usage.miss_token, "detail": detail}

    def compare(self, usage: RequestUsage) -> Change | None:
        """Return why the request could not reuse the prefix of the request it is compared with.

        The result is None if no comparison is wanted. Its kind is `not_found` if the other request
        is not known, `hit` if the prefix was in the cache, and `unavailable` if nothing changed and
        yet it was not.
        """
        if self.compared is None:
            return None if self.compared_id is None else Change("not_found", 0)
        found, is_new = change(self.compared, self.seen), usage.miss_reason == "never_seen"
        if usage.miss_reason == COMPUTED_SOONER:  # all of it was in the cache
            return Change("hit", 0)
        if usage.cached_tokens and (usage.miss_reason is None or (found is None and is_new)):
            return Change("hit", 0)
        if found and found.kind in _KINDS:  # Reused tokens cannot have changed.
            num_reused = min(usage.cached_tokens, self.compared.num_tokens - 1)
            return found._replace(at_token=max(found.at_token, num_reused))
        settings = dict(self.compared.settings.items() - self.seen.settings.items())
        return found or Change(min(settings, default="unavailable"), 0)

    def _likeness(self, other: Seen) -> float:
        index = other.num_common(self.seen)
        if index == min(len(self.seen.segments), len(other.segments)):
            return index
        return index + self.seen.change_from(other, index)[1] / 2

    def _rank(self, other: Seen) -> tuple[float, bool, bool]:
        """Return a sort key for earlier requests: similarity, equal namespace, equal template."""
        namespaces = [each.settings.get("namespace") for each in (self.seen, other)]
        is_same = self.seen.template == other.template
        return self._likeness(other), namespaces[0] == namespaces[1], is_same


NONE = Diagnosis()


class Diagnoses:
    """The latest requests of each tenant, by the id of the answer."""

    def __init__(self) -> None:
        self._of: dict[str, dict[str, Seen]] = {}

    def add(self, tenant: str, id: str, seen: Seen, compared_id: str | None) -> Diagnosis:
        """Keep a request, and return its comparison with the requests before it."""
        known = self._of[tenant] = self._of.pop(tenant, {})
        compared = known.get(compared_id or "")
        made = Diagnosis(seen, [*reversed(known.values())], compared_id, compared)
        known[id] = seen._replace(segments=[it._replace(name="") for it in seen.segments])
        if len(known) > MAX_REQUESTS:
            del known[next(iter(known))]
        if len(self._of) > MAX_TENANTS:
            del self._of[next(iter(self._of))]
        return made
