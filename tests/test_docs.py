"""The pages in docs/ name only things that exist.

`python -P tests/test_docs.py` writes the table of fields without effect into docs/server.md again.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tieredkv.cli.main import cli
from tieredkv.server.known_fields import CHAT, COMPLETIONS, MESSAGES, RESPONSES, KnownFields

ROOT = Path(__file__).parents[1]
SERVER = ROOT / "docs" / "server.md"
PAGE = SERVER.read_text()
TABLE = PAGE.partition("<!-- fields -->")[2].partition("<!-- end of fields -->")[0]
ROWS = [row for row in TABLE.splitlines() if row.startswith("| ")][1:]


def test_each_decision_is_in_the_place_that_the_map_of_the_code_names() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where it is decided")[2]
    rows = [row for row in table.splitlines() if row.startswith("| ")][1:]
    places = [place for row in rows for place in re.findall(r"`(\S+\.py)`((?:[^`]*`\w+`)+)", row)]
    assert len(places) >= len(rows), "a row names no place"
    for file, names in places:
        source = (ROOT / file).read_text()
        for name in re.findall(r"`(\w+)`", names):
            found = re.search(rf"^(class|def) {name}\b|^{name}\b.* = ", source, re.MULTILINE)
            assert found is not None, f"{file} has no {name}"


def test_each_row_of_what_fields_do_names_a_test_that_is_there() -> None:
    for row in ROWS:
        match = re.search(r"\| `(tests/\S+\.py)::(test_\w+)(?:\[([^]]+)\])?` \|$", row)
        assert match is not None, f"the last cell is no test: {row}"
        file, name, case = match.groups()
        source = (ROOT / file).read_text()
        assert f"def {name}(" in source, row
        assert case is None or f'id="{case}"' in source, row


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


def test_every_result_says_how_it_was_measured_and_is_linked() -> None:
    words = ["git", "rev-list", "HEAD"]
    history = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "".join(page.read_text() for page in pages)
    faults = []
    for path in sorted((ROOT / "docs" / "results").glob("*.json")):
        fields = _fields(json.loads(path.read_text()))
        commits = re.findall(r"\b[0-9a-f]{7,40}\b", " ".join(map(str, fields.get("commit", []))))
        faults += [f"{path.name} has no `{name}`" for name in MEASURED if not fields.get(name)]
        faults += [f"{path.name}: {it} is in no history" for it in commits if it not in history]
        if not commits:
            faults.append(f"{path.name} names no commit")
        if path.name not in text and path.with_suffix(".png").name not in text:
            faults.append(f"no page links {path.name}")
    assert not faults


MEASURED = ("hardware", "commit", "command")


def _fields(document: object) -> dict[str, list[object]]:
    """Return the values of each field of a JSON document, at any depth."""
    found: dict[str, list[object]] = {}
    members = document.items() if isinstance(document, dict) else ()
    for name, value in members:
        found.setdefault(str(name), []).append(value)
    values = [value for _, value in members] or (document if isinstance(document, list) else [])
    for value in values:
        for name, inner in _fields(value).items():
            found.setdefault(name, []).extend(inner)
    return found


def test_every_picture_is_shown() -> None:
    docs, shown = ROOT / "docs", set[Path]()
    for page in docs.glob("*.md"):
        images = re.findall(r"!\[[^]]+\]\(([^)]+)\)", page.read_text())
        shown |= {page.parent / image for image in images}
    assert shown == {it for it in docs.rglob("*.*") if it.suffix in (".png", ".svg")}


def test_the_reference_is_what_help_prints() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    # In a process of its own, since a command keeps the help option of its first context.
    words = [sys.executable, "-P", "-m", "tieredkv.cli.reference"]
    told = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert page == told, "run `make reference`"
    for command in cli.commands:
        assert f"## tieredkv {command}\n" in page


START, END = "<!-- known fields -->\n", "<!-- end of known fields -->\n"
ENDPOINTS = {"OpenAI's": (CHAT, COMPLETIONS, RESPONSES), "Anthropic's": (MESSAGES,)}


def table_of_known_fields() -> str:
    """Return the table of the fields that each API knows and does not act on."""
    rows = ["| fields | |", "|---|---|"]
    for api, tables in ENDPOINTS.items():
        for what, names in (
            ("are ignored", _names(tables, lambda table: table.ignored)),
            ("change no answer", _names(tables, lambda table: table.harmless)),
            ("are a 400 with `--strict-params`", _names(tables, lambda table: table.hosted)),
            (
                "are refused (400) when set to a value that would change the answer",
                _names(tables, lambda table: table.always),
            ),
        ):
            rows.append(f"| {api} that {what} | {names} |")
    return "\n".join(rows) + "\n"


def _names(tables: Sequence[KnownFields], kind: Callable[[KnownFields], Iterable[str]]) -> str:
    return ", ".join(
        f"`{name}`" for name in sorted({name for each in tables for name in kind(each)})
    )


def test_the_table_of_fields_without_effect_is_the_programs() -> None:
    assert PAGE.count(START) == PAGE.count(END) == 1
    told = PAGE.partition(START)[2].partition(END)[0]
    assert told.strip() == table_of_known_fields().strip(), "run `python -P tests/test_docs.py`"


if __name__ == "__main__":
    before, after = PAGE.partition(START)[0], PAGE.partition(END)[2]
    SERVER.write_text(f"{before}{START}\n{table_of_known_fields()}\n{END}{after}")
