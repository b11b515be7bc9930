"""The SQL statements, in SQLAlchemy Core, and the rows that they return.

Each read is one statement, so that its rows are consistent with each other at every isolation
level: a UNION ALL of SELECTs with the same columns, of which the first is the kind of the row.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import Any, Literal, TypeVar

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles

from adk_secure_sessions.db.protocol import Row
from adk_secure_sessions.keys.data_keys import MAX_DATA_KEYS, DataKeyRow
from adk_secure_sessions.keys.keyring import MAX_MASTERS, MAX_WRAPPED, MasterFingerprint
from adk_secure_sessions.storage.clusters import (
    CLAIM_DATA_KEY,
    CLAIM_SESSION,
    CLAIM_USER,
    claim_keyring,
)
from adk_secure_sessions.storage.schema import (
    INDEX_MARK,
    IS_COLLECTION,
    AppRow,
    EventRow,
    MigratedRow,
    SessionRow,
    SnapshotRow,
    StateIndexRow,
    UserRow,
    WitnessRow,
    apps,
    data_keys,
    events,
    keyring,
    migrated,
    sessions,
    snapshots,
    state_index,
    users,
    witnesses,
)

T = TypeVar("T")

# How many integers and how many binary values the rows of a read have.
_INTEGERS, _BLOBS = 8, 3
# The positions of an event's values in its row.  Event rows are used as the driver returns them.  A
# history may have thousands of events, and converting each row to a named tuple would take as long
# as finding the cipher that decrypts it.
EVENT_SEQ, EVENT_TIME, EVENT_RECORD = 1, 2, 1 + _INTEGERS
# The same of a session, for listings: most rows are compared with those of the last listing.
SESSION_ID, SESSION_USER, SESSION_TAG = 1, 2, 1 + _INTEGERS
# The `seq` of the session's last event, or NULL; in a listing, the record of its version witness.
SESSION_LAST_SEQ, _SESSION_WITNESS = _INTEGERS, _INTEGERS + _BLOBS
_ZERO: sa.ColumnElement[int] = sa.literal_column("0")
_MARK: sa.ColumnElement[int] = sa.literal_column(str(INDEX_MARK))


_app_tag = sa.bindparam("app_tag", type_=sa.LargeBinary)
_user_tag = sa.bindparam("user_tag", type_=sa.LargeBinary)
_session_tag = sa.bindparam("session_tag", type_=sa.LargeBinary)
_key_tag = sa.bindparam("key_tag", type_=sa.LargeBinary)
_value_tag = sa.bindparam("value_tag", type_=sa.LargeBinary)
_limit = sa.bindparam("limit", type_=sa.BigInteger)
_first = sa.bindparam("first", type_=sa.BigInteger)
_now = sa.bindparam("now", type_=sa.BigInteger)
# The condition that a session, and no collection, has expired at the time `now`.
HAS_EXPIRED: sa.ColumnElement[bool] = sa.and_(sessions.c.expires_at <= _now, ~IS_COLLECTION)
_updated_from = sa.bindparam("updated_from", type_=sa.BigInteger)
_updated_until = sa.bindparam("updated_until", type_=sa.BigInteger)
_after_user = sa.bindparam("after_user", type_=sa.BigInteger)
_after_row = sa.bindparam("after_row", type_=sa.BigInteger)


class _NullIfInvalid(sa.sql.functions.FunctionElement[Any]):
    """A column of a table of keys, with NULL instead of a value that no service stores.

    An attacker may have stored values of any size and, on SQLite, of any type.  Without this
    function, every start and every read of keys would load these values.
    """

    name = "null_if_invalid"
    inherit_cache = True

    def __init__(self, column: sa.ColumnElement[Any]) -> None:
        super().__init__(column)
        self.type = column.type


@compiles(_NullIfInvalid)
def _null_if_invalid(element: Any, compiler: Any, **options: Any) -> str:
    [column] = element.clauses
    name = compiler.process(column, **options)
    # SQLite compares any text or blob as greater than any number, so BETWEEN excludes both.
    is_valid = f"{name} BETWEEN 0 AND {2**63 - 1}"
    if not isinstance(column.type, sa.BigInteger):
        # SQLite would count the characters of a text up to its first NUL.
        value = f"CAST({name} AS BLOB)" if compiler.dialect.name == "sqlite" else name
        is_valid = f"length({value}) <= {MAX_WRAPPED}"
    return f"CASE WHEN ({is_valid}) THEN {name} END"


def _valid_rows(table: sa.Table) -> sa.Select[Any]:
    """Return the query for *table*, with NULL instead of a value that no service stores."""
    id_column, *others = table.c
    return sa.select(id_column, *(_NullIfInvalid(column).label(column.key) for column in others))


# Query for all rows of `secure_keyring`; its columns are the fields of MasterKeyRow.
MASTER_KEYS = _valid_rows(keyring)
# Query for data keys only; its columns are the fields of DataKeyRow.
DATA_KEYS = _valid_rows(data_keys)


_LABELS = ("kind", *"abcdefghijk")
_NULL = sa.cast(sa.null(), sa.LargeBinary)
# The type of the rows of each kind, and the function that selects their values.
_ROW_LAYOUTS: list[tuple[Any, Callable[[Row], Any]]] = []


class RowKind:
    """A kind of rows in a UNION ALL; *number* is its position in `_ROW_LAYOUTS`.

    All SELECTs of a UNION ALL have the same columns: the number of the kind, 8 integers (padded
    with zeros) and 3 binary values (padded with NULL).
    """

    def __init__(self, row_type: type, columns: Iterable[sa.ColumnElement[Any]]) -> None:
        integers: list[Any] = []
        blobs: list[Any] = []
        positions = []
        for column in columns:
            is_integer = isinstance(column.type, sa.Integer)
            values, offset = (integers, 0) if is_integer else (blobs, _INTEGERS)
            values.append(column)
            positions.append(offset + len(values))
        self.number: int = len(_ROW_LAYOUTS)
        _ROW_LAYOUTS.append((row_type, itemgetter(*positions)))
        integers += [_ZERO] * (_INTEGERS - len(integers))
        blobs += [_NULL] * (_BLOBS - len(blobs))
        values = [sa.literal_column(str(self.number)), *integers, *blobs]
        self._columns = [value.label(name) for value, name in zip(values, _LABELS, strict=True)]

    def select(
        self, *conditions: sa.ColumnElement[bool], extra_integer: Any = None, extra_blob: Any = None
    ) -> sa.Select[Any]:
        """Return a SELECT of the rows for which *conditions* hold; *extra_integer* and *extra_blob*
        are the SQL expressions of the last integer and the last binary value.
        """
        columns = self._columns.copy()
        if extra_integer is not None:
            columns[_INTEGERS] = extra_integer.label(_LABELS[_INTEGERS])
        if extra_blob is not None:
            columns[-1] = extra_blob.label(_LABELS[-1])
        return sa.select(*columns).where(*conditions)


_APP_KIND = RowKind(AppRow, apps.c)
_USER_KIND = RowKind(UserRow, users.c)
_WITNESS_KIND = RowKind(WitnessRow, witnesses.c)
_SESSION_KIND = RowKind(SessionRow, sessions.c)
_SNAPSHOT_KIND = RowKind(SnapshotRow, snapshots.c)
_EVENT_KIND = RowKind(EventRow, (events.c.seq, events.c.time, events.c.event))
_KEY_KIND = RowKind(DataKeyRow, DATA_KEYS.selected_columns)
_MASTER_KIND = RowKind(
    MasterFingerprint, (MASTER_KEYS.selected_columns[name] for name in MasterFingerprint._fields)
)
_MIGRATED_KIND = RowKind(MigratedRow, migrated.c)
_INDEX_ROW_KIND = RowKind(StateIndexRow, state_index.c)
# The rows and the row ids of the app, the user and the session that a read is about.
_THE_APP = _APP_KIND.select(apps.c.tag == _app_tag)
_THE_USER = _USER_KIND.select(users.c.tag == _user_tag)
_APP_ID: Any = sa.select(apps.c.id).where(apps.c.tag == _app_tag).scalar_subquery()
_USER_ID: Any = sa.select(users.c.id).where(users.c.tag == _user_tag).scalar_subquery()
_SESSION_ID: Any = sa.select(sessions.c.id).where(sessions.c.tag == _session_tag).scalar_subquery()


# With IN, SQLite puts the tags into a table of its own, a seventh of the time of a short read.
_WITNESS_OF_APP, _WITNESS_OF_USER, _WITNESS_OF_SESSION = (
    _WITNESS_KIND.select(witnesses.c.tag == tag) for tag in (_app_tag, _user_tag, _session_tag)
)


def _keys_of(tag: sa.BindParameter[bytes], *conditions: sa.ColumnElement[bool]) -> sa.Select[Any]:
    c = data_keys.c
    keys = _KEY_KIND.select(c.owner == tag, *conditions).order_by(c.generation)
    return _first_subquery(keys, MAX_DATA_KEYS, f"keys_of_{tag.key}")


def first_rows(query: sa.Select[Any], limit: int | sa.ColumnElement[int]) -> sa.Select[Any]:
    """Restrict *query* to its first *limit* rows."""
    if isinstance(limit, int):
        limit = sa.literal_column(str(limit), sa.Integer)
    # Without an offset, SQLAlchemy adds a parameter for the offset on SQLite.  No caller has a
    # value for this parameter.
    return query.limit(limit).offset(_ZERO)


def _first_subquery(query: sa.Select[Any], limit: int, name: str) -> sa.Select[Any]:
    """Return a SELECT of the first *limit* rows of *query*, for use in a UNION ALL."""
    return sa.select(first_rows(query, limit).subquery(name))


# To detect a keyring with too many rows, read one row more than a keyring may have.
_MASTER_ROWS = _first_subquery(_MASTER_KIND.select(), MAX_MASTERS + 1, "masters")
_KEYS = (_keys_of(_app_tag), _keys_of(_user_tag), _MASTER_ROWS)
_APP_AND_USER = (_THE_APP, _THE_USER, _WITNESS_OF_APP, _WITNESS_OF_USER)


def _select_sessions(
    *conditions: sa.ColumnElement[bool], source: sa.FromClause = sessions, witness: Any = None
) -> sa.Select[Any]:
    last_seq = sa.select(sa.func.max(events.c.seq)).where(events.c.session_row == sessions.c.id)
    query = _SESSION_KIND.select(*conditions, extra_integer=last_seq, extra_blob=witness)
    return query.select_from(source)


def _select_listed(
    *conditions: sa.ColumnElement[bool], source: sa.FromClause = sessions
) -> sa.Select[Any]:
    """Return a SELECT of sessions with the records of their version witnesses.

    With the witnesses in rows of their own, a listing of 100 sessions takes 10% more time.
    """
    c = witnesses.c
    same_session = sa.and_(c.tag == sessions.c.tag, c.number == sessions.c.id)
    return _select_sessions(
        *conditions, source=source.outerjoin(witnesses, same_session), witness=c.seal
    )


def index_row_id_sql(user_row: Any) -> sa.ColumnElement[int]:
    """Return the SQL expression for `row_id` in the rows of `secure_state_index` of a user."""
    minus_one: sa.ColumnElement[int] = sa.literal_column("-1", sa.BigInteger)
    row_id: sa.ColumnElement[int] = minus_one - user_row
    return row_id


_SESSION_AND_OWNERS = (
    *_APP_AND_USER,
    _WITNESS_OF_SESSION,
    _select_sessions(sessions.c.tag == _session_tag),
)


class QueryVariants:
    """Two variants of one query, the UNION ALL of *members*.  One also reads data keys, by default
    those of one app and one user, and the `MasterFingerprint` of each row of the keyring.  The
    fingerprints tell whether the keyring has changed: a data key that is wrapped with a retired
    data master must be rejected.  *reads_snapshots* is whether the query reads the snapshots of the
    sessions that it reads, also if it reads none.
    """

    def __init__(
        self,
        *members: sa.Select[Any],
        keys: Iterable[sa.Select[Any]] = _KEYS,
        reads_snapshots: bool = True,
    ) -> None:
        self.without_keys: sa.CompoundSelect[Any] = sa.union_all(*members)
        self.with_keys: sa.CompoundSelect[Any] = sa.union_all(*members, *keys)
        self.reads_snapshots: bool = reads_snapshots


def _session_variants(*history: sa.Select[Any]) -> QueryVariants:
    state = _SNAPSHOT_KIND.select(snapshots.c.session_row == _SESSION_ID)
    return QueryVariants(*_SESSION_AND_OWNERS, state, *history)


@functools.cache
def sessions_of_user(*, only_collections: bool = False) -> QueryVariants:
    """Return the variants of the query for a user's sessions and collections, or for the latter.

    A listing of sessions reads the collections, too: otherwise, an attacker could hide a session by
    marking its row as a collection.
    """
    conditions = [IS_COLLECTION] if only_collections else []
    of_user = sa.and_(sessions.c.user_row == _USER_ID, *conditions)
    return QueryVariants(
        *_APP_AND_USER,
        _select_listed(of_user),
        _SNAPSHOT_KIND.select(snapshots.c.session_row == sessions.c.id, of_user),
    )


def _user_variants(
    condition: sa.ColumnElement[bool], *members: sa.Select[Any], reads_snapshots: bool = True
) -> QueryVariants:
    """Return the variants of the query for *members*, their app, and its users with *condition*."""
    tags = sa.select(users.c.tag).where(condition)
    owners = (
        _THE_APP,
        _USER_KIND.select(condition),
        _WITNESS_OF_APP,
        _WITNESS_KIND.select(witnesses.c.tag.in_(tags)),
    )
    their_keys = _KEY_KIND.select(data_keys.c.owner.in_(tags))
    keys = (_KEYS[0], their_keys, _MASTER_ROWS)
    return QueryVariants(*owners, *members, keys=keys, reads_snapshots=reads_snapshots)


@functools.cache
def sessions_of_app() -> QueryVariants:
    """Return the variants of the query for the sessions of all users of an app.

    Without the users that have no sessions, an attacker could hide the sessions of a user by
    changing the id of the user's row.
    """
    of_app = users.c.app_row == _APP_ID
    sessions_and_users = sessions.join(users, users.c.id == sessions.c.user_row)
    listed = _select_listed(of_app, source=sessions_and_users)
    states = _SNAPSHOT_KIND.select(snapshots.c.session_row == sessions.c.id, of_app)
    return _user_variants(of_app, listed, states.select_from(sessions_and_users))


FoundBy = Literal["session", "user", "expiry"]  # see `session_page`


@functools.cache
def session_page(
    *,
    of_app: bool,
    newest: bool,
    with_snapshots: bool,
    by_time: bool = False,
    found_by: FoundBy | None = None,
) -> QueryVariants:
    """Return the variants of the query for a page: at most `limit` rows of a listing.

    The rows are those of one user or, with *of_app*, of all users of the app, by their users' row
    ids and then their own row ids, which is the order of creation; with *newest*, in reverse.  The
    parameters `after_user` and `after_row` are the position.  With *by_time*, the last update of
    the sessions is at `updated_from` or later, and before `updated_until`.

    *found_by* requires *of_app*.  With `session` or `user`, the page contains only sessions, or
    sessions of users, that `secure_state_index` lists with `value_tag`, and the mark of `key_tag`.
    With `expiry`, it contains those that have expired at the time `now`, the earliest first.
    """
    user, session = (users.c.id if of_app else sessions.c.user_row), sessions.c.id
    rows = sa.select(session, sessions.c.user_row)
    if newest:
        rows = rows.where(user <= _after_user, sa.or_(user < _after_user, session < _after_row))
        rows = rows.order_by(user.desc(), session.desc())
    else:
        rows = rows.where(user >= _after_user, sa.or_(user > _after_user, session > _after_row))
        rows = rows.order_by(user, session)
    if by_time:
        updated = sessions.c.updated_at
        rows = rows.where(updated >= _updated_from, updated < _updated_until)
    if of_app:
        app_row: sa.ColumnElement[int] = users.c.app_row
        source: sa.FromClause = sessions.join(users, users.c.id == sessions.c.user_row)
        if found_by:
            has_value = state_index.c.value_tag == _value_tag
            if found_by == "expiry":
                rows = rows.where(HAS_EXPIRED).order_by(None).order_by(sessions.c.expires_at)
            elif found_by == "session":
                rows = rows.where(session.in_(sa.select(state_index.c.row_id).where(has_value)))
            else:
                row = index_row_id_sql(state_index.c.row_id)  # its own inverse
                rows = rows.where(user.in_(sa.select(row).where(has_value)))
            # The addition prevents the database from using the index of `app_row`.  It would read
            # all users of the app, because it cannot know how few sessions have this value.
            app_row = app_row + _ZERO
        rows = rows.select_from(source).where(app_row == _APP_ID)
    else:
        rows = rows.where(sessions.c.user_row == _USER_ID)
    page = first_rows(rows, _limit).cte("page")
    members = [_select_listed(source=page.join(sessions, sessions.c.id == page.c.id))]
    if found_by in ("session", "user"):
        members.append(
            _INDEX_ROW_KIND.select(state_index.c.row_id == _MARK, state_index.c.key_tag == _key_tag)
        )
    if with_snapshots:
        members.append(_SNAPSHOT_KIND.select(snapshots.c.session_row.in_(sa.select(page.c.id))))
    if of_app:
        of_page = users.c.id.in_(sa.select(page.c.user_row))
        return _user_variants(of_page, *members, reads_snapshots=with_snapshots)
    return QueryVariants(*_APP_AND_USER, *members, reads_snapshots=with_snapshots)


def _last_events() -> sa.Select[Any]:
    c = sessions.c
    # A server would raise an error for the difference of the smallest number and the limit.
    revision = sa.select(c.revision).where(c.tag == _session_tag, c.revision >= _ZERO)
    first = revision.scalar_subquery() - _limit
    return _EVENT_KIND.select(events.c.session_row == _SESSION_ID, events.c.seq >= first)


SESSION_WITH_ALL_EVENTS = _session_variants(_EVENT_KIND.select(events.c.session_row == _SESSION_ID))
SESSION_WITH_LAST_EVENTS = _session_variants(_last_events())
# The parameter `first` is the `seq` of the first event to read.
SESSION_WITH_EVENTS_FROM = _session_variants(
    _EVENT_KIND.select(events.c.session_row == _SESSION_ID, events.c.seq >= _first)
)
SESSION_WITHOUT_EVENTS = _session_variants()
# The parameters `first` and `last` are the `seq` of the first and the last event.
SESSION_WITH_EVENTS_BETWEEN = QueryVariants(
    *_SESSION_AND_OWNERS,
    _EVENT_KIND.select(
        events.c.session_row == _SESSION_ID,
        events.c.seq.between(_first, sa.bindparam("last")),
    ),
    reads_snapshots=False,
)
OWNERS = QueryVariants(*_APP_AND_USER)


# Queries that few processes use are built when they are first used.


@functools.cache
def imported(*, session: bool) -> QueryVariants:
    """Return the variants of the query for a session, or only its owners, that also reads their
    rows of `secure_migrated`, which say whether a session or a state was imported before.
    """
    tags = [_user_tag, _session_tag] if session else [_app_tag, _user_tag]
    rows = _MIGRATED_KIND.select(migrated.c.tag.in_(tags))
    return _session_variants(rows) if session else QueryVariants(*_APP_AND_USER, rows)


@functools.cache
def with_index_rows(*, of_user: bool) -> QueryVariants:
    """Return the variants of the query for a session, or with *of_user* only its owners, that also
    reads the rows of `secure_state_index` of the session or the user.
    """
    row_id = index_row_id_sql(_USER_ID) if of_user else _SESSION_ID
    rows = _INDEX_ROW_KIND.select(state_index.c.row_id == row_id)
    return QueryVariants(*_APP_AND_USER, rows) if of_user else _session_variants(rows)


@functools.cache
def events_at(count: int) -> sa.Select[Any]:
    """Return the query for *count* events of `session_row`, by their `seq` (`list_parameters`)."""
    return _EVENT_KIND.select(
        events.c.session_row == sa.bindparam("session_row"), is_one_of(events.c.seq, count)
    )


def _parameters(table: sa.Table) -> list[sa.BindParameter[Any]]:
    return [sa.bindparam(column.name, type_=column.type) for column in table.c]


def _insert(table: sa.Table, row: sa.Select[Any]) -> sa.Insert:
    # Without OR FAIL, SQLite would copy each page that it changes, in case another *row* fails.
    insert = sa.insert(table).prefix_with("OR FAIL", dialect="sqlite")
    return insert.from_select([column.name for column in table.c], row)


# Inserts a data key only if the stored keyring still has the master key that wraps the data key,
# and has the number of rows that this process has read.  Otherwise, another process has changed
# the keyring.
INSERT_KEY = _insert(
    data_keys,
    sa.select(*_parameters(data_keys))
    .select_from(keyring)
    .where(
        keyring.c.id == sa.bindparam("master_id"),
        sa.select(sa.func.count()).select_from(keyring.alias()).scalar_subquery()
        == sa.bindparam("master_count", type_=sa.BigInteger),
    ),
).execution_options(claim=claim_keyring)
# Locks the row of a data key by setting the generation to its present value.  A concurrent `retire`
# waits for the lock.  If `retire` has already deleted the key, this statement matches no row, which
# is a conflict.
TOUCH_DATA_KEY = (
    sa.update(data_keys)
    .where(data_keys.c.id == sa.bindparam("at_id"))
    .values(generation=sa.bindparam("generation"))
    .execution_options(claim=CLAIM_DATA_KEY)
)
INSERT_APP = sa.insert(apps)
INSERT_USER = sa.insert(users)
INSERT_WITNESS = sa.insert(witnesses)
INSERT_SESSION = sa.insert(sessions)
INSERT_SNAPSHOT = sa.insert(snapshots)


def _equal(table: sa.FromClause, prefix: str, *names: str) -> list[sa.ColumnElement[bool]]:
    """Return the conditions that the columns *names*, or all, equal the parameters *prefix*_…."""
    columns = [table.c[name] for name in names] if names else table.c
    return [
        column == sa.bindparam(f"{prefix}_{column.name}", type_=column.type) for column in columns
    ]


def _update(table: sa.Table, at: Iterable[sa.ColumnElement[bool]], *names: str) -> sa.Update:
    return sa.update(table).where(*at).values({name: sa.bindparam(name) for name in names})


_new_session = sa.select(*_parameters(sessions))
_session_of_unchanged_user = (
    _new_session.select_from(users)
    .where(*_equal(users, "user"))
    .with_for_update(read=True, key_share=True, of=users)
)


def _session_of_user(*conditions: sa.ColumnElement[bool]) -> sa.Insert:
    """Return an INSERT that stores a session only if the user's row is as this process read it.

    It locks the user's row, so a concurrent `erase_user` waits until the new session is visible,
    and also erases it.  On a cluster, where the lock works on one node only, it claims the row.
    """
    row = _session_of_unchanged_user.where(*conditions)
    return _insert(sessions, row).execution_options(claim=CLAIM_USER)


_CACHED_ROW_TABLES: dict[str, sa.FromClause] = {
    "app": apps,
    "user": users,
    "app_witness": witnesses.alias("app_witnesses"),
    "user_witness": witnesses.alias("user_witnesses"),
}
# The parameters that are the cached rows of an app and its user, and the two version witnesses: see
# `CachedOwners.columns`.
CACHED_OWNER_PARAMETERS = [
    f"{name}_{one.name}" for name, table in _CACHED_ROW_TABLES.items() for one in table.c
]
# The conditions that the stored rows equal the cached ones; `_session_of_user` adds the user's.
_owners_as_cached = [
    sa.select(sa.literal_column("1")).where(*_equal(table, name)).exists()
    for name, table in _CACHED_ROW_TABLES.items()
    if table is not users
]
INSERT_SESSION_OF_USER = _session_of_user()
INSERT_SESSION_OF_CACHED = _session_of_user(*_owners_as_cached)


@functools.cache
def import_session(user: Literal["new", "read", "cached"]) -> sa.Insert:
    """Return an INSERT for a session of a *user* that the same transaction stores or has read, or
    that is cached.

    If a user was erased, `secure_migrated` may have a row of this user whose `row_id` is 0.  Then
    no session of the user may be imported.  With `cached`, `secure_migrated` must have no row of
    the user at all: the INSERT runs without a read, so the MAC of such a row was not checked.
    """
    rows: sa.Select[Any] = sa.select(sa.literal_column("1")).where(migrated.c.tag == _user_tag)
    if user == "cached":
        return _session_of_user(*_owners_as_cached, ~rows.exists())
    is_not_erased = ~rows.where(migrated.c.row_id == _ZERO).exists()
    if user == "read":
        return _session_of_user(is_not_erased)
    return _insert(sessions, _new_session.where(is_not_erased))


INSERT_MIGRATED = sa.insert(migrated)
DELETE_MIGRATED = sa.delete(migrated).where(migrated.c.tag == sa.bindparam("at_tag"))
UPDATE_MIGRATED = _update(migrated, _equal(migrated, "at"), "row_id", "number", "source", "seal")
INSERT_INDEX_ROW = sa.insert(state_index)
_is_indexed: sa.Select[Any] = sa.select(sa.literal_column("1")).where(
    state_index.c.row_id == sa.bindparam("row_id", type_=sa.BigInteger),
    state_index.c.key_tag == _key_tag,
)
# An INSERT that does nothing if the key of the session or user has a row already.
INSERT_MISSING_INDEX_ROW = _insert(
    state_index, sa.select(*_parameters(state_index)).where(~_is_indexed.exists())
)
_at_index_row = (
    state_index.c.row_id == sa.bindparam("at_id", type_=sa.BigInteger),
    state_index.c.key_tag == sa.bindparam("at_key", type_=sa.LargeBinary),
)
UPDATE_INDEX_ROW = _update(state_index, _at_index_row, "value_tag")
DELETE_INDEX_ROW = sa.delete(state_index).where(*_at_index_row)
DELETE_INDEX_ROWS = sa.delete(state_index).where(_at_index_row[0])
# The first `limit` marks of `secure_state_index`.
INDEX_MARKS = first_rows(
    sa.select(state_index.c.key_tag, state_index.c.value_tag)
    .where(state_index.c.row_id == _MARK)
    .order_by(state_index.c.key_tag),
    _limit,
)
INSERT_EVENT = sa.insert(events)
# Replaces the record of an event only if the stored record is as this process has read it.
UPDATE_EVENT = _update(events, _equal(events, "at", "session_row", "seq", "event"), "event")


def _lock(table: sa.FromClause, tag: sa.BindParameter[bytes]) -> sa.Select[Any]:
    """Return a query that locks the row of *table* with *tag* against changes by others.

    Others can still insert rows that refer to the locked row.  SQLite has no such locks and needs
    none: it runs one write at a time.
    """
    return sa.select(table.c.id).where(table.c.tag == tag).with_for_update(key_share=True)


LOCK_SESSION = _lock(sessions, _session_tag)
LOCK_APP = _lock(apps, _app_tag)
LOCK_USER = _lock(users, _user_tag)
# Long imports do not lock the app: they would wait for each other.
LOCKS_WITHOUT_APP: Sequence[sa.Executable] = (LOCK_SESSION, LOCK_USER)
# For transactions that do not change the row which they lock.
LOCK_AND_CLAIM_SESSION = LOCK_SESSION.execution_options(claim=CLAIM_SESSION)
LOCK_AND_CLAIM_USER = LOCK_USER.execution_options(claim=CLAIM_USER)

_AT_ID: sa.BindParameter[int] = sa.bindparam("at_id")


_OWNER_AT = ("id", "version", "state")
UPDATE_APP = _update(apps, _equal(apps, "at", *_OWNER_AT), "version", "state")
UPDATE_USER = _update(users, _equal(users, "at", *_OWNER_AT), "version", "state")
UPDATE_WITNESS = _update(witnesses, _equal(witnesses, "at", "tag", "number"), "number", "seal")
# These three match the stored row only if all its columns are as this process has read or written
# them.  Therefore, a row that was tampered with is not overwritten, and the next read rejects it.
# Without this condition, DELETE_EVENTS might not see an event that another process has appended:
# PostgreSQL runs both deletions in one statement.
_SESSION_AT = _equal(sessions, "at")
CHANGED_BY_APPEND = ("revision", "base_revision", "updated_at", "expires_at", "state")
values_after_append: Callable[[SessionRow], Any] = attrgetter(*CHANGED_BY_APPEND[:-1], "record")
UPDATE_SESSION = _update(sessions, _SESSION_AT, *CHANGED_BY_APPEND)
# Replaces a session by another session with the same id.  The row gets another row id, so the
# events of the old session belong to no row.
REPLACE_SESSION = _update(sessions, _SESSION_AT, "id", "created_at", *CHANGED_BY_APPEND)
DELETE_SESSION = sa.delete(sessions).where(*_SESSION_AT)
UPDATE_SNAPSHOT = _update(
    snapshots,
    [snapshots.c.session_row == _AT_ID, snapshots.c.revision == sa.bindparam("at_revision")],
    "revision",
    "state",
)
DELETE_SNAPSHOT = sa.delete(snapshots).where(snapshots.c.session_row == _AT_ID)
DELETE_EVENTS = sa.delete(events).where(events.c.session_row == _AT_ID)
DELETE_WITNESS = sa.delete(witnesses).where(witnesses.c.tag == sa.bindparam("at_tag"))


class QueryRows:
    """The rows of one read, by kind.  On SQLite, a modified value may have any type.

    *reads_snapshots* is whether the query reads the snapshots of sessions.
    """

    def __init__(self, rows: Iterable[Row], reads_snapshots: bool = True) -> None:
        self.reads_snapshots: bool = reads_snapshots
        kinds: list[list[Any]] = [[], [], [], [], [], [], [], [], [], []]
        make = tuple.__new__  # `_make` of a named tuple takes twice as long
        event, session = _EVENT_KIND.number, _SESSION_KIND.number
        event_rows, session_rows = kinds[event], kinds[session]
        for row in rows:
            number = row[0]
            if number == event:
                event_rows.append(row)
            elif number == session:
                session_rows.append(row)
            else:
                kind, values = _ROW_LAYOUTS[number]
                kinds[number].append(make(kind, values(row)))
        self.apps: list[AppRow]
        self.users: list[UserRow]
        self.sessions: list[Row]  # as the driver returns them: see SESSION_ID
        self.events: list[Row]  # as the driver returns them: see EVENT_SEQ
        self.data_keys: list[DataKeyRow]
        self.master_fingerprints: list[MasterFingerprint]
        self.index_rows: list[StateIndexRow]
        (
            self.apps, self.users, witness_rows, self.sessions, snapshots, self.events,
            self.data_keys, self.master_fingerprints, migrated_rows, self.index_rows,
        ) = kinds  # fmt: skip
        self.witnesses: dict[bytes, WitnessRow] = _by_key(witness_rows)
        self.snapshots: dict[int, SnapshotRow] = _by_key(snapshots)
        self.migrated: dict[bytes, MigratedRow] = _by_key(migrated_rows)


def _by_key(rows: list[Any]) -> dict[Any, Any]:
    """Return *rows* by their first value."""
    return {row[0]: row for row in rows} if rows else {}


def session_row(row: Row) -> SessionRow:
    """Return a row of `QueryRows.sessions` as a named tuple."""
    values = _ROW_LAYOUTS[_SESSION_KIND.number][1](row)
    return tuple.__new__(SessionRow, values)


def listed_witness(row: Row) -> WitnessRow | None:
    """Return the version witness in a row of `QueryRows.sessions`; None if it is in no listing."""
    record = row[_SESSION_WITNESS]
    return None if record is None else WitnessRow(row[SESSION_TAG], row[SESSION_ID], record)


# The lengths of value lists in statements; see `padded_chunks`.  Most lists have two values: the
# tags of an app and a user.
_FEW, _MANY = 2, 200


def padded_chunks(values: Iterable[Any]) -> Iterator[list[Any]]:
    """Split *values* into lists of 2 or 200, so that only two statements need to be compiled; the
    last list repeats its last value.
    """
    remaining = list(values)
    while remaining:
        size = _FEW if len(remaining) <= _FEW else _MANY
        part, remaining = remaining[:size], remaining[size:]
        yield part + part[-1:] * (size - len(part))


def grouped(
    items: Iterable[T], size_of: Callable[[T], int], count: int, size: int
) -> Iterator[list[T]]:
    """Yield groups of at most *count* items and *size* in all; a larger item is alone."""
    group: list[T] = []
    total = 0
    for item in items:
        own = size_of(item)
        if group and (len(group) == count or total + own > size):
            yield group
            group, total = [], 0
        group.append(item)
        total += own
    if group:
        yield group


def is_one_of(column: sa.ColumnElement[Any], count: int) -> sa.ColumnElement[bool]:
    """Return the condition that *column* equals one of *count* parameters, which `list_parameters`
    returns.
    """
    return column.in_([sa.bindparam(f"v{n}", type_=column.type) for n in range(count)])


def list_parameters(values: Sequence[object]) -> dict[str, object]:
    """Return *values* as the parameters `v0`, `v1` and so on of `is_one_of`."""
    return {f"v{n}": value for n, value in enumerate(values)}


@functools.cache
def keys_of_owners(count: int) -> sa.CompoundSelect[Any]:
    """Return the query for all data keys of *count* owners, by their tags (`list_parameters`), and
    the `MasterFingerprint` of each row of the keyring, for a key database and for commands.
    """
    if count > _FEW:
        return sa.union_all(_KEY_KIND.select(is_one_of(data_keys.c.owner, count)), _MASTER_ROWS)
    first, second = (sa.bindparam(f"v{n}", type_=sa.LargeBinary) for n in range(_FEW))
    return sa.union_all(_keys_of(first), _keys_of(second, second != first), _MASTER_ROWS)
