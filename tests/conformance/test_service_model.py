"""Whatever is called in whatever order, the service returns what a simple model in memory predicts.

How it works.  Hypothesis chooses the calls: the rules of `Conversations`.  Two services use one
database, as two processes do, and the second one has caches for a single row.  The rules call
either of them, restart them, and run maintenance commands beside them.  `Model` predicts each
result.  It knows nothing of encryption, versions or caches: it is dictionaries and lists.  A `Held`
is a session object that the application keeps, and that becomes stale.

No clock is changed.  An event of the past makes a session with a lifetime expire at once, and an
event of the future keeps it alive.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import pytest
from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.errors.session_not_found_error import SessionNotFoundError
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.sessions import BaseSessionService, Session
from google.genai import types
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    multiple,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import URL

from adk_secure_sessions import (
    AesGcmBackend,
    Caches,
    EncryptedSessionService,
    EncryptionBackend,
    FernetBackend,
)
from adk_secure_sessions.maintenance import (
    Database,
    erase_user,
    purge_sessions,
    retire,
    rotate_data,
    rotate_master,
    rotate_root,
    vacuum,
    verify,
)
from tests.conformance.generated import as_text
from tests.conformance.services import KINDS, file_in
from tests.conformance.support import APP, STALE, START, delete, find, listed, together
from tests.servers import Server

T = TypeVar("T")
Writer = type[AesGcmBackend] | type[FernetBackend]

LATER = 4_000_000_000.0  # in 2096
ROOTS = bytes(32), bytes(31) + b"\1"
ANOTHER_APP = "another"

users = st.sampled_from(["ada", "ada", "ünï\U0001f600"])
session_ids = st.sampled_from(["s", "s", ""])
apps = st.sampled_from([APP] * 4 + [ANOTHER_APP])
values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(-1e9, 1e9) | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
) | st.just("long " * 1000)
keys = st.sampled_from(["a", "b", "", "app:a", "user:a", "user:app:a", "temp:a", "temp:b"])
states = st.dictionaries(keys, values, max_size=3)
lifetimes = st.sampled_from([None] * 4 + [timedelta(days=1), timedelta(microseconds=1)])
times = st.sampled_from([START, LATER, LATER])
configs = st.fixed_dictionaries(
    {},
    optional={
        "num_recent_events": st.integers(0, 3),
        "after_timestamp": st.sampled_from([0.0, START + 2, START + 5, LATER]),
    },
)
either = st.integers(0, 1)


# --- the model -----------------------------------------------------------------------------------


@dataclass(eq=False)
class StoredSession:
    """A session in the model: the *number*-th that was created, with what is stored of its events.

    `state` is without the keys of the app and the user.
    """

    number: int
    user: "StoredUser"
    id: str
    state: dict[str, Any]
    lifetime: timedelta | None
    updated: float
    events: list[Event] = field(default_factory=list)

    @property
    def has_expired(self) -> bool:
        if self.lifetime is None:
            return False
        return self.updated + self.lifetime.total_seconds() <= time.time()


@dataclass(eq=False)
class StoredUser:
    """A user in the model; *number* is the position of its creation among all users."""

    number: int
    app: "StoredApp"
    id: str
    state: dict[str, Any] = field(default_factory=dict)
    sessions: dict[str, StoredSession] = field(default_factory=dict)  # expired ones, too


@dataclass(eq=False)
class StoredApp:
    name: str
    state: dict[str, Any] = field(default_factory=dict)
    users: dict[str, StoredUser] = field(default_factory=dict)


@dataclass(eq=False)
class Held:
    """A session object of the application, and what the model says about it.

    Attributes:
        stored: The stored session that it was read from.
        revision: How many events that one had.
        state, events: What those of the object must be.
        is_marked: Whether it has ADK's marker, which JSON does not keep.
    """

    session: Session
    stored: StoredSession
    revision: int
    state: dict[str, Any]
    events: list[Event]
    is_marked: bool = True


def split(delta: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The keys of the app, of the user and of the session in *delta*."""
    scopes: tuple[dict[str, Any], ...] = {}, {}, {}
    for key, value in delta.items():
        if key.startswith("app:"):
            scopes[0][key[4:]] = value
        elif key.startswith("user:"):
            scopes[1][key[5:]] = value
        elif not key.startswith("temp:"):
            scopes[2][key] = value
    return scopes[0], scopes[1], scopes[2]


def merged(stored: StoredSession) -> dict[str, Any]:
    """The state that a caller sees."""
    return {
        **stored.state,
        **{f"app:{key}": value for key, value in stored.user.app.state.items()},
        **{f"user:{key}": value for key, value in stored.user.state.items()},
    }


class Model:
    """What must be stored."""

    def __init__(self) -> None:
        self.apps = {name: StoredApp(name) for name in (APP, ANOTHER_APP)}
        self._numbers = count()

    def find(self, app: str, user: str, session_id: str) -> StoredSession | None:
        """The session that the ids name, unless it has expired."""
        owner = self.apps[app].users.get(user)
        stored = owner.sessions.get(session_id) if owner else None
        return None if stored is None or stored.has_expired else stored

    def create(
        self, app: str, user: str, session: Session, delta: dict[str, Any], life: timedelta | None
    ) -> StoredSession:
        of_app, of_user, of_session = split(delta)
        stored_app = self.apps[app]
        if user not in stored_app.users:
            stored_app.users[user] = StoredUser(next(self._numbers), stored_app, user)
        owner = stored_app.users[user]
        stored_app.state.update(of_app)
        owner.state.update(of_user)
        stored = StoredSession(
            next(self._numbers), owner, session.id, of_session, life, session.last_update_time
        )
        owner.sessions[session.id] = stored
        return stored

    def append(self, stored: StoredSession, event: Event, delta: dict[str, Any]) -> None:
        of_app, of_user, of_session = split(delta)
        stored.user.app.state.update(of_app)
        stored.user.state.update(of_user)
        stored.state.update(of_session)
        stored.events.append(event)
        stored.updated = event.timestamp

    def sessions(self, app: str, user: str | None) -> list[StoredSession]:
        """The sessions that a listing has, in the order of their creation, user by user."""
        owners = sorted(self.apps[app].users.values(), key=lambda owner: owner.number)
        return [
            stored
            for owner in owners
            if user in (None, owner.id)
            for stored in sorted(owner.sessions.values(), key=lambda one: one.number)
            if not stored.has_expired
        ]

    def everything(self) -> list[StoredSession]:
        """All stored sessions, expired ones among them."""
        return [
            stored
            for app in self.apps.values()
            for owner in app.users.values()
            for stored in owner.sessions.values()
        ]


def expected(stored: StoredSession, history: list[Event]) -> str:
    """The text of the session that a read returns."""
    session = Session(
        id=stored.id,
        app_name=stored.user.app.name,
        user_id=stored.user.id,
        state=merged(stored),
        last_update_time=stored.updated,
    )
    session.events = history
    return as_text(session)


# --- the machine ---------------------------------------------------------------------------------


class Conversations(RuleBasedStateMachine):
    """Calls of two services on one database."""

    held = Bundle("held")

    def __init__(self, database: AbstractContextManager[URL]) -> None:
        super().__init__()
        self._database = database
        self._url = database.__enter__()
        self._runner = asyncio.Runner()
        self._model = Model()
        self._events = count()
        self._root = 0
        self._writer: Writer = AesGcmBackend
        self._services: list[EncryptedSessionService] = []

    def _run(self, call: Awaitable[T]) -> T:
        async def awaited() -> T:
            return await call

        return self._runner.run(awaited())

    def _backends(self) -> tuple[EncryptionBackend, list[EncryptionBackend]]:
        """The writing backend, and the others with each root key."""
        roots = ROOTS[self._root], ROOTS[1 - self._root]
        other: Writer = FernetBackend if self._writer is AesGcmBackend else AesGcmBackend
        made: list[EncryptionBackend]
        made = [kind(root) for kind in (self._writer, other) for root in roots]
        return made[0], made[1:]

    def _open(self, index: int) -> EncryptedSessionService:
        first, rest = self._backends()
        if index == 0:
            return EncryptedSessionService(self._url, first, rest)
        return EncryptedSessionService(
            self._url, first, rest, cache=Caches(sessions=1, data_keys=1)
        )

    @asynccontextmanager
    async def _maintained(self) -> AsyncIterator[Database]:
        async with Database(self._url, *self._backends()) as db:
            yield db

    async def _maintain(self, command: Callable[..., Awaitable[T]], *args: Any, **named: Any) -> T:
        async with self._maintained() as db:
            return await command(db, *args, **named)

    @initialize(target=held)
    def open_both(self) -> Any:
        self._services = [self._open(0), self._open(1)]
        self._run(self._services[0].prepare_tables())
        return multiple(
            self.create_session(0, "ada", "s", {"a": 1, "user:a": 1}, None, APP),
            self.create_session(1, "ünï\U0001f600", "s", {"app:a": 2}, timedelta(days=1), APP),
        )

    def teardown(self) -> None:
        try:
            if self._services:
                self._verify()
            for service in self._services:
                self._run(service.close())
        finally:
            self._runner.close()
            self._database.__exit__(None, None, None)

    # --- sessions ---------------------------------------------------------------------------------

    @rule(
        target=held,
        which=either,
        user=users,
        session_id=session_ids,
        state=states,
        lifetime=lifetimes,
        app=apps,
    )
    def create_session(
        self,
        which: int,
        user: str,
        session_id: str,
        state: dict[str, Any],
        lifetime: timedelta | None,
        app: str,
    ) -> Any:
        call = self._services[which].create_session(
            app_name=app,
            user_id=user,
            session_id=session_id,
            state=dict(state),
            expires_after=lifetime,
        )
        if self._model.find(app, user, session_id):
            with pytest.raises(AlreadyExistsError):
                self._run(call)
            return multiple()
        session = self._run(call)
        stored = self._model.create(app, user, session, state, lifetime)
        assert as_text(session) == expected(stored, [])
        return Held(session, stored, 0, merged(stored), [])

    @rule(target=held, which=either, user=users, session_id=session_ids, config=configs, app=apps)
    def get(self, which: int, user: str, session_id: str, config: dict[str, Any], app: str) -> Any:
        named = Session(app_name=app, user_id=user, id=session_id)
        session = self._run(find(self._services[which], named, **config))
        stored = self._model.find(app, user, session_id)
        if stored is None:
            assert session is None
            return multiple()
        after, limit = config.get("after_timestamp", 0), config.get("num_recent_events")
        history = [event for event in stored.events if event.timestamp >= after]
        if limit is not None:
            history = history[len(history) - limit :] if limit < len(history) else history
        assert session is not None
        assert as_text(session) == expected(stored, history)
        return Held(session, stored, len(stored.events), merged(stored), list(history))

    @rule(
        which=either,
        held=held,
        delta=states,
        at=times,
        partial=st.sampled_from([False] * 5 + [True]),
    )
    def append(
        self, which: int, held: Held, delta: dict[str, Any], at: float, partial: bool
    ) -> None:
        self._run(self._append(self._services[which], held, delta, at, partial=partial))

    @rule(which=either, held=held, delta=states)
    def append_again(self, which: int, held: Held, delta: dict[str, Any]) -> None:
        self._run(self._append(self._services[which], held, delta, LATER))

    @rule(
        first=held,
        second=held,
        one=either,
        other=either,
        value=st.integers(0, 9),
        both=st.booleans(),
    )
    def append_at_once(
        self, first: Held, second: Held, one: int, other: int, value: int, both: bool
    ) -> None:
        """Two appends at the same time, to the states of one user or one app."""
        if (first.stored.user.app, first.stored.user.id, first.stored.id) == (
            second.stored.user.app, second.stored.user.id, second.stored.id,
        ):  # fmt: skip
            return
        scope = "app:" if both else "user:"
        self._run(
            together(
                self._append(self._services[one], first, {f"{scope}left": value}, LATER),
                self._append(self._services[other], second, {f"{scope}right": value}, LATER),
            )
        )

    async def _append(
        self,
        service: BaseSessionService,
        held: Held,
        delta: dict[str, Any],
        at: float,
        *,
        partial: bool = False,
    ) -> None:
        number = next(self._events)
        event = Event(
            id=f"e{number}",
            author="agent",
            invocation_id="i",
            timestamp=at + number / 4,
            partial=partial or None,
            content=types.Content(role="model", parts=[types.Part(text=f"text {number}")]),
            actions=EventActions(state_delta=dict(delta)),
        )
        stored = {key: value for key, value in delta.items() if not key.startswith("temp:")}
        kept = event.model_copy(update={"actions": EventActions(state_delta=stored)})
        target, error = self._outcome(held)
        session = held.session
        if partial:
            before = as_text(session)
            assert await service.append_event(session, event) is event
            assert as_text(session) == before
            return
        held.state |= {key: value for key, value in delta.items() if key not in stored}
        if error is not None:
            with pytest.raises(error) as raised:
                await service.append_event(session, event)
            assert isinstance(raised.value, SessionNotFoundError) == (error is SessionNotFoundError)
            self._check(held)
            return
        assert target is not None
        # The model changes before the call: a task that runs at the same time must expect it.
        self._model.append(target, kept, delta)
        held.stored, held.revision, held.is_marked = target, len(target.events), True
        held.state |= stored
        held.events.append(kept)
        assert await service.append_event(session, event) is event
        assert session.last_update_time == event.timestamp
        self._check(held)

    def _outcome(self, held: Held) -> tuple[StoredSession | None, type[Exception] | None]:
        """The session that an append changes, or the error that it raises."""
        user = held.stored.user
        stored = self._model.find(user.app.name, user.id, held.stored.id)
        if stored is None:
            return None, SessionNotFoundError
        if held.is_marked:
            fits = stored is held.stored and held.revision == len(stored.events)
        else:
            last = [event.id for event in held.events[-1:]]
            fits = last == [event.id for event in stored.events[-1:]] or (
                not last and held.session.last_update_time == stored.updated
            )
        return (stored, None) if fits else (None, STALE)

    def _check(self, held: Held) -> None:
        """The application's object is as the model says."""
        shown = Session(app_name="", user_id="", id="", state=held.session.state)
        wanted = Session(app_name="", user_id="", id="", state=held.state)
        shown.events, wanted.events = held.session.events, held.events
        assert as_text(shown, timed=False) == as_text(wanted, timed=False)

    @rule(held=held)
    def forget_the_marker(self, held: Held) -> None:
        """The application converts its object to JSON and back."""
        with suppress(ValueError):  # the id of a user may be no valid Unicode
            held.session = Session.model_validate_json(held.session.model_dump_json())
            held.is_marked = False

    @rule(which=either, held=held)
    def delete(self, which: int, held: Held) -> None:
        self._run(delete(self._services[which], held.session))
        user = held.stored.user
        current = user.app.users.get(user.id)
        if current:
            current.sessions.pop(held.stored.id, None)

    # --- listings and states ----------------------------------------------------------------------

    @rule(which=either, user=users | st.none(), app=apps)
    def list_sessions(self, which: int, user: str | None, app: str) -> None:
        shown = self._run(listed(self._services[which], user, app))
        wanted = sorted(
            self._model.sessions(app, user), key=lambda one: (one.updated, one.user.id, one.id)
        )
        assert [as_text(one) for one in shown] == [expected(stored, []) for stored in wanted]

    @rule(
        which=either,
        user=users | st.none(),
        limit=st.integers(1, 3),
        order=st.sampled_from(["oldest", "newest"]),
    )
    def list_pages(self, which: int, user: str | None, limit: int, order: Any) -> None:
        shown: list[Session] = []
        after = None
        while True:
            page = self._run(
                self._services[which].list_sessions_page(
                    APP, user, limit=limit, after=after, order=order
                )
            )
            assert len(page.sessions) <= limit
            shown += page.sessions
            after = page.next
            if after is None:
                break
        wanted = self._model.sessions(APP, user)
        if order == "newest":
            wanted.reverse()
        assert [as_text(one) for one in shown] == [expected(stored, []) for stored in wanted]

    @rule(which=either, user=users)
    def user_state(self, which: int, user: str) -> None:
        state = self._run(self._services[which].get_user_state(app_name=APP, user_id=user))
        owner = self._model.apps[APP].users.get(user)
        assert state == (owner.state if owner else {})

    # --- processes and maintenance ----------------------------------------------------------------

    @rule(which=either, writer=st.sampled_from([AesGcmBackend, AesGcmBackend, FernetBackend]))
    def restart(self, which: int, writer: Writer) -> None:
        self._writer = writer
        self._run(self._services[which].close())
        self._services[which] = self._open(which)

    @rule(
        command=st.sampled_from([rotate_master, rotate_data]), which=either, held=held, delta=states
    )
    def rotate_while_an_event_is_appended(
        self, command: Callable[..., Awaitable[Any]], which: int, held: Held, delta: dict[str, Any]
    ) -> None:
        done, _ = self._run(
            together(
                self._maintain(command), self._append(self._services[which], held, delta, LATER)
            )
        )
        assert not done.bad

    @rule(
        command=st.sampled_from(
            ["rotate_root", "retire", "erase_user", "purge", "vacuum", "verify"]
        ),
        user=users,
    )
    def maintain(self, command: str, user: str) -> None:
        """One rule for all, so that most calls are those of sessions."""
        if command == "erase_user":
            self._erase_user(user)
        else:
            getattr(self, f"_{command}")()

    def _rotate_root(self) -> None:
        self._root = 1 - self._root
        done = self._run(self._maintain(rotate_root))
        assert not done.plaintext_ids

    def _retire(self) -> None:
        self._run(self._maintain(retire))

    def _erase_user(self, user: str) -> None:
        done = self._run(self._maintain(erase_user, APP, user))
        owner = self._model.apps[APP].users.pop(user, None)
        assert done.sessions == (len(owner.sessions) if owner else 0)

    def _purge(self) -> None:
        due = [stored for stored in self._model.everything() if stored.has_expired]
        done = self._run(self._maintain(purge_sessions))
        assert (done.deleted, done.bad) == (len(due), 0)
        for stored in due:
            del stored.user.sessions[stored.id]

    def _vacuum(self) -> None:
        if self._url.get_backend_name() == "sqlite":
            self._run(self._maintain(vacuum))

    def _verify(self) -> None:
        found = self._run(self._maintain(verify))
        assert (found.bad, found.unchecked) == (0, 0), found.problems
        stored = self._model.everything()
        assert found.sessions == len(stored)
        assert found.events == sum(len(one.events) for one in stored)
        assert found.users == sum(len(app.users) for app in self._model.apps.values())


# --- the tests -----------------------------------------------------------------------------------


def run_conversations(
    database: Callable[[], AbstractContextManager[URL]], *, examples: int, steps: int
) -> None:
    run_state_machine_as_test(
        # Any function that makes one; the stub asks for a class.
        lambda: Conversations(database()),  # type: ignore[arg-type]
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )


@pytest.fixture
def files(tmp_path: Path) -> Callable[[], AbstractContextManager[URL]]:
    numbers = count()

    @contextmanager
    def in_file() -> Iterator[URL]:
        directory = tmp_path / str(next(numbers))
        directory.mkdir()
        yield file_in(directory)

    return in_file


@pytest.mark.no_cover  # slow, and runs no code that the other tests do not
def test_random_calls_have_the_results_that_a_model_predicts(
    files: Callable[[], AbstractContextManager[URL]],
) -> None:
    run_conversations(files, examples=6, steps=50)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(8))  # a test has ten minutes, also on a busy machine
def test_many_random_calls_have_the_results_that_a_model_predicts(
    files: Callable[[], AbstractContextManager[URL]], part: int
) -> None:
    run_conversations(files, examples=50, steps=60)


@pytest.mark.soak
@pytest.mark.parametrize("service", ["postgresql", "psycopg", "mariadb"])
def test_random_calls_on_a_server_have_the_results_that_a_model_predicts(
    service: str, request: pytest.FixtureRequest
) -> None:
    kind = KINDS[f"encrypted-{service}"]
    assert kind.server is not None
    server: Server = request.getfixturevalue(kind.server)

    @contextmanager
    def on_server() -> Iterator[URL]:
        with server.database(reused=True) as url:
            yield url.set(drivername=kind.driver)

    run_conversations(on_server, examples=100, steps=50)
