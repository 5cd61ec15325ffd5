"""A disk that is thought to be slow is read again now and then, so that its rate is corrected."""

import time

import pytest

from tests.fake_store import Rig
from tieredkv.cache import link_rate, promotion
from tieredkv.cache.chain import Chain
from tieredkv.cache.link_rate import PROBE_S, LinkRate
from tieredkv.types import Tier


def rig_with_a_slow_disk(*, is_stale: bool, num_pages: int = 16) -> Rig:
    """Return a cache whose disk is thought to be so slow that everything is computed."""
    rig = Rig(restore="auto", num_blocks=64, num_pages=num_pages)
    learnt_at = time.monotonic() - (PROBE_S if is_stale else 0.0)
    rig.tiers.disk_link.read_rate = LinkRate(1e-3, learnt_at=learnt_at)
    return rig


def admitted(rig: Rig, name: str, length: int) -> Chain:
    """Return an admitted request whose blocks the disk has; the store does not answer reads."""
    rig.store.put(name, length)
    rig.store.is_held = True
    prefix = rig.queue(name, length)
    answer(rig)
    assert rig.admit(prefix)
    return prefix


def answer(rig: Rig) -> None:
    """Have the store answer the lookups."""
    while rig.store.lookups:
        rig.store.answer(0)
    rig.cache.poll()


def test_a_disk_that_was_slow_lately_is_not_read() -> None:
    rig = rig_with_a_slow_disk(is_stale=False)
    prefix = admitted(rig, "a", 4)
    assert rig.finish(prefix) == 4
    assert rig.store.loaded == []


def test_a_disk_that_was_slow_once_is_read_while_all_is_computed() -> None:
    rig = rig_with_a_slow_disk(is_stale=True)
    prefix = admitted(rig, "a", 4)
    assert len(rig.store.loaded) == 4
    assert rig.finish(prefix) == 4, "nobody waits for a probe"
    prefix = admitted(rig, "b", 4)
    assert rig.finish(prefix) == 4
    assert len(rig.store.loaded) == 4, "one probe is enough for a while"
    rig.check_nothing_is_held()


def test_a_probe_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_rate, "MIN_WINDOW_S", 1e9)  # it teaches nothing
    rig = rig_with_a_slow_disk(is_stale=True, num_pages=64)
    rig.tiers.payload_bytes = promotion.PROBE_BYTES // 3
    admitted(rig, "a", 50)
    assert len(rig.store.loaded) == 3
    while rig.store.jobs:
        rig.store.complete(0)
        rig.turn()
    assert len(rig.store.loaded) == 3


def test_a_probe_that_found_no_page_is_tried_again() -> None:
    rig = rig_with_a_slow_disk(is_stale=True, num_pages=4)
    pages = rig.tiers.allocate(Tier.HOST, 4)
    assert pages is not None
    prefix = admitted(rig, "a", 4)
    assert rig.finish(prefix) == 4
    assert rig.store.loaded == []
    rig.tiers.host.release(pages)
    admitted(rig, "b", 4)
    assert rig.store.loaded


def test_a_rate_learnt_too_low_is_corrected_by_one_probe() -> None:
    rate, now = LinkRate(2e9), 100.0
    for _ in range(20):
        rate.learn(1000, 5.0, now)
    assert rate.bytes_per_s < 1e3
    now += PROBE_S
    rate.learn(128 << 20, 0.064, now)
    assert rate.bytes_per_s == (128 << 20) / 0.064
