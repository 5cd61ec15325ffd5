"""Key tables for tests: their constants, and what they are asked."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tieredkv.errors import MissingKeyError
from tieredkv.storage.keys.layout import PayloadKey
from tieredkv.storage.keys.table import KeyTable

MASTER, OTHER = bytes(range(32)), bytes(range(1, 33))
FOLDER_ID, STAMP, NEXT = b"i" * 16, b"s" * 16, b"n" * 16
NO_STAMP = bytes(16)
ONE, TWO, THREE = (name * 36 for name in (b"1", b"2", b"3"))
DEATH = 1_800_003_600.0
PAGE, SLOT, FIRST_SLOT = 4096, 128, 8192


def numbered(numbers: Iterable[int]) -> dict[bytes, float]:
    """Return scopes with these numbers, all of the same second of death."""
    return {b"%036d" % number: DEATH for number in numbers}


def opened(path: str | Path, key: bytes = MASTER, folder_id: bytes = FOLDER_ID) -> KeyTable:
    """Open a table and close it again, so that its keys can be looked at."""
    table = KeyTable.open(str(path), folder_id, key)
    table.close()
    table.check()
    return table


def scopes_of(table: KeyTable) -> list[bytes]:
    """Return the scopes that have a key."""
    return sorted(key.scope for key in table)


def key_of(table: KeyTable, scope: bytes) -> PayloadKey:
    """Return the key of a scope that has one."""
    key = table.of_scope(scope)
    assert key is not None
    return key


def flip(path: str | Path, at: int, bit: int = 0) -> None:
    """Flip one bit of a file in its place."""
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def reason_of(read: Callable[..., object], *args: object) -> str:
    """Return why keys cannot be read."""
    with pytest.raises(MissingKeyError) as caught:
        read(*args)
    return caught.value.reason
