"""AES-256-GCM: round trips, and everything that it rejects."""

from unittest import mock

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from adk_secure_sessions import TamperedError
from adk_secure_sessions.crypto.aead import KEY_LENGTH, NONCE_LENGTH, Aes256Gcm

KEY = bytes(range(32))
CIPHER = Aes256Gcm(KEY)
TAG_LENGTH = 16


@given(st.binary(), st.binary())
def test_what_was_encrypted_is_decrypted(plaintext: bytes, aad: bytes) -> None:
    assert CIPHER.decrypt(CIPHER.encrypt(plaintext, aad), aad) == plaintext


@given(st.binary(), st.binary(), st.binary())
def test_other_associated_data_is_rejected(plaintext: bytes, aad: bytes, other: bytes) -> None:
    sealed = CIPHER.encrypt(plaintext, aad)
    if aad != other:
        with pytest.raises(TamperedError):
            CIPHER.decrypt(sealed, other)


def test_sealed_value_is_nonce_ciphertext_and_tag() -> None:
    nonce = bytes(range(NONCE_LENGTH))
    with mock.patch("os.urandom", return_value=nonce) as urandom:
        sealed = CIPHER.encrypt(b"plaintext", b"aad")
    urandom.assert_called_once_with(NONCE_LENGTH)
    assert sealed[:NONCE_LENGTH] == nonce
    assert len(sealed) == NONCE_LENGTH + len(b"plaintext") + TAG_LENGTH
    assert sealed == nonce + AESGCM(KEY).encrypt(nonce, b"plaintext", b"aad")


def test_every_modified_bit_is_rejected() -> None:
    sealed = CIPHER.encrypt(b"plaintext", b"aad")
    for position in range(len(sealed) * 8):
        modified = bytearray(sealed)
        modified[position // 8] ^= 1 << position % 8
        with pytest.raises(TamperedError):
            CIPHER.decrypt(bytes(modified), b"aad")


def test_every_shortened_value_is_rejected() -> None:
    sealed = CIPHER.encrypt(b"plaintext", b"aad")
    for length in range(len(sealed)):
        with pytest.raises(TamperedError):
            CIPHER.decrypt(sealed[:length], b"aad")


def test_another_key_is_rejected() -> None:
    with pytest.raises(TamperedError):
        Aes256Gcm(bytes(32)).decrypt(CIPHER.encrypt(b"plaintext", b"aad"), b"aad")


@pytest.mark.parametrize("length", [0, 16, 24, 31, 33, 64])
def test_key_of_another_length_is_rejected(length: int) -> None:
    with pytest.raises(ValueError, match=f"{KEY_LENGTH} bytes, got {length}"):
        Aes256Gcm(bytes(length))


def test_no_nonce_is_used_twice() -> None:
    count = 20_000
    nonces = {CIPHER.encrypt(b"", b"")[:NONCE_LENGTH] for _ in range(count)}
    assert len(nonces) == count
