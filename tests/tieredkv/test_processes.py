"""Measuring in a process of its own: what an interruption ends, and what it lets end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import NoReturn

import pytest

from tests.levels import few
from tests.serving import heed_ctrl_c
from tests.tieredkv import test_processes as this_module
from tests.waiting import HANG_S, is_alive, wait_until
from tieredkv.bench import processes
from tieredkv.bench.processes import in_new_process
from tieredkv.errors import ConfigError, TieredKVError

ROOT = Path(__file__).parents[2]


def closing(folder: Path) -> None:
    """Work until it is interrupted, and then leave something, as a store does that is closed."""
    try:
        (folder / "begun").write_text(str(os.getpid()))
        time.sleep(HANG_S)
    finally:
        time.sleep(0.2)  # while this process is interrupted once more
        (folder / "closed").touch()


def never_ending(folder: Path) -> None:
    """Work that an interruption does not end, as where a lock is never released."""
    while True:
        try:
            (folder / "begun").write_text(str(os.getpid()))
            time.sleep(HANG_S)
        except KeyboardInterrupt:
            continue


class InterruptedAtItsEnd:
    """Something whose finalizer is interrupted; Python drops what is raised there."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)  # the signal is here by then


def dropping(folder: Path) -> None:
    """Work that is interrupted in a finalizer."""
    try:
        InterruptedAtItsEnd()
        time.sleep(HANG_S)
    finally:
        (folder / "closed").touch()


def refusing(text: str) -> NoReturn:
    raise ConfigError(text)


def failing() -> NoReturn:
    raise ValueError("a bug")


def swallow(folder: Path) -> None:
    """Be a module that takes long to import, and drops what interrupts it, as finalizers do."""
    never_ending(folder)


class SlowToArrive:
    """An argument that arrives only once a module is imported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[[Path], object], tuple[Path]]:
        return this_module.swallow, (self.folder,)


def run_here(work: str, folder: Path) -> NoReturn:
    """Be a bench that measures, in the new process of a test."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as the command line does
    processes.GRACE_S = 1.0
    try:
        if work == "starting":
            in_new_process(print, this_module.SlowToArrive(folder))
        in_new_process(getattr(this_module, work), folder)
    except KeyboardInterrupt:
        os._exit(130)
    os._exit(0)


WAYS = ("SIGINT", "SIGTERM", "Ctrl-C", "timeout")
FIRST = [("closing", "SIGTERM"), ("closing", "Ctrl-C"), ("never_ending", "timeout")]
FIRST += [("starting", "SIGINT")]
OTHERS = [it for it in product(("closing", "never_ending", "starting"), WAYS) if it not in FIRST]


@pytest.mark.parametrize(("work", "way"), few([*FIRST, *OTHERS], len(FIRST)))
def test_an_interruption_ends_the_measuring_process_whatever_it_does(
    work: str, way: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.tieredkv.test_processes", work, str(tmp_path)]
    process = subprocess.Popen(
        command,
        start_new_session=True,
        preexec_fn=heed_ctrl_c,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        begun = tmp_path / "begun"
        wait_until(lambda: begun.exists() and begun.read_text() != "", process=process)
        if way in ("SIGINT", "SIGTERM"):
            process.send_signal(getattr(signal, way))
        elif way == "Ctrl-C":  # reaches all processes of a terminal's foreground group
            os.killpg(process.pid, signal.SIGINT)
        else:  # the command `timeout` signals the process, and then the group
            process.terminate()
            os.killpg(process.pid, signal.SIGTERM)
        _, stderr = process.communicate(timeout=HANG_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert not is_alive(int(begun.read_text()))
    assert "Traceback" not in stderr
    if way != "timeout":
        assert (tmp_path / "closed").exists() == (work == "closing")


def test_the_measuring_process_ends_with_the_one_that_waits_for_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.tieredkv.test_processes", "never_ending", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment)
    begun = tmp_path / "begun"
    wait_until(lambda: begun.exists() and begun.read_text() != "", process=process)
    process.kill()
    process.wait()
    wait_until(lambda: not is_alive(int(begun.read_text())), "the measuring process goes on")


def test_an_interruption_that_a_finalizer_drops_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with pytest.raises(TieredKVError, match="see the log"):  # this process was not interrupted
        in_new_process(this_module.dropping, tmp_path)
    assert (tmp_path / "closed").exists()
    assert capfd.readouterr().err == ""


def test_the_command_line_ends_by_an_interruption_that_a_finalizer_drops(tmp_path: Path) -> None:
    lines = [
        "from pathlib import Path",
        "from tests.tieredkv.test_processes import dropping",
        "from tieredkv.cli.main import cli, run",
        "doctor = cli.commands['doctor']",
        "doctor.callback = lambda **_: dropping(Path.cwd())",
        "cli.commands = {'doctor': doctor}",
        "run()",
    ]
    command = [sys.executable, "-c", "\n".join(lines), "doctor"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, timeout=HANG_S)
    assert done.returncode == 130
    assert (tmp_path / "closed").exists()


def test_an_error_of_ours_comes_back_and_another_one_is_logged(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with pytest.raises(ConfigError, match="too long"):
        in_new_process(this_module.refusing, "too long")
    assert capfd.readouterr().err == ""
    with pytest.raises(TieredKVError, match="see the log"):
        in_new_process(this_module.failing)
    assert "ValueError: a bug" in capfd.readouterr().err


if __name__ == "__main__":
    run_here(sys.argv[1], Path(sys.argv[2]))
