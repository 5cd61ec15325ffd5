"""`bench ttft` keeps the contract of its JSON, and its figures prove what they claim."""

import json
import subprocess
import sys
from pathlib import Path

ARMS = ["cold", "device", "host", "disk", "restart"]


def test_bench_ttft_proves_every_hit_and_speaks_json_last(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "tieredkv", "bench", "ttft", "--model", "tiny-random"]
    command += ["--prefix-tokens", "128,256", "--arms", ",".join(ARMS), "--repeats", "2"]
    command += ["--disk-dir", str(tmp_path), "--json"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert set(report) >= {"hardware", "commit", "command", "model", "block_size", "restore", "raw"}
    assert (report["model"], report["block_size"], report["restore"]) == ("tiny-random", 16, "load")
    assert report["raw"]["h2d_GBps"] > 0
    assert [(row["arm"], row["prefix_tokens"]) for row in report["rows"]] == [
        (arm, length) for arm in ARMS for length in (128, 256)
    ]
    for row in report["rows"]:
        assert len(row["ttft_ms"]["all"]) == 2
        assert row["ttft_ms"]["min"] <= row["ttft_ms"]["p50"] <= row["ttft_ms"]["p90"]
        assert row["tokens_equal_cold"]
        assert row["num_prompts_excluded"] == 0
        assert [len(ids) for ids in row["output_token_ids"]] == [8, 8]
        tier = {"device": "device", "host": "host", "disk": "disk", "restart": "disk"}
        expected = dict.fromkeys(("device", "host", "disk"), 0)
        if row["arm"] != "cold":
            expected[tier[row["arm"]]] = row["prefix_tokens"]
            assert row["kv_bytes_equal"]
            assert row["kv_digest_loaded"] == row["kv_digest_computed"]
            assert None not in row["kv_digest_loaded"]
        assert row["by_tier"] == expected
        assert row["cached_tokens"] == sum(expected.values())
        loaded = expected["host"] + expected["disk"]
        assert row["bytes_loaded"] == loaded * 2048
        if expected["disk"] and row["page_cache"] != "warm":
            assert 0.95 <= row["bytes_from_disk"] / row["bytes_loaded"] <= 1.2
    assert not list(tmp_path.iterdir()), "the bench leaves its store behind"


def test_bench_ttft_refuses_an_unknown_arm(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "tieredkv", "bench", "ttft", "--model", "tiny-random"]
    result = subprocess.run([*command, "--arms", "warm"], capture_output=True, text=True)
    assert result.returncode == 2
    assert "Unknown arm `warm`; arms are cold, device, host, disk, restart" in result.stderr
