"""Encryption of payloads: AES-256-GCM with a fresh random nonce for each write.

This module knows bytes in memory: the caller says what a payload is authenticated with, which is
every field of its record that does not change. Any thread may call it, and the interpreter lock is
free while bytes are encrypted.
"""

import secrets
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from tieredkv.storage.keys.layout import NONCE_BYTES, PayloadKey


class Sealed(NamedTuple):
    """How one payload was encrypted.

    Attributes:
        nonce: 12 random bytes.
        tag: 16 bytes; shows that the payload and what it was authenticated with are unchanged.
    """

    nonce: bytes
    tag: bytes


def encrypt(key: PayloadKey, authenticated: bytes, payload: memoryview, into: memoryview) -> Sealed:
    """Encrypt a payload into other memory of the same size.

    NOTE: never in place. The page of the payload may be on its way up to the GPU meanwhile.

    Args:
        key: of the payload's scope.
        authenticated: the fixed fields of the payload's record (`identity_of`).
        payload: what is encrypted.
        into: where the encrypted bytes go.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    encryptor = Cipher(algorithms.AES256(key.key), modes.GCM(nonce)).encryptor()
    encryptor.authenticate_additional_data(authenticated)
    encryptor.update_into(payload, into)
    encryptor.finalize()
    return Sealed(nonce, encryptor.tag)


def decrypt(key: PayloadKey, authenticated: bytes, how: Sealed, payload: memoryview) -> bool:
    """Decrypt a payload in place; return False if it is not the one of this record.

    The memory then holds bytes that nobody may use.
    """
    decryptor = Cipher(algorithms.AES256(key.key), modes.GCM(how.nonce, how.tag)).decryptor()
    decryptor.authenticate_additional_data(authenticated)
    decryptor.update_into(payload, payload)
    try:
        decryptor.finalize()
    except InvalidTag:
        return False
    return True
