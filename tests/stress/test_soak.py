"""Tests of the soak: it passes on a sound store, and it detects each kind of failure."""

import itertools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from tests.stress.promises import DAY_S, Block, Bytes, Payloads, Promises
from tests.stress.soak import MUST_BE_ZERO, Settings, Soak, main
from tieredkv.types import BlockRecord

ROOT = Path(__file__).parents[2]
SMOKE_FAULTS = "kills,segment-flips,segment-cuts,old-segments"


@pytest.mark.slow
def test_a_soak_of_ten_seconds_ended_by_ctrl_c_finds_nothing_wrong(tmp_path: Path) -> None:
    arguments = ["--minutes", "5", "--dir", str(tmp_path), "--disk-size", "32MiB"]
    arguments += ["--faults", SMOKE_FAULTS, "--fault-every", "4", "--kill-every", "2"]
    arguments += ["--json", str(tmp_path / "report.json")]
    soak = subprocess.Popen(
        [sys.executable, "-m", "tests.stress.soak", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(10)
    soak.send_signal(signal.SIGINT)
    out, err = soak.communicate(timeout=120)
    assert soak.returncode == 0, err
    report = json.loads(out.splitlines()[-1])
    assert report == json.loads((tmp_path / "report.json").read_text())
    assert set(report["must_be_zero"]) == set(MUST_BE_ZERO)
    assert not any(report["must_be_zero"].values())
    assert report["was_interrupted"]
    assert report["kills"] and report["samples"] and report["end"]["blocks"]
    assert 0 < report["largest_over_budget"] <= 1
    assert report["counts"]["blocks_loaded"] and report["counts"]["blocks_audited"]
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"], "the store is removed"


class _Sabotaged(Soak):
    """A soak whose store breaks its promises: instead of kills, it loses blocks and grows."""

    def _kill(self) -> None:
        latest = sorted(self.promises.promised(), key=lambda block: block.last_use)[-50:]
        self.courier.client.delete([block.identity.block_hash for block in latest], "sabotage")
        self._audit()
        ballast = self.store / "segments" / "ballast"
        ballast.write_bytes(b"x" * self.settings.disk_bytes)
        time.sleep(0.3)
        ballast.unlink()


@pytest.mark.slow
def test_a_store_that_breaks_its_promises_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(
        folder=tmp_path,
        seconds=5.0,
        disk_bytes=32 << 20,
        kinds=("kills",),
        kill_every_s=1.0,
        verify_every_s=1e6,
        restart_every_s=1e6,
    )
    soak = _Sabotaged(settings, lambda _line: None)
    right, num_calls = Payloads.of, itertools.count()

    def sometimes_wrong(self: Payloads, record: BlockRecord) -> Bytes:
        payload = right(self, record).copy()
        payload[-1] ^= next(num_calls) % 7 == 0
        return payload

    monkeypatch.setattr(Payloads, "of", sometimes_wrong)
    soak.run()
    found = {name: soak.promises.counts[name] for name in MUST_BE_ZERO}
    assert found["acknowledged_lost"], soak.promises.faults
    assert found["samples_above_budget"]
    assert found["wrong_bytes_served"]
    assert not found["driver_errors"], soak.promises.faults


def _stored(promises: Promises, blocks: list[Block]) -> None:
    for block in blocks:
        (record,) = promises.sending([block])
        promises.stored(block, record, "")
        time.sleep(0.0001)  # the store orders evictions by times in microseconds


@pytest.fixture
def promises() -> Promises:
    return Promises(seed=1, num_bytes=32 << 20)


def _lasting(promises: Promises, count: int) -> list[Block]:
    return [block for block in promises.blocks if block.ttl_s == DAY_S][:count]


def test_only_the_blocks_unused_longest_may_be_missing(promises: Promises) -> None:
    blocks = _lasting(promises, 10)
    _stored(promises, blocks)
    result = promises.audit(blocks, [False] * 3 + [True] * 7)
    assert (result.evicted, result.lost, result.present) == (3, [], 7)
    blocks = promises.promised()
    result = promises.audit(blocks, [True] * 5 + [False] * 2)
    assert (result.evicted, result.lost) == (0, blocks[5:])
    assert promises.counts["acknowledged_lost"] == 2


def test_a_touch_may_have_kept_a_block_and_proves_nothing_against_others(
    promises: Promises,
) -> None:
    blocks = _lasting(promises, 3)
    _stored(promises, blocks)
    promises.touching(blocks[0])
    assert promises.audit(blocks, [True, False, False]).evicted == 2


def test_a_block_whose_last_store_was_not_answered_proves_nothing(promises: Promises) -> None:
    blocks = _lasting(promises, 3)
    _stored(promises, blocks)
    (record,) = promises.sending(blocks[:1])
    promises.stored(blocks[0], record, "worker_died")
    assert promises.audit(blocks, [True, False, True]).lost == []


def test_after_damage_blocks_may_be_missing_but_never_wrong(promises: Promises) -> None:
    blocks = _lasting(promises, 3)
    _stored(promises, blocks)
    promises.is_damaged = True
    assert promises.audit(blocks, [True, True, False]).lost == []
    promises.loaded(blocks[0], time.time(), "checksum", False)
    assert not promises.faults
    promises.loaded(blocks[0], time.time(), "", False)
    assert promises.counts["wrong_bytes_served"] == 1


def test_a_load_asked_for_at_the_deadline_must_fail(promises: Promises) -> None:
    block = next(block for block in promises.blocks if block.ttl_s < DAY_S)
    _stored(promises, [block])
    promises.loaded(block, block.deadline - 0.001, "", True)
    promises.loaded(block, block.deadline, "missing", False)
    assert not promises.faults
    promises.loaded(block, block.deadline, "", True)
    assert promises.counts["expired_served"] == 1


def test_payloads_differ_in_every_word_and_follow_from_the_hash(promises: Promises) -> None:
    first, second = (block.identity for block in _lasting(promises, 2))
    payloads = Payloads(1)
    ours, theirs = payloads.of(first), payloads.of(second)
    assert len(ours) == first.size_bytes
    assert np.array_equal(ours, Payloads(1).of(first))
    size = min(len(ours), len(theirs)) // 8 * 8
    assert (ours[:size].view(np.uint64) != theirs[:size].view(np.uint64)).mean() > 0.999


def test_bad_input_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for arguments in (["--disk-size", "lots"], ["--disk-size", "900TiB"], ["--faults", "rain"]):
        result = CliRunner().invoke(main, ["--dir", str(tmp_path), *arguments])
        assert result.exit_code == 2, result.output
        assert not list(tmp_path.iterdir())
