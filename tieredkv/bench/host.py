"""`bench host`: what the engine's thread spends on a long prompt before and beside its kernels.

The scheduler and the tiered cache are the real ones; the blocks are of a few bytes, so that what is
measured is the work on hashes, blocks and tables. Each state is measured with a prompt of its own:

    none      nothing of it is cached
    device    all of it is in VRAM
    host      all of it is in host memory
"""

import random
import time
from typing import Any

import torch

from tieredkv.block_pool import BlockPool
from tieredkv.cache.directory import Directory
from tieredkv.cache.tiered import Prefix, TieredCache
from tieredkv.cache.tiers import Tiers
from tieredkv.clock import Clock
from tieredkv.engine.request import Request
from tieredkv.engine.sampler import SamplerState
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.engine.scheduler import Scheduler
from tieredkv.hashing import chain_hashes
from tieredkv.kernels.copies import BlockCopier
from tieredkv.retention import RetentionPolicies
from tieredkv.transfer import BlockTransfer
from tieredkv.types import BlockHash, Tier

BLOCK_BYTES = 8
VOCAB_SIZE = 128_256
ROOT = BlockHash(b"bench host".ljust(32, b"\0"))


class _Host:
    """A scheduler over pools of tiny blocks."""

    def __init__(self, num_blocks: int, block_size: int, num_prompt_tokens: int) -> None:
        memories = [torch.zeros(num_blocks, BLOCK_BYTES, dtype=torch.uint8) for _ in range(2)]
        transfer = BlockTransfer[Any](
            BlockCopier(*memories), device=torch.device("cpu"), block_bytes=BLOCK_BYTES
        )
        self.tiers = Tiers(
            device=BlockPool(num_blocks, on_evict=lambda _b, h: self.tiers.forget_if_absent(h)),
            host=BlockPool(num_blocks, on_evict=lambda _b, h: self.tiers.forget_if_absent(h)),
            directory=Directory(RetentionPolicies()),
            transfer=transfer,
            store=None,
            clock=Clock(),
            block_bytes=BLOCK_BYTES,
        )
        self.cache = TieredCache(self.tiers, device_reserve_blocks=1)
        self.scheduler = Scheduler(
            self.cache,
            block_size=block_size,
            max_num_seqs=256,
            max_num_batched_tokens=num_prompt_tokens,
            hash_algo="sha256",
        )
        self._block_size = block_size

    def serve(self, token_ids: list[int]) -> dict[str, float]:
        """Serve a prompt to its first token; return milliseconds of each part."""
        marks = [time.perf_counter()]
        hashes = chain_hashes(ROOT, token_ids, self._block_size)
        marks.append(time.perf_counter())
        params = SamplingParams(max_tokens=1, temperature=0.0)
        request = Request(
            request_id="r",
            params=params,
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            prefix=Prefix(root=ROOT, namespace=b"", hashes=hashes, retention="in_memory"),
            sampler=SamplerState.from_params(params, 0),
            max_output_tokens=1,
        )
        self.scheduler.add(request)
        rows = self.scheduler.schedule()
        marks.append(time.perf_counter())
        self.cache.pump()
        while not rows or not rows[-1].row.needs_logits:
            for row in rows:
                self.scheduler.complete(row)
            self.cache.poll()
            rows = self.scheduler.schedule()
        marks.append(time.perf_counter())
        for row in rows:
            self.scheduler.complete(row)
        request.measure_usage(self._block_size, 0)
        self.cache.touch(request.prefix)
        marks.append(time.perf_counter())
        self.scheduler.remove(request)
        self.cache.pump()
        marks.append(time.perf_counter())
        parts = ("hash_ms", "lookup_ms", "load_ms", "complete_ms", "release_ms")
        result = {
            name: 1e3 * (after - before)
            for name, before, after in zip(parts, marks[:-1], marks[1:], strict=True)
        }
        return result | {"until_first_token_ms": 1e3 * (marks[3] - marks[0])}


def measure(num_tokens: int, block_size: int, repeats: int) -> list[dict[str, Any]]:
    """Measure a prompt in each state; medians of the repeats."""
    num_blocks = num_tokens // block_size
    host = _Host(2 * num_blocks + 2, block_size, num_tokens)
    generator = random.Random(0)
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(repeats):
        prompt = generator.choices(range(VOCAB_SIZE), k=num_tokens)
        longer = [*prompt, *generator.choices(range(VOCAB_SIZE), k=block_size)]
        found.setdefault("none", []).append(host.serve(prompt))
        found.setdefault("device", []).append(host.serve(longer[:-1]))
        if not host.cache.demoter.flush(Tier.HOST, deadline=time.monotonic() + 60):
            raise RuntimeError("the prompt did not reach host memory")
        found.setdefault("host", []).append(host.serve(longer[:-1]))
        host.cache.evict(lambda _: True)
    return [
        {"state": state, "prompt_tokens": num_tokens, "block_size": block_size}
        | {name: sorted(run[name] for run in runs)[len(runs) // 2] for name in runs[0]}
        for state, runs in found.items()
    ]
