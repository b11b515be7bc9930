"""Commands on a database with collections: what they print, and their JSON."""

import asyncio

import pytest

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService
from adk_secure_sessions.formats.events import encode_item
from tests.cli.support import on, run
from tests.cli.test_json import check
from tests.maintenance.support import APP, OLD, event


@pytest.fixture
def db(file_url: str) -> str:
    """A user with a session of two events, and two collections of three items each."""

    async def fill() -> None:
        async with EncryptedSessionService(file_url, AesGcmBackend(OLD)) as service:
            session = await service.create_session(app_name=APP, user_id="ada", session_id="s")
            for n in range(2):
                await service.append_event(session, event(n))
            for name in ("c", "d"):
                for n in range(3):
                    await service.collections.append((APP, "ada", name), encode_item({"n": n}))

    asyncio.run(fill())
    return file_url


def test_verify_counts_collections_and_items(db: str) -> None:
    said = run("verify", *on(db))
    assert "1 session, 2 events, 2 collections, 6 items\n" in said.stdout
    found = check(run("verify", *on(db), "--json"), "verify")["rows"]
    assert (found["collections"], found["items"]) == (2, 6)


def test_lookup_finds_a_collection_by_its_name(db: str) -> None:
    names = ("--app", APP, "--user", "ada", "--session", "s", "--collection", "c")
    *_, session, collection = run("debug", "lookup", *on(db), *names).stdout.splitlines()
    assert session.startswith("session     secure_sessions  row ")
    assert collection.startswith("collection  secure_sessions  row ")
    check(run("debug", "lookup", *on(db), *names, "--json"), "debug lookup")


def test_inspect_says_which_rows_are_collections(db: str) -> None:
    said = run("debug", "inspect", "secure_sessions", *on(db, None))
    kinds = [line.split()[-1] for line in said.stdout.splitlines()]
    assert kinds == ["session", "collection", "collection"]
    check(run("debug", "inspect", "secure_sessions", *on(db, None), "--json"), "debug inspect")
