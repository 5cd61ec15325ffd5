"""Finds what carries out a verb: the worker of a store, or a running server."""

import errno
import os
from pathlib import Path
from typing import Any, Protocol

import click

from tieredkv.cli.output import usage_error
from tieredkv.config import LoadedSettings, Settings
from tieredkv.errors import StorageError
from tieredkv.operate.ask import StoreControl
from tieredkv.operate.calls import Call
from tieredkv.operate.verb import Asking

url_option = click.option(
    "--url",
    help="URL of a running server, without /v1, in place of --disk-dir. It needs the admin key of "
    "the server; better set TIEREDKV_ADMIN_KEY than --admin-key, which others can read.",
)


class Control(Protocol):
    """What carries out verbs: a store's worker, or a server."""

    def answer(self, call: Call) -> dict[str, Any]:
        """Return the answer of a verb without its list, if it has one."""

    def pages(self, call: Call) -> Asking:
        """Yield the list that a verb answers with, some items at a time; return the rest of it."""


def control_by(loaded: LoadedSettings, url: str | None) -> Control:
    """Return the control of the store in `--disk-dir`, or of the server at `--url`.

    Raises:
        UsageError: both are given, or none.
    """
    refuse_both(loaded, url)
    if url is not None:
        from tieredkv.cli.server_control import ServerControl  # loads httpx

        return ServerControl(url, loaded.settings.admin_key)
    if loaded.settings.disk_dir is None:
        what = "Missing option '--disk-dir' or '--url'."
        raise usage_error(f"{what} Give the folder of a store, or the URL of a running server.")
    return control_of(loaded.settings)


def refuse_both(loaded: LoadedSettings, url: str | None) -> None:
    """Refuse a command line with --disk-dir and --url; a folder of the environment is passed over.

    Raises:
        UsageError: both are given.
    """
    if url is not None and loaded.sources["disk_dir"] == "argument":
        raise usage_error("Give either --disk-dir or --url.")


def control_of(settings: Settings) -> StoreControl:
    """Return the control of the store in `--disk-dir`.

    Raises:
        UsageError: there is no such folder.
        StorageError: this account may not look into it.
    """
    if (folder := settings.disk_dir) is None:
        raise usage_error("Missing option '--disk-dir'.")
    hint = "hint: use the account that the store belongs to, which its server runs as"
    try:
        is_folder = Path(folder).is_dir()
    except OSError as error:
        raise StorageError(f"`{folder}` cannot be read: {error.strerror}\n{hint}") from error
    if not is_folder:
        raise usage_error(f"`{folder}` is not a folder; give the folder of the store.")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise StorageError(f"`{folder}` cannot be read: {os.strerror(errno.EACCES)}\n{hint}")
    return StoreControl(
        folder,
        clock_offset_file=settings.clock_offset_file,
        key_dir=settings.disk_key_dir,
        master_key=settings.disk_master_key,
        master_key_command=settings.disk_master_key_command,
    )
