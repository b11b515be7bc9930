"""Third parties' known answers: NIST's for AES-256-GCM, the Fernet specification's own."""

import hmac
import json
import os
from base64 import b64decode, urlsafe_b64decode, urlsafe_b64encode
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from cryptography.fernet import Fernet, InvalidToken
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.hmac import HMAC

from adk_secure_sessions import TamperedError
from adk_secure_sessions.backends.fernet import FernetCipher, split_key
from adk_secure_sessions.crypto.aead import Aes256Gcm

VECTORS = Path(__file__).parent / "vectors"
Json = dict[str, Any]


def load(name: str) -> Json:
    found: Json = json.loads((VECTORS / name).read_text(encoding="utf-8"))
    return found


NIST = load("nist_aes_256_gcm.json")["cases"]
FERNET = load("fernet_spec.json")
assert NIST, "an empty vector file must not pass as success"
assert all(FERNET[kind] for kind in ("generate", "verify", "invalid"))

# Stored tokens do not expire (docs/format.md), so these two are valid.
ABOUT_TIME = {"far-future TS (unacceptable clock skew)", "expired TTL"}
# Stored tokens are bytes, so their base64 cannot be wrong.
ABOUT_TEXT = {"invalid base64"}
REFUSED = [case for case in FERNET["invalid"] if case["desc"] not in ABOUT_TIME | ABOUT_TEXT]
IN_TIME = [case for case in FERNET["invalid"] if case["desc"] in ABOUT_TIME]


def description(case: Json) -> str:
    return str(case.get("desc") or case.get("name") or case["token"][-8:])


# --- NIST ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", NIST, ids=description)
def test_nist_case_is_decrypted_or_rejected_as_named(case: Json) -> None:
    cipher = Aes256Gcm(bytes.fromhex(case["key"]))
    sealed = bytes.fromhex(case["iv"] + case["ciphertext"] + case["tag"])
    aad = bytes.fromhex(case["aad"])
    if case["expect"] == "ok":
        assert cipher.decrypt(sealed, aad).hex() == case["plaintext"]
    else:
        with pytest.raises(TamperedError):
            cipher.decrypt(sealed, aad)


@pytest.mark.parametrize("case", [c for c in NIST if c["expect"] == "ok"], ids=description)
def test_encrypting_a_nist_case_gives_its_exact_bytes(case: Json) -> None:
    cipher = Aes256Gcm(bytes.fromhex(case["key"]))
    with mock.patch("os.urandom", return_value=bytes.fromhex(case["iv"])):
        sealed = cipher.encrypt(bytes.fromhex(case["plaintext"]), bytes.fromhex(case["aad"]))
    assert sealed.hex() == case["iv"] + case["ciphertext"] + case["tag"]


def test_nist_cases_cover_both_outcomes_and_all_lengths() -> None:
    assert {case["expect"] for case in NIST} == {"ok", "TamperedError"}
    lengths = {(len(case["ciphertext"]) // 2, len(case["aad"]) // 2) for case in NIST}
    assert {length for length, _ in lengths} == {0, 13, 16, 32, 51}
    assert {length for _, length in lengths} == {0, 16, 20, 48, 90}


# --- Fernet --------------------------------------------------------------------------------------


class SpecCipher(FernetCipher):
    """Our cipher with the token's key as the specification gives it, not derived."""

    def __init__(self, secret: str) -> None:
        super().__init__(urlsafe_b64decode(secret))
        self._secret = secret

    def _token_keys(self, associated_data: bytes) -> tuple[HMAC, AES]:
        return split_key(urlsafe_b64decode(self._secret))


def seconds(case: Json) -> int:
    return int(datetime.fromisoformat(case["now"]).timestamp())


@pytest.mark.parametrize("case", FERNET["generate"], ids=description)
def test_stored_body_is_the_specified_token_as_bytes(case: Json) -> None:
    with (
        mock.patch("os.urandom", return_value=bytes(case["iv"])),
        mock.patch("time.time", return_value=seconds(case)),
    ):
        body = SpecCipher(case["secret"]).encrypt(case["src"].encode(), b"")
        token = Fernet(case["secret"]).encrypt(case["src"].encode())
    assert token.decode() == case["token"]
    assert body == urlsafe_b64decode(case["token"])


@pytest.mark.parametrize("case", [*FERNET["generate"], *FERNET["verify"]], ids=description)
def test_specified_token_is_decrypted(case: Json) -> None:
    body = urlsafe_b64decode(case["token"])
    assert SpecCipher(case["secret"]).decrypt(body, b"").decode() == case["src"]


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 31, 32, 33, 5000])
def test_tokens_are_those_of_the_library_at_every_length(length: int) -> None:
    secret, plaintext = Fernet.generate_key(), os.urandom(length)
    ours, theirs = SpecCipher(secret.decode()), Fernet(secret)
    body = ours.encrypt(plaintext, b"")
    assert theirs.decrypt(urlsafe_b64encode(body)) == plaintext
    assert ours.decrypt(urlsafe_b64decode(theirs.encrypt(plaintext)), b"") == plaintext
    for end in (1, 16, 32):
        with pytest.raises(TamperedError):
            ours.decrypt(body[:-end], b"")


def test_authentic_token_with_wrong_padding_is_rejected() -> None:
    secret = urlsafe_b64encode(bytes(32)).decode()
    signed = b"\x80" + bytes(24) + bytes(16)  # a block that decrypts to no padding
    mac = hmac.digest(bytes(16), signed, "sha256")
    with pytest.raises(InvalidToken):
        Fernet(secret).decrypt(urlsafe_b64encode(signed + mac))
    with pytest.raises(TamperedError):
        SpecCipher(secret).decrypt(signed + mac, b"")


@pytest.mark.parametrize("case", REFUSED, ids=description)
def test_specified_invalid_token_is_rejected(case: Json) -> None:
    with pytest.raises(InvalidToken):
        Fernet(case["secret"]).decrypt(case["token"])
    with pytest.raises(TamperedError):
        SpecCipher(case["secret"]).decrypt(urlsafe_b64decode(case["token"]), b"")


@pytest.mark.parametrize("case", IN_TIME, ids=description)
def test_token_that_is_invalid_for_its_time_only_is_decrypted(case: Json) -> None:
    with pytest.raises(InvalidToken):
        Fernet(case["secret"]).decrypt_at_time(case["token"], case["ttl_sec"], seconds(case))
    opened = SpecCipher(case["secret"]).decrypt(urlsafe_b64decode(case["token"]), b"")
    assert opened == Fernet(case["secret"]).decrypt(case["token"])


def test_specified_cases_are_all_accounted_for() -> None:
    assert len(REFUSED) + len(ABOUT_TIME) + len(ABOUT_TEXT) == len(FERNET["invalid"])
    (text,) = (case["token"] for case in FERNET["invalid"] if case["desc"] in ABOUT_TEXT)
    with pytest.raises(ValueError, match="base64"):
        b64decode(text, altchars=b"-_", validate=True)


@pytest.mark.parametrize(
    ("version", "length"), [(b"\x81", 41), (b"\x80", 25), (b"\x80", 40), (b"", 0)]
)
def test_token_with_a_valid_mac_and_another_layout_is_rejected(version: bytes, length: int) -> None:
    key = bytes(range(32))
    cipher = SpecCipher(urlsafe_b64encode(key).decode())
    signed = (version + cipher.encrypt(b"", b"")[1:])[:length]
    with pytest.raises(TamperedError):
        cipher.decrypt(signed + hmac.digest(key[:16], signed, "sha256"), b"")
