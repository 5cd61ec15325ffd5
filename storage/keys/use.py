"""Which payload keys are in use; those that are not, and those whose time is over, are destroyed.

A key is in use while a block in the index was encrypted under it, or a write under way may be. It
dies at the second that its slot has, whatever the index says: then no block may have it any more.
Only the store's thread uses `KeyUse`; any thread may use `LivingKeys`.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tieredkv.clock import Clock
from tieredkv.errors import StorageError
from tieredkv.pieces import cut, whole
from tieredkv.storage.format.record import (
    HOUR_S,
    Extent,
    Located,
    is_encrypted,
    scope_of,
    split_scope,
)
from tieredkv.storage.index.environment import Index
from tieredkv.storage.keys.destruction import sweep_tables
from tieredkv.storage.keys.layout import PayloadKey
from tieredkv.storage.keys.store_keys import StoreKeys
from tieredkv.storage.keys.table import KeyTable
from tieredkv.types import BlockRecord

_KEYS_A_STEP = 1024  # of 80,000 in a large table, so that stores need not wait for all


@dataclass(eq=False)
class LivingKeys:
    """The payload keys of a store as those who move payloads see them.

    Args:
        table: the keys.
        clock: tells whether a key is dead.
    """

    table: KeyTable
    clock: Clock

    def of_scope(self, scope: bytes) -> PayloadKey | None:
        """Return the key for new payloads of a scope; None if there is none, or it is dead."""
        return self._living(self.table.of_scope(scope))

    def of_id(self, key_id: bytes) -> PayloadKey | None:
        """Return the key of an id; None if it was destroyed, or is dead."""
        return self._living(self.table.of_id(key_id))

    def _living(self, key: PayloadKey | None) -> PayloadKey | None:
        return key if key is not None and self.clock.now() < key.dies_at else None


@dataclass(eq=False)
class KeyUse:
    """Makes keys for new blocks, and destroys keys without blocks and dead ones.

    Args:
        index: counts the blocks of each scope.
        clock: tells which keys are dead.
        keys: of the store; None if it is not encrypted, or its keys are not there.
        lacks_keys: why the keys of an encrypted store are not there; empty otherwise.
        longest_s: for how long after its computation a block may be read at most.
    """

    index: Index
    clock: Clock
    keys: StoreKeys | None
    lacks_keys: str
    longest_s: float
    _lent: dict[Extent, bytes] = field(default_factory=dict)  # scopes of writes under way
    _suspects: set[bytes] = field(default_factory=set)  # scopes that may have no block

    @property
    def table(self) -> KeyTable | None:
        """The payload keys, if there are any."""
        return None if self.keys is None else self.keys.table

    @property
    def living(self) -> LivingKeys | None:
        """The payload keys as those who move payloads see them, if there are any."""
        return None if self.keys is None else LivingKeys(self.keys.table, self.clock)

    @property
    def names_key(self) -> bytes:
        """The key of the names of blocks; empty if there are no keys."""
        return b"" if self.keys is None else self.keys.table.names_key

    def begin(self, records: Sequence[BlockRecord], extents: Sequence[Extent | None]) -> None:
        """See that there are keys for blocks that will be written into these extents.

        Raises:
            StorageError: the key table cannot be written.
        """
        if self.table is not None:
            pairs = zip(records, extents, strict=True)
            scopes = {extent: scope_of(record) for record, extent in pairs if extent is not None}
            self.table.add({scope: self._death_of(scope) for scope in scopes.values()})
            self._lent |= scopes

    def _death_of(self, scope: bytes) -> float:
        """Return the second after which no block of a scope may be read."""
        return split_scope(scope)[1] + HOUR_S + self.longest_s

    def end(self, extent: Extent) -> None:
        """Note that a write has ended."""
        if (scope := self._lent.pop(extent, None)) is not None:
            self._suspects.add(scope)

    def suspect_all(self) -> None:
        """Note that any scope may have no block."""
        if self.table is not None:
            self._suspects.update(key.scope for key in self.table)

    def ids_of(self, blocks: Iterable[Located]) -> set[bytes]:
        """Return the ids of the keys under which these blocks were encrypted."""
        if self.table is None:
            return set()
        scopes = {scope_of(each.record) for each in blocks if is_encrypted(each.codec)}
        keys = map(self.table.of_scope, scopes)
        return {key.id for key in keys if key is not None}

    def in_namespaces(self, prefix: str) -> list[PayloadKey]:
        """Return the keys of all namespaces whose hex digits begin so."""
        keys = [] if self.table is None else list(self.table)
        return [key for key in keys if key.scope.hex().startswith(prefix)]

    def dropping(self, keys: Iterable[PayloadKey]) -> Iterator[None]:
        """Destroy keys, which still may have blocks, but no write under way, in steps.

        Raises:
            StorageError: the key table cannot be written.
        """
        if self.table is not None:
            for some in cut([key.scope for key in keys], _KEYS_A_STEP):
                self.table.drop(some)
                yield

    def known(self, key_ids: Iterable[bytes]) -> set[bytes]:
        """Return those ids whose keys are still there."""
        return {each for each in key_ids if self.table is not None and self.table.of_id(each)}

    def drop_unused(self) -> StorageError | None:
        """Take all steps of `dropping_unused` at once."""
        return whole(self.dropping_unused())

    def dropping_unused(self) -> Generator[None, None, StorageError | None]:
        """Destroy the keys of scopes without blocks, and dead keys, in steps.

        Returns the error if the table cannot be written; the next call tries again.

        Raises:
            CorruptIndexError, StoreFailedError: the index cannot be read.
        """
        if self.table is None:
            return None
        self._suspects |= self.index.emptied
        self.index.emptied.clear()
        try:
            self.table.drop_dead(self.clock.now())
        except StorageError as error:
            return _kept(error)
        for some in cut([*self._suspects], _KEYS_A_STEP):
            suspects = {*some}.difference(self._lent.values())
            with self.index.reading() as txn:
                unused = [scope for scope in suspects if not txn.num_encrypted(scope)]
            try:
                self.table.drop(unused)
            except StorageError as error:
                return _kept(error)
            self._suspects -= suspects
            yield
        return None

    def sweep_others(self) -> None:
        """Destroy what is over in the files of other stores that no worker holds.

        This reads files as long as there are keys.

        Raises:
            StorageError: the folder of keys cannot be read.
        """
        if self.keys is not None:
            sweep_tables(self.keys.place.key_dir, self.clock.now())


def _kept(error: StorageError) -> StorageError:
    """Return the error with what it means."""
    what = "keys that no block needs could not be destroyed; each sweep tries again"
    return type(error)(error.errno, f"{what}: {error.strerror}")
