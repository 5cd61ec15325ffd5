"""A clear store that becomes an encrypted one: its index is made again, also after a crash."""

import os
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from tests.fakes import FakeClock
from tests.storage.blocks import (
    CheckedStore,
    load,
    make_record,
    open_store,
    payload_of,
    put,
    stored_hashes,
)
from tests.storage.test_crash_points import FINISHED, in_child

_CALLS = ("mkdir", "rename", "unlink", "rmdir", "fsync", "ftruncate")
"""What changes the names in a folder, or waits for the device."""


def die_before(step: int) -> None:
    """Have this process die before one of these calls, counted from 0."""
    steps = count()

    def deadly(call: Callable[..., Any]) -> Callable[..., Any]:
        def call_or_die(*arguments: Any, **options: Any) -> Any:
            if next(steps) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return call_or_die

    for name in _CALLS:
        setattr(os, name, deadly(getattr(os, name)))


def test_an_upgrade_that_is_cut_short_anywhere_is_whole_at_the_next_start(tmp_path: Path) -> None:
    clock, step, is_whole = FakeClock(), 0, False
    kept = [make_record("kept", position, now=clock.now()) for position in range(3)]
    gone = [make_record("gone", position, now=clock.now()) for position in range(2)]

    def opened(folder: Path, encryption: str = "on") -> CheckedStore:
        key_dir = str(folder.with_suffix(".keys"))
        return open_store(folder, clock, encryption=encryption, key_dir=key_dir)

    while not is_whole:
        folder = tmp_path / str(step)
        with opened(folder, "off") as store:
            put(store, *kept, *gone)
            store.delete([each.block_hash for each in gone], "operator")  # and not erased yet

        def upgrade(_: object, folder: Path = folder, step: int = step) -> None:
            die_before(step)
            opened(folder).close()

        is_whole = in_child(upgrade)[0] == FINISHED
        with opened(folder) as store:
            assert store.names is not None
            names = store.names.hide_records(kept)
            found = stored_hashes(store, [*names, *store.names.hide_records(gone)])
            assert found == {each.block_hash for each in names}, f"died before call {step}"
            assert [load(store, each) for each in names] == list(map(payload_of, kept))
            assert store.stats().faults == {}
            store.check()
        files = list(folder.rglob("*.mdb"))
        assert {each.parent.name for each in files} == {"index"}, f"died before call {step}"
        index = b"".join(each.read_bytes() for each in files)
        assert not any(each.block_hash in index for each in kept), f"died before call {step}"
        step += 1
    assert step > len(_CALLS)
