"""The statements, as SQLAlchemy Core.

A read is one statement, so that what it returns belongs together on every database and at
every isolation level: a UNION ALL of members with one shape, told apart by their kind.
"""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import (
    BigInteger,
    BindParameter,
    ColumnElement,
    CompoundSelect,
    Delete,
    FromClause,
    Insert,
    LargeBinary,
    Select,
    Update,
    bindparam,
    cast,
    delete,
    func,
    insert,
    literal_column,
    null,
    select,
    union_all,
    update,
)

from adk_secure_sessions.storage.schema import (
    apps,
    bases,
    data_keys,
    events,
    keyring,
    sessions,
    users,
    witnesses,
)

APP, USER, WITNESS, KEY, SESSION, BASE, EVENT = range(7)
_NUMBERS, _BLOBS = 7, 2
_ZERO: ColumnElement[int] = literal_column("0")

Member = Select[Any]
Query = CompoundSelect[Any]
Forms = Mapping[bool, Query]  # without and with the owners' rows of `secure_data_keys`
Change = Update | Delete | Insert

_app_tag = bindparam("app_tag", type_=LargeBinary)
_user_tag = bindparam("user_tag", type_=LargeBinary)
_session_tag = bindparam("session_tag", type_=LargeBinary)
_limit = bindparam("limit", type_=BigInteger)


def _member(kind: int, numbers: list[Any], blobs: list[Any]) -> Member:
    """Columns `kind, 7 numbers, 2 blobs`, padded."""
    padded = numbers + [_ZERO] * (_NUMBERS - len(numbers))
    padded += blobs + [cast(null(), LargeBinary)] * (_BLOBS - len(blobs))
    names = ["a", "b", "c", "d", "e", "f", "g", "h", "i"]
    return select(
        literal_column(str(kind)).label("kind"),
        *(column.label(name) for column, name in zip(padded, names, strict=True)),
    )


def _app() -> Member:
    numbers: list[Any] = [apps.c.id, apps.c.version]
    return _member(APP, numbers, [apps.c.app_name, apps.c.state]).where(apps.c.tag == _app_tag)


def _user() -> Member:
    numbers = [users.c.id, users.c.app_row, users.c.version]
    return _member(USER, numbers, [users.c.tag, users.c.state])


def _witness() -> Member:
    return _member(WITNESS, [witnesses.c.number], [witnesses.c.tag, witnesses.c.seal])


def _key() -> Member:
    c = data_keys.c
    return _member(KEY, [c.id, c.generation, c.backend_id, c.created_at], [c.owner, c.wrapped])


def _session(source: FromClause = sessions) -> Member:
    c = sessions.c
    head = select(func.max(events.c.seq)).where(events.c.session_row == c.id).scalar_subquery()
    numbers: list[Any] = [c.id, c.user_row, c.revision, c.base_revision, c.created_at, c.updated_at]
    numbers.append(func.coalesce(head, literal_column("-1")))
    return _member(SESSION, numbers, [c.tag, c.state]).select_from(source)


def _base() -> Member:
    return _member(BASE, [bases.c.session_row, bases.c.revision], [bases.c.state])


def _event() -> Member:
    return _member(EVENT, [events.c.seq, events.c.time], [events.c.event])


def _app_id() -> Any:
    return select(apps.c.id).where(apps.c.tag == _app_tag).scalar_subquery()


def _user_id() -> Any:
    return select(users.c.id).where(users.c.tag == _user_tag).scalar_subquery()


def _session_id() -> Any:
    return select(sessions.c.id).where(sessions.c.tag == _session_tag).scalar_subquery()


def _among(column: ColumnElement[Any], *tags: Any) -> ColumnElement[bool]:
    return column.in_(tags)


def _members(keys: bool, *members: Member) -> Query:
    wanted = _key().where(_among(data_keys.c.owner, _app_tag, _user_tag))
    return union_all(*members, *([wanted] if keys else []))


def _last_events() -> Member:
    revision = select(sessions.c.revision).where(sessions.c.tag == _session_tag).scalar_subquery()
    return _event().where(events.c.session_row == _session_id(), events.c.seq >= revision - _limit)


def _session_query(keys: bool, history: list[Member]) -> Query:
    return _members(
        keys,
        _app(),
        _user().where(users.c.tag == _user_tag),
        _witness().where(_among(witnesses.c.tag, _app_tag, _user_tag, _session_tag)),
        _session().where(sessions.c.tag == _session_tag),
        _base().where(bases.c.session_row == _session_id()),
        *history,
    )


def _list_query(keys: bool) -> Query:
    mine = sessions.c.user_row == _user_id()
    return _members(
        keys,
        _app(),
        _user().where(users.c.tag == _user_tag),
        _witness().where(_among(witnesses.c.tag, _app_tag, _user_tag)),
        _witness().where(sessions.c.tag == witnesses.c.tag, mine, sessions.c.revision == _ZERO),
        _session().where(mine),
        _base().where(bases.c.session_row == sessions.c.id, mine),
    )


def _list_all_query(keys: bool) -> Query:
    """All users of an app."""
    of_app = users.c.app_row == _app_id()
    theirs = sessions.join(users, users.c.id == sessions.c.user_row)
    wanted = [
        _key().where(data_keys.c.owner == _app_tag),
        _key().where(data_keys.c.owner == users.c.tag, of_app),
    ]
    return union_all(
        _app(),
        _user().where(of_app),
        _witness().where(witnesses.c.tag == _app_tag),
        _witness().where(users.c.tag == witnesses.c.tag, of_app),
        _witness()
        .where(sessions.c.tag == witnesses.c.tag, sessions.c.revision == _ZERO)
        .select_from(theirs)
        .where(of_app),
        _session(theirs).where(of_app),
        _base().where(bases.c.session_row == sessions.c.id).select_from(theirs).where(of_app),
        *(wanted if keys else []),
    )


def _by_keys(*history: Member) -> dict[bool, Query]:
    return {keys: _session_query(keys, list(history)) for keys in (False, True)}


SESSION_WITH_ALL_EVENTS = _by_keys(_event().where(events.c.session_row == _session_id()))
SESSION_WITH_LAST_EVENTS = _by_keys(_last_events())
SESSION_WITHOUT_EVENTS = _by_keys()
SESSIONS_OF_USER = {keys: _list_query(keys) for keys in (False, True)}
OWNERS = {
    keys: _members(
        keys,
        _app(),
        _user().where(users.c.tag == _user_tag),
        _witness().where(_among(witnesses.c.tag, _app_tag, _user_tag)),
    )
    for keys in (False, True)
}
SESSIONS_OF_APP = {keys: _list_all_query(keys) for keys in (False, True)}
EVENT_AT = _event().where(
    events.c.session_row == bindparam("session_row"), events.c.seq == bindparam("seq")
)

# While the keyring has the master that wraps it, and the number of rows that this process knows.
INSERT_KEY = insert(data_keys).from_select(
    [column.name for column in data_keys.c],
    select(*(bindparam(column.name, type_=column.type) for column in data_keys.c))
    .select_from(keyring)
    .where(
        keyring.c.id == bindparam("master_id"),
        select(func.count()).select_from(keyring.alias()).scalar_subquery()
        == bindparam("masters", type_=BigInteger),
    ),
)
# Changes nothing: who is about to drop the key waits, or was first.
HOLD_KEY = (
    update(data_keys)
    .where(data_keys.c.id == bindparam("at_id"))
    .values(generation=bindparam("generation"))
)
INSERT_APP = insert(apps)
INSERT_USER = insert(users)
INSERT_WITNESS = insert(witnesses)
INSERT_SESSION = insert(sessions)
INSERT_BASE = insert(bases)


def _same_row(table: FromClause, prefix: str) -> ColumnElement[bool]:
    """The stored row of *table* is to the byte the one in parameters of that *prefix*."""
    return select(literal_column("1")).where(*_equal(table, prefix)).exists()


def _equal(table: FromClause, prefix: str) -> list[ColumnElement[bool]]:
    return [column == bindparam(f"{prefix}_{column.name}", type_=column.type) for column in table.c]


def _session_of_user(*conditions: ColumnElement[bool]) -> Insert:
    """A session of the user whose row is still the one that was read.

    The lock holds off who erases the user, until the session is there to be erased with the rest.
    """
    columns = (bindparam(column.name, type_=column.type) for column in sessions.c)
    row = select(*columns).select_from(users).where(*_equal(users, "user"), *conditions)
    return insert(sessions).from_select(
        [column.name for column in sessions.c],
        row.with_for_update(read=True, key_share=True, of=users),
    )


INSERT_SESSION_OF_USER = _session_of_user()
# And of an app, whose rows and witnesses are those that this process knows.
INSERT_SESSION_OF_KNOWN = _session_of_user(
    _same_row(apps, "app"),
    _same_row(witnesses.alias("app_witnesses"), "app_witness"),
    _same_row(witnesses.alias("user_witnesses"), "user_witness"),
)
INSERT_EVENT = insert(events)

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
# The stored row must be to the byte the one this process knows: one that was altered is left
# as it is, and the read that follows says so.
UPDATE_SESSION = (
    update(sessions)
    .where(*_equal(sessions, "at"))
    .values(
        revision=bindparam("revision"),
        base_revision=bindparam("base_revision"),
        updated_at=bindparam("updated_at"),
        state=bindparam("state"),
    )
)
UPDATE_BASE = (
    update(bases)
    .where(bases.c.session_row == _AT_ID, bases.c.revision == bindparam("at_revision"))
    .values(revision=bindparam("revision"), state=bindparam("state"))
)
# At the revision that was read: an event that was appended since would be left behind.
DELETE_SESSION = delete(sessions).where(
    sessions.c.id == _AT_ID, sessions.c.revision == bindparam("at_revision")
)
DELETE_KNOWN_SESSION = delete(sessions).where(*_equal(sessions, "at"))
DELETE_BASE = delete(bases).where(bases.c.session_row == _AT_ID)
DELETE_EVENTS = delete(events).where(events.c.session_row == _AT_ID)
DELETE_WITNESS = delete(witnesses).where(witnesses.c.tag == bindparam("at_tag"))
