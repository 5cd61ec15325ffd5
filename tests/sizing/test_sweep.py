"""A sweep tries each tier and each retention, and tells what more of a tier would buy."""

import json
import math
import re
from pathlib import Path

import pytest

from tests.golden import told
from tests.sizing.traces import line, random_lines, write
from tieredkv.cli.main import main
from tieredkv.retention import DEFAULT_POLICIES
from tieredkv.sizing.replay import Sizes
from tieredkv.sizing.sweep import RETENTIONS_S, cases, curves, sweep
from tieredkv.traces import Trace, read_trace
from tieredkv.types import ignore_progress

GIB = 1 << 30


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a small trace of conversations."""
    return write(tmp_path / "trace.jsonl", random_lines(3, requests=120))


@pytest.fixture
def trace(path: Path) -> Trace:
    """Return the same, read."""
    return read_trace(path, ignore_progress)


def test_a_larger_tier_never_finds_less_and_the_gain_is_told(trace: Trace) -> None:
    found = sweep(trace, Sizes(device=2 * GIB, host=1 * GIB), ignore_progress)
    for tier in ("vram", "host", "disk"):
        rows = [row for row in found.rows if row["swept"] in (tier, "given")]
        rows.sort(key=lambda row: math.inf if (size := row[f"{tier}_bytes"]) is None else size)
        rates = [row["hit_rate"] for row in rows]
        assert rates == sorted(rates), tier
    assert [each["tier"] for each in found.gains] == ["vram", "host", "disk"]
    assert all(each["tokens_per_hour_per_GiB"] > 0 for each in found.gains)
    told(re.sub(r"[\d.,]*\d", "NUMBER", found.sentence))


def test_parallel_processes_find_the_same(trace: Trace) -> None:
    sizes = Sizes(device=2 * GIB)
    alone = sweep(trace, sizes, ignore_progress)
    assert sweep(trace, sizes, ignore_progress, num_jobs=2) == alone


def test_requests_keep_their_policies_where_no_other_retention_is_tried(tmp_path: Path) -> None:
    lines = [each | {"retention": "in_memory"} for each in random_lines(3)]
    path = write(tmp_path / "recorded.jsonl", lines)
    found = sweep(
        read_trace(path, ignore_progress),
        Sizes(device=GIB, disk=GIB, policies=DEFAULT_POLICIES),
        ignore_progress,
    )
    for row in found.rows:
        has_one = row["swept"] == "retention"
        assert row["requests_by_retention"] == ({} if has_one else {"in_memory": 300})
        assert (row["disk_rate"] > 0) == has_one
    of_one = [row["retention_s"] for row in found.rows if row["swept"] == "retention"]
    assert of_one == [*RETENTIONS_S]
    _, by_time = curves(found.rows)
    assert [60 * each["retention_in_minutes"] for each in by_time] == of_one


def test_without_limits_more_buys_nothing(trace: Trace) -> None:
    unlimited = Sizes(device=math.inf, host=math.inf, disk=math.inf)
    assert not any(case.is_step for case in cases(unlimited))
    assert "would buy nothing" in sweep(trace, unlimited, ignore_progress).sentence


def test_a_trace_without_time_or_tokens_has_no_gain(tmp_path: Path) -> None:
    for number, only in enumerate((line(0, [1]), line(0, []))):
        few = read_trace(write(tmp_path / f"{number}.jsonl", [only]), ignore_progress)
        found = sweep(few, Sizes(device=GIB), ignore_progress)
        assert found.gains == []
        assert "is not known" in found.sentence


def test_an_interrupted_sweep_tells_what_it_knows(trace: Trace) -> None:
    def progress(_stage: str, done: int, _total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    found = sweep(trace, Sizes(device=GIB), progress)
    assert found.is_interrupted
    assert len(found.rows) == 3


def test_the_command_prints_a_table_a_sentence_and_curves(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "sizes.png"
    asked = ["size", str(path), "--vram", "2GiB", "--commit", "none"]
    assert main([*asked, "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in printed.splitlines()) <= 60
    assert picture.read_bytes()[1:4] == b"PNG"
    assert (tmp_path / "sizes-retention.png").exists()
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"next_GiB", "sentence", "rows", "commit", "hardware"} <= found.keys()
    assert found["sentence"] in " ".join(printed.split())
