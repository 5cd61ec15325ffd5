"""How a bench shows that a request was served from the tier that it claims."""

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.golden import told
from tieredkv.bench import raw, sources
from tieredkv.bench.sources import DiskShare, WorkerReads
from tieredkv.engine.core import EngineCore
from tieredkv.types import KVSpec, LayerKV, Tier

NOTHING = dict.fromkeys(Tier, 0)


def core_of(info: SimpleNamespace, *, has_store: bool = True) -> EngineCore:
    operations = SimpleNamespace(disk=object() if has_store else None)
    return cast(EngineCore, SimpleNamespace(info=info, operations=operations))


def test_the_bytes_read_for_a_worker_are_unknown_once_another_one_has_taken_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: dict[int | None, int] = {7: 100, 8: 5}
    monkeypatch.setattr(raw, "own_bytes", lambda pid, _direction: counts.get(pid))
    info = SimpleNamespace(worker_pid=7)
    reads = WorkerReads(core_of(info))
    counts[7] = 340
    assert reads.num_bytes() == 240
    info.worker_pid = 8
    assert reads.num_bytes() is None, "the other worker's count says nothing of this one's"
    info.worker_pid = None
    assert reads.num_bytes() is None
    assert WorkerReads(core_of(info)).num_bytes() is None
    assert WorkerReads(core_of(info, has_store=False)).num_bytes() == 0
    info.worker_pid = 9
    assert WorkerReads(core_of(info)).num_bytes() is None, "the kernel does not count"


def test_a_process_that_has_ended_has_no_count_of_bytes() -> None:
    assert raw.own_bytes(None, "read") is None
    if os.access("/proc/self/io", os.R_OK):
        assert raw.own_bytes(os.getpid(), "read") is not None


def test_the_page_cache_is_bypassed_only_on_a_block_device_with_direct_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if Path("/dev/shm").is_dir():
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            assert sources.page_cache(Path(folder)) == "warm"
    monkeypatch.setattr(raw, "block_device", lambda _: "sda")
    monkeypatch.setattr(raw, "bypass_page_cache", lambda _: True)
    assert sources.page_cache(tmp_path) == "bypassed"
    monkeypatch.setattr(raw, "bypass_page_cache", lambda _: False)
    assert sources.page_cache(tmp_path) == "warm"
    assert not list(tmp_path.iterdir())


def test_tokens_from_elsewhere_are_those_of_other_tiers_than_the_claimed_one() -> None:
    mixed = {Tier.DEVICE: 1, Tier.HOST: 20, Tier.DISK: 300}
    told = {claimed: sources.tokens_elsewhere(mixed, claimed) for claimed in ("disk", "device")}
    assert told == {"disk": 21, "device": 320}
    assert sources.tokens_elsewhere(mixed, None) == 321
    from_disk = NOTHING | {Tier.DISK: 5}
    assert sources.are_from([from_disk], "disk", may_compute=False)
    assert not sources.are_from([from_disk, NOTHING], "disk", may_compute=False)
    assert sources.are_from([from_disk, NOTHING], "disk", may_compute=True)
    assert not sources.are_from([from_disk, mixed], "disk", may_compute=True)
    assert sources.are_from([NOTHING], None, may_compute=False)
    assert not sources.are_from([from_disk], None, may_compute=False)


def test_the_run_with_the_fewest_bytes_counts() -> None:
    assert sources.disk_over_loaded([100, 40, None, 0], [100, 50, 10, 0]) == 0.8
    assert sources.disk_over_loaded([None, 5], [10, 0]) is None


@pytest.mark.parametrize(
    ("share", "may_exceed", "is_right"),
    [
        (None, False, True),
        (0.949, True, False),
        (0.95, False, True),
        (1.2, False, True),
        (1.201, False, False),
        (9.0, True, True),
    ],
)
def test_the_disk_gives_about_the_bytes_that_are_loaded(
    share: float | None, may_exceed: bool, is_right: bool
) -> None:
    spec = KVSpec(layers=[LayerKV(2, 32)] * 4, dtype="float32", block_size=16)
    expected = DiskShare.expected({"disk_compression": "off"}, spec)
    assert expected == (0.95, 1.2)
    problem = expected.problem("bypassed", share, may_exceed=may_exceed)
    assert (problem == "") == is_right
    if problem:
        told(problem)
    assert expected.problem("warm", share, may_exceed=may_exceed) == ""
    assert expected.problem(None, share, may_exceed=may_exceed) == ""


def test_compressed_blocks_give_fewer_bytes_and_small_ones_more() -> None:
    small = KVSpec(layers=[LayerKV(2, 32)] * 4, dtype="float32", block_size=4)
    uncompressed = DiskShare.expected({}, small)
    assert uncompressed.least == 0.95
    assert uncompressed.most == pytest.approx(1.05 * 12 / 8)
    assert DiskShare.expected({"disk_compression": "auto"}, small).least == 0
