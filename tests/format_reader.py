"""A reader of the whole database, written from docs/format.md alone: nothing of ours is imported.

It reads records of AES-256-GCM and Fernet, with 32-byte root keys.  If the page says that a reader
must reject a value, this reader raises `Refused`.
"""

import json
import re
import sqlite3
import struct
from base64 import urlsafe_b64encode
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.fernet import Fernet, InvalidToken
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hmac import HMAC
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

Part = str | bytes | int
Row = dict[str, Any]

KEY_LENGTH = 32  # of master keys, and of data keys for AES-256-GCM and Fernet


class Refused(Exception):
    """A value or a database that the page tells readers to reject."""


def context(*parts: Part) -> bytes:
    """Return the encoded context of *parts*."""
    joined, integers = b"", b""
    for part in parts:
        if isinstance(part, int):
            integers += struct.pack(">q", part)
        elif isinstance(part, str | bytes):
            data = encoded(part) if isinstance(part, str) else part
            joined += struct.pack(">I", len(data)) + data
        else:  # SQLite stores any type in any column
            raise Refused
    return joined + struct.pack(">I", len(integers)) + integers


def encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def expand(key: bytes, info: bytes, length: int = 32) -> bytes:
    return HKDFExpand(SHA256(), length, info).derive(key)


def tag(index_master: bytes, *parts: str) -> bytes:
    mac = HMAC(index_master, SHA256())
    mac.update(context(*parts))
    return mac.finalize()[:16]


def open_aes(key: bytes, body: bytes, associated_data: bytes) -> bytes:
    try:
        return AESGCM(key).decrypt(body[:12], body[12:], associated_data)
    except (InvalidTag, ValueError):
        raise Refused from None


def open_fernet(key: bytes, body: bytes, associated_data: bytes) -> bytes:
    token_key = urlsafe_b64encode(expand(key, associated_data))
    try:
        return Fernet(token_key).decrypt(urlsafe_b64encode(body))
    except InvalidToken:
        raise Refused from None


def unpack(record: bytes) -> tuple[int, int]:
    """A record's backend id and key id."""
    if not isinstance(record, bytes) or len(record) < 13 or record[:4] != b"AKS\x01":
        raise Refused
    return struct.unpack(">Bq", record[4:13])


def open_record(record: bytes, where: bytes, backend: int, key: bytes) -> bytes:
    body, associated_data = record[13:], record[:13] + where
    if backend == 3:
        return body
    return (open_aes if backend == 1 else open_fernet)(key, body, associated_data)


class Database:
    """The database behind *connection*, opened with 32-byte root keys; *keys*: its key database."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        *root_keys: bytes,
        keys: sqlite3.Connection | None = None,
    ) -> None:
        self._connections = {True: keys or connection, False: connection}
        meta = self._meta(connection)
        if meta.get("holds") != ("data" if keys else None):
            raise Refused
        if keys and self._meta(keys) != meta | {"holds": "keys"}:
            raise Refused
        database_id = meta.get("database_id", "")
        if not re.fullmatch("[0-9a-f]{32}", database_id):
            raise Refused
        self._id = bytes.fromhex(database_id)
        roots = {
            f"key:{expand(root, b'adk-secure-sessions/v1/key-id', 8).hex()}": root
            for root in root_keys
        }
        index: list[bytes] = []
        self._masters: dict[int, bytes] = {}
        for row in self._rows("secure_keyring"):
            key = self._unwrap(row, roots)
            if row["purpose"] == "index":
                index.append(key)
            else:
                self._masters[row["id"]] = key
        if len(index) != 1 or not self._masters:
            raise Refused
        (self._index,) = index
        self._keys = {row["id"]: row for row in self._rows("secure_data_keys")}
        self._witnesses = {row["tag"]: row for row in self._rows("secure_witnesses")}

    def contents(self) -> Row:
        """All apps, users and sessions, in the order of their rows."""
        apps, users, sessions = [], [], []
        for app in self._rows("secure_apps"):
            name = app["app_name"].decode("utf-8", "surrogatepass")
            state = self._open_app(name, app)
            apps.append({"app_name": name, "state": state})
            for user in self._rows("secure_users", "app_row", app["id"]):
                user_id, state = self._open_user(name, user)
                users.append({"app_name": name, "user_id": user_id, "state": state})
                for session in self._rows("secure_sessions", "user_row", user["id"]):
                    sessions.append(self._open_session(name, user_id, user, session))
        return {"apps": apps, "users": users, "sessions": sessions}

    def session(self, app_name: str, user_id: str, session_id: str) -> Row | None:
        """One session, with the state that an application sees; None if there is none."""
        app = self._find("secure_apps", "app", app_name)
        user = self._find("secure_users", "user", app_name, user_id)
        row = self._find("secure_sessions", "session", app_name, user_id, session_id)
        if row is None:
            return None
        if app is None or user is None:
            raise Refused
        if (row["user_row"], user["app_row"]) != (user["id"], app["id"]):
            raise Refused
        app_state = self._open_app(app_name, app)
        _, user_state = self._open_user(app_name, user)
        session = self._open_session(app_name, user_id, user, row)
        for prefix, state in (("app:", app_state), ("user:", user_state)):
            session["state"] |= {prefix + name: value for name, value in state.items()}
        return session

    def _find(self, table: str, *ids: str) -> Row | None:
        """The row of *table* with the tag of *ids*; rejected if only its witness is there."""
        row_tag = tag(self._index, *ids)
        found = self._rows(table, "tag", row_tag)
        if not found and row_tag in self._witnesses:
            raise Refused
        return found[0] if found else None

    def _meta(self, connection: sqlite3.Connection) -> dict[str, str]:
        meta = dict(connection.execute("SELECT name, value FROM secure_meta"))
        if meta.get("format") != "1":
            raise Refused
        return meta

    def checkpoints(self) -> dict[str, tuple[int, ...]]:
        """Since when, at which table and after which row each rotation is."""
        found = {}
        for row in self._rows("secure_meta"):
            if row["name"].startswith("rotation."):
                text, _, mac = row["value"].rpartition(" ")
                if mac != tag(self._index, "checkpoint", row["name"], text).hex():
                    raise Refused
                found[row["name"]] = tuple(map(int, text.split(" ")))
        return found

    def _rows(self, table: str, column: str = "1", value: object = 1) -> list[Row]:
        order = "seq" if table == "secure_events" else "1"
        rows = self._connections[table in ("secure_keyring", "secure_data_keys")].execute(
            f"SELECT * FROM {table} WHERE {column} = ? ORDER BY {order}", (value,)
        )
        names = [column[0] for column in rows.description]
        return [dict(zip(names, row, strict=True)) for row in rows]

    def _unwrap(self, row: Row, roots: dict[str, bytes]) -> bytes:
        wrapped, root_id = row["wrapped"], row["root_key_id"]
        where = context(
            "master-key", self._id, row["purpose"], root_id, row["id"], row["created_at"]
        )
        if root_id not in roots or wrapped[:1] != b"\x01":
            raise Refused
        wrapping_key = expand(roots[root_id], b"adk-secure-sessions/v1/wrap")
        return _checked(open_aes(wrapping_key, wrapped[1:], b"\x01" + where))

    def _data_key(self, key_id: int, owner: bytes, backend: int) -> bytes:
        row = self._keys.get(key_id)
        if row is None or row["owner"] != owner or row["backend_id"] != backend:
            raise Refused
        wrap_backend, master = unpack(row["wrapped"])
        if wrap_backend != 1 or master not in self._masters:
            raise Refused
        where = context(
            "data-key", self._id, owner, key_id, row["generation"], backend, row["created_at"]
        )
        return _checked(open_record(row["wrapped"], where, 1, self._masters[master]))

    def _open(self, record: bytes, owner: bytes, *where: Part) -> bytes:
        backend, key_id = unpack(record)
        if backend not in (1, 2):
            raise Refused
        return open_record(record, context(*where), backend, self._data_key(key_id, owner, backend))

    def _check_witness(self, app: str, owner: bytes, row_tag: bytes, number: int) -> None:
        witness = self._witnesses.get(row_tag)
        if witness is None:
            raise Refused
        where = ("witness", app, row_tag, witness["number"])
        if self._open(witness["seal"], owner, *where) != b"" or witness["number"] != number:
            raise Refused

    def _open_app(self, name: str, row: Row) -> Any:
        row_tag = row["tag"]
        if row["app_name"] != encoded(name) or row_tag != tag(self._index, "app", name):
            raise Refused
        self._check_witness(name, row_tag, row_tag, row["version"])
        where = ("app", name, row_tag, row["id"], row["version"])
        return json.loads(self._open(row["state"], row_tag, *where))

    def _open_user(self, app: str, row: Row) -> tuple[str, Any]:
        row_tag = row["tag"]
        self._check_witness(app, row_tag, row_tag, row["version"])
        where = ("user", app, row_tag, row["id"], row["app_row"], row["version"])
        user_id, state = _split(self._open(row["state"], row_tag, *where))
        if row_tag != tag(self._index, "user", app, user_id):
            raise Refused
        return user_id, state

    def _open_session(self, app: str, user_id: str, user: Row, row: Row) -> Row:
        numbers = ("id", "user_row", "revision", "base_revision", "created_at", "updated_at")
        where = ("session", app, user_id, row["tag"], *(row[name] for name in numbers))
        session_id, overlay = _split(self._open(row["state"], user["tag"], *where))
        if row["tag"] != tag(self._index, "session", app, user_id, session_id):
            raise Refused
        self._check_witness(app, user["tag"], row["tag"], row["id"])
        who = (app, user_id, session_id)
        base = {}
        revisions = [] if row["base_revision"] == -1 else [row["base_revision"]]
        bases = self._rows("secure_bases", "session_row", row["id"])
        if [found["revision"] for found in bases] != revisions:
            raise Refused
        for found in bases:
            where = ("base", *who, row["id"], found["revision"])
            base = json.loads(self._open(found["state"], user["tag"], *where))
        history = []
        for number, event in enumerate(self._rows("secure_events", "session_row", row["id"])):
            if event["seq"] != number:
                raise Refused
            where = ("event", *who, row["id"], number, event["time"])
            plaintext = self._open(event["event"], user["tag"], *where)
            history.append(json.loads(plaintext[1 + plaintext[0] :]))
        if len(history) != row["revision"]:
            raise Refused
        copied = ("created_at", "updated_at", "revision", "base_revision")
        return {
            "app_name": app,
            "user_id": user_id,
            "session_id": session_id,
            **{name: row[name] for name in copied},
            "state": base | overlay,
            "overlay_keys": sorted(overlay),
            "events": history,
        }


def _checked(key: bytes) -> bytes:
    if len(key) != KEY_LENGTH:
        raise Refused
    return key


def _split(plaintext: bytes) -> tuple[str, Any]:
    end = 4 + struct.unpack(">I", plaintext[:4])[0]
    return plaintext[4:end].decode("utf-8", "surrogatepass"), json.loads(plaintext[end:])
