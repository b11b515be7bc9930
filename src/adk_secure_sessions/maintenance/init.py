"""Create tables and master keys before the first service uses a database."""

from dataclasses import dataclass
from functools import partial

from adk_secure_sessions.audit import command
from adk_secure_sessions.db.protocol import repeated
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.results import Result, count
from adk_secure_sessions.storage.opening import open_database
from adk_secure_sessions.storage.schema import metadata
from adk_secure_sessions.storage.survey import KEY_FILE, Survey, look_at


@dataclass
class Initialisation(Result):
    """The result of `init`: the tables and keys that it created.

    Attributes:
        tables: The names of the created tables.
        masters: The ids of the created master keys.
    """

    tables: tuple[str, ...] = count("table", "created", always=True, many=True)
    masters: tuple[int, ...] = count("master key", "created", always=True, many=True)


@command
async def init(db: Database) -> Initialisation:
    """Create missing tables and master keys, as a service does when it starts.

    Raises:
        ConfigurationError: The database cannot be used.  It was left unchanged.
        WrongKeyError: The database has master keys that the root keys do not unwrap.
    """
    backends = db.backends
    opening = partial(open_database, db.executors, backends, True)
    data_before, keys_before = await _survey_both(db)
    await repeated(opening)
    data, keys = await _survey_both(db)
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


async def _survey_both(db: Database) -> tuple[Survey, Survey]:
    """Return the survey of the database with the data, and of the database with the key tables."""

    data, keys = db.executors
    return await repeated(lambda: look_at(data)), await repeated(lambda: look_at(keys, KEY_FILE))
