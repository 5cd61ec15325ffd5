"""Measuring in a process of its own, which an interruption ends.

Long work that has results on the way uses `noting_interruptions`, and returns what it has.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NoReturn, TypeVar

from tieredkv.errors import TieredKVError
from tieredkv.interruptions import repeat_dropped_interruptions
from tieredkv.wire.process import Refused, bury, start_process

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_INTERRUPTIONS = (signal.SIGINT, signal.SIGTERM)
GRACE_S = 30.0  # for interrupted work, which closes an engine and may have an answer


def in_new_process(work: Callable[..., Result], *arguments: Any) -> Result:
    """Call `work` in a process of its own, which ends with the call.

    An interruption is passed on to that process as SIGTERM, which unwinds `work` once, so that it
    ends the processes it has started before a folder they write to is removed. If `work` answers
    all the same, its answer is returned. The process is killed if it takes longer than `GRACE_S`,
    or at a second interruption; a store's worker that it has started then ends by itself.

    Args:
        work: a function of a module that can be imported; its result can be pickled.
        arguments: its arguments, which can be pickled.

    Raises:
        KeyboardInterrupt: the call was interrupted before `work` could answer.
        TieredKVError: `work` raised it, or the process ended before it answered.
    """
    # In a session of its own: an interruption of all processes of this group does not reach it.
    process, sock = start_process("tieredkv.bench.processes")
    is_interrupted = False
    with Connection(sock.detach()) as connection:
        try:
            connection.send((work, arguments))
            try:
                connection.poll(None)
            except KeyboardInterrupt:
                is_interrupted = True
                process.terminate()
                if not connection.poll(GRACE_S):
                    logger.warning("process %d does not end and is killed", process.pid)
                    raise
            with noting_interruptions() as noted:
                answer = connection.recv()
                bury(process, grace_s=2.0)
        except (EOFError, ConnectionError) as error:
            if is_interrupted:
                raise KeyboardInterrupt from None
            what = "a measuring process ended before it answered; see the log"
            raise TieredKVError(what) from error
        finally:
            with noting_interruptions():
                process.kill()
                process.wait()
    if noted.is_set():
        raise KeyboardInterrupt
    if isinstance(answer, Refused):
        raise answer.error
    result: Result = answer
    return result


def main(fd: int) -> int:
    """Do the work that arrives at a socket, and send its result; in the new process."""
    connection = Connection(fd)
    try:
        work, arguments = connection.recv()  # until it is here, SIGTERM ends this process at once
        _unwind_once()
        threading.Thread(target=_end_with, args=[connection], daemon=True).start()
        try:
            answer = work(*arguments)
        except TieredKVError as error:
            answer = Refused.of(error)
        connection.send(answer)
    except (KeyboardInterrupt, EOFError, ConnectionError):
        return 1
    except Exception as error:
        if not isinstance(error.__cause__, KeyboardInterrupt):  # while a class was made
            logger.exception("measuring failed")
        return 1
    return 0


def _end_with(connection: Connection) -> NoReturn:
    """End this process if the one that waits for its answer ends."""
    connection.poll(None)
    os._exit(1)


def _unwind_once() -> None:
    """Have the first Ctrl-C or SIGTERM raise KeyboardInterrupt, and ignore the later ones."""

    def unwind(*_: object) -> NoReturn:
        for number in _INTERRUPTIONS:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in _INTERRUPTIONS:
        signal.signal(number, unwind)
    repeat_dropped_interruptions()


def cut_short(num_done: int, num_all: int, what: str) -> list[str]:
    """Return a bench's problem if an interruption has ended it before all of something was done."""
    return [f"interrupted after {num_done} of {num_all} {what}"] if num_done < num_all else []


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


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    sys.stderr.flush()
    os._exit(code)  # quicker than taking apart what torch has loaded
