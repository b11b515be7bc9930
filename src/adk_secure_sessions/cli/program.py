"""The group of all commands, and functions that run a command and print an error in one line."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click
import sqlalchemy as sa

from adk_secure_sessions.cli.output import progress, without_controls
from adk_secure_sessions.errors import SecureSessionError
from adk_secure_sessions.maintenance import Database

T = TypeVar("T")

# Modules of database drivers.  Their error texts never contain stored values, so print them.
_DRIVERS = ("asyncpg", "asyncmy", "psycopg", "sqlite3", "aiosqlite")


@click.group()
@click.version_option(package_name="adk-secure-sessions")
def main() -> None:
    """Maintain databases of encrypted sessions.

    Exit status: 0 on success; 1 if something is wrong or left to do; 2 if the usage, a key or the
    configuration is wrong.
    """


class Failure(click.ClickException):
    """Ends the command with one line on stderr."""

    exit_code = 2


def run(db: Database, work: Callable[[Database], Awaitable[T]]) -> T:
    """Open *db*, run *work* on it, close it, and return the result.

    Raises:
        Failure: See `one_line_errors`.
    """

    async def opened() -> T:
        async with db:
            return await work(db)

    with one_line_errors():
        return asyncio.run(opened())


def run_with_progress(
    db: Database,
    label: str,
    work: Callable[..., Awaitable[T]],
    *,
    unit: str = "rows",
    **options: Any,
) -> T:
    """Do the same as `run`, and show the progress of *work* in *unit* (such as rows)."""
    with progress(label, unit) as report:
        return run(db, lambda opened: work(opened, progress=report, **options))


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Raise Failure for each error of this library, the operating system or the database."""
    try:
        yield
    except (SecureSessionError, OSError) as error:
        message = str(error)
    except sa.exc.DBAPIError as error:
        message = f"the database: {error.orig}"
    except sa.exc.SQLAlchemyError as error:
        message = str(error)
    except Exception as error:
        if not type(error).__module__.startswith(_DRIVERS):
            raise
        message = f"the database: {error}"
    else:
        return
    raise Failure(without_controls(" ".join(message.split())))
