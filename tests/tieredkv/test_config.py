import os
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

from tieredkv.config import _OPTIONS, LoadedSettings, Settings, load_settings
from tieredkv.errors import ConfigError
from tieredkv.retention import RetentionPolicies
from tieredkv.types import Tier

CONFIGS = Path(__file__).parents[2] / "configs"


def load(
    toml: str | None = None,
    tmp_path: Path | None = None,
    environ: Mapping[str, str] | None = None,
    **arguments: object,
) -> LoadedSettings:
    path = None
    if toml is not None:
        assert tmp_path is not None
        path = tmp_path / "f.toml"
        path.write_text(toml)
    return load_settings(
        arguments=arguments,
        environ=environ or {},
        config_path=None if path is None else str(path),
        require_model=False,
    )


def test_every_field_has_an_option_and_a_default_that_is_allowed() -> None:
    assert [field.name for field in fields(Settings)] == list(_OPTIONS)
    settings = load().settings
    assert settings == Settings()
    assert settings.retention == RetentionPolicies.default()


def test_an_argument_wins_over_the_environment_over_the_file_over_the_default(
    tmp_path: Path,
) -> None:
    toml = '[cache]\nblock_size = 32\nhost_size = "3GiB"\ndisk_size = "5GiB"\n'
    environ = {"TIEREDKV_BLOCK_SIZE": "64", "TIEREDKV_HOST_SIZE": "2GiB", "HOME": "/"}
    loaded = load(toml, tmp_path, environ, block_size=128, device_size=None, api_keys=())
    settings, sources = loaded.settings, loaded.sources
    assert (settings.block_size, sources["block_size"]) == (128, "argument")
    assert settings.host_size == 2 << 30
    assert sources["host_size"] == "environment TIEREDKV_HOST_SIZE"
    assert settings.disk_size == 5 << 30
    assert sources["disk_size"] == f"file {tmp_path / 'f.toml'}"
    assert (settings.device_size, sources["device_size"]) == (None, "default")
    assert sources["api_keys"] == "default"


def test_sizes_and_durations_are_read_wherever_they_come_from(tmp_path: Path) -> None:
    assert load(device_size="64MiB").settings.device_size == 64 << 20
    assert load(environ={"TIEREDKV_LOAD_TIMEOUT": "500ms"}).settings.load_timeout == 0.5
    assert load("[cache]\ndrain_timeout = 0\n", tmp_path).settings.drain_timeout == 0.0
    assert Settings(host_size="1GB").host_size == 10**9  # type: ignore[arg-type]


def test_paths_may_be_path_objects_and_start_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert load(disk_dir=tmp_path).settings.disk_dir == str(tmp_path)
    assert load(disk_dir="~/kv").settings.disk_dir == "/home/someone/kv"
    assert load(model=tmp_path).settings.model == str(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("block_size", 24, "power of two from 16 to 256"),
        ("block_size", 8, "power of two from 16 to 256"),
        ("block_size", 512, "power of two from 16 to 256"),
        ("block_size", True, "power of two"),
        ("block_size", 16.0, "power of two"),
        ("host_size", 0, "a size above 0"),
        ("host_size", "4G", "a size above 0"),
        ("disk_size", -1, "a size above 0"),
        ("gpu_memory_utilization", 0, "above 0, up to 1"),
        ("gpu_memory_utilization", 1.01, "above 0, up to 1"),
        ("gpu_memory_utilization", float("nan"), "above 0, up to 1"),
        ("load_timeout", 0, "above 0"),
        ("drain_timeout", "-1s", "a duration"),
        ("sweep_interval", "soon", "a duration above 0"),
        ("port", 65536, "from 0 to 65535"),
        ("port", "http", "from 0 to 65535"),
        ("seed", -1, "from 0"),
        ("max_num_seqs", 0, "from 1"),
        ("max_model_len", 0, "from 1"),
        ("device", "tpu", "`cuda:N`"),
        ("dtype", "fp16", "`float16`"),
        ("restore", "maybe", "`auto`, `load`, `compute`"),
        ("isolate_by", [], "`prompt_cache_key`"),
        ("host", " ", "not empty"),
        ("host", None, "not empty"),
        ("disk_dir", "a\0b", "path of a folder"),
        ("served_model_name", 7, "not empty"),
        ("default_retention", "48h", "`in_memory`, `24h`"),
        ("retention", "24h", "policy"),
    ],
)
def test_a_value_out_of_range_names_field_value_and_what_is_allowed(
    name: str, value: Any, allowed: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"`{name}` is {value!r}; allowed: ")
    assert allowed in message


def test_a_near_choice_is_suggested() -> None:
    with pytest.raises(ConfigError, match=r"did you mean `float16`\?"):
        Settings(dtype="float-16")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"did you mean `in_memory`\?"):
        Settings(default_retention="inmemory")


def test_the_hyphenated_retention_is_stored_in_its_canonical_spelling() -> None:
    assert Settings(default_retention="in-memory").default_retention == "in_memory"


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[cache]\nblok_size = 16", "unknown key `cache.blok_size`"),
        ("[cache]\nblok_size = 16", "did you mean `block_size`?"),
        ("[server]\nblock_size = 16", "did you mean `cache.block_size`?"),
        ("block_size = 16", "did you mean `cache.block_size`?"),
        ("[cahce]\nblock_size = 16", "did you mean `cache`?"),
        ("cache = 16", "allowed: a table `[cache]`"),
        ("[cache]\nblock_size = 17", "`cache.block_size` in `"),
        ("[cache]\nclock_offset_file = 'x'", "unknown key"),
        ("[retention]\nin_memory = 3", "allowed: a table `[retention.in_memory]`"),
        ("[retention.24h]\nidel = '1h'", "did you mean `idle`?"),
        ("[retention.24h]\nidle = 'long'", "`retention.24h.idle`"),
        ("[retention.24h]\nidle = 0", "`retention.24h.idle`"),
        ("[retention.24h]\ntiers = ['device', 'tape']", "`retention.24h.tiers`"),
        ("[retention.24h]\ntiers = ['disk']", "`retention.24h.tiers`"),
        ("[retention.24h]\ntiers = 'disk'", "`retention.24h.tiers`"),
        ("[retention.week]\nidle = '7d'", "`retention.week.absolute` is missing"),
        ("[cache\n", "is not TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_the_way_out(tmp_path: Path, toml: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(toml, tmp_path)
    assert message in str(caught.value)
    assert "f.toml" in str(caught.value) or "retention.24h" in message


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b"# caf\xe9")
    for name in ("missing.toml", ".", "latin.toml"):
        with pytest.raises(ConfigError, match=f"`{tmp_path / name}`".replace(".", r"\.")):
            load_settings(arguments={}, environ={}, config_path=str(tmp_path / name))


def test_policies_of_a_file_are_laid_over_the_default_ones(tmp_path: Path) -> None:
    toml = (
        "[retention.in_memory]\nidle = '20s'\n"
        "[retention.week]\nidle = '7d'\nabsolute = '7d'\ntiers = ['device', 'host', 'disk']\n"
        "[cache]\ndefault_retention = 'week'\n"
    )
    loaded = load(toml, tmp_path)
    policies = loaded.settings.retention
    assert policies.names == ("in_memory", "24h", "week")
    assert (policies.get("in_memory").idle_s, policies.get("in_memory").absolute_s) == (20, 3600)
    assert policies.get("week").tiers == frozenset(Tier)
    assert policies.get("24h") == RetentionPolicies.default().get("24h")
    assert loaded.sources["retention"].startswith("file ")


def test_an_unknown_argument_is_refused_with_the_nearest_known() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting `hostsize`; did you mean `host_size`"):
        load(hostsize="1GiB")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TIEREDKV_BLOCK_SIZE", "17"),
        ("TIEREDKV_BLOCK_SIZE", ""),
        ("TIEREDKV_BLOK_SIZE", "16"),
        ("TIEREDKV_DEFAULT_RETENTION", "48h"),
        ("TIEREDKV_CLOCK_OFFSET_FILE", "/tmp/x"),
        ("TIEREDKV_RETENTION", "24h"),
    ],
)
def test_a_malformed_variable_is_named(variable: str, value: str) -> None:
    with pytest.raises(ConfigError, match=variable):
        load(environ={variable: value})


def test_variables_that_kubernetes_sets_are_explained() -> None:
    environ = {"TIEREDKV_SERVICE_HOST": "10.0.0.1", "TIEREDKV_PORT": "tcp://10.0.0.1:8000"}
    with pytest.raises(ConfigError, match=r"TIEREDKV_PORT(.|\n)*enableServiceLinks"):
        load(environ=environ)


def test_the_clock_offset_comes_from_its_variable_only() -> None:
    loaded = load(environ={"TIEREDKV_TEST_CLOCK_OFFSET_FILE": "/tmp/offset"})
    assert loaded.settings.clock_offset_file == "/tmp/offset"
    with pytest.raises(ConfigError, match="clock_offset_file"):
        load(clock_offset_file="/tmp/offset")


def test_keys_are_never_shown(tmp_path: Path) -> None:
    loaded = load("[server]\napi_keys = ['hunter2', 'swordfish']", tmp_path)
    assert loaded.settings.api_keys == ("hunter2", "swordfish")
    shown = repr(loaded) + loaded.to_toml() + repr(loaded.describe())
    with pytest.raises(ConfigError) as caught:
        load("[server]\napi_keys = ['hunter2', 7]", tmp_path)
    for text in (shown, str(caught.value)):
        assert "hunter2" not in text
        assert "swordfish" not in text
    assert load(environ={"TIEREDKV_API_KEYS": "a, b"}).settings.api_keys == ("a", "b")


def test_what_is_shown_as_toml_is_read_back(tmp_path: Path) -> None:
    loaded = load(
        model='odd "name" \\ \x7f \n é',
        disk_dir="/d",
        device_size=1000,
        load_timeout=0.1,
        drain_timeout=0,
        sweep_interval="90s",
        max_model_len=5,
        gpu_memory_utilization=0.5,
    )
    again = load(loaded.to_toml(), tmp_path)
    assert again.settings == loaded.settings
    assert "load_timeout = 0.1  # argument\n" in loaded.to_toml()
    assert 'host_size = "1GiB"  # default\n' in loaded.to_toml()
    assert "# served_model_name = (unset)  # default\n" in loaded.to_toml()


def test_every_setting_is_described_with_its_source() -> None:
    lines = load(environ={"TIEREDKV_PORT": "9000"}).describe()
    port = next(line for line in lines if line.name == "port")
    assert port[:4] == ("port", "server", "9000", "environment TIEREDKV_PORT")
    assert {line.name for line in lines} >= set(_OPTIONS) - {"retention"}
    assert ("absolute", "retention.24h", '"24h"') in [line[:3] for line in lines]


def test_a_model_is_required_unless_told() -> None:
    with pytest.raises(ConfigError, match="`model` is not set"):
        load_settings(arguments={}, environ={}, config_path=None)
    assert load_settings(arguments={"model": "m"}, environ={}).settings.model == "m"


def test_a_server_refuses_a_weak_hash_where_tenants_are_apart() -> None:
    with pytest.raises(ConfigError, match="collision"):
        Settings(hash_algo="xxh3_128").check_server()
    Settings(hash_algo="xxh3_128", isolate_by="none").check_server()
    Settings().check_server()


def test_settings_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        Settings().port = 1  # type: ignore[misc]


def test_the_environment_of_the_process_is_read_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in os.environ if name.startswith("TIEREDKV_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TIEREDKV_PORT", "9000")
    assert load_settings(arguments={}, require_model=False).settings.port == 9000


def load_shipped(name: str, require_model: bool = False) -> Settings:
    return load_settings(
        arguments={},
        environ={},
        config_path=str(CONFIGS / name),
        require_model=require_model,
    ).settings


def test_the_shipped_files_are_the_three_that_are_tested() -> None:
    assert sorted(path.name for path in CONFIGS.iterdir()) == [
        "24h.toml",
        "cpu-demo.toml",
        "in_memory.toml",
    ]


def test_in_memory_toml_has_no_disk() -> None:
    settings = load_shipped("in_memory.toml")
    assert settings.disk_dir is None
    assert settings.default_retention == "in_memory"
    assert settings.host_size == 32 << 30
    assert settings.retention == RetentionPolicies.default()


def test_24h_toml_keeps_prompts_on_disk_for_a_day() -> None:
    settings = load_shipped("24h.toml")
    assert settings.disk_dir is not None
    assert settings.default_retention == "24h"
    assert settings.disk_size == 200 << 30
    assert settings.retention == RetentionPolicies.default()


def test_cpu_demo_toml_is_complete_and_small() -> None:
    settings = load_shipped("cpu-demo.toml", require_model=True)
    assert (settings.model, settings.device, settings.dtype) == ("tiny-random", "cpu", "float32")
    assert (settings.device_size, settings.host_size) == (32 << 20, 64 << 20)
    assert settings.disk_size == 1 << 30
    assert settings.restore == "load"
