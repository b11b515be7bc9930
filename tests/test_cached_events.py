"""The cache of events: whose changes it sees, what it shares, and when its content is gone.

`tests/storage/test_histories.py` tests single reads, `tests/attacks/test_cached_events.py` attacks,
and the conformance suite runs on the kind `encrypted-cached-events`.
"""

import asyncio
import gc
import os
import pickle
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from google.adk.events import Event
from google.adk.sessions import Session
from google.adk.sessions.base_session_service import GetSessionConfig
from google.genai import types

from adk_secure_sessions import AesGcmBackend, Caches, ConfigurationError, EncryptedSessionService
from adk_secure_sessions.formats import events
from adk_secure_sessions.formats.event_parser import same
from adk_secure_sessions.formats.records import EncodedEvent
from adk_secure_sessions.maintenance import Database, rotate_data
from adk_secure_sessions.storage.features.imports import Imports
from tests.attacks.needles import locals_of
from tests.faults import Point, with_faults

KEY = os.urandom(32)
APP, USER, NAME = "app", "user", "s"
WHO: dict[str, Any] = {"app_name": APP, "user_id": USER, "session_id": NAME}
SIZE = 10**7
TEXT = "Ndl9TextOfAnEvent"


def said(number: int) -> Event:
    content = types.Content(role="model", parts=[types.Part(text=f"{TEXT} {number}")])
    return Event(author="a", id=f"e{number}", timestamp=1000.0 + number, content=content)


def service_on(path: Path, **options: Any) -> EncryptedSessionService:
    options = {"cache": Caches(events=SIZE)} | options
    return EncryptedSessionService(f"sqlite:///{path}/s.db", AesGcmBackend(KEY), **options)


class Rows:
    """Counts the rows and bytes that the queries of a service return."""

    def __init__(self, make: Callable[[], EncryptedSessionService]) -> None:
        self.service, faults = with_faults(make)
        self.answers: list[Sequence[Any]] = []

        def note(_step: object, answer: Sequence[Any]) -> bool:
            self.answers.append(answer)
            return False

        faults.data.after(Point.READ, lambda: None, nth=None, when=note)

    def taken(self) -> tuple[int, int]:
        """The number of queries, and of rows that they returned, since the last call."""
        answers, self.answers = self.answers, []
        return len(answers), sum(map(len, answers))


async def get(service: EncryptedSessionService, **config: Any) -> Session:
    found = await service.get_session(**WHO, config=GetSessionConfig(**config) if config else None)
    assert found is not None
    return found


async def converse(service: EncryptedSessionService, first: int, number: int) -> None:
    session = await get(service)
    for n in range(first, first + number):
        await service.append_event(session, said(n))


async def bring(service: EncryptedSessionService, version: str, *numbers: int) -> None:
    """Import the session with events *numbers*, as `migrate` does."""
    copied = [EncodedEvent(events.encode(said(n)), 1_000_000 * n) for n in numbers]
    await Imports(service._runner, service._search_index).import_session(
        APP,
        USER,
        NAME,
        state=b"{}",
        events=copied,
        created_at=1,
        updated_at=2,
        source_etag=version,
        replace=True,
    )


def texts(session: Session) -> list[str]:
    return [event.id for event in session.events]


def ids(*numbers: int) -> list[str]:
    return [f"e{n}" for n in numbers]


async def test_events_of_others_appear_and_known_ones_are_not_read_again(tmp_path: Path) -> None:
    rows = Rows(lambda: service_on(tmp_path))
    async with rows.service as service, service_on(tmp_path, cache=Caches(events=0)) as other:
        await other.create_session(**WHO, state={"k": 1})
        await converse(other, 0, 100)
        await get(service)
        rows.taken()
        await get(service)
        queries, fixed = rows.taken()
        assert (queries, fixed < 10) == (1, True)
        await converse(other, 100, 3)
        found = await get(service)
        assert rows.taken() == (1, fixed + 3)
        assert same(found.events, (await get(other)).events)
        assert found == await get(other)
        assert found.state == {"k": 1}
        await service.append_event(found, said(103))
        rows.taken()
        assert texts(await get(service)) == ids(*range(104))
        assert rows.taken() == (1, fixed + 1)
        assert texts(await get(service, num_recent_events=5)) == ids(*range(99, 104))
        assert texts(await get(service, after_timestamp=1002.0)) == ids(*range(2, 104))
        assert texts(await get(service, after_timestamp=1002.5, num_recent_events=2)) == ids(
            102, 103
        )
        assert rows.taken() == (3, 3 * fixed)


@pytest.mark.parametrize("size", [-1, 1.5, None])
@pytest.mark.parametrize("name", ["sessions", "data_keys", "events"])
def test_sizes_that_cannot_be_used_are_rejected(name: str, size: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} of Caches must be an integer, 0 or more"):
        Caches(**{name: size})


@pytest.mark.parametrize("seconds", [-1, float("nan"), "300", None])
def test_times_that_cannot_be_used_are_rejected(seconds: Any) -> None:
    with pytest.raises(ConfigurationError, match="seconds of Caches must be a number, 0 or more"):
        Caches(seconds=seconds)


# --- whose objects they are ----------------------------------------------------------------------


async def test_events_are_the_same_objects_in_lists_of_the_callers(tmp_path: Path) -> None:
    async with service_on(tmp_path) as service:
        await service.create_session(**WHO)
        await converse(service, 0, 3)
        await get(service)
        first, second = await get(service), await get(service)
        assert [id(event) for event in first.events] == [id(event) for event in second.events]
        first.events.clear()
        second.events.append(said(9))
        assert texts(await get(service)) == ids(0, 1, 2)


# --- sessions that are replaced or changed meanwhile ---------------------------------------------


async def test_session_created_again_with_the_same_id_has_its_own_events(tmp_path: Path) -> None:
    async with service_on(tmp_path) as service, service_on(tmp_path) as other:
        await service.create_session(**WHO)
        await converse(service, 0, 3)
        for number in (3, 1, 5):
            await get(service)
            await other.delete_session(**WHO)
            await other.create_session(**WHO)
            await converse(other, 10, number)
            assert texts(await get(service)) == ids(*range(10, 10 + number))
            assert texts(await get(service)) == ids(*range(10, 10 + number))
        await service.delete_session(**WHO)
        assert await service.get_session(**WHO) is None


async def test_imported_session_that_is_replaced_has_the_new_events(tmp_path: Path) -> None:
    async with service_on(tmp_path) as service:
        await bring(service, "one", 0, 1, 2)
        for _ in range(2):
            assert texts(await get(service)) == ids(0, 1, 2)
        await bring(service, "two", 5, 6, 7, 8)
        for _ in range(2):
            assert texts(await get(service)) == ids(5, 6, 7, 8)


async def test_known_events_stay_known_after_they_were_reencrypted(tmp_path: Path) -> None:
    rows = Rows(lambda: service_on(tmp_path))
    async with rows.service as service:
        await service.create_session(**WHO)
        await converse(service, 0, 20)
        before = await get(service)
        async with Database(f"sqlite:///{tmp_path}/s.db", AesGcmBackend(KEY)) as database:
            assert (await rotate_data(database)).left == 0
        rows.taken()
        assert await get(service) == before
        assert rows.taken()[1] < 20
        await converse(service, 20, 1)
        assert texts(await get(service)) == ids(*range(21))


# --- what is in memory, and how long -------------------------------------------------------------


def cached(service: EncryptedSessionService) -> int:
    """The size of the cache; a private attribute, since no public one tells."""
    opened = service._runner._opened
    return opened.row_cache.events.size if opened else 0


async def filled(service: EncryptedSessionService) -> None:
    await service.create_session(**WHO)
    await converse(service, 0, 5)
    await get(service)
    assert cached(service) > 0


async def test_closed_service_keeps_no_events(tmp_path: Path) -> None:
    service = service_on(tmp_path)
    await filled(service)
    await get(service)
    session = await get(service)
    watched = [weakref.ref(event) for event in session.events]
    del session
    gc.collect()
    assert all(ref() for ref in watched)
    await service.close()
    gc.collect()
    assert not any(ref() for ref in watched)


async def test_deleted_session_is_not_kept(tmp_path: Path) -> None:
    async with service_on(tmp_path) as service, service_on(tmp_path) as other:
        await filled(service)
        await service.delete_session(**WHO)
        assert cached(service) == 0
        await filled(service)
        await other.delete_session(**WHO)
        assert await service.get_session(**WHO) is None
        assert cached(service) == 0


async def test_expired_session_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with service_on(tmp_path, expires_after=timedelta(days=40_000)) as service:
        await filled(service)
        now = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: now() + 60_000 * 86400 * 10**9)
        assert await service.get_session(**WHO) is None
        assert cached(service) == 0


async def test_cache_never_exceeds_its_size(tmp_path: Path) -> None:
    size = 60_000
    async with service_on(tmp_path, cache=Caches(events=size)) as service:
        largest = 0
        for name in range(8):
            session = await service.create_session(app_name=APP, user_id=USER, session_id=f"{name}")
            for number in range(4):
                await service.append_event(session, said(number))
            for known in range(name + 1):
                found = await service.get_session(app_name=APP, user_id=USER, session_id=f"{known}")
                assert found is not None
                assert texts(found) == ids(0, 1, 2, 3)
                largest = max(largest, cached(service))
        assert size / 2 < largest <= size


async def test_events_are_in_no_repr_and_in_no_pickle(tmp_path: Path) -> None:
    async with service_on(tmp_path) as service:
        await filled(service)
        runner = service._runner
        events = runner._opened.row_cache.events if runner._opened else None
        for one in (service, runner, runner._opened, events):
            assert TEXT not in repr(one)
        with pytest.raises(TypeError):
            pickle.dumps(service)


async def test_cancelled_read_shows_no_cached_event_to_error_reporters(tmp_path: Path) -> None:
    """Error reporters record the local variables of all frames in a traceback."""
    rows = Rows(lambda: service_on(tmp_path))
    async with rows.service as service:
        await bring(service, "one", 0, 1)
        await get(service)
        await converse(service, 2, 200)
        rows.taken()
        reading = asyncio.create_task(service.get_session(**WHO))
        while not rows.answers:
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # the first of several parts of the new events was decrypted
        reading.cancel()
        with pytest.raises(asyncio.CancelledError) as cancelled:
            await reading
        assert TEXT not in locals_of(cancelled.value)


async def test_negative_number_of_events_is_an_error(tmp_path: Path) -> None:
    """google-adk 1.28 has no check of its own."""
    negative = GetSessionConfig.model_construct(num_recent_events=-1)
    async with service_on(tmp_path) as service:
        await service.create_session(**WHO)
        with pytest.raises(ValueError, match="num_recent_events must be 0 or more"):
            await service.get_session(**WHO, config=negative)
