"""What the table of the disk's blocks costs is measured on all of them."""

from pathlib import Path

from tests.stress.presence_cost import measure


def test_some_thousand_blocks_are_told_noted_and_found(tmp_path: Path) -> None:
    figures = measure(tmp_path / "store", 5000)
    assert 5000 * 12 < figures["sent_bytes"] < 5000 * 13
    assert figures["lookup_of_4096"].keys() == {"present", "absent"}
    assert figures["changes_of_64"]["come"]["calls"] == 1
