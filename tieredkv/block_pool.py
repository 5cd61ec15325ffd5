"""Blocks of one RAM tier: who uses them, which may be reused, in which order.

The device pool and the host arena's pages are both of this class; ids are indices into memory that
somebody else owns. It knows hashes as opaque keys; it does not know tokens, bytes or retention.

Called by the engine's thread only.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from tieredkv.errors import IntegrityError
from tieredkv.types import BlockHash


@dataclass(slots=True, eq=False)
class Block:
    """One block of a pool.

    Attributes:
        block_id: index in the pool's memory.
        ref_count: users; 0 means that it is in the free list.
        pin_count: copies that read the content; above 0 its memory is not reused.
        block_hash: identity of the content, None for a private or an empty block.
        is_ready: whether the content has arrived; a hashed block that is not ready is being filled.
        is_loading: whether it is filled from a slower tier, and held until that has ended.
        tenant: whose the content is.
    """

    block_id: int
    ref_count: int = 0
    pin_count: int = 0
    block_hash: BlockHash | None = field(default=None, repr=False)  # which no log may show
    is_ready: bool = False
    is_loading: bool = False
    tenant: bytes = b""


class BlockPool:
    """A fixed number of blocks, an index by hash, and a free list in the order of eviction.

    The free list has three parts. Empty blocks are handed out first, then the evictable ones, least
    recently used first, then the pinned ones in the same order. The latter two are ordered
    dicts: taking a block out of the middle, as every hit does, is O(1). What would make more than
    half of the pool pinned stands among the others.

    Invariants (`check`):
        1. no block is in the free list twice;
        2. the free list holds exactly the blocks with ref_count 0, but for pinned ones that lost
           their hash: those come back with `unpin`;
        3. the index maps exactly the hashed blocks, each under its own hash;
        4. a free block is either empty or hashed and ready, and in the part of its kind; that of
           the pinned ones is no larger than it may be;
        5. a block that is loading is in use;
        6. hashed blocks are counted to their tenants.

    Attributes:
        num_blocks: all blocks of the pool.
        most_pinned: how many blocks may be held back to be evicted last.
        can_evict: asked by `allocate` of each cached block in turn; those it refuses stay.
        on_evict: called with a block and the hash it loses when `allocate` reuses it.
        pinned, wanted: hashes to be evicted last, by claims and by queued requests; a change
            counts for a block from its next use on.
        floors: hashed blocks that each tenant keeps, whoever else wants them.
        num_kept: how many of them the last `allocate` left to their tenants.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.most_pinned = num_blocks // 2
        self.on_evict: Callable[[Block, BlockHash], None] = lambda _block, _block_hash: None
        self.can_evict: Callable[[Block], bool] = lambda _block: True
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._index: dict[BlockHash, Block] = {}
        self._empty = deque(self._blocks)
        self._evictable: OrderedDict[Block, None] = OrderedDict()
        self._last: OrderedDict[Block, None] = OrderedDict()
        self.pinned: Collection[BlockHash] = ()
        self.wanted: Collection[BlockHash] = ()
        self.floors: dict[bytes, int] = {}
        self.num_kept = 0
        self._num_of: Counter[bytes] = Counter()  # hashed blocks by tenant

    @property
    def num_empty(self) -> int:
        """Blocks that nobody uses and that hold nothing."""
        return len(self._empty)

    @property
    def num_evictable(self) -> int:
        """Blocks that nobody uses and that hold cached content, pinned or not."""
        return len(self._evictable) + len(self._last)

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses, empty and evictable."""
        return self.num_empty + self.num_evictable

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
        """Those of the evictable blocks that are evicted last."""
        return len(self._last)

    def lookup(self, block_hash: BlockHash) -> Block | None:
        """Return the block of this hash, ready or not; no side effect."""
        return self._index.get(block_hash)

    def evictable(self) -> Iterator[Block]:
        """Return what may be evicted, in that order; do not change the pool meanwhile."""
        return chain(self._evictable, self._last)

    def allocate(
        self, count: int, *, tenant: bytes | None = None, is_partial: bool = False
    ) -> list[Block] | None:
        """Take blocks for new content: empty ones first, then the least recently used.

        Args:
            count: how many.
            tenant: for whom; it takes no block of another's floor. None for all the same.
            is_partial: fewer will do.

        Returns:
            Blocks with ref_count 1 and no hash; None if there are too few. Then nothing has
            changed but that blocks of floors, which are passed over, have become the youngest.
        """
        self.num_kept = 0
        num_needed = max(0, count - self.num_empty)
        is_hopeless = num_needed > self.num_evictable and not is_partial
        victims = [] if is_hopeless else self._victims(num_needed, tenant)
        if len(victims) < num_needed and not is_partial:
            return None
        taken = [self._empty.popleft() for _ in range(min(count, self.num_empty))]
        for block in victims:
            self._unlink(block)
            block_hash = block.block_hash
            assert block_hash is not None, block
            self._unindex(block)
            self.on_evict(block, block_hash)
        taken.extend(victims)
        for block in taken:
            block.ref_count = 1
            block.is_ready = False
        return taken

    def insert(self, block: Block, block_hash: BlockHash, tenant: bytes = b"") -> Block:
        """Give a used block its identity; if another block has it already, return that one.

        Then nothing changes: the caller shares the one that is there, or keeps its own private.
        """
        known = self._index.get(block_hash)
        if known is not None:
            return known
        assert block.ref_count > 0 and block.block_hash is None, block
        block.block_hash = block_hash
        block.tenant = tenant
        self._index[block_hash] = block
        self._num_of[tenant] += 1
        return block

    def acquire(self, blocks: Iterable[Block]) -> None:
        """Add a user to blocks that are in the index or in use."""
        for block in blocks:
            if not block.ref_count:
                self._unlink(block)
            block.ref_count += 1

    def find(self, hashes: Iterable[BlockHash]) -> list[Block | None]:
        """Return the block of each hash, ready or not; None for those that are not in the index."""
        return list(map(self._index.get, hashes))

    def missing(self, hashes: Iterable[BlockHash]) -> list[BlockHash]:
        """Return the hashes that are not in the index, in order."""
        return [block_hash for block_hash in hashes if block_hash not in self._index]

    def release(self, blocks: Iterable[Block]) -> None:
        """Take one user from each block, in the order in which they may later be evicted.

        NOTE: hand a chain over tail first: what stays is then a usable prefix. A block that nobody
        uses any longer goes to the young end if its content is whole, else it is emptied.
        """
        evictable, has_pinned = self._evictable, self.pinned or self.wanted
        for block in blocks:
            assert block.ref_count > 0, block
            block.ref_count -= 1
            if block.ref_count:
                continue
            if block.is_ready and block.block_hash is not None and not has_pinned:
                evictable[block] = None
            else:
                if not block.is_ready:
                    self._unindex(block)
                self._append(block)

    def pin(self, block: Block) -> None:
        """Keep a block's memory from reuse, whoever lets go of it; its place in the order stays."""
        block.pin_count += 1

    def unpin(self, block: Block) -> None:
        """Take back one `pin`."""
        assert block.pin_count > 0, block
        block.pin_count -= 1
        if block.ref_count == 0 and block.block_hash is None:
            self._append(block)

    def touch(self, hashes: Iterable[BlockHash]) -> None:
        """Make a chain's evictable blocks (given head first) the youngest, its head last to go."""
        for block in reversed(self.find(hashes)):
            if block is not None and block.ref_count == 0:
                self._unlink(block)
                self._append(block)

    def drop(self, block_hash: BlockHash) -> Block | None:
        """Forget a hash; a block in use is freed when its last user ends."""
        block = self._index.get(block_hash)
        if block is not None:
            self.acquire([block])
            self._unindex(block)
            self.release([block])
        return block

    def check(self) -> None:
        """Raise IntegrityError if an invariant of the class docstring is broken."""
        places = Counter(chain(self._empty, self._evictable, self._last))
        empty = set(self._empty)
        for block in self._blocks:
            is_hashed = block.block_hash is not None
            is_free = block.ref_count == 0 and (is_hashed or block.pin_count == 0)
            if places[block] != is_free or min(block.ref_count, block.pin_count) < 0:
                raise IntegrityError(f"{block} has {block.ref_count} users and a wrong place")
            if is_free and (block in empty) == is_hashed:
                raise IntegrityError(f"{block} is in the wrong part of the free list")
            if block.is_loading and not block.ref_count:
                raise IntegrityError(f"{block} is filled but not held")
            if is_free and is_hashed and not block.is_ready:
                raise IntegrityError(f"{block} is evictable but was never filled")
        if self.num_pinned > self.most_pinned:
            raise IntegrityError(f"{self.num_pinned} blocks are held back")
        hashed = [block for block in self._blocks if block.block_hash is not None]
        if len(hashed) != len(self._index):
            raise IntegrityError(f"{len(hashed)} hashed blocks, {len(self._index)} in the index")
        for block_hash, block in self._index.items():
            if block.block_hash != block_hash:
                raise IntegrityError(f"{block} is not in the index under its hash")
        if +self._num_of != Counter(block.tenant for block in hashed):
            raise IntegrityError("blocks are not counted to their tenants")

    def _victims(self, num_needed: int, tenant: bytes | None) -> list[Block]:
        """Choose so many blocks to evict, or fewer; what floors keep becomes the youngest."""
        victims: list[Block] = []
        kept: list[Block] = []
        floors = self.floors if tenant is not None else {}
        spare = {other: self._num_of[other] - floors[other] for other in floors if other != tenant}
        for block in self._candidates(num_needed, kept):
            if len(victims) == num_needed:
                break
            if spare.get(block.tenant, 1) <= 0:
                kept.append(block)
            elif not block.pin_count and self.can_evict(block):
                victims.append(block)
                if block.tenant in spare:
                    spare[block.tenant] -= 1
        self.num_kept = len(kept)
        self.touch([block.block_hash for block in reversed(kept) if block.block_hash])
        return victims

    def _candidates(self, num_needed: int, kept: list[Block]) -> Iterator[Block]:
        """Yield what may be evicted; of what is pinned, only as much as the rest cannot give.

        What is not pinned is waited for where it cannot go for now, but for the blocks kept.
        """
        yield from self._evictable
        for num_seen, block in enumerate(self._last, len(self._evictable)):
            if num_seen - len(kept) >= num_needed:
                break
            yield block

    def _append(self, block: Block) -> None:
        """Put a free block at the young end of its part of the list."""
        if block.block_hash is not None:
            is_wanted = block.block_hash in self.pinned or block.block_hash in self.wanted
            is_last = is_wanted and self.num_pinned < self.most_pinned
            (self._last if is_last else self._evictable)[block] = None
        elif not block.pin_count:  # else `unpin` puts it there
            block.is_ready = False
            self._empty.append(block)

    def _unlink(self, block: Block) -> None:
        """Take a cached block out of the free list."""
        del (self._last if block in self._last else self._evictable)[block]

    def _unindex(self, block: Block) -> None:
        if block.block_hash is not None:
            del self._index[block.block_hash]
            block.block_hash = None
            self._num_of[block.tenant] -= 1
