"""A store that a tier could not serve ends vLLM where it builds its configuration."""

import multiprocessing
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.integrations.apps import connectors
from tests.integrations.engines import HAS_VLLM
from tests.storage.blocks import make_record, open_store, put
from tieredkv.clock import Clock
from tieredkv.errors import ConfigError, MissingKeyError
from tieredkv.integrations.vllm_plugin import register


class Place:
    """A folder of stores, and what vLLM is told of the tier."""

    def __init__(self, path: Path, engine_args: type[Any]) -> None:
        self.folder, self.keys, self._engine_args = path / "kv", path / "keys", engine_args

    def make_store(self, encryption: str, folder: str = "") -> None:
        options: dict[str, Any] = {"encryption": encryption, "key_dir": str(self.keys)}
        with open_store(self.folder / folder, Clock(), **options) as store:
            put(store, make_record())

    def build(self, encryption: str, *, ranks: int = 1, **more: Any) -> Any:
        """Have vLLM build its configuration."""
        tier = {"type": "TieredKVTier", "disk_dir": str(self.folder), "disk_size": "1GiB"}
        tier |= {"disk_encryption": encryption, "disk_key_dir": str(self.keys)}
        return self._engine_args(tier | more, ranks).create_engine_config("usage")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    class EngineArgs:
        """What builds vLLM's configuration; a stand-in, since the real one wants a model."""

        def __init__(self, tier: dict[str, Any], ranks: int) -> None:
            self.tier, self.ranks = tier, ranks

        def create_engine_config(self, usage: str) -> Any:
            assert usage == "usage"
            transfer = SimpleNamespace(**connectors(self.tier))
            parallel = SimpleNamespace(data_parallel_size=self.ranks)
            return SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel)

    building = ModuleType("vllm.engine.arg_utils")
    vars(building)["EngineArgs"] = EngineArgs
    monkeypatch.setitem(sys.modules, building.__name__, building)
    for _ in range(2):  # as vLLM calls it more than once
        register()
    return Place(tmp_path, EngineArgs)


@pytest.mark.parametrize(("stored", "wanted"), [("on", "off"), ("off", "on")])
def test_a_setting_that_disagrees_with_the_store_ends_vllm_before_it_loads_weights(
    place: Place, stored: str, wanted: str
) -> None:
    place.make_store(stored)
    with pytest.raises(ConfigError, match="disk_encryption"):
        place.build(wanted)


@pytest.mark.parametrize("encryption", ["on", "off"])
def test_a_store_that_is_as_its_setting_says_is_left_as_it_is(
    place: Place, encryption: str
) -> None:
    assert place.build(encryption).parallel_config.data_parallel_size == 1
    assert not place.folder.exists() and not place.keys.exists()
    place.make_store(encryption)
    before = {path: path.stat().st_mtime_ns for path in place.folder.parent.rglob("*")}
    place.build(encryption)
    assert {path: path.stat().st_mtime_ns for path in place.folder.parent.rglob("*")} == before


def test_keys_that_are_gone_and_arguments_that_make_no_sense_end_vllm_too(place: Place) -> None:
    place.make_store("on")
    for key in place.keys.iterdir():
        key.unlink()
    with pytest.raises(MissingKeyError):
        place.build("on")
    with pytest.raises(ConfigError, match="disk_size"):
        place.build("on", disk_size="much")


def test_the_folder_of_each_rank_is_checked_that_is_on_this_machine(place: Place) -> None:
    place.make_store("off", "dp1")
    place.build("off", ranks=3)
    with pytest.raises(ConfigError, match="dp1"):
        place.build("on", ranks=3)


def test_a_store_in_use_is_left_to_the_tier_which_waits(place: Place) -> None:
    options: dict[str, Any] = {"encryption": "off", "key_dir": str(place.keys)}
    with open_store(place.folder, Clock(), **options):
        place.build("on")


def test_an_api_server_of_a_running_engine_checks_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.make_store("on")
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: "the engine's")
    place.build("off")


@pytest.mark.skipif(not HAS_VLLM, reason="there is no vLLM")
def test_what_vllm_itself_builds_its_configuration_by_checks_tiers() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

    register()
    for each in (EngineArgs, AsyncEngineArgs):
        assert each.create_engine_config.checks_tiers
