"""Fused forward passes against transformers' own code, run on the very same weights."""

import dataclasses
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.logits import run_paged, run_transformers
from tests.golden import told
from tieredkv.config import Dtype
from tieredkv.engine.fingerprint import parameters_fingerprint
from tieredkv.engine.fused import FusedModel
from tieredkv.engine.fused_gemma import FusedGemma
from tieredkv.engine.loader import Fused, LoadedModel, find_model

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
GEMMA_3 = {
    "model_type": "gemma3_text",
    "head_dim": 24,
    "query_pre_attn_scalar": 16,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
GEMMA_4 = {
    "model_type": "gemma4_text",
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "sliding_window": 20,
    "final_logit_softcapping": 3.0,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_parameters": LLAMA3_ROPE},
    "llama-yarn": {"model_type": "llama", "rope_parameters": YARN_ROPE, "head_dim": 40},
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 24},
    "mistral-tied": {
        "model_type": "mistral",
        "sliding_window": None,
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
    },
    "qwen2": {"model_type": "qwen2"},
    "qwen2-tied-yarn": {
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "rope_parameters": YARN_ROPE,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "gpt_oss": {
        "model_type": "gpt_oss",
        "head_dim": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 20,
        "swiglu_limit": 1.0,
        "rope_parameters": YARN_ROPE | {"truncate": False},
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 16, **EXPERTS, "norm_topk_prob": True},
    "qwen3_moe-in-part": {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        **EXPERTS,
        "norm_topk_prob": False,
        "mlp_only_layers": [1],
    },
    "gemma3": GEMMA_3,
    "gemma4": GEMMA_4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gemma4-tied": GEMMA_4 | {"attention_bias": True, "tie_word_embeddings": True},
    "gemma4-experts": GEMMA_4
    | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 40},
    "gemma4-own-embeddings": GEMMA_4
    | {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 300,
        "num_kv_shared_layers": 1,
        "use_double_wide_mlp": True,
    },
    "gemma4_unified": GEMMA_4
    | {"model_type": "gemma4_unified_text", "final_logit_softcapping": None},
    "qwen3-tied": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
}
Load = Callable[..., LoadedModel]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def make(device: str = "cpu", dtype: Dtype = "float32", **config: Any) -> LoadedModel:
        """Load a small model and draw all its parameters in place, norms and biases too."""
        table = {
            "vocab_size": 300,
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 112,
            "max_position_embeddings": 512,
        }
        (tmp_path / "config.json").write_text(json.dumps(table | config))
        loaded = find_model(f"random:{tmp_path}", device=device, dtype=dtype).load()
        generator = torch.Generator(loaded.device).manual_seed(4)
        scalars = [it for name, it in loaded.model.named_buffers() if name.endswith("layer_scalar")]
        for tensor in (*loaded.model.parameters(), *scalars):
            mean, std = (0.0, 0.2) if tensor.ndim > 1 else (0.7, 0.3)
            tensor.normal_(mean, std, generator=generator)
        return loaded

    return make


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return CONFIGS[request.param]


def prompt(num_tokens: int) -> list[int]:
    return random.Random(7).choices(range(300), k=num_tokens)


def test_logits_equal_those_of_transformers(config: dict[str, Any], load: Load) -> None:
    loaded = load(**config)
    assert loaded.fused is not None
    ids = prompt(150)
    logits = run_paged(loaded, ids)
    expected = run_transformers(loaded.model, ids)
    assert (logits - expected).abs().max() <= 2e-5 * expected.abs().max()


def tensors_in(part: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested dataclasses and sequences."""
    if isinstance(part, Tensor):
        yield part
    elif dataclasses.is_dataclass(part):
        for field in dataclasses.fields(part):
            yield from tensors_in(getattr(part, field.name))
    elif isinstance(part, tuple | list):
        for each in part:
            yield from tensors_in(each)


def tables_in(fused: Fused) -> list[Tensor]:
    """Return the tables of a model's ropes."""
    if isinstance(fused, FusedModel):
        return [fused.cos_sin]
    assert isinstance(fused, FusedGemma)
    return [layer.cos_sin for layer in fused.layers]


def test_parameters_are_views_of_what_is_merged(config: dict[str, Any], load: Load) -> None:
    loaded = load(**config)
    assert loaded.fused is not None
    own = {p.untyped_storage().data_ptr() for p in loaded.model.parameters()}
    others = {*map(id, loaded.model.buffers()), *map(id, tables_in(loaded.fused))}
    fused = [tensor for tensor in tensors_in(loaded.fused) if id(tensor) not in others]
    assert {tensor.untyped_storage().data_ptr() for tensor in fused} == own
    sizes = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in fused}
    assert sum(sizes.values()) == sum(p.nbytes for p in loaded.model.parameters())


def test_merging_leaves_names_values_and_fingerprint(load: Load) -> None:
    loaded = load(**CONFIGS["qwen2"])
    names = {name: tuple(p.shape) for name, p in loaded.model.named_parameters()}
    assert names["model.layers.0.self_attn.k_proj.weight"] == (32, 64)
    assert names["model.layers.2.self_attn.k_proj.bias"] == (32,)
    before = parameters_fingerprint({}, loaded.model)
    values = {name: p.clone() for name, p in loaded.model.named_parameters()}
    assert FusedModel.from_model(loaded.model, loaded.config) is not None
    for name, parameter in loaded.model.named_parameters():
        assert torch.equal(parameter, values[name])
        parameter.data = parameter.data.clone()
    assert parameters_fingerprint({}, loaded.model) == before


def test_positions_past_the_first_chunk_of_the_table_are_rotated_right(load: Load) -> None:
    loaded = load(**CONFIGS["llama"], max_position_embeddings=40_000, num_hidden_layers=1)
    assert isinstance(loaded.fused, FusedModel)
    whole: Any = loaded.model
    positions = torch.tensor([[0, 1, 16_383, 16_384, 39_999]])
    cos, sin = whole.model.rotary_emb(torch.empty(0), position_ids=positions)
    table = loaded.fused.cos_sin
    assert table.shape == (40_000, 16)
    assert torch.equal(table[positions[0]], torch.cat([cos[0, :, :8], sin[0, :, :8]], dim=-1))


def tell_why(caplog: pytest.LogCaptureFixture) -> None:
    """Compare what the log says of a model that is left to transformers."""
    [record] = [each for each in caplog.records if each.name == FusedModel.__module__]
    assert record.levelname == "INFO"
    told(record.getMessage())


@pytest.mark.parametrize(
    "config", [{"model_type": "granite"}, {"model_type": "phi3", "pad_token_id": 0}]
)
def test_other_families_run_as_before(
    config: dict[str, Any], load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        loaded = load(**config)
    assert loaded.fused is None
    tell_why(caplog)
    ids = prompt(60)
    logits = run_paged(loaded, ids)
    expected = run_transformers(loaded.model, ids)
    assert (logits - expected).abs().max() <= 2e-5 * expected.abs().max()


class ScaledMLP(nn.Module):
    """An MLP class that the fused model does not know."""


def rename(model: Any) -> None:
    model.model.layers[1].mlp.__class__ = ScaledMLP


def add_parameter(model: Any) -> None:
    model.model.layers[1].register_parameter("multiplier", nn.Parameter(torch.ones(1)))


def drop_a_bias(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias = None


def widen_a_layer(model: Any) -> None:
    model.model.layers[2].mlp.down_proj.weight.data = torch.zeros(64, 113)


def wrap_a_linear(model: Any) -> None:
    class Adapter(nn.Linear):
        pass

    model.model.layers[0].self_attn.o_proj.__class__ = Adapter


def turn_fewer(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq[:4]


def change_activation(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = nn.GELU()


def add_a_layer(model: Any) -> None:
    model.model.layers.append(model.model.layers[0])


def lengthen(model: Any) -> None:
    model.config.max_position_embeddings = 1 << 30


def mix_dtypes(model: Any) -> None:
    model.model.norm.weight.data = model.model.norm.weight.data.half()


@pytest.mark.parametrize(
    "change",
    [
        rename,
        add_parameter,
        drop_a_bias,
        widen_a_layer,
        wrap_a_linear,
        turn_fewer,
        change_activation,
        add_a_layer,
        lengthen,
        mix_dtypes,
    ],
)
def test_a_model_with_an_unknown_part_is_left_to_transformers(
    change: Callable[[Any], None], load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load(**CONFIGS["qwen2"])
    change(loaded.model)
    with caplog.at_level("INFO"):
        assert FusedModel.from_model(loaded.model, loaded.config) is None
    tell_why(caplog)


def test_another_activation_runs_as_before(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert load(**CONFIGS["llama"], hidden_act="gelu").fused is None
    tell_why(caplog)


def change_layers(fused: FusedGemma, **changes: Callable[[Any], Any]) -> FusedGemma:
    """Change fields of all layers that have them."""
    changed = [
        dataclasses.replace(
            layer, **{k: change(getattr(layer, k)) for k, change in changes.items()}
        )
        for layer in fused.layers
    ]
    return dataclasses.replace(fused, layers=changed)


def roll_row(index: int) -> Callable[[Tensor], Tensor]:
    """Return a change of one of several norms: its weights are moved by one element."""

    def roll(norms: Tensor) -> Tensor:
        rows = norms.clone()
        rows[index] = rows[index].roll(1, -1)
        return rows

    return roll


def roll(weights: Tensor) -> Tensor:
    return weights.roll(1, -1)


def change_norms(change: Callable[[Any], Any]) -> Callable[[FusedGemma], FusedGemma]:
    return lambda fused: change_layers(fused, head_norms=change)


GEMMA_FAULTS: dict[str, Callable[[FusedGemma], FusedGemma]] = {
    "embedding scale": lambda it: dataclasses.replace(it, embedding_scale=1.0),
    "soft cap": lambda it: dataclasses.replace(it, softcap=None),
    "final norm": lambda it: dataclasses.replace(it, final_norm=roll(it.final_norm)),
    "offset of norms": lambda it: dataclasses.replace(it, style=it.style._replace(offset=0.5)),
    "input norm": lambda it: change_layers(it, input_norm=roll),
    "attention norm": lambda it: change_layers(it, attention_norm=roll),
    "mlp's first norm": lambda it: change_layers(it, mlp_norms=roll_row(0)),
    "experts' first norm": lambda it: change_layers(it, mlp_norms=roll_row(1)),
    "router's norm": lambda it: change_layers(it, mlp_norms=roll_row(2)),
    "mlp's own norm": lambda it: change_layers(it, own_norms=roll_row(0)),
    "experts' own norm": lambda it: change_layers(it, own_norms=roll_row(1)),
    "mlp norm": lambda it: change_layers(it, mlp_norm=roll),
    "layer scalar": lambda it: change_layers(it, scalar=lambda _: None),
    "gate": lambda it: change_layers(it, mlp=lambda mlp: dataclasses.replace(mlp, kind="silu")),
    "attention scale": lambda it: change_layers(it, scale=lambda scale: 0.5 * scale),
    "rope's positions": lambda it: change_layers(it, cos_sin=lambda table: table * 0.9),
    "rope's angles": lambda it: change_layers(it, cos_sin=lambda table: table[:, :6].contiguous()),
    "rope's kind": lambda it: change_layers(it, cos_sin=lambda _: it.layers[1].cos_sin),
    "query norm": change_norms(lambda it: it._replace(weights=roll_row(0)(it.weights))),
    "key norm": change_norms(lambda it: it._replace(weights=roll_row(1)(it.weights))),
    "value norm": change_norms(lambda it: it._replace(has_values=False)),
}


def change_own(**changes: Callable[[Any], Any]) -> Callable[[FusedGemma], FusedGemma]:
    """Return a change of the embeddings that layers have of their own."""

    def change(fused: FusedGemma) -> FusedGemma:
        own = fused.own_embeddings
        assert own is not None
        changed = {name: change(getattr(own, name)) for name, change in changes.items()}
        return dataclasses.replace(fused, own_embeddings=dataclasses.replace(own, **changed))

    return change


OWN_FAULTS: dict[str, Callable[[FusedGemma], FusedGemma]] = {
    "embedding scale": change_own(embedding_scale=lambda scale: 0.5 * scale),
    "projection scale": change_own(projection_scale=lambda scale: -scale),
    "norm": change_own(norm=roll),
    "scale": change_own(scale=lambda scale: 0.5 * scale),
    "layer's norm": lambda it: change_layers(
        it, own_input=lambda own: dataclasses.replace(own, norm=roll(own.norm))
    ),
    "layer scalar": lambda it: change_layers(it, scalar=lambda _: None),
    "query norm": change_norms(lambda it: it._replace(weights=roll_row(0)(it.weights))),
}


@pytest.mark.parametrize("fault", OWN_FAULTS)
def test_a_wrong_embedding_of_layers_of_gemma_would_be_seen(fault: str, load: Load) -> None:
    loaded = load(**CONFIGS["gemma4-own-embeddings"])
    assert isinstance(loaded.fused, FusedGemma)
    ids = prompt(60)
    expected = run_paged(loaded, ids)
    wrong = dataclasses.replace(loaded, fused=OWN_FAULTS[fault](loaded.fused))
    assert (run_paged(wrong, ids) - expected).abs().max() > 1e-3 * expected.abs().max()


@pytest.mark.parametrize("fault", GEMMA_FAULTS)
def test_a_wrong_norm_rope_or_factor_of_gemma_would_be_seen(fault: str, load: Load) -> None:
    loaded = load(**CONFIGS["gemma4-experts"], attention_k_eq_v=True, num_global_key_value_heads=1)
    assert isinstance(loaded.fused, FusedGemma)
    ids = prompt(60)
    expected = run_paged(loaded, ids)
    wrong = dataclasses.replace(loaded, fused=GEMMA_FAULTS[fault](loaded.fused))
    assert (run_paged(wrong, ids) - expected).abs().max() > 1e-3 * expected.abs().max()


def turn_fewer_full(model: Any) -> None:
    angles = model.model.rotary_emb.full_attention_inv_freq
    model.model.rotary_emb.full_attention_inv_freq = angles[:4]


@pytest.mark.parametrize(
    ("changes", "change"),
    [({"hidden_activation": "silu"}, None), ({}, rename), ({}, turn_fewer_full), ({}, lengthen)],
)
def test_an_unknown_gemma_is_left_to_transformers(
    changes: dict[str, Any],
    change: Callable[[Any], None] | None,
    load: Load,
    caplog: pytest.LogCaptureFixture,
) -> None:
    loaded = load(**CONFIGS["gemma4"] | changes)
    caplog.clear()
    if change is not None:
        change(loaded.model)
    with caplog.at_level("INFO"):
        assert FusedGemma.from_model(loaded.model, loaded.config) is None
    [record] = [each for each in caplog.records if each.name == FusedGemma.__module__]
    told(record.getMessage())


@pytest.mark.gpu
def test_bfloat16_errors_are_no_more_than_twice_those_of_transformers_for_each_config(
    config: dict[str, Any], load: Load
) -> None:
    ids = prompt(150)
    loaded = load("cuda", "bfloat16", **config)
    assert loaded.fused is not None
    ours = run_paged(loaded, ids)
    theirs = run_transformers(loaded.model, ids)
    whole: Any = loaded.model
    whole.float()  # which takes the views apart
    exact = run_transformers(loaded.model, ids)
    assert (ours - exact).abs().mean() <= 2 * (theirs - exact).abs().mean()
