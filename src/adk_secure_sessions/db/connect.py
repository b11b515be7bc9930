"""From a URL or an engine to the executor that suits it."""

import os
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from adk_secure_sessions.db.async_engine import AsyncEngineExecutor
from adk_secure_sessions.db.protocol import Executor, Executors
from adk_secure_sessions.db.sqlite import is_in_memory, sqlite_executor
from adk_secure_sessions.errors import ConfigurationError

_SQLITE_DRIVERS = ("sqlite", "sqlite+pysqlite", "sqlite+aiosqlite")
_EXTRAS = {
    "asyncpg": "'adk-secure-sessions[postgresql]'",
    "asyncmy": "'adk-secure-sessions[mysql]'",
}
_POOL_SIZE = 10
_ASYNC_DRIVERS = {"postgresql": "asyncpg", "mysql": "asyncmy", "mariadb": "asyncmy"}


def executors_for(
    db_url: str | sa.URL | None,
    db_engine: object | None,
    key_db_url: str | sa.URL | None,
    key_db_engine: object | None,
    engine_kwargs: dict[str, Any],
) -> Executors:
    """The executors for one of *db_url* and *db_engine*, and at most one of those for keys.

    *engine_kwargs* go with *db_url*.

    Raises:
        ConfigurationError: none or two of them, a URL or an option that SQLAlchemy does not
            take, a synchronous or unknown driver, a driver that is not installed; one
            database as both.
    """
    if (db_url is None) == (db_engine is None):
        raise ConfigurationError("give exactly one of db_url and db_engine")
    if key_db_url is not None and key_db_engine is not None:
        raise ConfigurationError("give one of key_db_url and key_db_engine, or none")
    place = _place("db", db_url, db_engine)
    if key_db_url is None and key_db_engine is None:
        data = _executor(place, engine_kwargs)
        return Executors(data, data)
    key_place = _place("key_db", key_db_url, key_db_engine)
    if place is key_place or _identity(place) == _identity(key_place):
        raise ConfigurationError(
            "the key database is to be another one than that of the data: "
            "leave it out to have all in one"
        )
    return Executors(_executor(place, engine_kwargs), _executor(key_place, {}))


def _place(name: str, url: object | None, engine: object | None) -> sa.URL | AsyncEngine:
    """The one that is given of the arguments *name*_url and *name*_engine."""
    if engine is None:
        return _parse(f"{name}_url", url)
    if isinstance(engine, AsyncEngine):
        return engine
    raise ConfigurationError(
        f"{name}_engine must be a SQLAlchemy AsyncEngine, not {type(engine).__name__}: "
        "make it with create_async_engine"
    )


def _identity(place: sa.URL | AsyncEngine) -> object:
    """Equal for two that are certainly one database; opening them tells the rest."""
    url = place.url if isinstance(place, AsyncEngine) else place
    kind = url.get_backend_name()
    if kind != "sqlite":
        return url._replace(drivername=kind, password=None)
    return object() if is_in_memory(url) else os.path.realpath(url.database or "")


def _executor(place: sa.URL | AsyncEngine, engine_kwargs: dict[str, Any]) -> Executor:
    if isinstance(place, AsyncEngine):
        if engine_kwargs:
            raise ConfigurationError(
                f"{', '.join(sorted(engine_kwargs))}: options of an engine go with db_url, "
                "not with db_engine"
            )
        return _for_engine(place, owned=False)
    url = place
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
        from adk_secure_sessions.db.postgresql import AsyncpgExecutor

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


def _parse(name: str, url: object) -> sa.URL:
    if url == ":memory:":
        return sa.make_url("sqlite://")
    if isinstance(url, str | sa.URL):
        try:
            return sa.make_url(url)
        except (sa.exc.ArgumentError, ValueError):
            pass  # outside: its text repeats the URL, password included
    raise ConfigurationError(
        f"{name} is not a database URL: write, for example, sqlite+aiosqlite:///sessions.db"
    )


def _shown(url: sa.URL) -> str:
    return url.render_as_string(hide_password=True)
