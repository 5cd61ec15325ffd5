"""Random paged requests for the attention tests, and Triton's interpreter where there is no GPU."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if DEVICE == "cpu":  # Triton reads it when it is imported, which comes later
    os.environ.setdefault("TRITON_INTERPRET", "1")


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedCase:
    """A ragged batch over a poisoned pool: whatever no request may read is NaN."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    query_start_lens: Tensor
    context_lens: Tensor
    scale: float

    def oracle(self) -> Tensor:
        """Attend by the definition, query by query, in float64 on the CPU."""
        q, k_cache, v_cache = (x.double().cpu() for x in (self.q, self.k_cache, self.v_cache))
        group = q.shape[1] // k_cache.shape[2]
        out = torch.zeros_like(q)
        starts = self.query_start_lens.tolist()
        for row, context_len in enumerate(self.context_lens.tolist()):
            table = self.block_tables[row].cpu()
            position = torch.arange(context_len)
            block_ids = table[position // k_cache.shape[1]]
            k = k_cache[block_ids, position % k_cache.shape[1]].repeat_interleave(group, 1)
            v = v_cache[block_ids, position % k_cache.shape[1]].repeat_interleave(group, 1)
            for token in range(starts[row], starts[row + 1]):
                seen = context_len - (starts[row + 1] - token) + 1
                scores = torch.einsum("hd,khd->hk", q[token], k[:seen]) * self.scale
                out[token] = torch.einsum("hk,khd->hd", scores.softmax(-1), v[:seen])
        return out


@pytest.fixture
def device() -> str:
    """Where Triton's kernels run here."""
    return DEVICE


@pytest.fixture
def make_case() -> Callable[..., PagedCase]:
    def make(
        spans: Sequence[tuple[int, int]],
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        device: str = DEVICE,
        extra_blocks: int = 3,
    ) -> PagedCase:
        """Make requests of (query_len, context_len) whose blocks lie scattered in the pool."""
        blocks = [-(-context_len // block_size) for _, context_len in spans]
        num_blocks = sum(blocks) + extra_blocks
        pool = torch.full(
            (num_blocks, 2, 2, block_size, num_kv_heads, head_dim),
            float("nan"),
            dtype=dtype,
            device=device,
        )
        tables = torch.full((len(spans), max(blocks) + 2), -1, dtype=torch.int32)
        ids = torch.randperm(num_blocks, dtype=torch.int32)
        first = 0
        for row, (_, context_len) in enumerate(spans):
            own = ids[first : first + blocks[row]]
            first += blocks[row]
            tables[row, : blocks[row]] = own
            slots = (own[:, None] * block_size + torch.arange(block_size)).flatten()
            slots = slots[:context_len].to(device)
            for half in range(2):
                fresh = torch.randn(context_len, num_kv_heads, head_dim, device=device)
                pool[slots // block_size, 1, half, slots % block_size] = fresh.to(dtype)
        query_lens = torch.tensor([0, *(query_len for query_len, _ in spans)])
        starts = query_lens.cumsum(0).to(torch.int32)
        q = torch.randn(int(starts[-1]), num_heads, head_dim, device=device).to(dtype)
        return PagedCase(
            q=q,
            k_cache=pool[:, 1, 0],
            v_cache=pool[:, 1, 1],
            block_tables=tables.to(device),
            query_start_lens=starts.to(device),
            context_lens=torch.tensor([c for _, c in spans], dtype=torch.int32, device=device),
            scale=head_dim**-0.5,
        )

    return make


@pytest.fixture
def relative_error() -> Callable[[Tensor, Tensor], float]:
    """||out - expected|| / ||expected||, NaN if anything is."""

    def measure(out: Tensor, expected: Tensor) -> float:
        expected = expected.double()
        return float((out.to(expected) - expected).norm() / expected.norm())

    return measure
