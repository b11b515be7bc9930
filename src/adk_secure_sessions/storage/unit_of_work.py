"""The unit of work: an operation, attempted until it has the keys it needs and meets no conflict.

It owns the executors, the keys that this process has unwrapped and the rows that it has opened.
Services and maintenance commands both work through it, so every rule about trying again is here:

- A data key that an attempt needs is read, or made, before the next attempt.
- A keyring that has changed is read again, once for all tasks that noticed.
- An attempt that met a row another transaction changed is repeated, after a short random pause.
- An attempt that lost its connection is repeated, after longer pauses.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import sqlalchemy as sa

from adk_secure_sessions.backends.registry import Backends
from adk_secure_sessions.db.protocol import (
    Apply,
    Change,
    Conflict,
    Disconnected,
    Executors,
    Parameters,
    Row,
    Steps,
    UniqueViolation,
)
from adk_secure_sessions.errors import ConfigurationError, SecureSessionError, UnknownKeyError
from adk_secure_sessions.keys.data_keys import DataKeyRow, DataKeys, StagedKeys, StaleKeyring
from adk_secure_sessions.keys.keyring import Keyring
from adk_secure_sessions.loops import LoopLocks
from adk_secure_sessions.lru import Lru
from adk_secure_sessions.storage.bindings import (
    Attempt,
    Identity,
    KeySource,
    NeedsDataKey,
    RowCache,
    identify,
)
from adk_secure_sessions.storage.queries import INSERT_KEY, chunks, data_keys_of, numbered

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
OpenKeyring = Callable[[Keyring | None], Awaitable[Keyring]]

_CONFLICTS = 20  # attempts that may meet a changed row
# Seconds to wait after each lost connection.  A write gets more of them: until it is known
# whether it was stored, there is nothing true to tell the caller.
_READ_PAUSES = (0.05,)
_WRITE_PAUSES = (0.05, 0.2, 0.5, 1.0, 2.0)
# Seconds until a keyring that was rejected is read again: an attacker who writes to the database
# must not make every operation call a key service.
_KEYRING_PAUSE = 10.0


class Operation(Protocol[T_co]):
    """One read or write of the rows of *who*."""

    @property
    def who(self) -> Identity: ...

    @property
    def reads_keys(self) -> bool:
        """Whether it reads the owners' data keys even if this process knows them."""
        ...

    @property
    def writes(self) -> bool:
        """Whether it may change something."""
        ...

    async def attempt(self, attempt: Attempt, executors: Executors) -> T_co:
        """Do it once.  It may raise what `UnitOfWork.run` repeats it for."""
        ...


class Retries:
    """The pauses between the attempts at one operation."""

    def __init__(self, *, writes: bool) -> None:
        self._conflicts = 0
        self._pauses = iter(_WRITE_PAUSES if writes else _READ_PAUSES)

    async def wait(self, error: UniqueViolation | Conflict | Disconnected) -> None:
        """Pause before the next attempt.

        Raises:
            SecureSessionError: other transactions kept changing the same rows.
            Exception: the driver's, if the connection stays lost.
        """
        if isinstance(error, Disconnected):
            pause = next(self._pauses, None)
            if pause is None:
                raise error.error from None
            await asyncio.sleep(pause)
            return
        self._conflicts += 1
        if self._conflicts == _CONFLICTS:
            raise SecureSessionError(
                f"the same rows were changed under each of {_CONFLICTS} attempts: try again",
                retryable=True,
            ) from None
        await asyncio.sleep(random.uniform(0, 0.005 * self._conflicts))  # noqa: S311 - a pause


async def repeated(work: Callable[[], Awaitable[T]], *, writes: bool = False) -> T:
    """Await *work* until no conflict and no lost connection stops it.  Raises as `Retries`."""
    retries = Retries(writes=writes)
    while True:
        try:
            return await work()
        except (UniqueViolation, Conflict, Disconnected) as error:
            await retries.wait(error)


class _Opened(NamedTuple):
    keys: DataKeys
    rows: RowCache
    identities: Lru[tuple[str, str, str], Identity]


class UnitOfWork:
    """One database with its keys, opened when it is first used.

    Args:
        executors: Run its statements.
        backends: None where no key is needed; then only `read`, `change` and the like work.
        open_keyring: Reads the keyring; given the one that was opened before, it unwraps only
            what is new.
        cached_rows: How many sessions, users and apps are remembered.
        cached_keys: How many owners' data keys are remembered.
    """

    def __init__(
        self,
        executors: Executors,
        backends: Backends | None,
        open_keyring: OpenKeyring,
        *,
        cached_rows: int,
        cached_keys: int,
    ) -> None:
        self.executors = executors
        self._backends = backends
        self._open_keyring = open_keyring
        self._cached_rows = cached_rows
        self._cached_keys = cached_keys
        self._opened: _Opened | None = None
        self._locks = LoopLocks()
        self._rejected: SecureSessionError | None = None  # of the keyring, until `_retry_at`
        self._retry_at = 0.0

    @property
    def backends(self) -> Backends:
        """Raises ConfigurationError if none was given."""
        if self._backends is None:
            raise ConfigurationError("this needs the root key: give a backend")
        return self._backends

    async def keys(self) -> DataKeys:
        """The keys of the database; opens it if that is still to be done.

        Raises like *open_keyring*.
        """
        return (self._opened or await self._open()).keys

    async def close(self) -> None:
        """Release the connections and forget the keys; the next call opens the database again."""
        self._opened = None
        await self.executors.close()

    async def identify(self, app_name: str, user_id: str = "", session_id: str = "") -> Identity:
        """The ids with their tags."""
        opened = self._opened or await self._open()
        ids = (app_name, user_id, session_id)
        who = opened.identities.get(ids)
        if who is None:
            who = identify(opened.keys.keyring.index, *ids)
            opened.identities.put(ids, who)
        return who

    async def run(self, operation: Operation[T]) -> T:
        """Attempt *operation* until it succeeds, then share the data keys it read.

        Data keys that this process knows are not read again unless a record names another; nor is
        the keyring, unless a data key names another master key or a new data key was not accepted.

        Raises what the operation raises, and as `Retries.wait`.
        """
        opened = self._opened or await self._open()
        who, retries = operation.who, Retries(writes=operation.writes)
        separate = self.executors.has_key_database
        reads_keys = operation.reads_keys or not opened.keys.knows(who.app_tag, who.user_tag)
        # Keys in a key database are not read together with the rows: the first time that one is
        # missing, it may have been made, or retired, between the two reads.
        missing_is_final = not separate
        keyring_is_current = False
        is_first = True
        while True:
            keyring_seen = opened.keys.keyring
            keys = StagedKeys(opened.keys, keyring_is_complete=keyring_is_current)
            source = KeySource.CACHE
            if reads_keys:
                source = KeySource.KEY_DATABASE if separate else KeySource.QUERY
            attempt = Attempt(who, keys, opened.rows, source, is_first)
            is_first = False
            try:
                try:
                    if source is KeySource.KEY_DATABASE:
                        owners = [who.app_tag, who.user_tag]
                        keys.load(await read_data_keys(self.executors.keys.read, owners))
                    result = await operation.attempt(attempt, self.executors)
                except UnknownKeyError:
                    if reads_keys and missing_is_final:
                        raise
                    missing_is_final = missing_is_final or reads_keys
                    reads_keys = True
                except NeedsDataKey as need:
                    await self._store_data_key(keys, need.owner, keyring_seen)
                except StaleKeyring:
                    await self.renew_keyring(keyring_seen)
                    keyring_is_current = True
                except Conflict:
                    if keys.has_new_keys:  # a new key is stored only under the keyring as it is now
                        await self.renew_keyring(keyring_seen)
                    raise
                else:
                    keys.publish()
                    return result
            except (UniqueViolation, Conflict, Disconnected) as error:
                await retries.wait(error)

    async def read(self, query: sa.Executable, parameters: Parameters) -> Sequence[Row]:
        """Run one query of the data, again if its connection is lost."""
        return await repeated(lambda: self.executors.data.read(query, parameters))

    async def read_keys(self, query: sa.Executable, parameters: Parameters) -> Sequence[Row]:
        """The same, of `secure_keyring` and `secure_data_keys`."""
        return await repeated(lambda: self.executors.keys.read(query, parameters))

    async def change(self, work: Callable[[sa.Connection], T], *, commit: bool = True) -> T:
        """Run *work*, which may be repeated, in one transaction on the data."""
        define = self.executors.data.define
        return await repeated(lambda: define(work, commit=commit), writes=True)

    async def change_keys(self, work: Callable[[sa.Connection], T], *, commit: bool = True) -> T:
        """The same, on `secure_keyring` and `secure_data_keys`."""
        define = self.executors.keys.define
        return await repeated(lambda: define(work, commit=commit), writes=True)

    async def data_keys_of(self, *owners: object) -> StagedKeys:
        """The data keys of *owners* as stored now; one that is not authentic raises when used."""
        keys = await self.keys()
        rows = await read_data_keys(self.read_keys, owners)
        staged = StagedKeys(keys, keyring_is_complete=False)
        try:
            staged.load(rows)
        except StaleKeyring:
            await self.renew_keyring(keys.keyring)
            staged = StagedKeys(keys)
            staged.load(rows)
        return staged

    async def renew_keyring(self, seen: Keyring) -> None:
        """Read the keyring again, once for all tasks that have *seen* the same.

        Raises like *open_keyring*; then for a while without calling the key service.
        """
        keys = await self.keys()
        async with self._locks.hold("keyring"):
            if keys.keyring is not seen:
                return
            if self._rejected is not None and time.monotonic() < self._retry_at:
                raise self._rejected.with_traceback(None)
            self._rejected = None
            try:
                keys.keyring = await repeated(lambda: self._open_keyring(seen))
            except SecureSessionError as error:
                self._rejected, self._retry_at = error, time.monotonic() + _KEYRING_PAUSE
                raise

    async def _open(self) -> _Opened:
        async with self._locks.hold("open"):
            if self._opened is None:
                backends = self.backends
                keyring = await repeated(lambda: self._open_keyring(None))
                writer_id = backends.writer.backend_id
                keys = DataKeys(keyring, backends.by_id, writer_id, self._cached_keys)
                self._rejected = None
                self._opened = _Opened(keys, RowCache(self._cached_rows), Lru(self._cached_rows))
            return self._opened

    async def _store_data_key(self, keys: StagedKeys, owner: bytes, seen: Keyring) -> None:
        """Store the next data key of *owner* in the key database, for the next attempt to read.

        Raises UniqueViolation or Conflict if another process was first.
        """
        row = keys.new(owner)
        change = Change(INSERT_KEY, row._asdict() | keys.keyring_guard())
        if not await self.executors.keys.write(partial(_apply_one, change)):
            await self.renew_keyring(seen)
            raise Conflict


def _apply_one(change: Change) -> Steps[bool]:
    applied: bool = yield Apply([change])
    return applied


async def read_data_keys(
    read: Callable[[sa.Executable, Parameters], Awaitable[Sequence[Row]]], owners: Iterable[object]
) -> list[DataKeyRow]:
    """All generations of the data keys of *owners*; *read* is of the database that has them."""
    found = []
    # SQLite stores any type in any column: a value that is no tag has no keys.
    for tags in chunks({owner for owner in owners if isinstance(owner, bytes)}):
        rows = await read(data_keys_of(len(tags)), numbered(tags))
        found += [DataKeyRow(*row) for row in rows]
    return found
