"""The texts in `secure_meta`: their names, and the statements that read and change them.

Each function runs in the transaction of a connection, so several changes are stored together.
Nothing in the table is authenticated; whoever needs that stores a MAC in the value.
"""

from typing import Any

import sqlalchemy as sa

from adk_secure_sessions.storage.schema import meta_table as table

TABLE: str = table.name
# The names of the rows.  Rotations add rows whose names begin with ROTATION.
FORMAT, DATABASE_ID, PLAINTEXT, HOLDS = "format", "database_id", "plaintext", "holds"
FEATURES = "features"  # the feature list
MIGRATION_MARK = "migration"  # the mark of a migration: see `MigrationMark`
SEPARATION = "separation"  # the state of an unfinished run of `separate`
MOVE = "move"  # the random id of the run of `move_keys` that may write
ROTATION = "rotation."  # followed by the name of the rotation: its checkpoint
ROTATIONS = ("master", "data")
_NAMES = [FORMAT, DATABASE_ID, PLAINTEXT, HOLDS, FEATURES, SEPARATION, MIGRATION_MARK, MOVE]
_NAMES += [ROTATION + name for name in ROTATIONS]
# The maximum length of a value, and the maximum number of rows, that are read.  An attacker may
# have stored longer values or more rows, and every start of a service reads the table.
_MAX_TEXT, _MAX_ROWS = 2000, 100
_NAME, _VALUE = (
    sa.func.substr(column, sa.literal_column("1"), sa.literal_column(str(_MAX_TEXT)))
    for column in (table.c.name, table.c.value)
)
# The rows in `_NAMES` come first, so that rows which an attacker added do not displace them.
_ALL = (
    sa.select(_NAME.label("name"), _VALUE.label("value"))
    .order_by(sa.case((table.c.name.in_(_NAMES), 0), else_=1))
    .limit(_MAX_ROWS)
)
# Query for one value, for executors; `read` runs it on a connection.
VALUE: sa.Select[Any] = sa.select(_VALUE).where(table.c.name == sa.bindparam("name"))


def read_all(connection: sa.Connection, *, lock: bool = False) -> dict[str, str]:
    """Return the values by name, at most 100, and at most the first 2000 characters of each."""
    query = _ALL.with_for_update() if lock else _ALL
    return {row.name: row.value for row in connection.execute(query)}


def read(connection: sa.Connection, name: str, *, lock: bool = False) -> Any:
    """Return the value *name*; None if it is not stored.

    With *lock*, other transactions wait before they change the value, until this one ends.
    """
    query = VALUE.with_for_update() if lock else VALUE
    return connection.scalar(query, {"name": name})


def put(connection: sa.Connection, name: str, value: str | None) -> None:
    """Store *value* under *name*, whatever is stored there; if *value* is None, remove the row.

    The row is not deleted and inserted: to a transaction of PostgreSQL that waits for it in `read`,
    it would then be missing.
    """
    at = table.c.name == name
    if value is None:
        connection.execute(sa.delete(table).where(at))
    elif not connection.execute(sa.update(table).where(at).values(value=value)).rowcount:
        connection.execute(sa.insert(table).values(name=name, value=value))


def swap(connection: sa.Connection, name: str, old: str | None, new: str | None) -> bool:
    """Replace the value *old* of *name* by *new*; None stands for no row.

    If *new* is stored already, do nothing: after a lost connection, a transaction may run again
    although it was committed.  Return False if another value is stored, which then remains.
    """
    stored = read(connection, name, lock=True)
    if stored == old != new:
        put(connection, name, new)
    return stored in (old, new)


def mark_plaintext(connection: sa.Connection) -> None:
    """Store that the database has plaintext records; call this before the first one is written."""
    swap(connection, PLAINTEXT, None, "1")


def remove_all(connection: sa.Connection) -> None:
    connection.execute(sa.delete(table))


def remove_checkpoints(connection: sa.Connection) -> None:
    """Remove the checkpoints of all rotations."""
    checkpoints = table.c.name.startswith(ROTATION, autoescape=True)
    connection.execute(sa.delete(table).where(checkpoints))
