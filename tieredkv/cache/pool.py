"""Blocks of the device or host tier: who uses them, and in which order they may be reused.

One pool stands for the device's blocks and another one for the host arena's pages. Ids are indices
into memory that another object owns. This module knows hashes as opaque keys. It does not know
tokens, bytes or retention.

Only the engine's thread may call it.
"""

import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain

from tieredkv.cache.block import Block, Content
from tieredkv.cache.eviction import EvictionOrder, Spare
from tieredkv.cache.floors import Floors
from tieredkv.errors import IntegrityError
from tieredkv.types import BlockHash

PARTIAL_LOOKS = 256
"""Most blocks that an allocation looks at in vain if fewer blocks than wanted are acceptable."""


class BlockPool:
    """A fixed number of blocks, an index by hash, and a free list in the order of eviction.

    The free list has four parts. Empty blocks are handed out first, then the duplicates of blocks
    that another tier keeps, the most recently used first, since those stay there longest. Then come
    the other evictable ones, least recently used first, then the pinned ones in the same order. If
    more than `most_pinned` blocks were pinned, the further ones stand among the other parts.

    Invariants (`check`):
        1. no block is in the free list twice;
        2. the free list holds exactly the blocks with ref_count 0, except those with a pin_count
           that lost their hash: the last `unpin` puts them back;
        3. the index maps exactly the hashed blocks, each under its own hash;
        4. a free block is either empty, or hashed and ready, and it is in the part of its kind; the
           part of the pinned ones holds at most `most_pinned`;
        5. a block that is loading is in use;
        6. the counts of hashed blocks by tenant are right, while there are floors;
        7. the invariants of the eviction orders and of the floors hold.

    Attributes:
        num_blocks: all blocks of the pool.
        most_pinned: how many blocks may be held back to be evicted last.
        on_evict: called with a block and the hash it loses when `allocate` reuses it.
        on_filled: called with the hash of a block whose content is complete from now on; None if
            nobody wants to know.
        on_unindexed: called with a hash that has left the index, and whether the content of its
            block was complete; None if nobody wants to know.
        is_duplicate: whether another tier keeps the content of a hash; None if none does. A change
            applies to a block from its next use on.
        pinned, prefetched: hashes of blocks to be evicted last, for claims and for queued requests;
            a change applies to a block from its next use on.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.most_pinned = num_blocks // 2
        self.on_evict: Callable[[Block, BlockHash], object] = lambda _block, _block_hash: None
        self.on_filled: Callable[[BlockHash], object] | None = None
        self.on_unindexed: Callable[[BlockHash, bool], object] | None = None
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._index: dict[BlockHash, Block] = {}
        self._empty = deque(self._blocks)
        self._duplicates = EvictionOrder(is_youngest_first=True)
        self._first, self._last = EvictionOrder(), EvictionOrder()
        self._orders = self._duplicates, self._first, self._last
        self._parts = tuple(part for order in self._orders for part in order.parts)
        self.is_duplicate: Callable[[BlockHash], bool] | None = None
        self.pinned: Collection[BlockHash] = ()
        self.prefetched: Collection[BlockHash] = ()
        self._floors = Floors(self._orders)

    @property
    def can_evict(self) -> Callable[[Block], bool]:
        """Whether evicting a cached block loses nothing; the pool asks this of its oldest blocks.

        The pool remembers a refusal. A caller that changes the answer has to tell the pool: by
        `unpin` after a copy, `look_again` for one block, or `forget_looks` for all.
        """
        return self._first.can_evict

    @can_evict.setter
    def can_evict(self, can_evict: Callable[[Block], bool]) -> None:
        for order in self._orders:
            order.can_evict = can_evict
        self.forget_looks()

    @property
    def on_clean(self) -> Callable[[Block], object]:
        """Called with a block that has become one of the oldest, and that can be evicted."""
        return self._first.on_clean

    @on_clean.setter
    def on_clean(self, on_clean: Callable[[Block], object]) -> None:
        self._first.on_clean = self._last.on_clean = on_clean

    @property
    def floors(self) -> Mapping[bytes, int]:
        """Number of hashed blocks that each tenant keeps, even if others want them."""
        return self._floors.by_tenant

    @floors.setter
    def floors(self, floors: Mapping[bytes, int]) -> None:
        self._floors.put(floors, self._index.values())

    @property
    def num_empty(self) -> int:
        """Blocks that nobody uses and that hold nothing."""
        return len(self._empty)

    @property
    def num_evictable(self) -> int:
        """Blocks that nobody uses and that hold cached content, pinned or not."""
        return sum(map(len, self._parts))

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses, empty and evictable."""
        return self.num_empty + self.num_evictable

    def num_free_for(self, tenant: bytes) -> int:
        """Return how many free blocks the floors of other tenants do not keep from a tenant."""
        return self.num_free - self._floors.kept_from(tenant).num_all

    @property
    def num_ready(self) -> int:
        """Blocks that are empty or can be evicted now, or once the copies under way have ended."""
        return self.num_empty + sum(order.num_ready for order in self._orders)

    @property
    def num_clean(self) -> int:
        """Blocks that are empty or known to be clean, so that an allocation takes them at once."""
        return self.num_empty + sum(order.num_clean for order in self._orders)

    @property
    def num_used(self) -> int:
        """Blocks that somebody uses."""
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Hashed blocks, used or not."""
        return len(self._index)

    @property
    def num_pinned(self) -> int:
        """Evictable blocks that are evicted last."""
        return len(self._last)

    @property
    def num_duplicates(self) -> int:
        """Evictable blocks that are evicted first."""
        return len(self._duplicates)

    @property
    def num_unseen(self) -> int:
        """Evictable blocks whose state was not looked at since they were last used."""
        return sum(len(order.unseen) for order in self._orders)

    @property
    def duplicates(self) -> Iterable[Block]:
        """Evictable blocks that are evicted first, in that order."""
        return self._duplicates

    @property
    def hashes(self) -> list[BlockHash]:
        """The hashes of all blocks whose bytes are complete."""
        return [block_hash for block_hash, block in self._index.items() if block.is_ready]

    def lookup(self, block_hash: BlockHash) -> Block | None:
        """Return the block of this hash, ready or not; no side effect."""
        return self._index.get(block_hash)

    def evictable(self) -> Iterator[Block]:
        """Return the evictable blocks in the order of eviction; slow, for tests and checks."""
        return chain.from_iterable(self._orders)

    def holds_young(self, block_hash: BlockHash) -> bool:
        """Whether the block of this hash is ready, and in use or not among the next to be evicted.

        The next ones are those whose state was looked at, for an allocation or ahead of one, but
        not those within the floor of their tenant.
        """
        block = self._index.get(block_hash)
        if block is None or not block.is_ready:
            return False
        return block.part is None or block.part.order.is_kept(block)

    def allocate(
        self,
        count: int,
        *,
        tenant: bytes | None = None,
        takes_kept: bool = False,
        is_partial: bool = False,
        only_empty: bool = False,
    ) -> list[Block] | None:
        """Take blocks for new content: empty ones first, then the least recently used.

        Args:
            count: how many blocks.
            tenant: the tenant that gets them; None if they are for no tenant.
            takes_kept: whether blocks within the floors of other tenants are taken, too, but last
                of all. Without a tenant, they always are.
            is_partial: whether fewer blocks are acceptable.
            only_empty: whether to evict nothing.

        Returns:
            Blocks with ref_count 1 and no hash. None, with nothing changed, if there are too few.
        """
        if only_empty:
            count = min(count, self.num_empty)
        num_empty = min(count, self.num_empty)
        num_needed = count - num_empty
        takes_kept = takes_kept or tenant is None
        victims = self._victims(num_needed, tenant, takes_kept=takes_kept, is_partial=is_partial)
        if len(victims) < num_needed and not is_partial:
            return None
        taken = [self._empty.popleft() for _ in range(num_empty)]
        self._note_evicted(victims, tenant)
        self._evict(victims)
        for block in victims:
            block.clear()
        taken.extend(victims)
        for block in taken:
            block.ref_count = 1
        return taken

    def evict_clean(self) -> int:
        """Evict all blocks that nobody uses and that can be evicted now; return how many."""
        victims = self._victims(self.num_evictable, None, takes_kept=True, is_partial=True)
        self._evict(victims)
        for block in victims:
            self._append(block)
        return len(victims)

    def insert(self, block: Block, block_hash: BlockHash, tenant: bytes = b"") -> Block:
        """Give a used block its hash, and return the block that has this hash in the index.

        If another block has the hash already, nothing changes and that block is returned. The
        caller may share it, or keep its own block private.
        """
        known = self._index.get(block_hash)
        if known is not None:
            return known
        assert block.ref_count > 0 and block.block_hash is None, block
        block.block_hash = block_hash
        block.tenant = tenant
        self._index[block_hash] = block
        if self._floors:
            self._floors.note_hashed(tenant, 1)
        return block

    def insert_filled(self, blocks: Sequence[Block], hashes: Sequence[BlockHash]) -> None:
        """Give used blocks hashes that the index lacks, and note that their content is complete."""
        index, tenant = self._index, b""
        for block, block_hash in zip(blocks, hashes, strict=True):
            assert block.block_hash is None and block_hash not in index, block
            index[block_hash] = block
            block.block_hash = block_hash
            block.tenant = tenant
            block.fill()
        if self._floors:
            self._floors.note_hashed(tenant, len(blocks))
        if self.on_filled is not None:
            for block_hash in hashes:
                self.on_filled(block_hash)

    def fill(self, block: Block, *, is_whole: bool = True) -> None:
        """Note that a block's content is there, so that hits may use it.

        Args:
            block: that was filled.
            is_whole: whether all layers are there, or only the first ones.
        """
        was_ready = block.is_ready
        block.fill(is_whole=is_whole)
        if not was_ready and self.on_filled is not None and block.block_hash is not None:
            self.on_filled(block.block_hash)

    def acquire(self, blocks: Iterable[Block]) -> None:
        """Add a user to blocks that are in the index or in use."""
        for block in blocks:
            if not block.ref_count:
                assert block.part is not None, block
                block.part.order.remove(block)
            block.ref_count += 1

    def find(self, hashes: Iterable[BlockHash]) -> list[Block | None]:
        """Return the block of each hash, ready or not; None for those that are not in the index."""
        return list(map(self._index.get, hashes))

    def missing(self, hashes: Iterable[BlockHash]) -> list[BlockHash]:
        """Return the hashes that are not in the index, in order."""
        index = self._index
        return [block_hash for block_hash in hashes if block_hash not in index]

    def release(self, blocks: Iterable[Block], *, after: int = 0) -> None:
        """Take one user from each block, in the order in which they may later be evicted.

        NOTE: give the blocks of a chain tail first, so that what is not evicted is a usable prefix.
        A block without users becomes the youngest if its content is complete; else it is emptied.

        Args:
            blocks: with users.
            after: the last step that may have used their memory for this user; 0 if none did.
        """
        unseen = self._first.unseen
        is_plain = not (self._floors or self.pinned or self.prefetched or self.is_duplicate)
        for block in blocks:
            assert block.ref_count > 0, block
            block.last_step = after or block.last_step
            block.ref_count -= 1
            if block.ref_count:
                continue
            if is_plain and block.is_ready and block.block_hash is not None:
                unseen[block] = None  # same as `_append`, but faster
                block.part = unseen
            else:
                if not block.is_ready:
                    self._unindex([block])
                self._append(block)

    def pin(self, block: Block) -> None:
        """Keep a block's memory from reuse, even without a user; its place in the order stays."""
        block.pin_count += 1
        if block.part is not None:
            block.part.order.look_again(block)

    def unpin(self, block: Block) -> None:
        """Take back one `pin`."""
        assert block.pin_count > 0, block
        block.pin_count -= 1
        if block.part is not None:
            block.part.order.look_again(block)
        elif block.ref_count == 0 and block.block_hash is None:
            self._append(block)

    def dirty(
        self, num_ahead: int, *, at_most: int = sys.maxsize, most_looks: int = sys.maxsize
    ) -> list[Block]:
        """Return blocks to be copied, oldest first, so that `num_ahead` can be evicted afterwards.

        Args:
            num_ahead: how many blocks shall be clean, including those that copies read already.
            at_most: how many blocks to return at most.
            most_looks: how many of the oldest blocks may be looked at for the first time.
        """
        found: list[Block] = []
        for order in self._orders:
            order.look_ahead(num_ahead, most_looks)
            num_ahead -= order.num_ready
            dirty = order.dirty(min(num_ahead, at_most - len(found)))
            found += dirty
            num_ahead -= len(dirty)
            if num_ahead <= 0 or order.unseen:
                break
        return found

    def late(self, num_allowed: int) -> list[Block]:
        """Return the oldest blocks that wait to be copied although younger ones were evicted.

        Args:
            num_allowed: how many such blocks, the youngest of them, are not returned.
        """
        return self._first.late(num_allowed)

    def postpone(self, block: Block) -> None:
        """Have `dirty` return a block after the others, because its copy cannot be started yet."""
        if block.part is not None:
            block.part.order.postpone(block)

    def look_again(self, block_hash: BlockHash) -> None:
        """Note that the answer of `can_evict` for this block may have changed."""
        block = self._index.get(block_hash)
        if block is not None and block.part is not None:
            block.part.order.look_again(block)

    def forget_looks(self) -> None:
        """Note that the answer of `can_evict` for any block may have changed."""
        for order in self._orders:
            order.forget_looks()

    def touch(self, hashes: Iterable[BlockHash]) -> None:
        """Make a chain's evictable blocks the youngest; its head, given first, is the last."""
        for block in reversed(self.find(hashes)):
            if block is not None and block.part is not None:
                block.part.order.remove(block)
                self._append(block)

    def end_duplicate(self, block_hash: BlockHash) -> None:
        """Make a duplicate the youngest of the others, because its other copy is to be evicted."""
        block = self._index.get(block_hash)
        part = block.part if block is not None else None
        if part is not None and part.order is self._duplicates:
            self.touch((block_hash,))

    def drop(self, block_hash: BlockHash) -> Block | None:
        """Forget a hash; a block in use is freed when its last user releases it."""
        block = self._index.get(block_hash)
        if block is not None:
            self.acquire([block])
            self._unindex([block])
            self.release([block])
        return block

    def check(self) -> None:
        """Raise IntegrityError if an invariant of the class docstring is broken."""
        places = Counter(chain(self._empty, *self._orders))
        empty = set(self._empty)
        for block in self._blocks:
            is_hashed = block.block_hash is not None
            is_free = block.ref_count == 0 and (is_hashed or block.pin_count == 0)
            if places[block] != is_free or min(block.ref_count, block.pin_count) < 0:
                counts = f"ref_count {block.ref_count} and pin_count {block.pin_count}"
                raise IntegrityError(f"{block} has {counts}, in {places[block]} free lists")
            if is_free and (block in empty) == is_hashed:
                raise IntegrityError(f"{block} is in the wrong part of the free list")
            if block.is_ready != (block.content >= Content.EARLY):
                raise IntegrityError(f"{block} says of its content what is not so")
            if block.is_copying and not block.ref_count:
                raise IntegrityError(f"{block} is being loaded, but no request uses it")
            if is_free and is_hashed and not block.is_ready:
                raise IntegrityError(f"{block} can be evicted, but was never filled")
        for order in self._orders:
            order.check()
        if self.num_pinned > self.most_pinned:
            what = f"{self.num_pinned} blocks are pinned"
            raise IntegrityError(f"{what}, but at most {self.most_pinned} may be")
        hashed = [block for block in self._blocks if block.block_hash is not None]
        if len(hashed) != len(self._index):
            what = f"{len(hashed)} blocks have a hash"
            raise IntegrityError(f"{what}, but {len(self._index)} are in the index")
        for block_hash, block in self._index.items():
            if block.block_hash != block_hash:
                raise IntegrityError(f"{block} is not in the index under its hash")
        if self._floors:
            if +self._floors.num_hashed != Counter(block.tenant for block in hashed):
                raise IntegrityError("the number of blocks per tenant is wrong")
            self._floors.check()

    def _victims(
        self, num_needed: int, tenant: bytes | None, *, takes_kept: bool, is_partial: bool
    ) -> list[Block]:
        """Take `num_needed` blocks out of the order; fewer, or none, if there are too few."""
        num_evictable = self.num_evictable
        num_lacking = num_needed - (num_evictable - self._floors.kept_from(tenant).num_all)
        is_hopeless = (num_needed > num_evictable) if takes_kept else (num_lacking > 0)
        if not num_needed or (is_hopeless and not is_partial):
            return []
        most_looks = num_needed + PARTIAL_LOOKS if is_partial else sys.maxsize
        spare = Spare(self._floors.num_spare, tenant) if self._floors else None
        victims = self._take(num_needed, spare, most_looks)
        if takes_kept and spare is not None and num_lacking > 0:
            kept = Spare(self._floors.num_spare, tenant, takes_kept=True)
            victims += self._take(num_lacking, kept, most_looks)
        if len(victims) < num_needed and not is_partial:
            for block in victims:
                assert block.part is not None, block
                block.part.order.put_back(block)
            return []
        return victims

    def _take(self, num_needed: int, spare: Spare | None, most_looks: int) -> list[Block]:
        """Take unpinned blocks, and pinned ones only if there are too few unpinned blocks.

        Unpinned blocks that cannot be evicted yet count as well: no pinned block replaces them.
        """
        self._floors.count_changed()
        *unpinned, last = self._orders
        num_of_last = 0
        if last:
            num_unpinned = sum(map(len, unpinned))
            if spare is not None and not spare.takes_kept:
                num_unpinned -= self._floors.kept_from(spare.tenant).num_unpinned
            num_of_last = num_needed - max(0, num_unpinned)
        victims: list[Block] = []
        for order in unpinned:
            victims += order.take(num_needed - len(victims), spare, most_looks)
        if num_of_last > 0:
            victims += last.take(num_of_last, spare, most_looks)
        return victims

    def _note_evicted(self, victims: Iterable[Block], tenant: bytes | None) -> None:
        """Note for which blocks that wait for a copy a tenant's allocation evicts others."""

        def is_within_floor(block: Block) -> bool:
            return block.tenant != tenant and self._floors.is_within(block.tenant)

        self._first.note_evicted(victims, is_within_floor)

    def _evict(self, victims: Iterable[Block]) -> None:
        """Take blocks that are out of the order out of the index as well."""
        for block in victims:
            block.part = None
        self._unindex(victims, self.on_evict)

    def _append(self, block: Block) -> None:
        """Put a free block at the young end of its part of the list."""
        if (block_hash := block.block_hash) is None:
            if not block.pin_count:  # else `unpin` puts it there
                block.clear()
                self._empty.append(block)
            return
        is_duplicate = self.is_duplicate is not None and self.is_duplicate(block_hash)
        is_last = block_hash in self.pinned or (block_hash in self.prefetched and not is_duplicate)
        if is_last and self.num_pinned < self.most_pinned:
            self._last.append(block)
        elif is_duplicate:
            self._duplicates.append(block)
        else:
            self._first.append(block)

    def _unindex(
        self,
        blocks: Iterable[Block],
        on_evict: Callable[[Block, BlockHash], object] = lambda _block, _block_hash: None,
    ) -> None:
        """Take blocks out of the index, and their hashes from them."""
        index, is_counted = self._index, bool(self._floors)
        for block in blocks:
            if (block_hash := block.block_hash) is not None:
                del index[block_hash]
                block.block_hash = None
                if is_counted:
                    self._floors.note_hashed(block.tenant, -1)
                if self.on_unindexed is not None:
                    self.on_unindexed(block_hash, block.is_ready)
                on_evict(block, block_hash)
