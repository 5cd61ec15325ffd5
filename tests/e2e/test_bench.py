"""The benches print the JSON that they promise, and their reports detect wrong results."""

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import golden
from tests.levels import few
from tests.serving import Server, heed_ctrl_c, running
from tests.waiting import HANG_S, wait_until
from tieredkv.bench import crowd, crowd_figures, disk, raw, restore, sources, ttft
from tieredkv.bench.ttft import PLANNED, Sample, are_tokens_equal, compare, demote_all
from tieredkv.cli.main import main
from tieredkv.engine.llm import LLM
from tieredkv.storage.format.header import decode_header
from tieredkv.types import BlockRecord, ignore_progress

CommandLine = Callable[..., tuple[int, str, str]]
Bench = Callable[..., dict[str, Any]]
ARMS = ["cold", "device", "host", "disk", "planned", "restart", "planned_restart", "batched"]


@pytest.mark.parametrize("lengths", [[128], pytest.param([128, 256], marks=pytest.mark.slow)])
def test_bench_ttft_proves_every_hit_and_speaks_json_last(
    lengths: list[int], tmp_path: Path
) -> None:
    command = [sys.executable, "-P", "-m", "tieredkv", "bench", "ttft", "--model", "tiny-random"]
    command += ["--prefix-tokens", ",".join(map(str, lengths)), "--arms", ",".join(ARMS)]
    command += ["--repeats", "2"]
    command += ["--disk-dir", str(tmp_path), "--json"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "master key" not in result.stderr  # nobody has to keep a copy of it
    report = json.loads(result.stdout.splitlines()[-1])
    assert set(report) >= {"hardware", "commit", "command", "model", "block_size", "restore", "raw"}
    assert (report["model"], report["block_size"], report["restore"]) == ("tiny-random", 16, "load")
    assert report["raw"]["h2d_GBps"] > 0
    assert [(row["arm"], row["prefix_tokens"]) for row in report["rows"]] == [
        (arm, length) for arm in ARMS for length in lengths
    ]
    for row in report["rows"]:
        assert len(row["ttft_ms"]["all"]) == 2
        assert row["ttft_ms"]["min"] <= row["ttft_ms"]["p50"] <= row["ttft_ms"]["p90"]
        assert row["tokens_equal_cold"]
        assert row["num_prompts_excluded"] == 0
        assert [len(ids) for ids in row["output_token_ids"]] == [8, 8]
        tier = {"device": "device", "host": "host", "disk": "disk", "restart": "disk"}
        expected = dict.fromkeys(("device", "host", "disk"), 0)
        if row["arm"] in PLANNED:
            expected["disk"] = row["by_tier"]["disk"]
            assert 0 <= expected["disk"] <= row["prefix_tokens"]
            assert row["kv_bytes_equal"] is (True if expected["disk"] else None)
        elif row["arm"] in tier:
            expected[tier[row["arm"]]] = row["prefix_tokens"]
            assert row["kv_bytes_equal"]
            assert row["kv_digest_loaded"] == row["kv_digest_computed"]
            assert None not in row["kv_digest_loaded"]
        assert row["by_tier"] == expected
        assert row["cached_tokens"] == sum(expected.values())
        loaded = expected["host"] + expected["disk"]
        assert row["bytes_loaded"] == loaded * 2048
        if expected["disk"] and row["page_cache"] != "warm":
            most = 1.2 if row["arm"] not in PLANNED else math.inf  # computing may overtake reads
            assert 0.95 <= row["bytes_from_disk"] / row["bytes_loaded"] <= most
    assert not list(tmp_path.iterdir()), "the bench leaves its store behind"


@pytest.mark.parametrize(
    ("option", "value"), [("--arms", "warm"), ("--prefix-tokens", "16,99999999")]
)
def test_bench_ttft_refuses_what_it_cannot_measure(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "ttft", "--model", "tiny-random", option, value]) == 2
    golden.told(capsys.readouterr().err)


ALL_COLD = {("cold", 64): 2, ("cold", 128): 2}


@pytest.mark.parametrize(
    ("arms", "interrupted_at", "served", "problems"),
    [
        ("cold,disk", 0, {}, []),
        ("cold,disk", 2, {}, []),
        ("cold,disk", 4, {("cold", 64): 1, ("disk", 64): 1}, ["1 of 4 cases"]),
        ("cold,restart", 3, {("cold", 64): 2}, ["2 of 4 cases", "0 of 4 restarts"]),
        ("restart", 3, {}, []),  # only cold runs were measured, which nobody asked for
        ("cold,restart", 7, ALL_COLD | {("restart", 64): 1}, ["1 of 4 restarts"]),
        ("cold,restart", 8, ALL_COLD | {("restart", 64): 2}, ["2 of 4 restarts"]),
        (
            "cold,restart,planned_restart",
            8,
            ALL_COLD | {("restart", 64): 1, ("planned_restart", 64): 1},
            ["1 of 4 restarts"],
        ),
    ],
)
def test_bench_ttft_that_is_interrupted_reports_what_was_measured(
    arms: str,
    interrupted_at: int,
    served: dict[tuple[str, int], int],
    problems: list[str],
    tieredkv: CommandLine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_this_process: None,
) -> None:
    """Interrupt the bench before it serves a prompt; each process serves one to warm up."""
    num_served = 0

    def serve_once(llm: LLM, prompt: list[int], **options: Any) -> Sample:
        nonlocal num_served
        if num_served == interrupted_at:
            os.kill(os.getpid(), signal.SIGINT)
        num_served += 1
        return honest(llm, prompt, **options)

    honest = ttft.serve_once
    monkeypatch.setattr(ttft, "serve_once", serve_once)
    words = ["--model", "tiny-random", "--prefix-tokens", "64,128", "--repeats", "2"]
    words += ["--arms", arms, "--disk-dir", ".", "--json"]
    exit_code, stdout, stderr = tieredkv("bench", "ttft", *words)
    assert not list(tmp_path.iterdir()), "the bench leaves its store behind"
    if not served:
        assert (exit_code, stdout) == (130, "")
        return
    assert exit_code == 1, stderr
    report = json.loads(stdout.splitlines()[-1])
    counts = {(r["arm"], r["prefix_tokens"]): len(r["ttft_ms"]["all"]) for r in report["rows"]}
    assert counts == served
    assert report["problems"] == [f"interrupted after {each}" for each in problems]


@pytest.fixture
def tieredkv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> CommandLine:
    """Return a function that runs a command in this process: exit code, stdout and stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["tieredkv", *words])  # a report names this as its command
        capsys.readouterr()
        return main(list(words)), *capsys.readouterr()

    return run


@pytest.fixture
def run_bench(tieredkv: CommandLine, tmp_path: Path) -> Bench:
    """Return a function that runs a bench, draws if matplotlib is there, and returns the report."""

    def run(*words: str) -> dict[str, Any]:
        picture = tmp_path / f"{words[0]}.png"
        plot = ["--plot", str(picture)] if find_spec("matplotlib") else []
        exit_code, stdout, stderr = tieredkv("bench", *words, "--commit", "abc", "--json", *plot)
        assert exit_code == 0, stdout + stderr
        *table, last = stdout.splitlines()
        report: dict[str, Any] = json.loads(last)
        assert set(report) >= {"hardware", "commit", "command", "raw", "rows", "problems"}
        assert (report["commit"], report["problems"]) == ("abc", [])
        assert report["command"].startswith(f"tieredkv bench {words[0]}")
        assert all(limit > 0 for limit in report["raw"].values())
        assert any("raw limits of this run" in line for line in table)
        if find_spec("matplotlib"):
            assert picture.read_bytes().startswith(b"\x89PNG")
        return report

    return run


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have benches measure in this process, which has imported torch already.

    That they start processes of their own is tested with `bench ttft`, and where a crowd is
    interrupted or stopped.
    """
    for module in (crowd, restore, ttft):
        monkeypatch.setattr(module, "in_new_process", lambda work, *arguments: work(*arguments))


@pytest.fixture
def known_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell benches the limits of the device, whose measuring the first bench of attention tests."""
    monkeypatch.setattr(raw, "gemm_TFLOPs", lambda dtype: 0.05)
    monkeypatch.setattr(raw, "copy_GBps", lambda: 10.0)


def test_bench_transfer_moves_every_byte_and_tells_the_ratio_to_raw(run_bench: Bench) -> None:
    sizes = ["--block-size-bytes", "4KiB,20KiB", "--total", "1MiB", "--repeats", "2"]
    report = run_bench("transfer", *sizes)
    directions = ["host to device", "device to host", "both at once"]
    assert list(report["raw"]) == directions
    assert [(row["block_bytes"], row["direction"]) for row in report["rows"]] == [
        (size, direction) for size in (4096, 20480) for direction in directions
    ]
    for row in report["rows"]:
        assert row["bytes_equal"] is True
        assert row["blocks"] == (1 << 20) // row["block_bytes"]
        assert row["ratio"] == pytest.approx(row["GBps"] / row["raw_GBps"])
        assert row["host_us_per_block"] > 0
        assert (row["one_block_us"] is None) == (row["direction"] == "both at once")


def test_bench_attention_reaches_the_reference_and_tells_what_limits_it(run_bench: Bench) -> None:
    cases = ["32+0", "16+48", "1x64", "3x16..100"]
    words = ["--shape", "qwen2.5-0.5b", "--cases", ",".join(cases), "--repeats", "1"]
    report = run_bench("attention", *words)
    assert [(row["kind"], row["case"]) for row in report["rows"]] == list(
        zip(["prefill", "prefill", "decode", "decode"], cases, strict=True)
    )
    pairs = [32 * 33 // 2, 16 * 48 + 16 * 17 // 2, 64, 16 + 40 + 100]
    keys = [32, 64, 64, 16 + 40 + 100]
    for row, num_pairs, num_keys in zip(report["rows"], pairs, keys, strict=True):
        assert row["relative_error"] < 1e-4
        flops, kv_bytes = 4 * 14 * 64 * num_pairs, 2 * 2 * 64 * 4 * num_keys
        assert row["TFLOPs"] == pytest.approx(flops / row["ms"] / 1e9)
        assert row["GBps"] == pytest.approx(kv_bytes / row["ms"] / 1e6)
        gemm_ms = flops / report["raw"]["gemm_TFLOPs"] / 1e9
        copy_ms = kv_bytes / report["raw"]["copy_GBps"] / 1e6
        assert row["limit_ms"] == pytest.approx(max(gemm_ms, copy_ms))
        assert row["limited_by"] == ("gemm" if gemm_ms > copy_ms else "copy")
        assert row["ratio"] == pytest.approx(row["limit_ms"] / row["ms"])


@pytest.mark.usefixtures("known_limits")
def test_bench_attention_counts_what_queries_see_in_a_window(run_bench: Bench) -> None:
    words = ["--heads", "4,2,32", "--window", "20", "--sinks", "--cases", "32+0,16+48,1x64,2x9"]
    report = run_bench("attention", "--shape", "qwen2.5-0.5b", *words, "--repeats", "1")
    assert (report["heads"], report["window"], report["has_sinks"]) == ([4, 2, 32], 20, True)
    pairs = [20 * 21 // 2 + 12 * 20, 16 * 20, 20, 18]
    keys = [32, 16 + 19, 20, 18]
    for row, num_pairs, num_keys in zip(report["rows"], pairs, keys, strict=True):
        assert row["relative_error"] < 1e-4
        assert row["TFLOPs"] == pytest.approx(4 * 4 * 32 * num_pairs / row["ms"] / 1e9)
        assert row["GBps"] == pytest.approx(2 * 2 * 32 * 4 * num_keys / row["ms"] / 1e6)


@pytest.mark.usefixtures("known_limits")
def test_bench_attention_counts_latents_and_the_way_that_takes_fewer_operations(
    run_bench: Bench,
) -> None:
    words = ["--shape", "deepseek-v2-lite", "--cases", "200+0,16+48,1x64", "--repeats", "1"]
    report = run_bench("attention", *words)
    absorbed = 2 * 16 * (2 * 512 + 64)
    expanded = 2 * 16 * (128 + 64 + 128) * 200 * 201 // 2 + 2 * 16 * 200 * 512 * (128 + 128)
    flops = [expanded, absorbed * (16 * 48 + 16 * 17 // 2), absorbed * 64]
    for row, num_flops, num_keys in zip(report["rows"], flops, [200, 64, 64], strict=True):
        assert row["relative_error"] < 1e-4
        assert row["TFLOPs"] == pytest.approx(num_flops / row["ms"] / 1e9)
        assert row["GBps"] == pytest.approx(576 * 4 * num_keys / row["ms"] / 1e6)


@pytest.mark.usefixtures("known_limits")
def test_bench_experts_reaches_the_reference_and_counts_the_experts_that_are_used(
    run_bench: Bench, tmp_path: Path
) -> None:
    shape = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "moe_intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 300,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    words = ["--shape", str(tmp_path), "--tokens", "1,40", "--repeats", "1"]
    report = run_bench("experts", *words)
    assert (report["experts"], report["experts_per_token"]) == (8, 2)
    assert [row["tokens"] for row in report["rows"]] == [1, 40]
    for row, num_used in zip(report["rows"], (2, 8), strict=True):
        assert row["relative_error"] < 1e-4
        assert row["experts_used"] == pytest.approx(num_used, abs=0.01)
        weights = 3 * 64 * 48
        assert row["TFLOPs"] == pytest.approx(2 * 2 * row["tokens"] * weights / row["ms"] / 1e9)
        assert row["GBps"] == pytest.approx(row["experts_used"] * weights * 4 / row["ms"] / 1e6)
        assert row["ratio"] == pytest.approx(row["limit_ms"] / row["ms"])


@pytest.mark.usefixtures("known_limits")
def test_bench_decode_counts_tokens(run_bench: Bench) -> None:
    words = ["--model", "tiny-random", "--repeats", "1", "--contexts", "40,80", "--tokens", "12"]
    report = run_bench("decode", *words, "--workloads", "3x50+9")
    assert [(row["part"], row["requests"]) for row in report["rows"]] == [
        ("itl", "1x40+13"),
        ("itl", "1x80+13"),
        ("throughput", "3x50+9"),
    ]
    expected = zip(report["rows"], (1, 1, 3), (40, 80, 50), (13, 13, 9), strict=True)
    for row, count, given, made in expected:
        assert row["output_tok_s"] == pytest.approx(count * made / row["wall_s"])
        assert row["prompt_tok_s"] == pytest.approx(count * given / row["wall_s"])
        assert 0 < row["itl_p50_ms"] <= row["itl_p99_ms"] <= row["wall_s"] * 1e3
        timed_ms = row["itl_p50_ms"] if row["part"] == "itl" else row["wall_s"] * 1e3
        assert row["ratio"] == pytest.approx(row["limit_ms"] / timed_ms)


def test_bench_restore_reports_what_was_computed_loaded_and_predicted(
    tmp_path: Path, run_bench: Bench, in_this_process: None
) -> None:
    words = ["--model", "tiny-random", "--prefix-tokens", "256,1024", "--disk-rate", "1GB,none"]
    words += ["--arms", "cold,load,planned,chunked", "--repeats", "2", "--disk-dir", "."]
    report = run_bench("restore", *words)
    assert set(report["raw"]) == {"h2d_GBps", "disk_read_GBps"}
    assert [
        (row["prefix_tokens"], row["disk_rate_GBps"], row["arm"]) for row in report["rows"]
    ] == [
        (length, rate, arm)
        for length in (256, 1024)
        for rate in (1.0, None)
        for arm in ("cold", "load", "planned", "chunked")
    ]
    for row in report["rows"]:
        # How a product is summed, and whether that depends on its size, is the processor's matter.
        assert 0 <= row["max_logit_diff"] < (1e-3 if row["arm"] != "cold" else 1e-9)
        assert row["tokens_equal_cold"] is True
        assert len(row["ttft_ms"]["all"]) == 2
        assert set(row["raw_by_threads_GBps"]) == ({"4", "16", "32"} if row["raw_GBps"] else set())
        assert row["computed_tokens"] == row["prefix_tokens"] + 64 - row["loaded_tokens"]
        if row["arm"] in ("cold", "chunked"):
            assert (row["loaded_tokens"], row["kv_bytes_equal"]) == (0, None)
        elif row["arm"] == "load":
            assert (row["loaded_tokens"], row["kv_bytes_equal"]) == (row["prefix_tokens"], True)
            assert row["load_GBps"] > 0
        else:
            assert row["predicted_ms"] > 0
            assert (row["ideal_ms"] is None) == (report["raw"]["disk_read_GBps"] is None)
        assert (row["elsewhere_tokens"], row["is_from_claimed_tier"]) == (0, True)
        assert row["bytes_loaded"] == [2048 * each["disk"] for each in row["by_tier"]]
        if row["arm"] in ("cold", "chunked"):
            assert row["page_cache"] is row["disk_over_loaded"] is None
        elif row["page_cache"] != "warm" and any(row["bytes_loaded"]):
            assert row["page_cache"] == "bypassed"
            most = 1.2 if row["arm"] == "load" else math.inf
            assert 0.95 <= row["disk_over_loaded"] <= most
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".png"]


def test_the_raw_disk_may_be_read_for_longer_than_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders: list[list[int]] = []

    def move(_file: raw.RawFile, _move: Any, blocks: list[int], num_threads: int) -> float:
        orders.append(sorted(blocks))
        return float(num_threads)

    with contextlib.closing(raw.RawDisk(tmp_path, 4 * raw.READ_BYTES, (1, 3, 2))) as disk:
        monkeypatch.setattr(raw.RawFile, "move_GBps", move)
        monkeypatch.setattr(disk._file, "is_direct", True)
        assert disk.read_GBps(8 * raw.READ_BYTES) == [1.0, 3.0, 2.0]
        assert disk.read_GBps(2 * raw.READ_BYTES) == [1.0, 3.0, 2.0]
    assert orders[:3] == [[0, 0, 1, 1, 2, 2, 3, 3]] * 3
    assert [len(set(order)) for order in orders[3:]] == [2, 2, 2]


@pytest.mark.parametrize(
    ("token_ids", "gap", "found"),
    [
        ([5, 6, 7], 0.1, (0.25, True, False)),
        ([5, 9, 7], 0.1, (0.125, True, True)),  # a near tie; what follows has another context
        ([5, 9, 7], 0.5, (0.125, False, False)),
    ],
)
def test_tokens_are_compared_up_to_the_first_that_differs(
    token_ids: list[int], gap: float, found: tuple[float, bool, bool]
) -> None:
    logits = np.zeros((3, 10), dtype=np.float32)
    logits[[0, 1, 2], [5, 6, 7]] = gap
    cold = Sample(0.0, None, {}, [5, 6, 7], logits, None, frozenset(), 0.0, {})
    changes = np.array([[0.0625], [-0.125], [0.25]], dtype=np.float32)
    sample = cold._replace(token_ids=token_ids, logits=logits + changes)
    assert compare(sample, cold) == found


@pytest.mark.parametrize(
    ("are_equal", "are_excluded", "found"),
    [
        ([True] * 5, [False] * 5, True),
        ([True] * 5, [False] * 4 + [True], True),
        ([True] * 5, [False] * 3 + [True] * 2, None),
        ([True] * 4 + [False], [False] * 3 + [True, False], False),
    ],
)
def test_tokens_are_called_equal_where_four_of_five_prompts_count(
    are_equal: list[bool], are_excluded: list[bool], found: bool | None
) -> None:
    assert are_tokens_equal(are_equal, are_excluded) is found


def test_logits_may_differ_from_the_cold_ones_as_much_as_chunks_make_them() -> None:
    rows = [{"arm": arm, "max_logit_diff": 0.1} for arm in ("cold", "load", "chunked")]
    for most, num_problems in ((0.2, 0), (0.3, 1)):
        planned = {"arm": "planned", "max_logit_diff": most}
        problems = restore.logit_problems([*rows, planned, rows[0]])
        assert len(problems) == num_problems
        for problem in problems:
            golden.told(problem)
        assert not restore.logit_problems([*rows[:2], planned]), "nothing to compare it with"


RESTORE = ["restore", "--model", "tiny-random", "--prefix-tokens", "256", "--repeats", "1"]
RESTORE += ["--disk-dir", "."]


def test_bench_restore_complains_of_blocks_that_were_left_in_host_memory(
    tieredkv: CommandLine, monkeypatch: pytest.MonkeyPatch, in_this_process: None
) -> None:
    monkeypatch.setattr(restore, "demote_all", lambda llm, _tier: demote_all(llm, "host"))
    exit_code, stdout, _ = tieredkv("bench", *RESTORE, "--arms", "cold,load", "--json")
    report = json.loads(stdout.splitlines()[-1])
    cold, load = report["rows"]
    assert (exit_code, cold["elsewhere_tokens"], load["elsewhere_tokens"]) == (1, 0, 256)
    assert [cold["is_from_claimed_tier"], load["is_from_claimed_tier"]] == [True, False]
    [problem] = report["problems"]
    golden.told(problem)


@pytest.fixture
def disk_that_gives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the page cache serve all reads of stores, which seem to bypass it."""
    monkeypatch.setattr(sources, "page_cache", lambda _: "bypassed")
    monkeypatch.setattr(raw, "own_bytes", lambda _pid, _direction: 4096)


FROM_MEMORY = "the disk gave 0 bytes for each byte loaded; the others came from memory"


def test_bench_restore_complains_of_bytes_that_the_disk_did_not_give(
    tieredkv: CommandLine, disk_that_gives_nothing: None, in_this_process: None
) -> None:
    exit_code, stdout, _ = tieredkv("bench", *RESTORE, "--arms", "cold,load,device", "--json")
    report = json.loads(stdout.splitlines()[-1])
    assert exit_code == 1
    assert [row["bytes_from_disk"] for row in report["rows"]] == [[0], [0], [0]]
    assert [row["page_cache"] for row in report["rows"]] == [None, "bypassed", None]
    assert report["problems"] == [f"load at 256 tokens: {FROM_MEMORY}"]


CROWD_ARMS = ["no_disk", "load", "planned"]


def check_crowd(report: dict[str, Any], row: dict[str, Any]) -> None:
    """Check what each row of the crowd benches must hold, whatever the machine's speed."""
    for name in ("ttft_ms", "itl_ms"):
        assert 0 < row[name]["p50"] <= row[name]["p90"] <= row[name]["p99"]
    assert row["answers_per_s"] == pytest.approx(row["answers"] / row["wall_s"])
    assert row["hit_rate"] == pytest.approx(sum(row["by_tier"].values()) / row["prompt_tokens"])
    assert row["equal_to_no_disk"] == 1.0, "an answer depends on the tier of its prefix"
    if row["arm"] == "no_disk":
        assert (row["by_tier"]["disk"], row["bytes_read"], row["bytes_written"]) == (0, 0, 0)
        assert (row["bytes_from_disk"], row["page_cache"]) == (0, None)
    elif row["page_cache"] != "warm":
        assert row["page_cache"] == "bypassed"
        assert row["bytes_from_disk"] >= 0.95 * row["bytes_read"]
    assert 0 <= row["bytes_useful"] <= row["bytes_read"]
    assert 0 <= row["disk_busy"] <= 1
    assert 0 <= row["recomputed_tokens"] <= row["computed_tokens"]
    assert (row["raw_GBps"] is None) == (report["raw"]["disk_read_GBps"] is None)
    if row["raw_GBps"] and row["reading_s"]:
        share = row["bytes_useful"] / row["reading_s"] / row["raw_GBps"] / 1e9
        assert row["disk_useful"] == pytest.approx(share)


def test_bench_returns_finds_nothing_in_ram_and_the_capacity_of_each_arm(
    tmp_path: Path, run_bench: Bench, in_this_process: None
) -> None:
    words = ["--model", "tiny-random", "--prefix-tokens", "160-320", "--new-tokens", "20"]
    words += ["--answers", "10", "--answer-tokens", "4", "--rates", "4", "--disk-dir", "."]
    report = run_bench("returns", *words, "--arms", "no_disk,load", "--ttft-limit", "1000")
    arms = [(row["arm"], row["rate"]) for row in report["rows"]]
    assert arms == [("no_disk", 4), ("load", 4)]
    for row in report["rows"]:
        check_crowd(report, row)
        assert row["answers"] == 10
        assert row["is_held"]
        by_tier, prompt_tokens = row["by_tier"], row["prompt_tokens"]
        assert by_tier["device"] + by_tier["host"] <= 0.02 * prompt_tokens
        if row["arm"] == "load":
            assert by_tier["disk"] > 0.8 * prompt_tokens
            assert 0.8 < row["bytes_useful"] / row["bytes_read"] <= 1
            assert row["bytes_useful"] == by_tier["disk"] * 2048
            assert row["reading_s"] > 0
    assert report["capacity"] == {"no_disk": 4.0, "load": 4.0}
    assert report["capacity_is"] == {"no_disk": "at least", "load": "at least"}
    assert report["workload"]["sessions"] == 8
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".png"]


def test_a_crowd_bench_complains_of_bytes_that_the_disk_did_not_give(
    tieredkv: CommandLine, disk_that_gives_nothing: None, in_this_process: None
) -> None:
    words = ["--model", "tiny-random", "--prefix-tokens", "160-320", "--new-tokens", "20"]
    words += ["--answers", "3", "--answer-tokens", "2", "--rates", "9", "--disk-dir", "."]
    words += ["--ttft-limit", "1000", "--arms", "load", "--json"]
    exit_code, stdout, _ = tieredkv("bench", "returns", *words)
    report = json.loads(stdout.splitlines()[-1])
    [row] = report["rows"]
    assert (exit_code, row["bytes_from_disk"], row["page_cache"]) == (1, 0, "bypassed")
    assert row["bytes_read"] > 0
    assert report["problems"] == [f"load at 9/s: {FROM_MEMORY}"]


def test_bench_sessions_complains_where_reads_came_from_memory(
    tieredkv: CommandLine, monkeypatch: pytest.MonkeyPatch, in_this_process: None
) -> None:
    monkeypatch.setattr(
        crowd_figures, "bytes_problem", lambda row, _plan: row["page_cache"] and "warm"
    )
    words = ["--model", "tiny-random", "--scale", "60", "--turns", "2", "--seed", "0"]
    words += ["--sessions", "1", "--disk-dir", ".", "--arms", "no_disk,load", "--json"]
    exit_code, stdout, _ = tieredkv("bench", "sessions", *words)
    report = json.loads(stdout.splitlines()[-1])
    assert (exit_code, report["problems"]) == (1, ["load with 1 sessions: warm"])


@pytest.mark.slow
def test_bench_returns_does_not_run_an_arm_beyond_the_rate_that_it_cannot_hold(
    run_bench: Bench,
) -> None:
    words = ["--model", "tiny-random", "--prefix-tokens", "160-320", "--new-tokens", "20"]
    words += ["--answers", "3", "--answer-tokens", "2", "--rates", "50,9", "--disk-dir", "."]
    report = run_bench("returns", *words, "--arms", "no_disk", "--ttft-limit", "0.0001")
    assert [(row["rate"], row["is_held"]) for row in report["rows"]] == [(9, False)]
    assert report["capacity"] == {"no_disk": None}
    assert report["capacity_is"] == {"no_disk": "below the lowest rate"}


@pytest.mark.slow
def test_bench_sessions_does_the_same_turns_in_all_arms(
    tmp_path: Path, run_bench: Bench, in_this_process: None
) -> None:
    words = ["--model", "tiny-random", "--scale", "60", "--turns", "3", "--seed", "0,1"]
    words += ["--sessions", "1,3", "--device-size", "3MiB", "--host-size", "1MiB"]
    report = run_bench("sessions", *words, "--disk-dir", ".")
    arms = [(row["arm"], row["sessions"]) for row in report["rows"]]
    assert arms == [(arm, count) for count in (1, 3) for arm in CROWD_ARMS]
    for row in report["rows"]:
        check_crowd(report, row)
        same = [
            each["common"]["answers"]
            for each in report["rows"]
            if row["sessions"] == each["sessions"]
        ]
        assert set(same) == {row["common"]["answers"]}
        digests = {
            each["tokens_digest"] for each in report["rows"] if row["sessions"] == each["sessions"]
        }
        assert digests == {row["tokens_digest"]}
        assert 0 < row["common"]["answers"] <= row["answers"]
        if row["sessions"] == 1:  # with others, it is luck how far they are when the first one ends
            assert row["answers"] == 2 * 3
            assert row["prompt_tokens"] == report["rows"][0]["prompt_tokens"]
            assert row["by_tier"]["disk"] == 0, "a run begins with empty tiers"
        else:
            assert 2 * 3 <= row["answers"] <= 2 * 3 * 3
    told = {"turns": 3, "seeds": [0, 1], "scale": 60.0, "trace": None, "until": "first"}
    assert report["workload"] == report["workload"] | told
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".png"]


@pytest.mark.slow
def test_bench_sessions_goes_on_from_the_runs_that_a_file_has(
    tmp_path: Path, run_bench: Bench, tieredkv: CommandLine, in_this_process: None
) -> None:
    words = ["--model", "tiny-random", "--scale", "60", "--turns", "2", "--sessions", "1"]
    words += ["--disk-dir", ".", "--runs", "runs.jsonl", "--arms", "no_disk,load"]
    once = run_bench("sessions", *words, "--seed", "0")
    [*before] = (tmp_path / "runs.jsonl").read_text().splitlines()
    twice = run_bench("sessions", *words, "--seed", "0,1")
    after = (tmp_path / "runs.jsonl").read_text().splitlines()
    assert (len(before), len(after), after[:2]) == (2, 4, before)
    assert [row["seeds"] for row in once["rows"] + twice["rows"]] == [[0]] * 2 + [[0, 1]] * 2
    assert [(it["arm"], it["seed"]) for it in twice["runs"]] == [
        (arm, seed) for arm in ("no_disk", "load") for seed in (0, 1)
    ]
    assert [it for it in twice["runs"] if it["seed"] == 0] == once["runs"]
    assert sum(row["answers"] for row in twice["rows"]) == 2 * 2 * 2
    given = ["bench", "sessions", *words, "--seed", "0", "--device-size", "4MiB"]
    exit_code, _, stderr = tieredkv(*given)
    assert exit_code == 2
    golden.told(stderr)


@pytest.mark.slow
def test_bench_sessions_that_is_stopped_reports_the_runs_that_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "tieredkv", "bench", "sessions", "--turns", "4"]
    command += ["--model", "tiny-random", "--scale", "60", "--sessions", "2", "--arms", "load"]
    command += ["--seed", ",".join(map(str, range(500))), "--disk-dir", str(tmp_path)]

    def wait(process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        ended = re.compile(r"load with 2 sessions, seed 1: \d+ answers")
        assert any(map(ended.match, process.stderr))

    report = stop(command, wait)
    [row] = report["rows"]
    assert row["seeds"][:2] == [0, 1]
    missing = [f"not measured: load with 2 sessions, seed {seed}" for seed in range(500)]
    assert report["problems"] == missing[len(row["seeds"]) :]
    assert not list(tmp_path.iterdir()), "the bench leaves its store behind"


@pytest.mark.slow
def test_bench_sessions_replays_a_trace(tmp_path: Path, run_bench: Bench) -> None:
    requests = [
        {"timestamp": 100 * i, "input_length": 512 * (3 + i), "output_length": 30}
        | {"hash_ids": [9, session, *range(10 * session, 10 * session + 1 + i)]}
        for i in range(3)
        for session in (1, 2)
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, requests)))
    words = ["--model", "tiny-random", "--scale", "16", "--turns", "3", "--seed", "0"]
    words += ["--sessions", "2", "--trace", "trace.jsonl", "--disk-dir", ".", "--arms", "no_disk"]
    [row] = run_bench("sessions", *words)["rows"]
    check_crowd({"raw": {"disk_read_GBps": row["raw_GBps"]}}, row)
    assert 3 <= row["answers"] <= 6
    assert row["by_tier"]["device"] > 0.4 * row["prompt_tokens"]


@pytest.mark.parametrize("bench", few(["sessions", "returns"]))
def test_ctrl_c_leaves_nothing_of_a_crowd_behind(bench: str, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "tieredkv", "bench", bench, "--model", "tiny-random"]
    sizes = {
        "returns": ["--prefix-tokens", "160-320", "--new-tokens", "20", "--rates", "0.01"],
        "sessions": ["--scale", "60", "--sessions", "2", "--turns", "10000"],
    }
    words = [*command, "--arms", "load", "--disk-dir", str(tmp_path), *sizes[bench]]
    interrupt(words, tmp_path, "*/load*/index", "no store is made")


def interrupt(command: list[str], folder: Path, made: str, complaint: str) -> None:
    """Press Ctrl-C once a bench has made a file in a folder; check that it leaves nothing there."""
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches all processes of a terminal's session
        preexec_fn=heed_ctrl_c,
    )
    try:
        wait_until(lambda: any(folder.glob(made)), complaint, process=process)
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=HANG_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert not list(folder.iterdir())


def stop(command: list[str], wait: Callable[[subprocess.Popen[str]], None]) -> dict[str, Any]:
    """Stop a bench with SIGTERM once it has come so far; return what it reports all the same."""
    pipes: dict[str, Any] = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*command, "--json"], **pipes)
    try:
        wait(process)
        process.terminate()  # the measuring process gets no signal from outside
        stdout, stderr = process.communicate(timeout=HANG_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 1, stderr
    report: dict[str, Any] = json.loads(stdout.splitlines()[-1])
    return report


@pytest.mark.slow
@pytest.mark.parametrize("bench", ["restore", "ttft"])
def test_a_bench_that_is_stopped_reports_the_cases_that_ended(bench: str, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "tieredkv", "bench", bench, "--model", "tiny-random"]
    command += [
        "--arms",
        "cold,device",
        "--prefix-tokens",
        "128,256",
        "--repeats",
        "100000",
        "--disk-dir",
        str(tmp_path),
    ]

    def wait(process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("measuring"):
                break

    report = stop(command, wait)
    counts = {len(row["ttft_ms"]["all"]) for row in report["rows"]}
    assert max(counts) - min(counts) <= 1
    assert all(row["tokens_equal_cold"] for row in report["rows"])
    [problem] = report["problems"]
    assert re.fullmatch(r"interrupted after \d+ of 200000 cases", problem)
    assert not list(tmp_path.iterdir()), "the bench leaves its store behind"


@pytest.mark.slow
def test_a_crowd_bench_that_is_stopped_reports_the_arms_that_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "tieredkv", "bench", "returns", "--model", "tiny-random"]
    command += ["--prefix-tokens", "160-320", "--new-tokens", "20", "--answers", "4", "--rates"]
    command += ["4", "--ttft-limit", "1000", "--disk-dir", str(tmp_path)]

    def wait(process: subprocess.Popen[str]) -> None:
        complaint = "the second arm did not begin"
        wait_until(lambda: any(tmp_path.glob("*/load*/*")), complaint, process=process)

    report = stop(command, wait)
    assert [row["arm"] for row in report["rows"]] == ["no_disk"]
    assert report["capacity"].keys() == {"no_disk"}
    assert report["problems"] == [
        "interrupted, so that these arms were not measured: load, planned"
    ]
    assert not list(tmp_path.iterdir()), "the bench leaves its store behind"


DISK = ["--block-bytes", "64KiB", "--disk-size", "8MiB", "--index-blocks", "100,1000"]


def test_bench_disk_puts_the_store_beside_the_raw_disk(tmp_path: Path, run_bench: Bench) -> None:
    report = run_bench("disk", "--dir", ".", *DISK, "--repeats", "2")
    rates = ["read_GBps", "write_GBps", "checksum_GBps", "cipher_GBps"]
    assert list(report["raw"]) == rates
    read, bursts, *writes, few, many = report["rows"]
    assert [(row["part"], row["case"]) for row in report["rows"]] == [
        ("read", "scattered"),
        ("read", "bursts"),
        ("write", "sync commit"),
        ("write", "sync none"),
        ("index", "100 blocks"),
        ("index", "1000 blocks"),
    ]
    for row in (read, bursts, *writes):
        assert len(row["GBps_all"]) == len(row["raw_GBps_all"]) == len(row["ratio_all"]) == 2
        assert row["raw_GBps_all"][0][1] > 0
        for ratio, rate, around in zip(
            row["ratio_all"], row["GBps_all"], row["raw_GBps_all"], strict=True
        ):
            assert ratio == pytest.approx(rate / (sum(around) / 2))
        assert row["ratio"] == pytest.approx(sum(row["ratio_all"]) / 2)
    for row in (read, *writes):
        assert (row["core_s_per_GB"] or 0) == pytest.approx(sum(row["core_s_per_GB_all"]) / 2)
        assert (row["amplification"] or 0) == pytest.approx(sum(row["amplification_all"]) / 2)
        assert (row["own_amplification"] is None) == (row["amplification"] is None)
    assert report["raw"]["read_GBps"] == read["raw_GBps"]
    is_counted = read["amplification"] is not None
    assert is_counted == (not report["disk"]["counter"].startswith("none"))
    assert report["disk"]["blocks"] == (8 << 20) // (68 << 10)
    for row in (few, many):
        assert row["hit_us"] == sorted(row["hit_us_all"])[len(row["hit_us_all"]) // 2]
        assert row["first_us"] == row["first_us_all"][0]
        assert row["growth"] == row["hit_us"] / few["hit_us"]
        assert min(row["miss_us"], row["client_us"], row["client_miss_us"], row["open_s"]) > 0
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".png"]


@pytest.mark.slow
def test_bench_disk_reports_wrong_bytes_and_a_folder_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Overwrite an extent and swap the names of two blocks before the bench reads them."""
    honest, drop_cached = disk._record, raw.drop_cached

    def swap(number: int, size_bytes: int) -> BlockRecord:
        return honest(number ^ 1 if number // 2 == pair else number, size_bytes)

    def spoil(folder: Path) -> None:
        drop_cached(folder)
        for segment in folder.glob("store/segments/*.seg"):
            with segment.open("r+b") as file:
                # Skip the extents of the two swapped blocks.
                while (it := decode_header(file.read(4 << 10))) and it.record.position // 2 == pair:
                    file.seek(64 << 10, os.SEEK_CUR)
                file.seek(100, os.SEEK_CUR)
                file.write(b"nonsense")
            monkeypatch.setattr(disk, "_record", swap)

    # These two are stored last, after the fill and a round of each `sync`: they are not evicted.
    pair = (3 * ((8 << 20) // (68 << 10)) + 2) // 2
    options: dict[str, Any] = {"block_bytes": "64KiB", "disk_size": "8MiB", "index_blocks": [10]}
    options |= {"repeats": 1, "encryption": "off"}
    monkeypatch.setattr(raw, "drop_cached", spoil)
    # On a machine short of memory, reading the worker's program again counts as its reads, too.
    monkeypatch.setattr(raw, "own_bytes", lambda _pid, _direction: 0)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        report = disk.run(ignore_progress, folder=Path(folder), **options)
        assert not os.listdir(folder)
    golden.told(report["disk"]["counter"])
    assert [row.get("amplification") for row in report["rows"]] == [None] * 5
    golden.told("\n".join(report["problems"]))


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_of_bench_disk_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "tieredkv", "bench", "disk", "--dir", str(tmp_path)]
    words = [*command, *DISK, "--repeats", "1000"]
    interrupt(words, tmp_path, "*/store/segments/*.seg", "nothing is written")


TINY = ["--model", "tiny-random", "--scale", "50"]
SMALL = ["--model", "tiny-random", "--prefix-tokens", "200-200", "--new-tokens", "9"]


@pytest.mark.parametrize(
    "words",
    [
        ["disk", "--dir", "/", "--block-bytes", "6000"],
        ["disk", "--dir", "/", "--disk-size", "1MiB"],
        ["disk", "--dir", "/", "--disk-size", "1000TiB"],
        ["disk", "--dir", "/dev/null/x"],
        ["transfer", "--total", "1MiB"],
        ["attention", "--cases", "8k+0"],
        ["decode", "--model", "tiny-random", "--contexts", "1k"],
        ["decode", "--model", "tiny-random", "--workloads", "8"],
        ["returns", "--model", "tiny-random"],
        ["returns", "--model", "tiny-random", "--prefix-tokens", "99-99", "--sessions", "2"],
        ["returns", *SMALL, "--disk-size", "1MiB"],
        ["returns", *SMALL, "--rates", "0"],
        ["returns", *SMALL, "--prefix-tokens", "9-3"],
        ["returns", *SMALL, "--prefix-tokens", "9,30"],
        ["restore", "--model", "tiny-random", "--disk-rate", "fast"],
        ["returns", *SMALL, "--disk-dir", "/dev/null/x"],
        ["returns", *SMALL, "--disk-size", "999TiB"],
        ["sessions", "--model", "tiny-random"],
        ["sessions", *TINY, "--device-size", "1MiB"],
        ["sessions", *TINY, "--arms", "cold"],
        ["sessions", *TINY, "--trace", "/dev/null"],
        ["attention", "--heads", "64,8"],
        ["attention", "--heads", "6,4,64"],
        ["experts", "--shape", "qwen2.5-0.5b"],
    ],
)
def test_a_bench_refuses_what_it_cannot_measure(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    text = re.sub(r"[\d.]+ [KMGT]iB free|hold \d+ tokens", "SIZE", told.err)
    golden.told(text, hide={tempfile.gettempdir(): "TEMP"})


def test_a_picture_without_matplotlib_is_refused_before_anything_is_measured(
    tmp_path: Path,
) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError('it is not here')")
    command = [sys.executable, "-P", "-m", "tieredkv", "bench", "transfer", "--plot", "x.png"]
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environ)
    assert (result.returncode, result.stdout) == (2, "")
    golden.told(result.stderr)


TIERS_OFF = """
[retention.device_only]
idle = "10m"
absolute = "1h"
tiers = ["device"]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a server that requires a key and has a retention policy for VRAM only."""
    folder = tmp_path_factory.mktemp("serve")
    (folder / "tiers.toml").write_text(TIERS_OFF)
    words = ["--config", str(folder / "tiers.toml"), "--device-size", "4MiB", "--api-key", "sk-a"]
    with running(folder, *words) as it:
        yield it


def test_bench_serve_reports_which_tier_each_prefix_came_from(
    server: Server, tmp_path: Path, tieredkv: CommandLine
) -> None:
    words = ["--rates", "2", "--duration", "3", "--turns", "3", "--think", "0.2"]
    words += ["--system-tokens", "300", "--user-tokens", "100", "--answer-tokens", "20"]
    words += ["--retentions", "device_only,in_memory", "--api-key", "sk-a", "--json"]
    picture = tmp_path / "serve.png"
    if find_spec("matplotlib"):
        words += ["--plot", str(picture)]
    exit_code, stdout, stderr = tieredkv("bench", "serve", "--url", server.root, *words)
    assert exit_code == 0, stderr
    report = json.loads(stdout.splitlines()[-1])
    assert report["model"] == "tiny-random"
    assert [row["retention"] for row in report["rows"]] == ["device_only", "in_memory"]
    for row in report["rows"]:
        sources = [row[f"{source}_answers"] for source in ("cold", "device", "host", "disk")]
        assert sum(sources) == row["answers"] > 0
        assert row["failed"] == 0
        assert 0 < row["hit_rate"] < 1
        assert row["ttft_p50_ms"] <= row["ttft_p99_ms"]
    assert report["rows"][0]["host_answers"] == report["rows"][0]["disk_answers"] == 0
    assert picture.exists() == bool(find_spec("matplotlib"))


def test_bench_serve_fails_where_requests_fail(server: Server, tieredkv: CommandLine) -> None:
    words = ["--rates", "9", "--duration", "1", "--api-key", "sk-a", "--retentions", "for_ever"]
    exit_code, _, stderr = tieredkv("bench", "serve", "--url", server.root, *words)
    assert exit_code == 1
    golden.told("\n".join(it for it in stderr.splitlines() if it.startswith("error: ")))


def test_bench_serve_names_the_address_that_refuses_or_does_not_answer(
    server: Server, tieredkv: CommandLine
) -> None:
    exit_code, stdout, stderr = tieredkv(
        "bench", "serve", "--url", server.root, "--api-key", "sk-b"
    )
    assert (exit_code, stdout) == (2, "")
    golden.told(stderr, hide={server.root: "URL"})
    nobody = "http://127.0.0.1:9"
    exit_code, stdout, stderr = tieredkv("bench", "serve", "--url", nobody)
    assert (exit_code, stdout) == (3, "")
    golden.told(re.sub("(does not answer:).*", r"\1 CAUSE", stderr))
