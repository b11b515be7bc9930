"""Delete the rows of google-adk's tables after everything was copied and compared."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import sqlalchemy as sa

from adk_secure_sessions.audit import command
from adk_secure_sessions.db.dialects import dialect_of
from adk_secure_sessions.db.protocol import Executor
from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.maintenance import Database, Progress
from adk_secure_sessions.maintenance.clearing import rewrite
from adk_secure_sessions.migration.adk_sql import (
    APP_STATES,
    TABLE_NAMES,
    USER_STATES,
    Position,
    Positions,
    StateTable,
    Tables,
)
from adk_secure_sessions.migration.adk_tables import AdkTables, taking_bytes
from adk_secure_sessions.migration.compare import Comparing, Comparison
from adk_secure_sessions.migration.pipeline import encode_states, packed
from adk_secure_sessions.migration.sources import Scope, Source
from adk_secure_sessions.storage.unit_of_work import repeated

T = TypeVar("T")

_EVERYTHING = Scope()
_PAGE = 200  # the maximum number of sessions that one transaction deletes
_LOCK_WAIT = 5  # the maximum number of seconds to wait for the lock that rewriting a table needs


class Erased(NamedTuple):
    """The numbers of rows that were deleted in a source or, in a dry run, that would be deleted.

    Attributes:
        sessions: The number of deleted sessions.
        events: The number of events of these sessions.  After a dry run, the number of compared
            events.
        states: The number of deleted states of users and apps.
        changed: How many sessions were kept, because they were created or changed after the
            comparison; 0 after a dry run.
        left: How many rows remain in the tables `sessions`, `events`, `app_states` and
            `user_states`, for example rows of other apps, of changed sessions, and events without a
            session; 0 after a dry run.
        obstacles: The reasons why the bytes of deleted rows could not be removed from the files of
            the database.
    """

    sessions: int
    events: int
    states: int
    changed: int
    left: int
    obstacles: tuple[str, ...]


class SourceErasure(NamedTuple):
    """The result of `erase_source`.

    Attributes:
        comparison: The comparison of the source with its copy.
        erased: The numbers of deleted rows; None if the comparison was not clean.
    """

    comparison: Comparison
    erased: Erased | None

    @property
    def is_complete(self) -> bool:
        """Whether all sessions in the scope were deleted, and the bytes of their rows removed.

        After a dry run, whether the comparison was clean.
        """
        erased = self.erased
        return erased is not None and not erased.changed and not erased.obstacles


@command
async def erase_source(
    source: Source,
    db: Database,
    *,
    scope: Scope = _EVERYTHING,
    dry_run: bool = False,
    show_ids: bool = False,
    progress: Progress | None = None,
) -> SourceErasure:
    """Compare *source* with its copy in *db*; if the comparison is clean, delete *source*'s rows.

    Each transaction deletes up to 200 sessions with their events, except sessions that have changed
    since they were compared.  After all sessions, the states of users and apps without sessions are
    deleted, except states that have changed since they were compared.  Finally, the bytes of the
    deleted rows are removed from the files of the database, as far as the database can do that: see
    docs/migrate.md.  The tables themselves are kept.

    If a run is interrupted, call this function again.

    Args:
        source: An `AdkTables` or a `Package1x`.
        db: The target, with every backend whose records it may contain.
        scope: Which sessions to compare and to delete.
        dry_run: Compare, but delete nothing.
        show_ids: Put readable ids into the findings, not only blind indexes.
        progress: Called with the number of sessions and events compared, and the number of all.

    Raises:
        ConfigurationError: *source* is neither an `AdkTables` nor a `Package1x`; or the source or
            the target cannot be used.  Or *dry_run* is False, *scope* is a part of the source, and
            no clean comparison of everything has stored the mark that ends the migration.
        WrongKeyError: The root keys do not decrypt the keyring.
        TamperedError: A row of `secure_migrated` was modified.
        DatabaseError: The source or the target raised an error.
    """
    if not isinstance(source, AdkTables):
        raise ConfigurationError(
            f"only tables of google-adk can be erased, and the source is {source.description}: "
            "delete it with its own tools"
        )
    store = await db.store()
    if not (dry_run or scope == _EVERYTHING or await store.migration_is_complete()):
        raise ConfigurationError(
            "before a part of the source is deleted, everything must be copied and compared: run "
            "`migrate --verify` without --app and --since"
        )
    run = await Comparing.begin(source, db, scope, show_ids=show_ids, progress=progress)
    comparison = await run.run(completes=not dry_run)
    if not comparison.clean:
        return SourceErasure(comparison, None)
    tables = await source.tables()
    if dry_run:
        deletable = comparison.sessions
        erased = Erased(deletable, comparison.events, comparison.states, 0, 0, ())
        return SourceErasure(comparison, erased)
    # After the deletion, the copies in *db* may be the only ones.  If this mark is stored, a later
    # `migrate` deletes no copy and replaces no state, and it replaces a session only by a version
    # that begins with all copied events.
    await store.mark_source_erased()
    writer = source.writer()
    try:
        return SourceErasure(comparison, await _Eraser(writer, source, tables, scope, run).erase())
    finally:
        await writer.close()


class _Eraser:
    """Deletes the sessions and states that a comparison has found to be equal."""

    def __init__(
        self,
        writer: Executor,
        source: AdkTables,
        tables: Tables,
        scope: Scope,
        equal: Comparing,
    ) -> None:
        self._writer = writer
        self._source = source
        self._tables = tables
        self._scope = scope
        self._equal = equal

    async def erase(self) -> Erased:
        sessions = events = changed = states = 0
        after, positions = None, Positions("sessions")
        while True:
            page = await self._change(partial(self._page, after=after))
            sessions += page.deleted
            events += page.events
            changed += page.kept
            after = page.last
            if after is None:
                break
            positions.add(after)
        for table in (USER_STATES, APP_STATES):
            after, positions = None, Positions(table.name)
            while True:
                work = partial(self._states, table=table, after=after)
                deleted, after = await self._change(work)
                states += deleted
                if after is None:
                    break
                positions.add(after)
        left = await self._change(self._tables.rows_left)
        # `rewrite` uses only the names of the tables.
        named = [sa.Table(name, sa.MetaData()) for name in TABLE_NAMES]
        obstacles = await rewrite(self._writer, named, _LOCK_WAIT)
        return Erased(sessions, events, states, changed, left, tuple(obstacles))

    async def _change(self, work: Callable[[sa.Connection], T]) -> T:
        """Call *work* in one transaction, and commit.

        As `Tables` requires, the driver of SQLite returns texts as bytes during the transaction.
        """

        def in_transaction(connection: sa.Connection) -> T:
            with taking_bytes(connection):
                dialect_of(connection).see_what_is_committed(connection)
                return work(connection)

        return await repeated(lambda: self._writer.define(in_transaction, commit=True), writes=True)

    def _page(self, connection: sa.Connection, after: Position | None) -> "_Page":
        """Delete those of the next sessions that have not changed since the comparison."""
        found, last = self._tables.page(connection, self._scope, after, limit=_PAGE, lock=True)
        listed = [session for session, _size in found]
        equal = [one[:3] for one in listed if packed(*one) in self._equal.equal_sessions]
        events = self._tables.delete(connection, equal)
        return _Page(len(equal), events, len(listed) - len(equal), last)

    def _states(
        self, connection: sa.Connection, table: StateTable, after: Position | None
    ) -> tuple[int, Position | None]:
        """Delete those of the next states of *table* that have not changed since the comparison.

        Keep the states of users and apps that still have sessions.  Return the number of deleted
        states, and the position of the next rows; None if no row follows.
        """
        rows, last = self._tables.states(connection, self._scope, table, after, lock=True)
        encoded, bad = encode_states(self._source.convert_states(rows))
        equal = [
            names
            for names, state in encoded.items()
            if names not in bad and packed(*names) + state in self._equal.equal_states
        ]
        return self._tables.delete_states(connection, table, equal), last


class _Page(NamedTuple):
    """The result of one transaction that deletes sessions.

    Attributes:
        deleted: The number of deleted sessions.
        events: The number of their events.
        kept: How many sessions were kept, because they were created or changed after the
            comparison.
        last: The position of the next page; None if no session follows.
    """

    deleted: int
    events: int
    kept: int
    last: Position | None
