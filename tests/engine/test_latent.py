"""Models with latent attention (MLA): from every tier and in every batch, transformers' tokens.

The logits of each family are compared in test_families.py. Here, a wrong latent, rope, scale or
matrix is shown to be seen by that comparison.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForMultimodalLM

from tests.engine.harness import Harness, reference_model, reference_tokens
from tests.engine.logits import run_paged, run_transformers
from tests.engine.test_families import (
    FAMILIES,
    LATENT,
    LONG_ROPE,
    SMALL,
    make_config,
    write_checkpoint,
)
from tests.engine.test_tails import flush, generate, open_llm, tokens
from tests.levels import few
from tieredkv import SamplingParams
from tieredkv.engine.byte_tokenizer import byte_tokenizer
from tieredkv.engine.latent import has_latents
from tieredkv.engine.loader import find_model
from tieredkv.engine.profile import check_paging, warm_up
from tieredkv.engine.step_buffers import BatchRow
from tieredkv.errors import ModelError
from tieredkv.kernels import reference
from tieredkv.types import KVSpec, LayerKV, Tier

NAMES = few(["glm4_moe_lite", "mistral4", "deepseek_v2", "deepseek_v3", "minicpm3"], 2)
NUM_TOKENS = 12


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model_type, changes = FAMILIES[request.param]
    write_checkpoint(path, make_config(model_type, changes | {"max_position_embeddings": 1024}))
    return path


def test_a_layer_stores_a_latent_and_a_rotated_part_once(folder: Path) -> None:
    loaded = find_model(str(folder), device="cpu").load()
    spec = loaded.kv_spec(16)
    assert spec.layers == [LayerKV(1, 40, values_in_keys=True)] * 2
    assert (spec.token_elements, spec.page_bytes) == (80, 8192)  # 5,120 bytes, rounded up


def test_pages_of_published_models_have_the_bytes_of_their_latents() -> None:
    for num_layers, kib in ((47, 53), (27, 30.375)):
        layers = [LayerKV(1, 576, values_in_keys=True)] * num_layers
        spec = KVSpec(layers=layers, dtype="bfloat16", block_size=16)
        assert round(spec.token_bytes / 1024, 3) == pytest.approx(kib, abs=0.2)
        assert 0 <= spec.page_bytes - spec.block_bytes < 4096


@pytest.mark.parametrize("max_num_batched_tokens", few([37, 300, 64]))
def test_tokens_are_those_of_transformers_alone_and_in_a_batch(
    folder: Path, max_num_batched_tokens: int
) -> None:
    prompts = [tokens(length, seed=length) for length in (1, 17, 70, 131, 250)]
    expected = [reference_tokens(folder, prompt, NUM_TOKENS) for prompt in prompts]
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    with open_llm(folder, max_num_batched_tokens=max_num_batched_tokens) as llm:
        assert [answer.token_ids for answer in llm.generate(prompts, params)] == expected
    with open_llm(folder, max_num_batched_tokens=max_num_batched_tokens) as llm:
        assert [generate(llm, prompt)[0] for prompt in prompts] == expected
        assert [generate(llm, prompt)[0] for prompt in prompts] == expected  # hits in VRAM


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_a_hit_in_a_slower_tier_gives_the_tokens_of_transformers(
    folder: Path, tmp_path: Path, tier: Tier
) -> None:
    prompt, longer = tokens(301, seed=3), tokens(301, seed=3) + tokens(21, seed=4)
    expected = reference_tokens(folder, prompt, NUM_TOKENS)
    expected_longer = reference_tokens(folder, longer, NUM_TOKENS)
    options: dict[str, Any] = {"disk_dir": str(tmp_path / "store"), "disk_size": "64MiB"}
    options |= {"default_retention": "24h", "restore": "load"}
    with open_llm(folder, **options) as llm:
        assert generate(llm, prompt)[0] == expected
        flush(llm, tier)
        warm, usage = generate(llm, prompt)
        assert warm == expected
        assert usage.cached_tokens_by_tier[tier] == 288
        flush(llm, Tier.DISK)
    with open_llm(folder, **options) as llm:
        again, usage = generate(llm, longer)
        assert again == expected_longer
        assert usage.cached_tokens_by_tier[Tier.DISK] == 288


def test_parameters_keep_their_names_and_values_in_fused_steps(folder: Path) -> None:
    loaded = find_model(str(folder), device="cpu").load()
    expected = reference_model(folder).state_dict()
    found = loaded.model.state_dict()
    assert [*found] == [*expected]
    assert all(torch.equal(found[name], expected[name]) for name in found)
    own = [module for module in loaded.model.modules() if has_latents(module)]
    is_fused = loaded.config.model_type not in ("mistral4", "minicpm3")
    assert [not hasattr(module.forward, "__func__") for module in own] == [is_fused] * 2


def without_rotated(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return attention with zeros in place of the rotated part of what is stored."""

    def wrong(q: Tensor, context: Tensor, weights: Tensor, scale: float, latent: Any) -> Tensor:
        context = torch.cat([context[:, : latent.rank], 0 * context[:, latent.rank :]], dim=1)
        return attend(q, context, weights, scale, latent)

    return wrong


def with_other_scale(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def wrong(q: Tensor, context: Tensor, weights: Tensor, scale: float, latent: Any) -> Tensor:
        return attend(q, context, weights, 1.02 * scale, latent)

    return wrong


def with_other_heads(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def wrong(q: Tensor, context: Tensor, weights: Tensor, scale: float, latent: Any) -> Tensor:
        return attend(q, context, weights.roll(1, 0), scale, latent)

    return wrong


def with_a_late_latent(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return attention in which the second token's latent is that of the first one."""

    def wrong(q: Tensor, context: Tensor, weights: Tensor, scale: float, latent: Any) -> Tensor:
        context = torch.cat([context[:1], context[:1], context[2:]])[: len(context)]
        return attend(q, context, weights, scale, latent)

    return wrong


@contextmanager
def wrong_by(change: Callable[..., Any], way: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, way, change(getattr(reference, way)))
        yield


@pytest.mark.parametrize("way", ["attend_absorbed", "attend_expanded"])
@pytest.mark.parametrize(
    "change", [without_rotated, with_other_scale, with_other_heads, with_a_late_latent]
)
def test_what_would_be_wrong_would_be_seen(
    folder: Path, change: Callable[..., Any], way: str
) -> None:
    ids = random.Random(7).choices(range(300), k=128)
    loaded = find_model(str(folder), device="cpu", max_context_len=128).load()
    expected = run_paged(loaded, ids)
    with wrong_by(change, way):
        error = (run_paged(loaded, ids) - expected).abs().max()
    assert error > 1e-3 * expected.abs().max()


def test_check_paging_passes_and_sees_latents_that_are_not_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = find_model(str(folder), device="cpu").load()
    check_paging(loaded, loaded.kv_spec(16))
    store = reference.store_latents

    def lossy(latent: Tensor, rotated: Tensor, cache: Tensor, slots: Tensor) -> None:
        # The prompt in one piece has 24 tokens, and so have both prompts' last halves.
        store(latent, rotated, cache, slots if len(latent) == 24 else torch.full_like(slots, -1))

    monkeypatch.setattr(reference, "store_latents", lossy)
    with pytest.raises(ModelError):
        check_paging(loaded, loaded.kv_spec(16))


def test_the_text_of_a_multimodal_checkpoint_with_latent_attention(tmp_path: Path) -> None:
    text = SMALL | LATENT | {"model_type": "mistral4", "rope_parameters": LONG_ROPE}
    vision = {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
    vision |= {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    config = AutoConfig.for_model("mistral3", text_config=text, vision_config=vision)
    auto: Any = AutoModelForMultimodalLM
    with torch.random.fork_rng():
        whole = auto.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(5)
    for tensor in whole.state_dict().values():
        if tensor.is_floating_point():
            mean, std = (0.0, 0.2) if tensor.ndim > 1 else (0.7, 0.3)
            tensor.normal_(mean, std, generator=generator)
    whole.save_pretrained(tmp_path)
    byte_tokenizer(300, 128).save_pretrained(tmp_path)
    ids = random.Random(7).choices(range(300), k=128)
    expected = run_transformers(whole, ids)
    loaded = find_model(str(tmp_path), device="cpu").load()
    assert (run_paged(loaded, ids) - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert [layer.latent is not None for layer in loaded.attention] == [True, True]


@pytest.mark.gpu
def test_on_the_gpu_replayed_steps_give_the_tokens_of_transformers(folder: Path) -> None:
    harness = Harness(find_model(str(folder), dtype="float32", device="cuda").load())
    warm_up(harness.runner)
    ids = tokens(77, seed=1)
    expected = reference_tokens(folder, ids, 20)
    assert harness.generate(ids, 20, [40, 1, 36])[:8] == expected[:8]


@pytest.mark.gpu
@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("dims", [(128, 64, 128), (192, 64, 256)])
def test_on_the_gpu_errors_of_long_and_short_chunks_are_no_more_than_twice_those_of_transformers(
    tmp_path: Path, dims: tuple[int, int, int], is_warm: bool
) -> None:
    key_dim, rope_dim, value_dim = dims
    sizes = {"qk_nope_head_dim": key_dim, "qk_rope_head_dim": rope_dim, "v_head_dim": value_dim}
    sizes |= {"kv_lora_rank": 512, "first_k_dense_replace": 2, "max_position_embeddings": 4096}
    write_checkpoint(tmp_path, make_config("deepseek_v3", LATENT | sizes))
    ids = tokens(3300, seed=11)
    batch = torch.tensor([ids], device="cuda")
    with torch.inference_mode():
        exact = reference_model(tmp_path, device="cuda")(batch).logits[0].float()
        theirs = reference_model(tmp_path, torch.bfloat16, "cuda")(batch).logits[0].float()
    loaded = find_model(str(tmp_path), dtype="bfloat16", device="cuda").load()
    harness = Harness(loaded, num_blocks=256)
    if is_warm:
        warm_up(harness.runner)
    table, start, bound = harness.table(len(ids)), 0, 2 * (theirs - exact).abs().mean()
    for chunk in (1500, 300, 1400, 1, 99):
        row = BatchRow(ids[start : start + chunk], start, table, all_logits=chunk < 500)
        logits = harness.runner.execute([row]).logits
        start += chunk
        assert (logits - exact[start - len(logits) : start]).abs().mean() <= bound, chunk
