"""Opening a database: what is there, may it be used, and the first rows where nothing is."""

import logging
import secrets
import time
from collections.abc import Awaitable
from functools import partial
from typing import NamedTuple

import sqlalchemy as sa

from adk_secure_sessions.backends import NoOpBackend
from adk_secure_sessions.backends.registry import Backends
from adk_secure_sessions.errors import ConfigurationError, SecureSessionError, WrongKeyError
from adk_secure_sessions.keys.keyring import (
    DATA,
    INDEX,
    Keyring,
    MasterKeyRow,
    new_master,
    open_keyring,
)
from adk_secure_sessions.loops import at_once
from adk_secure_sessions.storage.connection import Executor, T
from adk_secure_sessions.storage.dialect import exclusively
from adk_secure_sessions.storage.tables import FORMAT_VERSION, data_keys, keyring, meta, metadata

logger = logging.getLogger(__name__)

_FORMAT, _DATABASE_ID, _CLEAR = "format", "database_id", "plaintext"
_ATTEMPTS = 5
# SQLite's own words for a file that cannot be used as it is.
_UNUSABLE = ("SQLITE_CANTOPEN", "SQLITE_NOTADB", "SQLITE_READONLY", "SQLITE_PERM", "SQLITE_AUTH")


class Survey(NamedTuple):
    """What a database holds."""

    missing_tables: frozenset[str]
    alien_tables: tuple[str, ...]
    adk_tables: bool
    has_data_keys: bool
    meta: dict[str, str]
    keyring: list[MasterKeyRow]

    @property
    def format_version(self) -> str | None:
        """As stored; None in a database that is not ours yet."""
        return self.meta.get(_FORMAT)

    @property
    def has_clear_records(self) -> bool:
        """Whether `NoOpBackend` has written there; nothing vouches for it."""
        return _CLEAR in self.meta

    @property
    def database_id(self) -> bytes | None:
        """Random, made with the database; None in one that is not ours yet."""
        text = self.meta.get(_DATABASE_ID)
        return bytes.fromhex(str(text)) if text else None


async def open_database(
    executor: Executor, backends: Backends, create_tables: bool, known: Keyring | None = None
) -> Keyring:
    """Check the database and open its keyring, making both where there is none yet.

    Without *create_tables*, the tables have to be there: see docs/sql.  *known* is the keyring
    as it was opened before: then nothing is made.

    Raises:
        ConfigurationError: the database cannot be used; it was left as it is.
        WrongKeyError, PlaintextRefusedError, KeyServiceError: see `open_keyring`.
    """
    if known is not None:
        return await open_existing(executor, backends, known)
    return await _usable(_open(executor, backends, create_tables))


async def survey_existing(executor: Executor) -> Survey:
    """What a database of ours holds, without changing anything.

    Raises:
        ConfigurationError: it cannot be used, or is not ours yet.
    """
    survey = await _usable(executor.define(look, commit=False))
    _check(survey, create_tables=True)
    if survey.database_id is None:
        raise ConfigurationError(
            "this database holds no encrypted sessions yet: make its tables and keys with "
            "`adk-secure-sessions init`, or start a service on it"
        )
    return survey


async def open_existing(
    executor: Executor, backends: Backends, known: Keyring | None = None
) -> Keyring:
    """The keyring of a database of ours, without changing anything.

    Of *known*, as it was opened before, no key is unwrapped again.

    Raises:
        ConfigurationError: see `survey_existing`; or it is not the database of *known*.
        WrongKeyError, PlaintextRefusedError, KeyServiceError: see `open_keyring`.
    """
    survey = await survey_existing(executor)
    assert survey.database_id is not None, "survey_existing refuses that"
    if known is not None and known.database_id != survey.database_id:
        raise ConfigurationError("another database was put in its place: start the service anew")
    writer, database_id = backends.writer.root_key.key_id, survey.database_id
    return await open_keyring(survey.keyring, backends.roots, writer, database_id, known)


async def _usable(work: Awaitable[T]) -> T:
    try:
        return await work
    except sa.exc.DBAPIError as error:
        name = getattr(error.orig, "sqlite_errorname", "")
        reason = str(error.orig)
        undecodable = "Could not decode" in reason
        if not undecodable and not name.startswith(_UNUSABLE):
            raise
    if undecodable:  # the reason quotes what is stored
        raise WrongKeyError("secure_meta or secure_keyring was altered: restore it from a backup")
    raise ConfigurationError(
        f"the SQLite file cannot be used: {reason}; check the path, its directory and permissions"
    )


async def _open(executor: Executor, backends: Backends, create_tables: bool) -> Keyring:
    root = backends.writer.root_key
    clear = isinstance(backends.writer, NoOpBackend)
    for _ in range(_ATTEMPTS):  # again when another process was first
        survey = await executor.define(look, commit=False)
        _check(survey, create_tables)
        database_id = survey.database_id or secrets.token_bytes(16)
        now = time.time_ns() // 1000
        missing = [INDEX, DATA]
        if survey.database_id is not None:
            opened = await open_keyring(survey.keyring, backends.roots, root.key_id, database_id)
            missing = [DATA] if opened.current_id is None else []
            if not missing and (not clear or _CLEAR in survey.meta):
                _warn(survey, clear)
                return opened
        fresh = await at_once(*(new_master(which, root, database_id, now) for which in missing))
        values = {_FORMAT: str(FORMAT_VERSION), _DATABASE_ID: database_id.hex()}
        if clear:
            values[_CLEAR] = "1"
        await executor.define(partial(_establish, survey, values, fresh), commit=True)
    raise SecureSessionError("the database kept changing while it was opened: try again")


def mark_clear(connection: sa.Connection) -> None:
    """Say in the database that some of it is in clear, before any is."""
    values = {meta.c.name: _CLEAR, meta.c.value: "1"}
    if not connection.scalar(sa.select(meta.c.value).where(meta.c.name == _CLEAR)):
        connection.execute(sa.insert(meta).values(values))


def look(connection: sa.Connection) -> Survey:
    """Read what there is, changing nothing."""
    survey = _look(connection)
    if survey.missing_tables and survey.meta:
        # Perhaps another process made them after we had asked for their names.
        survey = _look(connection)
    return survey


def _look(connection: sa.Connection) -> Survey:
    present = set(sa.inspect(connection).get_table_names())
    alien = _alien([table for table in metadata.sorted_tables if table.name in present], connection)
    missing = frozenset(metadata.tables) - present
    values: dict[str, str] = {}
    masters: list[MasterKeyRow] = []
    if not alien and meta.name in present:
        values = {row.name: row.value for row in connection.execute(sa.select(meta))}
    if not alien and keyring.name in present:
        c = keyring.c
        query = sa.select(c.id, c.purpose, c.root_key_id, c.created_at, c.wrapped)
        rows = connection.execute(query.order_by(c.created_at, c.id))
        masters = [MasterKeyRow(*row) for row in rows]
    used = False
    if not alien and data_keys.name in present:
        used = bool(connection.scalar(sa.select(sa.exists(sa.select(data_keys)))))
    adk = {"sessions", "events"} <= present
    return Survey(missing, tuple(alien), adk, used, values, masters)


def _alien(tables: list[sa.Table], connection: sa.Connection) -> list[str]:
    """The names of those of *tables* that lack a column of ours."""
    if not tables:
        return []
    # Reflecting each takes a hundred times as long as naming all columns in one query.
    columns = [", ".join(table.c.keys()) for table in tables]
    members = [
        f"SELECT 1 FROM (SELECT {listed} FROM {table.name}) AS t WHERE 1 = 0"  # noqa: S608
        for listed, table in zip(columns, tables, strict=True)
    ]
    try:
        connection.execute(sa.text(" UNION ALL ".join(members)))
        return []
    except sa.exc.DBAPIError:
        connection.rollback()
    inspector = sa.inspect(connection)
    names = [
        (table, {column["name"] for column in inspector.get_columns(table.name)})
        for table in tables
    ]
    return [table.name for table, present in names if not present.issuperset(table.c.keys())]


def _establish(
    expected: Survey, values: dict[str, str], fresh: list[MasterKeyRow], connection: sa.Connection
) -> None:
    """Make what is missing, unless the database has changed since it was surveyed."""
    with exclusively(connection):
        if look(connection) != expected:
            return
        if expected.missing_tables:
            metadata.create_all(connection)
        new = [
            {"name": name, "value": values[name]} for name in values if name not in expected.meta
        ]
        if new:
            connection.execute(sa.insert(meta), new)
        if fresh:
            connection.execute(sa.insert(keyring), [row._asdict() for row in fresh])


def _check(survey: Survey, create_tables: bool) -> None:
    if survey.alien_tables:
        raise ConfigurationError(
            f"the table {survey.alien_tables[0]} was not made by adk-secure-sessions: "
            "use another database or schema"
        )
    if survey.missing_tables and not create_tables:
        raise ConfigurationError(
            f"the table {min(survey.missing_tables)} is missing, and create_tables is False: "
            "run the statements of docs/sql for this kind of database"
        )
    version = survey.meta.get(_FORMAT)
    if version is None:
        if survey.meta or survey.keyring or survey.has_data_keys:
            raise ConfigurationError(
                "secure_meta says no format version, though there is data: restore that table"
            )
        return
    if version != str(FORMAT_VERSION):
        raise ConfigurationError(
            f"the database has format {version!r} and this version of adk-secure-sessions reads "
            f"format {FORMAT_VERSION}: install the version that goes with it"
        )
    if survey.missing_tables:
        raise ConfigurationError(
            f"the table {min(survey.missing_tables)} was removed: restore it from a backup"
        )
    try:
        if survey.database_id is not None:
            return
    except ValueError:
        pass
    raise ConfigurationError("secure_meta says no valid database id: restore that table")


def _warn(survey: Survey, clear: bool) -> None:
    if survey.adk_tables:
        logger.warning(
            "this database also holds ADK's own tables (sessions, events), which are in clear"
        )
    if _CLEAR in survey.meta and not clear:
        logger.warning("this database holds, or once held, records in clear, by NoOpBackend")
