"""`EncryptedSessionWrapper`, which encrypts what another session service stores.

The wrapper calls the inner service, *inner*, like any session service, with these replacements
(docs/format.md, "Records in another session service"):

- A state key becomes its prefix and a blind index.  A state value becomes a record in base64.
- An event becomes an event with the same id, invocation id, author and time.  Its content is one
  text: the record of the whole event, in base64.  Its state delta has encrypted entries, because
  *inner* applies the delta to the stored states.

The data keys are in the key database of the wrapper: a database of this package without sessions.
"""

import asyncio
import base64
import inspect
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import sqlalchemy as sa
from google.adk.errors.session_not_found_error import SessionNotFoundError
from google.adk.events import Event, EventActions
from google.adk.platform import uuid as platform_uuid
from google.adk.sessions import BaseSessionService, Session
from google.adk.sessions.base_session_service import GetSessionConfig, ListSessionsResponse
from google.genai import types
from sqlalchemy.ext.asyncio import AsyncEngine

from adk_secure_sessions.audit import Audit, AuditedCall, audited_access, record_rejected
from adk_secure_sessions.backends import EncryptionBackend
from adk_secure_sessions.backends.registry import check_backends
from adk_secure_sessions.caches import Caches
from adk_secure_sessions.concurrency import ClosedByWith, LoopLocks
from adk_secure_sessions.db.connect import executors_for
from adk_secure_sessions.errors import (
    ConfigurationError,
    DecryptionError,
    PlaintextRefusedError,
    Reason,
    TamperedError,
)
from adk_secure_sessions.formats import events, json_text, records
from adk_secure_sessions.formats.json_text import JsonObject, Scopes
from adk_secure_sessions.formats.records import Packing
from adk_secure_sessions.hiding import HoldsSecrets, hides_locals
from adk_secure_sessions.keys.blind_index import IndexMaster
from adk_secure_sessions.keys.data_keys import TransactionKeys
from adk_secure_sessions.service import (
    STALE_TEXT,
    StaleSessionError,
    check_ids,
    reject_unknown_methods,
)
from adk_secure_sessions.storage import key_operations
from adk_secure_sessions.storage.feature_list import Feature
from adk_secure_sessions.storage.features.audit_trail import auditing_for
from adk_secure_sessions.storage.opening import open_database
from adk_secure_sessions.storage.operation_runner import OperationRunner
from adk_secure_sessions.storage.schema import Identity
from adk_secure_sessions.storage.survey import FeatureName
from adk_secure_sessions.telemetry import measured

T = TypeVar("T")

logger: logging.Logger = logging.getLogger(__name__)

# In error messages, one of these texts stands for the table of a rejected value.
EVENTS, STATES = "inner events", "inner states"

_ID_FIELDS = ("id", "invocation_id", "author")  # of an event, for the inner service
_CHUNK = 64  # events to decrypt before other tasks may run
_STORED_KEY = re.compile("[0-9a-f]{32}")  # a state key in the inner service, without its prefix
_NO_EVENTS = GetSessionConfig(num_recent_events=0)
# Seconds by which the inner service may round the time of an event.
_TIME_TOLERANCE = 0.001


@hides_locals
class EncryptedSessionWrapper(HoldsSecrets, ClosedByWith, BaseSessionService):
    """Encrypts sessions before another session service of ADK stores them.

    State values, and the contents, actions and metadata of events, are encrypted.  App names, user
    ids, session ids, event ids, invocation ids, authors and times reach the inner service as
    plaintext.  Use `EncryptedSessionService` if you can choose the database: an attacker with write
    access to the store of another service can remove, reorder and replay events, and the wrapper
    cannot notice it (docs/wrapper.md).

    The first operation opens the key database and creates its tables, like
    `EncryptedSessionService`.  Every operation raises `DecryptionError` if a value that it reads
    was modified or moved, or is plaintext, or if its data key was erased.  Exception: if an entry
    of a user's state names a data key that does not exist, as after an erasure, the entry is
    omitted, with a warning.  The errors of the inner service are not changed, and may contain ids.

    Args:
        inner: The service that stores the sessions, such as `VertexAiSessionService`.
        backend: The backend that encrypts all new records.
        key_db_url: A database URL such as `sqlite+aiosqlite:///keys.db`.  The database has the data
            keys of apps and users.  Without this database, nothing can be decrypted.
        additional_backends: Other backends whose records may be read.
        key_db_engine: Your own SQLAlchemy `AsyncEngine`, instead of `key_db_url`.
        create_tables: Create missing tables in the key database.
        skip_unreadable_sessions: If True, `list_sessions` omits a session that cannot be
            decrypted, and logs the error.  If False, `list_sessions` raises `DecryptionError`.
        cache: How many data keys are cached, and for how long.
        audit: How each access is recorded in the audit log; None for no such records.  The records
            cannot be stored in a table.
        packing: How new values are compressed and padded before they are encrypted.

    Raises:
        ConfigurationError: An argument cannot be used as given.
    """

    def __init__(
        self,
        inner: BaseSessionService,
        backend: EncryptionBackend,
        *,
        key_db_url: str | sa.URL | None = None,
        additional_backends: Sequence[EncryptionBackend] = (),
        key_db_engine: AsyncEngine | None = None,
        create_tables: bool = True,
        skip_unreadable_sessions: bool = False,
        cache: Caches = Caches(),
        audit: Audit | None = None,
        packing: Packing = Packing(),
    ) -> None:
        if not isinstance(inner, BaseSessionService):
            raise ConfigurationError(
                f"inner must be a session service of ADK, not {type(inner).__name__}"
            )
        if (key_db_url is None) == (key_db_engine is None):
            raise ConfigurationError(
                "give exactly one of key_db_url and key_db_engine: the keys of the sessions that "
                "the inner service stores need a database"
            )
        backends = check_backends(backend, additional_backends)
        if audit is not None and audit.table:
            raise ConfigurationError("the wrapper cannot store audit records in a table")
        executors = executors_for(key_db_url, key_db_engine, read_timeout=60.0)
        self._inner = inner
        self._runner = OperationRunner(
            executors,
            backends,
            partial(open_database, executors, backends, create_tables),
            cache_sizes=cache,
            packing=packing,
            creates_tables=create_tables,
        )
        self._skips_unreadable = skip_unreadable_sessions
        # A change is stored by the inner service, so no transaction could also store its record.
        self._auditing = auditing_for(self._runner, audit)
        self._feature = Feature(self._runner, FeatureName.WRAPPER)
        self._locks = LoopLocks()

    @property
    def stores_plaintext(self) -> bool:
        """True if states and events are stored as plaintext: the backend is a `NoOpBackend`."""
        return self._runner.backends.stores_plaintext

    @measured
    async def prepare_tables(self) -> None:
        """Open the key database and create its tables; let the inner service do the same.

        Raises the errors of `EncryptedSessionService.prepare_tables`.
        """
        await AuditedCall(None).run(self._runner.keyring)
        await _call_if_defined(self._inner, "prepare_tables")

    @audited_access("session.create")
    async def create_session(
        self,
        *,
        app_name: str,
        user_id: str,
        state: dict[str, Any] | None = None,
        session_id: str | None = None,
    ) -> Session:
        """Store a new session; see `EncryptedSessionService.create_session`.

        If *session_id* is None and *state* has keys without the prefix `app:`, `user:` or `temp:`,
        the id is `s-` and a new UUID.  The inner service cannot choose the id, because the
        encrypted values are bound to it.

        Raises:
            ValueError: An id is not a string, is too long, or begins or ends with spaces, which
                some services remove.  Or a key or a value in *state* exceeds a limit.
            ConfigurationError: The inner service stores the session under another id.  The session
                was then deleted.
        """
        check_ids(app_name, user_id, session_id or "")
        scopes = json_text.convert_scopes(state)
        if session_id is not None and (session_id != session_id.strip() or not session_id):
            raise ValueError("session_id must not be empty, nor begin or end with spaces")
        if session_id is None and scopes.session:
            session_id = f"s-{platform_uuid.new_uuid()}"
        cipher = await self._fresh_cipher(app_name, user_id, session_id or "")
        encrypted = cipher.encrypt_states(scopes)
        stored = await self._inner.create_session(
            app_name=app_name, user_id=user_id, state=encrypted or None, session_id=session_id
        )
        if session_id is not None and stored.id != session_id:
            await self._inner.delete_session(
                app_name=app_name, user_id=user_id, session_id=stored.id
            )
            raise ConfigurationError(
                f"{type(self._inner).__name__} stores the session under another id: use an id that "
                "it accepts, or give none"
            )
        identity = await self._runner.identify(app_name, user_id, stored.id)
        return await self._read(identity, lambda cipher: cipher.decrypt_session(stored))

    @audited_access("session.read")
    async def get_session(
        self,
        *,
        app_name: str,
        user_id: str,
        session_id: str,
        config: GetSessionConfig | None = None,
    ) -> Session | None:
        """Read a session with its events; see `EncryptedSessionService.get_session`.

        The order of the events is that of the inner service.

        Raises:
            DecryptionError: A value was modified, moved or stored twice, or its key was erased.
            ConfigurationError: The installed google-adk cannot parse an event that a newer
                google-adk stored.
        """
        check_ids(app_name, user_id, session_id)
        if session_id != session_id.strip():
            # No session has an id with spaces around it.  But some services remove the spaces, and
            # would return another session.
            return None
        stored = await self._inner.get_session(
            app_name=app_name, user_id=user_id, session_id=session_id, config=config
        )
        if stored is None:
            return None
        identity = await self._runner.identify(app_name, user_id, session_id)
        return await self._read(identity, lambda cipher: cipher.decrypt_session(stored, config))

    @audited_access("sessions.list")
    async def list_sessions(
        self, *, app_name: str, user_id: str | None = None
    ) -> ListSessionsResponse:
        """List sessions without events; see `EncryptedSessionService.list_sessions`.

        Raises:
            DecryptionError: A session cannot be decrypted, and `skip_unreadable_sessions` is
                False.
        """
        check_ids(app_name, user_id or "")
        response = await self._inner.list_sessions(app_name=app_name, user_id=user_id)
        listed: list[Session] = []
        for stored in response.sessions:
            owner = stored.user_id if user_id is None else user_id
            identity = await self._runner.identify(app_name, owner, stored.id)
            try:
                work = partial(_SessionCipher.decrypt_session, stored=stored, config=_NO_EVENTS)
                listed.append(await self._read(identity, work))
            except DecryptionError as error:
                if not self._skips_unreadable:
                    raise
                record_rejected(error)
                logger.error("left out of a listing: %s", error)
        return ListSessionsResponse(sessions=listed)

    @audited_access("session.delete")
    async def delete_session(self, *, app_name: str, user_id: str, session_id: str) -> None:
        """Let the inner service delete a session; nothing is decrypted.

        If *session_id* begins or ends with spaces, do nothing: no session has such an id, and some
        services remove the spaces, and would delete another session.
        """
        check_ids(app_name, user_id, session_id)
        if session_id == session_id.strip():
            await self._inner.delete_session(
                app_name=app_name, user_id=user_id, session_id=session_id
            )

    @audited_access("user.read")
    async def get_user_state(self, *, app_name: str, user_id: str) -> dict[str, Any]:
        """Return the user's state, whose keys have no prefix.

        Raises:
            NotImplementedError: The inner service does not implement this method.
            DecryptionError: A value was modified or moved, and its data key is known.
        """
        check_ids(app_name, user_id)
        method = getattr(self._inner, "get_user_state", None)
        if method is None:
            raise NotImplementedError(f"{type(self._inner).__name__} has no get_user_state")
        stored = await method(app_name=app_name, user_id=user_id)
        identity = await self._runner.identify(app_name, user_id)
        return await self._read(identity, lambda cipher: cipher.decrypt_scope(cipher.user, stored))

    @audited_access("session.write")
    async def append_event(self, session: Session, event: Event) -> Event:
        """Store `event`, then apply it to `session`; see `EncryptedSessionService.append_event`.

        If the session object is older than the stored session, the inner service decides whether to
        reject the event.

        Raises:
            SessionNotFoundError: The session is not stored.
            StaleSessionError: The inner service found the session object stale, or the object was
                rebuilt and its last event is not the last stored one.
            ValueError: See `EncryptedSessionService.append_event`.
        """
        if event.partial:
            return event
        events.set_id_and_move_temp(event, session.state)
        ids = _ids_of(session)
        check_ids(*ids)
        # Parallel agents may append to the same session object: make them take turns.
        async with self._locks.lock(ids):
            await self._append(session, event)
        return event

    async def _append(self, session: Session, event: Event) -> None:
        delta = json_text.convert_scopes(event.actions.state_delta)
        events.microseconds(event.timestamp)  # raises ValueError if it is not a possible time
        if not all(isinstance(getattr(event, name), str) for name in _ID_FIELDS):
            raise ValueError("id, invocation_id and author of an event must be strings")
        plaintext = events.encode(event)
        stored = await self._inner_session(session)
        cipher = await self._fresh_cipher(session.app_name, session.user_id, session.id)
        encrypted = cipher.encrypt_event(event, plaintext, cipher.encrypt_states(delta))
        # Give the inner service a copy: it changes the object, even if it then fails to store the
        # event.
        changed = stored.model_copy(
            update={"events": list(stored.events), "state": dict(stored.state)}
        )
        await self._inner.append_event(changed, encrypted)
        session.last_update_time = changed.last_update_time
        session._storage_update_marker = _Marker.of(changed)
        session.state.update(event.actions.state_delta or {})
        session.events.append(event)

    async def _inner_session(self, session: Session) -> Session:
        """Return the inner service's object for *session*."""
        known: Session | None = getattr(session._storage_update_marker, "session", None)
        if known is not None and _ids_of(known) == _ids_of(session):
            return known
        # *session* was rebuilt, for example from JSON.
        stored = await self._inner.get_session(
            app_name=session.app_name, user_id=session.user_id, session_id=session.id
        )
        if stored is None or stored.id != session.id:
            raise SessionNotFoundError("Session not found.")
        _require_ids(stored, _ids_of(session))
        ends = [[event.id for event in one.events[-1:]] for one in (session, stored)]
        same_time = not session.events and stored.last_update_time == session.last_update_time
        if ends[0] != ends[1] and not same_time:
            raise StaleSessionError(STALE_TEXT)
        return stored

    async def flush(self) -> None:
        """Let the inner service store what it buffers."""
        await _call_if_defined(self._inner, "flush")

    async def close(self) -> None:
        """Close the key database and discard all keys; close the inner service.

        The next call opens the key database again.
        """
        try:
            await self._runner.close()
        finally:
            await _call_if_defined(self._inner, "close")

    async def _fresh_cipher(self, app_name: str, user_id: str, session_id: str) -> "_SessionCipher":
        """Return an object that encrypts with data keys that were just read.

        Another process may have erased cached ones.
        """
        keyring = await self._runner.keyring()
        await self._feature.ensure()
        identity = await self._runner.identify(app_name, user_id, session_id)
        keys = await self._runner.run(key_operations.EnsureOwners(identity))
        return _SessionCipher(keys, True, keyring.index_master, identity)

    async def _read(
        self, identity: Identity, work: Callable[["_SessionCipher"], Awaitable[T]]
    ) -> T:
        """Return the result of *work*, which decrypts and may be called again with other keys."""
        index_master = (await self._runner.keyring()).index_master
        # If the inner service answers from memory and the keys are cached, nothing else lets other
        # tasks run, and a task that reads in a loop would block all other tasks.
        await asyncio.sleep(0)

        async def use(keys: TransactionKeys, is_current: bool) -> T:
            return await work(_SessionCipher(keys, is_current, index_master, identity))

        return await self._runner.run(key_operations.UseKeys(identity, use))


reject_unknown_methods(EncryptedSessionWrapper, BaseSessionService)


class _Marker(str):
    """The marker of a decrypted session: that of the inner service's *session*, and the session."""

    session: Session

    @classmethod
    def of(cls, session: Session) -> "_Marker":
        marker = cls(session._storage_update_marker or "")
        marker.session = session
        return marker

    def __eq__(self, other: object) -> bool:  # a copy from JSON has no marker
        return str(self) == ("" if other is None else other)

    __hash__ = str.__hash__


class _StateScope(NamedTuple):
    """The app's, the user's or the session's state."""

    prefix: str  # of its keys
    owner: bytes  # the tag of the data key's owner
    # The name of the scope and the ids, to which the encrypted values are bound.
    parts: tuple[str, ...]


class _SessionCipher:
    """Encrypts and decrypts the records of one session.

    If *is_current* is True, all data keys were just read, so a missing data key does not exist.
    """

    def __init__(
        self, keys: TransactionKeys, is_current: bool, index_master: IndexMaster, identity: Identity
    ):
        self._keys = keys
        self._is_current = is_current
        self._index_master = index_master
        self._identity = identity
        user = (identity.app_name, identity.user_id)
        self.app = _StateScope(json_text.APP_PREFIX, identity.app_tag, ("app", identity.app_name))
        self.user = _StateScope(json_text.USER_PREFIX, identity.user_tag, ("user", *user))
        self.session = _StateScope("", identity.user_tag, ("session", *user, identity.session_id))

    def encrypt_states(self, values: Scopes) -> dict[str, str]:
        """Return the entries of all scopes in one dict."""
        encrypted = {}
        for scope, entries in zip((self.app, self.user, self.session), values, strict=True):
            for key, value in entries.items():
                name = self._index_master.mac("wrapped state key", *scope.parts, key).hex()
                context = _state_context(scope, name)
                record = self._keys.seal(scope.owner, context, json_text.dump_state({key: value}))
                encrypted[scope.prefix + name] = _to_base64(record)
        return encrypted

    def encrypt_event(self, event: Event, plaintext: bytes, delta: dict[str, str]) -> Event:
        """Return the event to store; *plaintext* encodes *event*, and *delta* is encrypted."""
        record = self._keys.seal(self._identity.user_tag, self._event_context(event.id), plaintext)
        return Event(
            id=event.id,
            invocation_id=event.invocation_id,
            author=event.author,
            timestamp=event.timestamp,
            turn_complete=event.turn_complete,
            content=types.Content(role="model", parts=[types.Part(text=_to_base64(record))]),
            actions=EventActions(state_delta=dict(delta)),
        )

    async def decrypt_session(
        self, stored: Session, config: GetSessionConfig | None = None
    ) -> Session:
        identity = self._identity
        _require_ids(stored, (identity.app_name, identity.user_id, identity.session_id))
        split = json_text.split_scopes(stored.state)
        session = Session(
            id=stored.id,
            app_name=stored.app_name,
            user_id=stored.user_id,
            state=json_text.merge_scopes(
                await self.decrypt_scope(self.app, split.app),
                await self.decrypt_scope(self.user, split.user),
                await self.decrypt_scope(self.session, split.session),
            ),
            last_update_time=stored.last_update_time,
        )
        session._storage_update_marker = _Marker.of(stored)
        config = config or GetSessionConfig()
        after, limit = config.after_timestamp, config.num_recent_events
        from_us = events.microseconds(after) if after else None
        history, seen = [], set()
        for number, one in enumerate(stored.events):
            if number % _CHUNK == _CHUNK - 1:
                await asyncio.sleep(0)
            text = _text_of_event(one)
            if text in seen:
                raise TamperedError("it is stored twice", Reason.MISMATCH, EVENTS, _safe_id(one.id))
            seen.add(text)
            event = self._decrypt_event(one, text)
            # Filter again: not every service filters events.
            if from_us is None or events.microseconds(event.timestamp) >= from_us:
                history.append(event)
        if limit is not None:
            history = history[-limit:] if limit else []
        session.events = history
        return session

    async def decrypt_scope(self, scope: _StateScope, stored: JsonObject) -> JsonObject:
        """Decrypt the entries of one scope, whose names have no prefix."""
        entries: JsonObject = {}
        for name, value in stored.items():
            try:
                entries.update(self._decrypt_entry(scope, name, value))
            except DecryptionError as error:
                shown = scope.prefix + (name if _STORED_KEY.fullmatch(name) else "?")
                # The user was erased, and the user id is used again.  The old entries of the user's
                # state stay in the inner store, which has no method to delete them.
                may_be_erased = self._is_current and scope is self.user
                if not (may_be_erased and error.reason is Reason.UNKNOWN_KEY):
                    raise error.located(STATES, shown) from None
                logger.warning(
                    "an entry of a user's state is left out: its data key does not exist, as after "
                    "an erasure (%s)",
                    shown,
                )
        return entries

    def _decrypt_entry(self, scope: _StateScope, name: str, value: object) -> JsonObject:
        if not _STORED_KEY.fullmatch(name):
            raise PlaintextRefusedError("a key of the state is not a blind index")
        context = _state_context(scope, name)
        plaintext = self._keys.open(scope.owner, context, _from_base64(value))
        entry = json_text.load_state(plaintext, "the value")
        if len(entry) != 1:
            raise TamperedError("its plaintext is malformed", Reason.MALFORMED)
        return entry

    def _decrypt_event(self, stored: Event, text: str) -> Event:
        context = self._event_context(stored.id)
        try:
            plaintext = self._keys.open(self._identity.user_tag, context, _from_base64(text))
            event = events.decode(plaintext, _safe_id(stored.id), table=EVENTS)
            for name in (*_ID_FIELDS, "turn_complete"):
                if getattr(stored, name) != getattr(event, name):
                    raise TamperedError(f"its {name} was modified", Reason.MISMATCH)
            if not abs(stored.timestamp - event.timestamp) <= _TIME_TOLERANCE:
                raise TamperedError("its timestamp was modified", Reason.MISMATCH)
            return event
        except DecryptionError as error:
            raise error.located(EVENTS, _safe_id(stored.id)) from None

    def _event_context(self, event_id: str) -> bytes:
        identity = self._identity
        return records.build_context(
            ("wrapped event", identity.app_name, identity.user_id, identity.session_id, event_id)
        )


def _state_context(scope: _StateScope, name: str) -> bytes:
    return records.build_context(("wrapped state", *scope.parts, bytes.fromhex(name)))


def _to_base64(record: bytes) -> str:
    return base64.b64encode(record).decode("ascii")


def _from_base64(text: object) -> bytes:
    if isinstance(text, str):
        try:
            record = base64.b64decode(text, validate=True)
            # Several texts in base64 may stand for the same bytes.  Accept only one of them, so
            # that an event that is stored twice has the same text twice.
            if _to_base64(record) == text:
                return record
        except ValueError:
            pass
    raise PlaintextRefusedError("not an encrypted record")


def _ids_of(session: Session) -> tuple[str, str, str]:
    return session.app_name, session.user_id, session.id


def _require_ids(stored: Session, expected: tuple[str, str, str]) -> None:
    if _ids_of(stored) != expected:
        raise TamperedError(
            "the inner service has returned the session of another app or user, or another session",
            Reason.WRONG_OWNER,
        )


def _safe_id(event_id: str) -> str:
    """Return the id of a stored event for an error; "?" if the id is long or not printable."""
    return event_id if event_id.isprintable() and len(event_id) <= 128 else "?"


def _text_of_event(stored: Event) -> str:
    parts: Iterable[types.Part] = (stored.content and stored.content.parts) or ()
    texts = [part.text for part in parts]
    if len(texts) == 1 and texts[0] is not None:
        return texts[0]
    raise PlaintextRefusedError("not an encrypted event", table=EVENTS, row=_safe_id(stored.id))


async def _call_if_defined(service: BaseSessionService, name: str) -> None:
    if (method := getattr(service, name, None)) is not None:
        result = method()
        if inspect.isawaitable(result):
            await result
