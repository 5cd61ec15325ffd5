"""Which bytes of a row a chunk has not written."""

from tieredkv.integrations.row_parts import Span, gaps_in, parts_of_rank, telling_parts, told_specs


def test_each_layer_of_a_group_writes_the_begin_of_its_page() -> None:
    parts = parts_of_rank(
        [100, 100], {0: [(0, 100), (1, 100)], 1: [(1, 60)]}, {0: [100, 100], 1: [60]},
        begin=200, blocks_per_chunk=1,
    )  # fmt: skip
    assert parts == {0: [Span(200, 300), Span(300, 400)], 1: [Span(300, 360)]}


def test_the_blocks_of_a_chunk_lie_side_by_side_in_each_tensor() -> None:
    copies = {0: [(0, 8), (1, 10)]}
    parts = parts_of_rank([10, 10], copies, {0: [10, 8]}, begin=0, blocks_per_chunk=2)
    assert parts == {0: [Span(0, 8), Span(10, 18), Span(20, 30), Span(30, 40)]}


def test_what_is_copied_with_bytes_of_other_layers_is_not_known() -> None:
    assert parts_of_rank([30], {0: [(0, 30)]}, {0: [10, 10]}, begin=0, blocks_per_chunk=1) == {
        0: None
    }


def test_gaps_are_what_no_span_has() -> None:
    spans = [Span(30, 40), Span(0, 10), Span(35, 50)]
    assert gaps_in(60, spans) == [Span(10, 30), Span(50, 60)]
    assert gaps_in(50, [Span(0, 50)]) == []
    assert gaps_in(5, []) == [Span(0, 5)]


def test_parts_are_announced_to_the_tiers_that_are_made_meanwhile() -> None:
    assert told_specs() is None
    with telling_parts(("a",)):
        assert told_specs() == ("a",)
    assert told_specs() is None
