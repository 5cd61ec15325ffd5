"""Measuring in a process of its own: what an interruption ends, and what it lets end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.serving import heed_ctrl_c
from tests.waiting import HANG_S, wait_until
from tieredkv.bench.processes import in_new_process


def measure(folder: Path) -> None:
    """Work until it is interrupted, and then leave something, as a store does that is closed."""
    try:
        (folder / "begun").touch()
        time.sleep(HANG_S)
    finally:
        time.sleep(0.5)  # while this process is interrupted once more
        (folder / "closed").touch()


def wait_for_measuring(folder: Path) -> None:
    try:
        in_new_process(measure, folder)
    except KeyboardInterrupt:
        os._exit(130 if (folder / "closed").exists() else 1)


def test_an_interruption_lets_the_work_end_what_it_has_started(tmp_path: Path) -> None:
    for way in ("SIGINT", "SIGTERM", "Ctrl-C"):
        folder = tmp_path / way
        folder.mkdir()
        command = [sys.executable, "-m", "tests.tieredkv.test_processes", str(folder)]
        process = subprocess.Popen(command, start_new_session=True, preexec_fn=heed_ctrl_c)
        try:
            wait_until((folder / "begun").exists, "the work does not begin", process=process)
            if way == "Ctrl-C":  # reaches all processes of a terminal's session
                os.killpg(process.pid, signal.SIGINT)
            else:
                process.send_signal(getattr(signal, way))
            assert process.wait(HANG_S) == 130
        finally:
            process.kill()
            process.wait()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as the command line does
    wait_for_measuring(Path(sys.argv[1]))
