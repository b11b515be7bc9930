"""Encrypt and decrypt rows, and check that rows of one read belong together."""

import struct
from collections.abc import Iterable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from adk_secure_sessions.db.protocol import Row
from adk_secure_sessions.errors import DecryptionError, Reason, TamperedError
from adk_secure_sessions.formats import records
from adk_secure_sessions.formats.records import (
    EVENT_LINK,
    EVENT_PREVIOUS,
    EVENT_REST,
    HEADER_LENGTH,
    NO_LINK,
    context_with_prefix,
    encode_text,
    join_id,
    open_sealed,
    pack_event_integers,
    split_link,
    wrong_integer_error,
)
from adk_secure_sessions.storage.operation_runner import Attempt
from adk_secure_sessions.storage.queries import (
    EVENT_RECORD,
    EVENT_SEQ,
    EVENT_TIME,
    SESSION_ID,
    SESSION_LAST_SEQ,
    SESSION_TAG,
    SESSION_USER,
    QueryRows,
    listed_witness,
    session_row,
)
from adk_secure_sessions.storage.row_cache import CachedRow
from adk_secure_sessions.storage.schema import (
    APPS,
    EVENTS,
    SESSIONS,
    SNAPSHOTS,
    USERS,
    WITNESSES,
    AppRow,
    EventRow,
    Owner,
    SealedTable,
    SessionRow,
    SnapshotRow,
    StoredSession,
    UserRow,
    WitnessRow,
    locating_errors,
)

R = TypeVar("R", bound=tuple[Any, ...])
S = TypeVar("S", bound=Sequence[Any])

TABLES_OF_ROWS: dict[type, SealedTable[Any]] = {AppRow: APPS, UserRow: USERS, SessionRow: SESSIONS}


def open_app(attempt: Attempt, rows: QueryRows) -> Owner | None:
    """Return the app, or None if it is not stored; raise DecryptionError if its row was tampered
    with or removed: its version witness is then still stored.
    """
    identity = attempt.identity
    row = _only_row(rows, rows.apps, identity.app_tag, APPS)
    if row is None:
        return None
    if row.app_name != encode_text(identity.app_name):
        raise TamperedError("its app_name was modified", Reason.WRONG_OWNER, APPS.name, row.id)
    return open_owner(attempt, rows, row)


def open_user(attempt: Attempt, rows: QueryRows) -> Owner | None:
    """Return the user, as `open_app` the app; remove one that is not stored from the caches."""
    row = _only_row(rows, rows.users, attempt.identity.user_tag, USERS)
    if row is None:
        attempt.forget_user()
        return None
    user = open_owner(attempt, rows, row)
    if user.row.tag != attempt.identity.user_tag or user.user_id != attempt.identity.user_id:
        raise TamperedError("not the requested user", Reason.WRONG_OWNER, USERS.name, user.row.id)
    return user


def open_owner(attempt: Attempt, rows: QueryRows, row: AppRow | UserRow) -> Owner:
    """Return the decrypted *row* of the app, or of any of its users; the cached one if nothing has
    changed.
    """
    cache = attempt.row_cache.users if type(row) is UserRow else attempt.row_cache.apps
    cached, witness = cache.get(row.tag), rows.witnesses.get(row.tag)
    if cached and cached.value.row == row and witness and cached.witness == witness:
        owner = cached.value
    else:
        table, user_id = TABLES_OF_ROWS[type(row)], ""
        with locating_errors(table.name, row.id):
            context = table.context_of_ids(attempt.identity.encoded_app, row)
            fields = attempt.keys.open(row.tag, context, row.record)
            if isinstance(row, UserRow):
                user_id, fields = records.split_id(fields)
            link, key_ids, state = records.split_owner(fields)
            _check_witness(attempt, witness, row.tag, row.version, link)
            _reject_older(attempt, cached, row.id, row.version)
        owner = Owner(row, user_id, state, link, key_ids)
        attempt.after_commit(partial(attempt.row_cache.put_owner, witness, owner))
    if attempt.chooses_keys:
        attempt.keys.choose_current(row.tag, owner.key_ids)
    return owner


def open_owners(attempt: Attempt, rows: QueryRows) -> tuple[Owner | None, Owner | None]:
    """Return the app and the user, or None for one that is not stored; see `require_app`."""
    app, user = open_app(attempt, rows), open_user(attempt, rows)
    return (require_app(app, user) if user else app), user


def require_app(app: Owner | None, user: Owner) -> Owner:
    """Return *app*; raise TamperedError if it is not the app that the user's row refers to."""
    if app is None or app.row.id != user.app_row_id:
        raise TamperedError("its app's row was removed", Reason.MISSING, USERS.name, user.row.id)
    return app


def stored_twice_error(table: str, row: int) -> TamperedError:
    """Return the error for two rows with one tag: the column has lost its UNIQUE constraint."""
    return TamperedError("it is stored twice", Reason.MISMATCH, table, row)


def open_session(attempt: Attempt, rows: QueryRows, user: Owner | None) -> StoredSession | None:
    """Return the session; None if it is not stored, which also removes it from the caches.  Raise
    DecryptionError if one of its rows, or only its user's row, was tampered with or removed.
    """
    tag = attempt.identity.session_tag
    stored = _only_row(rows, rows.sessions, tag, SESSIONS, id_at=SESSION_ID)
    if stored is None:
        attempt.forget_session()
        return None
    row_id = stored[SESSION_ID]
    if user is None:
        raise TamperedError("its user's row was removed", Reason.MISSING, SESSIONS.name, row_id)
    session = open_session_row(attempt, rows, user, stored)
    if session.row.tag != tag or session.session_id != attempt.identity.session_id:
        kind = "collection" if attempt.identity.is_collection else "session"
        raise TamperedError(f"not the requested {kind}", Reason.WRONG_OWNER, SESSIONS.name, row_id)
    return session


def open_session_row(attempt: Attempt, rows: QueryRows, user: Owner, stored: Row) -> StoredSession:
    """Return the decrypted session in *stored*, a row of `rows.sessions`: any session of *user*.

    If the row and its version witness equal the cached ones, the cached session is returned, but
    not if it needs a snapshot, which is never cached.
    """
    cache = attempt.row_cache
    cached, unchanged = cache.sessions.get(stored[SESSION_TAG]), None
    if cached and cached.listed == stored and stored[SESSION_USER] == user.row.id:
        return cached.value
    row, in_listing = session_row(stored), listed_witness(stored)
    witness = in_listing or rows.witnesses.get(row.tag)
    if (
        cached
        and cached.value.row == row  # so its revision is a number
        and row.user_row == user.row.id
        and stored[SESSION_LAST_SEQ] == row.last_seq
    ):
        unchanged, has_snapshot = cached, cached.value.snapshot is not None
        is_complete = has_snapshot or not rows.reads_snapshots
        if is_complete and (known := cached.witness) and known == witness:
            if in_listing and has_snapshot:
                # With the cached bytes, which are equal: those of the driver are not kept, nor the
                # objects to which a row of SQLAlchemy refers.
                listed = (*stored[:SESSION_TAG], known.tag, cached.value.row.record, known.record)
                cache.sessions.put(row.tag, cached._replace(listed=listed))
            return cached.value
    session = _decrypt_session(attempt, rows, user, row, stored[SESSION_LAST_SEQ])
    with locating_errors(SESSIONS.name, row.id):
        _check_witness(attempt, witness, user.row.tag, row.id, b"")
        _reject_older(attempt, cached, row.id, row.revision)
    is_verified = not row.revision or bool(unchanged and unchanged.last_event_is_verified)
    put = partial(cache.put_session, session, witness, is_verified=is_verified)
    attempt.after_commit(put)
    return session


def _decrypt_session(
    attempt: Attempt, rows: QueryRows, user: Owner, row: SessionRow, last_seq: object
) -> StoredSession:
    """Decrypt a session of *user*, and check that its revision is the number of its events."""
    with locating_errors(SESSIONS.name, row.id):
        context = SESSIONS.context((attempt.identity.app_name, user.user_id), row)
        plaintext = attempt.keys.open(user.row.tag, context, row.record)
        session_id, fields = records.split_id(plaintext)
        last_link, snapshot_link, overlay = records.split_session(fields)
        if row.user_row != user.row.id:
            raise TamperedError("it belongs to another user", Reason.WRONG_OWNER)
        has_snapshot = row.has_snapshot
        if not has_snapshot and snapshot_link != NO_LINK:
            raise TamperedError(
                "it names a snapshot and has none: its writer is faulty", Reason.MALFORMED
            )
        if last_seq != row.last_seq:
            last = last_seq if isinstance(last_seq, int) else "none with a number"
            item = "item" if row.is_collection else "event"
            raise TamperedError(
                f"revision {row.revision} requires a last {item} {row.revision - 1}, storage has "
                f"{last}: {item}s were added or removed, or an older row was replayed",
                Reason.MISMATCH,
            )
    snapshot = None
    if rows.reads_snapshots or not has_snapshot:
        snapshot = _open_snapshot(attempt, rows, user, row, session_id, snapshot_link)
    return StoredSession(row, session_id, overlay, snapshot, last_link, snapshot_link)


def _open_snapshot(
    attempt: Attempt, rows: QueryRows, user: Owner, row: SessionRow, session_id: str, link: bytes
) -> bytes:
    snapshot = rows.snapshots.get(row.id)
    with locating_errors(SNAPSHOTS.name, row.id):
        if not row.has_snapshot:
            if snapshot is not None:
                kind = "collection" if row.is_collection else "session"
                raise TamperedError(
                    f"the {kind} has no snapshot: this row was added", Reason.MISMATCH
                )
            return b"{}"
        if snapshot is None or snapshot.revision != row.base_revision:
            raise TamperedError("it was removed, or an older row was replayed", Reason.MISMATCH)
        ids = (attempt.identity.app_name, user.user_id, session_id)
        context = SNAPSHOTS.context(ids, snapshot)
        own_link, state = split_link(attempt.keys.open(user.row.tag, context, snapshot.record))
        if own_link != link:
            raise TamperedError(
                "it was replaced by the snapshot of another copy of the database", Reason.MISMATCH
            )
        return state


def sort_and_check_events(
    session: StoredSession, event_rows: list[Row], first: int, last: int
) -> None:
    """Sort *event_rows* by `seq`; raise TamperedError unless each event of *session* from
    *first* to *last* occurs exactly once, and no other.
    """
    expected = list(range(first, last + 1))
    if [row[EVENT_SEQ] for row in event_rows] == expected:
        return
    # A UNION ALL guarantees no order.  A modified `seq` may have a type that cannot be compared
    # with an integer.  So sort by texts: padded with zeros, they have the order of the numbers.
    event_rows.sort(
        key=lambda row: f"{row[EVENT_SEQ]:020}" if isinstance(row[EVENT_SEQ], int) else ""
    )
    if [row[EVENT_SEQ] for row in event_rows] != expected:
        kinds = ("items", "collection") if session.row.is_collection else ("events", "session")
        raise TamperedError(
            f"{kinds[0]} {first} to {last} of this {kinds[1]} are expected, each once; some were "
            "added, removed or renumbered",
            Reason.MISMATCH,
            EVENTS.name,
            session.row.id,
        )


def open_events(
    attempt: Attempt, session: StoredSession, event_rows: Iterable[Row], previous: bytes | None
) -> tuple[list[bytes], bytes | None]:
    """Decrypt *event_rows*; check that each event contains the link of the event before it.

    *event_rows* are as the driver returns them, sorted by `seq`.  *previous* is the link of the
    event before the first: `NO_LINK` if there is no such event, and None if that event was not
    read.  Return the plaintexts without flags and links, and the link of the last event.

    For speed, the cipher is looked up, and the beginning of the associated data computed, only if
    an event names another data key than the event before it.
    """
    identity, session_row_id = attempt.identity, session.row.id
    header, prefix, key = None, b"", None
    plaintexts = []
    began = perf_counter()
    for row in event_rows:
        seq, record = row[EVENT_SEQ], row[EVENT_RECORD]
        try:
            if key is None or type(record) is not bytes or record[:HEADER_LENGTH] != header:
                key = attempt.keys.key_of(identity.user_tag, record)
                header = record[:HEADER_LENGTH]
                prefix = header + identity.event_prefix
            associated_data = prefix + pack_event_integers(session_row_id, seq, row[EVENT_TIME])
            plaintext = open_sealed(record[HEADER_LENGTH:], associated_data, key.cipher)
            if previous is not None and plaintext[EVENT_PREVIOUS] != previous:
                raise other_history_error()
            previous = plaintext[EVENT_LINK]
            plaintexts.append(plaintext[EVENT_REST])
        except struct.error:
            raise wrong_integer_error().located(EVENTS.name, f"{session_row_id}, {seq}") from None
        except DecryptionError as error:
            raise error.located(EVENTS.name, f"{session_row_id}, {seq}") from None
    if key is not None and attempt.keys.measured_call is not None:
        attempt.keys.count_work("decrypt", key, sum(map(len, plaintexts)), began)
    return plaintexts, previous


def verify_last_link(attempt: Attempt, session: StoredSession, last: bytes | None) -> None:
    """Raise TamperedError unless *last*, the link of the last event, is that in the session's row.

    If *last* is None, the last event was not read, and nothing is checked.  If the links are equal,
    note in the row cache that the last event is verified: the next append then needs no read.
    """
    if last is None:
        return
    if last != session.last_link:
        raise other_history_error().located(SESSIONS.name, session.row.id)
    attempt.after_commit(partial(attempt.row_cache.set_last_event_verified, session))


def other_history_error() -> TamperedError:
    return TamperedError(
        "its events are not the ones it was written with: a row was replaced by that of another "
        "copy of the database",
        Reason.MISMATCH,
    )


def seal_owner(attempt: Attempt, owner: Owner) -> Owner:
    """Return *owner* with a new record in its row."""
    plaintext = records.join_owner(owner.link, owner.key_ids, owner.state)
    if owner.is_user:
        plaintext = join_id(owner.user_id, plaintext)
    row = owner.row
    new: Any = type(row)
    context = TABLES_OF_ROWS[new].context_of_ids(attempt.identity.encoded_app, row)
    record = attempt.keys.seal(row.tag, context, plaintext)
    return Owner(new(*row[:-1], record), *owner[1:])  # `_replace` takes four times as long


def seal_witness(
    attempt: Attempt, owner_tag: bytes, tag: bytes, number: int, link: bytes = b""
) -> WitnessRow:
    """Return the version witness that confirms the row with the blind index *tag*, encrypted with a
    data key of the owner with *owner_tag*.
    """
    context = WITNESSES.context_of_ids(attempt.identity.encoded_app, (tag, number))
    record = attempt.keys.seal(owner_tag, context, records.NO_FLAGS + link, has_flags=True)
    return WitnessRow(tag, number, record)


def seal_session(attempt: Attempt, session: StoredSession) -> StoredSession:
    """Return *session* with a new record in its row."""
    identity = attempt.identity
    context = context_with_prefix(identity.session_prefix, *SESSIONS.integers_of(session.row))
    fields = records.join_session(session.last_link, session.snapshot_link, session.overlay)
    plaintext = join_id(identity.session_id, fields)
    record = attempt.keys.seal(identity.user_tag, context, plaintext)
    row = SessionRow(*session.row[:-1], record)
    return StoredSession(row, *session[1:])


def seal_snapshot(attempt: Attempt, session: StoredSession) -> SnapshotRow:
    """Return the row of the session's snapshot, encrypted; the caller stores it."""
    row = SnapshotRow(session.row.id, session.row.base_revision, b"")
    plaintext = session.snapshot_link + (session.snapshot or b"{}")
    context = SNAPSHOTS.context(attempt.identity.ids, row)
    record = attempt.keys.seal(attempt.identity.user_tag, context, plaintext)
    return row._replace(record=record)


def seal_events(
    attempt: Attempt,
    session_row_id: int,
    first: int,
    new: Iterable[tuple[bytes, int]],
    links: Iterable[bytes],
    previous: bytes,
) -> list[EventRow]:
    """Return the rows of new events that follow each other, from the `seq` *first* on.

    *new* has the plaintext and the time of each event, and *previous* is the link of the event
    before the first.
    """
    prefix, tag, seal = attempt.identity.event_prefix, attempt.identity.user_tag, attempt.keys.seal
    rows = []
    for seq, ((event, at), link) in enumerate(zip(new, links, strict=True), first):
        context = prefix + pack_event_integers(session_row_id, seq, at)
        record = seal(tag, context, link + previous + event)
        rows.append(EventRow(session_row_id, seq, at, record))
        previous = link
    return rows


def _check_witness(
    attempt: Attempt, witness: WitnessRow | None, owner_tag: bytes, number: int, link: bytes
) -> None:
    """Raise DecryptionError unless *witness* has *number* and *link*: two copies of a database may
    contain different rows with the same number.
    """
    if witness is None:
        raise TamperedError(
            f"its version witness (row of {WITNESSES.name}) was removed", Reason.MISSING
        )
    try:
        context = WITNESSES.context_of_ids(attempt.identity.encoded_app, witness)
        witness_link = attempt.keys.open(owner_tag, context, witness.record, records.reject_flags)
    except DecryptionError as error:
        raise error.about(
            f"its version witness, {WITNESSES.name} row {witness.tag.hex()}"
        ) from None
    if witness.number != number:
        raise TamperedError(
            f"its version witness has number {witness.number} instead of {number}: an older row "
            "was replayed",
            Reason.MISMATCH,
        )
    if witness_link != link:
        raise TamperedError(
            "its version witness belongs to another copy of the database", Reason.MISMATCH
        )


def _reject_older(
    attempt: Attempt, cached: CachedRow[Any] | None, row_id: int, version: int
) -> None:
    """Raise TamperedError if a higher version of the row was cached before the attempt began."""
    if cached is None or attempt.was_overtaken_by(cached):
        return
    newest = cached.value.version
    if cached.value.row.id == row_id and version < newest:
        raise TamperedError(
            f"its version is {version}, and this process has read version {newest}: an older row "
            "was replayed; if the database was restored from a backup, restart the service",
            Reason.MISMATCH,
        )


def _only_row(
    rows: QueryRows, with_tag: list[S], tag: bytes, table: SealedTable[Any], id_at: int = 0
) -> S | None:
    """Return the row in *with_tag*, the rows of *table* with *tag*; None if it is not stored.

    *id_at* is the position of the row id.
    """
    if len(with_tag) == 1:
        return with_tag[0]
    if with_tag:
        raise stored_twice_error(table.name, with_tag[1][id_at])
    if tag in rows.witnesses:
        raise TamperedError(
            f"the row of {table.name} with tag {tag.hex()} was removed or its tag was modified: "
            "its version witness is still stored",
            Reason.MISSING,
        )
    return None
