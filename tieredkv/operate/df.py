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
        return {
            **tiers,
            "disk": {**msgspec.to_builtins(told.stats), **dropped},
            "tenants": {
                it: {"blocks": num, "bytes": size} for it, (num, size) in told.tenants.items()
            },
            "writer_pid": told.writer_pid,
            **(_namespaces(worker) if self.verbose else {}),
        }


def _namespaces(worker: Worker) -> dict[str, Any]:
    """Return what each model has stored in each namespace, the largest first, and how many."""
    import numpy as np

    from tieredkv.operate.table import scan  # loads NumPy

    table, now = scan(worker)
    (blocks, kinds), models = table.unexpired(now), worker.models()
    numbers = dict[tuple[bytes, bytes], int]()
    of_kind = [numbers.setdefault((it.namespace, it.root), len(numbers)) for it in kinds]
    owners, num_owners = np.array(of_kind, int)[blocks["kind"]], len(numbers)
    nums = np.bincount(owners, minlength=num_owners).tolist()
    sizes = np.bincount(owners, blocks["size_bytes"], num_owners).tolist()
    last_used = np.zeros(num_owners)
    np.maximum.at(last_used, owners, blocks["last_used"])
    stored = [owner for owner, number in numbers.items() if nums[number]]
    stored.sort(key=lambda owner: (-sizes[numbers[owner]], owner[::-1]))
    told = [
        {
            "namespace": namespace.hex(),
            "root": root.hex(),
            "model": models.name_of(root, namespace),
            "blocks": nums[numbers[namespace, root]],
            "bytes": int(sizes[numbers[namespace, root]]),
            "last_used": last_used[numbers[namespace, root]].item(),
        }
        for namespace, root in stored[:_TOLD_NAMESPACES]
    ]
    return {"namespaces": told, "num_namespaces": len(stored)}
