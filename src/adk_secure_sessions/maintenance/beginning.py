"""Making a database ready before the first service starts on it."""

from functools import partial
from typing import NamedTuple

from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.storage.retries import repeated
from adk_secure_sessions.storage.setup import look, open_database
from adk_secure_sessions.storage.tables import metadata


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
    opening = partial(open_database, db.executor, backends, True)
    look_only = partial(db.executor.define, look, commit=False)
    before = await repeated(lambda first: look_only())
    await repeated(lambda first: opening())
    after = await repeated(lambda first: look_only())
    made = before.missing_tables - after.missing_tables
    known = {row.id for row in before.keyring}
    return Initialisation(
        tuple(table.name for table in metadata.sorted_tables if table.name in made),
        tuple(row.id for row in after.keyring if row.id not in known),
    )
