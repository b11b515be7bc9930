"""Collections: named lists of items, in which services store artifacts and memory."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from adk_secure_sessions.formats.records import encode_text
from adk_secure_sessions.storage.features.feature import Feature
from adk_secure_sessions.storage.reads import GetSession, ListCollections
from adk_secure_sessions.storage.rows import StoredSession
from adk_secure_sessions.storage.survey import COLLECTIONS
from adk_secure_sessions.storage.unit_of_work import UnitOfWork
from adk_secure_sessions.storage.writes import (
    AppendEvent,
    CreateSession,
    DeleteSession,
    DuplicateSession,
    Expected,
    MissingSession,
    NewEvent,
    ReplaceItems,
    RewriteItems,
    StaleRevision,
)

T = TypeVar("T")

# The maximum length of a collection's name: enough for the JSON of several escaped ids.
MAX_NAME_BYTES = 16 * 1024


class Collection(NamedTuple):
    """A collection, and some or all of its items.

    Attributes:
        name: The name of the collection.
        at: The row id and the revision of the collection.  The revision is its number of items.
        items: The plaintexts of the collection's last items, oldest first.
    """

    name: str
    at: Expected
    items: tuple[bytes, ...] = ()

    def __repr__(self) -> str:  # without the items, because items of artifacts contain keys
        return f"<collection {self.at}>"

    @property
    def size(self) -> int:
        """The number of items of the stored collection."""
        return self.at.revision


class Collections:
    """The operations on collections, which are named lists of items that grow at the end.

    A user's collections are encrypted with the user's data key.  A collection is stored like a
    session without state, and an item like an event (docs/format.md, "Collections").  Each item
    begins with the version of google-adk, like an event: see `formats.events`.

    Every method raises what `UnitOfWork.run` raises.
    """

    def __init__(self, unit: UnitOfWork) -> None:
        self._unit = unit
        self._feature = Feature(unit, COLLECTIONS)

    @property
    def stores_plaintext(self) -> bool:
        """Whether new records are stored as plaintext."""
        return self._unit.backends.stores_plaintext

    async def database_id(self) -> bytes:
        """Return the random id of the database."""
        return (await self._unit.keys()).keyring.database_id

    async def cache(self, key: object, make: Callable[[], T]) -> T:
        """Return the object that is kept for *key*, such as a cache of decrypted values.

        If no object is kept for *key*, keep the object that *make* returns.  When the cache of
        decrypted rows is emptied, the kept objects are discarded, too.
        """
        return await self._unit.attached(key, make)

    async def names(self, app_name: str, user_id: str) -> list[Collection]:
        """Return all collections of a user that have items, without the items."""
        who = await self._unit.identify(app_name, user_id)
        found = await self._unit.run(ListCollections(who))
        return [
            Collection(one.session_id, Expected(one.id, one.revision))
            for one in found
            if one.revision
        ]

    async def get(
        self, app_name: str, user_id: str, name: str, *, limit: int | None = None
    ) -> Collection | None:
        """Return a collection and its last *limit* (or all) items; None if it is not stored.

        Also return None for a stored collection without items: a process may have stopped after it
        had stored the collection and before it could append an item.
        """
        who = await self._unit.identify(app_name, user_id, name, True)
        found = await self._unit.run(GetSession(who, _item, limit))
        if found is None or not found[0].session.revision:
            return None
        view, items = found
        return Collection(name, Expected(view.session.id, view.session.revision), tuple(items))

    async def append(
        self,
        app_name: str,
        user_id: str,
        name: str,
        item: bytes | Callable[[Collection], bytes],
        *,
        expected: Expected | None = None,
        replaced: Mapping[int, bytes] | None = None,
    ) -> Expected:
        """Append an item to a collection, and return the collection's row id and new revision.

        The revision is the number of items.  Items are numbered from 0, so the number of the new
        item is `revision - 1`.  If the collection does not exist, create it.  Also create the rows
        of its user and its app if they do not exist.

        Args:
            app_name: The app.
            user_id: The user.
            name: The name of the collection, at most `MAX_NAME_BYTES` long.
            item: The plaintext; or a function that returns the plaintext.  Before each attempt to
                append, the function is called with the collection and its last item; if the
                collection is empty, without an item.  A function cannot be combined with
                *expected*.
            expected: The row id and the revision that the collection had when the caller read it.
                If None, the item is appended at any revision.
            replaced: New contents for earlier items, by number; *expected* must be given.  The
                appended item must name the replaced items, so that a replay of their old records
                can be detected: see `ReplaceItems`.

        Raises:
            ValueError: The name is too long; or *replaced* has a number that is not the number of
                an earlier item, or is given without *expected*.
            StaleRevision: The stored collection has another row id or revision than *expected*.
            MissingSession: *expected* is given, and the collection does not exist any more.
        """
        if len(name) > MAX_NAME_BYTES // 4 and len(encode_text(name)) > MAX_NAME_BYTES:
            raise ValueError(f"the name of a collection has at most {MAX_NAME_BYTES} bytes")
        if replaced and not (expected and set(replaced) <= set(range(expected.revision))):
            raise ValueError("only items before the expected position can be replaced")
        who = await self._unit.identify(app_name, user_id, name, True)
        await self._feature.ensure()
        assert isinstance(item, bytes) or expected is None
        after = expected
        while True:
            plaintext = item if isinstance(item, bytes) else b""
            if after is None:
                limit = 0 if isinstance(item, bytes) else 1
                found = await self._position(app_name, user_id, name, limit)
                after = found.at
                if not isinstance(item, bytes):
                    plaintext = item(found)
            new = NewEvent(plaintext, time.time_ns() // 1000, {}, {}, {})
            stored: list[StoredSession] = []
            append = AppendEvent(who, after, new, stored.append)
            if replaced:
                append = ReplaceItems(who, after, new, stored.append, replaced)
            try:
                session = await self._unit.run(append)
                return Expected(session.id, session.revision)
            except (StaleRevision, MissingSession):
                if expected is not None:
                    raise
                after = None

    async def rewrite(
        self, app_name: str, user_id: str, name: str, items: Sequence[bytes], expected: Expected
    ) -> None:
        """Replace all items of a collection by *items*, in one transaction.

        The collection gets a new row id.  If another process has read the old items, and then
        appends an item with their *expected* value, its append raises StaleRevision.

        Raises:
            StaleRevision: The stored collection has another row id or revision than *expected*.
            MissingSession: The collection does not exist any more.
        """
        who = await self._unit.identify(app_name, user_id, name, True)
        await self._unit.run(RewriteItems(who, expected, items, time.time_ns() // 1000))

    async def delete(self, app_name: str, user_id: str, name: str) -> bool:
        """Delete a collection and its items; return False if the collection does not exist."""
        who = await self._unit.identify(app_name, user_id, name, True)
        return await self._unit.run(DeleteSession(who))

    async def _position(self, app_name: str, user_id: str, name: str, limit: int = 0) -> Collection:
        """Return the collection and its last *limit* items; create a missing collection."""
        who = await self._unit.identify(app_name, user_id, name, True)
        while True:
            found = await self._unit.run(GetSession(who, _item, limit))
            if found is not None:
                view, items = found
                at = Expected(view.session.id, view.session.revision)
                return Collection(name, at, tuple(items))
            try:
                now = time.time_ns() // 1000
                created = await self._unit.run(CreateSession(who, {}, {}, b"{}", now))
                return Collection(name, Expected(created.session.id, created.session.revision))
            except DuplicateSession:
                pass  # another task or process has just created the collection


def _item(plaintext: bytes, _row: int, _seq: int) -> bytes:
    return plaintext
