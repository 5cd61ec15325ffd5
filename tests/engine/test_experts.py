"""Experts of transformers' layers on our kernels: which are taken, and which faults are seen."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.logits import run_paged
from tests.engine.test_families import FAMILIES, make_config, write_checkpoint
from tieredkv.engine.experts import EXPERTS_NAME, find_experts
from tieredkv.engine.loader import LoadedModel, find_model
from tieredkv.kernels import experts, layers
from tieredkv.kernels.expert_layout import Gate, RoutingRule

TAKEN = {
    "gemma4 with experts": Gate("gelu_tanh"),
    "glm4_moe": Gate(),
    "gpt_oss": Gate("clamped", is_interleaved=True, alpha=1.702, limit=1.0),
    "granitemoe": Gate(),
    "mixtral": Gate(),
    "olmoe": Gate(),
    "qwen2_moe": Gate(),
    "qwen3_moe": Gate(),
}


def load(name: str, folder: Path, **changes: Any) -> LoadedModel:
    kind, config = FAMILIES[name]
    write_checkpoint(folder, make_config(kind, config | changes))
    return find_model(str(folder), device="cpu").load()


def layers_with_experts(loaded: LoadedModel) -> list[Any]:
    return [module for module in loaded.model.modules() if hasattr(module, "has_gate")]


@pytest.mark.parametrize("name", TAKEN)
def test_the_experts_of_a_family_are_taken_where_they_lie(name: str, tmp_path: Path) -> None:
    loaded = load(name, tmp_path)
    assert loaded.model.config._experts_implementation == EXPERTS_NAME
    found = [(layer, find_experts(layer)) for layer in layers_with_experts(loaded)]
    assert found
    for layer, own in found:
        assert own is not None
        assert own.gate == TAKEN[name]
        assert isinstance(own.gate_up, Tensor)
        assert isinstance(own.down, Tensor)
        assert own.gate_up.data_ptr() == layer.gate_up_proj.data_ptr()
        assert own.down.data_ptr() == layer.down_proj.data_ptr()
        assert (own.gate_up_bias is None) == (name != "gpt_oss")


def test_experts_of_another_make_are_left_to_transformers(tmp_path: Path) -> None:
    loaded = load("qwen2_moe", tmp_path, hidden_act="relu")
    assert [find_experts(layer) for layer in layers_with_experts(loaded)] == [None, None]
    assert run_paged(loaded, [*range(60)]).isfinite().all()


@pytest.mark.parametrize(
    ("name", "part", "num_fused"),
    [("glm4_moe", "mlp", 1), ("glm4_moe in groups", "mlp", 0), ("mixtral", "mlp", 0)],
)
def test_blocks_and_norms_of_known_families_are_fused_and_keep_their_parameters(
    name: str, part: str, num_fused: int, tmp_path: Path
) -> None:
    loaded = load(name, tmp_path)
    base: Any = loaded.model.base_model
    assert sum("forward" in vars(getattr(layer, part)) for layer in base.layers) == num_fused
    is_known = name.startswith("glm4_moe")
    assert ["forward" in vars(layer) for layer in base.layers] == [is_known] * 2
    names = {key for key, _ in loaded.model.named_parameters()}
    with torch.device("meta"):
        plain = type(loaded.model)(loaded.config)
    assert names == {key for key, _ in plain.named_parameters()}


@pytest.mark.parametrize("name", ["rms_norm", "add_and_norm"])
def test_a_wrong_norm_around_attention_would_be_seen(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load("glm4_moe", tmp_path)
    ids = random.Random(7).choices(range(300), k=60)
    expected, right = run_paged(loaded, ids), getattr(layers, name)
    monkeypatch.setattr(layers, name, lambda *given: right(*given).roll(1, -1))
    assert (run_paged(loaded, ids) - expected).abs().max() > 1e-3 * expected.abs().max()


def lose_choice_bias(rule: RoutingRule) -> RoutingRule:
    assert rule.bias is not None
    return rule._replace(bias=-rule.bias)


def lose_scale(rule: RoutingRule) -> RoutingRule:
    return rule._replace(scale=1.0)


def lose_expert_scales(rule: RoutingRule) -> RoutingRule:
    return rule._replace(expert_scales=None)


def lose_norm(rule: RoutingRule) -> RoutingRule:
    return rule._replace(is_normalised=not rule.is_normalised)


def mistake_scores(rule: RoutingRule) -> RoutingRule:
    return rule._replace(is_sigmoid=not rule.is_sigmoid)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *(("glm4_moe", fault) for fault in (lose_choice_bias, lose_scale, lose_norm)),
        ("glm4_moe", mistake_scores),
        ("gemma4 with experts", lose_expert_scales),
        ("gpt_oss", lose_norm),
        ("qwen3_moe", lose_norm),
    ],
)
def test_a_wrong_rule_of_the_router_would_be_seen(
    name: str,
    fault: Callable[[RoutingRule], RoutingRule],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = load(name, tmp_path)
    ids = random.Random(7).choices(range(300), k=60)
    expected, right = run_paged(loaded, ids), experts.route

    def wrong(logits: Tensor, num_chosen: int, rule: RoutingRule) -> tuple[Tensor, Tensor]:
        return right(logits, num_chosen, fault(rule))

    monkeypatch.setattr(experts, "route", wrong)
    assert (run_paged(loaded, ids) - expected).abs().max() > 1e-3 * expected.abs().max()


def roll_weights(given: dict[str, Any]) -> None:
    given["weights"] = given["weights"].roll(1, 1)


def swap_experts(given: dict[str, Any]) -> None:
    given["ids"] = given["ids"] ^ 1


def drop_bias(given: dict[str, Any]) -> None:
    given["experts"] = given["experts"]._replace(gate_up_bias=None)


def drop_down_bias(given: dict[str, Any]) -> None:
    given["experts"] = given["experts"]._replace(down_bias=None)


def drop_clamp(given: dict[str, Any]) -> None:
    gate = given["experts"].gate._replace(limit=1e9)
    given["experts"] = given["experts"]._replace(gate=gate)


FAULTS: list[tuple[str, Callable[[dict[str, Any]], None]]] = [
    *((name, fault) for name in TAKEN for fault in (roll_weights, swap_experts)),
    *(("gpt_oss", fault) for fault in (drop_bias, drop_down_bias, drop_clamp)),
]


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_a_wrong_weight_a_swapped_expert_or_a_lost_bias_would_be_seen(
    name: str,
    fault: Callable[[dict[str, Any]], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = load(name, tmp_path)
    ids = random.Random(7).choices(range(300), k=60)
    expected = run_paged(loaded, ids)

    def faulty(right: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wrong(x: Tensor, ids: Tensor, weights: Tensor, own: Any, **options: Any) -> Tensor:
            given = {"x": x, "ids": ids, "weights": weights, "experts": own}
            fault(given)
            return right(**given, **options)

        return wrong

    for name in ("compute_experts", "add_experts"):
        monkeypatch.setattr(experts, name, faulty(getattr(experts, name)))
    assert (run_paged(loaded, ids) - expected).abs().max() > 1e-3 * expected.abs().max()
