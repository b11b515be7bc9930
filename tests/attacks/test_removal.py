"""Rows and tables that are removed, emptied or replaced."""

import pytest

from adk_secure_sessions import (
    ConfigurationError,
    PlaintextRefusedError,
    SecureSessionError,
    TamperedError,
    UnknownKeyError,
    WrongKeyError,
)
from tests.attacks.cells import (
    APP_KEY,
    APP_STATE,
    APP_WITNESS,
    DATA_MASTER,
    INDEX_MASTER,
    SESSION_STATE,
    SESSION_WITNESS,
    SNAPSHOT,
    USER_KEY,
    USER_STATE,
    USER_WITNESS,
    Cell,
)
from tests.attacks.databases import also_on
from tests.attacks.support import (
    DATABASE,
    Database,
    Operation,
    append,
    append_app_state,
    assert_rejected,
    create_another,
    get,
    list_app,
    list_user,
    only,
    rejection,
    user_state,
)
from tests.attacks.world import ALL_SESSIONS, CAROL, SessionIds


def remove(db: Database, cell: Cell) -> None:
    db.run(f"DELETE FROM {cell.table} WHERE {cell.where}")


@also_on("fernet", "postgresql")
@pytest.mark.parametrize(
    "cell",
    [APP_STATE, USER_STATE, SESSION_STATE, SNAPSHOT, APP_WITNESS, USER_WITNESS, SESSION_WITNESS],
    ids=lambda cell: cell.name,
)
async def test_removed_row_is_detected_and_not_created_again(db: Database, cell: Cell) -> None:
    """The service does not mistake it for an app, a user or a session that never existed."""
    remove(db, cell)
    # What cannot be detected in a listing: docs/format.md, "What a reader must check".
    but = {USER_STATE: (list_app,), SESSION_STATE: (list_user, list_app)}.get(cell, ())
    await assert_rejected(db, cell.impact, TamperedError, who=cell.who, except_for=but)


@pytest.mark.parametrize("cell", [APP_KEY, USER_KEY, INDEX_MASTER], ids=lambda cell: cell.name)
async def test_removed_key_is_detected_and_not_created_again(db: Database, cell: Cell) -> None:
    remove(db, cell)
    error = WrongKeyError if cell == INDEX_MASTER else UnknownKeyError
    await assert_rejected(db, cell.impact, error)


@pytest.mark.parametrize(
    ("row", "witness", "operations"),
    [
        (USER_STATE, USER_WITNESS, (append,)),
        (APP_STATE, APP_WITNESS, (append_app_state, user_state)),
    ],
    ids=["user", "app"],
)
async def test_row_and_witness_removed_together_are_detected(
    db: Database, row: Cell, witness: Cell, operations: tuple[Operation, ...]
) -> None:
    remove(db, witness)
    remove(db, row)
    await assert_rejected(db, only(get, *operations, create_another), TamperedError)


# --- the keyring, the meta table, whole tables ---------------------------------------------------


async def test_removed_data_master_is_detected_and_not_created_again(db: Database) -> None:
    """With a new one, the service would write what nobody can read who has the old one."""
    remove(db, DATA_MASTER)
    attempts = only(get, create_another, user_state)
    await assert_rejected(db, attempts, UnknownKeyError, WrongKeyError)


async def test_keyring_row_of_another_database_of_the_same_root_key_is_rejected(
    db: Database,
) -> None:
    other = Database(db.path.with_name("other.db"), "fernet" if not db.is_fernet else "aesgcm")
    for cell in (DATA_MASTER, INDEX_MASTER):
        for columns in ("wrapped", "id, created_at, wrapped"):
            row = other.rows(f"SELECT {columns} FROM secure_keyring WHERE {cell.where}")[0]
            values = {f"v{number}": value for number, value in enumerate(row)}
            slots = ", ".join(f":{name}" for name in values)
            db.run(
                f"UPDATE secure_keyring SET ({columns}) = ({slots}) WHERE {cell.where}", **values
            )
            async with db.service() as service:
                with pytest.raises(WrongKeyError):
                    await service.prepare_tables()
            db.restore()


async def test_keyring_of_another_database_of_the_same_root_key_is_rejected(db: Database) -> None:
    other = Database(db.path.with_name("other.db"), "fernet" if not db.is_fernet else "aesgcm")
    db.run("DELETE FROM secure_keyring")
    with db.connect() as connection:
        connection.execute("ATTACH ? AS other", (str(other.path),))
        connection.execute("INSERT INTO secure_keyring SELECT * FROM other.secure_keyring")
    await assert_rejected(db, DATABASE, WrongKeyError)


async def test_plaintext_master_key_is_rejected(db: Database) -> None:
    """As NoOpBackend stores it: an attacker would know every tag and every key."""
    replace = "UPDATE secure_keyring SET root_key_id = 'none', wrapped = zeroblob(33) WHERE"
    for change in (
        f"{replace} purpose = 'data'",
        f"{replace} purpose = 'index'",
        "INSERT INTO secure_keyring SELECT id + 1, 'data', 'none', created_at + 1, zeroblob(33) "
        "FROM secure_keyring WHERE purpose = 'data'",
    ):
        db.run(change)
        await assert_rejected(db, only(get), PlaintextRefusedError, WrongKeyError)
        db.restore()


@also_on("engine", "postgresql")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("format", None),
        ("format", "0"),
        ("format", "1"),
        ("format", "3"),
        ("format", ""),
        ("format", "2.0"),
        ("format", b"2"),
        ("database_id", None),
        ("database_id", ""),
        ("database_id", "00"),
        ("database_id", "0" * 32),
        ("database_id", "no hexadecimal digits"),
        ("database_id", "\ud800".encode("utf-8", "surrogatepass")),
        ("database_id", b"\0" * 16),
        ("database_id", 5),
        ("features", None),
        ("features", ""),
        ("features", "-"),
        ("features", "- " + "0" * 32),
        ("features", "later " + "0" * 32),
        ("features", "\ud800".encode("utf-8", "surrogatepass")),
        ("features", b"- " + b"0" * 32),
        ("features", 5),
    ],
)
async def test_modified_meta_row_is_rejected(typed_db: Database, name: str, value: object) -> None:
    typed_db.lift_constraints("secure_meta")
    typed_db.run("UPDATE secure_meta SET value = :v WHERE name = :name", v=value, name=name)
    await assert_rejected(typed_db, DATABASE, ConfigurationError, WrongKeyError)


@pytest.mark.parametrize("name", ["format", "database_id", "features", "%"])
async def test_removed_meta_row_is_detected_and_not_created_again(db: Database, name: str) -> None:
    db.run("DELETE FROM secure_meta WHERE name LIKE :name", name=name)
    await assert_rejected(db, DATABASE, ConfigurationError)


@also_on("postgresql")
async def test_emptied_meta_table_and_keyring_are_not_mistaken_for_a_new_database(
    db: Database,
) -> None:
    """With new master keys, no stored session would be found again."""
    db.run("DELETE FROM secure_meta")
    db.run("DELETE FROM secure_keyring")
    await assert_rejected(db, DATABASE, ConfigurationError, WrongKeyError)


TABLES = [
    "secure_meta",
    "secure_keyring",
    "secure_data_keys",
    "secure_apps",
    "secure_users",
    "secure_witnesses",
    "secure_sessions",
    "secure_bases",
    "secure_events",
]


@also_on("postgresql", "mariadb")
@pytest.mark.parametrize("table", TABLES)
async def test_dropped_table_is_detected_and_not_created_again(db: Database, table: str) -> None:
    db.define(f"DROP TABLE {table}")
    await assert_rejected(db, DATABASE, ConfigurationError)
    assert table not in db.dump()


@pytest.mark.parametrize("table", [table for table in TABLES if table != "secure_meta"])
async def test_emptied_table_is_detected(db: Database, table: str) -> None:
    db.run(f"DELETE FROM {table}")
    before = db.dump()
    async with db.service() as service:
        who: SessionIds = ALL_SESSIONS[2] if table == "secure_bases" else CAROL
        error = await rejection(get, service, db, who)
        assert isinstance(error, SecureSessionError)
        assert db.dump() == before


@also_on("postgresql", "mariadb")
@pytest.mark.parametrize("table", TABLES)
async def test_table_replaced_by_a_view_is_rejected(db: Database, table: str) -> None:
    db.define(
        f"ALTER TABLE {table} RENAME TO hidden", f"CREATE VIEW {table} AS SELECT * FROM hidden"
    )
    before = db.dump()
    async with db.service() as service:
        with pytest.raises(ConfigurationError):
            await service.prepare_tables()
    assert db.dump() == before
