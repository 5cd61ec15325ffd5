"""What each model has stored in each namespace, for `df -v`."""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from tieredkv.operate.infos import NamespaceUse
from tieredkv.operate.models import KnownModels, read_models
from tieredkv.operate.table import BlockTable, scan
from tieredkv.operate.worker import Worker

_TOLD_NAMESPACES = 10_000  # the largest, in one answer


def namespaces(worker: Worker) -> Mapping[str, Any]:
    """Return the largest namespaces, and how many there are."""
    table, now = scan(worker)
    uses = adding_up(table.unexpired(now))
    told, models = uses[:_TOLD_NAMESPACES], KnownModels(read_models(worker.path))
    for use in told:
        model = models.of(bytes.fromhex(use.root), bytes.fromhex(use.namespace))
        use.model = model.name if model else None
    return {"namespaces": msgspec.to_builtins(told), "num_namespaces": len(uses)}


def adding_up(table: BlockTable) -> list[NamespaceUse]:
    """Add up the blocks of each model in each namespace, the largest first."""
    uses, num_kinds = dict[tuple[bytes, bytes], NamespaceUse](), len(table.kinds)
    numbers = table.blocks["kind"]
    nums = np.bincount(numbers, minlength=num_kinds)
    sizes = np.bincount(numbers, table.blocks["size_bytes"], num_kinds)
    last_used = np.zeros(num_kinds)
    np.maximum.at(last_used, numbers, table.blocks["last_used"])
    columns = (nums.tolist(), sizes.tolist(), last_used.tolist())
    for (root, namespace, _), num, size, used in zip(table.kinds, *columns, strict=True):
        new = NamespaceUse(namespace=namespace.hex(), root=root.hex())
        use = uses.setdefault((namespace, root), new)
        use.blocks += num
        use.bytes += int(size)
        use.last_used = max(use.last_used, used)
    found = [use for use in uses.values() if use.blocks]
    return sorted(found, key=lambda use: (-use.bytes, use.root))
