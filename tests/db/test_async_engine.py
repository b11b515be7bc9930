"""An application's engine: one event loop and one process at a time, and its own settings."""

import asyncio
import gc
import os
import signal
import warnings
import weakref
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import StaticPool

from adk_secure_sessions.db.async_engine import AsyncEngineExecutor
from adk_secure_sessions.db.protocol import Conflict
from adk_secure_sessions.errors import ConfigurationError, DatabaseError
from tests.db.support import apply, insert, stored, things


def executor_without_a_server(*, owns_engine: bool, is_server: bool = True) -> AsyncEngineExecutor:
    """An executor that never opens a connection; those of a server need their event loop."""
    server, file = "postgresql+asyncpg://u:p@nowhere.invalid/d", "sqlite+aiosqlite:///nowhere.db"
    engine = create_async_engine(server if is_server else file)
    return AsyncEngineExecutor(engine, owns_engine=owns_engine)


def call(one: AsyncEngineExecutor) -> bool:
    """A call that begins and ends in an event loop of its own; whether it was the first there."""

    async def enter_and_leave() -> bool:
        first = one.begin_call()
        assert not one.begin_call()
        one.end_call()
        one.end_call()
        return first

    return asyncio.run(enter_and_leave())


# --- event loops and processes -------------------------------------------------------------------


@pytest.mark.parametrize("is_server", [True, False])
def test_second_event_loop_is_rejected_while_a_call_is_under_way(
    is_server: bool,
) -> None:
    one = executor_without_a_server(owns_engine=True, is_server=is_server)

    async def call_from_another_thread() -> None:
        one.begin_call()
        with pytest.raises(ConfigurationError, match="belong to another event loop"):
            await asyncio.to_thread(call, one)
        one.end_call()

    asyncio.run(call_from_another_thread())


def test_second_event_loop_is_rejected_while_the_first_may_use_its_connections_again() -> None:
    one = executor_without_a_server(owns_engine=True)
    with asyncio.Runner() as runner:

        async def enter_and_leave() -> None:
            one.begin_call()
            one.end_call()

        runner.run(enter_and_leave())
        with pytest.raises(ConfigurationError, match="belong to another event loop"):
            call(one)
    assert call(one)  # once the first has ended


@pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX")
def test_child_process_begins_anew_with_an_engine_of_ours_and_cannot_with_another() -> None:
    for owns_engine in (True, False):
        one = executor_without_a_server(owns_engine=owns_engine)
        call(one)
        child = os.fork()
        if not child:
            try:
                code = 0 if call(one) else 2
            except ConfigurationError:
                code = 1
            os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == (0 if owns_engine else 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX")
def test_child_process_that_was_forked_during_a_call_of_a_thread_can_make_calls() -> None:
    one = executor_without_a_server(owns_engine=True)
    with one._lock.lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 and later warn of forks with several threads
        child = os.fork()
        if not child:
            signal.alarm(10)  # ends the child if it waits for the lock
            os._exit(not call(one))
    assert os.waitpid(child, 0)[1] == 0


def test_event_loop_closes_the_connections_at_its_end() -> None:
    one = executor_without_a_server(owns_engine=True)
    pool = one._engine.pool

    async def enter() -> None:
        one.begin_call()
        await asyncio.sleep(0)
        assert one._engine.pool is pool
        one.end_call()

    asyncio.run(enter())
    assert one._engine.pool is not pool  # SQLAlchemy replaces the pool that it disposes of


def test_event_loop_does_not_keep_an_unused_executor_in_memory() -> None:
    one = executor_without_a_server(owns_engine=True)
    gone = weakref.ref(one)

    async def enter(one: AsyncEngineExecutor) -> None:
        one.begin_call()
        one.end_call()

    with asyncio.Runner() as runner:
        runner.run(enter(one))
        del one
        gc.collect()
        assert gone() is None


# --- AsyncEngineExecutor -------------------------------------------------------------------------


async def test_tasks_on_one_connection_do_not_share_a_transaction(tmp_path: Path) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path}/things.db"
    engine = create_async_engine(url, poolclass=StaticPool)
    executor = AsyncEngineExecutor(engine, owns_engine=False)
    await executor.run_sync(things.metadata.create_all)

    async def fail(number: int) -> None:
        def work(connection: sa.Connection) -> None:
            connection.execute(sa.insert(things), {"id": number, "value": b""})
            raise RuntimeError("taken back")

        with pytest.raises(RuntimeError, match="taken back"):
            await executor.run_sync(work)

    await asyncio.gather(
        *(fail(number) for number in range(10)),
        *(apply(executor, insert(number)) for number in range(10, 20)),
    )
    assert list(await stored(executor)) == list(range(10, 20))
    await engine.dispose()


async def test_parameters_are_hidden_though_the_engine_shows_them(tmp_path: Path) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/things.db", hide_parameters=False)
    executor = AsyncEngineExecutor(engine, owns_engine=False)
    with pytest.raises(DatabaseError) as info:
        await apply(executor, insert(88_123, b"secret"))
    assert "88123" not in str(info.value)
    assert "secret" not in str(info.value)
    await engine.dispose()


def test_connections_of_sqlite_serve_event_loops_in_turn(tmp_path: Path) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/things.db")
    executor = AsyncEngineExecutor(engine, owns_engine=False)

    async def use(number: int) -> int:
        await executor.run_sync(things.metadata.create_all)
        await apply(executor, insert(number))
        return len(await stored(executor))

    assert [asyncio.run(use(number)) for number in range(3)] == [1, 2, 3]
    asyncio.run(engine.dispose())


def test_error_of_a_write_that_ends_with_its_event_loop_is_not_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    executor = AsyncEngineExecutor(
        create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/things.db"), owns_engine=True
    )

    async def leave_a_write() -> None:
        written = asyncio.Event()

        def write(_: sa.Connection) -> None:
            written.set()
            try:
                sa.util.await_only(asyncio.sleep(60))
            except asyncio.CancelledError:
                raise Conflict from None  # as if the driver had missed the cancellation

        left.append(asyncio.ensure_future(executor.run_sync(write)))
        await written.wait()

    left: list[asyncio.Future[None]] = []
    asyncio.run(leave_a_write())
    assert left[0].cancelled()
    assert caplog.messages == []
