"""The measurement of a step beside long queues measures every queue, with few entries and many."""

import pytest

from tests.stress import step_cost
from tieredkv.types import ignore_progress


@pytest.mark.slow
def test_every_queue_is_measured_beside_few_entries_and_many() -> None:
    rows = step_cost.run(ignore_progress, entries=2048, steps=2, repeats=2)
    assert [row["queue"] for row in rows] == list(step_cost.CASES)
    for row in rows:
        assert (row["entries"], row["few"]) == (2048, step_cost.FEW)
        assert row["few_median_ms"] > 0 and 0 < row["median_ms"] <= row["max_ms"]
