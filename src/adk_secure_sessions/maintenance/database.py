"""The database that maintenance works on, opened without changing anything in it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from adk_secure_sessions.backends import EncryptionBackend
from adk_secure_sessions.backends.registry import Backends, register
from adk_secure_sessions.db.connect import executors_for
from adk_secure_sessions.db.protocol import Executor, Parameters, Row, T
from adk_secure_sessions.db.retries import repeated
from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.keys.data_keys import DataKeys, StagedKeys, StaleKeyring
from adk_secure_sessions.keys.keyring import Keyring
from adk_secure_sessions.storage.opening import open_existing, survey_existing
from adk_secure_sessions.storage.owner_keys import Read, keys_of
from adk_secure_sessions.storage.schema import data_keys, keyring
from adk_secure_sessions.storage.store import Store
from adk_secure_sessions.storage.survey import Survey

# Rows are met once, one owner's after another's: to remember many would only take memory.
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
        self._backends = None if backend is None else register(backend, additional_backends)
        self.executors = executors_for(db_url, db_engine, key_db_url, key_db_engine, engine_kwargs)
        self._files = [_sqlite_file(url) for url in (db_url, key_db_url) if url is not None]
        self.limits = Limits()
        self._keys: DataKeys | None = None
        self._store: Store | None = None

    @property
    def executor(self) -> Executor:
        """Runs what is about the data."""
        return self.executors.data

    @property
    def key_executor(self) -> Executor:
        """Runs what is about `secure_keyring` and `secure_data_keys`."""
        return self.executors.keys

    @property
    def backends(self) -> Backends:
        """Raises ConfigurationError if none was given."""
        if self._backends is None:
            raise ConfigurationError("this needs the root key: give a backend")
        return self._backends

    @property
    def has_keys(self) -> bool:
        return self._backends is not None

    async def survey(self) -> Survey:
        """What the database holds.  Raises ConfigurationError if it is not ours yet."""
        self._check_file()
        return await repeated(lambda first: survey_existing(self.executors))

    async def keys(self) -> DataKeys:
        """The keyring, opened, and data keys under it.  Raises like `open_existing`."""
        if self._keys is None:
            backends = self.backends
            self._check_file()
            keyring = await repeated(lambda first: open_existing(self.executors, backends))
            writer = backends.writer.backend_id
            self._keys = DataKeys(keyring, backends.by_id, writer, _CACHED)
        return self._keys

    async def store(self) -> Store:
        """What services read and write sessions with, on the same keyring."""
        if self._store is None:
            keys = await self.keys()

            async def opened(known: Keyring | None) -> Keyring:
                return keys.keyring if known is None else await self._renewed(known)

            self._store = Store(
                self.executors,
                self.backends,
                opened,
                session_cache_size=_CACHED,
                data_key_cache_size=_CACHED,
            )
        return self._store

    async def renew_keyring(self) -> Keyring:
        """Read the keyring again: masters were made or dropped."""
        keys = await self.keys()
        keys.keyring = await self._renewed(keys.keyring)
        return keys.keyring

    async def keys_of(self, *owners: object) -> StagedKeys:
        """The data keys of *owners* as they are now.  What is bad is raised by their use."""
        keys = await self.keys()
        rows = await keys_of(self.read_keys, owners)
        staged = StagedKeys(keys, settled=False)
        try:
            staged.load(rows)
        except StaleKeyring:
            await self.renew_keyring()
            staged = StagedKeys(keys)
            staged.load(rows)
        return staged

    async def _renewed(self, known: Keyring) -> Keyring:
        return await repeated(lambda first: open_existing(self.executors, self.backends, known))

    async def read(self, query: sa.Executable, parameters: Parameters) -> Sequence[Row]:
        """Run one query of the data, again if its connection is lost."""
        return await repeated(lambda first: self.executor.read(query, parameters))

    async def read_keys(self, query: sa.Executable, parameters: Parameters) -> Sequence[Row]:
        """The same, of `secure_keyring` and `secure_data_keys`."""
        return await repeated(lambda first: self.key_executor.read(query, parameters))

    def reader_of(self, table: sa.FromClause) -> Read:
        """Whichever of the two reads that table."""
        return self.read_keys if table in (keyring, data_keys) else self.read

    async def change(self, work: Callable[[sa.Connection], T], *, commit: bool = True) -> T:
        """Run *work*, which may be run again, in one transaction on the data."""
        return await repeated(lambda first: self.executor.define(work, commit=commit), writes=True)

    async def change_keys(self, work: Callable[[sa.Connection], T], *, commit: bool = True) -> T:
        """The same, on `secure_keyring` and `secure_data_keys`."""
        return await repeated(
            lambda first: self.key_executor.define(work, commit=commit), writes=True
        )

    async def close(self) -> None:
        """Release the connections and forget the keys."""
        self._keys = self._store = None
        await self.executors.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

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
