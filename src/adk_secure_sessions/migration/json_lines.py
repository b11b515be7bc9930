"""Decrypt sessions into lines of JSON.  Everything that is written is plaintext."""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from adk_secure_sessions.audit import command
from adk_secure_sessions.errors import DecryptionError
from adk_secure_sessions.formats import json_text, states
from adk_secure_sessions.lru import Lru
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.problems import UNREADABLE
from adk_secure_sessions.maintenance.progress import Progress
from adk_secure_sessions.migration.export_reader import (
    Export,
    ExportReader,
    StopExport,
    ids_of,
)
from adk_secure_sessions.migration.sources import SessionContent
from adk_secure_sessions.storage.features.imports import SourceEvent
from adk_secure_sessions.storage.reads import CheckApp

LINE_FORMAT = 1  # the format of the lines: docs/export.md describes it
_CACHED_STATES = 64
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@command
async def export_lines(
    db: Database,
    write: Callable[[bytes], object],
    *,
    app_name: str | None = None,
    user_id: str | None = None,
    skip_bad: bool = False,
    progress: Progress | None = None,
) -> Export:
    """Decrypt all sessions, and write one line of JSON for each session.

    A user who has a state but no session also has a line, without a session id.  Expired sessions,
    artifacts and memory are not exported.

    Args:
        db: The database to read, with every backend whose records it may contain.
        write: Called with each line, in UTF-8 and with the line feed.
        app_name: Export only sessions of this app.
        user_id: Export only sessions of the users with this id.
        skip_bad: Continue after a session or state that cannot be decrypted.  If False, the run
            stops.
        progress: Called with the number of sessions done and the number of all sessions.

    Raises:
        ConfigurationError: The database cannot be used.
        WrongKeyError: The root keys do not decrypt the keyring.
        DatabaseError: The database raised an error.
    """
    began = time.monotonic()
    reader = await ExportReader.of(db, app_name, user_id, skip_bad, progress, 1)
    run = _ToLines(reader, write)
    stopped = False
    try:
        await run.write_sessions()
        await run.write_users()
    except StopExport:
        stopped = True
    reader.meter.finish()
    return Export(
        sessions=run.sessions,
        events=run.events,
        unchanged=0,
        states=run.users,
        bad=reader.bad,
        stopped=stopped,
        verified=None,
        differences=0,
        extra=None,
        problems=tuple(reader.problems),
        seconds=time.monotonic() - began,
    )


class _ToLines:
    """One run of `export_lines`."""

    def __init__(self, reader: ExportReader, write: Callable[[bytes], object]) -> None:
        self.sessions = self.events = self.users = 0
        self._reader = reader
        self._write = write
        self._states: Lru[tuple[str, ...], bytes] = Lru(_CACHED_STATES)

    async def write_sessions(self) -> None:
        async for batch in self._reader.sessions():
            for session, content in batch.items():
                ids = ids_of(session)
                if await self._write_line(("session", *ids), ids, content):
                    self.sessions += 1
                    self.events += len(content.events)

    async def write_users(self) -> None:
        """Write a line for each user who has a state and no session."""
        store = await self._reader.db.store()
        async for app_name, user_id, state in self._reader.user_states():
            if not state:
                continue
            page = await store.list_page(
                app_name, user_id, None, limit=1, newest=False, with_state=False, skip=True
            )
            if not page.views:
                who = ("user", app_name, user_id)
                self.users += await self._write_line(who, (app_name, user_id, None), None)

    async def _write_line(
        self,
        who: tuple[str, ...],
        ids: tuple[str, str, str | None],
        content: SessionContent | None,
    ) -> bool:
        """Write the line of a session or a user, and return True.

        If the state of the app or of the user cannot be decrypted, list the session or user as a
        problem, and return False.  *who* names the session or user in the list: its kind (`session`
        or `user`), followed by the ids.

        Raises:
            StopExport: A state cannot be decrypted, and `skip_bad` is False.
        """
        line, reason = b"", None
        try:
            app_state = await self._app_state(ids[0])
            user_state = await self._user_state(ids[0], ids[1])
            line = _line(ids, app_state, user_state, content)
        except UNREADABLE as error:
            malformed = "its content is malformed"
            reason = str(error) if isinstance(error, DecryptionError) else malformed
        if reason is not None:
            await self._reader.reject(who, reason)
            return False
        self._write(line)
        return True

    async def _user_state(self, app_name: str, user_id: str) -> bytes:
        state = self._states.get((app_name, user_id))
        if state is None:
            store = await self._reader.db.store()
            state = await store.user_state(app_name, user_id)
            self._states.put((app_name, user_id), state)
        return state

    async def _app_state(self, app_name: str) -> bytes:
        state = self._states.get((app_name,))
        if state is None:
            unit = self._reader.db.unit
            app = await unit.run(CheckApp(await unit.identify(app_name)))
            state = app.state if app else b"{}"
            self._states.put((app_name,), state)
        return state


def _line(
    ids: tuple[str, str, str | None],
    app_state: bytes,
    user_state: bytes,
    content: SessionContent | None,
) -> bytes:
    """Return the line of a session or, if *content* is None, of a user without sessions.

    The JSON of states and events is inserted as it is stored: parsing would take most of the time.
    """
    times: list[object] = [None, None, None]
    state, history = b"{}", b""
    if content is not None:
        times = [_time(content.created_at), _time(content.updated_at), _time(content.expires_at)]
        state = states.dumps(content.state)
        history = b",".join(map(_event, content.events))
    names = ("app_name", "user_id", "session_id", "created_at", "updated_at", "expires_at")
    fields = dict(zip(("format", *names), (LINE_FORMAT, *ids, *times), strict=True))
    start = json_text.dumps(fields)[:-1]
    by_scope = b'{"app":%b,"user":%b,"session":%b}' % (app_state, user_state, state)
    return _on_one_line(b'%b,"state":%b,"events":[%b]}' % (start, by_scope, history)) + b"\n"


def _event(event: SourceEvent) -> bytes:
    return event.plaintext[json_text.version_end(event.plaintext) :]


def _on_one_line(text: bytes) -> bytes:
    """Replace line breaks, which JSON allows only between values."""
    return text.replace(b"\r", b" ").replace(b"\n", b" ")


def _time(microseconds: int | None) -> str | int | None:
    """Return a time as text in ISO 8601; or *microseconds* if `datetime` cannot represent it."""
    if microseconds is None:
        return None
    try:
        moment = _EPOCH + timedelta(microseconds=microseconds)
    except OverflowError:
        return microseconds
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
