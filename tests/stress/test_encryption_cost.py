"""The measurement moves the same blocks with and without encryption, and finds wrong bytes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.golden import told
from tests.stress import encryption_cost

SMALL = ("--blocks", "16", "--block-bytes", "64KiB", "--rounds", "2")


def test_both_stores_and_the_disk_have_figures(tmp_path: Path) -> None:
    result = CliRunner().invoke(encryption_cost.main, ["--dir", str(tmp_path), *SMALL])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["problems"] == []
    for verb in ("load", "store"):
        assert report[verb].keys() == {"clear", "encrypted", "raw", "times_clear"}
        rates = [report[verb][name]["GBps"] for name in ("clear", "encrypted", "raw")]
        assert all(0 < it["min"] <= it["p50"] <= it["max"] for it in rates)
    assert [*tmp_path.iterdir()] == [], "it leaves nothing behind"


def test_wrong_bytes_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = encryption_cost.Store.load

    def load_others(store: encryption_cost.Store, chance: Any) -> Any:
        store._move = lambda *_: {"GBps": 1.0, "core_s_per_GB": 1.0}  # type: ignore[method-assign]
        return load(store, chance)

    monkeypatch.setattr(encryption_cost.Store, "load", load_others)
    result = CliRunner().invoke(encryption_cost.main, ["--dir", str(tmp_path), *SMALL])
    assert result.exit_code == 1
    problem = json.loads(result.stdout.splitlines()[-1])["problems"][0]
    told(re.sub(r"\d+", "N", problem))
