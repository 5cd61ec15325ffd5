"""`tieredkv config show`."""

import click
import msgspec

from tieredkv.cli.output import json_option, print_json, print_table
from tieredkv.cli.settings_options import settings_options
from tieredkv.config import LoadedSettings
from tieredkv.types import Tier


@click.group()
def config() -> None:
    """Settings: what they are and where they come from."""


@config.command()
@click.argument("model", required=False)
@settings_options("model", "cache", "scheduler", "server")
@json_option
def show(loaded: LoadedSettings, as_json: bool) -> None:
    """Show every setting and where its value comes from; takes the flags of `serve`.

    \b
    Example:
      TIEREDKV_PORT=8080 tieredkv config show --config configs/24h.toml
    """
    if not as_json:
        columns = ("section", "setting", "value", "from")
        print_table([dict(zip(columns, row, strict=True)) for row in loaded.describe()])
        return
    values = {
        name: {"value": loaded.shown(name), "source": source}
        for name, source in loaded.sources.items()
        if not name.startswith("retention.")
    }
    policies = {
        policy.name: {
            "idle_s": policy.idle_s,
            "absolute_s": policy.absolute_s,
            "tiers": [tier for tier in Tier if tier in policy.tiers],
        }
        for policy in loaded.settings.policies
    }
    print_json(msgspec.to_builtins({"settings": values, "retention": policies}))
