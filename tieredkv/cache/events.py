"""What appears in each tier and what leaves it, for those who follow the tiers from outside.

The pools tell of blocks in VRAM and host memory, and the store of blocks on disk. A block is
announced if the token ids of its request are given (see `Chain.token_ids`); all other blocks are
passed over in silence. Pages of layers with windows are not announced, but the anchors that they
make. This module knows neither what a follower is nor how it is told.

Called by the engine's thread only.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tieredkv.cache.chain import Chain
from tieredkv.cache.counters import CacheCounters
from tieredkv.cache.pool import BlockPool, PoolChange
from tieredkv.cache.tail import Tail
from tieredkv.errors import IntegrityError
from tieredkv.types import BlockHash, Tier


class BlockTokens(NamedTuple):
    """What an announced block holds.

    Attributes:
        parent_hash: of the block before it; None for the first of a chain.
        token_ids: u32 in the machine's byte order.
    """

    parent_hash: BlockHash | None
    token_ids: bytes


class Change(NamedTuple):
    """A block that has appeared in a tier, or has left it if `content` is None.

    Attributes:
        is_anchor: whether it is the anchor behind the block that has appeared or left.
    """

    tier: Tier
    block_hash: BlockHash
    content: BlockTokens | None
    is_anchor: bool = False


Publish = Callable[[list[Change]], bool]
"""Takes the changes of a step, oldest first, without waiting; returns whether it took them."""


@dataclass(slots=True, eq=False)
class Anchor:
    """A place behind a block where a request can go on if it has some pages of windows.

    Attributes:
        block_hash, content: of the block.
        pages: those that a request needs.
        num_held: how many of them each tier has.
    """

    block_hash: BlockHash
    content: BlockTokens
    pages: Sequence[BlockHash]
    num_held: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))


class AnchorEvents:
    """Makes a change whenever a tier has all pages of an anchor, or lacks one again.

    Several anchors may need the same page. Memory grows with the pages of the anchors that are
    known: some 400 bytes for each one.

    Invariants (`check`): an anchor counts the pages that the tiers have, of which there is one at
    least; no page is known that no anchor needs.

    Args:
        note: called with each change.
    """

    def __init__(self, note: Callable[[Change], object]) -> None:
        self._note = note
        self._anchors = dict[BlockHash, Anchor]()
        self._of_page = defaultdict[BlockHash, list[Anchor]](list)
        self._held: dict[Tier, set[BlockHash]] = {tier: set() for tier in Tier}

    def learn(self, anchor: Anchor, held: dict[Tier, list[BlockHash]]) -> None:
        """Learn of an anchor that may be known, and which of its pages each tier has."""
        if anchor.block_hash not in self._anchors and any(held.values()):
            self._anchors[anchor.block_hash] = anchor
            for page in anchor.pages:
                self._of_page[page].append(anchor)
            for tier, known in self._held.items():
                self._count(tier, [anchor], sum(page in known for page in anchor.pages))
        for tier, pages in held.items():
            self.hold(tier, pages)

    def hold(self, tier: Tier, pages: Iterable[BlockHash]) -> None:
        """Note that a tier has some pages, of which those count that an anchor needs."""
        held = self._held[tier]
        for page in pages:
            if page in self._of_page and page not in held:
                held.add(page)
                self._count(tier, self._of_page[page], 1)

    def lose(self, tier: Tier, pages: Iterable[BlockHash]) -> None:
        """Note that a tier has some pages no more."""
        held = self._held[tier]
        for page in pages:
            if page in held:
                held.remove(page)
                self._count(tier, [*self._of_page[page]], -1)

    def lose_all(self, tier: Tier) -> None:
        """Note that a tier has no page any more."""
        self.lose(tier, [*self._held[tier]])

    def _count(self, tier: Tier, anchors: Iterable[Anchor], num_pages: int) -> None:
        """Add to the pages of some anchors that a tier has; forget those without any page."""
        for anchor in anchors:
            was_whole = anchor.num_held[tier] == len(anchor.pages)
            anchor.num_held[tier] += num_pages
            is_whole = anchor.num_held[tier] == len(anchor.pages)
            if is_whole != was_whole:
                content = anchor.content if is_whole else None
                self._note(Change(tier, anchor.block_hash, content, is_anchor=True))
            if num_pages < 0 and not any(anchor.num_held.values()):
                self._forget(anchor)

    def _forget(self, anchor: Anchor) -> None:
        del self._anchors[anchor.block_hash]
        for page in anchor.pages:
            self._of_page[page].remove(anchor)
            if not self._of_page[page]:
                del self._of_page[page]

    def check(self, pools: dict[Tier, BlockPool]) -> None:
        """Raise IntegrityError if an invariant of the class docstring is broken."""
        for anchor in self._anchors.values():
            counts = {
                tier: sum(page in held for page in anchor.pages)
                for tier, held in self._held.items()
            }
            if counts != anchor.num_held or not any(counts.values()):
                raise IntegrityError(f"an anchor counts {anchor.num_held} pages, but has {counts}")
        for tier, held in self._held.items():
            if not held <= self._of_page.keys():
                raise IntegrityError("a page is known that no anchor needs")
            if (pool := pools.get(tier)) is not None:
                ready = [block for block in pool.find(self._of_page) if block and block.is_ready]
                if {block.block_hash for block in ready} != held:
                    raise IntegrityError(f"the pages in {tier} are not those that are counted")


class BlockEvents:
    """Gathers the changes of a step.

    Nothing is gathered before `publish_to`. Memory grows with the announced blocks: some 300 bytes
    for each one that RAM holds, and some 100 for each one on disk.

    Invariant (`check`): contents are known of no block that neither pool has in its index.

    Args:
        device, host: the pools of VRAM and host memory.
        block_size: tokens of one block.
        counters: count the batches.
    """

    def __init__(
        self, device: BlockPool, host: BlockPool, block_size: int, counters: CacheCounters
    ) -> None:
        self._pools = {Tier.DEVICE: device, Tier.HOST: host}
        self._block_size, self._counters = block_size, counters
        self._tier_of = {device: Tier.DEVICE, host: Tier.HOST}
        self._in_pools: list[PoolChange] = []  # which the pools fill, and `_take_in` empties
        self._publish: Publish = lambda _: True
        self._changes: list[Change] = []
        self._contents: dict[BlockHash, BlockTokens] = {}  # of blocks in an index of the pools
        self._on_disk: set[BlockHash] = set()  # announced there
        self._anchors = AnchorEvents(lambda change: self._changes.append(change))

    def publish_to(self, publish: Publish) -> None:
        """Have each `flush` publish what has changed since the last one."""
        self._publish = publish
        for pool in self._pools.values():
            pool.changes = self._in_pools

    def flush(self) -> None:
        """Publish the changes since the last call; called once a step."""
        self._take_in()
        if self._changes:
            changes, self._changes = self._changes, []
            self._counters.event_batches += 1
            self._counters.dropped_event_batches += not self._publish(changes)

    # VRAM and host memory

    def learn(self, chain: Chain, first: int, last: int) -> None:
        """Learn the contents of the blocks `[first, last)` of a chain, which have a place in RAM.

        Blocks that were not known and are there already are announced.
        """
        if chain.token_ids is None:
            return
        self._take_in()
        contents, hashes = self._contents, chain.hashes
        for index in range(first, last):
            if (block_hash := hashes[index]) in contents:
                continue
            contents[block_hash] = content = self._content(chain, index)
            for tier, pool in self._pools.items():
                block = pool.lookup(block_hash)
                if block is not None and block.is_ready:
                    self._changes.append(Change(tier, block_hash, content))

    def learn_anchors(
        self, tail: Tail, ends: Iterable[int], is_on_disk: Callable[[BlockHash], bool]
    ) -> None:
        """Learn of the anchors of an announced chain.

        Args:
            tail: the pages of the chain.
            ends: behind how many blocks.
            is_on_disk: tells whether the disk has a page.
        """
        if (chain := tail.of).token_ids is None:
            return
        self._take_in()
        for end in ends:
            needed = tail.needed(end)
            pages = tail.hashes[needed.start : needed.stop]
            held = {Tier.DISK: [page for page in pages if is_on_disk(page)]}
            for tier, pool in self._pools.items():
                found = zip(pages, pool.find(pages), strict=True)
                held[tier] = [page for page, it in found if it is not None and it.is_ready]
            self._anchors.learn(
                Anchor(chain.hashes[end - 1], self._content(chain, end - 1), pages), held
            )

    def _take_in(self) -> None:
        """Note what has appeared in the pools and has left them since the last call."""
        for pool, block_hash, is_there, was_ready in self._in_pools:
            tier, content = self._tier_of[pool], self._contents.get(block_hash)
            if content is not None and (is_there or was_ready):
                content_now = content if is_there else None
                self._changes.append(Change(tier, block_hash, content_now))
            note = self._anchors.hold if is_there else self._anchors.lose
            note(tier, [block_hash])
        for _, block_hash, _, _ in self._in_pools:
            if not any(each.lookup(block_hash) for each in self._pools.values()):
                self._contents.pop(block_hash, None)
        self._in_pools.clear()

    def _content(self, chain: Chain, index: int) -> BlockTokens:
        assert chain.token_ids is not None
        start = index * self._block_size
        tokens = chain.token_ids[start : start + self._block_size].tobytes()
        return BlockTokens(chain.hashes[index - 1] if index else None, tokens)

    # The disk

    def note_written(self, block_hash: BlockHash) -> None:
        """Announce a block of RAM that was written to disk."""
        self._take_in()
        self._anchors.hold(Tier.DISK, [block_hash])
        content = self._contents.get(block_hash)
        if content is not None and block_hash not in self._on_disk:
            self._on_disk.add(block_hash)
            self._changes.append(Change(Tier.DISK, block_hash, content))

    def note_found(self, chain: Chain, found: Collection[bytes]) -> None:
        """Announce the blocks of a chain that the disk has told of, its head first."""
        if chain.token_ids is None:
            return
        self._take_in()
        for index, block_hash in enumerate(chain.hashes):
            if block_hash in found and block_hash not in self._on_disk:
                self._on_disk.add(block_hash)
                content = self._contents.get(block_hash) or self._content(chain, index)
                self._changes.append(Change(Tier.DISK, block_hash, content))

    def note_gone(self, block_hashes: Iterable[bytes]) -> None:
        """Announce that blocks have left the disk."""
        self._take_in()
        hashes = [*map(BlockHash, block_hashes)]
        self._anchors.lose(Tier.DISK, hashes)
        for block_hash in hashes:
            if block_hash in self._on_disk:
                self._on_disk.remove(block_hash)
                self._changes.append(Change(Tier.DISK, block_hash, None))

    def forget_disk(self) -> None:
        """Announce that nothing is on disk: what a new worker has is not known until it is used."""
        self.note_gone(list(self._on_disk))
        self._anchors.lose_all(Tier.DISK)

    def check(self) -> None:
        """Raise IntegrityError if an invariant of the class docstring is broken."""
        self._take_in()
        for block_hash in self._contents:
            if not any(pool.lookup(block_hash) for pool in self._pools.values()):
                name = block_hash.hex()[:12]
                raise IntegrityError(f"the tokens of block {name} are kept, but it is not in RAM")
        self._anchors.check(self._pools)
