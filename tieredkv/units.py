"""Sizes and durations as people write them, and back.

Knows units only; which sizes and durations make sense is config's business.
"""

import re
from fractions import Fraction

from tieredkv.errors import ConfigError

_BYTES_PER_UNIT = {"b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgtp", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_SECONDS_PER_UNIT = {
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}
_NUMBER = r"([0-9]{1,30}(?:\.[0-9]{1,30})?)"
_SIZE = re.compile(rf"{_NUMBER}\s*([kmgtp]?i?b)?", re.IGNORECASE)
_DURATION = re.compile(rf"(?:{_NUMBER}\s*(?:ms|s|m|h|d)\s*)+|{_NUMBER}")
_DURATION_PART = re.compile(rf"{_NUMBER}\s*(ms|s|m|h|d)?")


def parse_bytes(value: str | int) -> int:
    """Return the bytes meant by a text such as `80GiB`, `1.5 MiB` or `4096`, rounded down.

    GiB is 2^30, GB is 10^9; case does not matter; a bare number is bytes.

    Raises:
        ConfigError: not a size; the message shows the value.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        unit = (match[2] or "b").lower() if match else ""
        if match and unit in _BYTES_PER_UNIT:
            return int(Fraction(match[1]) * _BYTES_PER_UNIT[unit])
    raise ConfigError(f"{value!r} is not a size; write bytes, or for example '64MiB' or '2GB'")


def format_bytes(num_bytes: int) -> str:
    """Return a size for people, such as `1.5 GiB`."""
    size, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(round(size, 1)) < 1024:
            break
        size /= 1024 if unit != "PiB" else 1
    return f"{size:.1f}".removesuffix(".0") + f" {unit}"


def exact_bytes(num_bytes: int) -> str:
    """Return the shortest text that `parse_bytes` reads back as exactly `num_bytes`."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes and num_bytes % (1 << power) == 0:
            return f"{num_bytes >> power}{unit}"
    return str(num_bytes)


def parse_duration(value: str | float) -> float:
    """Return the seconds meant by a text such as `500ms`, `20s`, `1h30m` or `7d`.

    A bare number is seconds.

    Raises:
        ConfigError: not a duration; the message shows the value.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e15:
        return float(value)
    if isinstance(value, str) and _DURATION.fullmatch(value.strip()):
        parts = _DURATION_PART.findall(value)
        return float(sum(Fraction(n) * _SECONDS_PER_UNIT[unit or "s"] for n, unit in parts))
    raise ConfigError(f"{value!r} is not a duration; write seconds, or for example '20s' or '24h'")


def format_duration(seconds: float) -> str:
    """Return a duration for people, such as `250ms`, `20s`, `1h 30m` or `7d`."""
    milliseconds = round(seconds * 1000)
    if abs(milliseconds) < 1000:
        return f"{milliseconds}ms" if milliseconds else "0s"
    if abs(milliseconds) < 9950:
        return f"{milliseconds / 1000:.1f}".removesuffix(".0") + "s"
    sign, rest = "-" if seconds < 0 else "", abs(round(seconds))
    # Days begin where hours stop being read at a glance: `24h` stays, as the policy is called.
    units = [("d", 86400)] if rest >= 2 * 86400 else []
    parts = []
    for unit, length in [*units, ("h", 3600), ("m", 60), ("s", 1)]:
        count, rest = divmod(rest, length)
        if count:
            parts.append(f"{count}{unit}")
        elif parts:
            break
    return sign + " ".join(parts[:2])
