"""Which databases are accepted, and what happens if they change while they are opened.

`check` judges surveys, so its cases are a table.  Surveying needs tables: SQLite in memory.
"""

import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
import sqlalchemy as sa

from adk_secure_sessions import AesGcmBackend, NoOpBackend
from adk_secure_sessions.backends.registry import check_backends
from adk_secure_sessions.db.protocol import Executors
from adk_secure_sessions.errors import ConfigurationError, DatabaseError, SecureSessionError
from adk_secure_sessions.keys.keyring import DATA_MASTER, MasterKeyRow
from adk_secure_sessions.storage import opening, schema
from adk_secure_sessions.storage.opening import open_database, open_surveyed, survey_existing
from adk_secure_sessions.storage.survey import Survey, TableSet, require_usable, survey_connection
from tests.storage.support import ROOT, FakeExecutor, backends, one_database

T = TypeVar("T")

ID, OTHER_ID = "00" * 16, "11" * 16
FEATURES = "- " + "00" * 16  # none, and a MAC of the right form
MARKS = {"format": "2", "database_id": ID, "features": FEATURES}
DATA_MARKS = {"format": "2", "database_id": ID, "holds": "data"}
MASTER = MasterKeyRow(1, DATA_MASTER, "key:x", 0, b"wrapped")
ALL = frozenset(schema.metadata.tables)
NOT_OF_DATA = frozenset({"secure_keyring", "secure_data_keys"})
NOT_OF_KEYS = ALL - {"secure_meta", "secure_keyring", "secure_data_keys"}


def survey(
    meta: dict[str, str] | None = None,
    *,
    missing: frozenset[str] = frozenset(),
    conflicting: tuple[str, ...] = (),
    used: bool = False,
    keyring: list[MasterKeyRow] | None = None,
) -> Survey:
    return Survey(ALL - missing, conflicting, False, used, meta or {}, keyring or [])


NEW = survey(missing=ALL)
OURS = survey(MARKS, keyring=[MASTER], used=True)
OF_DATA = survey(DATA_MARKS, missing=NOT_OF_DATA, used=True)
OF_KEYS = survey(MARKS | {"holds": "keys"}, missing=NOT_OF_KEYS, keyring=[MASTER], used=True)

# --- one database --------------------------------------------------------------------------------

ACCEPTED: dict[str, tuple[Survey, TableSet]] = {
    "new, for all": (NEW, TableSet.ALL),
    "new, for the data": (NEW, TableSet.DATA),
    "new, for the keys": (NEW, TableSet.KEYS),
    "empty tables": (survey(), TableSet.ALL),
    "some of its tables": (survey(missing=frozenset({"secure_events"})), TableSet.ALL),
    "ours": (OURS, TableSet.ALL),
    "of the data": (OF_DATA, TableSet.DATA),
    "of the keys": (OF_KEYS, TableSet.KEYS),
}


class Rejected(NamedTuple):
    survey: Survey
    because: str
    table_set: TableSet = TableSet.ALL


REJECTED = {
    "tables of another program": Rejected(
        survey(conflicting=("secure_users",)), "secure_users was not created by adk-secure-sessions"
    ),
    "another format": Rejected(survey(MARKS | {"format": "3"}), "format '3'"),
    "another format without an id": Rejected(survey({"format": "3"}), "format '3'"),
    "another format, with other columns": Rejected(
        survey({"format": "1"}, conflicting=("secure_sessions",)), "format '1'"
    ),
    "a feature of a later release": Rejected(
        survey(MARKS | {"features": "later " + "00" * 16}), "uses 'later', which this release"
    ),
    "no features": Rejected(survey({"format": "2", "database_id": ID}), "row `features`"),
    "features without a MAC": Rejected(survey(MARKS | {"features": "-"}), "row `features`"),
    "a MAC in capital letters": Rejected(
        survey(MARKS | {"features": "- " + "AA" * 16}), "row `features`"
    ),
    "more after the MAC": Rejected(survey(MARKS | {"features": FEATURES + "0"}), "row `features`"),
    "a key database without features": Rejected(
        survey(DATA_MARKS | {"holds": "keys"}, missing=NOT_OF_KEYS), "row `features`", TableSet.KEYS
    ),
    "data without a format": Rejected(survey({"database_id": ID}), "no format version"),
    "a keyring without a format": Rejected(survey(keyring=[MASTER]), "no format version"),
    "rows without a format": Rejected(survey(used=True), "no format version"),
    "no database id": Rejected(
        survey({"format": "2", "features": FEATURES}), "no valid database id"
    ),
    "an id in capital letters": Rejected(
        survey(MARKS | {"database_id": "AB" * 16}), "no valid database id"
    ),
    "an id that is too long": Rejected(
        survey(MARKS | {"database_id": "ab" * 17}), "no valid database id"
    ),
    "a table that was removed": Rejected(
        survey(MARKS, missing=frozenset({"secure_events"})), "secure_events was removed"
    ),
    "a mark of a later release": Rejected(survey(MARKS | {"holds": "half"}), "row `holds`"),
    "data whose keys are elsewhere": Rejected(OF_DATA, "key_db_url"),
    "a key database as the only one": Rejected(OF_KEYS, "key database"),
    "a key database as the data": Rejected(OF_KEYS, "the data.s URL", TableSet.DATA),
    "data with keys of its own beside a key database": Rejected(
        OURS, "keys of its own", TableSet.DATA
    ),
    "sessions in place of a key database": Rejected(OURS, "key_db_url", TableSet.KEYS),
    "data in place of a key database": Rejected(OF_DATA, "key_db_url", TableSet.KEYS),
    "a data table that was removed": Rejected(
        survey(DATA_MARKS, missing=NOT_OF_DATA | {"secure_users"}),
        "secure_users was removed",
        TableSet.DATA,
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_database_is_accepted(name: str) -> None:
    require_usable(*ACCEPTED[name], create_tables=True)


@pytest.mark.parametrize("name", REJECTED)
@pytest.mark.parametrize("create_tables", [True, False])
def test_database_is_rejected(name: str, create_tables: bool) -> None:
    found, because, table_set = REJECTED[name]
    if not create_tables and "was removed" in because:
        because = "create_tables is False"
    with pytest.raises(ConfigurationError, match=because):
        require_usable(found, table_set, create_tables)


@pytest.mark.parametrize(
    ("found", "table_set"),
    [(survey(), TableSet.ALL), (OURS, TableSet.ALL), (OF_DATA, TableSet.DATA)],
)
def test_database_with_all_its_tables_needs_none_made(found: Survey, table_set: TableSet) -> None:
    require_usable(found, table_set, create_tables=False)


# --- surveying -----------------------------------------------------------------------------------


async def nothing() -> None:
    pass


class InMemory:
    """An executor of `run_sync` alone, on SQLite in memory; counts what changed something."""

    def __init__(self) -> None:
        self.engine = sa.create_engine("sqlite://", poolclass=sa.StaticPool)
        self.changes = 0
        self.before: Callable[[], Awaitable[None]] = nothing  # awaited before each change

    async def run_sync(self, work: Callable[[sa.Connection], T], *, commit: bool = True) -> T:
        if commit:
            await self.before()
        with self.engine.connect() as connection:
            result = work(connection)
            if commit:
                self.changes += 1
                connection.commit()
        return result

    def run_sql(self, *statements: str) -> None:
        with self.engine.begin() as connection:
            for statement in statements:
                connection.exec_driver_sql(statement)

    def survey(self) -> Survey:
        with self.engine.connect() as connection:
            return survey_connection(connection)


@pytest.fixture
def databases() -> Iterator[list[InMemory]]:
    """Two empty ones."""
    both = [InMemory(), InMemory()]
    yield both
    for one in both:
        one.engine.dispose()


@pytest.fixture
def database(databases: list[InMemory]) -> InMemory:
    return databases[0]


def executors(database: InMemory) -> Executors:
    both: Any = (database, database)
    return Executors(*both)


def test_survey_takes_a_column_more_for_no_other_table(database: InMemory) -> None:
    schema.metadata.create_all(database.engine)
    database.run_sql("ALTER TABLE secure_users ADD COLUMN theirs TEXT")
    assert database.survey().conflicting_tables == ()


def test_survey_takes_a_locked_table_for_no_other_table(database: InMemory) -> None:
    """Else a service would say that its own table is another program's, and that nothing is
    stored.
    """
    schema.metadata.create_all(database.engine)
    database.run_sql("INSERT INTO secure_meta VALUES ('format', '2')")

    @sa.event.listens_for(database.engine, "before_cursor_execute")
    def fail(connection: object, cursor: object, statement: str, *_: object) -> None:
        if "WHERE 1 = 0" in statement:
            locked = sqlite3.OperationalError("database is locked")
            raise sa.exc.OperationalError(statement, None, locked)

    survey = database.survey()
    assert (survey.conflicting_tables, survey.format_version) == ((), "2")


USED = ["secure_apps", "secure_users", "secure_sessions", "secure_data_keys", "secure_events"]


@pytest.mark.parametrize("table", USED)
def test_survey_sees_whether_anything_is_stored(database: InMemory, table: str) -> None:
    schema.metadata.create_all(database.engine)
    assert not database.survey().is_used
    columns = schema.metadata.tables[table].columns
    slots = ", ".join("1" for _ in columns)
    database.run_sql(f"INSERT INTO {table} VALUES ({slots})")
    assert database.survey().is_used


MARK_ROWS = [{"name": name, "value": value} for name, value in MARKS.items()]


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[sa.Engine]]:
    """Of two processes on one file."""
    both = [sa.create_engine(f"sqlite:///{tmp_path}/s.db") for _ in range(2)]
    yield both
    for one in both:
        one.dispose()


def test_survey_made_while_another_process_makes_tables_is_repeated(
    engines: list[sa.Engine],
) -> None:
    """Else it would see our marks and miss the tables that were made after it asked for names."""
    engine, another = engines
    schema.metadata.create_all(engine, tables=[schema.meta_table])
    with engine.begin() as connection:
        connection.execute(sa.insert(schema.meta_table), MARK_ROWS)

    @sa.event.listens_for(engine, "before_cursor_execute")
    def make_tables(connection: sa.Connection, cursor: object, statement: str, *_: object) -> None:
        if "FROM secure_meta" in statement:
            schema.metadata.create_all(another)

    with engine.connect() as connection:
        assert survey_connection(connection).tables == ALL


def test_survey_made_while_another_process_creates_the_database_is_repeated(
    engines: list[sa.Engine],
) -> None:
    """Else it would see the keyring without the marks, which looks as if they were removed."""
    engine, another = engines
    schema.metadata.create_all(engine)
    rows = [*MARK_ROWS]

    @sa.event.listens_for(engine, "before_cursor_execute")
    def create(connection: sa.Connection, cursor: object, statement: str, *_: object) -> None:
        if "ORDER BY secure_keyring" in statement and rows:
            with another.begin() as other:
                other.execute(sa.insert(schema.meta_table), rows)
                other.execute(sa.insert(schema.keyring), MASTER._asdict())
            rows.clear()

    with engine.connect() as connection:
        found = survey_connection(connection)
    assert (found.meta_texts, found.master_rows) == (MARKS, [MASTER])


# --- making --------------------------------------------------------------------------------------


async def test_database_that_never_stops_changing_is_given_up(database: InMemory) -> None:
    async def toggle() -> None:
        if not database.survey().tables:
            schema.metadata.create_all(database.engine, tables=[schema.meta_table])
        else:
            database.run_sql("DROP TABLE secure_meta")

    database.before = toggle
    with pytest.raises(SecureSessionError, match="kept changing"):
        await open_database(executors(database), backends(), create_tables=True)
    assert database.survey().master_rows == []


async def test_process_that_is_second_replaces_nothing_that_the_first_has_stored(
    database: InMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a lock, as on a Galera cluster, both may find an empty database."""
    empty = database.survey()

    async def be_first() -> None:
        database.before = nothing
        await open_database(executors(database), backends(), create_tables=True)
        monkeypatch.setattr(opening, "survey_connection", lambda connection: empty)

    database.before = be_first
    with pytest.raises(sa.exc.IntegrityError):
        await open_database(executors(database), backends(), create_tables=True)
    assert len(database.survey().master_rows) == 2


# --- plaintext -----------------------------------------------------------------------------------


@pytest.fixture
def no_op() -> NoOpBackend:
    with pytest.warns(UserWarning, match="plaintext"):
        return NoOpBackend()


async def test_encrypting_backend_warns_of_plaintext_records(
    database: InMemory, no_op: NoOpBackend, caplog: pytest.LogCaptureFixture
) -> None:
    aes = AesGcmBackend(ROOT)
    await open_database(executors(database), check_backends(aes, []), create_tables=True)
    assert caplog.messages == []
    await open_database(executors(database), check_backends(no_op, [aes]), create_tables=True)
    assert caplog.messages == []
    await open_database(executors(database), check_backends(aes, []), create_tables=True)
    assert len(caplog.messages) == 1
    assert "NoOpBackend" in caplog.text


# --- a database that is there --------------------------------------------------------------------


async def test_keyring_that_is_known_is_not_made_again(databases: list[InMemory]) -> None:
    """Reading the keyring again must not turn an emptied database into a new one."""
    first, other = databases
    known = await open_database(executors(first), backends(), create_tables=True)
    with pytest.raises(ConfigurationError, match="no encrypted sessions yet"):
        await open_database(executors(other), backends(), create_tables=True, known=known)
    assert other.changes == 0


async def test_database_that_was_replaced_by_another_is_rejected(databases: list[InMemory]) -> None:
    first, other = databases
    known = await open_database(executors(first), backends(), create_tables=True)
    await open_database(executors(other), backends(), create_tables=True)
    survey = await survey_existing(executors(other))
    with pytest.raises(ConfigurationError, match="replaced by another"):
        await open_surveyed(executors(other), survey, backends(), known)


# --- files that cannot be used -------------------------------------------------------------------


def driver_error(name: str, text: str) -> DatabaseError:
    """An error of SQLite's, as an executor raises it."""
    return DatabaseError(text, code=name)


@pytest.mark.parametrize("name", ["SQLITE_CANTOPEN", "SQLITE_NOTADB", "SQLITE_READONLY_DBMOVED"])
async def test_file_that_cannot_be_used_is_named_as_the_reason(name: str) -> None:
    both, _ = one_database(driver_error(name, "the driver's reason"))
    with pytest.raises(ConfigurationError, match="SQLite file cannot be used: the driver's reason"):
        await survey_existing(both)


async def test_other_error_of_the_database_is_raised_as_it_is() -> None:
    both, _ = one_database(driver_error("SQLITE_BUSY", "database is locked"))
    with pytest.raises(DatabaseError, match="database is locked"):
        await survey_existing(both)


async def test_key_database_that_was_made_meanwhile_is_not_taken_for_anothers() -> None:
    """Another process made both after the first look at the data, which is looked at again."""
    data, keys = FakeExecutor(NEW, OF_DATA), FakeExecutor(OF_KEYS)
    found = await survey_existing(Executors(data, keys))
    assert found.meta_texts == OF_DATA.meta_texts | {"features": FEATURES}
    assert (len(data.defined), len(keys.defined)) == (2, 1)
