"""The bytes that a step must read, as `bench decode` counts them: the weights in use."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tieredkv.bench.decode import Weights, numbers_of
from tieredkv.engine.quantized_modules import choose_drawn, keep_quantized

HIDDEN, WIDTH, VOCAB, LAYERS = 64, 96, 300, 2
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": WIDTH,
    "tie_word_embeddings": False,
}
EXPERT = LAYERS * 3 * HIDDEN * WIDTH
ATTENTION = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * 32)
NORMS = (2 * LAYERS + 1) * HIDDEN
HEAD = VOCAB * HIDDEN


def weights(model_type: str, **changes: Any) -> Weights:
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(AutoConfig.for_model(model_type, **SIZES | changes))
    return Weights.of(model, torch.Tensor.numel)


def test_a_dense_model_is_read_whole_by_any_number_of_tokens() -> None:
    dense = weights("llama")
    assert dense.per_token == ATTENTION + NORMS + EXPERT
    assert dense.read_by(1) == dense.read_by(64) == ATTENTION + NORMS + EXPERT + HEAD
    tied = weights("llama", tie_word_embeddings=True)
    assert tied.read_by(1) == dense.read_by(1)


@pytest.mark.parametrize(
    ("model_type", "num_experts", "used", "besides"),
    [("mixtral", "num_local_experts", 2, 0), ("qwen3_moe", "num_experts", 3, LAYERS * 2 * 16)],
)
def test_of_a_mixture_only_the_experts_that_tokens_use_are_read(
    model_type: str, num_experts: str, used: int, besides: int
) -> None:
    changes = {num_experts: 8, "num_experts_per_tok": used, "moe_intermediate_size": WIDTH}
    mixture = weights(model_type, **changes)
    shared = ATTENTION + NORMS + besides + LAYERS * 8 * HIDDEN  # the router knows all experts
    assert mixture.per_token == shared + used * EXPERT
    assert mixture.read_by(1) == pytest.approx(shared + HEAD + used * EXPERT)
    two = 8 * (1 - (1 - used / 8) ** 2)
    assert used < two < 2 * used
    assert mixture.read_by(2) == pytest.approx(shared + HEAD + two * EXPERT)
    assert mixture.read_by(500) == pytest.approx(shared + HEAD + 8 * EXPERT)


def test_an_expert_that_every_token_uses_counts_whole() -> None:
    changes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH}
    shared = weights("qwen2_moe", shared_expert_intermediate_size=WIDTH, **changes)
    assert shared.read_by(1) - HEAD == shared.per_token
    assert shared.per_token > 3 * EXPERT + ATTENTION


def test_quantized_weights_are_counted_by_their_bytes_and_by_their_numbers() -> None:
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(AutoConfig.for_model("gpt_oss", **SIZES | experts))
    plain = Weights.of(model, torch.Tensor.numel)
    keep_quantized(model, choose_drawn(model, "mxfp4", ()), "mxfp4")
    numbers = numbers_of(model)
    assert Weights.of(model, lambda weight: numbers[id(weight)]) == plain
    packed = Weights.of(model, lambda weight: weight.nbytes)
    assert packed.shared == 4 * plain.shared  # float32, with the biases of all experts
    assert packed.expert == EXPERT // 2 + EXPERT // 32  # four bits each, and a byte for 32 of them
