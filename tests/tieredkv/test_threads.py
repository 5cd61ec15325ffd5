"""Tenants share threads in turns; abandoned work stops, and its memory is given back."""

import asyncio
import ctypes
import functools
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from tieredkv.server.threads import (
    NUM_ARENAS,
    Cancellation,
    CancelledWorkError,
    FairThreads,
    trim_memory,
)


def test_a_tenant_never_holds_the_last_thread() -> None:
    async def run() -> None:
        threads, go = FairThreads(3), threading.Event()
        held = [asyncio.create_task(threads.run("a", lambda _: go.wait())) for _ in range(20)]
        assert await asyncio.wait_for(threads.run("b", lambda _: "done"), 60) == "done"
        go.set()
        await asyncio.gather(*held)
        threads.close()

    asyncio.run(run())


def test_tenants_take_turns() -> None:
    order: list[str] = []

    def noting(name: str) -> Callable[[Cancellation], None]:
        return lambda _: order.append(name)

    async def run() -> None:
        threads, go = FairThreads(2), threading.Event()
        stuck = asyncio.create_task(threads.run("other", lambda _: go.wait()))
        await asyncio.sleep(0)
        names = ["a1", "a2", "a3", "b1", "b2", "c1"]
        tasks = [asyncio.create_task(threads.run(name[0], noting(name))) for name in names]
        await asyncio.gather(*tasks)
        go.set()
        await stuck
        threads.close()

    asyncio.run(run())
    assert order == ["a1", "a2", "b1", "c1", "a3", "b2"]


def test_a_single_thread_does_the_work_of_tenants_in_turns() -> None:
    order: list[str] = []

    async def run() -> None:
        threads, go = FairThreads(1), threading.Event()
        stuck = asyncio.create_task(threads.run("a", lambda _: go.wait()))
        await asyncio.sleep(0)
        names = ["a1", "a2", "b1", "c1", "b2"]
        works = [functools.partial(lambda name, _: order.append(name), name) for name in names]
        tasks = [
            asyncio.create_task(threads.run(name[0], work))
            for name, work in zip(names, works, strict=True)
        ]
        go.set()
        await asyncio.gather(stuck, *tasks)
        threads.close()

    asyncio.run(run())
    assert order == ["a1", "b1", "c1", "a2", "b2"]


def test_work_that_nobody_waits_for_is_told_to_stop_and_frees_its_thread() -> None:
    async def run() -> None:
        threads, began = FairThreads(2), threading.Event()

        def work(cancellation: Cancellation) -> None:
            began.set()
            assert cancellation.wait(60)
            cancellation.check()

        tasks = [asyncio.create_task(threads.run("a", work)) for _ in range(3)]
        await asyncio.to_thread(began.wait, 60)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(each) for each in results] == [asyncio.CancelledError] * 3
        assert await asyncio.wait_for(threads.run("a", lambda _: 1), 60) == 1
        threads.close()

    asyncio.run(run())


def test_work_under_way_ends_when_the_threads_are_closed() -> None:
    async def run() -> None:
        threads, began = FairThreads(2), threading.Event()

        def work(cancellation: Cancellation) -> None:
            began.set()
            assert cancellation.wait(60)
            cancellation.check()

        task = asyncio.create_task(threads.run("a", work))
        await asyncio.to_thread(began.wait, 60)
        threads.close()
        with pytest.raises(CancelledWorkError):
            await task

    asyncio.run(run())


def test_errors_of_work_are_those_of_its_caller() -> None:
    async def run() -> None:
        threads = FairThreads(2)
        with pytest.raises(ZeroDivisionError):
            await threads.run("a", lambda _: 1 // 0)
        threads.close()

    asyncio.run(run())


GROWN = """
import ctypes, threading
from tieredkv.server.threads import bound_arenas
{setting}

def allocate() -> None:
    kept.append(ctypes.create_string_buffer(100_000))
    both.wait()

kept, both = [], threading.Barrier(8)
threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc = ctypes.CDLL(None)
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
libc.fdopen.restype = ctypes.c_void_p
libc.fdopen.argtypes = [ctypes.c_int, ctypes.c_char_p]
libc.fflush.argtypes = [ctypes.c_void_p]
stream = libc.fdopen(1, b"w")
libc.malloc_info(0, stream)
libc.fflush(stream)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="this is not glibc")
@pytest.mark.parametrize("is_bound", [False, True])
def test_threads_share_two_arenas_of_memory(is_bound: bool) -> None:
    code = GROWN.format(setting="bound_arenas()" if is_bound else "")
    words = [sys.executable, "-P", "-c", code]
    told = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    num_arenas = told.count("<heap nr=")
    assert num_arenas <= NUM_ARENAS if is_bound else num_arenas > NUM_ARENAS


def test_memory_can_be_given_back() -> None:
    trim_memory()  # must not fail on any system
