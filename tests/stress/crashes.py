"""Kills encrypted stores by the thousand, cuts their power; no block may be lost or wrong.

`python -m tests.stress.crashes --shards 16 --kills 1000 --cuts 1000 --json OUT`

The stores hold blocks and, beside them, pages of layers with windows or of recurrent states. Half
of the kills end a process at labelled points of the write path. The others are `kill -9` of the
real worker at random times, while a store at capacity is under load; a quarter of these hit the
worker of an engine. Each store is then opened, read and verified. A place where a request could go
on counts where all pages are there that it needs, and nowhere else. The next engine repeats
prompts, goes on in just these places, and answers as one without a store. Shards run at the same
time, each with a seed of its own. The last line is JSON with the sums of all shards. The exit code
is 1 if anything was lost or wrong.
"""

import argparse
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.storage.conftest import Harness
from tests.storage.test_crash import survive_kills
from tests.storage.test_crash_points import DIED, assert_whole, count_labels, run_until
from tests.storage.test_power_loss import compile_shim, lose_power

ROUNDS = 32  # kills of the same store, and power losses in the same recording
MEMORY_BYTES = 4 << 30
FIGURES = (
    "kills",
    "cuts",
    "stores cut off",
    "blocks acknowledged",
    "blocks verified",
    "anchors verified",
    "torn blocks",
    "hits verified",
    "wrong",
    "lost",
)


def kill_at_labels(count: int, seed: int, folder: Path) -> Counter[str]:
    """Kill processes at labelled points, and check the stores that they leave."""
    reached = count_labels(folder / "counted")
    random_, counted = random.Random(seed), Counter[str]()
    for number in range(count):
        label = random_.choice(sorted(reached))
        path = folder / str(number)
        died = run_until(path, label, random_.randint(1, reached[label]))
        assert died.exit_code == DIED, "it did not die"
        counted += Counter({"kills": 1, "blocks acknowledged": len(died.stored)})
        counted += assert_whole(path, died)
        shutil.rmtree(path)
        shutil.rmtree(f"{path}.keys")
    return counted


def kill_worker(count: int, seed: int, folder: Path) -> Counter[str]:
    """Kill the worker at random times."""
    harness = Harness(folder / "store")
    try:
        return survive_kills(harness, count, seed)
    finally:
        harness.close()


def kill_engine(count: int, seed: int, folder: Path) -> Counter[str]:
    """Kill the worker of an engine at random times."""
    # Imported here, since shards fork before any thread is started, and torch starts some.
    import torch

    from tests.engine import test_tails_killed

    torch.set_num_threads(1)
    family = [*test_tails_killed.MODELS][seed % len(test_tails_killed.MODELS)]
    return test_tails_killed.survive_kills(folder, count, seed, family)


def cut_power(shim: Path, count: int, seed: int, folder: Path) -> Counter[str]:
    """Simulate power losses at random moments; odd seeds use `sync="none"`."""
    outcome = lose_power(folder, shim, ("commit", "none")[seed % 2], seed, count)
    assert not outcome["unusable"], "a store does not serve again"
    names = {"opened": "cuts", "certain": "blocks acknowledged", "right": "blocks verified"}
    return Counter({told: outcome[name] for name, told in names.items()})


def run_shard(kills: int, cuts: int, seed: int, folder: str) -> dict[str, Any]:
    """Run one shard in this process. A failure is counted, and the other trials still run."""
    counted, failures = Counter[str](), list[str]()

    def attempt(trial: Callable[[Path], Counter[str]], where: str) -> None:
        with tempfile.TemporaryDirectory(prefix="tieredkv-crashes-", dir=where) as made:
            try:
                counted.update(trial(Path(made)))
            except Exception as error:
                failures.append(f"seed {seed}: {traceback.format_exc()}")
                counted.update(name for name in ("wrong", "lost") if name in str(error))

    has_room = os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > MEMORY_BYTES
    memory = "/dev/shm" if has_room else folder
    # NOTE: This trial forks, so it must run before any thread is started.
    attempt(partial(kill_at_labels, kills // 2, seed), memory)
    random_kills = kills - kills // 2
    engine_kills = -(-random_kills // 4)
    for number, count in enumerate(_rounds(random_kills - engine_kills)):
        attempt(partial(kill_worker, count, seed + number), folder)
    for number, count in enumerate(_rounds(engine_kills)):
        attempt(partial(kill_engine, count, seed + number), folder)
    if cuts:
        shim = compile_shim(Path(tempfile.mkdtemp()))
        for number, count in enumerate(_rounds(cuts)):
            attempt(partial(cut_power, shim, count, seed + number), memory)
    return {**counted, "failures": failures}


def _rounds(total: int) -> list[int]:
    return [min(ROUNDS, total - start) for start in range(0, total, ROUNDS)]


def main(arguments: list[str]) -> int:
    """Run all shards, or with `--shard` a single one; return the exit code."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    for name, default, what in (
        ("shards", 1, "processes that run at the same time"),
        ("kills", 1000, "kills of all shards together"),
        ("cuts", 1000, "power losses of all shards together"),
        ("seed", 1, "seed of the random choices"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=what)
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="folder for the stores")
    parser.add_argument("--json", help="file to write the figures to")
    parser.add_argument("--commit", help="commit to report, where git cannot tell it")
    parser.add_argument("--shard", action="store_true", help="run one shard in this process")
    given = parser.parse_args(arguments)
    logging.disable()
    if given.shard:
        print(json.dumps(run_shard(given.kills, given.cuts, given.seed, given.dir)))  # noqa: T201
        return 0
    start, shards = time.monotonic(), []
    for i in range(given.shards):
        parts = [
            (count * (i + 1)) // given.shards - (count * i) // given.shards
            for count in (given.kills, given.cuts)
        ]
        options = ["--kills", parts[0], "--cuts", parts[1], "--seed", 1000 * given.seed + 100 * i]
        command = [sys.executable, *(["-P"] if sys.flags.safe_path else []), "-m", __spec__.name]
        command += ["--shard", "--dir", given.dir, *map(str, options)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        shards.append(subprocess.Popen(command, **pipes))  # type: ignore[call-overload]
    counted, failures = Counter[str](), list[str]()
    for shard in shards:
        out, err = shard.communicate()
        found = json.loads(out.splitlines()[-1]) if shard.returncode == 0 else {"failures": [err]}
        failures += found.pop("failures")
        counted.update(found)
    # Imported here, as it imports torch; see `kill_engine`.
    from tieredkv.bench.raw import head

    report = head(given.commit, f"python -m {__spec__.name}")
    report |= {name.replace(" ", "_"): counted[name] for name in FIGURES}
    report |= {"shards": given.shards, "seed": given.seed, "failures": failures}
    report["seconds"] = round(time.monotonic() - start, 1)
    if given.json:
        Path(given.json).write_text(json.dumps(report, indent=1) + "\n")
    for failure in failures:
        print(failure, file=sys.stderr)  # noqa: T201
    print(", ".join(f"{name} {counted[name]}" for name in FIGURES))  # noqa: T201
    print(json.dumps(report))  # noqa: T201
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
