"""A MariaDB Galera cluster: writes to all of its nodes, nodes that are behind, a node that dies.

`tests/galera.py` explains how the cluster works.  By default, only a few of these tests run.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from google.adk.events import Event, EventActions
from sqlalchemy.ext.asyncio import create_async_engine

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService, TamperedError
from adk_secure_sessions.db.connect import executors_for
from adk_secure_sessions.db.protocol import Apply, Change, Conflict, Steps
from adk_secure_sessions.keys.keyring import DATA_MASTER, new_master
from adk_secure_sessions.maintenance import (
    Database,
    erase_user,
    retire,
    rotate_data,
    rotate_master,
    rotate_root,
    verify,
)
from adk_secure_sessions.maintenance.rotation import store_master_keys
from adk_secure_sessions.storage.clusters import KEYRING_CLAIMS
from adk_secure_sessions.storage.features.imports import ImportStatus
from adk_secure_sessions.storage.features.search_index import CorrectIndexRows
from adk_secure_sessions.storage.queries import TOUCH_DATA_KEY
from tests.galera import NODES, Galera
from tests.processes import children
from tests.reliability import traffic

pytestmark = pytest.mark.soak  # to start a cluster takes 16 s of CPU

BACKEND = AesGcmBackend(bytes(range(32)))
APP, USER = "app", "user"
SYNC = {"init_command": "SET SESSION wsrep_sync_wait = 7"}
Say = Callable[[object], None]


class Cluster:
    """The URLs of one database on each node, and the node that a test lets fall behind."""

    behind = 1

    def __init__(self, galera: Galera, url: sa.URL) -> None:
        self.galera = galera
        self.urls = [galera.on(url, n).set(drivername="mariadb+asyncmy") for n in range(NODES)]

    def service(self, node: int) -> EncryptedSessionService:
        return EncryptedSessionService(self.urls[node], BACKEND)

    def database(self, node: int) -> Database:
        return Database(self.urls[node], BACKEND)

    @contextlib.contextmanager
    def node_behind(self) -> Iterator[None]:
        with self.galera.applies_nothing(self.behind):
            yield

    async def commits(self, node: int) -> None:
        """Wait until a transaction waits in its COMMIT on *node*."""
        query = (
            "SELECT COUNT(*) FROM information_schema.processlist "
            f"WHERE db = '{self.urls[node].database}' AND info = 'COMMIT'"
        )
        deadline = time.monotonic() + 30
        with self.galera.nodes[node].admin.connect() as connection:
            while not connection.exec_driver_sql(query).scalar():
                assert time.monotonic() < deadline, "no transaction got to its COMMIT"
                await asyncio.sleep(0.01)

    async def wait_for_all(self) -> None:
        """Wait until all nodes have applied what was committed."""
        for node in self.galera.nodes:
            with node.admin.connect() as connection:
                connection.exec_driver_sql("SET SESSION wsrep_sync_wait = 1")
                connection.exec_driver_sql("SELECT 1").close()
                connection.exec_driver_sql("SET SESSION wsrep_sync_wait = 0")

    async def assert_whole(self) -> None:
        """Check that all nodes have the same rows, and that all of them can be decrypted."""
        await self.wait_for_all()
        found = []
        for node in range(NODES):
            async with self.database(node) as db:
                found.append(await verify(db))
        assert [one.bad for one in found] == [0] * NODES, found
        assert found == found[:1] * NODES


@pytest.fixture
def cluster(galera: Galera) -> Iterator[Cluster]:
    with galera.database() as url:
        yield Cluster(galera, url)


def changing(delta: dict[str, object]) -> Event:
    return Event(author="a", invocation_id="i", actions=EventActions(state_delta=delta))


# --- several processes --------------------------------------------------------------------------


def write_through_faults(say: Say, *arguments: Any) -> None:
    # It logs connections that a dying node closes while they return to the pool.
    logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)
    traffic.write(say, *arguments, through_faults=True)


@pytest.mark.no_cover
@pytest.mark.parametrize("is_killed", [False, True], ids=["all nodes", "a killed node"])
async def test_processes_that_write_to_all_nodes_lose_and_double_nothing(
    cluster: Cluster, tmp_path: Path, is_killed: bool
) -> None:
    urls = [url.render_as_string(hide_password=False) for url in cluster.urls]
    if is_killed:
        async with cluster.service(0) as service:
            await service.prepare_tables()
        await cluster.wait_for_all()
    # Otherwise, the first use by all of them creates the tables and the keys.
    jobs = [
        (write_through_faults, urls[n % NODES], str(tmp_path), f"p{n}", 0, 4, 0.0)
        for n in range(2 * NODES if is_killed else NODES)
    ]
    with children(*jobs) as running:
        await asyncio.sleep(2 if is_killed else 60)
        if is_killed:
            cluster.galera.nodes[2].crash()
            await asyncio.sleep(5)
            await asyncio.to_thread(cluster.galera.nodes[2].start)
            await asyncio.sleep(10)
        (tmp_path / "stop").touch()
        print(sum([one for child in running for one in child.said()]), "writes")
    await cluster.assert_whole()
    for url in urls:
        found = await traffic.check(url, tmp_path.glob("p*"))
        assert (found.lost, found.doubled) == (0, 0)
        assert found.acknowledged > 50


# --- a node that is behind ----------------------------------------------------------------------
# Each test commits a transaction on one node.  Another node has not applied it yet, and there a
# second transaction relies on what the first has changed.


async def race(
    cluster: Cluster, first: Callable[[], Awaitable[object]], second: Awaitable[object]
) -> object:
    """Run *first* on a node of its choice; *second* begins on the node that is behind."""
    with cluster.node_behind():
        await first()
        task = asyncio.ensure_future(second)
        await cluster.commits(cluster.behind)
    return await task


async def test_session_created_while_another_node_erases_its_user_is_no_orphan(
    cluster: Cluster,
) -> None:
    async with cluster.service(0) as near, cluster.service(1) as far:
        await near.create_session(app_name=APP, user_id=USER, session_id="old")
        await cluster.wait_for_all()
        await far.create_session(app_name=APP, user_id=USER, session_id="far")
        await cluster.wait_for_all()

        async def erase() -> None:
            async with cluster.database(0) as db:
                assert (await erase_user(db, APP, USER)).sessions == 2

        await race(cluster, erase, far.create_session(app_name=APP, user_id=USER, session_id="new"))
        await cluster.assert_whole()
        listed = await near.list_sessions(app_name=APP, user_id=USER)
        assert [one.id for one in listed.sessions] == ["new"]  # of a new user with the same id


async def test_index_rows_of_a_session_that_another_node_deletes_are_not_stored(
    cluster: Cluster,
) -> None:
    async with cluster.service(0) as near, cluster.database(1) as db:
        await near.create_session(app_name=APP, user_id=USER, session_id="s", state={"k": 1})
        async with EncryptedSessionService(
            cluster.urls[0], BACKEND, indexed_state_keys=["k"]
        ) as indexing:
            await indexing.create_session(app_name=APP, user_id=USER, session_id="t")
        await cluster.wait_for_all()
        key = (await db.keyring()).index_master.state_key_tag(APP, "k")
        identity = await db.runner.identify(APP, USER, "s")
        stored = await race(
            cluster,
            lambda: near.delete_session(app_name=APP, user_id=USER, session_id="s"),
            db.runner.run(CorrectIndexRows(identity, [key], of_user=False)),
        )
        assert stored == 0
    with cluster.galera.nodes[0].admin.connect() as connection:
        table = f"{cluster.urls[0].database}.secure_state_index"
        rows = connection.exec_driver_sql(f"SELECT row_id FROM {table} WHERE key_tag = %s", (key,))
        assert [row for (row,) in rows if row != 2**63 - 1] == []


async def test_erasure_also_deletes_what_another_node_has_just_committed(
    cluster: Cluster,
) -> None:
    async with cluster.service(0) as near, cluster.service(1) as far:
        session = await near.create_session(app_name=APP, user_id=USER, session_id="old")
        await cluster.wait_for_all()
        await far.create_session(app_name=APP, user_id=USER, session_id="far")

        async def write() -> None:
            await near.create_session(app_name=APP, user_id=USER, session_id="new")
            await near.append_event(session, changing({"n": 1, "user:n": 1}))

        async with cluster.database(1) as db:
            await db.keyring()
            erased = await race(cluster, write, erase_user(db, APP, USER))
        assert erased.sessions == 3  # type: ignore[attr-defined]
        await cluster.assert_whole()
        for node in range(NODES):
            async with cluster.service(node) as service:
                assert (await service.list_sessions(app_name=APP, user_id=USER)).sessions == []


@pytest.mark.parametrize(
    ("rotate", "user_id"), [(rotate_master, "new"), (rotate_data, USER)], ids=["master", "data key"]
)
async def test_session_created_while_another_node_retires_its_key_is_not_lost(
    cluster: Cluster, rotate: Any, user_id: str
) -> None:
    async with cluster.service(1) as far:
        await far.create_session(app_name=APP, user_id=USER)
        await cluster.wait_for_all()

        async def renew() -> None:
            async with cluster.database(0) as db:
                await rotate(db)
                retired = await retire(db)
                assert (len(retired.deleted_master_ids), retired.deleted_data_keys) in (
                    (1, 0),
                    (0, 2),
                )

        await race(
            cluster, renew, far.create_session(app_name=APP, user_id=user_id, session_id="s")
        )
        await cluster.assert_whole()
    async with cluster.service(0) as service:
        assert await service.get_session(app_name=APP, user_id=user_id, session_id="s")


async def test_master_key_is_not_added_while_another_node_rotates_the_root_key(
    cluster: Cluster,
) -> None:
    async with cluster.service(0) as service:
        await service.create_session(app_name=APP, user_id=USER)
    await cluster.wait_for_all()
    new_root = AesGcmBackend(bytes(32))
    async with Database(cluster.urls[0], new_root, [BACKEND]) as near, cluster.database(1) as far:
        survey = await far.survey_existing()
        created, _ = await new_master(DATA_MASTER, BACKEND.root_key, survey.existing_id, 1)
        store = partial(store_master_keys, survey, [created])
        assert not await race(
            cluster, partial(rotate_root, near), far.runner.key_db.run_sync(store)
        )


async def test_held_data_key_that_another_node_deletes_is_a_conflict(cluster: Cluster) -> None:
    async with cluster.service(0) as service:
        await service.create_session(app_name=APP, user_id=USER)
    await cluster.wait_for_all()
    near = cluster.galera.nodes[0].admin
    table = f"{cluster.urls[0].database}.secure_data_keys"
    executor = executors_for(cluster.urls[1]).data
    (key_id, before), *_ = await executor.read(sa.text(f"SELECT id, created_at FROM {table}"), {})
    held = {"at_id": key_id, "generation": 0}

    def hold() -> Steps[object]:
        return (yield Apply([Change(TOUCH_DATA_KEY, held)]))

    assert await executor.write(hold)
    ((after,),) = await executor.read(
        sa.text(f"SELECT created_at FROM {table} WHERE id = {key_id}"), {}
    )
    assert after == before

    async def delete() -> None:
        with near.connect() as connection:
            connection.exec_driver_sql(f"DELETE FROM {table} WHERE id = {key_id}")

    with pytest.raises(Conflict):
        await race(cluster, delete, executor.write(hold))
    await executor.close()


async def test_rows_that_an_attacker_stores_in_place_of_claims_stop_nobody(
    cluster: Cluster,
) -> None:
    async with cluster.service(0) as service, cluster.database(0) as db:
        await service.create_session(app_name=APP, user_id=USER)
        rows = ", ".join(f"('{name}', 'x')" for name in KEYRING_CLAIMS)
        with cluster.galera.admin.connect() as connection:
            table = f"{cluster.urls[0].database}.secure_meta"
            connection.exec_driver_sql(f"INSERT INTO {table} VALUES {rows}")
        await service.create_session(app_name=APP, user_id="new")
        await rotate_master(db)
        assert len((await retire(db)).deleted_master_ids) == 1
        await cluster.assert_whole()
        with cluster.galera.admin.connect() as connection:
            left = connection.exec_driver_sql(f"SELECT name FROM {table} WHERE value = 'x'").all()
        assert left == []


async def test_user_imported_while_another_node_erases_the_user_stays_erased(
    cluster: Cluster,
) -> None:
    async def copy(db: Database, user_id: str) -> ImportStatus:
        store = db.imports
        return await store.import_session(
            APP,
            user_id,
            "s",
            state=b"{}",
            events=[],
            created_at=1,
            updated_at=1,
            source_etag="1",
        )

    async with cluster.service(0) as service:
        await service.create_session(app_name=APP, user_id="other")
    async with cluster.database(0) as near, cluster.database(1) as far:
        assert await copy(near, "first") is ImportStatus.NEW
        await cluster.wait_for_all()
        assert await copy(far, "second") is ImportStatus.NEW

        async def erase() -> None:
            assert (await erase_user(near, APP, USER)).has_migration_table

        assert await race(cluster, erase, copy(far, USER)) is ImportStatus.DELETED
        await cluster.assert_whole()


# --- reads --------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def over_several_nodes(
    cluster: Cluster, **options: object
) -> AsyncIterator[tuple[EncryptedSessionService, list[int]]]:
    """A service whose next connection leads to the node that the list names, as by a proxy."""
    node = [0]

    async def connect() -> object:
        import asyncmy

        url = cluster.urls[node[0]]
        return await asyncmy.connect(
            user="root", db=url.database, unix_socket=url.query["unix_socket"], **options,
            client_flag=2,  # FOUND_ROWS
        )  # fmt: skip

    engine = create_async_engine("mariadb+asyncmy://", async_creator=connect, poolclass=sa.NullPool)
    async with EncryptedSessionService(db_engine=engine, backend=BACKEND) as service:
        yield service, node
    await engine.dispose()


async def test_read_on_a_node_that_is_behind_waits_only_with_the_setting(cluster: Cluster) -> None:
    async with cluster.service(0) as near, cluster.service(1) as far:
        session = await near.create_session(app_name=APP, user_id=USER, session_id="s")
        await cluster.wait_for_all()
        with contextlib.ExitStack() as stack:
            stack.enter_context(cluster.node_behind())
            await near.append_event(session, changing({"n": 1}))
            found = await far.get_session(app_name=APP, user_id=USER, session_id="s")
            assert found is not None
            assert found.state == {}  # stale, but whole
            url = cluster.urls[1].update_query_dict(SYNC)
            async with EncryptedSessionService(url, BACKEND) as waiting:
                task = asyncio.ensure_future(
                    waiting.get_session(app_name=APP, user_id=USER, session_id="s")
                )
                await asyncio.sleep(0.5)
                assert not task.done()
                stack.close()
                found = await task
                assert found is not None
                assert found.state == {"n": 1}


async def test_service_that_changes_to_a_node_that_is_behind_needs_the_setting(
    cluster: Cluster,
) -> None:
    async with over_several_nodes(cluster) as (service, node):
        session = await service.create_session(app_name=APP, user_id=USER, session_id="s")
        await cluster.wait_for_all()
        with cluster.node_behind():
            await service.append_event(session, changing({"user:n": 1}))
            node[0] = 1
            # An old row could be one that an attacker has restored.
            with pytest.raises(TamperedError, match="older"):
                await service.get_session(app_name=APP, user_id=USER, session_id="s")
        await cluster.wait_for_all()
        found = await service.get_session(app_name=APP, user_id=USER, session_id="s")
        assert found is not None
        assert found.state == {"user:n": 1}
