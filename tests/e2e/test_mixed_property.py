"""Mishaps in any order change no token: a real engine with a real disk tier against a cold one.

Hypothesis draws what is asked of the engine and what goes wrong before and meanwhile. The engine
and the store's worker run in real time, so that a failure may need several runs to occur again.
"""

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from tests.mishaps import MOST_TOKENS, Ask, Conditions, Mishap, UnluckyEngine

ASKS = st.builds(
    Ask,
    trunk=st.integers(0, 1),
    num_shared=st.sampled_from([0, 16, 150, 320, 480]) | st.integers(0, 500),
    num_own=st.sampled_from([0, 40]) | st.integers(0, 150),
    num_answered=st.sampled_from([0, 0, MOST_TOKENS]),
    max_tokens=st.sampled_from([1, 4, MOST_TOKENS]),
    step=st.just(0) | st.integers(0, 12),
    retention=st.sampled_from(["24h", "24h", "24h", "in_memory"]),
).filter(lambda ask: ask.num_shared + ask.num_own > 0)

CONDITIONS = st.builds(
    Conditions,
    fail_share=st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0]),
    delay_share=st.sampled_from([0.0, 0.0, 0.5, 0.95]),
    load_timeout_s=st.sampled_from([0.0, 0.005, 0.05, 30.0]),
    lookup_timeout_s=st.sampled_from([0.0, 0.01, 1.0, 1.0, 1.0]),
    room_patience_s=st.sampled_from([0.0, 0.25]),
    has_any_splits=st.booleans(),
    disk_bytes_per_s=st.sampled_from([None, 1e5, 1e9, 1e12]),
    host_bytes_per_s=st.sampled_from([None, 1e5, 1e12]),
    seed=st.integers(0, 999),
)

MISHAPS = st.builds(
    Mishap,
    step=st.integers(0, 5) | st.integers(0, 12),
    what=st.sampled_from(
        [
            "abort",
            "abort",
            "abort",
            "stop",
            "kill",
            "jump",
            "evict",
            "evict_chains",
            "evict_here_and_there",
        ]
    ),
    number=st.integers(0, 999),
)


class MixedMachine(RuleBasedStateMachine):
    """Requests come, together or one after another, and mishaps happen before and meanwhile.

    Blocks fail to load or to be stored, or come late; timeouts are short; the planner chooses any
    split or believes in a wrong rate; the worker is stopped or killed; blocks are demoted, evicted
    and expire; requests are aborted. Each answer is compared with the cold one. At the end nothing
    may be held, and the disk has to serve again.
    """

    def __init__(self, engine: UnluckyEngine) -> None:
        super().__init__()
        self.engine = engine
        engine.begin()

    @rule(
        asks=st.lists(ASKS, min_size=1, max_size=5),
        conditions=CONDITIONS,
        mishaps=st.lists(MISHAPS, max_size=5),
    )
    def serve(self, asks: list[Ask], conditions: Conditions, mishaps: list[Mishap]) -> None:
        self.engine.meet(conditions)
        self.engine.serve(asks, mishaps)

    @rule(
        tier=st.sampled_from(["host", "disk"]),
        before=st.lists(ASKS, min_size=1, max_size=3),
        asks=st.lists(ASKS, min_size=1, max_size=3),
        conditions=CONDITIONS,
        mishaps=st.lists(MISHAPS, max_size=5),
    )
    def serve_from(
        self,
        tier: str,
        before: list[Ask],
        asks: list[Ask],
        conditions: Conditions,
        mishaps: list[Mishap],
    ) -> None:
        """Serve requests after others, which may begin alike, were moved to a slower tier."""
        self.engine.calm()
        self.engine.serve([ask._replace(step=0, retention="24h") for ask in before])
        self.engine.demote(tier)
        if tier == "disk":
            self.engine.evict()
        self.engine.meet(conditions)
        self.engine.serve([*asks, before[0]], mishaps)

    @rule(to=st.sampled_from(["host", "disk"]))
    def demote(self, to: str) -> None:
        self.engine.demote(to)

    @rule(mishap=MISHAPS)
    def go_wrong(self, mishap: Mishap) -> None:
        self.engine.happen(mishap)

    @rule(num_turns=st.integers(1, 10))
    def turn(self, num_turns: int) -> None:
        for _ in range(num_turns):
            self.engine.turn()

    def teardown(self) -> None:
        if sys.exception() is None:  # else the engine may hang once more
            self.engine.end()


def run(tmp_path: Path, limits: settings, **sizes: object) -> None:
    """Draw examples until the limits are reached or one fails."""
    with pytest.MonkeyPatch.context() as patch:
        engine = UnluckyEngine(tmp_path, patch, **sizes)

        class Machine(MixedMachine):
            def __init__(self) -> None:
                super().__init__(engine)

        try:
            run_state_machine_as_test(Machine, settings=limits)
        finally:
            engine.close()


LIMITS = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
    report_multiple_bugs=False,
    phases=[Phase.generate],  # what depends on real time cannot be shrunk
)


@pytest.mark.slow
def test_no_mishaps_in_any_order_change_a_token_or_leave_a_block_held(tmp_path: Path) -> None:
    limits = settings(LIMITS, max_examples=6, stateful_step_count=5, derandomize=True)
    run(tmp_path, limits)


@pytest.mark.stress
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("disk_write", ["on_evict", "write_behind"])
@pytest.mark.parametrize(("block_size", "num_batched_tokens"), [(16, 96), (32, 250), (16, 2048)])
def test_no_mishaps_in_any_order_change_a_token_in_hundreds_of_examples(
    tmp_path: Path, block_size: int, num_batched_tokens: int, disk_write: str
) -> None:
    sizes = {"block_size": block_size, "max_num_batched_tokens": num_batched_tokens}
    limits = settings(LIMITS, max_examples=60, stateful_step_count=10)
    run(tmp_path, limits, disk_write=disk_write, **sizes)
