"""How stored blocks follow each other: chains, where they part, and sums over whole chains.

All of it is worked out with NumPy for all blocks at once. This module knows a table of blocks, not
the index.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieredkv.operate.chain_ids import named_blocks
from tieredkv.operate.models import AnchorNeeds, KnownModels
from tieredkv.operate.table import Blocks, BlockTable, places_named

Places = NDArray[np.int32]
"""Of blocks in a table."""

Mask = NDArray[np.bool]
"""[num_blocks], whether something is so of each block."""


class Chains:
    """The blocks of a table, and which one follows which.

    A block is known by its place in the table, and found by its key, which is the first 8 bytes of
    its hash: one block in 10^13 may be taken for another's parent.

    A run is a stretch of blocks that follow each other, from one that has no parent, or a parent
    with other children, down to one that has no child, or several.

    Args:
        table: of the blocks.

    Attributes:
        blocks: those of the table that follow one another.
        pages: the further pages of blocks, of models that have layers with windows.
        kinds: those of the table.
        leaves: places of the blocks that none follows, the last used first.
        heads: places of the first block of each run.
        run: the number of each block's run.
        run_above: the number of the run above each run; the number of runs where there is none.
    """

    def __init__(self, table: BlockTable) -> None:
        blocks, self.kinds = table
        is_page = blocks["page_kind"] > 0
        self.pages = blocks[is_page]
        self.blocks = blocks = blocks[~is_page] if len(self.pages) else blocks
        self._keys, self._positions = blocks["key"].copy(), blocks["position"].copy()
        num = len(blocks)
        self._above = self._places(blocks["parent_key"])  # the parent's place, or `num`
        # A record that contradicts itself must not lead in a circle.
        self._above[np.append(self._positions, 0)[self._above] >= self._positions] = num
        num_children = np.bincount(self._above, minlength=num + 1).astype(np.int32)
        num_children[num] = 0
        leaves = np.flatnonzero(num_children[:num] == 0).astype(np.int32)
        self.leaves = leaves[np.argsort(-blocks["last_used"][leaves], kind="stable")]
        head = self._tops(num_children[self._above] != 1)
        is_head = head == np.arange(num, dtype=np.int32)
        self.heads = np.flatnonzero(is_head).astype(np.int32)
        self.run = (np.cumsum(is_head, dtype=np.int32) - np.int32(1))[head]
        run_above = np.append(self.run, np.int32(len(self.heads)))[self._above[self.heads]]
        self.run_above = run_above

    def __len__(self) -> int:
        return len(self.blocks)

    def has_parent(self) -> Mask:
        """Return which blocks have a parent in the table."""
        return self._above < len(self)

    def following(self, starts: Mask, ends: Mask | None = None) -> Mask:
        """Return which blocks are among some or behind one of them.

        Args:
            starts: which blocks.
            ends: blocks that are left out with all behind them, but for what is behind a start.
        """
        ends = np.zeros_like(starts) if ends is None else ends
        return np.asarray((starts & ~ends)[self._tops(starts | ends)])

    def named(self, ids: Sequence[str]) -> tuple[list[int], list[str]]:
        """Return the places of the blocks that ids name, and the ids that name none.

        The last block of an id says which chain is meant. Its first one is needed where that is
        gone, or cut off by a hole.
        """
        places, unknown_ids = list[int](), list[str]()
        for id_ in ids:
            firsts, lasts = (
                places_named(self._keys, self.blocks["key_rest"], digits) if digits else []
                for digits in named_blocks(id_) or ("", "")
            )
            firsts = [it for it in firsts if not any(self._leads_to(it, to) for to in lasts)]
            places += [*lasts, *firsts]
            unknown_ids += [] if lasts or firsts else [id_]
        return places, unknown_ids

    def _leads_to(self, first: int, last: int) -> bool:
        """Return whether one block is another or is before it."""
        while last < len(self) and self._positions[last] > self._positions[first]:
            last = self._above[last]
        return last == first

    def of_blocks(self, places: Sequence[int] | Places) -> tuple[Blocks, Blocks]:
        """Return some blocks and all that follow them, and those before that only these have.

        Of blocks that follow each other the last one comes first.
        """
        is_named = np.zeros(len(self), bool)
        is_named[places] = True
        is_following = self.following(is_named)
        is_kept = np.zeros(len(self.heads) + 1, bool)  # runs that lead to other leaves
        is_kept[-1] = True
        runs = self.run[self.leaves[~is_following[self.leaves]]]
        while len(runs):
            is_kept[runs] = True
            runs = np.unique(self.run_above[runs])
            runs = runs[~is_kept[runs]]
        parts = (self.blocks[each] for each in (is_following, ~is_following & ~is_kept[self.run]))
        following, before = (it[np.argsort(it["position"], kind="stable")[::-1]] for it in parts)
        return following, before

    def pages_of(self, blocks: Blocks) -> Blocks:
        """Return the further pages of some blocks."""
        return self.pages[np.isin(self.pages["parent_key"], blocks["key"])]

    def anchor_needs(self, models: KnownModels) -> list[AnchorNeeds | None]:
        """Return for each of `kinds` what its model needs where a request is to go on."""
        known = [models.of(kind.root, kind.namespace) for kind in self.kinds]
        return [None if model is None else model.anchor_needs for model in known]

    def anchors(self, needs: Sequence[AnchorNeeds | None]) -> Mask:
        """Return behind which blocks all pages of windows are there that a request needs.

        Args:
            needs: of the model of each of `kinds`; None where it has no windows.
        """
        kinds, positions = self.blocks["kind"], self._positions
        num_blocks, num_pages = np.array([it or (0, 0) for it in needs], int).reshape(-1, 2).T
        has_block = np.isin(self.pages["parent_key"], self._keys)
        owners = np.searchsorted(self._keys, self.pages["parent_key"][has_block])
        counts = np.bincount(owners, minlength=len(self))
        is_whole = counts >= num_pages[kinds]
        tops = self._tops(~is_whole)  # where the blocks before each one begin that are whole
        num_whole = positions - positions[tops].astype(int) + is_whole[tops]
        is_enough = num_whole >= np.minimum(num_blocks[kinds], positions.astype(int) + 1)
        return np.asarray(is_whole & is_enough & (num_pages[kinds] > 0))

    def totals(self, values: NDArray[Any], combine: np.ufunc, dtype: type[Any]) -> NDArray[Any]:
        """Combine a value of each block over whole chains.

        Args:
            values: [num_blocks].
            combine: `np.add`, or `np.minimum` or `np.maximum` of floats.
            dtype: of the totals.

        Returns:
            For each run: over its blocks and all before them.
        """
        nothing = 0 if combine is np.add else np.inf if combine is np.minimum else -np.inf
        totals = np.full(len(self.heads) + 1, nothing, dtype)
        combine.at(totals, self.run, values)
        above = np.append(self.run_above, np.int32(len(self.heads)))
        while np.any(above < len(self.heads)):  # each round combines twice as many runs
            totals = combine(totals, totals[above])
            above = above[above]
        return totals[:-1]

    def _tops(self, is_top: Mask) -> Places:
        """Return the first block before each one, or itself, that is a top or has no parent."""
        num = len(self)
        places = np.arange(num, dtype=np.int32)
        tops = np.where(is_top | (self._above == num), places, self._above)
        while not np.array_equal(further := tops[tops], tops):
            tops = further
        return np.asarray(tops)

    def _places(self, keys: NDArray[np.uint64]) -> Places:
        """Return the places of blocks by their keys; the number of blocks where there is none."""
        order = np.argsort(keys).astype(np.int32)  # neighbours are then found near each other
        places = np.empty(len(keys), np.int32)
        places[order] = np.searchsorted(self._keys, keys[order])
        is_found = places < len(self)
        is_found[is_found] = self._keys[places[is_found]] == keys[is_found]
        places[~is_found] = len(self)
        return places
