"""Digests of keys and values in VRAM, to compare loaded blocks with computed ones."""

from collections.abc import Iterator

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

    def of_prompt(self, request: EngineRequest) -> str | None:
        """Return the xxh3_128 digest of all of a prompt's full blocks, beginning at the head.

        None if a block is not in VRAM.
        """
        digest = xxhash.xxh3_128()
        for _, content in self._contents(request):
            if content is None:
                return None
            digest.update(content)
        return digest.hexdigest()

    def by_block(self, request: EngineRequest) -> dict[BlockHash, str]:
        """Return the xxh3_128 digests of a prompt's full blocks that are in VRAM, by hash."""
        return {
            block_hash: xxhash.xxh3_128_hexdigest(content)
            for block_hash, content in self._contents(request)
            if content is not None
        }

    def _contents(self, request: EngineRequest) -> Iterator[tuple[BlockHash, bytes | None]]:
        """Yield the hash and the bytes of each full block of a prompt; None if VRAM has it not."""
        hashes = self._prefixes.make(request, request.prompt_token_ids).hashes
        for block_hash, block in zip(hashes, self._device.find(hashes), strict=True):
            if block is None or not block.is_ready:
                yield block_hash, None
            else:
                yield block_hash, self._device_blocks[block.block_id].cpu().numpy().tobytes()
