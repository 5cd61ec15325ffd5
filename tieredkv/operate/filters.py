"""Filters of chains as people write them: `tier=disk,idle>1h,size>1GB,ns=1f9c`.

This module knows the fields of a chain, and how conditions on them are written. `ChainColumns` has
the values of all chains at once.
"""

import difflib
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tieredkv.errors import ConfigError
from tieredkv.operate.chain_ids import namespace_prefix
from tieredkv.types import Tier
from tieredkv.units import parse_bytes, parse_duration

_COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "=": operator.eq,
}
_CONDITION = re.compile(rf"\s*(\w*)\s*({'|'.join(_COMPARISONS)})\s*(.*?)\s*", re.DOTALL)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"`{text}` is not a whole number")
    return int(text)


def _tier(text: str) -> Tier:
    if (name := text.lower()) not in [*Tier]:
        raise ConfigError(f"`{text}` is no tier; the tiers are {', '.join(Tier)}")
    return Tier(name)


LABELS: Mapping[str, Callable[[Any, Any], bool]] = {
    "tier": operator.contains,
    "ns": str.startswith,
    "model": operator.eq,
    "retention": operator.eq,
}
"""Fields without an order, and whether a value of theirs equals what is written."""

FIELDS: Mapping[str, Callable[[str], Any]] = {
    "tier": _tier,
    "ns": namespace_prefix,
    "model": str,
    "retention": str,
    "size": parse_bytes,
    "tokens": _count,
    "blocks": _count,
    "hits": _count,
    **dict.fromkeys(("age", "idle", "expires"), parse_duration),
}
"""All fields, and how a value is read that one is compared with. Durations count from now."""


class Condition(NamedTuple):
    """How a field of a chain is compared, and with what."""

    field: str
    compare: Callable[[Any, Any], Any]
    value: Any


class Order(NamedTuple):
    """How chains are sorted; those whose value is not known come last.

    Attributes:
        field: "" for the last used first.
        sign: -1 for the largest first.
    """

    field: str = ""
    sign: int = 1


def parse_filter(text: str) -> list[Condition]:
    """Read conditions with commas between them, all of which have to hold; "" has none.

    Raises:
        ConfigError: a condition is none, its field is unknown (the nearest one is named), or its
            value is not one of that field.
    """
    return [_condition(part) for part in text.split(",")] if text else []


def parse_order(text: str) -> Order:
    """Read a field, with a `-` before it for the largest first.

    Raises:
        ConfigError: there is no such field.
    """
    name = text.removeprefix("-")
    return Order(_known(name, "list"), 1 if text == name else -1) if text else Order()


def _condition(part: str) -> Condition:
    match = _CONDITION.fullmatch(part)
    if match is None or not match[1] or not match[3]:
        what = f"`{part.strip()}` is no condition of a filter"
        raise ConfigError(f"{what}; write one such as `idle>1h`, `size>1GB` or `tier=disk`")
    name, sign, text = match.groups()
    field = _known(name, "filter")
    if field in LABELS and sign not in ("=", "!="):
        raise ConfigError(f"`{part.strip()}`: `{name}` can only be compared with = or !=")
    try:
        return Condition(field, _COMPARISONS[sign], FIELDS[field](text))
    except ConfigError as error:
        raise ConfigError(f"`{part.strip()}`: {error}") from None


def _known(name: str, what: str) -> str:
    if name not in FIELDS:
        near = difflib.get_close_matches(name, [*FIELDS], n=1, cutoff=0.5)
        hint = f"did you mean `{near[0]}`?" if near else f"the fields are {', '.join(FIELDS)}"
        raise ConfigError(f"a {what} has no field `{name}`\nhint: {hint}")
    return name
