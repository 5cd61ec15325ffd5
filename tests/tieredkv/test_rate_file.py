"""Rates are kept across restarts, and a file that does not fit is ignored."""

import json
import logging
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.golden import told
from tieredkv.cache import rate_file
from tieredkv.cache.compute_rate import ComputeRate
from tieredkv.cache.link_rate import LinkRate
from tieredkv.cache.rate_file import NAME, Machine, RateFile, read_rates

MARKER = "format.json"
HERE = Machine(device="gpu", disk="8:1", model="m", fingerprint="ab", block_bytes=2 << 20)


class Rates:
    """The rates of one run, and their file."""

    def __init__(self, folder: Path, machine: Machine = HERE, up: LinkRate | None = None) -> None:
        self.read, self.up, self.compute = LinkRate(2e9), up or LinkRate(20e9), ComputeRate(8192)
        self.compute.learn(512, 512 * 256, 0.0135)
        self.write = LinkRate(1e9)
        links = {"read": self.read, "write": self.write, "up": self.up}
        self.file = RateFile(str(folder), machine, mark=MARKER, **links, compute=self.compute)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder that looks like a store's."""
    (tmp_path / MARKER).write_text("{}")
    return tmp_path


def save(folder: Path, *, read: float = 3e9) -> None:
    """Write the file as a run does that has measured a disk and a step."""
    rates = Rates(folder)
    rates.read.learn(int(read), 1.0, 100.0)
    rates.write.learn(int(1.5e9), 1.0, 100.0)
    rates.compute.learn(8192, 8192 * 4096, 0.2)
    rates.file.close()


def test_rates_are_the_first_assumption_of_the_next_run_and_no_more(folder: Path) -> None:
    save(folder)
    rates = Rates(folder)
    assert rates.read.bytes_per_s == 3e9 and rates.up.bytes_per_s == 20e9
    assert rates.write.bytes_per_s == 1.5e9
    assert not rates.read.is_learnt and rates.read.is_stale(0.0)
    assert rates.compute.seconds(0, 8192) == pytest.approx(0.2, rel=0.1)
    rates.read.learn(int(1e8), 0.1, 200.0)
    assert rates.read.bytes_per_s == pytest.approx(2e9), "it weighs as much as 0.1 s do"
    fresh = Rates(folder / "other")
    for each in (rates, fresh):
        each.compute.learn(8192, 8192 * 4096, 0.4)
    assert rates.compute.seconds(0, 8192) == pytest.approx(fresh.compute.seconds(0, 8192))


def test_a_rate_that_this_start_has_measured_is_not_replaced(folder: Path) -> None:
    before = Rates(folder)
    before.up.learn(int(5e6), 0.1, 100.0)
    before.file.close()
    assert b"up_bytes_per_s" in (folder / NAME).read_bytes()
    up = LinkRate(20e9)
    up.learn(int(5e9), 0.1, 200.0)
    assert Rates(folder, up=up).up.bytes_per_s > 40e9
    assert Rates(folder).up.bytes_per_s < 20e9


def test_steps_that_only_generate_are_kept(folder: Path) -> None:
    rates = Rates(folder)
    for num_read in (50_000.0, 150_000.0) * 10:
        rates.compute.learn(0, 0.0, 0.004 + 3e-8 * num_read, num_read=num_read)
    rates.file.close()
    again = Rates(folder)
    assert again.compute.step_seconds(0, 0.0, 100_000.0) == pytest.approx(0.007, rel=0.1)
    again.file.close()


def test_what_a_run_did_not_measure_is_kept_from_the_run_before(folder: Path) -> None:
    save(folder)
    Rates(folder).file.close()
    found = read_rates(str(folder))
    assert found is not None
    assert found.read_bytes_per_s == 3e9 and found.up_bytes_per_s is None
    assert len(found.steps) == 2


@pytest.mark.parametrize("field", ["device", "disk", "model", "fingerprint", "block_bytes"])
def test_a_file_of_another_machine_or_model_is_ignored_with_one_line(
    folder: Path, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(folder)
    document = json.loads((folder / NAME).read_text())
    document["machine"][field] = 5 if field == "block_bytes" else "other"
    (folder / NAME).write_text(json.dumps(document))
    with caplog.at_level(logging.INFO):
        rates = Rates(folder)
    assert rates.read.bytes_per_s == 2e9 and len(rates.compute.steps) == 1
    [record] = caplog.records
    told(record.getMessage(), hide={str(folder): "FOLDER"})
    rates.file.close()
    assert Rates(folder).file._saved.machine == HERE, "it is replaced"


@pytest.mark.parametrize(
    "change",
    [
        {"read_bytes_per_s": 0},
        {"read_bytes_per_s": -1e9},
        {"read_bytes_per_s": 1e300},
        {"up_bytes_per_s": "fast"},
        {"steps": [[512, 1e5, 0.0, 0]]},
        {"steps": [[0, 0, 0.1, 0]]},
        {"steps": [[512, -1, 0.1, 0]]},
        {"steps": [[512, 1e5, 0.1, -1]]},
        {"steps": [[512, 1e5]]},
        {"steps": [[512, 1e5, 0.02, 0]] * 5000},
        {"format": "tieredkv-rates/2"},
        {"machine": None},
    ],
)
def test_an_absurd_file_is_ignored_with_one_line(
    folder: Path, change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    save(folder)
    document = json.loads((folder / NAME).read_text()) | change
    (folder / NAME).write_text(json.dumps(document))
    with caplog.at_level(logging.INFO):
        rates = Rates(folder)
    assert rates.read.bytes_per_s == 2e9 and len(rates.compute.steps) == 1
    assert len(caplog.records) == 1


@pytest.mark.parametrize("seconds", [500.0, 2e-6])
def test_steps_that_are_far_from_what_is_measured_are_ignored_and_the_links_rates_are_taken(
    folder: Path, seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    save(folder)
    document = json.loads((folder / NAME).read_text()) | {"steps": [[8192, 1e7, seconds, 0]]}
    (folder / NAME).write_text(json.dumps(document))
    with caplog.at_level(logging.INFO):
        rates = Rates(folder)
    assert len(rates.compute.steps) == 1
    assert rates.read.bytes_per_s == 3e9 and rates.write.bytes_per_s == 1.5e9
    (record,) = caplog.records
    told(record.getMessage(), hide={str(folder): "FOLDER"})


@pytest.mark.parametrize(
    "text", [b"", b"{", b"null", b"[]", b"\xff\x00", b"[" * 100_000, b" " * (2 << 20), b"NaN"]
)
def test_a_damaged_file_is_ignored_with_one_line(
    folder: Path, text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / NAME).write_bytes(text)
    rates = Rates(folder)
    assert rates.read.bytes_per_s == 2e9
    assert len(caplog.records) == 1
    rates.file.close()
    assert read_rates(str(folder)) is not None


@pytest.mark.parametrize("what", ["folder", "link", "pipe"])
def test_something_else_in_the_place_of_the_file_is_neither_read_nor_followed(
    folder: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, target = folder / NAME, folder / "target"
    target.write_text("untouched")
    make = {"folder": path.mkdir, "link": lambda: path.symlink_to(target)}
    make.get(what, lambda: os.mkfifo(path))()
    rates = Rates(folder)
    assert rates.read.bytes_per_s == 2e9
    rates.file.close()
    assert target.read_text() == "untouched"
    assert len(caplog.records) == (2 if what == "folder" else 1), "read, and for a folder written"


def test_a_folder_without_a_store_gets_no_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rates = Rates(tmp_path)
    for _ in range(3):
        rates.read.learn(1 << 30, 1.0, 1.0)
        rates.file.close()
    assert list(tmp_path.iterdir()) == []
    assert len(caplog.records) == 1


def test_the_file_is_written_once_a_minute_and_never_while_nothing_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    rates, path = Rates(folder), folder / NAME

    def keep_at(moment: float) -> int | None:
        now[0] = moment
        rates.file.keep()
        for thread in threading.enumerate():
            if thread.name == "tieredkv-rates":
                thread.join()
        return path.stat().st_ino if path.exists() else None

    assert keep_at(1059.0) is None
    first = keep_at(1060.0)
    assert first is not None
    rates.read.learn(1 << 30, 1.0, 1.0)
    assert keep_at(1119.0) == first
    second = keep_at(1120.0)
    assert second != first
    assert keep_at(1200.0) == second


def test_a_disk_that_hangs_holds_up_nobody(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, real_open = threading.Event(), os.open

    def open_(path: Any, *arguments: Any, **options: Any) -> int:
        if threading.current_thread().name == "tieredkv-rates":
            hangs.wait()
        return real_open(path, *arguments, **options)

    rates = Rates(folder)
    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(rate_file, "CLOSE_S", 0.05)
    for _ in range(3):
        rates.file._due_at = -math.inf
        rates.file.keep()
    rates.file.close()
    num_threads = [each.name for each in threading.enumerate()].count("tieredkv-rates")
    hangs.set()
    assert num_threads == 1
