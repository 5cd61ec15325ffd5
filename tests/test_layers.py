"""Imports follow the layers of the code, and the public names are those promised."""

import subprocess
import sys
from pathlib import Path

import tieredkv

ROOT = Path(__file__).parent.parent


def test_every_import_goes_down_the_layers() -> None:
    code = "import sys; from importlinter.cli import lint_imports_command as c; sys.exit(c())"
    result = subprocess.run(
        [sys.executable, "-P", "-c", code, "--config", str(ROOT / "pyproject.toml"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_public_names_can_be_imported_and_nothing_else_is_promised() -> None:
    assert tieredkv.__all__ == ["LLM", "SamplingParams"]
    for name in tieredkv.__all__:
        assert getattr(tieredkv, name).__name__ == name


def test_importing_the_package_loads_neither_torch_nor_a_top_level_folder() -> None:
    code = (
        "import sys, tieredkv, tieredkv.cli; "
        "bad = {'torch', 'engine', 'kernels', 'storage'} & set(sys.modules); "
        "sys.exit(', '.join(sorted(bad)) or None)"
    )
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
