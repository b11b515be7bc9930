"""What a database holds, and whether it is what it has to be."""

from enum import Enum
from typing import NamedTuple

import sqlalchemy as sa

from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.keys.keyring import MasterKeyRow
from adk_secure_sessions.storage.schema import (
    DATA_TABLES,
    FORMAT_VERSION,
    KEY_TABLES,
    TABLES,
    keyring,
    meta,
    metadata,
)

FORMAT, DATABASE_ID, CLEAR, HOLDS = "format", "database_id", "plaintext", "holds"
# Rows as MasterKeyRow has them.
MASTER_KEYS = sa.select(*(keyring.c[name] for name in MasterKeyRow._fields))


class Part(Enum):
    """What one database is to hold; the value is the mark in `secure_meta` that says so."""

    ALL = None
    DATA = "data"
    KEYS = "keys"

    @property
    def tables(self) -> tuple[sa.Table, ...]:
        """Those that it has."""
        return {Part.ALL: TABLES, Part.DATA: DATA_TABLES, Part.KEYS: KEY_TABLES}[self]

    def missing(self, survey: "Survey") -> frozenset[str]:
        """The names of those that are not there."""
        return survey.missing_tables & {table.name for table in self.tables}


class Survey(NamedTuple):
    """What a database holds."""

    missing_tables: frozenset[str]
    alien_tables: tuple[str, ...]
    adk_tables: bool
    is_used: bool  # whether there are data keys or rows sealed by them
    meta: dict[str, str]
    keyring: list[MasterKeyRow]

    @property
    def part(self) -> Part | None:
        """What it says that it is; None is nothing that this version knows."""
        mark = self.meta.get(HOLDS)
        return next((part for part in Part if part.value == mark), None)

    @property
    def format_version(self) -> str | None:
        """As stored; None in a database that is not ours yet."""
        return self.meta.get(FORMAT)

    @property
    def has_clear_records(self) -> bool:
        """Whether `NoOpBackend` has written there; nothing vouches for it."""
        return CLEAR in self.meta

    @property
    def database_id(self) -> bytes | None:
        """Random, made with the database; None in one that is not ours yet."""
        text = self.meta.get(DATABASE_ID)
        return bytes.fromhex(str(text)) if text else None


def look(connection: sa.Connection) -> Survey:
    """Read what there is, changing nothing."""
    survey = _look(connection)
    if survey.meta and (survey.part or Part.ALL).missing(survey):
        # Perhaps another process made them after we had asked for their names.
        survey = _look(connection)
    return survey


def _look(connection: sa.Connection) -> Survey:
    present = set(sa.inspect(connection).get_table_names())
    tables = [table for table in metadata.sorted_tables if table.name in present]
    alien = _alien(tables, connection)
    missing = frozenset(metadata.tables) - present
    values: dict[str, str] = {}
    masters: list[MasterKeyRow] = []
    used = False
    if not alien and meta in tables:
        values = {row.name: row.value for row in connection.execute(sa.select(meta))}
    if not alien and keyring in tables:
        rows = connection.execute(MASTER_KEYS.order_by(keyring.c.created_at, keyring.c.id))
        masters = [MasterKeyRow(*row) for row in rows]
    if not alien and (others := [table for table in tables if table not in (meta, keyring)]):
        one: sa.ColumnElement[int] = sa.literal_column("1")
        any_row = (sa.exists(sa.select(one).select_from(table)) for table in others)
        used = bool(connection.scalar(sa.select(sa.or_(*any_row))))
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


def check(survey: Survey, part: Part, create_tables: bool) -> None:
    """Refuse a database that is not, and cannot become, what *part* says.

    Raises:
        ConfigurationError: why, and what to do.
    """
    if survey.alien_tables:
        raise ConfigurationError(
            f"the table {survey.alien_tables[0]} was not made by adk-secure-sessions: "
            "use another database or schema"
        )
    version = survey.format_version
    if version not in (None, str(FORMAT_VERSION)):
        raise ConfigurationError(
            f"the database has format {version!r} and this version of adk-secure-sessions reads "
            f"format {FORMAT_VERSION}: install the version that goes with it"
        )
    if version is not None:
        _check_mark(survey, part)
    missing = part.missing(survey)
    if missing and not create_tables:
        raise ConfigurationError(
            f"the table {min(missing)} is missing, and create_tables is False: "
            "run the statements of docs/sql for this kind of database"
        )
    if version is None:
        if survey.meta or survey.keyring or survey.is_used:
            raise ConfigurationError(
                "secure_meta says no format version, though there is data: restore that table"
            )
        return
    if missing:
        raise ConfigurationError(f"the table {min(missing)} was removed: restore it from a backup")
    try:
        if survey.database_id is not None:
            return
    except ValueError:
        pass
    raise ConfigurationError("secure_meta says no valid database id: restore that table")


_MISPLACED = {
    (Part.ALL, Part.DATA): "the keys of this database are in another: give that as key_db_url",
    (Part.ALL, Part.KEYS): "this is a key database: give it as key_db_url, and as db_url the data",
    (Part.DATA, Part.ALL): (
        "this database has keys of its own: leave key_db_url out; or, if its keys are in that "
        "one, restore secure_meta, which no longer says so"
    ),
    (Part.DATA, Part.KEYS): "db_url leads to a key database: give that of the data",
    (Part.KEYS, Part.ALL): (
        "key_db_url leads to a database of sessions with keys of their own: a key database is "
        "one by itself, and is made where there is nothing yet"
    ),
    (Part.KEYS, Part.DATA): "key_db_url leads to a database of sessions whose keys are in another",
}


def _check_mark(survey: Survey, part: Part) -> None:
    if survey.part is None:
        raise ConfigurationError(
            "secure_meta says in `holds` what this version of adk-secure-sessions does not know: "
            "install the version that goes with it, or restore that table"
        )
    if survey.part is not part:
        raise ConfigurationError(_MISPLACED[part, survey.part])


def check_together(data: Survey, keys: Survey) -> None:
    """Refuse a database and a key database, each in itself in order, that are not a pair.

    Raises:
        ConfigurationError: why, and what to do.
    """
    if data.database_id is None and keys.is_used:
        raise ConfigurationError(
            "the key database has keys of a database that is not this one, which is empty: "
            "check db_url, or restore the data from a backup"
        )
    if data.database_id is not None and keys.database_id is None:
        raise ConfigurationError(
            "the key database is empty, though there is a database whose keys it has to hold: "
            "check key_db_url, or restore it from a backup; without it the data is lost"
        )
    if data.database_id is not None and data.database_id != keys.database_id:
        raise ConfigurationError(
            "the key database is that of another database: check db_url and key_db_url"
        )
