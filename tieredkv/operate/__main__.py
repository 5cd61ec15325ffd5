"""Carries out one verb for a server, in a process of its own; see `tieredkv.operate.jobs`."""

import logging
import os
import signal
import sys

import msgspec

from tieredkv.errors import TieredKVError
from tieredkv.operate.jobs import Job
from tieredkv.wire.process import Refused

_NICE = 10
"""Requests go before what operators ask for."""


def main() -> int:
    """Read a job from standard input, and write its answer to standard output."""
    for number in (signal.SIGINT, signal.SIGPIPE):  # it ends without a word
        signal.signal(number, signal.SIG_DFL)
    logging.basicConfig(format="%(asctime)s operate %(process)d %(levelname)s: %(message)s")
    os.nice(_NICE)
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Job)
    out, head = sys.stdout.buffer, "null\n"
    try:
        for text in job.document():
            out.write((head + text).encode())
            out.flush()
            head = ""
    except TieredKVError as error:
        if head:
            out.write(msgspec.json.encode(Refused.of(error)) + b"\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
