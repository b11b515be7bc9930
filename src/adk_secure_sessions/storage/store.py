"""The operations on encrypted sessions and collections, with plaintext ids as arguments."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.formats.records import encode_text
from adk_secure_sessions.formats.states import JsonObject
from adk_secure_sessions.keys.keyring import Keyring
from adk_secure_sessions.storage.bindings import Identity, StoredSession
from adk_secure_sessions.storage.features import search_index
from adk_secure_sessions.storage.features.feature import Feature
from adk_secure_sessions.storage.features.imports import (
    AddTombstone,
    Imported,
    ImportSession,
    ImportState,
    ImportStatus,
    Seals,
    SourceEvent,
    add_tombstone_of_user,
)
from adk_secure_sessions.storage.opening import (
    EXPIRY,
    MIGRATION,
    STATE_INDEX,
    MigrationEnd,
    mark_migration,
    migration_end,
    withdraw_migration,
)
from adk_secure_sessions.storage.queries import chunks, migrated_rows, numbered
from adk_secure_sessions.storage.reads import (
    FindPage,
    GetSession,
    GetStates,
    GetStoredSession,
    GetUserState,
    ListAppSessions,
    ListPage,
    ListUserSessions,
    Lookup,
    NotIndexed,
    Page,
    Position,
    View,
)
from adk_secure_sessions.storage.schema import NEVER, apps, sessions, users
from adk_secure_sessions.storage.unit_of_work import UnitOfWork
from adk_secure_sessions.storage.writes import (
    AppendEvent,
    CreateSession,
    DeleteSession,
    DuplicateSession,
    Expected,
    NewEvent,
)

T = TypeVar("T")

SessionIds = tuple[str, str, str]  # the app name, the user id and the session id


class Store:
    """The operations on the sessions of one database.

    Every method may raise the errors of `UnitOfWork.run`.

    Args:
        unit: Runs the operations.
        create_tables: Whether the tables of features may be created.
        indexed_keys: Keys of the state that are indexed for each app to which this process writes.

    Raises:
        ConfigurationError: A key cannot be indexed.
    """

    def __init__(
        self,
        unit: UnitOfWork,
        *,
        create_tables: bool = True,
        indexed_keys: Sequence[str] = (),
    ) -> None:
        self.unit = unit
        self._expiry = Feature(unit, EXPIRY)
        self._migration = Feature(unit, MIGRATION, create_table=create_tables)
        self._index = Feature(unit, STATE_INDEX, create_table=create_tables)
        if isinstance(indexed_keys, str):
            raise ConfigurationError("indexed_state_keys must be a sequence of keys, not one text")
        self._indexed_keys = tuple(indexed_keys)
        for key in self._indexed_keys:
            search_index.check_key(key)
        # The apps whose keys were declared, and the keyring that was current then.
        self._declared: tuple[Keyring | None, set[str]] = (None, set())

    async def prepare(self) -> None:
        """Open the database now, so that the first operation does not have to open it."""
        await self.unit.keys()

    async def close(self) -> None:
        """Close the connections and discard the keys and cached sessions.

        The next call opens the database again.
        """
        await self.unit.close()

    async def create(
        self,
        app_name: str,
        user_id: str,
        session_id: str,
        app_delta: JsonObject,
        user_delta: JsonObject,
        state: bytes,
        now: int,
        lifetime: int | None = None,
    ) -> View:
        """Create a session and return it.

        *app_delta* and *user_delta* are merged into the states of the app and the user.  *state*
        is the session's state as JSON.  *now* is in microseconds UTC, and *lifetime* is in
        microseconds; None if the session does not expire.

        If an expired session with the same id is stored, it is deleted first.

        Raises DuplicateSession if the user already has a session with this id.
        """
        await self._declare_configured(app_name)
        who = await self.unit.identify(app_name, user_id, session_id)
        expires_at = NEVER
        if lifetime is not None:
            await self._expiry.ensure()
            expires_at = min(now + lifetime, NEVER - 1)
        while True:
            creation = CreateSession(who, app_delta, user_delta, state, now, expires_at)
            try:
                created = await self.unit.run(creation)
            except DuplicateSession as duplicate:
                if not duplicate.may_have_expired:
                    raise
            else:
                return View(created.session, user_id, created.app.state, created.user.state)
            if not await self.unit.run(DeleteSession(who, _has_expired)):
                raise DuplicateSession

    async def get(
        self,
        app_name: str,
        user_id: str,
        session_id: str,
        decode: Callable[[bytes, int, int], T],
        *,
        limit: int | None = None,
        after: int | None = None,
        caches: bool = False,
    ) -> tuple[View, list[T]] | None:
        """Return a session and its decoded events; None if the session is not stored.

        *decode* is called with an event's plaintext, its session's row id and its `seq`.  *limit*
        is the maximum number of events, the last ones; None for all.  If *after* (microseconds
        since 1970, UTC) is given, only events at this time or later are returned, and *limit* is
        ignored.  If *caches* is True, the events are cached: see `GetSession`.
        """
        who = await self.unit.identify(app_name, user_id, session_id)
        return await self.unit.run(GetSession(who, decode, limit, after, caches))

    async def list_user(self, app_name: str, user_id: str, *, skip: bool) -> list[View]:
        """Return all sessions of a user, without events.

        If *skip* is True, a session that cannot be decrypted is omitted, and its error is logged.
        If False, the error is raised.
        """
        who = await self.unit.identify(app_name, user_id)
        return await self.unit.run(ListUserSessions(who, skip=skip))

    async def list_app(self, app_name: str, *, skip: bool) -> list[View]:
        """Return all sessions of all users of an app, without events.

        If *skip* is True, a session that cannot be decrypted is omitted, and its error is logged.
        If False, the error is raised.
        """
        who = await self.unit.identify(app_name)
        return await self.unit.run(ListAppSessions(who, skip=skip))

    async def list_page(
        self,
        app_name: str,
        user_id: str | None,
        after: Position | None,
        *,
        limit: int,
        newest: bool,
        with_state: bool,
        skip: bool,
    ) -> Page:
        """Return at most *limit* sessions of a user, or of an app if *user_id* is None.

        `ListPage` describes the arguments.  In contrast to `ListPage`, collections and expired
        sessions do not count towards *limit*: if fewer than *limit* sessions are returned, no
        session follows.
        """
        who = await self.unit.identify(app_name, user_id or "")
        views: list[View] = []
        while True:
            operation = ListPage(
                who,
                after,
                of_app=user_id is None,
                limit=limit,
                newest=newest,
                with_state=with_state,
                skip=skip,
            )
            found, after = await self.unit.run(operation)
            views += found
            if len(views) > limit or (len(views) == limit and after is not None):
                last = views[limit - 1].session
                return Page(views[:limit], Position(last.user_row, last.id))
            if after is None:
                return Page(views, None)

    async def find(
        self,
        app_name: str,
        key: str,
        value: object,
        after: Position | None,
        *,
        limit: int,
        newest: bool,
        skip: bool,
    ) -> Page:
        """Return at most *limit* sessions of an app whose state contains *key* with *value*.

        *key* is a key of the session's state, or `user:` and a key of the user's state.  *value* is
        a JSON value, as it would be stored.  The other arguments are those of `list_page`.

        Raises:
            ConfigurationError: *key* cannot be indexed, or its index is not complete.
        """
        search_index.check_key(key)
        who = await self.unit.identify(app_name)
        lookup = Lookup((await self.unit.keys()).keyring, app_name, key, value)
        find = partial(self._find, who, after, lookup, limit=limit, newest=newest, skip=skip)
        page = await find()
        if page is None and key in self._indexed_keys:  # perhaps the app has no sessions yet
            await self._declare_configured(app_name)
            page = await find()
        if page is not None:
            return page
        raise ConfigurationError(
            f"the search index of the state key {key!r} of the app {app_name!r} is not complete: "
            "name the key in indexed_state_keys of all services, restart them, and run "
            "`adk-secure-sessions index fill`"
        )

    async def _find(
        self,
        who: Identity,
        after: Position | None,
        lookup: Lookup,
        *,
        limit: int,
        newest: bool,
        skip: bool,
    ) -> Page | None:
        """Do the same as `find`; return None if the index is not complete."""
        if not await self._index.is_added():
            return None
        views: list[View] = []
        while True:
            operation = FindPage(who, after, lookup, limit=limit, newest=newest, skip=skip)
            try:
                found, after = await self.unit.run(operation)
            except NotIndexed:
                return None
            views += filter(lookup.matches, found)
            if len(views) > limit or (len(views) == limit and after is not None):
                last = views[limit - 1].session
                return Page(views[:limit], Position(last.user_row, last.id))
            if after is None:
                return Page(views, None)

    async def declare_indexed(self, app_name: str, keys: Iterable[str]) -> frozenset[bytes]:
        """Store that *keys* of the state are indexed, and return their tags.

        From now on, this process and each process that opens the database later maintains the rows
        of these keys.  If the app has no sessions yet, it can be searched by these keys at once.

        Raises:
            ConfigurationError: A key cannot be indexed, or the table is missing and this process
                may not create it.
        """
        wanted = list(keys)
        for key in wanted:
            search_index.check_key(key)
        await self._index.ensure()
        opened = await self.unit.keys()
        keyring = opened.keyring
        tags = frozenset(keyring.index.state_key(app_name, key) for key in wanted)
        if tags:
            app_tag = keyring.index.app(app_name)
            await self.unit.change(partial(search_index.declare, keyring, app_tag, tags))
        # The keyring may have been read again, by now or before the marks were committed.
        for one in (keyring, opened.keyring):
            one.indexed_keys.update(tags)
        return tags

    async def complete_indexed(self, tags: Iterable[bytes]) -> None:
        """Store that each session or user has its rows of the keys with these *tags*."""
        keyring = (await self.unit.keys()).keyring
        await self.unit.change(partial(search_index.complete, keyring, list(tags)))

    async def _declare_configured(self, app_name: str) -> None:
        """Declare the keys that this process is configured to index, once for each app."""
        if not self._indexed_keys:
            return
        keyring = (await self.unit.keys()).keyring
        seen, declared = self._declared
        if seen is not keyring:
            declared = set()
        elif app_name in declared:
            return
        await self.declare_indexed(app_name, self._indexed_keys)
        self._declared = (keyring, {*declared, app_name})

    async def delete(
        self,
        app_name: str,
        user_id: str,
        session_id: str,
        *,
        condition: Callable[[StoredSession], bool] | None = None,
    ) -> bool:
        """Delete a session and its events, and return whether the session was deleted.

        If *condition* is given, delete the session only if *condition* returns True for it.
        """
        who = await self.unit.identify(app_name, user_id, session_id)
        return await self.unit.run(DeleteSession(who, condition))

    async def stored(self, app_name: str, user_id: str, session_id: str) -> StoredSession | None:
        """Return a session without events, even if it has expired; None if it is not stored."""
        who = await self.unit.identify(app_name, user_id, session_id)
        found = await self.unit.run(GetStoredSession(who, _item, 0))
        return found[0].session if found else None

    async def append(
        self,
        app_name: str,
        user_id: str,
        session_id: str,
        expected: Expected,
        event: NewEvent,
        stored: Callable[[StoredSession], None],
    ) -> None:
        """Append an event.

        After the commit, *stored* is called with the updated session, even if the caller was
        cancelled.

        Raises MissingSession if the session is not stored or has expired.  Raises StaleRevision if
        the row id or the revision of the stored session differs from that in *expected*.
        """
        await self._declare_configured(app_name)
        who = await self.unit.identify(app_name, user_id, session_id)
        stored(await self.unit.run(AppendEvent(who, expected, event, stored)))

    async def user_state(self, app_name: str, user_id: str) -> bytes:
        """Return the user's state as JSON; `{}` for an unknown user."""
        return await self.unit.run(GetUserState(await self.unit.identify(app_name, user_id)))

    async def states(self, app_name: str, user_id: str) -> tuple[bytes, bytes]:
        """Return the states of an app and a user as JSON; `{}` for one that is not stored."""
        return await self.unit.run(GetStates(await self.unit.identify(app_name, user_id)))

    async def prepare_imports(self) -> None:
        """Create the table `secure_migrated` and add the feature `migration`, if they are missing.

        `import_session`, `import_state` and `tombstone` do the same.

        Raises ConfigurationError if the table is missing, and this process may not create it.
        """
        await self._migration.ensure()

    async def import_session(
        self,
        app_name: str,
        user_id: str,
        session_id: str,
        *,
        state: bytes,
        events: Sequence[SourceEvent],
        created_at: int,
        updated_at: int,
        source_version: str,
        expires_at: int | None = None,
        replace: bool = False,
    ) -> ImportStatus:
        """Store a session of another database with all its events, in one transaction.

        If the rows of its app and its user are missing, they are created with empty states.  Call
        `import_state` after all sessions were imported.  Several tasks may call this method at the
        same time, which is several times as fast.

        If the session is stored already, or was deleted, the session may be left unchanged:
        `ImportStatus` lists the cases.

        Args:
            app_name: The app.
            user_id: The user.
            session_id: The session.
            state: The session's own state, as JSON that `states.encode` returns.
            events: All events, oldest first; the times are those of `Event.timestamp`.
            created_at: Microseconds UTC.
            updated_at: The session's last update, in microseconds UTC.
            source_version: A text that differs after each change of the session in the source.
            expires_at: When the session expires, in microseconds UTC; None if it does not expire.
            replace: Replace the session if it was imported before from another version, and no
                service has changed it since.

        The caller must check that the ids are within the limits of services.

        Raises:
            ValueError: A time is not possible.
            TamperedError: A row was tampered with, and nothing was changed.
        """
        await self._migration.ensure()
        await self._declare_configured(app_name)
        if expires_at is not None:
            await self._expiry.ensure()
        who = await self.unit.identify(app_name, user_id, session_id)
        seals = await self._seals()
        expiry = NEVER if expires_at is None else min(max(expires_at, 0), NEVER - 1)
        times = (created_at, updated_at, expiry)
        source = seals.source(who.session_tag, encode_text(source_version))
        operation = ImportSession(who, seals, state, events, times, source, replace=replace)
        return (await self.unit.run(operation)).result

    async def import_state(
        self, app_name: str, user_id: str | None, state: bytes, *, replace: bool = False
    ) -> ImportStatus:
        """Set the state of a user, or of an app if *user_id* is None, exactly to *state*.

        *state* is JSON that `states.encode` returns; its keys have no prefix `app:` or `user:`.  If
        the app or the user is not stored, create the row.  An empty state, as `import_session`
        creates it, is replaced even if *replace* is False.

        If *replace* is True, also replace a state that was imported before, provided that no
        service has changed the state since.  `ImportStatus` lists the cases in which the stored
        state is left unchanged.

        Raises:
            TamperedError: A row was tampered with, and nothing was changed.
        """
        await self._migration.ensure()
        await self._declare_configured(app_name)
        who = await self.unit.identify(app_name, user_id or "")
        of_user = user_id is not None
        operation = ImportState(who, await self._seals(), state, of_user=of_user, replace=replace)
        return await self.unit.run(operation)

    async def imported(self, ids: Iterable[SessionIds]) -> dict[SessionIds, Imported]:
        """Return the rows of `secure_migrated` for those of the sessions *ids* that have a row.

        These are the sessions that were imported, and those that must not be imported.  If a
        session's user was erased, the session must not be imported: the result for the session is
        then a tombstone (see `Imported.is_tombstone`).

        Raises:
            TamperedError: A row of `secure_migrated` was tampered with.
            WrongKeyError: The list of features was tampered with.
        """
        wanted = list(ids)
        if not await self._migration.is_added():
            return {}
        seals = await self._seals()
        index = seals.keyring.index
        of_users = {ids[:2]: index.user(*ids[:2]) for ids in wanted}
        erased = await self._imported(users.name, seals, of_users.values())
        tags = {ids: index.session(*ids) for ids in wanted}
        rows = await self._imported(sessions.name, seals, tags.values())
        found: dict[SessionIds, Imported] = {}
        for one, tag in tags.items():
            of_user = erased.get(of_users[one[:2]])
            if of_user and of_user.is_tombstone:
                stored = rows[tag].stored if tag in rows else None
                found[one] = replace(of_user, tag=tag, stored=stored)
            elif tag in rows:
                found[one] = rows[tag]
        return found

    async def imported_states(
        self, owners: Iterable[tuple[str, str | None]]
    ) -> dict[tuple[str, str | None], Imported]:
        """Return the rows of `secure_migrated` for those of the *owners* that have a row.

        These are the users and apps whose state was imported, and the users whose state must not be
        imported.  An element of *owners* is an app name and a user id; the user id is None for the
        state of the app.

        Raises:
            TamperedError: A row of `secure_migrated` was tampered with.
            WrongKeyError: The list of features was tampered with.
        """
        wanted = list(owners)
        if not await self._migration.is_added():
            return {}
        seals = await self._seals()
        index = seals.keyring.index
        found: dict[tuple[str, str | None], Imported] = {}
        for table in (apps, users):
            tags = {
                (app, user): index.app(app) if user is None else index.user(app, user)
                for app, user in wanted
                if (user is None) is (table is apps)
            }
            rows = await self._imported(table.name, seals, tags.values())
            found |= {owner: rows[tag] for owner, tag in tags.items() if tag in rows}
        return found

    async def tombstone(self, app_name: str, user_id: str, session_id: str | None = None) -> None:
        """Store a tombstone: a row that forbids importing the session.

        If *session_id* is None, the tombstone forbids importing the user's state and all sessions
        of the user.

        Call this before deleting the session, or the user's rows.  Otherwise, an import could
        restore them.  After this call for a user, every running import of the user has either been
        committed, or stores nothing.
        """
        await self._migration.ensure()
        who = await self.unit.identify(app_name, user_id, session_id or "")
        seals = await self._seals()
        if session_id is not None:
            await self.unit.run(AddTombstone(who, seals))
            return
        await self.unit.change(partial(add_tombstone_of_user, seals.tombstone(who.user_tag)))

    async def has_imports(self) -> bool:
        """Return whether the database has the feature `migration`, which the first import adds.

        Raises:
            WrongKeyError: The list of features was tampered with.
        """
        return await self._migration.is_added()

    async def complete_migration(self) -> None:
        """Store the mark that everything was imported; see `migration_is_complete`."""
        await self._migration.ensure()
        keyring = (await self.unit.keys()).keyring
        await self.unit.change_keys(partial(mark_migration, MigrationEnd.COMPLETE, keyring))

    async def withdraw_migration(self) -> bool:
        """Remove the mark that `complete_migration` has stored; return whether there was one.

        A mark that `mark_source_erased` has stored is not removed.
        """
        keyring = (await self.unit.keys()).keyring
        if await self._migration_end() is not MigrationEnd.COMPLETE:
            return False  # do not begin to write: the account may only be able to read
        return await self.unit.change_keys(partial(withdraw_migration, keyring))

    async def mark_source_erased(self) -> None:
        """Store the mark that sessions of the source may have been deleted after their import.

        Without this mark, a later migration from the same source could replace or delete the only
        copies of these sessions.  The mark is never removed again.
        """
        await self._migration.ensure()
        keyring = (await self.unit.keys()).keyring
        await self.unit.change_keys(partial(mark_migration, MigrationEnd.SOURCE_ERASED, keyring))

    async def source_is_erased(self) -> bool:
        """Return whether `mark_source_erased` was called for this database.

        Raises:
            WrongKeyError: The mark was tampered with.
        """
        return await self._migration_end() is MigrationEnd.SOURCE_ERASED

    async def migration_is_complete(self) -> bool:
        """Return whether a mark of `complete_migration` or of `mark_source_erased` is stored.

        Raises:
            WrongKeyError: The mark was tampered with.
        """
        return await self._migration_end() is not None

    async def _migration_end(self) -> MigrationEnd | None:
        keyring = (await self.unit.keys()).keyring
        return await self.unit.change_keys(partial(migration_end, keyring), commit=False)

    async def _seals(self) -> Seals:
        return Seals((await self.unit.keys()).keyring)

    async def _imported(
        self, table: str, seals: Seals, tags: Iterable[bytes]
    ) -> dict[bytes, Imported]:
        found: dict[bytes, Imported] = {}
        for part in chunks(dict.fromkeys(tags)):
            for row in await self.unit.read(migrated_rows(table, len(part)), numbered(part)):
                one = seals.imported(row)
                found[one.tag] = one
        return found


def _has_expired(session: StoredSession) -> bool:
    return session.has_expired


def _item(plaintext: bytes, _row: int, _seq: int) -> bytes:
    return plaintext
