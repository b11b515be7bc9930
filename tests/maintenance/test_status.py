"""`status` counts rows by what encrypted them, without a key."""

import sqlalchemy as sa

from adk_secure_sessions import AesGcmBackend, FernetBackend
from adk_secure_sessions.db.dialects import compile_for_sqlite
from adk_secure_sessions.maintenance import Database, MigrationStatus, RecordCount, status
from adk_secure_sessions.storage.writes import DeleteSession
from tests.maintenance.support import APP, NEW, OLD, fill, plaintext_backend, query, run_sql

AES, FERNET = AesGcmBackend(OLD), FernetBackend(NEW)


async def test_status_counts_rows_by_table_and_backend_without_a_key(
    url: str, place: sa.URL
) -> None:
    await fill(url, AES)
    await fill(url, FERNET, others=[AES], users=["ada"], name="f")
    async with Database(url) as db:
        found = await status(db)
    assert (found.format_version, found.has_plaintext_records) == ("2", False)
    assert sorted(found.records, key=str) == sorted(
        [
            # Ada has a newer key of Fernet, which her row names: older records are not.
            RecordCount("secure_apps", 1, 1, 1),
            RecordCount("secure_users", 1, 1, 1),
            RecordCount("secure_users", 2, 1, 1),
            RecordCount("secure_sessions", 1, 4, 2),
            RecordCount("secure_sessions", 2, 2, 2),
            RecordCount("secure_events", 1, 12, 6),
            RecordCount("secure_events", 2, 6, 6),
            RecordCount("secure_witnesses", 1, 6, 4),
            RecordCount("secure_witnesses", 2, 3, 3),
        ],
        key=str,
    )
    ((master,),) = query(place, "SELECT id FROM secure_keyring WHERE purpose = 'data'")
    assert {(one.backend_id, one.master_id, one.key_count) for one in found.data_keys} == {
        (1, master, 3),
        (2, master, 1),
    }
    assert [one.purpose for one in found.master_keys if one.id == master] == ["data"]
    assert {one.root_key_id for one in found.master_keys} == {AES.root_key.key_id}
    assert all(one.is_unwrapped is None and 0 <= one.age < 600 for one in found.master_keys)


async def test_status_tells_of_plaintext_records(file_url: str) -> None:
    no_op = plaintext_backend()
    await fill(file_url, no_op)
    await fill(file_url, AES, others=[no_op], users=["eve"])
    async with Database(file_url, AES) as db:
        found = await status(db)
        statements = compile_for_sqlite.cache_info().currsize
        await status(db)
        assert compile_for_sqlite.cache_info().currsize == statements, "none is made again"
    assert found.has_plaintext_records
    assert {one.root_key_id: one.is_unwrapped for one in found.master_keys} == {
        "none": False,
        AES.root_key.key_id: True,
    }
    assert {one.backend_id for one in found.records} == {1, 3}


async def test_status_counts_values_that_are_no_records(url: str, place: sa.URL) -> None:
    await fill(url, AES)
    assert run_sql(place, "UPDATE secure_users SET state = :junk", junk=b"{}") == 2
    async with Database(url) as db:
        found = await status(db)
    assert RecordCount("secure_users", None, 2, 0) in found.records


async def test_name_in_the_meta_table_that_is_no_text_does_not_stop_status(file_url: str) -> None:
    await fill(file_url, AES)
    run_sql(file_url, "INSERT INTO secure_meta VALUES (:name, 'x')", name=b"junk")
    async with Database(file_url, AES) as db:
        assert (await status(db)).unfinished == ()


async def test_status_shows_the_progress_of_a_migration(url: str, place: sa.URL) -> None:
    await fill(url, AES)
    async with Database(url, AES) as db:
        assert (await status(db)).migration is None
        store = db.imports
        await store.feature.ensure()
        assert (await status(db)).migration == MigrationStatus(0, 0, False, None)
        for number in range(3):
            await store.import_session(
                APP,
                "ada",
                f"copy {number}",
                state=b"{}",
                events=[],
                created_at=0,
                updated_at=0,
                source_etag="1",
            )
        await store.import_state((APP, "cyd"), b"{}")
        await store.import_state((APP,), b"{}")
        await db.runner.run(DeleteSession(await db.runner.identify(APP, "ada", "copy 2")))
        await store.add_tombstone(APP, "ada", "deleted before")
        await store.add_tombstone(APP, "erased")
        assert (await status(db)).migration == MigrationStatus(3, 2, False, None)
        await store.store_mark()
        assert (await status(db)).migration == MigrationStatus(3, 2, True, True)
        run_sql(place, "UPDATE secure_meta SET value = 'complete' WHERE name = 'migration'")
        assert (await status(db)).migration == MigrationStatus(3, 2, True, False)
    async with Database(url) as db:
        assert (await status(db)).migration == MigrationStatus(3, 2, True, None)
