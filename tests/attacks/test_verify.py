"""`verify` names the rows that were tampered with, and no others."""

import re
from typing import NamedTuple

import pytest

from adk_secure_sessions import AesGcmBackend, FernetBackend
from adk_secure_sessions.errors import Reason
from adk_secure_sessions.maintenance import Database as Maintained
from adk_secure_sessions.maintenance import Verification, verify
from tests.attacks.databases import also_on
from tests.attacks.support import Database
from tests.attacks.world import ALL_SESSIONS, KEY, SECRET

_TAG = "(SELECT tag FROM secure_{} WHERE id = :{})"


async def verified(db: Database) -> Verification:
    before = db.dump()
    async with Maintained(db.url, db.backend()) as maintained:
        found = await verify(maintained)
    assert db.dump() == before
    assert SECRET not in repr(found)
    return found


class Attack(NamedTuple):
    """SQL, the rows that `verify` must name (`:visit` is a row's id), how many it cannot check."""

    sql: str
    bad: set[tuple[str, str]]
    unchecked: int = 0


def flip(table: str, column: str, where: str) -> str:
    """SQL that modifies the last byte."""
    last = f"substr({column}, length({column}), 1)"
    other = f"CASE {last} WHEN x'00' THEN x'01' ELSE x'00' END"
    kept = f"substr({column}, 1, length({column}) - 1)"
    return f"UPDATE {table} SET {column} = CAST({kept} || {other} AS BLOB) WHERE {where}"


ROW_NAMES = ("visit", "notes", "archive", "bob_visit", "carol_visit")
ATTACKS = {
    "byte of an event": Attack(
        flip("secure_events", "event", "session_row = :visit AND seq = 2"),
        {("secure_events", ":visit, 2")},
    ),
    "byte of a snapshot": Attack(
        flip("secure_bases", "state", "session_row = :archive"), {("secure_bases", ":archive")}
    ),
    "byte of a session": Attack(
        flip("secure_sessions", "state", "id = :notes"), {("secure_sessions", ":notes")}
    ),
    "byte of a user": Attack(
        flip("secure_users", "state", "id = :alice"), {("secure_users", ":alice")}, 3
    ),
    "byte of an app": Attack(
        flip("secure_apps", "state", "id = :bank"), {("secure_apps", ":bank")}
    ),
    "app's name": Attack(
        "UPDATE secure_apps SET app_name = CAST('x' || app_name AS BLOB) WHERE id = :bank",
        {("secure_apps", ":bank")},
        2,
    ),
    "byte of a data key": Attack(
        flip("secure_data_keys", "wrapped", f"owner = {_TAG.format('users', 'bob')}"),
        {("secure_data_keys", "?")},
        1,
    ),
    "event within": Attack(
        "DELETE FROM secure_events WHERE session_row = :visit AND seq = 1",
        {("secure_events", ":visit")},
    ),
    "last event": Attack(
        "DELETE FROM secure_events WHERE session_row = :visit AND seq = 3",
        {("secure_sessions", ":visit")},
    ),
    "event added": Attack(
        "INSERT INTO secure_events SELECT session_row, seq + 1, time, event FROM secure_events "
        "WHERE session_row = :visit AND seq = 3",
        {("secure_sessions", ":visit")},
    ),
    "revisions beyond all sums": Attack(
        "UPDATE secure_sessions SET revision = 9223372036854775807",
        {("secure_sessions", f":{row}") for row in ROW_NAMES},
    ),
    "snapshot removed": Attack(
        "DELETE FROM secure_bases WHERE session_row = :archive", {("secure_bases", ":archive")}
    ),
    "witness of a session removed": Attack(
        f"DELETE FROM secure_witnesses WHERE tag = {_TAG.format('sessions', 'visit')}",
        {("secure_sessions", ":visit")},
    ),
    "witness of a user removed": Attack(
        f"DELETE FROM secure_witnesses WHERE tag = {_TAG.format('users', 'bob')}",
        {("secure_users", ":bob")},
    ),
    "session removed": Attack(
        "DELETE FROM secure_sessions WHERE id = :visit",
        {("secure_events", ":visit"), ("secure_witnesses", "?")},
    ),
    "user removed": Attack(
        "DELETE FROM secure_users WHERE id = :bob",
        {("secure_sessions", ":bob_visit"), ("secure_witnesses", "?"), ("secure_data_keys", "?")},
    ),
    "tag of a user, as text": Attack(
        "UPDATE secure_users SET tag = CAST(tag AS TEXT) WHERE id = :bob",
        {("secure_users", ":bob"), ("secure_witnesses", "?"), ("secure_data_keys", "?")},
        1,
    ),
    "events that belong to nothing": Attack(
        "INSERT INTO secure_events SELECT 7, seq, time, event FROM secure_events "
        "WHERE session_row = :visit",
        {("secure_events", "7")},
    ),
    "snapshot that belongs to nothing": Attack(
        "INSERT INTO secure_bases SELECT 7, revision, state FROM secure_bases",
        {("secure_bases", "7")},
    ),
    "witness that belongs to nothing": Attack(
        "INSERT INTO secure_witnesses SELECT x'00112233445566778899aabbccddeeff', number, seal "
        "FROM secure_witnesses LIMIT 1",
        {("secure_witnesses", "00112233445566778899aabbccddeeff")},
    ),
    "data key that belongs to nothing": Attack(
        "INSERT INTO secure_data_keys SELECT 7, x'00112233445566778899aabbccddeeff', generation, "
        "backend_id, created_at, wrapped FROM secure_data_keys LIMIT 1",
        {("secure_data_keys", "7")},
    ),
    "plaintext record": Attack(
        "UPDATE secure_events SET event = x'7b7d' WHERE session_row = :visit AND seq = 0",
        {("secure_events", ":visit, 0")},
    ),
}


async def test_verify_finds_nothing_in_a_database_without_an_attack(db: Database) -> None:
    found = await verified(db)
    events = 4 * len(ALL_SESSIONS)
    assert found == Verification(2, 3, len(ALL_SESSIONS), events, 0, 0, 0, 0, ())


@also_on("fernet", "packed", "mariadb", cases=["byte of an event", "user removed"])
@pytest.mark.parametrize("name", ATTACKS)
async def test_verify_names_the_tampered_rows_and_no_others(db: Database, name: str) -> None:
    attack = ATTACKS[name]
    db.run(attack.sql)
    found = await verified(db)
    rows = db.world.rows
    expected = {
        (table, re.sub(r":(\w+)", lambda match: str(rows[match[1]]), row))
        for table, row in attack.bad
    }
    known = {row for _, row in expected}
    named = {
        (problem.table, problem.row if problem.row in known else "?") for problem in found.problems
    }
    assert named == expected, found.problems
    assert (found.bad, found.unchecked) == (len(expected), attack.unchecked)


async def test_verify_goes_on_past_a_bad_app_row_and_names_all_that_is_wrong(db: Database) -> None:
    bad = (
        ("secure_apps", "state", "id = :bank", ":bank"),
        ("secure_events", "event", "session_row = :carol_visit AND seq = 2", ":carol_visit, 2"),
        ("secure_users", "state", "id = :bob", ":bob"),
        ("secure_apps", "state", "id = :clinic", ":clinic"),
        ("secure_sessions", "state", "id = :notes", ":notes"),
        ("secure_bases", "state", "session_row = :archive", ":archive"),
    )
    expected = set()
    for table, column, where, row in bad:
        db.run(flip(table, column, where))
        expected.add((table, re.sub(r":(\w+)", lambda found: str(db.world.rows[found[1]]), row)))
    found = await verified(db)
    assert {(one.table, one.row) for one in found.problems} == expected
    assert (found.apps, found.users, found.sessions, found.unchecked) == (0, 2, 1, 1)


async def test_verify_names_every_owner_of_another_backend(db: Database) -> None:
    other = AesGcmBackend(KEY) if db.is_fernet else FernetBackend(KEY)
    async with Maintained(db.url, other) as maintained:
        found = await verify(maintained)
        assert {one.table for one in found.problems} == {"secure_apps", "secure_users"}
        assert {one.reason for one in found.problems} == {Reason.UNKNOWN_BACKEND}
        assert (found.bad, found.unchecked, found.sessions) == (2 + 3, len(ALL_SESSIONS), 0)
    async with Maintained(db.url, other, [db.backend()]) as maintained:
        assert (await verify(maintained)).bad == 0
