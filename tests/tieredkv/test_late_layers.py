"""Blocks whose first layers have come to VRAM, and whose late layers are still on their way."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.fake_store import Rig, chain_of, kept_by, root_of
from tests.fakes import FakeClock
from tests.waiting import wait_until
from tieredkv.cache.catalog import Catalog
from tieredkv.cache.chain import Chain
from tieredkv.cache.device_link import MIN_SPLIT_BYTES, DeviceLink
from tieredkv.cache.pool import BlockPool
from tieredkv.cache.recalls import RequestProgress
from tieredkv.cache.requests import TieredCache
from tieredkv.cache.settings import CacheSettings
from tieredkv.cache.tiers import Tiers
from tieredkv.engine.kv_digests import KVDigests
from tieredkv.kernels.copies import BlockCopier
from tieredkv.retention import DEFAULT_POLICIES, RetentionPolicies
from tieredkv.types import Tier

HASHES = chain_of("a", 4)


def begin_hit(rig: Rig) -> Chain:
    """Have a request find a chain in host memory, of which the first layers have come to VRAM."""
    rig.run("a", 4, "in_memory")
    assert rig.cache.flush(Tier.HOST, deadline=1e12)
    rig.transfer.is_held = True
    prefix = rig.start("a", 4)
    rig.turn()
    rig.transfer.begin()
    rig.cache.poll(may_start_early=True)
    assert rig.on_device("a", 4) == [0, 1, 2, 3]
    return prefix


def fill_vram(rig: Rig, _prefix: Chain) -> None:
    """Leave so few blocks free that those in use are copied ahead of need."""
    rig.start("b", 3)


def claim_disk(rig: Rig, prefix: Chain) -> None:
    """Have the disk be owed the blocks."""
    rig.cache.touch(prefix)


def drain(rig: Rig, prefix: Chain) -> None:
    claim_disk(rig, prefix)
    rig.turn()
    rig.cache._demoter.is_draining = True
    rig.cache._demoter.write_owed()
    rig.cache._demoter.is_draining = False


def send_to_disk(rig: Rig, prefix: Chain) -> None:
    claim_disk(rig, prefix)
    rig.turn()
    rig.cache._departures.send(HASHES, Tier.DISK)


def send_to_host(rig: Rig, _prefix: Chain) -> None:
    rig.cache._departures.send(HASHES, Tier.HOST)


@pytest.mark.parametrize("road", [fill_vram, claim_disk, drain, send_to_disk, send_to_host])
def test_a_block_is_copied_down_and_written_only_once_its_late_layers_have_come(
    road: Callable[[Rig, Chain], None],
) -> None:
    rig = Rig(num_blocks=8, reserve=2, is_write_behind=True)
    prefix = begin_hit(rig)
    for block_hash in HASHES:  # as an operator's eviction from host memory does
        rig.tiers.drop_copy(Tier.HOST, block_hash)
    rig.cache._demoter.note_change()
    road(rig, prefix)
    for _ in range(4):
        rig.turn()
        rig.transfer.complete_down()
    assert (rig.on_host("a", 4), rig.on_disk("a", 4)) == ([], [])
    rig.transfer.is_held = False
    rig.turn(4)
    rig.finish(prefix)
    rig.turn(20)
    if road is not send_to_host and road is not fill_vram:
        assert rig.on_disk("a", 4) == [0, 1, 2, 3]
    else:
        assert rig.on_host("a", 4) == [0, 1, 2, 3]
    assert rig.run("a", 4) == 0


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_page_that_is_dropped_while_it_is_copied_to_vram_leaves_the_block_there(
    has_begun: bool,
) -> None:
    rig = Rig(has_store=False)
    rig.run("a", 4)
    assert rig.cache.flush(Tier.HOST, deadline=1e12)
    rig.transfer.is_held = True
    prefix = rig.start("a", 4)
    rig.turn()
    if has_begun:
        rig.transfer.begin()
        rig.cache.poll(may_start_early=True)
    for block_hash in HASHES:
        rig.tiers.drop_copy(Tier.HOST, block_hash)
    rig.check()
    rig.transfer.is_held = False
    rig.turn()
    assert rig.finish(prefix) == 0
    assert rig.run("a", 4) == 0
    rig.check_nothing_is_held()


def test_a_digest_of_vram_leaves_out_blocks_whose_late_layers_are_still_coming() -> None:
    rig = Rig(num_blocks=8)
    prefix = begin_hit(rig)
    prefixes: Any = SimpleNamespace(make=lambda _request, _token_ids: prefix)
    digests = KVDigests(prefixes, rig.cache.operations, rig.device_bytes)
    request: Any = SimpleNamespace(prompt_token_ids=[])
    assert digests.by_block(request) == {}
    rig.transfer.is_held = False
    rig.turn()
    assert [*digests.by_block(request)] == HASHES


class _SlowLateLayers(BlockCopier):
    """Copies whose late layers come long after the first ones."""

    def copy_in(
        self,
        pairs: Sequence[tuple[int, int]],
        stream: torch.cuda.Stream | None = None,
        part: slice = slice(None),
    ) -> None:
        if part.start:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]
        super().copy_in(pairs, stream, part)


@pytest.mark.gpu
def test_late_layers_on_a_device_reach_host_memory_only_as_they_are() -> None:
    num_bytes = MIN_SPLIT_BYTES // len(HASHES)
    blocks = torch.zeros((4, num_bytes), dtype=torch.uint8, device="cuda")
    arena = torch.zeros((8, num_bytes), dtype=torch.uint8).pin_memory()
    link = DeviceLink[Any](_SlowLateLayers(blocks, arena), early_bytes=num_bytes // 2)
    tiers = Tiers(
        device=BlockPool(4),
        host=BlockPool(8),
        catalog=Catalog(RetentionPolicies(DEFAULT_POLICIES)),
        store=None,
        device_link=link,
        clock=FakeClock(),
        vram_bytes=num_bytes,
        payload_bytes=num_bytes,
        settings=CacheSettings(restore="load"),
    )
    cache = TieredCache(tiers)

    def start() -> Chain:
        prefix = Chain(root_of("a"), b"ns", list(HASHES), claims=kept_by("in_memory"))
        cache.arrive(prefix)
        assert cache.admit(prefix, len(HASHES))
        return prefix

    def turn() -> bool:
        """Do what a step does; return whether everything has moved."""
        cache.poll()
        cache.pump()
        return cache.is_idle and not cache._departures

    def page_values() -> dict[int, list[int]]:
        """Return the bytes of each block that host memory holds, by its place in the chain."""
        pages = tiers.host.find(HASHES)
        return {
            index: np.unique(arena[page.block_id].numpy()).tolist()
            for index, page in enumerate(pages)
            if page is not None and page.is_ready
        }

    first = start()
    for number, block in enumerate(first.blocks, start=1):
        blocks[block.block_id] = number
    cache.end_step()
    cache.complete(first, 0, len(HASHES))
    cache.release(first)
    assert cache.flush(Tier.HOST, deadline=1e12)
    right = {index: [index + 1] for index in range(len(HASHES))}
    assert page_values() == right
    blocks.fill_(99)
    torch.cuda.synchronize()

    second = start()
    cache.plan([RequestProgress(second, 0, len(HASHES))])
    cache.pump()

    def has_begun() -> bool:
        cache.poll(may_start_early=True)
        return all(block.is_ready for block in second.blocks)

    wait_until(has_begun, "the first layers have not come")
    assert any(block.is_copying for block in second.blocks), "the late layers were too fast"
    for block_hash in HASHES:
        tiers.drop_copy(Tier.HOST, block_hash)
    cache._departures.send(HASHES, Tier.HOST)
    wait_until(turn, "copies go on for ever")
    assert page_values() == right
    in_vram = blocks[[block.block_id for block in second.blocks]].cpu().numpy()
    assert [np.unique(each).tolist() for each in in_vram] == [[1], [2], [3], [4]]
    cache.check()
    cache.release(second)
