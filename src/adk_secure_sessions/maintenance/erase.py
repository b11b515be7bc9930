"""Erase a user: delete the data keys and all rows, and remove the deleted keys from the file."""

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
        data_keys: Number of data keys of the user, all generations.
        users: 1; or 0 if the user does not exist, or if the user's row had been removed.
        sessions: Number of sessions of the user.
        bases: Number of snapshots of these sessions.
        events: Number of events of these sessions.
        witnesses: Number of version witnesses of the user and of these sessions.
        cleared: Whether the database file has no copy of the data keys any more, not even in
            free space.  Logs, replicas and backups are never cleared.
        obstacle: Why `cleared` is False; empty if it is True.
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
        """The number of deleted rows in all tables."""
        return sum(self[:6])


async def erase_user(
    db: Database, app_name: str, user_id: str, *, dry_run: bool = False, rewrite: bool = False
) -> Erasure:
    """Delete a user's data keys and all rows of that user.

    One transaction deletes everything.  With a key database, a first transaction deletes the
    data keys, and a second transaction deletes the rows.  Nothing is decrypted, so rows that were
    tampered with are deleted, too.  Services can keep running.  A user who returns with the same
    id is a new user.  A second erasure finds nothing.

    Args:
        db: The database.
        app_name: The app's name.
        user_id: The user's id in ADK.
        dry_run: Count the rows, but delete nothing.
        rewrite: Rewrite the table of data keys (SQLite: the whole file), so that its free space
            has no copy of the keys.  Services wait until the database has rewritten it.

    Raises:
        WrongKeyError: The root keys do not decrypt the keyring.
        ConfigurationError: The database cannot be used, or holds no encrypted sessions yet; or
            *app_name* or *user_id* is not text.
    """
    if not (isinstance(app_name, str) and isinstance(user_id, str)):
        raise ConfigurationError("app_name and user_id must be text")
    tag = identify((await db.keys()).keyring.index, app_name, user_id).user_tag
    find, keys, rows = _Deletion.find_keys, _Deletion.delete_keys, _Deletion.delete_rows
    erasing = _Erasing(tag, dry_run, db.limits)
    if db.key_executor is db.executor:
        deleted = (await erasing.commit(db.change, [find, rows, keys])).counts
    else:  # first the keys: after their deletion is committed, nobody can decrypt the rows
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
    """The user to erase, by tag (blind index); a dry run only counts the user's rows."""

    tag: bytes
    dry_run: bool
    limits: Limits

    async def commit(
        self,
        change: Callable[[Callable[[sa.Connection], None]], Awaitable[None]],
        steps: Sequence[Callable[["_Deletion"], None]],
        headers: Collection[bytes] = (),
    ) -> "_Deletion":
        """Run *steps* in one transaction, and return the attempt that was committed.

        *change* runs the transaction; after a conflict or a lost connection, it runs it again.
        """
        attempts: list[_Deletion] = []

        def work(connection: sa.Connection) -> None:
            attempt = _Deletion(connection, self, headers)
            attempt.run(steps)
            attempts.append(attempt)

        await change(work)
        # If the connection was lost during COMMIT, that attempt may have been committed.  The
        # next attempt then found nothing, so return the latest attempt that deleted rows.
        return next((one for one in reversed(attempts) if one.counts.total()), attempts[-1])


class _Deletion:
    """One attempt to delete a user's rows, in one transaction.

    *headers* are the record headers that name one of the user's data keys.  They identify the
    user's records even if the row that the records refer to was removed or modified.
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
        """Run all *steps* in passes until a pass finds no more rows.

        A service whose transaction began before ours may commit new rows during a pass.  The next
        pass finds these rows, because each statement sees what was committed before it.
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
        """Add the headers that name one of the user's data keys to `headers`."""
        c = data_keys.c
        query = sa.select(c.backend_id, c.id).where(c.owner == self._tag)
        for backend_id, key_id in self._connection.execute(query):
            if backend_id in range(256):  # otherwise the row was tampered with
                self.headers.add(pack(backend_id, key_id))

    def delete_keys(self) -> None:
        """Delete all data keys of the user.  This uses only the table of data keys."""
        self._delete(data_keys, data_keys.c.owner == self._tag)

    def delete_rows(self) -> None:
        """Delete all rows that the user's data keys encrypt.

        Lock rows in the same order as services, to avoid deadlocks: first the sessions, then the
        user, then the data keys.  Services cannot append events to a locked session, and cannot
        create sessions of a user whose row is deleted.
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
        """Find the user's row by its tag or, if the tag was modified, by its record header."""
        query = sa.select(users.c.id)
        found = self._ids(query.where(users.c.tag == self._tag)) or self._users
        if not found and self.headers:
            found = self._ids(query.where(header_of(users.c.state).in_(self.headers)))
        return found

    def _locked_sessions(self) -> list["_SessionKey"]:
        """Find and lock the user's sessions: by user row or, without that row, by record header."""
        c = sessions.c
        of_user: sa.ColumnElement[bool]
        if self._users:
            of_user = c.user_row.in_(self._users)
        elif self.headers:
            of_user = header_of(c.state).in_(self.headers)
        else:
            return []
        # SQLite stores any type in any column, so a modified tag may not be bytes: cast it.
        query = sa.select(c.id, sa.cast(c.tag, sa.LargeBinary)).where(of_user)
        if not self._dry_run:
            # From the second pass of `run` on, this transaction holds the lock on the user's row.
            # A service may have locked a session and wait for the user's row: a deadlock.  NOWAIT
            # fails at once, while PostgreSQL takes a second to detect a deadlock.
            kind, again = self._connection.dialect.name, self.counts[users.name]
            query = query.with_for_update(nowait=kind == "postgresql" and again > 0)
        return [_SessionKey(*row) for row in self._connection.execute(query)]

    def _ids(self, query: sa.Select[Any]) -> set[int]:
        return set(self._connection.scalars(query))

    def _delete(self, table: sa.Table, which: sa.ColumnElement[bool]) -> None:
        """Delete the rows of *table* that match *which*, and count them; a dry run only counts."""
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
# When a row is deleted, a database only marks the space of the row as free.  The bytes of the row
# remain in the file.  docs/erasure.md says what was observed on each database.

_NOT_ASKED = "the table of the data keys was not rewritten"
_IN_USE = "other connections used the database all the time"


def _overwrite_deleted(connection: sa.Connection) -> None:
    """On SQLite, make this connection overwrite the rows that it deletes.

    Other databases have no such setting.
    """
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("PRAGMA secure_delete = ON").close()


async def _clear(executor: Executor, table: sa.Table, lock_wait: int, *, rewrite: bool) -> str:
    """Remove the bytes of deleted rows from the file that stores *table*.

    Args:
        executor: The executor of the database that has *table*.
        table: The table.
        lock_wait: Seconds to wait for a lock.
        rewrite: Rewrite the table (SQLite: the whole file); services wait meanwhile.

    Returns:
        The reason why the bytes could not be removed; empty if they were removed.
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
    return f"there is no known way to rewrite a table of {kind}"


def _clear_sqlite(lock_wait: int, rewrite: bool, connection: sa.Connection) -> str:
    show, change = "PRAGMA busy_timeout", "PRAGMA busy_timeout = {}"
    with _setting(connection, show, change, lock_wait * 1000):
        if rewrite:
            connection.exec_driver_sql("VACUUM")
        busy, *_ = connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").one()
    return _IN_USE if busy else ""


def _rewrite_postgresql(name: str, lock_wait: int, connection: sa.Connection) -> str:
    # A plain VACUUM does not overwrite a deleted row unless it moves another row of the same page,
    # so use FULL.
    connection.execution_options(isolation_level="AUTOCOMMIT")
    file = sa.select(sa.func.pg_relation_filenode(name))
    before = connection.scalar(file)
    show, change = "SHOW lock_timeout", "SET lock_timeout = '{}'"
    with _setting(connection, show, change, f"{lock_wait}s"):
        connection.exec_driver_sql(f"VACUUM (FULL) {name}")
    if connection.scalar(file) == before:  # VACUUM only warns, and raises no error
        return f"this account is not allowed to VACUUM {name}; the owner of the table is allowed"
    return ""


def _rewrite_mysql(name: str, lock_wait: int, connection: sa.Connection) -> str:
    if not connection.scalar(sa.text("SELECT @@innodb_file_per_table")):
        return "the table shares its file with other tables: innodb_file_per_table is off"
    show, change = "SELECT @@lock_wait_timeout", "SET lock_wait_timeout = {}"
    with _setting(connection, show, change, lock_wait):
        rows = connection.exec_driver_sql(f"OPTIMIZE TABLE {name}")
        said = {kind.lower(): text for _table, _operation, kind, text in rows}
    return "" if said.get("status") == "OK" else f"the database: {said.get('error', said)}"


@contextmanager
def _setting(connection: sa.Connection, show: str, change: str, value: object) -> Iterator[None]:
    """Change a setting while the block runs, then restore it for later users of *connection*."""
    before = connection.exec_driver_sql(show).scalar()
    connection.exec_driver_sql(change.format(value)).close()
    try:
        yield
    finally:
        if not connection.invalidated:
            connection.exec_driver_sql(change.format(before)).close()
