"""What an engine is refused for is found before its parts take long to make."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.storage.blocks import make_record, open_store, put
from tieredkv.config import Settings, Switch
from tieredkv.engine import disk_tier, parts
from tieredkv.engine.store_options import store_options
from tieredkv.errors import ConfigError, StoreBusyError
from tieredkv.retention import DEFAULT_POLICIES, RetentionPolicy
from tieredkv.storage.folder.folder import StoreFolder
from tieredkv.types import KVSpec, LayerKV, Tier, ignore_progress


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Callable[[Settings], None]:
    """Return what builds the parts of an engine, and fails once it takes long or much."""

    def fail(*_: object, **__: object) -> None:
        pytest.fail("this is too early")

    for name in ("model_of", "HostArena"):
        monkeypatch.setattr(parts, name, fail)
    monkeypatch.setattr(disk_tier, "StoreClient", fail)

    def build(settings: Settings) -> None:
        with contextlib.ExitStack() as stack:
            parts.build_parts(settings, stack, progress=ignore_progress, wake=lambda: None)

    return build


def test_a_store_in_use_is_refused_before_a_model_is_found_or_memory_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: Callable[[Settings], None]
) -> None:
    monkeypatch.setattr(disk_tier, "BUSY_PATIENCE_S", 0.0)
    path = str(tmp_path / "kv")
    claimed = StoreFolder.claim(path, create=True)
    with pytest.raises(StoreBusyError) as error:
        build(Settings(model="tiny-random", disk_dir=path))
    assert path in str(error.value)
    claimed.release()


@pytest.mark.parametrize("encryption", ["on", "off"])
def test_a_setting_that_disagrees_with_the_store_is_refused_before_memory_is_taken(
    tmp_path: Path, build: Callable[[Settings], None], encryption: Switch
) -> None:
    other: Switch = "off" if encryption == "on" else "on"
    keys = str(tmp_path / "keys")
    with open_store(tmp_path / "kv", encryption=encryption, key_dir=keys) as store:
        put(store, make_record())
    settings = Settings(
        model="tiny-random", disk_dir=str(tmp_path / "kv"), disk_key_dir=keys, disk_encryption=other
    )
    with pytest.raises(ConfigError, match="disk_encryption"):
        build(settings)


def test_a_folder_of_keys_that_cannot_be_made_is_refused_before_memory_is_taken(
    tmp_path: Path, build: Callable[[Settings], None]
) -> None:
    (tmp_path / "file").touch()
    settings = Settings(
        model="tiny-random",
        disk_dir=str(tmp_path / "kv"),
        disk_key_dir=str(tmp_path / "file" / "keys"),
    )
    with pytest.raises(ConfigError, match="disk_key_dir"):
        build(settings)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_the_longest_policy_with_a_disk_says_when_a_key_dies() -> None:
    day_s, in_ram = 86_400.0, frozenset({Tier.DEVICE, Tier.HOST})
    week = RetentionPolicy(name="week", idle_s=day_s, absolute_s=7 * day_s, tiers=frozenset(Tier))
    month = RetentionPolicy(name="month", idle_s=day_s, absolute_s=30 * day_s, tiers=in_ram)
    policies = (*DEFAULT_POLICIES, week, month)
    options = store_options("/kv", Settings(policies=policies))
    assert options.longest_s == 7 * day_s


@pytest.mark.parametrize("window", [17, 128, 1024])
@pytest.mark.parametrize("num_windows", [0, 1, 11])
@pytest.mark.parametrize(("num_tokens", "chunk"), [(100, 64), (33_000, 2048), (8000, 16_384)])
def test_vram_that_is_asked_for_has_room_for_chain_and_chunk(
    window: int, num_windows: int, num_tokens: int, chunk: int
) -> None:
    layers = [LayerKV(2, 16), *[LayerKV(2, 16, window)] * num_windows]
    spec = KVSpec(layers=layers, dtype="bfloat16", block_size=16)
    num_bytes = parts.vram_for(spec, num_tokens, chunk)
    most_chunk, num_blocks = parts.share_blocks(spec, num_bytes // spec.block_bytes)
    assert most_chunk >= chunk
    assert num_blocks * spec.block_size >= num_tokens
