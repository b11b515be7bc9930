import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from google.adk.errors.session_not_found_error import SessionNotFoundError
from google.adk.events.event import Event
from google.adk.sessions import BaseSessionService, Session

from tests.conformance.services import CLUSTER_KINDS, POOLED_KINDS
from tests.conformance.support import (
    STALE,
    create,
    delete,
    each_kind,
    event,
    find,
    ids,
    listed,
    only_ours,
    reference_fails,
    rejected_as_stale,
    reload,
    together,
)

kind = each_kind(
    "encrypted-file",
    # on_servers/test_contention.py tests both servers by default, too.
    some={
        "encrypted-mariadb": [
            "test_append_racing_a_deletion_succeeds_or_finds_no_session",
            "test_cancelled_append_leaves_its_session_object_as_storage_has_it_or_stale",
            "test_cancelled_appends_leave_the_session_complete_and_usable",
            "test_exactly_one_of_many_copies_in_two_services_wins",
            "test_first_use_by_several_services_at_once_makes_the_tables_once",
            "test_parallel_appends_through_one_session_object_all_arrive_in_order",
            "test_reader_never_sees_an_event_without_its_state_or_the_reverse",
            "test_sessions_created_with_different_shared_keys_at_once_lose_none",
            "test_two_services_changing_different_shared_keys_at_once_lose_none",
        ],
        "adk": [
            "test_exactly_one_of_many_copies_wins",
            "test_parallel_appends_through_one_session_object_all_arrive_in_order",
            "test_other_tasks_outlive_a_cancelled_one",
        ],
        "encrypted-postgresql": [
            "test_appends_of_two_services_all_arrive_once_with_retries",
            "test_cancelled_appends_leave_the_session_complete_and_usable",
            "test_first_use_by_several_services_at_once_makes_the_tables_once",
            "test_reader_never_sees_an_event_without_its_state_or_the_reverse",
            "test_two_services_changing_different_shared_keys_at_once_lose_none",
        ],
        "encrypted-engine": [
            "test_cancelled_appends_leave_the_session_complete_and_usable",
            "test_exactly_one_of_many_copies_in_two_services_wins",
        ],
        "encrypted-cached-events": [
            "test_append_racing_a_deletion_succeeds_or_finds_no_session",
            "test_appends_of_two_services_all_arrive_once_with_retries",
            "test_reader_never_sees_an_event_without_its_state_or_the_reverse",
        ],
        "encrypted-key-database": [
            "test_first_use_by_several_services_at_once_makes_the_tables_once",
            "test_sessions_created_with_different_shared_keys_at_once_lose_none",
        ],
    },
    # Executors that the others have, too, with another driver, an engine of the caller's, or a
    # pooler: on_servers/test_pooler.py tests by default what differs there.
    soak=[
        "encrypted-memory",
        "encrypted-postgresql-engine",
        "encrypted-psycopg",
        "encrypted-mariadb-engine",
        *POOLED_KINDS,
        *CLUSTER_KINDS,
    ],
)

lost_updates = reference_fails("ADK's concurrent writers of one scope overwrite each other")
locked_by_cancelling = only_ours("a cancelled append can leave ADK's database locked for seconds")
MANY = 20


async def append_until_accepted(
    service: BaseSessionService, session: Session, appended: Event
) -> int:
    """Append as a caller does who reloads a stale session; return the number of attempts."""
    copy = await reload(service, session)
    for tries in range(1, 1000):
        try:
            await service.append_event(copy, appended)
        except SessionNotFoundError:
            raise
        except STALE:
            copy = await reload(service, session, num_recent_events=1)
        else:
            return tries
    raise AssertionError("never accepted")


def is_stale(error: BaseException) -> bool:
    return isinstance(error, STALE) and not isinstance(error, SessionNotFoundError)


async def let_run(n: int) -> None:
    """Let other tasks run for *n* turns of the event loop, or for a little time."""
    if n % 2:
        await asyncio.sleep(n / 10_000)
    for _ in range(n):
        await asyncio.sleep(0)


async def test_parallel_appends_through_one_session_object_all_arrive_in_order(
    service: BaseSessionService,
) -> None:
    session = await create(service)
    appended = [event(str(n), delta={f"k{n}": n, "last": n}) for n in range(MANY)]
    results = await together(*(service.append_event(session, e) for e in appended))
    assert results == appended
    assert Counter(ids(session.events)) == Counter(ids(appended))
    again = await reload(service, session)
    assert ids(again.events) == ids(session.events)
    assert again == session
    assert {f"k{n}": n for n in range(MANY)}.items() <= again.state.items()


async def test_parallel_appends_through_own_copies_all_arrive_once_with_retries(
    service: BaseSessionService,
) -> None:
    session = await create(service)
    appended = [event(str(n), delta={f"k{n}": n, f"user:k{n}": n}) for n in range(MANY)]
    await together(*(append_until_accepted(service, session, e) for e in appended))
    again = await reload(service, session)
    assert Counter(ids(again.events)) == Counter(ids(appended))
    assert again.state == {f"{scope}k{n}": n for n in range(MANY) for scope in ("", "user:")}


async def test_exactly_one_of_many_copies_wins(service: BaseSessionService) -> None:
    session = await create(service)
    copies = [await reload(service, session) for _ in range(10)]
    results = await asyncio.gather(
        *(service.append_event(c, event(str(n), delta={"n": n})) for n, c in enumerate(copies)),
        return_exceptions=True,
    )
    rejected = [result for result in results if isinstance(result, BaseException)]
    assert len(rejected) == 9
    assert all(is_stale(error) for error in rejected), rejected
    (winner,) = (copy for copy in copies if copy.events)
    assert await reload(service, session) == winner


@reference_fails("copies in different services can all win, or fail with an SQL error")
async def test_exactly_one_of_many_copies_in_two_services_wins(
    service: BaseSessionService, another_service: BaseSessionService
) -> None:
    session = await create(service)
    for round_ in range(5):
        services = [service, another_service] * 4
        copies = [await reload(one, session) for one in services]
        results = await asyncio.gather(
            *(
                one.append_event(copy, event(f"{round_}", delta={"n": n}))
                for n, (one, copy) in enumerate(zip(services, copies, strict=True))
            ),
            return_exceptions=True,
        )
        rejected = [result for result in results if isinstance(result, BaseException)]
        assert len(rejected) == 7
        assert all(is_stale(error) for error in rejected), rejected
    assert len((await reload(service, session)).events) == 5


@only_ours("appends of different services can fail with an SQL error, after much retrying")
async def test_appends_of_two_services_all_arrive_once_with_retries(
    service: BaseSessionService, another_service: BaseSessionService
) -> None:
    session = await create(service)
    appended = [event(str(n), delta={f"k{n}": n}) for n in range(MANY)]
    await together(
        *(
            append_until_accepted((service, another_service)[n % 2], session, e)
            for n, e in enumerate(appended)
        )
    )
    again = await reload(another_service, session)
    assert Counter(ids(again.events)) == Counter(ids(appended))
    assert again.state == {f"k{n}": n for n in range(MANY)}


@lost_updates
@pytest.mark.parametrize("scope", ["user:", "app:"])
async def test_sessions_created_with_different_shared_keys_at_once_lose_none(
    service: BaseSessionService, scope: str
) -> None:
    await create(service, "the first makes the tables")
    sessions = await together(
        *(create(service, f"s{n}", state={f"{scope}k{n}": n}) for n in range(16))
    )
    everything = {f"{scope}k{n}": n for n in range(16)}
    assert (await reload(service, sessions[0])).state == everything
    for n, session in enumerate(sessions):
        assert session.state[f"{scope}k{n}"] == n


@lost_updates
@pytest.mark.parametrize("scope", ["user:", "app:"])
async def test_two_services_changing_different_shared_keys_at_once_lose_none(
    service: BaseSessionService, another_service: BaseSessionService, scope: str
) -> None:
    services = [service, another_service]
    sessions = [await create(service, f"s{n}") for n in range(8)]
    await together(
        *(
            services[n % 2].append_event(session, event(delta={f"{scope}k{n}": n}))
            for n, session in enumerate(sessions)
        )
    )
    for one in services:
        assert (await reload(one, sessions[0])).state == {f"{scope}k{n}": n for n in range(8)}


@reference_fails("ADK's append fails with an SQL error or a lock, or revives the session")
async def test_append_racing_a_deletion_succeeds_or_finds_no_session(
    service: BaseSessionService,
) -> None:
    outcomes = Counter[type]()
    for n in range(15):
        session = await create(service, f"s{n}")
        results = await asyncio.gather(
            service.append_event(session, event("one", delta={"user:k": n, "k": n})),
            delete(service, session),
            service.append_event(session, event("two")),
            return_exceptions=True,
        )
        assert results[1] is None
        outcomes.update(type(results[i]) for i in (0, 2))
        assert await find(service, session) is None
    assert outcomes.keys() <= {Event, SessionNotFoundError}, outcomes
    assert await listed(service, None) == []


@reference_fails("ADK reads a session, its events and its state in separate statements")
async def test_reader_never_sees_an_event_without_its_state_or_the_reverse(
    service: BaseSessionService,
) -> None:
    session = await create(service, state={"n": 0, "user:n": 0, "app:n": 0})
    writing = True

    async def write() -> None:
        nonlocal writing
        try:
            for n in range(1, 25):
                await service.append_event(session, event(delta={"n": n, "user:n": n, "app:n": n}))
        finally:
            writing = False

    async def read() -> None:
        while writing:
            seen = await reload(service, session)
            count = len(seen.events)
            assert seen.state == {"n": count, "user:n": count, "app:n": count}
            (one,) = await listed(service)
            assert one.state["n"] == one.state["user:n"] == one.state["app:n"]

    await together(write(), read(), read())


async def test_many_sessions_of_many_users_at_once_stay_apart(service: BaseSessionService) -> None:
    await create(service, "the first makes the tables", user_id="first")

    async def converse(n: int) -> Session:
        session = await create(service, user_id=f"u{n}")
        for m in range(5):
            await service.append_event(session, event(f"{n} {m}", delta={"k": [n, m]}))
        return session

    for session in await together(*(converse(n) for n in range(10))):
        again = await reload(service, session)
        assert again == session
        assert len(again.events) == 5


@locked_by_cancelling
async def test_cancelled_appends_leave_the_session_complete_and_usable(
    service: BaseSessionService,
) -> None:
    session = await create(service, state={"count": 0})
    for n in range(25):
        copy = await reload(service, session)
        stored = len(copy.events)
        task = asyncio.ensure_future(
            service.append_event(copy, event(str(n), delta={"count": stored + 1}))
        )
        await let_run(n)
        task.cancel()
        await asyncio.wait([task])
        again = await reload(service, session)
        assert len(again.events) in (stored, stored + 1)
        assert again.state == {"count": len(again.events)}
    final = await reload(service, session)
    async with asyncio.timeout(10):
        await service.append_event(final, event("still usable"))
        await create(service, "other")
    assert await reload(service, session) == final


@locked_by_cancelling
async def test_cancelled_append_leaves_its_session_object_as_storage_has_it_or_stale(
    service: BaseSessionService,
) -> None:
    for n in range(12):
        session = await create(service, f"s{n}")
        before = session.model_copy(deep=True)
        task = asyncio.ensure_future(service.append_event(session, event("x", delta={"k": 1})))
        await let_run(n)
        task.cancel()
        await asyncio.wait([task])
        stored = await reload(service, session)
        if session == stored:
            await service.append_event(session, event("goes on"))
        else:
            assert session == before
            with rejected_as_stale():
                await service.append_event(session, event("late"))


async def test_other_tasks_outlive_a_cancelled_one(service: BaseSessionService) -> None:
    sessions = [await create(service, f"s{n}") for n in range(10)]
    tasks = [
        asyncio.ensure_future(service.append_event(session, event("x", delta={"user:k": 1})))
        for session in sessions
    ]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    async with asyncio.timeout(10):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, Event) for result in results[1::2]), results
    for session in sessions[1::2]:
        assert await reload(service, session) == session


@pytest.mark.no_tables
@only_ours("the reference is given its tables ready-made")
async def test_first_use_by_several_services_at_once_makes_the_tables_once(
    open_service: Callable[[], Awaitable[BaseSessionService]],
) -> None:
    services = [await open_service() for _ in range(5)]
    sessions = await together(
        *(
            create(one, f"s{n}", user_id=f"u{n % 2}", state={f"user:k{n}": n, "k": n})
            for n, one in enumerate(services)
        )
    )
    for one, session in zip(services, sessions, strict=True):
        await one.append_event(session, event("text"))
        assert len((await reload(one, session)).events) == 1


@pytest.mark.no_tables
@only_ours("the reference is given its tables ready-made")
async def test_first_use_by_many_tasks_at_once_works(service: BaseSessionService) -> None:
    calls: list[Awaitable[Any]] = [create(service, f"s{n}") for n in range(5)]
    calls += [listed(service, None) for _ in range(3)]
    await together(*calls)
    assert len(await listed(service)) == 5
