import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import FakeClock
from tieredkv.errors import ConfigError, RequestError
from tieredkv.retention import RetentionPolicies, RetentionPolicy
from tieredkv.types import Tier

RAM = frozenset({Tier.DEVICE, Tier.HOST})
POLICIES = RetentionPolicies.default()


def is_reachable(clock: FakeClock, claims: set[str], computed_at: float, last_used: float) -> bool:
    return clock.now() < POLICIES.deadline(claims, computed_at, last_used)


def test_an_unused_block_is_unreachable_ten_minutes_later_to_the_second() -> None:
    clock = FakeClock()
    start = clock.now()
    clock.advance(599)
    assert is_reachable(clock, {"in_memory"}, start, start)
    clock.advance(1)
    assert not is_reachable(clock, {"in_memory"}, start, start)


@pytest.mark.parametrize(("claim", "absolute_s"), [("in_memory", 3600), ("24h", 86400)])
def test_a_block_used_every_second_is_unreachable_at_the_absolute_limit(
    claim: str, absolute_s: int
) -> None:
    clock = FakeClock()
    start = clock.now()
    clock.advance(absolute_s - 1)
    assert is_reachable(clock, {claim}, start, clock.now())
    clock.advance(1)
    assert not is_reachable(clock, {claim}, start, clock.now())


def test_the_longer_of_the_claims_counts() -> None:
    both = {"in_memory", "24h"}
    assert POLICIES.deadline(both, 1000.0, 1000.0) == 1000.0 + 86400
    assert POLICIES.deadline({"in_memory"}, 1000.0, 1000.0) == 1000.0 + 600
    assert POLICIES.longest(both) == POLICIES.longest({"24h"}) == "24h"
    assert POLICIES.longest({"in_memory"}) == "in_memory"


def test_a_later_claim_still_counts_from_when_the_block_was_computed() -> None:
    computed_at, claimed_at = 1000.0, 4000.0
    assert POLICIES.deadline({"in_memory", "24h"}, computed_at, claimed_at) == 1000.0 + 86400
    assert POLICIES.disk_deadline({"24h"}, computed_at, claimed_at) == 1000.0 + 86400


def test_only_a_claim_that_allows_disk_has_a_disk_deadline() -> None:
    assert POLICIES.disk_deadline({"in_memory"}, 0.0, 0.0) is None
    assert POLICIES.disk_deadline(set(), 0.0, 0.0) is None
    assert POLICIES.disk_deadline({"in_memory", "24h"}, 0.0, 0.0) == 86400


def test_a_longer_claim_without_disk_does_not_lengthen_the_disk_deadline() -> None:
    policies = RetentionPolicies(
        [
            RetentionPolicy("week", 7 * 86400.0, 7 * 86400.0, RAM),
            RetentionPolicy("hour", 3600.0, 3600.0, frozenset(Tier)),
        ]
    )
    claims = {"week", "hour"}
    assert policies.deadline(claims, 0.0, 0.0) == 7 * 86400
    assert policies.disk_deadline(claims, 0.0, 0.0) == 3600
    assert policies.longest(claims) == "week"


@given(
    st.sets(st.sampled_from(["in_memory", "24h"]), min_size=1),
    st.floats(0, 2e9),
    st.floats(0, 2e5),
)
def test_no_claim_outlives_its_absolute_limit(
    claims: set[str], computed_at: float, used_after: float
) -> None:
    limit = max(POLICIES.get(claim).absolute_s for claim in claims)
    assert POLICIES.deadline(claims, computed_at, computed_at + used_after) <= computed_at + limit


def test_claims_of_policies_that_are_not_configured_any_more_count_for_nothing() -> None:
    assert POLICIES.deadline({"gold"}, 1000.0, 2000.0) == 1000.0
    assert POLICIES.deadline(frozenset(), 1000.0, 2000.0) == 1000.0
    assert POLICIES.disk_deadline({"gold"}, 1000.0, 2000.0) is None
    assert POLICIES.longest({"gold", "in_memory"}) == "in_memory"
    with pytest.raises(ValueError):
        POLICIES.longest({"gold"})


def test_the_longest_of_equally_long_claims_is_always_the_same() -> None:
    policies = RetentionPolicies([RetentionPolicy(name, 60.0, 60.0, RAM) for name in "badc"])
    assert policies.longest({"a", "b", "c", "d"}) == "d"
    wider = RetentionPolicies([*policies, RetentionPolicy("0", 60.0, 60.0, frozenset(Tier))])
    assert wider.longest({"a", "0", "d"}) == "0"


def test_an_unknown_value_is_refused_in_the_words_of_the_api() -> None:
    with pytest.raises(RequestError) as caught:
        POLICIES.get("48h")
    assert str(caught.value) == (
        "Invalid value: '48h'. Supported values are: 'in_memory' and '24h'."
    )
    assert caught.value.param == "prompt_cache_retention"
    assert caught.value.code == "invalid_value"


def test_the_values_of_three_policies_are_listed_with_commas() -> None:
    three = RetentionPolicies(
        [*POLICIES, RetentionPolicy("week", 7 * 86400.0, 7 * 86400.0, frozenset(Tier))]
    )
    assert three.names == ("in_memory", "24h", "week")
    with pytest.raises(RequestError, match=r"are: 'in_memory', '24h', and 'week'\.$"):
        three.get("")


def test_the_hyphenated_spelling_is_the_same_policy() -> None:
    assert POLICIES.get("in-memory") is POLICIES.get("in_memory")
    assert POLICIES.get("in-memory").name == "in_memory"


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_limits_are_positive_and_finite(seconds: float) -> None:
    with pytest.raises(ConfigError, match=r"retention\.x\.idle"):
        RetentionPolicy("x", seconds, 60.0, RAM)
    with pytest.raises(ConfigError, match=r"retention\.x\.absolute"):
        RetentionPolicy("x", 60.0, seconds, RAM)


@pytest.mark.parametrize("tiers", [[], ["host"], ["device", "disk"], ["disk"]])
def test_a_tier_includes_those_above_it(tiers: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"retention\.x\.tiers"):
        RetentionPolicy("x", 60.0, 60.0, frozenset(map(Tier, tiers)))


def test_policies_are_equal_by_value() -> None:
    assert RetentionPolicies.default() == POLICIES
    assert RetentionPolicies(list(POLICIES)[:1]) != POLICIES
    assert len(POLICIES) == 2
    assert "24h" in POLICIES and "48h" not in POLICIES
