"""tests/vectors/rejections.json: databases that a reader must reject, as changes of database.sql.

The changes include records that are encrypted with the right keys and do not belong together, as
after a restore from a backup or with a copy of the database that was written to.
"""

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

from adk_secure_sessions import StaticKey
from adk_secure_sessions.formats import records
from adk_secure_sessions.formats.records import LINK_LENGTH, NO_LINK
from adk_secure_sessions.keys.data_keys import DataKeyRow, unwrap_data_key
from adk_secure_sessions.keys.keyring import Keyring, MasterKeyRow, open_keyring
from examples.vectors.database import ADA, AES_KEY, ARCHIVE, BOB, CLINIC, EMPTY, FERNET_KEY, VISIT
from examples.vectors.fixed import TIME, FixedAesGcm, FixedFernet, Json, made, padded, zlib_stream

ABOUT = (
    "Databases that a reader must reject. examples/make_vectors.py generates them. For each case, "
    "load database.sql, run the statements 'sql' (SQLite), and do what 'when' says with the root "
    "keys of database.json. 'open': open the database. 'get': read the session 'of' (app name, "
    "user id, session id) with all events. 'last': the same, with its last event only. 'list': "
    "list the sessions of its user. 'append': append an event to it. If 'expect' is not 'ok', it "
    "is the class that adk-secure-sessions raises, and any reader must reject. If 'expect' is "
    "'ok', a reader must accept. 'reason', where it is given, is the reason that the reader must "
    "name. 'not_with', where it is given, is the id of a data key that must not encrypt the new "
    "records."
)
Edit = Callable[[bytes], bytes]
OTHER_LINK = made("link of another copy of the database", LINK_LENGTH)
Session = tuple[str, str, str]
_VISIT, _ARCHIVE, _EMPTY = (CLINIC, ADA, VISIT), (CLINIC, ADA, ARCHIVE), (CLINIC, BOB, EMPTY)
_TAMPERED = "TamperedError"


class Forger:
    """Decrypts records of the database, and encrypts changed plaintexts with the same keys."""

    def __init__(self, sql: str) -> None:
        self._connection = sqlite3.connect(":memory:")
        self._connection.row_factory = sqlite3.Row
        self._connection.executescript(sql)
        meta = dict(map(tuple, self._rows("SELECT name, value FROM secure_meta")))
        self.database_id = bytes.fromhex(meta["database_id"])
        roots = {key.key_id: key for key in (StaticKey(AES_KEY), StaticKey(FERNET_KEY))}
        rows = [MasterKeyRow(*row) for row in self._rows("SELECT * FROM secure_keyring")]
        opening = open_keyring(rows, roots, next(iter(roots)), self.database_id)
        self.keyring: Keyring = asyncio.run(opening)
        found = [DataKeyRow(*row) for row in self._rows("SELECT * FROM secure_data_keys")]
        self.data_keys = {row.id: row for row in found}

    def close(self) -> None:
        self._connection.close()

    def _rows(self, query: str, *values: object) -> list[sqlite3.Row]:
        return self._connection.execute(query, values).fetchall()

    def row(self, table: str, tag: bytes) -> sqlite3.Row:
        (row,) = self._rows(f"SELECT * FROM {table} WHERE tag = ?", tag)
        return row

    def app(self, edit: Edit) -> str:
        tag = self.keyring.index_master.tag_of(CLINIC)
        row = self.row("secure_apps", tag)
        context = records.build_context(("app", CLINIC, tag), row["id"], row["version"])
        return self._update("secure_apps", "state", f"id = {row['id']}", context, edit)

    def user(self, edit: Edit) -> str:
        tag = self.keyring.index_master.tag_of(CLINIC, ADA)
        row = self.row("secure_users", tag)
        numbers = (row["id"], row["app_row"], row["version"])
        context = records.build_context(("user", CLINIC, tag), *numbers)
        return self._update("secure_users", "state", f"id = {row['id']}", context, edit)

    def witness(self, tag: bytes, edit: Edit) -> str:
        row = self.row("secure_witnesses", tag)
        context = records.build_context(("witness", CLINIC, tag), row["number"])
        where = f"tag = X'{tag.hex()}'"
        return self._update("secure_witnesses", "seal", where, context, edit)

    def session_row(self, of: Session) -> sqlite3.Row:
        return self.row("secure_sessions", self.tag_of(of))

    def tag_of(self, of: Session) -> bytes:
        """Return the tag of the row of `secure_sessions` that *of* names."""
        return self.keyring.index_master.tag_of(*of)

    def session(self, of: Session, edit: Edit) -> str:
        app, user, _ = of
        row = self.session_row(of)
        columns = ("id", "user_row", "revision", "base_revision")
        times = ("created_at", "updated_at", "expires_at")
        numbers = (row[name] for name in (*columns, *times))
        context = records.build_context(("session", app, user, row["tag"]), *numbers)
        return self._update("secure_sessions", "state", f"id = {row['id']}", context, edit)

    def snapshot(self, of: Session, edit: Edit) -> str:
        row = self.session_row(of)
        context = records.build_context(("base", *of), row["id"], row["base_revision"])
        where = f"session_row = {row['id']}"
        return self._update("secure_bases", "state", where, context, edit)

    def event(self, of: Session, seq: int, edit: Edit) -> str:
        row_id = self.session_row(of)["id"]
        where = f"session_row = {row_id} AND seq = {seq}"
        ((time,),) = self._rows(f"SELECT time FROM secure_events WHERE {where}")
        context = records.build_context(("event", *of), row_id, seq, time)
        return self._update("secure_events", "event", where, context, edit)

    def data_key(self, row: DataKeyRow, edit: Edit) -> bytes:
        """Return `wrapped` of *row*, whose key is that of the stored row with its owner."""
        master_id = records.parse_header(row.wrapped)[1]
        key = unwrap_data_key(self.data_keys[row.id], self.keyring)
        header = records.build_header(1, master_id)
        nonce = made(f"wrap of {row.id}", 12)
        return header + _encrypted(
            self.keyring.data_master(master_id), nonce, edit(records.NO_FLAGS + key),
            header + row.context(self.database_id),
        )  # fmt: skip

    def inserted_again(self, row: DataKeyRow) -> str:
        """Return the statement that inserts the key of *row* again, as a key of another id."""
        key = unwrap_data_key(row, self.keyring)
        new = row._replace(id=row.id + 1, generation=row.generation + 10)
        master_id = records.parse_header(row.wrapped)[1]
        header = records.build_header(1, master_id)
        context = header + new.context(self.database_id)
        nonce = made("an erased data key", 12)
        wrapped = header + _encrypted(
            self.keyring.data_master(master_id), nonce, records.NO_FLAGS + key, context
        )
        return _insert("secure_data_keys", new._replace(wrapped=wrapped))

    def _update(self, table: str, column: str, where: str, context: bytes, edit: Edit) -> str:
        query = f"SELECT {column} FROM {table} WHERE {where}"
        ((stored,),) = self._rows(query)
        backend_id, key_id = records.parse_header(stored)
        key = unwrap_data_key(self.data_keys[key_id], self.keyring)
        plaintext = records.open_with_flags(stored, context, _fixed(backend_id, key, ""))[1:]
        whole = edit(records.NO_FLAGS + plaintext)
        header = stored[: records.HEADER_LENGTH]
        cipher = _fixed(backend_id, key, f"forged {table} {where} {whole.hex()}")
        forged = header + cipher.encrypt(whole, header + context)
        return f"UPDATE {table} SET {column} = X'{forged.hex()}' WHERE {where}"


def _fixed(backend_id: int, key: bytes, label: str) -> records.Cipher:
    if backend_id == 2:
        return FixedFernet(key, made(label, 16), TIME)
    return FixedAesGcm(key, made(label, 12))


def _encrypted(master: Any, nonce: bytes, plaintext: bytes, associated_data: bytes) -> bytes:
    cipher = FixedAesGcm(bytes(32), nonce)
    cipher._cipher = master
    return cipher.encrypt(plaintext, associated_data)


def _insert(table: str, row: tuple[object, ...]) -> str:
    values = (f"X'{v.hex()}'" if isinstance(v, bytes) else repr(v) for v in row)
    return f"INSERT INTO {table} VALUES ({', '.join(values)})"


# --- edits of plaintexts -------------------------------------------------------------------------
# The flags byte is included.


def _flags(value: int) -> Edit:
    return lambda plaintext: bytes([value]) + plaintext[1:]


def at(position: int, new: bytes) -> Edit:
    """Return the edit that replaces the bytes from *position* on, after the flags byte."""
    start = 1 + position
    return lambda plaintext: plaintext[:start] + new + plaintext[start + len(new) :]


def _whole(new: bytes) -> Edit:
    return lambda plaintext: records.NO_FLAGS + new


def _owner(**changes: object) -> Edit:
    """Return the edit of a user's or an app's fields; for a user, *user_id* is not changed."""

    def edit(plaintext: bytes) -> bytes:
        rest = plaintext[1:]
        user_id = changes.get("user_id")
        if user_id is not None:
            _, rest = records.split_id(rest)
        fields = zip(("link", "key_ids", "state"), records.split_owner(rest), strict=True)
        new = records.join_owner(*(changes.get(name, value) for name, value in fields))  # type: ignore[arg-type]
        if user_id is not None:
            new = records.join_id(str(user_id), new)
        return records.NO_FLAGS + new

    return edit


def with_fields(of: Session, **changes: bytes) -> Edit:
    def edit(plaintext: bytes) -> bytes:
        _, rest = records.split_id(plaintext[1:])
        names = ("head", "snapshot_link", "overlay")
        fields = zip(names, records.split_session(rest), strict=True)
        new = records.join_session(*(changes.get(name, value) for name, value in fields))
        return records.NO_FLAGS + records.join_id(of[2], new)

    return edit


# --- cases ---------------------------------------------------------------------------------------


def _case(
    name: str, note: str, when: str, of: Session | None, sql: str | list[str], expect: str,
    **more: object,
) -> Json:  # fmt: skip
    statements = [sql] if isinstance(sql, str) else sql
    case = {"name": name, "note": note, "sql": statements, "when": when}
    return case | ({"of": list(of)} if of else {}) | {"expect": expect} | more


def _links(forger: Forger) -> Iterator[Json]:
    note = "an authentic row of another copy of the database"
    own, previous = at(0, OTHER_LINK), at(LINK_LENGTH, OTHER_LINK)
    for name, seq, edit in (
        ("first event with another link", 0, own),
        ("first event with a previous one", 0, previous),
        ("event with another link", 1, own),
        ("event with another previous link", 1, previous),
        ("event with another link and another previous link", 1, at(0, OTHER_LINK * 2)),
        ("last event with another link", 3, own),
        ("last event with another previous link", 3, previous),
    ):
        statement = forger.event(_VISIT, seq, edit)
        yield _case(name, note, "get", _VISIT, statement, _TAMPERED)
    statement = forger.event(_VISIT, 3, own)
    for when in ("last", "append"):
        yield _case(f"{when}: last event with another link", note, when, _VISIT, statement,
                    _TAMPERED)  # fmt: skip
    statement = forger.session(_VISIT, with_fields(_VISIT, head=OTHER_LINK))
    for when in ("get", "last", "append"):
        yield _case(f"{when}: session with another head", note, when, _VISIT, statement,
                    _TAMPERED)  # fmt: skip
    yield _case("list: session with another head", "a listing reads no events, so it cannot know",
                "list", _VISIT, statement, "ok")  # fmt: skip
    statement = forger.session(_VISIT, with_fields(_VISIT, head=NO_LINK))
    yield _case("session with events and no head", note, "get", _VISIT, statement, _TAMPERED)
    statement = forger.session(_EMPTY, with_fields(_EMPTY, head=OTHER_LINK))
    for when in ("get", "append"):
        yield _case(f"{when}: session with a head and no events", note, when, _EMPTY, statement,
                    _TAMPERED)  # fmt: skip
    for when in ("get", "list"):
        statement = forger.snapshot(_ARCHIVE, own)
        yield _case(f"{when}: snapshot with another link", note, when, _ARCHIVE, statement,
                    _TAMPERED)  # fmt: skip
        statement = forger.session(_ARCHIVE, with_fields(_ARCHIVE, snapshot_link=OTHER_LINK))
        yield _case(f"{when}: session with another snapshot link", note, when, _ARCHIVE, statement,
                    _TAMPERED)  # fmt: skip


def _witnesses(forger: Forger) -> Iterator[Json]:
    note = "an authentic row of another copy of the database"
    master = forger.keyring.index_master
    app, user = master.tag_of(CLINIC), master.tag_of(CLINIC, ADA)
    link, of_user = _owner(link=OTHER_LINK), _owner(user_id=ADA, link=OTHER_LINK)
    statements = {
        "app with another link": forger.app(link),
        "user with another link": forger.user(of_user),
        "version witness of an app with another link": forger.witness(app, _whole(OTHER_LINK)),
        "version witness of a user with another link": forger.witness(user, _whole(OTHER_LINK)),
        "version witness of a user without a link": forger.witness(user, _whole(b"")),
        "version witness of a user with two links": forger.witness(user, _whole(OTHER_LINK * 2)),
        "version witness of a session with a link":
            forger.witness(master.tag_of(*_VISIT), _whole(OTHER_LINK)),
    }  # fmt: skip
    for name, statement in statements.items():
        yield _case(name, note, "get", _VISIT, statement, _TAMPERED)
        yield _case(f"list: {name}", note, "list", _VISIT, statement, _TAMPERED)


def _packed(forger: Forger) -> Iterator[Json]:
    """Yield records that are compressed or padded, and some that must not be."""

    def zlib(plaintext: bytes) -> bytes:
        return b"\x01" + zlib_stream(plaintext[1:])

    def padme(plaintext: bytes) -> bytes:
        return b"\x04" + padded(plaintext[1:], 9)

    def both(plaintext: bytes) -> bytes:
        return b"\x05" + padded(zlib_stream(plaintext[1:]), 9)

    master = forger.keyring.index_master
    edits = {"compressed": zlib, "padded": padme, "compressed and padded": both}
    for name, edit in edits.items():
        rows = {
            "app": (forger.app(edit), _VISIT),
            "user": (forger.user(edit), _VISIT),
            "session": (forger.session(_VISIT, edit), _VISIT),
            "snapshot": (forger.snapshot(_ARCHIVE, edit), _ARCHIVE),
            "event": (forger.event(_VISIT, 1, edit), _VISIT),
        }
        for row, (statement, of) in rows.items():
            note = "a reader accepts it, whatever its own configuration is"
            yield _case(f"{row} that is {name}", note, "get", of, statement, "ok")
        key = forger.data_keys[_key_of(forger, _VISIT)]
        wrapped = forger.data_key(key, edit).hex()
        without = {
            "version witness of a user": forger.witness(master.tag_of(CLINIC, ADA), edit),
            "version witness of a session": forger.witness(master.tag_of(*_VISIT), edit),
            "data key": f"UPDATE secure_data_keys SET wrapped = X'{wrapped}' WHERE id = {key.id}",
        }
        for row, statement in without.items():
            yield _case(f"{row} that is {name}", "its flags can only be 00", "get", _VISIT,
                        statement, "DecryptionError", reason="unknown flags")  # fmt: skip


def _plaintexts(forger: Forger) -> Iterator[Json]:
    """Yield flags of later releases, and layouts that only a faulty writer stores."""
    master = forger.keyring.index_master
    later = "a record of a later release"
    app, user = master.tag_of(CLINIC), master.tag_of(CLINIC, ADA)
    flagged = {
        "app": (forger.app(_flags(8)), _VISIT),
        "user": (forger.user(_flags(8)), _VISIT),
        "session": (forger.session(_VISIT, _flags(8)), _VISIT),
        "snapshot": (forger.snapshot(_ARCHIVE, _flags(0x80)), _ARCHIVE),
        "event": (forger.event(_VISIT, 1, _flags(8)), _VISIT),
        "version witness of an app": (forger.witness(app, _flags(1)), _VISIT),
        "version witness of a user": (forger.witness(user, _flags(1)), _VISIT),
        "version witness of a session":
            (forger.witness(master.tag_of(*_VISIT), _flags(2)), _VISIT),
    }  # fmt: skip
    for name, (statement, of) in flagged.items():
        yield _case(f"{name} with unknown flags", later, "get", of, statement, "DecryptionError",
                    reason="unknown flags")  # fmt: skip
    name = "data key with unknown flags"
    key = forger.data_keys[_key_of(forger, _VISIT)]
    wrapped = forger.data_key(key, _flags(1))
    statement = f"UPDATE secure_data_keys SET wrapped = X'{wrapped.hex()}' WHERE id = {key.id}"
    yield _case(name, later, "get", _VISIT, statement, "DecryptionError", reason="unknown flags")
    yield from _packed(forger)
    faulty = "authentic: only a faulty writer stores it"
    malformed = {
        "app that ends inside its link": (forger.app(_whole(bytes(15))), _VISIT),
        "app without a count of key ids": (forger.app(_whole(bytes(16))), _VISIT),
        "app with fewer key ids than it says": (forger.app(at(16, b"\xff")), _VISIT),
        "user whose id is longer than the rest": (forger.user(at(0, b"\xff" * 4)), _VISIT),
        "user with another id":
            (forger.user(_whole(records.join_id(BOB, records.join_owner(
                OTHER_LINK, (), b"{}")))), _VISIT),
        "session that ends inside its head":
            (forger.session(_VISIT, _whole(records.join_id(VISIT, bytes(31)))), _VISIT),
        "session with another id":
            (forger.session(_VISIT, _whole(records.join_id(ARCHIVE, records.join_session(
                NO_LINK, NO_LINK, b"{}")))), _VISIT),
        "snapshot that ends inside its link": (forger.snapshot(_ARCHIVE, _whole(b"{}")), _ARCHIVE),
    }  # fmt: skip
    for name, (statement, of) in malformed.items():
        yield _case(name, faulty, "get", of, statement, _TAMPERED)
    statement = forger.session(_VISIT, with_fields(_VISIT, snapshot_link=OTHER_LINK))
    for when in ("get", "list", "append"):
        yield _case(f"{when}: session without a snapshot that has a snapshot link", faulty, when,
                    _VISIT, statement, _TAMPERED)  # fmt: skip
    yield from _json(forger)
    for name, feature in (
        ("copy that is being separated", "separating"),
        ("database whose keys are being moved", "moving"),
    ):
        statement = f"UPDATE secure_meta SET value = '{feature} {_mac(forger, feature)}'"
        yield _case(name, "services wait until the command has ended", "open", None,
                    f"{statement} WHERE name = 'features'", "ConfigurationError")  # fmt: skip


def _event(version: bytes, value: str) -> Edit:
    """Return the edit of an event's version of google-adk and its JSON, which holds *value*."""
    data = b'{"author":"user","id":"e","timestamp":1.5,"custom_metadata":{"k":%s}}' % value.encode()
    return lambda plaintext: (
        plaintext[: 1 + 2 * LINK_LENGTH] + bytes([len(version)]) + version + data
    )


def _json(forger: Forger) -> Iterator[Json]:
    """Yield versions of google-adk, and JSON at the limits and beyond."""
    for version in ("", "1", "v1.2.3", "not a version\n", "9" * 255):
        statement = forger.event(_VISIT, 1, _event(version.encode(), "1"))
        yield _case(f"version of google-adk: {version[:20]!r}", "any ASCII text is accepted", "get",
                    _VISIT, statement, "ok")  # fmt: skip
    refused, faulty = "DecryptionError", "authentic: only a faulty writer stores it"
    statement = forger.event(_VISIT, 1, _event("1.28.0é".encode(), "1"))
    yield _case("version of google-adk that is not ASCII", faulty, "get", _VISIT, statement,
                refused)  # fmt: skip
    for name, levels, in_event in (("event", 200, True), ("state", 191, False)):
        inner = levels - (2 if in_event else 1)
        values = {
            f"{levels} levels": (_nested(inner, "1"), "ok"),
            f"{levels} levels, the last one empty": (_nested(inner - 1, "[]"), "ok"),
            f"{levels + 1} levels": (_nested(inner + 1, "1"), refused),
            f"{levels + 1} levels, the last one an empty list": (_nested(inner, "[]"), refused),
            f"{levels + 1} levels, the last one an empty object": (_nested(inner, "{ }"), refused),
            "an integer of 4,300 digits": ("-" + "7" * 4300, "ok"),
            "20,000 bytes, most of them white space": (" " * 20_000 + "1", "ok"),
            "an integer of 4,301 digits": ("7" * 4301, refused),
        }
        for what, (value, expect) in values.items():
            state = b'{"k":%s}' % value.encode()
            rows = {
                "user": (forger.user(_owner(user_id=ADA, state=state)), _VISIT),
                "session": (forger.session(_VISIT, with_fields(_VISIT, overlay=state)), _VISIT),
                "snapshot": (forger.snapshot(_ARCHIVE, _snapshot(state)), _ARCHIVE),
            }  # fmt: skip
            if in_event:
                rows = {"event": (forger.event(_VISIT, 1, _event(b"1.28.0", value)), _VISIT)}
            for row, (statement, of) in rows.items():
                yield _case(f"{row} with {what}", f"the limit of an {name}" if in_event else
                            "the limit of a state", "get", of, statement, expect)  # fmt: skip


def _snapshot(state: bytes) -> Edit:
    return lambda plaintext: plaintext[: 1 + LINK_LENGTH] + state


def _nested(levels: int, bottom: str) -> str:
    return "[" * levels + bottom + "]" * levels


def _columns(forger: Forger) -> Iterator[Json]:
    row_id = forger.session_row(_VISIT)["id"]
    yield _case("session with another expires_at", "expires_at is bound like the other columns",
                "get", _VISIT,
                f"UPDATE secure_sessions SET expires_at = 1800000000000000 WHERE id = {row_id}",
                _TAMPERED)  # fmt: skip
    for version in ("01", "03"):
        yield _case(f"event of record version {version}", "its version byte was changed", "get",
                    _VISIT, f"UPDATE secure_events SET event = CAST(X'414B53{version}' || "
                    f"substr(event, 5) AS BLOB) WHERE session_row = {row_id} AND seq = 1",
                    _TAMPERED)  # fmt: skip
    for table, when in (
        ("sessions", "list"), ("sessions", "get"), ("sessions", "append"), ("users", "get"),
        ("users", "list"), ("apps", "get"), ("apps", "list"),
    ):  # fmt: skip
        rebuilt = [
            f"CREATE TABLE copied AS SELECT * FROM secure_{table}",
            f"INSERT INTO copied SELECT * FROM secure_{table}",
            f"DROP TABLE secure_{table}",
            f"ALTER TABLE copied RENAME TO secure_{table}",
        ]
        yield _case(f"{when}: {table[:-1]} stored twice", "the table was rebuilt without its keys",
                    when, _VISIT, rebuilt, _TAMPERED)  # fmt: skip
    tag = forger.keyring.index_master.tag_of(*_VISIT).hex()
    yield _case("deleted session", "its rows were inserted again, but not its version witness",
                "list", _VISIT, f"DELETE FROM secure_witnesses WHERE tag = X'{tag}'",
                _TAMPERED)  # fmt: skip


def _key_of(forger: Forger, of: Session) -> int:
    return records.parse_header(forger.session_row(of)["state"])[1]


def _keys(forger: Forger) -> Iterator[Json]:
    """Yield data keys that are authentic and must not encrypt, and data keys that are not."""
    tag = forger.keyring.index_master.tag_of(CLINIC, ADA)
    keys = [row for row in forger.data_keys.values() if row.owner == tag]
    (aes,) = (row for row in keys if row.backend_id == 1)
    again = forger.inserted_again(aes)
    yield _case("data key that the user's row does not name",
                "an authentic key of a higher generation, as if an erased one was inserted again",
                "append", _VISIT, again, "ok", not_with=aes.id + 1)  # fmt: skip
    key_ids = tuple(row.id for row in keys if row.id != aes.id)
    statement = forger.user(_owner(user_id=ADA, key_ids=key_ids))
    yield _case("user whose row names no data key of the writing backend",
                "the writer creates a new data key", "append", _VISIT, statement, "ok",
                not_with=aes.id)  # fmt: skip
    yield _case("user whose row names no data key", "the stored data keys still decrypt", "get",
                _VISIT, forger.user(_owner(user_id=ADA, key_ids=())), "ok")  # fmt: skip
    statement = forger.user(_owner(user_id=ADA, key_ids=(*key_ids, aes.id, 17)))
    yield _case("user whose row names a data key that is not stored", "it was retired", "get",
                _VISIT, statement, "ok")  # fmt: skip
    junk = aes._replace(id=aes.id + 2, generation=7, wrapped=records.build_header(1, 1) + bytes(60))
    inserted = _insert("secure_data_keys", junk)
    yield _case("data key that does not unwrap", "no record names it", "append", _VISIT, inserted,
                "ok", not_with=junk.id)  # fmt: skip
    statement = forger.user(_owner(user_id=ADA, key_ids=(*key_ids, aes.id, junk.id)))
    yield _case("data key that does not unwrap, and that the user's row names",
                "it is not usable: the writer uses another key, or creates one", "append", _VISIT,
                [inserted, statement], "ok", not_with=junk.id)  # fmt: skip


def _mac(forger: Forger, names: str) -> str:
    return forger.keyring.index_master.mac("features", forger.database_id, names).hex()


def _meta(forger: Forger) -> Iterator[Json]:
    def features(value: str) -> str:
        return f"UPDATE secure_meta SET value = '{value}' WHERE name = 'features'"

    mac = partial(_mac, forger)
    refused, wrong = "ConfigurationError", "WrongKeyError"
    none = mac("-")
    for name, statement, expect in (
        ("features: row missing", "DELETE FROM secure_meta WHERE name = 'features'", refused),
        ("features: no MAC", features("-"), refused),
        ("features: empty", features(""), refused),
        ("features: MAC alone", features(none), refused),
        ("features: MAC in upper case", features(f"- {none.upper()}"), refused),
        ("features: MAC too short", features(f"- {none[:-2]}"), refused),
        ("features: a dash beside a name", features(f"-,wrapper {mac('-,wrapper')}"), refused),
        ("features: a dash twice", features(f"-,- {mac('-,-')}"), refused),
        ("features: no name between commas", features(f"a,,b {mac('a,,b')}"), refused),
        ("features: two spaces", features(f"-  {none}"), refused),
        ("features: line feed at the end", features(f"- {none}\n"), refused),
        ("features: MAC modified", features(f"- {none[:-1]}{int(none[-1], 16) ^ 1:x}"), wrong),
        ("features: MAC of other names", features(f"- {mac('future')}"), wrong),
        ("features: unknown feature, authentic", features(f"future {mac('future')}"), refused),
        ("features: unknown features", features(f"a-b,c.d {mac('a-b,c.d')}"), refused),
        ("features: unknown feature, not authentic", features(f"future {none}"), refused),
    ):
        yield _case(name, "features say what a reader must know", "open", None, statement, expect)
    for name, row in (("text", "('later', 'value')"), ("binary", "('later', X'00FF')")):
        yield _case(f"{name} value of an unknown name of secure_meta", "a reader ignores it", "get",
                    _VISIT, f"INSERT INTO secure_meta VALUES {row}", "ok")  # fmt: skip
    for name in ("format", "database_id", "features"):
        statement = f"UPDATE secure_meta SET value = CAST(value AS BLOB) WHERE name = '{name}'"
        yield _case(f"{name} that is binary", "a column of text", "open", None, statement,
                    refused)  # fmt: skip
    for value in ("1", "3", "02", " 2", "2 ", ""):
        statement = f"UPDATE secure_meta SET value = '{value}' WHERE name = 'format'"
        yield _case(f"format {value!r}", "another format, or another spelling", "open", None,
                    statement, refused)  # fmt: skip
    text = forger.database_id.hex()
    spaced = " ".join(text[n : n + 2] for n in range(0, 32, 2))
    for name, value in {
        "in upper case": text.upper(), "too short": text[:-2], "too long": text + "00",
        "with spaces": spaced, "with a line feed": text + "\n", "not hexadecimal": "g" + text[1:],
    }.items():  # fmt: skip
        statement = f"UPDATE secure_meta SET value = '{value}' WHERE name = 'database_id'"
        yield _case(f"database_id {name}", "32 lower-case hex digits", "open", None, statement,
                    refused)  # fmt: skip


def _keyring() -> Iterator[Json]:
    wrong = "WrongKeyError"
    copy = "INSERT INTO secure_keyring SELECT {id}, {purpose}, root_key_id, created_at, wrapped "
    copy += "FROM secure_keyring WHERE purpose = 'index'"
    many = (
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 62) "
        "INSERT INTO secure_keyring SELECT i, 'data', 'none', i, X'00' FROM n"
    )
    for name, statement in {
        "second index master": copy.format(id=17, purpose="'index'"),
        "master key of an unknown purpose": copy.format(id=17, purpose="'other'"),
        "master key with a negative id": copy.format(id=-17, purpose="'data'"),
        "master key with a purpose that is binary": copy.format(id=17, purpose="X'64617461'"),
        "junk row": "INSERT INTO secure_keyring VALUES (17, 'data', 'key:00000000', 1, X'')",
        "65 rows": many,
        "other created_at": "UPDATE secure_keyring SET created_at = created_at + 1",
        "no index master": "DELETE FROM secure_keyring WHERE purpose = 'index'",
        "no data master": "DELETE FROM secure_keyring WHERE purpose = 'data'",
    }.items():
        yield _case(f"keyring: {name}", "the keyring is checked as a whole", "open", None,
                    statement, wrong)  # fmt: skip


def rejection_vectors(sql: str) -> Json:
    """Return the content of rejections.json for the database that *sql* creates."""
    with closing(Forger(sql)) as forger:
        cases = [
            *_links(forger),
            *_witnesses(forger),
            *_plaintexts(forger),
            *_columns(forger),
            *_keys(forger),
            *_meta(forger),
            *_keyring(),
        ]
    return {"about": ABOUT, "cases": cases}
