"""Encrypt and decrypt rows: the context that each record is bound to, and the checks on reading.

docs/format.md lists the parts of each context in order.  In the package `storage`, a *tag* is a
blind index: the keyed hash of an app name, user id or session id.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from time import perf_counter
from typing import Any, Generic, NamedTuple, TypeVar

from sqlalchemy import CompoundSelect

from adk_secure_sessions.db.protocol import Row
from adk_secure_sessions.errors import DecryptionError, Reason, TamperedError
from adk_secure_sessions.formats import records
from adk_secure_sessions.formats.flags import Packing, packing_of
from adk_secure_sessions.formats.records import (
    EVENT_LINK,
    EVENT_PREVIOUS,
    EVENT_REST,
    HEADER_LENGTH,
    LINK_LENGTH,
    NO_LINK,
    OwnerFields,
    SessionFields,
    encode_text,
    open_with_flags,
    split_link,
    with_id,
)
from adk_secure_sessions.keys.blind_index import BlindIndex
from adk_secure_sessions.keys.data_keys import StagedKeys
from adk_secure_sessions.lru import Lru
from adk_secure_sessions.storage.histories import HistoryCache
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
from adk_secure_sessions.storage.schema import (
    COLLECTION,
    NEVER,
    NO_SNAPSHOT,
    apps,
    bases,
    events,
    sessions,
    users,
    witnesses,
)

R = TypeVar("R")
V = TypeVar("V", bound="Owner | StoredSession")


class Identity(NamedTuple):
    """The ids that ADK uses for an app, user and session, and their tags (blind indexes).

    If *is_collection* is True, *session_id* is the name of a collection: see `store.Collections`.
    *session_parts* is the encoded beginning of the context of the session's row.  *event_parts* is
    the encoded beginning of the contexts of the session's events.  Every append needs both, so they
    are encoded only once.
    """

    app_name: str
    user_id: str
    session_id: str
    app_tag: bytes
    user_tag: bytes
    session_tag: bytes
    session_parts: bytes = b""
    event_parts: bytes = b""
    is_collection: bool = False

    def tags(self) -> dict[str, object]:
        """Return the tags as parameters of the statements in `queries`."""
        return {
            "app_tag": self.app_tag,
            "user_tag": self.user_tag,
            "session_tag": self.session_tag,
        }


def identify(
    index: BlindIndex,
    app_name: str,
    user_id: str = "",
    session_id: str = "",
    is_collection: bool = False,
) -> Identity:
    """Return the ids with their tags, which *index* computes."""
    tag_of = index.collection if is_collection else index.session
    session_tag = tag_of(app_name, user_id, session_id)
    return Identity(
        app_name,
        user_id,
        session_id,
        index.app(app_name),
        index.user(app_name, user_id),
        session_tag,
        records.context_parts(("session", app_name, user_id, session_tag)),
        records.context_parts(("event", app_name, user_id, session_id)),
        is_collection,
    )


class Owner(NamedTuple):
    """An owner of data keys: a decrypted row of `secure_apps` or `secure_users`.

    Attributes:
        id: The row id.
        tag: The blind index of the app or the user.
        app_row: The row id of the user's app; 0 for an app.
        user_id: The user id; empty for an app.
        version: The number of changes of the row.
        state: The state as JSON.
        link: The random value that the row shares with its version witness.
        key_ids: The ids of the data keys that may encrypt new records of this owner.
    """

    id: int
    tag: bytes
    app_row: int
    user_id: str
    version: int
    state: bytes
    link: bytes = NO_LINK
    key_ids: tuple[int, ...] = ()


class StoredSession(NamedTuple):
    """A decrypted row of `secure_sessions`.

    The session's state is *snapshot* updated with *overlay*.  Only a large state has a snapshot: a
    row of `secure_bases`, written at *base_revision*.  The overlay then holds the entries that
    changed since that revision.  *snapshot* is `{}` if the session has no snapshot, and None if the
    snapshot was not read.

    *head* is the link of the session's last event, and *snapshot_link* is the link of the snapshot.
    Each of the two is `NO_LINK` if there is no such event or no snapshot.

    *sealed* is the record in the row.  An update of the row requires that the row still contains
    this record.
    """

    id: int
    user_row: int
    tag: bytes
    session_id: str
    revision: int
    base_revision: int
    created_at: int
    updated_at: int
    expires_at: int
    overlay: bytes
    snapshot: bytes | None
    head: bytes
    snapshot_link: bytes
    sealed: bytes

    @property
    def is_collection(self) -> bool:
        """Whether the row is a collection, whose events are items."""
        return self.base_revision == COLLECTION

    @property
    def has_expired(self) -> bool:
        """Whether the session must be treated like a deleted one, by the clock of this machine."""
        return self.expires_at <= time.time_ns() // 1000

    def next_expiry(self, updated_at: int) -> int:
        """Return `expires_at` after an update at *updated_at*; the lifetime stays the same."""
        if self.expires_at == NEVER:
            return NEVER
        return min(updated_at + self.expires_at - self.updated_at, NEVER - 1)

    @property
    def has_snapshot(self) -> bool:
        """Whether `secure_bases` has a row of this session."""
        return self.base_revision not in (NO_SNAPSHOT, COLLECTION)

    @property
    def row(self) -> SessionRow:
        """The session's row, as a read returns it."""
        return SessionRow(
            self.id, self.user_row, self.revision, self.base_revision, self.created_at,
            self.updated_at, self.expires_at, self.revision - 1, self.tag, self.sealed,
        )  # fmt: skip


class Seen(NamedTuple, Generic[R, V]):
    """An entry of `RowCache`: a row, its version witness and the decrypted value.

    If a later read returns exactly the same row and witness, the value is used without decrypting
    the row again.

    Attributes:
        row: The row.
        witness: The version witness of the row; None if this process has not read the witness.
        value: The decrypted row.
        time: `RowCache.time` when this process read or wrote the row.
        has_proven_head: For a session: True if this process has read or written the last event,
            and the link of that event is *head* of the session.  Otherwise, an append must first
            read the session.
    """

    row: R
    witness: WitnessRow | None
    value: V
    time: int
    has_proven_head: bool = False


class RowCache:
    """The rows that this process has read or written last, by tag: at most *limit* of each kind.

    Attributes:
        histories: The decoded events of sessions, at most *history_size* bytes.
        time: A counter that each new entry increases by one; it is not a time of a clock.  A
            comparison of two values tells whether an entry was made before an attempt began.
        lacks_user: Whether a user whose rows are cached was found not to be stored any more.
    """

    def __init__(self, limit: int, history_size: int = 0) -> None:
        self.apps: Lru[bytes, Seen[AppRow, Owner]] = Lru(limit)
        self.users: Lru[bytes, Seen[UserRow, Owner]] = Lru(limit)
        self.sessions: Lru[bytes, Seen[SessionRow, StoredSession]] = Lru(limit)
        self.histories: HistoryCache = HistoryCache(history_size)
        self.time: int = 0
        self.lacks_user: bool = False

    def tick(self) -> int:
        """Increase `time` by one and return it."""
        self.time += 1
        return self.time

    def put(
        self,
        kind: Lru[bytes, Seen[R, V]],
        row: R,
        witness: WitnessRow | None,
        value: V,
        *,
        has_proven_head: bool = False,
    ) -> None:
        """Cache *value*, the decrypted *row*, unless a newer version of the row is cached.

        During a slow read, another task may have read or written a newer version.
        """
        seen = kind.get(value.tag)
        if seen and seen.value.id == value.id and _version(seen.value) > _version(value):
            return
        kind.put(value.tag, Seen(row, witness, value, self.tick(), has_proven_head))

    def put_session(
        self,
        session: StoredSession,
        witness: WitnessRow | None,
        *,
        has_proven_head: bool,
    ) -> None:
        """Cache *session* like `put`, but without its snapshot, which may be large."""
        session = session._replace(snapshot=None if session.has_snapshot else b"{}")
        self.put(self.sessions, session.row, witness, session, has_proven_head=has_proven_head)

    def forget_session(self, tag: bytes) -> None:
        """Remove the session with *tag* and its events, because the session is not stored."""
        self.sessions.drop(tag)
        self.histories.drop(tag)

    def prove_head(self, session: StoredSession) -> None:
        """Set `has_proven_head` of the cached session, if the cached row equals `session.row`."""
        seen = self.sessions.get(session.tag)
        if seen and seen.row == session.row and not seen.has_proven_head:
            self.sessions.put(session.tag, seen._replace(has_proven_head=True))

    def proven_session(self, tag: bytes) -> StoredSession | None:
        """Return the cached session if it `has_proven_head` (see `Seen`), otherwise None."""
        seen = self.sessions.get(tag)
        return seen.value if seen and seen.has_proven_head else None


class KeySource(Enum):
    """The source of the data keys of an attempt's app and user."""

    CACHE = "this process has cached the data keys"
    QUERY = "the query that reads the rows also reads the data keys"
    KEY_DATABASE = "the data keys were read from the key database before the rows"


class Attempt(NamedTuple):
    """One attempt at an operation on the rows of *who*.

    *keys* are the data keys that the attempt uses, and *key_source* says where they come from.
    *cache* is the row cache of the unit of work.

    *after_commit* is None for a read.  For a write, it collects functions that cache the rows which
    the write has read; they are called after the commit.  On SQLite, one transaction contains
    several writes, and a write reads rows that earlier writes of the transaction have changed.  If
    such a row were cached before the commit, a concurrent read would find an older stored row, and
    would reject this older row as replayed.
    """

    who: Identity
    keys: StagedKeys
    cache: RowCache
    key_source: KeySource
    is_first: bool  # only the first attempt may use cached rows instead of a read
    began: int = 0  # `cache.time` when the attempt began: see `_reject_older`
    locks_rows: bool = False  # after several conflicts, a write locks rows before it reads them
    after_commit: list[Callable[[], None]] | None = None

    def remember(self, put: Callable[[], None]) -> None:
        """Call *put*, which caches a row that was read; a write calls *put* after the commit."""
        if self.after_commit is None:
            put()
        else:
            self.after_commit.append(put)

    def form_of(self, forms: QueryForms) -> CompoundSelect[Any]:
        """Return the form of a query that this attempt needs: with or without data keys."""
        return forms[self.key_source is KeySource.QUERY]

    def load_keys(self, found: Found) -> None:
        """Unwrap the data keys in *found* if the query has read them; see `StagedKeys.load`."""
        if self.key_source is KeySource.QUERY:
            self.keys.load(found.data_keys, found.masters)

    def forget_user(self) -> None:
        """Remove the user and the session from the caches, because the user's row is not stored."""
        cache, who = self.cache, self.who
        if cache.users.get(who.user_tag) or cache.sessions.get(who.session_tag):
            cache.lacks_user = True
        self.keys.forget(who.user_tag)
        cache.users.drop(who.user_tag)
        cache.forget_session(who.session_tag)


class NeedsDataKey(Exception):
    """A new data key of *owner* must be stored in the key database before the next attempt.

    *owner* is a tag.  *not_before* is the earliest `created_at` of the new data key, in
    microseconds since 1970.
    """

    def __init__(self, owner: bytes, not_before: int) -> None:
        super().__init__("a data key has to be stored first")
        self.owner = owner
        self.not_before = not_before


def app_context(app_name: str, tag: bytes, row: int, version: int) -> bytes:
    return records.context(("app", app_name, tag), row, version)


def user_context(app_name: str, tag: bytes, row: int, app_row: int, version: int) -> bytes:
    return records.context(("user", app_name, tag), row, app_row, version)


def witness_context(app_name: str, tag: bytes, number: int) -> bytes:
    return records.context(("witness", app_name, tag), number)


def session_context(app_name: str, user_id: str, tag: bytes, *numbers: int) -> bytes:
    """Return the context of a session's row.

    *numbers* are the columns id, user_row, revision, base_revision, created_at, updated_at and
    expires_at.
    """
    return records.context(("session", app_name, user_id, tag), *numbers)


def snapshot_context(who: Identity, session_row: int, revision: int) -> bytes:
    return records.context(
        ("base", who.app_name, who.user_id, who.session_id), session_row, revision
    )


def event_context(who: Identity, session_row: int, seq: int, time: int) -> bytes:
    return records.context(
        ("event", who.app_name, who.user_id, who.session_id), session_row, seq, time
    )


def open_app(attempt: Attempt, found: Found) -> Owner | None:
    """Return the decrypted app of *attempt*, or None if the app is not stored.

    Raises DecryptionError if the app's row was tampered with, or if the row is missing and its
    version witness is still stored.
    """
    who, row = attempt.who, found.app
    if row is None:
        _reject_if_removed(found, who.app_tag, apps.name)
        return None
    _reject_second(found.apps, apps.name)
    cache = attempt.cache.apps
    app = _unchanged(attempt, cache, found, who.app_tag, row)
    if app is None:
        with naming(apps.name, row.id):
            if row.name != encode_text(who.app_name):
                raise TamperedError("its app_name was modified", reason=Reason.WRONG_OWNER)
            context = app_context(who.app_name, who.app_tag, row.id, row.version)
            fields = records.split_owner(attempt.keys.open(who.app_tag, context, row.state))
            _check_witness(attempt, found, who.app_tag, who.app_tag, row.version, fields.link)
            _reject_older(attempt, cache.get(who.app_tag), row.id, row.version)
        app = Owner(
            row.id, who.app_tag, 0, "", row.version, fields.state, fields.link, fields.key_ids
        )
        witness = found.witnesses.get(app.tag)
        attempt.remember(partial(attempt.cache.put, cache, row, witness, app))
    attempt.keys.adopt(app.tag, app.key_ids)
    return app


def _reject_second(rows: Sequence[AppRow | UserRow | SessionRow], table: str) -> None:
    """Raise TamperedError if a query by a tag has found two rows.

    This is possible only if the column `tag` has lost its UNIQUE constraint.
    """
    if len(rows) > 1:
        raise TamperedError(
            "it is stored twice", reason=Reason.MISMATCH, table=table, row=rows[1].id
        )


def open_user(attempt: Attempt, found: Found) -> Owner | None:
    """Return the decrypted user of *attempt*, or None if the user is not stored.

    Raises DecryptionError if the user's row was tampered with, or if the row is missing and its
    version witness is still stored.
    """
    row = found.user
    if row is None:
        _reject_if_removed(found, attempt.who.user_tag, users.name)
        attempt.forget_user()
        return None
    _reject_second(found.users, users.name)
    user = open_user_row(attempt, found, row)
    if user.tag != attempt.who.user_tag or user.user_id != attempt.who.user_id:
        raise TamperedError(
            "not the requested user", reason=Reason.WRONG_OWNER, table=users.name, row=user.id
        )
    return user


def open_user_row(attempt: Attempt, found: Found, row: UserRow) -> Owner:
    """Return the decrypted user in *row*, which may be any user of the app.

    Raises DecryptionError if the row was tampered with.
    """
    cache = attempt.cache.users
    user = _unchanged(attempt, cache, found, row.tag, row)
    if user is None:
        with naming(users.name, row.id):
            context = user_context(attempt.who.app_name, row.tag, row.id, row.app_row, row.version)
            plaintext = attempt.keys.open(row.tag, context, row.state)
            user_id, rest = records.split_id(plaintext)
            fields = records.split_owner(rest)
            _check_witness(attempt, found, row.tag, row.tag, row.version, fields.link)
            _reject_older(attempt, cache.get(row.tag), row.id, row.version)
        user = Owner(
            row.id, row.tag, row.app_row, user_id, row.version, fields.state, fields.link,
            fields.key_ids,
        )  # fmt: skip
        witness = found.witnesses.get(user.tag)
        attempt.remember(partial(attempt.cache.put, cache, row, witness, user))
    attempt.keys.adopt(user.tag, user.key_ids)
    return user


def named_user(attempt: Attempt, found: Found) -> Owner | None:
    """Return the user of *attempt* without decrypting the user's row; None if no row has the tag.

    The returned user has an empty state.  This function does not authenticate the user id and the
    row id.  They are authenticated when a session of the user is decrypted, because the context of
    the session contains both.
    """
    row = found.user
    if row is None:
        return None
    return Owner(row.id, row.tag, row.app_row, attempt.who.user_id, row.version, b"{}")


def open_session(attempt: Attempt, found: Found, user: Owner | None) -> StoredSession | None:
    """Return the decrypted session of *attempt*, or None if the session is not stored.

    Raises DecryptionError if the session's row was tampered with, if the row is missing and its
    version witness is still stored, or if the row is stored and the user's row is missing.
    """
    tag, row = attempt.who.session_tag, found.session
    if row is None:
        _reject_if_removed(found, tag, sessions.name)
        attempt.cache.forget_session(tag)
        return None
    if user is None:
        raise TamperedError(
            "its user's row was removed", reason=Reason.MISSING, table=sessions.name, row=row.id
        )
    _reject_second(found.sessions, sessions.name)
    session = open_session_row(attempt, found, user, row)
    if session.tag != tag or session.session_id != attempt.who.session_id:
        raise TamperedError(
            f"not the requested {'collection' if attempt.who.is_collection else 'session'}",
            reason=Reason.WRONG_OWNER,
            table=sessions.name,
            row=session.id,
        )
    return session


def open_session_row(
    attempt: Attempt, found: Found, user: Owner, row: SessionRow, *, with_snapshot: bool = True
) -> StoredSession:
    """Return the decrypted session in *row*, which may be any session of *user*.

    If the row and its version witness equal the cached ones, the cached session is returned.  But
    a snapshot is never cached: if the session has one and *with_snapshot* is True, the row and the
    snapshot are decrypted.  If *with_snapshot* is False, the query has not read snapshots.

    Raises DecryptionError if the row, its version witness or its snapshot was tampered with.
    """
    cache, witness = attempt.cache, found.witnesses.get(row.tag)
    seen = cache.sessions.get(row.tag)
    unchanged = bool(seen and seen.row == row and seen.value.user_row == user.id)
    complete = bool(seen and seen.value.snapshot is not None) or not with_snapshot
    if seen and unchanged and complete and seen.witness == witness:
        return seen.value
    session = _decrypt_session(attempt, found, user, row, with_snapshot)
    with naming(sessions.name, session.id):
        _check_witness(attempt, found, user.tag, session.tag, session.id, b"")
        _reject_older(attempt, seen, session.id, session.revision)
    proven = not session.revision or bool(seen and unchanged and seen.has_proven_head)
    attempt.remember(partial(cache.put_session, session, witness, has_proven_head=proven))
    return session


def _decrypt_session(
    attempt: Attempt, found: Found, user: Owner, row: SessionRow, with_snapshot: bool
) -> StoredSession:
    """Decrypt a session of *user* and, if *with_snapshot* is True, its snapshot.

    Also check that the session's revision, which is the number of its events, is one more than the
    `seq` of its last event.
    """
    app_name = attempt.who.app_name
    numbers = (row.id, row.user_row, row.revision, row.base_revision)
    times = (row.created_at, row.updated_at, row.expires_at)
    with naming(sessions.name, row.id):
        context = session_context(app_name, user.user_id, row.tag, *numbers, *times)
        plaintext = attempt.keys.open(user.tag, context, row.state)
        session_id, rest = records.split_id(plaintext)
        fields = records.split_session(rest)
        if row.user_row != user.id:
            raise TamperedError("it belongs to another user", reason=Reason.WRONG_OWNER)
        has_snapshot = row.base_revision not in (NO_SNAPSHOT, COLLECTION)
        if not has_snapshot and fields.snapshot_link != NO_LINK:
            raise TamperedError(
                "it names a snapshot and has none: its writer is faulty", reason=Reason.MALFORMED
            )
        if row.last_seq != row.revision - 1:
            last = row.last_seq if isinstance(row.last_seq, int) else "no number"
            item = "item" if row.base_revision == COLLECTION else "event"
            raise TamperedError(
                f"revision {row.revision} requires a last {item} {row.revision - 1}, storage has "
                f"{last}: {item}s were added or removed, or an older row was replayed",
                reason=Reason.MISMATCH,
            )
    whose = attempt.who._replace(user_id=user.user_id, session_id=session_id)
    snapshot = None
    if with_snapshot or not has_snapshot:
        snapshot = _open_snapshot(attempt, found, whose, user, row, fields.snapshot_link)
    return StoredSession(
        row.id, row.user_row, row.tag, session_id, row.revision, row.base_revision, *times,
        fields.overlay, snapshot, fields.head, fields.snapshot_link, row.state,
    )  # fmt: skip


def _open_snapshot(
    attempt: Attempt, found: Found, whose: Identity, user: Owner, row: SessionRow, link: bytes
) -> bytes:
    """Return the decrypted snapshot of the session in *row*; `{}` if the session has none."""
    snapshot = found.snapshots.get(row.id)
    with naming(bases.name, row.id):
        if row.base_revision in (NO_SNAPSHOT, COLLECTION):
            if snapshot is not None:
                kind = "collection" if row.base_revision == COLLECTION else "session"
                raise TamperedError(
                    f"the {kind} has no snapshot: this row was added", reason=Reason.MISMATCH
                )
            return b"{}"
        if snapshot is None or snapshot.revision != row.base_revision:
            raise TamperedError(
                "it was removed, or an older row was replayed", reason=Reason.MISMATCH
            )
        context = snapshot_context(whose, row.id, row.base_revision)
        own_link, state = split_link(attempt.keys.open(user.tag, context, snapshot.state))
        if own_link != link:
            raise TamperedError(
                "it was replaced by the snapshot of another copy of the database",
                reason=Reason.MISMATCH,
            )
        return state


def check_events(
    session: StoredSession, history: list[Row], limit: int | None, known: int = 0
) -> None:
    """Sort the rows *history* by `seq`; check that each event of *session* occurs exactly once.

    If *limit* is given, *history* must contain only the last *limit* events.  If *known* is given,
    *history* must contain only the events after the first *known*.  Raises TamperedError if an
    event is missing, was added or was renumbered.
    """
    first = known if limit is None else max(0, session.revision - limit)
    expected = list(range(first, session.revision))
    if [row[EVENT_SEQ] for row in history] != expected:
        # A UNION ALL guarantees no order.  SQLite stores any type in any column, so a modified
        # `seq` can have a type that cannot be compared with an integer.  Therefore, sort by texts.
        # The texts are padded with zeros, so they have the same order as the integers.
        history.sort(
            key=lambda row: f"{row[EVENT_SEQ]:020}" if isinstance(row[EVENT_SEQ], int) else ""
        )
    if [row[EVENT_SEQ] for row in history] != expected:
        kinds = ("items", "collection") if session.is_collection else ("events", "session")
        raise TamperedError(
            f"{kinds[0]} {first} to {session.revision - 1} of this {kinds[1]} are expected, each "
            "once; some were added, removed or renumbered",
            reason=Reason.MISMATCH,
            table=events.name,
            row=session.id,
        )


def open_events(
    attempt: Attempt, session: StoredSession, history: Iterable[Row], previous: bytes | None
) -> tuple[list[bytes], bytes | None]:
    """Decrypt the events in *history*; check that each contains the link of the event before it.

    A history may have thousands of events.  Therefore, this function computes the beginning of the
    context only once, and looks up the cipher only if an event names another data key than the
    event before it.

    Args:
        attempt: Contains the data keys and the ids of the session.
        session: The session of the events.
        history: Rows of events as the driver returns them, sorted by `seq`.
        previous: The link of the event before the first; `NO_LINK` if there is no such event, and
            None if that event was not read.

    Returns:
        The events' plaintexts without flags and links, and the link of the last event.

    Raises:
        DecryptionError: An event was tampered with, or belongs to another copy of the database.
    """
    who, session_row = attempt.who, session.id
    parts = who.event_parts
    header, key = None, None
    opened = []
    began = perf_counter()
    for row in history:
        seq, record = row[EVENT_SEQ], row[EVENT_RECORD]
        try:
            if key is None or type(record) is not bytes or record[:HEADER_LENGTH] != header:
                key = attempt.keys.key_of(who.user_tag, record)
                header = record[:HEADER_LENGTH]
            context = records.numbered_context(parts, session_row, seq, row[EVENT_TIME])
            plaintext = open_with_flags(record, context, key.cipher)
            if previous is not None and not plaintext.startswith(previous, EVENT_PREVIOUS.start):
                raise _other_history()
            previous = plaintext[EVENT_LINK]
            opened.append(plaintext[EVENT_REST])
        except DecryptionError as error:
            raise error.located(events.name, f"{session_row}, {seq}") from None
    if key is not None and attempt.keys.operation is not None:
        attempt.keys.count_decrypted(key, sum(map(len, opened)), began)
    return opened, previous


def check_head(attempt: Attempt, session: StoredSession, last: bytes | None) -> None:
    """Check that *last*, the link of the last event, is the link that the session's row contains.

    If *last* is None, the last event was not read, and nothing is checked.  If the links differ,
    raise TamperedError.  If the links are equal, set `has_proven_head` of the cached session, so
    that the next append needs no read.
    """
    if last is None:
        return
    if last != session.head:
        raise _other_history().located(sessions.name, session.id)
    attempt.remember(partial(attempt.cache.prove_head, session))


def _other_history() -> TamperedError:
    return TamperedError(
        "its events are not the ones it was written with: a row was replaced by that of another "
        "copy of the database",
        reason=Reason.MISMATCH,
    )


def seal_app(attempt: Attempt, app: Owner) -> bytes:
    context = app_context(attempt.who.app_name, app.tag, app.id, app.version)
    return attempt.keys.seal(app.tag, context, _owner_fields(app))


def seal_user(attempt: Attempt, user: Owner) -> bytes:
    context = user_context(attempt.who.app_name, user.tag, user.id, user.app_row, user.version)
    return attempt.keys.seal(user.tag, context, with_id(user.user_id, _owner_fields(user)))


def packing_of_owner(attempt: Attempt, owner: Owner, stored: bytes) -> Packing:
    """Return how *stored*, the record in the row of *owner*, is compressed and padded."""
    app_name = attempt.who.app_name
    if owner.user_id or owner.app_row:
        context = user_context(app_name, owner.tag, owner.id, owner.app_row, owner.version)
    else:
        context = app_context(app_name, owner.tag, owner.id, owner.version)
    return packing_of(attempt.keys.open_whole(owner.tag, context, stored))


def _owner_fields(owner: Owner) -> bytes:
    return records.join_owner(OwnerFields(owner.link, owner.key_ids, owner.state))


def seal_witness(attempt: Attempt, owner: bytes, tag: bytes, number: int, link: bytes) -> bytes:
    """Return the record of the version witness that confirms the row with the blind index *tag*.

    A data key of *owner* encrypts the record.  The plaintext is *link*, and the context contains
    *number*.
    """
    context = witness_context(attempt.who.app_name, tag, number)
    return attempt.keys.seal_witness(owner, context, link)


def seal_session(attempt: Attempt, session: StoredSession) -> bytes:
    who, row = attempt.who, session
    numbers = (row.id, row.user_row, row.revision, row.base_revision)
    times = (row.created_at, row.updated_at, row.expires_at)
    context = records.numbered_context(who.session_parts, *numbers, *times)
    fields = SessionFields(session.head, session.snapshot_link, session.overlay)
    plaintext = with_id(who.session_id, records.join_session(fields))
    return attempt.keys.seal(who.user_tag, context, plaintext)


def seal_snapshot(
    attempt: Attempt, session_row: int, revision: int, link: bytes, state: bytes
) -> bytes:
    context = snapshot_context(attempt.who, session_row, revision)
    return attempt.keys.seal(attempt.who.user_tag, context, link + state)


def seal_event(
    attempt: Attempt, session: StoredSession, seq: int, time: int, link: bytes, event: bytes
) -> bytes:
    """Return the record of a new event, which follows the last event of *session*.

    *seq* is the number of the new event, *time* its time in microseconds, *link* its link, and
    *event* the rest of its plaintext.
    """
    context = records.numbered_context(attempt.who.event_parts, session.id, seq, time)
    return attempt.keys.seal(attempt.who.user_tag, context, link + session.head + event)


def seal_events(
    attempt: Attempt,
    session_row: int,
    first: int,
    new: Iterable[tuple[bytes, int]],
    links: Iterable[bytes],
    previous: bytes,
) -> list[dict[str, object]]:
    """Return the rows of new events that follow each other.

    Args:
        attempt: Contains the data keys and the ids of the session.
        session_row: The row id of the session.
        first: The `seq` of the first event.
        new: The plaintext and the time of each event.
        links: The link of each event.
        previous: The link of the event before the first; `NO_LINK` if there is no such event.
    """
    parts, owner, seal = attempt.who.event_parts, attempt.who.user_tag, attempt.keys.seal
    rows: list[dict[str, object]] = []
    for seq, ((event, at), link) in enumerate(zip(new, links, strict=True), first):
        context = records.numbered_context(parts, session_row, seq, at)
        record = seal(owner, context, link + previous + event)
        rows.append({"session_row": session_row, "seq": seq, "time": at, "event": record})
        previous = link
    return rows


def seal_replacement(attempt: Attempt, session: StoredSession, row: Row, event: bytes) -> bytes:
    """Return a record of *event* that can replace the record in *row*.

    *event* is the new plaintext without links.  The new record contains the same links as the old
    record.  Raises DecryptionError if *row* was tampered with.
    """
    seq, record = row[EVENT_SEQ], row[EVENT_RECORD]
    with naming(events.name, f"{session.id}, {seq}"):
        context = records.numbered_context(
            attempt.who.event_parts, session.id, seq, row[EVENT_TIME]
        )
        plaintext = attempt.keys.open(attempt.who.user_tag, context, record)
    return attempt.keys.seal(attempt.who.user_tag, context, plaintext[: 2 * LINK_LENGTH] + event)


class naming:  # noqa: N801 - used like a function: `with naming(...)`
    """A context manager that adds the table and the row to a `DecryptionError` in its block."""

    __slots__ = ("_row", "_table")

    def __init__(self, table: str, row: object) -> None:
        self._table = table
        self._row = row

    def __enter__(self) -> None:
        pass

    def __exit__(self, _type: object, error: object, _traceback: object) -> None:
        if isinstance(error, DecryptionError):
            raise error.located(self._table, self._row) from None


def _unchanged(
    attempt: Attempt, cache: Lru[bytes, Seen[R, V]], found: Found, tag: bytes, row: R
) -> V | None:
    """Return the cached value of *row*; None if the row or its version witness has changed."""
    seen = cache.get(tag)
    if seen and seen.row == row and seen.witness == found.witnesses.get(tag):
        return seen.value
    return None


def _check_witness(
    attempt: Attempt, found: Found, owner: bytes, tag: bytes, number: int, link: bytes
) -> None:
    """Raise DecryptionError unless the version witness of the row with *tag* confirms the row.

    The witness must be encrypted with a data key of *owner* (a tag), and its number and its link
    must be *number* and *link*.  The number alone is not enough: two copies of a database may
    contain different rows with the same version number.  The links of these rows differ.
    """
    witness = found.witnesses.get(tag)
    if witness is None:
        raise TamperedError(
            f"its version witness (row of {witnesses.name}) was removed", reason=Reason.MISSING
        )
    try:
        context = witness_context(attempt.who.app_name, tag, witness.number)
        proven = attempt.keys.open_witness(owner, context, witness.seal)
    except DecryptionError as error:
        raise error.about(f"its version witness, {witnesses.name} row {tag.hex()}") from None
    if witness.number != number:
        raise TamperedError(
            f"its version witness has number {witness.number} instead of {number}: an older row "
            "was replayed",
            reason=Reason.MISMATCH,
        )
    if proven != link:
        raise TamperedError(
            "its version witness belongs to another copy of the database", reason=Reason.MISMATCH
        )


def _version(value: Owner | StoredSession) -> int:
    return value.revision if isinstance(value, StoredSession) else value.version


def _reject_older(attempt: Attempt, seen: Seen[Any, Any] | None, row_id: int, version: int) -> None:
    """Raise TamperedError if a higher version of the row was cached before the attempt began.

    *seen* is the cached row, if any.  If the row was cached during the attempt, the attempt may
    have read the stored row before another task changed it, so a lower version is no error.
    """
    if seen is None or seen.time > attempt.began or seen.value.id != row_id:
        return
    newest = _version(seen.value)
    if version < newest:
        raise TamperedError(
            f"its version is {version}, and this process has read version {newest}: an older row "
            "was replayed; if the database was restored from a backup, restart the service",
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
