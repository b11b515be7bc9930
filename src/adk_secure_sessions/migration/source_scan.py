"""The sessions and states of a source, each with its status in the target."""

import functools
import secrets
from array import array
from bisect import bisect_left
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Generic, NamedTuple, TypeVar

import sqlalchemy as sa

from adk_secure_sessions.errors import DecryptionError
from adk_secure_sessions.formats.records import encode_text
from adk_secure_sessions.formats.times import time_now
from adk_secure_sessions.keys.blind_index import IndexMaster
from adk_secure_sessions.maintenance import Database
from adk_secure_sessions.maintenance.row_scan import sessions_in_rows
from adk_secure_sessions.migration.sources import (
    Ids,
    ListedSession,
    Selection,
    SessionContent,
    Source,
    States,
    Unreadable,
    UnreadableIds,
)
from adk_secure_sessions.storage.features.imports import ImportStatus
from adk_secure_sessions.storage.schema import MigratedRow, apps, migrated, sessions, users
from adk_secure_sessions.storage.table_walk import pages, rows_where

C = TypeVar("C")

CONFLICT_REASONS = {
    ImportStatus.CONFLICT: "both sides have changed or deleted it since it was copied",
    ImportStatus.SAME_ID: "the target has one with the same ids that was not copied",
}
GONE_REASON = "it was copied before, and this source does not have it"


@dataclass(frozen=True, slots=True)
class SourceEntry(Generic[C]):
    """A session of the source, or the state of a user or an app, and its status in the target.

    *tag* is empty if the target has no keys, or if the ids cannot be decrypted.
    """

    ids: Ids
    content: C
    tag: bytes = b""
    status: ImportStatus = ImportStatus.NEW


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEntry(SourceEntry[SessionContent | Unreadable | None]):
    """A session; *content* is None if it was not read."""

    session: ListedSession
    copied_event_count: int = 0  # of the earlier copy


StateEntry = SourceEntry[bytes | Unreadable]  # *content* is JSON


class GoneCopy(NamedTuple):
    """A copied session that the source no longer lists, and the reason to report it.

    If the target cannot decrypt its ids, *migrated_row* is None, and the table and row take the
    place of the session id.
    """

    ids: tuple[str, str, str]
    tag: bytes
    reason: str
    migrated_row: MigratedRow | None = None


@dataclass(repr=False, eq=False)
class SourceScan:
    """Yields the sessions of a source, its states, and what has changed in it during the scan.

    *index_master* computes the blind indexes of the target; if it is None, the target has no keys
    yet, and everything is new.  Only sessions with a status in *statuses_to_read* are read.

    The status of many sessions and states is found with few queries.  The queries read the
    revisions of sessions and the versions of states, but decrypt no rows.  The methods of `Imports`
    that write check the revisions and versions again.
    """

    source: Source
    target: Database
    index_master: IndexMaster | None
    selection: Selection
    statuses_to_read: Collection[ImportStatus] = tuple(ImportStatus)

    def __post_init__(self) -> None:
        # The versions that the caller has processed.  A version that was listed, but had no content
        # when it was read, is none of them: a replica that lagged behind may list it again.
        self.processed_versions: DigestSet = DigestSet()
        self._tags = DigestSet()  # of the sessions that were listed first
        # The apps whose copies may be gone.  The copies of other apps are those of another source.
        self._app_names = {self.selection.app_name} - {None}
        # Whether a session was listed whose ids cannot be decrypted: any copy may be its copy.
        self.has_unreadable_ids: bool = False

    def tag(self, ids: Ids) -> bytes:
        """Return the blind index; empty for `UnreadableIds`, or if the target has no keys."""
        if self.index_master is None or isinstance(ids, UnreadableIds):
            return b""
        return self.index_master.tag_of(*ids)

    async def sessions(self) -> AsyncIterator[Sequence[SessionEntry]]:
        """Yield the sessions in batches, without those that the source deleted meanwhile."""
        async for batch in self._list_sessions():
            entries = await self._session_entries(batch)
            for entry in entries:
                self._tags.add((entry.tag,))
            yield [entry for entry in entries if entry.status not in self.statuses_to_read]
            due = [entry for entry in entries if entry.status in self.statuses_to_read]
            yield await self._with_contents(due)

    async def _list_sessions(self) -> AsyncIterator[Sequence[ListedSession]]:
        async for batch in self.source.sessions(self.selection):
            self.has_unreadable_ids |= any(session.reason for session in batch)
            self._app_names.update(session.app_name for session in batch)
            yield batch

    async def read_again(
        self, entry: SessionEntry | StateEntry
    ) -> SessionEntry | StateEntry | None:
        """Return *entry* with its present status in the target.

        The content of a session is also read again: return None if the source has deleted it.
        """
        if not isinstance(entry, SessionEntry):
            return (await self._state_entries({entry.ids: entry.content}))[0]
        entries = await self._with_contents(await self._session_entries([entry.session]))
        return entries[0] if entries else None

    async def states(self) -> AsyncIterator[Sequence[StateEntry]]:
        """Yield the states of users, and then those of apps, in batches."""
        async for batch in self.source.states(self.selection):
            self._app_names.update(ids[0] for ids in batch)
            yield await self._state_entries(batch)

    async def rescan(self) -> AsyncIterator[ListedSession | GoneCopy]:
        """List the source again; yield the sessions that are new or changed, then the gone copies.

        A copy is gone if the source no longer lists its session.  Only copies of apps that the
        source has now count.  If it has none and reads all apps, the copies of every app count, and
        the caller decides whether it is the wrong source.  Copies that were continued or have
        expired are left out: the source may not list an expired session.  No copy is yielded with
        `since`, after a comparison has ended the migration, or if ids of the source cannot be
        decrypted.
        """
        unseen_copies = await self._unseen_copies()
        async for batch in self._list_sessions():
            for session in batch:
                if unseen_copies:
                    unseen_copies.pop(self.tag(session.ids), None)
                if session not in self.processed_versions:
                    yield session
        has_apps = bool(self._app_names)
        if self.has_unreadable_ids or not (has_apps or self.source.has_all_apps):
            return
        copies, size = list(unseen_copies.items()), self.target.limits.rows_per_statement
        for start in range(0, len(copies), size):
            tags = {row: tag for tag, row in copies[start : start + size]}
            decrypted_ids = []
            for scanned in await sessions_in_rows(self.target, tags):
                tag, ids = tags[scanned.id], scanned.ids_or_error
                if isinstance(ids, DecryptionError):
                    name = f"{sessions.name} row {scanned.id}"
                    yield GoneCopy(("", "", name), tag, undecryptable_reason(ids))
                    continue
                has_expired = scanned.row.expires_at <= time_now()
                is_of_another_app = has_apps and ids.app_name not in self._app_names
                if scanned.row.tag == tag and not has_expired and not is_of_another_app:
                    decrypted_ids.append(ids)
            for ids, copy in (await self.target.imports.rows_for(decrypted_ids)).items():
                if copy.is_untouched:
                    yield GoneCopy(ids, copy.row.tag, GONE_REASON, copy.row)

    async def _unseen_copies(self) -> dict[bytes, int]:
        """Return the row ids, which are unauthenticated, of the copies that were not listed."""
        copies: dict[bytes, int] = {}
        target, app_name = self.target, self.selection.app_name
        if self.index_master is None or self.selection.since is not None:
            return copies
        if await target.imports.migration_mark() or not await target.imports.feature.is_added():
            return copies
        parameters = {} if app_name is None else {"app_tag": self.tag((app_name,))}
        query, size = _select_copies(app_name is not None), target.limits.ids_per_statement
        read, key = target.runner.data_db.read, migrated.c.tag
        async for rows in pages(read, query, key, size, lambda *row: row, **parameters):
            for tag, row in rows:
                key_tag = tag if isinstance(tag, bytes) else b""  # a modified tag: any type
                if (key_tag,) not in self._tags:
                    copies[key_tag] = row
        return copies

    async def _session_entries(self, batch: Sequence[ListedSession]) -> list[SessionEntry]:
        if self.index_master is None:
            return [SessionEntry(session.ids, None, session=session) for session in batch]
        tags = {session: self.tag(session.ids) for session in batch}
        # Read these before the copies: one transaction stores a copy and its row.
        read, wanted = self.target.runner.data_db.read, filter(None, tags.values())
        stored_tags = {tag for (tag,) in await rows_where(read, _TAGS, sessions.c.tag, wanted)}
        known_ids = (session.ids for session in batch if not session.reason)
        copies = await self.target.imports.rows_for(known_ids)
        entries: list[SessionEntry] = []
        for session, tag in tags.items():
            status, number = ImportStatus.SAME_ID if tag in stored_tags else ImportStatus.NEW, 0
            if copy := copies.get(session.ids):
                status = copy.status(is_unchanged=copy.has_source(session.etag))
                number = copy.row.number
            entry = SessionEntry(
                session.ids, None, tag, status, session=session, copied_event_count=number
            )
            entries.append(entry)
        return entries

    async def _state_entries(self, states: States) -> list[StateEntry]:
        copies = await self.target.imports.rows_for(states) if self.index_master else {}
        entries: list[StateEntry] = []
        for ids, state in states.items():
            status = ImportStatus.NEW
            if copy := copies.get(ids):
                is_unchanged = isinstance(state, bytes) and copy.has_state(state)
                status = copy.status(is_unchanged=is_unchanged)
            entries.append(SourceEntry(ids, state, self.tag(ids), status))
        return entries

    async def _with_contents(self, entries: Sequence[SessionEntry]) -> list[SessionEntry]:
        contents = await self.source.read([entry.session for entry in entries])
        pairs = ((entry, contents.get(entry.session)) for entry in entries)
        return [replace(entry, content=content) for entry, content in pairs if content is not None]


_TAGS = sa.select(sessions.c.tag)


@functools.cache
def _select_copies(of_app: bool) -> sa.Select[Any]:
    """Select the tag and the row id of each copied session that is still stored."""
    source = migrated.join(
        sessions, sa.and_(sessions.c.id == migrated.c.row_id, sessions.c.tag == migrated.c.tag)
    )
    query = sa.select(migrated.c.tag, migrated.c.row_id)
    if of_app:
        source = source.join(users, users.c.id == sessions.c.user_row)
        source = source.join(apps, apps.c.id == users.c.app_row)
        query = query.where(apps.c.tag == sa.bindparam("app_tag", type_=apps.c.tag.type))
    return query.select_from(source)


def undecryptable_reason(error: DecryptionError) -> str:
    return f"the target cannot decrypt it: {error}"


class DigestSet:
    """A set of tuples of texts or bytes, each of which takes 8 bytes: a hash with a random key.

    Another tuple is wrongly found in it with a probability of 2^-64 for each element.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(16)
        self._numbers = array("Q")
        self._is_sorted = True

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, element: tuple[str | bytes, ...]) -> None:
        self._numbers.append(self._number(element))
        self._is_sorted = False

    def __contains__(self, element: tuple[str | bytes, ...]) -> bool:
        if not self._is_sorted:
            self._numbers = array("Q", sorted(self._numbers))
            self._is_sorted = True
        number = self._number(element)
        at = bisect_left(self._numbers, number)
        return at < len(self._numbers) and self._numbers[at] == number

    def _number(self, element: tuple[str | bytes, ...]) -> int:
        digest = blake2b(key=self._key, digest_size=8)
        for part in element:
            data = part if isinstance(part, bytes) else encode_text(part)
            digest.update(len(data).to_bytes(8, "big") + data)
        return int.from_bytes(digest.digest(), "big")
