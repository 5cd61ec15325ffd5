"""Tells an operator what the tiers have of a prompt, while nothing is held or loaded for it.

The server tokenizes the prompt. The disk is asked as for a request, and the report is made once it
has answered. Called by the engine's thread only.
"""

import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from tieredkv.cache.prefix import Prefix
from tieredkv.cache.prompt_report import Source, report
from tieredkv.cache.tiered import TieredCache
from tieredkv.engine.engine_messages import Tokenize, Tokenized
from tieredkv.engine.prefixes import Prefixes
from tieredkv.storage.calls import Inspect
from tieredkv.storage.worker_messages import LookupDone
from tieredkv.types import BlockHash, Tier

Tell = Callable[[dict[str, Any]], object]


class _Asked(NamedTuple):
    """A prompt whose blocks the disk was asked for."""

    prefix: Prefix
    num_tokens: int
    others: Mapping[BlockHash, str]
    tell: Tell


class PromptInspections:
    """Makes the reports on prompts.

    Attributes:
        on_prompt: called with each prompt that the server has to tokenize; None without a server.
    """

    def __init__(self, cache: TieredCache, prefixes: Prefixes) -> None:
        self.on_prompt: Callable[[Tokenize], object] | None = None
        self._ids = itertools.count(1)
        self._untokenized: dict[int, tuple[Mapping[BlockHash, bytes], Tell]] = {}
        self._cache, self._tiers, self._prefixes = cache, cache.tiers, prefixes
        self._asked: dict[int, _Asked] = {}  # by the job of the lookup
        cache.on_other_lookup = self._take

    def begin(self, call: Inspect, roots: Mapping[BlockHash, bytes], tell: Tell) -> object:
        """Have `tell` called with the report on a prompt, or with why there is none.

        Args:
            call: has the prompt.
            roots: of chains on disk, each with its namespace, in which the prompt may be found too.
            tell: called once, unless the server or the store's worker says nothing.
        """
        if self.on_prompt is None:
            return tell({})
        self._untokenized[id := next(self._ids)] = roots, tell
        return self.on_prompt(Tokenize(id, call))

    def go_on(self, tokenized: Tokenized) -> None:
        """Ask the disk for the blocks of a prompt that the server has tokenized."""
        roots, tell = self._untokenized.pop(tokenized.id)
        if (request := tokenized.request) is None:
            tell({"refused": tokenized.refused})
            return
        token_ids, tiers = request.prompt_token_ids, self._tiers
        prefix = self._prefixes.make(request, token_ids)
        in_ram = {entry.root: entry.namespace for entry in tiers.catalog.entries()}
        others = self._prefixes.elsewhere(prefix, token_ids, {**roots, **in_ram})
        asked = _Asked(prefix, len(token_ids), others, tell)
        hashes = [*prefix.hashes, *others]
        if tiers.store is None or not hashes:
            self._report(asked, {})
        else:
            self._asked[tiers.store.lookup(hashes)] = asked

    def _take(self, event: LookupDone) -> None:
        if (asked := self._asked.pop(event.job, None)) is not None:
            self._report(asked, event.found)

    def _report(self, asked: _Asked, on_disk: Mapping[bytes, bytes]) -> None:
        tiers, hashes, now = self._tiers, asked.prefix.hashes, self._tiers.clock.now()

        def source(block_hash: BlockHash) -> Source:
            entry = tiers.catalog.get(block_hash)
            if entry is not None and not tiers.catalog.is_expired(entry, now):
                for tier, pool in tiers.pools.items():
                    if (copy := pool.lookup(block_hash)) is not None and copy.is_ready:
                        return tier
            return Tier.DISK if block_hash in on_disk else None

        def usable(block_hash: BlockHash) -> Source:
            found = source(block_hash)
            return found if tiers.can_load or found is Tier.DEVICE else None

        def why_missed(index: int) -> str:
            if source(hashes[index]):
                return "loads_off"
            reason = tiers.catalog.why_departed(hashes[index], now)
            if index or reason != "never_seen":
                return reason
            found = (kind for block_hash, kind in asked.others.items() if source(block_hash))
            return next(found, reason)

        made = report(
            asked.num_tokens,
            tiers.block_size,
            [*map(usable, hashes)],
            why_missed,
            lambda: self._cache.promoter.planner(0.0, time.monotonic()),
            asked.prefix.read_ends,
        )
        asked.tell(msgspec.to_builtins(made))
