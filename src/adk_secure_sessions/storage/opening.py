"""Open a database: create missing tables and keys, unwrap the keyring, authenticate the features.

`open_database` surveys and checks the database again after each step, until nothing is missing.
"""

import logging
import secrets
from collections.abc import Sequence

import sqlalchemy as sa

from adk_secure_sessions.audit import record_new_key
from adk_secure_sessions.backends.registry import Backends
from adk_secure_sessions.concurrency import gather_all
from adk_secure_sessions.db.dialects import already_exists, dialect_of
from adk_secure_sessions.db.protocol import Executor, Executors
from adk_secure_sessions.errors import ConfigurationError, SecureSessionError
from adk_secure_sessions.formats.times import time_now
from adk_secure_sessions.keys.keyring import (
    DATA_MASTER,
    INDEX_MASTER,
    Keyring,
    MasterKeyRow,
    check_row_count,
    new_master,
    open_keyring,
)
from adk_secure_sessions.storage import meta, schema
from adk_secure_sessions.storage.feature_list import REPLACED_TEXT, features_with_mac, load_features
from adk_secure_sessions.storage.features.index_rows import MAX_MARKS, read_marks
from adk_secure_sessions.storage.schema import FORMAT_VERSION, metadata, state_index
from adk_secure_sessions.storage.schema import keyring as keyring_table
from adk_secure_sessions.storage.survey import (
    FeatureName,
    Survey,
    TableSet,
    run_while_opening,
    survey_connection,
    survey_usable,
    with_key_survey,
)

logger: logging.Logger = logging.getLogger(__name__)

# How often `open_database` surveys a database before it fails.  It surveys again after each step,
# and other processes may create tables and keys at the same time.
_ATTEMPTS = 8


async def open_database(
    executors: Executors, backends: Backends, create_tables: bool, known: Keyring | None = None
) -> Keyring:
    """Check the database, create missing tables and keys, and open the keyring.

    The tables and keys of a key database are created first, so that after a crash between the two,
    the next start creates the rest.  If *known* is given, a keyring opened earlier, nothing is
    created, and its keys are not unwrapped again.  If a key service fails while a new or changed
    row is unwrapped, the result does not contain the master key of this row until a later call, so
    that a running service keeps working.
    """
    if known is not None:
        survey = await survey_existing(executors, known)
        survey.reject_unfinished(FeatureName.SEPARATING)
        return await open_surveyed(executors, survey, backends, known, is_service=True)
    root = backends.writing_backend.root_key
    meta_texts = {meta.PLAINTEXT: "1"} if backends.stores_plaintext else {}
    for _ in range(_ATTEMPTS):  # survey again after each step
        data, key_survey, keyring = await open_for_service(executors, backends, create_tables)
        database_id = key_survey.database_id or secrets.token_bytes(16)
        now = time_now()
        purposes = [INDEX_MASTER, DATA_MASTER]
        if keyring is not None:
            purposes = [DATA_MASTER] if keyring.wrapping_master_id is None else []
        meta_texts |= {meta.FORMAT: str(FORMAT_VERSION), meta.DATABASE_ID: database_id.hex()}
        table_set = TableSet.KEYS if executors.has_key_database else TableSet.ALL
        if keyring is None or purposes or not meta_texts.keys() <= key_survey.meta_texts.keys():
            new = (new_master(one, root, database_id, now) for one in purposes)
            masters = await gather_all(*new)
            new_meta = meta_texts
            if keyring is None:
                (_, index_master), _ = masters
                features = features_with_mac(index_master.index_master(), database_id)
                new_meta = {**meta_texts, meta.FEATURES: features}
            new_rows = [row for row, _ in masters]
            executor = executors.keys
            if await _create_missing(executor, table_set, key_survey, new_meta, new_rows):
                for row in new_rows:
                    kind = f"{row.purpose} master"
                    record_new_key(database_id, kind, row.id, root_key=row.root_key_id)
        elif executors.has_key_database and not meta_texts.keys() <= data.meta_texts.keys():
            await _create_missing(executors.data, TableSet.DATA, data, meta_texts, [])
        else:
            _warn_of_plaintext(data, backends.stores_plaintext)
            return keyring
    raise SecureSessionError(
        "the database kept changing while it was opened: try again", retryable=True
    )


async def open_for_service(
    executors: Executors, backends: Backends, create_tables: bool
) -> tuple[Survey, Survey, Keyring | None]:
    """Check the database and open its keys as a service does when it starts; write nothing.

    Return the surveys of the data database and of the key database, and the keyring; None if the
    key tables are new.  `check` also calls this function, so that both accept the same databases.
    """
    data, key_survey = await survey_usable(executors, create_tables)
    if key_survey.database_id is None:
        return data, key_survey, None
    key_survey.reject_unfinished(FeatureName.SEPARATING)
    keyring = await open_surveyed(executors, with_key_survey(data, key_survey), backends)
    return data, key_survey, keyring


async def survey_existing(executors: Executors, known: Keyring | None = None) -> Survey:
    """Check and survey a database that already exists, without changing it; see `with_key_survey`.

    A running service passes the keyring that it has accepted, so that it accepts a keyring to which
    an attacker has added many rows.
    """
    known_ids = () if known is None else known.rows.keys()
    data, key_survey = await survey_usable(executors, True, known_ids)
    data.reject_new()
    if known is None:
        check_row_count(key_survey.master_row_count)
    return with_key_survey(data, key_survey)


async def open_surveyed(
    executors: Executors,
    survey: Survey,
    backends: Backends,
    known: Keyring | None = None,
    *,
    is_service: bool = False,
) -> Keyring:
    """Unwrap the keyring of *survey*, and authenticate the features; see `open_keyring`."""
    if known is not None and known.database_id != survey.existing_id:
        raise ConfigurationError(REPLACED_TEXT)
    keyring = await open_keyring(
        survey.master_rows,
        backends.roots,
        backends.writing_backend.root_key.key_id,
        survey.existing_id,
        known,
        is_service=is_service,
        row_count=survey.master_row_count,
    )
    load_features(survey, keyring)
    if known is not None:
        keyring.indexed_key_tags = known.indexed_key_tags
    # Read the marks even if the feature list lacks the feature: otherwise, an attacker who
    # replays an older list could stop the writers from maintaining the rows.
    if state_index.name in survey.tables:
        marks = await read_marks(executors.data.read, keyring.index_master)
        if len(marks) > MAX_MARKS:
            logger.error(
                "secure_state_index has more than %d marks: somebody has added rows, and the rows "
                "of some keys are not maintained; run `verify`",
                MAX_MARKS,
            )
        keyring.indexed_key_tags.update(
            tag for tag, state in marks if isinstance(tag, bytes) and state is not None
        )
    return keyring


async def _create_missing(
    executor: Executor,
    table_set: TableSet,
    expected: Survey,
    meta_texts: dict[str, str],
    masters: list[MasterKeyRow],
) -> bool:
    """Create missing tables and rows; return False if the database has changed from *expected*."""
    if table_set.value is not None:
        meta_texts = {**meta_texts, meta.HOLDS: table_set.value}

    def create(connection: sa.Connection) -> bool:
        with dialect_of(connection).exclusively(connection):
            if survey_connection(connection) != expected:
                return False
            if table_set.missing(expected) and not create_tables_of(table_set.tables, connection):
                if survey_connection(connection) == expected:
                    raise ConfigurationError(
                        "the database says that a table exists, but does not show it: check that "
                        "no other table, index or type has the name of a table of this package, "
                        "and that the account may see all tables"
                    )
                return False
            # Insert the rows: `meta.put` would replace those of another process.  Where
            # `exclusively` holds no lock, the other process may have created the database after
            # `survey_connection`.
            if new := meta_texts.keys() - expected.meta_texts.keys():
                rows = [{"name": name, "value": meta_texts[name]} for name in new]
                connection.execute(sa.insert(schema.meta_table), rows)
            if masters:
                connection.execute(sa.insert(keyring_table), [row._asdict() for row in masters])
        return True

    is_keys = table_set is TableSet.KEYS
    return await run_while_opening(executor, create, commit=True, is_key_database=is_keys)


def create_tables_of(tables: Sequence[sa.Table], connection: sa.Connection) -> bool:
    """Create the missing tables among *tables*; roll back and return False if another process did
    the same: `exclusively` does not prevent this on every database.
    """
    # MySQL and MariaDB commit each CREATE TABLE, so there, the tables can be created one by one.
    for _ in tables if dialect_of(connection).commits_each_table else tables[:1]:
        try:
            metadata.create_all(connection, tables=tables)
            return True
        except sa.exc.DBAPIError as error:
            if not already_exists(error):
                raise
        connection.rollback()
    return False


def _warn_of_plaintext(survey: Survey, writes_plaintext: bool) -> None:
    if survey.has_adk_tables:
        logger.warning(
            "this database also holds the tables sessions and events of ADK, which are plaintext, "
            "or of adk-secure-sessions 1.x, whose ids and times are plaintext: `migrate copy` "
            "copies them"
        )
    if survey.has_plaintext_records and not writes_plaintext:
        logger.warning(
            "this database holds, or once held, plaintext records written by NoOpBackend"
        )
