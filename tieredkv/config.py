"""Every setting, what it may be, and where its value came from.

The only module that reads the environment. Knows names, defaults and ranges; does not know what
the machine, the model or the store make of them: those facts live with the engine.
"""

import difflib
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, get_args

from tieredkv.errors import ConfigError, RequestError
from tieredkv.retention import RetentionPolicies, RetentionPolicy
from tieredkv.types import HashAlgo, Tier
from tieredkv.units import exact_bytes, parse_bytes, parse_duration

DType = Literal["auto", "float32", "bfloat16", "float16"]
Fingerprint = Literal["full", "sample"]
DiskWrite = Literal["on_evict", "write_behind"]
DiskSync = Literal["commit", "none"]
IsolateBy = Literal["none", "api_key", "salt", "prompt_cache_key"]
Restore = Literal["auto", "load", "compute"]

ENV_PREFIX = "TIEREDKV_"
CLOCK_OFFSET_VARIABLE = "TIEREDKV_TEST_CLOCK_OFFSET_FILE"


@dataclass(frozen=True, slots=True)
class _Kind:
    """How a value is read and shown: one per type of setting.

    Attributes:
        allowed: what a value may be, for the error message.
        parse: reads what a file, the environment or a caller gives; ValueError if not allowed.
        show: writes a value as TOML.
        choices: all values there are, if they can be counted.
    """

    allowed: str
    parse: Callable[[Any], object]
    show: Callable[[Any], str] = str
    choices: tuple[str, ...] = ()


class _Option(NamedTuple):
    section: str
    kind: _Kind
    help: str


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _require(value: object, holds: bool) -> Any:
    if not holds:
        raise ValueError(value)
    return value


def _parse_text(value: object) -> str:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise ValueError(value)
    return text


def _parse_integer(value: object) -> int:
    if isinstance(value, str) and re.fullmatch(r"\s*-?[0-9]{1,18}\s*", value):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(value)
    return value


def _parse_fraction(value: object) -> float:
    if not isinstance(value, int | float | str) or isinstance(value, bool):
        raise ValueError(value)
    number = float(value)
    return float(_require(number, 0 < number <= 1))


def _parse_device(value: object) -> str:
    return str(_require(value, re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", str(value)) is not None))


def _parse_keys(value: object) -> tuple[str, ...]:
    keys = value.split(",") if isinstance(value, str) else value
    if not isinstance(keys, Sequence):
        raise ValueError(value)
    return tuple(_parse_text(key).strip() for key in keys)


def _parse_policies(value: object) -> object:
    return _require(value, isinstance(value, RetentionPolicies) and len(value) > 0)


def _show_duration(seconds: float) -> str:
    for unit, length in (("h", 3600), ("m", 60), ("s", 1)):
        if seconds % length == 0 and (seconds or unit == "s"):
            return f'"{int(seconds // length)}{unit}"'
    return repr(seconds)


def _choice(literal: object) -> _Kind:
    choices = get_args(literal)
    allowed = ", ".join(f"`{choice}`" for choice in choices)
    return _Kind(allowed, lambda v: _require(v, v in choices), _quote, choices)


def _integer(low: int, high: int | None = None) -> _Kind:
    allowed = f"an integer from {low}" + (f" to {high}" if high is not None else " up")
    return _Kind(
        allowed,
        lambda v: _require(n := _parse_integer(v), n >= low and (high is None or n <= high)),
    )


def _duration(allowed: str, is_allowed: Callable[[float], bool]) -> _Kind:
    return _Kind(
        f"{allowed}, for example '20s' or '10m'",
        lambda v: _require(seconds := parse_duration(v), is_allowed(seconds)),
        _show_duration,
    )


_TEXT = _Kind("a text that is not empty", _parse_text, _quote)
_MODEL = _Kind("a folder, a hub id or a name", lambda v: v if v == "" else _parse_text(v), _quote)
_PATH = _Kind("the path of a folder", lambda v: os.path.expanduser(_parse_text(v)), _quote)
_DEVICE = _Kind("`auto`, `cpu`, `cuda` or `cuda:N`", _parse_device, _quote)
_COUNT = _integer(1)
_BLOCK_SIZE = _Kind(
    "a power of two from 16 to 256",
    lambda v: _require(n := _parse_integer(v), n in (16, 32, 64, 128, 256)),
)
_SIZE = _Kind(
    "a size above 0, for example '64MiB' or '2GB'",
    lambda v: _require(size := parse_bytes(v), size > 0),
    lambda size: _quote(exact_bytes(size)),
)
_FRACTION = _Kind("a number above 0, up to 1", _parse_fraction)
_DURATION = _duration("a duration above 0", lambda seconds: seconds > 0)
_WAIT = _duration("a duration", lambda seconds: True)
_KEYS = _Kind("a list of texts, with commas between them in the environment", _parse_keys)
_POLICIES = _Kind("at least one policy", _parse_policies)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a user can choose. Sizes are bytes, durations seconds; None is decided at run time.

    `_OPTIONS` says what each field means and may be. Values are checked, and read if they are
    text such as `64MiB`, wherever they come from.

    Raises:
        ConfigError: a value is not allowed; the message names the field, the value and what is.
    """

    model: str = ""
    dtype: DType = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    fingerprint: Fingerprint = "full"
    served_model_name: str | None = None
    seed: int = 0

    block_size: int = 16
    device_size: int | None = None
    gpu_memory_utilization: float = 0.90
    host_size: int = 1 << 30
    disk_dir: str | None = None
    disk_size: int = 20 << 30
    disk_write: DiskWrite = "on_evict"
    disk_sync: DiskSync = "commit"
    hash_algo: HashAlgo = "sha256"
    isolate_by: IsolateBy = "salt"
    default_retention: str = "in_memory"
    restore: Restore = "auto"
    load_timeout: float = 30.0
    drain_timeout: float = 30.0
    sweep_interval: float = 10.0

    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    max_num_queued_reqs: int = 1024

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)

    retention: RetentionPolicies = field(default_factory=RetentionPolicies.default)
    clock_offset_file: str | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None or item.default is not None:
                object.__setattr__(self, item.name, _parse(item.name, value, item.name))
        object.__setattr__(self, "default_retention", self._default_policy().name)

    def check_server(self) -> None:
        """Refuse what is fine in one's own process but not behind a server's door.

        Raises:
            ConfigError: tenants are to be apart under a hash whose collisions can be made.
        """
        if self.hash_algo == "xxh3_128" and self.isolate_by != "none":
            raise ConfigError(
                f"`hash_algo` is 'xxh3_128' while `isolate_by` is {self.isolate_by!r}; "
                "allowed: `sha256`, for xxh3_128 is not collision-resistant and would not keep "
                "tenants apart\nhint: for a single trusted tenant set isolate_by = 'none'"
            )

    def _default_policy(self) -> RetentionPolicy:
        try:
            return self.retention.get(self.default_retention)
        except RequestError:
            names = ", ".join(f"`{name}`" for name in self.retention.names)
            raise ConfigError(
                f"`default_retention` is {self.default_retention!r}; allowed: {names}"
                + _did_you_mean(self.default_retention, self.retention.names)
            ) from None


_OPTIONS = {
    "model": _Option("model", _MODEL, "local folder, hub id, `tiny-random` or `random:SHAPE`"),
    "dtype": _Option("model", _choice(DType), "auto: float32 on CPU, the checkpoint's on CUDA"),
    "device": _Option("model", _DEVICE, "where the model runs"),
    "max_model_len": _Option("model", _COUNT, "longest prompt and answer; unset: the model's"),
    "fingerprint": _Option("model", _choice(Fingerprint), "weight bytes that identity covers"),
    "served_model_name": _Option("model", _TEXT, "name that requests use; unset: `model`"),
    "seed": _Option("model", _integer(0), "of random weights, and of sampling without a seed"),
    "block_size": _Option("cache", _BLOCK_SIZE, "tokens a block"),
    "device_size": _Option(
        "cache", _SIZE, "KV in VRAM; unset: by gpu_memory_utilization, 256MiB on CPU"
    ),
    "gpu_memory_utilization": _Option(
        "cache", _FRACTION, "share of the GPU's memory in use when device_size is unset"
    ),
    "host_size": _Option("cache", _SIZE, "KV in pinned host memory"),
    "disk_dir": _Option("cache", _PATH, "folder of the disk tier; unset: no disk tier"),
    "disk_size": _Option("cache", _SIZE, "budget of all files in disk_dir"),
    "disk_write": _Option("cache", _choice(DiskWrite), "when blocks go from host to disk"),
    "disk_sync": _Option("cache", _choice(DiskSync), "commit: sync before acknowledging"),
    "hash_algo": _Option("cache", _choice(HashAlgo), "xxh3_128: one trusted tenant only"),
    "isolate_by": _Option("cache", _choice(IsolateBy), "salt: by API key and cache_salt"),
    "default_retention": _Option("cache", _TEXT, "policy of requests that name none"),
    "restore": _Option("cache", _choice(Restore), "what to do with a prefix below VRAM"),
    "load_timeout": _Option("cache", _DURATION, "a load that takes longer counts as a miss"),
    "drain_timeout": _Option("cache", _WAIT, "time to write what `24h` holds when stopping"),
    "sweep_interval": _Option("cache", _DURATION, "expired bytes leave the disk within it"),
    "max_num_seqs": _Option("scheduler", _COUNT, "requests that run at once"),
    "max_num_batched_tokens": _Option(
        "scheduler", _COUNT, "tokens a step; unset: 8192 on CUDA, 2048 on CPU"
    ),
    "max_num_queued_reqs": _Option("scheduler", _COUNT, "waiting requests; more are refused"),
    "host": _Option("server", _TEXT, "address to listen on"),
    "port": _Option("server", _integer(0, 65535), "port to listen on; 0: any free one"),
    "api_keys": _Option("server", _KEYS, "keys let in, a tenant each; none: everybody"),
    "retention": _Option("", _POLICIES, "policies that requests choose among"),
    "clock_offset_file": _Option("", _TEXT, f"only by {CLOCK_OFFSET_VARIABLE}"),
}
_SECTIONS = ("model", "cache", "scheduler", "server", "retention")
_POLICY_KEYS = ("idle", "absolute", "tiers")


class SettingLine(NamedTuple):
    """One line of `config show`; a value in parentheses is not one to be set."""

    name: str
    section: str
    value: str
    source: str
    help: str


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings, and for each field where its value came from.

    A source is `argument`, `environment TIEREDKV_X`, `file F` or `default`.
    """

    settings: Settings
    sources: Mapping[str, str]

    def describe(self) -> list[SettingLine]:
        """Return a line per setting, in the order of a configuration file; keys are not shown."""
        lines = [
            SettingLine(name, option.section, self._text(name), self.sources[name], option.help)
            for name, option in _OPTIONS.items()
            if name != "retention"
        ]
        for policy in self.settings.retention:
            section, source = f"retention.{_key(policy.name)}", self.sources["retention"]
            idle, absolute = map(_show_duration, (policy.idle_s, policy.absolute_s))
            tiers = json.dumps([*map(str, policy.sorted_tiers)])
            lines += [
                SettingLine("idle", section, idle, source, "longest life since last use"),
                SettingLine("absolute", section, absolute, source, "longest life since computed"),
                SettingLine("tiers", section, tiers, source, "where copies may be"),
            ]
        return lines

    def to_toml(self) -> str:
        """Return a file that `load_settings` reads back to these settings.

        What is unset or secret stands in it as a comment; the clock offset does not at all.
        """
        text, section = [], ""
        for line in self.describe():
            if line.section not in ("", section):
                section = line.section
                text += ["", f"[{section}]"]
            comment = "# " if line.value.startswith("(") else ""
            source = line.source.replace("\n", " ")
            if line.section:
                text.append(f"{comment}{line.name} = {line.value}  # {source}")
        return "\n".join(text[1:]) + "\n"

    def _text(self, name: str) -> str:
        value = getattr(self.settings, name)
        if name == "api_keys":
            return f"({len(value)} set, not shown)" if value else "[]"
        return "(unset)" if value is None else _OPTIONS[name].kind.show(value)


def load_settings(
    *,
    arguments: Mapping[str, object],
    environ: Mapping[str, str] = os.environ,
    config_path: str | None = None,
    require_model: bool = True,
) -> LoadedSettings:
    """Gather the settings: argument, then `TIEREDKV_*`, then the TOML file, then the default.

    Args:
        arguments: by field; None and an empty tuple mean that it was not given.
        environ: the environment; only names that start with `TIEREDKV_` are looked at.
        config_path: a TOML file.
        require_model: refuse settings without a model.

    Raises:
        ConfigError: a name is unknown, a value is not allowed, or the file cannot be read.
    """
    values: dict[str, Any] = {}
    sources = dict.fromkeys(_OPTIONS, "default")
    if config_path is not None:
        values |= _from_file(config_path)
        sources |= dict.fromkeys(values, f"file {config_path}")
    for name, value in _from_environment(environ).items():
        values[name], sources[name] = value, f"environment {_variable(name)}"
    for name, value in _from_arguments(arguments).items():
        values[name], sources[name] = value, "argument"
    try:
        settings = Settings(**values)
    except ConfigError as error:
        # Each value was allowed by itself, so it is the one that another setting gives meaning.
        raise ConfigError(f"{error} (from {sources['default_retention']})") from None
    if require_model and not settings.model:
        raise ConfigError(f"`model` is not set; allowed: {_OPTIONS['model'].help}")
    return LoadedSettings(settings, sources)


def _parse(name: str, value: object, where: str) -> object:
    """Return a field's value as its kind reads it; `where` is how the user named the field."""
    kind = _OPTIONS[name].kind
    try:
        return kind.parse(value)
    except (ValueError, TypeError):
        shown = "not allowed as it is" if name == "api_keys" else f"{value!r}"
        near = _did_you_mean(value, kind.choices) if isinstance(value, str) else ""
        raise ConfigError(f"`{where}` is {shown}; allowed: {kind.allowed}{near}") from None


def _from_arguments(arguments: Mapping[str, object]) -> dict[str, object]:
    known = [name for name in _OPTIONS if name != "clock_offset_file"]
    for name in arguments:
        if name not in known:
            raise ConfigError(f"unknown setting `{name}`{_did_you_mean(name, known)}")
    return {
        name: _parse(name, value, name)
        for name, value in arguments.items()
        if value is not None and value != ()
    }


def _from_environment(environ: Mapping[str, str]) -> dict[str, object]:
    known = {_variable(name): name for name in _OPTIONS if name != "retention"}
    found: dict[str, object] = {}
    try:
        for variable in sorted(name for name in environ if name.startswith(ENV_PREFIX)):
            name, value = known.get(variable), environ[variable]
            if name is None:
                near = _did_you_mean(variable, known)
                raise ConfigError(f"unknown environment variable `{variable}`{near}")
            if not value.strip():
                raise ConfigError(f"`{variable}` is empty; unset it, or give it a value")
            found[name] = _parse(name, value, variable)
    except ConfigError as error:
        if f"{ENV_PREFIX}SERVICE_HOST" not in environ:
            raise
        raise ConfigError(
            f"{error}\nhint: Kubernetes sets such variables for a service named `tieredkv`; "
            "name it otherwise, or set `enableServiceLinks: false`"
        ) from None
    return found


def _from_file(path: str) -> dict[str, object]:
    try:
        with open(path, "rb") as file:
            tables = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read `{path}`: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"`{path}` is not TOML: {error}") from error
    found: dict[str, object] = {}
    for section, table in tables.items():
        if section not in _SECTIONS:
            near = _section_of(section) or _did_you_mean(section, _SECTIONS)
            raise ConfigError(f"unknown section `{section}` in `{path}`{near}")
        table = _table(table, section, path)
        if section == "retention":
            found["retention"] = _policies(table, path)
            continue
        keys = [name for name, option in _OPTIONS.items() if option.section == section]
        for name, value in table.items():
            if name not in keys:
                near = (
                    _section_of(name) or _did_you_mean(name, keys) or _did_you_mean(name, _OPTIONS)
                )
                raise ConfigError(f"unknown key `{section}.{name}` in `{path}`{near}")
            found[name] = _parse(name, value, f"{section}.{name}` in `{path}")
    return found


def _table(value: object, name: str, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"`{name}` in `{path}` is {value!r}; allowed: a table `[{name}]`")
    return value


def _policies(tables: Mapping[str, object], path: str) -> RetentionPolicies:
    """Return the default policies, with those of a file's `[retention.NAME]` laid over them."""
    policies = {policy.name: policy for policy in RetentionPolicies.default()}
    for name, value in tables.items():
        where = f"retention.{_key(name)}"
        table = _table(value, where, path)
        for key in table:
            if key not in _POLICY_KEYS:
                near = _did_you_mean(key, _POLICY_KEYS)
                raise ConfigError(f"unknown key `{where}.{key}` in `{path}`{near}")
        if (base := policies.get(name)) is not None:
            default = {"idle": base.idle_s, "absolute": base.absolute_s, "tiers": base.sorted_tiers}
            table = default | table
        for key in _POLICY_KEYS:
            if key not in table:
                raise ConfigError(f"`{where}.{key}` is missing in `{path}`; a new policy needs it")
        policies[name] = RetentionPolicy(
            name,
            _limit(table["idle"], f"{where}.idle", path),
            _limit(table["absolute"], f"{where}.absolute", path),
            _tiers(table["tiers"], f"{where}.tiers", path),
        )
    return RetentionPolicies(policies.values())


def _limit(value: Any, where: str, path: str) -> float:
    try:
        return parse_duration(value)
    except ConfigError:
        raise ConfigError(
            f"`{where}` in `{path}` is {value!r}; allowed: {_DURATION.allowed}"
        ) from None


def _tiers(value: Any, where: str, path: str) -> frozenset[Tier]:
    try:
        return frozenset(Tier(tier) for tier in _require(value, not isinstance(value, str)))
    except (ValueError, TypeError):
        raise ConfigError(
            f"`{where}` in `{path}` is {value!r}; allowed: a list of 'device', 'host', 'disk'"
        ) from None


def _variable(name: str) -> str:
    return CLOCK_OFFSET_VARIABLE if name == "clock_offset_file" else ENV_PREFIX + name.upper()


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _quote(name)


def _section_of(name: str) -> str:
    """Return a pointer to where a key belongs, if it is spelt right but stands elsewhere."""
    section = _OPTIONS[name].section if name in _OPTIONS else ""
    return f"; did you mean `{section}.{name}`?" if section else ""


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean `{near[0]}`?" if near else ""
