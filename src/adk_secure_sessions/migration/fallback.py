"""`PlaintextFallbackService`: use a database while its sessions are still being copied into it.

The rules, which docs/migrate.md explains:

- A row in `secure_migrated` supersedes a session in the source, or the state of a user or an app.
  The row is written when the session or the state is copied, deleted or erased.  The row stays.
- A session without such a row, and without a row in the encrypted database, is copied before it is
  read or written to.  A listing reads it from the source.
- The state of a user or an app is copied before the first operation that concerns it.

Imports are atomic: if another process copies, continues or deletes a session meanwhile, the import
stores nothing.  So this module only has to read the encrypted database after it has copied.
"""

import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from google.adk.events import Event
from google.adk.sessions import BaseSessionService, Session
from google.adk.sessions.base_session_service import GetSessionConfig, ListSessionsResponse

from adk_secure_sessions import audit
from adk_secure_sessions.caches import FifoCache
from adk_secure_sessions.concurrency import ClosedByWith, in_groups
from adk_secure_sessions.errors import ConfigurationError, DatabaseError
from adk_secure_sessions.formats import json_text
from adk_secure_sessions.hiding import hides_locals
from adk_secure_sessions.keys.keyring import Keyring
from adk_secure_sessions.migration.adk_tables import AdkTables
from adk_secure_sessions.migration.package_1x import Package1xTables
from adk_secure_sessions.migration.sources import (
    Ids,
    ListedSession,
    Selection,
    SessionContent,
    Unreadable,
)
from adk_secure_sessions.service import EncryptedSessionService, check_ids, reject_unknown_methods
from adk_secure_sessions.storage import reads
from adk_secure_sessions.storage.features.imports import Imports, ImportStatus

T = TypeVar("T")

logger: logging.Logger = logging.getLogger(__name__)

_SERVICE_MARKER = re.compile(r"[0-9a-f]+\.\d+")  # the markers of `EncryptedSessionService`
_CACHED_OWNERS = 10_000  # the maximum number of apps and users whose states are settled
_AT_ONCE = 32  # the number of states that are copied at the same time
_LOG_PAUSE = 60.0  # seconds between two messages with the number of reads


@hides_locals
class PlaintextFallbackService(BaseSessionService, ClosedByWith):
    """Copies sessions from a plaintext source when they are used; writes only to *service*.

    Use this service while `adk-secure-sessions migrate` copies the sessions of an application that
    is in use.  **Nothing that it reads from the source is authenticated**: an attacker with write
    access to the source can forge sessions that were not copied yet.  The first `get_session` or
    `append_event` of such a session stores the forgery encrypted (docs/threats.md).  Every process
    that writes to the source must have ended before the first process with this service starts.

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
            *source* is a `Package1xTables`.
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
        if isinstance(source, Package1xTables):  # its states are ciphertext
            raise ConfigurationError(
                "a database of adk-secure-sessions 1.x cannot be the source of a fallback, because "
                "it is not plaintext: stop the application, and copy the database with `migrate`"
            )
        source.set_read_timeout(read_timeout)
        self.fallback_reads: int = 0
        self.copied_sessions: int = 0
        self._service = service
        self._auditing = service._auditing._replace(inner_service=service)
        self._runner = runner = service._runner
        self._imports = Imports(runner, service._search_index)
        self._source = source
        # The keyring that was current when the mark that ends the migration was last read.
        self._keyring: Keyring | None = None
        self._is_complete = False
        self._log_at = 0.0
        self._has_warned = False  # of a state that a service without fallback has written
        self._state_copies = 0  # how often this object has copied states

    @property
    def service(self) -> EncryptedSessionService:
        """The service of the encrypted database."""
        return self._service

    async def prepare_tables(self) -> None:
        """Open the encrypted database, and create missing tables, among them `secure_migrated`.

        Raises the errors of `EncryptedSessionService.prepare_tables`.
        """
        await self._service.prepare_tables()
        await self._prepare_source()

    @audit.audited_access("session.create")
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

        Copy the states of the app and the user first, if they were not copied yet, and a session of
        the source with this id.
        """
        check_ids(app_name, user_id, session_id or "")
        if await self._prepare_source():
            await self._copy_states(app_name, user_id)
            if session_id is not None and await self._source_has((app_name, user_id, session_id)):
                await self._copy_session((app_name, user_id, session_id))
        return await self._service.create_session(
            app_name=app_name,
            user_id=user_id,
            state=state,
            session_id=session_id,
            expires_after=expires_after,
        )

    @audit.audited_access("session.read")
    async def get_session(
        self,
        *,
        app_name: str,
        user_id: str,
        session_id: str,
        config: GetSessionConfig | None = None,
    ) -> Session | None:
        """Read a session from the database, into which it is copied if it was not copied yet."""
        ids = (app_name, user_id, session_id)
        check_ids(*ids)
        get = partial(
            self._service.get_session,
            app_name=app_name,
            user_id=user_id,
            session_id=session_id,
            config=config,
        )
        if await self._prepare_source():
            await self._copy_states(app_name, user_id)
            session = await get()
            if session is not None or not await self._copy_session(ids):
                return session
        return await get()

    @audit.audited_access("sessions.list")
    async def list_sessions(
        self, *, app_name: str, user_id: str | None = None
    ) -> ListSessionsResponse:
        """List the sessions of the database, and those of the source that were not copied yet.

        Copy the states of the app and of these users, but no sessions.  If *service* has
        `skip_unreadable_sessions`, unreadable sessions of the source, and all sessions of a user
        whose state there is unreadable, are left out, and logged.
        """
        check_ids(app_name, user_id or "", "")
        listing = partial(self._service.list_sessions, app_name=app_name, user_id=user_id)
        if not await self._prepare_source():
            return await listing()
        # Read the source first.  If a session is copied after that, both listings contain it.
        source_sessions = await self._source_sessions(app_name, user_id)
        state_copies, response = self._state_copies, await listing()
        users = {session.user_id for session in response.sessions}
        users |= {session.user_id for session in source_sessions}
        skips = self._service._skips_unreadable
        unreadable = await self._copy_states(app_name, *users, skips_unreadable=skips)
        # `migrate` copies states after sessions.  If a state was not copied when the database was
        # read, the listing lacks it: list the sessions again.
        if self._state_copies != state_copies:
            response = await listing()
        listed = {(session.app_name, session.user_id, session.id) for session in response.sessions}
        uncopied = [session for session in source_sessions if session.ids not in listed]
        states_of = {}
        for user in {session.user_id for session in uncopied}:
            identity = await self._runner.identify(app_name, user)
            states_of[user] = await self._runner.run(reads.GetStates(identity))
        response.sessions += [
            _to_session(session, source_sessions[session], *states_of[session.user_id])
            for session in uncopied
        ]
        response.sessions = [one for one in response.sessions if one.user_id not in unreadable]
        response.sessions.sort(
            key=lambda session: (session.last_update_time, session.user_id, session.id)
        )
        return response

    @audit.audited_access("session.delete")
    async def delete_session(self, *, app_name: str, user_id: str, session_id: str) -> None:
        """Delete a session from the database.

        If the session is in the source and was not copied yet, store a tombstone: a row that
        forbids reading and copying the session.  The source is not changed.  The command
        `migrate erase-source` deletes the session there.
        """
        ids = (app_name, user_id, session_id)
        check_ids(*ids)
        if await self._prepare_source() and await self._source_has(ids):
            await self._imports.add_tombstone(*ids)
        await self._service.delete_session(
            app_name=app_name, user_id=user_id, session_id=session_id
        )

    @audit.audited_access("user.read")
    async def get_user_state(self, *, app_name: str, user_id: str) -> dict[str, Any]:
        """Return the user's state, which is copied if it was not copied yet."""
        check_ids(app_name, user_id, "")
        if await self._prepare_source():
            await self._copy_states(app_name, user_id)
        return await self._service.get_user_state(app_name=app_name, user_id=user_id)

    @audit.audited_access("session.write")
    async def append_event(self, session: Session, event: Event) -> Event:
        """Store `event`, encrypted, then apply it to `session`.

        Copy the session, and the states of its app and its user, if they were not copied yet.
        """
        if event.partial:
            return event
        ids = (session.app_name, session.user_id, session.id)
        check_ids(*ids)
        if await self._prepare_source():
            await self._copy_states(session.app_name, session.user_id)
            if not _SERVICE_MARKER.fullmatch(session._storage_update_marker or ""):
                await self._copy_session(ids)
        return await self._service.append_event(session, event)

    async def flush(self) -> None:
        """Do nothing: `append_event` returns after the event is stored."""

    async def close(self) -> None:
        """Close *service* and the source; the next call opens them again."""
        self._keyring = None
        try:
            await self._service.close()
        finally:
            await self._source.close()

    # --- Copied sessions and states ---------------------------------------------------------------

    async def _prepare_source(self) -> bool:
        """Return whether to read the source: not if the mark that ends the migration is stored.

        The mark is read again each time that this process has read the keyring.
        """
        keyring = await self._runner.keyring()
        if keyring is not self._keyring:
            is_first = self._keyring is None
            self._is_complete = await self._imports.migration_mark() is not None
            if self._is_complete:
                logger.warning(
                    "the migration is complete: PlaintextFallbackService does not read the "
                    "plaintext source; replace it by EncryptedSessionService"
                )
            else:
                await self._imports.feature.ensure()
                if is_first:
                    logger.warning(
                        "plaintext fallback is switched on: sessions and states that were not "
                        "copied yet are read from %s, without any authentication",
                        self._source.description,
                    )
            self._keyring = keyring
        return not self._is_complete

    async def _is_superseded(self, ids: Ids) -> bool:
        return bool(await self._imports.rows_for([ids]))

    # --- Reading the source -----------------------------------------------------------------------

    async def _read_source(self, query: Awaitable[T]) -> T:
        self._record_read()
        with self._errors_name_source():
            return await query

    async def _read_batches(self, batches: AsyncIterator[T]) -> AsyncIterator[T]:
        with self._errors_name_source():
            async for batch in batches:
                self._record_read()
                yield batch

    @contextmanager
    def _errors_name_source(self) -> Iterator[None]:
        try:
            yield
        except DatabaseError as error:
            error.args = (f"the plaintext source ({self._source.location}): {error}",)
            raise

    def _record_read(self) -> None:
        self.fallback_reads += 1
        audit.log_event("plaintext.read", source=self._source.description)
        now = time.monotonic()
        if now >= self._log_at:
            self._log_at = now + _LOG_PAUSE
            logger.info(
                "plaintext fallback: %d reads of the source so far, %d sessions copied",
                self.fallback_reads,
                self.copied_sessions,
            )

    async def _source_has(self, ids: Ids) -> bool:
        """Return whether the source has a session that no row of `secure_migrated` supersedes."""
        session = await self._read_source(self._source.find(*ids))
        # Query `secure_migrated` last.  With the other order, somebody could copy and delete the
        # session between the two queries, and the deleted session would be returned.
        return session is not None and not await self._is_superseded(ids)

    async def _source_sessions(
        self, app_name: str, user_id: str | None
    ) -> dict[ListedSession, SessionContent]:
        """Return the sessions of the source that were not superseded and have not expired."""
        contents = {}
        async for batch in self._read_batches(self._source.sessions_of(app_name, user_id)):
            superseded = await self._imports.rows_for(session.ids for session in batch)
            for session, content in batch.items():
                if session.ids in superseded:
                    continue
                try:
                    contents[session] = _readable(content).with_lifetime(self._service._lifetime)
                except ConfigurationError as error:
                    if not self._service._skips_unreadable:
                        raise
                    logger.error("left out of a listing: %s", error)
        return {key: content for key, content in contents.items() if not content.has_expired}

    # --- Copying ----------------------------------------------------------------------------------
    # An `EncryptedSessionService` that is used without this class may have written the state of an
    # app or a user before the state was copied.  Then the encrypted state is used, and the state in
    # the source is neither used nor copied.

    async def _source_states(
        self, app_name: str, wanted: set[Ids]
    ) -> dict[Ids, bytes | Unreadable]:
        """Return the states in the source: of several users, with few queries for the whole app."""
        states: dict[Ids, bytes | Unreadable | None] = {}
        if len(wanted) > 2:
            async for batch in self._read_batches(self._source.states(Selection(app_name))):
                states |= {ids: state for ids, state in batch.items() if ids in wanted}
        else:
            for owner in wanted:
                states[owner] = await self._read_source(self._source.state(*owner))
        return {ids: state for ids, state in states.items() if state is not None}

    async def _copy_states(
        self, app_name: str, *user_ids: str, skips_unreadable: bool = False
    ) -> set[str]:
        """Copy the states of an app and of users that were not copied yet.

        Nothing is stored for an owner that the source does not have.  Return the users whose state
        was skipped because it is unreadable.
        """
        # The owners whose state was copied or erased, which is never undone, or is not in the
        # source, which does not change any more.
        settled: FifoCache[Ids, bool]
        settled = await self._runner.cached_object(self, lambda: FifoCache(_CACHED_OWNERS))
        owners: list[Ids] = [(app_name,), *((app_name, user_id) for user_id in user_ids)]
        unsettled = {owner for owner in owners if not settled.get(owner)}
        if not unsettled:
            return set()
        uncopied = unsettled - (await self._imports.rows_for(unsettled)).keys()
        states: dict[Ids, bytes] = {}
        unreadable: set[Ids] = set()
        for owner, state in (await self._source_states(app_name, uncopied)).items():
            try:
                states[owner] = _readable(state, "a state")
            except ConfigurationError as error:
                if not skips_unreadable or len(owner) == 1:
                    raise
                logger.error("left out of a listing: all sessions of a user: %s", error)
                unreadable.add(owner)

        async def store(owner: Ids) -> ImportStatus:
            return await self._imports.import_state(owner, states[owner])

        results = await in_groups(_AT_ONCE, store, states)
        if ImportStatus.SAME_ID in results and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "a state was written without PlaintextFallbackService before it was copied: "
                "the state in the plaintext source is not used"
            )
        for owner in unsettled - unreadable:
            settled.put(owner, True)
        self._state_copies += 1
        return {owner[1] for owner in unreadable}

    async def _copy_session(self, ids: Ids) -> bool:
        """Copy a session, whose states were copied; return False if the source does not have it."""
        if await self._is_superseded(ids):
            return True
        session = await self._read_source(self._source.find(*ids))
        contents = {} if session is None else await self._read_source(self._source.read([session]))
        if session is None or session not in contents:
            return False
        content = _readable(contents[session]).with_lifetime(self._service._lifetime)
        result = await self._imports.import_session(
            *ids, **content._asdict(), source_etag=session.etag
        )
        self.copied_sessions += result is ImportStatus.NEW
        return True


reject_unknown_methods(PlaintextFallbackService, BaseSessionService)


def _to_session(
    session: ListedSession, content: SessionContent, app_state: bytes, user_state: bytes
) -> Session:
    """Return a session of the source without events, for a listing.

    It has no marker: `append_event` then compares the time of its last update.
    """
    app, user, own = map(json_text.load_state, (app_state, user_state, content.state))
    return Session(
        id=session.session_id,
        app_name=session.app_name,
        user_id=session.user_id,
        state=json_text.merge_scopes(app, user, own),
        events=[],
        last_update_time=content.updated_at / 1_000_000,
    )


def _readable(item: T | Unreadable, what: str = "a session") -> T:
    if isinstance(item, Unreadable):
        raise ConfigurationError(f"{what} of the plaintext source cannot be read: {item.reason}")
    return item
