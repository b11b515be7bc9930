"""Create the executors for database URLs and engines."""

import asyncio
import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeAlias

import sqlalchemy as sa

from adk_secure_sessions.db.failures import timed_out_error
from adk_secure_sessions.db.protocol import Executor, Executors
from adk_secure_sessions.errors import ConfigurationError, install_command

# `sqlalchemy.ext.asyncio` is imported on first use.  It imports SQLAlchemy's ORM, which takes a
# third of a second.  A SQLite database given by URL does not need it.  Each executor is imported
# when a database needs it.
if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

Source: TypeAlias = "sa.URL | AsyncEngine"

_SQLITE_DRIVERS = ("sqlite", "sqlite+pysqlite", "sqlite+aiosqlite")
# The async drivers of each kind of server.  If a URL names no driver, the first of these drivers
# that is installed is used.
_ASYNC_DRIVERS = {
    "postgresql": ("asyncpg", "psycopg"),
    "mysql": ("asyncmy", "aiomysql"),
    "mariadb": ("asyncmy", "aiomysql"),
}
# The extra of this package that installs a driver, by driver.
_EXTRAS = {"asyncpg": "postgresql", "asyncmy": "mysql"}
# For drivers without an extra: the argument of `pip install`, if it is not the driver's name.
_PACKAGES = {"psycopg": "psycopg[binary]"}
_POOL_SIZE = 10
_POOL_TIMEOUT = 30.0  # seconds to wait for a connection; the same as SQLAlchemy's default
# These options of `create_engine` concern the moments at which SQLAlchemy's pool gives out a
# connection or takes it back.  If the application gives one of them, `AsyncpgExecutor` returns each
# connection to the pool after its operation, instead of keeping it.
_POOL_OPTIONS = {"poolclass", "pool_recycle", "pool_pre_ping", "max_overflow"}


def executors_for(
    db_url: str | sa.URL | None,
    db_engine: object | None = None,
    key_db_url: str | sa.URL | None = None,
    key_db_engine: object | None = None,
    engine_kwargs: dict[str, Any] | None = None,
    read_timeout: float | None = None,
) -> Executors:
    """Create the executors of the data database and of the key database, without connecting.

    *engine_kwargs* are for *db_url*; their `connect_args`, such as the time to wait for a lock, are
    also for *key_db_url* if both are SQLite files.  *read_timeout* is how many seconds one query
    may take.
    """
    seconds: object = read_timeout
    if seconds is not None and (not isinstance(seconds, int | float) or not seconds > 0):
        raise ConfigurationError("read_timeout must be a positive number of seconds, or None")
    if (db_url is None) == (db_engine is None):
        raise ConfigurationError("give exactly one of db_url and db_engine")
    if key_db_url is not None and key_db_engine is not None:
        raise ConfigurationError("give at most one of key_db_url and key_db_engine")
    source, engine_kwargs = _source("db", db_url, db_engine), engine_kwargs or {}
    if key_db_url is None and key_db_engine is None:
        data = _for_source(source, engine_kwargs, read_timeout)
        return Executors(data, data)
    key_source = _source("key_db", key_db_url, key_db_engine)
    if source is key_source or _equality_key(source) == _equality_key(key_source):
        raise ConfigurationError(
            "the key database must not be the database of the sessions: "
            "omit it to store the keys in the database of the sessions"
        )
    are_files = all(
        isinstance(one, sa.URL) and one.drivername in _SQLITE_DRIVERS
        for one in (source, key_source)
    )
    key_options = engine_kwargs.keys() & {"connect_args"} if are_files else ()
    return Executors(
        _for_source(source, engine_kwargs, read_timeout),
        _for_source(key_source, {n: engine_kwargs[n] for n in key_options}, read_timeout),
    )


def _source(name: str, url: object | None, engine: object | None) -> Source:
    if engine is None:
        options = "--db, --to" if name == "db" else "--key-db"
        return parsed_url(f"{name}_url ({options})", url)
    from sqlalchemy.ext.asyncio import AsyncEngine

    if isinstance(engine, AsyncEngine):
        return engine
    raise ConfigurationError(
        f"{name}_engine must be a SQLAlchemy AsyncEngine, not {type(engine).__name__}: "
        "create it with create_async_engine"
    )


def parsed_url(name: str, url: object) -> sa.URL:
    """Return *url* with an installed driver; *name* stands for it in the error."""
    if url == ":memory:":
        return sa.make_url("sqlite://")
    if isinstance(url, str | sa.URL):
        try:
            return _with_driver(sa.make_url(url))
        except (sa.exc.ArgumentError, ValueError):
            pass
    raise ConfigurationError(
        f"{name} is not a database URL: write, for example, sqlite+aiosqlite:///sessions.db"
    )


def _with_driver(url: sa.URL) -> sa.URL:
    """Return *url*, with an installed async driver if it names only the kind of server."""
    backend, _, driver = url.drivername.partition("+")
    if backend == "postgres":  # some hosting companies write postgres:// in their URLs
        backend = "postgresql"
        url = url.set(drivername="+".join(filter(None, [backend, driver])))
    drivers = _ASYNC_DRIVERS.get(backend)
    if driver or drivers is None:
        return url
    driver = next((name for name in drivers if find_spec(name)), drivers[0])
    if driver == "asyncpg" and "sslmode" in url.query:  # asyncpg names it `ssl`
        query = {"ssl" if name == "sslmode" else name: url.query[name] for name in url.query}
        url = url.set(query=query)
    return url.set(drivername=f"{backend}+{driver}")


def _equality_key(source: Source) -> object:
    """Return a value by which to compare two sources; equal values mean the same database.

    If one database has two names, such as two hard links, opening it raises ConfigurationError.
    """
    url = source if isinstance(source, sa.URL) else source.url
    backend = url.get_backend_name()
    if backend != "sqlite":
        return url._replace(drivername=backend, password=None)
    from adk_secure_sessions.db.sqlite import is_in_memory

    return object() if is_in_memory(url) else os.path.realpath(url.database or "")


def _for_source(
    source: Source, engine_kwargs: dict[str, Any], read_timeout: float | None
) -> Executor:
    if isinstance(source, sa.URL):
        return _for_url(source, engine_kwargs, read_timeout)
    if engine_kwargs:
        raise ConfigurationError(
            f"{', '.join(sorted(engine_kwargs))}: engine options can be given with db_url, "
            "not with db_engine"
        )
    return _for_engine(source, owns_engine=False, read_timeout=read_timeout)


def _for_url(url: sa.URL, engine_kwargs: dict[str, Any], read_timeout: float | None) -> Executor:
    backend, _, driver = url.drivername.partition("+")
    known = _ASYNC_DRIVERS.get(backend)
    try:
        if backend != "sqlite":
            return _for_server(url, engine_kwargs, read_timeout)
        if url.drivername in _SQLITE_DRIVERS:
            from adk_secure_sessions.db.sqlite import SqliteExecutor

            return SqliteExecutor(url, engine_kwargs, read_timeout)
        problem = f"names a driver that is not one of {', '.join(_SQLITE_DRIVERS)}"
    except sa.exc.NoSuchModuleError:
        problem = "names a database or driver that SQLAlchemy does not know"
        if backend == "encrypted":
            problem = "is for `adk web`: omit encrypted+ and options, and give `backend` (--key)"
    except (sa.exc.InvalidRequestError, ImportError) as error:
        if known is None:
            problem = "names a driver that is synchronous, or not installed"
        elif driver in known and isinstance(error, ImportError):
            problem = f"needs a driver that is not installed: {_install(driver)}"
        else:
            problem = (
                f"names a synchronous driver: write {backend}+{known[0]}://, and "
                f"{_install(known[0])}"
            )
    except (TypeError, sa.exc.ArgumentError) as error:  # its text names options, but no values
        problem = f"cannot be used with these options: {error}"
    except ValueError:
        problem = "cannot be used with these options: a value is not valid"
    # Quote only the beginning of the URL: the rest may contain a password, even in the query.
    raise ConfigurationError(f"the database URL {url.drivername}://... {problem}")


def _install(driver: str) -> str:
    if driver in _EXTRAS:
        return install_command(_EXTRAS[driver])
    return f"pip install '{_PACKAGES.get(driver, driver)}'"


def _for_server(url: sa.URL, engine_kwargs: dict[str, Any], read_timeout: float | None) -> Executor:
    from sqlalchemy.ext.asyncio import create_async_engine

    options = {**engine_kwargs, "hide_parameters": True}
    pool: dict[str, Any] = {}
    if not options.keys() & _POOL_OPTIONS:
        # Allow no overflow connections: when one is returned to the pool, SQLAlchemy closes it, so
        # each transaction would have to open another connection.
        options = {"pool_size": _POOL_SIZE, "max_overflow": 0, **options}
        timeout = options.get("pool_timeout", _POOL_TIMEOUT)
        pool = {"max_idle": options["pool_size"], "timeout": timeout}
    engine = create_async_engine(url, **options)
    if read_timeout is not None:
        _limit_connecting(engine, read_timeout)
    return _for_engine(engine, owns_engine=True, read_timeout=read_timeout, **pool)


def _limit_connecting(engine: "AsyncEngine", seconds: float) -> None:
    """Make each attempt of *engine* to connect end within *seconds*.

    If a server accepts a connection and then sends nothing, asyncmy would wait forever.
    """

    name = engine.dialect.driver
    # SQLAlchemy keeps the driver's module in an attribute that has the name of the driver.
    driver: Any = getattr(engine.dialect.dbapi, name)
    connect = driver.AsyncConnection.connect if name == "psycopg" else driver.connect

    async def connect_in_time(*args: object, **options: object) -> object:
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                return await connect(*args, **options)
        except TimeoutError:
            if not limit.expired():
                raise  # of the driver, which has a shorter time-out
            raise timed_out_error(seconds, "connecting to the database") from None

    def set_function(*arguments: Any) -> None:
        arguments[-1].setdefault("async_creator_fn", connect_in_time)

    sa.event.listen(engine.sync_engine, "do_connect", set_function)


def _for_engine(
    engine: "AsyncEngine", *, owns_engine: bool, read_timeout: float | None, **pool: Any
) -> Executor:
    """Create the executor for *engine*; *pool* are arguments that only `AsyncpgExecutor` has."""
    if engine.dialect.driver == "asyncpg":
        from adk_secure_sessions.db.postgresql import AsyncpgExecutor

        return AsyncpgExecutor(engine, owns_engine=owns_engine, read_timeout=read_timeout, **pool)
    from adk_secure_sessions.db.async_engine import AsyncEngineExecutor

    return AsyncEngineExecutor(engine, owns_engine=owns_engine, read_timeout=read_timeout)
