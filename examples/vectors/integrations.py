"""tests/vectors/integrations.*: a user's memory, and sessions of another session service.

One database has both: the collections with the memories, and the keys of `EncryptedSessionWrapper`.
"""

import asyncio
import base64
import json
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from google.adk.events import Event
from google.adk.memory.memory_entry import MemoryEntry
from google.adk.sessions import InMemorySessionService, Session
from google.genai import types

from adk_secure_sessions import EncryptedSessionService, EncryptedSessionWrapper
from adk_secure_sessions.formats import records
from adk_secure_sessions.formats.memory_items import COLLECTION_NAME
from adk_secure_sessions.integrations.memory import EncryptedMemoryService
from examples.vectors.collections import _Forger
from examples.vectors.database import ADA, BOB, CLINIC, backends, dumped, fixed, root_keys
from examples.vectors.database import EVENTS as TEXTS
from examples.vectors.fixed import TIME, Json, made

ABOUT = (
    "The memories that a reader must find in integrations.sql, and sessions of another session "
    "service whose keys are in it; made by examples/make_vectors.py. 'items' are the JSON objects "
    "of the collection. 'entries' are those that are not dropped, in their order. 'stored' is what "
    "the other service returns, where 'text' is the only text of an event; 'state' and 'events' "
    "are what a reader must find in it."
)
ABOUT_REJECTIONS = (
    "Changes of integrations.sql ('sql', SQLite) and of what the other service returns ('set': a "
    "path and the new value; 'append': an event) that a reader must reject, unless 'expect' is "
    "'ok'. With 'memory', read the memory of this user of the app; with 'session', read the "
    "session of this number in integrations.json. 'expect' is the class that adk-secure-sessions "
    "raises."
)
_TAMPERED, _PLAINTEXT, _UNKNOWN = "TamperedError", "PlaintextRefusedError", "UnknownKeyError"
_MEMORY = (CLINIC, ADA, COLLECTION_NAME)
_VALUE = made("replacement", 16).hex()


async def _remember(path: Path, url: str) -> dict[str, str]:
    """Store the memories; return records of items that are replaced later."""
    async with EncryptedSessionService(url, backends()[0]) as sessions:
        memory = EncryptedMemoryService(sessions)
        who: Any = {"app_name": CLINIC, "user_id": ADA}
        said = [_said(number) for number in range(3)]
        ids: Any = {"id": "s 1", "app_name": CLINIC, "user_id": ADA}
        await memory.add_session_to_memory(Session(**ids, events=said[:2]))
        await memory.add_session_to_memory(Session(**ids, events=said))
        await memory.add_events_to_memory(**who, events=[_said(3)], custom_metadata={"n": [1]})
        for text in ("Ada likes tea", "Ada likes tea 🍵"):
            await memory.add_memory(**who, memories=[MemoryEntry(id="fact", content=_text(text))])
        old = {"first": _record(path, 1)}
        await memory.delete_memory(**who, memory_id="e-0")
        old["second"] = _record(path, 1)
        await memory.delete_memory(**who, memory_id="e-1")
        other = EncryptedMemoryService(sessions)
        await other.add_events_to_memory(app_name=CLINIC, user_id=BOB, events=[_said(4)])
        return old


def _text(text: str) -> types.Content:
    return types.Content(role="user", parts=[types.Part(text=text)])


def _said(number: int) -> Event:
    return Event(
        id=f"e-{number}", author="user", timestamp=TIME + number, content=_text(f"text {number}")
    )


def _record(path: Path, seq: int) -> str:
    with closing(sqlite3.connect(path)) as connection:
        query = "SELECT hex(event) FROM secure_events WHERE seq = ?"
        ((found,),) = connection.execute(query, (seq,))
    return str(found)


def _entry(number: int, **more: Any) -> Json:
    return {
        "id": f"e-{number}",
        "content": {"parts": [{"text": f"text {number}"}], "role": "user"},
        "author": "user",
        "timestamp": TIME + number + 0.0,
        **more,
    }


def _entries() -> list[Json]:
    """Return the expected memories, without reading the database."""
    tea = {"parts": [{"text": "Ada likes tea 🍵"}], "role": "user"}
    return [
        {
            "app_name": CLINIC,
            "user_id": ADA,
            "deleted": ["e-0", "e-1"],
            "entries": [
                {"scope": ["session", "s 1"], **_entry(2)},
                {"scope": ["events"], **_entry(3, metadata={"n": [1]})},
                {"scope": ["memory"], "id": "fact", "content": tea},
            ],
        },
        {
            "app_name": CLINIC,
            "user_id": BOB,
            "deleted": [],
            "entries": [{"scope": ["events"], **_entry(4)}],
        },
    ]


async def _wrap(url: str) -> tuple[list[Json], dict[str, str]]:
    """Return the sessions behind the wrapper, and a value that was stored before."""
    inner = InMemorySessionService()
    first, second = backends()
    found: list[Json] = []
    texts = [[TEXTS[0], TEXTS[2]], [TEXTS[1]], []]
    before: list[dict[str, str]] = []
    users = [(ADA, "one"), (ADA, "two"), (BOB, "one")]
    async with EncryptedSessionWrapper(inner, first, key_db_url=url) as service:
        for (user, name), history in zip(users, texts, strict=True):
            state = {"step": f"of {user}, {name}", "kind": name, "user:language": user}
            if user == ADA:
                state["app:name"] = "Dr. Müller"
            session = await service.create_session(
                app_name=CLINIC, user_id=user, session_id=name, state=state
            )
            before.append(dict(inner.sessions[CLINIC][user][name].state))
            for text in history:
                await service.append_event(session, Event.model_validate_json(text))
    both: Any = {"key_db_url": url, "additional_backends": [first]}
    async with EncryptedSessionWrapper(inner, second, **both) as service:
        ids: Any = {"app_name": CLINIC, "user_id": BOB, "session_id": "one"}
        again = await service.get_session(**ids)
        assert again is not None
        await service.append_event(again, Event.model_validate_json(TEXTS[6]))
    for user, name in users:
        stored = await inner.get_session(app_name=CLINIC, user_id=user, session_id=name)
        assert stored is not None
        found.append(_as_json(stored))
    return found, before[0]


def _as_json(stored: Session) -> Json:
    names = ("id", "invocation_id", "author", "timestamp", "turn_complete")
    return {
        "app_name": stored.app_name,
        "user_id": stored.user_id,
        "id": stored.id,
        "state": stored.state,
        "events": [
            {
                **{name: getattr(event, name) for name in names},
                "text": event.content.parts[0].text,  # type: ignore[union-attr,index]
                "state_delta": event.actions.state_delta,
            }
            for event in stored.events
        ],
    }


def _opened() -> list[Json]:
    """Return what a reader must find in the sessions, without reading them."""
    app = {"app:name": "Dr. Müller", "app:visits": 1}
    ada: Json = {"user:language": ADA, "user:allergies": ["penicillin"]}
    one = {"step": 1, "kind": "one", **app, **ada}
    two = {"step": f"of {ADA}, two", "kind": "two", **app, **ada}
    bobs = {"step": 1, "kind": "one", **app, "user:language": BOB, "user:score": -1}
    histories = [(TEXTS[0], TEXTS[2]), (TEXTS[1],), (TEXTS[6],)]
    return [
        {"state": state, "events": [json.loads(text) for text in history]}
        for state, history in zip((one, two, bobs), histories, strict=True)
    ]


def integration_vectors() -> tuple[str, Json, Json]:
    """Return the contents of integrations.sql, .json and integration_rejections.json."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "sessions.db"
        url = f"sqlite+aiosqlite:///{path}"
        with fixed():
            draws = vars(records)["os"].urandom
            token = SimpleNamespace(token_hex=lambda length: draws(length).hex())
            with mock.patch("adk_secure_sessions.integrations.memory.secrets", token):
                old = asyncio.run(_remember(path, url))
            stored, old_state = asyncio.run(_wrap(url))
        with closing(sqlite3.connect(path)) as connection:
            sql = dumped(connection, "integrations.json")
    contents = {
        "about": ABOUT,
        "root_keys": root_keys(),
        "memories": _entries(),
        "sessions": [
            {"stored": one, **opened} for one, opened in zip(stored, _opened(), strict=True)
        ],
    }
    with closing(_Forger(sql)) as forger:
        cases = [*_memory_cases(forger, old), *_session_cases(stored, old_state)]
    return sql, contents, {"about": ABOUT_REJECTIONS, "cases": cases}


# --- rejections ----------------------------------------------------------------------------------


def _memory_cases(forger: _Forger, old: dict[str, str]) -> Iterator[Json]:
    row = forger.session_row(_MEMORY)["id"]
    other = forger.session_row((CLINIC, BOB, COLLECTION_NAME))["id"]
    at = f"WHERE session_row = {row} AND seq = "

    def case(name: str, *sql: str, expect: str = _TAMPERED) -> Json:
        return {"name": name, "memory": [CLINIC, ADA], "sql": list(sql), "expect": expect}

    def edited(seq: int, change: Callable[[Json], object]) -> str:
        def edit(plaintext: bytes) -> bytes:
            start = 1 + 2 * records.LINK_LENGTH
            start += 1 + plaintext[start]
            item = json.loads(plaintext[start:])
            change(item)
            return plaintext[:start] + json.dumps(item).encode()

        return forger.event(_MEMORY, seq, edit)

    for name, record in old.items():
        yield case(f"replaced item: {name} record", f"UPDATE secure_events SET event = X'{record}' "
                   f"{at}1")  # fmt: skip
    yield case(
        "item with another replacement", edited(1, lambda one: one.update(replacement=_VALUE))
    )
    yield case("item without replacement", edited(1, lambda one: one.pop("replacement")))
    yield case(
        "replacement that no drop names", edited(2, lambda one: one.update(replacement=_VALUE))
    )
    dropped = {"places": [0], "replacement": _VALUE}
    yield case("dropped entry that is still there",
               edited(3, lambda one: one.update(replacement=_VALUE)),
               edited(6, lambda one: one["drop"].update({"3": dropped})))  # fmt: skip
    for name, drop in (("itself", {"7": dropped}), ("a text", {"x": dropped})):
        change = partial(dict.update, drop=drop)
        yield case(f"drop that names {name}", edited(7, change), expect="DecryptionError")
    yield case("entries without a scope", edited(3, lambda one: one.pop("scope")),
               expect="DecryptionError")  # fmt: skip
    without: dict[str, Json] = {"no list of entries": {}, "an empty list of entries": {"add": []}}
    for name, empty in without.items():
        statement = edited(3, partial(_without_entries, empty))
        yield case(f"{name}, and no scope", statement, expect="ok")
    yield case("item removed", f"DELETE FROM secure_events {at}3")
    yield case("last item removed", f"DELETE FROM secure_events {at}7")
    yield case(
        "item of another user",
        "UPDATE secure_events SET (time, event) = (SELECT time, event FROM secure_events "
        f"WHERE session_row = {other} AND seq = 1) {at}1",
        expect=_UNKNOWN,
    )
    yield case("items exchanged", *(
        f"UPDATE secure_events SET event = (SELECT event FROM secure_events {at}{a}) {at}{b}"
        for a, b in ((2, 3), (3, 2))
    ))  # fmt: skip


def _without_entries(empty: Json, item: Json) -> None:
    del item["scope"], item["add"]
    item.update(empty)


def _session_cases(stored: list[Json], old: dict[str, str]) -> Iterator[Json]:
    one, two, bobs = stored

    def case(name: str, *changes: Any, expect: str = _TAMPERED, **more: Any) -> Json:
        return {"name": name, "session": 0, "set": list(changes), **more, "expect": expect}

    def text(record: bytes) -> str:
        return base64.b64encode(record).decode()

    own = [key for key in one["state"] if ":" not in key]
    values = [one["state"][key] for key in own]
    users = [key for key in one["state"] if key.startswith("user:")]
    foreign = next(key for key in two["state"] if ":" not in key)
    first = base64.b64decode(values[0])
    yield case("values of two keys exchanged", [["state", own[0]], values[1]],
               [["state", own[1]], values[0]])  # fmt: skip
    yield case("value of another session", [["state", own[0]], two["state"][foreign]])
    yield case("entry of another session", [["state", foreign], two["state"][foreign]])
    yield case("user's entry in the session", [["state", users[0][5:]], one["state"][users[0]]])
    yield case("value cut", [["state", own[0]], text(first[:40])])
    yield case("value cut in the header", [["state", own[0]], text(first[:12])])  # fmt: skip
    yield case("empty value", [["state", own[0]], ""])
    yield case("value as plaintext", [["state", own[0]], 1], expect=_PLAINTEXT)
    yield case("key as plaintext", [["state", "step"], values[0]], expect=_PLAINTEXT)
    later = text(b"AKS\x03" + first[4:])
    yield case("value of a later version", [["state", own[0]], later])
    noop = b"AKS\x02\x03" + first[5:13] + b'\x00{"step":1}'
    yield case("value of the no-op backend", [["state", own[0]], text(noop)],
               expect=_PLAINTEXT)  # fmt: skip
    unknown = text(first[:5] + bytes(8) + first[13:])
    yield case("value with an unknown key", [["state", own[0]], unknown], expect=_UNKNOWN)
    yield case("older value of the same entry: not detected", [["state", own[0]], old[own[0]]],
               expect="ok")  # fmt: skip
    event, texts = one["events"][0], [one["text"] for one in one["events"]]
    record = ["events", 0, "text"]
    yield case("events exchanged, without their ids", [record, texts[1]],
               [["events", 1, "text"], texts[0]])  # fmt: skip
    yield case("event of another session", [["events", 0], two["events"][0]])
    yield case("event of another user", [["events", 0], bobs["events"][0]], expect=_UNKNOWN)
    for name in ("id", "author", "invocation_id"):
        yield case(f"event with another {name}", [["events", 0, name], "other"])
    yield case("event with another time", [["events", 0, "timestamp"], event["timestamp"] + 0.01])
    yield case("event with a rounded time", [["events", 0, "timestamp"],
               event["timestamp"] + 0.0005], expect="ok")  # fmt: skip
    yield case("event cut", [record, text(base64.b64decode(texts[0])[:-1])])
    yield case("event as plaintext", [record, "hello"], expect=_PLAINTEXT)
    yield case("event stored twice", append=event)
    yield case("event with unused bits", [record, _respelled(texts[0])], expect=_PLAINTEXT)
    for name in ("app_name", "user_id", "id"):
        yield case(f"session with another {name}", [[name], "other"])


def _respelled(text: str) -> str:
    """Return another text in base64 for the same bytes."""
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    end = len(text.rstrip("=")) - 1
    assert end < len(text) - 1, "the text has unused bits"
    return text[:end] + alphabet[alphabet.index(text[end]) + 1] + text[end + 1 :]
