"""A copy of a database gets an id and keys of its own."""

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from adk_secure_sessions import (
    AesGcmBackend,
    ConfigurationError,
    DecryptionError,
    EncryptedSessionService,
    WrongKeyError,
)
from adk_secure_sessions.maintenance import Database, separate, verify
from adk_secure_sessions.storage.schema import metadata
from tests.faults import Point, with_faults
from tests.maintenance.support import (
    APP,
    OLD,
    Killed,
    assert_whole,
    content,
    engine_of,
    event,
    fill,
    query,
    run_sql,
)

AES = AesGcmBackend(OLD)
BIG = "x" * 20_000


def reads_wrapped_keys(step: Any, rows: Any) -> bool:
    # The search for keys from the future, which comes before the first change, also reads them.
    return "wrapped" in (query := str(step.query)) and "created_at >=" not in query


def url_of(file: Path) -> str:
    return f"sqlite+aiosqlite:///{file}"


@pytest.fixture
async def original(tmp_path: Path) -> Path:
    file = tmp_path / "original.db"
    await fill(url_of(file), AES)
    async with EncryptedSessionService(url_of(file), AES) as service:
        session = await service.create_session(
            app_name=APP, user_id="ada", session_id="big", state={"big": BIG}
        )
        await service.append_event(session, event(0, **{"user:u": 1, "app:a": 2}))
    return file


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(original, tmp_path / "copy.db"))


async def content_of(file: Path) -> dict[tuple[str, str], str]:
    return await content(EncryptedSessionService(url_of(file), AES))


async def assert_separated(original: Path, copy: Path, before: dict[tuple[str, str], str]) -> None:
    assert await content_of(copy) == await content_of(original) == before
    await assert_whole(url_of(copy))
    ours, theirs = url_of(copy), url_of(original)
    for column, table in (("id", "secure_data_keys"), ("wrapped", "secure_keyring")):
        statement = f"SELECT {column} FROM {table}"
        assert not set(query(ours, statement)) & set(query(theirs, statement))
    meta = dict(query(ours, "SELECT name, value FROM secure_meta"))
    assert sorted(meta) == ["database_id", "features", "format"]
    assert meta["features"].startswith("- ")


async def test_rows_of_the_original_are_rejected_in_the_copy(
    original: Path, copy: Path, tmp_path: Path
) -> None:
    async with Database(url_of(copy), AES) as db:
        await separate(db)
    assert await content_of(copy)
    for table in metadata.tables.keys() - {"secure_meta"}:
        mixed = Path(shutil.copy(copy, tmp_path / f"{table}.db"))
        where = "seq = 1" if table == "secure_events" else "1"
        with engine_of(url_of(mixed)).begin() as connection:
            connection.exec_driver_sql(f"ATTACH '{original}' AS original")
            connection.exec_driver_sql(f"DELETE FROM main.{table} WHERE {where}")
            connection.exec_driver_sql(
                f"INSERT INTO main.{table} SELECT * FROM original.{table} WHERE {where}"
            )
        with pytest.raises((DecryptionError, WrongKeyError)):
            await content_of(mixed)


@pytest.mark.parametrize(
    "nth", [1, 5, 10, *(pytest.param(nth, marks=pytest.mark.soak) for nth in (2, 3, 8, 12))]
)
async def test_separation_that_was_killed_is_continued_and_no_service_starts_meanwhile(
    original: Path, copy: Path, nth: int
) -> None:
    before = await content_of(original)
    db, faults = with_faults(lambda: Database(url_of(copy), AES))
    plan = faults.data.after(Point.RUN, Killed(), nth=nth)
    async with db:
        with contextlib.suppress(Killed):
            await separate(db)
    if not plan.happened:
        pytest.skip("the command ends with fewer transactions")
    state = dict(query(url_of(copy), "SELECT name, value FROM secure_meta"))
    if "separation" in state:
        async with EncryptedSessionService(url_of(copy), AES) as service:
            with pytest.raises(ConfigurationError, match="separate"):
                await service.prepare_tables()
    async with Database(url_of(copy), AES) as db:
        done = await separate(db)
    assert done.complete
    await assert_separated(original, copy, before)


async def test_running_service_on_the_copy_stops(copy: Path) -> None:
    async with EncryptedSessionService(url_of(copy), AES) as service:
        session = await service.get_session(app_name=APP, user_id="ada", session_id="s0")
        assert session is not None
        async with Database(url_of(copy), AES) as db:
            await separate(db)
        with pytest.raises(ConfigurationError, match="restart the service"):
            await service.append_event(session, event(9))


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE secure_meta SET value = replace(value, ' ', ' 1') WHERE name = 'separation'",
        "DELETE FROM secure_meta WHERE name = 'separation'",
        "UPDATE secure_meta SET value = '-' || substr(value, 11) WHERE name = 'features'",
    ],
)
async def test_modified_state_of_a_separation_is_rejected(copy: Path, statement: str) -> None:
    db, faults = with_faults(lambda: Database(url_of(copy), AES))
    faults.data.before(Point.READ, Killed(), when=reads_wrapped_keys)
    async with db:
        with pytest.raises(Killed):
            await separate(db)
    run_sql(url_of(copy), statement)
    async with Database(url_of(copy), AES) as db:
        with pytest.raises((WrongKeyError, ConfigurationError)):
            await separate(db)
    async with EncryptedSessionService(url_of(copy), AES) as service:
        with pytest.raises((WrongKeyError, ConfigurationError)):
            await service.prepare_tables()


async def test_separation_does_not_end_while_a_data_key_of_the_original_is_stored(
    copy: Path,
) -> None:
    """Its owner's rows were removed before: the original's rows of that owner need it."""
    place = url_of(copy)
    ((bob, tag),) = query(place, "SELECT id, tag FROM secure_users ORDER BY id LIMIT 1 OFFSET 1")
    of_bob = f"SELECT id FROM secure_sessions WHERE user_row = {bob}"
    tags = f"SELECT tag FROM secure_sessions WHERE user_row = {bob}"
    run_sql(place, f"DELETE FROM secure_witnesses WHERE tag IN ({tags}) OR tag = :t", t=tag)
    for table in ("secure_events", "secure_bases"):
        run_sql(place, f"DELETE FROM {table} WHERE session_row IN ({of_bob})")
    run_sql(place, f"DELETE FROM secure_sessions WHERE user_row = {bob}")
    run_sql(place, f"DELETE FROM secure_users WHERE id = {bob}")
    async with Database(url_of(copy), AES) as db:
        done = await separate(db)
        assert (done.complete, done.kept) == (False, 1)
        ((key,),) = query(place, "SELECT id FROM secure_data_keys ORDER BY created_at LIMIT 1")
        assert ("secure_data_keys", str(key)) in {
            (one.table, one.row) for one in (await verify(db)).problems
        }
    async with EncryptedSessionService(url_of(copy), AES) as service:
        with pytest.raises(ConfigurationError, match="separate"):
            await service.prepare_tables()


async def test_all_old_keys_that_are_left_are_counted(copy: Path) -> None:
    place, statement = url_of(copy), "SELECT id FROM secure_data_keys"
    old = len(query(place, statement))
    run_sql(place, "UPDATE secure_events SET event = event || X'00' WHERE seq = 1")
    async with Database(url_of(copy), AES) as db:
        done = await separate(db)
    assert (done.complete, done.deleted_data_keys) == (False, 0)
    assert done.kept == old + 1, "and the old data master"
    assert len(query(place, statement)) == 2 * old


async def test_state_of_an_ended_separation_that_was_inserted_again_begins_a_new_one(
    copy: Path,
) -> None:
    db, faults = with_faults(lambda: Database(url_of(copy), AES))
    faults.data.before(Point.READ, Killed(), when=reads_wrapped_keys)
    async with db:
        with pytest.raises(Killed):
            await separate(db)
    place = url_of(copy)
    names = "name IN ('features', 'separation')"
    replayed = query(place, f"SELECT name, value FROM secure_meta WHERE {names}")
    async with Database(url_of(copy), AES) as db:
        first = await separate(db)
    run_sql(place, f"DELETE FROM secure_meta WHERE {names}")
    for name, value in replayed:
        run_sql(place, "INSERT INTO secure_meta VALUES (:n, :v)", n=name, v=value)
    keys = set(query(place, "SELECT id FROM secure_data_keys"))
    async with Database(url_of(copy), AES) as db:
        second = await separate(db)
    assert (second.complete, second.resumed) == (True, False)
    assert second.database_id != first.database_id
    assert not keys & set(query(place, "SELECT id FROM secure_data_keys"))


async def test_separate_creates_no_file_for_a_wrong_url(tmp_path: Path) -> None:
    urls = [url_of(tmp_path / name) for name in ("missing.db", "missing_keys.db")]
    async with Database(urls[0], AES, key_db_url=urls[1]) as db:
        with pytest.raises(ConfigurationError, match="there is no file"):
            await separate(db)
    assert list(tmp_path.iterdir()) == []
