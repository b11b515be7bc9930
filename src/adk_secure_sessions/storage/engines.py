"""From a URL or an engine to the executor that suits it."""

from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.storage.async_engine import AsyncEngineExecutor
from adk_secure_sessions.storage.connection import Executor
from adk_secure_sessions.storage.sqlite import sqlite_executor

_SQLITE_DRIVERS = ("sqlite", "sqlite+pysqlite", "sqlite+aiosqlite")
_EXTRAS = {
    "asyncpg": "'adk-secure-sessions[postgresql]'",
    "asyncmy": "'adk-secure-sessions[mysql]'",
}
_POOL_SIZE = 10
_ASYNC_DRIVERS = {"postgresql": "asyncpg", "mysql": "asyncmy", "mariadb": "asyncmy"}


def executor_for(
    db_url: str | sa.URL | None, db_engine: object | None, engine_kwargs: dict[str, Any]
) -> Executor:
    """Return the executor for one of *db_url* and *db_engine*.

    Raises:
        ConfigurationError: neither or both, a URL or an option that SQLAlchemy does not
            take, a synchronous or unknown driver, a driver that is not installed.
    """
    if (db_url is None) == (db_engine is None):
        raise ConfigurationError("give exactly one of db_url and db_engine")
    if db_engine is not None:
        if not isinstance(db_engine, AsyncEngine):
            raise ConfigurationError(
                f"db_engine must be a SQLAlchemy AsyncEngine, not {type(db_engine).__name__}: "
                "make it with create_async_engine"
            )
        if engine_kwargs:
            raise ConfigurationError(
                f"{', '.join(sorted(engine_kwargs))}: options of an engine go with db_url, "
                "not with db_engine"
            )
        return _for_engine(db_engine, owned=False)
    url = _parse(db_url)
    try:
        if url.get_backend_name() == "sqlite":
            if url.drivername not in _SQLITE_DRIVERS:
                raise ConfigurationError(
                    f"the driver of {_shown(url)!r} is not one of {', '.join(_SQLITE_DRIVERS)}"
                )
            return sqlite_executor(url, engine_kwargs)
        return _for_server(url, engine_kwargs)
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
    raise ConfigurationError(f"the database URL {_shown(url)!r} {problem}")


def _for_engine(engine: AsyncEngine, **options: Any) -> Executor:
    if engine.dialect.driver == "asyncpg":
        from adk_secure_sessions.storage.postgresql import AsyncpgExecutor

        return AsyncpgExecutor(engine, **options)
    return AsyncEngineExecutor(engine, owned=options["owned"])


def _for_server(url: sa.URL, engine_kwargs: dict[str, Any]) -> Executor:
    options = {**engine_kwargs, "hide_parameters": True}
    keep: dict[str, Any] = {}
    if not options.keys() & {"poolclass", "pool_recycle", "pool_pre_ping", "max_overflow"}:
        # An overflow connection is made, and thrown away, for a single transaction.
        options = {"pool_size": _POOL_SIZE, "max_overflow": 0, **options}
        keep = {"keep": options["pool_size"], "timeout": options.get("pool_timeout", 30.0)}
    return _for_engine(create_async_engine(url, **options), owned=True, **keep)


def _parse(db_url: object) -> sa.URL:
    if db_url == ":memory:":
        return sa.make_url("sqlite://")
    if isinstance(db_url, str | sa.URL):
        try:
            return sa.make_url(db_url)
        except (sa.exc.ArgumentError, ValueError):
            pass  # outside: its text repeats the URL, password included
    raise ConfigurationError(
        "db_url is not a database URL: write, for example, sqlite+aiosqlite:///sessions.db"
    )


def _shown(url: sa.URL) -> str:
    return url.render_as_string(hide_password=True)
