"""Digests of keys and values in VRAM, to compare loaded blocks with computed ones."""

import xxhash
from torch import Tensor

from tieredkv.cache.operations import Operations
from tieredkv.engine.chains import Chains
from tieredkv.engine.engine_messages import EngineRequest
from tieredkv.types import BlockHash


class KVDigests:
    """Reads the full blocks of prompts from VRAM.

    Args:
        chains: hashes the prompts.
        operations: knows which blocks are in VRAM.
        device_blocks: uint8 [num_blocks, block_bytes], their contents.
    """

    def __init__(self, chains: Chains, operations: Operations, device_blocks: Tensor) -> None:
        self._chains, self._operations, self._device_blocks = chains, operations, device_blocks

    def by_block(self, request: EngineRequest) -> dict[BlockHash, str]:
        """Return the xxh3_128 digests of a prompt's full blocks that are in VRAM, head to tail.

        Behind them come the pages of windows or of a state that a hit needs which ends behind them,
        or at the last place before. What is on its way to VRAM is left out while some of its layers
        are.
        """
        chain = self._chains.make(request, request.prompt_token_ids)
        hashes = chain.hashes
        if chain.tail is not None:
            needed = chain.tail.needed(chain.tail.floor(len(hashes)))
            hashes = hashes + chain.tail.hashes[needed.start : needed.stop]
        return {
            block_hash: xxhash.xxh3_128_hexdigest(self._device_blocks[block_id].cpu().numpy().data)
            for block_hash, block_id in self._operations.vram_blocks(hashes).items()
        }
