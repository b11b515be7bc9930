"""The interface of a source: an object from which `migrate` reads sessions and states."""

from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import NamedTuple

from adk_secure_sessions.formats.states import JsonObject
from adk_secure_sessions.loops import ClosedByWith
from adk_secure_sessions.storage.features.imports import SourceEvent
from adk_secure_sessions.tracebacks import hides_locals


class Scope(NamedTuple):
    """The part of a source that is read.

    Attributes:
        app_name: Only sessions of this app; None for all apps.
        since: Only sessions whose last update is at this time or later, in microseconds since
            1970, UTC; None for all.
    """

    app_name: str | None = None
    since: int | None = None


class SourceSession(NamedTuple):
    """A session in a source, without its content.

    *version* is a text that differs after each change of the session in the source.
    """

    app_name: str
    user_id: str
    session_id: str
    version: str


class SessionContent(NamedTuple):
    """The content of a session in a source.

    Attributes:
        state: The session's own state, without the states of its app and its user.
        events: All events, in the order in which google-adk returns them.
        created_at: When the session was created, in microseconds since 1970, UTC.  If the source
            does not store this time: the time of the first event or of the last update, whichever
            is earlier.
        updated_at: `Session.last_update_time`, in microseconds since 1970, UTC.
        expires_at: When the session expires, in microseconds since 1970, UTC; None if it does not.
    """

    state: JsonObject
    events: Sequence[SourceEvent]
    created_at: int
    updated_at: int
    expires_at: int | None = None


class UnreadableSession(NamedTuple):
    """A session in a source that cannot be read; *reason* says why, without content."""

    reason: str


class UnreadableState(NamedTuple):
    """The state of an app or a user that cannot be read; *reason* says why, without content."""

    reason: str


class SessionHeader(NamedTuple):
    """A session in a source, without its events.

    Attributes:
        session: The ids and the version.
        state: The session's own state, without the states of its app and its user.
        created_at: When the session was created, in microseconds since 1970, UTC.
        updated_at: `Session.last_update_time`, in microseconds since 1970, UTC.
    """

    session: SourceSession
    state: JsonObject
    created_at: int
    updated_at: int


class SourceSize(NamedTuple):
    """The number of sessions and events of a source, which may be an estimate."""

    sessions: int
    events: int


class OtherContent(NamedTuple):
    """The content of a source that is neither sessions nor states.  `migrate` does not copy it.

    Attributes:
        collections: The number of artifacts and of users' memories.
        items: The number of their items: the versions of the artifacts, and the memory entries.
    """

    collections: int = 0
    items: int = 0


@hides_locals
class Source(ClosedByWith):
    """Reads sessions and states, and changes nothing.  Use it with `async with`.

    Every method may raise ConfigurationError and DatabaseError.
    """

    @property
    @abstractmethod
    def description(self) -> str:
        """The kind of the source, for messages: for example `google-adk's tables, schema v1`."""

    @abstractmethod
    async def size(self, scope: Scope) -> SourceSize:
        """Return how many sessions and events *scope* contains."""

    @abstractmethod
    def sessions(self, scope: Scope) -> AsyncIterator[Sequence[SourceSession]]:
        """Yield the sessions in *scope*, in batches, in an order that does not change."""

    @abstractmethod
    async def read(
        self, sessions: Sequence[SourceSession]
    ) -> Mapping[SourceSession, SessionContent | UnreadableSession]:
        """Return the contents of *sessions*; a session that was deleted meanwhile is omitted.

        The keys are elements of *sessions*.  A content may be newer than the version of its key;
        the next run then reads the session again.
        """

    @abstractmethod
    def app_states(self, scope: Scope) -> AsyncIterator[Mapping[str, JsonObject | UnreadableState]]:
        """Yield mappings from app names to states, for all apps in *scope*."""

    @abstractmethod
    def user_states(
        self, scope: Scope
    ) -> AsyncIterator[Mapping[tuple[str, str], JsonObject | UnreadableState]]:
        """Yield mappings from (app name, user id) to states, for all users of apps in *scope*."""

    async def others(self) -> OtherContent:
        """Return the numbers of collections and of their items; `migrate` copies neither."""
        return OtherContent()

    async def close(self) -> None:
        """Close the connections that the source has opened."""


@hides_locals
class LookupSource(Source):
    """A source that can find one session, user or app by its ids, with an indexed query.

    Several tasks may call these methods and `read` of one object at the same time.
    """

    @property
    def place(self) -> str:
        """The database, for messages: without user name, password and options."""
        return self.description

    @abstractmethod
    async def find(
        self, app_name: str, user_id: str, session_id: str
    ) -> SessionHeader | UnreadableSession | None:
        """Return a session; None if the source has no session with these ids."""

    @abstractmethod
    def headers(
        self, app_name: str, user_id: str | None
    ) -> AsyncIterator[Mapping[SourceSession, SessionHeader | UnreadableSession]]:
        """Yield the sessions of a user or, if *user_id* is None, of an app, in batches."""

    @abstractmethod
    async def app_state(self, app_name: str) -> JsonObject | UnreadableState:
        """Return the state of an app; `{}` if the source has none."""

    @abstractmethod
    async def user_state(self, app_name: str, user_id: str) -> JsonObject | UnreadableState:
        """Return the state of a user; `{}` if the source has none."""
