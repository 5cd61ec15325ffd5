"""What an engine is refused for is found before its parts take long to make."""

import contextlib
import os
from pathlib import Path

import pytest

from tests.golden import refused
from tieredkv.config import Settings
from tieredkv.engine import parts
from tieredkv.errors import StoreBusyError
from tieredkv.storage.folder import StoreFolder
from tieredkv.types import ignore_progress


def test_a_store_in_use_is_refused_before_a_model_is_found_or_memory_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        pytest.fail("this is too early")

    for name in ("find_model", "HostArena", "StoreClient"):
        monkeypatch.setattr(parts, name, fail)
    monkeypatch.setattr(parts, "BUSY_PATIENCE_S", 0.0)
    path = str(tmp_path / "kv")
    folder = StoreFolder.claim(path, create=True)
    settings = Settings(model="tiny-random", disk_dir=path)
    hide = {path: "FOLDER", str(os.getpid()): "PID"}
    with refused(StoreBusyError, hide=hide), contextlib.ExitStack() as stack:
        parts.build_parts(settings, stack, progress=ignore_progress, wake=lambda: None)
    folder.release()
