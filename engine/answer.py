"""The answer to one request while it is made: engine outputs in, tokens and text out.

Used by whoever makes text: the server, or `LLM` in the user's process.
"""

import time
from collections import deque
from collections.abc import Collection

from transformers import PreTrainedTokenizerBase

from tieredkv.engine.detokenizer import Detokenizer
from tieredkv.engine.engine_messages import EngineRequest, RequestUsage, TokenLogprob, TokenOutput

MAX_TOKENS_BEFORE = 16
"""How many tokens of a prompt an answer looks at that continues its text."""


class Answer(Detokenizer):
    """One request's answer so far, with the text that can no longer change.

    Args:
        request: the request.
        tokenizer: gives the tokens their text.
        left_out: ids of the tokens that are no part of the text; by default all special ones.
        continues_text: whether the answer goes on with the text of its prompt.

    Attributes:
        logprobs: one entry for each token of the text, as far as that is certain, where the request
            asked for them; those of the prompt's tokens come first. A token that the text leaves
            out, such as the one that ends it or those of a stop string, has no entry.
        usage: where the prompt's tokens came from; None until the engine reports it.
        ttft_s: seconds from the making of this object to the first token, 0 before it.
        finish_reason: why the text has ended; None until then.
    """

    def __init__(
        self,
        request: EngineRequest,
        tokenizer: PreTrainedTokenizerBase,
        *,
        left_out: Collection[int] | None = None,
        continues_text: bool = False,
    ) -> None:
        params = request.params
        super().__init__(
            tokenizer,
            stop=params.stop,
            min_tokens=params.min_tokens,
            left_out=left_out,
            before=request.prompt_token_ids[-MAX_TOKENS_BEFORE:] if continues_text else (),
        )
        self.request = request
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self._held_logprobs: deque[tuple[int, TokenLogprob]] = deque()  # and the offset of its text
        self.usage = RequestUsage(prompt_tokens=len(request.prompt_token_ids))
        self.ttft_s = 0.0
        self.finish_reason: str | None = None
        self._made_at = time.perf_counter()

    def take(self, output: TokenOutput) -> str:
        """Take in one step's output, none after the end; return the text that is certain now."""
        if output.token_ids and not self.token_ids:
            self.ttft_s = time.perf_counter() - self._made_at
        self.token_ids += output.token_ids
        self.usage = output.usage or self.usage
        if output.logprobs is None:
            text = self.feed(output.token_ids)
        else:
            text = self._feed_scored(output.token_ids, output.logprobs)
        if output.finish_reason is not None:
            text += self.finish()
        while self._held_logprobs and self._held_logprobs[0][0] < len(self.text):
            self.logprobs.append(self._held_logprobs.popleft()[1])
        self.finish_reason = output.finish_reason if self.stopped_by is None else "stop"
        return text

    def _feed_scored(self, token_ids: list[int], logprobs: list[TokenLogprob]) -> str:
        """Feed tokens one by one, and hold each entry back until the text of its token is given."""
        num_of_prompt = len(logprobs) - len(token_ids)
        self.logprobs += logprobs[:num_of_prompt]
        text = ""
        for token_id, logprob in zip(token_ids, logprobs[num_of_prompt:], strict=True):
            if not self.leaves_out(token_id):
                self._held_logprobs.append((self.num_decoded, logprob))
            text += self.feed([token_id])
        return text
