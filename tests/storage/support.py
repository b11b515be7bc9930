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
  opens them.  `another_copy` makes the rows of another copy of the same database: the same ids and
  data keys, but other links.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar, cast

import sqlalchemy as sa

from adk_secure_sessions import AesGcmBackend, FernetBackend
from adk_secure_sessions.backends.registry import Backends, register
from adk_secure_sessions.crypto.aead import Aes256Gcm
from adk_secure_sessions.db.protocol import Apply, Change, Executors, Parameters, Read, Row, Steps
from adk_secure_sessions.formats.records import NO_LINK, encode_text, new_link
from adk_secure_sessions.keys.blind_index import BlindIndex
from adk_secure_sessions.keys.data_keys import DataKeyRow, DataKeys, StagedKeys
from adk_secure_sessions.keys.keyring import DATA, Keyring, MasterKeyRow, MasterMark
from adk_secure_sessions.storage import queries, sealed_rows
from adk_secure_sessions.storage.attempts import Attempt, KeySource, RowCache
from adk_secure_sessions.storage.owner_changes import OwnerChanges
from adk_secure_sessions.storage.queries import Found
from adk_secure_sessions.storage.rows import Identity, Owner, StoredSession, identify
from adk_secure_sessions.storage.schema import NEVER, NO_SNAPSHOT

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
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
    """What a transaction or a read asks of a database that is no cluster, as text."""
    if isinstance(step, Read):
        return f"read {name_of(step.query)}"
    changes = [change for change in step.changes if not change.only_on_cluster]
    return "apply " + ", ".join(name_of(change.statement) for change in changes)


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


class HasSteps(Protocol[T_co]):
    """A write of `storage.writes`."""

    def steps(self, attempt: Attempt, owners: OwnerChanges) -> Steps[T_co]: ...


def steps_of(operation: HasSteps[T], attempt: Attempt) -> Steps[T]:
    """The transaction of one attempt at a write."""
    return operation.steps(attempt, OwnerChanges(attempt))


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
        self,
        transaction: Callable[[], Steps[T]],
        late: Callable[[T], None] | None = None,
        *,
        holds_locks: bool = False,
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
MASTER, ANOTHER_MASTER, INDEX_MASTER = 11, 12, 13
MASTERS = {MASTER: Aes256Gcm(bytes(32)), ANOTHER_MASTER: Aes256Gcm(bytes(31) + b"\1")}
INDEX = BlindIndex(bytes(32))
ROOT = bytes(range(32))


def keyring(*masters: int, current: int | None = None, pending: bool = False) -> Keyring:
    """A keyring of data master keys that may all be used; the last one is current.

    With *pending*, there is also a row whose key service failed; `marks` leaves it out.
    """
    masters = masters or (MASTER,)
    held = {master: MASTERS[master] for master in masters}
    rows = {master: MasterKeyRow(master, DATA, "root", 0, b"") for master in masters}
    rows[INDEX_MASTER] = MasterKeyRow(INDEX_MASTER, "index", "root", 0, b"")
    usable = frozenset(masters)
    waiting = [MasterKeyRow(77, DATA, "root", 0, b"")] if pending else []
    return Keyring(DATABASE_ID, INDEX, held, current or masters[-1], usable, rows, pending=waiting)


def backends(*, fernet: bool = False) -> Backends:
    """AES-256-GCM, listed with Fernet; the first of them writes."""
    aes, other = AesGcmBackend(ROOT), FernetBackend(ROOT)
    return register(other, [aes]) if fernet else register(aes, [other])


def data_keys(ring: Keyring | None = None, *, fernet: bool = False) -> DataKeys:
    """A process's data keys: none yet."""
    listed = backends(fernet=fernet)
    return DataKeys(ring or keyring(), listed.by_id, listed.writer.backend_id, 100)


def marks(ring: Keyring | None = None) -> list[MasterMark]:
    """What a query for data keys reads of the keyring *ring*, as long as nobody changes it."""
    rows = (ring or keyring()).rows.values()
    return [MasterMark(row.id, row.created_at, row.wrapped) for row in rows]


# --- rows ----------------------------------------------------------------------------------------

# A row's kind, as the statements number them; test_queries.py compares that with a database.
APP, USER, WITNESS, SESSION, SNAPSHOT, EVENT, KEY, MASTER_MARK = range(8)
# The positions of values in a row: the numbers begin at 1, the blobs here.
BLOB, SECOND_BLOB, THIRD_BLOB = 9, 10, 11
WHO = identify(INDEX, "clinic", "alice", "visit")


def raw(kind: int, numbers: Sequence[object], *blobs: object) -> RawRow:
    """A row as the driver returns it: its kind, eight numbers, three blobs."""
    return (kind, *numbers, *[0] * (8 - len(numbers)), *blobs, *[None] * (3 - len(blobs)))


def key_row(row: DataKeyRow) -> RawRow:
    return raw(
        KEY, (row.id, row.generation, row.backend_id, row.created_at), row.owner, row.wrapped
    )


def key_rows(rows: Iterable[DataKeyRow], ring: Keyring | None = None) -> list[RawRow]:
    """What a query for data keys returns: their *rows*, and the marks of the keyring."""
    masters = [raw(MASTER_MARK, mark[:2], mark.wrapped) for mark in marks(ring)]
    return [*map(key_row, rows), *masters]


class Stored:
    """The rows of an app (1), a user (2) and a session (3) with *events*, at times 100, 101, ...

    With a *snapshot*, that is the session's state under its overlay.  The owners' rows name their
    data keys, and *more_key_ids*.

    Attributes:
        keys: The data keys of a process that has read none of the rows yet.
        key_rows: The data keys of the app and of the user.
        links: The links of the events.
    """

    def __init__(
        self,
        *,
        events: int = 2,
        snapshot: bytes | None = None,
        more_key_ids: tuple[int, ...] = (),
        original: "Stored | None" = None,
    ) -> None:
        self.keys: DataKeys = original.keys if original else data_keys()
        staged = StagedKeys(self.keys)
        self.key_rows: list[DataKeyRow] = []
        if original:
            self.key_rows = original.key_rows
            staged.load(self.key_rows, ())
        else:
            self.key_rows = [staged.new(WHO.app_tag), staged.new(WHO.user_tag)]
        app_key, user_key = ((row.id, *more_key_ids) for row in self.key_rows)
        self.app = Owner(1, WHO.app_tag, 0, "", 5, b'{"a":1}', new_link(), app_key)
        self.user = Owner(2, WHO.user_tag, 1, WHO.user_id, 7, b'{"u":1}', new_link(), user_key)
        self._adopt(staged)
        self.links = [new_link() for _ in range(events)]
        base = NO_SNAPSHOT if snapshot is None else 0
        session = StoredSession(
            3, 2, WHO.session_tag, WHO.session_id, events, base, 100, 100 + events, NEVER,
            b'{"s":1}', b"{}" if snapshot is None else snapshot,
            self.links[-1] if events else NO_LINK, NO_LINK if snapshot is None else new_link(),
            b"",
        )  # fmt: skip
        sealing = self.attempt(keys=staged)
        self.session = sealed_rows.seal_session(sealing, session)
        self._rows = self._made(sealing)

    def another_copy(
        self,
        *,
        events: int = 2,
        snapshot: bytes | None = None,
        more_key_ids: tuple[int, ...] = (),
    ) -> "Stored":
        """The rows of another copy of the database, for example of one restored from a backup."""
        return Stored(events=events, snapshot=snapshot, more_key_ids=more_key_ids, original=self)

    def attempt(
        self,
        who: Identity = WHO,
        *,
        keys: StagedKeys | None = None,
        cache: RowCache | None = None,
        source: KeySource = KeySource.QUERY,
        is_first: bool = True,
    ) -> Attempt:
        """An attempt at an operation of *who*; it has read the stored keys, or knows *keys*."""
        cache = cache or RowCache(10)
        return Attempt(who, keys or self.read_keys(), cache, source, is_first, cache.time)

    def read_keys(self) -> StagedKeys:
        """The keys of a transaction that has read them, but not yet the rows that name them."""
        keys = StagedKeys(self.keys)
        keys.load(self.key_rows, marks())
        return keys

    def sealing(self, *newer: DataKeyRow) -> Attempt:
        """An attempt that encrypts with the owners' data keys, or with *newer* ones."""
        keys = StagedKeys(self.keys)
        keys.load([*self.key_rows, *newer], marks())
        self._adopt(keys, *newer)
        return self.attempt(keys=keys)

    def knowing(self, cache: RowCache | None = None) -> Attempt:
        """An attempt of a process that has the owners' keys, and what *cache* remembers."""
        keys = self.read_keys()
        self._adopt(keys)
        keys.publish()
        return self.attempt(keys=StagedKeys(self.keys), cache=cache, source=KeySource.CACHE)

    def knowing_session(self, session: StoredSession | None = None) -> Attempt:
        """An attempt of a process that also remembers the session, and that its head is proven."""
        cache = RowCache(10)
        cache.put_session(session or self.session, None, has_proven_head=True)
        return self.knowing(cache)

    def rows(
        self, *, without: Sequence[int] = (), keys: bool = False, last: int | None = None
    ) -> list[RawRow]:
        """All rows, but those of the kinds *without*; with those of the data *keys* if asked.

        Of the events only the *last* ones if a number is given.
        """
        first = 0 if last is None else self.session.revision - last
        rows = [row for row in self._rows if row[0] not in without]
        rows = [row for row in rows if row[0] != EVENT or row[1] >= first]
        return [*(key_rows(self.key_rows) if keys else []), *rows]

    def found(self, *, without: Sequence[int] = ()) -> Found:
        return Found(self.rows(without=without))

    def replaced(self, kind: int, position: int, value: object, *, at: int = 0) -> list[RawRow]:
        """The rows, with another *value* in a *position* of a row: the one *at* of its kind."""
        rows = self.rows()
        row = self.indexes(kind)[at]
        rows[row] = (*rows[row][:position], value, *rows[row][position + 1 :])
        return rows

    def with_rows_of(self, other: "Stored", *kinds: int, at: int | None = None) -> list[RawRow]:
        """The rows, but those of *kinds* as *other* stores them; only the one *at* if given."""
        rows = self.rows()
        for kind in kinds:
            for index in self.indexes(kind) if at is None else [self.indexes(kind)[at]]:
                rows[index] = other.rows()[index]
        return rows

    def without_witness(self, tag: bytes) -> list[RawRow]:
        return [row for row in self.rows() if not (row[0] == WITNESS and row[BLOB] == tag)]

    def indexes(self, kind: int) -> list[int]:
        return [index for index, row in enumerate(self._rows) if row[0] == kind]

    def _adopt(self, keys: StagedKeys, *newer: DataKeyRow) -> None:
        for owner in (self.app, self.user):
            keys.adopt(owner.tag, [*owner.key_ids, *(row.id for row in newer)])

    def _made(self, attempt: Attempt) -> list[RawRow]:
        app, user, session = self.app, self.user, self.session
        rows = [
            owner_row(attempt, app),
            owner_row(attempt, user),
            witness_row(attempt, app.tag, app.tag, app.version, app.link),
            witness_row(attempt, user.tag, user.tag, user.version, user.link),
            witness_row(attempt, user.tag, session.tag, session.id, b""),
            session_row(session),
        ]
        if session.base_revision != NO_SNAPSHOT:
            assert session.snapshot is not None
            rows.append(snapshot_row(attempt, session))
        previous = NO_LINK
        for seq, link in enumerate(self.links):
            before = session._replace(head=previous)
            rows.append(event_row(attempt, before, seq, link, b"event %d" % seq))
            previous = link
        return rows


def owner_row(attempt: Attempt, owner: Owner) -> RawRow:
    state = sealed_rows.seal_owner(attempt, owner).state
    if owner.is_user:
        return raw(USER, [owner.id, owner.app_row, owner.version], owner.tag, state)
    return raw(APP, [owner.id, owner.version], owner.tag, encode_text(WHO.app_name), state)


def snapshot_row(attempt: Attempt, session: StoredSession) -> RawRow:
    sealed = sealed_rows.seal_snapshot(attempt, session).state
    return raw(SNAPSHOT, [session.id, session.base_revision], sealed)


def session_row(session: StoredSession) -> RawRow:
    numbers = [session.id, session.user_row, session.revision, session.base_revision]
    numbers += [session.created_at, session.updated_at, session.expires_at, session.revision - 1]
    return raw(SESSION, numbers, session.tag, session.sealed)


def witness_row(attempt: Attempt, owner: bytes, tag: bytes, number: int, link: bytes) -> RawRow:
    seal = sealed_rows.seal_witness(attempt, owner, tag, number, link).seal
    return raw(WITNESS, (number,), tag, seal)


def event_row(
    attempt: Attempt, session: StoredSession, seq: int, link: bytes, plaintext: bytes
) -> RawRow:
    """The row of an event with *link*, at time 100 + *seq*, that follows the head of *session*."""
    new = [(plaintext, 100 + seq)]
    (row,) = sealed_rows.seal_events(attempt, session.id, seq, new, [link], session.head)
    return raw(EVENT, [seq, 100 + seq], row.event)
