"""Limits of the process and of its control group, each named in one sentence."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.storage.blocks import make_record, open_store, put
from tieredkv.clock import Clock
from tieredkv.wire.arena import memory_left_by_groups
from tieredkv.wire.limits import described


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A stopped store with one block."""
    with open_store(tmp_path / "store", Clock()) as opened:
        put(opened, make_record())
    return tmp_path / "store"


def run_under(
    limit: int, value: int, store: Path, verb: str = "df"
) -> subprocess.CompletedProcess[str]:
    """Run a verb on the store in a process with this limit."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "tieredkv", verb, "--disk-dir", str(store), "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(limit, (value, value)),
    )


def test_too_little_address_space_for_the_index_is_named(store: Path) -> None:
    found = run_under(resource.RLIMIT_AS, 20 << 30, store)
    assert (found.returncode, found.stderr.splitlines()) == (
        1,
        [
            f"error: the index at `{store}/index` is mapped into 64 GiB of address space, "
            "but the limit of address space (`ulimit -v`) is 20 GiB",
            "hint: raise it to 128 GiB or `unlimited`; the map takes no memory",
        ],
    )


def test_too_small_files_are_named(store: Path) -> None:
    found = run_under(resource.RLIMIT_FSIZE, 1 << 20, store, "verify")
    assert (found.returncode, found.stderr.splitlines()) == (
        1,
        [
            f"error: the files of `{store}` may become as large as 4 MiB, "
            "but the limit of the size of a file (`ulimit -f`) is 1 MiB",
            "hint: raise it, or set a smaller `disk_size`",
        ],
    )


@pytest.mark.parametrize(
    ("verb", "num_files"),
    [("df", 6), ("df", 8), ("df", 11), ("verify", 8), ("verify", 13), ("verify", 16)],
)
def test_too_few_open_files_are_named(
    store: Path, verb: str, num_files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = store.parent / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    found = run_under(resource.RLIMIT_NOFILE, num_files, store, verb)
    assert found.returncode == 1
    assert f"the limit of open files (`ulimit -n`) is {num_files}; raise it" in found.stderr
    assert "Traceback" not in found.stderr and "damaged" not in found.stderr
    assert list(temporary.iterdir()) == []


def test_the_worker_may_open_as_many_files_as_the_hard_limit_lets_it(store: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (11, before[1]))
    try:
        text = described(OSError(24, "Too many open files"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert text == "Too many open files: the limit of open files (`ulimit -n`) is 11; raise it"
    assert described(OSError(5, "Input/output error")) == "Input/output error"
    code = (
        "import resource, sys; from tieredkv.wire.limits import raise_file_limit; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (20, 300)); raise_file_limit(); "
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    told = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert told.stdout == "(300, 300)\n", told.stderr


def test_every_control_group_above_a_process_limits_its_memory(tmp_path: Path) -> None:
    mib = 1 << 20
    groups = {"": "max", "a.slice": f"{64 * mib}", "a.slice/b.service": f"{100 * mib}"}
    for name, limit in groups.items():
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "memory.max").write_text(limit + "\n")
        (tmp_path / name / "memory.stat").write_text(f"anon {10 * mib}\nfile 5\nshmem {mib}\n")
    assert memory_left_by_groups("0::/a.slice/b.service\n", tmp_path) == [89 * mib, 53 * mib]
    assert memory_left_by_groups("0::/elsewhere\n", tmp_path) == []
    (tmp_path / "memory.max").write_text(f"{20 * mib}\n")
    assert memory_left_by_groups("0::/not/mounted\n", tmp_path) == [9 * mib]
    old = tmp_path / "memory"
    (old / "c").mkdir(parents=True)
    (old / "c" / "memory.limit_in_bytes").write_text(f"{32 * mib}\n")
    (old / "c" / "memory.stat").write_text(f"total_rss {4 * mib}\ntotal_shmem {mib}\n")
    assert memory_left_by_groups("4:cpu:/\n3:memory:/c\n", tmp_path) == [27 * mib]
    assert memory_left_by_groups("", tmp_path / "none") == []
