"""The engine as a process of its own: `python -P -m tieredkv.engine FD`.

It joins one `EngineCore` to one end of the server's socket pair, and knows no text and no HTTP. The
channel is its life line: when the server is gone, requests are aborted, what a policy promised is
written to disk, and the process ends.
"""

import contextlib
import gc
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import msgspec

from tieredkv.engine import engine_messages as messages
from tieredkv.engine.core import EngineCore
from tieredkv.engine.engine_messages import Shutdown, Start, StepOutputs, ToEngine
from tieredkv.engine.scheduler import MAX_ADMITTED_TOKENS
from tieredkv.engine.store_options import guard_names_key
from tieredkv.errors import BlocksLostError, RequestError, StorageError, TieredKVError
from tieredkv.garbage import look_seldom
from tieredkv.wire.channel import MAX_ENGINE_FRAME_BYTES, FrameChannel
from tieredkv.wire.process import Refused

logger = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_START_FAILED = 3
"""The server was told why over the channel."""

IDLE_WAIT_S = 1.0
UNSENT_WAIT_S = 0.005
PROGRESS_INTERVAL_S = 0.1
STATS_INTERVAL_S = 1.0
BEAT_INTERVAL_S = 1.0
FAREWELL_S = 2.0


class EngineProcess:
    """Runs a core with the messages that arrive on a channel.

    The main thread steps the core and sends; a second thread receives, so that an abort is seen
    while a step runs, and tells the server each second that the process runs and how long the step
    has lasted. They share `_inbox`, the channel and `_stepped_at`, which the main thread sets.

    Args:
        channel: to the server.
        on_start: called once the core has started.
    """

    def __init__(
        self, channel: FrameChannel[ToEngine], on_start: Callable[[], object] = lambda: None
    ) -> None:
        self._channel, self._on_start = channel, on_start
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._core: EngineCore | None = None
        self._is_stopping = False
        self._reported_at = self._told_at = self._stepped_at = 0.0

    def run(self) -> int:
        """Serve until the server sends `Shutdown` or ends; return the exit code."""
        exit_code = 0
        threading.Thread(target=self._receive, name="receive", daemon=True).start()
        start = self._inbox.get()
        assert isinstance(start, Start), start
        guard_names_key(start.settings)
        logging.basicConfig(
            level=start.log_level, format="%(asctime)s %(levelname)s engine %(name)s: %(message)s"
        )
        try:
            core = self._core = EngineCore(start.settings, progress=self._report)
        except TieredKVError as error:
            self._channel.send(Refused.of(error))
            exit_code = EXIT_START_FAILED
        else:
            self._on_start()
            core.verbs.prompts.on_prompt = self._channel.send
            core.verbs.on_evict = lambda wanted: self._channel.send(messages.EvictToo(wanted))
            signal.signal(signal.SIGTERM, lambda *_: self._post(Shutdown()))
            self._serve(core)
            core.abort_all()
            self._step(core)
            try:
                core.close(progress=self._report)
            except BlocksLostError as error:
                logger.error("%s", error)
                exit_code = EXIT_FAILED
        # Do not wait long for a server that does not read.
        give_up_at = time.monotonic() + FAREWELL_S
        while self._channel.has_queued and time.monotonic() < give_up_at:
            time.sleep(UNSENT_WAIT_S)
        return exit_code

    def _serve(self, core: EngineCore) -> None:
        """Step the core and carry out messages until `Shutdown` arrives."""
        info: messages.EngineInfo | None = None
        self._stepped_at = time.monotonic()
        while not self._is_stopping:
            if core.info != info:  # at the start, or the store's worker has changed
                info = core.info
                self._channel.send(info)
            num_taken_tokens = 0
            while not self._inbox.empty() and num_taken_tokens < MAX_ADMITTED_TOKENS:
                num_taken_tokens += self._take(core, self._inbox.get())
            self._step(core)
            self._stepped_at = time.monotonic()
            if not self._is_stopping:
                core.wait(IDLE_WAIT_S if self._inbox.empty() else 0)

    def _step(self, core: EngineCore) -> None:
        """Step once and send the outputs, with statistics about once a second and at the end."""
        outputs, stats = core.step(), None
        if self._is_stopping or time.monotonic() - self._told_at > STATS_INTERVAL_S:
            self._told_at, stats = time.monotonic(), core.tier_stats.read()
        if outputs or stats:
            self._channel.send(StepOutputs(outputs, stats))

    def _receive(self) -> None:
        """Put messages into the inbox and send beats; the channel's end becomes a `Shutdown`."""
        beat_at = 0.0
        try:
            while True:
                for message in self._channel.receive(BEAT_INTERVAL_S):
                    self._post(message)
                now = time.monotonic()
                if self._stepped_at and now - beat_at >= BEAT_INTERVAL_S:
                    beat_at = now
                    self._channel.send(messages.Beat(now - self._stepped_at))
        except (EOFError, StorageError) as error:
            if self._core is None:
                os._exit(EXIT_START_FAILED)  # nothing has been promised yet
            if isinstance(error, StorageError):
                logger.error("the server sent invalid data: %s", error)
            self._post(Shutdown())

    def _post(self, message: ToEngine) -> None:
        self._inbox.put(message)
        if self._core is not None:
            self._core.wake()

    def _take(self, core: EngineCore, message: ToEngine) -> int:
        """Carry out a message; return how many tokens were hashed for it."""
        match message:
            case messages.EngineRequest(request_id=request_id):
                try:
                    core.check_room(message.tenant)
                    core.add_request(message)
                except RequestError as error:
                    self._channel.send(StepOutputs([messages.failed(request_id, error)]))
                return len(message.prompt_token_ids)
            case messages.Abort(request_id=request_id):
                core.abort(request_id)
            case messages.Shares(of_tenants):
                core.verbs.give_shares(of_tenants)
            case messages.Operate(id, call):
                core.verbs.operate(
                    call,
                    lambda body, has_more: self._channel.send(
                        messages.Operated(id, body, has_more)
                    ),
                )
            case messages.Tokenized():
                core.verbs.prompts.go_on(message)
            case Shutdown():
                self._is_stopping = True
        return 0

    def _report(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._reported_at >= PROGRESS_INTERVAL_S or 0 < total <= done:
            self._reported_at = now
            self._channel.send(messages.ProgressReport(stage, done, total))


def leave_out_what_stays() -> None:
    """Search the objects that live as long as the engine for garbage no longer.

    There are hundreds of thousands of them, and a search would delay every stream.
    """
    gc.collect()
    look_seldom()


def main() -> NoReturn:
    """Run the engine on the inherited descriptor named by the only argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    channel = FrameChannel(sock, msgspec.msgpack.Decoder(ToEngine), MAX_ENGINE_FRAME_BYTES)
    exit_code = EXIT_FAILED
    with contextlib.closing(channel):
        try:
            exit_code = EngineProcess(channel, leave_out_what_stays).run()
        except Exception:
            logger.exception("the engine failed")
    # At once: no thread may keep a failed engine alive, as the server sees its end by the closed
    # channel; and the interpreter would need a second to take apart what torch has loaded.
    sys.stderr.flush()
    os._exit(exit_code)
