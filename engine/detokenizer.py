"""Turns a request's tokens into text as they come, and finds its stop strings.

Bytes of an unfinished character are held back, and so is text that may be the beginning of a stop
string. Used by whoever makes text: the server, or `LLM` in the user's process. It knows neither
models nor logits.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"
_MAX_HELD_CHARS = 4
_MAX_WINDOW_TOKENS = 64
_NUM_CONTEXT_TOKENS = 4


class Detokenizer:
    """Text of one request; not shared between threads.

    The results of `feed` and `finish`, joined, are the text of all tokens up to a stop string.

    Args:
        tokenizer: gives the tokens their text.
        stop: the stop strings.
        min_tokens: stop strings count only from this number of tokens on.
        left_out: ids of the tokens that are no part of the text; by default all special ones.
        before: ids of the tokens whose text this text continues, if it begins none of its own. They
            decide whether it begins with a space.

    Attributes:
        text: everything given out so far.
        stopped_by: the stop string that ended the text, or None.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        left_out: Collection[int] | None = None,
        before: Sequence[int] = (),
    ) -> None:
        self.text = ""
        self.stopped_by: str | None = None
        self._decode = _decoder(tokenizer, skip_special_tokens=left_out is None)
        self._left_out = left_out or ()
        self._decode_all = _decoder(tokenizer, skip_special_tokens=False)
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        # The tokens that are decoded again with each new one.
        self._window = [id for id in before if id not in self._left_out][-_NUM_CONTEXT_TOKENS:]
        # Characters of the window's text that went on to `_pending`.
        self._num_given = len(self._decode(self._window)) if self._window else 0
        self._pending = ""  # decoded, held back for the stop strings

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens and return the text that is certain; "" after a stop string."""
        given = ""
        for token_id in token_ids:
            self._num_tokens += 1
            if token_id not in self._left_out:
                given += self._release(self._decode_next(token_id))
        return given

    @property
    def num_decoded(self) -> int:
        """The number of characters so far, including those held back for a stop string."""
        return len(self.text) + len(self._pending)

    def leaves_out(self, token_id: int) -> bool:
        """Return whether a token is special, so that the text does not show it."""
        if token_id in self._left_out:
            return True
        return not self._decode([token_id]) and bool(self._decode_all([token_id]))

    def finish(self) -> str:
        """End the text and return the held-back rest; an unfinished character becomes U+FFFD."""
        return self._release(self._decode(self._window)[self._num_given :], is_end=True)

    def _decode_next(self, token_id: int) -> str:
        """Decode one more token over a window of tokens, and move the window when nothing is held.

        A character whose bytes are not all there decodes to U+FFFD at the end of the text, one or
        one for each byte; it is held until a later token shows what it is.
        """
        self._window.append(token_id)
        text = self._decode(self._window)
        stable = text.rstrip(_REPLACEMENT)
        num_stable = max(len(stable), len(text) - _MAX_HELD_CHARS)
        new = text[self._num_given : num_stable]
        self._num_given = max(self._num_given, num_stable)
        if num_stable == len(text) or len(self._window) > _MAX_WINDOW_TOKENS:
            held = len(text) - num_stable
            # Some tokens stay as context: the first of a text may decode without its space.
            self._window = self._window[-max(_NUM_CONTEXT_TOKENS, 2 * held) :]
            self._num_given = len(self._decode(self._window)) - held
        return new

    def _release(self, new: str, *, is_end: bool = False) -> str:
        """Return text up to a stop string or, before the end, up to the possible start of one."""
        if self.stopped_by is not None:
            return ""
        pending = self._pending + new
        cut = len(pending)
        # A stop string may not lie in text from before `min_tokens`.
        if self._stop and self._num_tokens >= self._min_tokens:
            found = [(at, text) for text in self._stop if (at := pending.find(text)) >= 0]
            if found:
                # The stop string that ends first counts, however the text is cut into tokens.
                cut, self.stopped_by = min(found, key=lambda it: (it[0] + len(it[1]), it[0]))
            elif not is_end:
                cut -= max(_overlap(pending, text) for text in self._stop)
        self._pending = pending[cut:]
        self.text += pending[:cut]
        return pending[:cut]


def _overlap(text: str, stop: str) -> int:
    """Count the characters at the end of `text` that are the beginning of the stop string."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)


def _decoder(tokenizer: PreTrainedTokenizerBase, **how: bool) -> Callable[[list[int]], str]:
    """Take the Rust decoder itself where there is one; the wrapper is ten times slower."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return lambda ids: str(backend.decode(ids, **how))
    return lambda ids: str(tokenizer.decode(ids, clean_up_tokenization_spaces=False, **how))
