"""What an error says about the store: the one place where damage is told from everything else.

The rule: **an index is condemned on evidence only.** Evidence is one of these, and nothing else:

- a page or an entry of the index that contradicts itself: a wrong magic number or a damaged meta
  page in a data file that holds something, pages that do not fit together, entries that cannot be
  decoded (`tieredkv.storage.index.pages`, `tieredkv.storage.index.entries`);
- LMDB's own codes for that (`_DAMAGE` below);
- SIGSEGV, SIGBUS or SIGABRT in a thread that was using the index, as the stack that the worker's
  fault handler left with its parent says (`tieredkv.storage.worker.process`). SIGBUS in pages that
  another program lends is none: that program can truncate its memory at any time.

A condemned index is renamed and made again from the headers of the extents, once; the segments are
never touched for it. An index that was made again and is condemned again before it has proved
itself stays as it is, and so does every file after every other error: the disk tier is off, its
cause is told, and the worker is started again and again with growing pauses.

An error that neither is evidence nor names a cause in the system (any other code of LMDB, an
exception that nobody foresaw, a crash outside the index) ends the worker. Its next start looks for
evidence by reading every page of the index before LMDB maps it.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import lmdb

from tieredkv.errors import (
    CorruptIndexError,
    FormatVersionError,
    StorageError,
    StoreFailedError,
    StoreFullError,
)
from tieredkv.storage.folder.filesystem import NO_SPACE
from tieredkv.wire.limits import described

_DAMAGE = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.BadChecksumError)
_FULL = (lmdb.MapFullError, lmdb.DiskError)
_SYSTEM = (  # the call failed for a reason outside the index, and may succeed later
    lmdb.ReadersFullError,  # too many threads of this process read at once
    lmdb.TlsFullError,
    lmdb.TxnFullError,
    lmdb.MapResizedError,  # another process made the file larger than the map
    lmdb.BadValsizeError,  # the key that was asked for is no key
    lmdb.ReadonlyError,  # EACCES
    lmdb.LockError,  # EAGAIN
    lmdb.MemoryError,  # ENOMEM
)


def _verdict_of(error: lmdb.Error) -> type[StorageError]:
    """Return what an error of LMDB is raised as.

    Sound pages and correct calls lead to none of the classes that no set names. Whether it is the
    pages, the next start finds out.
    """
    if isinstance(error, _DAMAGE):
        return CorruptIndexError
    if isinstance(error, lmdb.VersionMismatchError):
        return FormatVersionError
    # The class itself has an error number of the system; the binding's own errors have none.
    code: int = getattr(error, "code", 0) if type(error) is lmdb.Error else 0
    if isinstance(error, _FULL) or code in NO_SPACE:
        return StoreFullError
    return StorageError if isinstance(error, _SYSTEM) or code > 0 else StoreFailedError


@contextmanager
def storage_errors(path: str) -> Iterator[None]:
    """Turn what LMDB and the system raise into StorageError, path and cause kept."""
    try:
        yield
    except lmdb.Error as error:
        kind = _verdict_of(error)
        what = "has no room" if kind is StoreFullError else "failed"
        why = described(OSError(getattr(error, "code", 0), str(error)))
        raise kind(f"the index at `{path}` {what}: {why}") from error
    except StorageError:
        raise
    except OSError as error:
        code = error.errno or errno.EIO
        kind = StoreFullError if code in NO_SPACE else StorageError
        way_out = "; make room there" if code in (errno.ENOSPC, errno.EDQUOT) else ""
        raise kind(code, f"`{error.filename or path}`: {described(error)}{way_out}") from error


def is_of_memory(error: StorageError) -> bool:
    """Return whether the page of a block could not be reached, which is no fault of the disk."""
    return error.errno == errno.EFAULT
