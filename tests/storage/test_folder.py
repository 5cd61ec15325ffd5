"""Which folders the store refuses and with which message, and who may read the files it writes."""

import fcntl
import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from tests.golden import refused
from tests.storage.blocks import load, make_record, open_store, payload_of, put
from tieredkv.errors import FormatVersionError, NoStoreError, StorageError, StoreBusyError
from tieredkv.storage.folder.folder import StoreFolder
from tieredkv.storage.folder.lock import check_unused, has_engine, hold_for_engine, in_use
from tieredkv.storage.folder.marker import MARKER
from tieredkv.storage.worker.look import LookedFolder

RECORD = make_record()
MARKED = {"format": "tieredkv-store", "version": 3, "id": "", "stamp": ""}


def tree(path: Path) -> dict[str, tuple[int, int, bytes | str]]:
    """Return the mode, the time of the last change and the content of everything in a folder."""
    found = {}
    for each in sorted([path, *path.rglob("*")]):
        info = each.lstat()
        content: bytes | str = b""
        if each.is_symlink():
            content = os.readlink(each)
        elif each.is_file():
            content = each.read_bytes()
        found[str(each)] = (info.st_mode, info.st_mtime_ns, content)
    return found


def refusal(path: Path, kind: type[StorageError] = StorageError, *, create: bool = True) -> str:
    """Assert that a folder is refused and nothing in it changes; return the error message."""
    before = tree(path.parent)
    with pytest.raises(StorageError) as error:
        open_store(path, create=create)
    assert type(error.value) is kind
    assert tree(path.parent) == before
    assert str(path) in str(error.value)
    return str(error.value)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A closed store with one block."""
    path = tmp_path / "store"
    with open_store(path) as store:
        assert put(store, RECORD) == [True]
    return path


# --- refusals ---------------------------------------------------------------------------------


def test_a_folder_with_strangers_in_it_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "photos"
    path.mkdir(mode=0o700)
    (path / "holiday.jpg").write_bytes(b"irreplaceable")
    message = refusal(path)
    assert "holiday.jpg" in message and "choose an empty folder" in message


def test_a_folder_that_lost_its_marker_is_refused(stored: Path) -> None:
    (stored / "format.json").unlink()
    assert "holds no tieredkv store" in refusal(stored)


@pytest.mark.parametrize("version", [0, 1, 999])
def test_another_format_version_is_left_untouched_byte_for_byte(stored: Path, version: int) -> None:
    marker = {"format": "tieredkv-store", "version": version, "more": "of a later version"}
    (stored / "format.json").write_text(json.dumps(marker))
    (stored / "index" / "future.db").write_bytes(b"?")
    message = refusal(stored, FormatVersionError)
    assert f"version {version}" in message and "left untouched" in message


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\0" * 64,
        b"\xff\xfe",
        b"[]",
        b"1",
        b"null",
        b"{}",
        b'{"format": "tieredkv-store"}',
        b'{"format": "tieredkv-store", "version": null}',
        b'{"format": "tieredkv-store", "version": "one"}',
        b'{"format": "tieredkv-store", "version": 1e999}',
        b'{"format": "tieredkv-store", "version": 1.5}',
        b'{"format": "tieredkv-store", "version": true}',
        b"[" * 4096,
        *(
            msgspec.json.encode(MARKED | {"retentions": names})
            for names in (["a"] * 256, ["a" * 33])
        ),
    ],
)
def test_a_damaged_marker_is_refused_with_a_way_out(stored: Path, text: bytes) -> None:
    (stored / "format.json").write_bytes(text)
    message = refusal(stored)
    assert "damaged" in message and "restore that file or remove the folder" in message


def test_the_marker_of_another_program_is_refused(stored: Path) -> None:
    (stored / "format.json").write_text('{"format": "photos", "version": 1}')
    assert "belongs to `photos`" in refusal(stored)


@pytest.mark.parametrize("name", ["", "format.json", "lock", "index", "segments", "index/data.mdb"])
@pytest.mark.parametrize("mode", [0o777, 0o720, 0o702])
def test_what_others_can_write_to_is_refused(stored: Path, name: str, mode: int) -> None:
    part = stored / name if name else stored
    part.chmod(mode)
    assert f"chmod go-w {part}" in refusal(stored)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("name", ["", "format.json", "lock", "index", "segments"])
def test_what_belongs_to_another_user_is_refused(stored: Path, name: str) -> None:
    part = stored / name if name else stored
    os.chown(part, 12345, 12345)
    assert "belongs to uid 12345" in refusal(stored)


@pytest.mark.parametrize("name", ["", "format.json", "lock", "index", "segments", "index/data.mdb"])
def test_a_link_in_the_way_is_refused_and_not_followed(
    stored: Path, tmp_path: Path, name: str
) -> None:
    part = stored / name if name else stored
    elsewhere = tmp_path / "elsewhere"
    part.rename(elsewhere)
    part.symlink_to(elsewhere)
    refusal(stored)


def test_a_link_that_points_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").symlink_to(tmp_path / "nothing")
    assert "symbolic link" in refusal(tmp_path / "store")
    assert not (tmp_path / "nothing").exists()


def test_a_link_among_the_segments_is_refused(stored: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (segment,) = (stored / "segments").iterdir()
    segment.unlink()
    segment.symlink_to(victim)
    with pytest.raises(StorageError):
        open_store(stored)
    assert victim.read_bytes() == b"precious"


def test_a_stranger_among_the_segments_is_refused_and_kept(stored: Path) -> None:
    stranger = stored / "segments" / "notes.txt"
    stranger.write_text("mine")
    with refused(StorageError):
        open_store(stored)
    assert stranger.read_text() == "mine"


def _make_file(path: Path) -> None:
    path.touch(0o600)


@pytest.mark.parametrize("make", [_make_file, os.mkfifo], ids=["file", "fifo"])
def test_what_is_no_folder_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "store")
    assert "not a folder" in refusal(tmp_path / "store")


@pytest.mark.parametrize("name", ["format.json", "lock", "index/data.mdb"])
def test_a_folder_or_a_fifo_in_the_place_of_a_file_is_refused(stored: Path, name: str) -> None:
    part = stored / name
    part.unlink()
    os.mkfifo(part, 0o600)
    refusal_of_a_special_file(stored)
    part.unlink()
    part.mkdir(0o700)
    refusal(stored)


def refusal_of_a_special_file(path: Path) -> None:
    """Assert that a FIFO is refused without opening it, which would wait for a writer for ever."""
    program = f"""
import signal
signal.alarm(5)
from tests.storage.blocks import open_store
from tieredkv.errors import StorageError
from pathlib import Path
try:
    open_store(Path({str(path)!r}))
except StorageError:
    raise SystemExit(7)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True)
    assert done.returncode == 7, done.stderr.decode()


def test_a_store_that_is_not_there_is_not_made_for_whoever_only_looks(tmp_path: Path) -> None:
    assert "no store" in refusal(tmp_path / "store", NoStoreError, create=False)
    (tmp_path / "store").mkdir(mode=0o700)
    assert "is not a tieredkv store" in refusal(tmp_path / "store", NoStoreError, create=False)


def test_a_path_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refusal(tmp_path / "file" / "store")


# --- one writer -------------------------------------------------------------------------------


def live_writer(path: Path) -> tuple[int, str] | None:
    """Return the pid and the socket that the lock file names; None if no process holds the lock."""
    if not (path / "lock").exists():
        return None
    with (path / "lock").open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = json.load(lock)
            return text["pid"], text["socket"]
    return None


def test_a_second_writer_is_told_the_pid_of_the_first(stored: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tests.storage.blocks import open_store\n"
        f"store = open_store(Path({str(stored)!r}))\n"
        "print('open', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as first:
        assert first.stdout is not None and first.stdout.readline() == b"open\n"
        assert live_writer(stored) == (first.pid, "sock")
        assert f"process {first.pid}" in refusal(stored, StoreBusyError)
        first.kill()
    assert live_writer(stored) is None
    with open_store(stored) as store:
        assert load(store, RECORD) == payload_of(RECORD)


def test_a_refused_store_is_not_left_locked(stored: Path) -> None:
    (stored / "segments" / "notes.txt").touch()
    for _ in range(2):
        with refused(StorageError):
            open_store(stored)
    assert live_writer(stored) is None
    (stored / "segments" / "notes.txt").unlink()
    with open_store(stored) as store:
        assert live_writer(stored) == (os.getpid(), "sock")
        assert load(store, RECORD) == payload_of(RECORD)


def test_looking_for_a_writer_changes_nothing_and_finds_none_where_no_store_is(
    stored: Path, tmp_path: Path
) -> None:
    before = tree(tmp_path)
    assert (stored / MARKER).exists()
    assert live_writer(stored) is None
    assert live_writer(tmp_path / "nothing") is None
    assert tree(tmp_path) == before


# --- what is written --------------------------------------------------------------------------


@pytest.fixture(params=[0o000, 0o022, 0o077, 0o777], ids=oct)
def umask(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """Set a umask, as a process may inherit it. `tmp_path` must be made before, so it is named."""
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.parametrize("sync", ["commit", "none"])
def test_an_index_that_nobody_flushed_does_not_outlive_the_machines_start(
    stored: Path, sync: str
) -> None:
    lock, records = stored / "lock", [make_record("b", position) for position in range(5)]
    with open_store(stored, sync=sync) as store:
        put(store, *records)
        killed = lock.read_bytes()
    lock.write_bytes(killed)
    with open_store(stored) as store:  # the machine was not started again since
        assert store.lookup([each.block_hash for each in records]) == records
    assert not (stored / "index.bad").exists()
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    lock.write_bytes(killed.replace(boot, b"another"))
    with open_store(stored) as store:
        assert (stored / "index.bad").exists() == (sync == "none")
        assert store.lookup([each.block_hash for each in records]) == records
        store.check()


@pytest.mark.parametrize(("pid", "named"), [(12, True), ("\x1b[2J", False), (None, False)])
def test_a_process_that_is_no_number_is_not_named(stored: Path, pid: object, named: bool) -> None:
    with (stored / "lock").open("r+b") as lock:
        lock.write(msgspec.json.encode({"pid": pid}).ljust(100))
        lock.flush()
        assert ("by process 12;" in str(in_use("kv", lock.fileno()))) == named
        assert "by another process;" in str(in_use("kv", lock.fileno())) or named


@pytest.mark.parametrize("budget", [-1, 0, 1 << 70, 1.5, "1", None])
def test_a_lock_whose_text_tells_no_budget_leaves_a_store_without_one(
    stored: Path, budget: object
) -> None:
    (stored / "lock").write_bytes(msgspec.json.encode({"budget_bytes": budget}))
    folder = LookedFolder.look(str(stored))
    folder.release()
    assert folder.budget_bytes == 0


@pytest.mark.usefixtures("umask")
def test_only_the_owner_can_read_the_store_whatever_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with open_store(path) as store:
        assert put(store, RECORD, make_record("large", size_bytes=20_480)) == [True, True]
        modes_while_open = _modes(path)
    with open_store(path, budget_bytes=1 << 20) as store:
        assert load(store, RECORD) == payload_of(RECORD)
    assert len(modes_while_open) == 12
    for modes in (modes_while_open, _modes(path)):
        for name, (is_folder, mode) in modes.items():
            assert mode == (0o700 if is_folder else 0o600), name


def _modes(path: Path) -> dict[str, tuple[bool, int]]:
    return {
        str(each): (each.is_dir(), stat.S_IMODE(each.lstat().st_mode))
        for each in [path, *path.rglob("*")]
    }


def test_a_folder_that_others_may_read_is_closed_to_them(stored: Path) -> None:
    for each in [stored, *stored.rglob("*")]:
        each.chmod(0o755 if each.is_dir() else 0o644)
    with open_store(stored) as store:
        assert load(store, RECORD) == payload_of(RECORD)
    modes = _modes(stored)
    modes.pop(str(stored / "format.json"))  # contains nothing about the stored blocks
    assert all(mode == (0o700 if is_folder else 0o600) for is_folder, mode in modes.values())


@pytest.mark.parametrize("left", [["format.json.tmp"], ["lock"], ["format.json.tmp", "lock"]])
def test_a_store_whose_creation_was_cut_short_is_created(tmp_path: Path, left: list[str]) -> None:
    path = tmp_path / "store"
    path.mkdir(mode=0o700)
    for name in left:
        (path / name).touch(0o600)
    with open_store(path) as store:
        assert put(store, RECORD) == [True]
    assert json.loads((path / "format.json").read_text()) == {
        "format": "tieredkv-store",
        "version": 3,
        "id": "",
        "stamp": "",
        "retentions": ["24h"],
    }
    assert not (path / "format.json.tmp").exists()


# --- names of retention policies ----------------------------------------------------------------


def named_retentions(path: Path) -> list[str]:
    """Return the list that `format.json` has."""
    names: list[str] = json.loads((path / "format.json").read_text())["retentions"]
    return names


def test_each_start_adds_new_names_of_retention_policies_and_moves_none(tmp_path: Path) -> None:
    path = tmp_path / "store"
    for names, known in ((("a", "b"), "ab"), (("c", "b"), "abc"), ((), "abc"), (("d",), "abcd")):
        open_store(path, disk_retentions=names).close()
        assert named_retentions(path) == list(known)
    before = tree(path)[str(path / "format.json")]
    open_store(path, disk_retentions=("d", "a")).close()
    assert tree(path)[str(path / "format.json")] == before


@pytest.mark.parametrize(
    "names", [[f"r{number}" for number in range(256)], ["x" * 33]], ids=["many", "long"]
)
def test_a_store_that_has_no_room_for_a_name_says_so_and_stays(
    stored: Path, names: list[str]
) -> None:
    with refused(StorageError):
        open_store(stored, disk_retentions=tuple(names))
    assert named_retentions(stored) == ["24h"]
    open_store(stored, disk_retentions=tuple(f"r{number}" for number in range(254))).close()
    assert len(named_retentions(stored)) == 255


# --- other files in the folder ------------------------------------------------------------------


def test_a_file_that_an_engine_renames_meanwhile_is_no_fault_of_the_store(stored: Path) -> None:
    draft, over = stored / "rates.json.tmp", threading.Event()

    def rename() -> None:
        while not over.is_set():
            draft.write_bytes(b"{}")
            draft.rename(stored / "rates.json")

    engine = threading.Thread(target=rename)
    folder = StoreFolder.claim(str(stored), create=False)
    alone_bytes = folder.occupied_bytes()
    engine.start()
    try:
        assert all(folder.occupied_bytes() >= alone_bytes for _ in range(1000))
    finally:
        over.set()
        engine.join()
        folder.release()


# --- a look before memory is taken --------------------------------------------------------------


def test_a_look_at_a_store_in_use_names_who_uses_it_and_changes_nothing(stored: Path) -> None:
    folder = StoreFolder.claim(str(stored), create=False)
    before = tree(stored.parent)
    with pytest.raises(StoreBusyError) as error:
        check_unused(str(stored), patience_s=0.0)
    assert str(stored) in str(error.value) and f"process {os.getpid()}" in str(error.value)
    assert tree(stored.parent) == before
    folder.release()
    check_unused(str(stored), patience_s=0.0)


def test_a_look_waits_for_a_writer_that_is_about_to_go(stored: Path) -> None:
    folder = StoreFolder.claim(str(stored), create=False)
    threading.Timer(0.05, folder.release).start()
    check_unused(str(stored), patience_s=60.0)


def test_a_look_leaves_it_to_the_opening_to_refuse_what_is_no_store(tmp_path: Path) -> None:
    for name in ("missing", "empty"):
        check_unused(str(tmp_path / name), patience_s=0.0)
        (tmp_path / "empty").mkdir(exist_ok=True)
    assert [each.name for each in tmp_path.iterdir()] == ["empty"]


# --- the engine that uses a folder --------------------------------------------------------------


def test_an_engine_that_starts_in_the_middle_of_a_question_is_known_to_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_fd, held, close = os.open(tmp_path, os.O_PATH), list[int](), os.close

    def hold_and_close(fd: int) -> None:
        monkeypatch.undo()
        held.append(hold_for_engine(str(tmp_path)))
        close(fd)

    monkeypatch.setattr(os, "close", hold_and_close)
    assert not has_engine(folder_fd)
    [fd] = held
    assert has_engine(folder_fd)
    close(fd)
    assert not has_engine(folder_fd)
    close(folder_fd)
