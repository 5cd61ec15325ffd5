"""What an error says about the store: the one place where damage is told from everything else.

The rule: **an index is condemned on evidence only.** Evidence is one of these, and nothing else:

- a page or an entry of the index that contradicts itself: a wrong magic number or a damaged meta
  page in a data file that holds something, pages that do not fit together, entries that cannot be
  decoded (`tieredkv.storage.index.pages`, `tieredkv.storage.index.entries`);
- LMDB's own codes for that (`Meaning.DAMAGE` below);
- SIGSEGV, SIGBUS or SIGABRT in a thread that was using the index, as the stack that the worker's
  fault handler left with its parent says (`tieredkv.storage.worker.process`). SIGBUS in pages that
  another program lends is none: that program can truncate its memory at any time.

A condemned index is renamed and made again from the headers of the extents, once; the segments are
never touched for it. An index that was made again and is condemned again before it has proved
itself stays as it is, and so does every file after every other error: the disk tier is off, its
cause is told, and the worker is started again and again with growing pauses.

An error that neither is evidence nor names a cause in the system (`Meaning.UNCLEAR`, an exception
that nobody foresaw, a crash outside the index) ends the worker. Its next start looks for evidence
by reading every page of the index before LMDB maps it.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

import lmdb

from tieredkv.errors import (
    CorruptIndexError,
    FormatVersionError,
    StorageError,
    StoreFailedError,
    StoreFullError,
)
from tieredkv.wire.limits import described


class Meaning(Enum):
    """What an error of LMDB or of the system says, with the class that it is raised as."""

    DAMAGE = CorruptIndexError
    """The index contradicts itself."""

    FULL = StoreFullError
    """There is no room; blocks give way or are not stored."""

    VERSION = FormatVersionError
    """Another version of LMDB is at work; nothing may be changed."""

    SYSTEM = StorageError
    """The call failed for a reason outside the index; it may succeed later."""

    UNCLEAR = StoreFailedError
    """LMDB could not go on and does not say why; the worker ends, and the next one looks."""


MEANINGS: dict[type[lmdb.Error], Meaning] = {
    lmdb.CorruptedError: Meaning.DAMAGE,
    lmdb.PageNotFoundError: Meaning.DAMAGE,
    lmdb.BadChecksumError: Meaning.DAMAGE,
    lmdb.MapFullError: Meaning.FULL,
    lmdb.DiskError: Meaning.FULL,
    lmdb.VersionMismatchError: Meaning.VERSION,
    lmdb.ReadersFullError: Meaning.SYSTEM,  # too many threads of this process read at once
    lmdb.TlsFullError: Meaning.SYSTEM,
    lmdb.TxnFullError: Meaning.SYSTEM,
    lmdb.MapResizedError: Meaning.SYSTEM,  # another process made the file larger than the map
    lmdb.BadValsizeError: Meaning.SYSTEM,  # the key that was asked for is no key
    lmdb.ReadonlyError: Meaning.SYSTEM,  # EACCES
    lmdb.LockError: Meaning.SYSTEM,  # EAGAIN
    lmdb.MemoryError: Meaning.SYSTEM,  # ENOMEM
    # Sound pages and correct calls lead to none of these; whether it is the pages, the next start
    # finds out.
    lmdb.InvalidParameterError: Meaning.UNCLEAR,  # EINVAL
    lmdb.PanicError: Meaning.UNCLEAR,  # a meta page could not be written: open the index again
    lmdb.InvalidError: Meaning.UNCLEAR,  # the root record of a database may be at fault
    lmdb.BadTxnError: Meaning.UNCLEAR,
    lmdb.BadRslotError: Meaning.UNCLEAR,
    lmdb.BadDbiError: Meaning.UNCLEAR,
    lmdb.CursorFullError: Meaning.UNCLEAR,
    lmdb.PageFullError: Meaning.UNCLEAR,
    lmdb.IncompatibleError: Meaning.UNCLEAR,
    lmdb.NotFoundError: Meaning.UNCLEAR,
    lmdb.KeyExistsError: Meaning.UNCLEAR,
    lmdb.DbsFullError: Meaning.UNCLEAR,
    lmdb.ProblemError: Meaning.UNCLEAR,
    lmdb.CryptoFailError: Meaning.UNCLEAR,
    lmdb.EnvEncryptionError: Meaning.UNCLEAR,
}
"""What each error class of LMDB says; `lmdb.Error` itself goes by its code."""

FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def meaning_of(error: lmdb.Error) -> Meaning:
    """Say what an error of LMDB means; one that no table names is unclear, never damage."""
    if (meaning := MEANINGS.get(type(error))) is not None:
        return meaning
    code: int = getattr(error, "code", 0)  # the binding's own errors have none
    return meaning_of_errno(code) if code > 0 else Meaning.UNCLEAR


def meaning_of_errno(code: int) -> Meaning:
    """Say what an error number of the system means: no room, or some cause outside the index."""
    return Meaning.FULL if code in FULL_ERRNOS else Meaning.SYSTEM


@contextmanager
def storage_errors(path: str) -> Iterator[None]:
    """Turn what LMDB and the system raise into StorageError, path and cause kept."""
    try:
        yield
    except lmdb.Error as error:
        meaning = meaning_of(error)
        what = "has no room" if meaning is Meaning.FULL else "failed"
        why = described(OSError(getattr(error, "code", 0), str(error)))
        raise meaning.value(f"the index at `{path}` {what}: {why}") from error
    except StorageError:
        raise
    except OSError as error:
        kind, code = meaning_of_errno(error.errno or errno.EIO).value, error.errno or errno.EIO
        raise kind(code, f"`{error.filename or path}`: {described(error)}") from error


def is_of_memory(error: StorageError) -> bool:
    """Return whether the page of a block could not be reached, which is no fault of the disk."""
    return error.errno == errno.EFAULT
