"""The backends of one service: which writes, which may be read, and with which root keys."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from adk_secure_sessions.backends.aes_gcm import AesGcmBackend
from adk_secure_sessions.backends.fernet import FernetBackend
from adk_secure_sessions.backends.noop import NoOpBackend
from adk_secure_sessions.backends.protocol import THIRD_PARTY_IDS, EncryptionBackend
from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.keys.providers import KeyProvider

_SHIPPED = (AesGcmBackend, FernetBackend, NoOpBackend)


class Backends(NamedTuple):
    """Backends by id, root keys by key id."""

    writer: EncryptionBackend
    by_id: dict[int, EncryptionBackend]
    roots: dict[str, KeyProvider]


def register(backend: object, additional: Sequence[object]) -> Backends:
    """Check what a service was given.

    Raises:
        ConfigurationError: not a backend, an id that is taken or reserved, two root keys of
            one name, or a third party's cipher that does not protect what it seals.
    """
    by_id: dict[int, EncryptionBackend] = {}
    roots: dict[str, KeyProvider] = {}
    checked = [_checked(candidate) for candidate in (backend, *additional)]
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
                f"two different root keys are called {root.key_id!r}: give one another key_id"
            )
    return Backends(checked[0], by_id, roots)


def _checked(candidate: object) -> EncryptionBackend:
    if not isinstance(candidate, EncryptionBackend):
        raise ConfigurationError(
            f"{type(candidate).__name__} is not an encryption backend: "
            "pass AesGcmBackend(key), or an object with the attributes of EncryptionBackend"
        )
    if not isinstance(candidate.root_key, KeyProvider):
        raise ConfigurationError(f"the root_key of backend {candidate.name!r} is no key provider")
    if isinstance(candidate, _SHIPPED):
        return candidate
    if candidate.backend_id not in THIRD_PARTY_IDS:
        raise ConfigurationError(
            f"backend {candidate.name!r} has the id {candidate.backend_id!r}: "
            "third parties take 0x80 to 0xff"
        )
    _try_out(candidate)
    return candidate


def _try_out(backend: EncryptionBackend) -> None:
    """Write and read back, and have it refuse what an attacker would try."""
    plaintext, where = b"plaintext " * 8, b"place"
    key = _outcome(backend.new_key)
    sealed = _outcome(lambda: backend.cipher(key or b"").encrypt(plaintext, where))

    def opened(key: bytes | None, sealed: bytes, where: bytes) -> bytes | None:
        return _outcome(lambda: backend.cipher(key or b"").decrypt(sealed, where))

    fault = None
    if key is None or sealed is None or opened(key, sealed, where) != plaintext:
        fault = "does not read back what it wrote"
    elif plaintext in sealed:
        fault = "stores plaintext"
    elif opened(key, sealed, b"elsewhere") is not None:
        fault = "ignores the associated data, so records could be moved"
    elif opened(key, sealed[:-1] + bytes([sealed[-1] ^ 1]), where) is not None:
        fault = "opens an altered record"
    elif opened(_outcome(backend.new_key), sealed, where) is not None:
        fault = "opens a record under another key"
    if fault:
        raise ConfigurationError(f"backend {backend.name!r} {fault}")


def _outcome(attempt: Callable[[], bytes]) -> bytes | None:
    """The bytes that *attempt* gives; None for anything else, whose text is not to be shown."""
    try:
        result = attempt()
    except Exception:
        return None
    return result if isinstance(result, bytes) else None
