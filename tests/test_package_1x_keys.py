"""Values that the backends of the distribution adk-secure-sessions 1.x encrypted are decrypted.

Release 1.3.1 of that distribution decrypts the values in `VALUES`, too.  They were computed from
the description of the format, with a fixed salt, IV, nonce and time.
"""

import base64
import pickle
from pathlib import Path

import pytest

from adk_secure_sessions import ConfigurationError
from adk_secure_sessions.crypto.package_1x import Package1xKeys, is_envelope, parse_envelope
from adk_secure_sessions.errors import DecryptionError, Reason, TamperedError, UnknownKeyError

PLAINTEXT = b'{"k": "v"}'
PASSPHRASE = "my-secret-passphrase"
DIRECT = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="
RAW = bytes(range(32))
SALTED = (
    "AQEBAAECAwQFBgcICQoLDA0OD2dBQUFBQUJwVmJrQUVCRVNFeFFWRmhjWUdSb2JIQjBlSF9NVEJlNFBsbS02SU9IaU9X"
    "TkZ5R1lUVHpuNUtIT05DRGlUVUktZlJpSFVGNFkwcTM0ZGlLdUZ3M2x4UXVZdFF3PT0="
)
UNSALTED = (
    "AQFnQUFBQUFCcFZia0FFQkVTRXhRVkZoY1lHUm9iSEIwZUg2RkJpMjdmal9rVUhCakJKVXN6bXVFWXV1UFk1X2tfYXE2"
    "eG9LRmRvcjAwUjBNdmJJbEIzS0RmaHJYYnJLMFV1Zz09"
)
WITH_FERNET_KEY = (
    "AQFnQUFBQUFCcFZia0FFQkVTRXhRVkZoY1lHUm9iSEIwZUh6b3Zhb2pOaVhsd2dsUzBDTDVkazBMbW1BRk9WMXdmRUUy"
    "RlY4QnBCd1UyM0RCNmdQNHFRd2ZHVkxYZnNHZEpYUT09"
)
WITH_AES = "AQIAAQIDBAUGBwgJCgs8IL05/8Xgba88/3j5OSMbjzm9JDdnXitXHw=="
VALUES = [SALTED, UNSALTED, WITH_FERNET_KEY, WITH_AES]


@pytest.fixture(scope="module")
def keys() -> Package1xKeys:
    return Package1xKeys([PASSPHRASE, DIRECT])


@pytest.mark.parametrize("stored", VALUES)
def test_value_is_decrypted_with_the_key_that_fits(keys: Package1xKeys, stored: str) -> None:
    envelope = base64.b64decode(stored)
    for start in (stored[:4], stored, stored.encode(), envelope[:4], envelope):
        assert is_envelope(start)
    assert parse_envelope(stored) == (envelope, True)
    assert parse_envelope(envelope) == (envelope, False)
    assert keys.decrypt(stored) == PLAINTEXT
    assert keys.decrypt(stored.encode()) == PLAINTEXT
    assert keys.decrypt(envelope) == PLAINTEXT  # as releases before 1.1 stored it


@pytest.mark.parametrize("stored", VALUES)
def test_modified_value_is_rejected(keys: Package1xKeys, stored: str) -> None:
    envelope = bytearray(base64.b64decode(stored))
    for position in (len(envelope) // 2, len(envelope) - 10):
        modified = bytearray(envelope)
        modified[position] ^= 1
        with pytest.raises(TamperedError):
            keys.decrypt(bytes(modified))


@pytest.mark.parametrize("key", [RAW, DIRECT, RAW.hex(), base64.b64encode(RAW).decode()])
def test_aes_key_may_be_bytes_or_text(key: str | bytes) -> None:
    assert Package1xKeys([key]).decrypt(WITH_AES) == PLAINTEXT


@pytest.mark.parametrize("key", [DIRECT, DIRECT.encode(), DIRECT + "\n", DIRECT.replace("=", "==")])
def test_text_that_1x_takes_for_a_fernet_key_is_one(key: str | bytes) -> None:
    assert Package1xKeys([key]).decrypt(WITH_FERNET_KEY) == PLAINTEXT


@pytest.mark.parametrize(
    ("key", "stored", "message"),
    [
        (DIRECT, SALTED, "no passphrase was given"),
        (PASSPHRASE, WITH_AES, "no 32-byte key was given"),
    ],
)
def test_missing_kind_of_key_is_named(key: str, stored: str, message: str) -> None:
    with pytest.raises(UnknownKeyError, match=message):
        Package1xKeys([key]).decrypt(stored)


def test_wrong_key_is_rejected() -> None:
    other = bytes(range(32, 64))
    keys = Package1xKeys([other, base64.urlsafe_b64encode(other)])
    for stored in (WITH_FERNET_KEY, WITH_AES):
        with pytest.raises(TamperedError, match="wrong key"):
            keys.decrypt(stored)


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        ("", Reason.MISSING),
        (None, Reason.MISSING),
        (5, Reason.MALFORMED),
        ('{"k": "v"}', Reason.PLAINTEXT),
        ("AQ", Reason.MALFORMED),
        ("AQE=", Reason.MALFORMED),  # a header alone
        (WITH_AES + "\n", Reason.MALFORMED),
        ("AgEAAAAA", Reason.MALFORMED),  # another version
        ("ARAAAAAA", Reason.UNKNOWN_BACKEND),
        (b"\x01\x01" + b"\x01" + bytes(50), Reason.AUTHENTICATION),  # shorter than a salted token
        (b"\x01\x02" + bytes(27), Reason.AUTHENTICATION),  # shorter than a nonce and a tag
        ("\ud800", Reason.MALFORMED),
    ],
)
def test_malformed_value_is_rejected(keys: Package1xKeys, stored: object, reason: Reason) -> None:
    with pytest.raises(DecryptionError) as caught:
        keys.decrypt(stored)
    assert caught.value.reason == reason


@pytest.mark.parametrize("bad", [[], [""], [b""], [5], [PASSPHRASE, None]])
def test_keys_that_cannot_be_used_are_named(bad: list[object]) -> None:
    with pytest.raises(ConfigurationError, match="key"):
        Package1xKeys(bad)  # type: ignore[arg-type]


def test_keys_are_not_shown(keys: Package1xKeys) -> None:
    assert repr(keys) == "<Package1xKeys>"
    with pytest.raises(TypeError):
        pickle.dumps(keys)
    with pytest.raises(TamperedError) as caught:
        keys.decrypt(bytes([1, 2]) + bytes(40))
    frames = [entry.path.name for entry in caught.traceback if isinstance(entry.path, Path)]
    assert "package_1x.py" not in frames


@pytest.mark.parametrize(
    "start", ["{", "AQ", "", "AQMA", "gASV", b"\x80\x04", b"\x01\x03", "AQI", "\ud800"]
)
def test_other_values_are_not_taken_for_an_envelope(start: str | bytes) -> None:
    assert not is_envelope(start)
