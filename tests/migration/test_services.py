"""ServiceSource reads any session service through google-adk's public methods."""

import math
from pathlib import Path
from typing import Any

import pytest
from google.adk.events import EventActions
from google.adk.sessions import BaseSessionService, InMemorySessionService, Session
from google.adk.sessions.base_session_service import GetSessionConfig, ListSessionsResponse

from adk_secure_sessions import ConfigurationError
from adk_secure_sessions.formats.json_text import load_state
from adk_secure_sessions.migration import compare, migrate
from adk_secure_sessions.migration.service_source import ServiceSource
from adk_secure_sessions.migration.sources import Selection, SessionContent, Unreadable
from tests.conformance import samples
from tests.conformance.support import ADK
from tests.migration.adk_sources import (
    START,
    assert_same_as_adk,
    contents,
    decoded,
    fill,
    listed,
    said,
    setting,
    states_of,
)
from tests.migration.memory_source import APP, MemorySource
from tests.migration.support import copy, database, numbers

# google-adk itself calls a deprecated method when it makes an AuthConfig.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Minimal(BaseSessionService):
    """A service that stores copies, and implements only what google-adk demands.

    As some services do, it lists sessions without their states, and the sessions of one user at a
    time.  It returns the same objects again and again.
    """

    def __init__(self) -> None:
        self.inner = InMemorySessionService()
        self.reads: list[str] = []

    async def create_session(self, **given: Any) -> Session:
        return await self.inner.create_session(**given)

    async def get_session(
        self,
        *,
        app_name: str,
        user_id: str,
        session_id: str,
        config: GetSessionConfig | None = None,
    ) -> Session | None:
        self.reads.append(session_id)
        return await self.inner.get_session(
            app_name=app_name, user_id=user_id, session_id=session_id
        )

    async def list_sessions(
        self, *, app_name: str, user_id: str | None = None
    ) -> ListSessionsResponse:
        if user_id is None:
            raise ValueError("user_id is required")
        response = await self.inner.list_sessions(app_name=app_name, user_id=user_id)
        for session in response.sessions:
            session.state = {}
        return response

    async def delete_session(self, **ids: Any) -> None:
        await self.inner.delete_session(**ids)

    async def append_event(self, session: Session, event: Any) -> Any:
        return await self.inner.append_event(session, event)


async def test_every_field_of_an_event_is_read() -> None:
    service = InMemorySessionService()
    given = dict(samples.of_every_field()) | {name: make() for name, make in samples.CORPUS.items()}
    given = {name: event for name, event in given.items() if not event.partial}
    for name, event in given.items():
        await fill(service, [event], session_id=name)
    await fill(service, state={"k": 1, "user:k": [2], "app:k": None}, app_name="Grüße", user_id="")
    await fill(service, app_name="not asked for")
    async with ServiceSource(service, ["app", "Grüße", "unknown"]) as source:
        assert await assert_same_as_adk(service, source) == len(given)
        assert await source.count(Selection()) == len(given) + 1
        assert await source.count(Selection("unknown")) == 0
        assert len(await listed(source, Selection("Grüße"))) == 1
        assert await states_of(source, Selection("Grüße")) == (
            {"Grüße": {"k": None}},
            {("Grüße", ""): {"k": [2]}},
        )


async def test_final_states_of_interleaved_sessions_are_read() -> None:
    service = InMemorySessionService()
    one, two = await fill(service), await fill(service)
    for number in range(3):
        for session in (one, two):
            await service.append_event(session, setting(START + number, **{"user:k": session.id}))
    source = ServiceSource(service, ["app"])
    assert await assert_same_as_adk(service, source) == 6
    assert (await states_of(source))[1] == {("app", "user"): {"k": two.id}}


async def test_service_that_lists_users_one_by_one_is_read() -> None:
    service = Minimal()
    for user_id in ("a", "b", "not asked for"):
        state = {"user:u": user_id, "app:a": 1, "k": user_id}
        await fill(service, [said()], user_id=user_id, session_id=f"s {user_id}", state=state)
    source = ServiceSource(service, ["app"], user_ids={"app": ["a", "b", "c"]})
    found = {one.user_id: content for one, content in (await contents(source)).items()}
    assert list(found) == ["a", "b"]
    for user_id, content in found.items():
        assert isinstance(content, SessionContent)
        assert load_state(content.state) == {"k": user_id}
    assert await states_of(source) == (
        {"app": {"a": 1}},
        {("app", "a"): {"u": "a"}, ("app", "b"): {"u": "b"}},
    )


@pytest.mark.skipif(ADK < (2, 6), reason="this google-adk has no get_user_state")
async def test_user_without_sessions_is_read_if_known() -> None:
    service = InMemorySessionService()
    gone = await fill(service, user_id="gone", state={"user:u": 1})
    await service.delete_session(app_name="app", user_id="gone", session_id=gone.id)
    source = ServiceSource(service, ["app"], user_ids={"app": ["gone"]})
    assert (await states_of(source))[1] == {("app", "gone"): {"u": 1}}


async def test_version_changes_with_every_event() -> None:
    service = InMemorySessionService()
    session = await fill(service, session_id="s")
    etags = set()
    exact, quick = (
        ServiceSource(service, ["app"]),
        ServiceSource(service, ["app"], compares_events=False),
    )
    quick_etags = set()
    for time in (START, START, START + 1):
        await service.append_event(session, said(at=time))
        etags.add((await listed(exact))[0].etag)
        quick_etags.add((await listed(quick))[0].etag)
    assert len(etags) == 3
    assert len(quick_etags) == 2
    assert await assert_same_as_adk(service, quick) == 3


async def test_each_session_is_read_once_or_only_if_asked_for() -> None:
    service = Minimal()
    for number in range(40):
        await fill(service, session_id=f"s{number:02}")
    options: dict[str, Any] = {"user_ids": {"app": ["user"]}}
    await contents(ServiceSource(service, ["app"], **options))
    assert sorted(service.reads) == [f"s{number:02}" for number in range(40)]
    service.reads.clear()
    assert (
        len(await listed(ServiceSource(service, ["app"], compares_events=False, **options))) == 40
    )
    assert service.reads == []


async def test_session_that_was_deleted_meanwhile_is_omitted() -> None:
    service = InMemorySessionService()
    for name in ("a", "b"):
        await fill(service, session_id=name)
    source = ServiceSource(service, ["app"], compares_events=False)
    sessions = await listed(source)
    await service.delete_session(app_name="app", user_id="user", session_id="a")
    assert [one.session_id for one in await source.read(sessions)] == ["b"]


class DeletesWhatWasRead(InMemorySessionService):
    async def get_session(self, **given: Any) -> Session | None:
        session = await super().get_session(**given)
        await self.delete_session(
            **{name: given[name] for name in ("app_name", "user_id", "session_id")}
        )
        return session


async def test_comparison_reads_a_session_that_differs_again(file_url: str) -> None:
    source, service = MemorySource(), DeletesWhatWasRead()
    source.put("ada", "s", events=1)
    await copy(source, file_url)
    await fill(service, [said()], app_name=APP, user_id="ada", session_id="s")
    async with database(file_url) as db:
        done = await compare(ServiceSource(service, [APP]), db)
    assert numbers(done) == {}, "the source no longer has it"


async def test_run_after_one_that_stopped_copies_only_what_is_selected(tmp_path: Path) -> None:
    service = InMemorySessionService()
    await fill(service, [said(at=math.nan)], app_name="a", session_id="bad")
    for app_name in ("a", "b"):
        await fill(service, [said()], app_name=app_name, session_id="good")
    async with (
        ServiceSource(service, ["a", "b"]) as source,
        database(f"sqlite:///{tmp_path}/target.db") as db,
    ):
        assert (await migrate(source, db)).stopped
        done = await migrate(source, db, selection=Selection("b"))
        assert (done.copied, done.unchanged, done.stopped) == (1, 0, False)


async def test_scope_selects_sessions_by_last_update() -> None:
    service = InMemorySessionService()
    for number in range(4):
        await fill(service, [said(at=START + number)], session_id=f"s{number}")
    await fill(service, [said(at=math.nan)], session_id="unknown")
    selection = Selection(since=round((START + 2) * 1e6))
    source = ServiceSource(service, ["app"])
    assert [one.session_id for one in await listed(source, selection)] == ["s2", "s3", "unknown"]
    assert await source.count(selection) == 3


async def test_values_beyond_the_limits_are_reported_without_content() -> None:
    service = InMemorySessionService()
    deep: Any = "a secret"
    for _ in range(300):
        deep = [deep]
    bad = {
        "deep event": said(custom_metadata={"a": deep}),
        "no form": said(custom_metadata={"a": object()}),
        "no time": said(at=math.nan),
    }
    for name, event in bad.items():
        await fill(service, [said(), event], session_id=name)
    await fill(service, session_id="deep state", state={"a secret": deep, "user:a": deep})
    await fill(service, session_id="x" * 1025)
    await fill(service, user_id="other", session_id="good")
    source = ServiceSource(service, ["app"])
    found = {one.session_id: content for one, content in (await contents(source)).items()}
    good = found.pop("good")
    assert isinstance(good, SessionContent)
    assert len(found) == len(bad) + 2
    for name, content in found.items():
        assert isinstance(content, Unreadable), name
        assert "secret" not in content.reason
        assert name not in bad or "event 2 of 2" in content.reason
    user = (await states_of(source))[1]["app", "user"]
    assert isinstance(user, Unreadable)


async def test_temporary_keys_are_left_out_and_the_event_is_not_changed() -> None:
    service = InMemorySessionService()
    session = await fill(service)
    event = said(actions=EventActions(state_delta={"k": 1}))
    await service.append_event(session, event)
    stored = service.sessions["app"]["user"][session.id].events[0]
    stored.actions.state_delta["temp:t"] = 2
    (content,) = (await contents(ServiceSource(service, ["app"]))).values()
    assert decoded(content)[0].actions.state_delta == {"k": 1}
    assert stored.actions.state_delta == {"k": 1, "temp:t": 2}


def test_wrong_arguments_are_rejected() -> None:
    with pytest.raises(ConfigurationError, match="not str"):
        ServiceSource("service", ["app"])  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="list of names"):
        ServiceSource(InMemorySessionService(), "app")
    assert ServiceSource(Minimal(), []).description == "a Minimal"


async def test_named_apps_are_not_everything_that_was_to_be_copied(tmp_path: Path) -> None:
    service = InMemorySessionService()
    for app_name in ("a", "b"):
        await service.create_session(app_name=app_name, user_id="user", session_id="s")
    url, only_a = f"sqlite:///{tmp_path}/target.db", Selection("a")
    async with ServiceSource(service, ["a"]) as source, database(url) as db:
        assert (await migrate(source, db)).copied == 1
        done = await compare(source, db)
        assert (done.all_equal, done.mark_stored) == (True, False)
        assert await db.imports.migration_mark() is None
        of_b = ServiceSource(service, ["b"])
        assert (await migrate(of_b, db)).succeeded
        assert (await compare(of_b, db)).all_equal
        for no_app in (ServiceSource(service, []), ServiceSource(InMemorySessionService(), ["b"])):
            assert (await migrate(no_app, db)).gone == 0
        with pytest.raises(ConfigurationError, match="without app_name"):
            await migrate(source, db, delete_gone=True)
        assert (await migrate(source, db, selection=only_a, delete_gone=True)).gone == 0
        assert (await compare(source, db, selection=only_a)).all_equal
