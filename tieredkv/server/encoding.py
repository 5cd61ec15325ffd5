"""An encoded text, its pieces, and other ids in place of some of them.

This module knows neither tokenizers nor messages.
"""

import itertools
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from tieredkv.server.threads import Cancellation


class EncodedPiece(NamedTuple):
    """One piece of a text; all but the first begin with an added token.

    Attributes:
        text: its text.
        ids: the ids of its tokens.
        guards: where guards are in it, counted from its start.
    """

    text: str
    ids: "array[int]"
    guards: Sequence[int]


class Replacement(NamedTuple):
    """Other ids for a few pieces, whose head keeps its ids.

    Attributes:
        first, end: the indexes of the first of these pieces and of the one after them.
        num_head_characters, num_head_ids: the length of the head.
        ids: the ids, with those of the head.
    """

    first: int
    end: int
    num_head_characters: int
    num_head_ids: int
    ids: "array[int]"


class Encoding:
    """An encoded text.

    Args:
        pieces: of the text.
        num_before: returns how many tokens of the piece with an index end at or before a place in
            it.
        ids_of: returns the ids of a short text by itself.
        cancellation: is set once the text is no longer wanted.

    Attributes:
        ids: the ids of its tokens.
        pieces, ids_of, cancellation: as given.
    """

    def __init__(
        self,
        pieces: Sequence[EncodedPiece],
        num_before: Callable[[int, int], int],
        ids_of: Callable[[str], "array[int]"],
        cancellation: Cancellation,
        replacements: Sequence[Replacement] = (),
    ) -> None:
        self.pieces, self.ids_of, self.cancellation = pieces, ids_of, cancellation
        self._num_before = num_before
        self._starts = [*itertools.accumulate((len(piece.text) for piece in pieces), initial=0)]
        # Pieces that are replaced by those before them have no ids.
        self._replaced = {index: it for it in replacements for index in range(it.first, it.end)}
        parts = [self._ids(index) for index in range(len(pieces))]
        self._counts = [*itertools.accumulate(map(len, parts), initial=0)]
        self.ids = list(itertools.chain.from_iterable(parts))

    def replaced(self, replacements: Sequence[Replacement]) -> "Encoding":
        """Return the encoding with other ids for some of its pieces."""
        how = self._num_before, self.ids_of, self.cancellation
        return Encoding(self.pieces, *how, replacements) if replacements else self

    def ends(self, places: Iterable[int]) -> list[int]:
        """Return, for each place in the text, how many tokens end at or before it.

        A place in pieces that are replaced is where their head ends, or before it where they begin.

        Raises:
            CancelledWorkError: the text is no longer wanted.
        """
        ends = []
        for place in places:
            self.cancellation.check()
            index = bisect_right(self._starts, place) - 1
            within = place - self._starts[index]
            if (new := self._replaced.get(index)) is not None:
                is_in_head = place < self._starts[new.first] + new.num_head_characters
                num_within, index = 0 if is_in_head else new.num_head_ids, new.first
            else:
                num_within = self._num_before(index, within) if within else 0
            ends.append(self._counts[index] + num_within)
        return ends

    def _ids(self, index: int) -> "array[int]":
        new = self._replaced.get(index)
        if new is None:
            return self.pieces[index].ids
        return new.ids if index == new.first else array("I")
