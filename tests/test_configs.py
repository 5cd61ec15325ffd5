"""Every file in configs/ loads and has the settings that its name promises."""

from pathlib import Path

import pytest

from tieredkv.config import Settings, load_settings
from tieredkv.retention import DEFAULT_POLICIES
from tieredkv.types import Tier

CONFIGS = Path(__file__).parent.parent / "configs"


def load(name: str) -> Settings:
    settings = load_settings(environ={}, config_path=CONFIGS / name).settings
    settings.check_server()
    return settings


def test_these_are_all_the_files_there_are() -> None:
    assert {path.name for path in CONFIGS.iterdir()} == {
        "24h.toml",
        "agents.toml",
        "compatible.toml",
        "cpu-demo.toml",
        "in_memory.toml",
    }


@pytest.mark.parametrize("path", sorted(CONFIGS.iterdir()), ids=lambda path: path.name)
def test_every_file_loads_and_keeps_the_contract_of_the_default_policies(path: Path) -> None:
    policies = load(path.name).policies
    longer = ("5m", "1h") if path.name == "agents.toml" else ()
    default = [policy for policy in DEFAULT_POLICIES if policy.name not in longer]
    assert [policy for policy in policies if policy.name not in longer] == default


def test_agents_keep_what_they_mark_for_a_day_too() -> None:
    settings = load("agents.toml")
    assert settings.disk_write == "write_behind"
    for policy in settings.policies:
        if policy.name != "in_memory":
            assert (policy.idle_s, policy.absolute_s) == (86400, 86400)
            assert policy.tiers == set(Tier)


def test_in_memory_keeps_prompts_in_ram_for_an_hour_at_most_and_has_no_disk() -> None:
    settings = load("in_memory.toml")
    assert settings.default_retention == "in_memory"
    assert settings.disk_dir is None
    assert settings.host_size == 16 << 30
    policy = settings.retention_policies().get(settings.default_retention)
    assert (policy.idle_s, policy.absolute_s) == (600, 3600)
    assert Tier.DISK not in policy.tiers


def test_24h_keeps_prompts_on_disk_for_a_day() -> None:
    settings = load("24h.toml")
    assert settings.default_retention == "24h"
    assert settings.disk_dir == "/var/lib/tieredkv"
    assert (settings.host_size, settings.disk_size) == (32 << 30, 200 << 30)
    assert settings.disk_write == "on_evict"
    policy = settings.retention_policies().get(settings.default_retention)
    assert (policy.idle_s, policy.absolute_s) == (86400, 86400)
    assert policy.tiers == set(Tier)


def test_the_compatible_one_caches_as_the_apis_documents_have_it() -> None:
    settings = load("compatible.toml")
    assert (settings.cache_lookback, settings.anthropic_implicit) == (20, "off")
    assert (settings.min_cache_tokens, settings.default_retention) == (1024, "in_memory")


def test_the_demo_walks_its_prompts_through_small_tiers_without_a_gpu() -> None:
    settings = load("cpu-demo.toml")
    assert (settings.model, settings.device) == ("tiny-random", "cpu")
    assert (settings.device_size, settings.host_size, settings.disk_size) == (
        32 << 20,
        64 << 20,
        2 << 30,
    )
    assert settings.disk_dir is not None
    assert (settings.default_retention, settings.restore) == ("24h", "load")
