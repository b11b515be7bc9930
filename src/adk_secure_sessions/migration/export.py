"""Decrypt sessions into google-adk's own tables.  Everything that is written is plaintext."""

import time
from collections.abc import Mapping
from typing import NamedTuple

import sqlalchemy as sa

from adk_secure_sessions.formats.states import JsonObject
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.engine import Progress
from adk_secure_sessions.migration.adk_target import (
    MISSING,
    AdkTarget,
    SessionRows,
    UnsuitableSession,
)
from adk_secure_sessions.migration.export_reader import (
    ExportReader,
    Ids,
    Refusal,
    StopExport,
    ids_of,
)
from adk_secure_sessions.migration.sources import SessionContent, SourceSession


class AdkExport(NamedTuple):
    """The result of `export_to_adk`.

    Attributes:
        sessions: How many sessions were written.
        events: How many events these sessions have.
        unchanged: How many sessions the target had already, with the same content.
        states: How many states of apps and users were written.
        bad: How many sessions and states were not exported: they cannot be decrypted, google-adk's
            database cannot hold them, or the target has other content under their ids.
        stopped: Whether the run stopped at the first of these.
        verified: How many sessions were compared field by field after the export; None without
            `verify`.
        differences: How many of these sessions, and of the states, differ in the target.
        extra: How many sessions only the target has; None without `verify`.
        refused: The first 1000 sessions and states that are bad or differ.
        seconds: How long the run took.
    """

    sessions: int
    events: int
    unchanged: int
    states: int
    bad: int
    stopped: bool
    verified: int | None
    differences: int
    extra: int | None
    refused: tuple[Refusal, ...]
    seconds: float

    @property
    def is_complete(self) -> bool:
        """Whether the target has everything that was to be exported, and nothing else."""
        return not (self.bad or self.differences or self.extra)


async def export_to_adk(
    db: Database,
    target_url: str | sa.URL,
    *,
    app_name: str | None = None,
    user_id: str | None = None,
    skip_bad: bool = False,
    verify: bool = False,
    progress: Progress | None = None,
) -> AdkExport:
    """Decrypt all sessions into a database that google-adk's `DatabaseSessionService` reads.

    The tables have schema v1, and google-adk's own code creates them.  The function only adds rows.
    Each session is written in whole or not at all, so an interrupted run can be repeated: sessions
    that the target has with the same content are skipped.  A new SQLite file can be read only by
    its owner.  Expired sessions, artifacts and memory are not exported.

    Args:
        db: The database to read, with every backend whose records it may contain.
        target_url: The database to write, on SQLite, PostgreSQL, MySQL or MariaDB.
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
    target = AdkTarget(target_url)
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
    finally:
        await target.close()
    reader.meter.finish()
    return AdkExport(
        run.sessions,
        run.events,
        run.unchanged,
        run.states,
        reader.bad,
        stopped,
        run.verified if verify else None,
        run.differences,
        run.extra if verify else None,
        tuple(reader.refused),
        time.monotonic() - began,
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

        google-adk needs a state, which may be empty, for each user and each app.
        """
        async for app_name, user_id, state in self._reader.user_states():
            await self._write_state((app_name, user_id), state)
        async for app_name, state in self._reader.app_states():
            await self._write_state((app_name,), state)

    async def compare(self) -> None:
        """Read both databases, and compare all fields."""
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
            await self._reader.list(who, difference)

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
        """Write the sessions that the target does not have; check the others."""
        known = await self._target.existing(batch)
        rejected: dict[Ids, str] = {}
        new: list[SessionRows] = []
        for ids, (session, content) in batch.items():
            if ids not in known:
                try:
                    new.append(self._target.rows_of(session, content))
                except UnsuitableSession as error:
                    rejected[ids] = str(error)
        refused = await self._target.insert(new)
        # A connection may have been lost after a commit.  So compare what is there already.
        present = {ids: batch[ids][1] for ids in (*known, *refused)}
        for ids, difference in (await self._target.differences(present)).items():
            if difference is None:
                self.unchanged += 1
                refused.pop(ids, None)
            elif ids in known:
                rejected[ids] = f"the target has another session with its ids: {difference}"
        for rows in new:
            if rows.ids not in refused:
                self.sessions += 1
                self.events += len(rows.events)
        for ids, reason in (rejected | refused).items():
            await self._reader.reject(("session", *ids), reason)
