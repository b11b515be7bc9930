"""Sealing rows and opening them: what each is bound to, and what a reader refuses.

Each place, in the order of its parts, is in docs/format.md.
"""

from collections.abc import Iterable

from adk_secure_sessions.db.protocol import Row
from adk_secure_sessions.errors import (
    DecryptionError,
    Reason,
    TamperedError,
)
from adk_secure_sessions.formats.records import (
    HEADER_LENGTH,
    context,
    context_parts,
    encode_text,
    numbered_context,
    open_record,
    split_id,
    with_id,
)
from adk_secure_sessions.lru import Lru
from adk_secure_sessions.storage.rows import (
    NO_BASE,
    Context,
    Found,
    Identity,
    Owner,
    Seen,
    StoredSession,
    V,
)
from adk_secure_sessions.storage.schema import apps, bases, events, sessions, users, witnesses

_NO_ROW: Row = (None,) * 10


def app_place(app_name: str, tag: bytes, row: int, version: int) -> bytes:
    return context(("app", app_name, tag), row, version)


def user_place(app_name: str, tag: bytes, row: int, app_row: int, version: int) -> bytes:
    return context(("user", app_name, tag), row, app_row, version)


def witness_place(app_name: str, tag: bytes, number: int) -> bytes:
    return context(("witness", app_name, tag), number)


def session_place(app_name: str, user_id: str, tag: bytes, *numbers: int) -> bytes:
    """*numbers*: id, user_row, revision, base_revision, created_at, updated_at."""
    return context(("session", app_name, user_id, tag), *numbers)


def base_place(who: Identity, session_row: int, revision: int) -> bytes:
    return context(("base", who.app_name, who.user_id, who.session_id), session_row, revision)


def event_place(who: Identity, session_row: int, seq: int, time: int) -> bytes:
    return context(_event_parts(who), session_row, seq, time)


def _event_parts(who: Identity) -> tuple[str, ...]:
    return ("event", who.app_name, who.user_id, who.session_id)


def open_app(context: Context, found: Found) -> Owner | None:
    """The app's row, or None if there is none and nothing says that there was."""
    who, row = context.who, next(iter(found.apps), None)
    if row is None:
        _refuse_orphan(found, who.app_tag, apps.name)
        return None
    app = _seen(context.memo.owners, found, who.app_tag, row)
    if app is None:
        _, row_id, version, *_, name, stored = row
        with naming(apps.name, row_id):
            if name != encode_text(who.app_name):
                raise TamperedError("its app_name was modified", reason=Reason.WRONG_OWNER)
            where = app_place(who.app_name, who.app_tag, row_id, version)
            state = context.keys.open(who.app_tag, where, stored)
            _check_witness(context, found, who.app_tag, who.app_tag, version)
        app = Owner(row_id, who.app_tag, 0, "", version, state)
        _remember(context.memo.owners, found, app.tag, row, app)
    return app


def open_user(context: Context, found: Found) -> Owner | None:
    """The user's row, or None if there is none and nothing says that there was."""
    row = next(iter(found.users), None)
    if row is None:
        _refuse_orphan(found, context.who.user_tag, users.name)
        context.forget_user()
        return None
    user = open_user_row(context, found, row)
    if user.tag != context.who.user_tag or user.user_id != context.who.user_id:
        raise TamperedError(
            "not the requested user", reason=Reason.WRONG_OWNER, table=users.name, row=user.id
        )
    return user


def open_user_row(context: Context, found: Found, row: Row) -> Owner:
    """A user's row, whoever the user is."""
    _, row_id, app_row, version, *_, tag, stored = row
    user = _seen(context.memo.owners, found, tag, row)
    if user is None:
        with naming(users.name, row_id):
            where = user_place(context.who.app_name, tag, row_id, app_row, version)
            user_id, state = split_id(context.keys.open(tag, where, stored))
            _check_witness(context, found, tag, tag, version)
        user = Owner(row_id, tag, app_row, user_id, version, state)
        _remember(context.memo.owners, found, tag, row, user)
    return user


def open_session(context: Context, found: Found, user: Owner | None) -> StoredSession | None:
    """The session asked for, or None if there is none and nothing says that there was."""
    tag, row = context.who.session_tag, next(iter(found.sessions), None)
    if row is None:
        _refuse_orphan(found, tag, sessions.name)
        return None
    if user is None:
        raise TamperedError(
            "its user's row was removed", reason=Reason.MISSING, table=sessions.name, row=row[1]
        )
    session = _open_session(context, found, user, row, witnessed=True)
    if session.tag != tag or session.session_id != context.who.session_id:
        raise TamperedError(
            "not the requested session",
            reason=Reason.WRONG_OWNER,
            table=sessions.name,
            row=session.id,
        )
    return session


def open_listed_session(context: Context, found: Found, user: Owner, row: Row) -> StoredSession:
    """A session in a listing.

    Its last event says that it was not deleted, or where it has none, its witness.
    """
    return _open_session(context, found, user, row, witnessed=False)


def _open_session(
    context: Context, found: Found, user: Owner, row: Row, *, witnessed: bool
) -> StoredSession:
    """Open *row*, or recall what it opened to; *witnessed*: though it has events."""
    memo = context.memo.sessions
    seen = memo.get(row[8])
    if seen and seen.row == row and seen.value.user_row == user.id:
        session = seen.value
        needed = witnessed or not session.revision
        if not needed or seen.witness == found.witnesses.get(session.tag):
            return session
    session = _open_session_row(context, found, user, row)
    if witnessed or not session.revision:
        with naming(sessions.name, session.id):
            _check_witness(context, found, user.tag, session.tag, session.id)
    if session.base_revision == NO_BASE:  # a base is a row of its own, and may be large
        _remember(memo, found, session.tag, row, session)
    return session


def _open_session_row(context: Context, found: Found, user: Owner, row: Row) -> StoredSession:
    """A session of *user*, with its base; its last event must be where its revision says."""
    _, row_id, *numbers, head, tag, stored = row
    user_row, revision, base_revision, created_at, updated_at = numbers
    app_name = context.who.app_name
    with naming(sessions.name, row_id):
        where = session_place(app_name, user.user_id, tag, row_id, *numbers)
        session_id, overlay = split_id(context.keys.open(user.tag, where, stored))
        if user_row != user.id:
            raise TamperedError("it belongs to another user", reason=Reason.WRONG_OWNER)
        if head != revision - 1:
            raise TamperedError(
                f"revision {revision} requires a last event {revision - 1}, storage has {head}: "
                "events were added or removed, or an older row was replayed",
                reason=Reason.MISMATCH,
            )
    base = b"{}"
    if base_revision == NO_BASE:
        if row_id in found.bases:
            raise TamperedError(
                "the session has no snapshot: this row was added",
                reason=Reason.MISMATCH,
                table=bases.name,
                row=row_id,
            )
    else:
        whose = context.who._replace(user_id=user.user_id, session_id=session_id)
        with naming(bases.name, row_id):
            _, _, found_revision, *_, stored_base, _ = found.bases.get(row_id) or _NO_ROW
            if found_revision != base_revision:
                raise TamperedError(
                    "it was removed, or an older row was replayed", reason=Reason.MISMATCH
                )
            where = base_place(whose, row_id, base_revision)
            base = context.keys.open(user.tag, where, stored_base)
    return StoredSession(
        row_id, user_row, tag, session_id, revision, base_revision, created_at, updated_at,
        overlay, base, stored,
    )  # fmt: skip


def check_events(session: StoredSession, history: list[Row], limit: int | None) -> None:
    """Refuse gaps and duplicates: *history* must be all, or the last *limit*, of *session*."""
    first = 0 if limit is None else max(0, session.revision - limit)
    expected = list(range(first, session.revision))
    if [row[1] for row in history] != expected:
        # A UNION ALL promises no order.  By text: SQLite keeps any type in any column.
        history.sort(key=lambda row: f"{row[1]:020}" if isinstance(row[1], int) else "")
    if [row[1] for row in history] != expected:
        raise TamperedError(
            f"events {first} to {session.revision - 1} of this session are expected, each once; "
            "some were added, removed or renumbered",
            reason=Reason.MISMATCH,
            table=events.name,
            row=session.id,
        )


def open_events(context: Context, session: StoredSession, history: Iterable[Row]) -> list[bytes]:
    """The plaintexts of events.  Runs for each of a long history: what repeats is done once."""
    who, session_row = context.who, session.id
    parts = context_parts(_event_parts(who))
    header, cipher = None, None
    opened = []
    for row in history:
        seq, stored = row[1], row[8]
        try:
            if cipher is None or type(stored) is not bytes or stored[:HEADER_LENGTH] != header:
                cipher = context.keys.cipher(who.user_tag, stored)
                header = stored[:HEADER_LENGTH]
            opened.append(
                open_record(stored, numbered_context(parts, session_row, seq, row[2]), cipher)
            )
        except DecryptionError as error:
            failure = error.located(events.name, f"{session_row}, {seq}")
        else:
            continue
        raise failure
    return opened


def seal_app(context: Context, app: Owner) -> bytes:
    where = app_place(context.who.app_name, app.tag, app.id, app.version)
    return context.keys.seal(app.tag, where, app.state)


def seal_user(context: Context, user: Owner) -> bytes:
    where = user_place(context.who.app_name, user.tag, user.id, user.app_row, user.version)
    return context.keys.seal(user.tag, where, with_id(user.user_id, user.state))


def seal_witness(context: Context, owner: bytes, tag: bytes, number: int) -> bytes:
    return context.keys.seal(owner, witness_place(context.who.app_name, tag, number), b"")


def seal_session(context: Context, session: StoredSession) -> bytes:
    who, row = context.who, session
    numbers = (row.id, row.user_row, row.revision, row.base_revision)
    where = session_place(
        who.app_name, who.user_id, row.tag, *numbers, row.created_at, row.updated_at
    )
    return context.keys.seal(who.user_tag, where, with_id(who.session_id, session.overlay))


def seal_base(context: Context, session_row: int, revision: int, state: bytes) -> bytes:
    where = base_place(context.who, session_row, revision)
    return context.keys.seal(context.who.user_tag, where, state)


def seal_event(context: Context, session_row: int, seq: int, time: int, event: bytes) -> bytes:
    where = event_place(context.who, session_row, seq, time)
    return context.keys.seal(context.who.user_tag, where, event)


class naming:  # noqa: N801 - reads as a statement
    """Names the row in whatever refusal is raised inside."""

    __slots__ = ("_row", "_table")

    def __init__(self, table: str, row: object) -> None:
        self._table = table
        self._row = row

    def __enter__(self) -> None:
        pass

    def __exit__(self, _type: object, error: object, _traceback: object) -> None:
        if isinstance(error, DecryptionError):
            raise error.located(self._table, self._row) from None


def _seen(memo: Lru[bytes, Seen[V]], found: Found, tag: bytes, row: Row) -> V | None:
    """What *row* opened to before, if it and its witness are still the same bytes."""
    seen = memo.get(tag)
    if seen and seen.row == row and seen.witness == found.witnesses.get(tag):
        return seen.value
    return None


def _remember(memo: Lru[bytes, Seen[V]], found: Found, tag: bytes, row: Row, value: V) -> None:
    memo.put(tag, Seen(row, found.witnesses.get(tag), value))


def _check_witness(context: Context, found: Found, owner: bytes, tag: bytes, number: int) -> None:
    witness = found.witnesses.get(tag)
    if witness is None:
        raise TamperedError(
            f"its version witness (row of {witnesses.name}) was removed", reason=Reason.MISSING
        )
    _, witnessed, *_, seal = witness
    try:
        where = witness_place(context.who.app_name, tag, witnessed)
        context.keys.open(owner, where, seal)
    except DecryptionError as error:
        raise error.about(f"its version witness, {witnesses.name} row {tag.hex()}") from None
    if witnessed != number:
        raise TamperedError(
            f"its version is {number} and its version witness says {witnessed}: an older row was "
            "replayed",
            reason=Reason.MISMATCH,
        )


def _refuse_orphan(found: Found, tag: bytes, table: str) -> None:
    if tag in found.witnesses:
        raise TamperedError(
            f"the row of {table} with tag {tag.hex()} was removed or its tag was modified: its "
            "version witness is still stored",
            reason=Reason.MISSING,
        )
