"""`PlaintextFallbackService`: use a database while its sessions are still being copied into it.

The rules, which docs/migrate.md explains:

- A row in `secure_migrated` supersedes a session in the source, or the state of a user or an app.
  The row is written when the session or the state is copied, deleted or erased.  The row stays.
- A session without such a row, and without a row in the encrypted database, is read from the
  source.  The first write to the session copies it.
- The state of a user or an app is copied before the first write that concerns it.

The source must not change any more, so a value that was read from the source stays the same in the
source.  But between two queries, another process may copy a session, and append to the copy.  So
after a read has used the source, the read queries `secure_migrated` again.  If the session or a
state was copied meanwhile, the read is repeated.
"""

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from copy import deepcopy
from datetime import timedelta
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.errors.session_not_found_error import SessionNotFoundError
from google.adk.events import Event
from google.adk.sessions import BaseSessionService, Session
from google.adk.sessions.base_session_service import GetSessionConfig, ListSessionsResponse

from adk_secure_sessions import audit
from adk_secure_sessions.caches import Lru
from adk_secure_sessions.concurrency import ClosedByWith, LoopLocks
from adk_secure_sessions.db.connect import check_read_timeout
from adk_secure_sessions.errors import ConfigurationError, DatabaseError
from adk_secure_sessions.formats import events, states
from adk_secure_sessions.formats.states import APP_PREFIX, USER_PREFIX, JsonObject
from adk_secure_sessions.keys.keyring import Keyring
from adk_secure_sessions.migration.adk_tables import AdkTables
from adk_secure_sessions.migration.package_1x import Package1x
from adk_secure_sessions.migration.sources import (
    Ids,
    Selection,
    SessionContent,
    SourceSession,
    Unreadable,
)
from adk_secure_sessions.service import (
    STALE,
    EncryptedSessionService,
    StaleSessionError,
    check_ids,
    reject_unknown_methods,
)
from adk_secure_sessions.storage import reads
from adk_secure_sessions.storage.features.imports import Imports, ImportStatus
from adk_secure_sessions.tracebacks import hides_locals

T = TypeVar("T")

_Ids = tuple[str, str, str]  # the app name, the user id and the session id

logger: logging.Logger = logging.getLogger(__name__)

# The marker of a session object that was read from the source begins with this text.  The version
# of the session in the source follows.
_OF_SOURCE = "plaintext source:"
_OF_DATABASE = re.compile(r"[0-9a-f]+\.\d+")  # the markers of `EncryptedSessionService`
_CACHED_OWNERS = 10_000  # the maximum number of apps and users in `_moved`
_CANCEL_TIMEOUT = 5.0  # seconds to wait for a cancelled query of the source
_LOG_PAUSE = 60.0  # seconds between two messages with the number of reads


# Returns the `EncryptedSessionService` that the methods call.  The decorators of `audit` need this
# service, so that they write only one audit record for each operation.
_THE_SERVICE = attrgetter("_service")


@hides_locals
class PlaintextFallbackService(BaseSessionService, ClosedByWith):
    """Reads sessions that were not copied yet from a plaintext source; writes only to *service*.

    Use this service while `adk-secure-sessions migrate` copies the sessions of an application that
    is in use.  **Nothing that it reads from the source is authenticated**: an attacker with write
    access to the source can forge sessions that were not copied yet.  The first write to such a
    session stores the forgery encrypted (docs/threats.md).  Every process that writes to the source
    must have ended before the first process with this service starts.

    If `migrate compare` finds no difference, it stores an authenticated mark in the database.  A
    `PlaintextFallbackService` that is opened afterwards does not read the source any more.  From
    then on, you can use *service* itself instead of this object.

    The arguments, the results and the errors of the methods are those of `EncryptedSessionService`.
    They also raise `ConfigurationError` if a session or state in the source cannot be read.  This
    class has no `list_sessions_page`, because the pages would need one order of the sessions of the
    database and of the source.

    Args:
        service: The service of the encrypted database.  Also pass this service, not the
            `PlaintextFallbackService`, to an `EncryptedArtifactService` or another service that
            uses the same database.
        source: The plaintext source.
        read_timeout: Seconds after which a query of the source is interrupted, and the operation
            raises `DatabaseError`; None for no limit.  Queries of *service* are not limited.

    Attributes:
        fallback_reads: How many queries this object has sent to the source.
        copied_sessions: How many sessions this object has copied.

    Raises:
        ConfigurationError: An argument has another type, *read_timeout* is not positive, or
            *source* is a `Package1x`.
    """

    def __init__(
        self,
        service: EncryptedSessionService,
        source: AdkTables,
        *,
        read_timeout: float | None = 60.0,
    ) -> None:
        if not isinstance(service, EncryptedSessionService):
            raise ConfigurationError(
                f"service must be an EncryptedSessionService, not {type(service).__name__}"
            )
        if not isinstance(source, AdkTables):
            raise ConfigurationError(f"source must be an AdkTables, not {type(source).__name__}")
        if isinstance(source, Package1x):  # its states are ciphertext
            raise ConfigurationError(
                "a database of adk-secure-sessions 1.x cannot be the source of a fallback, because "
                "it is not plaintext: stop the application, and copy the database with `migrate`"
            )
        check_read_timeout(read_timeout)
        self.fallback_reads: int = 0
        self.copied_sessions: int = 0
        self._service = service
        self._recording = service._recording
        self._unit = service._unit
        self._imports = Imports(service._unit, service._index, create_table=service._creates_tables)
        self._source = source
        self._read_timeout = read_timeout
        # Cancelled queries that have not ended.  asyncio keeps no reference to a task, so Python
        # could delete the task before it ends.
        self._cancelled: set[asyncio.Future[Any]] = set()
        self._locks = LoopLocks()
        # The keyring that was current when the mark that ends the migration was last read.
        self._keyring: Keyring | None = None
        self._is_complete = False
        self._log_at = 0.0

    @property
    def service(self) -> EncryptedSessionService:
        """The service of the encrypted database."""
        return self._service

    async def prepare_tables(self) -> None:
        """Open the encrypted database, and create missing tables, among them `secure_migrated`.

        Raises the errors of `EncryptedSessionService.prepare_tables`.
        """
        await self._service.prepare_tables()
        await self._falls_back()

    @audit.accessed("session.create", _THE_SERVICE)
    async def create_session(
        self,
        *,
        app_name: str,
        user_id: str,
        state: dict[str, Any] | None = None,
        session_id: str | None = None,
        expires_after: timedelta | None = None,
    ) -> Session:
        """Store a new session, encrypted.

        Copy the states of the app and the user first, if they were not copied yet.  Raise
        AlreadyExistsError also if the source has a session with this id.
        """
        check_ids(app_name, user_id, session_id or "")
        if await self._falls_back():
            if session_id is not None and await self._has((app_name, user_id, session_id)):
                raise AlreadyExistsError("A session with this id already exists.")
            await self._copy_states(app_name, user_id)
        return await self._service.create_session(
            app_name=app_name,
            user_id=user_id,
            state=state,
            session_id=session_id,
            expires_after=expires_after,
        )

    @audit.accessed("session.read", _THE_SERVICE)
    async def get_session(
        self,
        *,
        app_name: str,
        user_id: str,
        session_id: str,
        config: GetSessionConfig | None = None,
    ) -> Session | None:
        """Read a session from the database or, if it was not copied yet, from the source."""
        ids = (app_name, user_id, session_id)
        check_ids(*ids)
        get = partial(
            self._service.get_session,
            app_name=app_name,
            user_id=user_id,
            session_id=session_id,
            config=config,
        )
        if not await self._falls_back():
            return await get()
        owners: list[Ids] = [(app_name,), (app_name, user_id)]
        is_superseded = False
        while True:
            moved = await self._among_moved(owners)
            session = await get()
            if session is not None:
                await self._states(app_name, [], moved, [session])
            elif is_superseded:
                return None
            else:
                # Somebody may have copied the session after the database was read.
                is_superseded = await self._is_superseded(ids)
                if is_superseded:
                    continue
                with_events = config is None or config.num_recent_events != 0
                found = await self._read(ids, with_events=with_events)
                if found is None:
                    return None
                state = await self._states(app_name, [user_id], moved)
                session = _session(*found, state, _history(found[1], config))
                if await self._is_superseded(ids):
                    continue
            if await self._among_moved(owners) == moved:
                return session

    @audit.accessed("sessions.list", _THE_SERVICE)
    async def list_sessions(
        self, *, app_name: str, user_id: str | None = None
    ) -> ListSessionsResponse:
        """List the sessions of the database, and those of the source that were not copied yet.

        A session of the source that cannot be read is left out, and logged, if
        `skip_unreadable_sessions` of *service* is True.
        """
        check_ids(app_name, user_id or "", "")
        if not await self._falls_back():
            return await self._service.list_sessions(app_name=app_name, user_id=user_id)
        # Read the source first.  If a session is copied after that, both listings contain it.
        of_source = await self._sessions_of(app_name, user_id)
        owners: set[Ids] = {(app_name,), *(one.ids[:2] for one in of_source)}
        moved = await self._among_moved(owners)
        while True:
            response = await self._service.list_sessions(app_name=app_name, user_id=user_id)
            owners |= {(app_name, session.user_id) for session in response.sessions}
            now_moved = await self._among_moved(owners)
            # If a state was copied after `moved` was read, the listing may lack this state.  Then
            # list the sessions again.
            if now_moved == moved:
                break
            moved = now_moved
        listed = response.sessions
        known = {(one.app_name, one.user_id, one.id) for one in listed}
        of_source = {one: content for one, content in of_source.items() if one.ids not in known}
        users = {one.user_id for one in of_source}
        found = await self._states(app_name, users, moved, listed)
        listed += [_session(one, content, found, []) for one, content in of_source.items()]
        listed.sort(key=lambda one: (one.last_update_time, one.user_id, one.id))
        return response

    @audit.accessed("session.delete", _THE_SERVICE)
    async def delete_session(self, *, app_name: str, user_id: str, session_id: str) -> None:
        """Delete a session from the database.

        If the session is in the source and was not copied yet, store a tombstone: a row that
        forbids reading and copying the session.  The source is not changed.  The command
        `migrate erase-source` deletes the session there.
        """
        ids = (app_name, user_id, session_id)
        check_ids(*ids)
        if await self._falls_back() and await self._has(ids):
            await self._imports.tombstone(*ids)
        await self._service.delete_session(
            app_name=app_name, user_id=user_id, session_id=session_id
        )

    @audit.accessed("user.read", _THE_SERVICE)
    async def get_user_state(self, *, app_name: str, user_id: str) -> dict[str, Any]:
        """Return the user's state, which is read from the source if it was not copied yet."""
        check_ids(app_name, user_id, "")
        owner = (app_name, user_id)
        while True:
            moved = not await self._falls_back() or bool(await self._among_moved([owner]))
            state = await self._service.get_user_state(app_name=app_name, user_id=user_id)
            if moved or state:
                return state
            state = await self._state(owner)
            if not await self._among_moved([owner]):
                return state

    @audit.accessed("session.write", _THE_SERVICE)
    async def append_event(self, session: Session, event: Event) -> Event:
        """Store `event`, encrypted, then apply it to `session`.

        Copy the session, and the states of its app and its user, if they were not copied yet.
        Raise StaleSessionError also if `session` was loaded from the source, and another version of
        the session was copied.
        """
        if event.partial:
            return event
        events.prepare(event, session.state)
        ids = (session.app_name, session.user_id, session.id)
        check_ids(*ids)
        # Parallel agents may append to the same session object, which is copied once.
        async with self._locks.hold(ids):
            await self._prepare_write(session, ids)
        return await self._service.append_event(session, event)

    async def flush(self) -> None:
        """Do nothing: `append_event` returns after the event is stored."""

    async def close(self) -> None:
        """Close *service* and the source; the next call opens them again."""
        self._keyring = None
        try:
            await self._service.close()
        finally:
            await self._in_time(self._source.close())

    # --- Copied sessions and states ---------------------------------------------------------------

    async def _falls_back(self) -> bool:
        """Return whether to read the source: not if the mark that ends the migration is stored.

        The mark is read again each time that this process has read the keyring.
        """
        keyring = (await self._unit.keys()).keyring
        if keyring is not self._keyring:
            is_first = self._keyring is None
            self._is_complete = await self._imports.migration_end() is not None
            if self._is_complete:
                logger.warning(
                    "the migration is complete: PlaintextFallbackService does not read the "
                    "plaintext source; replace it by EncryptedSessionService"
                )
            else:
                await self._imports.prepare_imports()
                if is_first:
                    logger.warning(
                        "plaintext fallback is switched on: sessions and states that were not "
                        "copied yet are read from %s, without any authentication",
                        self._source.description,
                    )
            self._keyring = keyring
        return not self._is_complete

    async def _is_superseded(self, ids: _Ids) -> bool:
        return bool(await self._imports.imported([ids]))

    async def _is_stored(self, ids: _Ids) -> bool:
        """Return whether the session is in the database, even if it has expired."""
        who = await self._unit.identify(*ids)
        get = reads.GetSession(who, lambda *_: None, 0, finds_expired=True)
        return await self._unit.run(get) is not None

    async def _among_moved(self, owners: Iterable[Ids]) -> set[Ids]:
        """Return the elements of *owners* whose state was copied or erased."""
        wanted, cache = set(owners), await self._moved()
        moved = {owner for owner in wanted if cache.get(owner)}
        if unknown := wanted - moved:
            for owner in await self._imports.imported_states(unknown):
                cache.put(owner, True)
                moved.add(owner)
        return moved

    async def _moved(self) -> Lru[Ids, bool]:
        """Return the cache of owners whose state was copied or erased, which is never undone."""
        return await self._unit.attached(self, lambda: Lru(_CACHED_OWNERS))

    # --- Reading the source -----------------------------------------------------------------------

    async def _query(self, query: Awaitable[T]) -> T:
        self._count()
        return await self._in_time(query)

    async def _batches(self, batches: AsyncIterator[T]) -> AsyncIterator[T]:
        while (batch := await self._in_time(anext(batches, None))) is not None:
            self._count()
            yield batch

    async def _in_time(self, query: Awaitable[T]) -> T:
        """Return the result of *query*, and cancel it if it takes longer than `read_timeout`.

        A server that does not answer does not react to the cancellation, either: wait at most 5
        seconds for its end.
        """
        task = asyncio.ensure_future(query)
        try:
            done, _ = await asyncio.wait({task}, timeout=self._read_timeout)
            if done:
                return task.result()
            raise DatabaseError(
                f"a read of the plaintext source ({self._source.place}) did not end within "
                f"{self._read_timeout:g} s and was interrupted: check that this database answers "
                "and try again, or raise read_timeout of PlaintextFallbackService",
                retryable=True,
            )
        finally:
            if not task.done():
                task.cancel()
                self._cancelled.add(task)
                task.add_done_callback(self._forget)
                await asyncio.wait({task}, timeout=_CANCEL_TIMEOUT)

    def _forget(self, query: asyncio.Future[Any]) -> None:
        self._cancelled.discard(query)
        if not query.cancelled():
            query.exception()  # asyncio would log an exception that nobody has looked at

    def _count(self) -> None:
        self.fallback_reads += 1
        logger.debug("plaintext fallback: read %d of the source", self.fallback_reads)
        audit.record("plaintext.read", source=self._source.description)
        now = time.monotonic()
        if now >= self._log_at:
            self._log_at = now + _LOG_PAUSE
            logger.info(
                "plaintext fallback: %d reads of the source so far, %d sessions copied",
                self.fallback_reads,
                self.copied_sessions,
            )

    async def _has(self, ids: _Ids) -> bool:
        """Return whether the source has a session that no row of `secure_migrated` supersedes."""
        found = await self._query(self._source.find(*ids))
        # Query `secure_migrated` last.  With the other order, somebody could copy and delete the
        # session between the two queries, and the deleted session would be returned.
        return found is not None and not await self._is_superseded(ids)

    async def _sessions_of(
        self, app_name: str, user_id: str | None
    ) -> dict[SourceSession, SessionContent]:
        """Return the sessions of the source that no row of `secure_migrated` supersedes."""
        found = {}
        async for batch in self._batches(self._source.sessions_of(app_name, user_id)):
            superseded = await self._imports.imported(session.ids for session in batch)
            for session, content in batch.items():
                if session.ids in superseded:
                    continue
                if isinstance(content, SessionContent):
                    found[session] = content
                elif self._service._skip:
                    logger.error("left out of a listing: %s", _unreadable(content))
                else:
                    raise _unreadable(content)
        return found

    async def _read(
        self, ids: _Ids, *, with_events: bool = True
    ) -> tuple[SourceSession, SessionContent] | None:
        found = await self._query(self._source.find(*ids))
        if found is None:
            return None
        session, content = found[0], _readable(found[1])
        if with_events:
            read = await self._query(self._source.read([session]))
            if session not in read:
                return None
            content = _readable(read[session])
        return session, content

    async def _state(self, owner: Ids) -> JsonObject:
        return _readable(await self._query(self._source.state(*owner)), "a state") or {}

    # --- States -----------------------------------------------------------------------------------
    # An `EncryptedSessionService` that is used without this class may have written the state of an
    # app or a user before the state was copied.  Then the encrypted state is used, and the state in
    # the source is neither used nor copied.

    async def _states(
        self,
        app_name: str,
        user_ids: Iterable[str],
        moved: set[Ids],
        listed: Sequence[Session] = (),
    ) -> dict[Ids, JsonObject]:
        """Return the states of an app and of its users, and complete those of *listed*.

        If the encrypted state is empty, and its owner is not in *moved* (those whose state was
        copied or erased), the state is that in the source.  The sessions *listed* of the database
        contain the encrypted states, which are not read again.
        """
        found: dict[Ids, JsonObject] = {}
        for session in listed:
            scopes, user = states.split(session.state), (app_name, session.user_id)
            found[(app_name,)] = found.get((app_name,)) or scopes.app
            found[user] = found.get(user) or scopes.user
        for user_id in user_ids:
            if (app_name, user_id) not in found:
                who = await self._unit.identify(app_name, user_id)
                of_app, of_user = await self._unit.run(reads.GetStates(who))
                found[(app_name,)] = states.loads(of_app, "the app's state")
                found[app_name, user_id] = states.loads(of_user, "the user's state")
        missing = {owner for owner, state in found.items() if not state} - moved
        of_source = await self._states_of(app_name, missing)
        for session in listed:
            owners: dict[str, Ids] = {
                APP_PREFIX: (app_name,),
                USER_PREFIX: (app_name, session.user_id),
            }
            for prefix, owner in owners.items():
                state = deepcopy(of_source.get(owner, {}))
                session.state.update({prefix + key: value for key, value in state.items()})
        return found | of_source

    async def _states_of(self, app_name: str, owners: Iterable[Ids]) -> dict[Ids, JsonObject]:
        """Return the states in the source: of several users, with few queries for the whole app."""
        wanted = set(owners)
        found: dict[Ids, JsonObject] = {}
        if len(wanted) > 2:
            async for batch in self._batches(self._source.states(Selection(app_name))):
                for ids, state in batch.items():
                    if ids in wanted:
                        found[ids] = _readable(state, "a state")
            wanted &= {(app_name,)} - found.keys()
        for one in wanted:
            found[one] = await self._state(one)
        return found

    # --- Copying ----------------------------------------------------------------------------------

    async def _copy_states(self, app_name: str, user_id: str) -> None:
        owners: list[Ids] = [(app_name,), (app_name, user_id)]
        moved = await self._among_moved(owners)
        for owner in owners:
            if owner in moved:
                continue
            state = states.encode(await self._state(owner))
            result = await self._imports.import_state(owner, state)
            if result is ImportStatus.SAME_ID:
                logger.warning(
                    "a state was written without PlaintextFallbackService before it was copied: "
                    "the state in the plaintext source is not used"
                )
            (await self._moved()).put(owner, True)

    async def _copy(self, ids: _Ids) -> ImportStatus | None:
        """Copy a session and its states; return None if the source does not have it."""
        found = await self._read(ids)
        if found is None:
            return None
        session, content = found
        await self._copy_states(*ids[:2])
        result = await self._imports.import_session(
            *ids,
            state=states.encode(content.state),
            events=content.events,
            created_at=content.created_at,
            updated_at=content.updated_at,
            expires_at=content.expires_at,
            source_version=session.version,
        )
        self.copied_sessions += result is ImportStatus.NEW
        return result

    async def _prepare_write(self, session: Session, ids: _Ids) -> None:
        """Copy the session and the states that an append to *session* needs."""
        marker = session._storage_update_marker or ""
        result = None
        if await self._falls_back():
            is_known = _OF_DATABASE.fullmatch(marker) or await self._is_superseded(ids)
            if not is_known:
                result = await self._copy(ids)
            # For a session that is neither in the source nor in the database, store nothing.
            if is_known or (result is None and await self._is_stored(ids)):
                await self._copy_states(*ids[:2])
        if not marker.startswith(_OF_SOURCE):
            return
        if result is ImportStatus.SAME_ID:
            raise StaleSessionError(STALE)
        imported = (await self._imports.imported([ids])).get(ids)
        if imported is None or imported.row.is_tombstone:
            raise SessionNotFoundError("Session not found.")
        if not imported.has_source(marker.removeprefix(_OF_SOURCE)):
            raise StaleSessionError(STALE)
        # `append_event` compares the marker with the stored session, which other processes may
        # have changed since it was copied.
        session._storage_update_marker = f"{imported.row.row_id:x}.{imported.row.number}"


reject_unknown_methods(PlaintextFallbackService, BaseSessionService)


def _session(
    session: SourceSession,
    content: SessionContent,
    found: Mapping[Ids, JsonObject],
    history: list[Event],
) -> Session:
    app_name, user_id, session_id, version = session
    app, user = found.get((app_name,), {}), found.get((app_name, user_id), {})
    made = Session(
        id=session_id,
        app_name=app_name,
        user_id=user_id,
        state=deepcopy(states.merge(app, user, content.state)),
        events=[],
        last_update_time=content.updated_at / 1_000_000,
    )
    made.events = history
    made._storage_update_marker = _OF_SOURCE + version
    return made


def _history(content: SessionContent, config: GetSessionConfig | None) -> list[Event]:
    """Return the events that *config* selects, as `EncryptedSessionService.get_session` does."""
    found = [
        events.decode(event.plaintext, f"event {number}", table="the plaintext source")
        for number, event in enumerate(content.events)
    ]
    if config and config.after_timestamp:
        found = [event for event in found if event.timestamp >= config.after_timestamp]
    if config and config.num_recent_events is not None:
        found = found[-config.num_recent_events :]
    return found


def _readable(found: T | Unreadable, what: str = "a session") -> T:
    if isinstance(found, Unreadable):
        raise _unreadable(found, what)
    return found


def _unreadable(found: Unreadable, what: str = "a session") -> ConfigurationError:
    return ConfigurationError(f"{what} of the plaintext source cannot be read: {found.reason}")
