"""Read the sessions and states to export, and list those that cannot be exported."""

from collections.abc import AsyncIterator, Mapping
from typing import NamedTuple

from adk_secure_sessions.audit import add_facts
from adk_secure_sessions.formats.states import JsonObject
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.progress import Meter, Progress
from adk_secure_sessions.migration.encrypted import EncryptedSource
from adk_secure_sessions.migration.sources import (
    Scope,
    SessionContent,
    Source,
    SourceSession,
    UnreadableSession,
    UnreadableState,
)

_MAX_LISTED = 1000
Ids = tuple[str, str, str]  # of a session: app name, user id, session id


class ExportProblem(NamedTuple):
    """A session or state that cannot be exported, or that differs in the target.

    Attributes:
        kind: `session`; or `user` or `app` for the state of a user or an app.
        tag: The blind index of the session, user or app, as `lookup` shows it; None if the ids
            cannot be decrypted.
        detail: The reason, without content.
    """

    kind: str
    tag: str | None
    detail: str


class Export(NamedTuple):
    """The result of `export_to_adk` or `export_lines`.

    Attributes:
        sessions: How many sessions were written.
        events: How many events these sessions have.
        unchanged: How many sessions the target had already, with the same content.
        states: How many states of apps and users were written.  For `export_lines`, the number of
            lines of users without sessions.
        bad: How many sessions and states were not exported.  They cannot be decrypted, or
            google-adk's database cannot hold them, or the target has other content for their ids.
        stopped: Whether the run stopped at the first of these bad sessions and states.
        verified: How many sessions were compared after the export; None without `verify`.
        differences: How many of these sessions, and of the states, differ in the target.
        extra: How many sessions only the target has; None without `verify`.
        problems: The first 1000 sessions and states that are bad or differ.
        seconds: How long the run took.
    """

    sessions: int
    events: int
    unchanged: int
    states: int
    bad: int
    stopped: bool
    verified: int | None
    differences: int
    extra: int | None
    problems: tuple[ExportProblem, ...]
    seconds: float

    @property
    def is_complete(self) -> bool:
        """Whether everything was exported; with `verify`, also whether both databases are equal."""
        return not (self.bad or self.differences or self.extra)


class StopExport(Exception):
    """A session or state cannot be exported, and `skip_bad` is False."""


class ExportReader:
    """Reads sessions and states for the export, and lists those that cannot be exported.

    Attributes:
        bad: How many sessions and states cannot be exported.
        problems: The first 1000 problems: sessions and states that cannot be exported, and
            differences that a comparison has found.
    """

    def __init__(
        self,
        db: Database,
        source: Source,
        app_name: str | None,
        user_id: str | None,
        skip_bad: bool,
        meter: Meter,
    ) -> None:
        self.db = db
        self.app_name = app_name
        self.user_id = user_id
        self.meter: Meter = meter
        self.bad: int = 0
        self.problems: list[ExportProblem] = []
        self._source = source
        self._skip_bad = skip_bad
        self._app_names: set[str] = set()
        self._users: dict[str, str] = {}  # the tag of the user in each app; for the audit record

    @classmethod
    async def of(
        cls,
        db: Database,
        app_name: str | None,
        user_id: str | None,
        skip_bad: bool,
        progress: Progress | None,
        passes: int,
    ) -> "ExportReader":
        """Open *db*, so that a wrong key is noticed before anything is written.

        *passes* says how often the caller will read all sessions; the progress counts each pass.
        """
        source = EncryptedSource(db)
        size = await source.size(Scope(app_name))
        if app_name is not None:
            add_facts(app=app_name)
        meter = Meter(progress, passes * size.sessions, None)
        return cls(db, source, app_name, user_id, skip_bad, meter)

    async def sessions(
        self, *, reports: bool = True
    ) -> AsyncIterator[Mapping[SourceSession, SessionContent]]:
        """Yield the sessions in batches, without those that cannot be decrypted.

        If *reports* is True, `reject` counts and lists each session that cannot be decrypted.

        Raises:
            StopExport: A session cannot be decrypted, *reports* is True, and `skip_bad` is False.
        """
        async for batch in self._source.sessions(Scope(self.app_name)):
            # A session whose ids cannot be decrypted may belong to this user.
            wanted = [
                one for one in batch if self.user_id in (None, one.user_id) or _has_unknown_ids(one)
            ]
            for one in wanted:
                if one.user_id == self.user_id:
                    await self._record_user(one.app_name)
            contents: dict[SourceSession, SessionContent] = {}
            unreadable: dict[SourceSession, UnreadableSession] = {}
            for one, found in (await self._source.read(wanted)).items():
                if isinstance(found, UnreadableSession):
                    unreadable[one] = found
                else:
                    contents[one] = found
            yield contents
            if reports:
                for one, problem in unreadable.items():
                    ids = () if _has_unknown_ids(one) else ids_of(one)
                    await self.reject(("session", *ids), problem.reason)
            await self.meter.advance(len(batch))

    async def user_states(
        self, *, reports: bool = True
    ) -> AsyncIterator[tuple[str, str, JsonObject]]:
        """Yield the app name, the user id and the state of each user.

        Users that cannot be decrypted are omitted.  If *reports* is True, `reject` counts and lists
        them.

        Raises:
            StopExport: A user cannot be decrypted, *reports* is True, and `skip_bad` is False.
        """
        async for batch in self._source.user_states(Scope(self.app_name)):
            for (app_name, user_id), state in batch.items():
                if isinstance(state, UnreadableState):  # its ids are not known
                    if reports:
                        await self.reject(("user",), state.reason)
                elif self.user_id in (None, user_id):
                    self._app_names.add(app_name)
                    await self._record_user(app_name)
                    yield app_name, user_id, state

    async def app_states(self, *, reports: bool = True) -> AsyncIterator[tuple[str, JsonObject]]:
        """Yield the name and the state of each app.

        Apps that cannot be decrypted are omitted.  If *reports* is True, `reject` counts and lists
        them.

        If only one user id is exported, yield only the apps that have a user with this id.
        `user_states` collects these apps, so read `user_states` to the end first.

        Raises:
            StopExport: An app cannot be decrypted, *reports* is True, and `skip_bad` is False.
        """
        async for batch in self._source.app_states(Scope(self.app_name)):
            for app_name, state in batch.items():
                if isinstance(state, UnreadableState):  # its name is not known
                    if reports:
                        await self.reject(("app",), state.reason)
                elif self.user_id is None or app_name in self._app_names:
                    yield app_name, state

    async def _record_user(self, app_name: str) -> None:
        """If only one user id is exported, add the user's tag in this app to the audit record."""
        if self.user_id is not None and app_name not in self._users:
            tag = (await self.db.unit.identify(app_name, self.user_id)).user_tag
            self._users[app_name] = tag.hex()
            add_facts(users=list(self._users.values()))

    async def reject(self, who: tuple[str, ...], detail: str) -> None:
        """Count and list a session or state that cannot be exported.

        *who* is the kind of the session or state (`session`, `user` or `app`), followed by the ids
        if they are known.

        Raises:
            StopExport: `skip_bad` is False.
        """
        self.bad += 1
        await self.report(who, detail)
        if not self._skip_bad:
            raise StopExport

    async def report(self, who: tuple[str, ...], detail: str) -> None:
        """Add a problem to `problems`, unless the list is full.

        *who* is the kind of the session or state (`session`, `user` or `app`), followed by the ids
        if they are known.
        """
        if len(self.problems) == _MAX_LISTED:
            return
        kind, *ids = who
        tag = None
        if ids:
            app_name, user_id, session_id = (*ids, "", "")[:3]
            identity = await self.db.unit.identify(app_name, user_id, session_id)
            tags = (identity.app_tag, identity.user_tag, identity.session_tag)
            tag = tags[len(ids) - 1].hex()
        self.problems.append(ExportProblem(kind, tag, detail))


def _has_unknown_ids(session: SourceSession) -> bool:
    """Return whether the ids could not be decrypted."""
    return session.version.startswith("unreadable")


def ids_of(session: SourceSession) -> Ids:
    """Return the ids without the version."""
    return session.app_name, session.user_id, session.session_id
