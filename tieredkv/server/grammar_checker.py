"""Finds out whether grammars can be used, by compiling each in a process that can be killed.

The process is started with the first grammar. One that takes too long is killed, and what was
found out is remembered, so that nobody waits for the same grammar again, nor behind other grammars.
"""

import asyncio
import hashlib
import logging
import subprocess
import threading
import time
from collections import OrderedDict

import msgspec

from tieredkv.engine import grammar_check as messages
from tieredkv.engine.engine_messages import EngineInfo
from tieredkv.errors import RequestError, StorageError
from tieredkv.server.threads import FairThreads
from tieredkv.units import format_duration
from tieredkv.wire.channel import FrameChannel
from tieredkv.wire.process import bury, describe_exit, start_process

logger = logging.getLogger(__name__)

MAX_REMEMBERED = 4096
START_S = 120.0
"""For so long the process may load its tokenizer."""

GRACE_S = 1.0
TOLD_AFTER_S = 1.0
"""The log says that a request waits for its grammar once it has waited for so long."""

_decoder = msgspec.msgpack.Decoder(messages.Checked)


class GrammarChecker:
    """Checks grammars for one model; any thread may call it.

    Args:
        model: name of the model, as the user gave it.
        info: what the engine says of it.
        timeout_s: a grammar that takes longer to compile is refused.
    """

    def __init__(self, model: str, info: EngineInfo, timeout_s: float) -> None:
        self._begin = messages.Begin(model, info.vocab_size, info.eos_token_ids)
        self._timeout_s = timeout_s
        self._faults = OrderedDict[bytes, str]()  # by the digest of the grammar
        self._memory_lock = threading.Lock()  # for the faults
        self._lock = threading.Lock()  # for the process
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: FrameChannel[messages.Checked] | None = None
        self._is_closed = False

    def recall(self, grammar: str) -> bool:
        """Return at once whether a grammar is known to be usable.

        Raises:
            RequestError: it is known that it cannot be used.
        """
        with self._memory_lock:
            if (fault := self._faults.get(key := _digest(grammar))) is None:
                return False
            self._faults.move_to_end(key)
        if fault:
            raise RequestError(fault, code="invalid_grammar")
        return True

    def check(self, grammar: str) -> None:
        """Wait until a grammar has been compiled, unless it is known.

        Raises:
            RequestError: it cannot be used.
        """
        if self.recall(grammar):
            return
        with self._lock:
            if self.recall(grammar):  # Another thread has had it compiled meanwhile.
                return
            if self._is_closed:
                raise _stopping()
            fault = self._compile(grammar)
        with self._memory_lock:
            self._faults[_digest(grammar)] = fault
            while len(self._faults) > MAX_REMEMBERED:
                self._faults.popitem(last=False)
        if fault:
            raise RequestError(fault, code="invalid_grammar")

    def close(self) -> None:
        """End the process, and with it a check in progress."""
        self._is_closed = True
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            self._end(at_once=True)

    def _compile(self, grammar: str) -> str:
        """Have the process compile a grammar, and return what is wrong with it."""
        if self._process is None:
            self._start()
        try:
            fault = self._ask(messages.Check(grammar), self._timeout_s)
        except (EOFError, StorageError):
            exit_code = self._end()
            if self._is_closed:
                raise _stopping() from None
            logger.error("a grammar has ended its compiler: %s", describe_exit(exit_code))
            return "The grammar cannot be used: compiling it takes too much memory"
        if fault is None:
            self._end(at_once=True)
            limit = format_duration(self._timeout_s)
            return f"The grammar cannot be used: compiling it takes longer than {limit}"
        return fault

    def _start(self) -> None:
        """Start the process, and wait until it has loaded what it needs.

        Raises:
            RequestError: it cannot be started, or the server stops.
        """
        self._process, sock = start_process("tieredkv.engine.grammar_check")
        self._channel = FrameChannel(sock, _decoder)
        try:
            if self._ask(self._begin, START_S) is not None:
                return
        except (EOFError, StorageError):
            pass
        exit_code = self._end()
        if self._is_closed:
            raise _stopping()
        logger.error("the compiler of grammars cannot start: %s", describe_exit(exit_code))
        what = "The compiler of grammars cannot start; the server's log says more."
        raise RequestError(what, code="no_compiler", status=503)

    def _ask(self, message: msgspec.Struct, timeout_s: float) -> str | None:
        """Return the answer to a message; None if there is none in time."""
        assert self._channel is not None
        self._channel.send(message)
        give_up_at = time.monotonic() + timeout_s
        while (left_s := give_up_at - time.monotonic()) > 0:
            for answer in self._channel.receive(left_s):
                return answer.fault
        return None

    def _end(self, *, at_once: bool = False) -> int:
        """End the process and return its exit code; it may end by itself unless `at_once`."""
        process, channel = self._process, self._channel
        self._process = self._channel = None
        if channel is not None:
            channel.close()
        if process is None:
            return 0
        if at_once:
            process.kill()
        return bury(process, GRACE_S)


class GrammarQueue:
    """Has the grammars of requests checked, one at a time, of tenants in turns; on an event loop.

    It has a thread of its own, so that only requests with new grammars wait for new grammars.

    Args:
        checker: checks them.
    """

    def __init__(self, checker: GrammarChecker) -> None:
        self._checker, self._threads = checker, FairThreads(1)

    async def check(self, tenant: str, grammar: str, request_id: str) -> None:
        """Wait until a grammar has been compiled, unless it is known; the log tells of a wait.

        Raises:
            RequestError: it cannot be used.
            CancelledWorkError: the queue was closed.
        """
        if self._checker.recall(grammar):
            return
        text = "%s waits until its grammar has been compiled, and those before it"
        loop = asyncio.get_running_loop()
        telling = loop.call_later(TOLD_AFTER_S, logger.info, text, request_id)
        try:
            await self._threads.run(tenant, lambda _stop: self._checker.check(grammar))
        finally:
            telling.cancel()

    def close(self) -> None:
        """End the checks, also the one in progress."""
        self._threads.close()
        self._checker.close()


def _digest(grammar: str) -> bytes:
    return hashlib.blake2b(grammar.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _stopping() -> RequestError:
    return RequestError("The server is shutting down.", code="shutting_down", status=503)
