"""What the worker logs of a fault, and how often."""

import errno
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.storage.test_service import Engine, serving
from tests.storage.test_service import arena as arena
from tests.waiting import wait_until
from tieredkv.errors import StorageError
from tieredkv.storage.store import Store
from tieredkv.wire.arena import HostArena


def test_a_sweep_that_fails_is_logged_once_until_one_does_not(
    tmp_path: Path,
    arena: HostArena,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The sweep of the store, and that of the folder of keys, by a reader thread."""
    caplog.set_level("INFO")
    keys, away = tmp_path / "keys", tmp_path / "away"
    sweeping, begun, is_failing = Store.sweeping, list[float](), threading.Event()

    def failing(store: Store) -> Iterator[None]:
        begun.append(time.monotonic())
        yield from sweeping(store)
        if is_failing.is_set():
            raise StorageError(errno.EIO, "made up")

    def logged(level: str) -> list[str]:
        found = (each for each in caplog.records if each.levelname == level)
        return sorted(each.message.partition(":")[0] for each in found)

    def wait_for(engine: Engine, level: str, texts: list[str]) -> None:
        wait_until(lambda: engine.hears_stats() and logged(level) == texts)

    def wait_for_sweeps(engine: Engine, count: int) -> None:
        until = len(begun) + count
        wait_until(lambda: engine.hears_stats() and len(begun) > until)

    monkeypatch.setattr(Store, "sweeping", failing)
    with serving(tmp_path / "store", arena, encryption="on", key_dir=str(keys)) as engine:
        caplog.clear()
        for number in (1, 2):
            both = ["keys"] * number + ["sweep"] * number
            keys.rename(away)
            is_failing.set()
            wait_for(engine, "WARNING", both)
            wait_for_sweeps(engine, 3)
            assert logged("WARNING") == both
            away.rename(keys)
            is_failing.clear()
            wait_for(engine, "INFO", both)
