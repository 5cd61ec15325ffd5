"""Compiles grammars to find out whether they can be used, as a process of its own.

`python -P -m tieredkv.engine.grammar_check FD` checks what comes over a descriptor. A compilation
can neither be interrupted nor be kept from taking memory, so it is first tried here, in a process
that can be killed.
"""

import contextlib
import resource
import signal
import socket
import sys

import msgspec

from tieredkv.engine.checkpoint import load_tokenizer
from tieredkv.errors import RequestError, StorageError
from tieredkv.wire.channel import FrameChannel

MAX_BYTES = 4 << 30
"""Of memory that this process may take, its libraries included."""


class Begin(msgspec.Struct, frozen=True, array_like=True, tag="begin"):
    """The first message: whose grammars they are; answered by `Checked` once it is ready."""

    model: str
    vocab_size: int
    eos_token_ids: list[int]


class Check(msgspec.Struct, frozen=True, array_like=True, tag="check"):
    """A grammar to compile; answered by `Checked`."""

    grammar: str


class Checked(msgspec.Struct, frozen=True, array_like=True, tag="checked"):
    """Whether it can be used: an empty text, or why not."""

    fault: str = ""


def run(channel: FrameChannel[Begin | Check]) -> None:
    """Answer messages until the other side is gone."""
    from tieredkv.engine.grammars import Compiler  # after the limit is set

    compiler: Compiler | None = None
    while True:
        for message in channel.receive(None):
            fault = ""
            match message:
                case Begin(model, vocab_size, eos_token_ids):
                    compiler = Compiler(load_tokenizer(model), vocab_size, eos_token_ids)
                case Check(grammar):
                    assert compiler is not None, "no Begin"
                    try:
                        compiler.check(grammar)
                    except RequestError as error:
                        fault = str(error)
                    except MemoryError:
                        fault = "The grammar cannot be used: compiling it takes too much memory"
            channel.send(Checked(fault))


def main() -> None:
    """Check grammars for the process at the other end of the descriptor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
    sock = socket.socket(fileno=int(sys.argv[1]))
    decoder = msgspec.msgpack.Decoder(Begin | Check)
    ended = contextlib.suppress(EOFError, StorageError)  # the other side is gone
    with ended, contextlib.closing(FrameChannel(sock, decoder)) as channel:
        run(channel)


if __name__ == "__main__":
    main()
