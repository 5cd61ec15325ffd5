"""The answer to one request while it is made: engine outputs in, tokens and text out.

Used by whoever makes text: the server, or `LLM` in the user's process.
"""

import time

from transformers import PreTrainedTokenizerBase

from tieredkv.engine.detokenizer import Detokenizer
from tieredkv.engine.engine_messages import EngineRequest, RequestUsage, TokenLogprob, TokenOutput


class Answer(Detokenizer):
    """What a request has become so far; its text as far as that is certain.

    Attributes:
        logprobs: one entry a token where the request asked for them, the prompt's first.
        usage: where the prompt's tokens came from, once the engine has told.
        ttft_s: seconds from the making of this object to the first token, 0 before it.
        finish_reason: why the text has ended, None while it goes on.
    """

    def __init__(self, request: EngineRequest, tokenizer: PreTrainedTokenizerBase) -> None:
        params = request.params
        super().__init__(tokenizer, stop=params.stop, min_tokens=params.min_tokens)
        self.request = request
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.usage = RequestUsage(prompt_tokens=len(request.prompt_token_ids))
        self.ttft_s = 0.0
        self.finish_reason: str | None = None
        self._made_at = time.perf_counter()

    def take(self, output: TokenOutput) -> str:
        """Take in one step's output, none after the end; return the text that is certain now."""
        if output.token_ids and not self.token_ids:
            self.ttft_s = time.perf_counter() - self._made_at
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or ()
        self.usage = output.usage or self.usage
        text = self.feed(output.token_ids)
        if output.finish_reason is not None:
            text += self.finish()
        self.finish_reason = output.finish_reason if self.stopped_by is None else "stop"
        return text
