"""Opening a database: may it be used, and the first rows where nothing is."""

import logging
import secrets
import time
from collections.abc import Awaitable
from functools import partial

import sqlalchemy as sa

from adk_secure_sessions.backends import NoOpBackend
from adk_secure_sessions.backends.registry import Backends
from adk_secure_sessions.db.dialects import exclusively
from adk_secure_sessions.db.protocol import Executor, Executors, T
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
from adk_secure_sessions.storage.schema import FORMAT_VERSION, keyring, meta, metadata
from adk_secure_sessions.storage.survey import (
    CLEAR,
    DATABASE_ID,
    FORMAT,
    HOLDS,
    Part,
    Survey,
    check,
    check_together,
    look,
)

logger = logging.getLogger(__name__)

_ATTEMPTS = 8
# SQLite's own words for a file that cannot be used as it is.
_UNUSABLE = ("SQLITE_CANTOPEN", "SQLITE_NOTADB", "SQLITE_READONLY", "SQLITE_PERM", "SQLITE_AUTH")


async def open_database(
    executors: Executors, backends: Backends, create_tables: bool, known: Keyring | None = None
) -> Keyring:
    """Check the database and open its keyring, making both where there is none yet.

    Where the keys are apart, first all of the key database, then the other: a start after one
    that was killed in between goes on from there.  Without *create_tables*, the tables have
    to be there: see docs/sql.  *known* is the keyring as it was opened before: then nothing is
    made.

    Raises:
        ConfigurationError: a database cannot be used; it was left as it is.
        WrongKeyError, PlaintextRefusedError, KeyServiceError: see `open_keyring`.
    """
    if known is not None:
        return await open_existing(executors, backends, known)
    root = backends.writer.root_key
    clear = isinstance(backends.writer, NoOpBackend)
    marks = {CLEAR: "1"} if clear else {}
    for _ in range(_ATTEMPTS):  # again after each step, and when another process was first
        data, keys = await _survey(executors, create_tables)
        database_id = keys.database_id or secrets.token_bytes(16)
        now = time.time_ns() // 1000
        missing = [INDEX, DATA]
        opened: Keyring | None = None
        if keys.database_id is not None:
            opened = await open_keyring(keys.keyring, backends.roots, root.key_id, database_id)
            missing = [DATA] if opened.current_id is None else []
        marks |= {FORMAT: str(FORMAT_VERSION), DATABASE_ID: database_id.hex()}
        part = Part.KEYS if executors.are_apart else Part.ALL
        if opened is None or missing or not marks.keys() <= keys.meta.keys():
            fresh = await at_once(*(new_master(which, root, database_id, now) for which in missing))
            await _make(executors.keys, part, keys, marks, fresh)
        elif executors.are_apart and not marks.keys() <= data.meta.keys():
            await _make(executors.data, Part.DATA, data, marks, [])
        else:
            _warn(data, clear)
            return opened
    raise SecureSessionError("the database kept changing while it was opened: try again")


async def survey_existing(executors: Executors) -> Survey:
    """What a database of ours holds, without changing anything; the keyring is the key tables'.

    Raises:
        ConfigurationError: it cannot be used, or is not ours yet.
    """
    data, keys = await _survey(executors, create_tables=True)
    if data.database_id is None:
        raise ConfigurationError(
            "this database holds no encrypted sessions yet: make its tables and keys with "
            "`adk-secure-sessions init`, or start a service on it"
        )
    return data._replace(keyring=keys.keyring)


async def open_existing(
    executors: Executors, backends: Backends, known: Keyring | None = None
) -> Keyring:
    """The keyring of a database of ours, without changing anything.

    Of *known*, as it was opened before, no key is unwrapped again.

    Raises:
        ConfigurationError: see `survey_existing`; or it is not the database of *known*.
        WrongKeyError, PlaintextRefusedError, KeyServiceError: see `open_keyring`.
    """
    survey = await survey_existing(executors)
    assert survey.database_id is not None, "survey_existing refuses that"
    if known is not None and known.database_id != survey.database_id:
        raise ConfigurationError("another database was put in its place: start the service anew")
    writer, database_id = backends.writer.root_key.key_id, survey.database_id
    return await open_keyring(survey.keyring, backends.roots, writer, database_id, known)


async def _survey(executors: Executors, create_tables: bool) -> tuple[Survey, Survey]:
    """Of the data and of the keys, each in order, and a pair; one twice where they are not apart.

    Raises ConfigurationError.
    """
    if not executors.are_apart:
        survey = await _usable(executors.data.define(look, commit=False))
        check(survey, Part.ALL, create_tables)
        return survey, survey
    # In this order: what makes them makes the keys first.
    data = await _usable(executors.data.define(look, commit=False))
    keys = await _usable(executors.keys.define(look, commit=False), "key database's ")
    if keys.is_used and data.format_version is None:  # or was it made just now?
        data = await _usable(executors.data.define(look, commit=False))
    check(keys, Part.KEYS, create_tables)
    check(data, Part.DATA, create_tables)
    check_together(data, keys)
    return data, keys


async def _usable(work: Awaitable[T], whose: str = "") -> T:
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
        f"the {whose}SQLite file cannot be used: {reason}; check the path, its directory and "
        "permissions"
    )


def mark_clear(connection: sa.Connection) -> None:
    """Say in the database that some of it is in clear, before any is."""
    values = {meta.c.name: CLEAR, meta.c.value: "1"}
    if not connection.scalar(sa.select(meta.c.value).where(meta.c.name == CLEAR)):
        connection.execute(sa.insert(meta).values(values))


async def _make(
    executor: Executor,
    part: Part,
    expected: Survey,
    marks: dict[str, str],
    fresh: list[MasterKeyRow],
) -> None:
    """Make what is missing, unless the database has changed since it was surveyed."""
    if part.value is not None:
        marks = {**marks, HOLDS: part.value}
    work = partial(_establish, part, expected, marks, fresh)
    whose = "key database's " if part is Part.KEYS else ""
    await _usable(executor.define(work, commit=True), whose)


def _establish(
    part: Part,
    expected: Survey,
    marks: dict[str, str],
    fresh: list[MasterKeyRow],
    connection: sa.Connection,
) -> None:
    with exclusively(connection):
        if look(connection) != expected:
            return
        if part.missing(expected):
            metadata.create_all(connection, tables=part.tables)
        new = [{"name": name, "value": marks[name]} for name in marks if name not in expected.meta]
        if new:
            connection.execute(sa.insert(meta), new)
        if fresh:
            connection.execute(sa.insert(keyring), [row._asdict() for row in fresh])


def _warn(survey: Survey, clear: bool) -> None:
    if survey.adk_tables:
        logger.warning(
            "this database also holds ADK's own tables (sessions, events), which are in clear"
        )
    if survey.has_clear_records and not clear:
        logger.warning("this database holds, or once held, records in clear, by NoOpBackend")
