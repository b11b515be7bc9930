"""Read sessions from a database of this package, which may have other keys."""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from functools import partial
from operator import itemgetter

import sqlalchemy as sa

from adk_secure_sessions.concurrency import in_groups
from adk_secure_sessions.errors import DecryptionError, Reason
from adk_secure_sessions.formats.json_text import dump_state, load_state, read_event
from adk_secure_sessions.formats.records import EncodedEvent
from adk_secure_sessions.formats.times import time_now
from adk_secure_sessions.hiding import hides_locals
from adk_secure_sessions.maintenance.counts import clamped, select_count
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.row_scan import (
    ScannedSession,
    read_owner,
    scan_owners,
    scan_sessions,
)
from adk_secure_sessions.migration.sources import (
    SEE_LIMITS,
    Contents,
    Ids,
    ListedSession,
    Selection,
    SessionContent,
    Source,
    States,
    Unreadable,
    UnreadableIds,
)
from adk_secure_sessions.storage import key_operations
from adk_secure_sessions.storage.queries import first_rows, grouped
from adk_secure_sessions.storage.schema import (
    IS_COLLECTION,
    NEVER,
    apps,
    events,
    locating_errors,
    sessions,
    snapshots,
    users,
)
from adk_secure_sessions.storage.table_walk import rows_where

_BATCH = 8 * 2**20  # bytes of the stored records in one batch; a larger session is a batch alone
# The number of sessions that are read at the same time.  `Database` has at most 10 connections.
_AT_ONCE = 8


@hides_locals
class EncryptedSource(Source):
    """A database of this package, with its own root keys and backends.

    The source may have a key database, and may be in another database product than the target.
    Events are returned as they are stored: nothing is converted, and the installed google-adk need
    not be able to read them.  Expired sessions are omitted, and so are collections (artifacts and
    memory).  If the database has an audit trail, the command that reads it stores records there.

    As in a service, a session or state is only returned if its rows are authentic and belong
    together.  If the row of a session was removed, this class does not notice the removal: run
    `verify` on the source, which reports the version witness that belongs to no session.

    A session whose ids cannot be decrypted has the table and the row id instead of a session id,
    and its app name and user id are empty.  Such a session, and the state of an owner whose ids
    cannot be decrypted, are in every selection, because their app and their times are not known.

    Args:
        db: The database.  `close` closes it.

    Every method also raises the errors of opening a database: `ConfigurationError`,
    `WrongKeyError`, `PlaintextRefusedError` and `KeyServiceError`.
    """

    def __init__(self, db: Database) -> None:
        self._db = db

    @property
    def description(self) -> str:
        return "a database of adk-secure-sessions 2"

    async def count(self, selection: Selection) -> int:
        await self._db.keyring()
        since = -(2**63) if selection.since is None else selection.since
        parameters: dict[str, object] = {"now": time_now(), "since": since}
        if selection.app_name is not None:
            parameters["app_tag"] = (await self._db.runner.identify(selection.app_name)).app_tag
        query = _NUMBER_OF_SESSIONS if selection.app_name is None else _NUMBER_OF_SESSIONS_OF_APP
        ((number,),) = await self._db.runner.data_db.read(query, parameters)
        return int(number)

    async def sessions(self, selection: Selection) -> AsyncIterator[Sequence[ListedSession]]:
        async for page in scan_sessions(self._db):
            wanted = [session for session in page if _is_wanted(session, selection)]
            sizes = await self._sizes([session.id for session in wanted])
            sized = [(session, sizes[session.id]) for session in wanted]
            for batch in grouped(sized, itemgetter(1), len(sized), _BATCH):
                yield [_listed_session(session) for session, _size in batch]

    async def read(self, sessions: Sequence[ListedSession]) -> Contents:
        contents = await in_groups(_AT_ONCE, partial(_read_content, self._db), sessions)
        pairs = zip(sessions, contents, strict=True)
        return {session: content for session, content in pairs if content is not None}

    async def states(self, selection: Selection) -> AsyncIterator[States]:
        """Yield the states; if an owner cannot be decrypted, its last id is the table and row."""
        for table in (users, apps):
            async for rows in scan_owners(self._db, table):
                states: dict[Ids, bytes | Unreadable] = {}
                for row in rows:
                    try:
                        found = await read_owner(self._db, table, row)
                        if found is None or selection.app_name not in (None, found.app_name):
                            continue
                        app_name, owner, _ = found
                        ids = (app_name,) if table is apps else (app_name, owner.user_id)
                        with locating_errors(table.name, row.id):
                            load_state(owner.state)
                        states[ids] = owner.state
                    except DecryptionError as error:
                        name = f"{table.name} row {row.id}"
                        unreadable = UnreadableIds((name,) if table is apps else ("", name))
                        states[unreadable] = Unreadable(str(error))
                yield states

    async def has_artifacts_or_memory(self) -> bool:
        """Return whether the database has collections (artifacts or memory).

        `migrate` does not copy collections, because the contents of artifacts may be in an object
        store, encrypted with keys of their own.
        """
        await self._db.keyring()
        return bool(await self._db.runner.data_db.read(_ANY_COLLECTION, {}))

    async def close(self) -> None:
        await self._db.close()

    async def _sizes(self, ids: Sequence[int]) -> Counter[int]:
        """Return the sizes of events and snapshots, by row id of the session."""
        sizes: Counter[int] = Counter()
        for query in _SIZES_OF_EVENTS, _SIZES_OF_SNAPSHOTS:
            key = query.selected_columns[0]
            for row, size in await rows_where(self._db.runner.data_db.read, query, key, ids):
                sizes[row] += clamped(size)
        return sizes


def _is_wanted(session: ScannedSession, selection: Selection) -> bool:
    ids = session.ids_or_error
    if isinstance(ids, DecryptionError):
        return True
    if session.row.is_collection or session.row.expires_at <= time_now():
        return False
    is_recent = selection.since is None or session.row.updated_at >= selection.since
    return is_recent and selection.app_name in (None, ids.app_name)


def _listed_session(session: ScannedSession) -> ListedSession:
    ids, name = session.ids_or_error, f"{sessions.name} row {session.id}"
    if isinstance(ids, DecryptionError):
        return ListedSession("", "", name, "", str(ids))
    # Each change of a session increases its revision; one that is created again has another row id.
    return ListedSession(*ids, f"{session.id}.{session.row.revision}")


async def _read_content(db: Database, session: ListedSession) -> SessionContent | Unreadable | None:
    if session.reason:
        return Unreadable(session.reason)
    try:
        content = await session_content(db, *session.ids)
    except DecryptionError as error:
        return Unreadable(str(error))
    return None if content and content.has_expired else content


def _checked_events(plaintexts: list[bytes], session_row: int, seqs: Sequence[int]) -> list[bytes]:
    for plaintext, seq in zip(plaintexts, seqs, strict=True):
        with locating_errors(events.name, f"{session_row}, {seq}"):
            read_event(plaintext)
    return plaintexts


async def session_content(
    db: Database, app_name: str, user_id: str, session_id: str
) -> SessionContent | None:
    """Return a session of *db*, even if it has expired; None if it does not exist."""
    identity = await db.runner.identify(app_name, user_id, session_id)
    decrypted = await db.runner.run(key_operations.ReadWholeSession(identity, _checked_events))
    if decrypted is None:
        return None
    session, row = decrypted.session, decrypted.session.row
    with locating_errors(snapshots.name, row.id):
        snapshot = {} if session.snapshot is None else load_state(session.snapshot)
    with locating_errors(sessions.name, row.id):
        values = snapshot | load_state(session.overlay)
        try:
            state = dump_state(values)
        except ValueError:  # together they are larger than one record
            reason = Reason.MALFORMED
            raise DecryptionError(f"its state exceeds a limit: {SEE_LIMITS}", reason) from None
    history = [EncodedEvent(*pair) for pair in zip(decrypted.events, decrypted.times, strict=True)]
    expires_at = None if row.expires_at == NEVER else row.expires_at
    return SessionContent(state, history, row.created_at, row.updated_at, expires_at)


async def owner_state(db: Database, app_name: str, user_id: str | None = None) -> bytes:
    """Return the state of a user, or of an app, as JSON; `{}` if it is not stored."""
    of_user = user_id is not None
    identity = await db.runner.identify(app_name, user_id or "")
    decrypted_owner = await db.runner.run(key_operations.ReadOwner(identity, of_user=of_user))
    return decrypted_owner.owner.state if decrypted_owner else b"{}"


# --- statements ----------------------------------------------------------------------------------

_ANY_COLLECTION = first_rows(sa.select(sessions.c.id).where(IS_COLLECTION), 1)
# The row ids of sessions, and the bytes of their events and of their snapshots.
_SIZES_OF_EVENTS = sa.select(
    events.c.session_row, sa.func.sum(sa.func.length(events.c.event))
).group_by(events.c.session_row)
_SIZES_OF_SNAPSHOTS = sa.select(snapshots.c.session_row, sa.func.length(snapshots.c.state))
_NUMBER_OF_SESSIONS = select_count(
    sessions,
    ~IS_COLLECTION,
    sessions.c.expires_at > sa.bindparam("now"),
    sessions.c.updated_at >= sa.bindparam("since"),
)
_USERS_OF_APP = sa.select(users.c.id).join(apps, apps.c.id == users.c.app_row)
_NUMBER_OF_SESSIONS_OF_APP = _NUMBER_OF_SESSIONS.where(
    sessions.c.user_row.in_(
        _USERS_OF_APP.where(apps.c.tag == sa.bindparam("app_tag", type_=sa.LargeBinary))
    )
)
