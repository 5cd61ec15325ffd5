"""Removals are announced of what was announced before, and of nothing else."""

from tieredkv.integrations.announced import Announced, Announcement


def test_a_chunk_is_announced_once_and_taken_back_once() -> None:
    announced = Announced(10)
    for name in (b"a", b"b", b"a"):
        announced.add(name, b"key of " + name)
    announced.remove([b"a", b"c", b"a"])
    announced.add(b"a", b"key of a")
    assert announced.take() == [
        Announcement([b"key of a", b"key of b"], is_removed=False),
        Announcement([b"key of a"], is_removed=True),
        Announcement([b"key of a"], is_removed=False),
    ]
    assert announced.take() == []


def test_what_does_not_fit_is_taken_back_the_oldest_first() -> None:
    announced = Announced(2)
    for name in (b"a", b"b", b"c"):
        announced.add(name, name)
    assert announced.take()[-1] == Announcement([b"a"], is_removed=True)
    assert len(announced) == 2


def test_all_is_taken_back_when_nobody_knows_what_is_left() -> None:
    announced = Announced(10)
    announced.add(b"a", b"a")
    announced.add(b"b", b"b")
    announced.take()
    announced.remove_all()
    assert announced.take() == [Announcement([b"a", b"b"], is_removed=True)]
    assert len(announced) == 0
