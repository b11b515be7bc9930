"""Read sessions from any session service of google-adk, through its public methods."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from google.adk.sessions import BaseSessionService, Session
from google.adk.sessions.base_session_service import GetSessionConfig

from adk_secure_sessions.concurrency import gather_all, in_groups
from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.formats import json_text
from adk_secure_sessions.formats.events import microseconds
from adk_secure_sessions.formats.json_text import JsonObject
from adk_secure_sessions.formats.records import EncodedEvent
from adk_secure_sessions.hiding import hides_locals
from adk_secure_sessions.migration.adk_rows import convert_event, require_valid_ids
from adk_secure_sessions.migration.sources import (
    SEE_LIMITS,
    Contents,
    ConversionError,
    ListedSession,
    Selection,
    SessionContent,
    Source,
    States,
    Unreadable,
    encoded_state,
    try_convert,
)

_AT_ONCE = 8  # the number of calls of the service at the same time
_BATCH = 32  # the number of sessions in one batch, if their contents are not read


@hides_locals
class ServiceSource(Source):
    """The sessions of the given apps in a session service object.

    Use it for services whose storage this package cannot read itself, such as Vertex AI, Redis or
    Firestore.  For google-adk's database tables, `AdkTables` is much faster.  The methods raise the
    errors of the service unchanged.

    The state of an app comes from the app's most recently updated session.  The state of a user
    comes from `get_user_state` if the service implements it, and otherwise from the user's most
    recently updated session.  So the state of a user without sessions is only read if the user is
    in *user_ids* and the service implements `get_user_state`.

    The service may have more apps and users.  Therefore `compare` does not end the migration, and
    `migrate` accepts `delete_gone` only with a selection of one app, whose users must be complete.

    Args:
        service: The service.  `close` does not close it.
        app_names: The names of the apps to read: a service cannot list its apps.
        user_ids: The user ids of each app, by app name, for a service that cannot list the
            sessions of all users at once.
        compares_events: Whether a later run detects new events in a session with an unchanged
            `last_update_time`.  This costs a read of every session, twice per run.

    Raises:
        ConfigurationError: *service* is not a session service, or *app_names* is a single text.
    """

    has_all_apps: bool = False

    def __init__(
        self,
        service: BaseSessionService,
        app_names: Sequence[str],
        *,
        user_ids: Mapping[str, Sequence[str]] | None = None,
        compares_events: bool = True,
    ) -> None:
        if not isinstance(service, BaseSessionService):
            raise ConfigurationError(
                f"service must be a session service of google-adk, not {type(service).__name__}"
            )
        if isinstance(app_names, str):
            raise ConfigurationError("app_names must be a list of names, not a single text")
        self._service = service
        self._app_names = sorted(set(app_names))
        self._user_ids = user_ids or {}
        self._compares_events = compares_events
        # The contents of the batch that `sessions` yielded last, so that the first `read` need not
        # read them again.  Empty if `compares_events` is False.
        self._contents: dict[ListedSession, SessionContent | Unreadable] = {}

    @property
    def description(self) -> str:
        return f"a {type(self._service).__name__}"

    async def count(self, selection: Selection) -> int:
        by_app = [await self._list(name, selection.since) for name in self._apps(selection)]
        return sum(map(len, by_app))

    async def sessions(self, selection: Selection) -> AsyncIterator[Sequence[ListedSession]]:
        size = _AT_ONCE if self._compares_events else _BATCH
        for app_name in self._apps(selection):
            listed = await self._list(app_name, selection.since)
            for start in range(0, len(listed), size):
                batch = listed[start : start + size]
                self._contents = {}
                if self._compares_events:
                    self._contents |= await self._read(batch, counts_events=True)
                    batch = list(self._contents)
                yield batch
        self._contents = {}

    async def read(self, sessions: Sequence[ListedSession]) -> Contents:
        known = {key: self._contents.pop(key) for key in sessions if key in self._contents}
        return {**known, **await self._read([key for key in sessions if key not in known])}

    async def _read(
        self, keys: Sequence[ListedSession], *, counts_events: bool = False
    ) -> Contents:
        """Read sessions; with *counts_events*, their etags contain the number of events."""
        contents = {}
        service_sessions = await in_groups(_AT_ONCE, self._get, keys)
        for key, session in zip(keys, service_sessions, strict=True):
            if session is not None:
                if counts_events:
                    etag = f"{session.last_update_time!r} {len(session.events)}"
                    key = key._replace(etag=etag)
                contents[key] = try_convert(_converted, key, session)
        return contents

    async def states(self, selection: Selection) -> AsyncIterator[States]:
        for app_name in self._apps(selection):
            sessions = await self._list(app_name)
            by_user: dict[str, list[ListedSession]]
            by_user = {user_id: [] for user_id in self._user_ids.get(app_name, ())}
            for source_session in sessions:
                by_user.setdefault(source_session.user_id, []).append(source_session)
            users = sorted(by_user.items())
            for start in range(0, len(users), _AT_ONCE):
                batch = users[start : start + _AT_ONCE]
                states = await gather_all(*(self._user_state(app_name, *user) for user in batch))
                yield {
                    (app_name, user_id): try_convert(encoded_state, state)
                    for (user_id, _), state in zip(batch, states, strict=True)
                    if state is not None
                }
            session = await self._newest_session(sessions)
            if session is not None:
                app_state = json_text.split_scopes(session.state).app
                yield {(app_name,): try_convert(encoded_state, app_state)}

    def _apps(self, selection: Selection) -> list[str]:
        return [name for name in self._app_names if selection.app_name in (None, name)]

    async def _list(self, app_name: str, since: int | None = None) -> list[ListedSession]:
        """Return the sessions of an app that were updated at *since* or later, sorted by ids.

        Their etags are their last update times.
        """
        users: Sequence[str | None] = self._user_ids.get(app_name) or [None]
        keys = {}
        for user_id in users:
            response = await self._service.list_sessions(app_name=app_name, user_id=user_id)
            for session in response.sessions:
                # NaN, which is no time, is in every selection: `read` rejects it.
                if since is None or not session.last_update_time < since / 1_000_000:
                    etag = repr(session.last_update_time)
                    key = ListedSession(app_name, session.user_id, session.id, etag)
                    keys[key.ids] = key
        return sorted(keys.values())

    async def _get(self, session: ListedSession, **options: Any) -> Session | None:
        return await self._service.get_session(
            app_name=session.app_name,
            user_id=session.user_id,
            session_id=session.session_id,
            **options,
        )

    async def _newest_session(self, sessions: Sequence[ListedSession]) -> Session | None:
        """Return the most recently updated session that still exists, without events."""
        for candidate in sorted(sessions, key=lambda session: float(session.etag), reverse=True):
            session = await self._get(candidate, config=GetSessionConfig(num_recent_events=0))
            if session is not None:
                return session
        return None

    async def _user_state(
        self, app_name: str, user_id: str, sessions: Sequence[ListedSession]
    ) -> JsonObject | None:
        get: Callable[..., Any] | None = getattr(self._service, "get_user_state", None)
        if get is not None:  # google-adk 2.6 and later
            try:
                return dict(await get(app_name=app_name, user_id=user_id))
            except NotImplementedError:
                pass
        session = await self._newest_session(sessions)
        return None if session is None else json_text.split_scopes(session.state).user


def _converted(key: ListedSession, session: Session) -> SessionContent:
    require_valid_ids(*key.ids)
    state = encoded_state(json_text.split_scopes(session.state).session)
    converted: list[EncodedEvent] = []
    for event in session.events:
        event_copy = event.model_copy(update={"actions": event.actions.model_copy()})
        try:
            converted.append(convert_event(event_copy))
        except ValueError:
            raise ConversionError(
                f"event {len(converted) + 1} of {len(session.events)} holds a value without a JSON "
                f"form, or exceeds a limit: {SEE_LIMITS}"
            ) from None
    try:
        updated_at = microseconds(session.last_update_time)
    except ValueError:
        raise ConversionError("its last_update_time is not a time") from None
    created_at = min(converted[0].time, updated_at) if converted else updated_at
    return SessionContent(state, converted, created_at, updated_at)
