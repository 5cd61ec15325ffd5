"""Functions with which tests wait for a condition, however busy the machine is.

A fixed time is too short for one machine and too long for another. So a test waits for as long as
the process lives that it depends on. A test that hangs is ended by a limit that no machine should
need.
"""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HANG_S = 480.0
"""A wait of more seconds counts as a hang. It is below pytest's own limit per test, which cannot
report what the test waited for.
"""


def wait_until(
    condition: Callable[[], bool],
    what: str = "it does not happen",
    *,
    process: subprocess.Popen[Any] | None = None,
    log: Callable[[], str] = str,
) -> None:
    """Return once the condition holds.

    Args:
        condition: Called again and again until it returns True.
        what: Says in the failure what did not happen.
        process: Process that the condition depends on; if it ends, the wait fails at once.
        log: Returns the log of that process, for the failure.
    """
    give_up_at = deadline()
    while not condition():
        if process is not None and (exit_code := process.poll()) is not None:
            if condition():  # it became true before the process ended
                return
            raise AssertionError(f"{what}: the process ended with {exit_code}\n{log()}")
        assert time.monotonic() < give_up_at, f"{what}\n{log()}".rstrip()
        time.sleep(0.005)


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not count as running."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def deadline() -> float:
    """Return the moment on the monotonic clock after which a wait counts as a hang."""
    return time.monotonic() + HANG_S
