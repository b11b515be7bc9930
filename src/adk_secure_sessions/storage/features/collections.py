"""Collections: named lists of items, in which services store artifacts and memory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple

import sqlalchemy as sa

from adk_secure_sessions.concurrency import LoopLocks
from adk_secure_sessions.db.protocol import Change, Conflict, Read, Row, Steps
from adk_secure_sessions.errors import Reason, TamperedError
from adk_secure_sessions.formats.records import (
    LINK_LENGTH,
    EncodedEvent,
    context_with_prefix,
    encode_text,
    new_link,
)
from adk_secure_sessions.formats.times import time_now
from adk_secure_sessions.storage import queries as sql
from adk_secure_sessions.storage import writes
from adk_secure_sessions.storage.feature_list import Feature
from adk_secure_sessions.storage.operation_runner import Attempt, CachedRowOutdated, OperationRunner
from adk_secure_sessions.storage.queries import EVENT_RECORD, EVENT_SEQ, EVENT_TIME
from adk_secure_sessions.storage.reads import GetSession, ListSessions
from adk_secure_sessions.storage.schema import (
    EVENTS,
    Identity,
    SessionRevision,
    StoredSession,
    locating_errors,
    new_row_id,
)
from adk_secure_sessions.storage.survey import FeatureName

Address = tuple[str, str, str]  # the app, the user and the name of a collection

# The maximum length of a collection's name: enough for the JSON of several escaped ids.
MAX_NAME_BYTES = 16 * 1024


class Collection(NamedTuple):
    """A collection, and the plaintexts of all or its last *items*, oldest first.

    The revision in *version* is the number of the items.
    """

    name: str
    version: SessionRevision
    items: tuple[bytes, ...] = ()

    def __repr__(self) -> str:  # without the items, because items of artifacts contain keys
        return f"<collection {self.version}>"

    @property
    def size(self) -> int:
        """The number of items of the stored collection."""
        return self.version.revision


class Collections:
    """The operations on collections, which are named lists of items that grow at the end.

    A collection is stored like a session without state, and an item like an event, so it also
    begins with the version of google-adk (docs/format.md, "Collections").
    """

    def __init__(self, runner: OperationRunner) -> None:
        self.runner: OperationRunner = runner
        self._feature = Feature(runner, FeatureName.COLLECTIONS)
        self._locks = LoopLocks()

    async def of_user(self, app_name: str, user_id: str) -> list[Collection]:
        """Return all collections of a user that have items, without the items."""
        identity = await self.runner.identify(app_name, user_id)
        listed = await self.runner.run(ListSessions(identity, is_collection=True))
        stored = [one.session for one in listed if one.session.row.revision]
        return [Collection(one.session_id, one.id_and_revision) for one in stored]

    async def get(self, address: Address, *, limit: int | None = None) -> Collection | None:
        """Return a collection and its last *limit* (or all) items; None if it is not stored.

        Also return None for a stored collection without items: a process may have stopped after it
        had stored the collection and before it could append an item.
        """
        collection = await self._read(await self.runner.identify(*address, True), limit)
        return collection if collection and collection.size else None

    async def append(
        self, address: Address, item: bytes | Callable[[Collection], bytes]
    ) -> SessionRevision:
        """Append an item to a collection, and return the collection's row id and new revision.

        If the collection, its user or its app does not exist, create it.  If *item* is a function,
        it returns the plaintext.  It is called before each attempt, with the collection and its
        last item, if any.
        """
        if len(encode_text(address[2])) > MAX_NAME_BYTES:
            raise ValueError(f"the name of a collection has at most {MAX_NAME_BYTES} bytes")
        identity = await self.runner.identify(*address, True)
        await self._feature.ensure()
        async with self._locks.lock(address):  # 200 tasks at once would make 20,000 attempts
            while True:
                collection = await self._read(identity, 0 if isinstance(item, bytes) else 1)
                try:
                    if collection is None:
                        creation = writes.CreateSession(identity, {}, {}, b"{}", time_now())
                        created = await self.runner.run(creation)
                        collection = Collection(address[2], created.session.id_and_revision)
                    plaintext = item if isinstance(item, bytes) else item(collection)
                    return await self.append_at(collection.version, address, plaintext)
                except (writes.DuplicateSession, writes.StaleRevision, writes.MissingSession):
                    pass  # another event loop or process has just changed the collection

    async def append_at(
        self,
        expected: SessionRevision,
        address: Address,
        item: bytes,
        replaced: Mapping[int, bytes] = {},
    ) -> SessionRevision:
        """Append *item* if the collection is as *expected*: see `AppendEvent`.

        *replaced* are new contents for earlier items, by number from 0: see `ReplaceItems`.
        """
        if not set(replaced) <= set(range(expected.revision)):
            raise ValueError("only items before the expected position can be replaced")
        identity = await self.runner.identify(*address, True)
        await self._feature.ensure()
        event = writes.NewEvent(item, time_now(), {}, {}, {})
        append = writes.AppendEvent(identity, expected, event)
        if replaced:
            append = ReplaceItems(identity, expected, event, replaced=replaced)
        return (await self.runner.run(append)).id_and_revision

    async def rewrite(
        self, address: Address, items: Sequence[bytes], expected: SessionRevision
    ) -> None:
        """Replace all items of a collection by *items*: see `RewriteItems`."""
        identity = await self.runner.identify(*address, True)
        await self.runner.run(RewriteItems(identity, expected, items, time_now()))

    async def delete(self, address: Address) -> bool:
        """Delete a collection and its items; return False if the collection does not exist."""
        identity = await self.runner.identify(*address, True)
        return bool(await self.runner.run(writes.DeleteSession(identity)))

    async def _read(self, identity: Identity, limit: int | None) -> Collection | None:
        loaded = await self.runner.run(GetSession(identity, lambda items, *_: items, limit))
        if loaded is None:
            return None
        stored, items = loaded
        return Collection(identity.session_id, stored.session.id_and_revision, tuple(items))


@dataclass(eq=False, repr=False)
class ReplaceItems(writes.AppendEvent):
    """Append an item to a collection, and replace the contents of earlier items, by number.

    A replaced item keeps its number, its time and its links, so this module does not detect a
    replay of its old record.  The caller must: it stores a new random value in each replaced item
    and in the appended one, and compares the two when it reads the items.
    """

    audited_as = "replace"

    _: KW_ONLY
    replaced: Mapping[int, bytes]

    def steps(self, attempt: Attempt, owner_changes: writes.OwnerChanges) -> Steps[StoredSession]:
        self._rows: dict[int, Row] = {}
        for part in sql.padded_chunks(self.replaced):
            where = {"session_row": self.expected.session_row_id, **sql.list_parameters(part)}
            for row in (yield Read(sql.events_at(len(part)), where)):
                self._rows[row[EVENT_SEQ]] = row
        return (yield from super().steps(attempt, owner_changes))

    def _prepare_append(
        self, attempt: Attempt, session: StoredSession
    ) -> tuple[writes.Changes, StoredSession] | None:
        if appended := super()._prepare_append(attempt, session):
            appended[0].extend(self._build_replacement(attempt, seq) for seq in self.replaced)
        return appended

    def _build_replacement(self, attempt: Attempt, seq: int) -> Change:
        """Return the change that replaces item *seq*; its new record contains the same links."""
        session_row_id, tag = self.expected.session_row_id, attempt.identity.user_tag
        with locating_errors(EVENTS.name, f"{session_row_id}, {seq}"):
            if (row := self._rows.get(seq)) is None:
                if attempt.may_use_cached_rows:
                    raise CachedRowOutdated  # another process may have replaced the collection
                raise TamperedError("it was removed", Reason.MISSING)
            old, prefix = row[EVENT_RECORD], attempt.identity.event_prefix
            context = context_with_prefix(prefix, session_row_id, seq, row[EVENT_TIME])
            links = attempt.keys.open(tag, context, old)[: 2 * LINK_LENGTH]
        new = attempt.keys.seal(tag, context, links + self.replaced[seq])
        values = {"at_session_row": session_row_id, "at_seq": seq, "at_event": old, "event": new}
        return Change(sql.UPDATE_EVENT, values)


@dataclass(eq=False, repr=False)
class RewriteItems(writes.Write[StoredSession]):
    """Replace all items of a collection by *items*, at least one, in one transaction.

    The collection's row gets a new row id.  Therefore the record of an old item cannot be decrypted
    as one of the new items, and an append of a process that has read the old items raises
    StaleRevision.

    Raise MissingSession if the collection does not exist, and StaleRevision if it is not as
    *expected*.  *now* is the time of the new items, in microseconds UTC.
    """

    audited_as = "rewrite"
    always_locks_rows = True  # the number of items has no limit, so several requests insert them
    lock_queries: Sequence[sa.Executable] = field(default=sql.LOCKS_WITHOUT_APP, init=False)

    expected: SessionRevision
    items: Sequence[bytes]
    now: int

    def steps(self, attempt: Attempt, owner_changes: writes.OwnerChanges) -> Steps[StoredSession]:
        _, user, session = yield from writes.read_with_last_event(attempt)
        if session.row.id in self._unconfirmed_results:
            return session
        if self.expected != session.id_and_revision:
            raise writes.StaleRevision
        owner_changes.update_owner(user, session.row.record)
        links = [new_link() for _ in self.items]
        row = session.row._replace(id=new_row_id(), revision=len(links), updated_at=self.now)
        new = writes.NewSession.build(attempt, session._replace(row=row, last_link=links[-1]))
        self._unconfirmed_results[row.id] = new.session
        changes = writes.replacement_changes(attempt, owner_changes, session, new)
        groups = writes.event_groups(EncodedEvent(item, self.now) for item in self.items)
        if not (yield from writes.try_apply_with_events(attempt, changes, row.id, groups, links)):
            raise Conflict
        return new.session
