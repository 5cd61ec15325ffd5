"""`df`: how many blocks and bytes each tier holds."""

from collections.abc import Mapping
from typing import Any

import msgspec

from tieredkv.operate.calls import Df
from tieredkv.operate.worker import Worker, only

_DROPPED = ("num_lookups_dropped", "num_touches_dropped")


def df(call: Df, worker: Worker) -> dict[str, Any]:
    """Tell what each tier holds; with `verbose`, what each model has on disk, too."""
    tiers = {"device": None, "host": None, **only(worker.ask_engine(call))}
    told = worker.figures(tenants=True)
    tenants = {it: {"blocks": num, "bytes": size} for it, (num, size) in told.tenants.items()}
    # What is dropped before it is sent to this worker, only the engine knows.
    known = tiers.get("disk") or {}
    disk = {**msgspec.to_builtins(told.stats), **{it: known[it] for it in _DROPPED if it in known}}
    more: Mapping[str, Any] = {}
    if call.verbose:
        from tieredkv.operate.namespaces import namespaces  # loads NumPy

        more = namespaces(worker)
    answer = {**tiers, "disk": disk, "tenants": tenants, "writer_pid": told.writer_pid}
    return {**answer, **more}
