"""The blocks that the RAM tiers hold, their deadlines, and why blocks have left lately.

There is one entry per block, even if both tiers have a copy. This module knows identity and
retention; it does not know pools, bytes or devices.
Called by the engine's thread only.
"""

import heapq
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from tieredkv.cache.miss_reasons import MissReason, MissReasons
from tieredkv.cache.reach import Reach
from tieredkv.errors import IntegrityError
from tieredkv.pieces import PIECE_BLOCKS
from tieredkv.retention import RetentionPolicies
from tieredkv.tier import BlockLife, Lent, TouchItem
from tieredkv.types import BlockHash, BlockRecord, Tier

_NEVER, _SOON = sys.maxsize, -1
"""Seconds that stand for entries that are not queued, and for those whose second has begun."""


class Entry(msgspec.Struct, gc=False):
    """Identity and retention of one full block that VRAM or host memory holds.

    Attributes:
        claims: names of the retention policies that asked for the block; the longest one counts.
        pinned_until: until then the block is evicted only after all blocks without a pin, and it
            does not count as idle; 0.0 without a pin. A pin does not extend its absolute lifetime.
        disk_expires_at: the deadline that the disk was last told; 0.0 while the disk has
            acknowledged no copy.
        is_droppable: the block may be evicted without a copy in a slower tier, since its demotion
            was given up.
        refusal: why the store last refused the block; empty if it did not.
        hits: how many requests found the block, without the one that computed it.
        kind, part, num_parts: see `BlockRecord`.
        num_continued: how many requests went on right behind the block, of a page of layers with
            windows.
        queued_second: when the entry is examined next, in seconds since the epoch.
    """

    block_hash: BlockHash
    parent_hash: BlockHash
    root: BlockHash
    namespace: bytes
    position: int
    computed_at: float
    last_used: float
    claims: frozenset[str]
    pinned_until: float = 0.0
    disk_expires_at: float = 0.0
    is_droppable: bool = False
    refusal: str = ""
    hits: int = 0
    kind: int = 0
    part: int = 0
    num_parts: int = 1
    num_continued: int = 0
    queued_second: int = _NEVER

    @property
    def is_on_disk(self) -> bool:
        """Whether the store has acknowledged a copy."""
        return self.disk_expires_at > 0.0

    @property
    def is_first_page(self) -> bool:
        """Whether this is the first of the further pages of a block."""
        return self.kind == 1 and not self.part

    @property
    def times(self) -> tuple[float, float, float]:
        """The times from which, together with the claims, the entry's deadline is computed."""
        return self.computed_at, self.last_used, self.pinned_until


_SHARED = [name for name in Entry.__struct_fields__ if name in BlockRecord.__struct_fields__]
"""Fields that an entry and the record of the same block have in common."""


class Due(NamedTuple):
    """What has become due.

    Attributes:
        expired: entries that may no longer be served.
        unpinned: other blocks whose pin has ended.
        owed_no_more: other blocks whose claim on the disk has ended before the disk had them.
    """

    expired: list[Entry]
    unpinned: list[BlockHash]
    owed_no_more: list[BlockHash]


class Catalog:
    """Entries by block hash, and the order in which they expire.

    Entries are queued by the earliest second in which they can expire. An entry that is used
    meanwhile keeps its place and is queued again when that second comes. An entry that is
    forgotten leaves the queue.

    Invariants (`check`): every entry is under its own hash; every entry is queued once, no later
    than its deadline, so that the sweep cannot miss it; nothing else is queued; `pinned` holds the
    blocks of the entries that have a pin, and `blocks_with_pages` those whose first pages have
    entries; every block in `owed` and `given_up` has an entry, is not on disk, and may go there.

    Attributes:
        pinned: blocks that the pools evict last.
        owed: blocks that a policy lets onto the disk and that the disk does not have, oldest first.
            One whose claim on the disk has just ended may still be among them.
        given_up: the same, of blocks that may be evicted without a copy; a stop tries them again.
        superseded: pages behind which requests have gone on, and that no other is likely to need,
            and blocks behind which none can; they are evicted first, and go to no slower tier.
        reach: behind which blocks requests can go on, of models that need further pages for that.
        blocks_with_pages: blocks of which the first further page has an entry.
        num_added: how many entries have come so far; one that comes again counts again.
        is_behind: whether the last call of `due` left entries unexamined that were due.
    """

    def __init__(self, policies: RetentionPolicies) -> None:
        self._policies = policies
        self._entries: dict[BlockHash, Entry] = {}
        self.reach = Reach(self._entries)
        self.pinned: set[BlockHash] = set()
        self.owed: OrderedDict[BlockHash, None] = OrderedDict()
        self.given_up: set[BlockHash] = set()
        self.superseded: set[BlockHash] = set()
        self.blocks_with_pages: set[BlockHash] = set()
        self._queued: dict[int, dict[BlockHash, None]] = {}
        self._seconds: list[int] = []  # a heap of the keys of `_queued`
        self._begun: Iterator[BlockHash] | None = None  # of a second that has begun
        self._begun_second = _NEVER
        self._soon: list[tuple[float, BlockHash]] = []  # a heap: not yet due when examined
        self._held_by_disk: set[BlockHash] = set()  # queued by the disk's deadline
        self.miss_reasons = MissReasons()
        self.num_added = 0
        self.is_behind = False

    @property
    def num_queued(self) -> int:
        """The number of blocks that are queued to expire."""
        return sum(map(len, self._queued.values())) + len(self._soon)

    def get(self, block_hash: BlockHash | None) -> Entry | None:
        """Return the entry, expired or not."""
        return self._entries.get(block_hash) if block_hash is not None else None

    def entries(self) -> list[Entry]:
        """Return all entries, oldest insertion first."""
        return list(self._entries.values())

    def sweep(self) -> Iterator[list[Entry]]:
        """Yield all entries, some at a time, newest insertion first.

        Entries that leave meanwhile are passed over. Of those that come meanwhile, the ones that
        the disk has are yielded too: they may have been yielded before, have left, and been loaded
        again.
        """
        num_seen, entries = self.num_added, self.entries()
        while entries:
            while entries:  # which gives up what has left little by little, as that takes time too
                some = [entries.pop() for _ in range(min(len(entries), PIECE_BLOCKS))]
                yield [entry for entry in some if self._entries.get(entry.block_hash) is entry]
            come = [*islice(reversed(self._entries.values()), self.num_added - num_seen)][::-1]
            entries = [entry for entry in come if entry.is_on_disk]
            num_seen = self.num_added

    def add(self, entry: Entry) -> Entry:
        """Insert an entry, or add its claims to the entry that the block already has.

        The age of the block then counts from the earlier `computed_at` of the two, so that no copy
        that is served is older than that.
        """
        return self.add_all([entry])[0]

    def add_all(self, entries: Sequence[Entry]) -> list[Entry]:
        """Insert entries as `add` does; entries with equal deadlines are queued together."""
        added, come = list[Entry](), list[Entry]()
        for entry in entries:
            known = self._entries.get(entry.block_hash)
            if known is None:
                known = self._entries[entry.block_hash] = entry
                come.append(entry)
            elif known is not entry:
                known.claims |= entry.claims
                known.computed_at = min(known.computed_at, entry.computed_at)
                known.last_used = max(known.last_used, entry.last_used)
                known.pinned_until = max(known.pinned_until, entry.pinned_until)
                known.disk_expires_at = max(known.disk_expires_at, entry.disk_expires_at)
            added.append(known)
        self.num_added += len(come)
        self.blocks_with_pages.update(it.parent_hash for it in come if it.is_first_page)
        if self.blocks_with_pages:
            self._note_come(come)
        self._queue(added)
        self._note_owed(added)
        return added

    def _note_come(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            if entry.is_first_page:
                self.reach.add_place(entry.parent_hash)
            elif not entry.kind:
                self.reach.add(entry.block_hash)

    def note_on_disk(self, entry: Entry, until: float) -> None:
        """Note that the store has acknowledged a copy, and its deadline."""
        entry.disk_expires_at = until
        self._note_owed([entry])

    def note_not_on_disk(self, entry: Entry) -> None:
        """Note that the store has no copy after all.

        A block that no policy claims keeps the disk's deadline.
        """
        if entry.claims:
            entry.disk_expires_at = 0.0
            self._queue([entry])
            self._note_owed([entry])

    def give_up(self, entry: Entry) -> None:
        """Note that the block may be evicted without a copy in a slower tier."""
        entry.is_droppable = True
        if entry.block_hash in self.owed and self._entries.get(entry.block_hash) is entry:
            del self.owed[entry.block_hash]
            self.given_up.add(entry.block_hash)

    def supersede(self, hashes: Iterable[BlockHash]) -> None:
        """Note that pages are superseded."""
        for block_hash in hashes:
            self.superseded.add(block_hash)
            self._forget_owed(block_hash)

    def need_again(self, hashes: Iterable[BlockHash]) -> list[BlockHash]:
        """Note that blocks are not superseded any more; return those that were."""
        found = [block_hash for block_hash in hashes if block_hash in self.superseded]
        self.superseded.difference_update(found)
        self._note_owed(map(self._entries.__getitem__, found))
        return found

    def try_again(self) -> list[BlockHash]:
        """Count no demotion as given up any more; return the blocks whose demotion was."""
        given_up = list[BlockHash]()
        for entry in self._entries.values():
            if entry.is_droppable:
                entry.is_droppable = False
                given_up.append(entry.block_hash)
        self.owed.update(dict.fromkeys(self.given_up))
        self.given_up.clear()
        return given_up

    def _note_owed(self, entries: Iterable[Entry]) -> None:
        """Note which of these blocks are owed to the disk, given up or not.

        A block that is noted already keeps its place.
        """
        owed, given_up = self.owed, self.given_up
        claims, may_go = None, False
        for entry in entries:
            if given_up and not entry.is_droppable:
                given_up.discard(entry.block_hash)
            if entry.disk_expires_at > 0.0 or entry.block_hash in self.superseded:
                self._forget_owed(entry.block_hash)
                continue
            if entry.claims is not claims:  # blocks of one prompt share their claims
                claims, may_go = entry.claims, self.may_enter(entry.claims, Tier.DISK)
            if may_go and not entry.is_droppable:
                owed[entry.block_hash] = None
            elif may_go:
                given_up.add(entry.block_hash)

    def _forget_owed(self, block_hash: BlockHash) -> None:
        self.owed.pop(block_hash, None)
        self.given_up.discard(block_hash)

    def forget_disk(self) -> list[BlockHash]:
        """Count no block as being on disk, since a new worker may have started with an empty store.

        A block that the store still has is acknowledged without being written again. A block that
        no policy claims keeps the disk's deadline.

        Returns:
            The blocks whose demotion was given up; that is tried again.
        """
        given_up: list[BlockHash] = []
        for block_hash, entry in self._entries.items():
            if entry.claims:
                if entry.is_droppable:
                    given_up.append(block_hash)
                entry.disk_expires_at = 0.0
                entry.is_droppable = False
        self._note_owed(self._entries.values())
        held, self._held_by_disk = self._held_by_disk, set()
        self._queue(filter(None, map(self._entries.get, held)))
        return given_up

    def _queue(self, entries: Iterable[Entry]) -> None:
        """Queue entries by the deadlines of their claims, or by the ends of their pins if earlier.

        Most blocks of a prompt share one deadline, which is computed once.
        """
        lives: dict[tuple[object, ...], tuple[float, float]] = {}
        for entry in entries:
            life = entry.claims, entry.disk_expires_at, *entry.times
            times = lives.get(life)
            if times is None:
                times = lives[life] = self._times_of(entry)
            due, pin_ends = times
            if pin_ends:
                entry.pinned_until = pin_ends
                self.pinned.add(entry.block_hash)
            self._queue_at(entry, due)
            if not entry.claims:
                self._held_by_disk.add(entry.block_hash)

    def _times_of(self, entry: Entry) -> tuple[float, float]:
        """Return when an entry has to be examined, and when its pin ends (0.0 without a pin)."""
        due = entry.disk_expires_at
        if entry.claims:
            due = self._policies.deadline(entry.claims, *entry.times)
            of_disk = self._policies.disk_deadline(entry.claims, *entry.times)
            if of_disk is not None and not entry.is_on_disk:
                due = min(due, of_disk)
        pin_ends = entry.pinned_until
        return (min(due, pin_ends), min(self.deadline(entry), pin_ends)) if pin_ends else (due, 0.0)

    def _queue_at(self, entry: Entry, due: float) -> None:
        """Queue an entry for the second of `due`, unless it is queued for an earlier second."""
        second, block_hash = int(due), entry.block_hash
        if entry.queued_second == _SOON:
            heapq.heappush(self._soon, (due, block_hash))
        if entry.queued_second <= second:
            return
        self._unqueue(entry)
        entry.queued_second = second
        if second not in self._queued:
            self._queued[second] = {}
            heapq.heappush(self._seconds, second)
        self._queued[second][block_hash] = None

    def _unqueue(self, entry: Entry) -> None:
        """Take an entry out of the queue; if its second has begun, `due` skips it."""
        if (queued := self._queued.get(entry.queued_second)) is not None:
            queued.pop(entry.block_hash, None)
        self._held_by_disk.discard(entry.block_hash)
        entry.queued_second = _NEVER

    def entry_of(self, lent: Lent, life: BlockLife) -> Entry:
        """Return the entry of a block that was loaded from disk, without inserting it.

        A retention that is no longer configured falls back to what the disk itself allows: the
        entry then lives by the disk's deadline.
        """
        assert lent.parent_hash is not None, "a chain is known"
        assert lent.position is not None, "a chain is known"
        return Entry(
            block_hash=BlockHash(lent.block_hash),
            parent_hash=BlockHash(lent.parent_hash),
            root=BlockHash(lent.root),
            namespace=lent.namespace,
            position=lent.position,
            computed_at=life.computed_at,
            last_used=life.last_used,
            claims=frozenset({life.retention}) & self._policies.names,
            pinned_until=life.pinned_until,
            disk_expires_at=life.expires_at,
            hits=life.hits,
            kind=lent.kind,
            part=lent.part,
            num_parts=lent.num_parts,
        )

    def claim(
        self, entries: Sequence[Entry], claims: Set[str], now: float, pinned_until: float = 0.0
    ) -> list[BlockHash]:
        """Note that a request with these retentions used blocks now, and how long it pins them.

        A pin lasts no longer than the claims let a block live. A pin or a claim that was made
        earlier is not shortened.

        Returns:
            The blocks that slower tiers may be owed from now on.
        """
        changed, superseded = list[BlockHash](), self.superseded
        for entry in entries:
            is_again = entry.is_droppable or entry.block_hash in superseded
            if is_again or not claims <= entry.claims:
                entry.claims |= claims
                entry.is_droppable = False
                superseded.discard(entry.block_hash)
                changed.append(entry.block_hash)
            if now > entry.last_used:
                entry.last_used = now
            if pinned_until > now:
                entry.pinned_until = max(entry.pinned_until, pinned_until)
        if pinned_until > now:
            self.add_all(entries)
        else:
            self._note_owed(entries)
        return changed

    def forget(self, block_hash: BlockHash, reason: MissReason) -> None:
        """Drop the entry of a block that no RAM tier holds any longer; see `MissReasons.why`."""
        entry = self._entries.pop(block_hash, None)
        if entry is not None:
            self._unqueue(entry)
            if entry.kind:
                self.reach.end_place(entry.parent_hash)
            elif self.blocks_with_pages:
                self.reach.forget(entry.block_hash, entry.parent_hash)
            if entry.is_first_page:
                self.blocks_with_pages.discard(entry.parent_hash)
        self.pinned.discard(block_hash)
        self.superseded.discard(block_hash)
        self._forget_owed(block_hash)
        self.miss_reasons.note(block_hash, reason, entry.disk_expires_at if entry else 0.0)

    def deadline(self, entry: Entry) -> float:
        """Return when the entry becomes unreachable."""
        if not entry.claims:
            return entry.disk_expires_at
        until = self._policies.deadline(entry.claims, *entry.times)
        return max(until, entry.disk_expires_at)

    def deadlines(self, entries: Iterable[Entry]) -> list[float]:
        """Return the `deadline` of each entry; one that many of them share is computed once."""
        lives: dict[tuple[object, ...], float] = {}
        deadlines: list[float] = []
        for entry in entries:
            life = entry.claims, entry.disk_expires_at, *entry.times
            if (until := lives.get(life)) is None:
                until = lives[life] = self.deadline(entry)
            deadlines.append(until)
        return deadlines

    def is_expired(self, entry: Entry, now: float) -> bool:
        """Return whether the entry may no longer be served."""
        return now >= self.deadline(entry)

    def disk_deadline(self, entry: Entry, now: float) -> float | None:
        """Return until when the disk may keep the block, or None if it may not have the block."""
        until = self._policies.disk_deadline(entry.claims, *entry.times)
        return until if until is not None and until > now else None

    def may_enter(self, claims: frozenset[str], tier: Tier) -> bool:
        """Return whether one of these policies lets a block into a tier."""
        return tier in self._policies.tiers(claims)

    def record(self, entry: Entry, *, size_bytes: int, expires_at: float) -> BlockRecord:
        """Return the record of the block that is sent to the store."""
        shared: dict[str, Any] = {name: getattr(entry, name) for name in _SHARED}
        return BlockRecord(
            **shared, size_bytes=size_bytes, retention=self.retention(entry), expires_at=expires_at
        )

    def retention(self, entry: Entry) -> str:
        """Return the longest policy that asked for a block; "" if none that is configured has."""
        return self._policies.longest(entry.claims) if entry.claims else ""

    def touch_items(self, entries: Iterable[Entry], now: float) -> list[TouchItem]:
        """Return the messages that tell the disk of blocks' uses; note the deadlines in them.

        Most blocks of a prompt share one deadline, which is computed once.
        """
        lives: dict[tuple[object, ...], tuple[float | None, str | None]] = {}
        items: list[TouchItem] = []
        for entry in entries:
            life = entry.claims, *entry.times
            claim = lives.get(life)
            if claim is None:
                until = self.disk_deadline(entry, now)
                retention = None if until is None else self._policies.longest(entry.claims)
                claim = lives[life] = until, retention
            if claim[0] is not None:
                entry.disk_expires_at = max(entry.disk_expires_at, claim[0])
            use = entry.last_used, *claim, entry.pinned_until, entry.hits
            items.append(TouchItem(entry.block_hash, *use))
        return items

    def due(self, now: float, at_most: int = sys.maxsize) -> Due:
        """Take what is due off the queue; what has not expired is queued again.

        The cost depends on how many entries are due, not on how many there are. If more than
        `at_most` have to be examined, `is_behind` is set and the next call continues.
        """
        due = Due([], [], [])
        for _ in range(at_most):
            entry = self._next_due(now)
            if entry is None:
                break
            is_pin_over = 0.0 < entry.pinned_until <= now
            if is_pin_over:
                entry.pinned_until = 0.0
                self.pinned.discard(entry.block_hash)
            is_owed_no_more = entry.block_hash in self.owed and not self.disk_deadline(entry, now)
            if is_owed_no_more:  # for good, even if the clock is set back
                self._forget_owed(entry.block_hash)
                entry.claims = self._policies.without_disk(entry.claims)
            if self.is_expired(entry, now):
                due.expired.append(entry)
                continue
            self._queue_again(entry, now)
            if is_pin_over:
                due.unpinned.append(entry.block_hash)
            if is_owed_no_more:
                due.owed_no_more.append(entry.block_hash)
        is_soon = bool(self._soon) and self._soon[0][0] <= now
        is_begun = bool(self._seconds) and self._seconds[0] <= now
        self.is_behind = is_soon or is_begun or self._begun is not None
        return due

    def _next_due(self, now: float) -> Entry | None:
        """Take the next entry that may be due off the queue."""
        while self._soon and self._soon[0][0] <= now:
            entry = self._entries.get(heapq.heappop(self._soon)[1])
            if entry is not None and entry.queued_second == _SOON:
                entry.queued_second = _NEVER
                return entry
        while self._begun is not None or (self._seconds and self._seconds[0] <= now):
            if self._begun is None:
                self._begun_second = heapq.heappop(self._seconds)
                self._begun = iter(self._queued.pop(self._begun_second))
            for block_hash in self._begun:
                entry = self._entries.get(block_hash)
                if entry is not None and entry.queued_second == self._begun_second:
                    self._unqueue(entry)  # it may have come back since, for the same second
                    return entry
            self._begun = None
        return None

    def _queue_again(self, entry: Entry, now: float) -> None:
        """Queue an entry that is not due yet."""
        due, _ = self._times_of(entry)
        is_held_by_disk = due <= now
        if is_held_by_disk:  # its claims have ended, but not the disk's deadline
            due = self.deadline(entry)
        if int(due) <= now:
            entry.queued_second = _SOON
            heapq.heappush(self._soon, (due, entry.block_hash))
        else:
            self._queue_at(entry, due)
        if is_held_by_disk:
            self._held_by_disk.add(entry.block_hash)

    def check(self) -> None:
        """Raise IntegrityError if an invariant of the class docstring is broken."""
        queued: dict[BlockHash, float] = {}
        for when, block_hash in self._soon:
            queued[block_hash] = min(when, queued.get(block_hash, when))
        for second, hashes in self._queued.items():
            queued.update(dict.fromkeys(hashes, float(second)))
        in_seconds = [each for hashes in self._queued.values() for each in hashes]
        if len(set(in_seconds)) < len(in_seconds) or not self._entries.keys() >= set(in_seconds):
            raise IntegrityError("a block is queued twice to expire, or it has no entry")
        for block_hash, entry in self._entries.items():
            if entry.block_hash != block_hash:
                raise IntegrityError(
                    f"entry {entry.block_hash.hex()[:12]} is stored under another key"
                )
            has_begun = self._begun is not None and entry.queued_second == self._begun_second
            if not has_begun and queued.get(block_hash, float("inf")) > self.deadline(entry):
                raise IntegrityError(f"entry {block_hash.hex()[:12]} is not queued to expire")
        first_pages = (entry for entry in self._entries.values() if entry.is_first_page)
        if self.blocks_with_pages != {entry.parent_hash for entry in first_pages}:
            raise IntegrityError("`blocks_with_pages` differs from the pages of the entries")
        self.reach.check()
        if self.pinned != {each for each, e in self._entries.items() if e.pinned_until}:
            raise IntegrityError("`pinned` differs from the pins of the entries")
        if not self._entries.keys() >= self.superseded:
            raise IntegrityError("a page is superseded that has no entry")
        if not self.superseded.isdisjoint([*self.owed, *self.given_up]):
            raise IntegrityError("a page is superseded and owed to the disk")
        for block_hash in [*self.owed, *self.given_up]:
            owed = self._entries.get(block_hash)
            if owed is None or owed.is_on_disk or not self.may_enter(owed.claims, Tier.DISK):
                raise IntegrityError(f"block {block_hash.hex()[:12]} is not owed to the disk")
            if owed.is_droppable == (block_hash in self.owed):
                raise IntegrityError(f"block {block_hash.hex()[:12]} is owed and given up")
