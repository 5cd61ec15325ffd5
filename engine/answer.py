"""The answer to one request while it is made: engine outputs in, tokens and text out.

Used by whoever makes text: the server, or `LLM` in the user's process.
"""

import time

from transformers import PreTrainedTokenizerBase

from tieredkv.engine.detokenizer import Detokenizer
from tieredkv.engine.messages import EngineRequest, RequestUsage, TokenLogprob, TokenOutput


class Answer:
    """What a request has become so far.

    Attributes:
        logprobs: one entry a token where the request asked for them, the prompt's first.
        usage: where the prompt's tokens came from, once the engine has told.
        ttft_s: seconds from the making of this object to the first token, 0 before it.
        finish_reason: why the text has ended, None while it goes on.
    """

    def __init__(self, request: EngineRequest, tokenizer: PreTrainedTokenizerBase) -> None:
        params = request.params
        self.request = request
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.usage = RequestUsage(prompt_tokens=len(request.prompt_token_ids))
        self.ttft_s = 0.0
        self.finish_reason: str | None = None
        self._detokenizer = Detokenizer(tokenizer, stop=params.stop, min_tokens=params.min_tokens)
        self._made_at = time.perf_counter()

    @property
    def text(self) -> str:
        """The text that is certain."""
        return self._detokenizer.text

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text."""
        return self._detokenizer.stopped_by

    def take(self, output: TokenOutput) -> str:
        """Take in one step's output, none after the end; return the text that is certain now."""
        if output.token_ids and not self.token_ids:
            self.ttft_s = time.perf_counter() - self._made_at
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or ()
        self.usage = output.usage or self.usage
        text = self._detokenizer.feed(output.token_ids)
        if output.finish_reason is not None:
            text += self._detokenizer.finish()
        has_stopped = self._detokenizer.stopped_by is not None
        self.finish_reason = "stop" if has_stopped else output.finish_reason
        return text
