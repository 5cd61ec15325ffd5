"""Starts a worker on a stopped store to carry out one verb, and judges how it ended.

The worker only looks unless the verb changes the store. If it fails without saying why, the next
one looks for damage first; but not for a verb that changes the store and does not mend it. If the
index is damaged, a verb that only looks does without it, and one that mends has it made again.
"""

import contextlib
import socket
from collections.abc import Callable
from functools import partial
from typing import Self

import msgspec

from tieredkv.errors import StorageError, TieredKVError
from tieredkv.operate.verb import Asking, Verb
from tieredkv.operate.worker import GONE, Channel, Worker, channel_over, silent
from tieredkv.storage.messages import engine as messages
from tieredkv.storage.messages.engine import IndexStart
from tieredkv.storage.options import StoreOptions
from tieredkv.storage.worker.process import WorkerEnd, WorkerProcess
from tieredkv.wire.limits import described
from tieredkv.wire.process import Refused


def ask_own_worker(
    call: Verb,
    options: StoreOptions,
    worker_of: Callable[..., Worker],
    connect: Callable[[], socket.socket],
    timeout_s: float,
) -> Asking:
    """Start a worker on the stopped store, ask it, and stop it again; see `StoreControl.pages`.

    Raises:
        StoreBusyError: somebody was faster.
        StorageError: what the worker refused with, or died of.
    """
    index: IndexStart = "as_it_is"
    while True:
        with _Own(options, index, timeout_s, looks=not call.changes) as own:
            try:
                while not own.hear():
                    pass
                with own.process.answers or connect() as connection:
                    channel = channel_over(connection)
                    worker = worker_of(
                        channel=channel,
                        let_go=partial(own.end, channel),
                        looking=own.looking,
                        own_index=index,
                    )
                    body = yield from call.carry_out(worker)
                    if own.looking is None:
                        return body
                    return {**body, "needs": msgspec.to_builtins(own.looking.needs)}
            except GONE:
                own.hear_rest()
        end = own.ended
        assert end is not None, "it is ended with the block above"
        can_go_on = call.mends or not call.changes
        if can_go_on and end.is_unexplained and index == "as_it_is":
            index = "examined"
        elif can_go_on and end.is_damage and index != "set_aside":
            index = "set_aside"
        elif own.refused is not None and not end.is_damage:
            raise own.refused
        else:
            why = f"the store worker of `{options.path}` ended: {own.refused or end.text}"
            hint = "\nhint: run `tieredkv verify`, which rebuilds a damaged index"
            raise StorageError(f"{why}{hint}" if end.is_damage else why)


class _Own:
    """The process of a worker that was started for one verb; it ends with the verb, or before.

    Attributes:
        process: of the worker.
        looking: what a worker has said that only looks.
        refused: why the worker does not serve, if it has said so.
        ended: how it ended.
    """

    def __init__(
        self, options: StoreOptions, index: IndexStart, timeout_s: float, *, looks: bool
    ) -> None:
        self._path, self._timeout_s = options.path, timeout_s
        self.looking: messages.Looking | None = None
        self.refused: TieredKVError | None = None
        self.ended: WorkerEnd | None = None
        try:
            self.process = WorkerProcess(options, None, index=index, looks=looks)
        except OSError as error:
            what = f"the store worker of `{options.path}` cannot be started"
            raise StorageError(f"{what}: {described(error)}") from error

    def hear(self) -> bool:
        """Wait for what the worker says, and return whether it serves from now on.

        Raises:
            EOFError: it has gone.
            StoreUnreachableError: it says nothing.
        """
        if not (received := self.process.channel.receive(self._timeout_s)):
            raise silent(self._path, self._timeout_s)
        for message in received:
            if isinstance(message, Refused):
                self.refused = message.error
            if isinstance(message, messages.Looking):
                self.looking = message
        return any(isinstance(it, messages.Looking | messages.WorkerUp) for it in received)

    def hear_rest(self) -> None:
        """Have the worker end, and hear what it says about that."""
        self.process.channel.send(messages.CloseCall())
        with contextlib.suppress(EOFError, StorageError):
            while True:
                self.hear()

    def end(self, channel: Channel | None = None) -> None:
        """Have the worker close the store, and wait until it has ended; twice is fine."""
        if channel is not None:
            channel.close()
        if self.ended is None:
            self.process.channel.send(messages.CloseCall())
            self.ended = self.process.bury(grace_s=self._timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end()
