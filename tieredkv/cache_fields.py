"""What a request asks of the cache, in the fields of all APIs and of the dialects that clients use.

    prompt_cache_retention     OpenAI's bodies             retention policy of the request
    prompt_cache_options       OpenAI's bodies             lifetime of the whole prompt
    prompt_cache_breakpoint    parts of messages, items    lifetime of the prompt up to its end
    cache_control              these, blocks, messages,    lifetime of the prompt up to its end
                               items, tools, all bodies

A lifetime (`ttl`) is any duration that a retention policy covers. The types of the server's
requests have these fields; the middleware for vLLM, which has no such types, looks for breakpoints
with `breakpoints_of`.

This module knows fields, durations and policies. It does not know prompts, HTTP or vLLM.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator
from pydantic_core import PydanticKnownError

from tieredkv.engine.engine_messages import Claim
from tieredkv.errors import ConfigError, RequestError
from tieredkv.fields import MAX_DEPTH, Object, path_of, read
from tieredkv.retention import RetentionPolicies, RetentionPolicy
from tieredkv.units import format_duration, parse_duration

OPTIONS_TTL = "30m"
"""The lifetime of `prompt_cache_options`, and of their breakpoints, where none is given."""

CONTROL, BREAKPOINT = "cache_control", "prompt_cache_breakpoint"
PLACES = ("tools", "functions", "system", "messages", "input")
"""The fields of a body that may hold breakpoints."""

_INNER = ("function", "tools", "content", "output", "source")
"""The members in which a tool, a message, an item or a block holds others with breakpoints."""

_MAX_TTL_CHARACTERS = 32


def seconds_of(ttl: str) -> float | None:
    """Return a duration in seconds; None if the text is no duration above zero with a unit."""
    if len(ttl) <= _MAX_TTL_CHARACTERS and not ttl.strip()[-1:].isdigit():
        with contextlib.suppress(ConfigError):
            return parse_duration(ttl) or None
    return None


def _check_ttl(ttl: str) -> str:
    if seconds_of(ttl) is None:
        expected = "durations such as '5m', '1h' and '24h'"
        raise PydanticKnownError("literal_error", {"expected": expected})
    return ttl


Ttl = Annotated[str, AfterValidator(_check_ttl)]


class Lifetime(NamedTuple):
    """How long a prefix is to be kept at least.

    Attributes:
        place: the path of what has the field; empty for the body.
        field: the field that says so.
        ttl: the duration; None for the one that `prompt_cache_options` have.
    """

    place: str
    field: str
    ttl: str | None

    @property
    def path(self) -> str:
        """The path of the duration in the body."""
        return f"{self.place}.{self.field}.ttl".removeprefix(".")


class CacheControl(Object):
    """A breakpoint of Anthropic's API, which other APIs have taken over."""

    type: Literal["ephemeral"]
    ttl: Ttl = "5m"


class Breakpoint(Object):
    """A breakpoint of OpenAI's API."""

    mode: Literal["explicit"]
    ttl: Ttl | None = None


class CacheOptions(Object):
    """How long the prompt is kept at least, and whether it is kept without a breakpoint."""

    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: Ttl = OPTIONS_TTL


class Controlled(Object):
    """An object that may have a `cache_control` at its end."""

    cache_control: CacheControl | None = None

    def lifetime(self, place: str) -> Lifetime | None:
        """Return how long the prompt up to here is kept; None without a breakpoint.

        Args:
            place: the path of this object in the body.
        """
        return Lifetime(place, CONTROL, self.cache_control.ttl) if self.cache_control else None


class Marked(Controlled):
    """An object that may have a breakpoint of either API; where it has both, OpenAI's counts."""

    prompt_cache_breakpoint: Breakpoint | None = None

    def lifetime(self, place: str) -> Lifetime | None:
        """Return how long the prompt up to here is kept; None without a breakpoint."""
        at = self.prompt_cache_breakpoint
        return Lifetime(place, BREAKPOINT, at.ttl) if at else super().lifetime(place)


class CacheFields(Controlled):
    """The fields at the top of OpenAI's bodies; `cache_control` is one for the whole prompt."""

    prompt_cache_retention: str | None = None
    prompt_cache_options: CacheOptions | None = None

    @property
    def is_explicit(self) -> bool:
        """Whether only what has a breakpoint is kept."""
        options = self.prompt_cache_options
        return options is not None and options.mode == "explicit"

    @property
    def of_options(self) -> Lifetime:
        """The lifetime of breakpoints that have none of their own."""
        options = self.prompt_cache_options
        return Lifetime("", "prompt_cache_options", options.ttl if options else OPTIONS_TTL)

    @property
    def of_whole(self) -> list[Lifetime]:
        """How long the whole prompt is to be kept, as each field says that asks for it."""
        asked = [self.of_options] if self.prompt_cache_options and not self.is_explicit else []
        at = self.lifetime("")
        return [*asked, at] if at else asked


def breakpoints_of(body: Mapping[str, Any]) -> Iterator[Lifetime]:
    """Yield the breakpoints of a decoded body of any API, but for one at its top, in their order.

    Raises:
        RequestError: one of them makes no sense.
    """
    for name in PLACES:
        yield from _within((name,), body.get(name))


def _within(path: tuple[str | int, ...], value: Any) -> Iterator[Lifetime]:
    if len(path) > MAX_DEPTH:
        raise RequestError("The JSON body of your request is nested too deeply.")
    if isinstance(value, list):
        for i, each in enumerate(value):
            yield from _within((*path, i), each)
    elif isinstance(value, dict):
        for name in _INNER:
            if isinstance(value.get(name), list | dict):
                yield from _within((*path, name), value[name])
        given = {name: value[name] for name in (CONTROL, BREAKPOINT) if name in value}
        if given and (at := read(Marked, given, at=path).lifetime(path_of(path))):
            yield at


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """The retention policies that the requests of one API key may have.

    Attributes:
        policies: those that a request may ask for.
        default: the policy of a request that asks for none.
        withheld: the names of the server's other policies.
        has_disk: whether there is a disk tier.
        is_strict: whether alternative spellings are refused.
    """

    policies: RetentionPolicies
    default: RetentionPolicy
    withheld: frozenset[str]
    has_disk: bool
    is_strict: bool = False

    def named(self, name: str | None) -> RetentionPolicy:
        """Return the policy that a request names, or the default.

        Raises:
            RequestError: there is none of this name, or the key may not name it.
        """
        if name is None:
            return self.default
        if name in self.withheld:
            text = f"This API key does not allow '{name}' prompt caching."
            raise RequestError(text, param="prompt_cache_retention", code="invalid_parameter")
        return self.policies.get(name, is_strict=self.is_strict)

    def claim(
        self, wanted: Lifetime, own: RetentionPolicy | None = None, end_token: int = 0
    ) -> Claim:
        """Return a claim that keeps a prefix for at least a lifetime.

        If the request's own policy does not last so long, the shortest one counts that does; it may
        be one of the disk if there is a disk.

        Args:
            wanted: the lifetime.
            own: the policy of the request; None for the one that the duration names, as in
                Anthropic's API.
            end_token: the end of the prefix.

        Raises:
            RequestError: no policy lasts that long.
        """
        ttl = wanted.ttl or OPTIONS_TTL
        lifetime_s, all_policies = seconds_of(ttl), self._all
        assert lifetime_s is not None, f"`{ttl}` was checked"
        if own is None:
            own = next((each for each in all_policies if each.name == ttl), None)
        usable = [each for each in all_policies if self.has_disk or not each.may_use_disk]
        usable = [own, *usable] if own else usable
        policy = next((each for each in usable if each.absolute_s >= lifetime_s), None)
        if policy is None:
            raise _not_covered(wanted.path, ttl, usable)
        return Claim(end_token=end_token, retention=policy.name, pin_s=lifetime_s)

    @property
    def briefest(self) -> RetentionPolicy:
        """The shortest policy that keeps off the disk, if one does, and that requests may name."""
        return min(self._all, key=lambda each: (each.may_use_disk, not each.is_public))

    @property
    def _all(self) -> list[RetentionPolicy]:
        """All policies, the shortest first."""
        found = [self.policies.get(name, is_any=True) for name in self.policies.names]
        return sorted(found, key=_length)


def _length(policy: RetentionPolicy) -> tuple[float, float, bool, str]:
    return policy.absolute_s, policy.idle_s, not policy.is_public, policy.name


def _not_covered(path: str, ttl: str, usable: Iterable[RetentionPolicy]) -> RequestError:
    """Return the error for a duration that none of these policies covers."""
    lasting = {each.name: each.absolute_s for each in usable}
    most = format_duration(max(lasting.values(), default=0.0))
    told = ", ".join(f"'{name}' {format_duration(each)}" for name, each in lasting.items())
    text = f"Invalid value: '{ttl}'. Supported values are: durations up to '{most}'."
    text = f"{text} The retention policies that may be used here last: {told}."
    return RequestError(text, param=path, code="invalid_value")
