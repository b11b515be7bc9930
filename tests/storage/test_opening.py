"""What a database may be opened as, what is made where nothing is yet, and what is never made.

`check` and `check_together` judge surveys, so their cases are tables.  Surveying and making need
tables: SQLite in memory.
"""

from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
import sqlalchemy as sa

from adk_secure_sessions import AesGcmBackend, NoOpBackend
from adk_secure_sessions.backends.registry import register
from adk_secure_sessions.db.protocol import Executors
from adk_secure_sessions.errors import (
    ConfigurationError,
    DatabaseError,
    PlaintextRefusedError,
    SecureSessionError,
    WrongKeyError,
)
from adk_secure_sessions.keys.keyring import DATA, INDEX, MasterKeyRow
from adk_secure_sessions.storage import meta, schema
from adk_secure_sessions.storage.opening import open_database, open_existing, survey_existing
from adk_secure_sessions.storage.survey import Part, Survey, check, check_together, look
from tests.storage.support import ROOT, FakeExecutor, backends, one_database

T = TypeVar("T")

ID, OTHER_ID = "00" * 16, "11" * 16
FEATURES = "- " + "00" * 16  # none, and a MAC of the right form
MARKS = {"format": "2", "database_id": ID, "features": FEATURES}
DATA_MARKS = {"format": "2", "database_id": ID, "holds": "data"}
MASTER = MasterKeyRow(1, DATA, "key:x", 0, b"wrapped")
ALL = frozenset(schema.metadata.tables)
NOT_OF_DATA = frozenset({"secure_keyring", "secure_data_keys"})
NOT_OF_KEYS = ALL - {"secure_meta", "secure_keyring", "secure_data_keys"}


def survey(
    meta: dict[str, str] | None = None,
    *,
    missing: frozenset[str] = frozenset(),
    alien: tuple[str, ...] = (),
    used: bool = False,
    keyring: list[MasterKeyRow] | None = None,
) -> Survey:
    return Survey(missing, alien, False, used, meta or {}, keyring or [])


NEW = survey(missing=ALL)
OURS = survey(MARKS, keyring=[MASTER], used=True)
OF_DATA = survey(DATA_MARKS, missing=NOT_OF_DATA, used=True)
OF_KEYS = survey(MARKS | {"holds": "keys"}, missing=NOT_OF_KEYS, keyring=[MASTER], used=True)

# --- one database --------------------------------------------------------------------------------

ACCEPTED: dict[str, tuple[Survey, Part]] = {
    "new, for all": (NEW, Part.ALL),
    "new, for the data": (NEW, Part.DATA),
    "new, for the keys": (NEW, Part.KEYS),
    "empty tables": (survey(), Part.ALL),
    "some of its tables": (survey(missing=frozenset({"secure_events"})), Part.ALL),
    "ours": (OURS, Part.ALL),
    "of the data": (OF_DATA, Part.DATA),
    "of the keys": (OF_KEYS, Part.KEYS),
}


class Rejected(NamedTuple):
    survey: Survey
    because: str
    part: Part = Part.ALL


REJECTED = {
    "tables of another program": Rejected(
        survey(alien=("secure_users",)), "secure_users was not created by adk-secure-sessions"
    ),
    "another format": Rejected(survey(MARKS | {"format": "3"}), "format '3'"),
    "another format without an id": Rejected(survey({"format": "3"}), "format '3'"),
    "another format, with other columns": Rejected(
        survey({"format": "1"}, alien=("secure_sessions",)), "format '1'"
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
        survey(DATA_MARKS | {"holds": "keys"}, missing=NOT_OF_KEYS), "row `features`", Part.KEYS
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
    "a key database as the data": Rejected(OF_KEYS, "db_url", Part.DATA),
    "data with keys of its own beside a key database": Rejected(OURS, "keys of its own", Part.DATA),
    "sessions in place of a key database": Rejected(OURS, "key_db_url", Part.KEYS),
    "data in place of a key database": Rejected(OF_DATA, "key_db_url", Part.KEYS),
    "a data table that was removed": Rejected(
        survey(DATA_MARKS, missing=NOT_OF_DATA | {"secure_users"}),
        "secure_users was removed",
        Part.DATA,
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_database_is_accepted(name: str) -> None:
    check(*ACCEPTED[name], create_tables=True)


@pytest.mark.parametrize("name", REJECTED)
@pytest.mark.parametrize("create_tables", [True, False])
def test_database_is_rejected(name: str, create_tables: bool) -> None:
    found, because, part = REJECTED[name]
    if not create_tables and "was removed" in because:
        because = "create_tables is False"
    with pytest.raises(ConfigurationError, match=because):
        check(found, part, create_tables)


@pytest.mark.parametrize("part", Part)
def test_new_database_is_rejected_where_no_table_may_be_made(part: Part) -> None:
    with pytest.raises(ConfigurationError, match="create_tables is False"):
        check(NEW, part, create_tables=False)


@pytest.mark.parametrize(
    ("found", "part"), [(survey(), Part.ALL), (OURS, Part.ALL), (OF_DATA, Part.DATA)]
)
def test_database_with_all_its_tables_needs_none_made(found: Survey, part: Part) -> None:
    check(found, part, create_tables=False)


# --- a database and its key database -------------------------------------------------------------


def test_database_and_its_key_database_are_a_pair() -> None:
    check_together(OF_DATA, OF_KEYS)


@pytest.mark.parametrize("keys", [NEW, survey(MARKS | {"holds": "keys"}, missing=NOT_OF_KEYS)])
def test_new_database_goes_with_a_key_database_that_holds_no_key(keys: Survey) -> None:
    check_together(NEW, keys)


@pytest.mark.parametrize(
    ("data", "keys", "because"),
    [
        (NEW, OF_KEYS, "keys of another database"),
        (OF_DATA, NEW, "the key database is empty"),
        (
            OF_DATA,
            OF_KEYS._replace(meta=OF_KEYS.meta | {"database_id": OTHER_ID}),
            "belongs to another database",
        ),
    ],
    ids=["the data is gone", "the keys are gone", "of two databases"],
)
def test_databases_that_are_no_pair_are_rejected(data: Survey, keys: Survey, because: str) -> None:
    with pytest.raises(ConfigurationError, match=because):
        check_together(data, keys)


# --- surveying -----------------------------------------------------------------------------------


async def nothing() -> None:
    pass


class InMemory:
    """An executor of `define` alone, on SQLite in memory; counts what changed something."""

    def __init__(self) -> None:
        self.engine = sa.create_engine("sqlite://", poolclass=sa.StaticPool)
        self.changes = 0
        self.before: Callable[[], Awaitable[None]] = nothing  # awaited before each change

    async def define(self, work: Callable[[sa.Connection], T], *, commit: bool) -> T:
        if commit:
            await self.before()
        with self.engine.connect() as connection:
            result = work(connection)
            if commit:
                self.changes += 1
                connection.commit()
        return result

    def run(self, *statements: str) -> None:
        with self.engine.begin() as connection:
            for statement in statements:
                connection.exec_driver_sql(statement)

    def survey(self) -> Survey:
        with self.engine.connect() as connection:
            return look(connection)


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


def executors(data: InMemory, keys: InMemory | None = None) -> Executors:
    parts: Any = (data, keys or data)
    return Executors(*parts)


def test_survey_of_an_empty_database_misses_every_table(database: InMemory) -> None:
    assert database.survey() == Survey(ALL, (), False, False, {}, [])


def test_survey_finds_the_tables_of_adk(database: InMemory) -> None:
    database.run("CREATE TABLE sessions (a)", "CREATE TABLE events (a)")
    assert database.survey().adk_tables


@pytest.mark.parametrize("table", sorted(ALL))
def test_survey_names_a_table_of_ours_that_lacks_a_column(database: InMemory, table: str) -> None:
    schema.metadata.create_all(database.engine)
    database.run(f"DROP TABLE {table}", f"CREATE TABLE {table} (theirs)")
    assert database.survey().alien_tables == (table,)


def test_survey_takes_a_column_more_for_no_other_table(database: InMemory) -> None:
    schema.metadata.create_all(database.engine)
    database.run("ALTER TABLE secure_users ADD COLUMN theirs TEXT")
    assert database.survey().alien_tables == ()


USED = ["secure_apps", "secure_users", "secure_sessions", "secure_data_keys", "secure_events"]


@pytest.mark.parametrize("table", USED)
def test_survey_sees_whether_anything_is_stored(database: InMemory, table: str) -> None:
    schema.metadata.create_all(database.engine)
    assert not database.survey().is_used
    columns = schema.metadata.tables[table].columns
    slots = ", ".join("1" for _ in columns)
    database.run(f"INSERT INTO {table} VALUES ({slots})")
    assert database.survey().is_used


def test_survey_made_while_another_process_makes_tables_is_repeated(tmp_path: Path) -> None:
    """Else it would see our marks and miss the tables that were made after it asked for names."""
    engine = sa.create_engine(f"sqlite:///{tmp_path}/s.db")
    schema.metadata.create_all(engine, tables=[schema.meta])
    with engine.begin() as connection:
        rows = [{"name": name, "value": value} for name, value in MARKS.items()]
        connection.execute(sa.insert(schema.meta), rows)

    another = sa.create_engine(engine.url)

    @sa.event.listens_for(engine, "before_cursor_execute")
    def make_tables(connection: sa.Connection, cursor: object, statement: str, *_: object) -> None:
        if "FROM secure_meta" in statement:
            schema.metadata.create_all(another)

    with engine.connect() as connection:
        assert look(connection).missing_tables == frozenset()
    engine.dispose()
    another.dispose()


def test_survey_made_while_another_process_creates_the_database_is_repeated(
    tmp_path: Path,
) -> None:
    """Else it would see the keyring without the marks, which looks as if they were removed."""
    engine = sa.create_engine(f"sqlite:///{tmp_path}/s.db")
    schema.metadata.create_all(engine)
    another = sa.create_engine(engine.url)
    rows = [{"name": name, "value": value} for name, value in MARKS.items()]

    @sa.event.listens_for(engine, "before_cursor_execute")
    def create(connection: sa.Connection, cursor: object, statement: str, *_: object) -> None:
        if "ORDER BY secure_keyring" in statement and rows:
            with another.begin() as other:
                other.execute(sa.insert(schema.meta), rows)
                other.execute(sa.insert(schema.keyring), MASTER._asdict())
            rows.clear()

    with engine.connect() as connection:
        found = look(connection)
    assert (found.meta, found.keyring) == (MARKS, [MASTER])
    engine.dispose()
    another.dispose()


# --- making --------------------------------------------------------------------------------------


async def test_empty_database_gets_tables_marks_and_two_master_keys(database: InMemory) -> None:
    ring = await open_database(executors(database), backends(), create_tables=True)
    found = database.survey()
    check(found, Part.ALL, create_tables=False)
    assert {row.purpose for row in found.keyring} == {DATA, INDEX}
    assert found.database_id == ring.database_id
    assert database.changes == 1


async def test_database_that_is_complete_is_not_changed(database: InMemory) -> None:
    first = await open_database(executors(database), backends(), create_tables=True)
    again = await open_database(executors(database), backends(), create_tables=False)
    assert database.changes == 1
    assert again.current_id == first.current_id
    assert again.index.app("a") == first.index.app("a")


async def test_key_database_is_completed_before_the_data(databases: list[InMemory]) -> None:
    data, keys = databases
    order = []

    async def of_data() -> None:
        order.append("data")

    async def of_keys() -> None:
        order.append("keys")

    data.before, keys.before = of_data, of_keys
    ring = await open_database(executors(data, keys), backends(), create_tables=True)
    assert order == ["keys", "data"]
    check(data.survey(), Part.DATA, create_tables=False)
    check(keys.survey(), Part.KEYS, create_tables=False)
    assert data.survey().missing_tables == NOT_OF_DATA
    assert data.survey().database_id == keys.survey().database_id == ring.database_id


async def test_start_after_one_that_was_killed_in_between_goes_on_from_there(
    databases: list[InMemory],
) -> None:
    data, keys = databases

    class Killed(BaseException):
        pass

    async def kill() -> None:
        raise Killed

    data.before = kill
    with pytest.raises(Killed):
        await open_database(executors(data, keys), backends(), create_tables=True)
    made = keys.survey()
    data.before = nothing
    await open_database(executors(data, keys), backends(), create_tables=True)
    assert keys.survey() == made
    assert data.survey().database_id == made.database_id


async def test_process_that_comes_second_takes_the_keyring_of_the_first(database: InMemory) -> None:
    """Two processes that start at once must not make two index master keys."""
    rings = []

    async def another() -> None:
        database.before = nothing
        rings.append(await open_database(executors(database), backends(), create_tables=True))

    database.before = another
    rings.append(await open_database(executors(database), backends(), create_tables=True))
    assert len(database.survey().keyring) == 2
    assert rings[0].current_id == rings[1].current_id
    assert rings[0].index.app("a") == rings[1].index.app("a")


async def test_database_that_never_stops_changing_is_given_up(database: InMemory) -> None:
    async def toggle() -> None:
        if database.survey().missing_tables == ALL:
            schema.metadata.create_all(database.engine, tables=[schema.meta])
        else:
            database.run("DROP TABLE secure_meta")

    database.before = toggle
    with pytest.raises(SecureSessionError, match="kept changing"):
        await open_database(executors(database), backends(), create_tables=True)
    assert database.survey().keyring == []


async def test_nothing_is_made_where_no_table_may_be(database: InMemory) -> None:
    with pytest.raises(ConfigurationError, match="create_tables is False"):
        await open_database(executors(database), backends(), create_tables=False)
    assert (database.changes, database.survey().missing_tables) == (0, ALL)


async def test_nothing_is_made_in_a_database_that_is_rejected(database: InMemory) -> None:
    database.run("CREATE TABLE secure_users (theirs)")
    with pytest.raises(ConfigurationError, match="another database or schema"):
        await open_database(executors(database), backends(), create_tables=True)
    assert database.changes == 0


async def test_nothing_is_made_under_a_wrong_root_key(database: InMemory) -> None:
    await open_database(executors(database), backends(), create_tables=True)
    before = database.survey()
    wrong = register(AesGcmBackend(bytes(32)), [])
    with pytest.raises(WrongKeyError):
        await open_database(executors(database), wrong, create_tables=True)
    assert (database.survey(), database.changes) == (before, 1)


async def test_feature_list_that_was_modified_is_rejected(database: InMemory) -> None:
    await open_database(executors(database), backends(), create_tables=True)
    stored = database.survey().meta["features"]
    database.run(f"UPDATE secure_meta SET value = '{FEATURES}' WHERE name = 'features'")
    assert stored != FEATURES
    for opening in (open_existing, partial(open_database, create_tables=True)):
        with pytest.raises(WrongKeyError, match=r"row `features` .* tampered with"):
            await opening(executors(database), backends())


async def test_running_service_rejects_a_feature_list_that_was_modified(database: InMemory) -> None:
    known = await open_database(executors(database), backends(), create_tables=True)
    database.run(f"UPDATE secure_meta SET value = '{FEATURES}' WHERE name = 'features'")
    with pytest.raises(WrongKeyError, match=r"row `features` .* tampered with"):
        await open_existing(executors(database), backends(), known)


async def test_feature_list_of_another_database_is_rejected(databases: list[InMemory]) -> None:
    first, other = databases
    for one in databases:
        await open_database(executors(one), backends(), create_tables=True)
    theirs = other.survey().meta["features"]
    first.run(f"UPDATE secure_meta SET value = '{theirs}' WHERE name = 'features'")
    with pytest.raises(WrongKeyError, match=r"row `features` .* tampered with"):
        await open_existing(executors(first), backends())


async def test_emptied_keyring_is_not_filled_again(database: InMemory) -> None:
    """With new master keys, all that is stored would be lost from sight."""
    await open_database(executors(database), backends(), create_tables=True)
    database.run("DELETE FROM secure_keyring")
    with pytest.raises(WrongKeyError, match="restore secure_keyring"):
        await open_database(executors(database), backends(), create_tables=True)
    assert database.survey().keyring == []


# --- plaintext -----------------------------------------------------------------------------------


@pytest.fixture
def no_op() -> NoOpBackend:
    with pytest.warns(UserWarning, match="plaintext"):
        return NoOpBackend()


async def test_database_is_marked_before_no_op_writes_to_it(
    database: InMemory, no_op: NoOpBackend
) -> None:
    aes = AesGcmBackend(ROOT)
    await open_database(executors(database), register(aes, []), create_tables=True)
    assert not database.survey().has_plaintext_records
    await open_database(executors(database), register(no_op, [aes]), create_tables=True)
    assert database.survey().has_plaintext_records


def test_mark_of_plaintext_is_written_once(database: InMemory) -> None:
    schema.metadata.create_all(database.engine)
    for _ in range(2):
        with database.engine.begin() as connection:
            meta.mark_plaintext(connection)
    assert database.survey().has_plaintext_records


async def test_encrypting_backend_warns_of_plaintext_records(
    database: InMemory, no_op: NoOpBackend, caplog: pytest.LogCaptureFixture
) -> None:
    aes = AesGcmBackend(ROOT)
    await open_database(executors(database), register(aes, []), create_tables=True)
    assert caplog.messages == []
    await open_database(executors(database), register(no_op, [aes]), create_tables=True)
    assert caplog.messages == []
    await open_database(executors(database), register(aes, []), create_tables=True)
    assert len(caplog.messages) == 1
    assert "NoOpBackend" in caplog.text


async def test_keyring_that_no_op_made_is_rejected_by_an_encrypting_backend(
    database: InMemory, no_op: NoOpBackend
) -> None:
    await open_database(executors(database), register(no_op, []), create_tables=True)
    before = database.survey()
    with pytest.raises(PlaintextRefusedError, match="NoOpBackend"):
        await open_database(executors(database), backends(), create_tables=True)
    assert database.survey() == before


# --- a database that is there --------------------------------------------------------------------


async def test_opening_what_is_there_makes_nothing(database: InMemory) -> None:
    with pytest.raises(ConfigurationError, match="no encrypted sessions yet"):
        await survey_existing(executors(database))
    with pytest.raises(ConfigurationError, match="no encrypted sessions yet"):
        await open_existing(executors(database), backends())
    assert database.changes == 0


async def test_survey_of_a_pair_has_the_marks_of_the_data_and_the_keyring_of_the_keys(
    databases: list[InMemory],
) -> None:
    data, keys = databases
    await open_database(executors(data, keys), backends(), create_tables=True)
    found = await survey_existing(executors(data, keys))
    assert found.meta["holds"] == "data"
    assert found.keyring == keys.survey().keyring


async def test_keyring_that_is_known_is_not_made_again(databases: list[InMemory]) -> None:
    """Reading the keyring again must not turn an emptied database into a new one."""
    first, other = databases
    known = await open_database(executors(first), backends(), create_tables=True)
    with pytest.raises(ConfigurationError, match="no encrypted sessions yet"):
        await open_database(executors(other), backends(), create_tables=True, known=known)
    assert other.changes == 0


async def test_database_that_was_replaced_by_another_is_rejected(
    databases: list[InMemory],
) -> None:
    first, other = databases
    known = await open_database(executors(first), backends(), create_tables=True)
    await open_database(executors(other), backends(), create_tables=True)
    with pytest.raises(ConfigurationError, match="replaced by another"):
        await open_existing(executors(other), backends(), known)


# --- files that cannot be used -------------------------------------------------------------------


def driver_error(name: str, text: str) -> DatabaseError:
    """An error of SQLite's, as an executor raises it."""
    return DatabaseError(text, code=name)


@pytest.mark.parametrize("name", ["SQLITE_CANTOPEN", "SQLITE_NOTADB", "SQLITE_READONLY_DBMOVED"])
async def test_file_that_cannot_be_used_is_named_as_the_reason(name: str) -> None:
    both, _ = one_database(driver_error(name, "the driver's reason"))
    with pytest.raises(ConfigurationError, match="SQLite file cannot be used: the driver's reason"):
        await survey_existing(both)


async def test_key_databases_file_is_told_from_the_datas() -> None:
    data = FakeExecutor(NEW)
    keys = FakeExecutor(driver_error("SQLITE_CANTOPEN", "the driver's reason"))
    with pytest.raises(ConfigurationError, match="the key database's SQLite file"):
        await survey_existing(Executors(data, keys))


@pytest.mark.parametrize("whose", ["", "key database's "], ids=["data", "key database"])
async def test_file_that_cannot_be_written_is_named_as_the_reason(whose: str) -> None:
    """It is found only when something is made."""
    failure = driver_error("SQLITE_READONLY", "attempt to write a readonly database")
    fails = FakeExecutor(NEW, failure)
    pair = Executors(FakeExecutor(NEW), fails) if whose else Executors(fails, fails)
    with pytest.raises(ConfigurationError, match=f"the {whose}SQLite file cannot be used"):
        await open_database(pair, backends(), create_tables=True)


async def test_other_error_of_the_database_is_raised_as_it_is() -> None:
    both, _ = one_database(driver_error("SQLITE_BUSY", "database is locked"))
    with pytest.raises(DatabaseError, match="database is locked"):
        await survey_existing(both)


async def test_key_database_that_was_made_meanwhile_is_not_taken_for_anothers() -> None:
    """Another process made both after the first look at the data, which is looked at again."""
    data, keys = FakeExecutor(NEW, OF_DATA), FakeExecutor(OF_KEYS)
    found = await survey_existing(Executors(data, keys))
    assert found.meta == OF_DATA.meta | {"features": FEATURES}
    assert (len(data.defined), len(keys.defined)) == (2, 1)
