"""Kinds of settings: how their values are read, shown and described to people.

A kind follows from the type of a field. This module knows no setting by name.
"""

import json
import math
import os
import re
import sys
from collections.abc import Callable
from datetime import date
from typing import Annotated, Any, NamedTuple

import msgspec

from tieredkv.errors import ConfigError
from tieredkv.units import format_bytes, format_duration, parse_bytes, parse_duration

Bytes = Annotated[int, "bytes"]
Seconds = Annotated[float, "seconds"]
FilePath = Annotated[str, "a path, in which ~ is a home folder"]
TemplateArguments = Annotated[str, "arguments of a chat template, as a JSON object"]
TemplateDate = Annotated[str, "a date such as 2025-06-30, or `start`"]
RopeScaling = Annotated[str, "a scaled rope such as yarn:4"]
AT_START = "start"

_YARN = re.compile(r"yarn:(\d{1,4}(?:\.\d{1,9})?)(?::(\d{1,9}))?")
"""A factor, and the number of positions that it multiplies."""


def parse_at(where: str, parse: Callable[[Any], object], value: object) -> object:
    """Return a value in its field's type, from TOML, the environment or an argument.

    Raises:
        ConfigError: the value is malformed; the error begins with `where`.
    """
    try:
        return parse(value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def is_text(text: str) -> bool:
    """Return whether a text of the command line or the environment was decoded without faults."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def plain(kind: Any, what: str) -> Callable[[Any], Any]:
    """Return a function that reads a value of a plain type, also from its text."""

    def parse(value: object) -> Any:
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        text = value.strip() if isinstance(value, str) else None
        if text is not None and not is_text(text):
            shown = os.fsencode(text).decode("utf-8", "replace")
            raise ConfigError(f"`{shown}` is not {sys.getfilesystemencoding()} text")
        try:
            return msgspec.convert(text or value, kind, strict=text is None)
        except msgspec.ValidationError:
            raise ConfigError(f"`{value}` is not {what}") from None

    return parse


def _parse_texts(value: object) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(part.strip() for part in plain(list[str], "a list of texts")(parts))


def parse_path(value: object) -> str | None:
    """Return a path with the home folder in place of a leading `~`; None for an empty one."""
    text = plain(str, "a text")(value)
    path = text if "\0" in text else os.path.expanduser(text)  # the settings refuse a zero byte
    if path.startswith("~"):
        raise ConfigError(f"`{value}`: there is no such home folder; give the whole path")
    return path or None


def parse_template_arguments(value: object) -> str:
    """Return arguments for a chat template, from a table or JSON text, as JSON text."""
    try:
        table = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        table = None
    if not isinstance(table, dict):
        example = 'a table of names and values, such as {"enable_thinking": false}'
        raise ConfigError(f"`{value}` is not {example}")
    for name, each in table.items():
        if not isinstance(each, str | int | float) or not math.isfinite(
            0 if isinstance(each, str) else each
        ):
            raise ConfigError(f"the value of `{name}` must be a text, a number, true or false")
    return json.dumps(table, ensure_ascii=False)


def parse_template_date(value: object) -> str | None:
    """Return a date for chat templates as a text: a day, `start`, or None for an empty one."""
    text = value.strip() if isinstance(value, str) else str(value)
    if text in (AT_START, ""):
        return text or None
    try:
        if date.fromisoformat(text).isoformat() == text:
            return text
    except ValueError:
        pass
    raise ConfigError(f"`{value}` is neither a day such as 2025-06-30 nor `{AT_START}`")


def parse_rope_scaling(value: object) -> str | None:
    """Return the scaling of a rope as a text; None for an empty one."""
    text = value.strip() if isinstance(value, str) else str(value)
    if text:
        yarn_of(text)
    return text or None


def yarn_of(text: str) -> tuple[float, int | None]:
    """Return the factor of a scaled rope and the original number of positions, if it is told."""
    if found := _YARN.fullmatch(text):
        factor, original = float(found[1]), int(found[2] or 0)
        if factor > 1:
            return factor, original or None
    what = "`yarn:` and a factor above 1, such as yarn:4 or yarn:4:32768"
    raise ConfigError(f"`{text}` is not {what}")


class Kind(NamedTuple):
    """How values of a setting are read, and how they are shown and described to people."""

    parse: Callable[[Any], Any]
    show: Callable[[Any], str]
    metavar: str
    example: str = ""


_SIZE = Kind(parse_bytes, format_bytes, "SIZE", "64GiB")
_TEXT = Kind(plain(str, "a text"), str, "TEXT")
_INTEGER = Kind(plain(int, "a whole number"), str, "NUMBER")
_KINDS = {
    TemplateArguments: Kind(parse_template_arguments, str, "JSON", '{"enable_thinking": false}'),
    FilePath | None: Kind(parse_path, str, "PATH"),
    TemplateDate | None: Kind(parse_template_date, str, "DATE"),
    RopeScaling | None: Kind(parse_rope_scaling, str, "SCALING", "yarn:4"),
    Bytes: _SIZE,
    Bytes | None: _SIZE,
    Seconds: Kind(parse_duration, format_duration, "DURATION", "2m"),
    int: _INTEGER,
    int | None: _INTEGER,
    float: Kind(plain(float, "a number"), str, "NUMBER"),
    str | None: _TEXT._replace(parse=lambda value: _TEXT.parse(value) or None),
    tuple[str, ...]: Kind(_parse_texts, ", ".join, "TEXT"),
}


def kind_of(setting: Any) -> Kind:
    """Return the kind of a field, which follows from its type."""
    return _KINDS.get(setting.type, _TEXT)
