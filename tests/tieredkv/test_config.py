"""Settings: their sources and precedence, how values are read, and what is refused."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.golden import refused
from tieredkv.config import LoadedSettings, Settings, load_settings
from tieredkv.errors import ConfigError
from tieredkv.retention import DEFAULT_POLICIES, IN_MEMORY, TWENTY_FOUR_HOURS, RetentionPolicy
from tieredkv.types import Tier

WriteToml = Callable[[str | bytes], Path]
Load = Callable[[str | bytes], LoadedSettings]

MONTH = RetentionPolicy(name="30d", idle_s=86400, absolute_s=30 * 86400, tiers=frozenset(Tier))


@pytest.fixture
def write_toml(tmp_path: Path) -> WriteToml:
    def write(text: str | bytes) -> Path:
        path = tmp_path / "settings.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@pytest.fixture
def load_toml(write_toml: WriteToml) -> Load:
    return lambda text: load_settings(config_path=write_toml(text), environ={})


def from_arguments(**arguments: object) -> Settings:
    return load_settings(arguments=arguments, environ={}).settings


def from_environment(**variables: str) -> Settings:
    return load_settings(environ=variables).settings


# Precedence and sources


def test_nothing_given_is_all_defaults() -> None:
    settings, sources = load_settings(environ={})
    assert settings == Settings()
    assert set(sources.values()) == {"default"}
    assert (settings.block_size, settings.hash_algo, settings.isolate_by) == (
        None,
        "sha256",
        "salt",
    )
    assert (settings.host_size, settings.disk_size) == (1 << 30, 20 << 30)
    assert (settings.default_retention, settings.restore) == ("in_memory", "auto")
    assert (settings.disk_dir, settings.disk_write, settings.disk_sync) == (
        None,
        "on_evict",
        "commit",
    )
    assert settings.policies == DEFAULT_POLICIES


def test_an_argument_beats_the_environment_which_beats_the_file(write_toml: WriteToml) -> None:
    path = write_toml(
        "[server]\nport = 1\nhost = 'file'\n[scheduler]\nmax_num_seqs = 1\n[cache]\nblock_size = 32"
    )
    settings, sources = load_settings(
        arguments={"port": 3},
        environ={"TIEREDKV_PORT": "2", "TIEREDKV_HOST": "environment"},
        config_path=path,
    )
    assert (settings.port, sources["port"]) == (3, "argument")
    assert (settings.host, sources["host"]) == ("environment", "environment TIEREDKV_HOST")
    assert (settings.max_num_seqs, sources["max_num_seqs"]) == (1, f"file {path}")
    assert (settings.block_size, sources["block_size"]) == (32, f"file {path}")
    assert (settings.seed, sources["seed"]) == (0, "default")


def test_an_argument_of_none_counts_as_not_given() -> None:
    settings, sources = load_settings(arguments={"port": None}, environ={"TIEREDKV_PORT": "2"})
    assert (settings.port, sources["port"]) == (2, "environment TIEREDKV_PORT")


def test_false_and_zero_count_as_given() -> None:
    settings, sources = load_settings(
        arguments={"drain_timeout": 0, "seed": 0}, environ={"TIEREDKV_SEED": "7"}
    )
    assert (settings.drain_timeout, settings.seed, sources["seed"]) == (0.0, 0, "argument")


def test_the_process_environment_is_read_if_none_is_handed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TIEREDKV_PORT", "4321")
    assert load_settings().settings.port == 4321
    assert load_settings(environ={}).settings.port == 8000


def test_what_others_put_into_the_environment_is_left_alone() -> None:
    assert (
        from_environment(TIEREDKV_SERVICE_HOST="10.0.0.1", PORT="1", tieredkv_port="2").port == 8000
    )


def test_every_plain_setting_can_come_from_everywhere(write_toml: WriteToml) -> None:
    values: dict[str, Any] = {
        "model": "m",
        "dtype": "float16",
        "device": "cpu",
        "max_model_len": 4096,
        "rope_scaling": "yarn:4",
        "fingerprint": "sample",
        "generation_config": "none",
        "served_model_name": "name",
        "access_log": "json",
        "seed": 5,
        "block_size": 64,
        "device_size": 1 << 20,
        "gpu_memory_utilization": 0.5,
        "host_size": 2 << 20,
        "eviction_order": "clock",
        "disk_dir": "/d",
        "disk_size": 3 << 20,
        "disk_write": "write_behind",
        "disk_sync": "none",
        "disk_write_limit": 4 << 20,
        "disk_read_limit": 5 << 20,
        "disk_compression": "auto",
        "disk_encryption": "off",
        "disk_key_dir": "/k",
        "disk_master_key": "/m",
        "disk_master_key_command": "kms get kv",
        "hash_algo": "xxh3_128",
        "isolate_by": "none",
        "default_retention": "24h",
        "restore": "load",
        "load_timeout": 1.5,
        "drain_timeout": 2.0,
        "sweep_interval": 3.0,
        "max_retention": "24h",
        "min_cache_tokens": 1024,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 512,
        "max_num_queued_reqs": 6,
        "host": "::",
        "port": 1,
        "allowed_hosts": ("kv.example.com",),
        "cors_origins": ("https://example.com",),
        "api_keys": ("a", "b"),
        "idle_timeout": 30.0,
        "max_body_size": 5 << 20,
        "canonical_tools": "on",
        "allow_special_in_content": "on",
        "chat_template_kwargs": '{"enable_thinking": false}',
        "template_date": "2025-06-30",
        "tool_parser": "hermes",
        "reasoning_parser": "none",
        "drop_billing_header": "off",
        "stored_responses_size": 7 << 20,
        "grammar_timeout": 3.0,
        "remembered_answers_size": 9 << 20,
        "images": "refuse",
        "anthropic_implicit": "off",
        "cache_lookback": 5,
        "api_keys_file": "keys.toml",
        "admin_key": "c",
        "metrics_key": "always",
        "metric_labels": ("route",),
        "kv_events": "on",
        "kv_events_endpoint": "tcp://*:5559",
        "kv_events_replay_endpoint": "ipc:///run/replay",
        "kv_events_topic": "kv",
        "kv_events_buffer_steps": 7,
        "kv_events_max_queue_size": 8,
        "kv_events_namespaces": "all",
    }
    rows = load_settings(environ={}).describe()
    plain = {name: section for section, name, *_ in rows if name != "policy"}
    assert set(plain) == set(values)
    expected = Settings(**values)

    assert from_arguments(**values) == expected
    texts = {name: ",".join(v) if isinstance(v, tuple) else str(v) for name, v in values.items()}
    assert (
        from_environment(**{f"TIEREDKV_{n.upper()}": text for n, text in texts.items()}) == expected
    )
    lines: dict[str, list[str]] = {}
    for name, value in values.items():
        text = repr(list(value)) if isinstance(value, tuple) else repr(value)
        lines.setdefault(plain[name], []).append(f"{name} = {text}")
    document = "\n".join("\n".join([f"[{section}]", *rows]) for section, rows in lines.items())
    assert load_settings(environ={}, config_path=write_toml(document)).settings == expected


# Values as people write them


def test_sizes_and_durations_are_read_as_people_write_them() -> None:
    settings = from_arguments(
        host_size="64MiB", disk_size=1 << 30, load_timeout="250ms", drain_timeout="1m"
    )
    assert (settings.host_size, settings.disk_size) == (64 << 20, 1 << 30)
    assert (settings.load_timeout, settings.drain_timeout) == (0.25, 60.0)


@pytest.mark.parametrize("path", ["/a\0b", "\0", "~\0", "~a\0/b"])
@pytest.mark.parametrize("name", ["disk_dir", "disk_key_dir", "disk_master_key", "api_keys_file"])
def test_a_path_with_a_zero_byte_is_refused_by_the_name_of_the_setting(
    load_toml: Load, name: str, path: str
) -> None:
    given: dict[str, Any] = {name: path}
    calls: list[Callable[[], object]] = [
        lambda: load_toml(f"{name} = {json.dumps(path)}"),
        lambda: from_arguments(**given),
        lambda: Settings(**given),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match=f"`{name}`"):
            call()


def test_a_path_may_be_handed_over_as_such(tmp_path: Path) -> None:
    assert from_arguments(disk_dir=tmp_path, model=tmp_path).disk_dir == str(tmp_path)


@pytest.mark.parametrize("names", [",", "a,", "a,,b", " "])
def test_an_empty_name_of_the_model_is_refused(names: str) -> None:
    with refused(ConfigError):
        Settings(served_model_name=names)


def test_several_names_of_the_model_are_separated_by_commas() -> None:
    assert Settings(served_model_name="a, b,a").served_names == ("a", "b")
    assert Settings(model="x,y").served_names == ()


def test_an_empty_text_takes_back_what_a_file_has_set(write_toml: WriteToml) -> None:
    path = write_toml("[cache]\ndisk_dir = '/d'\n[model]\nserved_model_name = 'n'")
    for arguments, environ in (
        ({"disk_dir": "", "served_model_name": ""}, {}),
        ({}, {"TIEREDKV_DISK_DIR": "", "TIEREDKV_SERVED_MODEL_NAME": ""}),
    ):
        settings = load_settings(arguments=arguments, environ=environ, config_path=path).settings
        assert settings.disk_dir is None
        assert settings.served_model_name is None


def test_keys_are_a_list_or_a_text_with_commas(load_toml: Load) -> None:
    assert from_environment(TIEREDKV_API_KEYS="a, b").api_keys == ("a", "b")
    assert from_arguments(api_keys=["a", "b"]).api_keys == ("a", "b")
    assert load_toml("[server]\napi_keys = ['a']").settings.api_keys == ("a",)
    assert load_toml("[server]\napi_keys = []").settings.api_keys == ()


def test_arguments_of_the_chat_template_are_a_table_or_json(load_toml: Load) -> None:
    text = '{"clear_thinking": false, "effort": "high"}'
    table = "[server]\nchat_template_kwargs = {clear_thinking = false, effort = 'high'}"
    assert load_toml(table).settings.chat_template_kwargs == text
    assert from_arguments(chat_template_kwargs=text).chat_template_kwargs == text
    assert from_arguments(chat_template_kwargs=json.loads(text)).chat_template_kwargs == text
    assert from_environment(TIEREDKV_CHAT_TEMPLATE_KWARGS=text).chat_template_kwargs == text
    for wrong in ("x", "[1]", 5, "[" * 100_000):
        with refused(ConfigError):
            from_arguments(chat_template_kwargs=wrong)
    for value in ("[1]", "null", "NaN"):
        with refused(ConfigError):
            from_arguments(chat_template_kwargs=f'{{"a": {value}}}')
    with refused(ConfigError):
        Settings(chat_template_kwargs="x")


@pytest.mark.parametrize("keys", ["", ",", "a,,b", ["a", " "], ("",)], ids=repr)
def test_an_empty_key_is_refused_for_it_would_let_everybody_in(keys: object) -> None:
    with refused(ConfigError):
        from_arguments(api_keys=keys)


def test_the_clock_offset_file_comes_from_its_variable_only() -> None:
    assert Settings().clock_offset_file is None
    variable = "TIEREDKV_TEST_CLOCK_OFFSET_FILE"
    assert from_environment(**{variable: "/f"}).clock_offset_file == "/f"
    assert from_environment(**{variable: ""}).clock_offset_file is None
    with refused(ConfigError):
        from_arguments(clock_offset_file="/f")


# What is refused, and how


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 17),
        ("block_size", 8),
        ("block_size", 512),
        ("block_size", -16),
        ("block_size", True),
        ("block_size", 16.0),
        ("block_size", "sixteen"),
        ("max_num_seqs", False),
        ("max_num_seqs", 0),
        ("max_num_queued_reqs", -1),
        ("max_num_batched_tokens", 0),
        ("max_model_len", -1),
        ("seed", "--1"),
        ("seed", "²"),
        pytest.param("seed", "1" * 5000, id="seed-long"),
        ("port", 65536),
        ("port", -1),
        ("host_size", "much"),
        ("host_size", True),
        ("host_size", 0),
        ("disk_size", "0GiB"),
        ("device_size", -5),
        ("disk_write_limit", "-1MiB"),
        ("disk_write_limit", -1),
        ("disk_read_limit", "fast"),
        ("disk_read_limit", -1),
        ("load_timeout", "soon"),
        ("load_timeout", True),
        ("load_timeout", 0),
        ("load_timeout", float("inf")),
        pytest.param("load_timeout", 10**400, id="load_timeout-large"),
        ("sweep_interval", float("nan")),
        ("drain_timeout", -1),
        ("gpu_memory_utilization", 0),
        ("gpu_memory_utilization", 90),
        ("gpu_memory_utilization", "nan"),
        ("gpu_memory_utilization", True),
        ("gpu_memory_utilization", "half"),
        ("dtype", "int8"),
        ("dtype", 16),
        ("device", "tpu"),
        ("fingerprint", "none"),
        ("hash_algo", "md5"),
        ("isolate_by", "ip"),
        ("kv_events", "yes"),
        ("kv_events_endpoint", "127.0.0.1:5557"),
        ("kv_events_replay_endpoint", "udp://*:1"),
        ("kv_events_buffer_steps", 0),
        ("kv_events_namespaces", "some"),
        ("disk_write", "always"),
        ("disk_sync", "always"),
        ("restore", "lod"),
        ("default_retention", "48h"),
        ("api_keys", 5),
        ("api_keys", ["a", 1]),
        ("model", ["m"]),
        ("policies", "24h"),
        ("policies", ()),
        ("policies", (MONTH, MONTH)),
    ],
)
def test_a_bad_value_is_named_with_its_field_and_what_is_allowed(name: str, value: object) -> None:
    with refused(ConfigError):
        from_arguments(**{name: value})


def test_a_malformed_variable_is_named() -> None:
    with refused(ConfigError):
        from_environment(TIEREDKV_PORT="tcp://10.0.0.1:80")
    with refused(ConfigError):
        from_environment(TIEREDKV_HOST_SIZE="")
    with refused(ConfigError):
        from_environment(TIEREDKV_BLOCK_SIZE="true")


@pytest.mark.parametrize("name", ["blocksize", "disk_dirs", "max_seqs"])
def test_an_unknown_argument_is_answered_with_the_nearest_setting(name: str) -> None:
    with refused(ConfigError):
        from_arguments(**{name: 1})


@pytest.mark.parametrize(
    "text",
    [
        "[cache]\nblocksize = 16",
        "[server]\nzzz = 1",
        "[cache]\nport = 1",
        "[cach]\nblock_size = 16",
        "[zzz]",
        "block_size = 16",
        "blok_size = 16",
        "cache = 5",
        "[[cache]]\nblock_size = 16",
        "retention = '24h'",
        "[cache]\nblock_size = true",
        "[cache]\nhost_size = [1]",
        "[cache]\nhost_size = '5 apples'",
        "[cache]\nload_timeout = inf",
        "[cache]\ndisk_dir = 1979-05-27",
        "[server]\napi_keys = [1, 2]",
        "[cache]\npolicies = 1",
        "[cache]\nclock_offset_file = '/f'",
        "[cache",
        "[cache]\nblock_size = 16\nblock_size = 32",
        b"[cache]\ndisk_dir = '\xff'",
    ],
)
def test_a_bad_file_is_answered_with_its_path_the_key_and_the_way_out(
    load_toml: Load, text: str | bytes
) -> None:
    with refused(ConfigError):
        load_toml(text)


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with refused(ConfigError):
        load_settings(environ={}, config_path=tmp_path / "absent.toml")
    with refused(ConfigError):
        load_settings(environ={}, config_path=tmp_path)


def test_a_file_is_utf8_whatever_the_locale_says(load_toml: Load) -> None:
    assert load_toml("[cache]\ndisk_dir = '/größe'").settings.disk_dir == "/größe"


# Retention policies


def test_a_row_of_a_known_policy_may_leave_out_what_stays(load_toml: Load) -> None:
    loaded = load_toml("[retention.in_memory]\nidle = '20s'\n[retention.24h]\nabsolute = '24h'")
    short, day, *_ = loaded.settings.policies
    assert (short.idle_s, short.absolute_s, short.tiers) == (20.0, 3600.0, IN_MEMORY.tiers)
    assert day == TWENTY_FOUR_HOURS


def test_a_further_policy_needs_a_whole_row_and_can_then_be_chosen(load_toml: Load) -> None:
    row = "[retention.30d]\nidle = '24h'\nabsolute = '30d'\ntiers = ['device', 'host', 'disk']\n"
    settings = load_toml(row + "[cache]\ndefault_retention = '30d'").settings
    assert settings.policies == (*DEFAULT_POLICIES, MONTH)
    assert settings.default_retention == "30d"
    assert settings.retention_policies().get("30d") == MONTH


@pytest.mark.parametrize(
    "row",
    [
        "[retention.x]\nidle = '5m'\ntiers = ['device']",
        "[retention.x]",
        "[retention.24h]\nidel = '5m'",
        "[retention]\n24h = '5m'",
        "[retention.24h]\nidle = 'x'",
        "[retention.24h]\nidle = true",
        "[retention.24h]\nabsolute = inf",
        "[retention.24h]\nidle = 0",
        "[retention.in_memory]\nidle = '2h'",
        "[retention.24h]\ntiers = 'disk'",
        "[retention.24h]\ntiers = 5",
        "[retention.24h]\ntiers = ['ram']",
        "[retention.24h]\ntiers = ['host']",
        "[retention.24h]\ntiers = ['device', 'disk']",
        "[retention.in-memory]\nidle = 1\nabsolute = 1\ntiers = ['device']",
    ],
)
def test_a_bad_policy_row_is_named(load_toml: Load, row: str) -> None:
    with refused(ConfigError):
        load_toml(row)


# What settings answer


def test_settings_never_change_and_take_no_unknown_field() -> None:
    settings = Settings()
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.port = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        Settings(prot=1)  # type: ignore[call-arg]
    assert dataclasses.replace(settings, port=1).port == 1
    with pytest.raises(ConfigError):
        dataclasses.replace(settings, port=-1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_limits_hold_for_settings_made_by_hand_too(value: float) -> None:
    with refused(ConfigError):
        Settings(load_timeout=value)


def test_the_token_budget_of_a_step_follows_the_device_unless_it_is_set() -> None:
    assert Settings().resolve_max_num_batched_tokens("cuda") == 8192
    assert Settings().resolve_max_num_batched_tokens("cpu") == 2048
    assert Settings(max_num_batched_tokens=64).resolve_max_num_batched_tokens("cuda") == 64


@pytest.mark.parametrize("isolate_by", ["api_key", "salt", "prompt_cache_key"])
def test_a_server_refuses_to_isolate_by_the_fast_hash(isolate_by: Any) -> None:
    with refused(ConfigError):
        Settings(hash_algo="xxh3_128", isolate_by=isolate_by).check_server()
    Settings(hash_algo="sha256", isolate_by=isolate_by).check_server()
    Settings(hash_algo="xxh3_128", isolate_by="none").check_server()


def test_describe_shows_each_value_as_people_write_it_and_where_it_is_from(
    write_toml: WriteToml,
) -> None:
    path = write_toml("[cache]\nhost_size = '1.5GiB'\n[retention.24h]\nidle = '2h'")
    loaded = load_settings(
        arguments={"api_keys": ["secret"], "load_timeout": 0.5},
        environ={"TIEREDKV_PORT": "9"},
        config_path=path,
    )
    rows = [(section, name, text, source) for section, name, _, text, source in loaded.describe()]
    for row in (
        ("model", "max_model_len", "", "default"),
        ("cache", "block_size", "", "default"),
        ("cache", "host_size", "1.5 GiB", f"file {path}"),
        ("cache", "load_timeout", "0.5s", "argument"),
        ("cache", "drain_timeout", "30s", "default"),
        ("server", "port", "9", "environment TIEREDKV_PORT"),
        ("server", "api_keys", "1 configured", "argument"),
        ("retention.in_memory", "policy", "idle 10m, absolute 1h, tiers device host", "default"),
        ("retention.24h", "policy", "idle 2h, absolute 1d, tiers device host disk", f"file {path}"),
    ):
        assert row in rows
    assert "secret" not in str(rows)


def test_policies_handed_over_as_an_argument_replace_all_others(write_toml: WriteToml) -> None:
    path = write_toml("[retention.24h]\nidle = '2h'")
    loaded = load_settings(
        arguments={"policies": [MONTH], "default_retention": "30d"}, environ={}, config_path=path
    )
    assert loaded.settings.policies == (MONTH,)
    sources = {
        section: source for section, name, *_, source in loaded.describe() if name == "policy"
    }
    assert sources == {"retention.30d": "argument"}
