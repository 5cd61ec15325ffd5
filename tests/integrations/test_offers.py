"""Chunks that an engine offers are looked at after its steps, all in the end, few at once."""

from collections import deque
from collections.abc import Iterator

from tieredkv.integrations.identity import Identity
from tieredkv.integrations.offers import PART_CHUNKS, Offer, OfferedChunks, Offers
from tieredkv.integrations.tier_request import TierRequest

REQUEST = TierRequest("r", Identity("vllm", {}), "24h", bytes(32), bytes(16), is_announced=True)


def offer(id: int, num: int) -> Offer:
    return Offer(id, REQUEST, None, deque((row, b"%d" % row) for row in range(num)), 0.0, 0)


def rows_of(parts: list[OfferedChunks]) -> list[tuple[int, int]]:
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
    offers, seen = Offers(clock=lambda: 0.0), list[tuple[int, int]]()
    offers.add(offer(1, 3 * PART_CHUNKS))
    list(offers.end_step())
    nums = []
    while offers:
        parts = list(offers.end_step())
        nums.append(len(rows_of(parts)))
        seen += rows_of(parts)
        assert [not it.left for it, _ in parts] == [len(seen) == 3 * PART_CHUNKS]
    assert nums == [PART_CHUNKS] * 3
    assert seen == [(1, row) for row in range(3 * PART_CHUNKS)]


class Time:
    """Passes while parts are looked at."""

    def __init__(self) -> None:
        self.now = 0.0

    def look(self, parts: Iterator[OfferedChunks], part_s: float) -> int:
        num = 0
        for _, part in parts:
            num += len(part)
            self.now += part_s
        return num


def test_a_quarter_of_a_step_is_used() -> None:
    time = Time()
    offers = Offers(clock=lambda: time.now)
    offers.add(offer(1, 6 * PART_CHUNKS))
    list(offers.end_step())
    time.now += 0.010
    assert time.look(offers.end_step(), 0.001) == 3 * PART_CHUNKS  # 2.5 ms end within the third
    time.now += 10.0
    assert time.look(offers.end_step(), 0.03) == 2 * PART_CHUNKS  # 50 ms at most


def test_their_number_does_not_grow_without_end() -> None:
    offers, left = Offers(clock=lambda: 0.0), 0
    for id in range(200):
        offers.add(offer(id, 5 * PART_CHUNKS))
        left += 5 * PART_CHUNKS - len(rows_of(list(offers.end_step())))
    assert left <= 8 * 5 * PART_CHUNKS


def test_an_offer_without_chunks_ends_as_well() -> None:
    offers = Offers()
    offers.add(offer(1, 0))
    [(it, part)] = offers.take_all()
    assert (it.id, part) == (1, [])
    assert not offers


def test_all_is_taken_at_once_where_the_engine_waits_for_it() -> None:
    offers = Offers()
    offers.add(offer(1, PART_CHUNKS))
    list(offers.end_step())
    offers.add(offer(2, 4 * PART_CHUNKS))
    assert len(rows_of(list(offers.take_all()))) == 5 * PART_CHUNKS
    assert not offers


def test_what_is_put_back_comes_again_when_all_others_were_looked_at() -> None:
    offers, first, second = Offers(), offer(1, 2), offer(2, 1)
    before = REQUEST.num_offered
    offers.add(first)
    offers.add(second)
    assert REQUEST.num_offered == before + 3
    assert list(offers.end_step()) == []
    seen = list[tuple[int, int]]()
    for each, part in offers.end_step():
        seen += rows_of([(each, part)])
        if each is first and len(seen) == 2:
            offers.put_back(each, part[:1])
            assert offers.has_left(each)
    assert seen == [(1, 0), (1, 1), (2, 0), (1, 0)]
    assert REQUEST.num_offered == before and not offers
