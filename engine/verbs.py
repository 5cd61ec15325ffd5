"""What an operator asks of a running engine, carried out in VRAM and host memory.

The server sends these requests, or the store's worker passes them on. `tieredkv.operate` has the
rest of each verb. To an operator a block is called by its name in the store: ids are made of names,
and lists and descriptions have names in the places of hashes.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import cast

import msgspec

from tieredkv.cache.catalog import Entry
from tieredkv.cache.chain_search import ChainSearch, named
from tieredkv.cache.disk_link import Read
from tieredkv.cache.evictions import IsWanted
from tieredkv.cache.pieces import PIECE_BLOCKS, SCANNED_BLOCKS, Pieces, cut, emptying, whole
from tieredkv.cache.tiered import TieredCache
from tieredkv.engine.block_lists import list_blocks
from tieredkv.engine.prompt_inspections import PromptInspections
from tieredkv.engine.slices import Answer, Slices, TellPart, telling
from tieredkv.engine.tier_stats import TierStats
from tieredkv.hashing import tenant_digest
from tieredkv.operate.calls import Call, Df, EvictFilter, Inspect, Ls, decoded
from tieredkv.operate.chain_ids import named_blocks
from tieredkv.operate.infos import BlockInfo, hidden
from tieredkv.operate.models import KnownModel
from tieredkv.storage.client.names import NO_NAMES, Names
from tieredkv.storage.tier import ControlRequest
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

        That of `Ls` begins with the time and the model, which the parts of the list follow. That
        of `Inspect` has blocks in all its parts.
        """
        if isinstance(call, Inspect) and call.prompt is not None:
            self.prompts.begin(call, {}, lambda body: tell(body, False))
        else:
            self.slices.begin(telling(self._answer_alone(call), tell))

    def answer_control(self) -> None:
        """Begin what the store's worker has passed on, and go on with all work for a while."""
        while self._cache.control_requests:
            event = self._cache.control_requests.popleft()
            assert self._tiers.store is not None
            tell = partial(self._tiers.store.reply, event.id)
            call = decoded(event.call)
            if isinstance(call, Inspect) and call.prompt is not None:
                roots = cast(Mapping[BlockHash, bytes], event.roots)
                self.prompts.begin(call, roots, tell)
            else:
                self.slices.begin(telling(self._answer_worker(call, event), tell))
        self.slices.go_on()

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
                return {**answer, "disk": None}
        return answer

    def _answer_worker(self, call: Call, event: ControlRequest) -> Answer:
        following, before = event.following, event.before
        hashes = cast(tuple[list[BlockHash], list[BlockHash]], (following, before))
        answer = yield from self._answer(call, *hashes)
        if isinstance(call, EvictFilter):
            self.on_evict(call)
            if call == EVERYTHING:
                yield from self._tiers.catalog.departed.noting_empty_disk()
        return answer

    def _answer(
        self, call: Call, following: Collection[BlockHash] = (), before: Collection[BlockHash] = ()
    ) -> Answer:
        """Carry out the part of a verb that concerns VRAM and host memory.

        Args:
            call: the verb; one that needs the disk is the worker's alone.
            following: further blocks that the call names, since the disk has them.
            before: further blocks that precede the named ones; see `ChainSearch`.
        """
        match call:
            case Df():
                return self._tier_stats.read()
            case Ls():
                return (yield from list_blocks(self._tiers, self._names))
            case Inspect():
                return (yield from self._inspect(call, following))
            case EvictFilter():
                return (yield from self._evict(call, following, before))
        raise AssertionError(f"`{call.verb}` does not concern the engine")

    def _inspect(self, call: Inspect, told: Collection[BlockHash]) -> Answer:
        """Describe the blocks of a chain in VRAM and host memory, from named ones to the first.

        Args:
            call: names some blocks.
            told: further blocks that count as named, since the disk has them.
        """
        catalog, now = self._tiers.catalog, self._tiers.clock.now()
        first, last = named_blocks(call.id) or ("", "")
        waiting = [*told, *(yield from named(catalog, last or first, self._names))]
        if call.following:
            search = ChainSearch(catalog, (call.id,), told, names=self._names)
            yield from search.find()
            for some in cut(search, SCANNED_BLOCKS):
                waiting += some
                yield None
            yield from search.forget()
        found = set[BlockHash]()
        while waiting:
            infos = list[BlockInfo]()
            for _ in range(min(len(waiting), PIECE_BLOCKS)):
                entry = catalog.get(waiting.pop())
                if entry is None or entry.block_hash in found or catalog.is_expired(entry, now):
                    continue
                found.add(entry.block_hash)
                infos.append(self._described(entry))
                waiting.append(entry.parent_hash)
            yield {"blocks": msgspec.to_builtins(hidden(self._names, infos))} if infos else None
        yield from emptying(found)
        return {"blocks": []}

    def _described(self, entry: Entry) -> BlockInfo:
        """Describe a block, without its copy on disk, which the store's worker knows."""
        tiers, pools = self._tiers, self._tiers.pools
        copies = {tier: pool.lookup(entry.block_hash) for tier, pool in pools.items()}
        until = tiers.catalog.deadline(entry)
        record = tiers.catalog.record(entry, size_bytes=tiers.block_bytes, expires_at=until)
        ready = [tier for tier, copy in copies.items() if copy is not None and copy.is_ready]
        return BlockInfo.of(record, ready)

    def _evict(
        self,
        wanted: EvictFilter,
        following: Collection[BlockHash] = (),
        before: Collection[BlockHash] = (),
    ) -> Answer:
        """Drop copies, or begin to move blocks down; a dry run only counts them."""
        tiers, now = self._tiers, self._tiers.clock.now()
        search = ChainSearch(tiers.catalog, wanted.ids, following, before, self._names)
        if wanted.ids:
            yield from search.find()

        def is_wanted(block: Entry | Read) -> bool:
            is_of_chains = not wanted.ids or block.block_hash in search
            return is_of_chains and wanted.matches(block.namespace, block.last_used, now)

        only = [tier for tier in tiers.pools if wanted.concerns(tier)] if wanted.tiers else None
        refused = {}
        if wanted.to != "drop":
            num_blocks, num_refused = yield from self._send_down(wanted, is_wanted)
            refused = {"refused_blocks": num_refused}
        elif wanted.dry_run:
            num_blocks = yield from self._count(is_wanted, tiers.pools if only is None else only)
        else:
            num_blocks = yield from self._cache.evictions.evict(is_wanted, only)
        yield from search.forget()
        freed = {"freed_bytes": num_blocks * tiers.block_bytes, "unknown_ids": search.unknown_ids}
        return {"evicted_blocks": num_blocks, **refused, **freed}

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
