"""Measuring in a process of its own, which an interruption ends.

Long work that has results on the way uses `noting_interruptions`, and returns what it has.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from typing import Any, NoReturn, TypeVar

from tieredkv.errors import TieredKVError

Result = TypeVar("Result")

_INTERRUPTIONS = (signal.SIGINT, signal.SIGTERM)


def in_new_process(work: Callable[..., Result], *arguments: Any) -> Result:
    """Call `work` in a process of its own, which ends with the call.

    An interruption is passed on to that process as SIGTERM, which unwinds `work` once, so that it
    ends the processes it has started before a folder they write to is removed. If `work` answers
    all the same, its answer is returned; a second interruption kills it.

    Raises:
        KeyboardInterrupt: the call was interrupted before `work` could answer.
        TieredKVError: the process ended before it answered.
    """
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=_unwind_once) as pool:
        job = pool.submit(work, *arguments)
        try:
            return job.result()
        except KeyboardInterrupt:
            for process in active_children():
                process.terminate()
            try:
                return job.result()
            except BrokenProcessPool:
                raise KeyboardInterrupt from None
            except KeyboardInterrupt:
                for process in active_children():
                    process.kill()
                raise
        except BrokenProcessPool as error:
            what = "a measuring process ended before it answered; see the log"
            raise TieredKVError(what) from error


def _unwind_once() -> None:
    """Have the first Ctrl-C or SIGTERM raise KeyboardInterrupt, and ignore the later ones.

    Ctrl-C in a terminal reaches this process by itself, and once more through the one that waits.
    """

    def unwind(*_: object) -> NoReturn:
        for number in _INTERRUPTIONS:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in _INTERRUPTIONS:
        signal.signal(number, unwind)


@contextlib.contextmanager
def noting_interruptions() -> Iterator[threading.Event]:
    """Have Ctrl-C and SIGTERM only set the event that is returned; called by the main thread."""
    noted = threading.Event()
    before = {number: signal.signal(number, lambda *_: noted.set()) for number in _INTERRUPTIONS}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
