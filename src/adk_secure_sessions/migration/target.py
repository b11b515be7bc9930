"""Find out which sessions and states of a source the target of `migrate` already has."""

import functools
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from adk_secure_sessions.formats.states import loads
from adk_secure_sessions.keys.keyring import Keyring
from adk_secure_sessions.maintenance import Database
from adk_secure_sessions.maintenance.walk import located
from adk_secure_sessions.migration.sources import SessionContent, SourceSession
from adk_secure_sessions.storage.features.imports import Imported, ImportStatus, SourceEvent
from adk_secure_sessions.storage.pages import pages
from adk_secure_sessions.storage.queries import chunks, is_one_of, numbered
from adk_secure_sessions.storage.reads import CheckApp, CheckSession
from adk_secure_sessions.storage.schema import COLLECTION, NEVER, apps, migrated, sessions, users
from adk_secure_sessions.storage.store import Store


class Entry(NamedTuple):
    """A session of the source, and its status in the target.

    Attributes:
        session: The session.
        tag: Its blind index in the target; empty if the target does not exist yet.
        found: Its status.
        copied_events: The number of its events that were copied before.
    """

    session: SourceSession
    tag: bytes
    found: ImportStatus
    copied_events: int


class Target:
    """Finds the status of many sessions and states in the target with few queries.

    The queries read the revisions of sessions and the versions of states, but decrypt no rows.  The
    methods of `Store` that write check the revisions and versions again.

    Args:
        db: The database.
        store: The store of *db*.
        keyring: The keyring of *db*.
    """

    def __init__(self, db: Database, store: Store, keyring: Keyring) -> None:
        self.db = db
        self.store = store
        self._keyring = keyring

    @classmethod
    async def of(cls, db: Database) -> "Target":
        """Open *db*, which must have its tables and keys."""
        store = await db.store()
        return cls(db, store, (await db.keys()).keyring)

    def tag(self, app_name: str, *ids: str) -> bytes:
        """Return the blind index of an app, a user or a session."""
        index = self._keyring.index
        if not ids:
            return index.app(app_name)
        return index.user(app_name, *ids) if len(ids) == 1 else index.session(app_name, *ids)

    async def entries(self, listed: Sequence[SourceSession]) -> list[Entry]:
        """Return an entry with the status for each session in *listed*."""
        copies = await self.store.imported([one[:3] for one in listed])
        tags = {one: self.tag(*one[:3]) for one in listed}
        others = await self._stored(tags[one] for one in listed if one[:3] not in copies)
        if others:
            # Another run may have copied a session after the first query.
            ids = [one[:3] for one in listed if tags[one] in others]
            copies |= await self.store.imported(ids)
        entries = []
        for one, tag in tags.items():
            copy = copies.get(one[:3])
            if copy is None:
                found = ImportStatus.SAME_ID if tag in others else ImportStatus.NEW
                entries.append(Entry(one, tag, found, 0))
            else:
                found = copy.status(is_unchanged=copy.has_source(one.version))
                entries.append(Entry(one, tag, found, copy.number))
        return entries

    async def _stored(self, tags: Iterable[bytes]) -> set[bytes]:
        """Return the elements of *tags* for which a session is stored."""
        stored: set[bytes] = set()
        for part in chunks(tags):
            rows = await self.db.read(_with_tags(len(part)), numbered(part))
            stored.update(bytes(tag) for (tag,) in rows)
        return stored

    async def states(
        self, encoded: Mapping[tuple[str, ...], bytes]
    ) -> dict[tuple[str, ...], tuple[bytes, ImportStatus]]:
        """Return, for each owner in *encoded*, the owner's tag and the status of the owner's state.

        A key of *encoded* is the app name and, for the state of a user, the user id.  A value is
        the state in the source as JSON; it is empty if the state cannot be stored.

        A rotation of keys also changes the versions of owners.  So if the status is `MOVED_ON` or
        `CONFLICT`, the state in the target may nevertheless be unchanged.
        """
        owners = {ids: (ids[0], ids[1] if len(ids) > 1 else None) for ids in encoded}
        copies = await self.store.imported_states(owners.values())
        found = {}
        for ids, owner in owners.items():
            copy, kind = copies.get(owner), ImportStatus.NEW
            if copy is not None:
                is_unchanged = bool(encoded[ids]) and copy.has_state(encoded[ids])
                kind = copy.status(is_unchanged=is_unchanged)
            found[ids] = self.tag(*ids), kind
        return found

    async def copies(self, app_name: str | None) -> AsyncIterator[Sequence["Copy"]]:
        """Yield the copied sessions that are still stored, in batches.

        If *app_name* is None, yield those of all apps.
        """
        if not await self.store.has_imports():
            return
        parameters = {} if app_name is None else {"app_tag": self.tag(app_name)}
        query, size = _copies(app_name is not None), self.db.limits.headers
        walk = pages(self.db.read, query, migrated.c.tag, size, _copy, **parameters)
        async for copies in walk:
            yield copies

    async def located(self, one: "Copy") -> "Located | None":
        """Return a copied session; None if it was deleted, or has expired.

        Raises DecryptionError if its ids cannot be decrypted.
        """
        for found in await located(self.db, [one.row]):
            if found.tag == one.tag:
                ids = found.known_ids()[:3]
                if found.columns is not None and _is_past(found.columns.expires_at):
                    return None
                copy = (await self.store.imported([ids])).get(ids)
                return None if copy is None or copy.stored is None else Located(copy, ids)
        return None

    async def content(self, entry: Entry) -> SessionContent | None:
        """Return the session in the target, even if it has expired; None if it was deleted.

        Raises one of `maintenance.problems.UNREADABLE` if the session cannot be decrypted.
        """
        who = await self.db.unit.identify(*entry.session[:3])
        operation = CheckSession(who, lambda plaintext, _row, _seq: plaintext)
        found = await self.db.unit.run(operation)
        if found is None:
            return None
        stored = found[0].session
        snapshot = {} if stored.snapshot is None else loads(stored.snapshot)
        events = [SourceEvent(*pair) for pair in zip(found[1], operation.times, strict=True)]
        return SessionContent(
            snapshot | loads(stored.overlay),
            events,
            stored.created_at,
            stored.updated_at,
            None if stored.expires_at == NEVER else stored.expires_at,
        )

    async def state(self, app_name: str, user_id: str | None = None) -> bytes:
        """Return the state of a user, or of an app, as JSON; `{}` if it is not stored."""
        if user_id is not None:
            return await self.store.user_state(app_name, user_id)
        app = await self.db.unit.run(CheckApp(await self.db.unit.identify(app_name)))
        return b"{}" if app is None else app.state

    async def count_others(self, app_name: str | None) -> int:
        """Return the number of stored sessions that were not copied.

        If *app_name* is None, count those of all apps.
        """
        parameters = {} if app_name is None else {"app_tag": self.tag(app_name)}
        has_copies = await self.store.has_imports()
        ((number,),) = await self.db.read(_others(has_copies, app_name is not None), parameters)
        return int(number)

    async def delete(self, found: "Located") -> bool:
        """Delete a copied session, unless a service has written to it.

        Return whether the session was deleted.
        """
        copy = found.copy
        return await self.store.delete(
            *found.ids, condition=lambda now: (now.id, now.revision) == (copy.row, copy.number)
        )


class Copy(NamedTuple):
    """A copied session that is still stored; its row was not authenticated.

    *seems_expired* says whether the copy has expired, according to its row.  The source may not
    list this session any more because it has expired there, too.  So `Target.located` does not
    return an expired copy, and it does not count as a session that the source no longer has.
    """

    tag: bytes
    row: int
    seems_expired: bool


class Located(NamedTuple):
    """A copied session that is still stored: its row in `secure_migrated`, and its ids."""

    copy: Imported
    ids: tuple[str, str, str]


def _copy(tag: bytes, row: int, expires_at: object) -> Copy:
    return Copy(bytes(tag), int(row), _is_past(expires_at))


def _is_past(expires_at: object) -> bool:
    return isinstance(expires_at, int) and expires_at <= time.time_ns() // 1000


@functools.cache
def _with_tags(size: int) -> sa.Select[Any]:
    return sa.select(sessions.c.tag).where(is_one_of(sessions.c.tag, size))


@functools.cache
def _copies(of_app: bool) -> sa.Select[Any]:
    source = migrated.join(
        sessions, sa.and_(sessions.c.id == migrated.c.row_id, sessions.c.tag == migrated.c.tag)
    )
    columns = migrated.c.tag, migrated.c.row_id, sessions.c.expires_at
    query = sa.select(*columns)
    if of_app:
        source = source.join(users, users.c.id == sessions.c.user_row)
        source = source.join(apps, apps.c.id == users.c.app_row)
        query = query.where(apps.c.tag == sa.bindparam("app_tag", type_=apps.c.tag.type))
    return query.select_from(source)


@functools.cache
def _others(has_copies: bool, of_app: bool) -> sa.Select[Any]:
    query = sa.select(sa.func.count()).select_from(sessions)
    query = query.where(sessions.c.base_revision != sa.literal_column(str(COLLECTION)))
    if has_copies:
        copied = sa.select(migrated.c.tag).where(migrated.c.tag == sessions.c.tag)
        query = query.where(~copied.exists())
    if of_app:
        own = sa.select(users.c.id).join(apps, apps.c.id == users.c.app_row)
        own = own.where(apps.c.tag == sa.bindparam("app_tag", type_=apps.c.tag.type))
        query = query.where(sessions.c.user_row.in_(own))
    return query
