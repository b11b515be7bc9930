"""After `vacuum`, the files hold nothing of what was replaced; the files are read as bytes."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from google.adk.events.event import Event
from google.genai import types

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService
from adk_secure_sessions.maintenance import (
    Database,
    Vacuum,
    retire,
    rotate_data,
    rotate_master,
    vacuum,
    verify,
)
from tests.attacks.needles import files_of, present
from tests.cli.support import run
from tests.maintenance.support import APP, OLD, assert_whole, fill, plaintext_backend
from tests.servers import MariaDB, unavailable

AES, NO_OP = AesGcmBackend(OLD), plaintext_backend()
USERS, SESSIONS = 8, 4
# Events of a session: some pages of each table, or many.
each_size = pytest.mark.parametrize(
    "events", [pytest.param(6, id="some"), pytest.param(40, id="many", marks=pytest.mark.soak)]
)


async def talk(url: str, events: int) -> list[bytes]:
    """Write events as plaintext, at once: they are committed in groups.  Return their texts."""
    needles: list[str] = []

    async def one(user: str) -> None:
        for _ in range(SESSIONS):
            session = await service.create_session(app_name=APP, user_id=user)
            for _ in range(events):
                needles.append(f"Ndl{len(needles):04}Wq83Zk")
                content = types.Content(role="user", parts=[types.Part(text=needles[-1])])
                await service.append_event(
                    session, Event(author="user", invocation_id="i", content=content)
                )

    async with EncryptedSessionService(url, NO_OP) as service:
        await asyncio.gather(*(one(f"user {number}") for number in range(USERS)))
    return [text.encode() for text in needles]


async def leave_no_op(url: str) -> None:
    """The steps of docs/rotation.md before `vacuum`."""
    async with Database(url, AES, [NO_OP]) as db:
        assert (await rotate_master(db)).left == 0
        assert (await rotate_data(db)).left == 0
        assert (await retire(db)).kept == 0


@each_size
async def test_sqlite_file_holds_no_plaintext_after_no_op_was_left_and_vacuum(
    tmp_path: Path, events: int
) -> None:
    path = tmp_path / "sessions.db"
    url = f"sqlite+aiosqlite:///{path}"
    needles = await talk(url, events)
    assert len(needles) == USERS * SESSIONS * events
    async with EncryptedSessionService(url, AES, [NO_OP]) as service:
        await service.prepare_tables()  # keeps the write-ahead log open
        await leave_no_op(url)
        assert present(path, needles), "no search proves anything that never finds anything"
        async with Database(url) as db:  # no key is needed
            assert await vacuum(db) == Vacuum(True, ())
        assert files_of(path)[f"{path.name}-wal"] == b""
        assert present(path, needles) == 0
        listed = await service.list_sessions(app_name=APP)
        assert len(listed.sessions) == USERS * SESSIONS
    assert present(path, needles) == 0
    assert (await assert_whole(url, AES, NO_OP)).events


async def test_both_files_are_rewritten_with_a_key_database(tmp_path: Path) -> None:
    data, keys = tmp_path / "data.db", tmp_path / "keys.db"
    url, key_url = f"sqlite:///{data}", f"sqlite:///{keys}"
    async with EncryptedSessionService(url, AES, key_db_url=key_url) as service:
        await service.create_session(app_name=APP, user_id="ada", state={"big": "x" * 50_000})
    async with Database(url, AES, key_db_url=key_url) as db:
        for path in (data, keys):
            with closing(sqlite3.connect(path)) as connection:
                connection.execute("PRAGMA secure_delete = OFF")
                connection.execute("CREATE TABLE needles AS SELECT 'Ndl0000Wq83Zk' AS text")
                connection.execute("DROP TABLE needles")
                connection.commit()
            assert present(path, [b"Ndl0000Wq83Zk"])
        db.limits = db.limits._replace(lock_wait=0)
        with closing(sqlite3.connect(keys, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM secure_keyring").fetchone()
            (obstacle,) = (await vacuum(db)).obstacles
        assert obstacle.startswith("key database: other connections")
        assert await vacuum(db) == Vacuum(True, ())
        for path in (data, keys):
            assert not present(path, [b"Ndl0000Wq83Zk"])
        assert (await verify(db)).bad == 0


def test_command_rewrites_and_exits_with_1_if_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path}/sessions.db"
    asyncio.run(fill(url))
    assert run("vacuum", "--db", url) == (
        0,
        "all tables were rewritten: their free space holds no replaced or deleted values\n",
        "",
    )
    assert run("vacuum", "--db", url, "--json").json == {"cleared": True, "obstacles": []}

    async def fail(db: Database) -> Vacuum:
        return Vacuum(False, ("secure_events: other connections used the database all the time",))

    monkeypatch.setattr("adk_secure_sessions.maintenance.vacuum", fail)
    said = run("vacuum", "--db", url)
    assert (said.code, said.stdout[:28]) == (1, "not rewritten: secure_events")


# --- servers -------------------------------------------------------------------------------------


async def test_tables_that_cannot_be_rewritten_are_all_named(mariadb: MariaDB) -> None:
    with mariadb.admin.connect() as connection:
        if connection.exec_driver_sql("SELECT @@innodb_file_per_table").scalar():
            unavailable("this server keeps each table in a file of its own")
    with mariadb.database() as place:
        url = place.set(drivername="mariadb+asyncmy").render_as_string(hide_password=False)
        await fill(url)
        async with Database(url) as db:
            done = await vacuum(db)
        engine = sa.create_engine(place)
        names = set(sa.inspect(engine).get_table_names())
        engine.dispose()
    assert not done.cleared
    assert {text.partition(":")[0] for text in done.obstacles} == names
    assert all("innodb_file_per_table" in text for text in done.obstacles)
