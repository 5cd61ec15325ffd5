"""One block of VRAM or one page of host memory: who uses it, and what is true of its content.

This holds for every request alike. What is true for one request stands in its chain.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from tieredkv.errors import IntegrityError
from tieredkv.types import BlockHash, Tier


class Content(IntEnum):
    """How far the content of a block has come.

    EMPTY      nothing of it is there
    COMPUTING  a step has computed some of its tokens, or is about to, so that it is not loaded
    COPYING    it is being copied from a slower tier, so that it is not computed
    EARLY      its first layers have been copied, so that a step can begin with it; not the others
    WHOLE      all of it is there, so that it may be copied itself
    """

    EMPTY = 0
    COMPUTING = 1
    COPYING = 2
    EARLY = 3
    WHOLE = 4


_EMPTY, _, _COPYING, _EARLY, _WHOLE = Content


@dataclass(slots=True, eq=False)
class Block:
    """One block of a pool.

    Attributes:
        block_id: index in the pool's memory.
        ref_count: number of users; 0 means that it is in the free list.
        num_readers: number of copies that read the content; above 0 its memory is not reused.
        block_hash: identity of the content, None for a private or an empty block.
        content: how far it has come; the methods below change it.
        is_ready: whether a step can begin with the content, as it is early or ready. A hashed block
            that is not is being filled. It is kept beside `content`, since it is asked so often.
        last_step: the last step that may use its memory, but for those of its present users.
        source: the slower tier that its content came from, or may come from; None if a request
            computed it, or has to, and of a page whose content was copied to VRAM.
        tenant: the tenant that the content belongs to.
        is_clean: whether evicting it loses nothing; set by `BlockPool.put_clean`.
        is_double: whether a faster tier keeps the same content; it then goes before other blocks.
            A change applies from its next use on.
        part, rank: where it is in the free list; `part` is None while it is in use or empty,
            and `rank` is 0 until its turn has come.
        place: what the order of eviction remembers of it; None for new content.
    """

    block_id: int
    ref_count: int = 0
    num_readers: int = 0
    block_hash: BlockHash | None = field(default=None, repr=False)  # no log may show it
    content: Content = Content.EMPTY
    is_ready: bool = False
    last_step: int = 0
    source: Tier | None = None
    tenant: bytes = b""
    is_clean: bool = True
    is_double: bool = False
    part: Any = field(default=None, repr=False)
    rank: int = 0
    place: Any = field(default=None, repr=False)

    @property
    def is_whole(self) -> bool:
        """Whether the bytes of all layers are there, so that the content may be copied."""
        return self.content == _WHOLE

    @property
    def is_open(self) -> bool:
        """Whether nothing fills it yet, so that it may still be computed or loaded."""
        return self.content == _EMPTY

    @property
    def is_copying(self) -> bool:
        """Whether a copy into it is under way; it is held until that has ended."""
        return self.content in (_COPYING, _EARLY)

    def begin_copy(self) -> None:
        """Note that it is filled from a slower tier from now on.

        Raises:
            IntegrityError: something else fills it already.
        """
        if self.content != _EMPTY:
            raise IntegrityError(f"{self} has two writers")
        self.content = _COPYING

    def fill(self, *, is_whole: bool = True) -> None:
        """Note that its content is there, or that of its first layers."""
        self.content, self.is_ready = _WHOLE if is_whole else _EARLY, True


def begin_compute(blocks: Iterable[Block]) -> None:
    """Note that a step computes some tokens of each of these blocks."""
    empty, computing = Content.EMPTY, Content.COMPUTING
    for block in blocks:
        if block.content is empty:
            block.content = computing


def clear(blocks: Iterable[Block]) -> None:
    """Note that the memory of each of these blocks holds nothing."""
    empty = Content.EMPTY
    for block in blocks:
        block.content, block.is_ready, block.source = empty, False, None
        block.is_clean, block.is_double = True, False
