"""What an operator asks of a running engine, carried out in VRAM and host memory.

The server sends these requests, or the store's worker passes them on. `tieredkv.operate` has the
rest of each verb, and finds out which blocks are meant: the engine lists its blocks, and is told
the blocks of chains. To an operator a block is called by its name in the store.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import cast

import msgspec

from tieredkv.cache.catalog import Entry
from tieredkv.cache.disk_link import Read
from tieredkv.cache.evictions import IsWanted
from tieredkv.cache.tiered import TieredCache
from tieredkv.engine.block_lists import list_blocks
from tieredkv.engine.prompt_inspections import PromptInspections
from tieredkv.engine.slices import Answer, Slices, TellPart, telling
from tieredkv.engine.tier_stats import TierStats
from tieredkv.hashing import tenant_digest
from tieredkv.operate.calls import Call, Df, EvictFilter, Inspect, Ls, decoded
from tieredkv.operate.models import KnownModel
from tieredkv.operate.table import START_BYTES
from tieredkv.pieces import SCANNED_BLOCKS, Pieces, cut, whole
from tieredkv.storage.client.names import NO_NAMES, Names
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
        cache: TieredCache,
        tier_stats: TierStats,
        prompts: PromptInspections,
        model: KnownModel,
        slices: Slices,
    ) -> None:
        self.prompts, self.slices = prompts, slices
        self._cache, self._tiers, self._tier_stats = cache, cache.tiers, tier_stats
        self._model = model
        self.on_evict: Callable[[EvictFilter], None] = lambda _: None

    def give_shares(self, shares: Mapping[str, float]) -> None:
        """Replace the tenants' shares of every tier."""
        algo = self._model.hash_algo
        self._tiers.give_shares({tenant_digest(t, algo=algo): it for t, it in shares.items()})

    def evict(self, wanted: EvictFilter = EVERYTHING) -> int:
        """Drop blocks from VRAM and host memory at once; return how many copies."""
        return int(whole(self._evict(wanted))["evicted_blocks"])

    def operate(self, call: Call, tell: TellPart) -> None:
        """Carry out a verb where there is no disk tier; `tell` is called with its answer.

        That of `Ls` begins with the time and the model, which the parts of the list follow.
        """
        self._begin(call, {}, self._answer_alone(call), tell)

    def answer_control(self) -> None:
        """Begin what the store's worker has passed on, and go on with all work for a while."""
        while self._cache.control_requests:
            event = self._cache.control_requests.popleft()
            assert self._tiers.store is not None
            call, roots = decoded(event.call), cast(Mapping[BlockHash, bytes], event.roots)
            tell = partial(self._tiers.store.reply, event.id)
            self._begin(call, roots, self._answer_worker(call), tell)
        self.slices.go_on()

    def _begin(
        self, call: Call, roots: Mapping[BlockHash, bytes], answer: Answer, tell: TellPart
    ) -> None:
        if isinstance(call, Inspect):
            self.prompts.begin(call, roots, lambda body: tell(body, False))
        else:
            self.slices.begin(telling(answer, tell))

    @property
    def _names(self) -> Names:
        """What the store calls blocks; without a store, or before it was ever up, their hashes."""
        store = self._tiers.store
        return NO_NAMES if store is None else store.names

    def _answer_alone(self, call: Call) -> Answer:
        if isinstance(call, Ls):
            yield {"now": self._tiers.clock.now(), "model": msgspec.to_builtins(self._model)}
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
            if call == EVERYTHING:
                yield from self._tiers.catalog.departed.noting_empty_disk()
        return answer

    def _answer(self, call: Call) -> Answer:
        """Carry out the part of a verb that concerns VRAM and host memory."""
        match call:
            case Df():
                return self._tier_stats.read()
            case Ls():
                return (yield from list_blocks(self._tiers, self._names))
            case EvictFilter():
                return (yield from self._evict(call))
        raise AssertionError(f"`{call.verb}` does not concern the engine")

    def _evict(self, wanted: EvictFilter) -> Answer:
        """Drop copies, or begin to move blocks down; a dry run only counts them.

        The blocks of chains are known by the first bytes of their names, of which equally many
        bytes of their hashes are made. A call with chains in place of blocks, which a command line
        of another version may send, is about no block.
        """
        tiers, now = self._tiers, self._tiers.clock.now()
        named = () if wanted.is_of_chains else wanted.starts
        starts = set[bytes]()
        for some in cut(named or (), SCANNED_BLOCKS):
            starts.update(self._names.reveal(some))
            yield None

        def is_wanted(block: Entry | Read) -> bool:
            is_named = named is None or block.block_hash[:START_BYTES] in starts
            return is_named and wanted.matches(block.namespace, block.last_used, now)

        only = [tier for tier in tiers.pools if wanted.concerns(tier)] if wanted.tiers else None
        refused = {}
        if wanted.to != "drop":
            num_blocks, num_refused = yield from self._send_down(wanted, is_wanted)
            refused = {"refused_blocks": num_refused}
        elif wanted.dry_run:
            num_blocks = yield from self._count(is_wanted, tiers.pools if only is None else only)
        else:
            num_blocks = yield from self._cache.evictions.evict(is_wanted, only)
        freed_bytes = num_blocks * tiers.block_bytes
        return {"evicted_blocks": num_blocks, **refused, "freed_bytes": freed_bytes}

    def _count(self, is_wanted: IsWanted, in_tiers: Collection[Tier]) -> Pieces[int]:
        """Count the copies that some tiers have."""
        num_copies, pools = 0, [self._tiers.pools[tier] for tier in in_tiers]
        for entries in self._tiers.catalog.sweep():
            for entry in filter(is_wanted, entries):
                num_copies += sum(pool.lookup(entry.block_hash) is not None for pool in pools)
            yield
        return num_copies

    def _send_down(self, wanted: EvictFilter, is_wanted: IsWanted) -> Pieces[tuple[int, int]]:
        """Begin to move blocks to a slower tier.

        Returns:
            How many are moved, and how many are not, as no claim on them allows the disk.
        """
        tiers, to, now = self._tiers, Tier(wanted.to), self._tiers.clock.now()
        num_going = num_refused = 0
        for some in tiers.catalog.sweep():
            entries = [*filter(is_wanted, some)]
            if to is Tier.HOST:
                going = [it for it in entries if tiers.device.lookup(it.block_hash)]
            else:
                catalog = tiers.catalog
                going = [it for it in entries if it.is_on_disk or catalog.disk_deadline(it, now)]
                num_refused += len(entries) - len(going)
            num_going += len(going)
            if not wanted.dry_run:
                self._cache.departures.send([entry.block_hash for entry in going], to)
            yield
        return num_going, num_refused
