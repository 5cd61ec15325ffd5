"""Byte-level tokenizers that fit any vocabulary, for models without a checkpoint.

The server's process makes one without importing torch. This module knows no paths and no requests.
"""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

BOS, EOS, TURN_START, TURN_END = "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"
_SPECIALS = (BOS, EOS, TURN_START, TURN_END, *(f"<|reserved_{i}|>" for i in range(4)))
BYTE_VOCAB_SIZE = 256 + len(_SPECIALS)

_CHAT_TEMPLATE = Path(__file__).with_name("byte_chat.jinja")


def byte_tokenizer(vocab_size: int, max_model_len: int) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token for each byte and a few chat tokens.

    Id `b` below 256 is byte `b`; the special tokens follow. Ids beyond them, which no text
    encodes to, decode to ` t<id>`, so that a random model's output is text too. Text never
    encodes to special tokens unless it spells them, as with any chat tokenizer.
    """
    letters = bytes_to_unicode()
    vocab = {letters[byte]: byte for byte in range(256)}
    vocab |= {token: 256 + i for i, token in enumerate(_SPECIALS)}
    vocab |= {f"{letters[0x20]}t{i}": i for i in range(BYTE_VOCAB_SIZE, vocab_size)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in _SPECIALS])
    make: Any = PreTrainedTokenizerFast  # untyped in transformers
    tokenizer: PreTrainedTokenizerFast = make(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=max_model_len,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _CHAT_TEMPLATE.read_text(encoding="utf-8")
    return tokenizer


def stop_token_ids() -> frozenset[int]:
    """Return the ids that end an answer in the chat format of `byte_tokenizer`."""
    return frozenset(256 + _SPECIALS.index(token) for token in (EOS, TURN_END))
