"""The names of blocks in a store: their hashes, under a keyed permutation if it is encrypted.

A block hash follows from a prompt, so whoever has an index of such hashes can test whether a prompt
was cached. Names tell nothing without their key. AES-256 is applied to each 16 bytes of a hash, so
a name is as long as its hash, and whoever has the key can turn it back.

The engine knows hashes only, and the store's records have names only: the client of the store
translates between them. It hands these names to whoever answers an operator, whose ids are made of
names. The store itself translates to find the further pages of a block, which its hash names.
"""

from array import array
from collections.abc import Sequence

from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

from tieredkv.errors import StorageError
from tieredkv.hashing import PageNames
from tieredkv.types import BlockHash, HashAlgo

_AES_BYTES = 16


class Names:
    """Turns block hashes into names and names into block hashes; any thread may use it.

    Args:
        key: of the names; empty for a store that is not encrypted, whose names are the hashes.
    """

    def __init__(self, key: bytes = b"") -> None:
        self._cipher = Cipher(algorithms.AES256(key), modes.ECB()) if key else None

    def hide(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Return the names of blocks.

        Raises:
            StorageError: the store is encrypted, and a hash does not have 16 or 32 bytes.
        """
        return [*hashes] if self._cipher is None else _apply(self._cipher.encryptor(), hashes)

    def reveal(self, names: Sequence[bytes]) -> list[bytes]:
        """Return the hashes of blocks by their names."""
        return [*names] if self._cipher is None else _apply(self._cipher.decryptor(), names)

    def of_pages(self, block_name: bytes, kinds: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the names of a block's further pages, by the kind and the part of each."""
        [block_hash] = self.reveal([block_name])
        algo: HashAlgo = "sha256" if len(block_hash) == 32 else "xxh3_128"
        return self.hide(PageNames(kinds, algo).of(BlockHash(block_hash)))

    def fingerprints(self, heads: bytes) -> bytes:
        """Return the first 8 bytes of the hashes of blocks, side by side.

        Args:
            heads: as many of each name, or 16 of each in an encrypted store.
        """
        if self._cipher is None:
            return heads
        data = self._cipher.decryptor().update(heads)
        return array("Q", data)[::2].tobytes()


def _apply(context: CipherContext, digests: Sequence[bytes]) -> list[bytes]:
    data = context.update(b"".join(digests))
    sizes = set(map(len, digests))
    if any(size % _AES_BYTES for size in sizes):
        raise StorageError("the blocks of an encrypted store have hashes of 16 or 32 bytes")
    if len(sizes) == 1:
        (size,) = sizes
        return [data[start : start + size] for start in range(0, len(data), size)]
    start, changed = 0, list[bytes]()
    for each in digests:
        changed.append(data[start : (start := start + len(each))])
    return changed
