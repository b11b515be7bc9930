"""`debug lookup`, `debug inspect` and `init`."""

import pytest
import sqlalchemy as sa

from adk_secure_sessions import (
    AesGcmBackend,
    ConfigurationError,
    EncryptedSessionService,
    WrongKeyError,
)
from adk_secure_sessions.maintenance import (
    TABLE_NAMES,
    Database,
    init,
    inspect_records,
    lookup,
    status,
)
from adk_secure_sessions.storage.schema import metadata
from tests.maintenance.support import APP, NEW, OLD, fill, query

BACKEND = AesGcmBackend(OLD)


async def test_lookup_finds_the_rows_of_a_user_and_a_session(url: str, place: sa.URL) -> None:
    await fill(url)
    async with Database(url, BACKEND) as db:
        app, user, session = await lookup(db, APP, "bob", "s1")
        assert await lookup(db, APP) == (app,)
        nobody = (await lookup(db, APP, "eve", "s1"))[1:]
    for found, table in ((app, "apps"), (user, "users"), (session, "sessions")):
        assert found.table == f"secure_{table}"
        rows = query(place, f"SELECT tag FROM secure_{table} WHERE id = {found.row}")
        assert [bytes(row[0]).hex() for row in rows] == [found.tag]
    ids = query(place, f"SELECT id FROM secure_sessions WHERE user_row = {user.row} ORDER BY id")
    assert session.row == ids[1][0]
    assert [found.row for found in nobody] == [None, None]
    assert nobody[1].tag != session.tag


async def test_lookup_of_a_session_without_its_user_is_rejected(file_url: str) -> None:
    async with Database(file_url, BACKEND) as db:
        with pytest.raises(ConfigurationError, match="give the user"):
            await lookup(db, APP, session_id="s1")


async def test_inspect_reads_headers_without_a_key(url: str, place: sa.URL) -> None:
    await fill(url)
    (row, length), *_ = query(
        place,
        "SELECT session_row, length(event) FROM secure_events WHERE seq = 1 ORDER BY session_row",
    )
    async with Database(url) as db:
        events = await inspect_records(db, "secure_events", row)
        assert [one.row for one in events] == [f"{row}, {seq}" for seq in range(3)]
        assert (events[1].column, events[1].backend_id, events[1].length) == ("event", 1, length)
        keys = await inspect_records(db, "secure_data_keys")
        assert events[1].key_id in {int(one.row) for one in keys}
        masters = await inspect_records(db, "secure_keyring")
        assert {one.root_key_id for one in masters} == {BACKEND.root_key.key_id}
        assert {one.key_id for one in keys} < {int(one.row) for one in masters}
        (witness, *more) = await inspect_records(db, "secure_witnesses", limit=3)
        assert len(more) == 2
        assert await inspect_records(db, "secure_witnesses", witness.row) == (witness,)
        for table in TABLE_NAMES:
            assert all(one.length > 13 for one in await inspect_records(db, table))
        assert await inspect_records(db, "secure_users", 7) == ()
        for wrong in ("sessions", "secure_meta"):
            with pytest.raises(ConfigurationError, match="secure_events"):
                await inspect_records(db, wrong)
        for table, name in (("secure_users", "ada"), ("secure_witnesses", "xyz")):
            with pytest.raises(ConfigurationError, match="is identified by"):
                await inspect_records(db, table, name)


@pytest.mark.no_tables
async def test_init_makes_and_reports_what_is_missing(url: str, place: sa.URL) -> None:
    async with Database(url, BACKEND) as db:
        made = await init(db)
        assert set(made.tables) == {*metadata.tables}
        masters = query(place, "SELECT id FROM secure_keyring")
        assert sorted(made.master_ids) == sorted(row[0] for row in masters)
        assert (await init(db)).numbers == (0, 0)
        assert len((await status(db)).master_keys) == 2
    async with EncryptedSessionService(url, BACKEND, create_tables=False) as service:
        await service.create_session(app_name=APP, user_id="ada")
    async with Database(url, AesGcmBackend(NEW)) as db:
        with pytest.raises(WrongKeyError):
            await init(db)
