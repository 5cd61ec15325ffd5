"""Start the store worker as a plain subprocess, and know for certain when it is dead.

It knows how the process is launched and buried, not what is said over its channel.
"""

import logging
import os
import signal
import socket
import subprocess
import sys

import msgspec

from tieredkv.config import child_environment
from tieredkv.storage.channel import FrameChannel
from tieredkv.storage.host import HostArena
from tieredkv.storage.worker_messages import Launch, SetAside, StoreOptions, WorkerMessage

EXIT_FAILED = 1
"""The worker cannot go on, for a reason that says nothing about the index."""

EXIT_REFUSED = 3
"""The worker told its channel why it will not serve this store."""

EXIT_DAMAGED = 4
"""The index contradicts itself, or something broke that nobody foresaw; like two crashes."""

_CRASH_SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
logger = logging.getLogger(__name__)
_decoder = msgspec.msgpack.Decoder(WorkerMessage)


def start_process(
    module: str, *fds: int, stdout: int = subprocess.DEVNULL
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Run a module of ours in a session of its own, joined to this process by a socket pair.

    Args:
        module: run with one argument, the descriptor of its end of the pair.
        fds: further descriptors that it inherits.
        stdout: where its output goes.
    """
    ours, theirs = socket.socketpair()
    try:
        # -P: a `random.py` in the current folder must not shadow the standard library.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            pass_fds=[theirs.fileno(), *fds],
            start_new_session=True,
            env=child_environment(),
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return process, ours


def bury(process: subprocess.Popen[bytes], grace_s: float) -> int:
    """Wait until a process is dead and reaped, and return its exit code; kill it if it lingers."""
    try:
        return process.wait(grace_s)
    except subprocess.TimeoutExpired:
        logger.error("process %d did not end in time and is killed", process.pid)
        process.kill()
        return process.wait()


class WorkerProcess:
    """One store worker and our end of its channel; used by one thread.

    Args:
        arena: the engine's; None for the command line, which has no tiers to be asked about.
        set_aside: what killed the worker before; see `Launch`.
    """

    def __init__(
        self, options: StoreOptions, arena: HostArena | None, *, set_aside: SetAside = ""
    ) -> None:
        fds = () if arena is None else (arena.fd,)
        # Ctrl-C in the terminal reaches the engine, which still has blocks to write; the worker
        # ends when its channel does.
        self._process, sock = start_process("tieredkv.storage.worker", *fds)
        self.channel = FrameChannel(sock, _decoder)
        self.channel.send(
            Launch(
                options=options,
                arena=None if arena is None else (arena.fd, arena.num_pages, arena.page_bytes),
                parent_pid=os.getpid(),
                set_aside=set_aside,
            )
        )
        self.pid = self._process.pid

    def kill(self) -> None:
        """Send SIGKILL; `bury()` still has to be called."""
        self._process.kill()

    def bury(self, grace_s: float = 2.0) -> int:
        """Wait until the process is dead and reaped; kill it after `grace_s`.

        NOTE: this may take as long as the kernel needs to end a stuck disk read. Only after it has
        returned can no byte of an arena page change any more by the worker's hand.
        """
        returncode = bury(self._process, grace_s)
        self.channel.close()
        return returncode


def is_crash(returncode: int) -> bool:
    """Whether this exit suggests that the index, not somebody's SIGKILL, ended the worker."""
    return returncode == EXIT_DAMAGED or -returncode in _CRASH_SIGNALS


def describe_exit(returncode: int) -> str:
    """Say in words how a worker ended."""
    if returncode < 0:
        return f"killed by {signal.Signals(-returncode).name}"
    return f"exit code {returncode}"
