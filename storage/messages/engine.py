"""The messages between the engine and the store worker.

Each message is one tagged struct, framed by `tieredkv.wire.channel`. This module knows only the
shapes of messages. The modules `worker` and `client` know who answers what, and when.
Here, all hashes of blocks and of their parents are names: see `storage.client.names`.
"""

from typing import Any, Literal

import msgspec

from tieredkv.errors import ConfigError, CorruptBlockError, StorageError, TieredKVError
from tieredkv.hashing import ModelIdentity
from tieredkv.storage.options import StoreOptions
from tieredkv.storage.stats import Need, StoreStats
from tieredkv.storage.tier import Gone, Lent, Loaded, ProbeDone, Stored
from tieredkv.wire.process import Refused

# --- Nouns -----------------------------------------------------------------------------------


IndexStart = Literal["as_it_is", "examined", "set_aside"]
"""What a worker does with the index before it opens it."""


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


class TouchItem(msgspec.Struct, frozen=True, array_like=True):
    """One use of a block, and the claim that came with it if that lengthens the block's life.

    Attributes:
        hits: how many requests have found the block, as far as is known; None for one more.
    """

    block_hash: bytes
    last_used: float
    expires_at: float | None = None
    retention: str | None = None
    pinned_until: float = 0.0
    hits: int | None = None


# --- Engine to worker ------------------------------------------------------------------------


class LookupCall(msgspec.Struct, frozen=True, array_like=True, tag="lookup"):
    job: int
    hashes: list[bytes]


class LoadCall(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    pages: list[Lent]


class StoreCall(msgspec.Struct, frozen=True, array_like=True, tag="store"):
    """Write blocks.

    Attributes:
        pages: that hold the blocks.
        shares: the part of the budget that each tenant keeps from now on, so that a message does
            not grow with the tenants; None for those told before.
    """

    pages: list[Lent]
    shares: dict[bytes, float] | None = None


class ProbeCall(msgspec.Struct, frozen=True, array_like=True, tag="probe"):
    """Read blocks only to find out how fast the disk is; answered by `ProbeDone`."""

    job: int
    hashes: list[bytes]


class TouchCall(msgspec.Struct, frozen=True, array_like=True, tag="touch"):
    items: list[TouchItem]


class DeleteCall(msgspec.Struct, frozen=True, array_like=True, tag="delete"):
    """Make blocks unreachable; answered by `DeleteDone` once no restart brings them back."""

    job: int
    hashes: list[bytes]
    reason: str


class EngineAnswer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """The engine's answer to a `ControlRequest`, or a part of it that others follow."""

    id: int
    body: dict[str, Any]
    has_more: bool = False


class ModelCall(msgspec.Struct, frozen=True, array_like=True, tag="model"):
    """The engine's model is loaded: count and tell the blocks that it can never use."""

    model: ModelIdentity


class CloseCall(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """Finish the writes and evictions under way, close the store and exit."""


_StoreCalls = LookupCall | LoadCall | StoreCall | ProbeCall | TouchCall | DeleteCall
EngineMessage = Launch | _StoreCalls | EngineAnswer | ModelCall | CloseCall

# --- Worker to engine ------------------------------------------------------------------------


class Opening(msgspec.Struct, frozen=True, array_like=True, tag="opening"):
    """A new worker is still opening the store, and has read `done` of its `total` extents."""

    done: int
    total: int


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
    job: int


class Completions(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """Pages whose loans have ended since the last message, and the store's figures after that."""

    pages: list[Loaded | Stored]
    stats: StoreStats


class ControlRequest(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """A call that also concerns the engine's own tiers; the engine answers it.

    Attributes:
        call: as an operator's process encoded it; see `tieredkv.operate.calls`.
        following: of each chain that an eviction names, the blocks on disk from the named one on.
        roots: of chains on disk, each with its namespace, for a prompt that was found nowhere.
        before: the blocks on disk before the named one that no other chain on disk shares.
    """

    id: int
    call: bytes
    following: list[bytes] = []
    before: list[bytes] = []
    roots: dict[bytes, bytes] = {}


WorkerMessage = (
    Opening
    | WorkerUp
    | Looking
    | IndexSetAside
    | Refused
    | LookupAnswer
    | ProbeDone
    | DeleteDone
    | Gone
    | Completions
    | ControlRequest
)

# --- Errors over the wire --------------------------------------------------------------------


def refusal(error: TieredKVError) -> Refused:
    """Return the message that tells the other side of `error`.

    An error that is no ConfigError or StorageError, or that is a CorruptBlockError, is sent as a
    plain StorageError.
    """
    is_told = isinstance(error, ConfigError | StorageError)
    is_told = is_told and not isinstance(error, CorruptBlockError)
    return Refused(type(error).__name__ if is_told else StorageError.__name__, str(error))
