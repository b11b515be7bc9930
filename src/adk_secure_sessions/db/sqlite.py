"""The executor for SQLite databases given by URL, on our own threads.

Each operation takes one hop, which is a switch from the event loop to a thread and back.  In ADK,
an append takes 20 hops with `DatabaseSessionService` and 8 with `SqliteSessionService`.  Hops and
waiting for the disk take nearly all of an append's time.  The parts of this module, in reading
order:

1. `SqliteExecutor` creates a `Job` for each call and gives it to a thread.  One thread writes.  Two
   other threads read at the same time, which write-ahead logging allows.  A database in memory has
   a single connection, so one thread reads and writes.
2. `WorkerThread` takes jobs.  The writer takes all waiting jobs, up to 64, runs them in one `BEGIN
   IMMEDIATE`, and commits once.  If 50 tasks append at the same time, this executor makes 3000 to
   5600 appends a second.  With one commit for each append, it made 2000.  ADK's service makes 100
   to 200.
3. `WorkerThread.transact` runs the steps of one transaction on the connection of its thread.
4. `_deliver` sends the outcomes of a batch to the callers' event loops, in one call for each loop.
"""

import asyncio
import logging
import os
import sqlite3
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path, PurePath
from queue import SimpleQueue
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import sqlalchemy as sa

from adk_secure_sessions import telemetry
from adk_secure_sessions.concurrency import ThreadLock
from adk_secure_sessions.db.dialects import compile_for_sqlite, decode_any_text
from adk_secure_sessions.db.failures import statement_timeout, timed_out_error, translate
from adk_secure_sessions.db.protocol import (
    Change,
    Conflict,
    Parameters,
    Row,
    T,
    Transaction,
    run_changes,
    run_steps,
)
from adk_secure_sessions.errors import ConfigurationError, DatabaseError, copy_of

logger: logging.Logger = logging.getLogger(__name__)

_Answer = Coroutine[Any, Any, T]  # that of `_submit`: one more for each call would take 0.2 µs

_READERS = 2
# Seconds to wait while another process holds the write lock; then the write fails.
_BUSY_TIMEOUT = 30.0
_BATCH = 64  # maximum number of jobs in one commit
# `_stop` waits this number of seconds for the threads to end.  If reads are still running then, it
# interrupts them, and waits for the same time again.
_EXIT_TIMEOUT = 5.0
_FORK_TIMEOUT = 1.0  # seconds that a fork waits for running calls: see `_before_fork`
# SQLite calls `WorkerThread._should_interrupt` each time it has executed this number of
# instructions, which takes one or two milliseconds.  Reading a session with 1000 events takes fewer
# instructions, so the calls do not slow down usual reads.
_INSTRUCTIONS = 100_000
# In bytes, for a new file.  If a row is longer than a quarter of a page, SQLite stores the rest of
# the row in a separate page.  With SQLite's default of 4096 bytes, an event of 1000 bytes would be
# split, and reading 1000 such events would take 15% longer.
_PAGE_SIZE = 8192
_CACHE_KIB = 8192  # per connection; the default of 2000 is too small for a session of 1000 events


# --- The executor -------------------------------------------------------------------------------


def is_in_memory(url: sa.URL) -> bool:
    database = url.database or ""
    memory = database in ("", ":memory:") or database.startswith("file::memory:")
    return memory or url.query.get("mode") == "memory"


def file_of(url: sa.URL) -> Path | None:
    """Return the path of a SQLite file; None for a database in memory, a URI or a server."""
    name = url.database or ""
    if url.get_backend_name() != "sqlite" or name.startswith("file:") or is_in_memory(url):
        return None
    return Path(name)


def _prepare_file(
    file: "WatchedFile",
    _dialect: object,
    _record: object,
    args: list[Any],
    options: dict[str, Any],
) -> None:
    """Create a missing file with mode 0600, or prepare to open a file as read-only.

    SQLite gives the write-ahead log and the log's index the mode of the file.
    """
    file.check()  # now, so that a file that was deleted is not created again
    name = str(args[0])
    parts = urlsplit(name) if options.get("uri") and name.startswith("file:") else None
    path = Path(unquote(parts.path) if parts else name)
    with suppress(OSError):
        status = path.stat()
        if (status.st_dev, status.st_ino) in _inherited:
            raise ConfigurationError(
                "a call was using this SQLite file when the process was forked, so SQLite cannot "
                "lock it here: close the service before the fork, or start the process with spawn"
            )
    if parts:
        if not parse_qs(parts.query).keys() & {"mode", "immutable", "vfs"}:
            _create_file(str(path))
        return
    if not path.exists():
        _create_file(name)
    elif not os.access(path, os.W_OK) or not os.access(path.resolve().parent, os.W_OK):
        name, value = read_only_mode(path)
        args[0] = f"{file_uri(path.absolute())}?{name}={value}"
        options["uri"] = True


def file_uri(path: PurePath) -> str:
    """Return the URI by which SQLite opens the file at the absolute *path*.

    `Path.as_uri` is not used: for a Windows network path, it returns a URI with the name of the
    server after `file://`, which SQLite rejects.
    """
    name = path.as_posix()  # begins with a slash, or on Windows with a drive letter
    return f"file://{'' if name.startswith('/') else '/'}{quote(name, safe='/:')}"


def read_only_mode(path: Path) -> tuple[str, str]:
    """Return the parameter of a SQLite URI with which the file *path* is opened as read-only.

    If no process has the file open, it has no write-ahead log.  To read the file, SQLite would
    create the log, which fails in a directory that is not writable.  `immutable=1` reads the file
    without a log and without locks, but also ignores a rollback journal, after which the file may
    contain a part of a transaction.  So use `mode=ro` if there is a journal or a log: SQLite then
    reads the file correctly, or raises an error.
    """
    path = path.resolve()  # the journal is beside the file, and not beside a link
    beside = [path.with_name(f"{path.name}-{ending}") for ending in ("journal", "wal")]
    if (
        os.access(path.parent, os.W_OK)
        or any(one.exists() and one.stat().st_size for one in beside)
        or not _has_write_ahead_log(path)
    ):
        return "mode", "ro"
    return "immutable", "1"


def _has_write_ahead_log(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(20)[18:] == b"\2\2"
    except OSError:
        return False  # SQLite will raise an error that says more


def _create_file(name: str) -> None:
    if name in ("", ":memory:"):
        return
    try:
        os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    except OSError:
        pass  # the file exists, or SQLite will raise an error that says more


def _set_pragmas(driver: sqlite3.Connection, _record: object) -> None:
    # Without secure_delete, deleted rows and old copies of moved rows stay in the file.
    driver.execute("PRAGMA secure_delete = ON").close()
    driver.execute(f"PRAGMA page_size = {_PAGE_SIZE}").close()
    driver.execute(f"PRAGMA cache_size = -{_CACHE_KIB}").close()
    driver.text_factory = decode_any_text


class SqliteExecutor:
    """Runs transactions on its own threads, which the first call starts; see `protocol.Executor`.

    Any number of event loops can use an executor at the same time.  After a `fork`, both processes
    start new threads (see `_before_fork`), but the child cannot use a database in memory.
    """

    def __init__(
        self, url: sa.URL, engine_kwargs: dict[str, Any], read_timeout: float | None = None
    ) -> None:
        self._memory = is_in_memory(url)
        self._read_timeout = read_timeout
        options = {**engine_kwargs, "hide_parameters": True}
        if self._memory:
            options.setdefault("poolclass", sa.pool.StaticPool)
        connect_args = {"timeout": _BUSY_TIMEOUT, "check_same_thread": False}
        options["connect_args"] = connect_args | engine_kwargs.get("connect_args", {})
        self._engine = sa.create_engine(url.set(drivername="sqlite+pysqlite"), **options)
        self._file = WatchedFile()
        sa.event.listen(self._engine, "do_connect", partial(_prepare_file, self._file))
        sa.event.listen(self._engine, "connect", _set_pragmas)
        sa.event.listen(self._engine, "connect", self._file.remember_path)
        self._forget_threads()
        if not self._memory:
            _file_executors[self] = None

    def _forget_threads(self) -> None:
        self._pid = os.getpid()
        self._threads: list[WorkerThread] = []
        self._finalizer: weakref.finalize[Any, SqliteExecutor] | None = None

    def read(self, query: sa.Executable, parameters: Parameters) -> _Answer[Sequence[Row]]:
        return self._submit(lambda thread, _: thread.fetch(query, parameters), reads=True)

    def write(
        self,
        transaction: Transaction[T],
        on_commit: Callable[[], None] | None = None,
        *,
        in_one_transaction: bool = False,  # no effect: SQLite has one writer at a time
    ) -> _Answer[T]:
        return self._submit(lambda thread, _: thread.transact(transaction), on_commit)

    def run_sync(self, work: Callable[[sa.Connection], T], *, commit: bool = True) -> _Answer[T]:
        def run(thread: WorkerThread, connection: sa.Connection) -> T:
            return work(connection) if commit else thread.with_time_limit(work, connection)

        return self._submit(run, reads=not commit, needs_sqlalchemy=True)

    async def close(self) -> None:
        await asyncio.sleep(0)  # after the writes that `_submit` has delayed
        with _lock.lock:
            if os.getpid() != self._pid:
                self._forget_parent()
            threads = self._detach_threads()
        await asyncio.to_thread(self._close, threads)  # to its end, also if the caller is cancelled

    def _close(self, threads: "list[WorkerThread]") -> None:
        _stop(threads)
        self._engine.dispose()
        with _lock.lock:
            # A copy, because threads that end remove themselves, without the lock.
            if all(thread.file is not self._file for thread in list(_file_threads)):
                self._file.opened = None  # any file may be the first one of the next connection

    async def _submit(
        self,
        work: "Callable[[WorkerThread, Any], T]",
        on_commit: Callable[[], None] | None = None,
        *,
        reads: bool = False,
        needs_sqlalchemy: bool = False,
    ) -> T:
        loop, threads = asyncio.get_running_loop(), self._threads
        if not (waker := (known := _wakers.get(loop)) and known()):
            waker = LoopWaker(loop)
            _wakers[loop] = weakref.ref(waker)
        job = Job(work, needs_sqlalchemy, reads, loop, waker, self._queue)
        if not reads and threads and threads[0].last_batch_was_group:
            # In the next iteration of the event loop, after the other tasks of this one have added
            # their jobs, too.  The writer would begin with the first of them, because serializing
            # an event releases the GIL: for 50 tasks, it would make twice as many commits.
            await asyncio.sleep(0)
        try:
            result: T = await job
        finally:  # also if the caller was cancelled while the thread ran the job
            if on_commit is not None and job.has_ended and job.error is None:
                on_commit()
        return result

    def _queue(self, job: "Job") -> None:
        with _lock.lock:  # otherwise, `close` could end the thread before the job is queued
            if os.getpid() != self._pid:
                if self._memory:
                    raise ConfigurationError(
                        "a database in memory does not survive a fork: "
                        "create the service in the child process, or use a file"
                    )
                self._forget_parent()
            threads = self._threads or self._start()
            readers = job.reads and not job.needs_sqlalchemy and len(threads) > 1
            # If several threads are idle, `min` returns the first one.  So the first thread is used
            # most, and its cache of pages is the most useful cache.
            thread = min(threads[1:], key=attrgetter("waiting")) if readers else threads[0]
            thread.queue.put(job)

    def _start(self) -> "list[WorkerThread]":
        threads: list[WorkerThread] = []
        create = partial(WorkerThread, self._engine, self._file, self._read_timeout)
        try:
            for _ in range(1 if self._memory else 1 + _READERS):
                threads.append(create(writes=not threads))
        except BaseException:  # the process may have no more threads
            for thread in threads:
                thread.queue.put(None)
            raise
        self._threads = threads
        self._finalizer = weakref.finalize(self, _stop, self._threads)
        if not self._memory:
            _file_threads.update(self._threads)
        return self._threads

    def _detach_threads(self) -> "list[WorkerThread]":
        threads, self._threads = self._threads, []
        if self._finalizer is not None:
            self._finalizer.detach()
        return threads

    def _forget_parent(self) -> None:
        """Start again in a forked process, which does not have the parent's threads."""
        self._detach_threads()
        self._engine.dispose(close=False)  # closing the connections would break them for the parent
        self._forget_threads()


_file_executors: "weakref.WeakKeyDictionary[SqliteExecutor, None]" = weakref.WeakKeyDictionary()
_lock = ThreadLock()  # held to start threads, to give them jobs, to take them away, and to fork
_forking: list[int] = []  # the id of the thread that holds `_lock` to fork
_file_threads: "set[WorkerThread]" = set()  # those that may have a connection to a file
# The device and the inode of each file to which the parent process had a connection in the fork.
_inherited: set[tuple[int, int]] = set()


def _before_fork() -> None:
    """Close the connections to files, and let nobody open new ones before the fork.

    SQLite in the child would believe that it has the parent's locks.  The parent could then delete
    the write-ahead log into which the child writes, or the child could wait for a lock forever.

    Calls that have begun may end first; this blocks the forking thread, and other calls, for at
    most `_FORK_TIMEOUT`.  If a call takes longer, the child cannot use its file.
    """
    deadline = time.monotonic() + _FORK_TIMEOUT
    if not _lock.lock.acquire(timeout=_FORK_TIMEOUT):
        return
    _forking.append(threading.get_ident())
    alive = [executor for ref in _file_executors.keyrefs() if (executor := ref()) is not None]
    executors = [executor for executor in alive if executor._pid == os.getpid()]
    for executor in executors:
        for thread in executor._detach_threads():
            thread.queue.put(None)
    for thread in list(_file_threads):
        thread.thread.join(max(deadline - time.monotonic(), 0))
    for executor in executors:
        executor._engine.dispose()


def _after_fork_in_parent() -> None:
    if _forking == [threading.get_ident()]:
        _forking.clear()
        _lock.lock.release()


def _after_fork_in_child() -> None:
    _forking.clear()
    _inherited.update(thread.file.opened[1:] for thread in _file_threads if thread.file.opened)
    _file_threads.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork_in_parent,
        after_in_child=_after_fork_in_child,
    )


class WatchedFile:
    """The SQLite file of an executor, to notice that the file was deleted or replaced.

    With a write-ahead log, SQLite reports no error, and acknowledged writes would be lost.  `check`
    calls `os.stat`, which takes 6 µs of a thread that competes for the GIL: 3% of a short read.
    """

    def __init__(self) -> None:
        self._checked = 0.0  # when `check_rate_limited` has called `check`, in monotonic seconds
        # The path, the device and the inode; None if there is no file, or no connection yet.
        self.opened: tuple[bytes, int, int] | None = None

    def remember_path(self, driver: sqlite3.Connection, _record: object) -> None:
        """Remember the file of the first connection."""
        if self.opened is not None:
            return
        text_factory, driver.text_factory = driver.text_factory, bytes
        path: bytes = driver.execute("PRAGMA database_list").fetchone()[2]
        driver.text_factory = text_factory
        try:
            status = os.stat(path)
        except OSError:
            return  # it is in memory, or a VFS gives it a name that is no path
        self.opened = path, status.st_dev, status.st_ino

    def check_rate_limited(self) -> None:
        """Call `check` unless it was called in the last 0.1 s.  A read loses no data meanwhile."""
        if (now := time.monotonic()) > self._checked + 0.1:
            self.check()
            self._checked = now

    def check(self) -> None:
        """Raise DatabaseError if the file is not the one that the first connection has opened."""
        if self.opened is None:
            return
        path, device, inode = self.opened
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError:
            return  # this does not show that the file is another one
        else:
            if (status.st_dev, status.st_ino) == (device, inode):
                return
        raise DatabaseError(
            "the SQLite file was deleted or replaced while it was open, and the call had no "
            "effect: put the file back; or, to use the file that is there now, stop all processes, "
            "delete the files beside it that end in -wal and -shm, which belong to the old file, "
            "and start again"
        )


# --- Jobs and threads ----------------------------------------------------------------------------


@dataclass(slots=True, eq=False, repr=False)
class Job:
    """A function that a thread runs, and a future for the task that awaits it in its event loop.

    It is a future as `asyncio.isfuture` defines it.  With an `asyncio.Future`, the event loop would
    wake the task in another iteration than the one that gets the thread's answer: 6% of a short
    read.
    """

    work: "Callable[[WorkerThread, Any], Any]"
    needs_sqlalchemy: bool  # `work` takes a SQLAlchemy connection
    reads: bool  # `work` writes nothing, so that it can be interrupted
    loop: asyncio.AbstractEventLoop
    waker: "LoopWaker"  # of the loop
    enqueue: "Callable[[Job], None]"  # gives the job to a thread
    is_abandoned: bool = False  # the caller of a read was cancelled
    value: Any = None
    error: BaseException | None = None
    has_ended: bool = False
    # The function that wakes the task which awaits this job, and its context.
    waiter: "tuple[Callable[[Job], object], Context]" = field(init=False)
    _taken: threading.Lock = field(default_factory=threading.Lock)
    _asyncio_future_blocking: bool = False

    def take(self) -> bool:
        """Return True to the first caller: the thread that runs the job, or `_end`."""
        return self._taken.acquire(blocking=False)

    def fail(self, error: BaseException) -> None:
        """Store *error* as the outcome, translated: the driver's error refers to parameters.

        All jobs of a batch may fail with one *error*, so each stores a copy.
        """
        self.value = None
        self.error = copy_of(translate(error)) if isinstance(error, Exception) else error

    def wake(self) -> None:
        """Run the task until it awaits something else."""
        wake, context = self.waiter
        if "_nest_patched" in vars(asyncio):
            # A task may run the event loop again until another task ends: see `nest_asyncio`.  In
            # the context in which this method is called, the loop could not wake that task.
            self.loop.call_soon(wake, self, context=context)
        else:
            context.run(wake, self)

    def __await__(self) -> Generator["Job", None, Any]:
        """Wait for the job and return its value; the task raises its error."""
        self._asyncio_future_blocking = True
        yield self
        value, self.value = self.value, None
        return value

    # The other methods are those that `asyncio.Task` calls.

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self.loop

    def add_done_callback(self, wake: "Callable[[Job], object]", *, context: Context) -> None:
        self.waiter = wake, context
        # As late as possible: a thread that wakes up before the event loop waits finds the GIL held
        # and wakes up twice, 3% of a write.  So `_run` and `__await__` free objects before this.
        try:
            self.enqueue(self)
        except BaseException as error:
            if not self._end(error):
                raise  # Ctrl-C: a thread has the job already, and will wake the task

    def result(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value

    def cancel(self, msg: Any = None) -> bool:
        """Cancel the job unless a thread runs it; the task then waits until the job has ended."""
        if self._end(asyncio.CancelledError() if msg is None else asyncio.CancelledError(msg)):
            return True
        self.is_abandoned = self.reads
        return False

    def _end(self, error: BaseException) -> bool:
        """End the job with *error* and return True, unless a thread has taken the job."""
        if is_first := self.take():
            self.error = error
            self.loop.call_soon(self.wake)
        return is_first


class WorkerThread:
    """A thread with the jobs that wait for it.  It opens, uses and closes its own connection.

    All methods but `waiting` run on this thread.
    """

    def __init__(
        self, engine: sa.Engine, file: WatchedFile, read_timeout: float | None, *, writes: bool
    ) -> None:
        self._engine = engine
        self.file: WatchedFile = file
        self._read_timeout = read_timeout
        self._writes = writes
        self.queue: SimpleQueue[Job | None] = SimpleQueue()  # None ends the thread
        # At most one item, which `_next_batch` has removed from the queue: a job that needs its own
        # transaction, or None.  The next call of `_next_batch` begins with this item.
        self._held_back: list[Job | None] = []
        self._busy = False
        # Of this thread's connection.  A new cursor for each change would take 0.3 µs.  A read gets
        # one: if a row cannot be converted, the cursor would keep the read transaction open.
        self._cursor: Any = None
        self.last_batch_was_group: bool = False  # whether the last transaction had several jobs
        self._savepoints_until = 0.0  # in monotonic seconds: see `_run_batch`
        self.interrupts_reads: bool = False  # set by another thread, to end this thread's read
        self._job: Job | None = None  # the running job
        self._is_limited = False  # whether a statement runs that may be interrupted, unlike BEGIN
        self._is_writing = False  # whether this statement writes
        self._deadline: float | None = None  # of this statement, in monotonic seconds
        # The thread is a daemon, because ADK's tools exit without closing the service.  Before
        # Python exits, it waits for all threads that are not daemons.
        self.thread: threading.Thread = threading.Thread(
            target=self._serve,
            name=f"adk-secure-sessions-{'writer' if writes else 'reader'}",
            daemon=True,
        )
        self.thread.start()

    @property
    def waiting(self) -> int:
        """About how many jobs are ahead of a new job, including the running job."""
        return self.queue.qsize() + self._busy

    def _next_batch(self) -> list[Job]:
        """Wait for jobs and return those to run in one transaction; none if the thread must end."""
        limit = _BATCH if self._writes else 1
        self._busy = False
        job = self._held_back.pop() if self._held_back else self.queue.get()
        self._busy = True
        batch: list[Job] = []
        while job is not None and not (batch and job.needs_sqlalchemy):
            batch.append(job)
            # Only this thread takes jobs from the queue.
            if job.needs_sqlalchemy or len(batch) == limit or self.queue.empty():
                return batch
            job = self.queue.get_nowait()
        if batch:
            self._held_back.append(job)
        return batch

    def _serve(self) -> None:
        while batch := self._next_batch():
            batch = [job for job in batch if job.take()]
            try:
                self.last_batch_was_group = len(batch) > 1
                if batch and batch[0].needs_sqlalchemy:
                    self._run_on_engine(batch[0])
                elif batch:
                    self._cursor = self._cursor or self._connect()
                    if self._writes:
                        self._run_batch(batch)
                    else:
                        self.file.check_rate_limited()
                        self._run(batch[0])
            except BaseException as error:
                for job in batch:
                    job.fail(error)
                    del job
            _deliver(batch)
            # Discard the jobs, which refer to decrypted rows: this thread may wait for a long time
            # for the next job.
            batch = []
        try:
            if self._cursor is not None:
                self._cursor.connection.close()
        finally:
            _file_threads.discard(self)

    def _run(self, job: Job, connection: sa.Connection | None = None) -> None:
        self._job = job
        try:
            job.value = job.work(self, connection)
        except BaseException as error:
            job.fail(error)
        finally:
            self._job = None  # the job refers to decrypted rows, see `_serve`
            del job.work  # see `add_done_callback`

    def _run_batch(self, batch: list[Job]) -> None:
        """Run *batch* in one transaction.

        If a job of a group fails after it has made changes, all jobs are rolled back, and the
        others fail with Conflict: their callers repeat them.  For the next second, each job has a
        savepoint, so that only its own changes are rolled back.  Otherwise, a user whose writes
        always fail could block all other users.  A savepoint takes 10% of the CPU time of an
        append, because SQLite copies the pages that earlier jobs have changed.  If the transaction
        itself fails, raise the error, which is then the outcome of every job.
        """
        execute, driver = self._cursor.execute, self._cursor.connection
        is_group = len(batch) > 1
        has_savepoints = is_group and time.monotonic() < self._savepoints_until
        try:
            execute("BEGIN IMMEDIATE")
            for job in batch:
                if has_savepoints:
                    execute("SAVEPOINT one")
                changes = driver.total_changes
                self._run(job)
                if not driver.in_transaction:  # SQLite rolled back, for example on a full disk
                    if self._has_timed_out():
                        return _fail_others(job, batch)
                    raise job.error or sqlite3.OperationalError("SQLite ended the transaction")
                if has_savepoints:
                    if job.error is not None:
                        execute("ROLLBACK TO one")
                    execute("RELEASE one")
                elif is_group and job.error is not None and driver.total_changes != changes:
                    self._savepoints_until = time.monotonic() + 1
                    execute("ROLLBACK")
                    return _fail_others(job, batch)
            commit = is_group or batch[0].error is None
            self.file.check()  # now, not before the jobs: what is acknowledged is in the file
            execute("COMMIT" if commit else "ROLLBACK")
        except BaseException:
            if driver.in_transaction:
                execute("ROLLBACK")
            raise
        else:
            if commit:
                telemetry.record_group_commit(len(batch))

    def _run_on_engine(self, job: Job) -> None:
        with self._engine.connect() as connection:
            self.file.check()  # the pool may have opened the connection long ago
            driver: Any = connection.connection.driver_connection
            driver.set_progress_handler(self._should_interrupt, _INSTRUCTIONS)
            if not job.reads:
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            self._run(job, connection)
            if not job.reads and job.error is None:
                self.file.check()
                connection.commit()

    def _connect(self) -> sqlite3.Cursor:
        """Return a cursor of a new connection."""
        pooled = self._engine.raw_connection()
        driver = pooled.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        if not isinstance(self._engine.pool, sa.pool.StaticPool):
            pooled.detach()  # the thread keeps the connection, so the pool must not count it
        driver.isolation_level = None  # `_run_batch` begins transactions, so the driver must not
        driver.set_progress_handler(self._should_interrupt, _INSTRUCTIONS)
        if self._writes:
            _enter_wal(driver)
            driver.execute("PRAGMA synchronous = FULL")
        else:
            driver.execute("PRAGMA query_only = ON")
        return driver.cursor()

    def transact(self, transaction: Transaction[T]) -> T:
        return run_steps(transaction(), self.fetch, self._apply)

    def fetch(self, query: sa.Executable, parameters: Parameters) -> Sequence[Row]:
        text, values_of = compile_for_sqlite(query)
        driver, values = self._cursor.connection, values_of(parameters)
        return self.with_time_limit(lambda: driver.execute(text, values).fetchall())

    def _apply(self, changes: Sequence[Change]) -> bool:
        return self.with_time_limit(run_changes, self._change_rows, changes, writes=True)

    def _change_rows(self, change: Change) -> int:
        text, values_of = compile_for_sqlite(change.statement)
        cursor = self._cursor
        if change.rows:
            cursor.executemany(text, map(values_of, change.rows))
        else:
            cursor.execute(text, values_of(change.parameters))
        rowcount: int = cursor.rowcount
        return rowcount

    def with_time_limit(self, work: Callable[..., T], *args: object, writes: bool = False) -> T:
        """Call *work*, which `_should_interrupt` may interrupt; DatabaseError if it timed out.

        If *writes* is True, *work* makes changes.  If a change is interrupted, SQLite rolls the
        transaction back.
        """
        timeout = statement_timeout(self._read_timeout, writes=writes)
        self._is_writing = writes
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._is_limited = True
        try:
            return work(*args)
        except (sqlite3.OperationalError, sa.exc.OperationalError):
            if timeout is None or not self._has_timed_out():
                raise
        finally:
            self._is_limited = False
        raise timed_out_error(timeout, "a write" if writes else "a read")

    def _has_timed_out(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline

    def _should_interrupt(self) -> bool:
        """Return True to interrupt this thread's statement; SQLite calls this method during it.

        Unlike `sqlite3.Connection.interrupt`, this cannot interrupt the next statement by mistake.
        """
        if not self._is_limited:
            return False
        if self._has_timed_out():
            return True
        if self._is_writing:
            return False  # a write continues even if the caller is cancelled or the service closed
        return self.interrupts_reads or (self._job is not None and self._job.is_abandoned)


def _fail_others(job: Job, batch: list[Job]) -> None:
    """Let callers repeat the other jobs, after *job* has failed and all was rolled back."""
    for other in batch:
        if other is not job:
            other.fail(Conflict())


def _stop(threads: list[WorkerThread]) -> None:
    """End *threads* one after another, the writer last; each thread first runs its queued jobs."""
    # SQLite removes the `-wal` file when the last connection is closed.  If two connections were
    # closed at the same time, each could find the other one still open, and the file would stay.
    for interrupts in (False, True):
        deadline = time.monotonic() + _EXIT_TIMEOUT
        for thread in reversed(threads):
            if interrupts:
                thread.interrupts_reads = True
            else:
                thread.queue.put(None)
            # Python may collect the executor in one of these threads, which cannot join itself.
            if thread.thread is not threading.current_thread():
                thread.thread.join(max(deadline - time.monotonic(), 0))


class LoopWaker:
    """Wakes the tasks of one event loop, through an eventfd of its own.

    `call_soon_threadsafe` does this, too, where there are no eventfds.  But the event loop then
    reads its socket after it has run the task, which releases the GIL to the thread that has the
    task's next job, and both threads compete for it: 6% to 10% of the CPU time of an operation.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.jobs: deque[Job] = deque()  # that have ended, and whose tasks wait
        self._eventfd: int | None = None
        if sys.platform == "linux":
            try:
                self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                # In an empty context: the event loop would keep the context of the first caller.
                Context().run(loop.add_reader, self._eventfd, self._wake_tasks)
            except (NotImplementedError, OSError):
                self._close()  # the loop cannot watch files, or the process may open no more

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        if self._eventfd is not None:
            os.close(self._eventfd)
            self._eventfd = None

    def wake(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let *loop* run the tasks that await `jobs`; any thread may call this."""
        if sys.platform == "linux" and self._eventfd is not None:
            os.eventfd_write(self._eventfd, 1)
            return
        try:
            loop.call_soon_threadsafe(self._wake_tasks)
        except RuntimeError:  # the loop is closed, so no caller is waiting
            logger.debug("an event loop was closed before its transactions were answered")

    def _wake_tasks(self) -> None:
        try:
            if sys.platform == "linux" and self._eventfd is not None:
                try:  # `suppress` takes as long as the read
                    os.eventfd_read(self._eventfd)
                except BlockingIOError:
                    pass  # an earlier call has handled this
            for _ in range(len(self.jobs)):
                self.jobs.popleft().wake()
        except BaseException:  # Ctrl-C, for example, has interrupted this method or the task
            if self.jobs:
                self.wake(self.jobs[0].loop)  # again, for the other tasks
            raise


# An event loop keeps its waker, whose jobs refer to the loop: see `LoopWaker.__init__`.
_wakers: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.ref[LoopWaker]]"
_wakers = weakref.WeakKeyDictionary()


def _deliver(jobs: list[Job]) -> None:
    """Wake the tasks that await *jobs*, with one call for each event loop, because each call writes
    to a file.
    """
    for job in jobs:
        job.has_ended = True
        job.waker.jobs.append(job)
    for waker, loop in {job.waker: job.loop for job in jobs}.items():
        waker.wake(loop)


def _enter_wal(driver: sqlite3.Connection) -> None:
    """Switch the file to write-ahead logging, so that readers do not wait for the writer."""
    # If another process switches the file at the same time, SQLite ignores the busy timeout and
    # raises an error at once.  So wait and retry.
    for attempt in range(100):
        try:
            driver.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorname != "SQLITE_BUSY" or attempt == 99:
                raise
            threading.Event().wait(0.05)
