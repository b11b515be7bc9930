"""The database that a maintenance command works on."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import sqlalchemy as sa

from adk_secure_sessions.audit import running_command
from adk_secure_sessions.backends import EncryptionBackend
from adk_secure_sessions.backends.registry import check_backends
from adk_secure_sessions.caches import Caches
from adk_secure_sessions.concurrency import ClosedByWith
from adk_secure_sessions.db.connect import executors_for, parsed_url
from adk_secure_sessions.db.dialects import LOCK_WAIT, dialect_of, has_table
from adk_secure_sessions.db.protocol import Executors, Parameters, Row, with_retries
from adk_secure_sessions.db.sqlite import file_of, is_in_memory
from adk_secure_sessions.errors import ConfigurationError, DatabaseError
from adk_secure_sessions.formats.records import Packing
from adk_secure_sessions.hiding import HoldsSecrets, hides_locals
from adk_secure_sessions.keys.keyring import Keyring
from adk_secure_sessions.storage.features.audit_trail import AuditTrail
from adk_secure_sessions.storage.features.imports import Imports
from adk_secure_sessions.storage.features.search_index import SearchIndex
from adk_secure_sessions.storage.opening import open_surveyed, survey_existing
from adk_secure_sessions.storage.operation_runner import OperationRunner
from adk_secure_sessions.storage.queries import first_rows
from adk_secure_sessions.storage.schema import (
    IS_COLLECTION,
    audit_records,
    data_keys,
    keyring,
    sessions,
)
from adk_secure_sessions.storage.survey import FeatureName, Survey, survey_database

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine  # this import takes a third of a second

# A command reads each row once, one owner after another, so larger caches would only take memory.
_CACHES = Caches(sessions=64, data_keys=64)


class StatementLimits(NamedTuple):
    """Limits for one statement of a maintenance command."""

    rows_per_statement: int = 100  # rows of apps, users or sessions, with their states
    # Rows of which only primary keys and record headers are read, or listed ids.
    ids_per_statement: int = 500
    lock_wait: int = LOCK_WAIT  # seconds to wait for the lock of a table that is rewritten


class Description(NamedTuple):
    """What identifies a database, a directory or a bucket to a person."""

    server: str | None  # the host and the port in the URL; None for a SQLite file or a directory
    name: str  # the name of the database or the bucket, or the absolute path of the file
    item_count: int  # the number of sessions or artifacts
    updated_at: int | None  # the last of all updates, in microseconds since 1970; None if unknown
    kind: str = "database"
    item_noun: str = "session"  # what is counted


def describe(
    connection: sa.Connection, table: sa.FromClause | None, time_column: str, *where: Any
) -> Description:
    """Describe the database whose sessions are the rows of *table* for which *where* is true."""
    dialect = dialect_of(connection)
    # Ask the server for the name: a pooler may have another name for the database.
    name = connection.exec_driver_sql(f"SELECT {dialect.current_database}").scalar()
    if isinstance(name, bytes):  # while google-adk's tables are read, SQLite returns bytes
        name = name.decode(errors="backslashreplace")
    server = _server(connection.engine.url) if dialect.is_server else None
    number, updated_at = 0, None
    if table is not None:
        query = sa.select(sa.func.count(), sa.func.max(table.c[time_column])).select_from(table)
        ((number, updated_at),) = connection.execute(query.where(*where))
    return Description(server, name or "", number, updated_at)


def _server(url: sa.URL) -> str:
    hosts = url.query.get("host") or url.query.get("unix_socket") or url.host or "localhost"
    port = "" if url.port is None else f":{url.port}"
    return ", ".join([hosts] if isinstance(hosts, str) else hosts) + port


@hides_locals
class Database(HoldsSecrets, ClosedByWith):
    """A database of encrypted sessions, for the maintenance functions; use it with `async with`.

    Services may keep reading and writing the database.  Only `init` and `move_keys` create tables
    and, if a feature needs tables of its own, the first command that uses the feature.

    Args:
        db_url: The database URL, in the same form as for `EncryptedSessionService`.
        backend: The backend that encrypts new records; None if the command needs no root key.
        additional_backends: Other backends, if the database may contain their records, or master
            keys that their root keys wrap.
        db_engine: Your own engine, instead of `db_url`.  `close` does not close it.
        key_db_url: The URL of the key database, if there is one.
        key_db_engine: Your own engine for the key database, instead of `key_db_url`.
        packing: How `migrate` compresses and pads what it writes.  A rotation does not need this
            argument: it keeps values as they are.
        engine_kwargs: Options of the engine that is created for `db_url`.

    Raises:
        ConfigurationError: One of these arguments cannot be used.
    """

    def __init__(
        self,
        db_url: str | sa.URL | None = None,
        backend: EncryptionBackend | None = None,
        additional_backends: Sequence[EncryptionBackend] = (),
        *,
        db_engine: "AsyncEngine | None" = None,
        key_db_url: str | sa.URL | None = None,
        key_db_engine: "AsyncEngine | None" = None,
        packing: Packing = Packing(),
        **engine_kwargs: Any,
    ) -> None:
        if backend is None and additional_backends:
            raise ConfigurationError("additional_backends require a backend")
        backends = None if backend is None else check_backends(backend, additional_backends)
        executors = executors_for(db_url, db_engine, key_db_url, key_db_engine, engine_kwargs)
        self._all_executors = executors
        urls = [parsed_url("db_url", url) if url else None for url in (db_url, key_db_url)]
        self._files = [file_of(url) if url else None for url in urls]
        self._is_in_memory = any(
            url.get_backend_name() == "sqlite" and is_in_memory(url) for url in urls if url
        )
        self.runner: OperationRunner = OperationRunner(
            executors,
            backends,
            self._open_keyring,
            cache_sizes=_CACHES,
            keyring_pause=0,
            before_use=self._record_command,
            packing=packing,
        )
        self.trail: AuditTrail = AuditTrail(self.runner, warns=False)
        # The feature `audit`, if the trail had records but the feature list lacked it: somebody
        # has replayed an older list, which the command has corrected.
        self.unlisted_features: set[str] = set()
        self.search_index: SearchIndex = SearchIndex(self.runner)
        self.imports: Imports = Imports(self.runner, self.search_index)
        self.has_root_keys: bool = backend is not None
        self.limits: StatementLimits = StatementLimits()

    def use_keys(self, *, in_key_database: bool) -> None:
        """Use the keys in the key database that was given, or those in the data database."""
        data = self._all_executors.data
        self.runner.executors = self._all_executors if in_key_database else Executors(data, data)

    def reject_in_memory(self) -> None:
        """Raise ConfigurationError if a URL names a SQLite database in memory, not a file."""
        if self._is_in_memory:
            raise ConfigurationError(
                "the URL names a database in memory, which would be lost when the command ends: "
                "write the path of the file, for example sqlite:///sessions.db"
            )

    def require_files(self, *, of_keys: bool = True) -> None:
        """Raise ConfigurationError if a SQLite file is missing, which opening would create."""
        for file in self._files if of_keys else self._files[:1]:
            if file is not None and not file.exists():
                raise ConfigurationError(
                    f"there is no file {str(file)!r}: check the URL and the working directory, or "
                    "create the database with `adk-secure-sessions init`"
                )

    async def survey_existing(self) -> Survey:
        """Read which tables exist, and the rows of `secure_meta` and `secure_keyring`.

        Raise ConfigurationError if the database does not exist, or cannot be used.
        """
        self.require_files()
        return await with_retries(lambda: survey_existing(self.runner.executors))

    async def survey_unchecked(self) -> tuple[Survey, Survey]:
        """Survey the data database and the key database, also new ones or ones that do not match.

        Without a key database, both are the same.
        """
        data, keys = self.runner.executors
        survey = await with_retries(lambda: survey_database(data))
        if not self.runner.executors.has_key_database:
            return survey, survey
        return survey, await with_retries(lambda: survey_database(keys, is_key_database=True))

    async def open_surveyed(self, survey: Survey) -> Keyring:
        """Unwrap the keyring of *survey*, and authenticate the features; see `open_keyring`."""
        executors, backends = self.runner.executors, self.runner.backends
        return await with_retries(lambda: open_surveyed(executors, survey, backends))

    async def describe(self) -> Description:
        """Describe the database to a person who is to confirm a command; this needs no root key."""
        self.require_files(of_keys=False)

        def work(connection: sa.Connection) -> Description:
            table = sessions if has_table(connection, sessions) else None
            return describe(connection, table, "updated_at", ~IS_COLLECTION)

        description = await self.runner.data_db.run_sync(work, commit=False)
        # The time is not authenticated: a modified time may have another type.
        is_time = isinstance(description.updated_at, int)
        return description if is_time else description._replace(updated_at=None)

    async def is_new(self) -> bool:
        """Return whether the database does not exist yet, or has no tables of this package."""
        file = self._files[0]
        if file is not None and not file.exists():
            return True  # opening the database would create the file
        survey = await with_retries(lambda: survey_database(self.runner.executors.data))
        return survey.format_version is None

    async def keyring(self) -> Keyring:
        return await self.runner.keyring()

    async def reread_keyring(self) -> Keyring:
        """Read the keyring again and return it.  Call this method after master keys changed."""
        database_keys = await self.runner.database_keys()
        await self.runner.reread_keyring(database_keys, database_keys.keyring)
        return database_keys.keyring

    def reader_for(
        self, table: sa.FromClause
    ) -> Callable[[sa.Executable, Parameters], Awaitable[Sequence[Row]]]:
        """Return the function that reads *table*, a key table or another one."""
        return (self.runner.key_db if table in (keyring, data_keys) else self.runner.data_db).read

    async def close(self) -> None:
        """Close the connections and remove the keys from memory."""
        try:
            await self.runner.close()
        finally:
            self.trail.close()  # also log the heads of the writes that just ended

    async def _record_command(self, keyring: Keyring) -> None:
        command = running_command()
        is_recorded = command is not None and self.trail in command.trails
        if is_recorded or not keyring.has_audit_table or keyring.separation is not None:
            return
        is_listed = FeatureName.AUDIT in keyring.features
        if not is_listed and await self.runner.data_db.read(_ANY_RECORD, {}):
            self.unlisted_features.add(FeatureName.AUDIT)
        if command is None:
            return
        try:
            await command.record_start(self.trail, is_prepared=is_listed)
        except DatabaseError as error:
            error.args = (
                f"no record of this command can be stored in the audit trail: {error}; if you can "
                "only read the database, copy it first",
            )
            raise
        keyring.features |= {FeatureName.AUDIT}

    async def _open_keyring(self, known: Keyring | None) -> Keyring:
        self.require_files()
        survey = await survey_existing(self.runner.executors)
        return await open_surveyed(self.runner.executors, survey, self.runner.backends, known)


def require_no_wrapper(survey: Survey, command: str) -> None:
    if FeatureName.WRAPPER in survey.features:
        raise ConfigurationError(
            f"EncryptedSessionWrapper uses this database, and `{command}` cannot see the records "
            "that another session service stores: no key was changed"
        )


_ANY_RECORD = first_rows(sa.select(audit_records.c.number), 1)
