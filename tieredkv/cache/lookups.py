"""Asks the disk which blocks of a chain it has.

The answer is a message of the store's worker, so that a request is admitted a moment after it came.
Where the answer cannot matter, the disk is asked only once the request's first step is issued, so
that the question and the answer do not delay it. A disk that does not answer costs one timeout:
until it answers, it is not asked again.

Called by the engine's thread only.
"""

import time

from tieredkv.cache.prefix import Prefix
from tieredkv.cache.row import State
from tieredkv.cache.tiers import Tiers
from tieredkv.tier import LookupDone
from tieredkv.types import BlockHash

LOOKUP_TIMEOUT_S = 1.0
"""Without an answer for so long, the disk counts as having nothing of the chain."""

ANSWER_S = 0.003
"""Most lookups are answered within so long; a step is worth holding back for it."""


class Lookups:
    """The lookups of all queued requests, from the question to the answer."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._open: dict[int, Prefix | None] = {}  # None if the answer is overdue
        self._deferred: dict[Prefix, list[BlockHash]] = {}
        self._num_overdue = 0

    def unasked(self, prefix: Prefix) -> list[BlockHash]:
        """Return the blocks that no RAM tier has and that the disk was not asked for yet.

        They count as asked for from now on: `ask` or `defer` has to follow.
        """
        tiers, records = self._tiers, prefix.records
        if tiers.store is None or not tiers.can_load:
            return []
        if self._num_overdue or prefix.lookup_job is not None or prefix in self._deferred:
            return []
        end = None if prefix.read_ends is None else max(prefix.read_ends, default=0)
        hashes = prefix.hashes[:end]
        missing = tiers.host.missing(tiers.device.missing(hashes))
        unknown = [block_hash for block_hash in missing if block_hash not in records]
        if len(missing) < len(hashes) and (unknown or prefix.row.first(State.FOUND) < 0):
            absent = set(missing)
            prefix.row.leave(prefix.row.indices(State.FOUND))
            for index, block_hash in enumerate(hashes):
                if block_hash not in absent and prefix.row[index] != State.COMING:
                    prefix.row.find(index, State.FOUND)
        records.update(dict.fromkeys(unknown))
        return unknown

    def ask(self, prefix: Prefix, hashes: list[BlockHash]) -> None:
        """Ask for some blocks of a chain."""
        store = self._tiers.store
        assert store is not None
        prefix.lookup_job, prefix.asked_at = store.lookup(hashes), time.monotonic()
        self._open[prefix.lookup_job] = prefix

    def defer(self, prefix: Prefix, hashes: list[BlockHash]) -> None:
        """Have `ask_deferred` ask for some blocks of a chain."""
        self._deferred[prefix] = hashes

    def ask_deferred(self) -> None:
        """Ask what was deferred."""
        deferred, self._deferred = self._deferred, {}
        for prefix, hashes in deferred.items():
            self.ask(prefix, hashes)

    def is_settled(self, prefix: Prefix) -> bool:
        """Return whether a chain's lookup has ended, took too long, or need not be waited for."""
        if prefix.lookup_job is None or not prefix.awaits_answer:
            return True
        if time.monotonic() < prefix.asked_at + LOOKUP_TIMEOUT_S:
            return False
        self._open[prefix.lookup_job] = None
        self._num_overdue += 1
        prefix.lookup_job = None
        self._tiers.counters.load_failures["lookup_timeout"] += 1
        return True

    def answers_until(self, num_waiting: int) -> float:
        """Return until when (monotonic) answers are worth waiting for; 0.0 if none is.

        Without its answer a request misses a step, which may take 100 times as long as the answer.

        Args:
            num_waiting: how many requests are queued; if others could take their turn, none waits.
        """
        awaited = (each for each in self._open.values() if each is not None and each.awaits_answer)
        asked_at = [prefix.asked_at for prefix in awaited]
        return max(asked_at) + ANSWER_S if 0 < len(asked_at) == num_waiting else 0.0

    def running_until(self) -> float:
        """Return until when (monotonic) the answers about running requests are worth waiting for.

        Those requests did not wait. Their receipts tell of these answers, and what the disk has is
        not written to it again.
        """
        running = (each for each in self._open.values() if each is not None and each.blocks)
        return max((prefix.asked_at + ANSWER_S for prefix in running), default=0.0)

    def take(self, event: LookupDone) -> Prefix | None:
        """Note an answer; return the chain that it is about, unless it comes too late."""
        if event.job not in self._open:
            return None
        prefix = self._open.pop(event.job)
        if prefix is None:
            self._num_overdue -= 1
            return None
        prefix.lookup_job = None
        prefix.records.update((BlockHash(each), record) for each, record in event.found.items())
        return prefix

    def forget(self, prefix: Prefix) -> None:
        """Note that nobody waits for a chain's answer any more."""
        self._deferred.pop(prefix, None)
        if prefix.lookup_job is not None:
            self._open.pop(prefix.lookup_job, None)
            prefix.lookup_job = None
