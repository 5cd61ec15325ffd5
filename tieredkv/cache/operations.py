"""What operators ask of VRAM and host memory, and what is reported of them.

Long answers are made in pieces, between which other work goes on. Called by the engine's thread
only.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from tieredkv.cache.block_lists import list_blocks
from tieredkv.cache.chain import Chain
from tieredkv.cache.demotion import Demoter
from tieredkv.cache.departures import Departures
from tieredkv.cache.disk_link import TakeFound
from tieredkv.cache.plan import Planner
from tieredkv.cache.promotion import Promoter
from tieredkv.cache.prompt_report import PromptReport, Source, report
from tieredkv.cache.stats import cache_stats
from tieredkv.cache.tiers import Tiers
from tieredkv.pieces import PIECE_BLOCKS, SCANNED_BLOCKS, Pieces, cut
from tieredkv.tier import HASHES, BlockNames, ControlRequest, TierState
from tieredkv.types import BlockHash, Tier


class KeptBlock(Protocol):
    """A block of VRAM or host memory, or one that is being read, as operators choose it."""

    @property
    def block_hash(self) -> BlockHash: ...

    @property
    def namespace(self) -> bytes: ...

    @property
    def last_used(self) -> float: ...


ChooseBlock = Callable[[KeptBlock], bool]
"""Chooses blocks."""


class Freed(NamedTuple):
    """How many copies were evicted of blocks, and of pages of layers with windows; their bytes."""

    num_copies: int
    num_pages: int
    num_bytes: int


class Sent(NamedTuple):
    """How many blocks move to a slower tier, and how many pages of layers with windows.

    Attributes:
        num_refused: blocks that do not move, as no claim on them allows the disk.
    """

    num_blocks: int
    num_pages: int
    num_refused: int


class Operations:
    """Carries out what operators ask of the tiers of one engine.

    Args:
        tiers: the tiers.
        promoter: knows what a load would take.
        demoter: is told when there is more room.
        departures: moves chosen blocks down.
    """

    def __init__(
        self, tiers: Tiers, promoter: Promoter, demoter: Demoter, departures: Departures
    ) -> None:
        self._tiers, self._promoter = tiers, promoter
        self._demoter, self._departures = demoter, departures
        self._asked = list[ControlRequest]()

    def set_shares(self, shares: Mapping[bytes, float]) -> None:
        """Set the part of every tier that each tenant keeps, by the operator's wish."""
        self._tiers.shares.give(shares)

    def evict(
        self, is_wanted: ChooseBlock, only: Collection[Tier] | None = None, *, is_dry: bool = False
    ) -> Pieces[Freed]:
        """Make copies unreachable in VRAM and host memory; see `Freed`.

        Without `only`, a wanted block that is being read from disk does not become ready, and one
        that is being written to disk is deleted there after the write. A block that is computed
        meanwhile may be spared.

        Args:
            is_wanted: which blocks to evict.
            only: tiers whose copies are evicted; None for both.
            is_dry: whether copies are only counted.
        """
        tiers, copies, num_pages = self._tiers, Counter[Tier](), 0
        of = self._copies if is_dry else self._drop
        for entries in tiers.catalog.sweep():
            for entry in filter(is_wanted, entries):
                gone = of(entry.block_hash, only)
                copies.update(gone)
                num_pages += len(gone) if entry.kind else 0
            if not is_dry:
                self._demoter.note_change()
            yield
        if only is None and not is_dry:
            for read in tiers.disk_link.reads:
                if read.page.block_hash and is_wanted(read):
                    tiers.host.drop(read.block_hash)
        size = tiers.bytes_in
        num_bytes = sum(count * size[tier] for tier, count in copies.items())
        return Freed(copies.total() - num_pages, num_pages, num_bytes)

    def _copies(self, block_hash: BlockHash, only: Collection[Tier] | None) -> list[Tier]:
        """Return which tiers, or which of some, have a copy."""
        pools = self._tiers.pools
        return [it for it in (pools if only is None else only) if pools[it].lookup(block_hash)]

    def _drop(self, block_hash: BlockHash, only: Collection[Tier] | None) -> list[Tier]:
        """Drop a block, or its copies in some tiers; return which tiers had it."""
        if only is None:
            return self._tiers.drop(block_hash, "admin")
        return [it for it in only if self._tiers.drop_copy(it, block_hash)]

    def send_down(self, is_wanted: ChooseBlock, to: Tier, *, is_dry: bool = False) -> Pieces[Sent]:
        """Begin to move blocks to a slower tier.

        Args:
            is_wanted: which blocks to move.
            to: the slower tier.
            is_dry: whether they are only counted.
        """
        catalog, device, now = self._tiers.catalog, self._tiers.device, self.now()
        num_blocks = num_pages = num_refused = 0
        for some in catalog.sweep():
            entries = [*filter(is_wanted, some)]
            if to is Tier.HOST:
                going = [it for it in entries if device.lookup(it.block_hash)]
            else:
                going = [it for it in entries if it.is_on_disk or catalog.disk_deadline(it, now)]
                num_refused += sum(not it.kind for it in entries) - sum(not it.kind for it in going)
            num_blocks += sum(not it.kind for it in going)
            num_pages += sum(it.kind > 0 for it in going)
            if not is_dry:
                self._departures.send([entry.block_hash for entry in going], to)
            yield
        return Sent(num_blocks, num_pages, num_refused)

    def now(self) -> float:
        """Return the time by which blocks expire."""
        return self._tiers.clock.now()

    def window_pages(self) -> Pieces[Counter[Tier]]:
        """Count the pages of layers with windows in VRAM and host memory.

        Pages that come or go meanwhile may be counted or not.
        """
        counts = Counter[Tier]()
        for entries in cut(self._tiers.catalog.entries(), SCANNED_BLOCKS):
            pages = [entry.block_hash for entry in entries if entry.kind]
            for tier, pool in self._tiers.pools.items():
                counts[tier] += len(pages) - pool.find(pages).count(None)
            yield
        return counts

    def bytes_in(self, tier: Tier) -> int:
        """Return the bytes of one block or page in VRAM or host memory."""
        return self._tiers.bytes_in[tier]

    def stats(self, max_model_len: int) -> dict[str, Any]:
        """Return what the engine reports of the tiers: sizes, counters, and what it has learnt.

        Args:
            max_model_len: tokens of the longest context.
        """
        return cache_stats(self._tiers, max_model_len)

    @property
    def disk(self) -> TierState | None:
        """The state of the disk tier; None without one."""
        store = self._tiers.store
        return None if store is None else store.state()

    def reveal(self, names: Sequence[bytes]) -> list[bytes]:
        """Return the hashes, or their first bytes, of which names in the store were made."""
        return self._names.reveal(names)

    @property
    def _names(self) -> BlockNames:
        """What the store calls blocks; without a store, or before it was ever up, their hashes."""
        store = self._tiers.store
        return HASHES if store is None else store.names

    def note_asked(self, asked: ControlRequest) -> None:
        """Note what an operator has asked the store's worker."""
        self._asked.append(asked)

    def take_asked(self) -> list[ControlRequest]:
        """Return what operators have asked the store's worker since the last call."""
        asked, self._asked = self._asked, []
        return asked

    def answer(self, asked: ControlRequest, body: dict[str, Any], has_more: bool) -> None:
        """Answer an operator through the store's worker, whole or in part."""
        assert self._tiers.store is not None
        self._tiers.store.reply(asked.id, body, has_more)

    def list_blocks(self) -> Generator[dict[str, Any], None, None]:
        """Make the parts of a list of all blocks by their names; see `operate.ram`."""
        return list_blocks(self._tiers, self._names)

    def roots(self) -> Pieces[dict[BlockHash, bytes]]:
        """Return the roots of all chains in VRAM and host memory, each with its namespace."""
        roots = dict[BlockHash, bytes]()
        for entries in cut(self._tiers.catalog.entries(), SCANNED_BLOCKS):
            roots.update((entry.root, entry.namespace) for entry in entries)
            yield
        return roots

    def look_up(self, hashes: Sequence[BlockHash], then: TakeFound) -> None:
        """Call `then` with what the disk has of these blocks, once it has answered."""
        self._tiers.disk_link.look_up(hashes, then)

    def inspect(
        self,
        chain: Chain,
        num_tokens: int,
        others: Mapping[BlockHash, str],
        on_disk: Mapping[bytes, bytes],
    ) -> Pieces[PromptReport]:
        """Report what the tiers have of a prompt, while nothing is held or loaded for it.

        Args:
            chain: of the prompt.
            num_tokens: of the prompt.
            others: what its first block is called below other roots, and how these differ.
            on_disk: the blocks of both that the disk has.
        """
        tiers, hashes, now = self._tiers, chain.hashes, self.now()

        def source(block_hash: BlockHash) -> Source:
            entry = tiers.catalog.get(block_hash)
            if entry is not None and not tiers.catalog.is_expired(entry, now):
                for tier, pool in tiers.pools.items():
                    if (copy := pool.lookup(block_hash)) is not None and copy.is_ready:
                        return tier
            return Tier.DISK if block_hash in on_disk else None

        def usable(block_hash: BlockHash) -> Source:
            found = source(block_hash)
            return found if tiers.can_load or found is Tier.DEVICE else None

        def why_missed(index: int) -> Pieces[str]:
            if source(hashes[index]):
                return "loads_off"
            reason = tiers.catalog.miss_reasons.why(hashes[index], now)
            if not index and reason == "never_seen":
                for some in cut(others.items(), PIECE_BLOCKS):
                    for block_hash, kind in some:
                        if source(block_hash):
                            return kind
                    yield
            return reason

        sources = list[Source]()
        for some in cut(hashes, PIECE_BLOCKS):
            sources += map(usable, some)
            yield

        def planner() -> Planner:
            return self._promoter.planner(0.0, time.monotonic())

        told = num_tokens, tiers.block_size, sources, why_missed, planner
        if (tail := chain.tail) is None:
            return (yield from report(*told, chain.read_ends))

        def pages_at(end: int) -> list[Source]:
            return [usable(tail.hashes[index]) for index in tail.needed(end)]

        ends = yield from tail.ends(usable)
        return (yield from report(*told, ends, "no_anchor", pages_at))

    def vram_blocks(self, hashes: Sequence[BlockHash]) -> dict[BlockHash, int]:
        """Return the ids of the blocks that lie in VRAM with all their layers."""
        found = zip(hashes, self._tiers.device.find(hashes), strict=True)
        return {each: it.block_id for each, it in found if it is not None and it.is_whole}
