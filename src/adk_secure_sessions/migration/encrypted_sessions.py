"""Find out which sessions and states of a source the target of `migrate` already has."""

import functools
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import sqlalchemy as sa

from adk_secure_sessions.keys.keyring import Keyring
from adk_secure_sessions.maintenance import Database
from adk_secure_sessions.maintenance.walk import located
from adk_secure_sessions.migration.encrypted import content_of
from adk_secure_sessions.migration.sources import Ids, SessionContent, SourceSession, Unreadable
from adk_secure_sessions.storage import reads, writes
from adk_secure_sessions.storage.features.imports import (
    Imports,
    ImportStatus,
    SourceEvent,
)
from adk_secure_sessions.storage.pages import pages, rows_where
from adk_secure_sessions.storage.schema import apps, migrated, sessions, users

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Pair(Generic[C]):
    """A session of the source, or the state of a user or an app, and its status in the target.

    Without keys in the target, *tag* is empty.  A *content* that was not read is None; of a
    state, it is JSON.  *copied_events* were copied before.
    """

    ids: Ids
    tag: bytes = b""
    status: ImportStatus = ImportStatus.NEW
    content: C | Unreadable | None = None
    session: SourceSession | None = None
    copied_events: int = 0


SessionPair = Pair[SessionContent]
StatePair = Pair[bytes]


class Located(NamedTuple):
    """A copied session that is still stored, with the row id and the revision of the copy."""

    tag: bytes
    row: int
    number: int
    ids: tuple[str, str, str]


class EncryptedSessions:
    """Finds the status of many sessions and states in the target with few queries.

    The queries read the revisions of sessions and the versions of states, but decrypt no rows.  The
    methods of `Imports` that write check the revisions and versions again.
    """

    def __init__(self, db: Database, keyring: Keyring) -> None:
        self.db = db
        self.imports: Imports = db.imports
        self._keyring = keyring

    @classmethod
    async def of(cls, db: Database) -> "EncryptedSessions":
        """Open *db*, which must have its tables and keys."""
        return cls(db, (await db.keys()).keyring)

    def tag(self, app_name: str, *ids: str) -> bytes:
        """Return the blind index of an app, a user or a session."""
        index = self._keyring.index
        if not ids:
            return index.app(app_name)
        return index.user(app_name, *ids) if len(ids) == 1 else index.session(app_name, *ids)

    async def sessions(self, listed: Sequence[SourceSession]) -> list[SessionPair]:
        copies = await self.imports.imported([one.ids for one in listed])
        tags = {one: self.tag(*one.ids) for one in listed}
        others = await self._stored(tags[one] for one in listed if one.ids not in copies)
        if others:
            # Another run may have copied a session after the first query.
            copies |= await self.imports.imported(one.ids for one in listed if tags[one] in others)
        found: list[SessionPair] = []
        for one, tag in tags.items():
            status, number = ImportStatus.SAME_ID if tag in others else ImportStatus.NEW, 0
            if copy := copies.get(one.ids):
                status = copy.status(is_unchanged=copy.has_source(one.version))
                number = copy.row.number
            found.append(Pair(one.ids, tag, status, None, one, number))
        return found

    async def _stored(self, tags: Iterable[bytes]) -> set[bytes]:
        rows = await rows_where(self.db.unit.read, _TAGS, sessions.c.tag, tags)
        return {bytes(tag) for (tag,) in rows}

    async def states(self, encoded: Mapping[Ids, bytes | Unreadable]) -> list[StatePair]:
        """Return the status of the state of each owner in *encoded*: the state in the source."""
        copies = await self.imports.imported_states(encoded)
        found: list[StatePair] = []
        for ids, state in encoded.items():
            status = ImportStatus.NEW
            if copy := copies.get(ids):
                is_unchanged = isinstance(state, bytes) and copy.has_state(state)
                status = copy.status(is_unchanged=is_unchanged)
            found.append(Pair(ids, self.tag(*ids), status, state))
        return found

    async def copies(self, app_name: str | None) -> AsyncIterator[Mapping[bytes, int]]:
        """Yield the tag and the unauthenticated row of each copied session that is still stored."""
        if not await self.imports.has_imports():
            return
        parameters = {} if app_name is None else {"app_tag": self.tag(app_name)}
        query, size = _copies(app_name is not None), self.db.limits.headers
        async for rows in pages(
            self.db.unit.read, query, migrated.c.tag, size, lambda *row: row, **parameters
        ):
            yield {bytes(tag): int(row) for tag, row in rows}

    async def located(self, tag: bytes, row: int) -> Located | None:
        """Return a copied session; None if it was deleted or continued, or has expired.

        The source may not list an expired session because it has expired there, too.
        """
        for found in await located(self.db, [row]):
            if found.tag != tag:
                continue
            ids = found.known_ids()[:3]
            if found.columns is not None and found.columns.expires_at <= time.time_ns() // 1000:
                return None
            copy = (await self.imports.imported([ids])).get(ids)
            return Located(tag, row, copy.row.number, ids) if copy and copy.is_untouched else None
        return None

    async def content(self, app_name: str, user_id: str, session_id: str) -> SessionContent | None:
        """Return the session in the target, even if it has expired; None if it was deleted."""
        who = await self.db.unit.identify(app_name, user_id, session_id)
        operation = reads.CheckSession(who, lambda plaintext, _row, _seq: plaintext)
        found = await self.db.unit.run(operation)
        if found is None:
            return None
        events = [SourceEvent(*pair) for pair in zip(found[1], operation.times, strict=True)]
        return content_of(found[0].session, events)

    async def state(self, app_name: str, user_id: str | None = None) -> bytes:
        """Return the state of a user, or of an app, as JSON; `{}` if it is not stored."""
        if user_id is not None:
            who = await self.db.unit.identify(app_name, user_id)
            return (await self.db.unit.run(reads.GetStates(who)))[1]
        app = await self.db.unit.run(reads.CheckOwner(await self.db.unit.identify(app_name)))
        return b"{}" if app is None else app.state

    async def delete(self, found: Located) -> bool:
        """Delete a copied session; return False if a service has written to it or deleted it."""
        who = await self.db.unit.identify(*found.ids)
        untouched = (found.row, found.number)
        return await self.db.unit.run(
            writes.DeleteSession(who, lambda now: (now.id, now.revision) == untouched)
        )


_TAGS = sa.select(sessions.c.tag)


@functools.cache
def _copies(of_app: bool) -> sa.Select[Any]:
    source = migrated.join(
        sessions, sa.and_(sessions.c.id == migrated.c.row_id, sessions.c.tag == migrated.c.tag)
    )
    query = sa.select(migrated.c.tag, migrated.c.row_id)
    if of_app:
        source = source.join(users, users.c.id == sessions.c.user_row)
        source = source.join(apps, apps.c.id == users.c.app_row)
        query = query.where(apps.c.tag == sa.bindparam("app_tag", type_=apps.c.tag.type))
    return query.select_from(source)
