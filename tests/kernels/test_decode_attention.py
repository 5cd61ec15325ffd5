"""Decode attention, Triton and reference, against the definition in float64.

The interpreter multiplies the raw bits of bfloat16, so on a CPU Triton runs in the other dtypes.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tieredkv.errors import ShapeError
from tieredkv.kernels import launch, splits

TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}

GPU_TOLERANCE = TOLERANCE | {torch.float32: 1e-5}

MakeCase = Callable[..., Any]
RelativeError = Callable[[Tensor, Tensor], float]


def attend(case: Any, **options: Any) -> Tensor:
    return launch.paged_decode_attention(
        case.q,
        case.k_cache,
        case.v_cache,
        case.block_tables,
        case.context_lens,
        case.scale,
        int(case.context_lens.max()),
        **options,
    )


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("triton", torch.float32),
        ("triton", torch.float16),
        ("reference", torch.float32),
        ("reference", torch.float16),
        ("reference", torch.bfloat16),
    ],
)
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
def test_decode_equals_its_definition(
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
    assert relative_error(attend(case, backend=backend), case.oracle()) < TOLERANCE[dtype]


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_padding_row_of_length_zero_gives_zeros(make_case: MakeCase, backend: str) -> None:
    case = make_case(
        [(1, 0), (1, 300), (1, 0)], num_heads=2, num_kv_heads=1, head_dim=32, block_size=16
    )
    out = attend(case, backend=backend)
    assert torch.equal(out[::2], torch.zeros_like(out[::2]))
    assert not torch.isnan(out).any()


@pytest.mark.parametrize("num_multiprocessors", [1, 7])
def test_any_number_of_splits_gives_the_same_answer(
    make_case: MakeCase,
    relative_error: RelativeError,
    monkeypatch: pytest.MonkeyPatch,
    num_multiprocessors: int,
) -> None:
    monkeypatch.setattr(splits, "num_multiprocessors", lambda _: num_multiprocessors)
    case = make_case([(1, 700), (1, 5)], num_heads=4, num_kv_heads=2, head_dim=32, block_size=16)
    assert relative_error(attend(case, backend="triton"), case.oracle()) < TOLERANCE[torch.float32]


def test_a_larger_bound_of_the_contexts_is_harmless(
    make_case: MakeCase, relative_error: RelativeError
) -> None:
    case = make_case([(1, 260)], num_heads=4, num_kv_heads=2, head_dim=32, block_size=256)
    bound = case.block_tables.shape[1] * 256
    out = launch.paged_decode_attention(
        case.q,
        case.k_cache,
        case.v_cache,
        case.block_tables,
        case.context_lens,
        case.scale,
        bound,
        backend="triton",
    )
    assert relative_error(out, case.oracle()) < TOLERANCE[torch.float32]


def test_a_reference_row_does_not_depend_on_its_batch(make_case: MakeCase) -> None:
    case = make_case(
        [(1, 130), (1, 64), (1, 77)], num_heads=8, num_kv_heads=2, head_dim=32, block_size=16
    )
    together = attend(case, backend="reference")
    for row in range(3):
        alone = launch.paged_decode_attention(
            case.q[row : row + 1],
            case.k_cache,
            case.v_cache,
            case.block_tables[row : row + 1],
            case.context_lens[row : row + 1],
            case.scale,
            130,
            backend="reference",
        )
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize(
    ("batch_x_kv_heads", "max_context_len", "expected"),
    [
        (8, 32768, 66),  # one request fills four waves of 132
        (512, 4096, 2),
        (512, 32768, 8),  # no split is longer than 4096 tokens
        (2048, 100, 1),
        (1, 0, 1),
        (1, 129, 2),  # a split has 128 tokens or more
    ],
)
def test_splits_fill_the_multiprocessors_and_stay_useful(
    batch_x_kv_heads: int, max_context_len: int, expected: int
) -> None:
    assert splits.num_splits(batch_x_kv_heads, max_context_len, 132, 4096) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 3, 32)}, "does not fit the cache"),
        ({"q": torch.zeros(2, 4, 16)}, "does not fit the cache"),
        ({"q": torch.zeros(3, 4, 32)}, "for 3 queries"),
        ({"q": torch.zeros(2, 4, 32, dtype=torch.float16)}, "dtype and device"),
        ({"context_lens": torch.zeros(3, dtype=torch.int32)}, "context_lens"),
        ({"context_lens": torch.zeros(2)}, "not int32 or int64"),
        ({"block_tables": torch.zeros(4, 2, dtype=torch.int32).t()}, "context_lens|contiguous"),
        ({"max_context_len": 33}, "outside of 0 to 32"),
        ({"k_cache": torch.zeros(2, 16, 2, 32, dtype=torch.float64)}, "supported dtype"),
    ],
)
def test_tensors_that_disagree_are_refused(change: dict[str, Any], message: str) -> None:
    pool = torch.zeros(2, 1, 2, 16, 2, 32)
    arguments: dict[str, Any] = {
        "q": torch.zeros(2, 4, 32),
        "k_cache": pool[:, 0, 0],
        "v_cache": pool[:, 0, 1],
        "block_tables": torch.zeros(2, 2, dtype=torch.int32),
        "context_lens": torch.ones(2, dtype=torch.int32),
        "scale": 1.0,
        "max_context_len": 16,
    }
    with pytest.raises(ShapeError, match=message):
        launch.paged_decode_attention(**(arguments | change))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(32, 8, 128), (28, 4, 128), (16, 8, 128), (14, 2, 64), (8, 1, 256), (32, 32, 80)],
)
def test_on_the_gpu_decode_equals_the_reference(
    make_case: MakeCase,
    relative_error: RelativeError,
    dtype: torch.dtype,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    case = make_case(
        [(1, 1), (1, 4097), (1, 1023), (1, 17), (1, 777)],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        device="cuda",
    )
    out = attend(case, backend="triton")
    assert relative_error(out, attend(case, backend="reference")) < GPU_TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("batch", "context_len", "extra_blocks"),
    [
        (1, 32_768, 3),
        (64, 4_000, 3),
        (3, 131_000, 20_000),
    ],  # the last pool is 2^31 elements or more
)
def test_on_the_gpu_decode_of_long_contexts_equals_the_reference(
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
    assert relative_error(attend(case), attend(case, backend="reference")) < 6e-3


@pytest.mark.gpu
def test_on_the_gpu_a_captured_decode_follows_new_lengths(
    make_case: MakeCase, relative_error: RelativeError
) -> None:
    case = make_case(
        [(1, 2000), (1, 900)],
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        block_size=16,
        dtype=torch.bfloat16,
        device="cuda",
    )
    attend(case)  # compiled before the capture
    arguments = (case.q, case.k_cache, case.v_cache, case.block_tables, case.context_lens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch.paged_decode_attention(*arguments, case.scale, 2000)
    case.context_lens.copy_(torch.tensor([33, 900], dtype=torch.int32))
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert relative_error(out, attend(case, backend="reference")) < 6e-3
