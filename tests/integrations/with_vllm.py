"""Run the tests of the tier behind vLLM's own tiering manager, without a GPU.

Each version of vLLM gets an environment of its own: the Python files of its wheel, which are enough
for everything above a GPU, some small packages, and torch and the rest from tieredkv's environment.
What cannot be got is named, with the reason.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENTS = ROOT / ".venv-vllm"
VERSIONS = ("0.33.0", "0.26.0")
TESTS = sorted(HERE.glob("test_vllm*.py"))
REQUIREMENTS = HERE / "vllm.txt"


def install(version: str) -> str:
    """Make the environment of a version if there is none; return why it cannot be made."""
    folder = ENVIRONMENTS / version
    complete, wanted = folder / "complete", REQUIREMENTS.read_text()
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    packages = [*pip, "install", "--no-deps", "-r", str(REQUIREMENTS)]
    if complete.exists():
        if complete.read_text() == wanted:
            return ""
        if not (why := _why_not(packages)):
            complete.write_text(wanted)
        return why
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    where = ["-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
    site = Path(subprocess.check_output([str(python), *where], text=True).strip())
    with tempfile.TemporaryDirectory(dir=folder) as wheels:
        get = [*pip, "download", "--no-deps", "--dest", wheels, f"vllm=={version}"]
        if why := _why_not(get):
            return why
        (wheel,) = Path(wheels).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [each for each in archive.namelist() if each.endswith(".py")]
            names += [each for each in archive.namelist() if ".dist-info/" in each]
            archive.extractall(site, names)
    if why := _why_not(packages):
        return why
    ours = sysconfig.get_paths()["purelib"]
    (site / "tieredkv-environment.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    complete.write_text(wanted)
    return ""


def _why_not(command: list[str]) -> str:
    """Run a command; return the end of what it said if it failed."""
    done = subprocess.run(command, capture_output=True, encoding="utf-8")
    return done.stderr.strip()[-500:] if done.returncode else ""


def run(version: str) -> bool:
    """Run the tests with a version; return whether they pass."""
    command = [str(ENVIRONMENTS / version / "bin" / "python"), "-m", "pytest", "-q"]
    options = ["-p", "no:cacheprovider", "-o", "filterwarnings=default", "--disable-warnings"]
    print(f"with vLLM {version}:", flush=True)  # noqa: T201
    environment = {**os.environ, "VLLM_TARGET_DEVICE": "cpu"}
    done = subprocess.run([*command, *options, *map(str, TESTS)], cwd=ROOT, env=environment)
    return done.returncode == 0


def main() -> int:
    """Run the tests with every version that can be got; 0 if there is one and all pass."""
    failed = {version: why for version in VERSIONS if (why := install(version))}
    for version, reason in failed.items():
        print(f"not run: vLLM {version}: {reason}", file=sys.stderr)  # noqa: T201
    passed = [run(version) for version in VERSIONS if version not in failed]
    return 0 if passed and all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
