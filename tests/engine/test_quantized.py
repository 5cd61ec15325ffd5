"""Quantized weights are read as what their numbers and scales mean, or refused in one sentence."""

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.engine.conftest import write_checkpoint
from tests.engine.harness import Harness, reference_tokens
from tests.engine.test_families import LATENT, make_config
from tests.engine.test_families import write_checkpoint as write_family_checkpoint
from tests.golden import refused, told
from tieredkv.engine.llm import LLM
from tieredkv.engine.loader import LoadedModel, find_model
from tieredkv.engine.quantized import Block, Quantization, dequantised
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.engine.text_model import text_config
from tieredkv.engine.weights import find_weight_files, load_weights
from tieredkv.errors import ModelError
from tieredkv.types import Tier

Tensors = dict[str, Tensor]
FP8_MAX = 448.0
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "head_dim": 16,
    "norm_topk_prob": True,
}
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Close what a test opens."""
    with ExitStack() as opened:
        yield opened


def slices(tensors: Tensors, folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Write tensors and return their slices, as a checkpoint has them."""
    save_file(tensors, folder / "some.safetensors")
    file = stack.enter_context(safe_open(folder / "some.safetensors", framework="pt"))
    return {key: file.get_slice(key) for key in tensors}


def grid_of(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    *others, rows, columns = shape
    return (*others, -(-rows // block[0]), -(-columns // block[1]))


def spread(scales: Tensor, shape: tuple[int, ...], block: tuple[int, int]) -> Tensor:
    """Give each number of a weight its scale, one index at a time."""
    rows = torch.tensor([row // block[0] for row in range(shape[-2])])
    columns = torch.tensor([column // block[1] for column in range(shape[-1])])
    grid = scales.float().reshape(grid_of(shape, block))
    return grid[..., rows, :][..., columns]


def quantise(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return a weight in FP8, the scales of its blocks, and what they mean in float32."""
    generator = torch.Generator().manual_seed(weight.numel())
    grid = grid_of(tuple(weight.shape), block)
    scales = (0.5 + torch.rand(grid, generator=generator)) * weight.abs().amax() / FP8_MAX
    whole = spread(scales, tuple(weight.shape), block)
    stored = (weight / whole).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return stored, scales, stored.float() * whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(300, 200), (128, 128), (5, 130), (700, 64), (3, 150, 200)])
@pytest.mark.parametrize("kind", ["block", "row", "tensor"])
def test_fp8_weights_are_dequantised_bit_for_bit(
    tmp_path: Path, stack: ExitStack, kind: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    blocks = {"block": (128, 128), "row": (1, shape[-1]), "tensor": (shape[-2], shape[-1])}
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    stored, scales, expected = quantise(weight, blocks[kind])
    block: Block = (128, 128) if kind == "block" else None
    for told_block in (block, "any"):
        opened = slices({"a.weight": stored, "a.weight_scale_inv": scales}, tmp_path, stack)
        found = dequantised("m", opened, Quantization("fp8", told_block), dtype).tensors
        assert found.keys() == {"a.weight"}
        assert tuple(found["a.weight"].get_shape()) == shape
        assert torch.equal(found["a.weight"][...], expected.to(dtype))


def test_every_byte_in_fp8_means_its_number(tmp_path: Path, stack: ExitStack) -> None:
    stored = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(16, 16)
    opened = slices({"a": stored, "a_scale": torch.ones(())}, tmp_path, stack)
    found = dequantised("m", opened, Quantization("fp8"), torch.float32).tensors["a"][...]
    assert torch.equal(found.nan_to_num(7e9), stored.float().nan_to_num(7e9))


class Watched:
    """A slice that keeps how many numbers were read at a time."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.reads = tensor, list[int]()

    def get_shape(self) -> list[int]:
        return [*self.tensor.shape]

    def get_dtype(self) -> str:
        return {torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8"}.get(self.tensor.dtype, "F32")

    def __getitem__(self, index: Any) -> Tensor:
        part = self.tensor[index]
        self.reads.append(part.numel())
        return part


@pytest.mark.parametrize("block", [(128, 128), (1, 64), (1024, 64)])
def test_a_weight_is_read_in_pieces_of_some_rows(block: tuple[int, int]) -> None:
    weight = Watched(torch.ones(1024, 64).to(torch.float8_e4m3fn))
    scales = Watched(torch.ones(grid_of((1024, 64), block)))
    quantization = Quantization("fp8", block if block == (128, 128) else None)
    tensors = {"a": weight, "a_scale_inv": scales}
    found = dequantised("m", tensors, quantization, torch.float32).tensors["a"]
    assert weight.reads == []
    found[...]
    assert sum(weight.reads) == 1024 * 64
    assert max(weight.reads) <= 256 * 64


def packed(shape: tuple[int, int, int], seed: int = 3) -> tuple[Tensor, Tensor]:
    """Draw packed experts: every byte, and scales of very different size."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(110, 130, shape, dtype=torch.uint8, generator=generator)


def test_mxfp4_experts_are_dequantised_as_transformers_does(
    tmp_path: Path, stack: ExitStack
) -> None:
    blocks, scales = packed((3, 40, 5))
    scales[0, 0, 0], scales[0, 0, 1] = 0, 254  # the smallest and the largest number
    opened = slices({"e_blocks": blocks, "e_scales": scales}, tmp_path, stack)
    found = dequantised("m", opened, Quantization("mxfp4"), torch.bfloat16).tensors
    assert found.keys() == {"e"}
    assert tuple(found["e"].get_shape()) == (3, 160, 40)
    assert torch.equal(found["e"][...], convert_moe_packed_tensors(blocks, scales))


def test_mxfp4_experts_are_read_one_by_one() -> None:
    blocks, scales = map(Watched, packed((4, 8, 2)))
    tensors = {"e_blocks": blocks, "e_scales": scales}
    found = dequantised("m", tensors, Quantization("mxfp4"), torch.bfloat16).tensors
    found["e"][...]
    assert blocks.reads == [8 * 2 * 16] * 4


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def read(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def write(folder: Path, tensors: Tensors) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def make_fp8(folder: Path, kind: str, **changes: Any) -> Path:
    """Quantise the linear layers of a checkpoint; return one with what the numbers mean."""
    plain = folder.with_name(f"{folder.name}-dequantised")
    shutil.copytree(folder, plain)
    tensors, meant = read(folder), read(folder)
    for key, weight in meant.copy().items():
        if not key.endswith("_proj.weight"):
            continue
        rows, columns = weight.shape
        block = {"block": (32, 40), "row": (1, columns), "tensor": (rows, columns)}[kind]
        tensors[key], scales, meant[key] = quantise(weight, block)
        suffix, shape = {
            "block": ("_scale_inv", scales.shape),
            "row": ("_scale", (rows, 1)),
            "tensor": ("_scale_inv", ()),
        }[kind]
        tensors[key + suffix] = scales.reshape(shape)
        if kind == "tensor":
            tensors[key.replace(".weight", ".activation_scale")] = torch.ones(())
    write(folder, tensors)
    write(plain, meant)
    told_block = {"weight_block_size": [32, 40] if kind == "block" else None}
    activations = {"activation_scheme": "static" if kind == "tensor" else "dynamic"}
    skipped = {"modules_to_not_convert": ["lm_head"]}
    table = {"quant_method": "fp8"} | told_block | activations | skipped | changes
    change_config(folder, quantization_config=table)
    return plain


def load(folder: Path, **options: Any) -> LoadedModel:
    return find_model(str(folder), device="cpu", **options).load()


def check_meant(model: Any, meant: Tensors) -> None:
    """Verify that parameters of a model are what their numbers and scales mean."""
    for key, weight in meant.items():
        assert torch.equal(model.get_parameter(key), weight), key


@pytest.mark.parametrize("kind", ["block", "row", "tensor"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_an_fp8_checkpoint_is_the_model_of_its_dequantised_weights(
    tmp_path: Path, family: str, kind: str
) -> None:
    folder = tmp_path / "model"
    write_family(folder, family)
    plain = make_fp8(folder, kind)
    loaded, expected = load(folder).model.state_dict(), load(plain).model.state_dict()
    assert loaded.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(loaded[key], tensor), key
    before = load_file(folder / "model.safetensors")
    assert any(it.dtype == torch.float8_e4m3fn for it in before.values())


def write_family(folder: Path, family: str) -> None:
    write_checkpoint(folder, family, **(EXPERTS if family == "qwen3_moe" else {}))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_tokens_of_an_fp8_checkpoint_are_those_of_transformers(
    tmp_path: Path, family: str
) -> None:
    folder = tmp_path / "model"
    write_family(folder, family)
    plain, ids = make_fp8(folder, "block"), [*range(20, 97)]
    expected = reference_tokens(plain, ids, 12)
    harness = Harness(load(folder), num_blocks=16)
    assert harness.generate(ids, 12, [40, 37]) == expected
    assert len({*expected}) > 2  # the model does not repeat one token


def test_the_log_tells_what_was_dequantised_and_what_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    write_checkpoint(folder, "llama")
    make_fp8(folder, "tensor")
    with caplog.at_level(logging.INFO, "tieredkv.engine.weights"):
        load(folder)
    for record in caplog.records:
        if record.name == "tieredkv.engine.weights":
            told(record.getMessage(), hide={str(folder): "FOLDER"})


def test_static_scales_of_merged_experts_are_not_used(tmp_path: Path) -> None:
    """Experts that are stored together have names without `.weight`, and so have their scales."""
    folder = tmp_path / "model"
    write_family_checkpoint(folder, make_config("mistral4", LATENT))
    tensors, meant = read(folder), {}
    for key in [key for key in tensors if ".experts." in key]:
        rows, columns = tensors[key].shape[1:]
        tensors[key], tensors[f"{key}_scale_inv"], meant[key] = quantise(
            tensors[key], (rows, columns)
        )
        tensors[f"{key}_activation_scale"] = torch.ones(4)
    write(folder, tensors)
    table = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}
    change_config(folder, quantization_config=table)
    assert len(meant) == 4
    check_meant(load(folder).model, meant)


def test_tensors_that_the_class_ignores_need_no_scales(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fp8_folder(tmp_path)
    tensors = read(folder)
    write(folder, tensors | {"mtp.up_proj.weight": tensors[UP].clone()})
    refuse(folder)
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"^mtp\."])
    load(folder)


def fp8_folder(tmp_path: Path, kind: str = "block") -> Path:
    folder = tmp_path / "model"
    write_checkpoint(folder, "llama")
    make_fp8(folder, kind)
    return folder


def refuse(folder: Path) -> None:
    """Expect that a checkpoint is refused before anything is loaded, with the text of the test."""
    with refused(ModelError, hide={str(folder): "FOLDER"}):
        find_model(str(folder), device="cpu")


def lose_a_row(tensors: Tensors) -> None:
    tensors[f"{UP}_scale_inv"] = tensors[f"{UP}_scale_inv"][:-1].clone()


def swap_sides(tensors: Tensors) -> None:
    tensors[f"{UP}_scale_inv"] = tensors[f"{UP}_scale_inv"].T.contiguous()


def lose_all(tensors: Tensors) -> None:
    del tensors[f"{UP}_scale_inv"]


def store_bytes(tensors: Tensors) -> None:
    tensors[f"{UP}_scale_inv"] = tensors[f"{UP}_scale_inv"].to(torch.uint8)


def store_other_eight_bits(tensors: Tensors) -> None:
    tensors[UP] = tensors[UP].float().to(torch.float8_e5m2)


@pytest.mark.parametrize(
    "change", [lose_a_row, swap_sides, lose_all, store_bytes, store_other_eight_bits]
)
def test_scales_that_do_not_fit_are_refused_by_name(tmp_path: Path, change: Any) -> None:
    folder = fp8_folder(tmp_path)
    tensors = read(folder)
    change(tensors)
    write(folder, tensors)
    refuse(folder)


def test_a_scale_too_many_is_refused_by_name(tmp_path: Path) -> None:
    folder = fp8_folder(tmp_path)
    write(folder, read(folder) | {"model.norm.weight_scale_inv": torch.ones(1)})
    with refused(ModelError, hide={str(folder): "FOLDER"}):
        load(folder)


@pytest.mark.parametrize("shape", [(2,), (96, 2), (3, 2)])
def test_scales_a_row_or_a_tensor_must_be_as_many(tmp_path: Path, shape: tuple[int, ...]) -> None:
    folder = fp8_folder(tmp_path, "row")
    write(folder, read(folder) | {f"{UP}_scale": torch.ones(shape)})
    refuse(folder)


@pytest.mark.parametrize("size", [[128], [0, 128], "128x128"])
def test_a_block_size_is_two_positive_numbers(tmp_path: Path, size: object) -> None:
    folder = fp8_folder(tmp_path)
    change_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": size})
    refuse(folder)


@pytest.mark.parametrize("shape", [(2, 8, 3), (2, 8, 2, 1)])
def test_mxfp4_scales_must_be_one_for_each_16_bytes(
    tmp_path: Path, stack: ExitStack, shape: tuple[int, ...]
) -> None:
    tensors = {"e_blocks": packed((2, 8, 2))[0], "e_scales": torch.ones(shape, dtype=torch.uint8)}
    opened = slices(tensors, tmp_path, stack)
    with refused(ModelError):
        dequantised("m", opened, Quantization("mxfp4"), torch.bfloat16)
    del opened["e_scales"]
    with refused(ModelError):
        dequantised("m", opened, Quantization("mxfp4"), torch.bfloat16)


@pytest.mark.parametrize(
    "table",
    [
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"bits": 4},
    ],
    ids=lambda table: str(table.get("quant_method")),
)
def test_other_quantizations_are_refused_with_what_would_do(
    tmp_path: Path, table: dict[str, Any]
) -> None:
    folder = tmp_path / "model"
    write_checkpoint(folder, "llama")
    change_config(folder, quantization_config=table)
    refuse(folder)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("hf_quant_config.json", '{"quantization": {"quant_algo": "NVFP4"}}'),
        ("hf_quant_config.json", "damaged"),
        ("quantize_config.json", '{"bits": 4}'),
        ("quant_config.json", "[]"),
    ],
)
def test_other_quantizations_are_refused_by_the_files_of_their_tools(
    tmp_path: Path, file: str, text: str
) -> None:
    folder = tmp_path / "model"
    write_checkpoint(folder, "llama")
    (folder / file).write_text(text)
    refuse(folder)


def test_the_fingerprint_covers_scales_and_names_the_arithmetic(tmp_path: Path) -> None:
    folder = fp8_folder(tmp_path)
    plain = folder.with_name("model-dequantised")

    def fingerprint(path: Path, **options: Any) -> bytes:
        return find_model(str(path), device="cpu", **options).find_fingerprint()

    first = fingerprint(folder)
    assert load(folder).fingerprint == first
    assert fingerprint(folder, dtype="bfloat16") != first
    assert fingerprint(plain, dtype="bfloat16") == fingerprint(plain) != first
    tensors = read(folder)
    tensors[f"{UP}_scale_inv"][0, 0] *= 2
    write(folder, tensors)
    assert fingerprint(folder) != first


def test_blocks_of_an_fp8_checkpoint_are_found_after_a_restart_and_by_no_other(
    tmp_path: Path,
) -> None:
    folder = fp8_folder(tmp_path)
    sizes: Any = {"device": "cpu", "device_size": "4MiB", "host_size": "1MiB", "disk_size": "64MiB"}
    sizes |= {"disk_dir": str(tmp_path / "store"), "retention": "24h", "restore": "load"}
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)

    def answer(path: Path) -> tuple[list[int], int]:
        with LLM(str(path), block_size=16, **sizes) as llm:
            [told] = llm.serve([llm.make_request([*range(20, 90)], params)])
        return told.token_ids, told.usage.cached_tokens_by_tier[Tier.DISK]

    first = answer(folder)
    assert first[1] == 0
    assert answer(folder) == (first[0], 64)
    assert answer(folder.with_name("model-dequantised")) == (first[0], 0)


def test_the_experts_of_gpt_oss_are_loaded_from_mxfp4(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    config = AutoConfig.for_model("gpt_oss", vocab_size=300, pad_token_id=None, **sizes, **heads)
    auto: Any = AutoModelForCausalLM
    auto.from_config(config).save_pretrained(tmp_path)
    tensors, expected = read(tmp_path), {}
    for layer in range(2):
        for part, shape in (("gate_up", (4, 64, 2)), ("down", (4, 64, 1))):
            key = f"model.layers.{layer}.mlp.experts.{part}_proj"
            del tensors[key]
            blocks, scales = packed(shape, layer)
            tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
            expected[key] = convert_moe_packed_tensors(blocks, scales)
    write(tmp_path, tensors)
    change_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    whole = AutoConfig.from_pretrained(tmp_path)
    config, files = text_config("m", whole), find_weight_files("m", tmp_path)
    how: Any = {"dtype": torch.bfloat16, "device": torch.device("cpu")}
    model = load_weights("m", config, files, whole=whole, **how)
    for key, tensor in expected.items():
        assert torch.equal(model.get_parameter(key), tensor), key
