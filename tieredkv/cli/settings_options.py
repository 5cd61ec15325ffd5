"""Flags for settings, made from the settings themselves, so that neither can forget the other.

A flag's text goes to `load_settings` as it is, which parses it, checks it and names it in errors.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, get_args, get_origin

import click

from tieredkv.cli.output import Command
from tieredkv.config import Settings, kind_of, load_settings

_SPELLINGS = {
    "api_keys": ("--api-key",),
    "host_size": ("--host-size", "--host-cache-size"),
    "device_size": ("--device-size", "--device-cache-size"),
    "disk_dir": ("--disk-dir", "--disk-cache-dir"),
    "disk_size": ("--disk-size", "--disk-cache-size"),
    "default_retention": ("--default-retention", "--retention"),
    "hash_algo": ("--hash-algo", "--prefix-caching-hash-algo"),
}
_EXAMPLES = {
    "api_keys": "sk-team-a; repeatable",
    "device_size": "8GiB",
    "disk_dir": "/nvme/kv",
    "disk_size": "500GiB",
    "disk_write_limit": "200MiB",
    "drain_timeout": "2m",
    "dtype": "bfloat16",
    "host": "0.0.0.0",
    "host_size": "64GiB",
    "load_timeout": "5s",
    "max_model_len": "32768",
    "max_num_batched_tokens": "4096",
    "port": "8080",
    "served_model_name": "llama",
    "sweep_interval": "60s",
}
_LITERALS = {"auto", "sha256"}

disk_dir_option = click.option(
    "--disk-dir", metavar="DIR", help="Folder of the disk tier, e.g. /nvme/kv."
)
_config_option = click.option(
    "--config",
    "config_path",
    type=click.Path(dir_okay=False),
    help="TOML file with further settings, e.g. configs/24h.toml.",
)


def settings_options(*sections: str, without: Iterable[str] = ()) -> Callable[[Command], Any]:
    """Give a command a flag for every setting of some sections, and `--config`.

    The command is called with `loaded`, the settings from its flags, the environment and the file,
    in place of all its parameters that are called as a setting is.
    """
    fields = [
        setting
        for setting in dataclasses.fields(Settings)
        if setting.metadata["section"] in sections and setting.name not in {"model", *without}
    ]

    def add(command: Command) -> Any:
        @functools.wraps(command)
        def load_first(*, config_path: str | None, **options: Any) -> Any:
            told = {name: options.pop(name) for name in Settings.__slots__ if name in options}
            given = {name: value for name, value in told.items() if value not in (None, ())}
            loaded = load_settings(arguments=given, config_path=config_path)
            return command(loaded=loaded, **options)

        for setting in reversed(fields):
            load_first = _option(setting)(load_first)
        return _config_option(load_first)

    return add


def _option(setting: "dataclasses.Field[Any]") -> Callable[[Command], Command]:
    default = setting.default
    is_choice = get_origin(setting.type) is not None and isinstance(default, str)
    notes = []
    if default == ():
        notes.append("none by default")
    elif default not in (None, ""):
        shown = kind_of(setting).show(default)
        notes.append(f"default {shown.replace(' ', '')}")
    if setting.metadata["unit"]:
        notes.append(f"in {setting.metadata['unit']} or with a unit")
    if setting.name in _EXAMPLES:
        notes.append(f"e.g. {_EXAMPLES[setting.name]}")
    text = setting.metadata["help"]
    if text.split()[0].strip(",") not in _LITERALS:
        text = f"{text[0].upper()}{text[1:]}"
    return click.option(
        *_SPELLINGS.get(setting.name, (f"--{setting.name.replace('_', '-')}",)),
        setting.name,
        type=click.Choice(get_args(setting.type)) if is_choice else str,
        multiple=setting.type == tuple[str, ...],
        metavar=None if is_choice else kind_of(setting).metavar,
        help=f"{text} [{'; '.join(notes)}]." if notes else f"{text}.",
    )
