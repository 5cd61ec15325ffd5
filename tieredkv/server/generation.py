"""The answers to one HTTP request while they are made: engine outputs in, pieces of text out.

It knows stop strings and usage, neither HTTP nor JSON.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from tieredkv.engine.detokenizer import Detokenizer
from tieredkv.engine.messages import EngineRequest, RequestUsage, TokenLogprob, TokenOutput
from tieredkv.server.engine_client import EngineClient, OutputQueue, error_of

CANCELLED = TokenOutput(request_id="", finish_reason="cancelled")


class ClientGoneError(Exception):
    """The client closed its connection; nobody waits for the answer."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step added to one answer."""

    index: int
    text: str
    logprobs: list[TokenLogprob] | None
    finish_reason: str | None


class _Answer:
    """One request to the engine and its text."""

    def __init__(
        self, index: int, request: EngineRequest, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        params = request.params
        self.index = index
        self.request = request
        self.detokenizer = Detokenizer(tokenizer, stop=params.stop, min_tokens=params.min_tokens)
        self.num_tokens = 0
        self.usage: RequestUsage | None = None

    def take(self, output: TokenOutput) -> Piece:
        self.num_tokens += len(output.token_ids)
        self.usage = output.usage or self.usage
        text, finish_reason = self.detokenizer.take(output.token_ids, output.finish_reason)
        return Piece(self.index, text, output.logprobs, finish_reason)


class Generation:
    """All answers to one HTTP request; `close` releases whatever has not ended.

    Args:
        requests: answer `i * num_choices + j` is the j-th of the i-th prompt.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: PreTrainedTokenizerBase,
        requests: Sequence[EngineRequest],
        num_choices: int,
    ) -> None:
        self._engine = engine
        self._queue: OutputQueue = asyncio.Queue()
        self._answers = [_Answer(i, request, tokenizer) for i, request in enumerate(requests)]
        self._firsts = self._answers[::num_choices]
        self._unfinished = {answer.request.request_id: answer for answer in self._answers}
        for request in requests:
            engine.submit(request, self._queue)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield pieces of all answers as they come, until all have ended.

        Raises:
            RequestError: the engine refused one of them, or it is shutting down or dead.
            ClientGoneError: `cancel` was called.
        """
        while self._unfinished:
            output = await self._queue.get()
            if output is CANCELLED:
                raise ClientGoneError
            answer = self._unfinished.get(output.request_id)
            if answer is None:  # what was under way when a stop string ended it
                continue
            if output.finish_reason in ("error", "abort"):
                del self._unfinished[output.request_id]
                raise error_of(output)
            piece = answer.take(output)
            if piece.finish_reason is not None:
                del self._unfinished[output.request_id]
                if output.finish_reason is None:
                    self._engine.abort(output.request_id)
            yield piece

    def cancel(self) -> None:
        """End `pieces` with `ClientGoneError` and give back what the engine holds."""
        self.close()
        self._queue.put_nowait(CANCELLED)

    def close(self) -> None:
        """Abort the answers that have not ended; twice is fine."""
        for request_id in self._unfinished:
            self._engine.abort(request_id)

    @property
    def prompt_usages(self) -> list[RequestUsage]:
        """Where each prompt's tokens came from, as its first answer found them."""
        return [
            answer.usage or RequestUsage(prompt_tokens=len(answer.request.prompt_token_ids))
            for answer in self._firsts
        ]

    @property
    def num_completion_tokens(self) -> int:
        """Tokens made so far, of all answers."""
        return sum(answer.num_tokens for answer in self._answers)
