"""Objects that stay for long are not searched for garbage."""

import gc

from tieredkv.garbage import THRESHOLDS, look_seldom


def test_what_exists_is_not_looked_through_until_it_is_undone() -> None:
    before, num_frozen = gc.get_threshold(), gc.get_freeze_count()
    undo = look_seldom()
    try:
        assert gc.get_threshold() == THRESHOLDS
        assert gc.get_freeze_count() > num_frozen
    finally:
        undo()
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
    if num_frozen:
        gc.freeze()  # as `tests/conftest.py` did
