"""tests/vectors/state_index.*: a database with a search index, and what a search must find."""

import asyncio
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from adk_secure_sessions import EncryptedSessionService
from adk_secure_sessions.maintenance import Database, fill_index
from adk_secure_sessions.storage.reads import GetSession
from examples.vectors.database import (
    ADA,
    ADK_VERSION,
    BOB,
    CLINIC,
    backends,
    dumped,
    fixed,
    root_keys,
)
from examples.vectors.fixed import Json

ABOUT = (
    "The sessions that a search must find in state_index.sql, made by examples/make_vectors.py. "
    "'searches': each has an indexed name ('key') of an app, a value, and the ids (user, session) "
    "of the sessions to find, in the order of their rows; null if the reader must reject the "
    "search. Three rows of the index were forged: one has the value of another session, one names "
    "a session that does not have the name, and one names a session that does not exist. The row "
    "of the session 'removed' was deleted from the index: no search finds it."
)
KEYS = ["ticket", "user:mrn"]
# The own state of each session, and the state of its user, in the order of creation.
SESSIONS: list[tuple[str, str, Json, Json]] = [
    (ADA, "integer", {"ticket": 1}, {"mrn": "A-7"}),
    (ADA, "float", {"ticket": 1.0}, {}),
    (ADA, "true", {"ticket": True}, {}),
    (ADA, "text", {"ticket": "1"}, {}),
    (ADA, "null", {"ticket": None}, {}),
    (ADA, "object", {"ticket": {"b": [1e16, 1e-5, -0.0], "a": "\u4e16 \U0001f375 \x7f\n"}}, {}),
    (ADA, "large", {"ticket": 2**70, "note": "x" * 9000}, {}),
    (ADA, "without", {"other": 1}, {}),
    (BOB, "same", {"ticket": 1}, {"mrn": "B-8"}),
    (BOB, "removed", {"ticket": 2}, {}),
]


async def _write(path: Path) -> None:
    url = f"sqlite+aiosqlite:///{path}"
    async with EncryptedSessionService(url, backends()[0], indexed_state_keys=KEYS) as service:
        for user, session, state, of_user in SESSIONS:
            whole = state | {f"user:{name}": value for name, value in of_user.items()}
            await service.create_session(
                app_name=CLINIC, user_id=user, session_id=session, state=whole
            )
    async with Database(url, backends()[0]) as db:
        await fill_index(db, CLINIC, KEYS)
        await db.search_index.declare(CLINIC, ["declared"])
        index_master = (await db.keyring()).index_master
        rows = {}
        for user, session, *_ in SESSIONS:
            identity = await db.runner.identify(CLINIC, user, session)
            found = await db.runner.run(GetSession(identity, lambda *_: []))
            assert found is not None
            rows[session] = found[0].session.row.id
    ticket = index_master.state_key_tag(CLINIC, "ticket")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(
            "UPDATE secure_state_index SET value_tag = (SELECT value_tag FROM secure_state_index "
            "WHERE row_id = ?) WHERE row_id = ?",
            (rows["integer"], rows["text"]),
        )
        connection.execute("DELETE FROM secure_state_index WHERE row_id = ?", (rows["removed"],))
        forged = index_master.state_value_tag(CLINIC, "ticket", b"1")
        for row in (rows["without"], 77):
            connection.execute(
                "INSERT INTO secure_state_index VALUES (?, ?, ?)", (row, ticket, forged)
            )
        connection.commit()


def _searches() -> list[Json]:
    def search(key: str, value: object, *found: str) -> Json:
        owners = {session: user for user, session, *_ in SESSIONS}
        return {
            "app_name": CLINIC,
            "key": key,
            "value": value,
            "found": [[owners[session], session] for session in found],
        }

    of_ada = [session for user, session, *_ in SESSIONS if user == ADA]
    return [
        search("ticket", 1, "integer", "same"),
        search("ticket", 1.0, "float"),
        search("ticket", True, "true"),
        search("ticket", "1"),
        search("ticket", None, "null"),
        search("ticket", SESSIONS[5][2]["ticket"], "object"),
        search("ticket", 2**70, "large"),
        search("ticket", 2),
        search("ticket", 3),
        search("user:mrn", "A-7", *of_ada),
        search("user:mrn", "B-8", "same", "removed"),
        search("user:mrn", 7),
        search("declared", 1) | {"found": None},
        search("other", 1) | {"found": None},
    ]


def state_index_vectors() -> tuple[str, Json]:
    """Return the contents of state_index.sql and state_index.json."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "sessions.db"
        with fixed():
            asyncio.run(_write(path))
        with closing(sqlite3.connect(path)) as connection:
            sql = dumped(connection, "state_index.json")
    return sql, {
        "about": ABOUT,
        "root_keys": root_keys(),
        "adk_version": ADK_VERSION,
        "searches": _searches(),
    }
