"""Crowds on a modelled machine: what the commands report, and what ideal pools find."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.stress.modelled_crowd import inclusive, main, one_pool
from tieredkv.types import BlockHash

ROOT = Path(__file__).parents[2]

Row = dict[str, Any]


def report(*words: object) -> Row:
    """Run a command; return its report."""
    command = [sys.executable, "-m", "tests.stress.modelled_crowd", *map(str, words)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    found: Row = json.loads(result.stdout)
    return found


def test_ideal_pools_find_what_they_should() -> None:
    a, b = ([BlockHash(bytes([text, index])) for index in range(4)] for text in b"ab")
    chains = [(a, 65), (b, 65), (a, 65), (b, 65)]
    assert one_pool(chains, 8, 16) == 128
    assert one_pool(chains, 7, 16) == 48 + 48
    assert inclusive(chains, 4, 4, 16) == 128
    assert one_pool(chains, 0, 16) == 0


@pytest.mark.slow
def test_sessions_are_run_in_each_arm_and_compared_with_ideal_pools() -> None:
    sizes = "--device-size", "800MiB", "--host-size", "256MiB", "--disk-size", "4GiB"
    shape = "--scale", 10, "--turns", 4, "--seed", "0,1"
    found = report("sessions", "--sessions", 4, "--arms", "no_disk,planned", *shape, *sizes)
    assert found["times"] == "computed, not measured"
    none, planned = found["rows"]
    assert (none["arm"], planned["arm"]) == ("no_disk", "planned")
    for row in found["rows"]:
        rates = row["hit_rates"]
        assert row["sessions"] == 4 and row["answers"] >= 2 * 4
        assert 0 < rates["inclusive"] <= rates["one_pool"] <= rates["unbounded"]
        assert rates["measured"] <= rates["unbounded"]
        assert 0 < row["prefill_share"] < row["device_busy_share"] < 1
    assert none["bytes_written"] == 0 < planned["bytes_written"]


def test_prefixes_that_ram_keeps_are_refused() -> None:
    words = ["returns", "--sessions", "2", "--prefix-tokens", "1000-2000"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 1
    assert "give more `--sessions`" in result.output
