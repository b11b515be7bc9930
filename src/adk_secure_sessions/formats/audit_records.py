"""The records of the audit trail, which are linked to chains (docs/format.md, "The audit trail").

Each record contains the link of the record before it.  A link is a hash of the stored bytes, so a
link commits to the content of all records up to it.
"""

import hashlib
import json
from typing import Any

from adk_secure_sessions.crypto.aead import GCM_TAG_LENGTH, NONCE_LENGTH, Aes256Gcm
from adk_secure_sessions.errors import Reason, TamperedError
from adk_secure_sessions.formats.records import build_context, require_bytes

CHAIN_LENGTH = 16
AUDIT_LINK_LENGTH = 32
NO_AUDIT_LINK = bytes(AUDIT_LINK_LENGTH)  # `previous` of the first record of a chain
MAX_RECORD = 2**20  # bytes
_VERSION = b"\x01"
# The part of a record that is not JSON.
_OVERHEAD = len(_VERSION) + NONCE_LENGTH + AUDIT_LINK_LENGTH + GCM_TAG_LENGTH


def record_context(database_id: bytes, chain: bytes, number: int, time: int) -> bytes:
    return build_context(("audit", database_id, chain), number, time)


def seal_entry(
    cipher: Aes256Gcm, context: bytes, previous: bytes, fields: dict[str, object]
) -> bytes:
    """Encrypt *fields*, values for JSON, and return the record, bound to *context*; *previous* is
    the link of the record before it.
    """
    text = json.dumps(fields, separators=(",", ":")).encode("ascii")
    if len(text) + _OVERHEAD > MAX_RECORD:
        raise ValueError(f"an audit record has more than {MAX_RECORD} bytes")
    return _VERSION + cipher.encrypt(previous + text, _VERSION + context)


def open_entry(cipher: Aes256Gcm, context: bytes, record: object) -> tuple[bytes, dict[str, Any]]:
    """Return the link of the record before *record*, and the fields in *record*."""
    data = require_bytes(record)
    if not data.startswith(_VERSION) or len(data) > MAX_RECORD:
        raise TamperedError("the audit record is malformed", Reason.MALFORMED)
    plaintext = cipher.decrypt(data[len(_VERSION) :], _VERSION + context)
    try:
        fields = json.loads(plaintext[AUDIT_LINK_LENGTH:])
        if isinstance(fields, dict):
            return plaintext[:AUDIT_LINK_LENGTH], fields
    except (ValueError, RecursionError):
        pass
    raise TamperedError("its plaintext is malformed", Reason.MALFORMED)


def link_of(context: bytes, record: bytes) -> bytes:
    return hashlib.sha256(context + record).digest()
