"""Latent attention: absorbed by Triton, expanded in pieces, and the reference, by its definition.

The pool is NaN wherever no query of a request looks, so that a read by mistake shows.
"""

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.golden import refused
from tests.kernels.conftest import DEVICE, choose
from tests.levels import few
from tieredkv.errors import ShapeError
from tieredkv.kernels import latent_prefill, latents, launch, partition, prefill_dense, reference
from tieredkv.kernels.checks import Rope
from tieredkv.kernels.partition import Batch, Heads, Latent, Span
from tieredkv.kernels.prefill_dense import Partial, RefusedError

TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
GPU_TOLERANCE = TOLERANCE | {torch.float32: 1e-5}

RelativeError = Callable[[Tensor, Tensor], float]
Choose = Callable[[str], AbstractContextManager[None]]

SMALL = Latent(32, 16, 24, 40)
ODD = Latent(40, 24, 8, 20)
GLM = Latent(512, 64, 192, 256)
DEEPSEEK = Latent(512, 64, 128, 128)
MISTRAL = Latent(256, 64, 64, 128)
MIXED = [(1, 1), (17, 17), (3, 50), (1, 40), (33, 70), (0, 20), (1, 130)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentCase:
    """A ragged batch over a pool of latents, scattered over blocks and layers."""

    q: Tensor
    cache: Tensor
    matrix: Tensor
    block_tables: Tensor
    spans: list[Span]
    latent: Latent
    scale: float

    @property
    def heads(self) -> Heads:
        sizes = self.q.shape[1], 1, self.latent.num_stored
        return Heads(*sizes, self.q.dtype, self.q.device, self.latent)

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        return self.q[..., : self.latent.key_dim], self.q[..., self.latent.key_dim :]

    def batch(self) -> Batch:
        return launch.make_batch(self.block_tables, self.spans, self.heads)

    def attend(self, backend: str = "auto") -> Tensor:
        with choose(backend):
            rest = self.matrix, self.batch(), self.scale, self.heads
            plain, rotated = self.parts
            return latents.latent_attention(plain, rotated, self.cache, *rest)

    def context(self, span: Span) -> Tensor:
        """Return what is stored of a request."""
        whole = self.cache[:, :, None], self.block_tables[span.row]
        return reference.gather_context(*whole, 0, span.context_len)[:, 0]

    def oracle(self) -> Tensor:
        """Make the keys and values of every head, and attend query by query, in float64."""
        latent, num_heads = self.latent, self.q.shape[1]
        q, matrix = self.q.double().cpu(), self.matrix.double().cpu()
        out = q.new_zeros(*q.shape[:2], latent.value_dim)
        for span in self.spans:
            stored = self.context(span).double().cpu()
            made = (stored[:, : latent.rank] @ matrix.T).view(len(stored), num_heads, -1)
            plain, v = made[..., : latent.key_dim], made[..., latent.key_dim :]
            rotated = stored[:, None, latent.rank :].expand(-1, num_heads, -1)
            k = torch.cat([plain, rotated], dim=2)
            for index in range(span.query_len):
                end = span.context_len - span.query_len + index + 1
                token = span.first_token + index
                scores = torch.einsum("hd,khd->hk", q[token], k[:end]) * self.scale
                out[token] = torch.einsum("hk,khd->hd", scores.softmax(-1), v[:end])
        return out


def make_case(
    spans: Sequence[tuple[int, int]],
    latent: Latent,
    num_heads: int,
    *,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = DEVICE,
) -> LatentCase:
    """Make requests of (query_len, context_len)."""
    blocks = [-(-context_len // block_size) for _, context_len in spans]
    ids = torch.randperm(sum(blocks) + 3, dtype=torch.int32)
    pool = torch.full((len(ids), 2, block_size, latent.num_stored), float("nan"), dtype=dtype)
    tables = torch.full((len(spans), max(blocks) + 2), -1, dtype=torch.int32)
    first = 0
    for row, (_, context_len) in enumerate(spans):
        own = ids[first : first + blocks[row]]
        first += blocks[row]
        tables[row, : blocks[row]] = own
        slots = (own[:, None] * block_size + torch.arange(block_size)).flatten()[:context_len]
        fresh = torch.randn(context_len, latent.num_stored)
        pool[slots // block_size, 1, slots % block_size] = fresh.to(dtype)
    starts = list(itertools.accumulate((query_len for query_len, _ in spans), initial=0))
    q = torch.randn(starts[-1], num_heads, latent.key_dim + latent.rope_dim)
    matrix = torch.randn(num_heads * (latent.key_dim + latent.value_dim), latent.rank)
    return LatentCase(
        q=q.to(device, dtype),
        cache=pool.to(device)[:, 1],
        matrix=(matrix * latent.rank**-0.5).to(device, dtype),
        block_tables=tables.to(device),
        spans=[Span(row, starts[row], *span) for row, span in enumerate(spans)],
        latent=latent,
        scale=q.shape[2] ** -0.5,
    )


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("triton", torch.float32),
        ("triton", torch.float16),
        ("reference", torch.float32),
        ("reference", torch.bfloat16),
    ],
)
@pytest.mark.parametrize(
    ("latent", "num_heads", "block_size"),
    [(SMALL, 4, 16), (ODD, 5, 32), *few([(SMALL, 20, 16), (SMALL, 128, 16), (ODD, 65, 16)], 0)],
)
def test_latent_attention_equals_its_definition(
    relative_error: RelativeError,
    backend: str,
    dtype: torch.dtype,
    latent: Latent,
    num_heads: int,
    block_size: int,
) -> None:
    case = make_case(MIXED, latent, num_heads, block_size=block_size, dtype=dtype)
    assert relative_error(case.attend(backend), case.oracle()) < TOLERANCE[dtype]


@pytest.mark.parametrize(("latent", "num_heads"), [(GLM, 20), *few([(DEEPSEEK, 16)], 0)])
def test_published_dims_equal_their_definition(
    relative_error: RelativeError, latent: Latent, num_heads: int
) -> None:
    case = make_case([(1, 100), (5, 37)], latent, num_heads, dtype=torch.float16)
    assert relative_error(case.attend("triton"), case.oracle()) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("num_multiprocessors", few([1, 5, 40], 1))
def test_any_number_of_programs_gives_the_same_answer(
    relative_error: RelativeError, monkeypatch: pytest.MonkeyPatch, num_multiprocessors: int
) -> None:
    monkeypatch.setattr(partition, "num_multiprocessors", lambda _: num_multiprocessors)
    partition.narrow_tiling.cache_clear()
    partition.wide_tiling.cache_clear()
    case = make_case([(1, 700), (20, 420), (1, 5), (1, 300)], SMALL, 4)
    try:
        out = case.attend("triton")
    finally:
        partition.narrow_tiling.cache_clear()
        partition.wide_tiling.cache_clear()
    assert relative_error(out, case.oracle()) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("latent", [SMALL, ODD, GLM, DEEPSEEK, MISTRAL])
def test_absorbed_and_expanded_agree(relative_error: RelativeError, latent: Latent) -> None:
    case = make_case([(7, 60), (50, 50)], latent, 4, device="cpu")
    for span in case.spans:
        q = case.q[span.first_token : span.first_token + span.query_len]
        weights = case.matrix.view(4, -1, latent.rank)
        rest = q, case.context(span), weights, case.scale, latent
        absorbed, expanded = reference.attend_absorbed(*rest), reference.attend_expanded(*rest)
        assert relative_error(absorbed, expanded) < 1e-5


def test_a_chunk_is_expanded_where_that_takes_fewer_operations() -> None:
    for latent, fewest in ((GLM, 399), (DEEPSEEK, 171), (MISTRAL, 154)):
        assert not latent.should_expand(fewest - 1)
        assert latent.should_expand(fewest)
        assert fewest < prefill_dense.MIN_QUERY_TOKENS
    assert not Latent(32, 8, 32, 32).should_expand(1 << 20)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize(
    ("reads_pairs", "writes_pairs"), [(True, False), (True, True), (False, False)]
)
@pytest.mark.parametrize(("latent", "num_heads"), [(ODD, 5), (DEEPSEEK, 16)])
def test_queries_are_rotated_and_latents_normed_rotated_and_stored(
    backend: str, reads_pairs: bool, writes_pairs: bool, latent: Latent, num_heads: int
) -> None:
    angles = torch.randn(6, latent.rope_dim // 2, 2, device=DEVICE)
    rope = Rope(angles[..., 0], angles[..., 1], reads_pairs, writes_pairs)
    q = torch.randn(6, num_heads * latent.query_dim + 3, device=DEVICE)[:, 3:]
    stored = torch.randn(6, latent.num_stored, device=DEVICE)
    norm = torch.rand(latent.rank, device=DEVICE)
    cache = torch.full((3, 4, latent.num_stored), -1.0, device=DEVICE)
    slots = torch.tensor([7, -1, 0, 11, 4, -1], dtype=torch.int32, device=DEVICE)
    heads = Heads(num_heads, 1, latent.num_stored, q.dtype, q.device, latent)
    with choose(backend):
        out = latents.rotate_and_store(q, stored, norm, 1e-5, rope, cache, slots, heads)

    def turned(x: Tensor) -> Tensor:
        half = latent.rope_dim // 2
        pairs = x.view(6, -1, half, 2) if reads_pairs else x.view(6, -1, 2, half).transpose(2, 3)
        product = torch.view_as_complex(pairs.contiguous()) * torch.view_as_complex(angles)[:, None]
        whole = torch.view_as_real(product)
        return (whole if writes_pairs else whole.transpose(2, 3)).flatten(2)

    plain, rotated = stored[:, : latent.rank], stored[:, latent.rank :]
    normed = torch.nn.functional.rms_norm(plain, (latent.rank,), norm, 1e-5)
    expected = torch.cat([normed, turned(rotated.contiguous())[:, 0]], dim=1)
    untouched = torch.full_like(cache, -1.0).flatten(0, 1)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            untouched[slot] = expected[token]
    assert torch.allclose(cache.flatten(0, 1), untouched, atol=1e-5)
    parts = q.reshape(6, num_heads, -1)[..., latent.key_dim :].contiguous()
    assert torch.allclose(out, turned(parts), atol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        {"q": torch.zeros(6, 161)},
        {"stored": torch.zeros(5, 48)},
        {"norm": torch.zeros(31)},
        {"cos": torch.zeros(6, 16)},
        {"slot_mapping": torch.zeros(6)},
        {"slot_mapping": torch.zeros(5, dtype=torch.int32)},
    ],
)
def test_rotations_that_do_not_fit_are_refused(change: dict[str, Tensor]) -> None:
    given = {
        "q": torch.zeros(6, 160),
        "stored": torch.zeros(6, 48),
        "norm": torch.zeros(32),
        "cos": torch.zeros(6, 8),
        "slot_mapping": torch.zeros(6, dtype=torch.int32),
    } | change
    rope = Rope(given.pop("cos"), torch.zeros(6, 8), True, False)
    heads = Heads(4, 1, 48, torch.float32, torch.device("cpu"), SMALL)
    with refused(ShapeError):
        latents.rotate_and_store(
            **given, eps=1e-5, rope=rope, cache=torch.zeros(5, 16, 48), heads=heads
        )


def attend_torch(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> Partial:
    """Stand in for cuDNN: the same attention in plain torch, in float32."""
    keys, values = (x.float().transpose(0, 1) for x in (k, v))
    scores = q.float().transpose(0, 1) @ keys.transpose(1, 2) * scale
    if is_causal:
        future = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    out = torch.softmax(scores, -1) @ values
    return Partial(out.transpose(0, 1).to(q.dtype).contiguous(), torch.logsumexp(scores, -1))


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expand short chunks in pieces of at most 16 tokens, with torch in place of cuDNN."""
    monkeypatch.setattr(prefill_dense, "attend_cudnn", attend_torch)
    monkeypatch.setattr(prefill_dense, "STEP", 8)
    monkeypatch.setattr(prefill_dense, "MIN_QUERY_TOKENS", 10)
    monkeypatch.setattr(prefill_dense, "MAX_MADE_BYTES", 16 * 4 * (24 + 16 + 40) * 4)


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_long_chunks_are_expanded_in_pieces_of_bounded_size(
    relative_error: RelativeError, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    sizes = list[int]()
    expand = latent_prefill.expand

    def record(*given: Any) -> tuple[Tensor, Tensor]:
        k, v = expand(*given)
        sizes.append(len(k))
        return k, v

    monkeypatch.setattr(latent_prefill, "expand", record)
    spans = [(8, 8), (16, 16), (40, 48), (17, 150), (1, 1), (69, 130), (12, 13)]
    case = make_case(spans, SMALL, 4, dtype=dtype)
    assert relative_error(case.attend("dense"), case.oracle()) < TOLERANCE[dtype]
    assert set(sizes) == ({8, 16} if dtype == torch.float32 else {8, 16, 32})
    # Chunks that begin in the middle of a step make the keys of that step as well.
    assert sum(sizes) == 16 + 48 + 144 + 128 + 8


@pytest.mark.usefixtures("small_steps")
def test_a_refused_chunk_is_absorbed(
    relative_error: RelativeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_asked = itertools.count()

    def refuse_first(*given: Any) -> Partial:
        if not next(num_asked):
            raise RefusedError("no such shape")
        return attend_torch(*given)

    monkeypatch.setattr(prefill_dense, "attend_cudnn", refuse_first)
    case = make_case([(1, 20), (33, 48), (16, 40), (1, 9), (16, 16)], SMALL, 4)
    assert relative_error(case.attend("dense"), case.oracle()) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_latents_are_stored_once_and_beside_others(choose: Choose, backend: str) -> None:
    latent, rotated = torch.randn(7, 3, 40)[:, 0], torch.randn(7, 2, 24)[:, 1]
    pool = torch.full((5, 2, 4, 64), -1.0)
    slots = torch.tensor([3, -1, 17, 4, 9, -1, 0], dtype=torch.int32)
    with choose(backend):
        latents.store_latents(
            latent.to(DEVICE), rotated.to(DEVICE), (on_device := pool.to(DEVICE))[:, 1],
            slots.to(DEVICE),
        )  # fmt: skip
    expected = pool.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // 4, 1, slot % 4] = torch.cat([latent[token], rotated[token]])
    assert torch.equal(on_device.cpu(), expected)


@pytest.mark.parametrize(
    "change",
    [
        {"q": torch.zeros(6, 4, 41)},
        {"q": torch.zeros(6, 3, 40)},
        {"cache": torch.zeros(5, 16, 47)},
        {"cache": torch.zeros(5, 16, 1, 48)},
        {"matrix": torch.zeros(256, 31)},
        {"matrix": torch.zeros(32, 256).T},
        {"matrix": torch.zeros(256, 32, dtype=torch.float16)},
        {"block_tables": torch.zeros(1, 4)},
    ],
)
def test_tensors_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    case = make_case([(6, 20)], SMALL, 4, device="cpu")
    wrong, heads = replace(case, **change), case.heads
    batch = Batch(wrong.block_tables, case.spans)
    with refused(ShapeError):
        latents.latent_attention(*wrong.parts, wrong.cache, wrong.matrix, batch, 1.0, heads)


@pytest.mark.parametrize(
    ("latent", "rotated", "slots"), [(31, 16, 6), (32, 17, 6), (32, 16, 5), (48, 0, 6)]
)
def test_latents_that_do_not_fit_are_refused(latent: int, rotated: int, slots: int) -> None:
    stored = torch.zeros(6, latent), torch.zeros(6 if latent < 48 else 5, rotated)
    with refused(ShapeError):
        latents.store_latents(
            *stored, torch.zeros(5, 16, 48), torch.zeros(slots, dtype=torch.int32)
        )


GPU_SPANS = [(1, 1), (300, 300), (64, 4000), (1300, 2025), (0, 20), (17, 333), (256, 256)]
GPU_SPANS += [(1, 4097), (1, 1023), (1, 17), (1, 777)]
GPU_DIMS = [(GLM, 20), (DEEPSEEK, 16), (DEEPSEEK, 128), (MISTRAL, 32)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("latent", "num_heads"), GPU_DIMS)
def test_on_the_gpu_latent_attention_equals_the_reference(
    relative_error: RelativeError, dtype: torch.dtype, latent: Latent, num_heads: int
) -> None:
    case = make_case(GPU_SPANS, latent, num_heads, dtype=dtype, device="cuda")
    expected = case.attend("reference")
    assert relative_error(case.attend("triton"), expected) < GPU_TOLERANCE[dtype]
    assert relative_error(case.attend(), expected) < GPU_TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "auto"])
@pytest.mark.parametrize("span", [(8192, 8192), (2048, 20_000), (5000, 7777), (1, 20_000)])
@pytest.mark.parametrize(("latent", "num_heads"), GPU_DIMS)
def test_on_the_gpu_one_long_request_equals_the_reference(
    relative_error: RelativeError,
    backend: str,
    span: tuple[int, int],
    latent: Latent,
    num_heads: int,
) -> None:
    case = make_case([span], latent, num_heads, dtype=torch.bfloat16, device="cuda")
    assert relative_error(case.attend(backend), case.attend("reference")) < 1.2e-2


@pytest.mark.gpu
@pytest.mark.parametrize(("latent", "num_heads"), GPU_DIMS)
def test_on_the_gpu_cudnn_attends_with_the_dims_of_a_head(latent: Latent, num_heads: int) -> None:
    sizes = num_heads, 1, latent.num_stored
    heads = Heads(*sizes, torch.bfloat16, torch.device("cuda"), latent)
    assert prefill_dense.is_available(heads)
    for _ in prefill_dense.warm_up(heads, max_query_len=4096, max_context_len=32_768):
        pass


@pytest.mark.gpu
def test_on_the_gpu_a_captured_launch_follows_new_plans(relative_error: RelativeError) -> None:
    spans = [(1, 2000), (1, 900), (64, 1000), (40, 200)]
    case = make_case(spans, GLM, 20, dtype=torch.bfloat16, device="cuda")
    batch = case.batch()

    def attend() -> Tensor:
        rest = case.matrix, batch, case.scale, case.heads
        plain, rotated = case.parts
        return latents.latent_attention(plain, rotated, case.cache, *rest)

    attend()  # compile before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    shorter = [Span(0, 0, 1, 33), Span(1, 1, 1, 900), Span(2, 2, 64, 990), Span(3, 66, 40, 41)]
    later = replace(case, spans=shorter)
    for plan, other in ((batch.narrow, later.batch().narrow), (batch.wide, later.batch().wide)):
        assert plan is not None and other is not None
        plan.copy_(other)
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert relative_error(out, later.attend("reference")) < 1.2e-2
