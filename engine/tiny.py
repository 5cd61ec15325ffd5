"""The weights of `tiny-random`, and byte-level tokenizers that fit any vocabulary.

`tiny-random` was never trained. Its weights are drawn such that its answers depend on the whole
context, so that a wrong block shows as wrong tokens. This module knows no paths and no requests.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

if TYPE_CHECKING:
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

TINY_NAME = "tiny-random"
TINY_SEED = 20

BOS, EOS, TURN_START, TURN_END = "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"
_SPECIALS = (BOS, EOS, TURN_START, TURN_END, *(f"<|reserved_{i}|>" for i in range(4)))
BYTE_VOCAB_SIZE = 256 + len(_SPECIALS)

_CHAT_TEMPLATE = Path(__file__).with_name("byte_chat.jinja")


@torch.no_grad()
def init_tiny_weights(model: "LlamaForCausalLM") -> None:
    """Draw the weights of `tiny-random` on the CPU; they are the same on every machine.

    Linear layers keep the variance of their input. Queries are scaled up, so that a head attends
    to few of many tokens and each of them matters. Only tokens of printable ASCII have output
    weights, so that greedy text is valid UTF-8, encodes back to the same tokens, and never ends by
    accident.
    """
    generator = torch.Generator().manual_seed(TINY_SEED)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            nn.init.ones_(parameter)
            continue
        std = 1.0 if "embed_tokens" in name else parameter.shape[1] ** -0.5
        if "q_proj" in name:
            std *= 3.0
        drawn = torch.empty(parameter.shape).normal_(0.0, std, generator=generator)
        parameter.copy_(drawn)
    printable = torch.zeros(model.config.vocab_size, dtype=torch.bool)
    printable[0x20:0x7F] = True
    model.lm_head.weight[~printable.to(model.lm_head.weight.device)] = 0.0


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
