"""Another root key: the master keys, which are a few, are wrapped anew."""

import asyncio
from functools import partial
from typing import NamedTuple

import sqlalchemy as sa

from adk_secure_sessions.db.protocol import Apply, Change, Conflict, Disconnected, Steps
from adk_secure_sessions.errors import ConfigurationError, SecureSessionError
from adk_secure_sessions.keys.keyring import MasterKeyRow, unwrap_master_key, wrap_master_key
from adk_secure_sessions.keys.providers import PLAINTEXT_ROOT_KEY_ID, KeyProvider
from adk_secure_sessions.loops import at_once
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.storage import (
    keyring,
)

_PAUSES = (0.2, 1.0, 2.0)  # seconds, after a lost connection
_CHANGED = "secure_keyring was changed meanwhile, perhaps by another rotation: see `status`"


class RootRotation(NamedTuple):
    """What `rotate_root` did, or would do.

    Attributes:
        root_key_id: The root key that is to wrap them.
        rotated: Ids of the master keys that were under another root key.
        unchanged: Of those that were under this one already.
        in_clear: Of those that `NoOpBackend` stored in clear; anybody may know them, and they
            are left as they are.
    """

    root_key_id: str
    rotated: tuple[int, ...]
    unchanged: tuple[int, ...]
    in_clear: tuple[int, ...]


async def rotate_root(db: Database, *, dry_run: bool = False) -> RootRotation:
    """Wrap the master keys with the root key of `backend`, which `additional_backends` unwrap.

    All of them in one transaction, and only if they are still as they were read: a process
    killed meanwhile leaves all or none.  Services that run go on; those that start need the
    new root key.  Run again, it finds nothing to do.

    Args:
        db: The database; `backend` has the new root key, `additional_backends` the old.
        dry_run: Unwrap and wrap, to see that all root keys work, and write nothing.

    Raises:
        WrongKeyError: A root key is missing or wrong; nothing was written.
        KeyServiceError: A key provider failed; nothing was written.
        SecureSessionError: The keyring changed meanwhile; nothing was written.
        ConfigurationError: The database cannot be used, or the new root key is none.
    """
    root = db.backends.writer.root_key
    if root.key_id == PLAINTEXT_ROOT_KEY_ID:
        raise ConfigurationError("NoOpBackend has no root key to rotate to: give another backend")
    survey = await db.survey()
    assert survey.database_id is not None, "it is refused otherwise"
    rows = survey.keyring
    clear = [row for row in rows if row.root_key_id == PLAINTEXT_ROOT_KEY_ID]
    old = [row for row in rows if row.root_key_id not in (PLAINTEXT_ROOT_KEY_ID, root.key_id)]
    done = [row for row in rows if row.root_key_id == root.key_id]
    # Those, too, or a wrong key of the right name would go unnoticed.
    await at_once(*(unwrap_master_key(row, db.backends.roots, survey.database_id) for row in done))
    new = await at_once(*(_rewrapped(db, row, root, survey.database_id) for row in old))
    if new and not dry_run:
        await _store(db, old, new)
    ids = [tuple(row.id for row in group) for group in (old, done, clear)]
    return RootRotation(root.key_id, *ids)


async def _rewrapped(
    db: Database, row: MasterKeyRow, root: KeyProvider, database_id: bytes
) -> MasterKeyRow:
    """*row* under *root*, which has been seen to unwrap it again."""
    key = await unwrap_master_key(row, db.backends.roots, database_id)
    fresh = await wrap_master_key(row, root, database_id, key)
    if await unwrap_master_key(fresh, {root.key_id: root}, database_id) != key:
        raise SecureSessionError(f"root key {root.key_id!r} does not unwrap what it wraps")
    return fresh


async def _store(db: Database, old: list[MasterKeyRow], new: list[MasterKeyRow]) -> None:
    pauses = iter(_PAUSES)
    while True:
        try:
            if await db.key_executor.write(partial(_replace, old, new)):
                return
            raise SecureSessionError(_CHANGED)
        except Conflict:
            raise SecureSessionError(_CHANGED) from None
        except Disconnected as lost:
            pause = next(pauses, None)
            if pause is None:
                raise lost.error from None
        await asyncio.sleep(pause)
        # What was sent before the connection was lost may be stored, or not.
        stored = (await db.survey()).keyring
        if all(row in stored for row in new):
            return


def _replace(old: list[MasterKeyRow], new: list[MasterKeyRow]) -> Steps[bool]:
    made: bool = yield Apply(
        [
            Change(
                _REPLACE,
                {
                    "at_id": before.id,
                    "at_root_key_id": before.root_key_id,
                    "at_wrapped": before.wrapped,
                    "root_key_id": after.root_key_id,
                    "wrapped": after.wrapped,
                },
            )
            for before, after in zip(old, new, strict=True)
        ]
    )
    return made


_REPLACE = (
    sa.update(keyring)
    .where(
        keyring.c.id == sa.bindparam("at_id"),
        keyring.c.root_key_id == sa.bindparam("at_root_key_id"),
        keyring.c.wrapped == sa.bindparam("at_wrapped", type_=keyring.c.wrapped.type),
    )
    .values(root_key_id=sa.bindparam("root_key_id"), wrapped=sa.bindparam("wrapped"))
)
