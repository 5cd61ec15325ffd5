"""Verbs that only look at a stopped store leave every byte of it, and of its keys, as it is."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.golden import refused
from tests.levels import few
from tests.storage.blocks import (
    CheckedStore,
    change_bytes,
    load,
    make_record,
    open_store,
    payload_of,
    put,
    segment_files,
)
from tests.storage.mounts import FILESYSTEMS, CannotMountError, mounted
from tests.waiting import wait_until
from tieredkv.cli.main import main
from tieredkv.clock import Clock
from tieredkv.errors import FormatVersionError, StorageError, StoreBusyError, UnknownIdError
from tieredkv.operate.ask import StoreControl
from tieredkv.operate.calls import Df, EvictFilter, Inspect, Ls, Prune, Verify
from tieredkv.operate.models import KnownModel, note_model, read_models
from tieredkv.storage.folder.lock import is_wanted, lock_to_look, lock_to_write
from tieredkv.storage.messages.engine import Looking
from tieredkv.storage.options import StoreOptions
from tieredkv.storage.worker.process import WorkerProcess
from tieredkv.wire.process import Refused

NOBODY = 65534
Seen = dict[str, tuple[object, ...]]


class Stopped:
    """A stopped store of one chain of five blocks, and the folder of its keys."""

    def __init__(self, base: Path, *, encryption: str = "on") -> None:
        self.base, self.folder, self.key_dir = base, base / "kv", base / "keys"
        self.offset = base / "offset"
        self.encryption = encryption
        now = Clock().now()
        self.records = [make_record("chain", i, now=now) for i in range(5)]
        with self.open() as store:
            put(store, *self.records)

    def open(self) -> CheckedStore:
        """Open the store as a server does."""
        key_dir = str(self.key_dir)
        return open_store(self.folder, Clock(), encryption=self.encryption, key_dir=key_dir)

    def control(self) -> StoreControl:
        """Return what the command line uses."""
        key_dir, offset_file = str(self.key_dir), str(self.offset)
        return StoreControl(self.folder, key_dir=key_dir, clock_offset_file=offset_file)

    def seen(self) -> Seen:
        """Return all that can be compared of every file and folder of the store and its keys."""
        found: Seen = {}
        for top in (self.folder, self.key_dir):
            for path in [top, *top.rglob("*")]:
                info = path.lstat()
                data = path.read_bytes() if path.is_file() else b""
                times = (info.st_mtime_ns, info.st_ctime_ns)
                owner = (info.st_mode, info.st_uid, info.st_nlink)
                found[str(path)] = (info.st_ino, *owner, *times, data)
        return found

    def looks(self) -> list[dict[str, Any]]:
        """Have every verb look that only looks; return the answers."""
        control, first = self.control(), self.records[0].block_hash.hex()
        answers = [control.answer(Df(verbose=True)), whole(control.pages(Ls()))]
        with suppress(UnknownIdError):  # of an index that is not read
            answers.append(whole(control.pages(Inspect(id=first, following=True))))
        answers.append(control.answer(Verify(repair=False)))
        answers.append(control.answer(EvictFilter(all=True, dry_run=True)))
        answers.append(control.answer(Prune(dry_run=True)))
        return answers

    def looked(self) -> list[dict[str, Any]]:
        """Have every verb look, and compare every byte before and after."""
        before = self.seen()
        answers = self.looks()
        assert self.seen() == before
        return answers

    def check_served(self) -> None:
        """Have a server start on the store, and load every block."""
        with self.open() as store:
            assert [load(store, each) for each in self.records] == [*map(payload_of, self.records)]


def whole(pages: Iterator[list[Any]]) -> dict[str, Any]:
    """Return what a verb with a list answers, with the items of the list."""
    items = list[Any]()
    while True:
        try:
            items += next(pages)
        except StopIteration as ending:
            return {**ending.value, "items": items}


def codes_of(answer: dict[str, Any]) -> list[str]:
    """Return what a store needs."""
    return [need["code"] for need in answer["needs"]]


@pytest.fixture
def stopped(tmp_path: Path) -> Stopped:
    return Stopped(tmp_path)


@pytest.mark.parametrize("encryption", ["on", "off"])
def test_a_look_at_a_sound_store_changes_nothing_and_sees_all(
    tmp_path: Path, encryption: str
) -> None:
    (tmp_path / "keys").mkdir(0o700)
    stopped = Stopped(tmp_path, encryption=encryption)
    df, ls, inspected, verified, evicted, pruned = answers = stopped.looked()
    assert [codes_of(answer) for answer in answers] == [[]] * 6
    assert (df["disk"]["blocks"], df["disk"]["encryption"]) == (5, encryption)
    assert df["disk"]["num_keys"] == (encryption == "on")
    assert [use["blocks"] for use in df["namespaces"]] == [5]
    assert [chain.blocks for chain in ls["items"]] == [5]
    assert [block.position for block in inspected["items"]] == [0, 1, 2, 3, 4]
    assert (verified["checked"], verified["bad"]) == (5, 0)
    assert evicted["evicted_blocks"] == 5
    assert pruned["pruned_blocks"] == 0
    stopped.check_served()


def lose_index(stopped: Stopped) -> None:
    (stopped.folder / "index" / "data.mdb").unlink()


def lose_index_folder(stopped: Stopped) -> None:
    shutil.rmtree(stopped.folder / "index")


def empty_index(stopped: Stopped) -> None:
    os.truncate(stopped.folder / "index" / "data.mdb", 0)


def cut_index(stopped: Stopped) -> None:
    path = stopped.folder / "index" / "data.mdb"
    os.truncate(path, path.stat().st_size // 2 // 4096 * 4096)


def damage_meta(stopped: Stopped) -> None:
    change_bytes(stopped.folder / "index" / "data.mdb", 16, lambda _: b"\xff" * 8, 8)


def damage_pages(stopped: Stopped) -> None:
    path = stopped.folder / "index" / "data.mdb"
    for at in range(2 * 4096, path.stat().st_size, 4096):
        change_bytes(path, at, lambda _: b"\xff" * 16, 16)


def leave_drafts(stopped: Stopped) -> None:
    shutil.copytree(stopped.folder / "index", stopped.folder / "index.next")
    damage_pages(stopped)
    (stopped.folder / "index.new").mkdir(0o700)
    (stopped.folder / "index.new" / "data.mdb").write_bytes(b"half")


def stop_the_machine(stopped: Stopped) -> None:
    lock = stopped.folder / "lock"
    lock.write_text(json.dumps({**json.loads(lock.read_text()), "unflushed_boot": "another"}))


def ask_for_rebuild(stopped: Stopped) -> None:
    with stopped.open() as store:
        store.ask_for_rebuild()


def turn_the_clock_back(stopped: Stopped) -> None:
    stopped.offset.write_text("-3600")


def turn_the_clock_back_a_little(stopped: Stopped) -> None:
    stopped.offset.write_text("-30")


def add_a_segment(stopped: Stopped) -> None:
    [file] = segment_files(stopped.folder)
    number, _, rest = file.name.partition("-")
    shutil.copy(file, file.with_name(f"{int(number) + 7:08d}-{rest}"))
    file.with_name(f"{int(number) + 7:08d}-{rest}").chmod(0o600)


def leave_pending_extents(stopped: Stopped) -> None:
    with stopped.open() as store:
        store.drop([stopped.records[-1].block_hash], "operator")
        stopped.records.pop()


def lose_lock(stopped: Stopped) -> None:
    (stopped.folder / "lock").unlink()


@pytest.mark.parametrize(
    ("change", "codes", "num_blocks"),
    few(
        [
            (lose_index, ["index_lost"], 0),
            (damage_pages, ["index_damaged"], 0),
            (leave_drafts, ["index_replaced", "index_draft"], 5),
            (leave_pending_extents, [], 4),
            (lose_index_folder, ["index_lost"], 0),
            (empty_index, ["index_lost"], 0),
            (cut_index, ["index_damaged"], 0),
            (damage_meta, ["index_damaged"], 0),
            (stop_the_machine, ["index_unflushed"], 0),
            (ask_for_rebuild, ["index_rebuild"], 5),
            (add_a_segment, ["segments"], 5),
            (turn_the_clock_back_a_little, [], 5),
            (lose_lock, [], 5),
        ],
        4,
    ),
)
def test_a_look_leaves_what_needs_repair_and_says_so(
    stopped: Stopped, change: Callable[[Stopped], None], codes: list[str], num_blocks: int
) -> None:
    change(stopped)
    answers = stopped.looked()
    assert [codes_of(answer) for answer in answers] == [codes] * len(answers)
    disk, verified = answers[0]["disk"], answers[-3]
    assert disk["blocks"] == num_blocks
    assert disk["bytes_files"] > 0
    assert (disk["bytes_pending"] > 0) == (change is leave_pending_extents)
    assert verified["repaired"] == 0
    is_bad = codes in (["index_damaged"], ["index_rebuild"])
    assert verified["by_reason"] == ({"index": 1} if is_bad else {})
    if codes == ["index_damaged"]:  # which a worker finds, and the next one repairs
        assert stopped.control().answer(Verify())["repaired"] == 1
    stopped.check_served()


def test_a_clock_that_is_behind_costs_no_block_that_was_only_looked_at(stopped: Stopped) -> None:
    turn_the_clock_back(stopped)
    df, ls, *others = stopped.looked()
    assert codes_of(df) == codes_of(ls) == ["clock"]
    assert (df["disk"]["blocks"], df["disk"]["num_expired"]) == (5, 5)
    assert ls["items"] == []
    assert [codes_of(answer) for answer in others] == [["clock"]] * len(others)
    stopped.offset.unlink()
    stopped.check_served()


def test_a_look_at_a_backup_costs_the_original_no_key(stopped: Stopped, tmp_path: Path) -> None:
    backup = tmp_path / "backup"
    shutil.copytree(stopped.folder, backup)
    later = [make_record("later", i, now=Clock().now() + 7200) for i in range(3)]
    with stopped.open() as store:  # the stamps of both folders differ from now on
        put(store, *later)
    stopped.folder.rename(original := tmp_path / "away")
    backup.rename(stopped.folder)
    before = stopped.seen()
    answers = [stopped.control().answer(Df()), whole(stopped.control().pages(Ls()))]
    assert stopped.seen() == before
    assert [codes_of(answer) for answer in answers] == [["copy"], ["copy"]]
    assert (answers[0]["disk"]["blocks"], answers[0]["disk"]["encryption"]) == (5, "no keys")
    stopped.folder.rename(backup)
    original.rename(stopped.folder)
    stopped.records += later
    stopped.check_served()


def test_both_damaged_headers_of_the_keys_are_told_and_left(stopped: Stopped) -> None:
    [table] = stopped.key_dir.glob("*.keys")
    for at in (0, 4096):
        change_bytes(table, at + 64, lambda _: b"\xff" * 64, 64)
    before = stopped.seen()
    df = stopped.control().answer(Df())
    assert (codes_of(df), df["disk"]["blocks"]) == (["keys_damaged"], 5)
    assert stopped.seen() == before


@pytest.mark.parametrize("version", [2, 4])
def test_another_version_is_refused_and_left_as_it_is(stopped: Stopped, version: int) -> None:
    (stopped.folder / "format.json").write_text(
        json.dumps({"format": "tieredkv-store", "version": version})
    )
    before = stopped.seen()
    with refused(FormatVersionError, hide={str(stopped.folder): "FOLDER"}):
        stopped.control().answer(Df())
    assert stopped.seen() == before


def test_nothing_is_proven_where_not_all_can_be_seen(stopped: Stopped) -> None:
    namespace = stopped.records[0].namespace.hex()
    assert not stopped.control().answer(Verify(erased_namespace=namespace))["erased"]
    lose_index(stopped)
    with refused(StorageError):
        stopped.control().answer(Verify(erased_namespace=namespace))


# --- where nothing can be written ---------------------------------------------------------------


def test_a_store_on_a_read_only_mount_is_looked_at(tmp_path: Path) -> None:
    try:
        with mounted(FILESYSTEMS["tmpfs"]) as disk:
            stopped = Stopped(disk)
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
            df, *_ = stopped.looked()
            assert (df["disk"]["blocks"], codes_of(df)) == (5, [])
    except CannotMountError as error:
        pytest.skip(str(error))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
def test_root_looks_as_the_owner_of_the_store(stopped: Stopped) -> None:
    facts = {"fingerprint": "ab" * 32, "dtype": "float32", "hash_algo": "sha256"}
    model = msgspec.convert({"name": "m", "block_size": 16, **facts}, KnownModel)
    note_model(stopped.folder, model)
    for path in (stopped.folder, *stopped.folder.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    stopped.folder.chmod(0o500)
    before = stopped.seen()
    df = stopped.control().answer(Df())
    assert (df["disk"]["blocks"], codes_of(df)) == (5, [])
    assert read_models(stopped.folder) == [model]
    with looking(stopped) as look:
        status = Path(f"/proc/{look.pid}/status").read_text().splitlines()
        ids = {line.split()[0]: line.split()[1:] for line in status if line.startswith(("U", "G"))}
        assert ids["Uid:"] == ids["Gid:"] == [str(NOBODY)] * 4
        assert "Groups:" not in status or ids["Groups:"] == []
    assert stopped.seen() == before


# --- beside a writer ------------------------------------------------------------------------------


@contextmanager
def looking(stopped: Stopped) -> Iterator[WorkerProcess]:
    """Start a look, and wait until it answers."""
    options = StoreOptions(path=str(stopped.folder), create=False, encryption="as_it_is")
    look = WorkerProcess(options, None, looks=True)
    try:
        messages = look.channel.receive(60.0)
        assert [type(message) for message in messages] == [Looking], messages
        yield look
    finally:
        look.kill()
        look.bury()


def test_several_look_at_once_and_give_way_to_a_writer(stopped: Stopped) -> None:
    with looking(stopped) as one, looking(stopped) as other, stopped.open() as store:
        assert store.stats().blocks == 5
        for look in (one, other):
            [last] = look.channel.receive(60.0)
            assert isinstance(last, Refused)
            assert isinstance(last.error, StoreBusyError)


def test_a_look_that_does_not_end_is_told_of_and_costs_nothing(stopped: Stopped) -> None:
    with looking(stopped) as look:
        os.kill(look.pid, signal.SIGSTOP)
        with refused(StoreBusyError):
            stopped.open()
        os.kill(look.pid, signal.SIGKILL)
        wait_until(lambda: not is_held(stopped.folder / "lock"), "the look holds its lock")
        stopped.check_served()


def is_held(path: Path) -> bool:
    """Return whether anybody holds the lock of a store."""
    with path.open("r+b") as file:
        try:
            lock_to_write(file.fileno())
        except BlockingIOError:
            return True
    return False


def test_a_writer_is_not_looked_at_and_one_that_waits_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    with path.open("rb") as looks, path.open("r+b") as writes, path.open("rb") as others:
        lock_to_look(looks.fileno())
        lock_to_look(others.fileno())
        assert not is_wanted(looks.fileno())
        with pytest.raises(BlockingIOError):
            lock_to_write(writes.fileno())
        assert not is_wanted(looks.fileno())
        looks.close()
        others.close()
        lock_to_write(writes.fileno())
        with path.open("rb") as late, pytest.raises(BlockingIOError):
            lock_to_look(late.fileno())


# --- the command line -----------------------------------------------------------------------------


@pytest.fixture
def keys_of(stopped: Stopped, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIEREDKV_DISK_KEY_DIR", str(stopped.key_dir))


@pytest.mark.parametrize(
    "words",
    few(
        [
            ["df"],
            ["verify", "--no-repair"],
            ["ls"],
            ["inspect"],
            ["evict", "--all", "--dry-run"],
            ["prune", "--dry-run"],
        ],
        2,
    ),
)
def test_the_exit_code_says_that_a_store_needs_repair(
    stopped: Stopped, keys_of: None, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if words == ["inspect"]:
        words = ["inspect", stopped.records[-1].block_hash.hex()]
    words = [*words, "--disk-dir", str(stopped.folder)]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["needs"] == []
    ask_for_rebuild(stopped)
    before = stopped.seen()
    assert main([*words, "--json"]) == 1
    [need] = json.loads(capsys.readouterr().out)["needs"]
    assert need["code"] == "index_rebuild"
    assert main(words) == 1
    printed = "".join(capsys.readouterr())
    assert f"needs repair: {need['text']}" in printed.splitlines()
    assert stopped.seen() == before


def test_doctor_tries_the_filesystem_beside_the_store(
    stopped: Stopped, keys_of: None, capsys: pytest.CaptureFixture[str]
) -> None:
    ask_for_rebuild(stopped)
    before, beside = stopped.seen(), sorted(stopped.base.iterdir())
    assert main(["doctor", "--disk-dir", str(stopped.folder), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert [need["code"] for need in document["needs"]] == ["index_rebuild"]
    checks = {check["name"]: check["status"] for check in document["checks"]}
    assert (checks["store"], checks["rename"], checks["flock"]) == ("fail", "ok", "ok")
    assert (stopped.seen(), sorted(stopped.base.iterdir())) == (before, beside)


@pytest.mark.parametrize("has_keys", [True, False])
def test_doctor_makes_no_file_in_a_folder_of_keys_or_of_another_user(
    has_keys: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, key_dir = tmp_path / "above" / "kv", tmp_path / ("above" if has_keys else "keys")
    open_store(folder, Clock(), encryption="on", key_dir=str(key_dir)).close()
    if not has_keys:
        os.chown(folder.parent, 12345, -1)
    before = folder.parent.stat().st_mtime_ns
    main(["doctor", "--disk-dir", str(folder), "--disk-key-dir", str(key_dir), "--json"])
    checks = {
        check["name"]: check["status"] for check in json.loads(capsys.readouterr().out)["checks"]
    }
    assert (checks["store"], checks["filesystem"]) == ("ok", "warn")
    assert folder.parent.stat().st_mtime_ns == before


def test_doctor_does_not_try_a_filesystem_that_the_store_fills(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TIEREDKV_DISK_KEY_DIR", str(tmp_path / "keys"))
    try:
        with mounted(FILESYSTEMS["tmpfs"]) as disk:
            disk.chmod(0o700)
            open_store(disk, Clock()).close()
            before = sorted(disk.rglob("*")), disk.stat().st_mtime_ns
            main(["doctor", "--disk-dir", str(disk), "--json"])
            assert (sorted(disk.rglob("*")), disk.stat().st_mtime_ns) == before
    except CannotMountError as error:
        pytest.skip(str(error))
    document = json.loads(capsys.readouterr().out)
    checks = {check["name"]: check["status"] for check in document["checks"]}
    assert (checks["store"], checks["filesystem"]) == ("ok", "warn")
    assert "rename" not in checks
