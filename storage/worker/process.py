"""Start the store worker as a plain subprocess, wait until it has ended, and find out why it did.

This module knows how the process is launched and reaped, and what its end tells about the index. It
does not know what is sent over the channel.
"""

import os
import re
import signal
import socket
from typing import NamedTuple

import msgspec

from tieredkv.storage.messages.engine import IndexStart, Launch, WorkerMessage
from tieredkv.storage.options import StoreOptions
from tieredkv.wire.arena import HostArena
from tieredkv.wire.channel import FrameChannel
from tieredkv.wire.process import bury, describe_exit, start_process

EXIT_FAILED = 1
"""The worker told its channel why it cannot go on: a cause outside the index."""

EXIT_REFUSED = 3
"""The worker told its channel why it will not serve this store."""

EXIT_DAMAGED = 4
"""The index contradicts itself; the worker told its channel where."""

EXIT_UNEXPLAINED = 5
"""Something broke that nobody foresaw; the worker told its channel what."""

_EVIDENT_SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
_CRASH_SIGNALS = (*_EVIDENT_SIGNALS, signal.SIGILL, signal.SIGFPE)
_MAX_STACK_BYTES = 64 << 10
_INNERMOST_FRAME = re.compile(rb'most recent call first.*\n  File "(.*)", line (\d+) in (.*)')
_INDEX_MODULES = tuple(  # all that calls LMDB
    os.fsencode(os.path.join("storage", "index", name))
    for name in ("environment.py", "transaction.py")
)
_decoder = msgspec.msgpack.Decoder(WorkerMessage)


class WorkerEnd(NamedTuple):
    """How a worker ended.

    Attributes:
        is_damage: whether the end is evidence that the index is damaged.
        is_unexplained: whether the end shows neither damage nor another cause.
        text: how the worker ended, in words.
    """

    is_damage: bool
    is_unexplained: bool
    text: str


class WorkerProcess:
    """One store worker and our end of its channel; used by one thread.

    Args:
        arena: the engine's arena; None if the command line starts the worker.
        index: what the worker does with the index before it opens it; see `Launch`.
        looks: whether the worker only looks at the store, for one verb.

    Attributes:
        answers: where a worker that only looks answers the verb; None for another worker.
    """

    def __init__(
        self,
        options: StoreOptions,
        arena: HostArena | None,
        *,
        index: IndexStart = "as_it_is",
        looks: bool = False,
    ) -> None:
        pages = None
        if arena is not None:
            pages = (arena.fd, arena.num_pages, arena.page_bytes, arena.is_adopted)
        self._has_adopted = arena is not None and arena.is_adopted
        self._stack_fd = os.memfd_create("tieredkv-stack", os.MFD_CLOEXEC)
        self.answers: socket.socket | None = None
        theirs: socket.socket | None = None
        if looks:
            self.answers, theirs = socket.socketpair()
        launch = Launch(
            options=options,
            arena=pages,
            parent_pid=os.getpid(),
            index=index,
            stack_fd=self._stack_fd,
            look_fd=None if theirs is None else theirs.fileno(),
        )
        fds = (self._stack_fd, None if arena is None else arena.fd, launch.look_fd)
        try:
            # Ctrl-C in the terminal reaches only the engine, which still has blocks to write. The
            # worker ends when its channel is closed.
            self._process, sock = start_process(
                "tieredkv.storage.worker", *(fd for fd in fds if fd is not None)
            )
        except BaseException:
            os.close(self._stack_fd)
            raise
        finally:
            if theirs is not None:
                theirs.close()
        self.channel = FrameChannel(sock, _decoder)
        self.channel.send(launch)
        self.pid = self._process.pid

    def kill(self) -> None:
        """Send SIGKILL; `bury()` still has to be called."""
        self._process.kill()

    def bury(self, grace_s: float = 2.0) -> WorkerEnd:
        """Wait until the process is dead and reaped; kill it after `grace_s`. Call it once.

        NOTE: this may take as long as the kernel needs to end a stuck disk read. Until it has
        returned, the worker may still change the bytes of an arena page.
        """
        if self.answers is not None:
            self.answers.close()  # which ends a worker that only looks
        returncode = bury(self._process, grace_s)
        self.channel.close()
        stack = os.pread(self._stack_fd, _MAX_STACK_BYTES, 0)
        os.close(self._stack_fd)
        return judge_end(returncode, stack, has_adopted=self._has_adopted)


def judge_end(returncode: int, stack: bytes, *, has_adopted: bool = False) -> WorkerEnd:
    """Judge the end of a worker by its exit code and by the stack that a crash left.

    Args:
        returncode: the exit code; negative for a signal.
        stack: what the worker's fault handler wrote.
        has_adopted: whether another program owns the worker's pages. A SIGBUS outside the index is
            then explained: that program took its memory away.
    """
    if returncode >= 0:
        known = (0, EXIT_FAILED, EXIT_REFUSED, EXIT_DAMAGED)
        is_damage = returncode == EXIT_DAMAGED
        return WorkerEnd(is_damage, returncode not in known, describe_exit(returncode))
    text = describe_exit(returncode)
    if (found := _INNERMOST_FRAME.search(stack)) is None:
        return WorkerEnd(False, -returncode in _CRASH_SIGNALS, text)
    file, line, function = found.groups()
    is_damage = -returncode in _EVIDENT_SIGNALS and file.endswith(_INDEX_MODULES)
    where = f"{os.path.basename(os.fsdecode(file))}:{int(line)}, {os.fsdecode(function)}"
    if has_adopted and returncode == -signal.SIGBUS and not is_damage:
        why = "the memory that another program lends is gone"
        return WorkerEnd(False, False, f"{text} in {where}: {why}")
    return WorkerEnd(is_damage, not is_damage, f"{text} in {where}")
