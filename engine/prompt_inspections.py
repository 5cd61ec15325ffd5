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
from tieredkv.engine.engine_messages import EngineRequest, Tokenize, Tokenized
from tieredkv.engine.prefixes import Prefixes
from tieredkv.engine.slices import Slices
from tieredkv.operate.calls import Inspect
from tieredkv.pieces import PIECE_BLOCKS, SCANNED_BLOCKS, Pieces, cut
from tieredkv.storage.tier import LookupDone
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

    def __init__(self, cache: TieredCache, prefixes: Prefixes, slices: Slices) -> None:
        self.on_prompt: Callable[[Tokenize], object] | None = None
        self._ids = itertools.count(1)
        self._untokenized: dict[int, tuple[Mapping[BlockHash, bytes], Tell]] = {}
        self._cache, self._tiers, self._prefixes = cache, cache.tiers, prefixes
        self._slices = slices
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
        """Go on with a prompt that the server has tokenized, or could not tokenize."""
        roots, tell = self._untokenized.pop(tokenized.id)
        if tokenized.request is None:
            tell({"refused": tokenized.refused})
        else:
            self._slices.begin(self._look_up(tokenized.request, roots, tell))

    def _look_up(
        self, request: EngineRequest, roots: Mapping[BlockHash, bytes], tell: Tell
    ) -> Pieces[None]:
        """Ask the disk for the blocks of a prompt, and report once it has answered."""
        token_ids, tiers, all_roots = request.prompt_token_ids, self._tiers, dict(roots)
        prefix = yield from self._prefixes.making(request, token_ids)
        for entries in cut(tiers.catalog.entries(), SCANNED_BLOCKS):
            all_roots.update((entry.root, entry.namespace) for entry in entries)
            yield
        others = yield from self._prefixes.elsewhere(prefix, token_ids, all_roots)
        asked = _Asked(prefix, len(token_ids), others, tell)
        hashes = [*prefix.hashes, *others]
        if tiers.store is None or not hashes:
            yield from self._report(asked, {})
        else:
            self._asked[tiers.store.lookup(hashes)] = asked

    def _take(self, event: LookupDone) -> None:
        if (asked := self._asked.pop(event.job, None)) is not None:
            self._slices.begin(self._report(asked, event.found))

    def _report(self, asked: _Asked, on_disk: Mapping[bytes, bytes]) -> Pieces[None]:
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

        def why_missed(index: int) -> Pieces[str]:
            if source(hashes[index]):
                return "loads_off"
            reason = tiers.catalog.departed.why(hashes[index], now)
            if not index and reason == "never_seen":
                for some in cut(asked.others.items(), PIECE_BLOCKS):
                    for block_hash, kind in some:
                        if source(block_hash):
                            return kind
                    yield
            return reason

        sources = list[Source]()
        for some in cut(hashes, PIECE_BLOCKS):
            sources += map(usable, some)
            yield
        made = yield from report(
            asked.num_tokens,
            tiers.block_size,
            sources,
            why_missed,
            lambda: self._cache.promoter.planner(0.0, time.monotonic()),
            asked.prefix.read_ends,
        )
        asked.tell(msgspec.to_builtins(made))
