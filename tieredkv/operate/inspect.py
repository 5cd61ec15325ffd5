"""`inspect`: a chain block by block, or what the tiers have of a prompt.

The blocks before a block are found by the names in the records, so that no walk over the index is
needed. A walk is needed to find the blocks behind one, and the pages of layers with windows.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from tieredkv.errors import ConfigError, NoServerError, UnknownIdError
from tieredkv.operate.chain_ids import ID_HINT, named_blocks
from tieredkv.operate.infos import BlockInfo
from tieredkv.operate.ls import Ls
from tieredkv.operate.verb import Asking, Verb
from tieredkv.operate.worker import Worker, only, silent_engine
from tieredkv.storage.messages.operator import Figures, StoreFigures
from tieredkv.types import Tier
from tieredkv.wire.channel import MAX_CONTROL_FRAME_BYTES

if TYPE_CHECKING:
    from tieredkv.operate.ram import RamRecords

_MAX_CALL_BYTES = MAX_CONTROL_FRAME_BYTES - (1 << 16)  # it goes to the engine in one frame
_PAGE_BLOCKS = 4096

Known = dict[str, BlockInfo]
"""Blocks by their hash in hex."""


class Inspect(Verb, frozen=True, kw_only=True, tag="inspect"):
    """One chain, block by block and in every tier; or what the tiers have of a prompt.

    Exactly one of `id`, `prompt` and `names` is given.

    Attributes:
        id: names the chain; see `ChainInfo`. It is shown from its first block to the last one that
            the id names. Where that has gone, what follows the first one is shown.
        following: show the blocks behind the named one too, with all branches. To find them on disk
            takes a look at every block.
        prompt: a text, a list of chat messages, or the body of a request to one of the APIs. Only a
            running server can tokenize it.
        tenant: of the prompt: the SHA-256 of its API key in hex; "" without keys.
        cache_salt, prompt_cache_key: of the prompt, where its body has none.
        names: what the store calls the blocks of a prompt that was tokenized elsewhere, the first
            one first (`storage.keys.names`). Those on disk are listed. If the first is not there,
            the answer has all `roots` of the store, each with its namespace.
    """

    id: str = ""
    following: bool = False
    prompt: str | list[Any] | dict[str, Any] | None = None
    tenant: str = ""
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    names: tuple[bytes, ...] = ()

    @property
    def listed_as(self) -> str:  # type: ignore[override]
        """The list of blocks; a report on a prompt is none."""
        return "chain" if self.prompt is None else ""

    def check(self) -> None:
        """Refuse what cannot be an id, what is too long, and several things to show or nothing."""
        if (bool(self.id), self.prompt is not None, bool(self.names)).count(True) != 1:
            raise ConfigError("give either `id` or `prompt`")
        if self.id and named_blocks(self.id) is None:
            raise ConfigError(f"`{self.id}` is no id: {ID_HINT}")
        if (size := len(msgspec.msgpack.encode(self))) > _MAX_CALL_BYTES:
            what = f"a call of `inspect` may have {_MAX_CALL_BYTES} bytes at most"
            raise ConfigError(f"{what}, but has {size}; give a shorter prompt or fewer names")

    def answer(self, worker: Worker) -> dict[str, Any]:
        """Have the engine report on a prompt.

        Raises:
            NoServerError: no server is there to tokenize it.
            ConfigError: the server refuses the prompt.
        """
        answer = only(worker.ask_engine(self))
        if (answer.get("diverges_at"), answer.get("reason")) == (0, "never_seen"):
            answer = only(worker.ask_engine(self, _roots(worker)))
        if "refused" in answer:
            raise ConfigError(answer["refused"])
        if "reason" not in answer:
            raise NoServerError("no server answers that could tokenize the prompt")
        return answer

    def carry_out(self, worker: Worker) -> Asking:
        """Yield the blocks of a chain, or those of some names; or return the report on a prompt."""
        if self.prompt is not None:
            return self.answer(worker)
        rest = dict[str, Any]()
        if self.names:
            blocks = _on_disk(self.names, worker)
            if not any(info.block_hash == self.names[0].hex() for info in blocks):
                rest = {"roots": _roots(worker)}
        else:
            blocks = _in_order(self._chain(worker).values())
        worker.let_go()
        for start in range(0, len(blocks), _PAGE_BLOCKS):
            yield blocks[start : start + _PAGE_BLOCKS]
        return rest

    def _chain(self, worker: Worker) -> Known:
        """Find the blocks of a chain in every tier.

        Raises:
            UnknownIdError: the id names none.
            StoreUnreachableError: the engine did not answer.
        """
        from tieredkv.operate.ram import RamRecords, chains_of  # these load NumPy
        from tieredkv.operate.table import starts_in

        in_ram, known = RamRecords([*worker.ask_engine(Ls())]), Known()
        if not in_ram.is_told:
            raise silent_engine()
        first, last = named_blocks(self.id) or ("", "")
        if not self.following:
            digits = last or first
            start = bytes.fromhex(digits[: len(digits) // 2 * 2])
            found = [bytes.fromhex(info.block_hash) for info in _on_disk([start], worker)]
            found += in_ram.named(digits)
            named = [name for name in found if name.hex().startswith(digits)]
            known = _climb(named, worker, in_ram)
        if not known and (self.following or last):
            chains, _ = chains_of(worker, in_ram)
            following, _ = chains.of_blocks(chains.named([self.id])[0])
            known = _climb(starts_in(following), worker, in_ram)
        if not known:
            raise UnknownIdError(f"no chain has the id `{self.id}`\nhint: {ID_HINT}")
        return _with_anchors(known, worker, in_ram)


def _with_anchors(known: Known, worker: Worker, in_ram: "RamRecords") -> Known:
    """Tell which blocks are anchors, where their model has windows.

    To find the pages on disk takes a look at every block.
    """
    from tieredkv.operate.ram import chains_of  # these load NumPy
    from tieredkv.operate.table import START_BYTES, starts_in

    models = worker.models()
    owners = {(info.root, info.namespace) for info in known.values()}
    found = {it: models.of(*map(bytes.fromhex, it)) for it in owners}
    if not any(model is not None and model.anchor_needs for model in found.values()):
        return known
    chains, _ = chains_of(worker, in_ram)
    starts = {*starts_in(chains.blocks[chains.anchors(chains.anchor_needs(models))])}

    def told(info: BlockInfo) -> BlockInfo:
        model = found[info.root, info.namespace]
        if model is None or model.anchor_needs is None:
            return info
        return replace(info, is_anchor=bytes.fromhex(info.block_hash)[:START_BYTES] in starts)

    return {name: told(info) for name, info in known.items()}


def _roots(worker: Worker) -> dict[bytes, bytes]:
    from tieredkv.operate.table import scan  # loads NumPy

    return {kind.root: kind.namespace for kind in scan(worker).table.kinds}


def _climb(starts: Iterable[bytes], worker: Worker, in_ram: "RamRecords") -> Known:
    """Find blocks, by their names or the first bytes of these, and all before them.

    A tier may lack a block in the middle of a chain that another one has. So each tier is asked for
    what the others have told of, until nothing new is told.
    """
    known, now = Known(), worker.one(Figures(), StoreFigures).now
    asked, wanted = set[bytes](), set(starts)
    while waiting := wanted - asked:
        on_disk = _on_disk([*waiting], worker, climbs=True)
        asked |= waiting | {bytes.fromhex(info.block_hash) for info in on_disk}
        _add(known, on_disk)
        _add(known, in_ram.up_from([*asked, *_missing_parents(known)], now))
        wanted = {*map(bytes.fromhex, known), *_missing_parents(known)}
    return known


def _on_disk(starts: Sequence[bytes], worker: Worker, *, climbs: bool = False) -> list[BlockInfo]:
    """Describe blocks on disk; see `Worker.find`."""
    import numpy as np

    from tieredkv.operate.table import RECORD, TIER_BITS, described  # loads NumPy

    return [
        described(row, part.retentions, TIER_BITS[Tier.DISK])
        for part in worker.find(starts, climbs=climbs)
        for row in np.frombuffer(part.data, RECORD)
    ]


def _add(known: Known, found: Iterable[BlockInfo]) -> None:
    """Add copies of blocks to those that are known; a block is as old as its oldest copy."""
    for info in found:
        if (one := known.get(info.block_hash)) is None:
            known[info.block_hash] = info
            continue
        ends = max(one, info, key=lambda each: each.expires_at)
        on_disk = one if one.codec is not None else info
        known[info.block_hash] = replace(
            ends,
            tiers=[tier for tier in Tier if tier in (*one.tiers, *info.tiers)],
            stored_bytes=on_disk.stored_bytes,
            codec=on_disk.codec,
            computed_at=min(one.computed_at, info.computed_at),
            last_used=max(one.last_used, info.last_used),
            pinned_until=max(one.pinned_until, info.pinned_until),
            hits=max(one.hits, info.hits),
        )


def _missing_parents(known: Known) -> list[bytes]:
    """Return the blocks that precede known ones and are not known themselves."""
    parents = {info.parent_hash for info in known.values() if info.position}
    return [bytes.fromhex(parent) for parent in sorted(parents - known.keys())]


def _in_order(blocks: Iterable[BlockInfo]) -> list[BlockInfo]:
    """Return blocks as a tree is printed: each one before those behind it, branch by branch."""
    children: dict[str, list[BlockInfo]] = {}
    by_position = sorted(blocks, key=lambda each: (-each.position, each.block_hash))
    for info in by_position:
        children.setdefault(info.parent_hash, []).append(info)
    known = {info.block_hash for info in by_position}
    waiting = [info for info in by_position if info.parent_hash not in known]
    ordered = list[BlockInfo]()
    while waiting:
        ordered.append(waiting.pop())
        waiting += children.get(ordered[-1].block_hash, [])
    return ordered
