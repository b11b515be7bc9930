"""Deleting sessions that were not used for long."""

import functools
import time
from datetime import timedelta
from typing import Any, NamedTuple

import sqlalchemy as sa

from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.engine import Meter, Progress
from adk_secure_sessions.maintenance.identities import Ids, Located, identified
from adk_secure_sessions.maintenance.problems import UNREADABLE, Problem, Problems
from adk_secure_sessions.storage import (
    Store,
    sessions,
)


class Purge(NamedTuple):
    """What `purge` did, or would do.

    Attributes:
        deleted: Sessions, with their events.
        kept: Sessions that were old when it looked, and were used or deleted before their turn.
        bad: Old sessions that cannot be opened; they were left alone.
        problems: The rows to blame, the first 1000.
    """

    deleted: int
    kept: int
    bad: int
    problems: tuple[Problem, ...]


async def purge(
    db: Database,
    older_than: timedelta,
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
    rows_per_second: float | None = None,
) -> Purge:
    """Delete sessions whose last event, or creation, is longer ago than `older_than`.

    Each in a transaction of its own, which looks again whether it is still so old.  The states
    of users and apps stay, and so do users without a session.

    Args:
        db: The database, with every backend whose records it may hold.
        older_than: By the time of the last event, which the application gave it.
        dry_run: Count, and delete nothing.
        progress: Called with the number of old sessions done, and of all.
        rows_per_second: Sessions to delete in a second, at most.

    Raises:
        ConfigurationError: `older_than` is negative, or the database cannot be used.
        WrongKeyError: The root keys do not open it.
    """
    if older_than < timedelta():
        raise ConfigurationError("older_than must not be negative")
    before = time.time_ns() // 1000 - older_than // timedelta(microseconds=1)
    store = await db.store()
    ((total,),) = await db.read(_old(), {"before": before})
    meter = Meter(progress, int(total), rows_per_second)
    problems = Problems()
    deleted = kept = bad = 0
    async for batch in identified(db, before):
        for located in batch.sessions:
            try:
                gone = await _delete(store, _ids(located), before, dry_run)
            except UNREADABLE as error:
                problems.refused(error, sessions.name, located.row)
                bad += 1
            else:
                deleted += gone
                kept += not gone
            await meter.advance()
    meter.finish()
    return Purge(deleted, kept, bad, tuple(problems.kept))


def _ids(located: Located) -> Ids:
    if located.ids is None:
        assert located.error is not None
        raise located.error
    return located.ids


async def _delete(store: Store, ids: Ids, before: int, dry_run: bool) -> bool:
    """Whether it was deleted, or would be."""
    if not dry_run:
        return await store.delete(*ids, before=before)
    found = await store.get(*ids, lambda *event: None, limit=0)
    return found is not None and found[0].session.updated_at < before


@functools.cache
def _old() -> sa.Select[Any]:
    before = sa.bindparam("before", type_=sa.BigInteger)
    query = sa.select(sa.func.count()).select_from(sessions)
    return query.where(sessions.c.updated_at < before)
