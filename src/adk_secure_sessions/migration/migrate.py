"""Copy sessions and states from a source into an encrypted database."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from adk_secure_sessions.audit import audited_command
from adk_secure_sessions.concurrency import in_groups
from adk_secure_sessions.db.dialects import dialect_of
from adk_secure_sessions.errors import ConfigurationError, DecryptionError
from adk_secure_sessions.formats.times import lifetime_of
from adk_secure_sessions.maintenance import Database, Progress, init
from adk_secure_sessions.maintenance.progress import Meter
from adk_secure_sessions.migration.compare import is_same_state, session_difference
from adk_secure_sessions.migration.encrypted_source import owner_state, session_content
from adk_secure_sessions.migration.findings import Finding, Findings, StopAtBad
from adk_secure_sessions.migration.source_scan import (
    CONFLICT_REASONS,
    SessionEntry,
    SourceScan,
    StateEntry,
    undecryptable_reason,
)
from adk_secure_sessions.migration.sources import (
    EVERYTHING,
    Ids,
    ListedSession,
    Selection,
    SessionContent,
    Source,
    Unreadable,
)
from adk_secure_sessions.results import Result, counter, listing
from adk_secure_sessions.storage.features.imports import ImportStatus

# The number of imports that run at the same time.  SQLite commits several imports together.  On a
# server, each import uses a connection of the pool, which has 10.
_IMPORTS_AT_ONCE, _IMPORTS_ON_SQLITE = 8, 32

_STATUSES_TO_READ = (ImportStatus.NEW, ImportStatus.OUTDATED)


@dataclass
class Migration(Result):
    """The result of `migrate`; after a dry run, the expected result.

    Attributes:
        copied: How many sessions were copied, because they are new or have changed in the source.
        events: How many events these sessions have.
        states: How many states of users and apps were copied.
        expired: How many of the copied sessions have expired already, because their last update was
            longer ago than *expires_after*.  No service returns them.
        unchanged: How many sessions were left as they are: they have not changed in the source
            since they were copied.  Services may have continued or deleted them in the target.
        conflicts: How many sessions and states were left unchanged for one of these reasons: both
            sides have changed since the copy; the source has changed, and the target has deleted
            the copy; or the target has one with the same ids that was never copied.
        bad: How many sessions and states could not be read, or exceed a limit.  They include copied
            sessions that are gone from the source and whose ids the target cannot decrypt.
        gone: How many copied sessions are no longer in the source, although it has their app,
            without those that have expired or that services have continued.  0 if only recent
            sessions were read, or if ids in the source cannot be decrypted.
        changed_in_source: How many sessions were created or changed in the source while this run
            copied it: the next run copies them.  0 if the run stopped.
        deleted_gone: Whether the sessions in `gone` were or, in a dry run, would be deleted in the
            target.
        has_artifacts_or_memory: Whether an encrypted source has artifacts or memory.  They are not
            copied.
        stopped: Whether the run stopped at a session or state that could not be read.
        findings: The first 1000 sessions and states that are bad, gone or in conflict.
        seconds: How long the run took.
    """

    copied: int = counter("session", "copied", shows_zero=True, is_change=True)
    events: int = counter("event", "copied", shows_zero=True, is_change=True)
    states: int = counter("state", "copied", shows_zero=True, is_change=True)
    expired: int = counter("session", "of them have expired already, so no service returns them")
    unchanged: int = counter("session", "not changed in the source since they were copied")
    conflicts: int = counter("item", "in conflict, and left unchanged", is_failure=True)
    bad: int = counter("item", "cannot be read, and not copied", is_failure=True)
    gone: int = counter("session", "copied before, and no longer in the source")
    changed_in_source: int = counter("session", "changed in the source during this run")
    deleted_gone: bool = False
    has_artifacts_or_memory: bool = False
    stopped: bool = False
    findings: tuple[Finding, ...] = listing("conflicts", "bad", "gone")
    seconds: float = 0.0

    @property
    def succeeded(self) -> bool:
        """Whether the run has ended, and left no session or state that is bad, in conflict or gone.

        If the source is in use, sessions that have changed since may nevertheless be missing:
        `changed_in_source` counts them.
        """
        gone = self.gone and not self.deleted_gone
        return super().succeeded and not (self.stopped or gone)

    def extra_lines(self, dry_run: bool) -> Iterator[str]:
        if self.events and not dry_run:
            speed = self.events / max(self.seconds, 1e-9)
            yield f"in {self.seconds:.1f} s ({speed:,.0f} events/s)"
        if self.gone and self.deleted_gone:
            were = "would be" if dry_run else "were"
            yield f"the sessions that are no longer in the source {were} deleted in the target"
        if self.has_artifacts_or_memory:
            yield "the source also has artifacts or memories of users, which are not copied"
        if self.stopped:
            yield (
                "stopped: repair this row in the source, or give --skip-bad; then run this again, "
                "which continues"
            )
        elif self.changed_in_source:
            yield "the source is in use: run this again to copy what has changed"
        elif not (self.copied or self.unchanged or self.bad or self.conflicts):
            yield "the source has no such session: check --from and, if given, --app and --since"
        elif not (dry_run or self.bad or self.conflicts):
            yield "the copy is up to date; next: `migrate compare` compares both sides"


@audited_command
async def migrate(
    source: Source,
    db: Database,
    *,
    selection: Selection = EVERYTHING,
    dry_run: bool = False,
    skip_bad: bool = False,
    delete_gone: bool = False,
    show_ids: bool = False,
    progress: Progress | None = None,
    events_per_second: float | None = None,
    expires_after: timedelta | None = None,
) -> Migration:
    """Copy sessions from *source* into *db*, and then the states of users and apps.

    A second run copies only sessions and states that are new or have changed in the source.  No run
    overwrites a session or state that a service has changed in the target.  If a run was
    interrupted, call this function again: it skips sessions that were copied.  The source is only
    read; but if it is encrypted and has an audit trail, each run, also a dry run, stores records
    there.  Tables and keys of the target that do not exist are created, except in a dry run.

    Args:
        dry_run: Read the sessions that would be copied and report them, but change nothing.
        delete_gone: Delete copied sessions that are no longer in the source, although it has their
            app, unless services have written to them.  Copy each app from only one source.
        events_per_second: The maximum number of events to copy per second.
        expires_after: How long after its last update a copied session expires that does not expire
            in the source.

    Raises:
        ConfigurationError: *expires_after* is not a positive time.  Or *delete_gone* is given
            together with a selection that has `since`, for a source without sessions, for a
            `ServiceSource` without a selection of one app, after a comparison has ended the
            migration, or for a source with sessions whose ids cannot be decrypted.
        TamperedError: A row that an import reads was modified.  With *skip_bad*, this is a finding
            of the session or state, unless its row of `secure_migrated` was modified.
    """
    is_part = not (source.has_all_apps or selection.app_name)
    if delete_gone and (is_part or selection.since is not None):
        raise ConfigurationError(
            "--delete-gone (delete_gone) cannot be combined with --since (since), or with a "
            "ServiceSource without app_name: sessions that were not read are not gone"
        )
    lifetime, findings = lifetime_of(expires_after), Findings(with_ids=show_ids)
    number = await source.count(selection)
    if not dry_run:
        await init(db)
    index_master = None if dry_run and await db.is_new() else (await db.keyring()).index_master
    if delete_gone and index_master is not None and await db.imports.migration_mark():
        raise ConfigurationError(
            "a comparison has shown that everything was copied, so sessions that the source no "
            "longer has are not deleted: omit --delete-gone (delete_gone)"
        )
    result = Migration(deleted_gone=delete_gone)
    run = _MigrationRun(
        result,
        SourceScan(source, db, index_master, selection, _STATUSES_TO_READ),
        db,
        findings,
        Meter(progress, number),
        Meter(rate=events_per_second),
        writes=not dry_run,
        skip_bad=skip_bad or dry_run,
        lifetime=lifetime,
    )
    try:
        await run.copy()
        await run.rescan(delete_gone=delete_gone)
        run.meter.finish()
    except StopAtBad:
        result.stopped = True
    result.has_artifacts_or_memory = await source.has_artifacts_or_memory()
    return findings.copy_into(result)


@dataclass
class _MigrationRun:
    """One run of `migrate`.  In a dry run, *writes* is False, and the target may have no keys."""

    result: Migration
    scan: SourceScan
    target: Database
    findings: Findings
    meter: Meter
    throttle: Meter  # of the events per second
    writes: bool
    skip_bad: bool
    lifetime: int | None  # microseconds
    source_is_erased: bool = False  # whether `erase_source` may have deleted rows of the source

    async def copy(self) -> None:
        number = _IMPORTS_AT_ONCE
        if self.scan.index_master is not None:
            mark = await self.target.imports.migration_mark()
            self.source_is_erased = mark is not None and mark.source_is_erased
            dialect = await self.target.runner.data_db.run_sync(dialect_of, commit=False)
            number = _IMPORTS_AT_ONCE if dialect.is_server else _IMPORTS_ON_SQLITE
        async for sessions in self.scan.sessions():
            # The first session of each app and of each user is copied before the others.  Imports
            # that create an owner's data key at the same time would store all their keys in a key
            # database, and use only one.
            due = {one.ids: one for one in sessions if isinstance(one.content, SessionContent)}
            for length in 1, 2:
                firsts = {ids[:length]: ids for ids in reversed(due)}.values()
                await in_groups(number, self._copy, [due.pop(ids) for ids in firsts])
            unread = [one for one in sessions if not isinstance(one.content, SessionContent)]
            await in_groups(number, self._copy, [*due.values(), *unread])
        async for batch in self.scan.states():
            await in_groups(number, self._copy, batch)

    async def _copy(self, entry: SessionEntry | StateEntry) -> None:
        result, status, content = self.result, entry.status, entry.content
        if isinstance(entry, SessionEntry):
            self.scan.processed_versions.add(entry.session)
        try:
            if isinstance(entry, SessionEntry) and isinstance(content, SessionContent):
                content = content.with_lifetime(self.lifetime)
                await self.throttle.advance(len(content.events))
                status = await self._import_session(entry, content)
            elif isinstance(content, bytes) and (status.is_due or status in CONFLICT_REASONS):
                status = await self._import_state(entry.ids, status, content)
        except DecryptionError as error:
            if not self.skip_bad:
                raise
            content = Unreadable(undecryptable_reason(error))
        if isinstance(content, Unreadable):
            result.bad += 1
            self.findings.add(entry.tag, content.reason, *entry.ids)
            if not self.skip_bad:
                raise StopAtBad
        elif status in CONFLICT_REASONS:
            result.conflicts += 1
            self.findings.add(entry.tag, CONFLICT_REASONS[status], *entry.ids)
        elif not isinstance(entry, SessionEntry):
            result.states += status.is_due
        elif isinstance(content, SessionContent) and status.is_due:
            result.copied += 1
            result.events += len(content.events)
            result.expired += content.has_expired
        else:
            result.unchanged += 1
        if isinstance(entry, SessionEntry):
            await self.meter.advance()

    async def _import_session(self, entry: SessionEntry, content: SessionContent) -> ImportStatus:
        is_outdated = entry.status is ImportStatus.OUTDATED
        if is_outdated and not await self._may_replace_copy(entry, content):
            return ImportStatus.CONFLICT
        if not self.writes:
            return entry.status
        return await self.target.imports.import_session(
            *entry.session.ids,
            **content._asdict(),
            source_etag=entry.session.etag,
            replace=is_outdated,
        )

    async def _may_replace_copy(self, entry: SessionEntry, content: SessionContent) -> bool:
        """Return False if the source was erased, and *content* lacks events of the copy.

        The copy may then be the only one, and somebody may since have created another session with
        the same ids in the source.  Such a session must not replace the copy.
        """
        copy = await session_content(self.target, *entry.ids) if self.source_is_erased else None
        if copy is None:
            return True
        number = len(copy.events)
        beginning = content._replace(events=content.events[:number])
        return not session_difference(beginning, copy, event_count=number)

    async def _import_state(self, ids: Ids, status: ImportStatus, state: bytes) -> ImportStatus:
        """Import *state*; a dry run predicts the result: it compares states, not versions."""
        if self.writes:
            return await self.target.imports.import_state(
                ids, state, replace=not self.source_is_erased
            )
        if self.scan.index_master is None:
            return status
        stored = await owner_state(self.target, *ids)
        if status is ImportStatus.NEW:
            is_same = is_same_state(state, stored)
            return ImportStatus.NEW if is_same or stored == b"{}" else ImportStatus.SAME_ID
        copy = (await self.target.imports.rows_for([ids]))[ids]
        if copy.row.is_tombstone or copy.current_version is None:
            return ImportStatus.DELETED
        can_replace = copy.has_state(stored) and not self.source_is_erased
        return ImportStatus.OUTDATED if can_replace else ImportStatus.CONFLICT

    async def rescan(self, *, delete_gone: bool) -> None:
        """Count the sessions that have changed, and list or delete the copies of those that are
        gone.
        """
        async for found in self.scan.rescan():
            if isinstance(found, ListedSession):
                self.result.changed_in_source += 1
                continue
            ids, tag, reason, row = found
            if row is None:
                self.result.bad += 1
            elif delete_gone and not self.scan.processed_versions:
                raise ConfigurationError(
                    "the source has no sessions, although sessions were copied before: nothing was "
                    "deleted; check the URL of the source"
                )
            elif (
                delete_gone and self.writes and not await self.target.imports.delete_copy(ids, row)
            ):
                continue
            else:
                self.result.gone += 1
            self.findings.add(tag, reason, *ids)
        if delete_gone and self.scan.has_unreadable_ids:
            raise ConfigurationError(
                "the source has sessions whose ids cannot be decrypted, so any copy may be a copy "
                "of them: nothing was deleted; check the root keys and the backends of the source, "
                "or omit --delete-gone (delete_gone)"
            )
