"""Attacks on a replica (`read_db_url`): its rows are changed, removed, or older than they could be.

The replica is a second database, and the attacker writes to it: see `tests/on_servers/replicas.py`.
"""

import logging

import pytest

from adk_secure_sessions import PlaintextRefusedError, StaleSessionError, TamperedError
from tests.conformance.support import each_kind
from tests.on_servers.replicas import APP, USER, CopiedReplica, Start

kind = each_kind("encrypted-postgresql", soak=["encrypted-psycopg", "encrypted-mariadb"])

DAMAGES = {
    "a session's record": "UPDATE {}.secure_sessions SET state = 'x'",
    "a session's revision": "UPDATE {}.secure_sessions SET revision = revision + 1",
    "a user's record": "UPDATE {}.secure_users SET state = 'x'",
    "an app's record": "UPDATE {}.secure_apps SET state = 'x'",
    "the events": "DELETE FROM {}.secure_events",
    "an event's record": "UPDATE {}.secure_events SET event = 'x'",
    "the witnesses": "DELETE FROM {}.secure_witnesses",
    "the data keys": "DELETE FROM {}.secure_data_keys",
    "a session": "DELETE FROM {}.secure_sessions",
    "a user": "DELETE FROM {}.secure_users",
}
FIRST = ["a session's record", "an event's record", "the witnesses", "the data keys", "a user"]
OTHERS = [damage for damage in DAMAGES if damage not in FIRST]
LATER = pytest.mark.soak
SILENT = {
    "everything": [
        f"DELETE FROM {{}}.secure_{table}"
        for table in ("sessions", "users", "apps", "witnesses", "data_keys")
    ],
    "the keyring": ["DELETE FROM {}.secure_keyring"],
}


@pytest.mark.parametrize("damage", [*FIRST, *(pytest.param(one, marks=LATER) for one in OTHERS)])
async def test_damage_of_the_replica_is_logged_and_the_primary_answers(
    process: Start, copied: CopiedReplica, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    writer = await process()
    session = await writer.create("s", **{"k": 1, "user:k": 1})
    await writer.append(session, k=2)
    copied.catch_up()
    assert copied.execute(DAMAGES[damage])
    reader = await process(skip_unreadable_sessions=True)
    with caplog.at_level(logging.INFO, "adk_secure_sessions.audit"):
        assert (await reader.found("s")).state == {"k": 2, "user:k": 1}
    (message,) = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert message.getMessage().startswith("the replica returned a row that is rejected")
    rejected = [one.audit for one in caplog.records if hasattr(one, "audit")]
    assert [(one["event"], one["replica"]) for one in rejected] == [("record.rejected", True)]
    assert await reader.listed() == ["s"]
    assert await reader.listed(None) == ["s"]
    assert await reader.paged() == ["s"]
    assert await reader.user_state() == {"k": 1}
    found = await reader.found("s")
    await reader.append(found, k=3)
    assert (await writer.found("s", at_least=reader.service.revision(found))).state["k"] == 3


@pytest.mark.parametrize("damage", SILENT)
async def test_emptied_replica_hides_nothing(
    process: Start, copied: CopiedReplica, damage: str
) -> None:
    writer = await process()
    await writer.create("s", **{"k": 1, "user:k": 1})
    copied.catch_up()
    for statement in SILENT[damage]:
        assert copied.execute(statement)
    reader = await process()
    assert (await reader.found("s")).state == {"k": 1, "user:k": 1}
    assert await reader.listed() == ["s"]
    assert await reader.listed(None) == ["s"]
    assert await reader.paged() == ["s"]
    assert await reader.user_state() == {"k": 1}


async def test_row_that_both_servers_have_is_rejected(
    process: Start, copied: CopiedReplica
) -> None:
    writer = await process()
    await writer.create("s", k=1)
    copied.execute_on_primary("UPDATE {}.secure_sessions SET state = 'x'")
    copied.catch_up()
    reader = await process()
    with pytest.raises(PlaintextRefusedError):
        await reader.get("s")
    with pytest.raises(PlaintextRefusedError):
        await reader.listed()


async def test_older_row_on_the_primary_is_rejected_although_a_replica_has_answered(
    process: Start, copied: CopiedReplica
) -> None:
    """What was read from the replica does not make the process forget the primary's version."""
    one = await process()
    session = await one.create("s")
    older = {
        table: f"CREATE TABLE {{}}.kept_{table} AS SELECT * FROM {{}}.{table}"
        for table in ("secure_sessions", "secure_events", "secure_witnesses")
    }
    for statement in older.values():
        copied.execute_on_primary(statement)
    await one.append(session, k=1)
    copied.catch_up()
    other = await process()
    await other.append(await other.found("s"), k=2)
    copied.catch_up()
    assert (await one.found("s")).state == {"k": 2}
    for table in older:
        copied.execute_on_primary(f"DELETE FROM {{}}.{table}")
        copied.execute_on_primary(f"INSERT INTO {{}}.{table} SELECT * FROM {{}}.kept_{table}")
        copied.execute_on_primary(f"DROP TABLE {{}}.kept_{table}")
    with pytest.raises(TamperedError, match="this process has read version 1"):
        await one.append(await one.found("s"), k=3)


async def test_replica_of_another_history_does_not_make_the_primary_look_rolled_back(
    process: Start, copied: CopiedReplica
) -> None:
    """After a failover that has lost commits, the old primary may still answer as a replica."""
    writer = await process()
    session = await writer.create("s")
    for table in ("secure_sessions", "secure_events"):
        copied.execute_on_primary(f"CREATE TABLE {{}}.kept_{table} AS SELECT * FROM {{}}.{table}")
    await writer.append(session, k=1)
    copied.catch_up()
    for table in ("secure_sessions", "secure_events"):
        copied.execute_on_primary(f"DELETE FROM {{}}.{table}")
        copied.execute_on_primary(f"INSERT INTO {{}}.{table} SELECT * FROM {{}}.kept_{table}")
        copied.execute_on_primary(f"DROP TABLE {{}}.kept_{table}")
    reader = await process()
    lost_one = await reader.found("s")
    assert lost_one.state == {"k": 1}
    with pytest.raises(StaleSessionError):
        await reader.append(lost_one, k=2)
    current = await reader.service._store.get(APP, USER, "s", lambda text, row, seq: text)
    assert current is not None
    assert current[0].session.revision == 0
