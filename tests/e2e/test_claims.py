"""The engine keeps a prefix as its request asks, under a clock that the test moves.

There is a test for each row of the retention table: the longest life and the time pinned.
"""

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.golden import refused
from tests.levels import few
from tieredkv import LLM, SamplingParams
from tieredkv.engine.answer import Answer
from tieredkv.engine.engine_messages import Claim, RequestUsage
from tieredkv.errors import RequestError
from tieredkv.types import Tier

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
FIRST = SamplingParams(max_tokens=1, temperature=0.0)
SIZES: dict[str, Any] = {
    "device_size": "4MiB",
    "host_size": "4MiB",
    "disk_size": "64MiB",
    "restore": "load",
}
HOUR_S = 3600
SIZE = 16


def prompt(seed: int, num_tokens: int = 10 * SIZE + 3) -> list[int]:
    """Return random tokens of the demo model's vocabulary."""
    generator = random.Random(seed)
    return [generator.randrange(256) for _ in range(num_tokens)]


def serve(llm: LLM, tokens: list[int], **asked: Any) -> Answer:
    """Serve one prompt with fields of `EngineRequest`, and check every invariant."""
    [answer] = llm.serve([llm.make_request(tokens, asked.pop("params", FIRST), **asked)])
    llm.core.cache.check()
    return answer


def cached(llm: LLM, tokens: list[int], **asked: Any) -> int:
    """Serve one prompt; return how many of its tokens were cached."""
    return serve(llm, tokens, **asked).usage.cached_tokens


def ends_at(num_tokens: int, retention: str, pin_s: float = 0.0) -> list[Claim]:
    return [Claim(end_token=num_tokens, retention=retention, pin_s=pin_s)]


@pytest.fixture
def set_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that sets the clock of engine and store to seconds from now."""
    offset = tmp_path / "offset"
    offset.write_text("0")
    monkeypatch.setenv("TIEREDKV_TEST_CLOCK_OFFSET_FILE", str(offset))

    def set_clock(offset_s: float) -> None:
        offset.write_text(str(offset_s))
        time.sleep(0.05)

    return set_clock


@pytest.fixture
def llm(set_clock: object, tmp_path: Path) -> Iterator[LLM]:
    """Return the demo model over small tiers, with a disk."""
    with LLM("tiny-random", disk_dir=str(tmp_path / "store"), sweep_interval=0.2, **SIZES) as llm:
        yield llm


@pytest.fixture(scope="module")
def shared_llm() -> Iterator[LLM]:
    """Return a model without a disk; each test that uses it starts days after the one before."""
    with LLM("tiny-random", device_size="4MiB", host_size="4MiB") as llm:
        yield llm


@pytest.fixture
def pass_time(shared_llm: LLM) -> Callable[[float], None]:
    """Return a function that sets the shared model's clock to seconds from the test's start."""
    clock = shared_llm.core.parts.tiers.clock
    start = clock.now() + 48 * HOUR_S
    clock.advance_to(start)
    shared_llm.core.cache._expiry.sweep()
    assert shared_llm.core.parts.tiers.catalog.entries() == []
    return lambda moment: clock.advance_to(start + moment)


# --- the longest life: what is asked, when the prefix is used, whether it is still cached


@pytest.mark.parametrize(
    ("asked", "uses_at_s", "last_at_s"),
    [
        pytest.param({}, [], 600, id="nothing"),
        pytest.param({"retention": "24h"}, [], 24 * HOUR_S, id="24h"),
        pytest.param({"claims": ends_at(999, "in_memory", 1800)}, [], 1800, id="ttl 30m"),
        pytest.param({"claims": ends_at(999, "24h", 12 * HOUR_S)}, [], 24 * HOUR_S, id="ttl 12h"),
        pytest.param({"claims": ends_at(999, "5m", 300)}, [], 300, id="5m"),
        pytest.param({"claims": ends_at(999, "5m", 300)}, [290, 580], 880, id="5m refreshed"),
        pytest.param({"claims": ends_at(999, "1h", 3600)}, [], 3600, id="1h"),
        pytest.param({"claims": ends_at(999, "1h", 3600)}, [1800, 3500], 3600, id="1h at its cap"),
        pytest.param({"claims": ends_at(999, "in_memory", 9999)}, [], 3600, id="ttl at its cap"),
    ],
)
def test_a_prefix_lives_as_long_as_was_asked_to_the_seconds(
    shared_llm: LLM,
    pass_time: Callable[[float], None],
    asked: dict[str, Any],
    uses_at_s: list[float],
    last_at_s: float,
) -> None:
    tokens = {margin_s: prompt(100 + margin_s) for margin_s in (-20, 20)}
    for each in tokens.values():
        assert serve(shared_llm, each, **asked).usage.written_tokens == 160
    for moment in uses_at_s:
        pass_time(moment)
        for each in tokens.values():
            assert cached(shared_llm, each, **asked) == 160
    for margin_s, each in tokens.items():
        pass_time(last_at_s + margin_s)
        assert cached(shared_llm, each) == (160 if margin_s < 0 else 0)


def test_blocks_that_no_claim_covers_take_the_retention_of_the_request(
    shared_llm: LLM, pass_time: Callable[[float], None]
) -> None:
    claims = [
        Claim(end_token=2 * SIZE + 5, retention="24h"),
        Claim(end_token=4 * SIZE, retention="1h"),
        Claim(end_token=6 * SIZE, retention="5m"),
    ]
    for number, (moment, left) in enumerate(
        [(280, 10), (320, 8), (620, 4), (HOUR_S - 20, 4), (HOUR_S + 20, 2)]
    ):
        pass_time(number * 48 * HOUR_S)
        tokens = prompt(number)
        serve(shared_llm, tokens, retention="in_memory", claims=claims)
        pass_time(number * 48 * HOUR_S + moment)
        assert cached(shared_llm, tokens) == left * SIZE


@pytest.mark.parametrize("retention", few(["in_memory", "5m", "1h"], 2))
def test_a_policy_of_ram_never_reaches_the_disk(
    tmp_path: Path, set_clock: object, retention: str
) -> None:
    folder, tokens = str(tmp_path / "disk"), prompt(1)
    settings = {**SIZES, "disk_write": "write_behind"}
    with LLM("tiny-random", disk_dir=folder, retention="24h", **settings) as llm:
        claims = ends_at(2 * SIZE, "24h", 60) + ends_at(999, retention, 12 * HOUR_S)
        serve(llm, tokens, retention=retention, claims=claims)
        llm.demote("disk")
        disk: Any = llm.tier_stats()["disk"]
        assert disk["blocks"] == 2
    with LLM("tiny-random", disk_dir=folder, **SIZES) as llm:
        assert cached(llm, tokens) == 2 * SIZE


def test_pin_is_kept_over_a_restart(tmp_path: Path, set_clock: Callable[[float], None]) -> None:
    folder, tokens = str(tmp_path / "disk"), prompt(1)
    with LLM("tiny-random", disk_dir=folder, retention="24h", **SIZES) as llm:
        serve(llm, tokens, claims=ends_at(999, "24h", HOUR_S))
    with LLM("tiny-random", disk_dir=folder, retention="24h", **SIZES) as llm:
        assert cached(llm, tokens) == 160
        catalog = llm.core.parts.tiers.catalog
        assert len(catalog.pinned) == 10
        set_clock(HOUR_S + 60)
        assert cached(llm, tokens) == 160
        assert catalog.pinned == set()


def test_a_flood_evicts_what_is_not_pinned() -> None:
    with LLM("tiny-random", device_size="1MiB", host_size="1MiB") as llm:
        serve(llm, prompt(1), claims=ends_at(999, "in_memory", 1800))
        serve(llm, prompt(2))
        for seed in range(10, 18):
            serve(llm, prompt(seed, 200))
        assert cached(llm, prompt(1)) == 160
        assert cached(llm, prompt(2)) == 0


def test_an_unknown_policy_of_a_claim_is_refused(shared_llm: LLM, pass_time: object) -> None:
    with refused(RequestError):
        serve(shared_llm, prompt(1), claims=ends_at(999, "7d"))
    assert not shared_llm.core.has_work


# --- how much is cached


def test_nothing_is_read_or_written_beyond_the_cacheable_tokens(
    shared_llm: LLM, pass_time: object
) -> None:
    tokens, params = prompt(1), SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    for _ in range(2):
        usage = serve(shared_llm, tokens, cacheable_tokens=0, params=params).usage
        assert (usage.cached_tokens, usage.written_tokens) == (0, 0)
    assert shared_llm.core.parts.tiers.catalog.entries() == []
    cold = serve(shared_llm, tokens, cacheable_tokens=5 * SIZE + 7, params=params)
    assert cold.usage.written_tokens == 5 * SIZE
    assert len(shared_llm.core.parts.tiers.catalog.entries()) == 5, "nor is the answer"
    warm = serve(shared_llm, tokens, params=GREEDY)
    assert (warm.usage.cached_tokens, warm.usage.written_tokens) == (5 * SIZE, 5 * SIZE)
    assert warm.token_ids == cold.token_ids[:6]
    again = serve(shared_llm, tokens, cacheable_tokens=3 * SIZE, params=GREEDY)
    assert (again.usage.cached_tokens, again.usage.written_tokens) == (3 * SIZE, 0)
    assert again.token_ids == warm.token_ids


def test_the_answer_may_be_cached_in_part(shared_llm: LLM, pass_time: object) -> None:
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    serve(shared_llm, prompt(1, 2 * SIZE), cacheable_tokens=4 * SIZE, params=params)
    assert len(shared_llm.core.parts.tiers.catalog.entries()) == 4


def test_a_cache_key_is_a_namespace_where_the_operator_says_so() -> None:
    for isolate_by, found in (("salt", 160), ("prompt_cache_key", 0)):
        with LLM("tiny-random", isolate_by=isolate_by, device_size="1MiB", host_size="1MiB") as llm:
            serve(llm, prompt(1), prompt_cache_key="a")
            assert cached(llm, prompt(1), prompt_cache_key="b") == found
            assert cached(llm, prompt(1), prompt_cache_key="a") == 160


# --- where a hit may end


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_a_hit_ends_at_an_allowed_place(llm: LLM, tier: str) -> None:
    tokens = prompt(1)
    cold = serve(llm, tokens, retention="24h", params=GREEDY)
    for ends, found in (([], 0), ([40, 75], 4), ([160, 161], 10), ([31, 500], 1), (None, 10)):
        if tier != "device":
            assert llm.demote(tier)
        warm = serve(llm, tokens, read_ends=ends, retention="24h", params=GREEDY)
        assert warm.usage.cached_tokens_by_tier[Tier(tier)] == found * SIZE
        assert warm.usage.written_tokens == (10 - found) * SIZE
        assert warm.token_ids == cold.token_ids
    assert len(llm.core.parts.tiers.catalog.entries()) == 10
    assert llm.core.parts.tiers.device.num_used == 0


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(st.integers(1, 6 * SIZE), min_size=2, max_size=3),
    cacheable=st.none() | st.integers(0, 6 * SIZE),
    ends=st.none() | st.lists(st.integers(0, 6 * SIZE), max_size=3),
    is_demoted=st.booleans(),
    seed=st.integers(0, 3),
)
def test_every_token_of_a_prompt_is_counted_once(
    shared_llm: LLM,
    lengths: list[int],
    cacheable: int | None,
    ends: list[int] | None,
    is_demoted: bool,
    seed: int,
) -> None:
    for length in lengths:
        tokens = prompt(seed, length)
        asked = {"cacheable_tokens": cacheable, "read_ends": ends}
        answer = serve(shared_llm, tokens, **asked)
        check_usage(answer.usage, length if cacheable is None else min(length, cacheable))
        if is_demoted:
            shared_llm.demote("host")


def check_usage(usage: RequestUsage, num_cacheable: int) -> None:
    counted = usage.cached_tokens + usage.written_tokens + usage.recomputed_tokens
    assert counted == num_cacheable // SIZE * SIZE
    assert min(usage.cached_tokens, usage.written_tokens, usage.recomputed_tokens) >= 0
    assert usage.recomputed_tokens <= 1
