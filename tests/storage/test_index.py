"""How the index's file is opened: what lies in the way is removed by name and never followed."""

import errno
import os
import shutil
import signal
import stat
import tempfile
from pathlib import Path

import lmdb
import pytest

from tests.storage.blocks import make_record, open_store, put, stored_hashes
from tieredkv.errors import StorageError

RECORD = make_record()
LINKS = "index.open"


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A closed store with one block."""
    path = tmp_path / "store"
    with open_store(path) as store:
        assert put(store, RECORD) == [True]
    return path


@pytest.fixture
def treasure(tmp_path: Path) -> Path:
    """A folder of somebody else with files that are named like those of an index."""
    folder = tmp_path / "treasure"
    folder.mkdir()
    for name in ("data.mdb", "lock.mdb"):
        (folder / name).write_bytes(b"irreplaceable")
    return folder


def content_of(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in folder.iterdir()}


def check_opens(path: Path) -> None:
    """Assert that a store opens, has its block and leaves no link behind."""
    with open_store(path) as store:
        assert stored_hashes(store, [RECORD]) == {RECORD.block_hash}
        infos = {each.name: each.lstat() for each in (path / LINKS).iterdir()}
        assert infos.keys() == {"data.mdb", "lock.mdb"}
        assert all(stat.S_ISREG(info.st_mode) and not info.st_size for info in infos.values())


def test_nothing_in_the_temporary_folder_is_followed_removed_or_made(
    stored: Path, treasure: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, temporary = content_of(treasure), tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    info = stored.stat()
    planted = temporary / f"tieredkv-index-{info.st_dev:x}-{info.st_ino:x}-x"
    planted.symlink_to(treasure)
    check_opens(stored)
    assert content_of(treasure) == before
    assert os.listdir(temporary) == [planted.name]


def test_a_store_opens_where_there_is_no_temporary_folder(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_folder() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", no_folder)
    monkeypatch.setattr(tempfile, "_get_default_tempdir", no_folder)
    monkeypatch.setattr(tempfile, "tempdir", None)
    check_opens(stored)


def test_a_link_in_place_of_the_folder_of_links_is_replaced(stored: Path, treasure: Path) -> None:
    before = content_of(treasure)
    shutil.rmtree(stored / LINKS)
    (stored / LINKS).symlink_to(treasure)
    check_opens(stored)
    assert content_of(treasure) == before
    assert not (stored / LINKS).is_symlink()
    assert (stored / LINKS).stat().st_mode & 0o777 == 0o700


def test_a_fifo_in_place_of_the_folder_of_links_is_replaced(stored: Path) -> None:
    shutil.rmtree(stored / LINKS)
    os.mkfifo(stored / LINKS)
    check_opens(stored)


def test_what_lies_in_the_folder_of_links_is_removed_by_its_name(
    stored: Path, treasure: Path
) -> None:
    before = content_of(treasure)
    for each in (stored / LINKS).iterdir():
        each.unlink()
    (stored / LINKS / "data.mdb").symlink_to(treasure / "data.mdb")
    (stored / LINKS / "lock.mdb").symlink_to(treasure)
    os.mkfifo(stored / LINKS / "fifo")
    (stored / LINKS / "empty").mkdir()
    check_opens(stored)
    assert content_of(treasure) == before


@pytest.mark.parametrize("name", [LINKS, "index"])
def test_a_folder_that_others_can_write_to_is_refused(stored: Path, name: str) -> None:
    (stored / name).chmod(0o777)
    with pytest.raises(StorageError, match=f"chmod go-w {stored / name}"):
        open_store(stored)


def test_a_filesystem_without_symbolic_links_holds_a_store(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", refuse)
    check_opens(stored)
    with open_store(stored) as store:
        store.check()


def test_a_file_that_replaced_the_index_while_it_was_open_keeps_its_length(
    stored: Path, treasure: Path
) -> None:
    before = content_of(treasure)
    with open_store(stored) as store:
        (stored / "index" / "data.mdb").unlink()
        (stored / "index" / "data.mdb").symlink_to(treasure / "data.mdb")
        store.index.keep_ahead(64 << 20)
    assert content_of(treasure) == before


def test_what_somebody_has_put_behind_the_last_page_is_not_read(stored: Path) -> None:
    with open_store(stored) as store:
        os.truncate(stored / "index" / "data.mdb", 1 << 40)
        assert [*store.index.reading_ahead()] == [True]
        store.check()


def test_a_process_that_dies_while_it_opens_the_index_leaves_nothing_to_the_next(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (pid := os.fork()) == 0:
        monkeypatch.setattr(lmdb, "open", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        open_store(stored)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert all(each.is_symlink() for each in (stored / LINKS).iterdir())
    check_opens(stored)
