"""What travels between the engine, the store worker and the command line.

Each message is one tagged struct, framed by `tieredkv.storage.channel`. This module knows shapes
only; who answers what, and when, is the business of worker, client and control.
"""

from typing import Any, Literal

import msgspec

from tieredkv.errors import ConfigError, CorruptBlockError, StorageError, TieredKVError
from tieredkv.storage.results import ChainInfo, EvictFilter, StoreStats, TouchItem
from tieredkv.types import BlockRecord

# --- Nouns -----------------------------------------------------------------------------------


class StoreOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the worker opens and serves one store.

    Attributes:
        path: the store's folder.
        budget_bytes: what its files may occupy, index included; None keeps the last one.
        sync: `commit` flushes every group commit to the device; `none` leaves it to the system, and
            blocks survive `kill -9` all the same.
        compression, element_bytes: see `tieredkv.storage.compression.Packing`.
        sweep_interval_s: expired bytes are erased within this time.
        create: make the folder a store if it is none.
        write_limit: bytes a second that may be written; 0 for no limit.
        disk_retentions: names of the retention policies that allow the disk tier; a block of any
            other policy is refused by the worker, whatever the engine says.
        clock_offset_file: see `tieredkv.clock`.
        num_readers, num_writers: threads that move payloads.
        backoff_s, max_backoff_s: pause before a dead worker is started again, doubling.
        busy_patience_s: how long the first start waits for another writer to go, such as the worker
            of an engine that was killed a moment ago.
    """

    path: str
    budget_bytes: int | None = None
    sync: Literal["commit", "none"] = "commit"
    compression: Literal["off", "on", "auto"] = "off"
    element_bytes: int = 2
    sweep_interval_s: float = 10.0
    create: bool = True
    write_limit: int = 0
    disk_retentions: tuple[str, ...] = ("24h",)
    clock_offset_file: str | None = None
    num_readers: int = 32
    num_writers: int = 8
    backoff_s: float = 0.1
    max_backoff_s: float = 30.0
    busy_patience_s: float = 5.0


IndexStart = Literal["as_it_is", "examined", "set_aside"]
"""What a worker does with the index before it opens it."""


class Launch(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="launch"):
    """The first message to a worker: what it is to serve.

    Attributes:
        arena: (fd, pages, bytes of a page) of the host arena; None for a worker that the command
            line started on a stopped store: there is no engine to ask or to lend pages.
        parent_pid: ends the worker when it is no longer its parent.
        index: `examined` after an end that nobody can explain: every page is read and checked
            first; `set_aside` after a verdict of damage: it is renamed, and made again from the
            extents.
        stack_fd: a file for the stack of the thread that crashes.
    """

    options: StoreOptions
    arena: tuple[int, int, int] | None
    parent_pid: int
    index: IndexStart = "as_it_is"
    stack_fd: int


class LentPage(msgspec.Struct, frozen=True, array_like=True):
    """A page lent to the worker: for a load what the block's record must say, or a block to store.

    A page is on one loan at a time, so that its number is the loan's.
    """

    record: BlockRecord
    page_id: int


class PageReturned(msgspec.Struct, frozen=True, array_like=True):
    """The end of one loan; `reason` says why it failed, if it did."""

    block_hash: bytes
    page_id: int
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Whether the block was loaded or stored."""
        return not self.reason


class PageLoaded(PageReturned, frozen=True, array_like=True, tag="loaded"):
    """The end of one load; `record` is set if `ok`."""

    record: BlockRecord | None = None


class PageStored(PageReturned, frozen=True, array_like=True, tag="stored"):
    """The end of one store; if `ok`, the block survives a kill of every process of ours."""


class ControlCall(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """What the command line wants.

    Attributes:
        wanted: what `evict` is to drop.
        repair: whether `verify` drops what is bad.
        limit: how many chains `ls` lists at most; None for all.
    """

    verb: Literal["df", "ls", "evict", "verify"]
    wanted: EvictFilter = EvictFilter()
    repair: bool = True
    limit: int | None = None


# --- Engine to worker ------------------------------------------------------------------------


class LookupCall(msgspec.Struct, frozen=True, array_like=True, tag="lookup"):
    job: int
    hashes: list[bytes]


class LoadCall(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    pages: list[LentPage]


class StoreCall(msgspec.Struct, frozen=True, array_like=True, tag="store"):
    pages: list[LentPage]
    shares: dict[bytes, float] = {}  # of the budget, by tenant; see `ExtentAllocator`


class TouchCall(msgspec.Struct, frozen=True, array_like=True, tag="touch"):
    items: list[TouchItem]


class DeleteCall(msgspec.Struct, frozen=True, array_like=True, tag="delete"):
    """Make blocks unreachable; answered by `DeleteDone` once no restart brings them back."""

    job: int
    hashes: list[bytes]
    reason: str


class EngineAnswer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """What the engine says to a `ControlRequest`."""

    id: int
    body: dict[str, Any]


class CloseCall(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """Finish the writes in hand, close the store and exit."""


_StoreCalls = LookupCall | LoadCall | StoreCall | TouchCall | DeleteCall
EngineMessage = Launch | _StoreCalls | EngineAnswer | CloseCall

# --- Worker to engine ------------------------------------------------------------------------


class Opening(msgspec.Struct, frozen=True, array_like=True, tag="opening"):
    """A new worker is still opening the store: so many of its extents are read."""

    done: int
    total: int


class WorkerUp(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """A new worker serves the store."""

    stats: StoreStats


class IndexSetAside(msgspec.Struct, frozen=True, array_like=True, tag="set_aside"):
    """The damaged index was renamed, as the engine wanted; `text` is for the operator."""

    text: str


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """Why a worker ends, or why it does not do what it was asked to do."""

    kind: str
    message: str


class LookupDone(msgspec.Struct, frozen=True, array_like=True, tag="records"):
    """What a lookup found: sealed records by block hash, for `codec.decode_record`.

    They are checked, and decoded only where they are used: few of them are, at a time.
    """

    job: int
    found: dict[bytes, bytes]


class DeleteDone(msgspec.Struct, frozen=True, array_like=True, tag="deleted"):
    job: int


class Completions(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """Pages that are ready, as they become so, and the figures that follow from them."""

    pages: list[PageLoaded | PageStored]
    stats: StoreStats


class ControlRequest(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """A verb (`df` or `evict`) that concerns the engine's own tiers too; it wants an answer.

    Attributes:
        following: of the chains that an eviction names, the blocks on disk from the named one on.
        before: the blocks on disk before it that no other chain on disk shares.
    """

    id: int
    call: ControlCall
    following: list[bytes] = []
    before: list[bytes] = []


WorkerMessage = (
    Opening
    | WorkerUp
    | IndexSetAside
    | Refused
    | LookupDone
    | DeleteDone
    | Completions
    | ControlRequest
)

# --- Command line and worker -----------------------------------------------------------------


class ControlProgress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    done: int
    total: int


class ControlPage(msgspec.Struct, frozen=True, array_like=True, tag="page"):
    """A part of an answer that is too long for one frame; the result follows the last page."""

    chains: list[ChainInfo]


class ControlResult(msgspec.Struct, frozen=True, array_like=True, tag="result"):
    body: dict[str, Any]


ControlReply = ControlProgress | ControlPage | ControlResult | Refused

# --- Errors over the wire --------------------------------------------------------------------


def refusal(error: TieredKVError) -> Refused:
    """Return what tells the other side of `error`; what is not about a store is its fault."""
    is_told = isinstance(error, ConfigError | StorageError)
    is_told = is_told and not isinstance(error, CorruptBlockError)
    return Refused(type(error).__name__ if is_told else StorageError.__name__, str(error))
