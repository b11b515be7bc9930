"""ADK's session service, on encrypted storage."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Never, Self

import sqlalchemy as sa
from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.errors.session_not_found_error import SessionNotFoundError
from google.adk.events import Event
from google.adk.platform import time as platform_time
from google.adk.platform import uuid as platform_uuid
from google.adk.sessions import BaseSessionService, Session, State
from google.adk.sessions.base_session_service import GetSessionConfig, ListSessionsResponse
from sqlalchemy.ext.asyncio import AsyncEngine

from adk_secure_sessions.backends import EncryptionBackend
from adk_secure_sessions.backends.registry import register
from adk_secure_sessions.db.connect import executors_for
from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.formats import events, states
from adk_secure_sessions.formats.states import dumps, loads, to_json_values
from adk_secure_sessions.loops import LoopLocks
from adk_secure_sessions.storage import writes as transactions
from adk_secure_sessions.storage.opening import open_database
from adk_secure_sessions.storage.reads import View
from adk_secure_sessions.storage.rows import StoredSession
from adk_secure_sessions.storage.store import Store
from adk_secure_sessions.storage.writes import Expected, NewEvent

try:
    from google.adk.errors import StaleSessionError
except ImportError:  # google-adk before 2.7 raises a plain ValueError

    class StaleSessionError(ValueError):  # type: ignore[no-redef]
        """A session object that storage has moved past."""


_STALE = (
    "The session has been modified in storage since it was loaded. "
    "Please reload the session before appending more events."
)


class EncryptedSessionService(BaseSessionService):
    """Behaves as ADK's `DatabaseSessionService`; all that is stored is sealed by `backend`.

    The database is opened, and its tables made, by `prepare_tables` or the first operation:
    that is where a wrong root key is refused, with `WrongKeyError`.  Any operation raises
    `DecryptionError` where what it needs was tampered with.  A method that google-adk has and
    this version does not know raises `NotImplementedError`.

    Many tasks may use one service; on a server they share one event loop.

    Args:
        db_url: A database URL such as `sqlite+aiosqlite:///sessions.db`, or `:memory:`.
        backend: Seals everything that is written.
        additional_backends: May be read as well, for example while moving from one to another.
        db_engine: The caller's own engine, instead of `db_url`; it is not closed.
        key_db_url: A database of their own for the keys, so that copies of the other are
            unreadable without it.
        key_db_engine: The caller's own engine for it, instead of `key_db_url`.
        create_tables: Make the tables that are missing; if not, they have to be there.
        skip_unreadable_sessions: List what can be opened and log the rest, instead of raising.
        session_cache_size: Sessions remembered so that appending to them needs no read.
        data_key_cache_size: Opened keys remembered, of which a user and an app have one each.
        engine_kwargs: Options for the engine that `db_url` makes.

    Raises:
        ConfigurationError: Something of the above cannot be used.
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
        session_cache_size: int = 4096,
        data_key_cache_size: int = 10_000,
        **engine_kwargs: Any,
    ) -> None:
        if backend is None:
            raise ConfigurationError("give a backend, for example AesGcmBackend(key)")
        backends = register(backend, additional_backends)
        executors = executors_for(db_url, db_engine, key_db_url, key_db_engine, engine_kwargs)
        self._store = Store(
            executors,
            backends,
            partial(open_database, executors, backends, create_tables),
            session_cache_size=session_cache_size,
            data_key_cache_size=data_key_cache_size,
        )
        self._skip = skip_unreadable_sessions
        self._locks = LoopLocks()

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        # A method that a later ADK gives its base class knows nothing of our storage.
        if name[0] != "_" and name not in _OWN and _is_from_adk(type(self), name):
            return _refuse(name)
        return value

    async def prepare_tables(self) -> None:
        """Open the database now, rather than with the first operation.

        Raises:
            WrongKeyError: The root key does not open this database; nothing was written.
            PlaintextRefusedError: Its keys are in clear, and `NoOpBackend` is not listed.
            KeyServiceError: The key provider failed.
            ConfigurationError: The database cannot be used; it was left as it was.
        """
        await self._store.prepare()

    async def create_session(
        self,
        *,
        app_name: str,
        user_id: str,
        state: dict[str, Any] | None = None,
        session_id: str | None = None,
    ) -> Session:
        """Store a new session.

        Args:
            app_name: Stored in clear.
            user_id: Any text; it is stored sealed, as is the session's id.
            state: Values by key, as JSON holds them.  What other values there are is stored as
                its text.  Keys that start with `app:` or `user:` go to the app's or the user's
                state, for all sessions; those that start with `temp:` are not stored.
            session_id: A new UUID if none is given.

        Returns:
            The session without events; its state has the app's and the user's in it, under
            keys with their prefix.

        Raises:
            AlreadyExistsError: The user has a session of this id.
            ValueError: An id is not text.
        """
        _check_ids(app_name, user_id, session_id or "")
        scopes = states.split(state)
        if session_id is None:
            session_id = platform_uuid.new_uuid()
        now = _microseconds(platform_time.get_time())
        try:
            view = await self._store.create(
                app_name,
                user_id,
                session_id,
                to_json_values(scopes.app),
                to_json_values(scopes.user),
                dumps(scopes.session),
                now,
            )
        except transactions.DuplicateSession:
            view = None
        if view is None:
            raise AlreadyExistsError("A session with this id already exists.")
        return _session(app_name, view)

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
            app_name: As it was created.
            user_id: As it was created.
            session_id: As it was created.
            config: `num_recent_events` for the last so many (0: none); `after_timestamp`, in
                seconds since 1970, for those of that time or later; both for both.

        Returns:
            The session, oldest event first; None if there is none.

        Raises:
            DecryptionError: Something of it cannot be opened, or is missing.
        """
        _check_ids(app_name, user_id, session_id)
        limit = config.num_recent_events if config else None
        after = config.after_timestamp if config else None
        if limit == 0 or not after:
            after = None  # as ADK: no events, or no filter
        found = await self._store.get(
            app_name,
            user_id,
            session_id,
            events.decode,
            limit=limit,
            # The column is rounded: one microsecond wider, then exact.
            after=None if after is None else _microseconds(after) - 1,
        )
        if found is None:
            return None
        view, history = found
        if after is not None:
            history = [event for event in history if event.timestamp >= after]
            history = history if limit is None else history[-limit:]
        return _session(app_name, view, history)

    async def list_sessions(
        self, *, app_name: str, user_id: str | None = None
    ) -> ListSessionsResponse:
        """List the sessions of one user, or of all users of the app.

        Returns:
            Sessions with state, without events, least recently updated first.

        Raises:
            DecryptionError: One of them cannot be opened, and `skip_unreadable_sessions` was
                not asked for; the text names its row.
        """
        _check_ids(app_name, user_id or "", "")
        if user_id is None:
            views = await self._store.list_app(app_name, skip=self._skip)
        else:
            views = await self._store.list_user(app_name, user_id, skip=self._skip)
        views.sort(
            key=lambda view: (view.session.updated_at, view.user_id, view.session.session_id)
        )
        return ListSessionsResponse(sessions=[_session(app_name, view) for view in views])

    async def delete_session(self, *, app_name: str, user_id: str, session_id: str) -> None:
        """Delete a session and its events; user and app state stay; none is no error.

        Raises:
            DecryptionError: Its row cannot be opened; then it was not deleted.
        """
        _check_ids(app_name, user_id, session_id)
        await self._store.delete(app_name, user_id, session_id)

    async def get_user_state(self, *, app_name: str, user_id: str) -> dict[str, Any]:
        """Return the user's state, keys without `user:`; `{}` for an unknown user."""
        _check_ids(app_name, user_id, "")
        return loads(await self._store.user_state(app_name, user_id))

    async def append_event(self, session: Session, event: Event) -> Event:
        """Store `event`, then apply it to `session`, which stays as it was if storing fails.

        Args:
            session: As a method of this service returned it.
            event: Its `actions.state_delta` is merged into the states, key by key; keys that
                start with `temp:` reach `session` only.  A partial event is not stored.

        Returns:
            The same event.

        Raises:
            SessionNotFoundError: The session is not, or no longer, stored.
            StaleSessionError: Storage has moved past `session`; get it again.
            DecryptionError: What is to be replaced cannot be opened; nothing was stored.
        """
        if event.partial:
            return event
        delta = event.actions.state_delta
        for key in [key for key in delta or () if key.startswith(State.TEMP_PREFIX)]:
            session.state[key] = delta[key]
        if delta:
            event.actions.state_delta = {
                key: value for key, value in delta.items() if not key.startswith(State.TEMP_PREFIX)
            }
        who = (session.app_name, session.user_id, session.id)
        _check_ids(*who)

        def appended(stored: StoredSession) -> None:
            session.last_update_time = stored.updated_at / 1_000_000
            session._storage_update_marker = _marker(stored)
            session.state.update(event.actions.state_delta or {})
            session.events.append(event)

        async with self._locks.hold(who):
            await self._append(session, event, appended)
        return event

    async def _append(
        self, session: Session, event: Event, appended: Callable[[StoredSession], None]
    ) -> None:
        scopes = states.Scopes(*map(to_json_values, states.split(event.actions.state_delta)))
        time_us = _microseconds(event.timestamp)
        expected = _parse_marker(session._storage_update_marker)
        if session._storage_update_marker is None:
            expected = await self._vouched_for(session)
        error: Exception
        try:
            await self._store.append(
                session.app_name,
                session.user_id,
                session.id,
                expected,
                NewEvent(events.encode(event), time_us, scopes.app, scopes.user, scopes.session),
                appended,
            )
            return
        except transactions.MissingSession:
            error = SessionNotFoundError("Session not found.")
        except transactions.StaleRevision:
            error = StaleSessionError(_STALE)
        raise error

    async def _vouched_for(self, session: Session) -> Expected:
        """The revision of a session object made by hand: current if it ends as storage does."""
        found = await self._store.get(
            session.app_name, session.user_id, session.id, events.decode, limit=1
        )
        if found is None:
            raise SessionNotFoundError("Session not found.")
        view, last = found
        known, stored = session.events[-1:], view.session
        same_end = [event.id for event in known] == [event.id for event in last]
        # Read without events, and then stripped of its marker by JSON, for example.
        same_time = not known and stored.updated_at == _microseconds(session.last_update_time)
        if not (same_end or same_time):
            raise StaleSessionError(_STALE)
        return Expected(stored.id, stored.revision)

    async def flush(self) -> None:
        """Nothing to do: what `append_event` returned from is stored."""

    async def close(self) -> None:
        """Release the database; a later call opens it again."""
        await self._store.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


_OWN = frozenset(name for name in vars(EncryptedSessionService) if not name.startswith("_"))


def _is_from_adk(cls: type, name: str) -> bool:
    """Whether *name* comes from ADK's base class, not from us or from a subclass of ours."""
    owner = next((base for base in cls.__mro__ if name in vars(base)), None)
    return owner is not None and issubclass(BaseSessionService, owner) and owner is not object


def _refuse(name: str) -> Any:
    def refuse(*args: object, **kwargs: object) -> Never:
        raise NotImplementedError(
            f"this version of adk-secure-sessions does not know {name}(), which the installed "
            "google-adk has: it is refused rather than run on unencrypted storage"
        )

    return refuse


def _check_ids(app_name: object, user_id: object, session_id: object) -> None:
    for name, value in (("app_name", app_name), ("user_id", user_id), ("session_id", session_id)):
        if not isinstance(value, str):
            raise ValueError(f"{name} must be a string, not {type(value).__name__}")


def _microseconds(timestamp: float) -> int:
    """As `datetime.fromtimestamp` rounds, so that times equal those of ADK's own service."""
    if not math.isfinite(timestamp) or abs(timestamp) > 9e12:
        raise ValueError("the timestamp is not a possible time in seconds")
    fraction, seconds = math.modf(timestamp)
    return int(seconds) * 1_000_000 + round(fraction * 1_000_000)


def _marker(stored: StoredSession) -> str:
    return f"{stored.id:x}.{stored.revision}"


def _parse_marker(marker: str | None) -> Expected:
    row, _, revision = (marker or "").partition(".")
    try:
        return Expected(int(row, 16), int(revision))
    except ValueError:
        return Expected(-1, -1)  # another service's: no row is like it


def _session(app_name: str, view: View, history: list[Event] | None = None) -> Session:
    stored = view.session
    own = loads(stored.base or b"{}") | loads(stored.overlay)
    session = Session(
        id=stored.session_id,
        app_name=app_name,
        user_id=view.user_id,
        state=states.merge(loads(view.app_state), loads(view.user_state), own),
        events=[],
        last_update_time=stored.updated_at / 1_000_000,
    )
    session.events = history or []  # they are Events: to validate thousands again takes long
    session._storage_update_marker = _marker(stored)
    return session
