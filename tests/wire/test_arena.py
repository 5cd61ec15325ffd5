import gc
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.golden import refused, told
from tieredkv.errors import ConfigError, IntegrityError, StorageError
from tieredkv.wire.arena import HostArena

PAGE = 8192


def test_pages_are_apart_and_seen_by_whoever_attaches() -> None:
    arena = HostArena(3, PAGE)
    other = HostArena.attach(os.dup(arena.fd), 3, PAGE)
    for page_id in range(3):
        arena.page(page_id)[:] = bytes([page_id + 1]) * PAGE
    assert bytes(other.buffer) == b"".join(bytes([n]) * PAGE for n in (1, 2, 3))
    other.page(1)[0] = 99
    assert arena.page(1)[0] == 99
    arena.check()
    other.check()
    arena.close()
    other.close()


def test_the_arena_cannot_be_resized_by_anybody() -> None:
    arena = HostArena(2, PAGE)
    for size in (PAGE, 3 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    arena.check()
    arena.close()


def test_closing_twice_is_fine_and_held_views_stay_readable() -> None:
    arena = HostArena(2, PAGE)
    view = arena.page(1)
    view[:2] = b"ok"
    arena.close()
    arena.close()
    arena.check()
    assert arena.fd < 0
    assert bytes(view[:2]) == b"ok"
    view.release()


def test_closing_gives_the_memory_back() -> None:
    def shared_kib() -> int:
        rows = Path("/proc/self/status").read_text().splitlines()
        return next(int(row.split()[1]) for row in rows if row.startswith("RssShmem"))

    before = shared_kib()
    arena = HostArena(4096, PAGE)
    assert shared_kib() - before >= 32 * 1024
    arena.close()
    gc.collect()
    assert shared_kib() - before < 1024


def test_every_page_is_there_before_it_is_used_and_progress_says_so() -> None:
    steps: list[tuple[int, int]] = []
    pages = (130 << 20) // PAGE
    arena = HostArena(pages, PAGE, progress=lambda done, total: steps.append((done, total)))
    assert steps[-1] == (pages * PAGE, pages * PAGE)
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert len(steps) > 1
    assert os.fstat(arena.fd).st_blocks * 512 >= pages * PAGE
    arena.close()


def test_more_than_the_machine_has_is_refused_before_anything_is_allocated() -> None:
    with pytest.raises(StorageError) as caught:
        HostArena(1 << 37, PAGE)
    told(re.sub(r"but .* allows only [\d,]+", "but MEMORY allows only N", str(caught.value)))


def test_a_limit_of_address_space_is_named() -> None:
    code = (
        "import resource\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({1 << 30}, -1))\n"
        "from tieredkv.wire.arena import HostArena\n"
        f"HostArena({(2 << 30) // PAGE}, {PAGE})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    told(done.stderr.splitlines()[-2])


@pytest.mark.parametrize(("num_pages", "page_bytes"), [(0, PAGE), (1, 0), (1, 4097), (-1, PAGE)])
def test_sizes_that_make_no_arena_are_refused(num_pages: int, page_bytes: int) -> None:
    with pytest.raises(ConfigError):
        HostArena(num_pages, page_bytes)


@pytest.mark.parametrize("page_id", [-1, 2])
def test_a_page_outside_the_arena_is_an_index_error(page_id: int) -> None:
    arena = HostArena(2, PAGE)
    with pytest.raises(IndexError):
        arena.page(page_id)
    arena.close()


def test_a_file_that_could_be_truncated_is_not_attached() -> None:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 2 * PAGE)
    with refused(IntegrityError):
        HostArena.attach(fd, 2, PAGE)
