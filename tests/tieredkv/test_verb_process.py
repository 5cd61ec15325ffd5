"""A verb that a server carries out by a process of its own."""

import asyncio
import os
from pathlib import Path

import pytest

from tests.storage.blocks import make_record, open_store, put
from tests.waiting import HANG_S, is_alive, wait_until
from tieredkv.clock import Clock
from tieredkv.errors import NoStoreError
from tieredkv.operate.calls import Call, Df, Inspect, Ls
from tieredkv.operate.jobs import Job
from tieredkv.server.verb_process import VerbProcess


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    now = Clock().now()
    with open_store(tmp_path / "store", Clock(), budget_bytes=64 << 20) as store:
        for start in range(0, 600, 50):
            chains = range(start, start + 50)
            put(store, *[make_record(f"{it}", now=now, size_bytes=1) for it in chains])
    return tmp_path / "store"


def job(folder: Path, call: Call) -> Job:
    return Job(call=call, path=str(folder))


def test_its_answer_is_the_document_of_the_command_line(folder: Path) -> None:
    async def ask(call: Call) -> object:
        return await (await VerbProcess.start(job(folder, call))).answer()

    df, ls = (asyncio.run(ask(call)) for call in (Df(), Ls(filter="blocks=1")))
    assert isinstance(df, dict) and df["disk"]["blocks"] == 600
    assert isinstance(ls, dict) and len(ls["chains"]) == 600 and ls["needs"] == []


def test_what_it_refuses_is_raised_before_the_answer_begins(tmp_path: Path) -> None:
    with pytest.raises(NoStoreError):
        asyncio.run(VerbProcess.start(job(tmp_path / "none", Inspect(id="0" * 8))))


def test_whoever_stops_waiting_for_its_answer_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, told = tmp_path / "program", tmp_path / "pid"
    program.write_text(f"#!/bin/sh\necho $$ > {told}\nexec sleep 1000\n")
    program.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(program))

    async def wait_in_vain() -> int:
        waiting = asyncio.create_task(VerbProcess.start(job(tmp_path, Df())))
        while not (told.exists() and told.read_text().strip()):
            await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return int(told.read_text())

    pid = asyncio.run(wait_in_vain())
    wait_until(lambda: not is_alive(pid))


def test_an_answer_that_fills_the_pipe_does_not_keep_it_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho null\nexec cat /dev/zero\n")
    program.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(program))

    async def read_some() -> int:
        process = await VerbProcess.start(job(tmp_path, Df()))
        text = process.text()
        assert set(await anext(text)) == {0}
        await asyncio.sleep(0.05)  # time for the loop to take more than is read
        async with asyncio.timeout(HANG_S):
            await text.aclose()
        return process.pid

    assert not is_alive(asyncio.run(read_some()))


def test_whoever_stops_reading_ends_it(folder: Path) -> None:
    async def read_some() -> int:
        process = await VerbProcess.start(job(folder, Ls()))
        text = process.text()
        assert (await anext(text)).startswith(b'{"chains": [{')
        assert is_alive(process.pid)
        await text.aclose()
        return process.pid

    pid = asyncio.run(read_some())
    assert pid != os.getpid()
    wait_until(lambda: not is_alive(pid))
