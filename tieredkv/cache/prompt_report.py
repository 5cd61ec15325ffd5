"""What the tiers have of one prompt, and how long its first token would take from each of them.

Numbers in, a report out: this module knows neither the tiers' contents nor tokens.
"""

import dataclasses
from collections.abc import Callable, Sequence

import msgspec

from tieredkv.cache.hit_end import last_end
from tieredkv.cache.plan import DISK_LINK, HOST_LINK, Demand, LinkLoad, Planner
from tieredkv.cache.stretches import stretches
from tieredkv.pieces import Pieces
from tieredkv.types import Tier

Source = Tier | None
MakePlanner = Callable[[], Planner | None]
"""Makes a planner of the links `HOST_LINK` and `DISK_LINK`; it may lack the last ones, or be None,
where rates are not known.
"""


class PromptReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a request with a prompt would find now.

    Attributes:
        prompt_tokens: length of the prompt.
        by_tier: its tokens that each tier has; each counts once, in the fastest one. The last token
            of a wholly cached prompt is computed and counts nowhere.
        diverges_at: the first token whose block could be cached and is not; None if there is none.
        reason: why it is not; see `cache.miss_reasons`. Besides, `not_stored`: it was never
            computed, or has expired or was evicted, and nobody knows which; `other_model` and
            `other_namespace`: the store has these tokens for another model, or for another tenant,
            salt or key.
        predicted_ttft_ms: time to the first token, as the planner expects it of a request that is
            alone: if all is computed; if the cached blocks were all in one tier; and as they lie
            now (`planned`). None where rates are not known.
        anchor_pages: of a model with windows or recurrent states, the pages that the request needs
            beside its blocks to go on, by the fastest tier that has them. They are loaded before
            anything else.
    """

    prompt_tokens: int
    by_tier: dict[Tier, int]
    diverges_at: int | None
    reason: str | None
    predicted_ttft_ms: dict[str, float | None]
    anchor_pages: dict[Tier, int] | msgspec.UnsetType = msgspec.UNSET


def report(
    num_tokens: int,
    block_size: int,
    sources: Sequence[Source],
    why_missed: Callable[[int], Pieces[str]],
    make_planner: MakePlanner,
    read_ends: Sequence[int] | None = None,
    behind: str = "behind_lookback",
    pages_at: Callable[[int], Sequence[Source]] | None = None,
) -> Pieces[PromptReport]:
    """Report what is cached of a prompt.

    Args:
        num_tokens: of the prompt.
        block_size: tokens a block.
        sources: for each full block that may be cached the fastest tier that has it.
        why_missed: finds out why a block is in no tier.
        make_planner: see `MakePlanner`.
        read_ends: numbers of blocks at which a hit may end; None if it may end anywhere.
        behind: why blocks are not used that are behind the last of these.
        pages_at: returns for each page that a hit behind so many blocks needs beside them the
            fastest tier that has it; None for a model without such pages.
    """
    num_found = sources.index(None) if None in sources else len(sources)
    diverges, reason = num_found, None
    if num_found < len(sources):
        reason = yield from why_missed(num_found)
    if read_ends is not None:
        diverges = last_end(sorted(read_ends), num_found)
        sources = [*sources[:diverges], *[None] * (len(sources) - diverges)]
        reason = behind if diverges < num_found else reason
    counts = {tier: block_size * list(sources).count(tier) for tier in Tier}
    if sources and sources[-1] is not None and num_tokens == block_size * len(sources):
        counts[sources[-1]] -= 1
    pages = [] if pages_at is None or not diverges else [*pages_at(diverges)]
    predicted_ttft_ms = yield from _predict(num_tokens, sources, pages, make_planner)
    return PromptReport(
        prompt_tokens=num_tokens,
        by_tier=counts,
        diverges_at=None if reason is None else block_size * diverges,
        reason=reason,
        predicted_ttft_ms=predicted_ttft_ms,
        anchor_pages=msgspec.UNSET if pages_at is None else {it: pages.count(it) for it in Tier},
    )


def _predict(
    num_tokens: int, sources: Sequence[Source], pages: Sequence[Source], make_planner: MakePlanner
) -> Pieces[dict[str, float | None]]:
    """Predict the time to the first token from each tier, in ms."""
    cached = [index for index, source in enumerate(sources) if source is not None]
    of = {tier: [i for i in cached if sources[i] is tier] for tier in Tier}
    demand = Demand(0, num_tokens)
    planned = demand._replace(
        ready=stretches(of[Tier.DEVICE]),
        loads=[LinkLoad(HOST_LINK, of[Tier.HOST]), LinkLoad(DISK_LINK, of[Tier.DISK])],
    )
    num_pages = len(pages)
    cases = {
        "compute": (demand, (0, 0)),
        "device": (demand._replace(ready=stretches(cached)), (0, 0)),
        "host": (demand._replace(loads=[LinkLoad(HOST_LINK, cached)]), (num_pages, 0)),
        "disk": (demand._replace(loads=[LinkLoad(DISK_LINK, cached)]), (0, num_pages)),
        "planned": (planned, (pages.count(Tier.HOST), pages.count(Tier.DISK))),
    }
    predicted = dict[str, float | None]()
    for name, (case, beside) in cases.items():
        predicted[name] = _ttft_ms(make_planner(), case, beside)
        yield
    return predicted


def _ttft_ms(planner: Planner | None, demand: Demand, beside: tuple[int, int]) -> float | None:
    """Return when the planner expects a request's first token; None if it does not know.

    Args:
        planner: of a request that is alone.
        demand: of the request.
        beside: pages that each link loads before its blocks.
    """
    loads = [load for load in demand.loads if load.indices]
    if planner is None or any(load.link >= len(planner.links) for load in loads):
        return None
    links = [
        link._replace(busy_s=link.busy_s + num * link.block_bytes / link.bytes_per_s)
        for link, num in zip(planner.links, beside, strict=False)
    ]
    planner = dataclasses.replace(planner, links=links)
    return round(1000 * planner.split(demand._replace(loads=loads)).done_s, 3)
