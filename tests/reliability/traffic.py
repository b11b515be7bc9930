"""An application's traffic, which knows afterwards what must be stored.

How it works.  `converse` is one conversation after the other: it creates a session, appends events
to it, reads it back, and deletes an earlier session.  Each write is noted in a `Journal` twice:
before it is sent, and after it was acknowledged.  A journal is a file of lines, one `os.write` for
each, so a killed process loses none.  `check` compares all journals with what a new service reads:
an acknowledged write that is not there is lost; an event that nobody has sent, or that is there
twice, is doubled.  A write that was not acknowledged may be stored or not, but whole.
"""

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from google.adk.events import Event, EventActions
from google.adk.sessions import BaseSessionService, Session
from google.genai import types

from adk_secure_sessions import (
    AesGcmBackend,
    EncryptedSessionService,
    SecureSessionError,
    StaleSessionError,
)
from adk_secure_sessions.maintenance import Database, verify

APP = "clinic"
USERS = 3  # whom all processes share, so that they change the same rows
EVENTS = 6  # of a session
KEEP = 5  # how many sessions a conversation leaves before it deletes the oldest
KEYS = [bytes(range(32)), bytes(range(32, 64))]  # root keys
_STEP = 1_000_000  # more than one process appends


def open_service(url: str) -> EncryptedSessionService:
    first, second = (AesGcmBackend(key) for key in KEYS)
    return EncryptedSessionService(url, first, [second])


def open_database(url: str, *, first: int = 0) -> Database:
    """Open the database for maintenance, with the root key of this number as the current one."""
    return Database(url, AesGcmBackend(KEYS[first]), [AesGcmBackend(KEYS[1 - first])])


# --- journals ------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """A line of a journal: `kind` is in small letters before a write, in capitals after it."""

    kind: str  # c: create, a: append, d: delete
    time: float  # monotonic seconds, which all processes share
    user: str
    session: str
    event: str
    counter: str  # the key of the user's state that the event sets, and the value
    value: int


class Journal:
    """What one process has sent and what was acknowledged."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(
        self,
        kind: str,
        user: str,
        session: str,
        event: str = "-",
        counter: str = "-",
        value: int = 0,
    ) -> None:
        entry = (kind, repr(time.monotonic()), user, session, event, counter, str(value))
        os.write(self._file, ("\t".join(entry) + "\n").encode())

    def close(self) -> None:
        os.close(self._file)


def entries(path: Path) -> Iterator[Entry]:
    for line in path.read_text().splitlines():
        kind, at, user, session, event, counter, value = line.split("\t")
        yield Entry(kind, float(at), user, session, event, counter, int(value))


# --- the application -----------------------------------------------------------------------------


@dataclass
class Talk:
    """One task of a process: what it counts is kept in a key of its user's state.

    Attributes:
        name: A name that no other task has at the same time; a restarted process has it again.
        incarnation: How often the process was started before.
        pause: Seconds between two writes.
    """

    service: BaseSessionService
    journal: Journal
    name: str
    incarnation: int
    user: str
    pause: float
    counted: int = 0
    writes: int = 0
    kept: list[Session] = field(default_factory=list)

    async def converse(self, goes_on: Callable[[], bool]) -> None:
        number = 0
        while goes_on():
            await self._hold_one(f"{self.name}.{self.incarnation}.{number}")
            number += 1
            if len(self.kept) > KEEP:
                await self._delete(self.kept.pop(0))

    async def converse_through_faults(self, goes_on: Callable[[], bool]) -> None:
        """Converse; after an error that leaves open what was stored, go on in new sessions."""
        while goes_on():
            try:
                await self.converse(goes_on)
            except (SecureSessionError, StaleSessionError) as error:
                if isinstance(error, SecureSessionError) and not error.retryable:
                    raise
                self.incarnation, self.counted = self.incarnation + 1, 0
                self.kept.clear()
                await asyncio.sleep(0.1)

    async def _hold_one(self, session_id: str) -> None:
        self.journal.note("c", self.user, session_id)
        session = await self.service.create_session(
            app_name=APP, user_id=self.user, session_id=session_id, state={"n": 0}
        )
        self.journal.note("C", self.user, session_id)
        self.writes += 1
        for number in range(1, EVENTS + 1):
            await self._append(session, number)
            if self.pause:
                await asyncio.sleep(self.pause)
        self.kept.append(session)
        await self._compare(session)

    async def _append(self, session: Session, number: int) -> None:
        self.counted += 1
        counter, value = f"user:{self.name}", self.incarnation * _STEP + self.counted
        text = types.Content(role="model", parts=[types.Part(text=f"{number} " + "x" * 300)])
        delta = {"n": number, counter: value}
        event = Event(
            author="agent",
            invocation_id="i",
            content=text,
            actions=EventActions(state_delta=delta),
        )
        self.journal.note("a", self.user, session.id, event.id, counter, value)
        await self.service.append_event(session, event)
        self.journal.note("A", self.user, session.id, event.id, counter, value)
        self.writes += 1

    async def _delete(self, session: Session) -> None:
        await self._compare(session)
        self.journal.note("d", self.user, session.id)
        await self.service.delete_session(app_name=APP, user_id=self.user, session_id=session.id)
        self.journal.note("D", self.user, session.id)
        self.writes += 1

    async def _compare(self, session: Session) -> None:
        """Read the session: it has the events that were appended, in order, and no other."""
        found = await self.service.get_session(
            app_name=APP, user_id=self.user, session_id=session.id
        )
        assert found is not None, "a session was lost"
        assert found.events == session.events
        assert found.state["n"] == len(session.events)
        counted = found.state[f"user:{self.name}"] - self.incarnation * _STEP
        assert counted == self.counted, "a change of the user's state was lost"


def write(
    say: Callable[[object], None],
    url: str,
    directory: str,
    name: str,
    incarnation: int,
    tasks: int,
    pause: float,
    *,
    through_faults: bool = False,
) -> None:
    """A job for tests/processes.py: *tasks* conversations, until the file `stop` exists."""
    stop, journal = Path(directory, "stop"), Journal(Path(directory, f"{name}.{incarnation}"))

    async def main() -> None:
        async with open_service(url) as service:
            talks = [
                Talk(service, journal, f"{name}.{n}", incarnation, f"user {n % USERS}", pause)
                for n in range(tasks)
            ]
            how = Talk.converse_through_faults if through_faults else Talk.converse
            await asyncio.gather(*(how(one, lambda: not stop.exists()) for one in talks))
            say(sum(one.writes for one in talks))

    asyncio.run(main())
    journal.close()


# --- what must be stored -------------------------------------------------------------------------


class Checked(NamedTuple):
    """What `check` has found."""

    acknowledged: int
    lost: int
    doubled: int
    sessions: int


@dataclass
class _Expected:
    """What the journals say of one session."""

    user: str = ""
    is_created: bool = False
    delete_was_sent: bool = False
    is_deleted: bool = False
    sent: list[str] = field(default_factory=list)
    acknowledged: list[str] = field(default_factory=list)


async def check(url: str, journals: Iterable[Path]) -> Checked:
    """Compare *journals* with the database; `verify` must find no bad row."""
    sessions: dict[str, _Expected] = defaultdict(_Expected)
    counters: dict[tuple[str, str], tuple[int, int]] = {}  # the last value acknowledged, and sent
    acknowledged = 0
    for path in journals:
        for entry in entries(path):
            acknowledged += entry.kind.isupper()
            _enter(sessions[entry.session], entry)
            if entry.kind in "aA":
                done, sent = counters.get((entry.user, entry.counter), (0, 0))
                done = max(done, entry.value) if entry.kind == "A" else done
                counters[entry.user, entry.counter] = done, max(sent, entry.value)
    async with open_service(url) as service:
        lost = doubled = 0
        found = await _read(service, sessions)
        for session_id, expected in sessions.items():
            one_lost, one_doubled = _compare(found[session_id], expected)
            lost, doubled = lost + one_lost, doubled + one_doubled
        for user in {one.user for one in sessions.values()}:
            listed = await service.list_sessions(app_name=APP, user_id=user)
            there = {key for key, one in sessions.items() if one.user == user and found[key]}
            assert {one.id for one in listed.sessions} == there
            state = await service.get_user_state(app_name=APP, user_id=user)
            for (owner, counter), (done, sent) in counters.items():
                if owner == user:
                    value = state.get(counter.removeprefix("user:"), 0)
                    lost += value < done
                    doubled += value > sent
    async with open_database(url) as db:
        verified = await verify(db)
    assert (verified.bad, verified.unchecked) == (0, 0), verified.problems
    there = {key for key, one in found.items() if one}
    assert verified.sessions == len(there)
    return Checked(acknowledged, lost, doubled, len(there))


def _enter(expected: _Expected, entry: Entry) -> None:
    expected.user = entry.user
    match entry.kind:
        case "C":
            expected.is_created = True
        case "a":
            expected.sent.append(entry.event)
        case "A":
            expected.acknowledged.append(entry.event)
        case "d":
            expected.delete_was_sent = True
        case "D":
            expected.is_deleted = True


async def _read(
    service: BaseSessionService, sessions: dict[str, _Expected]
) -> dict[str, Session | None]:
    found: dict[str, Session | None] = {}
    names = list(sessions)
    for start in range(0, len(names), 50):
        part = names[start : start + 50]
        got = await asyncio.gather(
            *(
                service.get_session(app_name=APP, user_id=sessions[one].user, session_id=one)
                for one in part
            )
        )
        found.update(zip(part, got, strict=True))
    return found


def _compare(found: Session | None, expected: _Expected) -> tuple[int, int]:
    """Return how many writes are lost, and how many events are doubled."""
    if found is None:
        if expected.delete_was_sent or not expected.is_created:
            return 0, 0
        return 1 + len(expected.acknowledged), 0
    stored = [event.id for event in found.events]
    lost = len(set(expected.acknowledged) - set(stored)) + expected.is_deleted
    doubled = len(stored) - len(set(stored) & set(expected.sent))
    if not lost and not doubled:
        assert stored == expected.sent[: len(stored)], "events are not in order"
        assert found.state["n"] == len(stored), "an event was stored without its state"
    return lost, doubled


def longest_pause(journals: Sequence[Path], moments: Iterable[float]) -> float:
    """Return the longest time from one of *moments* until any process had a write acknowledged."""
    times = sorted(
        entry.time for path in journals for entry in entries(path) if entry.kind.isupper()
    )
    return max(min(at for at in times if at > moment) - moment for moment in moments)
