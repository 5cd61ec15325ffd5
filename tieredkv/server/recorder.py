"""Writes a trace of the requests that a server answers, which `replay` and `size` read.

The file holds when requests came, how long they were, their retention, and hashes of their blocks;
no token, no text and no name of a tenant. The hashes are chained from the request's namespace under
a key that is drawn at random and is only in this process's memory. So equal hashes of one recording
are blocks that the server could share. Nobody can look for a prompt in it that they know, and two
recordings have no hash in common.

The event loop hands over requests that have ended. A thread hashes their blocks and writes them.
"""

import contextlib
import hashlib
import logging
import os
import secrets
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import msgspec

from tieredkv.clock import Clock
from tieredkv.config import Settings
from tieredkv.engine.answer import Answer
from tieredkv.engine.chains import max_cached_blocks, namespace_of
from tieredkv.engine.engine_messages import EngineRequest
from tieredkv.errors import ConfigError
from tieredkv.hashing import chain_hashes
from tieredkv.traces import Request
from tieredkv.types import BlockHash

logger = logging.getLogger(__name__)

MAX_WAITING_TOKENS = 4 << 20
"""Requests are dropped while requests with more tokens wait to be written."""

CLOSE_S = 10.0
"""How long a stop waits until what waits is written."""

YIELD_TOKENS = 4096
"""The thread sleeps after hashing so many tokens, so that the event loop never waits for long."""

YIELD_S = 0.0005


class _Ended(NamedTuple):
    """A request that has ended, with the tokens of its answer."""

    timestamp_ms: int
    request: EngineRequest
    token_ids: list[int]
    block_size: int

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.token_ids)


class Recorder:
    """Writes one line for each request; `add` and `close` are for the event loop's thread.

    Args:
        path: of a new file, which only its owner may read.
        settings: what isolates requests, and the retention policies.

    Attributes:
        num_recorded: how many requests are written.
        num_failed: how many could not be written.

    Raises:
        ConfigError: the file exists, or cannot be made.
    """

    def __init__(self, path: Path, settings: Settings) -> None:
        self._path, self._settings = path, settings
        self._policies = settings.retention_policies()
        self._clock = Clock(settings.clock_offset_file)
        self._key = secrets.token_bytes(hashlib.blake2b.MAX_KEY_SIZE)
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        except FileExistsError:
            hint = "hint: give the name of a new file; each recording has a key of its own"
            raise ConfigError(f"`--record`: `{path}` exists already\n{hint}") from None
        except OSError as error:
            what = f"`--record`: `{path}` cannot be made: {error.strerror}"
            raise ConfigError(
                f"{what}\nhint: give the name of a new file in an existing folder"
            ) from None
        self._queue = SimpleQueue[_Ended | None]()
        # Only the event loop's thread changes these,
        self._num_added = self._num_dropped = self._added_tokens = 0
        self._is_closed = False
        # and only the recorder's thread these.
        self.num_recorded = self.num_failed = self._done_tokens = 0
        self._num_bytes = 0  # of whole lines
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def add(self, answer: Answer, arrived_at: float, block_size: int) -> None:
        """Have a request written, or drop it if too many wait.

        Args:
            answer: the request with its answer, which has ended.
            arrived_at: when the request arrived, by `perf_counter`.
            block_size: tokens a block, of the engine that answered.
        """
        came = self._clock.now() - (time.perf_counter() - arrived_at)
        ended = _Ended(round(1000 * came), answer.request, answer.token_ids, block_size)
        self._num_added += 1
        if self._added_tokens - self._done_tokens > MAX_WAITING_TOKENS:
            if not self._num_dropped:
                text = "`%s` is written too slowly, so that requests are left out of it"
                logger.warning(text, self._path)
            self._num_dropped += 1
            return
        self._added_tokens += ended.num_tokens
        self._queue.put(ended)

    def close(self) -> None:
        """Write what waits, for a moment, and say what the file has; an empty file is removed."""
        if self._is_closed:
            return
        self._is_closed = True
        self._queue.put(None)
        self._thread.join(CLOSE_S)
        if not self._num_added:
            return
        num_lost = self._num_added - self.num_recorded
        log = logger.warning if num_lost else logger.info
        log("`%s` has %d requests; %d are not in it", self._path, self.num_recorded, num_lost)

    # The recorder's thread

    def _run(self) -> None:
        try:
            while (ended := self._queue.get()) is not None:
                self._record(ended)
                self._done_tokens += ended.num_tokens
        except Exception:
            logger.exception("requests are no longer recorded")
        finally:
            os.close(self._file)
        if not self._num_bytes:
            with contextlib.suppress(OSError):
                os.unlink(self._path)

    def _record(self, ended: _Ended) -> None:
        line = msgspec.json.encode(self._line(ended)) + b"\n"
        try:
            self._write(line)
            self.num_recorded += 1
        except OSError as error:
            if not self.num_failed:
                text = "`%s` cannot be written, so that requests are left out of it: %s"
                logger.warning(text, self._path, error.strerror)
            self.num_failed += 1

    def _line(self, ended: _Ended) -> Request:
        asked, size = ended.request, ended.block_size
        prompt = asked.prompt_token_ids
        tokens = prompt + ended.token_ids[:-1]  # the keys of the last one are not computed
        tokens = tokens[: max_cached_blocks(asked, size) * size]
        namespace = namespace_of(asked, self._settings)
        parent = BlockHash(hashlib.blake2b(namespace, key=self._key, digest_size=32).digest())
        hashes = list[BlockHash]()
        stride = YIELD_TOKENS // size * size
        for first in range(0, len(tokens), stride):
            hashes += chain_hashes(parent, tokens[first : first + stride], size)
            parent = hashes[-1] if hashes else parent
            time.sleep(YIELD_S)
        # An id is a part of its hash, so that it does not tell the key of the next one.
        ids = [int.from_bytes(each[:8], "little") >> 1 for each in hashes]
        claims = {self._policies.get(it.retention, is_any=True).name for it in asked.claims}
        rest = asked.retention or self._settings.default_retention
        claims.add(self._policies.get(rest, is_any=True).name)
        return Request(
            timestamp=ended.timestamp_ms,
            input_length=len(prompt),
            output_length=len(ended.token_ids),
            hash_ids=ids[: len(prompt) // size],
            answer_hash_ids=ids[len(prompt) // size :],
            block_tokens=size,
            retention=self._policies.longest(claims),
        )

    def _write(self, line: bytes) -> None:
        """Write a line, or nothing of it."""
        try:
            num_written = 0
            while num_written < len(line):
                num_written += os.write(self._file, line[num_written:])
        except OSError:
            os.ftruncate(self._file, self._num_bytes)
            raise
        self._num_bytes += len(line)
