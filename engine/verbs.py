"""What an operator asks of a running engine, carried out in VRAM and host memory.

The server sends these requests, or the store's worker passes them on: see `storage.verbs` for the
worker's part.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from tieredkv.cache.catalog import Entry
from tieredkv.cache.tiered import TieredCache
from tieredkv.engine.block_lists import BlockLists, TellPart
from tieredkv.engine.prompt_inspections import PromptInspections
from tieredkv.engine.tier_stats import TierStats
from tieredkv.hashing import tenant_digest
from tieredkv.storage.calls import Call, Df, EvictFilter, Inspect, Ls
from tieredkv.storage.chain_blocks import in_order
from tieredkv.storage.known_models import KnownModel
from tieredkv.storage.results import BlockInfo, named_blocks
from tieredkv.types import BlockHash, Tier

EVERYTHING = EvictFilter(all=True)


class Verbs:
    """Carries out an operator's requests; called by the engine's thread.

    Attributes:
        prompts: reports on prompts.
        lists: tells of all blocks.
        on_evict: called with each filter of blocks that the store's worker has passed on.
    """

    def __init__(
        self,
        cache: TieredCache,
        tier_stats: TierStats,
        prompts: PromptInspections,
        model: KnownModel,
    ) -> None:
        self.prompts, self.lists = prompts, BlockLists(cache.tiers)
        self._cache, self._tiers, self._tier_stats = cache, cache.tiers, tier_stats
        self._model = model
        self.on_evict: Callable[[EvictFilter], None] = lambda _: None

    def give_shares(self, shares: Mapping[str, float]) -> None:
        """Replace the tenants' shares of every tier."""
        algo = self._model.hash_algo
        self._tiers.give_shares({tenant_digest(t, algo=algo): it for t, it in shares.items()})

    def evict(
        self,
        wanted: EvictFilter = EVERYTHING,
        following: Collection[BlockHash] = (),
        before: Collection[BlockHash] = (),
    ) -> int:
        """Drop blocks from VRAM and host memory; return how many copies.

        Args:
            wanted: which blocks to drop; a dry run only counts them.
            following: further blocks that `wanted` names; see `Catalog.chains`.
            before: further blocks that precede the named ones.
        """
        is_wanted = self._filter(wanted, following, before)
        entries = [entry for entry in self._tiers.catalog.entries() if is_wanted(entry)]
        pools = {tier: it for tier, it in self._tiers.pools.items() if wanted.concerns(tier)}
        copies = [
            (tier, entry.block_hash)
            for tier, pool in pools.items()
            for entry in entries
            if pool.lookup(entry.block_hash)
        ]
        if wanted.dry_run:
            return len(copies)
        if wanted.tiers:
            for tier, block_hash in copies:
                self._tiers.drop_copy(tier, block_hash, "admin")
            self._cache.demoter.note_change()
        else:
            self._cache.evict(is_wanted)
        return len(copies)

    def _filter(
        self, wanted: EvictFilter, following: Collection[BlockHash], before: Collection[BlockHash]
    ) -> Callable[[Entry], bool]:
        """Return which entries an eviction is about; for the arguments see `evict`."""
        now = self._tiers.clock.now()
        chains = self._tiers.catalog.chains(wanted.ids, following, before)

        def is_wanted(entry: Entry) -> bool:
            is_of_chains = not wanted.ids or entry.block_hash in chains
            return is_of_chains and wanted.matches(entry.namespace, entry.last_used, now)

        return is_wanted

    def operate(self, call: Call, tell: TellPart) -> None:
        """Carry out a verb where there is no disk tier; `tell` is called with its answer.

        That of `Ls` begins with the time and the model, which the parts of the list follow.
        """
        if isinstance(call, Ls):
            now = self._tiers.clock.now()
            tell({"now": now, "model": msgspec.to_builtins(self._model)}, True)
            self.lists.begin(tell)
        elif isinstance(call, Inspect) and call.prompt is not None:
            self.prompts.begin(call, {}, lambda body: tell(body, False))
        else:
            tell(self._answer_alone(call), False)

    def _answer_alone(self, call: Call) -> dict[str, Any]:
        answer = self.answer(call)
        match call:
            case Df():
                return {**answer, "writer_pid": None}
            case Inspect():
                if not (blocks := answer["blocks"]) and not call.following:
                    return self._answer_alone(replace(call, following=True))
                known = msgspec.convert(blocks, list[BlockInfo])
                return {call.listed_as: msgspec.to_builtins(in_order(known))}
            case EvictFilter():
                return {**answer, "disk": None}
        return answer

    def answer(
        self, call: Call, following: Collection[BlockHash] = (), before: Collection[BlockHash] = ()
    ) -> dict[str, Any]:
        """Carry out the part of a verb that concerns VRAM and host memory; return its answer.

        Args:
            call: the verb, but for a list; one that needs the disk is the worker's alone.
            following: further blocks that the call names, since the disk has them.
            before: see `evict`.
        """
        match call:
            case Df():
                return self._tier_stats.read()
            case Inspect():
                return {"blocks": msgspec.to_builtins(self._inspect(call, following))}
            case EvictFilter():
                return self._answer_evict(call, following, before)
        raise AssertionError(f"`{call.verb}` does not concern the engine")

    def _inspect(self, call: Inspect, told: Collection[BlockHash]) -> list[BlockInfo]:
        """Describe the blocks of a chain in VRAM and host memory, from named ones to the first.

        Args:
            call: names some blocks.
            told: further blocks that count as named, since the disk has them.
        """
        catalog, now = self._tiers.catalog, self._tiers.clock.now()
        first, last = named_blocks(call.id) or ("", "")
        waiting = [*told, *catalog.named(last or first)]
        if call.following:
            waiting += catalog.chains((call.id,), told)
        found = dict[BlockHash, BlockInfo]()
        while waiting:
            entry = catalog.get(waiting.pop())
            if entry is None or entry.block_hash in found or catalog.is_expired(entry, now):
                continue
            found[entry.block_hash] = self._described(entry)
            waiting.append(entry.parent_hash)
        return list(found.values())

    def _described(self, entry: Entry) -> BlockInfo:
        """Describe a block, without its copy on disk, which the store's worker knows."""
        tiers, pools = self._tiers, self._tiers.pools
        copies = {tier: pool.lookup(entry.block_hash) for tier, pool in pools.items()}
        until = tiers.catalog.deadline(entry)
        record = tiers.catalog.record(entry, size_bytes=tiers.block_bytes, expires_at=until)
        ready = [tier for tier, copy in copies.items() if copy is not None and copy.is_ready]
        return BlockInfo.of(record, ready)

    def _send_down(
        self, wanted: EvictFilter, following: Collection[BlockHash], before: Collection[BlockHash]
    ) -> tuple[int, int]:
        """Begin to move blocks to a slower tier.

        Returns:
            How many are moved, and how many are not, as no claim on them allows the disk.
        """
        tiers, to, now = self._tiers, Tier(wanted.to), self._tiers.clock.now()
        is_wanted = self._filter(wanted, following, before)
        entries = [entry for entry in tiers.catalog.entries() if is_wanted(entry)]
        if to is Tier.HOST:
            going = [entry for entry in entries if tiers.device.lookup(entry.block_hash)]
            refused = 0
        else:
            going = [it for it in entries if it.is_on_disk or tiers.catalog.disk_deadline(it, now)]
            refused = len(entries) - len(going)
        if not wanted.dry_run:
            self._cache.departures.send([entry.block_hash for entry in going], to)
        return len(going), refused

    def _answer_evict(
        self, wanted: EvictFilter, following: Collection[BlockHash], before: Collection[BlockHash]
    ) -> dict[str, Any]:
        unknown_ids = self._tiers.catalog.unknown_ids(wanted.ids)
        if wanted.to != "drop":
            moved, refused = self._send_down(wanted, following, before)
            freed = {"freed_bytes": moved * self._tiers.block_bytes, "unknown_ids": unknown_ids}
            return {"evicted_blocks": moved, "refused_blocks": refused, **freed}
        evicted = self.evict(wanted, following, before)
        freed_bytes = evicted * self._tiers.block_bytes
        sums = {"evicted_blocks": evicted, "freed_bytes": freed_bytes}
        return {**sums, "unknown_ids": unknown_ids}

    def answer_control(self) -> None:
        """Answer the requests that the store's worker has passed on, and go on with lists."""
        while self._cache.control_requests:
            event = self._cache.control_requests.popleft()
            assert self._tiers.store is not None
            tell = partial(self._tiers.store.reply_control, event.id)
            if isinstance(event.call, Ls):
                self.lists.begin(tell)
                continue
            if isinstance(event.call, Inspect) and event.call.prompt is not None:
                roots = {BlockHash(root): namespace for root, namespace in event.roots.items()}
                self.prompts.begin(event.call, roots, tell)
                continue
            blocks = (map(BlockHash, each) for each in (event.following, event.before))
            answer = self.answer(event.call, *map(set, blocks))
            if isinstance(event.call, EvictFilter):
                self.on_evict(event.call)
                if event.call == EVERYTHING:
                    self._tiers.catalog.note_empty_disk()
            tell(answer)
        self.lists.go_on()
