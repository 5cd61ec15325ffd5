"""The replay finds the hit rates of ideal pools, and the real pools come close to one of both."""

import json
from pathlib import Path

import pytest

from tests.stress.pool_replay import Replay, inclusive, one_pool, scripted, traced
from tieredkv.types import BlockHash

TURNS = 6


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Five sessions of six turns each that take turns; each turn adds a block to 20."""
    path = tmp_path / "trace.jsonl"
    rows = [
        {
            "timestamp": 1e5 * turn + 1e3 * session,
            "session": session,
            "input_length": 16 * (20 + turn) + 1,
            "output_length": 2,
            "hash_ids": [100 * session + index for index in range(21 + turn)],
        }
        for turn in range(TURNS)
        for session in range(5)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_ideal_pools_find_what_they_should() -> None:
    a, b = ([BlockHash(bytes([text, index])) for index in range(4)] for text in b"ab")
    chains = [(a, 65), (b, 65), (a, 65), (b, 65)]
    assert one_pool(chains, 8, 16) == pytest.approx(128 / 260)
    assert one_pool(chains, 7, 16) == pytest.approx((48 + 48) / 260)
    assert inclusive(chains, 4, 4, 16) == pytest.approx(128 / 260)
    assert one_pool(chains, 0, 16) == 0.0


def test_scripted_sessions_are_equal_for_equal_seeds() -> None:
    first, second, other = (scripted(2, 3, 5, seed) for seed in (1, 1, 2))
    assert first == second != other
    assert [len(session) for session in first] == [3, 3]
    assert all(8_000 <= len(turn.token_ids) <= 72_000 for turns in first for turn in turns)


def test_the_pools_find_what_one_pool_of_both_sizes_would(trace: Path) -> None:
    replay = Replay(device_blocks=75, host_blocks=65, at_once=1, batched_tokens=32)
    replay.run(traced(trace, 16, 1000))
    report = replay.report()
    assert report["requests"] == 5 * TURNS
    total = sum(5 * (16 * (20 + turn) + 1) for turn in range(TURNS))
    most = sum(5 * 16 * (19 + turn) for turn in range(1, TURNS))
    assert report["prompt_tokens"] == total
    rates = report["hit_rate"]
    assert rates["unbounded"] == rates["one_pool"] == round(most / total, 4)
    assert rates["inclusive"] < rates["measured"]
    assert rates["one_pool"] - 0.03 <= rates["measured"] <= rates["one_pool"]
