"""The package as it is installed without a clone: what it holds and needs, and that it serves."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.serving import running

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parent.parent
SOURCES = ("tieredkv", "engine", "kernels", "storage", "configs")  # with the links between them
FILES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")
MISSED_BY_CHOICE = {"matplotlib", "triton", "vllm"}
"""Imported where they are there: for plots, with a GPU, and by vLLM itself."""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist of a clean tree, and the wheel that was made from it."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    unclean = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCES:
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=unclean)
    for name in FILES:
        shutil.copy(ROOT / name, tree)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(tree)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "!!" not in done.stdout + done.stderr, "setuptools warns of something"
    return out


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    [path] = dist.glob("*.whl")
    return path


def package_files() -> set[str]:
    """Return the files of the package, as they are named where it is installed."""
    found = set[str]()
    for folder, _, names in os.walk(ROOT / "tieredkv", followlinks=True):
        found |= {str(Path(folder, name).relative_to(ROOT)) for name in names}
    return {name for name in found if "__pycache__" not in name}


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == package_files()
    assert {"tieredkv/engine/byte_chat.jinja", "tieredkv/engine/shapes/qwen3-4b.json"} < held


def test_the_sdist_holds_the_package_and_the_configurations(dist: Path) -> None:
    [path] = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        held = {
            name.partition("/")[2]
            for name in archive.getnames()
            if archive.getmember(name).isfile()
        }
    configs = {f"configs/{each.name}" for each in (ROOT / "configs").iterdir()}
    assert package_files() | configs | {*FILES} <= held
    assert not any(name.startswith("tests/") for name in held)


def test_everything_that_is_imported_is_asked_for(wheel: Path) -> None:
    names = set[str]()
    for path in (ROOT / name for name in package_files() if name.endswith(".py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                names |= {each.name.partition(".")[0] for each in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.partition(".")[0])
    known = packages_distributions()
    needed = {
        known.get(name, [name])[0].lower().replace("_", "-")
        for name in names - sys.stdlib_module_names - {"tieredkv"} - MISSED_BY_CHOICE
    }
    assert needed <= asked_for(wheel)


def asked_for(wheel: Path) -> set[str]:
    """Return the names of the distributions that a wheel needs."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        lines = archive.read(name).decode().splitlines()
    needs = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")]
    return {re.split(r"[ ;<>=!~\[]", each)[0].lower() for each in needs if "extra ==" not in each}


def test_the_wheel_serves_without_a_clone(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--no-compile", "--target", str(site), str(wheel)], check=True)
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.chdir(tmp_path)
    check_served(sys.executable, tmp_path)


@pytest.mark.slow
def test_the_wheel_measures_and_serves_in_an_empty_environment(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it needs is installed as it says, but for the CPU build of torch."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    venv.create(tmp_path / "env", with_pip=True)
    python = str(tmp_path / "env" / "bin" / "python")
    [torch] = re.findall(r"^CPU_TORCH := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    index = ["--index-url", url] if (url := os.environ.get("TORCH_INDEX_URL")) else []
    pip = [python, "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, torch, *index], check=True)
    subprocess.run([*pip, str(wheel)], check=True)
    monkeypatch.chdir(tmp_path)
    words = ["bench", "ttft", "--model", "tiny-random", "--prefix-tokens", "64", "--repeats", "1"]
    report = json.loads(run(python, "-m", "tieredkv", *words, "--json").splitlines()[-1])
    assert report["rows"]
    check_served(python, tmp_path)


def run(python: str, *words: str) -> str:
    """Run Python with these words; return what it prints."""
    done = subprocess.run([python, "-P", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_served(python: str, folder: Path) -> None:
    """Check that the installed package, and not this tree, answers a request."""
    where = run(python, "-c", "import tieredkv; print(tieredkv.__file__)")
    assert not where.startswith(str(ROOT))
    command = (python, "-P", "-m", "tieredkv")
    with running(folder, command=command, has_disk=False) as server, server.client() as client:
        answer = client.chat.completions.create(
            model="tiny-random", messages=[{"role": "user", "content": "Hello"}], max_tokens=4
        )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
