"""Plans of rows with recurrent states: what they hold, and that they have room for any rows."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredkv.kernels import state_plan
from tieredkv.kernels.state_layout import StateRows, StateSpan
from tieredkv.kernels.state_plan import CHUNK, CONV_TILE, MAX_STEP_TOKENS, PlanSize, make_rows

COUNTS = st.lists(st.sampled_from([0, 1, 2, 17, 64, 65, 130, 300, 640, 1000]), max_size=7)


def spans_of(counts: list[int]) -> list[StateSpan]:
    """Make rows of so many tokens; some of them keep states, in rows 100 and 101 of the tables."""
    ends, spans = np.cumsum([0, *counts]).tolist(), list[StateSpan]()
    for row, count in enumerate(counts):
        kept = ((count - 9, 100), (count - 3, 101))[: (row + count) % 3] if count > 9 else ()
        spans.append(StateSpan(row, ends[row], count, kept))
    return spans


def in_chunks(span: StateSpan) -> int:
    """Return how many of a row's tokens are computed in chunks, by the definition."""
    first = span.kept[0][0] if span.kept else span.num_tokens
    return first if first > MAX_STEP_TOKENS else 0


def check_row(fields: list[int], span: StateSpan) -> None:
    """Require that the fields of a row say what it is."""
    first_token, num_in_chunks, source, num_unused, *pairs = fields
    assert (first_token, num_in_chunks) == (span.first_token, in_chunks(span))
    found = [*zip(pairs[::2], pairs[1::2], strict=True)]
    assert found[:num_unused] == [(0, 0)] * num_unused
    assert found[num_unused:] == [*span.kept, (span.num_tokens, span.row)]
    assert source == (span.kept[0][1] if span.kept and num_in_chunks else span.row)


def check(rows: StateRows, spans: list[StateSpan]) -> None:
    """Require that the parts of a plan say exactly these rows."""
    for fields, span in zip(rows.rows[: len(spans)].tolist(), spans, strict=True):
        check_row(fields, span)
    assert not rows.rows[len(spans) :].any()
    if rows.tiles is not None:
        covered = {
            (row, tile)
            for row, tile in rows.tiles.tolist()
            if tile * CONV_TILE < int(rows.rows[row, -2])
        }
        tiles = [-(-span.num_tokens // CONV_TILE) for span in spans]
        assert covered == {(row, tile) for row, count in enumerate(tiles) for tile in range(count)}
    if rows.chunks is None:
        return
    bounds, offsets = rows.chunks.bounds.tolist(), rows.chunks.offsets.tolist()
    lengths = [end - first for first, end in itertools.pairwise(bounds)]
    assert all(length <= 0 for length in lengths[1::2]), "nothing lies between two rows"
    found = [(bounds[i], lengths[i]) for i in range(0, len(lengths), 2) if lengths[i]]
    long = {span.first_token: span for span in spans if in_chunks(span)}
    assert sorted(found) == sorted((first, in_chunks(span)) for first, span in long.items())
    expected_rows = []
    for first, count in found:
        span = long[first]
        expected_rows.append([span.row, span.kept[0][1] if span.kept else span.row, count])
    assert [row for row in rows.chunks.rows.tolist() if row[2]] == expected_rows
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
    assert (rows.chunks is None) == (not any(map(in_chunks, spans)))


@given(COUNTS, st.integers(0, 300))
def test_a_captured_step_has_room_for_any_rows_but_many_in_chunks(
    counts: list[int], padding: int
) -> None:
    spans, num_tokens = spans_of(counts), max(8, sum(counts) + padding)
    size = PlanSize.of_any(num_tokens, 64)
    most = PlanSize.largest(num_tokens, 64)
    assert size.num_ints <= most.num_ints
    assert PlanSize.of_step(spans).num_ints <= most.num_ints
    num_long = sum(map(bool, map(in_chunks, spans)))
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
    assert first.chunks is not None and first.chunks.num_sequences == 17
    with pytest.raises(ValueError, match="broadcast"):
        state_plan.fill(plan, spans_of([1] * 9), size)
