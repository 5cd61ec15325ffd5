"""Which steps are captured, which graph replays a step, and that it computes what kernels do."""

import contextlib
import logging
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.conftest import write_checkpoint
from tests.engine.harness import Harness, prompt, record, reference_tokens
from tieredkv.config import Dtype
from tieredkv.engine import graphs, profile
from tieredkv.engine.attention import AttentionKind, StepMetadata
from tieredkv.engine.graphs import (
    DECODE_SIZES,
    MIXED_SIZES,
    Graph,
    GraphKey,
    Graphs,
    capture_graphs,
    find_graph,
    fresh_size,
    sizes_that_pay,
)
from tieredkv.engine.loader import find_model
from tieredkv.engine.profile import warm_up
from tieredkv.engine.step_buffers import (
    BatchRow,
    BlockTables,
    Layout,
    StepBuffers,
    StepOutput,
    idle_row,
)
from tieredkv.kernels import prefill_dense
from tieredkv.kernels.partition import Heads, Latent, Span
from tieredkv.kernels.state_plan import PlanSize
from tieredkv.types import ignore_progress

REPLAY = Graph.replay
KINDS = [AttentionKind(Heads(4, 2, 16, torch.float32, torch.device("cpu")), None, 0)]
LATENT = Heads(1, 1, 16, torch.float32, torch.device("cpu"), Latent(8, 8, 8, 8))
LATENT_KINDS = [AttentionKind(LATENT, None, 0)]


def make_buffers(num_rows: int, max_tokens: int) -> StepBuffers:
    tables = BlockTables(num_rows, 4096, 16, torch.device("cpu"))
    return StepBuffers(KINDS, tables, max_tokens=max_tokens, vocab_size=9)


class FakeGraph:
    """Stands in for a captured CUDA graph: it gives each logit the id of its token."""

    def __init__(self, buffers: StepBuffers, num_kept: int) -> None:
        tokens = torch.zeros(num_kept, dtype=torch.int64)
        self.buffers, self.output = buffers, StepOutput(tokens[:, None], tokens, tokens.clone())

    def replay(self) -> None:
        num_kept = len(self.output.tokens)
        kept = self.buffers.kept[:num_kept]
        self.output.tokens.copy_(self.buffers.token_ids[kept])
        self.output.targets.copy_(self.buffers.targets[:num_kept])


def fake_capture(key: GraphKey, buffers: StepBuffers, *args: Any) -> Graph:
    """Return a graph that was not captured; of the other arguments, only depths are taken."""
    (num_tokens, kind), num_rows = key, buffers.tables.num_requests
    num_kept = 1 if kind == "fresh" else min(num_tokens, num_rows)
    fake: Any = FakeGraph(buffers, num_kept)
    depths = args[2] if len(args) > 2 else ()
    states = PlanSize.of_any(num_tokens, num_rows)
    return Graph(num_tokens, num_kept, kind == "fresh", depths, states, fake, buffers, fake.output)


def found(steps: Graphs, *rows: BatchRow) -> GraphKey | None:
    """Return the tokens and kind of the graph that replays a step."""
    graph = find_graph(steps, Layout(rows, KINDS, 4))
    return None if graph is None else next(key for key, it in steps.items() if it is graph)


@pytest.mark.parametrize(
    ("num_tokens", "start", "size"),
    [
        (16, 4000, 16),
        (17, 4000, None),
        (600, 99, 640),
        (600, 100, None),
        (600, 299, None),
        (600, 300, 640),
        (640, 300, 640),
        (641, 300, None),
    ],
)
def test_a_long_step_is_replayed_at_the_depths_at_which_that_is_the_faster_way(
    num_tokens: int, start: int, size: int | None
) -> None:
    buffers, depths = make_buffers(4, 2176), [(100.0, 400.0), (600.0, math.inf)]
    steps: Graphs = {
        (16, "mixed"): fake_capture((16, "mixed"), buffers),
        (640, "mixed"): fake_capture((640, "mixed"), buffers, None, None, depths),
    }
    assert found(steps, idle_row(num_tokens, start)) == (size and (size, "mixed"))


def test_a_short_step_is_launched_at_some_depths_only_if_it_has_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill_dense, "is_available", lambda _: True)
    key: GraphKey = (64, "mixed")
    for kinds, deep in ((LATENT_KINDS, None), (KINDS, key)):
        monkeypatch.setattr(sys.modules[__name__], "KINDS", kinds)
        fake = fake_capture(key, make_buffers(4, 2176), None, None, [(0.0, 10_000.0)])
        steps: Graphs = {key: fake}
        assert found(steps, idle_row(64, 20_000)) == deep
        assert found(steps, idle_row(64, 9000)) == key
        assert found(steps, *[idle_row(15, 20_000)] * 3) == key


def test_short_steps_are_timed_where_they_may_have_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill_dense, "is_available", lambda _: True)
    monkeypatch.setattr(sys.modules[__name__], "KINDS", LATENT_KINDS)

    def pays(key: GraphKey, start: int) -> bool:
        return start == 0 and key[0] <= 512

    steps, done = capture_all(monkeypatch, pays, max_tokens=700)
    timed = [it for it in done if it[1] in (0, 2048)]
    shortest = [17, 33, 65, 97, 129, 193, 257, 385, 513]
    assert timed == [(n, start) for n in shortest for start in (0, 2048)]
    depths = {key[0]: graph.depths for key, graph in steps.items() if graph.depths}
    assert sorted(depths) == [*MIXED_SIZES[1:]]
    assert depths[64] == [(0.0, 33 / 2 + 2048 / 3)]
    assert (16, "mixed") in steps and (640, "mixed") not in steps


def test_a_step_is_replayed_from_the_graph_of_its_kind_that_has_room_for_its_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill_dense, "is_available", lambda _: True)
    buffers = make_buffers(4, 2176)
    keys: list[GraphKey] = [(1, "decode"), (4, "decode"), (16, "mixed"), (1088, "mixed")]
    keys += [(1152, "fresh"), (2176, "fresh")]
    depths: dict[GraphKey, Any] = {(1088, "mixed"): [(500.0, math.inf)]}
    steps = {key: fake_capture(key, buffers, None, None, depths.get(key, ())) for key in keys}
    one = idle_row(1, 300)
    assert found(steps, one) == (1, "decode")
    assert found(steps, one, one, one) == (4, "decode")
    assert found(steps, *[one] * 5) is None
    assert found(steps, idle_row(15, 0), one) == (16, "mixed")
    assert found(steps, BatchRow([0] * 4, 0, [0], all_logits=True)) == (16, "mixed")
    assert found(steps, BatchRow([0] * 5, 0, [0], all_logits=True)) is None
    assert found(steps, idle_row(900, 0)) is None
    assert found(steps, idle_row(900, 300)) == (1088, "mixed")
    assert found(steps, idle_row(1100, 0)) == (1152, "fresh")
    assert found(steps, idle_row(2100, 0)) == (2176, "fresh")
    assert found(steps, idle_row(1088, 0)) == (1152, "fresh")
    assert found(steps, idle_row(1088, 16)) == (1088, "mixed")
    assert found(steps, idle_row(1024, 0), one) == (1088, "mixed")
    assert found(steps, idle_row(1300, 0)) is None
    assert found({}, one) is None
    assert found({}, idle_row(15, 0)) is None


def test_a_replay_pads_the_step_and_gives_only_the_logits_that_were_asked_for(
    checkpoints: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Harness(find_model(str(checkpoints("llama")), device="cpu").load()).runner
    few = runner.buffers.smaller(512)
    assert (few.tables, few.max_tokens) == (runner.buffers.tables, 512)
    assert runner.buffers.smaller(9999).max_tokens == runner.buffers.max_tokens
    runner.graphs = {(4, "decode"): fake_capture((4, "decode"), few)}
    monkeypatch.setattr(type(runner), "launch", lambda *_: pytest.fail("it is replayed"))
    rows = [BatchRow([n], 0, [0], request_index=n) for n in (7, 5, 8, 6)]
    assert runner.execute(rows).tokens.tolist() == [7, 5, 8, 6]
    output = runner.execute(rows[:3])
    assert output.tokens.tolist() == [7, 5, 8]
    assert output.targets.tolist() == [7, 5, 8]
    assert output.logits.tolist() == [[7], [5], [8]]
    assert few.token_ids[:4].tolist() == [7, 5, 8, 0]
    assert few.slots[:, :4].tolist() == [[0, 0, 0, -1]]


@pytest.mark.parametrize(
    ("key", "num_kept", "reads", "dense_len", "has_last"),
    [
        ((16, "decode"), 4, ("narrow",), None, False),
        ((2, "mixed"), 2, ("narrow", "wide"), None, False),
        ((1536, "fresh"), 1, ("wide",), 1024, True),
        ((1664, "fresh"), 1, ("wide",), 1536, True),
    ],
)
def test_a_step_is_launched_once_then_captured_then_replayed_once(
    monkeypatch: pytest.MonkeyPatch,
    key: GraphKey,
    num_kept: int,
    reads: tuple[str, ...],
    dense_len: int | None,
    has_last: bool,
) -> None:
    monkeypatch.setattr(prefill_dense, "is_available", lambda _: True)
    done, buffers = list[Any](), make_buffers(4, 2304)

    @contextlib.contextmanager
    def capturing(graph: object, pool: str, capture_error_mode: str) -> Iterator[None]:
        done.append((pool, capture_error_mode))
        yield
        done.append("captured")

    class Captured:
        def replay(self) -> None:
            done.append("replayed")

    def launch(into: StepBuffers, step: StepMetadata, num_kept: int) -> StepOutput:
        assert into is buffers
        assert torch.is_inference_mode_enabled()
        done.append((step, num_kept))
        tokens = torch.full((num_kept,), len(done))
        return StepOutput(tokens[:, None], tokens, tokens)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Captured)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    graph = graphs.capture(key, buffers, launch, "memory")
    (step, _), *_ = done
    launched = step, num_kept
    assert done == [launched, ("memory", "thread_local"), launched, "captured", "replayed"]
    assert step.slots.tolist() == [[-1] * key[0]]
    (batch,), (of_kind,) = step.batches, buffers.plans
    plans = {"narrow": batch.narrow, "wide": batch.wide}
    assert tuple(name for name, plan in plans.items() if plan is getattr(of_kind, name)) == reads
    assert tuple(name for name, plan in plans.items() if plan is not None) == reads
    fresh_row = buffers.tables.fresh_row
    assert batch.spans == ()
    dense = [] if dense_len is None else [Span(fresh_row, 0, dense_len, dense_len)]
    assert [*batch.dense] == dense
    assert (step.last is not None and step.last[0].narrow is of_kind.last) == has_last
    assert (graph.num_tokens, graph.num_kept, graph.is_fresh) == (key[0], num_kept, has_last)
    assert graph.output.tokens.tolist() == [3] * num_kept  # what was captured, not launched before


def capture_all(
    monkeypatch: pytest.MonkeyPatch, pays: Any, *, num_rows: int = 4, max_tokens: int = 2304
) -> tuple[Graphs, list[Any]]:
    """Choose and fake graphs by a stopwatch that says where they pay; return what was done."""
    done: list[Any] = []
    buffers = make_buffers(num_rows, max_tokens)

    def capture(key: GraphKey, into: StepBuffers, *args: Any) -> Graph:
        done.append((key, into.max_tokens))
        return fake_capture(key, into, *args)

    def step_seconds(steps: Graphs, row: BatchRow) -> float:
        if not steps:
            return 1.0
        [key] = steps
        done.append((len(row.token_ids), row.start))
        return 0.5 if pays(key, row.start) else 2.0

    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    steps = capture_graphs(
        buffers,
        lambda *_: pytest.fail("`capture` launches"),
        step_seconds,
        max_context_len=4096,
        progress=ignore_progress,
    )
    return steps, done


def test_long_steps_are_captured_as_far_as_they_pay_and_the_largest_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill_dense, "is_available", lambda _: True)

    def pays(key: GraphKey, start: int) -> bool:
        return key in ((640, "mixed"), (1152, "fresh")) or (key == (832, "mixed") and start > 0)

    steps, done = capture_all(monkeypatch, pays)
    timed: list[Any] = [((640, "mixed"), 2304), (513, 0), (513, 2048)]
    timed += [((832, "mixed"), 2304), (641, 0), (641, 2048)]
    timed += [((1088, "mixed"), 2304), (833, 0), (833, 2048)]
    timed += [((1152, "fresh"), 2304), (1024, 0), ((2176, "fresh"), 2304), (2048, 0)]
    assert done[: len(timed)] == timed
    keys: list[GraphKey] = [(1152, "fresh"), (832, "mixed"), (640, "mixed")]
    keys += sorted(
        [*((n, "mixed") for n in MIXED_SIZES), *((n, "decode") for n in (1, 2, 4))], reverse=True
    )
    assert [key for key, _ in done[len(timed) :]] == keys
    assert [size for key, size in done[len(timed) :] if key[0] <= 512] == [512] * 12
    assert list(steps) == keys
    assert {key: graph.depths for key, graph in steps.items() if graph.depths} == {
        (640, "mixed"): [(0.0, math.inf)],
        (832, "mixed"): [(641 / 2 + 2048 * 2 / 3, math.inf)],
    }


def test_a_machine_on_which_no_long_step_pays_captures_the_short_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps, done = capture_all(monkeypatch, lambda *_: False, num_rows=300, max_tokens=300)
    assert not any(graph.depths for graph in steps.values())
    assert {n for n, kind in steps if kind == "decode"} == {*DECODE_SIZES}
    assert {n for n, kind in steps if kind == "mixed"} == {16, 32, 64, 96, 128, 192, 256}
    assert {size for _, size in done} == {300}


def test_where_long_steps_cannot_be_captured_the_short_ones_still_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    no_memory, tried = torch.OutOfMemoryError("none"), list[GraphKey]()

    def fail_if_long(key: GraphKey, *args: Any) -> Graph:
        tried.append(key)
        if key[0] > 512:
            raise no_memory
        return fake_capture(key, *args)

    monkeypatch.setattr(prefill_dense, "is_available", lambda _: True)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(graphs, "capture", fail_if_long)
    steps = capture_graphs(
        make_buffers(4, 2304),
        lambda *_: pytest.fail("`capture` launches"),
        lambda *_: pytest.fail("there is nothing to time"),
        max_context_len=4096,
        progress=ignore_progress,
    )
    assert tried[:2] == [(640, "mixed"), (1152, "fresh")]
    assert tried[2:] == [*steps]
    assert {n for n, kind in steps if kind == "mixed"} == {*MIXED_SIZES}
    warnings = [it for it in caplog.records if it.levelno == logging.WARNING]
    assert [it.args for it in warnings] == [(640, no_memory), (1152, no_memory)]


def test_sizes_are_tried_with_the_shortest_step_until_one_pays_nowhere() -> None:
    tried, saved = [], {640: (1, 2, 3), 1088: (-1, 3, -6), 1408: (-1, -3, 0), 1792: (-2, -1, -1)}

    def saved_s(size: int, num_tokens: int, starts: Sequence[int]) -> Sequence[float]:
        tried.append((size, num_tokens, starts))
        return saved[size]

    assert sizes_that_pay([640, 1088, 1408, 1792, 2176], 513, 10_000, saved_s) == {
        640: [(0.0, math.inf)],
        1088: [(641 / 2 + 2048 / 4, 641 / 2 + 2048 + 6144 / 3)],
        1408: [(1089 / 2 + 8192, math.inf)],
    }
    shortest = {640: 513, 1088: 641, 1408: 1089, 1792: 1409}  # 32768 is behind the context
    assert tried == [(*each, [0, 2048, 8192]) for each in shortest.items()]
    assert sizes_that_pay([640], 513, 512, saved_s) == {}  # and does not try it
    assert len(tried) == 4


def test_a_size_that_cannot_be_captured_is_tried_once() -> None:
    tried = []

    def saved_s(size: int, *_: Any) -> Sequence[float]:
        tried.append(size)
        return []

    assert sizes_that_pay([640, 1088], 513, 10_000, saved_s) == {}
    assert tried == [640]


def test_a_fresh_step_fits_its_graph_and_has_the_dense_part_that_the_graph_captured() -> None:
    for num_tokens in range(1024, 9000):
        size = fresh_size(num_tokens)
        dense_len = prefill_dense.count_queries(num_tokens, num_tokens)
        assert (size - 1) // prefill_dense.STEP * prefill_dense.STEP == dense_len
        assert num_tokens <= size <= num_tokens + 384
    assert [fresh_size(n) for n in (2048, 2112, 2176, 2177, 2559)] == [2176, 2176, 2176, 2560, 2560]


def force(monkeypatch: pytest.MonkeyPatch, *, is_replayed: bool) -> None:
    """Have the replays of long steps look faster, or slower, than their launches."""

    def step_seconds(_runner: Any, steps: Graphs, _row: BatchRow) -> float:
        return float(bool(steps) != is_replayed)

    monkeypatch.setattr(profile, "step_seconds", step_seconds)


@pytest.mark.gpu
def test_replayed_fresh_steps_give_the_logits_of_launched_ones_and_write_only_their_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, "qwen3", max_position_embeddings=4096)
    loaded = find_model(str(tmp_path), device="cuda", dtype="bfloat16").load()
    logits, pools, used = {}, {}, list[Any]()
    for is_replayed in (False, True):
        force(monkeypatch, is_replayed=is_replayed)
        harness = Harness(loaded, num_blocks=512, max_num_batched_tokens=4096)
        warm_up(harness.runner)
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
    no_memory, capture = torch.OutOfMemoryError("none"), graphs.capture

    def fail_if_long(key: GraphKey, *args: Any) -> Graph:
        if key[0] > 512:
            raise no_memory
        return capture(key, *args)

    monkeypatch.setattr(graphs, "capture", fail_if_long)
    harness = Harness(find_model(str(tmp_path), dtype="float32", device="cuda").load())
    warm_up(harness.runner)
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
    logits, pools, used = {}, {}, list[Any]()
    for is_replayed in (False, True):
        force(monkeypatch, is_replayed=is_replayed)
        harness = Harness(loaded, num_blocks=256)
        warm_up(harness.runner)
        monkeypatch.setattr(Graph, "replay", record(used, REPLAY))
        tables, start, parts = [harness.table(3100), harness.table(40)], 0, []
        for step, chunk in enumerate(chunks):
            rows = [
                BatchRow(ids[start : start + chunk], start, tables[0]),
                BatchRow(beside[step : step + 1], step, tables[1]),
            ]
            parts.append(harness.runner.execute(rows).logits.clone())
            start += chunk
        logits[is_replayed], pools[is_replayed] = torch.cat(parts), harness.pool.float()
        monkeypatch.setattr(Graph, "replay", REPLAY)
    assert [graph.num_tokens for graph, *_ in used] == [1088, 1408, 832]
    error = (logits[True] - logits[False]).norm() / logits[False].norm()
    assert error < tolerance
    assert torch.equal(pools[True].isnan(), pools[False].isnan())
    error = (pools[True] - pools[False]).nan_to_num().norm() / pools[False].nan_to_num().norm()
    assert error < tolerance
