"""Open a database: check whether it can be used, and create missing tables and keys.

`look` returns a `Survey`, which lists the tables and the metadata of a database.  `check` rejects a
database that cannot be used.  `open_database` creates missing tables and keys.  After each step, it
surveys and checks the database again, until nothing is missing.
"""

import hmac
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Collection, Sequence
from enum import Enum
from functools import partial
from typing import NamedTuple, TypeVar

import sqlalchemy as sa

from adk_secure_sessions.audit import record_new_key
from adk_secure_sessions.backends.registry import Backends
from adk_secure_sessions.db.dialects import already_exists, dialect_of, has_table
from adk_secure_sessions.db.failures import meaning
from adk_secure_sessions.db.protocol import Conflict, Executor, Executors
from adk_secure_sessions.errors import (
    ConfigurationError,
    DatabaseError,
    SecureSessionError,
    WrongKeyError,
)
from adk_secure_sessions.formats.envelopes_1x import is_envelope
from adk_secure_sessions.keys.blind_index import BlindIndex
from adk_secure_sessions.keys.keyring import (
    DATA,
    INDEX,
    MAX_ROWS,
    Keyring,
    MasterKeyRow,
    Separation,
    check_row_count,
    new_master,
    open_keyring,
)
from adk_secure_sessions.loops import at_once
from adk_secure_sessions.storage import meta, schema
from adk_secure_sessions.storage.features.search_index import state_of_mark
from adk_secure_sessions.storage.meta import (
    DATABASE_ID,
    FEATURES,
    FORMAT,
    HOLDS,
    MIGRATION_MARK,
    PLAINTEXT,
    SEPARATION,
)
from adk_secure_sessions.storage.queries import INDEX_MARKS, MASTER_KEYS
from adk_secure_sessions.storage.schema import (
    DATA_TABLES,
    FEATURE_TABLES,
    FORMAT_VERSION,
    KEY_TABLES,
    TABLES,
    audit_records,
    indexed,
    keyring,
    metadata,
    migrated,
)

T = TypeVar("T")

logger: logging.Logger = logging.getLogger(__name__)

# How often `open_database` surveys a database before it fails.  It surveys again after each step,
# and other processes may create tables and keys at the same time.
_ATTEMPTS = 8
_ID = re.compile("[0-9a-f]{32}")
_SAMPLES = 20  # the number of rows of ADK's tables that `_are_of_1x` reads
# The errors of SQLite for a file that cannot be used have names that begin with one of these.
_UNUSABLE = ("SQLITE_CANTOPEN", "SQLITE_NOTADB", "SQLITE_READONLY", "SQLITE_PERM", "SQLITE_AUTH")

# Features, as the list names them, and the text that stands for an empty list.
NO_FEATURES = "-"  # the stored list of features, if the database has none
SEPARATING = "separating"  # the feature of a copy that `separate` has not finished
COLLECTIONS = "collections"  # the feature of a database that has collections (artifacts, memory)
WRAPPER = (
    "wrapper"  # the feature of a database whose data keys also encrypt records stored elsewhere
)
EXPIRY = "expiry"  # the feature of a database in which sessions may expire
MIGRATION = "migration"  # the feature of a database with sessions that `migrate` has copied
AUDIT = "audit"  # the feature of a database that stores an audit trail
STATE_INDEX = "state-index"  # the feature of a database with keyed hashes of state values
MOVING = "moving"  # the feature of a database whose keys `move_keys` has not finished moving
_KNOWN_FEATURES = frozenset(
    {NO_FEATURES, SEPARATING, COLLECTIONS, WRAPPER, EXPIRY, MIGRATION, MOVING, AUDIT, STATE_INDEX}
)
# The tables that belong to features.  `create_table_of` creates them.
_TABLE_OF: dict[str, sa.Table] = {
    MIGRATION: migrated,
    AUDIT: audit_records,
    STATE_INDEX: indexed,
}
# How many marks of `secure_state_index` a process reads when it opens the database.  An attacker
# may have inserted any number.
_MAX_MARKS = 1000
_SEPARATION_FORM = re.compile(
    r"(?P<text>(?P<old>[0-9a-f]{32}) (?P<since>\d{1,19})(?P<masters>( \d{1,19})+)) "
    r"(?P<mac>[0-9a-f]{32})"
)
_FEATURE_NAME = "[a-z][-a-z0-9_.]*"
_FEATURES_FORM = re.compile(
    rf"(?P<names>-|{_FEATURE_NAME}(?:,{_FEATURE_NAME})*) (?P<mac>[0-9a-f]{{32}})"
)
_REPLACED = "the database was replaced by another one: restart the service"


class Part(Enum):
    """The part of our tables that a database has: all tables, the data tables or the key tables.

    The value is stored in row `holds` of `secure_meta`.  A database with all tables has no such
    row.
    """

    ALL = None
    DATA = "data"
    KEYS = "keys"

    @property
    def tables(self) -> tuple[sa.Table, ...]:
        """The tables that belong to this part."""
        return {Part.ALL: TABLES, Part.DATA: DATA_TABLES, Part.KEYS: KEY_TABLES}[self]

    def missing(self, survey: "Survey") -> frozenset[str]:
        """Return the names of this part's tables that do not exist."""
        return survey.missing_tables & {table.name for table in self.tables}


class Survey(NamedTuple):
    """The tables and the metadata that a database contains.  Nothing in it is authenticated.

    Attributes:
        missing_tables: The names of our tables that do not exist, without the tables of features.
        alien_tables: The names of tables that have the name of one of our tables, but lack one of
            its columns.
        adk_tables: Whether ADK's own tables exist, or those of adk-secure-sessions 1.x, which have
            the same names.
        is_used: Whether one of our tables other than `secure_meta` and `secure_keyring` has rows.
        meta: The values of `secure_meta`, by name.
        keyring: At most `MAX_ROWS` + 1 rows of `secure_keyring`.
        keyring_rows: The number of all rows of `secure_keyring`.
        feature_tables: The names of the tables of features that exist.
    """

    missing_tables: frozenset[str]
    alien_tables: tuple[str, ...]
    adk_tables: bool
    is_used: bool
    meta: dict[str, str]
    keyring: list[MasterKeyRow]
    keyring_rows: int = 0
    feature_tables: frozenset[str] = frozenset()

    @property
    def part(self) -> Part | None:
        """The part that the database has; None if row `holds` has an unknown value."""
        mark = self.meta.get(HOLDS)
        return next((part for part in Part if part.value == mark), None)

    @property
    def format_version(self) -> str | None:
        """The stored format version; None if the database is new."""
        return self.meta.get(FORMAT)

    @property
    def has_rows(self) -> bool:
        """Whether any of our tables has rows."""
        return bool(self.meta or self.keyring or self.is_used)

    @property
    def has_plaintext_records(self) -> bool:
        """Whether `secure_meta` says that `NoOpBackend` has written records to the database."""
        return PLAINTEXT in self.meta

    @property
    def database_id(self) -> bytes | None:
        """The random id of the database; None if the database is new.

        Raises ValueError if the stored value is not 32 lower-case hexadecimal digits.
        """
        text = self.meta.get(DATABASE_ID)
        if text is None:
            return None
        if not isinstance(text, str) or not _ID.fullmatch(text):
            raise ValueError("not a database id")
        return bytes.fromhex(text)


def look(connection: sa.Connection, known: Collection[int] = ()) -> Survey:
    """Return the survey of a database, without changing the database.

    If `secure_keyring` has more than `MAX_ROWS` rows and *known* is not empty, read only the rows
    with the ids *known*.
    """
    survey = _look(connection, known)
    missing = (survey.part or Part.ALL).missing(survey)
    is_whole = not missing if survey.meta else not survey.has_rows
    # On a server, each query of `_look` sees what was committed before it.  If another process
    # created the database meanwhile, `_look` has seen only a part of the tables or of the rows.
    return survey if is_whole else _look(connection, known)


def _look(connection: sa.Connection, known: Collection[int]) -> Survey:
    present = set(sa.inspect(connection).get_table_names())
    known_tables = (*metadata.sorted_tables, *FEATURE_TABLES)
    tables = [table for table in known_tables if table.name in present]
    alien = _alien(tables, connection)
    missing = frozenset(metadata.tables) - present
    values: dict[str, str] = {}
    masters: list[MasterKeyRow] = []
    number = 0
    used = False
    if schema.meta in tables and schema.meta.name not in alien:
        values = meta.read_all(connection)
    if not alien and keyring in tables:
        # Read at most one row more than `check_row_count` accepts: an attacker may have inserted
        # any number of rows.
        query = MASTER_KEYS.order_by(keyring.c.created_at, keyring.c.id).limit(MAX_ROWS + 1)
        masters = [MasterKeyRow(*row) for row in connection.execute(query)]
        number = len(masters)
        if number > MAX_ROWS:
            number = connection.scalar(sa.select(sa.func.count()).select_from(keyring)) or number
            if known:
                rows = connection.execute(query.where(keyring.c.id.in_(list(known))))
                masters = [MasterKeyRow(*row) for row in rows]
    if not alien and (others := [table for table in tables if table not in (schema.meta, keyring)]):
        one: sa.ColumnElement[int] = sa.literal_column("1")
        any_row = (sa.exists(sa.select(one).select_from(table)) for table in others)
        used = bool(connection.scalar(sa.select(sa.or_(*any_row))))
    adk = {"sessions", "events"} <= present
    of_features = frozenset(table.name for table in FEATURE_TABLES if table in tables)
    return Survey(missing, tuple(alien), adk, used, values, masters, number, of_features)


def _alien(tables: list[sa.Table], connection: sa.Connection) -> list[str]:
    """Return the names of the *tables* that lack one of our columns."""
    if not tables:
        return []
    # One query that names all columns takes a hundredth of the time of reflecting each table.
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


def check(survey: Survey, part: Part, create_tables: bool) -> None:
    """Reject a database that cannot be used as *part*.

    A new database may lack tables if *create_tables* is True.

    Raises:
        ConfigurationError: The database cannot be used; the message says why and what to do.
    """
    # Check the format first: in another format, the tables may have other columns.
    version = survey.format_version
    if version not in (None, str(FORMAT_VERSION)):
        raise ConfigurationError(
            f"the database has format {version!r} and this release of adk-secure-sessions reads "
            f"format {FORMAT_VERSION}: install the release that wrote it"
        )
    if survey.alien_tables:
        raise ConfigurationError(
            f"the table {survey.alien_tables[0]} was not created by adk-secure-sessions: "
            "use another database or schema"
        )
    if version is not None:
        _check_mark(survey, part)
        if part is not Part.DATA:
            _check_features(survey)
    missing = part.missing(survey)
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
    try:
        if survey.database_id is not None:
            return
    except ValueError:
        pass
    raise ConfigurationError(
        "secure_meta has no valid database id: restore that table from a backup"
    )


def _check_features(survey: Survey) -> None:
    """Raise ConfigurationError for features that this release does not know.

    A release that does not know a feature could, for example, retire a key that is still used in a
    table of this feature.

    The list of features is not authenticated here: its MAC needs a key of the keyring, which is not
    open yet.  `check_features` authenticates the list later.
    """
    names, _ = _stored_features(survey)
    unknown = [name for name in names.split(",") if name not in _KNOWN_FEATURES]
    if unknown:
        raise ConfigurationError(
            f"the database uses {', '.join(map(repr, unknown))}, which this release of "
            "adk-secure-sessions does not know: install the release that wrote it"
        )


def _stored_features(survey: Survey) -> tuple[str, str]:
    """Return the feature names, separated by commas, and their MAC in hexadecimal.

    Raises ConfigurationError if the stored value is missing or malformed.
    """
    found = _FEATURES_FORM.fullmatch(str(survey.meta.get(FEATURES)))
    if found is None:
        raise ConfigurationError(
            "the row `features` of secure_meta is missing or malformed: restore that table from a "
            "backup"
        )
    return found["names"], found["mac"]


def reject_separating(survey: Survey) -> None:
    """Raise ConfigurationError if the command `separate` has not finished with this copy.

    A service would encrypt new records with data keys that the original database also has.
    """
    if SEPARATING in stored_features(survey):
        raise ConfigurationError(
            "this copy of a database is being separated: run `adk-secure-sessions separate` again, "
            "until it has ended"
        )


def reject_moving(survey: Survey) -> None:
    """Raise ConfigurationError if the command `move-keys` has not finished with the keys.

    A service would use keys that the command is about to delete.
    """
    if survey.format_version is not None and MOVING in stored_features(survey):
        raise ConfigurationError(
            "the keys of this database are being moved: run `adk-secure-sessions move-keys` again, "
            "until it has ended"
        )


def check_features(survey: Survey, keyring: Keyring) -> None:
    """Authenticate the feature list and the stored state of an unfinished run of `separate`.

    Set `keyring.separation` to the stored state, or to None if no separation is unfinished.  Also
    set `keyring.features` and `keyring.has_audit_table`.

    Raises:
        WrongKeyError: The feature list or the state was modified.
    """
    _check_feature_list(survey, keyring)
    keyring.separation = None
    keyring.features = stored_features(survey)
    keyring.has_audit_table = audit_records.name in survey.feature_tables
    if SEPARATING not in stored_features(survey):
        return
    found = _SEPARATION_FORM.fullmatch(str(survey.meta.get(SEPARATION)))
    expected = (
        b"" if found is None else keyring.index.separation(keyring.database_id, found["text"])
    )
    if found is None or not hmac.compare_digest(expected.hex(), found["mac"]):
        raise WrongKeyError(
            "the row `separation` of secure_meta was tampered with: copy the database again"
        )
    masters = frozenset(map(int, found["masters"].split()))
    keyring.separation = Separation(bytes.fromhex(found["old"]), int(found["since"]), masters)


def separation_marks(
    separation: Separation, index: BlindIndex, new_id: bytes, features: frozenset[str]
) -> dict[str, str]:
    """Return the rows of `secure_meta` that `separate` stores when it begins.

    The result maps the name of each row to its value.  *index* authenticates these rows, *new_id*
    is the new id of the database, and *features* are the features of the database.
    """
    masters = " ".join(map(str, sorted(separation.masters)))
    text = f"{separation.old_id.hex()} {separation.since} {masters}"
    return {
        DATABASE_ID: new_id.hex(),
        FEATURES: feature_mark(index, new_id, features | {SEPARATING}),
        SEPARATION: f"{text} {index.separation(new_id, text).hex()}",
    }


def feature_mark(
    index: BlindIndex, database_id: bytes, features: frozenset[str] = frozenset()
) -> str:
    """Return the value of the row `features` of a database with these *features*."""
    names = ",".join(sorted(features)) or NO_FEATURES
    return f"{names} {index.features(database_id, names).hex()}"


def stored_features(survey: Survey) -> frozenset[str]:
    """Return the features that `secure_meta` lists; this function does not authenticate the list.

    Raises:
        ConfigurationError: The row `features` of `secure_meta` is missing or malformed.
    """
    names, _ = _stored_features(survey)
    return frozenset(names.split(",")) - {NO_FEATURES}


def add_feature(feature: str, keyring: Keyring, connection: sa.Connection) -> None:
    """Add *feature* to the stored features; if it is stored already, do nothing.

    Call this before the first row that uses the feature is stored.  Afterwards, releases that do
    not know the feature reject the database.

    Raises:
        WrongKeyError: The stored features were modified.
        ConfigurationError: The row `features` is missing or malformed; or a run of `separate` or
            `move-keys` has not ended; or the keys are in a key database, and *connection* is not;
            or *keyring* is the keyring of another database.
        Conflict: Another process has changed the stored features at the same time.
    """
    survey = look(connection)
    if survey.part is Part.DATA:
        raise ConfigurationError(_MISPLACED[Part.ALL, Part.DATA])
    if survey.meta.get(DATABASE_ID) is None:
        raise ConfigurationError(_REPLACED)
    reject_separating(survey)
    reject_moving(survey)
    if survey.meta.get(DATABASE_ID) != keyring.database_id.hex():
        raise ConfigurationError(_REPLACED)
    _check_feature_list(survey, keyring)
    features = stored_features(survey)
    if feature in features:
        return
    mark = feature_mark(keyring.index, keyring.database_id, features | {feature})
    if not meta.swap(connection, FEATURES, survey.meta[FEATURES], mark):
        raise Conflict  # another process has changed the features since `look` read them


def has_feature(feature: str, keyring: Keyring, connection: sa.Connection) -> bool:
    """Return whether the authenticated list of features contains *feature*.

    Raises:
        WrongKeyError: The stored features were modified.
        ConfigurationError: The row `features` is missing or malformed, or *keyring* is the keyring
            of another database.
    """
    survey = look(connection)
    if survey.meta.get(DATABASE_ID) != keyring.database_id.hex():
        raise ConfigurationError(_REPLACED)
    _check_feature_list(survey, keyring)
    return feature in stored_features(survey)


def create_table_of(feature: str, connection: sa.Connection, *, may_create: bool) -> None:
    """Create the table of *feature* in the data database, if the table does not exist.

    Call this before `add_feature`.  If a process stops before it calls `add_feature`, the database
    has an empty table and not the feature, so other releases still accept the database.

    Raises:
        ConfigurationError: The table does not exist, and *may_create* is False or the account may
            not create it.
    """
    table = _TABLE_OF[feature]
    dialect = dialect_of(connection)
    advice = f"run the statement of docs/sql/{dialect.name}-{feature}.sql"
    with dialect.exclusively(connection):
        if has_table(connection, table):
            return
        if not may_create:
            raise ConfigurationError(
                f"the table {table.name} is missing, and create_tables is False: {advice}"
            )
        try:
            table.create(connection)
        except sa.exc.DBAPIError as error:
            if already_exists(error):
                connection.rollback()
                if has_table(connection, table):
                    return  # another process has created the table meanwhile
            failure = meaning(error)
            if not isinstance(failure, DatabaseError):
                raise failure from None
            raise ConfigurationError(
                f"the table {table.name} could not be created: {failure}; if the account may not "
                f"create tables, {advice}"
            ) from None


class MigrationEnd(Enum):
    """The values of the mark that a migration stores in row `migration` of `secure_meta`."""

    COMPLETE = "complete"  # everything was imported
    SOURCE_ERASED = "erased"  # and since then, rows of the source may have been deleted


def mark_migration(end: MigrationEnd, keyring: Keyring, connection: sa.Connection) -> None:
    """Store the mark *end*, which replaces a stored mark, even one that was tampered with.

    Only the mark `SOURCE_ERASED` is not replaced.
    """
    stored = meta.read(connection, MIGRATION_MARK, lock=True)
    if stored != _migration_mark(MigrationEnd.SOURCE_ERASED, keyring):
        meta.put(connection, MIGRATION_MARK, _migration_mark(end, keyring))


def withdraw_migration(keyring: Keyring, connection: sa.Connection) -> bool:
    """Remove the mark `MigrationEnd.COMPLETE`, and return whether no mark is stored afterwards.

    The mark `SOURCE_ERASED` and a mark that was tampered with are not removed.
    """
    complete = _migration_mark(MigrationEnd.COMPLETE, keyring)
    return meta.swap(connection, MIGRATION_MARK, complete, None)


def migration_end(keyring: Keyring, connection: sa.Connection) -> MigrationEnd | None:
    """Return the stored mark of a migration; None if no mark is stored.

    Raises:
        WrongKeyError: The mark was tampered with.
    """
    value = meta.read(connection, MIGRATION_MARK)
    if value is None:
        return None
    for end in MigrationEnd:
        if hmac.compare_digest(str(value).encode(), _migration_mark(end, keyring).encode()):
            return end
    raise WrongKeyError(
        f"the row `{MIGRATION_MARK}` of secure_meta was tampered with: delete the row and run "
        "`migrate` again"
    )


def _migration_mark(end: MigrationEnd, keyring: Keyring) -> str:
    mac_of = {
        MigrationEnd.COMPLETE: keyring.index.migration_complete,
        MigrationEnd.SOURCE_ERASED: keyring.index.source_erased,
    }
    return f"{end.value} {mac_of[end](keyring.database_id).hex()}"


def has_rows_of(feature: str, connection: sa.Connection) -> bool:
    """Return whether the table of *feature* exists and has rows."""
    table = _TABLE_OF[feature]
    if not has_table(connection, table):
        return False
    one: sa.ColumnElement[int] = sa.literal_column("1")
    return connection.execute(sa.select(one).select_from(table).limit(1)).first() is not None


def _missing_feature_tables(data: Survey, keys: Survey) -> list[str]:
    """Return the tables of the features that *keys* lists, if they do not exist in *data*.

    Without a key database, the two surveys are the same.
    """
    found = _FEATURES_FORM.fullmatch(str(keys.meta.get(FEATURES)))
    listed = found["names"].split(",") if found else []
    names = (_TABLE_OF[name].name for name in listed if name in _TABLE_OF)
    return [name for name in names if name not in data.feature_tables]


def _check_feature_tables(data: Survey, keys: Survey) -> None:
    for name in _missing_feature_tables(data, keys):
        raise ConfigurationError(f"the table {name} was removed: restore it from a backup")


async def _read_indexed_keys(executors: Executors, data: Survey, opened: Keyring) -> Keyring:
    """Read which state keys are indexed, set `indexed_keys` of *opened*, and return *opened*.

    The table is read even if the list of features lacks the feature: otherwise, an attacker who
    replays an older list could stop the writers from maintaining the rows.
    """
    if indexed.name in data.feature_tables:
        marks = await executors.data.read(INDEX_MARKS, {"limit": _MAX_MARKS + 1})
        if len(marks) > _MAX_MARKS:
            logger.error(
                "secure_state_index has more than %d marks: somebody has added rows, and the rows "
                "of some keys are not maintained; run `verify`",
                _MAX_MARKS,
            )
        opened.indexed_keys = {
            tag for tag, mac in marks if state_of_mark(opened.index, tag, mac) is not None
        }
    return opened


def _check_feature_list(survey: Survey, keyring: Keyring) -> None:
    names, mac = _stored_features(survey)
    expected = keyring.index.features(keyring.database_id, names)
    if not hmac.compare_digest(expected.hex(), mac):
        raise WrongKeyError(
            "the row `features` of secure_meta was tampered with: restore that table from a backup"
        )


_MISPLACED = {
    (Part.ALL, Part.DATA): "this database has its keys in a key database: pass that as key_db_url",
    (Part.ALL, Part.KEYS): (
        "this is a key database: pass it as key_db_url, and the database of the data as db_url"
    ),
    (Part.DATA, Part.ALL): (
        "this database has keys of its own: omit key_db_url; or, if its keys are in that key "
        "database, restore secure_meta, whose row `holds` is missing"
    ),
    (Part.DATA, Part.KEYS): "db_url names a key database: pass the database of the data",
    (Part.KEYS, Part.ALL): (
        "key_db_url names a database of sessions with keys of their own: pass a key database, or "
        "an empty database to create one"
    ),
    (Part.KEYS, Part.DATA): (
        "key_db_url names a database of sessions whose keys are in a key database: pass the key "
        "database"
    ),
}


def _check_mark(survey: Survey, part: Part) -> None:
    if survey.part is None:
        raise ConfigurationError(
            "the row `holds` of secure_meta has a value that this release of adk-secure-sessions "
            "does not know: install the release that wrote it, or restore that table from a backup"
        )
    if survey.part is not part:
        if FEATURES in survey.meta:
            reject_moving(survey)
        raise ConfigurationError(_MISPLACED[part, survey.part])


def check_together(data: Survey, keys: Survey) -> None:
    """Reject a data database and a key database that do not belong together.

    Each of the two must have been checked with `check`.

    Raises:
        ConfigurationError: They do not belong together; the message says why and what to do.
    """
    if data.database_id is None and keys.is_used:
        raise ConfigurationError(
            "the key database has the keys of another database, and this one is empty: "
            "check db_url, or restore the data from a backup"
        )
    if data.database_id is not None and keys.database_id is None:
        raise ConfigurationError(
            "the key database is empty, but the database has data whose keys it should hold: "
            "check key_db_url, or restore the key database from a backup; without it the data is "
            "lost"
        )
    old_id = _separated_from(keys)
    if old_id is not None and old_id == data.meta.get(DATABASE_ID):
        reject_separating(keys)  # the command ended before it stored the new id in *data*
    if data.database_id is not None and data.database_id != keys.database_id:
        raise ConfigurationError(
            "the key database belongs to another database: check db_url and key_db_url"
        )


async def open_database(
    executors: Executors, backends: Backends, create_tables: bool, known: Keyring | None = None
) -> Keyring:
    """Check the database, create missing tables and keys, and open the keyring.

    The tables and keys of a key database are created before the tables of the data database.  If
    the process crashes between the two steps, the next start creates the tables that are missing.

    Args:
        executors: The executors of the data database and of the key database.
        backends: The backends, whose root keys unwrap the keyring.
        create_tables: Create missing tables; if False, they must exist (see docs/sql).
        known: A keyring opened earlier.  If given, nothing is created, and the keys of *known* are
            not unwrapped again.  If a key service fails while a new or changed row is unwrapped,
            the result does not contain the master key of this row until a later call.

    Raises:
        ConfigurationError: A database cannot be used; it was left unchanged.
        WrongKeyError, PlaintextRefusedError, KeyServiceError: see `open_keyring`.
    """
    if known is not None:
        survey = await survey_existing(executors, known.rows.keys())
        reject_separating(survey)
        renewed = await _open(survey, backends, known, leaves_pending=True)
        return await _read_indexed_keys(executors, survey, renewed)
    root = backends.writer.root_key
    marks = {PLAINTEXT: "1"} if backends.stores_plaintext else {}
    for _ in range(_ATTEMPTS):  # survey again after each step
        data, keys, opened = await open_for_service(executors, backends, create_tables)
        database_id = keys.database_id or secrets.token_bytes(16)
        now = time.time_ns() // 1000
        missing = [INDEX, DATA]
        if opened is not None:
            missing = [DATA] if opened.current_id is None else []
        marks |= {FORMAT: str(FORMAT_VERSION), DATABASE_ID: database_id.hex()}
        part = Part.KEYS if executors.has_key_database else Part.ALL
        if opened is None or missing or not marks.keys() <= keys.meta.keys():
            fresh = await at_once(*(new_master(which, root, database_id, now) for which in missing))
            created = marks
            if opened is None:
                created = {**marks, FEATURES: feature_mark(fresh[0].key.index(), database_id)}
            await _make(executors.keys, part, keys, created, [made.row for made in fresh])
            for made in fresh:
                row = made.row
                kind = f"{row.purpose} master"
                record_new_key(database_id, kind, row.id, root_key=row.root_key_id)
        elif executors.has_key_database and not marks.keys() <= data.meta.keys():
            await _make(executors.data, Part.DATA, data, marks, [])
        else:
            await _warn(executors.data, data, backends.stores_plaintext)
            return opened
    raise SecureSessionError(
        "the database kept changing while it was opened: try again", retryable=True
    )


class Opened(NamedTuple):
    """A database as a service finds it when it starts.

    Attributes:
        data: The survey of the data database.
        keys: The survey of the key database; without a key database, the same as *data*.
        keyring: The opened keyring; None if the key tables are new.
    """

    data: Survey
    keys: Survey
    keyring: Keyring | None


async def open_for_service(executors: Executors, backends: Backends, create_tables: bool) -> Opened:
    """Check the database and open its keys as a service does when it starts; write nothing.

    Services call this function before each step of `open_database`, and `check` calls it, so that
    both accept and reject the same databases.  The arguments and errors are those of
    `open_database`.
    """
    data, keys = await _survey(executors, create_tables)
    if keys.database_id is None:
        return Opened(data, keys, None)
    reject_separating(keys)
    writer = backends.writer.root_key.key_id
    opened = await open_keyring(keys.keyring, backends.roots, writer, keys.database_id)
    check_features(keys, opened)
    return Opened(data, keys, await _read_indexed_keys(executors, data, opened))


async def survey_existing(executors: Executors, known: Collection[int] = ()) -> Survey:
    """Check and survey a database that already exists, without changing it.

    With a key database, return the survey of the data database, but with the keyring and the
    features of the key database.  A service that is running passes, as *known*, the ids of the
    keyring rows that it has accepted.

    Raises:
        ConfigurationError: The database cannot be used, or is new.
        WrongKeyError: The keyring has too many rows, and *known* is empty.
    """
    data, keys = await _survey(executors, create_tables=True, known=known)
    reject_new(data)
    if not known:
        check_row_count(keys.keyring_rows)
    names = (FEATURES, SEPARATION, MIGRATION_MARK)
    shared = {name: keys.meta[name] for name in names if name in keys.meta}
    return data._replace(
        keyring=keys.keyring, keyring_rows=keys.keyring_rows, meta=data.meta | shared
    )


def reject_new(data: Survey) -> None:
    """Raise ConfigurationError if the data database, whose survey is *data*, is new."""
    if data.database_id is None:
        raise ConfigurationError(
            "this database holds no encrypted sessions yet: create its tables and keys with "
            "`adk-secure-sessions init`, or start a service on it"
        )


async def open_existing(
    executors: Executors, backends: Backends, known: Keyring | None = None
) -> Keyring:
    """Open the keyring of a database that already exists, without changing the database.

    *known* is a keyring opened earlier.  Its keys are not unwrapped again.

    Raises:
        ConfigurationError: See `survey_existing`; or *known* is the keyring of another database.
        WrongKeyError, PlaintextRefusedError, KeyServiceError: see `open_keyring`.
    """
    survey = await survey_existing(executors)
    opened = await _open(survey, backends, known, leaves_pending=False)
    return await _read_indexed_keys(executors, survey, opened)


async def _open(
    survey: Survey, backends: Backends, known: Keyring | None, *, leaves_pending: bool
) -> Keyring:
    assert survey.database_id is not None, "survey_existing rejects that"
    if known is not None and known.database_id != survey.database_id:
        raise ConfigurationError(_REPLACED)
    writer, database_id = backends.writer.root_key.key_id, survey.database_id
    opened = await open_keyring(
        survey.keyring,
        backends.roots,
        writer,
        database_id,
        known,
        leaves_pending=leaves_pending,
        row_count=survey.keyring_rows,
    )
    check_features(survey, opened)
    return opened


async def half_separated(executors: Executors) -> tuple[Survey, str] | None:
    """Find a separation that has stored the new database id only in the key database so far.

    `separate` writes the new database id to the key database first, and then to the data database.

    Returns:
        The survey of the key database and the old database id in hexadecimal.  None if there is no
        key database, or if the data database does not have the old id any more.
    """
    if not executors.has_key_database:
        return None
    data, keys = await survey_data(executors), await survey_keys(executors)
    old_id = _separated_from(keys)
    if old_id is None or old_id != data.meta.get(DATABASE_ID):
        return None
    check(keys, Part.KEYS, create_tables=False)
    return keys, old_id


def _separated_from(keys: Survey) -> str | None:
    """Return the id of the original, in hexadecimal, if `separate` has not ended; else None.

    *keys* is the survey of the database with the keys.  The id is not authenticated.
    """
    found = _SEPARATION_FORM.fullmatch(str(keys.meta.get(SEPARATION)))
    return None if found is None else found["old"]


async def survey_data(executors: Executors) -> Survey:
    """Survey the data database without checking it.

    Raises ConfigurationError if SQLite cannot open or use the file.
    """
    return await _usable(executors.data.define(look, commit=False))


async def survey_keys(executors: Executors) -> Survey:
    """Survey the key database without checking it.

    Raises ConfigurationError if SQLite cannot open or use the file.
    """
    return await _usable(executors.keys.define(look, commit=False), "key database's ")


async def _survey(
    executors: Executors, create_tables: bool, known: Collection[int] = ()
) -> tuple[Survey, Survey]:
    """Survey and check the data database and the key database; return both surveys.

    Without a key database, the two surveys are the same.  Raises ConfigurationError if a database
    cannot be used.
    """
    of_keys = partial(look, known=known)
    if not executors.has_key_database:
        survey = await _usable(executors.data.define(of_keys, commit=False))
        if _missing_feature_tables(survey, survey):
            # Another process may have created the table, and then added the feature, after `look`
            # read the table names.
            survey = await _usable(executors.data.define(of_keys, commit=False))
        check(survey, Part.ALL, create_tables)
        reject_moving(survey)
        _check_feature_tables(survey, survey)
        return survey, survey
    # Read the data database first.  Another process may be creating both databases.  It creates the
    # key database first, so if we see its data database, we also see its key database.
    data = await _usable(executors.data.define(look, commit=False))
    keys = await _usable(executors.keys.define(of_keys, commit=False), "key database's ")
    # Data keys are stored only after the data database was created.  The data database may have
    # been created after our survey, so survey it again.
    if keys.is_used and data.format_version is None:
        data = await _usable(executors.data.define(look, commit=False))
    # `separate` may have replaced the ids in both databases after our survey of the data database.
    ids_differ = data.meta.get(DATABASE_ID) != keys.meta.get(DATABASE_ID)
    if ids_differ or _missing_feature_tables(data, keys):
        data = await _usable(executors.data.define(look, commit=False))
    check(keys, Part.KEYS, create_tables)
    reject_moving(keys)
    check(data, Part.DATA, create_tables)
    check_together(data, keys)
    _check_feature_tables(data, keys)
    return data, keys


async def _usable(work: Awaitable[T], whose: str = "") -> T:
    """Await *work*; raise ConfigurationError if SQLite cannot open or use the file."""
    try:
        return await work
    except DatabaseError as error:
        if not (error.code or "").startswith(_UNUSABLE):
            raise
        problem = f"the {whose}SQLite file cannot be used: {error}"
        raise ConfigurationError(problem) from None


def mark_plaintext(connection: sa.Connection) -> None:
    """Mark the database as containing plaintext records.

    Call this before the first plaintext record is written.
    """
    meta.swap(connection, PLAINTEXT, None, "1")


async def _make(
    executor: Executor,
    part: Part,
    expected: Survey,
    marks: dict[str, str],
    fresh: list[MasterKeyRow],
) -> None:
    """Create missing tables and rows, unless the database has changed since the survey *expected*.

    *marks* maps the names of rows of `secure_meta` to values.  *fresh* are new keyring rows.
    """
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
    with dialect_of(connection).exclusively(connection):
        if look(connection) != expected:
            return
        if part.missing(expected) and not create_tables_of(part.tables, connection):
            if look(connection) == expected:
                raise ConfigurationError(
                    "the database says that a table exists, but does not show it: check that no "
                    "other table, index or type has the name of a table of this package, and that "
                    "the account may see all tables"
                )
            return  # another process has created tables meanwhile: survey the database again
        for name in marks.keys() - expected.meta.keys():
            meta.put(connection, name, marks[name])
        if fresh:
            connection.execute(sa.insert(keyring), [row._asdict() for row in fresh])


def create_tables_of(tables: Sequence[sa.Table], connection: sa.Connection) -> bool:
    """Create the missing tables among *tables*; return False if another process did the same.

    If the result is False, the transaction was rolled back.  `exclusively` usually prevents this,
    but not on every database.
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


async def _warn(executor: Executor, survey: Survey, writes_plaintext: bool) -> None:
    if survey.adk_tables:
        are_of_1x = await executor.define(_are_of_1x, commit=False)
        if are_of_1x:
            logger.warning(
                "this database also holds tables of adk-secure-sessions 1.x (sessions, events): "
                "their states and events are encrypted with other keys, and their ids and times "
                "are plaintext; `migrate` copies them"
            )
        elif are_of_1x is None:
            logger.warning(
                "this database also holds the tables sessions and events, in which some states are "
                "encrypted by adk-secure-sessions 1.x and others are plaintext, as in ADK's own "
                "tables; their ids and times are plaintext"
            )
        else:
            logger.warning(
                "this database also holds ADK's own tables (sessions, events), which are plaintext"
            )
    if survey.has_plaintext_records and not writes_plaintext:
        logger.warning(
            "this database holds, or once held, plaintext records written by NoOpBackend"
        )


def _are_of_1x(connection: sa.Connection) -> bool | None:
    """Return whether adk-secure-sessions 1.x encrypted the first rows of the table `sessions`.

    Return None if some of these rows are encrypted and others are plaintext.  adk-secure-sessions
    1.x is another author's distribution, which uses the table names of ADK.
    """
    start = sa.func.substr(sa.cast(sa.column("state"), sa.String), 1, 4)
    query = sa.select(start).select_from(sa.table("sessions")).limit(_SAMPLES)
    try:
        starts = connection.execute(query).scalars().all()
    except sa.exc.DBAPIError:  # another program created the table, or we may not read it
        return False
    found = {is_envelope(start or "") for start in starts}
    return None if len(found) == 2 else found == {True}
