"""Storage without a database: a fake executor that answers from a script, and rows to answer with.

How it works.  `FakeExecutor("answer", "answer", ...)` stands where the database would be, and gives
these answers, one for each request, in order.  An answer that is an exception is raised; one that
is a function is called with the request, for example to return the row that was just stored.
`requests` keeps what was asked, as text with the names of `storage.queries`: `"read
SESSION_WITHOUT_EVENTS"`, `"apply UPDATE_SESSION, INSERT_EVENT"`.  `Stored` makes rows as a driver
returns them: an app, one of its users, and a session of that user with events, all authentic.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import sqlalchemy as sa

from adk_secure_sessions import AesGcmBackend, FernetBackend
from adk_secure_sessions.backends.registry import Backends, check_backends
from adk_secure_sessions.caches import FifoCache
from adk_secure_sessions.crypto.aead import Aes256Gcm
from adk_secure_sessions.db.protocol import Apply, Change, Executors, Parameters, Read, Row, Steps
from adk_secure_sessions.formats.records import NO_LINK, encode_text, new_link
from adk_secure_sessions.keys.blind_index import IndexMaster
from adk_secure_sessions.keys.data_keys import DatabaseKeys, DataKeyRow, TransactionKeys
from adk_secure_sessions.keys.keyring import DATA_MASTER, Keyring, MasterFingerprint, MasterKeyRow
from adk_secure_sessions.storage import queries, sealed_rows
from adk_secure_sessions.storage.operation_runner import Attempt, KeySearch, KeySource
from adk_secure_sessions.storage.row_cache import RowCache
from adk_secure_sessions.storage.schema import (
    NEVER,
    NO_SNAPSHOT,
    AppRow,
    Owner,
    SessionRow,
    StoredSession,
    UserRow,
    identify,
)

T = TypeVar("T")
RawRow = tuple[Any, ...]

# --- what was asked ------------------------------------------------------------------------------


def _statement_names() -> dict[int, str]:
    names = {}
    for name, value in vars(queries).items():
        if isinstance(value, sa.ClauseElement):
            names[id(value)] = name
        elif name.isupper() and isinstance(value, queries.QueryVariants):
            names[id(value.without_keys)] = name
            names[id(value.with_keys)] = f"{name} with keys"
    return names


STATEMENTS = _statement_names()


def name_of(statement: object) -> str:
    """What `storage.queries` calls *statement*."""
    return STATEMENTS.get(id(statement), "data keys of owners")


def request(step: Read | Apply) -> str:
    """What a transaction or a read asks of a database, as text."""
    if isinstance(step, Read):
        return f"read {name_of(step.query)}"
    return "apply " + ", ".join(name_of(change.statement) for change in step.changes)


def change_in(step: Read | Apply, name: str) -> Change:
    """The change of *step* that runs the statement *name*."""
    assert isinstance(step, Apply)
    (change,) = (change for change in step.changes if name_of(change.statement) == name)
    return change


class FakeExecutor:
    """An executor (`db.protocol`) that answers from a script; see the module's docstring."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.steps: list[Read | Apply] = []
        self.defined: list[object] = []

    @property
    def requests(self) -> list[str]:
        return [request(step) for step in self.steps]

    async def read(self, query: sa.Executable, parameters: Parameters) -> Sequence[Row]:
        return cast(Sequence[Row], self._answer(Read(query, parameters)))

    async def write(
        self,
        transaction: Callable[[], Steps[T]],
        on_commit: Callable[[], None] | None = None,
        *,
        in_one_transaction: bool = False,
    ) -> T:
        steps = transaction()
        try:
            step = next(steps)
            while True:
                step = steps.send(self._answer(step))
        except StopIteration as end:
            if on_commit:
                on_commit()
            return cast(T, end.value)

    async def run_sync(self, work: Callable[[sa.Connection], T], *, commit: bool = True) -> T:
        self.defined.append(work)
        return cast(T, self._next(work))

    async def close(self) -> None:
        pass

    def _answer(self, step: Read | Apply) -> object:
        self.steps.append(step)
        return self._next(step)

    def _next(self, asked: object) -> object:
        assert self.answers, f"nothing is left to answer {asked} with"
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer(asked) if callable(answer) else answer


def one_database(*answers: object) -> tuple[Executors, FakeExecutor]:
    """Data and keys in one database."""
    executor = FakeExecutor(*answers)
    return Executors(executor, executor), executor


def two_databases(
    data: Sequence[object] = (), keys: Sequence[object] = ()
) -> tuple[Executors, FakeExecutor, FakeExecutor]:
    """The data, and a key database."""
    both = FakeExecutor(*data), FakeExecutor(*keys)
    return Executors(*both), *both


# --- keys ----------------------------------------------------------------------------------------

DATABASE_ID = bytes(range(16))
MASTER, ANOTHER_MASTER, INDEX_MASTER = 11, 12, 13
MASTERS = {MASTER: Aes256Gcm(bytes(32)), ANOTHER_MASTER: Aes256Gcm(bytes(31) + b"\1")}
INDEX = IndexMaster(bytes(32))
ROOT = bytes(range(32))


def keyring(*masters: int, current: int | None = None, pending: bool = False) -> Keyring:
    """A keyring of data master keys that may all be used; the last one is current.

    With *pending*, there is also a row whose key service failed, to be unwrapped again after 0.1 s;
    `fingerprints` leaves it out.
    """
    masters = masters or (MASTER,)
    held = {master: MASTERS[master] for master in masters}
    rows = {master: MasterKeyRow(master, DATA_MASTER, "root", 0, b"") for master in masters}
    rows[INDEX_MASTER] = MasterKeyRow(INDEX_MASTER, "index", "root", 0, b"")
    usable = frozenset(masters)
    other = MasterKeyRow(77, DATA_MASTER, "root", 0, b"")
    unused = {other: time.monotonic() + 0.1} if pending else {}
    count = len(rows) + len(unused)
    return Keyring(
        DATABASE_ID, INDEX, held, current or masters[-1], usable, rows, unused, row_count=count
    )


def backends(*, fernet: bool = False) -> Backends:
    """AES-256-GCM, listed with Fernet; the first of them writes."""
    aes, other = AesGcmBackend(ROOT), FernetBackend(ROOT)
    return check_backends(other, [aes]) if fernet else check_backends(aes, [other])


def data_keys(ring: Keyring | None = None, *, fernet: bool = False) -> DatabaseKeys:
    """A process's data keys: none yet."""
    listed = backends(fernet=fernet)
    return DatabaseKeys(ring or keyring(), listed.by_id, listed.writing_backend, FifoCache(100))


def fingerprints(ring: Keyring | None = None) -> list[MasterFingerprint]:
    """What a query for data keys reads of the keyring *ring*, as long as nobody changes it."""
    rows = (ring or keyring()).rows.values()
    return [MasterFingerprint(row.id, row.created_at, row.wrapped) for row in rows]


# --- rows ----------------------------------------------------------------------------------------

# A row's kind, as the statements number them; test_queries.py compares that with a database.
APP, USER, WITNESS, SESSION, SNAPSHOT, EVENT, KEY, MASTER_MARK = range(8)
BLOB = 9  # the position of a row's first blob; its numbers begin at 1
WHO = identify(INDEX, "clinic", "alice", "visit")


def raw(kind: int, numbers: Sequence[object], *blobs: object) -> RawRow:
    """A row as the driver returns it: its kind, eight numbers, three blobs."""
    return (kind, *numbers, *[0] * (8 - len(numbers)), *blobs, *[None] * (3 - len(blobs)))


def key_rows(rows: Iterable[DataKeyRow], ring: Keyring | None = None) -> list[RawRow]:
    """What a query for data keys returns: their *rows*, and the fingerprints of the keyring."""
    masters = [raw(MASTER_MARK, one[:2], one.wrapped) for one in fingerprints(ring)]
    return [
        *(
            raw(
                KEY,
                (row.id, row.generation, row.backend_id, row.created_at),
                row.owner,
                row.wrapped,
            )
            for row in rows
        ),
        *masters,
    ]


class Stored:
    """The rows of an app (1), a user (2) and a session (3) with *events*, at times 100, 101, ...

    With a *snapshot*, that is the session's state under its overlay.  `keys` are the data keys of a
    process that has read none of the rows yet, `key_rows` those that the rows of the app and the
    user name.  The attempt `sealing` encrypts rows as the stored ones are encrypted.
    """

    def __init__(self, *, events: int = 2, snapshot: bytes | None = None) -> None:
        self.keys = data_keys()
        staged = TransactionKeys(self.keys)
        self.key_rows = [staged.create_data_key(WHO.app_tag), staged.create_data_key(WHO.user_tag)]
        app_key, user_key = ((row.id,) for row in self.key_rows)
        app_row = AppRow(1, WHO.app_tag, encode_text(WHO.app_name), 5, b"")
        app = Owner(app_row, "", b'{"a":1}', new_link(), app_key)
        user_row = UserRow(2, 1, WHO.user_tag, 7, b"")
        user = Owner(user_row, WHO.user_id, b'{"u":1}', new_link(), user_key)
        self.user = user
        for owner in (app, user):
            staged.choose_current(owner.row.tag, owner.key_ids)
        links = [new_link() for _ in range(events)]
        base = NO_SNAPSHOT if snapshot is None else 0
        row = SessionRow(3, 2, WHO.session_tag, events, base, 100, 100 + events, NEVER, b"")
        last_link = links[-1] if events else NO_LINK
        session = StoredSession(row, WHO.session_id, b'{"s":1}', last_link=last_link)
        if snapshot is not None:
            session = session._replace(snapshot=snapshot, snapshot_link=new_link())
        self.sealing = sealing = self.attempt(staged)
        self.session = session = sealed_rows.seal_session(sealing, session)
        self._rows = [
            owner_row(sealing, app),
            owner_row(sealing, user),
            witness_row(sealing, app.row.tag, app.row.tag, app.version, app.link),
            witness_row(sealing, user.row.tag, user.row.tag, user.version, user.link),
            witness_row(sealing, user.row.tag, session.row.tag, session.row.id, b""),
            session_row(session),
        ]
        if snapshot is not None:
            sealed = sealed_rows.seal_snapshot(sealing, session).record
            self._rows.append(raw(SNAPSHOT, [session.row.id, session.row.base_revision], sealed))
        texts = [(b"event %d" % seq, 100 + seq) for seq in range(events)]
        for one in sealed_rows.seal_events(sealing, session.row.id, 0, texts, links, NO_LINK):
            self._rows.append(raw(EVENT, [one.seq, one.time], one.record))

    def reading(self, *answers: object) -> Attempt:
        """An attempt that has read the stored data keys, and reads *answers*."""
        keys = TransactionKeys(self.keys)
        keys.unwrap(self.key_rows, fingerprints())
        return self.attempt(keys, *answers)

    def attempt(self, keys: TransactionKeys, *answers: object) -> Attempt:
        executors, _ = one_database(*answers)
        return Attempt(executors, WHO, keys, KeySearch(), RowCache(10), KeySource.QUERY, False)

    def rows(self, *, keys: bool = False) -> list[RawRow]:
        """All rows; with those of the data *keys* if asked."""
        return [*(key_rows(self.key_rows) if keys else []), *self._rows]


def owner_row(attempt: Attempt, owner: Owner) -> RawRow:
    row = sealed_rows.seal_owner(attempt, owner).row
    if isinstance(row, UserRow):
        return raw(USER, [row.id, row.app_row, row.version], row.tag, row.record)
    return raw(APP, [row.id, row.version], row.tag, row.app_name, row.record)


def session_row(session: StoredSession) -> RawRow:
    row = session.row
    numbers = [row.id, row.user_row, row.revision, row.base_revision]
    numbers += [row.created_at, row.updated_at, row.expires_at, row.revision - 1]
    return raw(SESSION, numbers, row.tag, row.record)


def witness_row(attempt: Attempt, owner_tag: bytes, tag: bytes, number: int, link: bytes) -> RawRow:
    record = sealed_rows.seal_witness(attempt, owner_tag, tag, number, link).record
    return raw(WITNESS, (number,), tag, record)
