"""The SQL statements, in SQLAlchemy Core, and the rows that they return.

Each read is one statement, so that its rows are consistent with each other on every database and
at every isolation level.  The statement is a UNION ALL of SELECTs with the same columns.  The first
column is the kind of the row, such as an app or an event.  A *tag* is a blind index, as in
`bindings`.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    BindParameter,
    ColumnElement,
    CompoundSelect,
    FromClause,
    Insert,
    LargeBinary,
    Select,
    Table,
    and_,
    bindparam,
    case,
    cast,
    delete,
    func,
    insert,
    literal_column,
    null,
    or_,
    select,
    union_all,
    update,
)

from adk_secure_sessions.db.protocol import Row
from adk_secure_sessions.keys.data_keys import DataKeyRow
from adk_secure_sessions.keys.keyring import MAX_ROWS, MAX_WRAPPED, MasterKeyRow, MasterMark
from adk_secure_sessions.storage.schema import (
    COLLECTION,
    INDEX_MARK,
    apps,
    bases,
    data_keys,
    events,
    indexed,
    keyring,
    migrated,
    sessions,
    users,
    witnesses,
)

# The kinds of rows.
_APP, _USER, _WITNESS, _KEY, _MASTER, _SESSION, _SNAPSHOT, _EVENT = range(8)
# A row of `secure_migrated` has three binary columns, but a row of a read has only two.  Therefore
# a read returns two rows for it.
_MIGRATED, _MIGRATED_SEAL = 8, 9
_INDEXED = 10
_NUMBERS, _BLOBS = 8, 2
# The positions of an event's values in its row.  Event rows are used as the driver returns them.  A
# history may have thousands of events, and converting each row to a named tuple would take as long
# as finding the cipher that decrypts it.
EVENT_SEQ, EVENT_TIME, EVENT_RECORD = 1, 2, 1 + _NUMBERS
_ZERO: ColumnElement[int] = literal_column("0")
_MARK: ColumnElement[int] = literal_column(str(INDEX_MARK))
# The maximum number of data keys that a query reads for one owner.  A rotation adds one data key.
# An attacker may have inserted any number of data keys.
_MAX_KEYS = 1000

# Two forms of one query: `forms[True]` also reads data keys, and `forms[False]` does not.  The form
# with data keys also reads the `MasterMark` of each row of the keyring.  The marks tell whether the
# keyring has changed: a data key that is wrapped with a retired data master must be rejected.
QueryForms = Mapping[bool, CompoundSelect[Any]]

_app_tag = bindparam("app_tag", type_=LargeBinary)
_user_tag = bindparam("user_tag", type_=LargeBinary)
_session_tag = bindparam("session_tag", type_=LargeBinary)
_key_tag = bindparam("key_tag", type_=LargeBinary)
_value_tag = bindparam("value_tag", type_=LargeBinary)
_limit = bindparam("limit", type_=BigInteger)
_known = bindparam("known", type_=BigInteger)
_after_user = bindparam("after_user", type_=BigInteger)
_after_row = bindparam("after_row", type_=BigInteger)


def bounded(column: ColumnElement[Any]) -> ColumnElement[Any]:
    """Return *column* of a table of keys, with NULL instead of a value that no service stores.

    An attacker may have stored values of any size and, on SQLite, of any type.  Without this
    function, every start and every read of keys would load these values.
    """
    # SQLite compares any text or blob as greater than any number, so BETWEEN excludes both.
    if isinstance(column.type, BigInteger):
        is_valid: ColumnElement[bool] = column.between(_ZERO, literal_column(str(2**63 - 1)))
    else:
        is_valid = func.length(column) <= literal_column(str(MAX_WRAPPED))
    return case((is_valid, column)).label(column.key)


# Query for all rows of `secure_keyring`; its columns are the fields of MasterKeyRow.
MASTER_KEYS = select(keyring.c.id, *(bounded(keyring.c[name]) for name in MasterKeyRow._fields[1:]))


def _member(kind: int, numbers: list[Any], blobs: list[Any]) -> Select[Any]:
    """Return one SELECT of a UNION ALL.

    All these SELECTs have the same columns: `kind`, 8 numbers (padded with zeros) and 2 blobs
    (padded with NULL).
    """
    padded = numbers + [_ZERO] * (_NUMBERS - len(numbers))
    padded += blobs + [cast(null(), LargeBinary)] * (_BLOBS - len(blobs))
    names = list("abcdefghij")
    return select(
        literal_column(str(kind)).label("kind"),
        *(column.label(name) for column, name in zip(padded, names, strict=True)),
    )


def _app() -> Select[Any]:
    numbers: list[Any] = [apps.c.id, apps.c.version]
    return _member(_APP, numbers, [apps.c.app_name, apps.c.state]).where(apps.c.tag == _app_tag)


def _user() -> Select[Any]:
    numbers = [users.c.id, users.c.app_row, users.c.version]
    return _member(_USER, numbers, [users.c.tag, users.c.state])


def _witness() -> Select[Any]:
    return _member(_WITNESS, [witnesses.c.number], [witnesses.c.tag, witnesses.c.seal])


def _key() -> Select[Any]:
    c = data_keys.c
    numbers: list[Any] = [c.id, c.generation, c.backend_id, c.created_at]
    return _member(_KEY, numbers, [c.owner, bounded(c.wrapped)])


def _keys_of(owner: BindParameter[bytes], *conditions: ColumnElement[bool]) -> Select[Any]:
    """Return the SELECT of a UNION ALL for the data keys of one owner, at most `_MAX_KEYS`."""
    c = data_keys.c
    keys = _key().where(c.owner == owner, *conditions).order_by(c.generation)
    return _first(_MAX_KEYS, keys, f"keys_of_{owner.key}")


def _master() -> Select[Any]:
    c = keyring.c
    masters = _member(_MASTER, [c.id, bounded(c.created_at)], [bounded(c.wrapped)])
    # To detect a keyring with too many rows, read one row more than a keyring may have.
    return _first(MAX_ROWS + 1, masters, "masters")


def _first(number: int, rows: Select[Any], name: str) -> Select[Any]:
    """Return a SELECT of the first *number* rows of *rows*, for use in a UNION ALL."""
    # Without an offset, SQLAlchemy would add a parameter for the offset on SQLite.  No caller has a
    # value for this parameter.
    limited = rows.limit(literal_column(str(number))).offset(_ZERO)
    return select(limited.subquery(name))


def _session(source: FromClause = sessions) -> Select[Any]:
    c = sessions.c
    head = select(func.max(events.c.seq)).where(events.c.session_row == c.id).scalar_subquery()
    last_seq = func.coalesce(head, literal_column("-1"))
    numbers: list[Any] = [c.id, c.user_row, c.revision, c.base_revision, c.created_at, c.updated_at]
    numbers += [c.expires_at, last_seq]
    return _member(_SESSION, numbers, [c.tag, c.state]).select_from(source)


def _snapshot() -> Select[Any]:
    return _member(_SNAPSHOT, [bases.c.session_row, bases.c.revision], [bases.c.state])


def _event() -> Select[Any]:
    return _member(_EVENT, [events.c.seq, events.c.time], [events.c.event])


def _migrated(*tags: BindParameter[bytes]) -> list[Select[Any]]:
    c = migrated.c
    source = _member(_MIGRATED, [c.row_id, c.number], [c.tag, c.source])
    seal = _member(_MIGRATED_SEAL, [], [c.tag, c.seal])
    return [source.where(_among(c.tag, *tags)), seal.where(_among(c.tag, *tags))]


def _indexed(*conditions: ColumnElement[bool]) -> Select[Any]:
    c = indexed.c
    return _member(_INDEXED, [c.row_id], [c.key_tag, c.value_tag]).where(*conditions)


def index_row_of_user(user_row: Any) -> ColumnElement[int]:
    """Return the SQL expression for `row_id` in the rows of `secure_state_index` of a user."""
    minus_one: ColumnElement[int] = literal_column("-1", BigInteger)
    row_id: ColumnElement[int] = minus_one - user_row
    return row_id


def _app_id() -> Any:
    return select(apps.c.id).where(apps.c.tag == _app_tag).scalar_subquery()


def _user_id() -> Any:
    return select(users.c.id).where(users.c.tag == _user_tag).scalar_subquery()


def _session_id() -> Any:
    return select(sessions.c.id).where(sessions.c.tag == _session_tag).scalar_subquery()


def _among(column: ColumnElement[Any], *tags: Any) -> ColumnElement[bool]:
    return column.in_(tags)


def _members(keys: bool, *members: Select[Any]) -> CompoundSelect[Any]:
    """Return the UNION ALL of *members*.

    If *keys* is True, the query also reads the data keys of the app and the user, and the
    `MasterMark` of each row of the keyring.
    """
    wanted = [_keys_of(_app_tag), _keys_of(_user_tag), _master()]
    return union_all(*members, *(wanted if keys else []))


def _last_events() -> Select[Any]:
    revision = select(sessions.c.revision).where(sessions.c.tag == _session_tag).scalar_subquery()
    return _event().where(events.c.session_row == _session_id(), events.c.seq >= revision - _limit)


def _session_query(keys: bool, history: list[Select[Any]]) -> CompoundSelect[Any]:
    return _members(
        keys,
        _app(),
        _user().where(users.c.tag == _user_tag),
        _witness().where(_among(witnesses.c.tag, _app_tag, _user_tag, _session_tag)),
        _session().where(sessions.c.tag == _session_tag),
        _snapshot().where(bases.c.session_row == _session_id()),
        *history,
    )


def _owners_query(keys: bool, *more: Select[Any]) -> CompoundSelect[Any]:
    return _members(
        keys,
        _app(),
        _user().where(users.c.tag == _user_tag),
        _witness().where(_among(witnesses.c.tag, _app_tag, _user_tag)),
        *more,
    )


def _list_query(keys: bool, *, collections: bool = False) -> CompoundSelect[Any]:
    """Return the query for a user's sessions and collections, or for the collections only.

    A listing of sessions also reads the collections, to authenticate that they are collections.
    Otherwise, an attacker could hide a session by marking its row as a collection.

    If *keys* is True, the query also reads the data keys of the app and the user.
    """
    mine = sessions.c.user_row == _user_id()
    if collections:
        mark: ColumnElement[int] = literal_column(str(COLLECTION))
        mine = and_(mine, sessions.c.base_revision == mark)
    return _members(
        keys,
        _app(),
        _user().where(users.c.tag == _user_tag),
        _witness().where(_among(witnesses.c.tag, _app_tag, _user_tag)),
        _witness().where(sessions.c.tag == witnesses.c.tag, mine),
        _session().where(mine),
        _snapshot().where(bases.c.session_row == sessions.c.id, mine),
    )


def _list_all_query(keys: bool) -> CompoundSelect[Any]:
    """Return the query for the sessions of all users of an app.

    If *keys* is True, the query also reads the data keys of the app and of these users.
    """
    of_app = users.c.app_row == _app_id()
    theirs = sessions.join(users, users.c.id == sessions.c.user_row)
    wanted = [
        _key().where(data_keys.c.owner == _app_tag),
        _key().where(data_keys.c.owner == users.c.tag, of_app),
        _master(),
    ]
    return union_all(
        _app(),
        _user().where(of_app),
        _witness().where(witnesses.c.tag == _app_tag),
        _witness().where(users.c.tag == witnesses.c.tag, of_app),
        _witness().where(sessions.c.tag == witnesses.c.tag).select_from(theirs).where(of_app),
        _session(theirs).where(of_app),
        _snapshot().where(bases.c.session_row == sessions.c.id).select_from(theirs).where(of_app),
        *(wanted if keys else []),
    )


def _page_query(
    keys: bool, *, of_app: bool, newest: bool, snapshots: bool, found_by: str | None = None
) -> CompoundSelect[Any]:
    """Return the query for a page of a listing: at most `limit` rows after a position.

    The rows are those of one user or, with *of_app*, of all users of the app.  They are in the
    order of their users' row ids and then of their own row ids, which is the order of creation.
    With *newest*, the order is reversed.  The parameters `after_user` and `after_row` are the
    position.

    If *keys* is True, the query also reads data keys.  If *snapshots* is True, it also reads the
    snapshots of the sessions in the page.

    If *found_by* is `session` or `user`, *of_app* must be True.  The page then contains only the
    sessions that `secure_state_index` lists with `value_tag`, or the sessions of the users that it
    lists.  The query also reads the mark of `key_tag`.
    """
    user, own = (users.c.id if of_app else sessions.c.user_row), sessions.c.id
    rows = select(own, sessions.c.user_row, sessions.c.tag)
    if newest:
        rows = rows.where(user <= _after_user, or_(user < _after_user, own < _after_row))
        rows = rows.order_by(user.desc(), own.desc())
    else:
        rows = rows.where(user >= _after_user, or_(user > _after_user, own > _after_row))
        rows = rows.order_by(user, own)
    if of_app:
        app_row: ColumnElement[int] = users.c.app_row
        source: FromClause = sessions.join(users, users.c.id == sessions.c.user_row)
        if found_by:
            has_value = indexed.c.value_tag == _value_tag
            if found_by == "session":
                rows = rows.where(own.in_(select(indexed.c.row_id).where(has_value)))
            else:
                row = index_row_of_user(indexed.c.row_id)  # its own inverse
                rows = rows.where(user.in_(select(row).where(has_value)))
            # The addition prevents the database from using the index of `app_row`.  It would read
            # all users of the app, because it cannot know how few sessions have this value.
            app_row = app_row + _ZERO
        rows = rows.select_from(source).where(app_row == _app_id())
    else:
        rows = rows.where(sessions.c.user_row == _user_id())
    page = rows.limit(_limit).offset(_ZERO).cte("page")
    owners = users.c.id.in_(select(page.c.user_row)) if of_app else users.c.tag == _user_tag
    of_owners = select(users.c.tag).where(owners)
    members = [
        _app(),
        _user().where(owners),
        _witness().where(_among(witnesses.c.tag, _app_tag, *([] if of_app else [_user_tag]))),
        _witness().where(witnesses.c.tag.in_(select(page.c.tag))),
        _session(page.join(sessions, sessions.c.id == page.c.id)),
    ]
    if of_app:
        members.append(_witness().where(witnesses.c.tag.in_(of_owners)))
    if found_by:
        members.append(_indexed(indexed.c.row_id == _MARK, indexed.c.key_tag == _key_tag))
    if snapshots:
        members.append(_snapshot().where(bases.c.session_row.in_(select(page.c.id))))
    if keys and of_app:
        members += [_keys_of(_app_tag), _key().where(data_keys.c.owner.in_(of_owners)), _master()]
        return union_all(*members)
    return _members(keys, *members)


@functools.cache
def page_of_sessions(*, of_app: bool, newest: bool, snapshots: bool) -> QueryForms:
    """Return the two forms of the query for a page of a listing.

    `_page_query` describes the arguments and the parameters of the query.
    """
    return {
        keys: _page_query(keys, of_app=of_app, newest=newest, snapshots=snapshots)
        for keys in (False, True)
    }


@functools.cache
def page_of_found_sessions(*, of_users: bool, newest: bool) -> QueryForms:
    """Return the two forms of the query for a page of the sessions that have a value.

    If *of_users* is True, the value is in the states of users.  The parameters are those of a page
    of an app, and `key_tag` and `value_tag`.
    """
    found_by = "user" if of_users else "session"
    return {
        keys: _page_query(keys, of_app=True, newest=newest, snapshots=True, found_by=found_by)
        for keys in (False, True)
    }


def _by_keys(*history: Select[Any]) -> QueryForms:
    return {keys: _session_query(keys, list(history)) for keys in (False, True)}


SESSION_WITH_ALL_EVENTS = _by_keys(_event().where(events.c.session_row == _session_id()))
SESSION_WITH_LAST_EVENTS = _by_keys(_last_events())
# The parameter `known` is the `seq` of the first event to read.
SESSION_WITH_NEW_EVENTS = _by_keys(
    _event().where(events.c.session_row == _session_id(), events.c.seq >= _known)
)
SESSION_WITHOUT_EVENTS = _by_keys()
SESSIONS_OF_USER = {keys: _list_query(keys) for keys in (False, True)}
COLLECTIONS_OF_USER = {keys: _list_query(keys, collections=True) for keys in (False, True)}
OWNERS = {keys: _owners_query(keys) for keys in (False, True)}
# The next two queries also read the rows of `secure_migrated` with the tags in the arguments.  Such
# a row says whether a session or a state was imported before.
IMPORTED_SESSION = {
    keys: _session_query(keys, _migrated(_user_tag, _session_tag)) for keys in (False, True)
}
IMPORTED_OWNERS = {
    keys: _owners_query(keys, *_migrated(_app_tag, _user_tag)) for keys in (False, True)
}
# The next two queries also read the rows of `secure_state_index` of the session or the user.
INDEXED_SESSION = {
    keys: _session_query(keys, [_indexed(indexed.c.row_id == _session_id())])
    for keys in (False, True)
}
INDEXED_USER = {
    keys: _owners_query(keys, _indexed(indexed.c.row_id == index_row_of_user(_user_id())))
    for keys in (False, True)
}
SESSIONS_OF_APP = {keys: _list_all_query(keys) for keys in (False, True)}
EVENT_AT = _event().where(
    events.c.session_row == bindparam("session_row"), events.c.seq == bindparam("seq")
)


@functools.cache
def events_at(number: int) -> Select[Any]:
    """Return the query for *number* events of one session by their `seq`.

    The parameters are `session_row` and the values of `seq`, as `numbered` returns them.
    """
    return _event().where(
        events.c.session_row == bindparam("session_row"), is_one_of(events.c.seq, number)
    )


def _parameters(table: Table) -> list[BindParameter[Any]]:
    return [bindparam(column.name, type_=column.type) for column in table.c]


def _insert(table: Table, row: Select[Any]) -> Insert:
    """Return an INSERT of *row*, which may select no row."""
    return insert(table).from_select([column.name for column in table.c], row)


# Inserts a data key only if the stored keyring still has the master key that wraps the data key,
# and has the number of rows that this process has read.  Otherwise, another process has changed
# the keyring.
INSERT_KEY = _insert(
    data_keys,
    select(*_parameters(data_keys))
    .select_from(keyring)
    .where(
        keyring.c.id == bindparam("master_id"),
        select(func.count()).select_from(keyring.alias()).scalar_subquery()
        == bindparam("masters", type_=BigInteger),
    ),
)
# Locks the row of a data key by setting the generation to its present value.  A concurrent `retire`
# waits for the lock.  If `retire` has already deleted the key, this statement matches no row, which
# is a conflict.
HOLD_KEY = (
    update(data_keys)
    .where(data_keys.c.id == bindparam("at_id"))
    .values(generation=bindparam("generation"))
)
INSERT_APP = insert(apps)
INSERT_USER = insert(users)
INSERT_WITNESS = insert(witnesses)
INSERT_SESSION = insert(sessions)
INSERT_SNAPSHOT = insert(bases)


def _same_row(table: FromClause, prefix: str) -> ColumnElement[bool]:
    """Return the condition that *table* has a row equal to the parameters named *prefix*_…."""
    return select(literal_column("1")).where(*_equal(table, prefix)).exists()


def _equal(table: FromClause, prefix: str) -> list[ColumnElement[bool]]:
    return [column == bindparam(f"{prefix}_{column.name}", type_=column.type) for column in table.c]


def _session_of_user(*conditions: ColumnElement[bool]) -> Insert:
    """Return an INSERT that stores a session only if the user's row is as this process read it.

    The INSERT locks the user's row.  Therefore, a concurrent `erase_user` waits until the new
    session is visible, and then also erases that session.  On a cluster, the lock works on one node
    only, so such a transaction also needs `clusters.claim_user`.
    """
    row = select(*_parameters(sessions)).select_from(users)
    row = row.where(*_equal(users, "user"), *conditions)
    return _insert(sessions, row.with_for_update(read=True, key_share=True, of=users))


# The conditions that the stored row of the app, and the stored version witnesses of the app and the
# user, equal the cached rows.  The parameters are the cached rows: see `KnownOwners.columns`.
_owners_as_cached = (
    _same_row(apps, "app"),
    _same_row(witnesses.alias("app_witnesses"), "app_witness"),
    _same_row(witnesses.alias("user_witnesses"), "user_witness"),
)
INSERT_SESSION_OF_USER = _session_of_user()
INSERT_SESSION_OF_KNOWN = _session_of_user(*_owners_as_cached)
# If a user was erased, `secure_migrated` may have a row of this user whose `row_id` is 0.  Then no
# session of the user may be imported.  IMPORT_SESSION_OF_KNOWN requires that `secure_migrated` has
# no row of the user at all: it runs without a read, so the MAC of such a row was not checked.
_row_of_user: Select[Any] = select(literal_column("1")).where(migrated.c.tag == _user_tag)
_is_not_erased = ~_row_of_user.where(migrated.c.row_id == _ZERO).exists()
IMPORT_SESSION = _insert(sessions, select(*_parameters(sessions)).where(_is_not_erased))
IMPORT_SESSION_OF_USER = _session_of_user(_is_not_erased)
IMPORT_SESSION_OF_KNOWN = _session_of_user(*_owners_as_cached, ~_row_of_user.exists())
INSERT_MIGRATED = insert(migrated)
UPDATE_MIGRATED = (
    update(migrated)
    .where(*_equal(migrated, "at"))
    .values(**{name: bindparam(name) for name in ("row_id", "number", "source", "seal")})
)
INSERT_INDEXED = insert(indexed)
_is_indexed: Select[Any] = select(literal_column("1")).where(
    indexed.c.row_id == bindparam("row_id", type_=BigInteger),
    indexed.c.key_tag == _key_tag,
)
# An INSERT that does nothing if the key of the session or user has a row already.
INSERT_MISSING_INDEXED = _insert(
    indexed, select(*_parameters(indexed)).where(~_is_indexed.exists())
)
_at_indexed = (
    indexed.c.row_id == bindparam("at_id", type_=BigInteger),
    indexed.c.key_tag == bindparam("at_key", type_=LargeBinary),
)
UPDATE_INDEXED = update(indexed).where(*_at_indexed).values(value_tag=bindparam("value_tag"))
DELETE_INDEXED = delete(indexed).where(*_at_indexed)
DELETE_ALL_INDEXED = delete(indexed).where(_at_indexed[0])
# The marks of `secure_state_index`: at most one more than `opening` accepts.
INDEX_MARKS = (
    select(indexed.c.key_tag, indexed.c.value_tag)
    .where(indexed.c.row_id == _MARK)
    .limit(bindparam("limit", type_=BigInteger))
    .offset(_ZERO)
)
INSERT_EVENT = insert(events)
# Replaces the record of an event only if the stored record is as this process has read it.
UPDATE_EVENT = (
    update(events)
    .where(
        events.c.session_row == bindparam("at_session_row"),
        events.c.seq == bindparam("at_seq"),
        events.c.event == bindparam("at_event", type_=LargeBinary),
    )
    .values(event=bindparam("event"))
)


def _lock(table: FromClause, tag: BindParameter[bytes]) -> Select[Any]:
    """Return a query that locks the row of *table* with *tag* against changes by others.

    Others can still insert rows that refer to the locked row.  SQLite has no such locks and needs
    none: it runs one write at a time.
    """
    return select(table.c.id).where(table.c.tag == tag).with_for_update(key_share=True)


LOCK_SESSION = _lock(sessions, _session_tag)
LOCK_APP = _lock(apps, _app_tag)
LOCK_USER = _lock(users, _user_tag)

_AT_ID: BindParameter[int] = bindparam("at_id")
_AT_VERSION: BindParameter[int] = bindparam("at_version")
_AT_STATE: BindParameter[bytes] = bindparam("at_state", type_=LargeBinary)

UPDATE_APP = (
    update(apps)
    .where(apps.c.id == _AT_ID, apps.c.version == _AT_VERSION, apps.c.state == _AT_STATE)
    .values(version=bindparam("version"), state=bindparam("state"))
)
UPDATE_USER = (
    update(users)
    .where(users.c.id == _AT_ID, users.c.version == _AT_VERSION, users.c.state == _AT_STATE)
    .values(version=bindparam("version"), state=bindparam("state"))
)
UPDATE_WITNESS = (
    update(witnesses)
    .where(witnesses.c.tag == bindparam("at_tag"), witnesses.c.number == bindparam("at_number"))
    .values(number=bindparam("number"), seal=bindparam("seal"))
)
# Matches the stored row only if all its columns are as this process has read or written them.
# Therefore, a row that was tampered with is not overwritten, and the next read rejects the row.
UPDATE_SESSION = (
    update(sessions)
    .where(*_equal(sessions, "at"))
    .values(
        revision=bindparam("revision"),
        base_revision=bindparam("base_revision"),
        updated_at=bindparam("updated_at"),
        expires_at=bindparam("expires_at"),
        state=bindparam("state"),
    )
)
# Replaces a session by another session with the same id.  The row gets another row id, so the
# events of the old session belong to no row.
REPLACE_SESSION = (
    update(sessions)
    .where(*_equal(sessions, "at"))
    .values(
        id=bindparam("id"),
        revision=bindparam("revision"),
        base_revision=bindparam("base_revision"),
        created_at=bindparam("created_at"),
        updated_at=bindparam("updated_at"),
        expires_at=bindparam("expires_at"),
        state=bindparam("state"),
    )
)
# Gives the row of a collection a new row id, so that the old items belong to no row.
MOVE_COLLECTION = (
    update(sessions)
    .where(*_equal(sessions, "at"))
    .values(
        id=bindparam("id"),
        revision=bindparam("revision"),
        updated_at=bindparam("updated_at"),
        state=bindparam("state"),
    )
)
UPDATE_SNAPSHOT = (
    update(bases)
    .where(bases.c.session_row == _AT_ID, bases.c.revision == bindparam("at_revision"))
    .values(revision=bindparam("revision"), state=bindparam("state"))
)
# Matches only the revision that was read.  If another process has appended an event since then,
# DELETE_EVENTS might not see the event, because PostgreSQL runs both deletions in one statement.
DELETE_SESSION = delete(sessions).where(
    sessions.c.id == _AT_ID, sessions.c.revision == bindparam("at_revision")
)
DELETE_KNOWN_SESSION = delete(sessions).where(*_equal(sessions, "at"))
DELETE_SNAPSHOT = delete(bases).where(bases.c.session_row == _AT_ID)
DELETE_EVENTS = delete(events).where(events.c.session_row == _AT_ID)
DELETE_WITNESS = delete(witnesses).where(witnesses.c.tag == bindparam("at_tag"))


class AppRow(NamedTuple):
    """A row of `secure_apps`; *name* is UTF-8."""

    id: int
    version: int
    name: bytes
    state: bytes


class UserRow(NamedTuple):
    """A row of `secure_users`."""

    id: int
    app_row: int
    version: int
    tag: bytes
    state: bytes


class WitnessRow(NamedTuple):
    """A row of `secure_witnesses`; *number* is an owner's version or a session's row id."""

    number: int
    tag: bytes
    seal: bytes


class SessionRow(NamedTuple):
    """A row of `secure_sessions`; *last_seq* is the `seq` of the last event, or -1."""

    id: int
    user_row: int
    revision: int
    base_revision: int
    created_at: int
    updated_at: int
    expires_at: int
    last_seq: int
    tag: bytes
    state: bytes


class SnapshotRow(NamedTuple):
    """A row of `secure_bases`."""

    session_row: int
    revision: int
    state: bytes


class MigratedRow(NamedTuple):
    """A row of `secure_migrated`, which says what was imported; `imports` describes the columns."""

    tag: bytes
    row_id: int
    number: int
    source: bytes
    seal: bytes


class IndexedRow(NamedTuple):
    """A row of `secure_state_index`; nothing in it is authenticated, except in a mark."""

    row_id: int
    key_tag: bytes
    value_tag: bytes


class Found:
    """The rows of one read, by kind.

    SQLite stores any type in any column, so a modified value may have any type.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        self.apps: list[AppRow] = []
        self.users: list[UserRow] = []
        self.witnesses: dict[bytes, WitnessRow] = {}
        self.data_keys: list[DataKeyRow] = []
        self.masters: list[MasterMark] = []
        self.sessions: list[SessionRow] = []
        self.snapshots: dict[int, SnapshotRow] = {}
        self.events: list[Row] = []  # as the driver returns them: see EVENT_SEQ
        self.migrated: dict[bytes, MigratedRow] = {}
        self.indexed: list[IndexedRow] = []
        seals: dict[bytes, bytes] = {}
        for row in rows:
            kind = row[0]
            if kind == _EVENT:
                self.events.append(row)
            elif kind == _SESSION:
                self.sessions.append(SessionRow._make(row[1:]))
            elif kind == _WITNESS:
                self.witnesses[row[9]] = WitnessRow(row[1], row[9], row[10])
            elif kind == _USER:
                self.users.append(UserRow(row[1], row[2], row[3], row[9], row[10]))
            elif kind == _APP:
                self.apps.append(AppRow(row[1], row[2], row[9], row[10]))
            elif kind == _SNAPSHOT:
                self.snapshots[row[1]] = SnapshotRow(row[1], row[2], row[9])
            elif kind == _KEY:
                self.data_keys.append(DataKeyRow(row[1], row[9], row[2], row[3], row[4], row[10]))
            elif kind == _MASTER:
                self.masters.append(MasterMark(row[1], row[2], row[9]))
            elif kind == _MIGRATED:
                self.migrated[row[9]] = MigratedRow(row[9], row[1], row[2], row[10], b"")
            elif kind == _INDEXED:
                self.indexed.append(IndexedRow(row[1], row[9], row[10]))
            else:
                seals[row[9]] = row[10]
        for tag, seal in seals.items():
            self.migrated[tag] = self.migrated[tag]._replace(seal=seal)

    @property
    def app(self) -> AppRow | None:
        """The app's row; None if the row does not exist."""
        return self.apps[0] if self.apps else None

    @property
    def user(self) -> UserRow | None:
        """The user's row, for a query that reads one user; None if the row does not exist."""
        return self.users[0] if self.users else None

    @property
    def session(self) -> SessionRow | None:
        """The session's row, for a query that reads one session; None if the row does not exist."""
        return self.sessions[0] if self.sessions else None


# Query for data keys only; its columns are the fields of DataKeyRow.
DATA_KEYS: Select[Any] = select(
    *(data_keys.c[name] for name in DataKeyRow._fields[:-1]), bounded(data_keys.c.wrapped)
)
# The lengths of value lists in statements; see `chunks`.  Most lists have two values: the tags of
# an app and a user.
_FEW, _MANY = 2, 200


def chunks(values: Iterable[Any]) -> Iterator[list[Any]]:
    """Split *values* into lists of 2 or 200, so that only two statements need to be compiled.

    The last list repeats its last value until it has 2 or 200 values.
    """
    remaining = list(values)
    while remaining:
        size = _FEW if len(remaining) <= _FEW else _MANY
        part, remaining = remaining[:size], remaining[size:]
        yield part + part[-1:] * (size - len(part))


def is_one_of(column: ColumnElement[Any], number: int) -> ColumnElement[bool]:
    """Return the condition that *column* equals one of the parameters `v0`, `v1` and so on.

    *number* is the number of these parameters.  `numbered` returns their values.
    """
    return column.in_([bindparam(f"v{n}", type_=column.type) for n in range(number)])


def numbered(values: Sequence[object]) -> dict[str, object]:
    """Return *values* as the parameters `v0`, `v1` and so on of `is_one_of`."""
    return {f"v{n}": value for n, value in enumerate(values)}


@functools.cache
def data_keys_of(number: int) -> CompoundSelect[Any]:
    """Return the query for all data keys of *number* owners and the marks of all keyring rows.

    A mark (see `MasterMark`) tells whether a row of the keyring has changed.  The parameters of the
    query are the owners' tags, as `numbered` returns them.

    Use this query for a key database, whose rows cannot be read together with the data, and in
    maintenance commands.
    """
    if number > _FEW:
        return union_all(_key().where(is_one_of(data_keys.c.owner, number)), _master())
    first, second = (bindparam(f"v{n}", type_=LargeBinary) for n in range(_FEW))
    return union_all(_keys_of(first), _keys_of(second, second != first), _master())


@functools.cache
def migrated_rows(owner: str, number: int) -> Select[Any]:
    """Return the query for the rows of `secure_migrated` with one of *number* tags.

    The parameters are the tags, as `numbered` returns them.  Each row also has the id and the
    version (for a session, the revision) of the stored session, user or app, or NULL.

    Args:
        owner: The name of the table: `secure_sessions`, `secure_users` or `secure_apps`.
        number: The number of tags.
    """
    table = {table.name: table for table in (sessions, users, apps)}[owner]
    version = table.c.revision if table is sessions else table.c.version
    rows = migrated.outerjoin(table, table.c.tag == migrated.c.tag)
    columns = [migrated.c[name] for name in MigratedRow._fields]
    query = select(*columns, table.c.id, version).select_from(rows)
    return query.where(is_one_of(migrated.c.tag, number))
