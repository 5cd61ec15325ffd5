"""The names of blocks in the index of an encrypted store: their hashes, under a keyed permutation.

A block hash follows from a prompt, so whoever has an index of such hashes can test whether a prompt
was cached. Names tell nothing without their key. AES-256 is applied to each 16 bytes of a hash, so
a name is as long as its hash, and the worker can turn it back.

The engine knows hashes only, and the store names only: this module translates the messages between
them. It knows neither index nor keys' whereabouts. Any thread may use it.
"""

from collections.abc import Sequence

from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from msgspec.structs import replace

from tieredkv.errors import StorageError
from tieredkv.storage import worker_messages as messages
from tieredkv.storage.format.record import linked_digests, with_digests
from tieredkv.storage.results import BlockInfo, TouchItem
from tieredkv.storage.worker_messages import LentPage, PageLoaded, PageStored
from tieredkv.types import BlockRecord

_AES_BYTES = 16


class Names:
    """Turns block hashes into names and names into block hashes."""

    def __init__(self, key: bytes) -> None:
        self._cipher = Cipher(algorithms.AES256(key), modes.ECB())

    def hide(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Return the names of blocks.

        Raises:
            StorageError: a hash does not have 16 or 32 bytes.
        """
        return _apply(self._cipher.encryptor(), hashes)

    def reveal(self, names: Sequence[bytes]) -> list[bytes]:
        """Return the hashes of blocks by their names."""
        return _apply(self._cipher.decryptor(), names)

    def hide_record(self, record: BlockRecord) -> BlockRecord:
        """Return a record with names in the places of the block's hash and its parent's."""
        return self.hide_records([record])[0]

    def hide_records(self, records: Sequence[BlockRecord]) -> list[BlockRecord]:
        """Return records as `hide_record` does."""
        return _with_digests(records, self.hide(_digests_of(records)))

    def reveal_records(self, records: Sequence[BlockRecord]) -> list[BlockRecord]:
        """Undo `hide_records`."""
        return _with_digests(records, self.reveal(_digests_of(records)))

    def hide_infos(self, blocks: Sequence[BlockInfo]) -> list[BlockInfo]:
        """Return descriptions with names in the places of hashes, all in hex."""
        return _with_hex_digests(blocks, self.hide(_hex_digests_of(blocks)))

    def reveal_infos(self, blocks: Sequence[BlockInfo]) -> list[BlockInfo]:
        """Undo `hide_infos`."""
        return _with_hex_digests(blocks, self.reveal(_hex_digests_of(blocks)))

    def reveal_found(self, found: dict[bytes, bytes]) -> dict[bytes, bytes]:
        """Return sealed records by block hash, with hashes in the places of names."""
        digests = self.reveal(linked_digests(found.values()))
        return with_digests(found.values(), digests)


def _apply(context: CipherContext, digests: Sequence[bytes]) -> list[bytes]:
    if any(len(each) % _AES_BYTES for each in digests):
        raise StorageError("the blocks of an encrypted store have hashes of 16 or 32 bytes")
    data, start, changed = context.update(b"".join(digests)), 0, []
    for each in digests:
        changed.append(data[start : (start := start + len(each))])
    return changed


def _digests_of(records: Sequence[BlockRecord]) -> list[bytes]:
    return [digest for each in records for digest in (each.block_hash, each.parent_hash)]


def _with_digests(records: Sequence[BlockRecord], digests: list[bytes]) -> list[BlockRecord]:
    pairs = zip(records, digests[::2], digests[1::2], strict=True)
    return [replace(it, block_hash=block, parent_hash=parent) for it, block, parent in pairs]


def _hex_digests_of(blocks: Sequence[BlockInfo]) -> list[bytes]:
    return [bytes.fromhex(it) for each in blocks for it in (each.block_hash, each.parent_hash)]


def _with_hex_digests(blocks: Sequence[BlockInfo], digests: list[bytes]) -> list[BlockInfo]:
    pairs = zip(blocks, digests[::2], digests[1::2], strict=True)
    return [replace(it, block_hash=one.hex(), parent_hash=two.hex()) for it, one, two in pairs]


class Naming:
    """Translates messages: the engine's for the store, and the store's for the engine.

    Args:
        names: of the store; None if it knows blocks by their hashes.
    """

    def __init__(self, names: Names | None) -> None:
        self._names = names

    def hear(self, message: messages.EngineMessage) -> messages.EngineMessage:
        """Return a message of the engine with names instead of hashes."""
        if (names := self._names) is None:
            return message
        match message:
            case messages.LookupCall(_, hashes) | messages.ProbeCall(_, hashes):
                return replace(message, hashes=names.hide(hashes))
            case messages.DeleteCall(_, hashes):
                return replace(message, hashes=names.hide(hashes))
            case messages.LoadCall(pages) | messages.StoreCall(pages):
                hidden = names.hide_records([each.record for each in pages])
                pairs = zip(hidden, pages, strict=True)
                lent = [LentPage(record, each.page_id) for record, each in pairs]
                return replace(message, pages=lent)
            case messages.TouchCall(items):
                return messages.TouchCall(self._hide_touches(names, items))
            case _:
                return message

    def tell(self, message: messages.WorkerMessage) -> messages.WorkerMessage:
        """Return a message of the store with hashes instead of names."""
        if (names := self._names) is None:
            return message
        match message:
            case messages.LookupDone(job, found):
                return messages.LookupDone(job, names.reveal_found(found))
            case messages.BlocksGone(hashes):
                return messages.BlocksGone(names.reveal(hashes))
            case messages.Completions(pages):
                return replace(message, pages=self._reveal_pages(names, pages))
            case messages.ControlRequest(_, _, following, before):
                following, before = names.reveal(following), names.reveal(before)
                return replace(message, following=following, before=before)
            case _:
                return message

    @staticmethod
    def _hide_touches(names: Names, items: Sequence[TouchItem]) -> list[TouchItem]:
        hidden = names.hide([each.block_hash for each in items])
        return [replace(it, block_hash=name) for it, name in zip(items, hidden, strict=True)]

    @staticmethod
    def _reveal_pages(
        names: Names, pages: Sequence[PageLoaded | PageStored]
    ) -> list[PageLoaded | PageStored]:
        records = [it.record for it in pages if isinstance(it, PageLoaded) and it.record]
        found = iter(names.reveal_records(records))
        hashes = names.reveal([each.block_hash for each in pages])
        revealed = list[PageLoaded | PageStored]()
        for page, block_hash in zip(pages, hashes, strict=True):
            page = replace(page, block_hash=block_hash)
            if isinstance(page, PageLoaded) and page.record:
                page = replace(page, record=next(found))
            revealed.append(page)
        return revealed
