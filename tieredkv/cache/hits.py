"""What the tiers have of a chain: how much is a hit, where each block comes from, and what missed.

Called by the engine's thread only.
"""

import sys
from bisect import bisect_left
from collections.abc import Collection, Iterator

from tieredkv.cache.block import Block
from tieredkv.cache.prefix import Prefix
from tieredkv.cache.restores import Restores
from tieredkv.cache.row import LOADABLE, State
from tieredkv.cache.tiers import Tiers
from tieredkv.types import BlockHash, Tier

NUM_SAMPLED = 16
"""Blocks of a chain that are looked up to tell which part of it RAM holds."""


class Hits:
    """Finds chains in the tiers.

    Args:
        tiers: the tiers.
        restores: take what slower tiers have.
    """

    def __init__(self, tiers: Tiers, restores: Restores) -> None:
        self._tiers, self._restores = tiers, restores

    def look(self, prefix: Prefix) -> list[BlockHash]:
        """Note which blocks of a queued request's chain the disk has; return those RAM lacks.

        Blocks that cannot be hits are left out.
        """
        tiers = self._tiers
        if tiers.store is None or not tiers.can_load:
            return []
        end = None if prefix.read_ends is None else max(prefix.read_ends, default=0)
        hashes, known = prefix.hashes[:end], prefix.disk_until
        until: list[int] = tiers.presence.until(hashes).tolist()
        until += [0] * (len(prefix.hashes) - len(until))
        if not tiers.presence.is_whole and known:  # what the disk has answered counts as well
            until[: len(known)] = [*map(max, until, known)]
        prefix.disk_until = until
        return tiers.host.missing(tiers.device.missing(hashes))

    def note_in_ram(self, prefix: Prefix, missing: Collection[BlockHash]) -> None:
        """Note for a queued request which of its blocks are in VRAM or host memory.

        Args:
            prefix: its chain.
            missing: the blocks that may be hits and are not there.
        """
        row, absent, may_be = prefix.row, set(missing), prefix.hashes
        if prefix.read_ends is not None:
            may_be = may_be[: max(prefix.read_ends, default=0)]
        for index, block_hash in enumerate(may_be) if len(missing) < len(may_be) else ():
            if block_hash not in absent and row[index] != State.COMING:
                row.find(index, State.FOUND)

    def readable(self, prefix: Prefix) -> list[BlockHash]:
        """Return the head of a chain that may be a hit: up to the last of `read_ends` in the tiers.

        Without `read_ends` this is the whole chain. Blocks that are being computed or loaded for
        other requests count as present.
        """
        if prefix.read_ends is None:
            return prefix.hashes
        tiers, hashes = self._tiers, prefix.hashes
        missing = tiers.device.missing(hashes)
        if tiers.can_load:
            now = tiers.clock.now()
            on_disk = {it for i, it in enumerate(hashes) if prefix.is_on_disk(i, now)}
            missing = [each for each in tiers.host.missing(missing) if each not in on_disk]
        num_found = prefix.num_present = hashes.index(missing[0]) if missing else len(hashes)
        # What is missing behind the first block that is missing changes no end of a hit.
        return hashes[: prefix.hit_end([range(num_found, sys.maxsize)])]

    def num_held(self, prefix: Prefix) -> int:
        """Return how many blocks at the head of a chain need no computing, by and large.

        They are those that some tier holds, or soon will. Blocks on disk count as one half each: a
        part of them is computed, and they take room that others have. A chain is evicted from its
        tail, so that the end of its head is found by bisection; which part of that RAM holds is
        told by a sample.
        """
        hashes, now = prefix.hashes, self._tiers.clock.now()

        def is_in_ram(block_hash: BlockHash) -> bool:
            return any(pool.lookup(block_hash) for pool in self._tiers.pools.values())

        def is_missing(index: int) -> bool:
            return not (is_in_ram(hashes[index]) or prefix.is_on_disk(index, now))

        num_found = bisect_left(range(len(hashes)), True, key=is_missing)
        if not num_found:
            return 0
        sample = hashes[: num_found : -(-num_found // NUM_SAMPLED)]
        num_in_ram = sum(map(is_in_ram, sample))
        return num_found * (len(sample) + num_in_ram) // (2 * len(sample))

    def prefetch(self, prefix: Prefix) -> None:
        """Have all blocks read for a queued request that the disk has told of and RAM lacks."""
        tiers, row, hashes = self._tiers, prefix.row, self.readable(prefix)
        now = tiers.clock.now()
        for state in LOADABLE:
            row.leave(row.indices(state))
        for index, block_hash in enumerate(hashes):
            if prefix.is_on_disk(index, now) and not tiers.is_in_ram(block_hash):
                is_coming = tiers.disk_link.is_coming(block_hash)
                row.find(index, State.READING if is_coming else State.AT_DISK)
        self._restores.want(prefix, end=len(hashes))

    def take(self, prefix: Prefix, chain: list[Block | None], fresh: Iterator[Block]) -> None:
        """Fill a request's table with the blocks that were found and with fresh blocks.

        Fresh blocks are filled from the fastest tier that has their bytes, if any has. Blocks
        behind `chain`, which may not be hits, are computed.
        """
        tiers, tenant = self._tiers, prefix.tenant
        blocks, row = prefix.blocks, prefix.row
        end, now = 0, tiers.clock.now()
        brought = {*row.indices(State.COMING)}  # while the request waited for room
        row.begin(len(prefix.hashes))
        hashes = prefix.hashes[: len(chain)]
        pages = tiers.host.find(hashes) if tiers.can_load else [None] * len(chain)
        for index, (block, block_hash, page) in enumerate(zip(chain, hashes, pages, strict=True)):
            if block is not None:
                if block.is_ready and index not in brought:
                    row.find(index, State.FOUND)
                elif block.is_ready or block.is_copying:
                    row.find(index, State.COMING)
                elif tiers.disk_link.is_coming(block_hash):
                    row.find(index, State.READING)
                else:
                    row.find(index, State.SHARED)
            else:
                block = next(fresh)
                tiers.device.insert(block, block_hash, tenant)
                if page is not None and page.is_ready:
                    block.source = page.source or Tier.HOST
                    row.find(index, State.AT_HOST)
                elif tiers.disk_link.is_coming(block_hash):
                    block.source = Tier.DISK
                    row.find(index, State.READING)
                elif prefix.is_on_disk(index, now):
                    block.source = Tier.DISK
                    row.find(index, State.AT_DISK)
            if not block.is_ready and row[index] != State.COMPUTE:
                end = index + 1
            blocks.append(block)
        for block_hash in prefix.hashes[len(chain) :]:
            blocks.append(next(fresh))
            tiers.device.insert(blocks[-1], block_hash, tenant)  # a known hash leaves it private
        self._restores.want(prefix, end=end)

    def why_missed(self, prefix: Prefix, index: int) -> str:
        """Return why a block of an admitted request had to be computed."""
        tiers, block_hash = self._tiers, prefix.hashes[index]
        if (why := prefix.row.lost.get(index)) is not None:
            return why
        if index < prefix.num_present:
            if 0 not in (prefix.read_ends or ()) or prefix.num_present == len(prefix.hashes):
                return "behind_lookback"
            # With this block, a hit could have ended behind it.
            block_hash = prefix.hashes[prefix.num_present]
        if not tiers.can_load and tiers.host.lookup(block_hash):
            return "loads_off"
        return tiers.catalog.departed.why(block_hash, tiers.clock.now())
