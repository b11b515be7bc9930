"""What the rows are once opened, what one read found, and whose rows are meant."""

from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

from adk_secure_sessions.db.protocol import Row
from adk_secure_sessions.keys.blind_index import BlindIndex
from adk_secure_sessions.keys.data_keys import DataKeyRow, StagedKeys
from adk_secure_sessions.lru import Lru
from adk_secure_sessions.storage import queries as sql

V = TypeVar("V")

NO_BASE = -1


class Identity(NamedTuple):
    """Whose row is meant: the ids that ADK uses, and their tags."""

    app_name: str
    user_id: str
    session_id: str
    app_tag: bytes
    user_tag: bytes
    session_tag: bytes

    def tags(self) -> dict[str, object]:
        """All of it that a statement may be given: ids in clear do not reach the database."""
        return {
            "app_tag": self.app_tag,
            "user_tag": self.user_tag,
            "session_tag": self.session_tag,
        }


def identify(index: BlindIndex, app_name: str, user_id: str = "", session_id: str = "") -> Identity:
    """Compute the tags."""
    return Identity(
        app_name,
        user_id,
        session_id,
        index.app(app_name),
        index.user(app_name, user_id),
        index.session(app_name, user_id, session_id),
    )


class NeedsKey(Exception):
    """*owner* has to get a data key in the other database before anything is sealed with it."""

    def __init__(self, owner: bytes) -> None:
        super().__init__("a data key has to be made first")
        self.owner = owner


class Owner(NamedTuple):
    """An opened row of `secure_apps` or `secure_users`; *state* is JSON."""

    id: int
    tag: bytes
    app_row: int
    user_id: str
    version: int
    state: bytes


class StoredSession(NamedTuple):
    """An opened row of `secure_sessions`.

    The state is *base*, a row of its own once state is large, under *overlay*: what
    changed since.  *base* is None where it was not read; *sealed* is the stored record, as
    the next update expects to find it.
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
    base: bytes | None
    sealed: bytes


class Seen(NamedTuple, Generic[V]):
    """What a row and its witness opened to: while both are the same bytes, so is that."""

    row: Row
    witness: Row | None
    value: V


class Memo:
    """Rows that this process opened before, by tag; bounded."""

    def __init__(self, limit: int) -> None:
        self.owners: Lru[bytes, Seen[Owner]] = Lru(limit)
        self.sessions: Lru[bytes, Seen[StoredSession]] = Lru(limit)


class Context(NamedTuple):
    """The keys of one transaction, and whose rows it is about."""

    keys: StagedKeys
    memo: Memo
    who: Identity
    with_keys: bool  # whether it reads the owners' data keys too
    keys_apart: bool = False  # then they were read before

    def form_of(self, forms: sql.Forms) -> sql.Query:
        """That of a query which this transaction needs."""
        return forms[self.with_keys and not self.keys_apart]

    def forget_user(self) -> None:
        """Keep nothing in memory of a user who is not, or no longer, stored."""
        self.keys.forget(self.who.user_tag)
        self.memo.owners.drop(self.who.user_tag)


class Found:
    """The rows of one read, by kind."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.apps: list[Row] = []
        self.users: list[Row] = []
        self.witnesses: dict[bytes, Row] = {}
        self.keys: list[DataKeyRow] = []
        self.sessions: list[Row] = []
        self.bases: dict[int, Row] = {}
        self.events: list[Row] = []
        for row in rows:
            kind = row[0]
            if kind == sql.EVENT:
                self.events.append(row)
            elif kind == sql.SESSION:
                self.sessions.append(row)
            elif kind == sql.WITNESS:
                self.witnesses[row[8]] = row
            elif kind == sql.USER:
                self.users.append(row)
            elif kind == sql.APP:
                self.apps.append(row)
            elif kind == sql.BASE:
                self.bases[row[1]] = row
            else:
                self.keys.append(DataKeyRow(row[1], row[8], row[2], row[3], row[4], row[9]))
