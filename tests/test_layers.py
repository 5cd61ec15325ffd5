"""The layers of the code and its public names, held by tests."""

import ast
import io
import subprocess
import sys
import tokenize
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


def test_the_code_stays_within_its_budget() -> None:
    files = [
        path
        for folder in ("tieredkv", "engine", "kernels", "storage")
        for path in (ROOT / folder).glob("**/*.py")
    ]
    lines = {path.resolve(): code_lines(path) for path in files}
    assert sum(lines.values()) < 13_460  # NOTE: 12,000 is the aim; issue 5 is over it for now
    assert max(lines.values()) <= 600, max(lines, key=lambda path: lines[path])


def code_lines(path: Path) -> int:
    """Count the lines that bear a name, a keyword, a number or a text.

    Blank lines, comments, docstrings and lines of nothing but brackets bear none.
    """
    source = path.read_text()
    docstrings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    words = {tokenize.NAME, tokenize.NUMBER, tokenize.STRING}
    bearing = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type in words or tokenize.tok_name[token.type].startswith("FSTRING")
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(bearing - docstrings)
