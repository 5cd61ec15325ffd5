"""What the run with killed workers reports, with a stand-in for vLLM."""

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from tests.golden import told
from tests.serving import free_port
from tests.stress import vllm_kills, vllm_stand_in
from tests.stress.client import difference
from tieredkv.bench.sessions import Turn

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
    assert report["tokens"]["equal"] >= report["answers"] > 0
    assert report["tokens"]["wrong"] == report["tokens"]["tie"] == 0


def test_a_request_without_an_answer_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIEREDKV_FAULT", "refusal")
    report = run(tmp_path)
    assert report["lost"] == len(report["problems"]) > 0


def test_without_a_kill_nothing_is_shown(tmp_path: Path) -> None:
    report = run(tmp_path, "--kill-every", "60")
    [problem] = report["problems"]
    told(problem)


def test_an_answer_is_wrong_only_where_its_token_was_clearly_less_likely() -> None:
    sure, torn = {"a": -0.1, "x": -3.0}, {"b": -0.7, "x": -0.71, "y": -3.0}
    tokens, tops = ["a", "b", "a"], [sure, torn, sure]
    assert difference(tokens, tops, ["a", "b", "a"], 0.05) == ("equal", 0)
    assert difference(tokens, tops, ["a", "x", "y"], 0.05) == ("tie", 1)
    assert difference(tokens, tops, ["a", "b", "x"], 0.05) == ("wrong", 2)
    assert difference(tokens, tops, ["a", "y", "a"], 0.05) == ("wrong", 1)
    assert difference(tokens, tops, ["a", "never", "a"], 5.0) == ("wrong", 1)


def token(id_: int) -> str:
    return f"token_id:{id_}"


def next_token(request: httpx.Request) -> httpx.Response:
    """Answer with the sum of all tokens so far; the one after it is as likely."""
    body = json.loads(request.content)
    prompt, tokens, tops = body["prompt"], list[str](), list[dict[str, float]]()
    for _ in range(body["max_tokens"]):
        best = sum(prompt) % 1000
        prompt.append(best)
        tokens.append(token(best))
        tops.append({token(best): -0.5, token(best + 1): -0.51, token(best + 2): -4.0})
    logprobs = {"tokens": tokens, "top_logprobs": tops}
    return httpx.Response(200, json={"choices": [{"logprobs": logprobs}], "usage": {}})


@pytest.mark.parametrize(
    ("answer", "counts", "wrong"),
    [
        ([3, 6, 12, 24], {"equal": 4, "tie": 0, "wrong": 0}, []),
        ([3, 7, 13, 27], {"equal": 2, "tie": 2, "wrong": 0}, []),
        ([4, 7, 15, 31], {"equal": 1, "tie": 2, "wrong": 1}, ["token 3"]),
        ([3, 7, 15, 28], {"equal": 1, "tie": 1, "wrong": 1}, ["token 2"]),
    ],
    ids=["equal", "ties", "wrong behind ties", "nothing after a wrong one"],
)
def test_each_token_is_compared_behind_the_same_tokens(
    answer: list[int], counts: dict[str, int], wrong: list[str]
) -> None:
    async def compare() -> vllm_kills.Comparison:
        comparison = vllm_kills.Comparison(tie=0.05)
        transport = httpx.MockTransport(next_token)
        async with httpx.AsyncClient(base_url="http://test", transport=transport) as http:
            given = vllm_kills.Answer([token(each) for each in answer], [], 0)
            await comparison.compare(http, "m", Turn(0.0, [1, 2], len(answer)), given)
        return comparison

    comparison = asyncio.run(compare())
    assert comparison.counts == counts
    assert comparison.ranks == Counter({2: counts["tie"]} if counts["tie"] else {})
    assert [each.partition(" of")[0] for each in comparison.wrong] == wrong


def test_tokens_that_differ_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_kills, "difference", lambda *_: ("wrong", 0))
    report = run(tmp_path)
    assert report["tokens"]["wrong"] == report["answers"] == len(report["problems"]) > 0
