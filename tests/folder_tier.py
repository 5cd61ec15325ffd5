"""A toy of a tier that backs the engine's memory: a folder with a file for each block.

It shows what the protocol asks of a tier, and how one is registered: `FOLDER` takes the place of
`parts.TIER`. A file holds a digest of what follows, the block's record, and its bytes.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

from msgspec import msgpack, structs

from tieredkv import tier
from tieredkv.clock import Clock
from tieredkv.config import Settings
from tieredkv.engine.disk_tier import OpenTier, TierKind
from tieredkv.operate.evict import EvictFilter
from tieredkv.types import BlockRecord, KVSpec
from tieredkv.wire.arena import HostArena

PageOf = Callable[[int], memoryview]
Wake = Callable[[], None]


class FolderTier(tier.BackingTier):
    """Keeps blocks in files. All work is done by `poll`; an operator's eviction begins by `ask`."""

    def __init__(self, folder: Path, page_of: PageOf, clock: Clock, size: int, wake: Wake) -> None:
        self.shares, self.names, self._size_bytes = dict[bytes, float](), tier.HASHES, size
        self._folder, self._page_of, self._clock, self._wake = folder, page_of, clock, wake
        self._numbers, self._left, self._told = count(1), Counter[str](), list[tier.Event]()
        self._lookups, self._loans = list[tuple[int, Sequence[bytes]]](), list[tier.Lent]()
        self._asked, self.records = dict[int, EvictFilter](), dict[bytes, BlockRecord]()
        folder.mkdir(exist_ok=True)
        for path in folder.iterdir():
            if not isinstance(found := self._read(bytes.fromhex(path.name)), str):
                self.records[found[0].block_hash] = found[0]

    def lookup(self, hashes: Sequence[bytes]) -> int:
        self._lookups.append((next(self._numbers), hashes))
        self._wake()
        return self._lookups[-1][0]

    def times_of(self, found: bytes, /) -> tier.Times:
        record = msgpack.decode(found, type=BlockRecord)
        return tier.Times(record.expires_at, record.computed_at, record.last_used)

    def load(self, lent: Sequence[tier.Lent]) -> None:
        self._loans += lent  # what is to be stored has a life
        self._wake()

    store = load

    def touch(self, items: Sequence[tier.TouchItem]) -> None:
        for item in items:
            if (old := self._alive(item.block_hash)) is not None:
                until = max(old.expires_at, item.expires_at or 0.0)
                times = {"last_used": max(old.last_used, item.last_used), "expires_at": until}
                self.records[item.block_hash] = structs.replace(old, **times)

    def delete(self, hashes: Iterable[bytes], reason: str) -> None:
        self._work()
        for block_hash in hashes:
            (self._folder / block_hash.hex()).unlink(missing_ok=True)
            if (record := self.records.pop(block_hash, None)) is not None:
                self._left[reason] += 1
                self._told.append(tier.Gone([block_hash], reason, record.size_bytes))

    def ask(self, wanted: EvictFilter) -> None:
        self._asked[number := next(self._numbers)] = wanted
        self._told.append(tier.ControlRequest(number, msgpack.encode(wanted)))
        self._wake()

    def reply(self, id: int, body: dict[str, Any], has_more: bool = False) -> None:
        self._work()
        wanted, now, known = self._asked.pop(id), self._clock.now(), [*self.records.values()]
        doomed = [it for it in known if wanted.matches(it.namespace, it.last_used, now)]
        self.delete([record.block_hash for record in doomed], "operator")

    def poll(self) -> list[tier.Event]:
        self._work()
        self.delete([it for it in self.records if self._alive(it) is None], "expired")
        told, self._told = self._told, []
        return told

    def stats(self) -> tier.TierFigures:
        return tier.TierFigures(
            blocks=len(self.records),
            bytes_live=sum(record.size_bytes for record in self.records.values()),
            bytes_budget=self._size_bytes,
            num_expired=self._left["expired"],
            num_evicted=self._left["capacity"],
            deleted={"operator": self._left["operator"]},
            faults={"checksum": self._left["damaged"]},
        )

    def state(self) -> tier.TierState:
        return tier.TierState(self._folder.is_dir(), "", self._size_bytes - self.stats().bytes_live)

    def _work(self) -> None:
        (lookups, self._lookups), (loans, self._loans) = (self._lookups, []), (self._loans, [])
        for job, hashes in lookups:
            found = {it: msgpack.encode(record) for it in hashes if (record := self._alive(it))}
            self._told.append(tier.LookupDone(job, found))
        for lent in loans:
            page = self._page_of(lent.page_id)[: lent.size_bytes]
            self._told.append((self._load if lent.life is None else self._store)(lent, page))

    close = _work

    def _load(self, lent: tier.Lent, page: memoryview) -> tier.Loaded:
        record, found = self._alive(lent.block_hash), self._read(lent.block_hash)
        if record is None or isinstance(found, str) or not lent.is_of(record):
            return tier.Loaded(lent.page_id, found if isinstance(found, str) else "missing")
        page[:], life = found[1], tier.BlockLife.of(record)
        return tier.Loaded(lent.page_id, life=life, ended_at=time.monotonic())

    def _store(self, lent: tier.Lent, page: memoryview) -> tier.Stored:
        while self.records and self.state().room_bytes < lent.size_bytes:
            oldest = min(self.records.values(), key=lambda it: (it.last_used, -it.position))
            self.delete([oldest.block_hash], "capacity")
        data = msgpack.encode((lent.record, bytes(page)))
        (self._folder / lent.block_hash.hex()).write_bytes(sha256(data).digest() + data)
        self.records[lent.block_hash] = lent.record
        return tier.Stored(lent.page_id, ended_at=time.monotonic())

    def _read(self, block_hash: bytes) -> tuple[BlockRecord, bytes] | str:
        if not (path := self._folder / block_hash.hex()).exists():
            return "missing"
        digest, data = (text := path.read_bytes())[:32], text[32:]
        if sha256(data).digest() == digest:
            return msgpack.decode(data, type=tuple[BlockRecord, bytes])
        self.delete([block_hash], "damaged")
        return "checksum"

    def _alive(self, block_hash: bytes) -> BlockRecord | None:
        record = self.records.get(block_hash)
        return record if record is not None and self._clock.now() < record.expires_at else None


def _open(settings: Settings, spec: KVSpec, arena: HostArena, wake: Wake) -> OpenTier:
    folder, clock = Path(settings.disk_dir or ""), Clock(settings.clock_offset_file)
    return OpenTier(FolderTier(folder, arena.page, clock, settings.disk_size, wake))


FOLDER = TierKind(check=lambda _: None, least_bytes=lambda size: size, open=_open)
