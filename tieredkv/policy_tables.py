"""Retention policies as settings name them: a table of a TOML file, or a list of policies."""

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from tieredkv.errors import ConfigError
from tieredkv.kinds import parse_at, plain
from tieredkv.retention import DEFAULT_POLICIES, RetentionPolicy
from tieredkv.types import Tier
from tieredkv.units import parse_duration

_KEYS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "idle": ("idle_s", parse_duration),
    "absolute": ("absolute_s", parse_duration),
    "tiers": ("tiers", plain(frozenset[Tier], f"a list of tiers, which are {', '.join(Tier)}")),
}
"""The field of a retention policy, and the function that reads it, by its key in a file."""


def read_policy(
    where: str, name: str, row: object, hint: Callable[[str, Iterable[str]], str]
) -> RetentionPolicy:
    """Return a policy; a row named like a default policy may leave out what it does not change.

    Args:
        where: the file and the table, for errors.
        name: of the policy.
        row: what the table has.
        hint: returns the end of an error for an unknown key, from the key and the known ones.

    Raises:
        ConfigError: a key is unknown or missing, or its value is malformed.
    """
    if not isinstance(row, dict):
        raise ConfigError(f"{where} must be a table with {', '.join(_KEYS)}")
    values: dict[str, Any] = {"name": name}
    values |= next((asdict(it) for it in DEFAULT_POLICIES if it.name == name), {})
    for key, value in row.items():
        if key not in _KEYS:
            raise ConfigError(f"{where}: unknown key `{key}`{hint(key, _KEYS)}")
        field, parse = _KEYS[key]
        values[field] = parse_at(f"{where[:-1]}.{key}`", parse, value)
    for key, (field, _) in _KEYS.items():
        if field not in values:
            raise ConfigError(f"{where} must have the key `{key}`")
    return RetentionPolicy(**values)


def check_policies(value: object) -> tuple[RetentionPolicy, ...]:
    """Return the policies of an argument.

    Raises:
        ConfigError: it is no list of policies, or an empty one.
    """
    rows = tuple(value) if isinstance(value, list | tuple) else ()
    if not rows or not all(isinstance(row, RetentionPolicy) for row in rows):
        raise ConfigError(f"`policies` = `{value}` must be a list of at least one RetentionPolicy")
    return rows
