"""Asks the disk for what it has not told: which blocks of a chain it has, and how old copies are.

Which blocks the disk has stands in `Tiers.presence`. Until that is whole, as after a start or where
a disk never tells, the disk is asked for the blocks of a chain that neither RAM nor the table has.
The request is admitted with the answer, a moment after it came. A disk that does not answer costs
one timeout: until it answers, it is not asked again.

A block that was computed though the disk has it is not written again, and it is as old as its copy:
else the copy might be kept for longer than it may. The table tells no ages, so the disk is asked,
and nobody waits for the answer. Until it comes, no use of the block is told to the disk.

Called by the engine's thread only.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tieredkv.cache.catalog import Entry
from tieredkv.cache.chain import Chain
from tieredkv.cache.tiers import Tiers
from tieredkv.types import BlockHash

LOOKUP_TIMEOUT_S = 1.0
"""Without an answer for so long, the disk counts as having nothing of the chain."""


@dataclass(slots=True, eq=False)
class _Question:
    chain: Chain
    asked_at: float
    is_overdue: bool = False


class Lookups:
    """The lookups of all queued requests, from the question to the answer.

    Args:
        tiers: the tiers.
        use: called with each chain that was answered in time, and the blocks that the disk has.
    """

    def __init__(self, tiers: Tiers, use: Callable[[Chain, list[BlockHash]], object]) -> None:
        self._tiers, self._use = tiers, use
        self._questions: dict[Chain, _Question] = {}  # that are waited for
        self._asked: dict[Chain, set[BlockHash]] = {}  # so far
        self._answers: dict[Chain, dict[int, int]] = {}  # by index: until when the disk has it
        self._num_overdue = 0

    def answers(self, chain: Chain) -> Mapping[int, int]:
        """Return until when the disk has blocks of a chain, by index, as it has answered."""
        return self._answers.get(chain, {})

    def ask(self, chain: Chain, hashes: Collection[BlockHash]) -> None:
        """Ask for those of some blocks of a chain that were not asked for yet, if need be."""
        tiers = self._tiers
        if tiers.store is None or tiers.presence.is_whole or not hashes:
            return
        if self._num_overdue or chain in self._questions:
            return
        asked = self._asked.setdefault(chain, set())
        if unknown := [block_hash for block_hash in hashes if block_hash not in asked]:
            asked.update(unknown)
            question = self._questions[chain] = _Question(chain, time.monotonic())
            tiers.disk_link.look_up(unknown, partial(self._take, question))

    def has_asked(self, chain: Chain, hashes: Collection[BlockHash]) -> bool:
        """Return whether the disk was asked for all of these blocks of a chain."""
        return self._asked.get(chain, set()).issuperset(hashes)

    def is_settled(self, chain: Chain) -> bool:
        """Return whether a chain's lookup has ended or took too long, or there was none."""
        if (question := self._questions.get(chain)) is None:
            return True
        if time.monotonic() < question.asked_at + LOOKUP_TIMEOUT_S:
            return False
        del self._questions[chain]
        question.is_overdue = True
        self._num_overdue += 1
        self._tiers.counters.load_failures["lookup_timeout"] += 1
        return True

    def _take(self, question: _Question, found: Mapping[bytes, bytes]) -> None:
        """Note an answer, and have it used, unless it comes too late."""
        chain = question.chain
        if question.is_overdue:
            self._num_overdue -= 1
        if self._questions.get(chain) is not question:
            return
        del self._questions[chain]
        times_of = self._tiers.disk_link.times_of
        for index, block_hash in chain.named if found else ():
            if (data := found.get(block_hash)) is not None:
                until = self._answers.setdefault(chain, {})
                until[index] = math.ceil(times_of(data).expires_at)
        self._use(chain, [*map(BlockHash, found)])

    def note_gone(self, hashes: Collection[bytes]) -> None:
        """Note that blocks have left the disk, which answers may have told of."""
        gone = {*hashes} if self._answers else ()
        for chain, answers in self._answers.items():
            for index in [each for each in answers if chain.hashes[each] in gone]:
                del answers[index]

    def forget_answers(self) -> None:
        """Note that another worker serves the disk, which may have other blocks."""
        self._answers.clear()

    def forget(self, chain: Chain) -> None:
        """Note that nobody waits for a chain's answer any more."""
        self._asked.pop(chain, None)
        self._answers.pop(chain, None)
        self._questions.pop(chain, None)


class Lives:
    """The blocks whose copies on disk are of an age that is not known yet."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._awaited: set[BlockHash] = set()

    def is_age_unknown(self, entry: Entry) -> bool:
        """Return whether the age of a block's copy is not known yet."""
        return entry.block_hash in self._awaited

    def ask(self, entries: Sequence[Entry]) -> None:
        """Ask for the lives of blocks that were computed and count as being on disk."""
        if entries:
            hashes = [entry.block_hash for entry in entries]
            self._awaited.update(hashes)
            self._tiers.disk_link.look_up(hashes, partial(self._take, hashes))

    def _take(self, hashes: Sequence[BlockHash], found: Mapping[bytes, bytes]) -> None:
        """Have blocks be as old as their copies."""
        tiers, catalog = self._tiers, self._tiers.catalog
        on_disk = list[Entry]()
        self._awaited.difference_update(hashes)
        for entry in filter(None, map(catalog.get, hashes)):
            if (data := found.get(entry.block_hash)) is None:
                tiers.note_not_on_disk(entry)
                continue
            known = tiers.disk_link.times_of(data)
            entry.computed_at = min(entry.computed_at, known.computed_at)
            entry.disk_expires_at = known.expires_at
            on_disk.append(entry)
        catalog.add_all(on_disk)
        tiers.disk_link.touch(catalog.touch_items(on_disk, tiers.clock.now()))
