"""Files in the folder of a store, opened so that nobody who can write to it misleads their reader.

Such a folder may lie on a volume that others can write to. So whatever is opened there must be a
regular file of this user with one name: a link, a FIFO or a second name of another file is refused.
This module knows how files are opened; it does not know what is in them.
"""

import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tieredkv.errors import StorageError

_SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
DRAFT_SUFFIX = ".tmp"


def open_own(
    path: str, flags: int = os.O_RDONLY, *, dir_fd: int | None = None, owner: int | None = None
) -> int:
    """Open a file of the store's folder; nothing is followed or truncated, and nothing waits.

    Args:
        path: the file.
        dir_fd: the folder that `path` is in, unless that is absolute.
        flags: of `os.open`. With `O_CREAT` the file is closed to others.
        owner: the user whom it must belong to; None for this one.

    Raises:
        StorageError: it is no regular file, has another name as well, or belongs to another user.
        OSError: it cannot be opened.
    """
    assert not flags & os.O_TRUNC, "a file is truncated after it was looked at"
    found, shown = None, path
    if dir_fd is not None:
        shown = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), path)
    with suppress(FileNotFoundError):
        found = os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
    if found is not None:
        check_own(shown, found, owner)
    try:
        fd = os.open(path, flags | _SAFELY, 0o600, dir_fd=dir_fd)
    except OSError as error:
        error.filename = shown
        raise
    try:
        check_own(shown, os.fstat(fd), owner)  # it may have been replaced meanwhile
        if flags & os.O_CREAT:
            os.fchmod(fd, 0o600)  # the umask may have taken more
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_own(path: str, info: os.stat_result, owner: int | None = None) -> None:
    """Refuse what is no regular file of this user with one name, or what others can write to.

    Raises:
        StorageError: names what it is.
    """
    if not stat.S_ISREG(info.st_mode):
        raise StorageError(f"`{path}` must be a regular file, and no symbolic link; remove it")
    if info.st_nlink > 1:
        what = f"`{path}` has {info.st_nlink} names, so a change of it would change another file"
        raise StorageError(f"{what}; put a copy in its place")
    check_owner(path, info, owner)


def check_owner(path: str, info: os.stat_result, owner: int | None = None) -> None:
    """Refuse a file or folder of another user than this one, or `owner`, or that others can change.

    Raises:
        StorageError: names the user or the mode.
    """
    if info.st_uid != (os.geteuid() if owner is None else owner):
        raise StorageError(
            f"`{path}` belongs to uid {info.st_uid}, but this process runs as {os.geteuid()}; "
            "run as that user, `chown` it or choose another folder"
        )
    if info.st_mode & 0o022:
        mode = f"{stat.S_IMODE(info.st_mode):04o}"
        raise StorageError(f"`{path}` is writable by others (mode {mode}); run `chmod go-w {path}`")


def read_own(
    path: str, most_bytes: int, *, dir_fd: int | None = None, owner: int | None = None
) -> bytes:
    """Read a file of the store's folder; of a longer one, one byte more than `most_bytes`.

    Raises:
        StorageError, OSError: as `open_own`.
    """
    with open(open_own(path, dir_fd=dir_fd, owner=owner), "rb") as file:
        return file.read(most_bytes + 1)


def replace_own(path: str, data: bytes, *, dir_fd: int | None = None) -> None:
    """Write a file of the store's folder whole, and have it take the place of the old one at once.

    Raises:
        OSError: it cannot be written; the old file is there.
    """
    draft = path + DRAFT_SUFFIX
    with suppress(FileNotFoundError):
        remove(draft, dir_fd=dir_fd)
    with open(open_own(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd=dir_fd), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.rename(draft, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    if dir_fd is None:
        flush_folder(os.path.dirname(path))
    else:
        os.fsync(dir_fd)


def remove(path: str, *, dir_fd: int | None = None) -> None:
    """Remove whatever has a name in the store's folder, and all that is in it; follow nothing.

    Folders may lie in each other as deep as they like: each is emptied into the one above it.

    Raises:
        OSError: there is nothing, or it cannot be removed.
    """
    if not _is_folder(path, dir_fd):
        return os.unlink(path, dir_fd=dir_fd)
    with opened_folder(path, dir_fd) as fd:
        while names := os.listdir(fd):
            for name in names:
                if not _is_folder(name, fd):
                    os.unlink(name, dir_fd=fd)
                    continue
                with opened_folder(name, fd) as inner_fd:
                    for inner in os.listdir(inner_fd):
                        os.rename(inner, secrets.token_hex(16), src_dir_fd=inner_fd, dst_dir_fd=fd)
                os.rmdir(name, dir_fd=fd)
    return os.rmdir(path, dir_fd=dir_fd)


def _is_folder(path: str, dir_fd: int | None) -> bool:
    return stat.S_ISDIR(os.stat(path, dir_fd=dir_fd, follow_symlinks=False).st_mode)


@contextmanager
def opened_folder(path: str, dir_fd: int | None = None) -> Iterator[int]:
    """Open a folder; a link in its place is an error.

    Raises:
        OSError: it cannot be opened.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def erase_all(folder: str, names: re.Pattern[str]) -> int:
    """Truncate and remove the files of a folder that are named so; return what they occupied.

    What has such a name and is no file of ours is removed by its name only.

    Raises:
        OSError: the folder cannot be opened, or a file cannot be removed.
    """
    num_bytes = 0
    with opened_folder(folder) as folder_fd:
        for name in filter(names.fullmatch, os.listdir(folder_fd)):
            try:
                with (
                    suppress(StorageError),
                    open(open_own(name, os.O_RDWR, dir_fd=folder_fd), "rb+") as file,
                ):
                    num_bytes += os.fstat(file.fileno()).st_blocks * 512
                    file.truncate(0)
                remove(name, dir_fd=folder_fd)
            except OSError as error:
                error.filename = os.path.join(folder, name)
                raise
        os.fsync(folder_fd)
    return num_bytes


def flush_folder(path: str) -> None:
    """Flush the names of a folder to the device, so that a change of them survives a power loss."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
