"""Turn the engine's outputs for one HTTP request into pieces of text.

This module handles stop strings and usage, but neither HTTP nor JSON.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from tieredkv.engine.engine_messages import EngineRequest, TokenLogprob, TokenOutput
from tieredkv.errors import RequestError
from tieredkv.server.engine_client import EngineClient, error_of
from tieredkv.server.message_parser import Delta
from tieredkv.server.metrics import Observer
from tieredkv.server.reply import Reading, Reply

logger = logging.getLogger(__name__)


class ClientGoneError(Exception):
    """The client closed its connection, so that the answer is no longer needed."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one engine step added to one answer.

    Attributes:
        index: the index of the answer.
        num_tokens: how many tokens the answer has so far, with this piece.
        text: the text that was added, as the model wrote it.
        deltas: what was added to the message.
    """

    index: int
    num_tokens: int
    text: str
    deltas: list[Delta]
    logprobs: list[TokenLogprob] | None
    finish_reason: str | None


class Generation:
    """All answers to one HTTP request; `close` aborts those that have not ended.

    Attributes:
        answers: the answers so far, in the order of the engine requests.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: PreTrainedTokenizerBase,
        requests: Sequence[EngineRequest],
        observer: Observer,
        reading: Reading | None = None,
        *,
        continues_text: bool = False,
    ) -> None:
        self._engine = engine
        self._observer = observer
        self._queue: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        self._first: Piece | Exception | None = None
        self._has_begun = asyncio.Event()
        self.answers = [
            Reply(request, tokenizer, reading, continues_text=continues_text)
            for request in requests
        ]
        self._unfinished = {request.request_id: i for i, request in enumerate(requests)}
        for request in requests:
            engine.submit(request, self._take)

    async def has_begun(self, timeout_s: float | None) -> bool:
        """Wait for the first piece and return whether it came in time.

        Raises:
            RequestError, ClientGoneError: as `pieces` does, if the error came before any piece.
        """
        if not self._has_begun.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._has_begun.wait()
        if isinstance(self._first, Exception):
            raise self._first
        return self._first is not None

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield pieces of all answers as they come, until all have ended.

        Raises:
            RequestError: the engine refused an answer, is shutting down or has died.
            ClientGoneError: `cancel` was called.
        """
        while self._unfinished or not self._queue.empty():
            piece = await self._queue.get()
            if isinstance(piece, Exception):
                raise piece
            yield piece

    def cancel(self) -> None:
        """Abort the answers and end `pieces` with `ClientGoneError`."""
        self.close()
        for index in self._unfinished.values():
            self._observer.on_end(self.answers[index], "cancelled")
        self._put(ClientGoneError())

    def close(self) -> None:
        """Abort the answers that have not ended; a second call is harmless."""
        for request_id in self._unfinished:
            self._engine.abort(request_id)

    def _take(self, output: TokenOutput) -> None:
        """Take an output as soon as it comes, so that a slow reader does not hold up the engine."""
        self._observer.on_output(output)
        index = self._unfinished.get(output.request_id)
        if index is None:  # This output was sent before the answer was ended.
            return
        if output.finish_reason in ("error", "abort"):
            self._end(index, output.finish_reason)
            self._put(error_of(output))
            return
        answer = self.answers[index]
        num_before = len(answer.logprobs)
        try:
            text, deltas = answer.read(output)
        except Exception:  # a fault here must not reach other answers of the same step
            logger.exception("an answer could not be read")
            self._end(index, "error")
            self._engine.abort(output.request_id)
            self._put(RequestError("The answer could not be read.", status=500))
            return
        if answer.finish_reason is not None:
            self._end(index, answer.finish_reason)
            if output.finish_reason is None:
                self._engine.abort(output.request_id)
        logprobs = answer.logprobs[num_before:] or None
        num_tokens = len(answer.token_ids)
        self._put(Piece(index, num_tokens, text, deltas, logprobs, answer.finish_reason))

    def _put(self, piece: Piece | Exception) -> None:
        self._first = self._first or piece
        self._has_begun.set()
        self._queue.put_nowait(piece)

    def _end(self, index: int, reason: str) -> None:
        del self._unfinished[self.answers[index].request.request_id]
        self._observer.on_end(self.answers[index], reason)
