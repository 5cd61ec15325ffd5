"""Retention policies: deadlines, claims and the names of policies."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import FakeClock
from tests.golden import refused
from tieredkv.errors import ConfigError, RequestError
from tieredkv.retention import IN_MEMORY, TWENTY_FOUR_HOURS, RetentionPolicies, RetentionPolicy
from tieredkv.types import Tier

RAM = frozenset({Tier.DEVICE, Tier.HOST})
ALL = frozenset(Tier)
HOUR = 3600.0
COMPUTED = 1_800_000_000.0


def make_policy(
    name: str = "custom",
    idle_s: float = 60.0,
    absolute_s: float = 600.0,
    tiers: frozenset[Tier] = RAM,
) -> RetentionPolicy:
    return RetentionPolicy(name=name, idle_s=idle_s, absolute_s=absolute_s, tiers=tiers)


def test_the_two_policies_are_those_of_the_contract() -> None:
    assert (IN_MEMORY.idle_s, IN_MEMORY.absolute_s, IN_MEMORY.tiers) == (600.0, HOUR, RAM)
    assert not IN_MEMORY.may_use_disk
    day = TWENTY_FOUR_HOURS
    assert (day.idle_s, day.absolute_s, day.tiers) == (24 * HOUR, 24 * HOUR, ALL)
    assert day.may_use_disk
    assert RetentionPolicies().names == {"in_memory", "24h", "5m", "1h"}


@pytest.mark.parametrize(
    ("claims", "used_after_s", "lives_s"),
    [
        ({"in_memory"}, 0, 600),
        ({"in_memory"}, 599, 1199),
        ({"in_memory"}, 2999, 3599),
        ({"in_memory"}, 3000, 3600),
        ({"in_memory"}, 3599, 3600),
        ({"24h"}, 0, 86400),
        ({"24h"}, 86399, 86400),
        ({"in_memory", "24h"}, 0, 86400),
        ({"in_memory", "24h"}, 3599, 86400),
    ],
)
def test_a_deadline_is_exact_to_the_second(
    claims: set[str], used_after_s: float, lives_s: float
) -> None:
    deadline = RetentionPolicies().deadline(claims, COMPUTED, COMPUTED + used_after_s)
    assert deadline == COMPUTED + lives_s


def test_a_block_used_every_minute_still_ends_at_its_absolute_limit() -> None:
    policies, clock = RetentionPolicies(), FakeClock(COMPUTED)
    last_used = COMPUTED
    while clock.now() < policies.deadline({"in_memory"}, COMPUTED, last_used):
        last_used = clock.now()
        clock.advance(60)
    assert clock.now() == COMPUTED + HOUR


def test_a_later_claim_does_not_make_a_block_younger() -> None:
    policies = RetentionPolicies()
    claimed_at = COMPUTED + 500
    assert policies.deadline({"in_memory", "24h"}, COMPUTED, claimed_at) == COMPUTED + 24 * HOUR
    assert policies.disk_deadline({"in_memory", "24h"}, COMPUTED, claimed_at) == (
        COMPUTED + 24 * HOUR
    )


def test_only_a_claim_that_allows_the_disk_gives_a_disk_deadline() -> None:
    policies = RetentionPolicies()
    assert policies.disk_deadline({"in_memory"}, COMPUTED, COMPUTED) is None
    assert policies.disk_deadline(set(), COMPUTED, COMPUTED) is None
    assert policies.disk_deadline({"24h"}, COMPUTED, COMPUTED) == COMPUTED + 24 * HOUR
    assert policies.disk_deadline({"24h", "in_memory"}, COMPUTED, COMPUTED) == COMPUTED + 24 * HOUR


def test_a_longer_claim_to_ram_does_not_lengthen_the_life_on_disk() -> None:
    policies = RetentionPolicies(
        [make_policy("ram", 7200, 7200), make_policy("disk", 60, 600, tiers=ALL)]
    )
    claims = {"ram", "disk"}
    assert policies.deadline(claims, COMPUTED, COMPUTED) == COMPUTED + 7200
    assert policies.disk_deadline(claims, COMPUTED, COMPUTED) == COMPUTED + 60


limits = st.tuples(st.integers(1, 10**6), st.integers(0, 10**6)).map(
    lambda drawn: (float(drawn[0]), float(drawn[0] + drawn[1]))
)


@given(
    rows=st.lists(st.tuples(limits, st.booleans()), min_size=1, max_size=4),
    uses=st.lists(st.integers(0, 10**6), min_size=1, max_size=5),
    data=st.data(),
)
def test_deadlines_hold_for_any_policies_claims_and_uses(
    rows: list[tuple[tuple[float, float], bool]], uses: list[int], data: st.DataObject
) -> None:
    named = {
        str(index): make_policy(str(index), idle, absolute, ALL if has_disk else RAM)
        for index, ((idle, absolute), has_disk) in enumerate(rows)
    }
    policies = RetentionPolicies(named.values())
    claims = data.draw(st.sets(st.sampled_from(sorted(named)), min_size=1))
    claimed = [named[name] for name in claims]
    deadlines = []
    for used_after_s in sorted(uses):
        last_used = COMPUTED + used_after_s
        deadline = policies.deadline(claims, COMPUTED, last_used)
        assert deadline <= COMPUTED + max(policy.absolute_s for policy in claimed)
        assert deadline <= last_used + max(policy.idle_s for policy in claimed)
        assert deadline in {policy.deadline(COMPUTED, last_used) for policy in claimed}
        for name in named:
            assert policies.deadline(claims | {name}, COMPUTED, last_used) >= deadline
        on_disk = policies.disk_deadline(claims, COMPUTED, last_used)
        assert (on_disk is None) == (not any(policy.may_use_disk for policy in claimed))
        assert on_disk is None or on_disk <= deadline
        deadlines.append(deadline)
    assert all(before <= after for before, after in pairwise(deadlines))


@pytest.mark.parametrize(
    ("claims", "name"),
    [({"in_memory"}, "in_memory"), ({"24h"}, "24h"), ({"24h", "in_memory"}, "24h")],
)
def test_the_longest_claim_is_the_one_that_keeps_the_block(claims: set[str], name: str) -> None:
    assert RetentionPolicies().longest(claims) == name


@pytest.mark.parametrize("ram_absolute_s", [24 * HOUR, 48 * HOUR])
def test_the_longest_claim_of_a_block_on_disk_is_one_that_allows_the_disk(
    ram_absolute_s: float,
) -> None:
    ram = make_policy("in_memory", ram_absolute_s, ram_absolute_s)
    policies = RetentionPolicies([ram, TWENTY_FOUR_HOURS])
    assert policies.longest({"in_memory", "24h"}) == "24h"


def test_of_two_claims_with_equal_limits_the_less_idle_one_is_longer() -> None:
    policies = RetentionPolicies([make_policy("z", 60, 600), make_policy("a", 120, 600)])
    assert policies.longest({"a", "z"}) == "a"


def test_a_policy_is_found_by_its_name_or_its_alias() -> None:
    policies = RetentionPolicies()
    assert policies.get("in_memory") is policies.get("in-memory") is IN_MEMORY
    assert policies.get("24h") is TWENTY_FOUR_HOURS


@pytest.mark.parametrize("name", ["", "48h", "24H", "in memory", " 24h"])
def test_an_unknown_policy_is_refused_in_the_words_of_openai(name: str) -> None:
    with refused(RequestError, param="prompt_cache_retention", code="invalid_value", status=400):
        RetentionPolicies().get(name)


@pytest.mark.parametrize("names", [["a"], ["a", "b"], ["a", "b", "c"]])
def test_the_refusal_lists_what_the_server_offers(names: list[str]) -> None:
    policies = RetentionPolicies(make_policy(name) for name in names)
    with refused(RequestError, param="prompt_cache_retention", code="invalid_value"):
        policies.get("x")


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("field", ["idle", "absolute"])
def test_a_limit_must_be_a_positive_finite_time(field: str, value: float) -> None:
    idle_s, absolute_s = (value, 600.0) if field == "idle" else (60.0, value)
    with refused(ConfigError):
        make_policy(idle_s=idle_s, absolute_s=absolute_s)


def test_an_idle_limit_beyond_the_absolute_one_is_refused() -> None:
    with refused(ConfigError):
        make_policy(idle_s=7200, absolute_s=3600)
    assert make_policy(idle_s=3600, absolute_s=3600).deadline(0, 0) == 3600


@pytest.mark.parametrize(
    "tiers",
    [frozenset[Tier](), frozenset({Tier.HOST, Tier.DISK}), frozenset({Tier.DEVICE, Tier.DISK})],
)
def test_tiers_that_blocks_cannot_pass_through_are_refused(tiers: frozenset[Tier]) -> None:
    with refused(ConfigError):
        make_policy(tiers=tiers)


def test_a_policy_cannot_have_the_name_of_an_alias() -> None:
    with refused(ConfigError):
        make_policy("in-memory")
