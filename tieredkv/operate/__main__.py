"""Carries out one verb for a server, in a process of its own; see `tieredkv.operate.jobs`."""

import logging
import os
import signal
import sys

import msgspec

from tieredkv.errors import TieredKVError
from tieredkv.operate.jobs import Head, decoder

_NICE = 10
"""Requests go before what operators ask for."""


def main() -> int:
    """Read a job from standard input, and write its answer to standard output."""
    for number in (signal.SIGINT, signal.SIGPIPE):  # it ends without a word
        signal.signal(number, signal.SIG_DFL)
    logging.basicConfig(format="%(asctime)s operate %(process)d %(levelname)s: %(message)s")
    os.nice(_NICE)
    job, out, is_begun = decoder.decode(sys.stdin.buffer.read()), sys.stdout.buffer, False
    try:
        for text in job.document():
            head = b"" if is_begun else msgspec.json.encode(Head()) + b"\n"
            out.write(head + text.encode())
            out.flush()
            is_begun = True
    except TieredKVError as error:
        if not is_begun:
            refusal = Head(refused=type(error).__name__, message=str(error))
            out.write(msgspec.json.encode(refusal) + b"\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
