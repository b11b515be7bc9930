"""Each write, driven by hand: what it asks of the database, in which order, and what it concludes.

`steps_of(...)` is the transaction, a generator: `next` gives its first request, `send` answers it.
"""

from collections.abc import Callable
from typing import Any, cast

import pytest

from adk_secure_sessions.db.protocol import Apply, Conflict
from adk_secure_sessions.errors import Reason, TamperedError, UnknownKeyError
from adk_secure_sessions.formats.records import NO_LINK, split_link, unpack
from adk_secure_sessions.formats.states import loads
from adk_secure_sessions.keys.data_keys import StagedKeys
from adk_secure_sessions.storage import sealed_rows
from adk_secure_sessions.storage.attempts import Attempt, KeySource, NeedsDataKey, RowCache
from adk_secure_sessions.storage.owner_changes import OwnerChanges
from adk_secure_sessions.storage.queries import Found
from adk_secure_sessions.storage.rows import (
    EVENTS,
    SESSIONS,
    SNAPSHOTS,
    EventRow,
    SessionRow,
    SnapshotRow,
)
from adk_secure_sessions.storage.schema import NEVER, NO_SNAPSHOT
from adk_secure_sessions.storage.writes import (
    OVERLAY_LIMIT,
    AppendEvent,
    Created,
    CreateSession,
    DeleteSession,
    DuplicateSession,
    Expected,
    MissingSession,
    NewEvent,
    RenewKey,
    StaleRevision,
)
from tests.storage.support import (
    APP,
    BLOB,
    EVENT,
    SECOND_BLOB,
    SESSION,
    SNAPSHOT,
    USER,
    WHO,
    WITNESS,
    Stored,
    change_in,
    data_keys,
    key_row,
    key_rows,
    keyring,
    marks,
    owner_row,
    raw,
    request,
    result_of,
    steps_of,
)

READ, READ_WITH_KEYS = "read SESSION_WITHOUT_EVENTS", "read SESSION_WITHOUT_EVENTS with keys"
READ_LAST = "read SESSION_WITH_LAST_EVENTS"  # before an append: the last event proves the head
READ_LAST_WITH_KEYS = "read SESSION_WITH_LAST_EVENTS with keys"
NO_EVENTS = [EVENT]


def event(**deltas: dict[str, Any]) -> NewEvent:
    """An event that changes the states named: app, user, session."""
    scopes = [deltas.get(scope, {}) for scope in ("app", "user", "session")]
    return NewEvent(b"the event", 500, *scopes)


def append(
    stored: Stored,
    new: NewEvent | None = None,
    *,
    expected: tuple[int, int] | None = None,
) -> AppendEvent:
    at = Expected(*(expected or (stored.session.id, stored.session.revision)))
    return AppendEvent(WHO, at, new or event(), lambda session: None)


def create(
    state: bytes = b'{"s":1}',
    *,
    app: dict[str, Any] | None = None,
    user: dict[str, Any] | None = None,
) -> CreateSession:
    return CreateSession(WHO, app or {}, user or {}, state, 500)


def reading(stored: Stored, *, is_first: bool = False) -> Attempt:
    """An attempt of a process that has the owners' keys but does not know the session."""
    return stored.knowing()._replace(is_first=is_first)


# --- append --------------------------------------------------------------------------------------


def test_rows_that_a_write_has_read_are_cached_only_after_the_commit() -> None:
    # Another write of the same transaction may have changed them, and is not committed yet.
    stored = Stored(events=2)
    committed: list[Callable[[], None]] = []
    attempt = reading(stored)._replace(after_commit=committed, cache=RowCache(10))
    steps = steps_of(append(stored), attempt)
    assert request(next(steps)) == READ_LAST
    assert request(steps.send(stored.rows(last=1))) == "apply UPDATE_SESSION, INSERT_EVENT"
    caches = (attempt.cache.apps, attempt.cache.users, attempt.cache.sessions)
    assert not any(cache._entries for cache in caches)
    for put in committed:
        put()
    seen = attempt.cache.sessions.get(stored.session.tag)
    assert seen is not None
    assert seen.value == stored.session
    assert seen.has_proven_head


def test_append_to_a_known_session_needs_no_read() -> None:
    stored = Stored(events=2)
    steps = steps_of(append(stored), stored.knowing_session())
    step = next(steps)
    assert request(step) == "apply UPDATE_SESSION, INSERT_EVENT"
    row = change_in(step, "UPDATE_SESSION").parameters
    assert (row["at_revision"], row["revision"], row["updated_at"]) == (2, 3, 500)
    assert row["at_state"] == stored.session.sealed
    session = result_of(steps, True)
    assert (session.revision, session.updated_at, session.sealed) == (3, 500, row["state"])


def test_append_stores_the_event_bound_to_its_place_in_the_history() -> None:
    stored = Stored(events=2)
    attempt = stored.knowing_session()
    steps = steps_of(append(stored), attempt)
    row = change_in(next(steps), "INSERT_EVENT").parameters
    assert (row["session_row"], row["seq"], row["time"]) == (3, 2, 500)
    record: Any = row["event"]
    context = EVENTS.context(WHO.ids, EventRow(3, 2, 500, record))
    plaintext = attempt.keys.open(WHO.user_tag, context, record)
    head = result_of(steps, True).head
    assert plaintext == head + stored.session.head + b"the event"
    assert head not in (NO_LINK, stored.session.head)


def test_append_to_a_known_session_that_has_changed_reads_it() -> None:
    stored = Stored(events=2)
    known = sealed_rows.seal_session(stored.sealing(), stored.session)
    steps = steps_of(append(stored), stored.knowing_session(known))
    assert request(next(steps)) == "apply UPDATE_SESSION, INSERT_EVENT"
    assert request(steps.send(False)) == READ_LAST
    step = steps.send(stored.rows(last=1))
    assert request(step) == "apply UPDATE_SESSION, INSERT_EVENT"
    assert change_in(step, "UPDATE_SESSION").parameters["at_state"] == stored.session.sealed
    assert result_of(steps, True).revision == 3


def test_append_reads_a_session_that_is_not_known() -> None:
    stored = Stored()
    steps = steps_of(append(stored), stored.knowing())
    assert request(next(steps)) == READ_LAST


def test_append_reads_the_keys_with_the_rows_where_they_are_not_known() -> None:
    stored = Stored()
    remembered = stored.knowing_session().cache
    attempt = stored.attempt(keys=StagedKeys(stored.keys), cache=remembered)
    steps = steps_of(append(stored), attempt)
    assert request(next(steps)) == READ_LAST_WITH_KEYS
    step = steps.send(stored.rows(last=1, keys=True))
    assert request(step) == "apply UPDATE_SESSION, INSERT_EVENT"


def test_second_attempt_at_an_append_trusts_nothing_that_is_remembered() -> None:
    stored = Stored()
    steps = steps_of(append(stored), stored.knowing_session()._replace(is_first=False))
    assert request(next(steps)) == READ_LAST


def test_append_that_meets_a_changed_row_after_its_read_is_a_conflict() -> None:
    stored = Stored()
    steps = steps_of(append(stored), reading(stored))
    next(steps)
    steps.send(stored.rows(last=1))
    with pytest.raises(Conflict):
        steps.send(False)


@pytest.mark.parametrize(
    ("scopes", "changes"),
    [
        (["session"], "UPDATE_SESSION, INSERT_EVENT"),
        (["user"], "UPDATE_SESSION, INSERT_EVENT, UPDATE_USER, UPDATE_WITNESS"),
        (["app"], "UPDATE_SESSION, INSERT_EVENT, UPDATE_APP, UPDATE_WITNESS"),
        (
            ["app", "user", "session"],
            "UPDATE_SESSION, INSERT_EVENT, UPDATE_APP, UPDATE_WITNESS, UPDATE_USER, UPDATE_WITNESS",
        ),
    ],
    ids=["session", "user", "app", "all"],
)
def test_append_changes_the_row_of_each_scope_and_its_witness(
    scopes: list[str], changes: str
) -> None:
    stored = Stored()
    steps = steps_of(
        append(stored, event(**{scope: {"new": 1} for scope in scopes})), reading(stored)
    )
    assert request(next(steps)) == READ_LAST
    assert request(steps.send(stored.rows(last=1))) == f"apply {changes}"


@pytest.mark.parametrize("scope", ["app", "user"])
def test_known_session_is_read_where_a_shared_state_changes(scope: str) -> None:
    """That state may have been changed by anybody."""
    stored = Stored()
    new = event(**{scope: {"new": 1}})
    steps = steps_of(append(stored, new), stored.knowing_session())
    assert request(next(steps)) == READ_LAST


@pytest.mark.parametrize(("scope", "version"), [("app", 5), ("user", 7)])
def test_changed_scope_goes_to_its_next_version_with_its_witness(scope: str, version: int) -> None:
    stored = Stored()
    steps = steps_of(append(stored, event(**{scope: {"new": 1}})), reading(stored))
    next(steps)
    step = steps.send(stored.rows(last=1))
    row = change_in(step, f"UPDATE_{scope.upper()}").parameters
    witness = change_in(step, "UPDATE_WITNESS").parameters
    assert (row["at_version"], row["version"]) == (version, version + 1)
    assert (witness["at_number"], witness["number"]) == (version, version + 1)


def test_append_to_no_session_reports_that_it_is_missing() -> None:
    stored = Stored()
    steps = steps_of(append(stored), reading(stored))
    next(steps)
    with pytest.raises(MissingSession):
        steps.send([])


@pytest.mark.parametrize(
    "expected", [(3, 1), (3, 3), (4, 2)], ids=["older", "newer", "another row"]
)
def test_append_at_another_revision_or_row_is_stale(expected: tuple[int, int]) -> None:
    stored = Stored(events=2)
    steps = steps_of(append(stored, expected=expected), reading(stored))
    next(steps)
    with pytest.raises(StaleRevision):
        steps.send(stored.rows(last=1))


def sent_append(stored: Stored) -> tuple[AppendEvent, Apply, list[Any]]:
    """An append that was sent; what it sent, and the rows of the next read if it is stored."""
    operation = append(stored)
    sent = next(steps_of(operation, stored.knowing_session()))
    assert isinstance(sent, Apply)
    row = change_in(sent, "UPDATE_SESSION").parameters
    event = change_in(sent, "INSERT_EVENT").parameters["event"]
    numbers = [3, 2, row["revision"], row["base_revision"], 100, row["updated_at"], NEVER, 2]
    rows = stored.rows(without=[EVENT, SESSION])
    rows.append(raw(SESSION, numbers, WHO.session_tag, row["state"]))
    return operation, sent, [*rows, raw(EVENT, [2, 500], event)]


def test_append_whose_answer_was_lost_finds_its_own_event_and_is_not_stale() -> None:
    stored = Stored(events=2)
    operation, sent, rows = sent_append(stored)
    steps = steps_of(operation, reading(stored))
    assert request(next(steps)) == READ_LAST
    assert request(steps.send(rows)) == "read EVENT_AT"
    session = result_of(steps, rows[-1:])
    assert session.revision == 3
    assert session.sealed == change_in(sent, "UPDATE_SESSION").parameters["state"]


def test_append_whose_answer_was_lost_is_stale_where_another_event_is_stored() -> None:
    stored = Stored(events=2)
    operation, _, _ = sent_append(stored)
    _, _, rows = sent_append(stored)
    steps = steps_of(operation, reading(stored))
    next(steps)
    assert request(steps.send(rows)) == "read EVENT_AT"
    with pytest.raises(StaleRevision):
        steps.send(rows[-1:])


def test_append_to_a_tampered_session_is_rejected_before_anything_is_changed() -> None:
    stored = Stored()
    steps = steps_of(append(stored), reading(stored))
    next(steps)
    with pytest.raises(TamperedError):
        steps.send(stored.replaced(SESSION, 6, 999))


def test_append_of_app_state_is_rejected_where_the_apps_row_was_removed() -> None:
    stored = Stored()
    steps = steps_of(append(stored, event(app={"new": 1})), reading(stored))
    next(steps)
    rows = [row for row in stored.rows(without=[APP], last=1) if row[BLOB] != WHO.app_tag]
    with pytest.raises(TamperedError, match="its app's row was removed"):
        steps.send(rows)


# --- the overlay over a snapshot -----------------------------------------------------------------

FULL = {"large": "x" * OVERLAY_LIMIT}


def test_small_change_of_state_goes_into_the_overlay() -> None:
    stored = Stored()
    steps = steps_of(append(stored, event(session={"new": 1})), stored.knowing_session())
    assert request(next(steps)) == "apply UPDATE_SESSION, INSERT_EVENT"
    session = result_of(steps, True)
    assert loads(session.overlay) == {"s": 1, "new": 1}
    assert session.base_revision == NO_SNAPSHOT


@pytest.mark.parametrize("more", [0, 1], ids=["as large as allowed", "one byte more"])
def test_overlay_is_merged_into_a_snapshot_once_it_is_larger_than_the_limit(more: int) -> None:
    stored = Stored()
    rest = len(b'{"s":1,"k":""}')
    new = event(session={"k": "x" * (OVERLAY_LIMIT - rest + more)})
    steps = steps_of(append(stored, new), stored.knowing_session())
    snapshots = "INSERT_SNAPSHOT, " if more else ""
    assert request(next(steps)) == f"apply UPDATE_SESSION, {snapshots}INSERT_EVENT"


def test_first_snapshot_holds_the_whole_state_under_an_empty_overlay() -> None:
    stored = Stored(events=2)
    attempt = stored.knowing_session()
    steps = steps_of(append(stored, event(session=FULL)), attempt)
    step = next(steps)
    row = change_in(step, "INSERT_SNAPSHOT").parameters
    assert (row["session_row"], row["revision"]) == (3, 3)
    sealed: Any = row["state"]
    context = SNAPSHOTS.context(WHO.ids, SnapshotRow(3, 3, sealed))
    snapshot = attempt.keys.open(WHO.user_tag, context, sealed)
    session = result_of(steps, True)
    link, state = split_link(snapshot)
    assert loads(state) == {"s": 1} | FULL
    assert link == session.snapshot_link != NO_LINK
    assert (session.overlay, session.base_revision) == (b"{}", 3)
    assert session.snapshot is None, "a snapshot may be large: it is not kept in memory"


def test_next_snapshot_replaces_the_one_before() -> None:
    stored = Stored(events=2, snapshot=b'{"old":1,"s":0}')
    attempt = reading(stored)
    steps = steps_of(append(stored, event(session=FULL)), attempt)
    next(steps)
    step = steps.send(stored.rows(last=1))
    assert request(step) == "apply UPDATE_SESSION, UPDATE_SNAPSHOT, INSERT_EVENT"
    row = change_in(step, "UPDATE_SNAPSHOT").parameters
    assert (row["at_id"], row["at_revision"], row["revision"]) == (3, 0, 3)
    sealed: Any = row["state"]
    context = SNAPSHOTS.context(WHO.ids, SnapshotRow(3, 3, sealed))
    snapshot = attempt.keys.open(WHO.user_tag, context, sealed)
    link, state = split_link(snapshot)
    assert loads(state) == {"old": 1, "s": 1} | FULL
    assert link == result_of(steps, True).snapshot_link != stored.session.snapshot_link


def test_known_session_is_read_where_its_snapshot_has_to_be_merged() -> None:
    stored = Stored(snapshot=b'{"old":1}')
    known = stored.session._replace(snapshot=None)
    steps = steps_of(append(stored, event(session=FULL)), stored.knowing_session(known))
    assert request(next(steps)) == READ_LAST
    small = steps_of(append(stored, event(session={"k": 1})), stored.knowing_session(known))
    assert request(next(small)) == "apply UPDATE_SESSION, INSERT_EVENT"


# --- create --------------------------------------------------------------------------------------

NEW_OWNERS = (
    "apply INSERT_KEY, INSERT_APP, INSERT_WITNESS, INSERT_KEY, INSERT_USER, INSERT_WITNESS, "
    "INSERT_SESSION, INSERT_WITNESS"
)


def strangers(stored: Stored) -> Attempt:
    """An attempt that has read the keys of nobody, because nobody has any."""
    return stored.attempt(keys=StagedKeys(stored.keys))


def test_first_session_of_an_app_makes_app_user_their_keys_and_their_witnesses() -> None:
    stored = Stored()
    steps = steps_of(create(app={"a": 1}, user={"u": 1}), strangers(stored))
    assert request(next(steps)) == READ_WITH_KEYS
    assert request(steps.send([])) == NEW_OWNERS
    created = result_of(steps, True)
    assert (created.app.state, created.user.state) == (b'{"a":1}', b'{"u":1}')
    assert (created.session.user_row, created.user.app_row) == (created.user.id, created.app.id)
    assert created.session.revision == 0


def test_created_rows_open_again() -> None:
    stored = Stored()
    attempt = strangers(stored)
    steps = steps_of(create(), attempt)
    next(steps)
    step = steps.send([])
    assert isinstance(step, Apply)
    row = change_in(step, "INSERT_SESSION").parameters
    values: Any = row
    assert (row["created_at"], row["updated_at"], row["expires_at"]) == (500, 500, NEVER)
    context = SESSIONS.context(("clinic", "alice"), SessionRow(**values))
    record: Any = row["state"]
    assert attempt.keys.open(WHO.user_tag, context, record).endswith(b'{"s":1}')


def owners_only(stored: Stored, **more: Any) -> list[Any]:
    """The rows of the app and the user, but none of the session."""
    rows = stored.rows(without=[EVENT, SESSION, SNAPSHOT], **more)
    return [row for row in rows if not (row[0] == WITNESS and row[BLOB] == WHO.session_tag)]


def test_session_of_an_existing_user_relies_on_the_users_row() -> None:
    stored = Stored()
    steps = steps_of(create(), reading(stored))
    next(steps)
    step = steps.send(owners_only(stored))
    assert request(step) == "apply INSERT_SESSION_OF_USER, INSERT_WITNESS"
    assert change_in(step, "INSERT_SESSION_OF_USER").parameters["user_version"] == 7


def test_session_that_changes_shared_states_updates_their_rows() -> None:
    stored = Stored()
    steps = steps_of(create(app={"a": 2}, user={"u": 2}), reading(stored))
    next(steps)
    assert request(steps.send(owners_only(stored))) == (
        "apply UPDATE_APP, UPDATE_WITNESS, UPDATE_USER, UPDATE_WITNESS, INSERT_SESSION, "
        "INSERT_WITNESS"
    )


def remembering(stored: Stored) -> Attempt:
    """An attempt of a process that has opened the app's and the user's rows before."""
    cache = RowCache(10)
    found = Found(owners_only(stored))
    sealed_rows.open_app(stored.attempt(cache=cache), found)
    sealed_rows.open_user(stored.attempt(cache=cache), found)
    return stored.knowing(cache)


def test_session_of_owners_that_are_remembered_needs_no_read() -> None:
    stored = Stored()
    steps = steps_of(create(), remembering(stored))
    step = next(steps)
    assert request(step) == "apply INSERT_SESSION_OF_KNOWN, INSERT_WITNESS"
    guard = change_in(step, "INSERT_SESSION_OF_KNOWN").parameters
    assert (guard["app_version"], guard["user_version"]) == (5, 7)
    assert (guard["app_witness_number"], guard["user_witness_number"]) == (5, 7)
    assert result_of(steps, True).user == stored.user


def test_session_of_owners_that_have_changed_since_reads_them() -> None:
    stored = Stored()
    steps = steps_of(create(), remembering(stored))
    next(steps)
    assert request(steps.send(False)) == READ
    assert request(steps.send(owners_only(stored))) == (
        "apply INSERT_SESSION_OF_USER, INSERT_WITNESS"
    )


@pytest.mark.parametrize("scope", ["app", "user"])
def test_remembered_owners_are_read_where_their_state_changes(scope: str) -> None:
    stored = Stored()
    operation = create(app={"new": 1}) if scope == "app" else create(user={"new": 1})
    assert request(next(steps_of(operation, remembering(stored)))) == READ


def test_second_attempt_at_a_creation_reads_the_owners() -> None:
    stored = Stored()
    again = remembering(stored)._replace(is_first=False)
    assert request(next(steps_of(create(), again))) == READ


def test_session_id_that_is_taken_is_reported() -> None:
    stored = Stored()
    steps = steps_of(create(), reading(stored))
    next(steps)
    with pytest.raises(DuplicateSession):
        steps.send(stored.rows(without=NO_EVENTS))


def test_creation_whose_answer_was_lost_finds_its_own_session_and_is_no_duplicate() -> None:
    stored = Stored()
    operation = create()
    attempt = remembering(stored)
    step = next(steps_of(operation, attempt))
    row = change_in(step, "INSERT_SESSION_OF_KNOWN").parameters
    witness = change_in(step, "INSERT_WITNESS").parameters
    numbers = [row[name] for name in ("id", "user_row", "revision", "base_revision")]
    there = [
        raw(SESSION, [*numbers, 500, 500, NEVER, -1], WHO.session_tag, row["state"]),
        raw(WITNESS, [witness["number"]], witness["tag"], witness["seal"]),
    ]
    steps = steps_of(operation, reading(stored))
    assert request(next(steps)) == READ
    created = result_of(steps, [*owners_only(stored), *there])
    assert (created.session.id, created.user.id) == (row["id"], stored.user.id)


@pytest.mark.parametrize(("revision", "proven"), [(0, True), (1, False)])
def test_head_of_a_created_session_is_proven_as_long_as_it_has_no_events(
    revision: int, proven: bool
) -> None:
    """An event may have been appended since a creation whose answer was lost."""
    stored = Stored(events=revision)
    attempt, operation = stored.knowing(), create()
    created = Created(stored.session, stored.app, stored.user)
    operation.committed(attempt, OwnerChanges(attempt), created)
    assert (attempt.cache.proven_session(WHO.session_tag) is not None) == proven
    assert attempt.cache.sessions.get(WHO.session_tag) is not None


def test_large_first_state_is_a_snapshot_from_the_start() -> None:
    stored = Stored()
    attempt = remembering(stored)
    step = next(steps_of(create(b'{"large":"' + b"x" * OVERLAY_LIMIT + b'"}'), attempt))
    assert request(step) == "apply INSERT_SESSION_OF_KNOWN, INSERT_SNAPSHOT, INSERT_WITNESS"
    assert change_in(step, "INSERT_SESSION_OF_KNOWN").parameters["base_revision"] == 0


def test_user_of_another_apps_row_gets_no_session() -> None:
    """An attacker who can write may have changed which row the app's name leads to."""
    stored = Stored()
    moved = stored.user._replace(app_row=99)
    rows = [row for row in owners_only(stored) if row[0] != USER]
    rows.append(owner_row(stored.sealing(), moved))
    steps = steps_of(create(), reading(stored))
    next(steps)
    with pytest.raises(TamperedError, match="another app's row") as rejected:
        steps.send(rows)
    assert rejected.value.reason is Reason.WRONG_OWNER


# --- which data key encrypts ---------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 1], ids=["of the app", "of the user"])
def test_data_key_without_its_owners_row_proves_that_the_row_was_removed(kept: int) -> None:
    stored = Stored()
    steps = steps_of(create(), strangers(stored))
    next(steps)
    with pytest.raises(TamperedError, match="its data key is still stored") as rejected:
        steps.send([key_row(stored.key_rows[kept])])
    assert rejected.value.reason is Reason.MISSING


@pytest.mark.parametrize("found", [0, 2], ids=["none", "one that proves nothing"])
def test_new_owner_in_a_key_database_needs_its_key_stored_first(found: int) -> None:
    """A key that is there without the owner's row may be an erased one, inserted again."""
    stored = Stored()
    keys = StagedKeys(stored.keys)
    keys.load(stored.key_rows[:found], marks())
    attempt = stored.attempt(keys=keys, source=KeySource.KEY_DATABASE)
    steps = steps_of(create(), attempt)
    assert request(next(steps)) == READ
    with pytest.raises(NeedsDataKey) as needed:
        steps.send([])
    assert needed.value.owner == WHO.app_tag


def test_key_that_this_operation_stored_in_the_key_database_is_used_and_named() -> None:
    stored = Stored()
    older = StagedKeys(stored.keys)
    older.load(stored.key_rows, marks())
    planted = [older.new(WHO.app_tag), older.new(WHO.user_tag)]
    keys = StagedKeys(stored.keys, created=[row.id for row in stored.key_rows])
    keys.load([*stored.key_rows, *planted], marks())
    attempt = stored.attempt(keys=keys, source=KeySource.KEY_DATABASE)
    steps = steps_of(create(), attempt)
    next(steps)
    assert request(steps.send([])) == NEW_OWNERS.replace("INSERT_KEY, ", "")
    created = result_of(steps, True)
    assert (created.app.key_ids, created.user.key_ids) == (stored.app.key_ids, stored.user.key_ids)


def test_nothing_is_made_for_an_owner_whose_keys_were_not_read() -> None:
    stored = Stored()
    attempt = strangers(stored)._replace(key_source=KeySource.CACHE)
    steps = steps_of(create(), attempt)
    next(steps)
    with pytest.raises(UnknownKeyError, match="read again"):
        steps.send([])


def other_backends(stored: Stored) -> StagedKeys:
    """The keys as a process sees them whose writing backend is another than the rows'."""
    keys = StagedKeys(data_keys(stored.keys.keyring, fernet=True))
    keys.load(stored.key_rows, marks())
    return keys


def test_owner_without_a_key_of_the_writing_backend_gets_the_next_generation() -> None:
    stored = Stored()
    attempt = stored.attempt(keys=other_backends(stored))
    steps = steps_of(append(stored), attempt)
    next(steps)
    step = steps.send(stored.rows(last=1, keys=True))
    assert request(step) == (
        "apply UPDATE_SESSION, INSERT_EVENT, INSERT_KEY, UPDATE_USER, UPDATE_WITNESS"
    )
    made = change_in(step, "INSERT_KEY").parameters
    assert (made["owner"], made["generation"], made["backend_id"]) == (WHO.user_tag, 1, 2)
    for record in (
        change_in(step, "INSERT_EVENT").parameters["event"],
        change_in(step, "UPDATE_SESSION").parameters["state"],
        change_in(step, "UPDATE_USER").parameters["state"],
        change_in(step, "UPDATE_WITNESS").parameters["seal"],
    ):
        assert unpack(cast(bytes, record)) == (2, made["id"])


def test_row_of_the_owner_names_the_new_key_and_keeps_those_of_other_backends() -> None:
    stored = Stored()
    attempt = stored.attempt(keys=other_backends(stored))
    steps = steps_of(append(stored), attempt)
    next(steps)
    step = steps.send(stored.rows(last=1, keys=True))
    row, witness = (change_in(step, f"UPDATE_{one}").parameters for one in ("USER", "WITNESS"))
    made = change_in(step, "INSERT_KEY").parameters["id"]
    numbers = [2, 1, row["version"]]
    rows = [
        raw(USER, numbers, WHO.user_tag, row["state"]),
        raw(WITNESS, [witness["number"]], WHO.user_tag, witness["seal"]),
    ]
    user = sealed_rows.open_user(attempt, Found(rows))
    assert user is not None
    assert user.key_ids == (made, stored.key_rows[1].id)
    assert (user.version, user.state) == (8, stored.user.state)
    assert user.link != stored.user.link


def test_key_that_is_older_than_a_records_is_locked_while_it_encrypts() -> None:
    """Another process's backend has made a newer one; ours must not be retired meanwhile."""
    first = Stored()
    ours, keys = first.key_rows, other_backends(first)
    theirs = keys.new(WHO.user_tag)
    stored = first.another_copy(more_key_ids=(theirs.id,))
    resealed = sealed_rows.seal_session(stored.attempt(keys=keys), stored.session).sealed
    rows = [row for row in stored.replaced(SESSION, SECOND_BLOB, resealed) if row[0] != EVENT]
    last = stored.rows(last=1)[-1]
    attempt = stored.attempt(keys=StagedKeys(stored.keys))
    steps = steps_of(append(stored), attempt)
    next(steps)
    step = steps.send([*key_rows([*ours, theirs]), *rows, last])
    assert request(step) == "apply UPDATE_SESSION, INSERT_EVENT, HOLD_KEY"
    assert change_in(step, "HOLD_KEY").parameters == {"at_id": ours[1].id, "generation": 0}


def test_known_session_under_a_newer_key_is_read_with_its_keys_before_it_is_written() -> None:
    stored = Stored()
    keys = stored.read_keys()
    keys.new(WHO.user_tag)
    newer = sealed_rows.seal_session(stored.attempt(keys=keys), stored.session)
    steps = steps_of(append(stored), stored.knowing_session(newer))
    assert request(next(steps)) == READ_LAST


def test_new_data_key_is_stored_only_under_the_keyring_that_was_read() -> None:
    stored = Stored()
    steps = steps_of(create(), strangers(stored))
    next(steps)
    step = steps.send([])
    assert isinstance(step, Apply)
    guard = next(one.parameters for one in step.changes if "masters" in one.parameters)
    ring = keyring()
    assert (guard["master_id"], guard["masters"]) == (ring.current_id, ring.row_count)


def test_key_that_the_row_does_not_name_encrypts_nothing() -> None:
    """A key of a higher generation: an erased one, inserted again by who kept a copy."""
    stored = Stored()
    planted = stored.read_keys().new(WHO.user_tag)
    keys = StagedKeys(stored.keys)
    steps = steps_of(append(stored, event(user={"new": 1})), stored.attempt(keys=keys))
    next(steps)
    rows = stored.rows(last=1)
    step = steps.send([*key_rows([*stored.key_rows, planted]), *rows])
    assert request(step) == "apply UPDATE_SESSION, INSERT_EVENT, UPDATE_USER, UPDATE_WITNESS"
    assert isinstance(step, Apply)
    sealed = [value for change in step.changes for value in change.parameters.values()]
    records = [value for value in sealed if isinstance(value, bytes) and value[:3] == b"AKS"]
    assert len(records) == 6  # two of them as they are stored now
    assert {unpack(record)[1] for record in records} == {stored.key_rows[1].id}


def test_key_that_the_row_does_not_name_encrypts_nothing_from_the_cache_either() -> None:
    stored = Stored()
    planted = stored.read_keys().new(WHO.user_tag)
    keys = StagedKeys(stored.keys)
    keys.load([*stored.key_rows, planted], marks())
    sealed_rows.open_user(stored.attempt(keys=keys), stored.found())
    keys.publish()
    attempt = stored.knowing_session()._replace(keys=StagedKeys(stored.keys))
    step = next(steps_of(append(stored), attempt))
    record: Any = change_in(step, "INSERT_EVENT").parameters["event"]
    assert unpack(record) == (1, stored.key_rows[1].id)


def test_append_that_reads_is_rejected_where_the_session_row_is_of_another_copy() -> None:
    """Nothing is appended to it: the session could not be read any more."""
    stored = Stored()
    rows = stored.with_rows_of(stored.another_copy(), SESSION)
    cache = RowCache(10)
    found = Found(rows)
    sealed_rows.open_session(stored.knowing(cache), found, stored.user)  # a read without events
    steps = steps_of(append(stored), stored.knowing(cache))
    assert request(next(steps)) == READ_LAST
    with pytest.raises(TamperedError, match="another copy of the database"):
        steps.send([row for row in rows if row[0] != EVENT or row[1] == 1])


# --- a new data key for an owner -----------------------------------------------------------------

WHOSE = {"app": (0, WHO.app_tag), "user": (1, WHO.user_tag)}
LATER = 2**60  # microseconds: after the keys of `Stored` were made


def renewing(
    stored: Stored, whose: str, since: int = LATER, attempt: Attempt | None = None
) -> tuple[RenewKey, Any]:
    operation = RenewKey(WHO, since, of_user=whose == "user")
    attempt = attempt or stored.attempt(keys=StagedKeys(stored.keys))
    return operation, steps_of(operation, attempt)


def named_by(stored: Stored, step: Any, whose: str, keys: StagedKeys) -> tuple[int, ...]:
    """The key ids in the owner's row as *step* writes it."""
    row = change_in(step, f"UPDATE_{whose.upper()}").parameters
    witness = change_in(step, "UPDATE_WITNESS").parameters
    rows = [raw(WITNESS, [witness["number"]], WHOSE[whose][1], witness["seal"])]
    if whose == "app":
        rows.append(raw(APP, [1, row["version"]], WHO.app_tag, b"clinic", row["state"]))
        owner = sealed_rows.open_app(stored.attempt(keys=keys), Found(rows))
    else:
        rows.append(raw(USER, [2, 1, row["version"]], WHO.user_tag, row["state"]))
        owner = sealed_rows.open_user(stored.attempt(keys=keys), Found(rows))
    assert owner is not None
    return owner.key_ids


@pytest.mark.parametrize("whose", WHOSE)
def test_renewed_key_is_the_only_one_that_the_row_names(whose: str) -> None:
    first = Stored()
    theirs = other_backends(first).new(WHOSE[whose][1])
    stored = first.another_copy(more_key_ids=(theirs.id,))
    keys = StagedKeys(stored.keys)
    _, steps = renewing(stored, whose, attempt=stored.attempt(keys=keys))
    assert request(next(steps)) == "read OWNERS with keys"
    step = steps.send([*key_rows([*stored.key_rows, theirs]), *stored.rows()])
    assert request(step) == f"apply INSERT_KEY, UPDATE_{whose.upper()}, UPDATE_WITNESS"
    new = change_in(step, "INSERT_KEY").parameters
    assert (new["owner"], new["generation"]) == (WHOSE[whose][1], 2)
    assert cast(int, new["created_at"]) >= LATER
    assert named_by(stored, step, whose, keys) == (new["id"],)
    assert result_of(steps, True) is True


@pytest.mark.parametrize("whose", WHOSE)
def test_key_that_was_renewed_before_is_not_renewed_again(whose: str) -> None:
    stored = Stored()
    _, steps = renewing(stored, whose, since=0)
    next(steps)
    assert result_of(steps, stored.rows(keys=True)) is True


@pytest.mark.parametrize("whose", WHOSE)
def test_row_that_names_an_older_key_beside_a_new_one_is_renewed(whose: str) -> None:
    """Another service has made the new key since the rotation began; the older one must go."""
    first, (at, tag) = Stored(), WHOSE[whose]
    keys = other_backends(first)
    new = keys.new(tag, LATER)
    stored = first.another_copy(more_key_ids=(new.id,))
    ours = StagedKeys(data_keys(first.keys.keyring, fernet=True))
    _, steps = renewing(stored, whose, attempt=stored.attempt(keys=ours))
    next(steps)
    step = steps.send([*key_rows([*stored.key_rows, new]), *stored.rows()])
    assert request(step) == f"apply UPDATE_{whose.upper()}, UPDATE_WITNESS"
    assert named_by(stored, step, whose, ours) == (new.id,)
    assert stored.key_rows[at].id not in named_by(stored, step, whose, ours)


def test_new_key_that_is_older_than_a_planted_one_is_renewed() -> None:
    stored = Stored()
    planted = stored.read_keys().new(WHO.user_tag)
    _, steps = renewing(stored, "user", since=0)
    next(steps)
    step = steps.send([*key_rows([*stored.key_rows, planted]), *stored.rows()])
    assert change_in(step, "INSERT_KEY").parameters["generation"] == 2


@pytest.mark.parametrize("whose", WHOSE)
def test_owner_who_is_gone_gets_no_key(whose: str) -> None:
    stored = Stored()
    operation, steps = renewing(stored, whose)
    next(steps)
    assert result_of(steps, key_rows(stored.key_rows)) is False
    assert not operation.created


@pytest.mark.parametrize("whose", WHOSE)
def test_renewed_key_is_stored_in_the_key_database_first(whose: str) -> None:
    stored, (at, tag) = Stored(), WHOSE[whose]
    attempt = stored.attempt(source=KeySource.KEY_DATABASE)
    operation, steps = renewing(stored, whose, attempt=attempt)
    assert request(next(steps)) == "read OWNERS"
    with pytest.raises(NeedsDataKey) as needed:
        steps.send(stored.rows())
    assert (needed.value.owner, needed.value.not_before) == (tag, LATER)

    new = attempt.keys.new(tag, LATER)
    keys = StagedKeys(stored.keys, created=[new.id])
    keys.load([*stored.key_rows, new], marks())
    again = stored.attempt(keys=keys, source=KeySource.KEY_DATABASE)
    steps = steps_of(operation, again)
    next(steps)
    step = steps.send(stored.rows())
    assert request(step) == f"apply UPDATE_{whose.upper()}, UPDATE_WITNESS"
    assert named_by(stored, step, whose, keys) == (new.id,)
    assert stored.key_rows[at].id != new.id


def test_renewed_key_of_an_owner_who_went_meanwhile_is_reported() -> None:
    """It is in the key database, and no row names it: the rotation deletes it."""
    stored = Stored()
    keys = StagedKeys(stored.keys, created=[5])
    keys.load(stored.key_rows, marks())
    attempt = stored.attempt(keys=keys, source=KeySource.KEY_DATABASE)
    operation, steps = renewing(stored, "user", attempt=attempt)
    next(steps)
    assert result_of(steps, []) is False
    assert operation.stored_keys == [5]


def test_key_in_the_key_database_that_no_row_names_is_not_taken_up() -> None:
    """A rotation that was killed may have stored it; or an attacker has inserted it."""
    stored = Stored()
    orphan = stored.read_keys().new(WHO.user_tag, LATER)
    keys = StagedKeys(stored.keys)
    keys.load([*stored.key_rows, orphan], marks())
    attempt = stored.attempt(keys=keys, source=KeySource.KEY_DATABASE)
    _, steps = renewing(stored, "user", attempt=attempt)
    next(steps)
    with pytest.raises(NeedsDataKey):
        steps.send(stored.rows())


# --- delete --------------------------------------------------------------------------------------


def test_deleting_a_known_session_needs_no_read() -> None:
    stored = Stored()
    steps = steps_of(DeleteSession(WHO), stored.knowing_session())
    assert request(next(steps)) == "apply DELETE_KNOWN_SESSION, DELETE_EVENTS, DELETE_WITNESS"
    assert result_of(steps, True) is True


def test_deleting_a_known_session_that_has_changed_reads_it() -> None:
    stored = Stored()
    steps = steps_of(DeleteSession(WHO), stored.knowing_session())
    next(steps)
    assert request(steps.send(False)) == READ
    step = steps.send(stored.rows(without=NO_EVENTS))
    assert request(step) == "apply DELETE_SESSION, DELETE_EVENTS, DELETE_WITNESS"
    assert change_in(step, "DELETE_SESSION").parameters == {"at_id": 3, "at_revision": 2}


def test_deleting_a_session_deletes_its_snapshot() -> None:
    stored = Stored(snapshot=b"{}")
    steps = steps_of(DeleteSession(WHO), stored.knowing_session())
    assert request(next(steps)) == (
        "apply DELETE_KNOWN_SESSION, DELETE_EVENTS, DELETE_WITNESS, DELETE_SNAPSHOT"
    )


def test_events_go_in_any_number_and_all_else_must_be_there() -> None:
    stored = Stored()
    step = next(steps_of(DeleteSession(WHO), stored.knowing_session()))
    assert isinstance(step, Apply)
    assert [change.must_match_row for change in step.changes] == [True, False, True]


def test_deleting_what_is_not_there_changes_nothing() -> None:
    stored = Stored()
    steps = steps_of(DeleteSession(WHO), reading(stored))
    next(steps)
    assert result_of(steps, owners_only(stored)) is False


@pytest.mark.parametrize(("before", "deleted"), [(102, False), (103, True)])
def test_only_a_session_that_meets_the_condition_is_deleted(before: int, deleted: bool) -> None:
    stored = Stored(events=2)  # last updated at 102
    condition = lambda session: session.updated_at < before  # noqa: E731
    steps = steps_of(DeleteSession(WHO, condition), reading(stored))
    next(steps)
    if deleted:
        assert request(steps.send(stored.rows(without=NO_EVENTS))).startswith(
            "apply DELETE_SESSION"
        )
        assert result_of(steps, True) is True
    else:
        assert result_of(steps, stored.rows(without=NO_EVENTS)) is False


def test_deletion_that_meets_a_changed_row_after_its_read_is_a_conflict() -> None:
    """An event was appended meanwhile: it would be left behind."""
    stored = Stored()
    steps = steps_of(DeleteSession(WHO), reading(stored))
    next(steps)
    steps.send(stored.rows(without=NO_EVENTS))
    with pytest.raises(Conflict):
        steps.send(False)


def test_tampered_session_is_not_deleted() -> None:
    stored = Stored()
    steps = steps_of(DeleteSession(WHO), reading(stored))
    next(steps)
    rows = [row for row in stored.replaced(SESSION, 6, 999) if row[0] != EVENT]
    with pytest.raises(TamperedError):
        steps.send(rows)
