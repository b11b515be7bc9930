"""Adds a feature to a database before the first row that needs it is stored."""

from functools import partial

from adk_secure_sessions.errors import WrongKeyError
from adk_secure_sessions.keys.keyring import Keyring
from adk_secure_sessions.loops import LoopLocks
from adk_secure_sessions.storage.feature_list import (
    add_feature,
    create_table_of,
    has_feature,
    has_rows_of,
)
from adk_secure_sessions.storage.unit_of_work import UnitOfWork


class Feature:
    """A feature that a process adds to the database before storing rows that need the feature.

    *name* is the name of the feature.  *create_table* is None if the feature has no table.  If
    *create_table* is True, `ensure` creates a missing table.  If *create_table* is False, `ensure`
    raises ConfigurationError if the table is missing.
    """

    def __init__(self, unit: UnitOfWork, name: str, *, create_table: bool | None = None) -> None:
        self._unit = unit
        self._name = name
        self._create_table = create_table
        # The keyring that was current when the feature was last added or found.
        self._ensured: Keyring | None = None
        self._locks = LoopLocks()

    async def ensure(self) -> None:
        """Add the feature to the database if it is missing.

        A call accesses the database only if it is the first call, or the first call after this
        process has read the keyring again.
        """
        keyring = (await self._unit.keys()).keyring
        if self._ensured is keyring:
            return
        if self._create_table is None:
            await self._unit.change_keys(partial(add_feature, self._name, keyring))
            self._ensured = keyring
            return
        async with self._locks.hold("table"):
            if self._ensured is not keyring:
                await self._add_with_table(keyring)

    async def is_added(self) -> bool:
        """Return whether the database has the feature."""
        keyring = (await self._unit.keys()).keyring
        if self._ensured is keyring:
            return True
        # Read the table before the list of features.  Another process may be adding the feature: it
        # changes the list before it stores rows in the table.
        has_rows = await self._unit.change(partial(has_rows_of, self._name), commit=False)
        work = partial(has_feature, self._name, keyring)
        if await self._unit.change_keys(work, commit=False):
            self._ensured = keyring
            return True
        if has_rows:
            raise WrongKeyError(
                f"the feature {self._name!r} is not listed in secure_meta, and its table has rows: "
                "an older list was replayed; restore secure_meta from a backup"
            )
        return False

    async def _add_with_table(self, keyring: Keyring) -> None:
        """Create the table, and then add the feature, if they are missing.

        If the process stops after it has created the table, the next call adds the feature.
        """
        look_for = partial(has_feature, self._name, keyring)
        if not await self._unit.change_keys(look_for, commit=False):
            may_create = self._create_table is True
            work = partial(create_table_of, self._name, may_create=may_create)
            await self._unit.change(work)
        await self._unit.change_keys(partial(add_feature, self._name, keyring))
        self._ensured = keyring
