"""The measurement of evictions, with few blocks."""

import json
from pathlib import Path

from click.testing import CliRunner

from tests.stress.eviction_cost import main


def test_each_case_is_measured_with_one_namespace_and_with_many(tmp_path: Path) -> None:
    options = ["--dir", str(tmp_path), "--namespaces", "24", "--blocks", "256", "--stores", "4"]
    result = json.loads(CliRunner().invoke(main, options, catch_exceptions=False).stdout)
    cases = {(row["kind"], row["shares"], row["order"]) for row in result["rows"]}
    assert len(cases) == 12
    assert [row["namespaces"] for row in result["rows"]] == [1, 24] * 12
    assert all(row["p50_ms"] > 0 and row["blocks"] > 100 for row in result["rows"])
