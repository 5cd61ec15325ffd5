"""Absorbed queries attended as two products, against the definition of latent attention."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import SetTiles
from tests.kernels.test_latent_attention import (
    DEEPSEEK,
    GLM,
    MISTRAL,
    ODD,
    SMALL,
    TOLERANCE,
    Choose,
    RelativeError,
    attend_torch,
    make_case,
)
from tieredkv.kernels import latent_products, launch, prefill_dense
from tieredkv.kernels.partition import Heads, Latent, Span
from tieredkv.kernels.prefill_dense import Partial

Attend = Callable[[Tensor, Tensor, Tensor, float], list[Partial]]

CPU = torch.device("cpu")


@pytest.fixture
def short_contexts(monkeypatch: pytest.MonkeyPatch, set_tiles: SetTiles) -> list[int]:
    """Attend short spans as products, in small tiles and pieces; return the pieces of each."""
    monkeypatch.setattr(latent_products, "MIN_QUERY_TOKENS", 3)
    monkeypatch.setattr(latent_products, "MIN_CONTEXT_TOKENS", 30)
    monkeypatch.setattr(prefill_dense, "attend_cudnn", attend_torch)
    monkeypatch.setattr(prefill_dense, "STEP", 8)
    monkeypatch.setattr(prefill_dense, "MIN_QUERY_TOKENS", 40)
    products = set_tiles(MAX_WEIGHTS_BYTES=17 * 4 * 64 * 4)
    pieces, attend_square = list[int](), products.attend_square

    def record(*given: Any) -> list[Partial]:
        parts: list[Partial] = attend_square(*given)
        pieces.append(len(parts))
        return parts

    monkeypatch.setattr(products, "attend_square", record)
    return pieces


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("latent", "num_heads", "block_size"), [(SMALL, 4, 16), (ODD, 5, 64)])
def test_queries_behind_a_long_context_are_attended_as_products_beside_others(
    short_contexts: list[int],
    relative_error: RelativeError,
    choose: Choose,
    dtype: torch.dtype,
    latent: Latent,
    num_heads: int,
    block_size: int,
) -> None:
    spans = [(1, 40), (3, 30), (3, 29), (17, 17), (2, 90), (33, 70), (1, 1), (0, 50), (20, 161)]
    spans += [(45, 77), (41, 41), (17, 64)]
    case = make_case(spans, latent, num_heads, block_size=block_size, dtype=dtype)
    with choose("dense"):
        shares = launch.share_out(case.spans, case.heads)
    assert [span.row for span in shares.narrow] == [0, 6]
    assert [span.row for span in shares.wide] == [2, 3, 4, 10]
    assert [span.row for span in shares.dense] == [9, 10]
    products = {span.row: (span.query_len, span.context_len) for span in shares.products}
    assert products == {1: (3, 30), 5: (33, 70), 8: (20, 161), 9: (5, 77), 11: (17, 64)}
    assert relative_error(case.attend("dense"), case.oracle()) < TOLERANCE[dtype]
    assert len(short_contexts) == 5
    assert min(short_contexts) == 1 and max(short_contexts) > 1


def test_published_dims_equal_their_definition_in_tiles_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch, relative_error: RelativeError, choose: Choose
) -> None:
    monkeypatch.setattr(latent_products, "MIN_CONTEXT_TOKENS", 100)
    case = make_case([(16, 300), (1, 20)], GLM, 20, block_size=64, dtype=torch.float16)
    with choose("dense"):
        assert launch.share_out(case.spans, case.heads).products == case.spans[:1]
    assert relative_error(case.attend("dense"), case.oracle()) < TOLERANCE[torch.float16]


def test_products_need_latents_and_lengths_that_the_host_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    latent, plain = Heads(4, 1, 48, torch.float16, CPU, SMALL), Heads(4, 1, 48, torch.float16, CPU)
    fewest, shortest = latent_products.MIN_QUERY_TOKENS, latent_products.MIN_CONTEXT_TOKENS
    long = Span(0, 0, fewest, shortest)
    assert not launch.share_out([long], latent).products  # on a machine without the dense path
    monkeypatch.setattr(prefill_dense, "is_available", lambda _: True)
    assert launch.share_out([long], latent) == ([], [], [], [long])
    few_queries, short = Span(0, 0, fewest - 1, shortest), Span(0, 0, fewest, shortest - 1)
    for heads, span, options in (
        (latent, few_queries, {}),
        (latent, short, {}),
        (latent, long, {"may_be_products": False}),
        (plain, long, {}),
    ):
        assert launch.share_out([span], heads, **options) == ([], [], [span], [])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("latent", "num_heads"), [(GLM, 20), (DEEPSEEK, 128), (MISTRAL, 32)])
@pytest.mark.parametrize("span", [(16, 4096), (64, 32_768), (257, 9001), (1000, 20_000)])
def test_on_the_gpu_products_equal_the_reference(
    relative_error: RelativeError,
    dtype: torch.dtype,
    latent: Latent,
    num_heads: int,
    span: tuple[int, int],
) -> None:
    case = make_case([span, (1, 500)], latent, num_heads, block_size=64, dtype=dtype, device="cuda")
    assert case.batch().products == case.spans[:1]
    assert relative_error(case.attend(), case.attend("reference")) < TOLERANCE[dtype]
