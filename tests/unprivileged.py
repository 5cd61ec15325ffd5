"""Files that may not be read: the rights of files also hold for root while `unprivileged` lasts."""

import contextlib
import ctypes
from collections.abc import Iterator

_VERSION = 0x20080522  # of capabilities in two words
_READING = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Give up the right of root to read everything, in this thread and those that it starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_VERSION, 0)
    # Two words each of effective, permitted and inheritable capabilities.
    words = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, words) == 0
    before = words[0]
    words[0] = before & ~_READING
    assert libc.capset(header, words) == 0
    try:
        yield
    finally:
        words[0] = before
        assert libc.capset(header, words) == 0
