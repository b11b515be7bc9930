"""Erasing a user: the data keys, then every row that is theirs."""

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.formats.records import pack
from adk_secure_sessions.maintenance.clearing import clear, overwrite_deleted
from adk_secure_sessions.maintenance.coverage import start_of
from adk_secure_sessions.maintenance.database import Database, see_what_is_committed
from adk_secure_sessions.storage import (
    bases,
    data_keys,
    events,
    identify,
    sessions,
    users,
    witnesses,
)

_CHUNK = 500  # rows that one statement names


class Erasure(NamedTuple):
    """What `erase_user` deleted, or would delete.

    Attributes:
        data_keys: All generations of the user's data key.
        users: 1; or 0 if there is no such user, or the row had been removed.
        sessions: Of the user.
        bases: Large states of these sessions.
        events: Of these sessions.
        witnesses: Of the user and these sessions.
        cleared: Whether the file that the data keys were in is rid of them, freed space included.
            Logs, replicas and copies never are.
        obstacle: Why not; empty if it is.
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
        """All of them."""
        return sum(self[:6])


async def erase_user(
    db: Database, app_name: str, user_id: str, *, dry_run: bool = False, rewrite: bool = False
) -> Erasure:
    """Delete a user's data keys and all their rows, in one transaction.

    Nothing is opened: rows that were altered go, too.  Services may go on meanwhile; whoever
    comes back under the same id begins as a new user.  Run again, it finds nothing.

    Args:
        db: The database.
        app_name: The app's name.
        user_id: As ADK has it.
        dry_run: Count, and delete nothing.
        rewrite: Have the database write the table of data keys anew (SQLite: its file), so that
            freed space holds nothing of them.  Services wait for that.

    Raises:
        WrongKeyError: The root keys do not open the database.
        ConfigurationError: It cannot be used, or is not ours yet; or an id is not text.
    """
    if not (isinstance(app_name, str) and isinstance(user_id, str)):
        raise ConfigurationError("app_name and user_id are text")
    tag = identify((await db.keys()).keyring.index, app_name, user_id).user_tag
    find, keys, rows = _Attempt.find_keys, _Attempt.delete_keys, _Attempt.delete_rows
    if db.key_executor is db.executor:
        met = (await _committed(db.change, tag, dry_run, [find, rows, keys])).met
    else:  # the keys first: once that is committed, the rest cannot be read any more
        first = await _committed(db.change_keys, tag, dry_run, [find, keys])
        then = await _committed(db.change, tag, dry_run, [rows], first.headers)
        met = first.met + then.met
    obstacle = "nothing was deleted"
    if not dry_run:
        obstacle = await clear(db.key_executor, data_keys, rewrite=rewrite)
    return Erasure(
        met[data_keys.name],
        met[users.name],
        met[sessions.name],
        met[bases.name],
        met[events.name],
        met[witnesses.name],
        not obstacle,
        obstacle,
    )


async def _committed(
    change: Callable[[Callable[[sa.Connection], None]], Awaitable[None]],
    tag: bytes,
    dry_run: bool,
    steps: Sequence[Callable[["_Attempt"], None]],
    headers: Collection[bytes] = (),
) -> "_Attempt":
    """The attempt whose transaction did it."""
    attempts: list[_Attempt] = []

    def work(connection: sa.Connection) -> None:
        attempt = _Attempt(connection, tag, dry_run, headers)
        attempt.run(steps)
        attempts.append(attempt)

    await change(work)
    # One whose answer was lost may have done it all, and left nothing for the next.
    return next((one for one in reversed(attempts) if one.met.total()), attempts[-1])


class _Attempt:
    """One transaction; *headers* are of records under the user's keys, if they are known yet."""

    def __init__(
        self, connection: sa.Connection, tag: bytes, dry_run: bool, headers: Collection[bytes]
    ) -> None:
        self.met: Counter[str] = Counter()  # rows by their table
        self.headers = set(headers)
        self._users: set[int] = set()  # row ids
        self._connection = connection
        self._tag = tag
        self._dry_run = dry_run

    def run(self, steps: Sequence[Callable[["_Attempt"], None]]) -> None:
        """Repeat *steps* until they find nothing.

        Each statement sees what others committed before it: whoever was on the way when this
        began may have added rows since.
        """
        see_what_is_committed(self._connection)
        if not self._dry_run:
            overwrite_deleted(self._connection)
        before = -1
        while before < self.met.total():
            before = self.met.total()
            for step in steps:
                step(self)
            if self._dry_run:
                return

    def find_keys(self) -> None:
        c = data_keys.c
        query = sa.select(c.backend_id, c.id).where(c.owner == self._tag)
        for backend_id, key_id in self._connection.execute(query):
            if backend_id in range(256):  # else it was altered
                self.headers.add(pack(backend_id, key_id))

    def delete_keys(self) -> None:
        """All generations.  This and `find_keys` ask for no other table."""
        self._delete(data_keys, data_keys.c.owner == self._tag)

    def delete_rows(self) -> None:
        """All that the keys sealed.

        In the order in which services lock them, or they would wait for us and we for them: each
        session before its user, the user before the keys.  Once its session is locked, no more
        events come; once the user's row is deleted, no more sessions.
        """
        self._users |= self._user_rows()
        theirs = self._locked_sessions()
        self._delete(users, users.c.id.in_(self._users))
        self._delete(witnesses, witnesses.c.tag == self._tag)
        for start in range(0, len(theirs), _CHUNK):
            ids, tags = zip(*theirs[start : start + _CHUNK], strict=True)
            self._delete(witnesses, witnesses.c.tag.in_(tags))
            self._delete(bases, bases.c.session_row.in_(ids))
            self._delete(events, events.c.session_row.in_(ids))
            self._delete(sessions, sessions.c.id.in_(ids))

    def _user_rows(self) -> set[int]:
        """By the tag; or where that was altered, by the key that sealed the row."""
        query = sa.select(users.c.id)
        found = self._ids(query.where(users.c.tag == self._tag)) or self._users
        if not found and self.headers:
            found = self._ids(query.where(start_of(users.c.state).in_(self.headers)))
        return found

    def _locked_sessions(self) -> list[tuple[int, bytes]]:
        """Ids and tags, by the user's row; or where that was removed, by the key."""
        c = sessions.c
        hers: sa.ColumnElement[bool]
        if self._users:
            hers = c.user_row.in_(self._users)
        elif self.headers:
            hers = start_of(c.state).in_(self.headers)
        else:
            return []
        # SQLite keeps any type in any column.
        query = sa.select(c.id, sa.cast(c.tag, sa.LargeBinary)).where(hers)
        if not self._dry_run:
            # In a later round who has one may wait for us, having come before the user's row was
            # locked.  PostgreSQL takes a second to find that out.
            kind, again = self._connection.dialect.name, self.met[users.name]
            query = query.with_for_update(nowait=kind == "postgresql" and again > 0)
        return [(row[0], row[1]) for row in self._connection.execute(query)]

    def _ids(self, query: sa.Select[Any]) -> set[int]:
        return set(self._connection.scalars(query))

    def _delete(self, table: sa.Table, which: sa.ColumnElement[bool]) -> None:
        """Delete, or only count."""
        if self._dry_run:
            query = sa.select(sa.func.count()).select_from(table).where(which)
            self.met[table.name] += self._connection.scalar(query) or 0
        else:
            self.met[table.name] += self._connection.execute(sa.delete(table).where(which)).rowcount
