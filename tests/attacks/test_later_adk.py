"""A session method that a later ADK adds is rejected: it knows nothing of our storage.

The service overrides such methods when its class is made.  So each test first gives ADK's base
class the method, and then loads a second copy of the module `service`.
"""

import asyncio
import importlib.util
import sys
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable
from typing import Any

import google.adk.sessions
import pytest
from google.adk.sessions import BaseSessionService, Session, base_session_service
from pydantic import PrivateAttr

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService, service
from tests.attacks.world import KEY, VISIT
from tests.processes import results


def with_later_adk(monkeypatch: pytest.MonkeyPatch, **methods: Any) -> Any:
    """The service's class as it is made where ADK's base class has these methods, too."""
    for name, method in methods.items():
        monkeypatch.setattr(BaseSessionService, name, method, raising=False)
    spec = importlib.util.spec_from_file_location("second_copy_of_service", service.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.EncryptedSessionService


async def reached(self: Any, **arguments: object) -> None:
    raise AssertionError("ADK's own method ran")


async def test_method_that_a_later_adk_adds_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    later = with_later_adk(monkeypatch, archive_session=reached)
    async with later(":memory:", AesGcmBackend(KEY)) as one:
        with pytest.raises(NotImplementedError, match=r"archive_session\(\)"):
            await one.archive_session(session_id="session")


async def test_every_kind_of_method_that_a_later_adk_adds_raises(
    monkeypatch: pytest.MonkeyPatch,
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
    later = with_later_adk(monkeypatch, **kinds)
    async with later(":memory:", AesGcmBackend(KEY)) as one:
        for name in kinds:
            with pytest.raises(NotImplementedError, match=name):
                getattr(one, name)()


async def test_own_methods_still_work_beside_those_that_adk_adds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(Session.__private_attributes__, "_list", PrivateAttr(default=[]))
    later = with_later_adk(monkeypatch, archive_session=reached)
    async with later(":memory:", AesGcmBackend(KEY)) as one:
        session = await one.create_session(**VISIT._asdict(), state={"user:a": 1})
        assert (other := await one.get_session(**VISIT._asdict())) == session
        assert other._list is not session._list  # no session shares it with another
        assert (await one.list_sessions(app_name=VISIT.app_name)).sessions == [session]
        state = await one.get_user_state(app_name=VISIT.app_name, user_id=VISIT.user_id)
        assert state == {"a": 1}
        await one.flush()
        await one.delete_session(**VISIT._asdict())


async def test_methods_of_a_subclass_of_ours_work(monkeypatch: pytest.MonkeyPatch) -> None:
    class Subclass(with_later_adk(monkeypatch, archive_session=reached, count=reached)):  # type: ignore[misc]
        colour = "blue"

        async def count(self, app_name: str) -> int:
            return len((await self.list_sessions(app_name=app_name)).sessions)

        @property
        def shade(self) -> str:
            return "dark " + self.colour

    async with Subclass(":memory:", AesGcmBackend(KEY)) as one:
        await one.create_session(**VISIT._asdict())
        assert await one.count(VISIT.app_name) == 1
        assert one.shade == "dark blue"
        with pytest.raises(NotImplementedError, match="archive_session"):
            await one.archive_session()


def test_every_public_method_of_the_installed_adk_is_ours() -> None:
    names = {name for name in vars(BaseSessionService) if not name.startswith("_")}
    assert names - set(vars(EncryptedSessionService)) == set()


def import_ours(base: Any) -> Any:
    """Import the package as a process does whose google-adk has this base class."""
    for name in [name for name in sys.modules if name.startswith("adk_secure_sessions")]:
        del sys.modules[name]
    base.__name__ = "BaseSessionService"
    base_session_service.BaseSessionService = base  # type: ignore[misc]
    google.adk.sessions.BaseSessionService = base  # type: ignore[misc]
    ours = importlib.import_module("adk_secure_sessions")
    assert issubclass(ours.EncryptedSessionService, base)
    return ours


def use_with_later_adk(say: Callable[[object], None]) -> None:
    class Later(BaseSessionService):
        async def fork_session(self, *, session_id: str) -> str:
            say("reached")
            return session_id

        async def list_everything(self) -> object:
            say("reached")
            return await self.list_sessions(app_name="app")

    class Demanding(BaseSessionService):
        @abstractmethod
        async def fork_session(self) -> None: ...

    async def call(ours: Any) -> None:
        class Own(ours.EncryptedSessionService):  # type: ignore[misc]
            async def fork_session(self, *, session_id: str) -> str:
                return "own " + session_id

        backend = ours.AesGcmBackend(KEY)
        async with ours.EncryptedSessionService(":memory:", backend) as service:
            await service.create_session(**VISIT._asdict())
            assert len((await service.list_sessions(app_name=VISIT.app_name)).sessions) == 1
            for method in (lambda: service.fork_session(session_id="s"), service.list_everything):
                with pytest.raises(NotImplementedError) as rejected:
                    await method()
                say(str(rejected.value).split("implement ")[1].split("()")[0])
        async with Own(":memory:", backend) as service:
            say(await service.fork_session(session_id="fork"))

    asyncio.run(call(import_ours(Later)))
    ours = import_ours(Demanding)
    with pytest.raises(TypeError, match="fork_session"):
        ours.EncryptedSessionService(":memory:", ours.AesGcmBackend(KEY))


def test_later_adk_with_more_methods_is_rejected_from_the_start() -> None:
    """In a process of its own, whose base class has them before we are imported."""
    assert results((use_with_later_adk,)) == [["fork_session", "list_everything", "own fork"]]
