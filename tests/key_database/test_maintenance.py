"""Maintenance of a database and its key database."""

import asyncio
import base64
import time
from datetime import timedelta
from pathlib import Path

import pytest

from adk_secure_sessions.cli.config import envvar
from adk_secure_sessions.errors import Reason
from adk_secure_sessions.maintenance import inspect_records, lookup, purge_sessions, status, verify
from adk_secure_sessions.maintenance.database import StatementLimits
from tests.cli.support import run
from tests.key_database.support import KEY, Pair, count, create
from tests.maintenance.support import APP, event, query
from tests.servers import for_service
from tests.sqlite_files import settle

USERS = [f"u{n}" for n in range(7)]


async def fill(pair: Pair, users: list[str] = USERS) -> None:
    async with pair.service() as service:
        for user in users:
            session = await create(service, user)
            await service.append_event(session, event(n=1))


async def test_rows_of_both_databases_are_counted_and_checked_in_several_batches(
    pair: Pair,
) -> None:
    few = StatementLimits(rows_per_statement=3, ids_per_statement=3)
    await fill(pair)
    async with pair.maintained(None) as db:
        db.limits = few
        found = await status(db)
        shown = [
            await inspect_records(db, f"secure_{name}")
            for name in ("keyring", "data_keys", "users")
        ]
    assert {(one.table, one.rows, one.under_current) for one in found.records} == {
        ("secure_apps", 1, 1),
        ("secure_users", 7, 7),
        ("secure_sessions", 7, 7),
        ("secure_events", 7, 7),
        ("secure_witnesses", 15, 15),
    }
    assert sum(one.key_count for one in found.data_keys) == 8
    assert len(found.master_keys) == 2
    assert [len(rows) for rows in shown] == [2, 8, 7]
    async with pair.maintained() as db:
        db.limits = few
        checked = await verify(db)
        assert (checked.users, checked.sessions, checked.events) == (7, 7, 7)
        assert (checked.bad, checked.unchecked, checked.problems) == (0, 0, ())
        where = await lookup(db, APP, "u3", "s")
        assert all(one.row is not None for one in where)
        assert {one.is_unwrapped for one in (await status(db)).master_keys} == {True}
        assert (await purge_sessions(db, timedelta(days=1))).deleted == 7
    assert count(pair.data, "secure_sessions") == 0


async def test_verify_reports_a_data_key_without_an_owner_once_it_is_not_new(
    files: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows of a user may have been removed, and only the key is left to show it."""
    keys = "SELECT id FROM secure_data_keys"
    async with files.service() as service:
        await create(service)
        before, known = files.data.database or "", set(query(files.keys, keys))
        settle(Path(str(files.data.database)))
        copy = Path(before).read_bytes()
        await create(service, "bob")
    settle(Path(str(files.data.database)))
    Path(before).write_bytes(copy)  # with no row of bob's
    (bob,) = set(query(files.keys, keys)) - known
    now = time.time_ns
    async with files.maintained() as db:
        assert (await verify(db)).problems == ()  # bob may be just about to be written
        for hours in (-1, 2):  # a clock may be behind or ahead
            shift = hours * 3_600_000_000_000
            monkeypatch.setattr(time, "time_ns", lambda shift=shift: now() + shift)
            (problem,) = (await verify(db)).problems
            assert (problem.table, problem.row) == ("secure_data_keys", str(bob[0]))
            assert problem.reason is Reason.MISSING
            assert "before it could write" in problem.detail


# --- the command line ----------------------------------------------------------------------------


def test_commands_take_the_key_database(
    files: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KEY", base64.b64encode(KEY).decode())
    monkeypatch.delenv(envvar("db"), raising=False)
    monkeypatch.delenv(envvar("key-db"), raising=False)
    data, keys = for_service(files.data), for_service(files.keys)
    key = ["--key", "env:KEY"]
    on = ["--db", data, "--key-db", keys]
    made = run("init", *on, *key, "--json")
    assert (made.code, len(made.json["tables"])) == (0, 10)
    assert run("init", *on, *key).stdout == "created: 0 tables, 0 master keys\n"
    asyncio.run(fill(files))
    environment = {envvar("db"): data, envvar("key-db"): keys}
    assert run("verify", *key, **environment).code == 0
    assert "secure_events" in run("status", **environment).stdout
    assert run("debug", "inspect", "secure_data_keys", *on).stdout.count("\n") == 8
    assert run("rotate", "root", *on, *key).stdout.count("before: 2 master keys") == 1
    said = run("purge", "sessions", *on, *key, "--older-than", "1d").stdout
    assert said.startswith("deleted: 7 sessions\n")
    alone = run("verify", "--db", data, *key)
    assert (alone.code, alone.stdout) == (2, "")
    assert "pass that as key_db_url (--key-db" in alone.stderr
    nowhere = run("status", "--db", data, "--key-db", f"sqlite:///{tmp_path}/no.db")
    assert (nowhere.code, "there is no file" in nowhere.stderr) == (2, True)
    same = run("status", "--db", data, "--key-db", data)
    assert (same.code, "must not be the database of" in same.stderr) == (2, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.db", "keys.db"]
