"""Delete all rows of google-adk's tables after everything was copied and compared."""

from collections.abc import Iterator
from dataclasses import dataclass

import sqlalchemy as sa

from adk_secure_sessions.audit import audited_command
from adk_secure_sessions.db.dialects import dialect_of
from adk_secure_sessions.db.protocol import Conflict, with_retries
from adk_secure_sessions.errors import ConfigurationError, DatabaseError
from adk_secure_sessions.maintenance import Database, Progress
from adk_secure_sessions.maintenance.vacuum import rewrite_tables
from adk_secure_sessions.migration.adk_queries import ADK_TABLES, AdkQueries
from adk_secure_sessions.migration.adk_tables import AdkTables
from adk_secure_sessions.migration.compare import Comparison, ComparisonRun
from adk_secure_sessions.migration.sources import EVERYTHING, Source, Unreadable
from adk_secure_sessions.results import Result, counter


@dataclass
class SourceErasure(Result):
    """The result of `erase_source`.

    Attributes:
        comparison: The comparison of the source with its copy.
        sessions: The number of sessions that were deleted or, in a dry run, would be deleted.
        events: The number of their events.
        states: The number of the states of users and apps.
        source_changed: Whether nothing was deleted, because the source has changed since the
            comparison.
        obstacles: The reasons why the bytes of deleted rows could not be removed from the files of
            the database.
    """

    comparison: Comparison
    sessions: int = counter("session", "deleted in the source", is_change=True)
    events: int = counter("event", "deleted in the source", is_change=True)
    states: int = counter("state", "deleted in the source", is_change=True)
    source_changed: bool = False
    obstacles: tuple[str, ...] = ()

    @property
    def bad(self) -> int:
        return self.comparison.bad

    def lines(self, dry_run: bool = False) -> Iterator[str]:
        yield from self.comparison.lines(dry_run)
        yield from super().lines(dry_run)

    def extra_lines(self, dry_run: bool) -> Iterator[str]:
        if self.source_changed:
            yield (
                "nothing was deleted, because the source has changed since it was compared: end "
                "every process that writes to it, then copy and compare again"
            )
        elif not self.comparison.all_equal:
            yield "nothing was deleted"
        elif not dry_run:
            for obstacle in self.obstacles:
                yield f"freed space was not overwritten: {obstacle}"
            if not self.obstacles:
                yield "the free space of the source holds no deleted values"
            yield (
                "not erased, because no command can reach them: backups, replicas, WAL archives "
                "and binary logs, copies of files, snapshots of disks, and what the disk keeps of "
                "overwritten blocks"
            )

    @property
    def succeeded(self) -> bool:
        """Whether everything was deleted, and the bytes of the rows removed.

        After a dry run, whether both sides are equal.
        """
        return self.comparison.all_equal and not self.source_changed and not self.obstacles


@audited_command
async def erase_source(
    source: Source,
    db: Database,
    *,
    dry_run: bool = False,
    show_ids: bool = False,
    progress: Progress | None = None,
) -> SourceErasure:
    """Compare *source* with its copy in *db*; if all is equal, delete *source*'s rows.

    One transaction locks the tables, and deletes all sessions, events and states.  If a session or
    state has changed since the comparison, nothing is deleted.  Afterwards, the bytes of the
    deleted rows are removed from the files of the database, as far as the database can do that: see
    docs/migrate.md.  The tables themselves are kept.

    If a run is interrupted, call this function again.

    Args:
        source: An `AdkTables` or a `Package1xTables`.
        dry_run: Compare, but delete nothing.

    Raises:
        ConfigurationError: *source* is neither an `AdkTables` nor a `Package1xTables`.
        DatabaseError: It is unknown whether the rows were deleted: the connection was lost, and
            the source was written to since.
    """
    if not isinstance(source, AdkTables):
        raise ConfigurationError(
            f"only tables of google-adk can be erased, and the source is {source.description}: "
            "delete it with its own tools"
        )
    run = ComparisonRun(source, db, EVERYTHING, show_ids=show_ids)
    comparison = await run.run(progress, stores_mark=not dry_run)
    if not comparison.all_equal:
        return SourceErasure(comparison)
    if dry_run:
        return SourceErasure(comparison, comparison.sessions, comparison.events, comparison.states)
    # After the deletion, the copies in *db* may be the only ones.  If this mark is stored, a later
    # `migrate` deletes no copy and replaces no state, and it replaces a session only by a version
    # that begins with all copied events.
    # An empty source is perhaps the wrong one, and ends no migration.
    imports, ends_migration = db.imports, comparison.mark_stored
    has_stored_erased_mark = ends_migration and await imports.store_mark(source_is_erased=True)
    queries, executor = await source.queries(), source.open_writer()
    # Also those of attempts whose connection was lost: they may have been committed.
    deleted_counts: list[tuple[int, int, int]] = []

    def delete(connection: sa.Connection) -> bool:
        is_unchanged = _lock_and_compare(queries, run, connection)
        if is_unchanged:
            deleted_counts.append(queries.delete_all(connection))
        return is_unchanged

    async def attempt() -> bool:
        number_before = len(deleted_counts)
        try:
            return await executor.run_sync(delete)
        except Conflict:  # this attempt was rolled back
            del deleted_counts[number_before:]
            raise

    try:
        is_deleted = await with_retries(attempt, writes=True)
        obstacles = await rewrite_tables(db, executor, ADK_TABLES) if is_deleted else []
    finally:
        await executor.close()
        if deleted_counts and ends_migration:
            # Another run at the same time may have deleted nothing, and replaced the mark.
            await imports.store_mark(source_is_erased=True)
        elif has_stored_erased_mark:
            await imports.withdraw_mark(source_is_kept=True)
    if not is_deleted:
        comparison.all_equal = comparison.mark_stored = False
        comparison.mark_withdrawn = await imports.withdraw_mark()
        if deleted_counts:
            raise DatabaseError(
                "an attempt to delete the source was interrupted, and somebody has written to it "
                "since, so its rows may have been deleted or not: look at the source, and end "
                "every process that writes to it"
            )
        return SourceErasure(comparison, source_changed=True)
    # The attempt after a committed one finds no rows.
    return SourceErasure(comparison, *max(deleted_counts), obstacles=tuple(obstacles))


def _lock_and_compare(queries: AdkQueries, run: ComparisonRun, connection: sa.Connection) -> bool:
    """Lock the tables, and return whether all sessions and states were compared in this version."""
    with dialect_of(connection).decoding(connection, bytes):
        queries.lock_tables(connection)
        versions = queries.session_versions(connection)
        if not all(version in run.scan.processed_versions for version in versions):
            return False
        for rows in queries.all_states(connection):
            for ids, state in queries.convert_states(rows).items():
                if isinstance(state, Unreadable) or (*ids, state) not in run.equal_states:
                    return False
        return True
