"""Functions with which tests wait for a condition, however busy the machine is.

A fixed time is too short for one machine and too long for another. So a test waits while
the process lives that it depends on. A limit that no machine should need ends a test that hangs.
"""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HANG_S = 480.0
"""What takes longer hangs; below pytest's own limit, which cannot say what was waited for."""


def wait_until(
    condition: Callable[[], bool],
    what: str = "it does not happen",
    *,
    process: subprocess.Popen[Any] | None = None,
    log: Callable[[], str] = str,
) -> None:
    """Return once the condition holds.

    Args:
        condition: asked again and again.
        what: says in the failure what did not happen.
        process: what the condition depends on; its end is a failure at once.
        log: tells what that process has said.
    """
    give_up_at = deadline()
    while not condition():
        if process is not None and (exit_code := process.poll()) is not None:
            if condition():  # it was so before the end
                return
            raise AssertionError(f"{what}: the process ended with {exit_code}\n{log()}")
        assert time.monotonic() < give_up_at, f"{what}\n{log()}".rstrip()
        time.sleep(0.005)


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def deadline() -> float:
    """Return the moment on the monotonic clock after which something hangs."""
    return time.monotonic() + HANG_S
