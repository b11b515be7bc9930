"""The tables (see docs/format.md), and their rows: as they are stored, what their records are bound
to, and decrypted.  Times are microseconds since 1970, UTC.

A *tag* is a blind index: the keyed hash of an app name, user id or session id.  Other rows confirm
each row, so the service detects that one of them was replayed or removed: the revision of a session
must equal the number of its events; the version of an app or a user must equal that of its version
witness; and the version witness of a session contains the id of the session's row, and so proves
that the row exists.

SQLite stores any type in any column.  So until a row is authenticated, a value that somebody
modified may have another type than its column.
"""

import functools
import secrets
import time
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Generic, NamedTuple, TypeVar

import sqlalchemy as sa

from adk_secure_sessions.db.dialects import dialect_of
from adk_secure_sessions.errors import DecryptionError
from adk_secure_sessions.formats import records
from adk_secure_sessions.formats.records import NO_LINK, encode_part
from adk_secure_sessions.formats.times import time_now
from adk_secure_sessions.keys.blind_index import TAG_LENGTH, IndexMaster
from adk_secure_sessions.keys.data_keys import DataKeyRow
from adk_secure_sessions.keys.keyring import MasterKeyRow

R = TypeVar("R", bound=tuple[Any, ...])

FORMAT_VERSION = 2
NEVER = 2**63 - 1  # the `expires_at` of a session that does not expire
# Values of `base_revision` in rows of `secure_sessions` that have no row in `secure_bases`.
NO_SNAPSHOT = -1  # the session's row contains the whole state
COLLECTION = -2  # the row is not a session but a collection, which has no state
# The `row_id` in rows of `secure_state_index` that say which keys are indexed.
INDEX_MARK = 2**63 - 1
# The `row_id` in rows of `secure_migrated` that forbid an import.
TOMBSTONE = 0


# --- stored rows ----------------------------------------------------------------------------------
# The fields are all columns of the table, in its order: first the primary key, last the record,
# whose column may have another name: see `column_names`.


class AppRow(NamedTuple):
    """A row of `secure_apps`; *app_name* is UTF-8."""

    id: int
    tag: bytes
    app_name: bytes
    version: int
    record: bytes


class UserRow(NamedTuple):
    """A row of `secure_users`."""

    id: int
    app_row: int
    tag: bytes
    version: int
    record: bytes


class WitnessRow(NamedTuple):
    """A row of `secure_witnesses`; *number* is an owner's version or a session's row id."""

    tag: bytes
    number: int
    record: bytes


class SessionRow(NamedTuple):
    """A row of `secure_sessions`, which may be a collection."""

    id: int
    user_row: int
    tag: bytes
    revision: int
    base_revision: int
    created_at: int
    updated_at: int
    expires_at: int
    record: bytes

    @property
    def is_collection(self) -> bool:
        return self.base_revision == COLLECTION

    @property
    def last_seq(self) -> int | None:
        """The `seq` of the last event or item; None if there is none."""
        return self.revision - 1 if self.revision else None

    @property
    def has_snapshot(self) -> bool:
        return self.base_revision not in (NO_SNAPSHOT, COLLECTION)


class SnapshotRow(NamedTuple):
    """A row of `secure_bases`."""

    session_row: int
    revision: int
    record: bytes


class EventRow(NamedTuple):
    """A row of `secure_events`."""

    session_row: int
    seq: int
    time: int
    record: bytes


class MigratedRow(NamedTuple):
    """A row of `secure_migrated`, which says what was imported; `imports` describes the columns."""

    tag: bytes
    row_id: int
    number: int
    source: bytes
    mac: bytes

    @property
    def is_tombstone(self) -> bool:
        """Whether the session or the user must not be imported."""
        return self.row_id == TOMBSTONE


class StateIndexRow(NamedTuple):
    """A row of `secure_state_index`; nothing in it is authenticated, except in a mark."""

    row_id: int
    key_tag: bytes
    value_tag: bytes


class AuditRow(NamedTuple):
    """A row of `secure_audit`."""

    chain: bytes
    number: int
    time: int
    record: bytes


# The names of the last columns that differ from those of the fields.
_LAST_COLUMNS = {EventRow: "event", WitnessRow: "seal", MigratedRow: "seal"} | dict.fromkeys(
    (AppRow, UserRow, SessionRow, SnapshotRow), "state"
)


def column_names(row_type: Any) -> list[str]:
    """Return the names of the columns of *row_type*, a type of stored rows."""
    *names, last = row_type._fields
    return [*names, _LAST_COLUMNS.get(row_type, last)]


# --- tables ---------------------------------------------------------------------------------------

metadata: sa.MetaData = sa.MetaData()


class _LongBlob(sa.LargeBinary):
    """The type LONGBLOB of MySQL; importing SQLAlchemy's own would import all its dialects of
    MySQL, which takes 40 ms.
    """

    __visit_name__ = "LONGBLOB"


# MySQL cannot index a BLOB column without a length, and a BLOB of MySQL holds at most 64 KiB.
_TAG = sa.LargeBinary().with_variant(sa.VARBINARY(TAG_LENGTH), "mysql", "mariadb")
_RECORD = sa.LargeBinary().with_variant(_LongBlob(), "mysql", "mariadb")
# On SQLite, a primary key of type INTEGER is the rowid, by which SQLite stores the row, so it needs
# no index.  A primary key of type BIGINT would need an index.
_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
# The types of columns by those of fields.
_TYPES: dict[object, sa.types.TypeEngine[Any]] = {int: sa.BigInteger(), bytes: _RECORD}


def _define_table(
    name: str,
    row_type: Any,
    *items: sa.Constraint | sa.Index,
    key_columns: int = 1,
    of: sa.MetaData = metadata,
    **types: sa.types.TypeEngine[Any],
) -> sa.Table:
    """Return the table whose columns are the fields of *row_type*; the first are the primary key.

    An integer is a BIGINT, and bytes are a record, unless *types* has another type for the column.
    """
    columns = [
        sa.Column(
            name,
            types.get(name) or _TYPES[kind],
            primary_key=number < key_columns,
            autoincrement=False,
            nullable=False,
        )
        for number, (name, kind) in enumerate(
            zip(column_names(row_type), row_type.__annotations__.values(), strict=True)
        )
    ]
    has_rowid = key_columns == 1 and columns[0].type is _ID
    return sa.Table(name, of, *columns, *items, info={"has_rowid": has_rowid})


meta_table: sa.Table = sa.Table(
    "secure_meta",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("value", sa.String(255), nullable=False),
)
keyring: sa.Table = _define_table(
    "secure_keyring", MasterKeyRow, id=_ID, purpose=sa.String(16), root_key_id=sa.String(255)
)
data_keys: sa.Table = _define_table(
    "secure_data_keys",
    DataKeyRow,
    sa.UniqueConstraint("owner", "generation", name="secure_data_keys_owner"),
    id=_ID,
    owner=_TAG,
)
apps: sa.Table = _define_table(
    "secure_apps",
    AppRow,
    sa.UniqueConstraint("tag"),
    id=_ID,
    tag=_TAG,
    app_name=sa.LargeBinary(),  # as UTF-8: any text, without collation
)
users: sa.Table = _define_table(
    "secure_users",
    UserRow,
    sa.UniqueConstraint("tag"),
    # `id` is the second column so that a page of a listing reads only the rows of the page.
    sa.Index("ix_secure_users_app_row", "app_row", "id"),
    id=_ID,
    tag=_TAG,
)
witnesses: sa.Table = _define_table("secure_witnesses", WitnessRow, tag=_TAG)
sessions: sa.Table = _define_table(
    "secure_sessions",
    SessionRow,
    sa.UniqueConstraint("tag"),
    sa.Index("ix_secure_sessions_user_row", "user_row", "id"),
    id=_ID,
    tag=_TAG,
)
IS_COLLECTION: sa.ColumnElement[bool] = sessions.c.base_revision == sa.literal_column(
    str(COLLECTION)
)
snapshots: sa.Table = _define_table("secure_bases", SnapshotRow, session_row=_ID)
# SQLite stores the rows in the order of the key, so that the events of a session are on the same
# pages: read from disk, 1000 events of one of 60 sessions take 13 ms instead of 67.  With rowids,
# an append would take 8% less time (24% with 5 KB), and events of 3 to 5 KB half the space.
events: sa.Table = _define_table("secure_events", EventRow, key_columns=2, session_row=_ID)

# The tables of features (see `feature_list`).  They are created when the feature is added, so a
# database without the feature need not have them.
feature_metadata: sa.MetaData = sa.MetaData()

migrated: sa.Table = _define_table(
    "secure_migrated", MigratedRow, of=feature_metadata, tag=_TAG, source=_TAG, seal=_TAG
)
audit_records: sa.Table = _define_table(
    "secure_audit", AuditRow, of=feature_metadata, key_columns=2, chain=_TAG
)
# The values of `row_id` are the ids of sessions; -1 - id for the id of a user, so that a user and a
# session never have the same value; and INDEX_MARK.
state_index: sa.Table = _define_table(
    "secure_state_index",
    StateIndexRow,
    sa.Index("ix_secure_state_index_value_tag", "value_tag"),
    of=feature_metadata,
    key_columns=2,
    key_tag=_TAG,
    value_tag=_TAG,
)


def _set_options(
    _: sa.MetaData, connection: sa.Connection, tables: Sequence[sa.Table], **__: object
) -> None:
    for table in tables:
        dialect_of(connection).set_table_options(table)


def _store_external(table: sa.Table, connection: sa.Connection, **_: object) -> None:
    """Tell PostgreSQL not to compress records, since ciphertext does not become smaller."""
    columns = [column.name for column in table.columns if column.type is _RECORD]
    if columns and connection.dialect.name == "postgresql":
        changes = ", ".join(f"ALTER COLUMN {name} SET STORAGE EXTERNAL" for name in columns)
        connection.execute(sa.DDL(f"ALTER TABLE {table.name} {changes}"))  # type: ignore[no-untyped-call]


# `secure_meta` is in both KEY_TABLES and DATA_TABLES: each database has its own.
TABLES = tuple(metadata.tables.values())
KEY_TABLES = (meta_table, keyring, data_keys)
DATA_TABLES = tuple(table for table in TABLES if table not in (keyring, data_keys))

FEATURE_TABLES = tuple(feature_metadata.tables.values())  # in the data database

for _metadata in (metadata, feature_metadata):
    sa.event.listen(_metadata, "before_create", _set_options)
for _table in (*TABLES, *FEATURE_TABLES):
    sa.event.listen(_table, "after_create", _store_external)

_RANDOM_BITS = 21
_last_row_id = 0


def new_row_id() -> int:
    """Return a row id for a new row: the row's records are bound to it before the row is inserted.

    An id has 42 bits of milliseconds since 1970, so that rows are in order of creation, and 21
    random bits.  If two processes choose the same id, the database rejects the second row, and the
    transaction is repeated with a new id.
    """
    global _last_row_id
    fresh = (time.time_ns() // 1_000_000) << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
    # No lock, which a forked process could inherit locked: two threads may choose the same id, too.
    _last_row_id = chosen = max(fresh, _last_row_id + 1)
    return chosen


def as_parameters(row: tuple[Any, ...], prefix: str = "") -> dict[str, object]:
    """Return a stored *row* as statement parameters: *prefix* and the names of its columns."""
    names = _parameter_names(type(row), prefix)
    return dict(zip(names, row))  # noqa: B905 - `strict` takes a quarter of the time


@functools.cache
def _parameter_names(row: Any, prefix: str) -> list[str]:
    return [prefix + name for name in column_names(row)]


# --- sealed tables --------------------------------------------------------------------------------


class SealedTable(Generic[R]):
    """A table whose last column contains records.

    A record is bound to its context (docs/format.md, "Contexts"): the kind of the record, ids, the
    tag if the table has this column, and all integers of the row.  `version_column` changes with
    every write of a row; it is None for events, which services never change, except for items of a
    collection.
    """

    def __init__(
        self, kind: str, row_type: type[R], table: sa.Table, version: str, ids: int
    ) -> None:
        columns = list(table.c)
        names = [column.name for column in columns]
        self.kind: str = kind
        self._kind_prefix = encode_part(kind)
        self.row_type: Callable[..., R] = row_type
        self.table: sa.Table = table
        self.name: str = table.name
        self.record_column: sa.Column[Any] = columns[-1]
        self.key_columns: tuple[sa.Column[Any], ...] = tuple(table.primary_key)
        self.version_column: sa.Column[Any] | None = table.c[version] if version else None
        self._id_count = ids
        self._tag_at = names.index("tag") if "tag" in names else None
        numbers = [at for at, one in enumerate(columns) if isinstance(one.type, sa.Integer)]
        # The integers of a row, which are the numbers in its context.  A list comprehension takes
        # 1.0 us for a session instead of 0.4.  For one index, `itemgetter` returns no tuple.
        self.integers_of: Callable[[tuple[Any, ...]], Sequence[int]] = (
            itemgetter(*numbers)
            if len(numbers) > 1
            else itemgetter(slice(numbers[0], numbers[0] + 1))
        )

    def primary_key_of(self, row: R) -> tuple[Any, ...]:
        return row[: len(self.key_columns)]

    def version_of(self, row: R) -> int:
        """Return the version of *row*; 0 for an event."""
        column = self.version_column
        return 0 if column is None else getattr(row, column.name)

    def context(self, ids: Sequence[str], row: R) -> bytes:
        """Return the context of *row*; *ids* are the app name, the user id and the session id, or
        as many of them as the record is bound to.
        """
        return self.context_of_ids(records.context_prefix(tuple(ids[: self._id_count])), row)

    def context_of_ids(self, encoded_ids: bytes, row: tuple[Any, ...]) -> bytes:
        """Do the same as `context`, for the `context_prefix` of the ids; *row* needs no record."""
        prefix = self._kind_prefix + encoded_ids
        if self._tag_at is not None:
            prefix += encode_part(row[self._tag_at])
        return records.context_with_prefix(prefix, *self.integers_of(row))


APPS = SealedTable("app", AppRow, apps, "version", ids=1)
USERS = SealedTable("user", UserRow, users, "version", ids=1)
WITNESSES = SealedTable("witness", WitnessRow, witnesses, "number", ids=1)
SESSIONS = SealedTable("session", SessionRow, sessions, "revision", ids=2)
SNAPSHOTS = SealedTable("base", SnapshotRow, snapshots, "revision", ids=3)
EVENTS = SealedTable("event", EventRow, events, "", ids=3)
SEALED_TABLES: tuple[SealedTable[Any], ...] = (APPS, USERS, SESSIONS, SNAPSHOTS, EVENTS, WITNESSES)


class locating_errors:  # noqa: N801 - used like a function: `with locating_errors(...)`
    """A context manager that adds the table and the row to a `DecryptionError` in its block."""

    __slots__ = ("_row", "_table")

    def __init__(self, table: str, row: object) -> None:
        self._table = table
        self._row = row

    def __enter__(self) -> None:
        pass

    def __exit__(self, _type: object, error: object, _traceback: object) -> None:
        if isinstance(error, DecryptionError):
            raise error.located(self._table, self._row) from None


# --- decrypted rows -------------------------------------------------------------------------------


class Identity(NamedTuple):
    """The ids that ADK uses for an app, user and session, and their tags (blind indexes).

    *session_id* may be the name of a collection.  *encoded_app* is the app name as a part of
    contexts, and the prefixes are the beginnings of those of the session's row and of its events.
    """

    app_name: str
    user_id: str
    session_id: str
    is_collection: bool
    app_tag: bytes
    user_tag: bytes
    session_tag: bytes
    encoded_app: bytes
    session_prefix: bytes
    event_prefix: bytes

    @property
    def ids(self) -> tuple[str, str, str]:
        return self[:3]

    def tag_parameters(self) -> dict[str, object]:
        """Return the tags as parameters of the statements in `queries`."""
        return {"app_tag": self.app_tag, "user_tag": self.user_tag, "session_tag": self.session_tag}


_KIND = {one: encode_part(one) for one in ("app", "user", "session", "collection", "event")}
_NO_NUMBERS = records.build_context(())


def identify(
    master: IndexMaster,
    app_name: str,
    user_id: str = "",
    session_id: str = "",
    is_collection: bool = False,
    known: Identity | None = None,
) -> Identity:
    """Return the ids and their tags; *known* is another identity of this app, if possible of this
    user, made with the same *master*.
    """
    # Each id is a part of several contexts, and is encoded once.
    app = encode_part(app_name)
    user = app + encode_part(user_id)
    session = user + encode_part(session_id)
    kind = "collection" if is_collection else "session"
    session_tag = master.mac_of_context(_KIND[kind] + session + _NO_NUMBERS)
    return Identity(
        app_name,
        user_id,
        session_id,
        is_collection,
        known.app_tag if known else master.mac_of_context(_KIND["app"] + app + _NO_NUMBERS),
        known.user_tag
        if known and known.user_id == user_id
        else master.mac_of_context(_KIND["user"] + user + _NO_NUMBERS),
        session_tag,
        app,
        _KIND[SESSIONS.kind] + user + encode_part(session_tag),
        _KIND[EVENTS.kind] + session,
    )


class Owner(NamedTuple):
    """An owner of data keys: a decrypted row of `secure_apps` or `secure_users`.

    The row shares the random value *link* with its version witness; each version has a new one.
    *key_ids* are the ids of the data keys that may encrypt new records of this owner: one for each
    backend that writes.  An app has the user id "".
    """

    row: AppRow | UserRow
    user_id: str
    state: bytes
    link: bytes = NO_LINK
    key_ids: tuple[int, ...] = ()

    @property
    def is_user(self) -> bool:
        return isinstance(self.row, UserRow)

    @property
    def app_row_id(self) -> int:
        """The row id of a user's app; 0 for an app."""
        return self.row.app_row if isinstance(self.row, UserRow) else 0

    @property
    def version(self) -> int:
        return self.row.version


class SessionRevision(NamedTuple):
    """The row id and the revision of a session or a collection."""

    session_row_id: int
    revision: int


class StoredSession(NamedTuple):
    """A session, or a collection, as it is stored: a decrypted row of `secure_sessions`.  The
    application gets it as a `Session` of ADK.

    The session's state is *snapshot* updated with *overlay*.  Only a large state has a snapshot: a
    row of `secure_bases`, written at the revision `base_revision`.  *snapshot* is `{}` if there is
    none, and None if it was not read.  *last_link* is the link of the session's last event, `head`
    in docs/format.md; *snapshot_link* is that of the snapshot; both may be `NO_LINK`.
    """

    row: SessionRow
    session_id: str
    overlay: bytes
    snapshot: bytes | None = b"{}"
    last_link: bytes = NO_LINK
    snapshot_link: bytes = NO_LINK

    @property
    def version(self) -> int:
        return self.row.revision

    @property
    def id_and_revision(self) -> SessionRevision:
        return SessionRevision(self.row.id, self.row.revision)

    @property
    def has_expired(self) -> bool:
        """Whether the session must be treated like a deleted one, by the clock of this machine."""
        return self.row.expires_at != NEVER and self.row.expires_at <= time_now()

    def next_expiry(self, updated_at: int) -> int:
        """Return `expires_at` after an update at *updated_at*; the lifetime stays the same."""
        if self.row.expires_at == NEVER:
            return NEVER
        return min(updated_at + self.row.expires_at - self.row.updated_at, NEVER - 1)


class SessionWithStates(NamedTuple):
    """A session, and the states of its app and user as JSON."""

    session: StoredSession
    user_id: str
    app_state: bytes
    user_state: bytes
