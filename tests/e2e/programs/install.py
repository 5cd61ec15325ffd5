"""Install the programs of `make test-clients`, each group into an environment of its own.

What cannot be installed is named with the reason, and the tests of it are skipped with that reason.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[2] / ".venv-clients"
FAILED = ENVIRONMENTS / "failed.json"
NODE = {"node": HERE, "node-older": HERE / "older"}
"""Folders with a `package.json`, by the names of their groups."""

NPM = ("npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--loglevel=error")


def install_all() -> dict[str, str]:
    """Install all groups; return why some could not be installed, by their names."""
    failed = dict[str, str]()
    for file in sorted(HERE.glob("*.txt")):
        folder = ENVIRONMENTS / file.stem
        if not (folder / "bin" / "python").exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        if why := _why_not([*pip, "-r", str(file)]):
            failed[file.stem] = why
            shutil.rmtree(folder)
    for name, folder in NODE.items():
        if why := _why_not([*NPM, "--prefix", str(folder)]):
            failed[name] = why
    return failed


def path_of(program: Path, group: str = "node") -> str:
    """Return the path of a program; if its group is not installed, skip the test and say why."""
    failed = json.loads(FAILED.read_text()) if FAILED.exists() else {}
    if group in failed or not program.exists():
        why = failed.get(group, "`make test-clients` installs it")
        pytest.skip(f"{program.name} of `{group}` is not installed: {why}")
    return str(program)


def _why_not(command: list[str]) -> str:
    """Run a command; return the end of what it said if it failed."""
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8")
    except FileNotFoundError as error:
        return str(error)
    return done.stderr.strip()[-500:] if done.returncode else ""


if __name__ == "__main__":
    told = install_all()
    FAILED.write_text(json.dumps(told))
    for name, reason in told.items():
        print(f"not installed: {name}: {reason}", file=sys.stderr)  # noqa: T201
