"""Chunks are as old as their first offer, and states as what they were computed from."""

from tieredkv.integrations.ages import Ages, ChainAge
from tieredkv.integrations.identity import Identity
from tieredkv.integrations.lives import Lives
from tieredkv.integrations.tier_request import TierRequest
from tieredkv.retention import RetentionPolicies

HOUR_S, DAY_S = 3600.0, 86400.0
FULL, STATE = 1, 0


def request(retention: str = "24h") -> TierRequest:
    return TierRequest("r", Identity("vllm", {}), retention, bytes(32), bytes(16), True)


def lives() -> Lives:
    spans, windows = {STATE: 16, FULL: 16}, {STATE: 1, FULL: None}
    return Lives(Ages(100), RetentionPolicies(), spans, windows)


def key(group: int, place: int) -> bytes:
    return b"%04d" % place + group.to_bytes(4, "big")


def test_the_age_of_a_chain_is_known_as_far_as_it_has_no_gap() -> None:
    chain = ChainAge()
    chain.note(1, 5.0)
    assert chain.oldest(1) is None and chain.oldest(2) is None
    chain.note(0, 7.0)
    assert (chain.oldest(1), chain.oldest(2), chain.oldest(3)) == (7.0, 5.0, None)
    chain.note(1, 9.0)
    assert (chain.oldest(1), chain.oldest(2)) == (7.0, 7.0)
    assert chain.oldest(0) is None


def test_a_state_is_as_old_as_the_oldest_chunk_before_it() -> None:
    known, asked = lives(), request()
    for place, moment in enumerate([HOUR_S, 0.0, 23 * HOUR_S]):
        known.ages.note(key(FULL, place), moment)
    now = 23 * HOUR_S
    assert known.is_early(asked, key(STATE, 2), 2)
    assert known.of(asked, key(STATE, 2), 2, now) == (now, None), "nobody knows how old it is"
    for place in range(3):
        known.of(asked, key(FULL, place), place, now)
    assert not known.is_early(asked, key(STATE, 2), 2)
    assert known.of(asked, key(STATE, 2), 2, now) == (0.0, DAY_S)
    assert known.of(asked, key(FULL, 2), 2, now) == (now, now + DAY_S)


def test_what_is_computed_anew_begins_a_new_life_and_its_states_too() -> None:
    known, asked, now = lives(), request(), 30 * HOUR_S
    for group in (FULL, STATE):
        known.ages.note(key(group, 0), 0.0)
        asked.note_computes_from(group.to_bytes(4, "big"), 0)
    assert known.of(asked, key(FULL, 0), 0, now) == (now, now + DAY_S)
    assert known.of(asked, key(STATE, 0), 0, now) == (now, now + DAY_S)


def test_a_state_that_is_continued_from_an_expired_one_is_not_kept() -> None:
    known, asked, now = lives(), request(), 30 * HOUR_S
    known.ages.note(key(FULL, 0), 0.0)
    asked.note_computes_from(STATE.to_bytes(4, "big"), 0)
    known.of(asked, key(FULL, 0), 0, now)
    first, deadline = known.of(asked, key(STATE, 0), 0, now)
    assert first == 0.0 and deadline is not None and deadline <= now


def test_no_state_waits_that_the_disk_will_not_get() -> None:
    known = lives()
    assert not known.is_early(request("in_memory"), key(STATE, 0), 0)
    assert not known.is_early(request(), key(FULL, 0), 0)
