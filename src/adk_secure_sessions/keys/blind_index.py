"""Blind indexes, called tags in code: keyed hashes of ids.

Queries find rows by tag, so the ids of users and sessions are never stored as plaintext.
"""

import hmac

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hmac import HMAC

from adk_secure_sessions.crypto.aead import Aes256Gcm
from adk_secure_sessions.crypto.key_material import KeyMaterial
from adk_secure_sessions.formats.records import context

TAG_LENGTH = 16


class BlindIndex(KeyMaterial):
    """Computes tags: HMAC-SHA-256 with the index master as the key, truncated to 16 bytes."""

    def __init__(self, key: bytes) -> None:
        self._mac = HMAC(key, SHA256())

    def has_key_of(self, other: "BlindIndex") -> bool:
        """Return whether *other* has the same key; the comparison is constant-time."""
        return hmac.compare_digest(self._tag("same key?"), other._tag("same key?"))

    def app(self, app_name: str) -> bytes:
        """Return the tag of an app."""
        return self._tag("app", app_name)

    def user(self, app_name: str, user_id: str) -> bytes:
        """Return the tag of a user of an app."""
        return self._tag("user", app_name, user_id)

    def session(self, app_name: str, user_id: str, session_id: str) -> bytes:
        """Return the tag of a session of a user."""
        return self._tag("session", app_name, user_id, session_id)

    def collection(self, app_name: str, user_id: str, name: str) -> bytes:
        """Return the tag of a collection of a user."""
        return self._tag("collection", app_name, user_id, name)

    def wrapped_state_key(self, *parts: str) -> bytes:
        """Return the tag that `EncryptedSessionWrapper` stores instead of a key of a state.

        *parts* are the scope (app, user or session), the ids that the scope has, and the key.
        """
        return self._tag("wrapped state key", *parts)

    def checkpoint(self, name: str, text: str) -> bytes:
        """Return the 16-byte MAC of *text*, the checkpoint that a rotation stores under *name*."""
        return self._tag("checkpoint", name, text)

    def features(self, database_id: bytes, names: str) -> bytes:
        """Return the 16-byte MAC of *names*, the list of the database's features."""
        return self._tag("features", database_id, names)

    def separation(self, database_id: bytes, text: str) -> bytes:
        """Return the 16-byte MAC of *text*, the stored state of an unfinished run of `separate`."""
        return self._tag("separation", database_id, text)

    def migration_source(self, database_id: bytes, tag: bytes, version: bytes) -> bytes:
        """Return the 16-byte MAC that identifies an imported version of a session or a state.

        *tag* is the tag of the session, or of the user or the app that has the state, which is
        canonical JSON in *version*.
        """
        return self._tag("migration source", database_id, tag, version)

    def migrated(
        self, database_id: bytes, tag: bytes, row_id: int, number: int, source: bytes
    ) -> bytes:
        """Return the 16-byte MAC of a row of `secure_migrated`, from its columns."""
        return self._tag("migrated", database_id, tag, source, numbers=(row_id, number))

    def migration_complete(self, database_id: bytes) -> bytes:
        """Return the 16-byte MAC of the mark in `secure_meta` that everything was imported."""
        return self._tag("migration complete", database_id)

    def source_erased(self, database_id: bytes) -> bytes:
        """Return the 16-byte MAC of the mark that the source of an import may lack rows by now."""
        return self._tag("source erased", database_id)

    def audit_cipher(self, database_id: bytes, chain: bytes) -> Aes256Gcm:
        """Return the cipher of a chain of the audit trail; *chain* is the id of the chain.

        The key is HKDF-Expand-SHA-256 (RFC 5869) of the index master: for 32 bytes, one HMAC.
        """
        mac = self._mac.copy()
        mac.update(context(("audit key", database_id, chain)) + b"\x01")
        return Aes256Gcm(mac.finalize())

    def state_key(self, app_name: str, key: str) -> bytes:
        """Return the tag of a key of the session's state, or of `user:` and a key of the user's
        state.
        """
        return self._tag("state index key", app_name, key)

    def state_value(self, app_name: str, key: str, value: bytes) -> bytes:
        """Return the tag of *value*, the canonical JSON of the value of *key*."""
        return self._tag("state index value", app_name, key, value)

    def state_key_declared(self, key_tag: bytes) -> bytes:
        """Return the 16-byte MAC of the mark that writers maintain the rows of a key."""
        return self._tag("state index declared", key_tag)

    def state_key_complete(self, key_tag: bytes) -> bytes:
        """Return the 16-byte MAC of the mark that `secure_state_index` has all rows of a key."""
        return self._tag("state index complete", key_tag)

    def _tag(self, *parts: str | bytes, numbers: tuple[int, ...] = ()) -> bytes:
        mac = self._mac.copy()
        mac.update(context(parts, *numbers))
        return mac.finalize()[:TAG_LENGTH]
