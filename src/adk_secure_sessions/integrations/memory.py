"""A memory service for ADK that stores encrypted memories in the database of the sessions.

The memory of each user is one collection (`storage.Collections`).  Its items say which entries were
added and dropped: see `formats.memory_items`.  The decrypted entries are cached: see
`memory_index`.
"""

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

from google.adk.events import Event
from google.adk.memory import BaseMemoryService
from google.adk.memory.base_memory_service import SearchMemoryResponse
from google.adk.memory.memory_entry import MemoryEntry
from google.adk.platform import uuid as platform_uuid
from google.adk.sessions import Session
from google.adk.version import __version__ as adk_version
from google.genai import types

from adk_secure_sessions.audit import audited_access
from adk_secure_sessions.caches import SizedLru
from adk_secure_sessions.concurrency import LoopLocks
from adk_secure_sessions.db.protocol import Conflict, Retries
from adk_secure_sessions.errors import ConfigurationError, DecryptionError
from adk_secure_sessions.formats import json_text
from adk_secure_sessions.formats.event_parser import validate_model
from adk_secure_sessions.formats.events import dump_model, encode_item
from adk_secure_sessions.formats.json_text import JsonObject
from adk_secure_sessions.formats.memory_items import (
    COLLECTION_NAME,
    EVENTS_SCOPE,
    EXPLICIT_SCOPE,
    Dropped,
    MemoryItem,
    Scope,
    check_replaced,
    parse_item,
    session_scope,
)
from adk_secure_sessions.hiding import HoldsSecrets, hides_locals
from adk_secure_sessions.integrations.memory_index import Entry, NewItem, UserMemory, paced
from adk_secure_sessions.service import EncryptedSessionService, check_ids, reject_unknown_methods
from adk_secure_sessions.storage import writes
from adk_secure_sessions.storage.features.collections import Address, Collection
from adk_secure_sessions.storage.schema import SessionRevision, events

_USER_SIZE = 100  # entries, as which a user without entries counts in the cache
# The maximum size of the entries of one item, in bytes of JSON.  Deleting one entry writes all
# other entries of its item again.
_ITEM_BYTES = 128 * 1024
# If a change drops entries of more than this number of items, the memory is rewritten instead: on
# PostgreSQL, one statement replaces all these items, and has at most 32,767 parameters.
_MAX_REPLACED = 100
_LEVELS = json_text.MAX_LEVELS - 3  # the item, its field `add` and the entry take three levels
# The first and the last possible time of an event, in seconds since 1970.  `datetime` can represent
# one more day at both ends, because the conversion to local time may add or subtract hours.
_FIRST_TIME, _LAST_TIME = -62_135_510_400.0, 253_402_214_400.0


@hides_locals
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RankedEntry:
    """An entry, as a `MemoryRanker` gets it.  The `repr` of an entry shows no content.

    Attributes:
        key: A text that no other entry of this user has.  A ranker may cache values of the entry
            under this key, because `text` never changes.
        text: The texts of the content, separated by spaces.
        author: The author, or None.
        timestamp: Seconds since 1970 for an event; for a memory, the text that the caller of
            `add_memory` has passed, or None.
    """

    key: str
    text: str
    author: str | None
    timestamp: float | str | None


class MemoryRanker(Protocol):
    """Chooses and orders the memories that `search_memory` returns, for example by embeddings."""

    async def rank(self, query: str, entries: Sequence[RankedEntry]) -> Sequence[RankedEntry]:
        """Return the *entries* that `search_memory` returns for *query*, best first.

        *entries* are all memories of the user as plaintext, oldest first within a session.  This
        package does not encrypt texts or vectors that a ranker stores or sends to a server.
        """
        ...


class _PlannedItem(NamedTuple):
    """An item to append, and whether it is the last one of a change."""

    item: MemoryItem
    is_last: bool


@hides_locals
class EncryptedMemoryService(HoldsSecrets, BaseMemoryService):
    """A memory service that stores memories in the sessions' database, encrypted with data keys.

    `search_memory` returns the same memories as the `InMemoryMemoryService` of google-adk 2.13.
    Words are compared in this process: the database contains no index of words.

    Every method raises these errors: `DecryptionError` if a row that the method needs was tampered
    with; `DatabaseError` if the database cannot be reached; `ValueError` if an id is not a string
    or is too long.  Erasing a user (`erase-user`) erases the user's memory.

    Args:
        session_service: The service whose database and keys are used.  To close the connections,
            close the session service.
        cache_entries: Maximum number of decrypted entries in the cache, of all users together; a
            user counts as 100 more.  This cache is emptied together with the caches of the session
            service (see `Caches.seconds`).
        ranker: An object that chooses the memories that `search_memory` returns, instead of the
            search by words.

    Raises:
        ConfigurationError: `session_service` is not an `EncryptedSessionService`.
    """

    def __init__(
        self,
        session_service: EncryptedSessionService,
        *,
        cache_entries: int = 100_000,
        ranker: MemoryRanker | None = None,
    ) -> None:
        if not isinstance(session_service, EncryptedSessionService):
            raise ConfigurationError(
                "EncryptedMemoryService stores in the database of an EncryptedSessionService: give "
                f"it one, not a {type(session_service).__name__}"
            )
        self._collections = session_service.collections
        self._auditing = session_service._auditing
        self._cache_entries = cache_entries
        self._ranker = ranker
        self._reads = LoopLocks()
        self._writes = LoopLocks()

    @property
    def stores_plaintext(self) -> bool:
        """True if new memories are stored as plaintext, because of a `NoOpBackend`."""
        return self._collections.runner.backends.stores_plaintext

    @audited_access("memory.write")
    async def add_session_to_memory(self, session: Session) -> None:
        """Replace the memory of a session by those events of *session* that have content.

        You may call this method repeatedly: it writes only the difference.  Events that are not in
        *session* any more are deleted from the memory.  Events that were deleted with
        `delete_memory` stay deleted.

        Raises:
            ValueError: The content of an event cannot be converted to JSON or exceeds a limit, or
                the event's timestamp is not a possible time; nothing was stored.
        """
        check_ids(session.app_name, session.user_id, session.id)
        new = _from_events(session.events, "session.events", None)
        scope = session_scope(session.id)

        def plan(memory: UserMemory) -> _PlannedItem | None:
            wanted = [one for one in new if one.id not in memory.deleted]
            drop: list[Entry] = []
            kept = 0
            # New entries can only be added after the stored ones.  So the kept entries must be the
            # first entries of *wanted*, in the same order; drop all other stored entries.
            for stored in memory.of_scope(scope):
                if kept < len(wanted) and wanted[kept].equals_except_metadata(stored):
                    kept += 1
                else:
                    drop.append(stored)
            if kept == len(wanted) and not drop and memory.has_scope(scope):
                return None
            return _plan_item(scope, wanted[kept:], drop)

        await self._write(session.app_name, session.user_id, plan)

    @audited_access("memory.write")
    async def add_events_to_memory(
        self,
        *,
        app_name: str,
        user_id: str,
        events: Sequence[Event],
        session_id: str | None = None,
        custom_metadata: Mapping[str, object] | None = None,
    ) -> None:
        """Add the events that have content and whose ids are not in the session's memory yet.

        Without a *session_id*, the events belong to no session.  `search_memory` returns the JSON
        values in *custom_metadata* with each of the entries.

        Raises:
            ValueError: The content of an event or the metadata cannot be converted to JSON or
                exceeds a limit, or a timestamp is not a possible time; nothing was stored.
        """
        check_ids(app_name, user_id, session_id or "")
        new = _from_events(events, "events", _metadata(custom_metadata, "custom_metadata"))
        scope = session_scope(session_id) if session_id else EVENTS_SCOPE

        def plan(memory: UserMemory) -> _PlannedItem | None:
            known = {entry.id for entry in memory.of_scope(scope)} | memory.deleted
            wanted = []
            for one in new:
                if one.id not in known:
                    known.add(one.id)
                    wanted.append(one)
            return _plan_item(scope, wanted) if wanted or not memory.has_scope(scope) else None

        await self._write(app_name, user_id, plan)

    @audited_access("memory.write")
    async def add_memory(
        self,
        *,
        app_name: str,
        user_id: str,
        memories: Sequence[MemoryEntry],
        custom_metadata: Mapping[str, object] | None = None,
    ) -> None:
        """Add memories that are not events.

        A memory without an id gets a new id.  If `add_memory` has already added a memory with the
        same id, the new memory replaces it.  The JSON values in *custom_metadata* are added to the
        metadata of each memory, unless it already has a value for the same name.

        Raises:
            ValueError: Content or metadata cannot be converted to JSON or exceed a limit, two of
                the memories have the same id, or an id was deleted with `delete_memory`; nothing
                was stored.
        """
        check_ids(app_name, user_id)
        new = list(_from_memories(memories, custom_metadata or {}))
        ids = {one.id for one in new}
        if len(ids) < len(new):
            raise ValueError("two of the memories have the same id")

        def plan(memory: UserMemory) -> _PlannedItem | None:
            if ids & memory.deleted:
                number = next(n for n, one in enumerate(new) if one.id in memory.deleted)
                raise ValueError(
                    f"memories[{number}] has the id of a memory that was deleted: give it another"
                )
            stored = {old.id: old for old in memory.of_scope(EXPLICIT_SCOPE) if old.id in ids}
            wanted, drop = [], []
            for one in new:
                entry = stored.get(one.id)
                if entry and one.equals_except_metadata(entry) and one.metadata == entry.metadata:
                    continue
                wanted.append(one)
                drop += [entry] if entry else []
            return _plan_item(EXPLICIT_SCOPE, wanted, drop) if wanted else None

        if new:
            await self._write(app_name, user_id, plan)

    @audited_access("memory.read")
    async def search_memory(
        self, *, app_name: str, user_id: str, query: str
    ) -> SearchMemoryResponse:
        """Return up to ten memories: those that contain the most words of *query*, best first.

        If the service has a ranker, return the memories that the ranker chooses instead.

        Raises:
            ConfigurationError: The installed google-adk cannot read a memory that a newer
                google-adk stored; or the ranker did not return a sequence of entries that it
                was given.
        """
        check_ids(app_name, user_id)
        address = (app_name, user_id, COLLECTION_NAME)
        memory = await self._up_to_date(await self._cache(), address)
        if memory is None:
            return SearchMemoryResponse()
        if self._ranker is None:
            entries = await memory.search(query)
        else:
            entries = await _rank(self._ranker, query, memory)
        row = memory.version.session_row_id
        return SearchMemoryResponse(memories=[entry.to_memory_entry(row) for entry in entries])

    @audited_access("memory.delete")
    async def delete_memory(
        self, *, app_name: str, user_id: str, memory_id: str | None = None
    ) -> None:
        """Delete the memories with the id *memory_id*, and prevent adding this id again.

        One transaction stores the deletion and replaces each stored record that contains such a
        memory by a record without the memory.  If *memory_id* is None or empty, or no memory has
        this id, do nothing.
        """
        check_ids(app_name, user_id)
        if not memory_id:
            return

        def plan(memory: UserMemory) -> _PlannedItem | None:
            entries = [entry for entry in memory.entries.values() if entry.id == memory_id]
            return _plan_item(drop=entries, deleted=[memory_id]) if entries else None

        await self._write(app_name, user_id, plan)

    # --- write -----------------------------------------------------------------------------------

    async def _write(
        self, app_name: str, user_id: str, plan: Callable[[UserMemory], _PlannedItem | None]
    ) -> None:
        """Append the item that *plan* returns; if *plan* returns None, do nothing.

        *plan* is called again if another process has changed the memory in the meantime, and if the
        planned entries do not fit into one item.
        """
        address = (app_name, user_id, COLLECTION_NAME)
        retries = Retries(writes=True)
        async with self._writes.lock(address):
            while True:
                # Get the cache in each pass: `storage.empty_caches` may have replaced it.
                cache = await self._cache()
                memory = await self._up_to_date(cache, address)
                if memory is None:
                    if plan(UserMemory(SessionRevision(0, 0))) is None:
                        return
                    # Create the collection with an empty item.  Then each later item can be
                    # appended at an expected row id and revision.
                    await self._collections.append(address, encode_item(MemoryItem().values()))
                    continue
                with memory.lock:
                    version = memory.version
                    planned = plan(memory)
                    if planned is None:
                        return
                    item = planned.item
                    rewrites = memory.is_sparse() or len(item.drop) > _MAX_REPLACED
                    replaced = {} if rewrites else memory.replaced(item.drop)
                    rewritten = memory.rewritten(item) if rewrites else []
                try:
                    if rewrites:
                        # Otherwise a memory whose entries are often replaced or deleted would grow
                        # for ever: each change adds an item, and the first search reads all items.
                        plaintexts = await _encode_items(rewritten)
                        if item.scope is not None:
                            only_added = item._replace(drop={}, deleted=())
                            plaintexts.append(encode_item(only_added.values()))
                        await self._collections.rewrite(address, plaintexts, version)
                    else:
                        plaintexts = await _encode_items(replaced.values())
                        changed = dict(zip(replaced, plaintexts, strict=True))
                        values = encode_item(item.values())
                        await self._collections.append_at(version, address, values, changed)
                        with memory.lock:
                            if memory.version == version:
                                memory.apply(item, adk_version)
                        _cache_memory(cache, address, memory)
                except (writes.StaleRevision, writes.MissingSession):
                    await retries.pause_or_raise(Conflict())
                    continue
                if planned.is_last:
                    return
                retries = Retries(writes=True)

    # --- read ------------------------------------------------------------------------------------

    async def _cache(self) -> "_Cache":
        make = partial(_Cache, self._cache_entries)
        return await self._collections.runner.cached_object(self, make)

    async def _up_to_date(self, cache: "_Cache", address: Address) -> UserMemory | None:
        """Return the user's memory as it is stored now; read only items that are not cached."""
        async with self._reads.lock(address):
            memory = cache.get(address)
            if memory is not None:
                version = memory.version
                collection = await self._collections.get(address, limit=0)
                if collection is not None and collection.version == version:
                    return memory
                cache.drop(address)
                added = collection.size - version.revision if collection else 0
                if added > 0:
                    collection = await self._collections.get(address, limit=added)
                    if collection and await _apply_items(memory, collection):
                        _cache_memory(cache, address, memory)
                        return memory
                # Otherwise, the memory was rewritten, or was erased and created again.
            collection = await self._collections.get(address)
            if collection is None:
                return None
            memory = UserMemory(collection.version._replace(revision=0))
            await _apply_items(memory, collection)
            _cache_memory(cache, address, memory)
            return memory


reject_unknown_methods(EncryptedMemoryService, BaseMemoryService)

_Cache: TypeAlias = SizedLru[Address, UserMemory]


def _cache_memory(cache: _Cache, address: Address, memory: UserMemory) -> None:
    cache.put(address, memory, len(memory.entries) + _USER_SIZE)


async def _apply_items(memory: UserMemory, collection: Collection) -> bool:
    """Apply the items of *collection* to *memory*; return False if they are not its next ones."""
    version = collection.version._replace(revision=collection.size - len(collection.items))
    async for item, written_with in paced(await _decode_items(collection)):
        with memory.lock:
            if memory.version != version:  # another process or thread has changed the memory
                return False
            memory.apply(item, written_with)
            version = memory.version
    return True


async def _decode_items(collection: Collection) -> list[tuple[MemoryItem, str]]:
    """Return the items of *collection*, each with the version of google-adk that wrote it."""
    row, first = collection.version.session_row_id, collection.size - len(collection.items)
    items = []
    async for number, plaintext in paced(enumerate(collection.items, first)):
        try:
            written_with, values = json_text.read_event(plaintext)
            items.append((parse_item(values, number), written_with))
        except DecryptionError as error:
            raise error.located(events.name, f"{row}, {number}") from None
    check_replaced((item for item, _ in items), first, events.name, row)
    return items


def _plan_item(
    scope: Scope | None = None,
    add: Sequence[Entry] = (),
    drop: Iterable[Entry] = (),
    deleted: Sequence[str] = (),
) -> _PlannedItem:
    """Return an item with as many entries of *add* as fit into it, and whether these are all."""
    places: dict[int, list[int]] = {}
    for entry in drop:
        places.setdefault(entry.item_number, []).append(entry.position)
    dropped = {number: Dropped(some, secrets.token_hex(16)) for number, some in places.items()}
    values: list[JsonObject] = []
    size = 0
    for one in add:
        size += len(one.content) + len(one.metadata or b"")
        if values and size > _ITEM_BYTES:
            break
        values.append(one.values())
    return _PlannedItem(MemoryItem(scope, values, dropped, deleted), len(values) == len(add))


async def _encode_items(items: Iterable[NewItem]) -> list[bytes]:
    encoded = []
    async for item, entries in paced(items):
        add = [None if entry is None else entry.values() for entry in entries]
        encoded.append(encode_item(item._replace(add=add).values()))
    return encoded


async def _rank(ranker: MemoryRanker, query: str, memory: UserMemory) -> list[Entry]:
    with memory.lock:
        entries = sorted(memory.entries.items())
        row = memory.version.session_row_id
    offered: dict[RankedEntry, tuple[int, Entry]] = {}
    async for key, entry in paced(entries):
        name = f"{row}.{entry.item_number}.{entry.position}"
        offered[RankedEntry(name, entry.text(), entry.author, entry.timestamp)] = key, entry
    answer = await ranker.rank(query, list(offered))
    if not isinstance(answer, Sequence) or any(
        not isinstance(one, RankedEntry) or one not in offered for one in answer
    ):
        raise ConfigurationError(
            "the ranker must return a sequence of entries that it was given for this query"
        )
    ranked = [offered[one] for one in answer]
    with memory.lock:  # an entry may have been deleted while the ranker ran
        return [entry for key, entry in ranked if memory.entries.get(key) is entry]


# --- check what is added -------------------------------------------------------------------------


def _from_events(events: Sequence[Event], name: str, metadata: bytes | None) -> list[Entry]:
    """Return entries for the events that have content; error texts call *events* by *name*."""
    new = []
    for number, event in enumerate(events):
        if not event.content or not event.content.parts:
            continue
        timestamp = event.timestamp
        if type(timestamp) is not float or not _FIRST_TIME <= timestamp <= _LAST_TIME:
            raise ValueError(f"{name}[{number}].timestamp is not a possible time in seconds")
        if not (isinstance(event.id, str) and isinstance(event.author, str)):
            raise ValueError(f"{name}[{number}]: id and author must be strings")
        content = _content(event.content, name, number)
        new.append(Entry(event.id, event.author, timestamp, content, metadata))
    return new


def _from_memories(
    memories: Sequence[MemoryEntry], custom_metadata: Mapping[str, object]
) -> Iterator[Entry]:
    for number, memory in enumerate(memories):
        where = f"memories[{number}]"
        memory_id = platform_uuid.new_uuid() if memory.id is None else memory.id
        texts = (memory_id, memory.author or "", memory.timestamp or "")
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{where}: id, author and timestamp must be strings")
        if not isinstance(memory.content, types.Content):
            raise ValueError(f"{where}.content must be a google.genai.types.Content")
        content = _content(memory.content, "memories", number)
        values = {**custom_metadata, **memory.custom_metadata}
        metadata = _metadata(values, f"{where}.custom_metadata")
        yield Entry(memory_id, memory.author, memory.timestamp, content, metadata)


def _content(content: types.Content, name: str, number: int) -> bytes:
    """Return the JSON of *content*, which errors call `name[number].content`."""
    try:
        data: bytes = types.Content.__pydantic_serializer__.to_json(
            content, exclude_none=True, warnings="error"
        )
        # Pydantic writes null for infinity and NaN, and U+FFFD for a lone surrogate in a key.
        if (
            json_text.is_within_limits(data, _LEVELS)
            and b"null" not in data
            and b"\xef\xbf\xbd" not in data
        ):
            return data
    except Exception:
        pass  # for example, lone surrogates, or values without JSON form
    name = f"{name}[{number}].content"
    data = _json(dump_model(content), name)
    try:
        validate_model(types.Content, json_text.loads(data))
    except ValueError:
        raise ValueError(
            f"{name} holds a value of a wrong type: google-adk could not read it back"
        ) from None
    return data


def _metadata(values: Mapping[str, object] | None, name: str) -> bytes | None:
    """Return the JSON of *values*, which errors call *name*; None if there are no values."""
    if not values:
        return None
    if not all(isinstance(key, str) for key in values):
        raise ValueError(f"the keys of {name} must be strings")
    return _json(dict(values), name)


def _json(fields: JsonObject, name: str) -> bytes:
    return json_text.dumps(json_text.exact_values(fields, _LEVELS, name))
