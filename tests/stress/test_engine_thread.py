"""The measurement of the engine's thread finds each prompt in the tier that its row names."""

import pytest

from tests.stress import engine_thread
from tieredkv.types import ignore_progress


def test_each_prompt_is_found_where_its_state_says() -> None:
    sizes, filled = [16, 64], [100, 5000]
    options = {"block_sizes": sizes, "cached_blocks": filled}
    report = engine_thread.run(
        ignore_progress, prompt_tokens=1000, verb_blocks=4096, repeats=2, **options
    )
    assert not report["problems"]
    *states, few, many = report["rows"]
    assert [(row["state"], row["block_size"], row["prompt_tokens"]) for row in states] == [
        (state, size, 1000 // size * size)
        for size in (16, 64)
        for state in ("none", "device", "host")
    ]
    for row in report["rows"]:
        expected = {"device": 0, "host": 0}
        if row["state"] != "none":
            expected[row["state"]] = row["prompt_tokens"]
        assert row["by_tier"] == expected
        parts = [row[f"{name}_ms"] for name in ("hash", "lookup", "load", "complete", "release")]
        assert min(parts) > 0
    for row, cached, looked_up in ((few, 100, 100), (many, 5000, 2048)):
        assert (row["state"], row["cached_blocks"]) == ("device", cached)
        assert row["prompt_tokens"] == looked_up * 16
        assert row["us_per_hash"] == pytest.approx(row["lookup_ms"] * 1e3 / looked_up)
    assert {(row["blocks"], row["chain_blocks"]) for row in report["verbs"]} == {
        (4096, 2048),
        (4096, 1),
    }
    assert all(0 < row["longest_slice_ms"] <= row["all_ms"] for row in report["verbs"])
