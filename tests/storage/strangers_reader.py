"""A reader of stores, written from docs/format.md and docs/encryption.md alone.

It shares no code with tieredkv, and serves to find out whether the pages say all that one needs.
"""

import hashlib
import hmac
import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lmdb
import zstandard
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from xxhash import xxh3_64_digest, xxh3_128_digest

RECORD = struct.Struct("<8sd32s32s32s32sIIIIIIIBBBBddd16sBH21s")
MAGIC = b"TKVSLOT\x03"
WIDTHS = {1: 2, 2: 4}


@dataclass
class Block:
    """One block, as its record says."""

    block: bytes
    parent: bytes
    root: bytes
    namespace: bytes
    position: int
    part: int
    num_parts: int
    kind: int
    page_form: int
    page_bytes: int
    payload_bytes: int
    segment: int
    extent: int
    hits: int
    codec: int
    retention: str
    computed_at: float
    expires_at: float
    last_used: float
    pinned_until: float
    checksum: bytes
    record: bytes = field(repr=False)

    @property
    def place(self) -> tuple[int, int]:
        """Segment and extent."""
        return self.segment, self.extent


class DamagedError(Exception):
    """Bytes are not what the pages say."""


def expect(is_so: bool, what: str) -> None:
    """Raise DamagedError unless it is so."""
    if not is_so:
        raise DamagedError(what)


class Store:
    """A store that nobody writes to, or a copy of one.

    Args:
        folder: of the store.
        keys: payload keys by their ids, of an encrypted store.
    """

    def __init__(self, folder: Path, keys: dict[bytes, bytes] | None = None) -> None:
        self.folder = folder
        self.keys = keys or {}
        marker = json.loads((folder / "format.json").read_text())
        expect((marker["format"], marker["version"]) == ("tieredkv-store", 3), "another format")
        self.retentions: list[str] = marker["retentions"]
        self.models: list[dict[str, Any]] = []
        if (folder / "models.json").exists():
            self.models = json.loads((folder / "models.json").read_text())

    def database(self, name: str) -> dict[bytes, bytes]:
        """Return the entries of a database of the index."""
        path = str(self.folder / "index")
        with lmdb.open(path, max_dbs=9, readonly=True, lock=False) as env, env.begin() as txn:
            entries = txn.cursor(db=env.open_db(name.encode(), txn=txn, create=False))
            return dict(entries)

    def blocks(self) -> list[Block]:
        """Return the blocks that are stored, by the index."""
        return [self.parse(record, key) for key, record in self.database("blocks").items()]

    def parse(self, record: bytes, key: bytes | None = None) -> Block:
        """Read a record, which may have to repeat a key."""
        expect(len(record) == 240, "a record has another length")
        expect(record[:8] == xxh3_64_digest(record[8:]), "a record fails its seal")
        fields = RECORD.unpack(record)
        _, expires_at, *digests = fields[:6]
        position, part, page_bytes, payload_bytes, segment, extent, hits = fields[6:13]
        codec, page_form, retention, size, computed_at, last_used, pinned_until = fields[13:20]
        checksum, kind, num_parts, _ = fields[20:]
        expect(size in (16, 32), "a hash has an impossible size")
        block, parent, root = (digest[:size] for digest in digests[:3])
        expect(key in (None, block), "a record lies under another key")
        name = self.retentions[retention] if retention < len(self.retentions) else ""
        return Block(
            block=block,
            parent=parent,
            root=root,
            namespace=digests[3],
            position=position,
            part=part,
            num_parts=num_parts,
            kind=kind,
            page_form=page_form,
            page_bytes=page_bytes,
            payload_bytes=payload_bytes,
            segment=segment,
            extent=extent,
            hits=hits,
            codec=codec,
            retention=name,
            computed_at=computed_at,
            expires_at=expires_at,
            last_used=last_used,
            pinned_until=pinned_until,
            checksum=checksum,
            record=record,
        )

    def segments(self) -> dict[int, tuple[Path, int]]:
        """Return file and extent size of each segment."""
        found = {}
        for path in (self.folder / "segments").iterdir():
            match = re.fullmatch(r"(\d{8,})-(\d+)\.seg", path.name)
            expect(match is not None, f"{path.name} is no segment")
            assert match is not None
            found[int(match[1])] = path, int(match[2])
        return found

    def image(self, segment: int, extent: int) -> bytes:
        """Read one extent."""
        path, size = self.segments()[segment]
        with path.open("rb") as file:
            file.seek(extent * size)
            return file.read(size)

    def headers(self) -> Iterator[Block]:
        """Yield what the sound headers of all extents say, of stored blocks and of others."""
        for segment, (path, size) in self.segments().items():
            for extent in range(path.stat().st_size // size):
                image = self.image(segment, extent)
                if image[:8] == MAGIC:
                    block = self.parse(image[8:248])
                    expect(block.place == (segment, extent), "a header lies in another extent")
                    yield block

    def unused(self) -> set[tuple[int, int]]:
        """Return the extents that hold no stored block, whatever their headers say."""
        keys = [*self.database("free"), *self.database("pending")]
        return {struct.unpack(">II", key) for key in keys}

    def payload(self, block: Block) -> bytes:
        """Read, check, decrypt and decompress the payload of a block."""
        image = self.image(block.segment, block.extent)
        header = self.parse(image[8:248])
        expect(image[:8] == MAGIC, "an extent has no header")
        expect(fixed(header.record) == fixed(block.record), "a header is another block's")
        is_encrypted, codec = block.codec >= 3, block.codec % 3
        start = 4096 if codec == 0 else 512
        data = image[start : start + block.payload_bytes]
        expect(xxh3_128_digest(data) == block.checksum, "a payload fails its checksum")
        if is_encrypted:
            key_id, nonce, tag = image[248:256], image[256:268], image[268:284]
            data = AESGCM(self.keys[key_id]).decrypt(nonce, data + tag, identity(block.record))
        page = data if codec == 0 else unpacked(data, WIDTHS[codec], block.page_bytes)
        expect(len(page) == block.page_bytes, "a page has another size")
        return page


def fixed(record: bytes) -> bytes:
    """Return the bytes of a record that never change while the payload stays."""
    return record[16:168] + record[172:174] + record[175:184] + record[200:219]


def identity(record: bytes) -> bytes:
    """Return what a payload is authenticated with."""
    return record[16:160] + record[172:174] + record[175:184] + record[216:219]


def unpacked(data: bytes, width: int, page_bytes: int) -> bytes:
    """Put a page together from its planes."""
    page, at = bytearray(page_bytes), 4 * width
    for number, length in enumerate(struct.unpack_from(f"<{width}I", data)):
        end = at + (length & 0x7FFF_FFFF)
        is_plain = length >> 31
        plane = data[at:end] if is_plain else zstandard.decompress(data[at:end])
        expect(len(plane) == page_bytes // width, "a plane has another size")
        page[number::width] = plane
        at = end
    expect(at == len(data), "something lies behind the planes")
    return bytes(page)


class Keys:
    """The keys of a table, `FOLDER_ID.keys`, that has no damage but in single slots.

    Args:
        path: of the file.
        master_key: 32 bytes.

    Attributes:
        payload_keys: by their ids.
        deaths: for each scope the second from which on its key decrypts nothing.
        num_damaged: slots whose seal or tag is wrong.
    """

    def __init__(self, path: Path, master_key: bytes) -> None:
        data = path.read_bytes()
        pages = [data[at : at + 4096] for at in (0, 4096)]
        sound = [page for page in pages if page[4088:] == xxh3_64_digest(page[:4088])]
        expect(bool(sound), "both headers are damaged")
        header = max(sound, key=lambda page: page[56:64][::-1])
        expect(header[:8] == b"TKVKEYS\x02", "another version of the key table")
        check = hashlib.sha256(b"tieredkv master key" + master_key).digest()[:8]
        self.folder_id = header[8:24]
        locks = [header[at : at + 68] for at in (96, 164) if header[at : at + 8] == check]
        expect(bool(locks), "another master key")
        lock_key = hmac.digest(master_key, b"tieredkv key table" + self.folder_id, "sha256")
        nonce, sealed = locks[0][8:20], locks[0][20:]
        self._cipher = AESGCM(AESGCM(lock_key).decrypt(nonce, sealed, self.folder_id + check))
        facts = header[:232] + header[292:4088]
        self.names_key = self._cipher.decrypt(header[232:244], header[244:292], facts)
        self.payload_keys: dict[bytes, bytes] = {}
        self.deaths: dict[bytes, float] = {}
        self.num_damaged = 0
        for number, start in enumerate(range(8192, len(data), 128)):
            if any(slot := data[start : start + 128]):
                self._read(number, slot)

    def _read(self, number: int, slot: bytes) -> None:
        place = self.folder_id + struct.pack("<Q", number)
        try:
            expect(slot[120:] == xxh3_64_digest(slot[:120]), "a slot fails its seal")
            key = self._cipher.decrypt(slot[52:64], slot[64:112], place + slot[:52])
        except (InvalidTag, DamagedError):
            self.num_damaged += 1
            return
        self.payload_keys[slot[:8]] = key
        (self.deaths[slot[8:44]],) = struct.unpack_from("<d", slot, 44)

    def hash_of(self, name: bytes) -> bytes:
        """Turn a name into the hash of the block."""
        return Cipher(algorithms.AES256(self.names_key), modes.ECB()).decryptor().update(name)
