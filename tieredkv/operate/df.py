"""`df`: how many blocks and bytes each tier holds."""

from typing import Any

import msgspec

from tieredkv.operate.verb import Verb
from tieredkv.operate.worker import Worker, only
from tieredkv.storage.messages.operator import Figures, Told

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
        told = worker.one(Figures(tenants=True), Told)
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
    from tieredkv.operate.table import scan  # loads NumPy

    table, now = scan(worker)
    uses, models = dict[tuple[bytes, bytes], dict[str, Any]](), worker.models()
    for kind, num_blocks, num_bytes, last_used in table.unexpired(now).sums():
        nothing = {"blocks": 0, "bytes": 0, "last_used": 0.0}
        use = uses.setdefault((kind.namespace, kind.root), nothing)
        use["blocks"] += num_blocks
        use["bytes"] += num_bytes
        use["last_used"] = max(use["last_used"], last_used)
    largest = sorted(uses, key=lambda owner: (-uses[owner]["bytes"], owner[::-1]))
    told = list[dict[str, Any]]()
    for namespace, root in largest[:_TOLD_NAMESPACES]:
        owner = {"namespace": namespace.hex(), "root": root.hex()}
        told.append({**owner, "model": models.name_of(root, namespace), **uses[namespace, root]})
    return {"namespaces": told, "num_namespaces": len(uses)}
