"""Filters of chains as people write them: `tier=disk,idle>1h,size>1GB,ns=1f9c`.

This module knows the fields of a chain, and how they are compared and sorted, for all chains at
once.
"""

import difflib
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tieredkv.errors import ConfigError
from tieredkv.operate.chain_ids import namespace_prefix
from tieredkv.operate.columns import ChainColumns, Labels
from tieredkv.types import Tier
from tieredkv.units import parse_bytes, parse_duration

_ORDERS: Mapping[str, Callable[[Any, Any], Any]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "=": operator.eq,
}
_CONDITION = re.compile(r"\s*(\w*)\s*(!=|>=|<=|>|<|=)\s*(.*?)\s*", re.DOTALL)


Numbers = NDArray[np.float64]
"""[num_chains]; NaN where it is not known."""


class Field(NamedTuple):
    """A field of a chain.

    Attributes:
        of: returns its values now.
        parse: reads a value that it is compared with.
        equals: for labels, whether one equals what is written; labels have no order.
    """

    of: Callable[[ChainColumns, float], Labels | NDArray[Any]]
    parse: Callable[[str], Any]
    equals: Callable[[Any, str], bool] | None = None

    def numbers(self, chains: ChainColumns, now: float) -> Numbers:
        """Return numbers in the order of its values."""
        values = self.of(chains, now)
        if isinstance(values, Labels):
            ranks = {repr(name): rank for rank, name in enumerate(sorted(values.names))}
            values = np.array([ranks[repr(name)] for name in values.names] or [0])[values.codes]
        return np.asarray(values, np.float64)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"`{text}` is not a whole number")
    return int(text)


def _tier(text: str) -> Tier:
    if (name := text.lower()) not in [*Tier]:
        raise ConfigError(f"`{text}` is no tier; the tiers are {', '.join(Tier)}")
    return Tier(name)


FIELDS: Mapping[str, Field] = {
    "tier": Field(lambda chain, _: chain.tiers, _tier, lambda tiers, name: name in tiers),
    "ns": Field(lambda chain, _: chain.namespace, namespace_prefix, str.startswith),
    "model": Field(lambda chain, _: chain.model, str, operator.eq),
    "retention": Field(lambda chain, _: chain.retention, str, operator.eq),
    "size": Field(lambda chain, _: chain.bytes, parse_bytes),
    "tokens": Field(lambda chain, _: chain.tokens, _count),
    "blocks": Field(lambda chain, _: chain.blocks, _count),
    "hits": Field(lambda chain, _: chain.hits, _count),
    "age": Field(lambda chain, now: now - chain.computed_at_min, parse_duration),
    "idle": Field(lambda chain, now: now - chain.last_used, parse_duration),
    "expires": Field(lambda chain, now: chain.expires_at_min - now, parse_duration),
}
"""By their names. Durations count from now, and `ns` is compared with first digits."""


class Condition(NamedTuple):
    """One condition of a filter: how a field is compared, and with what."""

    field: str
    sign: str
    value: Any

    def holds(self, chains: ChainColumns, now: float) -> NDArray[np.bool]:
        """Return for which chains it holds; not for those whose value is not known."""
        field = FIELDS[self.field]
        values = field.of(chains, now)
        if isinstance(values, Labels):
            assert field.equals is not None, "labels are compared by it"
            equal = [field.equals(name, self.value) for name in values.names]
            holds = np.array(equal, bool)[values.codes]
        else:
            compare: Callable[[Any, Any], Any] = _ORDERS.get(self.sign, operator.eq)
            holds = compare(values, self.value)
        is_known = ~np.isnan(field.numbers(chains, now))
        return np.asarray(is_known & (holds != (self.sign == "!=")), bool)


class ChainFilter:
    """Conditions that all have to hold.

    Args:
        text: conditions with commas between them; "" for none.

    Raises:
        ConfigError: a condition is none, its field is unknown (the nearest one is named), or its
            value is not one of that field.
    """

    def __init__(self, text: str) -> None:
        parts = text.split(",") if text else []
        self.conditions = [_parse(part) for part in parts]

    def matches(self, chains: ChainColumns, now: float) -> NDArray[np.bool]:
        """Return which chains match."""
        is_match = np.ones(len(chains), bool)
        for condition in self.conditions:
            is_match &= condition.holds(chains, now)
        return is_match


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
        return Condition(name, sign, field.parse(text))
    except ConfigError as error:
        raise ConfigError(f"`{part.strip()}`: {error}") from None


def _field(name: str, what: str) -> Field:
    if (field := FIELDS.get(name)) is None:
        near = difflib.get_close_matches(name, [*FIELDS], n=1, cutoff=0.5)
        hint = f"did you mean `{near[0]}`?" if near else f"the fields are {', '.join(FIELDS)}"
        raise ConfigError(f"a {what} has no field `{name}`\nhint: {hint}")
    return field


class Order:
    """How chains are sorted; those whose value is not known come last.

    Args:
        text: a field, with a `-` before it for the largest first.

    Raises:
        ConfigError: there is no such field.
    """

    def __init__(self, text: str) -> None:
        self._field = _field(text.removeprefix("-"), "list")
        self._sign = -1 if text.startswith("-") else 1

    def places(self, chains: ChainColumns, now: float) -> NDArray[np.intp]:
        """Return the places of all chains in this order; equal ones stay in theirs."""
        return np.argsort(self._sign * self._field.numbers(chains, now), kind="stable")
