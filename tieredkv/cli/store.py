"""`tieredkv df`, `ls`, `evict` and `verify`, on a running server or a stopped store."""

import functools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec.structs import replace

from tieredkv.bench.progress import terminal_progress
from tieredkv.cli.output import Answer, Listing, answering, as_text, usage_error
from tieredkv.cli.settings import settings_options
from tieredkv.config import LoadedSettings
from tieredkv.storage.calls import EvictFilter, Inspect, Ls
from tieredkv.storage.control import StoreControl, document
from tieredkv.storage.results import MIN_ID_DIGITS, BlockInfo, ChainInfo, short_id
from tieredkv.types import Tier
from tieredkv.units import format_bytes, format_duration, parse_duration

SHORT_HEX = 12
SIZES = ("live", "files", "budget", "written", "written_ever", "write_limit")


commands: list[click.Command] = []
"""One for each verb of `storage.calls`."""


def store_verb(verb: Callable[..., Answer | Listing]) -> click.Command:
    """Make a command of a function that gets the store in `--disk-dir`."""

    @functools.wraps(verb)
    def ask(*, loaded: LoadedSettings, **options: Any) -> Answer | Listing:
        folder, clock_offset_file = loaded.settings.disk_dir, loaded.settings.clock_offset_file
        if folder is None:
            raise usage_error("Missing option '--disk-dir'.")
        if not Path(folder).is_dir():
            raise usage_error(f"`{folder}` is not a folder; give the folder of the store.")
        return verb(StoreControl(folder, clock_offset_file=clock_offset_file), **options)

    command: click.Command = click.command()(settings_options("disk_dir")(answering(ask)))
    commands.append(command)
    return command


@store_verb
def df(store: StoreControl) -> Answer:
    """Show how many blocks and bytes each tier holds.

    While the server is stopped, only the disk tier holds anything.

    \b
    Example:
      tieredkv df --disk-dir ./kv
    """
    answer, rows, lines = store.df(), [], []
    for tier in Tier:
        stats = answer.get(tier) or {}
        sizes = {key: stats.get(f"bytes_{key}") for key in SIZES}
        shown = {key: None if size is None else format_bytes(size) for key, size in sizes.items()}
        rows.append({"tier": tier, "blocks": stats.get("blocks"), **shown})
    if (disk := answer["disk"])["is_compressing"]:
        ratio, rates = disk["compression_ratio"], ("compression_rate", "decompression_rate")
        packs, unpacks = (format_bytes(int(disk[rate])) for rate in rates)
        speed = f"a thread compresses {packs}/s and decompresses {unpacks}/s"
        lines.append(f"compression: {disk['compression']}, ratio {ratio:.2f}; {speed}")
    writer = answer.get("writer_pid")
    lines.append(f"writer: pid {writer}" if writer else "writer: none; the server is stopped")
    return Answer(answer, rows, lines, texts=1)


@store_verb
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="List at most N chains.")
def ls(store: StoreControl, limit: int | None) -> Listing:
    """List the chains of blocks on disk, the most recently used first.

    A chain is a prompt's blocks up to one that no other block follows. `evict` takes the ids.

    \b
    Examples:
      tieredkv ls --disk-dir ./kv
      tieredkv ls --disk-dir ./kv --limit 20
    """
    call, now = Ls(limit=limit), time.time()

    def as_row(chain: ChainInfo) -> dict[str, object]:
        return {
            "id": short_id(chain.id, SHORT_HEX),
            "namespace": chain.namespace[:SHORT_HEX],
            "retention": chain.retention,
            "blocks": chain.blocks,
            "size": format_bytes(chain.bytes),
            "ratio": chain.bytes / chain.stored_bytes,
            "idle": format_duration(max(0.0, now - chain.last_used)),
            "expires in": format_duration(max(0.0, chain.expires_at_min - now)),
            "hits": chain.hits,
        }

    as_json = functools.partial(document, call)
    return Listing(store.pages(call), as_json, as_row, "nothing is stored", texts=3)


@store_verb
@click.argument("id", metavar="ID")
@click.option(
    "--following",
    is_flag=True,
    help="Show the blocks behind the named one too, with all branches; this reads the whole index.",
)
def inspect(store: StoreControl, id: str, following: bool) -> Answer:
    """Show a chain block by block: in which tiers each is, how old, and until when.

    ID is one of `ls`, or the first digits of a block's hash. The chain is shown from its first
    block to the last one that ID names. Tokens are never shown, since no tier stores them.

    \b
    Examples:
      tieredkv inspect --disk-dir ./kv 1f9c0a77d2e4-83b0c91e55aa
      tieredkv inspect --disk-dir ./kv 1f9c0a77d2e4 --following
    """
    call = Inspect(id=id, following=following)
    call.check()
    blocks = [block for page in store.pages(call) for block in page]
    now, rows = time.time(), list[dict[str, object]]()
    for label, block in zip(tree_labels(blocks), blocks, strict=True):
        rows.append(
            {
                "block": label,
                "hash": block.block_hash[:SHORT_HEX],
                "tiers": " ".join(block.tiers),
                "codec": block.codec,
                "size": format_bytes(block.size_bytes),
                "age": format_duration(max(0.0, now - block.computed_at)),
                "idle": format_duration(max(0.0, now - block.last_used)),
                "expires in": format_duration(max(0.0, block.expires_at - now)),
                "hits": block.hits,
            }
        )
    whose = {(block.namespace[:SHORT_HEX], block.root[:SHORT_HEX]) for block in blocks}
    lines = [f"namespace {namespace}, root {root}" for namespace, root in sorted(whose)]
    return Answer({"chain": msgspec.to_builtins(blocks)}, rows, lines, texts=2)


def tree_labels(blocks: Sequence[BlockInfo]) -> Iterator[str]:
    """Yield the position of each block, behind lines that show where chains branch.

    Each block must come after the one that it follows, branch by branch.
    """
    last = {block.parent_hash: block for block in blocks}
    num_children = Counter(block.parent_hash for block in blocks)
    lines: dict[str, str] = {}  # before the blocks that follow a block
    for block in blocks:
        above, mark, below = lines.get(block.parent_hash, ""), "", ""
        if num_children[block.parent_hash] > 1:
            is_last = block is last[block.parent_hash]
            mark, below = ("└─ ", "   ") if is_last else ("├─ ", "│  ")
        lines[block.block_hash] = above + below
        yield f"{above}{mark}{block.position}"


@store_verb
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--all", is_flag=True, help="Evict every block.")
@click.option(
    "--older-than",
    "older_than_s",
    metavar="DURATION",
    help="Evict blocks that were not used for this long, such as 2h.",
)
@click.option(
    "--ns",
    "namespace_prefix",
    metavar="HEX",
    help="Evict the blocks of the namespaces that begin with this.",
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option(
    "--dry-run", is_flag=True, help="Say what would be evicted from disk, and change nothing."
)
def evict(store: StoreControl, yes: bool, **filters: Any) -> Answer:
    """Evict blocks from every tier: chains by their ID, or the blocks that a filter selects.

    `ls` prints the IDs. An ID stays good while the first or the last block that only this chain
    uses is stored. Blocks that other chains use stay.

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
        raise usage_error("--all cannot be combined with an ID, --ns or --older-than.")
    if not (yes or wanted.dry_run):
        if not sys.stdin.isatty():
            raise usage_error(
                "There is no terminal to confirm on; give -y to evict without asking."
            )
        click.confirm("Evict these blocks from every tier?", abort=True, err=True)
    answer = store.evict(wanted)
    for unknown in answer["unknown_ids"]:
        is_short = len(unknown) < MIN_ID_DIGITS
        hint = f"an id needs at least {MIN_ID_DIGITS} digits" if is_short else "`ls` lists the ids"
        click.echo(f"error: no chain has the id `{unknown}`\nhint: {hint}", err=True)
    verb, freed = "evicted", format_bytes(answer["freed_bytes"])
    if wanted.dry_run:
        verb, answer = "would evict", {**answer, "dry_run": True}
    lines = [f"{verb} {answer['evicted_blocks']} blocks, {freed}"]
    return Answer(answer, lines=lines, is_problem=bool(answer["unknown_ids"]))


@store_verb
@click.option("--no-repair", is_flag=True, help="Count bad blocks and leave them in the store.")
def verify(store: StoreControl, no_repair: bool) -> Answer:
    """Read every block on disk and compare it with its checksums.

    Bad blocks are deleted, so that they are computed again when a prompt needs them. The exit code
    is 1 if a block was bad.

    \b
    Example:
      tieredkv verify --disk-dir ./kv
    """
    progress = functools.partial(terminal_progress(), "verifying")
    answer = store.verify(repair=not no_repair, progress=progress)
    return Answer(answer, lines=[as_text(answer)], is_problem=answer["bad"] > 0)
