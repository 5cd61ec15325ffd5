"""Prefill attention: Triton, reference and the dense path, against the definition in float64.

The interpreter multiplies the raw bits of bfloat16, so on a CPU Triton runs in the other dtypes.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tieredkv.errors import ShapeError
from tieredkv.kernels import launch, prefill_dense, splits

TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}

GPU_TOLERANCE = TOLERANCE | {torch.float32: 1e-5}

MakeCase = Callable[..., Any]
RelativeError = Callable[[Tensor, Tensor], float]


def attend(case: Any, spans: Sequence[tuple[int, int]], **options: Any) -> Tensor:
    return launch.paged_prefill_attention(
        case.q,
        case.k_cache,
        case.v_cache,
        case.block_tables,
        case.query_start_lens,
        case.context_lens,
        case.scale,
        max(query_len for query_len, _ in spans),
        max(context_len for _, context_len in spans),
        spans=[launch.Span(*span) for span in spans],
        **options,
    )


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("triton", torch.float32),
        ("triton", torch.float16),
        ("reference", torch.float32),
        ("reference", torch.bfloat16),
        ("cudnn", torch.float32),
        ("cudnn", torch.bfloat16),
    ],
)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size", "spans"),
    [
        (4, 2, 32, 16, [(1, 1), (17, 17), (3, 50), (33, 70)]),
        (7, 1, 64, 32, [(9, 9), (2, 140)]),
        (6, 2, 32, 16, [(60, 190)]),
        (2, 2, 80, 16, [(31, 33)]),
        (16, 1, 32, 64, [(1, 65), (5, 64)]),
        (2, 1, 128, 256, [(5, 259)]),
        (1, 1, 256, 16, [(18, 19)]),
    ],
)
def test_prefill_equals_its_definition(
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
        **({"device": "cpu"} if backend == "cudnn" else {}),
    )
    assert relative_error(attend(case, spans, backend=backend), case.oracle()) < TOLERANCE[dtype]


@pytest.mark.parametrize("num_multiprocessors", [1, 2])
def test_any_number_of_splits_gives_the_same_answer(
    make_case: MakeCase,
    relative_error: RelativeError,
    monkeypatch: pytest.MonkeyPatch,
    num_multiprocessors: int,
) -> None:
    monkeypatch.setattr(splits, "num_multiprocessors", lambda _: num_multiprocessors)
    spans = [(20, 420), (6, 6)]
    case = make_case(spans, num_heads=2, num_kv_heads=1, head_dim=32, block_size=16)
    assert (
        relative_error(attend(case, spans, backend="triton"), case.oracle())
        < TOLERANCE[torch.float32]
    )


@pytest.mark.parametrize("backend", ["triton", "reference", "cudnn"])
def test_a_request_without_queries_is_skipped(
    make_case: MakeCase, relative_error: RelativeError, backend: str
) -> None:
    spans = [(0, 0), (4, 20), (0, 33), (2, 2)]
    case = make_case(
        spans, num_heads=2, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.float16
    )
    assert (
        relative_error(attend(case, spans, backend=backend), case.oracle())
        < TOLERANCE[torch.float16]
    )


@pytest.mark.parametrize("backend", ["triton", "reference", "cudnn"])
def test_queries_may_be_strided_and_the_answer_is_contiguous(
    make_case: MakeCase, relative_error: RelativeError, backend: str
) -> None:
    spans = [(4, 20), (1, 18)]
    case = make_case(
        spans, num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.float16
    )
    heads_first = replace(case, q=case.q.transpose(0, 1).contiguous().transpose(0, 1))
    out = attend(heads_first, spans, backend=backend)
    assert out.is_contiguous()
    assert relative_error(out, case.oracle()) < TOLERANCE[torch.float16]


def test_chunks_give_what_one_prefill_gives(
    make_case: MakeCase, relative_error: RelativeError
) -> None:
    case = make_case([(50, 50)], num_heads=4, num_kv_heads=2, head_dim=32, block_size=16)
    whole = attend(case, [(50, 50)], backend="reference")
    for start, end in [(0, 16), (16, 17), (17, 50)]:
        chunk = launch.paged_prefill_attention(
            case.q[start:end],
            case.k_cache,
            case.v_cache,
            case.block_tables,
            torch.tensor([0, end - start], dtype=torch.int32, device=case.q.device),
            torch.tensor([end], dtype=torch.int32, device=case.q.device),
            case.scale,
            end - start,
            end,
            backend="reference",
        )
        assert relative_error(chunk, whole[start:end]) < TOLERANCE[torch.float32]


def test_a_reference_request_does_not_depend_on_its_batch(make_case: MakeCase) -> None:
    spans = [(7, 40), (20, 20), (1, 9)]
    case = make_case(spans, num_heads=8, num_kv_heads=2, head_dim=32, block_size=16)
    together = attend(case, spans, backend="reference")
    starts = case.query_start_lens.tolist()
    for row, (query_len, context_len) in enumerate(spans):
        alone = launch.paged_prefill_attention(
            case.q[starts[row] : starts[row + 1]],
            case.k_cache,
            case.v_cache,
            case.block_tables[row : row + 1],
            torch.tensor([0, query_len], dtype=torch.int32, device=case.q.device),
            case.context_lens[row : row + 1],
            case.scale,
            query_len,
            context_len,
            backend="reference",
        )
        assert torch.equal(alone, together[starts[row] : starts[row + 1]])


@pytest.mark.parametrize("step", [8, 16, 512])
def test_the_dense_path_cuts_and_pads_without_a_trace(
    make_case: MakeCase, relative_error: RelativeError, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    monkeypatch.setattr(prefill_dense, "SHAPE_STEP", step)
    spans = [(8, 8), (16, 16), (5, 5), (8, 48), (7, 100), (17, 17 + 8 * 7), (1, 1), (33, 130)]
    case = make_case(spans, num_heads=4, num_kv_heads=2, head_dim=32, block_size=16, device="cpu")
    assert (
        relative_error(attend(case, spans, backend="cudnn"), case.oracle())
        < TOLERANCE[torch.float32]
    )


def test_the_dense_path_asks_for_a_bounded_set_of_shapes(
    make_case: MakeCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = set()
    attend_torch = prefill_dense.attend_torch

    def record(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> Any:
        asked.add((q.shape[0], k.shape[0], is_causal))
        return attend_torch(q, k, v, scale, is_causal)

    monkeypatch.setattr(prefill_dense, "SHAPE_STEP", 8)
    monkeypatch.setattr(prefill_dense, "attend_torch", record)
    spans = [(n, n + prefix) for n in range(1, 17) for prefix in range(0, 64, 3)]
    case = make_case(spans, num_heads=1, num_kv_heads=1, head_dim=16, block_size=16, device="cpu")
    attend(case, spans, backend="cudnn")

    squares = {(rows, rows, True) for rows in (8, 16, 24)}
    pieces = {(rows, keys, False) for rows in (8, 16) for keys in (8, 16, 32)}
    assert asked == squares | pieces


def test_chunks_of_both_kinds_share_a_batch(
    make_case: MakeCase, relative_error: RelativeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_dense, "MIN_QUERY_TOKENS", 10)
    monkeypatch.setattr(prefill_dense, "is_available", lambda _: True)
    spans = [(3, 3), (5, 40), (10, 30), (0, 7), (12, 12), (1, 33)]
    case = make_case(
        spans, num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.float16
    )
    assert relative_error(attend(case, spans), case.oracle()) < TOLERANCE[torch.float16]


def test_chunks_that_the_dense_operator_refuses_go_to_triton(
    make_case: MakeCase, relative_error: RelativeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> prefill_dense.Partial:
        raise prefill_dense.RefusedError("no engine for these shapes")

    monkeypatch.setattr(prefill_dense, "MIN_QUERY_TOKENS", 10)
    monkeypatch.setattr(prefill_dense, "is_available", lambda _: True)
    monkeypatch.setattr(prefill_dense, "attend_torch", refuse)
    monkeypatch.setattr(prefill_dense, "attend_cudnn", refuse)
    spans = [(12, 30), (3, 20)]
    case = make_case(spans, num_heads=4, num_kv_heads=2, head_dim=32, block_size=16)
    assert relative_error(attend(case, spans), case.oracle()) < TOLERANCE[torch.float32]
    with pytest.raises(ShapeError, match="no engine"):
        attend(case, spans, backend="cudnn")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_start_lens": torch.zeros(2, dtype=torch.int32)}, "for 2 requests"),
        ({"query_start_lens": torch.zeros(3)}, "not int32 or int64"),
        ({"max_query_len": 0}, "max_query_len 0"),
        ({"spans": [launch.Span(3, 3)]}, "spans"),
        ({"spans": [launch.Span(3, 3), launch.Span(4, 4)]}, "spans"),
        ({"spans": [launch.Span(3, 2), launch.Span(3, 3)]}, "spans"),
        ({"spans": [launch.Span(3, 3), launch.Span(2, 4)]}, "spans"),
        ({"backend": "cudnn"}, "needs `spans`"),
        ({"backend": "flash"}, "unknown backend `flash`"),
    ],
)
def test_arguments_that_disagree_are_refused(change: dict[str, Any], message: str) -> None:
    pool = torch.zeros(2, 1, 2, 16, 2, 32)
    arguments: dict[str, Any] = {
        "q": torch.zeros(6, 4, 32),
        "k_cache": pool[:, 0, 0],
        "v_cache": pool[:, 0, 1],
        "block_tables": torch.zeros(2, 2, dtype=torch.int32),
        "query_start_lens": torch.tensor([0, 3, 6], dtype=torch.int32),
        "context_lens": torch.full((2,), 3, dtype=torch.int32),
        "scale": 1.0,
        "max_query_len": 3,
        "max_context_len": 3,
    }
    with pytest.raises(ShapeError, match=message):
        launch.paged_prefill_attention(**(arguments | change))


GPU_SPANS = [(1, 1), (300, 300), (64, 4000), (513, 1025), (0, 20), (17, 333), (256, 256)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(32, 8, 128), (28, 4, 128), (16, 8, 128), (14, 2, 64), (8, 1, 256), (32, 32, 80)],
)
def test_on_the_gpu_prefill_equals_the_reference(
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
    expected = attend(case, GPU_SPANS, backend="reference")
    assert (
        relative_error(attend(case, GPU_SPANS, backend="triton"), expected) < GPU_TOLERANCE[dtype]
    )
    assert relative_error(attend(case, GPU_SPANS), expected) < GPU_TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "cudnn", "auto"])
@pytest.mark.parametrize("span", [(8192, 8192), (2048, 32_768), (64, 32_768), (1, 8192)])
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
    expected = attend(case, [span], backend="reference")
    assert relative_error(attend(case, [span], backend=backend), expected) < 8e-3


@pytest.mark.gpu
def test_on_the_gpu_a_captured_prefill_follows_new_lengths(
    make_case: MakeCase, relative_error: RelativeError
) -> None:
    spans = [(64, 1000), (40, 200)]
    case = make_case(
        spans,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        block_size=16,
        dtype=torch.bfloat16,
        device="cuda",
    )
    attend(case, spans, backend="triton")  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(case, spans)
    case.context_lens.copy_(torch.tensor([700, 41], dtype=torch.int32))
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    expected = attend(case, [(64, 700), (40, 41)], backend="reference")
    assert relative_error(out, expected) < 8e-3
