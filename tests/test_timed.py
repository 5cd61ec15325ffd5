"""The times that `make test` prints."""

import subprocess
import sys

from tests import timed


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", timed.__file__, *words]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True)


def test_times_are_printed_behind_what_the_command_prints_and_its_exit_code_is_kept() -> None:
    done = run("it", "480", "960", "--", sys.executable, "-c", "print('said'); exit(3)")
    said, times = done.stdout.splitlines()
    assert (done.returncode, said) == (3, "said")
    assert times.startswith("it took 0:0")
    assert "of wall time (limit 8:00 on two idle cores) and 0:0" in times
    assert "of processor time (limit 16:00 on two idle cores), on " in times


def test_a_time_above_its_limit_is_marked_and_fails_nothing() -> None:
    done = run("it", "0", "960", "--", sys.executable, "-c", "")
    assert done.returncode == 0
    assert done.stdout.count("ABOVE THE LIMIT") == 1
    assert "(limit 0:00 on two idle cores, ABOVE THE LIMIT) and" in done.stdout
