"""Encryption of payloads: AES-256-GCM with a fresh random nonce for each write.

This module knows bytes in memory; `tieredkv.storage.key_table` knows keys, and
`tieredkv.storage.format` the layout. Any thread may call it, and the interpreter lock is free while
bytes are encrypted.
"""

import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from tieredkv.storage.format.header import Encryption
from tieredkv.storage.format.record import identity_of
from tieredkv.storage.key_table import NONCE_BYTES, PayloadKey
from tieredkv.types import BlockRecord


def encrypt(
    key: PayloadKey, record: BlockRecord, codec: int, payload: memoryview, into: memoryview
) -> Encryption:
    """Encrypt a payload into other memory of the same size.

    NOTE: never in place. The page of the payload may be on its way up to the GPU meanwhile.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    encryptor = Cipher(algorithms.AES256(key.key), modes.GCM(nonce)).encryptor()
    encryptor.authenticate_additional_data(identity_of(record, codec, len(payload)))
    encryptor.update_into(payload, into)
    encryptor.finalize()
    return Encryption(key.id, nonce, encryptor.tag)


def decrypt(
    key: PayloadKey, record: BlockRecord, codec: int, how: Encryption, payload: memoryview
) -> bool:
    """Decrypt a payload in place; return False if it is not the one of this block.

    The memory then holds bytes that nobody may use.
    """
    decryptor = Cipher(algorithms.AES256(key.key), modes.GCM(how.nonce, how.tag)).decryptor()
    decryptor.authenticate_additional_data(identity_of(record, codec, len(payload)))
    decryptor.update_into(payload, payload)
    try:
        decryptor.finalize()
    except InvalidTag:
        return False
    return True
