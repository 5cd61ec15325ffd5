"""`tieredkv df`, `ls`, `evict`, `verify` and `rotate`, on a running server or a stopped store."""

import functools
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from tieredkv.bench.progress import terminal_progress
from tieredkv.cli.controls import Control, control_by, control_of, url_option
from tieredkv.cli.output import Answer, Listing, answering, as_text, usage_error
from tieredkv.cli.settings import settings_options
from tieredkv.cli.versions import told, untold_text
from tieredkv.config import LoadedSettings
from tieredkv.operate.ask import StoreControl, document
from tieredkv.operate.calls import Df, EvictFilter, Ls, Prune, Rotate, Verify
from tieredkv.operate.chain_ids import MIN_ID_DIGITS, short_id
from tieredkv.operate.infos import ChainInfo
from tieredkv.operate.verb import Asking
from tieredkv.storage.stats import Lifetimes
from tieredkv.types import TENANT_BYTES, Tier
from tieredkv.units import format_bytes, format_duration, parse_duration

SHORT_HEX = 12
NAMESPACE_HEX = 2 * TENANT_BYTES + 8
"""Digits of a namespace: those that all namespaces of its tenant begin with, and eight more."""

SIZES = ("live", "files", "budget", "written", "written_ever", "write_limit")


def store_verb(verb: Callable[..., Answer | Listing]) -> click.Command:
    """Make a command of a function that gets the store in `--disk-dir`."""

    @functools.wraps(verb)
    def ask(*, loaded: LoadedSettings, **options: Any) -> Answer | Listing:
        return verb(control_of(loaded.settings), **options)

    command: click.Command = click.command()(settings_options("disk_dir")(answering(ask)))
    return command


def tier_verb(verb: Callable[..., Answer | Listing]) -> click.Command:
    """Make a command of a function that gets a store by `--disk-dir` or a server by `--url`."""

    @functools.wraps(verb)
    def ask(*, loaded: LoadedSettings, url: str | None, **options: Any) -> Answer | Listing:
        return verb(control_by(loaded, url), **options)

    settings = settings_options("disk_dir", "admin_key")
    command: click.Command = click.command()(settings(url_option(answering(ask))))
    return command


@tier_verb
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Also show what each namespace holds on disk. This reads the whole index.",
)
def df(store: Control, verbose: bool) -> Answer:
    """Show how many blocks and bytes each tier holds, and how long the disk keeps them.

    While the server is stopped, only the disk tier holds anything. A stopped store is looked at and
    not changed; the exit code is 1 if it needs repair.

    A model whose layers have sliding windows keeps pages of these beside the blocks, for places
    where later requests may go on. `window pages` and `of windows` are their number and their part
    of `live`; with -v, `anchors` is the number of such places on disk.

    The second table has a row for each retention policy of blocks on disk. `expected` is the age at
    which blocks will leave the disk on average, at the write rate of the last one to two hours.
    `evicted` and `expired` count the blocks of the last one to two days. 1 % of the evicted ones
    were not older than `p1 age`, and half of them were not older than `p50 age`.

    \b
    Examples:
      tieredkv df --disk-dir ./kv
      tieredkv df --disk-dir ./kv -v
      tieredkv df --url http://gpu1:8000
    """
    answer, rows, lines = store.answer(Df(verbose=verbose)), [], []
    for tier in Tier:
        stats = answer.get(tier) or {}
        sizes = {key: stats.get(f"bytes_{key}") for key in SIZES}
        shown = {key: None if size is None else format_bytes(size) for key, size in sizes.items()}
        rows.append({"tier": tier, "blocks": stats.get("blocks"), **shown})
    if any((answer.get(tier) or {}).get("window_pages") for tier in Tier):
        for tier, row in zip(Tier, rows, strict=True):
            stats = answer.get(tier) or {}
            num_bytes = stats.get("window_bytes")
            row["window pages"] = stats.get("window_pages")
            row["of windows"] = None if num_bytes is None else format_bytes(num_bytes)
    disk = answer["disk"] or {}  # a server may have none
    if disk.get("is_compressing"):
        ratio, rates = disk["compression_ratio"], ("compression_rate", "decompression_rate")
        packs, unpacks = (format_bytes(int(disk[rate])) for rate in rates)
        speed = f"a thread compresses {packs}/s and decompresses {unpacks}/s"
        lines.append(f"compression: {disk['compression']}, ratio {ratio:.2f}; {speed}")
    if disk.get("encryption") == "no keys":
        lines.append("encryption: on, but the keys are not there, so no block can be read")
    elif disk.get("encryption", "off") != "off":
        lines.append(f"encryption: {disk['encryption']}, {disk['num_keys']} keys")
    writer = answer.get("writer_pid")
    if disk:
        is_down = "engine" in answer and not writer
        why = "the store worker of its server is down" if is_down else "the server is stopped"
        lines.append(f"writer: pid {writer}" if writer else f"writer: none; {why}")
    if disk.get("store_error"):
        lines.append(f"warning: the last blocks could not be stored: {disk['store_error']}")
    if num_others := disk.get("num_other_model"):
        what = "of another model, so that no request can use them"
        lines.append(f"other models: {_blocks(num_others)} at the start were {what}")
    lifetimes = told(disk, "lifetimes", Lifetimes)
    if lifetimes is not None and lifetimes.shortfall:
        lines.append(f"warning: the disk tier is too small: {lifetimes.shortfall}")
    parts = {**disk, "lifetimes": lifetimes}
    needed = ("lifetimes", "encryption", "is_compressing")
    if untold := [name for name in needed if disk and parts.get(name) is None]:
        lines.append(untold_text(untold))
    uses = [
        {
            "tenant": use["namespace"][: 2 * TENANT_BYTES],
            "namespace": use["namespace"][:NAMESPACE_HEX],
            "model": use["model"] or f"root {use['root'][:SHORT_HEX]}",
            "blocks": use["blocks"],
            "size": format_bytes(use["bytes"]),
            "idle": format_duration(max(0.0, time.time() - use["last_used"])),
        }
        for use in answer.get("namespaces", ())
    ]
    if any(use.get("anchor_bytes") for use in answer.get("namespaces", ())):
        for row, use in zip(uses, answer["namespaces"], strict=True):
            row["anchors"] = use.get("anchors")
            row["of windows"] = format_bytes(use.get("anchor_bytes", 0))
    more = [(_rows_of(lifetimes or Lifetimes()), 1), (uses, 3)]
    return with_needs(Answer(answer, rows, lines, texts=1, more=more), answer)


def with_needs(answer: Answer, body: Mapping[str, Any]) -> Answer:
    """Return the result of a verb that looks, with what a stopped store needs, if anything."""
    texts = [f"needs repair: {need['text']}" for need in body.get("needs", ())]
    is_problem = answer.is_problem or bool(texts)
    return answer._replace(lines=[*answer.lines, *texts], is_problem=is_problem)


def _rows_of(lifetimes: Lifetimes) -> list[dict[str, object]]:
    """Return the rows of the table of retention policies."""

    def duration(seconds: float | None) -> str | None:
        return None if seconds is None else format_duration(seconds)

    rows = list[dict[str, object]]()
    for policy in sorted({*lifetimes.num_evicted, *lifetimes.write_bytes_per_s}):
        rate = lifetimes.write_bytes_per_s.get(policy)
        rows.append(
            {
                "retention": policy,
                "written/s": None if rate is None else format_bytes(int(rate)),
                "promised": duration(lifetimes.promised_s.get(policy)),
                "expected": duration(lifetimes.expected_s.get(policy)),
                "evicted": lifetimes.num_evicted.get(policy, 0),
                "p1 age": duration(lifetimes.evicted_age_p1_s.get(policy)),
                "p50 age": duration(lifetimes.evicted_age_p50_s.get(policy)),
                "expired": lifetimes.num_expired.get(policy, 0),
            }
        )
    return rows


filter_option = click.option(
    "--filter",
    metavar="CONDITIONS",
    help="Take only chains for which all conditions hold, such as tier=host,idle>1h.",
)


@tier_verb
@filter_option
@click.option(
    "--sort",
    metavar="FIELD",
    help="Sort by a field of --filter; - before it puts the largest first. By default the last "
    "used come first.",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="List at most N chains.")
def ls(store: Control, filter: str | None, sort: str | None, limit: int | None) -> Listing:
    """List the chains of blocks, the most recently used first.

    A chain is a prompt's blocks up to one that no other block follows. On a running server all
    tiers are listed, on a stopped store the disk. `inspect` and `evict` take the ids.

    \b
    Conditions of --filter, with commas between them:
      tier=host                 some block is in this tier: device, host or disk
      idle>1h, age>2d           time since the last use, and since the oldest block was computed
      expires<10m               time until the first block expires
      size>1GB, tokens>=8192    also: blocks
      hits>=3                   how often the first block was found that only this chain has
      ns=1f9c                   first digits of the namespace; 16 of them are its tenant's
      model=NAME, retention=24h

    Equality is = or !=. Quote a filter with < or > in a shell.

    \b
    Examples:
      tieredkv ls --disk-dir ./kv
      tieredkv ls --disk-dir ./kv --filter 'idle>1h,size>1GB' --sort -size --limit 20
    """
    call, now = Ls(filter=filter or "", sort=sort or "", limit=limit), time.time()
    call.check()
    needs = list[Any]()

    def pages() -> Asking:
        rest = yield from store.pages(call)
        needs.extend(rest.get("needs", ()))
        for need in needs:
            click.echo(f"needs repair: {need['text']}", err=True)
        if "engine" in rest:
            what = "the engine does not answer, so chains that the disk does not have are left out"
            click.echo(f"warning: {what}", err=True)
        return rest

    def as_row(chain: ChainInfo) -> dict[str, object]:
        return {
            "id": short_id(chain.id, SHORT_HEX),
            "namespace": chain.namespace[:NAMESPACE_HEX],
            "retention": chain.retention,
            "tiers": " ".join(chain.tiers),
            "tokens": chain.tokens,
            "size": format_bytes(chain.bytes),
            "age": format_duration(max(0.0, now - chain.computed_at_min)),
            "expires in": format_duration(max(0.0, chain.expires_at_min - now)),
            "last hit": format_duration(max(0.0, now - chain.last_used)),
            "hits": chain.hits,
        }

    as_json = functools.partial(document, call)
    nothing = "no chain matches" if call.filter else "nothing is stored"
    return Listing(
        pages(), as_json, as_row, lambda chain: chain.id, nothing, 3, lambda: bool(needs)
    )


@tier_verb
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
@filter_option
@click.option("--model", "model_name", metavar="NAME", help="Evict the chains of this model.")
@click.option(
    "--tier",
    "tiers",
    type=click.Choice([str(tier) for tier in Tier]),
    multiple=True,
    help="Evict only the copies in this tier; may be given twice. By default every copy.",
)
@click.option(
    "--to",
    type=click.Choice(["host", "disk", "drop"]),
    default="drop",
    help="Drop the blocks, or move those in faster tiers down to this one. A running server moves "
    "them; only blocks that 24h or another retention with a disk asked for go to disk.",
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Say what would be evicted, and change nothing: chains from every tier, other blocks from "
    "disk, or with --tier from there.",
)
def evict(
    store: Control,
    yes: bool,
    older_than_s: str | None,
    filter: str | None,
    model_name: str | None,
    **more: Any,
) -> Answer:
    """Evict blocks from every tier: chains by their ID, or what all given criteria select.

    `ls` prints the IDs. An ID stays good while the first or the last block that only this chain
    uses is stored. Blocks that other chains use stay. --filter and --model evict the chains that
    `ls` lists with them. Requests that are being answered keep their blocks until they end. A block
    counts once for each tier that it is evicted from; pages of layers with sliding windows count
    beside the blocks. The exit code is 1 if nothing matches, if an ID is unknown, or if keys that
    no block needs could not be destroyed.

    \b
    Examples:
      tieredkv evict --disk-dir ./kv 1f9c0a77d2e4
      tieredkv evict --disk-dir ./kv --older-than 2h -y
      tieredkv evict --disk-dir ./kv --filter 'idle>1h,size>1GB' --dry-run
      tieredkv evict --disk-dir ./kv --tier host
      tieredkv evict --disk-dir ./kv --filter 'tier=device,idle>5m' --to host -y
    """
    if "" in (filter, model_name):  # as a variable of a script that was not set
        raise usage_error("--filter and --model need a value; leave them out to evict any chain.")
    wanted = EvictFilter(
        older_than_s=None if older_than_s is None else parse_duration(older_than_s),
        filter=filter or "",
        model=model_name or "",
        **more,
    )
    if wanted.is_empty:
        text = "Say what to evict: an ID, --filter, --model, --tier, --ns, --older-than or --all."
        raise usage_error(text)
    everything = EvictFilter(all=True, tiers=wanted.tiers, to=wanted.to, dry_run=wanted.dry_run)
    if wanted.all and wanted != everything:
        raise usage_error("--all can be combined with --tier and --to only.")
    wanted.check()
    if not (yes or wanted.dry_run):
        confirm("Evict these blocks?", "evict")
    answer = store.answer(wanted)
    for unknown in answer["unknown_ids"]:
        is_short = len(unknown) < MIN_ID_DIGITS
        hint = f"an id needs at least {MIN_ID_DIGITS} digits" if is_short else "`ls` lists the ids"
        click.echo(f"error: no chain has the id `{unknown}`\nhint: {hint}", err=True)
    if refused := answer.get("refused_blocks"):
        stay = "stays where it is" if refused == 1 else "stay where they are"
        what = f"{_blocks(refused)} {stay}, as no retention lets that onto the disk"
        click.echo(f"error: {what}", err=True)
    emptied_because = answer.get("emptied_because")
    num_blocks, num_pages = answer["evicted_blocks"], answer.get("window_pages", 0)
    is_any = num_blocks + num_pages > 0
    if not (is_any or answer["unknown_ids"] or refused or emptied_because):
        click.echo("error: nothing matches, so no block was evicted", err=True)
    done, would = "evicted", "would evict"
    if wanted.to != "drop":
        done, would = f"sending to {wanted.to}:", f"would send to {wanted.to}:"
    if wanted.dry_run:
        done, answer = would, {**answer, "dry_run": True}
    gone = _blocks(num_blocks, num_pages)
    lines = [f"{done} {gone}, {format_bytes(answer['freed_bytes'])}"]
    lines = lines if is_any else []  # the errors above say why there is none
    disk = answer.get("disk") or {}
    if emptied_because is not None:
        lines.append(f"the store was emptied, since no server would start on it: {emptied_because}")
        lines += [f"its keys stay: {disk['kept_why']}"] if disk["kept_why"] else []
    lines += [f"erased key {key}" for key in disk.get("erased_keys", ())]
    kept = {*disk.get("kept_keys", ())} - {*disk.get("erased_keys", ())}
    why = _keys_problem(disk)
    lines += [f"kept key {key}" + ", which other blocks need" * (not why) for key in sorted(kept)]
    is_nothing = not is_any and emptied_because is None
    is_problem = bool(answer["unknown_ids"] or refused or why) or is_nothing
    return with_needs(Answer(answer, lines=lines, is_problem=is_problem), answer)


def _keys_problem(told: Mapping[str, Any]) -> str:
    """Report on stderr why keys were kept that no block needs, and return it; empty if none was."""
    if why := told.get("keys_error", ""):
        hint = (
            "the blocks are gone; the keys go with the next sweep once their table can be written"
        )
        click.echo(f"error: {why}\nhint: {hint}", err=True)
    return str(why)


def _blocks(count: int, num_pages: int = 0) -> str:
    blocks = "1 block" if count == 1 else f"{count} blocks"
    return f"{blocks} and {_pages(num_pages)}" if num_pages else blocks


def _pages(count: int) -> str:
    return "1 window page" if count == 1 else f"{count} window pages"


def confirm(question: str, what: str) -> None:
    """Ask before something is destroyed.

    Raises:
        UsageError: there is no terminal to ask on.
        Abort: the answer is no.
    """
    if not sys.stdin.isatty():
        raise usage_error(f"There is no terminal to confirm on; give -y to {what} without asking.")
    click.confirm(question, abort=True, err=True)


@store_verb
@click.option("--model", "model_name", metavar="NAME", help="Drop blocks of all models but this.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--dry-run", is_flag=True, help="Say what would be dropped, and change nothing.")
def prune(store: StoreControl, model_name: str | None, yes: bool, dry_run: bool) -> Answer:
    """Drop blocks on disk that nothing can use any more.

    These are blocks that have expired, and orphans: blocks whose parent is in no tier, and all
    behind them, so that a prompt would have to be computed up to them first. With --model, the
    blocks of all other models go, too; `df -v` lists the names.

    \b
    Examples:
      tieredkv prune --disk-dir ./kv --dry-run
      tieredkv prune --disk-dir ./kv --model ./Llama-3.1-8B-Instruct -y
    """
    if model_name == "":
        raise usage_error("--model needs a value; leave it out to keep the blocks of every model.")
    if not (yes or dry_run):
        confirm("Drop what nothing can use?", "prune")
    answer = store.answer(Prune(model=model_name or "", dry_run=dry_run))
    verb = "would drop" if dry_run else "dropped"
    dropped = _blocks(answer["pruned_blocks"], answer["window_pages"])
    lines = [f"{verb} {dropped}, {format_bytes(answer['freed_bytes'])}"]
    lines += [as_text(answer["by_reason"])] if answer["by_reason"] else []
    is_problem = bool(_keys_problem(answer))
    document = {**answer, "dry_run": True} if dry_run else answer
    return with_needs(Answer(document, lines=lines, is_problem=is_problem), answer)


@store_verb
@click.option("--no-repair", is_flag=True, help="Count bad blocks and leave them in the store.")
@click.option(
    "--sample",
    metavar="PART",
    help="Read only this part of the blocks, chosen by chance, such as 5% or 0.05. By default all.",
)
@click.option(
    "--prove-erased",
    "key_id",
    is_flag=False,
    flag_value="",
    metavar="[KEY]",
    help="Show instead that nothing is left of a key, or of what --ns names.",
)
@click.option(
    "--ns",
    "namespace_prefix",
    metavar="HEX",
    help="With --prove-erased: the namespaces that begin with this.",
)
def verify(
    store: StoreControl,
    no_repair: bool,
    sample: str | None,
    key_id: str | None,
    namespace_prefix: str | None,
) -> Answer:
    """Read every block on disk and compare it with its checksums.

    Bad blocks are deleted, so that they are computed again when a prompt needs them. The exit code
    is 1 if a block was bad. The index is always checked as a whole. Pages of layers with sliding
    windows whose block is not on disk are deleted, too.

    With --prove-erased it looks for what should be erased: in the key table, in the index and in
    every part of the store's files. The exit code is 1 if any is left. `evict` prints the ids of
    keys.

    \b
    Examples:
      tieredkv verify --disk-dir ./kv
      tieredkv verify --disk-dir ./kv --sample 5% --no-repair
      tieredkv verify --disk-dir ./kv --prove-erased 6f1d8ab1c0a2e937
      tieredkv verify --disk-dir ./kv --prove-erased --ns 1f9c0a77d2e4
    """
    if key_id is not None or namespace_prefix is not None:
        if key_id is None or bool(key_id) == bool(namespace_prefix):
            raise usage_error("Give --prove-erased with either a key or --ns.")
        if no_repair or sample is not None:
            raise usage_error("--prove-erased cannot be combined with --no-repair or --sample.")
        answer = store.answer(Verify(erased_key=key_id, erased_namespace=namespace_prefix or ""))
        found = {key: value for key, value in answer.items() if key != "needs"}
        is_left = not answer["erased"]
        return with_needs(Answer(answer, lines=[as_text(found)], is_problem=is_left), answer)
    call = Verify(repair=not no_repair, sample=1.0 if sample is None else parse_part(sample))
    call.check()
    progress = functools.partial(terminal_progress(), "verifying")
    answer = store.answer(call, progress)
    checked = f"Checked {_blocks(answer['checked'], answer['window_pages'])}"
    result = "all good."
    if is_bad := answer["bad"] > 0:
        reasons = as_text(answer["by_reason"])
        result = f"{answer['bad']} bad ({reasons}), {answer['repaired']} repaired."
    lines = [f"{checked}: {result}"]
    if num_strays := answer["stray_pages"]:
        done = "Removed" if call.repair else "Found"
        lines.append(f"{done} {_pages(num_strays)} whose block is not on disk.")
    return with_needs(Answer(answer, lines=lines, is_problem=is_bad), answer)


def parse_part(text: str) -> float:
    """Return a part that is written as a percentage or as a number.

    Raises:
        UsageError: it is neither.
    """
    number = text.strip().removesuffix("%")
    try:
        return float(number) / (100 if number != text.strip() else 1)
    except ValueError:
        raise usage_error(f"`{text}` is no part; write one such as 5% or 0.05.") from None


@store_verb
@click.option("--to", "path", metavar="FILE", help="Take the new key from this file, or make it.")
@click.option("--to-command", "command", metavar="COMMAND", help="Take it from what this prints.")
def rotate(store: StoreControl, path: str | None, command: str | None) -> Answer:
    """Replace the master key of an encrypted store; no block is rewritten.

    Without an option a new key takes the place of the old one in its file. Otherwise set
    `disk_master_key` or `disk_master_key_command` to the new place before the next start.

    \b
    Example:
      tieredkv rotate --disk-dir ./kv
    """
    if path is not None and command is not None:
        raise usage_error("--to cannot be combined with --to-command.")
    answer = store.answer(Rotate(master_key=path and str(Path(path).resolve()), command=command))
    lines = [f"{answer['keys']} keys are wrapped by the new master key: {answer['master_key']}"]
    return Answer(answer, lines=lines)


@store_verb
def adopt(store: StoreControl) -> Answer:
    """Have the keys of an encrypted store belong to this copy of its folder.

    A server refuses a copy or an old backup of a store, since its keys have gone on with the
    original. Run this once, while no server uses either of the two. The original counts as the copy
    from then on, and the next start destroys keys without a block in this folder.

    \b
    Example:
      tieredkv adopt --disk-dir /mnt/restored/kv
    """
    answer = store.adopt()
    done = "belong to this folder now" if answer["adopted"] else "belonged to this folder already"
    return Answer(answer, lines=[f"The keys {done}."])
