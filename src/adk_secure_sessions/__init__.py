"""Encrypted storage for Google ADK sessions: a drop-in replacement for `DatabaseSessionService`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from adk_secure_sessions.audit import Audit, audit_actor
from adk_secure_sessions.backends import (
    AesGcmBackend,
    EncryptionBackend,
    FernetBackend,
    NoOpBackend,
)
from adk_secure_sessions.caches import Caches
from adk_secure_sessions.errors import (
    ArtifactStoreError,
    ConfigurationError,
    DatabaseError,
    DecryptionError,
    KeyServiceError,
    PlaintextRefusedError,
    Reason,
    SecureSessionError,
    TamperedError,
    UnknownKeyError,
    WrongKeyError,
)
from adk_secure_sessions.formats.records import Cipher, Packing
from adk_secure_sessions.keys.providers import (
    EnvironmentKey,
    FileKey,
    KeyProvider,
    StaticKey,
    generate_key,
)
from adk_secure_sessions.keys.specs import key_provider

if TYPE_CHECKING:
    from adk_secure_sessions.integrations.artifact_store import ArtifactStore
    from adk_secure_sessions.integrations.artifacts import EncryptedArtifactService
    from adk_secure_sessions.integrations.memory import EncryptedMemoryService
    from adk_secure_sessions.integrations.wrapper import EncryptedSessionWrapper
    from adk_secure_sessions.keys.aws import AwsKmsKey
    from adk_secure_sessions.keys.gcp import GcpKmsKey
    from adk_secure_sessions.keys.passphrase import PassphraseKey
    from adk_secure_sessions.keys.pkcs11 import Pkcs11Key
    from adk_secure_sessions.keys.vault import VaultKey
    from adk_secure_sessions.listings import EventPage, SessionPage
    from adk_secure_sessions.service import (
        EncryptedSessionService,
        StaleSessionError,
        append_event_to_latest,
    )

__all__ = [
    "AesGcmBackend",
    "ArtifactStore",
    "ArtifactStoreError",
    "Audit",
    "AwsKmsKey",
    "Caches",
    "Cipher",
    "ConfigurationError",
    "DatabaseError",
    "DecryptionError",
    "EncryptedArtifactService",
    "EncryptedMemoryService",
    "EncryptedSessionService",
    "EncryptedSessionWrapper",
    "EncryptionBackend",
    "EnvironmentKey",
    "EventPage",
    "FernetBackend",
    "FileKey",
    "GcpKmsKey",
    "KeyProvider",
    "KeyServiceError",
    "NoOpBackend",
    "Packing",
    "PassphraseKey",
    "Pkcs11Key",
    "PlaintextRefusedError",
    "Reason",
    "SecureSessionError",
    "SessionPage",
    "StaleSessionError",
    "StaticKey",
    "TamperedError",
    "UnknownKeyError",
    "VaultKey",
    "WrongKeyError",
    "append_event_to_latest",
    "audit_actor",
    "generate_key",
    "key_provider",
]


# These names are imported on first use.  Most import google-adk, which takes seconds, and which the
# command line does not need.  A process uses at most one or two of the key providers.
_MODULES = {
    "ArtifactStore": "integrations.artifact_store",
    "AwsKmsKey": "keys.aws",
    "EncryptedArtifactService": "integrations.artifacts",
    "EncryptedMemoryService": "integrations.memory",
    "EncryptedSessionWrapper": "integrations.wrapper",
    "EncryptedSessionService": "service",
    "EventPage": "listings",
    "GcpKmsKey": "keys.gcp",
    "PassphraseKey": "keys.passphrase",
    "Pkcs11Key": "keys.pkcs11",
    "SessionPage": "listings",
    "StaleSessionError": "service",
    "VaultKey": "keys.vault",
    "append_event_to_latest": "service",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
