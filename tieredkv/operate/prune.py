"""`prune`: blocks on disk that nothing can use: expired ones, other models', and orphans.

An orphan is a block whose parent is in no tier, or that comes behind one: a prompt would have to be
computed up to it first.
"""

from typing import Any, ClassVar

from tieredkv.errors import ConfigError
from tieredkv.operate.ls import Ls
from tieredkv.operate.verb import Verb
from tieredkv.operate.worker import Worker, silent_engine
from tieredkv.storage.messages.operator import Delete, Figures, StoreFigures


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

    @property
    def needs_engine(self) -> bool:  # type: ignore[override]
        """Whether what VRAM and host memory hold decides what it drops."""
        return not self.dry_run

    def answer(self, worker: Worker) -> dict[str, Any]:
        """Return `{"pruned_blocks", "window_pages", "freed_bytes", "by_reason"}`.

        Pages of layers with windows are no blocks. `keys_error` says why keys were kept, if so.

        Raises:
            ConfigError: the model that is in use is not known.
            StoreUnreachableError: the engine did not answer, and may have what orphans follow.
        """
        import numpy as np

        from tieredkv.operate.chains import Chains  # these load NumPy
        from tieredkv.operate.ram import RamBlocks
        from tieredkv.operate.table import scan, starts_in

        (table, now), models = scan(worker), worker.models()
        if self.model and self.model not in models.names:
            known = ", ".join(f"`{name}`" for name in models.names) or "none"
            raise ConfigError(f"the store knows no model `{self.model}`; it knows {known}")
        in_ram = RamBlocks(worker.ask_engine(Ls()))
        if not in_ram.is_told:
            raise silent_engine()
        chains = Chains(living := table.unexpired(now))
        names = [models.name_of(kind.root, kind.namespace) for kind in living.kinds]
        is_used = np.array([self.model in ("", name) for name in names], bool)
        blocks, pages = chains.blocks, chains.pages
        has_parent = chains.has_parent() | in_ram.holds(blocks["parent_key"])
        is_first = (blocks["position"] > 0) & ~has_parent
        is_orphan = chains.following(is_first, in_ram.holds(blocks["key"]))
        has_block = np.isin(pages["parent_key"], blocks["key"][~is_orphan])
        has_block |= in_ram.holds(pages["parent_key"])
        orphans = np.concatenate([blocks[is_orphan], pages[~has_block]])
        useless = {
            "expired": table.blocks[table.blocks["expires_at"] <= now],
            "other_model": living.blocks[~is_used[living.blocks["kind"]]],
            "orphan": orphans[is_used[orphans["kind"]]],
        }
        by_reason, window_pages, freed_bytes = dict[str, int](), 0, 0
        keys_error = "" if self.dry_run else worker.one(Figures(), StoreFigures).lacks_keys
        for why, some in useless.items():
            # Of expired blocks some may be stored again by now, and live.
            is_expired = why == "expired"
            asked = Delete(starts=starts_in(some), expired=is_expired, dry_run=self.dry_run)
            done = worker.delete(asked)
            by_reason |= {why: done.num_blocks} if done.num_blocks else {}
            window_pages += done.window_pages
            freed_bytes += done.freed_bytes
            keys_error = done.keys_error or keys_error
        return {
            "pruned_blocks": sum(by_reason.values()),
            "window_pages": window_pages,
            "freed_bytes": freed_bytes,
            "by_reason": by_reason,
            **({"keys_error": keys_error} if keys_error else {}),
        }
