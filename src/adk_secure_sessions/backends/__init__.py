"""The backends of this library, and the protocol for backends of third parties."""

from adk_secure_sessions.backends.aes_gcm import AesGcmBackend
from adk_secure_sessions.backends.fernet import FernetBackend
from adk_secure_sessions.backends.noop import NoOpBackend
from adk_secure_sessions.backends.protocol import THIRD_PARTY_IDS, EncryptionBackend

__all__ = ["THIRD_PARTY_IDS", "AesGcmBackend", "EncryptionBackend", "FernetBackend", "NoOpBackend"]
