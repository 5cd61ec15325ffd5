"""Operators' verbs in processes of their own, so that what they work out delays no request.

This module starts such a process, hands its answer on as it is written, and ends the process when
nobody listens any more. A verb that only reads figures gets a thread. This module knows neither the
verbs nor HTTP.
"""

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

import msgspec

from tieredkv.config import child_environment
from tieredkv.errors import StorageError, StoreUnreachableError
from tieredkv.operate.jobs import Job
from tieredkv.wire.process import Refused

_PIECE_BYTES = 64 << 10
Result = TypeVar("Result")


class VerbProcess:
    """The process of one verb, whose answer has begun; used by one task.

    Attributes:
        pid: of the process.
    """

    def __init__(self, process: asyncio.subprocess.Process, out: asyncio.StreamReader) -> None:
        self._process, self._out, self.pid = process, out, process.pid

    @classmethod
    async def start(cls, job: Job) -> "VerbProcess":
        """Start a verb, and wait for the beginning of its answer.

        Raises:
            TieredKVError: the verb is refused, or its process ended without a word.
        """
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "tieredkv.operate"),
                stdin=pipe,
                stdout=pipe,
                env=child_environment(),
                start_new_session=True,
                limit=_PIECE_BYTES,
            )
        except OSError as error:
            raise StorageError(f"the process of a verb cannot be started: {error}") from error
        assert process.stdin is not None and process.stdout is not None, "they are pipes"
        verb = cls(process, process.stdout)
        try:
            process.stdin.write(msgspec.msgpack.encode(job))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended
                await process.stdin.drain()
            process.stdin.close()
            line = await process.stdout.readline()
            if not line:
                raise StorageError(f"the process of `{job.call.verb}` ended without an answer")
            refused = msgspec.json.decode(line, type=Refused | None)
            if refused is not None:
                raise refused.error
        except BaseException:
            await verb.end()
            raise
        return verb

    async def text(self) -> AsyncGenerator[bytes, None]:
        """Yield the document as it is written. Whoever stops reading it ends the process.

        Raises:
            StoreUnreachableError: the document is cut short.
        """
        try:
            while piece := await self._out.read(_PIECE_BYTES):
                yield piece
            if await self._process.wait():
                what = "the process of a verb ended in the middle of its answer"
                raise StoreUnreachableError(f"{what}, so the answer is incomplete")
        finally:
            await self.end()

    async def answer(self) -> dict[str, Any]:
        """Return the whole document."""
        document: dict[str, Any] = msgspec.json.decode(
            b"".join([piece async for piece in self.text()])
        )
        return document

    async def end(self) -> None:
        """End the process, and wait until it has ended; twice is fine."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await asyncio.shield(self._ended())

    async def _ended(self) -> None:
        """Wait until the process has ended, and all that it wrote has been taken.

        NOTE: asyncio tells of no end while a pipe is paused that has more than was read.
        """
        while await self._out.read(_PIECE_BYTES):
            pass
        await self._process.wait()


async def on_thread(call: Callable[[], Result]) -> Result:
    """Make a call on a thread of its own, which neither other work nor the server's end waits for.

    A caller that is cancelled leaves the thread behind.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def tell(take: Callable[[Any], None], value: object) -> None:
        if not done.done():  # it may have been cancelled
            take(value)

    def make() -> None:
        take: Callable[[Any], None] = done.set_result
        try:
            told: object = call()
        except Exception as error:
            take, told = done.set_exception, error
        with contextlib.suppress(RuntimeError):  # the server has ended
            loop.call_soon_threadsafe(tell, take, told)

    threading.Thread(target=make, name="verb", daemon=True).start()
    return await done
