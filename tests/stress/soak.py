"""Runs a disk store at capacity for minutes, with readers, writers, expiry, kills and damage.

`python -m tests.stress.soak --minutes 20 --dir DIR --disk-size 2GiB --seed 1 --json OUT --plot PNG`

The soak drives the real worker process through the store's public client, as the engine does. Every
byte that is loaded is compared, and `promises.py` checks every promise of the store. Violations are
counted under `must_be_zero`; the exit code is 1 if one of the counts is not zero.
"""

import contextlib
import itertools
import json
import logging
import os
import random
import shutil
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np

from tests.stress.courier import Courier, Gate, kill
from tests.stress.faults import INDEX_KINDS, KINDS, Faults
from tests.stress.promises import EQUAL_BYTES, POLICIES, Block, Payloads, Promises
from tests.stress.trace import Sampler, Trace, draw, file_sizes
from tieredkv.bench import plots
from tieredkv.errors import TieredKVError
from tieredkv.operate.ask import StoreControl
from tieredkv.operate.calls import Df, EvictFilter, Ls, Verify
from tieredkv.storage.options import StoreOptions
from tieredkv.tier import Lent
from tieredkv.units import format_bytes, parse_bytes

logger = logging.getLogger(__name__)

NUM_WRITERS, NUM_READERS = 3, 3
PAGES_EACH = 16
WORKING_SETS = 3  # size of all blocks together, as a multiple of the budget
VERIFY_LIMIT_S = 180.0
BACK_LIMIT_S = 30.0
AUDIT_BLOCKS = 4096
DELETE_LIMIT_S = 2.0
_SPARE_BYTES = 256 << 20
DELETE_SHARE = 0.03  # of the writers' operations
MUST_BE_ZERO = (
    "wrong_bytes_served",
    "expired_served",
    "acknowledged_lost",
    "deleted_served",
    "samples_above_budget",
    "tier_not_back",
    "verify_findings",
    "verify_not_clean",
    "worker_deaths",
    "store_errors",
    "driver_errors",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a run. Each `*_every_s` is the mean of random intervals."""

    folder: Path
    seconds: float
    disk_bytes: int
    seed: int = 1
    sync: Literal["commit", "none"] = "commit"
    kinds: tuple[str, ...] = ("kills", *KINDS)
    kill_every_s: float = 5.0
    fault_every_s: float = 20.0
    verify_every_s: float = 30.0
    evict_every_s: float = 15.0
    restart_every_s: float = 60.0
    after_fault_s: float = 3.0


class Soak:
    """One run: other threads use the store, and the calling thread kills, damages and checks it."""

    def __init__(self, settings: Settings, tell: Callable[[str], None]) -> None:
        self.settings = settings
        self._tell = tell
        self.store = settings.folder / "store"
        self._random = random.Random(settings.seed)
        self.promises = Promises(settings.seed, WORKING_SETS * settings.disk_bytes)
        self.trace = Trace()
        self.injected: Counter[str] = Counter()
        self.changed: Counter[str] = Counter()  # bits, files or pages changed, by kind of damage
        self.found: Counter[str] = Counter()  # findings of `verify`, by reason
        self.stop = threading.Event()  # set from outside to end the run early
        self._payloads = Payloads(settings.seed)
        self._faults = Faults(self.store, settings.seed)
        self._gate = Gate()
        self._is_over = threading.Event()
        self._asked_starts = 0  # starts of workers that the soak itself has caused
        options = StoreOptions(
            path=str(self.store),
            budget_bytes=settings.disk_bytes,
            sync=settings.sync,
            sweep_interval_s=2.0,
            disk_retentions=POLICIES,
            num_readers=8,
            backoff_s=0.05,
            max_backoff_s=1.0,
        )
        self.courier = Courier(options, PAGES_EACH, NUM_WRITERS + NUM_READERS, EQUAL_BYTES)
        self._control = StoreControl(str(self.store))
        self._sampler = Sampler(self.store, settings.disk_bytes, self.trace, self.promises)
        self.end: dict[str, Any] = {}

    def run(self) -> None:
        """Run for the time in the settings, or until `stop` is set; then check the whole store."""
        self.trace.started = time.monotonic()
        self._open()
        users = [
            threading.Thread(target=self._use, args=(user,), daemon=True)
            for user in range(NUM_WRITERS + NUM_READERS)
        ]
        self._sampler.start()
        for user in users:
            user.start()
        try:
            self._hurt()
        except Exception as error:
            logger.exception("the soak broke")
            self.promises.blame("driver_errors", repr(error))
        try:
            self._finish()
        finally:
            self._is_over.set()
            for user in users:
                user.join()
            self._sampler.end()
            self.courier.end()

    # --- threads that use the store ----------------------------------------------------------

    def _use(self, user: int) -> None:
        act = self._write if user < NUM_WRITERS else self._read
        while not self._is_over.is_set():
            try:
                with self._gate.passing():
                    is_served = act(user)
            except Exception as error:  # a bug in the client or in the soak
                self.promises.blame("driver_errors", repr(error))
                is_served = False
            if not is_served:
                time.sleep(0.05)

    def _write(self, user: int) -> bool:
        """Store or delete consecutive blocks of a chain; return False if that failed."""
        blocks = self.promises.take(PAGES_EACH)
        try:
            if blocks and random.random() < DELETE_SHARE:
                return self._delete(blocks)
            records = self.promises.sending(blocks)
            pages = []
            for page_id, record in zip(self.courier.pages_of(user), records, strict=False):
                self._page(page_id, record.size_bytes)[:] = self._payloads.of(record)
                pages.append(Lent.of(record, page_id))
            record_of = {page.page_id: page.record for page in pages}
            done = self.courier.store(user, pages) if pages else []
            for each in done:
                record = record_of[each.page_id]
                self.promises.stored(self.promises[record.block_hash], record, each.reason)
            return all(each.ok for each in done)
        finally:
            self.promises.release(blocks)

    def _delete(self, blocks: list[Block]) -> bool:
        """Delete blocks. The same worker must then not find them any more."""
        hashes = [block.identity.block_hash for block in blocks]
        pid = self.courier.pid
        self.promises.deleted(blocks)
        self.courier.client.delete(hashes, "soak")
        found = self.courier.lookup(hashes)
        if found is None or pid is None or pid != self.courier.pid:
            return False
        self.promises.count("blocks_deleted", len(hashes))
        deadline = time.monotonic() + DELETE_LIMIT_S
        while found is not None and any(found) and time.monotonic() < deadline:
            self.promises.count("deletes_seen_late")
            time.sleep(0.1)
            found = self.courier.lookup(hashes)
        is_same = pid == self.courier.pid and not self.promises.is_damaged
        if found is not None and any(found) and is_same:
            self.promises.blame("deleted_served", f"{sum(found)} of {len(found)} blocks")
        return True

    def _read(self, user: int) -> bool:
        """Look blocks up, load those that are found and some others, and touch some of them."""
        blocks = self.promises.to_read(PAGES_EACH)
        looked_at = time.time()
        found = self.courier.lookup([block.identity.block_hash for block in blocks])
        if found is None:
            return False
        for block, is_there in zip(blocks, found, strict=True):
            if is_there:
                self.promises.found_expired(block, looked_at)
        wanted = [
            block
            for block, there in zip(blocks, found, strict=True)
            if there or random.random() < 0.1
        ]
        pages = [
            Lent.of(block.identity, page_id)
            for block, page_id in zip(wanted, self.courier.pages_of(user), strict=False)
        ]
        if not pages:
            return True
        for page in pages:
            self._page(page.page_id, page.size_bytes)[:] = 0xA5
        asked_at = time.time()
        done = self.courier.load(user, pages)
        used, hash_on = [], {page.page_id: page.block_hash for page in pages}
        for each in done:
            block = self.promises[hash_on[each.page_id]]
            is_right = each.ok and np.array_equal(
                self._page(each.page_id, block.identity.size_bytes),
                self._payloads.of(block.identity),
            )
            self.promises.loaded(block, asked_at, each.reason, is_right)
            if each.ok and random.random() < 0.2:
                used.append(self.promises.touching(block))
        if used:
            self.promises.count("touches", len(used))
            self.courier.client.touch(used)
        return not any(each.reason == "worker_down" for each in done)

    def _page(self, page_id: int, size_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.frombuffer(self.courier.arena.page(page_id)[:size_bytes], np.uint8)

    # --- kills, damage and checks ------------------------------------------------------------

    def _hurt(self) -> None:
        """Kill, damage and check the store at random times until the time is over."""
        settings = self.settings
        kinds = [kind for kind in settings.kinds if kind in KINDS]
        deeds: list[tuple[float, Callable[[], None]]] = [
            (settings.verify_every_s, self._verify_at_random),
            (settings.evict_every_s, self._evict),
            (settings.restart_every_s, self._restart),
        ]
        if "kills" in settings.kinds:
            deeds.append((settings.kill_every_s, self._kill))
        if kinds:
            self._random.shuffle(kinds)
            turns = itertools.cycle(kinds)
            deeds.append((settings.fault_every_s, lambda: self._damage(next(turns))))
        due = [self.trace.now + self._random.expovariate(1 / every_s) for every_s, _ in deeds]
        next_told = 5.0
        while self.trace.now < settings.seconds and not self.stop.is_set():
            if self.trace.now >= next_told:
                next_told = self.trace.now + 5.0
                self._tell(self._progress())
            first = min(range(len(due)), key=due.__getitem__)
            if (left_s := due[first] - self.trace.now) > 0:
                self.stop.wait(min(left_s, 0.5))
                continue
            every_s, deed = deeds[first]
            deed()
            due[first] = self.trace.now + self._random.expovariate(1 / every_s)

    def _kill(self) -> None:
        """Kill the worker; its successor must have every block that was acknowledged."""
        if (pid := self.courier.pid) is None:
            return
        self._note("kills")
        self._asked_starts += 1
        kill(pid)
        if self._is_back(other_than=pid):
            self._audit()

    def _restart(self) -> None:
        """Stop the worker in an orderly way, as a server does, and start another."""
        self._note("restarts")
        with self._gate.shut():
            self.courier.close()
            self._open()
        self._audit()

    def _verify_at_random(self) -> None:
        """Verify the store while it is not damaged; sometimes kill the worker meanwhile."""
        pid, killer = self.courier.pid, None
        if "kills" in self.settings.kinds and self._random.random() < 0.25 and pid is not None:
            self._note("kills")
            self._asked_starts += 1
            killer = threading.Timer(self._random.random(), kill, [pid])
            killer.start()
        bad = self._verify()
        if killer is not None:
            killer.join()
        elif bad is None:
            self.promises.blame("verify_not_clean", "no answer from a store that nobody damaged")
        if bad:
            self.promises.blame("verify_findings", f"{bad} in a store that nobody damaged")
        if self._is_back(other_than=pid if killer is not None else None):
            self._audit()

    def _evict(self) -> None:
        """Evict the blocks unused longest or a few chains, and list the rest, as an operator."""
        self._note("evictions")
        with self._gate.shut():
            promised = self.promises.promised()
            if not promised or not self._is_back():
                return
            chains: list[list[Block]] = []
            if self._random.random() < 0.5:
                since = statistics.quantiles([b.last_use for b in promised] * 2, n=20)[0]
                wanted = EvictFilter(older_than_s=time.time() - since)
            else:
                known = {block.identity.block_hash for block in promised}
                stored = [
                    [b for b in c if b.identity.block_hash in known] for c in self.promises.chains
                ]
                chains = self._random.choices([chain for chain in stored if chain], k=4)
                wanted = EvictFilter(ids=tuple(c[-1].identity.block_hash.hex() for c in chains))
            try:
                answer = self._control.answer(wanted)
                self.promises.count("evicted_by_operator", answer["evicted_blocks"])
                for _ in self._control.pages(Ls()):
                    pass
            except TieredKVError as error:
                self.promises.blame("driver_errors", f"evict: {error}")
            if wanted.older_than_s is not None:
                self.promises.evicted_unused(time.time() - wanted.older_than_s)
            else:
                self.promises.deleted([block for chain in chains for block in chain])

    def _damage(self, kind: str) -> None:
        """Damage the files while the store is used; then verify until nothing bad is found."""
        if kind == "old-segments":
            self._faults.copy()
            time.sleep(self.settings.after_fault_s)
        self.promises.is_damaged = True
        is_stopped = kind == "old-segments" or self._random.random() < 0.5
        if is_stopped:
            # NOTE: An older copy of the segments fills their holes, so the files may be above the
            # budget until the store is opened. The sampler does not look during that time.
            looks = self._sampler.paused() if kind == "old-segments" else contextlib.nullcontext()
            with self._gate.shut(), looks:
                self.courier.close()
                self._inject(kind)
                self._open()
        else:
            self._inject(kind)
        time.sleep(self._random.random() * self.settings.after_fault_s)
        pid = self.courier.pid
        if "kills" in self.settings.kinds and pid is not None and self._random.random() < 0.5:
            self._note("kills")
            kill(pid)
        time.sleep(self._random.random() * self.settings.after_fault_s)
        self._repair(is_index=kind in INDEX_KINDS)

    def _inject(self, kind: str) -> None:
        if amount := self._faults.inject(kind):
            self.trace.mark(kind)
            self.injected[kind] += 1
            self.changed[kind] += amount

    def _repair(self, *, is_index: bool) -> None:
        """Verify until nothing bad is found; then check which blocks were lost.

        A damaged index may have damage in pages that `verify` does not read. So after damage to the
        index it is rebuilt from the extents.
        """
        if self._is_back():
            self._verify_until_clean(is_index)
        if self._is_back():
            self._audit()
        time.sleep(0.2)  # until the courier has counted the last start
        self._asked_starts = self.courier.num_starts  # workers may die of the damage
        self.promises.is_damaged = False

    def _verify_until_clean(self, is_index: bool) -> None:
        findings = [self._verify()]
        while findings[-1] != 0 and len(findings) < 4:
            findings.append(self._verify())
        if findings[-1] != 0:
            self.promises.blame("verify_not_clean", f"findings of verify after verify: {findings}")
            self._start_over()
        elif is_index:
            with self._gate.shut():
                self.courier.close()
                shutil.rmtree(self.store / "index")
                self._note("indexes_made_again")
                self._open()
            self.promises.index_was_made_again()

    def _verify(self) -> int | None:
        """Verify with repair; return the number of findings, or None without an answer."""
        deadline = time.monotonic() + VERIFY_LIMIT_S

        def check_time(_done: int, _total: int) -> None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"not over after {VERIFY_LIMIT_S:g} s")

        self.trace.mark("verify")
        try:
            result = self._control.answer(Verify(), progress=check_time)
        except (TieredKVError, TimeoutError) as error:
            self._tell(f"verify: {error}")
            self.promises.count("verify_gave_up")
            return None
        self.promises.count("verifies")
        self.promises.count("blocks_verified", result["checked"])
        self.promises.count("verify_repaired", result["repaired"])
        for reason, count in result["by_reason"].items():
            self.found[reason] += count
        return int(result["bad"])

    # --- the life of the worker --------------------------------------------------------------

    def _note(self, what: str) -> None:
        self.trace.mark(what)
        self.injected[what] += 1

    def _open(self) -> None:
        """Start the worker; if it refuses the store, report that and start with an empty one."""
        self._asked_starts += 1
        try:
            self.courier.open()
        except TieredKVError as error:
            self.promises.blame("tier_not_back", f"refused at start: {error}")
            self._erase()
            self.courier.open()

    def _erase(self) -> None:
        self.courier.close()
        shutil.rmtree(self.store, ignore_errors=True)
        self.promises.forget_all()
        self._note("stores_begun_anew")

    def _start_over(self) -> None:
        with self._gate.shut():
            self._erase()
            self._open()

    def _is_back(self, other_than: int | None = None) -> bool:
        """Wait until a worker other than `other_than` serves.

        If none serves in time, that is reported, an empty store is started and False is returned.
        """
        deadline = time.monotonic() + BACK_LIMIT_S
        while self.courier.pid in (None, other_than):
            if time.monotonic() > deadline:
                self.promises.blame("tier_not_back", f"no worker for {BACK_LIMIT_S:g} s")
                self._start_over()
                return False
            time.sleep(0.005)
        return True

    def _audit(self) -> None:
        """Look up every promised block while no other thread uses the store."""
        with self._gate.shut():
            blocks = self.promises.promised()
            hashes = [block.identity.block_hash for block in blocks]
            for _ in range(3):
                is_there: list[bool] = []
                for start in range(0, len(hashes), AUDIT_BLOCKS):
                    found = self.courier.lookup(hashes[start : start + AUDIT_BLOCKS])
                    if found is None:
                        break
                    is_there += found
                if len(is_there) == len(hashes):
                    self.promises.count("audits")
                    self.promises.audit(blocks, is_there)
                    break
                self._is_back()
        if not self.promises.is_damaged and self.courier.num_starts > self._asked_starts:
            count = self.courier.num_starts - self._asked_starts
            self.promises.blame("worker_deaths", f"{count} that nobody killed")
            self._asked_starts = self.courier.num_starts

    # --- the end -----------------------------------------------------------------------------

    def _finish(self) -> None:
        """Audit, verify and restart the store once more: every block must still be there."""
        if not self.courier.is_open:  # an exception came while the store was closed
            self._open()
        if self.promises.is_damaged:
            self._repair(is_index=True)
        if self._is_back():
            self._audit()
        self._is_over.set()
        with self._gate.shut():
            pass  # every thread has its last answer now
        self._verify_at_the_end()
        self._restart()
        with contextlib.suppress(TieredKVError):
            disk = self._control.answer(Df())["disk"]
            occupied = sum(file_sizes(self.store).values())
            self.end = {
                "blocks": disk["blocks"],
                "live_bytes": disk["bytes_live"],
                "occupied_bytes": occupied,
                "live_over_occupied": round(disk["bytes_live"] / max(occupied, 1), 4),
            }

    def _verify_at_the_end(self) -> None:
        if (bad := self._verify()) != 0:
            self.promises.blame("verify_findings", f"{bad} at the end")

    def _progress(self) -> str:
        counts = self.promises.counts
        size = self.trace.sizes[-1][1] if self.trace.sizes else 0
        troubles = {name: counts[name] for name in MUST_BE_ZERO if counts[name]}
        return (
            f"{self.trace.now:6.0f} s of {self.settings.seconds:.0f}: "
            f"{format_bytes(counts['bytes_in'])} in, {format_bytes(counts['bytes_out'])} out, "
            f"{size / self.settings.disk_bytes:.1%} of the budget, "
            f"{self.injected['kills']} kills, "
            f"{sum(self.injected[kind] for kind in KINDS)} faults, troubles {troubles or 'none'}"
        )

    def report(self) -> dict[str, Any]:
        """Return all figures as JSON; `must_be_zero` decides the exit code."""
        from tieredkv.bench import raw  # imports torch, which takes seconds

        counts, tally = self.promises.counts, self.courier.tally
        named = {*MUST_BE_ZERO, "bytes_in", "bytes_out"}
        largest = max((size for _, size in self.trace.sizes), default=0)
        return {
            **raw.head(None, "python -m tests.stress.soak"),
            "seconds": round(self.trace.now, 1),
            "was_interrupted": self.stop.is_set(),
            "settings": {
                "disk_bytes": self.settings.disk_bytes,
                "working_set_bytes": sum(b.identity.size_bytes for b in self.promises.blocks),
                "seed": self.settings.seed,
                "sync": self.settings.sync,
                "faults": list(self.settings.kinds),
                "kill_every_s": self.settings.kill_every_s,
                "fault_every_s": self.settings.fault_every_s,
            },
            "bytes_in": counts["bytes_in"],
            "bytes_out": counts["bytes_out"],
            "counts": {name: counts[name] for name in sorted(counts.keys() - named)},
            "kills": self.injected["kills"],
            "injected": dict(sorted(self.injected.items())),
            "bits_files_or_pages_changed": dict(sorted(self.changed.items())),
            "found_by_verify": dict(sorted(self.found.items())),
            "store_counted": dict(sorted(tally.items())),
            "store_faults_by_reason": dict(sorted(self.courier.faults.items())),
            "samples": len(self.trace.sizes),
            "largest_over_budget": round(largest / self.settings.disk_bytes, 5),
            "end": self.end,
            "must_be_zero": {name: counts[name] for name in MUST_BE_ZERO},
            "troubles": self.promises.faults,
        }


def _parse_kinds(_context: object, _option: object, text: str) -> tuple[str, ...]:
    kinds = tuple(part for part in text.split(",") if part)
    if unknown := set(kinds) - {"kills", *KINDS}:
        raise click.BadParameter(f"{sorted(unknown)}: choose of kills,{','.join(KINDS)}")
    return kinds


@click.command()
@click.option(
    "--minutes",
    type=click.FloatRange(min=0.05),
    default=20.0,
    show_default=True,
    help="How long to soak.",
)
@click.option(
    "--dir",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Folder in which the store's folder is made.",
)
@click.option("--disk-size", default="2GiB", show_default=True, help="The store's budget.")
@click.option("--seed", default=1, show_default=True, help="Seed of blocks and random choices.")
@click.option(
    "--sync",
    type=click.Choice(["commit", "none"]),
    default="commit",
    show_default=True,
    help="As `--disk-sync` of `serve`.",
)
@click.option(
    "--faults",
    "kinds",
    callback=_parse_kinds,
    default=",".join(("kills", *KINDS)),
    show_default=True,
    help="Kinds of faults to inject, separated by commas.",
)
@click.option(
    "--kill-every",
    "kill_every_s",
    default=5.0,
    show_default=True,
    help="Mean seconds between two kills of the worker.",
)
@click.option(
    "--fault-every",
    "fault_every_s",
    default=20.0,
    show_default=True,
    help="Mean seconds between two faults.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write the report to.",
)
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="PNG file for a plot of the occupied space over time.",
)
def main(
    minutes: float,
    folder: Path,
    disk_size: str,
    json_path: Path | None,
    plot_path: Path | None,
    **options: Any,
) -> None:
    """Soak a store in a new folder under --dir. The folder is removed at the end.

    Ctrl-C ends the run early; the store is still checked and the report printed.
    """
    try:
        plots.check(plot_path)
        settings = Settings(
            folder=folder / f"soak-{os.getpid()}",
            seconds=60 * minutes,
            disk_bytes=parse_bytes(disk_size),
            **options,
        )
        folder.mkdir(parents=True, exist_ok=True)
        needed, free = settings.disk_bytes + _SPARE_BYTES, shutil.disk_usage(folder).free
        if free < needed:
            what = f"`{folder}` has {format_bytes(free)} free, {format_bytes(needed)} are needed"
            raise click.UsageError(what)
    except TieredKVError as error:
        raise click.UsageError(str(error)) from error
    settings.folder.mkdir(mode=0o700)
    try:
        soak = Soak(settings, lambda line: click.echo(line, err=True))

        def end_early(number: int, _frame: object) -> None:
            click.echo("ending; press Ctrl-C again to end at once without a report", err=True)
            soak.stop.set()
            signal.signal(number, signal.default_int_handler)

        signal.signal(signal.SIGINT, end_early)
        soak.run()
    finally:
        shutil.rmtree(settings.folder, ignore_errors=True)
    report = soak.report()
    text = json.dumps(report)
    if json_path is not None:
        json_path.write_text(text + "\n")
    if plot_path is not None:
        draw(plot_path, soak.trace, settings.disk_bytes)
    for trouble in soak.promises.faults:
        click.echo(f"error: {trouble}", err=True)
    click.echo(text)
    sys.exit(any(report["must_be_zero"].values()))


if __name__ == "__main__":
    main()
