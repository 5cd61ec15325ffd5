"""The answers to one HTTP request while they are made: engine outputs in, pieces of text out.

It knows stop strings and usage, neither HTTP nor JSON.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from tieredkv.engine.answer import Answer
from tieredkv.engine.messages import EngineRequest, TokenLogprob, TokenOutput
from tieredkv.server.engine_client import EngineClient, error_of
from tieredkv.server.metrics import Observer


class ClientGoneError(Exception):
    """The client closed its connection; nobody waits for the answer."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step added to one answer."""

    index: int
    text: str
    logprobs: list[TokenLogprob] | None
    finish_reason: str | None


class Generation:
    """All answers to one HTTP request; `close` releases whatever has not ended.

    Attributes:
        answers: in the order of the requests, as far as they are made.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: PreTrainedTokenizerBase,
        requests: Sequence[EngineRequest],
        observer: Observer,
    ) -> None:
        self._engine, self._observer = engine, observer
        self._pieces: deque[Piece] = deque()
        self._error: Exception | None = None  # told behind the pieces before it; none come after
        self._has_news = asyncio.Event()
        self.answers = [Answer(request, tokenizer) for request in requests]
        self._unfinished = {request.request_id: i for i, request in enumerate(requests)}
        for request in requests:
            engine.submit(request, self._take)

    async def has_next(self, timeout_s: float | None = None) -> bool:
        """Wait for the next piece; whether it is there in time.

        Raises:
            RequestError: the engine refused an answer, or it is shutting down or dead.
            ClientGoneError: `cancel` was called.
        """
        if not (self._pieces or self._error):
            self._has_news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._has_news.wait()
        if self._error is not None and not self._pieces:
            raise self._error
        return bool(self._pieces)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield pieces of all answers as they come, until all have ended; raise as `has_next`."""
        while self._unfinished or self._pieces or self._error:
            await self.has_next()
            yield self._pieces.popleft()

    def cancel(self) -> None:
        """End `pieces` with `ClientGoneError` and give back what the engine holds."""
        self.close()
        for index in self._unfinished.values():
            self._observer.on_end(self.answers[index], "cancelled")
        self._fail(ClientGoneError())

    def close(self) -> None:
        """Abort the answers that have not ended; twice is fine."""
        for request_id in self._unfinished:
            self._engine.abort(request_id)

    def _take(self, output: TokenOutput) -> None:
        """Take in an output when it comes: a slow reader is not the engine's time."""
        self._observer.on_output(output)
        index = self._unfinished.get(output.request_id)
        if index is None:  # what was under way when a stop string ended it
            return
        if output.finish_reason in ("error", "abort"):
            self._end(index, output.finish_reason)
            self._fail(error_of(output))
            return
        answer = self.answers[index]
        text = answer.take(output)
        if answer.finish_reason is not None:
            self._end(index, answer.finish_reason)
            if output.finish_reason is None:
                self._engine.abort(output.request_id)
        if self._error is None:
            self._pieces.append(Piece(index, text, output.logprobs, answer.finish_reason))
            self._has_news.set()

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._has_news.set()

    def _end(self, index: int, reason: str) -> None:
        del self._unfinished[self.answers[index].request.request_id]
        self._observer.on_end(self.answers[index], reason)
