"""The wire format of KV cache events: batches of changes as vLLM 0.33 encodes them.

A message has three frames: the topic, the number of the batch (u64, big-endian) and the batch in
MessagePack. A batch is an array; each event is a map, and its `type` is the name of the class.

    [ts, [event, ...], data_parallel_rank]
    {"type": "BlockStored", "block_hashes": [bytes, ...], "parent_block_hash": bytes | None, ...}

The fields without a default are always there. This module knows no socket.

Source: `vllm/distributed/kv_events.py` of vLLM 0.33.0.
"""

from array import array
from collections.abc import Iterable, Iterator

import msgspec

from tieredkv.cache.events import Change
from tieredkv.types import Tier

MEDIA = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.DISK: "STORAGE"}
"""What vLLM calls the tiers."""

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
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(KVEvent):
    """Blocks that a medium has no more."""

    block_hashes: list[bytes]
    medium: str | None


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
    for tier, block_hash, content in changes:
        medium = MEDIA[tier]
        event: BlockStored | BlockRemoved
        if content is None:
            if isinstance(last, BlockRemoved) and last.medium == medium:
                last.block_hashes.append(block_hash)
                continue
            event = BlockRemoved([block_hash], medium)
        else:
            parent, tokens = content.parent_hash, array("I", content.token_ids).tolist()
            if (
                isinstance(last, BlockStored)
                and last.medium == medium
                and last.block_hashes[-1] == parent
            ):
                last.block_hashes.append(block_hash)
                last.token_ids += tokens
                continue
            event = BlockStored([block_hash], parent, tokens, block_size, None, medium, None)
        if last is not None:
            yield last
        last = event
    if last is not None:
        yield last
