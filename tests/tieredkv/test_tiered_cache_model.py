"""Random sequences of requests over tiny tiers: nothing leaks or hangs, no byte is wrong."""

import time
from typing import Any, Literal
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.fake_store import BLOCK_BYTES, Rig
from tieredkv.cache import room
from tieredkv.cache.chain import Chain
from tieredkv.cache.compute_rate import ComputeRate
from tieredkv.cache.disk_link import Read
from tieredkv.config import Restore

CHAINS = st.tuples(st.sampled_from("abc"), st.integers(1, 5))
BLOCK_SECONDS = st.sampled_from([1e-9, 1e-4, 1e-3, 1e-2, 10.0])
"""For how long a link or the device is said to be busy with a block."""


class TieredCacheMachine(RuleBasedStateMachine):
    """Requests arrive, are admitted, compute, finish and are cancelled in any order.

    The disk tells all that it has, or some of it, or nothing, so that it is asked. Reads, writes,
    copies and answers complete in any order, late, or with a failure; the clock
    moves; operators evict. The learnt rates are any, right or wrong, and change, so that requests
    are divided between computing and loading in any way. At the end everything completes and
    nothing may be held.
    """

    def __init__(self) -> None:
        super().__init__()
        # Else the same rules would do something else on a busy machine.
        self.moment = 1000.0
        self.time = mock.patch.object(time, "monotonic", lambda: self.moment)
        self.time.start()
        self.patience_s = room.PATIENCE_S
        self.waiting: list[Chain] = []
        self.running: list[Chain] = []

    @initialize(
        num_blocks=st.integers(5, 10),
        num_pages=st.integers(1, 10),
        is_write_behind=st.booleans(),
        most_owed=st.sampled_from([0, 3, 1_000_000]),
        has_timeout=st.booleans(),
        is_patient=st.booleans(),
        restore=st.sampled_from(["auto", "auto", "load", "compute"]),
        told=st.sampled_from(["nothing", "some", "all"]),
    )
    def build(
        self,
        num_blocks: int,
        num_pages: int,
        is_write_behind: bool,
        most_owed: int,
        has_timeout: bool,
        is_patient: bool,
        restore: Restore,
        told: Literal["nothing", "some", "all"],
    ) -> None:
        room.PATIENCE_S = 1e9 if is_patient else 0.0
        self.rig = Rig(
            num_blocks=num_blocks,
            num_pages=num_pages,
            is_write_behind=is_write_behind,
            most_owed=most_owed,
            restore=restore,
            load_timeout_s=0.0 if has_timeout else 1e9,
        )
        self.rig.store.is_held = self.rig.transfer.is_held = True
        if told != "nothing":
            self.rig.store.tell_all(is_whole=told == "all")

    @rule(read_s=BLOCK_SECONDS, copy_s=BLOCK_SECONDS, compute_s=BLOCK_SECONDS)
    def learn(self, read_s: float, copy_s: float, compute_s: float) -> None:
        tiers = self.rig.tiers
        tiers.disk_link.read_rate.bytes_per_s = BLOCK_BYTES / read_s
        tiers.device_link.up_rate.bytes_per_s = BLOCK_BYTES / copy_s
        tiers.compute_rate = ComputeRate(8192)
        tiers.compute_rate.learn(100, 5000.0, 100 * compute_s)

    @rule(busy_s=st.sampled_from([0.0, 1e-3, 1.0]))
    def be_busy(self, busy_s: float) -> None:
        self.rig.busy_s = busy_s

    @precondition(lambda self: len(self.running) > 1)
    @rule()
    def serve_in_another_order(self) -> None:
        self.rig.admitted.append(self.rig.admitted.pop(0))

    @rule(chain=CHAINS, age_s=st.sampled_from([0.0, 80_000.0, 86_390.0]))
    def place_on_disk(self, chain: tuple[str, int], age_s: float) -> None:
        if not self.rig.on_disk(*chain) and not self.rig.store.jobs:
            self.rig.store.put(*chain, age_s=age_s)

    @rule(chain=CHAINS, retention=st.sampled_from(["in_memory", "24h"]))
    def arrive(self, chain: tuple[str, int], retention: str) -> None:
        self.waiting.append(self.rig.queue(*chain, retention))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), num_private=st.integers(0, 1))
    def admit(self, data: st.DataObject, num_private: int) -> None:
        index = data.draw(st.integers(0, len(self.waiting) - 1))
        prefix = self.waiting[index]
        if not self.rig.cache.is_settled(prefix):
            return
        if self.rig.admit(prefix, len(prefix.hashes) + num_private):
            self.running.append(self.waiting.pop(index))

    @rule(chain=CHAINS)
    def begin_to_load(self, chain: tuple[str, int]) -> None:
        """Admit a request whose blocks the disk has and is reading."""
        if not self.rig.store.jobs:
            self.rig.store.put(*chain)
        prefix = self.rig.queue(*chain)
        while self.rig.store.lookups:
            self.rig.store.answer(0)
        self.rig.turn()
        (self.running if self.rig.admit(prefix) else self.waiting).append(prefix)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 3))
    def compute(self, data: st.DataObject, count: int) -> None:
        self.rig.compute(data.draw(st.sampled_from(self.running)), at_most=count)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def compute_a_part(self, data: st.DataObject) -> None:
        self.rig.begin(data.draw(st.sampled_from(self.running)))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        self.rig.cache.extend(data.draw(st.sampled_from(self.running)))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish_if_ready(self, data: st.DataObject) -> None:
        prefix = data.draw(st.sampled_from(self.running))
        if all(block.is_ready for block in prefix.blocks[: len(prefix.hashes)]):
            self.running.remove(prefix)
            self.rig.end(prefix)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        self.rig.cache.touch(data.draw(st.sampled_from(self.running)))

    @precondition(lambda self: self.waiting or self.running)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        prefix = data.draw(st.sampled_from(self.waiting + self.running))
        (self.waiting if prefix in self.waiting else self.running).remove(prefix)
        self.rig.cache.release(prefix)

    @rule()
    def step(self) -> None:
        self.rig.turn()

    @rule()
    def copy(self) -> None:
        self.rig.transfer.complete()
        self.rig.cache.poll()

    @rule()
    def copy_down(self) -> None:
        self.rig.transfer.complete_down()
        self.rig.cache.poll()

    @precondition(lambda self: self.rig.transfer.can_begin)
    @rule(is_idle=st.booleans())
    def copy_first_layers(self, is_idle: bool) -> None:
        self.rig.transfer.begin()
        self.rig.cache.poll(may_start_early=is_idle)

    @rule()
    def start_early(self) -> None:
        self.rig.cache.poll(may_start_early=True)

    @precondition(lambda self: self.rig.store.jobs)
    @rule(data=st.data(), reason=st.sampled_from(["", "", "", "checksum", "full"]))
    def end_a_loan(self, data: st.DataObject, reason: str) -> None:
        jobs = self.rig.store.jobs
        self.rig.store.complete(data.draw(st.integers(0, len(jobs) - 1)), reason=reason)
        self.rig.cache.poll()

    @precondition(lambda self: self.rig.store.lookups)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        lookups = self.rig.store.lookups
        self.rig.store.answer(data.draw(st.integers(0, len(lookups) - 1)))
        self.rig.cache.poll()

    @rule(seconds=st.sampled_from([0.01, 1.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.moment += seconds

    @rule(seconds=st.sampled_from([1.0, 300.0, 600.0, 3600.0, 86_400.0]))
    def advance(self, seconds: float) -> None:
        self.rig.clock.moment += seconds

    @rule(name=st.sampled_from("abc"))
    def evict(self, name: str) -> None:
        root = self.rig.chain(name, 0).root

        def is_wanted(block: Any) -> bool:
            return (block.lent if isinstance(block, Read) else block).root == root

        self.rig.evict(is_wanted)

    @rule(is_down=st.booleans())
    def worker(self, is_down: bool) -> None:
        self.rig.store.is_down = is_down

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "rig"):
            self.rig.check()
            for prefix in self.running:
                self.rig.verify(prefix)

    @invariant()
    def nothing_is_stuck(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.plan()
        for prefix in self.running:
            assert self.rig.can_go_on(prefix), "a request waits for nothing"

    def teardown(self) -> None:
        room.PATIENCE_S = 1e9  # everything completes, so that no block need be given up for room
        try:
            self.complete_all()
        finally:
            room.PATIENCE_S = self.patience_s
            self.time.stop()

    def complete_all(self) -> None:
        """Let all reads and copies complete, and serve every request that is left."""
        if not hasattr(self, "rig"):
            return
        self.rig.store.is_held = self.rig.transfer.is_held = False
        for prefix in self.running:
            self.rig.finish(prefix)
        for prefix in self.waiting:
            for _ in range(50):
                if self.rig.admit(prefix, is_alone=True):
                    break
                self.rig.turn()
                self.moment += 0.1
            else:
                raise AssertionError("a queued request is never admitted")
            self.rig.finish(prefix)
        self.rig.check_nothing_is_held()


LIMITS = settings(
    max_examples=60,
    print_blob=False,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


class TestTieredCache(TieredCacheMachine.TestCase):  # type: ignore[misc,valid-type]
    """As `make test` tries it."""

    settings = LIMITS


@pytest.mark.slow
class TestTieredCacheForLonger(TieredCacheMachine.TestCase):  # type: ignore[misc,valid-type]
    """As `make test-full` tries it."""

    settings = settings(LIMITS, max_examples=200)
