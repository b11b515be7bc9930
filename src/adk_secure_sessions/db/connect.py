"""From a URL or an engine to the executor for it."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from adk_secure_sessions.db.async_engine import AsyncEngineExecutor
from adk_secure_sessions.db.protocol import Executor, Executors
from adk_secure_sessions.db.sqlite import is_in_memory, sqlite_executor
from adk_secure_sessions.errors import ConfigurationError

_SQLITE_DRIVERS = ("sqlite", "sqlite+pysqlite", "sqlite+aiosqlite")
_ASYNC_DRIVERS = {"postgresql": "asyncpg", "mysql": "asyncmy", "mariadb": "asyncmy"}
# What to install, by the module that is missing.
_EXTRAS = {
    "asyncpg": "'adk-secure-sessions[postgresql]'",
    "asyncmy": "'adk-secure-sessions[mysql]'",
}
_POOL_SIZE = 10
_POOL_TIMEOUT = 30.0  # seconds, as SQLAlchemy's
# Options that say how SQLAlchemy's own pool is to behave.
_POOL_OPTIONS = {"poolclass", "pool_recycle", "pool_pre_ping", "max_overflow"}

Wrap = Callable[[Executor], Executor]
_wrap: ContextVar[Wrap | None] = ContextVar("wrap", default=None)


def executors_for(
    db_url: str | sa.URL | None,
    db_engine: object | None,
    key_db_url: str | sa.URL | None,
    key_db_engine: object | None,
    engine_kwargs: dict[str, Any],
) -> Executors:
    """Make the executors for the data and for the keys; nothing is connected yet.

    Args:
        db_url: The database; exactly one of *db_url* and *db_engine* is given.
        db_engine: The application's own engine.
        key_db_url: The key database, if there is one; at most one of the two is given.
        key_db_engine: The application's own engine for it.
        engine_kwargs: Options of `sqlalchemy.create_engine`, which go with *db_url* only.

    Raises:
        ConfigurationError: None or both of two arguments are given; SQLAlchemy rejects the URL or
            an option; the driver is synchronous, unknown or not installed; both databases are the
            same.
    """
    if (db_url is None) == (db_engine is None):
        raise ConfigurationError("give exactly one of db_url and db_engine")
    if key_db_url is not None and key_db_engine is not None:
        raise ConfigurationError("give one of key_db_url and key_db_engine, or none")
    source = _source("db", db_url, db_engine)
    if key_db_url is None and key_db_engine is None:
        data = _executor(source, engine_kwargs)
        return Executors(data, data)
    key_source = _source("key_db", key_db_url, key_db_engine)
    if source is key_source or _identity(source) == _identity(key_source):
        raise ConfigurationError(
            "the key database must be another one than the database of the sessions: "
            "leave it out to keep the keys beside the sessions"
        )
    return Executors(_executor(source, engine_kwargs), _executor(key_source, {}))


@contextmanager
def wrapping_executors(wrap: Wrap) -> Iterator[None]:
    """Pass each executor that `executors_for` makes during the block through *wrap*.

    This is the seam for tests: services and `maintenance.Database`s that are made in the block run
    on the wrappers, which may fail, or let another process act between two statements.  It concerns
    this thread or task only.
    """
    token = _wrap.set(wrap)
    try:
        yield
    finally:
        _wrap.reset(token)


def _source(name: str, url: object | None, engine: object | None) -> sa.URL | AsyncEngine:
    """Check the argument *name*_url or *name*_engine, whichever is given, and return it."""
    if engine is None:
        return _parse(f"{name}_url", url)
    if isinstance(engine, AsyncEngine):
        return engine
    raise ConfigurationError(
        f"{name}_engine must be a SQLAlchemy AsyncEngine, not {type(engine).__name__}: "
        "make it with create_async_engine"
    )


def _parse(name: str, url: object) -> sa.URL:
    if url == ":memory:":
        return sa.make_url("sqlite://")
    if isinstance(url, str | sa.URL):
        try:
            return sa.make_url(url)
        except (sa.exc.ArgumentError, ValueError):
            pass  # and raise below: the text of this error repeats the URL with its password
    raise ConfigurationError(
        f"{name} is not a database URL: write, for example, sqlite+aiosqlite:///sessions.db"
    )


def _identity(source: sa.URL | AsyncEngine) -> object:
    """Return what is equal for two sources that are certainly one database.

    Two names of one database, such as two hard links, are only found when it is opened.
    """
    url = source.url if isinstance(source, AsyncEngine) else source
    backend = url.get_backend_name()
    if backend != "sqlite":
        return url._replace(drivername=backend, password=None)
    return object() if is_in_memory(url) else os.path.realpath(url.database or "")


def _executor(source: sa.URL | AsyncEngine, engine_kwargs: dict[str, Any]) -> Executor:
    if isinstance(source, sa.URL):
        executor = _for_url(source, engine_kwargs)
    elif engine_kwargs:
        raise ConfigurationError(
            f"{', '.join(sorted(engine_kwargs))}: options of an engine go with db_url, "
            "not with db_engine"
        )
    else:
        executor = _for_engine(source, owns_engine=False)
    wrap = _wrap.get()
    return executor if wrap is None else wrap(executor)


def _for_url(url: sa.URL, engine_kwargs: dict[str, Any]) -> Executor:
    try:
        if url.get_backend_name() != "sqlite":
            return _for_server(url, engine_kwargs)
        if url.drivername in _SQLITE_DRIVERS:
            return sqlite_executor(url, engine_kwargs)
        problem = f"names a driver that is not one of {', '.join(_SQLITE_DRIVERS)}"
    except sa.exc.InvalidRequestError:
        driver = _ASYNC_DRIVERS.get(url.get_backend_name(), "an async driver")
        problem = f"names a synchronous driver: write {url.get_backend_name()}+{driver}://"
    except sa.exc.NoSuchModuleError:
        problem = "names a database or driver that SQLAlchemy does not know"
    except ImportError as error:
        extra = _EXTRAS.get(error.name or "", error.name or "it")
        problem = f"needs a driver that is not installed: pip install {extra}"
    except (TypeError, ValueError, sa.exc.ArgumentError) as error:
        problem = f"does not go with these options: {error}"
    shown = url.render_as_string(hide_password=True)
    raise ConfigurationError(f"the database URL {shown!r} {problem}")


def _for_server(url: sa.URL, engine_kwargs: dict[str, Any]) -> Executor:
    options = {**engine_kwargs, "hide_parameters": True}
    keep: dict[str, Any] = {}
    if not options.keys() & _POOL_OPTIONS:
        # No overflow: SQLAlchemy would open such a connection for one transaction and close it.
        options = {"pool_size": _POOL_SIZE, "max_overflow": 0, **options}
        timeout = options.get("pool_timeout", _POOL_TIMEOUT)
        keep = {"keep": options["pool_size"], "timeout": timeout}
    return _for_engine(create_async_engine(url, **options), owns_engine=True, **keep)


def _for_engine(engine: AsyncEngine, *, owns_engine: bool, **keep: Any) -> Executor:
    """Make the executor; *keep* has the options of `AsyncpgExecutor`."""
    if engine.dialect.driver == "asyncpg":
        from adk_secure_sessions.db.postgresql import AsyncpgExecutor  # asyncpg is an extra

        return AsyncpgExecutor(engine, owns_engine=owns_engine, **keep)
    return AsyncEngineExecutor(engine, owns_engine=owns_engine)
