"""The types that every layer shares; this module imports no other module of tieredkv.

Sizes are in bytes and times in wall-clock seconds since the epoch, unless a name says otherwise.
"""

import enum
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, NewType, TypeVar

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

STATE_GRID_TOKENS = 64
"""Recurrent states are kept at multiples of so many tokens, at which computing them may be cut
without changing a bit of the result."""


class Tier(enum.StrEnum):
    """Where a copy of a block is; the fastest tier comes first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"

    def __repr__(self) -> str:
        return repr(self.value)


class LayerKV(NamedTuple):
    """The shape of the keys and values of one token in one layer, and who attends to them.

    Attributes:
        window: how many tokens before its own end a token attends to; None for all.
        values_in_keys: whether the values are the first elements of the keys, as in latent
            attention (MLA), and are not stored a second time.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    values_in_keys: bool = False

    @property
    def num_elements(self) -> int:
        """Elements of the keys and values of one token."""
        return (1 if self.values_in_keys else 2) * self.num_kv_heads * self.head_dim


MAX_KEPT_WITHIN = 2
"""At so many places within the tokens that a step computes for a request its state can be kept."""

MAX_PASSING_TOKENS = 256
"""The most tokens that a step computes for a request from the first of such places on."""


class StateShape(NamedTuple):
    """What a recurrent layer keeps of all tokens before: gated delta rule and short convolution.

    Every head has a state `[key_dim, value_dim]`. The convolution keeps its last `conv_width - 1`
    inputs `[num_channels, conv_width - 1]`. All of it is float32, in pieces of one head's state:
    those of the heads, then those of the convolution, the last of which may not be full.
    """

    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: queries, keys and values of all heads."""
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim

    @property
    def piece_elements(self) -> int:
        """Elements of one piece."""
        return self.key_dim * self.value_dim

    @property
    def conv_elements(self) -> int:
        """Elements of what the convolution keeps."""
        return self.num_channels * (self.conv_width - 1)

    @property
    def layer_pieces(self) -> int:
        """Pieces of one layer."""
        return self.num_heads + -(-self.conv_elements // self.piece_elements)


class PageKind(NamedTuple):
    """What one of the pages of a block holds.

    Attributes:
        window: of its layers.
        layers: their indices in `KVSpec.layers`, in their order in the page.
    """

    window: int | None
    layers: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """How the keys and values of one model lie in pages.

    The layers that attend to all tokens have one page for each block of `block_size` tokens, which
    sets the size of all pages; where there are none, those of the largest group with one window
    do. Layers with a window are dealt to further pages of that size, in their order. A page is one
    contiguous byte range in every tier. It holds layer after layer, of each layer
    `[2, block_size, num_kv_heads, head_dim]`: its keys, then its values. A layer whose values lie
    in its keys has `[block_size, num_kv_heads, head_dim]`.

    The state of all recurrent layers at one position is dealt to further pages of that size, piece
    after piece, and no piece lies in two pages.

    Attributes:
        layers: the layers that have keys and values of their own.
        dtype: of keys and values.
        block_size: tokens a block.
        states: the recurrent layers, whose shapes are all the same.
    """

    layers: Sequence[LayerKV]
    dtype: str
    block_size: int
    states: Sequence[StateShape] = ()

    @property
    def token_elements(self) -> int:
        """Elements of the part of a page that one token fills, if all of the page is used."""
        sizes = Counter[int | None]()
        for layer in self.layers:
            sizes[layer.window] += layer.num_elements
        return sizes[None] or max(sizes.values(), default=0)

    @property
    def page_kinds(self) -> list[PageKind]:
        """What each of the pages of a block holds; the layers that attend to all come first."""
        most, kinds = self.token_elements, list[PageKind]()
        windows = {layer.window for layer in self.layers}
        for window in sorted(windows, key=lambda it: (it is not None, it)):
            room = 0
            for index, layer in enumerate(self.layers):
                if layer.window == window:
                    if layer.num_elements > room:
                        room = most
                        kinds.append(PageKind(window, []))
                    room -= layer.num_elements
                    kinds[-1] = PageKind(window, [*kinds[-1].layers, index])
        return kinds

    @property
    def unused_share(self) -> float:
        """What share of the pages of a block holds nothing, since no further layer fits."""
        num_elements = sum(layer.num_elements for layer in self.layers)
        return 1 - num_elements / (self.token_elements * len(self.page_kinds))

    @property
    def page_pieces(self) -> int:
        """Pieces of a recurrent state that a page has room for; 0 if not even one fits."""
        return self.block_bytes // (4 * self.states[0].piece_elements) if self.states else 0

    @property
    def state_pages(self) -> int:
        """Pages of the recurrent state at one position."""
        num_pieces = sum(state.layer_pieces for state in self.states)
        return -(-num_pieces // self.page_pieces) if num_pieces else 0

    @property
    def grid_blocks(self) -> int:
        """Behind a multiple of how many blocks requests may go on."""
        return math.lcm(self.block_size, STATE_GRID_TOKENS) // self.block_size if self.states else 1

    def first_element(self, kind: PageKind, num_layers: int) -> int:
        """Return how many elements the first layers of a page have."""
        sizes = (self.layers[index].num_elements for index in kind.layers[:num_layers])
        return self.block_size * sum(sizes)

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token in a page."""
        return self.token_elements * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one page of a block."""
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


def window_blocks(window: int, block_size: int) -> int:
    """Return of how many of the last blocks before a token a window may reach some tokens.

    It is at least one, so that a window of one token is kept like any other.
    """
    return max(1, -(-(window - 1) // block_size))


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
