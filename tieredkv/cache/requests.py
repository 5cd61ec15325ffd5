"""The engine's interface to the tiers for requests; `operations` is the one for operators.

A request's prompt is a chain of full blocks. `arrive` asks every tier for the whole chain and notes
what may be read from disk before the request runs; the next `plan` decides how much of that is, and
`pump` starts it. `admit` gives the request a block table in which each full block is either ready,
on its way up, or waiting to be computed; `complete` publishes computed blocks; `release` releases
the table.

Who owns a device block, by its state:

    hashed, ready        shared: any request whose chain has it may hold it; never written again,
                         but for the late layers of a promotion that is under way
    hashed, not ready    shared: being filled by a promotion, or to be computed by the first request
                         that reaches it; the others that hold it wait
    not hashed           private to the one request whose partial block it is

Called by the engine's thread only.
"""

import itertools
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tieredkv.cache.block import Block, begin_compute
from tieredkv.cache.chain import Chain
from tieredkv.cache.completion import Completion
from tieredkv.cache.demotion import Demoter
from tieredkv.cache.departures import Departures
from tieredkv.cache.disk_link import Read, Write
from tieredkv.cache.draining import Drained, Drainer
from tieredkv.cache.expiry import Expiry
from tieredkv.cache.forecasts import Forecasts, Outcome
from tieredkv.cache.hits import Found, Hits
from tieredkv.cache.junctions import Junctions
from tieredkv.cache.lookups import Lives, Lookups
from tieredkv.cache.miss_reasons import MissReason
from tieredkv.cache.operations import Operations
from tieredkv.cache.promotion import Promoter
from tieredkv.cache.recalls import RequestProgress
from tieredkv.cache.room import Room
from tieredkv.cache.row import State
from tieredkv.cache.tail import StateStep, Tail
from tieredkv.cache.tails import Tails
from tieredkv.cache.tiers import Tiers
from tieredkv.cache.touches import Touches
from tieredkv.errors import IntegrityError
from tieredkv.tier import OPERATOR, ControlRequest, Gone, Held, Restarted, TouchItem
from tieredkv.types import BlockHash, Progress, Tier, ignore_progress

__all__ = ["Admission", "Drained", "RequestProgress", "TieredCache"]


class Admission(NamedTuple):
    """Whether a request holds the blocks that it wants, and if not, what it waits for.

    Attributes:
        is_granted: whether it holds them.
        is_coming: whether the room becomes free soon without a preemption.
        is_kept: whether the floors of other tenants keep free blocks from it.
    """

    is_granted: bool
    is_coming: bool = False
    is_kept: bool = False

    def __bool__(self) -> bool:
        """Whether the request holds the blocks."""
        return self.is_granted


GRANTED = Admission(True)


class TieredCache:
    """Finds and keeps the blocks of all requests, and moves them between the tiers.

    Invariants (`check`): those of both pools, the catalog, the disk link, promotion and demotion,
    and of the chains of admitted requests; every ready hashed block of a pool has an entry in the
    catalog, and every entry is in a pool; VRAM keeps the block of every page that counts as a
    duplicate.

    It takes and returns values and chains. What it is made of is its own business.

    Attributes:
        operations: what operators ask of the same tiers; see there.
    """

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._admitted: dict[Chain, None] = {}
        self._promoter = Promoter(tiers, self._admitted.keys())
        self._recalls = self._promoter.recalls
        self._demoter = Demoter(tiers)
        self._forecasts = Forecasts()
        self._departures = Departures(tiers, self._demoter)
        self._lives = Lives(tiers)
        self._touches = Touches(tiers, self._demoter, self._lives)
        self._drainer = Drainer(tiers, self._demoter, self.poll)
        self._lookups = Lookups(tiers, self._use_answer)
        self._expiry = Expiry(tiers)
        self._tails = Tails(tiers, self._recalls, self._lookups, self._expiry)
        self._hits = Hits(tiers, self._recalls, self._lookups, self._tails)
        self._completion = Completion(
            tiers, self._hits, self._tails, self._demoter, self._lives, self._touches, self._expiry
        )
        self._junctions = Junctions(tiers, self._hits, self._completion, self._admitted.keys())
        self._room = Room(tiers, self._promoter, self._demoter, self._hits, self.poll)
        self.operations = Operations(tiers, self._promoter, self._demoter, self._departures)
        self._handlers: dict[type, Callable[[Any], object]] = {
            Read: self._on_read,
            Write: self._demoter.on_written,
            Held: tiers.presence.take,
            Gone: self._on_gone,
            Restarted: lambda _: self._forget_disk(),
            ControlRequest: self.operations.note_asked,
        }

    # Arrival

    def arrive(self, chain: Chain) -> None:
        """Ask every tier for the chain of a queued request, and note what may be prefetched."""
        self._tiers.shares.note_request(chain.tenant)
        missing = self._hits.begin(chain)
        self._ask(chain, missing)
        if chain.tail is not None:
            self._ask(chain.tail, self._tails.unknown(chain.tail))
        self._want(chain, missing)

    def _ask(self, chain: Chain, missing: Collection[BlockHash]) -> None:
        """Ask the disk for what is in no tier, unless the disk has told all that it has."""
        if missing and not self._tiers.presence.is_whole:
            on_disk = chain.on_disk(self._tiers.clock.now())
            self._lookups.ask(chain, [each for each in missing if each not in on_disk])

    def _use_answer(self, chain: Chain, found: Collection[BlockHash]) -> None:
        """Note what may be prefetched of what the disk has found and not dropped since."""
        if isinstance(chain, Tail):
            self._want(chain.of, chain.of.hashes)
        else:
            chain.disk_until = self._hits.until(chain)
            self._want(chain, found)

    def _want(self, chain: Chain, candidates: Collection[BlockHash]) -> None:
        """Note which of these blocks of a queued request's chain may be prefetched from disk."""
        if not any(chain.disk_until):
            return
        wanted, now = set(candidates), self._tiers.clock.now()
        found = [
            block_hash
            for index, block_hash in enumerate(chain.hashes)
            if block_hash in wanted
            and chain.is_on_disk(index, now)
            and chain.row[index] in (State.FOUND, State.COMPUTE)
        ]
        if found:
            self._announce(chain)
            if self.num_free < len(chain.hashes):
                # It may wait for room in VRAM. The disk keeps these blocks for it, which may be the
                # ones that were used the longest ago there.
                self._tiers.disk_link.touch([TouchItem(each, now, hits=0) for each in found])
            self._hits.prefetch(chain)

    def _announce(self, chain: Chain) -> None:
        """Announce which blocks of a chain the disk has, if its blocks are announced."""
        if chain.token_ids is not None and any(chain.disk_until):
            self._tiers.events.note_found(chain, chain.on_disk(self._tiers.clock.now()))

    def is_settled(self, chain: Chain) -> bool:
        """Return whether the disk has told what it has of a chain, or need not be waited for."""
        is_settled = self._lookups.is_settled(chain)
        return is_settled and (chain.tail is None or self._lookups.is_settled(chain.tail))

    def awaits(self, chain: Chain) -> bool:
        """Return whether a queued request had better wait for a running one; see `Junctions`."""
        return self._junctions.awaits(chain)

    def num_held(self, chain: Chain) -> int:
        """Return how many blocks at the head of a chain need no computing; see `Hits`."""
        return self._hits.num_held(chain)

    # Room for requests

    @property
    def room_state(self) -> tuple[int, ...]:
        """Numbers that change whenever there may be more room, or more can be done for it."""
        return self._room.state

    @property
    def num_free(self) -> int:
        """Blocks that no request uses."""
        return self._tiers.device.num_free

    @property
    def floors(self) -> Mapping[bytes, int]:
        """Number of blocks that each tenant keeps, even if others want them."""
        return self._tiers.device.floors

    def num_wanted(self, chain: Chain, num_blocks: int) -> int:
        """Return how many blocks and pages a request asks for at most.

        Args:
            chain: of the request.
            num_blocks: length of its table.
        """
        tail = chain.tail
        if tail is None:
            return num_blocks
        return num_blocks + len(tail.needed(num_blocks)) + tail.num_private(is_alone=False)

    # Admission

    def admit(
        self, chain: Chain, num_blocks: int, *, is_alone: bool = False, makes_room: bool = True
    ) -> Admission:
        """Give a request its block table, and start the promotions that it needs.

        Args:
            chain: of the request, whose lookup is settled.
            num_blocks: length of the table: the chain and the partial block behind it.
            is_alone: no other request runs that could release blocks, so that floors give way.
            makes_room: whether room is made if there is none yet, see `Room.allocate`.

        Returns:
            Whether it holds the blocks now. If not, it holds nothing.
        """
        if self._room.lacks_still(chain, num_blocks, is_alone):
            return self._refusal(chain)
        missing = self._hits.look(chain)
        self._announce(chain)
        self._ask(chain, missing)
        if (tail := chain.tail) is not None:
            self._ask(tail, self._tails.unknown(tail))
        if not self.is_settled(chain):
            return self._refusal(chain)
        self._expiry.drop_among(chain.hashes)
        found = self._hits.find(chain, num_blocks, is_alone=is_alone)
        self._tiers.acquire(found.held)
        wanted = found.num_fresh, is_alone, found.known
        fresh = self._room.allocate(chain, *wanted, makes_room=makes_room)
        if fresh is None:
            self._tiers.device.release(found.held[::-1])
            self._room.note_refused(chain, num_blocks, is_alone)
            self._want(chain, missing)  # some of it may have left RAM since the request came
            return self._refusal(chain)
        rest = iter(fresh)
        if tail is not None:
            self._begin_tail(tail, found, num_blocks, rest)
        blocks = [block for block in found.known if block is not None]
        is_whole = len(blocks) == len(chain.hashes) and chain.row.first(State.COMING) < 0
        if is_whole and all(block.is_ready for block in blocks):
            chain.blocks = blocks
            chain.row.begin(bytearray([State.FOUND]) * len(blocks))
            self._recalls.want(chain, end=0)
        else:
            self._hits.take(chain, found.known, rest)
        chain.blocks.extend(rest)
        chain.block_ids = array("i", [block.block_id for block in chain.blocks])
        self._admitted[chain] = None
        self._promoter.end_prefetch(chain)
        self._tiers.events.learn(chain, 0, len(chain.hashes))
        if tail is not None:
            self._completion.announce_found(tail)
        return GRANTED

    def _begin_tail(
        self, tail: Tail, found: Found, num_blocks: int, fresh: Iterator[Block]
    ) -> None:
        """Give an admitted request its pages of layers with windows, or of its state."""
        tail.begin(len(found.known), num_blocks)
        self._tails.note_found(tail.of, tail)
        self._hits.take_pages(tail, found.pages, fresh)
        tail.hold_private([*itertools.islice(fresh, found.num_private)])
        self._admitted[tail] = None
        self._promoter.end_prefetch(tail)

    def extend(self, chain: Chain, *, is_alone: bool = False) -> Admission:
        """Add one private block to an admitted request's table, if there is room."""
        fresh = self._room.allocate(chain, 1, is_alone)
        if fresh is None:
            return self._refusal(chain)
        chain.blocks.extend(fresh)
        chain.block_ids.append(fresh[0].block_id)
        return GRANTED

    def hold(self, chain: Chain, first: int, end: int, *, is_alone: bool = False) -> Admission:
        """Have a request hold the further pages of the blocks `[first, end)`, to compute them."""
        is_held = chain.tail is None or self._room.hold(chain.tail, first, end, is_alone=is_alone)
        return GRANTED if is_held else self._refusal(chain)

    def take_state(self, chain: Chain, start: int, end: int) -> StateStep:
        """Return what a step of the tokens `[start, end)` does with a request's recurrent state."""
        return chain.tail.take_step(start, end) if chain.tail is not None else StateStep()

    def next_start(self, chain: Chain, first: int) -> int:
        """Return behind how many blocks a request with windows goes on; see `Tails`."""
        start = self._tails.next_start(chain, first)
        if start > first and chain.tail is not None:
            self._recalls.forget(chain.tail)
        return start

    def compute_end(self, chain: Chain, first: int) -> int | None:
        """Return the end of the blocks that may be computed from `first` on; see `Tails`."""
        return self._tails.compute_end(chain, first)

    def _refusal(self, chain: Chain) -> Admission:
        return Admission(False, self._room.is_waiting(chain), self._room.is_kept_from(chain))

    def make_room(self, chain: Chain, num_blocks: int, *, is_alone: bool = False) -> bool:
        """Make room for a queued request that was refused, or that will soon ask.

        Args:
            chain: of the request.
            num_blocks: length of its table.
            is_alone: see `admit`. Beside others, no more is done at once than keeps the engine's
                thread for some milliseconds.

        Returns:
            Whether there is room now, or more of it as soon as this is called again.
        """
        return self._room.make_ahead(chain, num_blocks, is_alone=is_alone)

    def make_room_for_pages(self, num_blocks: int) -> None:
        """Make room for pages that running requests could not `hold`; see `Room.make_for_pages`."""
        self._room.make_for_pages(num_blocks)

    def why_missed(self, chain: Chain, index: int) -> MissReason:
        """Return why a block of an admitted request had to be computed."""
        return self._hits.why_missed(chain, index)

    # Completion

    def begin_compute(self, chain: Chain, first: int, last: int) -> None:
        """Note that a step will compute the blocks `[first, last)`, so that they are not loaded."""
        begin_compute(chain.blocks[first:last])

    def complete(self, chain: Chain, first: int, last: int, *, has_rest: bool = False) -> None:
        """Publish what the chain has of the blocks `[first, last)`, which are computed to the end.

        With `has_rest`, some tokens of the block `last` were computed too, but not all of them.
        """
        if has_rest and last < len(chain.hashes):
            self.begin_compute(chain, last, last + 1)
        if chain.tail is not None:
            chain.tail.note_computed(last, has_rest=has_rest)
        self._completion.complete(chain, first, last)

    def seal(self, chain: Chain, block_hash: BlockHash) -> None:
        """Publish the private block behind the chain, which generated tokens have filled.

        If the tiers have the same block already, this one stays private, and that one is refreshed.
        """
        self._completion.seal(chain, block_hash)

    def touch(self, chain: Chain) -> None:
        """Have the whole chain of a request refreshed in every tier, some blocks at a time."""
        self._touches.begin(chain)
        if chain.tail is not None:
            self._touches.begin(chain.tail)

    def release(self, chain: Chain) -> None:
        """Release all blocks of a request that finished, was cancelled or was preempted."""
        self._admitted.pop(chain, None)
        self._lookups.forget(chain)
        self._room.forget(chain)
        self._promoter.end_prefetch(chain)
        self._touches.finish(chain)
        used, blocks = chain.hashes, chain.blocks[::-1]
        if (tail := chain.tail) is not None:
            used, blocks = tail.used_hashes, self._end_tail(tail)
            self._tiers.device.touch(used)  # also those that the request has not held
        self._tiers.touch_pages(used)
        after = self._tiers.device_link.num_steps
        self._tiers.device.release(blocks, after=after)
        self._recalls.forget(chain)
        chain.blocks = []
        chain.block_ids = array("i")
        chain.disk_until = []
        chain.row.begin(bytearray([State.COMPUTE]) * len(chain.hashes))
        self._forecasts.forget(chain)
        self._demoter.note_change()

    def _end_tail(self, tail: Tail) -> list[Block]:
        """Keep the last pages of a request, behind which another may go on.

        Returns:
            The blocks and pages that it holds, in the order in which they may be evicted.
        """
        self._lookups.forget(tail)
        self._promoter.end_prefetch(tail)
        self._touches.finish(tail)
        self._recalls.forget(tail)
        tail.hand_over()
        tail.disk_until, blocks = [], tail.with_pages(tail.of.blocks)
        if tail in self._admitted:
            del self._admitted[tail]
            self._completion.publish_last(tail)
            self._tiers.supersede(self._tails.superseded(tail))
            self._tails.end(tail)
        return blocks

    # Steps

    def begin_step(
        self, issue_s: float, ending: Iterable[Chain], done_s: Callable[[], float]
    ) -> Any | None:
        """Prepare for a step that is issued now.

        Args:
            issue_s: for how long issuing it keeps the engine's thread. The disk is given enough to
                read for that time.
            ending: chains of the requests that get a token with it.
            done_s: returns for how long the device is busy with this step and those before it.
                It is seldom asked.

        Returns:
            The CUDA event that the late layers of the step have to wait for; None if there is none.
        """
        late_event = self._tiers.device_link.late_event
        if self._recalls and issue_s:
            self._promoter.pump(issue_s)
        self._forecasts.note_step(ending if self._plans else (), done_s)
        return late_event

    @property
    def _plans(self) -> bool:
        """Whether loads are planned, so that it is known when a first token comes."""
        return self._tiers.settings.restore == "auto"

    def end_step(self) -> None:
        """Note that the step was issued, before its rows are completed."""
        self._tiers.device_link.note_step()

    @property
    def is_recalling(self) -> bool:
        """Whether a request has blocks to load or waits for some, so that `plan` is of use."""
        return bool(self._recalls)

    @property
    def is_waiting(self) -> bool:
        """Whether a request waits for a link that may stall, and then sends no event."""
        return self.is_recalling or self._room.is_making_room

    def plan(
        self, requests: Sequence[RequestProgress], *, busy_s: float = 0.0, num_read_beside: int = 0
    ) -> None:
        """Decide which blocks of these requests are computed and which are loaded.

        Args:
            requests: all admitted requests that have tokens of their prompts to compute, and the
                next queued ones, in the order of service.
            busy_s: for how long the device is busy with the steps that it was given.
            num_read_beside: see `ComputeRate`.
        """
        self._tiers.compute_rate.num_read_beside = num_read_beside
        planned = self._promoter.plan(requests, busy_s)
        if self._plans:
            self._forecasts.note_plan(planned)

    def note_first_token(self, chain: Chain) -> Outcome | None:
        """Note that a request gets its first token; return what was expected, if it was planned."""
        return self._forecasts.note_first_token(chain)

    def is_due(self, chain: Chain, seconds: float) -> bool:
        """Return whether what is loaded for a request arrives within this time, by the plan."""
        return self._recalls.is_due(chain, seconds)

    def first_loaded(self, chain: Chain, first: int, end: int) -> int:
        """Return the first of the blocks `[first, end)` that is left to the links, or `end`."""
        return self._recalls.first_loaded(chain, first, end)

    def poll(self, *, may_start_early: bool = False) -> None:
        """Take in the copies, reads and writes that have ended since the last call.

        Args:
            may_start_early: whether a block is ready when its first layers have arrived. The step
                then waits for the other layers and delays all its requests, so set this only while
                the device is idle.
        """
        tiers = self._tiers
        for _, copies in tiers.device_link.poll_usable() if may_start_early else ():
            for _, block in copies:
                tiers.device.fill(block, is_whole=False)
        promoted, demoted = tiers.device_link.poll()
        for began_at, copies in promoted:
            self._promoter.on_copied(began_at, copies)
            self._demoter.note_change()
        for began_at, pairs in demoted:
            self._demoter.on_copied(began_at, pairs)
            self._departures.note_copied(page for _, page in pairs)
        for event in tiers.disk_link.poll():
            self._handlers[type(event)](event)

    def refresh(self) -> None:
        """Refresh some blocks of the chains that were used, and note what the disk has told.

        This is work for a moment in which the device computes and no token waits to be sent.
        """
        self._touches.go_on()
        self._tiers.presence.settle()

    def pump(self) -> None:
        """Expire blocks, load and demote ahead of need; called once a step."""
        self._expiry.sweep()
        self._tiers.note_reach()
        self._departures.pump()
        if self._promoter.pump():
            self._demoter.note_change()
        self._demoter.pump()

    @property
    def has_more(self) -> bool:
        """Whether `pump` may start more: its last call was bounded, or something has changed."""
        is_behind = self._tiers.catalog.is_behind
        return is_behind or self._promoter.has_more or self._demoter.has_more

    @property
    def is_copying(self) -> bool:
        """Whether copies between VRAM and host memory are under way, which wake nobody."""
        return self._tiers.device_link.has_pending

    @property
    def has_copied(self) -> bool:
        """Whether the next `poll` takes in such a copy."""
        return self._tiers.device_link.has_completed

    @property
    def is_idle(self) -> bool:
        """Whether no block is being promoted or demoted."""
        return self._promoter.is_idle and self._demoter.is_idle

    def publish(self) -> None:
        """Tell those who follow the tiers what has changed since the last call."""
        self._tiers.events.flush()

    def flush(self, to: Tier, *, deadline: float) -> bool:
        """Move all blocks that no request uses out of the tiers above `to`; see `Drainer`."""
        return self._drainer.flush(to, deadline=deadline)

    def drain(
        self,
        timeout_s: float,
        *,
        progress: Progress = ignore_progress,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> Drained:
        """Write all blocks that are owed to the disk, and wait for copies; see `Drainer`."""
        return self._drainer.drain(timeout_s, progress=progress, meanwhile=meanwhile)

    def check(self) -> None:
        """Raise IntegrityError if an invariant of the class docstring is broken."""
        tiers = self._tiers
        tiers.device.check()
        tiers.host.check()
        tiers.catalog.check()
        tiers.disk_link.check()
        self._promoter.check()
        self._demoter.check()
        for chain in self._admitted:
            chain.check()
        tiers.events.check()
        for entry in tiers.catalog.entries():
            if not tiers.is_in_ram(entry.block_hash):
                name = entry.block_hash.hex()[:12]
                raise IntegrityError(
                    f"the block of entry {name} is neither in VRAM nor in host memory"
                )
            owed = tiers.catalog.given_up if entry.is_droppable else tiers.catalog.owed
            if tiers.is_promised(entry) and entry.block_hash not in owed:
                raise IntegrityError(f"block {entry.block_hash.hex()[:12]} is owed, but not noted")
        tiers.check()

    # Inside

    def _on_read(self, read: Read) -> None:
        if read.reason == "missing":
            self._note_absent([read.block_hash])
        self._promoter.on_read(read)

    def _on_gone(self, gone: Gone) -> None:
        self._note_absent(gone.hashes)
        if gone.reason == OPERATOR:
            self._tiers.catalog.miss_reasons.note_deleted(map(BlockHash, gone.hashes))

    def _note_absent(self, hashes: Sequence[bytes]) -> None:
        """Count these blocks as being on disk no longer, wherever that was noted."""
        self._tiers.presence.discard(hashes)
        self._lookups.note_gone(hashes)
        self._tiers.events.note_gone(hashes)

    def _forget_disk(self) -> None:
        """Count no block as being on disk, since another worker has started.

        `Presence` begins anew by itself, with the first of the new worker's messages.
        """
        self._tiers.forget_disk()
        self._lookups.forget_answers()
        self._demoter.note_change()
