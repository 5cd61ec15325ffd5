"""The measurement of first hits finds its prefixes in host memory, and keeps their plans."""

import json

from click.testing import CliRunner

from tests.stress import first_hits


def test_each_hit_comes_from_host_memory_with_its_plans() -> None:
    words = ["--model", "tiny-random", "--prefix-tokens", "200", "--flood", "600,600,600"]
    words += ["--rounds", "1", "--device-size", "4MiB", "--host-size", "32MiB"]
    result = CliRunner().invoke(first_hits.main, words)
    report = json.loads(result.stdout.splitlines()[-1])
    assert not [it for it in report["problems"] if "host memory" in it], report["problems"]
    assert [row["hit"] for row in report["rows"]] == [0, 1, 2]
    for row in report["rows"]:
        assert row["cached_tokens_by_tier"]["host"] + row["recomputed_tokens"] == 192
        assert row["plans"] and row["plans"][0]["h2d_GBps"] > 0
    assert report["believed_at_start"]["h2d_GBps"] > 0
