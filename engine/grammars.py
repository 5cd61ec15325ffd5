"""Grammars that answers must follow: compiled beside the steps, then asked for one mask a token.

A grammar is a structural tag of xgrammar as JSON text, which can hold JSON schemas, regular
expressions, grammars in EBNF, and texts between them. Whoever makes it knows what it is for; here
it only says which tokens may come next. It ends with one of the model's end tokens.

Source: https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html
"""

import functools
import logging
import random
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tieredkv.errors import RequestError
from tieredkv.kernels import small_copies

if TYPE_CHECKING:  # it is loaded with the first grammar, as most engines never have one
    import xgrammar

logger = logging.getLogger(__name__)

CACHE_BYTES = 256 << 20
"""Compiled grammars that are kept, for each vocabulary."""

KNOWN_BYTES = 256 << 20
"""Compiled grammars that are found without asking the compiler; most of them are in its cache."""

MAX_VOCABULARIES = 4
NUM_TRIED, NUM_AVERAGED = 96, 8
"""Tokens of the answers that are tried before a grammar is used, and how many of them count."""

MAX_TOKEN_S = 0.02
"""The longest that these may take, on average, of a processor's time."""

SLOW_S = 0.1
"""An answer for whose grammar one token takes longer is ended; all others wait for it."""

MAX_THREADS = 8
"""That compile one grammar or fill the masks of one step; no more than the machine has cores."""

_GEMMA_STYLE, _GEMMA_QUOTE = '"style": "gemma"', '<|"|>'
"""A style of JSON in structural tags, and the token that it writes around texts."""

TOO_SLOW = "its grammar takes too long for one token"

Compiled: TypeAlias = "xgrammar.CompiledGrammar"


class Compiler:
    """Compiles grammars for the tokens of one model; a compilation cannot be interrupted.

    Args:
        tokenizer: whose tokens they are.
        vocab_size: of the model's logits.
        eos_token_ids: the tokens that end an answer.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        added = tokenizer.added_tokens_decoder.items()
        self._special = {str(token): id for id, token in added if token.special}
        self._compiler = functools.lru_cache(MAX_VOCABULARIES)(self._make_compiler)

    def compile(self, grammar: str) -> Compiled:
        """Compile a grammar, or find it among those that were compiled last.

        A special token such as `[TOOL_CALLS]` can be chosen only where the grammar names it, since
        the texts of answers leave special tokens out.

        Raises:
            RequestError: it is no grammar, or the model has no token to end it with.
        """
        if not self._eos_token_ids:
            what = "This model names no end token, so its answers cannot be constrained."
            raise RequestError(what, code="unsupported_parameter")
        shown = grammar + _GEMMA_QUOTE * (_GEMMA_STYLE in grammar)
        named = frozenset(id for text, id in self._special.items() if text in shown)
        try:
            return self._compiler(named).compile_structural_tag(grammar)
        except (RuntimeError, ValueError) as error:  # what xgrammar raises
            raise RequestError(f"The grammar cannot be used: {_first_line(error)}") from None

    def check(self, grammar: str) -> None:
        """Refuse a grammar that cannot be compiled, that no answer can follow, or that is slow.

        In an ambiguous grammar each token takes longer than the one before. So two answers are
        tried, one of the same token again and again, as far as it goes, and one of random tokens.

        Raises:
            RequestError: as `compile`.
        """
        compiled = self.compile(grammar)
        if not _masks([Matcher(compiled)], self._vocab_size).any():
            raise RequestError("The grammar cannot be used: no answer can follow it")
        chance = random.Random(0)
        choices: tuple[Callable[[Sequence[int]], int], ...] = (max, chance.choice)
        for choose in choices:
            if self._try(Matcher(compiled), choose) > MAX_TOKEN_S:
                what = "it is so ambiguous, or repeats so much, that tokens would take too long"
                raise RequestError(f"The grammar cannot be used: {what}")

    def _try(self, matcher: "Matcher", choose: Callable[[Sequence[int]], int]) -> float:
        """Return how long the last tokens of a short answer took, on average, in seconds."""
        import xgrammar

        took, ends = list[float](), {*self._eos_token_ids}
        mask = xgrammar.allocate_token_bitmask(1, self._vocab_size)
        while len(took) < NUM_TRIED:
            fill_s = _fill_s(matcher, mask, 0)
            bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
            ids = np.flatnonzero(bits[: self._vocab_size]).tolist()
            others = [token_id for token_id in ids if token_id not in ends]
            if not others:
                break
            began_at = time.thread_time()
            matcher.accept(choose(others))
            took.append(fill_s + time.thread_time() - began_at)
        last = took[-NUM_AVERAGED:]
        return sum(last) / max(1, len(last))

    def _make_compiler(self, named: frozenset[int]) -> "xgrammar.GrammarCompiler":
        """Return the compiler for a vocabulary of which these special tokens are a part."""
        import xgrammar

        told: dict[str, Any] = {
            "vocab_size": self._vocab_size,
            "stop_token_ids": self._eos_token_ids,
        }
        # NOTE: up to 0.2.8, xgrammar leaves tokens out of some masks that it would accept. It takes
        # the tokens that follow `t` in the order of bytes for continuations of `t` as long as they
        # contain `t`, where they should begin with it (`trie_subtree_nodes_range` in
        # tokenizer_info.cc), and rejects them with it. So with the tokens `ba` and `bba`, the
        # grammar `bba` does not allow `bba` as the first token, though it allows `b`. Texts are
        # never wrong, and single bytes are never left out, so no mask is empty for this reason
        # where each byte is a token. It concerns 7 of the 131,072 tokens of Mistral's tekken.
        texts = xgrammar.TokenizerInfo.from_huggingface(self._tokenizer, **told).decoded_vocab
        for id in {*self._special.values()} - named:
            if id < len(texts):
                texts[id] = b""
        info = xgrammar.TokenizerInfo(texts, **told)
        return xgrammar.GrammarCompiler(
            info, max_threads=MAX_THREADS, cache_limit_bytes=CACHE_BYTES
        )


class Grammars:
    """Compiles grammars in a thread of its own, so that no step waits for one.

    A grammar that was compiled before does not wait for others that are being compiled.

    Args:
        make_compiler: called in that thread, once there is a grammar to compile.
        wake: called whenever a compilation has ended.
    """

    def __init__(self, make_compiler: Callable[[], Compiler], wake: Callable[[], None]) -> None:
        self._compiler = functools.cache(make_compiler)
        self._wake = wake
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._lock = threading.Lock()  # for the known ones
        self._known = OrderedDict[str, Compiled]()  # the one used last comes last

    def compile(self, grammar: str) -> "Future[Compiled]":
        """Begin to compile a grammar; the future fails as `Compiler.compile` does."""
        compiling: Future[Compiled]
        with self._lock:
            if (known := self._known.get(grammar)) is not None:
                self._known.move_to_end(grammar)
        if known is None:
            compiling = self._executor.submit(self._compile, grammar)
        else:
            compiling = Future()
            compiling.set_result(known)
        compiling.add_done_callback(lambda _: self._wake())
        return compiling

    def _compile(self, grammar: str) -> Compiled:
        compiled = self._compiler().compile(grammar)
        with self._lock:
            self._known[grammar] = compiled
            while sum(it.memory_size_bytes for it in self._known.values()) > KNOWN_BYTES:
                self._known.popitem(last=False)
        return compiled

    def close(self) -> None:
        """Compile nothing more; a compilation in progress is not waited for."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class Matcher:
    """How far one answer has come in its grammar.

    Attributes:
        is_done: whether the answer has ended, so that its grammar allows nothing more.
        fault: why the answer could not follow its grammar to the end; empty if it could.
    """

    def __init__(self, compiled: Compiled) -> None:
        import xgrammar

        self.within = xgrammar.GrammarMatcher(compiled)
        self.is_done, self.fault = False, ""

    def accept(self, token_id: int) -> None:
        """Take in the answer's next token; after the end it is ignored."""
        if self.is_done:
            return
        began_at = time.thread_time()
        is_allowed = bool(self.fault) or self.within.accept_token(token_id)
        if time.thread_time() - began_at > SLOW_S:
            self.fault = self.fault or TOO_SLOW
        if not is_allowed:
            self.fault = f"token {token_id} was chosen, but its grammar does not allow it"
        self.is_done = bool(self.fault) or self.within.is_terminated()


def allowed_tokens(
    matchers: Sequence[Matcher],
    later: Sequence[Collection[int]],
    vocab_size: int,
    device: torch.device,
) -> Tensor:
    """Return which tokens may come next, `[len(matchers), vocab_size]` bool on the device.

    Args:
        matchers: none of them done; their masks are filled in parallel.
        later: for each of them, end tokens that may come only where no other token may.
        vocab_size: of the logits.
        device: where the result is needed; it is not waited for.
    """
    masks = _masks(matchers, vocab_size, pins=device.type == "cuda")
    rows = masks.numpy().view(np.uint32)
    for matcher, row, token_ids in zip(matchers, rows, later, strict=True):
        if token_ids:
            _leave_for_later(row, token_ids)
        if not row.any():
            matcher.fault = matcher.fault or "its grammar allows no token"
            row[:] = 0xFFFFFFFF  # one is chosen, and the answer fails with it
    words = small_copies.upload(masks, device)[:, :, None]
    bits = words >> torch.arange(32, dtype=torch.int32, device=device) & 1
    return bits.bool().flatten(1)[:, :vocab_size]


def _masks(matchers: Sequence[Matcher], vocab_size: int, *, pins: bool = False) -> Tensor:
    """Return which tokens may come next as bits, `[len(matchers), ceil(vocab_size / 32)]` int32.

    A matcher whose mask cannot be filled gets a fault.
    """
    shape = len(matchers), -(-vocab_size // 32)
    masks = torch.zeros(shape, dtype=torch.int32, pin_memory=pins)
    began_at = time.monotonic()
    try:
        _batch_matcher().batch_fill_next_token_bitmask([each.within for each in matchers], masks)
    except RuntimeError as error:
        for matcher in matchers:
            matcher.fault = _first_line(error)
    if time.monotonic() - began_at > SLOW_S:
        for index, matcher in enumerate(matchers):
            if _fill_s(matcher, masks, index) > SLOW_S / 2:
                matcher.fault = matcher.fault or TOO_SLOW
    if num_last := vocab_size % 32:
        masks[:, -1] &= (1 << num_last) - 1  # xgrammar sets those that no token has
    return masks


def _fill_s(matcher: Matcher, masks: Tensor, index: int) -> float:
    """Fill one mask again, and return for how long that kept a processor busy."""
    began_at = time.thread_time()
    matcher.within.fill_next_token_bitmask(masks, index)
    return time.thread_time() - began_at


def _leave_for_later(row: npt.NDArray[np.uint32], token_ids: Collection[int]) -> None:
    """Take tokens out of a mask, unless nothing would be left."""
    before = row.copy()
    for token_id in token_ids:
        row[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    if not row.any():
        row[:] = before


@functools.cache
def _batch_matcher() -> "xgrammar.BatchGrammarMatcher":
    import xgrammar

    return xgrammar.BatchGrammarMatcher()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return _PLACE.sub("", lines[0])[:300]


_PLACE = re.compile(r"^\[[\d:]+\] \S+: ")
"""The time and the line of code that xgrammar puts before its errors."""
