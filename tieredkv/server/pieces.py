"""Encode rendered conversations piece by piece, and look up pieces that were encoded before.

A text is cut before each added token, such as `<|im_end|>`, be it special or not. A tokenizer finds
added tokens first and encodes the text between two of them separately, so the joined ids of the
pieces are those of the whole text. A long piece is cut again between words or lines, but only where
the cut does not change the ids around it. Encoding therefore takes short steps and can be stopped
between them.
"""

import functools
import itertools
import json
import re
import secrets
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerBase

from tieredkv.server.encoding import EncodedPiece, Encoding
from tieredkv.server.threads import Cancellation

MAX_NAMESPACES = 128
MAX_CHARACTERS = 1 << 20
"""The limit on what is kept for one namespace."""

MAX_CHARACTERS_IN_ALL = 8 << 20
PIECE_CHARACTERS = 256
"""Added to the length of each kept piece, because many short pieces take memory, too."""

CHUNK_CHARACTERS = 16 << 10
BATCH_CHARACTERS = 128 << 10
"""How much text is encoded in one call; the work can be stopped between two calls."""

WINDOW_CHARACTERS = 128
"""How much text on each side of a cut is encoded to see whether the cut changes the ids."""

MAX_TRIES = 8
SCAN_CHARACTERS = 1 << 18

Kept = dict[str, "array[int]"]

_WORD_END = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])")
_LINE_END = re.compile(r"(?<=\S\n)(?=\S)")
_SPANS_WORDS = re.compile("[A-Za-z][ \u0120\u2581][A-Za-z]")
_SPANS_LINES = re.compile("[\n\u010a][^\\s\u010a\u0120\u0109\u010d\u2581]")
"""Match tokens that reach across the end of a word or line, with the characters that vocabularies
use for white space. If the vocabulary has such a token, texts are not cut at these ends."""


class TooLongError(Exception):
    """The text has more tokens than the limit; how many more is not known."""


class Trie:
    """Finds any of several texts in a longer text, in a single pass.

    If several texts match at one place, the longest is found. A plain alternation would be slower:
    at each place it would try all texts one by one.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        known = {text for text in texts if text}
        self._longest = max(map(len, known), default=0)
        self._pattern = re.compile(_trie_pattern(sorted(known)) if known else "(?!)")

    def find(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield the start and end of each match, from left to right and without overlaps.

        A long text is searched in steps, so that other threads can go on between them.
        """
        if not self._longest:
            return
        begin = 0
        while begin < len(text):
            stop = begin + SCAN_CHARACTERS
            for match in self._pattern.finditer(text, begin, stop + self._longest):
                if match.start() >= stop:
                    break
                yield match.span()
                begin = match.end()
            begin = max(begin, stop)


def _trie_pattern(texts: Sequence[str]) -> str:
    """Return a regular expression that matches the longest of the sorted texts."""
    head = re.escape(_common_start(texts[0], texts[-1]))
    size = len(_common_start(texts[0], texts[-1]))
    rests = [text[size:] for text in texts]
    is_end = rests[0] == ""
    groups = itertools.groupby(filter(None, rests), key=lambda rest: rest[0])
    inner = [_trie_pattern([*group]) for _, group in groups]
    if not inner:
        return head
    return f"{head}(?:{'|'.join(inner)}){'?' if is_end else ''}"


def _common_start(one: str, other: str) -> str:
    both = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return "".join(each for each, _ in both)


class Chunk(NamedTuple):
    """A part of a piece that is encoded separately: its start in the piece, and its text."""

    start: int
    text: str


class _Backend:
    """A tokenizer of the `tokenizers` library, with a method to cut texts into chunks."""

    def __init__(
        self, backend: Any, cuts: Sequence[tuple[Any, Sequence[int]]] | None = None
    ) -> None:
        self._backend = backend
        if cuts is not None:
            self.cuts = cuts
            return
        names = "\0".join(backend.get_vocab(with_added_tokens=False))
        self.cuts = [
            (ends, drops)
            for ends, spans, drops in (
                (_LINE_END, _SPANS_LINES, (0,)),
                (_WORD_END, _SPANS_WORDS, (0, 1)),
            )
            if not spans.search(names)
        ]

    def ids(self, texts: Sequence[str]) -> list["array[int]"]:
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [array("I", encoding.ids) for encoding in encodings]

    def stops(self, text: str) -> list[int]:
        """Return where each token of a text ends."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        return [stop for _, stop in encoding.offsets]

    def chunks(self, text: str) -> Iterator[Chunk]:
        """Cut a piece into chunks; a text that cannot be cut without changing ids is one chunk."""
        start = 0
        while len(text) - start > CHUNK_CHARACTERS and (cut := self._cut(text, start)):
            yield Chunk(start, text[start : cut[0]])
            start = cut[1]
        yield Chunk(start, text[start:])

    def _cut(self, text: str, start: int) -> tuple[int, int] | None:
        """Return where the chunk that begins at `start` ends, and where the next one begins."""
        begin = start + CHUNK_CHARACTERS // 2
        while begin < len(text):
            stop = begin + CHUNK_CHARACTERS // 2
            for ends, drops in self.cuts:
                for match in itertools.islice(ends.finditer(text, begin, stop), MAX_TRIES):
                    end = match.start()
                    for dropped in drops:  # some tokenizers put a space before every text
                        if self._is_clean(text, end, end + dropped):
                            return end, end + dropped
            begin = stop
        return None

    def _is_clean(self, text: str, end: int, begin: int) -> bool:
        """Whether a cut at a place leaves the ids around it unchanged."""
        left = text[max(0, end - WINDOW_CHARACTERS) : end]
        right = text[begin : begin + WINDOW_CHARACTERS]
        both, one, other = self.ids([left + text[end:begin] + right, left, right])
        return both == one + other


_CONTROL = re.compile("<[|\uff5c].+[|\uff5c]>")


def is_special(token: AddedToken) -> bool:
    """Return whether a text of a client that spells a token must not become it.

    Some checkpoints, such as DeepSeek's, do not call the tokens special that begin a turn.
    """
    return bool(token.content and (token.special or _CONTROL.fullmatch(token.content)))


class PieceEncoder:
    """Encodes texts in which special tokens are spelled out, with one tokenizer.

    Each namespace keeps the pieces that it used last. Namespaces share no pieces, because the time
    that encoding takes would otherwise reveal texts of other namespaces. Several threads may call
    `encode`.

    Attributes:
        special: the spellings of special tokens, as `is_special` has them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._hf: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._lock = threading.Lock()  # for the kept pieces
        self._kept: dict[object, Kept] = {}
        self._size_of: dict[object, int] = {}
        added: Mapping[int, AddedToken] = {}
        if self._hf is not None:
            added = self._hf.get_added_tokens_decoder()
            self._hf.no_truncation()  # A checkpoint may have left it on.
            self._hf.no_padding()
            self._backend = _Backend(self._hf)
            self.special = sorted(it.content for it in added.values() if is_special(it))
        else:
            self.special = sorted(set(getattr(tokenizer, "all_special_tokens", ())))
        self._special = Trie(self.special)
        raw = [token for token in added.values() if token.content and not token.normalized]
        # Texts are not cut before tokens whose match depends on the text to their left.
        self._raw = Trie(token.content for token in raw)
        self._cuts = {
            token.content
            for token in raw
            if not (token.lstrip or token.single_word) and not re.match(r"[\w\s]", token.content)
        }

    def encode(
        self,
        text: str,
        namespace: object = "",
        *,
        guards: Sequence[int] = (),
        limit: int | None = None,
        cancellation: Cancellation | None = None,
    ) -> "Encoding":
        """Return the token ids of a text.

        Args:
            text: what to encode.
            namespace: the namespace whose pieces may be looked up.
            guards: sorted places in the text; a special token around one of them is text.
            limit: the maximum number of token ids.
            cancellation: is set once the ids are no longer wanted.

        Raises:
            TooLongError: there are more than `limit` token ids.
            CancelledWorkError: the ids are no longer wanted.
        """
        cancellation = cancellation or Cancellation()
        if self._hf is None:
            encode = functools.partial(self._encode_in_one_go, guards=guards)
            whole = EncodedPiece(text, array("I", encode(text)), guards)
            return Encoding(
                [whole], lambda _, place: len(encode(text[:place])), self.ids_of, cancellation
            )
        cuts = [
            start
            for start, end in self._raw.find(text)
            if text[start:end] in self._cuts and not _is_guarded(guards, start, end)
        ]
        spans = [*itertools.pairwise([0, *cuts, len(text)])]
        parts = self._parts(text, spans, namespace, guards, limit, cancellation)
        pieces = [
            EncodedPiece(text[start:end], ids, _inside(guards, start, end))
            for (start, end), ids in zip(spans, parts, strict=True)
        ]

        @functools.cache
        def count(index: int) -> _Counting:
            return self._counting(pieces[index].text, pieces[index].guards)

        return Encoding(
            pieces, lambda index, place: count(index).before(place), self.ids_of, cancellation
        )

    def ids_of(self, text: str) -> "array[int]":
        """Return the ids of a short text by itself."""
        [ids] = self._backend.ids([text])
        return ids

    def controls(self, text: str, guards: Sequence[int]) -> list[str]:
        """Return the special tokens in a text in their order, but for those around guards."""
        found = self._special.find(text)
        return [text[start:end] for start, end in found if not _is_guarded(guards, start, end)]

    def _parts(
        self,
        text: str,
        spans: Sequence[tuple[int, int]],
        namespace: object,
        guards: Sequence[int],
        limit: int | None,
        cancellation: Cancellation,
    ) -> list["array[int]"]:
        """Return the ids of each piece; those that are not kept are encoded in batches."""
        with self._lock:
            kept = self._kept.get(namespace, {})
        known, used, parts, num_ids = Kept(), Kept(), list["array[int]"](), 0
        for batch in _batches(spans):
            cancellation.check()
            plain = [(text[start:end], _inside(guards, start, end)) for start, end in batch]
            short = dict.fromkeys(
                piece
                for piece, guarded in plain
                if len(piece) <= CHUNK_CHARACTERS and not guarded
                if piece not in known
            )
            with self._lock:
                known |= {piece: kept[piece] for piece, _ in plain if piece in kept}
            new = [piece for piece in short if piece not in known]
            known |= zip(new, self._backend.ids(new), strict=True)
            for piece, guarded in plain:
                if guarded:
                    ids = self._encode_guarded(piece, guarded, limit, cancellation)
                elif piece in known:
                    ids = known[piece]
                else:
                    ids = known[piece] = self._encode_long(
                        self._backend, piece, limit, cancellation
                    )
                if parts and not guarded:  # The first piece does not begin with an added token.
                    used[piece] = used.pop(piece, ids)
                parts.append(ids)
                num_ids += len(ids)
            if limit is not None and num_ids > limit:
                raise TooLongError
        self._keep(namespace, used)
        return parts

    def _encode_long(
        self, backend: _Backend, piece: str, limit: int | None, cancellation: Cancellation
    ) -> "array[int]":
        ids = array("I")
        spans = ((each.start, each.start + len(each.text)) for each in backend.chunks(piece))
        for batch in _batches(spans):
            cancellation.check()
            texts = [piece[start:end] for start, end in batch]
            if limit is not None:
                self._check_unbroken(backend, texts, limit, cancellation)
            for made in backend.ids(texts):
                ids += made
            if limit is not None and len(ids) > limit:
                raise TooLongError
        return ids

    def _check_unbroken(
        self, backend: _Backend, texts: Sequence[str], limit: int, cancellation: Cancellation
    ) -> None:
        """Refuse a long chunk if its parts have more than twice the allowed number of tokens.

        If a text is cut at any place, it has a few more tokens there, but not twice as many.

        Raises:
            TooLongError: the chunk is refused.
            CancelledWorkError: the ids are no longer wanted.
        """
        for text in texts:
            if len(text) > 2 * BATCH_CHARACTERS:
                num_ids = 0
                for start in range(0, len(text), CHUNK_CHARACTERS):
                    cancellation.check()
                    num_ids += len(backend.ids([text[start : start + CHUNK_CHARACTERS]])[0])
                    if num_ids > 2 * limit:
                        raise TooLongError

    # Text that spells special tokens

    @functools.cached_property
    def _guarding(self) -> "_Guarding":
        return _Guarding(self._hf, self._backend.cuts)

    def _encode_guarded(
        self, piece: str, guards: Sequence[int], limit: int | None, cancellation: Cancellation
    ) -> "array[int]":
        guarding = self._guarding
        other = guarding.replaced(piece, guards)
        return guarding.restored(
            self._encode_long(guarding.backend, other.text, limit, cancellation)
        )

    def _counting(self, piece: str, guards: Sequence[int]) -> "_Counting":
        if not guards:
            return _Counting(self._backend, _Replaced(piece, [], []))
        return _Counting(self._guarding.backend, self._guarding.replaced(piece, guards))

    def _encode_in_one_go(self, text: str, guards: Sequence[int]) -> list[int]:
        how: dict[str, Any] = {"add_special_tokens": False, "verbose": False}
        if not guards:
            return list(self._tokenizer.encode(text, **how))
        encode = functools.partial(self._tokenizer.encode, split_special_tokens=True, **how)
        ids, begin = list[int](), 0
        for start, end in Trie(self.special).find(text):
            if not _is_guarded(guards, start, end):
                token: Any = self._tokenizer.convert_tokens_to_ids([text[start:end]])
                ids += [*encode(text[begin:start]), *token]
                begin = end
        return [*ids, *encode(text[begin:])]

    # Kept pieces

    def _keep(self, namespace: object, used: Kept) -> None:
        """Keep the pieces that were just used, and drop those used longest ago."""
        with self._lock:
            kept = self._kept.pop(namespace, {})
            for text in used:
                kept.pop(text, None)
            kept |= used
            size = sum(map(len, kept)) + PIECE_CHARACTERS * len(kept)
            if size > MAX_CHARACTERS:
                size, newest = 0, list[str]()
                for text in reversed(kept):
                    if size + len(text) + PIECE_CHARACTERS > MAX_CHARACTERS:
                        break
                    size += len(text) + PIECE_CHARACTERS
                    newest.append(text)
                kept = {text: kept[text] for text in reversed(newest)}
            self._kept[namespace] = kept
            self._size_of[namespace] = size
            total = sum(self._size_of.values())
            while len(self._kept) > MAX_NAMESPACES or total > MAX_CHARACTERS_IN_ALL:
                oldest = next(iter(self._kept))
                del self._kept[oldest]
                total -= self._size_of.pop(oldest)


class _Replaced(NamedTuple):
    """A piece whose special tokens were replaced by other texts.

    Attributes:
        text: the piece with the replacements.
        ends: where each replaced token ended in the piece.
        shifts: how far each replacement has moved the text after it to the right, in total.
    """

    text: str
    ends: list[int]
    shifts: list[int]

    def place(self, within: int) -> int:
        """Return where a place of the original piece is in `text`."""
        index = bisect_right(self.ends, within) - 1
        return within + (self.shifts[index] if index >= 0 else 0)


class _Guarding:
    """A second tokenizer, which encodes the spellings of special tokens as text.

    It shares the vocabulary with the first tokenizer. For each special token it has a stand-in: a
    secret number that clients cannot write.
    """

    def __init__(self, hf: Any, cuts: Sequence[tuple[Any, Sequence[int]]]) -> None:
        added: dict[int, AddedToken] = dict(sorted(hf.get_added_tokens_decoder().items()))
        made: Any = Tokenizer(hf.model)
        for part in ("normalizer", "pre_tokenizer"):
            if getattr(hf, part) is not None:
                setattr(made, part, getattr(hf, part))
        special = {token_id for token_id, token in added.items() if is_special(token)}
        for token_id, token in added.items():
            (made.add_special_tokens if token_id in special else made.add_tokens)([token])
        if _contents(made) != _contents(hf):  # The ids have gaps.
            described = json.loads(hf.to_str())
            for each in described["added_tokens"]:
                each["special"] |= each["id"] in special
            made = Tokenizer.from_str(json.dumps(described))
        made.encode_special_tokens = True
        secret = str(secrets.randbelow(10**20)).zfill(20)
        self._special = Trie(added[token_id].content for token_id in special)
        self._names: dict[str, str] = {}
        self._ids: dict[int, int] = {}
        for i, (token_id, token) in enumerate(added.items()):
            if token_id in special:
                name = self._names[token.content] = f"{secret}{i:06d}"
                how = {at: getattr(token, at) for at in ("lstrip", "rstrip", "single_word")}
                made.add_tokens([AddedToken(name, normalized=token.normalized, **how)])
                self._ids[made.token_to_id(name)] = token_id
        self.backend = _Backend(made, cuts)

    def replaced(self, piece: str, guards: Sequence[int]) -> _Replaced:
        """Return a piece with stand-ins for its special tokens, except for guarded ones."""
        texts, ends, shifts, begin, shift = list[str](), list[int](), list[int](), 0, 0
        for start, end in self._special.find(piece):
            if not _is_guarded(guards, start, end):
                name = self._names[piece[start:end]]
                texts += [piece[begin:start], name]
                shift += len(name) - (end - start)
                begin = end
                ends.append(end)
                shifts.append(shift)
        return _Replaced("".join([*texts, piece[begin:]]), ends, shifts)

    def restored(self, ids: "array[int]") -> "array[int]":
        """Return ids in which the special tokens are back in place of their stand-ins."""
        return array("I", map(lambda each: self._ids.get(each, each), ids))


def _contents(hf: Any) -> dict[int, str]:
    return {token_id: it.content for token_id, it in hf.get_added_tokens_decoder().items()}


class _Counting:
    """Counts the tokens of a piece before a place, and keeps the counts of its chunks."""

    def __init__(self, backend: _Backend, piece: _Replaced) -> None:
        self._backend, self._piece = backend, piece
        self._chunks = [*backend.chunks(piece.text)]
        self._stops = functools.cache(lambda index: backend.stops(self._chunks[index].text))
        self._num_ids = functools.cache(
            lambda index: len(backend.ids([self._chunks[index].text])[0])
        )

    def before(self, within: int) -> int:
        """Return how many tokens end at or before a place."""
        place = self._piece.place(within)
        index = bisect_right(self._chunks, place, key=lambda chunk: chunk.start) - 1
        num_before = sum(self._num_ids(each) for each in range(index))
        return num_before + bisect_right(self._stops(index), place - self._chunks[index].start)


def _batches(spans: Iterable[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Yield spans in groups of about the length that is encoded in one call."""
    batch, size = list[tuple[int, int]](), 0
    for start, end in spans:
        batch.append((start, end))
        size += end - start + PIECE_CHARACTERS // 16
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _is_guarded(guards: Sequence[int], start: int, end: int) -> bool:
    """Whether a guard is inside a span and not at one of its ends."""
    index = bisect_right(guards, start)
    return index < len(guards) and guards[index] < end


def _inside(guards: Sequence[int], start: int, end: int) -> list[int]:
    """Return the guards in a span, counted from its start."""
    return [each - start for each in guards[bisect_left(guards, start) : bisect_right(guards, end)]]
