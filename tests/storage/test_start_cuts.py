"""A process that dies at any step of a start, or of what a verb does to a store that is stopped."""

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.levels import few
from tests.storage.blocks import evict, load, payload_of, put, sweep
from tests.storage.test_crash_points import FINISHED, in_child
from tests.storage.test_replaced import OldPlace
from tests.storage.test_store_keys import Place, damage_headers
from tieredkv.operate.calls import EvictFilter
from tieredkv.storage import starts
from tieredkv.storage.keys.store_keys import open_keys
from tieredkv.storage.starts import claim_folder

_CALLS = ("mkdir", "rename", "unlink", "rmdir", "fsync", "fdatasync", "ftruncate", "pwrite", "open")


def die_before(step: int) -> None:
    """Have this process die before one of these calls, counted from 0."""
    steps = count()

    def deadly(call: Callable[..., Any]) -> Callable[..., Any]:
        def call_or_die(*arguments: Any, **options: Any) -> Any:
            if next(steps) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return call_or_die

    for name in _CALLS:
        setattr(os, name, deadly(getattr(os, name)))


def start(place: Place, **changes: Any) -> None:
    """Do what a server's start does before it opens the index."""
    options = place.options(**changes)
    folder = claim_folder(options)
    keys, _ = open_keys(folder, options)
    if keys is not None:
        keys.close()
    folder.release()


def start_clear(place: Place) -> None:
    start(place, encryption="off")


def empty(place: Place) -> None:
    starts.empty(place.options(encryption="as_it_is"))


def cut_everywhere(
    original: Place, copies: Path, change: Callable[[Place], None], then: Callable[[Place], None]
) -> None:
    """Cut a change of a store short before each of its steps, and call `then` with what is left."""
    base = original.folder.parent
    for step in count():
        place = Place(copies / str(step))
        shutil.copytree(base, place.folder.parent)
        place.clock = original.clock

        def die(_: object, place: Place = place, step: int = step) -> None:
            die_before(step)
            change(place)

        ending = in_child(die)[0]
        try:
            then(place)
        except Exception as error:
            error.add_note(f"the change ended before step {step} of {change}")
            raise
        shutil.rmtree(place.folder.parent)
        if ending == FINISHED:
            assert step > len(_CALLS)
            return


def opens(place: Place, **changes: Any) -> None:
    """Start a server on the store, and use it."""
    record = place.record("new")
    place.check_start(**changes)
    with place.open(**changes) as store:
        put(store, record)
        assert load(store, record) == payload_of(record)


@pytest.fixture
def ram_base(ram_path: Path) -> Iterator[Path]:
    """A folder where flushing costs nothing."""
    with tempfile.TemporaryDirectory(dir=ram_path) as made:
        yield Path(made)


@pytest.fixture
def place(ram_base: Path) -> Place:
    (ram_base / "base").mkdir()
    return Place(ram_base / "base")


@pytest.mark.slow
def test_a_first_start_that_is_cut_short_leaves_a_store_that_starts(
    place: Place, ram_base: Path
) -> None:
    def then(left: Place) -> None:
        opens(left)
        assert [each.name for each in left.key_dir.glob("*.keys")] == [left.table.name]

    cut_everywhere(place, ram_base / "copies", start, then)


def test_a_start_that_is_cut_short_keeps_its_blocks_and_makes_no_copy_of_it(
    place: Place, ram_base: Path
) -> None:
    record = place.stores()
    place.copy("backup")
    start(place)

    def then(left: Place) -> None:
        opens(left)
        with left.open() as store:
            assert load(store, record) == payload_of(record)
        left.folder = left.folder.with_name("backup")
        with pytest.raises(OSError, match="is a copy"):
            left.open()

    cut_everywhere(place, ram_base / "copies", start, then)


def test_the_destruction_of_an_old_store_that_is_cut_short_is_finished(ram_base: Path) -> None:
    (ram_base / "base").mkdir()
    old = OldPlace(ram_base / "base")

    def then(left: Place) -> None:
        opens(left)
        assert left.files().keys() >= {left.table.name, left.master.name}
        assert not list(left.key_dir.glob(f"{old.old_table.stem}*"))

    cut_everywhere(old, ram_base / "copies", start, then)


@pytest.mark.slow
def test_a_store_whose_keys_are_damaged_begins_anew_also_if_that_is_cut_short(
    place: Place, ram_base: Path
) -> None:
    place.stores()
    damage_headers(place.table, 0, 1)
    cut_everywhere(place, ram_base / "copies", start, opens)


@pytest.mark.slow
def test_an_empty_store_becomes_clear_also_if_that_is_cut_short(
    place: Place, ram_base: Path
) -> None:
    with place.open() as store:
        put(store, place.record())
        evict(store, EvictFilter(all=True))
        sweep(store)

    def then(left: Place) -> None:
        opens(left, encryption="off")

    cut_everywhere(place, ram_base / "copies", start_clear, then)


@pytest.mark.parametrize("kind", few([Place, OldPlace]))
def test_an_emptying_that_is_cut_short_is_finished_by_the_next(
    ram_base: Path, kind: type[Place]
) -> None:
    (ram_base / "base").mkdir()
    place = kind(ram_base / "base")
    if kind is Place:
        place.stores()

    def then(left: Place) -> None:
        empty(left)
        assert left.files() == {}
        opens(left)

    cut_everywhere(place, ram_base / "copies", empty, then)


def test_an_adoption_that_is_cut_short_is_finished_by_the_next(
    place: Place, ram_base: Path
) -> None:
    record = place.stores()
    copy = place.copy()
    start(place)

    def adopt(left: Place) -> None:
        starts.adopt(left.options(path=str(left.folder.with_name(copy.folder.name))))

    def then(left: Place) -> None:
        adopt(left)
        left.folder = left.folder.with_name(copy.folder.name)
        with left.open() as store:
            assert load(store, record) == payload_of(record)

    cut_everywhere(place, ram_base / "copies", adopt, then)
