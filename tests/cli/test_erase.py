"""`erase-user`: what it prints, and its exit status."""

import asyncio

import pytest
import sqlalchemy as sa

from adk_secure_sessions import AesGcmBackend
from adk_secure_sessions.maintenance import Database
from tests.cli.support import confirmed, run
from tests.maintenance.support import OLD, fill, query, run_sql

ADA = ["--key", "env:OLD_KEY", "--app", "clinic", "--user", "ada"]


def test_erased_user_is_counted_and_not_named(url: str, place: sa.URL) -> None:
    asyncio.run(fill(url))
    kind = place.get_backend_name()
    would = run("erase-user", "--db", url, *ADA, "--dry-run")
    assert would == (
        0,
        "would be deleted: 1 data key, 1 user, 2 sessions, 6 events, 3 version witnesses\n",
        "",
    )
    assert query(place, "SELECT count(*) FROM secure_users") == [(2,)]
    done = run("erase-user", "--db", url, *ADA, *confirmed(url))
    first, second = done.stdout.splitlines()
    assert (done.code, done.stderr) == (0, "")
    assert first == "deleted: 1 data key, 1 user, 2 sessions, 6 events, 3 version witnesses"
    may = "freed space may hold the wrapped data key: the table of the data keys was not rewritten"
    assert second == ("freed space does not hold the wrapped data key" if kind == "sqlite" else may)
    assert query(place, "SELECT count(*) FROM secure_users") == [(1,)]
    again = run("erase-user", "--db", url, *ADA, *confirmed(url))
    assert (again.code, again.stdout.splitlines()[0]) == (1, "there is no such user")
    assert run("verify", "--db", url, "--key", "env:OLD_KEY").code == 0
    rewritten = run("erase-user", "--db", url, *ADA, *confirmed(url), "--rewrite", "--json")
    if kind == "mariadb":  # the tests' server keeps all tables in one file
        assert (rewritten.code, rewritten.json["cleared"]) == (1, False)
        assert "innodb_file_per_table" in rewritten.json["obstacle"]
    else:
        assert (rewritten.code, rewritten.json["cleared"]) == (1, True)
    for option in (["--dry-run"], confirmed(url)):
        said = run("erase-user", "--db", url, *ADA[:2], "--app", "x", "--user", "ada", *option)
        assert (said.code, said.stdout) == (1, "there is no such app\n")


def test_source_of_a_migration_is_named(file_url: str) -> None:
    asyncio.run(fill(file_url))
    source = "the source of the migration may still contain the user"

    async def prepare() -> None:
        async with Database(file_url, AesGcmBackend(OLD)) as db:
            await db.imports.feature.ensure()

    asyncio.run(prepare())
    erase = ["erase-user", "--db", file_url, *ADA, *confirmed(file_url)]
    for options, code in ((["--dry-run"], 0), ([], 0), (["--dry-run"], 1), ([], 1)):
        done = run(*erase, *options)
        assert (done.code, source in done.stdout) == (code, True)
        # The tombstone of a user who was perhaps misspelt is stored, although nothing was deleted.
        is_forbidden = "no migration will copy this user" in done.stdout
        assert is_forbidden == (code == 1 and not options)
    assert run(*erase, "--json").json["has_migration_table"] is True


@pytest.mark.parametrize(
    ("table", "missing"),
    [("secure_users", "the user's own row"), ("secure_data_keys", "the data key")],
)
def test_missing_key_or_row_is_reported_and_exits_with_1(
    file_url: str, table: str, missing: str
) -> None:
    asyncio.run(fill(file_url, users=["ada"]))
    column = "tag" if table == "secure_users" else "owner"
    run_sql(file_url, f"DELETE FROM {table} WHERE {column} IN (SELECT tag FROM secure_users)")
    for option in (["--dry-run"], []):
        said = run("erase-user", "--db", file_url, *ADA, *confirmed(file_url), *option)
        assert said.code == 1
        assert f"\n{missing} was missing: run `verify`, which lists any rows" in said.stdout
    assert query(file_url, "SELECT count(*) FROM secure_sessions") == [(0,)]
    assert run("verify", "--db", file_url, "--key", "env:OLD_KEY").code == 0
