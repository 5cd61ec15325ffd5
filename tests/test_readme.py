"""The README is correct: its code runs, and its tables match the program.

`python -P tests/test_readme.py` writes the table of settings into it again.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from tieredkv.cli.main import cli
from tieredkv.config import Settings, load_settings

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
START, END = "<!-- settings -->\n", "<!-- end of settings -->\n"


def settings_table() -> str:
    """Return the table of every setting: its section, name, default, and what it is for."""
    rows = ["| section | setting | default | what it is for |", "|---|---|---|---|"]
    for section, name, _, default, _ in load_settings(environ={}).describe():
        if name in Settings.__dataclass_fields__:
            purpose = Settings.__dataclass_fields__[name].metadata["help"]
            shown = "" if name == "api_keys" or not default else f"`{default}`"
            rows.append(f"| `[{section}]` | `{name}` | {shown} | {purpose} |")
    return "\n".join(rows) + "\n"


def between(text: str, start: str, end: str) -> str:
    """Return the text between two markers, each of which must occur once."""
    assert text.count(start) == text.count(end) == 1, (start, end)
    return text.partition(start)[2].partition(end)[0]


def leaves(command: click.Command, path: str = "") -> dict[str, click.Command]:
    """Return every command of the command line by its path."""
    if not isinstance(command, click.Group):
        return {path: command}
    found: dict[str, click.Command] = {}
    for name, child in command.commands.items():
        found |= leaves(child, f"{path} {name}".strip())
    return found


@pytest.fixture(scope="module")
def readme() -> str:
    """Return the text of the README."""
    return README.read_text()


@pytest.mark.e2e
def test_the_python_block_prints_the_text_below_it(readme: str, tmp_path: Path) -> None:
    match = re.search(r"```python\n(.*?)```\s+```text\n(.*?)```", readme, re.DOTALL)
    assert match is not None
    code, output = match.groups()
    result = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == output
    assert [path.name for path in tmp_path.iterdir()] == ["kv"]


def test_the_table_of_verbs_is_the_command_lines(readme: str) -> None:
    table = readme.partition("| verb | does |\n")[2].partition("\n\n")[0]
    verbs = re.findall(r"^\| `tieredkv ([a-z ]+)", table, re.MULTILINE)
    assert sorted(verb.strip() for verb in verbs) == sorted(leaves(cli))


def test_the_table_of_settings_is_the_programs(readme: str) -> None:
    assert between(readme, START, END).strip() == settings_table().strip(), (
        "run `python -P tests/test_readme.py`"
    )


def test_every_command_line_is_accepted(readme: str) -> None:
    blocks = re.findall(r"```console\n(.*?)```", readme, re.DOTALL)
    lines = re.findall(r"\$ \.venv/bin/tieredkv (.*)", "\n".join(blocks))
    assert len(lines) >= 2
    for line in lines:
        words = shlex.split(line, comments=True)
        verb = next(path for path in leaves(cli) if words[: len(path.split())] == path.split())
        leaves(cli)[verb].make_context(verb, words[len(verb.split()) :])


def test_every_make_target_and_linked_file_is_there(readme: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake ([a-z0-9-]+)", readme):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", readme):
        assert (ROOT / link).exists(), link
    tree = readme.partition("## The tree")[2].partition("```text\n")[2].partition("```")[0]
    parent = Path()
    for line in tree.splitlines():
        indent, name = re.match(r"( *)(\S+)/ ", line).groups()  # type: ignore[union-attr]
        parent = Path() if not indent else parent
        assert (ROOT / parent / name).is_dir(), line
        parent = parent if indent else Path(name)


if __name__ == "__main__":
    text = README.read_text()
    before, after = text.partition(START)[0], text.partition(END)[2]
    README.write_text(f"{before}{START}\n{settings_table()}\n{END}{after}")
