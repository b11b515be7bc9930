"""`EncryptedSessionService`, which implements ADK's `BaseSessionService`."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import timedelta
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, Never, TypeVar

import sqlalchemy as sa
from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.errors.input_validation_error import InputValidationError
from google.adk.errors.session_not_found_error import SessionNotFoundError
from google.adk.events import Event
from google.adk.platform import time as platform_time
from google.adk.platform import uuid as platform_uuid
from google.adk.sessions import BaseSessionService, Session
from google.adk.sessions.base_session_service import GetSessionConfig, ListSessionsResponse
from sqlalchemy.ext.asyncio import AsyncEngine

from adk_secure_sessions.audit import (
    AccessAuditing,
    Audit,
    AuditedCall,
    audited_access,
    record_rejected,
)
from adk_secure_sessions.backends import EncryptionBackend
from adk_secure_sessions.backends.registry import check_backends
from adk_secure_sessions.caches import Caches
from adk_secure_sessions.concurrency import ClosedByWith, LoopLocks
from adk_secure_sessions.db.connect import executors_for
from adk_secure_sessions.errors import ConfigurationError, DecryptionError, SecureSessionError
from adk_secure_sessions.formats import events, json_text
from adk_secure_sessions.formats.events import microseconds
from adk_secure_sessions.formats.json_text import APP_PREFIX, USER_PREFIX, encode_state, load_state
from adk_secure_sessions.formats.records import Packing, is_unicode
from adk_secure_sessions.formats.times import lifetime_of
from adk_secure_sessions.hiding import HoldsSecrets, hides_locals
from adk_secure_sessions.listings import (
    EventPage,
    SessionPage,
    check_page,
    page_options,
    parse_event_position,
    period,
    position_text,
)
from adk_secure_sessions.storage import reads, writes
from adk_secure_sessions.storage.features.expiry import Expiry
from adk_secure_sessions.storage.features.search_index import SearchIndex
from adk_secure_sessions.storage.opening import open_database
from adk_secure_sessions.storage.operation_runner import OperationRunner
from adk_secure_sessions.storage.schema import (
    NEVER,
    Identity,
    SessionRevision,
    SessionWithStates,
    StoredSession,
    sessions,
    snapshots,
    users,
)
from adk_secure_sessions.telemetry import measured

if TYPE_CHECKING:
    from adk_secure_sessions.storage.features.collections import Collections

try:
    from google.adk.errors import StaleSessionError as StaleSessionError
except ImportError:  # google-adk before 2.7 raises a plain ValueError

    class StaleSessionError(ValueError):  # type: ignore[no-redef]
        """The stored session was changed after the session object was loaded."""


T = TypeVar("T")

logger: logging.Logger = logging.getLogger(__name__)

MAX_ID_BYTES = 1024  # the maximum length of an app name, a user id or a session id in UTF-8

STALE_TEXT = (
    "The session has been modified in storage since it was loaded. "
    "Please reload the session before appending more events."
)


@hides_locals
class EncryptedSessionService(HoldsSecrets, ClosedByWith, BaseSessionService):
    """A drop-in replacement for ADK's `DatabaseSessionService` that encrypts what it stores.

    States, events and the ids of users and sessions are encrypted.  App names and times are stored
    as plaintext.

    `prepare_tables` opens the database and creates its tables.  If you do not call it, the first
    operation does the same.  If the root key is wrong, the call that opens the database raises
    `WrongKeyError`.  Every operation raises:

    - `DecryptionError` if a row that it needs was tampered with or removed;
    - `DatabaseError` if the database cannot be reached, reports an error or takes too long;
    - `ValueError` if an id is not a string or is too long (docs/limits.md).

    If the installed google-adk has a method that this release does not implement, the method raises
    `NotImplementedError`.

    Many tasks may use one service at the same time.  All these tasks must run in one event loop,
    unless `db_url` names a SQLite database.

    Args:
        db_url: A database URL such as `sqlite+aiosqlite:///sessions.db`, or `:memory:`.
        backend: The backend that encrypts all new records.
        additional_backends: Other backends whose records may be read, for example while you
            change from one backend to another.
        db_engine: Your own SQLAlchemy `AsyncEngine`, instead of `db_url`.  The service does not
            close the engine.
        key_db_url: The URL of a separate database for the keys.  A copy of the data database alone
            can then not be decrypted.
        key_db_engine: Your own `AsyncEngine` for the key database, instead of `key_db_url`.
        create_tables: Create missing tables.  If False, a missing table raises
            `ConfigurationError` when the database is opened.
        skip_unreadable_sessions: If True, `list_sessions` and `list_sessions_page` omit a session
            that cannot be decrypted, and log the error.  If False, they raise `DecryptionError`.
        cache: How much is cached, and for how long.
        read_timeout: Seconds after which a query of the database is interrupted, and the operation
            raises `DatabaseError`.  One statement of a write may take ten times as long.  If None,
            there is no limit.
        expires_after: How long after its last update a session expires, for sessions that this
            service creates; None if they do not expire.  The last update is the timestamp of the
            last event.  An expired session acts like a deleted one.  Each `create_session` of a
            service with this option deletes at most two expired sessions; `purge sessions` deletes
            all.
        audit: How each access is recorded in the audit log; None for no such records.
        indexed_state_keys: Keys of the state by which `find_sessions` finds sessions, such as
            `["ticket", "user:mrn"]`.  The database then contains keyed hashes of their values,
            which show which sessions have the same value (docs/search.md).
        packing: How new values are compressed and padded before they are encrypted.
        engine_kwargs: Options of `sqlalchemy.create_engine` for the engine of `db_url`.

    Raises:
        ConfigurationError: An argument cannot be used as given.
    """

    def __init__(
        self,
        db_url: str | sa.URL | None = None,
        backend: EncryptionBackend | None = None,
        additional_backends: Sequence[EncryptionBackend] = (),
        *,
        db_engine: AsyncEngine | None = None,
        key_db_url: str | sa.URL | None = None,
        key_db_engine: AsyncEngine | None = None,
        create_tables: bool = True,
        skip_unreadable_sessions: bool = False,
        cache: Caches = Caches(),
        read_timeout: float | None = 60.0,
        expires_after: timedelta | None = None,
        audit: Audit | None = None,
        indexed_state_keys: Sequence[str] = (),
        packing: Packing = Packing(),
        **engine_kwargs: Any,
    ) -> None:
        # If services.yaml names this class, google-adk creates it with the argument `uri`.
        if backend is None and "uri" in engine_kwargs:
            raise ConfigurationError(
                "in services.yaml, the class of this service is "
                "adk_secure_sessions.integrations.adk.session_service"
            )
        if backend is None:
            raise ConfigurationError("give a backend, for example AesGcmBackend(key)")
        backends = check_backends(backend, additional_backends)
        executors = executors_for(
            db_url, db_engine, key_db_url, key_db_engine, engine_kwargs, read_timeout
        )
        runner = OperationRunner(
            executors,
            backends,
            partial(open_database, executors, backends, create_tables),
            cache_sizes=cache,
            packing=packing,
            creates_tables=create_tables,
        )
        self._runner = runner
        self._expiry = Expiry(runner)
        self._search_index = SearchIndex(runner, indexed_state_keys)
        self._skips_unreadable = skip_unreadable_sessions
        self._page_options = partial(page_options, skips_unreadable=skip_unreadable_sessions)
        self._lifetime = lifetime_of(expires_after)
        self._caches_events = cache.events > 0
        self._locks = LoopLocks()
        self._collections: Collections | None = None
        self._auditing = AccessAuditing(None, None)
        if audit is not None:
            from adk_secure_sessions.storage.features.audit_trail import auditing_for

            self._auditing = auditing_for(runner, audit)

    @property
    def collections(self) -> "Collections":
        # The collections, in which other services of this package store artifacts and memory.  They
        # are imported here because most applications do not use these services.
        from adk_secure_sessions.storage.features.collections import Collections

        if self._collections is None:
            self._collections = Collections(self._runner)
        return self._collections

    @property
    def backend(self) -> EncryptionBackend:
        """The backend that encrypts all new records."""
        return self._runner.backends.writing_backend

    @property
    def stores_plaintext(self) -> bool:
        """True if new records are stored as plaintext, because `backend` is a `NoOpBackend`."""
        return self._runner.backends.stores_plaintext

    @measured
    async def prepare_tables(self) -> None:
        """Open the database now, and create its tables if they do not exist.

        Raises:
            WrongKeyError: The root key does not unwrap the keyring of this database.  Nothing was
                written.
            PlaintextRefusedError: The database's master keys are stored as plaintext, and
                `NoOpBackend` is not listed.
            KeyServiceError: The key provider failed.
            ConfigurationError: The database cannot be used; it was left unchanged.
        """
        await AuditedCall(self._auditing.trail).run(self._runner.keyring)

    @audited_access("session.create")
    async def create_session(
        self,
        *,
        app_name: str,
        user_id: str,
        state: dict[str, Any] | None = None,
        session_id: str | None = None,
        expires_after: timedelta | None = None,
    ) -> Session:
        """Store a new session.

        If an expired session with the same id is stored, it is deleted first.

        Args:
            app_name: The app's name, stored as plaintext.
            user_id: The user's id: any text, stored encrypted.
            state: JSON values by key.  If a value cannot be converted to JSON, its text is stored,
                and a warning is logged.  Keys that start with `app:` are stored in the app's
                state, which all sessions of the app share.  Keys that start with `user:` are
                stored in the user's state, which all sessions of the user share.  Keys that start
                with `temp:` are not stored.
            session_id: The session's id: any text, stored encrypted.  If None, the id is a new
                UUID.
            expires_after: How long after its last update this session expires.  If None, the
                `expires_after` of the service applies.

        Returns:
            The session, without events.  Its state includes the app's state and the user's state,
            under keys that start with `app:` and `user:`.

        Raises:
            AlreadyExistsError: The user already has a session with this id.
            ValueError: A key or a value in *state* exceeds a limit (docs/limits.md).  For a value,
                the message names the path of keys to the value.
            ConfigurationError: *expires_after* is not a positive time.
        """
        if session_id is None:
            session_id = platform_uuid.new_uuid()
        check_ids(app_name, user_id, session_id)
        lifetime = self._lifetime if expires_after is None else lifetime_of(expires_after)
        scopes = json_text.split_scopes(state)
        now = microseconds(platform_time.get_time())
        app_delta = json_text.convert_state(scopes.app, APP_PREFIX)
        user_delta = json_text.convert_state(scopes.user, USER_PREFIX)
        own = encode_state(scopes.session)
        if self._search_index.state_keys:
            await self._search_index.declare_configured(app_name)
        identity = await self._runner.identify(app_name, user_id, session_id)
        expires_at = NEVER
        if lifetime is not None:
            await self._expiry.feature.ensure()
            expires_at = min(now + lifetime, NEVER - 1)
        while True:
            creation = writes.CreateSession(identity, app_delta, user_delta, own, now, expires_at)
            try:
                created = await self._runner.run(creation)
            except writes.DuplicateSession as duplicate:
                has_expired = duplicate.has_expired
            else:
                if self._lifetime is not None:
                    await self._expiry.delete_some(self._delete_expired)
                return _to_session(app_name, created)
            if not has_expired or not await self._delete_expired(app_name, user_id, session_id):
                raise AlreadyExistsError("A session with this id already exists.")

    @audited_access("session.expire")
    async def _delete_expired(self, app_name: str, user_id: str, session_id: str) -> bool:
        """Delete a session of any user if it has expired, with an audit record of its own; return
        False if it has not.
        """
        identity = await self._runner.identify(app_name, user_id, session_id)
        deletion = writes.DeleteSession(identity, attrgetter("has_expired"))
        return await self._runner.run(deletion) is not False

    @audited_access("session.read")
    async def get_session(
        self,
        *,
        app_name: str,
        user_id: str,
        session_id: str,
        config: GetSessionConfig | None = None,
    ) -> Session | None:
        """Read a session with its events.

        Args:
            app_name: The app's name.
            user_id: The user's id.
            session_id: The session's id.
            config: If `num_recent_events` is given, at most that number of events is returned,
                namely the latest ones.  If `after_timestamp` (seconds since 1970) is given, events
                before that time are omitted.

        Returns:
            The session with its events, oldest first; None if there is no such session.

        Raises:
            ConfigurationError: The installed google-adk cannot parse an event that a newer
                google-adk stored.
            ValueError: `num_recent_events` is negative, or `after_timestamp` is no possible time.
        """
        limit = config.num_recent_events if config else None
        if limit is not None and limit < 0:  # google-adk 1.28 accepts it
            raise ValueError("num_recent_events must be 0 or more")
        after = config.after_timestamp if config else None
        # With limit 0, no events are read, so there is nothing to filter.  As in ADK, an
        # `after_timestamp` of 0 means no filter, and rounded times are compared: `last_update_time`
        # is rounded, too.
        since = microseconds(after) if after and limit != 0 else None
        identity = await self._identify(app_name, user_id, session_id)
        loaded = await self._runner.run(
            reads.GetSession(identity, events.decode_all, limit, since, self._caches_events)
        )
        if loaded is None:
            return None
        stored, history = loaded
        if since is not None and limit is not None:
            history = history[-limit:]
        return _to_session(app_name, stored, history)

    @audited_access("session.read")
    async def list_events_page(
        self,
        *,
        app_name: str,
        user_id: str,
        session_id: str,
        limit: int,
        after: str | None = None,
        order: Literal["oldest", "newest"] = "oldest",
    ) -> EventPage:
        """Read at most *limit* events of a session; the cost does not depend on how many it has.

        Over all pages, each event is returned exactly once, and an event that was tampered with,
        removed or replaced is rejected: *after* contains a random link, by which the next event
        must name the event before it.  Events that are appended meanwhile come last in the order
        `oldest`, and are not returned in the order `newest`.  ADK has no such method.

        Args:
            app_name: The app's name.
            user_id: The user's id.
            session_id: The session's id.
            limit: The number of events, 1 to 1000.
            after: `next` of the page before, with the same *order*; None for the first page.
            order: Whether the oldest or the newest event is first.

        Raises:
            SessionNotFoundError: The session is not stored, or is not the one of *after* any more.
            DecryptionError: A row was tampered with or removed, or *after* was modified.
            ConfigurationError: See `get_session`.
            ValueError: An argument is none of the values above.
        """
        check_page(limit, order)
        identity = await self._identify(app_name, user_id, session_id)
        position, newest = parse_event_position(after), order == "newest"
        page = await self._runner.run(
            reads.ListEventsPage(identity, events.decode_all, position, limit=limit, newest=newest)
        )
        if page is None:
            raise SessionNotFoundError("Session not found.")
        return EventPage(page.items, position_text(page.next))

    async def iterate_events(
        self,
        *,
        app_name: str,
        user_id: str,
        session_id: str,
        page_size: int = 100,
        order: Literal["oldest", "newest"] = "oldest",
    ) -> AsyncIterator[Event]:
        """Yield the events of a session, which are read in pages of *page_size* (1 to 1000) events.

        The memory that it takes depends on *page_size* alone.  See `list_events_page`.

        Raises:
            SessionNotFoundError, DecryptionError, ConfigurationError, ValueError: See
                `list_events_page`.
        """
        names = {"app_name": app_name, "user_id": user_id, "session_id": session_id}
        after = None
        while True:
            page = await self.list_events_page(**names, limit=page_size, after=after, order=order)
            for event in page.events:
                yield event
            if (after := page.next) is None:
                return

    @audited_access("sessions.list")
    async def list_sessions(
        self, *, app_name: str, user_id: str | None = None
    ) -> ListSessionsResponse:
        """List the sessions of one user or, if *user_id* is None, of all users of the app.

        Returns:
            The sessions with their state but without events, least recently updated first.

        Raises:
            DecryptionError: A session cannot be decrypted, and `skip_unreadable_sessions` is
                False.  The message names the session's row.
        """
        listing = partial(reads.ListSessions, skips_unreadable=self._skips_unreadable)
        return self._to_response(app_name, await self._list(app_name, user_id, listing))

    @audited_access("sessions.list")
    async def list_sessions_page(
        self,
        app_name: str,
        user_id: str | None = None,
        *,
        limit: int,
        after: str | None = None,
        order: Literal["oldest", "newest"] = "oldest",
        include_state: bool = True,
    ) -> SessionPage:
        """List at most *limit* sessions of one user or, if *user_id* is None, of all users.

        The sessions are in the order of their creation.  The sessions of all users are listed user
        by user, in the order in which the users were created.  ADK has no such method: its
        `list_sessions` reads all sessions at once.

        A page is stable under concurrent writes: over all pages, each session that is neither
        created nor deleted meanwhile is listed exactly once.

        Args:
            app_name: The app's name.
            user_id: The user's id; None for all users of the app.
            limit: The number of sessions, 1 to 1000.
            after: `next` of the page before, with the same *user_id* and *order*; None for the
                first page.
            order: Whether the oldest or the newest session is first.
            include_state: If False, the state of each session is empty, which is faster for large
                states.

        Raises:
            DecryptionError: See `list_sessions`.
            ValueError: An argument is none of the values above.
        """
        options = self._page_options(limit, after, order, with_snapshots=include_state)
        page = await self._list(app_name, user_id, partial(reads.ListSessionsPage, options=options))
        listed = self._to_sessions(app_name, page.items, include_state=include_state)
        return SessionPage(listed, position_text(page.next))

    @audited_access("sessions.find")
    async def find_sessions(
        self,
        *,
        app_name: str,
        key: str | None = None,
        value: object = None,
        updated_after: float | None = None,
        updated_before: float | None = None,
    ) -> ListSessionsResponse:
        """Find the sessions whose state has *value* under *key*, without decrypting others, or
        those that were updated in a period of time, or both.

        The sessions of all users of the app are searched.  If the app had sessions before the key
        was in `indexed_state_keys`, run `adk-secure-sessions index fill` before the first search.
        ADK has no such method.

        Args:
            app_name: The app's name.
            key: One of the keys in `indexed_state_keys`; None to search by time alone.  If the key
                begins with `user:`, the result contains all sessions of the users whose state has
                the value.
            value: The value.  It must have the same type in JSON as the stored value: 1, 1.0 and
                True are three different values.
            updated_after: Seconds since 1970: find sessions whose last update is at this time or
                later.
            updated_before: Seconds since 1970: find sessions whose last update is before this time.

        Returns:
            The sessions with their state but without events, least recently updated first.

        Raises:
            ConfigurationError: The search index of *key* is not complete, or *key* cannot be
                indexed: it begins with `app:` or `temp:`.
            DecryptionError: A session that the search finds cannot be decrypted, and
                `skip_unreadable_sessions` is False.
            ValueError: *value* exceeds a limit of states, neither a key nor a time is given, or a
                time is impossible.
        """
        updated = period(updated_after, updated_before)
        options = reads.PageOptions(
            reads.NO_LIMIT, updated=updated, skips_unreadable=self._skips_unreadable
        )
        page = await self._find(app_name, key, value, options)
        return self._to_response(app_name, page.items)

    @audited_access("sessions.find")
    async def find_sessions_page(
        self,
        app_name: str,
        key: str | None = None,
        value: object = None,
        *,
        limit: int,
        after: str | None = None,
        order: Literal["oldest", "newest"] = "oldest",
        updated_after: float | None = None,
        updated_before: float | None = None,
    ) -> SessionPage:
        """Find at most *limit* of the sessions that `find_sessions` finds.

        The order and the pages are those of `list_sessions_page` for all users of an app.  The
        other arguments are those of `find_sessions`.

        Args:
            limit: The number of sessions, 1 to 1000.
            after: `next` of the page before, with the same other arguments; None for the first
                page.
            order: Whether the oldest or the newest session is first.

        Raises:
            ConfigurationError, DecryptionError: See `find_sessions`.
            ValueError: An argument is none of the values above, or exceeds a limit.
        """
        updated = period(updated_after, updated_before)
        options = self._page_options(limit, after, order, updated=updated)
        page = await self._find(app_name, key, value, options)
        return SessionPage(self._to_sessions(app_name, page.items), position_text(page.next))

    async def _find(
        self, app_name: str, key: str | None, value: object, options: reads.PageOptions
    ) -> reads.StoredSessionPage:
        if key is not None:
            check_ids(app_name)
            # As a session's state would contain the value after it was stored.
            value = json_text.convert_state({"value": value})["value"]
            return await self._search_index.find(app_name, key, value, options)
        if options.updated is None or value is not None:
            raise ValueError(
                "give a key, updated_after or updated_before; a value needs the key, too"
            )
        return await self._list(app_name, None, partial(reads.ListSessionsPage, options=options))

    async def _list(
        self, app_name: str, user_id: str | None, listing: Callable[..., reads.Listing[T]]
    ) -> T:
        identity = await self._identify(app_name, "" if user_id is None else user_id)
        return await self._runner.run(listing(identity, of_app=user_id is None))

    def _to_response(self, app_name: str, stored: list[SessionWithStates]) -> ListSessionsResponse:
        stored.sort(
            key=lambda one: (one.session.row.updated_at, one.user_id, one.session.session_id)
        )
        return ListSessionsResponse(sessions=self._to_sessions(app_name, stored))

    def _to_sessions(
        self, app_name: str, stored: list[SessionWithStates], *, include_state: bool = True
    ) -> list[Session]:
        listed: list[Session] = []
        for one in stored:
            try:
                listed.append(_to_session(app_name, one, include_state=include_state))
            except DecryptionError as error:
                if not self._skips_unreadable:
                    raise
                record_rejected(error)
                logger.error("left out of a listing: %s", error)
        return listed

    @audited_access("session.delete")
    async def delete_session(self, *, app_name: str, user_id: str, session_id: str) -> None:
        """Delete a session and its events, but not the user's or the app's state.

        If the session does not exist, do nothing.

        Raises:
            DecryptionError: The session's row cannot be decrypted; nothing was deleted.
        """
        identity = await self._identify(app_name, user_id, session_id)
        await self._runner.run(writes.DeleteSession(identity))

    @audited_access("user.read")
    async def get_user_state(self, *, app_name: str, user_id: str) -> dict[str, Any]:
        """Return the user's state, whose keys have no prefix; `{}` for an unknown user."""
        identity = await self._identify(app_name, user_id)
        _, state = await self._runner.run(reads.GetStates(identity))
        return load_state(state, "the user's state")

    @audited_access("session.write")
    async def append_event(self, session: Session, event: Event) -> Event:
        """Store `event`, then apply it to `session`.

        If storing fails, `session` is unchanged, except for the keys of `session.state` that start
        with `temp:`.

        Args:
            session: A session that this service returned.
            event: The event to store.  Its `actions.state_delta` is merged into the stored states,
                key by key.  Keys that start with `temp:` are not stored: they are removed from
                `event` and set in `session.state`.  If a value outside the state delta cannot be
                converted to JSON or exceeds a limit, its text is stored, and a warning is logged.
                A partial event is neither stored nor applied.

        Returns:
            `event` itself.

        Raises:
            SessionNotFoundError: The session is not stored.
            StaleSessionError: The stored session has changed since `session` was loaded.  Load it
                again with `get_session`.
            DecryptionError: A row that the event would change was tampered with; nothing was
                stored.
            ValueError: The event's timestamp is not a possible time, the event is too large or
                could not be read back, or a key or a value in the state delta exceeds a limit.  For
                a value, the message names the path of keys to the value.
        """
        if event.partial:
            return event
        events.set_id_and_move_temp(event, session.state)
        ids = (session.app_name, session.user_id, session.id)
        check_ids(*ids)

        # Parallel agents may append to the same session object.  Each append needs the
        # `_storage_update_marker` that the previous append has set, so appends run one by one.
        async with self._locks.lock(ids):
            await self._append(session, event)
        return event

    def _identify(
        self, app_name: str, user_id: str = "", session_id: str = ""
    ) -> Awaitable[Identity]:
        """Check the ids, and return them together with their tags."""
        check_ids(app_name, user_id, session_id)
        return self._runner.identify(app_name, user_id, session_id)

    async def _append(self, session: Session, event: Event) -> None:
        scopes = json_text.convert_scopes(event.actions.state_delta)
        time_us = microseconds(event.timestamp)
        new_event = writes.NewEvent(events.encode(event), time_us, *scopes)
        if self._search_index.state_keys:
            await self._search_index.declare_configured(session.app_name)
        identity = await self._runner.identify(session.app_name, session.user_id, session.id)
        # Reading `session._storage_update_marker` takes 2.7 µs: pydantic catches an AttributeError.
        if (marker := (session.__pydantic_private__ or {}).get("_storage_update_marker")) is None:
            expected = await self._revision_of_unmarked(session, identity)
        else:
            expected = _parse_marker(marker)

        def apply_to_session(new: StoredSession) -> None:
            session.last_update_time = new.row.updated_at / 1_000_000
            session._storage_update_marker = _marker_of(new)
            session.state.update(event.actions.state_delta or {})
            session.events.append(event)

        try:
            append = writes.AppendEvent(identity, expected, new_event, apply_to_session)
            await self._runner.run(append)
        except writes.MissingSession:
            raise SessionNotFoundError("Session not found.") from None
        except writes.StaleRevision:
            raise StaleSessionError(STALE_TEXT) from None

    async def _revision_of_unmarked(self, session: Session, identity: Identity) -> SessionRevision:
        """Return the row id and the revision of the stored session; *session* has no marker with
        them.
        """
        loaded = await self._runner.run(reads.GetSession(identity, events.decode_all, limit=1))
        if loaded is None:
            raise SessionNotFoundError("Session not found.")
        stored, last = loaded
        known = session.events[-1:]
        same_end = [event.id for event in known] == [event.id for event in last]
        # If the application converts a session object to JSON and back, the object loses its
        # marker.  If the object was read without events, compare the time of the last update.
        updated_at = stored.session.row.updated_at
        same_time = not known and updated_at == microseconds(session.last_update_time)
        if not (same_end or same_time):
            raise StaleSessionError(STALE_TEXT)
        return stored.session.id_and_revision

    async def flush(self) -> None:
        """Do nothing: `append_event` returns after the event is stored."""

    async def close(self) -> None:
        """Close the connections and discard all keys; the next call opens the database again."""
        try:
            await self._runner.close()
        finally:
            if self._auditing.trail is not None:  # also log the heads of the writes that just ended
                self._auditing.trail.close()


@hides_locals
async def append_event_to_latest(
    service: BaseSessionService, session: Session, event: Event, *, attempts: int = 5
) -> Session:
    """Append *event*, also if another writer has appended to the session meanwhile.

    Use it only for an event that does not depend on the events before it.  If its content or its
    state delta was computed from the old session, a stale session must stay an error.

    After a `StaleSessionError` or an error with `retryable`, the whole session is loaded again.  If
    it contains the id of *event*, an attempt whose answer was lost has stored it.  So you may
    repeat a call that failed or was cancelled, with the same or a whole new *session*.

    Args:
        service: A service of this package.
        session: A session that the service returned.  It is updated only if the first attempt
            succeeds.
        event: The event; each attempt stores it with the same id.
        attempts: The number of attempts, 1 or more.

    Returns:
        The session with the event: *session*, or the one that was loaded again.  Continue with it.

    Raises:
        StaleSessionError: Another writer was faster at each attempt.
        SessionNotFoundError: The session is not stored.
        SecureSessionError, ValueError: See `EncryptedSessionService.append_event`.
    """
    if attempts < 1:
        raise ValueError("attempts must be 1 or more")
    app_name, user_id, session_id = session.app_name, session.user_id, session.id
    failed: Exception | None = None
    for _ in range(attempts):
        try:
            # A call that was cancelled may have stored the event, and added it to *session*.
            if any(one.id == event.id for one in session.events):
                raise StaleSessionError(STALE_TEXT)
            await service.append_event(session, event)
            return session
        except (StaleSessionError, SecureSessionError) as error:
            if isinstance(error, SecureSessionError) and not error.retryable:
                raise
            failed = error
        temporary = {key: session.state[key] for key in session.state if key.startswith("temp:")}
        try:
            latest = await service.get_session(
                app_name=app_name, user_id=user_id, session_id=session_id
            )
        except SecureSessionError as error:
            if not error.retryable:
                raise
            failed = error  # if the event is stored, the next attempt finds *session* stale
            continue
        if latest is None:
            raise SessionNotFoundError("Session not found.")
        latest.state.update(temporary)
        if any(one.id == event.id for one in latest.events):
            return latest
        session = latest
    assert failed is not None
    raise failed


def _unsupported(name: str) -> Callable[..., Never]:
    @hides_locals
    def method(*args: object, **kwargs: object) -> Never:
        raise NotImplementedError(
            f"this release of adk-secure-sessions does not implement {name}(), which the installed "
            "google-adk has: the call is rejected, because ADK's own implementation would bypass "
            "encryption"
        )

    return method


def reject_unknown_methods(service: type, contract: type) -> None:
    """Make every public method that *service* does not define raise NotImplementedError.

    A later google-adk may add a method to *contract*, ADK's base class, whose implementation would
    not encrypt.
    """
    for base in contract.__mro__:
        for name in vars(base) if base is not object else ():
            if not name.startswith("_") and name not in vars(service):
                setattr(service, name, _unsupported(name))


reject_unknown_methods(EncryptedSessionService, BaseSessionService)


def check_ids(
    app_name: object, user_id: object = "", session_id: object = "", **more: object
) -> None:
    """Raise InputValidationError, a ValueError, if an id, or another text in *more*, is not a
    string, cannot be written as UTF-8, or is too long.
    """
    if (
        isinstance(app_name, str)
        and isinstance(user_id, str)
        and isinstance(session_id, str)
        and not more
        and len(ids := app_name + user_id + session_id) <= MAX_ID_BYTES
        and ids.isascii()
    ):
        return  # the usual case
    texts = {"app_name": app_name, "user_id": user_id, "session_id": session_id, **more}
    for name, value in texts.items():
        if not isinstance(value, str):
            raise InputValidationError(f"{name} must be a string, not {type(value).__name__}")
        if not is_unicode(value):  # no listing that contains it could be sent as JSON
            raise InputValidationError(f"{name} has a lone surrogate (half of a UTF-16 pair)")
        if len(value.encode()) > MAX_ID_BYTES:
            raise InputValidationError(f"{name} has more than {MAX_ID_BYTES} bytes in UTF-8")


def _marker_of(stored: StoredSession) -> str:
    """Return a session object's `_storage_update_marker`: the stored row id and revision."""
    return f"{stored.row.id:x}.{stored.row.revision}"


def _parse_marker(marker: str) -> SessionRevision:
    """Return the row id and the revision in *marker*; -1 for both if it is not ours."""
    row, _, revision = marker.partition(".")
    try:
        return SessionRevision(int(row, 16), int(revision))
    except ValueError:
        # Another session service made this marker.  No row has the id -1, so `append_event` raises
        # StaleSessionError.
        return SessionRevision(-1, -1)


def _merged_state(stored: SessionWithStates) -> dict[str, Any]:
    session, no_state = stored.session, b"{}"
    table, row = sessions.name, session.row.id
    try:
        own = load_state(session.overlay)
        if (snapshot := session.snapshot) is not None and snapshot != no_state:
            table = snapshots.name
            own = load_state(snapshot) | own
        if stored.user_state == no_state == stored.app_state:
            return own  # as in most listings: a session takes 3% less time
        table, row = users.name, session.row.user_row
        user = load_state(stored.user_state)
    except DecryptionError as error:
        raise error.located(table, row) from None
    return json_text.merge_scopes(load_state(stored.app_state, "the app's state"), user, own)


# Copied for each session: pydantic would validate the values of a new object, 6% of a listing.
# None for a later google-adk with another attribute: copies would share its value, such as a list.
_ATTRIBUTES = {*Session.model_fields, *Session.__private_attributes__}
_EMPTY = Session(id="", app_name="", user_id="") if {
    "id", "app_name", "user_id", "state", "events", "last_update_time", "_storage_update_marker",
} == _ATTRIBUTES else None  # fmt: skip


def _to_session(
    app_name: str,
    stored: SessionWithStates,
    history: list[Event] | None = None,
    *,
    include_state: bool = True,
) -> Session:
    """Return ADK's `Session` object for *stored*, with the events *history*."""
    values: dict[str, Any] = {
        "id": stored.session.session_id,
        "app_name": app_name,
        "user_id": stored.user_id,
        "state": _merged_state(stored) if include_state else {},
        "events": [],
        "last_update_time": stored.session.row.updated_at / 1_000_000,
    }
    session = _EMPTY.model_copy(update=values) if _EMPTY else Session(**values)
    # Set the events here and not in the call of Session(): there, pydantic would validate each
    # event again.
    if history:
        session.events = history
    session._storage_update_marker = _marker_of(stored.session)
    return session
