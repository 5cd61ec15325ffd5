"""Lets lookups go before what operators ask for.

Python runs one thread at a time. A lookup of hundreds of blocks gives the interpreter away and asks
for it again at each of them, so a thread that never rests makes it wait that often. Long work is
therefore done in short steps, and none of them begins while the front thread is at work.
"""

import time

from tieredkv.storage.worker.loop import Loop

_PATIENCE_S = 0.003  # beside a thread that is never idle, work goes on after this time
_POLL_S = 0.0005


def give_way(front: Loop) -> None:
    """Wait until the front thread is idle, but not for ever; any other thread may call this."""
    deadline = time.monotonic() + _PATIENCE_S
    while front.is_busy and time.monotonic() < deadline:
        time.sleep(_POLL_S)
