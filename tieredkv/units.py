"""Sizes, durations and foreign names as people read them: `80GiB`, `24h`."""

import contextlib
import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from tieredkv.errors import ConfigError

_BYTES = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _BYTES |= {f"{_letter}b": 1000**_power}
    _BYTES |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power}
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800, "ms": Fraction(1, 1000)}
_NUMBER_AND_UNIT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


def _parse(value: object, units: Mapping[str, Any]) -> Fraction | None:
    """Return the exact value of a number with a unit; None if `value` is not one."""
    match = _NUMBER_AND_UNIT.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2].lower() not in units:
        return None
    return Fraction(match[1]) * Fraction(units[match[2].lower()])


def parse_bytes(value: str | int) -> int:
    """Return a size in bytes, from a text such as `"64MiB"` or `"1GB"`, or from a number of bytes.

    Raises:
        ConfigError: the value is not a size.
    """
    size = value if type(value) is int else _parse(value, _BYTES)
    if size is None:
        raise ConfigError(f"`{value}` is not a size; write one such as `64MiB`, `80GiB` or `1GB`")
    return int(size)


def format_bytes(num_bytes: int) -> str:
    """Return a size for people, in binary units: `1.5 GiB`."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def parse_duration(value: str | float) -> float:
    """Return a duration in seconds, from a text such as `"90s"` or `"7d"`, or from a number.

    Raises:
        ConfigError: the value is not a duration.
    """
    seconds: Any = value if type(value) in (int, float) else _parse(value, _SECONDS)
    with contextlib.suppress(TypeError, OverflowError):
        if math.isfinite(found := float(seconds)):
            return found
    raise ConfigError(f"`{value}` is not a duration; write one such as `90s`, `15m` or `24h`")


def format_duration(seconds: float) -> str:
    """Return a duration for people, its two largest units: `1d 4h`, `1m 30s`, `0.5s`."""
    left = round(seconds)
    if left < 60:
        return f"{seconds:.3g}s"
    parts = []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2])


def printable(text: str) -> str:
    """Return a text from outside, such as a file's name, with escapes for control characters."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
