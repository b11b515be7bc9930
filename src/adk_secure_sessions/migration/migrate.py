"""Copy sessions and states from a source into an encrypted database."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import NamedTuple

from adk_secure_sessions.audit import command
from adk_secure_sessions.db.dialects import dialect_of
from adk_secure_sessions.errors import ConfigurationError, SecureSessionError
from adk_secure_sessions.formats import states
from adk_secure_sessions.maintenance import Database, Progress, init
from adk_secure_sessions.maintenance.progress import Meter
from adk_secure_sessions.migration.pipeline import (
    TOO_LARGE,
    Chunks,
    Finding,
    Findings,
    Fingerprints,
    States,
    Workers,
    by_owner,
    encode_states,
    packed,
    size_of,
)
from adk_secure_sessions.migration.sources import (
    Scope,
    SessionContent,
    Source,
    SourceSession,
    UnreadableSession,
)
from adk_secure_sessions.migration.target import Copy, Entry, Target
from adk_secure_sessions.storage.features.imports import ImportStatus

# The number of imports that run at the same time.  SQLite commits several imports together.  On a
# server, each import uses a connection of the pool, which has 10.
_IMPORTS, _IMPORTS_ON_SQLITE = 8, 32
_IMPORT_BYTES = 16 * 2**20  # the maximum size of the contents that imports hold at the same time
# A dry run measures the speed with the first sessions, until one of these limits is reached.
_EVERYTHING = Scope()
_KNOWN_OWNERS = 10_000  # the maximum number of apps and users that `_Owners` remembers

_REASONS = {
    ImportStatus.CONFLICT: "both sides have changed or deleted it since it was copied",
    ImportStatus.SAME_ID: "the target has a session with the same ids that was not copied",
}
_GONE = "it was copied before, and the source no longer has it"
_TIME = "one of its times, or the time of one of its events, is not a possible time"
_STATE_CONFLICT = "the target has another state, which was changed after the copy, or never copied"


class Migration(NamedTuple):
    """The result of `migrate`; after a dry run, the expected result.

    Each session of the source is counted once: as `copied`, `updated`, `unchanged`, `moved_on`,
    `conflicts`, `deleted` or `bad`.

    Attributes:
        sessions: How many sessions of the source were examined.
        copied: How many sessions were copied for the first time.
        updated: How many sessions were copied again, because they had changed in the source.
        unchanged: How many sessions had not changed since they were copied.
        moved_on: How many copied sessions have events that services appended in the target, and
            have not changed in the source.  They are never overwritten.
        conflicts: How many sessions and states have changed in the source since they were copied,
            and were also changed or deleted in the target; or have the ids of a session or state of
            the target that was never copied.  They were left unchanged.
        deleted: How many sessions were deleted in the target.  They are not copied again.
        bad: How many sessions and states could not be read, or exceed a limit.
        gone: How many copied sessions, except expired ones, the source no longer has; None if that
            is unknown, because only recent sessions were read.
        removed: How many of the sessions in `gone` were deleted in the target.
        events: How many events were copied.
        states: How many states of users and apps were copied.
        others: How many artifacts and users' memories an encrypted source has.  They are not
            copied.
        behind: How many sessions were created or changed in the source while this run copied it:
            the next run copies them.  None after a dry run, or if the run stopped.
        stopped: Whether the run stopped at a session or state that could not be read.
        findings: The first 1000 sessions and states that are bad, gone or in conflict.
        seconds: How long the run took.
    """

    sessions: int
    copied: int
    updated: int
    unchanged: int
    moved_on: int
    conflicts: int
    deleted: int
    bad: int
    gone: int | None
    removed: int
    events: int
    states: int
    others: int
    behind: int | None
    stopped: bool
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def is_complete(self) -> bool:
        """Whether the run has ended, and left no session or state that is bad, in conflict or gone.

        If the source is in use, sessions that have changed since may nevertheless be missing:
        `behind` counts them.
        """
        return not (self.stopped or self.bad or self.conflicts or (self.gone or 0) > self.removed)


@command
async def migrate(
    source: Source,
    db: Database,
    *,
    scope: Scope = _EVERYTHING,
    dry_run: bool = False,
    skip_bad: bool = False,
    delete_gone: bool = False,
    show_ids: bool = False,
    progress: Progress | None = None,
    events_per_second: float | None = None,
) -> Migration:
    """Copy sessions from *source* into *db*, and then the states of users and apps.

    A second run copies only sessions and states that are new or have changed in the source.  No run
    overwrites a session or state that a service has changed in the target.  If a run was
    interrupted, call this function again: it skips sessions that were copied.  The source is only
    read.
    Tables and keys of the target that do not exist are created, except in a dry run.

    Args:
        source: The source.
        db: The target, with every backend whose records it may contain.
        scope: Which sessions to copy.
        dry_run: Read the sessions that would be copied, and report what would be done, but change
            nothing.
        skip_bad: Continue after a session or state that cannot be read.  If False, the run stops.
            Sessions that were copied before stay copied.
        delete_gone: Delete copied sessions that the source no longer has, unless services have
            written to them.
        show_ids: Put readable ids into the findings, not only blind indexes.
        progress: Called with the number of sessions and events done, and the number of all.
        events_per_second: The maximum number of events to copy per second.

    Raises:
        ConfigurationError: The source or the target cannot be used.  Or *delete_gone* is given
            together with a scope that has `since`, for a source without sessions, or after a
            comparison has ended the migration.
        WrongKeyError: The root keys do not decrypt the keyring.
        TamperedError: A row of `secure_migrated`, or another row that an import reads, was
            modified.
        DatabaseError: The source or the target raised an error.
    """
    if delete_gone and scope.since is not None:
        raise ConfigurationError(
            "delete_gone cannot be combined with since: sessions that were not read are not gone"
        )
    began = time.monotonic()
    total = await source.size(scope)
    target = None
    if not dry_run:
        await init(db)
    if not dry_run or not await db.is_new():
        target = await Target.of(db)
    if delete_gone and target is not None and await target.store.migration_is_complete():
        raise ConfigurationError(
            "a comparison has shown that everything was copied, so sessions that the source no "
            "longer has are not deleted: omit delete_gone"
        )
    meter = Meter(progress, total.sessions + total.events, None)
    options = Options(scope, dry_run, skip_bad or dry_run, delete_gone, show_ids)
    run = _Run(source, db, target, options, meter, Meter(None, 0, events_per_second))
    stopped = False
    try:
        await run.copy_sessions()
        await run.copy_states()
        await run.list_again()
    except _Stop:
        stopped = True
    meter.finish()
    others = (await source.others()).collections
    return run.result(stopped, time.monotonic() - began, others)


class Options(NamedTuple):
    """The arguments of `migrate` with the same names; in a dry run, *skip_bad* is always True."""

    scope: Scope
    dry_run: bool
    skip_bad: bool
    delete_gone: bool
    show_ids: bool


class _Stop(Exception):
    """A session or state cannot be copied, and `skip_bad` is False."""


class _Run:
    """One run of `migrate`.

    Args:
        source: The source.
        db: The database of the target.
        target: The target; None in a dry run if *db* has no tables yet.
        options: The arguments of `migrate`.
        meter: Reports the progress.
        limit: Limits the number of events per second.
    """

    def __init__(
        self,
        source: Source,
        db: Database,
        target: Target | None,
        options: Options,
        meter: Meter,
        limit: Meter,
    ) -> None:
        self._source = source
        self._db = db
        self._target = target
        self._options = options
        self._meter = meter
        self._limit = limit
        self._findings = Findings(with_ids=options.show_ids)
        self._found: Counter[ImportStatus] = Counter()
        self._owners = _Owners()
        # The sessions in the first listing of the source: their blind indexes, and their ids with
        # their versions.
        self._seen = Fingerprints()
        self._versions = Fingerprints()
        self._sessions = self._events = self._states = self._removed = self._behind = 0
        self._bad = self._conflicting_states = 0
        self._gone: int | None = None
        self._is_erased = False  # whether `erase_source` may have deleted rows of the source
        self._stopped = False

    def result(self, stopped: bool, seconds: float, others: int) -> Migration:
        found, dry_run = self._found, self._options.dry_run
        conflicts = (
            found[ImportStatus.CONFLICT] + found[ImportStatus.SAME_ID] + self._conflicting_states
        )
        return Migration(
            sessions=self._sessions,
            copied=found[ImportStatus.NEW],
            updated=found[ImportStatus.OLDER],
            unchanged=found[ImportStatus.UNCHANGED],
            moved_on=found[ImportStatus.MOVED_ON],
            conflicts=conflicts,
            deleted=found[ImportStatus.DELETED],
            bad=self._bad,
            gone=self._gone,
            removed=self._removed,
            events=self._events,
            states=self._states,
            others=others,
            behind=None if dry_run or stopped else self._behind,
            stopped=stopped,
            findings=tuple(self._findings.kept),
            seconds=seconds,
        )

    # --- sessions --------------------------------------------------------------------------------

    async def copy_sessions(self) -> None:
        """Copy the sessions that are new or have changed in the source."""
        if self._target is not None:
            self._is_erased = await self._target.store.source_is_erased()
        async with await self._workers() as workers:
            to_read = Chunks()
            async for listed in self._source.sessions(self._options.scope):
                changed = []
                for entry in await self._entries(listed):
                    self._sessions += 1
                    self._seen.add(entry.tag)
                    self._versions.add(packed(*entry.session))
                    if entry.found in (ImportStatus.NEW, ImportStatus.OLDER):
                        changed.append(entry)
                    else:
                        await self._leave(entry)
                for part in to_read.of(changed):
                    await self._copy(part, workers, to_read)
            await workers.finish()
            await self._stop_if_bad(workers)

    async def _workers(self) -> Workers:
        if self._target is None:
            return Workers(_IMPORTS, _IMPORT_BYTES)
        is_server = await self._db.executor.define(
            lambda made: dialect_of(made).is_server, commit=False
        )
        number = _IMPORTS if is_server else _IMPORTS_ON_SQLITE
        return Workers(number, _IMPORT_BYTES)

    async def _entries(self, listed: Sequence[SourceSession]) -> Sequence[Entry]:
        if self._target is None:
            return [Entry(session, b"", ImportStatus.NEW, 0) for session in listed]
        return await self._target.entries(listed)

    async def _leave(self, entry: Entry) -> None:
        """Count a session that this run does not copy, and list it if it is in conflict."""
        self._found[entry.found] += 1
        if entry.found in (ImportStatus.CONFLICT, ImportStatus.SAME_ID):
            self._findings.add(entry.tag, _REASONS[entry.found], *entry.session[:3])
        await self._meter.advance(1 + entry.copied_events)

    async def _copy(self, part: Sequence[Entry], workers: Workers, to_read: Chunks) -> None:
        """Read the sessions in *part*, and start to import them."""
        contents = await self._source.read([entry.session for entry in part])
        to_read.learn(
            [size_of(one) for one in contents.values() if isinstance(one, SessionContent)]
        )
        for entry in part:
            content = contents.get(entry.session)
            await self._stop_if_bad(workers)
            if content is None:  # it was deleted in the source after it was listed
                self._sessions -= 1
            elif isinstance(content, UnreadableSession):
                await self._report_bad(entry.tag, content.reason, *entry.session[:3])
                await self._stop_if_bad(workers)
            else:
                await self._limit.advance(len(content.events))
                await workers.start(self._import(entry, content), size_of(content))

    async def _import(self, entry: Entry, content: SessionContent) -> None:
        """Import one session."""
        who = entry.session[:3]
        try:
            state = states.encode(content.state)
        except ValueError:  # do not chain this error: its message names keys of the state
            state = None
        if state is None:
            await self._report_bad(entry.tag, TOO_LARGE, *who)
            return
        found = entry.found
        if (
            found is ImportStatus.OLDER
            and self._is_erased
            and not await self._has_copy(entry, content)
        ):
            found = ImportStatus.CONFLICT
        elif self._target is not None and not self._options.dry_run:
            done = None
            try:
                async with self._owners.of(*who[:2]):
                    done = await self._target.store.import_session(
                        *who,
                        state=state,
                        events=content.events,
                        created_at=content.created_at,
                        updated_at=content.updated_at,
                        source_version=entry.session.version,
                        replace=found is ImportStatus.OLDER,
                        expires_at=content.expires_at,
                    )
            except ValueError as error:
                if isinstance(error, SecureSessionError):
                    raise
            if done is None:
                await self._report_bad(entry.tag, _TIME, *who)
                return
            found = done
        if found in (ImportStatus.NEW, ImportStatus.OLDER):
            self._found[found] += 1
            self._events += len(content.events)
            await self._meter.advance(1 + len(content.events))
        else:
            await self._leave(entry._replace(found=found))

    async def _has_copy(self, entry: Entry, content: SessionContent) -> bool:
        """Return whether *content* contains all copied events, so that it may replace the copy.

        Also return True if there is no copy any more, so that nothing can be lost.

        If the source was erased, the copy may be the only one, and somebody may since have created
        another session with the same ids in the source.  Such a session must not replace the copy.
        """
        assert self._target is not None
        copy = await self._target.content(entry)
        if copy is None or copy.created_at != content.created_at:
            return copy is None
        return list(content.events[: len(copy.events)]) == list(copy.events)

    async def _report_bad(self, tag: bytes, reason: str, *ids: str) -> None:
        self._bad += 1
        self._findings.add(tag, reason, *ids)
        if not self._options.skip_bad:
            self._stopped = True
        await self._meter.advance()

    async def _stop_if_bad(self, workers: Workers) -> None:
        """If a bad session or state was found, wait for the running imports, and end the run.

        Raises:
            _Stop: A session or state cannot be copied, and `skip_bad` is False.
        """
        if self._stopped:
            await workers.finish()
            raise _Stop

    # --- states ----------------------------------------------------------------------------------

    async def copy_states(self) -> None:
        """Copy the states of users and then of apps that are new or have changed in the source."""
        scope = self._options.scope
        async with await self._workers() as workers:
            async for batch in by_owner(self._source.user_states(scope)):
                await self._copy_states(batch, workers)
        async with await self._workers() as workers:
            async for batch in by_owner(self._source.app_states(scope)):
                await self._copy_states(batch, workers)

    async def _copy_states(self, batch: States, workers: Workers) -> None:
        encoded, bad = encode_states(batch)
        found = dict.fromkeys(batch, (b"", ImportStatus.NEW))
        if self._target is not None:
            found = await self._target.states(encoded)
        for owner, reason in bad.items():
            await self._report_bad(found[owner][0], reason, *owner)
            await self._stop_if_bad(workers)
        for owner, data in encoded.items():
            tag, kind = found[owner]
            done = (ImportStatus.UNCHANGED, ImportStatus.MOVED_ON, ImportStatus.DELETED)
            if owner not in bad and kind not in done:
                await workers.start(self._import_state(owner, tag, data), len(data))

    async def _import_state(self, owner: tuple[str, ...], tag: bytes, data: bytes) -> None:
        if self._target is not None and not self._options.dry_run:
            app_name, user_id = owner[0], owner[1] if len(owner) > 1 else None
            async with self._owners.of(*owner):
                done = await self._target.store.import_state(
                    app_name, user_id, data, replace=not self._is_erased
                )
            if done in (ImportStatus.CONFLICT, ImportStatus.SAME_ID):
                self._conflicting_states += 1
                self._findings.add(tag, _STATE_CONFLICT, *owner)
                return
            if done not in (ImportStatus.NEW, ImportStatus.OLDER):
                return
        self._states += 1

    # --- after the copy --------------------------------------------------------------------------

    async def list_again(self) -> None:
        """List the sessions of the source a second time.

        Count those that are new or have changed since they were listed first.  Find the copied
        sessions that the source no longer has.
        """
        # Another run may copy a session that was created after the first listing.  Such a session
        # is in the second listing, so it is not reported as gone.
        missing = await self._not_seen()
        async for listed in self._source.sessions(self._options.scope):
            for one in listed:
                self._behind += packed(*one) not in self._versions
                if missing and self._target is not None:
                    missing.pop(self._target.tag(*one[:3]), None)
        if self._gone is not None:
            await self._report_gone(missing)

    async def _not_seen(self) -> dict[bytes, Copy]:
        """Return the copied sessions that the first listing did not have, by their tags.

        The result is empty if no session counts as gone: the target does not exist yet, only recent
        sessions are read, or the migration is complete.

        Raises:
            ConfigurationError: `delete_gone` is True, and the first listing had no sessions,
                although sessions were copied before.
        """
        missing: dict[bytes, Copy] = {}
        target, scope = self._target, self._options.scope
        if target is None or scope.since is not None or await target.store.migration_is_complete():
            return missing
        self._gone = 0
        async for copies in target.copies(scope.app_name):
            missing |= {one.tag: one for one in copies if one.tag not in self._seen}
        if missing and not self._seen and self._options.delete_gone:
            raise ConfigurationError(
                "the source has no sessions, although sessions were copied before: nothing was "
                "deleted; check the URL of the source"
            )
        return missing

    async def _report_gone(self, missing: Mapping[bytes, Copy]) -> None:
        """Count the sessions in *missing* and list them; if `delete_gone` is True, delete them."""
        options, target = self._options, self._target
        assert target is not None
        self._gone = 0
        for tag, copy in missing.items():
            ids: tuple[str, ...] = ("", "", "")
            if options.delete_gone or options.show_ids or copy.seems_expired:
                found = await target.located(copy)
                if found is None:
                    continue  # it was deleted in the target meanwhile, or has expired
                ids = found.ids
                if options.delete_gone and not options.dry_run:
                    self._removed += await target.delete(found)
            self._gone += 1
            self._findings.add(tag, _GONE, *ids)


class _Owners:
    """Lets the first import of each app and of each user run alone.

    The first import creates the row and the data key of the owner.  If several imports tried to
    create them at the same time, all except one would have to begin again.
    """

    def __init__(self) -> None:
        self._known: set[tuple[str, ...]] = set()
        self._locks: dict[tuple[str, ...], asyncio.Lock] = {}

    @contextlib.asynccontextmanager
    async def of(self, *ids: str) -> AsyncIterator[None]:
        """Guard a block of `async with` that imports something of an app or a user.

        The block waits while the first import of this app, or of this user, runs.

        Args:
            ids: The app name, and the user id unless the block imports the state of an app.
        """
        owners = [ids[: length + 1] for length in range(len(ids))]
        async with contextlib.AsyncExitStack() as stack:
            for owner in owners:
                if owner not in self._known:
                    lock = self._locks.setdefault(owner, asyncio.Lock())
                    await stack.enter_async_context(lock)
            yield
            if len(self._known) > _KNOWN_OWNERS:
                self._known.clear()
            self._known.update(owners)
        for owner in owners:
            self._locks.pop(owner, None)
