"""Values of a request that this server does not know, and how answers and the log name them.

Later versions of the APIs add types of items, blocks and parts, and values of fields. A client
sends them again with each turn, so that a refusal would end its session.
"""

import logging
import re
from collections.abc import Container, Sequence
from difflib import get_close_matches
from typing import TypeVar

from tieredkv.errors import MAX_TOLD_CHARACTERS

logger = logging.getLogger(__name__)

MAX_TOLD = 32
"""How many unknown values an answer names at most."""

MAX_LOGGED = 64
"""How many kinds of values the log names at most; clients choose their names."""

Known = TypeVar("Known", bound=str)


def unknown(path: str, value: str | None, known: Container[str]) -> list[str]:
    """Return how an answer names a value that is not known, or nothing."""
    if value is None or value in known:
        return []
    return [f"{path}={value[:MAX_TOLD_CHARACTERS]}"]


def nearest(value: str | None, known: Sequence[Known]) -> Known | None:
    """Return the known value that is nearest to another; None if none is near.

    A value that contains a known one, such as `very_high`, is near to it.
    """
    if value is None:
        return None
    names = [each for each in known if each in value] or get_close_matches(value, known, 1)
    name = max(names, key=len, default=None)
    return next((each for each in known if each == name), None)


def printable(text: str) -> str:
    """Return a client's text as the log may hold it: short and without control characters."""
    return ascii(text[:MAX_TOLD_CHARACTERS])[1:-1]


class IgnoredLog:
    """Names each kind of unknown value in the log, once."""

    def __init__(self) -> None:
        self._kinds = set[str]()

    def add(self, names: Sequence[str]) -> None:
        """Log the kinds of these values that the log has not named."""
        for name in names:
            kind = re.sub(r"\[\d+\]", "[]", name)
            if kind not in self._kinds and len(self._kinds) < MAX_LOGGED:
                self._kinds.add(kind)
                logger.info("a request has `%s`, which is not known here", printable(kind))
