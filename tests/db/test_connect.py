"""From URLs and engines to executors.  `attacks` tests that errors tell no secret."""

import importlib
import re
import sys
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from adk_secure_sessions.db import connect
from adk_secure_sessions.db.async_engine import AsyncEngineExecutor
from adk_secure_sessions.db.connect import executors_for
from adk_secure_sessions.db.postgresql import AsyncpgExecutor
from adk_secure_sessions.db.protocol import Executor, Executors
from adk_secure_sessions.db.sqlite import SqliteExecutor, is_in_memory
from adk_secure_sessions.errors import ConfigurationError


def executors(
    url: Any = None, engine: Any = None, key_url: Any = None, key_engine: Any = None, **options: Any
) -> Executors:
    return executors_for(url, engine, key_url, key_engine, options)


@pytest.fixture
def engine() -> AsyncEngine:
    return create_async_engine("sqlite+aiosqlite://")


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("sqlite:///s.db", SqliteExecutor),
        ("sqlite+pysqlite:///s.db", SqliteExecutor),
        ("sqlite+aiosqlite:///s.db", SqliteExecutor),
        (sa.URL.create("sqlite", database="s.db"), SqliteExecutor),
        (":memory:", SqliteExecutor),
        ("postgresql+asyncpg://u:p@h/d", AsyncpgExecutor),
        ("postgresql+psycopg://u:p@h/d", AsyncEngineExecutor),
        ("mysql+asyncmy://u:p@h/d", AsyncEngineExecutor),
        ("mariadb+asyncmy://u:p@h/d", AsyncEngineExecutor),
    ],
)
def test_url_leads_to_its_kind_of_executor(url: Any, kind: type) -> None:
    found = executors(url)
    assert type(found.data) is kind
    assert found.keys is found.data


def test_engine_leads_to_its_kind_of_executor(engine: AsyncEngine) -> None:
    assert type(executors(engine=engine).data) is AsyncEngineExecutor
    by_asyncpg = create_async_engine("postgresql+asyncpg://u:p@h/d")
    assert type(executors(engine=by_asyncpg).data) is AsyncpgExecutor


def test_key_database_has_an_executor_of_its_own(engine: AsyncEngine) -> None:
    for found in (
        executors("sqlite:///s.db", key_url="sqlite:///k.db"),
        executors(":memory:", key_url=":memory:"),
        executors("sqlite:///s.db", key_engine=engine),
        executors(engine=engine, key_url="sqlite:///k.db"),
    ):
        assert found.has_key_database


REJECTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "nothing": ((), "exactly one of db_url and db_engine"),
    "URL and engine": (("sqlite://", "engine"), "exactly one of db_url and db_engine"),
    "two key databases": (
        ("sqlite:///s.db", None, "sqlite:///k.db", "engine"),
        "one of key_db_url and key_db_engine",
    ),
    "no URL": (("garbage",), r"^db_url \(--db, --to\) is not a database URL"),
    "no key URL": (("sqlite://", None, 5), r"key_db_url \(--key-db\) is not a database URL"),
    "no engine": ((None, 5), "db_engine must be a SQLAlchemy AsyncEngine, not int"),
    "synchronous engine": ((None, sa.create_engine("sqlite://")), "create_async_engine"),
    "no key engine": (("sqlite://", None, None, 5), "key_db_engine must be a SQLAlchemy"),
    "unknown driver of SQLite": (
        ("sqlite+nosuch:///s.db",),
        "not one of sqlite, sqlite\\+pysqlite",
    ),
    "unknown database": (("nosuch://h/d",), "names a database or driver that SQLAlchemy does not"),
    "URI of google-adk's commands": (
        ("encrypted+sqlite:///s.db?key=env:NAME",),
        r"the database URL encrypted\+sqlite://... is for `adk web`: omit encrypted\+ and op",
    ),
    "unknown driver": (("postgresql+nosuch://h/d",), "that SQLAlchemy does not know"),
    "synchronous driver of PostgreSQL": (
        ("postgresql+psycopg2://h/d",),
        r"synchronous driver: write postgresql\+asyncpg://, and pip install .asyncpg>=",
    ),
    "synchronous driver of MySQL": (
        ("mysql+pymysql://h/d",),
        r"synchronous driver: write mysql\+asyncmy://, and pip install .asyncmy>=",
    ),
    "driver of MySQL that is not installed": (
        ("mysql+mysqldb://h/d",),
        r"synchronous driver: write mysql\+asyncmy://, and pip install .asyncmy>=",
    ),
    "one URL twice": (("sqlite:///s.db", None, "sqlite:///s.db"), "must not be the database of"),
    "one file by two paths": (
        ("sqlite:///s.db", None, "sqlite:///./x/../s.db"),
        "must not be the database of",
    ),
    "one server with two passwords": (
        ("postgresql+asyncpg://u:p@h/d", None, "postgresql+psycopg://u:q@h/d"),
        "must not be the database of",
    ),
    "one engine twice": ((None, "engine", None, "engine"), "must not be the database of"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_rejected(name: str, engine: AsyncEngine) -> None:
    arguments, text = REJECTED[name]
    with pytest.raises(ConfigurationError, match=text):
        executors(*(engine if one == "engine" else one for one in arguments))


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), "60"])
def test_time_limit_that_is_no_positive_number_is_rejected(seconds: Any) -> None:
    with pytest.raises(ConfigurationError, match="read_timeout must be a positive number"):
        executors_for("sqlite://", read_timeout=seconds)


@pytest.mark.parametrize("url", ["sqlite://", "postgresql+asyncpg://u:p@h/d"])
def test_option_that_sqlalchemy_does_not_know_is_named(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot be used with these options.*nonsense"):
        executors(url, nonsense=1)


def test_options_do_not_go_with_an_engine(engine: AsyncEngine) -> None:
    with pytest.raises(ConfigurationError, match="echo, pool_size: engine options can be given"):
        executors(engine=engine, pool_size=1, echo=True)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes drivers unavailable, as if they were not installed."""

    def forget(*drivers: str) -> None:
        for driver in drivers:
            importlib.import_module(driver)
            for name in [name for name in sys.modules if name.partition(".")[0] == driver]:
                monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setattr(
            connect, "find_spec", lambda name: None if name in drivers else find_spec(name)
        )

    return forget


@pytest.mark.parametrize(
    ("url", "package"),
    [
        ("postgresql+asyncpg://u:p@h/d", "asyncpg>=0.30"),
        ("postgresql://u:p@h/d", "asyncpg>=0.30"),
        ("postgresql+psycopg://u:p@h/d", "psycopg[binary]"),
        ("mysql+asyncmy://u:p@h/d", "asyncmy>=0.2.10"),
        ("mysql://u:p@h/d", "asyncmy>=0.2.10"),
        ("mariadb://u:p@h/d", "asyncmy>=0.2.10"),
    ],
)
def test_driver_that_is_missing_is_named_with_what_to_install(
    without: Callable[..., None], url: str, package: str
) -> None:
    without("asyncpg", "psycopg", "asyncmy")
    with pytest.raises(ConfigurationError, match=re.escape(f"pip install '{package}'")):
        executors(url)


@pytest.mark.parametrize(
    ("url", "driver"),
    [
        ("postgresql://u:p@h/d", "asyncpg"),
        ("postgresql://u:p@h/d?sslmode=require", "asyncpg"),
        ("postgres://u:p@h/d", "asyncpg"),
        ("mysql://u:p@h/d", "asyncmy"),
        ("mariadb://u:p@h/d", "asyncmy"),
    ],
)
def test_url_without_a_driver_uses_the_async_driver_of_our_extra(url: str, driver: str) -> None:
    assert engine_of(executors(url).data).dialect.driver == driver


def test_url_without_a_driver_uses_psycopg_if_asyncpg_is_missing(
    without: Callable[..., None],
) -> None:
    without("asyncpg")
    assert engine_of(executors("postgresql://u:p@h/d").data).dialect.driver == "psycopg"


def engine_of(executor: Executor) -> AsyncEngine:
    assert isinstance(executor, AsyncEngineExecutor)
    return executor._engine  # there is no public name for it


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg2://user:needle@host/d",
        "mysql+pymysql://needle:needle@needle/needle?password=needle",
        "nosuch://user@host/d?password=needle",
        "postgresql+nosuch://user:pass/needle@host/d",
        "sqlite+nosuch:///d?key=needle",
        "sqlite+pysqlcipher:///d?key=needle",
        "postgresql+asyncpg://h/d?prepared_statement_cache_size=needle",
        "sqlite:///d?timeout=needle",
        "needle",
        "://needle",
        "postgresql://user:needle@host:needle/d",
    ],
)
def test_errors_show_nothing_of_a_url_but_its_driver(url: str) -> None:
    with pytest.raises(ConfigurationError) as info:
        executors(url)
    assert "needle" not in "".join(traceback.format_exception(info.value))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("sqlite://", True),
        ("sqlite:///:memory:", True),
        ("sqlite:///file::memory:?cache=shared&uri=true", True),
        ("sqlite:///file:name?mode=memory&uri=true", True),
        ("sqlite:///s.db", False),
        ("sqlite:///memory.db", False),
    ],
)
def test_database_in_memory_is_known_by_its_url(url: str, expected: bool) -> None:
    assert is_in_memory(sa.make_url(url)) is expected
