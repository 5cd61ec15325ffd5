"""`tieredkv df`, `ls`, `evict` and `verify`, on a running server or a stopped store."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import click
from msgspec.structs import replace

from tieredkv.bench.progress import terminal_progress
from tieredkv.cli.output import Command, as_text, json_option, print_json, print_table, usage_error
from tieredkv.cli.settings import settings_options
from tieredkv.clock import Clock
from tieredkv.config import LoadedSettings, Settings
from tieredkv.storage.control import StoreControl
from tieredkv.storage.results import EvictFilter
from tieredkv.types import Tier
from tieredkv.units import format_bytes, format_duration, parse_duration

SHORT_HEX = 12
SIZES = ("live", "files", "budget", "written", "written_ever", "write_limit")


def _store_options(command: Command) -> Any:
    return settings_options("disk_dir")(json_option(command))


def _control(settings: Settings) -> StoreControl:
    """Return the verbs of the store that the settings name."""
    if settings.disk_dir is None:
        raise usage_error("Missing option '--disk-dir'.")
    if not Path(settings.disk_dir).is_dir():
        raise usage_error(f"`{settings.disk_dir}` is not a folder.")
    return StoreControl(settings.disk_dir, clock_offset_file=settings.clock_offset_file)


@click.command()
@_store_options
def df(loaded: LoadedSettings, as_json: bool) -> None:
    """Show what each tier holds.

    The tiers of a server that does not run are empty; its disk is there.

    \b
    Example:
      tieredkv df --disk-dir ./kv
    """
    answer = _control(loaded.settings).df()
    if as_json:
        print_json(answer)
        return
    rows = []
    for tier in Tier:
        stats = answer.get(tier) or {}
        sizes = {key: stats.get(f"bytes_{key}") for key in SIZES}
        shown = {key: None if size is None else format_bytes(size) for key, size in sizes.items()}
        rows.append({"tier": tier, "blocks": stats.get("blocks"), **shown})
    print_table(rows, texts=1)
    if (disk := answer["disk"])["is_compressing"]:
        ratio, rates = disk["compression_ratio"], ("compression_rate", "decompression_rate")
        packs, unpacks = (format_bytes(int(disk[rate])) for rate in rates)
        speed = f"a thread packs {packs}/s and unpacks {unpacks}/s"
        click.echo(f"compression: {disk['compression']}, ratio {ratio:.2f}; {speed}")
    writer = answer.get("writer_pid")
    click.echo(f"writer: pid {writer}" if writer else "writer: none, the server is stopped")


@click.command()
@_store_options
def ls(loaded: LoadedSettings, as_json: bool) -> None:
    """List the prefix chains on disk, the last used first.

    \b
    Example:
      tieredkv ls --disk-dir ./kv
    """
    answer = _control(loaded.settings).ls()
    if as_json:
        print_json(answer)
        return
    if not answer["chains"]:
        click.echo("nothing is stored")
        return
    now = Clock(loaded.settings.clock_offset_file).now()
    rows = [
        {
            "id": chain["id"][:SHORT_HEX],
            "namespace": chain["namespace"][:SHORT_HEX],
            "retention": chain["retention"],
            "blocks": chain["blocks"],
            "size": format_bytes(chain["bytes"]),
            "ratio": chain["bytes"] / chain["stored_bytes"],
            "idle": format_duration(max(0.0, now - chain["last_used_max"])),
            "expires in": format_duration(max(0.0, chain["expires_at_min"] - now)),
            "hits": chain["hits"],
        }
        for chain in answer["chains"]
    ]
    print_table(rows, texts=3)


@click.command()
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--all", is_flag=True, help="Every block.")
@click.option(
    "--older-than", "older_than_s", metavar="DURATION", help="Blocks unused for so long, e.g. 2h."
)
@click.option(
    "--ns", "namespace_prefix", metavar="HEX", help="Blocks of a namespace, or its beginning."
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Only say what would go from disk; change nothing.")
@_store_options
def evict(loaded: LoadedSettings, yes: bool, as_json: bool, **filters: Any) -> int:
    """Drop blocks from every tier: chains by ID, or those that a filter means.

    \b
    Examples:
      tieredkv evict --disk-dir ./kv 1f9c0a77d2e4
      tieredkv evict --disk-dir ./kv --older-than 2h -y
    """
    if filters["older_than_s"] is not None:
        filters["older_than_s"] = parse_duration(filters["older_than_s"])
    wanted, nothing = EvictFilter(**filters), EvictFilter(dry_run=filters["dry_run"])
    if wanted == nothing:
        raise usage_error("Say what to evict: an ID, --ns, --older-than or --all.")
    if wanted.all and wanted != replace(nothing, all=True):
        raise usage_error("--all does not go together with another choice.")
    control = _control(loaded.settings)
    if not (yes or wanted.dry_run):
        if not sys.stdin.isatty():
            raise usage_error("Nobody is there to confirm; give -y.")
        click.confirm("Evict these blocks from every tier?", abort=True, err=True)
    answer = control.evict(wanted)
    if as_json:
        print_json({**answer, "dry_run": True} if wanted.dry_run else answer)
    else:
        verb = "would evict" if wanted.dry_run else "evicted"
        freed = format_bytes(answer["freed_bytes"])
        click.echo(f"{verb} {answer['evicted_blocks']} blocks, {freed}")
    for unknown in answer["unknown_ids"]:
        click.echo(f"error: no chain has the id `{unknown}`", err=True)
    return 1 if answer["unknown_ids"] else 0


@click.command()
@click.option("--no-repair", is_flag=True, help="Count bad blocks, but leave them in the store.")
@_store_options
def verify(loaded: LoadedSettings, no_repair: bool, as_json: bool) -> int:
    """Read every block on disk and compare it with its checksums; exit 1 if one is bad.

    Bad blocks are deleted, so that they are computed again when they are wanted.

    \b
    Example:
      tieredkv verify --disk-dir ./kv
    """
    control = _control(loaded.settings)
    progress = partial(terminal_progress(), "verifying")
    answer = control.verify(repair=not no_repair, progress=progress)
    if as_json:
        print_json(answer)
    else:
        click.echo(as_text(answer))
    return 1 if answer["bad"] else 0
