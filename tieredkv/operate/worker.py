"""What a verb asks the process that has the store open; the calls are in `messages.operator`.

That process is the worker that serves the store, or one that was started to answer this verb. It
gives records and figures, and deletes what it is told to; the verbs decide what that is. This
module knows the messages, and neither the verbs nor where the process comes from.
"""

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from tieredkv.errors import StoreUnreachableError
from tieredkv.operate.models import KnownModels, read_models
from tieredkv.pieces import cut
from tieredkv.storage.messages import operator as messages
from tieredkv.storage.messages.engine import IndexStart, Looking
from tieredkv.storage.messages.operator import Deleted
from tieredkv.wire.channel import FrameChannel
from tieredkv.wire.process import Refused

GONE = (ConnectionError, FileNotFoundError, BlockingIOError, EOFError)
"""What is raised where a process that has the store open is not there, or has gone."""

_STARTS_A_CALL = 16_384  # fits into a frame that the worker accepts
_MAX_REPLY_BYTES = 16 << 20  # in one frame from the worker: thousands of records
_decoder = msgspec.msgpack.Decoder(messages.Reply)

ReplyPart = TypeVar("ReplyPart", bound=msgspec.Struct)
Channel = FrameChannel[messages.Reply]
VerbProgress = Callable[[int, int], object]
"""Called with (blocks done, blocks in all) during a long verb."""


@dataclass(kw_only=True)
class Worker:
    """The process that has a store open; one thread uses it.

    Attributes:
        channel: joins this process and that one.
        path: the store's folder.
        timeout_s: how long that process may say nothing.
        progress: told how far a long verb is.
        earlier: what the verb has kept from workers that ended before it was done.
        let_go: ends the connection, and that process if it was started for this verb.
        looking: what a process that was started to look has said; None of another one.
        own_index: of a process that was started for this verb: how it began with the index.
        lacks_engine: whether an engine uses the store, but this is not its worker, which is down.

    Every call raises EOFError if the process has gone, StoreUnreachableError if it says nothing,
    and the error that it refuses with.
    """

    channel: Channel
    path: str
    timeout_s: float
    progress: VerbProgress
    earlier: dict[str, Any]
    let_go: Callable[[], object]
    looking: Looking | None = None
    own_index: IndexStart | None = None
    lacks_engine: bool = False

    def find(self, starts: Sequence[bytes], *, climbs: bool = False) -> Iterator[messages.Rows]:
        """Yield the blocks whose names begin so, those that have expired left out.

        Args:
            starts: first bytes of names.
            climbs: yield all blocks before them, too, up to the first that the disk lacks.
        """
        for some in cut(starts, _STARTS_A_CALL):
            yield from self.parts(messages.Find(starts=some, climbs=climbs), messages.Rows)

    def delete(self, asked: messages.Delete) -> Deleted:
        """Drop and erase blocks."""
        if asked.starts is None:
            return self.one(asked, Deleted)
        done = Deleted(0, 0, 0, [], [], "")
        for some in cut(asked.starts, _STARTS_A_CALL):
            done = _added(done, self.one(replace(asked, starts=some), Deleted))
        return done

    @property
    def has_engine(self) -> bool:
        """Whether it is the worker of an engine, and not of another verb."""
        return self.one(messages.Figures(), messages.StoreFigures).writer_pid is not None

    def models(self) -> KnownModels:
        """Return the models that the folder names."""
        return KnownModels(read_models(self.path))

    def ask_engine(
        self, call: msgspec.Struct, roots: Mapping[bytes, bytes] = MappingProxyType({})
    ) -> Iterator[dict[str, Any]]:
        """Ask the engine, if there is one; yield each part of its answer.

        A silent engine is taken to say `NO_ANSWER`, and so is one that cannot be asked.

        Args:
            call: of a verb; see `engine.verbs`.
            roots: see `tier.ControlRequest`.
        """
        if self.lacks_engine:
            yield {**messages.NO_ANSWER}
            return
        asked = messages.AskEngine(call=msgspec.msgpack.encode(call), roots={**roots})
        for part in self.parts(asked, messages.EngineAnswer):
            yield part.body

    def one(self, asked: messages.Asked, kind: type[ReplyPart]) -> ReplyPart:
        """Ask, and return the one part of the answer."""
        [part] = self.parts(asked, kind)
        return part

    def parts(self, asked: messages.Asked, kind: type[ReplyPart]) -> Iterator[ReplyPart]:
        """Ask, and yield the parts of the answer as they come; all of them have to be taken."""
        self.channel.send(asked)
        while received := self.channel.receive(self.timeout_s):
            for reply in received:
                if isinstance(reply, Refused):
                    raise reply.error
                if isinstance(reply, messages.Done):
                    return
                if isinstance(reply, kind):
                    yield reply
        raise silent(self.path, self.timeout_s)


def channel_over(sock: socket.socket) -> Channel:
    """Return our end of a connection to a worker."""
    return FrameChannel(sock, _decoder, _MAX_REPLY_BYTES)


def silent(path: str, timeout_s: float) -> StoreUnreachableError:
    """Return the error that a worker says nothing."""
    return StoreUnreachableError(
        f"the store worker of `{path}` has said nothing for "
        f"{timeout_s:g} s\nhint: it may be stopped, or its disk may hang"
    )


def silent_engine() -> StoreUnreachableError:
    """Return the error that the engine does not answer."""
    what = "the engine is silent, so what VRAM and host memory hold is not known"
    return StoreUnreachableError(f"{what}\nhint: try again once the engine answers")


def only(answer: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """Return what the engine says in its last part; nothing where there is no engine."""
    return [{}, *answer][-1]


def _added(one: Deleted, other: Deleted) -> Deleted:
    """Add up two deletions; a key that the first kept may be erased by the second."""
    erased = {*one.erased_keys, *other.erased_keys}
    kept = {*one.kept_keys, *other.kept_keys} - erased
    return Deleted(
        one.num_blocks + other.num_blocks,
        one.window_pages + other.window_pages,
        one.freed_bytes + other.freed_bytes,
        sorted(erased),
        sorted(kept),
        other.keys_error or one.keys_error,
    )
