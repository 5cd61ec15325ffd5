"""Tracks what the store has promised to the soak, and judges the store's answers by it.

This module knows which blocks the store has acknowledged, when they expire and in which order they
may be evicted. It does not call the store. The soak passes it the store's answers, and it reports
those that are wrong.
"""

import bisect
import hashlib
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tieredkv.tier import TouchItem
from tieredkv.types import BlockRecord

Bytes = npt.NDArray[np.uint8]

CHAIN_BLOCKS = 16
EQUAL_BYTES = 256 << 10
UNEQUAL_BYTES = (16 << 10, 128 << 10)
SHORT_SHARE = 0.3  # share of chains whose blocks live only for SHORT_S
SHORT_S = (1.0, 10.0)
DAY_S = 86_400.0
SHORT_POLICY = "seconds"
POLICIES = ("24h", SHORT_POLICY)
_NUM_NAMESPACES = 3
_CLOCK_SLACK_S = 0.1  # the store's clock goes on from an earlier worker's, which may be ahead
_ORDER_S = 1e-5  # the store orders evictions by times in microseconds
_PATTERN_WORDS = 1 << 18


class Promise(NamedTuple):
    """One store of a block that the store has acknowledged.

    Attributes:
        sent_at: When the block was sent; its `last_used` in the store is this time or later.
        is_certain: False once the index was rebuilt. The block's place in the order of eviction is
            then unknown.
    """

    sent_at: float
    acked_at: float
    expires_at: float
    is_certain: bool = True


@dataclass(slots=True, eq=False)
class Block:
    """One block of the working set.

    Attributes:
        promise: The last acknowledged store; None once the block may have left the store.
        last_use: The latest time of use that the store may know of.
        deadline: The latest `expires_at` that the store may know of; it never decreases.
        is_taken: Whether a thread is storing or deleting the block now.
        is_unanswered: Whether the latest store of the block was not acknowledged, so that it is
            unknown whether the store has it.
    """

    identity: BlockRecord
    ttl_s: float
    promise: Promise | None = None
    last_use: float = 0.0
    deadline: float = 0.0
    is_taken: bool = False
    is_unanswered: bool = False


class AuditResult(NamedTuple):
    """How many promised blocks are present, expired or evicted, and which were lost."""

    present: int
    expired: int
    evicted: int
    lost: list[Block]


class Payloads:
    """Computes the one right payload of each block from its hash: bfloat16 noise, like real KV.

    The numbers are normally distributed, so their exponents can be compressed. The mantissa bytes
    are XORed with bytes of the hash, so two blocks differ in practically every word.
    """

    def __init__(self, seed: int) -> None:
        floats = np.random.default_rng(seed).standard_normal(4 * _PATTERN_WORDS, dtype=np.float32)
        bfloats = (floats.view(np.uint32) >> 16).astype(np.uint16)
        words = bfloats.view(np.uint64)
        self._pattern = np.concatenate([words, words])

    def of(self, block: BlockRecord) -> Bytes:
        """Return all bytes of a block."""
        num_words = -(-block.size_bytes // 8)
        start = int.from_bytes(block.block_hash[:4], "big") % _PATTERN_WORDS
        key = np.frombuffer(block.block_hash[8:16], np.uint64)[0] & np.uint64(0x00FF00FF00FF00FF)
        words: Bytes = (self._pattern[start : start + num_words] ^ key).view(np.uint8)
        return words[: block.size_bytes]


class Promises:
    """The working set and its promises. Any thread may call every method.

    Args:
        seed: Determines the chains and the random choices.
        num_bytes: Size of all blocks together. Blocks of equal size take half of it, and blocks of
            unequal sizes the other half.
    """

    def __init__(self, seed: int, num_bytes: int) -> None:
        self._lock = threading.Lock()
        self._random = random.Random(seed)
        self.chains: list[list[Block]] = []
        equal_left = unequal_left = num_bytes // 2
        while equal_left > 0 or unequal_left > 0:
            is_equal = equal_left > 0 and (unequal_left <= 0 or len(self.chains) % 2 == 0)
            chain = self._make_chain(f"{seed}/{len(self.chains)}", is_equal)
            size = sum(block.identity.size_bytes for block in chain)
            equal_left -= size * is_equal
            unequal_left -= size * (not is_equal)
            self.chains.append(chain)
        self.blocks = [block for chain in self.chains for block in chain]
        self._of = {block.identity.block_hash: block for block in self.blocks}
        self._recent: deque[Block] = deque(maxlen=max(16, len(self.blocks) // 8))
        self._short: deque[Block] = deque(maxlen=256)
        self.is_damaged = False  # by the soak: blocks may then be missing, but never wrong
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []  # a message for each broken promise, up to 100

    def _make_chain(self, name: str, is_equal: bool) -> list[Block]:
        namespace = _digest(f"tenant {self._random.randrange(_NUM_NAMESPACES)}")
        is_short = self._random.random() < SHORT_SHARE
        ttl_s = self._random.uniform(*SHORT_S) if is_short else DAY_S
        parent = root = _digest(f"root {namespace.hex()}")
        chain = []
        for position in range(CHAIN_BLOCKS):
            record = BlockRecord(
                block_hash=_digest(f"{name}/{position}"),
                parent_hash=parent,
                root=root,
                namespace=namespace,
                position=position,
                size_bytes=EQUAL_BYTES if is_equal else self._random.randint(*UNEQUAL_BYTES),
                retention=SHORT_POLICY if is_short else "24h",
                computed_at=0.0,
                expires_at=0.0,
                last_used=0.0,
            )
            parent = record.block_hash
            chain.append(Block(record, ttl_s))
        return chain

    def __getitem__(self, block_hash: bytes) -> Block:
        return self._of[block_hash]

    def count(self, name: str, by: int = 1) -> None:
        """Add to a counter of the report."""
        with self._lock:
            self.counts[name] += by

    def blame(self, name: str, what: str) -> None:
        """Count a violation, and keep a message about it."""
        with self._lock:
            self._blame(name, what)

    def _blame(self, name: str, what: str) -> None:
        self.counts[name] += 1
        if len(self.faults) < 100:
            self.faults.append(f"{name}: {what}")

    # --- choosing blocks ---------------------------------------------------------------------

    def take(self, count: int) -> list[Block]:
        """Take consecutive blocks of a chain to store or delete, except those already taken."""
        with self._lock:
            chain = self._random.choice(self.chains)
            start = self._random.randrange(len(chain))
            taken = [block for block in chain[start : start + count] if not block.is_taken]
            for block in taken:
                block.is_taken = True
        return taken

    def release(self, blocks: Sequence[Block]) -> None:
        """Give back blocks that `take` returned."""
        with self._lock:
            for block in blocks:
                block.is_taken = False

    def to_read(self, count: int) -> list[Block]:
        """Choose blocks to load: most were stored recently, and some have just expired."""
        with self._lock:
            die = self._random.random()
            pool: Sequence[Block] = self.blocks
            if die < 0.6 and self._recent:
                pool = self._recent
            elif die < 0.8 and self._short:
                now = time.time()
                over = [block for block in self._short if now - 3.0 < block.deadline <= now]
                pool = over or self._short
            chosen = [self._random.choice(pool) for _ in range(count)]
        return list({id(block): block for block in chosen}.values())

    # --- what is sent to the store, and what it answers --------------------------------------

    def sending(self, blocks: Sequence[Block]) -> list[BlockRecord]:
        """Return the records with which one request stores these blocks, computed now."""
        now = time.time()
        with self._lock:
            for block in blocks:
                block.last_use = max(block.last_use, now)
                block.deadline = max(block.deadline, now + block.ttl_s)
        return [_at(block, now) for block in blocks]

    def stored(self, block: Block, record: BlockRecord, reason: str) -> None:
        """Note the answer to a store; `reason` says why it failed, or is empty."""
        with self._lock:
            self.counts[f"store {reason}" if reason else "blocks_stored"] += 1
            block.is_unanswered = bool(reason)
            if not reason:
                self.counts["bytes_in"] += record.size_bytes
                block.promise = Promise(record.computed_at, time.time(), record.expires_at)
                self._recent.append(block)
                if block.ttl_s < DAY_S:
                    self._short.append(block)
            elif reason == "io_error" and not self.is_damaged:
                self._blame("store_errors", f"block {_name(block)}: {reason}")

    def touching(self, block: Block) -> TouchItem:
        """Return the touch to send for a block; for a short-lived one it extends the life too."""
        now = time.time()
        with self._lock:
            block.last_use = max(block.last_use, now)
            if block.ttl_s == DAY_S:
                return TouchItem(block.identity.block_hash, now)
            block.deadline = max(block.deadline, now + block.ttl_s)
            return TouchItem(block.identity.block_hash, now, now + block.ttl_s, SHORT_POLICY)

    def deleted(self, blocks: Sequence[Block]) -> None:
        """Note that these blocks are deleted: the store need not have them any more."""
        with self._lock:
            for block in blocks:
                block.promise = None

    def evicted_unused(self, unused_since: float) -> None:
        """Note an eviction of blocks not used since `unused_since`: they need not be there."""
        with self._lock:
            for block in self.blocks:
                if block.promise is not None and block.promise.sent_at <= unused_since:
                    block.promise = None

    def loaded(self, block: Block, asked_at: float, reason: str, is_right: bool) -> None:
        """Note the answer to a load that was asked for at `asked_at`."""
        with self._lock:
            # NOTE: The deadline is read now, because a store since the load was asked for may have
            # moved it to a later time.
            is_late = asked_at >= block.deadline
            self.counts["asked_after_deadline"] += is_late
            if reason:
                self.counts[f"load {reason}"] += 1
                known = ("missing", "evicted", "worker_died", "worker_down", "closing")
                if reason not in known and not self.is_damaged:
                    self._blame("acknowledged_lost", f"block {_name(block)}: load: {reason}")
                return
            self.counts["blocks_loaded"] += 1
            self.counts["bytes_out"] += block.identity.size_bytes
            if not is_right:
                self._blame("wrong_bytes_served", f"block {_name(block)}")
            if is_late:
                self._blame(
                    "expired_served", f"block {_name(block)} by {asked_at - block.deadline} s"
                )

    def found_expired(self, block: Block, asked_at: float) -> None:
        """Note that a lookup asked for at `asked_at` has found a block."""
        with self._lock:
            if asked_at >= block.deadline:
                self._blame("expired_served", f"block {_name(block)}, by a lookup")

    # --- the whole store ---------------------------------------------------------------------

    def promised(self) -> list[Block]:
        """List the blocks that were acknowledged and are not known to have left the store."""
        with self._lock:
            return [block for block in self.blocks if block.promise is not None]

    def audit(self, blocks: Sequence[Block], is_there: Sequence[bool]) -> AuditResult:
        """Judge which of the promised blocks a store has, while nobody uses the store.

        A block may be missing because it has expired or was evicted. Blocks are evicted in the
        order of their last use. So a missing block was lost, and not evicted, if another block is
        still present that had been stored before the missing one was sent and was last used
        before that, too.
        """
        now = time.time() + _CLOCK_SLACK_S
        expired, evicted, lost = 0, 0, []
        with self._lock:
            spared = _Spared([b for b, there in zip(blocks, is_there, strict=True) if there])
            for block, there in zip(blocks, is_there, strict=True):
                promise = block.promise
                if there or promise is None:
                    continue
                if now >= promise.expires_at:
                    expired += 1
                elif self.is_damaged:
                    self.counts["lost_by_faults"] += 1
                elif promise.is_certain and spared.has_older_than(promise):
                    lost.append(block)
                    age_s, left_s = now - promise.sent_at, promise.expires_at - now
                    what = f"sent {age_s:.3f} s ago, to expire in {left_s:.3f} s"
                    self._blame("acknowledged_lost", f"block {_name(block)}, {what}")
                else:
                    evicted += 1
                block.promise = None
            self.counts["seen_expired"] += expired
            self.counts["seen_evicted"] += evicted
            self.counts["blocks_audited"] += len(blocks)
        return AuditResult(sum(is_there), expired, evicted, lost)

    def index_was_made_again(self) -> None:
        """Forget the order of eviction: the extents' headers do not hold the latest uses."""
        with self._lock:
            for block in self.blocks:
                if block.promise is not None:
                    block.promise = block.promise._replace(is_certain=False)

    def forget_all(self) -> None:
        """Note that the store was emptied."""
        with self._lock:
            for block in self.blocks:
                block.promise = None


class _Spared:
    """The blocks that are still present, ordered by their last use, as eviction would be."""

    def __init__(self, present: Sequence[Block]) -> None:
        rows = sorted(
            (block.last_use, block.promise.acked_at)
            for block in present
            if block.promise is not None and block.promise.is_certain and not block.is_unanswered
        )
        self._last_uses = [last_use for last_use, _ in rows]
        self._first_acks: list[float] = []  # earliest `acked_at` of this row and those before it
        for _, acked_at in rows:
            earliest = self._first_acks[-1] if self._first_acks else acked_at
            self._first_acks.append(min(earliest, acked_at))

    def has_older_than(self, promise: Promise) -> bool:
        """Return whether a block is present that would have been evicted before this one."""
        count = bisect.bisect_left(self._last_uses, promise.sent_at - _ORDER_S)
        return count > 0 and self._first_acks[count - 1] <= promise.sent_at


def _at(block: Block, now: float) -> BlockRecord:
    fields = {name: getattr(block.identity, name) for name in block.identity.__struct_fields__}
    times = {"computed_at": now, "last_used": now, "expires_at": now + block.ttl_s}
    return BlockRecord(**(fields | times))


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def _name(block: Block) -> str:
    return f"{block.identity.block_hash.hex()[:12]} ({block.identity.retention})"
