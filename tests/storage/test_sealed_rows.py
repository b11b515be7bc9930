"""Each row opens as what was sealed, and as nothing else; rows that prove each other agree."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from adk_secure_sessions.errors import DecryptionError, Reason, TamperedError, UnknownKeyError
from adk_secure_sessions.formats.records import NO_LINK, new_link
from adk_secure_sessions.keys.data_keys import StagedKeys
from adk_secure_sessions.storage import sealed_rows
from adk_secure_sessions.storage.attempts import Attempt, RowCache
from adk_secure_sessions.storage.queries import Found
from adk_secure_sessions.storage.rows import SEALED, Identity, StoredSession, identify, naming
from adk_secure_sessions.storage.schema import NEVER
from tests.storage.support import (
    APP,
    BLOB,
    EVENT,
    INDEX,
    SECOND_BLOB,
    SESSION,
    SNAPSHOT,
    THIRD_BLOB,
    USER,
    WHO,
    WITNESS,
    RawRow,
    Stored,
    event_row,
    marks,
    owner_row,
    raw,
    session_row,
    snapshot_row,
    witness_row,
)

LARGE = b'{"large":true}'


@pytest.fixture
def cache() -> RowCache:
    return RowCache(10)


class CountingKeys(StagedKeys):
    """Counts how many records were decrypted."""

    opened = 0

    def open(self, owner: bytes, context: bytes, stored: bytes) -> bytes:
        self.opened += 1
        return super().open(owner, context, stored)

    def open_witness(self, owner: bytes, context: bytes, stored: bytes) -> bytes:
        self.opened += 1
        return super().open_witness(owner, context, stored)


def open_all(attempt: Attempt, rows: list[RawRow]) -> list[bytes]:
    """Open everything that a read of one session opens; the events' plaintexts."""
    return open_last(attempt, rows, None)


def open_last(attempt: Attempt, rows: list[RawRow], limit: int | None) -> list[bytes]:
    """Open everything that a read of one session with its last *limit* events opens."""
    found = Found(rows)
    sealed_rows.open_app(attempt, found)
    user = sealed_rows.open_user(attempt, found)
    session = sealed_rows.open_session(attempt, found, user)
    assert session is not None
    sealed_rows.check_events(session, found.events, limit)
    before = NO_LINK if limit is None else None
    opened, head = sealed_rows.open_events(attempt, session, found.events, before)
    sealed_rows.check_head(attempt, session, head)
    return opened


# --- contexts ------------------------------------------------------------------------------------


class Context(NamedTuple):
    """The parts of a context, and another value for each part; the ids come before the row."""

    parts: tuple[Any, ...]
    others: tuple[Any, ...]
    ids: int


TAG, OTHER_TAG = b"t" * 16, b"u" * 16
CONTEXTS = {
    "app": Context(("app", 1, TAG, 2), ("App", 3, OTHER_TAG, 4), 1),
    "user": Context(("app", 1, 2, TAG, 3), ("App", 4, 5, OTHER_TAG, 6), 1),
    "witness": Context(("app", TAG, 1), ("App", OTHER_TAG, 2), 1),
    "session": Context(
        ("app", "user", 1, 2, TAG, 3, 4, 5, 6, 7),
        ("App", "User", 8, 9, OTHER_TAG, 10, 11, 12, 13, 14),
        2,
    ),
    "base": Context(("app", "user", "session", 1, 2), ("App", "User", "Session", 3, 4), 3),
    "event": Context(("app", "user", "session", 1, 2, 3), ("App", "User", "Session", 4, 5, 6), 3),
}


def made(kind: str, parts: tuple[Any, ...]) -> bytes:
    """The context of a row with these *parts*, whose record and app name are not part of it."""
    (column,) = (column for column in SEALED if column.kind == kind)
    ids, values = parts[: CONTEXTS[kind].ids], list(parts[CONTEXTS[kind].ids :])
    if kind == "app":
        values.insert(2, b"name")
    return column.context(ids, column.row(*values, b"record"))


def every_part() -> Iterator[Any]:
    for kind, context in CONTEXTS.items():
        for number in range(len(context.parts)):
            yield pytest.param(kind, number, id=f"{kind}-{number}")


@pytest.mark.parametrize(("kind", "part"), [*every_part()])
def test_context_differs_wherever_one_part_differs(kind: str, part: int) -> None:
    parts, others, _ = CONTEXTS[kind]
    changed = (*parts[:part], others[part], *parts[part + 1 :])
    assert made(kind, parts) == made(kind, parts)
    assert made(kind, changed) != made(kind, parts)


def test_context_of_one_kind_is_never_that_of_another() -> None:
    assert len({made(kind, context.parts) for kind, context in CONTEXTS.items()}) == len(SEALED)


@pytest.mark.parametrize(("one", "other"), [(("ab", "c"), ("a", "bc")), (("", "a"), ("a", ""))])
def test_context_tells_where_one_text_ends_and_the_next_begins(
    one: tuple[str, str], other: tuple[str, str]
) -> None:
    rest = CONTEXTS["session"].parts[2:]
    assert made("session", one + rest) != made("session", other + rest)


# --- what was sealed opens -----------------------------------------------------------------------


def test_sealed_rows_open_as_what_they_were() -> None:
    stored = Stored()
    attempt, found = stored.attempt(), stored.found()
    assert sealed_rows.open_app(attempt, found) == stored.app
    user = sealed_rows.open_user(attempt, found)
    assert user == stored.user
    session = sealed_rows.open_session(attempt, found, user)
    assert session == stored.session
    assert session is not None
    opened, head = sealed_rows.open_events(attempt, session, found.events, NO_LINK)
    assert (opened, head) == ([b"event 0", b"event 1"], session.head)


def test_sealed_snapshot_opens_under_its_overlay() -> None:
    stored = Stored(snapshot=LARGE)
    attempt, found = stored.attempt(), stored.found()
    session = sealed_rows.open_session(attempt, found, sealed_rows.open_user(attempt, found))
    assert session is not None
    assert (session.overlay, session.snapshot) == (b'{"s":1}', LARGE)


def test_sealing_the_same_twice_gives_different_records() -> None:
    stored = Stored()
    attempt = stored.sealing()
    assert owner_row(attempt, stored.app) != owner_row(attempt, stored.app)


# --- what was changed, or belongs elsewhere, does not ---------------------------------------------

COLUMNS = [
    (APP, "id", 1), (APP, "version", 2), (APP, "tag", BLOB), (APP, "app_name", SECOND_BLOB),
    (APP, "state", THIRD_BLOB),
    (USER, "id", 1), (USER, "app_row", 2), (USER, "version", 3), (USER, "tag", BLOB),
    (USER, "state", SECOND_BLOB),
    (WITNESS, "number", 1), (WITNESS, "seal", SECOND_BLOB),
    (SESSION, "id", 1), (SESSION, "user_row", 2), (SESSION, "revision", 3),
    (SESSION, "base_revision", 4), (SESSION, "created_at", 5), (SESSION, "updated_at", 6),
    (SESSION, "expires_at", 7), (SESSION, "last_seq", 8), (SESSION, "tag", BLOB),
    (SESSION, "state", SECOND_BLOB),
    (SNAPSHOT, "session_row", 1), (SNAPSHOT, "revision", 2), (SNAPSHOT, "state", BLOB),
    (EVENT, "seq", 1), (EVENT, "time", 2), (EVENT, "event", BLOB),
]  # fmt: skip
NAMES = {APP: "app", USER: "user", WITNESS: "witness", SESSION: "session", SNAPSHOT: "snapshot"}


def other_value(value: object) -> object:
    """One more (less than the most that a column holds), or the last byte of several flipped."""
    if isinstance(value, int):
        return value + 1 if value < NEVER else value - 1
    assert isinstance(value, bytes)
    return value[:-1] + bytes([value[-1] ^ 1])


@pytest.mark.parametrize("snapshot", [None, LARGE], ids=["small state", "with a snapshot"])
@pytest.mark.parametrize(
    ("kind", "position"),
    [pytest.param(kind, at, id=f"{NAMES.get(kind, 'event')}.{name}") for kind, name, at in COLUMNS],
)
def test_row_with_one_column_modified_is_rejected(
    kind: int, position: int, snapshot: bytes | None
) -> None:
    stored = Stored(snapshot=snapshot)
    assert open_all(stored.attempt(), stored.rows()) == [b"event 0", b"event 1"]
    for at, index in enumerate(stored.indexes(kind)):
        value = stored.rows()[index][position]
        rows = stored.replaced(kind, position, other_value(value), at=at)
        with pytest.raises((TamperedError, UnknownKeyError)):
            open_all(stored.attempt(), rows)


@pytest.mark.parametrize(("kind", "table", "row"), [
    (APP, "secure_apps", "1"), (USER, "secure_users", "2"), (SESSION, "secure_sessions", "3"),
    (SNAPSHOT, "secure_bases", "3"), (EVENT, "secure_events", "3, 0"),
])  # fmt: skip
def test_error_of_a_tampered_record_names_its_row(kind: int, table: str, row: str) -> None:
    stored = Stored(snapshot=LARGE)
    position = dict(RECORDS)[kind]
    value = stored.rows()[stored.indexes(kind)[0]][position]
    with pytest.raises(TamperedError) as rejected:
        open_all(stored.attempt(), stored.replaced(kind, position, other_value(value)))
    error = rejected.value
    assert (error.table, error.row, error.reason) == (table, row, Reason.AUTHENTICATION)


IDS = {
    "app name": WHO._replace(app_name="Clinic"),
    "user id": WHO._replace(user_id="Alice"),
    "session id": WHO._replace(session_id="Visit"),
}


@pytest.mark.parametrize("ids", IDS)
def test_rows_found_for_other_ids_are_rejected(ids: str) -> None:
    """An attacker who can write exchanges tags, so that a search finds somebody else's rows."""
    stored = Stored()
    with pytest.raises(TamperedError):
        open_all(stored.attempt(IDS[ids]), stored.rows())


RECORDS = [
    (APP, THIRD_BLOB), (USER, SECOND_BLOB), (SESSION, SECOND_BLOB), (SNAPSHOT, BLOB), (EVENT, BLOB)
]  # fmt: skip
PAIRS = [*itertools.permutations(RECORDS, 2)]


@pytest.mark.parametrize(("target", "source"), PAIRS, ids=lambda one: NAMES.get(one[0], "event"))
def test_record_of_one_kind_is_rejected_as_another(
    target: tuple[int, int], source: tuple[int, int]
) -> None:
    stored = Stored(snapshot=LARGE)
    kind, position = source
    record = stored.rows()[stored.indexes(kind)[0]][position]
    with pytest.raises(TamperedError):
        open_all(stored.attempt(), stored.replaced(*target, record))


@pytest.mark.parametrize("kind", [USER, SESSION, SNAPSHOT, EVENT])
def test_record_under_the_apps_data_key_is_rejected_where_the_users_belongs(kind: int) -> None:
    """Its context is right; only the owner of its key is not."""
    stored = Stored(snapshot=LARGE)
    attempt, (user, session) = stored.sealing(), (stored.user, stored.session)
    first = session._replace(head=NO_LINK)
    row = {
        USER: owner_row(attempt, user),
        SESSION: session_row(sealed_rows.seal_session(attempt, session)),
        SNAPSHOT: snapshot_row(attempt, session),
        EVENT: event_row(attempt, first, 0, stored.links[0], b"event 0"),
    }[kind]
    sealed = row[dict(RECORDS)[kind]]
    app_key = attempt.keys.current(WHO.app_tag)
    assert app_key is not None
    forged = sealed[:5] + app_key.id.to_bytes(8, "big") + sealed[13:]
    with pytest.raises(TamperedError) as rejected:
        open_all(attempt, stored.replaced(kind, dict(RECORDS)[kind], forged))
    assert rejected.value.reason is Reason.WRONG_OWNER


def test_user_of_another_tag_is_not_the_requested_one() -> None:
    stored = Stored()
    with pytest.raises(TamperedError, match="not the requested user") as rejected:
        sealed_rows.open_user(
            stored.attempt(WHO._replace(user_tag=WHO.app_tag)), Found(stored.rows(without=[APP]))
        )
    assert rejected.value.reason is Reason.WRONG_OWNER


def test_session_of_another_tag_is_not_the_requested_one() -> None:
    stored = Stored()
    attempt, found = stored.attempt(WHO._replace(session_tag=WHO.app_tag)), stored.found()
    with pytest.raises(TamperedError, match="not the requested session"):
        sealed_rows.open_session(attempt, found, sealed_rows.open_user(attempt, found))


def test_session_without_its_users_row_is_rejected() -> None:
    stored = Stored()
    with pytest.raises(TamperedError, match="its user's row was removed") as rejected:
        sealed_rows.open_session(stored.attempt(), stored.found(), None)
    assert (rejected.value.table, rejected.value.row) == ("secure_sessions", "3")


# --- version witnesses ---------------------------------------------------------------------------

TAGS = {"app": WHO.app_tag, "user": WHO.user_tag, "session": WHO.session_tag}
KINDS = {"app": APP, "user": USER, "session": SESSION}


@pytest.mark.parametrize("whose", TAGS)
def test_row_without_its_version_witness_is_rejected(whose: str) -> None:
    stored = Stored()
    with pytest.raises(TamperedError, match=r"version witness .* was removed") as rejected:
        open_all(stored.attempt(), stored.without_witness(TAGS[whose]))
    assert rejected.value.reason is Reason.MISSING
    assert rejected.value.table == f"secure_{whose}s"


@pytest.mark.parametrize("whose", ["app", "user"])
def test_older_row_beside_its_newer_witness_is_rejected(whose: str) -> None:
    """A replayed row is authentic; only its witness has moved on."""
    stored = Stored()
    link = {"app": stored.app, "user": stored.user}[whose].link
    newer = witness_row(stored.sealing(), TAGS[whose], TAGS[whose], 9, link)
    rows = [*stored.without_witness(TAGS[whose]), newer]
    with pytest.raises(TamperedError, match="an older row was replayed") as rejected:
        open_all(stored.attempt(), rows)
    assert rejected.value.reason is Reason.MISMATCH


def test_witness_of_a_session_that_was_recreated_rejects_the_former_row() -> None:
    stored = Stored()
    newer = witness_row(stored.sealing(), WHO.user_tag, WHO.session_tag, 99, b"")
    rows = [*stored.without_witness(WHO.session_tag), newer]
    with pytest.raises(TamperedError, match="an older row was replayed"):
        open_all(stored.attempt(), rows)


def test_error_of_a_tampered_witness_names_it_and_the_row_that_it_belongs_to() -> None:
    stored = Stored()
    seal = other_value(stored.rows()[stored.indexes(WITNESS)[0]][SECOND_BLOB])
    with pytest.raises(TamperedError) as rejected:
        open_all(stored.attempt(), stored.replaced(WITNESS, SECOND_BLOB, seal))
    assert rejected.value.table == "secure_apps"
    assert f"secure_witnesses row {WHO.app_tag.hex()}" in str(rejected.value)


OPENERS: dict[str, Callable[[Attempt, Found, Stored], object]] = {
    "app": lambda attempt, found, stored: sealed_rows.open_app(attempt, found),
    "user": lambda attempt, found, stored: sealed_rows.open_user(attempt, found),
    "session": lambda attempt, found, stored: sealed_rows.open_session(attempt, found, stored.user),
}


@pytest.mark.parametrize("whose", OPENERS)
def test_witness_without_its_row_proves_that_the_row_was_removed(whose: str) -> None:
    stored = Stored()
    found = Found(stored.rows(without=[KINDS[whose]]))
    with pytest.raises(TamperedError, match=f"row of secure_{whose}s") as rejected:
        OPENERS[whose](stored.attempt(), found, stored)
    assert rejected.value.reason is Reason.MISSING


def test_rows_that_neither_exist_nor_left_a_witness_are_not_there() -> None:
    attempt, nothing = Stored().attempt(), Found([])
    assert sealed_rows.open_app(attempt, nothing) is None
    assert sealed_rows.open_user(attempt, nothing) is None
    assert sealed_rows.open_session(attempt, nothing, None) is None


def test_unknown_user_is_forgotten_by_the_key_cache_and_the_row_cache() -> None:
    stored = Stored()
    attempt = stored.knowing()
    sealed_rows.open_user(attempt, stored.found())
    assert stored.keys.knows(WHO.user_tag)
    assert attempt.cache.users.get(WHO.user_tag)
    sealed_rows.open_user(attempt, Found([]))
    assert not stored.keys.knows(WHO.user_tag)
    assert attempt.cache.users.get(WHO.user_tag) is None


@pytest.mark.parametrize("events", [0, 1])
def test_listed_session_needs_its_witness(events: int) -> None:
    stored = Stored(events=events)
    attempt, found = stored.attempt(), Found(stored.without_witness(WHO.session_tag))
    assert found.session is not None
    with pytest.raises(TamperedError, match="version witness"):
        sealed_rows.open_session_row(attempt, found, stored.user, found.session)
    listed = sealed_rows.open_session_row(attempt, stored.found(), stored.user, found.session)
    assert listed == stored.session


# --- rows of another copy of the database --------------------------------------------------------
# Each of these rows is authentic: the other copy has the same ids and the same data keys.

ANOTHER_COPY = "another copy of the database"


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("limit", [None, 3, 5])
def test_event_of_another_copy_is_rejected(at: int, limit: int | None) -> None:
    stored = Stored(events=3)
    rows = stored.with_rows_of(stored.another_copy(events=3), EVENT, at=at)
    with pytest.raises(TamperedError, match=ANOTHER_COPY) as rejected:
        open_last(stored.attempt(), rows, limit)
    assert rejected.value.reason is Reason.MISMATCH


@pytest.mark.parametrize("snapshot", [None, LARGE])
@pytest.mark.parametrize("limit", [None, 1, 2])
def test_session_row_of_another_copy_is_rejected(snapshot: bytes | None, limit: int | None) -> None:
    stored = Stored(events=3, snapshot=snapshot)
    other = stored.another_copy(events=3, snapshot=snapshot)
    rows = [
        row
        for row in stored.with_rows_of(other, SESSION)
        if row[0] != EVENT or limit is None or row[1] >= 3 - limit
    ]
    with pytest.raises(TamperedError, match=ANOTHER_COPY) as rejected:
        open_last(stored.attempt(), rows, limit)
    assert rejected.value.table == ("secure_bases" if snapshot else "secure_sessions")


@pytest.mark.parametrize("at", [2, 3])
def test_last_events_are_rejected_if_one_is_of_another_copy(at: int) -> None:
    stored = Stored(events=4)
    rows = stored.with_rows_of(stored.another_copy(events=4), EVENT, at=at)
    last = [row for row in rows if row[0] != EVENT or row[1] >= 2]
    with pytest.raises(TamperedError, match=ANOTHER_COPY):
        open_last(stored.attempt(), last, 2)


def test_event_before_those_that_are_read_is_not_judged() -> None:
    stored = Stored(events=4)
    rows = stored.with_rows_of(stored.another_copy(events=4), EVENT, at=1)
    last = [row for row in rows if row[0] != EVENT or row[1] >= 2]
    assert open_last(stored.attempt(), last, 2) == [b"event 2", b"event 3"]


@pytest.mark.parametrize("events", [1, 3])
def test_history_whose_first_event_follows_another_is_rejected(events: int) -> None:
    """An event that was written after others does not become the first by a new number."""
    stored = Stored(events=events)
    after = stored.session._replace(head=new_link())
    first = event_row(stored.sealing(), after, 0, stored.links[0], b"event 0")
    rows = [row for row in stored.rows() if row[0] != EVENT or row[1] != 0]
    with pytest.raises(TamperedError, match=ANOTHER_COPY) as rejected:
        open_all(stored.attempt(), [*rows, first])
    assert (rejected.value.table, rejected.value.row) == ("secure_events", "3, 0")


def test_session_without_events_whose_head_is_an_event_is_rejected() -> None:
    stored = Stored(events=0)
    session = stored.session._replace(head=new_link())
    session = sealed_rows.seal_session(stored.sealing(), session)
    rows = [*stored.rows(without=[SESSION]), session_row(session)]
    with pytest.raises(TamperedError, match=ANOTHER_COPY):
        open_all(stored.attempt(), rows)


def test_snapshot_of_another_copy_is_rejected() -> None:
    stored = Stored(snapshot=LARGE)
    rows = stored.with_rows_of(stored.another_copy(snapshot=LARGE), SNAPSHOT)
    with pytest.raises(TamperedError, match=ANOTHER_COPY) as rejected:
        open_all(stored.attempt(), rows)
    error = rejected.value
    assert (error.table, error.row, error.reason) == ("secure_bases", "3", Reason.MISMATCH)


def test_session_row_of_another_copy_passes_a_read_without_events_but_its_head_is_not_proven(
    cache: RowCache,
) -> None:
    stored = Stored()
    rows = stored.with_rows_of(stored.another_copy(), SESSION)
    assert open_without_events(stored.attempt(cache=cache), rows)
    assert cache.proven_session(WHO.session_tag) is None


def open_without_events(attempt: Attempt, rows: list[RawRow]) -> StoredSession | None:
    found = Found(rows)
    return sealed_rows.open_session(attempt, found, sealed_rows.open_user(attempt, found))


def test_head_is_proven_by_reading_the_last_event(cache: RowCache) -> None:
    stored = Stored()
    open_without_events(stored.attempt(cache=cache), stored.rows())
    assert cache.proven_session(WHO.session_tag) is None
    open_last(stored.attempt(cache=cache), stored.rows(last=1), 1)
    assert cache.proven_session(WHO.session_tag) == stored.session
    open_without_events(stored.attempt(cache=cache), stored.rows())
    assert cache.proven_session(WHO.session_tag) == stored.session


def test_head_of_a_replaced_session_row_is_not_taken_for_proven(cache: RowCache) -> None:
    stored = Stored()
    open_all(stored.attempt(cache=cache), stored.rows())
    rows = stored.with_rows_of(stored.another_copy(), SESSION)
    open_without_events(stored.attempt(cache=cache), rows)
    assert cache.proven_session(WHO.session_tag) is None


@pytest.mark.parametrize("replaced", ["the row", "the witness"])
@pytest.mark.parametrize("whose", ["app", "user"])
@pytest.mark.parametrize("remembered", [False, True])
def test_row_and_witness_of_two_copies_are_rejected(
    cache: RowCache, whose: str, replaced: str, remembered: bool
) -> None:
    stored = Stored()
    if remembered:
        open_all(stored.attempt(cache=cache), stored.rows())
    kind, at = {"app": (APP, 0), "user": (USER, 1)}[whose]
    other = stored.another_copy()
    rows = (
        stored.with_rows_of(other, kind)
        if replaced == "the row"
        else stored.with_rows_of(other, WITNESS, at=at)
    )
    with pytest.raises(TamperedError, match=ANOTHER_COPY) as rejected:
        open_all(stored.attempt(cache=cache), rows)
    assert rejected.value.table == f"secure_{whose}s"
    assert rejected.value.reason is Reason.MISMATCH


def test_witness_of_a_session_has_no_link() -> None:
    stored = Stored()
    witness = witness_row(stored.sealing(), WHO.user_tag, WHO.session_tag, 3, new_link())
    with pytest.raises(TamperedError, match=ANOTHER_COPY):
        open_all(stored.attempt(), [*stored.without_witness(WHO.session_tag), witness])


# --- rows older than what this process has read ---------------------------------------------------


class Versions(NamedTuple):
    """The rows of an app, a user or a session, as stored one after the other."""

    older: list[RawRow]
    newer: list[RawRow]


def versions_of(stored: Stored, whose: str) -> Versions:
    """The rows before and after an update of the row, each with its own version witness."""
    sealing = stored.sealing()
    if whose == "session":
        session, link = stored.session, new_link()
        event = event_row(sealing, session, session.revision, link, b"event 2")
        newer = session._replace(revision=session.revision + 1, head=link, updated_at=102)
        newer = sealed_rows.seal_session(sealing, newer)
        rows = stored.rows(without=[SESSION])
        return Versions(stored.rows(), [*rows, session_row(newer), event])
    owner = {"app": stored.app, "user": stored.user}[whose]
    owner = owner._replace(version=owner.version + 1, link=new_link())
    witness = witness_row(sealing, owner.tag, owner.tag, owner.version, owner.link)
    row = owner_row(sealing, owner)
    rows = [one for one in stored.without_witness(owner.tag) if one[0] != KINDS[whose]]
    return Versions(stored.rows(), [*rows, row, witness])


@pytest.mark.parametrize("whose", TAGS)
def test_row_that_is_older_than_one_read_before_is_rejected(cache: RowCache, whose: str) -> None:
    """The row and all that prove it are older: nothing stored tells."""
    stored = Stored()
    versions = versions_of(stored, whose)
    open_all(stored.attempt(cache=cache), versions.older)
    open_all(stored.attempt(cache=cache), versions.newer)
    for _ in range(2):
        with pytest.raises(TamperedError, match="an older row was replayed") as rejected:
            open_all(stored.attempt(cache=cache), versions.older)
        assert rejected.value.reason is Reason.MISMATCH
        assert rejected.value.table == f"secure_{whose}s"
    open_all(stored.attempt(cache=cache), versions.newer)


@pytest.mark.parametrize("whose", TAGS)
def test_row_that_changed_while_it_was_read_is_no_error(cache: RowCache, whose: str) -> None:
    """Another task has read or written a newer version since the read began."""
    stored = Stored()
    versions = versions_of(stored, whose)
    slow = stored.attempt(cache=cache)
    open_all(stored.attempt(cache=cache), versions.newer)
    assert open_all(slow, versions.older)


@pytest.mark.parametrize("whose", TAGS)
def test_slow_read_does_not_make_a_process_forget_a_newer_version(
    cache: RowCache, whose: str
) -> None:
    stored = Stored()
    versions = versions_of(stored, whose)
    slow = stored.attempt(cache=cache)
    open_all(stored.attempt(cache=cache), versions.newer)
    open_all(slow, versions.older)
    with pytest.raises(TamperedError, match="an older row was replayed"):
        open_all(stored.attempt(cache=cache), versions.older)


def test_session_that_was_created_again_may_have_a_lower_revision(cache: RowCache) -> None:
    stored = Stored(events=2)
    open_all(stored.attempt(cache=cache), stored.rows())
    sealing = stored.sealing()
    session = stored.session._replace(id=4, revision=0, head=NO_LINK)
    session = sealed_rows.seal_session(sealing, session)
    rows = [
        *(row for row in stored.without_witness(session.tag) if row[0] not in (SESSION, EVENT)),
        session_row(session),
        witness_row(sealing, WHO.user_tag, session.tag, 4, b""),
    ]
    assert open_all(stored.attempt(cache=cache), rows) == []


# --- snapshots -----------------------------------------------------------------------------------


def test_snapshot_where_the_session_has_none_is_rejected() -> None:
    stored = Stored()
    added = snapshot_row(stored.sealing(), stored.session)
    with pytest.raises(TamperedError, match="this row was added") as rejected:
        open_all(stored.attempt(), [*stored.rows(), added])
    assert (rejected.value.table, rejected.value.reason) == ("secure_bases", Reason.MISMATCH)


def test_snapshot_that_is_missing_is_rejected() -> None:
    stored = Stored(snapshot=LARGE)
    with pytest.raises(TamperedError, match="it was removed") as rejected:
        open_all(stored.attempt(), stored.rows(without=[SNAPSHOT]))
    assert (rejected.value.table, rejected.value.reason) == ("secure_bases", Reason.MISMATCH)


def test_snapshot_of_an_older_revision_is_rejected() -> None:
    """Authentic, as it was at its own revision."""
    stored = Stored(snapshot=LARGE)
    older = stored.session._replace(base_revision=-7, snapshot=b'{"older":true}')
    rows = [*stored.rows(without=[SNAPSHOT]), snapshot_row(stored.sealing(), older)]
    with pytest.raises(TamperedError, match="an older row was replayed"):
        open_all(stored.attempt(), rows)


# --- what is remembered --------------------------------------------------------------------------


def counting(stored: Stored, cache: RowCache) -> tuple[Attempt, CountingKeys]:
    keys = CountingKeys(stored.keys)
    keys.load(stored.key_rows, marks())
    return stored.attempt(keys=keys, cache=cache), keys


def test_rows_that_are_stored_unchanged_are_not_decrypted_again(cache: RowCache) -> None:
    stored = Stored()
    attempt, keys = counting(stored, cache)
    open_all(attempt, stored.rows())
    assert keys.opened == 6  # app, user, session, and the version witness of each
    attempt, keys = counting(stored, cache)
    assert open_all(attempt, stored.rows()) == [b"event 0", b"event 1"]
    assert keys.opened == 0


@pytest.mark.parametrize("kind", [APP, USER, SESSION, WITNESS])
@pytest.mark.parametrize("position", [1, SECOND_BLOB])
def test_remembered_row_is_no_excuse_for_one_that_was_modified_since(
    cache: RowCache, kind: int, position: int
) -> None:
    stored = Stored()
    open_all(stored.attempt(cache=cache), stored.rows())
    for at, index in enumerate(stored.indexes(kind)):
        value = other_value(stored.rows()[index][position])
        with pytest.raises((TamperedError, UnknownKeyError)):
            open_all(stored.attempt(cache=cache), stored.replaced(kind, position, value, at=at))


@pytest.mark.parametrize("whose", TAGS)
def test_remembered_row_without_its_witness_is_rejected(cache: RowCache, whose: str) -> None:
    stored = Stored()
    open_all(stored.attempt(cache=cache), stored.rows())
    with pytest.raises(TamperedError, match="version witness"):
        open_all(stored.attempt(cache=cache), stored.without_witness(TAGS[whose]))


def test_snapshot_of_a_remembered_session_is_read_again(cache: RowCache) -> None:
    """A snapshot may be large: only the session's own row is remembered."""
    stored = Stored(snapshot=LARGE)
    open_all(stored.attempt(cache=cache), stored.rows())
    remembered = cache.proven_session(WHO.session_tag)
    assert remembered == stored.session._replace(snapshot=None)
    attempt, keys = counting(stored, cache)
    session = sealed_rows.open_session(attempt, stored.found(), stored.user)
    assert session == stored.session
    assert keys.opened == 3  # the session, its snapshot, its version witness


def test_rejected_row_is_not_remembered(cache: RowCache) -> None:
    stored = Stored()
    with pytest.raises(TamperedError):
        open_all(stored.attempt(cache=cache), stored.without_witness(WHO.app_tag))
    assert cache.apps.get(WHO.app_tag) is None


# --- events --------------------------------------------------------------------------------------

COMPLETE: dict[str, tuple[int, list[int], int | None]] = {
    "all": (3, [0, 1, 2], None),
    "all, in any order": (3, [2, 0, 1], None),
    "none of none": (0, [], None),
    "the last two": (3, [1, 2], 2),
    "as many as there are": (3, [0, 1, 2], 5),
    "no event asked for": (3, [], 0),
}
INCOMPLETE: dict[str, tuple[int, list[Any], int | None]] = {
    "first is missing": (3, [1, 2], None),
    "one in the middle is missing": (3, [0, 2], None),
    "last is missing": (3, [0, 1], None),
    "all are missing": (3, [], None),
    "one is there twice": (3, [0, 1, 1, 2], None),
    "a copy fills a gap": (3, [0, 2, 2], None),
    "one more": (3, [0, 1, 2, 3], None),
    "one before the first": (3, [-1, 0, 1, 2], None),
    "one where there are none": (0, [0], None),
    "older than the last ones": (3, [0, 2], 2),
    "fewer than the last ones": (3, [2], 2),
    "more than the last ones": (3, [0, 1, 2], 2),
    "a text": (3, [0, "1", 2], None),
    "a fraction": (3, [0, 1, 1.5, 2], None),
    "NULL": (3, [0, None, 2], None),
}


def history(seqs: list[Any]) -> list[Any]:
    return [raw(EVENT, (seq, 100), b"") for seq in seqs]


@pytest.mark.parametrize("case", COMPLETE)
def test_complete_history_is_accepted_and_put_in_order(case: str) -> None:
    revision, seqs, limit = COMPLETE[case]
    session = Stored().session._replace(revision=revision)
    rows = history(seqs)
    sealed_rows.check_events(session, rows, limit)
    assert [row[1] for row in rows] == sorted(seqs)


@pytest.mark.parametrize("case", INCOMPLETE)
def test_incomplete_history_is_rejected(case: str) -> None:
    revision, seqs, limit = INCOMPLETE[case]
    session = Stored().session._replace(revision=revision)
    with pytest.raises(TamperedError, match="added, removed or renumbered") as rejected:
        sealed_rows.check_events(session, history(seqs), limit)
    error = rejected.value
    assert (error.table, error.row, error.reason) == ("secure_events", "3", Reason.MISMATCH)


@pytest.mark.parametrize("last_seq", [0, 2])
def test_revision_that_disagrees_with_the_last_event_is_rejected(last_seq: int) -> None:
    stored = Stored(events=2)
    with pytest.raises(TamperedError, match="events were added or removed") as rejected:
        open_all(stored.attempt(), stored.replaced(SESSION, 8, last_seq))
    assert rejected.value.reason is Reason.MISMATCH


def test_events_of_several_data_keys_open_in_one_history() -> None:
    stored = Stored(events=2)
    keys = stored.read_keys()
    newer = keys.new(WHO.user_tag)
    attempt, third, fourth = stored.attempt(keys=keys), new_link(), new_link()
    rows = [row for row in stored.rows() if row[0] == EVENT]
    rows.append(event_row(attempt, stored.session, 2, third, b"event 2"))
    older = stored.sealing()
    rows.append(event_row(older, stored.session._replace(head=third), 3, fourth, b"event 3"))
    opened = sealed_rows.open_events(attempt, stored.session, rows, NO_LINK)
    assert opened == ([b"event 0", b"event 1", b"event 2", b"event 3"], fourth)
    assert newer.generation == 1


@pytest.mark.parametrize("record", [b"", None, "text", 17, b"{}", b"AKS\2\1"])
def test_event_that_is_no_record_is_rejected_by_name(record: object) -> None:
    stored = Stored(events=2)
    with pytest.raises(DecryptionError) as rejected:
        open_all(stored.attempt(), stored.replaced(EVENT, BLOB, record, at=1))
    assert (rejected.value.table, rejected.value.row) == ("secure_events", "3, 1")


# --- names and identities ------------------------------------------------------------------------


def test_naming_gives_the_row_to_an_error_that_names_none() -> None:
    with pytest.raises(TamperedError) as rejected, naming("secure_users", 7):
        raise TamperedError
    assert (rejected.value.table, rejected.value.row) == ("secure_users", "7")


def test_naming_keeps_the_row_that_an_error_names_already() -> None:
    with pytest.raises(TamperedError) as rejected, naming("secure_users", 7):
        raise TamperedError(table="secure_data_keys", row=8)
    assert (rejected.value.table, rejected.value.row) == ("secure_data_keys", "8")
    assert str(rejected.value).startswith("secure_users row 7: secure_data_keys row 8: ")


def test_naming_leaves_other_errors_alone() -> None:
    with pytest.raises(ValueError, match="unnamed"), naming("secure_users", 7):
        raise ValueError("unnamed")


def test_identities_of_different_ids_share_no_tag() -> None:
    ids = [("a", "b", "c"), ("a", "b", "d"), ("a", "e", "c"), ("f", "b", "c"), ("ab", "", "c")]
    whose: list[Identity] = [identify(INDEX, *one) for one in ids]
    assert len({who.session_tag for who in whose}) == len(ids)
    assert len({(who.app_name, who.app_tag) for who in whose}) == 3
    assert len({who.user_tag for who in whose}) == 4


def test_parameters_of_a_query_hold_no_plaintext_id() -> None:
    assert WHO.tags() == {
        "app_tag": WHO.app_tag, "user_tag": WHO.user_tag, "session_tag": WHO.session_tag
    }  # fmt: skip
    assert all(len(tag) == 16 for tag in (WHO.app_tag, WHO.user_tag, WHO.session_tag))
