"""Paged attention: Triton, reference and the dense path, against the definition in float64.

The interpreter multiplies the raw bits of bfloat16, so on a CPU Triton runs in other dtypes.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.golden import refused
from tests.levels import few
from tieredkv.errors import ShapeError
from tieredkv.kernels import checks, launch, partition, prefill_dense
from tieredkv.kernels.checks import LayerCache
from tieredkv.kernels.partition import Batch, Heads, Span
from tieredkv.kernels.prefill_dense import Partial

TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}

GPU_TOLERANCE = TOLERANCE | {torch.float32: 1e-5}

MakeCase = Callable[..., Any]
RelativeError = Callable[[Tensor, Tensor], float]
Choose = Callable[[str], AbstractContextManager[None]]

BACKENDS = [
    ("triton", torch.float32),
    ("triton", torch.float16),
    ("reference", torch.float32),
    ("reference", torch.float16),
    ("reference", torch.bfloat16),
]


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size", "context_lens"),
    [
        (8, 2, 32, 16, [1, 15, 16, 17, 97]),
        (7, 1, 64, 32, [33, 200]),
        (4, 4, 80, 16, [50]),
        (32, 1, 32, 64, [129, 3]),
        (2, 1, 128, 256, [259, 256]),
        (3, 3, 256, 16, [31]),
    ],
)
def test_single_queries_equal_their_definition(
    make_case: MakeCase,
    relative_error: RelativeError,
    backend: str,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    context_lens: list[int],
) -> None:
    case = make_case(
        [(1, context_len) for context_len in context_lens],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    )
    assert relative_error(case.attend(backend), case.oracle()) < TOLERANCE[dtype]


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size", "spans"),
    [
        (4, 2, 32, 16, [(1, 1), (17, 17), (3, 50), (1, 40), (33, 70)]),
        (7, 1, 64, 32, [(9, 9), (2, 140)]),
        (6, 2, 32, 16, [(60, 190)]),
        (2, 2, 80, 16, [(31, 33)]),
        (16, 1, 32, 64, [(1, 65), (5, 64)]),
        (64, 1, 32, 16, [(3, 20)]),
        (2, 1, 128, 256, [(5, 259)]),
        (1, 1, 256, 16, [(18, 19)]),
    ],
)
def test_chunks_and_single_queries_equal_their_definition(
    make_case: MakeCase,
    relative_error: RelativeError,
    backend: str,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    spans: list[tuple[int, int]],
) -> None:
    case = make_case(
        spans,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    )
    assert relative_error(case.attend(backend), case.oracle()) < TOLERANCE[dtype]


@pytest.mark.parametrize("num_multiprocessors", few([1, 5, 2, 40], 2))
@pytest.mark.parametrize("spans", [[(1, 700), (1, 5)], [(20, 420), (6, 6), (1, 300), (1, 299)]])
def test_any_number_of_programs_gives_the_same_answer(
    make_case: MakeCase,
    relative_error: RelativeError,
    monkeypatch: pytest.MonkeyPatch,
    spans: list[tuple[int, int]],
    num_multiprocessors: int,
) -> None:
    monkeypatch.setattr(partition, "num_multiprocessors", lambda _: num_multiprocessors)
    partition.narrow_tiling.cache_clear()
    partition.wide_tiling.cache_clear()
    case = make_case(spans, num_heads=4, num_kv_heads=2, head_dim=32, block_size=16)
    try:
        out = case.attend("triton")
    finally:
        partition.narrow_tiling.cache_clear()
        partition.wide_tiling.cache_clear()
    assert relative_error(out, case.oracle()) < TOLERANCE[torch.float32]


def test_a_partition_gives_every_program_an_equal_share_of_all_units() -> None:
    heads = Heads(8, 2, 64, torch.float16, torch.device("cpu"))
    tiling = partition.wide_tiling(heads)
    spans = [Span(0, 0, 100, 1000), Span(3, 100, 0, 77), Span(1, 100, 33, 33), Span(2, 133, 5, 640)]
    room = 2 + partition.count_tiles(tiling, spans)
    out = np.full(partition.size_ints(tiling, room), -7, dtype=np.int32)
    partition.partition(spans, tiling, out)

    programs = out[: tiling.num_programs * 16].reshape(-1, 16).tolist()
    tiles = out[tiling.num_programs * 16 :].reshape(-1, 8)[:7, :6].tolist()
    assert tiles[:2] == [[0, 0, 32, 900, 0, 8], [0, 32, 32, 932, 8, 16]]
    assert tiles[2:4] == [[0, 64, 32, 964, 16, 24], [0, 96, 4, 996, 24, 32]]
    assert tiles[4:] == [[1, 100, 32, 0, 32, 33], [1, 132, 1, 32, 33, 34], [2, 133, 5, 635, 34, 39]]
    assert [program[:3] for program in programs] == [
        [0, 10, 0],
        [10, 20, 1],
        [20, 30, 2],
        [30, 39, 3],
    ]
    assert [program[3] for program in programs] == [1, 2, 3, -1]
    assert [program[4:6] for program in programs[:3]] == [[32, 32], [64, 32], [96, 4]]
    assert [program[8:14] for program in programs] == tiles[:4]


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_request_without_queries_is_skipped(
    make_case: MakeCase, relative_error: RelativeError, backend: str
) -> None:
    spans = [(0, 0), (4, 20), (0, 33), (2, 2)]
    case = make_case(
        spans, num_heads=2, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.float16
    )
    assert relative_error(case.attend(backend), case.oracle()) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_queries_may_be_strided_and_the_answer_is_contiguous(
    make_case: MakeCase, relative_error: RelativeError, backend: str
) -> None:
    case = make_case(
        [(4, 20), (1, 18)],
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        block_size=16,
        dtype=torch.float16,
    )
    heads_first = replace(case, q=case.q.transpose(0, 1).contiguous().transpose(0, 1))
    wide_rows = replace(case, q=torch.cat([case.q, case.q], 1)[:, :4])
    for strided in (heads_first, wide_rows):
        out = strided.attend(backend)
        assert out.shape == case.q.shape
        assert relative_error(out, case.oracle()) < TOLERANCE[torch.float16]


def test_chunks_give_what_one_prefill_gives(
    make_case: MakeCase, relative_error: RelativeError
) -> None:
    case = make_case([(50, 50)], num_heads=4, num_kv_heads=2, head_dim=32, block_size=16)
    whole = case.attend("reference")
    for start, end in [(0, 16), (16, 17), (17, 50)]:
        chunk = replace(case, q=case.q[start:end], spans=[Span(0, 0, end - start, end)])
        assert relative_error(chunk.attend("triton"), whole[start:end]) < TOLERANCE[torch.float32]


def test_a_reference_request_does_not_depend_on_its_batch(make_case: MakeCase) -> None:
    case = make_case(
        [(7, 40), (20, 20), (1, 9)], num_heads=8, num_kv_heads=2, head_dim=32, block_size=16
    )
    together = case.attend("reference")
    for span in case.spans:
        alone = replace(case, spans=[span]).attend("reference")
        chunk = slice(span.first_token, span.first_token + span.query_len)
        assert torch.equal(alone[chunk], together[chunk])


def attend_torch(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> Partial:
    """Stand in for cuDNN: the same attention in plain torch, in float32."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    scores = q.float().transpose(0, 1) @ keys.transpose(1, 2) * scale  # [Hq, n, m]
    if is_causal:
        future = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    out = torch.softmax(scores, -1) @ values
    return Partial(out.transpose(0, 1).to(q.dtype).contiguous(), torch.logsumexp(scores, -1))


@pytest.fixture
def dense_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the dense path for short prompts in small steps, with torch in place of cuDNN."""
    monkeypatch.setattr(prefill_dense, "attend_cudnn", attend_torch)
    monkeypatch.setattr(prefill_dense, "STEP", 8)
    monkeypatch.setattr(prefill_dense, "MAX_SQUARE_STEPS", 4)
    monkeypatch.setattr(prefill_dense, "MIN_QUERY_TOKENS", 10)


@pytest.mark.usefixtures("dense_everywhere")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_dense_path_in_steps_equals_the_definition(
    make_case: MakeCase, relative_error: RelativeError, choose: Choose, dtype: torch.dtype
) -> None:
    spans = [(8, 8), (16, 16), (5, 5), (40, 48), (17, 100), (17, 73), (1, 1), (99, 130), (12, 13)]
    case = make_case(spans, num_heads=4, num_kv_heads=2, head_dim=32, block_size=16, dtype=dtype)
    with choose("dense"):
        shares = launch.share_out(case.spans, case.heads)
    assert [span.row for span in shares.dense] == [1, 3, 4, 5, 7, 8]
    assert relative_error(case.attend("dense"), case.oracle()) < TOLERANCE[dtype]


@pytest.mark.usefixtures("dense_everywhere")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("sinks", [[2.0, -1.0, 0.5, 4.0], [-1e4, -3.0, 1e4, 1.0]])
def test_the_dense_path_merges_sinks_once_and_leaves_windows_to_the_paged_kernel(
    make_case: MakeCase,
    relative_error: RelativeError,
    choose: Choose,
    dtype: torch.dtype,
    sinks: list[float],
) -> None:
    spans = [(16, 16), (5, 5), (40, 48), (1, 1), (12, 136), (12, 13)]
    case = make_case(
        spans,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        block_size=16,
        dtype=dtype,
        sinks=torch.tensor(sinks),
    )
    rows = {None: [0, 2, 4, 5], 136: [0, 2, 4, 5], 48: [0, 2, 5], 47: [0, 5], 15: [5], 1: []}
    for window, expected in rows.items():
        with choose("dense"):
            shares = launch.share_out(case.spans, case.heads, window=window)
        assert [span.row for span in shares.dense] == expected
    for window in (None, 48):
        within = replace(case, window=window)
        assert relative_error(within.attend("dense"), within.oracle()) < TOLERANCE[dtype]


@pytest.mark.usefixtures("dense_everywhere")
def test_the_dense_path_asks_for_a_bounded_set_of_shapes(
    make_case: MakeCase, choose: Choose, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = set()

    def record(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> Any:
        asked.add((q.shape[0], k.shape[0], is_causal))
        return Partial(q, q.new_zeros(q.shape[1], q.shape[0]))

    monkeypatch.setattr(prefill_dense, "attend_cudnn", record)
    monkeypatch.setattr(checks.triton_module("dense_kernels"), "merge_parts", lambda *_: None)
    spans = [(n, n + prefix) for n in range(10, 70, 7) for prefix in range(0, 64, 5)]
    case = make_case(spans, num_heads=1, num_kv_heads=1, head_dim=16, block_size=16)
    with choose("dense"):
        chunks = launch.share_out(case.spans, case.heads).dense
    for row, first, count, context_len in chunks:
        queries, table = case.q[first : first + count], case.block_tables[row]
        out = torch.empty_like(queries)
        prefill_dense.attend_chunk(queries, case.cache, table, context_len, 1.0, out)

    squares = {(n, n, True) for n in (8, 16, 32)}
    pieces = {(n, m, False) for n in (8, 16, 32) for m in (8, 16, 32, 64)}
    assert squares <= asked <= squares | pieces

    promised = set()
    monkeypatch.setattr(
        prefill_dense,
        "attend_cudnn",
        lambda q, k, _v, _s, c: promised.add((q.shape[0], k.shape[0], c)),
    )
    for _ in prefill_dense.warm_up(case.heads, max_query_len=70, max_context_len=134):
        pass
    assert asked <= promised


@pytest.mark.usefixtures("dense_everywhere")
def test_chunks_that_the_dense_operator_refuses_go_to_the_paged_kernel(
    make_case: MakeCase,
    relative_error: RelativeError,
    choose: Choose,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> Partial:
        raise prefill_dense.RefusedError("no engine for these shapes")

    monkeypatch.setattr(prefill_dense, "attend_cudnn", refuse)
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "block_size": 16}
    plain = make_case([(12, 30), (3, 20)], **shape)
    with_sinks = replace(plain, window=30, sinks=torch.tensor([1.0, -1.0, 3.0, 0.0]).to(plain.q))
    for case in (plain, with_sinks):
        with choose("dense"):
            assert case.batch().dense
        assert relative_error(case.attend("dense"), case.oracle()) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    "change",
    [
        {"q": torch.zeros(6, 3, 32)},
        {"q": torch.zeros(6, 4, 16)},
        {"q": torch.zeros(6, 4, 32, dtype=torch.float16)},
        {"cache": LayerCache(*torch.zeros(2, 2, 16, 2, 32).double())},
        {"batch": Batch(torch.zeros(2, 2), [])},
        {"batch": Batch(torch.zeros(2, dtype=torch.int32), [])},
        {"batch": Batch(torch.zeros(2, 2, dtype=torch.int32), [Span(2, 0, 1, 1)])},
        {"batch": Batch(torch.zeros(2, 2, dtype=torch.int32), [Span(0, 5, 2, 9)])},
        {"batch": Batch(torch.zeros(2, 2, dtype=torch.int32), [Span(0, 0, 3, 2)])},
        {"batch": Batch(torch.zeros(2, 2, dtype=torch.int32), [Span(0, 0, 3, 33)])},
    ],
)
def test_arguments_that_disagree_are_refused(change: dict[str, Any]) -> None:
    pool = torch.zeros(2, 1, 2, 16, 2, 32)
    arguments: dict[str, Any] = {
        "q": torch.zeros(6, 4, 32),
        "cache": LayerCache(pool[:, 0, 0], pool[:, 0, 1]),
        "batch": Batch(torch.zeros(2, 2, dtype=torch.int32), [Span(0, 0, 6, 6)]),
        "scale": 1.0,
    }
    with refused(ShapeError):
        launch.paged_attention(**(arguments | change))


GPU_SPANS = [(1, 1), (300, 300), (64, 4000), (1300, 2025), (0, 20), (17, 333), (256, 256)]
GPU_SPANS += [(1, 4097), (1, 1023), (1, 17), (1, 777)]
GPU_HEADS = [(32, 8, 128), (28, 4, 128), (16, 8, 128), (14, 2, 64), (8, 1, 256), (32, 32, 80)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), GPU_HEADS)
def test_on_the_gpu_a_mixed_batch_equals_the_reference(
    make_case: MakeCase,
    relative_error: RelativeError,
    dtype: torch.dtype,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    case = make_case(
        GPU_SPANS,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        device="cuda",
    )
    expected = case.attend("reference")
    assert relative_error(case.attend("triton"), expected) < GPU_TOLERANCE[dtype]
    assert relative_error(case.attend(), expected) < GPU_TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "dense", "auto"])
@pytest.mark.parametrize("span", [(8192, 8192), (2048, 32_768), (5000, 7777), (64, 32_768)])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(32, 8, 128), (28, 4, 128), (16, 8, 64)]
)
def test_on_the_gpu_one_long_request_equals_the_reference(
    make_case: MakeCase,
    relative_error: RelativeError,
    backend: str,
    span: tuple[int, int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    case = make_case(
        [span],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=16,
        dtype=torch.bfloat16,
        device="cuda",
    )
    assert relative_error(case.attend(backend), case.attend("reference")) < 8e-3


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("batch", "context_len", "extra_blocks"),
    [(1, 32_768, 3), (64, 4_000, 3), (3, 131_000, 20_000)],  # the last pool has 2^31 elements
)
def test_on_the_gpu_single_queries_of_long_contexts_equal_the_reference(
    make_case: MakeCase,
    relative_error: RelativeError,
    batch: int,
    context_len: int,
    extra_blocks: int,
) -> None:
    case = make_case(
        [(1, context_len)] * batch,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        block_size=16,
        dtype=torch.bfloat16,
        device="cuda",
        extra_blocks=extra_blocks,
    )
    assert relative_error(case.attend(), case.attend("reference")) < 6e-3


@pytest.mark.gpu
def test_on_the_gpu_a_captured_launch_follows_new_plans(
    make_case: MakeCase, relative_error: RelativeError
) -> None:
    case = make_case(
        [(1, 2000), (1, 900), (64, 1000), (40, 200)],
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        block_size=16,
        dtype=torch.bfloat16,
        device="cuda",
    )
    batch = case.batch()
    arguments = (case.q, case.cache, batch, case.scale)
    launch.paged_attention(*arguments)  # compile before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch.paged_attention(*arguments)
    shorter = [Span(0, 0, 1, 33), Span(1, 1, 1, 900), Span(2, 2, 64, 700), Span(3, 66, 40, 41)]
    later = replace(case, spans=shorter)
    for plan, other in ((batch.narrow, later.batch().narrow), (batch.wide, later.batch().wide)):
        plan.copy_(other)
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert relative_error(out, later.attend("reference")) < 8e-3
