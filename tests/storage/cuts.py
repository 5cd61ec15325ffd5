"""What a crash or a power loss leaves of a folder, at each step of a change of its files."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

_WRITING = ("pwrite", "write", "ftruncate")
_FLUSHING = ("fsync", "fdatasync")
_NAMING = ("rename", "unlink")


class Left(NamedTuple):
    """One folder that a cut has left.

    Attributes:
        folder: the copy.
        what: the step before which the process was killed, or how the power was lost.
        is_torn: whether a write was done in part.
    """

    folder: Path
    what: str
    is_torn: bool


def cut_short(folder: Path, copies: Path, change: Callable[[], object]) -> list[Left]:
    """Change a folder; return what each cut of it would leave, the finished change as the last.

    Before each system call that changes a file there are three cuts: a kill; a kill in the middle
    of a write; and a power loss that takes what was not flushed, all of it or all but the last
    write. Renaming counts as flushed.
    """
    left: list[Left] = []
    flushed = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def keep(what: str, contents: dict[Path, bytes], *, is_torn: bool = False) -> None:
        copy = copies / f"{len(left):03}"
        shutil.copytree(folder, copy)
        for path, data in contents.items():
            (copy / path.relative_to(folder)).write_bytes(data)
        left.append(Left(copy, what, is_torn))

    def path_of(fd: int) -> Path:
        return Path(os.readlink(f"/proc/self/fd/{fd}"))

    def written(contents: bytes, data: bytes, at: int) -> bytes:
        return contents[:at].ljust(at, b"\0") + data + contents[at + len(data) :]

    def before_write(fd: int, data: bytes, at: int) -> None:
        path = path_of(fd)
        now = path.read_bytes()
        for size in (len(data) // 2, max(len(data) - 20, 0)):
            part = written(now, bytes(data[:size]), at)
            keep(f"torn write of {len(data)} at {at}", {path: part}, is_torn=True)
        last = written(flushed.get(path, b""), bytes(data), at)
        keep(f"power loss, but for the write of {len(data)} at {at}", {path: last})

    def spied(name: str) -> Callable[..., object]:
        call = getattr(os, name)

        def spy(*args: object, **options: object) -> object:
            place = path_of(args[0]) if isinstance(args[0], int) else Path(str(args[0]))
            is_inside = place.is_relative_to(folder) and place.exists()
            if is_inside:
                keep(f"kill before {name}", {})
                files = [path for path in folder.rglob("*") if path.is_file()]
                keep(f"power loss before {name}", {each: flushed.get(each, b"") for each in files})
                if name == "pwrite":
                    before_write(*args)  # type: ignore[arg-type]
            result = call(*args, **options)
            if name in _FLUSHING and isinstance(args[0], int) and path_of(args[0]).is_file():
                flushed[path_of(args[0])] = path_of(args[0]).read_bytes()
            if name == "rename":
                flushed[Path(str(args[1]))] = flushed.pop(Path(str(args[0])), b"")
            return result

        return spy

    spies: dict[str, Any] = {name: spied(name) for name in (*_WRITING, *_FLUSHING, *_NAMING)}
    with patch.multiple(os, **spies):
        change()
    keep("finished", {})
    return left


@contextmanager
def failing(name: str, error: int, *, after: int = 0) -> Iterator[None]:
    """Have one system call of `os` fail, from the call after so many on."""
    call, num_calls = getattr(os, name), 0

    def fail(*args: object) -> object:
        nonlocal num_calls
        num_calls += 1
        if num_calls > after:
            raise OSError(error, os.strerror(error))
        return call(*args)

    with patch.object(os, name, fail):
        yield


@contextmanager
def unflushed() -> Iterator[None]:
    """Flush nothing to the device, for tests that only read what they wrote."""
    with patch.multiple(os, fsync=lambda _: None, fdatasync=lambda _: None):
        yield
