"""Proof of erasure: what is left of a payload key, or of a namespace, in a store.

It looks at the key table, the index, and the header of every extent that was ever used, whatever
the index says of it. It sees no copies of the folder, and no bytes that a device keeps of what was
overwritten.
"""

from collections.abc import Generator

from tieredkv.errors import ConfigError, MissingKeyError
from tieredkv.operate.calls import Verify
from tieredkv.storage.format.record import Extent
from tieredkv.storage.lmdb_store import BlockStore
from tieredkv.storage.results import ErasureResult

_EXTENTS_A_STEP = 64


def proving(store: BlockStore, what: Verify, result: ErasureResult) -> Generator[None, None, None]:
    """Look for what should be erased, in steps; `result` always holds the findings so far.

    Raises:
        ConfigError: the store is not encrypted.
        MissingKeyError: the keys of the store are not there.
    """
    if store.lacks_keys:
        raise MissingKeyError(store.lacks_keys)
    if store.keys is None:
        raise ConfigError(f"the store at `{store.path}` is not encrypted, so it has no keys")
    prefix, key_id, table = what.erased_namespace.lower(), b"", store.keys.table
    with store.index.reading() as txn:
        if prefix:
            result.keys = sum(each.scope.hex().startswith(prefix) for each in table)
            totals = txn.namespaces().items()
            result.blocks = sum(it.num_blocks for ns, it in totals if ns.hex().startswith(prefix))
        elif (key := table.of_id(key_id := bytes.fromhex(what.erased_key))) is not None:
            result.keys, result.blocks = 1, txn.num_encrypted(key.scope)
        segments = txn.segments()
    for segment, state in segments.items():
        for number in range(state.num_used if segment in store.files else 0):
            located, found_id = store.files.stored_at(Extent(segment, number))
            result.checked += 1
            if prefix and located is not None:
                result.extents += located.record.namespace.hex().startswith(prefix)
            elif not prefix:
                result.extents += found_id == key_id
            if number % _EXTENTS_A_STEP == 0:
                yield
