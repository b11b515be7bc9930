"""From options to a database, and from errors to one line."""

import asyncio
import functools
import warnings
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import click
import sqlalchemy as sa

from adk_secure_sessions.backends import (
    AesGcmBackend,
    EncryptionBackend,
    FernetBackend,
    NoOpBackend,
)
from adk_secure_sessions.cli.output import harmless, progress
from adk_secure_sessions.errors import ConfigurationError, SecureSessionError
from adk_secure_sessions.keys.providers import KeyProvider
from adk_secure_sessions.keys.specs import key_provider
from adk_secure_sessions.maintenance import Database

T = TypeVar("T")
Command = Callable[..., Any]

DB_VARIABLE = "ADK_SECURE_SESSIONS_DB"
KEY_DB_VARIABLE = "ADK_SECURE_SESSIONS_KEY_DB"
_CIPHERS: dict[str, Callable[[KeyProvider], EncryptionBackend]] = {
    "aesgcm": AesGcmBackend,
    "fernet": FernetBackend,
}
_CLEAR = "no-op"
_BACKENDS = click.Choice([*_CIPHERS, _CLEAR])
# Their text is the driver's own, of what it was asked; values are never in it.
_DRIVERS = ("asyncpg", "asyncmy", "psycopg", "sqlite3", "aiosqlite")


class Failure(click.ClickException):
    """Shown as one line on stderr."""

    exit_code = 2


def on_database(command: Command) -> Command:
    """Options of every command that has a database: it gets `db`, and `as_json`."""

    @click.option("--db", envvar=DB_VARIABLE, required=True, metavar="URL", help=_DB_HELP)
    @click.option("--key-db", envvar=KEY_DB_VARIABLE, metavar="URL", help=_KEY_DB_HELP)
    @click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
    @functools.wraps(command)
    def run(db: str, key_db: str | None, **options: Any) -> Any:
        options.setdefault("backends", ())
        with failures():
            database = Database(db, *options.pop("backends"), key_db_url=key_db)
        return command(db=database, **options)

    return run


def with_keys(*, required: bool) -> Callable[[Command], Command]:
    """Options for root keys and backends; outside `on_database`, to which they are given."""

    def decorate(command: Command) -> Command:
        @click.option(
            "--backend", type=_BACKENDS, default="aesgcm", show_default=True, help=_BACKEND_HELP
        )
        @click.option("--key", metavar="SPEC", help=_KEY_HELP)
        @click.option("--also-key", multiple=True, metavar="SPEC", help=_ALSO_KEY_HELP)
        @click.option("--also-backend", multiple=True, type=_BACKENDS, help=_ALSO_BACKEND_HELP)
        @functools.wraps(command)
        def run(
            backend: str,
            key: str | None,
            also_key: Sequence[str],
            also_backend: Sequence[str],
            **options: Any,
        ) -> Any:
            specs = [spec for spec in (key, *also_key) if spec is not None]
            if key is None and backend != _CLEAR and (required or specs):
                raise click.UsageError("give --key SPEC, which names the root key")
            with failures():
                backends = _backends([backend, *also_backend], specs, anything=required)
            return command(backends=backends, **options)

        return run

    return decorate


def _backends(
    names: list[str], specs: list[str], *, anything: bool
) -> tuple[EncryptionBackend, Sequence[EncryptionBackend]] | tuple[()]:
    """Each backend with each root key; the first of both writes."""
    if not (specs or anything or _CLEAR in names):
        return ()
    roots = [_root(spec) for spec in specs]
    made: list[EncryptionBackend] = []
    for name in dict.fromkeys(names):
        if name == _CLEAR:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # said in help, and of what it is asked here
                made.append(NoOpBackend())
        else:
            made += [_CIPHERS[name](root) for root in roots]
    # A root key beside NoOpBackend opens master keys, whichever cipher it comes with.
    if not set(names) - {_CLEAR}:
        made += [AesGcmBackend(root) for root in roots]
    return made[0], made[1:]


def _root(spec: str) -> KeyProvider:
    if ":" not in spec:
        raise ConfigurationError(
            "a key is named by a key spec such as env:NAME or file:PATH, and never given itself: "
            "others can read what stands on a command line"
        )
    return key_provider(spec)


def run(db: Database, work: Callable[[Database], Awaitable[T]]) -> T:
    """The result of *work*; its errors end the command."""

    async def main() -> T:
        async with db:
            return await work(db)

    with failures():
        return asyncio.run(main())


def watched(
    db: Database,
    label: str,
    work: Callable[..., Awaitable[T]],
    *,
    unit: str = "rows",
    **options: Any,
) -> T:
    """The result of *work* with its progress shown, which counts *unit*."""
    with progress(label, unit) as report:
        return run(db, lambda opened: work(opened, progress=report, **options))


@contextmanager
def failures() -> Iterator[None]:
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
    raise Failure(harmless(" ".join(message.split())))


_DB_HELP = f"Database URL, such as sqlite:///sessions.db; or in {DB_VARIABLE}."
_KEY_DB_HELP = (
    f"URL of the key database, if the keys have one of their own; or in {KEY_DB_VARIABLE}."
)
_BACKEND_HELP = "Which cipher the services write with; no-op is none, and needs no key."
_KEY_HELP = "Key spec of the root key: env:NAME, file:PATH and others; never the key itself."
_ALSO_KEY_HELP = "Another root key that may open master keys; repeatable."
_ALSO_BACKEND_HELP = "Another backend whose records may be opened; repeatable."
