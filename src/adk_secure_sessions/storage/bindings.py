"""Encrypt and decrypt rows: the context that each record is bound to, and the checks on reading.

docs/format.md lists the parts of each context in order.  In the package `storage`, a *tag* is a
blind index: the keyed hash of an app name, user id or session id.
"""

from collections.abc import Iterable
from enum import Enum
from typing import Any, Generic, NamedTuple, TypeVar

from sqlalchemy import CompoundSelect

from adk_secure_sessions.db.protocol import Row
from adk_secure_sessions.errors import DecryptionError, Reason, TamperedError
from adk_secure_sessions.formats import records
from adk_secure_sessions.formats.records import HEADER_LENGTH, encode_text
from adk_secure_sessions.keys.blind_index import BlindIndex
from adk_secure_sessions.keys.data_keys import StagedKeys
from adk_secure_sessions.lru import Lru
from adk_secure_sessions.storage.queries import (
    EVENT_RECORD,
    EVENT_SEQ,
    EVENT_TIME,
    AppRow,
    Found,
    QueryForms,
    SessionRow,
    UserRow,
    WitnessRow,
)
from adk_secure_sessions.storage.schema import apps, bases, events, sessions, users, witnesses

R = TypeVar("R")
V = TypeVar("V")

NO_SNAPSHOT = -1  # the `base_revision` of a session whose row contains the whole state


class Identity(NamedTuple):
    """The ids that ADK uses for an app, user and session, and their tags (blind indexes)."""

    app_name: str
    user_id: str
    session_id: str
    app_tag: bytes
    user_tag: bytes
    session_tag: bytes

    def tags(self) -> dict[str, object]:
        """Return the tags as parameters of the statements in `queries`."""
        return {
            "app_tag": self.app_tag,
            "user_tag": self.user_tag,
            "session_tag": self.session_tag,
        }


def identify(index: BlindIndex, app_name: str, user_id: str = "", session_id: str = "") -> Identity:
    """Return the ids with their tags, which *index* computes."""
    return Identity(
        app_name,
        user_id,
        session_id,
        index.app(app_name),
        index.user(app_name, user_id),
        index.session(app_name, user_id, session_id),
    )


class Owner(NamedTuple):
    """An owner of data keys: a decrypted row of `secure_apps` or `secure_users`.

    *state* is JSON.  For an app, *app_row* is 0 and *user_id* is empty.
    """

    id: int
    tag: bytes
    app_row: int
    user_id: str
    version: int
    state: bytes


class StoredSession(NamedTuple):
    """A decrypted row of `secure_sessions`.

    The session's state is *overlay* merged over *snapshot*; both are JSON.  Only a large state has
    a snapshot, which is a row of `secure_bases`.  The overlay then contains the changes after
    *base_revision*, the revision of the snapshot.

    If the session has no snapshot, *snapshot* is `{}`.  If the snapshot was not read, *snapshot* is
    None.  *sealed* is the stored record: the next update fails if another record is stored.
    """

    id: int
    user_row: int
    tag: bytes
    session_id: str
    revision: int
    base_revision: int
    created_at: int
    updated_at: int
    overlay: bytes
    snapshot: bytes | None
    sealed: bytes


class Seen(NamedTuple, Generic[R, V]):
    """A row, its version witness and the decrypted value.

    If a later read returns an identical row and an identical version witness, the value is reused
    without decrypting the row again.
    """

    row: R
    witness: WitnessRow | None
    value: V


class RowCache:
    """A cache of decrypted rows, by tag.  It has at most *limit* rows of each kind."""

    def __init__(self, limit: int) -> None:
        self.apps: Lru[bytes, Seen[AppRow, Owner]] = Lru(limit)
        self.users: Lru[bytes, Seen[UserRow, Owner]] = Lru(limit)
        self.sessions: Lru[bytes, Seen[SessionRow, StoredSession]] = Lru(limit)


class KeySource(Enum):
    """The source of the data keys of an attempt's owners."""

    CACHE = "this process has cached the data keys"
    QUERY = "the query that reads the rows also reads the data keys"
    KEY_DATABASE = "the data keys were read from the key database before the rows"


class Attempt(NamedTuple):
    """One attempt at an operation on the rows of *who*, with its data keys and the row cache."""

    who: Identity
    keys: StagedKeys
    cache: RowCache
    key_source: KeySource
    is_first: bool  # only the first attempt may use cached rows instead of a read

    def form_of(self, forms: QueryForms) -> CompoundSelect[Any]:
        """Return the form of a query that this attempt needs: with or without data keys."""
        return forms[self.key_source is KeySource.QUERY]

    def forget_user(self) -> None:
        """Remove the user from the caches, because the user's row is not stored."""
        self.keys.forget(self.who.user_tag)
        self.cache.users.drop(self.who.user_tag)


class NeedsDataKey(Exception):
    """A new data key of *owner* must be stored in the key database before the next attempt."""

    def __init__(self, owner: bytes) -> None:
        super().__init__("a data key has to be stored first")
        self.owner = owner


def app_context(app_name: str, tag: bytes, row: int, version: int) -> bytes:
    return records.context(("app", app_name, tag), row, version)


def user_context(app_name: str, tag: bytes, row: int, app_row: int, version: int) -> bytes:
    return records.context(("user", app_name, tag), row, app_row, version)


def witness_context(app_name: str, tag: bytes, number: int) -> bytes:
    return records.context(("witness", app_name, tag), number)


def session_context(app_name: str, user_id: str, tag: bytes, *numbers: int) -> bytes:
    """Return the context of a session's row.

    *numbers* are the columns id, user_row, revision, base_revision, created_at and updated_at.
    """
    return records.context(("session", app_name, user_id, tag), *numbers)


def snapshot_context(who: Identity, session_row: int, revision: int) -> bytes:
    return records.context(
        ("base", who.app_name, who.user_id, who.session_id), session_row, revision
    )


def event_context(who: Identity, session_row: int, seq: int, time: int) -> bytes:
    return records.context(_event_parts(who), session_row, seq, time)


def _event_parts(who: Identity) -> tuple[str, ...]:
    return ("event", who.app_name, who.user_id, who.session_id)


def open_app(attempt: Attempt, found: Found) -> Owner | None:
    """Return the app, or None if it is not stored.

    Raises DecryptionError if the app's row was tampered with, or if the row is missing and its
    version witness is still stored.
    """
    who, row = attempt.who, found.app
    if row is None:
        _reject_if_removed(found, who.app_tag, apps.name)
        return None
    app = _unchanged(attempt.cache.apps, found, who.app_tag, row)
    if app is None:
        with naming(apps.name, row.id):
            if row.name != encode_text(who.app_name):
                raise TamperedError("its app_name was modified", reason=Reason.WRONG_OWNER)
            context = app_context(who.app_name, who.app_tag, row.id, row.version)
            state = attempt.keys.open(who.app_tag, context, row.state)
            _check_witness(attempt, found, who.app_tag, who.app_tag, row.version)
        app = Owner(row.id, who.app_tag, 0, "", row.version, state)
        attempt.cache.apps.put(app.tag, Seen(row, found.witnesses.get(app.tag), app))
    return app


def open_user(attempt: Attempt, found: Found) -> Owner | None:
    """Return the user, or None if the user is not stored.

    Raises DecryptionError if the user's row was tampered with, or if the row is missing and its
    version witness is still stored.
    """
    row = found.user
    if row is None:
        _reject_if_removed(found, attempt.who.user_tag, users.name)
        attempt.forget_user()
        return None
    user = open_user_row(attempt, found, row)
    if user.tag != attempt.who.user_tag or user.user_id != attempt.who.user_id:
        raise TamperedError(
            "not the requested user", reason=Reason.WRONG_OWNER, table=users.name, row=user.id
        )
    return user


def open_user_row(attempt: Attempt, found: Found, row: UserRow) -> Owner:
    """Return the user in *row*, which may be any user of the app.

    Raises DecryptionError if *row* or its version witness was tampered with.
    """
    user = _unchanged(attempt.cache.users, found, row.tag, row)
    if user is None:
        with naming(users.name, row.id):
            context = user_context(attempt.who.app_name, row.tag, row.id, row.app_row, row.version)
            user_id, state = records.split_id(attempt.keys.open(row.tag, context, row.state))
            _check_witness(attempt, found, row.tag, row.tag, row.version)
        user = Owner(row.id, row.tag, row.app_row, user_id, row.version, state)
        attempt.cache.users.put(user.tag, Seen(row, found.witnesses.get(user.tag), user))
    return user


def open_session(attempt: Attempt, found: Found, user: Owner | None) -> StoredSession | None:
    """Return the session, or None if it is not stored.

    Raises DecryptionError if the session's row was tampered with, if the row is missing and its
    version witness is still stored, or if the row is stored and the user's row is missing.
    """
    tag, row = attempt.who.session_tag, found.session
    if row is None:
        _reject_if_removed(found, tag, sessions.name)
        return None
    if user is None:
        raise TamperedError(
            "its user's row was removed", reason=Reason.MISSING, table=sessions.name, row=row.id
        )
    session = _open_session(attempt, found, user, row, needs_witness=True)
    if session.tag != tag or session.session_id != attempt.who.session_id:
        raise TamperedError(
            "not the requested session",
            reason=Reason.WRONG_OWNER,
            table=sessions.name,
            row=session.id,
        )
    return session


def open_listed_session(
    attempt: Attempt, found: Found, user: Owner, row: SessionRow
) -> StoredSession:
    """Return the session in *row*, a row of a listing.

    An attacker may replay the row of a deleted session.  If the session had events, its last event
    is missing, so the row is rejected.  If the session had no events, only its version witness
    proves that it was not deleted.

    Raises DecryptionError if the row was tampered with.
    """
    return _open_session(attempt, found, user, row, needs_witness=not row.revision)


def _open_session(
    attempt: Attempt, found: Found, user: Owner, row: SessionRow, *, needs_witness: bool
) -> StoredSession:
    """Return the session in *row*: from the cache if the row is unchanged, else decrypted."""
    seen = attempt.cache.sessions.get(row.tag)
    if seen and seen.row == row and seen.value.user_row == user.id:
        session = seen.value
        if not needs_witness or seen.witness == found.witnesses.get(session.tag):
            return session
    session = _open_session_row(attempt, found, user, row)
    if needs_witness:
        with naming(sessions.name, session.id):
            _check_witness(attempt, found, user.tag, session.tag, session.id)
    if session.base_revision == NO_SNAPSHOT:  # a snapshot may be large: do not cache it
        witness = found.witnesses.get(session.tag)
        attempt.cache.sessions.put(session.tag, Seen(row, witness, session))
    return session


def _open_session_row(
    attempt: Attempt, found: Found, user: Owner, row: SessionRow
) -> StoredSession:
    """Decrypt a session of *user* and its snapshot, and compare its revision with its events."""
    app_name = attempt.who.app_name
    numbers = (row.id, row.user_row, row.revision, row.base_revision)
    with naming(sessions.name, row.id):
        context = session_context(
            app_name, user.user_id, row.tag, *numbers, row.created_at, row.updated_at
        )
        session_id, overlay = records.split_id(attempt.keys.open(user.tag, context, row.state))
        if row.user_row != user.id:
            raise TamperedError("it belongs to another user", reason=Reason.WRONG_OWNER)
        if row.last_seq != row.revision - 1:
            raise TamperedError(
                f"revision {row.revision} requires a last event {row.revision - 1}, storage has "
                f"{row.last_seq}: events were added or removed, or an older row was replayed",
                reason=Reason.MISMATCH,
            )
    whose = attempt.who._replace(user_id=user.user_id, session_id=session_id)
    return StoredSession(
        row.id, row.user_row, row.tag, session_id, row.revision, row.base_revision,
        row.created_at, row.updated_at, overlay, _open_snapshot(attempt, found, whose, user, row),
        row.state,
    )  # fmt: skip


def _open_snapshot(
    attempt: Attempt, found: Found, whose: Identity, user: Owner, row: SessionRow
) -> bytes:
    """Return the decrypted snapshot of the session in *row*; `{}` if the session has none."""
    snapshot = found.snapshots.get(row.id)
    with naming(bases.name, row.id):
        if row.base_revision == NO_SNAPSHOT:
            if snapshot is not None:
                raise TamperedError(
                    "the session has no snapshot: this row was added", reason=Reason.MISMATCH
                )
            return b"{}"
        if snapshot is None or snapshot.revision != row.base_revision:
            raise TamperedError(
                "it was removed, or an older row was replayed", reason=Reason.MISMATCH
            )
        context = snapshot_context(whose, row.id, row.base_revision)
        return attempt.keys.open(user.tag, context, snapshot.state)


def check_events(session: StoredSession, history: list[Row], limit: int | None) -> None:
    """Sort *history*, which must contain each event of *session* exactly once.

    If *limit* is given, *history* must contain only the last *limit* events.  Raises TamperedError
    if an event is missing, was added or was renumbered.
    """
    first = 0 if limit is None else max(0, session.revision - limit)
    expected = list(range(first, session.revision))
    if [row[EVENT_SEQ] for row in history] != expected:
        # A UNION ALL guarantees no order.  SQLite stores any type in any column, so a modified
        # `seq` may not be an integer: sort by text, since any two texts can be compared.
        history.sort(
            key=lambda row: f"{row[EVENT_SEQ]:020}" if isinstance(row[EVENT_SEQ], int) else ""
        )
    if [row[EVENT_SEQ] for row in history] != expected:
        raise TamperedError(
            f"events {first} to {session.revision - 1} of this session are expected, each once; "
            "some were added, removed or renumbered",
            reason=Reason.MISMATCH,
            table=events.name,
            row=session.id,
        )


def open_events(attempt: Attempt, session: StoredSession, history: Iterable[Row]) -> list[bytes]:
    """Return the plaintexts of the events in *history*, in order.

    A history may be long.  Therefore, values that several events share (the parts of the context,
    the cipher) are computed once.  Raises DecryptionError if an event was tampered with.
    """
    who, session_row = attempt.who, session.id
    parts = records.context_parts(_event_parts(who))
    header, cipher = None, None
    opened = []
    for row in history:
        seq, record = row[EVENT_SEQ], row[EVENT_RECORD]
        try:
            if cipher is None or type(record) is not bytes or record[:HEADER_LENGTH] != header:
                cipher = attempt.keys.cipher(who.user_tag, record)
                header = record[:HEADER_LENGTH]
            context = records.numbered_context(parts, session_row, seq, row[EVENT_TIME])
            opened.append(records.open_record(record, context, cipher))
        except DecryptionError as error:
            failure = error.located(events.name, f"{session_row}, {seq}")
        else:
            continue
        raise failure
    return opened


def seal_app(attempt: Attempt, app: Owner) -> bytes:
    context = app_context(attempt.who.app_name, app.tag, app.id, app.version)
    return attempt.keys.seal(app.tag, context, app.state)


def seal_user(attempt: Attempt, user: Owner) -> bytes:
    context = user_context(attempt.who.app_name, user.tag, user.id, user.app_row, user.version)
    return attempt.keys.seal(user.tag, context, records.with_id(user.user_id, user.state))


def seal_witness(attempt: Attempt, owner: bytes, tag: bytes, number: int) -> bytes:
    """Return a version witness: a record of the empty plaintext, with *number* in its context."""
    return attempt.keys.seal(owner, witness_context(attempt.who.app_name, tag, number), b"")


def seal_session(attempt: Attempt, session: StoredSession) -> bytes:
    who, row = attempt.who, session
    numbers = (row.id, row.user_row, row.revision, row.base_revision)
    context = session_context(
        who.app_name, who.user_id, row.tag, *numbers, row.created_at, row.updated_at
    )
    return attempt.keys.seal(
        who.user_tag, context, records.with_id(who.session_id, session.overlay)
    )


def seal_snapshot(attempt: Attempt, session_row: int, revision: int, state: bytes) -> bytes:
    context = snapshot_context(attempt.who, session_row, revision)
    return attempt.keys.seal(attempt.who.user_tag, context, state)


def seal_event(attempt: Attempt, session_row: int, seq: int, time: int, event: bytes) -> bytes:
    context = event_context(attempt.who, session_row, seq, time)
    return attempt.keys.seal(attempt.who.user_tag, context, event)


class naming:  # noqa: N801 - used like a function: `with naming(...)`
    """A context manager that adds the table and the row to a `DecryptionError` of its block."""

    __slots__ = ("_row", "_table")

    def __init__(self, table: str, row: object) -> None:
        self._table = table
        self._row = row

    def __enter__(self) -> None:
        pass

    def __exit__(self, _type: object, error: object, _traceback: object) -> None:
        if isinstance(error, DecryptionError):
            raise error.located(self._table, self._row) from None


def _unchanged(cache: Lru[bytes, Seen[R, V]], found: Found, tag: bytes, row: R) -> V | None:
    """Return the cached value of *row*; None if *row* or its version witness is not as cached."""
    seen = cache.get(tag)
    if seen and seen.row == row and seen.witness == found.witnesses.get(tag):
        return seen.value
    return None


def _check_witness(attempt: Attempt, found: Found, owner: bytes, tag: bytes, number: int) -> None:
    """Raise DecryptionError unless the row's version witness is authentic and has *number*."""
    witness = found.witnesses.get(tag)
    if witness is None:
        raise TamperedError(
            f"its version witness (row of {witnesses.name}) was removed", reason=Reason.MISSING
        )
    try:
        context = witness_context(attempt.who.app_name, tag, witness.number)
        attempt.keys.open(owner, context, witness.seal)
    except DecryptionError as error:
        raise error.about(f"its version witness, {witnesses.name} row {tag.hex()}") from None
    if witness.number != number:
        raise TamperedError(
            f"its version witness has number {witness.number} instead of {number}: an older row "
            "was replayed",
            reason=Reason.MISMATCH,
        )


def _reject_if_removed(found: Found, tag: bytes, table: str) -> None:
    """Raise TamperedError if the version witness of a missing row is still stored."""
    if tag in found.witnesses:
        raise TamperedError(
            f"the row of {table} with tag {tag.hex()} was removed or its tag was modified: its "
            "version witness is still stored",
            reason=Reason.MISSING,
        )
