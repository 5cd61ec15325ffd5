"""What those gain who can write to the folder of an encrypted store: nothing but misses."""

import shutil
from pathlib import Path

from tests.golden import refused
from tests.storage.blocks import (
    BLOCK_BYTES,
    RETENTIONS,
    CheckedStore,
    change_bytes,
    load,
    page_with,
    put,
    segment_files,
)
from tests.storage.test_encryption import Encrypted, image_of, locate
from tests.storage.test_encryption import encrypted as encrypted
from tieredkv.errors import StorageError
from tieredkv.storage.format.header import decode_encryption, encode_header_into
from tieredkv.storage.format.record import CODEC_RAW, HEADER_BYTES, payload_checksum
from tieredkv.types import BlockRecord


def test_a_payload_is_bound_to_its_block(encrypted: Encrypted) -> None:
    """An attacker who may write cannot have one block's payload served as another's."""
    one, other = encrypted.record("a"), encrypted.record("b")
    with encrypted.open() as store:
        put(store, one, other)
        found = {r.block_hash: image_of(encrypted.folder, locate(store, r)) for r in (one, other)}
        located = locate(store, other)
        forged = bytearray(found[other.block_hash])
        forged[HEADER_BYTES:] = found[one.block_hash][HEADER_BYTES:]
        checksum = payload_checksum(bytes(forged[HEADER_BYTES:][:BLOCK_BYTES]))
        forged_entry = located._replace(payload_checksum=checksum)
        how = decode_encryption(found[one.block_hash])
        encode_header_into(forged, forged_entry, RETENTIONS, how)
        change_bytes(
            segment_files(encrypted.folder)[0],
            located.extent.number * len(forged),
            lambda _: bytes(forged),
            len(forged),
        )
        with refused(StorageError):
            store.read(forged_entry, page_with(b"", BLOCK_BYTES))


def forge_clear(store: CheckedStore, record: BlockRecord) -> None:
    """Put a clear payload in the place of an encrypted one."""
    located = locate(store, record)
    payload = bytes(BLOCK_BYTES)
    checksum = payload_checksum(payload)
    forged = located._replace(codec=CODEC_RAW, payload_checksum=checksum)
    image = bytearray(HEADER_BYTES) + payload
    encode_header_into(image, forged, RETENTIONS)
    [file] = segment_files(Path(store.path))
    change_bytes(file, located.extent.number * len(image), lambda _: bytes(image), len(image))
    with store.index.writing() as txn:
        txn.replace(located, forged)


def test_a_clear_payload_in_an_encrypted_store_is_a_miss(encrypted: Encrypted) -> None:
    record = encrypted.record()
    with encrypted.open() as store:
        put(store, record)
        forge_clear(store, record)
        assert load(store, record) == "key"
        put(store, record)
        forge_clear(store, record)
    shutil.rmtree(encrypted.folder / "index")
    with encrypted.open() as store:  # whose index is made again from what is there
        assert load(store, record) is None
