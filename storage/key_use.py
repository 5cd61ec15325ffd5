"""Which payload keys are in use; those that are not leave the key table.

A key is in use while a block in the index was encrypted under it, or a write under way may be. Only
the store's thread uses this module.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tieredkv.errors import CorruptIndexError, StorageError, StoreFailedError
from tieredkv.storage.format.record import Extent, Located, is_encrypted, scope_of
from tieredkv.storage.index import Index
from tieredkv.storage.key_table import KeyTable
from tieredkv.storage.store_keys import StoreKeys
from tieredkv.types import BlockRecord


@dataclass(eq=False)
class KeyUse:
    """Makes keys for new blocks, and drops keys without blocks.

    Args:
        index: counts the blocks of each scope.
        keys: of the store; None if it is not encrypted, or its keys are not there.
        lacks_keys: why the keys of an encrypted store are not there; empty otherwise.
    """

    index: Index
    keys: StoreKeys | None
    lacks_keys: str
    _lent: dict[Extent, bytes] = field(default_factory=dict)  # scopes of writes under way
    _suspects: set[bytes] = field(default_factory=set)  # scopes that may have no block

    @property
    def table(self) -> KeyTable | None:
        """The payload keys, if there are any."""
        return None if self.keys is None else self.keys.table

    def begin(self, records: Sequence[BlockRecord], extents: Sequence[Extent | None]) -> None:
        """See that there are keys for blocks that will be written into these extents.

        Raises:
            StorageError: the key table cannot be written.
        """
        if self.table is not None:
            pairs = zip(records, extents, strict=True)
            scopes = {extent: scope_of(record) for record, extent in pairs if extent is not None}
            self.table.add(scopes.values())
            self._lent |= scopes

    def end(self, extent: Extent) -> None:
        """Note that a write has ended."""
        if (scope := self._lent.pop(extent, None)) is not None:
            self._suspects.add(scope)

    def suspect(self, scopes: Iterable[bytes]) -> None:
        """Note scopes that may have lost their last block."""
        self._suspects.update(scopes)

    def suspect_all(self) -> None:
        """Note that any scope may have no block."""
        if self.table is not None:
            self.suspect(key.scope for key in self.table)

    def begin_to_refuse_clear(self) -> None:
        """Once the last block is gone that was stored before encryption, take no such block.

        Raises:
            StorageError: the key table cannot be written.
        """
        if self.keys is None or self.keys.is_shared or not self.keys.table.has_clear:
            return
        with self.index.reading() as txn:
            num_clear = txn.meta.totals.num_blocks - txn.meta.num_encrypted
        if not num_clear:
            self.keys.table.refuse_clear()

    def ids_of(self, blocks: Iterable[Located]) -> set[bytes]:
        """Return the ids of the keys under which these blocks were encrypted."""
        if self.table is None:
            return set()
        scopes = {scope_of(each.record) for each in blocks if is_encrypted(each.codec)}
        keys = map(self.table.of_scope, scopes)
        return {key.id for key in keys if key is not None}

    def known(self, key_ids: Iterable[bytes]) -> set[bytes]:
        """Return those ids whose keys are still there."""
        return {each for each in key_ids if self.table is not None and self.table.of_id(each)}

    def try_to_drop_unused(self) -> StorageError | None:
        """Drop the keys of scopes without blocks; return the error if the table cannot be written.

        Raises:
            CorruptIndexError, StoreFailedError: the index cannot be read.
        """
        try:
            self.drop_unused()
        except (CorruptIndexError, StoreFailedError):
            raise
        except StorageError as error:
            return error
        return None

    def drop_unused(self) -> list[bytes]:
        """Drop the keys of scopes without blocks; return their ids.

        Raises:
            StorageError: the key table cannot be written; this is tried again.
        """
        if self.keys is None or self.keys.is_shared or not self._suspects:
            return []
        suspects = self._suspects.difference(self._lent.values())
        with self.index.reading() as txn:
            unused = [scope for scope in suspects if not txn.num_encrypted(scope)]
        try:
            dropped = self.keys.table.drop(unused)
        except StorageError as error:
            what = "keys that no block needs could not be destroyed; each sweep tries again"
            raise type(error)(error.errno, f"{what}: {error.strerror}") from error
        self._suspects -= suspects
        return dropped
