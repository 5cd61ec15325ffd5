"""Refreshes the chains that requests have used, and notes what the requests claim for them.

A chain of 131,072 tokens in blocks of 16 has 8,192 blocks, and each takes the engine's thread some
microseconds. So this is done after a request's first token, some blocks beside each step.

Called by the engine's thread only.
"""

import itertools
from collections.abc import Sequence

from tieredkv.cache.catalog import Entry
from tieredkv.cache.chain import Chain
from tieredkv.cache.demotion import Demoter
from tieredkv.cache.lookups import Lives
from tieredkv.cache.row import State
from tieredkv.cache.tiers import Tiers

MAX_TOUCHED = 512
"""Blocks that one step refreshes, which takes one or two milliseconds."""


class Touches:
    """The chains that are to be refreshed, the oldest first; their requests hold them."""

    def __init__(self, tiers: Tiers, demoter: Demoter, lives: Lives) -> None:
        self._tiers, self._demoter, self._lives = tiers, demoter, lives
        self._begun: dict[Chain, int] = {}  # each with how many of its blocks are refreshed

    def begin(self, chain: Chain) -> None:
        """Have `go_on` refresh what a request uses of a chain, its head first."""
        self._begun[chain] = 0

    def go_on(self) -> None:
        """Refresh some blocks; the next step continues with the others.

        This is work for a moment in which the device computes and no token waits to be sent.
        """
        num_left = MAX_TOUCHED
        while self._begun and num_left:
            chain, first = next(iter(self._begun.items()))
            used = chain.used
            some = used[first : first + num_left]
            self._begun[chain], num_left = first + len(some), num_left - len(some)
            self._touch(chain, some)
            if self._begun[chain] >= len(used):
                del self._begun[chain]

    def finish(self, chain: Chain) -> None:
        """Refresh what is left of a chain that is about to be released."""
        if (first := self._begun.pop(chain, None)) is not None:
            self._touch(chain, chain.used[first:])

    def renew(self, chain: Chain, indices: Sequence[int]) -> None:
        """Refresh blocks that a request has computed and that the tiers had already."""
        self._touch(chain, indices)
        hashes = [chain.hashes[index] for index in indices]
        self._tiers.device.touch(hashes)
        self._tiers.touch_pages(hashes)

    def _touch(self, chain: Chain, indices: Sequence[int]) -> None:
        tiers, hashes, now = self._tiers, chain.hashes, self._tiers.clock.now()
        states, get, computed = chain.row.states, tiers.catalog.get, State.COMPUTED
        if 0 in indices and chain.read_ends is not None:  # shared blocks, computed again
            tiers.device.touch(hashes)
        for claim, part in chain.by_claim(indices):
            entries = list[Entry]()
            for index in part:
                if (entry := get(hashes[index])) is not None:
                    entry.hits += states[index] != computed
                    entries.append(entry)
            tiers.recheck(tiers.catalog.claim(entries, claim.retentions, now, claim.pinned_until))
            on_disk = [it for it in entries if it.is_on_disk and not self._lives.is_age_unknown(it)]
            tiers.disk_link.touch(tiers.catalog.touch_items(self._kept(on_disk, now), now))
            self._demoter.note_computed(entry for entry in entries if not entry.is_on_disk)

    def _kept(self, entries: Sequence[Entry], now: float) -> Sequence[Entry]:
        """Return those that the disk has; as they are used now, it is owed the others again.

        It is not owed what it has evicted before, or a small disk would write for ever.
        """
        presence = self._tiers.presence
        if not (entries and presence.is_whole):
            return entries
        is_there = presence.has([entry.block_hash for entry in entries], now)
        for entry in itertools.compress(entries, ~is_there):
            self._tiers.note_not_on_disk(entry)
        return [*itertools.compress(entries, is_there)]
