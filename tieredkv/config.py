"""Settings: what they are, what they may be, and where each value came from.

An argument takes precedence over the environment (`TIEREDKV_*`), then the TOML file, then the
default. No other module reads settings from the environment. A settings object never changes once
it is made. Values found at run time, such as the number of blocks, are kept elsewhere.
"""

import difflib
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

from tieredkv.errors import ConfigError
from tieredkv.kinds import (
    Bytes,
    FilePath,
    RopeScaling,
    Seconds,
    TemplateArguments,
    TemplateDate,
    kind_of,
    parse_at,
    parse_rope_scaling,
    parse_template_arguments,
    parse_template_date,
)
from tieredkv.policy_tables import check_policies, read_policy
from tieredkv.retention import DEFAULT_POLICIES, RetentionPolicies, RetentionPolicy
from tieredkv.types import HashAlgo, Tier
from tieredkv.units import format_duration

ENVIRONMENT_PREFIX = "TIEREDKV_"
CLOCK_OFFSET_VARIABLE = "TIEREDKV_TEST_CLOCK_OFFSET_FILE"

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cuda", "cpu"]
IsolateBy = Literal["none", "api_key", "salt", "prompt_cache_key"]
Fingerprint = Literal["full", "sample"]
GenerationConfigMode = Literal["auto", "none"]
EvictionOrder = Literal["lru", "fifo", "clock", "lfu", "sieve", "s3fifo"]
DiskWrite = Literal["on_evict", "write_behind"]
DiskSync = Literal["commit", "none"]
DiskCompression = Literal["off", "on", "auto"]
Images = Literal["note", "refuse"]
AccessLog = Literal["off", "json"]
Restore = Literal["auto", "load", "compute"]
Switch = Literal["off", "on"]
MetricsKey = Literal["auto", "always", "never"]
EventNamespaces = Literal["open", "all"]
_ABOVE_0 = (lambda value: 0 < value < math.inf), "above 0"
_AT_LEAST_0 = (lambda value: 0 <= value < math.inf), "at least 0"
_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "block_size": (lambda it: 16 <= it <= 256 and it & -it == it, "a power of two from 16 to 256"),
    "cache_lookback": _AT_LEAST_0,
    "drain_timeout": _AT_LEAST_0,
    "gpu_memory_utilization": (lambda share: 0 < share <= 1, "above 0 and at most 1"),
    "port": (lambda port: 0 <= port <= 65535, "from 0 to 65535"),
    "seed": (lambda seed: True, "a whole number"),
    "remembered_answers_size": _AT_LEAST_0,
    "stored_responses_size": _AT_LEAST_0,
}
"""What these numbers may be; others must be above 0, or at least 0 if 0 is their default."""

_HOST = re.compile(r"[\w.-]+|\[[0-9a-fA-F:.]+\]")
_EVENTS = re.compile(r"tcp://([\w.-]+|\*|\[[0-9a-fA-F:.]+\]):(\d+|\*)|ipc:///.+")
_ORIGIN = re.compile(r"[a-zA-Z][\w+.-]*://([\w.-]+|\[[0-9a-fA-F:.]+\])(:\d+)?")


def _setting(section: str, default: Any, help: str, *, is_secret: bool = False) -> Any:
    """Declare a field of `Settings`.

    Args:
        section: TOML table of the field.
        default: default value.
        help: complete sentences that explain the field.
        is_secret: whether the value is never shown.
    """
    metadata = {"section": section, "help": help, "is_secret": is_secret}
    return field(default=default, repr=not is_secret, metadata=metadata)


_model, _cache, _scheduler, _server = (
    partial(_setting, section) for section in ("model", "cache", "scheduler", "server")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that an operator can choose. Sizes are in bytes, durations in seconds.

    Raises:
        ConfigError: a value is out of range; it names the field, the value and what is allowed.
    """

    model: str = _model(
        "",
        "Model to serve: a folder with a Hugging Face checkpoint, a hub id, `tiny-random` "
        "for a trial, or `random:SHAPE` for random weights of a known shape.",
    )
    dtype: Dtype = _model(
        "auto",
        "Type of weights and computation. `auto` takes the checkpoint's type on a GPU and "
        "float32 on a CPU.",
    )
    device: Device = _model("auto", "Where the model runs. `auto` takes the GPU if there is one.")
    max_model_len: int | None = _model(
        None,
        "Most tokens of a prompt and its answer together. By default the model's own limit, "
        "which is also the highest value.",
    )
    rope_scaling: RopeScaling | None = _model(
        None,
        "Scales the model's rope by YaRN for contexts beyond its positions: `yarn:4` for four "
        "times as many, or `yarn:4:32768` if its authors name an original length of their own. "
        "Blocks are cached apart from those without it, and short contexts may lose quality.",
    )
    fingerprint: Fingerprint = _model(
        "full",
        "What identifies the weights of cached blocks: a hash of all their bytes, or of a "
        "sample, which is faster to compute for large checkpoints.",
    )
    generation_config: GenerationConfigMode = _model(
        "auto",
        "Whether requests that name no sampling parameters get those of the model's "
        "generation_config.json (`auto`) or tieredkv's own (`none`).",
    )
    served_model_name: str | None = _model(
        None,
        "Name of the model in the API. By default the model as it was given. Several names are "
        "separated by commas; the first one stands in metrics and in the store.",
    )
    seed: int = _model(0, "Seed for requests that name none.")

    block_size: int | None = _cache(
        None,
        "Tokens per block, a power of two from 16 to 256. Prefixes are shared in whole blocks. By "
        "default 16, or 64 for a model with latent attention or recurrent layers, or with a "
        "sliding window in some layers.",
    )
    device_size: Bytes | None = _cache(
        None,
        "GPU memory for blocks. By default what `gpu_memory_utilization` leaves, or 256 MiB "
        "without a GPU.",
    )
    gpu_memory_utilization: float = _cache(
        0.9, "Share of GPU memory for weights, activations and blocks together."
    )
    host_size: Bytes = _cache(1 << 30, "Pinned host memory for blocks.")
    eviction_order: EvictionOrder = _cache(
        "lru",
        "Which unused block VRAM and host memory evict first. `lru` is the one that was unused for "
        "longest; the others are for experiments. The disk always goes by last use.",
    )
    disk_dir: FilePath | None = _cache(
        None, "Folder of the disk tier, such as /nvme/kv. Without it there is no disk tier."
    )
    disk_size: Bytes = _cache(20 << 30, "Most bytes that the files of the disk tier may occupy.")
    disk_write: DiskWrite = _cache(
        "on_evict",
        "When `24h` blocks are written to disk: once they have left VRAM for host memory or a stop "
        "would need half of `drain_timeout` to write them, or soon after they were computed.",
    )
    disk_sync: DiskSync = _cache(
        "commit",
        "Whether writes are flushed to the disk before they are acknowledged, or when the "
        "system likes, which a power loss may undo.",
    )
    disk_write_limit: Bytes = _cache(
        0, "Most bytes written to disk per second, to spare the SSD. 0 means no limit."
    )
    disk_read_limit: Bytes = _cache(
        0,
        "Most bytes read from disk per second, to leave the rest to others that use it. 0 means no "
        "limit.",
    )
    disk_compression: DiskCompression = _cache(
        "off",
        "Whether blocks on disk are compressed. `auto` compresses if that makes loads faster.",
    )
    disk_encryption: Switch = _cache(
        "on",
        "Whether blocks on disk are encrypted, so that what has expired or was deleted cannot be "
        "read in any copy of `disk_dir`. A store that has blocks must be as the setting says.",
    )
    disk_key_dir: FilePath | None = _cache(
        None,
        "Folder of the key table, and of the master key if none is given; it must not lie in "
        "`disk_dir`. By default ~/.local/state/tieredkv/keys.",
    )
    disk_master_key: FilePath | None = _cache(
        None,
        "File of the master key, 32 bytes that only its owner can read. By default one is made at "
        "the first start, and its path is printed.",
    )
    disk_master_key_command: str | None = _cache(
        None, "Command that prints the master key, for a key service. It is never remembered."
    )
    hash_algo: HashAlgo = _cache(
        "sha256",
        "Hash that names blocks. `xxh3_128` is faster and safe only where one tenant is trusted.",
    )
    isolate_by: IsolateBy = _cache(
        "salt",
        "What keeps cached prompts apart: nothing, the API key, the key and `cache_salt`, or "
        "these and `prompt_cache_key`.",
    )
    default_retention: str = _cache(
        "in_memory",
        "Retention of requests that name none: `in_memory`, `24h` or a policy of the config file.",
    )
    max_retention: str | None = _cache(
        None, "Longest retention that requests may ask for. By default they may ask for any."
    )
    min_cache_tokens: int = _cache(
        0,
        "Prompts with fewer tokens are not cached. OpenAI's minimum is 1024; 0 caches from "
        "one block on.",
    )
    restore: Restore = _cache(
        "auto",
        "What is done with blocks that only host memory or disk has. `auto` loads the tail of a "
        "prefix while its head is computed, so that both meet as early as possible. `load` loads "
        "all of them, and `compute` none.",
    )
    load_timeout: Seconds = _cache(30.0, "A block that takes longer to load is computed instead.")
    drain_timeout: Seconds = _cache(
        30.0, "Longest time at a stop to write to disk what `24h` requests were promised."
    )
    sweep_interval: Seconds = _cache(10.0, "Expired blocks are erased from disk within this time.")

    max_num_seqs: int = _scheduler(256, "Most requests that run at once.")
    max_num_batched_tokens: int | None = _scheduler(
        None,
        "Most prompt tokens that a step computes. By default 8192 on a GPU, twice as many "
        "for a request that runs alone, and 2048 on a CPU.",
    )
    max_num_queued_reqs: int = _scheduler(
        1024, "Most requests that wait. Further ones are answered with status 429."
    )

    host: str = _server(
        "127.0.0.1", "Address to listen on. One that others can reach needs API keys."
    )
    port: int = _server(8000, "Port to listen on. 0 takes a free one.")
    allowed_hosts: tuple[str, ...] = _server(
        (),
        "Host name that requests may name besides localhost and the address itself, or `*` for "
        "any. By default any name where clients need keys or others reach the address, else none.",
    )
    cors_origins: tuple[str, ...] = _server(
        (),
        "Web origin whose pages may use the API from a browser, such as http://localhost:3000, or "
        "`*` for any. By default none may.",
    )
    api_keys: tuple[str, ...] = _server(
        (), "Key that clients must present. Each key is a tenant of its own.", is_secret=True
    )
    idle_timeout: Seconds = _server(
        75.0,
        "A connection without a request is closed after this time. A proxy in front of the server "
        "must close its own sooner, or it answers 502 now and then.",
    )
    max_body_size: Bytes | None = _server(
        None,
        "Longest body of a request, to which the data of its pictures and files may add 64 MiB. By "
        "default 1 MiB and 32 bytes for each token of context.",
    )
    canonical_tools: Switch = _server(
        "off", "Whether the keys of each tool's JSON are sorted, so that equal tools share blocks."
    )
    allow_special_in_content: Switch = _server(
        "off",
        "Whether special tokens spelled out in messages count as these tokens. Otherwise they are "
        "text.",
    )
    chat_template_kwargs: TemplateArguments = _server(
        "{}",
        "Arguments for the chat template in every conversation, such as `enable_thinking`. A "
        "request's own `chat_template_kwargs` take precedence.",
    )
    template_date: TemplateDate | None = _server(
        None,
        "Date that the chat template is told while the server runs: a day such as 2025-06-30, or "
        "`start` for the day of the start. By default that of each request.",
    )
    tool_parser: str = _server(
        "auto",
        "How the model writes calls of tools: a family of models, `none`, or `auto` by its chat "
        "template.",
    )
    reasoning_parser: str = _server(
        "auto",
        "How the model writes its thoughts: a family of models, `none`, or `auto` by its chat "
        "template.",
    )
    drop_billing_header: Switch = _server(
        "on",
        "Whether the system block that Claude Code adds for its own billing is left out of "
        "prompts. It changes with each session, so that nothing behind it could be found again.",
    )
    stored_responses_size: Bytes = _server(
        64 << 20,
        "Host memory for responses that clients may ask for again or continue by "
        "`previous_response_id`, each for an hour. 0 stores none.",
    )
    grammar_timeout: Seconds = _server(
        10.0, "A grammar or schema for answers that takes longer to compile is refused."
    )
    remembered_answers_size: Bytes = _server(
        32 << 20,
        "Host memory for the token ids of answers. With them the next turn of a conversation finds "
        "the answer's blocks, even if its text would be encoded to other ids. 0 remembers none.",
    )
    images: Images = _server(
        "note",
        "Whether an image in a conversation becomes a short note in the prompt (`note`), so that "
        "one screenshot does not end a session, or is refused (`refuse`). No image is read.",
    )
    access_log: AccessLog = _server(
        "off",
        "Whether a line of JSON is written to stdout for each request: its id, tenant, endpoint, "
        "status, tokens, where cached tokens came from, and times, but no text.",
    )
    anthropic_implicit: Switch = _server(
        "on", "Whether `/v1/messages` also caches prompts without `cache_control`."
    )
    cache_lookback: int = _server(
        0,
        "How many content blocks before a `cache_control` marker a hit may end. 0 means anywhere.",
    )
    api_keys_file: FilePath | None = _server(
        None, "TOML file of API keys, with a table for each. SIGHUP reads it again."
    )
    admin_key: str | None = _server(
        None, "Key that opens /admin, and that the page at /ui asks for.", is_secret=True
    )
    metrics_key: MetricsKey = _server(
        "auto",
        "Whether /metrics needs a key. With `auto` it does unless the server listens on "
        "loopback only.",
    )
    metric_labels: tuple[str, ...] = _server(
        ("route", "prefix_version"),
        "Fields of a request's `metadata` by which its metrics are labelled.",
    )

    kv_events: Switch = _server(
        "off",
        "Whether KV cache events are published over ZeroMQ, as vLLM does: which blocks each tier "
        "gets and loses, and their token ids. Routers use them.",
    )
    kv_events_endpoint: str = _server(
        "tcp://127.0.0.1:5557",
        "Address to publish events at, tcp://ADDRESS:PORT or ipc://PATH. Whoever reaches it can "
        "read prompts.",
    )
    kv_events_replay_endpoint: str | None = _server(
        None,
        "Address at which subscribers ask for events that they missed, such as "
        "tcp://127.0.0.1:5558. By default there is none.",
    )
    kv_events_topic: str = _server("", "Topic of the events, to which subscribers subscribe.")
    kv_events_buffer_steps: int = _server(
        10_000, "Most batches of events that are kept for replay. A step makes one batch."
    )
    kv_events_max_queue_size: int = _server(
        10_000,
        "Most batches that wait to be sent, in the engine and for each subscriber. Further ones "
        "are dropped, which gaps in their numbers show.",
    )
    kv_events_namespaces: EventNamespaces = _server(
        "open",
        "Which blocks are announced: those of requests without API key, `cache_salt` or other "
        "isolation (`open`), or `all`.",
    )

    policies: tuple[RetentionPolicy, ...] = _setting("", DEFAULT_POLICIES, "Retention policies.")
    clock_offset_file: str | None = _setting("", None, "Turns the clock, for tests only.")
    tenant_shares: Mapping[str, float] = field(default_factory=dict, metadata={"section": ""})

    def __post_init__(self) -> None:
        for setting in fields(self):
            name, value = setting.name, getattr(self, setting.name)
            is_allowed, what = _RANGES.get(name, _AT_LEAST_0 if setting.default == 0 else _ABOVE_0)
            if get_origin(setting.type) is Literal:
                _check_one_of(name, value, get_args(setting.type))
            elif type(value) in (int, float) and not is_allowed(value):
                raise ConfigError(f"`{name}` = {value} must be {what}")
            elif setting.type == (FilePath | None) and "\0" in (value or ""):
                shown = value.replace("\0", "\\0")
                raise ConfigError(f"`{name}` = `{shown}` has a zero byte, which no path can have")
        if not all(key.strip() for key in self.api_keys):
            raise ConfigError(
                "`api_keys` holds an empty key, which would let everybody in; remove it"
            )
        if self.admin_key is not None and not self.admin_key.strip():
            raise ConfigError("`admin_key` is blank; give a key or leave the setting out")
        for name, form, what in (
            ("allowed_hosts", _HOST, "a name without port, e.g. kv.example.com, or *"),
            ("cors_origins", _ORIGIN, "an origin without path, e.g. https://example.com, or *"),
        ):
            for value in getattr(self, name):
                if value != "*" and not form.fullmatch(value):
                    raise ConfigError(f"`{name}`: `{value}` is not {what}")
        if "" in self.served_names:
            told = f"`served_model_name` = `{self.served_model_name}`"
            raise ConfigError(f"{told} holds an empty name; separate names by single commas")
        for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
            if (value := getattr(self, name)) is not None and not _EVENTS.fullmatch(value):
                what = "an address such as tcp://127.0.0.1:5557 or ipc:///run/kv-events"
                raise ConfigError(f"`{name}`: `{value}` is not {what}")
        shares = [*self.tenant_shares.values()]
        if not (sum(shares) <= 1 and min(shares, default=0) >= 0):
            what = "at least 0 each and at most 1 in all"
            raise ConfigError(f"`tenant_shares` = {shares} must be {what}")
        parse_template_arguments(self.chat_template_kwargs)
        parse_template_date(self.template_date or "")
        parse_at("`rope_scaling`", parse_rope_scaling, self.rope_scaling or "")
        names = [policy.name for policy in self.policies]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"`policies`: two policies are called `{name}`; rename one")
        _check_one_of("default_retention", self.default_retention, names)
        _check_one_of("max_retention", self.max_retention, (None, *names))

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names by which requests may name the model; () for the model as it was given."""
        names = self.served_model_name.split(",") if self.served_model_name else ()
        return tuple(dict.fromkeys(name.strip() for name in names))

    def retention_policies(self) -> RetentionPolicies:
        """Return the policies that requests may choose among."""
        return RetentionPolicies(self.policies)

    def resolve_max_num_batched_tokens(self, device: str) -> int:
        """Return the token budget of a step on this device."""
        return self.max_num_batched_tokens or (8192 if device == "cuda" else 2048)

    def resolve_max_num_alone_tokens(self, device: str) -> int:
        """Return the token budget of a step whose only request has no other request beside it."""
        return self.max_num_batched_tokens or (16384 if device == "cuda" else 2048)

    def check_server(self) -> None:
        """Refuse settings that are fine for one trusted user but not for a server.

        Raises:
            ConfigError: the fast hash, which is not collision-resistant, together with isolation.
        """
        if self.hash_algo == "xxh3_128" and self.isolate_by != "none":
            raise ConfigError(
                "`hash_algo` = xxh3_128 is not collision-resistant and cannot keep tenants apart; "
                f"use sha256, or isolate_by = none instead of {self.isolate_by}"
            )


_KNOWN: dict[str, Any] = {it.name: it for it in fields(Settings) if it.metadata["section"]}
"""The fields that have one value in one TOML section, by name."""


_SECRET_VARIABLES = {
    ENVIRONMENT_PREFIX + name.upper() for name, it in _KNOWN.items() if it.metadata["is_secret"]
}


def child_environment() -> dict[str, str]:
    """Return the environment for a child process: that of this process without the secrets."""
    return {name: value for name, value in os.environ.items() if name not in _SECRET_VARIABLES}


class LoadedSettings(NamedTuple):
    """Settings, and where each field's value came from."""

    settings: Settings
    sources: dict[str, str]

    def given(self) -> dict[str, Any]:
        """Return the settings that were given by any source but the defaults, by field name."""
        told = [name for name, source in self.sources.items() if source != "default"]
        names = {"policies" if name.startswith("retention.") else name for name in told}
        return {name: getattr(self.settings, name) for name in names}

    def describe(self) -> Iterator[tuple[str, str, Any, str, str]]:
        """Yield section, name, value, its text for people, and source; secrets are not shown."""
        for name, setting in _KNOWN.items():
            value = getattr(self.settings, name)
            if setting.metadata["is_secret"] and value is not None:
                value = f"{len(value)} configured" if isinstance(value, tuple) else "configured"
            text = value if isinstance(value, str | None) else kind_of(setting).show(value)
            yield setting.metadata["section"], name, value, text or "", self.sources[name]
        for policy in self.settings.policies:
            idle, absolute = map(format_duration, (policy.idle_s, policy.absolute_s))
            tiers = [tier for tier in Tier if tier in policy.tiers]
            text = f"idle {idle}, absolute {absolute}, tiers {' '.join(tiers)}"
            value = {"idle_s": policy.idle_s, "absolute_s": policy.absolute_s, "tiers": tiers}
            section = f"retention.{policy.name}"
            yield section, "policy", value, text, self.sources.get(section, "default")


def load_settings(
    *,
    arguments: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    config_path: str | os.PathLike[str] | None = None,
) -> LoadedSettings:
    """Read the settings from arguments, environment, file and defaults.

    Args:
        arguments: values by field name; None counts as not given, strings are parsed.
        environ: environment variables; those of this process if None.
        config_path: path of a TOML file; None for no file.

    Raises:
        ConfigError: an unknown key (the nearest known one is named), or a value that is malformed
            or out of range.
    """
    environ = os.environ if environ is None else environ
    values, sources = dict[str, Any](), dict.fromkeys(_KNOWN, "default")
    policies = {policy.name: policy for policy in DEFAULT_POLICIES}

    def take(name: str, value: object, where: str, source: str) -> None:
        setting = _KNOWN[name]
        try:
            values[name] = parse_at(where, kind_of(setting).parse, value)
        except ConfigError:
            if setting.metadata["is_secret"]:  # the original message would show the value
                what = "a list of texts" if setting.type == tuple[str, ...] else "a text"
                raise ConfigError(f"{where} is not {what}") from None
            raise
        sources[name] = source

    for section, name, value in _read_toml(config_path) if config_path is not None else ():
        where, source = f"`{config_path}`: `{section}.{name}`", f"file {config_path}"
        if section == "retention":
            policies[name] = read_policy(where, name, value, _hint)
            sources[f"retention.{name}"] = source
        else:
            take(name, value, where, source)
    for name in _KNOWN:
        if (variable := ENVIRONMENT_PREFIX + name.upper()) in environ:
            take(name, environ[variable], f"variable `{variable}`", f"environment {variable}")
    values["policies"] = tuple(policies.values())
    for name, value in (arguments or {}).items():
        if name == "policies":
            values[name] = check_policies(value)
            sources |= {f"retention.{policy.name}": "argument" for policy in values[name]}
        elif name not in _KNOWN:
            raise ConfigError(f"unknown setting `{name}`{_hint(name, _KNOWN)}")
        elif value is not None:
            take(name, value, f"`{name}`", "argument")
    values["clock_offset_file"] = environ.get(CLOCK_OFFSET_VARIABLE) or None
    return LoadedSettings(Settings(**values), sources)


def _read_toml(path: str | os.PathLike[str]) -> Iterator[tuple[str, str, Any]]:
    """Yield section, key and value of each setting in a file; unknown keys are refused."""
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read `{path}`: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"`{path}` is not valid TOML: {error}") from error
    known: dict[str, list[str]] = {}
    for name, setting in _KNOWN.items():
        known.setdefault(setting.metadata["section"], []).append(name)
    for section, table in document.items():
        if section not in (sections := [*known, "retention"]):
            what = f"unknown section `{section}`{_hint(section, sections)}"
            if not isinstance(table, dict):
                what = f"`{section}` is outside of any section{_hint(section, _KNOWN)}"
            raise ConfigError(f"`{path}`: {what}")
        if not isinstance(table, dict):
            raise ConfigError(f"`{path}`: `{section}` must be one table, headed `[{section}]`")
        for name, value in table.items():
            if name not in known.get(section, table):
                hint = _hint(name, known[section])
                raise ConfigError(f"`{path}`: unknown key `{section}.{name}`{hint}")
            yield section, name, value


def _hint(name: str, known: Iterable[str]) -> str:
    """Return a hint: the section of a known setting, the nearest known name, or all of them."""
    if name in _KNOWN:
        return f"; it belongs to section `{_KNOWN[name].metadata['section']}`"
    matches = difflib.get_close_matches(name, [*known], n=1, cutoff=0.5)
    return f"; did you mean `{matches[0]}`?" if matches else f"; known names are {', '.join(known)}"


def _check_one_of(name: str, value: object, allowed: Any) -> None:
    if value not in allowed:
        raise ConfigError(f"`{name}` = `{value}` must be one of {', '.join(filter(None, allowed))}")
