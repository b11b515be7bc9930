"""Runs functions of tests in processes of their own, to see what several processes do at once.

How it works.  Importing google-adk takes seconds, so children are forked from a server process that
has imported it once, with the drivers (multiprocessing's forkserver: it has a single thread, and
nothing that a test has open).  `children((job, argument), ...)` starts a process for each job,
waits until all are ready, and lets them go at the same moment.  A job is a function of a module.
Its first argument is `say`: a function that sends an object to the test, which reads it from
`child.said()`.  A job that raises, or writes to stderr, fails the test.  `results(...)` runs jobs
to their ends and returns what each has said.
"""

import gc
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

_PATIENCE = 120.0  # seconds
FORKS = "forkserver" in multiprocessing.get_all_start_methods()
_context: Any = multiprocessing.get_context("forkserver" if FORKS else "spawn")
# The server imports these when it starts, whichever test starts it; each child imports the rest
# itself.  The server ignores modules that it does not find, and names that are set later.
IMPORTED_ONCE = [
    "pytest",
    "google.adk.events.event",
    "google.adk.sessions.database_session_service",
    "adk_secure_sessions.maintenance",
    "adk_secure_sessions.service",
    "adk_secure_sessions.db.postgresql",
    "adk_secure_sessions.db.async_engine",
    "asyncpg",
    "sqlalchemy.dialects.postgresql.asyncpg",
    "asyncmy",
    "sqlalchemy.dialects.mysql.asyncmy",
]
_context.set_forkserver_preload(IMPORTED_ONCE)


class Child:
    """A process that calls `job(say, *arguments)` once `go` is called."""

    def __init__(self, job: Callable[..., object], *arguments: object) -> None:
        self._connection, its_connection = _context.Pipe()
        self.process = _context.Process(target=_run, args=(its_connection, job, arguments))
        self.process.start()
        its_connection.close()
        assert self._receive() == "ready"

    def go(self) -> None:
        self._connection.send("go")

    def said(self) -> Iterator[Any]:
        """Yield what the job says until it ends; fail if it raises or writes to stderr."""
        while True:
            try:
                kind, value = self._receive()
            except EOFError:
                return
            assert kind == "said", value
            yield value

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self._connection.close()

    def _receive(self) -> Any:
        assert self._connection.poll(_PATIENCE), "the process said nothing in time"
        return self._connection.recv()


@contextmanager
def children(*jobs: tuple[Any, ...]) -> Iterator[list[Child]]:
    """Start all *jobs* at once, each a function and its arguments; kill them at the end."""
    with ExitStack() as stack:
        started = []
        for job in jobs:
            started.append(Child(*job))
            stack.callback(started[-1].close)
        for child in started:
            child.go()
        yield started


def results(*jobs: tuple[Any, ...]) -> list[list[Any]]:
    """Run all *jobs* at once to their ends; return what each said."""
    with children(*jobs) as running:
        said = [[*child.said()] for child in running]
        for child in running:
            child.process.join(_PATIENCE)
            assert child.process.exitcode == 0
        return said


def _run(connection: Connection, job: Callable[..., object], arguments: tuple[object, ...]) -> None:
    def say(value: object) -> None:
        connection.send(("said", value))

    with tempfile.TemporaryFile() as errors:
        os.dup2(errors.fileno(), sys.stderr.fileno())  # also of processes that the job forks
        gc.freeze()  # what the server has imported: the collection below need not search it
        connection.send("ready")
        connection.recv()
        try:
            job(say, *arguments)
        except BaseException:
            traceback.print_exc()
        gc.collect()
        sys.stderr.flush()
        errors.seek(0)
        if text := errors.read().decode():
            connection.send(("wrote", text))


def say_imported(say: Callable[[object], None]) -> None:
    """Say which modules the server has imported; this module needs none of them."""
    say([name for name in IMPORTED_ONCE if name in sys.modules])
