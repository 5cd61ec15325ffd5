"""`tieredkv inspect`: a chain block by block, or what the tiers have of a prompt."""

import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

import click
import msgspec

from tieredkv.cli.controls import control_by, control_of, url_option
from tieredkv.cli.output import Answer, answering, usage_error
from tieredkv.cli.settings import settings_options
from tieredkv.cli.store import NAMESPACE_HEX, SHORT_HEX, with_needs
from tieredkv.config import LoadedSettings
from tieredkv.errors import NoServerError
from tieredkv.operate.calls import Inspect
from tieredkv.operate.infos import BlockInfo
from tieredkv.units import format_bytes, format_duration


@click.command()
@click.argument("id", metavar="[ID]", required=False)
@click.option(
    "--following",
    is_flag=True,
    help="Show the blocks behind the named one too, with all branches; this reads the whole index.",
)
@click.option(
    "--prompt-file",
    type=click.File(encoding="utf-8"),
    help="Tell what the tiers have of the prompt in this file; - is stdin.",
)
@click.option("--model", help="Model of the prompt, if no server runs that could tokenize it.")
@click.option("--api-key", help="API key with which the prompt is sent.")
@click.option("--cache-salt", help="The `cache_salt` of the prompt.")
@click.option("--prompt-cache-key", help="The `prompt_cache_key` of the prompt.")
@settings_options(
    *("dtype", "max_model_len", "rope_scaling", "fingerprint"),
    *("block_size", "hash_algo", "isolate_by", "disk_dir", "admin_key"),
)
@url_option
@answering
def inspect(
    loaded: LoadedSettings,
    url: str | None,
    id: str | None,
    following: bool,
    prompt_file: TextIO | None,
    api_key: str | None,
    **whose: Any,
) -> Answer:
    """Show a chain block by block, or what the tiers have of a prompt.

    ID is one of `ls`, or the first digits of a block's hash. The chain is shown from its first
    block to the last one that ID names: the tiers that have each block, how it is compressed, how
    old it is, when it was used, and until when it lives. Tokens are never shown, since no tier
    stores them. Of a model with sliding windows or recurrent layers, `anchor` is shown behind the
    blocks where a later request may go on, as the tiers have all that these need there; to find
    them reads the whole index.

    With --prompt-file, the answer is what a request with this prompt would find in each tier, where
    it diverges from what is stored and why, and its time to the first token as planned. The file
    has a text, a JSON list of chat messages, or the JSON body of a request to one of the APIs. A
    running server tokenizes it; for a stopped store give --model.

    \b
    Examples:
      tieredkv inspect --disk-dir ./kv 1f9c0a77d2e4-83b0c91e55aa
      tieredkv inspect --disk-dir ./kv 1f9c0a77d2e4 --following
      tieredkv inspect --disk-dir ./kv --prompt-file request.json
      tieredkv inspect --url http://gpu1:8000 --prompt-file request.json
    """
    control = control_by(loaded, url)
    if (id is None) == (prompt_file is None):
        raise usage_error("Give either an ID or --prompt-file.")
    if prompt_file is not None:
        tenant = hashlib.sha256(api_key.encode()).hexdigest() if api_key else ""
        try:
            prompt = read_prompt(prompt_file.read())
        except UnicodeDecodeError as error:
            what = f"`{prompt_file.name}` is no text in UTF-8: {error.reason} at byte {error.start}"
            raise usage_error(f"{what}.") from None
        call = Inspect(prompt=prompt, tenant=tenant, **whose)
        call.check()
        try:
            found = control.answer(call)
        except NoServerError:  # which a server does not say
            if not loaded.settings.model:
                text = "No server runs that could tokenize the prompt: give --model."
                raise usage_error(text) from None
            from tieredkv.cli import stopped_prompts

            store = control_of(loaded.settings)
            found = stopped_prompts.inspect(call, loaded.settings, store, api_key)
        return with_needs(Answer(found, lines=[*_described(found)]), found)
    call = Inspect(id=id or "", following=following)
    call.check()
    blocks, rest = list[BlockInfo](), dict[str, Any]()

    def pages() -> Iterator[list[BlockInfo]]:
        rest.update((yield from control.pages(call)) or {})

    for page in pages():
        blocks += page
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
        if block.is_anchor is not msgspec.UNSET:
            rows[-1]["anchor"] = "yes" if block.is_anchor else None
    namespaces = {(block.namespace[:NAMESPACE_HEX], block.root[:SHORT_HEX]) for block in blocks}
    lines = [f"namespace {namespace}, root {root}" for namespace, root in sorted(namespaces)]
    document = {"chain": msgspec.to_builtins(blocks), **rest}
    return with_needs(Answer(document, rows, lines, texts=2), rest)


def read_prompt(text: str) -> Any:
    """Return the JSON list or object in a text; any other text is itself the prompt."""
    from tieredkv.fields import decode_json

    if text.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(msgspec.DecodeError, UnicodeError, RecursionError):
            return decode_json(text)
    return text


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


def _described(found: dict[str, Any]) -> Iterator[str]:
    """Describe a report on a prompt."""
    by_tier = found["by_tier"]
    parts = ", ".join(f"{num} from {tier}" for tier, num in by_tier.items() if num)
    yield f"{found['prompt_tokens']} tokens, cached {sum(by_tier.values())}: {parts or 'none'}"
    if found["reason"] is not None:
        yield f"diverges at token {found['diverges_at']}: {found['reason']}"
    if any(pages := found.get("anchor_pages", {}).values()):
        parts = ", ".join(f"{num} from {it}" for it, num in found["anchor_pages"].items() if num)
        yield f"pages of windows or a state that it goes on from: {sum(pages)}: {parts}"
    times = found["predicted_ttft_ms"]
    told = [f"{name} {ms:,.0f} ms" for name, ms in times.items() if ms is not None]
    yield f"expected time to first token: {', '.join(told) or 'not known'}"
