"""The interface of a source: an object from which `migrate` reads sessions and states."""

from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import NamedTuple, ParamSpec, TypeVar

from adk_secure_sessions.concurrency import ClosedByWith
from adk_secure_sessions.formats.json_text import JsonObject, encode_state
from adk_secure_sessions.formats.records import EncodedEvent
from adk_secure_sessions.formats.times import time_now
from adk_secure_sessions.hiding import hides_locals

T = TypeVar("T")
P = ParamSpec("P")

SEE_LIMITS = "see docs/limits.md, Sizes"
# The ids of an app, a user or a session: an app name; and a user id; and a session id.
Ids = tuple[str, ...]


class Selection(NamedTuple):
    """The part of a source that is read.

    Attributes:
        app_name: Only sessions of this app; None for all apps.
        since: Only sessions whose last update is at this time or later, in microseconds since
            1970, UTC; None for all.
    """

    app_name: str | None = None
    since: int | None = None


EVERYTHING = Selection()


class UnreadableIds(tuple[str, ...]):
    """Stand for ids that cannot be decrypted: the last one names a table and a row."""


class ListedSession(NamedTuple):
    """A session as a source lists it, without its content.

    *etag* is a text that differs after each change of the session in the source.  If the ids
    cannot be decrypted, *reason* says why, and `ids` is an `UnreadableIds`.
    """

    app_name: str
    user_id: str
    session_id: str
    etag: str
    reason: str = ""

    @property
    def ids(self) -> Ids:
        return UnreadableIds(self[:3]) if self.reason else self[:3]


class SessionContent(NamedTuple):
    """The content of a session in a source, as `Imports.import_session` takes it.

    All times are microseconds since 1970, UTC.

    Attributes:
        state: The JSON of the session's own state, without the states of its app and its user.
        events: All events, in the order in which google-adk returns them.
        created_at: When the session was created.  If the source does not store this time: the time
            of the first event or of the last update, whichever is earlier.
        updated_at: `Session.last_update_time`.
        expires_at: When the session expires; None if it does not.
    """

    state: bytes
    events: Sequence[EncodedEvent]
    created_at: int
    updated_at: int
    expires_at: int | None = None

    @property
    def has_expired(self) -> bool:
        return self.expires_at is not None and self.expires_at <= time_now()

    def with_lifetime(self, lifetime: int | None) -> "SessionContent":
        """Let it expire *lifetime* microseconds after its last update, if it does not expire."""
        if lifetime is None or self.expires_at is not None:
            return self
        return self._replace(expires_at=self.updated_at + lifetime)


class ConversionError(Exception):
    """A row cannot be converted to a session, or a session to rows.

    The text is a reason without content.
    """


class Unreadable(NamedTuple):
    """A session or a state that cannot be read; *reason* says why, without content."""

    reason: str


# The states of users and apps as JSON, and the contents of sessions.
States = Mapping[Ids, bytes | Unreadable]
Contents = Mapping[ListedSession, SessionContent | Unreadable]


def encoded_state(state: JsonObject) -> bytes:
    try:
        return encode_state(state)
    except ValueError:  # its text names keys of the state
        raise ConversionError(f"its state exceeds a limit: {SEE_LIMITS}") from None


def try_convert(convert: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | Unreadable:
    """Return what *convert* returns, or why the row cannot be read."""
    try:
        return convert(*args, **kwargs)
    except ConversionError as error:
        return Unreadable(str(error))


@hides_locals
class Source(ClosedByWith):
    """Reads sessions and states, and changes none of them.  Use it with `async with`.

    Every method may raise ConfigurationError and DatabaseError.
    """

    # Whether the source reads all apps, and not only those that the caller has named.
    has_all_apps: bool = True

    @property
    @abstractmethod
    def description(self) -> str:
        """The kind of the source, for messages: for example `google-adk's tables, schema v1`."""

    @abstractmethod
    async def count(self, selection: Selection) -> int:
        """Return how many sessions *selection* contains."""

    @abstractmethod
    def sessions(self, selection: Selection) -> AsyncIterator[Sequence[ListedSession]]:
        """Yield the sessions in *selection*, in batches, in an order that does not change."""

    @abstractmethod
    async def read(self, sessions: Sequence[ListedSession]) -> Contents:
        """Return the contents of *sessions*; a session that was deleted meanwhile is omitted.

        The keys are elements of *sessions*.  A content may be newer than the etag of its key;
        the next run then reads the session again.
        """

    @abstractmethod
    def states(self, selection: Selection) -> AsyncIterator[States]:
        """Yield the states of all users of apps in *selection*, and then of these apps, in batches.

        The keys are the app name and the user id; for an app, only its name.
        """

    async def has_artifacts_or_memory(self) -> bool:
        """Return whether the source has artifacts or memory, which `migrate` does not copy."""
        return False

    async def close(self) -> None:
        """Close the connections that the source has opened."""
