"""Sessions in an encrypted database, in terms of ids and JSON."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

from adk_secure_sessions.backends.registry import Backends
from adk_secure_sessions.db.protocol import Executors, T
from adk_secure_sessions.db.retries import repeated
from adk_secure_sessions.errors import DecryptionError
from adk_secure_sessions.formats.states import JsonObject
from adk_secure_sessions.keys.data_keys import DataKeys
from adk_secure_sessions.keys.keyring import Keyring
from adk_secure_sessions.loops import LoopLocks
from adk_secure_sessions.lru import Lru
from adk_secure_sessions.storage import bindings as seals
from adk_secure_sessions.storage import queries as sql
from adk_secure_sessions.storage import writes as transactions
from adk_secure_sessions.storage.owner_keys import keys_of
from adk_secure_sessions.storage.reads import View, is_skipped, listed, view_of
from adk_secure_sessions.storage.rows import (
    NO_BASE,
    Context,
    Found,
    Identity,
    Memo,
    StoredSession,
    identify,
)
from adk_secure_sessions.storage.unit_of_work import Attempts
from adk_secure_sessions.storage.writes import Expected, NewEvent, Sent

_CHUNK = 64  # events decoded before other tasks get their turn


class _Opened(NamedTuple):
    attempts: Attempts
    identities: Lru[tuple[str, str, str], Identity]
    sessions: Lru[bytes, StoredSession]


class Store:
    """One database, opened when it is first used."""

    def __init__(
        self,
        executors: Executors,
        backends: Backends,
        open_keyring: Callable[[Keyring | None], Awaitable[Keyring]],
        *,
        session_cache_size: int,
        data_key_cache_size: int,
    ) -> None:
        self._executors = executors
        self._backends = backends
        self._open_keyring = open_keyring
        self._session_cache_size = session_cache_size
        self._data_key_cache_size = data_key_cache_size
        self._state: _Opened | None = None
        self._locks = LoopLocks()

    async def prepare(self) -> None:
        """Open the database, once; what may go wrong is what *open_keyring* raises."""
        await self._opened()

    async def close(self) -> None:
        """Release the connections and forget the keys; the next call opens again."""
        self._state = None
        await self._executors.close()

    async def create(
        self,
        app_name: str,
        user_id: str,
        session_id: str,
        app_delta: JsonObject,
        user_delta: JsonObject,
        state: bytes,
        now: int,
    ) -> View:
        """Raises transactions.DuplicateSession."""
        who = await self._identify(app_name, user_id, session_id)
        sent = Sent()

        async def attempt(context: Context, first: bool) -> transactions.Created:
            return await self._executors.data.write(
                partial(
                    transactions.create_session,
                    context=context,
                    trusting=first,
                    app_delta=app_delta,
                    user_delta=user_delta,
                    state=state,
                    now=now,
                    sent=sent,
                )
            )

        created = await self._attempt(who, attempt, writes=True)
        await self._remember(who, created.session)
        return View(created.session, user_id, created.app.state, created.user.state)

    async def get(
        self,
        app_name: str,
        user_id: str,
        session_id: str,
        decode: Callable[[bytes, int, int], T],
        *,
        limit: int | None = None,
        after: int | None = None,
    ) -> tuple[View, list[T]] | None:
        """The session with its last *limit* events, or those of time *after* or later.

        Events that *after* leaves out are authenticated all the same: their times are not
        to be believed before.
        """
        who = await self._identify(app_name, user_id, session_id)
        query = sql.SESSION_WITH_ALL_EVENTS
        if after is None and limit is not None:
            query = sql.SESSION_WITH_LAST_EVENTS if limit else sql.SESSION_WITHOUT_EVENTS
        wanted = limit if after is None else None
        parameters = {**who.tags(), "limit": limit or 0}

        async def attempt(context: Context, first: bool) -> tuple[View, list[T]] | None:
            found = await self._read(context, query, parameters)
            app = seals.open_app(context, found)
            user = seals.open_user(context, found)
            session = seals.open_session(context, found, user)
            if session is None or user is None:
                return None
            seals.check_events(session, found.events, wanted)
            events: list[T] = []
            for start in range(0, len(found.events), _CHUNK):
                if start:
                    await asyncio.sleep(0)
                rows = found.events[start : start + _CHUNK]
                # First all of one kind of work, then all of the other: half as fast in turn.
                opened = seals.open_events(context, session, rows)
                events += [
                    decode(plaintext, session.id, row[1])
                    for row, plaintext in zip(rows, opened, strict=True)
                    if after is None or row[2] >= after
                ]
            return view_of(session, user, app), events

        result = await self._attempt(who, attempt)
        if result is not None:
            await self._remember(who, result[0].session)
        return result

    async def list_user(self, app_name: str, user_id: str, *, skip: bool) -> list[View]:
        """All sessions of a user; *skip* logs and leaves out those that cannot be opened."""
        who = await self._identify(app_name, user_id)

        async def attempt(context: Context, first: bool) -> list[View]:
            found = await self._read(context, sql.SESSIONS_OF_USER, who.tags())
            app = seals.open_app(context, found)
            try:
                user = seals.open_user(context, found)
            except DecryptionError as error:
                if not is_skipped(error, skip=skip):
                    raise
                return []
            return listed(context, found, app, [user] if user else [], skip=skip)

        return await self._attempt(who, attempt, always_with_keys=skip)

    async def list_app(self, app_name: str, *, skip: bool) -> list[View]:
        """The same for all users of an app."""
        who = await self._identify(app_name)

        async def attempt(context: Context, first: bool) -> list[View]:
            found = await self._read(context, sql.SESSIONS_OF_APP, {"app_tag": who.app_tag})
            if context.keys_apart:
                owners = [row[8] for row in found.users]
                context.keys.load(await keys_of(self._executors.keys.read, owners))
            app = seals.open_app(context, found)
            users = []
            for row in found.users:
                try:
                    users.append(seals.open_user_row(context, found, row))
                except DecryptionError as error:
                    if not is_skipped(error, skip=skip):
                        raise
            return listed(context, found, app, users, skip=skip)

        return await self._attempt(who, attempt, always_with_keys=True)

    async def delete(
        self, app_name: str, user_id: str, session_id: str, *, before: int | None = None
    ) -> bool:
        """Delete a session and its events; whether there was one, last updated *before* then."""
        who = await self._identify(app_name, user_id, session_id)
        opened = await self._opened()
        known = opened.sessions.get(who.session_tag) if before is None else None

        async def attempt(context: Context, first: bool) -> bool:
            return await self._executors.data.write(
                partial(
                    transactions.delete_session,
                    context=context,
                    known=known if first else None,
                    before=before,
                )
            )

        deleted = await self._attempt(who, attempt, writes=True)
        opened.sessions.drop(who.session_tag)
        return deleted

    async def append(
        self,
        app_name: str,
        user_id: str,
        session_id: str,
        expected: Expected,
        event: NewEvent,
        appended: Callable[[StoredSession], None],
    ) -> None:
        """Store an event; *appended* is called once it is, even if the caller is cancelled.

        Raises transactions.MissingSession and transactions.StaleRevision.
        """
        who = await self._identify(app_name, user_id, session_id)
        opened = await self._opened()
        known = opened.sessions.get(who.session_tag)
        if known is not None and (known.id, known.revision) != expected:
            known = None
        sent = Sent()

        def done(updated: StoredSession) -> None:
            opened.sessions.put(who.session_tag, updated)
            appended(updated)

        async def attempt(context: Context, first: bool) -> StoredSession:
            return await self._executors.data.write(
                partial(
                    transactions.append_event,
                    context=context,
                    known=known if first else None,
                    expected=expected,
                    event=event,
                    sent=sent,
                ),
                late=done,
            )

        done(await self._attempt(who, attempt, writes=True))

    async def user_state(self, app_name: str, user_id: str) -> bytes:
        """The user's state as JSON; `{}` for an unknown user."""
        who = await self._identify(app_name, user_id)

        async def attempt(context: Context, first: bool) -> bytes:
            found = await self._read(context, sql.OWNERS, who.tags())
            user = seals.open_user(context, found)
            return user.state if user else b"{}"

        return await self._attempt(who, attempt)

    async def _opened(self) -> _Opened:
        if self._state is None:
            async with self._locks.hold("open"):
                if self._state is None:
                    keyring = await self._keyring()
                    by_id, writer_id = self._backends.by_id, self._backends.writer.backend_id
                    keys = DataKeys(keyring, by_id, writer_id, self._data_key_cache_size)
                    size = self._session_cache_size
                    attempts = Attempts(self._executors, keys, Memo(size), self._keyring)
                    self._state = _Opened(attempts, Lru(size), Lru(size))
        return self._state

    async def _keyring(self, known: Keyring | None = None) -> Keyring:
        return await repeated(lambda first: self._open_keyring(known))

    async def _identify(self, app_name: str, user_id: str = "", session_id: str = "") -> Identity:
        opened = self._state or await self._opened()
        name = (app_name, user_id, session_id)
        who = opened.identities.get(name)
        if who is None:
            who = identify(opened.attempts.keys.keyring.index, *name)
            opened.identities.put(name, who)
        return who

    async def _remember(self, who: Identity, session: StoredSession) -> None:
        opened = await self._opened()
        if session.base_revision != NO_BASE:  # which may be large
            session = session._replace(base=None)
        elif opened.sessions.get(who.session_tag) is session:
            return
        opened.sessions.put(who.session_tag, session)

    async def _read(
        self, context: Context, forms: sql.Forms, parameters: dict[str, object]
    ) -> Found:
        found = Found(await self._executors.data.read(context.form_of(forms), parameters))
        context.keys.load(found.keys)
        return found

    async def _attempt(
        self,
        who: Identity,
        run: Callable[[Context, bool], Awaitable[T]],
        *,
        always_with_keys: bool = False,
        writes: bool = False,
    ) -> T:
        opened = self._state or await self._opened()
        return await opened.attempts.run(who, run, always_with_keys=always_with_keys, writes=writes)
