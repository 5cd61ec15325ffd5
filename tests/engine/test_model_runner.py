"""The paged engine against transformers' own generation, token for token and logit for logit."""

import dataclasses
import itertools
import json
import math
import random
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.engine.conftest import write_checkpoint
from tests.golden import refused
from tieredkv.config import Dtype
from tieredkv.engine import model_runner
from tieredkv.engine.attention import AttentionContext
from tieredkv.engine.loader import LoadedModel, find_model
from tieredkv.engine.model_runner import (
    ModelRunner,
    check_paging,
    choose_size,
    fresh_size,
    launched_size,
    launched_sizes,
    make_kv_pool,
    num_device_blocks,
    profile_peak_bytes,
    sizes_that_pay,
)
from tieredkv.engine.step_buffers import BatchRow, BlockTables, pending
from tieredkv.errors import ModelError
from tieredkv.kernels import prefill_dense

BLOCK_SIZE = 16
NUM_BLOCKS = 64


class Harness:
    """A runner over a pool of shuffled blocks, a few requests, and no scheduler."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        poison: bool = True,
        num_blocks: int = NUM_BLOCKS,
        max_num_batched_tokens: int = 2048,
    ) -> None:
        self.loaded = loaded
        spec = loaded.kv_spec(BLOCK_SIZE)
        self.pool = make_kv_pool(spec, num_blocks, loaded.device)
        if poison:  # a slot that was never written must never be read
            self.pool.fill_(float("nan"))
        self.runner = ModelRunner(
            loaded, self.pool, spec, max_num_batched_tokens=max_num_batched_tokens
        )
        self._free = list(range(num_blocks))
        random.Random(5).shuffle(self._free)

    def table(self, num_tokens: int) -> "array[int]":
        return array("i", [self._free.pop() for _ in range(-(-num_tokens // BLOCK_SIZE))])

    def prefill(self, ids: list[int], table: "array[int]", chunks: list[int]) -> Tensor:
        start = 0
        for chunk in chunks:
            row = BatchRow(ids[start : start + chunk], start, table)
            logits = self.runner.execute([row]).logits
            start += chunk
        assert start == len(ids)
        return logits

    def generate(self, ids: list[int], num_tokens: int, chunks: list[int]) -> list[int]:
        table = self.table(len(ids) + num_tokens)
        logits = self.prefill(ids, table, chunks)
        out = [int(logits.argmax())]
        while len(out) < num_tokens:
            row = BatchRow(out[-1:], len(ids) + len(out) - 1, table)
            out.append(int(self.runner.execute([row]).logits.argmax()))
        return out


def record(calls: list[Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that notes the arguments of its calls."""

    def recorded(*args: Any) -> Any:
        calls.append(args)
        return function(*args)

    return recorded


def prompt(num_tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(10, 256), k=num_tokens)


def reference_model(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval().to(device)


def reference_tokens(folder: Path, ids: list[int], num_tokens: int) -> list[int]:
    out = reference_model(folder).generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [int(token) for token in out[0, len(ids) :]]


@pytest.mark.parametrize("chunks", [[77], [16, 32, 29], [1, 7, 33, 1, 35]])
def test_greedy_tokens_equal_those_of_transformers(
    family: str, checkpoints: Any, chunks: list[int]
) -> None:
    folder = checkpoints(family)
    harness = Harness(find_model(str(folder), device="cpu").load())
    ids = prompt(77, seed=1)
    tokens = harness.generate(ids, 40, chunks)
    assert tokens == reference_tokens(folder, ids, 40)
    assert len(set(tokens)) > 5


def test_padding_a_step_changes_no_token(family: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family, max_position_embeddings=1024)
    harness = Harness(find_model(str(tmp_path), device="cpu").load())
    ids = prompt(525, seed=1)
    assert harness.generate(ids, 8, [525]) == reference_tokens(tmp_path, ids, 8)


def test_logits_of_every_position_are_close(family: str, checkpoints: Any) -> None:
    folder = checkpoints(family)
    harness = Harness(find_model(str(folder), device="cpu").load())
    ids = prompt(130, seed=2)
    with torch.inference_mode():
        expected = reference_model(folder)(torch.tensor([ids])).logits[0]
    table = harness.table(len(ids))
    parts, start = [], 0
    for chunk in (50, 1, 79):
        row = BatchRow(ids[start : start + chunk], start, table, all_logits=True)
        parts.append(harness.runner.execute([row]).logits)
        start += chunk
    logits = torch.cat(parts)
    assert logits.dtype == torch.float32
    assert logits.shape == (130, 300)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_mixed_batches_give_each_row_what_it_gets_alone(family: str, checkpoints: Any) -> None:
    folder = checkpoints(family)
    loaded = find_model(str(folder), device="cpu").load()
    harness = Harness(loaded)
    prompts = [prompt(n, seed=n) for n in (21, 40, 17, 64)]
    tables = [harness.table(len(ids) + 1) for ids in prompts]
    for ids, table in zip(prompts, tables, strict=True):
        harness.prefill(ids[:16], table, [16])
    rows = [
        BatchRow(prompts[0][16:], 16, tables[0]),
        BatchRow(prompts[1][16:17], 16, tables[1]),
        BatchRow(prompts[2][16:], 16, tables[2], all_logits=True),
        BatchRow(prompts[3][16:30], 16, tables[3], needs_logits=False),
    ]
    logits = harness.runner.execute(rows).logits
    assert logits.shape == (3, 300)
    for row, got in zip((0, 1, 2), logits, strict=True):
        alone = Harness(loaded)
        ids = prompts[row][: rows[row].context_len]
        expected = alone.prefill(ids, alone.table(len(ids)), [len(ids)])
        torch.testing.assert_close(got, expected[0], atol=1e-4, rtol=1e-4)


def test_a_step_in_which_nobody_wants_logits_gives_none(checkpoints: Any) -> None:
    harness = Harness(find_model(str(checkpoints("llama")), device="cpu").load())
    row = BatchRow(prompt(20, seed=1), 0, harness.table(20), needs_logits=False)
    assert harness.runner.execute([row]).logits.shape == (0, 300)


def test_chunks_of_which_nobody_wants_logits_leave_their_keys_and_values(
    family: str, checkpoints: Any
) -> None:
    harness = Harness(find_model(str(checkpoints(family)), device="cpu").load())
    ids, tables = prompt(70, seed=8), [harness.table(70), harness.table(70)]
    for table, needs_logits in zip(tables, (True, False), strict=True):
        harness.runner.execute([BatchRow(ids[:50], 0, table, needs_logits=needs_logits)])
    expected, got = (
        harness.runner.execute([BatchRow(ids[50:], 50, table)]).logits for table in tables
    )
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_a_wholly_cached_prompt_recomputes_its_last_token_and_writes_nothing(
    checkpoints: Any,
) -> None:
    harness = Harness(find_model(str(checkpoints("qwen3")), device="cpu").load())
    ids = prompt(48, seed=4)
    table = harness.table(48)
    cold = harness.prefill(ids, table, [48])
    before = harness.pool.clone()
    warm = harness.runner.execute([BatchRow(ids[47:], 47, table, write_from=48)]).logits
    torch.testing.assert_close(warm, cold, atol=1e-5, rtol=1e-5)
    assert torch.equal(harness.pool.nan_to_num(), before.nan_to_num())


def test_write_from_spares_the_blocks_before_it(checkpoints: Any) -> None:
    harness = Harness(find_model(str(checkpoints("llama")), device="cpu").load())
    ids = prompt(40, seed=6)
    table = harness.table(40)
    cold = harness.prefill(ids, table, [40])
    harness.pool[table[1]] = harness.pool[table[1]] + 0.0  # the same bytes as before
    kept = harness.pool[table[1]].clone()
    harness.pool[table[2]] = float("nan")
    warm = harness.runner.execute([BatchRow(ids[20:], 20, table, write_from=32)]).logits
    torch.testing.assert_close(warm, cold, atol=1e-5, rtol=1e-5)
    assert torch.equal(harness.pool[table[1]], kept)
    assert not harness.pool[table[2]][:, :, :8].isnan().any()
    assert harness.pool[table[2]][:, :, 8:].isnan().all()


def test_two_runners_in_one_process_keep_their_pools_apart(checkpoints: Any) -> None:
    folders = [checkpoints("llama"), checkpoints("qwen2")]
    harnesses = [Harness(find_model(str(f), device="cpu").load()) for f in folders]
    ids = prompt(30, seed=8)
    tables = [harness.table(64) for harness in harnesses]
    last = [h.prefill(ids, t, [30]) for h, t in zip(harnesses, tables, strict=True)]
    outs: list[list[int]] = [[int(logits.argmax())] for logits in last]
    for step in range(10):
        for harness, table, out in zip(harnesses, tables, outs, strict=True):
            logits = harness.runner.execute([BatchRow(out[-1:], 30 + step, table)]).logits
            out.append(int(logits.argmax()))
    for folder, out in zip(folders, outs, strict=True):
        assert out == reference_tokens(folder, ids, 11)


def test_blocks_may_be_of_other_sizes(checkpoints: Any) -> None:
    folder = checkpoints("mistral")
    loaded = find_model(str(folder), device="cpu").load()
    spec = loaded.kv_spec(64)
    runner = ModelRunner(loaded, make_kv_pool(spec, 4, loaded.device), spec)
    ids = prompt(100, seed=9)
    logits = runner.execute([BatchRow(ids, 0, [3, 1])]).logits
    assert int(logits.argmax()) == reference_tokens(folder, ids, 1)[0]


def test_warming_up_writes_nothing_and_reports_progress(checkpoints: Any) -> None:
    harness = Harness(find_model(str(checkpoints("llama")), device="cpu").load())
    seen: list[tuple[str, int, int]] = []
    harness.runner.warm_up(lambda *report: seen.append(report))
    assert seen[-1] == ("warming up", 1, 1)
    assert harness.pool.isnan().all()


def test_launched_steps_are_padded_to_few_sizes() -> None:
    sizes = launched_sizes(16_384)
    assert (sizes[0], sizes[-1], len(sizes)) == (528, 16_384, 480)
    assert all(after - size <= max(16, size / 128) for size, after in itertools.pairwise(sizes))
    assert [launched_size(size) for size in (1, 512, *sizes)] == [1, 512, *sizes]
    assert launched_sizes(100) == []


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
    runner._load_kernels(lambda *_: None)
    assert {layer for _, _, _, layer, *_ in seen} == {0, 1}
    sizes = {len(query) for _, query, *_ in seen}
    for num_tokens in range(513, 601, 5):
        seen.clear()
        others = [runner.idle_row(1, 0)] * (num_tokens % 64)  # generate beside it
        runner.execute([runner.idle_row(num_tokens, 0), *others])
        assert {layer for _, _, _, layer, *_ in seen} == {0, 1, 2}
        assert {len(query) for _, query, *_ in seen} <= sizes
    assert harness.pool.isnan().all()


@pytest.mark.parametrize(
    ("num_tokens", "depth", "size"),
    [
        (1, 0, 16),
        (16, 9e9, 16),
        (17, 99, 0),
        (17, 100, 640),
        (640, 299, 640),
        (640, 300, 0),
        (640, 500, 640),
        (641, 200, 0),
    ],
)
def test_a_step_is_replayed_from_the_smallest_graph_where_that_is_the_faster_way(
    num_tokens: int, depth: float, size: int
) -> None:
    depths = {16: [(0.0, math.inf)], 640: [(100.0, 300.0), (500.0, math.inf)]}
    assert choose_size(depths, num_tokens, num_tokens * depth) == size
    assert choose_size({}, num_tokens, num_tokens * depth) == 0


def test_sizes_are_tried_with_the_shortest_step_until_one_pays_nowhere() -> None:
    tried, saved = [], {640: (1, 2, 3), 1088: (-1, 3, -6), 1408: (-1, -3, 0), 1792: (-2, -1, -1)}

    def saved_s(size: int, num_tokens: int, start: int) -> float:
        tried.append((size, num_tokens, start))
        return saved[size][(0, 2048, 8192).index(start)]

    found = sizes_that_pay([640, 1088, 1408, 1792, 2176], 513, 10_000, saved_s)
    assert found == {
        640: [(0.0, math.inf)],
        1088: [(641 / 2 + 2048 / 4, 641 / 2 + 2048 + 6144 / 3)],
        1408: [(1089 / 2 + 8192, math.inf)],
    }
    shortest = {640: 513, 1088: 641, 1408: 1089, 1792: 1409}  # 32768 is behind the context
    assert tried == [(*each, start) for each in shortest.items() for start in (0, 2048, 8192)]
    assert sizes_that_pay([640], 513, 512, saved_s) == {}


def test_a_size_that_cannot_be_captured_is_tried_once() -> None:
    tried = []

    def saved_s(*step: int) -> float:
        tried.append(step)
        return -math.inf

    assert sizes_that_pay([640, 1088], 513, 10_000, saved_s) == {}
    assert tried == [(640, 513, 0)]


def test_a_fresh_step_fits_its_graph_and_has_the_dense_part_that_the_graph_captured() -> None:
    for num_tokens in range(1024, 9000):
        size = fresh_size(num_tokens)
        dense_len = prefill_dense.count_queries(num_tokens, num_tokens)
        assert (size - 1) // prefill_dense.STEP * prefill_dense.STEP == dense_len
        assert num_tokens <= size <= num_tokens + 384
    assert [fresh_size(n) for n in (2048, 2112, 2176, 2177, 2559)] == [2176, 2176, 2176, 2560, 2560]


@pytest.mark.gpu
def test_replayed_fresh_steps_give_the_logits_of_launched_ones_and_write_only_their_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, "qwen3", max_position_embeddings=4096)
    loaded = find_model(str(tmp_path), device="cuda", dtype="bfloat16").load()
    logits, pools, used = {}, {}, list[Any]()
    for is_replayed in (False, True):
        monkeypatch.setattr(ModelRunner, "_saved_s", lambda *_, answer=is_replayed: answer - 0.5)
        harness = Harness(loaded, num_blocks=512, max_num_batched_tokens=4096)
        harness.runner.warm_up()
        parts = []
        for index, num_tokens in enumerate((1024, 1100, 1300, 2100)):
            ids, table = prompt(num_tokens, seed=index), harness.table(num_tokens)
            row = BatchRow(ids, 0, table, request_index=index, table_key=index)
            with monkeypatch.context() as patch:
                patch.setattr(BlockTables, "copy_fresh", record(used, BlockTables.copy_fresh))
                parts.append(harness.runner.execute([row]).logits.clone())
        logits[is_replayed], pools[is_replayed] = torch.cat(parts), harness.pool.float()
    assert [span.query_len for _, span in used] == [1024, 1100, 1300, 2100]
    error = (logits[True] - logits[False]).norm() / logits[False].norm()
    assert error < 0.05
    assert torch.equal(pools[True].isnan(), pools[False].isnan())
    error = (pools[True] - pools[False]).nan_to_num().norm() / pools[False].nan_to_num().norm()
    assert error < 0.05


@pytest.mark.gpu
def test_long_steps_that_cannot_be_captured_are_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint(tmp_path, "qwen3", max_position_embeddings=4096)
    no_memory, capture = torch.OutOfMemoryError("none"), ModelRunner._capture_step

    def fail_if_long(runner: ModelRunner, key: Any, pool: Any) -> Any:
        if key[0] > 512:
            raise no_memory
        return capture(runner, key, pool)

    monkeypatch.setattr(ModelRunner, "_capture_step", fail_if_long)
    harness = Harness(find_model(str(tmp_path), dtype="float32", device="cuda").load())
    harness.runner.warm_up()
    assert (640, no_memory) in [record.args for record in caplog.records]
    ids = prompt(77, seed=1)
    assert harness.generate(ids, 8, [40, 37]) == reference_tokens(tmp_path, ids, 8)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.05)])
def test_replayed_long_steps_give_the_logits_of_launched_ones_and_write_only_their_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: Dtype, tolerance: float
) -> None:
    write_checkpoint(tmp_path, "qwen3", max_position_embeddings=4096)
    loaded = find_model(str(tmp_path), device="cuda", dtype=dtype).load()
    ids, beside, chunks = prompt(3000, seed=12), prompt(40, seed=13), (1000, 1300, 700)
    logits, pools, sizes = {}, {}, []

    def note_size(*step: Any) -> int:
        sizes.append(choose_size(*step))
        return sizes[-1]

    for is_replayed in (False, True):
        monkeypatch.setattr(ModelRunner, "_saved_s", lambda *_, answer=is_replayed: answer - 0.5)
        harness = Harness(loaded, num_blocks=256)
        harness.runner.warm_up()
        monkeypatch.setattr(model_runner, "choose_size", note_size)
        tables, start, parts = [harness.table(3100), harness.table(40)], 0, []
        for step, chunk in enumerate(chunks):
            rows = [
                BatchRow(ids[start : start + chunk], start, tables[0]),
                BatchRow(beside[step : step + 1], step, tables[1]),
            ]
            parts.append(harness.runner.execute(rows).logits.clone())
            start += chunk
        logits[is_replayed], pools[is_replayed] = torch.cat(parts), harness.pool.float()
        monkeypatch.setattr(model_runner, "choose_size", choose_size)
    assert sizes == [0, 0, 0, 1088, 1408, 832]
    error = (logits[True] - logits[False]).norm() / logits[False].norm()
    assert error < tolerance
    assert torch.equal(pools[True].isnan(), pools[False].isnan())
    error = (pools[True] - pools[False]).nan_to_num().norm() / pools[False].nan_to_num().norm()
    assert error < tolerance


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
    harness.runner.warm_up()
    layer: torch.nn.Module = harness.loaded.model.get_submodule("model.layers.0")
    layer.register_forward_hook(lambda _module, _args, out: out + out.roll(1, dims=1))
    with refused(ModelError):
        harness.runner.warm_up()


def test_a_token_id_beyond_the_vocabulary_never_reaches_the_device(checkpoints: Any) -> None:
    harness = Harness(find_model(str(checkpoints("llama")), device="cpu").load())
    with refused(AssertionError):
        harness.runner.execute([BatchRow([1, 300], 0, harness.table(2))])


def test_a_row_that_its_blocks_cannot_hold_is_our_bug(checkpoints: Any) -> None:
    harness = Harness(find_model(str(checkpoints("llama")), device="cpu").load())
    with refused(AssertionError):
        harness.runner.execute([BatchRow([1] * 17, 0, [0])])


@pytest.mark.gpu
def test_bfloat16_errors_are_no_more_than_twice_those_of_transformers(
    family: str, checkpoints: Any
) -> None:
    folder = checkpoints(family)
    ids = prompt(200, seed=11)
    batch = torch.tensor([ids], device="cuda")
    with torch.inference_mode():
        exact = reference_model(folder, device="cuda")(batch).logits[0]
        theirs = reference_model(folder, torch.bfloat16, "cuda")(batch).logits[0].float()
    loaded = find_model(str(folder), dtype="bfloat16", device="cuda").load()
    harness = Harness(loaded)
    table = harness.table(len(ids))
    rows = [BatchRow(ids[:90], 0, table, all_logits=True), BatchRow(ids[90:], 90, table)]
    first = harness.runner.execute(rows[:1]).logits
    last = harness.runner.execute(rows[1:]).logits
    decoded = harness.runner.execute([BatchRow(ids[-1:], len(ids) - 1, table)]).logits
    ours = torch.cat([first, last])
    expected = torch.cat([exact[:90], exact[-1:]])
    bound = 2 * (theirs - exact).abs().mean()
    assert (ours - expected).abs().mean() <= bound
    assert (decoded - exact[-1:]).abs().mean() <= bound


@pytest.mark.gpu
def test_greedy_tokens_on_the_device_equal_those_of_transformers(
    family: str, checkpoints: Any
) -> None:
    folder = checkpoints(family)
    harness = Harness(find_model(str(folder), dtype="float32", device="cuda").load())
    harness.runner.warm_up()
    ids = prompt(77, seed=1)
    expected = reference_tokens(folder, ids, 20)
    assert harness.generate(ids, 20, [40, 1, 36])[:8] == expected[:8]


@pytest.mark.gpu
def test_a_slot_may_change_hands_before_the_device_has_read_its_block_table(
    checkpoints: Any,
) -> None:
    folder = str(checkpoints("llama"))
    loaded = find_model(folder, dtype="float32", device="cuda").load()
    harness = Harness(loaded)
    prompts = [prompt(160, seed=seed) for seed in (21, 22)]
    tables = [harness.table(len(ids)) for ids in prompts]
    alone = [
        harness.prefill(ids, table, [len(ids)]).clone()
        for ids, table in zip(prompts, tables, strict=True)
    ]
    torch.cuda._sleep(500_000_000)  # type: ignore[no-untyped-call]
    together = [
        harness.runner.execute(
            [BatchRow(ids, 0, table, request_index=0, table_key=key)]
        ).logits.clone()
        for key, (ids, table) in enumerate(zip(prompts, tables, strict=True))
    ]
    for got, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert (alone[0] - alone[1]).abs().max() > 0.1


@pytest.mark.gpu
def test_the_pool_is_sized_from_what_steps_take() -> None:
    loaded = find_model("random:qwen3-0.6b", device="cuda").load()
    spec = loaded.kv_spec(16)
    peak_bytes = profile_peak_bytes(loaded, spec, max_num_batched_tokens=2048, max_num_seqs=64)
    assert peak_bytes > 64 * loaded.vocab_size * 4
    limits = {"max_num_batched_tokens": 2048, "max_num_seqs": 64}
    num_blocks = num_device_blocks(loaded, spec, 0.5, **limits)
    total = torch.cuda.mem_get_info()[1]
    assert 0.3 * total < num_blocks * spec.block_bytes < 0.5 * total


def test_a_row_may_begin_behind_blocks_that_no_row_has_covered(checkpoints: Any) -> None:
    loaded = find_model(str(checkpoints("llama")), device="cpu").load()
    harness = Harness(loaded)
    ids = prompt(100, seed=6)
    table = harness.table(len(ids))
    whole = harness.prefill(ids, table, [len(ids)])
    harness.runner.execute([BatchRow(ids[:16], 0, table, request_index=3, table_key=1)])
    row = BatchRow(ids[80:], 80, table, request_index=3, table_key=1)  # 16 to 79 were loaded
    torch.testing.assert_close(harness.runner.execute([row]).logits, whole, atol=1e-4, rtol=1e-4)


def test_a_row_takes_the_token_that_the_step_before_made_most_likely(checkpoints: Any) -> None:
    loaded = find_model(str(checkpoints("llama")), device="cpu").load()
    harness = Harness(loaded)
    ids = prompt(40, seed=7)
    expected = harness.generate(ids, 4, [40])
    table = harness.table(len(ids) + 4)
    outputs = [harness.runner.execute([BatchRow(ids, 0, table, request_index=5, table_key=2)])]
    for position in range(40, 43):
        row = BatchRow([pending(5)], position, table, request_index=5, table_key=2)
        outputs.append(harness.runner.execute([row]))
    assert [int(output.tokens) for output in outputs] == expected
    chosen = torch.tensor([17])
    harness.runner.keep_tokens(outputs[-1], chosen)
    given = harness.runner.execute(
        [BatchRow([pending(5)], 43, table, request_index=5, table_key=2)]
    ).logits
    told = harness.runner.execute([BatchRow([17], 43, table, request_index=5, table_key=2)]).logits
    torch.testing.assert_close(given, told, atol=1e-5, rtol=1e-5)
