"""What would be loaded is what was asked for and found without a gap."""

import pytest

from tieredkv.integrations.heads import Asked, Head


def asked(*places: int | None, group: int = 0) -> Asked:
    shown = Asked()
    for number, place in enumerate(places):
        shown.note(group, place, b"key%d" % number, b"%d/%d" % (group, number))
    return shown


def head(shown: Asked, found: str, begin: int = 0, *, group: int = 0, most: int = 99) -> Head:
    """Return the head where the disk has the chunks with these numbers."""
    has = {b"%d/%s" % (group, number.encode()) for number in found}
    return shown.head(group, begin, has.__contains__, {0: None, 1: 2, 2: None}, most)


@pytest.mark.parametrize(
    ("found", "end", "num"), [("0123", 4, 4), ("013", 2, 2), ("0", 1, 1), ("02", 1, 1)]
)
def test_a_head_ends_at_the_first_chunk_that_is_missing(found: str, end: int, num: int) -> None:
    told = head(asked(0, 1, 2, 3), found)
    assert (told.begin, told.end, len(told.chunks), told.num_others) == (0, end, num, 0)


def test_chunks_that_were_not_asked_for_are_in_memory_and_no_gap() -> None:
    told = head(asked(5, 6, 9, 10), "0123", 5)
    assert told == Head(5, 11, {b"0/%d" % n: b"key%d" % n for n in range(4)})
    assert head(asked(5, 6, 9, 10), "013", 5).end == 7, "what follows the gap is not needed"


def test_a_head_begins_where_memory_ends() -> None:
    assert head(asked(0, 1, 2, 3), "0123", 2)[:2] == (2, 4)


def test_a_head_is_no_longer_than_memory() -> None:
    assert head(asked(0, 1, 2, 3), "0123", most=2)[:2] == (0, 2)


def test_where_no_places_are_told_the_order_counts() -> None:
    shown = asked(None, None, None)
    shown.note(0, None, b"key1", b"0/1")  # asked for again
    assert head(shown, "012")[:2] == (0, 3)
    assert (shown.place(b"0/2"), shown.place(b"0/3"), shown.end(0), shown.end(7)) == (2, None, 3, 0)


def test_of_a_sliding_window_only_the_last_chunks_count() -> None:
    shown = asked(0, 1, 2, 3, 4, 5)
    for place in range(6):
        shown.note(1, place, b"", b"1/%d" % place)
        shown.note(2, place, b"", b"2/%d" % place)
    has = {*(b"0/%d" % n for n in range(6)), *(b"1/%d" % n for n in range(6)), b"2/0"}
    told = shown.head(0, 0, has.__contains__, {0: None, 1: 2, 2: None}, 99)
    assert (told.end, len(told.chunks), told.num_others) == (6, 6, 3 + 1)


def test_a_model_with_nothing_but_windows_loads_the_last_one() -> None:
    shown = asked(4, 3, 2, 1, 0, group=1)  # vLLM asks from the end
    told = head(shown, "012", 4, group=1)
    assert told.begin == 0
    assert told.end == 5
    assert len(told.chunks) == 3
