"""Blind indexes, called tags in code: keyed hashes of ids.

Queries find rows by tag, so the ids of users and sessions are never stored as plaintext.
"""

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hmac import HMAC

from adk_secure_sessions.crypto.aead import Aes256Gcm
from adk_secure_sessions.formats.records import build_context
from adk_secure_sessions.hiding import HoldsSecrets

TAG_LENGTH = 16


class IndexMaster(HoldsSecrets):
    """The index master: computes tags and other MACs, HMAC-SHA-256 truncated to 16 bytes."""

    def __init__(self, key: bytes) -> None:
        self._mac = HMAC(key, SHA256())

    def tag_of(self, *ids: str) -> bytes:
        """Return the tag of an app, of a user or of a session: *ids* are one, two or three ids."""
        return self.mac(("app", "user", "session")[len(ids) - 1], *ids)

    def audit_cipher(self, database_id: bytes, chain: bytes) -> Aes256Gcm:
        """Return the cipher of a chain of the audit trail; *chain* is the id of the chain.

        The key is HKDF-Expand-SHA-256 (RFC 5869) of the index master: for 32 bytes, one HMAC.
        """
        mac = self._mac.copy()
        mac.update(build_context(("audit key", database_id, chain)) + b"\x01")
        return Aes256Gcm(mac.finalize())

    def state_key_tag(self, app_name: str, key: str) -> bytes:
        """Return the tag of a key of the session's state, or of `user:` and a key of the user's
        state.
        """
        return self.mac("state index key", app_name, key)

    def state_value_tag(self, app_name: str, key: str, value: bytes) -> bytes:
        """Return the tag of *value*, the canonical JSON of the value of *key*."""
        return self.mac("state index value", app_name, key, value)

    def mac(self, *parts: str | bytes, numbers: tuple[int, ...] = ()) -> bytes:
        """Return the 16-byte MAC of the context of *parts* and *numbers*.

        The first part is the purpose of the MAC: docs/format.md has a context for each purpose.
        """
        return self.mac_of_context(build_context(parts, *numbers))

    def mac_of_context(self, context: bytes) -> bytes:
        """Return the 16-byte MAC of *context*."""
        mac = self._mac.copy()
        mac.update(context)
        return mac.finalize()[:TAG_LENGTH]
