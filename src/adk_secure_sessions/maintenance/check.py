"""Check whether a service could start on a database, without reading sessions."""

from functools import partial
from typing import NamedTuple

from adk_secure_sessions.audit import unstored_command
from adk_secure_sessions.db.protocol import repeated
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.storage.opening import open_for_service, reject_new


class Check(NamedTuple):
    """The result of `check`.

    Attributes:
        format_version: The version of the stored format.
        root_key_id: The id of the root key of `backend`, the argument of `Database`.
        masters: The number of master keys; the given root keys unwrap all of them.
        master_id: The id of the data master that wraps new data keys.  None if the keyring has no
            usable data master yet: the next service that starts creates a data master.
        has_key_database: True if the keys are in a key database.
        has_plaintext_records: True if `NoOpBackend` has written to the database.  This value comes
            from a row of `secure_meta` that is not authenticated.
    """

    format_version: str
    root_key_id: str
    masters: int
    master_id: int | None
    has_key_database: bool
    has_plaintext_records: bool


@unstored_command
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
    backends = db.backends
    opening = partial(open_for_service, db.executors, backends, create_tables=True)
    data, keys, keyring = await repeated(opening)
    reject_new(data)
    assert keyring is not None, "keys are created before data"
    return Check(
        str(data.format_version),
        backends.writer.root_key.key_id,
        len(keys.keyring),
        keyring.current_id,
        db.executors.has_key_database,
        data.has_plaintext_records,
    )
