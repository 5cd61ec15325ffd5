"""Texts that follow a grammar, chosen at random byte by byte, as a model without sense would."""

import functools
import random

import numpy as np
import xgrammar

from tieredkv.engine.byte_tokenizer import BYTE_VOCAB_SIZE, byte_tokenizer, stop_token_ids
from tieredkv.engine.grammars import Compiler, Matcher

MAX_BYTES = 1500
QUOTE = b'<|"|>'
"""What Gemma 4 writes around texts; once begun, it is mostly written to its end."""


class NotEndedError(Exception):
    """The text was still going on after `MAX_BYTES`."""


@functools.cache
def compiler() -> Compiler:
    """Return a compiler for one token a byte."""
    return Compiler(byte_tokenizer(BYTE_VOCAB_SIZE, 4096), BYTE_VOCAB_SIZE, stop_token_ids())


def written(grammar: str, chance: random.Random) -> str:
    """Return a text that follows a grammar; ASCII and punctuation are likelier than the rest."""
    matcher, text = Matcher(compiler().compile(grammar)), bytearray()
    mask = xgrammar.allocate_token_bitmask(1, BYTE_VOCAB_SIZE)
    ends = stop_token_ids()
    while len(text) < MAX_BYTES:
        matcher.within.fill_next_token_bitmask(mask)
        bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[:BYTE_VOCAB_SIZE]
        allowed = {int(token_id) for token_id in np.flatnonzero(bits)}
        assert allowed, f"nothing may follow {bytes(text)!r}"
        others = sorted(allowed - ends)
        if allowed & ends and (not others or chance.random() < 0.5):
            return text.decode()
        plain = [byte for byte in others if 32 <= byte < 127] or others
        closing = [byte for byte in others if byte in b'"}],:<']
        if text.endswith(QUOTE[:1]) and QUOTE[1] in allowed and chance.random() < 0.3:
            closing = plain = [QUOTE[1]]
        byte = chance.choice(closing if closing and chance.random() < 0.4 else plain)
        begun = [n for n in range(2, len(QUOTE)) if text.endswith(QUOTE[:n])]
        if begun and QUOTE[begun[-1]] in allowed and chance.random() < 0.8:
            byte = QUOTE[begun[-1]]
        matcher.accept(byte)
        text.append(byte)
    raise NotEndedError
