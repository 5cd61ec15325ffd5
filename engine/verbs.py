"""What an operator asks of a running engine, carried out in VRAM and host memory.

The server sends these requests, or the store's worker passes them on. `tieredkv.operate` has the
rest of each verb, and finds out which blocks are meant: the engine lists its blocks, and is told
the blocks of chains. To an operator a block is called by its name in the store.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

import msgspec

from tieredkv.cache.operations import KeptBlock, Operations
from tieredkv.engine.prompt_inspections import PromptInspections
from tieredkv.engine.slices import Answer, Slices, TellPart, telling
from tieredkv.engine.tier_stats import TierStats
from tieredkv.hashing import tenant_digest
from tieredkv.operate.calls import Call, Df, EvictFilter, Inspect, Ls, decoded
from tieredkv.operate.models import KnownModel
from tieredkv.operate.table import START_BYTES
from tieredkv.pieces import SCANNED_BLOCKS, cut, whole
from tieredkv.types import BlockHash, Tier

EVERYTHING = EvictFilter(all=True)


class Verbs:
    """Carries out an operator's requests, in slices; called by the engine's thread.

    Attributes:
        prompts: reports on prompts.
        slices: the work that is not done yet.
        on_evict: called with each filter of blocks that the store's worker has passed on.
    """

    def __init__(
        self,
        operations: Operations,
        tier_stats: TierStats,
        prompts: PromptInspections,
        model: KnownModel,
        slices: Slices,
    ) -> None:
        self.prompts, self.slices = prompts, slices
        self._operations, self._tier_stats = operations, tier_stats
        self._model = model
        self.on_evict: Callable[[EvictFilter], None] = lambda _: None

    def give_shares(self, shares: Mapping[str, float]) -> None:
        """Replace the tenants' shares of every tier."""
        algo = self._model.hash_algo
        self._operations.set_shares({tenant_digest(t, algo=algo): it for t, it in shares.items()})

    def evict(self, wanted: EvictFilter = EVERYTHING) -> int:
        """Drop blocks from VRAM and host memory at once; return how many copies."""
        answer = whole(self._evict(wanted))
        return int(answer["evicted_blocks"] + answer["window_pages"])

    def operate(self, call: Call, tell: TellPart) -> None:
        """Carry out a verb where there is no disk tier; `tell` is called with its answer.

        That of `Ls` begins with the time and the model, which the parts of the list follow.
        """
        self._begin(call, {}, self._answer_alone(call), tell)

    def answer_control(self) -> None:
        """Begin what the store's worker has passed on, and go on with all work for a while."""
        for asked in self._operations.take_asked():
            call, roots = decoded(asked.call), cast(Mapping[BlockHash, bytes], asked.roots)
            tell = partial(self._operations.answer, asked)
            self._begin(call, roots, self._answer_worker(call), tell)
        self.slices.go_on()

    def _begin(
        self, call: Call, roots: Mapping[BlockHash, bytes], answer: Answer, tell: TellPart
    ) -> None:
        if isinstance(call, Inspect):
            self.prompts.begin(call, roots, lambda body: tell(body, False))
        else:
            self.slices.begin(telling(answer, tell))

    def _answer_alone(self, call: Call) -> Answer:
        if isinstance(call, Ls):
            yield {"now": self._operations.now(), "model": msgspec.to_builtins(self._model)}
        answer = yield from self._answer(call)
        match call:
            case Df():
                return {**answer, "writer_pid": None}
            case EvictFilter():
                return {**answer, "unknown_ids": [], "disk": None}
        return answer

    def _answer_worker(self, call: Call) -> Answer:
        answer = yield from self._answer(call)
        if isinstance(call, EvictFilter):
            self.on_evict(call)
        return answer

    def _answer(self, call: Call) -> Answer:
        """Carry out the part of a verb that concerns VRAM and host memory."""
        match call:
            case Df():
                return (yield from self._df())
            case Ls():
                yield from self._operations.list_blocks()
                return {}
            case EvictFilter():
                return (yield from self._evict(call))
        raise AssertionError(f"`{call.verb}` does not concern the engine")

    def _df(self) -> Answer:
        """Tell how full the tiers are; pages of layers with windows stand beside the blocks."""
        counts = Counter[Tier]()
        if self._model.anchor_needs is not None:
            counts = yield from self._operations.window_pages()
        stats = self._tier_stats.read()
        for tier in Tier.DEVICE, Tier.HOST:
            if (of_tier := stats.get(tier)) is not None:
                num_pages = min(counts[tier], of_tier["blocks"])
                of_tier["blocks"] -= num_pages
                of_tier["window_pages"] = num_pages
                of_tier["window_bytes"] = num_pages * self._operations.bytes_in(tier)
        return stats

    def _evict(self, wanted: EvictFilter) -> Answer:
        """Drop copies, or begin to move blocks down; a dry run only counts them.

        The blocks of chains are known by the first bytes of their names, of which equally many
        bytes of their hashes are made. A call with chains in place of blocks, which a command line
        of another version may send, is about no block.
        """
        operations, now = self._operations, self._operations.now()
        named = () if wanted.is_of_chains else wanted.starts
        starts = set[bytes]()
        for some in cut(named or (), SCANNED_BLOCKS):
            starts.update(operations.reveal(some))
            yield None

        def is_wanted(block: KeptBlock) -> bool:
            is_named = named is None or block.block_hash[:START_BYTES] in starts
            return is_named and wanted.matches(block.namespace, block.last_used, now)

        refused = {}
        if wanted.to != "drop":
            down = operations.send_down(is_wanted, Tier(wanted.to), is_dry=wanted.dry_run)
            num_blocks, num_pages, num_refused = yield from down
            refused = {"refused_blocks": num_refused}
            freed_bytes = (num_blocks + num_pages) * operations.bytes_in(Tier.DEVICE)
        else:
            in_ram = (Tier.DEVICE, Tier.HOST)
            only = [tier for tier in in_ram if wanted.concerns(tier)] if wanted.tiers else None
            evicting = operations.evict(is_wanted, only, is_dry=wanted.dry_run)
            num_blocks, num_pages, freed_bytes = yield from evicting
        counts = {"evicted_blocks": num_blocks, "window_pages": num_pages}
        return {**counts, **refused, "freed_bytes": freed_bytes}
