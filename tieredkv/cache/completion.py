"""Publishes what requests have computed, and notes what the slower tiers have of it already.

Called by the engine's thread only.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from tieredkv.cache.block import Block
from tieredkv.cache.catalog import Entry
from tieredkv.cache.chain import Chain
from tieredkv.cache.demotion import Demoter
from tieredkv.cache.expiry import Expiry
from tieredkv.cache.hits import Hits
from tieredkv.cache.lookups import Lives
from tieredkv.cache.miss_reasons import COMPUTED_SOONER
from tieredkv.cache.state_tail import StateTail
from tieredkv.cache.tail import Tail
from tieredkv.cache.tails import Tails
from tieredkv.cache.tiers import Tiers
from tieredkv.cache.touches import Touches
from tieredkv.types import BlockHash, Tier

STILL_ON_DISK = (None, COMPUTED_SOONER, "load_timeout")
"""Reasons of `Row.why_computed` for which the copy on disk is good; None of other blocks."""


class Completion:
    """Makes the blocks and pages that a step computes hits for other requests.

    Args:
        tiers: the tiers.
        hits: know which blocks the disk has.
        tails: know which further pages of blocks are kept.
        demoter: told of what was computed.
        lives: ask for the age of copies on disk.
        touches: refresh what the tiers had already.
        expiry: drops pages whose retention has ended.
    """

    def __init__(
        self,
        tiers: Tiers,
        hits: Hits,
        tails: Tails,
        demoter: Demoter,
        lives: Lives,
        touches: Touches,
        expiry: Expiry,
    ) -> None:
        self._tiers, self._hits, self._tails = tiers, hits, tails
        self._demoter, self._lives = demoter, lives
        self._touches, self._expiry = touches, expiry

    def complete(self, chain: Chain, first: int, last: int) -> None:
        """Publish what a chain has of the full blocks `[first, last)`, and of their kept pages."""
        num_computed, last = last, min(last, len(chain.hashes))
        computed = [index for index in range(first, last) if not chain.blocks[index].is_ready]
        if computed:
            self._publish(chain, computed)
        if (tail := chain.tail) is not None:
            self._publish_pages(tail, [*self._tails.complete(tail, last)])
            self._announce(tail, tail.kept_between(first, last))
            self._tails.pass_by(tail, num_computed)

    def seal(self, chain: Chain, block_hash: BlockHash) -> None:
        """Publish the private block behind a chain; see `TieredCache.seal`."""
        device, index = self._tiers.device, len(chain.hashes)
        block = chain.blocks[index]
        self._expiry.drop_among([block_hash])
        chain.grow([block_hash])
        chain.row.append_computed()
        if device.insert(block, block_hash, chain.tenant) is not block:
            device.fill(block)
            self._touches.renew(chain, [index])
        self.complete(chain, index, index + 1)
        self._tiers.events.learn(chain, index, index + 1)

    def _publish(self, chain: Chain, computed: Sequence[int]) -> None:
        blocks, hashes = chain.blocks, chain.hashes
        chain.row.compute(computed)
        for index in computed:
            if blocks[index].source is not None:
                chain.row.why_computed.setdefault(index, COMPUTED_SOONER)
        if chain.tail is not None:
            self._replace_older(chain, computed)
        self._fill(blocks[index] for index in computed)
        hashed = [index for index in computed if blocks[index].block_hash is not None]
        now = self._tiers.clock.now()
        entries = [
            Entry(
                block_hash=hashes[index],
                parent_hash=hashes[index - 1] if index else chain.root,
                root=chain.root,
                namespace=chain.namespace,
                position=index,
                computed_at=now,
                last_used=now,
                claims=claim.retentions,
                pinned_until=claim.pinned_until,
            )
            for claim, part in chain.by_claim(hashed)
            for index in part
        ]
        self._note_computed(chain, entries, hashed)

    def _replace_older(self, chain: Chain, computed: Sequence[int]) -> None:
        """Have blocks that were computed again take the places of those that would expire too soon.

        A request without an anchor computes blocks that the tiers have. Where such a block is older
        than the one before it, it would expire first, and no request could go on behind it.
        """
        tiers, blocks, hashes = self._tiers, chain.blocks, chain.hashes
        get, older, last_new = tiers.catalog.get, list[int](), -2  # no block comes behind that
        for index in computed:
            known, before = get(hashes[index]), get(hashes[index - 1]) if index else None
            if blocks[index].block_hash is not None:
                last_new = index
            elif known is not None and (
                last_new == index - 1
                or (before is not None and known.computed_at < before.computed_at)
            ):
                older.append(index)
                last_new = index
        if older:
            tiers.replace([hashes[index] for index in older])
        for index in older:
            tiers.device.insert(blocks[index], hashes[index], chain.tenant)

    def keep(self, tail: Tail, end: int) -> None:
        """Have a running request keep its pages before `end`, up to which it has yet to compute."""
        if end not in tail.kept_ends:
            tail.keep_at(end)
            some = self._tails.computed(tail, end - tail.reach, tail.num_done)
            self._publish_pages(tail, [*some])

    def publish_last(self, tail: Tail) -> None:
        """Keep the last pages of a request that ends, behind which another may go on."""
        self._publish_pages(tail, [*self._tails.last(tail)])
        self._announce(tail, tail.last_ends)

    def announce_found(self, tail: Tail) -> None:
        """Announce the anchors of an admitted request that are in the tiers already."""
        if tail.of.token_ids is not None:
            ends = {*tail.kept_between(0, len(tail.of.hashes)), tail.hit_end} - {0}
            self._announce(tail, sorted(ends), tail.on_disk(self._tiers.clock.now()))

    def _announce(
        self, tail: Tail, ends: Sequence[int], on_disk: Collection[BlockHash] = ()
    ) -> None:
        """Announce anchors, some of whose pages the disk may have, or be known to have."""
        get = self._tiers.catalog.get

        def is_on_disk(page: BlockHash) -> bool:
            return page in on_disk or ((entry := get(page)) is not None and entry.is_on_disk)

        self._tiers.events.learn_anchors(tail, ends, is_on_disk)

    def _publish_pages(self, tail: Tail, computed: Sequence[int]) -> None:
        device, now = self._tiers.device, self._tiers.clock.now()
        self._expiry.drop_among([tail.hashes[index] for index in computed])
        if isinstance(tail, StateTail):
            self._make_way(tail, computed)
        own = [
            index
            for index in computed
            if device.insert(page := tail.blocks[index], tail.hashes[index], tail.tenant) is page
        ]
        tail.row.compute(computed)
        self._fill(tail.blocks[index] for index in own)
        entries = [
            Entry(
                block_hash=tail.hashes[index],
                root=tail.root,
                namespace=tail.namespace,
                computed_at=tail.first_computed_at(now),
                last_used=now,
                claims=claim.retentions,
                pinned_until=claim.pinned_until,
                num_continued=2 * (index // len(tail.kinds) + 1 == tail.junction),
                **tail.identity(index)._asdict(),
            )
            for claim, part in tail.by_claim(own)
            for index in part
        ]
        self._note_computed(tail, entries, own)
        if len(own) < len(computed):
            self._touches.renew(tail, sorted({*computed}.difference(own)))

    def _make_way(self, tail: StateTail, computed: Sequence[int]) -> None:
        """Drop what the tiers have of a state that was computed anew, unless VRAM has all of it.

        The parts of two computations never become one state.
        """
        tiers, hashes = self._tiers, [tail.hashes[index] for index in computed]
        if not (missing := tiers.device.missing(hashes)):
            return
        is_in_ram = len(tiers.host.missing(missing)) < len(hashes)
        # While it is not known what the disk has, it may have any of them.
        is_on_disk = tiers.store is not None and (
            not tiers.presence.is_whole or tiers.presence.has(hashes, tiers.clock.now()).any()
        )
        if is_in_ram or is_on_disk:
            tiers.replace(hashes)

    def _fill(self, blocks: Iterable[Block]) -> None:
        """Note that the last step has computed these blocks."""
        num_steps = self._tiers.device_link.num_steps
        for block in blocks:
            block.last_step = num_steps
            self._tiers.device.fill(block)
            block.source, block.is_clean = None, False

    def _note_computed(self, chain: Chain, entries: list[Entry], hashed: Sequence[int]) -> None:
        """Note what was computed, and what the disk and host memory have of it already."""
        beside = self._find_beside(chain, entries, hashed)
        self._tiers.events.note_found(chain, {entry.block_hash for entry in beside})
        added = self._tiers.catalog.add_all(entries)
        self._note_clean(chain, hashed)
        self._demoter.note_computed(added)
        self._lives.ask(beside)

    def _find_beside(
        self, chain: Chain, entries: Sequence[Entry], indices: Sequence[int]
    ) -> list[Entry]:
        """Return those of the computed blocks of which the disk has a good copy, and note it.

        They are not written again.
        """
        if self._tiers.store is None or not self._tiers.can_load:
            return []
        why = chain.row.why_computed
        good = {
            index: entry
            for index, entry in zip(indices, entries, strict=True)
            if why.get(index) in STILL_ON_DISK
        }
        now, beside = self._tiers.clock.now(), list[Entry]()
        for entry, until in zip(good.values(), self._until(chain, good), strict=True):
            if until > now:
                entry.disk_expires_at = float(until)
                beside.append(entry)
        return beside

    def _until(self, chain: Chain, entries: Mapping[int, Entry]) -> Sequence[int]:
        """Return until when the disk has each of these blocks; 0 of those that it does not have.

        Of a block, that had to be known when its request was admitted: some copies may have gone
        meanwhile.
        """
        if isinstance(chain, Tail):
            hashes = [entry.block_hash for entry in entries.values()]
            return self._tails.until(chain, list(entries), hashes)
        now = self._tiers.clock.now()
        if not any(chain.is_on_disk(index, now) for index in entries):
            return [0] * len(entries)
        until = self._hits.until(chain)
        return [until[index] if chain.is_on_disk(index, now) else 0 for index in entries]

    def _note_clean(self, chain: Chain, computed: Sequence[int]) -> None:
        """Note which blocks that were just computed host memory need not get."""
        tiers, hashes = self._tiers, [chain.hashes[index] for index in computed]
        pages = tiers.host.find(hashes)
        tiers.recheck(it for it, page in zip(hashes, pages, strict=True) if page is not None)
        for claim, part in chain.by_claim(computed):
            if not tiers.catalog.may_enter(claim.retentions, Tier.HOST):
                tiers.recheck(chain.hashes[index] for index in part)
