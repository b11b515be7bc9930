"""Making a database ready before the first service starts on it."""

from functools import partial
from typing import NamedTuple

from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.storage import (
    Survey,
    look,
    metadata,
    open_database,
    repeated,
)


class Initialisation(NamedTuple):
    """What `init` did.

    Attributes:
        tables: Those that it made.
        masters: Ids of the master keys that it made.
    """

    tables: tuple[str, ...]
    masters: tuple[int, ...]


async def init(db: Database) -> Initialisation:
    """Make the tables and the master keys where there are none yet, as a service's start does.

    Raises:
        ConfigurationError: The database cannot be used; it was left as it was.
        WrongKeyError: It has master keys, which the root keys do not open.
        KeyServiceError: The key provider failed.
    """
    backends = db.backends
    opening = partial(open_database, db.executors, backends, True)
    data_before, keys_before = await _look(db)
    await repeated(lambda: opening())
    data, keys = await _look(db)
    made = [data_before.missing_tables - data.missing_tables]
    if db.executors.has_key_database:
        made.insert(0, keys_before.missing_tables - keys.missing_tables)
    known = {row.id for row in keys_before.keyring}
    return Initialisation(
        tuple(
            table.name for names in made for table in metadata.sorted_tables if table.name in names
        ),
        tuple(row.id for row in keys.keyring if row.id not in known),
    )


async def _look(db: Database) -> tuple[Survey, Survey]:
    """At the data, and at the keys."""
    data, keys = [
        await repeated(lambda: executor.define(look, commit=False))  # noqa: B023
        for executor in db.executors
    ]
    return data, keys
