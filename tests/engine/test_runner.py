"""The paged engine against transformers' own generation, token for token and logit for logit."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.conftest import write_checkpoint
from tests.engine.harness import Harness, limits_of, prompt, reference_model, reference_tokens
from tests.golden import refused
from tieredkv.engine.attention import StepMetadata, late_layer
from tieredkv.engine.loader import find_model
from tieredkv.engine.profile import warm_up
from tieredkv.engine.runner import ModelRunner, launched_size, launched_sizes, make_kv_pool
from tieredkv.engine.step_buffers import BatchRow, Layout, StepOutput, pending


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
    by_token = harness.pool[table[2]].view(2, 2, 16, -1)
    assert not by_token[:, :, :8].isnan().any()
    assert by_token[:, :, 8:].isnan().all()


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
    runner = ModelRunner(loaded, make_kv_pool(spec, 4, loaded.device), spec, limits_of(loaded))
    ids = prompt(100, seed=9)
    logits = runner.execute([BatchRow(ids, 0, [3, 1])]).logits
    assert int(logits.argmax()) == reference_tokens(folder, ids, 1)[0]


def test_launched_steps_are_padded_to_few_sizes() -> None:
    sizes = launched_sizes(16_384)
    assert (sizes[0], sizes[-1], len(sizes)) == (528, 16_384, 480)
    assert all(after - size <= max(16, size / 128) for size, after in itertools.pairwise(sizes))
    assert [launched_size(size) for size in (1, 512, *sizes)] == [1, 512, *sizes]
    assert launched_sizes(100) == []


def test_a_launched_step_with_products_is_padded_to_the_size_of_a_graph(
    checkpoints: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Harness(find_model(str(checkpoints("llama")), device="cpu").load()).runner
    launched, launch = list[int](), runner.launch

    def record(loaded: Any, buffers: Any, step: StepMetadata, num_kept: int) -> StepOutput:
        launched.append(step.slots.shape[1])
        return launch(loaded, buffers, step, num_kept)

    monkeypatch.setattr(runner, "launch", record)
    rows = [BatchRow(prompt(20, seed=3), 0, [0, 1, 2, 3])]
    plain = runner.execute(rows)
    monkeypatch.setattr(Layout, "has_products", True)
    torch.testing.assert_close(runner.execute(rows).logits, plain.logits)
    assert launched == [20, 32]


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
    warm_up(harness.runner)
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
@pytest.mark.parametrize("is_replayed", [False, True])
def test_late_layers_wait_for_their_event_in_launched_and_in_replayed_steps(
    checkpoints: Any, is_replayed: bool
) -> None:
    cuda: Any = torch.cuda
    harness = Harness(find_model(str(checkpoints("llama")), dtype="float32", device="cuda").load())
    runner, ids, table = harness.runner, prompt(17, seed=23), harness.table(17)
    if is_replayed:
        warm_up(runner)
    assert bool(runner.graphs) == is_replayed
    harness.prefill(ids[:16], table, [16])
    row = BatchRow(ids[16:], 16, table)
    expected = runner.execute([row]).logits.clone()
    late = harness.pool[table[0]].chunk(2)[late_layer(2)]
    arriving, stream = late.clone(), cuda.Stream()
    late.fill_(float("nan"))
    cuda.synchronize()
    with cuda.stream(stream):
        cuda._sleep(500_000_000)
        late.copy_(arriving)
        event = cuda.Event()
        event.record()
    logits = runner.execute([row], event).logits
    assert not event.query()  # the host has not waited
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


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
