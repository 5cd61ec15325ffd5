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
from typing import Any, TypeVar

from tieredkv.errors import TieredKVError

Result = TypeVar("Result")


def in_new_process(work: Callable[..., Result], *arguments: Any) -> Result:
    """Call `work` in a process of its own, which ends with the call.

    An interruption is passed on to that process as SIGTERM. If `work` answers all the same, its
    answer is returned; a second interruption kills it.

    Raises:
        KeyboardInterrupt: the call was interrupted before `work` could answer.
        TieredKVError: the process ended before it answered.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
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


@contextlib.contextmanager
def noting_interruptions() -> Iterator[threading.Event]:
    """Have Ctrl-C and SIGTERM only set the event that is returned; called by the main thread."""
    noted = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: noted.set())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
