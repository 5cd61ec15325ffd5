"""Attention as two products, against its definition in float64, in tiles that lengths cross."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import DEVICE, SetTiles
from tests.kernels.test_paged_attention import TOLERANCE, Choose, MakeCase, RelativeError
from tests.levels import few
from tieredkv.kernels import checks, launch, prefill_dense
from tieredkv.kernels.partition import Heads, Latent
from tieredkv.kernels.prefill_dense import Partial


@pytest.fixture
def products_everywhere(monkeypatch: pytest.MonkeyPatch, set_tiles: SetTiles) -> None:
    """Use the products for heads of any dims, and short prompts, in small steps and pieces."""
    set_tiles(MAX_WEIGHTS_BYTES=16 * 4 * 64 * 4)
    monkeypatch.setattr(prefill_dense, "MAX_CUDNN_DIM", 0)
    monkeypatch.setattr(prefill_dense, "STEP", 8)
    monkeypatch.setattr(prefill_dense, "MIN_QUERY_TOKENS", 10)


def attend_by_definition(
    q: Tensor, k: Tensor, v: Tensor, scale: float, position: int
) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    is_seen = torch.arange(len(k)) <= torch.arange(len(q))[:, None] + position
    scores = scores.masked_fill(~is_seen.to(q.device), float("-inf"))
    out = torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1).nan_to_num(0.0), v)
    return out, torch.logsumexp(scores, -1)


def make_qkv(
    num_queries: int, num_keys: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(num_queries, num_heads, head_dim)
    k, v = torch.randn(2, num_keys, num_kv_heads, head_dim)
    return q, k, v


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("num_queries", "num_keys", "position"),
    [(17, 17, 0), (16, 32, 16), (5, 97, 92), (33, 64, 64), (33, 65, 200), (40, 70, -7), (9, 50, 1)],
)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    few([(4, 2, 48), (7, 1, 80), (2, 2, 32), (8, 1, 16)], 2),
)
def test_a_piece_equals_the_definition(
    set_tiles: SetTiles,
    relative_error: RelativeError,
    dtype: torch.dtype,
    num_queries: int,
    num_keys: int,
    position: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    device: str,
) -> None:
    tensors = make_qkv(num_queries, num_keys, num_heads, num_kv_heads, head_dim)
    q, k, v = (x.to(device, dtype) for x in tensors)
    out, lse = set_tiles().attend(q, k, v, head_dim**-0.5, position)
    expected, expected_lse = attend_by_definition(q, k, v, head_dim**-0.5, position)
    assert out.dtype == dtype
    assert relative_error(out, expected) < TOLERANCE[dtype]
    atol = 1e-5 if dtype == torch.float32 else 5e-4  # the sums are those of rounded weights
    torch.testing.assert_close(lse, expected_lse.float(), rtol=1e-5, atol=atol)


def test_tiles_of_keys_do_not_change_how_weights_are_rounded(
    set_tiles: SetTiles, relative_error: RelativeError, device: str
) -> None:
    q, k, v = (x.to(device, torch.float16) for x in make_qkv(32, 160, 2, 1, 32))
    sizes = [{"KEYS": keys, "MIN_SHARE_TILES": 10} for keys in (16, 64)]
    narrow, wide = (set_tiles(**each).attend(q, k, v, 0.2, 128) for each in sizes)
    assert relative_error(narrow.out, wide.out) < 5e-5


def test_a_row_that_sees_no_key_gives_no_weight(set_tiles: SetTiles, device: str) -> None:
    q, k, v = (x.to(device) for x in make_qkv(40, 40, 2, 1, 32))
    out, lse = set_tiles().attend(q, k, v, 1.0, -20)
    assert not out[:20].any()
    assert torch.equal(lse[:, :20], torch.full_like(lse[:, :20], float("-inf")))
    assert out[20:].isfinite().all()
    assert lse[:, 20:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("largest", [1e4, -1e4])
def test_large_scores_do_not_overflow(
    set_tiles: SetTiles,
    relative_error: RelativeError,
    dtype: torch.dtype,
    largest: float,
    device: str,
) -> None:
    """Most rows have them, in one tile of keys; float32 has 3 digits behind the point of 1e4."""
    q, k, v = (x.to(device, dtype) for x in make_qkv(48, 96, 2, 1, 32))
    q[:, :, 0], k[:, 0, 0] = 100.0, 0.0
    q[7:11, :, 0] = 0.0
    k[40:44, 0, 0] = largest / 100.0
    out, lse = set_tiles().attend(q, k, v, 1.0, 48)
    expected, expected_lse = attend_by_definition(q, k, v, 1.0, 48)
    assert relative_error(out, expected) < 1e-3
    torch.testing.assert_close(lse, expected_lse.float(), rtol=1e-5, atol=1e-3)


@pytest.mark.usefixtures("products_everywhere")
@pytest.mark.parametrize(
    ("dtype", "num_kv_heads", "sinks"),
    [
        (torch.float32, 2, None),
        (torch.float16, 1, [2.0, -1.0, 0.5, 4.0]),
        (torch.float32, 4, [-1e4, -3.0, 1e4, 1.0]),
    ],
)
def test_chunks_in_squares_and_pieces_equal_the_definition(
    make_case: MakeCase,
    relative_error: RelativeError,
    choose: Choose,
    dtype: torch.dtype,
    num_kv_heads: int,
    sinks: list[float] | None,
) -> None:
    spans = [(8, 8), (16, 16), (5, 5), (40, 48), (17, 100), (17, 73), (1, 1), (70, 150), (12, 13)]
    case = make_case(
        spans,
        num_heads=4,
        num_kv_heads=num_kv_heads,
        head_dim=32,
        block_size=16,
        dtype=dtype,
        sinks=None if sinks is None else torch.tensor(sinks),
    )
    with choose("dense"):
        shares = launch.share_out(case.spans, case.heads)
    assert [span.row for span in shares.dense] == [1, 3, 4, 5, 7, 8]
    assert relative_error(case.attend("dense"), case.oracle()) < TOLERANCE[dtype]


def test_heads_of_512_dims_equal_the_definition_in_tiles_of_the_gpu(
    make_case: MakeCase, relative_error: RelativeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_dense, "STEP", 32)
    monkeypatch.setattr(prefill_dense, "MIN_QUERY_TOKENS", 10)
    monkeypatch.setattr(prefill_dense, "attend_cudnn", None)
    shape = {"num_heads": 16, "num_kv_heads": 2, "head_dim": 512, "block_size": 16}
    case = make_case([(50, 300), (33, 40)], **shape, dtype=torch.float16)
    assert relative_error(case.attend("dense"), case.oracle()) < TOLERANCE[torch.float16]


@pytest.mark.parametrize(("num_heads", "num_queries"), [(16, 1024), (32, 1024), (32, 512), (4, 16)])
def test_weights_of_a_piece_take_a_bounded_number_of_bytes(
    monkeypatch: pytest.MonkeyPatch, num_heads: int, num_queries: int
) -> None:
    products = checks.triton_module("prefill_products")
    pieces: list[tuple[int, int]] = []

    def record(q: Tensor, k: Tensor, v: Tensor, scale: float, position: int) -> None:
        assert len(q) * q.shape[1] * len(k) * q.element_size() <= products.MAX_WEIGHTS_BYTES
        assert len(k) == len(v)
        pieces.append((num_keys - num_queries - position, len(k)))

    monkeypatch.setattr(products, "attend", record)
    num_keys = 33_000
    q = torch.empty(num_queries, num_heads, 512, dtype=torch.bfloat16, device="meta")
    k = torch.empty(num_keys, 2, 512, dtype=torch.bfloat16, device="meta")
    products.attend_square(q, k, k, 1.0)
    ends = [start + length for start, length in pieces]
    assert [start for start, _ in pieces] == [0, *ends[:-1]]
    assert ends[-1] == num_keys


@pytest.mark.usefixtures("products_everywhere")
def test_warming_up_computes_one_square_as_all_lengths_share_the_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    products, asked = checks.triton_module("prefill_products"), []
    attend = products.attend

    def record(q: Tensor, k: Tensor, *others: Any) -> Partial:
        asked.append((len(q), len(k)))
        part: Partial = attend(q, k, *others)
        return part

    monkeypatch.setattr(products, "attend", record)
    heads = Heads(4, 2, 32, torch.float16, torch.device(DEVICE))
    assert list(prefill_dense.warm_up(heads, max_query_len=99, max_context_len=999)) == [1.0]
    assert asked == [(8, 8)]


def test_the_limit_of_dims_depends_on_who_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_dense, "_try_shape", lambda *_, **__: None)
    plain = Heads(4, 2, 512, torch.bfloat16, torch.device("cuda"))
    latent = Latent(512, 64, key_dim=192, value_dim=256)
    is_available = prefill_dense.is_available.__wrapped__
    assert is_available(plain)
    assert not is_available(plain._replace(head_dim=520))
    assert not is_available(plain._replace(dtype=torch.float32))
    assert is_available(plain._replace(head_dim=576, latent=latent))
    assert not is_available(plain._replace(head_dim=576, latent=latent._replace(key_dim=200)))


@pytest.mark.gpu
@pytest.mark.parametrize("span", [(8192, 8192), (2048, 32_768), (5000, 7777)])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(16, 2, 512), (32, 4, 512)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_the_gpu_long_requests_of_large_heads_equal_the_reference(
    make_case: MakeCase,
    relative_error: RelativeError,
    span: tuple[int, int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> None:
    shape: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    shape |= {"head_dim": head_dim, "block_size": 16, "dtype": dtype, "device": "cuda"}
    case = make_case([span], **shape)
    assert prefill_dense.is_available(case.heads)
    assert relative_error(case.attend(), case.attend("reference")) < TOLERANCE[dtype]
