"""Decrypt sessions into google-adk's own tables.  Everything that is written is plaintext."""

import time
from collections.abc import Mapping

from adk_secure_sessions.audit import command
from adk_secure_sessions.formats.states import JsonObject
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.progress import Progress
from adk_secure_sessions.migration.adk_target import (
    MISSING,
    AdkTarget,
    SessionRows,
    UnsuitableSession,
)
from adk_secure_sessions.migration.export_reader import (
    Export,
    ExportReader,
    Ids,
    StopExport,
    ids_of,
)
from adk_secure_sessions.migration.sources import SessionContent, SourceSession


@command
async def export_to_adk(
    db: Database,
    target: AdkTarget,
    *,
    app_name: str | None = None,
    user_id: str | None = None,
    skip_bad: bool = False,
    verify: bool = False,
    progress: Progress | None = None,
) -> Export:
    """Decrypt all sessions into a database that google-adk's `DatabaseSessionService` reads.

    The tables have google-adk's schema v1, and google-adk's own code creates them.  This function
    only adds rows.  Each session is written in whole or not at all, so an interrupted run can be
    repeated: sessions that the target has with the same content are skipped.  A new SQLite file can
    be read only by its owner.  Expired sessions, artifacts and memory are not exported.

    Args:
        db: The database to read, with every backend whose records it may contain.
        target: The database to write, on SQLite, PostgreSQL or MariaDB (MySQL is not tested).
        app_name: Export only sessions of this app.
        user_id: Export only sessions of the users with this id.
        skip_bad: Continue after a session or state that cannot be exported.  If False, the run
            stops.  Sessions that were written before stay in the target.
        verify: Afterwards, read both databases again and compare all sessions field by field.
        progress: Called with the number of sessions done and the number of all sessions; with
            *verify*, each session counts twice.

    Raises:
        ConfigurationError: One of the databases cannot be used.
        WrongKeyError: The root keys do not decrypt the keyring.
        DatabaseError: One of the databases raised an error.
    """
    began = time.monotonic()
    reader = await ExportReader.of(db, app_name, user_id, skip_bad, progress, 2 if verify else 1)
    run = _ToAdk(reader, target)
    stopped = False
    try:
        await target.open()
        await run.write_sessions()
        await run.write_states()
        if verify:
            await run.compare()
    except StopExport:
        stopped = True
    reader.meter.finish()
    return Export(
        sessions=run.sessions,
        events=run.events,
        unchanged=run.unchanged,
        states=run.states,
        bad=reader.bad,
        stopped=stopped,
        verified=run.verified if verify else None,
        differences=run.differences,
        extra=run.extra if verify else None,
        problems=tuple(reader.problems),
        seconds=time.monotonic() - began,
    )


class _ToAdk:
    """One run of `export_to_adk`."""

    def __init__(self, reader: ExportReader, target: AdkTarget) -> None:
        self.sessions = self.events = self.unchanged = self.states = 0
        self.verified = self.differences = self.extra = 0
        self._reader = reader
        self._target = target

    async def write_sessions(self) -> None:
        async for batch in self._reader.sessions():
            if batch:
                await self._write({ids_of(one): (one, content) for one, content in batch.items()})

    async def write_states(self) -> None:
        """Write the states of users and of apps, after all sessions.

        google-adk needs a row of state for each user and each app, even if the state is empty.
        """
        async for app_name, user_id, state in self._reader.user_states():
            await self._write_state((app_name, user_id), state)
        async for app_name, state in self._reader.app_states():
            await self._write_state((app_name,), state)

    async def compare(self) -> None:
        """Read both databases again, compare all sessions and states, and report differences."""
        found = 0
        async for batch in self._reader.sessions(reports=False):
            contents = {ids_of(one): content for one, content in batch.items()}
            for ids, difference in (await self._target.differences(contents)).items():
                self.verified += 1
                found += difference != MISSING
                await self._report(("session", *ids), difference)
        async for app_name, user_id, state in self._reader.user_states(reports=False):
            difference = await self._target.state_difference((app_name, user_id), state)
            await self._report(("user", app_name, user_id), difference)
        async for app_name, state in self._reader.app_states(reports=False):
            difference = await self._target.state_difference((app_name,), state)
            await self._report(("app", app_name), difference)
        stored = await self._target.count(self._reader.app_name, self._reader.user_id)
        self.extra = max(stored - found, 0)

    async def _report(self, who: tuple[str, ...], difference: str | None) -> None:
        if difference is not None:
            self.differences += 1
            await self._reader.report(who, difference)

    async def _write_state(self, owner: tuple[str, ...], state: JsonObject) -> None:
        reason = None
        try:
            if await self._target.insert_state(owner, state):
                self.states += 1
        except UnsuitableSession as error:
            reason = str(error)
        if reason is not None:
            await self._reader.reject(("app" if len(owner) == 1 else "user", *owner), reason)

    async def _write(self, batch: Mapping[Ids, tuple[SourceSession, SessionContent]]) -> None:
        """Write the sessions that the target does not have; compare the others."""
        failed: dict[Ids, str] = {}
        suitable: dict[Ids, SessionRows] = {}
        for ids, (session, content) in batch.items():
            try:
                suitable[ids] = self._target.rows_of(session, content)
            except UnsuitableSession as error:
                failed[ids] = str(error)
        known = await self._target.existing(suitable)
        new = [rows for ids, rows in suitable.items() if ids not in known]
        rejected = await self._target.insert(new)
        for rows in new:
            if rows.ids not in rejected:
                self.sessions += 1
                self.events += len(rows.events)
        # If the connection was lost after the commit, the repeated INSERT is rejected, although the
        # sessions are stored.  So compare the rejected sessions, too.
        present = {ids: batch[ids][1] for ids in (*known, *rejected)}
        for ids, difference in (await self._target.differences(present)).items():
            if difference is None:
                self.unchanged += 1
            elif ids in known:
                failed[ids] = f"the target has another session with its ids: {difference}"
            else:
                failed[ids] = rejected[ids]
        for ids, reason in failed.items():
            await self._reader.reject(("session", *ids), reason)
