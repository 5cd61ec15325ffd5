"""`df`: how many blocks and bytes each tier holds."""

from typing import Any

import msgspec

from tieredkv.operate.verb import Verb
from tieredkv.operate.worker import Worker, only
from tieredkv.storage.messages.operator import Figures, StoreFigures

_DROPPED = ("num_lookups_dropped", "num_touches_dropped")
_TOLD_NAMESPACES = 10_000  # the largest, in one answer


class Df(Verb, frozen=True, kw_only=True, tag="df"):
    """How many blocks and bytes each tier holds.

    The pages of layers with windows are counted apart from the blocks.

    Attributes:
        verbose: tell what each model holds on disk in each namespace, too.
    """

    verbose: bool = False

    @property
    def is_quick(self) -> bool:  # type: ignore[override]
        """Whether it only reads figures."""
        return not self.verbose

    def answer(self, worker: Worker) -> dict[str, Any]:
        """Return what each tier holds: `device`, `host`, `disk`, `tenants`, `writer_pid`.

        With `verbose` the answer also has the largest `namespaces`, and `num_namespaces`.
        """
        tiers = {"device": None, "host": None, **only(worker.ask_engine(self))}
        told = worker.one(Figures(tenants=True), StoreFigures)
        # What is dropped before it is sent to this worker, only the engine knows.
        known = tiers.get("disk") or {}
        dropped = {name: known[name] for name in _DROPPED if name in known}
        stats, num_pages = msgspec.to_builtins(told.stats), told.stats.window_pages
        return {
            **tiers,
            "disk": {**stats, "blocks": stats["blocks"] - num_pages, **dropped},
            "tenants": {
                it: {"blocks": num - num_pages, "window_pages": num_pages, "bytes": size}
                for it, (num, size, num_pages) in told.tenants.items()
            },
            "writer_pid": told.writer_pid,
            **(_namespaces(worker) if self.verbose else {}),
        }


def _namespaces(worker: Worker) -> dict[str, Any]:
    """Return what each model has stored in each namespace, the largest first, and how many.

    `anchors` are the blocks behind which all pages of windows are there that a request needs to go
    on, and `anchor_bytes`, a part of `bytes`, those of all such pages.
    """
    import numpy as np

    from tieredkv.operate.chains import Chains  # these load NumPy
    from tieredkv.operate.table import scan

    table, now = scan(worker)
    living, models = table.unexpired(now), worker.models()
    (blocks, kinds), is_page = living, living.blocks["page_kind"] > 0
    numbers = dict[tuple[bytes, bytes], int]()
    of_kind = [numbers.setdefault((it.namespace, it.root), len(numbers)) for it in kinds]
    owners, num_owners = np.array(of_kind, int)[blocks["kind"]], len(numbers)
    sums = {
        "blocks": np.bincount(owners[~is_page], minlength=num_owners),
        "bytes": np.bincount(owners, blocks["size_bytes"], num_owners).astype(int),
        **dict.fromkeys(("anchors", "anchor_bytes"), np.zeros(num_owners, int)),
    }
    if is_page.any():
        chains, pages = Chains(living), blocks[is_page]
        ends = chains.blocks[chains.anchors(chains.anchor_needs(models))]
        sums["anchors"] = np.bincount(np.array(of_kind)[ends["kind"]], minlength=num_owners)
        sizes = np.bincount(owners[is_page], pages["size_bytes"], num_owners)
        sums["anchor_bytes"] = sizes.astype(int)
    counts = {name: column.tolist() for name, column in sums.items()}
    last_used = np.zeros(num_owners)
    np.maximum.at(last_used, owners, blocks["last_used"])
    stored = [owner for owner, number in numbers.items() if counts["bytes"][number]]
    stored.sort(key=lambda owner: (-counts["bytes"][numbers[owner]], owner[::-1]))
    told = [
        {
            "namespace": namespace.hex(),
            "root": root.hex(),
            "model": models.name_of(root, namespace),
            **{name: column[numbers[namespace, root]] for name, column in counts.items()},
            "last_used": last_used[numbers[namespace, root]].item(),
        }
        for namespace, root in stored[:_TOLD_NAMESPACES]
    ]
    return {"namespaces": told, "num_namespaces": len(stored)}
