"""Attention with sliding windows and sinks, and with heads of up to 512, against its definition.

The pool is NaN wherever no query of a request looks, and the block tables point there before the
window, so a position that is read by mistake shows in the result.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.golden import refused
from tests.levels import few
from tieredkv.errors import ShapeError
from tieredkv.kernels import launch, partition
from tieredkv.kernels.checks import LayerCache
from tieredkv.kernels.partition import Batch, Span, Tiling

TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}

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
DECODE = [(1, 1), (1, 7), (1, 16), (1, 17), (1, 97), (1, 200)]
CHUNKS = [(17, 17), (3, 50), (1, 40), (33, 150), (0, 20), (1, 130)]


def make_sinks(kind: str, num_heads: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
    """Return sinks that differ from head to head; even small ones change a result visibly."""
    means = {"none": None, "small": -2.0, "medium": 1.0, "large": 6.0}
    mean = means[kind]
    return None if mean is None else (mean + torch.randn(num_heads)).to(dtype)


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
@pytest.mark.parametrize(
    ("window", "sinks"), [(1, "none"), (7, "medium"), (16, "none"), (32, "small"), (1000, "large")]
)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size", "spans"),
    [
        (8, 2, 64, 16, DECODE),
        (7, 1, 32, 32, CHUNKS),
        *few([(6, 2, 128, 16, CHUNKS), (2, 2, 80, 32, DECODE + CHUNKS)], 0),
    ],
)
def test_windows_and_sinks_equal_their_definition(
    make_case: MakeCase,
    relative_error: RelativeError,
    backend: str,
    dtype: torch.dtype,
    window: int,
    sinks: str,
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
        window=window,
        sinks=make_sinks(sinks, num_heads),
    )
    assert relative_error(case.attend(backend), case.oracle()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("window", "sinks"), few([(None, "none"), (40, "medium"), (None, "medium")], 2)
)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(3, 1, 256), (4, 2, 512), (5, 1, 320)]
)
def test_large_heads_equal_their_definition(
    make_case: MakeCase,
    relative_error: RelativeError,
    dtype: torch.dtype,
    window: int | None,
    sinks: str,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    case = make_case(
        [(1, 70), (19, 45), (1, 3)],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=16,
        dtype=dtype,
        window=window,
        sinks=make_sinks(sinks, num_heads),
    )
    assert relative_error(case.attend("triton"), case.oracle()) < TOLERANCE[dtype]


@pytest.mark.parametrize("num_multiprocessors", few([5, 40, 1, 2]))
@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("spans", [[(1, 700), (1, 5)], [(20, 420), (6, 6), (1, 300), (1, 299)]])
def test_a_sink_counts_once_with_any_number_of_programs(
    make_case: MakeCase,
    relative_error: RelativeError,
    monkeypatch: pytest.MonkeyPatch,
    spans: list[tuple[int, int]],
    window: int | None,
    num_multiprocessors: int,
) -> None:
    monkeypatch.setattr(partition, "num_multiprocessors", lambda _: num_multiprocessors)
    partition.narrow_tiling.cache_clear()
    partition.wide_tiling.cache_clear()
    case = make_case(
        spans,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        block_size=16,
        window=window,
        sinks=torch.tensor([5.0, 3.0, -1.0, 7.0]),
    )
    try:
        out = case.attend("triton")
    finally:
        partition.narrow_tiling.cache_clear()
        partition.wide_tiling.cache_clear()
    assert relative_error(out, case.oracle()) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sinks_may_have_any_float_dtype(
    make_case: MakeCase, relative_error: RelativeError, backend: str, dtype: torch.dtype
) -> None:
    sinks = make_sinks("medium", 4, dtype)
    spans = [(3, 20), (1, 40)]
    case = make_case(spans, num_heads=4, num_kv_heads=2, head_dim=32, block_size=16, sinks=sinks)
    assert relative_error(case.attend(backend), case.oracle()) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_extreme_sinks_take_nothing_or_everything(make_case: MakeCase, backend: str) -> None:
    sinks = torch.tensor([float("-inf"), -1e30, 1e30, 1e4])
    case = make_case(
        CHUNKS, num_heads=4, num_kv_heads=2, head_dim=32, block_size=16, window=20, sinks=sinks
    )
    out, oracle = case.attend(backend), case.oracle().float()
    assert torch.allclose(out[:, :2].cpu(), oracle[:, :2], atol=1e-5)
    assert out[:, 2:].eq(0).all()


def test_a_window_as_long_as_the_context_changes_no_bit_of_the_reference(
    make_case: MakeCase, choose: Choose
) -> None:
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "block_size": 16}
    case = make_case(DECODE + CHUNKS, **shape)
    arguments = case.q, case.cache, Batch(case.block_tables, case.spans), case.scale
    with choose("reference"):
        whole = launch.paged_attention(*arguments)
        assert torch.equal(launch.paged_attention(*arguments, window=200), whole)
        assert not torch.equal(launch.paged_attention(*arguments, window=199), whole)


def test_the_definition_is_that_of_gpt_oss_in_transformers(
    make_case: MakeCase, choose: Choose
) -> None:
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    masking = pytest.importorskip("transformers.masking_utils")
    sinks = make_sinks("medium", 4)
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "block_size": 16}
    case = make_case([(50, 50)], **shape, window=50, sinks=sinks, device="cpu")
    position = torch.arange(50)
    table = case.block_tables[0][position // 16].long()
    k, v = (part[table, position % 16].transpose(0, 1)[None] for part in case.cache)
    for window in (1, 7, 16, 50):
        is_seen = masking.sliding_window_causal_mask_function(window)
        seen = is_seen(0, 0, position[:, None], position[None, :])
        mask = torch.zeros(1, 1, 50, 50).masked_fill(~seen, float("-inf"))
        module = SimpleNamespace(sinks=sinks, num_key_value_groups=2, training=False)
        expected, _ = modeling.eager_attention_forward(
            module, case.q.transpose(0, 1)[None], k, v, mask, case.scale
        )
        batch = Batch(case.block_tables, case.spans)
        with choose("reference"):
            out = launch.paged_attention(
                case.q, case.cache, batch, case.scale, window=window, sinks=sinks
            )
        assert torch.allclose(out, expected[0], atol=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        {"window": 0},
        {"window": -5},
        {"sinks": torch.zeros(3)},
        {"sinks": torch.zeros(4, 1)},
        {"sinks": torch.zeros(4, dtype=torch.int32)},
        {"sinks": torch.zeros(8)[::2]},
    ],
)
def test_windows_and_sinks_that_fit_no_head_are_refused(change: dict[str, Any]) -> None:
    pool = torch.zeros(2, 1, 2, 16, 2, 32)
    cache = LayerCache(pool[:, 0, 0], pool[:, 0, 1])
    batch = Batch(torch.zeros(2, 2, dtype=torch.int32), [Span(0, 0, 6, 6)])
    with refused(ShapeError):
        launch.paged_attention(torch.zeros(6, 4, 32), cache, batch, 1.0, **change)


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[Span], Tiling, int | None]:
    """Draw a batch, a tiling and a window."""
    spans = list[Span]()
    for row in range(draw(st.integers(0, 5))):
        query_len = draw(st.integers(0, 40))
        first = sum(span.query_len for span in spans)
        spans.append(Span(row, first, query_len, query_len + draw(st.integers(0, 150))))
    num_queries, kv_tile = draw(st.sampled_from([1, 3, 16])), draw(st.sampled_from([16, 32, 64]))
    tiling = Tiling(num_queries, 16, kv_tile, 4, 1, draw(st.integers(1, 12)))
    return spans, tiling, draw(st.none() | st.integers(1, 200))


@settings(max_examples=300, deadline=None)
@given(plans())
def test_a_partition_covers_each_visible_pair_once_and_nothing_before_the_window(
    drawn: tuple[list[Span], Tiling, int | None],
) -> None:
    spans, tiling, window = drawn
    out = np.zeros(partition.size_ints(tiling, partition.count_tiles(tiling, spans)), np.int32)
    partition.partition(spans, tiling, out, window)
    num_programs = tiling.num_programs
    programs = out[: num_programs * partition.INTS_PER_PROGRAM].reshape(num_programs, -1)
    tiles = out[num_programs * partition.INTS_PER_PROGRAM :].reshape(-1, partition.INTS_PER_TILE)

    expected = Counter[tuple[int, int]]()
    for span in spans:
        for index in range(span.query_len):
            end = span.context_len - span.query_len + index + 1
            first = max(0, end - (window or end))
            expected.update((span.first_token + index, key) for key in range(first, end))
    covered = Counter[tuple[int, int]]()
    for first_unit, last_unit, tile, *_ in programs.tolist():
        for unit in range(first_unit, last_unit):
            if unit >= tiles[tile, 5]:
                tile += 1
            _, query, num_queries, position, start, stop, first_key, _ = tiles[tile].tolist()
            assert start <= unit < stop
            key = first_key + (unit - start) * tiling.kv_tile
            keys = range(key, min(key + tiling.kv_tile, position + num_queries))
            visible = {
                (query + index, key)
                for index in range(num_queries)
                for key in keys
                if position + index - (window or position + index + 1) < key <= position + index
            }
            assert {key for _, key in visible} == {*keys}, "a key that no query of the tile sees"
            covered.update(visible)
    assert covered == expected


GPU_SPANS = [(1, 1), (300, 300), (64, 4000), (1300, 2025), (0, 20), (17, 333), (256, 256)]
GPU_SPANS += [(1, 4097), (1, 1023), (1, 17), (1, 777)]
GPU_HEADS = [(64, 8, 64), (28, 4, 128), (16, 8, 256), (16, 2, 512), (32, 4, 512), (4, 4, 512)]
GPU_TOLERANCE = TOLERANCE | {torch.float32: 1e-5}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("window", "sinks"),
    [
        (None, "none"),
        (None, "medium"),
        (1, "none"),
        (128, "medium"),
        (1024, "small"),
        (5000, "large"),
    ],
)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), GPU_HEADS)
def test_on_the_gpu_windows_and_sinks_equal_the_reference(
    make_case: MakeCase,
    relative_error: RelativeError,
    dtype: torch.dtype,
    window: int | None,
    sinks: str,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    case = make_case(
        GPU_SPANS,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=16,
        dtype=dtype,
        device="cuda",
        window=window,
        sinks=make_sinks(sinks, num_heads, dtype),
    )
    expected = case.attend("reference")
    assert relative_error(case.attend("triton"), expected) < GPU_TOLERANCE[dtype]
    assert relative_error(case.attend(), expected) < GPU_TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "auto"])
@pytest.mark.parametrize("window", [None, 128, 1000])
@pytest.mark.parametrize("span", [(8192, 8192), (2048, 20_000), (5000, 7777), (1, 20_000)])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(16, 2, 64), (4, 1, 512)])
def test_on_the_gpu_one_long_request_with_sinks_equals_the_reference(
    make_case: MakeCase,
    relative_error: RelativeError,
    backend: str,
    window: int | None,
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
        window=window,
        sinks=make_sinks("medium", num_heads, torch.bfloat16),
    )
    assert relative_error(case.attend(backend), case.attend("reference")) < 8e-3


@pytest.mark.gpu
def test_on_the_gpu_a_captured_launch_with_a_window_follows_new_plans(
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
        sinks=make_sinks("medium", 32, torch.bfloat16),
    )
    case = replace(case, window=700)
    batch = case.batch()

    def attend() -> Tensor:
        return launch.paged_attention(
            case.q, case.cache, batch, case.scale, window=case.window, sinks=case.sinks
        )

    attend()  # compile before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    shorter = [Span(0, 0, 1, 33), Span(1, 1, 1, 900), Span(2, 2, 64, 990), Span(3, 66, 40, 41)]
    later = replace(case, spans=shorter)
    for plan, other in ((batch.narrow, later.batch().narrow), (batch.wide, later.batch().wide)):
        plan.copy_(other)
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert relative_error(out, later.attend("reference")) < 8e-3
