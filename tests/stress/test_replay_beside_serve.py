"""The comparison of a replay's estimate with a server counts both sides in the same way."""

import asyncio
import json
from pathlib import Path

from tests.golden import refused
from tests.serving import running
from tests.sizing.test_estimate import RATES
from tests.sizing.traces import line, write
from tests.stress.replay_beside_serve import Crowd, Workload, estimated, measured, ratios
from tests.stress.sessions_by_url import Answer
from tieredkv.bench.sessions import Shape
from tieredkv.errors import ConfigError
from tieredkv.operate.ask import StoreControl

NO_TIER = {"device": 0, "host": 0, "disk": 0}
COLD = NO_TIER | {"recomputed": 0}
SHAPE = Shape(turns=2, scale=64, trace=None)


def test_a_request_counts_for_the_slowest_tier_that_it_used() -> None:
    answers = [
        Answer([0.4, 0.5], 100, 0, COLD),
        Answer([0.1, 0.2], 100, 96, COLD | {"device": 64, "disk": 32}),
        Answer([0.2, 0.3], 100, 64, COLD | {"device": 64, "recomputed": 32}),
    ]
    row = measured(answers)
    assert row["by_tier"] == {"device": 128, "host": 0, "disk": 32}
    assert row["hit_rate"] == 160 / 300 and row["found_rate"] == 192 / 300
    assert row["ttft_ms"]["p50"] == 200
    p50s = {source: it["p50"] for source, it in row["ttft_ms"]["by_source"].items()}
    assert p50s == {"cold": 400, "device": 200, "disk": 100}


def test_ratios_are_of_the_sources_that_both_have() -> None:
    cold = {"cold": {"p50": 2.0, "p90": 8.0}}
    one = {"p50": 1.0, "p90": 4.0, "by_source": cold | {"host": {"p50": 1.0, "p90": 1.0}}}
    other = {"p50": 2.0, "p90": 4.0, "by_source": cold | {"disk": {"p50": 1.0, "p90": 1.0}}}
    by_source = {"cold": {"p50": 1.0, "p90": 1.0}}
    assert ratios(one, other) == {"p50": 0.5, "p90": 1.0, "by_source": by_source}


def test_the_replay_leaves_out_what_warmed_the_server_up(tmp_path: Path) -> None:
    lines = [line(at_s, [1, 2]) | {"block_tokens": 512} for at_s in (0.0, 5.0, 9.0)]
    recording = write(tmp_path / "recording.jsonl", lines)
    (tmp_path / "rates.json").write_text(json.dumps(RATES))
    df = {tier: {"bytes_budget": 1 << 30} for tier in NO_TIER} | {"block_bytes": 512 << 17}
    row = estimated(recording, 5000.0, df, tmp_path)
    assert row["requests"] == 2 and row["prompt_tokens"] == 2048
    assert row["by_tier"] == NO_TIER | {"device": 1023}, "the last token is always computed"
    assert [*row["ttft_ms"]["by_source"]] == ["cold", "device"]
    (tmp_path / "rates.json").unlink()
    with refused(ConfigError):
        estimated(recording, 5000.0, df, tmp_path)


def test_conversations_go_on_until_the_time_is_over(tmp_path: Path) -> None:
    workload = Workload(duration=2.0, rate=2.0, think=0.1, shape=SHAPE, vocab_size=250, seed=1)
    script = {len(turn.prompt) for _, turns in workload.conversations() for turn in turns}
    with running(tmp_path, "--record", str(tmp_path / "recording.jsonl")) as server:
        crowd = Crowd(server.root, workload)
        asyncio.run(crowd.run(StoreControl(str(server.disk_dir))))
    assert crowd.answers and not crowd.problems
    assert {answer.prompt_tokens for _, answer in crowd.answers} <= script
    row = measured([answer for _, answer in crowd.answers])
    assert row["ttft_ms"]["by_source"]["cold"]["requests"] > 0, "the warm-up has left nothing"
