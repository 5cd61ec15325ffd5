"""Finds the blocks in VRAM and host memory that only the chains of some ids use.

These are the blocks that an id names, all blocks that follow them, and the blocks before them that
no other chain uses. This module knows neither pools nor what becomes of the blocks.

Called by the engine's thread only.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import chain

from tieredkv.cache.catalog import Catalog, Entry
from tieredkv.cache.pieces import PIECE_BLOCKS, SCANNED_BLOCKS, Pieces, cut, emptying
from tieredkv.operate.chain_ids import named_blocks
from tieredkv.storage.client.names import NO_NAMES, Names
from tieredkv.types import BlockHash


def named(catalog: Catalog, digits: str, names: Names = NO_NAMES) -> Pieces[list[BlockHash]]:
    """Find the blocks whose name starts with these hex digits; none if there are no digits."""
    start, found = bytes.fromhex(digits[: len(digits) // 2 * 2]), list[BlockHash]()
    for entries in cut(catalog.entries() if digits else (), SCANNED_BLOCKS):
        hashes = [each.block_hash for each in entries]
        pairs = zip(hashes, names.hide(hashes), strict=True)
        some = [(block_hash, name) for block_hash, name in pairs if name.startswith(start)]
        found += [block_hash for block_hash, name in some if name.hex().startswith(digits)]
        yield
    return found


class ChainSearch:
    """One search, which goes on in pieces while blocks come and go.

    Args:
        catalog: knows the blocks.
        ids: see `operate.infos.ChainInfo`.
        following: further blocks that count as named, since the disk has them.
        before: further blocks that belong to these chains if no other chain uses them.
        names: which ids are made of.

    Iterating yields the blocks; some of them may have left the tiers since, or be on disk only.

    Attributes:
        unknown_ids: the ids that name no block of the RAM tiers.
    """

    def __init__(
        self,
        catalog: Catalog,
        ids: Sequence[str],
        following: Collection[BlockHash] = (),
        before: Collection[BlockHash] = (),
        names: Names = NO_NAMES,
    ) -> None:
        self.unknown_ids = list[str]()
        self._catalog, self._ids, self._names = catalog, ids, names
        self._following, self._before = following, before
        self._below = set[BlockHash]()  # the named blocks, and those that follow them
        self._above = set[BlockHash]()  # the blocks before them that no other chain uses
        self._levels = defaultdict[int, list[Entry]](list)
        self._num_added = catalog.num_added

    def __contains__(self, block_hash: bytes) -> bool:
        """Return whether a block belongs to the chains, as they are now."""
        if self._num_added != self._catalog.num_added:
            self._look_again()
        return block_hash in self._below or block_hash in self._above

    def __iter__(self) -> Iterator[BlockHash]:
        return chain(self._below, self._above)

    def find(self) -> Pieces[None]:
        """Find the blocks that were there when the search was made."""
        yield from self._find_named()
        levels, positions = self._levels, sorted(self._levels)
        heads_first = (entry for position in positions for entry in levels[position])
        for some in cut(heads_first, SCANNED_BLOCKS):
            for entry in some:
                if entry.parent_hash in self._below:
                    self._below.add(entry.block_hash)
            yield
        wanted, shared = set[BlockHash](), set[BlockHash]()
        for hashes in cut(self._before, SCANNED_BLOCKS):
            wanted.update(hashes)
            yield
        tails_first = (entry for each in reversed(positions) for entry in levels.pop(each))
        for some in cut(tails_first, SCANNED_BLOCKS):
            for entry in some:
                if entry.block_hash in self._below:
                    if entry.parent_hash not in self._below:
                        wanted.add(entry.parent_hash)
                elif entry.block_hash in wanted and entry.block_hash not in shared:
                    self._above.add(entry.block_hash)
                    wanted.add(entry.parent_hash)
                else:
                    shared.add(entry.parent_hash)
            yield
        yield from emptying(shared)
        yield from emptying(wanted)

    def forget(self) -> Pieces[None]:
        """Forget what was found."""
        yield from emptying(self._below)
        yield from emptying(self._above)

    def _look_again(self) -> None:
        """Take in the blocks that have come since the last look.

        Those behind the chains' named blocks belong to them. Others share what is before them.
        """
        entries = self._catalog.added_after(self._num_added)
        self._num_added = self._catalog.num_added
        for entry in entries:
            if entry.parent_hash in self._below:
                self._below.add(entry.block_hash)
            if entry.block_hash in self._below or entry.block_hash in self._above:
                continue
            before: Entry | None = entry
            while before is not None and before.parent_hash in self._above:
                self._above.discard(before.parent_hash)
                before = self._catalog.get(before.parent_hash)

    def _find_named(self) -> Pieces[None]:
        """Find the blocks that the ids name, and note all blocks by their positions."""
        # Of many ids no list or tuple is kept, since the garbage collector looks through those.
        firsts, lasts, digits, on_disk = list[str](), list[str](), set[str](), set[str]()
        lengths, named = set[int](), _ByDigits()
        for ids in cut(self._ids, PIECE_BLOCKS):
            for id_ in ids:
                first, last = named_blocks(id_) or ("", "")
                firsts.append(first)
                lasts.append(last)
                parts = [each for each in (first, last) if each]
                digits.update(parts)
                lengths.update(map(len, parts))
            yield
        most = max(1, SCANNED_BLOCKS // max(1, len(lengths)))
        for some in cut(self._catalog.entries(), most):
            hidden = self._names.hide([entry.block_hash for entry in some])
            for entry, name in zip(some, hidden, strict=True):
                self._levels[entry.position].append(entry)
                text = name.hex()
                for length in lengths:
                    if text[:length] in digits:
                        named.add(text[:length], entry.block_hash)
            yield
        for hashes in cut(self._following, most):
            self._below.update(hashes)
            hidden = self._names.hide(hashes)
            starts = {each.hex()[:length] for each in hidden for length in lengths}
            on_disk |= starts & digits
            yield
        for id_ in reversed(self._ids):
            first, last = firsts.pop(), lasts.pop()
            of_first, of_last = named.find(first), named.find(last)
            if not of_first and not of_last:
                self.unknown_ids.append(id_)
            self._below.update(of_last)
            # If the disk has the last block, the caller already knows the chain from the disk.
            if of_first and last not in on_disk:
                above = yield from self._blocks_above(of_last, of_first)
                self._below.update(each for each in of_first if each not in above)
            yield
        self.unknown_ids.reverse()
        yield from emptying(digits)
        yield from emptying(named.one)

    def _blocks_above(
        self, lasts: Sequence[BlockHash], firsts: Sequence[BlockHash]
    ) -> Pieces[set[BlockHash]]:
        """Return the last blocks of a chain and those before them, as far as its first ones."""
        entries = [entry for entry in map(self._catalog.get, firsts) if entry is not None]
        least = min((entry.position for entry in entries), default=0)
        above = set[BlockHash]()
        for entry in map(self._catalog.get, lasts):
            while entry is not None and entry.block_hash not in above and entry.position >= least:
                above.add(entry.block_hash)
                entry = self._catalog.get(entry.parent_hash)
                if not len(above) % SCANNED_BLOCKS:
                    yield
        return above


class _ByDigits:
    """Blocks by the first digits of their hashes in hex; hardly any digits are those of several."""

    def __init__(self) -> None:
        self.one, self._more = dict[str, BlockHash](), defaultdict[str, list[BlockHash]](list)

    def add(self, digits: str, block_hash: BlockHash) -> None:
        if self.one.setdefault(digits, block_hash) is not block_hash:
            self._more[digits].append(block_hash)

    def find(self, digits: str) -> list[BlockHash]:
        one = self.one.get(digits)
        return [] if one is None else [one, *self._more.get(digits, ())]
