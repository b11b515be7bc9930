"""Delete sessions that have not been used for a long time."""

import functools
import time
from datetime import timedelta
from typing import Any, NamedTuple

import sqlalchemy as sa

from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.engine import Meter, Progress
from adk_secure_sessions.maintenance.identities import SessionIds, located_sessions, purgeable
from adk_secure_sessions.maintenance.problems import UNREADABLE, Problem, Problems
from adk_secure_sessions.storage import (
    Store,
    sessions,
)


class Purge(NamedTuple):
    """The result of `purge`; after a dry run, the expected result.

    Attributes:
        deleted: How many sessions were deleted, with their events.
        kept: How many sessions were old when `purge` read them, but were updated or deleted by
            another process before `purge` could delete them.
        bad: How many old sessions cannot be decrypted.  These sessions were left unchanged.
        problems: The first 1000 bad rows: rows of sessions, users, apps or data keys that prevent
            decrypting an old session.
        before: A session is old if its last event is older than this time, in microseconds since
            1970, UTC.  The time was computed with the clock of this machine.
    """

    deleted: int
    kept: int
    bad: int
    problems: tuple[Problem, ...]
    before: int


async def purge(
    db: Database,
    older_than: timedelta,
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
    rows_per_second: float | None = None,
) -> Purge:
    """Delete sessions whose last event is older than *older_than*.

    The age of a session without events is the time since its creation.  Each session is deleted in
    a separate transaction, which checks the session's age again.  Users and apps keep their rows
    and states, even if they have no session left.

    Args:
        db: The database, with every backend whose records it may contain.
        older_than: The minimum age of a session.  The age is the difference between the clock of
            this machine and the timestamp of the last event, which the application sets.
        dry_run: Count the sessions, but delete nothing.
        progress: Called with the number of old sessions processed and the number of all old
            sessions.
        rows_per_second: The maximum number of sessions to delete per second.

    Raises:
        ConfigurationError: `older_than` is negative, or the database cannot be used.
        WrongKeyError: The root keys do not decrypt the keyring.
    """
    if older_than < timedelta():
        raise ConfigurationError("older_than must not be negative")
    before = time.time_ns() // 1000 - older_than // timedelta(microseconds=1)
    store = await db.store()
    ((total,),) = await db.read(_number_of_old(), {"before": before})
    meter = Meter(progress, int(total), rows_per_second)
    problems = Problems()
    deleted = kept = bad = 0
    async for batch in located_sessions(db, before):
        for located in batch.sessions:
            try:
                is_deleted = await _delete(store, located.known_ids(), before, dry_run)
            except UNREADABLE as error:
                problems.add_error(error, sessions.name, located.row)
                bad += 1
            else:
                deleted += is_deleted
                kept += not is_deleted
            await meter.advance()
    meter.finish()
    return Purge(deleted, kept, bad, tuple(problems.kept), before)


async def _delete(store: Store, ids: SessionIds, before: int, dry_run: bool) -> bool:
    """Delete the session if it is still old; a dry run deletes nothing.

    Return whether the session was deleted or, in a dry run, would be deleted.
    """
    if not dry_run:
        return await store.delete(*ids[:3], before=before)
    found = await store.get(*ids[:3], lambda *event: None, limit=0)
    if found is None:
        return False
    view, _ = found
    return view.session.updated_at < before


@functools.cache
def _number_of_old() -> sa.Select[Any]:
    return sa.select(sa.func.count()).select_from(sessions).where(*purgeable())
