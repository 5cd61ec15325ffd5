"""Models whose weights stay quantized: the reference of the products, on the CPU."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engine.logits import run_paged
from tieredkv.engine import loader
from tieredkv.engine.byte_tokenizer import byte_tokenizer
from tieredkv.engine.loader import LoadedModel, find_model
from tieredkv.engine.quantized import Quantization
from tieredkv.engine.quantized_modules import (
    QuantizedLinear,
    method_for,
    quantized_parameters,
    quantized_paths,
)
from tieredkv.kernels.quantized import Fp8Matrix, Mxfp4Matrix

BLOCK = 128
ATTENTION = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 300,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
}
# All experts are chosen, since an error of a sixteenth may choose another one.
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
STATES = {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "qwen3_5_text": STATES,
    "qwen3_5_moe_text": EXPERTS | STATES | {"shared_expert_intermediate_size": 128},
    "granite": {},  # which is not fused
}
NUM_KEPT = {
    "qwen3": 4 * 7,
    "qwen3_moe": 4 * 5,
    "qwen3_5_text": 3 * 3 + 4 + 4 * 3,
    "qwen3_5_moe_text": 3 * 3 + 4 + 4 * 4,
    "granite": 4 * 7,
}
UNQUANTIZED = ("embed_tokens", "lm_head", "in_proj_a", "in_proj_b", "gate", "shared_expert_gate")

Tensors = dict[str, Tensor]


def write_model(folder: Path, kind: str) -> None:
    torch.manual_seed(4)
    config = AutoConfig.for_model(kind, **ATTENTION | FAMILIES[kind])
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.06)
        elif name.endswith("A_log"):
            nn.init.uniform_(parameter, -5.0, -3.0)
    model.save_pretrained(folder)
    byte_tokenizer(300, 256).save_pretrained(folder)


def is_quantized(key: str, tensor: Tensor) -> bool:
    module = key.removesuffix(".weight").rpartition(".")[2]
    return tensor.ndim == 2 and module.rpartition(".")[2] not in UNQUANTIZED and "conv1d" not in key


def quantise(weight: Tensor) -> Fp8Matrix:
    rows, columns = weight.shape
    generator = torch.Generator().manual_seed(weight.numel())
    grid = rows // BLOCK, columns // BLOCK
    scales = (1 + torch.rand(grid, generator=generator)) * weight.abs().amax().float() / 448
    whole = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return Fp8Matrix((weight.float() / whole).to(torch.float8_e4m3fn), scales)


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def write(folder: Path, tensors: Tensors) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def make_fp8(folder: Path, kind: str, *, skipped: str = "nothing") -> Tensors:
    """Write a checkpoint in FP8; beside it, in `plain`, what its numbers mean."""
    write_model(folder, kind)
    shutil.copytree(folder, folder.with_name("plain"))
    tensors = load_file(folder / "model.safetensors")
    plain = dict(tensors)
    for key, weight in plain.items():
        if is_quantized(key, weight) and skipped not in key:
            matrix = quantise(weight)
            tensors[key], tensors[f"{key}_scale_inv"] = matrix
            plain[key] = matrix.dequantised(torch.float32)
    write(folder, tensors)
    write(folder.with_name("plain"), plain)
    table = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    change_config(folder, quantization_config=table)
    return tensors


def make_mxfp4(folder: Path) -> Tensors:
    """Write a checkpoint of gpt-oss whose experts are packed."""
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 96}
    config = AutoConfig.for_model("gpt_oss", **ATTENTION | sizes)
    auto: Any = AutoModelForCausalLM
    torch.manual_seed(4)
    auto.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    byte_tokenizer(300, 256).save_pretrained(folder)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(3)
    for key in [*tensors]:
        if key.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = tensors.pop(key).shape
            shape = experts, outputs, inputs // 32
            values = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(119, 122, shape, dtype=torch.uint8, generator=generator)
            tensors |= {f"{key}_blocks": values, f"{key}_scales": scales}
    write(folder, tensors)
    change_config(folder, quantization_config={"quant_method": "mxfp4"})
    return tensors


@pytest.fixture
def stays_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have weights stay quantized on the CPU, as on a GPU."""

    def method(quantization: Quantization | None, *_: object) -> str | None:
        return None if quantization is None else quantization.method

    monkeypatch.setattr(loader, "method_for", method)


def load(folder: Path) -> LoadedModel:
    return find_model(str(folder), device="cpu", dtype="float32").load()


def logits_of(loaded: LoadedModel) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(300, (90,), generator=generator).tolist()
    return run_paged(loaded, ids).float()


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Compare by the root mean square: what is rounded otherwise may change a number in FP8."""
    error = (found - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert float(error) < 0.05


def rounded(rows: Tensor) -> Tensor:
    """Return what is left of rows in FP8."""
    groups = rows.float().view(*rows.shape[:-1], -1, BLOCK)
    scales = groups.abs().amax(-1, keepdim=True) / 448
    return ((groups / scales).to(torch.float8_e4m3fn).float() * scales).flatten(-2)


def logits_with_rounded_rows(plain: LoadedModel, quantized: LoadedModel) -> Tensor:
    """Compute in transformers' own code with dequantised weights, and rows as FP8 leaves them."""
    for path, _ in quantized_paths(quantized.model):
        module: Any = plain.model.get_submodule(path)

        def linear(rows: Tensor, module: Any = module) -> Tensor:
            return F.linear(rounded(rows), module.weight.float()).to(rows.dtype)

        def experts(rows: Tensor, ids: Tensor, weights: Tensor, module: Any = module) -> Tensor:
            out = torch.zeros(rows.shape)
            for token, row in enumerate(rounded(rows)):
                for expert, weight in zip(ids[token], weights[token].float(), strict=True):
                    gate, up = (module.gate_up_proj[expert].float() @ row).chunk(2)
                    inner = rounded((F.silu(gate) * up).to(rows.dtype))
                    out[token] += weight * (module.down_proj[expert].float() @ inner)
            return out.to(rows.dtype)

        module.forward = linear if isinstance(module, nn.Linear) else experts
    return logits_of(dataclasses.replace(plain, fused=None))


@pytest.mark.usefixtures("stays_quantized")
@pytest.mark.parametrize("kind", FAMILIES)
def test_fp8_weights_are_multiplied_as_they_are_stored(kind: str, tmp_path: Path) -> None:
    tensors = make_fp8(tmp_path / "model", kind)
    loaded = load(tmp_path / "model")
    assert len([*quantized_paths(loaded.model)]) == NUM_KEPT[kind]
    assert (loaded.fused is None) == (kind == "granite")
    for path, _ in quantized_paths(loaded.model):
        module: Any = loaded.model.get_submodule(path)
        if isinstance(module, QuantizedLinear):
            assert torch.equal(module.weight.float(), tensors[f"{path}.weight"].float())
            assert torch.equal(module.scales, tensors[f"{path}.weight_scale_inv"])
            continue
        for expert in range(4):
            gate, up, down = (
                tensors[f"{path}.{expert}.{part}_proj.weight"].float()
                for part in ("gate", "up", "down")
            )
            assert torch.equal(module.gate_up_proj[expert].float(), torch.cat([gate, up]))
            assert torch.equal(module.down_proj[expert].float(), down)
            scales = tensors[f"{path}.{expert}.up_proj.weight_scale_inv"]
            assert torch.equal(module.gate_up_proj_scales[expert, 1:], scales)
    expected = logits_with_rounded_rows(load(tmp_path / "plain"), loaded)
    assert_near(logits_of(loaded), expected)


@pytest.mark.usefixtures("stays_quantized")
def test_a_wrong_scale_shows_in_the_logits(tmp_path: Path) -> None:
    tensors = make_fp8(tmp_path / "model", "qwen3")
    key = "model.layers.3.self_attn.v_proj.weight_scale_inv"
    tensors[key] = tensors[key] * 1.5
    write(tmp_path / "model", tensors)
    loaded = load(tmp_path / "model")
    expected = logits_with_rounded_rows(load(tmp_path / "plain"), loaded)
    with pytest.raises(AssertionError):
        assert_near(logits_of(loaded), expected)


@pytest.mark.usefixtures("stays_quantized")
def test_matrices_that_are_merged_stay_quantized_together_or_not_at_all(tmp_path: Path) -> None:
    make_fp8(tmp_path / "model", "qwen3", skipped="layers.1.self_attn.k_proj")
    loaded = load(tmp_path / "model")
    kept = {path for path, _ in quantized_paths(loaded.model) if "layers.1.self_attn" in path}
    assert kept == {"model.layers.1.self_attn.o_proj"}
    assert loaded.fused is not None
    expected = logits_with_rounded_rows(load(tmp_path / "plain"), loaded)
    assert_near(logits_of(loaded), expected)


@pytest.mark.usefixtures("stays_quantized")
def test_mxfp4_experts_are_multiplied_as_they_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = make_mxfp4(tmp_path / "model")
    loaded = load(tmp_path / "model")
    assert loaded.fused is not None
    paths = dict(quantized_paths(loaded.model))
    assert paths == {f"model.layers.{layer}.mlp.experts": "mxfp4" for layer in range(4)}
    for path in paths:
        module: Any = loaded.model.get_submodule(path)
        assert torch.equal(module.down_proj, tensors[f"{path}.down_proj_blocks"].flatten(2))
        assert torch.equal(module.gate_up_proj_scales, tensors[f"{path}.gate_up_proj_scales"])
    found = logits_of(loaded)
    monkeypatch.undo()
    plain = load(tmp_path / "model")
    assert plain.fingerprint != loaded.fingerprint  # which names the arithmetic
    error = (found - logits_of(plain)).abs().max() / found.abs().max()
    assert float(error) < 0.02  # the numbers are the same, their sums may be rounded otherwise


@pytest.mark.usefixtures("stays_quantized")
@pytest.mark.parametrize("kind", ["qwen3_5_moe_text", "gpt_oss"])
def test_random_weights_are_drawn_as_they_are_stored(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table: dict[str, Any] = {"quant_method": "mxfp4"}
    sizes: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
    if kind != "gpt_oss":
        sizes = FAMILIES[kind]
        skipped = [*UNQUANTIZED, "model.language_model.layers.0.linear_attn.out_proj"]
        table = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
        table |= {"modules_to_not_convert": skipped}
    AutoConfig.for_model(kind, **ATTENTION | sizes).save_pretrained(tmp_path)
    change_config(tmp_path, quantization_config=table)
    name = f"random:{tmp_path}"
    loaded = find_model(name, device="cpu", dtype="bfloat16").load()
    kept = {path for path, _ in quantized_paths(loaded.model)}
    assert len(kept) == (4 if kind == "gpt_oss" else NUM_KEPT[kind] - 1)
    assert "model.layers.0.linear_attn.out_proj" not in kept
    form = Mxfp4Matrix if kind == "gpt_oss" else Fp8Matrix
    matrices = [form(*pair) for pair in quantized_parameters(loaded.model)]
    drawn = torch.cat([matrix.dequantised(torch.float32).flatten() for matrix in matrices])
    assert float(drawn.std()) == pytest.approx(0.02, rel=0.2)
    again = find_model(name, device="cpu", dtype="bfloat16")
    assert again.find_fingerprint() == loaded.fingerprint
    monkeypatch.undo()
    plain = find_model(name, device="cpu", dtype="bfloat16").load()
    assert plain.fingerprint != loaded.fingerprint
    assert not [*quantized_paths(plain.model)]
    buffers = dict(plain.model.named_buffers())
    for key, buffer in loaded.model.named_buffers():
        assert torch.equal(buffer, buffers[key]), key


def test_weights_stay_quantized_only_where_products_can_be_computed_as_such() -> None:
    blocks, cpu = Quantization("fp8", (BLOCK, BLOCK)), torch.device("cpu")
    assert method_for(blocks, cpu, "bfloat16") is None
    assert method_for(Quantization("mxfp4"), cpu, "bfloat16") is None
    gpu = torch.device("cuda")
    assert method_for(Quantization("mxfp4"), gpu, "bfloat16") == "mxfp4"
    assert method_for(Quantization("mxfp4"), gpu, "float32") is None
    assert method_for(Quantization("fp8", (64, 64)), gpu, "bfloat16") is None
    assert method_for(None, gpu, "bfloat16") is None
