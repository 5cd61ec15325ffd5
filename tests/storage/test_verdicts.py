"""An index is set aside only on evidence of damage; other failures leave every file unchanged."""

import errno
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import pytest

from tests.golden import refused
from tests.levels import few
from tests.storage.conftest import CheckedClient, Harness, Mailbox, make_chain, wait_until
from tests.storage.test_faults import plain_index
from tieredkv.errors import (
    CorruptIndexError,
    FormatVersionError,
    StorageError,
    StoreFailedError,
    StoreFullError,
)
from tieredkv.operate.ask import StoreControl
from tieredkv.operate.calls import Df, Verify
from tieredkv.storage.folder.filesystem import NO_SPACE
from tieredkv.storage.index.pages import check_pages, read_meta
from tieredkv.storage.index.verdicts import storage_errors
from tieredkv.storage.worker.process import judge_end

CHAIN = make_chain("a", 20)
HASHES = [record.block_hash for record in CHAIN]
VERDICTS: dict[type[StorageError], set[str]] = {
    CorruptIndexError: {"CorruptedError", "PageNotFoundError", "BadChecksumError"},
    StoreFullError: {"MapFullError", "DiskError"},
    FormatVersionError: {"VersionMismatchError"},
    StorageError: {
        *("ReadersFullError", "TlsFullError", "TxnFullError", "MapResizedError"),
        *("BadValsizeError", "ReadonlyError", "LockError", "MemoryError"),
    },
}
EXTRA = """
import os, signal, sys
from pathlib import Path
RAISE = {signal_source!r}
if any("tieredkv.storage.worker" in each for each in sys.orig_argv):
    with open({flag!r} + ".starts", "a") as starts:
        starts.write(".")
    import tieredkv.storage.{module} as module
    holder = {holder}
    real = getattr(holder, {name!r})
    def broken(*args, **kwargs):
        if Path({flag!r}).exists():
            {action}
        return real(*args, **kwargs)
    setattr(holder, {name!r}, broken)
"""
RAISE = "import ctypes; getattr(ctypes.CDLL(None), 'raise')(11)"  # the signal hits this thread
Break = Callable[..., Path]


def lmdb_errors() -> list[type[lmdb.Error]]:
    """Return every error class of the LMDB binding."""
    known = [each for each in vars(lmdb).values() if isinstance(each, type)]
    return [each for each in known if issubclass(each, lmdb.Error)]


def outcome_of(error: BaseException) -> type[BaseException]:
    """Return the error class that an error of the index is turned into."""
    with pytest.raises(StorageError) as caught, storage_errors("index"):
        raise error
    assert caught.value.__cause__ is error
    return type(caught.value)


def lmdb_error(kind: type[lmdb.Error], code: int) -> lmdb.Error:
    """Return an error like those that the binding raises."""
    error = kind("mdb_get: made up")
    vars(error)["code"] = code
    return error


@pytest.mark.parametrize("kind", lmdb_errors(), ids=lambda kind: kind.__name__)
def test_every_error_of_lmdb_has_one_verdict_and_three_are_damage(kind: type[lmdb.Error]) -> None:
    wanted = [verdict for verdict, names in VERDICTS.items() if kind.__name__ in names]
    assert outcome_of(lmdb_error(kind, 0)) is (*wanted, StoreFailedError)[0]


def test_no_error_of_the_system_is_damage() -> None:
    for code, name in errno.errorcode.items():
        wanted = StoreFullError if code in NO_SPACE else StorageError
        assert outcome_of(lmdb_error(lmdb.Error, code)) is wanted, name
        assert outcome_of(OSError(code, os.strerror(code))) is wanted, name


def test_a_code_of_lmdbs_that_nobody_knows_is_no_damage() -> None:
    assert outcome_of(lmdb_error(lmdb.Error, -30700)) is StoreFailedError


@pytest.mark.parametrize(
    ("returncode", "frame", "wanted"),
    [
        (-signal.SIGSEGV, "/x/storage/index/environment.py", (True, False)),
        (-signal.SIGBUS, "/x/storage/index/environment.py", (True, False)),
        (-signal.SIGABRT, "/x/storage/index/environment.py", (True, False)),
        (-signal.SIGBUS, "/x/storage/index/transaction.py", (True, False)),
        (-signal.SIGFPE, "/x/storage/index/environment.py", (False, True)),
        (-signal.SIGSEGV, "/x/storage/format/planes.py", (False, True)),
        (-signal.SIGSEGV, "/x/other/index.py", (False, True)),
        (-signal.SIGSEGV, None, (False, True)),
        (-signal.SIGKILL, None, (False, False)),
        (4, None, (True, False)),
        (5, None, (False, True)),
        (1, None, (False, False)),
        (77, None, (False, True)),
    ],
)
def test_a_crash_is_evidence_only_in_the_index(
    returncode: int, frame: str | None, wanted: tuple[bool, bool]
) -> None:
    lines = f'Stack (most recent call first):\n  File "{frame}", line 7 in get\n  File "/x/storage/'
    stack = (lines + 'index.py", line 1 in outer\n').encode() if frame else b""
    assert judge_end(returncode, stack)[:2] == wanted


@pytest.mark.parametrize(
    ("returncode", "frame", "wanted"),
    [
        (-signal.SIGBUS, "/x/storage/format/record.py", (False, False)),
        (-signal.SIGBUS, "/x/storage/index/environment.py", (True, False)),
        (-signal.SIGSEGV, "/x/storage/format/record.py", (False, True)),
        (-signal.SIGBUS, None, (False, True)),
    ],
)
def test_a_bus_error_in_pages_of_another_program_is_explained(
    returncode: int, frame: str | None, wanted: tuple[bool, bool]
) -> None:
    lines = f'Stack (most recent call first):\n  File "{frame}", line 7 in checksum\n'
    stack = lines.encode() if frame else b""
    assert judge_end(returncode, stack, has_adopted=True)[:2] == wanted


# --- a worker that fails ------------------------------------------------------------------------


@pytest.fixture
def stored(harness: Harness) -> Harness:
    """A store with some blocks, which no worker serves."""
    client = harness.open()
    assert all(done.ok for done in Mailbox(client).store(CHAIN))
    client.close()
    return harness


@pytest.fixture
def break_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Break]:
    """Replaces a function of the worker by an action that runs while a file exists."""

    def arrange(module: str, name: str, action: str, *, holder: str = "module") -> Path:
        flag, extra = tmp_path / "broken", tmp_path / "extra"
        extra.mkdir()
        fields = {"module": module, "holder": holder, "name": name, "action": action}
        text = EXTRA.format(**fields, flag=str(flag), signal_source=RAISE)
        (extra / "sitecustomize.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(extra))
        return flag

    yield arrange


def wait_for_starts(flag: Path, number: int = 2) -> None:
    """Wait until the worker was started that many more times."""
    starts = Path(f"{flag}.starts")
    before = starts.stat().st_size
    wait_until(lambda: starts.stat().st_size >= before + number, "the worker is not started again")


def kept_files(folder: Path) -> dict[str, str]:
    """Return digests of the files that a failure must not change: the index and every segment.

    Zeroes at the end of a file do not count: an open index has some, and closing it removes them.
    """
    files = [folder / "index" / "data.mdb", *sorted((folder / "segments").iterdir())]
    held = {each.name: each.read_bytes().rstrip(b"\0") for each in files}
    return {name: hashlib.sha256(data).hexdigest() for name, data in held.items()}


def has_stopped(pid: int) -> bool:
    """Whether no thread of a process that got SIGSTOP is in a system call any more, as to write."""
    stats = [each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def kill(client: CheckedClient, folder: Path, flag: Path | None = None) -> dict[str, str]:
    """Stop a worker by a signal and kill it; return the digests of its files at that moment."""
    assert client.pid is not None
    os.kill(pid := client.pid, signal.SIGSTOP)
    wait_until(lambda: has_stopped(pid))
    before = kept_files(folder)
    if flag is not None:
        flag.touch()
    os.kill(pid, signal.SIGKILL)
    return before


def expect_back(harness: Harness, client: CheckedClient) -> None:
    """Assert that the tier serves every block again, with the same index."""
    wait_until(lambda: client.pid is not None)
    assert client.state().why == ""
    mail = Mailbox(client)
    for done in mail.load(CHAIN):
        assert done.ok, done.reason
        mail.assert_right(done)
    assert not (harness.folder / "index.bad").exists()
    assert all(done.ok for done in mail.store(make_chain("later", 4)))


@pytest.mark.parametrize("is_first", [True, False], ids=["first start", "restart"])
def test_an_exception_at_the_workers_start_leaves_every_file_as_it_is(
    stored: Harness, break_worker: Break, is_first: bool
) -> None:
    flag = break_worker("opening", "settle_clock", "raise RuntimeError('injected')")
    before = kept_files(stored.folder)
    if is_first:
        flag.touch()
        client = stored.open()
    else:
        client = stored.open()
        before = kill(client, stored.folder, flag)
    wait_until(lambda: "injected" in client.state().why)
    wait_for_starts(flag)
    assert client.pid is None
    assert kept_files(stored.folder) == before
    assert StoreControl(stored.folder).answer(Df())["disk"]["blocks"] == len(CHAIN)  # by a look
    assert kept_files(stored.folder) == before
    flag.unlink()
    expect_back(stored, client)


@pytest.mark.parametrize(
    ("module", "holder", "name"), [("store", "Store", "find"), ("store", "Store", "commit")]
)
def test_an_exception_in_the_middle_leaves_every_stored_block(
    stored: Harness, break_worker: Break, module: str, holder: str, name: str
) -> None:
    flag = break_worker(module, name, "raise ValueError('injected')", holder=f"module.{holder}")
    client = stored.open()
    mail = Mailbox(client)
    flag.touch()
    for number in range(3):
        mail.lookup(HASHES)
        mail.store(make_chain(f"lost {number}", 2))
        wait_until(lambda: client.pid is not None)
    flag.unlink()
    wait_until(lambda: all(mail.lookup(HASHES)))
    expect_back(stored, client)


def test_an_exception_at_the_workers_end_leaves_every_file_as_it_is(
    stored: Harness, break_worker: Break
) -> None:
    flag = break_worker(
        "index.environment", "close", "raise ZeroDivisionError('injected')", holder="module.Index"
    )
    client = stored.open()
    flag.touch()
    client.close()
    before = kept_files(stored.folder)
    flag.unlink()
    expect_back(stored, stored.open())
    assert kept_files(stored.folder).keys() >= before.keys()


def test_crashes_outside_the_index_never_condemn_it(stored: Harness, break_worker: Break) -> None:
    crash = "import ctypes; ctypes.string_at(0)"
    flag = break_worker("opening", "settle_clock", crash)
    client = stored.open()
    before = kill(client, stored.folder, flag)
    wait_until(lambda: "SIGSEGV" in client.state().why)
    wait_for_starts(flag, 4)
    assert kept_files(stored.folder) == before
    flag.unlink()
    expect_back(stored, client)


def test_crashes_in_the_index_have_it_made_again_once_and_never_touch_a_segment(
    stored: Harness, break_worker: Break, caplog: pytest.LogCaptureFixture
) -> None:
    # The code is compiled under the name of the index's file, as if LMDB had crashed below it.
    crash = "exec(compile(RAISE, module.__file__, 'exec'))"
    flag = break_worker("index.transaction", "get_segment", crash, holder="module.IndexTxn")
    client = stored.open()
    before = kept_files(stored.folder)
    flag.touch()
    client.delete(HASHES[:1], "test")
    wait_until(lambda: "rebuilt and is damaged again" in client.state().why)
    wait_for_starts(flag)
    assert kept_files(stored.folder).keys() == before.keys()
    assert caplog.text.count("was set aside as") == 1
    flag.unlink()
    mail = Mailbox(client)
    wait_until(lambda: all(mail.lookup(HASHES[1:])))
    for done in mail.load(CHAIN[1:]):
        mail.assert_right(done)


@pytest.mark.parametrize("number", few([signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT]))
def test_a_crash_signal_while_the_index_is_idle_condemns_nothing(
    stored: Harness, number: signal.Signals
) -> None:
    client = stored.open()
    for _ in range(3):
        wait_until(lambda: client.pid is not None)
        time.sleep(0.3)  # the worker has looked over its index and is idle
        assert client.pid is not None
        os.kill(client.pid, number)
        wait_until(lambda: client.pid is None or client.state().why != "")
    expect_back(stored, client)


def test_a_truncated_index_under_a_live_worker_is_evidence_and_no_block_is_lost(
    stored: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    client = stored.open()
    segments = {k: v for k, v in kept_files(stored.folder).items() if k != "data.mdb"}
    os.truncate(stored.folder / "index" / "data.mdb", 4096)
    mail = Mailbox(client)
    mail.lookup(HASHES)
    wait_until((stored.folder / "index.bad").exists)
    wait_until(lambda: all(mail.lookup(HASHES)))
    for done in mail.load(CHAIN):
        mail.assert_right(done)
    assert kept_files(stored.folder).items() >= segments.items()
    assert caplog.text.count("was set aside as") == 1


# --- causes outside the index -------------------------------------------------------------------


@pytest.mark.parametrize(
    "code", few([errno.EIO, errno.EMFILE, errno.EPERM, errno.ESTALE, errno.EROFS])
)
def test_an_error_of_the_system_at_a_restart_turns_the_tier_off_until_it_is_gone(
    stored: Harness, break_worker: Break, code: int
) -> None:
    action = f"raise OSError({code}, os.strerror({code}))"
    flag = break_worker("index.environment", "_open", action, holder="module.Index")
    client = stored.open()
    before = kill(client, stored.folder, flag)
    wait_until(lambda: os.strerror(code) in client.state().why)
    wait_for_starts(flag)
    assert StoreControl(stored.folder).answer(Df())["disk"]["blocks"] == len(CHAIN)  # by a look
    assert kept_files(stored.folder) == before
    flag.unlink()
    expect_back(stored, client)


@pytest.fixture
def immutable(stored: Harness) -> Iterator[Callable[[str], None]]:
    """Sets and clears the attribute that makes the index immutable."""
    path = str(stored.folder / "index" / "data.mdb")

    def change(sign: str) -> None:
        if shutil.which("chattr") is None or subprocess.call(
            ["chattr", f"{sign}i", path], stderr=subprocess.DEVNULL
        ):
            pytest.skip("this filesystem, or user, has no immutable files")

    yield change
    subprocess.call(["chattr", "-i", path], stderr=subprocess.DEVNULL)


def test_an_immutable_index_turns_the_tier_off_until_it_may_be_changed(
    stored: Harness, immutable: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    client = stored.open()
    immutable("+")
    before = kill(client, stored.folder)
    wait_until(lambda: os.strerror(errno.EPERM) in client.state().why)
    wait_until(lambda: caplog.text.count("is started again") >= 3)
    assert kept_files(stored.folder) == before
    immutable("-")
    expect_back(stored, client)


def test_an_outside_process_that_fills_its_table_of_readers_holds_up_no_store(
    stored: Harness,
) -> None:
    client = stored.open()
    mail = Mailbox(client)
    assert all(mail.lookup(HASHES))
    pid = client.pid
    code = (
        "import lmdb, sys\n"
        "env = lmdb.open(sys.argv[1], readonly=True, max_dbs=8, map_size=64 << 30)\n"
        "readers = []\n"
        "try:\n"
        "    while True: readers.append(env.begin())\n"
        "except lmdb.ReadersFullError: pass\n"
        "print(len(readers), flush=True)\n"
        "sys.stdin.read()\n"
    )
    outsider = subprocess.Popen(
        [sys.executable, "-c", code, str(stored.folder / "index")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert outsider.stdout is not None
        assert int(outsider.stdout.readline()) > 100
        assert all(mail.lookup(HASHES))
        assert all(done.ok for done in mail.store(make_chain("meanwhile", 2)))
        assert client.pid == pid
        kill(client, stored.folder)
        wait_until(lambda: client.pid not in (None, pid))
        expect_back(stored, client)
    finally:
        outsider.kill()
        outsider.communicate()


@pytest.mark.parametrize("version", few([2, 999, 0, 3]))
def test_an_index_of_another_lmdb_is_refused_and_left_untouched(
    stored: Harness, version: int
) -> None:
    index = stored.folder / "index" / "data.mdb"
    data = bytearray(index.read_bytes())
    for at in (20, 4096 + 20):
        data[at : at + 4] = version.to_bytes(4, "little")
    index.write_bytes(data)
    before = kept_files(stored.folder)
    with refused(FormatVersionError):
        stored.open()
    with refused(StorageError):
        StoreControl(stored.folder).answer(Verify())
    assert kept_files(stored.folder) == before
    assert not (stored.folder / "index.bad").exists()
    for at in (20, 4096 + 20):
        data[at : at + 4] = (1).to_bytes(4, "little")
    index.write_bytes(data)
    expect_back(stored, stored.open())


def test_an_index_that_a_newer_lmdb_wrote_is_refused(stored: Harness) -> None:
    shutil.rmtree(stored.folder / "index")
    with lmdb.open(str(stored.folder / "index"), lib_version=1, max_dbs=8):
        pass
    (stored.folder / "index").chmod(0o700)
    before = kept_files(stored.folder)
    with refused(FormatVersionError):
        stored.open()
    assert kept_files(stored.folder) == before


def test_a_wrong_magic_is_damage_and_costs_no_block(stored: Harness) -> None:
    with open(stored.folder / "index" / "data.mdb", "r+b") as index:
        index.seek(16)
        index.write(bytes(4))
    client = stored.open()
    mail = Mailbox(client)
    for done in mail.load(CHAIN):
        mail.assert_right(done)
    assert (stored.folder / "index.bad").is_dir()


def test_an_index_that_cannot_be_made_again_for_want_of_space_is_tried_again(
    stored: Harness, break_worker: Break
) -> None:
    action = "raise OSError(28, 'No space left on device')"
    flag = break_worker("index.rebuild", "_add", action)
    client = stored.open()
    flag.touch()
    os.truncate(stored.folder / "index" / "data.mdb", 4096)
    mail = Mailbox(client)
    mail.lookup(HASHES)
    bad = stored.folder / "index.bad" / "data.mdb"
    wait_until(bad.exists)
    damaged = bad.read_bytes()
    wait_until(lambda: "No space" in client.state().why)
    wait_for_starts(flag)
    assert bad.read_bytes() == damaged, "what was set aside is not replaced by an empty index"
    flag.unlink()
    wait_until(lambda: client.pid is not None and all(mail.lookup(HASHES)))
    for done in mail.load(CHAIN):
        mail.assert_right(done)


# --- evidence in the pages ----------------------------------------------------------------------


def fill_index(path: Path, seed: int) -> None:
    """Make an LMDB database by random puts, deletes and drops."""
    random_ = random.Random(seed)
    path.mkdir()
    with lmdb.open(str(path), map_size=1 << 30, max_dbs=8, sync=False, lib_version=0) as env:
        dbs = [env.open_db(name) for name in (b"blocks", b"lru", b"free")]
        for _ in range(random_.randrange(2, 30)):
            with env.begin(write=True) as txn:
                for _ in range(random_.randrange(300)):
                    key, db = random_.randbytes(random_.choice([4, 8, 32, 76])), random_.choice(dbs)
                    txn.put(key, random_.randbytes(random_.randrange(230)), db=db)
                    with txn.cursor(db=db) as cursor:
                        if random_.random() < 0.3 and cursor.set_range(random_.randbytes(2)):
                            cursor.delete()
                if random_.random() < 0.1:
                    txn.drop(random_.choice(dbs), delete=False)


@pytest.mark.parametrize("seed", range(12))
def test_sound_pages_are_no_evidence(tmp_path: Path, seed: int) -> None:
    fill_index(tmp_path / "index", seed)
    check_pages(str(tmp_path / "index"))


def overwrite_a_page(data: bytearray, page: int, other: int) -> None:
    data[4096 * page : 4096 * page + 4096] = bytes(4096)


def swap_pages(data: bytearray, page: int, other: int) -> None:
    one, two = slice(4096 * page, 4096 * page + 4096), slice(4096 * other, 4096 * other + 4096)
    data[one], data[two] = data[two], data[one]


def lengthen_a_page(data: bytearray, page: int, other: int) -> None:
    data[4096 * page + 12] ^= 0x40


def move_an_entry(data: bytearray, page: int, other: int) -> None:
    data[4096 * page + 17] ^= 0x80


@pytest.mark.parametrize(
    "harm", [overwrite_a_page, swap_pages, lengthen_a_page, move_an_entry], ids=lambda h: h.__name__
)
def test_a_page_in_use_that_contradicts_itself_is_evidence(
    tmp_path: Path, harm: Callable[[bytearray, int, int], None]
) -> None:
    path = tmp_path / "index"
    fill_index(path, 3)
    meta = read_meta(str(path))
    assert meta is not None
    data = bytearray((path / "data.mdb").read_bytes())
    harm(data, meta.main.root, next(n for n in range(2, meta.last_page) if n != meta.main.root))
    (path / "data.mdb").write_bytes(data)
    with refused(CorruptIndexError):
        check_pages(str(path))


def test_an_entry_that_cannot_be_decoded_is_evidence(stored: Harness) -> None:
    with plain_index(stored.folder, "segments") as (txn, db):
        txn.put((1).to_bytes(4, "big"), b"\x93\x00\x01\x02", db=db)
    client = stored.open()
    mail = Mailbox(client)
    for done in mail.load(CHAIN):
        mail.assert_right(done)
    assert (stored.folder / "index.bad").is_dir()
