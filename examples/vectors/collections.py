"""tests/vectors/collections.*: a database with collections, and what a reader must reject in it."""

import asyncio
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

from adk_secure_sessions import EncryptedSessionService
from adk_secure_sessions.formats.events import encode_item
from adk_secure_sessions.formats.records import LINK_LENGTH, NO_LINK
from examples.vectors import rejections
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
from examples.vectors.fixed import Json, made

ABOUT = (
    "The collections that a reader must find in collections.sql, made by examples/make_vectors.py. "
    "It needs two root keys: AesGcmBackend wrote first, then FernetBackend. 'items' are the JSON "
    "objects of the items. The items with 'replaced_by' were replaced in the transaction that "
    "appended the item of that number. The database also has a session with the name of a "
    "collection, and a collection without items, which a reader does not find."
)
ABOUT_REJECTIONS = (
    "Changes of collections.sql that a reader must reject, in the form of rejections.json. 'of' is "
    "an app name, a user id, and the name of a collection or, in 'get session', a session id. "
    "'get' reads the collection with all items, 'last' its last item only, and 'names' lists the "
    "collections of the user; 'list' lists the sessions of the user."
)
LIST, PHOTO, NOTE = '["list"]', '["file",null,"user:photo.png"]', '["file","s","note"]'
EMPTY = '["file","s","empty"]'
_SURROGATE = '["file","s","\ud83d"]'  # a name is text, which may hold a lone surrogate

# Each append in order: user, name, JSON of the item, and what replaces earlier items.
_BY_AES: list[tuple[str, str, Json, dict[int, Json]]] = [
    (ADA, LIST, {"add": ["The patient is allergic to penicillin."]}, {}),
    (ADA, PHOTO, {"mime_type": "image/png", "size": 68}, {}),
    (ADA, LIST, {"add": ["Ada likes tea 🍵", "2^53 + 1", 2**53 + 1, 0.1, None]}, {}),
    (ADA, LIST, {"replaced": [0]}, {0: {"replaced_by": 2}}),
    (BOB, NOTE, {"text": "bob's"}, {}),
    (BOB, _SURROGATE, {}, {}),
]
_BY_FERNET: list[tuple[str, str, Json, dict[int, Json]]] = [
    (ADA, PHOTO, {"mime_type": "image/png", "size": 70}, {}),
    (BOB, NOTE, {"text": "bob's second"}, {}),
    (BOB, NOTE, {"replaced": [0]}, {0: {"replaced_by": 2}}),
]


async def _write(path: Path) -> None:
    first, second = backends()
    url = f"sqlite+aiosqlite:///{path}"
    async with EncryptedSessionService(url, first) as service:
        await service.create_session(app_name=CLINIC, user_id=ADA, session_id=LIST)
        await _append(service, _BY_AES)
        with suppress(EOFError):
            await service.collections.append((CLINIC, BOB, EMPTY), _no_item)
    async with EncryptedSessionService(url, second, [first]) as service:
        await _append(service, _BY_FERNET)


def _no_item(_: object) -> bytes:
    raise EOFError


async def _append(
    service: EncryptedSessionService, appends: list[tuple[str, str, Json, dict[int, Json]]]
) -> None:
    for user, name, item, replaced in appends:
        stored = await service.collections.get((CLINIC, user, name), limit=0)
        new, changed = encode_item(item), {n: encode_item(one) for n, one in replaced.items()}
        if stored is None:
            await service.collections.append((CLINIC, user, name), new)
        else:
            await service.collections.append_at(stored.version, (CLINIC, user, name), new, changed)


def _contents() -> list[Json]:
    """Return the expected collections, made from the scenario without reading the database."""
    found: dict[tuple[str, str], list[Json]] = {}
    for user, name, item, replaced in (*_BY_AES, *_BY_FERNET):
        items = found.setdefault((user, name), [])
        for number, new in replaced.items():
            items[number] = new
        items.append(item)
    return [
        {"app_name": CLINIC, "user_id": user, "name": name, "items": items}
        for (user, name), items in found.items()
    ]


def collection_vectors() -> tuple[str, Json, Json]:
    """Return the contents of collections.sql, collections.json and collection_rejections.json."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "sessions.db"
        with fixed():
            asyncio.run(_write(path))
        with closing(sqlite3.connect(path)) as connection:
            sql = dumped(connection, "collections.json")
    users = [{"app_name": CLINIC, "user_id": user, "state": {}} for user in (ADA, BOB)]
    contents = {
        "about": ABOUT,
        "root_keys": root_keys(),
        "adk_version": ADK_VERSION,
        "apps": [{"app_name": CLINIC, "state": {}}],
        "users": users,
        "collections": _contents(),
    }
    with closing(_Forger(sql)) as forger:
        cases = [*_rows(forger), *_items(forger), *_features(forger)]
    return sql, contents, {"about": ABOUT_REJECTIONS, "cases": cases}


# --- rejections ----------------------------------------------------------------------------------

_Ids = tuple[str, str, str]
_LIST, _PHOTO, _NOTE = (CLINIC, ADA, LIST), (CLINIC, ADA, PHOTO), (CLINIC, BOB, NOTE)
_OTHER_LINK = made("link of another copy of the database", LINK_LENGTH)
_TAMPERED, _REFUSED, _WRONG = "TamperedError", "ConfigurationError", "WrongKeyError"


class _Forger(rejections.Forger):
    def tag_of(self, of: _Ids) -> bytes:
        return self.keyring.index_master.mac("collection", *of)

    def base_revision(self, tag: bytes, value: int) -> str:
        where = f"WHERE tag = X'{tag.hex()}'"
        return f"UPDATE secure_sessions SET base_revision = {value} {where}"

    def mac(self, names: str) -> str:
        return self.keyring.index_master.mac("features", self.database_id, names).hex()


def _case(name: str, note: str, when: str, of: _Ids, sql: str | list[str], expect: str) -> Json:
    statements = [sql] if isinstance(sql, str) else sql
    ids: Json = {"name": name, "note": note, "sql": statements, "when": when, "of": list(of)}
    return ids | {"expect": expect}


def _rows(forger: _Forger) -> Iterator[Json]:
    hidden, shown = "the listing finds the row", "the listing does not find the row"
    made_session = forger.base_revision(forger.tag_of(_LIST), -1)
    for when in ("get", "last", "list"):
        yield _case(
            f"{when}: collection made a session", hidden, when, _LIST, made_session, _TAMPERED
        )
    yield _case("names: collection made a session", shown, "names", _LIST, made_session, "ok")
    session = forger.base_revision(forger.keyring.index_master.tag_of(*_LIST), -2)
    for when in ("get session", "names", "list"):
        yield _case(f"{when}: session made a collection", hidden, when, _LIST, session, _TAMPERED)
    for value in (0, 4, -3):
        statement = forger.base_revision(forger.tag_of(_LIST), value)
        yield _case(f"collection with base_revision {value}", "a collection has no snapshot", "get",
                    _LIST, statement, _TAMPERED)  # fmt: skip
    row = forger.session_row(_LIST)["id"]
    statement = f"INSERT INTO secure_bases VALUES ({row}, -2, X'00')"
    for when in ("get", "names"):
        yield _case(f"{when}: collection with a snapshot", "a collection has no snapshot", when,
                    _LIST, statement, _TAMPERED)  # fmt: skip
    other = forger.session_row(_NOTE)["user_row"]
    statement = f"UPDATE secure_sessions SET user_row = {other} WHERE id = {row}"
    yield _case("collection of another user", "user_row is in the context", "get", _LIST,
                statement, _TAMPERED)  # fmt: skip
    statement = f"DELETE FROM secure_sessions WHERE id = {row}"
    yield _case("collection removed", "its version witness is stored", "get", _LIST, statement,
                _TAMPERED)  # fmt: skip
    statement = f"DELETE FROM secure_witnesses WHERE number = {row}"
    for when in ("get", "names"):
        yield _case(f"{when}: collection without a version witness", "", when, _LIST, statement,
                    _TAMPERED)  # fmt: skip
    for head in (_OTHER_LINK, NO_LINK):
        statement = forger.session(_LIST, rejections.with_fields(_LIST, head=head))
        name = "no head" if head == NO_LINK else "another head"
        yield _case(f"collection with {name}", "a row of another copy of the database", "get",
                    _LIST, statement, _TAMPERED)  # fmt: skip


def _items(forger: _Forger) -> Iterator[Json]:
    other = "an authentic row of another copy of the database"
    for name, seq, position in (
        ("first item with another link", 0, 0),
        ("item with another previous link", 1, LINK_LENGTH),
        ("last item with another link", 2, 0),
    ):
        statement = forger.event(_LIST, seq, rejections.at(position, _OTHER_LINK))
        yield _case(name, other, "get", _LIST, statement, _TAMPERED)
    row, photo = forger.session_row(_LIST)["id"], forger.session_row(_PHOTO)["id"]
    moved = [
        f"DELETE FROM secure_events WHERE session_row = {row} AND seq = 1",
        f"UPDATE secure_events SET session_row = {row} WHERE session_row = {photo} AND seq = 1",
    ]
    yield _case("item moved from another collection", "the row is in the context", "get", _LIST,
                moved, _TAMPERED)  # fmt: skip
    for seq in (0, 2):
        statement = f"DELETE FROM secure_events WHERE session_row = {row} AND seq = {seq}"
        for when in ("get", "names") if seq else ("get",):
            yield _case(f"{when}: item {seq} removed", "revision counts the items", when, _LIST,
                        statement, _TAMPERED)  # fmt: skip
    statement = f"UPDATE secure_events SET time = time + 1 WHERE session_row = {row} AND seq = 1"
    yield _case("item with another time", "time is in the context", "get", _LIST, statement,
                _TAMPERED)  # fmt: skip


def _features(forger: _Forger) -> Iterator[Json]:
    def features(names: str, mac: str) -> str:
        return f"UPDATE secure_meta SET value = '{names} {mac}' WHERE name = 'features'"

    own = forger.mac("collections")
    for name, statement, expect in (
        ("features without collections", features("-", forger.mac("-")), "ok"),
        ("features without collections, with the MAC of others", features("-", own), _WRONG),
        ("features with the MAC of another order",
         features("wrapper,collections", forger.mac("collections,wrapper")), _WRONG),
        ("features in another order",
         features("wrapper,collections", forger.mac("wrapper,collections")), "ok"),
        ("features with a name twice",
         features("collections,collections", forger.mac("collections,collections")), "ok"),
        ("features with an unknown one",
         features("collections,later", forger.mac("collections,later")), _REFUSED),
        ("features with a space", features("collections, -", own), _REFUSED),
        ("features of another database", features("collections", own[::-1]), _WRONG),
    ):  # fmt: skip
        note = "features say what a reader must know"
        if expect == "ok":
            note = "an older list, or another order: a reader that knows the feature accepts both"
        yield _case(name, note, "get", _LIST, statement, expect)
