"""The runner repeats an operation until it has all its keys and meets no conflict.

It owns the executors, the unwrapped keys and the caches of rows and events.  docs/architecture.md,
"The operation runner", says when it repeats an attempt.  The limits and pauses after a conflict or
a lost connection are in `db.protocol.Retries`, the other limits in this module.
"""

import asyncio
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, ref

import sqlalchemy as sa

from adk_secure_sessions import audit, telemetry
from adk_secure_sessions.backends.registry import Backends
from adk_secure_sessions.caches import Caches, FifoCache
from adk_secure_sessions.concurrency import LoopLocks, call_later
from adk_secure_sessions.db.protocol import (
    MAX_CONFLICTS,
    Apply,
    Change,
    Conflict,
    Disconnected,
    Executors,
    Parameters,
    Retries,
    RetryingExecutor,
    Row,
    Steps,
    UniqueViolation,
    with_retries,
)
from adk_secure_sessions.errors import (
    ConfigurationError,
    SecureSessionError,
    UnknownKeyError,
    copy_of,
)
from adk_secure_sessions.formats.records import Packing
from adk_secure_sessions.keys.data_keys import (
    DatabaseKeys,
    DataKeyRow,
    StaleKeyring,
    TransactionKeys,
)
from adk_secure_sessions.keys.keyring import RETRY_PAUSE, Keyring
from adk_secure_sessions.storage import queries as sql
from adk_secure_sessions.storage.row_cache import CachedRow, RowCache
from adk_secure_sessions.storage.schema import Identity, StoredSession, WitnessRow, identify

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
OpenKeyring = Callable[[Keyring | None], Awaitable[Keyring]]

# How many data keys one operation may create in a key database.  It needs at most two, unless other
# processes change the keys at the same time.
_NEW_KEYS = 8
# How many times an operation rereads the keyring, if it still lacks a data master.  Other processes
# may rotate and retire master keys during each attempt.
_REREADS = 4


# --- attempts -------------------------------------------------------------------------------------


class KeySource(Enum):
    """The source of the data keys of an attempt's app and user."""

    CACHE = "this process has cached the data keys"
    QUERY = "the query that reads the rows also reads the data keys"
    KEY_DATABASE = "the data keys were read from the key database before the rows"


# In this order, an operation tries the sources.  Between a read of the key database and one of the
# rows, another process may create or retire a data key: if a key is missing, both are read again.
_SOURCES = (KeySource.CACHE, KeySource.QUERY)
_SOURCES_WITH_KEY_DATABASE = (KeySource.CACHE, KeySource.KEY_DATABASE, KeySource.KEY_DATABASE)


class KeySearch:
    """What the attempts at one operation have tried to get their keys, and what they may try."""

    # The source of this attempt, then those to try if the attempt lacks a data key.
    sources: Sequence[KeySource] = (KeySource.QUERY,)
    rereads: int = 0  # of the keyring
    stored_key_ids: tuple[int, ...] = ()  # of data keys stored in the key database
    unconfirmed_keys: tuple[DataKeyRow, ...] = ()  # sent by attempts that perhaps were committed

    def needs_keyring(self, keys: TransactionKeys) -> bool:
        """Whether an attempt lacked a data master that another read of the keyring may find."""
        return keys.lacks_master and self.rereads < _REREADS


class Attempt(NamedTuple):
    """One attempt at an operation on the rows of *identity*.

    *commit_callbacks* is None for a read.  For a write, it collects functions that cache the rows
    which the write has read or written; they are called after the commit.  On SQLite, one
    transaction contains several writes, and a write reads rows that earlier ones have changed.  If
    such a row were cached before the commit, a concurrent read would find an older stored row, and
    would reject this older row as replayed.
    """

    executors: Executors
    identity: Identity
    keys: TransactionKeys
    key_search: KeySearch  # all attempts at one operation share and change it
    row_cache: RowCache
    key_source: KeySource
    may_use_cached_rows: bool  # instead of a read: in a first attempt, with cached keys
    entry_count_at_start: int = 0  # of `row_cache`: see `was_overtaken_by`
    must_lock_rows: bool = False  # after several conflicts, a write locks rows before it reads them
    commit_callbacks: list[Callable[[], None]] | None = None
    chooses_keys: bool = True  # whether to choose current data keys: for a write, or the cache

    @property
    def unknown_key_is_final(self) -> bool:
        """Whether another attempt would raise UnknownKeyError again."""
        search = self.key_search
        return len(search.sources) == 1 and not search.needs_keyring(self.keys)

    def after_commit(self, call: Callable[[], None]) -> None:
        """Call *call*, for example to cache a row: in a write after the commit, in a read now."""
        if self.commit_callbacks is None:
            call()
        else:
            self.commit_callbacks.append(call)

    def cache_session(self, session: StoredSession, witness: WitnessRow | None = None) -> None:
        """After the commit, cache *session*, whose row this write stores."""
        self.after_commit(partial(self.row_cache.put_session, session, witness, is_verified=True))

    def run_commit_callbacks(self) -> None:
        """Cache the rows that a committed write has read or written, and record its data keys."""
        for call in self.commit_callbacks or ():
            call()
        for row in self.keys.new_rows:
            _record_data_key(self.keys.keyring, row)

    def variant_of(self, query: sql.QueryVariants) -> sa.CompoundSelect[Any]:
        """Return the variant of *query* that reads the data keys, too, if this attempt needs it."""
        return query.with_keys if self.key_source is KeySource.QUERY else query.without_keys

    def unwrap_rows(self, query: sql.QueryVariants, answer: Sequence[Row]) -> sql.QueryRows:
        """Return the rows in the *answer* to *query*, and unwrap the data keys among them."""
        rows = sql.QueryRows(answer, query.reads_snapshots)
        if self.key_source is KeySource.QUERY:
            self.keys.unwrap(rows.data_keys, rows.master_fingerprints)
        return rows

    async def read(self, query: sql.QueryVariants, **parameters: object) -> sql.QueryRows:
        """Read the rows of *identity*; *parameters* are those of *query* except the tags."""
        values = {**self.identity.tag_parameters(), **parameters}
        answer = await self.executors.data.read(self.variant_of(query), values)
        return self.unwrap_rows(query, answer)

    def was_overtaken_by(self, cached: CachedRow[Any] | None) -> bool:
        """Whether *cached* was made since this attempt began, perhaps after it had read the row."""
        return cached is not None and cached.entry_number > self.entry_count_at_start

    def forget_session(self) -> None:
        """Remove the session from the caches, because its row is not stored."""
        tag = self.identity.session_tag
        if not self.was_overtaken_by(self.row_cache.sessions.get(tag)):
            self.row_cache.forget_session(tag)

    def forget_user(self) -> None:
        """Remove the user and the session from the caches, because the user's row is not stored."""
        cache, identity = self.row_cache, self.identity
        cached = cache.users.get(identity.user_tag) or cache.sessions.get(identity.session_tag)
        if self.was_overtaken_by(cached):
            return
        cache.found_erased_user |= cached is not None
        self.keys.evict_from_cache(identity.user_tag)
        cache.users.drop(identity.user_tag)
        cache.forget_session(identity.session_tag)


class CachedRowOutdated(Exception):
    """A cached row is not the stored one.  Nothing was changed, and the next attempt reads it."""


class NeedsDataKey(Exception):
    """A data key of the owner, created at *not_before* or later (microseconds UTC), must be stored
    in the key database before the next attempt.
    """

    def __init__(self, owner_tag: bytes, not_before: int) -> None:
        super().__init__("a data key has to be stored first")
        self.owner_tag = owner_tag
        self.not_before = not_before


# --- the runner -----------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class StorageOperation(ABC, Generic[T_co]):
    """A read or write of the rows of *identity*, for `OperationRunner.run`."""

    needs_fresh_keys = False  # whether no attempt uses cached data keys
    # Whether each row is decrypted, even if it was cached: its data key may have been deleted or
    # tampered with since.
    bypasses_row_cache = False
    writes = False
    max_conflicts = MAX_CONFLICTS  # after so many, the operation raises an error

    identity: Identity

    @abstractmethod
    async def execute(self, attempt: Attempt) -> T_co: ...


class _OpenState(NamedTuple):
    """The keys of the database, and the caches of a runner, which are emptied at the time
    *emptied_at* (monotonic seconds).
    """

    keys: DatabaseKeys
    row_cache: RowCache
    # Of sessions and collections, by their ids; any one of each user, by app name and user id; and
    # any one of each app, by its name.
    identities: FifoCache[tuple[object, ...], Identity]
    # See `OperationRunner.cached_object`.
    objects: "WeakKeyDictionary[object, tuple[int, Any]]"
    emptied_at: float
    # The timers that empty the caches.  A strong reference would keep the event loop in memory.
    timers: "WeakKeyDictionary[asyncio.AbstractEventLoop, ref[asyncio.TimerHandle]]"


# The keys are all runners in this process.  No lock is needed, which a forked process could
# inherit locked: adding a key and listing all of them are atomic.
_runners: "WeakKeyDictionary[OperationRunner, None]" = WeakKeyDictionary()


def empty_caches() -> None:
    """Empty the caches of all runners in this process: data keys, decrypted rows and ids.

    Call it after erasing a user: otherwise, a cached data key would decrypt rows of the user that
    an attacker inserts again.
    """
    for reference in _runners.keyrefs():
        if (runner := reference()) is not None:
            runner.empty_caches()


@dataclass(eq=False, repr=False)
class OperationRunner:
    """Runs operations on one database, which it opens on first use.

    *backends* is None if only `data_db` and `key_db` are used.
    *open_keyring* reads the keyring and unwraps its keys; its argument is None, or a keyring whose
    keys need not be unwrapped again.  *before_use* is called with the keyring each time before the
    keys or the caches are used.  *keyring_pause*: see `reread_keyring`.
    """

    executors: Executors
    _backends: Backends | None
    _open_keyring: OpenKeyring
    _: KW_ONLY
    cache_sizes: Caches = Caches()
    keyring_pause: float = RETRY_PAUSE
    before_use: Callable[[Keyring], Awaitable[None]] | None = None
    packing: Packing = Packing()
    creates_tables: bool = True  # whether features create their missing tables and indexes

    def __post_init__(self) -> None:
        self._opened: _OpenState | None = None
        self._locks = LoopLocks()
        # `_read_keyring` raises this error for calls before `_keyring_retry_at`.
        self._keyring_error: SecureSessionError | None = None
        self._keyring_retry_at = 0.0
        _runners[self] = None

    @property
    def backends(self) -> Backends:
        if self._backends is None:
            raise ConfigurationError("this operation needs the root key: give a backend")
        return self._backends

    @property
    def data_db(self) -> RetryingExecutor:
        return RetryingExecutor(self.executors.data)

    @property
    def key_db(self) -> RetryingExecutor:
        return RetryingExecutor(self.executors.keys)

    async def keyring(self) -> Keyring:
        return (await self._ensure_open()).keys.keyring

    async def database_keys(self) -> DatabaseKeys:
        return (await self._ensure_open()).keys

    async def cached_object(self, owner: object, make: Callable[[], T]) -> T:
        """Return the object that is kept for *owner* until the caches are emptied, or until *owner*
        is garbage-collected; *make* returns a new one.

        A forked process gets a new one: a thread of the parent may have been changing the object.
        """
        objects, process = (await self._ensure_open()).objects, os.getpid()
        made: tuple[int, T] | None = objects.get(owner)
        if made is None or made[0] != process:
            made = objects[owner] = process, make()
        return made[1]

    def empty_caches(self, emptied_at: float | None = None) -> None:
        """Empty the caches of unwrapped data keys, decrypted rows and ids; keep the keyring.

        If *emptied_at* is given, empty only caches that are due at this time (monotonic seconds).
        """
        if (opened := self._opened) is not None and emptied_at in (None, opened.emptied_at):
            new = self._with_empty_caches(opened.keys.keyring)
            if emptied_at is None:  # the running timers stay
                new = new._replace(emptied_at=opened.emptied_at, timers=opened.timers)
            self._opened = new

    async def close(self) -> None:
        """Close the connections and discard the keys; the next call opens the database again."""
        started = self._opened and self._opened.timers.get(asyncio.get_running_loop())
        if started and (timer := started()):
            timer.cancel()
        # The frames in an error's traceback refer to keys, so also discard the error.
        self._opened = self._keyring_error = None
        await self.executors.close()

    async def identify(
        self, app_name: str, user_id: str = "", session_id: str = "", is_collection: bool = False
    ) -> Identity:
        """Return the ids together with their tags (blind indexes)."""
        # The tags stay the same when caches expire: `run` empties those.
        opened = (None if self.before_use else self._opened) or await self._ensure_open()
        ids = (app_name, user_id, session_id, is_collection)
        if found := opened.identities.get(ids):
            return found
        known = opened.identities.get(ids[:2]) or opened.identities.get(ids[:1])
        return identify(opened.keys.keyring.index_master, *ids, known)

    @property
    def keyring_if_open(self) -> Keyring | None:
        """The keyring; None if the database is not open."""
        return self._opened and self._opened.keys.keyring

    async def run(self, operation: StorageOperation[T]) -> T:
        """Attempt *operation* until it succeeds, or until an error is final; see `Retries`.

        If a cached user is not stored any more, another process has erased the user.  Then empty
        all caches, which may contain other rows of the user.
        """
        opened = await self._ensure_open()
        try:
            return await self._run_with_retries(operation, opened)
        finally:
            if opened.row_cache.found_erased_user and self._opened is opened:
                self.empty_caches()

    async def _run_with_retries(self, operation: StorageOperation[T], opened: _OpenState) -> T:
        """Attempt *operation* until it succeeds, and return its result."""
        identity, database_keys = operation.identity, opened.keys
        are_cached = all(map(database_keys.by_owner.get, (identity.app_tag, identity.user_tag)))
        if measured_call := telemetry.current_call():
            measured_call.measurements.append((telemetry.DATA_KEY_CACHE[are_cached], 1, 0.0))
        key_search, retries = KeySearch(), None
        sources = _SOURCES_WITH_KEY_DATABASE if self.executors.has_key_database else _SOURCES
        may_use_cached_rows = are_cached and not operation.needs_fresh_keys
        key_search.sources = sources if may_use_cached_rows else sources[1:]
        row_cache = RowCache(0) if operation.bypasses_row_cache else opened.row_cache
        while True:
            source = key_search.sources[0]
            keys = TransactionKeys(
                database_keys,
                keyring_was_reread=key_search.rereads > 0,
                uses_cache=source is KeySource.CACHE,
                stored_key_ids=key_search.stored_key_ids,
                packing=self.packing,
            )
            attempt = Attempt(
                self.executors,
                identity,
                keys,
                key_search,
                row_cache,
                source,
                may_use_cached_rows,
                entry_count_at_start=row_cache.entry_count,
                must_lock_rows=retries is not None and retries.locks_rows,
                commit_callbacks=[] if operation.writes else None,
                chooses_keys=operation.writes or source is not KeySource.CACHE,
            )
            may_use_cached_rows = False
            try:
                try:
                    if source is KeySource.KEY_DATABASE:
                        tags = [identity.app_tag, identity.user_tag]
                        rows = await read_data_keys(self.executors.keys.read, tags)
                        keys.unwrap(rows.data_keys, rows.master_fingerprints)
                    result = await operation.execute(attempt)
                except CachedRowOutdated:
                    continue
                except (UnknownKeyError, StaleKeyring, NeedsDataKey) as error:
                    if not await self._get_missing_keys(error, attempt, database_keys):
                        raise
                else:
                    keys.publish()
                    for row in key_search.unconfirmed_keys:
                        if keys.has_accepted(row):
                            _record_data_key(database_keys.keyring, row)
                    if opened.identities.get(identity[:4]) is not identity:
                        _cache_identity(opened.identities, row_cache, identity)
                    return result
            except (UniqueViolation, Conflict, Disconnected) as error:
                # A new data key is stored only if the keyring that we have read is current.  So
                # another process may have caused the conflict by changing the keyring.
                if keys.new_rows and isinstance(error, Conflict):
                    await self.reread_keyring(database_keys, keys.keyring)
                key_search.unconfirmed_keys += tuple(keys.new_rows)
                retries = retries or Retries(
                    writes=operation.writes, max_conflicts=operation.max_conflicts
                )
                await retries.pause_or_raise(error)

    async def _get_missing_keys(
        self, error: Exception, attempt: Attempt, database_keys: DatabaseKeys
    ) -> bool:
        """Get the keys whose lack made *attempt* raise *error*; return False if there are none left
        to try.
        """
        key_search, keys = attempt.key_search, attempt.keys
        if isinstance(error, NeedsDataKey):
            if len(key_search.stored_key_ids) == _NEW_KEYS:
                raise SecureSessionError(
                    f"{_NEW_KEYS} new data keys were created, and another one is needed: try again",
                    retryable=True,
                ) from None
            row = await self._store_data_key(keys, error)
            key_search.stored_key_ids += (row.id,)
            telemetry.count_retry("new_key")
        elif isinstance(error, StaleKeyring) or key_search.needs_keyring(keys):
            await self.reread_keyring(database_keys, keys.keyring)
            key_search.rereads += 1
            telemetry.count_retry("keyring")
        elif len(key_search.sources) > 1:
            key_search.sources = key_search.sources[1:]
            telemetry.count_retry("unknown_key")
        else:
            return False
        return True

    async def read_data_keys_with_retries(self, owner_tags: Iterable[object]) -> sql.QueryRows:
        """Do the same as the function `read_data_keys`; repeat it if the connection is lost."""
        return await read_data_keys(self.key_db.read, owner_tags)

    async def unwrap_data_keys(self, *owner_tags: object) -> TransactionKeys:
        """Read and unwrap the data keys of some owners.

        A data key that was tampered with raises DecryptionError when it is used.
        """
        database_keys = await self.database_keys()
        rereads = 0
        while True:
            old = database_keys.keyring
            rows = await self.read_data_keys_with_retries(owner_tags)
            keys = TransactionKeys(
                database_keys,
                keyring_was_reread=rereads > 0,
                uses_cache=False,
                packing=self.packing,
            )
            with suppress(StaleKeyring):
                keys.unwrap(rows.data_keys, rows.master_fingerprints)
                if not keys.lacks_master or rereads == _REREADS:
                    return keys
            await self.reread_keyring(database_keys, old)
            rereads += 1

    async def reread_keyring(self, database_keys: DatabaseKeys, old: Keyring) -> None:
        """Read the keyring of *database_keys* again, unless another task has replaced *old* since.

        After an error, calls within the next *keyring_pause* seconds raise the same error.  An
        operation passes the cache that it began with, which it continues to use after `close`.
        """
        async with self._locks.lock("keyring"):
            if database_keys.keyring is not old:
                return
            # Other tasks use *old* meanwhile, also if a row whose key service failed is due again.
            retry_at, old.retry_at = old.retry_at, math.inf
            try:
                now, pause = time.monotonic(), self.keyring_pause
                renewed = await self._read_keyring(old, now, pause=pause)
            finally:
                old.retry_at = min(old.retry_at, retry_at)  # a task of another event loop, too
            database_keys.keyring = renewed
            # Meanwhile the caches may have been emptied, which has put the old keyring into a new
            # object: a rotation would then miss the master key that it has just created.
            if (opened := self._opened) is not None and opened.keys.keyring is old:
                opened.keys.keyring = renewed

    async def _read_keyring(
        self, known: Keyring | None, called_at: float, *, pause: float
    ) -> Keyring:
        """Read the keyring.  If an earlier call has failed, raise its error, unless the caller was
        called more than *pause* seconds after that.
        """
        if self._keyring_error is not None and called_at < self._keyring_retry_at:
            raise copy_of(self._keyring_error)
        self._keyring_error = None
        try:
            return await with_retries(lambda: self._open_keyring(known))
        except SecureSessionError as error:
            self._keyring_error = copy_of(error)
            self._keyring_retry_at = time.monotonic() + pause
            raise

    async def _ensure_open(self) -> _OpenState:
        """Return the keys and the caches; open the database, or empty expired caches, first."""
        opened = self._opened
        if opened is None:
            opened = await self._open()
        elif time.monotonic() >= opened.emptied_at:
            self._opened = opened = self._with_empty_caches(opened.keys.keyring)
        self._start_timer(opened)
        if self.before_use is not None:
            await self.before_use(opened.keys.keyring)
        return opened

    def _start_timer(self, opened: _OpenState) -> None:
        """Empty the caches when they expire, even if no operation follows.

        Each event loop has a timer of its own: that of a loop that has ended would never fire.
        """
        loop = asyncio.get_running_loop()
        if loop not in opened.timers:
            seconds = opened.emptied_at - time.monotonic()
            opened.timers[loop] = ref(call_later(seconds, self.empty_caches, opened.emptied_at))

    async def _open(self) -> _OpenState:
        called_at = time.monotonic()
        async with self._locks.lock("open"):
            if self._opened is None:
                # If another task has failed while this one waited, raise its error.  If each task
                # tried again, the last one would wait for the time-outs of all.
                try:
                    keyring = await self._read_keyring(None, called_at, pause=0.0)
                except BaseException as error:
                    audit.record_opened(None, type(error).__name__)
                    raise
                audit.record_opened(keyring.database_id, None)
                # Another event loop may have opened the database meanwhile, and marked its keyring
                # with an indexed state key.
                self._opened = self._opened or self._with_empty_caches(keyring)
            self._start_timer(self._opened)
            return self._opened

    def _with_empty_caches(self, keyring: Keyring) -> _OpenState:
        backends, sizes = self.backends, self.cache_sizes
        return _OpenState(
            DatabaseKeys(
                keyring, backends.by_id, backends.writing_backend, FifoCache(sizes.data_keys)
            ),
            RowCache(sizes.sessions, sizes.events),
            FifoCache(sizes.sessions),
            WeakKeyDictionary(),
            time.monotonic() + sizes.seconds,
            WeakKeyDictionary(),
        )

    async def _store_data_key(self, keys: TransactionKeys, need: NeedsDataKey) -> DataKeyRow:
        """Store the data key that the attempt needs in the key database, and return its row."""
        row = keys.create_data_key(need.owner_tag, need.not_before)
        transaction = partial(apply_or_conflict, key_insertion(keys, row))
        record = partial(_record_data_key, keys.keyring, row)
        await self.executors.keys.write(transaction, record)
        return row


def _cache_identity(
    identities: FifoCache[tuple[object, ...], Identity], rows: RowCache, identity: Identity
) -> None:
    """Cache *identity* if *rows* has its rows: computing tags takes a seventh of an empty read.

    An operation that bypasses the row cache has none: some commands know only the tag of a user.
    """
    owner = rows.users.get(identity.user_tag)
    if not identity.user_id:
        owner = owner or rows.apps.get(identity.app_tag)
    if owner and (not identity.session_id or rows.sessions.get(identity.session_tag)):
        identities.put(identity[:4], identity)
        for ids in identity[:2], identity[:1]:
            if not identities.get(ids):
                identities.put(ids, identity)


def _record_data_key(keyring: Keyring, row: DataKeyRow) -> None:
    audit.record_new_key(keyring.database_id, "data key", row.id, owner=row.owner.hex())


def key_insertion(keys: TransactionKeys, row: DataKeyRow) -> list[Change]:
    """Return the changes that store a data key if the stored keyring is the one of *keys*."""
    return [Change(sql.INSERT_KEY, row._asdict() | keys.keyring_guard())]


def insertion_changes(statement: sa.Insert, rows: Sequence[Parameters]) -> list[Change]:
    """Return the changes that insert *rows*, and do not check whether they are inserted."""
    return [Change(statement, {}, must_match_one_row=False, rows=rows)] if rows else []


def apply_or_conflict(changes: Sequence[Change]) -> Steps[None]:
    """Make *changes*; raise Conflict if the first one matched no row: see `Apply`."""
    if not (yield Apply(changes)):
        raise Conflict


def try_apply(changes: Sequence[Change]) -> Steps[bool]:
    """Make *changes*; return False, and change nothing, if the first one matched no row."""
    return bool((yield Apply(changes)))


async def read_data_keys(
    read: Callable[[sa.Executable, Parameters], Awaitable[Sequence[Row]]],
    owner_tags: Iterable[object],
) -> sql.QueryRows:
    """Return all data keys of some owners, and the fingerprint of each keyring row.

    *read* runs a query on the database that stores data keys.
    """
    rows = sql.QueryRows(())
    # A modified tag may have another type: no data key has such an owner.
    wanted = {tag for tag in owner_tags if isinstance(tag, bytes)} or {b""}
    for tags in sql.padded_chunks(wanted):
        part = sql.QueryRows(await read(sql.keys_of_owners(len(tags)), sql.list_parameters(tags)))
        rows.data_keys += part.data_keys
        rows.master_fingerprints = part.master_fingerprints
    return rows
