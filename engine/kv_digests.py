"""Digests of keys and values in VRAM, to compare loaded blocks with computed ones."""

import xxhash
from torch import Tensor

from tieredkv.cache.pool import BlockPool
from tieredkv.engine.engine_messages import EngineRequest
from tieredkv.engine.prefixes import Prefixes
from tieredkv.types import BlockHash


class KVDigests:
    """Reads the full blocks of prompts from VRAM.

    Args:
        prefixes: hashes the prompts.
        device: which blocks are in VRAM.
        device_blocks: uint8 [num_blocks, block_bytes], their contents.
    """

    def __init__(self, prefixes: Prefixes, device: BlockPool, device_blocks: Tensor) -> None:
        self._prefixes, self._device, self._device_blocks = prefixes, device, device_blocks

    def by_block(self, request: EngineRequest) -> dict[BlockHash, str]:
        """Return the xxh3_128 digests of a prompt's full blocks that are in VRAM, head to tail.

        A block is left out while some of its layers are still on their way to VRAM.
        """
        hashes = self._prefixes.make(request, request.prompt_token_ids).hashes
        return {
            block_hash: xxhash.xxh3_128_hexdigest(
                self._device_blocks[block.block_id].cpu().numpy().data
            )
            for block_hash, block in zip(hashes, self._device.find(hashes), strict=True)
            if block is not None and block.is_whole
        }
