"""A folder for a store, a model, and the engines that a test opens on them."""

import contextlib
import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.engines import ENGINES, Engine
from tieredkv.config import CLOCK_OFFSET_VARIABLE
from tieredkv.integrations import identity
from tieredkv.operate.ask import StoreControl
from tieredkv.operate.calls import EvictFilter


@pytest.fixture(autouse=True)
def log_of_ours(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Have what tieredkv logs reach the test, whatever vLLM and its libraries have configured."""
    with caplog.at_level(logging.INFO, "tieredkv"):
        yield


class Setup:
    """A folder for the store, a model and the engines that a test opens."""

    def __init__(self, path: Path, kind: type[Engine]) -> None:
        self.folder = path / "store"
        self.model = path / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text('{"model_type": "llama"}')
        (self.model / "model.safetensors").write_bytes(b"weights")
        self.offset_file = path / "offset"
        self.kind = kind
        self.everything = EvictFilter(all=True)
        self.engines: list[Engine] = []

    def open(self, *, tier: dict[str, Any] | None = None, **changes: Any) -> Engine:
        """Start an engine on the folder; unless `close` is called, the test's end closes it."""
        defaults = {"disk_dir": str(self.folder), "disk_size": "16MiB", "sweep_interval": "200ms"}
        defaults["restore"] = "load"
        given = {name: each for name, each in (defaults | (tier or {})).items() if each is not None}
        engine = self.kind(self.model, given, **changes)
        self.engines.append(engine)
        return engine

    def close(self, engine: Engine) -> None:
        self.engines.remove(engine)
        engine.close()

    def reopen(self, engine: Engine, **changes: Any) -> Engine:
        """Stop an engine, and start another one in its place."""
        self.close(engine)
        return self.open(**changes)

    def set_clock(self, offset_s: float) -> None:
        """Set how many seconds all clocks are ahead."""
        self.offset_file.write_text(str(offset_s))
        time.sleep(0.05)

    def holds(self, data: bytes) -> bool:
        """Return whether any file of the store has these bytes."""
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        for path in files:
            with contextlib.suppress(FileNotFoundError):
                if data in path.read_bytes():
                    return True
        return False

    @property
    def control(self) -> StoreControl:
        return StoreControl(str(self.folder), clock_offset_file=str(self.offset_file))


@pytest.fixture(params=ENGINES, ids=lambda kind: kind.__name__)
def setup(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Setup]:
    setup = Setup(tmp_path, request.param)
    monkeypatch.setenv(CLOCK_OFFSET_VARIABLE, str(setup.offset_file))
    monkeypatch.setattr(identity, "CACHE_DIR", tmp_path / "digests")
    yield setup
    for engine in setup.engines:
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine.pid, signal.SIGCONT)
        engine.close()
