"""The measurement of what a destroyed key costs runs on a small table."""

from pathlib import Path

from tests.stress.key_table_cost import run


def test_a_drop_and_a_bare_write_are_measured_in_turns(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    found = run(str(tmp_path), num_keys=100, repeats=4)
    assert (found["keys"], found["drops"], found["table_bytes"]) == (100, 4, 8192 + 4 * 4096)
    assert found.keys() >= {"drop_ms", "bare_write_ms", "more_ms", "bar_ms", "is_met"}
    assert not list(tmp_path.iterdir())
