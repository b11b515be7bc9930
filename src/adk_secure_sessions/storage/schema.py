"""The tables and their row ids (see docs/format.md).  Times are microseconds since 1970, UTC.

Other rows confirm each row, so the service detects that one of them was replayed or removed: the
revision of a session must equal the number of its events; the version of an app or a user must
equal that of its version witness; and the version witness of a session contains the id of the
session's row, and so proves that the row exists.
"""

import secrets
import time

from sqlalchemy import (
    DDL,
    VARBINARY,
    BigInteger,
    Column,
    Connection,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    UniqueConstraint,
    event,
)

from adk_secure_sessions.db.dialects import dialect_of
from adk_secure_sessions.keys.blind_index import TAG_LENGTH

FORMAT_VERSION = 2
NEVER = 2**63 - 1  # the `expires_at` of a session that does not expire
# Values of `base_revision` in rows of `secure_sessions` that have no row in `secure_bases`.
NO_SNAPSHOT = -1  # the session's row contains the whole state
COLLECTION = -2  # the row is not a session but a collection, which has no state
# The `row_id` in rows of `secure_state_index` that say which keys are indexed.
INDEX_MARK = 2**63 - 1
# The `row_id` in rows of `secure_migrated` that forbid an import.
TOMBSTONE = 0

metadata: MetaData = MetaData()


class _LongBlob(LargeBinary):
    """The type LONGBLOB of MySQL; importing SQLAlchemy's own would import all its dialects of
    MySQL, which takes 40 ms.
    """

    __visit_name__ = "LONGBLOB"


# MySQL cannot index a BLOB column without a length, and a BLOB of MySQL holds at most 64 KiB.
_TAG = LargeBinary().with_variant(VARBINARY(TAG_LENGTH), "mysql", "mariadb")
_RECORD = LargeBinary().with_variant(_LongBlob(), "mysql", "mariadb")
# On SQLite, a primary key of type INTEGER is the rowid, by which SQLite stores the row, so it needs
# no index.  A primary key of type BIGINT would need an index.
_KEY = BigInteger().with_variant(Integer(), "sqlite")


def _key_column(name: str) -> Column[int]:
    return Column(name, _KEY, primary_key=True, autoincrement=False)


meta: Table = Table(
    "secure_meta",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("value", String(255), nullable=False),
)

keyring: Table = Table(
    "secure_keyring",
    metadata,
    _key_column("id"),
    Column("purpose", String(16), nullable=False),
    Column("root_key_id", String(255), nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("wrapped", _RECORD, nullable=False),
)

data_keys: Table = Table(
    "secure_data_keys",
    metadata,
    _key_column("id"),
    Column("owner", _TAG, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("backend_id", BigInteger, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("wrapped", _RECORD, nullable=False),
    UniqueConstraint("owner", "generation", name="secure_data_keys_owner"),
)

apps: Table = Table(
    "secure_apps",
    metadata,
    _key_column("id"),
    Column("tag", _TAG, nullable=False, unique=True),
    Column("app_name", LargeBinary, nullable=False),  # as UTF-8: any text, without collation
    Column("version", BigInteger, nullable=False),
    Column("state", _RECORD, nullable=False),
)

users: Table = Table(
    "secure_users",
    metadata,
    _key_column("id"),
    Column("app_row", BigInteger, nullable=False),
    Column("tag", _TAG, nullable=False, unique=True),
    Column("version", BigInteger, nullable=False),
    Column("state", _RECORD, nullable=False),
    # `id` is the second column so that a page of a listing reads only the rows of the page.
    Index("ix_secure_users_app_row", "app_row", "id"),
)

witnesses: Table = Table(
    "secure_witnesses",
    metadata,
    Column("tag", _TAG, primary_key=True),
    Column("number", BigInteger, nullable=False),
    Column("seal", _RECORD, nullable=False),
    sqlite_with_rowid=False,
)

sessions: Table = Table(
    "secure_sessions",
    metadata,
    _key_column("id"),
    Column("user_row", BigInteger, nullable=False),
    Column("tag", _TAG, nullable=False, unique=True),
    Column("revision", BigInteger, nullable=False),
    Column("base_revision", BigInteger, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    Column("state", _RECORD, nullable=False),
    Index("ix_secure_sessions_user_row", "user_row", "id"),
)

bases: Table = Table(
    "secure_bases",
    metadata,
    _key_column("session_row"),
    Column("revision", BigInteger, nullable=False),
    Column("state", _RECORD, nullable=False),
)

events: Table = Table(
    "secure_events",
    metadata,
    _key_column("session_row"),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("time", BigInteger, nullable=False),
    Column("event", _RECORD, nullable=False),
    # Store rows in the order of the key, so that the events of a session are on the same pages:
    # read from disk, 1000 events of one of 60 sessions take 13 ms instead of 67.  With rowids, an
    # append would take 8% less time (24% with 5 KB), and events of 3 to 5 KB half the space.
    sqlite_with_rowid=False,
)

# The tables of features (see `feature_list`).  They are created when the feature is added, so a
# database without the feature need not have them.
feature_metadata: MetaData = MetaData()

migrated: Table = Table(
    "secure_migrated",
    feature_metadata,
    Column("tag", _TAG, primary_key=True),
    Column("row_id", BigInteger, nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("source", _TAG, nullable=False),
    Column("seal", _TAG, nullable=False),
    sqlite_with_rowid=False,
)

audit_records: Table = Table(
    "secure_audit",
    feature_metadata,
    Column("chain", _TAG, primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("time", BigInteger, nullable=False),
    Column("record", _RECORD, nullable=False),
    sqlite_with_rowid=False,
)

# The values of `row_id` are the ids of sessions; -1 - id for the id of a user, so that a user and a
# session never have the same value; and INDEX_MARK.
indexed: Table = Table(
    "secure_state_index",
    feature_metadata,
    Column("row_id", BigInteger, primary_key=True, autoincrement=False),
    Column("key_tag", _TAG, primary_key=True),
    Column("value_tag", _TAG, nullable=False),
    Index("ix_secure_state_index_value_tag", "value_tag"),
    sqlite_with_rowid=False,
)


def _store_external(table: Table) -> None:
    """Tell PostgreSQL not to compress records, since ciphertext does not become smaller."""
    changes = ", ".join(
        f"ALTER COLUMN {column.name} SET STORAGE EXTERNAL"
        for column in table.columns
        if column.type is _RECORD
    )
    if changes:
        statement = DDL(f"ALTER TABLE {table.name} {changes}")  # type: ignore[no-untyped-call]
        event.listen(table, "after_create", statement.execute_if(dialect="postgresql"))


def _use_transactions(table: Table, connection: Connection, **_: object) -> None:
    dialect_of(connection).use_transactions(table)


# `secure_meta` is in both KEY_TABLES and DATA_TABLES: each database has its own.
TABLES = tuple(metadata.tables.values())
KEY_TABLES = (meta, keyring, data_keys)
DATA_TABLES = tuple(table for table in TABLES if table not in (keyring, data_keys))

FEATURE_TABLES = tuple(feature_metadata.tables.values())  # in the data database

for _table in (*metadata.sorted_tables, *FEATURE_TABLES):
    _store_external(_table)
    event.listen(_table, "before_create", _use_transactions)

_RANDOM_BITS = 21
_last_row_key = 0


def new_row_key() -> int:
    """Return a row id for a new row: the row's records are bound to it before the row is inserted.

    An id has 63 bits: 42 bits of milliseconds since 1970, so that rows are in order of creation,
    and 21 random bits.  Each id is greater than the previous id of this thread.  If two processes
    choose the same id, the database rejects the second row, and the transaction is repeated with a
    new id.
    """
    global _last_row_key
    fresh = (time.time_ns() // 1_000_000) << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
    # No lock, which a forked process could inherit locked: two threads may choose the same id, too.
    _last_row_key = chosen = max(fresh, _last_row_key + 1)
    return chosen
