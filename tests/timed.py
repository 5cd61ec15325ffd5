"""Run a command, then print the times that it took beside those that it may take.

    python -m tests.timed NAME WALL_S PROCESSOR_S -- COMMAND ...

The exit code is the command's. Times above the limit are marked, and fail nothing: machines differ.
Processor time is that of all processes that were waited for, in user and in kernel mode.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence


def main(words: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    name, wall_limit, processor_limit, _, *command = words
    begin = time.monotonic()
    with subprocess.Popen(command) as process:
        while True:
            try:
                exit_code = process.wait()
                break
            except KeyboardInterrupt:  # the command gets it too, and says how it ended
                continue
    wall_s, used = time.monotonic() - begin, os.times()
    processor_s = used.children_user + used.children_system
    wall = told("wall time", wall_s, float(wall_limit))
    processor = told("processor time", processor_s, float(processor_limit))
    sys.stdout.write(f"{name} took {wall} and {processor}, on {os.cpu_count()} cores\n")
    return exit_code


def told(what: str, seconds: float, limit_s: float) -> str:
    """Return a time beside its limit, as `1:05 of wall time (limit 8:00)`."""
    above = ", ABOVE THE LIMIT" if seconds > limit_s else ""
    return f"{clock(seconds)} of {what} (limit {clock(limit_s)} on two idle cores{above})"


def clock(seconds: float) -> str:
    """Return minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
