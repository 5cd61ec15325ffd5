"""Where a master key comes from, and which files of keys are believed."""

import base64
import errno
import os
import stat
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.golden import refused
from tests.storage.cuts import cut_short, failing
from tests.storage.key_tables import MASTER, OTHER, reason_of
from tests.unprivileged import unprivileged
from tieredkv.errors import MissingKeyError
from tieredkv.storage.keys import master, trust

STRANGER = 12345

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.fixture
def file(key_dir: Path) -> Path:
    """A master key, as 64 hexadecimal digits."""
    return write(key_dir / "key")


def write(path: Path, data: bytes = MASTER.hex().encode(), mode: int = 0o600) -> Path:
    path.write_bytes(data)
    path.chmod(mode)
    return path


def as_user(uid: int) -> AbstractContextManager[object]:
    """Take this process for another user's; root can read every file all the same."""
    return patch.object(os, "geteuid", lambda: uid)


def reason(path: Path) -> str:
    return reason_of(master.read_file, str(path))


# --- what a key is --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [MASTER, MASTER.hex().encode() + b"\n", base64.b64encode(MASTER), b"\n" * 32]
)
def test_a_master_key_is_read_in_each_form(file: Path, data: bytes) -> None:
    write(file, data)
    assert master.read_file(str(file)) == (data if len(data) == 32 else MASTER)


@pytest.mark.parametrize(
    "data",
    [b"", MASTER[:-1], MASTER.hex().encode()[:-2], b"z" * 64, b"z" * 44, b"A" * 44, bytes(5000)],
)
def test_a_file_that_holds_no_key_is_refused(file: Path, data: bytes) -> None:
    write(file, data)
    assert reason(file) == "no key"


def test_a_new_master_key_is_closed_to_others_and_overwrites_nothing(key_dir: Path) -> None:
    file = key_dir / "key"
    key = master.make_file(str(file))
    assert master.read_file(str(file)) == key
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with pytest.raises(MissingKeyError):
        master.make_file(str(file))
    assert master.read_file(str(file)) == key


def test_a_master_key_that_could_not_be_written_leaves_no_file(key_dir: Path) -> None:
    for after in (0, 1):  # the file, the folder
        with failing("fsync", errno.ENOSPC, after=after), pytest.raises(MissingKeyError):
            master.make_file(str(key_dir / "key"))
        assert not list(key_dir.iterdir())


def test_each_cut_of_the_making_of_a_key_leaves_none_or_a_whole_one_or_none_that_is_read(
    key_dir: Path, tmp_path: Path
) -> None:
    left = cut_short(key_dir, tmp_path / "copies", lambda: master.make_file(str(key_dir / "key")))
    key = master.read_file(str(key_dir / "key"))
    for folder, what, _ in left:
        if (folder / "key").exists():
            try:
                assert master.read_file(str(folder / "key")) == key, what
            except MissingKeyError as error:
                assert error.reason == "no key", what


def test_a_command_prints_the_master_key() -> None:
    assert master.ask_command(f"echo {MASTER.hex()}") == MASTER


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("false", "unreadable"),
        ("/nowhere/kms get", "unreadable"),
        ("echo 'x", "unreadable"),
        ("", "unreadable"),
        ("echo short", "no key"),
    ],
)
def test_a_command_that_prints_no_key_is_refused(command: str, why: str) -> None:
    assert reason_of(master.ask_command, command) == why


# --- whose it is, and who may use it --------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o700])
def test_a_key_that_only_its_owner_can_use_is_read(file: Path, mode: int) -> None:
    file.chmod(mode)
    assert master.read_file(str(file)) == MASTER


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o601, 0o620, 0o660, 0o444])
def test_a_key_that_others_can_use_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    assert reason(file) == "unsafe"


@needs_root
def test_a_group_may_read_a_key_of_root_and_no_other_key(file: Path) -> None:
    file.chmod(0o440)
    assert master.read_file(str(file)) == MASTER
    with as_user(STRANGER):
        assert master.read_file(str(file)) == MASTER
    os.chown(file.parent, STRANGER, -1)
    os.chown(file, STRANGER, -1)
    with as_user(STRANGER):
        assert reason(file) == "unsafe"
        file.chmod(0o400)
        assert master.read_file(str(file)) == MASTER
    assert reason(file) == "unsafe"  # now it is a stranger's, as after `sudo`


@needs_root
def test_a_key_of_another_user_is_refused(file: Path) -> None:
    os.chown(file, STRANGER, -1)
    assert reason(file) == "unsafe"


@needs_root
def test_a_key_in_a_folder_of_another_user_is_refused(file: Path) -> None:
    os.chown(file.parent, STRANGER, -1)
    assert reason(file) == "unsafe"
    assert reason_of(trust.check_folder, str(file.parent)) == "unsafe"
    assert reason_of(master.make_file, str(file) + ".new") == "unsafe"


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o1777])
def test_a_key_in_a_folder_that_others_can_write_to_is_refused(file: Path, mode: int) -> None:
    file.parent.chmod(mode)
    assert reason(file) == "unsafe"
    assert reason_of(trust.check_folder, str(file.parent)) == "unsafe"
    assert reason_of(master.make_file, str(file) + ".new") == "unsafe"


def test_a_new_key_without_a_place_and_an_empty_command_are_told_with_the_way_out(
    file: Path,
) -> None:
    with refused(MissingKeyError, reason="absent"):
        master.make_file(str(file.parent / "gone" / "key"))
    for command in ("", "  "):
        with refused(MissingKeyError, reason="unreadable"):
            master.ask_command(command)
    with refused(MissingKeyError, reason="unsafe"):
        master.read_file(str(file.parent))


def test_what_is_not_there_or_cannot_be_read_is_told_apart(file: Path) -> None:
    assert reason(file.with_name("gone")) == "absent"
    assert reason(file / "beneath") == "absent"
    assert reason_of(trust.check_folder, str(file.parent / "gone")) == "absent"
    assert reason_of(trust.check_folder, str(file)) == "absent"
    file.chmod(0)
    with unprivileged(), refused(MissingKeyError, reason="unreadable"):
        master.read_file(str(file))
    file.chmod(0o600)
    file.parent.chmod(0)
    with unprivileged():
        assert reason(file) == "unreadable"
    file.parent.chmod(0o700)
    with failing("read", errno.EIO):
        assert reason(file) == "unreadable"


def test_nothing_but_a_plain_file_with_one_name_is_taken_for_a_key(file: Path) -> None:
    (file.parent / "second").hardlink_to(file)
    assert reason(file) == "unsafe"
    file.unlink()
    os.mkfifo(file, 0o600)
    assert reason(file) == "unsafe"
    file.unlink()
    file.mkdir(0o700)
    assert reason(file) == "unsafe"
    file.rmdir()
    file.symlink_to("/dev/zero")
    assert reason(file) == "unsafe"


# --- links ----------------------------------------------------------------------------------------


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A key as Kubernetes mounts a Secret: two links lead to the folder of the present version."""
    mount = tmp_path / "mount"
    version = mount / "..2026_11_28"
    version.mkdir(parents=True)
    mount.chmod(0o1777)
    write(version / "master", mode=0o400)
    (mount / "..data").symlink_to(version.name)
    (mount / "master").symlink_to("..data/master")
    return mount / "master"


def test_a_secret_of_kubernetes_is_read_through_its_links(secret: Path) -> None:
    assert master.read_file(str(secret)) == MASTER
    newer = secret.parent / "..2026_11_29"
    newer.mkdir()
    write(newer / "master", OTHER, mode=0o400)
    os.symlink(newer.name, secret.parent / "draft")
    os.rename(secret.parent / "draft", secret.parent / "..data")
    assert master.read_file(str(secret)) == OTHER


def test_a_link_in_a_folder_whose_links_others_can_change_is_refused(secret: Path) -> None:
    secret.parent.chmod(0o777)
    assert reason(secret) == "unsafe"
    secret.parent.chmod(0o755)
    assert master.read_file(str(secret)) == MASTER


def test_a_link_to_a_folder_that_others_can_write_to_is_refused(secret: Path) -> None:
    (secret.parent / "..2026_11_28").chmod(0o777)
    assert reason(secret) == "unsafe"


def test_a_link_that_leads_through_a_folder_that_others_can_write_to_is_refused(
    file: Path, tmp_path: Path
) -> None:
    way = tmp_path / "way"
    inner = way / "inner"
    inner.mkdir(parents=True)
    write(inner / "key")
    file.unlink()
    for target in (inner / "key", Path("../way/inner/key"), Path("../way/inner/../inner/key")):
        file.unlink(missing_ok=True)
        file.symlink_to(target)
        way.chmod(0o755)
        assert master.read_file(str(file)) == MASTER
        way.chmod(0o777)
        assert reason(file) == "unsafe"


def test_a_link_to_a_folder_of_keys_is_followed_by_the_same_rule(
    file: Path, tmp_path: Path
) -> None:
    link = tmp_path / "links" / "keys"
    link.parent.mkdir(0o700)
    link.symlink_to(file.parent)
    assert master.read_file(str(link / "key")) == MASTER
    trust.check_folder(str(link))
    link.parent.chmod(0o777)
    assert reason(link / "key") == "unsafe"
    assert reason_of(trust.check_folder, str(link)) == "unsafe"


@needs_root
@pytest.mark.parametrize("what", ["link", "folder of the link", "folder"])
def test_a_link_on_whose_way_something_is_another_users_is_refused(secret: Path, what: str) -> None:
    place = {
        "link": secret,
        "folder of the link": secret.parent,
        "folder": secret.parent / "..2026_11_28",
    }[what]
    os.chown(place, STRANGER, -1, follow_symlinks=False)
    assert reason(secret) == "unsafe"


def test_links_that_lead_in_a_circle_or_nowhere_are_refused(file: Path) -> None:
    circle = file.parent / "circle"
    circle.symlink_to("circle")
    assert reason(circle) == "unsafe"
    nowhere = file.parent / "nowhere"
    nowhere.symlink_to("gone/key")
    assert reason(nowhere) == "absent"


def test_a_relative_path_counts_from_the_present_folder(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent.parent)
    assert master.read_file(f"{file.parent.name}/../{file.parent.name}/key") == MASTER
    gone = file.parent / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert master.read_file(str(file)) == MASTER


def test_no_descriptor_is_left_open(file: Path, secret: Path) -> None:
    def num_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = num_open()
    reads: list[Callable[[], object]] = [
        lambda: master.read_file(str(file)),
        lambda: master.read_file(str(secret)),
        lambda: reason(file.parent / "gone" / "key"),
        lambda: reason(file.parent),
        lambda: trust.check_folder(str(file.parent)),
    ]
    for read in reads:
        read()
        assert num_open() == before
