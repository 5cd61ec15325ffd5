"""Blocks of one RAM tier: who uses them, which may be reused, in which order.

The device pool and the host arena's pages are both of this class; ids are indices into memory that
somebody else owns. It knows hashes as opaque keys; it does not know tokens, bytes or retention.

Called by the engine's thread only.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice

from tieredkv.errors import IntegrityError
from tieredkv.types import BlockHash


class Block:
    """One slot of a pool.

    Attributes:
        block_id: index in the pool's memory.
        ref_count: users; 0 means that it is in the free list.
        pin_count: copies that read the content; above 0 its memory is not reused.
        block_hash: identity of the content, None for a private or an empty block.
        is_ready: whether the content has arrived; a hashed block that is not ready is being filled.
        tenant: whose the content is.
    """

    __slots__ = (
        *("_next", "_prev", "block_hash", "block_id"),
        *("is_ready", "pin_count", "ref_count", "tenant"),
    )

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.pin_count = 0
        self.block_hash: BlockHash | None = None
        self.is_ready = False
        self.tenant = b""
        self._prev: Block = self
        self._next: Block = self

    def __repr__(self) -> str:
        name = self.block_hash.hex()[:12] if self.block_hash is not None else "-"
        ready = "ready" if self.is_ready else "not ready"
        return f"Block({self.block_id}, {name}, ref_count={self.ref_count}, {ready})"


def _ignore_eviction(_block: Block, _block_hash: BlockHash) -> None:
    pass


class BlockPool:
    """A fixed number of blocks, an index by hash, and a free list in the order of eviction.

    The free list is three doubly linked lists through the blocks themselves, empty blocks,
    evictable ones and protected ones: taking a block out of the middle, as every hit does, is O(1).
    Empty blocks are handed out first, then the evictable ones, least recently used first, then the
    protected ones in the same order. What would make more than half of the pool protected stands
    among the others.

    Invariants (`check`):
        1. links are consistent both ways, and no block is in the list twice;
        2. the free list holds exactly the blocks with ref_count 0, but for pinned ones that lost
           their hash: those come back with `unpin`;
        3. the index maps exactly the hashed blocks, each under its own hash;
        4. a free block is either empty or hashed and ready, and in the list of its kind;
        5. the counters agree with the lists, and while there are floors, with the blocks' tenants.

    Args:
        num_blocks: how many.
        on_evict: called with a block and the hash it loses when `allocate` reuses it.

    Attributes:
        protected: what is to be evicted last; a change counts for a block from its next use on.
        num_empty: blocks that nobody uses and that hold nothing.
        num_evictable: blocks that nobody uses and that hold cached content, protected or not.
        floors: hashed blocks that each tenant keeps, whoever else wants them.
        num_kept: how many of them the last `allocate` left to their tenants.
    """

    def __init__(
        self, num_blocks: int, *, on_evict: Callable[[Block, BlockHash], None] = _ignore_eviction
    ) -> None:
        self._on_evict = on_evict
        self.protected: Collection[BlockHash] = ()
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._index: dict[BlockHash, Block] = {}
        self._empty = Block(-1)
        self._evictable = Block(-2)
        self._last = Block(-3)
        self._last_ids: set[int] = set()  # of the blocks of the third list
        self.num_empty = 0
        self.num_evictable = 0
        self.num_kept = 0
        self.floors: dict[bytes, int] = {}
        self._num_of: Counter[bytes] = Counter()  # hashed blocks by tenant, while there are floors
        for block in self._blocks:
            self._append(block)

    @property
    def num_blocks(self) -> int:
        """All blocks of the pool."""
        return len(self._blocks)

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses, empty and evictable."""
        return self.num_empty + self.num_evictable

    @property
    def num_used(self) -> int:
        """Blocks that somebody uses."""
        return len(self._blocks) - self.num_free

    @property
    def num_cached(self) -> int:
        """Hashed blocks, used or not."""
        return len(self._index)

    def lookup(self, block_hash: BlockHash) -> Block | None:
        """Return the block of this hash, ready or not; no side effect."""
        return self._index.get(block_hash)

    def evictable(self) -> Iterator[Block]:
        """Yield the blocks that may be evicted, in that order; do not change the pool meanwhile."""
        yield from self._walk(self._evictable)
        yield from self._walk(self._last)

    def set_floors(self, shares: Mapping[bytes, float]) -> None:
        """Leave each of these tenants so much of the pool, in hashed blocks, from now on."""
        self.floors = {tenant: int(share * self.num_blocks) for tenant, share in shares.items()}
        self._num_of = Counter(block.tenant for block in self._index.values())

    def allocate(
        self,
        count: int,
        *,
        tenant: bytes | None = None,
        can_evict: Callable[[Block], bool] | None = None,
        is_partial: bool = False,
    ) -> list[Block] | None:
        """Take blocks for new content: empty ones first, then the least recently used.

        Args:
            count: how many.
            tenant: for whom; it takes no block of another's floor. None for all the same.
            can_evict: asked of each cached block in turn; those it refuses keep their place.
            is_partial: fewer will do.

        Returns:
            Blocks with ref_count 1 and no hash; None if there are too few. Then nothing has
            changed but that blocks of floors, which are passed over, have become the youngest.
        """
        victims: list[Block] = []
        kept: list[Block] = []
        self.num_kept = 0
        num_needed = count - self.num_empty
        if num_needed > self.num_evictable and not is_partial:
            return None
        if num_needed > 0:
            spare = self._spare(tenant)
            for block in self._candidates(num_needed, kept):
                if spare is not None and spare[block.tenant] <= 0:
                    kept.append(block)
                elif not block.pin_count and (can_evict is None or can_evict(block)):
                    victims.append(block)
                    if spare is not None:
                        spare[block.tenant] -= 1
                    if len(victims) == num_needed:
                        break
            self.num_kept = len(kept)
            self.touch(kept[::-1])
            if len(victims) < num_needed and not is_partial:
                return None
        taken: list[Block] = []
        while len(taken) < count - len(victims) and self.num_empty:
            taken.append(self._empty._next)
            self._unlink(taken[-1])
        for block in victims:
            self._unlink(block)
            block_hash = block.block_hash
            assert block_hash is not None, block
            self._unindex(block)
            self._on_evict(block, block_hash)
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
        if self.floors:
            self._num_of[tenant] += 1
        return block

    def mark_ready(self, block: Block) -> None:
        """Note that the content of a used block has arrived."""
        assert block.ref_count > 0, block
        block.is_ready = True

    def acquire(self, block: Block) -> None:
        """Add a user to a block that is in the index or in use."""
        if block.ref_count == 0:
            self._unlink(block)
        block.ref_count += 1

    def find(self, hashes: Iterable[BlockHash]) -> list[Block | None]:
        """Return the block of each hash, ready or not; None for those that are not in the index."""
        return list(map(self._index.get, hashes))

    def acquire_chain(self, hashes: Iterable[BlockHash]) -> list[Block | None]:
        """Add a user to every block of a chain that is in the index; None stands for the others."""
        chain = self.find(hashes)
        for block in chain:
            if block is not None:
                if not block.ref_count:
                    self._unlink(block)
                block.ref_count += 1
        return chain

    def missing(self, hashes: Iterable[BlockHash]) -> list[BlockHash]:
        """Return the hashes that are not in the index, in order."""
        return [block_hash for block_hash in hashes if block_hash not in self._index]

    def release(self, blocks: Iterable[Block]) -> None:
        """Take one user from each block, in the order in which they may later be evicted.

        NOTE: hand a chain over tail first: what stays is then a usable prefix. A block that nobody
        uses any longer goes to the young end if its content is whole, else it is emptied.
        """
        tail, count, is_plain = self._evictable._prev, 0, not self.protected
        for block in blocks:
            assert block.ref_count > 0, block
            block.ref_count -= 1
            if block.ref_count:
                continue
            if not block.is_ready or block.block_hash is None:
                self._unindex(block)
            elif is_plain:
                block._prev, tail._next = tail, block
                tail = block
                count += 1
                continue
            self._append(block)
        if count:
            tail._next, self._evictable._prev = self._evictable, tail
            self.num_evictable += count

    def pin(self, block: Block) -> None:
        """Keep a block's memory from reuse, whoever lets go of it; its place in the order stays."""
        block.pin_count += 1

    def unpin(self, block: Block) -> None:
        """Take back one `pin`."""
        assert block.pin_count > 0, block
        block.pin_count -= 1
        if block.ref_count == 0 and block.block_hash is None:
            self._append(block)

    def touch(self, chain: Iterable[Block]) -> None:
        """Make a chain's evictable blocks (given head first) the youngest, its head last to go."""
        for block in reversed(list(chain)):
            if block.ref_count == 0 and block.block_hash is not None:
                self._unlink(block)
                self._append(block)

    def drop(self, block_hash: BlockHash) -> Block | None:
        """Forget a hash; a block in use is freed when its last user ends."""
        block = self._index.get(block_hash)
        if block is not None:
            self.acquire(block)
            self._unindex(block)
            self.release([block])
        return block

    def check(self) -> None:
        """Raise IntegrityError if an invariant of the class docstring is broken."""
        free: set[int] = set()
        for head, is_evictable, count in (
            (self._empty, False, self.num_empty),
            (self._evictable, True, self.num_evictable - len(self._last_ids)),
            (self._last, True, len(self._last_ids)),
        ):
            seen, block = 0, head._next
            while block is not head:
                if block._prev._next is not block or block._next._prev is not block:
                    raise IntegrityError(f"links of {block} disagree")
                if block.block_id in free:
                    raise IntegrityError(f"{block} is in the free list twice")
                if is_evictable != (block.block_hash is not None):
                    raise IntegrityError(f"{block} is in the wrong part of the free list")
                if (block.block_id in self._last_ids) != (head is self._last):
                    raise IntegrityError(f"{block} is counted in the wrong part of the free list")
                if is_evictable and not block.is_ready:
                    raise IntegrityError(f"{block} is evictable but was never filled")
                free.add(block.block_id)
                seen += 1
                block = block._next
            if seen != count:
                raise IntegrityError(f"{seen} blocks in a list that counts {count}")
        for block in self._blocks:
            is_pinned_only = block.pin_count > 0 and block.block_hash is None
            is_free = block.ref_count == 0 and not is_pinned_only
            if is_free != (block.block_id in free) or min(block.ref_count, block.pin_count) < 0:
                raise IntegrityError(f"{block} has {block.ref_count} users and a wrong place")
        hashed = [block for block in self._blocks if block.block_hash is not None]
        if len(hashed) != len(self._index):
            raise IntegrityError(f"{len(hashed)} hashed blocks, {len(self._index)} in the index")
        if self.floors and +self._num_of != Counter(block.tenant for block in hashed):
            raise IntegrityError("blocks are not counted to their tenants")
        for block in hashed:
            assert block.block_hash is not None
            if self._index.get(block.block_hash) is not block:
                raise IntegrityError(f"{block} is not in the index under its hash")

    def _candidates(self, num_needed: int, kept: list[Block]) -> Iterator[Block]:
        """Yield what may be evicted; of what is protected, only as much as the rest cannot give.

        What is not protected is waited for where it cannot go for now, but for the blocks kept.
        """
        yield from self._walk(self._evictable)
        num_others = self.num_evictable - len(self._last_ids) - len(kept)
        yield from islice(self._walk(self._last), max(0, num_needed - num_others))

    def _spare(self, tenant: bytes | None) -> dict[bytes, float] | None:
        """Count for each tenant what may be taken from it; None where all may be."""
        if tenant is None or not self.floors:
            return None
        spare = {other: self._num_of[other] - floor for other, floor in self.floors.items()}
        return defaultdict(lambda: math.inf, spare | {tenant: math.inf})

    @staticmethod
    def _walk(head: Block) -> Iterator[Block]:
        block = head._next
        while block is not head:
            yield block
            block = block._next

    def _append(self, block: Block) -> None:
        """Put a free block at the young end of its part of the list."""
        if block.block_hash is not None:
            home, most = self._evictable, len(self._blocks) // 2
            if block.block_hash in self.protected and len(self._last_ids) < most:
                home = self._last
                self._last_ids.add(block.block_id)
            self._link(block, home._prev)
            self.num_evictable += 1
        elif not block.pin_count:  # else `unpin` puts it there
            block.is_ready = False
            self._link(block, self._empty._prev)
            self.num_empty += 1

    @staticmethod
    def _link(block: Block, after: Block) -> None:
        block._prev, block._next = after, after._next
        after._next._prev = block
        after._next = block

    def _unlink(self, block: Block) -> None:
        if block.block_hash is None:
            self.num_empty -= 1
        else:
            self.num_evictable -= 1
            self._last_ids.discard(block.block_id)
        block._prev._next, block._next._prev = block._next, block._prev
        block._prev = block._next = block

    def _unindex(self, block: Block) -> None:
        if block.block_hash is not None:
            del self._index[block.block_hash]
            block.block_hash = None
            if self.floors:
                self._num_of[block.tenant] -= 1
