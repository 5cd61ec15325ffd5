"""What the index understands, and what it takes for damage."""

import pytest

from tieredkv.errors import CorruptIndexError
from tieredkv.storage.index.entries import SegmentState, decode_segment, encode

SOUND = SegmentState(extent_bytes=8192, num_extents=4, num_used=3)


@pytest.mark.parametrize("num_used", [0, 3, 4])
def test_a_segment_has_any_number_of_its_extents_in_use(num_used: int) -> None:
    state = SOUND._replace(num_used=num_used)
    assert decode_segment(encode(state)) == state


@pytest.mark.parametrize(
    "change",
    [
        {"num_used": 5},
        {"num_used": -1},
        {"num_extents": -1, "num_used": -1},
        {"extent_bytes": 0},
        {"extent_bytes": -8192},
        {"extent_bytes": 5000},
    ],
)
def test_an_impossible_segment_is_damage(change: dict[str, int]) -> None:
    with pytest.raises(CorruptIndexError):
        decode_segment(encode(SOUND._replace(**change)))
