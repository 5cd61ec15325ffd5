"""A payload is decrypted only with its key, its fields and its own bytes."""

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tieredkv.storage.keys.cipher import Sealed, decrypt, encrypt
from tieredkv.storage.keys.layout import PayloadKey

KEY = PayloadKey(b"k" * 8, bytes(range(32)), b"s" * 36, 1e9)
FIELDS = b"the fields that do not change"
PAYLOAD = bytes(range(256)) * 16


def encrypted() -> tuple[bytearray, Sealed]:
    into = bytearray(len(PAYLOAD))
    how = encrypt(KEY, FIELDS, memoryview(PAYLOAD), memoryview(into))
    return into, how


def test_a_payload_comes_back_in_its_own_memory() -> None:
    data, how = encrypted()
    assert data != PAYLOAD
    assert bytes(data) + how.tag == AESGCM(KEY.key).encrypt(how.nonce, PAYLOAD, FIELDS)
    assert decrypt(KEY, FIELDS, how, memoryview(data))
    assert data == PAYLOAD


def test_each_encryption_has_a_fresh_nonce() -> None:
    assert len({encrypted()[1].nonce for _ in range(20)}) == 20


@pytest.mark.parametrize("what", ["key", "fields", "nonce", "tag", "payload"])
def test_a_payload_is_refused_if_one_thing_is_another(what: str) -> None:
    data, how = encrypted()
    key, fields = KEY, FIELDS
    if what == "key":
        key = KEY._replace(key=bytes(32))
    elif what == "fields":
        fields = FIELDS[:-1] + b"T"
    elif what == "nonce":
        how = how._replace(nonce=bytes(12))
    elif what == "tag":
        how = how._replace(tag=bytes(16))
    else:
        data[-1] ^= 1
    assert not decrypt(key, fields, how, memoryview(data))
