"""Chunks that an engine offers are looked at after its steps, all in the end, few at once."""

from collections import deque

import pytest

from tieredkv.integrations.identity import Identity
from tieredkv.integrations.offers import LEAST_A_STEP, Offer, Offers, Part
from tieredkv.integrations.tier_request import TierRequest

REQUEST = TierRequest("r", Identity("vllm", {}), "24h", bytes(32), bytes(16), is_announced=True)


def offer(id: int, num: int) -> Offer:
    return Offer(id, REQUEST, None, deque((row, b"%d" % row) for row in range(num)), 0.0, 0)


def rows_of(parts: list[Part]) -> list[tuple[int, int]]:
    return [(offer.id, row) for offer, part in parts for row, _ in part]


def test_the_step_that_offers_chunks_does_not_look_at_them() -> None:
    offers = Offers()
    offers.add(offer(1, 3))
    assert list(offers.end_step()) == []
    offers.add(offer(2, 2))
    assert offers
    assert rows_of(list(offers.end_step())) == [(1, 0), (1, 1), (1, 2)]
    assert rows_of(list(offers.end_step())) == [(2, 0), (2, 1)]
    assert not offers


def test_many_chunks_take_several_steps_in_the_order_of_the_prompt() -> None:
    offers, seen = Offers(), list[tuple[int, int]]()
    offers.add(offer(1, 3 * LEAST_A_STEP))
    list(offers.end_step())
    nums = []
    while offers:
        parts = list(offers.end_step())
        nums.append(len(rows_of(parts)))
        seen += rows_of(parts)
        assert [not it.left for it, _ in parts] == [len(seen) == 3 * LEAST_A_STEP]
    assert nums == [LEAST_A_STEP] * 3
    assert seen == [(1, row) for row in range(3 * LEAST_A_STEP)]


@pytest.mark.parametrize("a_step", [1, LEAST_A_STEP, 5 * LEAST_A_STEP])
def test_no_more_wait_than_some_steps_bring(a_step: int) -> None:
    offers, left = Offers(), 0
    for id in range(100):
        offers.add(offer(id, a_step))
        left += a_step - len(rows_of(list(offers.end_step())))
        assert left <= 5 * max(a_step, LEAST_A_STEP)


def test_an_offer_without_chunks_ends_as_well() -> None:
    offers = Offers()
    offers.add(offer(1, 0))
    [(it, part)] = offers.take_all()
    assert (it.id, part) == (1, [])
    assert not offers


def test_all_is_taken_at_once_where_the_engine_waits_for_it() -> None:
    offers = Offers()
    offers.add(offer(1, LEAST_A_STEP))
    list(offers.end_step())
    offers.add(offer(2, 4 * LEAST_A_STEP))
    assert len(rows_of(list(offers.take_all()))) == 5 * LEAST_A_STEP
    assert not offers
