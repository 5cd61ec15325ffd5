"""What the measurement of vLLM's tiers reports, with a stand-in for vLLM."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.golden import told
from tests.serving import free_port
from tests.stress import vllm_stand_in, vllm_tiers

STAND_IN = f"{sys.executable} {vllm_stand_in.__file__}"


def measure(tmp_path: Path, *more: str) -> dict[str, Any]:
    """Run the measurement with prompts of 64 and 128 tokens; return its report."""
    words = ["--folder", str(tmp_path / "kv"), "--model-dir", str(tmp_path / "model")]
    words += ["--shape", "tiny-random", "--prefix-tokens", "64,128", "--repeats", "2"]
    words += ["--vllm", STAND_IN, "--port", str(free_port()), "--log", str(tmp_path / "log")]
    result = CliRunner().invoke(
        vllm_tiers.main, [*words, "--commit", "abc", *more], catch_exceptions=False
    )
    report: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    assert result.exit_code == bool(report["problems"]), result.output
    return report


def test_each_arm_of_each_tier_has_figures(tmp_path: Path) -> None:
    report = measure(tmp_path, "--tiers", "ram,fs")
    measured = [(row["tier"], row["arm"], row["prefix_tokens"]) for row in report["rows"]]
    arms = {"ram": ("cold", "device", "host"), "fs": vllm_tiers.ARMS}
    assert sorted(measured) == sorted(
        (tier, arm, length) for tier, some in arms.items() for arm in some for length in (64, 128)
    )
    assert all(row["tokens"] == ["equal", "equal"] for row in report["rows"])
    assert not any(row["gaps"] for row in report["rows"])
    assert {row["arm"] for row in report["rows"] if "GBps" in row} == {"disk", "restart"}
    assert report["metrics"]["fs"] == {"vllm:kv_offload_load_bytes": 5.0}


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["tokens", "miss", "ends"])
def test_what_is_wrong_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setenv("TIEREDKV_FAULT", fault)
    problems = measure(tmp_path, "--tiers", "fs")["problems"]
    for each in sorted(problems):
        told(each)


@pytest.mark.parametrize("may_compute", [False, True])
def test_a_prompt_that_was_computed_by_choice_is_no_problem(
    tmp_path: Path, may_compute: bool
) -> None:
    measuring = vllm_tiers.Measuring("tieredkv", tmp_path, 1, 0.5, may_compute=may_compute)
    computed = vllm_tiers.Answer(5.0, ["t1"], [{"t1": -0.1}], cached_tokens=0, bytes_from_disk=0)
    loaded = vllm_tiers.Answer(4.0, ["t1"], [{"t1": -0.1}], cached_tokens=64, bytes_from_disk=128)
    measuring.note("disk", 64, computed, computed)
    measuring.note("disk", 64, loaded, computed)
    [row] = measuring.rows()
    assert (row["num_loaded"], row["GBps"]) == (1, 128 / 4.0 / 1e6)
    assert bool(measuring.problems) != may_compute
    measuring.note("host", 64, computed, computed)
    told(measuring.problems[-1])


def test_a_part_of_a_prompt_is_a_problem_also_by_choice(tmp_path: Path) -> None:
    measuring = vllm_tiers.Measuring("tieredkv", tmp_path, 1, 0.5, may_compute=True)
    part = vllm_tiers.Answer(5.0, ["t1"], [{"t1": -0.1}], cached_tokens=16, bytes_from_disk=64)
    measuring.note("disk", 64, part, part)
    [problem] = measuring.problems
    told(problem)


def test_a_prompt_that_is_found_after_it_expired_is_a_problem(tmp_path: Path) -> None:
    measuring = vllm_tiers.Measuring("tieredkv", tmp_path / "kv", 1, 0.5, has_faults=True)
    found = vllm_tiers.Answer(5.0, ["t1"], [{"t1": -0.1}], cached_tokens=64, bytes_from_disk=64)
    computed = found._replace(cached_tokens=0, bytes_from_disk=0)
    for arm in ("kill", "expired"):
        measuring.note(arm, 64, computed, computed)
    measuring.note("killed", 64, found, computed)
    assert not measuring.problems
    measuring.note("expired", 64, found, computed)
    measuring.note("killed", 64, computed, computed)
    for problem in measuring.problems:
        told(problem)


def test_what_a_token_keeps_is_known_for_each_kind_of_layers() -> None:
    heads = {"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 8}
    windows = {"layer_types": ["full_attention", "sliding_attention"] * 2}
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert vllm_tiers.kv_bytes_of(heads) == 4 * 2 * 2 * 2 * 8
    assert vllm_tiers.kv_bytes_of(heads | windows) == 2 * 2 * 2 * 2 * 8
    assert vllm_tiers.kv_bytes_of(heads | latent) == 4 * 2 * 576


def test_how_far_another_token_was_from_the_right_one_is_told(tmp_path: Path) -> None:
    measuring = vllm_tiers.Measuring("tieredkv", tmp_path, 1, 0.5)
    tops = [{"t1": -0.1, "t2": -0.4}]
    right = vllm_tiers.Answer(5.0, ["t1"], tops, cached_tokens=0, bytes_from_disk=0)
    for token in ("t1", "t2", "t3"):
        measuring.note("host", 64, right._replace(tokens=[token], cached_tokens=64), right)
    [row] = measuring.rows()
    assert row["tokens"] == ["equal", "tie", "wrong"]
    assert row["gaps"] == [pytest.approx(0.3), None]
