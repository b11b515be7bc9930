"""The three backends of this library, and which backends the registry accepts."""

import hashlib
import itertools
import os
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from typing import Any

import pytest
from cryptography.fernet import Fernet
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from hypothesis import given
from hypothesis import strategies as st

from adk_secure_sessions import (
    AesGcmBackend,
    Cipher,
    ConfigurationError,
    EncryptedSessionService,
    EncryptionBackend,
    FernetBackend,
    NoOpBackend,
    PassphraseKey,
    PlaintextRefusedError,
    Reason,
    StaticKey,
    TamperedError,
    generate_key,
)
from adk_secure_sessions.backends import THIRD_PARTY_IDS
from adk_secure_sessions.backends.registry import check_backends
from adk_secure_sessions.formats.records import BACKEND_NAMES
from tests.maintenance.support import plaintext_backend

KEY = bytes(range(32))
DATA_KEY = bytes(range(32, 64))


SEALING: dict[str, EncryptionBackend] = {"aesgcm": AesGcmBackend(KEY), "fernet": FernetBackend(KEY)}
SHIPPED: dict[str, EncryptionBackend] = {**SEALING, "noop": plaintext_backend()}

sealing = pytest.mark.parametrize("backend", SEALING.values(), ids=SEALING)


def test_names_by_id_are_those_of_the_classes() -> None:
    assert {one.backend_id: name for name, one in SHIPPED.items()} == BACKEND_NAMES
    assert all(one.name == name for name, one in SHIPPED.items())


shipped = pytest.mark.parametrize("backend", SHIPPED.values(), ids=SHIPPED)


# --- ciphers -------------------------------------------------------------------------------------


@shipped
@given(plaintext=st.binary(), context=st.binary())
def test_what_a_cipher_encrypts_a_new_cipher_of_the_key_decrypts(
    backend: EncryptionBackend, plaintext: bytes, context: bytes
) -> None:
    key = backend.new_key()
    sealed = backend.cipher(key).encrypt(plaintext, context)
    assert backend.cipher(key).decrypt(sealed, context) == plaintext


@sealing
@given(context=st.binary(), other=st.binary())
def test_cipher_is_bound_to_the_associated_data(
    backend: EncryptionBackend, context: bytes, other: bytes
) -> None:
    cipher = backend.cipher(DATA_KEY)
    sealed = cipher.encrypt(b"plaintext", context)
    if context != other:
        with pytest.raises(TamperedError):
            cipher.decrypt(sealed, other)


@sealing
def test_cipher_rejects_every_modified_byte(backend: EncryptionBackend) -> None:
    cipher = backend.cipher(DATA_KEY)
    sealed = cipher.encrypt(b"plaintext", b"context")
    for position, change in itertools.product(range(len(sealed)), (1, 0x80)):
        modified = bytearray(sealed)
        modified[position] ^= change
        with pytest.raises(TamperedError):
            cipher.decrypt(bytes(modified), b"context")


@sealing
def test_cipher_rejects_every_shortened_and_lengthened_value(backend: EncryptionBackend) -> None:
    cipher = backend.cipher(DATA_KEY)
    sealed = cipher.encrypt(b"plaintext", b"context")
    for wrong in (
        *(sealed[:length] for length in range(len(sealed))),
        sealed + b"\x00",
        sealed * 2,
    ):
        with pytest.raises(TamperedError):
            cipher.decrypt(wrong, b"context")


@sealing
def test_cipher_rejects_another_key(backend: EncryptionBackend) -> None:
    sealed = backend.cipher(DATA_KEY).encrypt(b"plaintext", b"context")
    with pytest.raises(TamperedError):
        backend.cipher(backend.new_key()).decrypt(sealed, b"context")


@sealing
def test_no_nonce_or_iv_is_used_twice(backend: EncryptionBackend) -> None:
    """Nonce or IV: the first 12 bytes, or 16 after a version byte and the time."""
    cipher, count = backend.cipher(DATA_KEY), 2_000
    part = slice(0, 12) if backend.backend_id == 1 else slice(9, 25)
    assert len({cipher.encrypt(b"same", b"context")[part] for _ in range(count)}) == count


@sealing
@pytest.mark.parametrize("length", [0, 16, 31, 33])
def test_data_key_of_another_length_is_rejected(backend: EncryptionBackend, length: int) -> None:
    with pytest.raises(ValueError, match=f"32 bytes, got {length}"):
        backend.cipher(bytes(length))


@sealing
def test_new_data_keys_are_random(backend: EncryptionBackend) -> None:
    keys = {backend.new_key() for _ in range(100)}
    assert len(keys) == 100
    assert {len(key) for key in keys} == {32}


def test_fernet_body_is_a_token_in_bytes_with_a_key_of_its_context() -> None:
    body = FernetBackend(KEY).cipher(DATA_KEY).encrypt(b"plaintext", b"context")
    assert body[0] == 0x80
    assert len(body) == 1 + 8 + 16 + 16 + 32
    with pytest.raises(TamperedError):  # the same token, as text
        FernetBackend(KEY).cipher(DATA_KEY).decrypt(urlsafe_b64encode(body), b"context")
    direct = urlsafe_b64decode(Fernet(urlsafe_b64encode(DATA_KEY)).encrypt(b"plaintext"))
    with pytest.raises(TamperedError):
        FernetBackend(KEY).cipher(DATA_KEY).decrypt(direct, b"context")


# --- the backends themselves ---------------------------------------------------------------------


def test_backend_ids_and_names_are_those_of_the_format() -> None:
    found = {backend.name: backend.backend_id for backend in SHIPPED.values()}
    assert found == {"aesgcm": 1, "fernet": 2, "noop": 3}


@pytest.mark.parametrize("make", [AesGcmBackend, FernetBackend])
@pytest.mark.parametrize(
    "key",
    [KEY, generate_key(), Fernet.generate_key().decode(), Fernet.generate_key(), StaticKey(KEY)],
    ids=["bytes", "text", "Fernet text", "Fernet bytes", "provider"],
)
def test_backend_takes_each_form_of_a_key(
    make: Callable[[Any], EncryptionBackend], key: Any
) -> None:
    assert make(key).root_key.key_id


def test_no_op_warns_where_it_is_built() -> None:
    with pytest.warns(UserWarning, match="as plaintext") as caught:
        NoOpBackend()
    assert caught[0].filename == __file__


def test_no_op_stores_plaintext() -> None:
    assert plaintext_backend().new_key() == b""
    assert plaintext_backend().cipher(b"").encrypt(b"plaintext", b"context") == b"plaintext"


async def test_no_op_rejects_a_key_that_is_wrapped() -> None:
    root, wrapped = plaintext_backend().root_key, await StaticKey(KEY).wrap(DATA_KEY, b"context")
    assert await root.unwrap(await root.wrap(DATA_KEY, b"context"), b"context") == DATA_KEY
    with pytest.raises(PlaintextRefusedError) as info:
        await root.unwrap(wrapped, b"context")
    assert info.value.reason is Reason.MALFORMED


def test_no_op_has_one_root_key() -> None:
    root, same = plaintext_backend().root_key, plaintext_backend().root_key
    assert root == same
    assert hash(root) == hash(same)
    assert root != StaticKey(KEY)
    assert root.key_id == "none"


# --- the registry --------------------------------------------------------------------------------


class ChaCha:
    """A third party's cipher without fault."""

    def __init__(self, key: bytes) -> None:
        self._aead = ChaCha20Poly1305(key)

    def encrypt(self, plaintext: bytes, associated_data: bytes) -> bytes:
        nonce = os.urandom(12)
        return nonce + self._aead.encrypt(nonce, plaintext, associated_data)

    def decrypt(self, sealed: bytes, associated_data: bytes) -> bytes:
        return self._aead.decrypt(sealed[:12], sealed[12:], associated_data)


class ThirdParty:
    """A third party's backend, of any id and cipher."""

    name = "theirs"

    def __init__(self, backend_id: Any = 0x80, cipher: Callable[[bytes], Cipher] = ChaCha) -> None:
        self.backend_id = backend_id
        self.root_key: Any = StaticKey(KEY)
        self._cipher = cipher

    def new_key(self) -> bytes:
        return ChaCha20Poly1305.generate_key()

    def cipher(self, key: bytes) -> Cipher:
        return self._cipher(key)


class OtherThirdParty(ThirdParty):
    name = "others"


@pytest.mark.parametrize("backend_id", [THIRD_PARTY_IDS[0], THIRD_PARTY_IDS[-1]])
def test_third_party_backend_is_accepted(backend_id: int) -> None:
    backend = ThirdParty(backend_id)
    assert check_backends(backend, []).writing_backend is backend


class Marked(ChaCha):
    """Without fault; each value begins and ends in the same bytes."""

    start, end = b"", b""

    def encrypt(self, plaintext: bytes, associated_data: bytes) -> bytes:
        return self.start + super().encrypt(plaintext, associated_data) + self.end

    def decrypt(self, sealed: bytes, associated_data: bytes) -> bytes:
        if not (sealed.startswith(self.start) and sealed.endswith(self.end)):
            raise ValueError
        inner = sealed[len(self.start) : len(sealed) - len(self.end)]
        return super().decrypt(inner, associated_data)


@pytest.mark.parametrize(
    ("start", "end"), [(b"", b"\x00"), (b"", b"\xff"), (b"", b"\x01\x00"), (b"\x00\x01", b"\x00")]
)
def test_cipher_whose_values_begin_or_end_in_the_same_bytes_is_accepted(
    start: bytes, end: bytes
) -> None:
    backend = ThirdParty(cipher=type("MarkedSo", (Marked,), {"start": start, "end": end}))
    assert check_backends(backend, []).writing_backend is backend


@pytest.mark.parametrize("key_id", ["none", "key:0123456789abcdef", "", "a\nb"])
def test_root_key_with_a_reserved_or_malformed_id_is_rejected(key_id: str) -> None:
    class Provider:
        """A third party's key provider."""

        wrap = unwrap = StaticKey.wrap

        def __init__(self) -> None:
            self.key_id = key_id

    backend = ThirdParty()
    backend.root_key = Provider()
    with pytest.raises(ConfigurationError, match="key_id"):
        check_backends(backend, [])


def test_first_backend_writes_and_all_may_be_read() -> None:
    first, second, third = AesGcmBackend(KEY), FernetBackend(generate_key()), ThirdParty()
    backends = check_backends(first, [second, third])
    assert backends.writing_backend is first
    assert backends.by_id == {1: first, 2: second, 0x80: third}
    assert backends.roots.keys() == {first.root_key.key_id, second.root_key.key_id}


@pytest.mark.parametrize("backend_id", [0, 1, 2, 3, 0x7F, 0x100, -1, "x", None])
def test_third_party_backend_with_a_reserved_id_is_rejected(backend_id: Any) -> None:
    with pytest.raises(ConfigurationError, match="0x80 to 0xff"):
        check_backends(ThirdParty(backend_id), [])


def test_subclass_of_a_shipped_backend_may_not_choose_another_reserved_id() -> None:
    class Renumbered(AesGcmBackend):
        backend_id = 3

    with pytest.raises(ConfigurationError, match="0x80 to 0xff"):
        check_backends(Renumbered(KEY), [])
    Renumbered.backend_id = AesGcmBackend.backend_id
    assert type(check_backends(Renumbered(KEY), []).writing_backend) is Renumbered


@pytest.mark.parametrize("others", [[OtherThirdParty()], [AesGcmBackend(KEY), OtherThirdParty()]])
def test_two_backends_of_one_id_are_rejected(others: list[EncryptionBackend]) -> None:
    with pytest.raises(ConfigurationError, match="'theirs' and 'others' share the id 0x80"):
        check_backends(ThirdParty(), others)


def test_two_root_keys_of_one_name_are_rejected() -> None:
    backends = [AesGcmBackend(PassphraseKey(word)) for word in ("one", "another")]
    with pytest.raises(ConfigurationError, match="two different root keys are called 'passphrase'"):
        check_backends(backends[0], backends[1:])


@pytest.mark.parametrize("thing", [None, KEY, "key", object(), AesGcmBackend, StaticKey(KEY)])
def test_object_that_is_no_backend_is_rejected(thing: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"not an encryption backend|is not a key provider"
    ):
        check_backends(thing, [])


@pytest.mark.parametrize("root_key", [None, KEY, "text"])
def test_backend_without_a_key_provider_is_rejected(root_key: Any) -> None:
    backend = ThirdParty()
    backend.root_key = root_key
    with pytest.raises(ConfigurationError, match="is not a key provider"):
        check_backends(backend, [])


class Clear(ChaCha):
    def encrypt(self, plaintext: bytes, associated_data: bytes) -> bytes:
        return plaintext

    def decrypt(self, sealed: bytes, associated_data: bytes) -> bytes:
        return sealed


class Unbound(ChaCha):
    def encrypt(self, plaintext: bytes, associated_data: bytes) -> bytes:
        return super().encrypt(plaintext, associated_data[:0])

    def decrypt(self, sealed: bytes, associated_data: bytes) -> bytes:
        return super().decrypt(sealed, associated_data[:0])


class Xor(ChaCha):
    """Bound to key and context only by XOR, which an attacker can undo."""

    def __init__(self, key: bytes) -> None:
        super().__init__(key)
        self._key = key

    def encrypt(self, plaintext: bytes, associated_data: bytes) -> bytes:
        inner = associated_data + b"|" + plaintext
        return bytes(a ^ b for a, b in zip(inner, itertools.cycle(self._key), strict=False))

    def decrypt(self, sealed: bytes, associated_data: bytes) -> bytes:
        inner = bytes(a ^ b for a, b in zip(sealed, itertools.cycle(self._key), strict=False))
        context, bar, plaintext = inner.partition(b"|")
        if not bar or context != associated_data:
            raise ValueError
        return plaintext


class Tail(ChaCha):
    """Authenticates only its last 40 bytes."""

    def encrypt(self, plaintext: bytes, associated_data: bytes) -> bytes:
        return plaintext[:-12][::-1] + super().encrypt(plaintext[-12:], associated_data)

    def decrypt(self, sealed: bytes, associated_data: bytes) -> bytes:
        return sealed[:-40][::-1] + super().decrypt(sealed[-40:], associated_data)


class OneKey(ChaCha):
    def __init__(self, key: bytes) -> None:
        super().__init__(bytes(len(key)))  # fails if the key has another length than 32 bytes


class Forgetful(ChaCha):
    """Decrypts only what the same object encrypted."""

    def __init__(self, key: bytes) -> None:
        super().__init__(ChaCha20Poly1305.generate_key())


class Raising(ChaCha):
    def decrypt(self, sealed: bytes, associated_data: bytes) -> bytes:
        raise ValueError("secret 7Qx")


class FailsToEncrypt(ChaCha):
    def encrypt(self, plaintext: bytes, associated_data: bytes) -> bytes:
        raise ValueError("secret 7Qx")


class ReturnsText(ChaCha):
    def encrypt(self, plaintext: bytes, associated_data: bytes) -> Any:
        return super().encrypt(plaintext, associated_data).hex()

    def decrypt(self, sealed: Any, associated_data: bytes) -> bytes:
        return super().decrypt(bytes.fromhex(sealed), associated_data)


FAULTS = {
    Clear: "stores plaintext",
    Unbound: "ignores the associated data, so records could be moved",
    Xor: "decrypts a modified record",
    Tail: "decrypts a modified record",
    OneKey: "decrypts a record with another key",
    Forgetful: "does not decrypt what it encrypted",
    Raising: "does not decrypt what it encrypted",
    FailsToEncrypt: "does not decrypt what it encrypted",
    ReturnsText: "does not decrypt what it encrypted",
}


@pytest.mark.parametrize(("cipher", "fault"), FAULTS.items(), ids=[c.__name__ for c in FAULTS])
def test_faulty_cipher_is_rejected_by_its_fault(cipher: type[ChaCha], fault: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^backend 'theirs' {fault}$") as info:
        check_backends(ThirdParty(cipher=cipher), [])
    assert "7Qx" not in str(info.value)


class AnyKey(ChaCha):
    def __init__(self, key: bytes) -> None:
        super().__init__(hashlib.sha256(key).digest())


@pytest.mark.parametrize(
    ("key", "fault"),
    [
        ("text", "does not decrypt what it encrypted"),
        (b"", "decrypts a record with another key"),
        (b"same", "decrypts a record with another key"),
    ],
)
def test_backend_whose_new_keys_are_no_bytes_or_all_equal_is_rejected(key: Any, fault: str) -> None:
    class SameKeys(ThirdParty):
        def new_key(self) -> bytes:
            return key  # type: ignore[no-any-return]

    with pytest.raises(ConfigurationError, match=f"^backend 'theirs' {fault}$"):
        check_backends(SameKeys(cipher=AnyKey), [])


def test_subclass_of_a_shipped_backend_is_checked_too_as_an_additional_one() -> None:
    class OwnCipher(AesGcmBackend):
        def cipher(self, key: bytes) -> Any:
            return Unbound(key)

    with pytest.raises(ConfigurationError, match="'aesgcm' ignores the associated data"):
        check_backends(AesGcmBackend(KEY), [OwnCipher(KEY)])


def test_service_rejects_a_faulty_backend_before_it_touches_the_database(tmp_path: Any) -> None:
    path = tmp_path / "sessions.db"
    with pytest.raises(ConfigurationError, match="ignores the associated data"):
        EncryptedSessionService(f"sqlite:///{path}", ThirdParty(cipher=Unbound))
    assert not path.exists()


def test_service_without_a_backend_is_rejected() -> None:
    with pytest.raises(ConfigurationError, match="give a backend"):
        EncryptedSessionService(":memory:")
