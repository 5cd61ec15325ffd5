"""The timeline of a request tells of every block that came from disk, and of every step."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.stress import timeline


@pytest.mark.parametrize("restore", ["auto", "load"])
def test_a_timeline_has_what_came_from_disk_and_what_was_computed(
    restore: str, tmp_path: Path
) -> None:
    words = ["--model", "tiny-random", "--prefix-tokens", "512", "--repeats", "1"]
    words += ["--restore", restore]
    result = CliRunner().invoke(timeline.main, [*words, "--disk-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    [row] = json.loads(result.stdout.splitlines()[-1])["rows"]
    events, num_loaded = row["events"], row["by_tier"]["disk"]
    assert [event["ms"] for event in events] == sorted(event["ms"] for event in events)

    def num_blocks(what: str) -> int:
        return sum(event["blocks"] for event in events if event["event"] == what)

    copied = num_blocks("copy") * 16
    assert restore == "auto" or num_loaded == 512
    assert copied == num_loaded <= 16 * num_blocks("arrive") <= 16 * num_blocks("read") <= 512
    assert not num_loaded or [event for event in events if event["event"] == "plan"]
    issued = [event["tokens"] for event in events if event["event"] == "issue"]
    ends = [end for tokens in issued for _, end in tokens]
    assert 512 + 64 in ends, "with the last token of the prompt comes the first of the answer"
    assert "512 tokens" in result.stderr and not list(tmp_path.iterdir())
