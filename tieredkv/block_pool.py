"""Which block holds what, who uses it, and which one goes next.

Serves every tier whose places are numbered: blocks of the device pool and pages of the host arena
alike. Knows ids, hashes, reference counts and the order of eviction; does not know bytes, time,
retention, nor any other tier. Called by one thread.
"""

from collections.abc import Callable, Iterator, Sequence

from tieredkv.errors import IntegrityError
from tieredkv.types import BlockHash


class Block:
    """One place of a pool, and what is in it. Only the pool changes it.

    Attributes:
        block_id: its index in the pool.
        ref_count: running requests and transfers that use it; 0 means allocatable.
        block_hash: under which the pool's index knows it; None if it is not shared.
        is_ready: its bytes are there; False while they are computed or loaded.
        prev, next: neighbours in the list it is on; itself while it is in use.
    """

    __slots__ = ("block_hash", "block_id", "is_ready", "next", "prev", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: BlockHash | None = None
        self.is_ready = False
        self.prev = self
        self.next = self

    def __repr__(self) -> str:
        name = self.block_hash.hex()[:12] if self.block_hash is not None else None
        return f"Block({self.block_id}, refs={self.ref_count}, hash={name}, ready={self.is_ready})"


class _BlockList:
    """A doubly linked list through the blocks themselves: every change is O(1), nothing is copied.

    A deque could not give up a block from its middle, which is what every hit does.
    """

    __slots__ = ("num_blocks", "sentinel")

    def __init__(self) -> None:
        self.sentinel = Block(-1)
        self.num_blocks = 0

    def push_front(self, block: Block) -> None:
        self._insert_after(self.sentinel, block)

    def push_back(self, block: Block) -> None:
        self._insert_after(self.sentinel.prev, block)

    def remove(self, block: Block) -> None:
        block.prev.next, block.next.prev = block.next, block.prev
        block.prev = block.next = block
        self.num_blocks -= 1

    def __iter__(self) -> Iterator[Block]:
        block = self.sentinel.next
        while block is not self.sentinel:
            # Read before the yield: whoever gets the block may take it off the list.
            following = block.next
            yield block
            block = following

    def _insert_after(self, prev: Block, block: Block) -> None:
        block.prev, block.next = prev, prev.next
        prev.next.prev = block
        prev.next = block
        self.num_blocks += 1


class BlockPool:
    """Hand out blocks, share those of equal content, and reuse the least recently used first.

    A block is in exactly one of three states:

    - in use: `ref_count` > 0, on no list. It may have a hash, and may not be ready yet.
    - free: `ref_count` 0, no hash. Allocated first, in the order of the free list.
    - evictable: `ref_count` 0, a hash, ready. Allocated after the free ones, from the least
      recently used; its hash is forgotten then.

    The users of a chain release and touch it in its order, head first; the pool turns that round,
    so that the tail of a chain is evicted before its head and what stays is a usable prefix.

    Invariants, verified by `check()`:
        1. Block i of the pool has `block_id` i, and a `ref_count` of 0 or more.
        2. A list's links agree both ways, and its count is the number of blocks on it.
        3. The free list holds exactly the blocks without use and hash; none of them is ready.
        4. The evictable list holds exactly the blocks without use but with a hash; all are ready.
        5. A block in use is on no list: it links to itself.
        6. The index maps every hash of a block to that block, and nothing else: one block a hash.
    """

    def __init__(
        self, num_blocks: int, *, on_evict: Callable[[Block, BlockHash], None] | None = None
    ) -> None:
        """Make a pool of free blocks, allocated from block 0 on.

        Args:
            num_blocks: places in the pool; may be 0.
            on_evict: told of each hash that `allocate` forgot, with the block that held it, once
                the whole allocation is done; the bytes are still those of the hash. `drop`
                does not call it.
        """
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._index: dict[BlockHash, Block] = {}
        self._free = _BlockList()
        self._evictable = _BlockList()
        self._on_evict = on_evict
        for block in self._blocks:
            self._free.push_back(block)

    @property
    def num_blocks(self) -> int:
        """Size of the pool."""
        return len(self._blocks)

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing: without use and without hash."""
        return self._free.num_blocks

    @property
    def num_evictable(self) -> int:
        """Blocks without use that still hold what their hash says."""
        return self._evictable.num_blocks

    @property
    def num_allocatable(self) -> int:
        """Free and evictable blocks."""
        return self._free.num_blocks + self._evictable.num_blocks

    @property
    def num_cached(self) -> int:
        """Blocks with a hash, in use or not, ready or not."""
        return len(self._index)

    @property
    def num_used(self) -> int:
        """Blocks with a `ref_count` above 0."""
        return len(self._blocks) - self.num_allocatable

    def block(self, block_id: int) -> Block:
        """Return the block with this id."""
        return self._blocks[block_id]

    def lookup(self, block_hash: BlockHash) -> Block | None:
        """Return the block that holds, or once ready will hold, a hash; no side effect."""
        return self._index.get(block_hash)

    def evictable(self) -> Iterator[Block]:
        """Iterate over the evictable blocks, the next to be evicted first.

        The block that was just handed out may be acquired or dropped meanwhile, no other one.
        """
        return iter(self._evictable)

    def allocate(
        self, num_blocks: int, can_evict: Callable[[Block], bool] | None = None
    ) -> list[Block] | None:
        """Take blocks into use: free ones first, then the least recently used evictable ones.

        Args:
            num_blocks: how many.
            can_evict: asked about each evictable block that would be taken; one that may not go
                yet is passed over and keeps its place.

        Returns:
            Blocks with a `ref_count` of 1, no hash, not ready; None, and nothing has changed, if
            there are not enough.
        """
        if num_blocks > self.num_allocatable:
            return None
        taken = _first(num_blocks, self._free)
        num_free = len(taken)
        taken += _first(num_blocks - num_free, self._evictable, can_evict)
        if len(taken) < num_blocks:
            return None
        evicted: list[tuple[Block, BlockHash]] = []
        for block in taken[:num_free]:
            self._free.remove(block)
            block.ref_count = 1
        for block in taken[num_free:]:
            self._evictable.remove(block)
            block.ref_count = 1
            evicted.append((block, self._forget(block)))
            block.is_ready = False
        if self._on_evict is not None:
            for block, block_hash in evicted:
                self._on_evict(block, block_hash)
        return taken

    def insert(self, block: Block, block_hash: BlockHash) -> Block:
        """Register what a block in use holds, or will hold once it is ready.

        Returns:
            The block itself; or the one that has this hash already, ready or not, in which case
            nothing is registered and nothing acquired: its content may be shared instead.
        """
        existing = self._index.get(block_hash)
        if existing is not None:
            return existing
        if block.ref_count == 0 or block.block_hash is not None:
            raise IntegrityError(f"only a block in use without a hash can get one: {block}")
        block.block_hash = block_hash
        self._index[block_hash] = block
        return block

    def mark_ready(self, block: Block) -> None:
        """Say that the bytes of a block in use are there."""
        if block.ref_count == 0:
            raise IntegrityError(f"a block that nobody uses cannot become ready: {block}")
        block.is_ready = True

    def acquire(self, block: Block) -> None:
        """Use a block that `lookup` or `allocate` found, so that it is not evicted."""
        if block.ref_count == 0:
            if block.block_hash is None:
                raise IntegrityError(f"a free block is allocated, not acquired: {block}")
            self._evictable.remove(block)
        block.ref_count += 1

    def release(self, blocks: Sequence[Block]) -> None:
        """End one use of each block of a chain, given head first, as in a request's block table.

        A block that nobody uses any more becomes the most recently used, after the rest of its
        chain's tail; without a hash, or if it never became ready, it is free at once and the
        first to be allocated, and its hash is forgotten.
        """
        for block in reversed(blocks):
            if self._end_use(block):
                self._evictable.push_back(block)

    def release_to_front(self, block: Block) -> None:
        """End one use of a block as `release` does, but make it the next to be evicted.

        For a block whose copy in a lower tier is complete. Of a chain, release the head first:
        the last one released is the first one evicted.
        """
        if self._end_use(block):
            self._evictable.push_front(block)

    def touch(self, blocks: Sequence[Block]) -> None:
        """Make the evictable ones of a chain, given head first, the most recently used.

        Blocks in use are left alone: their release will do it.
        """
        for block in reversed(blocks):
            if block.ref_count == 0 and block.block_hash is not None:
                self._evictable.remove(block)
                self._evictable.push_back(block)

    def drop(self, block_hash: BlockHash) -> Block | None:
        """Forget a hash: nobody finds the block by it from now on.

        A block that nobody uses is free at once; one in use stays as it is for those who use it,
        and is free when the last of them releases it.

        Returns:
            The block that had the hash; None if none had.
        """
        block = self._index.get(block_hash)
        if block is None:
            return None
        self._forget(block)
        if block.ref_count == 0:
            self._evictable.remove(block)
            block.is_ready = False
            self._free.push_front(block)
        return block

    def check(self) -> None:
        """Verify every invariant of the class.

        Raises:
            IntegrityError: one does not hold.
        """
        for block_id, block in enumerate(self._blocks):
            _ensure(block.block_id == block_id and block.ref_count >= 0, 1, block)
        free = self._check_links(self._free)
        evictable = self._check_links(self._evictable)
        for block in self._blocks:
            is_free = block.ref_count == 0 and block.block_hash is None
            is_evictable = block.ref_count == 0 and block.block_hash is not None
            _ensure((block.block_id in free) == is_free, 3, block)
            _ensure(not (is_free and block.is_ready), 3, block)
            _ensure((block.block_id in evictable) == is_evictable, 4, block)
            _ensure(block.is_ready or not is_evictable, 4, block)
            if block.ref_count > 0:
                _ensure(block.prev is block and block.next is block, 5, block)
            if block.block_hash is not None:
                _ensure(self._index.get(block.block_hash) is block, 6, block)
        num_hashed = sum(block.block_hash is not None for block in self._blocks)
        _ensure(len(self._index) == num_hashed, 6, f"{len(self._index)} != {num_hashed}")

    def _check_links(self, blocks: _BlockList) -> set[int]:
        """Verify invariant 2 for one list and return the ids on it."""
        seen: set[int] = set()
        prev, block = blocks.sentinel, blocks.sentinel.next
        while block is not blocks.sentinel:
            _ensure(block.prev is prev and block.block_id not in seen, 2, block)
            seen.add(block.block_id)
            prev, block = block, block.next
        _ensure(block.prev is prev, 2, block)
        _ensure(blocks.num_blocks == len(seen), 2, f"{blocks.num_blocks} != {len(seen)}")
        return seen

    def _forget(self, block: Block) -> BlockHash:
        """Take a block's hash out of the index and return it."""
        block_hash = block.block_hash
        assert block_hash is not None, block
        del self._index[block_hash]
        block.block_hash = None
        return block_hash

    def _end_use(self, block: Block) -> bool:
        """Count one user less; return whether the block is evictable now, and free it if not."""
        if block.ref_count == 0:
            raise IntegrityError(f"released more often than acquired: {block}")
        block.ref_count -= 1
        if block.ref_count > 0:
            return False
        if block.block_hash is not None and block.is_ready:
            return True
        if block.block_hash is not None:
            self._forget(block)
        block.is_ready = False
        self._free.push_front(block)
        return False


def _first(
    num_blocks: int, blocks: _BlockList, is_wanted: Callable[[Block], bool] | None = None
) -> list[Block]:
    """Return the first wanted blocks of a list, at most `num_blocks`, leaving them on it."""
    found: list[Block] = []
    if num_blocks <= 0:
        return found
    for block in blocks:
        if is_wanted is None or is_wanted(block):
            found.append(block)
            if len(found) == num_blocks:
                break
    return found


def _ensure(holds: bool, invariant: int, what: object) -> None:
    if not holds:
        raise IntegrityError(f"invariant {invariant} of the block pool is broken: {what}")
