"""What is fuzzed: each target takes any bytes, and raises an error only if there is a defect.

How it works.  A target parses its bytes as an attacker's or a user's input, and catches the errors
that the library documents for such input.  Any other exception is a defect, and so is an
AssertionError: a target also compares the result with a second implementation, or with the input.
`test_corpus.py` calls each target with every file of its corpus; `__main__.py` has atheris look for
more.

Inputs of several values begin with bytes that choose between variants.  An *edit script* is a list
of changes of a longer value, such as a blob of three chunks, so that a short input reaches deep.
"""

import asyncio
import base64
import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from google.adk.events import Event

from adk_secure_sessions import (
    AesGcmBackend,
    ConfigurationError,
    DecryptionError,
    FernetBackend,
    KeyServiceError,
    Reason,
    WrongKeyError,
)
from adk_secure_sessions.backends.registry import NAMES
from adk_secure_sessions.crypto.package_1x import Package1xKeys, is_envelope
from adk_secure_sessions.formats import blobs, events, json_text, memory_items
from adk_secure_sessions.formats.event_parser import same
from adk_secure_sessions.formats.records import (
    HEADER_LENGTH,
    NO_FLAGS,
    Cipher,
    EncodedEvent,
    build_header,
    join_id,
    join_owner,
    join_session,
    keep_packed,
    open_with_flags,
    parse_header,
    parse_header_or_none,
    reject_flags,
    split_id,
    split_link,
    split_owner,
    split_session,
)
from adk_secure_sessions.integrations import adk
from adk_secure_sessions.keys import aws
from adk_secure_sessions.keys.data_keys import TransactionKeys
from adk_secure_sessions.keys.keyring import DATA_MASTER, INDEX_MASTER, MasterKeyRow, open_keyring
from adk_secure_sessions.keys.providers import StaticKey, parse_key
from adk_secure_sessions.keys.specs import key_provider
from adk_secure_sessions.migration import export
from adk_secure_sessions.migration.sources import SessionContent
from adk_secure_sessions.storage.reads import GetSession
from tests.blob_pieces import decrypt_pieces, encrypted
from tests.storage.support import DATABASE_ID, WHO, RawRow, Stored, data_keys, key_rows

Target = Callable[[bytes], None]

KEY = bytes(range(32))
CIPHERS: list[Cipher] = [AesGcmBackend(KEY).cipher(KEY), FernetBackend(KEY).cipher(KEY)]
CONTEXT = b"context"
# Words of at least this length in a URI or a key spec may be a secret, and no message repeats them.
_SECRET = re.compile(r"[A-Za-z0-9+/_=-]{12,}")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


# --- records -------------------------------------------------------------------------------------


def record(data: bytes) -> None:
    """The header and the ciphertext of a record as they are in a column."""
    cipher = CIPHERS[len(data) % 2]
    assert parse_header_or_none(data) is None or parse_header_or_none(data) == parse_header(data)
    with suppress(DecryptionError):
        backend_id, key_id = parse_header(data)
        assert build_header(backend_id, key_id) == data[:HEADER_LENGTH]
        open_with_flags(data, CONTEXT, cipher)
        raise AssertionError("a record is authentic that no key has encrypted")


def plaintext(data: bytes) -> None:
    """Any bytes as the plaintext of a record, encrypted with the right key: by a faulty writer."""
    start = build_header(1, 7)
    for cipher in CIPHERS:
        stored = start + cipher.encrypt(data, start + CONTEXT)
        with suppress(DecryptionError):
            assert open_with_flags(stored, CONTEXT, cipher, reject_flags) == data
            assert data.startswith(NO_FLAGS)
        try:
            opened = open_with_flags(stored, CONTEXT, cipher)
        except DecryptionError:
            assert not data.startswith(NO_FLAGS)
            continue
        # Other flags say that the content is compressed or padded.
        assert data[0] <= 7
        assert opened == data or data[0]
        assert open_with_flags(stored, CONTEXT, cipher, keep_packed) == data
    with suppress(DecryptionError):
        assert join_id(*split_id(data)) == data
    with suppress(DecryptionError):
        assert join_owner(*split_owner(data)) == data
    with suppress(DecryptionError):
        assert join_session(*split_session(data)) == data
    with suppress(DecryptionError):
        assert b"".join(split_link(data)) == data


# --- key specs and URIs --------------------------------------------------------------------------


def key_spec(data: bytes) -> None:
    """A key spec, or a key that somebody gave in its place."""
    text = _text(data)
    # A spec names a file or a variable; its name is in the message.  No file of this machine is
    # read, and no service is called.
    scheme, _, rest = text.partition(":")
    if scheme in ("file", "passphrase-env", "pkcs11"):
        text = f"env:{rest}"
    if scheme == "aws-kms" and re.fullmatch(aws._NAME, rest, re.ASCII):
        return  # botocore takes a second to make a client
    try:
        key_provider(text)
    except ConfigurationError as error:
        if not text.startswith(("env:", "vault:")):
            _assert_repeats_no_secret(str(error), text)
    for key in (data, text):
        try:
            assert len(parse_key(key)) == 32
        except ConfigurationError as error:
            _assert_repeats_no_secret(str(error), text)


# Texts of messages, with words that an input may contain, too.
_FIXED_TEXTS = " ".join(
    (
        *adk.SCHEMES,
        *NAMES,
        "encrypted+sqlite:///./sessions.db?key=env:ADK_SESSIONS_KEY",
        "projects/P/locations/L/keyRings/R/cryptoKeys/K",
        "passphrase-env",
    )
)


def uri(data: bytes) -> None:
    """A URI of an encrypted service."""
    text = _text(data)
    try:
        parsed = adk.parse(text)
    except ConfigurationError as error:
        _assert_repeats_no_secret(str(error), text)
        return
    assert repr(parsed) == "<ServiceUri>"
    assert f"encrypted+{parsed.db_url}".split("?")[0].lower() == text.split("?")[0].lower()
    assert set(parsed.backends) <= set(NAMES)
    assert parsed.keys or parsed.stores_plaintext
    assert all(parsed.keys)
    options = {part.partition("=")[0] for part in parsed.db_url.partition("?")[2].split("&")}
    assert not options & {"key", "also_key", "key_db", "backend", "blobs"}


def _assert_repeats_no_secret(message: str, text: str) -> None:
    for word in _SECRET.findall(text):
        assert word not in message or word in _FIXED_TEXTS or word in _OPTIONS, "quotes the input"


_OPTIONS = re.sub(r"[^a-z_ ]", " ", str(adk._DRIVER_OPTIONS) + " allow_http audit_ids also_backend")


# --- rows ----------------------------------------------------------------------------------------


class _World:
    """The authentic rows of a session, and what reads return for them."""

    def __init__(self, stored: Stored, limit: int | None) -> None:
        self.stored = stored
        self.limit = limit
        self.rows: list[RawRow] = [*key_rows(stored.key_rows), *stored.rows()]
        self.expected = self.read(self.rows)
        assert self.expected is not None

    def read(self, rows: list[RawRow]) -> object:
        """Return what a process reads that has not read any of *rows* before."""
        attempt = self.stored.attempt(TransactionKeys(data_keys()), rows)
        found = asyncio.run(GetSession(WHO, _as_stored, self.limit).execute(attempt))
        if found is None:
            return None
        view, history = found
        return view, history


def _as_stored(plaintexts: list[bytes], row: int, seqs: Sequence[int]) -> list[tuple[object, ...]]:
    return [(plaintext, row, seq) for plaintext, seq in zip(plaintexts, seqs, strict=True)]


@cache
def _worlds() -> list[_World]:
    return [_World(Stored(events=3), None), _World(Stored(events=2, snapshot=b'{"b":1}'), None)]


def row(data: bytes) -> None:
    """Values of any type in any columns of the rows of a session.

    A read returns what was stored, or raises DecryptionError.
    """
    if not data:
        return
    worlds = _worlds()
    world = worlds[data[0] % len(worlds)]
    rows: list[RawRow | None] = list(world.rows)
    for index, column, value in _changes(data[1:], world.rows):
        if value is _REMOVED:
            rows[index] = None
        elif changed := rows[index]:
            rows[index] = (*changed[:column], value, *changed[column + 1 :])
    with suppress(DecryptionError):
        found = world.read([one for one in rows if one is not None])
        if found is None:
            # Without the rows of a user and its version witnesses, nothing is stored.
            return
        assert found == world.expected


_REMOVED = object()


def _changes(data: bytes, rows: list[RawRow]) -> Iterator[tuple[int, int, object]]:
    """Yield a row, a column but not its kind, and the new value, from bytes."""
    while len(data) >= 4:
        number, column, kind, length = data[:4]
        value, data = data[4 : 4 + length], data[4 + length :]
        index, column = number % len(rows), 1 + column % (len(rows[0]) - 1)
        old = rows[index][column]
        match kind % 9:
            case 0:
                yield index, column, int.from_bytes(value[:8], "big", signed=True)
            case 1:
                yield index, column, value
            case 2:
                yield index, column, value.decode("utf-8", "replace")
            case 3:
                yield index, column, None
            case 4:
                yield index, column, float(int.from_bytes(value[:6], "big")) / 16
            case 5 if isinstance(old, bytes) and old and len(value) > 1:
                at = int.from_bytes(value[:1], "big") % len(old)
                yield index, column, old[:at] + bytes([old[at] ^ value[1]]) + old[at + 1 :]
            case 6:  # the value of another row
                yield index, column, rows[length % len(rows)][column]
            case 7 if isinstance(old, int):
                yield index, column, float(old)
            case 8:
                yield index, column, _REMOVED


# --- keyring -------------------------------------------------------------------------------------


@cache
def _keyring_rows() -> list[MasterKeyRow]:
    root = StaticKey(KEY)

    async def made() -> list[MasterKeyRow]:
        found = []
        for number, purpose in enumerate((INDEX_MASTER, DATA_MASTER, DATA_MASTER), 1):
            new = MasterKeyRow(number, purpose, root.key_id, number, b"")
            wrapped = await root.wrap(bytes([number]) * 32, new.context(DATABASE_ID))
            found.append(new._replace(wrapped=wrapped))
        return found

    return asyncio.run(made())


def keyring(data: bytes) -> None:
    """Values of any type in any columns of the keyring: it holds only the keys that were stored."""
    rows: list[tuple[Any, ...]] = [("", *row) for row in _keyring_rows()]
    for index, column, value in _changes(data, list(rows)):
        if value is _REMOVED:
            rows[index] = rows[0]
        else:
            rows[index] = (*rows[index][:column], value, *rows[index][column + 1 :])
    root = StaticKey(KEY)
    changed = [MasterKeyRow(*row[1:]) for row in rows]
    try:
        opened = asyncio.run(open_keyring(changed, {root.key_id: root}, root.key_id, DATABASE_ID))
    except (ConfigurationError, DecryptionError, KeyServiceError, WrongKeyError):
        return
    known = {row.id: row for row in _keyring_rows()}
    assert set(opened.data_masters) <= {2, 3}
    assert all(known[row.id] == row for row in opened.rows.values())


# --- events, states and other JSON ---------------------------------------------------------------


def event(data: bytes) -> None:
    """The JSON of an event: decoded as google-adk's own validation does, or rejected as there."""
    prefix = events._PREFIX
    ours: Event | None = None
    theirs: Event | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # AuthConfig calls a deprecated method of its own
        with suppress(DecryptionError, ConfigurationError):
            (ours,) = events.decode_all([prefix + data], 1, [2])
        with suppress(ValueError):
            theirs = Event.model_validate_json(data)
        accepted = events.encode_adk_json(data)
        if theirs is None and ours is not None:
            # ADK's services read a lone surrogate with the module `json`, and so does `decode`.
            assert re.search(json_text._SURROGATE, data)
            theirs = Event.model_validate(json.loads(data))
            assert accepted is None
    if theirs is not None and ours is None:
        # Our limits apply to JSON that google-adk would take.
        raise AssertionError("an event is rejected that google-adk accepts")
    if ours is None or theirs is None:
        assert accepted is None
        return
    _assert_same(ours, theirs)
    if accepted is not None:
        stored, event = accepted
        assert stored == prefix + data
        _assert_same(event, theirs)


def _assert_same(one: Event, other: Event) -> None:
    # An event without an id or a time gets new ones when it is parsed.
    for parsed in (one, other):
        parsed.id, parsed.timestamp = "id", 0.0 if one.timestamp != one.timestamp else one.timestamp
    # No NaN equals another, but all have the same text.
    assert same(one, other) or ("nan" in repr(one) and repr(one) == repr(other))


def stored_event(data: bytes) -> None:
    """The plaintext of an event with the version that wrote it."""
    end = json_text.version_end(data)
    assert end == 0 or (end == 1 + data[0] and data[1:end].isascii())
    with warnings.catch_warnings(), suppress(DecryptionError, ConfigurationError):
        warnings.simplefilter("ignore")
        decoded = events.decode(data, 1, 2)
        assert end
        assert isinstance(decoded, Event)
    with suppress(DecryptionError):
        version, values = json_text.read_event(data)
        assert version.encode() in (data[1:end], b"of an unknown version")
        assert type(values) is dict


def state(data: bytes) -> None:
    """The JSON of a state: parsed as Python's module does, and encoded again."""
    try:
        values = json_text.load_state(data)
    except DecryptionError:
        return
    assert values == json.loads(data) or "nan" in repr(values)
    try:
        encoded = json_text.encode_state(values)
    except ValueError:
        return  # its depth or a key exceeds the limit for new states
    again = json_text.load_state(encoded)
    assert again == values or "nan" in repr(values)
    assert json_text.encode_state(again) == encoded


def json_line(data: bytes) -> None:
    """An event and a state in a line of `export`: always one line, which holds the same values."""
    accepted = events.encode_adk_json(data)
    if accepted is None:
        return
    stored, _ = accepted
    values = json_text.loads(data)
    source = EncodedEvent(stored, 0)
    content = SessionContent(data, (source, source), 0, 0, None)
    line = export._line(("a", "u", "s"), data, b"{}", content)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert b"\r" not in line
    shown = json.loads(line)
    if "nan" not in repr(values):
        assert shown["events"] == [values, values]
        assert shown["state"] == {"app": values, "user": {}, "session": values}


def memory_item(data: bytes) -> None:
    """The items of a memory collection, as JSON."""
    try:
        values = json_text.loads(data)
    except DecryptionError:
        return
    listed = values.get("items")
    given = listed if isinstance(listed, list) else [values]
    items = []
    for number, one in enumerate(given):
        if type(one) is not dict:
            return
        try:
            item = memory_items.parse_item(one, number)
        except DecryptionError:
            return
        again = memory_items.parse_item(item.values(), number)
        assert again.values() == item.values()
        items.append(item)
    for first in {0, len(items) - 1}:
        with suppress(DecryptionError):
            memory_items.check_replaced(items[first:], first, "table", 1)


# --- what other programs wrote -------------------------------------------------------------------


@cache
def _keys_1x() -> Package1xKeys:
    fernet = base64.urlsafe_b64encode(KEY)
    return Package1xKeys([fernet])


def envelope(data: bytes) -> None:
    """A value of adk-secure-sessions 1.x, as bytes and as text."""
    for stored in (data, _text(data), data.decode("latin-1")):
        try:
            _keys_1x().decrypt(stored)
        except DecryptionError as error:
            if error.reason is not Reason.AUTHENTICATION:
                continue
        assert is_envelope(stored)


# --- blobs ---------------------------------------------------------------------------------------

_SIZES = [0, 1, 5, blobs.CHUNK_LENGTH, blobs.CHUNK_LENGTH + 1, 2 * blobs.CHUNK_LENGTH + 77]


@cache
def _blob(size: int) -> tuple[bytes, bytes, bytes]:
    """The key, the plaintext and the bytes of a blob."""
    content = bytes(range(256)) * (size // 256 + 1)
    content = content[:size]
    encryptor, sealed = encrypted([content])
    return encryptor.key, content, sealed


def blob(data: bytes) -> None:
    """A blob that an edit script changed, read in pieces and from a range.

    A reader returns a beginning of what was written, and all of it only if nothing was changed.
    """
    if len(data) < 8:
        return
    key, content, sealed = _blob(_SIZES[data[0] % len(_SIZES)])
    start = int.from_bytes(data[1:4], "big") % (len(content) + 1)
    stop = start + int.from_bytes(data[4:7], "big") % (len(content) - start + 1)
    step = 1 + data[7] * 1021
    decryptor = blobs.BlobDecryptor(key, len(content), start, stop)
    # As a store returns the wanted range of the changed blob.
    changed = bytearray(sealed)
    script = data[8:]
    while len(script) >= 4:
        kind, at, script = script[0], int.from_bytes(script[1:4], "big"), script[4:]
        at %= len(changed) + 1
        match kind % 4:
            case 0 if at < len(changed):
                changed[at] ^= 1 + kind // 4
            case 1:
                del changed[at : at + 1 + kind]
            case 2:
                changed[at:at] = bytes(1 + kind // 4)
            case 3:
                changed[at:at] = changed[: blobs.SEALED_LENGTH]
    given = bytes(changed[decryptor.first : decryptor.end])
    wanted, shown = content[start:stop], b""
    try:
        pieces = [given[at : at + step] for at in range(0, len(given), step)]
        for piece in decrypt_pieces(decryptor, pieces):
            shown += piece
            assert wanted.startswith(shown)
    except DecryptionError:
        assert given != sealed[decryptor.first : decryptor.end]
        assert wanted.startswith(shown)
        return
    assert shown == wanted
    assert given == sealed[decryptor.first : decryptor.end]


TARGETS: dict[str, Target] = {
    "blob": blob,
    "envelope": envelope,
    "event": event,
    "json_line": json_line,
    "key_spec": key_spec,
    "keyring": keyring,
    "memory_item": memory_item,
    "plaintext": plaintext,
    "record": record,
    "row": row,
    "state": state,
    "stored_event": stored_event,
    "uri": uri,
}
