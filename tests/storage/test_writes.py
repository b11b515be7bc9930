"""Each write, driven by hand: what it asks of the database, in which order, and what it concludes.

`steps(...)` is the transaction, a generator: `next` gives its first request, `send` answers it.
"""

from typing import Any

import pytest

from adk_secure_sessions.db.protocol import Apply, Conflict
from adk_secure_sessions.errors import Reason, TamperedError, UnknownKeyError
from adk_secure_sessions.formats.records import unpack
from adk_secure_sessions.formats.states import loads
from adk_secure_sessions.keys.data_keys import StagedKeys
from adk_secure_sessions.storage import bindings
from adk_secure_sessions.storage.bindings import (
    NO_SNAPSHOT,
    Attempt,
    KeySource,
    NeedsDataKey,
    RowCache,
    StoredSession,
)
from adk_secure_sessions.storage.queries import Found
from adk_secure_sessions.storage.writes import (
    OVERLAY_LIMIT,
    AppendEvent,
    CreateSession,
    DeleteSession,
    DuplicateSession,
    Expected,
    MissingSession,
    NewEvent,
    StaleRevision,
)
from tests.storage.support import (
    APP,
    EVENT,
    SESSION,
    SNAPSHOT,
    USER,
    WHO,
    WITNESS,
    Stored,
    change_in,
    data_keys,
    key_row,
    keyring,
    raw,
    request,
    result_of,
)

READ, READ_WITH_KEYS = "read SESSION_WITHOUT_EVENTS", "read SESSION_WITHOUT_EVENTS with keys"
NO_EVENTS = [EVENT]


def event(**deltas: dict[str, Any]) -> NewEvent:
    """An event that changes the states named: app, user, session."""
    scopes = [deltas.get(scope, {}) for scope in ("app", "user", "session")]
    return NewEvent(b"the event", 500, *scopes)


def append(
    stored: Stored,
    new: NewEvent | None = None,
    *,
    known: StoredSession | None = None,
    expected: tuple[int, int] | None = None,
) -> AppendEvent:
    at = Expected(*(expected or (stored.session.id, stored.session.revision)))
    return AppendEvent(WHO, known, at, new or event(), lambda session: None)


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


def test_append_to_a_known_session_needs_no_read() -> None:
    stored = Stored(events=2)
    steps = append(stored, known=stored.session).steps(stored.knowing())
    step = next(steps)
    assert request(step) == "apply UPDATE_SESSION, INSERT_EVENT"
    row = change_in(step, "UPDATE_SESSION").parameters
    assert (row["at_revision"], row["revision"], row["updated_at"]) == (2, 3, 500)
    assert row["at_state"] == stored.session.sealed
    session = result_of(steps, True)
    assert (session.revision, session.updated_at, session.sealed) == (3, 500, row["state"])


def test_append_stores_the_event_bound_to_its_place_in_the_history() -> None:
    stored = Stored(events=2)
    attempt = stored.knowing()
    step = next(append(stored, known=stored.session).steps(attempt))
    row = change_in(step, "INSERT_EVENT").parameters
    assert (row["session_row"], row["seq"], row["time"]) == (3, 2, 500)
    record: Any = row["event"]
    assert attempt.keys.open(WHO.user_tag, bindings.event_context(WHO, 3, 2, 500), record) == (
        b"the event"
    )


def test_append_to_a_known_session_that_has_changed_reads_it() -> None:
    stored = Stored(events=2)
    older = bindings.seal_session(stored.attempt(), stored.session)
    known = stored.session._replace(sealed=older)
    steps = append(stored, known=known).steps(stored.knowing())
    assert request(next(steps)) == "apply UPDATE_SESSION, INSERT_EVENT"
    assert request(steps.send(False)) == READ
    step = steps.send(stored.rows(without=NO_EVENTS))
    assert request(step) == "apply UPDATE_SESSION, INSERT_EVENT"
    assert change_in(step, "UPDATE_SESSION").parameters["at_state"] == stored.session.sealed
    assert result_of(steps, True).revision == 3


def test_append_reads_a_session_that_is_not_known() -> None:
    stored = Stored()
    steps = append(stored).steps(stored.knowing())
    assert request(next(steps)) == READ


def test_append_reads_the_keys_with_the_rows_where_they_are_not_known() -> None:
    stored = Stored()
    attempt = stored.attempt(keys=StagedKeys(stored.keys))
    steps = append(stored, known=stored.session).steps(attempt)
    assert request(next(steps)) == READ_WITH_KEYS
    step = steps.send(stored.rows(without=NO_EVENTS, keys=True))
    assert request(step) == "apply UPDATE_SESSION, INSERT_EVENT"


def test_second_attempt_at_an_append_trusts_nothing_that_is_remembered() -> None:
    stored = Stored()
    steps = append(stored, known=stored.session).steps(stored.knowing()._replace(is_first=False))
    assert request(next(steps)) == READ


def test_append_that_meets_a_changed_row_after_its_read_is_a_conflict() -> None:
    stored = Stored()
    steps = append(stored).steps(reading(stored))
    next(steps)
    steps.send(stored.rows(without=NO_EVENTS))
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
    steps = append(stored, event(**{scope: {"new": 1} for scope in scopes})).steps(reading(stored))
    assert request(next(steps)) == READ
    assert request(steps.send(stored.rows(without=NO_EVENTS))) == f"apply {changes}"


@pytest.mark.parametrize("scope", ["app", "user"])
def test_known_session_is_read_where_a_shared_state_changes(scope: str) -> None:
    """That state may have been changed by anybody."""
    stored = Stored()
    new = event(**{scope: {"new": 1}})
    steps = append(stored, new, known=stored.session).steps(stored.knowing())
    assert request(next(steps)) == READ


@pytest.mark.parametrize(("scope", "version"), [("app", 5), ("user", 7)])
def test_changed_scope_goes_to_its_next_version_with_its_witness(scope: str, version: int) -> None:
    stored = Stored()
    steps = append(stored, event(**{scope: {"new": 1}})).steps(reading(stored))
    next(steps)
    step = steps.send(stored.rows(without=NO_EVENTS))
    row = change_in(step, f"UPDATE_{scope.upper()}").parameters
    witness = change_in(step, "UPDATE_WITNESS").parameters
    assert (row["at_version"], row["version"]) == (version, version + 1)
    assert (witness["at_number"], witness["number"]) == (version, version + 1)


def test_append_to_no_session_reports_that_it_is_missing() -> None:
    stored = Stored()
    steps = append(stored).steps(reading(stored))
    next(steps)
    with pytest.raises(MissingSession):
        steps.send([])


@pytest.mark.parametrize(
    "expected", [(3, 1), (3, 3), (4, 2)], ids=["older", "newer", "another row"]
)
def test_append_at_another_revision_or_row_is_stale(expected: tuple[int, int]) -> None:
    stored = Stored(events=2)
    steps = append(stored, expected=expected).steps(reading(stored))
    next(steps)
    with pytest.raises(StaleRevision):
        steps.send(stored.rows(without=NO_EVENTS))


def lost_append(stored: Stored) -> tuple[AppendEvent, Apply, list[Any]]:
    """An append that was sent and got no answer; what it sent, and the rows if it was stored."""
    operation = append(stored, known=stored.session)
    sent = next(operation.steps(stored.knowing()))
    assert isinstance(sent, Apply)
    row = change_in(sent, "UPDATE_SESSION").parameters
    numbers = [3, 2, row["revision"], row["base_revision"], 100, row["updated_at"], 2]
    rows = stored.rows(without=[EVENT, SESSION])
    return operation, sent, [*rows, raw(SESSION, numbers, WHO.session_tag, row["state"])]


def test_append_whose_answer_was_lost_finds_its_own_event_and_is_not_stale() -> None:
    stored = Stored(events=2)
    operation, sent, rows = lost_append(stored)
    steps = operation.steps(reading(stored))
    assert request(next(steps)) == READ
    assert request(steps.send(rows)) == "read EVENT_AT"
    event = change_in(sent, "INSERT_EVENT").parameters["event"]
    session = result_of(steps, [raw(EVENT, [2, 500], event)])
    assert session.revision == 3
    assert session.sealed == change_in(sent, "UPDATE_SESSION").parameters["state"]


def test_append_whose_answer_was_lost_is_stale_where_another_event_is_stored() -> None:
    stored = Stored(events=2)
    operation, _, rows = lost_append(stored)
    steps = operation.steps(reading(stored))
    next(steps)
    steps.send(rows)
    with pytest.raises(StaleRevision):
        steps.send([raw(EVENT, [2, 500], b"somebody else's event")])


def test_append_to_a_tampered_session_is_rejected_before_anything_is_changed() -> None:
    stored = Stored()
    steps = append(stored).steps(reading(stored))
    next(steps)
    rows = stored.replaced(SESSION, 6, 999)
    with pytest.raises(TamperedError):
        steps.send([row for row in rows if row[0] != EVENT])


def test_append_of_app_state_is_rejected_where_the_apps_row_was_removed() -> None:
    stored = Stored()
    steps = append(stored, event(app={"new": 1})).steps(reading(stored))
    next(steps)
    rows = [row for row in stored.rows(without=[EVENT, APP]) if row[8] != WHO.app_tag]
    with pytest.raises(TamperedError, match="its app's row was removed"):
        steps.send(rows)


# --- the overlay over a snapshot -----------------------------------------------------------------

FULL = {"large": "x" * OVERLAY_LIMIT}


def test_small_change_of_state_goes_into_the_overlay() -> None:
    stored = Stored()
    attempt = stored.knowing()
    steps = append(stored, event(session={"new": 1}), known=stored.session).steps(attempt)
    assert request(next(steps)) == "apply UPDATE_SESSION, INSERT_EVENT"
    session = result_of(steps, True)
    assert loads(session.overlay) == {"s": 1, "new": 1}
    assert session.base_revision == NO_SNAPSHOT


@pytest.mark.parametrize("more", [0, 1], ids=["as large as allowed", "one byte more"])
def test_overlay_is_merged_into_a_snapshot_once_it_is_larger_than_the_limit(more: int) -> None:
    stored = Stored()
    rest = len(b'{"s":1,"k":""}')
    new = event(session={"k": "x" * (OVERLAY_LIMIT - rest + more)})
    steps = append(stored, new, known=stored.session).steps(stored.knowing())
    snapshots = "INSERT_SNAPSHOT, " if more else ""
    assert request(next(steps)) == f"apply UPDATE_SESSION, {snapshots}INSERT_EVENT"


def test_first_snapshot_holds_the_whole_state_under_an_empty_overlay() -> None:
    stored = Stored(events=2)
    attempt = stored.knowing()
    steps = append(stored, event(session=FULL), known=stored.session).steps(attempt)
    step = next(steps)
    row = change_in(step, "INSERT_SNAPSHOT").parameters
    assert (row["session_row"], row["revision"]) == (3, 3)
    sealed: Any = row["state"]
    snapshot = attempt.keys.open(WHO.user_tag, bindings.snapshot_context(WHO, 3, 3), sealed)
    assert loads(snapshot) == {"s": 1} | FULL
    session = result_of(steps, True)
    assert (session.overlay, session.base_revision) == (b"{}", 3)
    assert session.snapshot is None, "a snapshot may be large: it is not kept in memory"


def test_next_snapshot_replaces_the_one_before() -> None:
    stored = Stored(events=2, snapshot=b'{"old":1,"s":0}')
    attempt = reading(stored)
    steps = append(stored, event(session=FULL)).steps(attempt)
    next(steps)
    step = steps.send(stored.rows(without=NO_EVENTS))
    assert request(step) == "apply UPDATE_SESSION, UPDATE_SNAPSHOT, INSERT_EVENT"
    row = change_in(step, "UPDATE_SNAPSHOT").parameters
    assert (row["at_id"], row["at_revision"], row["revision"]) == (3, 0, 3)
    sealed: Any = row["state"]
    snapshot = attempt.keys.open(WHO.user_tag, bindings.snapshot_context(WHO, 3, 3), sealed)
    assert loads(snapshot) == {"old": 1, "s": 1} | FULL


def test_known_session_is_read_where_its_snapshot_has_to_be_merged() -> None:
    stored = Stored(snapshot=b'{"old":1}')
    known = stored.session._replace(snapshot=None)
    steps = append(stored, event(session=FULL), known=known).steps(stored.knowing())
    assert request(next(steps)) == READ
    small = append(stored, event(session={"k": 1}), known=known).steps(stored.knowing())
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
    steps = create(app={"a": 1}, user={"u": 1}).steps(strangers(stored))
    assert request(next(steps)) == READ_WITH_KEYS
    assert request(steps.send([])) == NEW_OWNERS
    created = result_of(steps, True)
    assert (created.app.state, created.user.state) == (b'{"a":1}', b'{"u":1}')
    assert (created.session.user_row, created.user.app_row) == (created.user.id, created.app.id)
    assert created.session.revision == 0


def test_created_rows_open_again() -> None:
    stored = Stored()
    attempt = strangers(stored)
    steps = create().steps(attempt)
    next(steps)
    step = steps.send([])
    assert isinstance(step, Apply)
    row = change_in(step, "INSERT_SESSION").parameters
    numbers = [row[name] for name in ("id", "user_row", "revision", "base_revision")]
    context = bindings.session_context("clinic", "alice", WHO.session_tag, *numbers, 500, 500)  # type: ignore[arg-type]
    record: Any = row["state"]
    assert attempt.keys.open(WHO.user_tag, context, record).endswith(b'{"s":1}')


def owners_only(stored: Stored, **more: Any) -> list[Any]:
    """The rows of the app and the user, but none of the session."""
    rows = stored.rows(without=[EVENT, SESSION, SNAPSHOT], **more)
    return [row for row in rows if not (row[0] == WITNESS and row[8] == WHO.session_tag)]


def test_session_of_an_existing_user_relies_on_the_users_row() -> None:
    stored = Stored()
    steps = create().steps(reading(stored))
    next(steps)
    step = steps.send(owners_only(stored))
    assert request(step) == "apply INSERT_SESSION_OF_USER, INSERT_WITNESS"
    assert change_in(step, "INSERT_SESSION_OF_USER").parameters["user_version"] == 7


def test_session_that_changes_shared_states_updates_their_rows() -> None:
    stored = Stored()
    steps = create(app={"a": 2}, user={"u": 2}).steps(reading(stored))
    next(steps)
    assert request(steps.send(owners_only(stored))) == (
        "apply UPDATE_APP, UPDATE_WITNESS, UPDATE_USER, UPDATE_WITNESS, INSERT_SESSION, "
        "INSERT_WITNESS"
    )


def remembering(stored: Stored) -> Attempt:
    """An attempt of a process that has opened the app's and the user's rows before."""
    cache = RowCache(10)
    found = Found(owners_only(stored))
    bindings.open_app(stored.attempt(cache=cache), found)
    bindings.open_user(stored.attempt(cache=cache), found)
    return stored.knowing(cache)


def test_session_of_owners_that_are_remembered_needs_no_read() -> None:
    stored = Stored()
    steps = create().steps(remembering(stored))
    step = next(steps)
    assert request(step) == "apply INSERT_SESSION_OF_KNOWN, INSERT_WITNESS"
    guard = change_in(step, "INSERT_SESSION_OF_KNOWN").parameters
    assert (guard["app_version"], guard["user_version"]) == (5, 7)
    assert (guard["app_witness_number"], guard["user_witness_number"]) == (5, 7)
    assert result_of(steps, True).user == stored.user


def test_session_of_owners_that_have_changed_since_reads_them() -> None:
    stored = Stored()
    steps = create().steps(remembering(stored))
    next(steps)
    assert request(steps.send(False)) == READ
    assert request(steps.send(owners_only(stored))) == (
        "apply INSERT_SESSION_OF_USER, INSERT_WITNESS"
    )


@pytest.mark.parametrize("scope", ["app", "user"])
def test_remembered_owners_are_read_where_their_state_changes(scope: str) -> None:
    stored = Stored()
    operation = create(app={"new": 1}) if scope == "app" else create(user={"new": 1})
    assert request(next(operation.steps(remembering(stored)))) == READ


def test_second_attempt_at_a_creation_reads_the_owners() -> None:
    stored = Stored()
    again = remembering(stored)._replace(is_first=False)
    assert request(next(create().steps(again))) == READ


def test_session_id_that_is_taken_is_reported() -> None:
    stored = Stored()
    steps = create().steps(reading(stored))
    next(steps)
    with pytest.raises(DuplicateSession):
        steps.send(stored.rows(without=NO_EVENTS))


def test_creation_whose_answer_was_lost_finds_its_own_session_and_is_no_duplicate() -> None:
    stored = Stored()
    operation = create()
    attempt = remembering(stored)
    step = next(operation.steps(attempt))
    row = change_in(step, "INSERT_SESSION_OF_KNOWN").parameters
    witness = change_in(step, "INSERT_WITNESS").parameters
    numbers = [row[name] for name in ("id", "user_row", "revision", "base_revision")]
    there = [
        raw(SESSION, [*numbers, 500, 500, -1], WHO.session_tag, row["state"]),
        raw(WITNESS, [witness["number"]], witness["tag"], witness["seal"]),
    ]
    steps = operation.steps(reading(stored))
    assert request(next(steps)) == READ
    created = result_of(steps, [*owners_only(stored), *there])
    assert (created.session.id, created.user.id) == (row["id"], stored.user.id)


def test_large_first_state_is_a_snapshot_from_the_start() -> None:
    stored = Stored()
    attempt = remembering(stored)
    step = next(create(b'{"large":"' + b"x" * OVERLAY_LIMIT + b'"}').steps(attempt))
    assert request(step) == "apply INSERT_SESSION_OF_KNOWN, INSERT_SNAPSHOT, INSERT_WITNESS"
    assert change_in(step, "INSERT_SESSION_OF_KNOWN").parameters["base_revision"] == 0


def test_user_of_another_apps_row_gets_no_session() -> None:
    """An attacker who can write may have changed which row the app's name leads to."""
    stored = Stored()
    moved = stored.user._replace(app_row=99)
    sealed = bindings.seal_user(stored.attempt(), moved)
    rows = [row for row in owners_only(stored) if row[0] != USER]
    rows.append(raw(USER, [2, 99, 7], WHO.user_tag, sealed))
    steps = create().steps(reading(stored))
    next(steps)
    with pytest.raises(TamperedError, match="another app's row") as rejected:
        steps.send(rows)
    assert rejected.value.reason is Reason.WRONG_OWNER


# --- which data key encrypts ---------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 1], ids=["of the app", "of the user"])
def test_data_key_without_its_owners_row_proves_that_the_row_was_removed(kept: int) -> None:
    stored = Stored()
    steps = create().steps(strangers(stored))
    next(steps)
    with pytest.raises(TamperedError, match="its data key is still stored") as rejected:
        steps.send([key_row(stored.key_rows[kept])])
    assert rejected.value.reason is Reason.MISSING


def test_new_owner_in_a_key_database_needs_its_key_stored_first() -> None:
    stored = Stored()
    attempt = strangers(stored)._replace(key_source=KeySource.KEY_DATABASE)
    steps = create().steps(attempt)
    assert request(next(steps)) == READ
    with pytest.raises(NeedsDataKey) as needed:
        steps.send([])
    assert needed.value.owner == WHO.app_tag


def test_key_in_a_key_database_may_wait_for_its_owners_row() -> None:
    """A process may have ended between the two writes."""
    stored = Stored()
    steps = create().steps(stored.attempt(source=KeySource.KEY_DATABASE))
    next(steps)
    assert request(steps.send([])) == NEW_OWNERS.replace("INSERT_KEY, ", "")


def test_nothing_is_made_for_an_owner_whose_keys_were_not_read() -> None:
    stored = Stored()
    attempt = strangers(stored)._replace(key_source=KeySource.CACHE)
    steps = create().steps(attempt)
    next(steps)
    with pytest.raises(UnknownKeyError, match="read again"):
        steps.send([])


def other_backends(stored: Stored) -> StagedKeys:
    """The keys as a process sees them whose writing backend is another than the rows'."""
    keys = StagedKeys(data_keys(stored.keys.keyring, fernet=True))
    keys.load(stored.key_rows)
    return keys


def test_owner_without_a_key_of_the_writing_backend_gets_the_next_generation() -> None:
    stored = Stored()
    attempt = stored.attempt(keys=other_backends(stored))
    steps = append(stored).steps(attempt)
    next(steps)
    step = steps.send(stored.rows(without=NO_EVENTS, keys=True))
    assert request(step) == "apply UPDATE_SESSION, INSERT_EVENT, INSERT_KEY"
    made = change_in(step, "INSERT_KEY").parameters
    assert (made["owner"], made["generation"], made["backend_id"]) == (WHO.user_tag, 1, 2)
    record: Any = change_in(step, "INSERT_EVENT").parameters["event"]
    assert unpack(record) == (2, made["id"])


def test_key_that_is_older_than_a_records_is_locked_while_it_encrypts() -> None:
    """Another process's backend has made a newer one; ours must not be retired meanwhile."""
    stored = Stored()
    ours = stored.key_rows
    keys = other_backends(stored)
    theirs = keys.new(WHO.user_tag)
    later = stored.attempt(keys=keys)
    resealed = bindings.seal_session(later, stored.session)
    rows = stored.replaced(SESSION, 9, resealed)
    attempt = stored.attempt(keys=StagedKeys(stored.keys))
    steps = append(stored).steps(attempt)
    next(steps)
    key_rows = [key_row(row) for row in [*ours, theirs]]
    step = steps.send([*key_rows, *(row for row in rows if row[0] != EVENT)])
    assert request(step) == "apply UPDATE_SESSION, INSERT_EVENT, HOLD_KEY"
    assert change_in(step, "HOLD_KEY").parameters == {"at_id": ours[1].id, "generation": 0}


def test_known_session_under_a_newer_key_is_read_with_its_keys_before_it_is_written() -> None:
    stored = Stored()
    keys = StagedKeys(stored.keys)
    keys.load(stored.key_rows)
    keys.new(WHO.user_tag)
    newer = stored.session._replace(
        sealed=bindings.seal_session(stored.attempt(keys=keys), stored.session)
    )
    steps = append(stored, known=newer).steps(stored.knowing())
    assert request(next(steps)) == READ


def test_new_data_key_is_stored_only_under_the_keyring_that_was_read() -> None:
    stored = Stored()
    steps = create().steps(strangers(stored))
    next(steps)
    step = steps.send([])
    assert isinstance(step, Apply)
    guard = step.changes[0].parameters
    ring = keyring()
    assert (guard["master_id"], guard["masters"]) == (ring.current_id, ring.size)


# --- delete --------------------------------------------------------------------------------------


def test_deleting_a_known_session_needs_no_read() -> None:
    stored = Stored()
    steps = DeleteSession(WHO, stored.session).steps(stored.knowing())
    assert request(next(steps)) == "apply DELETE_KNOWN_SESSION, DELETE_EVENTS, DELETE_WITNESS"
    assert result_of(steps, True) is True


def test_deleting_a_known_session_that_has_changed_reads_it() -> None:
    stored = Stored()
    steps = DeleteSession(WHO, stored.session).steps(stored.knowing())
    next(steps)
    assert request(steps.send(False)) == READ
    step = steps.send(stored.rows(without=NO_EVENTS))
    assert request(step) == "apply DELETE_SESSION, DELETE_EVENTS, DELETE_WITNESS"
    assert change_in(step, "DELETE_SESSION").parameters == {"at_id": 3, "at_revision": 2}


def test_deleting_a_session_deletes_its_snapshot() -> None:
    stored = Stored(snapshot=b"{}")
    steps = DeleteSession(WHO, stored.session).steps(stored.knowing())
    assert request(next(steps)) == (
        "apply DELETE_KNOWN_SESSION, DELETE_EVENTS, DELETE_WITNESS, DELETE_SNAPSHOT"
    )


def test_events_go_in_any_number_and_all_else_must_be_there() -> None:
    stored = Stored()
    step = next(DeleteSession(WHO, stored.session).steps(stored.knowing()))
    assert isinstance(step, Apply)
    assert [change.must_match_row for change in step.changes] == [True, False, True]


def test_deleting_what_is_not_there_changes_nothing() -> None:
    stored = Stored()
    steps = DeleteSession(WHO, None).steps(reading(stored))
    next(steps)
    assert result_of(steps, owners_only(stored)) is False


@pytest.mark.parametrize(("before", "deleted"), [(102, False), (103, True)])
def test_only_a_session_that_was_last_updated_earlier_is_deleted(
    before: int, deleted: bool
) -> None:
    stored = Stored(events=2)  # last updated at 102
    steps = DeleteSession(WHO, None, before).steps(reading(stored))
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
    steps = DeleteSession(WHO, None).steps(reading(stored))
    next(steps)
    steps.send(stored.rows(without=NO_EVENTS))
    with pytest.raises(Conflict):
        steps.send(False)


def test_tampered_session_is_not_deleted() -> None:
    stored = Stored()
    steps = DeleteSession(WHO, None).steps(reading(stored))
    next(steps)
    rows = [row for row in stored.replaced(SESSION, 6, 999) if row[0] != EVENT]
    with pytest.raises(TamperedError):
        steps.send(rows)
