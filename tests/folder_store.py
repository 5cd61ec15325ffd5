"""The toy of a tier as a `Rig` needs it: it notes what it is asked, and can be held and fail.

It has what tests use of `FakeStore`, over the files of a `FolderTier`.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from msgspec.structs import replace

from tests.fake_store import BLOCK_BYTES, POISON, Job, payload_of, stored_chain
from tests.folder_tier import FolderTier
from tieredkv.clock import Clock
from tieredkv.tier import Event, Gone, Lent, Loaded, Restarted, Stored, TierState, TouchItem
from tieredkv.types import BlockHash, BlockRecord

SIZE_BYTES = 1 << 20


class FolderStore(FolderTier):
    """See `FakeStore` for what the attributes mean."""

    def __init__(self, folder: Path, arena: torch.Tensor, clock: Clock) -> None:
        def page_of(page_id: int) -> memoryview:
            return arena[page_id].numpy().data

        super().__init__(folder, page_of, clock, SIZE_BYTES, lambda: None)
        self.is_held, self.is_down, self.tells_gone, self.reason = False, False, False, ""
        self.asked: list[bytes] = []
        self.loaded: list[BlockHash] = []
        self.stored: list[BlockHash] = []
        self.deleted: list[BlockHash] = []
        self.touched: list[TouchItem] = []

    # What the cache asks

    def lookup(self, hashes: Sequence[bytes]) -> int:
        self.asked += hashes
        return super().lookup([*hashes])

    def load(self, lent: Sequence[Lent]) -> None:
        self.loaded += [BlockHash(each.block_hash) for each in lent]
        super().load(lent)
        self.check()

    def store(self, lent: Sequence[Lent]) -> None:
        assert all(it.life is not None and it.life.retention != "in_memory" for it in lent), lent
        self.stored += [BlockHash(each.block_hash) for each in lent]
        super().store(lent)
        self.check()

    def touch(self, items: Sequence[TouchItem]) -> None:
        self.touched += items
        super().touch(items)

    def delete(self, hashes: Iterable[bytes], reason: str) -> None:
        if reason not in ("expired", "capacity", "damaged"):  # its own doing
            self.deleted += map(BlockHash, hashes)
        super().delete(hashes, reason)

    def poll(self) -> list[Event]:
        told = super().poll()
        return told if self.tells_gone else [it for it in told if not isinstance(it, Gone)]

    def _work(self) -> None:
        while self._lookups and not self.is_held:
            self.answer(0)
        while self._loans and not self.is_held:
            self.complete(0)

    def state(self) -> TierState:
        return super().state()._replace(is_open=not self.is_down, why=self.reason)

    # What a test does

    @property
    def lookups(self) -> list[tuple[int, Sequence[bytes]]]:
        return self._lookups

    @property
    def jobs(self) -> list[Job]:
        return [Job(lent, lent.life is not None) for lent in self._loans]

    @property
    def blocks(self) -> dict[BlockHash, tuple[BlockRecord, bytes]]:
        found = {it: self._read(it) for it in self.records}
        return {BlockHash(it): each for it, each in found.items() if not isinstance(each, str)}

    @property
    def pending_pages(self) -> frozenset[int]:
        return frozenset(lent.page_id for lent in self._loans)

    def answer(self, index: int) -> None:
        (job, hashes), lookups, loans = self._lookups.pop(index), self._lookups, self._loans
        self._lookups, self._loans = [(job, [] if self.is_down else hashes)], []
        super()._work()
        self._lookups, self._loans = lookups, loans

    def complete(
        self, index: int, *, reason: str = "", is_held_back: bool = False, written_at: float = 0.0
    ) -> None:
        lent, lookups, loans = self._loans.pop(index), self._lookups, self._loans
        page, is_store = self._page_of(lent.page_id), lent.life is not None
        assert not is_store or page == payload_of(lent.block_hash), "a page on loan was reused"
        if reason := reason or ("worker_down" if self.is_down else self.reason):
            self._told.append((Stored if is_store else Loaded)(lent.page_id, reason))
        else:
            self._lookups, self._loans = [], [lent]
            super()._work()
            self._lookups, self._loans = lookups, loans
        event = self._told.pop()
        if isinstance(event, Stored):
            event = replace(event, is_held_back=is_held_back, ended_at=written_at)
        elif isinstance(event, Loaded) and event.reason:
            page[:] = bytes([POISON]) * BLOCK_BYTES  # a failed read may leave any bytes
        self._told.append(event)

    def put(self, name: str, length: int, *, age_s: float = 0.0, retention: str = "24h") -> None:
        for record in stored_chain(name, length, self._clock.now() - age_s, retention):
            self.put_block(record)

    def put_block(self, record: BlockRecord) -> None:
        data = memoryview(payload_of(record.block_hash))
        self._store(Lent.of(record, 0), data)

    def lose(self, hashes: Iterable[bytes], reason: str = "capacity") -> None:
        super().delete(hashes, reason)

    def restart_empty(self) -> None:
        super().delete([*self.records], "lost")
        self._told.append(Restarted())

    def check(self) -> None:
        pages = [lent.page_id for lent in self._loans]
        assert len(set(pages)) == len(pages), "a page is on two loans"
