"""`rotate`: another master key."""

from typing import Any

from tieredkv.operate.calls import Rotate
from tieredkv.operate.worker import Worker


def rotate(call: Rotate, worker: Worker) -> dict[str, Any]:
    """Replace the master key of an encrypted store; tell where the new one is."""
    done = worker.rotate(call.master_key, call.command)
    return {"master_key": done.master_key, "keys": done.keys}
