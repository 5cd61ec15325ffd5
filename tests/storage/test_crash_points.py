"""A process that dies at any step of a change leaves a store that opens and is consistent."""

import math
import os
import random
import re
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import pytest
from msgspec.structs import replace

import tieredkv.storage
from tests.fakes import FakeClock
from tests.levels import few
from tests.storage import blocks as blocks_of
from tests.storage.blocks import (
    CheckedStore,
    gather,
    load,
    make_record,
    occupied_bytes,
    payload_of,
    put,
    segment_files,
    sweep,
    verify,
)
from tests.storage.windows import NEEDS, anchors_of, num_torn, pages_of
from tieredkv.operate.table import START_BYTES, starts_in
from tieredkv.storage.extents import room
from tieredkv.storage.index import rebuild
from tieredkv.storage.store import Store
from tieredkv.types import BlockRecord

LABELS = [
    "reserve:before",
    "reserve:done",
    "segment:opened",
    "segment:grown",
    "write:before",
    "write:done",
    "commit:before",
    "commit:done",
    "delete:before",
    "delete:done",
    "erase:before",
    "erase:done",
    "erase:committed",
    "segment:forgotten",
]
START = 1_800_000_000.0
BUDGET_BYTES = 2 << 20
DIED, FINISHED, FAILED = -signal.SIGKILL, 0, 1

Step = tuple[Literal["put", "delete"], Sequence[BlockRecord]] | tuple[Literal["wait"], float]


def blocks(
    name: str, count: int, at: int, *, size: int = 8192, life_s: float = 86_400.0
) -> list[BlockRecord]:
    """Some blocks, each last used at a moment of its own, so that the order of eviction is sure."""
    return [
        make_record(
            name,
            position,
            now=START + at + position / 1000,
            size_bytes=size,
            expires_at=START + at + life_s,
        )
        for position in range(count)
    ]


def windows(name: str, count: int, at: int, **how: Any) -> list[BlockRecord]:
    """Some blocks and the pages of windows beside them, in the mixed order of their writes."""
    made = blocks(name, count, at, **how)
    made += pages_of(made)
    random.Random(name).shuffle(made)
    times = [START + at + number / 1000 for number in range(len(made))]
    return [
        replace(it, computed_at=now, last_used=now) for it, now in zip(made, times, strict=True)
    ]


A, B, ODD = blocks("a", 10, 1), blocks("b", 6, 2, size=20_480), blocks("odd", 5, 3, size=4096)
SHORT, A_AGAIN = windows("short", 2, 4, life_s=60), blocks("a", 4, 10)
PARTS, PARTS_AGAIN = windows("parts", 6, 5), windows("parts", 6, 11)[:7]
MANY = [windows(f"many {i}", 6, 200 + i) for i in range(6)]
LARGE = [blocks(f"large {i}", 6, 300 + i, size=40_960) for i in range(3)]
LAST = blocks("last", 5, 400)

# Two lives of a store: the first has room for its blocks; the second opens it and must evict.
LIVES: list[list[Step]] = [
    [
        ("put", A),
        ("put", B),
        ("put", ODD),
        ("put", SHORT),
        ("delete", [A[8], A[9], B[0]]),
        *(("put", PARTS[start : start + 5]) for start in range(0, len(PARTS), 5)),
        ("delete", [PARTS[3], PARTS[13]]),
        ("put", PARTS_AGAIN),
        ("put", A_AGAIN),  # computed again, so these blocks replace the stored ones
        ("delete", ODD),  # the last blocks of their extent size
        ("wait", 1.0),
        ("wait", 100.0),  # until after the blocks of `SHORT` expire
    ],
    [
        *(("put", many) for many in MANY),
        ("delete", MANY[5][10:14]),
        *(("put", large) for large in LARGE),
        ("wait", 1.0),
        ("put", LAST),
        ("delete", LAST[:2]),
        ("wait", 1.0),
    ],
]
TRIED = [record for life in LIVES for step in life if step[0] == "put" for record in step[1]]


class Outcome(NamedTuple):
    """What a process knew of its store when it died.

    Attributes:
        exit_code: How the process ended.
        stored: The blocks of all finished steps.
        under_way: The blocks of the step in which it died; None for a block that it was deleting.
        is_committed: Whether that step was a put that was committed but not yet acknowledged.
        now: The time of the process's clock.
    """

    exit_code: int
    stored: dict[bytes, BlockRecord]
    under_way: dict[bytes, BlockRecord | None]
    is_committed: bool
    now: float


def open_store(path: Path, clock: FakeClock, **options: Any) -> CheckedStore:
    """Open an encrypted store, whose keys lie beside its folder."""
    return blocks_of.open_store(path, clock, encryption="on", key_dir=f"{path}.keys", **options)


def live(path: Path, failpoint: Callable[[str], None], tell: Callable[[str], None]) -> None:
    """Work on a store; `tell` is called before and after each step."""
    clock = FakeClock(START)
    for life, steps in enumerate(LIVES):
        with (
            open_store(path, clock, budget_bytes=BUDGET_BYTES, failpoint=failpoint) as store,
            patch.object(room, "_ERASING_S", math.inf),  # as many steps on a slow machine
        ):
            for number, step in enumerate(steps):
                tell(f"begin {life} {number}")
                take_step(store, clock, step)
                tell(f"done {life} {number}")


def take_step(store: Store, clock: FakeClock, step: Step) -> None:
    if step[0] == "put":
        clock.advance_to(step[1][-1].computed_at)
        assert all(put(store, *step[1]))
    elif step[0] == "delete":
        dropped = store.drop([record.block_hash for record in step[1]], "request")
        assert len(dropped) == len(step[1])
    else:
        clock.advance(step[1])
        sweep(store)


def in_child(work: Callable[[Callable[[str], None]], None]) -> tuple[int, list[str]]:
    """Run `work` in a process of its own; return its exit code and the lines that it told."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            work(lambda line: void(os.write(write_end, line.encode() + b"\n")))
        except BaseException:
            traceback.print_exc()
            os._exit(FAILED)
        os._exit(FINISHED)
    os.close(write_end)
    with os.fdopen(read_end) as lines:
        told = lines.read().splitlines()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), told


def void(_: object) -> None:
    """Take a value and return None."""


def dying_at(label: str, nth: int, tell: Callable[[str], None]) -> Callable[[str], None]:
    """Return a failpoint that kills the process the n-th time that a label is reached."""
    seen = Counter[str]()

    def failpoint(at: str) -> None:
        seen[at] += 1
        if at == "commit:done":
            tell("committed")
        if at == label and seen[at] == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    return failpoint


def outcome_of(exit_code: int, told: list[str]) -> Outcome:
    """Reconstruct from what a process told which steps were done and which was under way."""
    stored: dict[bytes, BlockRecord] = {}
    under_way: dict[bytes, BlockRecord | None] = {}
    clock, is_committed = FakeClock(START), False
    for line in told:
        if line == "committed":
            is_committed = True
            continue
        word, life, number = line.split()
        step = LIVES[int(life)][int(number)]
        is_committed = False
        if word == "begin" and step[0] != "wait":
            under_way = {r.block_hash: r if step[0] == "put" else None for r in step[1]}
        if word == "begin" and step[0] == "put":
            clock.advance_to(step[1][-1].computed_at)
        elif word == "begin" and step[0] == "wait":
            clock.advance(step[1])
        if word == "done":
            stored = {key: each for key, each in (stored | under_way).items() if each}
            under_way = {}
    return Outcome(exit_code, stored, under_way, is_committed, clock.now())


def run_until(path: Path, label: str, nth: int) -> Outcome:
    """Let a process work on a store until it dies at a label."""
    died = in_child(lambda tell: live(path, dying_at(label, nth, tell), tell))
    return outcome_of(*died)


@pytest.fixture(scope="module")
def num_reached(tmp_path_factory: pytest.TempPathFactory) -> Counter[str]:
    return count_labels(tmp_path_factory.mktemp("counted") / "store")


def count_labels(path: Path) -> Counter[str]:
    """Return how often each label is passed if the process is not killed."""
    seen = Counter[str]()
    live(path, lambda label: seen.update([label]), lambda line: None)
    return seen


def test_every_label_in_the_source_is_tested(num_reached: Counter[str]) -> None:
    folder = Path(tieredkv.storage.__path__[0])
    source = "".join(file.read_text() for file in sorted(folder.rglob("*.py")))
    labels = re.findall(r"failpoint\(\s*[\"']([^\"']+)[\"']", source)
    assert sorted(labels) == sorted(["adopt:before", *LABELS])
    assert len(re.findall(r"\b_?failpoint\(", source)) == len(labels), "a label that is no literal"
    assert set(num_reached) == set(LABELS), "a label that the processes below never reach"


@pytest.mark.parametrize(
    "when", few(["first", "in the middle", "last", "second", "last but one"], 3)
)
@pytest.mark.parametrize("label", LABELS)
def test_a_process_killed_at_a_label_loses_no_block_and_leaves_no_bytes(
    tmp_path: Path, num_reached: Counter[str], label: str, when: str
) -> None:
    path, last = tmp_path / "store", num_reached[label]
    nth = {"first": 1, "second": min(2, last), "in the middle": last // 2, "last but one": last - 1}
    died = run_until(path, label, max(nth.get(when, last), 1))
    assert died.exit_code == DIED
    assert died.is_committed or label != "commit:done"
    assert_whole(path, died)


@pytest.mark.parametrize("label", ["erase:before", "erase:done", "erase:committed"])
@pytest.mark.parametrize("first", ["commit:before", "delete:done", "reserve:done"])
def test_a_process_that_dies_while_it_recovers_does_no_more_harm(
    tmp_path: Path, num_reached: Counter[str], first: str, label: str
) -> None:
    path = tmp_path / "store"
    died = run_until(path, first, num_reached[first])
    assert died.exit_code == DIED

    def reopen(tell: Callable[[str], None]) -> None:
        failpoint = dying_at(label, 1, tell)
        open_store(path, FakeClock(died.now), budget_bytes=None, failpoint=failpoint)

    assert in_child(reopen) == (DIED, [])
    assert_whole(path, died)


@pytest.mark.parametrize(
    ("label", "nth"),
    [("adopt:before", 1), ("adopt:before", 3), ("erase:before", 1), ("erase:committed", 1)],
)
def test_a_process_that_dies_while_it_makes_a_lost_index_again_makes_it_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, label: str, nth: int
) -> None:
    monkeypatch.setattr(rebuild, "_BATCH_EXTENTS", 10)
    path = tmp_path / "store"
    finished = run_until(path, "never", 1)
    assert finished.exit_code == FINISHED
    os.truncate(path / "index" / "data.mdb", 0)

    def reopen(tell: Callable[[str], None]) -> None:
        failpoint = dying_at(label, nth, tell)
        open_store(path, FakeClock(finished.now), budget_bytes=BUDGET_BYTES, failpoint=failpoint)

    assert in_child(reopen) == (DIED, [])
    assert_whole(path, finished)


@pytest.mark.parametrize("label", ["erase:before", "erase:done", "erase:committed"])
def test_a_process_that_dies_while_it_shrinks_a_store_shrinks_it_the_next_time(
    tmp_path: Path, label: str
) -> None:
    path, smaller = tmp_path / "store", BUDGET_BYTES * 3 // 4
    finished = run_until(path, "never", 1)
    assert finished.exit_code == FINISHED

    def shrink(tell: Callable[[str], None]) -> None:
        failpoint = dying_at(label, 1, tell)
        open_store(path, FakeClock(finished.now), budget_bytes=smaller, failpoint=failpoint)

    assert in_child(shrink) == (DIED, [])
    assert_whole(path, finished, budget_bytes=smaller)


def assert_whole(path: Path, died: Outcome, *, budget_bytes: int = BUDGET_BYTES) -> Counter[str]:
    """Check the whole store that a dead process left; return what it serves."""
    assert occupied_bytes(path) <= BUDGET_BYTES
    with open_store(path, FakeClock(died.now), budget_bytes=budget_bytes) as store:
        store.check()
        assert occupied_bytes(path) <= budget_bytes
        found = assert_right_blocks(store, died)
        sweep(store)
        store.check()
        assert_right_blocks(store, died)
        assert verify(store).bad == 0
        assert_no_strangers_bytes(path, store)
        assert occupied_bytes(path) <= budget_bytes
        assert store.stats().bytes_files == occupied_bytes(path)
        assert all(put(store, *blocks("after", 20, 500)))
        store.check()
        assert occupied_bytes(path) <= budget_bytes
    return found


def assert_right_blocks(store: CheckedStore, died: Outcome) -> Counter[str]:
    """Assert that exactly the acknowledged blocks are served, except those evicted in order.

    Returns how many blocks and pages are served, how many anchors, and how many blocks that lack
    some of their pages.
    """
    served = {}
    for block_hash in {record.block_hash for record in TRIED}:
        (found,) = store.lookup([block_hash])
        if found is not None:
            assert load(store, found) == payload_of(found), "wrong bytes"
            served[block_hash] = found
    for block_hash, found in served.items():
        allowed = [died.stored.get(block_hash)]
        if died.is_committed:
            allowed.append(died.under_way.get(block_hash))
        assert found.computed_at in [each.computed_at for each in allowed if each], (
            "a block that was never acknowledged, or was deleted, is served"
        )
    kept = [
        record
        for block_hash, record in died.stored.items()
        if record.expires_at > died.now and block_hash not in died.under_way
        if not record.kind or record.parent_hash in served  # pages may go with their block
    ]
    kept.sort(key=lambda record: record.last_used)
    is_there = [record.block_hash in served for record in kept]
    assert is_there == sorted(is_there), "a block is lost that was not the longest unused"
    assert sum(is_there) >= min(len(kept), 20), "more is lost than had to be"
    records, told = [*served.values()], gather(store)
    blocks_told = told.blocks[told.anchors([NEEDS] * len(told.kinds))]
    anchors = anchors_of(records)
    assert sorted(starts_in(blocks_told)) == sorted(it[:START_BYTES] for it in anchors), (
        "a wrong anchor is told"
    )
    counted = {"blocks verified": len(served), "anchors verified": len(anchors)}
    return Counter(counted | {"torn blocks": num_torn(records)})


def assert_no_strangers_bytes(path: Path, store: CheckedStore) -> None:
    """Assert that every extent in the files is zero unless it belongs to a stored block."""
    found = store.lookup([record.block_hash for record in TRIED])
    located = [store.locate(record.block_hash) for record in found if record is not None]
    owned = {each.extent for each in located if each is not None}
    for file in segment_files(path):
        number, extent_bytes = map(int, file.stem.split("-"))
        data = file.read_bytes()
        for extent in range(-(-len(data) // extent_bytes)):
            held = data[extent * extent_bytes : (extent + 1) * extent_bytes]
            assert (number, extent) in owned or not any(held), "an extent holds bytes of no block"
