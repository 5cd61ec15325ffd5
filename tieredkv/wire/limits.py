"""Resource limits of this process that a store can exceed, with errors that name their values.

This module knows `ulimit`; it does not know what a store does or what the machine has.
"""

import contextlib
import errno
import os
import resource

from tieredkv.errors import StorageError
from tieredkv.units import format_bytes

_NAMES = {
    resource.RLIMIT_AS: "address space (`ulimit -v`)",
    resource.RLIMIT_FSIZE: "the size of a file (`ulimit -f`)",
    resource.RLIMIT_NOFILE: "open files (`ulimit -n`)",
    resource.RLIMIT_NPROC: "processes and threads (`ulimit -u`)",
}
_BEHIND = {
    errno.ENOMEM: resource.RLIMIT_AS,
    errno.EFBIG: resource.RLIMIT_FSIZE,
    errno.EMFILE: resource.RLIMIT_NOFILE,
    errno.EAGAIN: resource.RLIMIT_NPROC,
}


def described(error: OSError) -> str:
    """Return the system's text for an error, with the limit that caused it, if there is one."""
    text = error.strerror or str(error)
    limit = _BEHIND.get(error.errno or 0)
    if limit is None or (value := resource.getrlimit(limit)[0]) == resource.RLIM_INFINITY:
        return text
    shown = format_bytes(value) if limit in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE) else value
    return f"{text}: the limit of {_NAMES[limit]} is {shown}; raise it"


def raise_file_limit(wanted: int | None = None) -> int:
    """Let this process open more files, and return how many it may open then.

    Args:
        wanted: how many it needs; a lower limit is raised, a higher one stays. None raises the
            limit as far as it goes: a large store has hundreds of segments.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    aim = hard if wanted is None else min(wanted, hard)
    if soft < aim:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (aim, hard))
            return aim
    return soft


def forbid_core_files() -> None:
    """Have a crash of this process leave no core file, which would hold the keys in its memory.

    NOTE: the limit is one byte, since with a limit of 0 Linux still hands the memory to a program
    that collects core files, if there is one.
    """
    with contextlib.suppress(OSError, ValueError):  # the limit is 0, and may not be raised
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))


def check_address_space(what: str, map_bytes: int) -> None:
    """Raise an error if a map of `map_bytes` does not fit into the address space limit.

    Raises:
        StorageError: with both sizes.
    """
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    with open("/proc/self/statm") as file:
        used_bytes = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    if limit != resource.RLIM_INFINITY and used_bytes + map_bytes > limit:
        raise StorageError(
            f"{what} is mapped into {format_bytes(map_bytes)} of address space, but the limit of "
            f"{_NAMES[resource.RLIMIT_AS]} is {format_bytes(limit)}\n"
            f"hint: raise it to {format_bytes(2 * map_bytes)} or `unlimited`; the map takes no "
            "memory"
        )


def check_file_size(path: str, most_bytes: int) -> None:
    """Raise an error if files of `most_bytes` would exceed the limit of file size.

    Raises:
        StorageError: with both sizes.
    """
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and most_bytes > limit:
        raise StorageError(
            f"the files of `{path}` may become as large as {format_bytes(most_bytes)}, but the "
            f"limit of {_NAMES[resource.RLIMIT_FSIZE]} is {format_bytes(limit)}\n"
            "hint: raise it, or set a smaller `disk_size`"
        )
