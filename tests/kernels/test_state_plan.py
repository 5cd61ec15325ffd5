"""Plans of rows with recurrent states: what they hold, and that they have room for any rows."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredkv.kernels import state_plan
from tieredkv.kernels.state_layout import StateRows, StateSpan
from tieredkv.kernels.state_plan import CHUNK, CONV_TILE, MAX_STEP_TOKENS, PlanSize, make_rows

COUNTS = st.lists(st.sampled_from([0, 1, 2, 17, 256, 257, 300, 640, 1000]), max_size=7)


def spans_of(counts: list[int]) -> list[StateSpan]:
    ends = np.cumsum([0, *counts]).tolist()
    return [StateSpan(row, ends[row], count) for row, count in enumerate(counts)]


def check(rows: StateRows, spans: list[StateSpan]) -> None:
    """Require that the parts of a plan say exactly these rows."""
    assert rows.rows[: len(spans)].tolist() == [[*span] for span in spans]
    assert not rows.rows[len(spans) :].any()
    if rows.tiles is not None:
        covered = {
            (row, tile)
            for row, tile in rows.tiles.tolist()
            if tile * CONV_TILE < int(rows.rows[row, 2])
        }
        tiles = [-(-span.num_tokens // CONV_TILE) for span in spans]
        assert covered == {(row, tile) for row, count in enumerate(tiles) for tile in range(count)}
    if rows.chunks is None:
        return
    bounds, offsets = rows.chunks.bounds.tolist(), rows.chunks.offsets.tolist()
    lengths = [end - first for first, end in itertools.pairwise(bounds)]
    assert all(length <= 0 for length in lengths[1::2]), "nothing lies between two rows"
    found = [(bounds[i], lengths[i]) for i in range(0, len(lengths), 2) if lengths[i]]
    long = [span for span in spans if span.num_tokens > MAX_STEP_TOKENS]
    assert sorted(found) == sorted((span.first_token, span.num_tokens) for span in long)
    assert [row[1:] for row in rows.chunks.rows.tolist() if row[2]] == [[*each] for each in found]
    numbered = [
        (sequence, chunk)
        for sequence, chunk in rows.chunks.chunks.tolist()
        if chunk * CHUNK < lengths[sequence]
    ]
    expected = [
        (sequence, chunk)
        for sequence in range(0, len(lengths), 2)
        for chunk in range(-(-lengths[sequence] // CHUNK))
    ]
    assert numbered == expected
    for sequence, chunk in expected:
        assert numbered[offsets[sequence] + chunk] == (sequence, chunk)


@given(COUNTS)
def test_a_plan_without_padding_says_the_rows(counts: list[int]) -> None:
    spans = spans_of(counts)
    rows = make_rows(spans, "cpu")
    check(rows, spans)
    assert (rows.tiles is None) == (max(counts, default=0) <= 1)
    assert (rows.chunks is None) == (max(counts, default=0) <= MAX_STEP_TOKENS)


@given(COUNTS, st.integers(0, 300))
def test_a_captured_step_has_room_for_any_rows_but_many_in_chunks(
    counts: list[int], padding: int
) -> None:
    spans, num_tokens = spans_of(counts), max(8, sum(counts) + padding)
    size = PlanSize.of_any(num_tokens, 64)
    most = PlanSize.largest(num_tokens, 64)
    assert size.num_ints <= most.num_ints
    assert PlanSize.of_step(spans).num_ints <= most.num_ints
    num_long = sum(count > MAX_STEP_TOKENS for count in counts)
    assert size.has_room(spans) == (num_long <= state_plan.MAX_CAPTURED_CHUNK_ROWS)
    if size.has_room(spans):
        check(make_rows(spans, "cpu", size), spans)


def test_what_an_earlier_step_wrote_is_gone() -> None:
    size, plan = PlanSize.of_any(2048, 8), np.full(9999, 7, dtype=np.int32)
    first = make_rows(spans_of([300, 1, 700]), "cpu", size)
    state_plan.fill(plan, spans_of([300, 1, 700]), size)
    state_plan.fill(plan, spans_of([1]), size)
    expected = np.full(9999, 7, dtype=np.int32)
    state_plan.fill(expected, spans_of([1]), size)
    assert (plan == expected).all()
    assert first.chunks is not None and first.chunks.num_sequences == 9
    with pytest.raises(ValueError, match="broadcast"):
        state_plan.fill(plan, spans_of([1] * 9), size)
