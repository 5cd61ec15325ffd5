"""Texts and messages to token ids, and single token ids to text, off the event loop.

It knows the tokenizer and its chat template, no HTTP.
"""

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import jinja2
from transformers import PreTrainedTokenizerBase

from tieredkv.errors import RequestError

NUM_THREADS = 4
CACHED_TOKEN_TEXTS = 65_536

Prompt = str | list[int]
Mark = tuple[int, int]
"""The end of a part of a message, by their indexes."""

Messages = Sequence[Mapping[str, Any]]
"""What chat templates know, but for `content`, which may be a list of texts: its parts."""

Result = TypeVar("Result")


class Encoded(NamedTuple):
    """The token ids of a conversation, and how many of them lie before each mark."""

    token_ids: list[int]
    ends: list[int]


class Tokenization:
    """One checkpoint's tokenizer, used by the event loop and its threads.

    `encode` of a fast tokenizer leaves the interpreter lock to others, so a long prompt does not
    hold up the streams of other requests.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenize")
        self.token_text = functools.lru_cache(CACHED_TOKEN_TEXTS)(self._decode_one)

    async def encode_prompts(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the token ids of prompts; those that are token ids stay as they are."""
        return await self._in_thread(lambda: [self._encode(prompt) for prompt in prompts])

    async def encode_chat(
        self, messages: Messages, arguments: Mapping[str, Any], marks: Sequence[Mark] = ()
    ) -> Encoded:
        """Return the token ids of a conversation, up to where the assistant's answer begins.

        Raises:
            RequestError: there is no chat template, or it refuses these messages.
        """
        if not self.tokenizer.chat_template:
            why = "This model has no chat template, so it cannot answer chat requests."
            text = f"{why} Use /v1/completions instead."
            raise RequestError(text, param="messages", code="chat_template_missing")
        return await self._in_thread(lambda: self._encode_chat(messages, arguments, marks))

    async def decode(self, prompt: Prompt) -> str:
        """Return the text of a prompt, which may have come as token ids."""
        if isinstance(prompt, str):
            return prompt
        return await self._in_thread(lambda: str(self.tokenizer.decode(prompt)))

    def close(self) -> None:
        """End the threads; what they are doing is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        # Not a warning's matter: what does not fit the context is refused by the caller.
        return list(self.tokenizer.encode(prompt, verbose=False))

    def _encode_chat(
        self, messages: Messages, arguments: Mapping[str, Any], marks: Sequence[Mark]
    ) -> Encoded:
        heads = {**arguments, "add_generation_prompt": False}
        ends = [len(self._render(messages[: mark[0] + 1], heads)) for mark in marks]
        return Encoded(self._render(messages, arguments), ends)

    def _render(self, messages: Messages, arguments: Mapping[str, Any]) -> list[int]:
        told = {"add_generation_prompt": True, **arguments, "tokenize": False}
        joined: Any = [
            {**each, "content": "\n".join(each["content"])}
            if isinstance(each["content"], list)
            else each
            for each in messages
        ]
        try:
            text = self.tokenizer.apply_chat_template(joined, **told)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, RecursionError) as error:
            why = "cannot render these messages."
            if isinstance(error, jinja2.TemplateError):
                why = f"refuses these messages: {error.message or type(error).__name__}"
            what = f"The model's chat template {why}"
            raise RequestError(what, param="messages", code="invalid_value") from None
        # The template has written the special tokens, the first one included.
        return list(self.tokenizer.encode(str(text), add_special_tokens=False, verbose=False))

    def _decode_one(self, token_id: int) -> str:
        return str(self.tokenizer.decode([token_id]))
