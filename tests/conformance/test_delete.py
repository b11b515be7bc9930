from pathlib import Path
from typing import Any

import pytest
from google.adk.sessions import BaseSessionService

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService
from adk_secure_sessions.db.protocol import Conflict, UniqueViolation
from adk_secure_sessions.storage.writes import DeleteSession
from tests.conformance.services import OTHER_KINDS, Kind
from tests.conformance.support import (
    APP,
    USER,
    create,
    delete,
    each_kind,
    event,
    find,
    listed,
    not_found,
    rejected_as_stale,
    reload,
)
from tests.faults import Point, lost, with_faults

kind = each_kind(
    "encrypted-file",
    some={
        "adk": [
            "test_append_to_a_deleted_session_is_rejected",
            "test_deleting_an_unknown_session_is_no_error",
            "test_handle_from_before_deletion_stays_stale_for_the_recreated_session",
            "test_user_and_app_state_outlive_the_session",
        ],
        "encrypted-mariadb": ["test_session_deleted_by_one_service_is_gone_for_another"],
        "encrypted-postgresql": ["test_recreated_session_is_as_good_as_new"],
    },
    soak=OTHER_KINDS,
)


async def test_deleted_session_is_gone(service: BaseSessionService) -> None:
    session = await create(service)
    await service.append_event(session, event("text"))
    await delete(service, session)
    assert await find(service, session) is None
    assert await find(service, session, num_recent_events=0) is None
    assert await listed(service, None) == []


async def test_user_and_app_state_outlive_the_session(service: BaseSessionService) -> None:
    session = await create(service, state={"app:a": 1, "user:u": 2, "k": 3})
    await service.append_event(session, event(delta={"user:v": 4}))
    await delete(service, session)
    assert (await create(service)).state == {"app:a": 1, "user:u": 2, "user:v": 4}


async def test_deleting_an_unknown_session_is_no_error(service: BaseSessionService) -> None:
    session = await create(service)
    for changed in ({"id": "unknown"}, {"user_id": "unknown"}, {"app_name": "unknown"}, {"id": ""}):
        await delete(service, session.model_copy(update=changed))
    assert await reload(service, session) == session


async def test_deleting_before_anything_was_stored_is_no_error(service: BaseSessionService) -> None:
    await service.delete_session(app_name=APP, user_id=USER, session_id="s")


async def test_other_sessions_outlive_the_deleted_one(service: BaseSessionService) -> None:
    doomed = await create(service)
    others = [
        await create(service, "other"),
        await create(service, user_id="another"),
        await create(service, app_name="another"),
    ]
    for session in (doomed, *others):
        await service.append_event(session, event("text", delta={"k": 1}))
    await delete(service, doomed)
    for session in others:
        assert await reload(service, session) == session


async def test_append_to_a_deleted_session_is_rejected(
    kind: Kind, service: BaseSessionService
) -> None:
    session = await create(service)
    await delete(service, session)
    with pytest.raises(not_found(kind)):
        await service.append_event(session, event("text", delta={"user:u": 1, "app:a": 1}))
    assert session.events == []
    assert (await create(service)).state == {}


@pytest.mark.parametrize("appended", [0, 1, 3])
async def test_handle_from_before_deletion_stays_stale_for_the_recreated_session(
    service: BaseSessionService, appended: int
) -> None:
    old = await create(service, "s", state={"k": "old"})
    for n in range(appended):
        await service.append_event(old, event(str(n)))
    await delete(service, old)
    new = await create(service, "s", state={"k": "new"})
    with rejected_as_stale():
        await service.append_event(old, event("too late", delta={"k": "too late"}))
    for n in range(appended):
        await service.append_event(new, event(str(n)))
    with rejected_as_stale():
        await service.append_event(old, event("too late", delta={"k": "too late"}))
    assert await reload(service, new) == new
    assert new.state == {"k": "new"}


async def test_recreated_session_is_as_good_as_new(service: BaseSessionService) -> None:
    for n in range(3):
        session = await create(service, "s", state={"round": n})
        await service.append_event(session, event("text", id="e", delta={f"k{n}": n}))
        again = await reload(service, session)
        assert again == session
        assert again.state == {"round": n, f"k{n}": n}
        await delete(service, session)


async def test_session_deleted_by_one_service_is_gone_for_another(
    kind: Kind, service: BaseSessionService, another_service: BaseSessionService
) -> None:
    session = await create(service)
    seen = await reload(another_service, session)
    await delete(service, session)
    assert await find(another_service, session) is None
    with pytest.raises(not_found(kind)):
        await another_service.append_event(seen, event("text"))
    recreated = await create(another_service)
    with rejected_as_stale():
        await service.append_event(session, event("text"))
    assert await reload(service, session) == recreated


@pytest.mark.parametrize("caches", [True, False])
async def test_deletion_whose_answer_was_lost_leaves_a_new_session_alone(
    tmp_path: Path, caches: bool
) -> None:
    url, backend = f"sqlite:///{tmp_path}/s.db", AesGcmBackend(bytes(32))
    service, faults = with_faults(lambda: EncryptedSessionService(url, backend))
    who: dict[str, Any] = {"app_name": APP, "user_id": USER, "session_id": "s"}

    async def create_again() -> None:
        async with EncryptedSessionService(url, backend) as other:
            await other.create_session(**who)

    async with EncryptedSessionService(url, backend) as other, service:
        await (service if caches else other).create_session(**who)
        faults.data.after(Point.WRITE, create_again)
        plan = faults.data.after(Point.WRITE, lost())
        await service.delete_session(**who)
        assert plan.happened
        assert await service.get_session(**who) is not None


@pytest.mark.parametrize("error", [Conflict(), UniqueViolation()])  # of its audit record
async def test_deletion_that_another_process_has_made_is_not_counted(
    tmp_path: Path, error: Exception
) -> None:
    url, backend = f"sqlite:///{tmp_path}/s.db", AesGcmBackend(bytes(32))
    service, faults = with_faults(lambda: EncryptedSessionService(url, backend))
    async with EncryptedSessionService(url, backend) as other, service:
        session = await create(other)
        identity = await service._runner.identify(APP, USER, session.id)
        faults.data.before(Point.APPLY, error)
        plan = faults.data.before(Point.WRITE, lambda: delete(other, session), nth=2)
        assert await service._runner.run(DeleteSession(identity)) is None
        assert plan.happened
