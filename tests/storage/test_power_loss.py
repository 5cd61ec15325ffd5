"""A store opens after a power loss; blocks may be missing, but never wrong."""

import os
import random
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.storage.blocks import occupied_bytes
from tests.storage.conftest import Harness, Mailbox, make_chain, make_record
from tests.storage.power_loss import BUDGETS_BYTES, Block, Recording
from tests.waiting import deadline
from tieredkv.errors import StorageError
from tieredkv.operate.ask import StoreControl
from tieredkv.operate.calls import Verify

pytestmark = pytest.mark.e2e

SOURCE = Path(__file__).with_name("power_loss.c")


class NeverServesError(Exception):
    """The worker did not serve again."""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled library that logs the writes."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler `cc` to build the write log with")
    return compile_shim(tmp_path_factory.mktemp("shim"))


def compile_shim(folder: Path) -> Path:
    """Compile the library that logs the writes, unless `POWER_LOSS_SHIM` names a compiled one."""
    if built := os.environ.get("POWER_LOSS_SHIM"):
        return Path(built)
    target = folder / "power_loss.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(target), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    return target


def lose_power(where: Path, shim: Path, sync: str, seed: int, num_cuts: int) -> Counter[str]:
    """Record the life of a store, and open what power losses at random moments leave of it."""
    random_ = random.Random(seed)
    outcome: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(dir=where) as base:
        recording = Recording(Path(base), shim, sync=sync, seed=seed)
        for number in range(num_cuts):
            cut = random_.randint(1, len(recording.operations))
            folder = Path(base) / str(number)
            folder.mkdir(mode=0o700)
            recording.replay(cut, random_, folder)
            start_machine_again(folder)
            certain = recording.certain(cut) if sync == "commit" else set()
            outcome += open_after(folder, recording.tried(cut), certain, sync=sync)
            shutil.rmtree(folder)
    return outcome


def start_machine_again(folder: Path) -> None:
    """Make the lock file name another boot of the machine, as after a power loss."""
    if (lock := folder / "store" / "lock").exists():
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
        lock.write_bytes(lock.read_bytes().replace(boot, bytes(reversed(boot))))


def open_after(folder: Path, tried: set[Block], certain: set[Block], *, sync: str) -> Counter[str]:
    """Serve the store of a disk by a worker and check every block.

    With `sync="commit"` no block of `certain` may be missing.
    """
    outcome: Counter[str] = Counter(opened=1)
    harness = Harness(folder / "store")
    try:
        client = harness.open(
            budget_bytes=BUDGETS_BYTES[0], encryption="on", key_dir=str(folder / "keys")
        )
        mail, pid = Mailbox(client), client.pid
        blocks = sorted(tried)
        for start in range(0, len(blocks), 64):
            batch = blocks[start : start + 64]
            records = [make_record(*block[:2], size_bytes=block[2]) for block in batch]
            for done in mail.load(records):
                block = batch[done.page_id]
                if done.ok:
                    mail.assert_right(done, block[2])
                    outcome["right"] += 1
                elif done.reason != "missing":
                    outcome[f"a load says {done.reason}"] += 1
                if sync == "commit" and not done.ok:
                    assert block not in certain, (
                        f"lost, though synced and acknowledged: {done.reason}"
                    )
        outcome["certain"] += len(certain)
        late = make_chain("late", 8)

        give_up_at = deadline()
        is_served = False
        while not is_served:
            if time.monotonic() > give_up_at:
                raise NeverServesError
            time.sleep(0.01)
            stored, loaded = mail.store(late), mail.load(late)
            for done in loaded:
                if done.ok:
                    mail.assert_right(done)
            is_served = all(done.ok for done in [*stored, *loaded])
        if sync == "commit":
            assert client.pid == pid, "the worker had to be started again"
            assert not list(harness.folder.glob("index.bad*")), "the index was set aside"
            StoreControl(harness.folder).answer(Verify())
            assert StoreControl(harness.folder).answer(Verify())["bad"] == 0
        assert occupied_bytes(harness.folder) <= BUDGETS_BYTES[0]
    except (StorageError, NeverServesError):
        if sync == "commit":
            raise
        outcome["unusable"] += 1
    finally:
        harness.close()
    return outcome


def expect_all_usable(outcome: Counter[str]) -> None:
    """Assert that every store serves again. Wrong bytes have failed the test earlier."""
    assert not outcome["unusable"], f"of {outcome['opened']} stores"


@pytest.mark.parametrize("sync", ["commit", "none"])
def test_a_power_loss_costs_blocks_at_most(ram_path: Path, shim: Path, sync: str) -> None:
    outcome = lose_power(ram_path, shim, sync, seed=1, num_cuts=6)
    assert outcome["opened"] == 6
    assert outcome["right"] > (60 if sync == "commit" else 0), outcome
    expect_all_usable(outcome)


class WorstLuck(random.Random):
    """Loses every write that was not flushed, but no name of a file."""

    def choice(self, seq: Sequence[float]) -> float:  # type: ignore[override]
        return max(seq)

    def randint(self, a: int, b: int) -> int:
        return b


def test_an_index_knows_each_segment_file_before_a_block_is_in_it(
    ram_path: Path, shim: Path
) -> None:
    base, firsts = Path(tempfile.mkdtemp(dir=ram_path)), dict[str, int]()
    recording = Recording(base, shim, sync="commit", seed=2)
    for number, each in enumerate(recording.operations):
        if each.what == "s" and each.path.endswith(".seg"):
            firsts.setdefault(each.path, number)
    assert len(firsts) >= 3  # sizes of extents
    for cut in (first + 1 for first in firsts.values()):
        folder = base / str(cut)
        folder.mkdir(mode=0o700)
        recording.replay(cut, WorstLuck(), folder)
        start_machine_again(folder)
        open_after(folder, recording.tried(cut), recording.certain(cut), sync="commit")


@pytest.mark.parametrize("kept", [set(), {0}, {1}, {2}], ids=str)
def test_a_new_index_that_lost_its_first_pages_is_made_anew(
    ram_path: Path, shim: Path, kept: set[int]
) -> None:
    """The file keeps its length, and some of the pages before its first flush."""
    base = Path(tempfile.mkdtemp(dir=ram_path))
    recording = Recording(base, shim, sync="commit", seed=4)
    of_index = [each for each in recording.operations if each.path.endswith("/index/data.mdb")]
    flushed = next(each for each in of_index if each.what == "s")
    folder, cut = base / "left", recording.operations.index(flushed)
    folder.mkdir(mode=0o700)
    recording.replay(cut, NoLoss(), folder)
    with (folder / "store" / "index" / "data.mdb").open("r+b") as file:
        for page in {0, 1, 2} - kept:
            file.seek(page * 4096)
            assert any(file.read(4096))
            file.seek(page * 4096)
            file.write(bytes(4096))
    start_machine_again(folder)
    open_after(folder, set(), set(), sync="commit")


class NoLoss(WorstLuck):
    """Loses nothing."""

    def choice(self, seq: Sequence[float]) -> float:  # type: ignore[override]
        return min(seq)


def test_a_replay_without_loss_leaves_the_same_files_with_the_same_holes(
    ram_path: Path, shim: Path
) -> None:
    base = Path(tempfile.mkdtemp(dir=ram_path))
    recording, target = Recording(base, shim, sync="commit", seed=3), base / "replayed"
    target.mkdir(mode=0o700)
    recording.replay(len(recording.operations), NoLoss(), target)
    found = [path.relative_to(target) for path in target.rglob("*") if path.is_file()]
    assert len(found) > 6
    for name in found:
        left, made = recording.folder / name, target / name
        assert made.read_bytes() == left.read_bytes(), name
        assert made.stat().st_blocks == left.stat().st_blocks, name
