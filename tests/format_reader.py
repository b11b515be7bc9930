"""A reader of the whole database, written from docs/format.md alone: nothing of ours is imported.

It reads records of AES-256-GCM and Fernet, with 32-byte root keys.  If the page says that a reader
must reject a value, this reader raises `Refused`.
"""

import hmac
import json
import re
import sqlite3
import struct
import zlib
from base64 import b64decode, b64encode, urlsafe_b64encode
from decimal import Decimal
from typing import Any, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.fernet import Fernet, InvalidToken
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256, Hash
from cryptography.hazmat.primitives.hmac import HMAC
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

Part = str | bytes | int
Row = dict[str, Any]

MAX_CONTENT = 268_500_992  # bytes, after decompression
KEY_LENGTH = 32  # of master keys, and of data keys for AES-256-GCM and Fernet
NO_LINK = bytes(16)
KNOWN_FEATURES = {"-", "collections", "state-index", "wrapper"}
LEVELS, LEVELS_OF_STATE, DIGITS = 200, 191, 4300  # limits of JSON
INDEX_MARK = 2**63 - 1  # row_id of the mark of an indexed name
NO_SNAPSHOT, COLLECTION = -1, -2  # values of base_revision
KEY_TABLES = ("secure_keyring", "secure_data_keys")


class Refused(Exception):
    """A value or a database that the page tells readers to reject."""


class UnknownFlags(Refused):
    """A record with flags that the reader does not know: the page tells readers to name it."""


class Owner(NamedTuple):
    """A decrypted row of an app or a user; *user_id* is empty for an app."""

    user_id: str
    state: Row
    key_ids: tuple[int, ...]


def require(condition: object) -> None:
    if not condition:
        raise Refused


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


def decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise Refused from None


def expand(key: bytes, info: bytes, length: int = 32) -> bytes:
    return HKDFExpand(SHA256(), length, info).derive(key)


def tag(index_master: bytes, *parts: str | bytes) -> bytes:
    """Return the first 16 bytes of the HMAC: a tag, or the MAC of a row of secure_meta."""
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
    require(isinstance(record, bytes) and len(record) >= 13 and record[:4] == b"AKS\x02")
    return struct.unpack(">Bq", record[4:13])


def open_chain(index_master: bytes, database_id: bytes, rows: list[Row]) -> list[tuple[bytes, Row]]:
    """Return the link and the JSON object of each record of a chain of the audit trail."""
    found: list[tuple[bytes, Row]] = []
    previous = bytes(32)
    for number, row in enumerate(rows):
        chain, time, record = row["chain"], row["time"], row["record"]
        require(isinstance(chain, bytes) and len(chain) == 16 and isinstance(record, bytes))
        require(row["number"] == number and record[:1] == b"\x01" and len(record) <= 1_048_576)
        key = expand(index_master, context("audit key", database_id, chain))
        place = context("audit", database_id, chain, number, time)
        plaintext = open_aes(key, record[1:], b"\x01" + place)
        require(plaintext[:32] == previous)
        fields = json.loads(plaintext[32:])
        require(isinstance(fields, dict))
        digest = Hash(SHA256())
        digest.update(place + record)
        previous = digest.finalize()
        found.append((previous, fields))
    return found


def open_blob(blob: bytes, key: bytes, size: int) -> bytes:
    """Return the plaintext of a blob; *key* and *size* are in the record that names it."""
    count = max(1, (size + 65535) // 65536)
    require(len(blob) == 5 + size + 16 * count and blob[:5] == b"AKSB\x01")
    plaintext = b""
    for number in range(count):
        nonce = struct.pack(">3xQB", number, number == count - 1)
        chunk = blob[5 + 65552 * number : 5 + 65552 * (number + 1)]
        plaintext += open_aes(key, nonce + chunk, blob[:5])
    return plaintext


def open_record(
    record: bytes, where: bytes, backend: int, key: bytes, *, is_packed: bool = True
) -> bytes:
    """Return the content.  *is_packed*: whether it may be compressed or padded."""
    plaintext, associated_data = record[13:], record[:13] + where
    if backend != 3:
        opener = open_aes if backend == 1 else open_fernet
        plaintext = opener(key, plaintext, associated_data)
    require(plaintext)
    flags, rest = plaintext[0], plaintext[1:]
    if flags not in ((0, 1, 4, 5) if is_packed else (0,)):
        raise UnknownFlags
    if flags & 4:
        require(len(rest) >= 4)
        (length,) = struct.unpack(">I", rest[:4])
        require(length <= len(rest) - 4 and set(rest[4 + length :]) <= {0})
        rest = rest[4 : 4 + length]
    return _decompressed(rest) if flags & 1 else rest


def _decompressed(data: bytes) -> bytes:
    stream = zlib.decompressobj()
    try:
        content = stream.decompress(data, MAX_CONTENT + 1)
    except zlib.error:
        raise Refused from None
    require(stream.eof and not stream.unused_data and len(content) <= MAX_CONTENT)
    return content


class Fields:
    """Takes the fields of a plaintext, one after another; none may reach beyond its end."""

    def __init__(self, plaintext: bytes) -> None:
        self._rest = plaintext

    def take(self, length: int) -> bytes:
        require(length <= len(self._rest))
        taken, self._rest = self._rest[:length], self._rest[length:]
        return taken

    def link(self) -> bytes:
        return self.take(16)

    def identifier(self) -> str:
        (length,) = struct.unpack(">I", self.take(4))
        return decoded(self.take(length))

    def key_ids(self) -> tuple[int, ...]:
        (count,) = self.take(1)
        return struct.unpack(f">{count}q", self.take(8 * count))

    def adk_version(self) -> str:
        (length,) = self.take(1)
        version = self.take(length)
        require(version.isascii())
        return version.decode("ascii")

    def json(self, levels: int = LEVELS) -> Row:
        try:
            value = json.loads(self._rest.decode(), parse_int=_integer)
        except (ValueError, RecursionError):
            raise Refused from None
        require(isinstance(value, dict) and _levels(value) <= levels)
        return value  # type: ignore[no-any-return]

    def state(self) -> Row:
        return self.json(LEVELS_OF_STATE)


def _integer(digits: str) -> int:
    require(len(digits.lstrip("-")) <= DIGITS)
    return int(digits)


def _levels(value: object) -> int:
    """The levels of nested lists and objects, also empty ones."""
    if not isinstance(value, list | dict):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(map(_levels, inner), default=0)


class Database:
    """The database behind *connection*, opened with 32-byte root keys; *keys*: its key database."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        *root_keys: bytes,
        keys: sqlite3.Connection | None = None,
    ) -> None:
        self._data, self._keys = connection, keys or connection
        meta, meta_of_keys = self._meta(self._data), self._meta(self._keys)
        require(meta.get("holds") == ("data" if keys else None))
        require(meta_of_keys.get("holds") == ("keys" if keys else None))
        require(meta["database_id"] == meta_of_keys["database_id"])
        self._id = bytes.fromhex(meta["database_id"])
        features = _features(meta_of_keys.get("features"))
        roots = {
            f"key:{expand(root, b'adk-secure-sessions/v1/key-id', 8).hex()}": root
            for root in root_keys
        }
        index: list[bytes] = []
        self._masters: dict[int, bytes] = {}
        rows = self._rows("secure_keyring")
        require(len(rows) <= 64)
        for row in rows:
            key = self._unwrap(row, roots)
            if row["purpose"] == "index":
                index.append(key)
            else:
                self._masters[row["id"]] = key
        require(len(index) == 1 and self._masters)
        (self._index,) = index
        mac = tag(self._index, "features", self._id, features[0]).hex()
        require(hmac.compare_digest(mac, features[1]))
        self._data_keys = {row["id"]: row for row in self._rows("secure_data_keys")}
        self._witnesses = {row["tag"]: row for row in self._rows("secure_witnesses")}

    # --- what a caller reads ---

    def contents(self) -> Row:
        """All apps, users, sessions and collections, in the order of their rows.

        A database without collections has no entry for them.
        """
        apps, users = [], []
        sessions: list[Row] = []
        collections: list[Row] = []
        for app in self._rows("secure_apps"):
            name = decoded(app["app_name"])
            apps.append({"app_name": name, "state": self._open_app(name, app).state})
            for row in self._rows("secure_users", "app_row", app["id"]):
                user = self._open_user(name, row)
                users.append({"app_name": name, "user_id": user.user_id, "state": user.state})
                for one in self._rows("secure_sessions", "user_row", row["id"]):
                    opened = self._open_session(name, user.user_id, row, one)
                    (collections if _is_collection(one) else sessions).append(opened)
        found: Row = {"apps": apps, "users": users, "sessions": sessions}
        with_items = [_as_collection(one) for one in collections if one["revision"]]
        return found | ({"collections": with_items} if with_items else {})

    def session(
        self, app_name: str, user_id: str, session_id: str, last: int | None = None
    ) -> Row | None:
        """One session, with the state that an application sees; None if there is none.

        *last*: read only this number of events, the newest ones.
        """
        found = self._asked_for("session", app_name, user_id, session_id, last)
        if found is None:
            return None
        session, states = found
        session["state"] |= states
        return session

    def collection(
        self, app_name: str, user_id: str, name: str, last: int | None = None
    ) -> Row | None:
        """One collection; None if there is none, or if it has no items.

        *last*: read only this number of items, the newest ones.
        """
        found = self._asked_for("collection", app_name, user_id, name, last)
        return _as_collection(found[0]) if found and found[0]["revision"] else None

    def names(self, app_name: str, user_id: str) -> list[str]:
        """The names of the collections of a user that have items."""
        found = self._listed(app_name, user_id, collections=True)
        return [one["session_id"] for one in found if one["revision"]]

    def memory(self, app_name: str, user_id: str) -> Row | None:
        """The entries of a user's memory in their order, and the ids that are not added again."""
        found = self.collection(app_name, user_id, '["memory"]')
        return _memory(found["items"]) if found else None

    def wrapped_session(self, stored: Row, app_name: str, user_id: str, session_id: str) -> Row:
        """The state and the events of a session that another session service returned."""
        require(
            (stored["app_name"], stored["user_id"], stored["id"]) == (app_name, user_id, session_id)
        )
        app, user = tag(self._index, "app", app_name), tag(self._index, "user", app_name, user_id)
        scopes: dict[str, tuple[bytes, tuple[str, ...]]] = {
            "app:": (app, ("app", app_name)),
            "user:": (user, ("user", app_name, user_id)),
            "": (user, ("session", app_name, user_id, session_id)),
        }
        state: Row = {}
        for key, value in stored["state"].items():
            found = re.fullmatch("(app:|user:|)([0-9a-f]{32})", key)
            if found is None:
                raise Refused
            owner, parts = scopes[found[1]]
            record = _from_base64(value)
            if found[1] == "user:" and unpack(record)[1] not in self._data_keys:
                continue
            key_tag = bytes.fromhex(found[2])
            entry = self._open(record, owner, "wrapped state", *parts, key_tag).state()
            require(len(entry) == 1)
            state |= {found[1] + name: value for name, value in entry.items()}
        require(len({one["text"] for one in stored["events"]}) == len(stored["events"]))
        history = []
        for one in stored["events"]:
            ids = (app_name, user_id, session_id, one["id"])
            fields = self._open(_from_base64(one["text"]), user, "wrapped event", *ids)
            fields.adk_version()
            event = fields.json()
            for name in ("id", "invocation_id", "author", "turn_complete"):
                require(one[name] == event.get(name))
            require(abs(one["timestamp"] - event["timestamp"]) <= 0.001)
            history.append(event)
        return {"state": state, "events": history}

    def _asked_for(
        self, kind: str, app_name: str, user_id: str, name: str, last: int | None
    ) -> tuple[Row, Row] | None:
        """A session or a collection, and the states of its app and its user."""
        app = self._find("secure_apps", "app", app_name)
        user = self._find("secure_users", "user", app_name, user_id)
        row = self._find("secure_sessions", kind, app_name, user_id, name)
        if row is None:
            return None
        require(app and user)
        assert app is not None
        assert user is not None
        require(_is_collection(row) == (kind == "collection"))
        require((row["user_row"], user["app_row"]) == (user["id"], app["id"]))
        states = self._states(app_name, app, user_id, user)
        opened = self._open_session(app_name, user_id, user, row, last)
        require(opened["session_id"] == name)
        return opened, states

    def listing(self, app_name: str, user_id: str) -> list[Row]:
        """The sessions of a user, without events."""
        return self._listed(app_name, user_id, collections=False)

    def _listed(self, app_name: str, user_id: str, *, collections: bool) -> list[Row]:
        app = self._find("secure_apps", "app", app_name)
        user = self._find("secure_users", "user", app_name, user_id)
        if user is None:
            return []
        require(app)
        assert app is not None
        require(user["app_row"] == app["id"])
        states = self._states(app_name, app, user_id, user)
        rows = self._rows("secure_sessions", "user_row", user["id"])
        if collections:
            rows = [row for row in rows if _is_collection(row)]
        require(len({row["tag"] for row in rows}) == len(rows))
        opened = [self._open_session(app_name, user_id, user, row, 0) for row in rows]
        for one in opened:
            one["state"] |= states
        return [
            one for one, row in zip(opened, rows, strict=True) if _is_collection(row) == collections
        ]

    def search(self, app_name: str, name: str, value: object) -> list[Row]:
        """The sessions without events whose state has an indexed *name* with this *value*."""
        key_tag = tag(self._index, "state index key", app_name, name)
        mark = tag(self._index, "state index complete", key_tag)
        rows = self._rows("secure_state_index", "key_tag", key_tag)
        marks = [row["value_tag"] for row in rows if row["row_id"] == INDEX_MARK]
        require(len(marks) == 1 and hmac.compare_digest(marks[0], mark))
        wanted = canonical(value)
        value_tag = tag(self._index, "state index value", app_name, name, wanted)
        named = {row["row_id"] for row in rows if row["value_tag"] == value_tag}
        found = []
        for row_id, session, state in self._states_of(app_name, of_users=name.startswith("user:")):
            if row_id in named and name in state and canonical(state[name]) == wanted:
                found.append(session)
        return found

    def indexed_rows(self, app_name: str, name: str) -> set[tuple[int, bytes, bytes]]:
        """The rows that a complete index of *name* has, computed from the states."""
        key_tag = tag(self._index, "state index key", app_name, name)
        return {
            (row_id, key_tag, tag(self._index, "state index value", app_name, name, text))
            for row_id, _, state in self._states_of(app_name, of_users=name.startswith("user:"))
            if name in state
            for text in [canonical(state[name])]
        }

    def _states_of(self, app_name: str, *, of_users: bool) -> list[tuple[int, Row, Row]]:
        """The `row_id`, each session and its own state; or of its user, with prefixed names."""
        found = []
        app = self._find("secure_apps", "app", app_name)
        for row in self._rows("secure_users", "app_row", app["id"] if app else -1):
            user = self._open_user(app_name, row)
            state = {f"user:{name}": value for name, value in user.state.items()}
            for one in self._rows("secure_sessions", "user_row", row["id"]):
                session = self._open_session(app_name, user.user_id, row, one, 0)
                if _is_collection(one):
                    continue
                of_session = (one["id"], session, session["state"])
                found.append((-1 - row["id"], session, state) if of_users else of_session)
        return found

    def current_key(self, backend: int, app_name: str, user_id: str | None = None) -> int | None:
        """The id of the data key with which a writer encrypts records of an app or a user.

        None: the writer must create one.
        """
        if user_id is None:
            row = self._find("secure_apps", "app", app_name)
            owner = row and self._open_app(app_name, row)
        else:
            row = self._find("secure_users", "user", app_name, user_id)
            owner = row and self._open_user(app_name, row)
        named = [self._data_keys.get(key_id) for key_id in owner.key_ids] if owner else []
        usable = [key for key in named if key and self._is_usable(key, backend)]
        newest: Row | None = max(usable, key=lambda key: key["generation"], default=None)
        return newest["id"] if newest else None

    def checkpoints(self) -> dict[str, tuple[int, ...]]:
        """When each unfinished rotation began."""
        found = {}
        for row in self._rows("secure_meta"):
            if row["name"].startswith("rotation."):
                text, _, mac = row["value"].rpartition(" ")
                require(mac == tag(self._index, "checkpoint", row["name"], text).hex())
                found[row["name"]] = tuple(map(int, text.split(" ")))
        return found

    # --- rows ---

    def _meta(self, connection: sqlite3.Connection) -> dict[str, str]:
        meta = dict(connection.execute("SELECT name, value FROM secure_meta"))
        require(meta.get("format") == "2")
        require(re.fullmatch("[0-9a-f]{32}", str(meta.get("database_id"))))
        return meta

    def _rows(self, table: str, column: str = "1", value: object = 1) -> list[Row]:
        order = "seq" if table == "secure_events" else "1"
        connection = self._keys if table in KEY_TABLES else self._data
        rows = connection.execute(
            f"SELECT * FROM {table} WHERE {column} = ? ORDER BY {order}", (value,)
        )
        names = [column[0] for column in rows.description]
        return [dict(zip(names, row, strict=True)) for row in rows]

    def _find(self, table: str, *ids: str) -> Row | None:
        """The row of *table* with the tag of *ids*; rejected if only its witness is there."""
        row_tag = tag(self._index, *ids)
        found = self._rows(table, "tag", row_tag)
        require(found or row_tag not in self._witnesses)
        require(len(found) <= 1)
        return found[0] if found else None

    # --- keys ---

    def _unwrap(self, row: Row, roots: dict[str, bytes]) -> bytes:
        wrapped, root_id = row["wrapped"], row["root_key_id"]
        require(row["purpose"] in ("index", "data"))
        where = context(
            "master-key", self._id, row["purpose"], root_id, row["id"], row["created_at"]
        )
        require(root_id in roots and isinstance(wrapped, bytes) and wrapped[:1] == b"\x01")
        wrapping_key = expand(roots[root_id], b"adk-secure-sessions/v1/wrap")
        return _checked(open_aes(wrapping_key, wrapped[1:], b"\x01" + where))

    def _data_key(self, key_id: int, owner: bytes, backend: int) -> bytes:
        row = self._data_keys.get(key_id)
        if row is None or row["owner"] != owner or row["backend_id"] != backend:
            raise Refused
        wrap_backend, master = unpack(row["wrapped"])
        require(wrap_backend == 1 and master in self._masters)
        where = context(
            "data-key", self._id, owner, key_id, row["generation"], backend, row["created_at"]
        )
        wrapping_key = self._masters[master]
        return _checked(open_record(row["wrapped"], where, 1, wrapping_key, is_packed=False))

    def _is_usable(self, key: Row, backend: int) -> bool:
        try:
            self._data_key(key["id"], key["owner"], backend)
        except Refused:
            return False
        return True

    # --- records ---

    def _open(self, record: bytes, owner: bytes, *where: Part) -> Fields:
        return Fields(self._plaintext(record, owner, *where))

    def _plaintext(
        self, record: bytes, owner: bytes, *where: Part, is_packed: bool = True
    ) -> bytes:
        backend, key_id = unpack(record)
        require(backend in (1, 2))
        key = self._data_key(key_id, owner, backend)
        return open_record(record, context(*where), backend, key, is_packed=is_packed)

    def _check_witness(
        self, app: str, owner: bytes, row_tag: bytes, number: int, link: bytes
    ) -> None:
        witness = self._witnesses.get(row_tag)
        if witness is None:
            raise Refused
        where = ("witness", app, row_tag, witness["number"])
        require(self._plaintext(witness["seal"], owner, *where, is_packed=False) == link)
        require(witness["number"] == number)

    def _states(self, app_name: str, app: Row, user_id: str, user: Row) -> Row:
        """The states of the app and the user, with their prefixes."""
        opened = self._open_user(app_name, user)
        require(opened.user_id == user_id)
        app_state = self._open_app(app_name, app).state
        prefixed = {f"app:{name}": value for name, value in app_state.items()}
        return prefixed | {f"user:{name}": value for name, value in opened.state.items()}

    def _open_app(self, name: str, row: Row) -> Owner:
        row_tag = row["tag"]
        require(row["app_name"] == encoded(name) and row_tag == tag(self._index, "app", name))
        fields = self._open(row["state"], row_tag, "app", name, row_tag, row["id"], row["version"])
        self._check_witness(name, row_tag, row_tag, row["version"], fields.link())
        key_ids = fields.key_ids()
        return Owner("", fields.state(), key_ids)

    def _open_user(self, app: str, row: Row) -> Owner:
        row_tag = row["tag"]
        where = ("user", app, row_tag, row["id"], row["app_row"], row["version"])
        fields = self._open(row["state"], row_tag, *where)
        user_id = fields.identifier()
        require(row_tag == tag(self._index, "user", app, user_id))
        self._check_witness(app, row_tag, row_tag, row["version"], fields.link())
        key_ids = fields.key_ids()
        return Owner(user_id, fields.state(), key_ids)

    def _open_session(
        self, app: str, user_id: str, user: Row, row: Row, last: int | None = None
    ) -> Row:
        numbers = ("id", "user_row", "revision", "base_revision")
        times = ("created_at", "updated_at", "expires_at")
        values = [row[name] for name in (*numbers, *times)]
        where = ("session", app, user_id, row["tag"], *values)
        fields = self._open(row["state"], user["tag"], *where)
        session_id = fields.identifier()
        head, snapshot_link = fields.link(), fields.link()
        overlay = fields.state()
        kind = "collection" if _is_collection(row) else "session"
        require(row["tag"] == tag(self._index, kind, app, user_id, session_id))
        require(row["user_row"] == user["id"])
        self._check_witness(app, user["tag"], row["tag"], row["id"], b"")
        who = (app, user_id, session_id)
        snapshot = self._open_snapshot(who, user, row, snapshot_link)
        copied = ("created_at", "updated_at", "revision", "base_revision")
        return {
            "app_name": app,
            "user_id": user_id,
            "session_id": session_id,
            **{name: row[name] for name in copied},
            "state": snapshot | overlay,
            "overlay_keys": sorted(overlay),
            "events": self._open_events(who, user, row, head, last),
        }

    def _open_snapshot(self, who: tuple[str, ...], user: Row, row: Row, link: bytes) -> Row:
        found = self._rows("secure_bases", "session_row", row["id"])
        if row["base_revision"] in (NO_SNAPSHOT, COLLECTION):
            require(not found and link == NO_LINK)
            return {}
        require([one["revision"] for one in found] == [row["base_revision"]])
        where = ("base", *who, row["id"], row["base_revision"])
        fields = self._open(found[0]["state"], user["tag"], *where)
        require(fields.link() == link)
        return fields.state()

    def _open_events(
        self, who: tuple[str, ...], user: Row, row: Row, head: bytes, last: int | None
    ) -> list[Row]:
        rows = self._rows("secure_events", "session_row", row["id"])
        require((rows[-1]["seq"] if rows else -1) == row["revision"] - 1)
        if last == 0:
            return []
        first = 0 if last is None else max(0, row["revision"] - last)
        rows = [one for one in rows if last is None or one["seq"] >= first]
        require([one["seq"] for one in rows] == list(range(first, row["revision"])))
        links, previous, history = [], [], []
        for one in rows:
            where = ("event", *who, row["id"], one["seq"], one["time"])
            fields = self._open(one["event"], user["tag"], *where)
            links.append(fields.link())
            previous.append(fields.link())
            fields.adk_version()
            history.append(fields.json())
        if first == 0:
            links.insert(0, NO_LINK)
            previous.insert(0, NO_LINK)
        require(links[:-1] == previous[1:])
        require(links[-1] == head)
        return history


def canonical(value: object) -> str:
    """The canonical JSON of a value of a state."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _canonical_double(value)
    if isinstance(value, str):
        return f'"{"".join(map(_escaped, value))}"'
    if isinstance(value, list):
        return f"[{','.join(map(canonical, value))}]"
    assert isinstance(value, dict)
    entries = (f"{canonical(name)}:{canonical(value[name])}" for name in sorted(value))
    return f"{{{','.join(entries)}}}"


def _escaped(character: str) -> str:
    controls = {"\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
    if character in '"\\':
        return f"\\{character}"
    if character in controls:
        return f"\\{controls[character]}"
    if " " <= character <= "~":
        return character
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


def _canonical_double(value: float) -> str:
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "Infinity" if value > 0 else "-Infinity"
    shortest = Decimal(repr(value))  # the shortest text that is read as the same double
    sign = "-" if shortest.is_signed() else ""
    if not shortest:
        return f"{sign}0.0"
    digits = "".join(map(str, shortest.as_tuple().digits)).rstrip("0")
    exponent = shortest.adjusted()
    if not -4 <= exponent <= 15:
        point = f".{digits[1:]}" if digits[1:] else ""
        return f"{sign}{digits[0]}{point}e{'-' if exponent < 0 else '+'}{abs(exponent):02}"
    if exponent < 0:
        return f"{sign}0.{'0' * (-exponent - 1)}{digits}"
    whole = digits[: exponent + 1].ljust(exponent + 1, "0")
    return f"{sign}{whole}.{digits[exponent + 1 :] or '0'}"


def _is_collection(row: Row) -> bool:
    return bool(row["base_revision"] == COLLECTION)


def _as_collection(opened: Row) -> Row:
    """Rename what the page calls otherwise for a collection."""
    require(not opened["state"])
    ids = {"app_name": opened["app_name"], "user_id": opened["user_id"]}
    return ids | {"name": opened["session_id"], "items": opened["events"]}


def _memory(items: list[Row]) -> Row:
    """Check the items of a memory, and apply them."""
    replacements: dict[int, str] = {}
    scopes: dict[str, list[Row]] = {}
    deleted: set[str] = set()
    for number, item in enumerate(items):
        deleted |= set(item.get("deleted", []))
        for earlier, dropped in item.get("drop", {}).items():
            require(earlier.isdecimal() and int(earlier) < number)
            replacements[int(earlier)] = dropped["replacement"]
            add = items[int(earlier)].get("add", [])
            require(all(add[place : place + 1] in ([], [None]) for place in dropped["places"]))
        if "scope" in item:
            scope = scopes.setdefault(json.dumps(item["scope"]), [])
            scope += [{"scope": item["scope"], **one} for one in item.get("add", []) if one]
        require("scope" in item or not item.get("add"))
    for number, item in enumerate(items):
        require(item.get("replacement") == replacements.get(number))
    entries = [entry for scope in scopes.values() for entry in scope]
    return {"deleted": sorted(deleted), "entries": entries}


def _from_base64(text: object) -> bytes:
    """The bytes of a text in base64, which must be the text that a writer writes for them."""
    require(isinstance(text, str))
    try:
        data = b64decode(str(text), validate=True)
    except ValueError:
        raise Refused from None
    require(b64encode(data).decode() == text)
    return data


def _features(value: object) -> tuple[str, str]:
    """The names and the MAC in the row `features` of secure_meta."""
    name = "[a-z][a-z0-9._-]*"
    found = re.fullmatch(rf"(-|{name}(?:,{name})*) ([0-9a-f]{{32}})", str(value))
    if not found:
        raise Refused
    require(set(found[1].split(",")) <= KNOWN_FEATURES)
    return found[1], found[2]


def _checked(key: bytes) -> bytes:
    require(len(key) == KEY_LENGTH)
    return key
