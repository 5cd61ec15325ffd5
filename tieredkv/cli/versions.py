"""Answers of servers and store workers of other versions, which may leave out some parts."""

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

Value = TypeVar("Value")

WORDS = {
    "lifetimes": "how long the disk keeps blocks",
    "encryption": "whether blocks are encrypted",
    "is_compressing": "whether blocks are compressed",
    "recent": "hit rate and times to first token",
    "slowest": "slowest requests",
}
"""What the parts of an answer are called that may be left out."""


def told(answer: Mapping[str, Any] | None, name: str, kind: type[Value]) -> Value | None:
    """Return a part of an answer; None if it is not there, or has the form of another version."""
    with contextlib.suppress(msgspec.ValidationError):
        if answer and name in answer:
            return msgspec.convert(answer[name], kind)
    return None


def untold_text(names: Iterable[str]) -> str:
    """Return a sentence that says which parts of an answer are left out."""
    words = ", ".join(WORDS[name] for name in names)
    return f"This server has another version, which does not tell: {words}."
