"""Tells what the tiers have of a prompt, while nothing is held or loaded for it.

Called by the engine's thread only.
"""

import time
from collections.abc import Mapping

from tieredkv.cache.chain import Chain
from tieredkv.cache.promotion import Promoter
from tieredkv.cache.prompt_report import PromptReport, Source, report
from tieredkv.cache.tiers import Tiers
from tieredkv.pieces import PIECE_BLOCKS, Pieces, cut
from tieredkv.types import BlockHash, Tier


def inspected(
    tiers: Tiers,
    promoter: Promoter,
    chain: Chain,
    num_tokens: int,
    others: Mapping[BlockHash, str],
    on_disk: Mapping[bytes, bytes],
) -> Pieces[PromptReport]:
    """Report what the tiers have of a prompt; see `Operations.inspect`."""
    hashes, now = chain.hashes, tiers.clock.now()

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
            for some in cut(others.items(), PIECE_BLOCKS):
                for block_hash, kind in some:
                    if source(block_hash):
                        return kind
                yield
        return reason

    sources = list[Source]()
    for some in cut(hashes, PIECE_BLOCKS):
        sources += map(usable, some)
        yield
    return (
        yield from report(
            num_tokens,
            tiers.block_size,
            sources,
            why_missed,
            lambda: promoter.planner(0.0, time.monotonic()),
            chain.read_ends,
        )
    )
