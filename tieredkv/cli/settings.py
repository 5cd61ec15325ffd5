"""Settings on the command line: one flag per setting, and `tieredkv config show`.

Flags are generated from the settings, so that every setting has a flag. `load_settings` gets a
flag's text unchanged; it parses and checks the text and names the setting in errors.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args, get_origin

import click

from tieredkv.cli.output import Answer, Command, answering
from tieredkv.config import LoadedSettings, Settings, load_settings
from tieredkv.kinds import kind_of

FILE = click.Path(dir_okay=False)
_SPELLINGS = {
    "allowed_hosts": ("--allowed-host",),
    "api_keys": ("--api-key",),
    "cors_origins": ("--cors-origin",),
    "host_size": ("--host-size", "--host-cache-size"),
    "device_size": ("--device-size", "--device-cache-size"),
    "disk_dir": ("--disk-dir", "--disk-cache-dir"),
    "disk_size": ("--disk-size", "--disk-cache-size"),
    "default_retention": ("--default-retention", "--retention"),
    "hash_algo": ("--hash-algo", "--prefix-caching-hash-algo"),
}


def settings_options(*names: str, without: Iterable[str] = ()) -> Callable[[Command], Any]:
    """Add `--config` and a flag for each setting in `names`, which are settings or sections.

    The command gets the parameter `loaded`, the settings from flags, environment and file, in place
    of the parameters that are named as settings.
    """
    fields = [
        setting
        for setting in dataclasses.fields(Settings)
        if {setting.name, setting.metadata["section"]} & {*names}
        and setting.name not in ("model", *without)
    ]

    def add(command: Command) -> Any:
        @functools.wraps(command)
        def load_first(*, config_path: str | None, **options: Any) -> Any:
            told = {name: options.pop(name) for name in Settings.__slots__ if name in options}
            given = {name: value for name, value in told.items() if value != ()}
            loaded = load_settings(arguments=given, config_path=config_path)
            return command(loaded=loaded, **options)

        for setting in reversed(fields):
            load_first = _option(setting)(load_first)
        text = "TOML file with further settings, such as configs/24h.toml."
        return click.option("--config", "config_path", type=FILE, help=text)(load_first)

    return add


def _option(setting: "dataclasses.Field[Any]") -> Callable[[Command], Command]:
    default, kind, text = setting.default, kind_of(setting), setting.metadata["help"]
    choices = get_args(setting.type) if get_origin(setting.type) is Literal else ()
    if kind.example:
        text = f"{text} For example {kind.example}."
    return click.option(
        *_SPELLINGS.get(setting.name, (f"--{setting.name.replace('_', '-')}",)),
        setting.name,
        type=click.Choice(choices) if choices else str,
        multiple=setting.type == tuple[str, ...],
        metavar=None if choices else kind.metavar,
        help=text,
        show_default=False if default in (None, "", ()) else kind.show(default),
    )


@click.group()
def config() -> None:
    """Show the settings and where their values come from."""


@config.command()
@click.argument("model", required=False)
@settings_options("model", "cache", "scheduler", "server")
@answering
def show(loaded: LoadedSettings) -> Answer:
    """Show every setting and where its value comes from.

    It takes the flags of `serve`, so that a command line can be tried out. Each value is a flag's,
    an environment variable's (`TIEREDKV_PORT`), the config file's or the default.

    \b
    Example:
      TIEREDKV_PORT=8080 tieredkv config show --config configs/24h.toml
    """
    rows, settings, policies = [], dict[str, Any](), dict[str, Any]()
    for section, name, value, text, source in loaded.describe():
        rows.append({"section": section, "setting": name, "value": text, "from": source})
        if name == "policy":
            policies[section.removeprefix("retention.")] = value
        else:
            settings[name] = {"value": value, "source": source}
    return Answer({"settings": settings, "retention": policies}, rows)
