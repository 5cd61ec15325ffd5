"""The weights of `tiny-random`.

It was never trained. Its weights are drawn such that its answers depend on the whole context, so
that a wrong block shows as wrong tokens. This module knows no paths and no requests.
"""

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

TINY_SEED = 20


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
