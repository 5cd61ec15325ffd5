"""The order of eviction, against a list that is sorted each time."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tieredkv.integrations.pinned_order import PinnedOrder

CAPACITY = 8
KEYS = st.integers(0, 11)


class Machine(RuleBasedStateMachine):
    """Does the same to an order and to a model: rank, end of the pin and use by key."""

    def __init__(self) -> None:
        super().__init__()
        self.order = PinnedOrder[int](CAPACITY // 2)
        self.model: dict[int, tuple[int, float, bool]] = {}
        self.rank, self.now = 0, 1.0

    def next(self) -> int:
        self.rank += 1
        return self.rank

    @precondition(lambda self: len(self.model) < CAPACITY)
    @rule(key=KEYS)
    def add(self, key: int) -> None:
        if key not in self.model:
            rank = self.next()
            self.order.add(key, (rank, 0))
            self.model[key] = rank, 0.0, False

    @rule(key=KEYS)
    def remove(self, key: int) -> None:
        assert (key in self.order) == (key in self.model)
        if self.model.pop(key, None):
            self.order.remove(key)

    @rule(key=KEYS, back=st.integers(0, 20))
    def move(self, key: int, back: int) -> None:
        if key in self.model:
            rank = self.next() - back
            self.order.move(key, (rank, 0))
            self.model[key] = (rank, *self.model[key][1:])

    @rule(key=KEYS)
    def turn(self, key: int) -> None:
        if key in self.model:
            rank, until, is_idle = self.model[key]
            self.order.set_idle(key, is_idle=not is_idle)
            self.model[key] = rank, until, not is_idle

    @rule(key=KEYS, for_s=st.sampled_from([0.0, 1.0, 5.0, 9.0]))
    def pin(self, key: int, for_s: float) -> None:
        if key in self.model:
            rank, until, is_idle = self.model[key]
            self.order.pin(key, self.now + for_s, self.now)
            self.end_pins()
            rank, until, is_idle = self.model[key]
            num_pinned = sum(each[1] > 0 for each in self.model.values())
            if for_s and (until or num_pinned < CAPACITY // 2):
                self.model[key] = rank, max(until, self.now + for_s), is_idle

    @rule(by=st.sampled_from([0.5, 1.0, 4.0]))
    def wait(self, by: float) -> None:
        self.now += by

    def end_pins(self) -> None:
        """Pins may end later than their time, but never count after it."""
        for key, (rank, until, is_idle) in self.model.items():
            self.model[key] = rank, until if until > self.now else 0.0, is_idle

    @rule(num=st.integers(0, CAPACITY), spared=st.sets(KEYS, max_size=4))
    def evict(self, num: int, spared: set[int]) -> None:
        self.end_pins()
        idle = [key for key, each in self.model.items() if each[2] and key not in spared]
        idle.sort(key=lambda key: (self.model[key][1] > 0, self.model[key][0], key))
        evicted = self.order.evict(num, spared, self.now)
        assert evicted == (idle[:num] if num <= len(idle) else None)
        for key in evicted or ():
            del self.model[key]

    @rule()
    def clear(self) -> None:
        self.order.clear()
        self.model.clear()

    @invariant()
    def holds(self) -> None:
        self.order.check()
        assert len(self.order) == len(self.model)


Machine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestOrder = Machine.TestCase


@pytest.mark.parametrize("is_pinned", [False, True])
def test_stale_entries_do_not_pile_up(is_pinned: bool) -> None:
    order = PinnedOrder[int](CAPACITY // 2)
    for key in range(4):
        order.add(key, (key, 0))
        order.set_idle(key, is_idle=True)
    for rank in range(10_000):
        if is_pinned:
            order.pin(rank % 4, 1.0 + rank, 0.0)
        order.move(rank % 4, (4 + rank, 0))
    order.check()
    assert len(order._plain) + len(order._pinned) + len(order._ends) < 300
    assert order.evict(4, (), 0.0) == [0, 1, 2, 3]
