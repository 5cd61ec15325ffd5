"""The payloads of blocks: how they are sealed into extents, and opened and checked again.

This module knows what the bytes of an extent must be; it does not know which extents are in use.
Any thread may call it.
"""

from collections.abc import Callable

from tieredkv.errors import StorageError
from tieredkv.storage.extents.files import SegmentFiles
from tieredkv.storage.format.header import (
    Encryption,
    decode_encryption,
    decode_header,
    encode_header_into,
    is_header_of,
)
from tieredkv.storage.format.planes import WIDTHS, Packed, Rate, scratch, unpack
from tieredkv.storage.format.record import (
    CODEC_RAW,
    HEADER_BYTES,
    PACKED_HEADER_BYTES,
    Extent,
    Located,
    Retentions,
    clear_codec,
    corrupt,
    encrypted,
    extent_bytes_for,
    header_bytes_for,
    identity_of,
    is_encrypted,
    padded_bytes,
    payload_checksum,
    scope_of,
)
from tieredkv.storage.keys.cipher import Sealed, decrypt, encrypt
from tieredkv.storage.keys.use import LivingKeys
from tieredkv.types import BlockRecord

PIECE_BYTES = 512 << 10  # of a block, so that a write can be given up while it goes on


class Payloads:
    """Moves the payloads of blocks between pages and extents.

    Args:
        files: where the extents lie.
        keys: new payloads are encrypted under these; None if the store is not encrypted, or its
            keys are not there.
        retentions: of the store.

    Attributes:
        unpacking: how fast payloads are decompressed.
    """

    def __init__(
        self, files: SegmentFiles, keys: LivingKeys | None, retentions: Retentions
    ) -> None:
        self.keys = keys
        self.unpacking = Rate()
        self._files = files
        self._retentions = retentions

    def write(
        self,
        extent: Extent,
        record: BlockRecord,
        payload: memoryview,
        packed: Packed | None,
        before_piece: Callable[[int], None],
    ) -> Located:
        """Write a block's header and payload into an extent; return its entry for the index.

        The payload is written from its page without a copy; bytes of the page behind the block are
        set to zero first. If `packed` is given, it is written instead, with zeroes to the end of
        the extent, where older bytes may lie. If there are keys, either is encrypted into memory of
        this thread and written from there. Before each piece of the block, `before_piece` is called
        with the number of bytes that are written; what it raises ends the write.
        """
        if self.keys is not None:
            clear = payload[: record.size_bytes] if packed is None else packed.payload
            number = CODEC_RAW if packed is None else packed.codec
            written, image = self._encrypt(self.keys, extent, record, clear, number)
            # Cut as a block that is not encrypted: the last piece is no single page.
            start = HEADER_BYTES if packed is None else 0
            buffers = [each for each in (image[:start], image[start:]) if each]
        elif packed is None:
            size, padded = record.size_bytes, padded_bytes(record.size_bytes)
            written = Located(record, extent, size, payload_checksum(payload[:size]))
            payload[size:padded] = bytes(padded - size)
            buffers = [scratch(HEADER_BYTES), payload[:padded]]
            encode_header_into(buffers[0], written, self._retentions)
        else:
            checksum = payload_checksum(packed.payload)
            written = Located(record, extent, len(packed.payload), checksum, packed.codec)
            buffers = [packed.image]
            encode_header_into(packed.image, written, self._retentions)
        whole, num_written = buffers.pop(), 0
        for start in range(0, len(whole), PIECE_BYTES):
            before_piece(num_written)
            buffers.append(whole[start : start + PIECE_BYTES])
            num_written += self._files.write(extent, buffers, num_written)
        return written

    def _encrypt(
        self,
        keys: LivingKeys,
        extent: Extent,
        record: BlockRecord,
        payload: memoryview,
        number: int,
    ) -> tuple[Located, memoryview]:
        """Return a block's entry for the index, and the whole image of its extent.

        NOTE: in one go, since threads that encrypt 512 KiB at a time wait for the interpreter lock
        so often that stores took 1.21 times as long as without encryption, instead of 1.14.
        """
        key = keys.of_scope(scope_of(record))
        if key is None:
            raise corrupt(record.block_hash, "key", "its payload key has died meanwhile")
        number, size = encrypted(number), len(payload)
        image = scratch(extent_bytes_for(size, number, record.size_bytes))
        start = header_bytes_for(number)
        end = start + size
        how = encrypt(key, identity_of(record, number, size), payload, image[start:end])
        image[end:] = bytes(len(image) - end)
        checksum = payload_checksum(image[start:end])
        written = Located(record, extent, size, checksum, number)
        encode_header_into(image, written, self._retentions, Encryption(key.id, *how))
        return written, image

    def read(self, located: Located, into: memoryview) -> None:
        """Read a block from its extent into `into` and check it; see `Store.read`.

        The index and the extent's header both hold the block's identity, parent, sizes and
        checksum. They must agree before the bytes may be used. An encrypted payload is checked by
        its tag. Its checksum tells damage, and is not computed while there is none.
        """
        block_hash, size = located.record.block_hash, located.payload_bytes
        block, number = into[: located.record.size_bytes], clear_codec(located.codec)
        if number == CODEC_RAW and size == len(block):
            header, payload = scratch(HEADER_BYTES), block
            buffers = [header, into[: padded_bytes(size)]]
        elif number in WIDTHS and size < len(block):
            header = scratch(padded_bytes(PACKED_HEADER_BYTES + size))
            payload = header[PACKED_HEADER_BYTES:][:size]
            buffers = [header]
        else:
            raise corrupt(block_hash, "codec", f"codec {located.codec} is unknown")
        if located.extent.segment not in self._files:
            what = f"the segment file of {located.extent} is missing"
            raise corrupt(block_hash, "missing_segment", what)
        count = self._files.read(located.extent, [*buffers]) - header_bytes_for(located.codec)
        if count < size:
            what = f"only {max(count, 0)} of its {size} bytes are in the file"
            raise corrupt(block_hash, "truncated", what)
        if not is_header_of(decode_header(header), located):
            what = "the extent header is damaged or belongs to another block"
            raise corrupt(block_hash, "header", what)
        if self.keys is not None and not is_encrypted(located.codec):
            raise corrupt(block_hash, "key", "its payload is clear in an encrypted store")
        if not is_encrypted(located.codec):
            _compare_checksum(located, payload)
        elif not self._decrypt(located, decode_encryption(header), payload):
            self._files.read(
                located.extent, buffers
            )  # once more, since decrypting changed the bytes
            _compare_checksum(located, payload)
            raise corrupt(block_hash, "tag", "the payload is not the one that was encrypted")
        if number != CODEC_RAW:
            with self.unpacking.timing(len(block)):
                is_block = unpack(payload, number, block)
            if not is_block:
                raise corrupt(block_hash, "codec", "the payload cannot be decompressed")

    def _decrypt(self, located: Located, how: Encryption, payload: memoryview) -> bool:
        """Decrypt a payload in place; return False if it is not the one that was encrypted."""
        record, block_hash = located.record, located.record.block_hash
        if self.keys is None:
            raise StorageError(f"`{self._files.folder}`: the keys of its blocks are not there")
        key = self.keys.of_id(how.key_id)
        if key is None or key.scope != scope_of(record):
            raise corrupt(block_hash, "key", "the key of its payload is gone")
        known = identity_of(record, located.codec, len(payload))
        return decrypt(key, known, Sealed(how.nonce, how.tag), payload)

    def header_at(self, extent: Extent) -> Located | None:
        """Return what an extent's header says of its block; None if there is no sound header.

        In an encrypted store the header of a payload whose key is gone does not count, nor does one
        of a clear payload.
        """
        found, key_id = self.stored_at(extent)
        place = (extent, self._files.extent_bytes(extent.segment))
        if found is None or (found.extent, found.extent_bytes) != place:
            return None
        if self.keys is not None and (not key_id or self.keys.of_id(key_id) is None):
            return None
        return found

    def stored_at(self, extent: Extent) -> tuple[Located | None, bytes]:
        """Return what lies in an extent, and the id of its key; empty if it is not encrypted."""
        header = scratch(HEADER_BYTES)
        self._files.read(extent, [header])
        found = decode_header(header, self._retentions)
        has_key = found is not None and is_encrypted(found.codec)
        return found, decode_encryption(header).key_id if has_key else b""


def _compare_checksum(located: Located, payload: memoryview) -> None:
    if payload_checksum(payload) != located.payload_checksum:
        raise corrupt(located.record.block_hash, "checksum", "the payload fails its checksum")
