"""The waiting helpers stop waiting as soon as the process that they wait for has ended."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import serving, waiting
from tests.golden import refused
from tests.waiting import wait_until


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shorten the time after which a wait counts as hanging."""
    monkeypatch.setattr(waiting, "HANG_S", 0.05)
    yield


def test_a_process_that_ends_is_not_waited_for_and_its_log_is_shown() -> None:
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as process:
        since = time.monotonic()
        with refused(AssertionError):
            wait_until(lambda: False, "no server", process=process, log=lambda: "its log")
    assert time.monotonic() - since < waiting.HANG_S


def test_a_process_that_ends_well_has_done_what_was_waited_for(tmp_path: Path) -> None:
    done = tmp_path / "done"
    with subprocess.Popen(["touch", str(done)]) as process:
        wait_until(done.exists, "no file", process=process)


@pytest.mark.usefixtures("patience")
def test_what_hangs_fails_and_says_what_was_waited_for() -> None:
    with pytest.raises(AssertionError, match=r"^the sky does not fall"):
        wait_until(lambda: False, "the sky does not fall")


@pytest.mark.usefixtures("patience")
def test_a_server_that_does_not_start_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def sleep(*_arguments: object, **_options: object) -> subprocess.Popen[bytes]:
        started.append(popen(["sleep", "600"]))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", sleep)
    with pytest.raises(AssertionError, match="no server"):
        serving.Server(tmp_path)
    assert started[0].poll() is not None


def test_a_server_that_fails_is_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="--such-a-flag"):
        serving.Server(tmp_path, "--such-a-flag")
