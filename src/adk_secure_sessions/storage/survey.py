"""Find out what a database contains, and reject a database that cannot be used."""

import re
from collections.abc import Callable, Collection
from enum import Enum, StrEnum
from functools import partial
from typing import NamedTuple, TypeVar

import sqlalchemy as sa

from adk_secure_sessions.db.protocol import Executor, Executors
from adk_secure_sessions.errors import ConfigurationError, DatabaseError
from adk_secure_sessions.keys.keyring import MAX_MASTERS, MasterKeyRow
from adk_secure_sessions.storage import meta, schema
from adk_secure_sessions.storage.queries import MASTER_KEYS
from adk_secure_sessions.storage.schema import (
    DATA_TABLES,
    FEATURE_TABLES,
    FORMAT_VERSION,
    KEY_TABLES,
    TABLES,
    audit_records,
    keyring,
    metadata,
    migrated,
    state_index,
)

T = TypeVar("T")


class FeatureName(StrEnum):
    """The features of databases, by the names that the stored feature list contains."""

    COLLECTIONS = "collections"  # has collections (artifacts, memory)
    WRAPPER = "wrapper"  # its data keys also encrypt records stored elsewhere
    EXPIRY = "expiry"  # sessions may expire
    MIGRATION = "migration"  # has sessions that `migrate` has copied
    AUDIT = "audit"  # stores an audit trail
    STATE_INDEX = "state-index"  # has keyed hashes of state values
    SEPARATING = "separating"  # is a copy that `separate` has not finished
    MOVING = "moving"  # `move_keys` has not finished moving its keys


NO_FEATURES = "-"  # stands for an empty list
# The known features, and the tables of those that have a table.
KNOWN_FEATURES: dict[str, sa.Table | None] = dict.fromkeys(FeatureName) | {
    FeatureName.MIGRATION: migrated,
    FeatureName.AUDIT: audit_records,
    FeatureName.STATE_INDEX: state_index,
}
_UNFINISHED: dict[str, str] = {
    # A service would encrypt new records with data keys that the original database also has.
    FeatureName.SEPARATING: (
        "this copy of a database is being separated: run `adk-secure-sessions separate` again, "
        "until it has ended"
    ),
    # A service would use keys that the command is about to delete.
    FeatureName.MOVING: (
        "the keys of this database are being moved: run `adk-secure-sessions move-keys` again, "
        "until it has ended"
    ),
}
_FEATURE_NAME = "[a-z][-a-z0-9_.]*"
_FEATURES_FORM = rf"(?P<names>-|{_FEATURE_NAME}(?:,{_FEATURE_NAME})*) (?P<mac>[0-9a-f]{{32}})"
SEPARATION_FORM = (
    r"(?P<text>(?P<old>[0-9a-f]{32}) (?P<since>\d{1,19})(?P<masters>( \d{1,19})+)) "
    r"(?P<mac>[0-9a-f]{32})"
)
_ID = "[0-9a-f]{32}"
_NO_ID = "secure_meta has no valid database id: restore that table from a backup"
# The errors of SQLite for a file that cannot be used have names that begin with one of these.
_UNUSABLE = ("SQLITE_CANTOPEN", "SQLITE_NOTADB", "SQLITE_READONLY", "SQLITE_PERM", "SQLITE_AUTH")


class TableSet(Enum):
    """The part of our tables that a database has: all tables, the data tables or the key tables.

    The value is stored in row `holds` of `secure_meta`, which a database with all tables does not
    have.
    """

    ALL = None
    DATA = "data"
    KEYS = "keys"

    @property
    def tables(self) -> tuple[sa.Table, ...]:
        return {TableSet.ALL: TABLES, TableSet.DATA: DATA_TABLES, TableSet.KEYS: KEY_TABLES}[self]

    def missing(self, survey: "Survey") -> frozenset[str]:
        return frozenset(table.name for table in self.tables) - survey.tables


class Survey(NamedTuple):
    """The tables and the metadata that a database contains.  Nothing in it is authenticated.

    *tables* are the names of our tables that exist.
    *conflicting_tables* have the name of one of our tables, but lack one of its columns.
    *has_adk_tables* is whether tables of ADK exist, or those of adk-secure-sessions 1.x, which have
    the same names.
    *is_used* is whether one of our tables other than `secure_meta` and `secure_keyring` has rows.
    *master_rows* has at most `MAX_MASTERS` + 1 of the *master_row_count* rows of `secure_keyring`.
    """

    tables: frozenset[str]
    conflicting_tables: tuple[str, ...]
    has_adk_tables: bool
    is_used: bool
    meta_texts: dict[str, str]
    master_rows: list[MasterKeyRow]
    master_row_count: int = 0

    @property
    def table_set(self) -> TableSet | None:
        """The part that the database has; None if row `holds` has an unknown value."""
        holds = self.meta_texts.get(meta.HOLDS)
        return next((one for one in TableSet if one.value == holds), None)

    @property
    def format_version(self) -> str | None:
        """The stored format version; None if the database is new."""
        return self.meta_texts.get(meta.FORMAT)

    @property
    def has_rows(self) -> bool:
        return bool(self.meta_texts or self.master_rows or self.is_used)

    @property
    def has_plaintext_records(self) -> bool:
        return meta.PLAINTEXT in self.meta_texts

    @property
    def existing_id(self) -> bytes:
        """The id of a database that is not new, as the caller has checked."""
        assert self.database_id is not None, "the caller has rejected a new database"
        return self.database_id

    @property
    def database_id(self) -> bytes | None:
        """The random id of the database; None if it is new; ConfigurationError if malformed."""
        text = self.meta_texts.get(meta.DATABASE_ID)
        if text is None:
            return None
        if not isinstance(text, str) or not re.fullmatch(_ID, text):
            raise ConfigurationError(_NO_ID)
        return bytes.fromhex(text)

    @property
    def feature_list(self) -> re.Match[str]:
        """The stored feature list, in the groups `names` and `mac`; or ConfigurationError."""
        match = re.fullmatch(_FEATURES_FORM, str(self.meta_texts.get(meta.FEATURES)))
        if match is None:
            raise ConfigurationError(
                "the row `features` of secure_meta is missing or malformed: restore that table "
                "from a backup"
            )
        return match

    @property
    def features(self) -> frozenset[str]:
        """The features that the stored list names; ConfigurationError if it is malformed."""
        return frozenset(self.feature_list["names"].split(",")) - {NO_FEATURES}

    @property
    def separated_from(self) -> str | None:
        """The id of the original, in hexadecimal, if `separate` has not ended."""
        match = re.fullmatch(SEPARATION_FORM, str(self.meta_texts.get(meta.SEPARATION)))
        return None if match is None else match["old"]

    def reject_new(self) -> None:
        """Raise ConfigurationError if the database is new."""
        if self.database_id is None:
            raise ConfigurationError(
                "this database holds no encrypted sessions yet: create its tables and keys with "
                "`adk-secure-sessions init`, or start a service on it"
            )

    def reject_unfinished(self, *features: str) -> None:
        """Raise ConfigurationError if the command of one of *features* has not ended."""
        for feature in features:
            if self.format_version is not None and feature in self.features:
                raise ConfigurationError(_UNFINISHED[feature])


# --- looking -------------------------------------------------------------------------------------


def survey_connection(connection: sa.Connection, known_ids: Collection[int] = ()) -> Survey:
    """Return the survey of a database, without changing or checking the database.

    If `secure_keyring` has too many rows and *known_ids* is not empty, read only those ids.
    """
    survey = _survey_once(connection, known_ids)
    missing = (survey.table_set or TableSet.ALL).missing(survey)
    is_whole = not missing if survey.meta_texts else not survey.has_rows
    # Each query sees what was committed before it.  If another process created the database
    # meanwhile, `_survey_once` has seen only a part of the tables or of the rows.
    return survey if is_whole else _survey_once(connection, known_ids)


def _survey_once(connection: sa.Connection, known_ids: Collection[int]) -> Survey:
    present = set(sa.inspect(connection).get_table_names())
    known_tables = (*metadata.sorted_tables, *FEATURE_TABLES)
    tables = [table for table in known_tables if table.name in present]
    conflicting = _conflicting_tables(tables, connection) if tables else []
    readable = [] if conflicting else tables
    values: dict[str, str] = {}
    masters: list[MasterKeyRow] = []
    number = 0
    if schema.meta_table in tables and schema.meta_table.name not in conflicting:
        values = meta.read_all(connection)
    if keyring in readable:
        # Read at most one row more than `check_row_count` accepts: an attacker may have inserted
        # any number of rows.
        query = MASTER_KEYS.order_by(keyring.c.created_at, keyring.c.id).limit(MAX_MASTERS + 1)
        masters = [MasterKeyRow(*row) for row in connection.execute(query)]
        number = len(masters)
        if number > MAX_MASTERS:
            number = connection.scalar(sa.select(sa.func.count()).select_from(keyring)) or number
            if known_ids:
                rows = connection.execute(query.where(keyring.c.id.in_(list(known_ids))))
                masters = [MasterKeyRow(*row) for row in rows]
    others = [table for table in readable if table not in (schema.meta_table, keyring)]
    any_row = sa.or_(sa.false(), *(sa.select(table).exists() for table in others))
    is_used = bool(others and connection.scalar(sa.select(any_row)))
    return Survey(
        frozenset(table.name for table in tables),
        tuple(conflicting),
        {"sessions", "events"} <= present,
        is_used,
        values,
        masters,
        number,
    )


def _conflicting_tables(tables: list[sa.Table], connection: sa.Connection) -> list[str]:
    """Return the names of the *tables*, at least one, that lack one of our columns.

    One query that names all columns takes a hundredth of the time of reflecting each table.  If the
    query fails for another reason, such as a lock or a missing grant, reflecting the tables finds
    all columns, and the next query raises the error.
    """
    members = [
        f"SELECT 1 FROM (SELECT {', '.join(table.c.keys())} FROM {table.name}) AS t WHERE 1 = 0"  # noqa: S608
        for table in tables
    ]
    try:
        connection.execute(sa.text(" UNION ALL ".join(members)))
        return []
    except sa.exc.DBAPIError:
        connection.rollback()
    columns = sa.inspect(connection).get_columns
    present = {table: {column["name"] for column in columns(table.name)} for table in tables}
    return [table.name for table in tables if not present[table].issuperset(table.c.keys())]


async def survey_database(
    executor: Executor, known_ids: Collection[int] = (), *, is_key_database: bool = False
) -> Survey:
    """Do the same as `survey_connection`; see `run_while_opening`."""
    work = partial(survey_connection, known_ids=known_ids)
    return await run_while_opening(executor, work, commit=False, is_key_database=is_key_database)


async def run_while_opening(
    executor: Executor, work: Callable[[sa.Connection], T], *, commit: bool, is_key_database: bool
) -> T:
    """Do the same as `Executor.run_sync`; raise ConfigurationError if SQLite rejects the file."""
    try:
        return await executor.run_sync(work, commit=commit)
    except DatabaseError as error:
        if not (error.code or "").startswith(_UNUSABLE):
            raise
        whose = "key database's " if is_key_database else ""
        raise ConfigurationError(f"the {whose}SQLite file cannot be used: {error}") from None


async def survey_usable(
    executors: Executors, create_tables: bool, known_ids: Collection[int] = ()
) -> tuple[Survey, Survey]:
    """Survey and check the data database and the key database, which may be the same."""
    if executors.has_key_database:
        # Read the data database first.  Another process may be creating both databases.  It creates
        # the key database first, so if we see its data database, we also see its key database.
        data = await survey_database(executors.data)
        key_survey = await survey_database(executors.keys, known_ids, is_key_database=True)
    else:
        data = key_survey = await survey_database(executors.data, known_ids)
    ids = [one.meta_texts.get(meta.DATABASE_ID) for one in (data, key_survey)]
    if ids[0] != ids[1] or _missing_feature_tables(data, key_survey):
        # After this survey of the data database, another process may have created it, `separate`
        # may have replaced the ids in both databases, or a process may have created a table and
        # then added its feature.
        data = await survey_database(executors.data, known_ids)
        key_survey = key_survey if executors.has_key_database else data
    table_set = TableSet.KEYS if executors.has_key_database else TableSet.ALL
    require_usable(key_survey, table_set, create_tables)
    key_survey.reject_unfinished(FeatureName.MOVING)
    if executors.has_key_database:
        require_usable(data, TableSet.DATA, create_tables)
        require_same_database(data, key_survey)
    for name in _missing_feature_tables(data, key_survey):
        raise ConfigurationError(f"the table {name} was removed: restore it from a backup")
    return data, key_survey


def with_key_survey(data: Survey, key_survey: Survey) -> Survey:
    """Return the survey of the data database with the keyring and the features of *key_survey*."""
    names = (meta.DATABASE_ID, meta.FEATURES, meta.SEPARATION, meta.MIGRATION_MARK)
    shared = {name: key_survey.meta_texts[name] for name in names if name in key_survey.meta_texts}
    return data._replace(
        master_rows=key_survey.master_rows,
        master_row_count=key_survey.master_row_count,
        meta_texts=data.meta_texts | shared,
    )


def _missing_feature_tables(data: Survey, key_survey: Survey) -> list[str]:
    """Return the tables of the features that *key_survey* lists, if they do not exist in *data*."""
    # `require_usable` rejects another format, and a database whose list is in a key database.
    is_checked = key_survey.format_version == str(FORMAT_VERSION)
    is_checked &= key_survey.table_set in (TableSet.ALL, TableSet.KEYS)
    listed = key_survey.features if is_checked else frozenset()
    tables = (KNOWN_FEATURES.get(name) for name in listed)
    names = (table.name for table in tables if table is not None)
    return [name for name in names if name not in data.tables]


# --- checking ------------------------------------------------------------------------------------


def require_usable(survey: Survey, table_set: TableSet, create_tables: bool) -> None:
    """Raise ConfigurationError for a database that cannot be used as *table_set*.

    A new database may lack tables if *create_tables* is True.
    """
    # Check the format first: in another format, the tables may have other columns.
    version = survey.format_version
    if version not in (None, str(FORMAT_VERSION)):
        raise ConfigurationError(
            f"the database has format {version!r} and this release of adk-secure-sessions reads "
            f"format {FORMAT_VERSION}: install the release that wrote it"
        )
    if survey.conflicting_tables:
        raise ConfigurationError(
            f"the table {survey.conflicting_tables[0]} was not created by adk-secure-sessions: "
            "use another database or schema"
        )
    if version is not None:
        _check_table_set(survey, table_set)
        # A release that does not know a feature could, for example, retire a key that is still used
        # in a table of this feature.  The MAC of the list is checked once the keyring is open.
        if table_set is not TableSet.DATA and (unknown := survey.features - KNOWN_FEATURES.keys()):
            raise ConfigurationError(
                f"the database uses {', '.join(map(repr, sorted(unknown)))}, which this release of "
                "adk-secure-sessions does not know: install the release that wrote it"
            )
    missing = table_set.missing(survey)
    if missing and not create_tables:
        raise ConfigurationError(
            f"the table {min(missing)} is missing, and create_tables is False: "
            "run the statements of docs/sql for this kind of database"
        )
    if version is None:
        if survey.has_rows:
            raise ConfigurationError(
                "secure_meta has no format version although there is data: restore that table from "
                "a backup"
            )
        return
    if missing:
        raise ConfigurationError(f"the table {min(missing)} was removed: restore it from a backup")
    if survey.database_id is None:
        raise ConfigurationError(_NO_ID)


_KEY_DB = "key_db_url (--key-db or --from-key-db)"
_NO_KEY_DATABASE = f"{_KEY_DB} names a database of sessions: pass a key database, or an empty one"
_ALL, _DATA, _KEYS = TableSet
MISPLACED_TEXTS = {
    (_ALL, _DATA): f"this database has its keys in a key database: pass that as {_KEY_DB}",
    (_ALL, _KEYS): (
        f"this is a key database: pass it as {_KEY_DB}, and also pass the database of the data"
    ),
    (_DATA, _ALL): (
        f"this database has keys of its own: omit {_KEY_DB}; or, if its keys are in that key "
        "database, restore secure_meta, whose row `holds` is missing"
    ),
    (_DATA, _KEYS): "the data's URL names a key database: pass the database of the data",
    (_KEYS, _ALL): _NO_KEY_DATABASE,
    (_KEYS, _DATA): _NO_KEY_DATABASE,
}


def _check_table_set(survey: Survey, table_set: TableSet) -> None:
    if survey.table_set is None:
        raise ConfigurationError(
            "the row `holds` of secure_meta has a value that this release of adk-secure-sessions "
            "does not know: install the release that wrote it, or restore that table from a backup"
        )
    if survey.table_set is not table_set:
        if meta.FEATURES in survey.meta_texts:
            survey.reject_unfinished(FeatureName.MOVING)
        raise ConfigurationError(MISPLACED_TEXTS[table_set, survey.table_set])


def require_same_database(data: Survey, key_survey: Survey) -> None:
    """Raise ConfigurationError if two databases, each of which is usable, do not match."""
    if data.database_id is None and key_survey.is_used:
        raise ConfigurationError(
            "the key database has the keys of another database, and this one is empty: "
            "check its URL, or restore the data from a backup"
        )
    if data.database_id is not None and key_survey.database_id is None:
        raise ConfigurationError(
            "the key database is empty, but the database has data whose keys it should hold: "
            "check the key database's URL, or restore it from a backup; without it the data is lost"
        )
    if data.database_id is not None and data.database_id != key_survey.database_id:
        if key_survey.separated_from == data.meta_texts[meta.DATABASE_ID]:
            # `separate` stopped before it stored the new id in *data*.
            key_survey.reject_unfinished(FeatureName.SEPARATING)
        raise ConfigurationError(
            "the key database belongs to another database: check the URLs of both"
        )
