"""`evict`: blocks out of every tier, so that none that was evicted comes back.

RAM goes first, then the disk. What VRAM and host memory drop while it is being written is on disk
by the time that the worker deletes, and goes with the rest.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from tieredkv.errors import ConfigError, NoServerError, StoreUnreachableError
from tieredkv.operate.chain_ids import namespace_prefix
from tieredkv.operate.filters import Condition, parse_filter
from tieredkv.operate.ls import Ls
from tieredkv.operate.verb import Verb
from tieredkv.operate.worker import Worker, only, silent_engine
from tieredkv.pieces import cut
from tieredkv.storage.messages.operator import NO_ANSWER, Delete, Deleted, Figures, StoreFigures
from tieredkv.types import Tier

SUMMED = ("evicted_blocks", "window_pages", "freed_bytes", "refused_blocks")
NOTHING_EVICTED: Mapping[str, Any] = {**dict.fromkeys(SUMMED, 0), "unknown_ids": [], "disk": None}
"""The answer of an eviction that matches no chain."""

ASKED_BLOCKS = 8192
"""Of which the engine is told in one question."""


class EvictFilter(Verb, frozen=True, kw_only=True, tag="evict"):
    """The blocks that an operator wants to evict: those that match every given criterion.

    If no criterion is given, no block matches.

    Attributes:
        all: every block.
        older_than_s: blocks unused for at least this long.
        namespace_prefix: hex prefix of the namespace digest.
        ids: chains by the id that `ls` printed, or by the first digits of a block's hash; blocks
            that other chains share stay. See `ChainInfo`.
        filter: the chains that `ls` lists with this filter, as if they were named by their ids.
        model: those of the chains that are of this model, by its name; "" for every model.
        starts: the first 16 bytes of the blocks' names, as the engine is told of chains.
        tiers: evict only the copies in these tiers; empty for every tier.
        to: `drop` makes copies unreachable. `host` and `disk` move blocks from the faster tiers to
            this one instead, where that has no copy yet; only blocks whose retention allows the
            disk go there.
        dry_run: count the blocks that would be evicted, and change nothing. Those in VRAM and host
            memory are counted if it is about certain chains, or not about the disk.
    """

    all: bool = False
    older_than_s: float | None = None
    namespace_prefix: str | None = None
    ids: tuple[str, ...] = ()
    filter: str = ""
    model: str = ""
    starts: tuple[bytes, ...] | None = None
    tiers: tuple[Tier, ...] = ()
    to: Literal["host", "disk", "drop"] = "drop"
    dry_run: bool = False

    @property
    def needs_disk(self) -> bool:  # type: ignore[override]
        """Whether it is about copies on disk only, or makes such copies."""
        return self.tiers == (Tier.DISK,) or self.to == "disk"

    @property
    def changes(self) -> bool:  # type: ignore[override]
        """Whether it is no dry run."""
        return not self.dry_run

    @property
    def needs_engine(self) -> bool:  # type: ignore[override]
        """Whether what VRAM and host memory hold could bring back what it evicts."""
        return not self.dry_run

    @property
    def empties(self) -> bool:  # type: ignore[override]
        """Whether it drops every block on disk."""
        return self.all and not self.dry_run and self.to == "drop" and self.concerns(Tier.DISK)

    @property
    def is_of_chains(self) -> bool:
        """Whether it is about chains, which have to be found first; see `choose`."""
        return bool(self.ids or self.filter or self.model)

    @property
    def is_of_blocks(self) -> bool:
        """Whether it is about certain chains or copies, and not about all that requests left."""
        is_of_some = self.is_of_chains or self.starts is not None or bool(self.tiers)
        return is_of_some or self.to != "drop"

    @property
    def is_empty(self) -> bool:
        """Whether no criterion is given."""
        return self == EvictFilter(to=self.to, dry_run=self.dry_run)

    def concerns(self, tier: Tier) -> bool:
        """Return whether copies in this tier are evicted."""
        if self.to != "drop":
            return tier is not Tier.DISK
        return not self.tiers or tier in self.tiers

    def matches(self, namespace: bytes, last_used: float, now: float) -> bool:
        """Return whether the age and namespace of a block match; the caller looks up its name."""
        if self.older_than_s is not None and now - last_used < self.older_than_s:
            return False
        return namespace.hex().startswith((self.namespace_prefix or "").lower())

    def check(self) -> None:
        """Refuse a filter that selects nothing, or that is none."""
        if self.is_empty:
            criteria = "`ids`, `filter`, `model`, `tiers`, `namespace_prefix`, `older_than_s`"
            raise ConfigError(f"no criterion says which blocks to evict; give {criteria} or `all`")
        if self.tiers and self.to != "drop":
            raise ConfigError("`tiers` and `to` cannot be combined")
        if (self.filter or self.model) and self.ids:
            raise ConfigError("ids cannot be combined with `filter` or `model`")
        if self.starts is not None:
            raise ConfigError("`starts` is for the engine only; name chains by `ids`")
        if self.older_than_s is not None and not self.older_than_s >= 0:
            raise ConfigError(f"`older_than_s` = {self.older_than_s} must be at least 0")
        if self.namespace_prefix is not None:
            namespace_prefix(self.namespace_prefix)
        parse_filter(self.filter)

    def answer(self, worker: Worker) -> dict[str, Any]:
        """Evict, and tell how much.

        The answer has `evicted_blocks`, `window_pages`, `freed_bytes`, `unknown_ids` and `disk`.
        Copies count: a block that was in three tiers is evicted three times, and pages of layers
        with windows count beside the blocks. `disk` has the disk
        tier's part, and the keys that are destroyed and kept.

        Raises:
            NoServerError: the blocks are to be moved, and no engine is there.
            StoreUnreachableError: the engine did not answer; only the disk's blocks are gone.
        """
        told = worker.one(Figures(), StoreFigures)
        if self.to != "drop" and told.writer_pid is None:
            raise NoServerError("no server runs that could move blocks to another tier")
        starts, unknown_ids = None, list[str]()
        if self.is_of_chains:
            chosen = choose(self, worker)
            starts, unknown_ids = chosen.starts, chosen.unknown_ids
            if not starts and not unknown_ids:
                return {**NOTHING_EVICTED}
        on_disk, in_ram = self.concerns(Tier.DISK), self.tiers != (Tier.DISK,)
        # A dry run that is not about chains is about the disk, so that the engine is not disturbed.
        in_ram = in_ram and (self.is_of_chains or not (self.dry_run and on_disk))
        # What engines have evicted counts, though their worker ended before the disk was done.
        engine, is_silent = dict[str, Any]() if self.dry_run else worker.earlier, False
        if in_ram and told.writer_pid is not None:
            is_silent = self._evict_from_ram(starts, engine, worker)
        if not on_disk:
            if is_silent:
                raise StoreUnreachableError("the engine is silent, so nothing was evicted")
            return {**NOTHING_EVICTED, **engine, "unknown_ids": unknown_ids}
        asked = Delete(
            starts=starts,
            namespace=self.namespace_prefix or "",
            unused_since=None if self.older_than_s is None else told.now - self.older_than_s,
            dry_run=self.dry_run,
        )
        done = worker.delete(asked)
        if is_silent:
            raise silent_engine() if self.dry_run else _silent(done)
        disk = {
            "evicted_blocks": done.num_blocks,
            "window_pages": done.window_pages,
            "freed_bytes": done.freed_bytes,
        }
        sums = {name: count + engine.get(name, 0) for name, count in disk.items()}
        keys: dict[str, Any] = {"erased_keys": done.erased_keys, "kept_keys": done.kept_keys}
        # A worker that has no keys drops blocks nevertheless.
        if (keys_error := done.keys_error or told.lacks_keys) and not self.dry_run:
            keys["keys_error"] = keys_error
        return {**engine, **sums, "unknown_ids": unknown_ids, "disk": {**disk, **keys}}

    def _evict_from_ram(
        self, starts: Sequence[bytes] | None, done: dict[str, Any], worker: Worker
    ) -> bool:
        """Have the engine evict, and add up what it answers; return whether it is silent."""
        is_silent = False
        for some in [None] if starts is None else cut(starts, ASKED_BLOCKS):
            named = None if some is None else tuple(some)
            call = replace(self, ids=(), filter="", model="", starts=named)
            answer = only(worker.ask_engine(call))
            if answer == NO_ANSWER:
                is_silent = True
            elif answer:
                sums = {name: done.get(name, 0) + answer.get(name, 0) for name in SUMMED}
                done |= {**answer, **sums}
        return is_silent


class Chosen(msgspec.Struct, frozen=True):
    """The blocks that an eviction is about, in all tiers.

    Attributes:
        starts: the first bytes of their names, of those that follow each other the last first.
        unknown_ids: ids that name no block.
    """

    starts: list[bytes]
    unknown_ids: list[str]


def choose(wanted: EvictFilter, worker: Worker) -> Chosen:
    """Find the blocks of the chains that an eviction is about, and which only these chains use."""
    from tieredkv.operate.columns import ChainColumns  # these load NumPy
    from tieredkv.operate.ram import RamBlocks, chains_of
    from tieredkv.operate.table import starts_in

    in_ram = RamBlocks(worker.ask_engine(Ls()))
    # What the engine sent to the disk before it told of its blocks is there by then.
    chains, now = chains_of(worker, in_ram, settled=True)
    if wanted.ids:
        places, unknown_ids = chains.named(wanted.ids)
    else:
        conditions = parse_filter(wanted.filter)
        if wanted.model:
            conditions.append(Condition("model", operator.eq, wanted.model))
        is_meant = ChainColumns(chains, worker.models()).matching(conditions, now)
        places, unknown_ids = chains.leaves[is_meant].tolist(), []
    following, before = chains.of_blocks(places)
    parts = chains.pages_of(following), chains.pages_of(before), following, before
    return Chosen([start for some in parts for start in starts_in(some)], unknown_ids)


def _silent(done: Deleted) -> StoreUnreachableError:
    gone = f"{done.num_blocks} blocks were evicted from disk"
    why = "blocks in VRAM and host memory are still there and may come back"
    hint = "hint: evict again once the engine answers"
    return StoreUnreachableError(f"{gone}, but the engine is silent: {why}\n{hint}")
