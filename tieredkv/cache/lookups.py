"""Asks the disk for what it has not told: which blocks of a chain it has.

Which blocks the disk has stands in `Tiers.presence`. Until that is whole, as after a start or where
a disk never tells, the disk is asked for the blocks of a chain that neither RAM nor the table has.
The answer is an event, so that the request is admitted a moment after it came. A disk that does not
answer costs one timeout: until it answers, it is not asked again.

Called by the engine's thread only.
"""

import math
import time
from collections.abc import Collection, Mapping
from typing import NamedTuple

from tieredkv.cache.chain import Chain
from tieredkv.cache.tiers import Tiers
from tieredkv.tier import LookupDone
from tieredkv.types import BlockHash

LOOKUP_TIMEOUT_S = 1.0
"""Without an answer for so long, the disk counts as having nothing of the chain."""


class _Question(NamedTuple):
    job: int
    asked_at: float


class Lookups:
    """The lookups of all queued requests, from the question to the answer."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._open: dict[int, Chain | None] = {}  # by job; None if the answer is overdue
        self._questions: dict[Chain, _Question] = {}
        self._asked: dict[Chain, set[BlockHash]] = {}  # so far
        self._answers: dict[Chain, dict[int, int]] = {}  # by index: until when the disk has it
        self._num_overdue = 0

    def answers(self, chain: Chain) -> Mapping[int, int]:
        """Return until when the disk has blocks of a chain, by index, as it has answered."""
        return self._answers.get(chain, {})

    def ask(self, chain: Chain, hashes: Collection[BlockHash]) -> None:
        """Ask for those of some blocks of a chain that were not asked for yet, if need be."""
        store = self._tiers.store
        if store is None or self._tiers.presence.is_whole or not hashes:
            return
        if self._num_overdue or chain in self._questions:
            return
        asked = self._asked.setdefault(chain, set())
        if unknown := [block_hash for block_hash in hashes if block_hash not in asked]:
            asked.update(unknown)
            question = self._questions[chain] = _Question(store.lookup(unknown), time.monotonic())
            self._open[question.job] = chain

    def is_settled(self, chain: Chain) -> bool:
        """Return whether a chain's lookup has ended or took too long, or there was none."""
        if (question := self._questions.get(chain)) is None:
            return True
        if time.monotonic() < question.asked_at + LOOKUP_TIMEOUT_S:
            return False
        del self._questions[chain]
        self._open[question.job] = None
        self._num_overdue += 1
        self._tiers.counters.load_failures["lookup_timeout"] += 1
        return True

    def take(self, event: LookupDone) -> Chain | None:
        """Note an answer; return the chain that it is about, unless it comes too late."""
        if event.job not in self._open:
            return None
        chain = self._open.pop(event.job)
        if chain is None:
            self._num_overdue -= 1
            return None
        del self._questions[chain]
        times_of = self._tiers.disk_link.times_of
        for index, block_hash in enumerate(chain.hashes) if event.found else ():
            if (found := event.found.get(block_hash)) is not None:
                until = chain.disk_until[index] = math.ceil(times_of(found).expires_at)
                self._answers.setdefault(chain, {})[index] = until
        return chain

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
        if (question := self._questions.pop(chain, None)) is not None:
            self._open.pop(question.job, None)
