"""Carries out one verb for a server, in a process of its own; see `tieredkv.operate.jobs`."""

import logging
import os
import signal
import sys
from collections.abc import Iterator

import msgspec

from tieredkv.errors import TieredKVError
from tieredkv.operate import alone
from tieredkv.operate.ask import StoreControl, document
from tieredkv.operate.jobs import Head, Job, decoder

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
        for text in _document(job):
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


def _document(job: Job) -> Iterator[str]:
    """Yield the parts of the JSON document that is the answer."""
    call = job.call
    control = StoreControl(job.path, clock_offset_file=job.clock_offset_file) if job.path else None
    if call.listed_as:
        pages = alone.pages(call, job.told) if control is None else control.pages(call)
        yield from document(call, pages)
        return
    answer = alone.answer(call, job.told) if control is None else control.answer(call)
    yield msgspec.json.encode(answer).decode()


if __name__ == "__main__":
    sys.exit(main())
