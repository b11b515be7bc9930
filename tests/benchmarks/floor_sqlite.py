"""The floor on SQLite: the `sqlite3` module in threads, one thread hop for each transaction."""

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from tests.benchmarks.floor import OWNERS, Floor, NewEvent, NewSession, Row

T = TypeVar("T")


class _Job(NamedTuple):
    work: Callable[[sqlite3.Connection], Any]
    future: asyncio.Future[Any]


class _Worker:
    """A thread with its own connection; *begin* starts each transaction, or is empty."""

    def __init__(self, path: Path, begin: str) -> None:
        # Two threads that switch to WAL at the same time would fail: one finds the file locked.
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")
        self._begin = begin
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._jobs.put(_Job(work, future))
        return await future

    def stop(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _serve(self) -> None:
        connection = self._connection
        while job := self._jobs.get():
            loop = job.future.get_loop()
            try:
                if self._begin:
                    connection.execute(self._begin)
                result = job.work(connection)
                if self._begin:
                    connection.execute("COMMIT")
            except Exception as error:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                loop.call_soon_threadsafe(job.future.set_exception, error)
            else:
                loop.call_soon_threadsafe(job.future.set_result, result)
        connection.close()


class SqliteFloor(Floor):
    """One thread writes and one reads, in WAL mode with `synchronous = FULL`."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._writer = _Worker(path, "BEGIN IMMEDIATE")
        self._reader = _Worker(path, "")

    async def insert_session(self, new: NewSession) -> None:
        def work(connection: sqlite3.Connection) -> None:
            owners = (new.app_tag, new.user_tag)
            found = {row[0]: row[1] for row in connection.execute(OWNERS, owners)}
            app_row, user_row = found.get(0), found.get(1)
            if app_row is None:
                app_row = self.next_row()
                state = self.encrypt(b"{}")
                _insert(connection, "secure_apps", app_row, new.app_tag, b"app", 0, state)
                _insert(connection, "secure_witnesses", new.app_tag, 0, b"")
            if user_row is None:
                user_row = self.next_row()
                state = self.encrypt(b"{}")
                _insert(connection, "secure_users", user_row, app_row, new.user_tag, 0, state)
                _insert(connection, "secure_witnesses", new.user_tag, 0, b"")
            never = 2**63 - 1
            times = (new.now, new.now, never)
            row = (new.id, user_row, new.tag, 0, new.base_revision, *times, new.state)
            _insert(connection, "secure_sessions", *row)
            _insert(connection, "secure_witnesses", new.tag, new.id, b"")
            if new.base is not None:
                _insert(connection, "secure_bases", new.id, 0, new.base)

        await self._writer.run(work)

    async def insert_event(self, new: NewEvent) -> None:
        def work(connection: sqlite3.Connection) -> None:
            matched = connection.execute(
                "UPDATE secure_sessions SET revision = ?2 + 1, updated_at = ?3, state = ?4"
                " WHERE id = ?1 AND revision = ?2",
                new[:4],
            ).rowcount
            assert matched == 1
            row = (new.session_row, new.seq, new.time, new.event)
            _insert(connection, "secure_events", *row)

        await self._writer.run(work)

    async def delete(self, tags: tuple[bytes, bytes, bytes]) -> None:
        def work(connection: sqlite3.Connection) -> None:
            query = "SELECT id, base_revision FROM secure_sessions WHERE tag = ?"
            found = connection.execute(query, tags[2:]).fetchone()
            if found is None:
                return
            row, base_revision = found
            connection.execute("DELETE FROM secure_sessions WHERE id = ?", (row,))
            connection.execute("DELETE FROM secure_events WHERE session_row = ?", (row,))
            if base_revision != -1:
                connection.execute("DELETE FROM secure_bases WHERE session_row = ?", (row,))
            connection.execute("DELETE FROM secure_witnesses WHERE tag = ?", tags[2:])

        await self._writer.run(work)

    async def read(self, query: str, tags: tuple[bytes, ...]) -> Sequence[Row]:
        return await self._reader.run(lambda connection: connection.execute(query, tags).fetchall())

    async def close(self) -> None:
        self._writer.stop()
        self._reader.stop()


def _insert(connection: sqlite3.Connection, table: str, *values: object) -> None:
    marks = ", ".join("?" * len(values))
    connection.execute(f"INSERT INTO {table} VALUES ({marks})", values)
