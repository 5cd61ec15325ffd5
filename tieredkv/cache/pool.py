"""Blocks of the device or host tier: who uses them, and in which order they may be reused.

One pool stands for the device's blocks and another one for the host arena's pages. Ids are indices
into memory that another object owns. This module knows hashes as opaque keys. It does not know
tokens, bytes or retention.

Only the engine's thread may call it.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import NamedTuple

from tieredkv.cache.block import Block, Content, clear
from tieredkv.cache.free_list import DUPLICATES, LAST, OTHERS, FreeList
from tieredkv.errors import IntegrityError
from tieredkv.types import BlockHash


class Taken(NamedTuple):
    """What an allocation has given.

    Attributes:
        blocks: with ref_count 1 and no hash; None, with nothing changed, if there are too few.
        evicted: the hashes of the content that they held, in this order; empty blocks come first.
        num_kept: how many other free blocks the floors of others keep from the asking tenant.
    """

    blocks: list[Block] | None
    evicted: list[BlockHash]
    num_kept: int


class PoolChange(NamedTuple):
    """A hash whose block is ready from now on, or that has left the index of a pool.

    Attributes:
        pool: the pool.
        block_hash: the hash.
        is_there: whether the block is ready from now on.
        was_ready: whether it was ready before, if the hash has left.
    """

    pool: "BlockPool"
    block_hash: BlockHash
    is_there: bool
    was_ready: bool = False


class BlockPool:
    """A fixed number of blocks, an index by hash, and a free list in the order of eviction.

    Empty blocks are handed out first. Then come the others that nobody uses, see `FreeList`:
    duplicates of blocks that a faster tier keeps, the blocks in the order of eviction, and those
    that are pinned or prefetched. If more than `most_last` blocks were pinned, the further ones
    stand among the other ones. A block that is not clean is never evicted.

    The pool calls nobody. Who changes whether the eviction of a block loses something says so with
    `put_clean`, and what an allocation has evicted is in its result.

    Invariants (`check`):
        1. no block is in the free list twice;
        2. the free list holds exactly the blocks with ref_count 0, except those with readers that
           lost their hash: the last `remove_reader` puts them back;
        3. the index maps exactly the hashed blocks, each under its own hash;
        4. a free block is either empty, or hashed and ready; at most `most_last` go last;
        5. a block that is loading is in use;
        6. the invariants of the free list and of the floors hold.

    Attributes:
        num_blocks: all blocks of the pool.
        most_last: how many blocks may be held back to be evicted last.
        changes: what has become ready and what has left the index, oldest first; whoever wants
            to know puts a list here and empties it.
        pinned, prefetched: hashes of blocks to be evicted last, for claims and for queued requests;
            a change applies to a block from its next use on.
        superseded: the same of blocks to be evicted first.
    """

    def __init__(self, num_blocks: int, order: str = "lru") -> None:
        """Make a pool of empty blocks; for the names of orders see `orders.ORDERS`."""
        self.num_blocks = num_blocks
        self.most_last = num_blocks // 2
        self.changes: list[PoolChange] | None = None
        self.pinned: Collection[BlockHash] = ()
        self.prefetched: Collection[BlockHash] = ()
        self.superseded: Collection[BlockHash] = ()
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._index: dict[BlockHash, Block] = {}
        self._empty = deque(self._blocks)
        self._free = FreeList(num_blocks, order)

    @property
    def floors(self) -> Mapping[bytes, int]:
        """Number of hashed blocks that each tenant keeps, even if others want them."""
        return self._free.floors.by_tenant

    @floors.setter
    def floors(self, floors: Mapping[bytes, int]) -> None:
        self._free.set_floors(floors, self._index.values())

    @property
    def num_empty(self) -> int:
        """Blocks that nobody uses and that hold nothing."""
        return len(self._empty)

    @property
    def num_evictable(self) -> int:
        """Blocks that nobody uses and that hold cached content, evicted last or not."""
        return len(self._free)

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses, empty and evictable."""
        return self.num_empty + self.num_evictable

    def num_free_for(self, tenant: bytes) -> int:
        """Return how many free blocks the floors of other tenants do not keep from a tenant."""
        return self.num_free - self._free.floors.kept_from(tenant).num_all

    @property
    def num_soon_clean(self) -> int:
        """Blocks that are empty, or due and clean now or once the copies under way have ended."""
        return self.num_empty + self._free.num_soon_clean

    @property
    def num_clean(self) -> int:
        """Blocks that are empty, or due and clean, so that an allocation takes them at once."""
        return self.num_empty + self._free.num_clean

    @property
    def num_used(self) -> int:
        """Blocks that somebody uses."""
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Hashed blocks, used or not."""
        return len(self._index)

    @property
    def num_last(self) -> int:
        """Evictable blocks that are evicted last."""
        return self._free.num_in(LAST)

    @property
    def num_duplicates(self) -> int:
        """Evictable blocks that are evicted first."""
        return self._free.num_in(DUPLICATES)

    @property
    def num_young(self) -> int:
        """Evictable blocks whose turn has not come since they were last used."""
        return self._free.num_young

    @property
    def hashes(self) -> list[BlockHash]:
        """The hashes of all blocks that are ready."""
        return [block_hash for block_hash, block in self._index.items() if block.is_ready]

    def lookup(self, block_hash: BlockHash) -> Block | None:
        """Return the block of this hash, ready or not; no side effect."""
        return self._index.get(block_hash)

    def evictable(self) -> Iterator[Block]:
        """Return the evictable blocks in the order of eviction; slow, for tests and checks."""
        return iter(self._free)

    def is_duplicate(self, block: Block) -> bool:
        """Return whether a block is evictable, and among those that are evicted first."""
        return block.part is not None and self._free.line_of(block) == DUPLICATES

    def holds_young(self, hashes: Iterable[BlockHash | None]) -> list[bool]:
        """Return which blocks are ready, and in use or not among the next to be evicted.

        The next ones are those whose turn has come, for an allocation or ahead of one, but not
        those that the floor of their tenant keeps.
        """
        is_kept = self._free.is_kept
        return [
            block is not None and block.is_ready and (not block.rank or is_kept(block))
            for block in map(self._index.get, hashes)  # type: ignore[arg-type]
        ]

    def allocate(
        self,
        count: int,
        *,
        tenant: bytes | None = None,
        takes_kept: bool = False,
        is_partial: bool = False,
        only_empty: bool = False,
    ) -> Taken:
        """Take blocks for new content: empty ones first, then those whose turn it is.

        Args:
            count: how many blocks.
            tenant: the tenant that gets them; None if they are for no tenant.
            takes_kept: whether blocks within the floors of other tenants are taken, too, but last
                of all. Without a tenant, they always are.
            is_partial: whether fewer blocks are acceptable.
            only_empty: whether to evict nothing.
        """
        if only_empty:
            count = min(count, self.num_empty)
        num_empty = min(count, self.num_empty)
        victims = self._free.take(
            count - num_empty,
            tenant,
            takes_kept=takes_kept or tenant is None,
            is_partial=is_partial,
        )
        num_kept = self._free.floors.kept_from(tenant).num_all
        if num_empty + len(victims) < count and not is_partial:
            return Taken(None, [], num_kept)
        taken = [self._empty.popleft() for _ in range(num_empty)]
        evicted = self._unindex(victims)
        clear(victims)
        taken += victims
        for block in taken:
            block.ref_count = 1
        return Taken(taken, evicted, num_kept)

    def evict_clean(self) -> list[BlockHash]:
        """Evict all blocks that nobody uses and that can be evicted now; return their hashes."""
        victims = self._free.take(
            self.num_evictable, None, takes_kept=True, is_partial=True, makes_late=False
        )
        evicted = self._unindex(victims)
        self._append(victims)
        return evicted

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
        if self._free.floors.by_tenant:
            self._free.floors.change(tenant).num_hashed += 1
        return block

    def insert_filled(self, blocks: Sequence[Block], hashes: Sequence[BlockHash]) -> None:
        """Give used blocks hashes that the index lacks, and note that their content is complete."""
        index, tenant, whole = self._index, b"", Content.WHOLE
        for block, block_hash in zip(blocks, hashes, strict=True):
            assert block.block_hash is None and block_hash not in index, block
            index[block_hash] = block
            block.block_hash, block.tenant = block_hash, tenant
            block.content, block.is_ready = whole, True
        if self._free.floors.by_tenant:
            self._free.floors.change(tenant).num_hashed += len(blocks)
        if self.changes is not None:
            self.changes += [PoolChange(self, each, is_there=True) for each in hashes]

    def fill(self, block: Block, *, is_whole: bool = True) -> None:
        """Note that a block's content is there, so that hits may use it.

        Args:
            block: that was filled.
            is_whole: whether all layers are there, or only the first ones.
        """
        was_ready = block.is_ready
        block.fill(is_whole=is_whole)
        if self.changes is not None and not was_ready and block.block_hash is not None:
            self.changes.append(PoolChange(self, block.block_hash, is_there=True))

    def acquire(self, blocks: Iterable[Block]) -> list[Block]:
        """Add a user to blocks that are in the index or in use; return those that were due."""
        free: list[Block] = []
        for block in blocks:
            if not block.ref_count:
                free.append(block)
            block.ref_count += 1
        due = [block for block in free if block.rank]
        if free:
            self._free.remove(free)
        return due

    def find(self, hashes: Iterable[BlockHash | None]) -> list[Block | None]:
        """Return the block of each hash, ready or not; None for those that are not in the index."""
        return list(map(self._index.get, hashes))  # type: ignore[arg-type]

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
        rest: list[Block] = []
        is_plain = not (self._free.floors.by_tenant or self.pinned or self.prefetched)
        is_plain = is_plain and not self.superseded
        doubles, others, _ = self._free.young
        add_double, add_other = doubles.add, others.add
        for block in blocks:
            assert block.ref_count > 0, block
            if after:
                block.last_step = after
            block.ref_count -= 1
            if block.ref_count:
                continue
            if not (is_plain and block.is_ready and block.block_hash is not None):
                rest.append(block)
            elif block.is_double:  # from here on the same as `_append`, but faster
                add_double(block)
                block.part = doubles
            else:
                add_other(block)
                block.part = others
        if rest:
            self._unindex([block for block in rest if not block.is_ready])
            self._append(rest)

    def add_reader(self, block: Block) -> None:
        """Keep a block's memory from reuse while a copy reads it; its place in the order stays."""
        self._put_readers(block, block.num_readers + 1)

    def remove_reader(self, block: Block) -> None:
        """Take back one `add_reader`."""
        assert block.num_readers > 0, block
        self._put_readers(block, block.num_readers - 1)
        if block.ref_count == 0 and block.block_hash is None:
            self._append([block])

    def _put_readers(self, block: Block, count: int) -> None:
        if block.part is not None:
            self._free.put_readers(block, count)
        else:
            block.num_readers = count

    def put_clean(self, block: Block, is_clean: bool) -> None:
        """Note whether evicting a block loses nothing; its place in the order stays."""
        if block.is_clean == is_clean:
            return
        if block.part is not None:
            self._free.put_clean(block, is_clean)
        else:
            block.is_clean = is_clean

    def look_ahead(self, num_ahead: int, most_looks: int) -> list[Block]:
        """Have the turn of `num_ahead` blocks come; return those whose turn had not come before.

        Args:
            num_ahead: how many blocks, besides those that floors keep.
            most_looks: how many new ones there may be.
        """
        return self._free.look_ahead(num_ahead, most_looks)

    def dirty(self, num_ahead: int, at_most: int) -> list[Block]:
        """Return the first blocks that wait to be copied, of those whose turn has come.

        Args:
            num_ahead: how many of the next blocks shall be clean, including those that copies read.
            at_most: how many blocks to return at most.
        """
        return self._free.dirty(num_ahead, at_most)

    def late(self, num_allowed: int) -> list[Block]:
        """Return the first blocks that wait to be copied although younger ones were evicted.

        Args:
            num_allowed: how many such blocks, the youngest of them, are not returned.
        """
        return self._free.late(num_allowed)

    def postpone(self, block: Block) -> None:
        """Have `dirty` return a block after the others, because its copy cannot be started yet."""
        self._free.postpone(block)

    def touch(self, hashes: Iterable[BlockHash]) -> None:
        """Make a chain's evictable blocks the youngest; its head, given first, is the last."""
        blocks = self.find(dict.fromkeys(hashes))  # a block may be named twice
        self.renew([block for block in blocks if block is not None])

    def renew(self, blocks: Sequence[Block]) -> None:
        """Make those of different blocks that are evictable the youngest; the first is the last."""
        if found := [block for block in reversed(blocks) if not block.ref_count]:
            self._free.remove(found)
            self._append(found)

    def drop(self, block_hash: BlockHash) -> Block | None:
        """Forget a hash; a block in use is freed when its last user releases it."""
        block = self._index.get(block_hash)
        if block is None:
            return None
        if not block.ref_count:
            self._free.remove([block])
        self._unindex([block])
        if not block.ref_count:
            self._append([block])
        return block

    def check(self) -> None:
        """Raise IntegrityError if an invariant of the class docstring is broken."""
        places = Counter(chain(self._empty, self._free))
        empty = set(self._empty)
        for block in self._blocks:
            is_hashed = block.block_hash is not None
            is_free = block.ref_count == 0 and (is_hashed or block.num_readers == 0)
            if places[block] != is_free or min(block.ref_count, block.num_readers) < 0:
                counts = f"ref_count {block.ref_count} and num_readers {block.num_readers}"
                raise IntegrityError(f"{block} has {counts}, in {places[block]} free lists")
            if is_free and (block in empty) == is_hashed:
                raise IntegrityError(f"{block} is in the wrong part of the free list")
            if block.is_ready != (block.content >= Content.EARLY):
                raise IntegrityError(f"{block} says of its content what is not so")
            if block.is_copying and not block.ref_count:
                raise IntegrityError(f"{block} is being loaded, but no request uses it")
            if is_free and is_hashed and not block.is_ready:
                raise IntegrityError(f"{block} can be evicted, but was never filled")
        hashed = [block for block in self._blocks if block.block_hash is not None]
        self._free.check(hashed)
        if self.num_last > self.most_last:
            what = f"{self.num_last} blocks are pinned"
            raise IntegrityError(f"{what}, but at most {self.most_last} may be")
        if len(hashed) != len(self._index):
            what = f"{len(hashed)} blocks have a hash"
            raise IntegrityError(f"{what}, but {len(self._index)} are in the index")
        for block_hash, block in self._index.items():
            if block.block_hash != block_hash:
                raise IntegrityError(f"{block} is not in the index under its hash")

    def _append(self, blocks: Sequence[Block]) -> None:
        """Put free blocks at the young ends of their lines."""
        free = [block for block in blocks if block.block_hash is not None]
        if len(free) < len(blocks):
            empty = [it for it in blocks if it.block_hash is None and not it.num_readers]
            clear(empty)  # `remove_reader` puts the others there
            self._empty.extend(empty)
            if not free:
                return
        last = self._last_of(free) if self.pinned or self.prefetched else {}
        if last:
            free = [block for block in free if block not in last]
        lines: tuple[list[Block], list[Block]] = [], []
        for block in free:
            goes_first = block.is_double or block.block_hash in self.superseded
            lines[not goes_first].append(block)
        for line, some in zip((DUPLICATES, OTHERS), lines, strict=True):
            self._free.append(some, line)
        self._free.append([*last], LAST)

    def _last_of(self, blocks: Iterable[Block]) -> dict[Block, None]:
        """Return which of these blocks are evicted last."""
        wanted = (
            block
            for block in blocks
            if block.block_hash in self.pinned
            or (block.block_hash in self.prefetched and not block.is_double)
        )
        return dict.fromkeys(islice(wanted, max(0, self.most_last - self.num_last)))

    def _unindex(self, blocks: Iterable[Block]) -> list[BlockHash]:
        """Take blocks out of the index; return the hashes of those that had one."""
        evicted: list[BlockHash] = []
        index, floors, changes = self._index, self._free.floors, self.changes
        is_counting = bool(floors.by_tenant)
        for block in blocks:
            if (block_hash := block.block_hash) is None:
                continue
            del index[block_hash]
            block.block_hash = block.place = None
            evicted.append(block_hash)
            if is_counting:
                floors.change(block.tenant).num_hashed -= 1
            if changes is not None:
                changes.append(
                    PoolChange(self, block_hash, is_there=False, was_ready=block.is_ready)
                )
        return evicted
