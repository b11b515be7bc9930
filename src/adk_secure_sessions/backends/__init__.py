"""The backends of this library."""

from adk_secure_sessions.backends.aes_gcm import AesGcmBackend
from adk_secure_sessions.backends.fernet import FernetBackend
from adk_secure_sessions.backends.noop import NoOpBackend
from adk_secure_sessions.backends.registry import THIRD_PARTY_IDS
from adk_secure_sessions.keys.data_keys import EncryptionBackend

__all__ = ["THIRD_PARTY_IDS", "AesGcmBackend", "EncryptionBackend", "FernetBackend", "NoOpBackend"]
