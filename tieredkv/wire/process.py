"""Starts a process of this package, waits until it has ended, and describes its end."""

import logging
import signal
import socket
import subprocess
import sys
from typing import Self

import msgspec

from tieredkv.config import child_environment
from tieredkv.errors import TieredKVError, named

logger = logging.getLogger(__name__)


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The message with which a process says why it ends, or why it does not do what it was asked.

    Attributes:
        kind: name of an exception of `tieredkv.errors`; see `errors.named`.
        message: text of the exception.
    """

    kind: str
    message: str

    @classmethod
    def of(cls, error: TieredKVError) -> Self:
        """Return the message that tells the other side of an error."""
        return cls(type(error).__name__, str(error))

    @property
    def error(self) -> TieredKVError:
        """The exception, as if it were raised in this process."""
        return named(self.kind, self.message)


def start_process(
    module: str, *fds: int, stdout: int = subprocess.DEVNULL
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Run a module of this package in a session of its own, joined to this process by sockets.

    Args:
        module: name of the module; its one argument is the descriptor of its end of the pair.
        fds: further descriptors that the new process inherits.
        stdout: where the output of the new process goes.
    """
    ours, theirs = socket.socketpair()
    try:
        # NOTE: with -P a `random.py` in the current folder cannot shadow the standard library.
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


def describe_exit(returncode: int) -> str:
    """Return in words how a process ended."""
    if returncode < 0:
        return f"killed by {signal.Signals(-returncode).name}"
    return f"exit code {returncode}"
