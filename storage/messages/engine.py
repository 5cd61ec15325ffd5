"""The messages between the engine and the store worker.

Each message is one tagged struct, framed by `tieredkv.wire.channel`. This module knows only the
shapes of messages; `client` and `worker` know who answers what, and when. Here, all hashes of
blocks and of their parents are names: see `storage.keys.names`. A `Held` has more bytes of each
name of an encrypted store, since fewer cannot be turned back.
"""

from typing import Literal

import msgspec

from tieredkv.hashing import ModelIdentity
from tieredkv.storage.messages.operator import EngineAnswer, StillBusy
from tieredkv.storage.options import StoreOptions
from tieredkv.storage.stats import Need, StoreStats
from tieredkv.tier import ControlRequest, Gone, Held, Lent, Loaded, ProbeDone, Stored, TouchItem
from tieredkv.wire.process import Refused

HIDDEN_HEAD_BYTES = 16
"""Bytes of a name in the `Held` of an encrypted store."""

IndexStart = Literal["as_it_is", "examined", "set_aside"]
"""What a worker does with the index before it opens it."""

# --- Engine to worker ------------------------------------------------------------------------


class Launch(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="launch"):
    """The first message to a worker, which tells what it serves.

    Attributes:
        arena: (fd, pages, bytes of a page, whether it is adopted) of the host arena; None for a
            worker that the command line started on a stopped store, as no engine is there to ask
            or to lend pages.
        parent_pid: the worker ends when this process is no longer its parent.
        index: what to do before the index is opened. `examined`, after an unexplained end: every
            page is read and checked. `set_aside`, after a verdict of damage: the index is renamed,
            and made again from the extents.
        stack_fd: a file for the stack of a thread that crashes.
        look_fd: a socket for a verb that only looks at a stopped store: the worker changes nothing,
            and answers this verb there. With `set_aside` it does not read the index. None for a
            worker that opens the store.
    """

    options: StoreOptions
    arena: tuple[int, int, int, bool] | None
    parent_pid: int
    index: IndexStart = "as_it_is"
    stack_fd: int
    look_fd: int | None = None


class LookupCall(msgspec.Struct, frozen=True, array_like=True, tag="lookup"):
    """Tell which blocks are stored; answered by `LookupAnswer`."""

    job: int
    hashes: list[bytes]


class ProbeCall(msgspec.Struct, frozen=True, array_like=True, tag="probe"):
    """Read blocks only to find out how fast the disk is; answered by `ProbeDone`."""

    job: int
    hashes: list[bytes]


class LoadCall(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """Read blocks into pages; each is answered by a `Loaded` in `Completions`."""

    pages: list[Lent]


class StoreCall(msgspec.Struct, frozen=True, array_like=True, tag="store"):
    """Write blocks; each is answered by a `Stored` in `Completions`.

    Attributes:
        pages: that hold the blocks.
        shares: the part of the budget that each tenant keeps from now on, so that a message does
            not grow with the tenants; None for those told before.
    """

    pages: list[Lent]
    shares: dict[bytes, float] | None = None


class TouchCall(msgspec.Struct, frozen=True, array_like=True, tag="touch"):
    """Refresh blocks after a hit; not answered."""

    items: list[TouchItem]


class DeleteCall(msgspec.Struct, frozen=True, array_like=True, tag="delete"):
    """Make blocks unreachable; answered by `DeleteDone` once no restart brings them back."""

    job: int
    hashes: list[bytes]
    reason: str


class ModelCall(msgspec.Struct, frozen=True, array_like=True, tag="model"):
    """The engine's model is loaded: count and tell the blocks that it can never use."""

    model: ModelIdentity


class CloseCall(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """Finish the writes and evictions under way, close the store and exit."""


_StoreCalls = LookupCall | ProbeCall | LoadCall | StoreCall | TouchCall | DeleteCall
EngineMessage = Launch | _StoreCalls | EngineAnswer | ModelCall | CloseCall

# --- Worker to engine ------------------------------------------------------------------------


class WorkerUp(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """A new worker serves the store.

    Attributes:
        stats: the store's figures.
        names_key: of the names by which it knows blocks; empty if the store is not encrypted.
    """

    stats: StoreStats
    names_key: bytes = b""


class Looking(msgspec.Struct, frozen=True, array_like=True, tag="looking"):
    """A worker that only looks at the store answers from now on.

    Attributes:
        needs: what the store needs.
        is_whole: whether it can read the index, and so tell all that is stored.
    """

    needs: list[Need]
    is_whole: bool


class IndexSetAside(msgspec.Struct, frozen=True, array_like=True, tag="set_aside"):
    """The damaged index was renamed, as the engine wanted; `text` is for the operator."""

    text: str


class LookupAnswer(msgspec.Struct, frozen=True, array_like=True, tag="records"):
    """The record of each block that was asked for, in the same order; empty for a miss."""

    job: int
    records: list[bytes]


class DeleteDone(msgspec.Struct, frozen=True, array_like=True, tag="deleted"):
    """A deletion was carried out."""

    job: int


class Completions(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """Pages whose loans have ended since the last message, and the store's figures after that."""

    pages: list[Loaded | Stored]
    stats: StoreStats


_Starts = StillBusy | WorkerUp | Looking | IndexSetAside | Refused
_Answers = LookupAnswer | ProbeDone | Completions | DeleteDone
WorkerMessage = _Starts | _Answers | Held | Gone | ControlRequest
