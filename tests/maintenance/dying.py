"""Kill a process before a chosen statement, as `kill -9` or a crash would end it.

For jobs of `tests.processes.children`: never call this in the process of the tests.

    def rotate_and_die(say, url, number):
        statements = Statements(dies_at=number)
        db = dying(lambda: Database(url, backend), statements, url)

From then on `statements` counts what the process sends, and the process kills itself with SIGKILL
before statement number *dies_at*.  What counts as a statement depends on the database:

- SQLite: every statement, also BEGIN, COMMIT and PRAGMA.
- Servers: every statement and COMMIT that goes through SQLAlchemy.
- PostgreSQL: also every read and every Apply that goes to asyncpg directly.  Each is one statement.
"""

import os
import re
import signal
from collections.abc import Callable
from typing import Any, TypeVar

import sqlalchemy as sa

from tests.faults import Point, with_faults

T = TypeVar("T")


class Statements:
    """Counts statements that contain *pattern*, and dies before number *dies_at*; 0 is never."""

    def __init__(self, dies_at: int = 0, pattern: str = "") -> None:
        self.count = 0
        self._dies_at = dies_at
        self._pattern = re.compile(pattern)

    def __call__(self, text: str) -> None:
        if self._pattern.search(text):
            self.count += 1
            if self.count == self._dies_at:
                os.kill(os.getpid(), signal.SIGKILL)


def dying(make: Callable[[], T], statements: Statements, *urls: str | sa.URL) -> T:
    """Call *make*, which makes a service or a Database on *urls*, and count what it sends."""

    def trace(driver: Any, _: object) -> None:
        if hasattr(driver, "set_trace_callback"):
            driver.set_trace_callback(statements)

    def execute(connection: Any, _cursor: object, text: str, *_: object) -> None:
        if connection.dialect.name != "sqlite":
            statements(text)

    def commit(connection: Any) -> None:
        if connection.dialect.name != "sqlite":
            statements("COMMIT")

    sa.event.listen(sa.Engine, "connect", trace)
    sa.event.listen(sa.Engine, "before_cursor_execute", execute)
    sa.event.listen(sa.Engine, "commit", commit)
    made, faults = with_faults(make)
    for url, executor in zip(urls, faults, strict=False):
        if sa.make_url(url).get_backend_name() == "postgresql":
            for point in (Point.READ, Point.APPLY):
                executor.before(point, lambda: statements(""), nth=None)
    return made
