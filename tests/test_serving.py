"""What tests start, they end."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import serving


def test_a_server_that_does_not_start_in_time_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def sleep(*_arguments: Any, **_options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(["sleep", "600"]))
        return started[0]

    def wait_in_vain(*_arguments: Any) -> None:
        raise AssertionError("no server")

    monkeypatch.setattr(subprocess, "Popen", sleep)
    monkeypatch.setattr(serving, "wait_for", wait_in_vain)
    with pytest.raises(AssertionError, match="no server"):
        serving.Server(tmp_path)
    assert started[0].poll() is not None
