"""The check for orphaned rows, before a command deletes what no row names.

`retire` deletes keys, and `blobs purge` deletes contents of artifacts, because no row names them.
An attacker may have removed the row that an orphaned row belongs to, and somebody may restore this
row later.  Until then, the owner of the orphaned row is unknown, so the row may need any key, and
may name any content.  Commands that delete what the operator or an authentic row names, such as
`erase-user` and `purge`, need no such check.
"""

from typing import Any

import sqlalchemy as sa

from adk_secure_sessions.errors import Reason, TamperedError
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.engine import first_rows
from adk_secure_sessions.storage.schema import apps, bases, events, sessions, users, witnesses


async def reject_orphans(db: Database) -> None:
    """Raise TamperedError if a row belongs to no session, collection, user or app."""
    for column, key, owners in _REFERENCES:
        table = column.table
        missing = [~sa.select(_ONE).where(column == owner).exists() for owner in owners]
        query = first_rows(sa.select(key).where(*missing), _ONE)
        for (row,) in await db.read(query, {}):
            raise TamperedError(
                "the row that it belongs to was removed: restore that row, or delete this one; "
                "`verify` lists all such rows",
                reason=Reason.MISSING,
                table=table.name,
                row=row.hex() if isinstance(row, bytes) else row,
            )


_ONE: sa.ColumnElement[int] = sa.literal_column("1")
# For each column that refers to another row: the column, the primary key of its table, and the
# columns of other tables to which it may refer.  One of these columns must contain the same value.
_REFERENCES: list[tuple[sa.Column[Any], sa.Column[Any], list[sa.Column[Any]]]] = [
    (users.c.app_row, users.c.id, [apps.c.id]),
    (sessions.c.user_row, sessions.c.id, [users.c.id]),
    (bases.c.session_row, bases.c.session_row, [sessions.c.id]),
    (events.c.session_row, events.c.session_row, [sessions.c.id]),
    (witnesses.c.tag, witnesses.c.tag, [apps.c.tag, users.c.tag, sessions.c.tag]),
]
