"""Erase a user: delete the data keys and every row, and clear what deleted rows leave in files."""

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import sqlalchemy as sa

from adk_secure_sessions.db.protocol import Conflict, Disconnected, Executor
from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.formats.records import pack
from adk_secure_sessions.maintenance.database import Database, Limits, see_what_is_committed
from adk_secure_sessions.maintenance.engine import header_of
from adk_secure_sessions.storage import (
    bases,
    data_keys,
    events,
    identify,
    sessions,
    users,
    witnesses,
)


class Erasure(NamedTuple):
    """The result of `erase_user`, or what a dry run expects it to be.

    Attributes:
        data_keys: All generations of the user's data key.
        users: 1; or 0 if there is no such user, or if the user's row had been removed.
        sessions: Sessions of the user.
        bases: Large states of these sessions.
        events: Events of these sessions.
        witnesses: Version witnesses of the user and of these sessions.
        cleared: Whether the file that held the data keys holds no copy of them any more, not even
            in free space.  Logs, replicas and backups are never cleared.
        obstacle: Why it was not cleared; empty if it was.
    """

    data_keys: int
    users: int
    sessions: int
    bases: int
    events: int
    witnesses: int
    cleared: bool
    obstacle: str

    @property
    def rows(self) -> int:
        """How many rows in all."""
        return sum(self[:6])


async def erase_user(
    db: Database, app_name: str, user_id: str, *, dry_run: bool = False, rewrite: bool = False
) -> Erasure:
    """Delete a user's data keys and all rows of that user, in one transaction.

    Nothing is decrypted: rows that were tampered with are deleted, too.  Services may go on
    meanwhile.  A user who returns under the same id begins as a new user.  A second erasure finds
    nothing.

    Args:
        db: The database.
        app_name: The app's name.
        user_id: The user's id, as ADK has it.
        dry_run: Count, and delete nothing.
        rewrite: Have the database rewrite the table of data keys (SQLite: the whole file), so
            that free space holds no copy of the keys.  Services wait until that is done.

    Raises:
        WrongKeyError: The root keys do not decrypt the keyring.
        ConfigurationError: The database cannot be used, or holds no encrypted sessions yet; or an
            id is not text.
    """
    if not (isinstance(app_name, str) and isinstance(user_id, str)):
        raise ConfigurationError("app_name and user_id must be text")
    tag = identify((await db.keys()).keyring.index, app_name, user_id).user_tag
    find, keys, rows = _Deletion.find_keys, _Deletion.delete_keys, _Deletion.delete_rows
    erasing = _Erasing(tag, dry_run, db.limits)
    if db.key_executor is db.executor:
        deleted = (await erasing.commit(db.change, [find, rows, keys])).counts
    else:  # the keys first: once that is committed, nobody can decrypt the rest
        first = await erasing.commit(db.change_keys, [find, keys])
        then = await erasing.commit(db.change, [rows], first.headers)
        deleted = first.counts + then.counts
    obstacle = "nothing was deleted"
    if not dry_run:
        obstacle = await _clear(db.key_executor, data_keys, db.limits.lock_wait, rewrite=rewrite)
    return Erasure(
        deleted[data_keys.name],
        deleted[users.name],
        deleted[sessions.name],
        deleted[bases.name],
        deleted[events.name],
        deleted[witnesses.name],
        not obstacle,
        obstacle,
    )


# --- deleting ------------------------------------------------------------------------------------


class _Erasing(NamedTuple):
    """The user whose rows are deleted or, in a dry run, only counted."""

    tag: bytes
    dry_run: bool
    limits: Limits

    async def commit(
        self,
        change: Callable[[Callable[[sa.Connection], None]], Awaitable[None]],
        steps: Sequence[Callable[["_Deletion"], None]],
        headers: Collection[bytes] = (),
    ) -> "_Deletion":
        """Run *steps* in a transaction by *change*, and return the attempt that was committed."""
        attempts: list[_Deletion] = []

        def work(connection: sa.Connection) -> None:
            attempt = _Deletion(connection, self, headers)
            attempt.run(steps)
            attempts.append(attempt)

        await change(work)
        # If its answer was lost, an earlier attempt may have been committed, and the last one
        # found nothing to delete.
        return next((one for one in reversed(attempts) if one.counts.total()), attempts[-1])


class _Deletion:
    """One attempt, in one transaction.

    *headers* are those of records under the user's data keys.
    """

    def __init__(
        self, connection: sa.Connection, erasing: _Erasing, headers: Collection[bytes]
    ) -> None:
        self.counts: Counter[str] = Counter()  # rows by table
        self.headers = set(headers)
        self._users: set[int] = set()  # row ids
        self._connection = connection
        self._tag = erasing.tag
        self._dry_run = erasing.dry_run
        self._names = erasing.limits.names

    def run(self, steps: Sequence[Callable[["_Deletion"], None]]) -> None:
        """Repeat *steps* until they find nothing more.

        Each statement sees what others committed before it: a service whose transaction was
        running when this one began may have added rows since.
        """
        see_what_is_committed(self._connection)
        if not self._dry_run:
            _overwrite_deleted(self._connection)
        before = -1
        while before < self.counts.total():
            before = self.counts.total()
            for step in steps:
                step(self)
            if self._dry_run:
                return

    def find_keys(self) -> None:
        """Note the headers of records under the user's data keys."""
        c = data_keys.c
        query = sa.select(c.backend_id, c.id).where(c.owner == self._tag)
        for backend_id, key_id in self._connection.execute(query):
            if backend_id in range(256):  # else the row was tampered with
                self.headers.add(pack(backend_id, key_id))

    def delete_keys(self) -> None:
        """Delete all generations.  Like `find_keys`, this needs only the key tables."""
        self._delete(data_keys, data_keys.c.owner == self._tag)

    def delete_rows(self) -> None:
        """Delete all rows that the keys encrypt.

        Rows are locked in the order in which services lock them, or both would wait for each
        other: each session before its user, the user before the keys.  Once a session is locked,
        it gets no more events; once the user's row is deleted, the user gets no more sessions.
        """
        self._users |= self._user_rows()
        found = self._locked_sessions()
        self._delete(users, users.c.id.in_(self._users))
        self._delete(witnesses, witnesses.c.tag == self._tag)
        for start in range(0, len(found), self._names):
            ids, tags = zip(*found[start : start + self._names], strict=True)
            self._delete(witnesses, witnesses.c.tag.in_(tags))
            self._delete(bases, bases.c.session_row.in_(ids))
            self._delete(events, events.c.session_row.in_(ids))
            self._delete(sessions, sessions.c.id.in_(ids))

    def _user_rows(self) -> set[int]:
        """Find the user's row by its tag; if that was modified, by the key that encrypts it."""
        query = sa.select(users.c.id)
        found = self._ids(query.where(users.c.tag == self._tag)) or self._users
        if not found and self.headers:
            found = self._ids(query.where(header_of(users.c.state).in_(self.headers)))
        return found

    def _locked_sessions(self) -> list["_SessionKey"]:
        """Find sessions by the user's row; if that was removed, by the key that encrypts them."""
        c = sessions.c
        of_user: sa.ColumnElement[bool]
        if self._users:
            of_user = c.user_row.in_(self._users)
        elif self.headers:
            of_user = header_of(c.state).in_(self.headers)
        else:
            return []
        # SQLite stores any type in any column.
        query = sa.select(c.id, sa.cast(c.tag, sa.LargeBinary)).where(of_user)
        if not self._dry_run:
            # In a later round, the user's row is locked.  A service that locked a session before
            # may wait for that row, while we would wait for the session; PostgreSQL takes a
            # second to detect the deadlock.
            kind, again = self._connection.dialect.name, self.counts[users.name]
            query = query.with_for_update(nowait=kind == "postgresql" and again > 0)
        return [_SessionKey(*row) for row in self._connection.execute(query)]

    def _ids(self, query: sa.Select[Any]) -> set[int]:
        return set(self._connection.scalars(query))

    def _delete(self, table: sa.Table, which: sa.ColumnElement[bool]) -> None:
        """Delete rows and count them; in a dry run, only count them."""
        if self._dry_run:
            query = sa.select(sa.func.count()).select_from(table).where(which)
            self.counts[table.name] += self._connection.scalar(query) or 0
        else:
            deleted = self._connection.execute(sa.delete(table).where(which))
            self.counts[table.name] += deleted.rowcount


class _SessionKey(NamedTuple):
    id: int
    tag: bytes


# --- clearing ------------------------------------------------------------------------------------
# A database marks the space of a deleted row as free and leaves its bytes there, for everybody who
# can read the file.  docs/erasure.md says what was observed on each database.

_NOT_ASKED = "the table of the data keys was not rewritten"
_IN_USE = "other connections used the database all the time"


def _overwrite_deleted(connection: sa.Connection) -> None:
    """Have the database overwrite what this connection deletes, if it can do that by itself."""
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("PRAGMA secure_delete = ON").close()


async def _clear(executor: Executor, table: sa.Table, lock_wait: int, *, rewrite: bool) -> str:
    """Clear the file that holds *table* of deleted rows.

    Args:
        executor: Of the database with that table.
        table: The table.
        lock_wait: Seconds to wait for a lock.
        rewrite: Rewrite the table (SQLite: the file) if that is needed.

    Returns:
        Why that was not possible; empty if it was.
    """
    try:
        return await executor.define(partial(_clear_now, table, lock_wait, rewrite), commit=False)
    except Conflict:
        return _IN_USE
    except Disconnected as lost:
        error: Exception = lost.error
    except (sa.exc.DBAPIError, OSError) as failed:
        error = failed
    return f"the database: {getattr(error, 'orig', error)}"


def _clear_now(table: sa.Table, lock_wait: int, rewrite: bool, connection: sa.Connection) -> str:
    kind = connection.dialect.name
    if kind == "sqlite":
        return _clear_sqlite(lock_wait, rewrite, connection)
    if not rewrite:
        return _NOT_ASKED
    if kind == "postgresql":
        return _rewrite_postgresql(table.name, lock_wait, connection)
    if kind in ("mysql", "mariadb"):
        return _rewrite_mysql(table.name, lock_wait, connection)
    return f"how to rewrite a table of {kind} is not known"


def _clear_sqlite(lock_wait: int, rewrite: bool, connection: sa.Connection) -> str:
    show, change = "PRAGMA busy_timeout", "PRAGMA busy_timeout = {}"
    with _setting(connection, show, change, lock_wait * 1000):
        if rewrite:
            connection.exec_driver_sql("VACUUM")
        busy, *_ = connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").one()
    return _IN_USE if busy else ""


def _rewrite_postgresql(name: str, lock_wait: int, connection: sa.Connection) -> str:
    # VACUUM without FULL leaves the bytes of a row if no other row of its page has to be moved.
    connection.execution_options(isolation_level="AUTOCOMMIT")
    file = sa.select(sa.func.pg_relation_filenode(name))
    before = connection.scalar(file)
    show, change = "SHOW lock_timeout", "SET lock_timeout = '{}'"
    with _setting(connection, show, change, f"{lock_wait}s"):
        connection.exec_driver_sql(f"VACUUM (FULL) {name}")
    if connection.scalar(file) == before:  # it raises no error, it only warns
        return f"the account may not VACUUM {name}, which its owner may"
    return ""


def _rewrite_mysql(name: str, lock_wait: int, connection: sa.Connection) -> str:
    if not connection.scalar(sa.text("SELECT @@innodb_file_per_table")):
        return "the table shares its file with others: innodb_file_per_table is off"
    show, change = "SELECT @@lock_wait_timeout", "SET lock_wait_timeout = {}"
    with _setting(connection, show, change, lock_wait):
        rows = connection.exec_driver_sql(f"OPTIMIZE TABLE {name}")
        said = {kind.lower(): text for _table, _operation, kind, text in rows}
    return "" if said.get("status") == "OK" else f"the database: {said.get('error', said)}"


@contextmanager
def _setting(connection: sa.Connection, show: str, change: str, value: object) -> Iterator[None]:
    """Change a setting of the connection, which may be the caller's, and restore it."""
    before = connection.exec_driver_sql(show).scalar()
    connection.exec_driver_sql(change.format(value)).close()
    try:
        yield
    finally:
        if not connection.invalidated:
            connection.exec_driver_sql(change.format(before)).close()
