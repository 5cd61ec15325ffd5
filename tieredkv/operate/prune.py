"""`prune`: blocks on disk that nothing can use: expired ones, other models', and orphans.

An orphan is a block whose parent is in no tier, or that comes behind one: a prompt would have to be
computed up to it first.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from tieredkv.errors import ConfigError
from tieredkv.operate.ls import Ls
from tieredkv.operate.models import KnownModels
from tieredkv.operate.verb import Verb
from tieredkv.operate.worker import Worker, silent_engine
from tieredkv.storage.messages.operator import Delete, Figures, Told

if TYPE_CHECKING:
    from tieredkv.operate.ram import RamBlocks
    from tieredkv.operate.table import Blocks, BlockTable


class Prune(Verb, frozen=True, kw_only=True, tag="prune"):
    """Drop blocks on disk that nothing can use.

    Attributes:
        model: the name of the model that is in use, so that all others' blocks are dropped; "" if
            every model is.
        dry_run: count the blocks, and change nothing.
    """

    needs_disk: ClassVar[bool] = True

    model: str = ""
    dry_run: bool = False

    @property
    def changes(self) -> bool:  # type: ignore[override]
        """Whether it is no dry run."""
        return not self.dry_run

    def answer(self, worker: Worker) -> dict[str, Any]:
        """Return `{"pruned_blocks", "freed_bytes", "by_reason"}`, and why keys were kept.

        Raises:
            ConfigError: the model that is in use is not known.
            StoreUnreachableError: the engine did not answer, and may have what orphans follow.
        """
        from tieredkv.operate.ram import RamBlocks  # these load NumPy
        from tieredkv.operate.table import scan, starts_in

        table, now = scan(worker)
        in_ram = RamBlocks(worker.ask_engine(Ls()))
        if not in_ram.is_told:
            raise silent_engine()
        by_reason, freed_bytes = dict[str, int](), 0
        keys_error = "" if self.dry_run else worker.one(Figures(), Told).lacks_keys
        for why, blocks in _useless(table, self.model, worker.models(), in_ram, now).items():
            # Of expired blocks some may be stored again by now, and live.
            starts, is_expired = starts_in(blocks), why == "expired"
            done = worker.delete(Delete(starts=starts, expired=is_expired, dry_run=self.dry_run))
            by_reason |= {why: done.num_blocks} if done.num_blocks else {}
            freed_bytes += done.freed_bytes
            keys_error = done.keys_error or keys_error
        return {
            "pruned_blocks": sum(by_reason.values()),
            "freed_bytes": freed_bytes,
            "by_reason": by_reason,
            **({"keys_error": keys_error} if keys_error else {}),
        }


def _useless(
    table: "BlockTable", model: str, models: KnownModels, in_ram: "RamBlocks", now: float
) -> Mapping[str, "Blocks"]:
    """Return the blocks that nothing can use, by the reason.

    Args:
        table: all blocks on disk.
        model: the one that is in use; "" if every model is.
        models: name the blocks.
        in_ram: blocks that VRAM and host memory have, which are in use.
        now: the time.

    Raises:
        ConfigError: the model that is in use is not known.
    """
    import numpy as np

    from tieredkv.operate.chains import Chains

    if model and model not in models.names:
        known = ", ".join(f"`{name}`" for name in models.names) or "none"
        raise ConfigError(f"the store knows no model `{model}`; it knows {known}")
    living = table.unexpired(now)
    chains, blocks = Chains(living), living.blocks
    are_in_use = [model in ("", models.name_of(it.root, it.namespace)) for it in living.kinds]
    in_use = np.array(are_in_use, bool)[blocks["kind"]]
    has_parent = chains.has_parent() | in_ram.holds(blocks["parent_key"])
    is_first = (blocks["position"] > 0) & ~has_parent
    is_orphan = chains.following(is_first, in_ram.holds(blocks["key"]))
    return {
        "expired": table.blocks[table.blocks["expires_at"] <= now],
        "other_model": blocks[~in_use],
        "orphan": blocks[in_use & is_orphan],
    }
