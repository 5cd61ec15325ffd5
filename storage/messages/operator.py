"""What operators' processes ask a store's worker over the socket in the store's folder.

The worker finds, lists, deletes and checks blocks, and hands questions on to the engine. What is
made of the answers, such as chains and sums, is made by who asks; see `tieredkv.operate`. Blocks
are called by the names that the index has for them. This module knows only the shapes of messages.
"""

from typing import Any

import msgspec

from tieredkv.storage.stats import StoreStats
from tieredkv.wire.process import Refused

NO_ANSWER = {"engine": "no answer"}
"""What a silent engine is taken to say."""

# --- Operator to worker ----------------------------------------------------------------------


class Question(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A question to the worker, which is answered by any number of parts and a last word.

    Unknown fields are refused, as they may be meant to spare blocks.
    """


class Find(Question, frozen=True, kw_only=True, tag="find"):
    """The records of blocks whose names begin so, by `Rows`; then `Done`.

    Attributes:
        starts: first bytes of names, at most 32.
        climbs: tell of all blocks before them too, up to the first that the disk lacks.
    """

    starts: list[bytes]
    climbs: bool = False


class Scan(Question, frozen=True, kw_only=True, tag="scan"):
    """The records of all blocks in the order of their names, by `Rows`, at least one; then `Done`.

    Blocks that come or go meanwhile may be told of or not.

    Attributes:
        settled: begin once all stores that were received so far are acknowledged.
    """

    settled: bool = False


class Delete(Question, frozen=True, kw_only=True, tag="delete"):
    """Drop and erase blocks, by `Deleted`; of stores under way those that it is about, too.

    With neither `starts` nor a namespace it is about every block. Unless only blocks of some age
    are meant, a namespace is gone at once: its keys are destroyed and lookups miss it before its
    blocks are dropped, and what is stored meanwhile is not kept.

    Attributes:
        starts: first bytes of names, 16 at least; of a chain's blocks the last one first.
        namespace: hex digits that the namespaces begin with; "" for all.
        unused_since: only blocks whose last use is not after this moment.
        expired: only blocks that have expired.
        dry_run: count the blocks only.
    """

    starts: list[bytes] | None = None
    namespace: str = ""
    unused_since: float | None = None
    expired: bool = False
    dry_run: bool = False


class Verify(Question, frozen=True, kw_only=True, tag="verify"):
    """Check the whole store, by any number of `Checked` that add up; then `Done`.

    Every payload is compared with its checksum, then the index with itself. Pages of layers with
    windows are looked for whose block is not there. With `erased_key` or
    `erased_namespace` the worker looks for what should be erased instead.

    Attributes:
        repair: whether what is bad is dropped or made again.
        sample: the part of the blocks that is read, chosen by chance.
        erased_key, erased_namespace: see `tieredkv.operate.verify.Verify`.
    """

    repair: bool = True
    sample: float = 1.0
    erased_key: str = ""
    erased_namespace: str = ""


class Figures(Question, frozen=True, kw_only=True, tag="figures"):
    """What the store holds: one `StoreFigures`.

    Attributes:
        tenants: whether to add up what each tenant holds.
        names_key: whether to tell the key of the names of blocks.
    """

    tenants: bool = False
    names_key: bool = False


class Rotate(Question, frozen=True, kw_only=True, tag="rotate"):
    """Replace the master key: one `Rotated`; see `tieredkv.operate.rotate.Rotate`."""

    master_key: str | None = None
    command: str | None = None


class AskEngine(Question, frozen=True, kw_only=True, tag="ask"):
    """Hand a call on to the engine: `EngineAnswer` for each part of its answer; then `Done`.

    Without an engine there is no part.

    Attributes:
        call: as `tieredkv.operate` encodes it; the worker does not read it.
        roots: see `tier.ControlRequest`.
    """

    call: bytes
    roots: dict[bytes, bytes] = {}


Asked = Find | Scan | Delete | Verify | Figures | Rotate | AskEngine

# --- Worker to operator ----------------------------------------------------------------------


class StillBusy(msgspec.Struct, frozen=True, array_like=True, tag="busy"):
    """The worker opens the store, or an answer takes longer."""


class Rows(msgspec.Struct, frozen=True, array_like=True, tag="rows"):
    """Sealed records, side by side; those of a `Scan` in the order of names, with unchecked seals.

    Attributes:
        data: all of them, of which each has the same size.
        retentions: names of the retention policies that the records number.
        now: the time by the store's clock.
    """

    data: bytes
    retentions: tuple[str, ...]
    now: float


class Deleted(msgspec.Struct, frozen=True, array_like=True, tag="deleted"):
    """What a deletion freed.

    Attributes:
        num_blocks, window_pages: blocks, and pages of layers with windows, expired ones left out.
        freed_bytes: of their extents.
        erased_keys, kept_keys: ids of the blocks' keys that are erased, and of those that are not.
        keys_error: why keys without blocks could not be erased; empty if nothing went wrong.
    """

    num_blocks: int
    window_pages: int
    freed_bytes: int
    erased_keys: list[str]
    kept_keys: list[str]
    keys_error: str


class Checked(msgspec.Struct, frozen=True, array_like=True, tag="checked"):
    """What a part of `Verify` found.

    Attributes:
        checked: blocks or extents that were read.
        window_pages: pages of layers with windows that were read.
        by_reason: bad blocks by the reason.
        repaired: how many of these were repaired.
        stray_pages: pages of layers with windows whose block is not there.
        keys, blocks, extents: what is left that should be erased.
    """

    checked: int = 0
    by_reason: dict[str, int] = {}
    repaired: int = 0
    window_pages: int = 0
    stray_pages: int = 0
    keys: int = 0
    blocks: int = 0
    extents: int = 0


class StoreFigures(msgspec.Struct, frozen=True, array_like=True, tag="told"):
    """The figures of a store.

    Attributes:
        stats: as of now.
        tenants: of those who have most: blocks, payload bytes, and how many of the blocks are pages
            of layers with windows, by the hex digits of the tenant.
        writer_pid: the worker's, if it serves an engine.
        now: the time by the store's clock.
        lacks_keys: why the keys of an encrypted store are not there; empty otherwise.
        names_key: of the names of blocks, if it was asked for; empty if they are hashes.
    """

    stats: StoreStats
    tenants: dict[str, tuple[int, int, int]]
    writer_pid: int | None
    now: float
    lacks_keys: str
    names_key: bytes = b""


class Rotated(msgspec.Struct, frozen=True, array_like=True, tag="rotated"):
    """Where the new master key is, and how many keys it wraps."""

    master_key: str
    keys: int


class EngineAnswer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """The engine's answer, or a part of it that others follow; see `AskEngine`.

    It goes from the engine to the worker, and on to the operator.

    Attributes:
        id: of the `ControlRequest`.
        body: it may be empty, to tell that the engine is still at it.
        has_more: whether other parts follow.
    """

    id: int
    body: dict[str, Any]
    has_more: bool = False


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """The end of an answer that has any number of parts."""


Reply = (
    StillBusy | Rows | Deleted | Checked | StoreFigures | Rotated | EngineAnswer | Done | Refused
)
