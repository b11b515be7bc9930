"""`verify` counts what it decrypts; tests/attacks/test_verify.py has what it finds."""

import asyncio
import time
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from adk_secure_sessions import AesGcmBackend, ConfigurationError, EncryptedSessionService
from adk_secure_sessions.maintenance import (
    Database,
    drop_index,
    fill_index,
    retire,
    rotate_data,
    rotate_master,
    vacuum,
    verify,
)
from tests.faults import Point, with_faults
from tests.maintenance.support import APP, OLD, event, fill


async def test_verify_counts_what_it_decrypted_in_several_batches(url: str) -> None:
    await fill(url, users=[f"u{n}" for n in range(7)])
    seen: list[tuple[int, int]] = []
    async with Database(url, AesGcmBackend(OLD)) as db:
        db.limits = db.limits._replace(rows_per_statement=3, ids_per_statement=3)
        found = await verify(db, progress=lambda done, total: seen.append((done, total)))
    assert (found.apps, found.users, found.sessions, found.events) == (1, 7, 14, 42)
    assert (found.bad, found.unchecked, found.problems) == (0, 0, ())
    assert all(one <= other for (one, _), (other, _) in pairwise(seen))
    rows = 1 + 7 + 14 + 42 + (1 + 7)  # data keys
    assert seen[-1] == (rows, rows)
    assert {total for _, total in seen} == {rows}


async def test_verify_raises_no_alarm_while_services_write(url: str) -> None:
    await fill(url, sessions=3)
    backend = AesGcmBackend(OLD)
    stopped = asyncio.Event()

    async def write(user: str) -> None:
        async with EncryptedSessionService(url, backend) as service:
            for n in range(10_000):
                if stopped.is_set():
                    return
                who: dict[str, Any] = {
                    "app_name": APP,
                    "user_id": f"{user}{n % 3}",
                    "session_id": f"w{n}",
                }
                session = await service.create_session(**who, state={"user:n": n, "app:n": n})
                await service.append_event(session, event(n, big="x" * 9000, **{"user:m": n}))
                shared = await service.get_session(app_name=APP, user_id="ada", session_id="s0")
                assert shared is not None
                try:
                    await service.append_event(shared, event(n))
                except ValueError as error:
                    if "modified" not in str(error):
                        raise
                if n % 2:
                    await service.delete_session(**who)

    async with Database(url, backend) as db, asyncio.TaskGroup() as group:
        for user in ("x", "y"):
            group.create_task(write(user))
        try:
            for _ in range(4):
                found = await verify(db)
                assert found.problems == ()
                assert found.sessions >= 6
        finally:
            stopped.set()


def reads_pages_of(table: str) -> Callable[[Any, object], bool]:
    return lambda step, _: f"ORDER BY {table}.id" in str(getattr(step, "query", ""))


async def test_verify_raises_no_alarm_if_the_data_keys_are_wrapped_again_meanwhile(
    file_url: str,
) -> None:
    await fill(file_url)

    async def rotate() -> None:
        async with Database(file_url, AesGcmBackend(OLD)) as other:
            await rotate_master(other)

    db, faults = with_faults(lambda: Database(file_url, AesGcmBackend(OLD)))
    async with db:
        plan = faults.data.before(Point.READ, rotate, when=reads_pages_of("secure_data_keys"))
        assert (await verify(db)).bad == 0
        assert plan.happened


async def test_verify_raises_no_alarm_if_an_index_is_dropped_meanwhile(file_url: str) -> None:
    await fill(file_url)

    async def drop() -> None:
        async with Database(file_url, AesGcmBackend(OLD)) as other:
            assert (await drop_index(other, APP, ["n"])).removed == 4

    db, faults = with_faults(lambda: Database(file_url, AesGcmBackend(OLD)))
    async with db:
        await fill_index(db, APP, ["n"])
        plan = faults.data.before(Point.READ, drop, nth=1, when=reads_pages_of("secure_sessions"))
        assert (await verify(db)).bad == 0
        assert plan.happened


async def test_verify_and_retire_keep_to_their_limit_of_rows_per_second(file_url: str) -> None:
    await fill(file_url)
    began = time.monotonic()
    async with Database(file_url, AesGcmBackend(OLD)) as db:
        await verify(db, rows_per_second=50)
        assert time.monotonic() - began > 0.25  # of some thirty rows
        await rotate_data(db)
        began = time.monotonic()
        await retire(db, rows_per_second=50)
    assert time.monotonic() - began > 0.25


@pytest.mark.soak
async def test_verify_takes_no_more_memory_for_more_sessions(file_url: str) -> None:
    async def peak() -> int:
        async with Database(file_url, AesGcmBackend(OLD)) as db:
            await verify(db)
            tracemalloc.start()
            found = await verify(db)
            used = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert found.bad == 0
        return used

    await fill(file_url, sessions=260, events=2)  # more than one batch
    few = await peak()
    await fill(file_url, sessions=780, events=2, name="more")
    assert await peak() < few * 1.5  # of four times as many


async def test_database_without_our_tables_is_left_unchanged(url: str) -> None:
    path = url.partition("///")[2]
    if path:
        Path(path).touch()
    async with Database(url, AesGcmBackend(OLD)) as db:
        with pytest.raises(ConfigurationError, match="`adk-secure-sessions init`"):
            await verify(db)
        with pytest.raises(ConfigurationError, match="`adk-secure-sessions init`"):
            await db.survey_existing()
        with pytest.raises(ConfigurationError, match="`adk-secure-sessions init`"):
            await vacuum(db)
