"""Which files of keys are believed: by their owner, their mode, their kind and the way to them.

A file of keys, and the folder that holds it, belongs to this user or to root, and nobody else may
write to it. A key file is read by nobody else either, or by its group where root owns it. A link is
followed only where nobody else can have made it or can change where it leads, as Kubernetes mounts
Secrets. This module knows no key.
"""

import errno
import os
import stat
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from tieredkv.errors import MissingKeyError
from tieredkv.wire.limits import described

_MOST_LINKS = 40  # as many as Linux follows
_ALWAYS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITTEN_BY_OTHERS, _USED_BY_OTHERS, _USED_BUT_BY_READING_GROUP = 0o022, 0o077, 0o037


def open_file(path: str, what: str, flags: int = os.O_RDONLY, *, follows_link: bool) -> int:
    """Open a file of keys, if it is to be believed; the caller closes it.

    Args:
        path: of the file.
        what: what an error calls the file, such as `the key table`.
        flags: of the opening.
        follows_link: whether the file itself may be a link; a link to one of its folders may be
            followed in any case.

    Raises:
        MissingKeyError: the reason is `absent`, `unreadable` or `unsafe`; the last means that
            another user owns the file or a folder, may write there or may read the file, or that
            something else than a plain file with one name is in its place.
    """
    shown = f"{what} `{path}`"
    with _told(shown, writes=bool(flags & os.O_RDWR)):
        folder, name = _walk(path, shown, follows_link=follows_link)
        try:
            _check_folder(os.fstat(folder), os.path.dirname(os.path.abspath(path)))
            _check_file(os.stat(name, dir_fd=folder, follow_symlinks=False), path, shown)
            fd = os.open(name, flags | _ALWAYS, dir_fd=folder)
        finally:
            os.close(folder)
        try:
            _check_file(os.fstat(fd), path, shown)
        except BaseException:
            os.close(fd)
            raise
    return fd


def check_folder(path: str) -> None:
    """Refuse a folder of keys that is not to be believed.

    Raises:
        MissingKeyError: as `open_file` does.
    """
    shown = f"the folder of keys `{path}`"
    with _told(shown, "; set `disk_key_dir`"):
        folder, _ = _walk(os.path.join(path, "."), shown)
        try:
            _check_folder(os.fstat(folder), path)
        finally:
            os.close(folder)


@contextmanager
def _told(shown: str, way_out: str = "", *, writes: bool = False) -> Iterator[None]:
    """Turn errors of the system into MissingKeyError; `writes` says what the file is opened for."""
    try:
        yield
    except MissingKeyError:
        raise
    except FileNotFoundError as error:
        raise MissingKeyError(f"{shown} is missing{way_out}", reason="absent") from error
    except NotADirectoryError as error:
        text = f"{shown} is missing: a part of its path is no folder{way_out}"
        raise MissingKeyError(text, reason="absent") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            _refuse(shown, "is a link", "put the file itself there")
        text = f"{shown} cannot be {'written to' if writes else 'read'}: {described(error)}"
        if writes:
            text += "\nhint: let the account of the store write to the file and to its folder, or "
            text += "mount their filesystem writable"
        elif error.errno == errno.EACCES:
            text += "\nhint: run as the account of the store, or say where its keys are with "
            text += "`disk_key_dir` and `disk_master_key`"
        raise MissingKeyError(text, reason="unreadable") from error


def _walk(path: str, what: str, *, follows_link: bool = True) -> tuple[int, str]:
    """Follow a path as the kernel does, but links only where nobody else can change them.

    Returns a descriptor of the folder that holds the file in the end, which the caller closes, and
    the file's name there, which is no link unless `follows_link` is false.
    """
    if not os.path.isabs(path):
        path = os.path.join(os.getcwd(), path)
    parts = deque(part for part in path.split("/") if part)
    num_links = 0
    folder = _enter("/")
    try:
        while True:
            name = parts.popleft() if parts else "."
            info = os.stat(name, dir_fd=folder, follow_symlinks=False)
            is_link = stat.S_ISLNK(info.st_mode)
            if num_links or (is_link and (parts or follows_link)):
                _check_way(os.fstat(folder), info, what)
            if is_link and (parts or follows_link):
                num_links += 1
                if num_links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                target = os.readlink(name, dir_fd=folder)
                parts.extendleft(part for part in reversed(target.split("/")) if part)
                name = "/" if target.startswith("/") else "."
            elif not parts:
                return folder, name
            inner = _enter(name, folder)
            os.close(folder)
            folder = inner
    except BaseException:
        os.close(folder)
        raise


def _enter(name: str, folder: int | None = None) -> int:
    return os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)


def _check_way(folder: os.stat_result, entry: os.stat_result, what: str) -> None:
    """Refuse a step of a path with links if others can change where it leads.

    In a folder with the sticky bit others can make names, but change none that are not theirs.
    """
    others_write = folder.st_mode & _WRITTEN_BY_OTHERS and not folder.st_mode & stat.S_ISVTX
    if others_write or not (_is_trusted(folder) and _is_trusted(entry)):
        why = "is reached through a link that somebody else made or can change"
        _refuse(what, why, "give the path of the file itself")


def _check_folder(info: os.stat_result, path: str) -> None:
    what = f"the folder of keys `{path}`"
    if not _is_trusted(info):
        _refuse(what, _owned_by(info), "take another folder, or run as that user")
    if info.st_mode & _WRITTEN_BY_OTHERS:
        why = f"can be written to by others (mode {stat.S_IMODE(info.st_mode):04o})"
        _refuse(what, why, f"run `chmod go-w {path}`")


def _check_file(info: os.stat_result, path: str, what: str) -> None:
    if stat.S_ISLNK(info.st_mode):
        _refuse(what, "is a link", "put the file itself there")
    if not stat.S_ISREG(info.st_mode):
        _refuse(what, "is no plain file", "put one there")
    if not info.st_nlink:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    if info.st_nlink > 1:
        _refuse(what, f"has {info.st_nlink} names (hard links)", "remove the others")
    if not _is_trusted(info):
        _refuse(what, _owned_by(info), "run as that user, or put a file of your own there")
    forbidden = _USED_BUT_BY_READING_GROUP if info.st_uid == 0 else _USED_BY_OTHERS
    if info.st_mode & forbidden:
        why = f"is open to others (mode {stat.S_IMODE(info.st_mode):04o})"
        _refuse(what, why, f"run `chmod 600 {path}`")


def _is_trusted(info: os.stat_result) -> bool:
    return info.st_uid in (0, os.geteuid())


def _owned_by(info: os.stat_result) -> str:
    return f"belongs to user {info.st_uid}, neither to this user ({os.geteuid()}) nor to root"


def _refuse(what: str, why: str, way_out: str) -> NoReturn:
    raise MissingKeyError(f"{what} {why}; {way_out}", reason="unsafe")
