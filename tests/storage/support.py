"""Storage without a database: a fake executor that answers from a script, and rows to answer with.

How it works.  Storage never touches a driver.  Its transactions are generators that yield `Read`
and `Apply` (`db.protocol`); its reads await `Executor.read`.  So a test can stand where the
database would be:

- `FakeExecutor("answer", "answer", ...)` gives these answers, one for each request, in order.  An
  answer that is an exception is raised; one that is a function is called with the request, for
  example to return the row that was just stored.  `requests` keeps what was asked, as text:
  `"read SESSION_WITHOUT_EVENTS"` or `"apply UPDATE_SESSION, INSERT_EVENT"`, with the names that
  `storage.queries` has.
- A test of a single transaction needs no executor: it calls `next(steps)` and `steps.send(answer)`
  itself, and compares `request(step)`.
- `Stored` makes rows as a driver returns them: an app, one of its users, and a session of that
  user with events, all authentic.  A test takes `rows()`, or changes one with `replaced`, and
  opens them.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import sqlalchemy as sa

from adk_secure_sessions import AesGcmBackend, FernetBackend
from adk_secure_sessions.backends.registry import Backends, register
from adk_secure_sessions.crypto.aead import Aes256Gcm
from adk_secure_sessions.db.protocol import Apply, Change, Executors, Parameters, Read, Row, Steps
from adk_secure_sessions.formats.records import encode_text
from adk_secure_sessions.keys.blind_index import BlindIndex
from adk_secure_sessions.keys.data_keys import DataKeyRow, DataKeys, StagedKeys
from adk_secure_sessions.keys.keyring import Keyring
from adk_secure_sessions.storage import bindings, queries
from adk_secure_sessions.storage.bindings import (
    NO_SNAPSHOT,
    Attempt,
    Identity,
    KeySource,
    Owner,
    RowCache,
    StoredSession,
    identify,
)
from adk_secure_sessions.storage.queries import Found

T = TypeVar("T")
RawRow = tuple[Any, ...]

# --- what was asked ------------------------------------------------------------------------------


def _statement_names() -> dict[int, str]:
    names = {}
    for name, value in vars(queries).items():
        if isinstance(value, sa.ClauseElement):
            names[id(value)] = name
        elif name.isupper() and isinstance(value, dict):  # the forms without and with data keys
            names[id(value[False])] = name
            names[id(value[True])] = f"{name} with keys"
    return names


STATEMENTS = _statement_names()


def name_of(statement: object) -> str:
    """What `storage.queries` calls *statement*."""
    return STATEMENTS.get(id(statement), "data keys of owners")


def request(step: Read | Apply) -> str:
    """What a transaction or a read asks of the database, as text."""
    if isinstance(step, Read):
        return f"read {name_of(step.query)}"
    return "apply " + ", ".join(name_of(change.statement) for change in step.changes)


def change_in(step: Read | Apply, name: str) -> Change:
    """The change of *step* that runs the statement *name*."""
    assert isinstance(step, Apply)
    (change,) = (change for change in step.changes if name_of(change.statement) == name)
    return change


def result_of(steps: Steps[T], answer: object) -> T:
    """Send the last answer to a transaction; what it returns."""
    try:
        step = steps.send(answer)
    except StopIteration as end:
        return cast(T, end.value)
    raise AssertionError(f"the transaction goes on: {request(step)}")


class FakeExecutor:
    """An executor (`db.protocol`) that answers from a script; see the module's docstring."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.steps: list[Read | Apply] = []
        self.defined: list[object] = []
        self.closed = 0

    @property
    def requests(self) -> list[str]:
        return [request(step) for step in self.steps]

    async def read(self, query: sa.Executable, parameters: Parameters) -> Sequence[Row]:
        return cast(Sequence[Row], self._answer(Read(query, parameters)))

    async def write(
        self, transaction: Callable[[], Steps[T]], late: Callable[[T], None] | None = None
    ) -> T:
        steps = transaction()
        try:
            step = next(steps)
            while True:
                step = steps.send(self._answer(step))
        except StopIteration as end:
            return cast(T, end.value)

    async def define(self, work: Callable[[sa.Connection], T], *, commit: bool) -> T:
        self.defined.append(work)
        return cast(T, self._next(work))

    async def close(self) -> None:
        self.closed += 1

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
MASTER, ANOTHER_MASTER = 11, 12
MASTERS = {MASTER: Aes256Gcm(bytes(32)), ANOTHER_MASTER: Aes256Gcm(bytes(31) + b"\1")}
INDEX = BlindIndex(bytes(32))
ROOT = bytes(range(32))


def keyring(*masters: int, current: int | None = None) -> Keyring:
    """A keyring of data master keys that may all be used; the last one is current."""
    masters = masters or (MASTER,)
    held = {master: MASTERS[master] for master in masters}
    return Keyring(DATABASE_ID, INDEX, held, current or masters[-1], frozenset(masters))


def backends(*, fernet: bool = False) -> Backends:
    """AES-256-GCM, listed with Fernet; the first of them writes."""
    aes, other = AesGcmBackend(ROOT), FernetBackend(ROOT)
    return register(other, [aes]) if fernet else register(aes, [other])


def data_keys(ring: Keyring | None = None, *, fernet: bool = False) -> DataKeys:
    """A process's data keys: none yet."""
    listed = backends(fernet=fernet)
    return DataKeys(ring or keyring(), listed.by_id, listed.writer.backend_id, 100)


# --- rows ----------------------------------------------------------------------------------------

# A row's kind, as the statements number them; test_queries.py compares that with a database.
APP, USER, WITNESS, KEY, SESSION, SNAPSHOT, EVENT = range(7)
WHO = identify(INDEX, "clinic", "alice", "visit")


def raw(kind: int, numbers: Sequence[object], *blobs: object) -> RawRow:
    """A row as the driver returns it: its kind, seven numbers, two blobs."""
    return (kind, *numbers, *[0] * (7 - len(numbers)), *blobs, *[None] * (2 - len(blobs)))


def key_row(row: DataKeyRow) -> RawRow:
    return raw(
        KEY, (row.id, row.generation, row.backend_id, row.created_at), row.owner, row.wrapped
    )


class Stored:
    """The rows of an app (1), a user (2) and a session (3) with *events*, at times 100, 101, ...

    With a *snapshot*, that is the session's state under its overlay.
    """

    def __init__(self, *, events: int = 2, snapshot: bytes | None = None) -> None:
        self.keys = data_keys()
        staged = StagedKeys(self.keys)
        self.key_rows = [staged.new(WHO.app_tag), staged.new(WHO.user_tag)]
        self.app = Owner(1, WHO.app_tag, 0, "", 5, b'{"a":1}')
        self.user = Owner(2, WHO.user_tag, 1, WHO.user_id, 7, b'{"u":1}')
        base = NO_SNAPSHOT if snapshot is None else 0
        session = StoredSession(
            3, 2, WHO.session_tag, WHO.session_id, events, base, 100, 100 + events,
            b'{"s":1}', b"{}" if snapshot is None else snapshot, b"",
        )  # fmt: skip
        sealing = self.attempt(keys=staged)
        self.session = session._replace(sealed=bindings.seal_session(sealing, session))
        self._rows = self._made(sealing, events)

    def attempt(
        self,
        who: Identity = WHO,
        *,
        keys: StagedKeys | None = None,
        cache: RowCache | None = None,
        source: KeySource = KeySource.QUERY,
        is_first: bool = True,
    ) -> Attempt:
        """An attempt at an operation of *who*; it knows the keys that it has read, or *keys*."""
        if keys is None:
            keys = StagedKeys(self.keys)
            keys.load(self.key_rows)
        return Attempt(who, keys, cache or RowCache(10), source, is_first)

    def knowing(self, cache: RowCache | None = None) -> Attempt:
        """An attempt of a process that has the owners' keys, and what *cache* remembers."""
        keys = StagedKeys(self.keys)
        keys.load(self.key_rows)
        keys.publish()
        return self.attempt(keys=StagedKeys(self.keys), cache=cache, source=KeySource.CACHE)

    def rows(self, *, without: Sequence[int] = (), keys: bool = False) -> list[RawRow]:
        """All rows, but those of the kinds *without*; with those of the data *keys* if asked."""
        key_rows = [key_row(row) for row in self.key_rows] if keys else []
        return key_rows + [row for row in self._rows if row[0] not in without]

    def found(self, *, without: Sequence[int] = ()) -> Found:
        return Found(self.rows(without=without))

    def replaced(self, kind: int, position: int, value: object, *, at: int = 0) -> list[RawRow]:
        """The rows, with another *value* in a *position* of a row: the one *at* of its kind."""
        rows = self.rows()
        row = self.indexes(kind)[at]
        rows[row] = (*rows[row][:position], value, *rows[row][position + 1 :])
        return rows

    def without_witness(self, tag: bytes) -> list[RawRow]:
        return [row for row in self.rows() if not (row[0] == WITNESS and row[8] == tag)]

    def indexes(self, kind: int) -> list[int]:
        return [index for index, row in enumerate(self._rows) if row[0] == kind]

    def _made(self, attempt: Attempt, events: int) -> list[RawRow]:
        app, user, session = self.app, self.user, self.session
        name, sealed_app = encode_text(WHO.app_name), bindings.seal_app(attempt, app)
        sealed_user = bindings.seal_user(attempt, user)
        numbers = [session.id, session.user_row, session.revision, session.base_revision]
        numbers += [session.created_at, session.updated_at, events - 1]
        rows = [
            raw(APP, [app.id, app.version], name, sealed_app),
            raw(USER, [user.id, user.app_row, user.version], user.tag, sealed_user),
            self._witness(attempt, app.tag, app.tag, app.version),
            self._witness(attempt, user.tag, user.tag, user.version),
            self._witness(attempt, user.tag, session.tag, session.id),
            raw(SESSION, numbers, session.tag, session.sealed),
        ]
        if session.base_revision != NO_SNAPSHOT:
            assert session.snapshot is not None
            sealed = bindings.seal_snapshot(
                attempt, session.id, session.base_revision, session.snapshot
            )
            rows.append(raw(SNAPSHOT, [session.id, session.base_revision], sealed))
        for seq in range(events):
            sealed = bindings.seal_event(attempt, session.id, seq, 100 + seq, b"event %d" % seq)
            rows.append(raw(EVENT, [seq, 100 + seq], sealed))
        return rows

    @staticmethod
    def _witness(attempt: Attempt, owner: bytes, tag: bytes, number: int) -> RawRow:
        return raw(WITNESS, (number,), tag, bindings.seal_witness(attempt, owner, tag, number))
