"""Filters of chains as people write them: `tier=disk,idle>1h,size>1GB,ns=1f9c`.

This module knows the fields of a chain, and how conditions on them are written. `ChainColumns`
compares and sorts all chains at once.
"""

import difflib
import operator
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tieredkv.errors import ConfigError
from tieredkv.operate.chain_ids import namespace_prefix
from tieredkv.types import Tier
from tieredkv.units import parse_bytes, parse_duration

if TYPE_CHECKING:
    from tieredkv.operate.columns import ChainColumns, Column, Labels

_CONDITION = re.compile(r"\s*(\w*)\s*(!=|>=|<=|>|<|=)\s*(.*?)\s*", re.DOTALL)


class Field(NamedTuple):
    """A field of a chain.

    Attributes:
        of: returns its values now.
        parse: reads a value that it is compared with.
        equals: for labels, whether one equals what is written; labels have no order.
    """

    of: "Callable[[ChainColumns, float], Labels | Column]"
    parse: Callable[[str], Any]
    equals: Callable[[Any, str], bool] | None = None


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"`{text}` is not a whole number")
    return int(text)


def _tier(text: str) -> Tier:
    if (name := text.lower()) not in [*Tier]:
        raise ConfigError(f"`{text}` is no tier; the tiers are {', '.join(Tier)}")
    return Tier(name)


FIELDS: Mapping[str, Field] = {
    "tier": Field(lambda it, _: it.tiers(), _tier, lambda tiers, name: name in tiers),
    "ns": Field(
        lambda it, _: it.labels(lambda kind: kind.namespace.hex()), namespace_prefix, str.startswith
    ),
    "model": Field(lambda it, _: it.models(), str, operator.eq),
    "retention": Field(lambda it, _: it.labels(lambda kind: kind.retention), str, operator.eq),
    "size": Field(lambda it, _: it.sums("bytes"), parse_bytes),
    "tokens": Field(lambda it, _: it.tokens(), _count),
    "blocks": Field(lambda it, _: it.sums("blocks"), _count),
    "hits": Field(lambda it, _: it.of_first("hits"), _count),
    "age": Field(lambda it, now: now - it.sums("computed_at_min"), parse_duration),
    "idle": Field(lambda it, now: now - it.of_last("last_used"), parse_duration),
    "expires": Field(lambda it, now: it.sums("expires_at_min") - now, parse_duration),
}
"""By their names. Durations count from now, and `ns` is compared with first digits."""


class Condition(NamedTuple):
    """One condition of a filter: how a field is compared, and with what."""

    field: Field
    sign: str
    value: Any


class ChainFilter:
    """Conditions that all have to hold.

    Args:
        text: conditions with commas between them; "" for none.

    Raises:
        ConfigError: a condition is none, its field is unknown (the nearest one is named), or its
            value is not one of that field.
    """

    def __init__(self, text: str) -> None:
        self.conditions = [_parse(part) for part in text.split(",")] if text else []


class Order:
    """How chains are sorted; those whose value is not known come last.

    Args:
        text: a field, with a `-` before it for the largest first; "" for the last used first.

    Raises:
        ConfigError: there is no such field.
    """

    def __init__(self, text: str) -> None:
        self.field = _field(text.removeprefix("-"), "list") if text else None
        self.sign = -1 if text.startswith("-") else 1


def _parse(part: str) -> Condition:
    match = _CONDITION.fullmatch(part)
    if match is None or not match[1] or not match[3]:
        what = f"`{part.strip()}` is no condition of a filter"
        raise ConfigError(f"{what}; write one such as `idle>1h`, `size>1GB` or `tier=disk`")
    name, sign, text = match.groups()
    field = _field(name, "filter")
    if field.equals is not None and sign not in ("=", "!="):
        raise ConfigError(f"`{part.strip()}`: `{name}` can only be compared with = or !=")
    try:
        return Condition(field, sign, field.parse(text))
    except ConfigError as error:
        raise ConfigError(f"`{part.strip()}`: {error}") from None


def _field(name: str, what: str) -> Field:
    if (field := FIELDS.get(name)) is None:
        near = difflib.get_close_matches(name, [*FIELDS], n=1, cutoff=0.5)
        hint = f"did you mean `{near[0]}`?" if near else f"the fields are {', '.join(FIELDS)}"
        raise ConfigError(f"a {what} has no field `{name}`\nhint: {hint}")
    return field
