"""The envelopes in which the distribution adk-secure-sessions 1.x stores states and events.

That distribution is another author's, with the same name.  An envelope is
`0x01 ‖ backend id ‖ ciphertext`.  Releases 0.1 and 1.0 store the bytes of the envelope, and later
releases store them as base64 text.  The ciphertext has no associated data.  An envelope does not
name its row or its key.
"""

import binascii
from typing import NamedTuple

from adk_secure_sessions.errors import (
    DecryptionError,
    PlaintextRefusedError,
    Reason,
    TamperedError,
)

FERNET, AES_256_GCM = 1, 2  # the backend ids
_VERSION = b"\x01"
_HEADER_LENGTH = 2
# The number of base64 characters that contain the first 3 bytes of an envelope.
_BASE64_START = 4


class Envelope(NamedTuple):
    """The content of an envelope, not authenticated yet; release 1.1 and later store base64."""

    backend_id: int
    body: bytes
    is_base64: bool


def is_envelope(start: str | bytes) -> bool:
    """Return whether a stored value is an envelope, given the value or its first 4 characters."""
    data = start.encode("utf-8", "surrogatepass") if isinstance(start, str) else start
    if not data.startswith(_VERSION):
        try:
            data = binascii.a2b_base64(data[:_BASE64_START], strict_mode=True)
        except ValueError:
            return False
    return data.startswith(_VERSION) and data[1:2] in (bytes([FERNET]), bytes([AES_256_GCM]))


def parse_envelope(stored: object) -> Envelope:
    """Return the content of an envelope; *stored* is its bytes, or its base64 as text or bytes."""
    if isinstance(stored, str):
        stored = stored.encode("utf-8", "surrogatepass")
    if not stored:
        raise TamperedError("its encrypted value was removed", reason=Reason.MISSING)
    data = stored if isinstance(stored, bytes) else b""
    if data.startswith(b"{"):
        raise PlaintextRefusedError("not encrypted: adk-secure-sessions 1.x did not write it")
    is_base64 = not data.startswith(_VERSION)
    if is_base64:
        try:
            data = binascii.a2b_base64(data, strict_mode=True)
        except ValueError:
            data = b""
    if not data.startswith(_VERSION) or len(data) <= _HEADER_LENGTH:
        raise TamperedError("not an envelope of adk-secure-sessions 1.x", reason=Reason.MALFORMED)
    backend_id = data[1]
    if backend_id not in (FERNET, AES_256_GCM):
        raise DecryptionError(
            f"encrypted by backend {backend_id}, which is not one of adk-secure-sessions 1.x",
            reason=Reason.UNKNOWN_BACKEND,
        )
    return Envelope(backend_id, data[_HEADER_LENGTH:], is_base64)
