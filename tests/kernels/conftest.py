"""Random paged requests for the attention tests, and Triton's interpreter where there is no GPU."""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if DEVICE == "cpu":  # Triton reads this when it is imported below
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tieredkv.kernels import checks, launch, prefill_dense  # noqa: E402
from tieredkv.kernels.checks import LayerCache  # noqa: E402
from tieredkv.kernels.partition import Batch, Heads, Span  # noqa: E402

SetTiles = Callable[..., ModuleType]


@contextlib.contextmanager
def choose(backend: str) -> Iterator[None]:
    """Choose the backend: `auto`, `reference`, `dense`, or Triton without the dense path."""
    with pytest.MonkeyPatch.context() as patch:
        if backend != "auto":
            patch.setattr(checks, "use_triton", lambda _: backend != "reference")
            patch.setattr(prefill_dense, "is_available", lambda _: backend == "dense")
        yield


@pytest.fixture(name="choose")
def choose_fixture() -> Callable[[str], contextlib.AbstractContextManager[None]]:
    return choose


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedCase:
    """A ragged batch over a pool in which everything that no request may read is NaN.

    Entries of the block tables before a request's window point at blocks of NaN.
    """

    q: Tensor
    cache: LayerCache
    block_tables: Tensor
    spans: list[Span]
    scale: float
    window: int | None = None
    sinks: Tensor | None = None

    @property
    def heads(self) -> Heads:
        num_kv_heads, head_dim = self.cache.k.shape[2:]
        return Heads(self.q.shape[1], num_kv_heads, head_dim, self.q.dtype, self.q.device)

    def batch(self) -> Batch:
        return launch.make_batch(self.block_tables, self.spans, self.heads, self.window)

    def attend(self, backend: str = "auto") -> Tensor:
        with choose(backend):
            return launch.paged_attention(
                self.q, self.cache, self.batch(), self.scale, window=self.window, sinks=self.sinks
            )

    def oracle(self) -> Tensor:
        """Compute attention by its definition, query by query, in float64 on the CPU."""
        q, k_cache, v_cache = (x.double().cpu() for x in (self.q, *self.cache))
        group = q.shape[1] // k_cache.shape[2]
        out = torch.zeros_like(q)
        for row, first_token, query_len, context_len in self.spans:
            table = self.block_tables[row].cpu()
            position = torch.arange(context_len)
            block_ids = table[position // k_cache.shape[1]]
            k = k_cache[block_ids, position % k_cache.shape[1]].repeat_interleave(group, 1)
            v = v_cache[block_ids, position % k_cache.shape[1]].repeat_interleave(group, 1)
            for index in range(query_len):
                end = context_len - query_len + index + 1
                seen = slice(max(0, end - (self.window or end)), end)
                token = first_token + index
                scores = torch.einsum("hd,khd->hk", q[token], k[seen]) * self.scale
                if self.sinks is not None:
                    scores = torch.cat([scores, self.sinks.to(scores)[:, None]], 1)
                weights = scores.softmax(-1)[:, : end - seen.start]
                out[token] = torch.einsum("hk,khd->hd", weights, v[seen])
        return out


@pytest.fixture
def device() -> str:
    """Return the device on which Triton's kernels run here."""
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
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> PagedCase:
        """Make requests of (query_len, context_len) whose blocks are scattered over the pool."""
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
        for row, (query_len, context_len) in enumerate(spans):
            own = ids[first : first + blocks[row]]
            first += blocks[row]
            tables[row, : blocks[row]] = own
            slots = (own[:, None] * block_size + torch.arange(block_size)).flatten()
            unseen = 0 if window is None else max(0, context_len - query_len - window + 1)
            tables[row, : unseen // block_size] = ids[-1]
            slots = slots[unseen:context_len].to(device)
            for half in range(2):
                fresh = torch.randn(len(slots), num_kv_heads, head_dim, device=device)
                pool[slots // block_size, 1, half, slots % block_size] = fresh.to(dtype)
        starts = list(itertools.accumulate((query_len for query_len, _ in spans), initial=0))
        q = torch.randn(starts[-1], num_heads, head_dim, device=device).to(dtype)
        return PagedCase(
            q=q,
            cache=LayerCache(pool[:, 1, 0], pool[:, 1, 1]),
            block_tables=tables.to(device),
            spans=[Span(row, starts[row], *span) for row, span in enumerate(spans)],
            scale=head_dim**-0.5,
            window=window,
            sinks=None if sinks is None else sinks.to(device),
        )

    return make


@pytest.fixture
def set_tiles(monkeypatch: pytest.MonkeyPatch) -> SetTiles:
    """Return a function that shrinks the tiles of products, so that short contexts have several."""

    def set_them(**sizes: int) -> ModuleType:
        products = checks.triton_module("prefill_products")
        small = {"ROWS": 16, "KEYS": 32, "DIMS": 32, "STEP": 16, "KEY_TILES": 2, "ROW_TILES": 2}
        small |= {"MIN_SHARE_TILES": 1}
        for name, size in (small | sizes).items():
            monkeypatch.setattr(products, name, size)
        return products

    return set_them


@pytest.fixture
def relative_error() -> Callable[[Tensor, Tensor], float]:
    """Return a function for ||out - expected|| / ||expected||; NaN if a value is NaN."""

    def measure(out: Tensor, expected: Tensor) -> float:
        expected = expected.double()
        return float((out.to(expected) - expected).norm() / expected.norm())

    return measure
