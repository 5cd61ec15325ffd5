"""The states of a chain's blocks, searched as a row of bytes."""

from hypothesis import given
from hypothesis import strategies as st

from tieredkv.cache.row import LOADABLE, Row, State
from tieredkv.cache.stretches import stretches

STATES = st.lists(st.sampled_from(State), max_size=40)


def row_of(states: list[State]) -> Row:
    row = Row(len(states))
    for index, state in enumerate(states):
        row.find(index, state)
    return row


@given(states=STATES, begin=st.integers(0, 45), end=st.integers(0, 45))
def test_a_row_finds_what_a_list_would(states: list[State], begin: int, end: int) -> None:
    row = row_of(states)
    assert len(row) == len(states)
    for state in State:
        indices = [index for index, each in enumerate(states) if each is state]
        assert [*row.indices(state)] == indices
        assert row.first(state) == (indices[0] if indices else -1)
        assert row.last(state) == (indices[-1] if indices else -1)
        within = [index for index in indices if begin <= index < end]
        assert row.first(state, begin, end) == (within[0] if within else -1)
    there = [index for index, each in enumerate(states) if each <= State.COMING]
    assert [*row.there] == [*stretches(there)]
    awaited = [State.COMING, State.SHARED, State.COMPUTE, *LOADABLE]
    assert [*row.awaited] == [index for index, each in enumerate(states) if each in awaited]
    assert [*row.states] == states
    assert [row.count(state) for state in State] == [states.count(state) for state in State]


@given(states=STATES, changes=st.lists(st.tuples(st.integers(0, 39), st.sampled_from(State))))
def test_a_row_tells_of_each_change(states: list[State], changes: list[tuple[int, State]]) -> None:
    row = row_of(states)
    for index, state in changes:
        if index >= len(states):
            continue
        before = row.indices(state)
        kept = [*before]
        row.find(index, state)
        states[index] = state
        assert [*before] == kept, "what was returned does not change"
        assert [*row.indices(state)] == [i for i, each in enumerate(states) if each is state]
    row.copy(range(len(states)))
    assert [*row.indices(State.COMING)] == [*range(len(states))]


def test_a_new_row_and_one_that_is_reset_have_one_state() -> None:
    row = Row(3)
    assert [*row.indices(State.COMPUTE)] == [0, 1, 2]
    row.begin(bytearray([State.FOUND]) * 2)
    assert [*row.there] == [(0, 2)] and not row.indices(State.COMPUTE)
