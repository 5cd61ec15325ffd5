"""Which thread may call what: a call from another thread fails at once."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.golden import refused
from tests.storage.blocks import load, make_record, open_store, payload_of, put
from tieredkv.errors import IntegrityError
from tieredkv.storage.extents.room import Room
from tieredkv.storage.index.environment import Index
from tieredkv.storage.store import Store
from tieredkv.storage.worker.deletions import Deletions
from tieredkv.storage.worker.loop import Loop
from tieredkv.storage.worker.reads import Reads
from tieredkv.storage.worker.writes import Writes

FOR_ANY_THREAD: dict[type, set[str]] = {
    Store: {"find", "read", "write", "flush", "note_damaged", "close"},
    Room: set(),
    Index: {"reading", "keep_ahead", "most_records", "reading_ahead", "looking_over", "is_sound"}
    | {"file_bytes", "used_bytes", "close"},
    Writes: set(),
    Reads: set(),
    Deletions: set(),
}
"""What reads only, or is called while there is one thread."""


def methods_of(kind: type) -> dict[str, Any]:
    """Return the public methods and properties of a class, as the functions that they call."""
    found = dict[str, Any]()
    for name, member in vars(kind).items():
        function = member.fget if isinstance(member, property) else member
        if not name.startswith("_") and callable(getattr(function, "__func__", function)):
            found[name] = function
    return found


@pytest.mark.parametrize("kind", FOR_ANY_THREAD)
def test_each_method_is_owned_by_a_thread_or_for_any(kind: type) -> None:
    methods = methods_of(kind)
    assert {name for name in methods if not hasattr(methods[name], "owned_by")} == (
        FOR_ANY_THREAD[kind]
    )


def in_another_thread(call: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as threads:
        threads.submit(call).result()


def test_only_the_thread_that_owns_a_store_may_change_it(tmp_path: Path) -> None:
    record = make_record()
    with open_store(tmp_path / "store") as store:
        assert put(store, record) == [True]
        in_another_thread(store.thread.own)
        with refused(IntegrityError, hide={threading.current_thread().name: "THREAD"}):
            store.drop([record.block_hash], "test")
        with pytest.raises(IntegrityError), store.index.writing():
            pass
        with pytest.raises(IntegrityError):
            store.room.enforce_budget()
        assert load(store, record) == payload_of(record)
        in_another_thread(lambda: store.drop([record.block_hash], "test"))
        assert load(store, record) is None
        store.thread.own()
        store.check()


def test_a_loop_is_owned_by_the_thread_that_waits(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        loop = Loop(store.thread)
        assert loop.owns() and store.thread.owns()
        in_another_thread(lambda: loop.wait(0.0))
        assert not loop.owns() and not store.thread.owns()
        loop.wait(0.0)
        assert loop.owns() and store.thread.owns()
