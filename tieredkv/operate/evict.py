"""`evict`: blocks out of every tier, so that none that was evicted comes back.

RAM goes first, then the disk. What VRAM and host memory drop while it is being written is on disk
by the time that the worker deletes, and goes with the rest.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from tieredkv.errors import NoServerError, StoreUnreachableError
from tieredkv.operate.calls import EvictFilter, Ls
from tieredkv.operate.chain_ids import named_blocks
from tieredkv.operate.chains import Chains
from tieredkv.operate.infos import NOTHING_EVICTED
from tieredkv.operate.ls import chains_of, columns_of, listing
from tieredkv.operate.ram import RamBlocks
from tieredkv.operate.table import TIER_BITS, Blocks, starts_in
from tieredkv.operate.worker import Worker, batched, silent_engine
from tieredkv.storage.messages.operator import Deleted
from tieredkv.types import Tier

SUMMED = ("evicted_blocks", "freed_bytes", "refused_blocks")
_MAX_IDS = 8192  # of which the engine is told in one question


class Chosen(NamedTuple):
    """The blocks of chains, in all tiers.

    Attributes:
        following: the named blocks and what follows them, those behind others first.
        before: blocks before them that no other chain uses.
        unknown_ids: ids that name no block.
    """

    following: Blocks
    before: Blocks
    unknown_ids: tuple[str, ...] = ()


class Evicting:
    """One eviction, whichever workers carry it out.

    Args:
        wanted: which blocks.
    """

    def __init__(self, wanted: EvictFilter) -> None:
        self._wanted = wanted
        # What engines have evicted counts, though their worker ended before the disk was done.
        self._engine = dict[str, Any]()

    def carry_out(self, worker: Worker) -> dict[str, Any]:
        """Evict, and tell how much.

        Raises:
            NoServerError: the blocks are to be moved, and no engine is there.
            StoreUnreachableError: the engine did not answer; only the disk's blocks are gone.
        """
        wanted, told = self._wanted, worker.figures()
        if wanted.to != "drop" and told.writer_pid is None:
            raise NoServerError("no server runs that could move blocks to another tier")
        chosen, held, on_disk = None, None, wanted.concerns(Tier.DISK)
        if wanted.needs_list or wanted.ids:
            held = RamBlocks.of(worker.ask_engine(Ls()))
            # What the engine sent to the disk before it told of its blocks is there by then.
            chains, now = chains_of(worker, held, settled=True)
            if wanted.needs_list:
                columns = columns_of(chains, worker)
                wanted = wanted.of_listed(listing(columns, Ls(filter=wanted.filter), now))
                if not wanted.ids:
                    return {**NOTHING_EVICTED}
            chosen = choose(chains, wanted.ids)
        engine, unknown_to_engine = dict[str, Any](), set(wanted.ids)
        in_ram = wanted.concerns(Tier.DEVICE) or wanted.concerns(Tier.HOST)
        # A dry run that is not about chains is about the disk, so that the engine is not disturbed.
        if in_ram and (chosen or not (wanted.dry_run and on_disk)) and told.writer_pid is not None:
            # RAM may have a part of a chain without the blocks that its id names.
            engine = self._evict_from_ram(wanted, chosen, held, worker)
            unknown_to_engine &= set(engine.pop("unknown_ids", wanted.ids))
        unknown_ids = [] if chosen is None else [*chosen.unknown_ids]
        unknown_ids = [each for each in unknown_ids if each in unknown_to_engine]
        is_silent = "engine" in engine
        engine = self._with_earlier(engine, dry_run=wanted.dry_run)
        if not on_disk:
            if is_silent:
                raise StoreUnreachableError("the engine is silent, so nothing was evicted")
            sums = {**dict.fromkeys(SUMMED, 0), **engine}
            return {**sums, "unknown_ids": unknown_ids, "disk": None}
        done = worker.delete(
            None if chosen is None else [*starts_in(chosen.following), *starts_in(chosen.before)],
            namespace=wanted.namespace_prefix or "",
            unused_since=None if wanted.older_than_s is None else told.now - wanted.older_than_s,
            dry_run=wanted.dry_run,
        )
        if is_silent:
            raise _silent(done, dry_run=wanted.dry_run)
        disk = {"evicted_blocks": done.num_blocks, "freed_bytes": done.freed_bytes}
        sums = {name: count + engine.get(name, 0) for name, count in disk.items()}
        keys: dict[str, Any] = {"erased_keys": done.erased_keys, "kept_keys": done.kept_keys}
        keys |= {"keys_error": done.keys_error} if done.keys_error else {}
        return {**engine, **sums, "unknown_ids": unknown_ids, "disk": {**disk, **keys}}

    def _evict_from_ram(
        self, wanted: EvictFilter, chosen: Chosen | None, held: RamBlocks | None, worker: Worker
    ) -> dict[str, Any]:
        """Have the engine evict, in questions that fit into a frame; sum up what it answers."""
        following, before = list[bytes](), list[bytes]()
        if chosen is not None and held is not None:
            following, before = (names_of(each, held, worker) for each in chosen[:2])
        answers, unknown_ids = list[dict[str, Any]](), list[str]()
        *parts, last = [*batched(wanted.ids, _MAX_IDS)] or [()]
        for ids, of_them in (*((ids, ([], [])) for ids in parts), (last, (following, before))):
            call, first = replace(wanted, ids=tuple(ids)), len(answers)
            for answer in worker.ask_engine_of(call, *of_them):
                answers.append(answer)
                if "engine" in answer:  # it is silent
                    break
            unknown_ids += answers[first].get("unknown_ids", ids)
        told = {key: answer[key] for answer in reversed(answers) for key in answer}
        sums = {key: sum(answer.get(key, 0) for answer in answers) for key in SUMMED}
        return {**told, **sums, "unknown_ids": unknown_ids}

    def _with_earlier(self, engine: dict[str, Any], *, dry_run: bool) -> dict[str, Any]:
        """Add what engines evicted before an earlier worker of this eviction ended."""
        sums = {key: self._engine.get(key, 0) + engine.get(key, 0) for key in SUMMED}
        if engine or self._engine:
            engine = {**engine, **sums}
        if not dry_run:
            self._engine = engine
        return engine


def choose(chains: Chains, ids: Sequence[str]) -> Chosen:
    """Find the blocks that ids name."""
    named = [(id_, _seeds(chains, id_)) for id_ in ids]
    following, before = chains.own([place for _, places in named for place in places])
    return Chosen(following, before, tuple(id_ for id_, places in named if not places))


def _seeds(chains: Chains, id_: str) -> list[int]:
    """The places of the blocks that an id names, but for those before another of them.

    Its last block says which chain is meant. Its first one is needed where that is gone, or cut off
    by a hole.
    """
    names = named_blocks(id_)
    if names is None:
        return []
    firsts, lasts = (chains.named(digits) if digits else [] for digits in names)
    return [
        *lasts,
        *(first for first in firsts if not any(chains.leads_to(first, last) for last in lasts)),
    ]


def names_of(blocks: Blocks, held: RamBlocks, worker: Worker) -> list[bytes]:
    """Return the whole names of blocks in a table."""
    is_on_disk = blocks["tiers"] & np.uint8(TIER_BITS[Tier.DISK]) > 0
    on_disk = [each.record.block_hash for each in worker.find(starts_in(blocks[is_on_disk]))]
    return on_disk + held.hashes_of(blocks)


def _silent(done: Deleted, *, dry_run: bool) -> StoreUnreachableError:
    if dry_run:
        return silent_engine()
    gone = f"{done.num_blocks} blocks were evicted from disk"
    why = "blocks in VRAM and host memory are still there and may come back"
    hint = "hint: evict again once the engine answers"
    return StoreUnreachableError(f"{gone}, but the engine is silent: {why}\n{hint}")
