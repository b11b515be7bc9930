"""Find orphaned rows: the session, user or app row that they belong to does not exist.

Services never read orphaned rows.  `retire` deletes keys, and `purge blobs` deletes contents of
artifacts, because no row names them.  An attacker may have removed the row that an orphaned row
belongs to, and somebody may restore this row later.  Until then, the orphaned row may need any key,
and may name any content.  Commands that delete what the operator or an authentic row names, such as
`erase-user` and `purge`, need no such check.
"""

from collections.abc import AsyncIterator
from typing import Any

import sqlalchemy as sa

from adk_secure_sessions.errors import Reason, TamperedError
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.storage.pages import spans
from adk_secure_sessions.storage.schema import apps, bases, events, sessions, users, witnesses


async def orphans(db: Database, *tables: sa.Table) -> AsyncIterator[tuple[str, str, int]]:
    """Yield the table and the key of each orphaned row of *tables*, and 1.

    The events of a session that does not exist are one item, with their number.
    """
    for key, query in _ORPHANS:
        if key.table in tables:
            # The events of a session are many, so divide them by the ids of sessions.
            walked = sessions.c.id if key.name == "session_row" else key
            async for span in spans(db.read, walked, db.limits.headers):
                for row, number in await span.read(db.read, query, key):
                    name = row.hex() if isinstance(row, bytes) else str(row)
                    yield key.table.name, name, number


async def reject_orphans(db: Database) -> None:
    """Raise TamperedError if a row belongs to no session, collection, user or app."""
    async for table, row, _ in orphans(db, users, sessions, bases, events, witnesses):
        raise TamperedError(
            "the row that it belongs to was removed: restore that row, or delete this one; "
            "`verify` lists all such rows",
            reason=Reason.MISSING,
            table=table,
            row=row,
        )


def _orphans(
    key: sa.Column[Any], column: sa.Column[Any], *owners: sa.Column[Any]
) -> sa.Select[Any]:
    """Return the query for the rows for which none of *owners* has the value of *column*."""
    one: sa.ColumnElement[int] = sa.literal_column("1")
    missing = [~sa.select(one).where(column == owner).exists() for owner in owners]
    return sa.select(key, sa.func.count()).where(*missing).group_by(key).order_by(key)


# For each column that refers to another row, the primary key of its table, and the query for the
# rows that refer to none.
_ORPHANS = (
    (users.c.id, _orphans(users.c.id, users.c.app_row, apps.c.id)),
    (sessions.c.id, _orphans(sessions.c.id, sessions.c.user_row, users.c.id)),
    (bases.c.session_row, _orphans(bases.c.session_row, bases.c.session_row, sessions.c.id)),
    (events.c.session_row, _orphans(events.c.session_row, events.c.session_row, sessions.c.id)),
    (
        witnesses.c.tag,
        _orphans(witnesses.c.tag, witnesses.c.tag, apps.c.tag, users.c.tag, sessions.c.tag),
    ),
)
