"""What is tried before the first request: paging, memory, and warming up."""

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch

from tests.engine.conftest import write_checkpoint
from tests.engine.harness import BLOCK_SIZE, Harness, limits_of, record
from tests.golden import refused
from tieredkv.engine import profile
from tieredkv.engine.attention import AttentionContext
from tieredkv.engine.loader import find_model
from tieredkv.engine.profile import (
    check_paging,
    count_fitting_blocks,
    load_kernels,
    measure_peak_bytes,
    step_seconds,
    time_steps,
    warm_up,
)
from tieredkv.engine.step_buffers import idle_row
from tieredkv.errors import ModelError


def test_warming_up_writes_nothing_and_reports_progress(checkpoints: Any) -> None:
    harness = Harness(find_model(str(checkpoints("llama")), device="cpu").load())
    seen: list[tuple[str, int, int]] = []
    warm_up(harness.runner, lambda *report: seen.append(report))
    assert seen[-1] == ("warming up", 1, 1)
    assert harness.pool.isnan().all()


def test_warming_up_a_gpu_captures_short_steps_and_leaves_the_runner_with_those_graphs(
    checkpoints: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(find_model(str(checkpoints("llama")), device="cpu").load())
    runner, gpu, seen = harness.runner, torch.device("cuda"), list[tuple[str, int, int]]()
    for name in ("CUDAGraph", "graph", "graph_pool_handle", "current_stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    runner.loaded = dataclasses.replace(runner.loaded, device=gpu)  # which only warming up asks
    monkeypatch.setattr(profile, "step_seconds", lambda _runner, steps, _row: float(bool(steps)))
    warm_up(runner, lambda *report: seen.append(report))
    stages = ["warming up", "loading kernels", "timing long steps", "capturing CUDA graphs"]
    assert list(dict.fromkeys(stage for stage, *_ in seen)) == stages
    assert max(runner.graphs) == (512, "mixed")
    decode = [size for size, kind in runner.graphs if kind == "decode"]
    assert decode == [64, 56, 48, 40, 32, 24, 16, 8, 4, 2, 1]
    assert {graph.buffers.max_tokens for graph in runner.graphs.values()} == {512}
    assert runner.execute([idle_row(1, 0)]).logits.shape == (1, 300)
    assert harness.pool.isnan().all()


def test_a_step_is_timed_from_an_idle_device_to_an_idle_device_with_the_given_graphs() -> None:
    runner, steps, row, done = Mock(), Mock(), idle_row(600, 0), list[Any]()
    runner.synchronize.side_effect = lambda: done.append("idle")
    runner.execute.side_effect = lambda rows: done.append((runner.graphs, rows))
    assert step_seconds(runner, steps, row) >= 0
    assert done == ["idle", (steps, [row]), "idle"] * 2
    assert runner.graphs == {}


@pytest.mark.parametrize("is_fused", [True, False])
def test_kernels_are_loaded_with_two_layers_for_every_size_that_is_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_fused: bool
) -> None:
    write_checkpoint(tmp_path, "llama", max_position_embeddings=4096, num_hidden_layers=3)
    loaded = find_model(str(tmp_path), device="cpu").load()
    loaded = loaded if is_fused else dataclasses.replace(loaded, fused=None)
    harness = Harness(loaded, max_num_batched_tokens=600)
    runner, seen, attend = harness.runner, list[Any](), AttentionContext.attend
    monkeypatch.setattr(AttentionContext, "attend", record(seen, attend))
    load_kernels(runner, lambda *_: None)
    assert {layer for _, _, _, layer, *_ in seen} == {0, 1}
    sizes = {len(query) for _, query, *_ in seen}
    for num_tokens in range(513, 601, 5):
        seen.clear()
        others = [idle_row(1, 0)] * (num_tokens % 64)  # generate beside it
        runner.execute([idle_row(num_tokens, 0), *others])
        assert {layer for _, _, _, layer, *_ in seen} == {0, 1, 2}
        assert {len(query) for _, query, *_ in seen} <= sizes
    assert harness.pool.isnan().all()


@pytest.mark.parametrize(
    ("is_cpu", "most_tokens", "shapes"),
    [
        (False, 512, [(8, 0), (32, 0), (128, 0), (512, 0), (128, 872), (1, 0)]),
        (False, 2048, [(15, 0), (62, 0), (250, 0), (1000, 0), (250, 750), (1, 0)]),
        (True, 512, [(1, 0), (4, 0), (16, 0), (64, 0), (16, 984), (1, 0)]),
    ],
)
def test_steps_of_several_sizes_and_positions_teach_how_long_steps_take(
    is_cpu: bool, most_tokens: int, shapes: list[tuple[int, int]]
) -> None:
    runner, timer = Mock(), Mock()
    time_steps(runner, timer, most_tokens=most_tokens, max_model_len=1000, is_cpu=is_cpu)
    *first, last_place, alone = shapes
    expected = [(shape, teaches) for shape in first for teaches in (False, True)]
    expected += [(last_place, True), (alone, False), (alone, True)]
    rows = [(idle_row(*shape), teaches) for shape, teaches in expected]
    assert [call.args[0] for call in runner.execute.call_args_list] == [[row] for row, _ in rows]
    taught = [(call.args[0], call.kwargs["teaches"]) for call in timer.end.call_args_list]
    assert taught == [([row], teaches) for row, teaches in rows]
    assert timer.rate.doubt.call_count == 1


def test_a_model_that_mixes_tokens_outside_of_attention_is_refused(checkpoints: Any) -> None:
    loaded = find_model(str(checkpoints("llama")), device="cpu").load()
    loaded = dataclasses.replace(loaded, fused=None)
    spec = loaded.kv_spec(BLOCK_SIZE)
    check_paging(loaded, spec)
    layer: torch.nn.Module = loaded.model.get_submodule("model.layers.0")
    layer.register_forward_hook(lambda _module, _args, out: out + out.roll(1, dims=1))
    with refused(ModelError):
        check_paging(loaded, spec)


def test_models_beyond_the_tested_families_are_checked_before_they_serve(tmp_path: Path) -> None:
    config = {"model_type": "granite", "vocab_size": 300, "hidden_size": 64}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    (tmp_path / "config.json").write_text(json.dumps(config))
    harness = Harness(find_model(f"random:{tmp_path}", device="cpu").load())
    warm_up(harness.runner)
    layer: torch.nn.Module = harness.loaded.model.get_submodule("model.layers.0")
    layer.register_forward_hook(lambda _module, _args, out: out + out.roll(1, dims=1))
    with refused(ModelError):
        warm_up(harness.runner)


@pytest.mark.gpu
def test_the_pool_is_sized_from_what_steps_take() -> None:
    loaded = find_model("random:qwen3-0.6b", device="cuda").load()
    spec = loaded.kv_spec(16)
    limits = limits_of(loaded)
    assert measure_peak_bytes(loaded, spec, limits) > 64 * loaded.vocab_size * 4
    num_blocks = count_fitting_blocks(loaded, spec, limits, 0.5)
    total = torch.cuda.mem_get_info()[1]
    assert 0.3 * total < num_blocks * spec.block_bytes < 0.5 * total
