"""Every reason of a miss, produced in a real engine over real tiers."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_claims import serve
from tests.e2e.test_promises import flip_everywhere
from tests.levels import few
from tests.prompts import prompt
from tests.serving import ask_store
from tieredkv import LLM
from tieredkv.engine.answer import Answer
from tieredkv.retention import DEFAULT_POLICIES, RetentionPolicy
from tieredkv.types import Tier

SMALL: dict[str, Any] = {"device_size": "1MiB", "host_size": "1MiB", "restore": "load"}
DAY_S = 86_400


def missed(answer: Answer) -> tuple[str | None, int]:
    return answer.usage.miss_reason, answer.usage.miss_token


def test_a_new_prompt_was_never_seen_and_a_hit_has_no_reason() -> None:
    with LLM("tiny-random", **SMALL) as llm:
        tokens = prompt(1, 100)
        assert missed(serve(llm, tokens)) == ("never_seen", 0)
        assert missed(serve(llm, tokens)) == (None, 96)
        assert missed(serve(llm, tokens[:50] + prompt(2, 100))) == ("never_seen", 48)
        assert missed(serve(llm, prompt(3, 15))) == (None, 0)
        assert missed(serve(llm, prompt(4, 100), cacheable_tokens=0)) == (None, 0)


def test_the_lookback_is_the_reason_only_where_it_prevents_a_hit() -> None:
    with LLM("tiny-random", **SMALL) as llm:
        tokens = prompt(1, 100)
        serve(llm, tokens)
        assert missed(serve(llm, tokens, read_ends=[])) == ("behind_lookback", 0)
        other = tokens[:40] + prompt(2, 100)
        assert missed(serve(llm, other, read_ends=[64, 140])) == ("behind_lookback", 0)
        other = tokens[:20] + prompt(3, 80)
        assert missed(serve(llm, other, read_ends=[0, 50])) == ("never_seen", 0)
        assert missed(serve(llm, tokens, read_ends=[0, 40])) == ("behind_lookback", 32)


def test_a_prompt_past_its_life_in_memory_has_expired() -> None:
    with LLM("tiny-random", **SMALL) as llm:
        serve(llm, prompt(1, 100))
        llm.core.parts.tiers.clock.advance_to(llm.core.parts.tiers.clock.now() + 601)
        assert missed(serve(llm, prompt(1, 100))) == ("expired", 0)
        assert missed(serve(llm, prompt(1, 100))) == (None, 96)


def test_an_evicted_prompt_names_the_tier_that_it_left_last() -> None:
    with LLM("tiny-random", **SMALL) as llm:
        assert llm.demote(Tier.HOST)
        serve(llm, prompt(1, 100))
        for seed in range(2, 8):
            serve(llm, prompt(seed, 400))
        assert missed(serve(llm, prompt(1, 100))) == ("evicted_host", 0)


def test_a_prompt_kept_in_vram_only_was_evicted_from_vram() -> None:
    life: dict[str, Any] = {"idle_s": 3600.0, "absolute_s": 3600.0}
    policies = (
        *DEFAULT_POLICIES,
        RetentionPolicy(name="vram", tiers=frozenset({Tier.DEVICE}), **life),
    )
    with LLM("tiny-random", policies=policies, retention="vram", **SMALL) as llm:
        for seed in range(1, 5):
            serve(llm, prompt(seed, 400))
        assert missed(serve(llm, prompt(1, 400))) == ("evicted_device", 0)


@pytest.mark.parametrize("any_tier", few(["disk", "folder"]), indirect=True)
@pytest.mark.usefixtures("any_tier")
def test_eviction_and_expiry_on_disk_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offset = tmp_path / "offset"
    offset.write_text("0")
    monkeypatch.setenv("TIEREDKV_TEST_CLOCK_OFFSET_FILE", str(offset))
    store: dict[str, Any] = {"disk_dir": str(tmp_path / "store"), "disk_size": "4MiB"}
    with LLM("tiny-random", retention="24h", **store, **SMALL) as llm:
        for seed in range(1, 10):
            serve(llm, prompt(seed, 400))
            assert llm.demote("disk")
        assert missed(serve(llm, prompt(1, 400)))[0] == "evicted_disk"
        assert missed(serve(llm, prompt(9, 400))) == (None, 400)
        assert llm.demote("disk")
        offset.write_text(str(DAY_S + 60))
        time.sleep(0.05)
        assert missed(serve(llm, prompt(9, 400))) == ("expired", 0)


@pytest.mark.parametrize("any_tier", few(["disk", "folder"]), indirect=True)
@pytest.mark.usefixtures("any_tier")
def test_flipped_bytes_on_disk_are_corrupt(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with LLM("tiny-random", retention="24h", disk_dir=str(store), **SMALL) as llm:
        serve(llm, prompt(1, 100))
        assert llm.demote("disk")
        flip_everywhere(store, 64, seed=1)
        assert missed(serve(llm, prompt(1, 100))) == ("corrupt", 0)


@pytest.mark.parametrize("any_tier", few(["disk", "folder"]), indirect=True)
@pytest.mark.usefixtures("any_tier")
def test_a_load_timeout_and_loads_that_are_off_have_their_own_reasons(tmp_path: Path) -> None:
    folder: dict[str, Any] = {"retention": "24h", "disk_dir": str(tmp_path / "store")}
    with LLM("tiny-random", **folder, **SMALL, load_timeout=1e-9) as llm:
        serve(llm, prompt(1, 100))
        assert llm.demote("disk")
        assert missed(serve(llm, prompt(1, 100))) == ("load_timeout", 0)
    with LLM("tiny-random", **{**SMALL, "restore": "compute"}) as llm:
        serve(llm, prompt(1, 100))
        assert llm.demote("host")
        assert missed(serve(llm, prompt(1, 100))) == ("loads_off", 0)


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_a_prompt_that_an_operator_evicted_says_so(tmp_path: Path, tier: Tier) -> None:
    store = tmp_path / "store"
    with LLM("tiny-random", retention="24h", disk_dir=str(store), **SMALL) as llm:
        serve(llm, prompt(1, 100))
        assert llm.demote(tier)
        with ThreadPoolExecutor() as pool:
            evicting = pool.submit(ask_store, store, "evict", "--all", "-y")
            while not evicting.done():
                llm.core.step()
                llm.core.wait(0.05)
        assert evicting.result()["evicted_blocks"] or tier is Tier.HOST
        assert missed(serve(llm, prompt(1, 100))) == ("admin", 0)
