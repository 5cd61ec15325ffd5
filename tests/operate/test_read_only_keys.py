"""Verbs on a stopped store whose keys cannot be destroyed say what they did and what is left."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from tests.golden import refused
from tests.storage.blocks import make_record, open_store, put, segment_files
from tests.storage.mounts import FILESYSTEMS, CannotMountError, mounted
from tieredkv.cli.main import cli, main
from tieredkv.clock import Clock
from tieredkv.errors import MissingKeyError
from tieredkv.operate.ask import StoreControl
from tieredkv.operate.calls import EvictFilter, Prune, Rotate
from tieredkv.operate.jobs import NoDisk
from tieredkv.operate.models import KnownModel
from tieredkv.storage.messages.operator import Delete, Deleted


@pytest.fixture
def keys() -> Iterator[Path]:
    """A filesystem of its own for keys."""
    try:
        with mounted(FILESYSTEMS["tmpfs"]) as disk:
            (disk / "keys").mkdir(mode=0o700)
            yield disk / "keys"
    except CannotMountError as error:
        pytest.skip(str(error))


@pytest.fixture
def folder(tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stopped store of one chain, whose keys are on a read-only mount."""
    monkeypatch.setenv("TIEREDKV_DISK_KEY_DIR", str(keys))
    now = Clock().now()
    with open_store(tmp_path / "kv", Clock(), encryption="on", key_dir=str(keys)) as store:
        put(store, *[make_record("a", position, now=now) for position in range(5)])
    subprocess.run(["mount", "-o", "remount,ro", str(keys.parent)], check=True)
    return tmp_path / "kv"


def test_an_eviction_tells_that_the_keys_are_still_there(folder: Path, keys: Path) -> None:
    control = StoreControl(folder, key_dir=str(keys))
    dry = control.answer(EvictFilter(all=True, dry_run=True))
    assert dry["evicted_blocks"] == 5 and "keys_error" not in dry["disk"]
    answer = control.answer(EvictFilter(all=True))
    assert answer["evicted_blocks"] == answer["disk"]["evicted_blocks"] == 5
    assert "Read-only file system" in answer["disk"]["keys_error"]
    assert answer["disk"]["erased_keys"] == []


def test_the_exit_code_tells_that_the_keys_are_still_there(folder: Path) -> None:
    words = ["evict", "--all", "-y", "--json", "--disk-dir", str(folder)]
    done = CliRunner().invoke(cli, words)
    assert '"evicted_blocks": 5' in done.stdout and "Read-only file system" in done.stderr
    assert segment_files(folder) == []
    assert main(words) == 1


@pytest.mark.parametrize("verb", ["adopt", "rotate"])
def test_what_needs_to_write_keys_names_the_way_out(folder: Path, keys: Path, verb: str) -> None:
    control = StoreControl(folder, key_dir=str(keys))
    [table] = keys.glob("*.keys")
    with refused(MissingKeyError, hide={str(table): "TABLE"}):
        control.adopt() if verb == "adopt" else control.answer(Rotate())


def test_a_prune_tells_why_keys_were_kept_though_a_later_part_drops_nothing() -> None:
    errors = iter(["it is read-only", "", ""])

    class Stored(NoDisk):
        def delete(self, asked: Delete) -> Deleted:
            return Deleted(0, 0, 0, [], [], next(errors))

    model = KnownModel(
        name="m", fingerprint="00", dtype="bfloat16", block_size=16, hash_algo="sha256"
    )
    worker = Stored([{"now": 0.0, "model": msgspec.to_builtins(model)}])
    assert Prune().answer(worker)["keys_error"] == "it is read-only"
