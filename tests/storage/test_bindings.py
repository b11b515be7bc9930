"""Each row opens as what was sealed, and as nothing else; rows that prove each other agree."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from adk_secure_sessions.errors import DecryptionError, Reason, TamperedError, UnknownKeyError
from adk_secure_sessions.keys.data_keys import StagedKeys
from adk_secure_sessions.storage import bindings
from adk_secure_sessions.storage.bindings import NO_SNAPSHOT, Attempt, Identity, RowCache, identify
from adk_secure_sessions.storage.queries import Found
from tests.storage.support import (
    APP,
    EVENT,
    INDEX,
    SESSION,
    SNAPSHOT,
    USER,
    WHO,
    WITNESS,
    RawRow,
    Stored,
    raw,
)

LARGE = b'{"large":true}'


class CountingKeys(StagedKeys):
    """Counts how many records were decrypted."""

    opened = 0

    def open(self, owner: bytes, context: bytes, stored: bytes) -> bytes:
        self.opened += 1
        return super().open(owner, context, stored)


def open_all(attempt: Attempt, rows: list[RawRow]) -> list[bytes]:
    """Open everything that a read of one session opens; the events' plaintexts."""
    found = Found(rows)
    bindings.open_app(attempt, found)
    user = bindings.open_user(attempt, found)
    session = bindings.open_session(attempt, found, user)
    assert session is not None
    bindings.check_events(session, found.events, None)
    return bindings.open_events(attempt, session, found.events)


# --- contexts ------------------------------------------------------------------------------------


class Context(NamedTuple):
    """A context, made from its parts, and another value for each part."""

    make: Callable[..., bytes]
    parts: tuple[Any, ...]
    others: tuple[Any, ...]


TAG, OTHER_TAG = b"t" * 16, b"u" * 16
CONTEXTS = {
    "app": Context(bindings.app_context, ("app", TAG, 1, 2), ("App", OTHER_TAG, 3, 4)),
    "user": Context(bindings.user_context, ("app", TAG, 1, 2, 3), ("App", OTHER_TAG, 4, 5, 6)),
    "witness": Context(bindings.witness_context, ("app", TAG, 1), ("App", OTHER_TAG, 2)),
    "session": Context(
        bindings.session_context,
        ("app", "user", TAG, 1, 2, 3, 4, 5, 6),
        ("App", "User", OTHER_TAG, 7, 8, 9, 10, 11, 12),
    ),
    "snapshot": Context(
        lambda app, user, session, *numbers: bindings.snapshot_context(
            identify(INDEX, app, user, session), *numbers
        ),
        ("app", "user", "session", 1, 2),
        ("App", "User", "Session", 3, 4),
    ),
    "event": Context(
        lambda app, user, session, *numbers: bindings.event_context(
            identify(INDEX, app, user, session), *numbers
        ),
        ("app", "user", "session", 1, 2, 3),
        ("App", "User", "Session", 4, 5, 6),
    ),
}


def every_part() -> Iterator[Any]:
    for kind, context in CONTEXTS.items():
        for number in range(len(context.parts)):
            yield pytest.param(kind, number, id=f"{kind}-{number}")


@pytest.mark.parametrize(("kind", "part"), [*every_part()])
def test_context_differs_wherever_one_part_differs(kind: str, part: int) -> None:
    make, parts, others = CONTEXTS[kind]
    changed = (*parts[:part], others[part], *parts[part + 1 :])
    assert make(*parts) == make(*parts)
    assert make(*changed) != make(*parts)


def test_context_of_one_kind_is_never_that_of_another() -> None:
    made = [context.make(*context.parts) for context in CONTEXTS.values()]
    assert len(set(made)) == len(CONTEXTS)


@pytest.mark.parametrize("kind", ["app", "user", "session"])
@pytest.mark.parametrize(("one", "other"), [(("ab", "c"), ("a", "bc")), (("", "a"), ("a", ""))])
def test_context_tells_where_one_text_ends_and_the_next_begins(
    kind: str, one: tuple[str, str], other: tuple[str, str]
) -> None:
    made = []
    for first, second in (one, other):
        tag: Any = second.encode()
        parts = list(CONTEXTS[kind].parts)
        parts[0:2] = [first, second] if kind == "session" else [first, tag]
        made.append(CONTEXTS[kind].make(*parts))
    assert made[0] != made[1]


# --- what was sealed opens -----------------------------------------------------------------------


def test_sealed_rows_open_as_what_they_were() -> None:
    stored = Stored()
    attempt, found = stored.attempt(), stored.found()
    assert bindings.open_app(attempt, found) == stored.app
    user = bindings.open_user(attempt, found)
    assert user == stored.user
    session = bindings.open_session(attempt, found, user)
    assert session == stored.session
    assert session is not None
    assert bindings.open_events(attempt, session, found.events) == [b"event 0", b"event 1"]


def test_sealed_snapshot_opens_under_its_overlay() -> None:
    stored = Stored(snapshot=LARGE)
    attempt, found = stored.attempt(), stored.found()
    session = bindings.open_session(attempt, found, bindings.open_user(attempt, found))
    assert session is not None
    assert (session.overlay, session.snapshot) == (b'{"s":1}', LARGE)


def test_sealing_the_same_twice_gives_different_records() -> None:
    stored = Stored()
    attempt = stored.attempt()
    assert bindings.seal_app(attempt, stored.app) != bindings.seal_app(attempt, stored.app)


# --- what was changed, or belongs elsewhere, does not ---------------------------------------------

COLUMNS = [
    (APP, "id", 1), (APP, "version", 2), (APP, "app_name", 8), (APP, "state", 9),
    (USER, "id", 1), (USER, "app_row", 2), (USER, "version", 3), (USER, "tag", 8),
    (USER, "state", 9),
    (WITNESS, "number", 1), (WITNESS, "seal", 9),
    (SESSION, "id", 1), (SESSION, "user_row", 2), (SESSION, "revision", 3),
    (SESSION, "base_revision", 4), (SESSION, "created_at", 5), (SESSION, "updated_at", 6),
    (SESSION, "last_seq", 7), (SESSION, "tag", 8), (SESSION, "state", 9),
    (SNAPSHOT, "session_row", 1), (SNAPSHOT, "revision", 2), (SNAPSHOT, "state", 8),
    (EVENT, "seq", 1), (EVENT, "time", 2), (EVENT, "event", 8),
]  # fmt: skip
NAMES = {APP: "app", USER: "user", WITNESS: "witness", SESSION: "session", SNAPSHOT: "snapshot"}


def other_value(value: object) -> object:
    """One more, or the last byte of several flipped."""
    if isinstance(value, int):
        return value + 1
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
    position = 8 if kind in (SNAPSHOT, EVENT) else 9
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


PAIRS = [*itertools.permutations([(APP, 9), (USER, 9), (SESSION, 9), (SNAPSHOT, 8), (EVENT, 8)], 2)]


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
    attempt, (user, session) = stored.attempt(), (stored.user, stored.session)
    sealed = {
        USER: bindings.seal_user(attempt, user),
        SESSION: bindings.seal_session(attempt, session),
        SNAPSHOT: bindings.seal_snapshot(attempt, session.id, 0, LARGE),
        EVENT: bindings.seal_event(attempt, session.id, 0, 100, b"event 0"),
    }[kind]
    app_key = attempt.keys.current(WHO.app_tag)
    assert app_key is not None
    forged = sealed[:5] + app_key.id.to_bytes(8, "big") + sealed[13:]
    with pytest.raises(TamperedError) as rejected:
        open_all(attempt, stored.replaced(kind, 8 if kind in (SNAPSHOT, EVENT) else 9, forged))
    assert rejected.value.reason is Reason.WRONG_OWNER


def test_user_of_another_tag_is_not_the_requested_one() -> None:
    stored = Stored()
    with pytest.raises(TamperedError, match="not the requested user") as rejected:
        bindings.open_user(
            stored.attempt(WHO._replace(user_tag=WHO.app_tag)), Found(stored.rows(without=[APP]))
        )
    assert rejected.value.reason is Reason.WRONG_OWNER


def test_session_of_another_tag_is_not_the_requested_one() -> None:
    stored = Stored()
    attempt, found = stored.attempt(WHO._replace(session_tag=WHO.app_tag)), stored.found()
    with pytest.raises(TamperedError, match="not the requested session"):
        bindings.open_session(attempt, found, bindings.open_user(attempt, found))


def test_session_without_its_users_row_is_rejected() -> None:
    stored = Stored()
    with pytest.raises(TamperedError, match="its user's row was removed") as rejected:
        bindings.open_session(stored.attempt(), stored.found(), None)
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
    newer = raw(WITNESS, (9,), TAGS[whose], bindings.seal_witness(
        stored.attempt(), TAGS[whose], TAGS[whose], 9
    ))  # fmt: skip
    rows = [*stored.without_witness(TAGS[whose]), newer]
    with pytest.raises(TamperedError, match="an older row was replayed") as rejected:
        open_all(stored.attempt(), rows)
    assert rejected.value.reason is Reason.MISMATCH


def test_witness_of_a_session_that_was_recreated_rejects_the_former_row() -> None:
    stored = Stored()
    seal = bindings.seal_witness(stored.attempt(), WHO.user_tag, WHO.session_tag, 99)
    rows = [*stored.without_witness(WHO.session_tag), raw(WITNESS, (99,), WHO.session_tag, seal)]
    with pytest.raises(TamperedError, match="an older row was replayed"):
        open_all(stored.attempt(), rows)


def test_error_of_a_tampered_witness_names_it_and_the_row_that_it_belongs_to() -> None:
    stored = Stored()
    seal = other_value(stored.rows()[stored.indexes(WITNESS)[0]][9])
    with pytest.raises(TamperedError) as rejected:
        open_all(stored.attempt(), stored.replaced(WITNESS, 9, seal))
    assert rejected.value.table == "secure_apps"
    assert f"secure_witnesses row {WHO.app_tag.hex()}" in str(rejected.value)


OPENERS: dict[str, Callable[[Attempt, Found, Stored], object]] = {
    "app": lambda attempt, found, stored: bindings.open_app(attempt, found),
    "user": lambda attempt, found, stored: bindings.open_user(attempt, found),
    "session": lambda attempt, found, stored: bindings.open_session(attempt, found, stored.user),
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
    assert bindings.open_app(attempt, nothing) is None
    assert bindings.open_user(attempt, nothing) is None
    assert bindings.open_session(attempt, nothing, None) is None


def test_unknown_user_is_forgotten_by_the_key_cache_and_the_row_cache() -> None:
    stored = Stored()
    attempt = stored.knowing()
    bindings.open_user(attempt, stored.found())
    assert stored.keys.knows(WHO.user_tag)
    assert attempt.cache.users.get(WHO.user_tag)
    bindings.open_user(attempt, Found([]))
    assert not stored.keys.knows(WHO.user_tag)
    assert attempt.cache.users.get(WHO.user_tag) is None


@pytest.mark.parametrize(("events", "needed"), [(0, True), (1, False)])
def test_listing_needs_the_witness_only_of_a_session_without_events(
    events: int, needed: bool
) -> None:
    stored = Stored(events=events)
    attempt, found = stored.attempt(), Found(stored.without_witness(WHO.session_tag))
    assert found.session is not None
    if needed:
        with pytest.raises(TamperedError, match="version witness"):
            bindings.open_listed_session(attempt, found, stored.user, found.session)
    else:
        listed = bindings.open_listed_session(attempt, found, stored.user, found.session)
        assert listed == stored.session


# --- snapshots -----------------------------------------------------------------------------------


def test_snapshot_where_the_session_has_none_is_rejected() -> None:
    stored = Stored()
    sealed = bindings.seal_snapshot(stored.attempt(), 3, 0, LARGE)
    with pytest.raises(TamperedError, match="this row was added") as rejected:
        open_all(stored.attempt(), [*stored.rows(), raw(SNAPSHOT, (3, NO_SNAPSHOT), sealed)])
    assert (rejected.value.table, rejected.value.reason) == ("secure_bases", Reason.MISMATCH)


def test_snapshot_that_is_missing_is_rejected() -> None:
    stored = Stored(snapshot=LARGE)
    with pytest.raises(TamperedError, match="it was removed") as rejected:
        open_all(stored.attempt(), stored.rows(without=[SNAPSHOT]))
    assert (rejected.value.table, rejected.value.reason) == ("secure_bases", Reason.MISMATCH)


def test_snapshot_of_an_older_revision_is_rejected() -> None:
    """Authentic, as it was at its own revision."""
    stored = Stored(snapshot=LARGE)
    older = bindings.seal_snapshot(stored.attempt(), 3, -7, b'{"older":true}')
    rows = [*stored.rows(without=[SNAPSHOT]), raw(SNAPSHOT, (3, -7), older)]
    with pytest.raises(TamperedError, match="an older row was replayed"):
        open_all(stored.attempt(), rows)


# --- what is remembered --------------------------------------------------------------------------


def counting(stored: Stored, cache: RowCache) -> tuple[Attempt, CountingKeys]:
    keys = CountingKeys(stored.keys)
    keys.load(stored.key_rows)
    return stored.attempt(keys=keys, cache=cache), keys


@pytest.fixture
def cache() -> RowCache:
    return RowCache(10)


def test_rows_that_are_stored_unchanged_are_not_decrypted_again(cache: RowCache) -> None:
    stored = Stored()
    attempt, keys = counting(stored, cache)
    open_all(attempt, stored.rows())
    assert keys.opened == 6  # app, user, session, and the version witness of each
    attempt, keys = counting(stored, cache)
    assert open_all(attempt, stored.rows()) == [b"event 0", b"event 1"]
    assert keys.opened == 0


@pytest.mark.parametrize("kind", [APP, USER, SESSION, WITNESS])
@pytest.mark.parametrize("position", [1, 9])
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


def test_session_with_a_snapshot_is_not_remembered(cache: RowCache) -> None:
    """A snapshot may be large."""
    stored = Stored(snapshot=LARGE)
    open_all(stored.attempt(cache=cache), stored.rows())
    assert cache.sessions.get(WHO.session_tag) is None
    assert cache.users.get(WHO.user_tag)


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
    bindings.check_events(session, rows, limit)
    assert [row[1] for row in rows] == sorted(seqs)


@pytest.mark.parametrize("case", INCOMPLETE)
def test_incomplete_history_is_rejected(case: str) -> None:
    revision, seqs, limit = INCOMPLETE[case]
    session = Stored().session._replace(revision=revision)
    with pytest.raises(TamperedError, match="added, removed or renumbered") as rejected:
        bindings.check_events(session, history(seqs), limit)
    error = rejected.value
    assert (error.table, error.row, error.reason) == ("secure_events", "3", Reason.MISMATCH)


@pytest.mark.parametrize("last_seq", [0, 2])
def test_revision_that_disagrees_with_the_last_event_is_rejected(last_seq: int) -> None:
    stored = Stored(events=2)
    with pytest.raises(TamperedError, match="events were added or removed") as rejected:
        open_all(stored.attempt(), stored.replaced(SESSION, 7, last_seq))
    assert rejected.value.reason is Reason.MISMATCH


def test_events_of_several_data_keys_open_in_one_history() -> None:
    stored = Stored(events=2)
    keys = StagedKeys(stored.keys)
    keys.load(stored.key_rows)
    newer = keys.new(WHO.user_tag)
    attempt = stored.attempt(keys=keys)
    third = raw(EVENT, (2, 102), bindings.seal_event(attempt, 3, 2, 102, b"event 2"))
    rows = [row for row in stored.rows() if row[0] == EVENT]
    both = [*rows, third, rows[0]]
    opened = bindings.open_events(attempt, stored.session, both)
    assert opened == [b"event 0", b"event 1", b"event 2", b"event 0"]
    assert newer.generation == 1


@pytest.mark.parametrize("record", [b"", None, "text", 17, b"{}", b"AKS\1\1"])
def test_event_that_is_no_record_is_rejected_by_name(record: object) -> None:
    stored = Stored(events=2)
    with pytest.raises(DecryptionError) as rejected:
        open_all(stored.attempt(), stored.replaced(EVENT, 8, record, at=1))
    assert (rejected.value.table, rejected.value.row) == ("secure_events", "3, 1")


# --- names and identities ------------------------------------------------------------------------


def test_naming_gives_the_row_to_an_error_that_names_none() -> None:
    with pytest.raises(TamperedError) as rejected, bindings.naming("secure_users", 7):
        raise TamperedError
    assert (rejected.value.table, rejected.value.row) == ("secure_users", "7")


def test_naming_keeps_the_row_that_an_error_names_already() -> None:
    with pytest.raises(TamperedError) as rejected, bindings.naming("secure_users", 7):
        raise TamperedError(table="secure_data_keys", row=8)
    assert (rejected.value.table, rejected.value.row) == ("secure_data_keys", "8")
    assert str(rejected.value).startswith("secure_users row 7: secure_data_keys row 8: ")


def test_naming_leaves_other_errors_alone() -> None:
    with pytest.raises(ValueError, match="unnamed"), bindings.naming("secure_users", 7):
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
