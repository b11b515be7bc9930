"""Create backends from their names and from key specs, and check those that a service was given."""

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

from adk_secure_sessions.backends.aes_gcm import AesGcmBackend
from adk_secure_sessions.backends.fernet import FernetBackend
from adk_secure_sessions.backends.noop import NoOpBackend, NoRootKey
from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.keys.data_keys import EncryptionBackend
from adk_secure_sessions.keys.providers import KeyProvider, StaticKey, check_key_id
from adk_secure_sessions.keys.specs import key_provider

THIRD_PARTY_IDS = range(0x80, 0x100)  # ids that no backend of this library will ever have
_CIPHERS: dict[str, Callable[[KeyProvider], EncryptionBackend]] = {
    "aesgcm": AesGcmBackend,
    "fernet": FernetBackend,
}
DEFAULT = "aesgcm"
NO_OP = "no-op"
NAMES = (*_CIPHERS, NO_OP)
_SHIPPED = (AesGcmBackend, FernetBackend, NoOpBackend)


class Backends(NamedTuple):
    """The checked backends of one service, and the providers of their root keys by id."""

    writing_backend: EncryptionBackend  # encrypts all new records
    by_id: dict[int, EncryptionBackend]
    roots: dict[str, KeyProvider]

    @property
    def stores_plaintext(self) -> bool:
        """Whether `writing_backend` is a `NoOpBackend`, which stores new records as plaintext."""
        return isinstance(self.writing_backend, NoOpBackend)


def check_backends(backend: object, additional: Sequence[object]) -> Backends:
    """Check the backends that a service was given, and return them."""
    by_id: dict[int, EncryptionBackend] = {}
    roots: dict[str, KeyProvider] = {}
    checked = [_check_backend(candidate) for candidate in (backend, *additional)]
    for candidate in checked:
        known = by_id.setdefault(candidate.backend_id, candidate)
        if type(known) is not type(candidate):
            raise ConfigurationError(
                f"backends {known.name!r} and {candidate.name!r} share the id "
                f"{candidate.backend_id:#04x}"
            )
        root = candidate.root_key
        if roots.setdefault(root.key_id, root) != root:
            raise ConfigurationError(
                f"two different root keys are called {root.key_id!r}: change the key_id of one"
            )
    return Backends(checked[0], by_id, roots)


def _check_backend(candidate: object) -> EncryptionBackend:
    if not isinstance(candidate, EncryptionBackend):
        raise ConfigurationError(
            f"{type(candidate).__name__} is not an encryption backend: "
            "pass AesGcmBackend(key), or an object with the attributes of EncryptionBackend"
        )
    if not isinstance(candidate.root_key, KeyProvider):
        raise ConfigurationError(
            f"the root_key of backend {candidate.name!r} is not a key provider"
        )
    if not isinstance(candidate.root_key, StaticKey | NoRootKey):
        check_key_id(candidate.root_key.key_id)
    if type(candidate) in _SHIPPED:
        return candidate
    inherited = [shipped.backend_id for shipped in _SHIPPED if isinstance(candidate, shipped)]
    if candidate.backend_id not in (*THIRD_PARTY_IDS, *inherited):
        raise ConfigurationError(
            f"backend {candidate.name!r} has the id {candidate.backend_id!r}: "
            "a third party's backend needs an id from 0x80 to 0xff"
        )
    _try_out(candidate)
    return candidate


def _try_out(backend: EncryptionBackend) -> None:
    """Check that a third party's backend decrypts what it encrypted, and rejects tampering."""
    plaintext, context = b"plaintext " * 8, b"context"
    key = _bytes_or_none(backend.new_key)
    sealed = _bytes_or_none(lambda: backend.cipher(key or b"").encrypt(plaintext, context))

    def decrypted(key: bytes | None, sealed: bytes, context: bytes) -> bytes | None:
        return _bytes_or_none(lambda: backend.cipher(key or b"").decrypt(sealed, context))

    fault = None
    if key is None or sealed is None or decrypted(key, sealed, context) != plaintext:
        fault = "does not decrypt what it encrypted"
    elif plaintext in sealed:
        fault = "stores plaintext"
    elif decrypted(key, sealed, b"another context") is not None:
        fault = "ignores the associated data, so records could be moved"
    elif any(
        decrypted(key, _flip_bit(sealed, at), context) is not None
        for at in (0, len(sealed) // 2, len(sealed) - 1)
    ):
        fault = "decrypts a modified record"
    elif decrypted(_bytes_or_none(backend.new_key), sealed, context) is not None:
        fault = "decrypts a record with another key"
    if fault:
        raise ConfigurationError(f"backend {backend.name!r} {fault}")


def _flip_bit(value: bytes, at: int) -> bytes:
    return value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]


def _bytes_or_none(call: Callable[[], bytes]) -> bytes | None:
    """Return the result of *call* if it is bytes, otherwise None.

    An exception is not reported, because its text may contain secrets.
    """
    try:
        result = call()
    except Exception:
        return None
    return result if isinstance(result, bytes) else None


def backends_for(
    names: Sequence[str], specs: Sequence[str]
) -> tuple[EncryptionBackend, Sequence[EncryptionBackend]]:
    """Create each backend of *names* (of `NAMES`) with each root key of *specs*.

    Return the first backend, which writes, and the other backends, which only decrypt.  Only with
    `NO_OP` may *specs* be empty.
    """
    roots = [_root_key_of(spec) for spec in specs]
    backends: list[EncryptionBackend] = []
    for name in dict.fromkeys(names):
        if name == NO_OP:
            with warnings.catch_warnings():
                # Do not warn again: the documentation of the name `no-op` contains this warning.
                warnings.simplefilter("ignore")
                backends.append(NoOpBackend())
        else:
            backends += [_CIPHERS[name](root) for root in roots]
    # A service has only the root keys of its backends.  If no-op is the only name, add a backend
    # for each root key, so that the service can unwrap the master keys.  Any cipher would do.
    if not set(names) - {NO_OP}:
        backends += [AesGcmBackend(root) for root in roots]
    return backends[0], backends[1:]


def _root_key_of(spec: str) -> KeyProvider:
    if ":" not in spec:
        raise ConfigurationError(
            "give a key spec such as env:NAME or file:PATH, never the key itself: "
            "other users can read command lines"
        )
    return key_provider(spec)
