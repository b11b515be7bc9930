"""The database that maintenance works on, opened without changing anything in it."""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from adk_secure_sessions.backends import EncryptionBackend
from adk_secure_sessions.backends.registry import Backends, register
from adk_secure_sessions.db.connect import executors_for
from adk_secure_sessions.db.protocol import Executor, Executors, Parameters, Row
from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.keys.data_keys import DataKeys, StagedKeys
from adk_secure_sessions.keys.keyring import Keyring
from adk_secure_sessions.storage import (
    Store,
    Survey,
    UnitOfWork,
    data_keys,
    keyring,
    open_existing,
    repeated,
    survey_existing,
)

T = TypeVar("T")

# Commands meet each row once, one owner's after another's: remembering many only takes memory.
_CACHED = 64


class Limits(NamedTuple):
    """How much one statement of maintenance reads or names, and how long it waits.

    Attributes:
        rows: Rows of apps, users and sessions that are read with their states.
        headers: Rows of which only keys and record headers are read.
        names: Rows that one statement names by their ids.
        lock_wait: Seconds to wait for a lock, while services wait behind it.
    """

    rows: int = 100
    headers: int = 500
    names: int = 500
    lock_wait: int = 5


class Database:
    """A database of encrypted sessions, for the functions of this module; use `async with`.

    Services may read and write it meanwhile.  Only `init` makes tables.

    Args:
        db_url: As for `EncryptedSessionService`.
        backend: Its root key, and which records may be opened; None where no key is needed.
        additional_backends: What else may be opened, and with which root keys.
        db_engine: The caller's own engine, instead of `db_url`; it is not closed.
        key_db_url: Where the keys are, if not beside the data.
        key_db_engine: The caller's own engine for it.
        engine_kwargs: Options for the engine that `db_url` makes.

    Raises:
        ConfigurationError: Something of the above cannot be used.
    """

    def __init__(
        self,
        db_url: str | sa.URL | None = None,
        backend: EncryptionBackend | None = None,
        additional_backends: Sequence[EncryptionBackend] = (),
        *,
        db_engine: AsyncEngine | None = None,
        key_db_url: str | sa.URL | None = None,
        key_db_engine: AsyncEngine | None = None,
        **engine_kwargs: Any,
    ) -> None:
        if backend is None and additional_backends:
            raise ConfigurationError("additional_backends need a backend beside them")
        backends = None if backend is None else register(backend, additional_backends)
        executors = executors_for(db_url, db_engine, key_db_url, key_db_engine, engine_kwargs)
        self._files = [_sqlite_file(url) for url in (db_url, key_db_url) if url is not None]
        self.unit: UnitOfWork = UnitOfWork(
            executors,
            backends,
            self._open_keyring,
            cached_rows=_CACHED,
            cached_keys=_CACHED,
        )
        self._store = Store(self.unit, cached_sessions=_CACHED)
        self.has_keys: bool = backend is not None
        self.limits: Limits = Limits()

    @property
    def executors(self) -> Executors:
        return self.unit.executors

    @property
    def executor(self) -> Executor:
        """Runs statements on the data."""
        return self.executors.data

    @property
    def key_executor(self) -> Executor:
        """Runs statements on `secure_keyring` and `secure_data_keys`."""
        return self.executors.keys

    @property
    def backends(self) -> Backends:
        """Raises ConfigurationError if none was given."""
        return self.unit.backends

    async def survey(self) -> Survey:
        """What the database holds.  Raises ConfigurationError if it has no tables of ours yet."""
        self._check_file()
        return await repeated(lambda: survey_existing(self.executors))

    async def keys(self) -> DataKeys:
        """The keyring, unwrapped, and data keys under it.  Raises like `open_existing`."""
        return await self.unit.keys()

    async def store(self) -> Store:
        """What services read and write sessions with, on the same keys."""
        await self.keys()
        return self._store

    async def renew_keyring(self) -> Keyring:
        """Read the keyring again: master keys were added or removed."""
        keys = await self.keys()
        await self.unit.renew_keyring(keys.keyring)
        return keys.keyring

    async def keys_of(self, *owners: object) -> StagedKeys:
        """The data keys of *owners* as stored now; one that is not authentic raises when used."""
        return await self.unit.data_keys_of(*owners)

    async def read(self, query: sa.Executable, parameters: Parameters) -> Sequence[Row]:
        """Run one query of the data, again if its connection is lost."""
        return await self.unit.read(query, parameters)

    async def read_keys(self, query: sa.Executable, parameters: Parameters) -> Sequence[Row]:
        """The same, of `secure_keyring` and `secure_data_keys`."""
        return await self.unit.read_keys(query, parameters)

    def reader_of(
        self, table: sa.FromClause
    ) -> Callable[[sa.Executable, Parameters], Awaitable[Sequence[Row]]]:
        """Whichever of the two reads that table."""
        return self.read_keys if table in (keyring, data_keys) else self.read

    async def change(self, work: Callable[[sa.Connection], T], *, commit: bool = True) -> T:
        """Run *work*, which may be repeated, in one transaction on the data."""
        return await self.unit.change(work, commit=commit)

    async def change_keys(self, work: Callable[[sa.Connection], T], *, commit: bool = True) -> T:
        """The same, on `secure_keyring` and `secure_data_keys`."""
        return await self.unit.change_keys(work, commit=commit)

    async def close(self) -> None:
        """Release the connections and forget the keys."""
        await self._store.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _open_keyring(self, known: Keyring | None) -> Keyring:
        self._check_file()
        return await open_existing(self.executors, self.backends, known)

    def _check_file(self) -> None:
        for file in self._files:
            if file is not None and not file.exists():  # SQLite would make it
                raise ConfigurationError(f"there is no file {str(file)!r}")


def see_what_is_committed(connection: sa.Connection) -> None:
    """Have each statement of the transaction, now at its start, see what others committed."""
    if connection.dialect.name in ("postgresql", "mysql", "mariadb"):
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL READ COMMITTED").close()


def _sqlite_file(db_url: str | sa.URL) -> Path | None:
    if db_url == ":memory:":
        return None
    url = sa.make_url(db_url)
    name = url.database or ""
    if url.get_backend_name() != "sqlite" or name in ("", ":memory:") or name.startswith("file:"):
        return None
    return Path(name)
