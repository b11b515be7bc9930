"""Create tables and master keys, or check them, before a service uses a database."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from adk_secure_sessions.audit import audited_command, logged_command
from adk_secure_sessions.db.protocol import with_retries
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.results import Result, counted, counter
from adk_secure_sessions.storage.opening import open_database, open_for_service
from adk_secure_sessions.storage.schema import metadata


@dataclass
class Initialization(Result):
    """The result of `init`: the tables and keys that were created while it ran.

    Attributes:
        tables: The names of the created tables.
        master_ids: The ids of the created master keys.
    """

    tables: tuple[str, ...] = counter("table", "created", shows_zero=True, default=())
    master_ids: tuple[int, ...] = counter("master key", "created", shows_zero=True, default=())


@audited_command
async def init(db: Database) -> Initialization:
    """Create missing tables and master keys, as a service does when it starts.

    Raises:
        ConfigurationError: The database cannot be used.  It was left unchanged.
        WrongKeyError: The database has master keys that the root keys do not unwrap.
    """
    backends = db.runner.backends
    opening = partial(open_database, db.runner.executors, backends, True)
    data_before, before = await db.survey_unchecked()
    await with_retries(opening)
    data_after, after = await db.survey_unchecked()
    created = [after.tables - before.tables]
    if db.runner.executors.has_key_database:
        created.append(data_after.tables - data_before.tables)
    names = [
        table.name for tables in created for table in metadata.sorted_tables if table.name in tables
    ]
    old_master_ids = {row.id for row in before.master_rows}
    master_ids = [row.id for row in after.master_rows if row.id not in old_master_ids]
    return Initialization(tuple(names), tuple(master_ids))


@dataclass
class Check(Result):
    """The result of `check`.

    Attributes:
        format_version: The version of the stored format.
        root_key_id: The id of the root key of `backend`, the argument of `Database`.
        master_count: The number of master keys; the given root keys unwrap all of them.
        master_id: The id of the data master that wraps new data keys.  None if the keyring has no
            usable data master yet: the next service that starts creates a data master.
        has_key_database: True if the keys are in a key database.
        has_plaintext_records: True if `NoOpBackend` has written to the database.  This value comes
            from a row of `secure_meta` that is not authenticated.
    """

    format_version: str
    root_key_id: str
    master_count: int
    master_id: int | None
    has_key_database: bool
    has_plaintext_records: bool

    def extra_lines(self, dry_run: bool) -> Iterator[str]:
        keys = "in the key database" if self.has_key_database else "in this database"
        yield (
            f"a service can start: format {self.format_version}, root key {self.root_key_id}, "
            f"{counted(self.master_count, 'master key')} {keys}"
        )
        if self.master_id is None:
            yield "the first service to start creates a data master"
        if self.has_plaintext_records:
            yield "some records are, or were, plaintext"


@logged_command
async def check(db: Database) -> Check:
    """Open the database and its keys as a service does when it starts, without writing.

    `check` examines the tables and unwraps the master keys.  It reads no session (use `verify` for
    that), and does not check whether the account may write.

    Args:
        db: The database, with the backends that the service has.

    Raises:
        ConfigurationError: `separate` or `move_keys` has not ended.
    """
    db.require_files()
    backends = db.runner.backends
    opening = partial(open_for_service, db.runner.executors, backends, create_tables=True)
    data, keys, keyring = await with_retries(opening)
    data.reject_new()
    assert keyring is not None, "keys are created before data"
    return Check(
        str(data.format_version),
        backends.writing_backend.root_key.key_id,
        len(keys.master_rows),
        keyring.wrapping_master_id,
        db.runner.executors.has_key_database,
        data.has_plaintext_records,
    )
