"""The wire format of KV cache events: batches of changes as vLLM 0.33 encodes them.

A message has three frames: the topic, the number of the batch (u64, big-endian) and the batch in
MessagePack. A batch is an array; each event is a map, and its `type` is the name of the class.

    [ts, [event, ...], data_parallel_rank]
    {"type": "BlockStored", "block_hashes": [bytes, ...], "parent_block_hash": bytes | None, ...}

The fields without a default are always there. This module knows no socket.

Of a model whose layers have sliding windows, events with a `group_idx` are of anchors: places
behind a block where a medium has all that the windows need, so that a request can go on there.

Source: `vllm/distributed/kv_events.py` of vLLM 0.33.0.
"""

from array import array
from collections.abc import Iterable, Iterator

import msgspec

from tieredkv.cache.events import Change
from tieredkv.types import Tier

MEDIA = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.DISK: "STORAGE"}
"""What vLLM calls the tiers."""

ANCHOR_GROUP = 1
"""The `group_idx` of anchors. Events of the layers that attend to all tokens have none."""

END_SEQ = (-1).to_bytes(8, "big", signed=True)
"""In the place of a batch's number: the end of a replay."""


class KVEvent(msgspec.Struct, omit_defaults=True, tag=True):
    """Something that has changed in one medium."""


class BlockStored(KVEvent):
    """Blocks that a medium has from now on, each the parent of the next.

    Attributes:
        block_hashes: 32 bytes each, or 16 with `hash_algo = "xxh3_128"`.
        parent_block_hash: of the block before the first one; None at the start of a prompt.
        token_ids: of all the blocks, one after another.
        block_size: tokens of one block.
        lora_id, lora_name: None, as adapters are not served.
        medium: see `MEDIA`.
        group_idx: None, or `ANCHOR_GROUP` of the anchor behind the only block.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    group_idx: int | None = None


class BlockRemoved(KVEvent):
    """Blocks, or the anchors behind them, that a medium has no more."""

    block_hashes: list[bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVEvent):
    """No medium has any block."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """What one step has changed; `ts` is in seconds since the epoch."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def seq_frame(seq: int) -> bytes:
    """Return the number of a batch as a frame."""
    return seq.to_bytes(8, "big")


def events_of(changes: Iterable[Change], block_size: int) -> Iterator[BlockStored | BlockRemoved]:
    """Yield the events that tell of changes, in their order; neighbours of a kind share one."""
    last: BlockStored | BlockRemoved | None = None
    for tier, block_hash, content, is_anchor in changes:
        medium, group = MEDIA[tier], ANCHOR_GROUP if is_anchor else None
        is_like_last = last is not None and (last.medium, last.group_idx) == (medium, group)
        event: BlockStored | BlockRemoved
        if content is None:
            if isinstance(last, BlockRemoved) and is_like_last:
                last.block_hashes.append(block_hash)
                continue
            event = BlockRemoved([block_hash], medium, group)
        else:
            parent, tokens = content.parent_hash, array("I", content.token_ids).tolist()
            if (
                isinstance(last, BlockStored)
                and is_like_last
                and not is_anchor
                and last.block_hashes[-1] == parent
            ):
                last.block_hashes.append(block_hash)
                last.token_ids += tokens
                continue
            event = BlockStored([block_hash], parent, tokens, block_size, None, medium, None, group)
        if last is not None:
            yield last
        last = event
    if last is not None:
        yield last
