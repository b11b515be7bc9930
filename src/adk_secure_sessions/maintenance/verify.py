"""Opening everything, to say what cannot be."""

import functools
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple

import sqlalchemy as sa

from adk_secure_sessions.db.protocol import Row, T
from adk_secure_sessions.errors import (
    Reason,
    TamperedError,
    UnknownKeyError,
)
from adk_secure_sessions.formats.records import binary, decode_text
from adk_secure_sessions.maintenance import orphans
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.engine import (
    Bounds,
    Meter,
    Progress,
    batches,
    count_events,
    count_rows,
    within,
)
from adk_secure_sessions.maintenance.identities import Located, app_name_of, identified
from adk_secure_sessions.maintenance.problems import UNREADABLE, Problem, Problems
from adk_secure_sessions.storage import (
    OWNERS,
    Attempt,
    Found,
    KeySource,
    RowCache,
    Store,
    apps,
    data_keys,
    identify,
    naming,
    open_app,
    open_user_row,
    sessions,
    users,
    witnesses,
)


class Verification(NamedTuple):
    """What `verify` found.

    Attributes:
        apps: Rows that were opened, and are as they were written; so for users and sessions.
        users: See `apps`.
        sessions: See `apps`; with their states, their history and their witnesses.
        events: Those of these sessions.
        unchecked: Users and sessions whose app or user cannot be opened: nothing can tell.
        bad: How many rows are not as they were written, or belong to nothing.
        problems: The first 1000 of them.
    """

    apps: int
    users: int
    sessions: int
    events: int
    unchecked: int
    bad: int
    problems: tuple[Problem, ...]


async def verify(
    db: Database, *, progress: Progress | None = None, rows_per_second: float | None = None
) -> Verification:
    """Open every record, and check that nothing was altered, moved, removed or added.

    A row that is bad is left alone, and the rest goes on.  Services may write meanwhile: each
    session is read by one statement.  Memory holds one session's events at a time.  Whether
    the JSON in a record makes an event for google-adk is not tried.

    Args:
        db: The database, with every backend and root key whose records it may hold.
        progress: Called with the number of rows done, and of all.
        rows_per_second: Go no faster.

    Raises:
        WrongKeyError: The root keys do not open it.
        ConfigurationError: It cannot be used, or is not ours yet.
    """
    run = _Run(db, await db.store(), progress, rows_per_second)
    await run.open_keys()
    await run.check_apps()
    await run.check_users()
    await run.check_sessions()
    await orphans.find_witnesses(db, run.problems, run.meter)
    await orphans.find_data_keys(db, run.problems, run.meter)
    run.meter.finish()
    return run.result()


class _Run:
    def __init__(
        self, db: Database, store: Store, progress: Progress | None, rate: float | None
    ) -> None:
        self.problems = Problems()
        self.meter = Meter(progress, 0, rate)
        self._progress = progress
        self._rate = rate
        self._db = db
        self._store = store
        self._bad_apps: set[int] = set()
        self._opened = dict.fromkeys(("apps", "users", "sessions", "events"), 0)
        self._unchecked = 0

    async def open_keys(self) -> None:
        self._keys = await self._db.keys()
        total = await count_rows(self._db, apps, users, sessions, witnesses, data_keys)
        total += await count_events(self._db)
        self.meter = Meter(self._progress, total, self._rate)

    def result(self) -> Verification:
        found = self.problems
        return Verification(
            **self._opened, unchecked=self._unchecked, bad=found.count, problems=tuple(found.kept)
        )

    async def check_apps(self) -> None:
        async for rows in batches(self._db, apps.c.id, _apps):
            for row_id, app_name in rows:
                try:
                    await _settled(partial(self._check_app, row_id, app_name))
                except UNREADABLE as error:
                    self._bad_apps.add(row_id)
                    self.problems.refused(error, apps.name, row_id)
                else:
                    self._opened["apps"] += 1
                await self.meter.advance()

    async def check_users(self) -> None:
        async for rows in batches(self._db, users.c.id, _users):
            for row in rows:
                if row[1] in self._bad_apps:
                    self.problems.expect(users.name, row[0])
                    self._unchecked += 1
                else:
                    await self._count_user(row)
                await self.meter.advance()

    async def check_sessions(self) -> None:
        async for batch in identified(self._db):
            for located in batch.sessions:
                await self._check_session(located)
            await orphans.find_in_sessions(self._db, batch.keys, self.problems)

    async def _check_app(self, row_id: int, stored_name: bytes) -> None:
        with naming(apps.name, row_id):
            app_name = decode_text(stored_name)
        context, found = await self._read(app_name)
        app = open_app(context, found)
        if app is None or app.id != row_id:
            raise TamperedError(
                "its tag was modified", reason=Reason.WRONG_OWNER, table=apps.name, row=row_id
            )

    async def _count_user(self, row: Row) -> None:
        try:
            self._opened["users"] += await _settled(partial(self._check_user, row))
        except UNREADABLE as error:
            self.problems.refused(error, users.name, row[0])
            self.problems.expect(users.name, row[0])

    async def _check_user(self, row: Row) -> bool:
        """Whether it is still there."""
        row_id, _, tag, stored_name = row
        with naming(users.name, row_id):
            app_name = app_name_of(stored_name)
            binary(tag)
        context, found = await self._read(app_name, tag)
        if not found.users:
            return False  # deleted meanwhile
        user = open_user_row(context, found, found.users[0])
        who = identify(self._keys.keyring.index, app_name, user.user_id)
        if who.user_tag != tag:
            raise TamperedError(
                "its tag is another user's", reason=Reason.WRONG_OWNER, table=users.name, row=row_id
            )
        return True

    async def _check_session(self, located: Located) -> None:
        rows = 1
        try:
            if located.ids is None:
                assert located.error is not None
                raise located.error
            # As a service reads it, and all of it by one statement.
            found = await self._store.get(*located.ids, _no_decoding)
            if found is not None:  # else it was deleted meanwhile
                self._opened["sessions"] += 1
                self._opened["events"] += len(found[1])
                rows += len(found[1])
        except UNREADABLE as error:
            self._unchecked += self.problems.refused(error, sessions.name, located.row)
        await self.meter.advance(rows)

    async def _read(self, app_name: str, user_tag: bytes = b"") -> tuple[Attempt, Found]:
        """An app's row, or a user's too, with witnesses and keys."""
        who = identify(self._keys.keyring.index, app_name)._replace(user_tag=user_tag)
        found = Found(await self._db.read(OWNERS[False], who.tags()))
        keys = await self._db.keys_of(who.app_tag, user_tag)
        return Attempt(who, keys, RowCache(0), KeySource.QUERY, is_first=False), found


async def _settled(check: Callable[[], Awaitable[T]]) -> T:
    """Keys are read after the rows: they may have been replaced in between."""
    try:
        return await check()
    except UnknownKeyError:
        pass
    return await check()


def _no_decoding(plaintext: bytes, session_row: int, seq: int) -> None:
    return None


@functools.cache
def _apps(bounds: Bounds) -> sa.Select[Any]:
    c = apps.c
    return sa.select(c.id, c.app_name).where(*within(c.id, bounds)).order_by(c.id)


@functools.cache
def _users(bounds: Bounds) -> sa.Select[Any]:
    c = users.c
    query = sa.select(c.id, c.app_row, c.tag, apps.c.app_name)
    query = query.select_from(users.outerjoin(apps, apps.c.id == c.app_row))
    return query.where(*within(c.id, bounds)).order_by(c.id)
