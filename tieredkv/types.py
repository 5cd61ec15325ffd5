"""The types that every layer shares; this module imports no other module of tieredkv.

Sizes are in bytes and times in wall-clock seconds since the epoch, unless a name says otherwise.
"""

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NewType, TypeVar

import msgspec

T = TypeVar("T")

BlockHash = NewType("BlockHash", bytes)
"""Chained digest of one full block; bytes, equal in every process and on every machine."""

BlockId = NewType("BlockId", int)
"""Index of a block in the device pool."""

PageId = NewType("PageId", int)
"""Index of a block-sized page in the host arena."""

HashAlgo = Literal["sha256", "xxh3_128"]
"""SHA-256, or the fast one that is not collision-resistant: for a single trusted tenant only."""

TENANT_BYTES = 8
"""Number of first bytes of a namespace's digest, which identify the tenant."""

NAMESPACE_BYTES = 32
"""Number of bytes of a namespace's digest."""

PAGE_ALIGNMENT_BYTES = 4096
"""Arena pages and disk extents start and end on multiples of this, as O_DIRECT asks."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Tier(enum.StrEnum):
    """Where a copy of a block is; the fastest tier comes first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"

    def __repr__(self) -> str:
        return repr(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """The shape of the keys and values of one model.

    The device pool is `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`, so that a
    block is one contiguous byte range in every tier.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_size: int

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token, all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return self.token_bytes * self.block_size

    @property
    def page_bytes(self) -> int:
        """Bytes of one arena page: a block, rounded up to the alignment of O_DIRECT."""
        return -(-self.block_bytes // PAGE_ALIGNMENT_BYTES) * PAGE_ALIGNMENT_BYTES


class BlockRecord(msgspec.Struct, frozen=True, array_like=True):
    """Identity and retention of one full block, as the tiers hand it to one another.

    Attributes:
        block_hash: the key; 32 bytes for SHA-256, 16 for xxh3_128.
        parent_hash: the hash of the block before it; the root for position 0.
        root: the chain's root digest: model, KV dtype, layout, block size, namespace.
        namespace: digest of tenant and salt, of 32 bytes; tenants never share.
        position: index of the block in its chain, 0 for the first.
        size_bytes: payload bytes, before any compression.
        retention: name of the longest retention policy that asked for the block.
        computed_at: when its keys and values were computed; its age always counts from here.
        expires_at: unreachable from this moment on.
        last_used: last hit or store.
        pinned_until: until then it is evicted only after all blocks that are not pinned.
        hits: how many requests found it, without the one that computed it.
        kind: what the page holds; 0 is the keys and values of a block of tokens, as a chain has it.
        part, num_parts: number of the page among those that belong together, and how many these
            are; 0 and 1 for a block.
        page_form: how the bytes of the page are laid out; 0 as `KVSpec` says.
    """

    block_hash: bytes
    parent_hash: bytes
    root: bytes
    namespace: bytes
    position: int
    size_bytes: int
    retention: str
    computed_at: float
    expires_at: float
    last_used: float
    pinned_until: float = 0.0
    hits: int = 0
    kind: int = 0
    part: int = 0
    num_parts: int = 1
    page_form: int = 0


Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total) now and then during long work; an unknown total is 0."""


def ignore_progress(_stage: str, _done: int, _total: int) -> None:
    """Report progress to nobody."""


def tracked(progress: Progress, stage: str, items: Sequence[T]) -> Iterator[T]:
    """Yield the items, and report how many of them are done."""
    for done, item in enumerate(items):
        progress(stage, done, len(items))
        yield item
    progress(stage, 1, 1)
