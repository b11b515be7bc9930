"""Replace the root key: wrap the master keys (a few rows) with a new root key."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from adk_secure_sessions.audit import add_facts, audited_command
from adk_secure_sessions.concurrency import gather_all
from adk_secure_sessions.errors import ConfigurationError, SecureSessionError
from adk_secure_sessions.keys.keyring import rewrap_master_key, unwrap_master_key
from adk_secure_sessions.keys.providers import PLAINTEXT_ROOT_KEY_ID
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.rotation import store_master_keys
from adk_secure_sessions.results import Result, counter


@dataclass
class RootRotation(Result):
    """The result of `rotate_root`; after a dry run, the expected result.

    Attributes:
        root_key_id: The id of the new root key, which wraps the master keys now.
        rotated_ids: The ids of the master keys that another root key wrapped before.
        unchanged_ids: The ids of the master keys that the new root key already wrapped before.
        plaintext_ids: The ids of the master keys that `NoOpBackend` stored as plaintext.  These
            keys stay plaintext: anybody with read access to the database may know them already.
    """

    root_key_id: str
    rotated_ids: tuple[int, ...] = counter(
        "master key", "wrapped by the new root key", shows_zero=True, is_change=True, default=()
    )
    unchanged_ids: tuple[int, ...] = counter(
        "master key", "wrapped by the new root key before", default=()
    )
    plaintext_ids: tuple[int, ...] = counter(
        "master key", "stored as plaintext, and left unchanged", default=()
    )

    def extra_lines(self, dry_run: bool) -> Iterable[str]:
        return [f"the new root key is {self.root_key_id}"]


@audited_command
async def rotate_root(db: Database, *, dry_run: bool = False) -> RootRotation:
    """Wrap the master keys with the new root key, which is the root key of `backend`.

    One transaction replaces all rows of the keyring, so a killed run replaces all rows or none.  If
    the keyring has changed since it was read, it replaces no row.  Services with both root keys can
    keep running.  A second run changes nothing.

    In *db*, `backend` has the new root key, and `additional_backends` have the old one.  After an
    error, nothing was written.

    Raises:
        SecureSessionError: Another process has changed the keyring since it was read.
        ConfigurationError: `backend` has no root key.
    """
    root = db.runner.backends.writing_backend.root_key
    if root.key_id == PLAINTEXT_ROOT_KEY_ID:
        raise ConfigurationError("NoOpBackend has no root key to rotate to: give another backend")
    add_facts(root_key=root.key_id)
    survey = await db.survey_existing()
    rows = survey.master_rows
    plaintext = [row for row in rows if row.root_key_id == PLAINTEXT_ROOT_KEY_ID]
    old_rows = [row for row in rows if row.root_key_id not in (PLAINTEXT_ROOT_KEY_ID, root.key_id)]
    already_wrapped = [row for row in rows if row.root_key_id == root.key_id]
    # Also unwrap the master keys that the new root key already wraps.  If the given root key is
    # wrong but has the right id, unwrapping raises WrongKeyError.
    roots, database_id = db.runner.backends.roots, survey.existing_id
    await gather_all(*(unwrap_master_key(row, roots, database_id) for row in already_wrapped))
    rewrap = partial(rewrap_master_key, roots=roots, database_id=database_id, new_root=root)
    new_rows = await gather_all(*(rewrap(row) for row in old_rows))
    if new_rows and not dry_run:
        await db.keyring()  # stores the record of this command in the audit trail
        if not await db.runner.key_db.run_sync(partial(store_master_keys, survey, new_rows)):
            raise SecureSessionError(
                "secure_keyring was changed meanwhile, perhaps by another rotation: run `status`"
            )
    ids = [tuple(row.id for row in group) for group in (old_rows, already_wrapped, plaintext)]
    return RootRotation(root.key_id, *ids)
