"""Faults and other processes' work, at chosen statements of a service or of maintenance.

How it works: `with_faults` makes a service or a `maintenance.Database` whose executors (see
`adk_secure_sessions.db.protocol`) are each inside a `FaultyExecutor`, which passes every call on to
the real one.  At each `Point`, it looks whether the test has planned something with `before` or
`after`: `faults.data.after(Point.READ, erase_the_user)`.  A planned exception is raised there, and
a planned function is called.  A planned coroutine function runs to its end in a thread and an event
loop of its own, as another process would, while the statement waits.  So it must not await anything
of the test's event loop.  On SQLite a write holds the only write lock from before its first read:
another process can read then, but a write of its own would wait until it fails.  An exception
inside a transaction takes back what it has changed, except on asyncpg, where each Apply commits by
itself.  To lose the answer of a write that is stored, raise `Disconnected` after `Point.WRITE`.
"""

import asyncio
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import sqlalchemy as sa

from adk_secure_sessions.db import connect
from adk_secure_sessions.db.protocol import (
    Apply,
    Disconnected,
    Executor,
    Parameters,
    Read,
    Row,
    Steps,
    Transaction,
)
from adk_secure_sessions.errors import DatabaseError

T = TypeVar("T")
Fault = BaseException | Callable[[], object]
# Is given the Read or Apply, if the point is one, and after it the rows or the answer.
When = Callable[[Read | Apply | None, Any], bool]


class Point(Enum):
    """Where something may happen, before or after."""

    READ = "a query, by itself or of a transaction"
    APPLY = "the changes of one Apply of a transaction"
    WORK = "the function given to `run_sync`, inside its transaction"
    WRITE = "a whole write: before it begins, after it is committed"
    RUN = "a whole `run_sync`: before it begins, after it is committed"


@dataclass
class Plan:
    """What is to happen where, and how often it did."""

    point: Point
    is_after: bool
    fault: Fault
    nth: int | None
    when: When
    matched: int = 0
    happened: int = 0

    def is_due(self, step: Read | Apply | None, answer: Any) -> bool:
        if not self.when(step, answer):
            return False
        self.matched += 1
        due = self.nth in (None, self.matched)
        self.happened += due
        return due


class FaultyExecutor:
    """Passes everything on to *executor*; what a test planned happens on the way."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._plans: list[Plan] = []
        self._guard = threading.Lock()  # SQLite's transactions run on threads
        self.counts = Counter[Point]()  # how often each point was reached

    def before(self, point: Point, fault: Fault, **options: Any) -> Plan:
        """Plan *fault*, an exception to raise or a function (also a coroutine function) to call.

        It happens before *point*, the *nth* time from now on (None: each time); *when* says which
        times count, by what is asked.  The returned plan says how often it `happened`.
        """
        return self._plan(point, fault, is_after=False, **options)

    def after(self, point: Point, fault: Fault, **options: Any) -> Plan:
        """Plan *fault* after *point*, as `before` does; *when* is also given the answer."""
        return self._plan(point, fault, is_after=True, **options)

    def _plan(
        self,
        point: Point,
        fault: Fault,
        *,
        is_after: bool,
        nth: int | None = 1,
        when: When = lambda step, answer: True,
    ) -> Plan:
        plan = Plan(point, is_after, fault, nth, when)
        with self._guard:
            self._plans.append(plan)
        return plan

    def forget(self) -> None:
        """Drop all plans."""
        with self._guard:
            self._plans.clear()

    async def read(self, query: sa.Executable, parameters: Parameters) -> Sequence[Row]:
        step = Read(query, parameters)
        await self._pass(Point.READ, step)
        rows = await self._executor.read(query, parameters)
        await self._pass(Point.READ, step, rows, is_after=True)
        return rows

    async def write(
        self,
        transaction: Transaction[T],
        on_commit: Callable[[], None] | None = None,
        *,
        in_one_transaction: bool = False,
    ) -> T:
        await self._pass(Point.WRITE)
        committed: list[None] = []
        try:
            result = await self._executor.write(
                lambda: self._followed(transaction()),
                partial(committed.append, None),
                in_one_transaction=in_one_transaction,
            )
            await self._pass(Point.WRITE, is_after=True)  # may lose the answer
        except asyncio.CancelledError:
            if committed and on_commit:
                on_commit()
            raise
        if on_commit:
            on_commit()
        return result

    async def run_sync(self, work: Callable[[sa.Connection], T], *, commit: bool = True) -> T:
        def followed(connection: sa.Connection) -> T:
            self._pass_inside(Point.WORK)
            result = work(connection)
            self._pass_inside(Point.WORK, is_after=True)
            return result

        await self._pass(Point.RUN)
        result = await self._executor.run_sync(followed, commit=commit)
        await self._pass(Point.RUN, is_after=True)
        return result

    async def close(self) -> None:
        await self._executor.close()

    def _followed(self, steps: Steps[T]) -> Generator[Read | Apply, Any, T]:
        """The same transaction, with what is planned between its steps."""
        try:
            step = next(steps)
            while True:
                point = Point.READ if isinstance(step, Read) else Point.APPLY
                self._pass_inside(point, step)
                answer = yield step
                self._pass_inside(point, step, answer, is_after=True)
                step = steps.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            steps.close()

    async def _pass(
        self,
        point: Point,
        step: Read | None = None,
        answer: Any = None,
        *,
        is_after: bool = False,
    ) -> None:
        for fault in self._due(point, step, answer, is_after):
            if (work := _begin(fault)) is not None:
                await asyncio.to_thread(asyncio.run, work)

    def _pass_inside(
        self,
        point: Point,
        step: Read | Apply | None = None,
        answer: Any = None,
        *,
        is_after: bool = False,
    ) -> None:
        for fault in self._due(point, step, answer, is_after):
            if (work := _begin(fault)) is not None:
                with ThreadPoolExecutor(1) as thread:  # a loop may be running in this one
                    thread.submit(asyncio.run, work).result()

    def _due(
        self, point: Point, step: Read | Apply | None, answer: Any, is_after: bool
    ) -> list[Fault]:
        with self._guard:
            self.counts[point] += not is_after
            plans = [one for one in self._plans if (one.point, one.is_after) == (point, is_after)]
            return [plan.fault for plan in plans if plan.is_due(step, answer)]


def _begin(fault: Fault) -> Coroutine[Any, Any, object] | None:
    """Raise the exception, or call the function; returns the coroutine that is still to be run."""
    if isinstance(fault, BaseException):
        raise fault
    result = fault()
    return result if inspect.iscoroutine(result) else None


class Faults(NamedTuple):
    """The executor for the data and that for the keys; one object if both are in one database."""

    data: FaultyExecutor
    keys: FaultyExecutor


@contextmanager
def wrapping_executors(wrap: Callable[[Executor], Executor]) -> Iterator[None]:
    """During the block, new services and commands use *wrap*(executor) instead of each executor."""
    create = connect._for_source
    with mock.patch.object(connect, "_for_source", lambda *options: wrap(create(*options))):
        yield


def with_faults(make: Callable[[], T]) -> tuple[T, Faults]:
    """Return the service or the `maintenance.Database` that *make* makes, and its executors."""
    made: list[FaultyExecutor] = []

    def wrap(executor: Executor) -> Executor:
        made.append(FaultyExecutor(executor))
        return made[-1]

    with wrapping_executors(wrap):
        result = make()
    return result, Faults(made[0], made[-1])


def lost() -> Disconnected:
    """A lost connection, as executors report it."""
    return Disconnected(DatabaseError("the connection was reset by a test", retryable=True))
