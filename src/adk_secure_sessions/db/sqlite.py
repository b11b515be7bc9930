"""SQLite by URL: threads of our own, so that a transaction costs one hop.

One thread writes; others read beside it, thanks to WAL.  A database in memory has a single
connection, and one thread does both.
"""

import asyncio
import os
import sqlite3
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa

from adk_secure_sessions.db.protocol import Parameters, Row, T, Transaction
from adk_secure_sessions.db.sqlite_threads import Job, WorkerThread, stop
from adk_secure_sessions.errors import ConfigurationError

_READERS = 2
_BUSY_TIMEOUT = 30.0  # seconds that another process may hold the write lock


class SqliteExecutor:
    """Runs transactions on threads that the first of them starts."""

    def __init__(self, engine: sa.Engine, *, memory: bool) -> None:
        self._engine = engine
        self._memory = memory
        self._forget_threads()

    def _forget_threads(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._threads: list[WorkerThread] = []
        self._finalizer: weakref.finalize[Any, SqliteExecutor] | None = None

    async def read(self, query: sa.Executable, parameters: Parameters) -> Sequence[Row]:
        return await self._submit(
            lambda connection: connection.fetch(query, parameters), reads=True
        )

    async def write(
        self, transaction: Transaction[T], late: Callable[[T], None] | None = None
    ) -> T:
        return await self._submit(lambda connection: connection.transact(transaction), late)

    async def define(self, work: Callable[[sa.Connection], T], *, commit: bool) -> T:
        return await self._submit(work, on_engine=True, commit=commit)

    async def close(self) -> None:
        with self._lock:
            threads, self._threads = self._threads, []
            if self._finalizer is not None:
                self._finalizer.detach()
        if threads:
            await asyncio.to_thread(stop, threads)
        self._engine.dispose()

    async def _submit(
        self,
        work: Callable[[Any], T],
        late: Callable[[T], None] | None = None,
        *,
        reads: bool = False,
        on_engine: bool = False,
        commit: bool = True,
    ) -> T:
        if os.getpid() != self._pid:
            self._after_fork()
        job = Job(work, on_engine=on_engine, commit=commit)
        with self._lock:  # so that nothing is queued behind the end of a thread
            threads = self._threads or self._start()
            candidates = threads[1:] if reads and len(threads) > 1 else threads[:1]
            # The first that is idle: what it read last is still in its caches.
            min(candidates, key=lambda thread: thread.inbox.waiting).inbox.put(job)
        result: T = await job.outcome(late)
        return result

    def _start(self) -> list[WorkerThread]:
        readers = 0 if self._memory else _READERS
        self._threads = [WorkerThread(self._engine, writes=True)]
        self._threads += [WorkerThread(self._engine, writes=False) for _ in range(readers)]
        self._finalizer = weakref.finalize(self, stop, self._threads)
        return self._threads

    def _after_fork(self) -> None:
        """Start anew in a child process: neither threads nor connections came along."""
        if self._memory:
            raise ConfigurationError(
                "a database in memory does not survive a fork: "
                "make the service in the child, or use a file"
            )
        if self._finalizer is not None:
            self._finalizer.detach()
        self._engine.dispose(close=False)  # the parent's connections are not ours to close
        self._forget_threads()


def is_in_memory(url: sa.URL) -> bool:
    """Whether that SQLite database is no file."""
    database = url.database or ""
    memory = database in ("", ":memory:") or database.startswith("file::memory:")
    return memory or url.query.get("mode") == "memory"


def sqlite_executor(url: sa.URL, engine_kwargs: dict[str, Any]) -> SqliteExecutor:
    """The executor for a SQLite URL; *engine_kwargs* are those of `sqlalchemy.create_engine`."""
    memory = is_in_memory(url)
    options = dict(engine_kwargs)
    if memory:
        options.setdefault("poolclass", sa.pool.StaticPool)
    options["connect_args"] = {
        "timeout": _BUSY_TIMEOUT,
        "check_same_thread": False,
        **options.get("connect_args", {}),
    }
    options["hide_parameters"] = True
    engine = sa.create_engine(url.set(drivername="sqlite+pysqlite"), **options)
    sa.event.listen(engine, "connect", _overwrite_deleted)
    return SqliteExecutor(engine, memory=memory)


def _overwrite_deleted(driver: sqlite3.Connection, _record: object) -> None:
    """Or pages that are split keep copies of rows, which deleting these does not reach."""
    driver.execute("PRAGMA secure_delete = ON").close()
