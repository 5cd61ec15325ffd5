"""The measurement moves blocks only while the tiers are on, and promotes a shared prefix once."""

import pytest

from tests.stress import moving_blocks
from tieredkv.types import ignore_progress


def test_a_shared_prefix_is_promoted_once() -> None:
    settings = {"model": "tiny-random"}
    report = moving_blocks.run(
        settings, ignore_progress, demotion=None, promotion=520, repeats=1, tokens=12
    )
    assert not report["problems"]
    quiet, busy = report["rows"]
    promotion = report["promotion"]
    assert promotion["bytes_promoted"] == promotion["prefix_bytes"] == 520 // 16 * 16 * 2048
    assert promotion["is_share_released"] is True
    assert promotion["itl_p99_ratio"] == pytest.approx(busy["itl_p99_ms"] / quiet["itl_p99_ms"])


@pytest.mark.slow
def test_blocks_are_demoted_with_the_tiers_on_and_not_with_them_off() -> None:
    settings = {"model": "tiny-random", "device_size": 1 << 20}
    report = moving_blocks.run(settings, ignore_progress, demotion="6x256+4", promotion=0, pairs=3)
    on, off = report["rows"]
    assert (on["part"], off["part"]) == ("tiers on", "tiers off")
    assert len(on["wall_s_all"]) == len(off["wall_s_all"]) == report["demotion"]["pairs"] == 3
    assert on["demoted_GBps"] > 0
    assert off["demoted_GBps"] == 0
    assert report["demotion"]["demoted_GBps"] == on["demoted_GBps"]
    assert report["demotion"]["allocation_waits"] >= on["allocation_waits"]
    for name in ("throughput_ratio", "itl_p99_ratio"):
        low, high = report["demotion"][f"{name}_95"]
        assert low <= report["demotion"][name] <= high
