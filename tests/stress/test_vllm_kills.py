"""What the run with killed workers reports, with a stand-in for vLLM."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.serving import free_port
from tests.stress import vllm_kills, vllm_stand_in
from tests.stress.client import difference

STAND_IN = f"{sys.executable} {vllm_stand_in.__file__}"


def run(tmp_path: Path, *more: str) -> dict[str, Any]:
    """Run two short sessions for a few seconds; return the report."""
    words = ["--folder", str(tmp_path / "kv"), "--model-dir", str(tmp_path / "model")]
    words += ["--shape", "tiny-random", "--sessions", "2", "--scale", "1000", "--minutes", "0.05"]
    words += ["--kill-every", "0.5", "--vllm", STAND_IN, "--port", str(free_port())]
    words += ["--log", str(tmp_path / "log"), "--commit", "abc", *more]
    result = CliRunner().invoke(vllm_kills.main, words, catch_exceptions=False)
    report: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    assert result.exit_code == bool(report["problems"]), result.output
    return report


@pytest.mark.parametrize("more", [(), ("--beside",)], ids=["afterwards", "beside"])
def test_answers_are_counted_and_workers_killed(tmp_path: Path, more: tuple[str, ...]) -> None:
    report = run(tmp_path, *more)
    assert report["problems"] == []
    assert report["kills"] > 1 and report["lost"] == 0
    assert report["answers"] == report["tokens"]["equal"] > 0
    assert report["tokens"]["wrong"] == report["tokens"]["tie"] == 0


def test_a_request_without_an_answer_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIEREDKV_FAULT", "refusal")
    report = run(tmp_path)
    assert report["lost"] == len(report["problems"]) > 0


def test_without_a_kill_nothing_is_shown(tmp_path: Path) -> None:
    report = run(tmp_path, "--kill-every", "60")
    assert report["problems"] == ["no worker was killed"]


def test_an_answer_is_wrong_only_where_one_token_was_clearly_likelier() -> None:
    tokens, gaps = ["a", "b", "c"], [1.0, 0.01, 1.0]
    assert difference(tokens, gaps, ["a", "b", "c"], 0.05) == ("equal", 0)
    assert difference(tokens, gaps, ["a", "x", "y"], 0.05) == ("tie", 1)
    assert difference(tokens, gaps, ["a", "b", "x"], 0.05) == ("wrong", 2)


def test_tokens_that_differ_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_kills, "difference", lambda *_: ("wrong", 0))
    report = run(tmp_path)
    assert report["tokens"]["wrong"] == report["answers"] == len(report["problems"]) > 0
