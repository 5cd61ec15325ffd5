"""The client that measures how fast a server generates reports what the server answered."""

import json
from pathlib import Path

from click.testing import CliRunner

from tests.serving import running
from tests.stress.decode_by_url import main


def test_alone_and_together_all_tokens_are_timed(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        words = ["--url", server.root, "--server", "ours", "--vocab-size", "250"]
        words += ["--workloads", "1x40+8,3x40+8", "--repeats", "2"]
        result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    told = [(row["workload"], row["repeat"]) for row in report["rows"]]
    assert told == [("1x40+8", 0), ("1x40+8", 1), ("3x40+8", 0), ("3x40+8", 1)]
    for row in report["rows"]:
        assert row["tokens_per_event"] >= 1
        assert 0 < row["itl_ms"]["p50"] <= row["itl_ms"]["p99"]
        assert row["tokens_per_s"] > 0
