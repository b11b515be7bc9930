"""Decrypt sessions into google-adk's own tables, or into lines of JSON.

Everything that is written is plaintext.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field

from adk_secure_sessions.audit import add_facts, audited_command
from adk_secure_sessions.caches import FifoCache
from adk_secure_sessions.errors import DecryptionError
from adk_secure_sessions.formats import json_text
from adk_secure_sessions.formats.times import datetime_of
from adk_secure_sessions.keys.blind_index import IndexMaster
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.progress import Meter, Progress
from adk_secure_sessions.migration.adk_target import MISSING, AdkTarget, TargetRows, event_json
from adk_secure_sessions.migration.encrypted_source import EncryptedSource, owner_state
from adk_secure_sessions.migration.findings import Finding, Findings, StopAtBad
from adk_secure_sessions.migration.source_scan import DigestSet
from adk_secure_sessions.migration.sources import (
    ConversionError,
    Ids,
    Selection,
    SessionContent,
    Unreadable,
    UnreadableIds,
)
from adk_secure_sessions.results import Result, counter, listing

LINE_FORMAT = 1  # the format of the lines: docs/migrate.md describes it
_CACHED_STATES = 64


@dataclass
class Export(Result):
    """The result of `export_to_adk` or `export_lines`.

    Attributes:
        sessions: How many sessions were written.
        events: How many events these sessions have.
        unchanged: How many sessions the target had already, with the same content.
        states: How many states of apps and users were written.  For `export_lines`, the number of
            lines of users and apps of which no session was written.
        bad: How many sessions and states were not exported.  They cannot be decrypted, or
            google-adk's database cannot hold them, or the target has other content for their ids.
        stopped: Whether the run stopped at the first of these bad sessions and states.
        verified: How many sessions were compared after the export; None without `verify`.
        different: How many of these sessions, and of the states, differ in the target, without
            those in `bad`.
        only_in_target: How many sessions only the target has; None without `verify`.
        findings: The first 1000 sessions and states that are bad or differ.
        file: The file that `export --jsonl` wrote; None for stdout or a database.
        seconds: How long the run took.
    """

    sessions: int = counter("session", "exported as plaintext", shows_zero=True)
    events: int = counter("event", "exported as plaintext", shows_zero=True)
    unchanged: int = counter("session", "already in the target, with equal content")
    states: int = 0
    bad: int = counter("item", "not exported", is_failure=True)
    stopped: bool = False
    verified: int | None = counter("session", "compared", default=None)
    different: int = counter("item", "different in the target", is_failure=True)
    only_in_target: int | None = counter(
        "session", "only in the target", is_failure=True, default=None
    )
    findings: tuple[Finding, ...] = listing("bad", "different")
    file: str | None = None
    seconds: float = 0.0

    def extra_lines(self, dry_run: bool) -> Iterator[str]:
        if not (self.sessions or self.unchanged or self.states or self.bad):
            yield "there is nothing to export: if you gave --app or --user, check the name"
        if self.stopped:
            after = "" if self.file is None else f"delete {self.file!r}, and then "
            yield (
                f"stopped there: to export the other sessions, {after}run the same command again "
                "with --skip-bad"
            )


@audited_command
async def export_to_adk(
    db: Database,
    target: AdkTarget,
    *,
    app_name: str | None = None,
    user_id: str | None = None,
    skip_bad: bool = False,
    verify: bool = False,
    progress: Progress | None = None,
) -> Export:
    """Decrypt all sessions into a database that google-adk's `DatabaseSessionService` reads.

    The tables have google-adk's schema v1, and google-adk's own code creates them.  This function
    only adds rows.  Each session is written in whole or not at all, so an interrupted run can be
    repeated: sessions that the target has with the same content are skipped.  A new SQLite file can
    be read only by its owner.  Expired sessions, artifacts and memory are not exported.

    Args:
        target: The database to write, on SQLite, PostgreSQL or MariaDB (MySQL is not tested).
        verify: Afterwards, read both databases again and compare all sessions field by field.
        progress: With *verify*, each session counts twice.
    """
    run = _ExportToAdk(db, app_name, user_id, skip_bad, target, verify)
    return await run.run(progress, passes=2 if verify else 1)


@audited_command
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

    A user with a state, but without a session that can be exported, has a line without a session
    id.  An app with a state that no other line contains has a line without a user id.  Otherwise,
    these states would be lost.  Expired sessions, artifacts and memory are not exported.

    Args:
        write: Called with each line, in UTF-8 and with the line feed.
    """
    return await _ExportOfLines(db, app_name, user_id, skip_bad, write).run(progress)


@dataclass(repr=False, eq=False)
class _ExportRun(ABC):
    """One run of an export: reads sessions and states, and lists those that cannot be exported."""

    _db: Database
    _app_name: str | None
    _user_id: str | None
    _skip_bad: bool

    def __post_init__(self) -> None:
        self._result = Export()
        self._source, self._selection = EncryptedSource(self._db), Selection(self._app_name)
        self._findings = Findings(with_ids=False)
        # If only one user id is exported: the tag of this user in each app.
        self._users: dict[str, str] = {}
        self._rejected = DigestSet()  # the ids of what was not exported

    async def run(self, progress: Progress | None, *, passes: int = 1) -> Export:
        """Write everything; *passes* says how often all sessions are read."""
        # Notice a wrong key before anything is written.
        self._index_master: IndexMaster = (await self._db.keyring()).index_master
        number = await self._source.count(self._selection)
        if self._app_name is not None:
            add_facts(app=self._app_name)
        self._meter = Meter(progress, passes * number, None)
        try:
            await self._write()
            self._meter.finish()
        except StopAtBad:
            self._result.stopped = True
        return self._findings.copy_into(self._result)

    @abstractmethod
    async def _write(self) -> None:
        """Write the sessions and states that can be exported."""

    async def _readable_sessions(
        self, *, reports: bool = True
    ) -> AsyncIterator[Mapping[Ids, SessionContent]]:
        """Yield the sessions in batches; with *reports*, reject those that cannot be decrypted."""
        async for batch in self._source.sessions(self._selection):
            wanted = [one for one in batch if one.reason or self._is_wanted(*one.ids[:2])]
            contents = await self._source.read(wanted)
            yield {
                session.ids: c for session, c in contents.items() if isinstance(c, SessionContent)
            }
            for session, content in contents.items():
                if reports and isinstance(content, Unreadable):
                    self._reject(session.ids, content.reason)
            await self._meter.advance(len(batch))

    async def _readable_states(self, *, reports: bool = True) -> AsyncIterator[tuple[Ids, bytes]]:
        """Yield the states as JSON; with one user id, only the states of this user and its apps."""
        async for batch in self._source.states(self._selection):
            for ids, state in batch.items():
                if isinstance(state, bytes):
                    if self._is_wanted(*ids):
                        yield ids, state
                elif reports:
                    self._reject(ids, state.reason)

    def _is_wanted(self, app_name: str, user_id: str | None = None) -> bool:
        """If only one user is exported, return whether this is the user, or an app of the user.

        Add the user's tag in this app to the audit record.
        """
        if self._user_id is None:
            return True
        if user_id == self._user_id and app_name not in self._users:
            self._users[app_name] = self._index_master.tag_of(app_name, user_id).hex()
            add_facts(users=list(self._users.values()))
        return app_name in self._users and user_id in (None, self._user_id)

    def _reject(self, ids: Ids, reason: str) -> None:
        self._result.bad += 1
        self._rejected.add(ids)
        tag = b"" if isinstance(ids, UnreadableIds) else self._index_master.tag_of(*ids)
        self._findings.add(tag, reason, *ids)
        if not self._skip_bad:
            raise StopAtBad


@dataclass(repr=False, eq=False)
class _ExportToAdk(_ExportRun):
    _target: AdkTarget
    _verify: bool

    async def _write(self) -> None:
        await self._target.open()
        async for batch in self._readable_sessions():
            await self._write_sessions(batch)
        # google-adk needs a row of state for each user and each app, even if the state is empty.
        async for owner, state in self._readable_states():
            try:
                self._result.states += await self._target.insert_state(owner, state)
            except ConversionError as error:
                self._reject(owner, str(error))
        if self._verify:
            await self._compare()

    async def _write_sessions(self, batch: Mapping[Ids, SessionContent]) -> None:
        """Write the sessions that the target does not have; compare the others."""
        failed: dict[Ids, str] = {}
        suitable: dict[Ids, TargetRows] = {}
        for ids, content in batch.items():
            try:
                suitable[ids] = self._target.to_rows(ids, content)
            except ConversionError as error:
                failed[ids] = str(error)
        differences = await self._target.session_differences({ids: batch[ids] for ids in suitable})
        missing = {ids: rows for ids, rows in suitable.items() if ids not in differences}
        rejected = await self._target.insert(missing)
        # If the connection was lost after the commit, the repeated INSERT is rejected, although the
        # sessions are stored.  So compare the rejected sessions, too.
        differences |= await self._target.session_differences({ids: batch[ids] for ids in rejected})
        for ids in suitable:
            if ids in missing and ids not in rejected:
                self._result.sessions += 1
                self._result.events += len(batch[ids].events)
            elif differences.get(ids) == "":
                self._result.unchanged += 1
            else:
                other = f"the target has another session with its ids: {differences.get(ids)}"
                failed[ids] = rejected.get(ids, other)
        for ids, reason in failed.items():
            self._reject(ids, reason)

    async def _compare(self) -> None:
        """Read both databases again, compare all sessions and states, and report differences."""
        in_both = verified = 0
        async for batch in self._readable_sessions(reports=False):
            differences = await self._target.session_differences(batch)
            in_both += len(differences)
            verified += len(batch)
            for ids in batch:
                self._report_difference(ids, differences.get(ids, MISSING))
        async for owner, state in self._readable_states(reports=False):
            self._report_difference(owner, await self._target.state_difference(owner, state))
        self._result.verified = verified
        number = await self._target.count(self._app_name, self._user_id)
        self._result.only_in_target = max(number - in_both, 0)

    def _report_difference(self, ids: Ids, difference: str | None) -> None:
        if difference and ids not in self._rejected:
            self._result.different += 1
            self._findings.add(self._index_master.tag_of(*ids), difference, *ids)


@dataclass(repr=False, eq=False)
class _ExportOfLines(_ExportRun):
    _write_bytes: Callable[[bytes], object]
    _states: FifoCache[Ids, bytes] = field(default_factory=lambda: FifoCache(_CACHED_STATES))
    _apps_with_lines: set[Ids] = field(default_factory=set)

    async def _write(self) -> None:
        users_with_lines = DigestSet()
        async for batch in self._readable_sessions():
            for ids, content in batch.items():
                if await self._write_line(ids, content):
                    users_with_lines.add(ids[:2])
                    self._result.sessions += 1
                    self._result.events += len(content.events)
        async for ids, state in self._readable_states():
            with_lines = users_with_lines if len(ids) > 1 else self._apps_with_lines
            if state != b"{}" and ids not in with_lines:
                self._result.states += await self._write_line(ids, None)

    async def _write_line(self, ids: Ids, content: SessionContent | None) -> bool:
        """Write a line; return False if the state of the app or of the user is unreadable."""
        try:
            user_state = await self._state_of(*ids[:2]) if len(ids) > 1 else b"{}"
            line = _line(ids, await self._state_of(ids[0]), user_state, content)
        except DecryptionError as error:
            self._reject(ids, str(error))
            return False
        self._write_bytes(line)
        self._apps_with_lines.add(ids[:1])
        return True

    async def _state_of(self, *owner: str) -> bytes:
        state = self._states.get(owner)
        if state is None:
            state = await owner_state(self._db, *owner)
            self._states.put(owner, state)
        return state


def _line(ids: Ids, app_state: bytes, user_state: bytes, content: SessionContent | None) -> bytes:
    """Return the line of a session or, if *content* is None, of a user or app without such lines.

    The JSON is inserted as it is stored: parsing would take most of the time.
    """
    names = ("app_name", "user_id", "session_id", "created_at", "updated_at", "expires_at")
    fields = {"format": LINE_FORMAT, **dict.fromkeys(names), **dict(zip(names, ids, strict=False))}
    state, history = b"{}", b""
    if content is not None:
        fields |= {name: _time_text(getattr(content, name)) for name in names[3:]}
        state = content.state
        history = b",".join(map(event_json, content.events))
    start = json_text.dumps(fields)[:-1]
    by_scope = b'{"app":%b,"user":%b,"session":%b}' % (app_state, user_state, state)
    line = b'%b,"state":%b,"events":[%b]}' % (start, by_scope, history)
    # JSON allows line breaks only between values.
    return line.replace(b"\r", b" ").replace(b"\n", b" ") + b"\n"


def _time_text(microseconds: int | None) -> str | int | None:
    """Return a time as text in ISO 8601; or *microseconds* if `datetime` cannot represent it."""
    if microseconds is None:
        return None
    try:
        moment = datetime_of(microseconds)
    except OverflowError:
        return microseconds
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
