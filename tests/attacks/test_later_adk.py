"""A session method that a later ADK adds is refused: it knows nothing of our storage."""

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from google.adk.sessions import BaseSessionService

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService
from tests.attacks.world import KEY, VISIT


class Subclass(EncryptedSessionService):
    """What a user may make of ours."""

    colour = "blue"

    async def count(self, app_name: str) -> int:
        return len((await self.list_sessions(app_name=app_name)).sessions)

    @property
    def shade(self) -> str:
        return "dark " + self.colour


@pytest.fixture
async def service() -> AsyncIterator[Any]:
    async with EncryptedSessionService(":memory:", AesGcmBackend(KEY)) as one:
        yield one


async def test_method_that_a_later_adk_adds_raises(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = []

    async def archive_session(self: Any, *, session_id: str) -> None:
        reached.append(session_id)

    monkeypatch.setattr(BaseSessionService, "archive_session", archive_session, raising=False)
    with pytest.raises(NotImplementedError, match=r"archive_session\(\)"):
        await service.archive_session(session_id="session")
    assert reached == []


async def test_every_kind_of_method_that_a_later_adk_adds_raises(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plain(self: Any) -> str:
        return "plaintext"

    async def generator(self: Any) -> AsyncIterator[str]:
        yield "plaintext"

    kinds: dict[str, Any] = {
        "plain": plain,
        "generator": generator,
        "class_method": classmethod(plain),
        "static_method": staticmethod(lambda: "plaintext"),
    }
    for name, method in kinds.items():
        monkeypatch.setattr(BaseSessionService, name, method, raising=False)
        with pytest.raises(NotImplementedError, match=name):
            getattr(service, name)()


async def test_own_methods_go_on_working_beside_those_that_adk_adds(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def archive_session(self: Any) -> None:
        raise AssertionError("reached")

    monkeypatch.setattr(BaseSessionService, "archive_session", archive_session, raising=False)
    session = await service.create_session(**VISIT._asdict(), state={"user:a": 1})
    assert await service.get_session(**VISIT._asdict()) == session
    assert (await service.list_sessions(app_name=VISIT.app_name)).sessions == [session]
    assert await service.get_user_state(app_name=VISIT.app_name, user_id=VISIT.user_id) == {"a": 1}
    await service.flush()
    await service.delete_session(**VISIT._asdict())


async def test_methods_of_a_subclass_of_ours_work(monkeypatch: pytest.MonkeyPatch) -> None:
    async def archive_session(self: Any) -> None:
        raise AssertionError("reached")

    monkeypatch.setattr(BaseSessionService, "archive_session", archive_session, raising=False)
    async with Subclass(":memory:", AesGcmBackend(KEY)) as one:
        await one.create_session(**VISIT._asdict())
        assert await one.count(VISIT.app_name) == 1
        assert one.shade == "dark blue"
        later: Any = one
        with pytest.raises(NotImplementedError, match="archive_session"):
            await later.archive_session()


async def test_subclass_may_supply_the_method_that_adk_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def count(self: Any, app_name: str) -> int:
        raise AssertionError("reached")

    monkeypatch.setattr(BaseSessionService, "count", count, raising=False)
    async with Subclass(":memory:", AesGcmBackend(KEY)) as one:
        assert await one.count(VISIT.app_name) == 0


def test_all_that_todays_adk_has_is_ours() -> None:
    names = {name for name in vars(BaseSessionService) if not name.startswith("_")}
    assert names - set(vars(EncryptedSessionService)) == set()


LATER = """
import abc
import asyncio
import sys
import google.adk.sessions
import google.adk.sessions.base_session_service as module


class Later(module.BaseSessionService):
    async def fork_session(self, *, session_id):
        print("reached")
        return session_id

    async def list_everything(self):
        print("reached")
        return await self.list_sessions(app_name="app")


class Demanding(module.BaseSessionService):
    @abc.abstractmethod
    async def fork_session(self): ...


def import_ours(base):
    for name in [name for name in sys.modules if name.startswith("adk_secure_sessions")]:
        del sys.modules[name]
    base.__name__ = "BaseSessionService"
    module.BaseSessionService = google.adk.sessions.BaseSessionService = base
    import adk_secure_sessions

    assert issubclass(adk_secure_sessions.EncryptedSessionService, base)
    return adk_secure_sessions


async def call(ours):
    class Own(ours.EncryptedSessionService):
        async def fork_session(self, *, session_id):
            return "own " + session_id

    backend = ours.AesGcmBackend(bytes(32))
    async with ours.EncryptedSessionService(":memory:", backend) as service:
        await service.create_session(app_name="app", user_id="user", session_id="session")
        assert len((await service.list_sessions(app_name="app")).sessions) == 1
        for call in (lambda: service.fork_session(session_id="s"), service.list_everything):
            try:
                await call()
            except NotImplementedError as error:
                print("refused", str(error).split("know ")[1].split("()")[0])
    async with Own(":memory:", backend) as service:
        print(await service.fork_session(session_id="fork"))


asyncio.run(call(import_ours(Later)))
ours = import_ours(Demanding)
try:
    ours.EncryptedSessionService(":memory:", ours.AesGcmBackend(bytes(32)))
except TypeError as error:
    print("demanded", "fork_session" in str(error))
"""


def test_later_adk_with_more_methods_is_refused_them_from_the_start() -> None:
    """In a process of its own, whose base class has them before we are imported."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LATER],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "refused fork_session",
        "refused list_everything",
        "own fork",
        "demanded True",
    ]
