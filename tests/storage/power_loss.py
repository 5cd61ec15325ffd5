"""Simulates a power loss: the writes of a store are logged and replayed up to some moment.

Run as a script, this module is the process whose power is lost. It writes, deletes, sweeps, evicts
and shrinks an encrypted store while `power_loss.c` logs its writes and those of its keys, and notes
after each round which blocks are stored.
"""

import json
import os
import random
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from tests.fakes import FakeClock
from tests.storage.blocks import commit, open_store, page_with, sweep
from tests.storage.conftest import make_record, payload_of
from tieredkv.storage.keys.names import Names
from tieredkv.storage.store import Store
from tieredkv.types import BlockRecord

BUDGETS_BYTES = (4 << 20, 2 << 20)  # of two lives of the store: the second one shrinks its index
SIZES_BYTES = (4096, 8100, 8192, 20_480)
_ROUNDS = 20
_PAGE_BYTES = 4096
_INDEX_FILE = "/index/data.mdb"
_OPERATION = struct.Struct("<5Q")
_REPOSITORY = Path(__file__).parents[2]


Block = tuple[str, int, int]  # chain, position, bytes


class Operation(NamedTuple):
    """One operation of the log, which begins at the byte `start` of the log."""

    start: int
    what: str
    path: str
    other: str
    offset: int
    length: int
    data: bytes


class Round(NamedTuple):
    """The blocks that were stored when the log had this length."""

    log_bytes: int
    stored: set[Block]


class Recording:
    """The log of the writes to a store and its keys, and the notes of what it stored.

    Attributes:
        folder: the disk, which has `store` and `keys`.
    """

    def __init__(self, base: Path, shim: Path, *, sync: str, seed: int) -> None:
        self.folder, log, notes = base / "disk", base / "log", base / "notes"
        self.folder.mkdir(mode=0o700)
        variables = {"LD_PRELOAD": str(shim), "POWER_LOG": str(log)}
        command = [sys.executable, "-m", "tests.storage.power_loss"]
        subprocess.run(
            [*command, str(self.folder), str(log), str(notes), sync, str(seed)],
            env=os.environ | variables | {"POWER_ROOT": str(self.folder)},
            cwd=_REPOSITORY,
            check=True,
        )
        self.operations = _read_log(log.read_bytes())
        lines = map(json.loads, notes.read_text().splitlines())
        self.rounds = [Round(size, {(*block,) for block in stored}) for size, stored in lines]

    def certain(self, cut: int) -> set[Block]:
        """Return blocks acknowledged before the index's last sync and not dropped until the cut."""
        syncs = [each for each in self.operations[:cut] if each.what == "s"]
        # Not of a draft of the index: its sync flushes nothing of the index that is in use.
        last = max((each.start for each in syncs if each.path.endswith(_INDEX_FILE)), default=0)
        begun = self.operations[cut - 1].start
        num_synced = sum(round_.log_bytes <= last for round_ in self.rounds)
        num_begun = 1 + sum(round_.log_bytes <= begun for round_ in self.rounds)
        if not num_synced:
            return set()
        return set.intersection(*(each.stored for each in self.rounds[num_synced - 1 : num_begun]))

    def tried(self, cut: int) -> set[Block]:
        """Return every block that may be stored at the cut."""
        num_begun = 1 + sum(r.log_bytes <= self.operations[cut - 1].start for r in self.rounds)
        return set().union(*(each.stored for each in self.rounds[:num_begun]))

    def replay(self, cut: int, random_: random.Random, target: Path) -> None:
        """Write the files as a power loss after `cut` operations may leave them.

        Any 4 KiB of a file written since the file's last sync may be lost, even if later writes are
        kept. The same holds for its lengths, allocations and holes. Names are kept by a journal:
        of the names made, changed and removed since the last sync of any file, those from some
        moment on are lost.
        """
        operations = self.operations[:cut]
        last_sync = max((i for i, each in enumerate(operations) if each.what == "s"), default=0)
        names_end = random_.randint(last_sync, cut)
        loss = random_.choice((0.0, 0.2, 0.5, 0.9, 1.0))

        owners: list[int] = []  # for each operation, the first operation on the same file
        numbers: dict[str, int] = {}
        synced: dict[int, int] = {}
        names: dict[str, int] = {}  # as they are on the disk
        for i, each in enumerate(operations):
            owner = numbers.setdefault(each.path, i)
            owners.append(owner)
            if each.what == "s":  # of a file or a folder
                synced[owner] = i
            elif each.what in "ru":
                _move(numbers, each.path, each.other)
                if i < names_end:
                    _move(names, each.path, each.other)
            elif i < names_end:
                names.setdefault(each.path, owner)

        files: dict[int, _File] = {}
        for i, (each, owner) in enumerate(zip(operations, owners, strict=True)):
            is_safe = i < synced.get(owner, -1)
            file = files.setdefault(owner, _File())
            if each.what == "w":
                for at in range(0, len(each.data), _PAGE_BYTES):
                    if is_safe or random_.random() >= loss:
                        file.put(each.offset + at, each.data[at : at + _PAGE_BYTES])
            elif is_safe or random_.random() >= loss:
                file.change_length(each)

        for name, owner in names.items():
            path = target / Path(name).relative_to(self.folder)
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            files[owner].save(path)
            path.chmod(0o600)


def _move(names: dict[str, int], path: str, other: str) -> None:
    """Give a file, or all files of a folder, another name; or none, if `other` is empty."""
    for name in [each for each in names if f"{each}/".startswith(f"{path}/")]:
        owner = names.pop(name)
        if other:
            names[other + name[len(path) :]] = owner


class _File:
    """A file with holes: only pages that were written or allocated occupy space.

    A store measures what its files occupy, so a hole must not become zeroes that are stored.
    """

    def __init__(self) -> None:
        self._pages: dict[int, bytearray] = {}
        self._length = 0

    def put(self, offset: int, data: bytes) -> None:
        for at, start, end in _parts(offset, offset + len(data)):
            some = data[at * _PAGE_BYTES + start - offset :][: end - start]
            self._page(at)[start:end] = some
        self._length = max(self._length, offset + len(data))

    def change_length(self, each: Operation) -> None:
        """Truncate, allocate or punch a hole."""
        end = each.offset + each.length
        if each.what == "t":
            self._erase(each.offset, max(self._length, each.offset))
            self._length = each.offset
        elif each.what == "a":
            for at, _, _ in _parts(each.offset, end):
                self._page(at)
            self._length = max(self._length, end)
        elif each.what == "p":
            self._erase(each.offset, min(end, self._length))

    def save(self, path: Path) -> None:
        with path.open("wb") as file:
            for at, page in self._pages.items():
                file.seek(at * _PAGE_BYTES)
                file.write(page)
            file.truncate(self._length)

    def _page(self, at: int) -> bytearray:
        return self._pages.setdefault(at, bytearray(_PAGE_BYTES))

    def _erase(self, begin: int, end: int) -> None:
        for at, start, stop in _parts(begin, end):
            is_all = start == 0 and (stop == _PAGE_BYTES or end >= self._length)
            if is_all:
                self._pages.pop(at, None)
            elif at in self._pages:
                self._pages[at][start:stop] = bytes(stop - start)


def _parts(begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Walk over the pages of a range: the number of each, and which of its bytes are meant."""
    for at in range(begin // _PAGE_BYTES, -(-end // _PAGE_BYTES)):
        base = at * _PAGE_BYTES
        yield at, max(begin - base, 0), min(end - base, _PAGE_BYTES)


def _read_log(log: bytes) -> list[Operation]:
    operations, at = [], 0
    while at < len(log):
        start = at
        what, offset, length, *sizes = _OPERATION.unpack_from(log, at)
        at += _OPERATION.size
        parts = []
        for size in (*sizes, length if chr(what) == "w" else 0):
            parts.append(log[at : at + size])
            at += size
        path, other, data = os.fsdecode(parts[0]), os.fsdecode(parts[1]), parts[2]
        if not path.endswith(" (deleted)"):  # the unnamed file of a probe
            operations.append(Operation(start, chr(what), path, other, offset, length, data))
    return operations


# --- the store that loses its power -----------------------------------------------------------


def live(folder: Path, log: Path, notes: Path, *, sync: str, seed: int) -> None:
    """Write, delete, sweep, evict, and shrink once; note after each round what is stored."""
    random_, clock = random.Random(seed), FakeClock(time.time())
    known: dict[bytes, Block] = {}
    with notes.open("w") as lines:
        for life, budget_bytes in enumerate(BUDGETS_BYTES):
            with open_store(
                folder / "store",
                clock,
                budget_bytes=budget_bytes,
                sync=sync,
                encryption="on",
                key_dir=str(folder / "keys"),
            ) as store:
                for round_ in range(_ROUNDS):
                    chain = f"{life}.{round_}"
                    blocks = [
                        make_record(chain, position, size_bytes=random_.choice(SIZES_BYTES))
                        for position in range(random_.randrange(1, 20))
                    ]
                    names = Names(store.parts.key_use.names_key).hide(
                        [each.block_hash for each in blocks]
                    )
                    for name, each in zip(names, blocks, strict=True):
                        known[name] = (chain, each.position, each.size_bytes)
                    _put_blocks(store, blocks, Names(store.parts.key_use.names_key))
                    if round_ % 3 == 2:
                        store.drop(names[:3], "request")
                    if round_ % 5 == 4:
                        sweep(store)
                    found = store.lookup(list(known))
                    stored = [known[each.block_hash] for each in found if each is not None]
                    lines.write(json.dumps([log.stat().st_size, stored]) + "\n")


def _put_blocks(store: Store, blocks: Sequence[BlockRecord], names: Names) -> None:
    """Store blocks under their names, as the client does."""
    hashes = [each.block_hash for each in blocks]
    hidden = zip(names.hide(hashes), names.hide([each.parent_hash for each in blocks]), strict=True)
    records = [
        replace(each, block_hash=name, parent_hash=parent)
        for each, (name, parent) in zip(blocks, hidden, strict=True)
    ]
    writes = []
    for extent, record, known in zip(store.reserve(records), records, hashes, strict=True):
        if extent is not None:
            page = page_with(payload_of(known, record.size_bytes))
            writes.append(store.write(extent, record, page))
    commit(store, writes)


if __name__ == "__main__":
    paths, (sync, seed) = map(Path, sys.argv[1:4]), sys.argv[4:]
    live(*paths, sync=sync, seed=int(seed))
