"""The pages in docs/ name what is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "server.md").read_text()
TABLE = PAGE.partition("<!-- fields -->")[2].partition("<!-- end of fields -->")[0]
ROWS = [row for row in TABLE.splitlines() if row.startswith("| ")][1:]


@pytest.mark.parametrize("row", ROWS, ids=[row.split("|")[1].strip(" `")[:40] for row in ROWS])
def test_each_row_of_what_fields_do_names_a_test_that_is_there(row: str) -> None:
    match = re.search(r"\| `(tests/\S+\.py)::(test_\w+)(?:\[([^]]+)\])?` \|$", row)
    assert match is not None, "the last cell is no test"
    file, name, case = match.groups()
    source = (ROOT / file).read_text()
    assert f"def {name}(" in source
    assert case is None or f'id="{case}"' in source


def test_the_table_says_what_every_field_of_caching_does() -> None:
    told = " ".join(row.split("|")[1] for row in ROWS)
    for word in (
        *("prompt_cache_retention", "prompt_cache_options", "prompt_cache_breakpoint", "prewarm"),
        *("prompt_cache_key", "cache_salt", "cache_control", "max_tokens", "min_cache_tokens"),
        *("cache_lookback", "max_retention", "30m", "12h", "5m", "1h", "explicit"),
    ):
        assert word in told, word


def test_every_linked_file_is_there() -> None:
    for page in (ROOT / "docs").glob("*.md"):
        for link in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / link).exists(), (page.name, link)
