"""Delete sessions that have expired, or that have not been used for a long time."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import sqlalchemy as sa

from adk_secure_sessions.audit import audited_command
from adk_secure_sessions.errors import ConfigurationError, DecryptionError
from adk_secure_sessions.formats.times import time_ago, time_now
from adk_secure_sessions.maintenance.counts import select_count
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.problems import Problem, Problems
from adk_secure_sessions.maintenance.progress import Meter, Progress
from adk_secure_sessions.maintenance.row_scan import (
    SESSION_ROWS,
    flattened,
    is_stored,
    scan_sessions,
)
from adk_secure_sessions.results import Result, counter, listing, utc_text
from adk_secure_sessions.storage import writes
from adk_secure_sessions.storage.schema import IS_COLLECTION, StoredSession, sessions


@dataclass
class SessionPurge(Result):
    """The result of `purge_sessions`; after a dry run, the expected result.

    Attributes:
        deleted: How many sessions were deleted, with their events.  A dry run decrypts only ids.
        kept: How many sessions were old or had expired when they were read, but were updated or
            deleted by another process before this one could delete them.
        bad: How many old or expired sessions cannot be decrypted; they were left unchanged.
        problems: The first 1000 bad rows: rows of sessions, users, apps or data keys that prevent
            decrypting such a session.
        before: A session is old if its last event is older than this time, in microseconds since
            1970, UTC; None if only expired sessions were deleted.  The time was computed with the
            clock of this machine.
        is_unknown: Whether *app_name* was given, and there is no such app, or no such user in it.
    """

    deleted: int = counter("session", "deleted", shows_zero=True, is_change=True)
    kept: int = counter("session", "updated or deleted meanwhile")
    bad: int = counter("session", "cannot be decrypted, and kept", is_failure=True)
    problems: tuple[Problem, ...] = listing()
    before: int | None = None
    is_unknown: bool = False

    def extra_lines(self, dry_run: bool) -> Iterator[str]:
        is_old = "" if self.before is None else f" or were last used before {utc_text(self.before)}"
        yield f"such sessions have expired{is_old}"
        if self.is_unknown:
            yield "there is no such app or user"


@audited_command
async def purge_sessions(
    db: Database,
    older_than: timedelta | None = None,
    *,
    app_name: str | None = None,
    user_id: str | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    rows_per_second: float | None = None,
) -> SessionPurge:
    """Delete expired sessions, and sessions whose last event is older than *older_than*.

    The age of a session without events is the time since its creation.  Each session is deleted in
    a separate transaction, which checks its times again.  Users and apps keep
    their rows and states, even if they have no session left.

    Args:
        older_than: The minimum age of a session.  The age is the difference between the clock of
            this machine and the timestamp of the last event, which the application sets.  If None,
            only expired sessions are deleted.
        app_name: Delete only sessions of this app.
        user_id: Delete only sessions of the users with this id.
        progress: Counts old and expired sessions, of all apps and users.

    Raises:
        ConfigurationError: `older_than` is negative.
    """
    now, before, cutoff = time_now(), None, -(2**63)
    if older_than is not None:
        if older_than < timedelta():
            raise ConfigurationError("older_than must not be negative")
        before = cutoff = time_ago(older_than)

    def is_outdated(session: StoredSession) -> bool:
        return session.row.updated_at < cutoff or session.row.expires_at <= now

    await db.keyring()  # report a wrong key or a missing database before the query below runs
    times = {"before": cutoff, "now": now}
    ((total,),) = await db.runner.data_db.read(_NUMBER_OF_OUTDATED, times)
    meter = Meter(progress, int(total), rows_per_second)
    problems = Problems()
    is_unknown = app_name is not None and not await is_stored(db, app_name, user_id)
    result = SessionPurge(before=before, is_unknown=is_unknown)
    async for stored in flattened(scan_sessions(db, _OUTDATED_SESSIONS, **times)):
        await meter.advance()
        try:
            ids = stored.require_ids()
            if app_name not in (None, ids.app_name) or user_id not in (None, ids.user_id):
                continue
            deletion = writes.DeleteSession(await db.runner.identify(*ids), is_outdated)
            is_deleted = bool(dry_run or await db.runner.run(deletion))
        except DecryptionError as error:
            problems.add_error(error, sessions.name, stored.id)
            result.bad += 1
        else:
            result.deleted += is_deleted
            result.kept += not is_deleted
    meter.finish()
    result.problems = tuple(problems.first)
    return result


_BEFORE, _NOW = (sa.bindparam(name, type_=sa.BigInteger) for name in ("before", "now"))
# The times are not authenticated yet.
_IS_OUTDATED = (
    ~IS_COLLECTION,
    sa.or_(sessions.c.updated_at < _BEFORE, sessions.c.expires_at <= _NOW),
)
_OUTDATED_SESSIONS = SESSION_ROWS.where(*_IS_OUTDATED)
_NUMBER_OF_OUTDATED = select_count(sessions, *_IS_OUTDATED)
