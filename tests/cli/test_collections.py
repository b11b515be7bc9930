"""Commands on a database with collections: what they print, and their JSON."""

import asyncio

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService
from adk_secure_sessions.formats.events import encode_item
from tests.cli.support import on, run
from tests.cli.test_json import check
from tests.maintenance.support import APP, OLD, event


async def fill(url: str) -> None:
    """Create a session of one event, and two collections of three items each."""
    async with EncryptedSessionService(url, AesGcmBackend(OLD)) as service:
        session = await service.create_session(app_name=APP, user_id="ada", session_id="s")
        await service.append_event(session, event())
        for name in 3 * ("c", "d"):
            await service.collections.append((APP, "ada", name), encode_item({}))


def test_collections_and_their_items_are_named_so(file_url: str) -> None:
    asyncio.run(fill(file_url))
    counted = "1 session, 1 event, 2 collections, 6 items\n"
    assert counted in run("verify", *on(file_url)).stdout
    found = check(run("verify", *on(file_url), "--json"), "verify")["rows"]
    assert (found["collections"], found["items"]) == (2, 6)

    names = ("--app", APP, "--user", "ada", "--session", "s", "--collection", "c")
    lookup = ("debug", "lookup", *on(file_url), *names)
    *_, session, collection = run(*lookup).stdout.splitlines()
    assert session.startswith("session     secure_sessions  row ")
    assert collection.startswith("collection  secure_sessions  row ")
    check(run(*lookup, "--json"), "debug lookup")

    inspect = ("debug", "inspect", "secure_sessions", *on(file_url, None))
    kinds = [line.split()[-1] for line in run(*inspect).stdout.splitlines()]
    assert kinds == ["session", "collection", "collection"]
    check(run(*inspect, "--json"), "debug inspect")
