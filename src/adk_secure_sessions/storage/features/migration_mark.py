"""The mark in `secure_meta` that says whether a migration into the database is complete."""

import hmac
from enum import Enum

import sqlalchemy as sa

from adk_secure_sessions.errors import WrongKeyError
from adk_secure_sessions.keys.keyring import Keyring
from adk_secure_sessions.storage import meta


class MigrationEnd(Enum):
    """The values of the mark that a migration stores in row `migration` of `secure_meta`."""

    COMPLETE = "complete"  # everything was imported
    SOURCE_ERASED = "erased"  # and since then, rows of the source may have been deleted

    @property
    def source_is_erased(self) -> bool:
        """Whether rows of the source may have been deleted."""
        return self is MigrationEnd.SOURCE_ERASED


def mark_migration(end: MigrationEnd, keyring: Keyring, connection: sa.Connection) -> None:
    """Store the mark *end*, which replaces a stored mark, even one that was tampered with.

    Only the mark `SOURCE_ERASED` is not replaced.
    """
    stored = meta.read(connection, meta.MIGRATION_MARK, lock=True)
    if stored != _migration_mark(MigrationEnd.SOURCE_ERASED, keyring):
        meta.put(connection, meta.MIGRATION_MARK, _migration_mark(end, keyring))


def withdraw_migration(keyring: Keyring, connection: sa.Connection) -> bool:
    """Remove the mark `MigrationEnd.COMPLETE`, and return whether no mark is stored afterwards.

    The mark `SOURCE_ERASED` and a mark that was tampered with are not removed.
    """
    complete = _migration_mark(MigrationEnd.COMPLETE, keyring)
    return meta.swap(connection, meta.MIGRATION_MARK, complete, None)


def migration_end(keyring: Keyring, connection: sa.Connection) -> MigrationEnd | None:
    """Return the stored mark of a migration; None if no mark is stored."""
    value = meta.read(connection, meta.MIGRATION_MARK)
    if value is None:
        return None
    for end in MigrationEnd:
        if hmac.compare_digest(str(value).encode(), _migration_mark(end, keyring).encode()):
            return end
    raise WrongKeyError(
        f"the row `{meta.MIGRATION_MARK}` of secure_meta was tampered with: delete the row and run "
        "`migrate compare` again"
    )


def _migration_mark(end: MigrationEnd, keyring: Keyring) -> str:
    mac_of = {
        MigrationEnd.COMPLETE: keyring.index.migration_complete,
        MigrationEnd.SOURCE_ERASED: keyring.index.source_erased,
    }
    return f"{end.value} {mac_of[end](keyring.database_id).hex()}"
