"""The times that `make test` prints."""

import re
import subprocess
import sys

from tests import timed
from tests.golden import told


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", timed.__file__, *words]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True)


def compare(line: str) -> None:
    """Compare a line without what differs: the two times, and the machine."""
    told(re.sub(r"\b\d+:\d\d of", "TIME of", line.partition(", on ")[0]))


def test_times_are_printed_behind_what_the_command_prints_and_its_exit_code_is_kept() -> None:
    done = run("it", "480", "960", "--", sys.executable, "-c", "print('said'); exit(3)")
    said, times = done.stdout.splitlines()
    assert (done.returncode, said) == (3, "said")
    compare(times)


def test_a_time_above_its_limit_is_marked_and_fails_nothing() -> None:
    done = run("it", "0", "960", "--", sys.executable, "-c", "")
    assert done.returncode == 0
    assert done.stdout.count("ABOVE THE LIMIT") == 1
    compare(done.stdout)
