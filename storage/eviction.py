"""Which blocks give way: least recently used first, tails before heads, no more than needed."""

from collections.abc import Iterator, Sequence
from contextlib import suppress

from tieredkv.clock import Clock
from tieredkv.errors import CorruptBlockError, StoreFullError
from tieredkv.storage.allocator import TXN_BLOCKS, SlotAllocator
from tieredkv.storage.codec import Located
from tieredkv.storage.index import IndexTxn
from tieredkv.storage.results import Slot


class Evictor:
    """Makes room in a store, for a put or for a smaller budget. Used by the store's thread."""

    def __init__(self, slots: SlotAllocator, clock: Clock) -> None:
        self.num_evicted = 0
        self._index = slots.index
        self._slots = slots
        self._clock = clock

    def obtain(self, slot_bytes: int, count: int) -> list[Slot]:
        """Take slots, evicting where nothing else gives way; fewer if even that does not help."""
        slots: list[Slot] = []
        while len(slots) < count:
            short = min(count - len(slots), TXN_BLOCKS)
            with self._slots.changing() as txn:
                taken = self._slots.take(txn, slot_bytes, short)
                if len(taken) < short and not self._slots.is_disk_full:
                    self._evict_for(txn, slot_bytes, short - len(taken))
                    taken += self._slots.take(txn, slot_bytes, short - len(taken))
                self._slots.failpoint("reserve:before")
            self._slots.failpoint("reserve:done")
            slots += self._slots.lend(taken, slot_bytes)
            if len(taken) < short and not self._slots.release_idle(keep=slot_bytes):
                break
        return slots

    def _evict_for(self, txn: IndexTxn, slot_bytes: int, count: int) -> None:
        """Evict by LRU until `count` slots of a size are there or can be made of other sizes'."""
        idle = self._slots.idle_bytes(slot_bytes)
        gained = max(self._slots.room_bytes, 0) + idle
        victims: list[Located] = []
        count -= gained // slot_bytes
        gained %= slot_bytes
        for located in self._victims(txn):
            if count <= 0 or len(victims) >= TXN_BLOCKS:
                break
            victims.append(located)
            if located.slot_bytes == slot_bytes:
                count -= 1
            else:
                gained += located.slot_bytes
                count -= gained // slot_bytes
                gained %= slot_bytes
        self._drop(txn, victims)

    def _victims(self, txn: IndexTxn) -> Iterator[Located]:
        """Blocks in the order of their eviction: protected ones last."""
        now = self._clock.now()
        protected: list[Located] = []
        for block_hash in txn.longest_unused():
            with suppress(CorruptBlockError):
                located = txn.get(block_hash)
                if located is not None and located.record.protect_until > now:
                    protected.append(located)
                elif located is not None:
                    yield located
        yield from protected

    def _drop(self, txn: IndexTxn, victims: Sequence[Located]) -> None:
        for located in victims:
            self._slots.remove(txn, located)
        self.num_evicted += len(victims)

    def enforce_budget(self) -> None:
        """Bring what files occupy down to the budget, less room for the index to grow."""
        while self._slots.room_bytes < 0:
            if self._slots.release_idle():
                continue
            excess = -self._slots.room_bytes
            victims: list[Located] = []
            with self._slots.changing() as txn:
                for located in self._victims(txn):
                    if excess <= 0 or len(victims) >= TXN_BLOCKS:
                        break
                    victims.append(located)
                    excess -= located.slot_bytes
                self._drop(txn, victims)
            if not victims:
                break

    def reach_budget(self) -> None:
        """Shrink a store that was given less room than it takes, its index as well."""
        index, slots = self._index, self._slots
        if slots.room_bytes < 0 and index.wasted_bytes > index.occupied_bytes // 2:
            index.compact()
            slots.measure()
        self.enforce_budget()
        if slots.room_bytes < 0:
            index.compact()
            slots.measure()
        if slots.occupied_bytes > slots.budget_bytes:
            raise StoreFullError(
                f"the emptied store at `{index.path}` occupies {slots.occupied_bytes} bytes of a "
                f"budget of {slots.budget_bytes}; raise the disk size"
            )
