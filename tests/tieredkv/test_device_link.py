"""Copies between device blocks and host pages."""

import time
from typing import Any

import pytest
import torch

from tieredkv.cache.device_link import (
    LEAST_SHARE,
    MAX_COPY_S,
    MIN_MEASURED_BYTES,
    DeviceLink,
    _Pending,
    time_link,
)
from tieredkv.cache.plan import LinkState
from tieredkv.kernels.copies import BlockCopier
from tieredkv.types import BlockId, PageId

BLOCK_BYTES = 1 << 16


def make_transfer(
    device: torch.device, num_blocks: int = 4
) -> tuple[DeviceLink[str], torch.Tensor, torch.Tensor]:
    blocks = torch.zeros((num_blocks, BLOCK_BYTES), dtype=torch.uint8, device=device)
    arena = torch.zeros((num_blocks, BLOCK_BYTES), dtype=torch.uint8)
    if device.type == "cuda":
        arena = arena.pin_memory()
    return DeviceLink[str](BlockCopier(blocks, arena)), blocks, arena


def test_bytes_arrive_and_each_tag_comes_back_once_in_order() -> None:
    transfer, blocks, arena = make_transfer(torch.device("cpu"))
    arena[0], arena[1] = 10, 11
    transfer.promote([(PageId(0), BlockId(2))], "up 1")
    transfer.promote([(PageId(1), BlockId(3))], "up 2")
    transfer.demote([(BlockId(2), PageId(3)), (BlockId(3), PageId(2))], "down")
    assert transfer.has_pending
    assert transfer.has_completed
    assert transfer.poll() == (["up 1", "up 2"], ["down"])
    assert transfer.poll() == ([], [])
    assert not transfer.has_pending
    assert not transfer.has_completed
    assert (int(blocks[2, 5]), int(arena[3, 5]), int(arena[2, 5])) == (10, 10, 11)


def test_the_rate_is_learnt_from_promotions_that_are_no_measure_of_latency() -> None:
    num_blocks = MIN_MEASURED_BYTES // BLOCK_BYTES
    link, _, _ = make_transfer(torch.device("cpu"), num_blocks=num_blocks)
    pairs = [(PageId(i), BlockId(i)) for i in range(num_blocks)]
    link.promote(pairs[1:], "small")
    link.demote([(block_id, page_id) for page_id, block_id in pairs], "down")
    link.poll()
    assert not link.up_rate.is_learnt
    link.promote(pairs, "large")
    assert not link.up_rate.is_learnt
    link.poll()
    assert link.up_rate.is_learnt


def test_the_planner_is_told_how_long_promotions_keep_the_link() -> None:
    link, _, _ = make_transfer(torch.device("cpu"))
    link.up_rate.bytes_per_s = 100 * BLOCK_BYTES
    assert link.up_state(50, 0.0) == LinkState(100 * BLOCK_BYTES, BLOCK_BYTES, 0.5, is_steady=True)
    assert link.most_promotions == int(100 * MAX_COPY_S)
    link.up_rate.bytes_per_s = 1.0
    assert link.most_promotions == 1, "the link always has something to do"


def test_the_link_is_taken_to_give_a_tenth_of_what_it_gave_at_the_start_at_least() -> None:
    """So it is used, and what it moves corrects a rate that is thought to be too low."""
    num_blocks = 2 * MIN_MEASURED_BYTES // BLOCK_BYTES
    blocks = torch.zeros((num_blocks, BLOCK_BYTES), dtype=torch.uint8)
    link = DeviceLink[tuple[float, tuple[()]]](BlockCopier(blocks, blocks.clone()))
    time_link(link, num_blocks, BLOCK_BYTES)
    measured = link.up_rate.steady
    assert link.up_rate.is_learnt and link.up_bytes_per_s == measured
    link.up_rate.bytes_per_s = 1e-3 * measured
    assert link.up_bytes_per_s == LEAST_SHARE * measured
    assert link.up_state(0, 0.0).bytes_per_s == LEAST_SHARE * measured


class Moment:
    """Stands in for a CUDA event that comes when it is told to."""

    def __init__(self) -> None:
        self.has_come = False

    def query(self) -> bool:
        return self.has_come

    def elapsed_time(self, _other: object) -> float:
        return 1.0


def test_what_a_promotion_under_way_has_moved_keeps_the_link_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link, _, _ = make_transfer(torch.device("cpu"))
    link.up_rate.bytes_per_s = 100 * BLOCK_BYTES
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def busy_s() -> float:
        link.poll()
        return link.up_state(50, now).busy_s

    begun, ended = [Moment(), Moment()], [Moment(), Moment()]
    for number, num_blocks in enumerate((20, 30)):
        num_bytes = num_blocks * BLOCK_BYTES
        events: Any = ended[number], begun[number]
        link._promotions.append(_Pending(events[0], f"{number}", None, num_bytes, events[1]))
    assert busy_s() == pytest.approx(0.5)
    now += 1.0
    assert busy_s() == pytest.approx(0.5), "it waits for a step"
    begun[0].has_come = True
    assert busy_s() == pytest.approx(0.5)
    now += 0.15
    assert busy_s() == pytest.approx(0.35)
    now += 10.0
    assert busy_s() == pytest.approx(0.3), "the second copy has not begun"
    ended[0].has_come = begun[1].has_come = True
    link.poll()
    now += 0.1
    assert link.up_state(30, now).busy_s == pytest.approx(0.2)
    ended[1].has_come = True
    link.poll()
    assert link.up_state(0, now).busy_s == 0.0


@pytest.mark.gpu
def test_a_copy_waits_for_the_kernels_before_it_and_is_reported_after_its_bytes() -> None:
    device = torch.device("cuda")
    transfer, blocks, arena = make_transfer(device, num_blocks=256)
    work = torch.randn(4096, 4096, device=device)
    for value in (1, 2, 3):
        for _ in range(20):
            work = work @ work
            work /= work.norm()
        blocks.fill_(value)
        transfer.note_step()
        pairs = [(BlockId(i), PageId(i)) for i in range(256)]
        transfer.demote(pairs, f"down {value}", after=transfer.num_steps)
        while not (done := transfer.poll()[1]):
            assert transfer.has_pending
        assert done == [f"down {value}"]
        assert bool((arena == value).all())
        arena.fill_(value + 10)
        seen = blocks.clone()
        transfer.note_step()
        pages = [(PageId(i), BlockId(i)) for i in range(256)]
        transfer.promote(pages, f"up {value}", after=transfer.num_steps)
        transfer.synchronize()
        assert transfer.poll() == ([f"up {value}"], [])
        assert bool((seen == value).all()), "a block was overwritten before a step had read it"
        assert bool((blocks == value + 10).all())


@pytest.mark.gpu
def test_a_copy_does_not_wait_for_steps_that_do_not_use_its_blocks() -> None:
    device = torch.device("cuda")
    transfer, blocks, arena = make_transfer(device)
    blocks.fill_(1)
    transfer.note_step()
    torch.cuda.synchronize()
    work = torch.randn(8192, 8192, device=device)
    for _ in range(200):
        work = work @ work
        work /= work.norm()
    ended = torch.cuda.current_stream().record_event()
    transfer.note_step()
    transfer.demote([(BlockId(0), PageId(0))], "down", after=1)
    transfer.promote([(PageId(1), BlockId(1))], "up", after=1)
    transfer.synchronize()
    assert not ended.query(), "the copies waited for a step that was issued later"
    assert transfer.poll() == (["up"], ["down"])
    assert bool((arena[0] == 1).all())
    torch.cuda.synchronize()
