"""How many blocks on disk are of another model than the engine's, which can never use them.

A block's root is a digest of the model and of the namespace. The blocks of an older version of
tieredkv that computed the model's fingerprint in another way are of another model, too.
"""

import time
from itertools import islice, pairwise
from threading import Event

from tieredkv.hashing import ModelIdentity
from tieredkv.storage.index.environment import Index

_SLICE_BLOCKS = 256
_PAUSES = 10  # each pause lasts this many times the step before it
_MAX_PAUSE_S = 0.5


def count_others(index: Index, model: ModelIdentity, now: float, is_over: Event) -> int | None:
    """Count the blocks of other models in short steps, beside the store's other work; any thread.

    Args:
        index: of the store.
        model: of the engine.
        now: blocks that have expired by this time do not count.
        is_over: set to end early.

    Returns None if the end came early, or if a damaged page cut the walk short.

    Raises:
        StorageError: the index cannot be read.
    """
    roots, start, num_others = dict[bytes, bytes](), b"", 0
    while True:
        begin = time.monotonic()
        with index.reading() as txn:
            entries = list(islice(txn.blocks(start), _SLICE_BLOCKS))
        if not entries:
            return num_others
        if not all(key < other for key, other in pairwise([start, *(key for key, _ in entries)])):
            return None
        for record in (located.record for _, located in entries if located is not None):
            if (root := roots.get(record.namespace)) is None:
                root = roots[record.namespace] = model.root(record.namespace)
            num_others += record.root != root and now < record.expires_at
        start = entries[-1][0] + b"\0"
        if is_over.wait(min(_PAUSES * (time.monotonic() - begin), _MAX_PAUSE_S)):
            return None
