"""Real processes for tests, forked from one that imports ADK once: importing it takes seconds."""

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
# The server from which to fork has a single thread, and nothing that a test has open.
_METHODS = multiprocessing.get_all_start_methods()
_context: Any = multiprocessing.get_context("forkserver" if "forkserver" in _METHODS else "spawn")


class Child:
    """A process that runs *job*: a function of a module, given *arguments* and how to say things.

    It waits for `go`, so that several can start at the same moment.
    """

    def __init__(self, job: Callable[..., object], *arguments: object) -> None:
        # What the job is in is worth importing before the fork.
        _context.set_forkserver_preload([job.__module__])
        self._connection, theirs = _context.Pipe()
        self.process = _context.Process(target=_run, args=(theirs, job, arguments))
        self.process.start()
        theirs.close()
        assert self._receive() == "ready"

    def go(self) -> None:
        self._connection.send("go")

    def said(self) -> Iterator[Any]:
        """What the job says, until it ends; fails if it raises, or if it writes to stderr."""
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
        assert self._connection.poll(_PATIENCE), "the process says nothing"
        return self._connection.recv()


@contextmanager
def children(*jobs: tuple[Any, ...]) -> Iterator[list[Child]]:
    """Start them all at once, each a function and its arguments."""
    with ExitStack() as stack:
        started = []
        for job in jobs:
            started.append(Child(*job))
            stack.callback(started[-1].close)
        for child in started:
            child.go()
        yield started


def results(*jobs: tuple[Any, ...]) -> list[list[Any]]:
    """Run them all at once to their ends; what each said."""
    with children(*jobs) as running:
        said = [[*child.said()] for child in running]
        for child in running:
            child.process.join(_PATIENCE)
            assert child.process.exitcode == 0
        return said


def _run(connection: Connection, job: Callable[..., object], arguments: tuple[object, ...]) -> None:
    def say(value: object) -> None:
        connection.send(("said", value))

    with tempfile.TemporaryFile() as complaints:
        os.dup2(complaints.fileno(), sys.stderr.fileno())  # of processes that the job forks, too
        connection.send("ready")
        connection.recv()
        try:
            job(say, *arguments)
        except BaseException:
            traceback.print_exc()
        gc.collect()
        sys.stderr.flush()
        complaints.seek(0)
        if text := complaints.read().decode():
            connection.send(("wrote", text))
