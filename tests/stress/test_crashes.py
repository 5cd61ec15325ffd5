"""A store survives a thousand kills and a thousand power losses, which run on all cores at once."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stress.crashes import FIGURES

ROOT = Path(__file__).parents[2]


def survive(tmp_path: Path, kills: int, cuts: int, shards: int) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "tests.stress.crashes", "--dir", str(tmp_path)]
    command += ["--shards", str(shards), "--kills", str(kills), "--cuts", str(cuts)]
    run = subprocess.run(
        [*command, "--json", str(report)], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(report.read_text())
    assert found == json.loads(run.stdout.splitlines()[-1])
    assert (found["kills"], found["cuts"], found["wrong"], found["lost"]) == (kills, cuts, 0, 0)
    assert set(found) > {name.replace(" ", "_") for name in FIGURES}
    assert found["blocks_verified"] > 10 * (kills + cuts)
    assert found["anchors_verified"] and found["torn_blocks"]


def test_a_few_kills_and_power_losses_in_two_shards(tmp_path: Path) -> None:
    survive(tmp_path, 8, 2 if shutil.which("cc") else 0, 2)


@pytest.mark.stress
@pytest.mark.timeout(3600)
def test_a_thousand_kills_and_power_losses_lose_nothing(tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler `cc` to build the write log with")
    survive(tmp_path, 1000, 1000, min(len(os.sched_getaffinity(0)), 16))
