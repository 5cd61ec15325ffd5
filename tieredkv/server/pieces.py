"""Rendered conversations to token ids, piece by piece: what was encoded before is looked up.

A text is cut before its special tokens. A tokenizer looks for these before all else and works on
what lies between two of them by itself, so that the ids of the pieces, joined, are the text's.
"""

import functools
import itertools
import re
import threading
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

MAX_NAMESPACES = 128
MAX_CHARACTERS = 1 << 20
PIECE_CHARACTERS = 256
"""What a piece counts for beside its text, as many short ones take memory, too."""

Kept = dict[str, "array[int]"]


class PieceEncoder:
    """One tokenizer's encoder of texts in which special tokens are spelled out.

    Namespaces share nothing, so that the time tells none of them what another one has asked; each
    keeps the pieces that it used last. Several threads may call `encode`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._lock = threading.Lock()  # for what is kept
        self._kept_of = functools.lru_cache(MAX_NAMESPACES)(lambda _namespace: Kept())
        added: Any = ()
        if self._backend is not None:
            added = self._backend.get_added_tokens_decoder().values()
            self._backend.no_truncation()  # which a checkpoint may have left on
            self._backend.no_padding()
        raw = [token for token in added if token.content and not token.normalized]
        # Longest first, as tokenizers match. What takes in or looks at its left is no place to cut.
        names = sorted((re.escape(token.content) for token in raw), key=len, reverse=True)
        self._raw = re.compile("|".join(names) or "(?!)")
        self._cuts = {
            token.content
            for token in raw
            if token.special
            and not (token.lstrip or token.single_word)
            and not re.match(r"[\w\s]", token.content)
        }

    def encode(
        self, text: str, places: Sequence[int] = (), namespace: object = ""
    ) -> tuple[list[int], list[int]]:
        """Return the token ids of a text, and how many of them end at each place at the latest."""
        if self._backend is None:
            how: dict[str, Any] = {"add_special_tokens": False, "verbose": False}
            encode = functools.partial(self._tokenizer.encode, **how)
            return list(encode(text)), [len(encode(text[:place])) for place in places]
        cuts = [match.start() for match in self._raw.finditer(text) if match[0] in self._cuts]
        starts = [0, *cuts, len(text)]
        head, *others = [text[a:b] for a, b in itertools.pairwise(starts)]
        kept = self._kept_of(namespace)
        with self._lock:
            known = {text: kept[text] for text in others if text in kept}
        new = [head, *dict.fromkeys(text for text in others if text not in known)]
        encodings = self._backend.encode_batch_fast(new, add_special_tokens=False)
        first, *made = [array("I", encoding.ids) for encoding in encodings]
        known |= zip(new[1:], made, strict=True)
        self._keep(known, kept)
        parts = [first, *(known[text] for text in others)]
        counts = list(itertools.accumulate(map(len, parts), initial=0))

        @functools.cache
        def stops(index: int) -> list[int]:
            piece = text[starts[index] : starts[index + 1]]
            encoding = self._backend.encode(piece, add_special_tokens=False)
            return [stop for _, stop in encoding.offsets]

        ends = []
        for place in places:
            index = bisect_right(starts, place) - 1
            within = place - starts[index]
            ends.append(counts[index] + (bisect_right(stops(index), within) if within else 0))
        return list(itertools.chain.from_iterable(parts)), ends

    def _keep(self, used: Kept, kept: Kept) -> None:
        """Keep pieces as those used last, in place of those used longest ago."""
        with self._lock:
            for text in used:
                kept.pop(text, None)
            kept |= used
            size = sum(map(len, kept)) + PIECE_CHARACTERS * len(kept)
            while size > MAX_CHARACTERS:
                oldest = next(iter(kept))
                size -= len(oldest) + PIECE_CHARACTERS
                del kept[oldest]
