"""Master keys, data keys and backends are replaced while services run."""

import asyncio
import contextlib
import itertools
import shutil
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import sqlalchemy as sa

from adk_secure_sessions import (
    AesGcmBackend,
    EncryptedSessionService,
    EncryptionBackend,
    FernetBackend,
    StaticKey,
    TamperedError,
    WrongKeyError,
)
from adk_secure_sessions.crypto.aead import Aes256Gcm
from adk_secure_sessions.db.protocol import Conflict
from adk_secure_sessions.errors import ConfigurationError, Reason, SecureSessionError
from adk_secure_sessions.formats.records import build_header
from adk_secure_sessions.maintenance import (
    Database,
    retire,
    rotate_data,
    rotate_master,
    rotate_root,
    status,
)
from adk_secure_sessions.maintenance.problems import Problems
from adk_secure_sessions.storage.key_operations import RenewKey
from adk_secure_sessions.storage.operation_runner import empty_caches
from adk_secure_sessions.storage.schema import users
from tests.faults import Faults, Point, lost, with_faults
from tests.maintenance.support import (
    APP,
    OLD,
    all_rows,
    assert_whole,
    content,
    event,
    fill,
    plaintext_backend,
    query,
    run_sql,
)
from tests.processes import children
from tests.servers import Server

AES, FERNET, NO_OP = AesGcmBackend(OLD), FernetBackend(OLD), plaintext_backend()
BIG = "x" * 20_000  # a state that is stored as a snapshot


async def stored(url: str, *backends: EncryptionBackend) -> dict[tuple[str, str], str]:
    return await content(EncryptedSessionService(url, backends[0], backends[1:]))


def keys_of(place: sa.URL | str) -> set[int]:
    return {row[0] for row in query(place, "SELECT id FROM secure_data_keys")}


async def filled(url: str, backend: EncryptionBackend = AES, **more: Any) -> None:
    await fill(url, backend, **more)
    async with EncryptedSessionService(url, backend) as service:
        session = await service.create_session(
            app_name=APP, user_id="ada", session_id="big", state={"big": BIG, "app:a": 1}
        )
        await service.append_event(session, event(0, **{"user:u": 1, "app:a": 2, "k": BIG}))


# --- the data master -----------------------------------------------------------------------------


async def test_dry_run_of_retire_expects_the_master_of_replaced_keys_to_be_deleted(
    file_url: str,
) -> None:
    plaintext = plaintext_backend()
    await fill(file_url, plaintext)
    await fill(file_url, AES, others=[plaintext], name="t")
    async with Database(file_url, AES, [plaintext]) as db:
        await rotate_data(db)
        expected = await retire(db, dry_run=True)
        done = await retire(db)
    assert len(done.deleted_master_ids) == 1
    assert expected == done


async def test_running_service_takes_up_a_new_master_after_the_old_one_is_retired(
    url: str, place: sa.URL
) -> None:
    await filled(url)
    async with EncryptedSessionService(url, AES) as running, Database(url, AES) as db:
        session = await running.create_session(app_name=APP, user_id="ada")
        await rotate_master(db)
        assert (await retire(db)).deleted_master_ids
        await running.append_event(session, event(0))  # with a data key it knows
        await running.create_session(app_name=APP, user_id="bob")  # with one it does not know
        await running.create_session(app_name=APP, user_id="eve")  # with one it makes
    await assert_whole(url, AES)
    masters = {row[0] for row in query(place, "SELECT id FROM secure_keyring")}
    async with Database(url, AES) as db:
        assert {one.master_id for one in (await status(db)).data_keys} <= masters


async def test_key_service_is_asked_once_for_a_new_master(file_url: str) -> None:
    asked = 0

    class Root(StaticKey):
        async def unwrap(self, wrapped: bytes, associated_data: bytes) -> bytes:
            nonlocal asked
            asked += 1
            return await super().unwrap(wrapped, associated_data)

    await filled(file_url, users=("ada", "bob", "eve"))
    async with EncryptedSessionService(file_url, AesGcmBackend(Root(OLD))) as running:
        await running.prepare_tables()
        assert asked == 2
        async with Database(file_url, AES) as db:
            await rotate_master(db)
        for user in ("ada", "bob", "eve"):
            await running.list_sessions(app_name=APP, user_id=user)
    assert asked == 3


async def test_master_rotation_without_a_root_key_is_rejected(file_url: str) -> None:
    await filled(file_url, NO_OP)
    async with Database(file_url, NO_OP) as db:
        with pytest.raises(ConfigurationError, match="no root key"):
            await rotate_master(db)


async def test_database_stays_usable_however_often_its_data_master_is_rotated(
    file_url: str,
) -> None:
    await filled(file_url)
    async with Database(file_url, AES) as db:
        for _ in range(58):
            await rotate_master(db)
        with pytest.raises(ConfigurationError, match="run `retire`"):
            await rotate_master(db)
    async with Database(file_url, AES) as db:
        assert len((await retire(db)).deleted_master_ids) == 58
        await rotate_master(db)


async def test_plaintext_master_is_replaced_by_one_under_a_root_key(
    url: str, place: sa.URL
) -> None:
    await filled(url, NO_OP)
    async with Database(url, AES, [NO_OP]) as db:
        await rotate_master(db)
        assert (await rotate_data(db)).left == 0
        retired = await retire(db)
    assert len(retired.deleted_master_ids) == 1
    (root,) = query(place, "SELECT root_key_id FROM secure_keyring WHERE purpose = 'data'")
    assert root[0] == AES.root_key.key_id
    await assert_whole(url, AES, NO_OP)  # the index master is still stored as plaintext


# --- data keys and backends ----------------------------------------------------------------------

MOVES: list[tuple[EncryptionBackend, EncryptionBackend]] = [
    (AES, AES),
    (FERNET, AES),
    (AES, FERNET),
    (NO_OP, AES),
    (AES, NO_OP),
]


@pytest.mark.parametrize(("old", "new"), MOVES, ids=lambda backend: backend.name)
async def test_every_record_is_reencrypted_and_the_old_keys_are_retired(
    old: EncryptionBackend, new: EncryptionBackend, url: str, place: sa.URL
) -> None:
    await filled(url, old)
    before, keys = await stored(url, old), keys_of(place)
    others = [old] if old.root_key != new.root_key or type(old) is not type(new) else []
    if old is NO_OP or new is NO_OP:  # a service has to make its master first
        async with EncryptedSessionService(url, new, others) as service:
            await service.prepare_tables()
    async with Database(url, new, others) as db:
        done = await rotate_data(db)
        assert (done.created_data_keys, done.left, done.bad) == (3, 0, 0)
        found = await status(db)
        assert all(one.rows == one.under_current for one in found.records)
        assert {one.backend_id for one in found.records} == {new.backend_id}
        assert done.reencrypted == sum(one.rows for one in found.records)
        retired = await retire(db)
        assert (retired.deleted_data_keys, retired.kept) == (3, 0)
    assert not keys & keys_of(place)
    assert await stored(url, new, *others) == before
    await assert_whole(url, new, *others)


async def test_record_under_a_key_that_a_service_has_just_made_is_left_to_the_next_pass(
    file_url: str,
) -> None:
    await fill(file_url, users=["ada"])
    db, faults = with_faults(lambda: Database(file_url, AES, [FERNET]))

    async def write() -> None:
        async with EncryptedSessionService(file_url, FERNET, [AES]) as service:
            session = await service.get_session(app_name=APP, user_id="ada", session_id="s0")
            assert session is not None
            await service.append_event(session, event(9))

    # By then the rotation has read the data keys of ada.
    when = lambda step, _: "length(secure_events" in str(step.query)  # noqa: E731
    plan = faults.data.before(Point.READ, write, when=when)
    async with db:
        done = await rotate_data(db)
        assert (plan.happened, done.bad, done.left) == (1, 0, 0)
        assert {one.backend_id for one in (await status(db)).records} == {AES.backend_id}


async def test_key_that_only_the_row_of_its_user_names_is_kept_until_a_rotation(
    file_url: str,
) -> None:
    await fill(file_url, users=["ada"], sessions=1)
    await fill(file_url, FERNET, others=[AES], users=["ada"], sessions=1, name="f")
    async with EncryptedSessionService(file_url, FERNET, [AES]) as service:
        await service.delete_session(app_name=APP, user_id="ada", session_id="s0")
    async with Database(file_url, FERNET, [AES]) as db:
        (kept,) = (await retire(db)).kept_keys
        assert kept.references == (("secure_users", 1),)
        await rotate_data(db)
        assert (await retire(db)).kept == 0


def test_problems_of_suppressed_rows_are_not_added_again() -> None:
    problems = Problems()
    for _ in range(2):
        for number in range(1500):
            problems.add("secure_events", number, Reason.MISMATCH, "bad")
        problems.ignore_counted_rows()
    assert (problems.count, len(problems.first), len(set(problems.first))) == (1500, 1000, 1000)


async def test_progress_counts_up_to_all_and_rate_is_kept(file_url: str) -> None:
    await filled(file_url)
    dry_run = partial(rotate_data, dry_run=True)
    for run in (rotate_master, dry_run, rotate_data, retire, status):
        seen: list[tuple[int, int]] = []
        async with Database(file_url, AES) as db:
            await run(db, progress=lambda *at: seen.append(at), rows_per_second=1e6)  # noqa: B023
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)
        assert seen[-2][0] == seen[-1][0] == seen[-1][1]


# --- running services ----------------------------------------------------------------------------


async def test_service_with_a_retired_key_in_memory_loses_nothing(url: str, place: sa.URL) -> None:
    await filled(url)
    async with EncryptedSessionService(url, AES) as running:
        session = await running.create_session(app_name=APP, user_id="ada", state={"user:n": 0})
        kept = await running.create_session(app_name=APP, user_id="ada")
        await running.append_event(session, event(0))
        async with Database(url, AES) as db:
            await rotate_data(db)
            assert (await retire(db)).kept == 0
        await running.append_event(session, event(1))
        await running.append_event(kept, event(1, **{"user:n": 1, "app:n": 1}))
        await running.create_session(app_name=APP, user_id="ada", session_id="later")
        await running.create_session(
            app_name=APP, user_id="bob", session_id="later", state={"user:n": 1}
        )
    await assert_whole(url, AES)
    async with Database(url, AES) as db:
        assert all(one.rows == one.under_current for one in (await status(db)).records)
    assert len(await stored(url, AES)) == 9


@pytest.mark.parametrize("operation", ["create", "get", "list"])
async def test_operation_goes_on_if_masters_are_replaced_during_each_of_its_attempts(
    operation: str, file_url: str
) -> None:
    """A rotation may end while an operation reads the keyring again because of the one before."""
    await filled(file_url)

    async def replace_masters() -> None:
        async with Database(file_url, AES) as db:
            await rotate_master(db)
            assert (await retire(db)).deleted_master_ids

    service, faults = with_faults(lambda: EncryptedSessionService(file_url, AES))
    async with service:
        await service.prepare_tables()  # it knows the keyring, and no data key
        point = Point.WRITE if operation == "create" else Point.READ
        plans = [
            faults.data.before(point, replace_masters, nth=nth, when=reads_data_keys(point))
            for nth in (1, 2, 3)
        ]
        if operation == "create":
            await service.create_session(app_name=APP, user_id="ada", state={"user:a": 1})
        elif operation == "get":
            assert await service.get_session(app_name=APP, user_id="ada", session_id="s0")
        else:
            assert (await service.list_sessions(app_name=APP)).sessions
        assert [plan.happened for plan in plans] == [1, 1, 1]
    await assert_whole(file_url, AES)


async def test_rotation_knows_its_new_master_although_an_erasure_empties_the_caches(
    file_url: str,
) -> None:
    """An erasure empties the caches of all objects of its process, also of a rotation there."""
    await filled(file_url)
    db, faults = with_faults(lambda: Database(file_url, AES))
    async with db:
        plans = [
            faults.data.after(point, empty_caches, nth=None) for point in (Point.READ, Point.RUN)
        ]
        done = await rotate_master(db)
        assert (done.left, done.bad, done.rotated) == (0, 0, 3)
        assert sum(plan.happened for plan in plans) > 3
    await assert_whole(file_url, AES)


def reads_data_keys(point: Point) -> Callable[[Any, Any], bool]:
    if point is Point.WRITE:
        return lambda step, answer: True
    return lambda step, answer: "secure_data_keys" in str(step.query)


WRITES = [
    ("create", ""),
    ("append", "app:"),
    *(
        pytest.param(*one, marks=pytest.mark.soak)
        for one in [("create", "user:"), ("create", "app:"), ("append", "user:")]
    ),
]


@pytest.mark.parametrize(("write", "scope"), WRITES)
async def test_write_is_repeated_if_keys_are_replaced_between_its_read_and_its_changes(
    write: str, scope: str, postgresql: Server
) -> None:
    """On PostgreSQL, where a write holds no transaction open in between."""
    with postgresql.database() as place:
        url = place.set(drivername="postgresql+asyncpg").render_as_string(hide_password=False)

        async def replace_keys() -> None:
            async with Database(url, AES) as db:
                await rotate_data(db)
                assert (await retire(db)).kept == 0

        await filled(url)
        state: dict[str, object] = {f"{scope}n": 1}
        service, faults = with_faults(lambda: EncryptedSessionService(url, AES))
        async with service:
            if write == "create":  # by a service that knows nothing, so that it has to read
                plan = faults.data.after(Point.READ, replace_keys)
                await service.create_session(app_name=APP, user_id="ada", state=state)
            else:
                session = await service.get_session(app_name=APP, user_id="ada", session_id="s0")
                assert session is not None
                plan = faults.data.after(Point.READ, replace_keys)
                await service.append_event(session, event(9, **state))
            assert plan.happened
            assert faults.data.counts[Point.WRITE] > 1, "it was not repeated"
        await assert_whole(url, AES)


def converse(say: Callable[[object], None], url: str, stop: str, name: str) -> None:
    """Use sessions until the file *stop* exists; say how many events were appended."""

    async def talk(service: EncryptedSessionService, task: int) -> int:
        for n in itertools.count():
            user = f"user {n % 3}"
            session = await service.create_session(
                app_name=APP, user_id=user, state={"user:n": n, "app:n": n}
            )
            for k in range(4):
                await service.append_event(session, event(k, k=k, **{f"user:{name}{task}": k}))
            found = await service.get_session(app_name=APP, user_id=user, session_id=session.id)
            assert found is not None
            assert [one.actions.state_delta["k"] for one in found.events] == [0, 1, 2, 3]
            assert (await service.list_sessions(app_name=APP, user_id=user)).sessions
            if n % 4:
                await service.delete_session(app_name=APP, user_id=user, session_id=session.id)
            if Path(stop).exists():
                return 4 * (n + 1)
        raise AssertionError

    async def main() -> int:
        async with EncryptedSessionService(url, AES) as service:
            return sum(await asyncio.gather(talk(service, 0), talk(service, 1)))

    say(asyncio.run(main()))


async def test_processes_lose_nothing_while_everything_is_rotated(
    url: str, place: sa.URL, tmp_path: Path
) -> None:
    await filled(url)
    stop = tmp_path / "stop"
    with children(*((converse, url, str(stop), name) for name in "ab")) as running:
        try:
            async with Database(url, AES) as db:
                for _ in range(2):
                    await rotate_master(db)
                    done = await rotate_data(db)
                    assert done.bad == 0, done.problems
                    await retire(db)
                await rotate_root(db)
        finally:
            stop.touch()
        for child in running:
            (appended,) = child.said()  # and wrote nothing to stderr
            assert appended > 0
    await assert_whole(url, AES)
    async with Database(url, AES) as db:
        await rotate_data(db)
        await rotate_master(db)
        assert (await retire(db)).kept == 0
    assert len(query(place, "SELECT id FROM secure_keyring")) == 2
    await assert_whole(url, AES)


# --- rows that cannot be decrypted ---------------------------------------------------------------


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("edits_plaintext", [False, True])
async def test_record_that_would_not_decrypt_again_is_not_replaced(
    url: str, edits_plaintext: bool
) -> None:
    await filled(url)
    before = await stored(url, AES)

    class FailsForLongRecords(AesGcmBackend):
        def cipher(self, key: bytes) -> Any:
            proper = super().cipher(key)

            def encrypt(plaintext: bytes, associated_data: bytes) -> bytes:
                is_long = len(plaintext) > len(BIG)
                if is_long and edits_plaintext:
                    return proper.encrypt(flipped(plaintext), associated_data)
                sealed = proper.encrypt(plaintext, associated_data)
                return flipped(sealed) if is_long else sealed

            return mock.Mock(encrypt=encrypt, decrypt=proper.decrypt)

    named = r"^secure_(bases|events) row \d.*: its new value does not decrypt.*: check the backend"
    async with Database(url, FailsForLongRecords(OLD)) as db:
        with pytest.raises(SecureSessionError, match=named):
            await rotate_data(db)
    assert await stored(url, AES) == before
    async with Database(url, AES) as db:
        done = await rotate_data(db)
    assert (done.resumed, done.left, done.bad) == (True, 0, 0)
    assert await stored(url, AES) == before
    await assert_whole(url, AES)


async def test_data_key_that_would_not_unwrap_again_is_not_replaced(
    url: str, place: sa.URL
) -> None:
    await filled(url)
    before, keys = await stored(url, AES), all_rows(place)["secure_data_keys"]
    proper = Aes256Gcm.encrypt

    def encrypt(self: Aes256Gcm, plaintext: bytes, associated_data: bytes) -> bytes:
        sealed = proper(self, plaintext, associated_data)
        return flipped(sealed) if b"data-key" in associated_data else sealed

    async with Database(url, AES) as db:
        named = r"^secure_data_keys row \d+: its new value does not decrypt.*: check the backend"
        with (
            mock.patch.object(Aes256Gcm, "encrypt", encrypt),
            pytest.raises(SecureSessionError, match=named),
        ):
            await rotate_master(db)
        assert all_rows(place)["secure_data_keys"] == keys
        done = await rotate_master(db)
    assert (done.resumed, done.left, done.bad) == (True, 0, 0)
    assert await stored(url, AES) == before
    await assert_whole(url, AES)


@pytest.mark.parametrize("is_late", [False, True], ids=["before", "after the keys were read"])
async def test_record_under_a_data_key_that_cannot_be_unwrapped_is_bad(
    file_url: str, is_late: bool
) -> None:
    await fill(file_url, users=["ada"])
    db, faults = with_faults(lambda: Database(file_url, AES))

    async def plant() -> None:
        """Insert a data key of ada under a data master that does not exist."""
        run_sql(
            file_url,
            "INSERT INTO secure_data_keys (id, owner, generation, backend_id, created_at, wrapped) "
            "SELECT 777, tag, 99, :b, 1, :w FROM secure_users",
            b=AES.backend_id,
            w=build_header(AES.backend_id, 99999) + bytes(60),
        )

    run_sql(
        file_url,
        "UPDATE secure_events SET event = CAST(:h || substr(event, 14) AS BLOB) "
        "WHERE seq = 1 AND session_row = "
        "(SELECT min(session_row) FROM secure_events)",
        h=build_header(AES.backend_id, 777),
    )
    if is_late:
        when = lambda step, _: "length(secure_events" in str(step.query)  # noqa: E731
        faults.data.before(Point.READ, plant, when=when, nth=1)
    else:
        await plant()
    async with db:
        done = await rotate_data(db)
    (problem,) = done.problems
    assert (done.bad, done.left) == (1, 1)
    assert (problem.table, problem.row) == ("secure_data_keys", "777")
    assert "the keyring holds no data master 99999" in problem.detail


async def renew_keys(db: Database) -> None:
    """Give each app and user a new data key, as a rotation does first; re-encrypt nothing else."""
    identity, now = await db.runner.identify(APP), time.time_ns() // 1000
    await db.runner.run(RenewKey(identity, now, of_user=False))
    for (tag,) in await db.runner.data_db.read(sa.select(users.c.tag), {}):
        await db.runner.run(RenewKey(identity._replace(user_tag=tag), now, of_user=True))


HIDING = [
    ("secure_events", "DELETE FROM secure_events"),
    ("secure_events", "DELETE FROM secure_events WHERE seq > 0"),
    ("secure_bases", "DELETE FROM secure_bases"),
    ("secure_sessions", "DELETE FROM secure_sessions"),
    ("secure_users", "DELETE FROM secure_users"),
    ("secure_users", "UPDATE secure_users SET state = 'not a record'"),
    ("secure_data_keys", "UPDATE secure_data_keys SET backend_id = 300 WHERE generation = 0"),
    ("secure_data_keys", "UPDATE secure_data_keys SET generation = 'x' WHERE generation = 0"),
]


async def test_rows_that_were_hidden_from_retire_can_be_read_when_they_are_back(
    tmp_path: Path, file_url: str
) -> None:
    """Otherwise somebody who can write could make keys retire that their victim needs."""
    await filled(file_url, users=["ada"])
    before = await stored(file_url, AES)
    async with Database(file_url, AES) as db:
        await renew_keys(db)
    for number, (table, statement) in enumerate(HIDING):
        file = shutil.copy(tmp_path / "sessions.db", tmp_path / f"{number}.db")
        url, place = f"sqlite:///{file}", sa.URL.create("sqlite", database=str(file))
        run_sql(place, f"CREATE TABLE original AS SELECT * FROM {table}")
        run_sql(place, statement)
        with contextlib.suppress(TamperedError):  # if a row belongs to no other any more
            async with Database(url, AES) as db:
                assert (await retire(db)).kept > 0, statement
        run_sql(place, f"DELETE FROM {table}")
        run_sql(place, f"INSERT INTO {table} SELECT * FROM original")
        run_sql(place, "DROP TABLE original")
        assert await stored(url, AES) == before, statement
        await assert_whole(url, AES)


async def test_data_key_whose_header_was_modified_keeps_its_master(file_url: str) -> None:
    await filled(file_url)
    async with Database(file_url, AES) as db:
        run_sql(file_url, "CREATE TABLE original AS SELECT * FROM secure_data_keys")
        await rotate_master(db)
        ((header,),) = query(
            file_url, "SELECT substr(wrapped, 1, 13) FROM secure_data_keys ORDER BY id LIMIT 1"
        )
        run_sql(file_url, "DELETE FROM secure_data_keys")
        run_sql(file_url, "INSERT INTO secure_data_keys SELECT * FROM original")  # not rotated
        run_sql(
            file_url, "UPDATE secure_data_keys SET wrapped = :h || substr(wrapped, 14)", h=header
        )
        with contextlib.suppress(TamperedError):
            assert (await retire(db)).deleted_master_ids == ()
        run_sql(file_url, "DELETE FROM secure_data_keys")
        run_sql(file_url, "INSERT INTO secure_data_keys SELECT * FROM original")
        run_sql(file_url, "DROP TABLE original")
    await assert_whole(file_url, AES)


@contextlib.asynccontextmanager
async def rotated_with_faults(url: str) -> AsyncIterator[tuple[Database, Faults]]:
    """Yield a filled database whose master and data keys were rotated, but not retired."""
    await filled(url)
    db, faults = with_faults(lambda: Database(url, AES))
    async with db:
        await rotate_master(db)
        await rotate_data(db)
        yield db, faults


async def test_retire_counts_keys_whose_deletion_was_answered_by_a_lost_connection(
    file_url: str,
) -> None:
    async with rotated_with_faults(file_url) as (db, faults):
        is_lost = itertools.cycle([True, False])
        plan = faults.data.after(Point.RUN, lost(), nth=None, when=lambda *_: next(is_lost))
        retired = await retire(db)
        assert plan.happened > 1
        assert (retired.deleted_data_keys, len(retired.deleted_master_ids)) == (3, 1)


@pytest.mark.parametrize(("owners", "deleted"), [(1, (1, 0)), (3, (3, 0))])
async def test_retire_counts_no_key_that_stays_after_a_rollback(
    owners: int, deleted: tuple[int, int], file_url: str
) -> None:
    """After *owners*, another node's transaction adds a key, and so undoes the next deletion."""
    async with rotated_with_faults(file_url) as (db, faults):
        old_master = "(SELECT wrapped FROM secure_data_keys ORDER BY generation LIMIT 1)"
        ((old_key,),) = query(file_url, f"SELECT {old_master}")

        def add_key_of_old_master() -> None:
            run_sql(
                file_url,
                "INSERT INTO secure_data_keys SELECT -id, owner, 99, backend_id, :old, created_at "
                "FROM secure_data_keys WHERE generation > 0",
                old=old_key,
            )

        def plan_rollback() -> None:
            faults.data.after(Point.WORK, Conflict())
            faults.data.before(Point.RUN, add_key_of_old_master, nth=2)

        def is_next(step: Any, rows: Any) -> bool:
            reads_keys = "secure_data_keys.wrapped" in str(step.query)
            return reads_keys and len(keys_of(file_url)) == 6 - owners

        plan = faults.data.after(Point.READ, plan_rollback, when=is_next)
        retired = await retire(db)
        assert plan.happened
        assert (retired.deleted_data_keys, len(retired.deleted_master_ids)) == deleted
        assert retired.kept


async def test_retire_opens_the_keyring_first(file_url: str) -> None:
    await filled(file_url)
    async with Database(file_url, AES) as db:
        await rotate_data(db)
        await rotate_master(db)
    before = keys_of(file_url)
    run_sql(file_url, "UPDATE secure_keyring SET created_at = 'x' WHERE purpose = 'data'")
    async with Database(file_url, AES) as db:
        with pytest.raises(WrongKeyError):
            await retire(db)
    assert keys_of(file_url) == before
    async with Database(file_url) as db:
        with pytest.raises(ConfigurationError, match="root key"):
            await retire(db)


@pytest.mark.parametrize(
    ("statement", "table"),
    [
        ("UPDATE secure_events SET time = 'x' WHERE seq = 1", "secure_events"),
        ("UPDATE secure_bases SET state = 7", "secure_bases"),
        (
            "UPDATE secure_witnesses SET number = 'x' WHERE tag IN "
            "(SELECT tag FROM secure_sessions LIMIT 1)",
            "secure_witnesses",
        ),
    ],
)
async def test_malformed_value_prevents_the_rotation_of_no_other_row(
    statement: str, table: str, tmp_path: Path, file_url: str
) -> None:
    await filled(file_url)
    bad = run_sql(file_url, statement)
    async with Database(file_url, AES) as db:
        done = await rotate_data(db)
    assert {one.table for one in done.problems} == {table}
    assert done.bad == done.left == bad
