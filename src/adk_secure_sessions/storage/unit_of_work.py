"""Running an operation with the keys that it needs: read, made or renewed as it turns out."""

import time
from collections.abc import Awaitable, Callable
from functools import partial

from adk_secure_sessions.db.protocol import (
    Apply,
    Change,
    Conflict,
    Executors,
    Steps,
    T,
)
from adk_secure_sessions.db.retries import repeated
from adk_secure_sessions.errors import SecureSessionError, UnknownKeyError
from adk_secure_sessions.keys.data_keys import DataKeys, StagedKeys, StaleKeyring
from adk_secure_sessions.keys.keyring import Keyring
from adk_secure_sessions.loops import LoopLocks
from adk_secure_sessions.storage import queries as sql
from adk_secure_sessions.storage.owner_keys import keys_of
from adk_secure_sessions.storage.rows import Context, Identity, Memo, NeedsKey

# Seconds until a keyring that was refused is tried again: who writes to the database must not
# have us ask a key service for every operation.
_PAUSE = 10.0


class Attempts:
    """Runs operations on an opened database; *reopen* reads again a keyring that was known."""

    def __init__(
        self,
        executors: Executors,
        keys: DataKeys,
        memo: Memo,
        reopen: Callable[[Keyring], Awaitable[Keyring]],
    ) -> None:
        self._executors = executors
        self.keys = keys
        self._memo = memo
        self._reopen = reopen
        self._locks = LoopLocks()
        self._refused: SecureSessionError | None = None  # the keyring; not tried before `_again`
        self._again = 0.0

    async def run(
        self,
        who: Identity,
        operation: Callable[[Context, bool], Awaitable[T]],
        *,
        always_with_keys: bool = False,
        writes: bool = False,
    ) -> T:
        """Run until it succeeds, and share the keys it opened.

        Keys that are known are not read again, unless a record names one that is not; nor is
        the keyring, unless a data key does, or a new one was not taken.
        """
        apart = self._executors.are_apart
        with_keys = always_with_keys or not self.keys.knows(who.app_tag, who.user_tag)
        # Keys that are not read with the rows may have been made or dropped in between.
        surely_unknown = not apart
        settled = False

        async def once(first: bool) -> T:
            nonlocal with_keys, surely_unknown, settled
            keyring = self.keys.keyring
            keys = StagedKeys(self.keys, keyring_is_complete=settled)
            context = Context(keys, self._memo, who, with_keys, apart)
            try:
                if with_keys and apart:
                    keys.load(await keys_of(self._executors.keys.read, [who.app_tag, who.user_tag]))
                result = await operation(context, first)
            except UnknownKeyError:
                if with_keys and surely_unknown:
                    raise
                surely_unknown = surely_unknown or with_keys
                with_keys = True
            except NeedsKey as need:
                await self._make_key(keys, need.owner, keyring)
            except StaleKeyring:
                await self._renew(keyring)
                settled = True
            except Conflict:
                if keys.has_new_keys:
                    await self._renew(keyring)
                raise
            else:
                keys.publish()
                return result
            return await once(False)

        return await repeated(once, writes=writes)

    async def _make_key(self, keys: StagedKeys, owner: bytes, keyring: Keyring) -> None:
        """Store the next key of *owner*, for the next attempt to read.

        Raises UniqueViolation or Conflict, where another process was first.
        """
        row = keys.new(owner)
        change = Change(sql.INSERT_KEY, row._asdict() | keys.keyring_guard())
        if not await self._executors.keys.write(partial(_apply, change)):
            await self._renew(keyring)
            raise Conflict

    async def _renew(self, seen: Keyring) -> None:
        """Read the keyring again, once for all tasks that have *seen* the same.

        Raises like `open_keyring`; then for a while without asking the key service.
        """
        async with self._locks.hold("keyring"):
            if self.keys.keyring is not seen:
                return
            if self._refused is not None and time.monotonic() < self._again:
                raise self._refused.with_traceback(None)
            self._refused = None
            try:
                self.keys.keyring = await self._reopen(seen)
            except SecureSessionError as error:
                self._refused, self._again = error, time.monotonic() + _PAUSE
                raise


def _apply(change: Change) -> Steps[bool]:
    applied: bool = yield Apply([change])
    return applied
